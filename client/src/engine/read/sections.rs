//! What a range of a file consists of. Pure.

use std::ops::Range;

use bytes::Bytes;
use harvestfs_protocol::types::FileBlock;

use crate::engine::cache::extents::ExtentMap;

static ZEROS: [u8; 128 << 10] = [0; 128 << 10];

/// A part of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    /// Written data that is still in memory, or zeros of a hole.
    Memory(Bytes),
    /// A range of a block, and where it starts in the file.
    Block { at: FileBlock, range: Range<u64> },
}

/// Returns the parts of a range, in order and without gaps: data in memory first, then the extents,
/// and zeros for the rest.
pub(crate) fn sections(
    range: &Range<u64>,
    overlay: Vec<(u64, Bytes)>,
    extents: &ExtentMap,
) -> Vec<Section> {
    let mut parts = Vec::new();
    let mut at = range.start;
    for (offset, mut data) in overlay {
        if offset >= range.end {
            break;
        }
        assert!(
            at <= offset,
            "what is in memory at {offset} begins before {at}, in {range:?}"
        );
        below(&mut parts, at..offset, extents);
        let left = in_memory(range.end - offset);
        data.truncate(left);
        at = offset + data.len() as u64;
        parts.push(Section::Memory(data));
    }
    below(&mut parts, at..range.end, extents);
    parts
}

/// Converts a length to `usize`. A file may be longer, but not what is read or kept of it at a time.
pub(crate) fn in_memory(length_bytes: u64) -> usize {
    let Ok(length) = usize::try_from(length_bytes) else {
        panic!("{length_bytes} bytes do not fit in memory");
    };
    length
}

fn below(parts: &mut Vec<Section>, range: Range<u64>, extents: &ExtentMap) {
    let mut at = range.start;
    for extent in extents.overlapping(&range) {
        zeros(parts, extent.file_offset - at);
        parts.push(Section::Block {
            at: extent.start(),
            range: extent.block_offset..extent.block_end(),
        });
        at = extent.file_end();
    }
    assert!(at <= range.end, "{range:?} is read up to {at}");
    zeros(parts, range.end - at);
}

fn zeros(parts: &mut Vec<Section>, length_bytes: u64) {
    let mut left = length_bytes;
    while left > 0 {
        let len = left.min(ZEROS.len() as u64);
        let piece = &ZEROS[..in_memory(len)];
        parts.push(Section::Memory(Bytes::from_static(piece)));
        left -= len;
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::BlockId;
    use harvestfs_protocol::types::Extent;

    use super::*;

    #[test]
    fn memory_hides_extents_and_holes_are_zeros() {
        let mut extents = ExtentMap::default();
        extents.apply(&[Extent {
            file_offset: 10,
            length_bytes: 10,
            block: BlockId(1),
            block_offset: 100,
        }]);
        let data = Bytes::from_static(b"abc");
        let block = |file_offset, range| Section::Block {
            at: FileBlock {
                block: BlockId(1),
                file_offset,
            },
            range,
        };
        let zeros = |len| Section::Memory(Bytes::from(vec![0; len]));
        assert_eq!(
            sections(
                &(5..25),
                vec![(12, data.clone()), (24, data.clone())],
                &extents
            ),
            vec![
                zeros(5),
                block(10, 100..102),
                Section::Memory(data.clone()),
                block(15, 105..110),
                zeros(4),
                Section::Memory(data.slice(..1)),
            ]
        );
    }
}
