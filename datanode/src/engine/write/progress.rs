//! Progress of the packets of one write stream.

use std::collections::VecDeque;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::NodeId;

/// Which datanode failed, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub node: NodeId,
    pub error: DataError,
}

/// The next action of the stream's acknowledging end.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Acknowledge this many packets.
    Acknowledge(u64),
    /// Everything is acknowledged, and nothing more will arrive.
    Complete,
    /// Report the failure to upstream.
    Fail(Failure),
    /// Upstream has disappeared.
    GiveUp,
}

/// Packet counts since the start of the stream.
#[derive(Debug)]
pub struct Progress {
    received: u64,
    local_done: u64,
    downstream_done: u64,
    has_downstream: bool,
    /// Sizes in bytes of the packets that are not acknowledged yet.
    in_flight: VecDeque<usize>,
    bytes_in_flight: usize,
    input_ended: bool,
    end: Option<End>,
}

#[derive(Debug)]
enum End {
    Failed(Failure),
    UpstreamGone,
}

impl Progress {
    /// The state at the start of a stream, with or without a datanode downstream of this one.
    pub fn new(has_downstream: bool) -> Self {
        Self {
            received: 0,
            local_done: 0,
            downstream_done: 0,
            has_downstream,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
            input_ended: false,
            end: None,
        }
    }

    /// Records that a packet arrived.
    pub fn received(&mut self, data_bytes: usize) {
        self.received += 1;
        self.in_flight.push_back(data_bytes);
        self.bytes_in_flight += data_bytes;
    }

    /// Records that no further packet will arrive.
    pub fn end_input(&mut self) {
        self.input_ended = true;
    }

    /// Records that this datanode has processed so many more packets.
    pub fn local_done(&mut self, packets: u64) {
        self.local_done += packets;
        assert!(
            self.local_done <= self.received,
            "{} packets are written of {}",
            self.local_done,
            self.received
        );
    }

    /// Records that the rest of the pipeline has processed so many packets in total; returns `false` if that is
    /// impossible.
    pub fn downstream_done(&mut self, packets: u64) -> bool {
        if packets > self.received || packets < self.downstream_done {
            return false;
        }
        self.downstream_done = packets;
        true
    }

    /// Whether nothing more is expected from downstream.
    pub fn downstream_is_complete(&self) -> bool {
        self.input_ended && self.downstream_done == self.received
    }

    /// Ends the stream because a datanode failed. Only the first end counts.
    pub fn fail(&mut self, node: NodeId, error: DataError) {
        self.end.get_or_insert(End::Failed(Failure { node, error }));
    }

    /// Ends the stream because upstream has disappeared.
    pub fn fail_silently(&mut self) {
        self.end.get_or_insert(End::UpstreamGone);
    }

    /// Bytes of data that are not acknowledged yet.
    pub fn bytes_in_flight(&self) -> usize {
        self.bytes_in_flight
    }

    /// Whether less than this much is unacknowledged.
    pub fn has_room(&self, bytes_max: usize, packets_max: usize) -> bool {
        self.bytes_in_flight < bytes_max && self.in_flight.len() < packets_max
    }

    /// Records that so many packets have been acknowledged to upstream.
    pub fn acknowledged(&mut self, packets: u64) {
        let received = self.received;
        let Some(unacknowledged) = received.checked_sub(packets) else {
            panic!("{packets} packets are acknowledged of {received}");
        };
        while self.in_flight.len() as u64 > unacknowledged
            && let Some(bytes) = self.in_flight.pop_front()
        {
            self.bytes_in_flight -= bytes;
        }
    }

