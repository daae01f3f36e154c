//! The namespace of the fake namenode: just what the tests use, as simple as it can be.

use std::collections::{BTreeMap, HashMap, HashSet};

use harvestfs_protocol::{
    error::FsError,
    ids::{BlockId, InodeId},
    meta::{
        AttrChanges, DirEntry, FallocateMode, FileCommit, FileCommitted, MetaOp, MetaReply,
        RenameMode, SetTime, StatFs,
    },
    name::Name,
    types::{Attr, Credentials, Extent, FileBlock, FileKind, Located, Timestamp},
};

use crate::{extents::ExtentMap, permissions};

#[derive(Clone)]
pub(super) struct Inode {
    pub(super) attr: Attr,
    pub(super) extents: ExtentMap,
    entries: BTreeMap<Name, InodeId>,
    parent: InodeId,
    target: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

#[derive(Clone)]
pub(super) struct Namespace {
    pub(super) inodes: HashMap<InodeId, Inode>,
    next_inode: u64,
    clock: i64,
    /// Inodes that some session holds open.
    pub(super) held: HashSet<InodeId>,
    /// Blocks and how long they are at most.
    pub(super) sealed: HashMap<BlockId, u64>,
}

/// What caches elsewhere have to forget.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) inodes: Vec<InodeId>,
    pub(super) entries: Vec<(InodeId, Name)>,
}

impl Namespace {
    pub(super) fn new() -> Self {
        let mut this = Self {
            inodes: HashMap::new(),
            next_inode: 1,
            clock: 1_000,
            held: HashSet::new(),
            sealed: HashMap::new(),
        };
        this.make(
            InodeId::ROOT,
            FileKind::Directory,
            0o777,
            &Credentials::root(),
        );
        this
    }

    fn now(&mut self) -> Timestamp {
        self.clock += 1;
        Timestamp(self.clock)
    }

    fn make(&mut self, parent: InodeId, kind: FileKind, mode: u16, who: &Credentials) -> InodeId {
        let ino = InodeId(self.next_inode);
        self.next_inode += 1;
        let now = self.now();
        let attr = Attr {
            ino,
            kind,
            mode,
            nlink: if kind == FileKind::Directory { 2 } else { 1 },
            uid: who.uid,
            gid: who.gid,
            rdev: 0,
            size_bytes: 0,
            allocated_bytes: 0,
            atime: now,
            mtime: now,
            ctime: now,
            content_version: 0,
        };
        let inode = Inode {
            attr,
            extents: ExtentMap::default(),
            entries: BTreeMap::new(),
            parent,
            target: Vec::new(),
            xattrs: BTreeMap::new(),
        };
        self.inodes.insert(ino, inode);
        ino
    }

    fn get(&self, ino: InodeId) -> Result<&Inode, FsError> {
        self.inodes.get(&ino).ok_or(FsError::Stale)
    }

    fn get_mut(&mut self, ino: InodeId) -> Result<&mut Inode, FsError> {
        self.inodes.get_mut(&ino).ok_or(FsError::Stale)
    }

    fn child(&self, parent: InodeId, name: &Name) -> Result<InodeId, FsError> {
        let directory = self.get(parent)?;
        if directory.attr.kind != FileKind::Directory {
            return Err(FsError::NotADirectory);
        }
        directory
            .entries
            .get(name)
            .copied()
            .ok_or(FsError::NotFound)
    }

