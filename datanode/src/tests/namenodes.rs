//! The datanode with several namenodes, one of which leads.

use std::time::Duration;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::{BlockId, ClusterId, NodeId};
use harvestfs_protocol::node::NodeCommand;
use harvestfs_protocol::token::{Right, TokenKey};

use crate::Datanode;
use crate::options::DatanodeOptions;
use crate::testing::cluster::{TestCluster, data};
use crate::testing::fake_namenode::{FakeNamenode, State, VALIDITY};

/// Bytes of each replica.
const REPLICA_BYTES: usize = 100_000;

/// One datanode, a leader in epoch 5, and two standbys.
async fn start() -> TestCluster {
    start_with(|_| {}).await
}

async fn start_with(change: impl FnOnce(&mut DatanodeOptions)) -> TestCluster {
    let mut cluster = TestCluster::without_datanodes(2);
    cluster.namenode.lead(5);
    let mut options = cluster.options(0);
    change(&mut options);
    let datanode = Datanode::start(options).await.unwrap();
    datanode.registered().await;
    cluster.nodes.push(cluster.namenode.node("dn1").await);
    for standby in &cluster.standbys {
        standby.node("dn1").await;
    }
    cluster.datanodes.push(Some(datanode));
    cluster
}

async fn write(cluster: &TestCluster, block: u64) {
    let data = data(block, REPLICA_BYTES);
    cluster.write_block(&cluster.nodes, block, &data).await;
}

/// Waits until a namenode knows, or does not know, that a block is sealed on the only datanode.
async fn wait_for_block(namenode: &FakeNamenode, block: u64, is_there: bool) {
    namenode
        .wait_for(|state| {
            let replicas = state.replicas.values().next()?;
            let replica = replicas.get(&BlockId(block));
            (replica.is_some_and(|(_, it)| it.sealed) == is_there).then_some(())
        })
        .await;
}

/// Sends the command with the datanode's next regular heartbeat.
fn have_deleted(namenode: &FakeNamenode, node: NodeId, blocks: impl Iterator<Item = u64>) {
    let blocks = blocks.map(BlockId).collect();
    let delete = NodeCommand::Delete { blocks };
    let mut state = namenode.lock();
    state.commands.entry(node).or_default().push(delete);
}

async fn read_with(cluster: &TestCluster, namenode: &FakeNamenode) -> Result<(), DataError> {
    let token = namenode.token(BlockId(1), Right::Read);
    let read = cluster
        .client
        .read(&cluster.nodes[0], BlockId(1), token, (0, 1));
    read.await.map(drop)
}

#[tokio::test]
async fn one_that_begins_to_lead_knows_what_is_here_and_is_obeyed() {
    let mut cluster = start().await;
    let node = cluster.nodes[0].node;
    for block in 1..=2 {
        write(&cluster, block).await;
    }
    for namenode in cluster.standbys.iter().chain([&cluster.namenode]) {
        wait_for_block(namenode, 1, true).await;
        wait_for_block(namenode, 2, true).await;
    }
    // A standby's commands have no effect.
    have_deleted(&cluster.standbys[0], node, 1..=2);
    cluster.standbys[0].wait_for_heartbeats().await;
    assert_eq!(cluster.standbys[0].lock().commands.len(), 0);
    for block in 1..=2 {
        cluster.read(0, block, (0, 1)).await.unwrap();
    }

    // The leader stops, and another namenode becomes leader.
    let old_addr = cluster.namenode.addr;
    let leader = cluster.standbys.remove(0);
    std::mem::replace(&mut cluster.namenode, leader)
        .stop()
        .await;
    cluster.namenode.lead(6);
    have_deleted(&cluster.namenode, node, 1..=1);
    for namenode in [&cluster.namenode, &cluster.standbys[0]] {
        wait_for_block(namenode, 1, false).await;
        wait_for_block(namenode, 2, true).await;
        let state = namenode.lock();
        assert_eq!(state.registered.len(), 1, "it has not registered again");
        assert_eq!(
            state.full_reports[&node], 1,
            "nothing is reported again in full"
        );
    }

    // The old leader returns, and does not know that it no longer leads.
    let old = FakeNamenode::start(&cluster.authority, old_addr);
    old.lead(5);
    have_deleted(&old, node, 2..=2);
    old.wait_for(|state| (state.registered.len() >= 3).then_some(()))
        .await;
    assert_eq!(old.lock().heartbeats.len(), 0, "it is not spoken to");
    let obeyed = old.lock().registered[0].obeyed.unwrap();
    assert_eq!(obeyed.epoch.number, 6);
    // Once it does, everything is reported to it, as to any standby.
    old.stand_by();
    wait_for_block(&old, 2, true).await;
    old.wait_for_heartbeats().await;
    cluster.read(0, 2, (0, 1)).await.unwrap();
    wait_for_block(&cluster.namenode, 2, true).await;
}

