//! The state of a block while it is written: which data was sent, what every pipeline has
//! acknowledged, and what is on stable storage.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use harvestfs_protocol::data::round_up_to_chunk;
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::NodeId;

/// Deadline for a packet to be acknowledged, and for a send to be accepted. A disk that syncs
/// slowly is not worth a longer wait: there are others.
pub(crate) const STALL_DEADLINE: Duration = Duration::from_secs(15);
/// A pipeline that owes an answer for this long is searched for a failed datanode. A killed process would
/// otherwise show only after the connection's idle timeout, which does not tell which datanode it was.
pub(crate) const SUSPICIOUS: Duration = Duration::from_millis(1_500);

/// Number of datanodes that must have data on stable storage, if its block was written to at least as many.
pub(crate) const STABLE_REPLICAS_MIN: usize = 2;

/// Which datanode failed, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeFailure {
    pub(crate) node: NodeId,
    pub(crate) error: DataError,
}

/// A block while it is written. `J` is what accompanies each piece of data.
pub(crate) struct Block<J> {
    phase: Phase,
    /// One for each pipeline.
    pipelines: Vec<Pipeline>,
    /// Number of packets sent.
    sent: u64,
    in_flight: VecDeque<Packet<J>>,
    unacked_bytes: u64,
    /// End of the data that all pipelines have acknowledged.
    acked_bytes: u64,
    /// End of the data that was sent.
    sent_bytes: u64,
    last_acked_data: u64,
    last_stable: u64,
    sync_wanted: bool,
}

#[derive(Clone, Default)]
struct Pipeline {
    /// Number of packets that it has acknowledged.
    acked: u64,
    /// When it was last searched for a failed datanode.
    searched: Option<Instant>,
}

enum Phase {
    Open,
    /// A pipeline broke; the replicas are being sealed.
    Failed(NodeFailure),
    Sealed,
    /// Some replicas could be sealed, but fewer than required.
    TooFew,
    /// No replica could be sealed.
    Lost(String),
}

/// How many replicas could be sealed of a block whose pipeline broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    /// As many as required.
    Enough,
    /// Fewer than required.
    TooFew,
    /// None, for this reason.
    Nothing(String),
}

impl Saved {
    /// Judges a block that was written to `written_to` datanodes, of which `sealed` have sealed it;
    /// `lost` returns the reason if none has.
    pub(crate) fn of(sealed: usize, written_to: usize, lost: impl FnOnce() -> String) -> Self {
        match sealed {
            0 => Self::Nothing(lost()),
            _ if sealed < STABLE_REPLICAS_MIN.min(written_to) => Self::TooFew,
            _ => Self::Enough,
        }
    }
}

struct Packet<J> {
    number: u64,
    data_end: u64,
    bytes: u64,
    /// Each with its offset in the block.
    jobs: Vec<(u64, J)>,
    stable: bool,
    seals: bool,
    sent: Instant,
}

/// The content of a packet.
pub(crate) enum Content<J> {
    /// Pieces, each with its offset in the packet.
    Data {
        bytes: u64,
        jobs: Vec<(usize, J)>,
        sync: bool,
    },
    Sync,
    Seal,
}

/// A piece that all datanodes have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Written<J> {
    pub(crate) block_offset: u64,
    pub(crate) job: J,
    pub(crate) stable: bool,
}

/// The result of an acknowledgement.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Acked<J> {
    /// In the order in which the pieces were sent.
    pub(crate) written: Vec<Written<J>>,
    /// Whether the block is sealed: no more acknowledgements are expected.
    pub(crate) sealed: bool,
}

/// Whether a pipeline has owed an answer for too long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stall {
    No,
    /// The pipeline is to be searched for a failed datanode.
    Suspicious,
    Yes,
    /// The block is no longer being written.
    Over,
}

/// Whether data is on stable storage.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stability {
    Stable,
    /// Fewer datanodes than required have it.
    TooFew,
    /// No replica has it, for this reason.
    Lost(String),
    Waiting,
}

