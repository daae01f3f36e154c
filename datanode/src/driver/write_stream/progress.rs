//! How far the packets of one write stream have come.

use std::collections::VecDeque;
use std::time::Duration;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::NodeId;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// How long a datanode that broke the connection has to be heard: its last words may still be on
/// their way when sending to it fails.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Which datanode failed, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub node: NodeId,
    pub error: DataError,
}

/// What the stream's acknowledging end is to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Acknowledge this many packets.
    Acknowledge(u64),
    /// Everything is acknowledged, nothing more will come.
    Complete,
    /// Say that it is over.
    Fail(Failure),
    /// Upstream is gone.
    GiveUp,
}

/// Counts of packets, from the start of the stream.
#[derive(Debug)]
pub struct Progress {
    state: Mutex<State>,
    /// There may be a next step.
    stepped: Notify,
    /// There may be room.
    made_room: Notify,
}

#[derive(Debug)]
struct State {
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
    pub fn new(has_downstream: bool) -> Self {
        Self {
            state: Mutex::new(State {
                received: 0,
                local_done: 0,
                downstream_done: 0,
                has_downstream,
                in_flight: VecDeque::new(),
                bytes_in_flight: 0,
                input_ended: false,
                end: None,
            }),
            stepped: Notify::new(),
            made_room: Notify::new(),
        }
    }

    /// A packet came.
    pub fn received(&self, data_bytes: usize) {
        let mut state = self.state.lock();
        state.received += 1;
        state.in_flight.push_back(data_bytes);
        state.bytes_in_flight += data_bytes;
    }

    /// No further packet will come.
    pub fn end_input(&self) {
        self.state.lock().input_ended = true;
        self.stepped.notify_one();
    }

    /// This datanode has done so many more packets.
    pub fn local_done(&self, packets: u64) {
        let mut state = self.state.lock();
        state.local_done += packets;
        assert!(
            state.local_done <= state.received,
            "{} packets are written of {}",
            state.local_done,
            state.received
        );
        drop(state);
        self.stepped.notify_one();
    }

    /// The rest of the pipeline has done so many packets altogether; false if that cannot be.
    pub fn downstream_done(&self, packets: u64) -> bool {
        let mut state = self.state.lock();
        if packets > state.received || packets < state.downstream_done {
            return false;
        }
        state.downstream_done = packets;
        drop(state);
        self.stepped.notify_one();
        true
    }

    /// Whether nothing more is to be heard from downstream.
    pub fn downstream_is_complete(&self) -> bool {
        let state = self.state.lock();
        state.input_ended && state.downstream_done == state.received
    }

    /// The stream is over because a datanode failed. The first failure counts.
    pub fn fail(&self, node: NodeId, error: DataError) {
        self.end(End::Failed(Failure { node, error }));
    }

    /// The same because the next datanode cannot be reached, unless it says why meanwhile.
    pub async fn fail_later(&self, node: NodeId, reason: String) {
        tokio::time::sleep(LAST_WORDS).await;
        self.fail(node, DataError::Downstream(reason));
    }

    /// The stream is over, and upstream is gone.
    pub fn fail_silently(&self) {
        self.end(End::UpstreamGone);
    }

    fn end(&self, end: End) {
        self.state.lock().end.get_or_insert(end);
        self.stepped.notify_one();
    }

    /// Bytes of data that are not acknowledged yet.
    pub fn bytes_in_flight(&self) -> usize {
        self.state.lock().bytes_in_flight
    }

    /// Waits until less than this much is not acknowledged yet.
    pub async fn wait_for_room(&self, bytes_max: usize, packets_max: usize) {
        loop {
            {
                let state = self.state.lock();
                if state.bytes_in_flight < bytes_max && state.in_flight.len() < packets_max {
                    return;
                }
            }
            self.made_room.notified().await;
        }
    }

    /// So many packets are acknowledged to upstream.
    pub fn acknowledged(&self, packets: u64) {
        let mut state = self.state.lock();
        let received = state.received;
        let Some(unacknowledged) = received.checked_sub(packets) else {
            panic!("{packets} packets are acknowledged of {received}");
        };
        while state.in_flight.len() as u64 > unacknowledged
            && let Some(bytes) = state.in_flight.pop_front()
        {
            state.bytes_in_flight -= bytes;
        }
        drop(state);
        self.made_room.notify_one();
    }

    /// Waits for what is to be done after `acknowledged` packets were acknowledged.
    pub async fn next_step(&self, acknowledged: u64) -> Step {
        loop {
            if let Some(step) = self.state.lock().step(acknowledged) {
                return step;
            }
            self.stepped.notified().await;
        }
    }
}

impl State {
    fn step(&self, acknowledged: u64) -> Option<Step> {
        let done = if self.has_downstream {
            self.local_done.min(self.downstream_done)
        } else {
            self.local_done
        };
        // What is done is acknowledged even if what follows failed: the writer may count on it.
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
    use super::*;

    #[tokio::test]
    async fn the_slower_of_disk_and_downstream_counts() {
        let progress = Progress::new(true);
        for _ in 0..3 {
            progress.received(10);
        }
        progress.local_done(2);
        assert!(progress.downstream_done(1));
        assert_eq!(progress.next_step(0).await, Step::Acknowledge(1));
        progress.acknowledged(1);
        assert_eq!(progress.bytes_in_flight(), 20);
        assert!(progress.downstream_done(3));
        assert_eq!(progress.next_step(1).await, Step::Acknowledge(2));
        progress.local_done(1);
        progress.end_input();
        assert_eq!(progress.next_step(2).await, Step::Acknowledge(3));
        assert_eq!(progress.next_step(3).await, Step::Complete);
        assert!(progress.downstream_is_complete());
    }

    #[tokio::test]
    async fn the_first_failure_counts_after_what_was_done() {
        let progress = Progress::new(false);
        progress.received(1);
        progress.received(1);
        progress.local_done(1);
        progress.fail(NodeId(2), DataError::NoSpace);
        progress.fail(NodeId(3), DataError::Stopping);
        assert_eq!(progress.next_step(0).await, Step::Acknowledge(1));
        let failure = Failure {
            node: NodeId(2),
            error: DataError::NoSpace,
        };
        assert_eq!(progress.next_step(1).await, Step::Fail(failure));
    }

    #[test]
    fn downstream_cannot_acknowledge_what_it_was_not_sent() {
        let progress = Progress::new(true);
        progress.received(1);
        assert!(!progress.downstream_done(2));
        assert!(progress.downstream_done(1));
        assert!(!progress.downstream_done(0));
    }

    #[tokio::test]
    async fn a_full_window_waits_for_acknowledgements() {
        let progress = Progress::new(false);
        progress.received(100);
        let wait = progress.wait_for_room(100, 10);
        tokio::pin!(wait);
        let poll = tokio::time::timeout(Duration::from_millis(5), &mut wait);
        assert!(poll.await.is_err());
        progress.local_done(1);
        progress.acknowledged(1);
        wait.await;
        progress.wait_for_room(1, 1).await;
    }
}
