//! The lengths of pauses, and whether the goals were met.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::FaultKind;
use super::probe::{Operation, Wrong};

/// The longest pauses of one round, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Round {
    /// The longest lookup of a name.
    pub stat_ms: f64,
    /// The longest creation of a file, including the write and the sync.
    pub create_ms: f64,
    /// The longest write to an open file, including the sync.
    pub write_ms: f64,
    /// The longest read.
    pub read_ms: f64,
}

impl Round {
    pub(super) fn new(longest: [Duration; Operation::ALL.len()]) -> Self {
        let [stat_ms, create_ms, write_ms, read_ms] = longest.map(|it| it.as_secs_f64() * 1_000.0);
        Self {
            stat_ms,
            create_ms,
            write_ms,
            read_ms,
        }
    }

    /// The longest pause of one kind of operation, in milliseconds.
    #[must_use]
    pub fn of(&self, operation: Operation) -> f64 {
        match operation {
            Operation::Stat => self.stat_ms,
            Operation::Create => self.create_ms,
            Operation::Write => self.write_ms,
            Operation::Read => self.read_ms,
        }
    }

    /// The longest pause of all kinds of operations, in milliseconds.
    #[must_use]
    pub fn longest_ms(&self) -> f64 {
        let all = Operation::ALL.map(|operation| self.of(operation));
        all.into_iter().fold(0.0, f64::max)
    }
}

/// Quantiles by nearest rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    /// Half of the values are not larger.
    pub median: f64,
    /// Nine out of ten values are not larger.
    pub p90: f64,
    /// 99 out of a hundred values are not larger; with fewer than a hundred values, it is the largest.
    pub p99: f64,
    /// The largest value.
    pub max: f64,
}

impl Quantiles {
    /// Computes the quantiles; `None` if there are no values.
    #[must_use]
    pub fn new(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let max = *values.last()?;
        let at = |percent: usize| values[(values.len() * percent).div_ceil(100) - 1];
        Some(Self {
            median: at(50),
            p90: at(90),
            p99: at(99),
            max,
        })
    }
}

/// The result for one kind of fault.
#[derive(Clone, Debug, Serialize)]
pub struct FaultReport {
    /// The kind of fault.
    pub kind: FaultKind,
    /// The longest pauses of each round.
    pub rounds: Vec<Round>,
    /// Number of operations of the program.
    pub operations: u64,
    /// Errors that the program saw.
    pub errors: Wrong,
    /// Number of names and records whose sync returned.
    pub looked_for: u64,
    /// Names and records that were missing or wrong at the end.
    pub missing: Wrong,
    /// Namenodes that ended on their own when they should not have: no program notices, but it is a bug.
    pub ended: Wrong,
}

impl FaultReport {
    /// Quantiles of the longest pause of each round, in milliseconds.
    #[must_use]
    pub fn pauses_ms(&self) -> Option<Quantiles> {
        Quantiles::new(self.rounds.iter().map(Round::longest_ms))
    }

    /// The goal for pauses, in words, and whether it was met.
    fn goal(&self) -> Option<(&'static str, bool)> {
        let it = self.pauses_ms()?;
        Some(match self.kind {
            FaultKind::Kill | FaultKind::Disk => (
                "median <= 500 ms, p99 <= 1000 ms",
                it.median <= 500.0 && it.p99 <= 1_000.0,
            ),
            FaultKind::Hang | FaultKind::Partition => ("p99 <= 2000 ms", it.p99 <= 2_000.0),
            FaultKind::Transfer => ("p99 <= 100 ms", it.p99 <= 100.0),
        })
    }
}

/// The results of all kinds of faults.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The seed, which decided when each fault began.
    pub seed: u64,
    /// The kinds whose measurement was completed.
    pub faults: Vec<FaultReport>,
    /// Why the measurement of the next kind was not completed; `None` if all were.
    pub error: Option<String>,
}

impl Report {
    /// Whether everything was measured and passed.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.error.is_none() && self.faults_passed()
    }

    /// Whether in all completed measurements no program saw an error, nothing is missing, and no namenode ended that
    /// should not have. The lengths of pauses are judged separately.
    #[must_use]
    pub fn faults_passed(&self) -> bool {
        let wrong = |it: &FaultReport| it.errors.count + it.missing.count + it.ended.count;
        self.faults.iter().all(|it| wrong(it) == 0)
    }

    /// Whether pauses met their goals.
    #[must_use]
    pub fn met_goals(&self) -> bool {
        let mut goals = self.faults.iter().filter_map(FaultReport::goal);
        goals.all(|(_, met)| met)
    }

    /// The report as a table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::from(
            "longest pause of a round, ms   rounds  median     p90     p99     max  goal\n",
        );
        for fault in &self.faults {
            let Some(all) = fault.pauses_ms() else {
                continue;
            };
            line(&mut text, fault.kind.name(), fault.rounds.len(), all);
            if let Some((goal, met)) = fault.goal() {
                let met = if met { "met" } else { "MISSED" };
                let _ = write!(text, "  {goal}: {met}");
            }
            text.push('\n');
            for operation in Operation::ALL {
                let of = fault.rounds.iter().map(|round| round.of(operation));
                if let Some(of) = Quantiles::new(of) {
                    let name = format!("  {}", operation.name());
                    line(&mut text, &name, fault.rounds.len(), of);
                    text.push('\n');
                }
            }
            let _ = writeln!(
                text,
                "  {} operations, {} errors; {} names and records looked for, {} missing; {} times a namenode ended by itself",
                fault.operations,
                fault.errors.count,
                fault.looked_for,
                fault.missing.count,
                fault.ended.count
            );
            for wrong in [&fault.errors, &fault.missing, &fault.ended]
                .map(|it| &it.first)
                .into_iter()
                .flatten()
            {
                let _ = writeln!(text, "    {wrong}");
            }
        }
        text
    }
}

fn line(text: &mut String, name: &str, rounds: usize, it: Quantiles) {
    let Quantiles {
        median,
        p90,
        p99,
        max,
    } = it;
    let _ = write!(
        text,
        "{name:30} {rounds:6} {median:7.0} {p90:7.0} {p99:7.0} {max:7.0}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        assert_eq!(Quantiles::new([]), None);
        let of = Quantiles::new((1..=20).rev().map(f64::from)).unwrap();
        assert_eq!(
            (of.median, of.p90, of.p99, of.max),
            (10.0, 18.0, 20.0, 20.0)
        );
        let of = Quantiles::new((1..=200).map(f64::from)).unwrap();
        assert_eq!((of.p99, of.max), (198.0, 200.0));
    }

    #[test]
    fn what_is_missing_or_ends_fails_and_a_long_pause_does_not() {
        let round = Round::new([5, 7_000, 6, 1].map(Duration::from_millis));
        assert_eq!(round.longest_ms(), 7_000.0);
        let mut report = Report {
            seed: 1,
            faults: vec![FaultReport {
                kind: FaultKind::Kill,
                rounds: vec![round],
                operations: 4,
                errors: Wrong::default(),
                looked_for: 2,
                missing: Wrong::default(),
                ended: Wrong::default(),
            }],
            error: None,
        };
        assert!(report.passed());
        assert!(report.table().contains("MISSED"), "{}", report.table());
        report.faults[0].missing.count = 1;
        assert!(!report.passed());
        report.faults[0].missing.count = 0;
        report.faults[0].ended.count = 1;
        assert!(!report.passed());
        report.faults.clear();
        report.error = Some("a part ended by itself".to_owned());
        assert!(!report.passed());
    }
}