impl<J> Block<J> {
    /// Creates the state of a block for at least one pipeline.
    pub(crate) fn new(pipelines: usize) -> Self {
        assert!(pipelines > 0, "a block without a pipeline");
        Self {
            phase: Phase::Open,
            pipelines: vec![Pipeline::default(); pipelines],
            sent: 0,
            in_flight: VecDeque::new(),
            unacked_bytes: 0,
            acked_bytes: 0,
            sent_bytes: 0,
            last_acked_data: 0,
            last_stable: 0,
            sync_wanted: false,
        }
    }

    /// Returns why the block can no longer be written, if a datanode failed.
    pub(crate) fn failure(&self) -> Option<NodeFailure> {
        match &self.phase {
            Phase::Failed(failure) => Some(failure.clone()),
            _ => None,
        }
    }

    /// Whether enough replicas are sealed.
    pub(crate) fn is_sealed(&self) -> bool {
        matches!(self.phase, Phase::Sealed)
    }

    /// Whether its pipeline broke, and too few replicas could be sealed.
    pub(crate) fn ended_badly(&self) -> bool {
        matches!(self.phase, Phase::TooFew | Phase::Lost(_))
    }

    /// Returns the number of packets, and of bytes, that are not acknowledged yet.
    pub(crate) fn unacked(&self) -> (usize, u64) {
        (self.in_flight.len(), self.unacked_bytes)
    }

    /// Returns the bytes that still fit in a block of `block_bytes`, from where the next packet would start.
    pub(crate) fn room(&self, block_bytes: u64) -> usize {
        let start = round_up_to_chunk(self.sent_bytes);
        usize::try_from(block_bytes.saturating_sub(start)).unwrap_or(usize::MAX)
    }

    /// Whether a caller waits for acknowledged data to become stable.
    pub(crate) fn wants_sync(&self) -> bool {
        self.sync_wanted
    }

    /// Returns the end of the data that all datanodes acknowledged, which survives when the pipeline breaks.
    pub(crate) fn acked_bytes(&self) -> u64 {
        self.acked_bytes
    }

    /// Returns the end of the data that was sent.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Notes a packet before it is sent; returns where it starts. A packet that is not sent,
    /// because a datanode failed a moment ago, is noted too: its jobs count as not acknowledged.
    pub(crate) fn begin_packet(&mut self, content: Content<J>, now: Instant) -> Option<u64> {
        self.sent += 1;
        let start = round_up_to_chunk(self.sent_bytes);
        let (bytes, jobs, stable, seals) = match content {
            Content::Data { bytes, jobs, sync } => {
                self.sent_bytes = start + bytes;
                let place = |(at, job)| (start + at as u64, job);
                (bytes, jobs.into_iter().map(place).collect(), sync, false)
            }
            Content::Sync => (0, Vec::new(), true, false),
            Content::Seal => (0, Vec::new(), true, true),
        };
        if stable {
            self.sync_wanted = false;
        }
        self.unacked_bytes += bytes;
        self.in_flight.push_back(Packet {
            number: self.sent,
            data_end: self.sent_bytes,
            bytes,
            jobs,
            stable,
            seals,
            sent: now,
        });
        matches!(self.phase, Phase::Open).then_some(start)
    }

    /// Notes how many packets in total a pipeline has acknowledged. Returns `None` when no more are expected.
    pub(crate) fn acked(&mut self, pipeline: usize, packets: u64) -> Option<Acked<J>> {
        if !matches!(self.phase, Phase::Open) {
            return None;
        }
        // No datanode may acknowledge more than was sent; the excess does not count.
        let packets = packets.min(self.sent);
        let acked = &mut self.pipelines[pipeline].acked;
        *acked = packets.max(*acked);
        let by_all = self.pipelines.iter().map(|pipeline| pipeline.acked).min();
        let by_all = by_all.expect("an open block has a pipeline");
        let mut written = Vec::new();
        let mut sealed = false;
        let is_acked = |packet: &Packet<J>| packet.number <= by_all;
        while self.in_flight.front().is_some_and(is_acked)
            && let Some(packet) = self.in_flight.pop_front()
        {
            assert!(
                packet.bytes <= self.unacked_bytes
                    && (self.acked_bytes..=self.sent_bytes).contains(&packet.data_end),
                "packet {} with {} bytes up to {} is acknowledged, of {} in flight from {} to {}",
                packet.number,
                packet.bytes,
                packet.data_end,
                self.unacked_bytes,
                self.acked_bytes,
                self.sent_bytes
            );
            self.unacked_bytes -= packet.bytes;
            self.acked_bytes = packet.data_end;
            if packet.bytes > 0 {
                self.last_acked_data = packet.number;
            }
            if packet.stable {
                self.last_stable = packet.number;
            }
            sealed |= packet.seals;
            let stable = packet.stable;
            let jobs = packet.jobs.into_iter();
            written.extend(jobs.map(|(block_offset, job)| Written {
                block_offset,
                job,
                stable,
            }));
        }
        if sealed {
            self.phase = Phase::Sealed;
        }
        Some(Acked { written, sealed })
    }

