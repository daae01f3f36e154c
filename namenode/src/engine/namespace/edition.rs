//! Editions: the rules by which commands are carried out.
//!
//! A command must have the same result whenever it is replayed, even by a later release. Where a release
//! behaves differently from those before it, it does so from the record that begins its edition, and
//! replays earlier records by the earlier rules.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::Timestamp;

use super::Namespace;
use super::command::{Effects, Outcome};

/// The newest edition, which this software begins. There will be no other: since the first release, rules
/// change with the version of the cluster (`version.rs`), which an operator raises.
pub const EDITION: u8 = ACCOUNTS_KEPT;
/// From this edition on, each user has a directory in the trash, and inodes that are in the trash or have no
/// name count in the directory that they were in. In edition 0, the trash was one directory for all users,
/// inodes in it counted there, and inodes without a name counted nowhere.
pub(super) const ACCOUNTS_KEPT: u8 = 1;
/// From this edition on, `fallocate` clears the set-id bits of a file even where it changes nothing.
pub(super) const ALLOCATION_IS_WRITING: u8 = 1;

impl Namespace {
    /// The edition in which commands are carried out.
    #[must_use]
    pub fn edition(&self) -> u8 {
        self.edition
    }

    /// Begins an edition. Refuses one that this software does not know.
    pub(super) fn begin_edition(
        &mut self,
        edition: u8,
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<Outcome, FsError> {
        if edition <= self.edition || edition > EDITION {
            return Err(FsError::Internal(format!(
                "edition {edition} does not follow edition {}, or is newer than this software",
                self.edition
            )));
        }
        self.divide_trash(now, effects)?;
        self.edition = edition;
        self.place_nameless();
        self.restore_usage();
        let below_root = self.inodes.known_directory(InodeId::ROOT).used.inodes;
        assert_eq!(
            below_root + 1,
            self.inodes.len(),
            "inodes that count at the root, with it, and inodes that there are in edition {edition}"
        );
        Ok(Outcome::Done)
    }

    /// Counts inodes without a name at the root where their former directory is no longer known.
    fn place_nameless(&mut self) {
        let is_directory = |ino| {
            let inode = self.inodes.get(ino);
            inode.is_ok_and(|inode| inode.is_directory() && inode.nlink > 0)
        };
        let parent_of = |&ino: &InodeId| self.inodes.get(ino).map(|inode| inode.parent);
        let lost = |ino: &InodeId| parent_of(ino).is_ok_and(|parent| !is_directory(parent));
        let lost: Vec<InodeId> = self.orphans.iter().copied().filter(lost).collect();
        for ino in lost {
            let inode = self.inodes.known_mut(ino);
            assert_eq!(inode.nlink, 0, "the orphan {ino} has a name");
            inode.parent = InodeId::ROOT;
        }
    }
}
