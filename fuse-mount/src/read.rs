//! A read by the kernel, and whether it may be answered; see [`crate::pages`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fuser::{Errno, ReplyData, Request};
use harvestfs_protocol::ids::InodeId;

use crate::inner::{Inner, OpenFile};
use crate::metrics::Operation;
use crate::pages::{Pages, ShortRead};
use crate::serve::Adapter;

/// How often is looked whether the kernel was disturbed.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Looks, before the read is refused anyway.
const LOOKS_MAX: u32 = 100;

/// What the kernel asks for.
pub struct Read {
    /// The file.
    pub ino: InodeId,
    /// Where it begins.
    pub offset: u64,
    /// How many bytes.
    pub size: u32,
    /// Past the kernel's pages.
    pub direct: bool,
}

impl Adapter {
    /// Answers a read of an open file.
    pub fn serve_read(&self, request: &Request, open: Arc<OpenFile>, read: Read, reply: ReplyData) {
        let observed = self.begin(Operation::Read);
        let asked = Asked::now(&self.inner, &open, &read);
        let (offset, bytes) = (read.offset, read.size as usize);
        if let Some(pieces) = open.file.try_read_pieces(offset, bytes)
            && asked.verdict(&pieces) == ShortRead::Answer
        {
            return self.inner.answer_read(reply, Ok(pieces));
        }
        let (inner, caller) = (self.inner.clone(), self.caller(request));
        self.go_on(observed, async move {
            let pieces = open.file.read_pieces(offset, bytes);
            match caller.unless_killed(pieces).await {
                Ok(pieces) if asked.must_be_refused(&pieces).await => reply.error(Errno::EINTR),
                result => inner.answer_read(reply, result),
            }
        });
    }
}

/// A read, and what the kernel had of the file when it asked.
struct Asked {
    /// None: it does not go into pages.
    pages: Option<Arc<Pages>>,
    offset: u64,
    end: u64,
    believed_bytes: u64,
    at: Instant,
}

impl Asked {
    fn now(inner: &Inner, open: &OpenFile, read: &Read) -> Self {
        let pages = (!open.append && !read.direct)
            .then(|| inner.shared.nodes.pages(read.ino))
            .flatten();
        Self {
            offset: read.offset,
            end: read.offset.saturating_add(read.size.into()),
            believed_bytes: pages.as_ref().map_or(0, |pages| pages.size_bytes()),
            at: Instant::now(),
            pages,
        }
    }

    /// Whether it may be answered with this.
    fn verdict(&self, pieces: &[Bytes]) -> ShortRead {
        let bytes: usize = pieces.iter().map(Bytes::len).sum();
        let end = self.offset + bytes as u64;
        match &self.pages {
            Some(pages) if end < self.end => {
                pages.short_read(end, self.believed_bytes, self.at, Instant::now())
            }
            _ => ShortRead::Answer,
        }
    }

    /// Whether it must not be answered with this, once the kernel has been disturbed.
    async fn must_be_refused(&self, pieces: &[Bytes]) -> bool {
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
