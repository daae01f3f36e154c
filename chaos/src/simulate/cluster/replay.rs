//! Faults that are given instead of drawn: those inflicted on a live cluster are repeated in a simulation.
//!
//! A replay file has a line of JSON for the cluster, and one for each fault, in the order in which they begin. Parts
//! and faults are named as in the trace of a simulation. `harvestfs chaos run --replay FILE` writes such a file.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::START;
use super::kind::FaultKind;
use super::part::Part;

/// The cluster on which the faults were inflicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Number of namenodes; 1 if it is missing.
    #[serde(default = "one")]
    pub namenodes: u16,
    /// Number of datanodes.
    pub datanodes: u16,
    /// Number of clients.
    pub clients: u16,
    /// Number of mounts.
    pub mounts: u16,
    /// How long clients worked, in milliseconds.
    pub length_ms: u64,
}

fn one() -> u16 {
    1
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Given {
    /// When it began, in milliseconds since clients began to work.
    pub at_ms: u64,
    /// The part that it affects, such as `datanode-0`.
    pub part: String,
    /// The kind of fault, such as `crash`. A kind that simulations do not have is skipped in a replay.
    pub fault: String,
    /// How long it lasts, in milliseconds.
    pub for_ms: u64,
}

/// The faults that were inflicted on a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// The cluster.
    pub shape: Shape,
    /// The faults, in the order in which they begin.
    pub faults: Vec<Given>,
}

impl Replay {
    /// Returns the replay as lines of JSON.
    ///
    /// # Errors
    /// Never, for the types that it contains.
    pub fn to_lines(&self) -> serde_json::Result<String> {
        let mut lines = serde_json::to_string(&self.shape)? + "\n";
        for fault in &self.faults {
            lines += &(serde_json::to_string(fault)? + "\n");
        }
        Ok(lines)
    }

    /// Parses lines of JSON.
    ///
    /// # Errors
    /// A message that says which line is wrong, and why.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut lines = (1..).zip(text.lines());
        let wrong = |number: usize, error: serde_json::Error| format!("line {number}: {error}");
        let (number, first) = lines.next().ok_or("it is empty")?;
        let shape: Shape = serde_json::from_str(first).map_err(|error| wrong(number, error))?;
        if shape.datanodes == 0 || shape.clients == 0 {
            return Err("line 1: a cluster has a datanode and a client at least".into());
        }
        if !matches!(shape.namenodes, 1 | 3 | 5) {
            return Err("line 1: a cluster has 1, 3 or 5 namenodes".into());
        }
        let mut faults = Vec::new();
        for (number, line) in lines {
            let fault: Given = serde_json::from_str(line).map_err(|error| wrong(number, error))?;
            faults.push(fault);
        }
        faults.sort_by_key(|fault| fault.at_ms);
        Ok(Self { shape, faults })
    }
}

/// Faults that have not begun.
pub struct Script(VecDeque<Given>);

impl Script {
    /// Creates a script of all these faults.
    pub fn new(faults: &[Given]) -> Self {
        Self(faults.to_vec().into())
    }

    /// The datanode that loses data permanently; the first one if there are several.
    pub fn weak(&self, datanodes: u8) -> Option<Part> {
        let parts: Vec<Part> = (0..datanodes).map(Part::Datanode).collect();
        let mut faults = self.0.iter().filter_map(|given| given.simulated(&parts));
        let loses = |kind| matches!(kind, FaultKind::Reimage | FaultKind::Rot);
        faults.find_map(|(kind, part, _)| loses(kind).then_some(part))
    }

    /// The kinds of the faults.
    pub fn kinds(&self) -> Vec<FaultKind> {
        self.0.iter().filter_map(Given::kind).collect()
    }

    /// Takes the next fault, if it is time for it.
    pub fn next(&mut self, now: Duration) -> Option<Given> {
        let first = self.0.front()?;
        if START + Duration::from_millis(first.at_ms) > now {
            return None;
        }
        self.0.pop_front()
    }
}

impl Given {
    fn kind(&self) -> Option<FaultKind> {
        let mut kinds = FaultKind::ALL.into_iter();
        kinds.find(|kind| kind.name() == self.fault)
    }

    /// The fault as a simulation of a cluster with these parts begins it; `None` if there is no such fault or part.
    pub fn simulated(&self, parts: &[Part]) -> Option<(FaultKind, Part, Duration)> {
        let kind = self.kind()?;
        let mut parts = parts.iter();
        let part = parts.find(|part| part.to_string() == self.part)?;
        Some((kind, *part, Duration::from_millis(self.for_ms)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        namenodes: 1,
        datanodes: 3,
        clients: 1,
        mounts: 0,
        length_ms: 9_000,
    };

    fn given(at_ms: u64, part: &str, fault: &str) -> Given {
        Given {
            at_ms,
            part: part.into(),
            fault: fault.into(),
            for_ms: 500,
        }
    }

    #[test]
    fn what_is_written_is_read_and_wrong_lines_are_named() {
        let faults = vec![
            given(10, "datanode-0", "crash"),
            given(20, "namenode", "hang"),
        ];
        let replay = Replay {
            shape: SHAPE,
            faults,
        };
        let lines = replay.to_lines().unwrap();
        assert_eq!(Replay::parse(&lines), Ok(replay));
        let first = lines.lines().next().unwrap();
        for (text, wanted) in [
            (String::new(), "it is empty"),
            (format!("{first}\n{{}}\n"), "line 2: missing field `at_ms`"),
            (first.replace("1", "0"), "line 1: a cluster has a datanode"),
            (
                first.replace("\"namenodes\":1", "\"namenodes\":2"),
                "line 1: a cluster has 1, 3 or 5",
            ),
        ] {
            let said = Replay::parse(&text).unwrap_err();
            assert!(said.starts_with(wanted), "{said}");
        }
    }

    #[test]
    fn faults_begin_in_time_and_what_is_not_simulated_is_none() {
        let lossy = [
            given(0, "datanode-0", "crash"),
            given(0, "datanode-2", "rot"),
        ];
        assert_eq!(Script::new(&lossy).weak(3), Some(Part::Datanode(2)));
        let faults = [given(10, "datanode-1", "crash"), given(20, "x", "crash")];
        let mut script = Script::new(&faults);
        assert_eq!(script.weak(3), None);
        let at = |ms| START + Duration::from_millis(ms);
        assert_eq!(script.next(at(9)), None);
        let parts = [Part::FIRST_NAMENODE, Part::Datanode(0), Part::Datanode(1)];
        let first = script.next(at(15)).unwrap().simulated(&parts);
        let lasts = Duration::from_millis(500);
        assert_eq!(first, Some((FaultKind::Crash, Part::Datanode(1), lasts)));
        assert_eq!(script.next(at(15)), None);
        assert_eq!(script.next(at(20)).unwrap().simulated(&parts), None);
        let unknown = given(0, "namenode", "slow-network");
        assert_eq!(unknown.simulated(&parts), None);
    }
}
