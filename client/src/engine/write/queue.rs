//! The queue of pieces that wait for a writer, and the writer's next step.

use std::collections::VecDeque;
use std::time::Duration;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::PACKET_BYTES_MAX;
use harvestfs_protocol::request_id::RequestId;

use super::packet::{self, Layout, Piece};

/// Maximum number of packets in flight for a block that files share. More would only be smaller:
/// the pieces that queue meanwhile share one.
const PACK_PACKETS_MAX: usize = 4;
/// While less than this waits, only one packet is in flight.
const PACK_QUEUED_BYTES: usize = 128 << 10;
/// Maximum number of bytes in flight in a chain: covers 10 Gbit/s at several milliseconds for all hops.
const CHAIN_WINDOW_BYTES: u64 = 8 << 20;
/// A block with fewer replicas than it should have is sealed after it was written for this long:
/// then repair can create the others, and the next block may have all of them from the start.
const LACKING_AGE_MAX: Duration = Duration::from_secs(60);

/// How data reaches the datanodes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topology {
    /// One pipeline through all datanodes: each byte leaves the client once.
    Chain,
    /// One pipeline to each datanode: a single round trip.
    Star,
}

/// The pieces that wait for a writer.
pub(crate) struct Queue<J> {
    jobs: VecDeque<J>,
    /// Whether no more pieces will come.
    closed: bool,
}

/// The block that is being written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Active {
    pub(crate) topology: Topology,
    pub(crate) acked_bytes: u64,
    pub(crate) unacked_packets: usize,
    pub(crate) unacked_bytes: u64,
    /// Whether a caller waits for acknowledged data to become stable.
    pub(crate) wants_sync: bool,
    /// Bytes that still fit.
    pub(crate) room: usize,
    pub(crate) age: Duration,
    /// Whether it has fewer replicas than it should finally have.
    pub(crate) lacks_replicas: bool,
    /// Whether the namenode has begun another epoch since it allocated the block.
    pub(crate) is_of_earlier_epoch: bool,
}

/// The next step of a writer.
#[derive(Debug)]
pub(crate) enum Step<J> {
    /// Wait for an event.
    Wait,
    /// Open a block, on behalf of the first waiting request and the file whose data it brings.
    Open(RequestId, InodeId),
    Send(Layout<J>),
    Sync,
    /// Seal the block: it is full, or no more data will come.
    Finish,
    Stop,
}

impl<J> Default for Queue<J> {
    fn default() -> Self {
        Self {
            jobs: VecDeque::new(),
            closed: false,
        }
    }
}

impl<J: Piece> Queue<J> {
    /// Adds pieces.
    ///
    /// # Errors
    /// The pieces, when the queue is closed.
    pub(crate) fn submit(&mut self, jobs: Vec<J>) -> Result<(), Vec<J>> {
        if self.closed {
            return Err(jobs);
        }
        self.jobs.extend(jobs);
        Ok(())
    }

    /// Puts pieces back that were sent but not acknowledged.
    pub(crate) fn put_back(&mut self, jobs: Vec<J>) {
        for job in jobs.into_iter().rev() {
            self.jobs.push_front(job);
        }
    }