    /// Whether a pipeline has acknowledged everything up to the end of the block.
    pub(crate) fn is_done_by(&self, pipeline: usize) -> bool {
        let ended = self.in_flight.back().is_none_or(|last| last.seals);
        ended && self.pipelines[pipeline].acked == self.sent
    }

    /// Whether a pipeline has owed an answer for too long.
    pub(crate) fn stalled(&mut self, pipeline: usize, now: Instant) -> Stall {
        if !matches!(self.phase, Phase::Open) {
            return Stall::Over;
        }
        let Pipeline { acked, searched } = &mut self.pipelines[pipeline];
        let mut in_flight = self.in_flight.iter();
        let Some(oldest) = in_flight.find(|packet| packet.number > *acked) else {
            return Stall::No;
        };
        let waited = now.saturating_duration_since(oldest.sent);
        if waited > STALL_DEADLINE {
            return Stall::Yes;
        }
        let is_due = searched.is_none_or(|at| now.saturating_duration_since(at) > 2 * SUSPICIOUS);
        if waited > SUSPICIOUS && is_due {
            *searched = Some(now);
            return Stall::Suspicious;
        }
        Stall::No
    }

    /// Notes that a datanode failed; returns false when the block had already ended.
    pub(crate) fn fail(&mut self, failure: NodeFailure) -> bool {
        let is_open = matches!(self.phase, Phase::Open);
        if is_open {
            self.phase = Phase::Failed(failure);
        }
        is_open
    }

    /// Takes the jobs that were not acknowledged, in order; nothing is in flight any more.
    pub(crate) fn take_unacked(&mut self) -> Vec<J> {
        self.unacked_bytes = 0;
        let packets = std::mem::take(&mut self.in_flight);
        let jobs = packets.into_iter().flat_map(|packet| packet.jobs);
        jobs.map(|(_, job)| job).collect()
    }

    /// Ends the block. A sealed block stays sealed, whatever a concurrent attempt to seal it found.
    pub(crate) fn settle(&mut self, saved: Saved) {
        if matches!(self.phase, Phase::Sealed) {
            return;
        }
        self.phase = match saved {
            Saved::Enough => Phase::Sealed,
            Saved::TooFew => Phase::TooFew,
            Saved::Nothing(reason) => Phase::Lost(reason),
        };
    }

    /// Returns the number of the last acknowledged packet with data, to be passed to [`Block::stability`].
    pub(crate) fn last_acked_data(&self) -> u64 {
        self.last_acked_data
    }

