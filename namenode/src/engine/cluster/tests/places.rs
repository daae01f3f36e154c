//! Where replicas are: what is moved, drained and given up, and in which order it is repaired.

use harvestfs_placement::{PolicyKind, PolicyOptions};
use harvestfs_protocol::admin::NodeStatus;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::node::NodeCommand;
use harvestfs_protocol::placement::{DomainKind, RepairChange};
use harvestfs_protocol::types::{Durability, PlacementRules, VolumeStatus};
use harvestfs_telemetry::hours::WeekHours;
use harvestfs_telemetry::profile::{Pattern, TenantKey, TenantProfile};

use super::world::{BLOCK_BYTES, World, options, rules, token};
use crate::engine::cluster::{BlockFault, ClusterOptions, FaultReason};

pub(super) fn strict(replication: u8) -> PlacementRules {
    PlacementRules {
        durability: Durability::Strict,
        ..rules(replication)
    }
}

/// Nine servers, each of its own owner and rack.
pub(super) fn world_of_nine(options: ClusterOptions) -> World {
    World::new(9, 9, options, 7)
}

pub(super) fn write(world: &mut World, rules: PlacementRules) -> BlockId {
    let block = world.allocate(rules).expect("room is left");
    world.append(block, BLOCK_BYTES);
    world.seal_by_writer(block);
    block
}

pub(super) fn change_limits(world: &mut World, change: RepairChange) {
    let limits = change.applied_to(world.cluster.repair_limits());
    world.cluster.set_repair_limits(world.now_ms, &limits);
}

pub(super) fn set_policy(world: &mut World, kind: PolicyKind) {
    let policy = kind.build(&PolicyOptions::default());
    world.cluster.set_policy(world.now_ms, policy);
}

fn assert_replicas(world: &World, count: usize) {
    for block in world.blocks.keys() {
        assert_eq!(world.holders(*block).len(), count, "{block}");
    }
}

#[test]
fn strict_blocks_are_placed_within_the_constraints() {
    let mut world = world_of_nine(options());
    set_policy(&mut world, PolicyKind::Harvest);
    for _ in 0..100 {
        write(&mut world, strict(3));
    }
    // Until no further server is expected.
    world.pass(1_500);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.blocks_by_score, [0, 0, 0, 0, 0, 100]);
    assert_eq!(summary.misplaced_blocks, 0);
    // Two of three columns are all that eight replicas in three rounds may use twice; all nine
    // servers together are three full rounds.
    assert!(world.allocate(strict(9)).is_some());
    // There are no more: the tenth replica waits for another server.
    let pipelines = world
        .cluster
        .place(world.now_ms, 1, &strict(10), &[], None, &mut world.rng);
    assert_eq!(pipelines.map(|it| it[0].len()), Ok(9));
}

#[test]
fn what_another_policy_placed_is_moved_within_the_budget() {
    let mut world = world_of_nine(ClusterOptions {
        moves_per_window: 5,
        ..options()
    });
    for _ in 0..40 {
        write(&mut world, strict(3));
    }
    world.pass(600);
    assert_eq!(world.cluster.summary(world.now_ms).misplaced_blocks, 0);
    set_policy(&mut world, PolicyKind::Harvest);
    world.pass(1_000);
    let misplaced = world.cluster.summary(world.now_ms).misplaced_blocks;
    assert!(misplaced > 10, "{misplaced} are misplaced");
    let started_ms = world.now_ms;
    world.pass(100_000);
    // As source, and as target.
    let commanded: Vec<_> = world
        .commanded
        .iter()
        .filter(|it| it.0 >= started_ms)
        .collect();
    for node in 0..9 {
        let as_target = commanded.iter().filter(|it| it.2 == NodeId(node)).count();
        assert!(as_target <= 5, "node {node} received {as_target}");
    }
    world.pass(6_000_000);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.misplaced_blocks, 0);
    assert_eq!(summary.moves_waiting, 0);
    assert!(
        summary.moves_done >= misplaced && summary.repairs_done == 0,
        "{summary:?}"
    );
    assert_replicas(&world, 3);
}

#[test]
fn nothing_is_known_of_a_server_that_has_not_reported() {
    let mut world = world_of_nine(options());
    let single = write(&mut world, strict(1));
    world.pass(600);
    let holder = *world.holders(single).first().expect("it has a replica");
    assert!(world.cluster.have_reported(&[holder]));
    world.restart_namenode();
    // Without reports, it looks as if nothing would be lost.
    assert_eq!(world.cluster.reimage_impact(&[holder]).lost, 0);
    assert!(!world.cluster.have_reported(&[holder]));
    for node in 0..9 {
        world.connect(node);
        world.drain(node);
    }
    assert!(world.cluster.have_reported(&[holder]));
    assert_eq!(world.cluster.reimage_impact(&[holder]).lost, 1);
}

