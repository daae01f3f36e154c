//! Memory is fetched before it is needed. Blocks, nodes and volumes lie all over it. Who works on one
//! after the other waits for each; who asks for all of them first waits for several at the same time.

use std::hint::black_box;

use harvestfs_protocol::ids::{BlockId, NodeId};
use smallvec::SmallVec;

use super::{
    Cluster,
    table::{NodeIx, Replica, Slot},
};

/// Blocks that are fetched together.
pub(super) const AHEAD: usize = 16;

/// Asks for the cache line of a value, without waiting for it. Elsewhere than on x86-64 it does
/// nothing: stable Rust has no such instruction there yet.
fn fetch<T>(it: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch is a hint that neither reads nor writes anything
    // that a program can see, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(it).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = it;
}

impl Cluster {
    /// Says which nodes are about to report which blocks, a few dozen at most. Changes nothing: the
    /// reports take less time then. For who has many at a time: a simulation.
    pub fn expect_reports(&self, coming: impl Iterator<Item = (NodeId, BlockId)>) {
        // In steps, because each tells where to look next.
        let mut targets: SmallVec<[(NodeIx, BlockId); AHEAD]> = SmallVec::new();
        for (node, block) in coming {
            let Some(index) = self.node_index(node) else {
                continue;
            };
            self.fetch_target(index);
            targets.push((index, block));
        }
        for &(node, block) in &targets {
            let node = &self.nodes[node as usize];
            for &storage in &node.storages {
                let volume = &self.table.storages[storage as usize];
                fetch(&volume.status);
                fetch(&volume.epoch);
            }
            if node.incoming.is_empty() {
                self.fetch_block(block);
            }
            for &slot in &node.incoming {
                fetch(self.table.get_ahead(slot));
            }
        }
        for &(node, _) in &targets {
            let node = &self.nodes[node as usize];
            for &storage in &node.storages {
                let volume = &self.table.storages[storage as usize];
                if let Some(last) = volume.blocks().last() {
                    fetch(last);
                }
            }
            for &slot in &node.incoming {
                if let Some(it) = self.in_flight.get(&slot) {
                    fetch(&self.nodes[it.source as usize]);
                }
                self.fetch_homes(slot);
            }
        }
    }

    /// Says which nodes are about to be asked for their commands, a few dozen at most, as
    /// [`Cluster::expect_reports`].
    pub fn expect_commands(&self, asked: &[NodeId]) {
        let indexes = asked.iter().filter_map(|&node| self.node_index(node));
        let nodes = || indexes.clone().map(|index| &self.nodes[index as usize]);
        for node in nodes() {
            fetch(node);
            fetch(&node.replicate);
        }
        self.fetch_blocks(nodes().flat_map(|node| node.replicate.iter().copied()));
        let slots = nodes().flat_map(|node| &node.replicate);
        for replica in slots.flat_map(|&slot| self.replicas_at(slot)) {
            let source = self.table.home(replica.storage).node;
            fetch(&self.nodes[source as usize]);
        }
    }

    /// A node that is about to receive a block.
    pub(super) fn fetch_target(&self, index: NodeIx) {
        let node = &self.nodes[index as usize];
        fetch(node);
        fetch(&node.as_target);
        fetch(&node.incoming);
        self.fetch_server(index as usize);
    }

    fn fetch_server(&self, index: usize) {
        if let Some(server) = self.view.server_at(index) {
            fetch(server);
        }
    }

    /// A block, found by its id. This waits: without it, nobody knows where the block is.
    pub(super) fn fetch_block(&self, block: BlockId) {
        black_box(self.table.slot(block));
    }

    /// What is asked of the holders of the blocks in a rank whose turns are next.
    pub(super) fn fetch_turns(&self, rank: usize) {
        let slots = || self.queue.next_slots(rank, AHEAD);
        self.fetch_blocks(slots());
        for replica in slots().flat_map(|slot| self.replicas_at(slot)) {
            let index = self.table.home(replica.storage).node as usize;
            let node = &self.nodes[index];
            fetch(node);
            fetch(&node.as_source);
            fetch(&self.table.storages[replica.storage as usize].as_source);
            self.fetch_server(index);
        }
    }

    /// What ranks blocks: how often the tenants of the nodes with their replicas are reimaged.
    pub(super) fn fetch_holders(&self, slots: &[Slot]) {
        self.fetch_blocks(slots.iter().copied());
        for replica in slots.iter().flat_map(|&slot| self.replicas_at(slot)) {
            let index = self.table.home(replica.storage).node as usize;
            self.fetch_server(index);
        }
    }

    /// Blocks, and where their volumes are.
    fn fetch_blocks(&self, slots: impl Iterator<Item = Slot> + Clone) {
        for slot in slots.clone() {
            fetch(self.table.get_ahead(slot));
        }
        for slot in slots {
            self.fetch_homes(slot);
        }
    }

    fn fetch_homes(&self, slot: Slot) {
        for replica in self.replicas_at(slot) {
            fetch(self.table.home_ahead(replica.storage));
        }
    }

    fn replicas_at(&self, slot: Slot) -> &[Replica] {
        self.table.get(slot).map_or(&[], |block| &block.replicas)
    }
}
