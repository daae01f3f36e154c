//! Reading a range of a block from any replica that answers.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{DataRequest, Opening, ReadPacket, ReadRequest, first_mismatch};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::CHUNK_BYTES;
use harvestfs_protocol::machine;
use harvestfs_protocol::meta::housekeeping;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::transport::FrameReceiver;
use harvestfs_protocol::types::{Credentials, FileBlock, Located, NodeInfo};

use super::short_circuit::ShortCircuit;
use crate::driver::clock;
use crate::driver::cluster::Cluster;
use crate::driver::locations::ended_early;
use crate::engine::read::attempts::{Attempts, Failure, Round, Verdict};
use crate::engine::read::recent::Recent;
use crate::engine::read::replicas::Location;
use crate::engine::read::times::ReadTimes;
use crate::engine::session::call::Patience;
use crate::error::ClientError;

/// A replica that sends nothing for this long is abandoned.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(8);

/// The state that all reads share.
pub(crate) struct Reads {
    pub(super) cluster: Arc<Cluster>,
    /// Recently committed data.
    pub(super) recent: Arc<Recent>,
    /// Bytes that are read ahead, over all files.
    pub(super) ahead_bytes: AtomicU64,
    times: ReadTimes,
    fetched: Fetched,
    short_circuit: ShortCircuit,
}

/// Bytes of blocks that were read, by their source.
#[derive(Default)]
struct Fetched {
    network: AtomicU64,
    short_circuit: AtomicU64,
}

/// Counters of all reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadCounters {
    pub(crate) denials: u64,
    pub(crate) hedged_reads: u64,
    pub(crate) network_bytes: u64,
    pub(crate) short_circuit_bytes: u64,
}

impl Reads {
    pub(crate) fn new(cluster: Arc<Cluster>, recent: Arc<Recent>) -> Self {
        Self {
            cluster,
            recent,
            ahead_bytes: AtomicU64::new(0),
            times: ReadTimes::default(),
            fetched: Fetched::default(),
            short_circuit: ShortCircuit::new(),
        }
    }

    /// Remembers locations of blocks that the namenode returned.
    pub(crate) fn learn(&self, located: &Located) {
        self.cluster.locations.replicas().learn(located);
    }

    /// Gives back files of datanodes on this host that are no longer lent.
    pub(crate) fn return_files(&self) {
        self.short_circuit.return_files();
    }

    /// Returns the datanodes that failed lately or are busy.
    #[cfg(test)]
    pub(crate) fn avoided(&self) -> Vec<harvestfs_protocol::ids::NodeId> {
        let mut replicas = self.cluster.locations.replicas();
        replicas.avoided(clock::now())
    }

    pub(crate) fn counters(&self) -> ReadCounters {
        ReadCounters {
            denials: self.cluster.locations.replicas().denials(),
            hedged_reads: self.times.hedged_reads(),
            network_bytes: self.fetched.network.load(Ordering::Relaxed),
            short_circuit_bytes: self.fetched.short_circuit.load(Ordering::Relaxed),
        }
    }
}

/// A range of a block to be read, widened to whole chunks.
struct Target {
    block: BlockId,
    chunks: Range<u64>,
}

/// Reads a range of a block of a file, at most a few MiB; it starts at `at` in the file. If the
/// block has to be located, `others` are located too.
///
/// # Errors
/// [`ClientError::LeftFile`] when the extents that named the block are out of date;
/// [`ClientError::AllReplicasBusy`] and [`ClientError::NoReplica`] once the timeouts of the options
/// have expired; the error that keeps the namenode from locating the block.
pub(crate) async fn read_block(
    reads: &Arc<Reads>,
    credentials: &Credentials,
    (ino, at): (InodeId, FileBlock),
    range: Range<u64>,
    others: impl Fn() -> Vec<FileBlock>,
) -> Result<Bytes, ClientError> {
    let block = at.block;
    let chunk = CHUNK_BYTES as u64;
    let target = Target {
        block,
        chunks: range.start / chunk * chunk..range.end.next_multiple_of(chunk),
    };
    let (session, locations) = (&reads.cluster.session, &reads.cluster.locations);
    let patience = Patience {
        unreachable: session.options.unreachable_timeout,
        busy: session.options.busy_timeout,
    };
    let mut attempts = Attempts::new(block, patience, clock::now());
    let mut data = BytesMut::new();
    loop {
        let located = locations.locate(session, credentials, (ino, at), &others);
        let mut round = Round::default();
        match located.await {
            Ok(location) => {
                let all = read_round(reads, &location, &target, &mut data, &mut round);
                if let Some(all) = all.await {
                    let skip = offset_in(range.start - target.chunks.start);
                    return Ok(all.slice(skip..skip + offset_in(range.end - range.start)));
                }
            }
            Err(ClientError::NoReplica { reason, .. }) => round = Round::without_replica(reason),
            Err(error) => return Err(error),
        }
        let pause = attempts.after(round, machine::random(), clock::now());
        // By then the namenode may know a replica that is not busy, or a new one.
        locations.replicas().forget(block);
        tokio::time::sleep(pause?).await;
    }
}

