//! Random histories: servers die, come back with or without their data, messages are late, lost
//! or repeated, blocks come and go. Nothing is ever lost by what the engine commands, and when the
//! faults stop every block gets the replicas it wants and nothing else is left.

use std::collections::BTreeSet;

use harvestfs_placement::{PolicyKind, PolicyOptions};
use harvestfs_protocol::ids::{BlockId, NodeId, StorageId};
use harvestfs_protocol::node::ReplicaChange;
use rand::RngExt;
use rand::seq::IndexedRandom;

use super::datanode::Datanode;
use super::world::{BLOCK_BYTES, CHUNK, FileBlock, World, options, rules};
use crate::engine::cluster::settle::Totals;
use crate::engine::cluster::table::ReplicaState;
use crate::engine::cluster::{ClusterOptions, FsckCounts};
use crate::engine::namespace::BlockChange;

/// Histories in a normal run; a number in [`SEEDS_VARIABLE`] asks for more.
const SEEDS: u64 = 200;
const STEPS: usize = 1_200;
const SEED_VARIABLE: &str = "HARVESTFS_TEST_SEED";
const SEEDS_VARIABLE: &str = "HARVESTFS_TEST_SEEDS";

/// Says how to replay a history that fails.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "to replay: {SEED_VARIABLE}={} cargo test -p harvestfs-namenode cluster::tests::model",
                self.0
            );
        }
    }
}

#[test]
fn nothing_is_lost_and_all_is_mended_when_faults_stop() {
    let number = |name| -> Option<u64> {
        let value = std::env::var(name).ok()?;
        Some(value.parse().expect("the variable is a number"))
    };
    let all = 0..number(SEEDS_VARIABLE).unwrap_or(SEEDS);
    for seed in number(SEED_VARIABLE).map_or(all, |seed| seed..seed + 1) {
        let _replay = Replay(seed);
        history(seed);
    }
}

/// The same seed gives the same history, so that a failure can be replayed.
#[test]
fn histories_are_deterministic() {
    let trace = |seed| {
        let mut world = new_world(seed);
        let mut trace = Vec::new();
        for _ in 0..300 {
            step(&mut world);
            trace.push(world.cluster.summary(world.now_ms));
        }
        trace
    };
    assert_eq!(trace(5), trace(5));
}

fn new_world(seed: u64) -> World {
    let small = seed.is_multiple_of(3);
    let options = ClusterOptions {
        // Little work per tick, so that what is spread over ticks is interrupted.
        work_per_tick: if small { 3 } else { 10_000 },
        repairs_per_window: if small { 12 } else { 30 },
        urgent_repairs_per_window: if small { 12 } else { 300 },
        deletes_per_command_max: if small { 2 } else { 1_000 },
        repair_delay_ms: if seed.is_multiple_of(2) { 0 } else { 400 },
        strict_repair_wait_ms: 20_000,
        move_retry_ms: 5_000,
        // A short grace tempts to remove what is needed soon.
        excess_grace_ms: if seed % 4 < 2 { 200 } else { 2_000 },
        ..options()
    };
    let racks = 2 + (seed % 5 > 2) as u32;
    let mut world = World::new(6 + (seed % 4) as u32, racks, options, seed);
    if small {
        world.removable_bytes = 2 * CHUNK;
    }
    world
}

fn history(seed: u64) {
    let mut world = new_world(seed);
    for _ in 0..STEPS {
        step(&mut world);
        check_tables(&world);
        check_survival(&world);
    }
    heal(&mut world);
    for _ in 0..400 {
        world.pass(5_000);
        check_tables(&world);
        check_survival(&world);
        if unmended(&world).is_none() {
            return;
        }
    }
    panic!("{}", unmended(&world).unwrap_or_default());
}

/// Kinds of steps, by how often they come in a calm history.
const KINDS: std::ops::Range<u32> = 0..200;
/// Those of them with which nodes come and go.
const COMING_AND_GOING: std::ops::Range<u32> = 172..191;

