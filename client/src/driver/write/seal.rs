//! The end of blocks: they are sealed when full, recovered when their pipeline broke, and given
//! back when nothing was written to them.

use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{DataRequest, Opening, SealReply, SealRequest};
use harvestfs_protocol::error::{DataError, FsError};
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::meta::{SealedBlock, mutation};
use harvestfs_protocol::transport::TransportError;
use harvestfs_protocol::types::{Credentials, NodeInfo};
use tokio::task::JoinSet;

use crate::driver::cluster::Cluster;
use crate::driver::locations::{Locations, ended_early};
use crate::driver::write::pipeline::{BlockStream, Source};
use crate::engine::write::block::Saved;
use crate::engine::write::stock::NewBlock;
use crate::error::ClientError;

/// Deadline for sealing a replica whose pipeline broke, over all attempts.
const SEAL_DEADLINE: Duration = Duration::from_secs(4);
const SEAL_RETRY: Duration = Duration::from_millis(50);
/// Pause between two attempts to report the end of a block to the namenode.
const REPORT_RETRY: Duration = Duration::from_secs(1);

/// Seals the surviving replicas of a block whose pipeline broke.
pub(crate) async fn recover<S: Source>(
    cluster: Arc<Cluster>,
    source: Arc<S>,
    stream: Arc<BlockStream<S::Job>>,
) {
    let block = stream.new.block;
    let expired = stream.new.generation != cluster.session.generation();
    let length_bytes = stream.acked_bytes();
    if length_bytes == 0 {
        stream.settle(Saved::Enough);
        discard(cluster, stream.new.clone()).await;
        return;
    }
    let nodes = &stream.new.nodes;
    let survivors = seal_on(&cluster, &stream, nodes, nodes.len(), length_bytes).await;
    let saved = |lost: String| Saved::of(survivors.len(), nodes.len(), || lost);
    if expired {
        // The namenode seals it as well. Its committed data can still be made stable.
        stream.settle(saved("the session has expired".to_owned()));
        return;
    }
    let saved = saved(format!("no replica of block {block} could be sealed"));
    if survivors.is_empty() {
        tracing::warn!(%block, "no replica of a block could be sealed");
        stream.settle(saved);
        cluster.locations.replicas().forget(block);
        source.block_lost(block);
        // If none of it was committed, the block is given up. Otherwise the namenode refuses that,
        // and is sent the length, so that it can judge replicas that return.
        if seal(&cluster, &stream.new, 0, Vec::new()).await.is_err() {
            let sealed = seal(&cluster, &stream.new, length_bytes, Vec::new()).await;
            log_seal(block, sealed);
        }
        return;
    }
    cluster.locations.replicas().narrow(block, &survivors);
    stream.settle(saved);
    let sealed = seal(&cluster, &stream.new, length_bytes, survivors).await;
    log_seal(block, sealed);
}

pub(crate) async fn report_sealed<J>(cluster: Arc<Cluster>, stream: Arc<BlockStream<J>>) {
    let nodes = stream.new.nodes.iter().map(|node| node.node).collect();
    let sealed = seal(&cluster, &stream.new, stream.acked_bytes(), nodes).await;
    log_seal(stream.new.block, sealed);
}

/// Gives back a block that nothing was written to.
pub(crate) async fn discard(cluster: Arc<Cluster>, new: NewBlock) {
    if new.generation == cluster.session.generation() {
        log_seal(new.block, seal(&cluster, &new, 0, Vec::new()).await);
    }
}

/// Reports the end of a block to the namenode, which does not repair the block before. The report is
/// therefore repeated however long the namenode is unreachable; when the session ends, it knows by itself.
async fn seal(
    cluster: &Cluster,
    new: &NewBlock,
    length_bytes: u64,
    replicas: Vec<NodeId>,
) -> Result<(), ClientError> {
    let sealed = SealedBlock {
        block: new.block,
        length_bytes,
        replicas,
    };
    let op = mutation::SealBlocks {
        blocks: vec![sealed],
    };
    let session = &cluster.session;
    loop {
        match session.mutate(&Credentials::root(), op.clone()).await {
            Err(
                ClientError::Unreachable { .. }
                | ClientError::Fs(FsError::Recovery(_) | FsError::Busy { .. }),
            ) if new.generation == session.generation() && !session.is_closed() => {
                tokio::time::sleep(REPORT_RETRY).await;
            }
            result => return result.map(|_| ()),
        }
    }
}

fn log_seal(block: BlockId, result: Result<(), ClientError>) {
    if let Err(error) = result {
        // The block ends with the session at the latest.
        tracing::debug!(%block, %error, "cannot report a block as sealed");
    }
}

/// Seals replicas of a block whose pipeline broke at the length that all its datanodes
/// acknowledged. Returns the datanodes on which it is sealed, as soon as there are `enough`. A
/// replica that is shorter, but has `at_least` that many bytes, is sealed as it is.
pub(crate) async fn seal_on<J>(
    cluster: &Arc<Cluster>,
    stream: &BlockStream<J>,
    nodes: &[Arc<NodeInfo>],
    enough: usize,
    at_least: u64,
) -> Vec<NodeId> {
    let length_bytes = stream.acked_bytes();
    let mut attempts = JoinSet::new();
    for node in nodes {
        let (cluster, node) = (cluster.clone(), node.clone());
        let request = SealRequest {
            block: stream.new.block,
            token: stream.new.token,
            length_bytes,
        };
        attempts.spawn(async move {
            let attempt = seal_replica(&cluster.locations, &node, request, at_least);
            let sealed = tokio::time::timeout(SEAL_DEADLINE, attempt).await;
            matches!(sealed, Ok(true)).then_some(node.node)
        });
    }
    let mut sealed = Vec::new();
    while sealed.len() < enough
        && let Some(attempt) = attempts.join_next().await
    {
        sealed.extend(attempt.ok().flatten());
    }
    sealed
}

async fn seal_replica(
    locations: &Locations,
    node: &NodeInfo,
    mut request: SealRequest,
    at_least: u64,
) -> bool {
    loop {
        match try_seal(locations, node, &request).await {
            Ok(Ok(())) => return true,
            // A shorter length could cut it.
            Ok(Err(DataError::ShortReplica { have_bytes }))
                if (at_least..request.length_bytes).contains(&have_bytes) =>
            {
                request.length_bytes = have_bytes;
                continue;
            }
            // The datanode may not have noticed yet that the pipeline is broken.
            Ok(Err(DataError::OutOfOrder(_) | DataError::Busy { .. })) => {}
            Ok(Err(error)) => {
                tracing::debug!(node = node.name, %error, "cannot seal a replica");
                return false;
            }
            Err(error) => tracing::debug!(node = node.name, %error, "cannot seal a replica yet"),
        }
        tokio::time::sleep(SEAL_RETRY).await;
    }
}

async fn try_seal(
    locations: &Locations,
    node: &NodeInfo,
    request: &SealRequest,
) -> Result<SealReply, TransportError> {
    let connection = locations.connect(node).await?;
    let (mut sender, mut receiver) = connection.open_stream(StreamKind::Data).await?;
    let seal = DataRequest::Seal(request.clone());
    sender.send(&Opening::from(seal)).await?;
    sender.finish()?;
    match receiver.recv::<SealReply>(SEAL_DEADLINE).await? {
        Some((reply, _)) => Ok(reply),
        None => Ok(Err(ended_early())),
    }
}