#[tokio::test]
async fn tokens_of_each_are_accepted_until_it_replaces_its_keys() {
    let mut cluster = start().await;
    write(&cluster, 1).await;
    for namenode in cluster.standbys.iter().chain([&cluster.namenode]) {
        assert_eq!(read_with(&cluster, namenode).await, Ok(()));
    }
    let forged = TokenKey {
        key_id: 1,
        secret: [99; 32],
    };
    let block = BlockId(1);
    let token = (cluster.namenode).token_of(&forged, block, Right::Read, VALIDITY);
    let node = &cluster.nodes[0];
    let read = cluster.client.read(node, block, token, (0, 1)).await;
    assert!(matches!(read, Err(DataError::BadToken(_))), "{read:?}");
    // New keys of one namenode replace its old ones, and those of no other namenode.
    let [one, two] = &cluster.standbys[..] else {
        panic!("two stand by");
    };
    one.lock().new_keys = Some(vec![TokenKey {
        key_id: 2,
        secret: [98; 32],
    }]);
    one.wait_for_heartbeats().await;
    let read = read_with(&cluster, one).await;
    assert!(matches!(read, Err(DataError::BadToken(_))), "{read:?}");
    assert_eq!(read_with(&cluster, two).await, Ok(()));
    assert_eq!(cluster.read(0, 1, (0, 1)).await.map(drop), Ok(()));
    // After a failover, tokens signed by the old leader are still valid.
    let token = cluster.namenode.token(block, Right::Read);
    let leader = cluster.standbys.remove(1);
    std::mem::replace(&mut cluster.namenode, leader)
        .stop()
        .await;
    cluster.namenode.lead(6);
    cluster.namenode.wait_for_heartbeats().await;
    let read = cluster.client.read(&cluster.nodes[0], block, token, (0, 1));
    read.await.unwrap();
}

#[tokio::test]
async fn what_was_commanded_is_dropped_when_another_one_leads_and_not_when_one_stands_by() {
    const REPLICAS: u64 = 20;
    let cluster = start_with(|options| {
        options.removal_bytes_per_second = REPLICA_BYTES as u64;
    })
    .await;
    let node = cluster.nodes[0].node;
    for block in 1..=REPLICAS {
        write(&cluster, block).await;
    }
    let [next, other] = &cluster.standbys[..] else {
        panic!("two stand by");
    };
    let left = async |expected: u64| {
        let look = |state: &mut State| {
            let left = state.replicas[&node].len() as u64;
            (left <= expected).then_some(left)
        };
        next.wait_for(look).await
    };
    wait_for_block(next, REPLICAS, true).await;
    have_deleted(&cluster.namenode, node, 1..=REPLICAS);
    left(REPLICAS - 1).await;
    other.disconnect();
    other
        .wait_for(|state| (state.registered.len() >= 2).then_some(()))
        .await;
    let before = left(REPLICAS).await;
    left(before - 2).await;

    next.lead(6);
    next.wait_for_heartbeats().await;
    // Commands that were started are completed, and reported.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let rest = left(REPLICAS).await;
    assert!(rest > 2, "all is deleted before the other one leads");
    next.wait_for_heartbeats().await;
    assert_eq!(left(REPLICAS).await, rest);
    // The new one may command the same.
    have_deleted(next, node, REPLICAS..=REPLICAS);
    left(rest - 1).await;
    wait_for_block(next, REPLICAS, false).await;
}

