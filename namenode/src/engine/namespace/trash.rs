//! The trash: removed files and trees that can be restored for a while.
//!
//! Each user has a private directory `/.trash/UID`: a user who could not reach a file in its old place
//! cannot reach it there either. A removed file keeps its inode, so nothing has to be copied; its name in
//! the trash starts with the number of the inode. Names enter these directories only by removal, and leave
//! them by rename (restored) or removal (purged). When their retention is over,
//! [`Command::PurgeTrash`](super::Command) removes them.
//!
//! In edition 0, everything was in `/.trash` itself.

use std::collections::{BTreeMap, BTreeSet};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::{NAME_BYTES_MAX, SYMLINK_BYTES_MAX, TRASH_INODES_PER_COMMAND_MAX};
use harvestfs_protocol::meta::mutation::{RemoveToTrash, Unlink};
use harvestfs_protocol::meta::{MetaReply, Mutation};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::{Attr, Credentials, Timestamp};

use super::command::Effects;
use super::directory::name_of_entry;
use super::edition::ACCOUNTS_KEPT;
use super::inode::{Inode, STICKY};
use super::rename::Place;
use super::usage::Change;
use super::{Call, Namespace, permissions};

const NAME: &[u8] = b".trash";
const MODE: u16 = 0o755;
/// The mode of a user's directory.
const MODE_OF_USER: u16 = 0o700;
/// The mode of `/.trash` in edition 0: each user could take out their own files.
const MODE_OF_ALL: u16 = 0o777 | STICKY;
const NANOSECONDS_PER_SECOND: i64 = 1_000_000_000;

/// The trash: its directories and entries.
#[derive(Debug, Default)]
pub(super) struct Trash {
    /// `/.trash`, once something was removed.
    pub directory: Option<InodeId>,
    /// For each user who removed something, the directory in `/.trash`.
    of_users: BTreeMap<u32, InodeId>,
    /// All these directories.
    parts: BTreeSet<InodeId>,
    entries: BTreeMap<InodeId, Trashed>,
    by_expiry: BTreeSet<(Timestamp, InodeId)>,
}

/// Something in the trash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trashed {
    /// Its former path; empty when that exceeded the length limit.
    pub origin: Box<[u8]>,
    /// When it may be removed permanently.
    pub expires: Timestamp,
    /// The directory of the trash that it is in.
    pub directory: InodeId,
    /// The directory that it was in, where it still counts; none if it was removed in edition 0.
    pub counted_in: Option<InodeId>,
}

impl Trash {
    /// Sets the directory `/.trash`. Returns false when there was one.
    pub fn set_directory(&mut self, directory: InodeId) -> bool {
        self.parts.insert(directory);
        self.directory.replace(directory).is_none()
    }

    /// Sets the directory of a user. Returns false when there was one.
    pub fn set_directory_of(&mut self, uid: u32, directory: InodeId) -> bool {
        self.parts.insert(directory);
        self.of_users.insert(uid, directory).is_none()
    }

    /// The directories of users.
    pub fn of_users(&self) -> impl Iterator<Item = (u32, InodeId)> {
        self.of_users
            .iter()
            .map(|(&uid, &directory)| (uid, directory))
    }

    /// Whether a directory is `/.trash` or a user's directory in it.
    pub fn is_part(&self, dir: InodeId) -> bool {
        self.parts.contains(&dir)
    }

    /// `/.trash` and the directories of users in it.
    pub fn parts(&self) -> impl Iterator<Item = InodeId> {
        self.parts.iter().copied()
    }

    pub fn get(&self, ino: InodeId) -> Option<&Trashed> {
        self.entries.get(&ino)
    }

    pub fn iter(&self) -> impl Iterator<Item = (InodeId, &Trashed)> {
        self.entries.iter().map(|(&ino, trashed)| (ino, trashed))
    }

    pub fn insert(&mut self, ino: InodeId, trashed: Trashed) {
        self.remove(ino);
        self.by_expiry.insert((trashed.expires, ino));
        self.entries.insert(ino, trashed);
        self.assert_lists_match();
    }