    pub(super) fn query(&self, who: &Credentials, op: &MetaOp) -> Result<MetaReply, FsError> {
        Ok(match op {
            MetaOp::Lookup { parent, name } => {
                if !permissions::permits(&self.get(*parent)?.attr, who, permissions::EXECUTE) {
                    return Err(FsError::PermissionDenied);
                }
                let ino = self.child(*parent, name)?;
                MetaReply::Attr(self.get(ino)?.attr.clone())
            }
            MetaOp::GetAttr { ino } => MetaReply::Attr(self.get(*ino)?.attr.clone()),
            MetaOp::Access { ino, mask } => {
                if !permissions::permits(&self.get(*ino)?.attr, who, *mask) {
                    return Err(FsError::PermissionDenied);
                }
                MetaReply::Done
            }
            MetaOp::ReadDir {
                ino,
                after,
                max_entries,
                with_attributes,
            } => {
                let directory = self.get(*ino)?;
                let names: Vec<_> = directory
                    .entries
                    .iter()
                    .filter(|(name, _)| after.as_ref().is_none_or(|after| *name > after))
                    .collect();
                let page = names.iter().take(*max_entries as usize);
                let entries = page
                    .map(|(name, ino)| {
                        let attr = self.get(**ino)?.attr.clone();
                        Ok(DirEntry {
                            name: (*name).clone(),
                            ino: **ino,
                            kind: attr.kind,
                            attr: with_attributes.then_some(attr),
                        })
                    })
                    .collect::<Result<Vec<_>, FsError>>()?;
                MetaReply::Entries {
                    parent: directory.parent,
                    end: entries.len() == names.len(),
                    entries,
                }
            }
            MetaOp::ReadLink { ino } => MetaReply::Bytes(self.get(*ino)?.target.clone()),
            MetaOp::Open {
                ino,
                read,
                write,
                execute,
            } => {
                let inode = self.get(*ino)?;
                let mask = u8::from(*read) * 4 + u8::from(*write) * 2 + u8::from(*execute);
                if !permissions::permits(&inode.attr, who, mask) {
                    return Err(FsError::PermissionDenied);
                }
                MetaReply::Opened {
                    attr: inode.attr.clone(),
                    // Two at a time, so that clients have to ask for the rest.
                    extents: inode.extents.from(0).copied().take(2).collect(),
                    end: inode.extents.len() <= 2,
                    located: Located::default(),
                }
            }
            MetaOp::GetExtents { ino, from_offset } => {
                let all: Vec<Extent> = self
                    .get(*ino)?
                    .extents
                    .from(*from_offset)
                    .copied()
                    .collect();
                MetaReply::Extents {
                    extents: all.iter().take(3).copied().collect(),
                    end: all.len() <= 3,
                }
            }
            MetaOp::GetXattr { ino, name } => {
                let value = self.get(*ino)?.xattrs.get(name).cloned();
                MetaReply::Bytes(value.ok_or(FsError::NoAttribute)?)
            }
            MetaOp::ListXattr { ino } => {
                MetaReply::Names(self.get(*ino)?.xattrs.keys().cloned().collect())
            }
            MetaOp::StatFs { .. } => MetaReply::StatFs(StatFs {
                total_bytes: 1 << 40,
                free_bytes: 1 << 39,
                available_bytes: 1 << 39,
                total_inodes: 1 << 32,
                free_inodes: (1 << 32) - self.inodes.len() as u64,
            }),
            other => return Err(FsError::NotSupported(format!("{other:?}"))),
        })
    }

    /// Those of the blocks that are in the file where the caller says.
    pub(super) fn blocks_of(
        &self,
        ino: InodeId,
        blocks: &[FileBlock],
    ) -> Result<Vec<BlockId>, FsError> {
        let extents = &self.get(ino)?.extents;
        let is_there = |at: &&FileBlock| {
            let byte = extents.overlapping(&(at.file_offset..at.file_offset + 1));
            byte.iter().any(|extent| extent.block == at.block)
        };
        let there = blocks.iter().filter(is_there);
        Ok(there.map(|at| at.block).collect())
    }

