//! What is removed, and what is not.

use std::collections::{BTreeSet, VecDeque};

use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::node::{NodeCommand, ReplicaChange};

use super::world::{CHUNK, World, options, rules};
use crate::engine::cluster::ClusterOptions;
use crate::engine::namespace::BlockChange;

/// Blocks that a node is commanded to delete by its next heartbeat.
pub(super) fn deletes(world: &mut World, node: usize) -> Vec<BlockId> {
    world.heartbeat(node, true);
    let commands = world.nodes[node].commands.iter();
    commands
        .filter_map(|command| match command {
            NodeCommand::Delete { blocks } => Some(blocks.clone()),
            _ => None,
        })
        .flatten()
        .collect()
}

/// A block with one replica too many: a node was away for long, and came back.
fn with_excess(world: &mut World) -> (BlockId, BTreeSet<NodeId>) {
    let block = world.write(2);
    world.pass(300);
    let away = world.cluster.replicas(block, None)[0];
    world.stop(away.0 as usize);
    world.pass(6_000);
    world.start(away.0 as usize);
    world.drain(away.0 as usize);
    let holders = world.holders(block);
    assert_eq!(holders.len(), 3);
    (block, holders)
}

#[test]
fn what_a_returning_node_has_too_much_goes_after_a_grace() {
    let mut world = World::new(6, 3, options(), 1);
    let (block, holders) = with_excess(&mut world);
    assert_eq!(world.cluster.fsck().excess_replicas, 1);
    world.pass(1_500);
    assert_eq!(world.holders(block), holders, "the grace is not over");
    world.pass(2_000);
    assert_eq!(world.holders(block).len(), 2);
    assert_eq!(world.cluster.fsck(), Default::default());
}

#[test]
fn removal_keeps_the_spread_over_racks() {
    for seed in 0..20 {
        let mut world = World::new(6, 2, options(), seed);
        let block = world.write(4);
        world.pass(300);
        let rules = rules(2);
        world.change(&BlockChange::RulesChanged { block, rules });
        world.pass(5_000);
        let racks: BTreeSet<u32> = world.holders(block).iter().map(|n| n.0 % 2).collect();
        assert_eq!((world.holders(block).len(), racks.len()), (2, 2));
    }
}

#[test]
fn removal_is_taken_back_when_another_replica_is_lost_before_the_command() {
    let mut world = World::new(6, 3, options(), 1);
    let (block, holders) = with_excess(&mut world);
    world.now_ms += world.options.excess_grace_ms + 100;
    for node in 0..6 {
        world.heartbeat(node, true);
    }
    world.cluster.tick(world.now_ms, &mut world.rng);
    assert_eq!(world.cluster.fsck().excess_replicas, 1);
    // One of the other two fails before the datanode asks for its commands.
    let slot = world.cluster.table.slot(block).expect("it exists");
    let replicas = world.cluster.table.get(slot).map(|it| it.replicas.clone());
    let chosen = replicas
        .into_iter()
        .flatten()
        .find(|replica| replica.state == crate::engine::cluster::table::ReplicaState::Excess);
    let storage = chosen.expect("one was chosen").storage;
    let chosen = world.cluster.table.home(storage).node;
    let other = holders.iter().find(|n| n.0 != chosen).expect("two others");
    world.reimage_all(other.0 as usize);
    world.connect(other.0 as usize);
    assert_eq!(deletes(&mut world, chosen as usize), []);
    assert_eq!(world.cluster.replicas(block, None).len(), 2);
}

#[test]
fn nothing_is_removed_on_the_word_of_nodes_that_are_not_heard_of() {
    for unreported in [false, true] {
        let mut world = World::new(6, 3, options(), 1);
        let (block, holders) = with_excess(&mut world);
        // One of the three is silent, or registered and did not report since.
        let doubtful = holders.first().expect("three hold it").0 as usize;
        if unreported {
            world.connect(doubtful);
            world.nodes[doubtful].parts.clear();
        } else {
            world.disconnect(doubtful, false);
        }
        // Not long enough for the silent one to be dead, or to be asked for its report again.
        for _ in 0..28 {
            world.now_ms += 100;
            for node in 0..6 {
                assert_eq!(deletes(&mut world, node), []);
            }
            world.cluster.tick(world.now_ms, &mut world.rng);
        }
        assert_eq!(world.cluster.replicas(block, None).len(), 3);
        let slot = world.cluster.table.slot(block).expect("it exists");
        let it = world.cluster.table.get(slot).expect("it exists");
        assert!(it.replicas.iter().all(|replica| replica.state.is_good()));
    }
}

