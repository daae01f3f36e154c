//! Corrupt data and failing disks.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use harvestfs_protocol::node::ReplicaChange;
use rustix::io::Errno;

use super::super::layout;
use super::*;
use crate::testing::disks::{Fault, FaultyDisk};

fn flip_byte(path: &Path, at: u64) {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    file.sync_all().unwrap();
}

#[tokio::test]
async fn a_corrupt_chunk_is_never_handed_out() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let data = data(1, 100_000);
    // A chunk, and a checksum.
    for (block, at, corrupt_offset) in [
        (1, 8192 + 5 * 4096 + 17, 5 * 4096),
        (2, 4096 + 3 * 4, 3 * 4096),
    ] {
        write_sealed(&store, block, &data).await.unwrap();
        let path = dir.path().join(format!("sealed/{block:02x}/{block:016x}"));
        flip_byte(&path, at);
        assert_eq!(read(&store, block, 0, 4096).await.unwrap(), data[..4096]);
        changes(&store);
        let error = read(&store, block, 0, 100_000).await.unwrap_err();
        assert!(
            matches!(error, StoreError::Corrupt { offset } if offset == corrupt_offset),
            "{error}"
        );
        assert_eq!(changes(&store), [ReplicaChange::Corrupt(BlockId(block))]);
        // It no longer counts as a replica, even after a restart.
        let again = read(&store, block, 0, 100_000).await.unwrap_err();
        assert!(matches!(again, StoreError::Corrupt { offset } if offset == corrupt_offset));
        assert!(store.report(BlockId(block)).is_none());
        assert_eq!(changes(&store), [], "it is reported once");
    }
    drop(store);
    let store = real_store(dir.path());
    let storage = store.status()[0].storage;
    assert_eq!(store.corrupt_replicas_of(storage).len(), 2);
    let used = store.status()[0].used_bytes;
    store.delete(BlockId(1)).await.unwrap();
    assert!(store.status()[0].used_bytes < used);
}

/// The intact chunks may be all that is left of the block.
#[tokio::test]
async fn the_good_chunks_of_a_corrupt_replica_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = real_store(dir.path());
    let data = data(1, 25 * 4096);
    write_sealed(&store, 1, &data).await.unwrap();
    flip_byte(
        &dir.path().join("sealed/01/0000000000000001"),
        layout::chunk_position(5),
    );
    read(&store, 1, 0, 25 * 4096).await.unwrap_err();
    assert!(dir.path().join("corrupt/0000000000000001").exists());
    for _ in 0..2 {
        for chunk in 0..25 {
            let bytes = read(&store, 1, chunk * 4096, 4096).await;
            if chunk == 5 {
                let error = bytes.unwrap_err();
                assert!(
                    matches!(error, StoreError::Corrupt { offset } if offset == 5 * 4096),
                    "{error}"
                );
            } else {
                let start = chunk as usize * 4096;
                assert_eq!(bytes.unwrap(), data[start..start + 4096]);
            }
        }
        let storage = store.status()[0].storage;
        assert_eq!(store.corrupt_replicas_of(storage), [BlockId(1)]);
        assert!(store.report(BlockId(1)).is_none());
        // It is neither sealed nor lent, and no other replica is created beside it.
        let sealed = store.seal(BlockId(1), 4096).await;
        assert!(matches!(sealed, Err(StoreError::Corrupt { .. })));
        let lent = store.lend(BlockId(1)).await;
        assert!(matches!(lent, Err(StoreError::Corrupt { .. })));
        let another = create(&store, 1).await;
        assert!(matches!(another, Err(StoreError::ReplicaExists)));
        drop(store);
        store = real_store(dir.path());
    }
    // At a quota's deadline it goes last: a good replica most likely is not the only one.
    write_sealed(&store, 2, b"small").await.unwrap();
    let storage = store.status()[0].storage;
    let victims = store.victims(storage, u64::MAX);
    assert_eq!(victims, [BlockId(2), BlockId(1)]);
    read(&store, 1, 0, 4096).await.unwrap();
    store.delete(BlockId(1)).await.unwrap();
    let gone = read(&store, 1, 0, 4096).await.unwrap_err();
    assert!(matches!(gone, StoreError::NoSuchReplica), "{gone}");
    write_sealed(&store, 1, b"again").await.unwrap();
    assert_eq!(read(&store, 1, 0, 5).await.unwrap(), b"again"[..]);
}

