//! What happens to machines and to the network between them.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::copies::Copies;
use super::disk::Trouble;
use super::journal::Journal;
use super::kind::FaultKind;
use super::part::Part;
use super::replay::Script;
use super::world::World;
use super::{Link, Options};

/// Shortest and longest time between the beginnings of two faults, and that a fault lasts, in milliseconds.
const BETWEEN_MS: std::ops::Range<u64> = 500..6_000;
const LASTS_MS: std::ops::Range<u64> = 100..12_000;
/// Of so many faults, one lasts longer, until leases are over.
const LONG: u32 = 8;
const LASTS_LONG_MS: std::ops::Range<u64> = 12_000..45_000;
/// Of so many faults that can happen to the namenode, which everybody needs, one at least does.
const NAMENODE: u32 = 8;
/// So many kinds of faults are in every second simulation, others are not: what needs several of one kind is found so.
const FEW_KINDS: usize = 3;
/// Of a hundred datagrams, how many are lost or come twice at most.
const PERCENT_MAX: f64 = 30.0;
const JITTER_MAX_MS: u64 = 200;

/// How much faster or slower than time clocks go at most, in millionths. Leases allow for a hundredth between two of them
/// (`LEASE_BELIEVED` in `protocol/src/limits.rs`).
const DRIFT_MAX_PPM: i64 = 4_500;
/// How wrong a wall clock is at most: "Keep them within minutes for block tokens" (`docs/OPERATIONS.md`).
const JUMP_MAX_MS: i64 = 5 * 60_000;
/// The longest that an operation of a slow disk takes.
const DISK_LATENCY_MAX_MS: std::ops::Range<u64> = 10..3_000;

/// How soon a supervisor starts a server again that has ended by itself.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// Of a hundred operations of a disk, how many fail at most.
const DISK_ERRORS_PERCENT_MAX: u32 = 40;

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
    /// Given instead of drawn.
    script: Option<Script>,
    /// Numbers of those that are left out.
    without: BTreeSet<u32>,
    /// Of the last one.
    count: u32,
    rng: SmallRng,
    next: Duration,
    under_way: Vec<UnderWay>,
    weak: Part,
    /// There are several namenodes.
    is_group: bool,
    copies: Copies,
    power_losses: u64,
    namenode_losses: u64,
}

impl Faults {
    /// The first one begins soon after `start`.
    pub fn new(options: &Options, mut rng: SmallRng, start: Duration) -> Self {
        let mut kinds = options.faults.clone();
        let is_group = options.namenodes > 1;
        kinds.retain(|kind| !is_group || !kind.is_of_copies());
        if rng.random() {
            kinds = kinds.sample(&mut rng, FEW_KINDS).copied().collect();
        }
        let script = options.replay.as_deref().map(Script::new);
        let next = start + Duration::from_millis(rng.random_range(BETWEEN_MS));
        let weak = rng.random_range(0..options.datanodes);
        Self {
            weak: script
                .as_ref()
                .and_then(|it| it.weak(options.datanodes))
                .unwrap_or(Part::Datanode(weak)),
            copies: Copies::new(&match &script {
                Some(_) if is_group => Vec::new(),
                Some(script) => script.kinds(),
                None => kinds.clone(),
            }),
            is_group,
            kinds,
            script,
            without: options.without.clone(),
            count: 0,
            next,
            under_way: Vec::new(),
            power_losses: 0,
            namenode_losses: 0,
            rng,
        }
    }

    /// Faults that began or were left out so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// How often the namenode ended so far, with what it had not made durable.
    pub fn namenode_losses(&self) -> u64 {
        self.namenode_losses
    }

    /// Whether there are older copies of the namenode, which an operator has to look after.
    pub fn need_operator(&self) -> bool {
        self.copies.are_wanted()
    }

    /// Whether what is promised now does not count.
    pub fn are_in_doubt(&self) -> bool {
        self.copies.are_in_doubt()
    }

    /// How often power was lost so far, but for the namenode alone.
    pub fn power_losses(&self) -> u64 {
        self.power_losses
    }

