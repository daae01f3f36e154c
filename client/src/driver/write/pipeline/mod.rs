//! Writing one block: packets go out on one or several pipelines, acknowledgements come back.

mod sender;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{DataRequest, Opening, WriteAck, WriteRequest, round_up_to_chunk};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::token::BlockToken;
use harvestfs_protocol::transport::{FrameReceiver, FrameSender, TransportError};
use harvestfs_protocol::types::{NodeInfo, StorageClass};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;

pub(crate) use self::sender::StreamSender;

use self::sender::Content;
use crate::driver::locations::Locations;
use crate::driver::write::writer::Job;
use crate::error::ClientError;

/// A pipeline has to be set up within this.
const READY_DEADLINE: Duration = Duration::from_secs(10);
/// A packet has to be acknowledged, and a send to be taken, within this. A disk that syncs slowly
/// is not worth waiting for longer: there are others.
const STALL_DEADLINE: Duration = Duration::from_secs(15);
/// How often a pipeline that says nothing is looked at.
const ACK_POLL: Duration = Duration::from_millis(500);
/// A pipeline that owes an answer for this long is searched for a datanode that is gone. A killed
/// process would show by itself only after the connection's idle timeout, and not which it is.
const SUSPICIOUS: Duration = Duration::from_millis(1_500);

/// How the datanodes of a block get their data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topology {
    /// One pipeline through all: each byte leaves the client once.
    Chain,
    /// One pipeline for each: one round trip.
    Star,
}

/// A fresh block and where it goes.
#[derive(Clone, Debug)]
pub(crate) struct NewBlock {
    pub(crate) block: BlockId,
    pub(crate) token: BlockToken,
    pub(crate) nodes: Vec<Arc<NodeInfo>>,
    /// How many replicas it is to have in the end.
    pub(crate) due_replicas: u8,
    pub(crate) class: Option<StorageClass>,
    /// The session that it belongs to.
    pub(crate) generation: u64,
}

impl NewBlock {
    /// Whether it has fewer replicas than it is to have in the end: datanodes are away.
    pub(crate) fn lacks_replicas(&self) -> bool {
        self.nodes.len() < usize::from(self.due_replicas)
    }
}

/// Which datanode failed, and how.
#[derive(Clone, Debug)]
pub(crate) struct NodeFailure {
    pub(crate) node: NodeId,
    pub(crate) error: DataError,
}

/// A block that is being written, shared by the tasks that use it.
pub(crate) struct BlockStream {
    pub(crate) new: NewBlock,
    opened: Instant,
    state: Mutex<State>,
    /// Something that [`BlockStream::stable`] waits for.
    changed: Notify,
    /// Wakes the task that sends.
    owner: Arc<Notify>,
}

struct State {
    phase: Phase,
    /// Packets acknowledged by each pipeline.
    acked_by: Vec<u64>,
    /// Packets acknowledged by all.
    acked: u64,
    sent: u64,
    in_flight: VecDeque<InFlight>,
    unacked_bytes: u64,
    /// End of the data that all have acknowledged.
    acked_bytes: u64,
    /// End of the data that was sent.
    sent_bytes: u64,
    last_acked_data: u64,
    last_stable: u64,
    sync_wanted: bool,
}

#[derive(Clone, Debug)]
enum Phase {
    Open,
    /// A pipeline broke; the replicas are being sealed.
    Failed(NodeFailure),
    Sealed,
    /// No replica could be sealed.
    Lost(String),
}

struct InFlight {
    number: u64,
    data_end: u64,
    bytes: u64,
    jobs: Vec<(u64, Job)>,
    stable: bool,
    seals: bool,
    sent: Instant,
}

/// Sets up the pipelines of a block.
pub(crate) async fn open(
    locations: &Arc<Locations>,
    new: NewBlock,
    topology: Topology,
    owner: Arc<Notify>,
) -> Result<StreamSender, NodeFailure> {
    let chains = Chain::of(&new, topology);
    let mut attempts = JoinSet::new();
    for (index, chain) in chains.iter().cloned().enumerate() {
        let (locations, new) = (locations.clone(), new.clone());
        attempts.spawn(
            RequestId::current()
                .scope(async move { (index, open_pipeline(&locations, &new, &chain).await) }),
        );
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
        opened: Instant::now(),
        state: Mutex::new(State {
            phase: Phase::Open,
            acked_by: vec![0; opened.len()],
            acked: 0,
            sent: 0,
            in_flight: VecDeque::new(),
            unacked_bytes: 0,
            acked_bytes: 0,
            sent_bytes: 0,
            last_acked_data: 0,
            last_stable: 0,
            sync_wanted: false,
        }),
        changed: Notify::new(),
        owner,
        new,
    });
    let mut senders = Vec::new();
    for ((index, node, sender, receiver), chain) in opened.into_iter().zip(chains) {
        senders.push((node, sender));
        let (locations, stream) = (locations.clone(), stream.clone());
        tokio::spawn(take_acks(locations, stream, index, chain, receiver));
    }
    Ok(StreamSender { stream, senders })
}