fn step(world: &mut World) {
    let node = world.rng.random_range(0..world.nodes.len());
    let restless = world.racks == 2 && world.rng.random_bool(0.15);
    let kinds = if restless { COMING_AND_GOING } else { KINDS };
    match world.rng.random_range(kinds) {
        0..50 => {
            world.now_ms += world.rng.random_range(1..200);
            let now_ms = world.now_ms;
            world.cluster.tick(now_ms, &mut world.rng);
        }
        50..100 => {
            let arrives = world.rng.random_bool(0.8);
            while !world.nodes[node].commands.is_empty() {
                world.execute(node);
            }
            world.send_changes(node);
            world.heartbeat(node, arrives);
        }
        100..115 => world.send_part(node),
        115..130 => world.send_changes(node),
        130..140 => world.execute(node),
        140..143 => repeat_changes(world, node),
        143..154 => {
            let replication = world.rng.random_range(1..=4);
            if world.blocks.len() < 40 {
                world.allocate(rules(replication));
            }
        }
        154..164 => write(world),
        164..168 => {
            if let Some(block) = any_block(world, |it| !it.sealed) {
                match world.rng.random_range(0..10) {
                    0..5 => world.seal_by_writer(block),
                    5..7 => world.seal_by_writer_cut_off(block),
                    _ => world.end_writer(block),
                }
            }
        }
        168..170 => {
            if let Some(block) = any_block(world, |_| true) {
                world.free(block);
            }
        }
        170..172 => change_rules(world),
        172..174 => {
            let notices = world.rng.random_bool(0.5);
            world.disconnect(node, notices);
        }
        174..177 => stop(world, node),
        177..183 => world.start(node),
        183..187 => {
            if world.nodes[node].up && !world.nodes[node].connected {
                world.connect(node);
            }
        }
        187..191 => reimage(world, node),
        191..194 => spoil(world, node),
        194..196 => {
            // A reader is wrong about a replica, or the datanode did not answer it.
            if let Some(block) = any_block(world, |_| true) {
                let corrupt = world.rng.random_bool(0.5);
                let (now_ms, id) = (world.now_ms, world.nodes[node].id);
                world.cluster.report_bad_replica(now_ms, block, id, corrupt);
            }
        }
        196 => world.nodes[node].busy ^= true,
        197 => {
            let kind = *PolicyKind::ALL
                .choose(&mut world.rng)
                .expect("there are policies");
            let policy = kind.build(&PolicyOptions::default());
            world.cluster.set_policy(world.now_ms, policy);
        }
        198 => toggle_disk(world, node),
        199 if world.rng.random_bool(0.1) => lose_power(world),
        _ => {
            if world.rng.random_bool(0.2) {
                world.restart_namenode();
            }
        }
    }
}

fn any_block(
    world: &mut World,
    wanted: impl Fn(&super::world::FileBlock) -> bool,
) -> Option<BlockId> {
    let blocks = world.blocks.iter().filter(|(_, it)| wanted(it));
    let blocks: Vec<BlockId> = blocks.map(|(block, _)| *block).collect();
    blocks.choose(&mut world.rng).copied()
}

fn write(world: &mut World) {
    let open = |it: &super::world::FileBlock| !it.sealed && it.committed_bytes < BLOCK_BYTES / 2;
    let Some(block) = any_block(world, open) else {
        return;
    };
    let bytes = world.rng.random_range(1..4 * CHUNK);
    world.append(block, bytes.next_multiple_of(CHUNK));
    let it = world.blocks.get(&block).cloned();
    // Sometimes a node has bytes that were never acknowledged.
    if let Some(it) = it
        && !it.sealed
        && world.rng.random_bool(0.3)
        && let Some(node) = it.pipeline.first().map(|node| node.0 as usize)
        && world.nodes[node].up
    {
        world.put(node, block, it.committed_bytes + CHUNK, false);
    }
}

fn change_rules(world: &mut World) {
    let replication = world.rng.random_range(1..=4);
    if let Some(block) = any_block(world, |_| true) {
        let rules = rules(replication);
        world.change(&BlockChange::RulesChanged { block, rules });
        if let Some(it) = world.blocks.get_mut(&block) {
            it.rules = rules;
        }
    }
}

fn repeat_changes(world: &mut World, node: usize) {
    let again = world.nodes[node].changes.clone();
    world.send_changes(node);
    if world.nodes[node].connected && world.nodes[node].changes.is_empty() {
        world.nodes[node].changes = again;
        world.send_changes(node);
    }
}

