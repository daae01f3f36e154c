//! The schedule of all events: a pure function of the scenario and the seed.

use std::fmt;

use rand::RngExt;

use super::mounted;
use super::scenario::{Fault, Kind, Scenario, Targets};
use crate::random;

/// A part of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A namenode, by its number from 0.
    Namenode(usize),
    /// A server, by its number from 0.
    Server(usize),
    /// A mount, by its number from 0.
    Mount(usize),
}

impl Part {
    /// Its name in simulations, which count from 0.
    pub(crate) fn simulated(self) -> String {
        match self {
            Self::Namenode(number) => namenode_name(number),
            Self::Server(server) => format!("datanode-{server}"),
            Self::Mount(mount) => format!("mount-{mount}"),
        }
    }
}

/// The name of a namenode, and of its directory, as `init` gives it.
pub(crate) fn namenode_name(number: usize) -> String {
    match number {
        0 => "namenode".to_owned(),
        _ => format!("namenode-{}", number + 1),
    }
}

/// A fault that begins or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time, in milliseconds from the start.
    pub at_ms: u64,
    /// The kind of fault.
    pub kind: Kind,
    /// Whether it begins or ends.
    pub begins: bool,
    /// The affected part.
    pub part: Part,
    /// How strong it is, see [`Fault::amount`].
    pub amount: u32,
    /// Decides what is left to chance, such as which bits flip.
    pub seed: u64,
}

/// All events of a run, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The seed that decided it.
    pub seed: u64,
    /// The events, ordered by time.
    pub events: Vec<Event>,
}

impl Plan {
    /// The plan of a scenario.
    #[must_use]
    pub fn new(scenario: &Scenario, seed: u64) -> Self {
        let mut events = Vec::new();
        let count = scenario.cluster.servers.len();
        for (number, fault) in scenario.faults.iter().enumerate() {
            // One more fault in the scenario must not change what the others do.
            let mut rng = random::stream(seed, &format!("fault {number}"));
            for repetition in 0..fault.repeat {
                let mut at_ms = fault.at_ms + u64::from(repetition) * fault.every_ms;
                if fault.jitter_ms > 0 {
                    at_ms += rng.random_range(0..=fault.jitter_ms);
                }
                let parts: Vec<Part> = match &fault.targets {
                    Targets::Namenode => {
                        let number = match scenario.cluster.namenodes {
                            1 => 0,
                            several => rng.random_range(0..several),
                        };
                        vec![Part::Namenode(number)]
                    }
                    Targets::Servers(servers) => {
                        servers.iter().copied().map(Part::Server).collect()
                    }
                    Targets::Mount(mount) => vec![Part::Mount(*mount)],
                    Targets::RandomMounts(wanted) => {
                        let all: Vec<usize> = (0..scenario.mounts.count).collect();
                        let chosen = random::sample(&mut rng, &all, *wanted);
                        chosen.into_iter().map(Part::Mount).collect()
                    }
                    Targets::Random(wanted) => {
                        let all: Vec<usize> = (0..count).collect();
                        let chosen = random::sample(&mut rng, &all, *wanted);
                        chosen.into_iter().map(Part::Server).collect()
                    }
                };
                for part in parts {
                    push(&mut events, fault, part, at_ms, rng.random());
                    at_ms += fault.rolling_ms;
                }
            }
        }
        // A stable sort: events at the same time stay in the order of the scenario.
        events.sort_by_key(|event| event.at_ms);
        // Healing ends what lasts longer.
        events.retain(|event| event.begins || event.at_ms < scenario.duration_ms);
        Self { seed, events }
    }

    /// Whether there is an event of such a kind.
    #[must_use]
    pub fn has(&self, wanted: impl Fn(Kind) -> bool) -> bool {
        self.events.iter().any(|event| wanted(event.kind))
    }

    /// Whether there is an event of this kind for a part.
    #[must_use]
    pub fn hits(&self, part: Part, kind: Kind) -> bool {
        let mut events = self.events.iter();
        events.any(|event| event.kind == kind && event.part == part)
    }

