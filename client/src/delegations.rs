//! Delegations of this session: files that it created and whose first content it may commit after
//! `close`, because the namenode asks for it before it tells another session of the file.

use std::{
    collections::HashSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

use harvestfs_protocol::ids::InodeId;

/// See the module. The namenode bounds how many there are.
#[derive(Default)]
pub(crate) struct Delegations {
    inodes: Mutex<HashSet<InodeId>>,
}

impl Delegations {
    pub(crate) fn given(&self, ino: InodeId) {
        self.lock().insert(ino);
    }

    pub(crate) fn has(&self, ino: InodeId) -> bool {
        self.lock().contains(&ino)
    }

    /// From now on, every `close` of the file waits for the commit.
    pub(crate) fn returned(&self, ino: InodeId) {
        self.lock().remove(&ino);
    }

    /// The session has ended.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    pub(crate) fn all(&self) -> Vec<InodeId> {
        self.lock().iter().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<InodeId>> {
        // Each critical section is a single change.
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
