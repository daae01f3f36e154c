//! The load of primary tenants: a trace for each server, which its datanode replays.

use std::f64::consts::TAU;
use std::fmt::Write;
use std::time::Duration;

use rand::RngExt;

use super::plan::Plan;
use super::scenario::{Pattern, Scenario, Trace};
use crate::random;

/// The share of the CPU that an idle primary uses.
const IDLE_SHARE: f64 = 0.1;
/// The share of the CPU that a primary uses while a `busy` fault lasts.
const BUSY_SHARE: f64 = 0.95;
/// How long primaries are idle after the faults, in seconds: so long that the trace does not start over.
const QUIET_S: u64 = 7_200;

/// The load of each tenant.
pub(crate) struct Loads {
    seed: u64,
    day_ms: u64,
    tenants: Vec<Tenant>,
    trace: Option<Trace>,
}

struct Tenant {
    pattern: Pattern,
    /// The highest share of the CPU.
    peak_share: f64,
    /// The offset of its day, as a share of a day.
    phase: f64,
}

impl Loads {
    /// Draws the loads, as the seed decides.
    pub fn new(scenario: &Scenario, seed: u64) -> Self {
        let mut rng = random::stream(seed, "primaries");
        let mut tenants: Vec<Tenant> = Vec::new();
        for server in &scenario.cluster.servers {
            if server.tenant == tenants.len() {
                tenants.push(Tenant {
                    pattern: server.pattern,
                    peak_share: rng.random_range(0.55..0.98),
                    // Users are roughly in the same time zone.
                    phase: rng.random_range(0.0..0.15),
                });
            }
        }
        Self {
            seed,
            day_ms: scenario.cluster.day_ms,
            tenants,
            trace: scenario.cluster.trace.clone(),
        }
    }

    /// The share of the CPU that a tenant's primary uses, 0 to 1, a number of days after the start.
    pub fn share(&self, tenant: usize, days: f64) -> f64 {
        let Some(it) = self.tenants.get(tenant) else {
            return IDLE_SHARE;
        };
        match it.pattern {
            Pattern::Idle => IDLE_SHARE,
            Pattern::Constant => 0.4,
            Pattern::Periodic => {
                let middle = (it.peak_share + IDLE_SHARE) / 2.0;
                middle + (it.peak_share - middle) * (TAU * (days + it.phase)).sin()
            }
            Pattern::Unpredictable => {
                // Eight slots a day; on average, one in seven has a burst.
                let slot = (days * 8.0).floor();
                let mut rng = random::stream(self.seed, &format!("burst {tenant} {slot}"));
                if rng.random_bool(1.0 / 7.0) {
                    it.peak_share
                } else {
                    0.25
                }
            }
        }
    }

    /// Whether any tenant has a load.
    pub fn any(&self) -> bool {
        let idle = |tenant: &Tenant| tenant.pattern == Pattern::Idle;
        self.trace.is_some() || !self.tenants.iter().all(idle)
    }

    /// The trace of a run: a series for each server, with one sample per second.
    pub fn trace(&self, scenario: &Scenario, plan: &Plan) -> String {
        let mut text = "series,period_s,values\n".to_owned();
        let seconds = scenario.duration_ms.div_ceil(1_000);
        for (number, server) in scenario.cluster.servers.iter().enumerate() {
            text += &format!("{},1", server.name);
            let windows = plan.busy_windows(number, scenario.duration_ms);
            for second in 0..seconds + QUIET_S {
                let at_ms = second * 1_000;
                let is_in = |&(from, until): &(u64, u64)| from <= at_ms && at_ms < until;
                let share = if second >= seconds {
                    IDLE_SHARE
                } else if windows.iter().any(is_in) {
                    BUSY_SHARE
                } else {
                    match &self.trace {
                        Some(trace) => trace.share(number, Duration::from_millis(at_ms)),
                        None => self.share(server.tenant, at_ms as f64 / self.day_ms as f64),
                    }
                };
                // Writing to a string cannot fail.
                let _ = write!(text, ",{:.0}", share * 10_000.0);
            }
            text.push('\n');
        }
        text
    }

    /// The history before the run, for `admin history import`: three weeks with days of 24 hours, or with the
    /// trace repeated from its start.
    pub fn history(&self, scenario: &Scenario, now_unix_s: u64) -> String {
        const DAYS: u64 = 21;
        const PER_DAY: u64 = 288;
        let start_s = now_unix_s.saturating_sub(DAYS * 86_400 + 600);
        let mut text = "series,period_s,start_unix_s,values\n".to_owned();
        let mut next = 0;
        for (number, server) in scenario.cluster.servers.iter().enumerate() {
            if server.tenant != next {
                continue;
            }
            next += 1;
            text += &format!(
                "{}/{},300,{start_s}",
                server.environment, server.machine_function
            );
            for sample in 0..DAYS * PER_DAY {
                let share = match &self.trace {
                    Some(trace) => {
                        let at = Duration::from_secs_f64(sample as f64 * trace.step_s());
                        trace.share(number, at)
                    }
                    None => self.share(server.tenant, sample as f64 / PER_DAY as f64),
                };
                let _ = write!(text, ",{:.0}", share * 10_000.0);
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn faults_make_primaries_busy_for_as_long_as_they_last() {
        let text = "name = \"t\"\nduration_s = 10\n[cluster]\n\
                    [[tenant]]\nenvironment = \"e\"\nmachine_function = \"f\"\nservers = 2\n\
                    [[tenant]]\nenvironment = \"e\"\nmachine_function = \"g\"\nservers = 1\n\
                    pattern = \"periodic\"\n\
                    [[fault]]\nkind = \"busy\"\nat_s = 3\nfor_s = 2\nservers = [\"datanode-2\"]\n";
        let text = text.replace("[cluster]", "[cluster]\nreplication = 1");
        let scenario = Scenario::parse(Path::new("s.toml"), &text).unwrap();
        let plan = Plan::new(&scenario, 1);
        let loads = Loads::new(&scenario, 1);
        let trace = loads.trace(&scenario, &plan);
        let lines: Vec<&str> = trace.lines().collect();
        assert!(lines[1].starts_with("datanode-1,1,1000,1000,1000,1000,1000,"));
        assert!(lines[2].starts_with("datanode-2,1,1000,1000,1000,9500,9500,1000,"));
        assert!(lines[3].starts_with("datanode-3,1,") && lines.len() == 4);
        assert!(loads.any());
        let history = loads.history(&scenario, 1_800_000_000);
        assert_eq!(history.lines().count(), 3);
        let peak = |tenant| {
            let shares = (0..100).map(|step| loads.share(tenant, f64::from(step) / 100.0));
            shares.fold(0.0, f64::max)
        };
        assert!(peak(1) > 0.5 && peak(0) < 0.2);
    }
}
