//! What happens to machines and to the network between them.

use std::io;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

use super::Link;
use super::journal::Journal;
use super::world::{Part, World};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// A machine stops, and starts again a moment later.
    Crash,
    /// Nothing on a machine runs for a while; its clocks go on.
    Hang,
    /// A machine sleeps for a while, and only the clock since its start goes on.
    Suspend,
    /// Nothing gets from a machine to some others, or from them to it, or both.
    Partition,
    /// Datagrams from and to a machine are lost.
    Loss,
    /// Datagrams from and to a machine take longer, and overtake each other.
    Delay,
    /// Datagrams from and to a machine come twice.
    Duplicate,
}

impl FaultKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Crash,
        Self::Hang,
        Self::Suspend,
        Self::Partition,
        Self::Loss,
        Self::Delay,
        Self::Duplicate,
    ];

    /// The name that users give.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Crash => "crash",
            Self::Hang => "hang",
            Self::Suspend => "suspend",
            Self::Partition => "partition",
            Self::Loss => "loss",
            Self::Delay => "delay",
            Self::Duplicate => "duplicate",
        }
    }
}

/// Shortest and longest time between the beginnings of two faults, and that a fault lasts, in milliseconds.
const BETWEEN_MS: std::ops::Range<u64> = 500..6_000;
const LASTS_MS: std::ops::Range<u64> = 100..12_000;
/// Of a hundred datagrams, how many are lost or come twice at most.
const PERCENT_MAX: f64 = 30.0;
const JITTER_MAX_MS: u64 = 200;

/// A fault that has begun.
struct UnderWay {
    kind: FaultKind,
    part: Part,
    began: Duration,
    ends: Duration,
}

/// Begins faults by chance, and ends them.
pub struct Faults {
    kinds: Vec<FaultKind>,
    rng: SmallRng,
    next: Duration,
    under_way: Vec<UnderWay>,
}

impl Faults {
    /// The first one begins soon after `start`.
    pub fn new(kinds: Vec<FaultKind>, mut rng: SmallRng, start: Duration) -> Self {
        let next = start + Duration::from_millis(rng.random_range(BETWEEN_MS));
        Self {
            kinds,
            rng,
            next,
            under_way: Vec::new(),
        }
    }

    /// Begins and ends what it is time for. Returns the machines that have started again.
    ///
    /// # Errors
    /// When a machine cannot be started.
    pub fn go_on(&mut self, world: &mut World, journal: &Journal) -> io::Result<Vec<Part>> {
        let now = world.now();
        let (over, under_way) = std::mem::take(&mut self.under_way)
            .into_iter()
            .partition(|fault| fault.ends <= now);
        self.under_way = under_way;
        let restarted = end(over, world, journal)?;
        if now >= self.next {
            self.next = now + Duration::from_millis(self.rng.random_range(BETWEEN_MS));
            self.begin(world, journal);
        }
        Ok(restarted)
    }

    /// Ends everything. Returns the machines that have started again.
    ///
    /// # Errors
    /// When a machine cannot be started.
    pub fn end(&mut self, world: &mut World, journal: &Journal) -> io::Result<Vec<Part>> {
        end(std::mem::take(&mut self.under_way), world, journal)
    }

    fn begin(&mut self, world: &mut World, journal: &Journal) {
        let Some(&kind) = self.kinds.choose(&mut self.rng) else {
            return;
        };
        let parts = world.parts();
        // One fault at a time for each machine, so that each ends what it began.
        let free = |part: &&Part| self.under_way.iter().all(|fault| fault.part != **part);
        let free: Vec<Part> = parts.iter().filter(free).copied().collect();
        let Some(&part) = free.choose(&mut self.rng) else {
            return;
        };
        let began = world.now();
        let lasts = Duration::from_millis(self.rng.random_range(LASTS_MS));
        journal.note(
            &part.to_string(),
            format_args!("{} for {lasts:?}", kind.name()),
        );
        let usual = Link::default();
        let link = match kind {
            FaultKind::Crash => {
                world.host(part).crash();
                None
            }
            FaultKind::Hang | FaultKind::Suspend => {
                world.host(part).stop();
                None
            }
            FaultKind::Partition => Some(Link { cut: true, ..usual }),
            FaultKind::Loss => {
                let loss_percent = self.rng.random_range(1.0..PERCENT_MAX);
                Some(Link {
                    loss_percent,
                    ..usual
                })
            }
            FaultKind::Delay => {
                let jitter = Duration::from_millis(self.rng.random_range(1..JITTER_MAX_MS));
                Some(Link { jitter, ..usual })
            }
            FaultKind::Duplicate => {
                let twice_percent = self.rng.random_range(1.0..PERCENT_MAX);
                Some(Link {
                    twice_percent,
                    ..usual
                })
            }
        };
        if let Some(link) = link {
            self.change_links(link, part, &parts, world);
        }
        self.under_way.push(UnderWay {
            kind,
            part,
            began,
            ends: began + lasts,
        });
    }

    /// From a machine, to it, or both; to and from all others, or some.
    fn change_links(&mut self, link: Link, part: Part, parts: &[Part], world: &World) {
        let (from, to) = [(true, true), (true, false), (false, true)]
            .choose(&mut self.rng)
            .copied()
            .unwrap_or((true, true));
        let some_only = self.rng.random_range(0..2) == 0;
        for &other in parts {
            if some_only && self.rng.random_range(0..2) == 0 {
                continue;
            }
            if from {
                world.set_link(part, other, link);
            }
            if to {
                world.set_link(other, part, link);
            }
        }
    }
}

fn end(over: Vec<UnderWay>, world: &mut World, journal: &Journal) -> io::Result<Vec<Part>> {
    let mut restarted = Vec::new();
    let now = world.now();
    for UnderWay {
        kind, part, began, ..
    } in over
    {
        journal.note(&part.to_string(), format_args!("{} is over", kind.name()));
        match kind {
            FaultKind::Crash => {
                world.host(part).boot()?;
                world.start(part)?;
                restarted.push(part);
            }
            FaultKind::Hang => world.host(part).go_on(now - began),
            FaultKind::Suspend => world.host(part).wake_up(now - began),
            FaultKind::Partition | FaultKind::Loss | FaultKind::Delay | FaultKind::Duplicate => {
                for other in world.parts() {
                    world.set_link(part, other, Link::default());
                    world.set_link(other, part, Link::default());
                }
            }
        }
    }
    Ok(restarted)
}
