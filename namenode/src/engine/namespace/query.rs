//! Read-only operations.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::{ENTRIES_PER_REPLY_MAX, EXTENTS_PER_REPLY_MAX};
use harvestfs_protocol::meta::mutation::MutationFacts;
use harvestfs_protocol::meta::query::{ReadDir, Usage};
use harvestfs_protocol::meta::{DirEntry, MetaReply, Query, StatFs};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials, Extent, FileBlock, Located};

use super::Namespace;
use super::directory::name_of_entry;
use super::inode::{Body, FileData, INODES_MAX};
use super::permissions::{self, EXECUTE, READ, WRITE};

impl Namespace {
    /// Answers a read-only operation. `Opened.located` and `Located` are left empty, and the sizes
    /// in `StatFs` reflect quotas only: the rest is not known to the namespace.
    ///
    /// # Errors
    /// The reason why the operation was refused.
    pub fn query(&self, credentials: &Credentials, op: &Query) -> Result<MetaReply, FsError> {
        match op {
            Query::Lookup(op) => {
                let attr = self.lookup(credentials, op.parent, &op.name)?;
                Ok(MetaReply::Attr(attr))
            }
            Query::GetAttr(op) => Ok(MetaReply::Attr(self.attr(op.ino)?)),
            Query::Access(op) => {
                let inode = self.inodes.get(op.ino)?;
                self.check_access(credentials, inode, op.mask & (READ | WRITE | EXECUTE))?;
                Ok(MetaReply::Done)
            }
            Query::ReadDir(op) => {
                let (entries, end) = self.read_dir(credentials, op)?;
                let parent = self.inodes.get(op.ino)?.parent;
                Ok(MetaReply::Entries {
                    parent,
                    entries,
                    end,
                })
            }
            Query::ReadLink(op) => match &self.inodes.get(op.ino)?.body {
                Body::Symlink(target) => Ok(MetaReply::Bytes(target.to_vec())),
                _ => Err(FsError::InvalidArgument("not a symlink".into())),
            },
            Query::Open(op) => {
                let bits = [(op.read, READ), (op.write, WRITE), (op.execute, EXECUTE)];
                let wanted = bits.iter().filter(|(wanted, _)| *wanted);
                let mask = wanted.fold(0, |mask, (_, bit)| mask | bit);
                self.open(credentials, op.ino, mask)
            }
            Query::GetExtents(op) => {
                let (extents, end) = self.extents(credentials, op.ino, op.from_offset)?;
                Ok(MetaReply::Extents { extents, end })
            }
            Query::Locate(op) => {
                self.readable(credentials, op.ino)?;
                Ok(MetaReply::Located(Located::default()))
            }
            Query::GetXattr(op) => self.get_xattr(credentials, op.ino, &op.name),
            Query::ListXattr(op) => self.list_xattr(credentials, op.ino),
            Query::FindSparse(op) => self.find_sparse(credentials, op.from),
            Query::GetUsage(op) => Ok(MetaReply::Usage(self.usage(credentials, op.ino)?)),
            Query::StatFs(op) => Ok(MetaReply::StatFs(self.stat_fs(op.ino)?)),
        }
    }

    fn usage(&self, credentials: &Credentials, ino: InodeId) -> Result<Usage, FsError> {
        let inode = self.inodes.get(ino)?;
        let directory = inode.directory()?;
        self.check_access(credentials, inode, READ)?;
        Ok(Usage {
            used_bytes: directory.used.bytes,
            used_inodes: directory.used.inodes,
            quota_bytes: directory.quota.bytes,
            quota_inodes: directory.quota.inodes,
        })
    }

    /// Totals as limited by quotas. Without a quota there is no limit on bytes here: the server knows the
    /// space of the datanodes.
    fn stat_fs(&self, ino: InodeId) -> Result<StatFs, FsError> {
        let room = self.room(ino)?;
        let (total_bytes, free_bytes) = room.bytes.unwrap_or((u64::MAX, u64::MAX));
        let inodes = self.inodes.len();
        let Some(unused) = INODES_MAX.checked_sub(inodes) else {
            panic!("there are {inodes} inodes, and numbers for {INODES_MAX}");
        };
        let (total_inodes, free_inodes) = room.inodes.unwrap_or((INODES_MAX, unused));
        Ok(StatFs {
            total_bytes,
            free_bytes,
            available_bytes: free_bytes,
            total_inodes,
            free_inodes,
        })
    }

    /// The attributes of the directories in which a mutation changes names.
    #[must_use]
    pub fn directories_of(&self, facts: &MutationFacts<'_>) -> Vec<Attr> {
        let [first, second] = facts.entries.map(|entry| entry.map(|(dir, _)| dir));
        let dirs = first.into_iter().chain(second.filter(|_| first != second));
        // A directory without a name may have been removed.
        dirs.filter_map(|dir| self.attr(dir).ok()).collect()
    }

