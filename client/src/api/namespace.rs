//! Operations that change the namespace.

use std::sync::Arc;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{
    AttrChanges, MetaReply, Mutation, RenameMode, SetTime, SetXattrMode, mutation,
};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::{Attr, Credentials, FileKind, PlacementRules};

use crate::api::client::Client;
use crate::api::file::{File, OpenFlags};
use crate::driver::write::files::{Cut, FileState, Serial};
use crate::engine::cache::{CAPABILITY, Ticket};
use crate::engine::session::holds::Keep;
use crate::error::ClientError;

/// `S_ISUID` and `S_ISGID`.
const SPECIAL_BITS: u16 = 0o6000;

/// Whether a commit that follows a change would undo part of it: the length, the modification time,
/// or bits that writing clears.
fn is_undone_by_commit(changes: &AttrChanges) -> bool {
    changes.size_bytes.is_some() || changes.mtime.is_some() || sets_special_bits(changes)
}

fn sets_special_bits(changes: &AttrChanges) -> bool {
    changes.mode.is_some_and(|mode| mode & SPECIAL_BITS != 0)
}

impl Client {
    /// Changes attributes; `None` leaves an attribute unchanged. Returns the resulting attributes. The change is
    /// durable, except for two kinds of changes to a file with uncommitted data: a given modification time, and
    /// owner and mode set to their current values, become durable with the next commit; owner and mode of a new
    /// file, whose first content is not committed yet, become durable with that content or within milliseconds.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::NotPermitted`] and others; if a later commit would
    /// undo the change, also the error that kept written data of the file from being stored. Data
    /// that is refused for lack of room does not keep a file from being truncated.
    pub async fn setattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        changes: AttrChanges,
    ) -> Result<Attr, ClientError> {
        let file = self.core().files.get(ino);
        let mut _serial = None;
        let mut cut = None;
        let mut relaxed = false;
        if let Some(file) = &file
            && file.has_data()
        {
            if let Some(attr) = self.leave_to_commit(credentials, file, &changes) {
                return Ok(attr);
            }
            if is_undone_by_commit(&changes) {
                let serial = file.serial().await;
                if let Err(error) = self.core().files.flush(file, false).await {
                    cut = Some(self.begin_cut(file, &changes, &serial, error).await?);
                }
                _serial = Some(serial);
            } else {
                // The journal gets this before the content: a crash that loses it loses both.
                relaxed = self.core().session.delegations.has(ino);
            }
        }
        let size_bytes = changes.size_bytes;
        let op = mutation::SetAttr { ino, changes };
        let session = &self.core().session;
        let (ticket, reply) = match (&file, cut) {
            (_, Some(cut)) => {
                // This runs even if no caller waits any more: data that was cut off must not come back.
                session
                    .mutate_and_tell(credentials, op, move |answer| cut.ended(answer))
                    .await?
            }
            (Some(file), None) if relaxed => {
                match session.mutate_relaxed(credentials, op.clone()).await {
                    // Just after a crash the namenode cannot tell this request from a replayed one.
                    Err(ClientError::Fs(FsError::InvalidArgument(_))) => {
                        session.mutate(credentials, op).await?
                    }
                    answer => {
                        let answer = answer?;
                        file.note_relaxed(session.last_relaxed());
                        answer
                    }
                }
            }
            _ => session.mutate(credentials, op).await?,
        };
        let attr = attr_of(reply, "SetAttr")?;
        let known = self.with_memory(&ticket, attr.clone());
        match size_bytes {
            Some(size_bytes) => {
                ticket.changed_content(&attr, |extents| extents.clear(size_bytes..u64::MAX));
            }
            None => ticket.changed_attr(&attr),
        }
        Ok(self.known_or_queried(credentials, attr, known, None).await)
    }

    /// Begins to truncate a file after its flush failed with `error`, if that was for lack of room:
    /// truncation makes room, and the data that is cut off needs none.
    async fn begin_cut(
        &self,
        file: &Arc<FileState>,
        changes: &AttrChanges,
        serial: &Serial,
        error: ClientError,
    ) -> Result<Cut, ClientError> {
        let may_be_cut = error.refuses_data() && !sets_special_bits(changes);
        let Some(size_bytes) = changes.size_bytes.filter(|_| may_be_cut) else {
            return Err(error);
        };
        let files = &self.core().files;
        let cut = files.begin_cut(file, size_bytes, serial).await;
        cut.ok_or(error)
    }

    /// Leaves a change to the commit that is due anyway, if that has the same effect: the commit
    /// can set the modification time, and is itself a change, as setting owner or mode to their
    /// current values would be. Every file that is unpacked from an archive gets such changes.
    fn leave_to_commit(
        &self,
        credentials: &Credentials,
        file: &FileState,
        changes: &AttrChanges,
    ) -> Option<Attr> {
        let mtime = match changes.mtime {
            Some(SetTime::To(mtime)) => Some(mtime),
            Some(SetTime::Now) => return None,
            None => None,
        };
        let cache = self.core().session.valid_cache()?;
        let ticket = cache.ticket();
        let attr = cache.attr(file.ino)?;
        let as_it_is = AttrChanges {
            mode: changes.mode.map(|_| attr.permission_bits()),
            uid: changes.uid.map(|_| attr.uid),
            gid: changes.gid.map(|_| attr.gid),
            mtime: changes.mtime,
            opened_for_writing: changes.opened_for_writing,
            ..AttrChanges::default()
        };
        let is_owner = credentials.uid == 0 || credentials.uid == attr.uid;
        // A change of the owner clears these bits, even if it changes nothing else.
        let is_special = attr.permission_bits() & SPECIAL_BITS != 0;
        if *changes != as_it_is || !is_owner || is_special || !file.change_with_commit(mtime) {
            return None;
        }
        // Appends that are queued behind refused ones are not tried for this: the change would fail with them.
        (!ticket.is_overtaken(attr.ino)).then(|| self.with_latest(attr))
    }

    /// Creates a regular file and opens it; fails when the name is taken.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::Exists`] and others.
    pub async fn create_file(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        mode: u16,
        flags: OpenFlags,
    ) -> Result<(Attr, File), ClientError> {
        let (attr, rules) = self
            .create(credentials, parent, name, FileKind::Regular, mode, 0)
            .await?;
        let file = File::new(self, attr.ino, credentials, flags.with_implied());
        file.state().is_new(rules);
        Ok((attr, file))
    }

    /// Creates a regular file, FIFO, socket or device.
    ///
    /// # Errors
    /// As [`Client::create_file`].
    pub async fn mknod(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        kind: FileKind,
        mode: u16,
        rdev: u32,
    ) -> Result<Attr, ClientError> {
        let (attr, _) = self
            .create(credentials, parent, name, kind, mode, rdev)
            .await?;
        if kind == FileKind::Regular {
            let holds = &self.core().session.holds;
            holds.closed(attr.ino, Keep::UnlessChanged);
        }
        Ok(attr)
    }

    /// Returns how the blocks of a regular file are to be placed. That is unknown if the namenode
    /// was asked again and the file already existed.
    async fn create(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        kind: FileKind,
        mode: u16,
        rdev: u32,
    ) -> Result<(Attr, Option<PlacementRules>), ClientError> {
        let op = mutation::Create {
            parent,
            name: name.clone(),
            kind,
            mode,
            rdev,
        };
        let delegations = &self.core().session.delegations;
        let takings = delegations.takings();
        let (ticket, reply) = self.mutate(credentials, op).await?;
        let (attr, rules) = match reply {
            MetaReply::Created {
                attr,
                rules,
                delegated,
            } => {
                if delegated {
                    delegations.given(attr.ino, takings);
                }
                (attr, Some(self.core().session.own_rules(rules)))
            }
            reply => (attr_of(reply, "Create")?, None),
        };
        if kind == FileKind::Regular {
            // The namenode opened it for this session.
            self.core().session.holds.lock().opened(attr.ino, true);
        }
        added(&ticket, parent, name, &attr, None);
        Ok((attr, rules))
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// As [`Client::create_file`].
    pub async fn mkdir(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        mode: u16,
    ) -> Result<Attr, ClientError> {
        let op = mutation::MakeDir {
            parent,
            name: name.clone(),
            mode,
        };
        let (ticket, reply) = self.mutate(credentials, op).await?;
        let attr = attr_of(reply, "MakeDir")?;
        added(&ticket, parent, name, &attr, None);
        Ok(attr)
    }

    /// Creates a symlink.
    ///
    /// # Errors
    /// As [`Client::create_file`].
    pub async fn symlink(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        target: &[u8],
    ) -> Result<Attr, ClientError> {
        let op = mutation::Symlink {
            parent,
            name: name.clone(),
            target: target.to_vec(),
        };
        let (ticket, reply) = self.mutate(credentials, op).await?;
        let attr = attr_of(reply, "Symlink")?;
        added(&ticket, parent, name, &attr, Some(target));
        Ok(attr)
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// As [`Client::create_file`].
    pub async fn link(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        parent: InodeId,
        name: &Name,
    ) -> Result<Attr, ClientError> {
        let op = mutation::Link {
            ino,
            parent,
            name: name.clone(),
        };
        let (ticket, reply) = self.mutate(credentials, op).await?;
        let attr = attr_of(reply, "Link")?;
        let known = self.with_memory(&ticket, attr.clone());
        ticket.changed_attr(&attr);
        ticket.changed_entry(parent, name, Some(attr.ino));
        let name = Some((parent, name));
        Ok(self.known_or_queried(credentials, attr, known, name).await)
    }

    /// Removes a name that does not lead to a directory. Returns the attributes of the inode that it named.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::NotFound`] and others.
    pub async fn unlink(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<Option<Attr>, ClientError> {
        let op = mutation::Unlink {
            parent,
            name: name.clone(),
        };
        let (ticket, reply) = self.mutate(credentials, op).await?;
        let MetaReply::Removed(removed) = reply else {
            return Err(ClientError::UnexpectedReply(mutation::Unlink::NAME));
        };
        ticket.changed_entry(parent, name, None);
        if let Some(attr) = &removed {
            self.lost_name(&ticket, attr);
        }
        Ok(removed)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::NotEmpty`] and others.
    pub async fn rmdir(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<(), ClientError> {
        let op = mutation::RemoveDir {
            parent,
            name: name.clone(),
        };
        let (ticket, reply) = self.mutate(credentials, op).await?;
        let MetaReply::Removed(removed) = reply else {
            return Err(ClientError::UnexpectedReply(mutation::RemoveDir::NAME));
        };
        ticket.changed_entry(parent, name, None);
        if let Some(attr) = &removed {
            ticket.removed(attr.ino);
        }
        Ok(())
    }

    /// Moves a name to the trash, `/.trash`; a directory moves with everything below it. It stays there for
    /// the time that a directory above sets, or else for `retention_s` seconds. Renaming it restores it.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::NotFound`] and others.
    pub async fn remove_to_trash(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        retention_s: u32,
    ) -> Result<(), ClientError> {
        let op = mutation::RemoveToTrash {
            parent,
            name: name.clone(),
            retention_s,
        };
        let (ticket, reply) = self.mutate(credentials, op).await?;
        let MetaReply::Removed(Some(attr)) = reply else {
            return Err(ClientError::UnexpectedReply(mutation::RemoveToTrash::NAME));
        };
        ticket.changed_entry(parent, name, None);
        ticket.changed_inode(attr.ino);
        Ok(())
    }

    /// Snapshots a directory with everything below it as `.snapshot/NAME` in it. Data of closed
    /// files is committed first, here and on other mounts; data that open files have written but
    /// not flushed is not included. Returns the attributes of the copy.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::Exists`] and others.
    pub async fn create_snapshot(
        &self,
        credentials: &Credentials,
        directory: InodeId,
        name: &Name,
    ) -> Result<Attr, ClientError> {
        // The namenode asks the other clients.
        if !planted::is(Bug::SnapshotsCommitted) {
            self.core().files.commit_closed().await?;
        }
        let op = mutation::CreateSnapshot {
            ino: directory,
            name: name.clone(),
        };
        let (_, reply) = self.mutate(credentials, op).await?;
        attr_of(reply, "CreateSnapshot")
    }

    /// Removes a snapshot of a directory.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::NotFound`] and others.
    pub async fn remove_snapshot(
        &self,
        credentials: &Credentials,
        directory: InodeId,
        name: &Name,
    ) -> Result<(), ClientError> {
        let op = mutation::RemoveSnapshot {
            ino: directory,
            name: name.clone(),
        };
        self.mutate(credentials, op).await?;
        Ok(())
    }

    /// Renames; returns the attributes of the inode that was replaced.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::NotFound`] and others.
    pub async fn rename(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        new_parent: InodeId,
        new_name: &Name,
        mode: RenameMode,
    ) -> Result<Option<Attr>, ClientError> {
        let op = mutation::Rename {
            parent,
            name: name.clone(),
            new_parent,
            new_name: new_name.clone(),
            mode,
        };
        let (ticket, reply) = self.mutate(credentials, op).await?;
        let MetaReply::Renamed { moved, other } = reply else {
            return Err(ClientError::UnexpectedReply(mutation::Rename::NAME));
        };
        ticket.moved(&moved, new_parent);
        if other.is_none() && moved.nlink > 1 && moved.kind != FileKind::Directory {
            // If both are names of one file, neither changes.
            ticket.unknown_entry(parent, name);
            ticket.unknown_entry(new_parent, new_name);
            return Ok(None);
        }
        let exchanged = other.as_ref().filter(|_| mode == RenameMode::Exchange);
        let replaced = other.as_ref().filter(|_| mode != RenameMode::Exchange);
        if (parent, name) != (new_parent, new_name) {
            ticket.changed_entry(parent, name, exchanged.map(|attr| attr.ino));
            ticket.changed_entry(new_parent, new_name, Some(moved.ino));
        }
        if let Some(attr) = exchanged {
            ticket.moved(attr, parent);
        }
        if let Some(attr) = replaced {
            self.lost_name(&ticket, attr);
        }
        Ok(replaced.cloned())
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::NotPermitted`] and others.
    pub async fn setxattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: SetXattrMode,
    ) -> Result<(), ClientError> {
        let op = mutation::SetXattr {
            ino,
            name: name.to_vec(),
            value: value.to_vec(),
            mode,
        };
        let file = self.core().files.get(ino);
        let mut _serial = None;
        if let Some(file) = &file
            && name == CAPABILITY
            && file.has_data()
        {
            // The commit of earlier writes would remove it.
            _serial = Some(file.serial.lock().await);
            self.core().files.flush(file, false).await?;
        }
        self.change_xattr(credentials, ino, op).await
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// [`harvestfs_protocol::error::FsError::NoAttribute`] and others.
    pub async fn removexattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        name: &[u8],
    ) -> Result<(), ClientError> {
        let op = mutation::RemoveXattr {
            ino,
            name: name.to_vec(),
        };
        self.change_xattr(credentials, ino, op).await
    }

    async fn change_xattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        op: impl Into<Mutation>,
    ) -> Result<(), ClientError> {
        let (ticket, _) = self.mutate(credentials, op).await?;
        ticket.changed_xattrs(ino);
        if let Some(file) = self.core().files.get(ino) {
            file.set_rules(None);
        }
        Ok(())
    }

    async fn mutate(
        &self,
        credentials: &Credentials,
        op: impl Into<Mutation>,
    ) -> Result<(Ticket, MetaReply), ClientError> {
        self.core().session.mutate(credentials, op).await
    }

    /// Notes that an inode lost a name, perhaps its last one.
    fn lost_name(&self, ticket: &Ticket, attr: &Attr) {
        let gone = attr.nlink == 0 || attr.kind == FileKind::Directory;
        if !gone {
            ticket.changed_attr(attr);
            return;
        }
        self.core().session.holds.lock().lost_last_name(attr.ino);
        if let Some(file) = self.core().files.get(attr.ino) {
            self.core().files.lost_last_name(&file);
        }
        if attr.kind == FileKind::Directory {
            ticket.removed(attr.ino);
            return;
        }
        // The inode lives on without a name if it is open here, or was just looked up by its name
        // and is about to be opened. Therefore written data is committed nevertheless.
        ticket.changed_attr(attr);
    }
}

/// Adds a new inode and its name to the cache.
fn added(ticket: &Ticket, parent: InodeId, name: &Name, attr: &Attr, target: Option<&[u8]>) {
    ticket.created(attr, target, parent);
    ticket.changed_entry(parent, name, Some(attr.ino));
}

fn attr_of(reply: MetaReply, what: &'static str) -> Result<Attr, ClientError> {
    match reply {
        MetaReply::Attr(attr) => Ok(attr),
        _ => Err(ClientError::UnexpectedReply(what)),
    }
}