    /// Begins and ends what it is time for. Returns the machines that have started again.
    ///
    /// # Errors
    /// When a machine cannot be started.
    pub fn go_on(&mut self, world: &mut World, journal: &Journal) -> io::Result<Vec<Part>> {
        let now = world.now();
        self.restart_ended(world, journal);
        let (over, under_way) = std::mem::take(&mut self.under_way)
            .into_iter()
            .partition(|fault| fault.ends <= now);
        self.under_way = under_way;
        let restarted = self.end_these(over, world, journal)?;
        if self.script.is_some() {
            self.begin_given(world, journal)?;
        } else if now >= self.next {
            self.next = now + Duration::from_millis(self.rng.random_range(BETWEEN_MS));
            self.begin(world, journal)?;
        }
        let (under_way, weak) = (&self.under_way, self.weak);
        let is_sound = |part| part != weak && !under_way.iter().any(|fault| fault.part == part);
        self.copies.go_on(world, journal, is_sound)?;
        Ok(restarted)
    }

    /// Ends everything. Returns the machines that have started again.
    ///
    /// # Errors
    /// When a machine cannot be started.
    pub fn end(&mut self, world: &mut World, journal: &Journal) -> io::Result<Vec<Part>> {
        self.kinds.clear();
        self.script = None;
        for part in world.parts() {
            world.host(part).set_drift(0);
        }
        let over = std::mem::take(&mut self.under_way);
        self.end_these(over, world, journal)
    }

    /// What has ended by itself is started again soon, as a supervisor does.
    fn restart_ended(&mut self, world: &mut World, journal: &Journal) {
        let began = world.now();
        for (part, why) in world.take_ended() {
            journal.note(&part.to_string(), format_args!("ended: {why}"));
            // It may be about to be started again for another reason.
            if self.is_down(part) {
                continue;
            }
            world.host(part).crash();
            self.namenode_losses += u64::from(part.is_namenode());
            self.add(FaultKind::Crash, part, began, RESTART_PAUSE);
        }
    }

    /// How many of these have nothing wrong with them.
    pub fn sound(&self, parts: &[Part]) -> usize {
        let is_sound = |part: &&Part| !self.under_way.iter().any(|fault| fault.part == **part);
        parts.iter().filter(is_sound).count()
    }

    /// Whether a machine waits to be started again.
    fn is_down(&self, part: Part) -> bool {
        let mut faults = self.under_way.iter();
        faults.any(|fault| fault.part == part && fault.kind.is_down())
    }

    /// Whether a fault can happen to a machine of this cluster.
    fn can_be(&self, kind: FaultKind, part: Part) -> bool {
        kind.is_for(part, self.weak) && !(self.is_group && kind.is_of_copies())
    }

    fn begin(&mut self, world: &mut World, journal: &Journal) -> io::Result<()> {
        // Each with chance of its own, so that one can be left out and the others stay as they are.
        let mut rng = SmallRng::seed_from_u64(self.rng.random());
        let Some(&kind) = self.kinds.choose(&mut rng) else {
            return Ok(());
        };
        let parts = world.parts();
        let of_kind = |part: &&Part| self.can_be(kind, **part);
        let of_kind: Vec<Part> = parts.iter().filter(of_kind).copied().collect();
        let namenodes: Vec<Part> = of_kind
            .iter()
            .copied()
            .filter(|it| it.is_namenode())
            .collect();
        let of_namenode = !namenodes.is_empty() && rng.random_ratio(1, NAMENODE);
        let chosen = match (of_namenode, &namenodes[..]) {
            (true, [only]) => Some(*only),
            (true, several) => several.choose(&mut rng).copied(),
            (false, _) => of_kind.choose(&mut rng).copied(),
        };
        let Some(part) = chosen else {
            return Ok(());
        };
        let range = match rng.random_range(0..LONG) {
            0 => LASTS_LONG_MS,
            _ => LASTS_MS,
        };
        let lasts = Duration::from_millis(rng.random_range(range));
        self.begin_one((kind, part, lasts), world, journal, rng)
    }

    /// Begins what is given and due, each with chance of its own, too.
    fn begin_given(&mut self, world: &mut World, journal: &Journal) -> io::Result<()> {
        let parts = world.parts();
        while let Some(given) = self.script.as_mut().and_then(|it| it.next(world.now())) {
            let rng = SmallRng::seed_from_u64(self.rng.random());
            match given.simulated(&parts) {
                Some(fault) if self.can_be(fault.0, fault.1) => {
                    self.begin_one(fault, world, journal, rng)?;
                }
                _ => {
                    journal.note(&given.part, format_args!("not simulated: {}", given.fault));
                }
            }
        }
        Ok(())
    }

