//! Numbers of mutations. A mutation waits for one while too many are in flight.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::engine::session::sequences::{self as engine, Number};

/// Numbers the mutations of a session.
#[derive(Default)]
pub(crate) struct Sequences {
    inner: Mutex<engine::Sequences>,
    /// Notified when numbers may be available again.
    ended: Notify,
}

/// The number of a mutation; free again when dropped.
pub(crate) struct Numbered {
    number: Number,
    sequences: Arc<Sequences>,
}

impl Sequences {
    /// Starts a new session; returns its generation.
    pub(crate) fn restart(&self) -> u64 {
        let generation = self.inner.lock().restart();
        self.ended.notify_waiters();
        generation
    }

    pub(crate) fn generation(&self) -> u64 {
        self.inner.lock().generation()
    }

    /// Waits for a number, at most a window after the oldest mutation in flight.
    pub(crate) async fn begin(self: &Arc<Self>, window: u64) -> Numbered {
        loop {
            let ended = self.ended.notified();
            if let Some(number) = self.inner.lock().begin(window) {
                let sequences = self.clone();
                return Numbered { number, sequences };
            }
            ended.await;
        }
    }
}

impl Numbered {
    pub(crate) fn generation(&self) -> u64 {
        self.number.generation
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.number.sequence
    }

    /// Returns a number below which all mutations have been answered.
    pub(crate) fn answered_below(&self) -> u64 {
        let sequences = self.sequences.inner.lock();
        sequences.answered_below(self.number.sequence)
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        let others_may_go_on = self.sequences.inner.lock().ended(self.number);
        if others_may_go_on {
            self.sequences.ended.notify_waiters();
        }
    }
}
