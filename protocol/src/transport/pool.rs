//! A pool of connections that are kept for reuse.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::watch;
use parking_lot::Mutex;

use super::{Connection, Endpoint, TransportError, within};
use crate::identity::Peer;

/// One connection for each (address, peer), dialled on first use and again once it is broken. Callers that ask while
/// it is being dialled wait for the same attempt. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ConnectionPool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    endpoint: Endpoint,
    dial_deadline: Duration,
    connections_max: usize,
    slots: Mutex<Slots>,
}

type Key = (SocketAddr, Peer);
type Outcome = Option<Result<Connection, TransportError>>;

#[derive(Debug, Default)]
struct Slots {
    by_key: HashMap<Key, Slot>,
    /// Counts uses, to find the least recently used slot.
    uses: u64,
}

#[derive(Debug)]
struct Slot {
    /// The result of dialling, once it is over.
    outcome: watch::Receiver<Outcome>,
    last_use: u64,
}

impl Slot {
    /// Whether the slot holds a working connection or an attempt in progress.
    fn is_usable(&self) -> bool {
        match &*self.outcome.borrow() {
            None => self.outcome.has_changed().is_ok(),
            Some(Ok(connection)) => !connection.is_closed(),
            Some(Err(_)) => false,
        }
    }
}

impl ConnectionPool {
    /// Creates a pool that dials from `endpoint`, each attempt bounded by `dial_deadline`, and keeps at most
    /// `connections_max` connections. A connection that is evicted for another stays open while it is in use.
    pub fn new(endpoint: Endpoint, dial_deadline: Duration, connections_max: usize) -> Self {
        Self {
            inner: Arc::new(Inner {
                endpoint,
                dial_deadline,
                connections_max: connections_max.max(1),
                slots: Mutex::default(),
            }),
        }
    }

    /// Returns a working connection to `peer` at `addr`. Cancelling this does not cancel the attempt for others. Must
    /// be called on the endpoint's runtime.
    ///
    /// # Errors
    /// As [`Endpoint::connect`]; all callers that waited for a failed attempt get its error.
    pub async fn get(&self, addr: SocketAddr, peer: &Peer) -> Result<Connection, TransportError> {
        let mut outcome = self.outcome_of((addr, peer.clone()));
        // The attempt has its own deadline; the longer one here is only for an attempt that never ends.
        let deadline = self.inner.dial_deadline * 2;
        let wait = async {
            let outcome = outcome
                .wait_for(Option::is_some)
                .await
                .map_err(|_| TransportError::EndpointClosed)?;
            outcome
                .clone()
                .unwrap_or(Err(TransportError::EndpointClosed))
        };
        within(deadline, "connecting", wait).await
    }

    /// The endpoint that dials.
    pub fn endpoint(&self) -> &Endpoint {
        &self.inner.endpoint
    }

    /// Forgets the connection to `peer` at `addr`, for example after the peer misbehaved.
    pub fn forget(&self, addr: SocketAddr, peer: &Peer) {
        self.inner.slots.lock().by_key.remove(&(addr, peer.clone()));
    }

    fn outcome_of(&self, key: Key) -> watch::Receiver<Outcome> {
        let mut slots = self.inner.slots.lock();
        slots.uses += 1;
        let now = slots.uses;
        if let Some(slot) = slots.by_key.get_mut(&key)
            && slot.is_usable()
        {
            slot.last_use = now;
            return slot.outcome.clone();
        }
        let (sender, outcome) = watch::channel(None);
        slots.by_key.remove(&key);
        if slots.by_key.len() >= self.inner.connections_max {
            slots.make_room();
        }
        let slot = Slot {
            outcome: outcome.clone(),
            last_use: now,
        };
        slots.by_key.insert(key.clone(), slot);
        drop(slots);

        let (endpoint, deadline) = (self.inner.endpoint.clone(), self.inner.dial_deadline);
        tokio::spawn(async move {
            let result = endpoint.connect(key.0, &key.1, deadline).await;
            // All callers may be gone; the slot gets the outcome nevertheless.
            sender.send_replace(Some(result));
        });
        outcome
    }
}

impl Slots {
    /// Drops broken connections, or if there are none, the least recently used one.
    fn make_room(&mut self) {
        let before = self.by_key.len();
        self.by_key.retain(|_, slot| slot.is_usable());
        if self.by_key.len() == before {
            let oldest = self.by_key.iter().min_by_key(|(_, slot)| slot.last_use);
            if let Some(key) = oldest.map(|(key, _)| key.clone()) {
                self.by_key.remove(&key);
            }
        }
    }
}