    fn begin_one(
        &mut self,
        (kind, part, lasts): (FaultKind, Part, Duration),
        world: &mut World,
        journal: &Journal,
        mut rng: SmallRng,
    ) -> io::Result<()> {
        let parts = world.parts();
        self.count += 1;
        let number = self.count;
        if self.without.contains(&number) {
            return Ok(());
        }
        if kind == FaultKind::Blackout {
            return self.black_out(number, world, journal, &mut rng);
        }
        if kind == FaultKind::Drift {
            drift(number, world, journal, &mut rng);
            return Ok(());
        }
        // One fault at a time for each machine, so that each ends what it began. But a machine goes down whatever is wrong with it.
        let now = world.now();
        let mut of_part = self.under_way.iter_mut().filter(|fault| fault.part == part);
        match of_part.next() {
            Some(other) if kind.is_down() && !other.kind.is_down() => other.ends = now,
            Some(_) => return Ok(()),
            None => {}
        }
        journal.note(
            &part.to_string(),
            format_args!("fault {number}: {} for {lasts:?}", kind.name()),
        );
        self.namenode_losses += u64::from(kind.is_down() && part.is_namenode());
        let usual = Link::default();
        let sound = Trouble::default();
        match kind {
            FaultKind::Crash => world.host(part).crash(),
            FaultKind::Blackout | FaultKind::Drift => {
                unreachable!("it happens to all machines at once")
            }
            FaultKind::Rollback => {
                if !self.copies.roll_back(world)? {
                    journal.note(&part.to_string(), format_args!("there is no such copy"));
                    return Ok(());
                }
                self.namenode_losses += 1;
            }
            FaultKind::Double => {
                if !self.copies.start_double(part, world)? {
                    journal.note(&part.to_string(), format_args!("there is no such copy"));
                    return Ok(());
                }
            }
            FaultKind::Jump => {
                let offset_ms = rng.random_range(-JUMP_MAX_MS..=JUMP_MAX_MS);
                world.host(part).set_wall_offset(offset_ms);
            }
            FaultKind::SlowDisk => {
                let max = Duration::from_millis(rng.random_range(DISK_LATENCY_MAX_MS));
                world.host(part).set_disk_latency(max);
            }
            FaultKind::Busy => world.set_busy(part, true),
            FaultKind::PowerLoss => {
                world.lose_power(part)?;
                // What the namenode loses alone, clients tell it again.
                self.power_losses += u64::from(!part.is_namenode());
            }
            FaultKind::Reimage => world.reimage(part)?,
            FaultKind::Hang | FaultKind::Suspend => world.host(part).stop(),
            FaultKind::FailedSync => world.disk(part).set_trouble(Trouble {
                next_sync_fails: true,
                ..sound
            }),
            FaultKind::DiskError => world.disk(part).set_trouble(Trouble {
                errors_percent: rng.random_range(1..DISK_ERRORS_PERCENT_MAX),
                ..sound
            }),
            FaultKind::DiskFull => world.disk(part).set_trouble(Trouble {
                is_full: true,
                ..sound
            }),
            FaultKind::Rot => {
                let rotten = world.rot(part, &mut rng)?;
                journal.note(&part.to_string(), format_args!("rot in {rotten:?}"));
            }
            FaultKind::Partition => {
                change_links(Link { cut: true, ..usual }, part, &parts, world, &mut rng);
            }
            FaultKind::Loss => {
                let loss_percent = rng.random_range(1.0..PERCENT_MAX);
                let link = Link {
                    loss_percent,
                    ..usual
                };
                change_links(link, part, &parts, world, &mut rng);
            }
            FaultKind::Delay => {
                let jitter = Duration::from_millis(rng.random_range(1..JITTER_MAX_MS));
                change_links(Link { jitter, ..usual }, part, &parts, world, &mut rng);
            }
            FaultKind::Duplicate => {
                let twice_percent = rng.random_range(1.0..PERCENT_MAX);
                let link = Link {
                    twice_percent,
                    ..usual
                };
                change_links(link, part, &parts, world, &mut rng);
            }
        }
        self.add(kind, part, world.now(), lasts);
        Ok(())
    }

