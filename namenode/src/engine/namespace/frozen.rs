//! Snapshots of directories: `D/.snapshot/NAME` is the tree below `D` as it was.
//!
//! A snapshot is a copy of the tree's inodes that shares all data. One command makes it, so it is
//! atomic. Its inodes are like any others, so that blocks, quotas, compaction, the trash, checks
//! and the serialized state need not know of snapshots; but a bit of their mode marks them as
//! *frozen*, and no operation of a client changes frozen inodes. `.snapshot` is an entry of `D` that
//! listings leave out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::SNAPSHOT_ITEMS_MAX;
use harvestfs_protocol::meta::MetaReply;
use harvestfs_protocol::meta::mutation::{Entry, Unfrozen};
use harvestfs_protocol::name::{Name, SNAPSHOTS_NAME};
use harvestfs_protocol::types::{Attr, Credentials, MODE_FROZEN};

use super::command::Effects;
use super::directory::name_of_entry;
use super::inode::{Body, Inode};
use super::rename::Place;
use super::usage::Usage;
use super::{Call, Namespace, permissions};

/// The size of a snapshot that is about to be made.
#[derive(Default)]
struct Contents {
    used: Usage,
    /// The cost of copying: names, inodes, and the pieces of files with several pieces.
    items: u64,
}

impl Contents {
    fn add(&mut self, inode: &Inode) {
        self.used.inodes += 1;
        self.items += 1;
        if let Body::Regular(file) = &inode.body {
            self.used.bytes += file.extents.allocated_bytes();
            self.items += file.extents.spilled_pieces() as u64;
        }
    }
}

/// The copies of files with several names.
#[derive(Default)]
struct Linked {
    copies: BTreeMap<InodeId, InodeId>,
    /// The directories that name each copy, one for each name.
    names: BTreeMap<InodeId, Vec<InodeId>>,
}

/// The mode of `.snapshot` in the directory `above`.
fn mode_of_snapshots(above: &Inode) -> u16 {
    MODE_FROZEN | (above.mode & 0o555)
}

impl Namespace {
    /// Whether an inode is part of a snapshot of a directory.
    #[must_use]
    pub fn is_frozen(&self, ino: InodeId) -> bool {
        self.inodes.get(ino).is_ok_and(Inode::is_frozen)
    }

    /// Whether listings of a directory leave out an entry: the one that leads to its snapshots.
    pub(super) fn is_hidden(&self, directory: &Inode, name: &[u8], child: InodeId) -> bool {
        name == SNAPSHOTS_NAME && !directory.is_frozen() && self.is_frozen(child)
    }

    /// The directory whose `.snapshot` is `inode`, if it is one. Mode and owner of `.snapshot` cannot be changed,
    /// so they follow those that this directory has now, not those that it had when `.snapshot` was made.
    fn above_snapshots(&self, inode: &Inode) -> Option<&Inode> {
        if !inode.is_frozen() || *inode.directory().ok()?.name != *SNAPSHOTS_NAME {
            return None;
        }
        let above = self.inodes.get(inode.parent).ok()?;
        // One that was removed and is only held open belongs to no directory.
        (inode.nlink > 0 && !above.is_frozen()).then_some(above)
    }

    /// As [`permissions::check`], but reading and searching `.snapshot` need the rights to the directory that it
    /// belongs to.
    pub(super) fn check_access(
        &self,
        credentials: &Credentials,
        inode: &Inode,
        mask: u8,
    ) -> Result<(), FsError> {
        match self.above_snapshots(inode) {
            Some(above) if mask & permissions::WRITE == 0 => {
                permissions::check(credentials, above, mask)
            }
            _ => permissions::check(credentials, inode, mask),
        }
    }

    /// The attributes of an inode.
    ///
    /// # Errors
    /// [`FsError::Stale`] when there is none.
    pub fn attr(&self, ino: InodeId) -> Result<Attr, FsError> {
        let inode = self.inodes.get(ino)?;
        let mut attr = inode.attr(ino);
        if let Some(above) = self.above_snapshots(inode) {
            attr.mode = mode_of_snapshots(above);
            (attr.uid, attr.gid) = (above.uid, above.gid);
        }
        Ok(attr)
    }

    /// Refuses a mutation that would change a snapshot.
    pub(super) fn check_not_frozen(&self, unfrozen: Unfrozen<'_>) -> Result<(), FsError> {
        let is_refused = match unfrozen {
            Unfrozen::Anything => false,
            Unfrozen::Inodes(inodes) => inodes.into_iter().flatten().any(|ino| self.is_frozen(ino)),
            Unfrozen::Entries(entries) => entries
                .into_iter()
                .flatten()
                .any(|entry| self.is_entry_frozen(entry)),
        };
        if is_refused {
            return Err(FsError::ReadOnly);
        }
        Ok(())
    }

