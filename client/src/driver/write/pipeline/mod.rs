//! Writing one block: packets are sent on one or several pipelines, and acknowledgements return.

mod sender;

use std::sync::Arc;
use std::time::{Duration, Instant};

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{DataRequest, Opening, WriteAck, WriteRequest};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::transport::{FrameReceiver, FrameSender, TransportError};
use harvestfs_protocol::types::NodeInfo;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::task::JoinSet;

pub(crate) use self::sender::StreamSender;

use crate::driver::clock;
use crate::driver::cluster::Cluster;
use crate::driver::locations::{Locations, ended_early};
use crate::engine::write::block::{
    Block, NodeFailure, STALL_DEADLINE, SUSPICIOUS, Saved, Stability, Stall, Written,
};
use crate::engine::write::packet::Piece;
use crate::engine::write::queue::Topology;
use crate::engine::write::stock::NewBlock;
use crate::error::ClientError;

/// Deadline for setting up a pipeline.
const READY_DEADLINE: Duration = Duration::from_secs(10);
/// How often a silent pipeline is checked.
const ACK_POLL: Duration = Duration::from_millis(500);

/// The owner of the data that is written, which is notified of its fate.
pub(crate) trait Source: Send + Sync + 'static {
    /// A piece of data that is being written.
    type Job: Piece + Send + 'static;

    /// A block was begun.
    fn begun(&self, stream: &Arc<BlockStream<Self::Job>>);
    /// All datanodes of a block have a piece.
    fn written(self: &Arc<Self>, piece: Written<Self::Job>, stream: &Arc<BlockStream<Self::Job>>);
    /// Pieces of one file could not be written anywhere; this counts as one failure.
    fn failed(self: &Arc<Self>, pieces: Vec<Self::Job>, error: &ClientError);
    /// No replica of a block has the acknowledged data.
    fn block_lost(self: &Arc<Self>, block: BlockId);
}

/// A block that is being written, shared by the tasks that use it.
pub(crate) struct BlockStream<J> {
    pub(crate) new: NewBlock,
    opened: Instant,
    state: Mutex<Block<J>>,
    /// Notified when something changes that [`BlockStream::stable`] waits for.
    changed: Notify,
    /// Wakes the task that sends.
    owner: Arc<Notify>,
}

/// Sets up the pipelines of a block.
pub(crate) async fn open<S: Source>(
    cluster: &Arc<Cluster>,
    source: &Arc<S>,
    new: NewBlock,
    topology: Topology,
    owner: Arc<Notify>,
) -> Result<StreamSender<S::Job>, NodeFailure> {
    let chains = Chain::of(&new, topology);
    let mut attempts = JoinSet::new();
    for (index, chain) in chains.iter().cloned().enumerate() {
        let (cluster, new) = (cluster.clone(), new.clone());
        attempts.spawn(RequestId::current().scope(async move {
            let opened = open_pipeline(&cluster.locations, &new, &chain).await;
            (index, opened)
        }));
    }
    let mut opened = Vec::new();
    while let Some(result) = attempts.join_next().await {
        match result {
            Ok((index, Ok((node, sender, receiver)))) => {
                opened.push((index, node, sender, receiver));
            }
            Ok((_, Err(failure))) => return Err(failure),
            Err(error) => {
                return Err(NodeFailure {
                    node: chains[0].first().node,
                    error: DataError::Protocol(error.to_string()),
                });
            }
        }
    }
    opened.sort_by_key(|(index, ..)| *index);
    let stream = Arc::new(BlockStream {
        opened: clock::now(),
        state: Mutex::new(Block::new(opened.len())),
        changed: Notify::new(),
        owner,
        new,
    });
    let mut senders = Vec::new();
    for ((index, node, sender, receiver), chain) in opened.into_iter().zip(chains) {
        senders.push((node, sender));
        let acks = Acks {
            cluster: cluster.clone(),
            source: source.clone(),
            stream: stream.clone(),
            index,
            chain,
            receiver,
        };
        tokio::spawn(acks.take());
    }
    Ok(StreamSender { stream, senders })
}

/// The datanodes of a pipeline, at least one: the client sends to the first, which passes the data
/// on to the others in their order.
#[derive(Clone)]
struct Chain(Vec<Arc<NodeInfo>>);

impl Chain {
    fn of(new: &NewBlock, topology: Topology) -> Vec<Self> {
        // The allocator returns no block without datanodes.
        assert!(
            !new.nodes.is_empty(),
            "block {} is placed nowhere",
            new.block
        );
        match topology {
            Topology::Chain => vec![Self(new.nodes.clone())],
            Topology::Star => new
                .nodes
                .iter()
                .map(|node| Self(vec![node.clone()]))
                .collect(),
        }
    }

    fn first(&self) -> &Arc<NodeInfo> {
        &self.0[0]
    }
}

