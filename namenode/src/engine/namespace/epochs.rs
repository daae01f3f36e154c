//! The timeline: the epochs of this namespace, and which ids were allocated in each.
//!
//! Ids of blocks and sessions that are allocated in an epoch are allocated in no other, so that a
//! namespace that was restored from a copy allocates none a second time. The generations of inodes begin
//! at the number of the epoch, but may run ahead of later ones when slots are reused very often: then a
//! restored copy can allocate an inode id again (see `docs/adr/0017-timeline-of-the-namenode.md`).

use std::ops::RangeInclusive;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::timeline::{Epoch, Position};
use serde::{Deserialize, Serialize};

use super::Namespace;
use super::command::Outcome;

/// The most unsettled blocks that one epoch remembers: they fit into a frame of a snapshot.
const UNSETTLED_MAX: usize = 65_536;

/// An epoch of the timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochView {
    /// The epoch; none for the time before the first epoch of a cluster made by an earlier release.
    pub epoch: Option<Epoch>,
    /// The first record of the epoch: the one that began it, or the first entry of the term in which it
    /// began.
    pub first_record: u64,
    /// An operator began it without the records that other timelines wrote before.
    pub gives_up: bool,
    /// The blocks that it allocates are greater than this.
    pub blocks_after: u64,
    /// The last block that it allocated, or `blocks_after` if none; in the current epoch, set only when the
    /// epoch is over.
    pub last_block: u64,
    /// If `gives_up`: the blocks that sessions were writing when it began. Other timelines may have more
    /// data in them, so it is not certain that they are garbage once they are freed.
    pub unsettled: Vec<BlockId>,
}

impl Namespace {
    /// Begins an epoch whose first record is `first_record`.
    pub(super) fn begin_epoch(
        &mut self,
        epoch: Epoch,
        first_record: u64,
        gives_up: bool,
    ) -> Result<Outcome, FsError> {
        let before = self.epochs.last().and_then(|it| it.epoch);
        let is_later = before.is_none_or(|it| it.number < epoch.number)
            && epoch.number <= Epoch::NUMBER_MAX
            && epoch.ids_after() >= self.blocks.last().max(self.sessions.last)
            && (self.epochs.last()).is_none_or(|it| it.first_record < first_record);
        if !is_later {
            return Err(FsError::Internal(format!(
                "epoch {epoch} at record {first_record} does not follow those before it"
            )));
        }
        let last_block = self.blocks.last();
        let blocks_after = self.epochs.last().map_or(0, |it| it.blocks_after);
        assert!(
            blocks_after <= last_block,
            "block {last_block} was allocated last, but an epoch began after {blocks_after}"
        );
        match self.epochs.last_mut() {
            Some(current) => current.last_block = last_block,
            // Stands for the blocks that were allocated before there were epochs.
            None => self.epochs.push(EpochView {
                epoch: None,
                first_record: 0,
                gives_up: false,
                blocks_after: 0,
                last_block,
                unsettled: Vec::new(),
            }),
        }
        let unsettled = if gives_up {
            self.blocks.being_written().take(UNSETTLED_MAX).collect()
        } else {
            Vec::new()
        };
        self.epochs.push(EpochView {
            epoch: Some(epoch),
            first_record,
            gives_up,
            blocks_after: epoch.ids_after(),
            last_block: epoch.ids_after(),
            unsettled,
        });
        self.enter_current_epoch();
        Ok(Outcome::Done)
    }

    /// Allocates ids in the range of the current epoch from now on.
    fn enter_current_epoch(&mut self) {
        if let Some(epoch) = self.epoch() {
            self.blocks.set_last(epoch.ids_after());
            self.sessions.last = epoch.ids_after();
            self.inodes.raise_generations(epoch.number);
        }
    }

    /// Sets the epochs from a snapshot, in order. Returns false when they contradict each other.
    pub(super) fn restore_epochs(&mut self, epochs: Vec<EpochView>) -> bool {
        let ordered = epochs.windows(2).all(|pair| {
            pair[0].epoch.map(|it| it.number) < pair[1].epoch.map(|it| it.number)
                && pair[0].first_record < pair[1].first_record
                && pair[0].last_block <= pair[1].blocks_after
        });
        let last = self.blocks.last();
        let within = |epoch: Epoch| (epoch.ids_after()..=epoch.last_block().0).contains(&last);
        let fits = epochs.last().and_then(|it| it.epoch).is_none_or(within);
        let sound = epochs.iter().all(|it| {
            it.blocks_after <= it.last_block
                && it
                    .epoch
                    .is_none_or(|epoch| epoch.ids_after() == it.blocks_after)
        });
        self.epochs = epochs;
        if let Some(epoch) = self.epoch() {
            self.inodes.raise_generations(epoch.number);
        }
        ordered && sound && fits
    }

