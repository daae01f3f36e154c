//! The history of the primary tenants: a month of CPU utilisation, and years of reimages.
//!
//! Pure: no clock, no files. The namenode feeds it and keeps it on disk as the records of [`records`]; reading them
//! back in the order in which they were written gives the same history. Another order may not: a server's return to a
//! tenant is passed over if it is recorded before the time in between, when another one had the server.
//!
//! **CPU utilisation.** Each server reports its usage every few seconds; [`Collector`] computes the mean of each
//! server for every slot of two minutes; [`History::record_slot`] averages the servers of a tenant (the paper's
//! "average server") and keeps one byte for each tenant and slot: 720 bytes per day, 22,320 for the 31 days of a
//! month, whether the tenant has one server or thousands. No series is kept for an individual server, so a month of a
//! server costs only its share of its tenant's series: 22,320 bytes divided by the servers of the tenant.
//!
//! **Reimages.** Four bytes each: the second at which a server was reimaged. Each server keeps its newest
//! [`REIMAGES_PER_SERVER_MAX`], far more than three years of the most often reimaged one. The owner of the server at
//! that time is known from its list of owners, eight bytes for each change of ownership.
//!
//! **What can go wrong, and how it is handled:**
//!
//! | input | treatment |
//! |---|---|
//! | a gap | stays a gap; analysis counts it as the mean |
//! | CPU utilisation above 100 % | counts as 100 % |
//! | the clock jumps ahead | skipped days are gaps; a recorded day stays until another needs its place (modulo 31) |
//! | the clock jumps back | new records replace those of that time; analysis ignores everything after the clock |
//! | an imported sample older than a month, or in the future | counted and skipped ([`Recorded::TooOld`]), or [`HistoryError::InTheFuture`] |
//! | a reimage of a server that no tenant owns | [`HistoryError::UnknownServer`] |
//! | a server that two tenants own from the same second | [`HistoryError::TwoOwners`] |
//! | a repeated record | [`Recorded::Known`]: nothing changes |
//! | a rack without servers | history has no racks: this is a matter of placement |

mod collect;
pub mod records;
mod ring;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

pub use collect::{Collector, ServerMean};
pub use ring::{DAYS_KEPT, Level, MONTH_DAYS, SLOT_S, SLOTS_PER_DAY, Slot};

use crate::profile::TenantKey;
use ring::Ring;

/// Most tenants: a month of all of them takes 183 MB. The paper's largest datacentre has a few thousand.
pub const TENANTS_MAX: usize = 8_192;
/// Most servers.
pub const SERVERS_MAX: usize = 1 << 18;
/// Most reimages that are kept for one server; the oldest are forgotten.
pub const REIMAGES_PER_SERVER_MAX: usize = 1_024;
/// Most changes of ownership that are kept for one server; the oldest are forgotten.
pub const OWNERS_PER_SERVER_MAX: usize = 256;
/// Longest name in bytes, as in the protocol.
pub const NAME_BYTES_MAX: usize = 128;
/// Two reimages of a server within this time count as one: its volumes are detected one by one.
pub const SAME_REIMAGE_S: u32 = 60;

/// Number of a tenant in one history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// Number of a server in one history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(pub u32);

/// The outcome of recording something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// It was new.
    New,
    /// History had it already.
    Known,
    /// It is older than the retention.
    TooOld,
}

/// The reason why something was not recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// The length of a name is out of bounds.
    #[error("expected a name of 1 to {NAME_BYTES_MAX} bytes, found one of {0} bytes")]
    Name(usize),
    /// There is no space for another tenant.
    #[error("there are {TENANTS_MAX} tenants already, and no more are kept")]
    TooManyTenants,
    /// There is no space for another server.
    #[error("there are {SERVERS_MAX} servers already, and no more are kept")]
    TooManyServers,
    /// No tenant owns the server.
    #[error("server {0} is unknown: import its owner first")]
    UnknownServer(String),
    /// Two tenants cannot own a server from the same second on.
    #[error("server {server} already belongs to {}/{} from second {from_s} on", other.environment, other.machine_function)]
    TwoOwners {
        /// The server.
        server: String,
        /// The known owner.
        other: TenantKey,
        /// When ownership begins, in seconds since 1970.
        from_s: u32,
    },
    /// The time has not come yet, by the clock.
    #[error("second {at_s} is in the future")]
    InTheFuture {
        /// When, in seconds since 1970.
        at_s: u32,
    },
}

