//! What is repaired, in which order and how fast.

use std::collections::BTreeMap;

use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::node::{NodeCommand, ReplicaChange};

use super::world::{CHUNK, World, options, rules};
use crate::engine::cluster::{ClusterOptions, FaultReason};

/// The blocks that the heartbeat of each node brings a command to copy, and the targets.
fn commanded(world: &mut World) -> BTreeMap<BlockId, NodeId> {
    let mut commanded = BTreeMap::new();
    for node in 0..world.nodes.len() {
        world.heartbeat(node, true);
        for command in &world.nodes[node].commands {
            if let NodeCommand::Replicate { block, .. } = command {
                commanded.insert(*block, NodeId(node as u32));
            }
        }
    }
    commanded
}

fn lose_node(world: &mut World, node: usize) {
    world.reimage_all(node);
    world.connect(node);
    world.drain(node);
}

#[test]
fn the_fewest_survivors_come_first() {
    let one_at_a_time = ClusterOptions {
        repairs_in_flight_per_node: 1,
        ..options()
    };
    let mut world = World::new(4, 4, one_at_a_time, 1);
    // Node 0 is the only source of everything, and serves one repair at a time.
    let mut blocks = BTreeMap::new();
    for replication in [4, 4, 2, 4, 2, 3, 3, 2] {
        let block = world.allocate(rules(replication)).expect("room is left");
        let pipeline: Vec<NodeId> = (0..replication).map(|n| NodeId(n.into())).collect();
        world.cluster.set_pipeline(block, &pipeline);
        world.blocks.get_mut(&block).expect("just made").pipeline = pipeline;
        world.append(block, CHUNK);
        world.seal_by_writer(block);
        blocks.insert(block, replication);
    }
    world.pass(600);
    lose_node(&mut world, 1);
    // Blocks of 2 have one survivor, blocks of 3 two, blocks of 4 three.
    let mut order = Vec::new();
    for _ in 0..60 {
        world.cluster.tick(world.now_ms, &mut world.rng);
        let started: Vec<BlockId> = commanded(&mut world).into_keys().collect();
        order.extend(started.iter().map(|block| blocks[block]));
        for node in 0..4 {
            world.drain(node);
        }
        world.now_ms += 100;
    }
    assert_eq!(order.len(), 8);
    let last_of_2 = order.iter().rposition(|r| *r == 2);
    let first_of_4 = order.iter().position(|r| *r == 4);
    assert!(last_of_2 < first_of_4, "{order:?}");
}

#[test]
fn budgets_hold_on_both_sides() {
    let mut world = World::new(6, 3, options(), 1);
    for _ in 0..500 {
        world.write(3);
    }
    world.pass(300);
    let start_ms = world.now_ms;
    lose_node(&mut world, 0);
    world.pass(100_000);
    let count = |commanded: &[(u64, NodeId, NodeId)]| {
        let mut counts: BTreeMap<(bool, NodeId), u32> = BTreeMap::new();
        for (_, source, target) in commanded {
            *counts.entry((false, *source)).or_default() += 1;
            *counts.entry((true, *target)).or_default() += 1;
        }
        counts
    };
    // Two survivors each: the normal lane.
    let limit = world.options.repairs_per_window;
    let counts = count(&world.commanded);
    assert!(counts.values().all(|n| *n <= limit), "{counts:?}");
    assert!(counts.values().any(|n| *n == limit), "{counts:?}");
    assert!(world.cluster.summary(world.now_ms).repairs_waiting > 0);
    world.pass(3 * world.options.repair_window_ms);
    assert_eq!(world.cluster.fsck().missing_replicas, 0);
    for (at, ..) in world.commanded.clone() {
        let end_ms = at + world.options.repair_window_ms;
        let window = world
            .commanded
            .iter()
            .filter(|(t, ..)| (at..end_ms).contains(t));
        let window: Vec<_> = window.copied().collect();
        // Commanded up to a heartbeat later than charged: one more may show.
        assert!(count(&window).values().all(|n| *n <= limit + 1));
    }
    assert!(world.now_ms > start_ms);
}

