//! Which nodes are alive, and what follows when one is not.

use std::collections::BTreeMap;

use harvestfs_placement::Stock;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{NodeId, StorageId};
use harvestfs_protocol::node::{Heartbeat, NodeCommand};
use harvestfs_protocol::outlook::{Shortage, Unavailable};
use harvestfs_protocol::types::{Durability, PlacementRules, StorageClass};

use super::world::{BLOCK_BYTES, World, options, rules};
use crate::engine::cluster::{Cluster, ClusterError};

fn alive(world: &World) -> u64 {
    world.cluster.summary(world.now_ms).nodes_alive
}

#[test]
fn a_silent_node_is_first_stale_then_dead() {
    let mut world = World::new(6, 3, options(), 1);
    let block = world.write(3);
    world.pass(300);
    let node = world.cluster.replicas(block, None)[0];
    world.disconnect(node.0 as usize, false);

    world.pass(1_300);
    assert_eq!(alive(&world), 6);
    let listed = world.cluster.replicas(block, None);
    assert_eq!((listed.len(), listed[2]), (3, node), "readers try it last");
    for _ in 0..20 {
        let placed = world
            .cluster
            .place(world.now_ms, 1, &rules(3), &[], None, &mut world.rng);
        assert!(!placed.expect("five are left")[0].contains(&node));
    }

    world.pass(2_000);
    assert_eq!(alive(&world), 5);
    assert!(!world.cluster.replicas(block, None).contains(&node));
    world.pass(1_000);
    assert_eq!(
        world.holders(block).len(),
        4,
        "repaired, and the old one is still on the disk"
    );
    let heartbeat = Heartbeat {
        volumes: world.volumes(node.0 as usize),
        busy: false,
        primary: None,
        active_streams: 0,
        unix_ms: 0,
        denials: 0,
        removable_bytes: u64::MAX,
    };
    assert_eq!(
        world.cluster.heartbeat(world.now_ms, node, &heartbeat),
        Err(ClusterError::NotRegistered(node)),
        "what it holds by now is not known"
    );
}

#[test]
fn a_lost_connection_makes_a_node_stale_not_dead() {
    let mut world = World::new(4, 2, options(), 1);
    let block = world.write(2);
    world.pass(300);
    let node = world.cluster.replicas(block, None)[0];
    world.disconnect(node.0 as usize, true);
    assert_eq!(world.cluster.replicas(block, None)[1], node);
    assert_eq!(alive(&world), 4);
    world.connect(node.0 as usize);
    world.drain(node.0 as usize);
    world.pass(3_000);
    assert_eq!(world.cluster.summary(world.now_ms).repairs_done, 0);
}

#[test]
fn a_busy_node_is_neither_used_nor_lost() {
    let mut world = World::new(5, 5, options(), 1);
    let block = world.write(2);
    world.pass(300);
    let holder = world.cluster.replicas(block, None)[0];
    world.nodes[holder.0 as usize].busy = true;
    world.pass(10_000);
    assert_eq!(
        world.cluster.replicas(block, None)[1],
        holder,
        "readers try it last"
    );
    assert_eq!(world.cluster.summary(world.now_ms).repairs_done, 0);
    assert_eq!(world.cluster.fsck().missing_replicas, 0);

    // The only source is busy: repair waits for it.
    let other = world.cluster.replicas(block, None)[0];
    world.stop(other.0 as usize);
    world.pass(10_000);
    assert_eq!(world.commanded, []);
    world.nodes[holder.0 as usize].busy = false;
    world.pass(1_000);
    assert_eq!(world.commanded.len(), 1);
    assert_eq!(world.commanded[0].1, holder);

    for node in &mut world.nodes {
        node.busy = true;
    }
    world.pass(300);
    let placed = world
        .cluster
        .place(world.now_ms, 1, &rules(1), &[], None, &mut world.rng);
    assert!(matches!(placed, Err(FsError::TooFewDatanodes(_))));
}

#[test]
fn a_reimage_is_known_at_once() {
    let mut world = World::new(6, 3, options(), 1);
    let blocks: Vec<_> = (0..10).map(|_| world.write(3)).collect();
    world.pass(300);
    let before_ms = world.now_ms;
    world.reimage_all(0);
    world.connect(0);
    for block in &blocks {
        assert!(!world.cluster.replicas(*block, None).contains(&NodeId(0)));
    }
    let gone = blocks
        .iter()
        .filter(|b| world.holders(**b).len() == 2)
        .count();
    assert!(gone > 0);
    world.cluster.tick(world.now_ms, &mut world.rng);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.under_replicated_blocks, gone as u64);
    assert_eq!(
        summary.repairs_waiting + summary.repairs_under_way,
        gone as u64
    );
    assert!(summary.repairs_under_way > 0);
    world.pass(2_500);
    assert!(blocks.iter().all(|block| world.holders(*block).len() == 3));
    assert!(world.now_ms - before_ms < world.options.dead_after_ms);
}

