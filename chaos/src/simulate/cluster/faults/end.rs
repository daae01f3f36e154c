//! The end of faults.

use std::io;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::{FaultKind, Faults, Then, UnderWay};
use crate::simulate::cluster::disk::Trouble;
use crate::simulate::cluster::journal::Journal;
use crate::simulate::cluster::links;
use crate::simulate::cluster::network::Link;
use crate::simulate::cluster::part::Part;
use crate::simulate::cluster::world::World;

impl Faults {
    pub(super) fn end_these(
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
            then,
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
                FaultKind::Wipe | FaultKind::Leave => {
                    self.namenode_losses += 1;
                    self.may_end.remove(&part);
                    self.forgotten.begin_anew(part, world, journal)?;
                }
                FaultKind::Double if self.is_group => world.end_double_of_member(),
                FaultKind::Double => self.copies.end_double(part == self.weak, world, journal)?,
                FaultKind::Drift => unreachable!("clocks go on so until all faults end"),
                FaultKind::Partition
                | FaultKind::Loss
                | FaultKind::Delay
                | FaultKind::Duplicate => {
                    self.cut_offs.end(part);
                    links::set_all(part, Link::default(), world);
                }
                FaultKind::Split => {
                    for one in world.parts() {
                        links::set_all(one, Link::default(), world);
                    }
                }
            }
            match then {
                Some(Then::Cut(lasts)) => self.cut_off(part, lasts, world, journal),
                Some(Then::Blackout(seed)) => {
                    let mut parts = world.parts();
                    parts.retain(|it| !matches!(it, Part::Datanode(_)));
                    journal.note("all", format_args!("then power is lost, but for datanodes"));
                    self.power_losses += 1;
                    let mut rng = SmallRng::seed_from_u64(seed);
                    self.lose_power(FaultKind::Blackout, &parts, world, &mut rng)?;
                }
                None => {}
            }
        }
        Ok(restarted)
    }

    /// Cuts off a machine; datagrams that are already in flight arrive.
    fn cut_off(&mut self, part: Part, lasts: Duration, world: &World, journal: &Journal) {
        // Another fault may have begun when the previous one ended.
        if self.has_fault(part) {
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

    /// Has a namenode forget everything since its copy was made, if there is a leader that would notice.
    fn forget(&mut self, part: Part, world: &mut World, journal: &Journal) -> io::Result<()> {
        let leader = self.leader.now(world.now());
        let is_known = leader.is_some_and(|(leader, _)| leader != part && !self.has_fault(leader));
        if !is_known || self.has_fault(part) || self.is_member_missing() {
            journal.note(
                &part.to_string(),
                format_args!("forgets nothing: nobody would notice"),
            );
            return Ok(());
        }
        self.namenode_losses += 1;
        self.may_end.remove(&part);
        self.forgotten.forget(part, &self.leader, world, journal)
    }
}
