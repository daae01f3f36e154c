//! Blocks for writing, asked for before they are needed.

use std::collections::HashMap;
use std::sync::Arc;
use tokio::time::Instant;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{MetaReply, mutation};
use harvestfs_protocol::types::{BlockInfo, Located, PlacementRules};
use parking_lot::Mutex;

use crate::driver::core::Core;
use crate::driver::write::pipeline::NewBlock;
use crate::driver::write::seal::discard;
use crate::error::ClientError;

/// Blocks per request: one to use, one in advance. The namenode reserves room for each.
const BLOCKS_PER_ALLOCATION: u32 = 2;

/// What blocks are wanted for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) rules: PlacementRules,
    /// The file that the first data is of.
    pub(crate) file: InodeId,
    /// Where a quota leaves no room, what was removed here a moment ago may be released first.
    pub(crate) may_release: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Allocator {
    stock: Mutex<HashMap<PlacementRules, Vec<NewBlock>>>,
}

impl Allocator {
    /// A new block, for this file's data first; avoids datanodes that failed lately or are busy.
    pub(crate) async fn take(
        &self,
        core: &Arc<Core>,
        wanted: Wanted,
    ) -> Result<NewBlock, ClientError> {
        let avoided = core.locations.avoided(Instant::now());
        let generation = core.session.generation();
        while let Some(new) = self.pop(wanted.rules) {
            let usable = new.nodes.iter().all(|node| !avoided.contains(&node.node));
            if new.generation == generation
                && usable
                && !core.session.is_of_earlier_epoch(new.block)
            {
                return Ok(new);
            }
            give_back(core, new);
        }
        let mut result = allocate(core, wanted, avoided.clone()).await;
        let is_refused = |error: &FsError| *error != FsError::QuotaExceeded;
        if !avoided.is_empty()
            && matches!(&result, Err(ClientError::Fs(error)) if is_refused(error))
        {
            // Better one that failed lately, or was busy a moment ago, than none.
            result = allocate(core, wanted, Vec::new()).await;
        }
        let mut blocks = result?.into_iter();
        let first = blocks.next();
        let (lacking, blocks): (Vec<_>, Vec<_>) = blocks.partition(|new| new.lacks_replicas());
        for new in lacking {
            // By the time that it is needed, there may be more datanodes.
            give_back(core, new);
        }
        self.stock
            .lock()
            .entry(wanted.rules)
            .or_default()
            .extend(blocks);
        first.ok_or(ClientError::UnexpectedReply(mutation::AllocateBlocks::NAME))
    }

    fn pop(&self, rules: PlacementRules) -> Option<NewBlock> {
        self.stock.lock().get_mut(&rules)?.pop()
    }
}

/// Ends a block that nothing will be written to.
fn give_back(core: &Arc<Core>, new: NewBlock) {
    core.locations.forget(new.block);
    tokio::spawn(discard(core.clone(), new));
}

async fn allocate(
    core: &Arc<Core>,
    wanted: Wanted,
    exclude: Vec<harvestfs_protocol::ids::NodeId>,
) -> Result<Vec<NewBlock>, ClientError> {
    let Wanted {
        rules,
        file,
        may_release,
    } = wanted;
    let op = mutation::AllocateBlocks {
        count: BLOCKS_PER_ALLOCATION,
        rules,
        exclude,
    };
    let generation = core.session.generation();
    let reply = core.session.allocate_blocks(op, file, may_release).await?;
    let MetaReply::Located(located) = reply else {
        return Err(ClientError::UnexpectedReply(mutation::AllocateBlocks::NAME));
    };
    core.locations.learn(&located);
    let Located { blocks, .. } = located;
    let new = |block: BlockInfo| {
        let nodes = block.replicas.iter();
        NewBlock {
            block: block.block,
            token: block.token,
            nodes: nodes
                .filter_map(|node| core.locations.node(*node))
                .collect(),
            due_replicas: block.due_replicas,
            class: rules.class,
            generation,
        }
    };
    let (placed, nowhere): (Vec<_>, Vec<_>) = blocks
        .into_iter()
        .map(new)
        .partition(|new| !new.nodes.is_empty());
    for new in nowhere {
        give_back(core, new);
    }
    Ok(placed)
}