#[test]
fn the_last_replica_is_copied_in_the_urgent_lane() {
    let mut world = World::new(4, 2, options(), 1);
    let blocks: Vec<_> = (0..120).map(|_| world.write(2)).collect();
    world.pass(300);
    lose_node(&mut world, 0);
    let affected = blocks
        .iter()
        .filter(|b| world.holders(**b).len() == 1)
        .count();
    world.pass(60_000);
    assert!(blocks.iter().all(|block| world.holders(*block).len() == 2));
    let per_source = affected as u32 / 3;
    assert!(
        per_source > world.options.repairs_per_window / 2,
        "the test repairs much"
    );
    assert_eq!(world.commanded.len(), affected);
}

#[test]
fn few_repairs_at_a_time() {
    let mut world = World::new(5, 5, options(), 1);
    for _ in 0..60 {
        world.write(2);
    }
    world.pass(300);
    lose_node(&mut world, 0);
    for _ in 0..10 {
        world.cluster.tick(world.now_ms, &mut world.rng);
    }
    commanded(&mut world);
    let (mut sent, mut received) = (BTreeMap::new(), BTreeMap::new());
    for (_, source, target) in &world.commanded {
        *sent.entry(*source).or_insert(0) += 1;
        *received.entry(*target).or_insert(0) += 1;
    }
    assert!(!sent.is_empty());
    assert!(sent.values().chain(received.values()).all(|n| *n <= 2));
}

#[test]
fn a_repair_that_fails_or_hangs_is_tried_elsewhere() {
    for fails in [true, false] {
        let mut world = World::new(5, 5, options(), 1);
        let block = world.write(2);
        world.pass(300);
        let lost = world.cluster.replicas(block, None)[0];
        lose_node(&mut world, lost.0 as usize);
        world.cluster.tick(world.now_ms, &mut world.rng);
        let first = commanded(&mut world)[&block];
        let target = first.0 as usize;
        world.nodes[target].commands.clear();
        if fails {
            let storage = *world.nodes[target].disks.keys().next().expect("a disk");
            let change = (storage, ReplicaChange::RepairFailed(block));
            world.nodes[target].changes.push_back(change);
            world.send_changes(target);
        }
        let wait_ms = if fails { 600 } else { 6_500 };
        for _ in 0..wait_ms / 100 {
            world.now_ms += 100;
            world.cluster.tick(world.now_ms, &mut world.rng);
            for node in 0..5 {
                world.heartbeat(node, false);
            }
        }
        assert_eq!(world.cluster.summary(world.now_ms).repairs_failed, 1);
        assert_eq!(world.commanded.len(), 2);
        assert_ne!(world.commanded[1].2, first);
    }
}

#[test]
fn the_only_possible_target_is_tried_again() {
    let mut world = World::new(2, 2, options(), 1);
    let block = world.write(2);
    world.pass(300);
    lose_node(&mut world, 1);
    world.cluster.tick(world.now_ms, &mut world.rng);
    assert_eq!(commanded(&mut world)[&block], NodeId(1));
    world.nodes[1].commands.clear();
    let storage = *world.nodes[1].disks.keys().next().expect("a disk");
    let change = (storage, ReplicaChange::RepairFailed(block));
    world.nodes[1].changes.push_back(change);
    world.send_changes(1);
    assert_eq!(world.cluster.summary(world.now_ms).repairs_failed, 1);
    world.pass(5_000);
    assert_eq!(world.holders(block).len(), 2);
}

