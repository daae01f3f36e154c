//! Recent invalidations, to determine whether an answer may predate one of them.

use std::collections::VecDeque;

use harvestfs_protocol::ids::InodeId;
use parking_lot::Mutex;

/// Number of invalidations of single inodes that are remembered, many more than arrive while one request is served.
/// For older points in time, everything counts as invalidated.
const REMEMBERED_MAX: usize = 4096;

/// Counts invalidations and remembers the most recent ones.
#[derive(Debug, Default)]
pub struct Invalidations {
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    count: u64,
    /// The inodes of the most recent invalidations, the newest last, none of them older than the last invalidation of
    /// everything.
    inodes: VecDeque<InodeId>,
}

/// What was invalidated since a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// Nothing.
    Nothing,
    /// Other inodes, but not the one in question.
    Others,
    /// The inode in question.
    This,
}

impl Invalidations {
    /// The number of invalidations so far. Serves as a point in time for [`Invalidations::since`].
    pub fn count(&self) -> u64 {
        self.recent.lock().count
    }

    /// Records that an inode is invalidated.
    pub fn add(&self, ino: InodeId) {
        let mut recent = self.recent.lock();
        recent.count += 1;
        if recent.inodes.len() == REMEMBERED_MAX {
            recent.inodes.pop_front();
        }
        recent.inodes.push_back(ino);
    }

    /// Records that everything is invalidated.
    pub fn add_all(&self) {
        let mut recent = self.recent.lock();
        recent.count += 1;
        recent.inodes.clear();
    }

    /// What was invalidated since the given `count`, with respect to an inode.
    pub fn since(&self, count: u64, ino: InodeId) -> Since {
        let recent = self.recent.lock();
        assert!(
            count <= recent.count,
            "inode {ino}: asked about {count} invalidations of {}",
            recent.count
        );
        let since = recent.count - count;
        if since == 0 {
            return Since::Nothing;
        }
        if since > recent.inodes.len() as u64 {
            return Since::This;
        }
        // No more than are remembered.
        let mut newest = recent.inodes.iter().rev().take(since as usize);
        if newest.any(|&it| it == ino) {
            Since::This
        } else {
            Since::Others
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THIS: InodeId = InodeId(7);
    const OTHER: InodeId = InodeId(8);

    #[test]
    fn an_inode_is_told_from_others() {
        let invalidations = Invalidations::default();
        let start = invalidations.count();
        assert_eq!(invalidations.since(start, THIS), Since::Nothing);
        invalidations.add(THIS);
        let later = invalidations.count();
        invalidations.add(OTHER);
        assert_eq!(invalidations.since(start, THIS), Since::This);
        assert_eq!(invalidations.since(later, THIS), Since::Others);
        assert_eq!(invalidations.since(later, OTHER), Since::This);
    }

    #[test]
    fn what_is_not_remembered_counts_as_invalidated() {
        let invalidations = Invalidations::default();
        let start = invalidations.count();
        for _ in 0..REMEMBERED_MAX {
            invalidations.add(OTHER);
        }
        assert_eq!(invalidations.since(start, THIS), Since::Others);
        invalidations.add(OTHER);
        assert_eq!(invalidations.since(start, THIS), Since::This);

        let before = invalidations.count();
        invalidations.add_all();
        assert_eq!(invalidations.since(before, THIS), Since::This);
        invalidations.add(OTHER);
        assert_eq!(invalidations.since(before, THIS), Since::This);
        let after = invalidations.count();
        assert_eq!(invalidations.since(after, THIS), Since::Nothing);
    }
}
