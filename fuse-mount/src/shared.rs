//! What the requests of the kernel and the invalidations of the namenode both touch.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use harvestfs_protocol::types::{Attr, FileKind};

use crate::nodes::Nodes;

/// What the kernel has cached, as far as it concerns both sides.
#[derive(Debug)]
pub struct Shared {
    /// The inodes that the kernel knows.
    pub nodes: Nodes,
    kernel_caches_entries: AtomicBool,
    invalidations: AtomicU64,
}

impl Shared {
    /// The kernel knows the root only and caches no entries.
    pub fn new() -> Self {
        Self {
            nodes: Nodes::new(),
            kernel_caches_entries: AtomicBool::new(false),
            invalidations: AtomicU64::new(0),
        }
    }

    /// Whether the kernel may cache entries; not if nobody can make it forget them.
    pub fn let_kernel_cache_entries(&self, allowed: bool) {
        self.kernel_caches_entries.store(allowed, Ordering::Relaxed);
    }

    /// How long the kernel may cache an entry when attributes may be cached for `lease`.
    pub fn entry_ttl(&self, lease: Duration) -> Duration {
        if self.kernel_caches_entries.load(Ordering::Relaxed) {
            lease
        } else {
            Duration::ZERO
        }
    }

    /// To be called before what an invalidation names is looked for.
    pub fn count_invalidation(&self) {
        self.invalidations.fetch_add(1, Ordering::SeqCst);
    }

    /// The count of invalidations. Taken before the client is asked, and handed to
    /// [`Shared::remember`] with its answer.
    pub fn invalidations(&self) -> u64 {
        self.invalidations.load(Ordering::SeqCst)
    }

    /// The node id to answer a lookup with. When an invalidation came in since `asked_at`, the
    /// answer may be older than it: then the next lookup will get another node id.
    pub fn remember(&self, attr: &Attr, asked_at: u64) -> u64 {
        let regular = attr.kind == FileKind::Regular;
        let node_id = self.nodes.remember(attr.ino, regular);
        if self.invalidations() != asked_at {
            self.nodes.changed_elsewhere(attr.ino);
        }
        node_id
    }
}
