//! State shared by the kernel's requests and the namenode's invalidations.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::{Attr, FileKind};

use crate::invalidations::{Invalidations, Since};
use crate::kernel_options::ANSWER_DELAY_MAX;
use crate::nodes::Nodes;
use crate::notices::Notices;
use crate::now;
use crate::pages::{CachedWrite, IN_FLIGHT_MAX, Pages, QUIET_MAX, Waiter};

/// How long an answer waits for pages to be dropped. They may wait for a read that waits for a datanode; after this
/// time, the kernel is sent no larger size than it has.
const SETTLE_MAX: Duration = Duration::from_secs(2);

/// How long a notification waits for a moment in which it makes no read fail.
const HELD_MAX: Duration = Duration::from_millis(500);
/// Time between checks for such a moment.
const HELD_LOOK: Duration = Duration::from_millis(1);

/// The state of the kernel's caches, as far as it concerns both sides.
pub struct Shared {
    /// The inodes that the kernel knows.
    pub nodes: Nodes,
    /// Invalidations by the namenode. Their count is taken before the client is called, and passed to
    /// [`Shared::remember`] with its answer; an invalidation is added before the invalidated inodes are looked up.
    pub invalidations: Invalidations,
    kernel_caches_entries: AtomicBool,
    /// `None` if nothing is mounted yet.
    notices: OnceLock<Arc<Notices>>,
}

impl Shared {
    /// The kernel knows only the root, and caches no entries.
    pub fn new() -> Self {
        Self {
            nodes: Nodes::new(),
            invalidations: Invalidations::default(),
            kernel_caches_entries: AtomicBool::new(false),
            notices: OnceLock::new(),
        }
    }

    /// Sets the connection through which the kernel is notified from now on.
    pub fn connect(&self, notices: Arc<Notices>) {
        let first = self.notices.set(notices);
        assert!(first.is_ok(), "a mount has two connections to the kernel");
    }

    /// Sets whether the kernel may cache entries; it may not if it cannot be made to forget them.
    pub fn let_kernel_cache_entries(&self, allowed: bool) {
        self.kernel_caches_entries.store(allowed, Ordering::Relaxed);
    }

    /// How long the kernel may cache attributes while `lease` remains.
    pub fn attr_ttl(lease: Duration) -> Duration {
        lease.saturating_sub(ANSWER_DELAY_MAX)
    }

    /// How long the kernel may cache an entry if it may cache its attributes for `attr_ttl`.
    pub fn entry_ttl(&self, attr_ttl: Duration) -> Duration {
        if self.kernel_caches_entries.load(Ordering::Relaxed) {
            attr_ttl
        } else {
            Duration::ZERO
        }
    }

    /// How long the kernel may cache a negative entry while `lease` remains.
    pub fn no_entry_ttl(&self, lease: Duration) -> Duration {
        self.entry_ttl(Self::attr_ttl(lease))
    }

    /// Counts a lookup that is answered with attributes that the client was asked for after `asked_at` invalidations.
    /// Returns how long the kernel may cache them: not at all if there was an invalidation since then, as the
    /// attributes may predate it, or the name may refer to another inode by now.
    pub fn remember(&self, attr: &Attr, asked_at: u64, lease: Duration) -> Duration {
        // First, so that any further invalidation finds the inode.
        self.nodes.remember(attr);
        match self.invalidations.since(asked_at, attr.ino) {
            Since::Nothing => Self::attr_ttl(lease),
            Since::Others | Since::This => Duration::ZERO,
        }
    }

    /// Handles that another session may have changed an inode: what the kernel has cached of it is stale. Returns
    /// whether the kernel knows the inode.
    pub async fn changed_elsewhere(&self, ino: InodeId) -> bool {
        self.invalidations.add(ino);
        let known = self.nodes.knows(ino);
        if known {
            self.forget_inode(ino, now() + IN_FLIGHT_MAX).await;
        }
        known
    }

    /// As [`Shared::changed_elsewhere`], for every inode.
    pub async fn all_changed_elsewhere(&self) {
        self.invalidations.add_all();
        let arrived = now() + IN_FLIGHT_MAX;
        for ino in self.nodes.all() {
            self.forget_inode(ino, arrived).await;
        }
    }

    async fn forget_inode(&self, ino: InodeId, arrived: Instant) {
        // The kernel may not know an inode that it is counted to know: the answer that introduces the inode may still
        // be in flight, with attributes that are stale by the time it arrives.
        while !self.forget_attributes(ino).await && self.nodes.knows(ino) && now() < arrived {
            tokio::time::sleep(HELD_LOOK).await;
        }
        self.forget_pages(ino);
    }

