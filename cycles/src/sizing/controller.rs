//! The decision: online models of what volunteers contribute, and a search over their number.

use super::INTERVAL_S;

/// The share of its bandwidth from which a disk counts as saturated.
const SATURATED_SHARE: f64 = 0.95;
/// Part of the time to a deadline that is kept free for prediction errors.
const PADDING_SHARE: f64 = 0.04;
/// Additional seconds that are kept free: starting volunteers takes some, even near the end.
const PADDING_S: f64 = 20.0;

/// The quantity to minimise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// Money.
    Cost,
    /// Energy that the job needs in addition to what owners need anyway.
    Energy,
    /// Volunteers, provided that the job ends within this many seconds after its start.
    Deadline(f64),
}

/// The costs of nodes, in one unit: dollars or watt-hours.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Costs of a dedicated node per hour.
    pub dedicated_per_h: f64,
    /// Costs of a volunteer per hour.
    pub volunteer_per_h: f64,
    /// Costs per hour of a core that works for the job.
    pub core_per_h: f64,
}

impl Rates {
    /// Prices of the paper in dollars: an on-demand instance, and one that the owner may need back.
    pub const PRICES: Self = Self {
        dedicated_per_h: 1.0,
        volunteer_per_h: 0.42,
        core_per_h: 0.0,
    };
    /// Watts of a dedicated node, of a volunteer beyond its usage anyway, and of a core that works.
    pub const POWER: Self = Self {
        dedicated_per_h: 150.0,
        volunteer_per_h: 12.0,
        core_per_h: 20.0,
    };

    /// Returns the costs of an hour with this many nodes and busy cores.
    #[must_use]
    pub fn per_h(&self, dedicated: usize, volunteers: usize, cores: f64) -> f64 {
        self.dedicated_per_h * dedicated as f64
            + self.volunteer_per_h * volunteers as f64
            + self.core_per_h * cores
    }
}

/// The measurements of an interval; means over it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Potential productivity of dedicated nodes and volunteers together.
    pub potential: f64,
    /// Their actual productivity.
    pub actual: f64,
    /// Share of its bandwidth that the busiest disk of a dedicated node used, 0 to 1.
    pub busiest_disk_share: f64,
    /// Share of their bandwidth that all disks used, 0 to 1.
    pub disk_share: f64,
    /// Share of the job that has been done since its start, 0 to 1.
    pub done_share: f64,
}

/// Chooses the number of volunteers.
#[derive(Clone, Debug)]
pub struct Controller {
    goal: Goal,
    rates: Rates,
    dedicated: usize,
    cores: f64,
    /// Mean potential and actual productivity by whole cores of potential, and the number of intervals behind the
    /// means.
    curve: Vec<(u32, f64, f64, f64)>,
    /// Sum of the actual productivity over intervals.
    productivity: f64,
    done_share: f64,
    intervals: u32,
    saturates_at: Option<f64>,
    /// The total potential that one disk could supply, and that all disks could.
    estimates: Option<(f64, f64)>,
}

impl Controller {
    /// Creates a controller for a job on this many dedicated nodes of this many cores. It begins with a profile: no
    /// volunteers.
    #[must_use]
    pub fn new(goal: Goal, rates: Rates, dedicated: usize, cores: f64) -> Self {
        Self {
            goal,
            rates,
            dedicated,
            cores,
            curve: Vec::new(),
            productivity: 0.0,
            done_share: 0.0,
            intervals: 0,
            saturates_at: None,
            estimates: None,
        }
    }

