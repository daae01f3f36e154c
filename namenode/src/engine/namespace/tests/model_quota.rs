//! The model's quotas: whatever would leave a directory with more than its quota, and with more than
//! before, is refused and undone.

use super::{model::Model, *};

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

    /// Bytes and inodes below a directory; what has several names is where the first directory that
    /// names it is.
    pub fn used(&self, dir: InodeId) -> (u64, u64) {
        let mut used = (0, 0);
        for &ino in self.inodes.keys() {
            // The first one in the order of inodes.
            let mut above = self.parent_of(ino);
            while let Some(parent) = above {
                if parent == dir {
                    used.0 += self.attr(ino).allocated_bytes;
                    used.1 += 1;
                    break;
                }
                above = self.parent_of(parent);
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
