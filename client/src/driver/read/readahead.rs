//! Prefetches what a sequential reader will request.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::Credentials;
use harvestfs_protocol::watch;
use parking_lot::Mutex;

use super::reader::{Reads, read_block};
use crate::engine::cache::extents::ExtentMap;
use crate::engine::read::ahead::{Ahead, Fetch, Known, blocks_after, cut};
use crate::error::ClientError;

/// The read-ahead of one open file.
#[derive(Default)]
pub(crate) struct ReadAhead {
    ahead: Mutex<Ahead<Arc<Unit>>>,
}

/// The data of a range of a block, once it has arrived.
struct Unit {
    data: watch::Receiver<Option<Result<Bytes, ClientError>>>,
    _reserved: Reserved,
}

/// A share of the bytes that all files together may read ahead.
struct Reserved {
    reads: Arc<Reads>,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let ahead_bytes = &self.reads.ahead_bytes;
        ahead_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Unit {
    fn ready(&self) -> Option<Bytes> {
        match &*self.data.borrow() {
            Some(Ok(data)) => Some(data.clone()),
            _ => None,
        }
    }

    async fn wait(&self) -> Option<Bytes> {
        let mut data = self.data.clone();
        let arrived = data.wait_for(Option::is_some).await.ok()?;
        arrived.clone()?.ok()
    }
}

/// A reader of one file.
pub(crate) struct Reader<'a> {
    pub(crate) reads: &'a Arc<Reads>,
    pub(crate) ino: InodeId,
    pub(crate) credentials: &'a Credentials,
    pub(crate) extents: &'a Arc<ExtentMap>,
    pub(crate) size_bytes: u64,
}

impl ReadAhead {
    /// Notes a read and starts to prefetch if it continues a sequence.
    pub(crate) fn note(&self, reader: &Reader<'_>, range: &Range<u64>) {
        let file = Known {
            extents: reader.extents,
            size_bytes: reader.size_bytes,
        };
        let window_max = reader.reads.cluster.session.options.read_ahead_bytes;
        let mut ahead = self.ahead.lock();
        for fetch in ahead.note(range, file, window_max) {
            let Some(unit) = start(reader, &fetch) else {
                return;
            };
            ahead.started(fetch, unit);
        }
    }

    /// Returns the data at the start of a range of a block, if it was prefetched or recently committed.
    pub(crate) fn ready(&self, reads: &Reads, block: BlockId, range: &Range<u64>) -> Option<Bytes> {
        if let Some(data) = reads.recent.ready(block, range) {
            return Some(data);
        }
        let (unit, fetched) = self.ahead.lock().covering(block, range.start)?;
        Some(cut(&unit.ready()?, &fetched, range))
    }

    /// As [`ReadAhead::ready`], but waits for a fetch in flight.
    pub(crate) async fn arrived(
        &self,
        reads: &Reads,
        block: BlockId,
        range: &Range<u64>,
    ) -> Option<Bytes> {
        if let Some(data) = reads.recent.ready(block, range) {
            return Some(data);
        }
        let (unit, fetched) = self.ahead.lock().covering(block, range.start)?;
        Some(cut(&unit.wait().await?, &fetched, range))
    }
}

/// Starts fetching a unit, unless all files together have prefetched too much.
fn start(reader: &Reader<'_>, fetch: &Fetch) -> Option<Arc<Unit>> {
    let reads = reader.reads.clone();
    let session = &reader.reads.cluster.session;
    let (bytes, file_end) = (fetch.bytes(), fetch.file_end());
    let used = reads.ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
    let reserved = Reserved {
        reads: reads.clone(),
        bytes,
    };
    if used + bytes > session.options.read_ahead_total_bytes {
        return None;
    }
    let (sender, data) = watch::channel(None);
    let credentials = reader.credentials.clone();
    let extents = reader.extents.clone();
    let (ino, at, range) = (reader.ino, fetch.at, fetch.range.clone());
    let ahead = async move {
        let others = || blocks_after(&extents, file_end);
        let fetch = read_block(&reads, &credentials, (ino, at), range, others);
        tokio::select! {
            biased;
            result = fetch => {
                sender.send_replace(Some(result));
            }
            // No reader wants the data any more.
            () = sender.closed() => {}
        }
    };
    session.runtime.spawn(RequestId::current().scope(ahead));
    Some(Arc::new(Unit {
        data,
        _reserved: reserved,
    }))
}
