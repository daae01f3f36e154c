use harvestfs_protocol::types::Extent;
use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, usize),
    Flush,
    /// Take up to so many bytes, of the last flush or of everything.
    Take(usize, bool),
    Written(usize),
    Failed(usize),
    LostBlock(u64),
    BeginCommit(usize, bool),
    CommitDone,
    CommitFailed,
    Cut(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u64..200, 1usize..50).prop_map(|(o, l)| Op::Write(o, l)),
        1 => Just(Op::Flush),
        5 => (1usize..60, any::<bool>()).prop_map(|(max, of_flush)| Op::Take(max, of_flush)),
        6 => any::<usize>().prop_map(Op::Written),
        2 => any::<usize>().prop_map(Op::Failed),
        1 => (0u64..3).prop_map(Op::LostBlock),
        4 => (1usize..5, any::<bool>()).prop_map(|(max, of_flush)| Op::BeginCommit(max, of_flush)),
        4 => Just(Op::CommitDone),
        1 => Just(Op::CommitFailed),
        1 => (0u64..200).prop_map(Op::Cut),
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
    /// Flushes, and what a reader had to see when they began.
    flushes: Vec<(Epoch, Vec<u8>)>,
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
        for (place, data) in self.writeback.commit_done() {
            let from = &self.blocks[place.block.0 as usize][place.block_offset as usize..];
            assert_eq!(from[..data.len()], data);
        }
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let mut seen = self.file.clone();
        for (offset, data) in self.writeback.overlay(0..300) {
            seen[offset as usize..][..data.len()].copy_from_slice(&data);
        }
        prop_assert_eq!(&seen, &self.model);
        for (flush, seen) in &self.flushes {
            if self.writeback.is_flushed(*flush) {
                // Each write has a larger number, so data in the file is at least as new as the flush.
                let missing = (0usize..300).find(|at| self.file[*at] < seen[*at]);
                prop_assert_eq!(missing, None, "flush {} has ended", flush);
            }
        }
        let writeback = &self.writeback;
        for by_epoch in [&writeback.held, &writeback.unsent, &writeback.sending] {
            prop_assert_eq!(by_epoch.bytes.values().sum::<u64>(), by_epoch.total);
            prop_assert!(!by_epoch.bytes.values().any(|bytes| *bytes == 0));
        }
        prop_assert_eq!(writeback.dirty.bytes(), writeback.unsent.total);
        let unwritten: usize = self.unwritten.iter().map(|piece| piece.data.len()).sum();
        prop_assert_eq!(unwritten as u64, writeback.sending.total);
        Ok(())
    }
}

proptest! {
    #[test]
    fn a_reader_sees_every_write_despite_failures(ops in prop::collection::vec(op(), 1..120)) {
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
                    world.flushes.push((flush, world.model.clone()));
                }
                Op::Take(max, of_flush) => {
                    let last = world.flushes.last().filter(|_| of_flush);
                    let flush = last.map_or(Epoch::MAX, |(flush, _)| *flush);
                    let taken = world.writeback.take(flush, 0, max);
                    world.unwritten.extend(taken);
                }
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
                Op::BeginCommit(max, of_flush) if world.committing.is_empty() => {
                    let through = match world.flushes.last() {
                        Some((flush, _)) if of_flush => world.writeback.written_through(*flush),
                        _ => Some(Epoch::MAX),
                    };
                    let extents = through.and_then(|it| world.writeback.begin_commit(max, it));
                    world.committing = extents.unwrap_or_default();
                    prop_assert!(world.committing.len() <= max);
                }
                Op::CommitDone => world.commit_done(),
                Op::CommitFailed => {
                    world.committing.clear();
                    world.writeback.commit_failed();
                }
                Op::Cut(at) if world.committing.is_empty() => {
                    world.writeback.cut(at);
                    let is_before = |it: &TakenPiece| it.offset + it.data.len() as u64 <= at;
                    world.unwritten.retain(is_before);
                    world.model[at as usize..].fill(0);
                    world.file[at as usize..].fill(0);
                    for (_, seen) in &mut world.flushes {
                        seen[at as usize..].fill(0);
                    }
                }
                _ => {}
            }
            world.check()?;
        }
        // From here on nothing fails: everything is committed in the end.
        world.commit_done();
        let flush = world.writeback.begin_flush();
        while !world.writeback.is_flushed(flush) {
            while let Some(piece) = world.writeback.take(flush, 0, 64) {
                world.unwritten.push(piece);
            }
            for piece in std::mem::take(&mut world.unwritten) {
                world.place(piece);
            }
            let through = world.writeback.written_through(flush);
            let extents = through.and_then(|it| world.writeback.begin_commit(usize::MAX, it));
            world.committing = extents.expect("everything is written");
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
        flush_every in 1usize..4,
    ) {
        let mut writeback = Writeback::new(Order::Append);
        let mut flush = writeback.begin_flush();
        let mut expected = Vec::new();
        let mut ends = Vec::new();
        let mut file = Vec::new();
        let mut block = Vec::new();
        let mut attempts = 0;
        for (i, len) in lens.iter().enumerate() {
            let data = vec![i as u8; *len];
            expected.extend_from_slice(&data);
            ends.push(expected.len());
            writeback.append(data.into());
            if i % flush_every == 0 {
                flush = writeback.begin_flush();
            }
            // Bulk writing also takes data that no flush waits for.
            let of_flush = if i % 2 == 0 { flush } else { Epoch::MAX };
            while let Some(piece) = writeback.take(of_flush, 0, 16) {
                attempts += 1;
                if attempts % fail_every == 0 {
                    writeback.failed(piece.id);
                    break;
                }
                let place = Place { block: BlockId(1), block_offset: block.len() as u64 };
                block.extend_from_slice(&piece.data);
                writeback.written(piece.id, place);
            }
            if let Some(through) = writeback.written_through(flush)
                && let Some(extents) = writeback.begin_commit(usize::MAX, through)
            {
                let end = file.len();
                for extent in extents {
                    prop_assert_eq!(extent.file_offset as usize, file.len() - end);
                    let from = extent.block_offset as usize;
                    file.extend_from_slice(&block[from..from + extent.length_bytes as usize]);
                }
                writeback.commit_done();
                prop_assert!(ends.contains(&file.len()), "an append is torn");
            }
            prop_assert!(expected.starts_with(&file));
        }
    }
}