/// Otherwise readers that retry would take down a volume with one bad sector.
#[tokio::test]
async fn a_bad_sector_that_is_known_counts_once_against_the_volume() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_at(dir.path(), 1 << 30, disk.clone());
    let data = data(1, 25 * 4096);
    write_sealed(&store, 1, &data).await.unwrap();
    disk.fail_reads_from(layout::chunk_position(20) + 1);
    read(&store, 1, 0, 25 * 4096).await.unwrap_err();
    assert_eq!(read(&store, 1, 0, 4096).await.unwrap(), data[..4096]);
    for _ in 0..10 {
        let error = read(&store, 1, 20 * 4096, 4096).await.unwrap_err();
        assert!(
            matches!(error, StoreError::Corrupt { offset } if offset == 20 * 4096),
            "{error}"
        );
    }
    assert!(store.status()[0].healthy);
    let good = read(&store, 1, 0, 20 * 4096).await.unwrap();
    assert_eq!(good, data[..20 * 4096]);
}

#[tokio::test]
async fn corruption_of_an_open_replica_stops_its_writer() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut writer = create(&store, 1).await.unwrap();
    writer
        .write(vec![packet(0, &[1; 4096], false)], true)
        .await
        .unwrap();
    writer
        .write(vec![packet(4096, &[2; 4096], false)], true)
        .await
        .unwrap();
    flip_byte(&dir.path().join("open/0000000000000001"), 8192);
    for _ in 0..2 {
        assert!(matches!(
            read(&store, 1, 0, 1).await,
            Err(StoreError::Corrupt { offset: 0 })
        ));
        // Its good chunks are read.
        assert_eq!(read(&store, 1, 4096, 4096).await.unwrap(), [2; 4096][..]);
    }
    let more = writer.write(vec![packet(8192, &[1], false)], false).await;
    assert!(matches!(more, Err(StoreError::OutOfOrder(_))));
    drop(writer);
    assert!(matches!(
        store.seal(BlockId(1), 4096).await,
        Err(StoreError::Corrupt { .. })
    ));
    store.delete(BlockId(1)).await.unwrap();
}

#[tokio::test]
async fn a_full_disk_is_no_broken_disk() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_at(dir.path(), 1 << 30, disk.clone());
    let mut writer = create(&store, 1).await.unwrap();
    disk.fail(Fault::Allocate, dir.path(), Errno::NOSPC);
    let error = writer
        .write(vec![packet(0, &vec![1; 4 << 20], false)], false)
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::NoSpace), "{error}");
    drop(writer);
    assert!(matches!(create(&store, 2).await, Err(StoreError::NoSpace)));
    assert!(store.status()[0].healthy);
    let used = store.status()[0].used_bytes;
    disk.heal();
    store.delete(BlockId(1)).await.unwrap();
    assert!(store.status()[0].used_bytes < used);
    write_sealed(&store, 3, &data(1, 100_000)).await.unwrap();
}

#[tokio::test]
async fn a_failing_write_or_sync_is_not_acknowledged() {
    for fault in [Fault::Write, Fault::Sync] {
        let dir = tempfile::tempdir().unwrap();
        let disk = FaultyDisk::new();
        let store = store_at(dir.path(), 1 << 30, disk.clone());
        let mut writer = create(&store, 1).await.unwrap();
        writer
            .write(vec![packet(0, &[1; 4096], false)], true)
            .await
            .unwrap();
        disk.fail(fault, dir.path(), Errno::IO);
        let error = writer
            .write(vec![packet(4096, &[2; 4096], false)], true)
            .await
            .unwrap_err();
        assert!(matches!(error, StoreError::Disk { .. }), "{error}");
        drop(writer);
        assert!(store.seal(BlockId(1), 4096).await.is_err());
        assert!(store.status()[0].healthy, "two errors are forgiven");
        disk.heal();
        // Data acknowledged before is intact, and can be sealed.
        store.seal(BlockId(1), 4096).await.unwrap();
        assert_eq!(read(&store, 1, 0, 4096).await.unwrap(), [1; 4096][..]);
    }
}

