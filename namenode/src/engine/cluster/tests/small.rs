//! Clusters of few servers: each goes on with what it has, says what is missing, and mends it.

use harvestfs_placement::PolicyKind;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::outlook::{WriteOutlook, WriteVerdict};
use harvestfs_protocol::types::Durability;

use super::places::{set_policy, strict, write};
use super::world::{World, options, rules};
use crate::engine::cluster::{Cluster, ClusterOptions};

/// What is wrong with the first server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Busy,
    Dead,
    Drained,
    Full,
}

const FAULTS: [Fault; 4] = [Fault::Busy, Fault::Dead, Fault::Drained, Fault::Full];
const SIZES: [u32; 6] = [1, 2, 3, 4, 5, 9];
/// Time until no further servers are expected any more.
const GROWN_MS: u64 = 1_500;

/// Time until misplaced replicas have been tried again.
const MENDED_MS: u64 = 2_000_000;

/// Each server is of its own owner and in its own rack.
fn small(servers: u32, options: ClusterOptions) -> World {
    let mut world = World::new(servers, servers, options, 11);
    set_policy(&mut world, PolicyKind::Harvest);
    world.pass(GROWN_MS);
    world
}

fn outlook(world: &World) -> WriteOutlook {
    world.cluster.write_outlook(&strict(3))
}

fn place(world: &mut World, exclude: &[NodeId]) -> Result<usize, FsError> {
    let (now_ms, rng) = (world.now_ms, &mut world.rng);
    let placed = world
        .cluster
        .place(now_ms, 1, &strict(3), exclude, None, rng);
    placed.map(|pipelines| pipelines[0].len())
}

fn set_fault(world: &mut World, fault: Fault, on: bool) {
    match fault {
        Fault::Busy => world.nodes[0].busy = on,
        Fault::Dead if on => world.stop(0),
        Fault::Dead => world.start(0),
        Fault::Drained => world.cluster.set_draining(world.now_ms, NodeId(0), on),
        Fault::Full if on => {
            let volumes = world.volumes(0);
            let quotas = volumes.iter().map(|it| (it.storage, (it.used_bytes, 0)));
            world.nodes[0].quotas = quotas.collect();
        }
        Fault::Full => world.nodes[0].quotas.clear(),
    }
    world.pass(600);
}

/// Checks that what status, `df`, `doctor` and the page show agrees with what happens to a write.
fn check_outlook(world: &mut World, possible: usize) -> WriteVerdict {
    let outlook = outlook(world);
    let (verdict, trouble) = (outlook.verdict, outlook.trouble());
    let placed = place(world, &[]);
    // What a writer of fewer waits for.
    assert_eq!(world.cluster.due_of_new(&strict(3)) as usize, possible);
    let is_right = match &placed {
        Ok(count) if *count == possible => {
            let is_whole = possible == 3 && outlook.not_kept.is_empty();
            verdict == [WriteVerdict::Curtailed, WriteVerdict::Whole][usize::from(is_whole)]
        }
        Ok(_) => verdict == WriteVerdict::Fewer,
        Err(FsError::TooFewDatanodes(shortage)) => {
            assert_eq!(shortage.unavailable, outlook.unavailable);
            verdict == WriteVerdict::Waits
        }
        Err(FsError::InsufficientDiversity { .. }) => verdict == WriteVerdict::NotDiverse,
        Err(FsError::NoSpace) => verdict == WriteVerdict::Full,
        Err(_) => false,
    };
    assert!(is_right, "{placed:?} but {outlook:?}");
    assert_eq!(usize::from(outlook.possible), possible);
    assert_eq!(outlook.writable_bytes > 0, placed.is_ok(), "{outlook:?}");
    assert_eq!(trouble.is_none(), verdict == WriteVerdict::Whole);
    assert!(trouble.is_none_or(|it| it.stops_writes == placed.is_err()));
    verdict
}

