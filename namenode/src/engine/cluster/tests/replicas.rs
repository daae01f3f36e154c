//! What counts as a replica, and where readers are sent.

use harvestfs_protocol::ids::{BlockId, NodeId, StorageId};
use harvestfs_protocol::node::{BlockReport, IncrementalReport, ReplicaChange, ReplicaReport};

use super::world::{CHUNK, World, options, rules};
use crate::engine::cluster::ClusterError;
use crate::engine::namespace::BlockChange;

fn first_disk(world: &World, node: NodeId) -> StorageId {
    let disks = &world.nodes[node.0 as usize].disks;
    *disks.keys().next().expect("a node has a disk")
}

fn have(world: &mut World, node: NodeId, block: BlockId, length_bytes: u64, sealed: bool) {
    let replica = ReplicaReport {
        block,
        length_bytes,
        sealed,
    };
    let changes = vec![(first_disk(world, node), ReplicaChange::Have(replica))];
    let report = IncrementalReport { changes };
    let taken = world
        .cluster
        .incremental_report(world.now_ms, node, &report);
    assert_eq!(taken, Ok(()));
}

/// A block of five chunks that was sealed before the namenode started.
fn old_block(world: &mut World) -> BlockId {
    let block = BlockId(500);
    world.change(&BlockChange::Allocated {
        block,
        rules: rules(2),
        writer: harvestfs_protocol::ids::SessionId(1),
    });
    let length_bytes = 4 * CHUNK + 100;
    world.change(&BlockChange::Sealed {
        block,
        length_bytes,
    });
    block
}

#[test]
fn a_replica_counts_only_with_all_committed_bytes() {
    let mut world = World::new(4, 2, options(), 1);
    let block = old_block(&mut world);
    assert_eq!(world.cluster.summary(0).lost_blocks, 1);
    have(&mut world, NodeId(0), block, 4 * CHUNK, true);
    assert_eq!(world.cluster.summary(0).lost_blocks, 1);
    assert_eq!(
        world.cluster.replicas(block, None),
        [NodeId(0)],
        "better than nothing"
    );
    have(&mut world, NodeId(1), block, 5 * CHUNK, true);
    assert_eq!(world.cluster.replicas(block, None), [NodeId(1)]);
    assert_eq!(world.cluster.summary(0).lost_blocks, 0);
    have(&mut world, NodeId(2), block, u64::MAX, false);
    assert_eq!(world.cluster.replicas(block, None).len(), 2);
    // Its node lost the end of it in a crash.
    have(&mut world, NodeId(3), block, CHUNK, false);
    assert_eq!(world.cluster.replicas(block, None).len(), 2);
    assert_eq!(world.cluster.summary(0).under_replicated_blocks, 0);
}

#[test]
fn a_pipeline_counts_before_it_reports_and_readers_see_what_is_committed() {
    let mut world = World::new(4, 2, options(), 1);
    let block = world.allocate(rules(3)).expect("room is left");
    let mut pipeline = world.blocks[&block].pipeline.clone();
    pipeline.sort_unstable();
    let listed = |world: &World| {
        let mut listed = world.cluster.replicas(block, None);
        listed.sort_unstable();
        listed
    };
    assert_eq!(listed(&world), pipeline);
    world.change(&BlockChange::Grew {
        block,
        committed_bytes: 10 * CHUNK,
    });
    assert_eq!(listed(&world), pipeline);
    // Reports of what was there earlier don't take it back.
    for node in pipeline.clone() {
        have(&mut world, node, block, CHUNK, false);
    }
    assert_eq!(listed(&world), pipeline);
    // One was left behind when the pipeline broke.
    world
        .cluster
        .sealed_by_client(world.now_ms, block, &pipeline[..2]);
    world.change(&BlockChange::Sealed {
        block,
        length_bytes: 10 * CHUNK,
    });
    assert_eq!(listed(&world), pipeline[..2]);
    have(&mut world, pipeline[0], block, 10 * CHUNK, true);
    have(&mut world, pipeline[2], block, CHUNK, true);
    assert_eq!(listed(&world), pipeline[..2]);
    assert_eq!(world.cluster.summary(0).under_replicated_blocks, 1);
}