#[test]
fn a_replica_that_was_to_be_deleted_counts_again_when_its_datanode_has_registered() {
    let mut world = World::new(6, 3, options(), 1);
    let (block, holders) = with_excess(&mut world);
    world.now_ms += world.options.excess_grace_ms + 100;
    let mut commanded = None;
    for node in 0..6 {
        world.heartbeat(node, false);
    }
    world.cluster.tick(world.now_ms, &mut world.rng);
    for node in 0..6 {
        if deletes(&mut world, node) == [block] {
            // The reply was lost.
            world.nodes[node].commands.clear();
            commanded = Some(node);
        }
    }
    let commanded = commanded.expect("one was commanded");
    let listed = world.cluster.replicas(block, None);
    assert_eq!(listed.len(), 2);
    assert!(!listed.contains(&NodeId(commanded as u32)));
    // It drops what it was commanded.
    world.connect(commanded);
    world.drain(commanded);
    assert_eq!(world.cluster.replicas(block, None).len(), 3);
    let others = holders.iter().map(|node| node.0 as usize);
    let others: Vec<usize> = others.filter(|node| *node != commanded).collect();
    world.reimage_all(others[0]);
    world.connect(others[0]);
    world.drain(others[0]);
    assert_eq!(deletes(&mut world, commanded), []);
    assert_eq!(world.cluster.fsck().missing_replicas, 0);
    // Both others are lost: it is read from and copied.
    world.reimage_all(others[1]);
    world.connect(others[1]);
    world.drain(others[1]);
    world.nodes[commanded].commands.clear();
    assert_eq!(
        world.cluster.replicas(block, None),
        [NodeId(commanded as u32)]
    );
    assert_eq!(world.cluster.summary(world.now_ms).lost_blocks, 0);
    world.pass(10_000);
    assert_eq!(world.holders(block).len(), 2);
    assert_eq!(world.cluster.fsck(), Default::default());
}

/// Lets time pass in which nodes do everything but delete. Returns which nodes were commanded to, with the commands,
/// and how many full reports were requested.
fn pass_without_deleting(
    world: &mut World,
    duration_ms: u64,
) -> (Vec<(usize, NodeCommand)>, usize) {
    let (mut waiting, mut reports) = (Vec::new(), 0);
    for _ in 0..duration_ms / 300 {
        world.now_ms += 300;
        for node in 0..world.nodes.len() {
            world.heartbeat(node, true);
            let commands = std::mem::take(&mut world.nodes[node].commands);
            let (slow, rest): (VecDeque<NodeCommand>, VecDeque<NodeCommand>) = commands
                .into_iter()
                .partition(|command| matches!(command, NodeCommand::Delete { .. }));
            waiting.extend(slow.into_iter().map(|command| (node, command)));
            reports += rest
                .iter()
                .filter(|command| matches!(command, NodeCommand::ReportBlocks { .. }))
                .count();
            world.nodes[node].commands = rest;
            world.drain(node);
        }
        world.cluster.tick(world.now_ms, &mut world.rng);
    }
    (waiting, reports)
}

#[test]
fn a_replica_whose_deletion_is_slow_never_counts_again() {
    let mut world = World::new(6, 3, options(), 1);
    let (block, holders) = with_excess(&mut world);
    let (mut waiting, _) = pass_without_deleting(&mut world, 4_500);
    let slow = waiting.first().expect("one is too many").0;
    let mut others = holders.clone();
    others.remove(&NodeId(slow as u32));
    // Each time longer than it takes until its node is asked for a report, and until excess replicas
    // are removed.
    for _ in 0..15 {
        let (commanded, reports) = pass_without_deleting(&mut world, 6_000);
        assert!(reports > 0, "it is asked what it has");
        assert!(!commanded.is_empty(), "it is commanded again");
        assert!(commanded.len() <= 6, "not with each heartbeat");
        waiting.extend(commanded);
        let listed = world.cluster.replicas(block, None);
        assert_eq!(BTreeSet::from_iter(listed), others);
        assert_eq!(world.holders(block), holders);
    }
    assert!(waiting.iter().all(|(node, _)| *node == slow));
    // At last it executes all its commands.
    let commands = waiting.into_iter().map(|(_, command)| command);
    world.nodes[slow].commands.extend(commands);
    world.pass(1_000);
    assert_eq!(world.holders(block), others);
    assert_eq!(world.cluster.fsck(), Default::default());
}

