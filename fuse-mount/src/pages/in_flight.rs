//! Answers that take effect when the thread that waits for them runs.

use std::time::{Duration, Instant};

use super::{DROPPING_MAX, IN_FLIGHT_MAX};

/// Page size of the kernel, in bytes.
#[cfg(not(test))]
const PAGE_BYTES: u64 = 4_096;
/// Page size of the model, in bytes.
#[cfg(test)]
pub(super) const PAGE_BYTES: u64 = 8;

/// The start of the page that contains this byte.
pub(super) fn page_start(offset: u64) -> u64 {
    offset - offset % PAGE_BYTES
}

/// The thread that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Its id; 0 if it is not known.
    pub(super) thread: u32,
    /// Whether it holds the kernel's lock of the inode until the answer has taken effect.
    pub(super) locks_inode: bool,
}

impl Waiter {
    /// A thread that holds the lock of the inode.
    pub fn locking(thread: u32) -> Self {
        Self {
            thread,
            locks_inode: true,
        }
    }

    /// A thread that does not hold the lock.
    pub fn not_locking(thread: u32) -> Self {
        Self {
            thread,
            locks_inode: false,
        }
    }
}

/// What the kernel does with its pages of the data that it has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedWrite {
    /// The pages contain the data, and are locked until the write is answered.
    Kept,
    /// The kernel drops them when the thread runs, from the page that begins at `from`: until then, they may end with
    /// zeros where there is data now.
    Dropped { from: u64 },
}

impl CachedWrite {
    /// A write that begins at `offset` and bypasses the pages.
    pub fn dropped_from(offset: u64) -> Self {
        Self::Dropped {
            from: page_start(offset),
        }
    }
}

/// An answer that takes effect when the thread that waits for it runs.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) waiter: Waiter,
    pub(super) since: Instant,
    /// The largest size that the kernel believes until then.
    pub(super) before_bytes: u64,
    pub(super) effect: Effect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The kernel accepts this size.
    Size(u64),
    /// The file is disturbed, and the kernel takes `end` for the minimum of the size. Until then it has pages with
    /// zeros from `zeros_from` on, of which it drops those from `dropped_from` on.
    Write {
        end: u64,
        zeros_from: u64,
        dropped_from: u64,
    },
    /// The kernel accepts this size, unless the file is disturbed.
    ShortRead(u64),
}

impl Effect {
    /// Whether a read that ends at `end` must not be answered while this is in flight.
    pub(super) fn undoes(self, end: u64) -> bool {
        match self {
            Self::Size(size_bytes) => size_bytes > end,
            // Each of them disturbs the other.
            Self::ShortRead(_) | Self::Write { .. } => true,
        }
    }

    /// The maximum time that it is in flight.
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
