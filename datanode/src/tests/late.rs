//! Volumes that take long to open, and copies of volumes.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::BlockId;

use crate::testing::cluster::{TestCluster, data, down, wait_until_unlocked};
use crate::testing::disks::{Fault, FaultyDisk};
use crate::{Datanode, DatanodeOptions, VolumeError};

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).unwrap();
        }
    }
}

/// A cluster whose datanode has block 1 and is stopped, and the options to restart it: with another volume, of this
/// name.
async fn stopped(other: &str) -> (TestCluster, DatanodeOptions) {
    let mut cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    cluster.kill(0).await;
    wait_until_unlocked(&cluster.volume(0)).await;
    let mut options = cluster.options(0);
    let mut volume = options.volumes[0].clone();
    volume.path = cluster.dir.path().join(other);
    options.volumes.push(volume);
    (cluster, options)
}

/// Starts the datanode while the disk of a volume does not respond.
async fn start_without(
    late: &Path,
    cluster: &mut TestCluster,
    options: DatanodeOptions,
) -> (Datanode, Arc<FaultyDisk>) {
    let disk = FaultyDisk::new();
    disk.hang_on(Fault::Size, late);
    cluster.namenode.lock().full_reports.clear();
    let datanode = Datanode::start_on(options, disk.clone(), None);
    let datanode = datanode.await.unwrap();
    let errors = datanode.volume_errors();
    assert!(matches!(errors, [VolumeError::Opening { .. }]));
    cluster.nodes[0] = cluster.namenode.node("dn1").await;
    (datanode, disk)
}

/// The volume is reported all the time to the namenode, which would otherwise take the server for reimaged; and it
/// joins without a restart, as the next start might be just as slow.
#[tokio::test]
async fn a_volume_that_takes_long_to_open_joins_the_others_which_serve_meanwhile() {
    const QUOTA_BYTES: u64 = 1 << 29;
    let (mut cluster, options) = stopped("other").await;
    let mut lowered = options.volumes.clone();
    for volume in &mut lowered {
        volume.quota_bytes = QUOTA_BYTES;
    }
    let obeyed = [&options.volumes[0], &options.volumes[1]].map(|it| it.path.join("OBEYED"));
    if obeyed[0].exists() {
        fs::remove_file(&obeyed[0]).unwrap();
    }
    let first = cluster.volume(0);
    let (datanode, disk) = start_without(&first, &mut cluster, options).await;
    let node = cluster.nodes[0].node;
    let registered = || {
        let state = cluster.namenode.lock();
        let volumes = state.registered.last().unwrap().volumes.clone();
        let is_healthy = volumes.iter().map(|it| (it.storage, it.healthy));
        is_healthy.collect::<Vec<_>>()
    };
    let before = registered();
    let [(other, true), (late, false)] = before[..] else {
        panic!("{before:?}");
    };
    cluster.write_block(&cluster.nodes, 2, &data(2, 5000)).await;
    let missing = cluster.read(0, 1, (0, 5000)).await;
    assert_eq!(missing, Err(DataError::NoSuchReplica));
    datanode.reconfigure(&lowered).await;

    disk.heal();
    let both_reported = |reports: Option<&u32>| (reports == Some(&2)).then_some(());
    let namenode = &cluster.namenode;
    namenode
        .wait_for(|state| both_reported(state.full_reports.get(&node)))
        .await;
    assert_eq!(registered(), [(other, true), (late, true)]);
    for (block, storage) in [(1, late), (2, other)] {
        assert_eq!(namenode.lock().replicas[&node][&BlockId(block)].0, storage);
        let read = cluster.read(0, block, (0, 5000)).await.unwrap();
        assert_eq!(read, data(block, 5000));
    }
    // The obeyed namenode is recorded on it, though nothing new was obeyed.
    let [of_late, of_other] = &obeyed;
    while !of_late.exists() || !of_other.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    namenode
        .wait_for(|state| {
            let (_, _, last) = state.heartbeats.last()?;
            let mut volumes = last.volumes.iter();
            let is_lowered = volumes.all(|it| it.healthy && it.quota_bytes == QUOTA_BYTES);
            is_lowered.then_some(())
        })
        .await;
}

/// Namenodes refuse a server that reports a volume twice, and thus all its volumes.
#[tokio::test]
async fn a_copy_of_a_volume_that_takes_long_to_open_takes_nothing_down() {
    let (mut cluster, options) = stopped("copy").await;
    let path = options.volumes[1].path.clone();
    copy(&cluster.volume(0), &path);
    let (datanode, disk) = start_without(&path, &mut cluster, options).await;

    disk.wait_for_hanging(1).await;
    disk.heal();
    wait_until_unlocked(&path).await;
    let registrations = cluster.namenode.lock().registered.len();
    cluster.namenode.wait_for_heartbeats().await;
    let read = cluster.read(0, 1, (0, 5000)).await.unwrap();
    assert_eq!(read, data(1, 5000));
    let state = cluster.namenode.lock();
    assert_eq!(state.registered.len(), registrations);
    let (_, _, last) = state.heartbeats.last().unwrap();
    assert_eq!(last.volumes.len(), 1);
    assert!(last.volumes[0].healthy);
    let metrics = datanode.metrics_text()();
    assert!(metrics.contains(&down(&path)), "{metrics}");
}

/// Nobody can tell which of the two is current. The other volumes are served all the same.
#[tokio::test]
async fn of_a_volume_and_its_copy_none_is_used() {
    let (mut cluster, mut options) = stopped("copy").await;
    copy(&cluster.volume(0), &options.volumes[1].path);
    let mut good = options.volumes[0].clone();
    good.path = cluster.dir.path().join("good");
    options.volumes.push(good);
    cluster.restart(options, 0).await;

    let datanode = cluster.datanodes[0].as_ref().unwrap();
    let errors = datanode.volume_errors();
    let are_copies = matches!(errors, [VolumeError::Copy { .. }, VolumeError::Copy { .. }]);
    assert!(are_copies, "{errors:?}");
    let metrics = datanode.metrics_text()();
    assert!(metrics.contains(&down(&cluster.volume(0))), "{metrics}");
    let registered = cluster.namenode.lock().registered.last().cloned().unwrap();
    assert_eq!(registered.volumes.len(), 1);
    let refused = cluster.read(0, 1, (0, 5000)).await;
    assert_eq!(refused, Err(DataError::NoSuchReplica));
    cluster.write_block(&cluster.nodes, 2, &data(2, 5000)).await;
    let read = cluster.read(0, 2, (0, 5000)).await.unwrap();
    assert_eq!(read, data(2, 5000));
}
