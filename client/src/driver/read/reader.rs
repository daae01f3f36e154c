//! Reading a range of a block from any replica that answers.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use bytes::{Bytes, BytesMut};
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{DataRequest, Opening, ReadPacket, ReadRequest, first_mismatch};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::CHUNK_BYTES;
use harvestfs_protocol::machine;
use harvestfs_protocol::meta::housekeeping;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::transport::{FrameReceiver, TransportError};
use harvestfs_protocol::types::{Credentials, FileBlock, NodeInfo};

use crate::driver::core::Core;
use crate::driver::locations::Location;
use crate::driver::write::pipeline::ended_early;
use crate::error::ClientError;

/// A replica that sends nothing for this long is given up.
const SILENCE_MAX: Duration = Duration::from_secs(8);
/// Bounds of the delay before a second replica is asked: below, scheduling noise doubles the load;
/// above, the user notices.
const HEDGE_MIN: Duration = Duration::from_millis(30);
const HEDGE_MAX: Duration = Duration::from_secs(2);
/// Before enough reads were measured.
const HEDGE_START: Duration = Duration::from_millis(500);
const SAMPLES_MIN: u64 = 16;
/// Reads up to this are measured apart from larger ones.
const SMALL_BYTES: u64 = 64 << 10;
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Reads that may be hedged at once, and how many reads earn one more. Slow replicas are the exception
/// that hedging is for; when all are slow, asking twice makes everything slower.
const HEDGES_MAX: u32 = 20;
const READS_PER_HEDGE: u32 = 10;

/// How long reads take: of small and of large ranges. How many may be hedged.
#[derive(Default)]
pub(crate) struct ReadTimes {
    small: Times,
    large: Times,
    hedges: HedgeBudget,
    hedged_reads: AtomicU64,
}

/// Counts in reads: a hedge costs [`READS_PER_HEDGE`] of them.
struct HedgeBudget {
    earned_reads: AtomicU32,
}

impl Default for HedgeBudget {
    fn default() -> Self {
        Self {
            earned_reads: AtomicU32::new(HEDGES_MAX * READS_PER_HEDGE),
        }
    }
}

impl HedgeBudget {
    fn earn(&self) {
        let add = |reads| (reads < HEDGES_MAX * READS_PER_HEDGE).then_some(reads + 1);
        // Full already, if not.
        let _ = self
            .earned_reads
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Whether one more may be hedged.
    fn spend(&self) -> bool {
        let take = |reads: u32| reads.checked_sub(READS_PER_HEDGE);
        self.earned_reads
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }
}

/// Moving mean and deviation, as TCP estimates its round trip. Updates may get lost in a race, which
/// an estimate survives.
#[derive(Default)]
struct Times {
    samples: AtomicU64,
    mean_us: AtomicU64,
    deviation_us: AtomicU64,
}

impl ReadTimes {
    /// Reads for which a second replica was asked.
    pub(crate) fn hedged_reads(&self) -> u64 {
        self.hedged_reads.load(Ordering::Relaxed)
    }

    fn of(&self, bytes: u64) -> &Times {
        if bytes <= SMALL_BYTES {
            &self.small
        } else {
            &self.large
        }
    }
}

impl Times {
    fn note(&self, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX / 16);
        if self.samples.fetch_add(1, Ordering::Relaxed) == 0 {
            self.mean_us.store(took_us, Ordering::Relaxed);
            self.deviation_us.store(took_us / 2, Ordering::Relaxed);
            return;
        }
        let mean = self.mean_us.load(Ordering::Relaxed);
        let deviation = self.deviation_us.load(Ordering::Relaxed);
        let off = mean.abs_diff(took_us);
        self.mean_us
            .store((mean * 7 + took_us) / 8, Ordering::Relaxed);
        self.deviation_us
            .store((deviation * 3 + off) / 4, Ordering::Relaxed);
    }

    /// What hardly any read exceeds.
    fn hedge_delay(&self) -> Duration {
        if self.samples.load(Ordering::Relaxed) < SAMPLES_MIN {
            return HEDGE_START;
        }
        let mean = self.mean_us.load(Ordering::Relaxed);
        let deviation = self.deviation_us.load(Ordering::Relaxed);
        Duration::from_micros(mean + 4 * deviation).clamp(HEDGE_MIN, HEDGE_MAX)
    }
}

