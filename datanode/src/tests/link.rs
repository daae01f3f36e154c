//! The datanode with its namenode.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::data::WriteAck;
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::{BlockId, ClusterId};
use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;
use harvestfs_protocol::node::NodeCommand;
use harvestfs_protocol::timeline::{Epoch, Position};
use harvestfs_protocol::token::{BlockToken, Right};
use tokio::time::Instant;

use crate::store::{Progress, RealDisk, Volume};
use crate::testing::cluster::{TestCluster, data, down, wait_until_unlocked};
use crate::testing::disks::FaultyDisk;
use crate::testing::fake_namenode::{CLUSTER, FakeNamenode, State};
use crate::{Datanode, StartError, VolumeError};

/// No wait of these tests takes longer unless something is broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the metrics contain a line.
async fn wait_for_metric(datanode: &Datanode, line: &str) {
    let text = datanode.metrics_text();
    let appears = async {
        while !text().contains(line) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, appears).await.expect(line);
}

#[tokio::test]
async fn it_registers_again_when_the_namenode_comes_back() {
    let mut cluster = TestCluster::start(1).await;
    let datanode = cluster.datanodes[0].take().unwrap();
    datanode.registered().await;
    wait_for_metric(&datanode, "harvestfs_datanode_registered 1\n").await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    let addr = cluster.namenode.addr;
    assert_eq!(cluster.namenode.lock().registered[0].cluster, None);
    let fresh = FakeNamenode::start(&cluster.authority, "127.0.0.1:0".parse().unwrap());
    std::mem::replace(&mut cluster.namenode, fresh).stop().await;
    // Blocks are served in the meantime, and whoever watches the metrics learns of it.
    cluster.read(0, 1, (0, 5000)).await.unwrap();
    wait_for_metric(&datanode, "harvestfs_datanode_registered 0\n").await;
    let back = FakeNamenode::start(&cluster.authority, addr);
    back.node("dn1").await;
    wait_for_metric(&datanode, "harvestfs_datanode_registered 1\n").await;
    let state = back.lock();
    assert_eq!(state.registered[0].cluster, Some(CLUSTER));
    let replicas = &state.replicas[&state.nodes["dn1"]];
    assert!(replicas[&BlockId(1)].1.sealed);
}

#[tokio::test]
async fn it_asks_for_patience_until_it_is_registered() {
    let mut cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    cluster.kill(0).await;
    let fresh = FakeNamenode::start(&cluster.authority, "127.0.0.1:0".parse().unwrap());
    let options = cluster.options(0);
    let namenode = std::mem::replace(&mut cluster.namenode, fresh);
    let addr = namenode.addr;
    namenode.stop().await;
    let datanode = Datanode::start(options).await.unwrap();
    cluster.nodes[0].data_addr = datanode.local_addr();
    let read = cluster.read(0, 1, (0, 1)).await;
    assert!(matches!(read, Err(DataError::Busy { .. })), "{read:?}");
    // A datanode that answers a writer has a number.
    let token = namenode_token(&cluster, 2);
    let nodes = cluster.nodes.clone();
    let mut stream = cluster.client.write(&nodes, BlockId(2), token).await;
    let back = FakeNamenode::start(&cluster.authority, addr);
    assert_eq!(stream.ack().await, Some(WriteAck::Ready));
    back.node("dn1").await;
    assert_eq!(cluster.read(0, 1, (0, 5000)).await.unwrap(), data(1, 5000));
}

#[tokio::test]
async fn it_needs_an_address_at_which_others_reach_it() {
    let cluster = TestCluster::start(1).await;
    for all in ["0.0.0.0:0", "[::]:0"] {
        let mut options = cluster.options(1);
        options.listen = all.parse().unwrap();
        let refused = Datanode::start(options.clone()).await.map(drop);
        assert!(matches!(refused, Err(StartError::Unreachable(_))), "{all}");
        options.listen = "127.0.0.1:0".parse().unwrap();
        options.advertise = Some(all.parse().unwrap());
        let refused = Datanode::start(options).await.map(drop);
        assert!(matches!(refused, Err(StartError::Unreachable(_))), "{all}");
    }
}

#[tokio::test]
async fn a_datanode_without_a_number_answers_no_writer() {
    let mut cluster = TestCluster::start(1).await;
    cluster.kill(0).await;
    let fresh = FakeNamenode::start(&cluster.authority, "127.0.0.1:0".parse().unwrap());
    std::mem::replace(&mut cluster.namenode, fresh).stop().await;
    let mut options = cluster.options(0);
    // There is no namenode.
    options.namenodes = vec![cluster.nodes[0].data_addr];
    let datanode = Datanode::start(options).await.unwrap();
    cluster.nodes[0].data_addr = datanode.local_addr();
    let token = namenode_token(&cluster, 1);
    let nodes = cluster.nodes.clone();
    let mut stream = cluster.client.write(&nodes, BlockId(1), token).await;
    let (answer, ()) = tokio::join!(stream.ack(), datanode.shutdown());
    assert_eq!(answer, None);
}