/// Asks one replica after another, resuming where the last one ended. If one is slow, the next is
/// asked concurrently.
async fn read_round(
    reads: &Arc<Reads>,
    location: &Location,
    target: &Target,
    data: &mut BytesMut,
    round: &mut Round,
) -> Option<Bytes> {
    let locations = &reads.cluster.locations;
    let in_order = locations.replicas().in_order(location, clock::now());
    let mut nodes = in_order.into_iter();
    let times = reads.times.of(target.chunks.end - target.chunks.start);
    reads.times.begin();
    let mut spare: Option<Arc<NodeInfo>> = None;
    while let Some(node) = spare.take().or_else(|| nodes.next()) {
        let began = clock::now();
        let first = attempt(reads, &node, location, target, std::mem::take(data));
        tokio::pin!(first);
        let hedge = tokio::time::sleep(times.hedge_delay());
        let early = tokio::select! {
            biased;
            ended = &mut first => Some(ended),
            () = hedge => None,
        };
        let may_hedge = early.is_none() && nodes.len() > 0 && reads.times.may_hedge();
        let (ended, node) = match (early, nodes.next()) {
            (Some(ended), next) => {
                spare = next;
                (ended, node.clone())
            }
            (None, next) if !may_hedge => {
                spare = next;
                (first.await, node.clone())
            }
            (None, None) => (first.await, node.clone()),
            (None, Some(second_node)) => {
                tracing::debug!(block = %target.block, slow = node.name, "asking a second replica");
                let second = attempt(reads, &second_node, location, target, BytesMut::new());
                tokio::pin!(second);
                // The first to end counts, unless it failed and the other succeeds.
                tokio::select! {
                    biased;
                    ended = &mut first => match ended {
                        (_, Ok(_)) => (ended, node.clone()),
                        (_, Err(failure)) => {
                            failed(reads, &node, target, &failure, round);
                            (second.await, second_node.clone())
                        }
                    },
                    ended = &mut second => match ended {
                        (_, Ok(_)) => {
                            locations.note_failure(node.node);
                            (ended, second_node.clone())
                        }
                        (_, Err(failure)) => {
                            failed(reads, &second_node, target, &failure, round);
                            (first.await, node.clone())
                        }
                    },
                }
            }
        };
        match ended {
            (_, Ok(all)) => {
                times.note(clock::now() - began);
                locations.replicas().note_success(node.node);
                return Some(all);
            }
            (progress, Err(failure)) => {
                *data = progress;
                failed(reads, &node, target, &failure, round);
            }
        }
    }
    None
}

/// Acts on a failure: updates the state of the replica, and reports it to the namenode if necessary.
fn failed(
    reads: &Arc<Reads>,
    node: &NodeInfo,
    target: &Target,
    failure: &Failure,
    round: &mut Round,
) {
    tracing::debug!(block = %target.block, node = node.name, %failure, "a replica cannot be read");
    let locations = &reads.cluster.locations;
    let corrupt = match round.failed(&node.name, failure) {
        Verdict::Busy { retry_after_ms } => {
            let now = clock::now();
            locations
                .replicas()
                .note_busy(node.node, retry_after_ms, now);
            return;
        }
        Verdict::NoRight => return,
        Verdict::Bad => {
            locations.replicas().drop_replica(target.block, node.node);
            true
        }
        Verdict::Failed => {
            locations.note_failure(node.node);
            false
        }
    };
    let op = housekeeping::ReportBadReplica {
        block: target.block,
        node: node.node,
        corrupt,
    };
    let cluster = reads.cluster.clone();
    tokio::spawn(RequestId::current().scope(async move {
        // If this is lost, the namenode may still find out by itself.
        let _ = cluster.session.keep_house(op).await;
    }));
}

