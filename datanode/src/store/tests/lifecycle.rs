//! Writing, sealing, reading, deleting.

use std::io::Write;

use harvestfs_protocol::node::{ReplicaChange, ReplicaReport};
use proptest::prelude::*;

use super::*;

fn report(block: u64, length_bytes: u64, sealed: bool) -> ReplicaReport {
    ReplicaReport {
        block: BlockId(block),
        length_bytes,
        sealed,
    }
}

#[tokio::test]
async fn what_was_written_is_read_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(1, 9 << 20 | 777);
    let store = real_store(dir.path());
    write_sealed(&store, 1, &data).await.unwrap();
    for _ in 0..2 {
        assert_eq!(read(&store, 1, 0, data.len() as u64).await.unwrap(), data);
    }
    assert_eq!(
        changes(&store),
        [
            ReplicaChange::Have(report(1, 0, false)),
            ReplicaChange::Have(report(1, (9 << 20) + 4096, true)),
        ]
    );
    drop(store);
    let store = real_store(dir.path());
    let storage = store.healthy_storages()[0];
    assert_eq!(
        store.replicas_of(storage),
        [report(1, (9 << 20) + 4096, true)]
    );
    assert_eq!(
        read(&store, 1, 5000, 8 << 20).await.unwrap(),
        data[5000..5000 + (8 << 20)]
    );
    // Beyond the data but within its last chunk there are zeros.
    let end = (9 << 20) + 4096;
    assert_eq!(read(&store, 1, end - 8, 8).await.unwrap(), [0; 8][..]);
    let error = read(&store, 1, end - 8, 9).await.unwrap_err();
    assert!(matches!(error, StoreError::ShortReplica { have_bytes } if have_bytes == end));
}

#[tokio::test]
async fn an_open_replica_is_read_as_far_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut writer = create(&store, 1).await.unwrap();
    let mut offset = 0;
    for (index, bytes) in [100, 5000, 4096, 1 << 20, 1, 70_000]
        .into_iter()
        .enumerate()
    {
        let data = data(index as u64, bytes);
        let sync = index % 2 == 0;
        writer
            .write(vec![packet(offset, &data, sync)], sync)
            .await
            .unwrap();
        assert_eq!(read(&store, 1, offset, bytes as u64).await.unwrap(), data);
        offset += (bytes as u64).next_multiple_of(4096);
        let beyond = read(&store, 1, offset, 1).await.unwrap_err();
        assert!(matches!(beyond, StoreError::ShortReplica { have_bytes } if have_bytes == offset));
    }
    drop(writer);
    assert_eq!(read(&store, 1, 0, 100).await.unwrap(), data(0, 100));
}

#[tokio::test]
async fn a_volume_in_memory_works_like_any_other() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        let missing = "there is no file system in memory at /dev/shm";
        assert!(
            std::env::var_os("HARVESTFS_TESTS_NO_SKIP").is_none(),
            "{missing}"
        );
        // `println` would be captured.
        let _ = writeln!(std::io::stderr().lock(), "\nSKIPPED: {missing}\n");
        return;
    };
    let data = data(1, 3 << 20);
    let store = real_store(dir.path());
    write_sealed(&store, 1, &data).await.unwrap();
    let mut writer = create(&store, 2).await.unwrap();
    let synced = packet(0, &data[..70_000], true);
    writer.write(vec![synced], true).await.unwrap();
    drop((writer, store));
    let store = real_store(dir.path());
    assert_eq!(read(&store, 1, 0, 3 << 20).await.unwrap(), data);
    assert_eq!(read(&store, 2, 0, 70_000).await.unwrap(), data[..70_000]);
}

#[tokio::test]
async fn what_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let gap = packet(4096, b"x", false);
    let mut wrong_checksum = packet(0, b"x", false);
    wrong_checksum.checksums[0] ^= 1;
    let mut missing_checksum = packet(0, &[1; 5000], false);
    missing_checksum.checksums.pop();
    let mut odd_offset = packet(0, b"x", false);
    odd_offset.block_offset = 5;
    let mut beyond = packet(0, b"x", false);
    beyond.block_offset = u64::MAX - 4095;
    for (block, bad) in [gap, wrong_checksum, missing_checksum, odd_offset, beyond]
        .into_iter()
        .enumerate()
    {
        let block = block as u64 + 1;
        let mut writer = create(&store, block).await.unwrap();
        let error = writer.write(vec![bad], false).await.unwrap_err();
        let expected = match error {
            StoreError::Corrupt { offset } => block == 2 && offset == 0,
            StoreError::OutOfOrder(_) => block != 2,
            _ => false,
        };
        assert!(expected, "{block}: {error}");
        let after = writer.write(vec![packet(0, b"x", false)], false).await;
        assert!(matches!(after, Err(StoreError::OutOfOrder(_))));
    }
    let mut writer = create(&store, 9).await.unwrap();
    assert!(matches!(
        create(&store, 9).await,
        Err(StoreError::ReplicaExists)
    ));
    writer
        .write(vec![packet(0, &[1; 10], false)], false)
        .await
        .unwrap();
    let error = writer.seal(4097).await.unwrap_err();
    assert!(matches!(error, StoreError::OutOfOrder(_)));
}