/// Otherwise the replica would count as good, and sealing it would be retried in vain forever.
#[tokio::test]
async fn an_unsealed_replica_that_cannot_be_read_is_corrupt() {
    for is_removed in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let store = real_store(dir.path());
        let mut writer = create(&store, 1).await.unwrap();
        let written = vec![packet(0, &[1; 8192], false)];
        writer.write(written, true).await.unwrap();
        drop((writer, store));
        let disk = FaultyDisk::new();
        let store = store_at(dir.path(), 1 << 30, disk.clone());
        if is_removed {
            std::fs::remove_file(dir.path().join("open/0000000000000001")).unwrap();
        } else {
            disk.fail(Fault::Read, &dir.path().join("open"), Errno::IO);
        }
        for _ in 0..10 {
            let sealed = store.seal_what_is_there(BlockId(1), 8192, || true).await;
            sealed.unwrap_err();
        }
        assert_eq!(changes(&store), [ReplicaChange::Corrupt(BlockId(1))]);
        assert!(store.report(BlockId(1)).is_none());
        assert!(store.status()[0].healthy, "it is asked for it once");
        store.delete(BlockId(1)).await.unwrap();
        disk.heal();
        write_sealed(&store, 1, b"again").await.unwrap();
    }
}

/// Data before a bad sector is as good as data before wrong bytes, and may be all that is left of the block.
#[tokio::test]
async fn an_unsealed_replica_is_sealed_up_to_where_it_can_be_read() {
    for is_bad_at_start in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let store = real_store(dir.path());
        let mut writer = create(&store, 1).await.unwrap();
        let written = vec![packet(0, &[1; 5 * 4_096], false)];
        writer.write(written, true).await.unwrap();
        drop((writer, store));
        let disk = FaultyDisk::new();
        let bad_from = layout::chunk_position(3) + 1;
        if is_bad_at_start {
            disk.fail_reads_from(bad_from);
        }
        let store = store_at(dir.path(), 1 << 30, disk.clone());
        disk.fail_reads_from(bad_from);
        let found_chunks = if is_bad_at_start { 3 } else { 5 };
        let (_, report) = store.report(BlockId(1)).unwrap();
        assert_eq!(
            (report.length_bytes, report.sealed),
            (found_chunks * 4_096, false)
        );
        store
            .seal_what_is_there(BlockId(1), 5 * 4_096, || true)
            .await
            .unwrap();
        let (_, report) = store.report(BlockId(1)).unwrap();
        assert_eq!((report.length_bytes, report.sealed), (3 * 4_096, true));
        let bytes = read(&store, 1, 0, 3 * 4_096).await.unwrap();
        assert_eq!(bytes[..], [1; 3 * 4_096]);
        assert!(store.status()[0].healthy, "it is one bad sector");
    }
}

/// Rewriting stops as soon as the primary tenant needs the disk, and does not start from scratch later.
#[tokio::test]
async fn an_unproven_replica_is_written_again_group_by_group() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut writer = create(&store, 1).await.unwrap();
    let content = data(1, 10 << 20);
    for (number, piece) in (0..).zip(content.chunks(1 << 20)) {
        let written = vec![packet(number << 20, piece, false)];
        writer.write(written, true).await.unwrap();
    }
    drop((writer, store));
    let store = real_store(dir.path());
    assert!(store.is_unproven(BlockId(1)));
    let seal = || store.seal_what_is_there(BlockId(1), 10 << 20, || false);
    for proven_groups in 1..3 {
        let interrupted = seal().await;
        assert!(matches!(interrupted, Err(StoreError::Busy)));
        let open = store.inventory.readable(BlockId(1)).unwrap().open.unwrap();
        assert_eq!(open.proven_chunks(), proven_groups * layout::GROUP_CHUNKS);
        // The replica is free in between, and can be read.
        assert!(open.is_idle());
        assert_eq!(
            read(&store, 1, 9 << 20, 4_096).await.unwrap()[..],
            content[9 << 20..][..4_096]
        );
    }
    seal().await.unwrap();
    assert!(!store.is_unproven(BlockId(1)));
    let (_, report) = store.report(BlockId(1)).unwrap();
    assert_eq!((report.length_bytes, report.sealed), (10 << 20, true));
    assert_eq!(read(&store, 1, 0, 10 << 20).await.unwrap(), content[..]);
}

#[tokio::test]
async fn what_is_before_a_table_that_cannot_be_read_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut writer = create(&store, 1).await.unwrap();
    let piece = vec![1; 1 << 20];
    for number in 0..5 {
        let written = vec![packet(number << 20, &piece, false)];
        writer.write(written, true).await.unwrap();
    }
    drop((writer, store));
    let disk = FaultyDisk::new();
    disk.fail_reads_from(layout::table_page_position(1) + 1);
    let store = store_at(dir.path(), 1 << 30, disk);
    store
        .seal_what_is_there(BlockId(1), 5 << 20, || true)
        .await
        .unwrap();
    let (_, report) = store.report(BlockId(1)).unwrap();
    assert_eq!((report.length_bytes, report.sealed), (4 << 20, true));
    assert_eq!(read(&store, 1, 3 << 20, 1 << 20).await.unwrap(), piece[..]);
}

