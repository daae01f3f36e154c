//! Counts of connections by address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{CloseCode, Connection};

/// Counts the connections to a listening part by the address that they come from. Only established ones are counted,
/// so that a peer cannot exhaust the limit of an address that is not its own.
#[derive(Clone, Debug)]
pub struct ConnectionCounts {
    shared: Arc<Counts>,
}

#[derive(Debug)]
struct Counts {
    of_addresses: Mutex<HashMap<IpAddr, u32>>,
    per_address_max: u32,
}

/// A connection that is counted until this is dropped.
#[derive(Debug)]
pub struct CountedConnection {
    counts: Arc<Counts>,
    address: IpAddr,
}

impl ConnectionCounts {
    /// Allows at most this many connections from one address.
    #[must_use]
    pub fn new(per_address_max: u32) -> Self {
        Self {
            shared: Arc::new(Counts {
                of_addresses: Mutex::default(),
                per_address_max,
            }),
        }
    }

    /// Counts a connection. `None`: its address has reached the limit, and it was closed with
    /// [`CloseCode::TOO_MANY_CONNECTIONS`] and the reason.
    pub fn count(&self, connection: &Connection) -> Option<CountedConnection> {
        let address = connection.remote_addr().ip().to_canonical();
        let counted = self.begin(address);
        if counted.is_none() {
            let max = self.shared.per_address_max;
            tracing::warn!(peer = %connection.peer(), %address, max, "too many connections from an address");
            let reason = format!("{max} connections come from {address}, and no more may");
            connection.close(CloseCode::TOO_MANY_CONNECTIONS, &reason);
        }
        counted
    }

    /// Counts a connection from an address, whatever carries it. `None`: the address has reached the limit.
    #[must_use]
    pub fn begin(&self, address: IpAddr) -> Option<CountedConnection> {
        let address = address.to_canonical();
        let mut counts = self.shared.of_addresses.lock();
        let count = counts.entry(address).or_default();
        if *count >= self.shared.per_address_max {
            return None;
        }
        *count += 1;
        Some(CountedConnection {
            counts: self.shared.clone(),
            address,
        })
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        let mut counts = self.counts.of_addresses.lock();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_its_own_places_and_gets_them_back() {
        let counts = ConnectionCounts::new(2);
        let [one, other] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let first = counts.begin(one);
        let second = counts.begin(one);
        assert!(first.is_some() && second.is_some());
        assert!(counts.begin(one).is_none());
        assert!(counts.begin(other).is_some());
        drop(first);
        let third = counts.begin(one);
        assert!(third.is_some() && counts.begin(one).is_none());
        drop((second, third));
        assert!(
            counts.shared.of_addresses.lock().is_empty(),
            "nothing is kept of peers that left"
        );
    }
}