fn assert_whole(world: &mut World, blocks: &[BlockId], possible: usize) {
    world.pass(MENDED_MS);
    for block in blocks {
        assert_eq!(world.holders(*block).len(), possible, "{block}");
    }
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!(summary.under_replicated_blocks, 0);
    assert_eq!(summary.misplaced_blocks, 0);
    let curtailed = if possible < 3 { blocks.len() } else { 0 };
    assert_eq!(summary.curtailed_blocks, curtailed as u64);
    check_outlook(world, possible);
}

#[test]
fn each_small_cluster_goes_on_without_one_server_and_mends_itself() {
    for servers in SIZES {
        for fault in FAULTS {
            let possible = (servers as usize).min(3);
            let mut world = small(servers, options());
            let mut blocks = vec![write(&mut world, strict(3))];
            world.pass(600);
            let verdict = check_outlook(&mut world, possible);
            let well = if servers < 3 {
                WriteVerdict::Curtailed
            } else {
                WriteVerdict::Whole
            };
            assert_eq!(verdict, well, "{servers} servers");

            set_fault(&mut world, fault, true);
            let verdict = check_outlook(&mut world, possible);
            let expected: &[WriteVerdict] = match (servers, fault) {
                (1, Fault::Full) => &[WriteVerdict::Full],
                (1 | 2, Fault::Busy | Fault::Dead | Fault::Drained) => &[WriteVerdict::Waits],
                (3, Fault::Busy | Fault::Dead | Fault::Drained) => &[WriteVerdict::Fewer],
                (2 | 3, Fault::Full) => &[WriteVerdict::NotDiverse],
                // Which server it is decides whether rows and columns can be kept without it.
                (4 | 5, Fault::Full) => &[WriteVerdict::NotDiverse, WriteVerdict::Whole],
                (4 | 5, _) => &[WriteVerdict::Fewer, WriteVerdict::Whole],
                _ => &[WriteVerdict::Whole],
            };
            assert!(
                expected.contains(&verdict),
                "{servers} servers, {fault:?}: {verdict:?}"
            );
            if place(&mut world, &[]).is_ok() {
                blocks.extend((0..3).map(|_| write(&mut world, strict(3))));
            }
            world.pass(600);

            set_fault(&mut world, fault, false);
            assert_whole(&mut world, &blocks, possible);
        }
    }
}

#[test]
fn a_writer_goes_on_without_a_server_that_failed_it() {
    let mut world = small(3, options());
    assert_eq!(world.cluster.needed_by_new(&strict(3)), 2);
    assert_eq!(world.cluster.needed_by_new(&strict(1)), 1);
    assert_eq!(place(&mut world, &[]), Ok(3));
    assert_eq!(place(&mut world, &[NodeId(1)]), Ok(2));
    let refused = place(&mut world, &[NodeId(1), NodeId(2)]);
    assert!(
        matches!(&refused, Err(FsError::TooFewDatanodes(it)) if it.needed == 2 && it.placeable == 1),
        "{refused:?}"
    );
}

#[test]
fn fewest_replicas_are_what_the_operator_says() {
    let mut world = small(
        3,
        ClusterOptions {
            min_write_replicas: 1,
            ..options()
        },
    );
    world.stop(0);
    world.stop(1);
    world.pass(600);
    assert_eq!(place(&mut world, &[]), Ok(1));
    assert_eq!(outlook(&world).verdict, WriteVerdict::Fewer);
    let mut world = small(
        3,
        ClusterOptions {
            min_write_replicas: 3,
            ..options()
        },
    );
    world.nodes[0].busy = true;
    world.pass(600);
    assert!(matches!(
        place(&mut world, &[]),
        Err(FsError::TooFewDatanodes(it)) if it.is_of_busy_ones()
    ));
}

