//! Power loss at every point of a random history, recovery, power loss during that recovery,
//! and recovery again.

use std::io::{Read, Write};
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::sim_disk::{Image, Op, Replay, SimDisk};
use super::*;

/// Histories; each is cut at each of its operations.
const SEEDS: std::ops::Range<u64> = 0..12;
const ACTIONS: u32 = 60;
/// Images per cut.
const IMAGES: u64 = 3;
/// Every so many images, all cuts of the recovery are tried as well.
const RECOVERY_EVERY: u64 = 40;

/// The content that all tests give to the snapshot up to `lsn`.
fn snapshot_content(lsn: Lsn) -> Vec<u8> {
    let len = lsn as usize * 53 % 9000;
    (0..len).map(|i| (lsn as usize + i * 3) as u8).collect()
}

fn open(disk: &SimDisk) -> Result<(Journal, Recovered), JournalError> {
    Journal::open_on(Arc::new(disk.clone()), &options())
}

/// Appends, syncs and takes snapshots at random.
fn run_history(disk: &SimDisk, rng: &mut SmallRng) {
    let (mut journal, recovered) = open(disk).unwrap();
    drop(recovered);
    let mut plan: Option<SnapshotPlan> = None;
    let mut writer: Option<(SnapshotWriter, Lsn)> = None;
    for _ in 0..ACTIONS {
        match rng.random_range(0..10) {
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
                    let installed = started.install().unwrap();
                    assert!(installed.removal_error.is_none());
                } else if let Some(begun) = plan.take() {
                    let base_lsn = begun.base().unwrap().map_or(0, |(lsn, _)| lsn);
                    let lsn = begun.lsn();
                    assert_records(begun.records().unwrap(), base_lsn + 1, lsn);
                    writer = Some((begun.writer().unwrap(), lsn));
                } else {
                    plan = journal.begin_snapshot().unwrap();
                    disk.note(Op::Acknowledged(journal.durable_lsn()));
                }
            }
        }
    }
}

/// Recovers, checks what must hold, and returns the last record.
fn check_recovery(disk: &SimDisk, appending: Lsn, acknowledged: Lsn) -> Lsn {
    let (mut journal, recovered) = open(disk).unwrap();
    let last_lsn = recovered.last_lsn;
    assert!(
        last_lsn >= acknowledged,
        "lost: {last_lsn} < {acknowledged}"
    );
    assert!(last_lsn <= appending, "invented: {last_lsn} > {appending}");
    assert!(recovered.skipped_snapshots.is_empty());
    let snapshot_lsn = match recovered.snapshot {
        None => 0,
        Some((lsn, mut reader)) => {
            let mut content = Vec::new();
            reader.read_to_end(&mut content).unwrap();
            assert!(content == snapshot_content(lsn), "snapshot {lsn}");
            lsn
        }
    };
    assert_records(recovered.records, snapshot_lsn + 1, last_lsn);

    // The journal goes on from there, and what was cut off does not come back.
    let through = last_lsn + 3;
    disk.note(Op::Appending(through.max(appending)));
    journal.append(&records(last_lsn + 1, through)).unwrap();
    journal.sync().unwrap();
    disk.note(Op::Acknowledged(through));
    drop(journal);
    let (_journal, recovered) = open(disk).unwrap();
    assert_eq!(recovered.last_lsn, through);
    assert_eq!(recovered.tail, TailReport::Clean);
    assert_records(recovered.records, snapshot_lsn + 1, through);
    last_lsn
}

/// Loses power at every point of the recovery from `image`, then recovers from that.
fn check_crashes_during_recovery(image: &Image, appending: Lsn, acknowledged: Lsn, seed: u64) {
    let disk = SimDisk::holding(image);
    let last_lsn = check_recovery(&disk, appending, acknowledged);
    let mut replay = Replay::from_image(image);
    // Whatever a recovery found on the disk, the next one has to find, too.
    replay.acknowledged = last_lsn;
    replay.appending = appending.max(last_lsn);
    for (cut, op) in disk.ops().iter().enumerate() {
        replay.apply(op);
        let image = replay.crash_image(seed ^ (cut as u64) << 32);
        let disk = SimDisk::holding(&image);
        check_recovery(&disk, replay.appending, replay.acknowledged);
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
                    let (appending, acknowledged) = (replay.appending, replay.acknowledged);
                    check_recovery(&SimDisk::holding(&image), appending, acknowledged);
                    if images.is_multiple_of(RECOVERY_EVERY) {
                        check_crashes_during_recovery(&image, appending, acknowledged, image_seed);
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
