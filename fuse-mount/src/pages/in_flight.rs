//! Answers that have their effect when the thread runs that waits for them.

use std::time::{Duration, Instant};

use super::{DROPPING_MAX, IN_FLIGHT_MAX};

/// Bytes of a page of the kernel.
#[cfg(not(test))]
const PAGE_BYTES: u64 = 4_096;
/// Bytes of a page of the model.
#[cfg(test)]
pub(super) const PAGE_BYTES: u64 = 8;

/// Where the page begins that has this byte.
pub(super) fn page_start(offset: u64) -> u64 {
    offset - offset % PAGE_BYTES
}

/// The thread that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Its number; 0: it is not known.
    pub(super) thread: u32,
    /// It holds the kernel's lock of the inode until the answer has had its effect.
    pub(super) locks_inode: bool,
}

impl Waiter {
    /// One that holds the lock of the inode.
    pub fn locking(thread: u32) -> Self {
        Self {
            thread,
            locks_inode: true,
        }
    }

    /// One that does not.
    pub fn not_locking(thread: u32) -> Self {
        Self {
            thread,
            locks_inode: false,
        }
    }
}

/// What the kernel does with its pages of what it has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedWrite {
    /// They have the data, and are locked until it is answered.
    Kept,
    /// It drops them when the thread runs, from the one that begins at `from`: until then they may end with
    /// zeros where data is now.
    Dropped { from: u64 },
}

impl CachedWrite {
    /// What begins at `offset` is written past the pages.
    pub fn dropped_from(offset: u64) -> Self {
        Self::Dropped {
            from: page_start(offset),
        }
    }
}

/// An answer that has its effect when the thread runs that waits for it.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) waiter: Waiter,
    pub(super) since: Instant,
    /// The most that the kernel believes until then.
    pub(super) before_bytes: u64,
    pub(super) effect: Effect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The kernel takes this for the size.
    Size(u64),
    /// It is disturbed, and takes `end` for the least that the size is. Until then it has pages with zeros from
    /// `zeros_from` on, of which it drops those from `dropped_from` on.
    Write {
        end: u64,
        zeros_from: u64,
        dropped_from: u64,
    },
    /// It takes this for the size, unless it is disturbed.
    ShortRead(u64),
}

impl Effect {
    /// Whether a read that ends at `end` must not be answered while this is in flight.
    pub(super) fn undoes(self, end: u64) -> bool {
        match self {
            Self::Size(size_bytes) => size_bytes > end,
            // Each disturbs the other.
            Self::ShortRead(_) | Self::Write { .. } => true,
        }
    }

    /// How long it is in flight at most.
    pub(super) fn in_flight_max(self) -> Duration {
        match self.dropped_from() {
            u64::MAX => IN_FLIGHT_MAX,
            _ => DROPPING_MAX,
        }
    }

    pub(super) fn size_bytes(self) -> u64 {
        match self {
            Self::Size(size_bytes)
            | Self::ShortRead(size_bytes)
            | Self::Write {
                end: size_bytes, ..
            } => size_bytes,
        }
    }

    pub(super) fn zeros_from(self) -> u64 {
        match self {
            Self::Write { zeros_from, .. } => zeros_from,
            Self::Size(_) | Self::ShortRead(_) => u64::MAX,
        }
    }

    pub(super) fn dropped_from(self) -> u64 {
        match self {
            Self::Write { dropped_from, .. } => dropped_from,
            Self::Size(_) | Self::ShortRead(_) => u64::MAX,
        }
    }
}
