//! What happens to machines and to the network between them.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::copies::Copies;
use super::disk::Trouble;
use super::forgotten::{self, Forgotten};
use super::group::Leader;
use super::journal::Journal;
use super::kind::FaultKind;
use super::links;
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
/// The same of one of so many delays; and of so many, one ends with nothing getting through until leases are over.
const LONG_DELAY: u32 = 4;
const JITTER_LONG_MAX_MS: u64 = 2_000;
const CUT_AFTER_DELAY: u32 = 3;
const CUT_MS: std::ops::Range<u64> = 11_000..16_000;

/// How wrong a wall clock is at most: "Keep them within minutes for block tokens" (`docs/OPERATIONS.md`).
const JUMP_MAX_MS: i64 = 5 * 60_000;
/// The longest that an operation of a slow disk takes.
const DISK_LATENCY_MAX_MS: std::ops::Range<u64> = 10..3_000;
/// Of so many slow disks, one does nothing before the fault is over.
const STUCK_DISK: u32 = 4;

/// Of so many blackouts, one is where namenodes, clients and mounts are, and datanodes are elsewhere.
const SPARED_DATANODES: u32 = 3;

/// How soon a supervisor starts a server again that has ended by itself.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// Whoever leads less than so long ago may have lost what was not durable.
const HANDED_OVER: Duration = Duration::from_secs(1);
/// Of a hundred operations of a disk, how many fail at most.
const DISK_ERRORS_PERCENT_MAX: u32 = 40;

/// A fault that has begun.
struct UnderWay {
    kind: FaultKind,
    part: Part,
    began: Duration,
    ends: Duration,
    /// Then nothing gets to it and from it for so long.
    then_cut: Option<Duration>,
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
    leader: Leader,
    copies: Copies,
    forgotten: Forgotten,
    /// Namenodes that may end by themselves, since something was wrong with their disks.
    may_end: BTreeSet<Part>,
    power_losses: u64,
    namenode_losses: u64,
}

impl Faults {
    /// The first one begins soon after `start`.
    pub fn new(options: &Options, mut rng: SmallRng, start: Duration, leader: &Leader) -> Self {
        let mut kinds = options.faults.clone();
        let is_group = options.namenodes > 1;
        kinds.retain(|kind| kind.is_for_group(is_group));
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
            leader: leader.clone(),
            kinds,
            script,
            without: options.without.clone(),
            forgotten: Forgotten::default(),
            may_end: BTreeSet::new(),
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
        self.forgotten.go_on();
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
        let mut over = std::mem::take(&mut self.under_way);
        over.retain(|fault| fault.kind != FaultKind::Forget);
        for fault in &mut over {
            fault.then_cut = None;
        }
        self.end_these(over, world, journal)
    }