/// Larger than the appends that are gathered.
const APPEND_BYTES: usize = 40 << 10;

/// Commits appends that occupy three extents each, at most so many extents at a time. Returns the
/// size of each commit, in bytes.
fn append_and_commit(appends: u8, is_each_flushed: bool, extents_max: usize) -> Vec<u64> {
    let mut writeback = Writeback::new(Order::Append);
    for number in 0..appends {
        writeback.append(vec![number; APPEND_BYTES].into());
        if is_each_flushed {
            writeback.begin_flush();
        }
    }
    let flush = writeback.begin_flush();
    while let Some(piece) = writeback.take(flush, 0, APPEND_BYTES * 2 / 5) {
        let place = Place {
            block: BlockId(1),
            // Data of another file follows each piece.
            block_offset: piece.offset * 2,
        };
        writeback.written(piece.id, place);
    }
    let mut commits = Vec::new();
    while let Some(through) = writeback.written_through(flush) {
        let extents = writeback.begin_commit(extents_max, through);
        let extents = extents.expect("everything is written");
        assert!(extents.len() <= extents_max);
        commits.push(extents.iter().map(|it| it.length_bytes).sum());
        writeback.commit_done();
    }
    assert!(writeback.append_starts.is_empty(), "nothing is left");
    commits
}

#[test]
fn appends_in_more_extents_than_a_commit_has_are_committed_whole() {
    for is_each_flushed in [false, true] {
        let expected = [2, 2, 1].map(|appends| appends * APPEND_BYTES as u64);
        assert_eq!(append_and_commit(5, is_each_flushed, 7), expected);
    }
}

#[test]
fn an_append_in_more_extents_than_a_commit_has_comes_into_the_file() {
    let commits = append_and_commit(1, true, 2);
    assert_eq!(commits.len(), 2);
    assert_eq!(commits.iter().sum::<u64>(), APPEND_BYTES as u64);
}

#[test]
fn a_flush_waits_for_what_hides_data_that_cannot_be_stored() {
    for is_taken in [false, true] {
        let mut writeback = Writeback::new(Order::File);
        writeback.write(0, vec![1; 10].into());
        let flush = writeback.begin_flush();
        let older = writeback.take(flush, 0, 10).unwrap();
        writeback.write(0, vec![2; 10].into());
        let newer = is_taken.then(|| writeback.take(Epoch::MAX, 0, 10).unwrap());
        writeback.failed(older.id);
        assert!(!writeback.is_flushed(flush), "nothing is in the file");
        let newer = newer.or_else(|| writeback.take(flush, 0, 10)).unwrap();
        assert_eq!(writeback.written_through(flush), None);
        let place = Place {
            block: BlockId(1),
            block_offset: 0,
        };
        writeback.written(newer.id, place);
        assert!(writeback.begin_commit(1, flush).is_some());
        writeback.commit_done();
        assert!(writeback.is_flushed(flush) && writeback.is_empty());
    }
}