#[test]
fn a_drained_server_can_be_reimaged_without_loss() {
    let mut world = world_of_nine(options());
    let blocks: Vec<BlockId> = (0..20).map(|_| write(&mut world, strict(2))).collect();
    let single = write(&mut world, strict(1));
    world.pass(600);
    let holder = *world.holders(single).first().expect("it has a replica");
    let impact = world.cluster.reimage_impact(&[holder]);
    assert_eq!(impact.lost_blocks, [single]);
    assert!(impact.exposed > 0 && !impact.is_safe(), "{impact:?}");
    let all: Vec<NodeId> = (0..9).map(NodeId).collect();
    assert_eq!(
        world.cluster.reimage_impact(&all).lost as usize,
        blocks.len() + 1
    );

    world.cluster.set_draining(world.now_ms, holder, true);
    world.pass(30_000);
    let impact = world.cluster.reimage_impact(&[holder]);
    assert!(impact.is_safe() && impact.waiting == 0, "{impact:?}");
    for _ in 0..50 {
        let block = write(&mut world, strict(2));
        assert!(!world.blocks[&block].pipeline.contains(&holder));
    }
    world.reimage_all(holder.0 as usize);
    world.connect(holder.0 as usize);
    world.pass(30_000);
    assert_eq!(
        world.cluster.summary(world.now_ms).under_replicated_blocks,
        0
    );
    // It is used again.
    let used = (0..50).any(|_| {
        let block = write(&mut world, strict(2));
        world.blocks[&block].pipeline.contains(&holder)
    });
    assert!(used);
}

#[test]
fn what_keeps_servers_from_being_taken_away_is_named() {
    let mut world = world_of_nine(options());
    let blocks: Vec<BlockId> = (0..5).map(|_| write(&mut world, strict(2))).collect();
    world.pass(600);
    let all: Vec<NodeId> = (0..9).map(NodeId).collect();
    let asked = world.cluster.reimage_impact(&all);
    assert_eq!((asked.waiting, asked.waiting_blocks.len()), (5, 0));
    for &node in &all {
        world.cluster.set_draining(world.now_ms, node, true);
    }
    world.pass(60_000);
    let impact = world.cluster.reimage_impact(&all);
    let mut named: Vec<BlockId> = impact.waiting_blocks.iter().map(|it| it.block).collect();
    named.sort_unstable();
    assert_eq!(named, blocks);
    for it in &impact.waiting_blocks {
        assert_eq!((it.elsewhere, it.wanted), (0, 2));
        assert!(it.why.contains("no server takes replicas now"), "{it:?}");
    }
}

#[test]
fn a_shrinking_quota_gives_up_what_has_most_copies_elsewhere() {
    let mut world = world_of_nine(options());
    let on_first = |world: &mut World, replication: u8| loop {
        let block = write(world, strict(replication));
        if world.holders(block).contains(&NodeId(0)) {
            return block;
        }
    };
    let few: Vec<BlockId> = (0..5).map(|_| on_first(&mut world, 2)).collect();
    let many: Vec<BlockId> = (0..5).map(|_| on_first(&mut world, 4)).collect();
    world.pass(600);
    let held = world.nodes[0].disks.values().next().expect("a disk").len() as u64;
    let quota_bytes = (held - 5) * BLOCK_BYTES;
    assert!(
        !world
            .cluster
            .set_quota(world.now_ms, NodeId(77), None, quota_bytes, 60_000)
    );
    assert!(
        world
            .cluster
            .set_quota(world.now_ms, NodeId(0), None, quota_bytes, 60_000)
    );
    world.pass(30_000);
    let left = world.nodes[0].disks.values().next().expect("a disk").len() as u64;
    assert!(left <= held - 5, "{left} of {held} are left");
    for block in few {
        assert!(world.holders(block).contains(&NodeId(0)));
        assert_eq!(world.holders(block).len(), 2);
    }
    for block in many {
        assert_eq!(world.holders(block).len(), 4, "another copy was made first");
    }
    assert_eq!(
        world.cluster.summary(world.now_ms).under_replicated_blocks,
        0
    );
}