/// Otherwise they would count as lost forever, and really be lost when nothing replaces them.
#[test]
fn replicas_that_a_writer_cut_off_from_them_does_not_vouch_for_are_sealed() {
    let mut world = World::new(4, 2, options(), 1);
    for reached in 0..3 {
        let block = world.allocate(rules(3)).expect("room is left");
        world.append(block, 2 * CHUNK);
        world.pass(1_000);
        let pipeline = world.blocks[&block].pipeline.clone();
        world.seal_on(block, &pipeline[..reached]);
        world.pass(30_000);
        assert_eq!(world.cluster.replicas(block, None).len(), 3);
        let summary = world.cluster.summary(world.now_ms);
        assert_eq!(
            (summary.lost_blocks, summary.under_replicated_blocks),
            (0, 0)
        );
        for node in world.blocks[&block].pipeline.clone() {
            let replica = world.nodes[node.0 as usize].replica(block);
            assert!(replica.is_none_or(|it| it.sealed), "{block} on {node}");
        }
    }
    assert_eq!(world.cluster.faults(world.now_ms, 10), []);
}

/// No other server could take a replica, so these would be the ones to be removed to make room for it.
#[test]
fn replicas_that_may_be_complete_make_no_way_for_others() {
    for reached in 0..3 {
        let mut world = World::new(3, 3, options(), 1);
        let block = world.allocate(rules(3)).expect("room is left");
        world.append(block, 2 * CHUNK);
        world.pass(1_000);
        let pipeline = world.blocks[&block].pipeline.clone();
        world.seal_on(block, &pipeline[..reached]);
        for _ in 0..300 {
            world.pass(100);
            for node in &pipeline {
                let replica = world.nodes[node.0 as usize].replica(block);
                assert!(replica.is_some(), "{block} was removed on {node}");
            }
        }
        assert_eq!(world.cluster.replicas(block, None).len(), 3);
    }
}

/// After a change of leader, the writer of a block is not known: a report that the replica lacks committed bytes may
/// be outdated.
#[test]
fn a_replica_that_was_shorter_when_it_was_reported_makes_no_way_for_others() {
    let mut world = World::new(3, 3, options(), 1);
    let block = world.allocate(rules(3)).expect("room is left");
    world.append(block, 2 * CHUNK);
    world.restart_namenode();
    for node in 0..3 {
        world.connect(node);
    }
    world.pass(1_000);
    // It was reported before the last commit; later reports have not arrived yet.
    let late = NodeId(2);
    have(&mut world, late, block, CHUNK, false);
    let pipeline = world.blocks[&block].pipeline.clone();
    world.seal_on(block, &pipeline);
    world.nodes[late.0 as usize].changes.clear();
    for _ in 0..300 {
        world.pass(100);
        let replica = world.nodes[late.0 as usize].replica(block);
        assert!(replica.is_some(), "{block} was removed on {late}");
    }
    assert_eq!(world.cluster.replicas(block, None).len(), 3);
    assert_eq!(world.cluster.fsck(), Default::default());
}

#[test]
fn a_replica_that_its_writer_claims_must_be_reported_in_time() {
    let mut world = World::new(4, 2, options(), 1);
    let block = world.allocate(rules(2)).expect("room is left");
    let pipeline = world.blocks[&block].pipeline.clone();
    world.change(&BlockChange::Sealed {
        block,
        length_bytes: CHUNK,
    });
    world
        .cluster
        .sealed_by_client(world.now_ms, block, &pipeline);
    assert_eq!(world.cluster.replicas(block, None).len(), 2);
    world.pass(2_000);
    assert_eq!(world.cluster.replicas(block, None).len(), 2);
    world.pass(2_500);
    assert_eq!(world.cluster.replicas(block, None), []);
    assert_eq!(world.cluster.summary(world.now_ms).lost_blocks, 1);
    assert!(world.cluster.writing.is_empty());
}

