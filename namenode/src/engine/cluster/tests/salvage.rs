//! Blocks whose end no server had stored when all lost their power.

use harvestfs_protocol::ids::{BlockId, NodeId};

use super::world::{CHUNK, World, options, rules};
use crate::engine::cluster::{Happening, ShortenedBlock};

/// A block of five chunks, written to three nodes by a writer that is gone, and the nodes, which have this many
/// chunks each after a loss of power.
fn after_power_loss(world: &mut World, chunks: [u64; 3]) -> (BlockId, Vec<NodeId>) {
    let block = world.allocate(rules(3)).expect("room is left");
    world.append(block, 5 * CHUNK);
    world.end_writer(block);
    let nodes = world.blocks[&block].pipeline.clone();
    for node in 0..world.nodes.len() {
        world.stop(node);
    }
    for (node, chunks) in nodes.iter().zip(chunks) {
        let disks = &mut world.nodes[node.0 as usize].disks;
        let replica = disks.values_mut().find_map(|disk| disk.get_mut(&block));
        replica.expect("it was written there").length_bytes = chunks * CHUNK;
    }
    world.restart_namenode();
    (block, nodes)
}

#[test]
fn what_is_left_of_a_block_is_sealed_and_repaired() {
    let mut world = World::new(6, 6, options(), 1);
    let (block, nodes) = after_power_loss(&mut world, [2, 4, 3]);
    for node in 0..world.nodes.len() {
        world.start(node);
    }
    world.pass(60_000);
    let (left_bytes, committed_bytes) = (4 * CHUNK as u32, 5 * CHUNK as u32);
    let shortened = ShortenedBlock {
        block,
        left_bytes,
        committed_bytes,
    };
    assert_eq!(world.cluster.shortened().collect::<Vec<_>>(), [shortened]);
    let happened: Vec<_> = world.cluster.take_happenings().collect();
    assert!(happened.contains(&Happening::Shortened {
        block,
        left_bytes,
        committed_bytes,
    }));
    let replicas = world.nodes.iter().filter_map(|node| node.replica(block));
    let replicas: Vec<_> = replicas.map(|it| (it.length_bytes, it.sealed)).collect();
    assert_eq!(replicas, [(4 * CHUNK, true); 3]);
    // One of them can be lost now.
    let node = nodes[1].0 as usize;
    world.stop(node);
    world.reimage_all(node);
    world.start(node);
    world.pass(60_000);
    assert_eq!(world.cluster.fsck(), Default::default());
}

/// Its server lost all of it: the replica is sealed empty, and makes room for a replica of what is left.
#[test]
fn an_empty_replica_of_a_shortened_block_is_removed() {
    let mut world = World::new(3, 3, options(), 3);
    let (block, nodes) = after_power_loss(&mut world, [2, 0, 2]);
    let empty = nodes[1].0 as usize;
    for node in (0..world.nodes.len()).filter(|&node| node != empty) {
        world.start(node);
    }
    world.pass(60_000);
    assert_eq!(world.cluster.shortened().count(), 1);
    world.start(empty);
    world.pass(60_000);
    let replicas = world.nodes.iter().filter_map(|node| node.replica(block));
    let replicas: Vec<_> = replicas.map(|it| (it.length_bytes, it.sealed)).collect();
    assert_eq!(replicas, [(2 * CHUNK, true); 3]);
}

/// What can still be read of the corrupt replica may be all that is left of the end.
#[test]
fn a_corrupt_replica_of_a_shortened_block_is_kept_and_read_from_last() {
    let mut world = World::new(6, 6, options(), 4);
    let (block, nodes) = after_power_loss(&mut world, [3, 5, 3]);
    let corrupt = nodes[1].0 as usize;
    let disks = &mut world.nodes[corrupt].disks;
    let replica = disks.values_mut().find_map(|disk| disk.get_mut(&block));
    replica.expect("it was written there").corrupt = true;
    for node in 0..world.nodes.len() {
        world.start(node);
    }
    world.pass(60_000);
    assert_eq!(world.cluster.shortened().count(), 1);
    assert!(world.nodes[corrupt].replica(block).is_some());
    let offered = world.cluster.replicas(block, None);
    assert_eq!((offered.len(), offered.last()), (4, Some(&nodes[1])));
    assert_eq!(world.cluster.fsck(), Default::default());
}

#[test]
fn a_server_that_has_more_and_is_back_late_makes_the_block_longer_again() {
    let mut world = World::new(6, 6, options(), 2);
    let (block, nodes) = after_power_loss(&mut world, [2, 5, 3]);
    let late = nodes[1].0 as usize;
    for node in (0..world.nodes.len()).filter(|&node| node != late) {
        world.start(node);
    }
    world.pass(60_000);
    assert_eq!(world.cluster.shortened().count(), 1);
    world.start(late);
    world.pass(60_000);
    assert_eq!(world.cluster.shortened().count(), 0);
    assert_eq!(world.cluster.fsck(), Default::default());
    let replicas = world.nodes.iter().filter_map(|node| node.replica(block));
    let replicas: Vec<_> = replicas.map(|it| (it.length_bytes, it.sealed)).collect();
    assert_eq!(replicas, [(5 * CHUNK, true); 3]);
}