    fn is_entry_frozen(&self, (parent, name): Entry<'_>) -> bool {
        let Ok(inode) = self.inodes.get(parent) else {
            return false;
        };
        let directory = inode.directory().ok();
        let child = directory.and_then(|directory| directory.get(name));
        inode.is_frozen() || child.is_some_and(|child| self.is_frozen(child))
    }

    pub(super) fn create_snapshot(
        &mut self,
        call: &Call,
        dir: InodeId,
        name: &Name,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        self.check_owned_directory(call, dir)?;
        if name.as_bytes().starts_with(b".") {
            return Err(FsError::InvalidArgument(
                "the name of a snapshot does not start with a dot".into(),
            ));
        }
        if self.is_trash_or_below(dir) {
            return Err(FsError::InvalidArgument(
                "what is in the trash gets no snapshots".into(),
            ));
        }
        let snapshots = self.snapshots_of(dir)?;
        if let Some(snapshots) = snapshots
            && self.inodes.get(snapshots)?.directory()?.get(name).is_some()
        {
            return Err(FsError::Exists);
        }
        let Contents { mut used, .. } = self.contents_of(dir)?;
        used.inodes += u64::from(snapshots.is_none());
        if self.inodes.room() < used.inodes {
            return Err(FsError::NoSpace);
        }
        self.check_quotas(&[(dir, used.added())])?;

        // There is room, so nothing is refused from here on.
        let inodes = self.inodes.len();
        let used_before = self.inodes.known_directory(dir).used;
        let top = self.freeze(dir);
        let snapshots = match snapshots {
            Some(snapshots) => snapshots,
            None => {
                let above = self.inodes.known(dir);
                let of_owner = (mode_of_snapshots(above), above.uid);
                let snapshots_name = name_of_entry(SNAPSHOTS_NAME);
                self.add_own_directory((dir, &snapshots_name), of_owner, call.now, effects)
            }
        };
        self.adopt(snapshots, top);
        self.add_name(snapshots, name, top, true, call.now, effects);
        self.copy_below(dir, top);
        let copied = self.inodes.len() - inodes;
        assert_eq!(
            copied, used.inodes,
            "inodes of the snapshot of {dir}, and for how many there was room"
        );
        let used_after = self.inodes.known_directory(dir).used;
        assert_eq!(
            used_after,
            used_before.with(used.added()),
            "what counts in {dir} with its snapshot, and what the quotas were asked for"
        );
        effects.inodes.push(top);
        let inode = self.inodes.known_mut(top);
        inode.ctime = call.now;
        Ok(MetaReply::Attr(inode.attr(top)))
    }

    pub(super) fn remove_snapshot(
        &mut self,
        call: &Call,
        dir: InodeId,
        name: &Name,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        self.check_owned_directory(call, dir)?;
        let parent = self.snapshots_of(dir)?.ok_or(FsError::NotFound)?;
        let directory = self.inodes.get(parent)?.directory()?;
        let top = directory.get(name).ok_or(FsError::NotFound)?;
        let trash = self.make_trash(call, effects)?;
        // Its retention in the trash is 0 s: the trash removes it step by step.
        self.move_to_trash(call, top, Place { parent, name }, (trash, 0), effects);
        if self.inodes.known_directory(parent).is_empty() {
            let snapshots_name = name_of_entry(SNAPSHOTS_NAME);
            let planned = self.plan_removal(call, parent, dir);
            self.carry_out(planned);
            self.remove_name(dir, &snapshots_name, true, call.now, effects);
            self.lose_name(call, parent, effects);
        }
        Ok(MetaReply::Done)
    }

    fn check_owned_directory(&self, call: &Call, dir: InodeId) -> Result<(), FsError> {
        let inode = self.inodes.get(dir)?;
        inode.directory()?;
        if inode.nlink == 0 {
            return Err(FsError::NotFound);
        }
        if permissions::owns(call.credentials, inode) {
            Ok(())
        } else {
            Err(FsError::NotPermitted)
        }
    }

    /// The inode of `.snapshot` in a directory, if it has snapshots.
    pub(super) fn snapshots_of(&self, dir: InodeId) -> Result<Option<InodeId>, FsError> {
        let name = name_of_entry(SNAPSHOTS_NAME);
        match self.inodes.get(dir)?.directory()?.get(&name) {
            Some(found) if !self.is_frozen(found) => Err(FsError::InvalidArgument(
                "`.snapshot` is something else here: give that another name".into(),
            )),
            found => Ok(found),
        }
    }

    /// Whether a snapshot includes the inode of an entry: all but other snapshots and the trash.
    fn is_kept(&self, directory: &Inode, name: &[u8], child: InodeId) -> bool {
        !self.is_hidden(directory, name, child) && Some(child) != self.trash.directory
    }

