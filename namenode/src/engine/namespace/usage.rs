//! What is below each directory, and the quotas that limit it.
//!
//! Every directory knows how many bytes and inodes are below it, so that a change costs a walk up to
//! the root, however much is there. A file with several names counts once: in the directory with the
//! smallest number among those that name it, so that adding up anew gives the same.

use std::collections::BTreeMap;

use harvestfs_protocol::{error::FsError, ids::InodeId};

use super::{
    Namespace,
    extents::Piece,
    inode::{Body, Inode, parts},
};

/// What counts against quotas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Bytes of blocks that files use, each use counted, one copy.
    pub bytes: u64,
    /// Inodes of all kinds.
    pub inodes: u64,
}

impl Usage {
    /// A file without data, or anything else that has none.
    pub const EMPTY_INODE: Self = Self {
        bytes: 0,
        inodes: 1,
    };

    fn with(self, change: Change) -> Self {
        Self {
            bytes: self.bytes.saturating_add_signed(change.bytes),
            inodes: self.inodes.saturating_add_signed(change.inodes),
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

/// A change of what is in a directory itself; it counts in those above too.
pub(super) type Charge = (InodeId, Change);

/// The quotas of one directory; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Quota {
    pub bytes: Option<u64>,
    pub inodes: Option<u64>,
}

impl Quota {
    /// Whether there is none.
    pub fn is_unlimited(self) -> bool {
        self == Self::default()
    }

    fn refuses(self, used: Usage, change: Change) -> bool {
        let beyond = |quota: Option<u64>, used: u64, change: i64| {
            change > 0 && quota.is_some_and(|quota| used.saturating_add_signed(change) > quota)
        };
        beyond(self.bytes, used.bytes, change.bytes)
            || beyond(self.inodes, used.inodes, change.inodes)
    }
}

/// What becomes of an inode's place in the accounts when it gets or loses a name.
pub(super) struct Move {
    ino: InodeId,
    /// The directories that name it then, ascending, one for each name.
    parents: Vec<InodeId>,
    pub charges: Vec<Charge>,
}

impl Move {
    /// What moves counts for more, or less, than when it was planned.
    pub fn change_weight(&mut self, change: Change) {
        for (_, charge) in &mut self.charges {
            let sign = charge.inodes.signum();
            charge.bytes += sign * change.bytes;
            charge.inodes += sign * change.inodes;
        }
    }
}

impl Namespace {
    /// What charges do to a directory and all below, together.
    pub(super) fn change_within(&self, dir: InodeId, charges: &[Charge]) -> Change {
        let is_within = |charge: &&Charge| self.ancestors(charge.0).any(|(ino, _)| ino == dir);
        let within = charges.iter().filter(is_within);
        within.fold(Change::default(), |sum, (_, change)| Change {
            bytes: sum.bytes + change.bytes,
            inodes: sum.inodes + change.inodes,
        })
    }

    /// Bytes and inodes that an inode counts for, itself included.
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

    /// What happens when an inode loses a name in one directory, or gets one in another, or both.
    pub(super) fn plan_move(
        &self,
        ino: InodeId,
        lost: Option<InodeId>,
        gained: Option<InodeId>,
    ) -> Result<Move, FsError> {
        let inode = self.inodes.get(ino)?;
        let mut parents = match self.further_names.get(&ino) {
            Some(parents) => parents.clone(),
            None => vec![inode.parent],
        };
        let before = parents.first().copied();
        if let Some(place) = lost.and_then(|lost| parents.binary_search(&lost).ok()) {
            parents.remove(place);
        }
        if let Some(gained) = gained {
            let place = parents.partition_point(|&parent| parent < gained);
            parents.insert(place, gained);
        }
        let after = parents.first().copied();
        let weight = Self::weight(inode);
        let mut charges = Vec::new();
        if before != after {
            charges.extend(before.map(|dir| (dir, weight.removed())));
            charges.extend(after.map(|dir| (dir, weight.added())));
        }
        Ok(Move {
            ino,
            parents,
            charges,
        })
    }

    /// Does what was planned. The parent of what has no name any more stays: that is where `..` of a
    /// directory leads that is only held.
    pub(super) fn carry_out(&mut self, planned: Move) {
        self.charge(&planned.charges);
        if let (Ok(inode), Some(&first)) =
            (self.inodes.get_mut(planned.ino), planned.parents.first())
        {
            inode.parent = first;
        }
        if let Some(trash) = self.trash.directory
            && !planned.parents.contains(&trash)
        {
            self.trash.remove(planned.ino);
        }
        if planned.parents.len() > 1 {
            self.further_names.insert(planned.ino, planned.parents);
        } else {
            self.further_names.remove(&planned.ino);
        }
    }

    /// Counts changes in their directories and in all above.
    pub(super) fn charge(&mut self, charges: &[Charge]) {
        for &(dir, change) in charges {
            let mut next = Some(dir);
            while let Some(Inode {
                parent,
                body: Body::Directory(directory),
                ..
            }) = next.and_then(|ino| self.inodes.get_mut(ino).ok())
            {
                directory.used = directory.used.with(change);
                next = Some(*parent).filter(|parent| Some(*parent) != next);
            }
        }
    }

    /// Refuses what would bring a directory above its quota, or further above it.
    pub(super) fn check_quotas(&self, charges: &[Charge]) -> Result<(), FsError> {
        let grows = charges
            .iter()
            .any(|(_, change)| change.bytes > 0 || change.inodes > 0);
        if self.directories_with_quota == 0 || !grows {
            return Ok(());
        }
        let mut changes: BTreeMap<InodeId, Change> = BTreeMap::new();
        for &(dir, change) in charges {
            for (ino, _) in self.ancestors(dir) {
                let sum = changes.entry(ino).or_default();
                sum.bytes += change.bytes;
                sum.inodes += change.inodes;
            }
        }
        for (ino, change) in changes {
            let directory = self.inodes.get(ino)?.directory()?;
            if directory.quota.refuses(directory.used, change) {
                return Err(FsError::QuotaExceeded);
            }
        }
        Ok(())
    }

    /// Refuses pieces that a file has no quota for, when they are put over what it has in their
    /// place, and over what it has in `cleared`.
    pub(super) fn check_growth(
        &self,
        ino: InodeId,
        pieces: &[Piece],
        cleared: (u64, u64),
    ) -> Result<(), FsError> {
        if self.directories_with_quota == 0 {
            return Ok(());
        }
        let inode = self.inodes.get(ino)?;
        if inode.nlink == 0 {
            return Ok(());
        }
        let extents = &inode.file()?.extents;
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
        self.check_quotas(&[(inode.parent, change)])
    }

    /// Whether a quota limits what is written to a file or directory.
    #[must_use]
    pub fn is_limited(&self, ino: InodeId) -> bool {
        self.directories_with_quota > 0 && self.room(ino).is_ok_and(|room| room.bytes.is_some())
    }

    /// Total and free bytes, and total and free inodes, as far as quotas limit them, for what is in
    /// a directory or for a file.
    pub(super) fn room(&self, ino: InodeId) -> Result<Room, FsError> {
        let mut room = Room::default();
        let inode = self.inodes.get(ino)?;
        let dir = if inode.is_directory() {
            ino
        } else {
            inode.parent
        };
        if self.directories_with_quota == 0 || inode.nlink == 0 {
            return Ok(room);
        }
        for (_, inode) in self.ancestors(dir) {
            let directory = inode.directory()?;
            narrow(&mut room.bytes, directory.quota.bytes, directory.used.bytes);
            narrow(
                &mut room.inodes,
                directory.quota.inodes,
                directory.used.inodes,
            );
        }
        Ok(room)
    }

    /// Adds up what is below each directory that the root leads to; by slot. Asks nothing of the
    /// accounts, and little of the rest.
    pub(super) fn add_up_usage(&self) -> Vec<Usage> {
        let slot = |ino: InodeId| parts(ino).0 as usize;
        let mut sums = vec![Usage::default(); self.inodes.slots() as usize];
        let mut reached = vec![false; sums.len()];
        // A directory comes behind the one above it.
        let mut order = Vec::new();
        let mut waiting = vec![(InodeId::ROOT, InodeId::ROOT)];
        while let Some((ino, above)) = waiting.pop() {
            let Ok(Inode {
                body: Body::Directory(directory),
                ..
            }) = self.inodes.get(ino)
            else {
                continue;
            };
            if !std::mem::replace(&mut reached[slot(ino)], true) {
                order.push((ino, above));
                waiting.extend(directory.after(None).map(|(_, child)| (child, ino)));
            }
        }
        for (_, inode) in self.inodes.iter() {
            let counts = !inode.is_directory() && inode.nlink > 0;
            if let Some(sum) = sums.get_mut(slot(inode.parent)).filter(|_| counts) {
                *sum = sum.with(Self::weight(inode).added());
            }
        }
        for (ino, above) in order.into_iter().rev() {
            let below = sums[slot(ino)];
            if ino != InodeId::ROOT {
                let with_itself = below.with(Usage::EMPTY_INODE.added());
                sums[slot(above)] = sums[slot(above)].with(with_itself.added());
            }
        }
        sums
    }

    /// Makes the accounts anew from names and extents.
    pub(super) fn restore_usage(&mut self) {
        let names = self.names_of_files();
        for names in names.chunk_by(|one, next| one.0 == next.0) {
            let (ino, first) = names[0];
            if let Ok(inode) = self.inodes.get_mut(ino) {
                inode.parent = first;
            }
            if names.len() > 1 {
                let parents = names.iter().map(|(_, dir)| *dir).collect();
                self.further_names.insert(ino, parents);
            }
        }
        self.restore_names_of_directories();
        let sums = self.add_up_usage();
        self.inodes.for_each_mut(|index, inode| {
            if let Body::Directory(directory) = &mut inode.body {
                directory.used = sums[index];
            }
        });
    }

    fn restore_names_of_directories(&mut self) {
        let mut names: Vec<(InodeId, Box<[u8]>)> = Vec::new();
        for (_, inode) in self.inodes.iter() {
            if let Body::Directory(directory) = &inode.body {
                let entries = directory.after(None);
                let is_directory = |ino| self.inodes.get(ino).is_ok_and(Inode::is_directory);
                let below = entries.filter(|(_, child)| is_directory(*child));
                names.extend(below.map(|(name, child)| (child, name.into())));
            }
        }
        for (ino, name) in names {
            if let Ok(inode) = self.inodes.get_mut(ino)
                && let Body::Directory(directory) = &mut inode.body
            {
                directory.name = name;
            }
        }
    }

    /// Each name of what is no directory, as the inode and the directory that names it, ascending.
    pub(super) fn names_of_files(&self) -> Vec<(InodeId, InodeId)> {
        let mut names = Vec::new();
        for (dir, inode) in self.inodes.iter() {
            let Body::Directory(directory) = &inode.body else {
                continue;
            };
            let children = directory.after(None).map(|(_, child)| child);
            let is_file = |ino: &InodeId| {
                let found = self.inodes.get(*ino);
                found.is_ok_and(|inode| !inode.is_directory())
            };
            names.extend(children.filter(is_file).map(|child| (child, dir)));
        }
        names.sort_unstable();
        names
    }
}

/// What quotas leave: total and free, where one is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    pub bytes: Option<(u64, u64)>,
    pub inodes: Option<(u64, u64)>,
}

/// Takes a quota further up into account: the nearest one is the total, the tightest one counts.
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
