//! Caches of open files and checksum tables of recently read replicas, each with a limit.

use std::num::NonZeroUsize;
use std::sync::Arc;

use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use lru::LruCache;
use parking_lot::Mutex;

use super::inventory::Generation;
use super::layout::{self, PAGE_BYTES};
use super::replica::{OpenFile, Table};

/// Maximum number of files kept open for reading: at two descriptors each, they stay well below the usual limit of
/// 1024.
const FILES_MAX: NonZeroUsize = NonZeroUsize::new(192).unwrap();

/// Files kept open for reading.
pub struct FileCache {
    files: Mutex<LruCache<Generation, Arc<OpenFile>>>,
}

impl Default for FileCache {
    fn default() -> Self {
        Self {
            files: Mutex::new(LruCache::new(FILES_MAX)),
        }
    }
}

impl FileCache {
    /// The file of a replica, if it is open.
    pub fn get(&self, replica: Generation) -> Option<Arc<OpenFile>> {
        self.files.lock().get(&replica).cloned()
    }

    /// Keeps a file.
    pub fn put(&self, replica: Generation, file: Arc<OpenFile>) {
        // An evicted file is closed after the lock is released.
        let _pushed_out = self.files.lock().push(replica, file);
    }

    /// Drops a file from the cache; others may still use it.
    pub fn forget(&self, replica: Generation) -> Option<Arc<OpenFile>> {
        self.files.lock().pop(&replica)
    }
}

/// Checksum tables of sealed replicas.
pub struct TableCache {
    tables: Mutex<LruCache<(Generation, u32), Arc<Table>>>,
}

impl TableCache {
    /// A cache of about `limit_bytes` bytes, which cover a thousand times as much data.
    pub fn new(limit_bytes: usize) -> Self {
        let tables_max = NonZeroUsize::new(limit_bytes / PAGE_BYTES).unwrap_or(NonZeroUsize::MIN);
        Self {
            tables: Mutex::new(LruCache::new(tables_max)),
        }
    }

    /// The table of a group, if it is cached.
    pub fn get(&self, replica: Generation, group: u32) -> Option<Arc<Table>> {
        self.tables.lock().get(&(replica, group)).cloned()
    }

    /// Keeps a table.
    pub fn put(&self, replica: Generation, group: u32, table: Arc<Table>) {
        self.tables.lock().put((replica, group), table);
    }

    /// Drops all tables of a replica.
    pub fn forget(&self, replica: Generation) {
        let chunks = (BLOCK_BYTES_MAX / PAGE_BYTES as u64) as u32;
        let mut tables = self.tables.lock();
        for group in 0..=layout::group_of(chunks) {
            tables.pop(&(replica, group));
        }
    }
}