/// Whether every block but those that `spared` names survives the loss of one replica.
fn survives(world: &World, node: NodeId, block: BlockId) -> bool {
    let Some(it) = world.blocks.get(&block) else {
        return true;
    };
    let mut left = world.lasting_holders(block);
    left.remove(&node);
    it.committed_bytes == 0 || !left.is_empty()
}

/// A process ends, and with it the bytes that were not on stable storage yet.
fn stop(world: &mut World, node: usize) {
    world.stop(node);
    let id = world.nodes[node].id;
    let storages: Vec<StorageId> = world.nodes[node].disks.keys().copied().collect();
    for storage in storages {
        let blocks: Vec<BlockId> = world.nodes[node].disks[&storage].keys().copied().collect();
        for block in blocks {
            if survives(world, id, block)
                && world.rng.random_bool(0.3)
                && let Some(disk) = world.nodes[node].disks.get_mut(&storage)
                && let Some(replica) = disk.get_mut(&block)
                && !replica.sealed
            {
                replica.length_bytes = replica.length_bytes.saturating_sub(CHUNK);
            }
        }
    }
}

/// All servers lose their power, writers and the namenode too, and what was not on stable storage yet. Of each block, one
/// replica at least keeps something.
fn lose_power(world: &mut World) {
    while let Some(block) = any_block(world, |it| !it.sealed) {
        world.end_writer(block);
    }
    for node in 0..world.nodes.len() {
        world.stop(node);
    }
    for (block, it) in &mut world.blocks {
        let mut replicas = Vec::new();
        for Datanode { disks, sick, .. } in &mut world.nodes {
            let healthy = disks.iter_mut().filter(|(disk, _)| !sick.contains(disk));
            replicas.extend(healthy.filter_map(|(_, disk)| disk.get_mut(block)));
        }
        let mut is_spared = false;
        for replica in &mut replicas {
            if !replica.sealed && world.rng.random_bool(0.7) {
                let least = if is_spared || replica.corrupt {
                    0
                } else {
                    CHUNK
                };
                is_spared |= !replica.corrupt;
                let most = replica.length_bytes.max(least);
                let left = world.rng.random_range(least..=most);
                replica.length_bytes = left.next_multiple_of(CHUNK).min(replica.length_bytes);
            }
        }
        let good = replicas.iter().filter(|replica| !replica.corrupt);
        let longest = good.map(|replica| replica.length_bytes).max().unwrap_or(0);
        let lost = it.committed_bytes.saturating_sub(longest);
        it.committed_bytes -= lost;
        it.lost_bytes += lost;
    }
    world.restart_namenode();
}

/// A stopped server's disk is formatted, unless that would take the last good replica of a block.
fn reimage(world: &mut World, node: usize) {
    let it = &world.nodes[node];
    // Longer than the engine may believe in a node that it does not hear of.
    let silent_ms = world.now_ms - it.silent_since_ms;
    if it.up || it.connected || silent_ms <= world.options.stale_after_ms {
        return;
    }
    let storages: Vec<StorageId> = it.disks.keys().copied().collect();
    for storage in storages {
        let it = &world.nodes[node];
        let mut blocks = it.disks[&storage].keys();
        if blocks.all(|block| survives(world, it.id, *block)) && world.rng.random_bool(0.8) {
            world.reimage(node, storage);
        }
    }
}

/// A replica on a connected node rots and the scrubber sees it, or it vanishes and a reader sees
/// that.
fn spoil(world: &mut World, node: usize) {
    let it = &world.nodes[node];
    if !it.connected || !it.sick.is_empty() {
        return;
    }
    let all: Vec<(StorageId, BlockId)> = it
        .disks
        .iter()
        .flat_map(|(storage, disk)| disk.keys().map(|block| (*storage, *block)))
        .collect();
    let Some(&(storage, block)) = all.choose(&mut world.rng) else {
        return;
    };
    let id = world.nodes[node].id;
    if !survives(world, id, block) {
        return;
    }
    world.send_changes(node);
    if world.rng.random_bool(0.5) {
        if let Some(disk) = world.nodes[node].disks.get_mut(&storage)
            && let Some(replica) = disk.get_mut(&block)
        {
            replica.corrupt = true;
        }
        world.nodes[node]
            .changes
            .push_back((storage, ReplicaChange::Corrupt(block)));
        world.send_changes(node);
    } else {
        if let Some(disk) = world.nodes[node].disks.get_mut(&storage) {
            disk.remove(&block);
        }
        for part in &mut world.nodes[node].parts {
            part.replicas.retain(|replica| replica.block != block);
        }
        let now_ms = world.now_ms;
        world.cluster.report_bad_replica(now_ms, block, id, true);
    }
}

