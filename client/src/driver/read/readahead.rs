//! Prefetch for a sequential reader. Data is kept by block and offset: blocks never change, so it
//! stays right when the file changes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::{Credentials, Extent, FileBlock};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::driver::core::Core;
use crate::driver::read::reader::read_block;
use crate::engine::cache::extents::ExtentMap;
use crate::engine::read::sections::in_memory;
use crate::error::ClientError;

/// What is fetched at once; a multiple of the chunk size.
pub(crate) const UNIT_BYTES: u64 = 1 << 20;
/// Requests of a sequential reader may overtake each other by this much: the kernel sends several
/// at once.
const DISORDER_BYTES: u64 = 2 << 20;
/// Sequential reads before anything is prefetched: many programs look at the head of a file only.
const STREAK_MIN: u32 = 2;
/// Blocks that are located along with one.
const LOCATE_AHEAD: usize = 64;

/// The read-ahead of one open file.
#[derive(Default)]
pub(crate) struct ReadAhead {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// End of what was read so far.
    high: u64,
    streak: u32,
    window: u64,
    units: VecDeque<Arc<Unit>>,
}

/// A range of a block that is being fetched, or was.
pub(crate) struct Unit {
    block: BlockId,
    range: Range<u64>,
    /// Where in the file it ends.
    file_end: u64,
    data: watch::Receiver<Option<Result<Bytes, ClientError>>>,
    _reserved: Reserved,
}

/// A share of what may be read ahead by all files.
struct Reserved {
    core: Arc<Core>,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.core
            .read_ahead_bytes
            .fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Unit {
    /// The part of a range of a block, if this has its start.
    fn covers(&self, block: BlockId, offset: u64) -> bool {
        self.block == block && self.range.contains(&offset)
    }

    /// Bytes of this from an offset of the block on.
    fn slice(&self, data: &Bytes, range: &Range<u64>) -> Bytes {
        let from = range.start - self.range.start;
        let to = range.end.min(self.range.end) - self.range.start;
        data.slice(in_memory(from)..in_memory(to))
    }

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
    pub(crate) core: &'a Arc<Core>,
    pub(crate) ino: InodeId,
    pub(crate) credentials: &'a Credentials,
    pub(crate) extents: &'a Arc<ExtentMap>,
    pub(crate) size_bytes: u64,
}

impl ReadAhead {
    /// Notes a read and starts to prefetch if it continues a sequence.
    pub(crate) fn note(&self, reader: &Reader<'_>, range: &Range<u64>) {
        let mut inner = self.inner.lock();
        let near = range.start <= inner.high.saturating_add(DISORDER_BYTES)
            && range.end.saturating_add(DISORDER_BYTES) >= inner.high;
        if range.start == inner.high || near && inner.streak >= STREAK_MIN {
            inner.streak += 1;
            inner.high = inner.high.max(range.end);
        } else {
            inner.streak = 0;
            inner.window = 0;
            inner.high = range.end;
            inner.units.clear();
        }
        let large = range.end - range.start >= UNIT_BYTES;
        if inner.streak < STREAK_MIN && !large {
            return;
        }
        let options = &reader.core.session.options;
        inner.window =
            (inner.window * 2).clamp(UNIT_BYTES, options.read_ahead_bytes.max(UNIT_BYTES));
        let keep_from = inner.high.saturating_sub(DISORDER_BYTES);
        inner.units.retain(|unit| unit.file_end > keep_from);
        let ahead = range.start..(inner.high + inner.window).min(reader.size_bytes);
        let mut allowed = inner.high.saturating_sub(range.start) + inner.window;
        for extent in reader.extents.from(ahead.start) {
            if extent.file_offset >= ahead.end {
                break;
            }
            inner.fetch(reader, extent, &ahead, &mut allowed);
        }
    }

