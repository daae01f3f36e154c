//! Allocation of the limited number of connections.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use harvestfs_protocol::transport::{ConnectionCounts, CountedConnection};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of connections: some browsers and a few collectors.
const CONNECTIONS_MAX: usize = 64;
/// Maximum number of connections from one address.
const CONNECTIONS_OF_ADDRESS_MAX: u32 = CONNECTIONS_MAX as u32 / 4;
/// Minimum time between two warnings that connections are refused or wait.
const WARNING_PAUSE: Duration = Duration::from_secs(60);

/// The slots for connections.
pub(crate) struct Places {
    all: Arc<Semaphore>,
    of_addresses: ConnectionCounts,
    warned: Option<Instant>,
}

/// A slot that is taken until this is dropped.
pub(crate) struct Place {
    _of_all: OwnedSemaphorePermit,
    _of_address: CountedConnection,
}

impl Places {
    pub(crate) fn new() -> Self {
        Self {
            all: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            of_addresses: ConnectionCounts::new(CONNECTIONS_OF_ADDRESS_MAX),
            warned: None,
        }
    }

    /// Waits until a slot is free for any client.
    pub(crate) async fn wait(&mut self) -> Option<OwnedSemaphorePermit> {
        if self.all.available_permits() == 0 {
            self.warn("all are in use", None);
        }
        // The semaphore is never closed.
        Arc::clone(&self.all).acquire_owned().await.ok()
    }

    /// Gives a slot to an address, unless it already has too many.
    pub(crate) fn give(&mut self, of_all: OwnedSemaphorePermit, address: IpAddr) -> Option<Place> {
        let address = address.to_canonical();
        let Some(of_address) = self.of_addresses.begin(address) else {
            self.warn("one address has as many as it may", Some(address));
            return None;
        };
        Some(Place {
            _of_all: of_all,
            _of_address: of_address,
        })
    }

    fn warn(&mut self, why: &str, address: Option<IpAddr>) {
        if self.warned.is_none_or(|at| at.elapsed() >= WARNING_PAUSE) {
            self.warned = Some(Instant::now());
            let address = address.map(tracing::field::display);
            tracing::warn!(address, "HTTP connections are refused or wait: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_address_does_not_get_all_places() {
        let mut places = Places::new();
        let [one, other] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let mapped = IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0x0a00, 1]);
        let mut given = Vec::new();
        for _ in 0..CONNECTIONS_OF_ADDRESS_MAX {
            let of_all = places.wait().await.unwrap();
            given.push(places.give(of_all, one).expect("it has few"));
        }
        for same in [one, mapped] {
            let of_all = places.wait().await.unwrap();
            assert!(places.give(of_all, same).is_none());
        }
        let of_all = places.wait().await.unwrap();
        let of_other = places.give(of_all, other).expect("it has none");
        assert_eq!(places.all.available_permits(), CONNECTIONS_MAX - 17);
        given.pop();
        let of_all = places.wait().await.unwrap();
        given.push(places.give(of_all, one).expect("it gave one back"));
        drop((given, of_other));
        assert_eq!(places.all.available_permits(), CONNECTIONS_MAX);
        let of_all = places.wait().await.unwrap();
        let _place = places.give(of_all, other).expect("it has none");
    }
}
