//! Faults of machines and of the network between them.

mod begin;
mod end;

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::Options;
use super::copies::Copies;
use super::cut_off::{CutOffs, Due};
use super::forgotten::Forgotten;
use super::group::Leader;
use super::journal::Journal;
use super::kind::FaultKind;
use super::links;
use super::network::Link;
use super::part::Part;
use super::replay::Script;
use super::world::World;

/// The time between the beginnings of two faults, and how long a fault lasts, in milliseconds.
const BETWEEN_MS: std::ops::Range<u64> = 500..6_000;
const LASTS_MS: std::ops::Range<u64> = 100..12_000;
/// One fault out of this many lasts longer, until leases have expired.
const LONG: u32 = 8;
const LASTS_LONG_MS: std::ops::Range<u64> = 12_000..45_000;
/// Of the faults that can affect the namenode, at least one out of this many does, since everything depends on it.
const NAMENODE: u32 = 8;
/// The same for a group of namenodes, which is what their simulations are about.
const NAMENODE_OF_GROUP: u32 = 2;
/// Every second simulation is limited to this many kinds of faults: this finds what takes several faults of one kind.
const FEW_KINDS: usize = 3;
/// How soon a supervisor restarts a server that has ended on its own.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// A fault that has begun.
struct UnderWay {
    kind: FaultKind,
    part: Part,
    began: Duration,
    ends: Duration,
    then: Option<Then>,
}

/// What follows right after a fault.
enum Then {
    /// The machine is cut off for this long.
    Cut(Duration),
    /// All machines but the datanodes lose power, for times that this seed decides.
    Blackout(u64),
}

/// Begins faults by chance, and ends them.
pub struct Faults {
    kinds: Vec<FaultKind>,
    /// Faults that are given instead of drawn.
    script: Option<Script>,
    /// The numbers of faults that are left out.
    without: BTreeSet<u32>,
    /// The number of the last fault.
    count: u32,
    rng: SmallRng,
    next: Duration,
    under_way: Vec<UnderWay>,
    weak: Part,
    /// Whether there are several namenodes.
    is_group: bool,
    leader: Leader,
    cut_offs: CutOffs,
    copies: Copies,
    forgotten: Forgotten,
    /// Parts that may end on their own, since their disks had faults.
    may_end: BTreeSet<Part>,
    power_losses: u64,
    namenode_losses: u64,
}

impl Faults {
    /// Creates the faults of a simulation. The first one begins soon after `start`.
    pub fn new(
        options: &Options,
        mut rng: SmallRng,
        start: Duration,
        (leader, cut_offs): (&Leader, &CutOffs),
    ) -> Self {
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
            // A member of a group is copied when a fault needs that.
            copies: Copies::new(&match &script {
                _ if is_group => Vec::new(),
                Some(script) => script.kinds(),
                None => kinds.clone(),
            }),
            is_group,
            leader: leader.clone(),
            cut_offs: cut_offs.clone(),
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

    /// The number of faults that have begun or were left out so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// How often a namenode has ended so far and lost what it had not made durable.
    pub fn namenode_losses(&self) -> u64 {
        self.namenode_losses
    }

    /// Whether it is likely that records wait to be synced for long and are then lost with the power.
    pub fn lose_what_waits(&self) -> bool {
        let needed = [FaultKind::SlowDisk, FaultKind::Blackout];
        self.kinds.len() <= FEW_KINDS && needed.iter().all(|kind| self.kinds.contains(kind))
    }

    /// Whether older copies of the namenode are used, which need an operator's attention.
    pub fn need_operator(&self) -> bool {
        self.copies.are_wanted()
    }

    /// Whether what is promised now does not count.
    pub fn are_in_doubt(&self) -> bool {
        self.copies.are_in_doubt()
    }

    /// How often power has been lost so far, not counting losses of a namenode alone.
    pub fn power_losses(&self) -> u64 {
        self.power_losses
    }

    /// Begins and ends the faults that are due. Returns the machines that have started again.
    ///
    /// # Errors
    /// When a machine cannot be started.
    pub fn go_on(&mut self, world: &mut World, journal: &Journal) -> io::Result<Vec<Part>> {
        let now = world.now();
        self.forgotten.go_on();
        let leader = self.leader.now(now);
        let leader = leader.filter(|(part, _)| !self.has_fault(*part));
        self.forgotten.look_at_copy(leader, world);
        self.restart_ended(world, journal);
        self.cut_off_clients(world, journal);
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

    /// Ends all faults. Returns the machines that have started again.
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
            fault.then = None;
        }
        self.end_these(over, world, journal)
    }