    /// The attributes of the inode that a name leads to.
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::PermissionDenied`] and others.
    pub fn lookup(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<Attr, FsError> {
        self.attr(self.find(credentials, parent, name)?)
    }

    /// A part of a file's extents from an offset on, and whether no extent follows.
    ///
    /// # Errors
    /// [`FsError::PermissionDenied`] when the caller may not read the file, [`FsError::Stale`] when
    /// there is none.
    pub fn extents(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        from_offset: u64,
    ) -> Result<(Vec<Extent>, bool), FsError> {
        Ok(extents_from(self.readable(credentials, ino)?, from_offset))
    }

    /// Checks that a file may be read.
    ///
    /// # Errors
    /// [`FsError::PermissionDenied`] when the caller may not read the file, [`FsError::Stale`] when
    /// there is none.
    pub fn check_readable(&self, credentials: &Credentials, ino: InodeId) -> Result<(), FsError> {
        permissions::check(credentials, self.inodes.get(ino)?, READ)
    }

    /// A part of the entries of a directory, and whether no entry follows.
    ///
    /// # Errors
    /// [`FsError::PermissionDenied`] when the caller may not list it, [`FsError::NotADirectory`],
    /// [`FsError::Stale`] when there is none.
    pub fn read_dir(
        &self,
        credentials: &Credentials,
        op: &ReadDir,
    ) -> Result<(Vec<DirEntry>, bool), FsError> {
        let limit = (op.max_entries as usize).clamp(1, ENTRIES_PER_REPLY_MAX);
        let inode = self.inodes.get(op.ino)?;
        let directory = inode.directory()?;
        self.check_access(credentials, inode, READ)?;
        // A caller that may list a directory but not search it sees names only.
        let with_attributes =
            op.with_attributes && self.check_access(credentials, inode, EXECUTE).is_ok();
        let mut rest = directory
            .after(op.after.as_ref())
            .filter(|(name, child)| !self.is_hidden(inode, name, *child));
        let mut entries = Vec::new();
        for (name, ino) in rest.by_ref().take(limit) {
            let inode = self.inodes.known(ino);
            entries.push(DirEntry {
                name: name_of_entry(name),
                ino,
                kind: inode.kind(),
                attr: with_attributes.then(|| inode.attr(ino)),
            });
        }
        Ok((entries, rest.next().is_none()))
    }

    /// The content of a file that the caller may read.
    fn readable(&self, credentials: &Credentials, ino: InodeId) -> Result<&FileData, FsError> {
        let inode = self.inodes.get(ino)?;
        let file = inode.file()?;
        permissions::check(credentials, inode, READ)?;
        Ok(file)
    }

    /// Those of the given blocks that are in the file at the given offset.
    ///
    /// # Errors
    /// [`FsError::PermissionDenied`] when the caller may not read the file, [`FsError::Stale`] when
    /// there is none.
    pub fn readable_blocks(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        blocks: &[FileBlock],
    ) -> Result<Vec<BlockId>, FsError> {
        let file = self.readable(credentials, ino)?;
        let is_there = |at: &&FileBlock| {
            let mut rest = file.extents.from(at.file_offset);
            rest.next()
                .is_some_and(|piece| piece.block == at.block && piece.file_offset <= at.file_offset)
        };
        let there = blocks.iter().filter(is_there);
        Ok(there.map(|at| at.block).collect())
    }

    fn open(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        mask: u8,
    ) -> Result<MetaReply, FsError> {
        let inode = self.inodes.get(ino)?;
        let file = inode.file()?;
        if mask == 0 {
            return Err(FsError::InvalidArgument("opened for nothing".into()));
        }
        permissions::check(credentials, inode, mask)?;
        let (extents, end) = extents_from(file, 0);
        Ok(MetaReply::Opened {
            attr: inode.attr(ino),
            extents,
            end,
            located: Located::default(),
        })
    }
}

/// The extents from an offset on that fit in a reply, and whether no extent follows.
fn extents_from(file: &FileData, offset: u64) -> (Vec<Extent>, bool) {
    let mut rest = file.extents.from(offset);
    let extents: Vec<Extent> = rest
        .by_ref()
        .take(EXTENTS_PER_REPLY_MAX)
        .map(|piece| piece.extent())
        .collect();
    let end = extents.last().map_or(0, Extent::file_end);
    assert!(
        end <= file.size_bytes,
        "a file of {} bytes has extents up to {end}",
        file.size_bytes
    );
    (extents, rest.next().is_none())
}
