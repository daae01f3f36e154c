//! Volumes that join the others later.

use std::fs;
use std::time::Duration;

use super::*;

/// A volume, and one that joins it later.
fn two_volumes(dir: &Path) -> [VolumeOptions; 2] {
    ["a", "b"].map(|name| options(&dir.join(name), 1 << 30))
}

fn open(options: &VolumeOptions) -> (Arc<Volume>, Vec<Found>) {
    open_volume(options, Arc::new(RealDisk), 1).unwrap()
}

/// Writes a block while no other volume is open.
async fn write_alone(options: &VolumeOptions, block: u64, content: &[u8]) {
    let store = store_of(vec![open(options)]);
    write_sealed(&store, block, content).await.unwrap();
}

/// A volume has joined that has the same block as the other one. Returns the store, the volume, and its double.
async fn joined_with_double(dir: &Path) -> (BlockStore, Arc<Volume>, Vec<Double>) {
    let [first, second] = two_volumes(dir);
    write_alone(&second, 1, &data(1, 5_000)).await;
    let store = store_of(vec![open(&first)]);
    write_sealed(&store, 1, &data(1, 5_000)).await.unwrap();
    let (late, found) = open(&second);
    let doubles = store.join(&late, found);
    (store, late, doubles)
}

/// Something may be working on the replica that is in use.
#[tokio::test]
async fn of_what_a_volume_has_that_joins_later_only_what_is_new_counts() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = two_volumes(dir.path());
    let before = [
        (&second, 1, b"old"),
        (&second, 2, b"two"),
        (&first, 1, b"new"),
    ];
    for (options, block, content) in before {
        write_alone(options, block, content).await;
    }
    let store = store_of(vec![open(&first)]);
    assert_eq!(store.status().len(), 1);
    let (late, found) = open(&second);
    let doubles = store.join(&late, found);
    assert_eq!(doubles.len(), 1);
    let storages = store.healthy_storages();
    assert_eq!(storages[1..], [late.storage()]);
    for (block, storage, content) in [(1, storages[0], b"new"), (2, storages[1], b"two")] {
        let (on, _) = store.report(BlockId(block)).unwrap();
        assert_eq!(on, storage);
        assert_eq!(read(&store, block, 0, 3).await.unwrap(), content[..]);
    }
    assert_eq!(store.replicas_of(late.storage()).len(), 1);
    // It is a volume like the others.
    store.delete(BlockId(2)).await.unwrap();
    write_sealed(&store, 2, b"again").await.unwrap();
}

/// Leftover files take the primary tenant's space, and there would be more of them after each slow start.
#[tokio::test]
async fn of_what_a_volume_has_that_joins_later_only_what_is_whole_elsewhere_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = two_volumes(dir.path());
    for block in 1..=6 {
        write_alone(&second, block, &data(block, 5_000)).await;
    }
    write_alone(&first, 6, &data(6, 5_000)).await;
    // For the last one, only the size is known from here on.
    let store = store_of(vec![open(&first)]);
    write_sealed(&store, 1, &data(1, 5_000)).await.unwrap();
    write_sealed(&store, 2, b"short").await.unwrap();
    drop(create(&store, 3).await.unwrap());
    write_sealed(&store, 4, &data(4, 5_000)).await.unwrap();
    let (late, found) = open(&second);
    let used_bytes = late.quota.used_bytes();
    let doubles = store.join(&late, found);
    assert_eq!(doubles.len(), 5);
    assert_eq!(late.quota.used_bytes(), used_bytes);
    // By then, no other volume has the block.
    store.delete(BlockId(4)).await.unwrap();
    let mut removed_bytes = 0;
    for double in doubles {
        let PieceRemoved::Last(bytes) = double.remove_piece().await.unwrap() else {
            panic!("it is small, and all disks answer");
        };
        removed_bytes += bytes;
    }
    let is_there = (1..=6).filter(|&block| late.sealed_path(BlockId(block)).exists());
    assert_eq!(is_there.collect::<Vec<u64>>(), [2, 3, 4, 5, 6]);
    // The space of files that are left alone is not available to others.
    assert!(removed_bytes > 5_000);
    assert_eq!(late.quota.used_bytes(), used_bytes - removed_bytes);
    write_sealed(&store, 4, &data(4, 5_000)).await.unwrap();
    for block in [1, 4, 5] {
        let read = read(&store, block, 0, 5_000).await.unwrap();
        assert_eq!(read, data(block, 5_000));
    }
}

