//! The usage of each directory tree, and the quotas that limit it.
//!
//! Every directory keeps the number of bytes and inodes below it, so that a change costs a walk up to
//! the root, however large the tree is. A file with several names counts once: in the directory with the
//! smallest inode number among those that name it, so that a recount gives the same result.
//!
//! A removal frees no quota while the space is still used: an inode that is in the trash, or that has no
//! name but is held open, counts in the directory that it was in. If that directory is removed itself, it
//! stays in the table until nothing counts in it any more. Before edition [`ACCOUNTS_KEPT`], such inodes
//! did not count there.

mod restore;

use std::collections::BTreeMap;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::planted::{self, Bug};

use super::edition::ACCOUNTS_KEPT;
use super::extents::Piece;
use super::inode::{Body, Inode};
use super::{Call, Namespace};

/// The directory recorded for inodes without a name that belong to no user: they count nowhere.
pub(super) const NOWHERE: InodeId = InodeId(0);

/// Amounts that count against quotas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Bytes of blocks that files use, without replication; shared bytes count once for each use.
    pub bytes: u64,
    /// Inodes of all kinds.
    pub inodes: u64,
}

impl Usage {
    /// The usage of a file without data, or of any other kind of inode.
    pub const EMPTY_INODE: Self = Self {
        bytes: 0,
        inodes: 1,
    };

    /// The usage after a change. Panics if more is subtracted than was added before.
    #[track_caller]
    pub fn with(self, change: Change) -> Self {
        let bytes = self.bytes.checked_add_signed(change.bytes);
        let inodes = self.inodes.checked_add_signed(change.inodes);
        match (bytes, inodes) {
            (Some(bytes), Some(inodes)) => Self { bytes, inodes },
            _ => panic!("{self:?} of a directory cannot change by {change:?}"),
        }
    }

    pub fn added(self) -> Change {
        Change {
            bytes: self.bytes.cast_signed(),
            inodes: self.inodes.cast_signed(),
        }
    }

    fn removed(self) -> Change {
        Change {
            bytes: -self.bytes.cast_signed(),
            inodes: -self.inodes.cast_signed(),
        }
    }
}

/// A change of a [`Usage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    pub bytes: i64,
    pub inodes: i64,
}

/// A change of usage directly in a directory; it also counts in all directories above.
pub(super) type Charge = (InodeId, Change);

/// The quotas of one directory; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Quota {
    pub bytes: Option<u64>,
    pub inodes: Option<u64>,
}

impl Quota {
    /// Whether no quota is set.
    pub fn is_unlimited(self) -> bool {
        self == Self::default()
    }

    fn refuses(self, used: Usage, change: Change) -> bool {
        let beyond = |quota: Option<u64>, used: u64, change: i64| {
            let after = used.checked_add_signed(change);
            change > 0 && quota.is_some_and(|quota| after.is_none_or(|after| after > quota))
        };
        beyond(self.bytes, used.bytes, change.bytes)
            || beyond(self.inodes, used.inodes, change.inodes)
    }
}

/// The planned change of where an inode counts when it gains or loses a name.
pub(super) struct Move {
    ino: InodeId,
    /// The directories that name it afterwards, ascending, one for each name.
    parents: Vec<InodeId>,
    /// The directory in which it counts afterwards; without a name, that in which it counted before.
    counted_in: InodeId,
    /// Whether it has no name afterwards, but still counts.
    is_kept: bool,
    pub charges: Vec<Charge>,
}

impl Move {
    /// Adjusts the charges to an inode that counts for more, or less, than when the move was planned.
    pub fn change_weight(&mut self, change: Change) {
        for (_, charge) in &mut self.charges {
            let sign = charge.inodes.signum();
            charge.bytes += sign * change.bytes;
            charge.inodes += sign * change.inodes;
        }
    }
}

impl Namespace {
    /// Whether inodes in the trash, or without a name, count in the directory that they were in.
    fn keeps_accounts(&self) -> bool {
        self.edition >= ACCOUNTS_KEPT
    }

    /// The directory in which an inode counts that `dir` names, or named last. An inode in the trash counts
    /// in the directory that it was in, as long as that exists. (A directory in which something counts is
    /// kept; but a file that counts through another of its names does not keep the one that it was removed
    /// from.)
    fn counted_by(&self, ino: InodeId, dir: InodeId) -> InodeId {
        let trashed = self.trash.is_part(dir).then(|| self.trash.get(ino));
        let counted_in = trashed.flatten().and_then(|it| it.counted_in);
        counted_in
            .filter(|&before| self.is_directory_there(before))
            .unwrap_or(dir)
    }