    /// Returns the next step after `acknowledged` packets have been acknowledged, if there is one.
    pub fn step(&self, acknowledged: u64) -> Option<Step> {
        let done = if self.has_downstream {
            self.local_done.min(self.downstream_done)
        } else {
            self.local_done
        };
        // Finished work is acknowledged even if later work failed: the writer may rely on it.
        if done > acknowledged && !matches!(self.end, Some(End::UpstreamGone)) {
            return Some(Step::Acknowledge(done));
        }
        match &self.end {
            Some(End::Failed(failure)) => Some(Step::Fail(failure.clone())),
            Some(End::UpstreamGone) => Some(Step::GiveUp),
            None if self.input_ended && acknowledged == self.received => Some(Step::Complete),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_slower_of_disk_and_downstream_counts() {
        let mut progress = Progress::new(true);
        for _ in 0..3 {
            progress.received(10);
        }
        progress.local_done(2);
        assert!(progress.downstream_done(1));
        assert_eq!(progress.step(0), Some(Step::Acknowledge(1)));
        progress.acknowledged(1);
        assert_eq!(progress.bytes_in_flight(), 20);
        assert!(progress.downstream_done(3));
        assert_eq!(progress.step(1), Some(Step::Acknowledge(2)));
        progress.local_done(1);
        progress.end_input();
        assert_eq!(progress.step(2), Some(Step::Acknowledge(3)));
        assert_eq!(progress.step(3), Some(Step::Complete));
        assert!(progress.downstream_is_complete());
    }

    #[test]
    fn the_first_failure_counts_after_what_was_done() {
        let mut progress = Progress::new(false);
        progress.received(1);
        progress.received(1);
        progress.local_done(1);
        progress.fail(NodeId(2), DataError::NoSpace);
        progress.fail(NodeId(3), DataError::Stopping);
        assert_eq!(progress.step(0), Some(Step::Acknowledge(1)));
        let failure = Failure {
            node: NodeId(2),
            error: DataError::NoSpace,
        };
        assert_eq!(progress.step(1), Some(Step::Fail(failure)));
    }

    #[test]
    fn downstream_cannot_acknowledge_what_it_was_not_sent() {
        let mut progress = Progress::new(true);
        progress.received(1);
        assert!(!progress.downstream_done(2));
        assert!(progress.downstream_done(1));
        assert!(!progress.downstream_done(0));
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Received(usize),
        InputEnds,
        /// One more packet is written here.
        Local,
        /// The downstream datanode acknowledges so many.
        Downstream(u64),
        Fails,
        UpstreamGoes,
        Acknowledge,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (1usize..100).prop_map(Event::Received),
            1 => Just(Event::InputEnds),
            4 => Just(Event::Local),
            4 => (0u64..12).prop_map(Event::Downstream),
            1 => Just(Event::Fails),
            1 => Just(Event::UpstreamGoes),
            6 => Just(Event::Acknowledge),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        /// Acknowledged packets were processed by this datanode and all downstream; processed packets are acknowledged
        /// before a failure is reported; packets in flight are those not acknowledged; and the stream is complete
        /// exactly when all received packets are acknowledged.
        #[test]
        fn only_what_all_have_is_acknowledged(
            has_downstream: bool,
            events in prop::collection::vec(event(), 1..60),
        ) {
            let mut progress = Progress::new(has_downstream);
            let mut sizes: Vec<usize> = Vec::new();
            let (mut local, mut behind, mut acknowledged) = (0u64, 0u64, 0u64);
            let (mut input_ended, mut failed, mut gone) = (false, false, false);
            for event in events {
                let received = sizes.len() as u64;
                match event {
                    Event::Received(bytes) if !input_ended => {
                        progress.received(bytes);
                        sizes.push(bytes);
                    }
                    Event::InputEnds => {
                        progress.end_input();
                        input_ended = true;
                    }
                    Event::Local if local < received => {
                        progress.local_done(1);
                        local += 1;
                    }
                    Event::Downstream(packets) if has_downstream => {
                        let can_be = (behind..=received).contains(&packets);
                        prop_assert_eq!(progress.downstream_done(packets), can_be);
                        if can_be {
                            behind = packets;
                        }
                    }
                    Event::Fails => {
                        progress.fail(NodeId(1), DataError::NoSpace);
                        failed |= !gone;
                    }
                    Event::UpstreamGoes => {
                        progress.fail_silently();
                        gone |= !failed;
                    }
                    Event::Acknowledge => {
                        let done = if has_downstream { local.min(behind) } else { local };
                        match progress.step(acknowledged) {
                            Some(Step::Acknowledge(packets)) => {
                                prop_assert!(packets == done && done > acknowledged && !gone);
                                acknowledged = packets;
                                progress.acknowledged(packets);
                            }
                            Some(Step::Complete) => {
                                prop_assert!(input_ended && !failed && !gone);
                                prop_assert_eq!(acknowledged, received);
                            }
                            Some(Step::Fail(_)) => prop_assert!(failed && done == acknowledged),
                            Some(Step::GiveUp) => prop_assert!(gone),
                            None => {
                                prop_assert!(done == acknowledged && !failed && !gone);
                                prop_assert!(!input_ended || acknowledged < received);
                            }
                        }
                    }
                    Event::Received(_) | Event::Local | Event::Downstream(_) => {}
                }
                let in_flight = &sizes[acknowledged as usize..];
                let bytes: usize = in_flight.iter().sum();
                prop_assert_eq!(progress.bytes_in_flight(), bytes);
                prop_assert_eq!(progress.has_room(200, 5), bytes < 200 && in_flight.len() < 5);
            }
        }
    }
}