#[test]
fn a_target_that_registers_anew_is_not_waited_for() {
    let mut world = World::new(5, 5, options(), 1);
    let block = world.write(2);
    world.pass(300);
    let lost = world.cluster.replicas(block, None)[0];
    lose_node(&mut world, lost.0 as usize);
    world.cluster.tick(world.now_ms, &mut world.rng);
    let target = commanded(&mut world)[&block].0 as usize;
    world.nodes[target].commands.clear();
    world.connect(target);
    assert_eq!(world.cluster.summary(world.now_ms).repairs_under_way, 0);
    world.drain(target);
    world.pass(1_000);
    assert_eq!(world.holders(block).len(), 2);
}

#[test]
fn the_wait_between_attempts_doubles() {
    let mut world = World::new(5, 5, options(), 1);
    let block = world.write(2);
    world.pass(300);
    let lost = world.cluster.replicas(block, None)[0];
    lose_node(&mut world, lost.0 as usize);
    // Every target drops its commands and says that they failed.
    let mut times_ms = Vec::new();
    for _ in 0..200 {
        world.now_ms += 100;
        world.cluster.tick(world.now_ms, &mut world.rng);
        for (block, target) in commanded(&mut world) {
            times_ms.push(world.now_ms);
            let target = target.0 as usize;
            world.nodes[target].commands.clear();
            let storage = *world.nodes[target].disks.keys().next().expect("a disk");
            let change = (storage, ReplicaChange::RepairFailed(block));
            world.nodes[target].changes.push_back(change);
            world.send_changes(target);
        }
    }
    let waits_ms: Vec<u64> = times_ms.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(waits_ms, [500, 1_000, 2_000, 4_000, 8_000]);
}

#[test]
fn an_open_block_is_repaired_only_once_it_is_sealed() {
    let mut world = World::new(5, 5, options(), 1);
    let block = world.allocate(rules(3)).expect("room is left");
    world.append(block, CHUNK);
    world.pass(300);
    let lost = world.blocks[&block].pipeline[1];
    lose_node(&mut world, lost.0 as usize);
    world.pass(5_000);
    assert_eq!(world.commanded, []);
    assert_eq!(world.cluster.fsck().missing_replicas, 0);
    // The writer notices, and continues with the nodes that are left.
    world.append(block, CHUNK);
    assert!(world.blocks[&block].sealed);
    world.pass(1_000);
    assert_eq!(world.commanded.len(), 1);
    assert_eq!(world.holders(block).len(), 3);
}

/// As when a mount is killed after datanodes have sealed the block and before it reports this to the namenode, or
/// while it writes: until its session ends, nothing is repaired, however long that takes; so it has to be visible
/// that one replica is left.
#[test]
fn an_open_block_with_one_replica_left_is_exposed_until_its_writer_ends() {
    for sealed_on_disk in [true, false] {
        let mut world = World::new(6, 6, options(), 1);
        let exposed = |world: &World| world.cluster.exposed().collect::<Vec<BlockId>>();
        let block = world.allocate(rules(3)).expect("room is left");
        world.append(block, CHUNK);
        let pipeline = world.blocks[&block].pipeline.clone();
        if sealed_on_disk {
            for node in &pipeline[..2] {
                world.put(node.0 as usize, block, CHUNK, true);
            }
        }
        world.pass(300);
        // The replica of the third node is lost before it is sealed; then that of another node.
        lose_node(&mut world, pipeline[2].0 as usize);
        world.pass(1_000);
        assert_eq!(exposed(&world), [], "two are left");
        // A restart of the namenode changes nothing.
        world.restart_namenode();
        assert_eq!(exposed(&world), [], "nothing is known yet");
        for node in 0..world.nodes.len() {
            world.connect(node);
            world.drain(node);
        }
        world.pass(1_000);
        assert_eq!(exposed(&world), [], "two are left");
        lose_node(&mut world, pipeline[1].0 as usize);
        world.pass(30_000);
        assert_eq!(world.holders(block).len(), 1, "it is not sealed");
        assert_eq!(
            world.cluster.summary(world.now_ms).under_replicated_blocks,
            0
        );
        assert_eq!(exposed(&world), [block]);
        world.end_writer(block);
        assert_eq!(exposed(&world), []);
        world.pass(3_000);
        assert_eq!(world.holders(block).len(), 3);
        assert_eq!(
            world.cluster.summary(world.now_ms).under_replicated_blocks,
            0
        );
    }
}