#[test]
fn a_quota_that_must_hold_now_keeps_the_last_copies() {
    let mut world = World::new(2, 2, options(), 3);
    for _ in 0..10 {
        world.write(2);
    }
    let single = loop {
        let block = world.write(1);
        if world.holders(block).contains(&NodeId(0)) {
            break block;
        }
    };
    world.pass(600);
    // The other server has no room for another copy: it has one of everything.
    world
        .cluster
        .set_quota(world.now_ms, NodeId(0), None, 0, 1_000);
    world.pass(10_000);
    assert!(
        world.holders(single).iter().len() >= 1,
        "the last copy stays"
    );
    for block in world.blocks.keys() {
        assert!(!world.lasting_holders(*block).is_empty(), "{block}");
    }
    let left = world.nodes[0].disks.values().next().expect("a disk").len();
    assert!(left <= 1, "{left} are left");
}

#[test]
fn survivors_that_are_reimaged_often_come_first() {
    let mut world = World::new(9, 9, options(), 5);
    let profile = |reimages| TenantProfile {
        reimages_per_server_month: reimages,
        peak_cpu_share: 0.5,
        average_cpu_share: 0.2,
        busy_share: 0.0,
        busy_hours: WeekHours::NONE,
        pattern: Pattern::Constant,
    };
    let profiles: Vec<(TenantKey, TenantProfile)> = (0..9)
        .map(|node| {
            let server = world.server(node);
            let key = TenantKey {
                environment: server.environment,
                machine_function: server.machine_function,
            };
            (key, profile(if node == 8 { 3.0 } else { 0.1 }))
        })
        .collect();
    let pairs = profiles.iter().map(|(key, profile)| (key, *profile));
    world.cluster.set_profiles(pairs);
    world.cluster.rebuild_grid(world.now_ms);
    let on = |world: &mut World, nodes: [u32; 3]| {
        let block = world.allocate(rules(3)).expect("room is left");
        let pipeline: Vec<NodeId> = nodes.into_iter().map(NodeId).collect();
        world.cluster.set_pipeline(block, &pipeline);
        world.blocks.get_mut(&block).expect("just made").pipeline = pipeline;
        world.append(block, BLOCK_BYTES);
        world.seal_by_writer(block);
        block
    };
    let safe = on(&mut world, [0, 1, 2]);
    let at_risk = on(&mut world, [0, 7, 8]);
    world.pass(600);
    let (safe_slot, at_risk_slot) = (
        world.cluster.table.slot(safe).expect("known"),
        world.cluster.table.slot(at_risk).expect("known"),
    );
    let rank = |world: &World, slot| {
        let block = world.cluster.table.get(slot).expect("known");
        world
            .cluster
            .repair_rank(&world.cluster.holders(slot, block), 2)
    };
    assert!(rank(&world, at_risk_slot) < rank(&world, safe_slot));
}

/// However much a node has to delete, a repair that waits for it leaves with the next command.
#[test]
fn deletions_do_not_starve_repair() {
    let mut world = World::new(4, 4, options(), 2);
    let kept = write(&mut world, rules(2));
    let doomed: Vec<BlockId> = (0..60).map(|_| write(&mut world, rules(3))).collect();
    world.pass(600);
    for block in doomed {
        world.free(block);
    }
    let lost = *world.holders(kept).first().expect("it has replicas");
    world.reimage_all(lost.0 as usize);
    world.connect(lost.0 as usize);
    world.drain(lost.0 as usize);
    world.cluster.tick(world.now_ms, &mut world.rng);
    let mut repaired = false;
    for node in 0..4 {
        let waiting = !world.cluster.nodes[node as usize].replicate.is_empty();
        let first = world
            .cluster
            .next_commands(world.now_ms, NodeId(node), 1, &mut token);
        if waiting {
            assert!(
                matches!(first[..], [NodeCommand::Replicate { .. }]),
                "{first:?}"
            );
            repaired = true;
        }
    }
    assert!(repaired, "a repair is under way");
}

#[test]
fn budgets_change_while_repairs_wait() {
    let mut world = World::new(4, 4, options(), 4);
    let none = RepairChange {
        per_node: Some(0),
        urgent_per_node: Some(0),
        ..RepairChange::default()
    };
    change_limits(&mut world, none);
    for _ in 0..20 {
        world.write(3);
    }
    world.pass(600);
    world.reimage_all(1);
    world.connect(1);
    world.pass(20_000);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.repairs_done, 0);
    assert!(summary.under_replicated_blocks > 0);
    let plenty = RepairChange {
        per_node: Some(30),
        per_volume: Some(30),
        ..RepairChange::default()
    };
    change_limits(&mut world, plenty);
    assert_eq!(world.cluster.repair_limits().per_node, 30);
    world.pass(20_000);
    assert_eq!(
        world.cluster.summary(world.now_ms).under_replicated_blocks,
        0
    );
}