    /// The periods during which a server's primary is made busy (start and end, in milliseconds).
    #[must_use]
    pub fn busy_windows(&self, server: usize, duration_ms: u64) -> Vec<(u64, u64)> {
        let mut windows: Vec<(u64, u64)> = Vec::new();
        let mut open: Vec<u64> = Vec::new();
        for event in &self.events {
            if event.kind == Kind::Busy && event.part == Part::Server(server) {
                if event.begins {
                    open.push(event.at_ms);
                } else if !open.is_empty() {
                    windows.push((open.remove(0), event.at_ms));
                }
            }
        }
        windows.extend(open.into_iter().map(|from| (from, duration_ms)));
        windows
    }

    /// One line for each event.
    #[must_use]
    pub fn describe(&self, scenario: &Scenario) -> String {
        let mut text = String::new();
        for event in &self.events {
            let seconds = event.at_ms as f64 / 1e3;
            text += &format!("{seconds:>8.1} s  {}\n", event.describe(scenario));
        }
        text
    }
}

/// Decides which events still happen when something before them took so long that the scenario is over.
#[derive(Debug, Default)]
pub(crate) struct Late {
    /// Beginnings of faults that were skipped.
    left_out: Vec<Event>,
}

impl Late {
    /// Whether the next event happens. A fault that would end immediately is not begun, unless its end is what tests
    /// something; and a fault that was not begun does not end.
    pub fn happens(&mut self, event: &Event) -> bool {
        if event.begins {
            let happens = event.kind.tests_at_its_end();
            if !happens {
                self.left_out.push(*event);
            }
            return happens;
        }
        !self.left_out.iter().any(|begin| event.ends(begin))
    }
}

impl Event {
    /// Whether it ends the fault that `begin` begins.
    fn ends(&self, begin: &Self) -> bool {
        // The seed distinguishes repetitions of a fault on the same part.
        let what = |event: &Self| (event.kind, event.part, event.seed);
        !self.begins && what(self) == what(begin)
    }

