//! Memory is fetched before it is needed. Blocks, nodes and volumes lie all over it. Who works on one
//! after the other waits for each; who looks at all of them first waits for several at the same time.

use std::hint::black_box;

use harvestfs_protocol::ids::{BlockId, NodeId};
use smallvec::SmallVec;

use super::{
    Cluster,
    table::{NodeIx, Slot},
};

/// Blocks of a rank whose holders are fetched together; what they lie in fits into the second cache.
const TURNS_AHEAD: usize = 256;

impl Cluster {
    /// Says which nodes are about to report which blocks, a few dozen at most. Changes nothing: the
    /// reports take less time then.
    pub fn expect_reports(&self, coming: impl Iterator<Item = (NodeId, BlockId)>) {
        let mut targets: SmallVec<[NodeIx; 16]> = SmallVec::new();
        for (node, block) in coming {
            self.fetch_block(block);
            targets.extend(self.node_index(node));
        }
        // In steps, because each tells where to look next.
        for &node in &targets {
            let it = &self.nodes[node as usize];
            black_box((it.outgoing, it.as_target.counted(), it.heard_ms));
            black_box(self.view.server_at(node as usize).map(|it| it.room));
        }
        let volumes = || {
            let nodes = targets.iter().map(|&node| &self.nodes[node as usize]);
            let volumes = nodes.flat_map(|it| &it.storages);
            volumes.map(|&storage| &self.table.storages[storage as usize])
        };
        for volume in volumes() {
            black_box((volume.status.healthy, volume.epoch));
        }
        for volume in volumes() {
            black_box(volume.blocks().last().copied());
        }
    }

    /// A block, found by its id.
    pub(super) fn fetch_block(&self, block: BlockId) {
        black_box(self.table.slot(block));
    }

    /// What is asked of the holders of the blocks in a rank whose turn is next.
    pub(super) fn fetch_turns(&self, rank: usize) {
        for slot in self.queue.next_slots(rank, TURNS_AHEAD) {
            self.fetch_holders(slot);
        }
    }

    /// What repair asks of the nodes with a block's replicas: how often their tenants are reimaged, and
    /// whether they can be its source.
    pub(super) fn fetch_holders(&self, slot: Slot) {
        let replicas = self.table.get(slot).map(|it| it.replicas.iter());
        for replica in replicas.into_iter().flatten() {
            let index = self.table.home(replica.storage).node as usize;
            let node = &self.nodes[index];
            let volume = &self.table.storages[replica.storage as usize];
            black_box(self.view.server_at(index).map(|it| it.tenant));
            black_box((node.outgoing, volume.as_source.counted()));
        }
    }
}
