//! Power loss at every operation of random histories of a replicated journal: appending,
//! truncating, snapshots of its own and of a peer, purging, with syncs that fail and restarts. Then
//! recovery, power loss during that, and recovery again.

use std::io::{self, Read, Write};
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::sim_disk::{Faults, Image, Op, Replay, SimDisk};
use super::*;

/// Histories; each is cut at each of its operations.
const SEEDS: std::ops::Range<u64> = 0..16;
const ACTIONS: u32 = 50;
/// Images per cut.
const IMAGES: u64 = 3;
/// Once per this many images, all cuts of the recovery are tried as well.
const RECOVERY_EVERY: u64 = 25;

/// The contents of the journal.
#[derive(Debug, Clone, Default)]
struct World {
    snapshot_lsn: Lsn,
    /// For each record appended, from 1 on, how many others may have had its number before.
    epochs: Vec<usize>,
    durable_lsn: Lsn,
}

/// The result of a recovery.
struct Found {
    snapshot: Option<(Lsn, Vec<u8>)>,
    last_lsn: Lsn,
    /// After the snapshot.
    records: Vec<(Lsn, Vec<u8>)>,
    /// All that a peer could read.
    readable: Vec<(Lsn, Vec<u8>)>,
    first_lsn: Lsn,
}

fn snapshot_content(lsn: Lsn) -> Vec<u8> {
    (0..lsn as usize * 37 % 3000)
        .map(|i| (lsn as usize + i * 3) as u8)
        .collect()
}

fn open(disk: &SimDisk) -> Result<(Journal, Recovered), JournalError> {
    Journal::open_on(Arc::new(disk.clone()), &options())
}

fn recover(disk: &SimDisk) -> Result<(Journal, Found), JournalError> {
    let (journal, recovered) = open(disk)?;
    assert!(recovered.skipped_snapshots.is_empty());
    let snapshot = recovered.snapshot.map(|(lsn, mut reader)| {
        let mut content = Vec::new();
        reader.read_to_end(&mut content).unwrap();
        (lsn, content)
    });
    let mut reader = journal.reader();
    let first_lsn = reader.first_lsn();
    let found = Found {
        snapshot,
        last_lsn: recovered.last_lsn,
        records: recovered.records.map(Result::unwrap).collect(),
        readable: reader.read(first_lsn, Lsn::MAX, usize::MAX).unwrap(),
        first_lsn,
    };
    assert_eq!(journal.last_lsn(), found.last_lsn);
    Ok((journal, found))
}

impl World {
    fn last_lsn(&self) -> Lsn {
        self.epochs.len() as Lsn
    }

    /// Whether this is what was found; records that were not durable may be missing at the end.
    fn is(&self, found: &Found) -> bool {
        let snapshot_lsn = found.snapshot.as_ref().map_or(0, |(lsn, _)| *lsn);
        let is_ours = |records: &[(Lsn, Vec<u8>)], first_lsn: Lsn| {
            let lsns = records.iter().map(|(lsn, _)| *lsn);
            lsns.eq(first_lsn..=found.last_lsn)
                && records.iter().all(|(lsn, payload)| {
                    *payload == record_in_epoch(*lsn, self.epochs[*lsn as usize - 1])
                })
        };
        snapshot_lsn == self.snapshot_lsn
            && (self.durable_lsn..=self.last_lsn()).contains(&found.last_lsn)
            && found.first_lsn <= snapshot_lsn + 1
            && is_ours(&found.records, snapshot_lsn + 1)
            && is_ours(&found.readable, found.first_lsn)
    }

    fn appended(&self, through: Lsn, epoch: usize) -> Self {
        let mut then = self.clone();
        then.epochs.resize(through as usize, epoch);
        then
    }

    fn synced(&self) -> Self {
        let durable_lsn = self.last_lsn();
        Self {
            durable_lsn,
            ..self.clone()
        }
    }

    fn truncated(&self, lsn: Lsn) -> Self {
        self.appended(lsn, 0).synced()
    }

    fn with_snapshot(&self, lsn: Lsn) -> Self {
        let mut then = self.appended(self.last_lsn().max(lsn), 0).synced();
        then.snapshot_lsn = lsn;
        then
    }

    /// Cut where the recovery found the end.
    fn as_found(&self, found: &Found) -> Self {
        self.appended(found.last_lsn, 0).synced()
    }
}

