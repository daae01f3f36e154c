//! Files that this session holds open at the namenode, so that their data outlives their names.
//!
//! A file that was closed is held for a little longer: it is often opened again at once, and then
//! needs no round trip. Releases go out in batches.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};
use tokio::time::Instant;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::BLOCKS_PER_REQUEST_MAX;
use harvestfs_protocol::meta::housekeeping;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::driver::session::Session;

/// How long a closed file stays held. Tools that write a file and read it back do so within this.
const IDLE_MAX: Duration = Duration::from_secs(5);

/// How often idle holds are looked at.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);

/// The holds of a session.
pub(crate) struct Holds {
    inner: Mutex<Inner>,
    idle_max: usize,
    /// A release was answered.
    released: Notify,
}

#[derive(Default)]
struct Inner {
    open: FxHashMap<InodeId, usize>,
    /// Open, and without a name as far as this session knows.
    nameless: FxHashSet<InodeId>,
    /// Held, but not opened by a user that may read it.
    unreadable: FxHashSet<InodeId>,
    idle_since: FxHashMap<InodeId, Instant>,
    idle: BTreeSet<(Instant, InodeId)>,
    to_release: FxHashSet<InodeId>,
    releasing: FxHashSet<InodeId>,
}

impl Holds {
    pub(crate) fn new(idle_max: usize) -> Self {
        Self {
            inner: Mutex::default(),
            idle_max,
            released: Notify::new(),
        }
    }

    /// Opens what is held once more; false when it is not held, or not to be read.
    pub(crate) fn open_held(&self, ino: InodeId, to_read: bool) -> bool {
        let mut inner = self.inner.lock();
        if to_read && inner.unreadable.contains(&ino) {
            return false;
        }
        if !inner.open.contains_key(&ino) && !inner.take_idle(ino) {
            return false;
        }
        *inner.open.entry(ino).or_default() += 1;
        true
    }

    /// The namenode holds it now; `readable`: for a user that may read it.
    pub(crate) fn opened(&self, ino: InodeId, readable: bool) {
        let mut inner = self.inner.lock();
        let was_held = inner.take_idle(ino) || inner.open.contains_key(&ino);
        if readable {
            inner.unreadable.remove(&ino);
        } else if !was_held {
            inner.unreadable.insert(ino);
        }
        inner.to_release.remove(&ino);
        *inner.open.entry(ino).or_default() += 1;
    }

    /// A user that may read it has opened it.
    pub(crate) fn read_permitted(&self, ino: InodeId) {
        self.inner.lock().unreadable.remove(&ino);
    }

    /// To be awaited before the namenode is asked to hold something: a release in flight would take
    /// the new hold away.
    pub(crate) async fn settled(&self, ino: InodeId) {
        loop {
            let released = self.released.notified();
            {
                let mut inner = self.inner.lock();
                inner.to_release.remove(&ino);
                if !inner.releasing.contains(&ino) {
                    return;
                }
            }
            released.await;
        }
    }

    /// Waits for a release in flight; false when there is none.
    pub(crate) async fn releases_answered(&self) -> bool {
        let released = self.released.notified();
        let are_some = !self.inner.lock().releasing.is_empty();
        if are_some {
            released.await;
        }
        are_some
    }

    /// Closed once; with `keep`, the hold stays for a while.
    pub(crate) fn closed(&self, ino: InodeId, now: Instant, keep: bool) {
        let mut inner = self.inner.lock();
        let Some(opens) = inner.open.get_mut(&ino) else {
            return;
        };
        *opens -= 1;
        if *opens > 0 {
            return;
        }
        inner.open.remove(&ino);
        let is_nameless = inner.nameless.remove(&ino);
        if is_nameless || !keep || self.idle_max == 0 {
            inner.to_release.insert(ino);
            return;
        }
        inner.idle_since.insert(ino, now);
        inner.idle.insert((now, ino));
        while inner.idle.len() > self.idle_max {
            inner.release_oldest();
        }
    }

    /// Its last name was removed here.
    pub(crate) fn lost_last_name(&self, ino: InodeId) {
        self.drop_idle(ino);
        let mut inner = self.inner.lock();
        if inner.open.contains_key(&ino) {
            inner.nameless.insert(ino);
        }
    }

    /// Whether something is open that has no name.
    fn has_nameless(&self) -> bool {
        !self.inner.lock().nameless.is_empty()
    }

    /// Another session changed it or removed its name: no reason to hold it if it is not open.
    pub(crate) fn drop_idle(&self, ino: InodeId) {
        let mut inner = self.inner.lock();
        if inner.take_idle(ino) {
            inner.to_release.insert(ino);
        }
    }