#[test]
fn a_full_inventory_ends_what_a_writer_said_of_a_node() {
    let mut world = World::new(4, 2, options(), 1);
    let fresh = world.allocate(rules(2)).expect("room is left");
    let written = world.allocate(rules(2)).expect("room is left");
    world.append(written, CHUNK);
    let node = world.blocks[&written].pipeline[0];
    let others = world.blocks[&written].pipeline[1];
    for disk in world.nodes[node.0 as usize].disks.values_mut() {
        disk.clear();
    }
    let listed = world.cluster.replicas(fresh, None);
    world.connect(node.0 as usize);
    world.drain(node.0 as usize);
    assert_eq!(world.cluster.replicas(written, None), [others]);
    let after = world.cluster.replicas(fresh, None);
    assert_eq!(after, listed, "no client has begun to write it");
}

#[test]
fn near_replicas_come_first() {
    let mut world = World::new(6, 3, options(), 1);
    let block = old_block(&mut world);
    for node in [0, 1, 2, 4] {
        have(&mut world, NodeId(node), block, 5 * CHUNK, true);
    }
    let listed = |world: &World, reader: usize| {
        world
            .cluster
            .replicas(block, Some(world.server(reader).data_addr.ip()))
    };
    assert_eq!(listed(&world, 2)[0], NodeId(2), "its own");
    assert_eq!(listed(&world, 5)[0], NodeId(2), "the one in its rack");
    assert_eq!(listed(&world, 4)[..2], [NodeId(4), NodeId(1)]);
    world.nodes[4].busy = true;
    world.heartbeat(4, false);
    assert_eq!(listed(&world, 4)[3], NodeId(4), "it would refuse");
    world
        .cluster
        .report_bad_replica(world.now_ms, block, NodeId(1), false);
    assert_eq!(listed(&world, 4)[2..], [NodeId(1), NodeId(4)]);
}

#[test]
fn a_full_report_replaces_what_was_known() {
    let mut world = World::new(3, 3, options(), 1);
    let block = old_block(&mut world);
    let storage = first_disk(&world, NodeId(0));
    have(&mut world, NodeId(0), block, 5 * CHUNK, true);
    let report = |world: &mut World, part, last, replicas: &[ReplicaReport]| {
        let report = BlockReport {
            storage,
            part,
            last,
            replicas: replicas.to_vec(),
        };
        world.cluster.block_report(world.now_ms, NodeId(0), &report)
    };
    let replica = ReplicaReport {
        block,
        length_bytes: 5 * CHUNK,
        sealed: true,
    };
    assert_eq!(report(&mut world, 0, false, &[]), Ok(()));
    assert_eq!(
        world.cluster.replicas(block, None).len(),
        1,
        "not before the last part"
    );
    assert_eq!(
        report(&mut world, 2, true, &[]),
        Err(ClusterError::ReportOutOfOrder {
            expected: 1,
            got: 2
        })
    );
    // What is reported meanwhile stays.
    have(&mut world, NodeId(0), block, 5 * CHUNK, true);
    assert_eq!(report(&mut world, 1, true, &[]), Ok(()));
    assert_eq!(world.cluster.replicas(block, None).len(), 1);
    for _ in 0..300 {
        assert_eq!(report(&mut world, 0, true, &[replica]), Ok(()));
        assert_eq!(world.cluster.replicas(block, None).len(), 1);
    }
    assert_eq!(report(&mut world, 0, true, &[]), Ok(()));
    assert_eq!(world.cluster.replicas(block, None), []);
}

#[test]
fn a_replica_that_moved_to_another_volume_is_one_replica() {
    let mut world = World::new(2, 2, options(), 1);
    let block = old_block(&mut world);
    for storage in world.nodes[1].disks.keys() {
        let replica = ReplicaReport {
            block,
            length_bytes: 5 * CHUNK,
            sealed: true,
        };
        let report = IncrementalReport {
            changes: vec![(*storage, ReplicaChange::Have(replica))],
        };
        let taken = world.cluster.incremental_report(0, NodeId(1), &report);
        assert_eq!(taken, Ok(()));
    }
    assert_eq!(world.cluster.replicas(block, None), [NodeId(1)]);
    assert_eq!(world.cluster.summary(0).under_replicated_blocks, 1);
    world.cluster.table.check();
}

