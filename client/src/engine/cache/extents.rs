//! The extents of one file. Pure.

use std::collections::BTreeMap;
use std::ops::Range;

use harvestfs_protocol::limits::{BLOCK_BYTES_MAX, FILE_BYTES_MAX};
use harvestfs_protocol::types::Extent;

/// Disjoint extents by file offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExtentMap {
    extents: BTreeMap<u64, Extent>,
}

impl ExtentMap {
    pub(crate) fn len(&self) -> usize {
        self.extents.len()
    }

    /// Applies [sound](is_sound) extents, in order, on top of the existing ones.
    pub(crate) fn apply(&mut self, extents: &[Extent]) {
        for extent in extents {
            self.clear(extent.file_offset..extent.file_end());
            self.insert(*extent);
        }
    }

    fn insert(&mut self, extent: Extent) {
        let hidden = self.extents.insert(extent.file_offset, extent);
        assert!(hidden.is_none(), "{extent:?} is put over {hidden:?}");
    }

    /// Punches a hole.
    pub(crate) fn clear(&mut self, range: Range<u64>) {
        for start in self.starts(&range) {
            let extent = self.extents.remove(&start);
            let extent = extent.expect("an extent starts there");
            if extent.file_offset < range.start {
                let head = cut(&extent, &(extent.file_offset..range.start));
                self.insert(head);
            }
            if extent.file_end() > range.end {
                let rest = cut(&extent, &(range.end..extent.file_end()));
                self.insert(rest);
            }
        }
    }

    /// Returns the extents in a range, in order, cut to the range. Gaps between them are holes.
    pub(crate) fn overlapping(&self, range: &Range<u64>) -> Vec<Extent> {
        self.starts(range)
            .into_iter()
            .map(|start| cut(&self.extents[&start], range))
            .collect()
    }

    /// Returns all extents that start at or after an offset, or reach beyond it.
    pub(crate) fn from(&self, offset: u64) -> impl Iterator<Item = &Extent> {
        let before = self.extents.range(..offset).next_back();
        let before = before.filter(move |(_, extent)| extent.file_end() > offset);
        let rest = self.extents.range(offset..);
        before.into_iter().chain(rest).map(|(_, extent)| extent)
    }

    fn starts(&self, range: &Range<u64>) -> Vec<u64> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.extents.range(..range.start).next_back();
        let before = before.filter(|(_, extent)| extent.file_end() > range.start);
        let within = self.extents.range(range.clone());
        before
            .into_iter()
            .chain(within)
            .map(|(&start, _)| start)
            .collect()
    }
}

/// Whether an extent that the namenode sent is plausible.
pub(crate) fn is_sound(extent: &Extent) -> bool {
    let ends = |start: u64, max| {
        let end = start.checked_add(extent.length_bytes);
        end.is_some_and(|end| end <= max)
    };
    extent.length_bytes > 0
        && ends(extent.file_offset, FILE_BYTES_MAX)
        && ends(extent.block_offset, BLOCK_BYTES_MAX)
}

fn cut(extent: &Extent, range: &Range<u64>) -> Extent {
    let from = extent.file_offset.max(range.start);
    let to = extent.file_end().min(range.end);
    assert!(from < to, "nothing of {extent:?} is in {range:?}");
    Extent {
        file_offset: from,
        length_bytes: to - from,
        block: extent.block,
        block_offset: extent.block_offset + (from - extent.file_offset),
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::BlockId;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn is_an_array_of_places(
            ops in prop::collection::vec((0u64..200, 1u64..50, any::<bool>()), 1..40),
        ) {
            let mut map = ExtentMap::default();
            let mut model = vec![None; 300];
            for (step, (offset, len, hole)) in ops.into_iter().enumerate() {
                let block = BlockId(step as u64);
                if hole {
                    map.clear(offset..offset + len);
                } else {
                    map.apply(&[Extent {
                        file_offset: offset,
                        length_bytes: len,
                        block,
                        block_offset: 1000 + offset,
                    }]);
                }
                for at in offset..offset + len {
                    model[at as usize] = (!hole).then_some((block, 1000 + at));
                }
            }
            let mut found = vec![None; 300];
            for extent in map.overlapping(&(0..300)) {
                for i in 0..extent.length_bytes {
                    found[(extent.file_offset + i) as usize] = Some((extent.block, extent.block_offset + i));
                }
            }
            prop_assert_eq!(&found, &model);
            let from = map.from(100).map(Extent::file_end).collect::<Vec<_>>();
            prop_assert!(from.iter().all(|end| *end > 100));
        }
    }

    #[test]
    fn what_the_namenode_says_is_checked() {
        let sound = |file_offset, length_bytes, block_offset| {
            is_sound(&Extent {
                file_offset,
                length_bytes,
                block: BlockId(1),
                block_offset,
            })
        };
        assert!(sound(FILE_BYTES_MAX - 1, 1, BLOCK_BYTES_MAX - 1));
        for (file_offset, length_bytes, block_offset) in [
            (0, 0, 0),
            (FILE_BYTES_MAX, 1, 0),
            (u64::MAX, 1, 0),
            (0, 1, BLOCK_BYTES_MAX),
            (0, u64::MAX, 1),
        ] {
            assert!(!sound(file_offset, length_bytes, block_offset));
        }
    }
}