/// Bytes of blocks that were read, by where they came from.
#[derive(Default)]
pub(crate) struct Fetched {
    pub(crate) network: AtomicU64,
    pub(crate) short_circuit: AtomicU64,
}

/// Why one replica did not give the whole range.
#[derive(Debug)]
enum Failure {
    Data(DataError),
    Transport(TransportError),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Data(error) => error.fmt(f),
            Self::Transport(error) => error.fmt(f),
        }
    }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        Self::Transport(error)
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

/// A range of a block to be read, widened to whole chunks.
struct Target {
    block: BlockId,
    chunks: Range<u64>,
}

/// Reads a range of a block of a file, at most a few MiB; it starts at `at` in the file. When the
/// block has to be located, `others` are located with it.
///
/// # Errors
/// [`ClientError::LeftFile`] when the extents that named the block are out of date;
/// [`ClientError::AllReplicasBusy`] and [`ClientError::NoReplica`] after the patience of the options;
/// what keeps the namenode from saying where the block is.
pub(crate) async fn read_block(
    core: &Arc<Core>,
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
    let started = Instant::now();
    let mut pause = RETRY_PAUSE_MIN;
    let mut data = BytesMut::new();
    loop {
        let located = core
            .locations
            .locate(&core.session, credentials, (ino, at), &others);
        let mut round = Round::default();
        match located.await {
            Ok(location) => {
                if let Some(all) = read_round(core, &location, &target, &mut data, &mut round).await
                {
                    let skip = offset_in(range.start - target.chunks.start);
                    return Ok(all.slice(skip..skip + offset_in(range.end - range.start)));
                }
            }
            Err(ClientError::NoReplica { reason, .. }) => round.last = reason,
            Err(error) => return Err(error),
        }
        let waited = started.elapsed();
        let options = &core.session.options;
        if let Some(retry_after) = round.retry_after.filter(|_| !round.other_failure) {
            if waited + retry_after > options.busy_timeout {
                return Err(ClientError::AllReplicasBusy { block, waited });
            }
            // The namenode may know by then of a replica that is not busy. Spread, so that not all
            // refused readers come back in the same moment.
            core.locations.forget(block);
            tokio::time::sleep(retry_after.mul_f64(1.0 + machine::random::<f64>() / 5.0)).await;
            continue;
        }
        // Something is wrong with all of them: perhaps they are elsewhere by now.
        core.locations.forget(block);
        if waited > options.unreachable_timeout {
            return Err(ClientError::NoReplica {
                block,
                reason: round.last,
            });
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_PAUSE_MAX);
    }
}

/// What asking every replica once came to.
#[derive(Default)]
struct Round {
    /// The shortest time after which a busy one may be asked again.
    retry_after: Option<Duration>,
    /// One failed that was not just busy.
    other_failure: bool,
    last: String,
}

/// Asks one replica after the other, going on where the last one ended. A slow one gets company by
/// the next.
async fn read_round(
    core: &Arc<Core>,
    location: &Location,
    target: &Target,
    data: &mut BytesMut,
    round: &mut Round,
) -> Option<Bytes> {
    let mut nodes = core
        .locations
        .in_order(location, Instant::now())
        .into_iter();
    let bytes = target.chunks.end - target.chunks.start;
    let times = core.read_times.of(bytes);
    core.read_times.hedges.earn();
    let mut spare: Option<Arc<NodeInfo>> = None;
    while let Some(node) = spare.take().or_else(|| nodes.next()) {
        let began = Instant::now();
        let first = attempt(core, &node, location, target, std::mem::take(data));
        tokio::pin!(first);
        let hedge = tokio::time::sleep(times.hedge_delay());
        let early = tokio::select! {
            biased;
            ended = &mut first => Some(ended),
            () = hedge => None,
        };
        let may_hedge = early.is_none() && nodes.len() > 0 && core.read_times.hedges.spend();
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
                core.read_times.hedged_reads.fetch_add(1, Ordering::Relaxed);
                let second = attempt(core, &second_node, location, target, BytesMut::new());
                tokio::pin!(second);
                // The one that ends first counts, unless it failed and the other does better.
                tokio::select! {
                    biased;
                    ended = &mut first => match ended {
                        (_, Ok(_)) => (ended, node.clone()),
                        (_, Err(failure)) => {
                            failed(core, &node, target, &failure, round);
                            (second.await, second_node.clone())
                        }
                    },
                    ended = &mut second => match ended {
                        (_, Ok(_)) => {
                            core.locations.note_failure(node.node, Instant::now());
                            (ended, second_node.clone())
                        }
                        (_, Err(failure)) => {
                            failed(core, &second_node, target, &failure, round);
                            (first.await, node.clone())
                        }
                    },
                }
            }
        };
        match ended {
            (_, Ok(all)) => {
                times.note(began.elapsed());
                core.locations.note_success(node.node);
                return Some(all);
            }
            (progress, Err(failure)) => {
                *data = progress;
                failed(core, &node, target, &failure, round);
            }
        }
    }
    None
}