    /// What has ended by itself is started again soon, as a supervisor does.
    fn restart_ended(&mut self, world: &mut World, journal: &Journal) {
        let began = world.now();
        for (part, why) in world.take_ended() {
            journal.note(&part.to_string(), format_args!("ended: {why}"));
            let may_end = self.may_end.contains(&part) || self.are_in_doubt();
            if part.is_namenode() && !may_end {
                journal.failure(format!(
                    "{part} ended, and its disk did all it had to: {why}"
                ));
            }
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
        let is_sound = |part: &&Part| {
            !self.under_way.iter().any(|fault| fault.part == **part) && !self.forgotten.is(**part)
        };
        parts.iter().filter(is_sound).count()
    }

    /// Whether a machine waits to be started again.
    fn is_down(&self, part: Part) -> bool {
        let mut faults = self.under_way.iter();
        faults.any(|fault| fault.part == part && fault.kind.is_down())
    }

    /// Whether a fault can happen to a machine of this cluster.
    fn can_be(&self, kind: FaultKind, part: Part) -> bool {
        kind.is_for(part, self.weak) && kind.is_for_group(self.is_group)
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
        let is_of_namenodes = part.is_namenode() || kind == FaultKind::Blackout;
        if is_of_namenodes && self.forgotten.is_unnoticed(world.now()) {
            return Ok(());
        }
        if kind == FaultKind::Blackout {
            let mut parts = parts;
            let are_spared = rng.random_ratio(1, SPARED_DATANODES);
            if are_spared {
                parts.retain(|it| !matches!(it, Part::Datanode(_)));
            }
            let but = if are_spared {
                ", but for datanodes"
            } else {
                ""
            };
            journal.note("all", format_args!("fault {number}: power is lost{but}"));
            self.power_losses += 1;
            return self.lose_power(kind, &parts, world, &mut rng);
        }
        if kind == FaultKind::Outage {
            let mut others = world.namenodes();
            others.retain(|it| *it != part);
            journal.note(
                "namenodes",
                format_args!("fault {number}: all but {part} lose their power"),
            );
            return self.lose_power(kind, &others, world, &mut rng);
        }
        if kind == FaultKind::Drift {
            links::drift(number, world, journal, &mut rng);
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
        let mut lasts = lasts;
        let mut then_cut = None;
        match kind {
            FaultKind::Crash => world.host(part).crash(),
            FaultKind::Blackout | FaultKind::Drift | FaultKind::Outage => {
                unreachable!("it happens to several machines at once")
            }
            FaultKind::Transfer => {
                forgotten::hand_over(part, world)?;
                lasts = HANDED_OVER;
            }
            FaultKind::Split => links::split(part, &parts, world, &mut rng),
            FaultKind::Forget => world.copy_directory_of(part)?,
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
                if rng.random_ratio(1, STUCK_DISK) {
                    journal.note(&part.to_string(), format_args!("its disk does nothing"));
                    world.host(part).set_disk_latency(lasts, lasts);
                } else {
                    world.host(part).set_disk_latency(Duration::ZERO, max);
                }
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
                links::change(links::CUT, part, &parts, world, &mut rng);
            }
            FaultKind::Loss => {
                let loss_percent = rng.random_range(1.0..PERCENT_MAX);
                let link = Link {
                    loss_percent,
                    ..usual
                };
                links::change(link, part, &parts, world, &mut rng);
            }
            FaultKind::Delay => {
                let max_ms = match rng.random_range(0..LONG_DELAY) {
                    0 => JITTER_LONG_MAX_MS,
                    _ => JITTER_MAX_MS,
                };
                let jitter = Duration::from_millis(rng.random_range(1..max_ms));
                if rng.random_ratio(1, CUT_AFTER_DELAY) {
                    then_cut = Some(Duration::from_millis(rng.random_range(CUT_MS)));
                }
                links::change(Link { jitter, ..usual }, part, &parts, world, &mut rng);
            }
            FaultKind::Duplicate => {
                let twice_percent = rng.random_range(1.0..PERCENT_MAX);
                let link = Link {
                    twice_percent,
                    ..usual
                };
                links::change(link, part, &parts, world, &mut rng);
            }
        }
        self.add(kind, part, world.now(), lasts);
        if let Some(added) = self.under_way.last_mut() {
            added.then_cut = then_cut;
        }
        Ok(())
    }

    fn add(&mut self, kind: FaultKind, part: Part, began: Duration, lasts: Duration) {
        self.under_way.push(UnderWay {
            kind,
            part,
            began,
            ends: began + lasts,
            then_cut: None,
        });
        if kind.is_of_disk() {
            self.may_end.insert(part);
        }
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
            kind,
            part,
            began,
            then_cut,
            ..
        } in over
        {
            journal.note(&part.to_string(), format_args!("{} is over", kind.name()));
            match kind {
                FaultKind::Crash
                | FaultKind::PowerLoss
                | FaultKind::Blackout
                | FaultKind::Outage
                | FaultKind::Reimage => {
                    let mut left = self.under_way.iter();
                    if !left.any(|fault| fault.part == part && fault.kind.is_of_disk()) {
                        self.may_end.remove(&part);
                    }
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
                FaultKind::SlowDisk => {
                    world
                        .host(part)
                        .set_disk_latency(Duration::ZERO, Duration::ZERO);
                }
                FaultKind::Transfer => {}
                FaultKind::Forget => self.forget(part, world, journal)?,
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
                    links::set_all(part, Link::default(), world);
                }
                FaultKind::Split => {
                    for one in world.parts() {
                        links::set_all(one, Link::default(), world);
                    }
                }
            }
            if let Some(lasts) = then_cut {
                self.cut_off(part, lasts, world, journal);
            }
        }
        Ok(restarted)
    }

    /// Nothing gets to a machine, or from it; what is on its way arrives.
    fn cut_off(&mut self, part: Part, lasts: Duration, world: &World, journal: &Journal) {
        // Something else may have begun at the end of what was before.
        if self.under_way.iter().any(|fault| fault.part == part) {
            return;
        }
        let kind = FaultKind::Partition;
        journal.note(
            &part.to_string(),
            format_args!("then {} for {lasts:?}", kind.name()),
        );
        links::set_all(part, links::CUT, world);
        self.add(kind, part, world.now(), lasts);
    }

    /// A namenode forgets what came after its copy was made, if the leader is there, which knows it.
    fn forget(&mut self, part: Part, world: &mut World, journal: &Journal) -> io::Result<()> {
        let under_way = &self.under_way;
        let is_sound = |it: &Part| !under_way.iter().any(|fault| fault.part == *it);
        let leader = self.leader.now(world.now());
        let is_known = leader.is_some_and(|leader| leader != part && is_sound(&leader));
        if !is_known || !is_sound(&part) || self.forgotten.is_any() {
            journal.note(
                &part.to_string(),
                format_args!("forgets nothing: nobody would notice"),
            );
            return Ok(());
        }
        self.namenode_losses += 1;
        self.may_end.remove(&part);
        self.forgotten.forget(part, world, journal)
    }

    /// Machines lose their power at the same time, also those that something else happens to, and come back one
    /// after another.
    fn lose_power(
        &mut self,
        kind: FaultKind,
        parts: &[Part],
        world: &mut World,
        rng: &mut SmallRng,
    ) -> io::Result<()> {
        let now = world.now();
        self.namenode_losses += 1;
        for &part in parts {
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
                self.add(kind, part, now, lasts);
            }
        }
        Ok(())
    }
}
