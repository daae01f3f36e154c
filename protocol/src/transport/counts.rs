//! How many connections come from each address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{CloseCode, Connection};

/// Counts the connections that a listening part has, by the address that they come from. Only
/// established ones are counted: a peer cannot use up the places of an address that is not its own.
#[derive(Clone, Debug)]
pub struct ConnectionCounts {
    shared: Arc<Counts>,
}

#[derive(Debug)]
struct Counts {
    of_addresses: Mutex<HashMap<IpAddr, u32>>,
    per_address_max: u32,
}

/// A connection, counted as long as this lives.
#[derive(Debug)]
pub struct CountedConnection {
    counts: Arc<Counts>,
    address: IpAddr,
}

impl ConnectionCounts {
    /// At most so many connections come from one address.
    #[must_use]
    pub fn new(per_address_max: u32) -> Self {
        Self {
            shared: Arc::new(Counts {
                of_addresses: Mutex::default(),
                per_address_max,
            }),
        }
    }

    /// Counts a connection. None: it is closed, with [`CloseCode::TOO_MANY_CONNECTIONS`] and the reason,
    /// since its address has as many as one may have.
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

    /// Counts one from an address, whatever carries it. None: the address has as many as one may have.
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
