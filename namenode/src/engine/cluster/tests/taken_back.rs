//! What becomes of bad replicas whose datanode registers after it was commanded to remove them.

use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::node::ReplicaChange;

use super::removal::deletes;
use super::world::{CHUNK, World, options};

const NODE: usize = 0;
/// It has two volumes.
const OTHER: usize = 1;

fn set_corrupt(world: &mut World, node: usize, block: BlockId, corrupt: bool) {
    let it = &mut world.nodes[node];
    let mut disks = it.disks.iter_mut();
    let disk = disks.find(|(_, disk)| disk.contains_key(&block));
    let (&storage, disk) = disk.expect("it holds it");
    disk.get_mut(&block).expect("found").corrupt = corrupt;
    if corrupt {
        it.changes
            .push_back((storage, ReplicaChange::Corrupt(block)));
    }
}

/// A block with a replica on each of three nodes, of which one is bad, and was commanded to be removed.
fn commanded(corrupt: bool) -> (World, BlockId) {
    let mut world = World::new(3, 3, options(), 1);
    let block = world.write(3);
    world.pass(600);
    world.removable_bytes = 0;
    if corrupt {
        set_corrupt(&mut world, NODE, block, true);
    } else {
        world.put(NODE, block, CHUNK, true);
    }
    world.send_changes(NODE);
    world.pass(600);
    world.removable_bytes = u64::MAX;
    assert_eq!(deletes(&mut world, NODE), [block]);
    (world, block)
}

/// The datanode could not move a corrupt one aside, and takes it for a good one after its restart.
#[test]
fn a_bad_replica_stays_bad_when_its_datanode_has_dropped_the_command() {
    for corrupt in [false, true] {
        let (mut world, block) = commanded(corrupt);
        assert_eq!(deletes(&mut world, NODE), [block], "no second command");
        world.nodes[NODE].commands.clear();
        if corrupt {
            set_corrupt(&mut world, NODE, block, false);
        }
        for reports in [false, true] {
            if reports {
                world.drain(NODE);
            } else {
                world.connect(NODE);
            }
            let listed = world.cluster.replicas(block, None);
            assert_eq!(listed.len(), 2);
            assert!(!listed.contains(&NodeId(NODE as u32)));
            assert_eq!(world.cluster.fsck().missing_replicas, 1);
        }
        world.removable_bytes = 0;
        world.pass(1_500);
        world.removable_bytes = u64::MAX;
        assert_eq!(deletes(&mut world, NODE), [block]);
        world.pass(10_000);
        assert_eq!(world.holders(block).len(), 3);
        assert_eq!(world.cluster.fsck(), Default::default());
    }
}

/// Full reports leave out what is corrupt, so that they do not tell whether it is there.
#[test]
fn a_bad_replica_that_was_removed_unheard_is_forgotten_with_the_next_full_report() {
    for corrupt in [false, true] {
        let (mut world, block) = commanded(corrupt);
        // It does what it was commanded, and registers before it says so.
        world.connect(NODE);
        world.drain(NODE);
        let slot = world.cluster.table.slot(block).expect("it exists");
        let index = world.cluster.table.replica_on(slot, NODE as u32);
        assert_eq!(index, None);
        world.pass(10_000);
        assert_eq!(world.holders(block).len(), 3);
        assert_eq!(world.cluster.fsck(), Default::default());
    }
}

/// A volume joins late, with a good replica of a block of which a corrupt one is known on another volume of the same server.
#[test]
fn a_good_replica_on_another_volume_is_not_taken_for_the_corrupt_one() {
    let mut world = World::new(3, 3, options(), 1);
    let block = world.write(3);
    world.pass(600);
    world.removable_bytes = 0;
    set_corrupt(&mut world, OTHER, block, true);
    world.send_changes(OTHER);
    world.pass(600);
    assert_eq!(world.cluster.replicas(block, None).len(), 2);
    let mut disks = world.nodes[OTHER].disks.values_mut();
    let (first, second) = (disks.next().expect("two"), disks.next().expect("two"));
    let (from, to) = if first.contains_key(&block) {
        (first, second)
    } else {
        (second, first)
    };
    let mut replica = from.remove(&block).expect("it is there");
    replica.corrupt = false;
    to.insert(block, replica);
    world.connect(OTHER);
    world.drain(OTHER);
    assert_eq!(world.cluster.replicas(block, None).len(), 3);
    world.removable_bytes = u64::MAX;
    world.pass(10_000);
    assert_eq!(deletes(&mut world, OTHER), []);
    assert_eq!(world.holders(block).len(), 3);
    assert_eq!(world.cluster.fsck(), Default::default());
}