    /// Whether the data up to a packet is on stable storage. If it is not, and no sync is in
    /// flight, the block wants a sync from now on.
    pub(crate) fn stability(&mut self, through: u64) -> Stability {
        match &self.phase {
            Phase::Sealed => Stability::Stable,
            Phase::Lost(reason) => Stability::Lost(reason.clone()),
            _ if self.last_stable >= through => Stability::Stable,
            Phase::TooFew => Stability::TooFew,
            Phase::Failed(_) => Stability::Waiting,
            Phase::Open => {
                let on_its_way = self.in_flight.iter().any(|packet| packet.stable);
                self.sync_wanted |= !on_its_way;
                Stability::Waiting
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::limits::CHUNK_BYTES;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    const CHUNK: u64 = CHUNK_BYTES as u64;

    fn data(jobs: &[u32], bytes: u64, sync: bool) -> Content<u32> {
        Content::Data {
            bytes,
            jobs: jobs.iter().map(|job| (0, *job)).collect(),
            sync,
        }
    }

    fn failure() -> NodeFailure {
        NodeFailure {
            node: NodeId(1),
            error: DataError::NoSpace,
        }
    }

    #[test]
    fn the_slowest_pipeline_decides() {
        let mut block = Block::new(2);
        let now = some_time();
        assert_eq!(block.begin_packet(data(&[1], 10, false), now), Some(0));
        assert_eq!(block.begin_packet(data(&[2], 10, false), now), Some(CHUNK));
        assert_eq!(block.acked(0, 2).unwrap().written, []);
        let written = block.acked(1, 1).unwrap().written;
        assert_eq!(written[0].job, 1);
        assert_eq!((block.acked_bytes(), block.unacked()), (10, (1, 10)));
        // Packets that were never sent do not count.
        let written = block.acked(1, 1_000).unwrap().written;
        assert_eq!((written[0].job, written[0].block_offset), (2, CHUNK));
        assert_eq!(block.acked_bytes(), CHUNK + 10);
        assert!(block.is_done_by(0) && block.is_done_by(1));
    }

    #[test]
    fn a_pipeline_that_says_nothing_is_searched_and_then_given_up() {
        let mut block = Block::new(2);
        let start = some_time();
        assert_eq!(block.stalled(0, start + STALL_DEADLINE * 2), Stall::No);
        block.begin_packet(data(&[1], 10, false), start);
        block.acked(1, 1);
        let late = start + SUSPICIOUS + Duration::from_millis(1);
        assert_eq!(block.stalled(0, start + SUSPICIOUS), Stall::No);
        assert_eq!(block.stalled(0, late), Stall::Suspicious);
        assert_eq!(
            block.stalled(0, late + SUSPICIOUS),
            Stall::No,
            "again at once"
        );
        assert_eq!(block.stalled(0, late + 3 * SUSPICIOUS), Stall::Suspicious);
        assert_eq!(block.stalled(1, late), Stall::No, "it has answered");
        let too_late = start + STALL_DEADLINE + Duration::from_millis(1);
        assert_eq!(block.stalled(0, too_late), Stall::Yes);
        assert!(block.fail(failure()));
        assert_eq!(block.stalled(0, too_late), Stall::Over);
    }

    #[test]
    fn a_lost_block_is_not_stable_and_a_sealed_one_is() {
        let mut block = Block::new(1);
        block.begin_packet(data(&[1], 10, false), some_time());
        block.acked(0, 1);
        assert_eq!(block.stability(block.last_acked_data()), Stability::Waiting);
        assert!(block.wants_sync());
        block.fail(failure());
        assert_eq!(block.stability(1), Stability::Waiting);
        block.settle(Saved::Nothing("gone".into()));
        assert_eq!(block.stability(1), Stability::Lost("gone".into()));
        assert!(block.ended_badly() && !block.is_sealed());
        block.settle(Saved::TooFew);
        assert_eq!(block.stability(1), Stability::TooFew);
        assert!(block.ended_badly() && !block.is_sealed());
        block.settle(Saved::Enough);
        block.settle(Saved::TooFew);
        assert_eq!(block.stability(1), Stability::Stable);
        assert!(!block.ended_badly() && block.is_sealed());
    }

    #[test]
    fn two_replicas_are_enough_and_one_is_where_there_was_no_other() {
        let saved = |sealed, written_to| Saved::of(sealed, written_to, || "gone".into());
        assert_eq!(saved(0, 3), Saved::Nothing("gone".into()));
        assert_eq!(saved(1, 3), Saved::TooFew);
        assert_eq!(saved(1, 2), Saved::TooFew);
        assert_eq!(saved(2, 3), Saved::Enough);
        assert_eq!(saved(1, 1), Saved::Enough);
    }

    #[test]
    fn what_all_datanodes_had_made_stable_needs_no_more_of_them() {
        let mut block = Block::new(1);
        block.begin_packet(data(&[1], 10, true), some_time());
        block.begin_packet(data(&[2], 10, false), some_time());
        block.acked(0, 2);
        block.fail(failure());
        block.settle(Saved::TooFew);
        assert_eq!(block.stability(1), Stability::Stable);
        assert_eq!(block.stability(2), Stability::TooFew);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Data(u64, usize, bool),
        Sync,
        Ack(usize, u64),
        Ask,
        Fail,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            5 => (1u64..9_000, 1usize..4, any::<bool>()).prop_map(|(b, j, s)| Op::Data(b, j, s)),
            1 => Just(Op::Sync),
            8 => (0usize..3, 0u64..4).prop_map(|(p, n)| Op::Ack(p, n)),
            2 => Just(Op::Ask),
            1 => Just(Op::Fail),
        ]
    }

    /// A packet of the model: its jobs, the end of its data, and whether it makes earlier data stable.
    struct Model {
        packets: Vec<(Vec<u32>, u64, bool)>,
        acked_by: [u64; 3],
    }

    impl Model {
        fn acked(&self) -> usize {
            *self.acked_by.iter().min().unwrap() as usize
        }

        /// Whether this packet, or a later one, was acknowledged by all as stable.
        fn is_stable(&self, through: u64) -> bool {
            let acked = self.packets[..self.acked()].iter().enumerate();
            let mut after = acked.skip((through as usize).saturating_sub(1));
            through == 0 || after.any(|(_, (.., stable))| *stable)
        }
    }

    proptest! {
        /// Every job is either written, once and in order, when all pipelines have it, or is given
        /// back; acknowledged and stable data are exactly those that the datanodes report.
        #[test]
        fn a_block_is_a_list_of_packets(ops in prop::collection::vec(op(), 1..60)) {
            let mut block = Block::new(3);
            let mut model = Model { packets: Vec::new(), acked_by: [0; 3] };
            let (mut written, mut next_job) = (Vec::new(), 0);
            let mut failed = false;
            for op in ops {
                match op {
                    Op::Data(bytes, count, sync) => {
                        let jobs: Vec<u32> = (next_job..next_job + count as u32).collect();
                        next_job += count as u32;
                        let end = model.packets.last().map_or(0, |(_, end, _)| *end);
                        let start = end.next_multiple_of(CHUNK);
                        let begun = block.begin_packet(data(&jobs, bytes, sync), some_time());
                        prop_assert_eq!(begun, (!failed).then_some(start));
                        model.packets.push((jobs, start + bytes, sync));
                    }
                    Op::Sync => {
                        let end = model.packets.last().map_or(0, |(_, end, _)| *end);
                        block.begin_packet(Content::Sync, some_time());
                        model.packets.push((Vec::new(), end, true));
                    }
                    Op::Ack(pipeline, more) => {
                        let by = (model.acked_by[pipeline] + more).min(model.packets.len() as u64);
                        let acked = block.acked(pipeline, by);
                        prop_assert_eq!(acked.is_none(), failed);
                        if let Some(acked) = acked {
                            model.acked_by[pipeline] = by;
                            written.extend(acked.written.into_iter().map(|it| it.job));
                        }
                    }
                    Op::Ask => {
                        let through = block.last_acked_data();
                        let stable = block.stability(through) == Stability::Stable;
                        prop_assert_eq!(stable, model.is_stable(through));
                        let waits = !stable && !failed;
                        let on_its_way = model.packets[model.acked()..].iter().any(|it| it.2);
                        prop_assert_eq!(block.wants_sync() && waits, waits && !on_its_way);
                    }
                    Op::Fail => {
                        prop_assert_eq!(block.fail(failure()), !failed);
                        failed = true;
                    }
                }
                let acked = &model.packets[..model.acked()];
                let expected: Vec<u32> = acked.iter().flat_map(|it| it.0.clone()).collect();
                prop_assert_eq!(&written, &expected);
                prop_assert_eq!(block.acked_bytes(), acked.last().map_or(0, |it| it.1));
                prop_assert_eq!(block.unacked().0, model.packets.len() - acked.len());
            }
            written.extend(block.take_unacked());
            prop_assert_eq!(written, (0..next_job).collect::<Vec<_>>());
        }
    }
}