/// If it were reported as corrupt, a good replica could be removed.
#[tokio::test]
async fn a_volume_is_not_opened_while_an_error_says_nothing_about_its_replicas() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut writer = create(&store, 1).await.unwrap();
    let written = vec![packet(0, &[1; 8_192], false)];
    writer.write(written, true).await.unwrap();
    drop((writer, store));
    let disk = FaultyDisk::new();
    disk.fail(Fault::Read, &dir.path().join("open"), Errno::MFILE);
    let opened = open_volume(&options(dir.path(), 1 << 30), disk.clone(), 1);
    let error = opened.err().unwrap();
    assert!(matches!(error, VolumeError::Io { .. }), "{error}");
    disk.heal();
    let store = store_at(dir.path(), 1 << 30, disk);
    let (_, report) = store.report(BlockId(1)).unwrap();
    assert_eq!((report.length_bytes, report.sealed), (8_192, false));
    assert_eq!(read(&store, 1, 0, 8_192).await.unwrap(), [1; 8_192][..]);
}

/// The removal would fail again, and each failure counts against the volume.
#[tokio::test]
async fn a_removal_that_the_disk_refuses_is_not_asked_for_again_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_at(dir.path(), 1 << 30, disk.clone());
    write_sealed(&store, 1, b"refused").await.unwrap();
    changes(&store);
    disk.fail(Fault::Write, dir.path(), Errno::PERM);
    store.delete(BlockId(1)).await.unwrap_err();
    assert!(changes(&store).is_empty());
    let storage = store.status()[0].storage;
    assert_eq!(store.corrupt_replicas_of(storage), [BlockId(1)], "it waits");
    disk.heal();
    store.delete(BlockId(1)).await.unwrap();
    assert_eq!(changes(&store), [ReplicaChange::Deleted(BlockId(1))]);
}

#[tokio::test]
async fn a_seal_that_failed_after_it_moved_the_replica_is_done_again() {
    for by_writer in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let disk = FaultyDisk::new();
        let store = store_at(dir.path(), 1 << 30, disk.clone());
        let mut writer = create(&store, 1).await.unwrap();
        let written = vec![packet(0, &[1; 12_288], false)];
        writer.write(written, true).await.unwrap();
        disk.fail(Fault::Sync, &dir.path().join("sealed"), Errno::IO);
        if by_writer {
            writer.seal(12_288).await.unwrap_err();
            drop(writer);
        } else {
            drop(writer);
            store.seal(BlockId(1), 8192).await.unwrap_err();
        }
        assert!(!store.report(BlockId(1)).unwrap().1.sealed);
        assert_eq!(read(&store, 1, 0, 8192).await.unwrap(), [1; 8192][..]);
        disk.heal();
        store
            .seal_what_is_there(BlockId(1), 20_480, || true)
            .await
            .unwrap();
        drop(store);
        let store = real_store(dir.path());
        let (_, report) = store.report(BlockId(1)).unwrap();
        assert!(report.sealed);
        let left_bytes = if by_writer { 12_288 } else { 8192 };
        assert_eq!(report.length_bytes, left_bytes);
        let left = read(&store, 1, 0, left_bytes).await.unwrap();
        assert_eq!(left, vec![1; left_bytes as usize]);
    }
}

#[tokio::test]
async fn a_broken_volume_goes_down_and_the_others_serve() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let paths = [dir.path().join("a"), dir.path().join("b")];
    let volumes = paths
        .iter()
        .map(|path| open_volume(&options(path, 1 << 30), disk.clone(), 1).unwrap());
    let store = store_of(volumes.collect());
    let storages = store.healthy_storages();
    for block in 0..16 {
        write_sealed(&store, block, &data(block, 100_000))
            .await
            .unwrap();
    }
    let on_first = store.sealed_of(storages[0]);
    let on_second = store.sealed_of(storages[1]);
    assert!(on_first.len() > 5 && on_second.len() > 1, "both are used");
    disk.fail(Fault::Read, &paths[0], Errno::IO);
    for block in &on_first {
        read(&store, block.0, 0, 1).await.unwrap_err();
    }
    assert_eq!(store.healthy_storages(), storages[1..]);
    assert!(!store.status()[0].healthy);
    for block in &on_second {
        read(&store, block.0, 0, 100_000).await.unwrap();
    }
    // The disk responds again, but it can no longer be trusted.
    disk.heal();
    let last = on_first[on_first.len() - 1];
    let error = read(&store, last.0, 0, 1).await.unwrap_err();
    assert!(matches!(error, StoreError::VolumeDown { .. }), "{error}");
    for block in 100..104 {
        write_sealed(&store, block, &data(block, 1000))
            .await
            .unwrap();
        assert_eq!(store.report(BlockId(block)).unwrap().0, storages[1]);
    }
}