    pub(super) fn mutate(
        &mut self,
        who: &Credentials,
        op: &MetaOp,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let now = self.now();
        Ok(match op {
            MetaOp::SetAttr { ino, changes } => {
                effects.inodes.push(*ino);
                MetaReply::Attr(self.set_attr(*ino, changes, now)?)
            }
            MetaOp::Create {
                parent,
                name,
                kind,
                mode,
                ..
            } => {
                let ino = self.add(who, *parent, name, *kind, *mode, effects)?;
                if *kind == FileKind::Regular {
                    self.held.insert(ino);
                }
                MetaReply::Attr(self.get(ino)?.attr.clone())
            }
            MetaOp::MakeDir { parent, name, mode } => {
                let ino = self.add(who, *parent, name, FileKind::Directory, *mode, effects)?;
                self.get_mut(*parent)?.attr.nlink += 1;
                MetaReply::Attr(self.get(ino)?.attr.clone())
            }
            MetaOp::Symlink {
                parent,
                name,
                target,
            } => {
                let ino = self.add(who, *parent, name, FileKind::Symlink, 0o777, effects)?;
                self.get_mut(ino)?.target = target.clone();
                MetaReply::Attr(self.get(ino)?.attr.clone())
            }
            MetaOp::Link { ino, parent, name } => {
                if self.child(*parent, name).is_ok() {
                    return Err(FsError::Exists);
                }
                self.get_mut(*parent)?.entries.insert(name.clone(), *ino);
                let inode = self.get_mut(*ino)?;
                inode.attr.nlink += 1;
                inode.attr.ctime = now;
                effects.inodes.extend([*ino, *parent]);
                effects.entries.push((*parent, name.clone()));
                MetaReply::Attr(inode.attr.clone())
            }
            MetaOp::Unlink { parent, name } | MetaOp::RemoveDir { parent, name } => {
                MetaReply::Removed(Some(self.remove(*parent, name, now, effects)?))
            }
            MetaOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                mode,
            } => {
                let ino = self.child(*parent, name)?;
                let other = self.child(*new_parent, new_name).ok();
                if other == Some(ino) {
                    let moved = self.get(ino)?.attr.clone();
                    return Ok(MetaReply::Renamed { moved, other: None });
                }
                let mut removed = match (mode, other) {
                    (RenameMode::NoReplace, Some(_)) => return Err(FsError::Exists),
                    (RenameMode::Replace, Some(_)) => {
                        Some(self.remove(*new_parent, new_name, now, effects)?)
                    }
                    _ => None,
                };
                self.get_mut(*parent)?.entries.remove(name);
                if let (RenameMode::Exchange, Some(other)) = (mode, other) {
                    self.get_mut(*parent)?.entries.insert(name.clone(), other);
                    effects.inodes.push(other);
                    let exchanged = self.get_mut(other)?;
                    exchanged.attr.ctime = now;
                    removed = Some(exchanged.attr.clone());
                }
                self.get_mut(*new_parent)?
                    .entries
                    .insert(new_name.clone(), ino);
                self.get_mut(ino)?.attr.ctime = now;
                effects.inodes.extend([ino, *parent, *new_parent]);
                effects.entries.push((*parent, name.clone()));
                effects.entries.push((*new_parent, new_name.clone()));
                MetaReply::Renamed {
                    moved: self.get(ino)?.attr.clone(),
                    other: removed,
                }
            }
            MetaOp::SetXattr {
                ino, name, value, ..
            } => {
                effects.inodes.push(*ino);
                let xattrs = &mut self.get_mut(*ino)?.xattrs;
                xattrs.insert(name.clone(), value.clone());
                MetaReply::Done
            }
            MetaOp::RemoveXattr { ino, name } => {
                effects.inodes.push(*ino);
                let removed = self.get_mut(*ino)?.xattrs.remove(name);
                removed
                    .map(|_| MetaReply::Done)
                    .ok_or(FsError::NoAttribute)?
            }
            MetaOp::Fallocate {
                ino,
                offset,
                length_bytes,
                mode,
            } => {
                effects.inodes.push(*ino);
                let inode = self.get_mut(*ino)?;
                let end = offset + length_bytes;
                if matches!(mode, FallocateMode::Allocate | FallocateMode::ZeroRange) {
                    inode.attr.size_bytes = inode.attr.size_bytes.max(end);
                }
                if !matches!(
                    mode,
                    FallocateMode::Allocate | FallocateMode::AllocateKeepSize
                ) {
                    inode.extents.clear(*offset..end);
                }
                inode.attr.content_version += 1;
                MetaReply::Attr(inode.attr.clone())
            }
            MetaOp::CloneRange {
                source,
                source_offset,
                destination,
                destination_offset,
                length_bytes,
            } => {
                effects.inodes.push(*destination);
                let source = self.get(*source)?;
                let left = source.attr.size_bytes.saturating_sub(*source_offset);
                let length_bytes = left.min(*length_bytes);
                let range = *source_offset..source_offset + length_bytes;
                let mut pieces = source.extents.overlapping(&range);
                for piece in &mut pieces {
                    piece.file_offset = piece.file_offset - source_offset + destination_offset;
                }
                let end = destination_offset + length_bytes;
                let inode = self.get_mut(*destination)?;
                inode.extents.clear(*destination_offset..end);
                inode.extents.apply(&pieces);
                inode.attr.size_bytes = inode.attr.size_bytes.max(end);
                inode.attr.content_version += 1;
                MetaReply::Attr(inode.attr.clone())
            }
            MetaOp::Commit { files, .. } => {
                let committed = files.iter().map(|file| self.commit(file, now, effects));
                MetaReply::Committed(committed.collect())
            }
            MetaOp::SealBlocks { blocks } => {
                for sealed in blocks {
                    self.sealed.insert(sealed.block, sealed.length_bytes);
                }
                MetaReply::Done
            }
            other => return Err(FsError::NotSupported(format!("{other:?}"))),
        })
    }

    fn add(
        &mut self,
        who: &Credentials,
        parent: InodeId,
        name: &Name,
        kind: FileKind,
        mode: u16,
        effects: &mut Effects,
    ) -> Result<InodeId, FsError> {
        match self.child(parent, name) {
            Ok(_) => return Err(FsError::Exists),
            Err(FsError::NotFound) => {}
            Err(error) => return Err(error),
        }
        let ino = self.make(parent, kind, mode, who);
        let ctime = self.get(ino)?.attr.ctime;
        let directory = self.get_mut(parent)?;
        directory.entries.insert(name.clone(), ino);
        directory.attr.mtime = ctime;
        directory.attr.ctime = ctime;
        effects.inodes.push(parent);
        effects.entries.push((parent, name.clone()));
        Ok(ino)
    }

    fn remove(
        &mut self,
        parent: InodeId,
        name: &Name,
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<Attr, FsError> {
        let ino = self.child(parent, name)?;
        if !self.get(ino)?.entries.is_empty() {
            return Err(FsError::NotEmpty);
        }
        let is_directory = self.get(ino)?.attr.kind == FileKind::Directory;
        let directory = self.get_mut(parent)?;
        directory.entries.remove(name);
        directory.attr.mtime = now;
        directory.attr.ctime = now;
        directory.attr.nlink -= u32::from(is_directory);
        let inode = self.get_mut(ino)?;
        inode.attr.nlink -= if is_directory { 2 } else { 1 };
        inode.attr.ctime = now;
        let attr = inode.attr.clone();
        if attr.nlink == 0 && !self.held.contains(&ino) {
            self.inodes.remove(&ino);
        }
        effects.inodes.extend([ino, parent]);
        effects.entries.push((parent, name.clone()));
        Ok(attr)
    }

    pub(super) fn release(&mut self, inodes: &[InodeId]) {
        for ino in inodes {
            self.held.remove(ino);
            if self
                .inodes
                .get(ino)
                .is_some_and(|inode| inode.attr.nlink == 0)
            {
                self.inodes.remove(ino);
            }
        }
    }

    fn set_attr(
        &mut self,
        ino: InodeId,
        changes: &AttrChanges,
        now: Timestamp,
    ) -> Result<Attr, FsError> {
        let inode = self.get_mut(ino)?;
        let attr = &mut inode.attr;
        attr.mode = changes.mode.unwrap_or(attr.mode);
        attr.uid = changes.uid.unwrap_or(attr.uid);
        attr.gid = changes.gid.unwrap_or(attr.gid);
        if let Some(size_bytes) = changes.size_bytes {
            attr.size_bytes = size_bytes;
            attr.content_version += 1;
            attr.mtime = now;
            inode.extents.clear(size_bytes..u64::MAX);
        }
        let time = |time: SetTime| match time {
            SetTime::Now => now,
            SetTime::To(time) => time,
        };
        attr.mtime = changes.mtime.map_or(attr.mtime, time);
        attr.atime = changes.atime.map_or(attr.atime, time);
        attr.ctime = now;
        Ok(attr.clone())
    }

    fn commit(
        &mut self,
        commit: &FileCommit,
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<FileCommitted, FsError> {
        let sealed = self.sealed.clone();
        let inode = self.get_mut(commit.ino)?;
        let base = if commit.append {
            inode.attr.size_bytes
        } else {
            0
        };
        for extent in &commit.extents {
            let limit = sealed.get(&extent.block).copied().unwrap_or(u64::MAX);
            if extent.block_end() > limit {
                return Err(FsError::InvalidArgument("beyond a sealed block".into()));
            }
            let placed = Extent {
                file_offset: extent.file_offset + base,
                ..*extent
            };
            inode.extents.apply(&[placed]);
            inode.attr.size_bytes = inode.attr.size_bytes.max(placed.file_end());
        }
        inode.attr.content_version += 1;
        inode.attr.mtime = commit.mtime.unwrap_or(now);
        inode.attr.ctime = now;
        effects.inodes.push(commit.ino);
        Ok(FileCommitted {
            attr: inode.attr.clone(),
            append_offset: base,
        })
    }
}