/// A disk fails or works again; its node says so at once.
fn toggle_disk(world: &mut World, node: usize) {
    let it = &world.nodes[node];
    let storages: Vec<StorageId> = it.disks.keys().copied().collect();
    let Some(&storage) = storages.choose(&mut world.rng) else {
        return;
    };
    let sick = !it.sick.contains(&storage);
    let mut blocks = it.disks[&storage].keys();
    if it.connected && (!sick || blocks.all(|block| survives(world, it.id, *block))) {
        while !world.nodes[node].commands.is_empty() {
            world.execute(node);
        }
        world.send_changes(node);
        world.set_sick(node, storage, sick);
        world.nodes[node]
            .parts
            .retain(|part| part.storage != storage);
        world.heartbeat(node, true);
    }
}

fn heal(world: &mut World) {
    for node in 0..world.nodes.len() {
        world.nodes[node].busy = false;
        world.start(node);
        if !world.nodes[node].connected {
            world.connect(node);
        }
        for storage in world.nodes[node].sick.clone() {
            world.set_sick(node, storage, false);
        }
        world.drain(node);
        world.heartbeat(node, true);
    }
    while let Some(block) = any_block(world, |it| !it.sealed) {
        world.end_writer(block);
    }
}

/// Every committed byte is on some disk from which no command is about to remove it.
fn check_survival(world: &World) {
    for (block, it) in &world.blocks {
        assert!(
            it.committed_bytes == 0 || !world.lasting_holders(*block).is_empty(),
            "{block} is lost"
        );
    }
}

/// The tables agree with each other.
fn check_tables(world: &World) {
    let cluster = &world.cluster;
    cluster.table.check();
    for (index, node) in cluster.nodes.iter().enumerate() {
        let (space, capacity_blocks) = cluster.count_space(index as u32);
        assert_eq!(node.space, space, "{}", node.id);
        let server = cluster
            .view
            .server_at(index)
            .expect("each node is a server");
        assert_eq!(server.capacity_blocks, capacity_blocks);
        let coming = node.awaited + node.incoming.len() as u32;
        assert_eq!(server.room, space.room.less(coming));
    }
    let mut totals = Totals::default();
    let all_settled =
        !cluster.safe_mode && cluster.settle_from.is_none() && cluster.gone.is_empty();
    for (slot, block) in cluster.table.iter() {
        // What a volume has that is back and has not reported yet is counted with its report; so
        // is what a writer claimed of a node that has not registered yet.
        let reported = block.replicas.iter().all(|replica| {
            let storage = cluster.table.home(replica.storage);
            !storage.usable || storage.inventoried
        });
        if all_settled && reported && cluster.pipeline(slot).is_empty() {
            // Kept up to date one event at a time, with the same result as counting from scratch.
            let diversity = cluster.diversity(block, &cluster.holders(slot, block));
            assert_eq!(
                (block.health.score(), block.health.misplaced),
                (diversity.score, diversity.misplaced)
            );
        }
        if all_settled && reported && cluster.pipeline(slot).is_empty() {
            let present = cluster.tally(slot, block).present();
            let is_exposed =
                !block.sealed && block.required_bytes > 0 && present == 1 && cluster.due(block) > 1;
            assert_eq!(cluster.exposed.contains(&block.id), is_exposed);
        }
        totals.misplaced += u64::from(block.health.misplaced);
        totals.curtailed += u64::from(block.health.curtailed);
        if let Some(score) = block.health.score() {
            totals.scores[usize::from(score)] += 1;
        }
        totals.relevant += u64::from(block.health.relevant);
        totals.under_replicated += u64::from(block.health.under_replicated);
        totals.lost += u64::from(block.health.lost);
        totals.missing[usize::from(block.health.left)] += u64::from(block.health.under_replicated);
    }
    assert_eq!(totals, cluster.totals);
    for &block in &cluster.exposed {
        let slot = cluster.table.slot(block);
        assert!(slot.is_some_and(|slot| !cluster.table.known(slot).sealed));
    }
    for (index, node) in cluster.nodes.iter().enumerate() {
        let index = index as u32;
        let awaited = cluster
            .writing
            .keys()
            .filter(|slot| cluster.pipeline(**slot).contains(&index))
            .filter(|slot| cluster.table.replica_on(**slot, index).is_none())
            .count();
        assert_eq!(node.awaited as usize, awaited);
        let (outgoing, incoming) = cluster.repairs_of(index);
        assert_eq!(
            (node.outgoing as usize, node.incoming.len()),
            (outgoing, incoming)
        );
        let limit = world.options.repairs_in_flight_per_node as usize;
        assert!(outgoing <= limit && incoming <= limit);
    }
    let mut commanded = BTreeSet::new();
    for (index, node) in (0u32..).zip(&cluster.nodes) {
        commanded.extend(node.deletes.commanded().into_iter().map(|it| (index, it)));
    }
    for (_, block) in cluster.table.iter() {
        for &replica in &block.replicas {
            let node = cluster.table.home(replica.storage).node;
            let is_commanded = commanded.remove(&(node, block.id));
            let state = replica.state;
            assert!(
                is_commanded == (state == ReplicaState::Deleting) || state.is_bad(),
                "{} on node {node} is {state:?}, commanded to be removed: {is_commanded}",
                block.id
            );
        }
    }
    assert_eq!(commanded, BTreeSet::new());
    for slot in cluster.in_flight.keys() {
        assert!(!cluster.queue.contains(*slot));
        assert!(cluster.table.get(*slot).is_some());
    }
}