#[test]
fn a_replica_whose_deletion_is_slow_is_copied_when_all_others_are_lost() {
    let mut world = World::new(6, 3, options(), 1);
    let (block, holders) = with_excess(&mut world);
    let (waiting, reports) = pass_without_deleting(&mut world, 12_000);
    assert!(reports > 0, "it was commanded too often");
    let slow = waiting.first().expect("one is too many").0;
    for node in holders.iter().filter(|n| n.0 as usize != slow) {
        world.reimage_all(node.0 as usize);
        world.connect(node.0 as usize);
        world.drain(node.0 as usize);
    }
    assert_eq!(world.cluster.replicas(block, None), [NodeId(slow as u32)]);
    assert_eq!(world.cluster.summary(world.now_ms).lost_blocks, 0);
    world.pass(10_000);
    assert_eq!(world.holders(block).len(), 2);
    assert_eq!(world.cluster.fsck(), Default::default());
}

#[test]
fn replicas_of_freed_blocks_go_and_those_being_written_stay() {
    let mut world = World::new(4, 2, options(), 1);
    world.next_block = 2_000;
    let written = world.allocate(rules(2)).expect("room is left");
    world.append(written, CHUNK);
    let allocated = BlockId(1)..=written;
    world
        .cluster
        .set_allocated(std::iter::once(allocated), std::iter::empty());
    for number in 0..20 {
        world.put(0, BlockId(1_000 + number), CHUNK, true);
    }
    world.send_changes(0);
    assert_eq!(world.cluster.fsck().orphan_replicas, 20);
    world.connect(0);
    world.drain(0);
    assert_eq!(deletes(&mut world, 0).len(), 20);
    world.pass(600);
    assert_eq!(world.cluster.fsck().orphan_replicas, 0);
    let left: usize = world.nodes[0].disks.values().map(|disk| disk.len()).sum();
    assert_eq!(
        left,
        usize::from(world.holders(written).contains(&NodeId(0)))
    );
    assert_eq!(world.holders(written).len(), 2);
}

#[test]
fn what_was_never_allocated_is_kept_for_a_while() {
    let kept = ClusterOptions {
        quarantine_ms: 60_000,
        ..options()
    };
    let mut world = World::new(4, 2, kept, 1);
    world.write(2);
    world.pass(600);
    let stranger = BlockId(1 << 40);
    for node in 0..2 {
        world.put(node, stranger, CHUNK, true);
        world.send_changes(node);
    }
    let listed = |world: &World| world.cluster.quarantined(world.now_ms, BlockId(0), 10);
    let of_both = listed(&world);
    assert_eq!((of_both.len(), of_both[0].nodes.len()), (1, 2));
    assert_eq!(of_both[0].length_bytes, CHUNK);
    assert_eq!(world.cluster.fsck().orphan_replicas, 0);
    world.pass(30_000);
    // Registering again gives a node no more time.
    world.disconnect(1, false);
    world.connect(1);
    world.drain(1);
    assert_eq!(listed(&world)[0].nodes.len(), 2);
    assert!(listed(&world)[0].kept_ms <= 30_000);
    assert_eq!(world.cluster.summary(world.now_ms).quarantined_blocks, 1);
    // Nothing is removed while it is open whether the namenode knows enough.
    world.cluster.set_recovering(true);
    world.pass(60_000);
    assert_eq!(listed(&world)[0].nodes.len(), 2);
    world.cluster.set_recovering(false);
    world.pass(10_000);
    assert_eq!(listed(&world), []);
    assert!(world.holders(stranger).is_empty());
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(
        (summary.quarantined_blocks, summary.quarantined_bytes),
        (0, 0)
    );
}

