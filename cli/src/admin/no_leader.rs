//! That no namenode leads: which of them run, and what an operator can do about it.

use std::fmt;
use std::net::SocketAddr;

/// What helps then.
pub const ADVICE: &str = "start the others, and look at the logs of those that run. Only when most are lost for \
    good, or were put back to copies, stop what is left and have one go on alone, on its machine, with \
    `harvestfs admin namenode recover --accept-loss DIR`";

/// What a namenode that was asked does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It leads, and serves.
    Leads,
    /// It runs, and does not lead or does not reach the others.
    Runs,
    /// It is not reached.
    Away,
}

/// No namenode leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoLeader {
    /// Those that are known.
    pub namenodes: Vec<(SocketAddr, Standing)>,
    /// The one that others still take for the leader.
    pub awaited: Option<SocketAddr>,
}

impl NoLeader {
    /// What is wrong, without what to do.
    pub fn what(&self) -> String {
        let with = |standing| {
            let those = self.namenodes.iter().filter(|(_, it)| *it == standing);
            those.map(|(addr, _)| addr.to_string()).collect::<Vec<_>>()
        };
        let (running, away) = (with(Standing::Runs), with(Standing::Away));
        let mut text = "no namenode leads, and most of them have to work for that".to_owned();
        let named = [("which run", &running), ("which are not reached", &away)];
        let named = named.iter().filter(|(_, those)| !those.is_empty());
        let named: Vec<String> = named
            .map(|(which, those)| format!("{}, {}", those.join(", "), singular(which, those.len())))
            .collect();
        if !named.is_empty() {
            text.push_str(": known are ");
            text.push_str(&named.join(", and "));
        }
        if let Some(awaited) = self.awaited {
            text.push_str("; the one at ");
            text.push_str(&awaited.to_string());
            text.push_str(" led, as far as others know, and does not any more");
        }
        text
    }
}

fn singular(which: &str, count: usize) -> String {
    if count > 1 {
        return which.to_owned();
    }
    which.replace(" run", " runs").replace(" are ", " is ")
}

impl fmt::Display for NoLeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {ADVICE}", self.what())
    }
}

impl std::error::Error for NoLeader {}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn at(port: u16) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, port).into()
    }

    #[test]
    fn it_says_who_runs_who_does_not_and_what_to_do_and_contradicts_itself_nowhere() {
        let none = NoLeader {
            namenodes: vec![
                (at(1), Standing::Runs),
                (at(2), Standing::Away),
                (at(3), Standing::Away),
            ],
            awaited: Some(at(3)),
        };
        let text = none.to_string();
        for part in [
            "no namenode leads",
            "127.0.0.1:1, which runs",
            "127.0.0.1:2, 127.0.0.1:3, which are not reached",
            "127.0.0.1:3 led, as far as others know, and does not any more",
            "harvestfs admin namenode recover --accept-loss",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("does;") && !text.contains("; the one at 127.0.0.1:3 does"));
    }
}
