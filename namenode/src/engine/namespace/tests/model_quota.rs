//! The model's quotas: a change that would leave a directory with more than its quota, and with
//! more than before, is refused and undone.

use super::model::Model;
use super::*;

pub const QUOTA_BYTES: &[u8] = b"user.harvestfs.quota_bytes";
pub const QUOTA_FILES: &[u8] = b"user.harvestfs.quota_files";

pub fn is_quota(name: &[u8]) -> bool {
    [QUOTA_BYTES, QUOTA_FILES].contains(&name)
}

impl Model {
    /// All quotas: where, which, and how much.
    pub fn quotas(&self) -> Vec<(InodeId, Vec<u8>, u64)> {
        let all = self.inodes.iter().flat_map(|(&ino, node)| {
            let quotas = node.xattrs.iter().filter(|(name, _)| is_quota(name));
            quotas.map(move |(name, value)| {
                let value = String::from_utf8(value.clone()).unwrap();
                (ino, name.clone(), value.parse().unwrap())
            })
        });
        all.collect()
    }

    /// The directory in which something counts: the first in the order of inodes that names it, or where
    /// it was.
    fn account_of(&self, ino: InodeId) -> Option<InodeId> {
        let parent = self.parent_of(ino);
        let elsewhere = parent.is_none_or(|parent| self.is_part_of_trash(parent));
        let was_in = self.counted_in.get(&ino).copied();
        was_in.filter(|_| elsewhere).or(parent)
    }

    /// Whether the contents of `dir` count in `above`.
    pub fn counts_within(&self, dir: InodeId, above: InodeId) -> bool {
        std::iter::successors(Some(dir), |&ino| self.account_of(ino)).any(|ino| ino == above)
    }

    /// Bytes and inodes that count in a directory.
    pub fn used(&self, dir: InodeId) -> (u64, u64) {
        let mut used = (0, 0);
        for &ino in self.inodes.keys() {
            let above = self.account_of(ino);
            if above.is_some_and(|above| self.counts_within(above, dir)) {
                used.0 += self.attr(ino).allocated_bytes;
                used.1 += 1;
            }
        }
        used
    }

    fn counted(&self, dir: InodeId, quota: &[u8]) -> u64 {
        let (bytes, inodes) = self.used(dir);
        if quota == QUOTA_BYTES { bytes } else { inodes }
    }

    pub fn within_quotas<T>(
        &mut self,
        perform: impl FnOnce(&mut Self) -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        let quotas = self.quotas();
        if quotas.is_empty() {
            return perform(self);
        }
        let before = self.clone();
        let answer = perform(self)?;
        for (dir, name, quota) in quotas {
            let now = if self.inodes.contains_key(&dir) {
                self.counted(dir, &name)
            } else {
                0
            };
            if now > quota && now > before.counted(dir, &name) {
                *self = before;
                return Err(FsError::QuotaExceeded);
            }
        }
        Ok(answer)
    }
}