#[tokio::test]
async fn it_is_registered_once_the_one_that_leads_knows_it() {
    let mut cluster = TestCluster::without_datanodes(2);
    cluster.namenode.stand_by();
    cluster.standbys[1].lock().knows_no_server = true;
    let datanode = Datanode::start(cluster.options(0)).await.unwrap();
    cluster.nodes.push(cluster.standbys[0].node("dn1").await);
    cluster.namenode.node("dn1").await;
    let registered = datanode.registered();
    let waited = tokio::time::timeout(Duration::from_millis(100), registered).await;
    assert!(waited.is_err(), "none of them leads");
    // Tokens of a standby that knows the server are accepted, and tokens of another one may turn out to be valid.
    let read = read_with(&cluster, &cluster.standbys[0]).await;
    assert_eq!(read, Err(DataError::NoSuchReplica));
    let read = read_with(&cluster, &cluster.standbys[1]).await;
    assert!(matches!(read, Err(DataError::Busy { .. })), "{read:?}");
    assert!(datanode.metrics_text()().contains("harvestfs_datanode_registered 0"));

    cluster.namenode.lead(1);
    datanode.registered().await;
    let read = read_with(&cluster, &cluster.standbys[1]).await;
    assert!(matches!(read, Err(DataError::BadToken(_))), "{read:?}");
    // A namenode that learns of the server late is asked again and again.
    let attempts = |state: &mut State| (state.registered.len() >= 4).then_some(());
    cluster.standbys[1].wait_for(attempts).await;
    cluster.standbys[1].lock().knows_no_server = false;
    cluster.standbys[1].node("dn1").await;
    let read = read_with(&cluster, &cluster.standbys[1]).await;
    assert_eq!(read, Err(DataError::NoSuchReplica));
}

#[tokio::test]
async fn one_of_another_cluster_is_not_obeyed_whatever_its_epoch() {
    let cluster = start().await;
    write(&cluster, 1).await;
    let [_, stranger] = &cluster.standbys[..] else {
        panic!("two stand by");
    };
    stranger.lock().cluster = Some(ClusterId(0xbad));
    stranger.lead(9);
    stranger.disconnect();
    stranger
        .wait_for(|state| (state.registered.len() >= 3).then_some(()))
        .await;
    assert_eq!(cluster.read(0, 1, (0, 1)).await.map(drop), Ok(()));
    // The leader still does.
    have_deleted(&cluster.namenode, cluster.nodes[0].node, 1..=1);
    wait_for_block(&cluster.namenode, 1, false).await;
}

/// Reports these namenodes to the datanode with its next heartbeat.
fn name(by: &FakeNamenode, node: NodeId, all: &[&FakeNamenode]) {
    let named = NodeCommand::Namenodes {
        this: by.addr,
        all: all.iter().map(|it| it.addr).collect(),
    };
    by.lock().commands.entry(node).or_default().push(named);
}

#[tokio::test]
async fn it_goes_on_with_those_that_replace_all_that_its_configuration_names() {
    let mut cluster = TestCluster::without_datanodes(2);
    cluster.namenode.lead(5);
    let mut options = cluster.options(0);
    options.namenodes.truncate(1);
    let datanode = Datanode::start(options).await.unwrap();
    cluster.nodes.push(cluster.namenode.node("dn1").await);
    let node = cluster.nodes[0].node;
    write(&cluster, 1).await;
    let [one, two] = &cluster.standbys[..] else {
        panic!("two stand by");
    };
    name(&cluster.namenode, node, &[&cluster.namenode, one, two]);
    for namenode in [one, two] {
        wait_for_block(namenode, 1, true).await;
    }

    // One of the new ones leads, and the one of the configuration has left.
    let leader = cluster.standbys.remove(0);
    let left = std::mem::replace(&mut cluster.namenode, leader);
    left.stop().await;
    let other = &cluster.standbys[0];
    cluster.namenode.lead(6);
    name(&cluster.namenode, node, &[&cluster.namenode, other]);
    cluster.namenode.wait_for_heartbeats().await;
    write(&cluster, 2).await;
    for namenode in [&cluster.namenode, other] {
        wait_for_block(namenode, 2, true).await;
    }

    // Nothing more is reported to a namenode that leaves, and tokens that it signs are not accepted.
    assert_eq!(read_with(&cluster, other).await, Ok(()));
    name(&cluster.namenode, node, &[&cluster.namenode]);
    cluster.namenode.wait_for_heartbeats().await;
    let heard = other.lock().heartbeats.len();
    let read = read_with(&cluster, other).await;
    assert!(matches!(read, Err(DataError::BadToken(_))), "{read:?}");
    write(&cluster, 3).await;
    wait_for_block(&cluster.namenode, 3, true).await;
    cluster.namenode.wait_for_heartbeats().await;
    assert_eq!(other.lock().heartbeats.len(), heard);
    // It comes back.
    name(&cluster.namenode, node, &[&cluster.namenode, other]);
    wait_for_block(other, 3, true).await;
    assert_eq!(read_with(&cluster, other).await, Ok(()));
    datanode.shutdown().await;
}
