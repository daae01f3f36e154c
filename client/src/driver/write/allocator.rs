//! Blocks for writing, allocated before they are needed.

use std::sync::Arc;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{InodeId, NodeId};
use harvestfs_protocol::meta::{MetaReply, mutation};
use harvestfs_protocol::types::{BlockInfo, PlacementRules};
use parking_lot::Mutex;

use super::seal::discard;
use crate::driver::clock;
use crate::driver::cluster::Cluster;
use crate::engine::write::stock::{NewBlock, Stock, Usable};
use crate::error::ClientError;

/// Blocks per request: one to use and one in advance. The namenode reserves room for each.
const BLOCKS_PER_ALLOCATION: u32 = 2;

/// The purpose of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) rules: PlacementRules,
    /// The file that the first data belongs to.
    pub(crate) file: InodeId,
    /// Whether recently removed files may be released first, if a quota leaves no room.
    pub(crate) may_release: bool,
}

/// The stock of allocated blocks.
#[derive(Default)]
pub(crate) struct Allocator {
    stock: Mutex<Stock>,
}

impl Allocator {
    /// Returns a new block, for data of this file first; avoids datanodes that failed lately or are busy.
    pub(crate) async fn take(
        &self,
        cluster: &Arc<Cluster>,
        wanted: Wanted,
    ) -> Result<NewBlock, ClientError> {
        let usable = Usable {
            generation: cluster.session.generation(),
            epoch: cluster.session.epoch(),
            avoided: cluster.locations.replicas().avoided(clock::now()),
        };
        let mut unusable = Vec::new();
        let taken = self.stock.lock().take(wanted.rules, &usable, &mut unusable);
        give_back(cluster, unusable);
        if let Some(new) = taken {
            return Ok(new);
        }
        let avoided = usable.avoided;
        let mut result = allocate(cluster, wanted, avoided.clone()).await;
        let is_refused = |error: &FsError| *error != FsError::QuotaExceeded;
        if !avoided.is_empty()
            && matches!(&result, Err(ClientError::Fs(error)) if is_refused(error))
        {
            // A datanode that failed lately, or was busy a moment ago, is better than none.
            result = allocate(cluster, wanted, Vec::new()).await;
        }
        let mut blocks = result?.into_iter();
        let first = blocks.next();
        let mut unusable = Vec::new();
        self.stock.lock().put(wanted.rules, blocks, &mut unusable);
        give_back(cluster, unusable);
        first.ok_or(ClientError::UnexpectedReply(mutation::AllocateBlocks::NAME))
    }

    /// Returns how many replicas a new block gets at present.
    pub(crate) async fn replicas_of_new(
        &self,
        cluster: &Arc<Cluster>,
        wanted: Wanted,
    ) -> Result<usize, ClientError> {
        let new = self.take(cluster, wanted).await?;
        let replicas = new.nodes.len();
        give_back(cluster, vec![new]);
        Ok(replicas)
    }
}

/// Gives back blocks that nothing will be written to.
fn give_back(cluster: &Arc<Cluster>, blocks: Vec<NewBlock>) {
    for new in blocks {
        cluster.locations.replicas().forget(new.block);
        tokio::spawn(discard(cluster.clone(), new));
    }
}

async fn allocate(
    cluster: &Arc<Cluster>,
    wanted: Wanted,
    exclude: Vec<NodeId>,
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
    let session = &cluster.session;
    // The session may be replaced while this waits.
    let (reply, generation) = session.allocate_blocks(op, file, may_release).await?;
    let MetaReply::Located(located) = reply else {
        return Err(ClientError::UnexpectedReply(mutation::AllocateBlocks::NAME));
    };
    let (placed, nowhere): (Vec<_>, Vec<_>) = {
        let mut replicas = cluster.locations.replicas();
        replicas.learn(&located);
        let new = |block: BlockInfo| NewBlock {
            block: block.block,
            token: block.token,
            nodes: block
                .replicas
                .iter()
                .filter_map(|node| replicas.node(*node))
                .collect(),
            due_replicas: block.due_replicas,
            class: rules.class,
            generation,
        };
        let new_blocks = located.blocks.into_iter().map(new);
        new_blocks.partition(|new| !new.nodes.is_empty())
    };
    give_back(cluster, nowhere);
    Ok(placed)
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::name::Name;
    use harvestfs_protocol::types::Credentials;

    use super::*;
    use crate::OpenFlags;
    use crate::testing;

    /// The client learns only from the refusal that its session has ended.
    #[tokio::test(flavor = "multi_thread")]
    async fn blocks_that_were_requested_in_a_session_that_had_ended_belong_to_the_next() {
        let cluster = testing::Cluster::start(3, 3).await;
        let client = cluster.client("a").await;
        let (root, name) = (Credentials::root(), Name::new(b"file").unwrap());
        let created = client.create_file(&root, InodeId::ROOT, &name, 0o644, OpenFlags::WRITE);
        let (attr, _file) = created.await.unwrap();
        let session = &client.core().session;
        let cluster_of_client = Arc::new(Cluster::new(session.clone()));
        let before = session.generation();
        cluster.namenode.expire_sessions();
        let wanted = Wanted {
            rules: session.default_rules(),
            file: attr.ino,
            may_release: false,
        };
        let allocator = Allocator::default();
        let first = allocator.take(&cluster_of_client, wanted).await.unwrap();
        let second = allocator.take(&cluster_of_client, wanted).await.unwrap();
        assert_ne!(session.generation(), before, "the session was not replaced");
        for new in [first, second] {
            assert_eq!(new.generation, session.generation());
        }
        let asked = cluster.namenode.calls(mutation::AllocateBlocks::NAME);
        assert_eq!(asked, 1, "the second block was not kept");
    }
}
