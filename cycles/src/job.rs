//! Short, medium and long jobs.

use harvestfs_telemetry::profile::Pattern;

/// How long a job takes, roughly (OSDI'16, section 4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum JobType {
    /// Needs no more than what is free now.
    Short,
    /// Experiences an owner's usual load.
    Medium,
    /// Experiences an owner's peak.
    Long,
}

impl JobType {
    /// All types, the shortest first.
    pub const ALL: [Self; 3] = [Self::Short, Self::Medium, Self::Long];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Medium => "medium",
            Self::Long => "long",
        }
    }

    /// Returns the patterns of the classes that suit it, the best first.
    #[must_use]
    pub fn preferred(self) -> [Pattern; 3] {
        use Pattern::{Constant, Periodic, Unpredictable};
        match self {
            Self::Short => [Unpredictable, Periodic, Constant],
            Self::Medium => [Periodic, Constant, Unpredictable],
            Self::Long => [Constant, Periodic, Unpredictable],
        }
    }
}

/// The lengths between which jobs are medium.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    short_below_s: f64,
    long_above_s: f64,
}

/// Thresholds that are invalid.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "jobs shorter than {short_below_s} s are short and longer than {long_above_s} s are long: not two lengths above \
     0, the smaller one first"
)]
pub struct BadThresholds {
    short_below_s: f64,
    long_above_s: f64,
}

/// A completed run of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PastRun {
    /// Seconds from its submission to its end.
    pub length_s: f64,
    /// Its work, in core-seconds.
    pub work_core_s: f64,
}

/// The computing capacities of the classes of each pattern, in any unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacities {
    /// Capacity of unpredictable classes, which short jobs prefer.
    pub unpredictable: f64,
    /// Capacity of periodic classes, which medium jobs prefer.
    pub periodic: f64,
    /// Capacity of constant classes, which long jobs prefer.
    pub constant: f64,
}

/// The reason why a history has no thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// No job has run.
    #[error("no job has run yet")]
    NoRuns,
    /// A length or work is not a number above 0.
    #[error("run {0} of the history has a length or work that is not above 0")]
    BadRun(usize),
    /// No class has capacity, or a capacity is negative.
    #[error("capacities must be at least 0, and one of them above 0")]
    NoCapacity,
}

impl Thresholds {
    /// The thresholds of the paper's testbed.
    pub const PAPER: Self = Self {
        short_below_s: 173.0,
        long_above_s: 433.0,
    };

    /// Creates thresholds: jobs shorter than the first length are short, and jobs longer than the second are long.
    ///
    /// # Errors
    /// Unless both are above 0 and finite, and the first is at most the second.
    pub fn new(short_below_s: f64, long_above_s: f64) -> Result<Self, BadThresholds> {
        let in_order = 0.0 < short_below_s && short_below_s <= long_above_s;
        if in_order && long_above_s.is_finite() {
            Ok(Self {
                short_below_s,
                long_above_s,
            })
        } else {
            Err(BadThresholds {
                short_below_s,
                long_above_s,
            })
        }
    }

    /// Derives thresholds such that the work of short, medium and long jobs has the same proportions as the
    /// capacities of the classes that they prefer, as closely as whole jobs allow.
    ///
    /// # Errors
    /// If there is no run or no capacity, or a value is out of range.
    pub fn from_history(runs: &[PastRun], capacities: Capacities) -> Result<Self, HistoryError> {
        let Capacities {
            unpredictable,
            periodic,
            constant,
        } = capacities;
        let capacity = unpredictable + periodic + constant;
        let none_negative = [unpredictable, periodic, constant]
            .iter()
            .all(|it| *it >= 0.0);
        if !(none_negative && capacity > 0.0 && capacity.is_finite()) {
            return Err(HistoryError::NoCapacity);
        }
        let positive = |value: f64| value > 0.0 && value.is_finite();
        let bad = |run: &PastRun| !(positive(run.length_s) && positive(run.work_core_s));
        if let Some(run) = runs.iter().position(bad) {
            return Err(HistoryError::BadRun(run));
        }
        let mut sorted = runs.to_vec();
        sorted.sort_by(|a, b| a.length_s.total_cmp(&b.length_s));
        let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else {
            return Err(HistoryError::NoRuns);
        };
        // The lengths at which jobs can be divided, with the total work of the jobs below.
        let mut cuts = vec![(first.length_s / 2.0, 0.0)];
        let mut work = 0.0;
        for pair in sorted.windows(2) {
            work += pair[0].work_core_s;
            if pair[0].length_s < pair[1].length_s {
                cuts.push((f64::midpoint(pair[0].length_s, pair[1].length_s), work));
            }
        }
        work += last.work_core_s;
        cuts.push((last.length_s * 2.0, work));
        // The position of a cut that is not before `from`: because of rounding, an earlier cut may be closer to a
        // larger share.
        let nearest = |from: usize, share: f64| {
            let distance = |place: &usize| (cuts[*place].1 - share * work).abs();
            let nearest = (from..cuts.len()).min_by(|a, b| distance(a).total_cmp(&distance(b)));
            nearest.expect("there is a cut behind the last run")
        };
        let short = nearest(0, unpredictable / capacity);
        let long = nearest(short, (unpredictable + periodic) / capacity);
        let (short_below_s, long_above_s) = (cuts[short].0, cuts[long].0);
        assert!(
            short_below_s <= long_above_s,
            "shorter than {short_below_s} s are short, and longer than {long_above_s} s are long: {cuts:?}"
        );
        Ok(Self {
            short_below_s,
            long_above_s,
        })
    }

    /// Scales the thresholds by a factor above 0, for jobs that all take this many times as long.
    ///
    /// # Errors
    /// If a length leaves its range.
    pub fn times(self, factor: f64) -> Result<Self, BadThresholds> {
        Self::new(self.short_below_s * factor, self.long_above_s * factor)
    }

    /// Returns the length in seconds below which jobs are short.
    #[must_use]
    pub fn short_below_s(self) -> f64 {
        self.short_below_s
    }

    /// Returns the length in seconds above which jobs are long.
    #[must_use]
    pub fn long_above_s(self) -> f64 {
        self.long_above_s
    }

    /// Returns the type of a job by the length of its last run; a job without a previous run is medium.
    #[must_use]
    pub fn job_type(self, last_run_s: Option<f64>) -> JobType {
        match last_run_s {
            Some(length_s) if length_s < self.short_below_s => JobType::Short,
            Some(length_s) if length_s > self.long_above_s => JobType::Long,
            _ => JobType::Medium,
        }
    }
}
