//! The beginning of faults.

use std::io;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

use super::{FaultKind, Faults, LASTS_MS, Then, UnderWay};
use crate::simulate::cluster::disk::Trouble;
use crate::simulate::cluster::forgotten;
use crate::simulate::cluster::journal::Journal;
use crate::simulate::cluster::links;
use crate::simulate::cluster::network::Link;
use crate::simulate::cluster::part::Part;
use crate::simulate::cluster::world::World;

/// The highest percentage of datagrams that are lost or arrive twice.
const PERCENT_MAX: f64 = 30.0;
const JITTER_MAX_MS: u64 = 200;
/// One delay out of `LONG_DELAY` has the larger jitter; one out of `CUT_AFTER_DELAY` ends with the machine being cut
/// off until leases have expired.
const LONG_DELAY: u32 = 4;
const JITTER_LONG_MAX_MS: u64 = 2_000;
const CUT_AFTER_DELAY: u32 = 3;
const CUT_MS: std::ops::Range<u64> = 11_000..16_000;
/// One partition of a client out of `CUT_AFTER_RENEWAL` begins right after the client renewed its lease, which it does
/// within `RENEWED_WITHIN`; in one of these out of `LATE_ANSWER`, the answer is late.
const CUT_AFTER_RENEWAL: u32 = 3;
const RENEWED_WITHIN: Duration = Duration::from_secs(8);
const LATE_ANSWER: u32 = 2;

/// The largest error of a wall clock: "Keep them within minutes for block tokens" (`docs/OPERATIONS.md`).
const JUMP_MAX_MS: i64 = 5 * 60_000;
/// The range of the longest time that an operation of a slow disk takes.
const DISK_LATENCY_MAX_MS: std::ops::Range<u64> = 10..3_000;
/// One slow disk out of this many completes nothing before the fault is over.
const STUCK_DISK: u32 = 4;
/// For one stuck disk of a single namenode out of this many, all machines but the datanodes lose power afterwards.
const BLACKOUT_AFTER: u32 = 2;
/// How long the disk is stuck before that: datanodes remove replicas only after they have received the command and
/// persisted, every few seconds, which namenode they obeyed.
const LASTS_STUCK_MS: std::ops::Range<u64> = 14_000..25_000;

/// One blackout out of this many spares the datanodes, as if they were at another site.
const SPARED_DATANODES: u32 = 3;

/// A leader that was replaced within this time may have lost what was not durable.
const HANDED_OVER: Duration = Duration::from_secs(1);
/// One transfer out of this many is only the first of several in quick succession.
const ONE_AFTER_ANOTHER: u32 = 3;
const FOLLOWING: std::ops::Range<usize> = 2..10;
const FOLLOWS_AFTER_MS: std::ops::Range<u64> = 100..1_000;
/// The upper bound of the percentage of disk operations that fail.
const DISK_ERRORS_PERCENT_MAX: u32 = 40;
/// One crash or power loss of a group member out of this many is over before another member can be elected.
const QUICK: u32 = 3;
const LASTS_QUICK_MS: std::ops::Range<u64> = 1..100;
/// With one slow disk of a member out of this many, the disks of all members are slow, as if they were at one site.
const ONE_PLACE: u32 = 3;
/// One split out of `LONG_SPLIT` lasts until leases have expired, and in one out of `STARTED_ANEW` the other namenodes
/// have just been restarted.
const LONG_SPLIT: u32 = 3;
const LASTS_SPLIT_MS: std::ops::Range<u64> = 12_000..25_000;
const STARTED_ANEW: u32 = 3;

