//! The path of one file's written data from memory into the file. Pure.
//!
//! Data is *dirty* until it is *taken* as a piece to be sent to datanodes. A piece is *written*
//! once all its datanodes have acknowledged it, and is dropped when a commit has made it part of
//! the file. Its bytes stay in memory until then, so that it can be sent again. Pieces are
//! committed in the order in which they were taken, so an older write never hides a newer one.

mod commit;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use bytes::Bytes;
use harvestfs_protocol::ids::BlockId;

use crate::engine::write::overlay::{Segment, SegmentMap};

/// What the offsets of data are relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The start of the file.
    File,
    /// The end of the file when the namenode executes the commit (`O_APPEND`). An append belongs to
    /// one epoch, and a commit contains only whole appends, so that none is torn.
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

/// The number of bytes in each epoch.
#[derive(Debug, Default)]
struct ByEpoch {
    bytes: BTreeMap<Epoch, u64>,
    total: u64,
}

impl ByEpoch {
    fn add(&mut self, epoch: Epoch, bytes: u64) {
        if bytes > 0 {
            *self.bytes.entry(epoch).or_default() += bytes;
            self.total += bytes;
        }
    }

    fn remove(&mut self, epoch: Epoch, bytes: u64) {
        let of_epoch = self.bytes.get_mut(&epoch).filter(|it| bytes <= **it);
        let Some(left) = of_epoch else {
            panic!(
                "{bytes} bytes of flush {epoch} leave {}: {:?}",
                self.total, self.bytes
            );
        };
        *left -= bytes;
        if *left == 0 {
            self.bytes.remove(&epoch);
        }
        self.total -= bytes;
    }

    /// Moves bytes to another epoch.
    fn move_to(&mut self, to: Epoch, from: Epoch, bytes: u64) {
        self.remove(from, bytes);
        self.add(to, bytes);
    }

    fn oldest(&self) -> Option<Epoch> {
        self.bytes.first_key_value().map(|(&oldest, _)| oldest)
    }

    fn newest(&self) -> Option<Epoch> {
        self.bytes.last_key_value().map(|(&newest, _)| newest)
    }
}

/// A piece to be sent.
#[derive(Clone, Debug)]
pub(crate) struct TakenPiece {
    pub(crate) id: PieceId,
    pub(crate) offset: u64,
    pub(crate) data: Bytes,
}

impl TakenPiece {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }
}

#[derive(Debug)]
struct Piece {
    id: PieceId,
    offset: u64,
    data: Bytes,
    epoch: Epoch,
    place: Option<Place>,
    /// Whether its block was lost while it was being committed.
    lost: bool,
}

impl Piece {
    fn bytes(&self) -> u64 {
        self.data.len() as u64
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes()
    }
}

