use harvestfs_protocol::types::Durability;
use proptest::prelude::*;

use super::*;
use crate::engine::write::writeback::Place;
use crate::testing::some_time;

const FILE: InodeId = InodeId(7);
const RULES: PlacementRules = PlacementRules {
    replication: 3,
    durability: Durability::Strict,
    class: None,
};
const LENGTH_MAX: usize = 400;

fn refused() -> ClientError {
    FsError::QuotaExceeded.into()
}

fn unreachable() -> ClientError {
    ClientError::Unreachable {
        waited: Duration::ZERO,
        reason: "lost".into(),
    }
}

/// Returns an open file whose placement rules are known.
pub(super) fn opened() -> DirtyFile {
    let mut file = DirtyFile::new(FILE);
    file.set_rules(Some(RULES));
    file.handle_opened();
    file
}

pub(super) fn moment() -> Moment {
    Moment {
        now: some_time(),
        wall_clock: Timestamp(1),
    }
}

/// Lets datanodes write everything that a file sends.
pub(super) fn write_sent(file: &mut DirtyFile, sends: Vec<Send>) {
    for send in sends {
        for piece in send.pieces {
            let place = Place {
                block: BlockId(1),
                block_offset: piece.offset,
            };
            file.piece_written(send.order, piece.id, place);
        }
    }
}

/// Datanodes, namenode and a reader as arrays, in virtual time.
struct World {
    file: DirtyFile,
    now: Instant,
    /// What a reader of this client must see; appends are not visible before they are committed.
    model: Vec<u8>,
    /// Data that was appended but not committed.
    appended: Vec<u8>,
    /// The content and length that the namenode's extents lead to.
    namenode: Vec<u8>,
    blocks: Vec<Vec<u8>>,
    in_flight: Vec<(Order, TakenPiece)>,
    commits: Vec<Commit>,
    flushes: Vec<Flush>,
    losses: u64,
    /// Whether something failed and no flush was requested since.
    paused: bool,
}

impl World {
    fn new() -> Self {
        Self {
            file: opened(),
            now: some_time(),
            model: Vec::new(),
            appended: Vec::new(),
            namenode: Vec::new(),
            blocks: vec![Vec::new()],
            in_flight: Vec::new(),
            commits: Vec::new(),
            flushes: Vec::new(),
            losses: 0,
            paused: false,
        }
    }

    fn moment(&self) -> Moment {
        Moment {
            now: self.now,
            wall_clock: Timestamp(1),
        }
    }

    /// Performs the actions that are due now.
    fn advance(&mut self) {
        let actions = self.file.advance(false, RequestId::NONE);
        let is_idle = actions.sends.is_empty() && actions.commits.is_empty();
        assert!(is_idle || !self.paused, "nothing is tried again by itself");
        for send in actions.sends {
            let order = send.order;
            let pieces = send.pieces.into_iter().map(|piece| (order, piece));
            self.in_flight.extend(pieces);
        }
        self.commits.extend(actions.commits);
        for order in [Order::File, Order::Append] {
            let commits = self.commits.iter().filter(|it| it.order == order);
            assert!(commits.count() <= 1, "two commits of {order:?} at once");
        }
    }

    fn write(&mut self, offset: usize, data: Vec<u8>) {
        let end = offset + data.len();
        self.model.resize(self.model.len().max(end), 0);
        self.model[offset..end].copy_from_slice(&data);
        let when = self.moment();
        let by = Credentials::root();
        self.file.write(offset as u64, data.into(), &by, when);
    }

    fn append(&mut self, data: Vec<u8>) {
        self.appended.extend_from_slice(&data);
        let when = self.moment();
        self.file.append(data.into(), &Credentials::root(), when);
    }

    fn flush(&mut self) {
        self.paused = false;
        let flush = self.file.begin_flush(false, RequestId::NONE);
        self.flushes.push(flush);
    }

