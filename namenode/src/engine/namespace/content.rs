//! The content of regular files: commits, holes and clones.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::{
    BLOCKS_PER_REQUEST_MAX, EXTENTS_PER_COMMIT_MAX, FILE_BYTES_MAX, FILES_PER_COMMIT_MAX,
    PIECES_OF_CLONES_MAX, PIECES_PER_CLONE_MAX,
};
use harvestfs_protocol::meta::mutation::CloneRange;
use harvestfs_protocol::meta::{FallocateMode, FileCommit, FileCommitted, MetaReply, SealedBlock};
use harvestfs_protocol::types::{Extent, PlacementRules};

use super::command::{Effects, Outcome};
use super::edition::ALLOCATION_IS_WRITING;
use super::extents::{Piece, UseChanges};
use super::inode::{Body, FileData, Inode};
use super::settings::{self, Settings};
use super::usage::Change;
use super::{Call, Namespace, permissions};

/// An extent of a commit as a piece of the file, shifted by `base` bytes.
fn placed(extent: &Extent, base: u64) -> Result<Piece, FsError> {
    let file_offset = extent.file_offset.checked_add(base);
    let end = file_offset.and_then(|offset| offset.checked_add(extent.length_bytes));
    match (file_offset, end) {
        (Some(file_offset), Some(end)) if end <= FILE_BYTES_MAX => Piece::new(&Extent {
            file_offset,
            ..*extent
        })
        .ok_or_else(|| {
            FsError::InvalidArgument("an extent is empty or reaches beyond its block".into())
        }),
        _ => Err(FsError::FileTooLarge),
    }
}

impl Namespace {
    /// Edits the content of a regular file, and updates the use of blocks and the usage of directories.
    pub(super) fn edit(
        &mut self,
        ino: InodeId,
        edit: impl FnOnce(&mut FileData, &mut UseChanges),
    ) -> &mut Inode {
        let default_rules = self.default_rules();
        let inode = self.inodes.known_mut(ino);
        let rules = inode.settings.rules(default_rules);
        let Body::Regular(file) = &mut inode.body else {
            panic!("the content of inode {ino} is edited, which is no regular file");
        };
        self.spilled_pieces -= file.extents.spilled_pieces() as u64;
        let before = file.extents.allocated_bytes();
        edit(file, &mut self.changes);
        self.spilled_pieces += file.extents.spilled_pieces() as u64;
        let bytes = file.extents.allocated_bytes().cast_signed() - before.cast_signed();
        let used = self.changes.sum();
        assert_eq!(
            used, bytes,
            "file {ino} has {bytes} bytes more of extents, but uses {used} more of blocks"
        );
        let (end, size_bytes) = (file.extents.end(), file.size_bytes);
        assert!(
            end <= size_bytes,
            "file {ino} has {size_bytes} bytes, but extents up to {end}"
        );
        self.blocks.account(rules, &mut self.changes);
        if bytes != 0
            && let Some(dir) = self.counted_in(ino)
        {
            self.charge(&[(dir, Change { bytes, inodes: 0 })]);
        }
        self.inodes.known_mut(ino)
    }

    pub(super) fn commit(
        &mut self,
        call: &Call,
        files: &[FileCommit],
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let extents: usize = files.iter().map(|file| file.extents.len()).sum();
        if files.len() > FILES_PER_COMMIT_MAX || extents > EXTENTS_PER_COMMIT_MAX {
            return Err(FsError::InvalidArgument(format!(
                "a commit has at most {FILES_PER_COMMIT_MAX} files and \
                 {EXTENTS_PER_COMMIT_MAX} extents"
            )));
        }
        let mut pieces = Vec::new();
        let committed = files
            .iter()
            .map(|file| self.commit_file(call, file, &mut pieces, effects))
            .collect();
        Ok(MetaReply::Committed(committed))
    }

