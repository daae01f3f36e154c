//! Power loss at every point of a random history with failed syncs and restarts, recovery, power
//! loss during that recovery, and recovery again.

use std::io::{self, Read, Write};
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::sim_disk::{Faults, Image, Op, Replay, SimDisk};
use super::*;

/// Histories; each is cut at each of its operations.
const SEEDS: std::ops::Range<u64> = 0..12;
const ACTIONS: u32 = 60;
/// Images per cut.
const IMAGES: u64 = 3;
/// Once per this many images, all cuts of the recovery are tried as well.
const RECOVERY_EVERY: u64 = 20;

/// The content that all tests give to the snapshot up to `lsn`.
fn snapshot_content(lsn: Lsn) -> Vec<u8> {
    let len = lsn as usize * 53 % 9000;
    (0..len).map(|i| (lsn as usize + i * 3) as u8).collect()
}

fn open(disk: &SimDisk) -> Result<(Journal, Recovered), JournalError> {
    Journal::open_on(Arc::new(disk.clone()), &options())
}

/// Starts the journal as often as it takes, each start with a failing sync or without.
fn restart(disk: &SimDisk, rng: &mut SmallRng) -> Journal {
    loop {
        disk.fail(Faults::default());
        if rng.random_bool(0.2) {
            disk.fail(next_sync_fails());
        }
        if let Ok((journal, _)) = open(disk) {
            // Everything that was found is relied upon.
            disk.note(Op::Acknowledged(journal.durable_lsn()));
            disk.fail(Faults::default());
            return journal;
        }
    }
}

fn next_sync_fails() -> Faults {
    Faults {
        sync: Some((0, io::ErrorKind::Other)),
        ..Faults::default()
    }
}

/// Appends, syncs and takes snapshots at random; when a sync fails, the journal is started again.
fn run_history(disk: &SimDisk, rng: &mut SmallRng) {
    let mut journal = restart(disk, rng);
    let mut plan: Option<SnapshotPlan> = None;
    let mut writer: Option<(SnapshotWriter, Lsn)> = None;
    for _ in 0..ACTIONS {
        match rng.random_range(0..11) {
            10 => {
                disk.fail(next_sync_fails());
                let nothing_to_sync = journal.durable_lsn() == journal.last_lsn();
                assert_eq!(journal.sync().is_ok(), nothing_to_sync);
                (plan, writer) = (None, None);
                drop(journal);
                journal = restart(disk, rng);
            }
            0..5 => {
                let from = journal.last_lsn() + 1;
                let through = from + rng.random_range(0..8);
                disk.note(Op::Appending(through));
                journal.append(&records(from, through)).unwrap();
            }
            5..8 => {
                journal.sync().unwrap();
                disk.note(Op::Acknowledged(journal.durable_lsn()));
            }
            _ => {
                // The steps of a snapshot, with appends in between.
                if let Some((mut started, lsn)) = writer.take() {
                    started.write_all(&snapshot_content(lsn)).unwrap();
                    started.install().unwrap();
                    assert!(journal.purge(Lsn::MAX).removal_error.is_none());
                    disk.note(Op::Installed(lsn));
                } else if let Some(begun) = plan.take() {
                    let base_lsn = begun.base().unwrap().map_or(0, |(lsn, _)| lsn);
                    let lsn = begun.lsn();
                    assert_records(begun.records().unwrap(), base_lsn + 1, lsn);
                    writer = Some((begun.writer().unwrap(), lsn));
                } else {
                    plan = journal.begin_snapshot(journal.last_lsn()).unwrap();
                    disk.note(Op::Acknowledged(journal.durable_lsn()));
                }
            }
        }
    }
}

/// The state with which a recovery is compared.
#[derive(Clone, Default)]
struct Expected {
    /// The last record whose append had begun.
    appending: Lsn,
    acknowledged: Lsn,
    /// The last record covered by the last snapshot whose installation had returned.
    installed: Lsn,
    /// The last record of each earlier recovery: what comes after it was appended after it.
    epoch_ends: Vec<Lsn>,
}

impl Expected {
    fn record(&self, lsn: Lsn) -> Vec<u8> {
        let epoch = self.epoch_ends.iter().filter(|&&end| end < lsn).count();
        record_in_epoch(lsn, epoch)
    }

