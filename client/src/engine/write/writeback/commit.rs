//! The choice of the data that is committed next: in a limited number of extents, and only whole appends.

use harvestfs_protocol::types::Extent;

use super::{Epoch, Order, Piece, Writeback};

impl Piece {
    /// Whether `next` continues this piece both in the file and in a block, so that one extent holds both.
    fn is_continued_by(&self, next: &Self) -> bool {
        let (Some(place), Some(next_place)) = (self.place, next.place) else {
            return false;
        };
        place.block == next_place.block
            && place.block_offset + self.bytes() == next_place.block_offset
            && self.range().end == next.offset
    }
}

impl Writeback {
    /// Returns the extents that can be committed now, at most `extents_max`, of the data up to an
    /// epoch; for appends, an epoch that [`Writeback::written_through`] returned. The pieces count
    /// as being committed until [`Writeback::commit_done`], [`Writeback::commit_failed`] or
    /// [`Writeback::commit_given_up`].
    pub(crate) fn begin_commit(
        &mut self,
        extents_max: usize,
        through: Epoch,
    ) -> Option<Vec<Extent>> {
        if self.is_committing() {
            return None;
        }
        let base = self.append_base;
        let mut pieces = match self.order {
            Order::File => self.written_pieces(through),
            Order::Append => self.appended_pieces(through)?,
        };
        pieces.truncate(self.fitting(&pieces, extents_max));
        let mut extents: Vec<Extent> = Vec::new();
        let mut committing = Vec::new();
        let mut bytes = 0;
        let mut last: Option<&Piece> = None;
        for piece in pieces {
            let Some(place) = piece.place else { break };
            match extents.last_mut() {
                Some(extent) if last.is_some_and(|last| last.is_continued_by(piece)) => {
                    extent.length_bytes += piece.bytes();
                }
                _ => extents.push(Extent {
                    file_offset: piece.offset - base,
                    length_bytes: piece.bytes(),
                    block: place.block,
                    block_offset: place.block_offset,
                }),
            }
            bytes += piece.bytes();
            committing.push(piece.id);
            last = Some(piece);
        }
        if extents.is_empty() {
            return None;
        }
        self.committing = committing;
        assert!(
            bytes <= self.written_bytes,
            "{bytes} bytes are committed of {} that were written",
            self.written_bytes
        );
        self.written_bytes -= bytes;
        self.check_held();
        Some(extents)
    }

    /// Returns how many of these pieces fit in one commit, which has a limited number of extents
    /// and only whole appends.
    fn fitting(&self, pieces: &[&Piece], extents_max: usize) -> usize {
        let (mut extents, mut fitting) = (0, 0);
        let mut last: Option<&Piece> = None;
        for (index, piece) in pieces.iter().copied().enumerate() {
            extents += usize::from(last.is_none_or(|last| !last.is_continued_by(piece)));
            if extents > extents_max {
                // Each packet of an append is one extent, so an append that fits in a block has far
                // fewer. A longer one need not stay contiguous, but has to get into the file.
                return if fitting > 0 { fitting } else { index };
            }
            if self.may_end_with(piece) {
                fitting = index + 1;
            }
            last = Some(piece);
        }
        pieces.len()
    }

    /// Whether a commit may end with a piece.
    fn may_end_with(&self, piece: &Piece) -> bool {
        let end = piece.range().end;
        match self.order {
            Order::File => true,
            Order::Append => self.append_starts.binary_search(&end).is_ok(),
        }
    }

    /// Returns the written pieces of an epoch and of those before it, in the order in which they
    /// were taken, with other pieces taken in between.
    fn written_pieces(&self, through: Epoch) -> Vec<&Piece> {
        let written = self.pieces.iter().take_while(|it| it.place.is_some());
        let mut pieces: Vec<&Piece> = written.collect();
        let last = pieces.iter().rposition(|piece| piece.epoch <= through);
        pieces.truncate(last.map_or(0, |last| last + 1));
        pieces
    }

    /// Returns the pieces appended up to an epoch, in order; `None` if one of them is not written.
    fn appended_pieces(&self, through: Epoch) -> Option<Vec<&Piece>> {
        let of_epochs = self.pieces.iter().filter(|it| it.epoch <= through);
        let mut pieces: Vec<&Piece> = of_epochs.collect();
        pieces.sort_by_key(|piece| piece.offset);
        let mut expected = self.append_base;
        for piece in &pieces {
            if piece.place.is_none() || piece.offset != expected {
                return None;
            }
            expected = piece.range().end;
        }
        Some(pieces)
    }
}
