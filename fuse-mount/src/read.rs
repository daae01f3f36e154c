//! A read by the kernel, and whether it may be answered; see [`crate::pages`].

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fuser::Errno;
use harvestfs_client::ClientError;
use harvestfs_protocol::ids::InodeId;

use crate::inner::{Inner, OpenFile};
use crate::metrics::Operation;
use crate::now;
use crate::pages::{DROPPING_MAX, IN_FLIGHT_MAX, PageRead, Pages, ShortRead};
use crate::reply::Reply;
use crate::serve::{Adapter, Header};

/// Time between checks whether an answer is still in flight to the kernel.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Number of checks before the read is refused: by then, nothing that was in flight when it arrived still is.
const LOOKS_MAX: u32 = (DROPPING_MAX.as_millis() + IN_FLIGHT_MAX.as_millis()) as u32;

/// A read request of the kernel.
pub struct Read {
    /// The file.
    pub ino: InodeId,
    /// Where it begins.
    pub offset: u64,
    /// How many bytes.
    pub size: u32,
    /// Whether the data goes into the kernel's pages, and not directly to a program.
    pub paged: bool,
}

impl Adapter {
    /// Answers a read of an open file.
    pub(crate) fn serve_read(
        &self,
        header: Header,
        open: Arc<OpenFile>,
        read: Read,
        reply: impl Reply<Vec<Bytes>>,
    ) {
        let observed = self.begin(Operation::Read);
        let (offset, bytes) = (read.offset, read.size as usize);
        let asked = Asked::now(&self.inner, read, header.pid);
        if let Some(pieces) = open.file.try_read_pieces(offset, bytes)
            && let Some(may) = asked.may_be_answered(&self.inner, &pieces)
        {
            if may {
                asked.answer(&self.inner, reply, Ok(pieces));
            } else {
                reply.answer(Err(Errno::EINTR));
            }
            return;
        }
        let (inner, caller) = (self.inner.clone(), self.caller(header));
        self.go_on(observed, async move {
            let pieces = open.file.read_pieces(offset, bytes);
            match caller.unless_killed(pieces).await {
                Ok(pieces) if !asked.may_be_answered_soon(&inner, &pieces).await => {
                    reply.answer(Err(Errno::EINTR));
                }
                result => asked.answer(&inner, reply, result),
            }
        });
    }
}

/// A read, and the kernel's view of the file when it was requested.
struct Asked {
    read: Read,
    /// `None` if the data does not go into pages.
    pages: Option<(Arc<Pages>, PageRead)>,
}

impl Asked {
    fn now(inner: &Inner, read: Read, thread: u32) -> Self {
        let pages = read.paged.then(|| inner.shared.nodes.pages(read.ino));
        let pages = pages.flatten().map(|pages| {
            let range = read.offset..read.offset.saturating_add(read.size.into());
            let page_read = pages.read(range, thread);
            (pages, page_read)
        });
        Self { read, pages }
    }

    /// Answers the read. While the file may change without any caller waiting for that change, other mounts may see it
    /// before this one learns of it, and pages would keep the previous content: the data must serve this read only.
    fn answer(
        &self,
        inner: &Inner,
        reply: impl Reply<Vec<Bytes>>,
        result: Result<Vec<Bytes>, ClientError>,
    ) {
        inner.answer_read(reply, result);
        let ino = self.read.ino;
        if self.pages.is_some() && !inner.client.may_cache_content(ino) {
            inner.shared.forget_pages(ino);
        }
    }

    /// Whether the read may be answered with this data (`true`) or must be refused (`false`); `None` if that is not
    /// known yet.
    fn may_be_answered(&self, inner: &Inner, pieces: &[Bytes]) -> Option<bool> {
        let bytes: usize = pieces.iter().map(Bytes::len).sum();
        let end = self.read.offset + bytes as u64;
        let Some((pages, read)) = &self.pages else {
            return Some(true);
        };
        if end >= read.range.end {
            return Some(true);
        }
        match pages.short_read(read, end, now()) {
            ShortRead::Answer => Some(true),
            ShortRead::Refuse => Some(false),
            ShortRead::FenceAndRefuse => {
                inner.shared.fence(self.read.ino);
                pages.refused(read, end, now());
                Some(false)
            }
            ShortRead::Wait => None,
        }
    }

    /// As [`Asked::may_be_answered`], but waits until it is known.
    async fn may_be_answered_soon(&self, inner: &Inner, pieces: &[Bytes]) -> bool {
        for _ in 0..LOOKS_MAX {
            if let Some(may) = self.may_be_answered(inner, pieces) {
                return may;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        false
    }
}