/// The longer file would be removed with the shorter one, and only the shorter one has a better replacement.
#[tokio::test]
async fn of_a_block_of_which_a_volume_has_two_files_none_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = two_volumes(dir.path());
    write_alone(&second, 1, &data(1, 50_000)).await;
    let sealed = second.path.join("sealed/01/0000000000000001");
    let corrupt = second.path.join("corrupt/0000000000000001");
    fs::copy(&sealed, &corrupt).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&corrupt).unwrap();
    file.set_len(8_192).unwrap();
    let store = store_of(vec![open(&first)]);
    write_sealed(&store, 1, b"short").await.unwrap();
    let (late, found) = open(&second);
    assert_eq!(found.len(), 2);
    let used_bytes = late.quota.used_bytes();
    assert!(store.join(&late, found).is_empty());
    assert!(sealed.exists() && corrupt.exists());
    // Both files exist.
    assert_eq!(late.quota.used_bytes(), used_bytes);
}

/// Otherwise the rest would be left alone permanently, because of a silence that is over soon.
#[tokio::test]
async fn what_is_on_a_disk_that_does_not_answer_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (store, late, mut doubles) = joined_with_double(dir.path()).await;
    let double = doubles.pop().unwrap();
    let counting = store.volumes()[0].clone();
    let waiting = WaitingThread::begin(&counting).await;
    // In real time: the thread of the other disk looks at the clock.
    while !counting.is_silent() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let PieceRemoved::Silent(double) = double.remove_piece().await.unwrap() else {
        panic!("the disk does not answer");
    };
    assert!(late.sealed_path(BlockId(1)).exists());
    waiting.end().await;
    let removed = double.remove_piece().await.unwrap();
    assert!(matches!(removed, PieceRemoved::Last(1..)));
    assert!(!late.sealed_path(BlockId(1)).exists());
}

/// A replica on a volume above its quota is given up before long.
#[tokio::test]
async fn nothing_is_removed_for_what_is_on_a_volume_that_is_above_its_quota() {
    let dir = tempfile::tempdir().unwrap();
    let (store, late, doubles) = joined_with_double(dir.path()).await;
    assert_eq!(doubles.len(), 1);
    store.volumes()[0].quota.set_limit(0);
    for double in doubles {
        let removed = double.remove_piece().await.unwrap();
        assert!(matches!(removed, PieceRemoved::Last(0)));
    }
    assert!(late.sealed_path(BlockId(1)).exists());
}

/// Otherwise the file would not be found before the next start, and it may be the last one of the block.
#[tokio::test]
async fn what_is_lost_or_corrupt_gives_way_to_what_a_volume_has_that_joins_later() {
    for is_lost in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = two_volumes(dir.path());
        for options in [&first, &second] {
            write_alone(options, 1, &data(1, 50_000)).await;
        }
        if !is_lost {
            // No sealed replica has this size.
            let path = first.path.join("sealed/01/0000000000000001");
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(30_001).unwrap();
        }
        let store = store_of(vec![open(&first)]);
        let volume = store.volumes()[0].clone();
        let corrupt = store.corrupt_replicas_of(volume.storage());
        assert_eq!(corrupt.is_empty(), is_lost);
        if is_lost {
            volume.health.fail("on purpose", volume.path());
        }
        let used_bytes = volume.quota.used_bytes();
        let (late, found) = open(&second);
        let doubles = store.join(&late, found);
        assert!(doubles.is_empty());
        let (on, _) = store.report(BlockId(1)).unwrap();
        assert_eq!(on, late.storage());
        let read = read(&store, 1, 0, 50_000).await.unwrap();
        assert_eq!(read, data(1, 50_000));
        assert!(store.corrupt_replicas_of(volume.storage()).is_empty());
        // Its file is there.
        assert_eq!(volume.quota.used_bytes(), used_bytes);
    }
}