    /// Whether a directory is in the table, with or without a name.
    pub(super) fn is_directory_there(&self, ino: InodeId) -> bool {
        self.inodes.get(ino).is_ok_and(Inode::is_directory)
    }

    /// The directory in which an inode counts; none for the root, and for inodes that do not count.
    pub(super) fn counted_in(&self, ino: InodeId) -> Option<InodeId> {
        let inode = self.inodes.get(ino).ok()?;
        let counts_nameless = self.keeps_accounts() && inode.parent != NOWHERE;
        let counts = ino != InodeId::ROOT && (inode.nlink > 0 || counts_nameless);
        counts.then(|| self.counted_by(ino, inode.parent))
    }

    /// The directories in which an inode counts that counts in `dir`: `dir`, and those in which `dir` counts.
    fn accounts_from(&self, dir: InodeId) -> impl Iterator<Item = InodeId> {
        std::iter::successors(Some(dir), |&ino| self.counted_in(ino))
    }

    /// Whether the contents of `dir` count in `above`.
    pub(super) fn counts_within(&self, dir: InodeId, above: InodeId) -> bool {
        self.accounts_from(dir).any(|ino| ino == above)
    }

    /// The total change that charges make to the usage of a directory.
    pub(super) fn change_within(&self, dir: InodeId, charges: &[Charge]) -> Change {
        let within = (charges.iter()).filter(|charge| self.counts_within(charge.0, dir));
        within.fold(Change::default(), |sum, (_, change)| Change {
            bytes: sum.bytes + change.bytes,
            inodes: sum.inodes + change.inodes,
        })
    }

    /// The bytes and inodes for which an inode counts, itself included.
    pub(super) fn weight(inode: &Inode) -> Usage {
        match &inode.body {
            Body::Regular(file) => Usage {
                bytes: file.extents.allocated_bytes(),
                inodes: 1,
            },
            Body::Directory(directory) => Usage {
                inodes: directory.used.inodes + 1,
                ..directory.used
            },
            _ => Usage::EMPTY_INODE,
        }
    }

    /// Plans the loss of a name in one directory, the gain of one in another, or both. `stays`: whether the
    /// inode continues to exist without a name.
    pub(super) fn plan_move(
        &self,
        ino: InodeId,
        lost: Option<InodeId>,
        gained: Option<InodeId>,
        stays: bool,
    ) -> Move {
        let counted_by = |parent| self.counted_by(ino, parent);
        self.plan_move_counted(ino, lost, gained, stays, &counted_by)
    }

    /// Plans the permanent loss of a name by a call.
    pub(super) fn plan_removal(&self, call: &Call, ino: InodeId, lost: InodeId) -> Move {
        let stays = call.held_elsewhere || self.is_counted_in(self.inodes.known(ino));
        self.plan_move(ino, Some(lost), None, stays)
    }

    /// Plans a move to the directory `trash` of the trash, after which the inode counts in `counted_in`.
    pub(super) fn plan_move_to_trash(
        &self,
        ino: InodeId,
        lost: InodeId,
        gained: Option<InodeId>,
        (trash, counted_in): (InodeId, InodeId),
    ) -> Move {
        let counted_by = |parent| if parent == trash { counted_in } else { parent };
        self.plan_move_counted(ino, Some(lost), gained, true, &counted_by)
    }

    fn plan_move_counted(
        &self,
        ino: InodeId,
        lost: Option<InodeId>,
        gained: Option<InodeId>,
        stays: bool,
        counted_by: &dyn Fn(InodeId) -> InodeId,
    ) -> Move {
        let inode = self.inodes.known(ino);
        let mut parents = match self.further_names.get(&ino) {
            Some(parents) => {
                assert!(parents.len() > 1, "{parents:?} is one name of inode {ino}");
                parents.clone()
            }
            None => vec![inode.parent],
        };
        let before = self.counted_by(ino, parents[0]);
        if let Some(lost) = lost {
            match parents.binary_search(&lost) {
                Ok(place) => _ = parents.remove(place),
                Err(_) => panic!("{parents:?} name inode {ino}, not {lost}, which is to lose it"),
            }
        }
        if let Some(gained) = gained {
            let place = parents.partition_point(|&parent| parent < gained);
            parents.insert(place, gained);
        }
        let stays = stays && self.keeps_accounts();
        let after = match parents.first() {
            Some(&first) => Some(counted_by(first)),
            None => stays.then_some(before),
        };
        let weight = Self::weight(inode);
        let mut charges = Vec::new();
        if after != Some(before) {
            charges.push((before, weight.removed()));
            charges.extend(after.map(|dir| (dir, weight.added())));
        }
        Move {
            ino,
            counted_in: after.unwrap_or(before),
            is_kept: parents.is_empty() && stays,
            parents,
            charges,
        }
    }