    /// What is to be released now; [`Holds::release_answered`] must follow.
    pub(crate) fn begin_release(&self, now: Instant) -> Vec<InodeId> {
        let mut inner = self.inner.lock();
        while inner
            .idle
            .first()
            .is_some_and(|(since, _)| now.saturating_duration_since(*since) >= IDLE_MAX)
        {
            inner.release_oldest();
        }
        let batch: Vec<InodeId> = inner
            .to_release
            .iter()
            .copied()
            .take(BLOCKS_PER_REQUEST_MAX)
            .collect();
        for ino in &batch {
            inner.to_release.remove(ino);
            inner.unreadable.remove(ino);
            inner.releasing.insert(*ino);
        }
        batch
    }

    /// The namenode knows of the release, or it failed and will end with the session.
    pub(crate) fn release_answered(&self, batch: &[InodeId]) {
        let mut inner = self.inner.lock();
        for ino in batch {
            inner.releasing.remove(ino);
        }
        drop(inner);
        self.released.notify_waiters();
    }

    /// Everything held, for a session that is opened again.
    pub(crate) fn all(&self) -> Vec<InodeId> {
        let inner = self.inner.lock();
        let open = inner.open.keys();
        open.chain(inner.idle_since.keys()).copied().collect()
    }
}

impl Inner {
    fn take_idle(&mut self, ino: InodeId) -> bool {
        match self.idle_since.remove(&ino) {
            Some(since) => self.idle.remove(&(since, ino)),
            None => false,
        }
    }

    fn release_oldest(&mut self) {
        if let Some((_, ino)) = self.idle.pop_first() {
            self.idle_since.remove(&ino);
            self.to_release.insert(ino);
        }
    }
}

impl Session {
    /// Has the namenode release what is closed, so that what has no name counts against no quota any more.
    /// True when that may have changed something.
    pub(crate) async fn release_now(self: &Arc<Self>) -> bool {
        if self.holds.has_nameless() {
            // The kernel reports the last `close` some time after that has returned.
            tokio::time::sleep(RELEASE_INTERVAL).await;
            self.release_batch().await;
            return true;
        }
        let released = self.release_batch().await;
        let others = self.holds.releases_answered().await;
        released || others
    }

    /// Releases a part of what is closed; false when there was nothing.
    async fn release_batch(self: &Arc<Self>) -> bool {
        let inodes = self.holds.begin_release(Instant::now());
        if inodes.is_empty() {
            return false;
        }
        for ino in &inodes {
            self.delegations.returned(*ino);
        }
        let op = housekeeping::Release {
            inodes: inodes.clone(),
        };
        if let Err(error) = self.keep_house(op).await {
            // The end of the session releases them.
            tracing::debug!(%error, "cannot release closed files");
        }
        self.holds.release_answered(&inodes);
        true
    }
}

/// Releases what is no longer open, in batches.
pub(crate) async fn release_closed(session: Arc<Session>) {
    loop {
        tokio::time::sleep(RELEASE_INTERVAL).await;
        if session.is_closed() {
            return;
        }
        session.release_batch().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_file_is_held_for_a_while() {
        let holds = Holds::new(2);
        let (now, ino) = (Instant::now(), InodeId(7));
        assert!(!holds.open_held(ino, true));
        holds.opened(ino, true);
        holds.closed(ino, now, true);
        assert!(holds.begin_release(now).is_empty());
        assert!(holds.open_held(ino, true));
        holds.closed(ino, now, true);
        assert_eq!(holds.begin_release(now + IDLE_MAX), vec![ino]);
        assert!(!holds.open_held(ino, true));
    }

    #[test]
    fn what_is_held_to_write_is_opened_anew_to_read() {
        let holds = Holds::new(2);
        let ino = InodeId(7);
        holds.opened(ino, false);
        assert!(holds.open_held(ino, false) && !holds.open_held(ino, true));
        holds.opened(ino, false);
        holds.read_permitted(ino);
        holds.opened(ino, false);
        assert!(holds.open_held(ino, true));
    }

    #[test]
    fn the_longest_idle_goes_first() {
        let holds = Holds::new(2);
        let now = Instant::now();
        for ino in 1..=3 {
            holds.opened(InodeId(ino), true);
            holds.closed(InodeId(ino), now + Duration::from_millis(ino), true);
        }
        assert_eq!(holds.begin_release(now), vec![InodeId(1)]);
        assert_eq!(holds.all().len(), 2);
    }

    #[test]
    fn without_a_name_nothing_is_held_for_a_while() {
        let holds = Holds::new(2);
        holds.opened(InodeId(1), true);
        holds.lost_last_name(InodeId(1));
        assert!(holds.has_nameless());
        holds.closed(InodeId(1), Instant::now(), true);
        assert_eq!(holds.begin_release(Instant::now()), vec![InodeId(1)]);
        assert!(!holds.has_nameless());
    }

    #[test]
    fn what_is_open_stays_held_without_its_name() {
        let holds = Holds::new(2);
        holds.opened(InodeId(1), true);
        holds.drop_idle(InodeId(1));
        assert!(holds.begin_release(Instant::now()).is_empty());
        holds.closed(InodeId(1), Instant::now(), false);
        assert_eq!(holds.begin_release(Instant::now()), vec![InodeId(1)]);
    }
}