fn namenode_token(cluster: &TestCluster, block: u64) -> BlockToken {
    cluster.namenode.token(BlockId(block), Right::Write)
}

#[tokio::test]
async fn heartbeats_come_on_time_while_no_disk_answers() {
    let disk = FaultyDisk::new();
    let cluster = TestCluster::start_on(vec![disk.clone()]).await;
    cluster
        .write_block(&cluster.nodes, 1, &data(1, 100_000))
        .await;
    disk.hang();
    // Everything that touches a disk waits now: reads, writes, deletions.
    let mut waiting = tokio::task::JoinSet::new();
    for block in 1..40 {
        let token = cluster
            .namenode
            .token(BlockId(block), harvestfs_protocol::token::Right::Write);
        let (client, node) = (cluster.client.clone(), cluster.nodes[0].clone());
        waiting.spawn(async move {
            if block % 2 == 1 {
                let _ = client.read(&node, BlockId(1), token, (0, 1)).await;
            } else {
                let _ = client
                    .write(&[node], BlockId(block), token)
                    .await
                    .ack()
                    .await;
            }
        });
    }
    let node = cluster.nodes[0].node;
    let blocks = vec![BlockId(1)];
    cluster
        .namenode
        .lock()
        .commands
        .insert(node, vec![NodeCommand::Delete { blocks }]);
    let before = cluster.namenode.lock().heartbeats.len();
    cluster
        .namenode
        .wait_for(|state| (state.heartbeats.len() >= before + 3).then_some(()))
        .await;
    let state = cluster.namenode.lock();
    let times: Vec<Instant> = state.heartbeats[before - 1..]
        .iter()
        .map(|it| it.1)
        .collect();
    for pair in times.windows(2) {
        let gap = pair[1] - pair[0];
        // On a busy machine a heartbeat may be late, but none may be skipped.
        assert!(gap < HEARTBEAT_INTERVAL * 2, "{gap:?}");
    }
    assert!(state.heartbeats[before + 2].2.active_streams > 10);
    assert!(state.heartbeats[before + 2].2.volumes[0].healthy);
    drop(state);
    disk.heal();
    waiting.abort_all();
}

/// The namenode takes the next heartbeat on a connection as proof that its last answer has arrived.
#[tokio::test]
async fn no_heartbeat_follows_one_without_an_answer_on_the_same_connection() {
    let cluster = TestCluster::start(1).await;
    let namenode = &cluster.namenode;
    let (heartbeats, registered) = {
        let mut state = namenode.lock();
        state.loses_answers = true;
        (state.heartbeats.len(), state.registered.len())
    };
    namenode
        .wait_for(|state| (state.registered.len() > registered).then_some(()))
        .await;
    {
        let mut state = namenode.lock();
        // One on each connection, if the second is that quick.
        assert!(state.heartbeats.len() <= heartbeats + 2);
        state.loses_answers = false;
    }
    namenode.wait_for_heartbeats().await;
}

/// A registration is followed by full reports, which the namenode would have to process all the time.
#[tokio::test]
async fn a_namenode_that_refuses_what_follows_a_registration_is_asked_ever_more_rarely() {
    let cluster = TestCluster::start(1).await;
    let namenode = &cluster.namenode;
    let registered = {
        let mut state = namenode.lock();
        state.refuses_heartbeats = true;
        state.registered.len()
    };
    let asked_again = async |times: usize| {
        let look = |state: &mut State| (state.registered.len() >= registered + times).then_some(());
        namenode.wait_for(look).await;
    };
    // Of the first two, the first may not count: its connection lasted until then.
    asked_again(2).await;
    let begun = Instant::now();
    asked_again(6).await;
    // The shortest pauses are 100, 200, 400 and 800 ms.
    let passed = begun.elapsed();
    assert!(passed >= Duration::from_millis(1_400), "{passed:?}");
}

#[tokio::test]
async fn commands_are_obeyed_and_may_come_twice() {
    let cluster = TestCluster::start(1).await;
    let node = cluster.nodes[0].node;
    let data = data(1, 50_000);
    cluster.write_block(&cluster.nodes, 1, &data).await;
    let token = cluster
        .namenode
        .token(BlockId(2), harvestfs_protocol::token::Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(2), token)
        .await;
    stream.ack().await;
    stream.send(data.clone().into(), false).await.unwrap();
    stream.wait_for_all().await.unwrap();
    drop(stream);
    for _ in 0..2 {
        let seal = NodeCommand::Seal {
            block: BlockId(2),
            length_bytes: 20_000,
        };
        cluster.namenode.command_now(node, seal);
        cluster
            .namenode
            .wait_for(|state| {
                let (_, replica) = state.replicas[&node].get(&BlockId(2))?;
                (replica.sealed && replica.length_bytes == 20_480).then_some(())
            })
            .await;
    }
    for _ in 0..2 {
        let blocks = vec![BlockId(1), BlockId(77)];
        cluster
            .namenode
            .command_now(node, NodeCommand::Delete { blocks });
        cluster
            .namenode
            .wait_for(|state| (!state.replicas[&node].contains_key(&BlockId(1))).then_some(()))
            .await;
    }
    let storage = cluster.namenode.lock().replicas[&node][&BlockId(2)].0;
    cluster
        .namenode
        .command_now(node, NodeCommand::ReportBlocks { storage });
    // One after it registered again, and one that was requested.
    cluster
        .namenode
        .wait_for(|state| (*state.full_reports.get(&node)? >= 2).then_some(()))
        .await;
    assert_eq!(
        cluster.read(0, 2, (0, 20_000)).await.unwrap(),
        data[..20_000]
    );
}

