//! Prefetching. Blocks, nodes and volumes are scattered over memory. A loop that works on one after the
//! other waits for each; one that prefetches all of them first waits for several at the same time.

use std::hint::black_box;

use harvestfs_protocol::ids::{BlockId, NodeId};
use smallvec::SmallVec;

use super::Cluster;
use super::table::{NodeIx, Replica, Slot};

/// Blocks that are prefetched together.
pub(super) const PREFETCHED: usize = 16;

/// Requests the cache line of a value, without waiting for it. Does nothing on targets other than
/// x86-64: stable Rust has no such instruction there yet.
fn prefetch<T>(it: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch is a hint that neither reads nor writes anything
    // that a program can see, at any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(it).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = it;
}

impl Cluster {
    /// Prefetches for nodes that are about to report these blocks, a few dozen at most. Changes nothing
    /// but the time that the reports take. For a caller that has many at a time, such as a simulation.
    pub fn expect_reports(&self, coming: impl Iterator<Item = (NodeId, BlockId)>) {
        // In steps, because each step shows where to look next.
        let mut targets: SmallVec<[(NodeIx, BlockId); PREFETCHED]> = SmallVec::new();
        for (node, block) in coming {
            let Some(index) = self.node_index(node) else {
                continue;
            };
            self.prefetch_target(index);
            targets.push((index, block));
        }
        for &(node, block) in &targets {
            let node = &self.nodes[node as usize];
            for &storage in &node.storages {
                let volume = &self.table.storages[storage as usize];
                prefetch(&volume.status);
                prefetch(&volume.epoch);
            }
            if node.incoming.is_empty() {
                self.prefetch_block(block);
            }
            for &slot in &node.incoming {
                prefetch(self.table.get_ahead(slot));
            }
        }
        for &(index, _) in &targets {
            let node = &self.nodes[index as usize];
            for &storage in &node.storages {
                let volume = &self.table.storages[storage as usize];
                if let Some(last) = volume.blocks().last() {
                    prefetch(last);
                }
            }
            for &slot in &node.incoming {
                match self.in_flight.get(&slot) {
                    Some(it) if it.target == index => {
                        prefetch(&self.nodes[it.source as usize]);
                    }
                    other => panic!("node {index} is to receive slot {slot}: {other:?}"),
                }
                self.prefetch_homes(slot);
            }
        }
    }

    /// Prefetches for nodes whose commands are about to be requested, a few dozen at most, like
    /// [`Cluster::expect_reports`].
    pub fn expect_commands(&self, asked: &[NodeId]) {
        let indexes = asked.iter().filter_map(|&node| self.node_index(node));
        let nodes = || indexes.clone().map(|index| &self.nodes[index as usize]);
        for node in nodes() {
            prefetch(node);
            prefetch(&node.replicate);
        }
        self.prefetch_blocks(nodes().flat_map(|node| node.replicate.iter().copied()));
        let slots = nodes().flat_map(|node| &node.replicate);
        for replica in slots.flat_map(|&slot| self.replicas_at(slot)) {
            let source = self.table.home(replica.storage).node;
            prefetch(&self.nodes[source as usize]);
        }
    }

    /// Prefetches a node that is about to receive a block.
    pub(super) fn prefetch_target(&self, index: NodeIx) {
        let node = &self.nodes[index as usize];
        prefetch(node);
        prefetch(&node.as_target);
        prefetch(&node.incoming);
        self.prefetch_server(index as usize);
    }

    fn prefetch_server(&self, index: usize) {
        match self.view.server_at(index) {
            Some(server) => prefetch(server),
            None => panic!("placement does not know node {index}"),
        }
    }

    /// Prefetches a block by its id. This waits for the lookup: the place of the block is not known
    /// before.
    pub(super) fn prefetch_block(&self, block: BlockId) {
        black_box(self.table.slot(block));
    }

    /// Prefetches what repair reads of the holders of blocks in a rank whose turns are next.
    pub(super) fn prefetch_turns(&self, rank: usize) {
        let slots = || self.queue.next_slots(rank, PREFETCHED);
        self.prefetch_blocks(slots());
        for replica in slots().flat_map(|slot| self.replicas_at(slot)) {
            let index = self.table.home(replica.storage).node as usize;
            let node = &self.nodes[index];
            prefetch(node);
            prefetch(&node.as_source);
            prefetch(&self.table.storages[replica.storage as usize].as_source);
            self.prefetch_server(index);
        }
    }

    /// Prefetches what blocks are ranked by: how often the tenants of the nodes with their replicas are
    /// reimaged.
    pub(super) fn prefetch_holders(&self, slots: &[Slot]) {
        self.prefetch_blocks(slots.iter().copied());
        for replica in slots.iter().flat_map(|&slot| self.replicas_at(slot)) {
            let index = self.table.home(replica.storage).node as usize;
            self.prefetch_server(index);
        }
    }

    /// Prefetches blocks, and the homes of their volumes.
    fn prefetch_blocks(&self, slots: impl Iterator<Item = Slot> + Clone) {
        for slot in slots.clone() {
            prefetch(self.table.get_ahead(slot));
        }
        for slot in slots {
            self.prefetch_homes(slot);
        }
    }

    fn prefetch_homes(&self, slot: Slot) {
        for replica in self.replicas_at(slot) {
            prefetch(self.table.home_ahead(replica.storage));
        }
    }

    /// The replicas of a block that waits, is repaired or is on a volume's list, and so is in the
    /// table.
    fn replicas_at(&self, slot: Slot) -> &[Replica] {
        &self.table.known(slot).replicas
    }
}
