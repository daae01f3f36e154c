//! Blocks, volumes, and which volume holds which replica.
//!
//! A block knows its replicas and a volume knows its blocks; the two point at each other by
//! position, so that adding or removing a replica costs O(1) and 16 bytes.

use std::hash::BuildHasher;
use std::num::NonZeroU8;

use harvestfs_protocol::data::round_up_to_chunk;
use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::types::{PlacementRules, StorageClass, VolumeStatus};
use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use super::budget::Budget;

/// Index of a block in the table; reused after the block is freed.
pub(super) type Slot = u32;
/// Index of a node.
pub(super) type NodeIx = u32;
/// Index of a volume; never reused.
pub(super) type StorageIx = u32;

/// The known state of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplicaState {
    /// Has all the bytes, and no more will come.
    Sealed,
    /// Has all committed bytes; not sealed on its datanode.
    Open,
    /// Not sealed on its datanode, and either its writer does not vouch for it, or a report that may be old shows
    /// that it lacks committed bytes: the datanode has to report what it has.
    Unconfirmed,
    /// Sealed, but lacks committed bytes. Stays in this state when the command to remove it is sent.
    Short,
    /// Has wrong or unreadable bytes. Stays in this state when the command to remove it is sent.
    Corrupt,
    /// Sealed, and chosen for removal; the command has not been sent yet.
    Excess,
    /// It was in excess, and the command to remove it was sent. It may be gone already, until its datanode registers
    /// and so drops the command.
    Deleting,
}

impl ReplicaState {
    /// Whether it counts as a replica.
    pub(super) fn is_good(self) -> bool {
        matches!(self, Self::Sealed | Self::Open)
    }

    /// Whether it has to be replaced.
    pub(super) fn is_bad(self) -> bool {
        matches!(self, Self::Unconfirmed | Self::Short | Self::Corrupt)
    }

    /// Whether its datanode is to seal it once its block is sealed.
    pub(super) fn awaits_seal(self) -> bool {
        matches!(self, Self::Open | Self::Unconfirmed)
    }
}

/// A replica as its block sees it; without padding, so that three fit into a block's cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(2))]
pub(super) struct Replica {
    pub(super) storage: StorageIx,
    /// The position of its block in the volume's list.
    position: u32,
    pub(super) state: ReplicaState,
    /// The number of the volume's report that last named it.
    pub(super) epoch: u8,
}

/// A block, in one cache line: repair visits blocks all over memory, and stalls on each.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub(super) id: BlockId,
    /// Bytes that a replica must have: the committed ones; once sealed, all. Blocks are shorter
    /// than 4 GiB.
    pub(super) required_bytes: u32,
    pub(super) rules: PlacementRules,
    pub(super) sealed: bool,
    /// Is in the list of blocks with too many replicas.
    pub(super) excess_queued: bool,
    /// Its health, as last counted.
    pub(super) health: Health,
    pub(super) replicas: SmallVec<[Replica; 3]>,
}

impl Block {
    pub(super) fn new(id: BlockId, rules: PlacementRules) -> Self {
        Self {
            id,
            required_bytes: 0,
            rules,
            sealed: false,
            excess_queued: false,
            health: Health::default(),
            replicas: SmallVec::new(),
        }
    }

    pub(super) fn wanted(&self) -> usize {
        usize::from(self.rules.replication.max(1))
    }

    /// Whether a replica of this length, in whole chunks, has all the bytes.
    pub(super) fn is_covered_by(&self, length_bytes: u64) -> bool {
        // Rounding a length from the network up could overflow.
        length_bytes >= u64::from(self.required_bytes)
            || round_up_to_chunk(length_bytes) >= u64::from(self.required_bytes)
    }

    pub(super) fn require(&mut self, bytes: u64) {
        let Ok(bytes) = u32::try_from(bytes) else {
            panic!(
                "block {} is to have {bytes} bytes, more than any block",
                self.id
            );
        };
        self.required_bytes = self.required_bytes.max(bytes);
    }
}

/// The highest number of remaining replicas that is told apart; more count as this many.
pub(super) const LEFT_MAX: usize = 3;

