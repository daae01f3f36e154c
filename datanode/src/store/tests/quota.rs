//! The quota is never exceeded, as the file system counts it.

use std::os::unix::fs::MetadataExt;
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// The disk usage as reported by `du`.
fn allocated_bytes(path: &Path) -> u64 {
    let metadata = std::fs::symlink_metadata(path).unwrap();
    let own = metadata.blocks() * 512;
    if !metadata.is_dir() {
        return own;
    }
    let entries = std::fs::read_dir(path).unwrap();
    own + entries
        .map(|entry| allocated_bytes(&entry.unwrap().path()))
        .sum::<u64>()
}

#[derive(Clone, Debug)]
enum Step {
    Create,
    Append(usize, usize, bool),
    Seal(usize),
    Close(usize),
    Delete(usize),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Create),
        8 => (any::<usize>(), 1_usize..1_000_000, any::<bool>())
            .prop_map(|(which, bytes, sync)| Step::Append(which, bytes, sync)),
        2 => any::<usize>().prop_map(Step::Seal),
        1 => any::<usize>().prop_map(Step::Close),
        2 => any::<usize>().prop_map(Step::Delete),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn never_exceeded(quota_bytes in 0_u64..6_000_000, steps in prop::collection::vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(quota_bytes, steps));
    }
}

