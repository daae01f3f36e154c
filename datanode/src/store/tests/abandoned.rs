//! Jobs on a disk that does not respond in time: a job that was not started changes nothing, and one that ends late
//! affects nothing that was done after it.

use std::future::Future;
use std::time::Duration;

use harvestfs_protocol::node::ReplicaChange;
use harvestfs_protocol::timeline::{Epoch, Position};

use super::super::layout::PAGE_BYTES;
use super::*;
use crate::engine::link::LinkId;
use crate::testing::disks::{Fault, FaultyDisk};

fn store_with_threads(path: &Path, disk: &Arc<FaultyDisk>, threads: usize) -> BlockStore {
    let volume = open_volume(&options(path, 1 << 30), disk.clone(), threads).unwrap();
    store_of(vec![volume])
}

/// A store whose only thread waits for the disk, after some preparation.
async fn hanging_store(
    path: &Path,
    before: impl AsyncFnOnce(&BlockStore),
) -> (Arc<FaultyDisk>, BlockStore) {
    let disk = FaultyDisk::new();
    let store = store_with_threads(path, &disk, 1);
    write_sealed(&store, 100, b"read by the thread")
        .await
        .unwrap();
    before(&store).await;
    disk.hang();
    let reading = store.clone();
    tokio::spawn(async move { read(&reading, 100, 0, 1).await });
    disk.wait_for_hanging(1).await;
    // From here on, time passes whenever nothing else can happen.
    tokio::time::pause();
    (disk, store)
}

/// Makes the disk respond again, and waits until all its jobs are done.
async fn answer(disk: &FaultyDisk, store: &BlockStore) {
    disk.heal();
    while store.is_silent() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    disk.wait_for_hanging(0).await;
}

async fn must_be_silent<T>(work: impl Future<Output = Result<T, StoreError>>) {
    match work.await {
        Err(StoreError::Silent { .. }) => {}
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the disk does not answer"),
    }
}

#[tokio::test]
async fn a_seal_that_was_not_begun_in_time_leaves_the_replica_free() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, store) = hanging_store(dir.path(), async |store| {
        let mut writer = create(store, 1).await.unwrap();
        let data = packet(0, &[7; 4096], false);
        writer.write(vec![data], true).await.unwrap();
    })
    .await;
    let used_bytes = store.status()[0].used_bytes;
    // Also the second one waits for the disk and for nothing else.
    for _ in 0..2 {
        must_be_silent(store.seal(BlockId(1), 4096)).await;
        assert!(
            store.is_silent(),
            "what is withdrawn is no answer of the disk"
        );
        assert_eq!(store.status()[0].used_bytes, used_bytes);
    }
    tokio::time::resume();
    answer(&disk, &store).await;
    store.seal(BlockId(1), 4096).await.unwrap();
    assert_eq!(read(&store, 1, 0, 4096).await.unwrap(), [7; 4096][..]);
}

#[tokio::test]
async fn a_replica_that_was_not_created_in_time_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, store) = hanging_store(dir.path(), async |_| {}).await;
    let used_bytes = store.status()[0].used_bytes;
    must_be_silent(create(&store, 1)).await;
    assert_eq!(store.status()[0].used_bytes, used_bytes);
    tokio::time::resume();
    answer(&disk, &store).await;
    write_sealed(&store, 1, b"created").await.unwrap();
}

#[tokio::test]
async fn a_replica_that_was_not_removed_in_time_is_to_be_removed_again() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, store) = hanging_store(dir.path(), async |store| {
        write_sealed(store, 1, &data(1, 100_000)).await.unwrap();
    })
    .await;
    let used_bytes = store.status()[0].used_bytes;
    changes(&store);
    must_be_silent(store.delete(BlockId(1))).await;
    assert_eq!(store.status()[0].used_bytes, used_bytes);
    // A namenode that does not learn of the replica would never have it removed.
    assert_eq!(changes(&store), [ReplicaChange::Corrupt(BlockId(1))]);
    let storage = store.status()[0].storage;
    assert_eq!(store.corrupt_replicas_of(storage), [BlockId(1)]);
    tokio::time::resume();
    answer(&disk, &store).await;
    store.delete(BlockId(1)).await.unwrap();
    assert!(store.status()[0].used_bytes < used_bytes);
    write_sealed(&store, 1, b"again").await.unwrap();
}