/// What a block contributes to the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Health {
    /// Has bytes, so it matters.
    pub(super) relevant: bool,
    /// Sealed, with fewer good replicas than it is due: those that it wants, as far as the cluster has
    /// servers for them.
    pub(super) under_replicated: bool,
    /// No replica is of any use.
    pub(super) lost: bool,
    /// How many replicas are left, at most [`LEFT_MAX`], if it is under-replicated; else 0.
    pub(super) left: u8,
    /// Sealed, and breaks a constraint that it was promised.
    pub(super) misplaced: bool,
    /// Sealed, and has less than it asks for because the cluster lacks the servers.
    pub(super) curtailed: bool,
    /// One more than the number of constraints that hold among its good replicas, if it is sealed and
    /// has any.
    pub(super) score_and_one: Option<NonZeroU8>,
}

impl Health {
    /// The number of constraints that hold among its good replicas, if it is sealed and has any.
    pub(super) fn score(self) -> Option<u8> {
        self.score_and_one.map(|it| it.get() - 1)
    }

    /// The inverse of [`Health::score`].
    pub(super) fn score_and_one(score: Option<u8>) -> Option<NonZeroU8> {
        let score = score?;
        assert!(
            score < u8::MAX,
            "{score} constraints hold, more than there are"
        );
        NonZeroU8::new(score + 1)
    }
}

/// A volume's node and availability. Kept apart from the rest of the volume: code that looks at a block
/// needs only this for each of its replicas.
#[derive(Clone, Copy, Debug)]
pub(super) struct Home {
    pub(super) node: NodeIx,
    /// Registered, healthy and on a live node: what is on it counts.
    pub(super) usable: bool,
    /// A full report has arrived since the node registered.
    pub(super) inventoried: bool,
}

/// A volume, in three cache lines: its status as its datanode reports it; its contents; the repairs
/// that it served.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Storage {
    pub(super) status: VolumeStatus,
    /// Its blocks.
    blocks: Vec<Slot>,
    /// Number of the report under way or last complete; replicas carry it.
    pub(super) epoch: u8,
    /// The part of that report that is expected next.
    pub(super) next_part: u32,
    /// When a full report was last requested, or a part of one last arrived.
    pub(super) report_ms: u64,
    /// Repairs that it served, in a sliding window.
    pub(super) as_source: Budget,
}

impl Storage {
    pub(super) fn new(status: VolumeStatus, repair_window_ms: u64) -> Self {
        Self {
            status,
            as_source: Budget::new(repair_window_ms),
            blocks: Vec::new(),
            report_ms: 0,
            next_part: 0,
            epoch: 0,
        }
    }

    pub(super) fn id(&self) -> StorageId {
        self.status.storage
    }

    pub(super) fn class(&self) -> StorageClass {
        self.status.class
    }

    pub(super) fn blocks(&self) -> &[Slot] {
        &self.blocks
    }
}

fn hash(block: BlockId) -> u64 {
    FxBuildHasher.hash_one(block)
}

fn id_at(blocks: &[Option<Block>], slot: Slot) -> Option<BlockId> {
    Some(blocks.get(slot as usize)?.as_ref()?.id)
}

/// All blocks and volumes.
#[derive(Debug, Default)]
pub(super) struct Table {
    blocks: Vec<Option<Block>>,
    free: Vec<Slot>,
    /// The slot of each block by its id. The id itself is only in `blocks`: the block is read next
    /// anyway, and a table without keys is a quarter as large.
    slots: HashTable<Slot>,
    pub(super) storages: Vec<Storage>,
    /// The home of each volume.
    homes: Vec<Home>,
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// One past the highest slot in use.
    pub(super) fn slots_end(&self) -> Slot {
        self.blocks.len() as Slot
    }