    /// Cuts off clients that have just renewed their leases.
    fn cut_off_clients(&mut self, world: &World, journal: &Journal) {
        for (part, due) in self.cut_offs.take_due() {
            match due {
                Due::Delay(jitter) => {
                    journal.note(
                        &part.to_string(),
                        format_args!("answers are late by up to {jitter:?}"),
                    );
                    let usual = Link::default();
                    for namenode in world.namenodes() {
                        world.set_link(namenode, part, Link { jitter, ..usual });
                    }
                }
                Due::Cut(lasts) => {
                    let is_it = |fault: &&mut UnderWay| {
                        fault.part == part && fault.kind == FaultKind::Partition
                    };
                    // The client may have crashed in the meantime.
                    let Some(fault) = self.under_way.iter_mut().find(is_it) else {
                        continue;
                    };
                    fault.ends = world.now() + lasts;
                    journal.note(
                        &part.to_string(),
                        format_args!("is cut off after it renewed its lease, for {lasts:?}"),
                    );
                    links::set_all(part, links::CUT, world);
                }
            }
        }
    }

    /// Has servers that ended on their own restarted soon, as a supervisor would.
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
            // It may already be about to restart for another reason.
            if self.is_down(part) {
                continue;
            }
            world.host(part).crash();
            self.namenode_losses += u64::from(part.is_namenode());
            self.add(FaultKind::Crash, part, began, RESTART_PAUSE);
        }
    }

    /// The number of these parts that no fault affects, nor what a fault has left behind.
    pub fn sound(&self, parts: &[Part], world: &mut World) -> usize {
        let is_sound = |part: &&Part| {
            let is_hurt = self.has_fault(**part) || self.forgotten.is(**part);
            !is_hurt && !world.host(**part).is_disk_at_work()
        };
        parts.iter().filter(is_sound).count()
    }

    /// Whether a fault affects a machine.
    fn has_fault(&self, part: Part) -> bool {
        self.under_way.iter().any(|fault| fault.part == part)
    }

    /// Whether a fault of this kind affects any machine.
    fn is_under_way(&self, kind: FaultKind) -> bool {
        self.under_way.iter().any(|fault| fault.kind == kind)
    }

    /// Whether a namenode has lost its directory or its place in the group, which at most one may have at a time.
    fn is_member_missing(&self) -> bool {
        let is_lost = self.is_under_way(FaultKind::Wipe) || self.is_under_way(FaultKind::Leave);
        is_lost || self.forgotten.is_any()
    }

    /// Whether a machine is down and waits to be started again.
    fn is_down(&self, part: Part) -> bool {
        let mut faults = self.under_way.iter();
        faults.any(|fault| fault.part == part && fault.kind.is_down())
    }

    /// Whether a fault can affect a machine of this cluster.
    fn can_be(&self, kind: FaultKind, part: Part) -> bool {
        // A copy of a single namenode needs a datanode that follows it; a copy of a group member takes part on its own.
        let is_double_of = part.is_namenode() == self.is_group;
        kind.is_for(part, self.weak)
            && kind.is_for_group(self.is_group)
            && (kind != FaultKind::Double || is_double_of)
    }

    fn begin(&mut self, world: &mut World, journal: &Journal) -> io::Result<()> {
        // Each fault has its own random generator, so that one can be left out without changing the others.
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
        let one_of = if self.is_group {
            NAMENODE_OF_GROUP
        } else {
            NAMENODE
        };
        let of_namenode = !namenodes.is_empty() && rng.random_ratio(1, one_of);
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

    /// Begins the given faults that are due, each with its own random generator, too.
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
}