#[tokio::test]
async fn what_is_written_too_late_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_with_threads(dir.path(), &disk, 1);
    write_sealed(&store, 100, b"x").await.unwrap();
    let mut writer = create(&store, 1).await.unwrap();
    disk.hang();
    let reading = store.clone();
    tokio::spawn(async move { read(&reading, 100, 0, 1).await });
    disk.wait_for_hanging(1).await;
    tokio::time::pause();
    must_be_silent(writer.write(vec![packet(0, b"late", false)], false)).await;
    drop(writer);
    tokio::time::resume();
    answer(&disk, &store).await;
    let seal = store.seal(BlockId(1), 4096).await;
    assert!(matches!(
        seal,
        Err(StoreError::ShortReplica { have_bytes: 0 })
    ));
    store.delete(BlockId(1)).await.unwrap();
}

/// A creation that hangs in the middle succeeds in the end, and the replica is known.
#[tokio::test]
async fn a_replica_that_is_created_too_late_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_with_threads(dir.path(), &disk, 2);
    disk.hang_on(Fault::Create, dir.path());
    let creations = [(1, Origin::Pipeline), (2, Origin::Repair)].map(|(block, origin)| {
        let store = store.clone();
        tokio::spawn(async move {
            let created = store.create(BlockId(block), None, origin, BLOCK_BYTES);
            must_be_silent(created).await;
        })
    });
    disk.wait_for_hanging(2).await;
    tokio::time::pause();
    for creation in creations {
        creation.await.unwrap();
    }
    assert_eq!(changes(&store), []);
    tokio::time::resume();
    answer(&disk, &store).await;
    store.changes().of(LinkId(0)).wait().await;
    assert!(
        matches!(changes(&store)[..], [ReplicaChange::Have(report)] if report.block == BlockId(1))
    );
    store.delete(BlockId(1)).await.unwrap();
    // A replica being repaired cannot be reported; it is removed by the next repair of the block, or by the search for
    // leftovers.
    assert_eq!(store.abandoned_repairs(), [BlockId(2)]);
    store.delete_abandoned_repair(BlockId(2)).await.unwrap();
    assert_eq!(store.abandoned_repairs(), []);
    let again = store.create(BlockId(2), None, Origin::Repair, BLOCK_BYTES);
    let mut writer = again.await.unwrap();
    assert_eq!(store.abandoned_repairs(), []);
    // Replicas that are being written are left alone.
    store.delete_abandoned_repair(BlockId(2)).await.unwrap();
    writer
        .write(vec![packet(0, b"2", false)], false)
        .await
        .unwrap();
    writer.seal(1).await.unwrap();
}

#[tokio::test]
async fn a_late_discard_leaves_a_newer_replica_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut first = create(&store, 1).await.unwrap();
    let mut damaged = packet(0, b"x", false);
    damaged.checksums[0] ^= 1;
    first.write(vec![damaged], false).await.unwrap_err();
    store.delete(BlockId(1)).await.unwrap();
    write_sealed(&store, 1, b"newer").await.unwrap();
    let discarded = first.discard().await;
    assert!(
        matches!(discarded, Err(StoreError::OutOfOrder(_))),
        "{discarded:?}"
    );
    assert_eq!(read(&store, 1, 0, 5).await.unwrap(), b"newer"[..]);

    let mut first = create(&store, 2).await.unwrap();
    let mut damaged = packet(0, b"x", false);
    damaged.checksums[0] ^= 1;
    first.write(vec![damaged], false).await.unwrap_err();
    store.delete(BlockId(2)).await.unwrap();
    let second = create(&store, 2).await.unwrap();
    first.discard().await.unwrap_err();
    second.discard().await.unwrap();
    assert!(store.report(BlockId(2)).is_none());
}

