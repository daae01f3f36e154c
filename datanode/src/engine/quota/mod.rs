//! Accounting of the disk space that the primary tenant grants. Space is reserved before it is used, never after.

pub mod shrinking;
pub mod volumes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Space used by a volume itself: its directories, version file and lock.
pub const VOLUME_OVERHEAD_BYTES: u64 = 512 * 1024;

/// Space used by each replica besides its file's pages: its inode, its directory entry, and a page of extents if the
/// file is fragmented.
pub const REPLICA_OVERHEAD_BYTES: u64 = 8 * 1024;

/// A file system may report any size for a file. The sum of all charges stays below this, so that no addition to it
/// overflows.
const CHARGED_BYTES_MAX: u64 = u64::MAX / 2;

/// A limit and the usage counted against it, in bytes.
#[derive(Debug)]
pub struct Quota {
    limit_bytes: AtomicU64,
    /// The sum of all charges.
    charged_bytes: AtomicU64,
}

impl Quota {
    /// A quota of which only the volume's overhead is used yet.
    pub fn new(limit_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            limit_bytes: AtomicU64::new(limit_bytes),
            charged_bytes: AtomicU64::new(0),
        })
    }

    /// The limit.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// Changes the limit. Space reserved or used above a lower limit stays charged until it is released.
    pub fn set_limit(&self, bytes: u64) {
        self.limit_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Usage above the limit.
    pub fn excess_bytes(&self) -> u64 {
        self.used_bytes().saturating_sub(self.limit_bytes())
    }

    /// Space reserved or used. Exceeds the limit only if the limit was lowered below the existing usage.
    pub fn used_bytes(&self) -> u64 {
        let overhead_bytes = Self::overhead_bytes(self.limit_bytes());
        self.charged_bytes.load(Ordering::Relaxed) + overhead_bytes
    }

    /// The volume itself cannot be given up: if the limit is lower than its overhead, the overhead counts as exactly
    /// the limit, so that the quota is met once all replicas are gone.
    fn overhead_bytes(limit_bytes: u64) -> u64 {
        VOLUME_OVERHEAD_BYTES.min(limit_bytes)
    }

    /// Space that may still be reserved.
    pub fn available_bytes(&self) -> u64 {
        self.limit_bytes().saturating_sub(self.used_bytes())
    }

    /// Bytes that would have to be freed until more than a tenth of the limit is free; never more than is charged.
    pub fn pressure_bytes(&self) -> u64 {
        let limit_bytes = self.limit_bytes();
        let wanted_bytes = (self.used_bytes() + limit_bytes / 10).saturating_sub(limit_bytes);
        wanted_bytes.min(self.charged_bytes.load(Ordering::Relaxed))
    }

    /// Reserves bytes; `None` if that would exceed the limit.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        let mut charge = Charge {
            quota: self.clone(),
            bytes: 0,
        };
        charge.grow(bytes).then_some(charge)
    }

    /// Charges data that is already on the disk, even above the limit.
    pub fn count_existing(self: &Arc<Self>, bytes: u64) -> Charge {
        let add = |charged_bytes| Some(CHARGED_BYTES_MAX.min(bytes.saturating_add(charged_bytes)));
        let charged = &self.charged_bytes;
        let before = match charged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(before) | Err(before) => before,
        };
        assert!(
            before <= CHARGED_BYTES_MAX,
            "{before} bytes are charged, and {bytes} more"
        );
        Charge {
            quota: self.clone(),
            bytes: bytes.min(CHARGED_BYTES_MAX - before),
        }
    }
}

/// Bytes charged to a quota; released when dropped.
#[derive(Debug)]
pub struct Charge {
    quota: Arc<Quota>,
    bytes: u64,
}

impl Charge {
    /// Reserves more bytes; returns `false`, and changes nothing, if that would exceed the limit.
    #[must_use]
    pub fn grow(&mut self, bytes: u64) -> bool {
        let limit_bytes = self.quota.limit_bytes();
        let room_bytes = limit_bytes - Quota::overhead_bytes(limit_bytes);
        let room_bytes = room_bytes.min(CHARGED_BYTES_MAX);
        let charged = &self.quota.charged_bytes;
        let grown = charged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |charged_bytes| {
            let sum_bytes = charged_bytes.checked_add(bytes);
            sum_bytes.filter(|&sum_bytes| sum_bytes <= room_bytes)
        });
        if grown.is_ok() {
            self.bytes += bytes;
        }
        grown.is_ok()
    }

    /// The size of the charge.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Releases the bytes above `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let excess_bytes = self.bytes.saturating_sub(bytes);
        let charged = &self.quota.charged_bytes;
        let before = charged.fetch_sub(excess_bytes, Ordering::Relaxed);
        assert!(
            before >= self.bytes,
            "a charge of {} bytes among {before} bytes in all",
            self.bytes
        );
        self.bytes -= excess_bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_than_the_limit() {
        let quota = Quota::new(VOLUME_OVERHEAD_BYTES + 100);
        let mut first = quota.reserve(60).unwrap();
        assert!(quota.reserve(41).is_none());
        assert!(!first.grow(41));
        assert!(first.grow(40));
        assert_eq!(quota.available_bytes(), 0);
        first.shrink_to(10);
        assert_eq!(quota.available_bytes(), 90);
        drop(first);
        assert_eq!(quota.used_bytes(), VOLUME_OVERHEAD_BYTES);
    }

    #[test]
    fn a_quota_of_zero_admits_nothing() {
        let quota = Quota::new(0);
        assert!(quota.reserve(1).is_none());
        assert_eq!(quota.used_bytes(), 0);
    }

    #[test]
    fn a_lowered_limit_admits_nothing_until_enough_is_gone() {
        let quota = Quota::new(VOLUME_OVERHEAD_BYTES + 10);
        let existing = quota.count_existing(50);
        assert_eq!(quota.available_bytes(), 0);
        assert!(quota.reserve(1).is_none());
        drop(existing);
        assert!(quota.reserve(10).is_some());
    }

    #[test]
    fn files_of_any_claimed_size_are_counted_and_released() {
        let quota = Quota::new(1 << 30);
        let claims = [u64::MAX, 5, u64::MAX - 1].map(|bytes| quota.count_existing(bytes));
        assert!(quota.excess_bytes() > 1 << 62 && quota.pressure_bytes() > 1 << 62);
        assert!(quota.reserve(1).is_none());
        drop(claims);
        assert_eq!(quota.used_bytes(), VOLUME_OVERHEAD_BYTES);
    }

    /// Wrong accounting never heals: more and more would be refused, or too much used.
    #[test]
    #[should_panic(expected = "a charge of 60 bytes among 40 bytes in all")]
    fn a_charge_that_is_not_counted_stops_at_once() {
        let quota = Quota::new(VOLUME_OVERHEAD_BYTES + 100);
        // Not dropped on the panic: that would panic again.
        let mut charge = std::mem::ManuallyDrop::new(quota.reserve(60).unwrap());
        quota.charged_bytes.store(40, Ordering::Relaxed);
        charge.shrink_to(0);
    }

    #[test]
    fn a_limit_lowered_to_nothing_is_kept_once_all_replicas_are_gone() {
        let quota = Quota::new(VOLUME_OVERHEAD_BYTES + 100);
        let existing = quota.reserve(60).unwrap();
        quota.set_limit(0);
        assert_eq!(quota.excess_bytes(), 60);
        drop(existing);
        assert_eq!((quota.excess_bytes(), quota.used_bytes()), (0, 0));
        quota.set_limit(VOLUME_OVERHEAD_BYTES + 100);
        assert_eq!(quota.available_bytes(), 100);
    }
}
