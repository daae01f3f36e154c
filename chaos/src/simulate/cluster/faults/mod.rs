//! What happens to machines and to the network between them.

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

/// Shortest and longest time between the beginnings of two faults, and that a fault lasts, in milliseconds.
const BETWEEN_MS: std::ops::Range<u64> = 500..6_000;
const LASTS_MS: std::ops::Range<u64> = 100..12_000;
/// Of so many faults, one lasts longer, until leases are over.
const LONG: u32 = 8;
const LASTS_LONG_MS: std::ops::Range<u64> = 12_000..45_000;
/// Of so many faults that can happen to the namenode, which everybody needs, one at least does.
const NAMENODE: u32 = 8;
/// The same for several namenodes, which is what their simulations are about.
const NAMENODE_OF_GROUP: u32 = 2;
/// So many kinds of faults are in every second simulation, others are not: what needs several of one kind is found so.
const FEW_KINDS: usize = 3;
/// How soon a supervisor starts a server again that has ended by itself.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// A fault that has begun.
struct UnderWay {
    kind: FaultKind,
    part: Part,
    began: Duration,
    ends: Duration,
    then: Option<Then>,
}

/// What comes right after a fault.
enum Then {
    /// Nothing gets to the machine, or from it, for so long.
    Cut(Duration),
    /// All but datanodes lose their power, as this seed says.
    Blackout(u64),
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
    cut_offs: CutOffs,
    copies: Copies,
    forgotten: Forgotten,
    /// Namenodes that may end by themselves, since something was wrong with their disks.
    may_end: BTreeSet<Part>,
    power_losses: u64,
    namenode_losses: u64,
}

impl Faults {
    /// The first one begins soon after `start`.
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

    /// Faults that began or were left out so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// How often the namenode ended so far, with what it had not made durable.
    pub fn namenode_losses(&self) -> u64 {
        self.namenode_losses
    }

    /// Whether it is likely that records wait for long, and are lost then with the power.
    pub fn lose_what_waits(&self) -> bool {
        let needed = [FaultKind::SlowDisk, FaultKind::Blackout];
        self.kinds.len() <= FEW_KINDS && needed.iter().all(|kind| self.kinds.contains(kind))
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
                    // It may have crashed meanwhile.
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
        let is_sound = |part: &&Part| !self.has_fault(**part) && !self.forgotten.is(**part);
        parts.iter().filter(is_sound).count()
    }

    /// Whether something happens to a machine.
    fn has_fault(&self, part: Part) -> bool {
        self.under_way.iter().any(|fault| fault.part == part)
    }

    /// Whether this happens to a machine.
    fn is_under_way(&self, kind: FaultKind) -> bool {
        self.under_way.iter().any(|fault| fault.kind == kind)
    }

    /// Whether a namenode has lost its memory, or its place in the group: one at a time does.
    fn is_member_missing(&self) -> bool {
        let is_lost = self.is_under_way(FaultKind::Wipe) || self.is_under_way(FaultKind::Leave);
        is_lost || self.forgotten.is_any()
    }

    /// Whether a machine waits to be started again.
    fn is_down(&self, part: Part) -> bool {
        let mut faults = self.under_way.iter();
        faults.any(|fault| fault.part == part && fault.kind.is_down())
    }

    /// Whether a fault can happen to a machine of this cluster.
    fn can_be(&self, kind: FaultKind, part: Part) -> bool {
        // The copy of the only namenode has a datanode follow it, that of a member of a group speaks for itself.
        let is_double_of = part.is_namenode() == self.is_group;
        kind.is_for(part, self.weak)
            && kind.is_for_group(self.is_group)
            && (kind != FaultKind::Double || is_double_of)
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
}