    fn commit_file(
        &mut self,
        call: &Call,
        commit: &FileCommit,
        pieces: &mut Vec<Piece>,
        effects: &mut Effects,
    ) -> Result<FileCommitted, FsError> {
        let inode = self.inodes.get(commit.ino)?;
        if inode.is_frozen() {
            return Err(FsError::ReadOnly);
        }
        let file = inode.file()?;
        let base = if commit.append { file.size_bytes } else { 0 };
        pieces.clear();
        for extent in &commit.extents {
            let piece = placed(extent, base)?;
            self.blocks.check_commit(call.session, &piece)?;
            pieces.push(piece);
        }
        self.check_growth(commit.ino, pieces, (0, 0))?;
        for piece in pieces.iter() {
            self.blocks.committed(piece);
        }
        let inode = self.edit(commit.ino, |file, changes| {
            for piece in pieces.iter() {
                file.extents.write(*piece, changes);
                file.size_bytes = file.size_bytes.max(piece.file_end());
            }
        });
        if !pieces.is_empty() {
            inode.content_changed(call.now);
            permissions::content_written(call.credentials, inode);
        }
        if let Some(mtime) = commit.mtime {
            inode.mtime = mtime;
            inode.ctime = call.now;
        }
        effects.inodes.push(commit.ino);
        Ok(FileCommitted {
            attr: inode.attr(commit.ino),
            append_offset: base,
        })
    }

    pub(super) fn fallocate(
        &mut self,
        call: &Call,
        ino: InodeId,
        (offset, length_bytes): (u64, u64),
        mode: FallocateMode,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let size_bytes = self.inodes.get(ino)?.file()?.size_bytes;
        if length_bytes == 0 {
            return Err(FsError::InvalidArgument("the range is empty".into()));
        }
        let end = offset
            .checked_add(length_bytes)
            .filter(|&end| end <= FILE_BYTES_MAX)
            .ok_or(FsError::FileTooLarge)?;
        let (clears, extends) = match mode {
            FallocateMode::Allocate => (false, true),
            FallocateMode::AllocateKeepSize => (false, false),
            FallocateMode::PunchHole | FallocateMode::ZeroRangeKeepSize => (true, false),
            FallocateMode::ZeroRange => (true, true),
        };
        let grows = extends && end > size_bytes;
        // As in Linux, even if nothing is changed.
        let drops_privileges = self.edition >= ALLOCATION_IS_WRITING;
        let inode = self.edit(ino, |file, changes| {
            if clears {
                file.extents.clear(offset, end, changes);
            }
            if grows {
                file.size_bytes = end;
            }
        });
        if clears || grows {
            inode.content_changed(call.now);
        }
        if clears || grows || drops_privileges {
            permissions::content_written(call.credentials, inode);
        }
        inode.ctime = call.now;
        effects.inodes.push(ino);
        Ok(MetaReply::Attr(inode.attr(ino)))
    }

    pub(super) fn clone_range(
        &mut self,
        call: &Call,
        (source, source_offset): (InodeId, u64),
        (destination, destination_offset): (InodeId, u64),
        length_bytes: u64,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let (from, to) = ((source, source_offset), (destination, destination_offset));
        let ends = self.ends_of_clone(from, to, length_bytes)?;
        let Some((source_end, destination_end)) = ends else {
            let inode = self.inodes.get(destination)?;
            return Ok(MetaReply::Attr(inode.attr(destination)));
        };
        let file = self.inodes.get(source)?.file()?;
        let pieces: Vec<_> = file
            .extents
            .from(source_offset)
            .map_while(|piece| piece.within(source_offset, source_end))
            .map(|piece| Piece {
                // `file_offset` is at least `source_offset`, since the piece was cut to the range.
                file_offset: piece.file_offset - source_offset + destination_offset,
                ..piece
            })
            .collect();
        self.check_growth(destination, &pieces, (destination_offset, destination_end))?;
        let inode = self.edit(destination, |file, changes| {
            file.extents
                .clear(destination_offset, destination_end, changes);
            for piece in pieces {
                file.extents.write(piece, changes);
            }
            file.size_bytes = file.size_bytes.max(destination_end);
        });
        inode.content_changed(call.now);
        permissions::content_written(call.credentials, inode);
        effects.inodes.push(destination);
        Ok(MetaReply::Attr(inode.attr(destination)))
    }

