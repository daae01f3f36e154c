//! Progress of the packets of one write stream, with ways to wait for it.

use std::time::Duration;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::NodeId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::engine;
use crate::engine::write::progress::Step;

/// How long to wait for the final message of a datanode that broke the connection: it may still be in flight when
/// sending to that datanode fails.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Packet counts since the start of the stream.
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

    /// Records that a packet arrived.
    pub fn received(&self, data_bytes: usize) {
        self.state.lock().received(data_bytes);
    }

    /// Records that no further packet will arrive.
    pub fn end_input(&self) {
        self.state.lock().end_input();
        self.stepped.notify_one();
    }

    /// Records that this datanode has processed so many more packets.
    pub fn local_done(&self, packets: u64) {
        self.state.lock().local_done(packets);
        self.stepped.notify_one();
    }

    /// Records that the rest of the pipeline has processed so many packets in total; returns `false` if that is
    /// impossible.
    pub fn downstream_done(&self, packets: u64) -> bool {
        let can_be = self.state.lock().downstream_done(packets);
        if can_be {
            self.stepped.notify_one();
        }
        can_be
    }

    /// Whether nothing more is expected from downstream.
    pub fn downstream_is_complete(&self) -> bool {
        self.state.lock().downstream_is_complete()
    }

    /// Ends the stream because a datanode failed. Only the first failure counts.
    pub fn fail(&self, node: NodeId, error: DataError) {
        self.state.lock().fail(node, error);
        self.stepped.notify_one();
    }

    /// Ends the stream because the next datanode cannot be reached, unless that datanode reports a reason in the
    /// meantime.
    pub async fn fail_later(&self, node: NodeId, reason: String) {
        tokio::time::sleep(LAST_WORDS).await;
        self.fail(node, DataError::Downstream(reason));
    }

    /// Ends the stream because upstream has disappeared.
    pub fn fail_silently(&self) {
        self.state.lock().fail_silently();
        self.stepped.notify_one();
    }

    /// Bytes of data that are not acknowledged yet.
    pub fn bytes_in_flight(&self) -> usize {
        self.state.lock().bytes_in_flight()
    }

    /// Waits until less than this much is unacknowledged.
    pub async fn wait_for_room(&self, bytes_max: usize, packets_max: usize) {
        while !self.state.lock().has_room(bytes_max, packets_max) {
            self.made_room.notified().await;
        }
    }

    /// Records that so many packets have been acknowledged to upstream.
    pub fn acknowledged(&self, packets: u64) {
        self.state.lock().acknowledged(packets);
        self.made_room.notify_one();
    }

    /// Waits for the next step after `acknowledged` packets have been acknowledged.
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