#[tokio::test]
async fn a_block_has_a_largest_size() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut writer = store
        .create(BlockId(1), None, Origin::Pipeline, 8192)
        .await
        .unwrap();
    let all = packet(0, &[1; 8192], false);
    writer.write(vec![all], false).await.unwrap();
    let more = writer.write(vec![packet(8192, &[1], false)], false).await;
    assert!(matches!(more, Err(StoreError::OutOfOrder(_))));
}

#[tokio::test]
async fn a_replica_that_lacks_its_end_is_sealed_at_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut writer = create(&store, 1).await.unwrap();
    let all = vec![packet(0, &data(3, 20_000), false)];
    writer.write(all, false).await.unwrap();
    drop(writer);
    for _ in 0..2 {
        let sealed = store
            .seal_what_is_there(BlockId(1), 8 * 4096, || true)
            .await;
        sealed.unwrap();
        let storage = store.healthy_storages()[0];
        assert_eq!(store.replicas_of(storage), [report(1, 20_480, true)]);
    }
}

/// Otherwise the empty replica would never be removed: that nothing more arrives is known when it is sealed.
#[tokio::test]
async fn an_empty_replica_is_sealed_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    drop(create(&store, 2).await.unwrap());
    store
        .seal_what_is_there(BlockId(2), 4096, || true)
        .await
        .unwrap();
    drop(store);
    let store = real_store(dir.path());
    let storage = store.healthy_storages()[0];
    assert_eq!(store.replicas_of(storage), [report(2, 0, true)]);
    store
        .seal_what_is_there(BlockId(2), 4096, || true)
        .await
        .unwrap();
    store.delete(BlockId(2)).await.unwrap();
}

#[tokio::test]
async fn a_replica_is_sealed_by_others_when_its_writer_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let data = data(3, 20_000);
    for block in [1, 2] {
        let mut writer = create(&store, block).await.unwrap();
        writer
            .write(vec![packet(0, &data, false)], false)
            .await
            .unwrap();
    }
    let too_long = store.seal(BlockId(1), 5 * 4096 + 1).await.unwrap_err();
    assert!(matches!(
        too_long,
        StoreError::ShortReplica { have_bytes: 20_480 }
    ));
    // Cut in the middle, and not.
    store.seal(BlockId(1), 8000).await.unwrap();
    store.seal(BlockId(2), 20_000).await.unwrap();
    assert_eq!(read(&store, 1, 0, 8192).await.unwrap(), data[..8192]);
    assert_eq!(read(&store, 2, 0, 20_000).await.unwrap(), data);
    assert!(read(&store, 1, 0, 8193).await.is_err());
    // Again: nothing happens; sealing at a greater length is impossible.
    store.seal(BlockId(1), 8000).await.unwrap();
    store.seal(BlockId(1), 100).await.unwrap();
    assert!(store.seal(BlockId(1), 8193).await.is_err());
    assert!(matches!(
        store.seal(BlockId(7), 1).await,
        Err(StoreError::NoSuchReplica)
    ));
    let storage = store.healthy_storages()[0];
    let mut reports = store.replicas_of(storage);
    reports.sort_by_key(|report| report.block);
    assert_eq!(reports, [report(1, 8192, true), report(2, 20_480, true)]);
}

#[tokio::test]
async fn sealing_stops_a_writer_that_is_still_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let mut writer = create(&store, 1).await.unwrap();
    writer
        .write(vec![packet(0, &[1; 4096], false)], false)
        .await
        .unwrap();
    let stream = async {
        writer.fenced().await;
        let result = writer.write(vec![packet(4096, &[2], false)], false).await;
        assert!(matches!(result, Err(StoreError::OutOfOrder(_))));
        drop(writer);
    };
    let (sealed, ()) = tokio::join!(store.seal(BlockId(1), 4096), stream);
    sealed.unwrap();
    assert_eq!(read(&store, 1, 0, 4096).await.unwrap(), [1; 4096][..]);
}