    /// Whether something counts in a directory, though it may be empty.
    pub(super) fn is_counted_in(&self, inode: &Inode) -> bool {
        self.is_counted_after(inode, Change::default())
    }

    /// Whether something counts in a directory after a change of its usage.
    pub(super) fn is_counted_after(&self, inode: &Inode, change: Change) -> bool {
        let directory = inode.directory();
        directory.is_ok_and(|it| it.used.with(change) != Usage::default())
    }

    /// Carries out a plan. The parent of an inode that has no name any more is the directory in which it
    /// counts; so the `..` of a directory that is only held open leads there.
    pub(super) fn carry_out(&mut self, planned: Move) {
        self.charge(&planned.charges);
        self.inodes.known_mut(planned.ino).parent = match planned.parents.first() {
            Some(&first) => first,
            None => planned.counted_in,
        };
        if planned.is_kept {
            self.orphans.insert(planned.ino);
        }
        let is_in_trash = |dir: &InodeId| self.trash.is_part(*dir);
        if !planned.parents.iter().any(is_in_trash) {
            self.trash.remove(planned.ino);
        }
        if planned.parents.len() > 1 {
            self.further_names.insert(planned.ino, planned.parents);
        } else {
            self.further_names.remove(&planned.ino);
        }
    }

    /// Ends the counting of an inode without a name that is being removed.
    pub(super) fn uncharge_nameless(&mut self, ino: InodeId) {
        let Some(dir) = self.counted_in(ino) else {
            return;
        };
        let inode = self.inodes.known(ino);
        assert_eq!(
            inode.nlink, 0,
            "inode {ino} has a name, but is to count no more"
        );
        let change = Self::weight(inode).removed();
        self.charge(&[(dir, change)]);
    }

    /// Applies changes to their directories and to all above. One change may subtract what another one adds,
    /// so additions come first.
    pub(super) fn charge(&mut self, charges: &[Charge]) {
        let is_subtraction = |change: Change| change.bytes < 0 || change.inodes < 0;
        for subtracts in [false, true] {
            for &(dir, change) in charges {
                if is_subtraction(change) == subtracts {
                    self.charge_one(dir, change);
                }
            }
        }
    }

    fn charge_one(&mut self, dir: InodeId, change: Change) {
        let mut next = Some(dir);
        while let Some(ino) = next {
            next = self.counted_in(ino);
            let directory = self.inodes.known_directory_mut(ino);
            directory.used = directory.used.with(change);
            if directory.used == Usage::default() && self.unheld.contains(&ino) {
                self.emptied.push(ino);
            }
        }
    }

    /// Refuses charges that would bring a directory above its quota, or further above it.
    pub(super) fn check_quotas(&self, charges: &[Charge]) -> Result<(), FsError> {
        let grows = charges
            .iter()
            .any(|(_, change)| change.bytes > 0 || change.inodes > 0);
        if self.directories_with_quota == 0 || !grows || planted::is(Bug::IgnoresQuotas) {
            return Ok(());
        }
        let mut changes: BTreeMap<InodeId, Change> = BTreeMap::new();
        for &(dir, change) in charges {
            for ino in self.accounts_from(dir) {
                let sum = changes.entry(ino).or_default();
                sum.bytes += change.bytes;
                sum.inodes += change.inodes;
            }
        }
        for (ino, change) in changes {
            let directory = self.inodes.known_directory(ino);
            if directory.quota.refuses(directory.used, change) {
                return Err(FsError::QuotaExceeded);
            }
        }
        Ok(())
    }

