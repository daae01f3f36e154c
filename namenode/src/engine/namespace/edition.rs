//! Editions: how commands are carried out.
//!
//! A command has to do the same whenever it is replayed, also by a later release. Where a release does
//! something else than those before it, it does so from the record on that begins its edition, and
//! replays what is before that record as it was done then.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::Timestamp;

use super::Namespace;
use super::command::{Effects, Outcome};

/// The edition that this software begins. It is the last one: since the first release, rules change with the
/// version of the cluster (`version.rs`), which an operator raises.
pub const EDITION: u8 = ACCOUNTS_KEPT;
/// From here on each user has a directory in the trash, and what is in the trash or has no name counts
/// where it was. Before, in edition 0, the trash was one directory for all, which counted what was in
/// it, and what had no name counted nowhere.
pub(super) const ACCOUNTS_KEPT: u8 = 1;
/// From here on `fallocate` takes the set-id bits from a file also where it changes nothing.
pub(super) const ALLOCATION_IS_WRITING: u8 = 1;

impl Namespace {
    /// The edition in which commands are carried out.
    #[must_use]
    pub fn edition(&self) -> u8 {
        self.edition
    }

    /// Begins an edition. One that this software does not know is refused.
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

    /// Has what has no name count at the root where it is not known any more in which directory it was.
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
