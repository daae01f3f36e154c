//! The way of one file's written data from memory into the file. Pure.
//!
//! Data is *dirty* until it is *taken* as a piece to be sent to datanodes. A piece is *written*
//! once all its datanodes have acknowledged it, and leaves when a commit has made it part of the
//! file. Its bytes stay in memory until then, so that it can be sent again. Commits take pieces in
//! the order in which they were taken, so an older write never hides a newer one.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use bytes::Bytes;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::types::Extent;

use crate::engine::write::overlay::{Segment, SegmentMap};

/// In what sense offsets count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// From the start of the file.
    File,
    /// From where the end of the file is when the namenode executes the commit (`O_APPEND`).
    /// Everything that was taken is committed together, so that no append is torn.
    Append,
}

/// Where a piece was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) block: BlockId,
    pub(crate) block_offset: u64,
}

/// Numbers the pieces of one file.
pub(crate) type PieceId = u64;
/// Numbers the flushes of one file; data belongs to the first flush after it was written.
pub(crate) type Epoch = u64;

/// A piece to be sent.
#[derive(Clone, Debug)]
pub(crate) struct TakenPiece {
    pub(crate) id: PieceId,
    pub(crate) offset: u64,
    pub(crate) data: Bytes,
}

#[derive(Debug)]
struct Piece {
    id: PieceId,
    offset: u64,
    data: Bytes,
    epoch: Epoch,
    place: Option<Place>,
    /// Its block was lost while it was being committed.
    lost: bool,
}

impl Piece {
    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.data.len() as u64
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Writeback {
    order: Order,
    dirty: SegmentMap<Epoch>,
    /// What is still the newest of the taken pieces.
    sent: SegmentMap<PieceId>,
    /// Taken pieces, ids ascending.
    pieces: VecDeque<Piece>,
    committing: Vec<PieceId>,
    next_id: PieceId,
    epoch: Epoch,
    /// Bytes in memory, by the flush that they belong to.
    outstanding: BTreeMap<Epoch, u64>,
    held_bytes: u64,
    sending_bytes: u64,
    written_bytes: u64,
    /// Appends: where the next one goes, and how much was committed.
    append_end: u64,
    append_base: u64,
}

impl Writeback {
    pub(crate) fn new(order: Order) -> Self {
        Self {
            order,
            dirty: SegmentMap::new(),
            sent: SegmentMap::new(),
            pieces: VecDeque::new(),
            committing: Vec::new(),
            next_id: 1,
            epoch: 0,
            outstanding: BTreeMap::new(),
            held_bytes: 0,
            sending_bytes: 0,
            written_bytes: 0,
            append_end: 0,
            append_base: 0,
        }
    }

    /// Bytes in memory: dirty, or taken and not committed.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Bytes that no writer has taken.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty.bytes()
    }

    /// Bytes that wait for a commit.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Bytes that were taken and not acknowledged yet.
    pub(crate) fn sending_bytes(&self) -> u64 {
        self.sending_bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.held_bytes == 0
    }

    /// Whether all that was ever written is one segment of at most `max_bytes`, of which nothing was
    /// taken: then one commit will make all of it visible.
    pub(crate) fn is_one_dirty_segment(&self, max_bytes: u64) -> bool {
        self.pieces.is_empty() && self.dirty.is_one_segment() && self.held_bytes <= max_bytes
    }

    pub(crate) fn is_committing(&self) -> bool {
        !self.committing.is_empty()
    }

    /// The first offset after everything in memory; 0 when there is nothing.
    pub(crate) fn end(&self) -> u64 {
        self.dirty.end().max(self.sent.end())
    }

    /// Takes in data at an offset of the file.
    pub(crate) fn write(&mut self, offset: u64, data: Bytes) {
        let length = data.len() as u64;
        if length == 0 {
            return;
        }
        let mut epoch = self.epoch;
        for hidden in self.dirty.remove(offset..offset + length) {
            self.release(hidden.tag, hidden.data.len());
            // A flush that waits for the hidden data has to wait for what hid it: otherwise it
            // would return with neither in the file.
            epoch = epoch.min(hidden.tag);
        }
        self.hold(epoch, data.len());
        self.dirty.insert(offset, data, epoch);
    }

    /// Takes in data for the end of the file.
    pub(crate) fn append(&mut self, data: Bytes) {
        let offset = self.append_end;
        self.append_end += data.len() as u64;
        self.write(offset, data);
    }

