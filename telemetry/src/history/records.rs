//! History on disk: append-only files of framed records.
//!
//! A file begins with [`FILE_HEADER`]; in the file of a day, the number of the day follows. Every record is in a
//! frame: its length (u32), the CRC-32 of its bytes (u32), both little-endian, and the bytes (postcard). [`Frames`]
//! reads them: a damaged frame is skipped and counted, and one that a crash cut off at the end is left out. Records
//! may be repeated; what their order matters for is said in [`super`].
//!
//! - `servers`: [`ServerRecord`], the owners of each server and the times of its reimages.
//! - one file for each of the 31 days: [`DayRecord`], one byte for each tenant and slot.

use std::collections::HashMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ring::{Level, SLOTS_PER_DAY};
use super::{History, TenantId};
use crate::profile::TenantKey;

/// The beginning of a file of servers and of a file of a day. The last digits are the version.
pub const FILE_HEADER: [u8; 8] = *b"HFHIST01";
/// Length and checksum of a frame, in bytes.
pub const FRAME_HEADER_BYTES: usize = 8;
/// Longest record in bytes; bounds how much a damaged length makes a reader skip.
pub const RECORD_BYTES_MAX: usize = 1 << 20;
/// Most bytes, in addition to twice the file, whose checksums are computed in the search for sound frames.
const SEARCH_BYTES: usize = 64 << 20;
/// Most reimages in one record.
const REIMAGES_PER_RECORD: usize = 1_024;
/// Most tenants named in one record.
const TENANTS_PER_RECORD: usize = 1_024;

/// A record of the file of servers. Times are in seconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerRecord {
    /// A change of ownership, see [`History::owns`].
    Owns {
        /// The server.
        server: String,
        /// Its owner.
        tenant: TenantKey,
        /// When ownership begins.
        from_s: u32,
    },
    /// Reimages, see [`History::reimaged`].
    Reimaged {
        /// The server.
        server: String,
        /// When it was reimaged.
        at_s: Vec<u32>,
    },
}

/// A record of the file of a day. Tenants are numbered per file, in the order in which it names them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DayRecord {
    /// The tenants with the numbers from `first` on.
    Tenants {
        /// The number of the first of them.
        first: u32,
        /// Their names.
        keys: Vec<TenantKey>,
    },
    /// One slot of all tenants.
    Slot {
        /// The slot of the day.
        slot: u16,
        /// The level of each tenant, from the first on; [`Level::MISSING`] where there is none.
        levels: Vec<u8>,
    },
    /// Some slots of one tenant.
    Span {
        /// The number of the tenant.
        tenant: u32,
        /// The first slot of the day.
        slot: u16,
        /// The levels from there on.
        levels: Vec<u8>,
    },
}

/// Appends a record in its frame. Returns false, and appends nothing, when the record is too long.
pub fn append<R: Serialize>(file: &mut Vec<u8>, record: &R) -> bool {
    let start = file.len();
    file.extend([0; FRAME_HEADER_BYTES]);
    let Ok(bytes) = postcard::to_stdvec(record) else {
        file.truncate(start);
        return false;
    };
    if bytes.len() > RECORD_BYTES_MAX {
        file.truncate(start);
        return false;
    }
    file[start..start + 4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    file[start + 4..start + 8].copy_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
    file.extend(bytes);
    true
}

/// The damage found in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Frames that were skipped, and records without a meaning.
    pub records: u64,
    /// Bytes at the end of the file in which no frame can be recognised. A crash leaves a part of the last record.
    pub tail_bytes: u64,
}

/// Reads the records of a file (without its header) from memory.
pub struct Frames<'a> {
    bytes: &'a [u8],
    offset: usize,
    /// How many bytes may still be checksummed.
    budget_bytes: usize,
    /// The damage so far.
    pub damage: Damage,
}

impl<'a> Frames<'a> {
    /// Creates a reader of these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Frames {
            bytes,
            offset: 0,
            budget_bytes: 2 * bytes.len() + SEARCH_BYTES,
            damage: Damage::default(),
        }
    }

    /// Returns the next sound record.
    pub fn next_record<R: DeserializeOwned>(&mut self) -> Option<R> {
        while self.offset < self.bytes.len() {
            let Some(body) = self.frame_at(self.offset) else {
                self.pass_over();
                continue;
            };
            self.offset += FRAME_HEADER_BYTES + body.len();
            match postcard::take_from_bytes(body) {
                Ok((record, [])) => return Some(record),
                _ => self.damage.records += 1,
            }
        }
        None
    }

    /// Returns the record whose frame begins at this offset, if there is a sound one.
    fn frame_at(&mut self, offset: usize) -> Option<&'a [u8]> {
        let (header, body) = self.bytes.get(offset..)?.split_first_chunk()?;
        let [a, b, c, d, sum @ ..]: [u8; FRAME_HEADER_BYTES] = *header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if !(1..=RECORD_BYTES_MAX).contains(&length) {
            return None;
        }
        let body = body.get(..length)?;
        // Bounds the search in a file that was crafted to be slow.
        self.budget_bytes = self.budget_bytes.checked_sub(length)?;
        (crc32fast::hash(body) == u32::from_le_bytes(sum)).then_some(body)
    }

    /// Continues with the next sound frame; without one, the rest is the tail.
    fn pass_over(&mut self) {
        let bytes = self.bytes.len();
        match (self.offset + 1..bytes).find(|&offset| self.frame_at(offset).is_some()) {
            Some(offset) => {
                self.damage.records += 1;
                self.offset = offset;
            }
            None => {
                self.damage.tail_bytes = (bytes - self.offset) as u64;
                self.offset = bytes;
            }
        }
    }
}