#[test]
fn strangers_are_refused() {
    let mut world = World::new(2, 2, options(), 1);
    let (stranger, storage) = (NodeId(77), StorageId(999));
    let report = BlockReport {
        storage,
        part: 0,
        last: true,
        replicas: Vec::new(),
    };
    assert_eq!(
        world.cluster.block_report(0, stranger, &report),
        Err(ClusterError::NotRegistered(stranger))
    );
    assert_eq!(
        world.cluster.block_report(0, NodeId(0), &report),
        Err(ClusterError::UnknownStorage(storage))
    );
    let changes = vec![(storage, ReplicaChange::Deleted(BlockId(1)))];
    assert_eq!(
        world
            .cluster
            .incremental_report(0, NodeId(0), &IncrementalReport { changes }),
        Err(ClusterError::UnknownStorage(storage))
    );
    // What is not known is no reason to fail.
    world.cluster.disconnected(0, stranger);
    world.cluster.set_pipeline(BlockId(404), &[stranger]);
    world.cluster.sealed_by_client(0, BlockId(404), &[stranger]);
    world
        .cluster
        .report_bad_replica(0, BlockId(404), stranger, true);
    world.change(&BlockChange::Freed {
        block: BlockId(404),
    });
    assert_eq!(world.cluster.replicas(BlockId(404), None), []);
    assert_eq!(world.cluster.node_info(stranger), None);
}

#[test]
fn nodes_and_summary_tell_what_is_there() {
    let mut world = World::new(4, 2, options(), 1);
    for _ in 0..5 {
        world.write(2);
    }
    world.pass(300);
    world.stop(3);
    world.pass(1_000);
    let nodes = world.cluster.nodes(world.now_ms);
    assert_eq!(nodes.iter().map(|n| n.replicas).sum::<u64>(), 10);
    assert!(nodes.iter().all(|n| n.alive));
    assert!(nodes[3].heartbeat_age_ms > Some(900) && nodes[0].heartbeat_age_ms < Some(400));
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!((summary.nodes_known, summary.blocks), (4, 5));
    assert!(summary.quota_bytes > summary.used_bytes && summary.used_bytes > 0);
    let info = world.cluster.node_info(NodeId(2)).expect("it is known");
    assert_eq!(
        (info.name.as_str(), info.rack.as_str()),
        ("server-2", "rack-0")
    );
}

/// A client may say anything of the nodes that hold what it wrote.
#[test]
fn a_node_that_is_named_twice_is_awaited_once() {
    let mut world = World::new(3, 3, options(), 1);
    let block = world.allocate(rules(2)).expect("room is left");
    world.append(block, 3 * CHUNK);
    world.restart_namenode();
    world
        .cluster
        .sealed_by_client(world.now_ms, block, &[NodeId(1), NodeId(1)]);
    assert_eq!(world.cluster.nodes[1].awaited, 1);
    world.free(block);
    assert_eq!(world.cluster.nodes[1].awaited, 0);
}

/// A follower receives reports of replicas before it learns of their block, and gives no commands.
#[test]
fn a_namenode_that_follows_keeps_no_list_of_what_another_one_does() {
    let mut world = World::new(4, 2, options(), 1);
    world.cluster.set_recovering(true);
    let block = BlockId(world.next_block);
    world.put(0, block, CHUNK, true);
    world.pass(300);
    let listed = |world: &World| world.cluster.quarantined(world.now_ms, BlockId(0), 10);
    assert_eq!(listed(&world).len(), 1);
    assert_eq!(world.allocate(rules(2)), Some(block));
    assert_eq!(listed(&world), []);
    world.nodes[0].remove(block);
    world.append(block, CHUNK);
    world.end_writer(block);
    world.pass(3_000);
    assert!(world.cluster.nodes.iter().all(|node| node.seal.is_empty()));
    // The open replica is not forgotten for that reason.
    world.cluster.set_recovering(false);
    world.pass(3_000);
    let mut replicas = world.nodes.iter().filter_map(|node| node.replica(block));
    assert!(replicas.all(|replica| replica.sealed));
}