#[test]
fn replicas_on_a_failed_volume_are_lost_until_it_works_again() {
    let mut world = World::new(6, 3, options(), 1);
    let blocks: Vec<_> = (0..10).map(|_| world.write(3)).collect();
    world.pass(300);
    let storage = *world.nodes[1]
        .disks
        .keys()
        .next()
        .expect("it has two disks");
    let affected = world.nodes[1].disks[&storage].len() as u64;
    assert!(affected > 0);
    world.set_sick(1, storage, true);
    world.heartbeat(1, true);
    world.cluster.tick(world.now_ms, &mut world.rng);
    assert_eq!(
        world.cluster.summary(world.now_ms).under_replicated_blocks,
        affected
    );
    world.set_sick(1, storage, false);
    world.pass(300);
    assert_eq!(world.cluster.fsck().missing_replicas, 0);
    world.pass(5_000);
    assert!(blocks.iter().all(|block| world.holders(*block).len() == 3));
}

#[test]
fn a_disk_that_moves_to_another_server_counts_there() {
    let mut world = World::new(4, 4, options(), 1);
    let block = world.write(2);
    world.pass(300);
    let [from, ..] = world.cluster.replicas(block, None)[..] else {
        panic!("it has replicas");
    };
    let free = (0..4).find(|n| world.nodes[*n].replica(block).is_none());
    let to = free.expect("two nodes have none");
    world.stop(from.0 as usize);
    let disks = std::mem::take(&mut world.nodes[from.0 as usize].disks);
    world.nodes[to].disks.extend(disks);
    world.connect(to);
    world.drain(to);
    let listed = world.cluster.replicas(block, None);
    assert!(listed.contains(&NodeId(to as u32)) && !listed.contains(&from));
}

#[test]
fn the_quota_of_a_disk_that_moved_is_not_ordered_where_it_was() {
    let mut world = World::new(2, 2, options(), 1);
    world.stop(0);
    assert!(
        world
            .cluster
            .set_quota(world.now_ms, NodeId(0), None, BLOCK_BYTES, 60_000)
    );
    let disks = std::mem::take(&mut world.nodes[0].disks);
    world.nodes[1].disks.extend(disks);
    world.connect(1);
    world.drain(1);
    world.nodes[0]
        .disks
        .insert(StorageId(1_000), BTreeMap::new());
    world.start(0);
    world.drain(0);
    world.heartbeat(0, true);
    let commands = &world.nodes[0].commands;
    let is_quota = |it: &NodeCommand| matches!(it, NodeCommand::SetQuota { .. });
    assert!(!commands.iter().any(is_quota), "{commands:?}");
}

#[test]
fn repair_waits_while_many_nodes_are_silent_together() {
    let mut world = World::new(9, 3, options(), 1);
    let blocks: Vec<_> = (0..20).map(|_| world.write(3)).collect();
    world.pass(300);
    for node in 0..3 {
        world.disconnect(node, false);
    }
    world.pass(6_000);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.nodes_alive, 6);
    assert!(summary.storm_remaining_ms.is_some_and(|ms| ms > 10_000));
    assert!(summary.under_replicated_blocks > 0);
    assert_eq!(world.commanded, []);

    // They come back: nothing had to be done.
    for node in 0..3 {
        world.connect(node);
        world.drain(node);
    }
    world.pass(1_000);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.storm_remaining_ms, None);
    assert_eq!(
        (summary.under_replicated_blocks, world.commanded.len()),
        (0, 0)
    );

    // They stay away: after a while they count as lost.
    for node in 0..3 {
        world.stop(node);
    }
    world.pass(6_000);
    assert_eq!(world.commanded, []);
    world.pass(world.options.storm_hold_ms + 5_000);
    assert!(!world.commanded.is_empty());
    for block in blocks {
        let listed = world.cluster.replicas(block, None);
        assert!(listed.len() == 3 || world.holders(block).iter().all(|node| node.0 < 3));
    }
}

#[test]
fn reimages_and_single_deaths_are_no_storm() {
    let mut world = World::new(9, 3, options(), 1);
    for _ in 0..10 {
        world.write(2);
    }
    world.pass(300);
    for node in 0..4 {
        world.reimage_all(node);
        world.connect(node);
        world.drain(node);
        world.pass(3_000);
    }
    world.stop(8);
    world.pass(5_000);
    assert_eq!(world.cluster.summary(world.now_ms).storm_remaining_ms, None);
    assert_eq!(world.cluster.fsck().missing_replicas, 0);
}