    pub fn remove(&mut self, ino: InodeId) {
        if let Some(trashed) = self.entries.remove(&ino) {
            self.by_expiry.remove(&(trashed.expires, ino));
        }
        self.assert_lists_match();
    }

    fn assert_lists_match(&self) {
        let (entries, expiries) = (self.entries.len(), self.by_expiry.len());
        assert_eq!(entries, expiries, "in the trash, by inode and by expiry");
    }
}

/// The unique prefix of the name of an inode in the trash.
pub(super) fn name_before(ino: InodeId) -> Vec<u8> {
    format!("{:016x}", ino.0).into_bytes()
}

/// When a file that is removed now, and kept for `retention_s`, may be removed permanently.
fn expiry(now: Timestamp, retention_s: u32) -> Timestamp {
    // Four billion seconds fit into an i64 of nanoseconds, but the sum with `now` might not.
    let retention_ns = i64::from(retention_s) * NANOSECONDS_PER_SECOND;
    Timestamp(now.0.saturating_add(retention_ns))
}

fn name_in_trash(ino: InodeId, name: &Name) -> Name {
    let mut bytes = name_before(ino);
    bytes.push(b'-');
    bytes.extend(name.as_bytes());
    bytes.truncate(NAME_BYTES_MAX);
    name_of_entry(&bytes)
}

impl Namespace {
    /// Whether a directory is `/.trash` or a user's directory in it.
    #[must_use]
    pub fn is_part_of_trash(&self, dir: InodeId) -> bool {
        self.trash.is_part(dir)
    }

    /// The inodes in the trash that may be removed permanently, in the order of their expiry.
    pub fn expired_trash(&self, now: Timestamp) -> impl Iterator<Item = InodeId> {
        let expired = self.trash.by_expiry.iter();
        expired
            .take_while(move |(expires, _)| *expires <= now || planted::is(Bug::PurgesTrashEarly))
            .map(|(_, ino)| *ino)
    }

    /// Seconds for which files removed from a directory are kept; none when they are not, and for
    /// directories in the trash.
    pub(super) fn retention_s(&self, dir: InodeId) -> Option<u32> {
        if self.directories_with_trash == 0 {
            return None;
        }
        let mut nearest = None;
        for (ino, inode) in self.ancestors(dir) {
            if Some(ino) == self.trash.directory {
                return None;
            }
            nearest = nearest.or(inode.directory().ok()?.trash_s);
        }
        nearest.filter(|&seconds| seconds > 0)
    }

    /// Whether a directory is the trash or in it.
    pub(super) fn is_trash_or_below(&self, dir: InodeId) -> bool {
        let mut above = self.ancestors(dir);
        above.any(|(ino, _)| Some(ino) == self.trash.directory)
    }

    /// Refuses to change the directories of the trash: names enter them only by removal, and they stay.
    pub(super) fn check_not_trash(&self, ino: InodeId) -> Result<(), FsError> {
        if self.trash.is_part(ino) {
            return Err(FsError::NotPermitted);
        }
        Ok(())
    }

    /// The mutation to carry out for `op`: if another user has the file in the trash, and a removal to the trash
    /// would shorten the time for which that user has it, only the name is removed. To be called before the
    /// mutation becomes a record, since records of earlier releases are carried out as they are.
    #[must_use]
    pub fn to_carry_out(
        &self,
        credentials: &Credentials,
        op: Mutation,
        now: Timestamp,
    ) -> Mutation {
        match op {
            Mutation::RemoveToTrash(op) if self.shortens(credentials, &op, now) => {
                let RemoveToTrash { parent, name, .. } = op;
                Mutation::Unlink(Unlink { parent, name })
            }
            op => op,
        }
    }

