//! Prefetch for a sequential reader. Data is kept by block and offset: blocks never change, so it
//! stays correct when the file changes.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::types::{Extent, FileBlock};

use super::sections::in_memory;
use crate::engine::cache::extents::ExtentMap;

/// Size of one fetch; a multiple of the chunk size.
pub(crate) const UNIT_BYTES: u64 = 1 << 20;
/// How far requests of a sequential reader may overtake each other: the kernel sends several of
/// them concurrently.
const DISORDER_BYTES: u64 = 2 << 20;
/// Sequential reads before anything is prefetched: many programs read only the head of a file.
const STREAK_MIN: u32 = 2;
/// Number of following blocks that are located along with one.
const LOCATE_AHEAD: usize = 64;

/// The read-ahead of one open file. `D` is a handle to the data of a unit, which may still be in flight.
pub(crate) struct Ahead<D> {
    /// End of what has been read so far.
    high: u64,
    streak: u32,
    window: u64,
    units: VecDeque<Unit<D>>,
}

/// A range of a block that is being fetched, or has been.
struct Unit<D> {
    block: BlockId,
    range: Range<u64>,
    /// Where in the file it ends.
    file_end: u64,
    data: D,
}

/// A range of a block that is to be fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fetch {
    pub(crate) at: FileBlock,
    pub(crate) range: Range<u64>,
}

impl Fetch {
    pub(crate) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Where in the file it ends.
    pub(crate) fn file_end(&self) -> u64 {
        self.at.file_offset + self.bytes()
    }
}

/// The content of a file as its reader knows it.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    pub(crate) extents: &'a ExtentMap,
    pub(crate) size_bytes: u64,
}

impl<D> Default for Ahead<D> {
    fn default() -> Self {
        Self {
            high: 0,
            streak: 0,
            window: 0,
            units: VecDeque::new(),
        }
    }
}

impl<D> Ahead<D> {
    /// Notes that a range is read. Returns what is to be fetched if it continues a sequence, at
    /// most `window_max` bytes ahead; [`Ahead::started`] must follow for each fetch that is made.
    pub(crate) fn note(
        &mut self,
        range: &Range<u64>,
        file: Known<'_>,
        window_max: u64,
    ) -> Vec<Fetch> {
        let mut fetches = Vec::new();
        let near = range.start <= self.high.saturating_add(DISORDER_BYTES)
            && range.end.saturating_add(DISORDER_BYTES) >= self.high;
        if range.start == self.high || near && self.streak >= STREAK_MIN {
            self.streak += 1;
            self.high = self.high.max(range.end);
        } else {
            self.streak = 0;
            self.window = 0;
            self.high = range.end;
            self.units.clear();
        }
        let large = range.end - range.start >= UNIT_BYTES;
        if self.streak < STREAK_MIN && !large {
            return fetches;
        }
        self.window = (self.window * 2).clamp(UNIT_BYTES, window_max.max(UNIT_BYTES));
        let keep_from = self.high.saturating_sub(DISORDER_BYTES);
        self.units.retain(|unit| unit.file_end > keep_from);
        let ahead = range.start..(self.high + self.window).min(file.size_bytes);
        let mut allowed = self.high - range.start + self.window;
        for extent in file.extents.from(ahead.start) {
            if extent.file_offset >= ahead.end {
                break;
            }
            self.want(extent, &ahead, &mut allowed, &mut fetches);
        }
        fetches
    }

    /// Adds the fetches for the part of an extent that is in a range of the file and has not been fetched yet.
    fn want(
        &self,
        extent: &Extent,
        wanted: &Range<u64>,
        allowed: &mut u64,
        fetches: &mut Vec<Fetch>,
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
            let is_wanted =
                |fetch: &Fetch| fetch.at.block == extent.block && fetch.range.contains(&at);
            if self.unit(extent.block, at).is_none() && !fetches.iter().any(is_wanted) {
                let block = extent.block;
                fetches.push(Fetch {
                    at: FileBlock { block, file_offset },
                    range: at..end,
                });
            }
            at = end;
        }
    }

    /// Notes that a range is being fetched.
    pub(crate) fn started(&mut self, fetch: Fetch, data: D) {
        let (block, start) = (fetch.at.block, fetch.range.start);
        assert!(
            self.unit(block, start).is_none(),
            "{fetch:?} is fetched twice"
        );
        self.units.push_back(Unit {
            block: fetch.at.block,
            file_end: fetch.file_end(),
            range: fetch.range,
            data,
        });
    }

    fn unit(&self, block: BlockId, offset: u64) -> Option<&Unit<D>> {
        let covers = |unit: &&Unit<D>| unit.block == block && unit.range.contains(&offset);
        self.units.iter().find(covers)
    }
}

impl<D: Clone> Ahead<D> {
    /// Returns the handle to the data at an offset of a block, and the range of the block that it covers.
    pub(crate) fn covering(&self, block: BlockId, offset: u64) -> Option<(D, Range<u64>)> {
        let unit = self.unit(block, offset)?;
        Some((unit.data.clone(), unit.range.clone()))
    }
}

