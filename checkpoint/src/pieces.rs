//! Reads images of pages piece by piece: while one piece is used, the next ones are read, and hashed on
//! all cores.

use std::io::{self, Read};
use std::sync::mpsc;
use std::thread;

use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSlice;

use crate::page::{GROUP_BYTES, GroupHashes, PageTable, whole_pages};

/// Number of groups read at a time.
const PIECE_GROUPS: usize = 16;
const PIECE_BYTES: usize = PIECE_GROUPS * GROUP_BYTES;
/// Pieces in flight: enough that a short delay of either the reader or the user does not stall the other.
const PIECES_AHEAD: usize = 4;

/// A part of an image of pages.
pub(crate) struct Piece {
    /// `PIECE_BYTES` bytes, or fewer at the end.
    pub bytes: Vec<u8>,
    /// The hashes of its whole pages.
    pub groups: Vec<GroupHashes>,
}

/// Calls `take` with each piece of `source`, in order, until a call fails or the source ends. Where the
/// source equals the image that `known` describes, less is hashed.
///
/// # Errors
/// The error of `take`, or what `unreadable` makes of a read error.
pub(crate) fn for_each_piece<E>(
    source: impl Read + Send,
    known: &PageTable,
    unreadable: impl FnOnce(io::Error) -> E,
    mut take: impl FnMut(&Piece) -> Result<(), E>,
) -> Result<(), E> {
    thread::scope(|scope| {
        let (full, pieces) = mpsc::sync_channel(PIECES_AHEAD);
        let (free, buffers) = mpsc::channel();
        for _ in 0..PIECES_AHEAD {
            // Cannot fail: the receiver is still in this scope.
            let _ = free.send(vec![0; PIECE_BYTES]);
        }
        scope.spawn(move || read_pieces(source, known, &buffers, &full));
        for piece in pieces {
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) => return Err(unreadable(error)),
            };
            take(&piece)?;
            // This fails when the reader has reached the end and returned.
            let _ = free.send(piece.bytes);
        }
        Ok(())
    })
}

/// Reads and hashes until the source ends or the receiver is gone.
fn read_pieces(
    mut source: impl Read,
    known: &PageTable,
    buffers: &mpsc::Receiver<Vec<u8>>,
    full: &mpsc::SyncSender<io::Result<Piece>>,
) {
    let mut groups_before = 0;
    while let Ok(mut bytes) = buffers.recv() {
        let piece = read_full(&mut source, &mut bytes).map(|length| {
            bytes.truncate(length);
            let groups = whole_pages(&bytes).par_chunks(GROUP_BYTES).enumerate();
            let groups = groups
                .map(|(number, group)| GroupHashes::of(group, known.group(groups_before + number)));
            Piece {
                groups: groups.collect(),
                bytes,
            }
        });
        groups_before += PIECE_GROUPS;
        let is_last = !matches!(&piece, Ok(piece) if piece.bytes.len() == PIECE_BYTES);
        if full.send(piece).is_err() || is_last {
            return;
        }
    }
}

/// Fills the buffer, or as much of it as there is before the end of the source.
pub(crate) fn read_full(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match source.read(&mut buffer[length..]) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{PAGE_BYTES, PageHash};

    #[test]
    fn pieces_are_the_source_in_its_order() {
        let pages = 3 * PIECE_BYTES / PAGE_BYTES + 5;
        let mut source: Vec<u8> = (0..pages)
            .flat_map(|page| [(page % 251) as u8; PAGE_BYTES])
            .collect();
        let mut known = PageTable::default();
        // Without one, with an equal one, and with one that is nearly equal.
        for changed in [0, 0, 1] {
            source[2 * PIECE_BYTES + 7] ^= changed;
            let (mut bytes, mut table) = (Vec::new(), PageTable::default());
            for_each_piece(
                &*source,
                &known,
                |error| error,
                |piece| {
                    bytes.extend_from_slice(&piece.bytes);
                    table.extend(&piece.groups);
                    Ok(())
                },
            )
            .expect("memory can be read");
            assert_eq!(bytes, source);
            let expected: Vec<PageHash> = source.chunks(PAGE_BYTES).map(PageHash::of).collect();
            assert_eq!(table.pages_from(0), expected);
            known = table;
        }
    }

    #[test]
    fn an_endless_source_is_left_when_a_piece_cannot_be_used() {
        let mut taken = 0;
        let result = for_each_piece(
            io::repeat(1),
            &PageTable::default(),
            |error| error,
            |_| {
                taken += 1;
                if taken == 10 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                Ok(())
            },
        );
        let error = result.expect_err("the tenth fails");
        assert_eq!((error.kind(), taken), (io::ErrorKind::StorageFull, 10));
    }

    #[test]
    fn what_cannot_be_read_is_reported_after_what_was() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let mut taken_bytes = 0;
        let source = io::repeat(1).take(PIECE_BYTES as u64).chain(Broken);
        let result = for_each_piece(
            source,
            &PageTable::default(),
            |error| error.kind(),
            |piece| {
                taken_bytes += piece.bytes.len();
                Ok(())
            },
        );
        assert_eq!(result, Err(io::ErrorKind::BrokenPipe));
        assert_eq!(taken_bytes, PIECE_BYTES);
    }
}