/// The world that was found, of those that were possible.
fn pick<'a>(worlds: &'a [World], found: &Found) -> &'a World {
    if let Some(snapshot) = &found.snapshot {
        assert!(snapshot.1 == snapshot_content(snapshot.0));
    }
    worlds
        .iter()
        .find(|world| world.is(found))
        .unwrap_or_else(|| {
            panic!(
                "found snapshot {:?}, records {}..={}, readable from {}; possible: {worlds:?}",
                found.snapshot.as_ref().map(|(lsn, _)| lsn),
                found.records.first().map_or(0, |(lsn, _)| *lsn),
                found.last_lsn,
                found.first_lsn,
            )
        })
}

/// The file of a peer's snapshot up to `lsn`.
fn peer_snapshot(lsn: Lsn) -> Vec<u8> {
    let (mut peer, _) = open(&SimDisk::default()).unwrap();
    for _ in 0..lsn {
        peer.append(&[b""]).unwrap();
    }
    let mut writer = peer
        .begin_snapshot(peer.last_lsn())
        .unwrap()
        .unwrap()
        .writer()
        .unwrap();
    writer.write_all(&snapshot_content(lsn)).unwrap();
    writer.install().unwrap();
    let file = peer.reader().newest_snapshot().unwrap().unwrap();
    let mut bytes = vec![0; file.len_bytes() as usize];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

struct History {
    disk: SimDisk,
    rng: SmallRng,
    /// What is possible from each marked operation on.
    marks: Vec<Vec<World>>,
    world: World,
    epoch: usize,
}

impl History {
    fn new(seed: u64) -> Self {
        Self {
            disk: SimDisk::default(),
            rng: SmallRng::seed_from_u64(seed),
            marks: vec![vec![World::default()]],
            world: World::default(),
            epoch: 0,
        }
    }

    fn mark(&mut self, worlds: Vec<World>) {
        self.disk.note(Op::Mark(self.marks.len()));
        self.marks.push(worlds);
    }

    /// From here on, `world` is the only possible state.
    fn settle(&mut self, world: World) {
        self.world = world.clone();
        self.mark(vec![world]);
    }

    fn fault(&mut self) {
        let in_so_many = self.rng.random_range(0..4);
        let fault = Some((in_so_many, io::ErrorKind::Other));
        self.disk.fail(if self.rng.random_bool(0.5) {
            Faults {
                sync: fault,
                ..Faults::default()
            }
        } else {
            Faults {
                sync_dir: fault,
                ..Faults::default()
            }
        });
    }

    /// Starts the journal as often as it takes, each start with a fault or without.
    fn restart(&mut self, possible: &[World]) -> Journal {
        loop {
            self.disk.fail(Faults::default());
            if self.rng.random_bool(0.3) {
                self.fault();
            }
            if let Ok((journal, found)) = recover(&self.disk) {
                self.disk.fail(Faults::default());
                let world = pick(possible, &found).as_found(&found);
                self.settle(world);
                return journal;
            }
        }
    }

    /// Carries out the operation that leads from one world to the other, or fails on the way.
    fn change(
        &mut self,
        mut journal: Journal,
        then: World,
        operation: impl FnOnce(&mut Journal) -> Result<(), JournalError>,
    ) -> Journal {
        let possible = vec![self.world.clone(), then.clone()];
        self.mark(possible.clone());
        if self.rng.random_bool(0.25) {
            self.fault();
        }
        let changed = operation(&mut journal);
        self.disk.fail(Faults::default());
        self.epoch += 1;
        match changed {
            Ok(()) => {
                assert_eq!(journal.last_lsn(), then.last_lsn());
                self.settle(then);
                journal
            }
            Err(_) => {
                drop(journal);
                self.restart(&possible)
            }
        }
    }

    fn receive(journal: &Journal, lsn: Lsn) -> Result<ReceivedSnapshot, JournalError> {
        let mut receiver = journal.receive_snapshot(lsn)?;
        receiver
            .write_all(&peer_snapshot(lsn))
            .map_err(|e| JournalError::io("write", "received", e))?;
        receiver.finish()
    }

    fn run(&mut self) {
        let mut journal = self.restart(&[World::default()]);
        for _ in 0..ACTIONS {
            let last_lsn = journal.last_lsn();
            match self.rng.random_range(0..16) {
                0..6 => {
                    let through = last_lsn + self.rng.random_range(1..12);
                    let then = self.world.appended(through, self.epoch);
                    // Any number of them may be there.
                    self.settle(then);
                    let added =
                        (last_lsn + 1..=through).map(|lsn| record_in_epoch(lsn, self.epoch));
                    journal.append(&added.collect::<Vec<_>>()).unwrap();
                }
                6..8 => {
                    journal.sync().unwrap();
                    self.settle(self.world.synced());
                }
                8 => {
                    self.disk.fail(Faults {
                        sync: Some((0, io::ErrorKind::Other)),
                        ..Faults::default()
                    });
                    let nothing_to_sync = journal.durable_lsn() == last_lsn;
                    assert_eq!(journal.sync().is_ok(), nothing_to_sync);
                    drop(journal);
                    journal = self.restart(std::slice::from_ref(&self.world.clone()));
                }
                9..12 => {
                    let back = [3, 30, 300][self.rng.random_range(0..3)];
                    let from = self.world.snapshot_lsn.max(last_lsn.saturating_sub(back));
                    let lsn = self.rng.random_range(from..=last_lsn);
                    if lsn < last_lsn {
                        let then = self.world.truncated(lsn);
                        journal = self.change(journal, then, |j| j.truncate_after(lsn));
                    }
                }
                12..14 => {
                    let ahead = self.rng.random_range(0..60);
                    let lsn = (last_lsn + ahead).saturating_sub(20);
                    if lsn > self.world.snapshot_lsn {
                        let then = self.world.with_snapshot(lsn);
                        journal = self.change(journal, then, |j| {
                            let received = Self::receive(j, lsn)?;
                            j.install_snapshot(received).map(|_| ())
                        });
                    }
                }
                14 => {
                    if last_lsn > self.world.snapshot_lsn {
                        let then = self.world.with_snapshot(last_lsn);
                        journal = self.change(journal, then, |j| {
                            let plan = j.begin_snapshot(j.last_lsn())?.unwrap();
                            let mut writer = plan.writer()?;
                            writer.write_all(&snapshot_content(last_lsn)).unwrap();
                            writer.install().map(|_| ())
                        });
                    }
                }
                _ => {
                    let through = self.rng.random_range(0..=last_lsn);
                    let purged = journal.purge(through);
                    assert!(purged.removal_error.is_none());
                    assert!(purged.first_lsn <= self.world.snapshot_lsn + 1);
                }
            }
        }
    }
}

/// Recovers, continues from there, recovers again, and returns what the first recovery found.
fn check(disk: &SimDisk, possible: &[World], epoch: usize) -> World {
    let (mut journal, found) = recover(disk).unwrap();
    let world = pick(possible, &found).as_found(&found);
    let through = found.last_lsn + 3;
    let added = (found.last_lsn + 1..=through).map(|lsn| record_in_epoch(lsn, epoch));
    journal.append(&added.collect::<Vec<_>>()).unwrap();
    journal.sync().unwrap();
    drop(journal);
    let (_journal, again) = recover(disk).unwrap();
    pick(&[world.appended(through, epoch).synced()], &again);
    world
}

/// Loses power at every point of the recovery from `image`, then recovers from that.
fn check_crashes_during_recovery(image: &Image, possible: &[World], seed: u64) {
    let disk = SimDisk::holding(image);
    let (_, found) = recover(&disk).unwrap();
    // Whatever one recovery found on the disk, the next one has to find, too.
    let world = [pick(possible, &found).as_found(&found)];
    let mut replay = Replay::from_image(image);
    for (cut, op) in disk.ops().iter().enumerate() {
        replay.apply(op);
        for variant in 0..IMAGES {
            let image = replay.crash_image(seed ^ (cut as u64) << 32 ^ variant << 56);
            check(&SimDisk::holding(&image), &world, 90);
        }
    }
}

#[test]
fn a_replicated_journal_is_as_before_or_as_after_whenever_power_is_lost() {
    let mut images = 0u64;
    for seed in SEEDS {
        let mut history = History::new(seed);
        history.run();
        let mut replay = Replay::default();
        for (cut, op) in history.disk.ops().iter().enumerate() {
            replay.apply(op);
            let possible = &history.marks[replay.mark];
            for variant in 0..IMAGES {
                let image_seed = seed << 32 | (cut as u64) << 8 | variant;
                let outcome = std::panic::catch_unwind(|| {
                    let image = replay.crash_image(image_seed);
                    if images.is_multiple_of(RECOVERY_EVERY) {
                        check_crashes_during_recovery(&image, possible, image_seed);
                    }
                    check(&SimDisk::holding(&image), possible, 80);
                });
                if let Err(panic) = outcome {
                    eprintln!("history {seed}, cut after operation {cut}, image {image_seed}");
                    std::panic::resume_unwind(panic);
                }
                images += 1;
            }
        }
    }
    assert!(images > 5000, "only {images} images: histories too short");
}