#[test]
fn what_is_to_have_one_replica_and_what_is_freed_is_not_exposed() {
    let mut world = World::new(4, 4, options(), 1);
    let single = world.allocate(rules(1)).expect("room is left");
    world.append(single, CHUNK);
    let freed = world.allocate(rules(2)).expect("room is left");
    world.append(freed, CHUNK);
    world.pass(300);
    let mut pipeline = world.blocks[&freed].pipeline.clone();
    pipeline.retain(|node| !world.blocks[&single].pipeline.contains(node));
    lose_node(&mut world, pipeline[0].0 as usize);
    world.pass(1_000);
    assert_eq!(world.cluster.exposed().collect::<Vec<_>>(), [freed]);
    world.free(freed);
    assert_eq!(world.cluster.exposed().count(), 0);
}

#[test]
fn a_bad_replica_makes_way_when_no_other_server_is_left() {
    let mut world = World::new(3, 3, options(), 1);
    let block = world.write(3);
    world.pass(300);
    let disk = world.nodes[1]
        .disks
        .values_mut()
        .find(|d| d.contains_key(&block));
    disk.and_then(|disk| disk.get_mut(&block))
        .expect("on all three")
        .corrupt = true;
    world
        .cluster
        .report_bad_replica(world.now_ms, block, NodeId(1), true);
    assert_eq!(
        world.cluster.replicas(block, None).len(),
        3,
        "a client alone says so"
    );
    world.pass(5_000);
    assert_eq!(world.holders(block).len(), 3);
}

/// A client that says of every replica that it is bad, and of every datanode that it does not answer,
/// again and again, makes the datanodes read a little, and nothing else.
#[test]
fn a_client_that_calls_everything_bad_has_nothing_removed_or_repaired() {
    let mut world = World::new(4, 4, options(), 1);
    for _ in 0..100 {
        world.write(2);
    }
    world.pass(300);
    let blocks: Vec<BlockId> = world.blocks.keys().copied().collect();
    let holders =
        |world: &World| -> Vec<_> { blocks.iter().map(|&it| world.holders(it)).collect() };
    let before = holders(&world);
    let started_ms = world.now_ms;
    while world.now_ms < started_ms + 11 * 60 * 1000 {
        for &block in &blocks {
            for node in 0..4 {
                for corrupt in [true, false] {
                    let now_ms = world.now_ms;
                    (world.cluster).report_bad_replica(now_ms, block, NodeId(node), corrupt);
                }
            }
            assert_eq!(world.cluster.replicas(block, None).len(), 2);
        }
        world.pass(5_000);
    }
    assert_eq!(holders(&world), before);
    assert_eq!(world.commanded, []);
    assert_eq!(world.cluster.fsck(), Default::default());
    // All are asked for what fits into one interval, and then into the next.
    assert!(world.verifications.len() <= 2 * 4 * 32);
    let mut last = BTreeMap::new();
    for &(at_ms, node, block) in &world.verifications {
        let before = last.insert((node, block), at_ms);
        assert!(before.is_none_or(|before| at_ms >= before + 10 * 60 * 1000 - 5_000));
    }
    assert!(last.len() >= 4 * 32, "{} are verified", last.len());
}

#[test]
fn repair_can_be_delayed() {
    let delayed = ClusterOptions {
        repair_delay_ms: 4_000,
        ..options()
    };
    let mut world = World::new(5, 5, delayed, 1);
    let block = world.write(2);
    world.pass(300);
    let lost = world.cluster.replicas(block, None)[0];
    lose_node(&mut world, lost.0 as usize);
    world.pass(3_000);
    assert_eq!(world.commanded, []);
    world.pass(2_000);
    assert_eq!(world.commanded.len(), 1);
}