    fn acknowledge(&mut self, which: usize) {
        let (order, piece) = self.in_flight.remove(which % self.in_flight.len());
        let last = self.blocks.len() - 1;
        let place = Place {
            block: BlockId(last as u64),
            block_offset: self.blocks[last].len() as u64,
        };
        self.blocks[last].extend_from_slice(&piece.data);
        self.file.piece_written(order, piece.id, place);
    }

    fn fail_pieces(&mut self) {
        let pieces: Vec<_> = std::mem::take(&mut self.in_flight)
            .into_iter()
            .map(|(order, piece)| (order, piece.id))
            .collect();
        self.file.pieces_failed(&pieces, &refused(), self.now);
        self.paused = true;
    }

    /// Loses the block that was written last; pieces go into another one.
    fn lose_block(&mut self) {
        let lost = BlockId(self.blocks.len() as u64 - 1);
        self.blocks.push(Vec::new());
        self.file
            .blocks_lost(|block| block == lost, RequestId::NONE);
        self.goes_on_if_wanted();
    }

    /// Data of a lost block is sent again, for which a flush is requested.
    fn goes_on_if_wanted(&mut self) {
        self.paused &= self.file.written.wanted.is_none() && self.file.appended.wanted.is_none();
    }

    fn execute(&mut self, commit: &Commit) {
        let base = match commit.order {
            Order::File => 0,
            Order::Append => self.namenode.len(),
        };
        for extent in &commit.commit.extents {
            let block = &self.blocks[extent.block.0 as usize];
            let from = extent.block_offset as usize;
            let data = block[from..from + extent.length_bytes as usize].to_vec();
            let start = base + extent.file_offset as usize;
            let end = start + data.len();
            self.namenode.resize(self.namenode.len().max(end), 0);
            self.namenode[start..end].copy_from_slice(&data);
        }
        if commit.order == Order::Append {
            let data = self.namenode[base..].to_vec();
            let rest = self.appended.split_off(data.len());
            assert_eq!(
                std::mem::replace(&mut self.appended, rest),
                data,
                "in order, whole, once"
            );
            // Each append is filled with its own number.
            assert_ne!(data.last(), self.appended.first(), "an append is torn");
            // Data that is written in memory hides it, but data behind it does not.
            self.model
                .resize(self.model.len().max(self.namenode.len()), 0);
            self.model[base..base + data.len()].copy_from_slice(&data);
        }
    }

    fn commit_done(&mut self) {
        if let Some(commit) = self.commits.pop() {
            self.execute(&commit);
            self.file.commit_done(commit.order);
        }
    }

    fn commit_failed(&mut self, given_up: &Unanswered, executed: bool) {
        let Some(commit) = self.commits.pop() else {
            return;
        };
        if executed {
            self.execute(&commit);
        }
        let failures = self.file.failures;
        self.file
            .commit_failed(commit.order, given_up, RequestId::NONE, self.now);
        self.paused |= self.file.failures > failures;
        self.goes_on_if_wanted();
        let is_lost = given_up.maybe_executed && commit.order == Order::Append;
        self.losses += u64::from(is_lost);
        assert_eq!(self.file.losses, self.losses);
        if is_lost && !executed {
            // It is not sent again, but later appends are.
            let extents = commit.commit.extents.iter();
            let bytes: u64 = extents.map(|extent| extent.length_bytes).sum();
            self.appended.drain(..bytes as usize);
        }
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let mut seen = self.namenode.clone();
        let (overlay, end) = self.file.overlay(0..LENGTH_MAX as u64 * 100);
        seen.resize(seen.len().max(end as usize), 0);
        for (offset, data) in overlay {
            seen[offset as usize..][..data.len()].copy_from_slice(&data);
        }
        prop_assert_eq!(&seen, &self.model);
        let is_shown = !self.file.is_refused();
        let shown = self.appended.len() as u64 * u64::from(is_shown);
        prop_assert_eq!(self.file.uncommitted().appended_bytes, shown);
        Ok(())
    }