    /// What is in memory of a range of the file, newest wins, in order.
    pub(crate) fn overlay(&mut self, range: Range<u64>) -> Vec<(u64, Bytes)> {
        if self.is_empty() {
            return Vec::new();
        }
        let dirty = self.dirty.overlapping(range.clone());
        let sent = self.sent.overlapping(range);
        if sent.is_empty() {
            return dirty.into_iter().map(|s| (s.offset, s.data)).collect();
        }
        let mut merged = SegmentMap::new();
        for Segment { offset, data, .. } in sent {
            merged.insert_whole(offset, data, ());
        }
        for Segment { offset, data, .. } in dirty {
            merged.insert_whole(offset, data, ());
        }
        let end = merged.end();
        let segments = merged.overlapping(0..end);
        segments.into_iter().map(|s| (s.offset, s.data)).collect()
    }

    /// Starts a flush; it is over when [`Writeback::is_flushed`] says so.
    pub(crate) fn begin_flush(&mut self) -> Epoch {
        self.epoch += 1;
        self.epoch - 1
    }

    /// Whether everything written before a flush began is part of the file.
    pub(crate) fn is_flushed(&self, flush: Epoch) -> bool {
        self.outstanding
            .first_key_value()
            .is_none_or(|(&oldest, _)| oldest > flush)
    }

    /// What is in memory is dirty, on its way, written, or being committed.
    fn check_held(&self) {
        let (dirty, sending, written) =
            (self.dirty.bytes(), self.sending_bytes, self.written_bytes);
        let known = dirty + sending + written;
        assert!(
            known <= self.held_bytes && (self.is_committing() || known == self.held_bytes),
            "{dirty} dirty, {sending} sent and {written} written bytes of {} in memory",
            self.held_bytes
        );
    }

    /// Takes the first dirty data, at most `max_bytes`.
    pub(crate) fn take(&mut self, max_bytes: usize) -> Option<TakenPiece> {
        let segment = self.dirty.pop_first(max_bytes)?;
        let id = self.next_id;
        self.next_id += 1;
        self.sent
            .insert_whole(segment.offset, segment.data.clone(), id);
        let taken = TakenPiece {
            id,
            offset: segment.offset,
            data: segment.data.clone(),
        };
        self.sending_bytes += segment.data.len() as u64;
        self.pieces.push_back(Piece {
            id,
            offset: segment.offset,
            data: segment.data,
            epoch: segment.tag,
            place: None,
            lost: false,
        });
        self.check_held();
        Some(taken)
    }

    /// A piece was acknowledged by all its datanodes.
    pub(crate) fn written(&mut self, id: PieceId, place: Place) {
        if let Some(index) = self.position(id)
            && self.pieces[index].place.replace(place).is_none()
        {
            let bytes = self.pieces[index].data.len() as u64;
            self.sending_bytes -= bytes;
            self.written_bytes += bytes;
            self.check_held();
        }
    }

    /// A piece could not be written; what is still wanted of it is dirty again.
    pub(crate) fn failed(&mut self, id: PieceId) {
        if let Some(piece) = self
            .position(id)
            .and_then(|index| self.pieces.remove(index))
        {
            if piece.place.is_none() {
                self.sending_bytes -= piece.data.len() as u64;
            } else if !self.committing.contains(&id) {
                self.written_bytes -= piece.data.len() as u64;
            }
            self.back_to_dirty(&piece);
        }
    }

    /// Pieces that fulfil a condition on their block were lost by the datanodes; returns whether
    /// there were any. Pieces that are being committed follow when the commit is over.
    pub(crate) fn lost(&mut self, is_lost: impl Fn(BlockId) -> bool) -> bool {
        let mut ids = Vec::new();
        let mut any = false;
        for piece in &mut self.pieces {
            if piece.place.is_some_and(|place| is_lost(place.block)) {
                any = true;
                if self.committing.contains(&piece.id) {
                    piece.lost = true;
                } else {
                    ids.push(piece.id);
                }
            }
        }
        for id in ids {
            self.failed(id);
        }
        any
    }