/// The history of all tenants and servers.
#[derive(Default)]
pub struct History {
    tenants: Vec<Tenant>,
    tenants_by_key: HashMap<TenantKey, TenantId>,
    servers: Vec<Server>,
    servers_by_name: HashMap<String, ServerId>,
    reimages: usize,
}

struct Tenant {
    key: TenantKey,
    ring: Ring,
}

/// The history of a server.
pub struct Server {
    name: String,
    /// In chronological order; at least one.
    owners: Vec<Owner>,
    /// In chronological order.
    reimages: Vec<u32>,
}

/// The owner of a server from some time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// When ownership begins, in seconds since 1970.
    pub from_s: u32,
    /// The owner.
    pub tenant: TenantId,
}

impl Server {
    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its owners, oldest first.
    pub fn owners(&self) -> &[Owner] {
        &self.owners
    }

    /// Returns when it was reimaged, in seconds since 1970, oldest first.
    pub fn reimages(&self) -> &[u32] {
        &self.reimages
    }

    /// Returns its current owner, as far as history knows.
    pub fn owner(&self) -> Option<TenantId> {
        self.owners.last().map(|owner| owner.tenant)
    }

    /// Returns its owner just before a time. A server is reimaged in the second in which its owner changes; before
    /// its first known owner, it counts as owned by this one.
    pub fn owner_before(&self, at_s: u32) -> Option<TenantId> {
        let known = self.owners.partition_point(|owner| owner.from_s < at_s);
        self.owners
            .get(known.saturating_sub(1))
            .map(|owner| owner.tenant)
    }
}

impl History {
    /// Returns the number of a tenant, assigning one if it has none.
    pub fn tenant(&mut self, key: &TenantKey) -> Result<TenantId, HistoryError> {
        if let Some(id) = self.tenants_by_key.get(key) {
            return Ok(*id);
        }
        for name in [&key.environment, &key.machine_function] {
            check_name(name)?;
        }
        if self.tenants.len() >= TENANTS_MAX {
            return Err(HistoryError::TooManyTenants);
        }
        let id = TenantId(self.tenants.len() as u32);
        self.tenants.push(Tenant {
            key: key.clone(),
            ring: Ring::default(),
        });
        self.tenants_by_key.insert(key.clone(), id);
        Ok(id)
    }

    /// Records that a tenant owns a server from some time (in seconds since 1970) on, until another tenant does.
    pub fn owns(
        &mut self,
        server: &str,
        tenant: &TenantKey,
        from_s: u32,
    ) -> Result<Recorded, HistoryError> {
        let tenant = self.tenant(tenant)?;
        let Some(&id) = self.servers_by_name.get(server) else {
            check_name(server)?;
            if self.servers.len() >= SERVERS_MAX {
                return Err(HistoryError::TooManyServers);
            }
            let id = ServerId(self.servers.len() as u32);
            self.servers_by_name.insert(server.to_owned(), id);
            self.servers.push(Server {
                name: server.to_owned(),
                owners: vec![Owner { from_s, tenant }],
                reimages: Vec::new(),
            });
            return Ok(Recorded::New);
        };
        let owners = &mut self.servers[id.0 as usize].owners;
        let at = owners.partition_point(|owner| owner.from_s < from_s);
        if let Some(owner) = owners.get_mut(at) {
            if owner.tenant == tenant {
                // It has owned the server for longer than was known.
                let known = owner.from_s == from_s;
                owner.from_s = from_s;
                return Ok(if known {
                    Recorded::Known
                } else {
                    Recorded::New
                });
            }
            if owner.from_s == from_s {
                return Err(HistoryError::TwoOwners {
                    server: server.to_owned(),
                    other: self.tenants[owner.tenant.0 as usize].key.clone(),
                    from_s,
                });
            }
        }
        if at > 0 && owners[at - 1].tenant == tenant {
            return Ok(Recorded::Known);
        }
        owners.insert(at, Owner { from_s, tenant });
        if owners.len() > OWNERS_PER_SERVER_MAX {
            owners.remove(0);
        }
        Ok(Recorded::New)
    }