    /// The data at the start of a range of a block, if it was fetched, or written lately.
    pub(crate) fn ready(&self, core: &Core, block: BlockId, range: &Range<u64>) -> Option<Bytes> {
        if let Some(data) = core.recent.ready(block, range) {
            return Some(data);
        }
        let unit = self.unit(block, range.start)?;
        Some(unit.slice(&unit.ready()?, range))
    }

    /// As [`ReadAhead::ready`], waiting for what is in flight.
    pub(crate) async fn arrived(
        &self,
        core: &Core,
        block: BlockId,
        range: &Range<u64>,
    ) -> Option<Bytes> {
        if let Some(data) = core.recent.ready(block, range) {
            return Some(data);
        }
        let unit = self.unit(block, range.start)?;
        let data = unit.wait().await?;
        Some(unit.slice(&data, range))
    }

    fn unit(&self, block: BlockId, offset: u64) -> Option<Arc<Unit>> {
        let inner = self.inner.lock();
        let mut units = inner.units.iter();
        units.find(|unit| unit.covers(block, offset)).cloned()
    }
}

impl Inner {
    /// Starts fetching the part of an extent that is in a range of the file and not here yet.
    fn fetch(
        &mut self,
        reader: &Reader<'_>,
        extent: &Extent,
        wanted: &Range<u64>,
        allowed: &mut u64,
    ) {
        let mut at = extent.block_offset + wanted.start.saturating_sub(extent.file_offset);
        // Units start at multiples of their size, as packets do.
        at = (at / UNIT_BYTES * UNIT_BYTES).max(extent.block_offset);
        while at < extent.block_end() && *allowed > 0 {
            let unit_end = (at / UNIT_BYTES + 1) * UNIT_BYTES;
            let end = unit_end.min(extent.block_end());
            let file_offset = extent.file_offset + (at - extent.block_offset);
            if file_offset >= wanted.end {
                return;
            }
            *allowed = allowed.saturating_sub(end - at);
            if !self.units.iter().any(|unit| unit.covers(extent.block, at)) {
                let place = FileBlock {
                    block: extent.block,
                    file_offset,
                };
                let Some(unit) = start(reader, place, at..end) else {
                    return;
                };
                self.units.push_back(unit);
            }
            at = end;
        }
    }
}

/// Starts fetching a unit, if all files together have not prefetched too much.
fn start(reader: &Reader<'_>, at: FileBlock, range: Range<u64>) -> Option<Arc<Unit>> {
    let core = reader.core.clone();
    let bytes = range.end - range.start;
    let file_end = at.file_offset + bytes;
    let used = core.read_ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
    let reserved = Reserved {
        core: core.clone(),
        bytes,
    };
    if used + bytes > core.session.options.read_ahead_total_bytes {
        return None;
    }
    let (sender, data) = watch::channel(None);
    let credentials = reader.credentials.clone();
    let extents = reader.extents.clone();
    let (ino, wanted) = (reader.ino, range.clone());
    let ahead = async move {
        let others = || blocks_after(&extents, file_end);
        let fetch = read_block(&core, &credentials, (ino, at), wanted, others);
        tokio::select! {
            biased;
            result = fetch => {
                sender.send_replace(Some(result));
            }
            // No reader wants it any more.
            () = sender.closed() => {}
        }
    };
    let runtime = &reader.core.session.runtime;
    runtime.spawn(RequestId::current().scope(ahead));
    Some(Arc::new(Unit {
        block: at.block,
        range,
        file_end,
        data,
        _reserved: reserved,
    }))
}

/// The next blocks of a file, to be located along with one.
pub(crate) fn blocks_after(extents: &ExtentMap, offset: u64) -> Vec<FileBlock> {
    let mut blocks: Vec<FileBlock> = Vec::new();
    // A file of many extents in few blocks must not make this long.
    for extent in extents.from(offset).take(4 * LOCATE_AHEAD) {
        if blocks.len() == LOCATE_AHEAD {
            break;
        }
        if blocks.iter().all(|known| known.block != extent.block) {
            blocks.push(extent.start());
        }
    }
    blocks
}
