//! Names: adding and removing them, and what happens to inodes that get or lose one.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::{DIRECTORY_DEPTH_MAX, LINKS_MAX, SYMLINK_BYTES_MAX};
use harvestfs_protocol::meta::MetaReply;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials, FileKind, Timestamp};

use super::command::Effects;
use super::directory::Directory;
use super::inode::{ALL_MODE_BITS, Body, FileData, GROUP_EXECUTE, Inode, SET_GROUP_ID, STICKY};
use super::permissions::{self, EXECUTE, WRITE};
use super::rename::Place;
use super::settings::Settings;
use super::usage::Usage;
use super::{Call, Namespace};

/// The attributes that a new inode takes from its creator and its directory.
struct Birth {
    gid: u32,
    /// The directory has the set-group-id bit.
    group_of_directory: bool,
    settings: Settings,
}

impl Namespace {
    /// A directory that the caller may search.
    pub(super) fn searchable(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<(&Inode, &Directory), FsError> {
        let inode = self.inodes.get(ino)?;
        let directory = inode.directory()?;
        self.check_access(credentials, inode, EXECUTE)?;
        Ok((inode, directory))
    }

    /// Looks up a name in a directory that the caller may search. A directory that was removed and is
    /// only held open has no names and can get none: [`FsError::NotFound`].
    fn look_up(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<(&Inode, Option<InodeId>), FsError> {
        let (inode, directory) = self.searchable(credentials, parent)?;
        if inode.nlink == 0 {
            return Err(FsError::NotFound);
        }
        Ok((inode, directory.get(name)))
    }

    /// The inode that a name leads to.
    pub(super) fn find(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<InodeId, FsError> {
        let (_, found) = self.look_up(credentials, parent, name)?;
        found.ok_or(FsError::NotFound)
    }

    /// Checks that the caller may add a name, in the order of Linux: a name that exists is reported
    /// even to a caller that may not write the directory.
    fn check_new_name(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<(), FsError> {
        let (inode, found) = self.look_up(credentials, parent, name)?;
        if found.is_some() {
            return Err(FsError::Exists);
        }
        permissions::check(credentials, inode, WRITE | EXECUTE)?;
        self.check_not_trash(parent)
    }

    /// The directory and its ancestors, up to the root.
    pub(super) fn ancestors(&self, ino: InodeId) -> impl Iterator<Item = (InodeId, &Inode)> {
        let mut next = Some(ino);
        // This terminates: no directory is ever moved into itself. The depth limit is enforced where
        // directories are added; moving a tree can exceed it.
        std::iter::from_fn(move || {
            let ino = next?;
            let inode = self.inodes.get(ino).ok()?;
            inode.directory().ok()?;
            // A removed directory has no ancestors any more.
            next = (inode.parent != ino && inode.nlink > 0).then_some(inode.parent);
            Some((ino, inode))
        })
    }

    /// Checks that a new directory in this one would not be too deep.
    pub(super) fn check_depth(&self, parent: InodeId) -> Result<(), FsError> {
        if self.ancestors(parent).count() > DIRECTORY_DEPTH_MAX {
            return Err(FsError::TooDeep);
        }
        Ok(())
    }

    /// The settings of a file created in a directory: each one from the nearest ancestor, the directory
    /// included, that sets it.
    fn inherited_settings(&self, parent: InodeId) -> Settings {
        let mut settings = Settings::default();
        if self.directories_with_settings == 0 {
            return settings;
        }
        for (_, inode) in self.ancestors(parent) {
            settings = settings.or(inode.settings);
            if settings.is_complete() {
                break;
            }
        }
        settings
    }

    fn birth(&self, call: &Call, parent: InodeId) -> Result<Birth, FsError> {
        let directory = self.inodes.get(parent)?;
        let group_of_directory = directory.mode & SET_GROUP_ID != 0;
        Ok(Birth {
            gid: if group_of_directory {
                directory.gid
            } else {
                call.credentials.gid
            },
            group_of_directory,
            settings: self.inherited_settings(parent),
        })
    }

    pub(super) fn create(
        &mut self,
        call: &Call,
        parent: InodeId,
        name: &Name,
        (kind, mode, rdev): (FileKind, u16, u32),
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let body = match kind {
            FileKind::Regular => Body::Regular(FileData::default()),
            FileKind::Fifo => Body::Fifo,
            FileKind::Socket => Body::Socket,
            FileKind::CharDevice => Body::CharDevice(rdev),
            FileKind::BlockDevice => Body::BlockDevice(rdev),
            FileKind::Directory | FileKind::Symlink => {
                return Err(FsError::InvalidArgument(
                    "directories and symlinks have operations of their own".into(),
                ));
            }
        };
        self.check_new_name(call.credentials, parent, name)?;
        let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
        if device && !permissions::is_root(call.credentials) {
            return Err(FsError::NotPermitted);
        }
        let mut birth = self.birth(call, parent)?;
        if kind != FileKind::Regular {
            birth.settings = Settings::default();
        }
        let mut mode = mode & ALL_MODE_BITS;
        let runs_as_group = mode & (SET_GROUP_ID | GROUP_EXECUTE) == SET_GROUP_ID | GROUP_EXECUTE;
        if birth.group_of_directory
            && runs_as_group
            && !permissions::is_root(call.credentials)
            && !permissions::in_group(call.credentials, birth.gid)
        {
            mode &= !SET_GROUP_ID;
        }
        self.add_inode(call, parent, name, birth, mode, body, effects)
    }

    pub(super) fn make_dir(
        &mut self,
        call: &Call,
        parent: InodeId,
        name: &Name,
        mode: u16,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        self.check_new_name(call.credentials, parent, name)?;
        self.check_depth(parent)?;
        let mut birth = self.birth(call, parent)?;
        // A file inherits from all ancestors, so directories need no copy.
        birth.settings = Settings::default();
        let mut mode = mode & (0o777 | STICKY);
        if birth.group_of_directory {
            mode |= SET_GROUP_ID;
        }
        let body = Body::Directory(Box::default());
        self.add_inode(call, parent, name, birth, mode, body, effects)
    }

    pub(super) fn symlink(
        &mut self,
        call: &Call,
        parent: InodeId,
        name: &Name,
        target: &[u8],
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        if target.len() > SYMLINK_BYTES_MAX {
            return Err(FsError::NameTooLong);
        }
        if target.is_empty() || target.contains(&0) {
            return Err(FsError::InvalidArgument(
                "a symlink's target is not empty and has no NUL".into(),
            ));
        }
        self.check_new_name(call.credentials, parent, name)?;
        let mut birth = self.birth(call, parent)?;
        birth.settings = Settings::default();
        let body = Body::Symlink(target.into());
        self.add_inode(call, parent, name, birth, 0o777, body, effects)
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one inode")]
    fn add_inode(
        &mut self,
        call: &Call,
        parent: InodeId,
        name: &Name,
        birth: Birth,
        mode: u16,
        body: Body,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let is_directory = matches!(body, Body::Directory(_));
        let charges = [(parent, Usage::EMPTY_INODE.added())];
        self.check_quotas(&charges)?;
        let inode = Inode {
            mode,
            settings: birth.settings,
            nlink: if is_directory { 2 } else { 1 },
            parent,
            uid: call.credentials.uid,
            gid: birth.gid,
            atime: call.now,
            mtime: call.now,
            ctime: call.now,
            content_version: 0,
            xattrs: None,
            body,
        };
        let mut attr = inode.attr(InodeId::ROOT);
        attr.ino = self.insert_inode(inode)?;
        self.charge(&charges);
        self.add_name(parent, name, attr.ino, is_directory, call.now, effects);
        effects.inodes.push(attr.ino);
        Ok(MetaReply::Attr(attr))
    }

    /// Adds a directory that belongs to the file system itself, with the group of its parent. It is charged
    /// to the parent even above a quota: the caller has checked the quota and the room for an inode.
    pub(super) fn add_own_directory(
        &mut self,
        (parent, name): (InodeId, &Name),
        (mode, uid): (u16, u32),
        now: Timestamp,
        effects: &mut Effects,
    ) -> InodeId {
        let owner = (mode, uid, self.inodes.known(parent).gid);
        let ino = self.insert_inode_with_room(Inode::directory_of_its_own(owner, parent, now));
        self.charge(&[(parent, Usage::EMPTY_INODE.added())]);
        self.add_name(parent, name, ino, true, now, effects);
        ino
    }

    /// As [`Self::insert_inode`], after the caller has checked
    /// [`InodeTable::room`](super::inode::InodeTable::room).
    pub(super) fn insert_inode_with_room(&mut self, inode: Inode) -> InodeId {
        match self.insert_inode(inode) {
            Ok(ino) => ino,
            Err(error) => panic!(
                "there was room for an inode beside {}: {error}",
                self.inodes.len()
            ),
        }
    }

    /// Puts an inode without a name into the table.
    pub(super) fn insert_inode(&mut self, inode: Inode) -> Result<InodeId, FsError> {
        let kind = inode.kind();
        let settings = inode.settings;
        let ino = self.inodes.insert(inode)?;
        self.note_raise(ino, kind, settings);
        match kind {
            FileKind::Regular => self.files += 1,
            FileKind::Directory => self.directories += 1,
            _ => {}
        }
        Ok(ino)
    }

    pub(super) fn link(
        &mut self,
        call: &Call,
        ino: InodeId,
        parent: InodeId,
        name: &Name,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let inode = self.inodes.get(ino)?;
        self.check_new_name(call.credentials, parent, name)?;
        if inode.is_directory() {
            return Err(FsError::NotPermitted);
        }
        if inode.nlink == 0 {
            return Err(FsError::NotFound);
        }
        if inode.nlink >= LINKS_MAX {
            return Err(FsError::TooManyLinks);
        }
        let planned = self.plan_move(ino, None, Some(parent), true);
        self.check_quotas(&planned.charges)?;
        self.carry_out(planned);
        let inode = self.inodes.known_mut(ino);
        inode.nlink += 1;
        inode.ctime = call.now;
        let attr = inode.attr(ino);
        effects.inodes.push(ino);
        self.add_name(parent, name, ino, false, call.now, effects);
        Ok(MetaReply::Attr(attr))
    }

    pub(super) fn unlink(
        &mut self,
        call: &Call,
        parent: InodeId,
        name: &Name,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let ino = self.find(call.credentials, parent, name)?;
        let victim = self.inodes.get(ino)?;
        permissions::check_removal(call.credentials, self.inodes.get(parent)?, victim)?;
        if victim.is_directory() {
            return Err(FsError::IsADirectory);
        }
        if victim.nlink == 1
            && let Some(retention_s) = self.retention_s(parent)
        {
            let old = Place { parent, name };
            match self.put_into_trash(call, ino, old, retention_s, effects) {
                // Without room in the trash, the file is removed permanently.
                Err(FsError::QuotaExceeded) => {}
                done => return done,
            }
        }
        let planned = self.plan_removal(call, ino, parent);
        self.carry_out(planned);
        self.remove_name(parent, name, false, call.now, effects);
        let attr = self.lose_name(call, ino, effects);
        Ok(MetaReply::Removed(Some(attr)))
    }

    pub(super) fn remove_dir(
        &mut self,
        call: &Call,
        parent: InodeId,
        name: &Name,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let ino = self.find(call.credentials, parent, name)?;
        let victim = self.inodes.get(ino)?;
        permissions::check_removal(call.credentials, self.inodes.get(parent)?, victim)?;
        if !victim.directory()?.is_empty() {
            return Err(FsError::NotEmpty);
        }
        self.check_not_trash(ino)?;
        let planned = self.plan_removal(call, ino, parent);
        self.carry_out(planned);
        self.remove_name(parent, name, true, call.now, effects);
        let attr = self.lose_name(call, ino, effects);
        Ok(MetaReply::Removed(Some(attr)))
    }

    /// Adds an entry, or makes it lead elsewhere, and notes the change of the directory.
    pub(super) fn add_name(
        &mut self,
        parent: InodeId,
        name: &Name,
        ino: InodeId,
        is_directory: bool,
        now: Timestamp,
        effects: &mut Effects,
    ) {
        let above = self.inodes.known_mut(parent);
        let Body::Directory(directory) = &mut above.body else {
            panic!("{name:?} is added to inode {parent}, which is no directory");
        };
        self.names += u64::from(directory.insert(name, ino).is_none());
        above.nlink += u32::from(is_directory);
        above.content_changed(now);
        if let Body::Directory(directory) = &mut self.inodes.known_mut(ino).body {
            directory.name = name.as_bytes().into();
        }
        note_entry(parent, name, effects);
    }

    /// Removes an entry and notes the change of the directory.
    pub(super) fn remove_name(
        &mut self,
        parent: InodeId,
        name: &Name,
        is_directory: bool,
        now: Timestamp,
        effects: &mut Effects,
    ) {
        let above = self.inodes.known_mut(parent);
        let Body::Directory(directory) = &mut above.body else {
            panic!("{name:?} is removed from inode {parent}, which is no directory");
        };
        let removed = directory.remove(name).is_some();
        assert!(
            removed,
            "{name:?} is removed from inode {parent}, which does not have it"
        );
        self.names -= 1;
        let links = above.nlink.checked_sub(u32::from(is_directory));
        let Some(links) = links else {
            panic!("inode {parent} has no link for the directory {name:?}");
        };
        above.nlink = links;
        above.content_changed(now);
        note_entry(parent, name, effects);
    }

    /// Drops a link of an inode that has lost a name (a directory, its only one). Returns its attributes
    /// afterwards.
    pub(super) fn lose_name(&mut self, call: &Call, ino: InodeId, effects: &mut Effects) -> Attr {
        let inode = self.inodes.known_mut(ino);
        assert!(inode.nlink > 0, "inode {ino} loses a name, but has none");
        inode.nlink = if inode.is_directory() {
            0
        } else {
            inode.nlink - 1
        };
        inode.ctime = call.now;
        let attr = inode.attr(ino);
        effects.inodes.push(ino);
        if attr.nlink == 0 {
            // An inode that is still charged without a name is an orphan already.
            match (call.held_elsewhere, self.orphans.contains(&ino)) {
                (true, _) => _ = self.orphans.insert(ino),
                (false, true) => self.release_orphans(&[ino], effects),
                (false, false) => self.forget(ino),
            }
        }
        attr
    }

    /// Removes orphans that no session holds; a directory that something is still charged to goes later.
    pub(super) fn release_orphans(&mut self, inodes: &[InodeId], effects: &mut Effects) {
        for &ino in inodes {
            let Some(inode) = self
                .inodes
                .get(ino)
                .ok()
                .filter(|_| self.orphans.contains(&ino))
            else {
                continue;
            };
            if self.is_counted_in(inode) {
                self.unheld.insert(ino);
                continue;
            }
            self.uncharge_nameless(ino);
            self.orphans.remove(&ino);
            self.unheld.remove(&ino);
            self.forget(ino);
            effects.inodes.push(ino);
        }
    }

    /// Removes an inode without names from the table, together with its use of blocks.
    fn forget(&mut self, ino: InodeId) {
        let Some(inode) = self.inodes.remove(ino) else {
            return;
        };
        self.to_raise.remove(&ino);
        self.with_lifetime.remove(&ino);
        match inode.body {
            Body::Regular(file) => {
                self.files -= 1;
                self.spilled_pieces -= file.extents.spilled_pieces() as u64;
                for piece in file.extents.iter() {
                    self.changes.remove(&piece);
                }
                let rules = inode.settings.rules(self.default_rules());
                self.blocks.account(rules, &mut self.changes);
            }
            Body::Directory(directory) => {
                self.directories -= 1;
                self.directories_with_quota -= u64::from(!directory.quota.is_unlimited());
                self.directories_with_trash -= u64::from(directory.trash_s.is_some());
                self.directories_with_settings -= u64::from(!inode.settings.is_empty());
            }
            _ => {}
        }
    }
}

fn note_entry(parent: InodeId, name: &Name, effects: &mut Effects) {
    effects.inodes.push(parent);
    effects.entries.push((parent, name.clone()));
}