    /// Records that a server was reimaged at a time (in seconds since 1970).
    pub fn reimaged(&mut self, server: &str, at_s: u32) -> Result<Recorded, HistoryError> {
        let Some(&id) = self.servers_by_name.get(server) else {
            return Err(HistoryError::UnknownServer(server.to_owned()));
        };
        let reimages = &mut self.servers[id.0 as usize].reimages;
        let at = reimages.partition_point(|&other| other < at_s);
        let near = |other: &u32| other.abs_diff(at_s) < SAME_REIMAGE_S;
        let before = at.checked_sub(1).and_then(|before| reimages.get(before));
        if before.is_some_and(near) || reimages.get(at).is_some_and(near) {
            return Ok(Recorded::Known);
        }
        if reimages.len() >= REIMAGES_PER_SERVER_MAX {
            if at == 0 {
                return Ok(Recorded::TooOld);
            }
            reimages.remove(0);
            reimages.insert(at - 1, at_s);
        } else {
            reimages.insert(at, at_s);
            self.reimages += 1;
        }
        Ok(Recorded::New)
    }

    /// Records the usage of servers in a slot: each tenant gets the mean of its servers. Servers without an owner,
    /// and unknown ones, are skipped. Returns the levels by number of the tenant, for [`records::DayRecord::Slot`].
    pub fn record_slot(
        &mut self,
        slot: Slot,
        means: impl IntoIterator<Item = (ServerId, f32)>,
    ) -> Vec<u8> {
        let mut sums = vec![(0.0f64, 0u32); self.tenants.len()];
        for (server, share) in means {
            let owner = self.servers.get(server.0 as usize).and_then(Server::owner);
            if let Some(tenant) = owner
                && !share.is_nan()
            {
                let sum = &mut sums[tenant.0 as usize];
                sum.0 += f64::from(share.clamp(0.0, 1.0));
                sum.1 += 1;
            }
        }
        let mut levels = vec![Level::MISSING.0; sums.len()];
        for (index, (sum, count)) in sums.into_iter().enumerate() {
            if count > 0 {
                let level = Level::of((sum / f64::from(count)) as f32);
                levels[index] = level.0;
                self.tenants[index].ring.set(slot, level);
            }
        }
        levels
    }

    /// Sets one level of a tenant, as read from a record or an import.
    pub fn set_level(&mut self, tenant: TenantId, slot: Slot, level: Level) {
        if let Some(tenant) = self.tenants.get_mut(tenant.0 as usize) {
            tenant.ring.set(slot, level);
        }
    }

    /// Returns the level of a tenant in a slot.
    pub fn level(&self, tenant: TenantId, slot: Slot) -> Level {
        self.tenants
            .get(tenant.0 as usize)
            .map_or(Level::MISSING, |tenant| tenant.ring.get(slot))
    }

