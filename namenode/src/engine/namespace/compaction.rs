//! Compaction: unused space in blocks is reclaimed by moving the pieces that are still in use
//! elsewhere. A client copies them into a *scratch* file, an orphan that it holds, and makes the files
//! use the copies; the blocks that become unused are freed as usual.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::{
    EXTENTS_PER_REPLY_MAX, INODES_PER_SEARCH_MAX, RELOCATIONS_PER_REQUEST_MAX,
};
use harvestfs_protocol::meta::{MetaReply, Relocation, SparsePiece};
use harvestfs_protocol::types::{Credentials, PlacementRules};

use super::command::Effects;
use super::extents::Piece;
use super::inode::{Body, FileData, Inode, parts};
use super::settings::{self, Settings};
use super::usage::NOWHERE;
use super::{Call, Namespace, permissions};

/// Restricts compaction to the system itself.
fn check_root(credentials: &Credentials) -> Result<(), FsError> {
    if permissions::is_root(credentials) {
        Ok(())
    } else {
        Err(FsError::NotPermitted)
    }
}

impl Namespace {
    pub(super) fn find_sparse(
        &self,
        credentials: &Credentials,
        from: Option<InodeId>,
    ) -> Result<MetaReply, FsError> {
        check_root(credentials)?;
        let first = from.map_or(0, |ino| parts(ino).0);
        let mut pieces = Vec::new();
        for (looked_at, (ino, inode)) in self.inodes.iter_from(first).enumerate() {
            if looked_at >= INODES_PER_SEARCH_MAX || pieces.len() >= EXTENTS_PER_REPLY_MAX {
                return Ok(MetaReply::SparsePieces {
                    pieces,
                    next: Some(ino),
                });
            }
            if let Body::Regular(file) = &inode.body {
                let rules = inode.settings.rules(self.default_rules());
                let room = EXTENTS_PER_REPLY_MAX - pieces.len();
                let sparse = file
                    .extents
                    .iter()
                    .filter(|piece| self.blocks.is_sparse(piece.block))
                    // The remaining pieces of a file with very many are found by a later search.
                    .take(room);
                pieces.extend(sparse.map(|piece| SparsePiece {
                    ino,
                    extent: piece.extent(),
                    rules,
                }));
            }
        }
        Ok(MetaReply::SparsePieces { pieces, next: None })
    }

    pub(super) fn create_scratch(
        &mut self,
        call: &Call,
        rules: &PlacementRules,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        check_root(call.credentials)?;
        settings::check_rules(rules)?;
        let ino = self.insert_inode(Inode {
            mode: 0,
            settings: Settings::from_rules(rules),
            nlink: 0,
            parent: NOWHERE,
            uid: call.credentials.uid,
            gid: call.credentials.gid,
            atime: call.now,
            mtime: call.now,
            ctime: call.now,
            content_version: 0,
            xattrs: None,
            body: Body::Regular(FileData::default()),
        })?;
        let is_new = self.orphans.insert(ino);
        assert!(is_new, "the new scratch file {ino} was an orphan before");
        effects.inodes.push(ino);
        Ok(MetaReply::Attr(self.inodes.get(ino)?.attr(ino)))
    }

    pub(super) fn relocate(
        &mut self,
        call: &Call,
        scratch: InodeId,
        relocations: &[Relocation],
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        check_root(call.credentials)?;
        if relocations.len() > RELOCATIONS_PER_REQUEST_MAX {
            return Err(FsError::InvalidArgument(format!(
                "at most {RELOCATIONS_PER_REQUEST_MAX} pieces can be relocated at once"
            )));
        }
        if !self.orphans.contains(&scratch) {
            return Err(FsError::InvalidArgument("not a scratch file".into()));
        }
        let mut relocated = 0;
        for relocation in relocations {
            let Some(copies) = self.copies(scratch, relocation) else {
                continue;
            };
            self.edit(relocation.ino, |file, changes| {
                let before = file.extents.allocated_bytes();
                for copy in copies {
                    file.extents.write(copy, changes);
                }
                let after = file.extents.allocated_bytes();
                assert_eq!(
                    before, after,
                    "copies are not as long as what {relocation:?} names"
                );
            });
            effects.inodes.push(relocation.ino);
            relocated += 1;
        }
        Ok(MetaReply::Relocated(relocated))
    }

    /// The pieces that replace a relocated one; none when it has changed, or its copy is incomplete.
    fn copies(&self, scratch: InodeId, relocation: &Relocation) -> Option<Vec<Piece>> {
        let wanted = Piece::new(&relocation.extent)?;
        let (start, end) = (wanted.file_offset, wanted.file_end());
        let file = self.inodes.get(relocation.ino).ok()?.file().ok()?;
        let now = file.extents.from(start).next()?.within(start, end)?;
        if relocation.ino == scratch || now != wanted {
            return None;
        }
        let from = relocation.scratch_offset;
        let to = from.checked_add(wanted.length_bytes.into())?;
        let copied = self.inodes.get(scratch).ok()?.file().ok()?;
        let copies: Vec<_> = copied
            .extents
            .from(from)
            .map_while(|piece| piece.within(from, to))
            .map(|piece| Piece {
                // `file_offset` is at least `from`, since the piece was cut to the range.
                file_offset: piece.file_offset - from + start,
                ..piece
            })
            .collect();
        let bytes: u64 = copies.iter().map(|copy| u64::from(copy.length_bytes)).sum();
        (bytes == to - from).then_some(copies)
    }
}
