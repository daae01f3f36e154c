//! A read of the kernel, and whether it may be answered; see [`crate::pages`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fuser::OpenFlags;
use harvestfs_protocol::ids::InodeId;
use rustix::fs::OFlags;

use crate::inner::{Inner, OpenFile};
use crate::pages::{Pages, ShortRead};

/// How often is looked whether the kernel was disturbed.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Looks, before the read is refused anyway.
const LOOKS_MAX: u32 = 100;

/// A read that the kernel has asked for.
pub struct Read {
    /// None: it does not go into pages.
    pages: Option<Arc<Pages>>,
    end: u64,
    offset: u64,
    believed_bytes: u64,
    asked_at: Instant,
}

impl Read {
    /// It was just read from the kernel.
    pub fn new(
        inner: &Inner,
        open: &OpenFile,
        ino: InodeId,
        offset: u64,
        size: u32,
        flags: OpenFlags,
    ) -> Self {
        let direct = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::DIRECT);
        let pages = (!open.append && !direct)
            .then(|| inner.shared.nodes.pages(ino))
            .flatten();
        Self {
            end: offset.saturating_add(size.into()),
            offset,
            believed_bytes: pages.as_ref().map_or(0, |pages| pages.size_bytes()),
            asked_at: Instant::now(),
            pages,
        }
    }

    /// Whether it may be answered with this.
    pub fn verdict(&self, pieces: &[Bytes]) -> ShortRead {
        let bytes: usize = pieces.iter().map(Bytes::len).sum();
        let end = self.offset + bytes as u64;
        match &self.pages {
            Some(pages) if end < self.end => {
                pages.short_read(end, self.believed_bytes, self.asked_at, Instant::now())
            }
            _ => ShortRead::Answer,
        }
    }

    /// Whether it must not be answered with this, once the kernel has been disturbed.
    pub async fn must_be_refused(&self, pieces: &[Bytes]) -> bool {
        for _ in 0..LOOKS_MAX {
            match self.verdict(pieces) {
                ShortRead::Answer => return false,
                ShortRead::Refuse => return true,
                ShortRead::RefuseLater => tokio::time::sleep(LOOK_INTERVAL).await,
            }
        }
        true
    }
}