/// Replicas on a volume that went down are lost until the next start: a repair creates them again on another one.
#[tokio::test]
async fn what_was_on_a_volume_that_went_down_is_created_on_another() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = ["a", "b"].map(|name| {
        let path = dir.path().join(name);
        let quota_bytes = if name == "a" { 2 << 30 } else { 1 << 30 };
        open_volume(&options(&path, quota_bytes), Arc::new(RealDisk), 1).unwrap()
    });
    let lost = volumes[0].0.clone();
    let store = store_of(volumes.into());
    let storages = store.healthy_storages();
    write_sealed(&store, 1, b"sealed").await.unwrap();
    drop(create(&store, 2).await.unwrap());
    let repair = |block| store.create(BlockId(block), None, Origin::Repair, BLOCK_BYTES);
    drop(repair(3).await.unwrap());
    let writer = create(&store, 4).await.unwrap();
    for block in [1, 2, 4] {
        let (storage, _) = store.report(BlockId(block)).unwrap();
        assert_eq!(storage, storages[0]);
    }
    let late_seal = store.inventory.readable(BlockId(2)).unwrap();
    lost.health.fail("on purpose", lost.path());
    for block in 1..=3 {
        assert!(store.report(BlockId(block)).is_none());
        store.delete_abandoned_repair(BlockId(block)).await.unwrap();
        let mut writer = repair(block).await.unwrap();
        let packets = vec![packet(0, b"repaired", false)];
        writer.write(packets, false).await.unwrap();
        writer.seal(8).await.unwrap();
        let (storage, report) = store.report(BlockId(block)).unwrap();
        assert!(storage == storages[1] && report.sealed);
        assert_eq!(read(&store, block, 0, 8).await.unwrap(), b"repaired"[..]);
    }
    // A lost replica cannot be taken over, and one that a writer still holds cannot be created again.
    assert!(late_seal.open.unwrap().take_over().await.is_err());
    let error = repair(4).await.err().unwrap();
    assert!(matches!(error, StoreError::ReplicaExists), "{error}");
    drop(writer);
    drop(repair(4).await.unwrap());
}

#[tokio::test]
async fn creation_goes_to_the_next_volume_when_one_fails() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let paths = [dir.path().join("a"), dir.path().join("b")];
    let volumes = paths
        .iter()
        .map(|path| open_volume(&options(path, 1 << 30), disk.clone(), 1).unwrap());
    let store = store_of(volumes.collect());
    disk.fail(Fault::Create, &paths[0], Errno::IO);
    for block in 0..8 {
        write_sealed(&store, block, b"x").await.unwrap();
    }
}

#[tokio::test]
async fn a_silent_disk_is_left_alone_and_given_up_late() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_at(dir.path(), 1 << 30, disk.clone());
    write_sealed(&store, 1, &data(1, 4096)).await.unwrap();
    let hanging_read = async || {
        disk.hang();
        let reading = store.clone();
        let read = tokio::spawn(async move { read(&reading, 1, 0, 1).await });
        disk.wait_for_hanging(1).await;
        // From here on, time passes whenever nothing else can happen.
        tokio::time::pause();
        read.await.unwrap()
    };
    let error = hanging_read().await.unwrap_err();
    assert!(matches!(error, StoreError::Silent { .. }), "{error}");
    assert!(store.is_silent());
    // The disk is given no more jobs, and nothing on it counts as lost.
    for _ in 0..10 {
        let asked = tokio::time::Instant::now();
        let error = read(&store, 1, 0, 1).await.unwrap_err();
        assert!(matches!(error, StoreError::Silent { .. }), "{error}");
        let error = create(&store, 2).await.err().unwrap();
        assert!(matches!(error, StoreError::Silent { .. }), "{error}");
        assert_eq!(asked.elapsed(), Duration::ZERO);
        assert!(store.status()[0].healthy);
        tokio::time::advance(Duration::from_secs(60)).await;
    }
    tokio::time::resume();
    disk.heal();
    while store.is_silent() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    read(&store, 1, 0, 1).await.unwrap();
    hanging_read().await.unwrap_err();
    tokio::time::advance(Duration::from_secs(15 * 60)).await;
    assert!(!store.status()[0].healthy);
    disk.heal();
}