    /// The ends of a clone in its source and in its destination; none if there is nothing to share.
    fn ends_of_clone(
        &self,
        (source, source_offset): (InodeId, u64),
        (destination, destination_offset): (InodeId, u64),
        length_bytes: u64,
    ) -> Result<Option<(u64, u64)>, FsError> {
        self.inodes.get(destination)?.file()?;
        let size_bytes = self.inodes.get(source)?.file()?.size_bytes;
        let length_bytes = length_bytes.min(size_bytes.saturating_sub(source_offset));
        if length_bytes == 0 {
            return Ok(None);
        }
        // Within the source's size, so it does not overflow.
        let source_end = source_offset + length_bytes;
        let destination_end = destination_offset
            .checked_add(length_bytes)
            .filter(|&end| end <= FILE_BYTES_MAX)
            .ok_or(FsError::FileTooLarge)?;
        let overlaps = source_offset < destination_end && destination_offset < source_end;
        if source == destination && overlaps {
            return Err(FsError::InvalidArgument("the ranges overlap".into()));
        }
        Ok(Some((source_end, destination_end)))
    }

    /// Checks that a clone shares no more pieces than the namenode can in one command. To be called before the
    /// clone becomes a record: applying does not check, since records of earlier releases may hold larger clones.
    /// A clone that applying refuses anyway passes.
    ///
    /// # Errors
    /// [`FsError::NotSupported`] when there are too many pieces in the range, or would be in the destination; a part of
    /// the range may have few enough.
    pub fn check_clone(&self, op: &CloneRange) -> Result<(), FsError> {
        let from = (op.source, op.source_offset);
        let to = (op.destination, op.destination_offset);
        let Ok(Some((source_end, _))) = self.ends_of_clone(from, to, op.length_bytes) else {
            return Ok(());
        };
        let there = &self.inodes.get(op.destination)?.file()?.extents;
        let room = PIECES_OF_CLONES_MAX.saturating_sub(there.spilled_pieces());
        let max = PIECES_PER_CLONE_MAX.min(room);
        let file = self.inodes.get(op.source)?.file()?;
        let pieces = file.extents.from(op.source_offset);
        let shared = pieces.take_while(|piece| piece.file_offset < source_end);
        if shared.take(max + 1).count() > max {
            return Err(FsError::NotSupported(format!(
                "sharing more than {PIECES_PER_CLONE_MAX} pieces of a file at once, and making a file of more \
                 than {PIECES_OF_CLONES_MAX} by that"
            )));
        }
        Ok(())
    }

    pub(super) fn allocate_blocks(
        &mut self,
        call: &Call,
        count: u32,
        rules: PlacementRules,
        effects: &mut Effects,
    ) -> Result<Outcome, FsError> {
        settings::check_rules(&rules)?;
        if count == 0 || count as usize > BLOCKS_PER_REQUEST_MAX {
            return Err(FsError::InvalidArgument(format!(
                "1 to {BLOCKS_PER_REQUEST_MAX} blocks can be allocated at once"
            )));
        }
        if self.blocks_left() < u64::from(count) {
            // The namenode is about to begin the next epoch.
            return Err(FsError::Busy {
                retry_after_ms: 1_000,
            });
        }
        let blocks = (0..count)
            .map(|_| self.blocks.allocate(call.session, rules, effects))
            .collect();
        Ok(Outcome::Blocks(blocks))
    }

    pub(super) fn seal_blocks(
        &mut self,
        call: &Call,
        seals: &[SealedBlock],
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        if seals.len() > BLOCKS_PER_REQUEST_MAX {
            return Err(FsError::InvalidArgument(format!(
                "at most {BLOCKS_PER_REQUEST_MAX} blocks can be sealed at once"
            )));
        }
        self.blocks.check_seal(call.session, seals)?;
        self.blocks.seal(seals, effects);
        Ok(MetaReply::Done)
    }

    /// Sets the settings of a file or directory. The rules of a file's blocks change with them.
    pub(super) fn change_settings(&mut self, ino: InodeId, settings: Settings) {
        let default_rules = self.default_rules();
        let inode = self.inodes.known_mut(ino);
        let before = std::mem::replace(&mut inode.settings, settings);
        let kind = inode.kind();
        match &inode.body {
            Body::Directory(_) => {
                self.directories_with_settings += u64::from(!settings.is_empty());
                self.directories_with_settings -= u64::from(!before.is_empty());
            }
            Body::Regular(file) => {
                for piece in file.extents.iter() {
                    self.changes.remove(&piece);
                }
                self.blocks
                    .account(before.rules(default_rules), &mut self.changes);
                for piece in file.extents.iter() {
                    self.changes.add(&piece);
                }
                self.blocks
                    .account(settings.rules(default_rules), &mut self.changes);
            }
            _ => {}
        }
        self.note_raise(ino, kind, settings);
    }
}