    /// Describes the event and the affected part.
    #[must_use]
    pub fn describe(&self, scenario: &Scenario) -> String {
        let what = match (self.kind, self.begins) {
            (kind, true) => kind.name().to_owned(),
            (Kind::Reimage | Kind::Clear | Kind::Kill, false) => "start".into(),
            (Kind::FailedSync, false) => "power loss".into(),
            (kind, false) => format!("end of {}", kind.name()),
        };
        match self.part {
            Part::Namenode(number) => format!("{what:<20} {}", namenode_name(number)),
            Part::Mount(mount) => format!("{what:<20} {}", mounted::name(mount)),
            Part::Server(server) => {
                let server = &scenario.cluster.servers[server];
                format!(
                    "{what:<20} {} ({}/{})",
                    server.name, server.environment, server.machine_function
                )
            }
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn push(events: &mut Vec<Event>, fault: &Fault, part: Part, at_ms: u64, seed: u64) {
    let event = Event {
        at_ms,
        kind: fault.kind,
        begins: true,
        part,
        amount: fault.amount,
        seed,
    };
    events.push(event);
    if fault.kind != Kind::BitRot {
        events.push(Event {
            at_ms: at_ms + fault.for_ms,
            begins: false,
            ..event
        });
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn scenario() -> Scenario {
        let text = "name = \"t\"\nduration_s = 60\n[cluster]\nservers = 9\n\
                    [[fault]]\nkind = \"reimage\"\nat_s = 1\njitter_s = 9\nrandom = 3\n\
                    rolling_s = 5\nfor_s = 2\n\
                    [[fault]]\nkind = \"busy\"\nat_s = 20\nfor_s = 10\nservers = [\"datanode-4\"]\n\
                    [[fault]]\nkind = \"kill\"\nat_s = 50\nfor_s = 60\npart = \"namenode\"\n";
        Scenario::parse(Path::new("s.toml"), text).unwrap()
    }

    #[test]
    fn the_seed_decides_everything() {
        let scenario = scenario();
        assert_eq!(Plan::new(&scenario, 7), Plan::new(&scenario, 7));
        let others = (0..20).filter(|&seed| {
            let (a, b) = (Plan::new(&scenario, seed), Plan::new(&scenario, seed + 1));
            a.events != b.events
        });
        assert_eq!(others.count(), 20);
    }

    #[test]
    fn mounts_are_hit_by_name_or_as_the_seed_decides() {
        let text = "name = \"t\"\nduration_s = 60\n[cluster]\nservers = 3\n[mounts]\ncount = 4\n\
                    [[fault]]\nkind = \"kill\"\nat_s = 1\nfor_s = 2\npart = \"mount-2\"\n\
                    [[fault]]\nkind = \"hang\"\nat_s = 20\nfor_s = 5\nmounts = 3\n";
        let scenario = Scenario::parse(Path::new("s.toml"), text).unwrap();
        let plan = Plan::new(&scenario, 1);
        let parts = |kind| {
            let of_kind = plan.events.iter().filter(|it| it.begins && it.kind == kind);
            let mut parts: Vec<Part> = of_kind.map(|event| event.part).collect();
            parts.sort_unstable();
            parts
        };
        assert_eq!(parts(Kind::Kill), [Part::Mount(1)]);
        let mut hung = parts(Kind::Hang);
        hung.dedup();
        assert_eq!(hung.len(), 3);
        assert!(hung.iter().all(|part| matches!(part, Part::Mount(0..4))));
        let said = plan.describe(&scenario);
        assert!(said.contains("start                mount-2"), "{said}");
    }

    #[test]
    fn late_events_end_what_was_begun_alone_and_test_what_they_are_to_test() {
        let text = "name = \"t\"\nduration_s = 60\n[cluster]\nservers = 3\n\
                    [[fault]]\nkind = \"rollback\"\nat_s = 40\nfor_s = 10\npart = \"namenode\"\n\
                    [[fault]]\nkind = \"kill\"\nat_s = 45\nfor_s = 9\nservers = [\"datanode-1\"]\n\
                    repeat = 2\nevery_s = 5\n";
        let scenario = Scenario::parse(Path::new("s.toml"), text).unwrap();
        let plan = Plan::new(&scenario, 1);
        let late_from = |ms: u64| {
            let mut late = Late::default();
            let events = plan.events.iter().filter(|event| event.at_ms >= ms);
            let happen = events.filter(|event| late.happens(event));
            let all = happen.map(|event| (event.at_ms / 1_000, event.kind, event.begins));
            all.collect::<Vec<_>>()
        };
        let rollback = [(40, Kind::Rollback, true), (50, Kind::Rollback, false)];
        assert_eq!(late_from(40_000), rollback);
        // Of the two that overlap, only the first one has begun in time.
        let wanted = [(50, Kind::Rollback, false), (54, Kind::Kill, false)];
        assert_eq!(late_from(46_000), wanted);
    }

    #[test]
    fn events_are_ordered_and_what_outlasts_the_run_is_left_to_the_healing() {
        let plan = Plan::new(&scenario(), 3);
        assert!(plan.events.is_sorted_by_key(|event| event.at_ms));
        let kills: Vec<bool> = plan
            .events
            .iter()
            .filter(|event| event.kind == Kind::Kill)
            .map(|event| event.begins)
            .collect();
        assert_eq!(kills, [true]);
        assert_eq!(plan.busy_windows(3, 60_000), [(20_000, 30_000)]);
        assert_eq!(plan.busy_windows(0, 60_000), []);
        let reimages: Vec<&Event> = plan
            .events
            .iter()
            .filter(|event| event.kind == Kind::Reimage && event.begins)
            .collect();
        assert_eq!(reimages.len(), 3);
        assert_eq!(reimages[1].at_ms - reimages[0].at_ms, 5_000);
    }
}