    /// The extents that can be committed now, at most `extents_max`. The pieces count as being
    /// committed until [`Writeback::commit_done`] or [`Writeback::commit_failed`].
    pub(crate) fn begin_commit(&mut self, extents_max: usize) -> Option<Vec<Extent>> {
        if self.is_committing() {
            return None;
        }
        let mut pieces: Vec<&Piece> = match self.order {
            Order::File => self
                .pieces
                .iter()
                .take_while(|piece| piece.place.is_some())
                .collect(),
            Order::Append => self.pieces.iter().collect(),
        };
        if self.order == Order::Append {
            pieces.sort_by_key(|piece| piece.offset);
            let mut expected = self.append_base;
            for piece in &pieces {
                if piece.place.is_none() || piece.offset != expected {
                    return None;
                }
                expected = piece.range().end;
            }
        }
        let base = self.append_base;
        let mut extents: Vec<Extent> = Vec::new();
        let mut committing = Vec::new();
        let mut bytes = 0;
        for piece in pieces {
            let Some(place) = piece.place else { break };
            let extent = Extent {
                file_offset: piece.offset - base,
                length_bytes: piece.data.len() as u64,
                block: place.block,
                block_offset: place.block_offset,
            };
            let full = extents.len() == extents_max;
            match extents.last_mut() {
                Some(last)
                    if last.block == extent.block
                        && last.block_end() == extent.block_offset
                        && last.file_end() == extent.file_offset =>
                {
                    last.length_bytes += extent.length_bytes;
                }
                _ if full => break,
                _ => extents.push(extent),
            }
            bytes += extent.length_bytes;
            committing.push(piece.id);
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

    /// The commit is part of the file. Returns what of it left, and where it is.
    pub(crate) fn commit_done(&mut self) -> Vec<(Place, Bytes)> {
        let mut left = Vec::new();
        for id in std::mem::take(&mut self.committing) {
            let Some(piece) = self
                .position(id)
                .and_then(|index| self.pieces.remove(index))
            else {
                continue;
            };
            if self.order == Order::Append {
                self.append_base += piece.data.len() as u64;
            }
            if piece.lost && self.order == Order::File {
                self.back_to_dirty(&piece);
            } else {
                self.sent.remove_tagged(piece.range(), id);
                self.release(piece.epoch, piece.data.len());
                left.extend(piece.place.map(|place| (place, piece.data)));
            }
        }
        left
    }

    /// The commit did not happen; its pieces can be committed again.
    pub(crate) fn commit_failed(&mut self) {
        for id in std::mem::take(&mut self.committing) {
            if let Some(index) = self.position(id) {
                self.written_bytes += self.pieces[index].data.len() as u64;
                if self.pieces[index].lost {
                    self.failed(id);
                }
            }
        }
    }

    /// The file was cut at an offset: forgets what lies at or beyond it. Nothing is being committed.
    pub(crate) fn cut(&mut self, size_bytes: u64) {
        assert!(!self.is_committing(), "a commit would undo the cut");
        let pieces = self.pieces.iter();
        let beyond = pieces.filter(|piece| piece.range().end > size_bytes);
        let beyond: Vec<PieceId> = beyond.map(|piece| piece.id).collect();
        for id in beyond {
            // What it has before the cut is sent again.
            self.failed(id);
        }
        for cut in self.dirty.remove(size_bytes..u64::MAX) {
            self.release(cut.tag, cut.data.len());
        }
        self.check_held();
    }

    /// The commit is given up with its pieces, whether or not it happened; returns how many bytes.
    pub(crate) fn commit_given_up(&mut self) -> u64 {
        let before = self.held_bytes;
        self.commit_done();
        before - self.held_bytes
    }

    /// Gives up everything; returns how many bytes.
    pub(crate) fn discard(&mut self) -> u64 {
        let bytes = self.held_bytes;
        let next_id = self.next_id;
        let epoch = self.epoch;
        *self = Self::new(self.order);
        self.next_id = next_id;
        self.epoch = epoch;
        bytes
    }

    fn back_to_dirty(&mut self, piece: &Piece) {
        let before = self.dirty.bytes();
        for Segment { offset, data, .. } in self.sent.remove_tagged(piece.range(), piece.id) {
            self.dirty.insert_below(offset, &data, piece.epoch);
        }
        let again = self.dirty.bytes() - before;
        self.release(piece.epoch, piece.data.len());
        *self.outstanding.entry(piece.epoch).or_default() += again;
        self.held_bytes += again;
        self.outstanding.retain(|_, bytes| *bytes > 0);
    }

    fn hold(&mut self, epoch: Epoch, bytes: usize) {
        *self.outstanding.entry(epoch).or_default() += bytes as u64;
        self.held_bytes += bytes as u64;
    }

    fn release(&mut self, epoch: Epoch, bytes: usize) {
        let bytes = bytes as u64;
        let of_flush = self.outstanding.get_mut(&epoch).filter(|it| bytes <= **it);
        let Some(left) = of_flush else {
            panic!(
                "{bytes} bytes of flush {epoch} leave {} in memory: {:?}",
                self.held_bytes, self.outstanding
            );
        };
        *left -= bytes;
        if *left == 0 {
            self.outstanding.remove(&epoch);
        }
        self.held_bytes -= bytes;
    }

    fn position(&self, id: PieceId) -> Option<usize> {
        self.pieces.binary_search_by_key(&id, |piece| piece.id).ok()
    }
}

#[cfg(test)]
mod tests;