    /// Imports the CPU utilisation of a tenant's average server: shares (0 to 1) from a time on (seconds since 1970),
    /// one every `period_s`. A sample holds until the next one; samples closer together than a slot are averaged.
    /// Samples older than a month before `now_s` are skipped. Returns the slots that are new or have changed, and how
    /// many samples were too old.
    ///
    /// # Errors
    /// [`HistoryError::InTheFuture`], and then nothing is recorded.
    pub fn import_series(
        &mut self,
        tenant: TenantId,
        start_s: u32,
        period_s: u32,
        shares: &[Option<f32>],
        now_s: u32,
    ) -> Result<(Vec<(Slot, Level)>, usize), HistoryError> {
        let period = u64::from(period_s.max(1));
        let last = u64::from(start_s) + shares.len().saturating_sub(1) as u64 * period;
        if !shares.is_empty() && last > u64::from(now_s) {
            let at_s = u32::try_from(last).unwrap_or(u32::MAX);
            return Err(HistoryError::InTheFuture { at_s });
        }
        let oldest = u64::from(now_s.saturating_sub(DAYS_KEPT * 86_400) / SLOT_S + 1);
        let newest = u64::from(now_s / SLOT_S);
        let mut sums: Vec<(f64, u32)> = Vec::new();
        let mut too_old = 0;
        for (index, share) in shares.iter().enumerate() {
            let begin = u64::from(start_s) + index as u64 * period;
            // The slots that begin while the sample holds, or else the one that it lies in.
            let slot_s = u64::from(SLOT_S);
            let first = begin.div_ceil(slot_s).min((begin + period - 1) / slot_s);
            let end = (begin + period)
                .div_ceil(slot_s)
                .max(first + 1)
                .min(newest + 1);
            if end <= oldest {
                too_old += 1;
                continue;
            }
            let Some(share) = share.filter(|share| !share.is_nan()) else {
                continue;
            };
            for slot in first.max(oldest)..end {
                let at = (slot - oldest) as usize;
                if sums.len() <= at {
                    sums.resize(at + 1, (0.0, 0));
                }
                sums[at].0 += f64::from(share.clamp(0.0, 1.0));
                sums[at].1 += 1;
            }
        }
        let mut changed = Vec::new();
        for (at, (sum, count)) in sums.into_iter().enumerate() {
            if count == 0 {
                continue;
            }
            let slot = (oldest + at as u64) as Slot;
            let level = Level::of((sum / f64::from(count)) as f32);
            if self.level(tenant, slot) != level {
                self.set_level(tenant, slot, level);
                changed.push((slot, level));
            }
        }
        Ok((changed, too_old))
    }

    /// Returns the shares of a tenant in the month of `MONTH_DAYS` days that ends with the last whole slot before a
    /// time (in seconds since 1970), one for each slot.
    pub fn month(&self, tenant: TenantId, now_s: u32) -> impl Iterator<Item = Option<f32>> + '_ {
        let start = Self::month_start_s(now_s) / SLOT_S;
        (start..now_s / SLOT_S).map(move |slot| self.level(tenant, slot).share())
    }

    /// Returns the beginning of the month of [`History::month`], in seconds since 1970.
    #[must_use]
    pub fn month_start_s(now_s: u32) -> u32 {
        (now_s / SLOT_S).saturating_sub(MONTH_DAYS * SLOTS_PER_DAY as u32) * SLOT_S
    }

    /// Returns the number of a known tenant.
    pub fn find_tenant(&self, key: &TenantKey) -> Option<TenantId> {
        self.tenants_by_key.get(key).copied()
    }

    /// Returns the number of a known server.
    pub fn find_server(&self, name: &str) -> Option<ServerId> {
        self.servers_by_name.get(name).copied()
    }

    /// Returns all tenants, by their numbers.
    pub fn tenants(&self) -> impl ExactSizeIterator<Item = (TenantId, &TenantKey)> {
        self.tenants
            .iter()
            .enumerate()
            .map(|(index, tenant)| (TenantId(index as u32), &tenant.key))
    }

    /// Returns all servers, by their numbers.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// Returns how many reimages are remembered.
    pub fn reimages(&self) -> usize {
        self.reimages
    }

    /// Returns the estimated memory use in bytes.
    pub fn memory_bytes(&self) -> usize {
        let rings: usize = self
            .tenants
            .iter()
            .map(|tenant| tenant.ring.memory_bytes())
            .sum();
        let keys = |key: &TenantKey| key.environment.len() + key.machine_function.len();
        let keys: usize = self
            .tenants
            .iter()
            .map(|tenant| 2 * keys(&tenant.key) + 96)
            .sum();
        let servers = self.servers.iter().map(|server| {
            2 * server.name.len()
                + 64
                + size_of::<Server>()
                + server.owners.capacity() * size_of::<Owner>()
                + server.reimages.capacity() * size_of::<u32>()
        });
        rings + keys + servers.sum::<usize>()
    }
}

fn check_name(name: &str) -> Result<(), HistoryError> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) {
        Ok(())
    } else {
        Err(HistoryError::Name(name.len()))
    }
}