    /// Recovers, checks what must hold, continues from there, and returns the last record found.
    fn check(&self, disk: &SimDisk) -> Lsn {
        let (mut journal, recovered) = open(disk).unwrap();
        let last_lsn = recovered.last_lsn;
        let (acknowledged, appending) = (self.acknowledged, self.appending);
        assert!(
            (acknowledged..=appending).contains(&last_lsn),
            "found {last_lsn}, acknowledged {acknowledged}, appended at most {appending}"
        );
        assert!(recovered.skipped_snapshots.is_empty());
        let snapshot_lsn = self.check_snapshot(recovered.snapshot);
        self.check_records(recovered.records, snapshot_lsn + 1, last_lsn);

        let mut then = self.clone();
        then.epoch_ends.push(last_lsn);
        let through = last_lsn + 3;
        let added: Vec<_> = (last_lsn + 1..=through)
            .map(|lsn| then.record(lsn))
            .collect();
        disk.note(Op::Appending(through));
        journal.append(&added).unwrap();
        journal.sync().unwrap();
        disk.note(Op::Acknowledged(through));
        drop(journal);
        let (_journal, recovered) = open(disk).unwrap();
        assert_eq!(recovered.last_lsn, through);
        assert_eq!(recovered.tail, TailReport::Clean);
        then.check_records(recovered.records, snapshot_lsn + 1, through);
        last_lsn
    }

    fn check_snapshot(&self, snapshot: Option<(Lsn, SnapshotReader)>) -> Lsn {
        let mut lsn = 0;
        if let Some((found_lsn, mut reader)) = snapshot {
            let mut content = Vec::new();
            reader.read_to_end(&mut content).unwrap();
            assert!(content == snapshot_content(found_lsn), "{found_lsn}");
            lsn = found_lsn;
        }
        let installed = self.installed;
        assert!(lsn >= installed, "snapshot {lsn}, installed {installed}");
        lsn
    }

    fn check_records(&self, records: RecordReader, from: Lsn, through: Lsn) {
        let mut expected = from;
        for item in records {
            let (lsn, payload) = item.unwrap();
            assert_eq!(lsn, expected);
            assert!(payload == self.record(lsn), "record {lsn} of another time");
            expected += 1;
        }
        assert_eq!(expected, through + 1);
    }

    /// Loses power at every point of the recovery from `image`, then recovers from that.
    fn check_crashes_during_recovery(&self, image: &Image, seed: u64) {
        let disk = SimDisk::holding(image);
        let last_lsn = self.check(&disk);
        let mut replay = Replay::from_image(image);
        // Whatever one recovery found on the disk, the next one has to find, too.
        replay.acknowledged = last_lsn;
        replay.appending = last_lsn;
        for (cut, op) in disk.ops().iter().enumerate() {
            replay.apply(op);
            for variant in 0..IMAGES {
                let image = replay.crash_image(seed ^ (cut as u64) << 32 ^ variant << 56);
                let mut expected = Self {
                    appending: replay.appending,
                    acknowledged: replay.acknowledged,
                    ..self.clone()
                };
                expected.epoch_ends.push(last_lsn);
                expected.check(&SimDisk::holding(&image));
            }
        }
    }
}

#[test]
fn every_acknowledged_record_survives_power_loss() {
    let mut images = 0u64;
    for seed in SEEDS {
        let disk = SimDisk::default();
        run_history(&disk, &mut SmallRng::seed_from_u64(seed));
        let mut replay = Replay::default();
        for (cut, op) in disk.ops().iter().enumerate() {
            replay.apply(op);
            for variant in 0..IMAGES {
                let image_seed = seed << 32 | (cut as u64) << 8 | variant;
                let outcome = std::panic::catch_unwind(|| {
                    let image = replay.crash_image(image_seed);
                    let expected = Expected {
                        appending: replay.appending,
                        acknowledged: replay.acknowledged,
                        installed: replay.installed,
                        epoch_ends: Vec::new(),
                    };
                    expected.check(&SimDisk::holding(&image));
                    if images.is_multiple_of(RECOVERY_EVERY) {
                        expected.check_crashes_during_recovery(&image, image_seed);
                    }
                });
                if let Err(panic) = outcome {
                    eprintln!("history {seed}, cut after operation {cut}, image {image_seed}");
                    std::panic::resume_unwind(panic);
                }
                images += 1;
            }
        }
    }
    assert!(images > 2000, "only {images} images: histories too short");
}
