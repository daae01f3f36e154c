//! What observers see.

use std::collections::BTreeSet;

use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::placement::DomainKind;

use super::world::{World, options};
use crate::engine::cluster::{ClusterOptions, FaultReason, Happening, RepairEnd};

/// The blocks whose loss was noted since the last call.
fn take_losses(world: &mut World) -> Vec<BlockId> {
    let happenings = world.cluster.take_happenings();
    let losses = happenings.filter_map(|it| match it {
        Happening::Lost { block } => Some(block),
        _ => None,
    });
    losses.collect()
}

#[test]
fn a_reimage_is_reported_and_so_is_each_repair_that_follows() {
    let mut world = World::new(4, 4, options(), 1);
    for _ in 0..20 {
        world.write(2);
    }
    world.pass(300);
    assert_eq!(world.cluster.take_happenings().count(), 0);
    let on_it = world
        .blocks
        .keys()
        .filter(|block| world.holders(**block).contains(&NodeId(0)));
    let held = on_it.count() as u64;
    world.reimage_all(0);
    world.connect(0);
    world.drain(0);
    world.cluster.tick(world.now_ms, &mut world.rng);

    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.missing_by_left, [0, held, 0, 0]);
    assert_eq!(summary.under_replicated_blocks, held);
    let at_risk = world.cluster.blocks_at_risk(world.now_ms, 1_000);
    assert_eq!(at_risk.len() as u64, held);
    assert!(at_risk.iter().all(|it| (it.left, it.wanted) == (1, 2)));
    assert_eq!(world.cluster.blocks_at_risk(world.now_ms, 2).len(), 2);
    // As `fsck` does; of what is under way more is said.
    let faults = world.cluster.faults(world.now_ms, 1_000);
    assert_eq!(faults.len(), at_risk.len());
    for fault in faults {
        let listed = at_risk.iter().find(|it| it.block == fault.block);
        let why = listed.map(|it| it.why.clone()).unwrap_or_default();
        if fault.reason == FaultReason::UnderWay {
            assert!(why.contains("is being copied from"), "{why}");
        } else {
            assert_eq!(why, fault.reason.to_string());
        }
    }

    world.pass(2_000);
    let oldest_ms = world.cluster.oldest_repair_ms(world.now_ms);
    let waiting = world.cluster.summary(world.now_ms).repairs_waiting;
    assert_eq!(oldest_ms.is_some(), waiting > 0);
    assert!(oldest_ms.is_none_or(|oldest_ms| oldest_ms <= 2_000));
    world.pass(60_000);
    assert_eq!(world.cluster.oldest_repair_ms(world.now_ms), None);
    assert!(world.cluster.blocks_at_risk(world.now_ms, 10).is_empty());
    let happenings: Vec<Happening> = world.cluster.take_happenings().collect();
    let reimaged = Happening::Reimaged {
        node: NodeId(0),
        replicas: held,
    };
    assert_eq!(happenings[0], reimaged);
    let repaired = happenings.iter().filter(|it| {
        let Happening::RepairEnded { is_move, end, .. } = it else {
            return false;
        };
        !is_move && *end == RepairEnd::Done
    });
    assert_eq!(repaired.count() as u64, held);
}

#[test]
fn what_no_server_has_any_more_is_reported_and_heads_the_list() {
    let mut world = World::new(4, 4, options(), 1);
    let blocks: Vec<_> = (0..10).map(|_| world.write(1)).collect();
    world.pass(300);
    let lost: Vec<_> = blocks
        .into_iter()
        .filter(|block| world.holders(*block).contains(&NodeId(2)))
        .collect();
    assert!(!lost.is_empty(), "the test loses something");
    world.stop(2);
    world.pass(10_000);
    let happenings: Vec<Happening> = world.cluster.take_happenings().collect();
    assert!(
        happenings.contains(&Happening::Died { node: NodeId(2) }),
        "{happenings:?}"
    );
    for block in &lost {
        assert!(
            happenings.contains(&Happening::Lost { block: *block }),
            "{happenings:?}"
        );
    }
    let at_risk = world.cluster.blocks_at_risk(world.now_ms, 100);
    let mut listed: Vec<_> = at_risk.iter().map(|it| it.block).collect();
    listed.sort_unstable();
    assert_eq!(listed, lost);
    assert!(
        at_risk
            .iter()
            .all(|it| it.left == 0 && it.why.contains("no datanode"))
    );
}