#[test]
fn what_others_may_have_written_to_is_kept_when_it_is_freed() {
    let mut world = World::new(4, 2, options(), 1);
    let block = world.write(2);
    world.pass(600);
    let allocated = BlockId(1)..=block;
    let unsettled = std::iter::once(block);
    world
        .cluster
        .set_allocated(std::iter::once(allocated), unsettled);
    world.free(block);
    world.pass(10_000);
    assert_eq!(world.holders(block).len(), 2);
    let listed = world.cluster.quarantined(world.now_ms, BlockId(0), 10);
    assert_eq!((listed.len(), listed[0].nodes.len()), (1, 2));
    assert!(listed[0].length_bytes > 0);
}

#[test]
fn nothing_is_commanded_in_recovery() {
    let mut world = World::new(4, 2, options(), 1);
    let block = world.write(2);
    world.pass(600);
    world.cluster.set_recovering(true);
    world.free(block);
    world.pass(10_000);
    assert_eq!(world.holders(block).len(), 2);
    world.cluster.set_recovering(false);
    world.pass(10_000);
    assert!(world.holders(block).is_empty());
}

#[test]
fn what_is_too_much_goes_after_a_takeover_also_when_commands_to_report_are_lost() {
    let mut world = World::new(6, 3, options(), 1);
    let (block, _) = with_excess(&mut world);
    world.cluster.set_recovering(true);
    world.cluster.take_over(world.now_ms);
    // With the second one, they are asked to report.
    for node in (0..6).chain(0..6) {
        world.heartbeat(node, false);
    }
    world.pass(world.options.report_timeout_ms + world.options.excess_grace_ms + 10_000);
    assert_eq!(world.holders(block).len(), 2);
}

/// A report that is begun earlier would have to be followed by another one.
#[test]
fn after_a_takeover_reports_are_asked_for_when_an_answer_has_arrived() {
    let mut world = World::new(3, 3, options(), 1);
    let is_asked = |world: &World| {
        let mut commands = world.nodes[0].commands.iter();
        commands.any(|command| matches!(command, NodeCommand::ReportBlocks { .. }))
    };
    world.cluster.set_recovering(true);
    world.cluster.take_over(world.now_ms);
    world.heartbeat(0, true);
    assert!(!is_asked(&world), "it may not have the answer yet");
    world.heartbeat(0, true);
    assert!(is_asked(&world));
}

#[test]
fn deletions_wait_for_the_end_of_safe_mode() {
    let mut world = World::new(4, 2, options(), 1);
    world.write(2);
    world.pass(600);
    world.next_block = 2_000;
    world.restart_namenode();
    world.put(0, BlockId(1_000), CHUNK, true);
    world.connect(0);
    world.drain(0);
    assert_eq!(deletes(&mut world, 0), []);
    for node in 1..4 {
        world.connect(node);
        world.drain(node);
    }
    world.cluster.tick(world.now_ms, &mut world.rng);
    assert_eq!(deletes(&mut world, 0), [BlockId(1_000)]);
}

#[test]
fn freed_blocks_go_in_batches_and_repairs_come_first() {
    let batches = ClusterOptions {
        deletes_per_command_max: 8,
        ..options()
    };
    let mut world = World::new(4, 4, batches, 1);
    let blocks: Vec<_> = (0..40).map(|_| world.write(4)).collect();
    let kept = world.write(2);
    world.pass(600);
    for block in blocks {
        world.free(block);
    }
    let lost = world.cluster.replicas(kept, None)[0].0 as usize;
    world.reimage_all(lost);
    world.connect(lost);
    world.drain(lost);
    world.cluster.tick(world.now_ms, &mut world.rng);
    for node in 0..4 {
        world.heartbeat(node, true);
        let commands = &world.nodes[node].commands;
        let is_delete = |command: &NodeCommand| match command {
            NodeCommand::Delete { blocks } => {
                assert_eq!(blocks.len(), 8);
                true
            }
            _ => false,
        };
        let deletes = commands.iter().filter(|c| is_delete(c)).count();
        assert_eq!(deletes, usize::from(node != lost));
        assert!(commands.iter().rev().skip(deletes).all(|c| !is_delete(c)));
    }
    assert_eq!(world.commanded.len(), 1);
    // The limit of commands is for repairs first.
    let id = NodeId(u32::from(lost == 0));
    assert_eq!(world.cluster.fsck().orphan_replicas, 3 * 40);
    let mut sign = |_| panic!("there is nothing to sign");
    assert_eq!(
        world.cluster.next_commands(world.now_ms, id, 0, &mut sign),
        []
    );
    world.pass(5_000);
    assert_eq!(world.cluster.fsck(), Default::default());
}