/// The written data of one file that is in memory.
#[derive(Debug)]
pub(crate) struct Writeback {
    order: Order,
    dirty: SegmentMap<Epoch>,
    /// For each offset, the newest of the taken pieces.
    sent: SegmentMap<PieceId>,
    /// Taken pieces, in ascending order of their ids.
    pieces: VecDeque<Piece>,
    committing: Vec<PieceId>,
    next_id: PieceId,
    epoch: Epoch,
    /// Bytes in memory; those of them that are dirty; and those that were taken and are not acknowledged yet.
    held: ByEpoch,
    unsent: ByEpoch,
    sending: ByEpoch,
    written_bytes: u64,
    /// For appends: where the next one starts, and the end of what was committed.
    append_end: u64,
    append_base: u64,
    /// The starts of appends that begin a segment, and therefore a piece, since small appends are
    /// gathered. In order, and only those behind what was committed.
    append_starts: VecDeque<u64>,
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
            held: ByEpoch::default(),
            unsent: ByEpoch::default(),
            sending: ByEpoch::default(),
            written_bytes: 0,
            append_end: 0,
            append_base: 0,
            append_starts: VecDeque::new(),
        }
    }

    /// Returns the number of bytes in memory: dirty, or taken but not committed.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held.total
    }

    /// Returns the number of bytes that were not taken to be sent.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.unsent.total
    }

    /// Returns the number of bytes that wait for a commit.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.held.total == 0
    }

    /// Whether everything in memory is one segment of at most `max_bytes`, of which nothing was
    /// taken: then one commit will make all of it visible.
    pub(crate) fn is_one_dirty_segment(&self, max_bytes: u64) -> bool {
        self.pieces.is_empty() && self.dirty.is_one_segment() && self.held.total <= max_bytes
    }

    pub(crate) fn is_committing(&self) -> bool {
        !self.committing.is_empty()
    }

    /// Returns the first piece that is being committed.
    pub(crate) fn committing(&self) -> Option<PieceId> {
        self.committing.first().copied()
    }

    /// Returns the first offset after everything in memory; 0 when there is nothing.
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
            let bytes = hidden.data.len() as u64;
            self.held.remove(hidden.tag, bytes);
            self.unsent.remove(hidden.tag, bytes);
            // A flush that waits for the hidden data has to wait for what hid it: otherwise it
            // would return with neither in the file.
            epoch = epoch.min(hidden.tag);
        }
        self.held.add(epoch, length);
        self.unsent.add(epoch, length);
        self.dirty.insert(offset, data, epoch);
    }

    /// Takes in data for the end of the file.
    pub(crate) fn append(&mut self, data: Bytes) {
        let offset = self.append_end;
        self.append_end += data.len() as u64;
        self.write(offset, data);
        if self.dirty.begins_at(offset) {
            self.append_starts.push_back(offset);
        }
    }

    /// Returns the data in memory of a range of the file, in order; the newest data wins.
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

    /// Starts a flush, which has ended when [`Writeback::is_flushed`] returns true.
    pub(crate) fn begin_flush(&mut self) -> Epoch {
        self.epoch += 1;
        self.epoch - 1
    }

    /// Whether everything written before a flush began is part of the file.
    pub(crate) fn is_flushed(&self, flush: Epoch) -> bool {
        self.held.oldest().is_none_or(|oldest| oldest > flush)
    }

    /// Returns the flush that the newest data in memory belongs to; `None` if nothing is in memory.
    pub(crate) fn newest(&self) -> Option<Epoch> {
        self.held.newest()
    }

    /// Whether dirty data belongs to a flush or to one before it.
    pub(crate) fn has_dirty(&self, flush: Epoch) -> bool {
        self.unsent.oldest().is_some_and(|oldest| oldest <= flush)
    }

    /// Returns the last epoch, at most that of a flush, up to which everything waits for a commit or is
    /// part of one; `None` if there is nothing, or if the oldest epoch in memory is incomplete.
    pub(crate) fn written_through(&self, flush: Epoch) -> Option<Epoch> {
        let oldest = self.held.oldest().filter(|oldest| *oldest <= flush)?;
        let unwritten = [self.unsent.oldest(), self.sending.oldest()];
        match unwritten.into_iter().flatten().min() {
            Some(unwritten) if unwritten <= oldest => None,
            Some(unwritten) => Some(flush.min(unwritten - 1)),
            None => Some(flush),
        }
    }

    /// Checks that everything in memory is either dirty, being sent, written, or being committed.
    fn check_held(&self) {
        let (held, dirty) = (self.held.total, self.dirty.bytes());
        let (sending, written) = (self.sending.total, self.written_bytes);
        let known = dirty + sending + written;
        assert!(
            known <= held && (self.is_committing() || known == held) && dirty == self.unsent.total,
            "{dirty} dirty, {sending} sent and {written} written bytes of {held} in memory: {:?}",
            self.unsent
        );
    }

    /// Takes the first dirty data, at or behind an offset, that belongs to a flush or to one before
    /// it: at most `max_bytes`.
    pub(crate) fn take(&mut self, flush: Epoch, from: u64, max_bytes: usize) -> Option<TakenPiece> {
        if !self.has_dirty(flush) {
            // Otherwise small writes would no longer be gathered.
            return None;
        }
        let of_flush = |epoch: Epoch| epoch <= flush;
        let segment = self.dirty.pop_first(from, max_bytes, of_flush)?;
        let id = self.next_id;
        self.next_id += 1;
        self.sent
            .insert_whole(segment.offset, segment.data.clone(), id);
        let taken = TakenPiece {
            id,
            offset: segment.offset,
            data: segment.data.clone(),
        };
        let bytes = segment.data.len() as u64;
        self.unsent.remove(segment.tag, bytes);
        self.sending.add(segment.tag, bytes);
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

    /// Notes that all datanodes of a piece acknowledged it.
    pub(crate) fn written(&mut self, id: PieceId, place: Place) {
        if let Some(index) = self.position(id)
            && self.pieces[index].place.replace(place).is_none()
        {
            let (epoch, bytes) = (self.pieces[index].epoch, self.pieces[index].bytes());
            self.sending.remove(epoch, bytes);
            self.written_bytes += bytes;
            self.check_held();
        }
    }

    /// Makes the still visible part of a piece that could not be written dirty again. Returns false if the piece is
    /// not in memory any more.
    pub(crate) fn failed(&mut self, id: PieceId) -> bool {
        let Some(piece) = self
            .position(id)
            .and_then(|index| self.pieces.remove(index))
        else {
            return false;
        };
        if piece.place.is_none() {
            self.sending.remove(piece.epoch, piece.bytes());
        } else if !self.committing.contains(&id) {
            self.written_bytes -= piece.bytes();
        }
        self.back_to_dirty(&piece);
        true
    }

    /// Notes that datanodes lost the pieces whose block fulfils a condition; returns whether there
    /// were any. Pieces that are being committed are handled when the commit is over.
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

    /// Notes that the commit is part of the file. Returns the data that left the memory, with its place.
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
                self.append_base += piece.bytes();
            }
            if piece.lost && self.order == Order::File {
                self.back_to_dirty(&piece);
            } else {
                self.sent.remove_tagged(piece.range(), id);
                self.held.remove(piece.epoch, piece.bytes());
                left.extend(piece.place.map(|place| (place, piece.data)));
            }
        }
        let base = self.append_base;
        let committed = self.append_starts.partition_point(|start| *start <= base);
        self.append_starts.drain(..committed);
        left
    }

    /// Notes that the commit was not executed; its pieces can be committed again.
    pub(crate) fn commit_failed(&mut self) {
        for id in std::mem::take(&mut self.committing) {
            if let Some(index) = self.position(id) {
                self.written_bytes += self.pieces[index].bytes();
                if self.pieces[index].lost {
                    self.failed(id);
                }
            }
        }
    }

    /// Forgets what lies at or beyond the offset at which the file was truncated. Nothing is being committed.
    pub(crate) fn cut(&mut self, size_bytes: u64) {
        assert!(!self.is_committing(), "a commit would undo the cut");
        let pieces = self.pieces.iter();
        let beyond = pieces.filter(|piece| piece.range().end > size_bytes);
        let beyond: Vec<PieceId> = beyond.map(|piece| piece.id).collect();
        for id in beyond {
            // The part before the offset is sent again.
            self.failed(id);
        }
        for cut in self.dirty.remove(size_bytes..u64::MAX) {
            let bytes = cut.data.len() as u64;
            self.held.remove(cut.tag, bytes);
            self.unsent.remove(cut.tag, bytes);
        }
        self.check_held();
    }

    /// Gives up the commit with its pieces, whether or not it was executed; returns the number of bytes.
    pub(crate) fn commit_given_up(&mut self) -> u64 {
        let before = self.held.total;
        self.commit_done();
        before - self.held.total
    }

    /// Gives up everything; returns the number of bytes.
    pub(crate) fn discard(&mut self) -> u64 {
        let bytes = self.held.total;
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
        self.held.remove(piece.epoch, piece.bytes());
        self.held.add(piece.epoch, again);
        self.unsent.add(piece.epoch, again);
        self.wait_for_what_hides(piece);
    }

    /// Makes a flush that waits for a piece which will not become part of the file wait for the
    /// data in its place, as when dirty data is hidden.
    fn wait_for_what_hides(&mut self, gone: &Piece) {
        let range = gone.range();
        for newer in self.dirty.overlapping(range.clone()) {
            if newer.tag > gone.epoch {
                let bytes = newer.data.len() as u64;
                self.held.move_to(gone.epoch, newer.tag, bytes);
                self.unsent.move_to(gone.epoch, newer.tag, bytes);
                self.dirty
                    .insert_whole(newer.offset, newer.data, gone.epoch);
            }
        }
        // A hidden piece is committed no later than the one that hides it, or passes on what waits
        // for it when it fails.
        for visible in self.sent.overlapping(range) {
            let Some(index) = self.position(visible.tag) else {
                continue;
            };
            let newer = &mut self.pieces[index];
            if newer.epoch > gone.epoch {
                let bytes = newer.bytes();
                self.held.move_to(gone.epoch, newer.epoch, bytes);
                if newer.place.is_none() {
                    self.sending.move_to(gone.epoch, newer.epoch, bytes);
                }
                newer.epoch = gone.epoch;
            }
        }
    }

    fn position(&self, id: PieceId) -> Option<usize> {
        self.pieces.binary_search_by_key(&id, |piece| piece.id).ok()
    }
}

#[cfg(test)]
mod tests;