#[test]
fn after_a_start_nothing_is_repaired_or_removed_before_all_have_reported() {
    let mut world = World::new(6, 3, options(), 1);
    let blocks: Vec<_> = (0..10).map(|_| world.write(3)).collect();
    world.pass(300);
    world.restart_namenode();
    assert!(!world.cluster.summary(world.now_ms).ready);
    assert!(matches!(
        world
            .cluster
            .place(world.now_ms, 1, &rules(3), &[], None, &mut world.rng),
        Err(FsError::TooFewDatanodes(_))
    ));
    for node in 0..5 {
        world.connect(node);
        world.drain(node);
        world.pass(100);
        assert!(!world.cluster.summary(world.now_ms).ready, "one is missing");
    }
    for block in &blocks {
        assert!(!world.cluster.replicas(*block, None).is_empty());
    }
    world.connect(5);
    world.drain(5);
    world.pass(100);
    assert!(world.cluster.summary(world.now_ms).ready);
    assert_eq!(world.cluster.fsck(), Default::default());
    assert_eq!(world.commanded, []);

    // The namenode waits for a node that never turns up, but not forever.
    world.restart_namenode();
    for node in 0..5 {
        world.connect(node);
        world.drain(node);
    }
    world.pass(world.options.safe_mode_max_ms - 200);
    assert!(!world.cluster.summary(world.now_ms).ready);
    world.pass(5_000);
    assert!(world.cluster.summary(world.now_ms).ready);
    assert_eq!(world.cluster.fsck().missing_replicas, 0);
    assert!(!world.commanded.is_empty());
}

#[test]
fn a_partition_at_the_start_is_a_storm() {
    let mut world = World::new(6, 3, options(), 1);
    for _ in 0..10 {
        world.write(3);
    }
    world.pass(300);
    world.restart_namenode();
    for node in 0..3 {
        world.connect(node);
        world.drain(node);
    }
    world.pass(world.options.safe_mode_max_ms + 2_000);
    let summary = world.cluster.summary(world.now_ms);
    assert!(summary.ready && summary.storm_remaining_ms.is_some());
    assert_eq!(world.commanded, []);
}

#[test]
fn placing_says_why_it_cannot() {
    let strict = |replication, class| PlacementRules {
        replication,
        durability: Durability::Strict,
        class,
    };
    let mut world = World::new(3, 3, options(), 1);
    world.pass(world.options.safe_mode_max_ms);
    let mut place = |rules: &PlacementRules, exclude: &[NodeId]| {
        world
            .cluster
            .place(world.now_ms, 1, rules, exclude, None, &mut world.rng)
    };
    assert_eq!(place(&strict(3, None), &[]).map(|p| p[0].len()), Ok(3));
    assert_eq!(place(&strict(4, None), &[]).map(|p| p[0].len()), Ok(3));
    assert_eq!(place(&rules(4), &[]).map(|p| p[0].len()), Ok(3));
    let all: Vec<NodeId> = (0..3).map(NodeId).collect();
    let shortage = Shortage {
        needed: 1,
        placeable: 0,
        unavailable: Unavailable {
            silent: 3,
            ..Unavailable::default()
        },
    };
    let refused = Err(FsError::TooFewDatanodes(shortage));
    assert_eq!(place(&rules(1), &all), refused);
    let memory = Some(StorageClass::Memory);
    assert_eq!(place(&strict(1, memory), &[]), Err(FsError::NoSpace));
}

/// Blocks that are allocated and not reported yet take room, so that a request for many, or many
/// requests, never promise the same room twice.
#[test]
fn room_is_promised_once() {
    let mut cluster = Cluster::new(options(), Box::new(Stock), 0);
    let mut world = World::new(1, 1, options(), 1);
    let mut volume = world.volumes(0)[0];
    volume.quota_bytes = 5 * BLOCK_BYTES;
    volume.used_bytes = BLOCK_BYTES / 2;
    cluster.register(0, NodeId(0), &world.server(0), &[volume]);
    cluster.tick(10_000, &mut world.rng);
    cluster.register(10_000, NodeId(0), &world.server(0), &[volume]);
    let mut place = |count| {
        cluster
            .place(10_000, count, &rules(1), &[], None, &mut world.rng)
            .map(|pipelines| pipelines.len())
    };
    assert_eq!(place(5), Err(FsError::NoSpace));
    assert_eq!(place(4), Ok(4));
    assert_eq!(place(4), Ok(4), "nothing was allocated yet");
}

#[test]
fn time_never_runs_backwards() {
    let mut world = World::new(3, 3, options(), 1);
    world.write(3);
    world.cluster.tick(1_000_000, &mut world.rng);
    world.cluster.tick(5, &mut world.rng);
    world.heartbeat(0, true);
    assert_eq!(world.cluster.nodes(0)[0].heartbeat_age_ms, Some(0));
}