impl Faults {
    pub(super) fn begin_one(
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
            let mut to_come = self.under_way.iter();
            if to_come.any(|fault| matches!(fault.then, Some(Then::Blackout(_)))) {
                // It would happen before anything is removed wrongly, and so hide that.
                return Ok(());
            }
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
        let is_missing = matches!(kind, FaultKind::Wipe | FaultKind::Leave);
        if is_missing && self.is_member_missing() {
            return Ok(());
        }
        // Ending one would end the other, too.
        if matches!(kind, FaultKind::Split | FaultKind::Double) && self.is_under_way(kind) {
            return Ok(());
        }
        // One fault at a time for each machine, so that each ends what it began. But a machine may go down during any
        // other fault.
        let now = world.now();
        let mut of_part = self.under_way.iter_mut().filter(|fault| fault.part == part);
        match of_part.next() {
            Some(other) if kind.is_down() && !other.kind.is_down() => other.ends = now,
            Some(_) => return Ok(()),
            None => {}
        }
        let lasts = self.lasts(kind, part, lasts, &mut rng);
        journal.note(
            &part.to_string(),
            format_args!("fault {number}: {} for {lasts:?}", kind.name()),
        );
        self.namenode_losses += u64::from(kind.is_down() && part.is_namenode());
        let usual = Link::default();
        let sound = Trouble::default();
        let mut lasts = lasts;
        let mut then = None;
        match kind {
            FaultKind::Crash => world.host(part).crash(),
            FaultKind::Blackout | FaultKind::Drift | FaultKind::Outage => {
                unreachable!("it happens to several machines at once")
            }
            FaultKind::Transfer => {
                let mut leading = vec![(Duration::ZERO, part)];
                if rng.random_ratio(1, ONE_AFTER_ANOTHER) {
                    let namenodes = world.namenodes();
                    for _ in 0..rng.random_range(FOLLOWING) {
                        let pause = Duration::from_millis(rng.random_range(FOLLOWS_AFTER_MS));
                        leading.extend(namenodes.choose(&mut rng).map(|next| (pause, *next)));
                    }
                    let count = leading.len();
                    journal.note("namenodes", format_args!("{count} lead one after another"));
                }
                lasts = HANDED_OVER + leading.iter().map(|(pause, _)| *pause).sum::<Duration>();
                forgotten::hand_over(leading, world)?;
            }
            FaultKind::Split => {
                if rng.random_ratio(1, STARTED_ANEW) {
                    self.start_others_anew(part, world, journal)?;
                }
                links::split(part, &parts, world, &mut rng);
            }
            FaultKind::Forget => self.forgotten.copy(part, world)?,
            FaultKind::Wipe => world.host(part).crash(),
            FaultKind::Leave => self.forgotten.leave(part, world)?,
            FaultKind::Rollback => {
                if !self.copies.roll_back(world)? {
                    journal.note(&part.to_string(), format_args!("there is no such copy"));
                    return Ok(());
                }
                self.namenode_losses += 1;
            }
            FaultKind::Double if self.is_group => world.start_double_of_member(part, journal)?,
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
                    if part.is_namenode()
                        && !self.is_group
                        && self.kinds.contains(&FaultKind::Blackout)
                        && rng.random_ratio(1, BLACKOUT_AFTER)
                    {
                        then = Some(Then::Blackout(rng.random()));
                        lasts = Duration::from_millis(rng.random_range(LASTS_STUCK_MS));
                    }
                    world.host(part).set_disk_latency(lasts, lasts);
                } else {
                    world.host(part).set_disk_latency(Duration::ZERO, max);
                }
                if part.is_namenode() && self.is_group && rng.random_ratio(1, ONE_PLACE) {
                    self.slow_down_others((part, max, lasts), world, journal);
                }
            }
            FaultKind::Busy => world.set_busy(part, true),
            FaultKind::PowerLoss => {
                world.lose_power(part)?;
                // If the namenode alone loses something, clients send it again.
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
            FaultKind::Partition
                if matches!(part, Part::Client(_))
                    && !self.is_group
                    && rng.random_ratio(1, CUT_AFTER_RENEWAL) =>
            {
                let late = rng
                    .random_ratio(1, LATE_ANSWER)
                    .then_some(Duration::from_millis(JITTER_LONG_MAX_MS));
                let cut = Duration::from_millis(rng.random_range(CUT_MS));
                self.cut_offs.ask(part, late, cut);
                lasts = RENEWED_WITHIN;
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
                    then = Some(Then::Cut(Duration::from_millis(rng.random_range(CUT_MS))));
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
            added.then = then;
        }
        Ok(())
    }

    /// Cuts the power of machines at the same time, including those with other faults; they come back one
    /// after another.
    pub(super) fn lose_power(
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

    pub(super) fn add(&mut self, kind: FaultKind, part: Part, began: Duration, lasts: Duration) {
        self.under_way.push(UnderWay {
            kind,
            part,
            began,
            ends: began + lasts,
            then: None,
        });
        if kind.is_of_disk() {
            self.may_end.insert(part);
        }
    }

    /// How long a fault lasts. Faults of group members may be shorter or longer than drawn.
    fn lasts(&self, kind: FaultKind, part: Part, lasts: Duration, rng: &mut SmallRng) -> Duration {
        if !self.is_group || !part.is_namenode() {
            return lasts;
        }
        let range = match kind {
            FaultKind::Crash | FaultKind::PowerLoss if rng.random_ratio(1, QUICK) => LASTS_QUICK_MS,
            FaultKind::Split if rng.random_ratio(1, LONG_SPLIT) => LASTS_SPLIT_MS,
            _ => return lasts,
        };
        Duration::from_millis(rng.random_range(range))
    }

    /// Restarts all namenodes but one, except those with a fault: they have forgotten what they had
    /// not written down, and no time has passed.
    fn start_others_anew(
        &mut self,
        but: Part,
        world: &mut World,
        journal: &Journal,
    ) -> io::Result<()> {
        let mut others = world.namenodes();
        others.retain(|it| *it != but && !self.has_fault(*it));
        for other in others {
            journal.note(&other.to_string(), format_args!("it is started anew"));
            self.namenode_losses += 1;
            world.host(other).crash();
            world.host(other).boot()?;
            world.start(other)?;
        }
        Ok(())
    }

    /// Makes the disks of all other namenodes equally slow.
    fn slow_down_others(
        &mut self,
        (part, max, lasts): (Part, Duration, Duration),
        world: &mut World,
        journal: &Journal,
    ) {
        let mut others = world.namenodes();
        others.retain(|it| *it != part && !self.has_fault(*it));
        for other in others {
            journal.note(&other.to_string(), format_args!("its disk is slow, too"));
            world.host(other).set_disk_latency(Duration::ZERO, max);
            self.add(FaultKind::SlowDisk, other, world.now(), lasts);
        }
    }
}
