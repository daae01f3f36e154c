//! Read-only operations.

use harvestfs_protocol::{
    error::FsError,
    ids::BlockId,
    ids::InodeId,
    limits::{ENTRIES_PER_REPLY_MAX, EXTENTS_PER_REPLY_MAX},
    meta::{DirEntry, MetaOp, MetaReply, StatFs},
    name::Name,
    types::{Credentials, Extent, FileBlock, Located},
};

use super::{
    Namespace,
    inode::{Body, FileData, INODES_MAX},
    permissions::{self, EXECUTE, READ, WRITE},
};

impl Namespace {
    /// Answers a read-only operation. `Opened.located` and `Located` are left empty, and the sizes
    /// in `StatFs` are what quotas leave: the rest is not the namespace's.
    ///
    /// # Errors
    /// Why the operation was refused; [`FsError::Internal`] for a mutation.
    pub fn query(&self, credentials: &Credentials, op: &MetaOp) -> Result<MetaReply, FsError> {
        match op {
            MetaOp::Lookup { parent, name } => {
                let ino = self.find(credentials, *parent, name)?;
                self.get_attr(ino)
            }
            MetaOp::GetAttr { ino } => self.get_attr(*ino),
            MetaOp::Access { ino, mask } => {
                let inode = self.inodes.get(*ino)?;
                permissions::check(credentials, inode, mask & (READ | WRITE | EXECUTE))?;
                Ok(MetaReply::Done)
            }
            MetaOp::ReadDir {
                ino,
                after,
                max_entries,
                with_attributes,
            } => {
                let limit = (*max_entries as usize).clamp(1, ENTRIES_PER_REPLY_MAX);
                self.read_dir(credentials, *ino, after.as_ref(), limit, *with_attributes)
            }
            MetaOp::ReadLink { ino } => match &self.inodes.get(*ino)?.body {
                Body::Symlink(target) => Ok(MetaReply::Bytes(target.to_vec())),
                _ => Err(FsError::InvalidArgument("not a symlink".into())),
            },
            MetaOp::Open {
                ino,
                read,
                write,
                execute,
            } => {
                let bits = [(*read, READ), (*write, WRITE), (*execute, EXECUTE)];
                let wanted = bits.iter().filter(|(wanted, _)| *wanted);
                self.open(
                    credentials,
                    *ino,
                    wanted.fold(0, |mask, (_, bit)| mask | bit),
                )
            }
            MetaOp::GetExtents { ino, from_offset } => {
                let file = self.readable(credentials, *ino)?;
                let (extents, end) = extents_from(file, *from_offset);
                Ok(MetaReply::Extents { extents, end })
            }
            MetaOp::Locate { ino, .. } => {
                self.readable(credentials, *ino)?;
                Ok(MetaReply::Located(Located::default()))
            }
            MetaOp::GetXattr { ino, name } => self.get_xattr(credentials, *ino, name),
            MetaOp::ListXattr { ino } => self.list_xattr(credentials, *ino),
            MetaOp::FindSparse { from } => self.find_sparse(credentials, *from),
            MetaOp::StatFs { ino } => Ok(MetaReply::StatFs(self.stat_fs(*ino)?)),
            _ => Err(FsError::Internal("not a read-only operation".into())),
        }
    }

    /// Without a quota there is no end to it here: the server knows what the datanodes have.
    fn stat_fs(&self, ino: InodeId) -> Result<StatFs, FsError> {
        let room = self.room(ino)?;
        let (total_bytes, free_bytes) = room.bytes.unwrap_or((u64::MAX, u64::MAX));
        let (total_inodes, free_inodes) = room
            .inodes
            .unwrap_or((INODES_MAX, INODES_MAX.saturating_sub(self.inodes.len())));
        Ok(StatFs {
            total_bytes,
            free_bytes,
            available_bytes: free_bytes,
            total_inodes,
            free_inodes,
        })
    }

    fn get_attr(&self, ino: InodeId) -> Result<MetaReply, FsError> {
        Ok(MetaReply::Attr(self.inodes.get(ino)?.attr(ino)))
    }

    fn read_dir(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        after: Option<&Name>,
        limit: usize,
        with_attributes: bool,
    ) -> Result<MetaReply, FsError> {
        let inode = self.inodes.get(ino)?;
        let directory = inode.directory()?;
        permissions::check(credentials, inode, READ)?;
        // Who may list a directory but not search it sees names only.
        let with_attributes =
            with_attributes && permissions::check(credentials, inode, EXECUTE).is_ok();
        let mut rest = directory
            .after(after)
            .filter(|(name, child)| !self.is_hidden(inode, name, *child));
        let mut entries = Vec::new();
        for (name, ino) in rest.by_ref().take(limit) {
            let inode = self.inodes.get(ino)?;
            entries.push(DirEntry {
                name: Name::new(name)?,
                ino,
                kind: inode.kind(),
                attr: with_attributes.then(|| inode.attr(ino)),
            });
        }
        Ok(MetaReply::Entries {
            parent: inode.parent,
            entries,
            end: rest.next().is_none(),
        })
    }

    /// The content of a file that the caller may read.
    fn readable(&self, credentials: &Credentials, ino: InodeId) -> Result<&FileData, FsError> {
        let inode = self.inodes.get(ino)?;
        let file = inode.file()?;
        permissions::check(credentials, inode, READ)?;
        Ok(file)
    }

    /// Those of the blocks that are in the file where the caller says.
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

/// The extents at and after an offset that fit in a reply, and whether these are all.
fn extents_from(file: &FileData, offset: u64) -> (Vec<Extent>, bool) {
    let mut rest = file.extents.from(offset);
    let extents = rest
        .by_ref()
        .take(EXTENTS_PER_REPLY_MAX)
        .map(|piece| piece.extent())
        .collect();
    (extents, rest.next().is_none())
}