    /// The current epoch; none before the first.
    #[must_use]
    pub fn epoch(&self) -> Option<Epoch> {
        self.epochs.last()?.epoch
    }

    /// The epochs in order, the current one last.
    #[must_use]
    pub fn epochs(&self) -> &[EpochView] {
        &self.epochs
    }

    /// The number of blocks that the current epoch can still allocate.
    #[must_use]
    pub fn blocks_left(&self) -> u64 {
        self.epoch().map_or(u64::MAX, |epoch| {
            let (last, end) = (self.blocks.last(), epoch.last_block().0);
            assert!(
                last <= end,
                "block {last} was allocated, {end} is the last of {epoch}"
            );
            end - last
        })
    }

    /// The number of sessions that can still be opened in the current epoch; also 0 when an earlier release,
    /// which did not enforce the bound, has opened more.
    #[must_use]
    pub fn sessions_left(&self) -> u64 {
        self.epoch().map_or(u64::MAX, |epoch| {
            epoch.last_block().0.saturating_sub(self.sessions.last)
        })
    }

    /// The number that the next epoch must exceed, so that it shares no ids with another one: the number of
    /// the current epoch, or that of the epoch whose ids the sessions of an earlier release have reached.
    /// None before the first epoch.
    #[must_use]
    pub fn last_number(&self) -> Option<u32> {
        let reached = Epoch::number_of(BlockId(self.sessions.last));
        Some(self.epoch()?.number.max(reached))
    }

    /// The blocks that this timeline has allocated, in ranges. A block outside of them was allocated by a
    /// namenode that knew more, if at all; a block in one of them that no longer exists was freed.
    pub fn allocated_ranges(&self) -> impl Iterator<Item = RangeInclusive<BlockId>> {
        let (last, epochs) = (self.blocks.last(), &self.epochs);
        let without_epochs = epochs.is_empty().then_some((0, last));
        let with = epochs.iter().enumerate().map(move |(index, it)| {
            let is_current = index + 1 == epochs.len();
            let end = if is_current { last } else { it.last_block };
            (it.blocks_after, end)
        });
        without_epochs
            .into_iter()
            .chain(with)
            .map(|(after, end)| BlockId(after + 1)..=BlockId(end))
    }

    /// The blocks in these ranges that files of another timeline may use, although they were freed here.
    pub fn unsettled_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.epochs
            .iter()
            .flat_map(|it| it.unsettled.iter().copied())
    }

    /// Whether this timeline, whose last record is `last_record`, includes a position, or has given up the
    /// records up to it.
    #[must_use]
    pub fn has_settled(&self, position: Position, last_record: u64) -> bool {
        let is_given_up = |it: &EpochView| {
            let number = it.epoch.map(|epoch| epoch.number);
            it.gives_up && number > Some(position.epoch.number)
        };
        self.epochs.iter().any(is_given_up) || self.has_been_at(position, last_record)
    }

    /// The last record that this timeline, whose last record is `last_record`, may share with one whose last epoch is
    /// `epoch`: records written here in later epochs, or in others of the same number, are not shared.
    #[must_use]
    pub fn shared_up_to(&self, epoch: Epoch, last_record: u64) -> u64 {
        let is_other = |it: &EpochView| {
            it.epoch
                .is_some_and(|here| here.number >= epoch.number && here != epoch)
        };
        let other = self.epochs.iter().find(|it| is_other(it));
        other.map_or(last_record, |it| it.first_record.saturating_sub(1))
    }

    /// Whether this timeline, whose last record is `last_record`, includes a position.
    #[must_use]
    pub fn has_been_at(&self, position: Position, last_record: u64) -> bool {
        let of_it = |it: &EpochView| it.epoch == Some(position.epoch);
        let Some(index) = self.epochs.iter().position(of_it) else {
            return false;
        };
        match self.epochs.get(index + 1) {
            Some(next) => position.record < next.first_record,
            None => position.record <= last_record,
        }
    }
}