#[test]
fn a_short_list_of_what_is_at_risk_begins_as_a_long_one() {
    let mut world = World::new(6, 6, options(), 1);
    for _ in 0..200 {
        world.write(2);
    }
    world.pass(300);
    // What was on the second one has waited for less time, and may come first in the tables. Nothing is
    // copied meanwhile.
    for node in 0..2 {
        world.reimage_all(node);
        world.connect(node);
        world.drain(node);
        world.now_ms += 100;
        world.cluster.tick(world.now_ms, &mut world.rng);
    }
    let all = world.cluster.blocks_at_risk(world.now_ms, 1_000);
    let count = |kind: &str| all.iter().filter(|it| it.why.contains(kind)).count();
    assert!(count("no datanode") > 0 && count("is being copied from") > 1);
    assert!(count("it waits for its turn") > 1, "{all:?}");
    for max in 0..all.len() {
        let first = world.cluster.blocks_at_risk(world.now_ms, max);
        assert_eq!(first, all[..max]);
    }
}

#[test]
fn what_is_found_lost_after_a_start_is_reported_once() {
    // So few blocks are looked at with each tick that others are lost meanwhile.
    let options = ClusterOptions {
        work_per_tick: 2,
        ..options()
    };
    let mut world = World::new(4, 4, options, 1);
    let blocks: Vec<_> = (0..20).map(|_| world.write(1)).collect();
    world.pass(300);
    let on = |world: &World, node: u32| -> BTreeSet<BlockId> {
        let holds = |block: &BlockId| world.holders(*block).contains(&NodeId(node));
        blocks.iter().copied().filter(holds).collect()
    };
    let mut lost = on(&world, 2);
    let later = on(&world, 3);
    assert!(!lost.is_empty() && !later.is_empty());
    world.stop(2);
    world.restart_namenode();
    for node in [0, 1, 3] {
        world.connect(node);
        world.drain(node);
    }
    while !world.cluster.summary(world.now_ms).ready {
        assert!(take_losses(&mut world).is_empty());
        world.pass(100);
    }
    world.reimage_all(3);
    world.connect(3);
    world.drain(3);
    lost.extend(later);
    world.pass(10_000);
    let mut noted = take_losses(&mut world);
    noted.sort_unstable();
    assert_eq!(noted, Vec::from_iter(lost));
}

#[test]
fn of_a_flood_the_last_is_reported() {
    let mut world = World::new(3, 3, options(), 1);
    for _ in 0..400 {
        world.write(1);
    }
    world.pass(300);
    world.stop(0);
    world.stop(1);
    world.stop(2);
    world.pass(10_000);
    assert_eq!(world.cluster.take_happenings().count(), 256);
    assert_eq!(world.cluster.take_happenings().count(), 0);
}

#[test]
fn no_sizes_that_datanodes_report_are_too_large_to_add_up() {
    let mut world = World::new(4, 2, options(), 1);
    // One server of each rack is full, and one is empty.
    for node in 0..4 {
        let (server, mut volumes) = (world.server(node), world.volumes(node));
        for volume in &mut volumes {
            volume.quota_bytes = u64::MAX;
            volume.used_bytes = if node < 2 { u64::MAX } else { 0 };
        }
        let id = world.nodes[node].id;
        world.cluster.register(world.now_ms, id, &server, &volumes);
    }
    let losses = world.cluster.placement_report(&[]).losses;
    let rack = losses.iter().find(|it| it.kind == DomainKind::Rack);
    let bytes = rack.map(|it| (it.used_bytes, it.free_elsewhere_bytes));
    // Nothing says that the other rack has more space than this one.
    assert_eq!(bytes, Some((u64::MAX, 0)), "{losses:?}");
    let wave = world.cluster.wave_outlook(&[NodeId(0), NodeId(1)]);
    let bytes = (wave.used_bytes, wave.free_elsewhere_bytes);
    assert_eq!(bytes, (u64::MAX, u64::MAX));
}
