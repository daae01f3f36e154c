//! Waiting for how far the packets of one write stream have come.

use std::time::Duration;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::NodeId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::engine;
use crate::engine::write::progress::Step;

/// How long a datanode that broke the connection has to be heard: its last words may still be on
/// their way when sending to it fails.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Counts of packets, from the start of the stream.
#[derive(Debug)]
pub struct Progress {
    state: Mutex<engine::write::progress::Progress>,
    /// There may be a next step.
    stepped: Notify,
    /// There may be room.
    made_room: Notify,
}

impl Progress {
    pub fn new(has_downstream: bool) -> Self {
        Self {
            state: Mutex::new(engine::write::progress::Progress::new(has_downstream)),
            stepped: Notify::new(),
            made_room: Notify::new(),
        }
    }

    /// A packet came.
    pub fn received(&self, data_bytes: usize) {
        self.state.lock().received(data_bytes);
    }

    /// No further packet will come.
    pub fn end_input(&self) {
        self.state.lock().end_input();
        self.stepped.notify_one();
    }

    /// This datanode has done so many more packets.
    pub fn local_done(&self, packets: u64) {
        self.state.lock().local_done(packets);
        self.stepped.notify_one();
    }

    /// The rest of the pipeline has done so many packets altogether; false if that cannot be.
    pub fn downstream_done(&self, packets: u64) -> bool {
        let can_be = self.state.lock().downstream_done(packets);
        if can_be {
            self.stepped.notify_one();
        }
        can_be
    }

    /// Whether nothing more is to be heard from downstream.
    pub fn downstream_is_complete(&self) -> bool {
        self.state.lock().downstream_is_complete()
    }

    /// The stream is over because a datanode failed. The first failure counts.
    pub fn fail(&self, node: NodeId, error: DataError) {
        self.state.lock().fail(node, error);
        self.stepped.notify_one();
    }

    /// The same because the next datanode cannot be reached, unless it says why meanwhile.
    pub async fn fail_later(&self, node: NodeId, reason: String) {
        tokio::time::sleep(LAST_WORDS).await;
        self.fail(node, DataError::Downstream(reason));
    }

    /// The stream is over, and upstream is gone.
    pub fn fail_silently(&self) {
        self.state.lock().fail_silently();
        self.stepped.notify_one();
    }

    /// Bytes of data that are not acknowledged yet.
    pub fn bytes_in_flight(&self) -> usize {
        self.state.lock().bytes_in_flight()
    }

    /// Waits until less than this much is not acknowledged yet.
    pub async fn wait_for_room(&self, bytes_max: usize, packets_max: usize) {
        while !self.state.lock().has_room(bytes_max, packets_max) {
            self.made_room.notified().await;
        }
    }

    /// So many packets are acknowledged to upstream.
    pub fn acknowledged(&self, packets: u64) {
        self.state.lock().acknowledged(packets);
        self.made_room.notify_one();
    }

    /// Waits for what is to be done after `acknowledged` packets were acknowledged.
    pub async fn next_step(&self, acknowledged: u64) -> Step {
        loop {
            let step = self.state.lock().step(acknowledged);
            if let Some(step) = step {
                return step;
            }
            self.stepped.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