#[test]
fn a_node_is_commanded_to_delete_no_more_than_it_may() {
    let mut world = World::new(4, 4, options(), 1);
    let blocks: Vec<_> = (0..20).map(|_| world.write(4)).collect();
    world.pass(600);
    let bytes = u64::from(world.cluster.table.get(0).expect("written").required_bytes);
    for block in blocks {
        world.free(block);
    }
    let commanded = |world: &mut World| {
        let commanded = deletes(world, 0).len();
        world.drain(0);
        commanded
    };
    world.removable_bytes = 0;
    assert_eq!(commanded(&mut world), 0);
    // The last one may be larger than what is left.
    world.removable_bytes = 2 * bytes + 1;
    assert_eq!(commanded(&mut world), 3);
    // Only a heartbeat renews it.
    let mut sign = |_| panic!("there is nothing to sign");
    let now_ms = world.now_ms;
    let commands = world.cluster.next_commands(now_ms, NodeId(0), 9, &mut sign);
    assert_eq!(commands, []);
    assert_eq!(commanded(&mut world), 3);
    world.removable_bytes = u64::MAX;
    assert_eq!(commanded(&mut world), 14);
    world.pass(600);
    assert_eq!(world.cluster.fsck(), Default::default());
}

#[test]
fn a_replica_that_another_one_waits_for_goes_before_what_is_left_over() {
    let mut world = World::new(3, 3, options(), 1);
    let freed: Vec<_> = (0..5).map(|_| world.write(3)).collect();
    let damaged = world.write(3);
    world.pass(600);
    world.removable_bytes = 0;
    for block in freed {
        world.free(block);
    }
    let it = &mut world.nodes[0];
    let disk = it
        .disks
        .iter_mut()
        .find(|(_, it)| it.contains_key(&damaged));
    let (&storage, disk) = disk.expect("each node holds it");
    disk.get_mut(&damaged).expect("found").corrupt = true;
    it.changes
        .push_back((storage, ReplicaChange::Corrupt(damaged)));
    world.send_changes(0);
    world.pass(600);
    world.removable_bytes = 1;
    assert_eq!(deletes(&mut world, 0), [damaged]);
}

#[test]
fn a_deletion_that_is_never_confirmed_ends_with_a_full_report() {
    let mut world = World::new(3, 3, options(), 1);
    let block = world.write(3);
    world.pass(300);
    world.free(block);
    let mut times = 0;
    for _ in 0..100 {
        world.now_ms += 300;
        for node in 0..3 {
            world.heartbeat(node, true);
            let mut commands = std::mem::take(&mut world.nodes[node].commands);
            let asked = commands
                .iter()
                .any(|c| matches!(c, NodeCommand::ReportBlocks { .. }));
            times += commands.len();
            // Node 0 ignores deletions.
            commands.retain(|c| node != 0 || !matches!(c, NodeCommand::Delete { .. }));
            world.nodes[node].commands = commands;
            world.drain(node);
            if asked {
                assert_eq!((node, times), (0, 3 + 2 + 1));
                assert_eq!(deletes(&mut world, 0), [block], "it is still there");
                return;
            }
        }
        world.cluster.tick(world.now_ms, &mut world.rng);
    }
    panic!("no report was asked for");
}

#[test]
fn replicas_whose_writer_is_gone_are_sealed() {
    let mut world = World::new(4, 2, options(), 1);
    let block = world.allocate(rules(2)).expect("room is left");
    world.append(block, CHUNK);
    let pipeline = world.blocks[&block].pipeline.clone();
    // One of them has more than was committed.
    world.put(pipeline[0].0 as usize, block, 3 * CHUNK, false);
    world.pass(300);
    world.end_writer(block);
    world.pass(300);
    let open = |world: &World| {
        let replicas = pipeline
            .iter()
            .map(|n| world.nodes[n.0 as usize].replica(block));
        replicas.flatten().filter(|replica| !replica.sealed).count()
    };
    assert_eq!(
        open(&world),
        2,
        "a writer that sealed would get time to do it"
    );
    world.pass(1_500);
    assert_eq!(open(&world), 0);
    for node in &pipeline {
        let replica = world.nodes[node.0 as usize].replica(block);
        assert_eq!(replica.map(|it| it.length_bytes), Some(CHUNK));
    }
}