    /// Lets everything succeed in the end.
    fn heal(&mut self) -> Result<(), ClientError> {
        self.flush();
        let flush = self.flushes[self.flushes.len() - 1];
        for _ in 0..1_000 {
            self.advance();
            if let Some(ended) = self.file.flushed(&flush) {
                return ended;
            }
            while !self.in_flight.is_empty() {
                self.acknowledge(0);
            }
            self.commit_done();
        }
        panic!("a flush that nothing stops does not end");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(usize, usize),
    Append(usize),
    Flush,
    Acknowledge(usize),
    FailPieces,
    LoseBlock,
    CommitDone,
    CommitRefused,
    CommitExpired,
    CommitUnsent,
    CommitUnknown(ClientError, bool),
}

fn op(appends: bool) -> impl Strategy<Value = Op> {
    let write = (0usize..LENGTH_MAX, 1usize..60).prop_map(|(at, len)| Op::Write(at, len));
    let append = (1usize..60).prop_map(Op::Append);
    // As in the client, a file with appends in memory is flushed before it is written at an offset.
    let data = if appends {
        append.boxed()
    } else {
        write.boxed()
    };
    prop_oneof![
        6 => data,
        3 => Just(Op::Flush),
        8 => any::<usize>().prop_map(Op::Acknowledge),
        1 => Just(Op::FailPieces),
        1 => Just(Op::LoseBlock),
        4 => Just(Op::CommitDone),
        1 => Just(Op::CommitRefused),
        1 => Just(Op::CommitExpired),
        1 => Just(Op::CommitUnsent),
        1 => any::<bool>().prop_map(|executed| Op::CommitUnknown(unreachable(), executed)),
        1 => any::<bool>().prop_map(|executed| {
            Op::CommitUnknown(FsError::SessionExpired.into(), executed)
        }),
    ]
}

fn run(ops: Vec<Op>) -> Result<(), TestCaseError> {
    let mut world = World::new();
    for (step, op) in ops.into_iter().enumerate() {
        world.now += Duration::from_millis(1);
        match op {
            Op::Write(offset, len) => world.write(offset, vec![step as u8 + 1; len]),
            Op::Append(len) => world.append(vec![step as u8 + 1; len]),
            Op::Flush => world.flush(),
            Op::Acknowledge(which) if !world.in_flight.is_empty() => world.acknowledge(which),
            Op::Acknowledge(_) => {}
            Op::FailPieces if !world.in_flight.is_empty() => world.fail_pieces(),
            Op::FailPieces => {}
            Op::LoseBlock => world.lose_block(),
            Op::CommitDone => world.commit_done(),
            Op::CommitRefused => world.commit_failed(&Unanswered::refused(refused()), false),
            Op::CommitExpired => {
                world.commit_failed(&Unanswered::refused(FsError::SessionExpired), false);
            }
            Op::CommitUnsent => {
                world.commit_failed(&Unanswered::refused(unreachable()), false);
            }
            Op::CommitUnknown(error, executed) => {
                world.commit_failed(&Unanswered::unknown(error), executed);
            }
        }
        world.advance();
        world.check()?;
    }
    prop_assert_eq!(world.heal(), Ok(()));
    prop_assert_eq!(&world.namenode, &world.model);
    prop_assert_eq!((world.file.held_bytes(), world.appended.len()), (0, 0));
    for flush in &world.flushes {
        prop_assert!(world.file.flushed(flush).is_some(), "it waits for nothing");
    }
    Ok(())
}

proptest! {
    /// Whatever datanodes and the namenode do, a reader of this client sees the written data, and
    /// the next undisturbed flush makes all of it part of the file.
    #[test]
    fn writes_survive_failures(ops in prop::collection::vec(op(false), 1..100)) {
        run(ops)?;
    }

    /// The same for appends: each is executed once, whole and in order, or is reported as lost if
    /// the outcome of its commit is unknown.
    #[test]
    fn appends_are_executed_once(ops in prop::collection::vec(op(true), 1..100)) {
        run(ops)?;
    }
}

#[test]
fn a_flush_that_demands_durability_makes_piece_and_commit_durable() {
    let mut file = DirtyFile::new(FILE);
    file.set_rules(Some(RULES));
    let when = moment();
    file.write(0, Bytes::from_static(b"abc"), &Credentials::root(), when);
    assert!(file.advance(false, RequestId::NONE).sends.is_empty());
    let flush = file.begin_flush(true, RequestId::NONE);
    let mut actions = file.advance(false, RequestId::NONE);
    let send = actions.sends.pop().expect("to be sent");
    assert!(send.sync && !send.bulk && actions.commits.is_empty());
    let place = Place {
        block: BlockId(1),
        block_offset: 0,
    };
    file.piece_written(Order::File, send.pieces[0].id, place);
    let commit = file.advance(false, RequestId::NONE).commits.pop();
    assert!(commit.expect("to be committed").durable);
    assert_eq!(file.flushed(&flush), None);
    file.commit_done(Order::File);
    file.advance(false, RequestId::NONE);
    assert_eq!(file.flushed(&flush), Some(Ok(())));
    // Later data does not inherit it.
    file.write(0, Bytes::from_static(b"abc"), &Credentials::root(), when);
    file.begin_flush(false, RequestId::NONE);
    let send = file.advance(false, RequestId::NONE).sends.pop();
    assert!(!send.expect("to be sent").sync);
}

#[test]
fn a_flush_ends_while_others_write_and_flush() {
    for appends in [false, true] {
        for flushes in [false, true] {
            let mut world = World::new();
            let write = |world: &mut World, step: usize| {
                let data = vec![step as u8; 10];
                if appends {
                    world.append(data);
                } else {
                    world.write(step * 10, data);
                }
            };
            write(&mut world, 0);
            world.flush();
            world.advance();
            let mut step = 0;
            let ended = loop {
                assert!(step < 10, "it does not end");
                step += 1;
                write(&mut world, step);
                if flushes {
                    world.flush();
                }
                world.advance();
                if let Some(ended) = world.file.flushed(&world.flushes[0]) {
                    break ended;
                }
                if step % 2 == 1 {
                    world.acknowledge(0);
                } else {
                    world.commit_done();
                }
                world.advance();
            };
            assert_eq!(ended, Ok(()));
            assert!(world.file.held_bytes() > 0, "nothing was written after it");
            assert_eq!(world.heal(), Ok(()));
            assert_eq!(world.namenode, world.model);
        }
    }
}

/// Packets that are filled in bulk may end within an append.
#[test]
fn appends_in_bulk_are_committed_whole() {
    let mut world = World::new();
    for step in 1..=13 {
        world.append(vec![step; 3_000_001]);
        world.advance();
        while !world.in_flight.is_empty() {
            world.acknowledge(0);
            world.advance();
        }
        world.commit_done();
    }
    assert!(world.namenode.len() >= 32 << 20, "no flush was wanted");
    assert_eq!(world.heal(), Ok(()));
    assert_eq!(world.namenode.len(), 13 * 3_000_001);
}

/// Creates a file with one append whose commit is in flight, and another one after it.
fn appending() -> World {
    let mut world = World::new();
    world.append(vec![1; 10]);
    world.flush();
    world.advance();
    world.acknowledge(0);
    world.advance();
    assert_eq!(world.commits.len(), 1);
    world.append(vec![2; 20]);
    world
}

#[test]
fn appends_whose_commit_was_not_executed_are_tried_again() {
    for error in [unreachable(), FsError::SessionExpired.into()] {
        let mut world = appending();
        world.commit_failed(&Unanswered::refused(error), false);
        assert_eq!(world.file.held_bytes(), 30);
        assert_eq!(world.heal(), Ok(()));
        assert_eq!(world.namenode, [vec![1u8; 10], vec![2; 20]].concat());
    }
}

#[test]
fn of_appends_only_those_are_given_up_whose_commit_may_have_been_executed() {
    for error in [unreachable(), FsError::SessionExpired.into()] {
        for executed in [false, true] {
            let mut world = appending();
            world.commit_failed(&Unanswered::unknown(error.clone()), executed);
            let flushed = world.file.flushed(&world.flushes[0]);
            let is_reported = matches!(flushed, Some(Err(ClientError::DataLost { .. })));
            assert!(is_reported, "{flushed:?}");
            assert_eq!(world.file.held_bytes(), 20);
            assert_eq!(world.heal(), Ok(()));
            let first = vec![1u8; if executed { 10 } else { 0 }];
            assert_eq!(world.namenode, [first, vec![2; 20]].concat());
        }
    }
}

#[test]
fn data_of_a_closed_file_is_given_up_after_some_failures() {
    let mut world = World::new();
    world.write(0, vec![1; 10]);
    assert!(world.file.handle_closed());
    assert!(!world.file.may_release_hold(), "there is data in memory");
    for failure in 1..=FAILURES_UNSEEN_MAX {
        assert!(world.file.held_bytes() > 0, "before failure {failure}");
        world.flush();
        world.advance();
        world.fail_pieces();
    }
    assert_eq!(world.file.held_bytes(), 0);
    assert_eq!(world.file.losses().1, Some(refused()));
    let actions = world.file.advance(false, RequestId::NONE);
    assert_eq!(actions.holds_owed, 1);
    assert!(world.file.is_unused());
}

#[test]
fn a_close_returns_early_only_when_one_commit_follows() {
    let mut world = World::new();
    assert_eq!(world.file.close_early(), Early::No);
    world.write(0, vec![1; 10]);
    assert_eq!(world.file.close_early(), Early::First);
    assert_eq!(world.file.close_early(), Early::Again);
    world.flush();
    world.advance();
    assert_eq!(world.file.close_early(), Early::No, "it is on its way");
    world.acknowledge(0);
    world.advance();
    world.commit_done();
    assert!(world.file.is_closed_early());
    assert!(
        world
            .file
            .advance(false, RequestId::NONE)
            .is_no_longer_early
    );
    world.write(0, vec![1; 10]);
    world.write(100, vec![1; 10]);
    assert_eq!(world.file.close_early(), Early::No, "two segments");
}

#[test]
fn a_failure_of_what_was_cut_off_is_none_of_what_was_written_since() {
    let mut world = World::new();
    world.write(0, vec![1; 10]);
    world.flush();
    world.advance();
    world.file.cut(0, Timestamp(2));
    let cut_off = std::mem::take(&mut world.in_flight);
    world.model.clear();
    world.write(0, vec![2; 10]);
    world.flush();
    world.advance();
    let pieces: Vec<_> = cut_off.iter().map(|(order, it)| (*order, it.id)).collect();
    world.file.pieces_failed(&pieces, &refused(), world.now);
    assert_eq!(world.file.flushed(&world.flushes[1]), None);
    assert_eq!(world.heal(), Ok(()));
    assert_eq!(world.namenode, world.model);
}

#[test]
fn a_flush_whose_data_is_to_be_sent_again_asks_for_the_rules_that_were_forgotten() {
    for found in [Ok(RULES), Err(unreachable())] {
        let mut world = World::new();
        world.write(0, vec![1; 10]);
        world.flush();
        world.advance();
        world.acknowledge(0);
        world.file.set_rules(None);
        world.lose_block();
        let asks = |file: &mut DirtyFile| file.advance(false, RequestId::NONE).needs_rules;
        let question = asks(&mut world.file).expect("it is not known");
        assert_eq!(asks(&mut world.file), None, "once");
        world.file.rules_found(question, found.clone(), world.now);
        let expected = found.is_err().then(|| Err(unreachable()));
        assert_eq!(world.file.flushed(&world.flushes[0]), expected);
        world.file.set_rules(Some(RULES));
        assert_eq!(world.heal(), Ok(()));
        assert_eq!(world.namenode, world.model);
    }
}

#[test]
fn a_failure_is_forgotten_once_everything_is_stored() {
    let mut world = World::new();
    world.write(0, vec![1; 10]);
    world.flush();
    world.advance();
    world.fail_pieces();
    assert_eq!(world.heal(), Ok(()));
    world.write(0, vec![2; 10]);
    assert_eq!(world.file.close_early(), Early::First);
    assert!(world.file.handle_closed());
    world.file.lost_last_name();
    assert_eq!((world.file.held_bytes(), world.file.losses().0), (10, 0));
}