    /// Makes the kernel forget its attributes of an inode, but not its pages. Waits while that would make a read fail.
    /// Returns whether the kernel knows the inode. Must be run to its end: see [`crate::blocking`].
    pub async fn forget_attributes(&self, ino: InodeId) -> bool {
        let Some(notices) = self.notices.get() else {
            return true;
        };
        let Some(pages) = self.nodes.pages(ino) else {
            return notices.forget_attributes(ino);
        };
        let end = now() + HELD_MAX;
        loop {
            let now = now();
            if pages.begin_notice(now) {
                break;
            }
            if now >= end {
                pages.force_notice();
                break;
            }
            tokio::time::sleep(HELD_LOOK).await;
        }
        let is_known = notices.forget_attributes(ino);
        pages.end_notice();
        is_known
    }

    /// Makes the kernel ignore attributes of a file that are in flight to it.
    pub fn fence(&self, ino: InodeId) {
        if let Some(notices) = self.notices.get() {
            notices.forget_attributes(ino);
        }
    }

    /// Records that a thread is about to be answered that it wrote up to `end`; returns `false` if the file must not
    /// be disturbed now.
    #[must_use]
    pub fn try_wrote(&self, ino: InodeId, end: u64, cached: CachedWrite, thread: u32) -> bool {
        let pages = self.nodes.pages(ino);
        pages.is_none_or(|pages| pages.write(end, cached, thread, now()))
    }

    /// As [`Shared::try_wrote`], but waits until it is possible.
    pub async fn wrote(&self, ino: InodeId, end: u64, mut cached: CachedWrite, thread: u32) {
        let began = now();
        // Ends when nothing relevant is in flight any more, and pages have been dropped.
        while !self.try_wrote(ino, end, cached, thread) {
            if let CachedWrite::Dropped { from } = cached
                && let Some(pages) = self.nodes.pages(ino)
            {
                if pages.needs_drop(from) {
                    self.drop_zeros(ino, &pages);
                }
                if now().duration_since(began) > SETTLE_MAX {
                    // Dropping the pages waits for a read that waits for a datanode.
                    cached = CachedWrite::Kept;
                }
            }
            tokio::time::sleep(HELD_LOOK).await;
        }
    }

    /// Records that a thread is about to be answered with attributes that the kernel accepts in any case.
    pub fn impose(&self, attr: &Attr, waiter: Waiter) {
        if let Some(pages) = self.nodes.pages(attr.ino) {
            pages.impose(attr.size_bytes, waiter, now());
        }
    }

    /// Records that a thread makes a request and waits for its answer; see [`Pages::heard_from`].
    pub fn heard_from(&self, ino: InodeId, thread: u32) {
        if let Some(pages) = self.nodes.pages(ino) {
            pages.heard_from(thread);
        }
    }

    /// Makes the kernel drop its pages of a file: their contents may become stale at any moment, without a notice.
    pub fn forget_pages(&self, ino: InodeId) {
        if let Some(pages) = self.nodes.pages(ino) {
            self.drop_pages(ino, &pages);
        }
    }

    fn drop_pages(&self, ino: InodeId, pages: &Arc<Pages>) {
        if let Some(notices) = self.notices.get()
            && !planted::is(Bug::KeepsOldPages)
            && pages.want_drop()
        {
            notices.drop_pages(ino, pages.clone());
        }
    }

    fn drop_zeros(&self, ino: InodeId, pages: &Arc<Pages>) {
        if let Some(notices) = self.notices.get()
            && pages.want_zeros_dropped()
        {
            notices.drop_pages(ino, pages.clone());
        }
    }

