//! The numbers of a session's mutations, and the requests that are kept because their answers came before
//! they were durable.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use harvestfs_protocol::limits::MUTATIONS_IN_FLIGHT_MAX;
use harvestfs_protocol::rpc::Request;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::driver::session::Session;

/// Distance of the newest to the oldest mutation in flight, well below what the namenode remembers.
pub(crate) const WINDOW: u64 = MUTATIONS_IN_FLIGHT_MAX as u64 / 2;
/// The same for what makes others durable: they give their numbers back only after it, so it must
/// not wait for them.
pub(crate) const CONFIRMING_WINDOW: u64 = WINDOW + WINDOW / 2;

/// Numbers the mutations of a session.
#[derive(Default)]
pub(crate) struct Sequences {
    inner: Mutex<Numbers>,
    answered: Notify,
}

#[derive(Default)]
struct Numbers {
    generation: u64,
    next: u64,
    in_flight: BTreeSet<u64>,
}

/// A number that was given to a mutation; free again when dropped.
pub(crate) struct Numbered {
    pub(crate) session: Arc<Session>,
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
}

impl Sequences {
    /// A new session starts; returns its generation.
    pub(crate) fn restart(&self) -> u64 {
        let mut numbers = self.inner.lock();
        numbers.generation += 1;
        numbers.next = 1;
        numbers.in_flight.clear();
        let generation = numbers.generation;
        drop(numbers);
        self.answered.notify_waiters();
        generation
    }

    pub(crate) fn generation(&self) -> u64 {
        self.inner.lock().generation
    }

    pub(crate) async fn begin(session: &Arc<Session>, window: u64) -> Numbered {
        let this = &session.sequences;
        loop {
            let answered = this.answered.notified();
            {
                let mut numbers = this.inner.lock();
                let oldest = numbers.in_flight.first().copied();
                if oldest.is_none_or(|oldest| numbers.next - oldest < window) {
                    let sequence = numbers.next;
                    numbers.next += 1;
                    numbers.in_flight.insert(sequence);
                    return Numbered {
                        session: session.clone(),
                        generation: numbers.generation,
                        sequence,
                    };
                }
            }
            answered.await;
        }
    }

    /// All mutations below it have been answered.
    pub(crate) fn answered_below(&self, sequence: u64) -> u64 {
        self.inner
            .lock()
            .in_flight
            .first()
            .copied()
            .unwrap_or(sequence)
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        let sequences = &self.session.sequences;
        let mut numbers = sequences.inner.lock();
        if numbers.generation == self.generation {
            let was_oldest = numbers.in_flight.first() == Some(&self.sequence);
            numbers.in_flight.remove(&self.sequence);
            drop(numbers);
            if was_oldest {
                sequences.answered.notify_waiters();
            }
        }
    }
}

/// Mutations that were answered and may not be durable yet.
#[derive(Default)]
pub(crate) struct Unconfirmed {
    inner: Mutex<Relaxed>,
}

#[derive(Default)]
struct Relaxed {
    /// Counts them over all sessions.
    last: u64,
    durable_through: u64,
    waiting: VecDeque<(u64, Numbered, Arc<Request>)>,
}

impl Unconfirmed {
    /// Everything answered so far has at most this number.
    pub(crate) fn last(&self) -> u64 {
        self.inner.lock().last
    }

    pub(crate) fn add(&self, number: Numbered, request: Arc<Request>) -> usize {
        let mut relaxed = self.inner.lock();
        relaxed.last += 1;
        let last = relaxed.last;
        relaxed.waiting.push_back((last, number, request));
        relaxed.waiting.len()
    }

    pub(crate) fn confirm(&self, through: u64) {
        let mut confirmed = Vec::new();
        {
            let mut relaxed = self.inner.lock();
            relaxed.durable_through = relaxed.durable_through.max(through);
            while relaxed
                .waiting
                .front()
                .is_some_and(|(number, ..)| *number <= through)
            {
                confirmed.extend(relaxed.waiting.pop_front());
            }
        }
        // Their numbers are given back outside of the lock.
        drop(confirmed);
    }

    pub(crate) fn requests(&self) -> Vec<Arc<Request>> {
        let relaxed = self.inner.lock();
        let waiting = relaxed.waiting.iter();
        waiting.map(|(_, _, request)| request.clone()).collect()
    }

    /// Whether everything with at most this number is durable.
    pub(crate) fn is_durable(&self, through: u64) -> bool {
        self.inner.lock().durable_through >= through
    }

    /// Whether nothing waits to become durable.
    pub(crate) fn is_empty(&self) -> bool {
        self.inner.lock().waiting.is_empty()
    }
}