    fn shortens(&self, credentials: &Credentials, op: &RemoveToTrash, now: Timestamp) -> bool {
        let parent = self.inodes.get(op.parent).and_then(Inode::directory);
        let ino = parent.ok().and_then(|parent| parent.get(&op.name));
        let Some(known) = ino.and_then(|ino| self.trash.get(ino)) else {
            return false;
        };
        let own = self.trash.of_users.get(&credentials.uid);
        let retention_s = self.retention_s(op.parent).unwrap_or(op.retention_s);
        own != Some(&known.directory)
            && expiry(now, retention_s) <= known.expires
            && !self.is_trash_or_below(op.parent)
    }

    /// Removes a file or a tree to the trash at the caller's request.
    pub(super) fn remove_to_trash(
        &mut self,
        call: &Call,
        parent: InodeId,
        name: &Name,
        retention_s: u32,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let ino = self.find(call.credentials, parent, name)?;
        let victim = self.inodes.get(ino)?;
        permissions::check_removal(call.credentials, self.inodes.get(parent)?, victim)?;
        if victim.is_directory() {
            // Its `..` changes.
            permissions::check(call.credentials, victim, permissions::WRITE)?;
        }
        self.check_not_trash(ino)?;
        if self.is_trash_or_below(parent) {
            return Err(FsError::InvalidArgument(
                "it is in the trash already".into(),
            ));
        }
        let retention_s = self.retention_s(parent).unwrap_or(retention_s);
        self.put_into_trash(call, ino, Place { parent, name }, retention_s, effects)
    }

    /// Moves an inode that may be removed to the trash, if the quotas leave room.
    pub(super) fn put_into_trash(
        &mut self,
        call: &Call,
        ino: InodeId,
        old: Place,
        retention_s: u32,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        // In later editions, inodes in the trash count as before.
        if self.edition < ACCOUNTS_KEPT
            && let Some(directory) = self.trash.directory
        {
            let planned = self.plan_move(ino, Some(old.parent), Some(directory), true);
            self.check_quotas(&planned.charges)?;
        }
        let directory = self.make_trash(call, effects)?;
        let attr = self.move_to_trash(call, ino, old, (directory, retention_s), effects);
        Ok(MetaReply::Removed(Some(attr)))
    }

    /// Moves an inode to `directory` in the trash, which [`Self::make_trash`] has made, even above a
    /// quota.
    pub(super) fn move_to_trash(
        &mut self,
        call: &Call,
        ino: InodeId,
        old: Place,
        (directory, retention_s): (InodeId, u32),
        effects: &mut Effects,
    ) -> Attr {
        let new_name = name_in_trash(ino, old.name);
        let mut origin = self.path_of(old.parent);
        origin.push(b'/');
        origin.extend(old.name.as_bytes());
        if origin.len() > SYMLINK_BYTES_MAX {
            origin.clear();
        }
        // A file may be in the trash already, under another of its names. It stays with the user who
        // removed it first: no name is added in another user's directory, nor the same name twice.
        let known = self.trash.get(ino);
        let (kept_in, counted_in) = match known {
            Some(known) => {
                let counted_in = known.counted_in.map(|before| {
                    let is_there = self.is_directory_there(before);
                    if is_there { before } else { old.parent }
                });
                (known.directory, counted_in)
            }
            None if self.edition < ACCOUNTS_KEPT => (directory, None),
            None => (directory, Some(old.parent)),
        };
        let entries = self.inodes.known_directory(directory);
        let is_there = kept_in != directory || entries.get(&new_name).is_some();
        let gained = (!is_there).then_some(directory);
        let place = (kept_in, counted_in.unwrap_or(kept_in));
        let planned = self.plan_move_to_trash(ino, old.parent, gained, place);
        self.carry_out(planned);
        let is_directory = self.inodes.known(ino).is_directory();
        self.remove_name(old.parent, old.name, is_directory, call.now, effects);
        if !is_there {
            self.add_name(directory, &new_name, ino, is_directory, call.now, effects);
        }
        let trashed = Trashed {
            origin: origin.into(),
            expires: expiry(call.now, retention_s),
            directory: kept_in,
            counted_in,
        };
        self.trash.insert(ino, trashed);
        let inode = self.inodes.known_mut(ino);
        if is_there {
            assert!(
                inode.nlink > 1,
                "file {ino} has {} names, not two",
                inode.nlink
            );
            inode.nlink -= 1;
        }
        inode.ctime = call.now;
        effects.inodes.push(ino);
        inode.attr(ino)
    }

