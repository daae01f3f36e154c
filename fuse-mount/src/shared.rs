//! What the requests of the kernel and the invalidations of the namenode both touch.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use harvestfs_protocol::types::{Attr, FileKind};

use crate::{
    invalidations::{Invalidations, Since},
    kernel_options::ANSWER_DELAY_MAX,
    nodes::Nodes,
};

/// What the kernel has cached, as far as it concerns both sides.
#[derive(Debug)]
pub struct Shared {
    /// The inodes that the kernel knows.
    pub nodes: Nodes,
    /// What the namenode took back. Counted before the client is asked, and handed to
    /// [`Shared::remember`] with its answer; added to before what is taken back is looked for.
    pub invalidations: Invalidations,
    kernel_caches_entries: AtomicBool,
}

impl Shared {
    /// The kernel knows the root only and caches no entries.
    pub fn new() -> Self {
        Self {
            nodes: Nodes::new(),
            invalidations: Invalidations::default(),
            kernel_caches_entries: AtomicBool::new(false),
        }
    }

    /// Whether the kernel may cache entries; not if nobody can make it forget them.
    pub fn let_kernel_cache_entries(&self, allowed: bool) {
        self.kernel_caches_entries.store(allowed, Ordering::Relaxed);
    }

    /// How long the kernel may cache attributes that it gets for a node id while `lease` remains: not
    /// at all, when the inode has another one. Of one that was replaced, nobody tells the kernel what
    /// changes; and what is written through that one, it does not take for a change of this one.
    pub fn attr_ttl(&self, node_id: u64, lease: Duration) -> Duration {
        if self.nodes.is_only(node_id) {
            lease.saturating_sub(ANSWER_DELAY_MAX)
        } else {
            Duration::ZERO
        }
    }

    /// How long the kernel may cache an entry when it may cache the attributes with it for `attr_ttl`.
    pub fn entry_ttl(&self, attr_ttl: Duration) -> Duration {
        if self.kernel_caches_entries.load(Ordering::Relaxed) {
            attr_ttl
        } else {
            Duration::ZERO
        }
    }

    /// How long the kernel may believe that a name does not exist while `lease` remains.
    pub fn no_entry_ttl(&self, lease: Duration) -> Duration {
        self.entry_ttl(lease.saturating_sub(ANSWER_DELAY_MAX))
    }

    /// The node id to answer a lookup with, and how long the kernel may cache the attributes, which
    /// the client was asked for after `asked_at` invalidations.
    ///
    /// When one came in since then, they may be older than it: the kernel caches nothing of them, and
    /// if it was one of this file, gets a node id with them that no other lookup answers with. Without
    /// a `lease` others may have changed the file already, and we hear of it later: the next node id.
    pub fn remember(&self, attr: &Attr, asked_at: u64, lease: Duration) -> (u64, Duration) {
        let (ino, regular) = (attr.ino, attr.kind == FileKind::Regular);
        if lease.is_zero() {
            self.nodes.changed_elsewhere(ino);
        }
        let mut since = Since::Nothing;
        let node_id = self.nodes.remember(ino, regular, || {
            since = self.invalidations.since(asked_at, ino);
            since == Since::This
        });
        let ttl = match since {
            Since::Nothing => self.attr_ttl(node_id, lease),
            Since::Others | Since::This => Duration::ZERO,
        };
        (node_id, ttl)
    }

    /// The content was changed through a node id. If it is not the one that lookups answer with, the
    /// file is as good as changed elsewhere.
    pub fn written(&self, node_id: u64) {
        if let Some(ino) = self.nodes.replaced(node_id) {
            // Lookups under way have asked for the file before.
            self.invalidations.add(ino);
            self.nodes.changed_elsewhere(ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::InodeId;

    use super::*;
    use crate::directory::bare_directory;

    const LEASE: Duration = Duration::from_secs(10);
    const TTL: Duration = LEASE.saturating_sub(ANSWER_DELAY_MAX);
    const OTHER: InodeId = InodeId(9);

    fn file() -> Attr {
        Attr {
            kind: FileKind::Regular,
            ..bare_directory(InodeId(7))
        }
    }

    fn ask(shared: &Shared, attr: &Attr) -> (u64, Duration) {
        shared.remember(attr, shared.invalidations.count(), LEASE)
    }

    /// As the mount does when the namenode takes something back.
    fn invalidate(shared: &Shared, ino: InodeId) {
        shared.invalidations.add(ino);
        shared.nodes.changed_elsewhere(ino);
    }

    #[test]
    fn what_may_be_older_than_an_invalidation_is_not_cached() {
        for attr in [file(), bare_directory(InodeId(8))] {
            let shared = Shared::new();
            let asked_at = shared.invalidations.count();
            invalidate(&shared, attr.ino);
            let (outdated, ttl) = shared.remember(&attr, asked_at, LEASE);
            assert_eq!(ttl, Duration::ZERO);
            let (next, _) = ask(&shared, &attr);
            assert_eq!(next != outdated, attr.kind == FileKind::Regular);
            // Older attributes that come still later do not reach it either.
            let (late, ttl) = shared.remember(&attr, asked_at, LEASE);
            assert_eq!(ttl, Duration::ZERO);
            for node_id in [outdated, late] {
                shared.nodes.forget(node_id, 1);
            }
            assert_eq!(ask(&shared, &attr), (next, TTL));
        }
    }

    #[test]
    fn what_was_not_changed_keeps_its_node_id() {
        let shared = Shared::new();
        let asked_at = shared.invalidations.count();
        invalidate(&shared, OTHER);
        let (node_id, ttl) = shared.remember(&file(), asked_at, LEASE);
        assert_eq!(ttl, Duration::ZERO, "its name may be another's by now");
        assert_eq!(ask(&shared, &file()), (node_id, TTL));
    }

    #[test]
    fn without_a_lease_a_file_is_taken_for_changed() {
        let shared = Shared::new();
        let (before, _) = ask(&shared, &file());
        let asked_at = shared.invalidations.count();
        let (after, ttl) = shared.remember(&file(), asked_at, Duration::ZERO);
        assert_ne!(before, after, "its pages may be old");
        assert_eq!(ttl, Duration::ZERO);
        shared.nodes.forget(before, 1);
        let short = Duration::from_millis(1);
        let (node_id, ttl) = shared.remember(&file(), asked_at, short);
        assert_eq!((node_id, ttl), (after, Duration::ZERO));
    }

    #[test]
    fn what_is_written_through_a_replaced_node_id_is_seen_by_the_next_lookup() {
        let shared = Shared::new();
        let (opened, ttl) = ask(&shared, &file());
        assert_eq!(ttl, TTL);
        shared.written(opened);
        assert_eq!(ask(&shared, &file()).0, opened, "it is the only one");
        invalidate(&shared, file().ino);
        let asked_at = shared.invalidations.count();
        let (fresh, ttl) = ask(&shared, &file());
        assert_ne!(fresh, opened);
        assert_eq!(ttl, Duration::ZERO, "the other may be written through");
        shared.written(opened);
        let (under_way, _) = shared.remember(&file(), asked_at, LEASE);
        let (next, _) = ask(&shared, &file());
        assert!(next != fresh && next != under_way);
    }
}