    /// Closes the queue: no more pieces will come.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    pub(crate) fn take_all(&mut self) -> Vec<J> {
        std::mem::take(&mut self.jobs).into()
    }

    /// Takes all pieces of a file.
    pub(crate) fn take_of(&mut self, file: InodeId) -> Vec<J> {
        let jobs = std::mem::take(&mut self.jobs).into_iter();
        let (taken, kept): (VecDeque<J>, _) = jobs.partition(|job| job.file() == file);
        self.jobs = kept;
        taken.into()
    }

    /// Decides the next step; `nothing_ends`: no block is being sealed.
    pub(crate) fn next(&mut self, active: Option<&Active>, nothing_ends: bool) -> Step<J> {
        let Some(block) = active else {
            return match (self.jobs.front(), self.closed) {
                (Some(first), _) => Step::Open(first.request(), first.file()),
                (None, true) if nothing_ends => Step::Stop,
                (None, _) => Step::Wait,
            };
        };
        assert!(
            block.unacked_packets > 0 || block.unacked_bytes == 0,
            "bytes are in flight, and no packet is: {block:?}"
        );
        let holds_data = block.acked_bytes > 0 || block.unacked_packets > 0;
        let lacks_replicas = block.lacks_replicas && block.age > LACKING_AGE_MAX;
        if holds_data && (lacks_replicas || block.is_of_earlier_epoch) {
            return Step::Finish;
        }
        if self.jobs.is_empty() {
            return match (block.wants_sync, self.closed) {
                (true, _) => Step::Sync,
                (false, true) => Step::Finish,
                (false, false) => Step::Wait,
            };
        }
        let window_is_open = match block.topology {
            Topology::Star => {
                let packets = block.unacked_packets;
                packets == 0 || packets < PACK_PACKETS_MAX && self.holds(PACK_QUEUED_BYTES)
            }
            Topology::Chain => block.unacked_bytes + PACKET_BYTES_MAX as u64 <= CHAIN_WINDOW_BYTES,
        };
        if !window_is_open {
            return Step::Wait;
        }
        match packet::fill(&mut self.jobs, block.room) {
            Some(layout) => Step::Send(layout),
            None => Step::Finish,
        }
    }

    /// Whether at least this much data waits.
    fn holds(&self, bytes: usize) -> bool {
        let mut left = bytes;
        self.jobs.iter().any(|job| {
            left = left.saturating_sub(job.data().len());
            left == 0
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use harvestfs_protocol::limits::CHUNK_BYTES;
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug)]
    struct Job {
        file: u64,
        number: usize,
        data: Bytes,
    }

    impl Piece for Job {
        fn data(&self) -> &Bytes {
            &self.data
        }
        fn is_continued_by(&self, _: &Self) -> bool {
            false
        }
        fn sync(&self) -> bool {
            false
        }
        fn file(&self) -> InodeId {
            InodeId(self.file)
        }
        fn request(&self) -> RequestId {
            RequestId::NONE
        }
    }

    fn job(file: u64, number: usize, bytes: usize) -> Job {
        let data = vec![0; bytes].into();
        Job { file, number, data }
    }

    fn block(topology: Topology) -> Active {
        Active {
            topology,
            acked_bytes: 0,
            unacked_packets: 0,
            unacked_bytes: 0,
            wants_sync: false,
            room: 64 << 20,
            age: Duration::ZERO,
            lacks_replicas: false,
            is_of_earlier_epoch: false,
        }
    }

    fn queue(jobs: Vec<Job>) -> Queue<Job> {
        let mut queue = Queue::default();
        queue.submit(jobs).unwrap();
        queue
    }

    #[test]
    fn small_writes_that_arrive_meanwhile_share_the_next_packet() {
        let mut queue = queue(vec![job(1, 0, 100)]);
        let mut star = block(Topology::Star);
        assert!(matches!(queue.next(Some(&star), true), Step::Send(_)));
        star.unacked_packets = 1;
        queue.submit(vec![job(1, 1, 100), job(2, 2, 100)]).unwrap();
        assert!(matches!(queue.next(Some(&star), true), Step::Wait));
        star.unacked_packets = 0;
        match queue.next(Some(&star), true) {
            Step::Send(layout) => assert_eq!(layout.pieces.len(), 2),
            step => panic!("{step:?}"),
        }
    }

    #[test]
    fn a_chain_is_kept_full_and_not_fuller() {
        let jobs = (0..100).map(|number| job(1, number, PACKET_BYTES_MAX));
        let mut queue = queue(jobs.collect());
        let mut chain = block(Topology::Chain);
        while let Step::Send(layout) = queue.next(Some(&chain), true) {
            chain.unacked_packets += 1;
            chain.unacked_bytes += layout.data.len() as u64;
        }
        assert_eq!(chain.unacked_bytes, CHAIN_WINDOW_BYTES);
    }

    #[test]
    fn a_block_ends_when_nothing_more_is_to_go_into_it() {
        let mut queue = queue(vec![job(1, 0, 100)]);
        let mut star = block(Topology::Star);
        star.is_of_earlier_epoch = true;
        // It holds no data, so there is none that a restored namenode would not know.
        assert!(matches!(queue.next(Some(&star), true), Step::Send(_)));
        star.acked_bytes = 100;
        assert!(matches!(queue.next(Some(&star), true), Step::Finish));
        let mut lacking = block(Topology::Star);
        (lacking.acked_bytes, lacking.lacks_replicas) = (100, true);
        assert!(matches!(queue.next(Some(&lacking), true), Step::Wait));
        lacking.age = LACKING_AGE_MAX * 2;
        assert!(matches!(queue.next(Some(&lacking), true), Step::Finish));
        queue.close();
        assert!(
            matches!(queue.next(None, false), Step::Wait),
            "another one is being sealed"
        );
        assert!(matches!(queue.next(None, true), Step::Stop));
        assert_eq!(queue.submit(vec![job(1, 1, 1)]).unwrap_err().len(), 1);
    }

    proptest! {
        /// Whatever breaks, every piece is sent until it is acknowledged, in order, in packets that
        /// fit; then the writer stops.
        #[test]
        fn every_piece_is_sent_in_order(
            sizes in prop::collection::vec(1usize..3 * CHUNK_BYTES, 1..60),
            breaks in prop::collection::vec(any::<bool>(), 300),
            block_bytes in 4 * CHUNK_BYTES..40 * CHUNK_BYTES,
        ) {
            let count = sizes.len();
            let jobs = sizes.into_iter().enumerate();
            let mut queue = queue(jobs.map(|(number, bytes)| job(1, number, bytes)).collect());
            queue.close();
            let mut done: Vec<usize> = Vec::new();
            let mut active: Option<(Active, Vec<Job>)> = None;
            // After these, nothing breaks any more.
            let mut breaks = breaks.into_iter();
            for _ in 0..10_000 {
                let state = active.as_ref().map(|(block, _)| *block);
                match queue.next(state.as_ref(), true) {
                    Step::Stop => {
                        prop_assert_eq!(done, (0..count).collect::<Vec<_>>());
                        return Ok(());
                    }
                    Step::Open(..) => {
                        let mut new = block(Topology::Star);
                        new.room = block_bytes;
                        active = Some((new, Vec::new()));
                    }
                    Step::Send(layout) => {
                        let (block, in_flight) = active.as_mut().expect("a block is open");
                        prop_assert!(layout.data.len() <= block.room);
                        block.room -= layout.data.len().next_multiple_of(CHUNK_BYTES).min(block.room);
                        block.unacked_packets += 1;
                        in_flight.extend(layout.pieces.into_iter().map(|(_, job)| job));
                    }
                    Step::Wait => {
                        let (block, in_flight) = active.as_mut().expect("else there is work");
                        let in_flight = std::mem::take(in_flight);
                        if breaks.next().unwrap_or(false) {
                            queue.put_back(in_flight);
                            active = None;
                        } else {
                            done.extend(in_flight.iter().map(|job| job.number));
                            (block.unacked_packets, block.acked_bytes) = (0, 1);
                        }
                    }
                    Step::Finish => {
                        let (_, in_flight) = active.take().expect("a block is open");
                        done.extend(in_flight.iter().map(|job| job.number));
                    }
                    Step::Sync => prop_assert!(false, "no caller wants one"),
                }
            }
            prop_assert!(false, "it does not end");
        }
    }
}