    /// Checks the quotas for pieces that are written to a file, where they replace the data in their
    /// ranges and in `cleared`.
    pub(super) fn check_growth(
        &self,
        ino: InodeId,
        pieces: &[Piece],
        cleared: (u64, u64),
    ) -> Result<(), FsError> {
        if self.directories_with_quota == 0 {
            return Ok(());
        }
        let Some(counted_in) = self.counted_in(ino) else {
            return Ok(());
        };
        let extents = &self.inodes.get(ino)?.file()?.extents;
        let mut ranges: Vec<_> = pieces
            .iter()
            .map(|piece| (piece.file_offset, piece.file_end()))
            .collect();
        ranges.sort_unstable();
        let written: u64 = joined(&ranges).map(|(from, to)| to - from).sum();
        ranges.push(cleared);
        ranges.sort_unstable();
        let hidden: u64 = joined(&ranges)
            .map(|(from, to)| extents.covered_bytes(from, to))
            .sum();
        let change = Change {
            bytes: written.cast_signed() - hidden.cast_signed(),
            inodes: 0,
        };
        self.check_quotas(&[(counted_in, change)])
    }

    /// Whether a quota limits the bytes of a file or directory.
    #[must_use]
    pub fn is_limited(&self, ino: InodeId) -> bool {
        self.directories_with_quota > 0 && self.room(ino).is_ok_and(|room| room.bytes.is_some())
    }

    /// Total and free bytes and inodes for a file or for the contents of a directory, as far as quotas
    /// limit them.
    pub(super) fn room(&self, ino: InodeId) -> Result<Room, FsError> {
        let mut room = Room::default();
        let inode = self.inodes.get(ino)?;
        let from = if inode.is_directory() {
            Some(ino).filter(|_| inode.nlink > 0)
        } else {
            self.counted_in(ino)
        };
        let Some(from) = from.filter(|_| self.directories_with_quota > 0) else {
            return Ok(room);
        };
        for dir in self.accounts_from(from) {
            let directory = self.inodes.known_directory(dir);
            narrow(&mut room.bytes, directory.quota.bytes, directory.used.bytes);
            narrow(
                &mut room.inodes,
                directory.quota.inodes,
                directory.used.inodes,
            );
        }
        Ok(room)
    }

    /// Checks that data of a file, or of files in a directory, could be stored: that quotas leave room for
    /// it, or that the file has data which can be overwritten.
    ///
    /// An inode that was removed passes: the files of a session share blocks, and the commit of this one
    /// reports the error.
    ///
    /// # Errors
    /// [`FsError::QuotaExceeded`].
    pub fn check_room_for_data(&self, ino: InodeId) -> Result<(), FsError> {
        let Ok(inode) = self.inodes.get(ino) else {
            return Ok(());
        };
        let file = inode.file();
        let has_data = file.is_ok_and(|file| file.extents.allocated_bytes() > 0);
        match self.room(ino)?.bytes {
            Some((_, 0)) if !has_data => Err(FsError::QuotaExceeded),
            _ => Ok(()),
        }
    }
}

/// Total and free amounts as limited by quotas; none where no quota is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    pub bytes: Option<(u64, u64)>,
    pub inodes: Option<(u64, u64)>,
}

/// Takes a quota of a directory further up into account: the nearest quota is the total, and the tightest
/// one determines what is free.
fn narrow(room: &mut Option<(u64, u64)>, quota: Option<u64>, used: u64) {
    let Some(quota) = quota else {
        return;
    };
    let free = quota.saturating_sub(used);
    *room = Some(match *room {
        None => (quota, free),
        Some((total, nearer)) => (total, free.min(nearer)),
    });
}

/// Joins ascending ranges that overlap or touch.
fn joined(ranges: &[(u64, u64)]) -> impl Iterator<Item = (u64, u64)> {
    let mut rest = ranges.iter().copied().peekable();
    std::iter::from_fn(move || {
        let (from, mut to) = rest.next()?;
        while let Some((_, end)) = rest.next_if(|next| next.0 <= to) {
            to = to.max(end);
        }
        Some((from, to))
    })
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::meta::RenameMode;

    use super::super::tests::Fixture;

    /// The exchange subtracts from `/far` what it has added before: the file, which, once it has lost its
    /// first name, counts in the directory that leaves.
    #[test]
    fn a_file_may_come_to_count_in_the_directory_that_it_changes_places_with() {
        let mut fixture = Fixture::new();
        for path in ["/near", "/inner", "/far", "/far/tree"] {
            fixture.dir(path);
        }
        fixture
            .rename("/inner", "/far/tree/inner", RenameMode::Replace)
            .unwrap();
        fixture.file("/near/file");
        fixture.link("/near/file", "/far/tree/inner/file").unwrap();
        // Checks all accounts.
        fixture
            .rename("/far/tree", "/near/file", RenameMode::Exchange)
            .unwrap();
    }
}