impl History {
    /// Adds the content of a file of servers (without its header).
    pub fn read_servers(&mut self, bytes: &[u8]) -> Damage {
        let mut frames = Frames::new(bytes);
        while let Some(record) = frames.next_record() {
            let refused = match record {
                ServerRecord::Owns {
                    server,
                    tenant,
                    from_s,
                } => self.owns(&server, &tenant, from_s).is_err(),
                ServerRecord::Reimaged { server, at_s } => at_s
                    .into_iter()
                    .map(|at_s| self.reimaged(&server, at_s).is_err())
                    .fold(false, |any, refused| any | refused),
            };
            frames.damage.records += u64::from(refused);
        }
        frames.damage
    }

    /// Returns the content of a file of servers, for rewriting it without the duplicates in the old one. Each item is
    /// one or more records with their frames.
    pub fn server_records(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.servers.iter().map(|server| {
            let mut bytes = Vec::new();
            for owner in &server.owners {
                // Names have a bounded length, so the records fit.
                append(
                    &mut bytes,
                    &ServerRecord::Owns {
                        server: server.name.clone(),
                        tenant: self.tenants[owner.tenant.0 as usize].key.clone(),
                        from_s: owner.from_s,
                    },
                );
            }
            for times in server.reimages.chunks(REIMAGES_PER_RECORD) {
                let record = ServerRecord::Reimaged {
                    server: server.name.clone(),
                    at_s: times.to_vec(),
                };
                append(&mut bytes, &record);
            }
            bytes
        })
    }

    /// Adds the content of the file of a day (without its header).
    pub fn read_day(&mut self, day: u32, bytes: &[u8]) -> Damage {
        let mut frames = Frames::new(bytes);
        let mut named: HashMap<u32, TenantId> = HashMap::new();
        let first_slot = day.saturating_mul(SLOTS_PER_DAY as u32);
        while let Some(record) = frames.next_record() {
            let mut unknown = false;
            match record {
                DayRecord::Tenants { first, keys } => {
                    for (number, key) in (first..=u32::MAX).zip(keys) {
                        match self.tenant(&key) {
                            Ok(tenant) => drop(named.insert(number, tenant)),
                            Err(_) => unknown = true,
                        }
                    }
                }
                DayRecord::Slot { slot, levels } => {
                    unknown = usize::from(slot) >= SLOTS_PER_DAY;
                    for (number, level) in (0..).zip(levels) {
                        if unknown || level == Level::MISSING.0 {
                            continue;
                        }
                        match named.get(&number) {
                            Some(&tenant) => {
                                let slot = first_slot.saturating_add(slot.into());
                                self.set_level(tenant, slot, Level(level));
                            }
                            None => unknown = true,
                        }
                    }
                }
                DayRecord::Span {
                    tenant,
                    slot,
                    levels,
                } => match named.get(&tenant) {
                    Some(&tenant) if usize::from(slot) + levels.len() <= SLOTS_PER_DAY => {
                        for (slot, level) in (u32::from(slot)..).zip(levels) {
                            if level != Level::MISSING.0 {
                                let slot = first_slot.saturating_add(slot);
                                self.set_level(tenant, slot, Level(level));
                            }
                        }
                    }
                    _ => unknown = true,
                },
            }
            frames.damage.records += u64::from(unknown);
        }
        frames.damage
    }

    /// Returns the content of the file of a day: the tenants by their numbers in this history, then their levels.
    /// Each item is a record with its frame.
    pub fn day_records(&self, day: u32) -> impl Iterator<Item = Vec<u8>> + '_ {
        let spans = self
            .tenants
            .iter()
            .enumerate()
            .filter_map(move |(number, tenant)| {
                let (_, levels) = tenant.ring.days().find(|(number, _)| *number == day)?;
                let mut bytes = Vec::new();
                let record = DayRecord::Span {
                    tenant: number as u32,
                    slot: 0,
                    levels: levels.to_vec(),
                };
                append(&mut bytes, &record);
                Some(bytes)
            });
        self.tenant_records(0).into_iter().chain(spans)
    }

    /// Returns the records that name the tenants with the numbers from `first` on.
    pub fn tenant_records(&self, first: usize) -> Vec<Vec<u8>> {
        let tenants = self.tenants.get(first..).unwrap_or_default();
        let mut records = Vec::new();
        for (index, tenants) in tenants.chunks(TENANTS_PER_RECORD).enumerate() {
            let mut bytes = Vec::new();
            let record = DayRecord::Tenants {
                first: (first + index * TENANTS_PER_RECORD) as u32,
                keys: tenants.iter().map(|tenant| tenant.key.clone()).collect(),
            };
            append(&mut bytes, &record);
            records.push(bytes);
        }
        records
    }

    /// Returns the days with levels of any tenant, in ascending order.
    pub fn days(&self) -> Vec<u32> {
        let mut days: Vec<u32> = Vec::new();
        for tenant in &self.tenants {
            days.extend(tenant.ring.days().map(|(number, _)| number));
            days.sort_unstable();
            days.dedup();
        }
        days
    }
}