async fn open_pipeline(
    locations: &Locations,
    new: &NewBlock,
    chain: &Chain,
) -> Result<(NodeId, FrameSender, FrameReceiver), NodeFailure> {
    let (first, downstream) = (chain.first(), &chain.0[1..]);
    let failed = |node, error| NodeFailure { node, error };
    let broken = |error: TransportError| failed(first.node, DataError::Protocol(error.to_string()));
    let connection = locations.connect(first).await.map_err(broken)?;
    let (mut sender, mut receiver) = connection
        .open_stream(StreamKind::Data)
        .await
        .map_err(broken)?;
    sender.set_deadline(STALL_DEADLINE);
    let request = Opening::from(DataRequest::Write(WriteRequest {
        block: new.block,
        token: new.token,
        class: new.class,
        downstream: downstream.iter().map(|node| (**node).clone()).collect(),
    }));
    sender.send(&request).await.map_err(broken)?;
    let mut answer = receiver.recv::<WriteAck>(SUSPICIOUS).await;
    if matches!(answer, Err(TransportError::Deadline { .. })) {
        if let Some(failure) = find_gone(locations, &chain.0).await {
            return Err(failure);
        }
        answer = receiver.recv::<WriteAck>(READY_DEADLINE).await;
    }
    match answer {
        Ok(Some((WriteAck::Ready, _))) => Ok((first.node, sender, receiver)),
        Ok(Some((WriteAck::Failed { node, error }, _))) => Err(failed(node, error)),
        Ok(Some((WriteAck::Acked { .. }, _))) => Err(failed(
            first.node,
            DataError::Protocol("acknowledged before it was ready".into()),
        )),
        Ok(None) => Err(failed(first.node, ended_early())),
        Err(error) => Err(broken(error)),
    }
}

/// Returns the first of some datanodes that does not accept a new connection.
async fn find_gone(locations: &Locations, nodes: &[Arc<NodeInfo>]) -> Option<NodeFailure> {
    for node in nodes {
        if let Err(error) = locations.probe(node).await {
            return Some(NodeFailure {
                node: node.node,
                error: DataError::Protocol(error.to_string()),
            });
        }
    }
    None
}

/// The receiver of a pipeline's acknowledgements.
struct Acks<S: Source> {
    cluster: Arc<Cluster>,
    source: Arc<S>,
    stream: Arc<BlockStream<S::Job>>,
    /// The index of the pipeline among those of the block.
    index: usize,
    chain: Chain,
    receiver: FrameReceiver,
}

impl<S: Source> Acks<S> {
    /// Takes acknowledgements until the block is sealed or a datanode fails.
    async fn take(mut self) {
        let (stream, index) = (self.stream.clone(), self.index);
        let node = self.chain.first().node;
        loop {
            let error = match self.receiver.recv::<WriteAck>(ACK_POLL).await {
                Ok(Some((WriteAck::Acked { packets }, _))) => {
                    if self.acked(packets) {
                        continue;
                    }
                    return;
                }
                Ok(Some((WriteAck::Failed { node, error }, _))) => {
                    stream.fail(NodeFailure { node, error });
                    return;
                }
                Ok(Some((WriteAck::Ready, _))) => DataError::Protocol("ready twice".into()),
                // Other pipelines may still be sealing.
                Ok(None) if stream.state.lock().is_done_by(index) => return,
                Ok(None) => ended_early(),
                Err(TransportError::Deadline { .. }) => {
                    let stall = stream.state.lock().stalled(index, clock::now());
                    match stall {
                        Stall::No => continue,
                        Stall::Over => return,
                        Stall::Suspicious => {
                            let gone = find_gone(&self.cluster.locations, &self.chain.0);
                            if let Some(failure) = gone.await {
                                stream.fail(failure);
                                return;
                            }
                            continue;
                        }
                        Stall::Yes => DataError::Protocol("no acknowledgement in time".into()),
                    }
                }
                Err(error) => DataError::Protocol(error.to_string()),
            };
            stream.fail(NodeFailure { node, error });
            return;
        }
    }

    /// Handles an acknowledgement; returns false when no more are expected.
    fn acked(&self, packets: u64) -> bool {
        let acked = self.stream.state.lock().acked(self.index, packets);
        let Some(acked) = acked else {
            return false;
        };
        for piece in acked.written {
            self.source.written(piece, &self.stream);
        }
        self.stream.changed.notify_waiters();
        self.stream.owner.notify_one();
        !acked.sealed
    }
}

impl<J> BlockStream<J> {
    /// Locks the state of what was sent and acknowledged.
    pub(crate) fn state(&self) -> MutexGuard<'_, Block<J>> {
        self.state.lock()
    }

    /// Returns why the block can no longer be written, if a datanode failed.
    pub(crate) fn failure(&self) -> Option<NodeFailure> {
        self.state.lock().failure()
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.state.lock().is_sealed()
    }

    /// Returns how long the block has been written.
    pub(crate) fn age(&self) -> Duration {
        clock::now().saturating_duration_since(self.opened)
    }

    /// Returns the end of the data that all datanodes acknowledged, which survives when the pipeline breaks.
    pub(crate) fn acked_bytes(&self) -> u64 {
        self.state.lock().acked_bytes()
    }

    /// Ends the block, with the replicas that could be sealed.
    pub(crate) fn settle(&self, saved: Saved) {
        self.state.lock().settle(saved);
        self.changed.notify_waiters();
    }

    /// Waits until everything acknowledged so far is on stable storage, or the block has ended.
    /// Never returns [`Stability::Waiting`].
    pub(crate) async fn stable(&self) -> Stability {
        let through = self.state.lock().last_acked_data();
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let stability = self.state.lock().stability(through);
            if stability != Stability::Waiting {
                return stability;
            }
            self.owner.notify_one();
            changed.await;
        }
    }

    /// Notes that a datanode failed. The sending task handles that.
    fn fail(&self, failure: NodeFailure) {
        if self.state.lock().fail(failure) {
            self.changed.notify_waiters();
            self.owner.notify_one();
        }
    }

    /// Waits until a datanode has failed.
    async fn broken(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.failure().is_some() {
                return;
            }
            changed.await;
        }
    }
}
