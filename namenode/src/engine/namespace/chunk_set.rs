//! Which chunks of a block were committed.

use harvestfs_protocol::limits::{BLOCK_BYTES_MAX, CHUNK_BYTES};
use serde::{Deserialize, Serialize};

const CHUNK: u32 = CHUNK_BYTES as u32;

/// A set of chunks of one block, as ranges of chunk numbers: ascending, with a gap between any two.
/// Writers mostly commit in order, so there is usually one range.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ChunkSet(Vec<(u32, u32)>);

impl ChunkSet {
    /// Adds the chunks that these bytes of the block touch. The last chunk of a packet is padded, so
    /// that a chunk always counts as a whole.
    pub fn add_bytes(&mut self, from: u32, to: u32) {
        if from >= to {
            return;
        }
        assert!(
            u64::from(to) <= BLOCK_BYTES_MAX,
            "no block has {to} bytes, of which {from} and on are committed"
        );
        let (start, end) = (from / CHUNK, to.div_ceil(CHUNK));
        // Ranges that overlap or touch the new one are merged with it.
        let first = self.0.partition_point(|range| range.1 < start);
        let behind = self.0.partition_point(|range| range.0 <= end);
        let joined = self.0[first..behind]
            .iter()
            .fold((start, end), |sum, range| {
                (sum.0.min(range.0), sum.1.max(range.1))
            });
        self.0.splice(first..behind, [joined]);
        let before = first.checked_sub(1).map(|before| self.0[before]);
        let behind = self.0.get(first + 1);
        assert!(
            before.is_none_or(|it| it.1 < joined.0) && behind.is_none_or(|it| joined.1 < it.0),
            "{before:?}, {joined:?} and {behind:?} are no ranges with gaps between them"
        );
    }

    /// Whether it has every chunk of the first bytes of the block.
    pub fn has_all_below(&self, length_bytes: u32) -> bool {
        let chunks = length_bytes.div_ceil(CHUNK);
        let first = self.0.first();
        chunks == 0 || first.is_some_and(|range| range.0 == 0 && range.1 >= chunks)
    }

    /// Bytes up to the end of its last chunk.
    pub fn end_bytes(&self) -> u64 {
        let last = self.0.last().map_or(0, |range| range.1);
        u64::from(last) * u64::from(CHUNK)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes all chunks and frees the memory.
    pub fn clear(&mut self) {
        self.0 = Vec::new();
    }

    /// Whether it has the form in which [`Self::add_bytes`] leaves it; a decoded set may not have it.
    pub fn is_sound(&self) -> bool {
        let ascending = self.0.windows(2).all(|pair| pair[0].1 < pair[1].0);
        let filled = self.0.iter().all(|range| range.0 < range.1);
        ascending && filled && self.end_bytes() <= BLOCK_BYTES_MAX
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_chunks(
            pieces in proptest::collection::vec((0..60u32, 0..8u32, 0..CHUNK), 0..40),
        ) {
            let mut set = ChunkSet::default();
            let mut model = BTreeSet::new();
            for (chunk, chunks, rest) in pieces {
                let from = chunk * CHUNK + rest;
                let to = from + chunks * CHUNK / 2;
                set.add_bytes(from, to);
                model.extend((from..to).step_by(64).map(|byte| byte / CHUNK));
                model.extend((to > from).then(|| (to - 1) / CHUNK));
                prop_assert!(set.is_sound());
                for chunks in 0..70 {
                    let all = (0..chunks).all(|chunk| model.contains(&chunk));
                    prop_assert_eq!(set.has_all_below(chunks * CHUNK), all);
                }
                let end = model.last().map_or(0, |last| last + 1);
                prop_assert_eq!(set.end_bytes(), u64::from(end * CHUNK));
            }
        }
    }

    #[test]
    fn unsound_sets_are_found() {
        for bad in [
            vec![(1, 1)],
            vec![(2, 1)],
            vec![(0, 1), (1, 2)],
            vec![(3, 4), (0, 1)],
            vec![(0, u32::MAX)],
        ] {
            assert!(!ChunkSet(bad).is_sound());
        }
    }
}