#[tokio::test]
async fn a_volume_of_another_cluster_is_not_served() {
    let mut cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    cluster.kill(0).await;
    cluster.namenode.lock().cluster = Some(ClusterId(0xbad));
    let mut options = cluster.options(0);
    let mut second = options.volumes[0].clone();
    second.path = cluster.dir.path().join("second");
    options.volumes.push(second);
    cluster.restart(options, 0).await;
    let read = cluster.read(0, 1, (0, 1)).await;
    assert!(read.is_err());
    cluster
        .namenode
        .wait_for(|state| {
            let volumes = &state.heartbeats.last()?.2.volumes;
            (volumes.len() == 2 && !volumes[0].healthy && volumes[1].healthy).then_some(())
        })
        .await;
}

/// Epochs of different clusters have nothing to do with each other: the datanode would refuse its own namenode, which
/// could not do anything about it.
#[tokio::test]
async fn what_was_obeyed_according_to_a_volume_of_another_cluster_does_not_count() {
    let mut cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    cluster.kill(0).await;
    wait_until_unlocked(&cluster.volume(0)).await;
    let mut options = cluster.options(0);
    let mut foreign = options.volumes[0].clone();
    foreign.path = cluster.dir.path().join("foreign");
    let disk = Arc::new(RealDisk);
    let opened = Volume::open(&foreign, "dn1", disk, 1, &Progress::default());
    let (volume, _) = opened.unwrap();
    volume.claim(ClusterId(0xbad)).unwrap();
    let later = Position {
        epoch: Epoch { number: 9, id: 9 },
        record: 9,
    };
    volume.write_obeyed(later).await.unwrap();
    drop(volume);
    wait_until_unlocked(&foreign.path).await;
    let obeyed = foreign.path.join("OBEYED");
    let written = fs::read(&obeyed).unwrap();
    // Wherever it is listed.
    for index in 0..2 {
        options.volumes.insert(index, foreign.clone());
        cluster.restart(options.clone(), 0).await;
        let read = cluster.read(0, 1, (0, 5000)).await.unwrap();
        assert_eq!(read, data(1, 5000));
        {
            let state = cluster.namenode.lock();
            let registered = state.registered.last().unwrap();
            // The namenode has to know what its own volume tells: it may be an older copy of itself.
            let told = registered.obeyed.map(|it| it.epoch);
            assert_eq!(told, Some(state.authority.position.epoch));
            assert_eq!(registered.cluster, Some(CLUSTER));
        }
        cluster.kill(0).await;
        for volume in &options.volumes {
            wait_until_unlocked(&volume.path).await;
        }
        options.volumes.retain(|it| it.path != foreign.path);
        assert_eq!(fs::read(&obeyed).unwrap(), written, "it is not its volume");
    }
}

#[tokio::test]
async fn one_bad_volume_does_not_keep_the_others_from_serving() {
    let mut cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    cluster.kill(0).await;
    let mut options = cluster.options(0);
    for (name, content) in [("corrupt", "garbage"), ("foreign", "")] {
        let mut volume = options.volumes[0].clone();
        volume.path = cluster.dir.path().join(name);
        std::fs::create_dir(&volume.path).unwrap();
        let file = if name == "corrupt" {
            "VERSION"
        } else {
            "precious"
        };
        std::fs::write(volume.path.join(file), content).unwrap();
        options.volumes.insert(0, volume);
    }
    cluster.restart(options.clone(), 0).await;
    let errors = cluster.datanodes[0].as_ref().unwrap().volume_errors();
    assert!(matches!(
        errors,
        [
            VolumeError::NotAVolume { .. },
            VolumeError::CorruptVersionFile { .. }
        ]
    ));
    let metrics = cluster.datanodes[0].as_ref().unwrap().metrics_text()();
    for volume in &options.volumes[..2] {
        let line = down(&volume.path);
        assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
    }
    cluster.read(0, 1, (0, 5000)).await.unwrap();
    cluster.kill(0).await;
    options.volumes.pop();
    let error = Datanode::start(options).await.err().unwrap();
    assert!(matches!(error, StartError::NoVolume(_)));
    assert!(error.to_string().contains("not empty"), "{error}");
}