    fn add(&mut self, kind: FaultKind, part: Part, began: Duration, lasts: Duration) {
        self.under_way.push(UnderWay {
            kind,
            part,
            began,
            ends: began + lasts,
        });
    }

    fn end_these(
        &mut self,
        over: Vec<UnderWay>,
        world: &mut World,
        journal: &Journal,
    ) -> io::Result<Vec<Part>> {
        let mut restarted = Vec::new();
        let now = world.now();
        for UnderWay {
            kind, part, began, ..
        } in over
        {
            journal.note(&part.to_string(), format_args!("{} is over", kind.name()));
            match kind {
                FaultKind::Crash
                | FaultKind::PowerLoss
                | FaultKind::Blackout
                | FaultKind::Reimage => {
                    world.host(part).boot()?;
                    world.start(part)?;
                    restarted.push(part);
                }
                FaultKind::Hang => world.host(part).go_on(now - began),
                FaultKind::Suspend => world.host(part).wake_up(now - began),
                FaultKind::FailedSync | FaultKind::DiskError | FaultKind::DiskFull => {
                    world.disk(part).set_trouble(Trouble::default());
                }
                FaultKind::Rot => {}
                FaultKind::SlowDisk => world.host(part).set_disk_latency(Duration::ZERO),
                FaultKind::Busy => world.set_busy(part, false),
                FaultKind::Jump => world.host(part).set_wall_offset(0),
                FaultKind::Rollback => {
                    self.namenode_losses += 1;
                    self.copies.put_newest_back(world, journal)?;
                }
                FaultKind::Double => self.copies.end_double(part == self.weak, world, journal)?,
                FaultKind::Drift => unreachable!("clocks go on so until all faults end"),
                FaultKind::Partition
                | FaultKind::Loss
                | FaultKind::Delay
                | FaultKind::Duplicate => {
                    for other in world.parts() {
                        world.set_link(part, other, Link::default());
                        world.set_link(other, part, Link::default());
                    }
                }
            }
        }
        Ok(restarted)
    }

    /// All machines lose their power, also those that something else happens to, and come back one after
    /// another.
    fn black_out(
        &mut self,
        number: u32,
        world: &mut World,
        journal: &Journal,
        rng: &mut SmallRng,
    ) -> io::Result<()> {
        let now = world.now();
        journal.note("all", format_args!("fault {number}: power is lost"));
        self.power_losses += 1;
        self.namenode_losses += 1;
        for part in world.parts() {
            let lasts = Duration::from_millis(rng.random_range(LASTS_MS));
            world.lose_power(part)?;
            let mut faults = self.under_way.iter_mut();
            // Its other fault ends.
            if let Some(fault) = faults.find(|fault| fault.part == part)
                && !fault.kind.is_down()
            {
                fault.ends = now;
            }
            if !self.is_down(part) {
                self.add(FaultKind::Blackout, part, now, lasts);
            }
        }
        Ok(())
    }
}

/// From a machine, to it, or both; to and from all others, or some.
fn change_links(link: Link, part: Part, parts: &[Part], world: &World, rng: &mut SmallRng) {
    let (from, to) = [(true, true), (true, false), (false, true)]
        .choose(rng)
        .copied()
        .unwrap_or((true, true));
    let some_only = rng.random_range(0..2) == 0;
    for &other in parts {
        if some_only && rng.random_range(0..2) == 0 {
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

/// The clocks of all machines go on at other rates.
fn drift(number: u32, world: &mut World, journal: &Journal, rng: &mut SmallRng) {
    for part in world.parts() {
        let ppm = match rng.random_range(0..3) {
            0 => -DRIFT_MAX_PPM,
            1 => DRIFT_MAX_PPM,
            _ => rng.random_range(-DRIFT_MAX_PPM..=DRIFT_MAX_PPM),
        };
        let name = FaultKind::Drift.name();
        journal.note(
            &part.to_string(),
            format_args!("fault {number}: {name} of {ppm} millionths"),
        );
        world.host(part).set_drift(ppm);
    }
}
