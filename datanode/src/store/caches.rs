//! Caches of open files and checksum tables of recently read replicas, each with a limit.

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};

use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use lru::LruCache;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::inventory::Generation;
use super::layout::{self, PAGE_BYTES};
use super::replica::{OpenFile, Table};

/// Maximum number of files kept open for reading: at two descriptors each, they stay well below the usual limit of
/// 1024.
const FILES_MAX: NonZeroUsize = NonZeroUsize::new(192).unwrap();

/// Files open for reading: some are kept open, and others are in use.
pub struct FileCache {
    files: Mutex<Files>,
}

struct Files {
    kept: LruCache<Generation, Arc<OpenFile>>,
    /// Those that are not kept any more, but were in use when they were pushed out, as by a reader to which they are
    /// lent: the space of a removed file is taken until they are closed.
    in_use: FxHashMap<Generation, Weak<OpenFile>>,
}

impl Default for FileCache {
    fn default() -> Self {
        Self {
            files: Mutex::new(Files {
                kept: LruCache::new(FILES_MAX),
                in_use: FxHashMap::default(),
            }),
        }
    }
}

impl Files {
    fn get(&mut self, replica: Generation) -> Option<Arc<OpenFile>> {
        let kept = self.kept.get(&replica).cloned();
        kept.or_else(|| self.in_use.get(&replica)?.upgrade())
    }

    /// Notes a file that is no longer kept, if others use it.
    fn no_longer_kept(&mut self, replica: Generation, file: &Arc<OpenFile>) {
        if Arc::strong_count(file) > 1 {
            self.in_use.retain(|_, file| file.strong_count() > 0);
            self.in_use.insert(replica, Arc::downgrade(file));
        }
    }
}

impl FileCache {
    /// The file of a replica, if it is open.
    pub fn get(&self, replica: Generation) -> Option<Arc<OpenFile>> {
        self.files.lock().get(replica)
    }

    /// Keeps a file, unless the file of the replica was opened in the meantime. Returns the one that is open.
    pub fn put(&self, replica: Generation, file: Arc<OpenFile>) -> Arc<OpenFile> {
        let mut files = self.files.lock();
        if let Some(open) = files.get(replica) {
            return open;
        }
        let pushed_out = files.kept.push(replica, file.clone());
        if let Some((replica, file)) = &pushed_out {
            files.no_longer_kept(*replica, file);
        }
        // An evicted file is closed after the lock is released.
        drop(files);
        file
    }

    /// No longer keeps a file; it remains known while others use it.
    pub fn let_go(&self, replica: Generation) {
        let mut files = self.files.lock();
        let kept = files.kept.pop(&replica);
        if let Some(file) = &kept {
            files.no_longer_kept(replica, file);
        }
        // It is closed after the lock is released.
        drop(files);
    }

    /// Drops a file from the cache; others may still use it.
    pub fn forget(&self, replica: Generation) -> Option<Arc<OpenFile>> {
        let mut files = self.files.lock();
        let in_use = files.in_use.remove(&replica);
        let kept = files.kept.pop(&replica);
        kept.or_else(|| in_use?.upgrade())
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
