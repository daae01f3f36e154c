//! The way of one file's written data from memory into the file. Pure.
//!
//! Data is *dirty* until it is *taken* as a piece to be sent to datanodes. A piece is *written*
//! once all its datanodes have acknowledged it, and leaves when a commit has made it part of the
//! file. Its bytes stay in memory until then, so that it can be sent again. Commits take pieces in
//! the order in which they were taken, so an older write never hides a newer one.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use bytes::Bytes;
use harvestfs_protocol::{ids::BlockId, types::Extent};

use crate::overlay::{Segment, SegmentMap};

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

    /// Bytes that nobody has taken.
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
    /// there were any. Those that are being committed follow when the commit is over.
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
        self.written_bytes -= bytes;
        Some(extents)
    }

    /// The commit is part of the file.
    pub(crate) fn commit_done(&mut self) {
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
            }
        }
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
        self.held_bytes -= bytes as u64;
        if let Some(left) = self.outstanding.get_mut(&epoch) {
            *left -= bytes as u64;
            if *left == 0 {
                self.outstanding.remove(&epoch);
            }
        }
    }

    fn position(&self, id: PieceId) -> Option<usize> {
        self.pieces.binary_search_by_key(&id, |piece| piece.id).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Write(u64, usize),
        Flush,
        Take(usize),
        Written(usize),
        Failed(usize),
        LostBlock(u64),
        BeginCommit(usize),
        CommitDone,
        CommitFailed,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0u64..200, 1usize..50).prop_map(|(o, l)| Op::Write(o, l)),
            1 => Just(Op::Flush),
            5 => (1usize..60).prop_map(Op::Take),
            6 => any::<usize>().prop_map(Op::Written),
            2 => any::<usize>().prop_map(Op::Failed),
            1 => (0u64..3).prop_map(Op::LostBlock),
            4 => (1usize..5).prop_map(Op::BeginCommit),
            4 => Just(Op::CommitDone),
            1 => Just(Op::CommitFailed),
        ]
    }

    /// Datanodes and namenode as arrays.
    struct World {
        writeback: Writeback,
        /// What a reader of this client must see.
        model: Vec<u8>,
        /// What the namenode's extents lead to.
        file: Vec<u8>,
        blocks: Vec<Vec<u8>>,
        unwritten: Vec<TakenPiece>,
        committing: Vec<Extent>,
        flushes: Vec<Epoch>,
    }

    impl World {
        fn place(&mut self, piece: TakenPiece) {
            let block = piece.id % 3;
            let content = &mut self.blocks[block as usize];
            let block_offset = content.len() as u64;
            content.extend_from_slice(&piece.data);
            let block = BlockId(block);
            self.writeback.written(
                piece.id,
                Place {
                    block,
                    block_offset,
                },
            );
        }

        fn commit_done(&mut self) {
            for extent in std::mem::take(&mut self.committing) {
                let from = &self.blocks[extent.block.0 as usize][extent.block_offset as usize..];
                let len = extent.length_bytes as usize;
                self.file[extent.file_offset as usize..][..len].copy_from_slice(&from[..len]);
            }
            self.writeback.commit_done();
        }

        fn check(&mut self) -> Result<(), TestCaseError> {
            let mut seen = self.file.clone();
            for (offset, data) in self.writeback.overlay(0..300) {
                seen[offset as usize..][..data.len()].copy_from_slice(&data);
            }
            prop_assert_eq!(&seen, &self.model);
            for flush in &self.flushes {
                if self.writeback.is_flushed(*flush) {
                    // Nothing that was written before the flush is missing in the file, unless
                    // it was written again since (and then some later flush waits for that).
                    let later = self.writeback.overlay(0..300);
                    for at in 0..300 {
                        let in_memory = later
                            .iter()
                            .any(|(o, d)| (*o..*o + d.len() as u64).contains(&(at as u64)));
                        prop_assert!(in_memory || self.file[at] == self.model[at]);
                    }
                }
            }
            let total: u64 = self.writeback.outstanding.values().sum();
            prop_assert_eq!(total, self.writeback.held_bytes());
            let unwritten: usize = self.unwritten.iter().map(|piece| piece.data.len()).sum();
            prop_assert_eq!(unwritten as u64, self.writeback.sending_bytes());
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn a_reader_sees_every_write_whatever_fails(ops in prop::collection::vec(op(), 1..120)) {
            let mut world = World {
                writeback: Writeback::new(Order::File),
                model: vec![0; 300],
                file: vec![0; 300],
                blocks: vec![Vec::new(); 3],
                unwritten: Vec::new(),
                committing: Vec::new(),
                flushes: Vec::new(),
            };
            for (step, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Write(offset, len) => {
                        let data = vec![step as u8 + 1; len];
                        world.model[offset as usize..][..len].copy_from_slice(&data);
                        world.writeback.write(offset, data.into());
                    }
                    Op::Flush => {
                        let flush = world.writeback.begin_flush();
                        world.flushes.push(flush);
                    }
                    Op::Take(max) => world.unwritten.extend(world.writeback.take(max)),
                    Op::Written(which) if !world.unwritten.is_empty() => {
                        let piece = world.unwritten.remove(which % world.unwritten.len());
                        world.place(piece);
                    }
                    Op::Failed(which) if !world.unwritten.is_empty() => {
                        let piece = world.unwritten.remove(which % world.unwritten.len());
                        world.writeback.failed(piece.id);
                    }
                    Op::LostBlock(block) => {
                        world.writeback.lost(|b| b == BlockId(block));
                    }
                    Op::BeginCommit(max) if world.committing.is_empty() => {
                        world.committing = world.writeback.begin_commit(max).unwrap_or_default();
                        prop_assert!(world.committing.len() <= max);
                    }
                    Op::CommitDone => world.commit_done(),
                    Op::CommitFailed => {
                        world.committing.clear();
                        world.writeback.commit_failed();
                    }
                    _ => {}
                }
                world.check()?;
            }
            // Heal: everything arrives in the end.
            world.commit_done();
            let flush = world.writeback.begin_flush();
            while !world.writeback.is_flushed(flush) {
                while let Some(piece) = world.writeback.take(64) {
                    world.unwritten.push(piece);
                }
                for piece in std::mem::take(&mut world.unwritten) {
                    world.place(piece);
                }
                world.committing = world.writeback.begin_commit(usize::MAX).unwrap_or_default();
                world.commit_done();
            }
            prop_assert_eq!(&world.file, &world.model);
            prop_assert_eq!(world.writeback.held_bytes(), 0);
            prop_assert_eq!(world.writeback.written_bytes(), 0);
        }

        #[test]
        fn appends_are_committed_whole_and_in_order(
            lens in prop::collection::vec(1usize..50, 1..20),
            fail_every in 2usize..5,
        ) {
            let mut writeback = Writeback::new(Order::Append);
            let mut expected = Vec::new();
            let mut file = Vec::new();
            let mut block = Vec::new();
            let mut attempts = 0;
            for (i, len) in lens.iter().enumerate() {
                let data = vec![i as u8; *len];
                expected.extend_from_slice(&data);
                writeback.append(data.into());
                while let Some(piece) = writeback.take(16) {
                    attempts += 1;
                    if attempts % fail_every == 0 {
                        writeback.failed(piece.id);
                        break;
                    }
                    let place = Place { block: BlockId(1), block_offset: block.len() as u64 };
                    block.extend_from_slice(&piece.data);
                    writeback.written(piece.id, place);
                }
                if writeback.dirty_bytes() == 0
                    && let Some(extents) = writeback.begin_commit(usize::MAX)
                {
                    let end = file.len();
                    for extent in extents {
                        prop_assert_eq!(extent.file_offset as usize, file.len() - end);
                        let from = extent.block_offset as usize;
                        file.extend_from_slice(&block[from..from + extent.length_bytes as usize]);
                    }
                    writeback.commit_done();
                }
                prop_assert!(expected.starts_with(&file));
            }
        }
    }
}