/// The file of the condemned replica is damaged; the rename happens late.
#[tokio::test]
async fn a_late_condemnation_moves_no_newer_replica() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_with_threads(dir.path(), &disk, 2);
    write_sealed(&store, 1, b"damaged").await.unwrap();
    let path = dir.path().join("sealed/01/0000000000000001");
    std::fs::write(
        &path,
        vec![1; std::fs::metadata(&path).unwrap().len() as usize],
    )
    .unwrap();
    disk.hang_on(Fault::Rename, &dir.path().join("sealed"));
    let reading = store.clone();
    let reader = tokio::spawn(async move { read(&reading, 1, 0, 1).await });
    disk.wait_for_hanging(1).await;
    // This must not succeed yet: if the replica were removed now, a newer one could be created, and be moved aside in
    // its place.
    store.delete(BlockId(1)).await.unwrap();
    let newer = create(&store, 1).await;
    assert!(matches!(newer, Err(StoreError::ReplicaExists)));
    answer(&disk, &store).await;
    let error = reader.await.unwrap().unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    store.delete(BlockId(1)).await.unwrap();
    write_sealed(&store, 1, b"newer").await.unwrap();
    assert_eq!(read(&store, 1, 0, 5).await.unwrap(), b"newer"[..]);
}

#[tokio::test]
async fn a_late_cut_shortens_no_newer_replica() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_with_threads(dir.path(), &disk, 2);
    let created = store.create(BlockId(1), None, Origin::Pipeline, 64 << 20);
    let mut writer = created.await.unwrap();
    for offset in 0..33 {
        let packet = packet(offset << 20, &[1; 1 << 20], false);
        writer.write(vec![packet], false).await.unwrap();
    }
    writer.seal(33 << 20).await.unwrap();
    let removal = store.start_removal(BlockId(1)).await.unwrap().unwrap();
    disk.hang_on(Fault::Rename, &dir.path().join("sealed"));
    let cut = tokio::spawn(removal.cut());
    disk.wait_for_hanging(1).await;
    tokio::time::pause();
    must_be_silent(async { cut.await.unwrap() }).await;
    tokio::time::resume();
    let newer = create(&store, 1).await;
    assert!(newer.is_err(), "the file is still there");
    answer(&disk, &store).await;
    let storage = store.status()[0].storage;
    while store.corrupt_replicas_of(storage).is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    store.delete(BlockId(1)).await.unwrap();
    write_sealed(&store, 1, b"newer").await.unwrap();
    assert_eq!(read(&store, 1, 0, 5).await.unwrap(), b"newer"[..]);
}

#[tokio::test]
async fn what_a_reader_finds_of_a_removed_replica_is_no_newer_ones() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    write_sealed(&store, 1, b"older").await.unwrap();
    let older = store.inventory.readable(BlockId(1)).unwrap();
    store.delete(BlockId(1)).await.unwrap();
    write_sealed(&store, 1, b"newer").await.unwrap();
    changes(&store);
    let buffer = Buffer::unpooled(PAGE_BYTES);
    let late = store.inventory.read_now(BlockId(1), &older, 0..1, buffer);
    assert!(matches!(late, Err(StoreError::NoSuchReplica)), "{late:?}");
    store.inventory.condemn(BlockId(1), &older);
    assert_eq!(changes(&store), []);
    assert_eq!(read(&store, 1, 0, 5).await.unwrap(), b"newer"[..]);
}