    pub(super) fn slot(&self, block: BlockId) -> Option<Slot> {
        let is_it = |&slot: &Slot| id_at(&self.blocks, slot) == Some(block);
        self.slots.find(hash(block), is_it).copied()
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&Block> {
        self.blocks.get(slot as usize)?.as_ref()
    }

    /// The memory of a slot, for prefetching, whether or not it has a block now. The slot must have
    /// been in use.
    pub(super) fn get_ahead(&self, slot: Slot) -> &Option<Block> {
        &self.blocks[slot as usize]
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut Block> {
        self.blocks.get_mut(slot as usize)?.as_mut()
    }

    /// The block in a slot that replicas, repairs or pipelines refer to, and that therefore exists.
    #[track_caller]
    pub(super) fn known(&self, slot: Slot) -> &Block {
        match self.get(slot) {
            Some(block) => block,
            None => panic!("slot {slot} is referred to, but has no block"),
        }
    }

    /// Like [`Table::known`], but mutable.
    #[track_caller]
    pub(super) fn known_mut(&mut self, slot: Slot) -> &mut Block {
        match self.get_mut(slot) {
            Some(block) => block,
            None => panic!("slot {slot} is referred to, but has no block"),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Block)> {
        self.blocks
            .iter()
            .enumerate()
            .filter_map(|(slot, block)| Some((slot as Slot, block.as_ref()?)))
    }

    /// Adds a block if it is new; returns its slot.
    pub(super) fn add_block(&mut self, id: BlockId, rules: PlacementRules) -> Slot {
        if let Some(slot) = self.slot(id) {
            return slot;
        }
        let block = Some(Block::new(id, rules));
        let slot = if let Some(slot) = self.free.pop() {
            let before = std::mem::replace(&mut self.blocks[slot as usize], block);
            assert!(before.is_none(), "slot {slot} is free, but has {before:?}");
            slot
        } else {
            self.blocks.push(block);
            self.blocks.len() as Slot - 1
        };
        let hash_at = |&slot: &Slot| match id_at(&self.blocks, slot) {
            Some(id) => hash(id),
            None => panic!("slot {slot} is found by an id, but has no block"),
        };
        self.slots.insert_unique(hash(id), slot, hash_at);
        slot
    }

    /// Removes a block and its replicas; returns it as it was.
    pub(super) fn remove_block(&mut self, slot: Slot) -> Option<Block> {
        let as_it_was = self.get(slot)?.clone();
        for _ in 0..as_it_was.replicas.len() {
            self.remove_replica(slot, 0);
        }
        self.blocks[slot as usize] = None;
        match (self.slots).find_entry(hash(as_it_was.id), |&other| other == slot) {
            Ok(entry) => _ = entry.remove(),
            Err(_) => panic!(
                "block {} in slot {slot} is not found by its id",
                as_it_was.id
            ),
        }
        self.free.push(slot);
        Some(as_it_was)
    }

    /// Adds a volume of a node; it is not usable yet.
    pub(super) fn add_storage(&mut self, node: NodeIx, storage: Storage) -> StorageIx {
        self.storages.push(storage);
        self.homes.push(Home {
            node,
            usable: false,
            inventoried: false,
        });
        self.homes.len() as StorageIx - 1
    }

    pub(super) fn home(&self, storage: StorageIx) -> Home {
        self.homes[storage as usize]
    }

    /// The home of a volume, for prefetching.
    pub(super) fn home_ahead(&self, storage: StorageIx) -> &Home {
        &self.homes[storage as usize]
    }

    pub(super) fn home_mut(&mut self, storage: StorageIx) -> &mut Home {
        &mut self.homes[storage as usize]
    }

    pub(super) fn storages_with_homes(&self) -> impl Iterator<Item = (Home, &Storage)> {
        self.homes.iter().copied().zip(&self.storages)
    }

    /// The replica of a block on a node, as an index into its replicas.
    pub(super) fn replica_on(&self, slot: Slot, node: NodeIx) -> Option<usize> {
        let block = self.get(slot)?;
        block
            .replicas
            .iter()
            .position(|replica| self.home(replica.storage).node == node)
    }

    /// The replica of a block on a volume, as an index into its replicas.
    pub(super) fn replica_in(&self, slot: Slot, storage: StorageIx) -> Option<usize> {
        let block = self.get(slot)?;
        block
            .replicas
            .iter()
            .position(|replica| replica.storage == storage)
    }

    /// Adds a replica; the block must have none on that volume.
    pub(super) fn add_replica(&mut self, slot: Slot, storage: StorageIx, state: ReplicaState) {
        let Self {
            blocks, storages, ..
        } = self;
        let volume = &mut storages[storage as usize];
        let Some(Some(block)) = blocks.get_mut(slot as usize) else {
            panic!(
                "slot {slot} gets a replica on volume {}, but has no block",
                volume.id()
            );
        };
        assert!(
            block.replicas.iter().all(|it| it.storage != storage),
            "block {} has a replica on volume {} already",
            block.id,
            volume.id()
        );
        block.replicas.push(Replica {
            storage,
            position: volume.blocks.len() as u32,
            state,
            epoch: volume.epoch,
        });
        volume.blocks.push(slot);
    }

    /// Removes a replica by its index among the block's replicas.
    pub(super) fn remove_replica(&mut self, slot: Slot, index: usize) {
        let removed = self.known_mut(slot).replicas.remove(index);
        let volume = &mut self.storages[removed.storage as usize];
        let listed = volume.blocks.swap_remove(removed.position as usize);
        assert_eq!(
            listed,
            slot,
            "the block of a replica, and what volume {} has in its place",
            volume.id()
        );
        if volume.blocks.is_empty() && !self.homes[removed.storage as usize].usable {
            // It may never come back, and thousands of reimaged volumes add up.
            volume.blocks = Vec::new();
        }
        let Some(&moved) = volume.blocks.get(removed.position as usize) else {
            return;
        };
        let block = self.known_mut(moved);
        let mut replicas = block.replicas.iter_mut();
        match replicas.find(|replica| replica.storage == removed.storage) {
            Some(replica) => replica.position = removed.position,
            None => panic!(
                "block {} is on a volume's list, but has no replica there",
                block.id
            ),
        }
    }

    pub(super) fn set_state(&mut self, slot: Slot, index: usize, state: ReplicaState) {
        self.known_mut(slot).replicas[index].state = state;
    }

    /// Notes the state of a replica that was reported again, and the report under way.
    pub(super) fn restamp(&mut self, slot: Slot, index: usize, state: ReplicaState) {
        let Self {
            blocks, storages, ..
        } = self;
        let Some(Some(block)) = blocks.get_mut(slot as usize) else {
            panic!("slot {slot} has no block, but a replica of it was reported again");
        };
        let replica = &mut block.replicas[index];
        replica.state = state;
        replica.epoch = storages[replica.storage as usize].epoch;
    }

    /// Memory of the tables in bytes.
    pub(super) fn bytes(&self) -> usize {
        let lists: usize = self
            .storages
            .iter()
            .map(|storage| {
                storage.blocks.capacity() * size_of::<Slot>() + storage.as_source.bytes()
            })
            .sum();
        lists
            + self.blocks.capacity() * size_of::<Option<Block>>()
            // 4 bytes of slot, 1 of control, 7/8 full at most.
            + self.slots.capacity() * 8 / 7 * 5
            + self.storages.capacity() * (size_of::<Storage>() + size_of::<Home>())
    }

    /// Blocks and volumes point at each other.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut replicas = 0;
        for (slot, block) in self.iter() {
            assert_eq!(self.slot(block.id), Some(slot));
            for replica in &block.replicas {
                let storage = &self.storages[replica.storage as usize];
                assert_eq!(storage.blocks[replica.position as usize], slot);
                replicas += 1;
            }
        }
        let listed: usize = self.storages.iter().map(|it| it.blocks.len()).sum();
        assert_eq!(replicas, listed);
        assert_eq!(self.slots.len() + self.free.len(), self.blocks.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With the entry in the map and three places in the lists of volumes, four million blocks
    /// stay below half a GiB.
    #[test]
    fn a_block_is_small() {
        assert_eq!(size_of::<Option<Block>>(), 64);
    }

    #[test]
    fn the_three_parts_of_a_volume_lie_in_cache_lines_of_their_own() {
        assert_eq!(std::mem::offset_of!(Storage, blocks), 64);
        assert_eq!(std::mem::offset_of!(Storage, as_source), 128);
    }
}