    /// The caller's directory in the trash; made when it is first needed.
    pub(super) fn make_trash(
        &mut self,
        call: &Call,
        effects: &mut Effects,
    ) -> Result<InodeId, FsError> {
        let uid = call.credentials.uid;
        if self.edition < ACCOUNTS_KEPT {
            return match self.trash.directory {
                Some(directory) => Ok(directory),
                None => self.make_directory_of_trash(call.now, effects),
            };
        }
        if let Some(&known) = self.trash.of_users.get(&uid) {
            return Ok(known);
        }
        let above = match self.trash.directory {
            Some(above) => {
                self.check_room_for_directories(above, 1)?;
                above
            }
            None => {
                // Either both directories are made, or none.
                self.check_room_for_directories(InodeId::ROOT, 2)?;
                self.make_directory_of_trash(call.now, effects)?
            }
        };
        Ok(self.make_trash_of(uid, above, call.now, effects))
    }

    fn check_room_for_directories(&self, parent: InodeId, count: u32) -> Result<(), FsError> {
        let more = Change {
            inodes: count.into(),
            ..Change::default()
        };
        self.check_quotas(&[(parent, more)])?;
        if self.inodes.room() < u64::from(count) {
            return Err(FsError::NoSpace);
        }
        Ok(())
    }