/// The datanodes of a pipeline, at least one: the client sends to the first, which passes the data
/// on to the others in their order.
#[derive(Clone)]
struct Chain(Vec<Arc<NodeInfo>>);

impl Chain {
    fn of(new: &NewBlock, topology: Topology) -> Vec<Self> {
        // The allocator takes no block without.
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

/// A datanode ended a stream that should go on.
pub(crate) fn ended_early() -> DataError {
    DataError::Protocol("the datanode ended the stream without a word".into())
}

/// The first of some datanodes that does not accept a new connection.
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

/// Takes the acknowledgements of a pipeline.
async fn take_acks(
    locations: Arc<Locations>,
    stream: Arc<BlockStream>,
    index: usize,
    chain: Chain,
    mut receiver: FrameReceiver,
) {
    let node = chain.first().node;
    let mut probed = None::<Instant>;
    loop {
        let error = match receiver.recv::<WriteAck>(ACK_POLL).await {
            Ok(Some((WriteAck::Acked { packets }, _))) => {
                if stream.acked(index, packets) {
                    continue;
                }
                return;
            }
            Ok(Some((WriteAck::Failed { node, error }, _))) => {
                stream.fail(NodeFailure { node, error });
                return;
            }
            Ok(Some((WriteAck::Ready, _))) => DataError::Protocol("ready twice".into()),
            // The others may still be sealing.
            Ok(None) if stream.is_done_by(index) => return,
            Ok(None) => ended_early(),
            Err(TransportError::Deadline { .. }) => match stream.stalled(index) {
                Stall::No => continue,
                Stall::Over => return,
                Stall::Suspicious => {
                    if probed.is_none_or(|probed| probed.elapsed() > 2 * SUSPICIOUS) {
                        probed = Some(Instant::now());
                        if let Some(failure) = find_gone(&locations, &chain.0).await {
                            stream.fail(failure);
                            return;
                        }
                    }
                    continue;
                }
                Stall::Yes => DataError::Protocol("no acknowledgement in time".into()),
            },
            Err(error) => DataError::Protocol(error.to_string()),
        };
        stream.fail(NodeFailure { node, error });
        return;
    }
}

enum Stall {
    No,
    Suspicious,
    Yes,
    Over,
}

impl BlockStream {
    /// Why it can no longer be written, if a datanode failed.
    pub(crate) fn failure(&self) -> Option<NodeFailure> {
        match &self.state.lock().phase {
            Phase::Failed(failure) => Some(failure.clone()),
            _ => None,
        }
    }

    pub(crate) fn is_sealed(&self) -> bool {
        matches!(self.state.lock().phase, Phase::Sealed)
    }

    /// How long it has been written.
    pub(crate) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Packets and bytes that are not acknowledged yet.
    pub(crate) fn unacked(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.in_flight.len(), state.unacked_bytes)
    }

    /// Bytes that still fit in a block of `block_bytes`, from where the next packet would start.
    pub(crate) fn room(&self, block_bytes: u64) -> usize {
        let start = round_up_to_chunk(self.state.lock().sent_bytes);
        usize::try_from(block_bytes.saturating_sub(start)).unwrap_or(usize::MAX)
    }

    /// Whether a caller waits for acknowledged data to become stable.
    pub(crate) fn wants_sync(&self) -> bool {
        self.state.lock().sync_wanted
    }

    /// The end of what all datanodes acknowledged; what survives when the pipeline breaks.
    pub(crate) fn acked_bytes(&self) -> u64 {
        self.state.lock().acked_bytes
    }

    /// The jobs that were not acknowledged, in order; nothing is in flight any more.
    pub(crate) fn take_unacked(&self) -> Vec<Job> {
        let mut state = self.state.lock();
        state.unacked_bytes = 0;
        let packets = std::mem::take(&mut state.in_flight);
        let jobs = packets.into_iter().flat_map(|packet| packet.jobs);
        jobs.map(|(_, job)| job).collect()
    }

    /// Ends it: `Ok` when its replicas are sealed, else why all of them are lost.
    pub(crate) fn settle(&self, result: Result<(), String>) {
        self.state.lock().phase = match result {
            Ok(()) => Phase::Sealed,
            Err(reason) => Phase::Lost(reason),
        };
        self.changed.notify_waiters();
    }

    /// Waits until everything acknowledged so far is on stable storage.
    pub(crate) async fn stable(&self) -> Result<(), ClientError> {
        let mut target = None;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let mut state = self.state.lock();
                let target = *target.get_or_insert(state.last_acked_data);
                match &state.phase {
                    Phase::Sealed => return Ok(()),
                    Phase::Lost(reason) => {
                        return Err(ClientError::DataLost {
                            reason: reason.clone(),
                        });
                    }
                    _ if state.last_stable >= target => return Ok(()),
                    Phase::Failed(_) => {}
                    Phase::Open => {
                        let on_its_way = state.in_flight.iter().any(|packet| packet.stable);
                        state.sync_wanted |= !on_its_way;
                    }
                }
            }
            self.owner.notify_one();
            changed.await;
        }
    }

    /// A datanode failed. The task that sends handles it.
    pub(crate) fn fail(&self, failure: NodeFailure) {
        {
            let mut state = self.state.lock();
            if !matches!(state.phase, Phase::Open) {
                return;
            }
            state.phase = Phase::Failed(failure);
        }
        self.changed.notify_waiters();
        self.owner.notify_one();
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

    /// Takes an acknowledgement; false when no more is expected.
    fn acked(self: &Arc<Self>, index: usize, packets: u64) -> bool {
        let mut written = Vec::new();
        let sealed = {
            let mut state = self.state.lock();
            if !matches!(state.phase, Phase::Open) {
                return false;
            }
            let packets = packets.min(state.sent);
            state.acked_by[index] = state.acked_by[index].max(packets);
            let Some(all) = state.acked_by.iter().copied().min() else {
                unreachable!("block {} has no pipeline", self.new.block);
            };
            let mut sealed = false;
            while state
                .in_flight
                .front()
                .is_some_and(|packet| packet.number <= all)
            {
                let Some(packet) = state.in_flight.pop_front() else {
                    break;
                };
                state.unacked_bytes -= packet.bytes;
                state.acked_bytes = packet.data_end;
                if packet.bytes > 0 {
                    state.last_acked_data = packet.number;
                }
                if packet.stable {
                    state.last_stable = packet.number;
                }
                sealed |= packet.seals;
                let stable = packet.stable;
                written.extend(packet.jobs.into_iter().map(|(at, job)| (at, job, stable)));
            }
            state.acked = all;
            if sealed {
                state.phase = Phase::Sealed;
            }
            sealed
        };
        for (block_offset, job, stable) in written {
            job.written(self, block_offset, stable);
        }
        self.changed.notify_waiters();
        self.owner.notify_one();
        !sealed
    }

    /// Whether a pipeline has acknowledged everything up to the end of the block.
    fn is_done_by(&self, index: usize) -> bool {
        let state = self.state.lock();
        let ended = state.in_flight.back().is_none_or(|last| last.seals);
        ended && state.acked_by[index] == state.sent
    }

    fn stalled(&self, index: usize) -> Stall {
        let state = self.state.lock();
        if !matches!(state.phase, Phase::Open) {
            return Stall::Over;
        }
        let acked = state.acked_by[index];
        let oldest = state.in_flight.iter().find(|packet| packet.number > acked);
        match oldest {
            Some(packet) if packet.sent.elapsed() > STALL_DEADLINE => Stall::Yes,
            Some(packet) if packet.sent.elapsed() > SUSPICIOUS => Stall::Suspicious,
            _ => Stall::No,
        }
    }

    /// Notes a packet before it is sent; returns where it starts. A packet that is not sent,
    /// because a datanode failed a moment ago, is noted too: its jobs count as not acknowledged.
    fn begin_packet(&self, layout: Content) -> Option<u64> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.sent += 1;
        let start = round_up_to_chunk(state.sent_bytes);
        let (bytes, jobs, stable, seals) = match layout {
            Content::Data { bytes, jobs, sync } => {
                state.sent_bytes = start + bytes;
                let place = |(at, job)| (start + at as u64, job);
                (bytes, jobs.into_iter().map(place).collect(), sync, false)
            }
            Content::Sync => (0, Vec::new(), true, false),
            Content::Seal => (0, Vec::new(), true, true),
        };
        if stable {
            state.sync_wanted = false;
        }
        state.unacked_bytes += bytes;
        state.in_flight.push_back(InFlight {
            number: state.sent,
            data_end: state.sent_bytes,
            bytes,
            jobs,
            stable,
            seals,
            sent: Instant::now(),
        });
        matches!(state.phase, Phase::Open).then_some(start)
    }
}
