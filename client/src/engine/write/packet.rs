//! How pieces of files are laid out in packets. Pure.
//!
//! Every packet starts at a chunk boundary of its block. Within it, a piece that is continued by the
//! next one in the same file is continued in the block as well, so that their extents merge. A piece
//! of a chunk or more starts at a chunk boundary; smaller ones share a chunk without crossing its
//! end, so that reading a small file verifies one chunk only.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::{CHUNK_BYTES, PACKET_BYTES_MAX};
use harvestfs_protocol::request_id::RequestId;

/// A piece of data to be written, of at most [`PACKET_BYTES_MAX`].
pub(crate) trait Piece {
    fn data(&self) -> &Bytes;
    /// Whether `next` continues the same file where this piece ends.
    fn is_continued_by(&self, next: &Self) -> bool;
    /// Whether it must be on stable storage when it is acknowledged.
    fn sync(&self) -> bool;
    /// The file that it belongs to.
    fn file(&self) -> InodeId;
    /// The request that waits for it.
    fn request(&self) -> RequestId;
}

/// The content of one packet.
#[derive(Debug)]
pub(crate) struct Layout<P> {
    pub(crate) data: Bytes,
    /// Each piece with its offset in `data`.
    pub(crate) pieces: Vec<(usize, P)>,
    pub(crate) sync: bool,
}

/// Takes as many pieces from the front of the queue as fit in a packet of `room` bytes; returns
/// `None` if not even the first fits or there is none.
pub(crate) fn fill<P: Piece>(queue: &mut VecDeque<P>, room: usize) -> Option<Layout<P>> {
    let room = room.min(PACKET_BYTES_MAX);
    let mut pieces: Vec<(usize, P)> = Vec::new();
    let mut end = 0;
    while let Some(next) = queue.front() {
        // It would fit in no packet, and be retried in one block after another.
        assert!(
            next.data().len() <= PACKET_BYTES_MAX,
            "a piece of {} bytes of {}",
            next.data().len(),
            next.file()
        );
        let start = match pieces.last() {
            Some((_, last)) if last.is_continued_by(next) => end,
            _ => aligned(end, next.data().len()),
        };
        if start + next.data().len() > room {
            break;
        }
        end = start + next.data().len();
        if let Some(piece) = queue.pop_front() {
            pieces.push((start, piece));
        }
    }
    let data = match &pieces[..] {
        [] => return None,
        [(_, only)] => only.data().clone(),
        _ => {
            let mut data = BytesMut::with_capacity(end);
            for (start, piece) in &pieces {
                data.resize(*start, 0);
                data.extend_from_slice(piece.data());
            }
            data.freeze()
        }
    };
    assert_eq!(data.len(), end, "data of {} pieces", pieces.len());
    let sync = pieces.iter().any(|(_, piece)| piece.sync());
    Some(Layout { data, pieces, sync })
}

/// Returns where a piece starts that does not continue the one that ends at `end`.
fn aligned(end: usize, length: usize) -> usize {
    let left_in_chunk = end.next_multiple_of(CHUNK_BYTES) - end;
    if length <= left_in_chunk {
        end
    } else {
        end.next_multiple_of(CHUNK_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct P(u64, u64, Bytes);

    impl Piece for P {
        fn data(&self) -> &Bytes {
            &self.2
        }
        fn is_continued_by(&self, next: &Self) -> bool {
            self.0 == next.0 && self.1 + self.2.len() as u64 == next.1
        }
        fn sync(&self) -> bool {
            false
        }
        fn file(&self) -> InodeId {
            InodeId(self.0)
        }
        fn request(&self) -> RequestId {
            RequestId::NONE
        }
    }

    fn starts(pieces: &[(u64, u64, usize)], room: usize) -> Option<Vec<usize>> {
        let mut queue = pieces
            .iter()
            .map(|(file, offset, len)| P(*file, *offset, vec![*file as u8 + 1; *len].into()))
            .collect();
        let layout = fill(&mut queue, room)?;
        assert!(layout.data.len() <= room.min(PACKET_BYTES_MAX));
        for (start, piece) in &layout.pieces {
            assert_eq!(layout.data[*start..*start + piece.2.len()], piece.2[..]);
        }
        Some(layout.pieces.iter().map(|(start, _)| *start).collect())
    }

    #[test]
    fn small_pieces_share_a_chunk_and_large_ones_start_one() {
        let all = PACKET_BYTES_MAX;
        assert_eq!(starts(&[(0, 0, 100), (1, 0, 100)], all), Some(vec![0, 100]));
        assert_eq!(
            starts(&[(0, 0, 100), (1, 0, 4000)], all),
            Some(vec![0, 4096])
        );
        assert_eq!(
            starts(&[(0, 0, 100), (1, 0, 4096)], all),
            Some(vec![0, 4096])
        );
        assert_eq!(
            starts(&[(0, 0, 5000), (0, 5000, 9000)], all),
            Some(vec![0, 5000])
        );
        assert_eq!(
            starts(&[(0, 0, 5000), (0, 6000, 9000)], all),
            Some(vec![0, 8192])
        );
    }

    #[test]
    fn takes_what_fits() {
        assert_eq!(starts(&[(0, 0, 100), (1, 0, 100)], 150), Some(vec![0]));
        assert_eq!(starts(&[(0, 0, 100)], 99), None);
        assert_eq!(starts(&[], 100), None);
        let full = (0, 0, PACKET_BYTES_MAX);
        assert_eq!(
            starts(&[full, (0, full.2 as u64, 1)], usize::MAX),
            Some(vec![0])
        );
    }
}
