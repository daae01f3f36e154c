//! Aggregates the values from heartbeats into one mean for each server and slot.

use super::ring::{SLOT_S, Slot};

/// Collects what servers report until the slot is over. The caller numbers the servers.
///
/// A server that reports twice as often does not count twice: each has its own mean. Takes sixteen bytes for each
/// number up to the highest.
#[derive(Debug, Default)]
pub struct Collector {
    slot: Option<Slot>,
    sums: Vec<(u64, u32)>,
}

/// The mean of a server in a slot, as a share of all cores, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServerMean {
    /// The number of the server.
    pub server: u32,
    /// The mean.
    pub share: f32,
}

impl Collector {
    /// Ends the slot if a time (in seconds since 1970) lies in another one, before or after, and then returns the
    /// means of the ended slot.
    pub fn advance(&mut self, now_s: u32) -> Option<(Slot, Vec<ServerMean>)> {
        let slot = now_s / SLOT_S;
        let ended = self.slot.replace(slot).filter(|&ended| ended != slot)?;
        let mut means = Vec::new();
        for (server, (sum, count)) in self.sums.iter_mut().enumerate() {
            if *count > 0 {
                means.push(ServerMean {
                    server: server as u32,
                    share: (*sum as f64 / f64::from(*count) / 1000.0) as f32,
                });
                (*sum, *count) = (0, 0);
            }
        }
        Some((ended, means))
    }

    /// Adds a server's current usage, in thousandths of all its cores; more than 1000 counts as 1000.
    pub fn observe(&mut self, server: u32, cpu_permille: u16) {
        let index = server as usize;
        if index >= super::SERVERS_MAX {
            return;
        }
        if self.sums.len() <= index {
            self.sums.resize(index + 1, (0, 0));
        }
        let (sum, count) = &mut self.sums[index];
        *sum += u64::from(cpu_permille.min(1000));
        *count += 1;
    }
}