#[test]
fn a_cluster_grows_and_its_blocks_with_it() {
    let mut world = small(3, options());
    world.cluster = Cluster::new(
        options(),
        PolicyKind::Harvest.build(&Default::default()),
        world.now_ms,
    );
    let mut blocks = Vec::new();
    for node in 0..3 {
        world.nodes[node].connected = false;
    }
    assert!(matches!(
        place(&mut world, &[]),
        Err(FsError::TooFewDatanodes(_))
    ));
    for node in 0..3 {
        world.connect(node);
        world.drain(node);
        world.pass(300);
        if node == 0 {
            // Others may be about to register.
            assert!(matches!(
                place(&mut world, &[]),
                Err(FsError::TooFewDatanodes(_))
            ));
            assert_eq!(outlook(&world).verdict, WriteVerdict::Waits);
        }
        world.pass(GROWN_MS);
        blocks.push(write(&mut world, strict(3)));
        assert_whole(&mut world, &blocks, node + 1);
    }
}

#[test]
fn what_the_servers_share_is_not_kept_apart_and_said() {
    let mut world = World::new(4, 1, options(), 1);
    set_policy(&mut world, PolicyKind::Harvest);
    world.pass(GROWN_MS);
    let block = write(&mut world, strict(3));
    world.pass(600);
    let now = outlook(&world);
    assert_eq!(now.verdict, WriteVerdict::Curtailed);
    assert!(now.not_kept.contains(&"rack".to_owned()), "{now:?}");
    assert!(!now.not_kept.contains(&"environment".to_owned()), "{now:?}");
    let place = world.cluster.block_place(block).unwrap();
    assert!(place.given_up.contains(&"rack".to_owned()), "{place:?}");
    assert!(place.broken.is_empty(), "{place:?}");
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!((summary.curtailed_blocks, summary.misplaced_blocks), (1, 0));

    // With a rack for each, the replicas move apart.
    world.racks = 4;
    for node in 0..4 {
        world.connect(node);
        world.drain(node);
    }
    world.pass(MENDED_MS);
    let summary = world.cluster.summary(world.now_ms);
    assert_eq!((summary.curtailed_blocks, summary.misplaced_blocks), (0, 0));
    assert_eq!(outlook(&world).verdict, WriteVerdict::Whole);
}

#[test]
fn a_decommissioned_server_is_no_longer_missed() {
    for (servers, possible) in [(4, 3), (3, 2)] {
        let mut world = small(servers, options());
        let block = write(&mut world, strict(3));
        world.cluster.set_draining(world.now_ms, NodeId(0), true);
        world.pass(60_000);
        world.stop(0);
        world.pass(30_000);
        check_outlook(&mut world, possible);
        let summary = world.cluster.summary(world.now_ms);
        assert_eq!(summary.under_replicated_blocks, 0, "{servers}");
        let is_curtailed = outlook(&world).verdict == WriteVerdict::Curtailed;
        assert_eq!(summary.curtailed_blocks, u64::from(is_curtailed));
        assert!(is_curtailed || possible == 3);
        assert!(world.holders(block).len() >= possible);
    }
}

#[test]
fn files_that_prefer_space_still_need_the_fewest_replicas() {
    let mut world = small(3, options());
    let place = |world: &mut World| {
        let placed = world
            .cluster
            .place(world.now_ms, 1, &rules(3), &[], None, &mut world.rng);
        placed.map(|pipelines| pipelines[0].len())
    };
    assert_eq!(rules(3).durability, Durability::Space);
    world.stop(0);
    world.pass(600);
    assert_eq!(place(&mut world), Ok(2));
    world.stop(1);
    world.pass(600);
    assert!(matches!(
        place(&mut world),
        Err(FsError::TooFewDatanodes(_))
    ));
    // A full server is not waited for: space comes before the number of replicas.
    world.start(0);
    world.start(1);
    world.pass(600);
    set_fault(&mut world, Fault::Full, true);
    assert_eq!(place(&mut world), Ok(2));
}
