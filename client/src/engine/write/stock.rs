//! Blocks that were allocated before they are needed.

use std::collections::HashMap;
use std::sync::Arc;

use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::timeline::Epoch;
use harvestfs_protocol::token::BlockToken;
use harvestfs_protocol::types::{NodeInfo, PlacementRules, StorageClass};

/// A new block and the datanodes that it is written to.
#[derive(Clone, Debug)]
pub(crate) struct NewBlock {
    pub(crate) block: BlockId,
    pub(crate) token: BlockToken,
    pub(crate) nodes: Vec<Arc<NodeInfo>>,
    /// How many replicas it should finally have.
    pub(crate) due_replicas: u8,
    pub(crate) class: Option<StorageClass>,
    /// The session that it belongs to.
    pub(crate) generation: u64,
}

impl NewBlock {
    /// Whether it has fewer replicas than it should finally have, because datanodes are unreachable.
    pub(crate) fn lacks_replicas(&self) -> bool {
        self.nodes.len() < usize::from(self.due_replicas)
    }

    /// Whether the namenode was in an earlier epoch than this when it allocated the block. Such a
    /// block gets no more data: a namenode that was restored from an earlier copy knows the block,
    /// but not how much is in it.
    pub(crate) fn is_of_earlier_epoch(&self, epoch: u32) -> bool {
        Epoch::number_of(self.block) < epoch
    }
}

/// The conditions that a block must meet to be written now.
#[derive(Clone, Debug)]
pub(crate) struct Usable {
    /// The session.
    pub(crate) generation: u64,
    /// The epoch of the namenode.
    pub(crate) epoch: u32,
    /// Datanodes that failed lately or are busy.
    pub(crate) avoided: Vec<NodeId>,
}

impl Usable {
    fn permits(&self, new: &NewBlock) -> bool {
        let avoids = |node: &Arc<NodeInfo>| self.avoided.contains(&node.node);
        new.generation == self.generation
            && !new.is_of_earlier_epoch(self.epoch)
            && !new.nodes.iter().any(avoids)
    }
}

/// The blocks that are in stock.
#[derive(Default)]
pub(crate) struct Stock {
    blocks: HashMap<PlacementRules, Vec<NewBlock>>,
}

impl Stock {
    /// Takes a usable block with these rules, if there is one. Unusable blocks are moved to
    /// `unusable`.
    pub(crate) fn take(
        &mut self,
        rules: PlacementRules,
        usable: &Usable,
        unusable: &mut Vec<NewBlock>,
    ) -> Option<NewBlock> {
        let blocks = self.blocks.get_mut(&rules)?;
        while let Some(new) = blocks.pop() {
            assert!(
                !new.lacks_replicas(),
                "a block with too few replicas was kept: {new:?}"
            );
            if usable.permits(&new) {
                return Some(new);
            }
            unusable.push(new);
        }
        None
    }

    /// Keeps blocks for later. Those that lack replicas are moved to `unusable`: by the time they
    /// are needed, more datanodes may be available.
    pub(crate) fn put(
        &mut self,
        rules: PlacementRules,
        blocks: impl Iterator<Item = NewBlock>,
        unusable: &mut Vec<NewBlock>,
    ) {
        let kept = self.blocks.entry(rules).or_default();
        for new in blocks {
            if new.lacks_replicas() {
                unusable.push(new);
            } else {
                kept.push(new);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::token::{Right, TokenKey, TokenSigner};
    use harvestfs_protocol::types::Durability;

    use super::*;

    const RULES: PlacementRules = PlacementRules {
        replication: 2,
        durability: Durability::Strict,
        class: None,
    };

    fn new(block: u64, nodes: &[u32], generation: u64) -> NewBlock {
        let key = TokenKey {
            key_id: 1,
            secret: [7; 32],
        };
        let node = |node: &u32| {
            Arc::new(NodeInfo {
                node: NodeId(*node),
                name: format!("datanode-{node}"),
                data_addr: "127.0.0.1:1".parse().unwrap(),
                rack: String::new(),
            })
        };
        NewBlock {
            block: BlockId(block),
            token: TokenSigner::new(&key).sign(BlockId(block), Right::Write, u64::MAX),
            nodes: nodes.iter().map(node).collect(),
            due_replicas: 2,
            class: None,
            generation,
        }
    }

    #[test]
    fn only_what_can_be_written_now_is_taken() {
        let mut stock = Stock::default();
        let mut unusable = Vec::new();
        let blocks = [
            new(1, &[1, 2], 5),
            new(2, &[1, 3], 5),
            new(3, &[1, 2], 4),
            new(4, &[1], 5),
        ];
        stock.put(RULES, blocks.into_iter(), &mut unusable);
        let ids = |blocks: &mut Vec<NewBlock>| -> Vec<u64> {
            blocks.drain(..).map(|new| new.block.0).collect()
        };
        assert_eq!(ids(&mut unusable), [4], "it lacks a replica");
        let usable = Usable {
            generation: 5,
            epoch: 0,
            avoided: vec![NodeId(3)],
        };
        let other = PlacementRules {
            replication: 1,
            ..RULES
        };
        assert!(stock.take(other, &usable, &mut unusable).is_none());
        let taken = stock.take(RULES, &usable, &mut unusable);
        assert_eq!(taken.expect("it can be used").block, BlockId(1));
        assert_eq!(ids(&mut unusable), [3, 2], "another session's, and avoided");
        assert!(stock.take(RULES, &usable, &mut unusable).is_none());
        let later = Usable { epoch: 1, ..usable };
        stock.put(RULES, [new(5, &[1, 2], 5)].into_iter(), &mut unusable);
        assert!(stock.take(RULES, &later, &mut unusable).is_none());
        assert_eq!(ids(&mut unusable), [5], "of an earlier epoch");
    }
}
