//! What the namespace and its clients do in the [`World`].

use harvestfs_placement::Stock;
use harvestfs_protocol::ids::{BlockId, NodeId, SessionId};
use harvestfs_protocol::types::PlacementRules;
use rand::RngExt;

use super::world::{CHUNK, FileBlock, World, rules};
use crate::engine::cluster::Cluster;
use crate::engine::namespace::BlockChange;

impl World {
    pub(super) fn change(&mut self, change: &BlockChange) {
        self.cluster.apply_change(self.now_ms, change);
    }

    /// A new block with its pipeline; `None` when it cannot be placed.
    pub(super) fn allocate(&mut self, rules: PlacementRules) -> Option<BlockId> {
        let placed = self
            .cluster
            .place(self.now_ms, 1, &rules, &[], None, &mut self.rng);
        let pipeline = placed.ok()?.remove(0);
        let block = BlockId(self.next_block);
        self.next_block += 1;
        self.change(&BlockChange::Allocated {
            block,
            rules,
            writer: SessionId(1),
        });
        self.cluster.set_pipeline(block, &pipeline);
        self.blocks.insert(
            block,
            FileBlock {
                rules,
                committed_bytes: 0,
                lost_bytes: 0,
                sealed: false,
                pipeline,
            },
        );
        Some(block)
    }

    /// The writer appends to all nodes of the pipeline and commits, or finds that one is gone and
    /// seals the block with those that are left.
    pub(super) fn append(&mut self, block: BlockId, bytes: u64) {
        let it = self.blocks[&block].clone();
        let length = it.committed_bytes + bytes;
        let is_fine = |world: &Self, node: NodeId| {
            let node = &world.nodes[node.0 as usize];
            let begun = node.replica(block).is_some_and(|r| !r.sealed && !r.corrupt);
            let has_disk = node.sick.len() < node.disks.len();
            node.up && has_disk && (begun || it.committed_bytes == 0)
        };
        if it.pipeline.iter().all(|&node| is_fine(self, node)) {
            for node in it.pipeline {
                self.put(node.0 as usize, block, length, false);
            }
            self.change(&BlockChange::Grew {
                block,
                committed_bytes: length,
            });
            if let Some(it) = self.blocks.get_mut(&block) {
                it.committed_bytes = length;
            }
        } else {
            self.seal_by_writer(block);
        }
    }

    /// The writer seals a block on the nodes of the pipeline that are left; one without bytes is
    /// given up.
    pub(super) fn seal_by_writer(&mut self, block: BlockId) {
        let holders = self.complete_on(block);
        if self.blocks[&block].committed_bytes == 0 || holders.is_empty() {
            self.end_writer(block);
            return;
        }
        self.seal_on(block, &holders);
    }

    /// The same by a writer that does not reach them all, and perhaps none.
    pub(super) fn seal_by_writer_cut_off(&mut self, block: BlockId) {
        let mut reached = self.complete_on(block);
        reached.retain(|_| self.rng.random_bool(0.3));
        if self.blocks[&block].committed_bytes == 0 {
            self.end_writer(block);
            return;
        }
        self.seal_on(block, &reached);
    }

    /// The nodes of the pipeline that have all of a block.
    fn complete_on(&self, block: BlockId) -> Vec<NodeId> {
        let it = &self.blocks[&block];
        let holds = |node: &NodeId| {
            let node = &self.nodes[node.0 as usize];
            let replica = node.replica(block);
            node.up && replica.is_some_and(|r| !r.corrupt && r.length_bytes >= it.committed_bytes)
        };
        it.pipeline.iter().copied().filter(holds).collect()
    }

    /// The writer of a block with bytes does not reach the nodes of its pipeline but for these, which hold
    /// all of it.
    pub(super) fn seal_on(&mut self, block: BlockId, reached: &[NodeId]) {
        let committed_bytes = self.blocks[&block].committed_bytes;
        for node in reached {
            self.put(node.0 as usize, block, committed_bytes, true);
        }
        self.seal(block);
        self.cluster.sealed_by_client(self.now_ms, block, reached);
    }

    fn seal(&mut self, block: BlockId) {
        if let Some(it) = self.blocks.get_mut(&block) {
            it.sealed = true;
            let length_bytes = it.committed_bytes;
            self.change(&BlockChange::Sealed {
                block,
                length_bytes,
            });
        }
    }

    /// The writer's session ends.
    pub(super) fn end_writer(&mut self, block: BlockId) {
        if self.blocks[&block].committed_bytes == 0 {
            self.free(block);
        } else {
            self.seal(block);
        }
    }

    pub(super) fn free(&mut self, block: BlockId) {
        self.blocks.remove(&block);
        self.change(&BlockChange::Freed { block });
    }

    /// A sealed block, written without faults.
    pub(super) fn write(&mut self, replication: u8) -> BlockId {
        let block = self.allocate(rules(replication)).expect("room is left");
        self.append(block, 3 * CHUNK);
        self.seal_by_writer(block);
        block
    }

    /// The namenode restarts: only namespace and servers are known.
    pub(super) fn restart_namenode(&mut self) {
        self.cluster = Cluster::new(self.options.clone(), Box::new(Stock), self.now_ms);
        // Budgets are forgotten, too.
        self.commanded.clear();
        for node in 0..self.nodes.len() {
            self.disconnect(node, false);
            let server = self.server(node);
            self.cluster.add_server(self.nodes[node].id, &server);
        }
        let allocated = BlockId(1)..=BlockId(self.next_block - 1);
        self.cluster
            .set_allocated(std::iter::once(allocated), std::iter::empty());
        for (block, it) in self.blocks.clone() {
            self.change(&BlockChange::Allocated {
                block,
                rules: it.rules,
                writer: SessionId(1),
            });
            self.change(&if it.sealed {
                BlockChange::Sealed {
                    block,
                    length_bytes: it.committed_bytes + it.lost_bytes,
                }
            } else {
                BlockChange::Grew {
                    block,
                    committed_bytes: it.committed_bytes,
                }
            });
        }
    }
}