#[test]
fn every_fault_has_its_reason() {
    let mut world = World::new(3, 3, options(), 1);
    let blocks: Vec<_> = (0..300).map(|_| world.write(2)).collect();
    world.pass(300);
    assert_eq!(world.cluster.faults(world.now_ms, 1_000), []);
    lose_node(&mut world, 0);
    // Until it has reported what it has, nothing is copied.
    world.pass(300);
    let faults = world.cluster.faults(world.now_ms, 1_000);
    let missing = world.cluster.fsck().missing_replicas;
    assert_eq!(faults.len() as u64, missing);
    assert!(!faults.is_empty(), "more than the budget lets be repaired");
    for fault in &faults {
        assert_eq!((fault.replicas, fault.wanted), (1, 2));
        let reasons = [FaultReason::Queued, FaultReason::UnderWay];
        assert!(reasons.contains(&fault.reason), "{fault:?}");
    }
    assert_eq!(world.cluster.faults(world.now_ms, 3).len(), 3);
    // What was only on the other two is lost with them.
    for node in [1, 2] {
        world.reimage_all(node);
        world.connect(node);
        world.drain(node);
    }
    let lost = world.cluster.fsck().lost_blocks;
    let faults = world.cluster.faults(world.now_ms, blocks.len());
    let without_replica = faults
        .iter()
        .filter(|fault| fault.reason == FaultReason::NoReplica);
    assert_eq!(without_replica.count() as u64, lost);
    assert!(lost > 0);
}

/// Why each block that lacks a replica is not repaired yet.
fn reasons(world: &World) -> Vec<FaultReason> {
    let faults = world.cluster.faults(world.now_ms, 1_000);
    faults.iter().map(|fault| fault.reason).collect()
}

#[test]
fn what_waits_for_servers_or_budgets_says_so() {
    let options = ClusterOptions {
        repairs_per_window: 1,
        urgent_repairs_per_window: 1,
        ..options()
    };
    let mut world = World::new(4, 4, options, 1);
    for _ in 0..40 {
        world.write(2);
    }
    world.pass(300);
    for node in 0..4 {
        world.nodes[node].busy = true;
        world.heartbeat(node, true);
    }
    lose_node(&mut world, 0);
    world.pass(300);
    let waiting = reasons(&world);
    assert!(!waiting.is_empty(), "the test loses something");
    assert_eq!(waiting, vec![FaultReason::NoSource; waiting.len()]);

    for node in 0..4 {
        world.nodes[node].busy = false;
        world.heartbeat(node, true);
    }
    world.pass(20_000);
    let waiting = reasons(&world);
    assert!(!waiting.is_empty(), "more than the budget lets be repaired");
    assert_eq!(waiting, vec![FaultReason::NoBudget; waiting.len()]);
}

/// Those that wait are no work that balancing has to wait for.
#[test]
fn what_waits_for_the_budgets_of_volumes_is_not_due() {
    let options = ClusterOptions {
        repairs_per_window: 30,
        urgent_repairs_per_window: 30,
        repairs_per_volume_per_window: 1,
        balance_spread_permille: 1_000,
        ..options()
    };
    let mut world = World::new(8, 8, options, 1);
    // Half of the servers stay empty: there are more volumes to copy to than to copy from.
    let empty = (4..8).map(NodeId);
    for node in empty.clone() {
        world.cluster.set_draining(world.now_ms, node, true);
    }
    for _ in 0..60 {
        world.write(2);
    }
    for node in empty {
        world.cluster.set_draining(world.now_ms, node, false);
    }
    world.pass(300);
    lose_node(&mut world, 0);
    world.pass(20_000);
    assert!(!world.commanded.is_empty());
    let waiting = reasons(&world);
    assert!(!waiting.is_empty(), "more than the budget lets be repaired");
    assert_eq!(waiting, vec![FaultReason::NoBudget; waiting.len()]);
    assert_eq!(world.cluster.balance_report().pause, None);
}