    /// Learns from an interval.
    pub fn observe(&mut self, interval: &Interval) {
        let own = self.dedicated as f64 * self.cores;
        if self.intervals == 0 && interval.disk_share > 0.0 {
            // What each disk could supply in addition to its own node (equations 2 to 4).
            let supported = (1.0 / interval.disk_share - 1.0).max(0.0) * self.cores;
            self.estimates = Some((own + supported, own + supported * self.dedicated as f64));
        }
        self.intervals += 1;
        self.productivity += interval.actual;
        self.done_share = interval.done_share;
        if interval.busiest_disk_share >= SATURATED_SHARE {
            let least = self.saturates_at.unwrap_or(f64::INFINITY);
            self.saturates_at = Some(least.min(interval.potential));
        }
        let bin = interval.potential.round() as u32;
        assert!(
            self.curve.is_sorted_by(|a, b| a.0 < b.0),
            "what was seen is out of order: {:?}",
            self.curve
        );
        match self.curve.binary_search_by_key(&bin, |it| it.0) {
            Ok(place) => {
                let (_, potential, actual, count) = &mut self.curve[place];
                *count += 1.0;
                *potential += (interval.potential - *potential) / *count;
                *actual += (interval.actual - *actual) / *count;
            }
            Err(place) => {
                let point = (bin, interval.potential, interval.actual, 1.0);
                self.curve.insert(place, point);
            }
        }
    }

    /// Returns how many volunteers to use: that many of those whose predicted potentials are given, the largest
    /// first.
    #[must_use]
    pub fn decide(&self, potentials: &[f64]) -> usize {
        let own = self.dedicated as f64 * self.cores;
        let mut totals = vec![own];
        for potential in potentials {
            totals.push(totals[totals.len() - 1] + potential);
        }
        // The curve is explored step by step: first what one disk can supply, then half-way to what all can, and then
        // anything.
        let explored = self.estimates.filter(|_| self.saturates_at.is_none());
        let most = match (self.intervals, explored) {
            (0, _) => return 0,
            (1, Some((worst, _))) => worst,
            (2, Some((worst, best))) => f64::midpoint(worst, best),
            _ => f64::INFINITY,
        };
        let allowed = totals
            .iter()
            .take_while(|total| **total <= most)
            .count()
            .max(1)
            - 1;
        if most.is_finite() && !matches!(self.goal, Goal::Deadline(_)) {
            return allowed;
        }
        assert!(
            allowed <= potentials.len(),
            "{allowed} of {} volunteers are allowed",
            potentials.len()
        );
        let sizes = 0..=allowed;
        match self.goal {
            Goal::Cost | Goal::Energy => {
                let cost = |size: &usize| {
                    let actual = self.actual(totals[*size]);
                    self.rates.per_h(self.dedicated, *size, actual) * self.left_s(actual)
                };
                sizes
                    .min_by(|a, b| cost(a).total_cmp(&cost(b)))
                    .expect("no volunteers are a number, too")
            }
            Goal::Deadline(deadline_s) => {
                let left_s = deadline_s - f64::from(self.intervals) * INTERVAL_S;
                let kept_s = left_s * (1.0 - PADDING_SHARE) - PADDING_S;
                let in_time = |size: &usize| self.left_s(self.actual(totals[*size])) <= kept_s;
                sizes.clone().find(in_time).unwrap_or(allowed)
            }
        }
    }

    /// Returns the seconds until the job ends with this actual productivity (equations 5 and 6).
    fn left_s(&self, actual: f64) -> f64 {
        let rate = self.done_share / (self.productivity * INTERVAL_S);
        (1.0 - self.done_share) / (actual * rate)
    }

    /// Returns the actual productivity for a potential one: interpolated between observations; beyond them, it grows
    /// as much as the potential, until disks are saturated.
    fn actual(&self, potential: f64) -> f64 {
        let (mut before, mut at) = ((0.0, 0.0), None);
        for (_, seen, actual, _) in &self.curve {
            if *seen >= potential {
                at = Some((*seen, *actual));
                break;
            }
            before = (*seen, *actual);
        }
        match at {
            Some((seen, actual)) => {
                let share = (potential - before.0) / (seen - before.0).max(1e-9);
                before.1 + share * (actual - before.1)
            }
            None => {
                let limit = match (self.saturates_at, self.estimates) {
                    (Some(_), _) => before.0,
                    (None, Some((_, best))) => best.max(before.0),
                    (None, None) => f64::INFINITY,
                };
                before.1 + potential.min(limit) - before.0
            }
        }
    }
}