    /// The size of a future snapshot of a directory, itself included. Stops at the limit for one
    /// snapshot.
    fn contents_of(&self, dir: InodeId) -> Result<Contents, FsError> {
        let mut contents = Contents::default();
        contents.add(self.inodes.get(dir)?);
        let mut linked = BTreeSet::new();
        let mut waiting = vec![dir];
        while let Some(ino) = waiting.pop() {
            let inode = self.inodes.get(ino)?;
            let entries = inode.directory()?.after(None);
            for (_, child) in entries.filter(|(name, child)| self.is_kept(inode, name, *child)) {
                let below = self.inodes.get(child)?;
                if below.is_directory() {
                    waiting.push(child);
                }
                if below.is_directory() || below.nlink == 1 || linked.insert(child) {
                    contents.add(below);
                }
                // The name.
                contents.items += 1;
                if contents.items > SNAPSHOT_ITEMS_MAX {
                    return Err(FsError::InvalidArgument(format!(
                        "a snapshot has at most {SNAPSHOT_ITEMS_MAX} names, inodes and extents: make \
                         snapshots of directories further down"
                    )));
                }
            }
        }
        Ok(contents)
    }

    /// Copies the tree below a directory to its copy.
    fn copy_below(&mut self, dir: InodeId, copy: InodeId) {
        let mut linked = Linked::default();
        let mut waiting = VecDeque::from([(dir, copy)]);
        while let Some((from, to)) = waiting.pop_front() {
            let inode = self.inodes.known(from);
            let entries: Vec<(Name, InodeId)> = self
                .inodes
                .known_directory(from)
                .after(None)
                .filter(|(name, child)| self.is_kept(inode, name, *child))
                .map(|(name, child)| (name_of_entry(name), child))
                .collect();
            for (name, child) in entries {
                let copy = self.copy_of(child, to, &mut linked);
                let is_directory = self.inodes.known(copy).is_directory();
                if is_directory {
                    waiting.push_back((child, copy));
                }
                self.name_copy(to, &name, copy, is_directory);
            }
        }
        for (copy, mut names) in linked.names {
            names.sort_unstable();
            if let Some(&first) = names.first() {
                self.adopt(first, copy);
            }
            if names.len() > 1 {
                self.further_names.insert(copy, names);
            }
        }
    }

    /// The copy of an inode for a name in the directory `to`, made for its first name.
    fn copy_of(&mut self, ino: InodeId, to: InodeId, linked: &mut Linked) -> InodeId {
        let inode = self.inodes.known(ino);
        if inode.is_directory() || inode.nlink == 1 {
            let copy = self.freeze(ino);
            self.adopt(to, copy);
            return copy;
        }
        let copy = match linked.copies.get(&ino) {
            Some(&copy) => copy,
            None => self.freeze(ino),
        };
        linked.copies.insert(ino, copy);
        linked.names.entry(copy).or_default().push(to);
        copy
    }

    /// Copies an inode, without its names and entries. The data of a file is shared.
    fn freeze(&mut self, ino: InodeId) -> InodeId {
        let default_rules = self.default_rules();
        let inode = self.inodes.known(ino);
        let body = match &inode.body {
            Body::Regular(file) => {
                self.spilled_pieces += file.extents.spilled_pieces() as u64;
                for piece in file.extents.iter() {
                    self.changes.add(&piece);
                }
                Body::Regular(file.clone())
            }
            Body::Directory(_) => Body::Directory(Box::default()),
            Body::Symlink(target) => Body::Symlink(target.clone()),
            Body::Fifo => Body::Fifo,
            Body::Socket => Body::Socket,
            Body::CharDevice(rdev) => Body::CharDevice(*rdev),
            Body::BlockDevice(rdev) => Body::BlockDevice(*rdev),
        };
        let copy = Inode {
            mode: inode.mode | MODE_FROZEN,
            nlink: if inode.is_directory() { 2 } else { 0 },
            xattrs: inode.xattrs.clone(),
            body,
            ..*inode
        };
        let settings = copy.settings;
        self.blocks
            .account(settings.rules(default_rules), &mut self.changes);
        if copy.is_directory() {
            self.directories_with_settings += u64::from(!settings.is_empty());
        }
        self.insert_inode_with_room(copy)
    }

    /// Counts a copy in a directory.
    fn adopt(&mut self, dir: InodeId, copy: InodeId) {
        let inode = self.inodes.known_mut(copy);
        inode.parent = dir;
        let weight = Self::weight(inode);
        self.charge(&[(dir, weight.added())]);
    }

    /// Adds the entry of a copy. It is not announced: no session knows the directory yet.
    fn name_copy(&mut self, dir: InodeId, name: &Name, copy: InodeId, is_directory: bool) {
        let inode = self.inodes.known_mut(copy);
        if let Body::Directory(directory) = &mut inode.body {
            directory.name = name.as_bytes().into();
        } else {
            inode.nlink += 1;
        }
        let above = self.inodes.known_mut(dir);
        let Body::Directory(directory) = &mut above.body else {
            panic!("{name:?} is copied to inode {dir}, which is no directory");
        };
        let hidden = directory.insert(name, copy);
        assert_eq!(hidden, None, "{name:?} is copied to {dir} twice");
        above.nlink += u32::from(is_directory);
        self.names += 1;
    }
}