/// A volume serves and receives no more repairs than its own budget allows, however much its node
/// may.
#[test]
fn a_volume_takes_part_within_its_own_budget() {
    let mut world = World::new(4, 4, options(), 6);
    let limited = RepairChange {
        per_volume: Some(2),
        ..RepairChange::default()
    };
    change_limits(&mut world, limited);
    for _ in 0..30 {
        world.write(3);
    }
    world.pass(600);
    world.reimage_all(1);
    world.connect(1);
    world.pass(60_000);
    let mut counts = std::collections::BTreeMap::new();
    for (_, source, target) in &world.commanded {
        counts.entry(*source).or_insert([0, 0])[0] += 1;
        counts.entry(*target).or_insert([0, 0])[1] += 1;
    }
    assert!(!counts.is_empty());
    for (node, repairs) in counts {
        let volumes = world.nodes[node.0 as usize].disks.len();
        let within = repairs.iter().all(|&count| count <= 2 * volumes);
        assert!(within, "{node} served and received {repairs:?}");
    }
}

#[test]
fn a_report_tells_whether_a_failure_domain_can_be_lost_and_repaired() {
    let mut world = World::new(9, 4, options(), 7);
    for _ in 0..5 {
        write(&mut world, rules(2));
    }
    world.pass(600);
    let report = world.cluster.placement_report(&[]);
    let kinds: Vec<DomainKind> = report.losses.iter().map(|loss| loss.kind).collect();
    assert_eq!(kinds, DomainKind::ALL);
    let nodes = world.cluster.nodes(world.now_ms);
    let sum = |of: fn(&VolumeStatus) -> u64, within: &dyn Fn(&NodeStatus) -> bool| -> u64 {
        let nodes = nodes.iter().filter(|node| node.alive && within(node));
        nodes.flat_map(|node| &node.volumes).map(of).sum()
    };
    let used = |volume: &VolumeStatus| volume.used_bytes;
    let free = |volume: &VolumeStatus| volume.quota_bytes - volume.used_bytes;
    for loss in &report.losses {
        let within = |node: &NodeStatus| loss.kind.of(&node.server) == loss.name;
        assert_eq!(loss.used_bytes, sum(used, &within));
        let elsewhere = sum(free, &|node| !within(node));
        assert_eq!(loss.free_elsewhere_bytes, elsewhere);
        for other in &nodes {
            let left = |used: u64, free_elsewhere: u64| free_elsewhere as i64 - used as i64;
            let domain = |node: &NodeStatus| loss.kind.of(&node.server).to_owned();
            let beside = |node: &NodeStatus| domain(node) == domain(other);
            let of_other = left(sum(used, &beside), sum(free, &|node| !beside(node)));
            assert!(left(loss.used_bytes, loss.free_elsewhere_bytes) <= of_other);
        }
        let members = nodes.iter().filter(|node| within(node)).count();
        assert_eq!(loss.servers as usize, members);
    }
    // The data of a dead server cannot be lost again.
    let dead = report.losses[0].name.clone();
    let node = nodes.iter().position(|node| node.server.name == dead);
    world.disconnect(node.unwrap(), true);
    world.pass(2 * world.options.dead_after_ms);
    let losses = world.cluster.placement_report(&[]).losses;
    assert!(losses.iter().all(|loss| loss.name != dead), "{losses:?}");
}

#[test]
fn a_report_tells_why_a_block_is_where_it_is() {
    let mut world = world_of_nine(options());
    set_policy(&mut world, PolicyKind::Harvest);
    let block = write(&mut world, strict(3));
    world.pass(600);
    let report = world.cluster.placement_report(&[block, BlockId(999)]);
    assert_eq!(report.policy, "harvest");
    assert_eq!(report.cells.len(), 10);
    assert!(report.cells[..9].iter().all(|cell| cell.servers == 1));
    assert_eq!(report.tenants.len(), 9);
    let [place] = &report.blocks[..] else {
        panic!("{:?}", report.blocks);
    };
    assert_eq!(place.held.len(), 5);
    assert!(place.broken.is_empty());
    assert_eq!(place.replicas.len(), 3);
    for replica in &place.replicas {
        assert!(
            replica.shares.is_empty() && replica.state == "sealed",
            "{replica:?}"
        );
    }
}