async fn run(quota_bytes: u64, steps: Vec<Step>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let mut store = store_at(&path, quota_bytes, Arc::new(RealDisk));
    let overhead = allocated_bytes(&path);
    let mut writers: Vec<(u64, u64, BlockWriter)> = Vec::new();
    let mut known = Vec::new();
    for step in steps {
        match step {
            Step::Create => {
                let block = known.len() as u64 + 1;
                known.push(block);
                if let Ok(writer) = create(&store, block).await {
                    writers.push((block, 0, writer));
                }
            }
            Step::Append(which, bytes, sync) if !writers.is_empty() => {
                let index = which % writers.len();
                let (_, offset, writer) = &mut writers[index];
                let packet = packet(*offset, &vec![9; bytes], sync);
                match writer.write(vec![packet], sync).await {
                    Ok(()) => *offset += (bytes as u64).next_multiple_of(4096),
                    Err(StoreError::NoSpace | StoreError::OutOfOrder(_)) => {
                        writers.remove(index);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Seal(which) if !writers.is_empty() => {
                let (_, length, mut writer) = writers.remove(which % writers.len());
                writer.seal(length).await.unwrap();
            }
            Step::Close(which) if !writers.is_empty() => {
                writers.remove(which % writers.len());
            }
            Step::Delete(which) if !known.is_empty() => {
                let block = known[which % known.len()];
                writers.retain(|(written, _, _)| *written != block);
                store.delete(BlockId(block)).await.unwrap();
            }
            Step::Restart => {
                writers.clear();
                drop(store);
                store = store_at(&path, quota_bytes, Arc::new(RealDisk));
            }
            _ => {}
        }
        let status = &store.status()[0];
        assert!(status.used_bytes <= quota_bytes);
        let allocated = allocated_bytes(&path);
        // A quota below the size of the directories cannot make them smaller.
        assert!(
            allocated <= quota_bytes.max(overhead),
            "{allocated} of {quota_bytes}"
        );
        assert!(
            allocated <= status.used_bytes.max(overhead),
            "{allocated}, {status:?}"
        );
    }
}

#[tokio::test]
async fn a_lowered_quota_holds_for_new_data_at_once_and_for_the_rest_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    for block in 0..6 {
        let size = 500_000 + block as usize * 100_000;
        write_sealed(&store, block, &data(block, size))
            .await
            .unwrap();
    }
    let storage = store.healthy_storages()[0];
    let before = store.status()[0];
    assert_eq!(before.shrinks_in_ms, None);
    let quota = before.used_bytes - 1_200_000;
    let hour = Duration::from_secs(3600);
    store.set_quota(storage, quota, hour).await.unwrap();
    let status = store.status()[0];
    assert_eq!(status.quota_bytes, quota);
    let left = status.shrinks_in_ms.unwrap();
    assert!((3_590_000..=3_600_000).contains(&left), "{left}");
    assert!(matches!(
        create(&store, 100).await.err().unwrap(),
        StoreError::NoSpace
    ));
    let now = now();
    assert_eq!(store.overdue(now), []);
    // The namenode has one replica deleted, the rest is chosen here: the largest first.
    store.delete(BlockId(1)).await.unwrap();
    let overdue = store.overdue(now + hour);
    assert_eq!(overdue, [(storage, store.status()[0].used_bytes - quota)]);
    let victims = store.victims(storage, overdue[0].1);
    assert_eq!(victims, [BlockId(5)]);
    for block in victims {
        store.delete(block).await.unwrap();
    }
    let status = store.status()[0];
    assert!(status.used_bytes <= quota);
    assert_eq!(status.shrinks_in_ms, None);
    assert_eq!(store.overdue(now + hour), []);
    for block in [0, 2, 3, 4] {
        read(&store, block, 0, 500_000).await.unwrap();
    }
}

#[tokio::test]
async fn a_lowered_quota_holds_although_the_disk_gets_an_earlier_change_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let volume = store.volumes()[0].clone();
    let before_bytes = store.status()[0].quota_bytes;
    // Serialized jobs wait until this is released.
    let occupy = || {
        let (let_go, is_let_go) = mpsc::channel::<()>();
        let volume = volume.clone();
        let occupied = tokio::spawn(async move {
            let wait = move || {
                let _ = is_let_go.recv();
                Ok(())
            };
            volume.run_in_turn(wait).await
        });
        (let_go, occupied)
    };
    let change = |quota_bytes| {
        let volume = volume.clone();
        tokio::spawn(async move {
            let hour = Duration::from_secs(3600);
            volume.set_quota(quota_bytes, hour, None).await
        })
    };
    let (first_goes, first) = occupy();
    let raised = change(before_bytes * 2);
    let (second_goes, second) = occupy();
    let lowered = change(before_bytes / 2);
    // They run in this order.
    tokio::task::yield_now().await;
    assert_eq!(volume.quota.limit_bytes(), before_bytes / 2);
    drop(first_goes);
    first.await.unwrap().unwrap();
    raised.await.unwrap().unwrap();
    assert_eq!(volume.quota.limit_bytes(), before_bytes / 2);
    assert_eq!(store.status()[0].quota_bytes, before_bytes);
    drop(second_goes);
    second.await.unwrap().unwrap();
    lowered.await.unwrap().unwrap();
    assert_eq!(volume.quota.limit_bytes(), before_bytes / 2);
    assert_eq!(store.status()[0].quota_bytes, before_bytes / 2);
    drop((volume, store));
    let store = real_store(dir.path());
    assert_eq!(store.status()[0].quota_bytes, before_bytes / 2);
}

#[tokio::test]
async fn a_changed_quota_outlives_a_restart_until_the_configuration_changes() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    write_sealed(&store, 1, &data(1, 3_000_000)).await.unwrap();
    let storage = store.healthy_storages()[0];
    let soon = Duration::from_secs(100);
    store.set_quota(storage, 2_000_000, soon).await.unwrap();
    drop(store);
    let store = real_store(dir.path());
    let status = store.status()[0];
    assert_eq!(status.quota_bytes, 2_000_000);
    assert!(status.shrinks_in_ms.unwrap() <= 100_000);
    drop(store);
    let store = store_at(dir.path(), 1 << 29, Arc::new(RealDisk));
    assert_eq!(store.status()[0].quota_bytes, 1 << 29);
    // As SIGHUP does: the new configuration applies, and is recorded as the configured quota.
    let configured = |bytes| [options(dir.path(), bytes)];
    store.configure_quotas(&configured(1 << 29)).await;
    assert_eq!(store.status()[0].quota_bytes, 1 << 29);
    store.configure_quotas(&configured(1_000_000)).await;
    let status = store.status()[0];
    assert_eq!(status.quota_bytes, 1_000_000);
    assert!(status.shrinks_in_ms.is_some());
    drop(store);
    let store = store_at(dir.path(), 1_000_000, Arc::new(RealDisk));
    assert_eq!(store.status()[0].quota_bytes, 1_000_000);
    assert!(store.status()[0].shrinks_in_ms.unwrap() < 3_600_000);
}