/// Draws the conclusions from a failure.
fn failed(
    core: &Arc<Core>,
    node: &NodeInfo,
    target: &Target,
    failure: &Failure,
    round: &mut Round,
) {
    tracing::debug!(block = %target.block, node = node.name, %failure, "a replica cannot be read");
    round.last = format!("{}: {failure}", node.name);
    let corrupt = match failure {
        Failure::Data(DataError::Busy { retry_after_ms }) => {
            let retry_after = Duration::from_millis((*retry_after_ms).into());
            let shortest = round
                .retry_after
                .map_or(retry_after, |r| r.min(retry_after));
            round.retry_after = Some(shortest);
            core.locations
                .note_busy(node.node, *retry_after_ms, Instant::now());
            return;
        }
        Failure::Data(DataError::TokenExpired | DataError::BadToken(_)) => {
            round.other_failure = true;
            return;
        }
        Failure::Data(
            DataError::Corrupt { .. } | DataError::NoSuchReplica | DataError::ShortReplica { .. },
        ) => {
            core.locations.drop_replica(target.block, node.node);
            true
        }
        _ => {
            core.locations.note_failure(node.node, Instant::now());
            false
        }
    };
    round.other_failure = true;
    let op = housekeeping::ReportBadReplica {
        block: target.block,
        node: node.node,
        corrupt,
    };
    let core = core.clone();
    tokio::spawn(RequestId::current().scope(async move {
        // The namenode may find out by itself as well.
        let _ = core.session.keep_house(op).await;
    }));
}

/// Reads what is missing of the range from one replica, from its file if it is on this host. Returns
/// how far it came if it failed.
async fn attempt(
    core: &Arc<Core>,
    node: &NodeInfo,
    location: &Location,
    target: &Target,
    mut data: BytesMut,
) -> (BytesMut, Result<Bytes, Failure>) {
    if data.is_empty()
        && let Some(whole) = core
            .short_circuit
            .read(
                &core.locations,
                node,
                target.block,
                location.token,
                &target.chunks,
            )
            .await
    {
        let bytes = whole.len() as u64;
        core.fetched
            .short_circuit
            .fetch_add(bytes, Ordering::Relaxed);
        return (data, Ok(whole));
    }
    let had = data.len();
    let from = target.chunks.start + had as u64;
    let result = async {
        let connection = core.locations.connect(node).await?;
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
    core.fetched
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

/// Receives packets until the range is complete in `data`; a range that came in one packet is
/// returned as it arrived.
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
            // What did not arrive completely was not verified.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hedges_are_rationed() {
        let budget = HedgeBudget::default();
        let mut hedged = 0;
        for _ in 0..1000 {
            budget.earn();
            hedged += u32::from(budget.spend());
        }
        assert!((100..=120).contains(&hedged), "{hedged} of 1000");
    }

    #[test]
    fn the_hedge_follows_what_reads_take() {
        let times = Times::default();
        assert_eq!(times.hedge_delay(), HEDGE_START);
        for _ in 0..100 {
            times.note(Duration::from_millis(50));
        }
        let usual = times.hedge_delay();
        assert!(usual < Duration::from_millis(60), "{usual:?}");
        for _ in 0..100 {
            times.note(Duration::from_secs(10));
        }
        assert_eq!(times.hedge_delay(), HEDGE_MAX);
    }
}