#[test]
fn a_node_in_maintenance_is_away_without_repair() {
    let mut world = world_of_nine(options());
    for _ in 0..60 {
        write(&mut world, rules(2));
    }
    world.pass(600);
    let all: Vec<NodeId> = (0..9).map(NodeId).collect();
    let impact = world.cluster.maintenance_impact(&all);
    assert_eq!((impact.lost, impact.lost_blocks.len()), (60, 60));
    assert_eq!(world.cluster.maintenance_impact(&all[..1]).lost, 0);

    for node in [0, 1] {
        let until_ms = world.now_ms + 60_000;
        world
            .cluster
            .set_maintenance(world.now_ms, NodeId(node), Some(until_ms));
        world.disconnect(node as usize, true);
    }
    // Two of nine that fall silent together would be a storm.
    world.pass(50_000);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.nodes_in_maintenance, 2);
    assert_eq!((summary.nodes_alive, summary.nodes_known), (7, 9));
    assert_eq!(summary.under_replicated_blocks, 0);
    assert_eq!(summary.storm_remaining_ms, None);
    assert!(world.commanded.is_empty(), "nothing was repaired");
    for _ in 0..60 {
        let block = write(&mut world, rules(2));
        let pipeline = &world.blocks[&block].pipeline;
        assert!(!pipeline.contains(&NodeId(0)) && !pipeline.contains(&NodeId(1)));
    }

    // One is back in time; for the other, the time is over.
    world.connect(0);
    world.pass(60_000);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!((summary.nodes_alive, summary.nodes_in_maintenance), (8, 0));
    assert!(!world.commanded.is_empty());
    assert_eq!(summary.under_replicated_blocks, 0);
}

#[test]
fn a_node_that_stops_in_good_order_is_waited_for() {
    let mut world = world_of_nine(ClusterOptions {
        restart_wait_ms: 60_000,
        ..options()
    });
    for _ in 0..60 {
        write(&mut world, rules(3));
    }
    world.pass(600);
    let stop = |world: &mut World, node: u32| {
        world.cluster.stopping(world.now_ms, NodeId(node));
        world.disconnect(node as usize, true);
    };
    // It is back in time, and again like any other.
    stop(&mut world, 0);
    world.pass(50_000);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!((summary.nodes_alive, summary.nodes_in_maintenance), (8, 1));
    assert!(world.commanded.is_empty(), "nothing was repaired");
    world.connect(0);
    world.pass(600);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!((summary.nodes_alive, summary.nodes_in_maintenance), (9, 0));
    assert_eq!(summary.under_replicated_blocks, 0);

    // It does not come back: its blocks are repaired when the time is over.
    stop(&mut world, 0);
    world.pass(59_000);
    assert!(world.commanded.is_empty(), "nothing was repaired");
    world.pass(60_000);
    assert!(!world.commanded.is_empty());
    assert_eq!(
        world.cluster.summary(world.now_ms).under_replicated_blocks,
        0
    );
}

#[test]
fn a_node_that_stops_is_not_waited_for_where_that_leaves_one_replica() {
    let mut world = world_of_nine(options());
    let block = write(&mut world, rules(2));
    world.pass(600);
    let holders = world.holders(block);
    let node = *holders.first().expect("it has replicas");
    world.cluster.stopping(world.now_ms, node);
    world.disconnect(node.0 as usize, true);
    assert_eq!(world.cluster.maintenance_left_ms(world.now_ms, node), None);
    world.pass(60_000);
    assert!(!world.commanded.is_empty());
    assert_eq!(
        world.cluster.summary(world.now_ms).under_replicated_blocks,
        0
    );
}

#[test]
fn after_a_restart_blocks_wait_for_nodes_in_maintenance() {
    let mut world = world_of_nine(options());
    for _ in 0..60 {
        write(&mut world, rules(3));
    }
    world.pass(600);
    let until_ms = world.now_ms + 100_000;
    world
        .cluster
        .set_maintenance(world.now_ms, NodeId(0), Some(until_ms));
    world.restart_namenode();
    world
        .cluster
        .set_maintenance(world.now_ms, NodeId(0), Some(until_ms));
    for node in 1..9 {
        world.connect(node);
    }
    world.pass(30_000);
    let missing = world.cluster.summary(world.now_ms).under_replicated_blocks;
    assert!(missing > 0);
    assert!(world.commanded.is_empty(), "nothing was repaired");
    let faults = world.cluster.faults(world.now_ms, 100);
    assert_eq!(faults.len() as u64, missing);
    let waits = |fault: &BlockFault| fault.reason == FaultReason::Maintenance;
    assert!(faults.iter().all(waits), "{faults:?}");
    world.pass(100_000);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.under_replicated_blocks, 0);
    assert!(world.commanded.len() as u64 >= missing);
}