    /// Waits until a file's attributes may be sent to the kernel; see [`Pages`]. Returns `false` if that takes too
    /// long; the size is then replaced by one that may be sent now.
    pub async fn settle(&self, attr: &mut Attr) -> bool {
        if attr.kind != FileKind::Regular {
            return true;
        }
        let (Some(notices), Some(pages)) = (self.notices.get(), self.nodes.pages(attr.ino)) else {
            // The kernel has cached nothing of it.
            return true;
        };
        let began = now();
        loop {
            let dropped = notices.dropped.notified();
            tokio::pin!(dropped);
            dropped.as_mut().enable();
            let now = now();
            if pages.may_tell(attr.size_bytes, now) {
                return true;
            }
            if pages.needs_drop(attr.size_bytes) {
                self.drop_zeros(attr.ino, &pages);
            }
            if now.duration_since(began) > SETTLE_MAX {
                attr.size_bytes = attr.size_bytes.min(pages.growth_max());
                return false;
            }
            // The repetition of a refused read triggers no notification.
            let _ = tokio::time::timeout(QUIET_MAX / 4, dropped).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::AtomicU32;

    use harvestfs_protocol::name::Name;
    use tokio::runtime::Handle;

    use super::*;
    use crate::directory::bare_directory;
    use crate::kernel::{Kernel, Notified};

    const LEASE: Duration = Duration::from_secs(10);
    const TTL: Duration = Duration::from_secs(8);
    const OTHER: InodeId = InodeId(9);

    fn file() -> Attr {
        Attr {
            kind: FileKind::Regular,
            ..bare_directory(InodeId(7))
        }
    }

    #[tokio::test]
    async fn what_may_be_older_than_an_invalidation_is_not_cached() {
        for attr in [file(), bare_directory(InodeId(8))] {
            let shared = Shared::new();
            let asked_at = shared.invalidations.count();
            shared.changed_elsewhere(attr.ino).await;
            assert_eq!(shared.remember(&attr, asked_at, LEASE), Duration::ZERO);
            let asked_at = shared.invalidations.count();
            assert_eq!(shared.remember(&attr, asked_at, LEASE), TTL);
            shared.changed_elsewhere(OTHER).await;
            let others = shared.remember(&attr, asked_at, LEASE);
            assert_eq!(others, Duration::ZERO, "its name may be another's by now");
        }
    }

    #[tokio::test]
    async fn what_the_kernel_does_not_know_needs_no_notice() {
        let shared = Shared::new();
        assert!(!shared.changed_elsewhere(OTHER).await);
        shared.nodes.remember(&file());
        assert!(shared.changed_elsewhere(file().ino).await);
    }

    /// A kernel that may take a while to learn of an inode, and counts how often it is asked to drop pages.
    #[derive(Default)]
    struct Counting {
        notices_until_it_knows: AtomicU32,
        drops: AtomicU32,
    }

    impl Kernel for Counting {
        fn forget_attributes(&self, _: InodeId) -> io::Result<()> {
            let left = &self.notices_until_it_knows;
            let is_unknown =
                left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |it| it.checked_sub(1));
            match is_unknown {
                Ok(_) => Err(io::ErrorKind::NotFound.into()),
                Err(_) => Ok(()),
            }
        }

        fn declare_entries_old(&self) -> io::Result<()> {
            Ok(())
        }

        fn drop_pages(
            &self,
            _: InodeId,
            mut begin: Box<dyn FnMut() -> Option<u64> + Send>,
        ) -> Notified {
            assert_eq!(begin(), Some(0), "all pages are dropped");
            self.drops.fetch_add(1, Ordering::Relaxed);
            Box::pin(async { Ok(()) })
        }

        fn expire_entry(&self, _: InodeId, _: &Name) -> Notified {
            Box::pin(async { Ok(()) })
        }

        fn submounts_seen_for(&self) -> Option<Duration> {
            None
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_old_before_the_kernel_has_it_is_forgotten_when_it_arrives() {
        let shared = Shared::new();
        let directory = bare_directory(InodeId(8));
        let late = |notices_until_it_knows| {
            Arc::new(Counting {
                notices_until_it_knows: AtomicU32::new(notices_until_it_knows),
                ..Counting::default()
            })
        };
        let kernel = late(20);
        shared.connect(Arc::new(Notices::new(kernel.clone(), Handle::current())));
        shared.nodes.remember(&directory);
        assert!(shared.changed_elsewhere(directory.ino).await);
        let left = kernel.notices_until_it_knows.load(Ordering::Relaxed);
        assert_eq!(left, 0, "it was notified until it knew the inode");

        let shared = Shared::new();
        let never = late(u32::MAX);
        shared.connect(Arc::new(Notices::new(never, Handle::current())));
        shared.nodes.remember(&directory);
        let began = now();
        assert!(shared.changed_elsewhere(directory.ino).await);
        assert!(now() < began + 2 * IN_FLIGHT_MAX, "no answer takes longer");
    }

    #[tokio::test(start_paused = true)]
    async fn pages_that_are_not_to_be_kept_are_dropped_after_each_read() {
        let shared = Shared::new();
        let kernel = Arc::new(Counting::default());
        shared.connect(Arc::new(Notices::new(kernel.clone(), Handle::current())));
        shared.nodes.remember(&file());
        let dropped = || kernel.drops.load(Ordering::Relaxed);
        shared.forget_pages(file().ino);
        tokio::time::sleep(HELD_LOOK).await;
        assert_eq!(dropped(), 0, "it has never been opened");
        shared.nodes.pages(file().ino).unwrap().opened();
        for reads in 1..=3 {
            shared.forget_pages(file().ino);
            tokio::time::sleep(HELD_LOOK).await;
            assert_eq!(dropped(), reads);
        }
        let pages = shared.nodes.pages(file().ino).unwrap();
        assert!(!pages.are_old());
    }

    #[test]
    fn without_a_lease_nothing_is_cached() {
        let shared = Shared::new();
        let asked_at = shared.invalidations.count();
        let ttl = shared.remember(&file(), asked_at, Duration::ZERO);
        assert_eq!(ttl, Duration::ZERO);
    }
}