/// Reads the missing part of the range from one replica, directly from its file if that is on this
/// host. Returns the data received so far if it fails.
async fn attempt(
    reads: &Arc<Reads>,
    node: &NodeInfo,
    location: &Location,
    target: &Target,
    mut data: BytesMut,
) -> (BytesMut, Result<Bytes, Failure>) {
    if data.is_empty() {
        let (here, locations) = (&reads.short_circuit, &reads.cluster.locations);
        let (block, chunks) = (target.block, &target.chunks);
        let lent = here.read(locations, node, block, location.token, chunks);
        match lent.await {
            Ok(Some(whole)) => {
                let bytes = whole.len() as u64;
                reads
                    .fetched
                    .short_circuit
                    .fetch_add(bytes, Ordering::Relaxed);
                return (data, Ok(whole));
            }
            Ok(None) => {}
            // Over the network, the datanode would wait for the same disk.
            Err(error) => return (data, Err(error.into())),
        }
    }
    let had = data.len();
    let from = target.chunks.start + had as u64;
    let result = async {
        let connection = reads.cluster.locations.connect(node).await?;
        let (mut sender, mut receiver) = connection.open_stream(StreamKind::Data).await?;
        let request = Opening::from(DataRequest::Read(ReadRequest {
            block: target.block,
            token: location.token,
            block_offset: from,
            length_bytes: target.chunks.end - from,
        }));
        sender.send(&request).await?;
        sender.finish()?;
        receive(&mut receiver, target, &mut data).await
    }
    .await;
    let received = match &result {
        Ok(Some(whole)) => whole.len(),
        Ok(None) | Err(_) => data.len() - had,
    };
    reads
        .fetched
        .network
        .fetch_add(received as u64, Ordering::Relaxed);
    match result {
        Ok(Some(whole)) => (BytesMut::new(), Ok(whole)),
        Ok(None) => {
            let whole = std::mem::take(&mut data).freeze();
            (data, Ok(whole))
        }
        Err(failure) => (data, Err(failure)),
    }
}

/// Receives packets until the range is complete in `data`; a range that arrived in one packet is
/// returned without a copy.
async fn receive(
    receiver: &mut FrameReceiver,
    target: &Target,
    data: &mut BytesMut,
) -> Result<Option<Bytes>, Failure> {
    let total = offset_in(target.chunks.end - target.chunks.start);
    while data.len() < total {
        let (block_offset, checksums, length) = match receiver.recv(SILENCE_MAX).await? {
            Some((
                ReadPacket::Data {
                    block_offset,
                    checksums,
                },
                length,
            )) => (block_offset, checksums, length),
            Some((ReadPacket::Failed(error), _)) => return Err(error.into()),
            None => return Err(ended_early().into()),
        };
        let expected = target.chunks.start + data.len() as u64;
        let left = total - data.len();
        if block_offset != expected || length == 0 || length > left || length % CHUNK_BYTES != 0 {
            let text = format!("{length} bytes at {block_offset} instead of {left} at {expected}");
            return Err(DataError::Protocol(text).into());
        }
        let mismatch = |bad: usize| DataError::Corrupt {
            offset: block_offset + bad as u64,
        };
        let first_piece = receiver.read_data_chunk(length, SILENCE_MAX).await?;
        let first_piece = first_piece.ok_or_else(ended_early)?;
        if data.is_empty() && first_piece.len() == total {
            return match first_mismatch(&first_piece, &checksums) {
                None => Ok(Some(first_piece)),
                Some(bad) => Err(mismatch(bad).into()),
            };
        }
        if data.capacity() < total {
            data.reserve(total - data.len());
        }
        let start = data.len();
        data.extend_from_slice(&first_piece);
        let result = receive_rest(receiver, data).await;
        let first_bad = match &result {
            Ok(()) => first_mismatch(&data[start..], &checksums),
            // Data of an incomplete packet was not verified.
            Err(_) => Some(0),
        };
        if let Some(bad) = first_bad {
            data.truncate(start + bad);
            result?;
            return Err(mismatch(bad).into());
        }
    }
    Ok(None)
}

async fn receive_rest(receiver: &mut FrameReceiver, data: &mut BytesMut) -> Result<(), Failure> {
    while let Some(piece) = receiver.read_data_chunk(usize::MAX, SILENCE_MAX).await? {
        data.extend_from_slice(&piece);
    }
    Ok(())
}

/// An offset within a range. It fits: ranges are a few MiB.
#[allow(clippy::cast_possible_truncation)]
fn offset_in(bytes: u64) -> usize {
    bytes as usize
}