#[tokio::test]
async fn deleting_frees_the_space_once_and_comes_twice() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let empty = store.status()[0].used_bytes;
    write_sealed(&store, 1, &data(1, 1 << 20)).await.unwrap();
    let mut writer = create(&store, 2).await.unwrap();
    writer
        .write(vec![packet(0, &[1; 9000], true)], true)
        .await
        .unwrap();
    drop(writer);
    assert!(store.status()[0].used_bytes > empty + (1 << 20));
    // An open file keeps its space until it is closed.
    read(&store, 1, 0, 1).await.unwrap();
    changes(&store);
    for _ in 0..2 {
        for block in [1, 2, 3] {
            store.delete(BlockId(block)).await.unwrap();
        }
    }
    assert_eq!(store.status()[0].used_bytes, empty);
    assert_eq!(
        changes(&store),
        [
            ReplicaChange::Deleted(BlockId(1)),
            ReplicaChange::Deleted(BlockId(2))
        ]
    );
    assert!(matches!(
        read(&store, 1, 0, 1).await,
        Err(StoreError::NoSuchReplica)
    ));
    drop(store);
    let store = real_store(dir.path());
    assert!(store.replicas_of(store.healthy_storages()[0]).is_empty());
}

#[tokio::test]
async fn a_repair_shows_only_once_it_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let storage = store.healthy_storages()[0];
    for finish in [false, true] {
        let create = store.create(BlockId(1), None, Origin::Repair, BLOCK_BYTES);
        let mut writer = create.await.unwrap();
        writer
            .write(vec![packet(0, b"repaired", false)], false)
            .await
            .unwrap();
        assert!(store.replicas_of(storage).is_empty());
        assert!(matches!(
            read(&store, 1, 0, 1).await,
            Err(StoreError::NoSuchReplica)
        ));
        if finish {
            writer.seal(8).await.unwrap();
            assert_eq!(read(&store, 1, 0, 8).await.unwrap(), b"repaired"[..]);
        } else {
            writer.discard().await.unwrap();
        }
    }
    assert_eq!(store.replicas_of(storage), [report(1, 4096, true)]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// In any packets and batches that a block is written in, it reads back the same.
    #[test]
    fn any_packets_read_back(
        packets in prop::collection::vec((1_usize..200_000, any::<bool>()), 1..20),
        batch in 1_usize..5,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let store = real_store(dir.path());
            let mut writer = create(&store, 1).await.unwrap();
            let mut expected = Vec::new();
            let mut length = 0;
            for batch in packets.chunks(batch) {
                let mut batch_packets = Vec::new();
                let sync = batch.iter().any(|(_, sync)| *sync);
                for &(bytes, sync) in batch {
                    let data = data(expected.len() as u64, bytes);
                    batch_packets.push(packet(expected.len() as u64, &data, sync));
                    length = expected.len() + bytes;
                    expected.extend(data);
                    expected.resize(expected.len().next_multiple_of(4096), 0);
                }
                writer.write(batch_packets, sync).await.unwrap();
            }
            writer.seal(length as u64).await.unwrap();
            let all = read(&store, 1, 0, length as u64).await.unwrap();
            assert_eq!(all, expected[..length]);
        });
    }
}

#[tokio::test]
async fn a_large_replica_goes_piece_by_piece() {
    const PIECE_BYTES: u64 = 32 << 20;
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let data = data(1, 2 * PIECE_BYTES as usize + 4096);
    for block in 1..=2 {
        let created = store.create(BlockId(block), None, Origin::Pipeline, 3 * PIECE_BYTES);
        let mut writer = created.await.unwrap();
        for (index, piece) in data.chunks(1 << 20).enumerate() {
            let packet = packet(index as u64 * (1 << 20), piece, false);
            writer.write(vec![packet], false).await.unwrap();
        }
        writer.seal(data.len() as u64).await.unwrap();
    }
    let used_bytes = || store.status()[0].used_bytes;
    let full_bytes = used_bytes();

    let mut removal = store.start_removal(BlockId(1)).await.unwrap().unwrap();
    assert!(store.report(BlockId(1)).is_none());
    assert!(store.start_removal(BlockId(1)).await.unwrap().is_none());
    let mut cut_bytes = 0;
    loop {
        let (rest, cut) = removal.cut().await.unwrap();
        removal = rest;
        match cut.unwrap() {
            0 => break,
            bytes => cut_bytes += bytes,
        }
        assert_eq!(used_bytes(), full_bytes - cut_bytes);
    }
    assert_eq!(cut_bytes, 2 * PIECE_BYTES);
    let rest_bytes = removal.finish().await.unwrap();
    assert_eq!(used_bytes(), full_bytes - cut_bytes - rest_bytes);

    // A remainder that exists when the datanode ends in the middle is not counted as a replica.
    let removal = store.start_removal(BlockId(2)).await.unwrap().unwrap();
    let (removal, cut) = removal.cut().await.unwrap();
    assert_eq!(cut.unwrap(), PIECE_BYTES);
    drop((removal, store));
    let store = real_store(dir.path());
    assert!(store.report(BlockId(2)).is_none());
    let storage = store.status()[0].storage;
    assert_eq!(store.corrupt_replicas_of(storage), [BlockId(2)]);
    store.delete(BlockId(2)).await.unwrap();
    assert_eq!(store.corrupt_replicas_of(storage), []);
}