#[tokio::test]
async fn an_older_file_of_the_volume_never_replaces_a_newer_one() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir.path().join("volume"), 1 << 30);
    let (volume, _) = open_volume(&options, Arc::new(RealDisk), 2).unwrap();
    let (begun, mut has_begun) = tokio::sync::mpsc::channel(1);
    let (answer, answered) = std::sync::mpsc::channel::<()>();
    let written = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let write = |content: u32| {
        let written = written.clone();
        move || {
            written.lock().push(content);
            Ok(())
        }
    };
    let (writing, older) = (volume.clone(), write(1));
    let older = tokio::spawn(async move {
        let job = move || {
            begun.blocking_send(()).unwrap();
            answered.recv().unwrap();
            older()
        };
        must_be_silent(writing.run_in_turn(job)).await;
    });
    has_begun.recv().await.unwrap();
    tokio::time::pause();
    older.await.unwrap();
    must_be_silent(volume.run_in_turn(write(2))).await;
    tokio::time::resume();
    answer.send(()).unwrap();
    volume.run_in_turn(write(3)).await.unwrap();
    assert_eq!(*written.lock(), [1, 3]);
}

/// Space that the primary tenant reclaims is not filled while its disk is waited for.
#[tokio::test]
async fn a_lower_quota_holds_before_the_disk_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, store) = hanging_store(dir.path(), async |_| {}).await;
    let storage = store.healthy_storages()[0];
    let lowering = store.set_quota(storage, 1_000_000, Duration::from_secs(100));
    tokio::pin!(lowering);
    tokio::select! {
        biased;
        _ = &mut lowering => panic!("the disk does not answer"),
        () = std::future::ready(()) => {}
    }
    assert_eq!(store.volumes()[0].quota.limit_bytes(), 1_000_000);
    // Once the quota is reported, the namenode does not send it again after a crash.
    assert_eq!(store.status()[0].quota_bytes, 1 << 30);
    must_be_silent(lowering).await;
    assert_eq!(store.status()[0].quota_bytes, 1_000_000);
    tokio::time::resume();
    answer(&disk, &store).await;
}

#[tokio::test]
async fn a_slow_disk_does_not_keep_the_quotas_of_others_from_holding() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| dir.path().join(name));
    let disk = FaultyDisk::new();
    let volumes = paths.clone().map(|path| {
        let options = options(&path, 1 << 30);
        open_volume(&options, disk.clone(), 1).unwrap()
    });
    let store = store_of(volumes.into());
    // The only thread of the first one.
    let waiting = WaitingThread::begin(&store.volumes()[0]).await;
    let configured = paths.map(|path| options(&path, 1 << 20));
    let configuring = {
        let store = store.clone();
        tokio::spawn(async move { store.configure_quotas(&configured).await })
    };
    let is_lowered = |volume: &Arc<Volume>| volume.quota.limit_bytes() == 1 << 20;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(store.volumes().iter().all(is_lowered));
    waiting.end().await;
    configuring.await.unwrap();
}

/// Deletions on all volumes wait until the position is recorded.
#[tokio::test]
async fn what_is_obeyed_is_written_down_while_another_disk_does_not_answer() {
    const OBEYED: Position = Position {
        epoch: Epoch { number: 7, id: 9 },
        record: 1,
    };
    // Even before the disk is known to be silent.
    for is_silent in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        let volumes = paths.clone().map(|path| {
            let options = options(&path, 1 << 30);
            open_volume(&options, Arc::new(RealDisk), 1).unwrap()
        });
        let store = store_of(volumes.into());
        // The only thread of the first one.
        let hanging = store.volumes()[0].clone();
        let waiting = WaitingThread::begin(&hanging).await;
        if is_silent {
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(6)).await;
            tokio::time::resume();
        }
        assert_eq!(hanging.is_silent(), is_silent);
        let have_it = store.write_obeyed(OBEYED).await.unwrap();
        assert_eq!(have_it, [store.volumes()[1].storage()]);
        // It would have failed by the time that a silent disk is waited for.
        assert!(waiting.waits());
        let has_it = paths.map(|path| path.join("OBEYED").exists());
        assert_eq!(has_it, [false, true]);
        waiting.end().await;
    }
}