/// Where corrupt replicas may be kept: of a block whose end is lost, for what they may have of it.
fn kept_corrupt(world: &World, block: BlockId) -> Vec<NodeId> {
    let is_short = |it: &FileBlock| it.lost_bytes > 0;
    if !world.blocks.get(&block).is_some_and(is_short) {
        return Vec::new();
    }
    let is_corrupt = |node: &&Datanode| node.replica(block).is_some_and(|it| it.corrupt);
    let corrupt = world.nodes.iter().filter(is_corrupt);
    corrupt.map(|node| node.id).collect()
}

/// What is not as it should be when all faults are over; `None` when all is well.
fn unmended(world: &World) -> Option<String> {
    let mut is_cramped = false;
    for (block, it) in &world.blocks {
        let holders = world.holders(*block);
        let kept = kept_corrupt(world, *block);
        let room = world.nodes.len() - kept.len();
        let wanted = usize::from(it.rules.replication);
        is_cramped |= room < wanted;
        if holders.len() != wanted.min(room) {
            return Some(format!("{block} is on {holders:?}, {wanted} are wanted"));
        }
        let mut listed = world.cluster.replicas(*block, None);
        listed.retain(|node| !kept.contains(node));
        listed.sort_unstable();
        if listed != holders.iter().copied().collect::<Vec<NodeId>>() {
            return Some(format!(
                "{block} is on {holders:?}, but listed on {listed:?}"
            ));
        }
    }
    for node in &world.nodes {
        for (block, replica) in node.disks.values().flatten() {
            let wanted = world.blocks.contains_key(block);
            let good = world.holders(*block).contains(&node.id);
            let is_kept = kept_corrupt(world, *block).contains(&node.id);
            if !is_kept && (!wanted || !good || !replica.sealed) {
                return Some(format!("{} still has {block}: {replica:?}", node.id));
            }
        }
    }
    if is_cramped {
        return None;
    }
    let summary = world.cluster.summary(world.now_ms);
    let (fsck, healthy) = (world.cluster.fsck(), FsckCounts::default());
    if fsck != healthy
        || summary.under_replicated_blocks + summary.lost_blocks > 0
        || summary.repairs_waiting + summary.repairs_under_way > 0
    {
        return Some(format!("{fsck:?} {summary:?}"));
    }
    None
}