    fn make_directory_of_trash(
        &mut self,
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<InodeId, FsError> {
        let name = name_of_entry(NAME);
        let root = self.inodes.known_directory(InodeId::ROOT);
        if root.get(&name).is_some() {
            return Err(FsError::InvalidArgument(
                "`/.trash` is something else: give that another name".into(),
            ));
        }
        let mode = if self.edition < ACCOUNTS_KEPT {
            self.check_room_for_directories(InodeId::ROOT, 1)?;
            MODE_OF_ALL
        } else {
            MODE
        };
        let uid = self.inodes.known(InodeId::ROOT).uid;
        let made = self.add_own_directory((InodeId::ROOT, &name), (mode, uid), now, effects);
        let is_first = self.trash.set_directory(made);
        assert!(is_first, "{made} is made as the trash, which was there");
        Ok(made)
    }

    /// Makes the directory of a user in the trash, `above`.
    fn make_trash_of(
        &mut self,
        uid: u32,
        above: InodeId,
        now: Timestamp,
        effects: &mut Effects,
    ) -> InodeId {
        let name = name_of_entry(uid.to_string().as_bytes());
        let made = self.add_own_directory((above, &name), (MODE_OF_USER, uid), now, effects);
        let is_first = self.trash.set_directory_of(uid, made);
        assert!(
            is_first,
            "{made} is the second one of user {uid} in the trash"
        );
        made
    }

    /// Moves the entries that edition 0 kept in one directory to directories of their owners. Quotas are not
    /// checked: the entries count already, and a refusal here would keep the namenode from starting.
    ///
    /// # Errors
    /// [`FsError::NoSpace`] when the table of inodes has no room for a directory of each owner; nothing
    /// is changed then.
    pub(super) fn divide_trash(
        &mut self,
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<(), FsError> {
        let Some(directory) = self.trash.directory else {
            return Ok(());
        };
        let entries = self.inodes.known_directory(directory).after(None);
        let entries: Vec<(Name, InodeId, u32)> = entries
            .map(|(name, ino)| (name_of_entry(name), ino, self.inodes.known(ino).uid))
            .collect();
        // In the order of their first entries, so that their directories get the same inodes whenever the
        // record is replayed.
        let mut seen = BTreeSet::new();
        let owners = entries.iter().map(|(_, _, uid)| *uid);
        let owners: Vec<u32> = owners.filter(|uid| seen.insert(*uid)).collect();
        if self.inodes.room() < owners.len() as u64 {
            return Err(FsError::NoSpace);
        }
        let inode = self.inodes.known_mut(directory);
        inode.mode = MODE;
        inode.ctime = now;
        for uid in owners {
            self.make_trash_of(uid, directory, now, effects);
        }
        for (name, ino, uid) in entries {
            let is_directory = self.inodes.known(ino).is_directory();
            let Some(&to) = self.trash.of_users.get(&uid) else {
                panic!("the owner of {ino}, {uid}, has no directory in the trash");
            };
            let planned = self.plan_move(ino, Some(directory), Some(to), true);
            if let Some(mut trashed) = self.trash.get(ino).cloned() {
                trashed.directory = to;
                self.trash.insert(ino, trashed);
            }
            self.carry_out(planned);
            self.remove_name(directory, &name, is_directory, now, effects);
            self.add_name(to, &name, ino, is_directory, now, effects);
        }
        Ok(())
    }

    /// The path of a directory from the root, without a trailing slash.
    fn path_of(&self, dir: InodeId) -> Vec<u8> {
        let names: Vec<&[u8]> = self
            .ancestors(dir)
            .filter(|(ino, _)| *ino != InodeId::ROOT)
            .filter_map(|(_, inode)| inode.directory().ok().map(|it| it.name.as_ref()))
            .collect();
        let mut path = Vec::new();
        for name in names.into_iter().rev() {
            path.push(b'/');
            path.extend(name);
        }
        path
    }

    /// Removes inodes from the trash permanently, deepest first and up to a bound; the rest is left
    /// for the next command. Removed inodes become orphans: only the server knows whether they are
    /// held.
    pub(super) fn purge_trash(
        &mut self,
        inodes: &[InodeId],
        now: Timestamp,
        effects: &mut Effects,
    ) {
        let root = Credentials::root();
        let call = Call::of_namenode(&root, now);
        let mut budget = TRASH_INODES_PER_COMMAND_MAX;
        for &ino in inodes {
            if self.trash.get(ino).is_some() {
                self.purge(&call, ino, &mut budget, effects);
            }
        }
    }

    fn purge(&mut self, call: &Call, top: InodeId, budget: &mut usize, effects: &mut Effects) {
        let Some(directory) = self.trash.get(top).map(|it| it.directory) else {
            panic!("{top} is to be removed from the trash, but is not in it");
        };
        let name = self.name_of(directory, top);
        let mut above = vec![(directory, name, top)];
        while *budget > 0
            && let Some((parent, name, ino)) = above.last()
        {
            let (parent, ino) = (*parent, *ino);
            if let Some((name, child)) = self.first_entry(ino) {
                above.push((ino, name, child));
                continue;
            }
            let is_directory = self.inodes.known(ino).is_directory();
            let planned = self.plan_move(ino, Some(parent), None, true);
            self.carry_out(planned);
            self.remove_name(parent, name, is_directory, call.now, effects);
            self.lose_name(call, ino, effects);
            above.pop();
            *budget -= 1;
        }
    }

    fn first_entry(&self, ino: InodeId) -> Option<(Name, InodeId)> {
        let directory = self.inodes.known(ino).directory().ok()?;
        let (name, child) = directory.after(None).next()?;
        Some((name_of_entry(name), child))
    }

    /// The name of an inode in the trash, which starts with its number.
    fn name_of(&self, directory: InodeId, ino: InodeId) -> Name {
        let before = name_of_entry(&name_before(ino));
        let mut behind = self.inodes.known_directory(directory).after(Some(&before));
        match behind.next() {
            Some((name, found)) if found == ino => name_of_entry(name),
            next => panic!("the directory {directory} of the trash has {next:?}, not {ino}"),
        }
    }
}