/// Returns the part of fetched data that starts at the start of a wanted range.
pub(crate) fn cut(data: &Bytes, fetched: &Range<u64>, wanted: &Range<u64>) -> Bytes {
    assert!(
        fetched.contains(&wanted.start) && data.len() as u64 == fetched.end - fetched.start,
        "{wanted:?} is wanted of {} bytes that were fetched at {fetched:?}",
        data.len()
    );
    let from = wanted.start - fetched.start;
    let to = wanted.end.min(fetched.end) - fetched.start;
    data.slice(in_memory(from)..in_memory(to))
}

/// Returns the next blocks of a file, to be located along with one.
pub(crate) fn blocks_after(extents: &ExtentMap, offset: u64) -> Vec<FileBlock> {
    let mut blocks: Vec<FileBlock> = Vec::new();
    // Bounds the search in a file of many extents in few blocks.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file whose extents have these lengths and holes before them, in blocks of their own.
    fn extents(lengths: &[(u64, u64)]) -> (ExtentMap, u64) {
        let mut map = ExtentMap::default();
        let mut end = 0;
        for (index, (hole, length_bytes)) in lengths.iter().enumerate() {
            let file_offset = end + hole;
            end = file_offset + length_bytes;
            map.apply(&[Extent {
                file_offset,
                length_bytes: *length_bytes,
                block: BlockId(index as u64),
                block_offset: 4096 * index as u64,
            }]);
        }
        (map, end)
    }

    #[test]
    fn a_reader_that_jumps_is_not_read_ahead_for() {
        let (extents, size_bytes) = extents(&[(0, 64 * MIB)]);
        let file = Known {
            extents: &extents,
            size_bytes,
        };
        let mut ahead: Ahead<()> = Ahead::default();
        for offset in [50, 10, 30, 20, 40].map(|at| at * MIB) {
            assert_eq!(ahead.note(&(offset..offset + 4096), file, 8 * MIB), []);
        }
    }

    #[test]
    fn what_is_fetched_is_found_by_block_and_offset() {
        let mut ahead = Ahead::default();
        let at = FileBlock {
            block: BlockId(1),
            file_offset: 0,
        };
        let range = 10..20;
        ahead.started(Fetch { at, range }, 7);
        assert_eq!(ahead.covering(BlockId(1), 19), Some((7, 10..20)));
        assert_eq!(ahead.covering(BlockId(1), 20), None);
        assert_eq!(ahead.covering(BlockId(2), 10), None);
        let data = Bytes::from_static(b"0123456789");
        assert_eq!(cut(&data, &(10..20), &(12..15)), "234");
        assert_eq!(cut(&data, &(10..20), &(18..99)), "89");
    }

    proptest! {
        /// A sequential reader, whose requests may overtake each other, finds everything but the
        /// start fetched; nothing is fetched twice, or further ahead than it may be.
        #[test]
        fn a_sequential_reader_is_read_ahead_for(
            lengths in prop::collection::vec((0..MIB, 1..6 * MIB), 1..12),
            // These are the sizes that the kernel requests.
            request_bytes in 4_096..=MIB,
            window_max in MIB..8 * MIB,
            swaps in prop::collection::vec(any::<bool>(), 1..10),
        ) {
            let (extents, size_bytes) = extents(&lengths);
            let file = Known { extents: &extents, size_bytes };
            let mut requests: Vec<Range<u64>> = (0..size_bytes.div_ceil(request_bytes))
                .map(|index| index * request_bytes..((index + 1) * request_bytes).min(size_bytes))
                .collect();
            // The first requests establish the sequence.
            for (pair, swap) in requests[4.min(size_bytes.div_ceil(request_bytes) as usize)..]
                .chunks_exact_mut(2)
                .zip(swaps.iter().cycle())
            {
                if *swap {
                    pair.swap(0, 1);
                }
            }
            let mut ahead: Ahead<()> = Ahead::default();
            let mut fetched: Vec<Fetch> = Vec::new();
            let mut high = 0;
            for (index, request) in requests.iter().enumerate() {
                high = high.max(request.end);
                for fetch in ahead.note(request, file, window_max) {
                    prop_assert!(fetch.bytes() <= UNIT_BYTES && fetch.bytes() > 0);
                    prop_assert!(fetch.at.file_offset < high + window_max);
                    let of_extent = extents.from(fetch.at.file_offset).next().unwrap();
                    prop_assert_eq!(of_extent.block, fetch.at.block);
                    let twice = fetched.iter().any(|it| {
                        it.at.block == fetch.at.block && it.range.start < fetch.range.end
                            && fetch.range.start < it.range.end
                    });
                    prop_assert!(!twice, "{fetch:?} twice");
                    fetched.push(fetch.clone());
                    ahead.started(fetch, ());
                }
                if index > STREAK_MIN as usize + 1 {
                    for extent in extents.overlapping(request) {
                        for at in [extent.block_offset, extent.block_end() - 1] {
                            let found = ahead.covering(extent.block, at);
                            prop_assert!(found.is_some(), "{at} of {:?}", extent.block);
                        }
                    }
                }
            }
        }
    }
}
