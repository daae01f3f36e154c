//! Data that this client committed recently, for reading it back: `git status` reads what was checked
//! out within the clock tick, compilers what was just unpacked. The kernel keeps no page that was only
//! partly written, such as the last page of most files. Kept by block and offset, like prefetched data.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use bytes::Bytes;
use harvestfs_protocol::ids::BlockId;
use parking_lot::Mutex;

use crate::engine::read::sections::in_memory;
use crate::engine::write::writeback::Place;

/// Bytes that are kept of all files together.
const KEPT_BYTES_MAX: usize = 16 << 20;
/// Larger pieces are not kept: most of their pages stay in the kernel.
const PIECE_BYTES_MAX: usize = 64 << 10;
/// Memory that a piece occupies in addition to its data.
const PIECE_OVERHEAD_BYTES: usize = 256;

/// The recently committed pieces of all files.
#[derive(Default)]
pub(crate) struct Recent {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    pieces: BTreeMap<(BlockId, u64), Bytes>,
    /// The keys, oldest first.
    order: VecDeque<(BlockId, u64)>,
    bytes: usize,
}

impl Inner {
    fn remove_oldest(&mut self) {
        let oldest = self.order.pop_front();
        let Some(data) = oldest.and_then(|oldest| self.pieces.remove(&oldest)) else {
            panic!(
                "the oldest of {} pieces with {} bytes is {oldest:?}, which is not there",
                self.pieces.len(),
                self.bytes
            );
        };
        self.left(&data);
    }

    fn left(&mut self, data: &Bytes) {
        let size_bytes = data.len() + PIECE_OVERHEAD_BYTES;
        assert!(
            size_bytes <= self.bytes,
            "a piece of {size_bytes} bytes leaves, of {} in all",
            self.bytes
        );
        self.bytes -= size_bytes;
    }
}

impl Recent {
    /// Keeps a piece of a block that was committed exactly as it was written.
    pub(crate) fn keep(&self, place: Place, data: &Bytes) {
        if data.len() > PIECE_BYTES_MAX {
            return;
        }
        let key = (place.block, place.block_offset);
        // A copy: the piece may be a small part of a large buffer.
        let data = Bytes::copy_from_slice(data);
        let size_bytes = data.len() + PIECE_OVERHEAD_BYTES;
        let mut inner = self.inner.lock();
        inner.bytes += size_bytes;
        match inner.pieces.insert(key, data) {
            Some(before) => inner.left(&before),
            None => inner.order.push_back(key),
        }
        while inner.bytes > KEPT_BYTES_MAX {
            inner.remove_oldest();
        }
    }

    /// Returns the data at the start of a range of a block, if it is kept.
    pub(crate) fn ready(&self, block: BlockId, range: &Range<u64>) -> Option<Bytes> {
        let inner = self.inner.lock();
        let starts = (block, 0)..=(block, range.start);
        let (&(_, offset), data) = inner.pieces.range(starts).next_back()?;
        // The start lies within the piece or behind its end.
        let from = usize::try_from(range.start - offset).ok()?;
        let left = data.len().checked_sub(from).filter(|&left| left > 0)?;
        let wanted = in_memory(range.end - range.start);
        Some(data.slice(from..from + left.min(wanted)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(block: u64, block_offset: u64) -> Place {
        Place {
            block: BlockId(block),
            block_offset,
        }
    }

    #[test]
    fn a_range_is_found_in_the_piece_that_has_its_start() {
        let recent = Recent::default();
        recent.keep(place(1, 100), &Bytes::from_static(b"abcdef"));
        recent.keep(place(1, 106), &Bytes::from_static(b"ghi"));
        let ready = |block, range| recent.ready(BlockId(block), &range);
        assert_eq!(ready(1, 100..106).expect("kept"), "abcdef");
        assert_eq!(ready(1, 102..104).expect("kept"), "cd");
        assert_eq!(ready(1, 104..200).expect("its part"), "ef");
        assert_eq!(ready(1, 106..107).expect("kept"), "g");
        assert_eq!(ready(1, 99..101), None);
        assert_eq!(ready(1, 109..110), None);
        assert_eq!(ready(0, 100..106), None);
        assert_eq!(ready(2, 100..106), None);
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_oldest_goes() {
        let recent = Recent::default();
        let piece = Bytes::from(vec![7; PIECE_BYTES_MAX]);
        let pieces_max = KEPT_BYTES_MAX / (PIECE_BYTES_MAX + PIECE_OVERHEAD_BYTES);
        for block in 0..2 * pieces_max as u64 {
            recent.keep(place(block, 0), &piece);
            recent.keep(place(block, 0), &piece);
        }
        let inner = recent.inner.lock();
        assert_eq!(inner.pieces.len(), pieces_max);
        assert_eq!(inner.order.len(), pieces_max);
        assert!(inner.bytes <= KEPT_BYTES_MAX);
        assert!(!inner.pieces.contains_key(&(BlockId(0), 0)));
        drop(inner);
        let large = Bytes::from(vec![7; PIECE_BYTES_MAX + 1]);
        recent.keep(place(0, 0), &large);
        assert_eq!(recent.ready(BlockId(0), &(0..1)), None);
    }
}
