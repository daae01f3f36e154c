//! Leases: what sessions may have cached, and must forget before a mutation is acknowledged.
//!
//! What a reply says about an inode or about the entries of a directory, the session may cache while its lease lasts.
//! Every message from the session renews the lease, which ends when the session was silent for too long. A mutation
//! asks [`Leases::changed`] which other sessions must be notified; its reply waits until each of them has
//! acknowledged the notice or its lease has run out.
//!
//! A session's cache is tracked (`Followed`) in one of two ways:
//!
//! - *exactly*: each grant is an entry in a table;
//! - *as everything*: the session counts as holding everything, so each mutation by others is announced to it. This
//!   costs nothing while no other session changes anything. A session is tracked this way when it starts alone, when
//!   it was resumed after a restart of the namenode, or when its grants no longer fit in the table. After
//!   [`ANNOUNCED_MAX`] announcements it gets one notice to forget everything, and is tracked exactly from then on.
//!
//! The code is pure: time comes from the caller, notices go to the caller. Memory is bounded by the size of the
//! table, and by the mutations that wait.

mod before;
mod lapsed;
mod unheard;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;

use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::meta::{Cached, Notice};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::planted::{self, Bug};
use rustc_hash::{FxHashMap, FxHashSet};

use self::unheard::Unheard;

/// Announcements to a session that counts as holding everything, before one notice to forget everything replaces
/// them. A short-lived session that changes a few files must not cost a mount its cache; one that keeps changing
/// files must not cost a message for each change.
const ANNOUNCED_MAX: u32 = 64;

/// Number of lease durations within which a session that is alive must acknowledge a notice. It may have to commit
/// something first, which may wait for the end of another session's lease.
const ACKNOWLEDGED_WITHIN_LEASES: u64 = 2;

/// A reply that waits for acknowledgements; the number is the caller's.
pub(crate) type WaitId = u64;

/// Unique among all sessions.
type NoticeId = u64;

/// A time during which a session's grants were tracked exactly. Dropping it drops all of them.
type Period = u32;

/// A notice and the session that gets it.
pub(crate) type Announcement = (SessionId, Notice);

/// What has expired by the clock.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Expired {
    /// Replies that need not wait any longer.
    pub released: Vec<WaitId>,
    /// Sessions that are alive but have not acknowledged a notice for [`ACKNOWLEDGED_WITHIN_LEASES`].
    /// They break the protocol and must be ended, or others would wait for them forever.
    pub unresponsive: Vec<SessionId>,
}

/// The table of leases.
#[derive(Debug)]
pub(crate) struct Leases {
    lease_ms: u64,
    grants_max: usize,
    sessions: FxHashMap<SessionId, Lease>,
    /// Sessions that count as holding everything.
    hold_everything: BTreeSet<SessionId>,
    periods: FxHashMap<Period, SessionId>,
    next_period: Period,
    grants: BTreeSet<(Cached, Period)>,
    next_notice: NoticeId,
    unacked: BTreeMap<NoticeId, Unacked>,
    /// Unacknowledged notices, by what they named.
    unacked_by_cached: FxHashMap<Cached, Vec<NoticeId>>,
    /// Unacknowledged notices, by the inodes whose change caused them, whatever they named.
    unacked_by_changed: FxHashMap<InodeId, Vec<NoticeId>>,
    /// Unacknowledged [`Notice::InvalidateAll`]s.
    unacked_everything: BTreeSet<NoticeId>,
    /// The number of notices that a reply still waits for.
    waits: FxHashMap<WaitId, usize>,
    unheard: Unheard,
}

#[derive(Debug)]
struct Lease {
    ends_ms: u64,
    followed: Followed,
    unacked: BTreeSet<NoticeId>,
    /// The session is over; the lease only has to run out.
    revoked: bool,
}

#[derive(Clone, Copy, Debug)]
enum Followed {
    Exactly(Period),
    AsEverything {
        announced: u32,
    },
    /// The lease has run out.
    HoldsNothing,
}

/// A notice that was sent and is not acknowledged yet.
#[derive(Debug)]
struct Unacked {
    session: SessionId,
    sent_ms: u64,
    /// The session that made the change the notice is about; `changed` says which inodes.
    author: SessionId,
    changed: Vec<InodeId>,
    /// Empty for a notice to forget everything.
    named: Vec<Cached>,
    waits: Vec<WaitId>,
}

/// What one session has to forget because of one mutation.
#[derive(Default)]
struct Forget {
    inodes: Vec<InodeId>,
    entries: Vec<(InodeId, Name)>,
}

impl Leases {
    /// An empty table: leases last `lease_ms`, and at most `grants_max` grants are remembered.
    pub(crate) fn new(lease_ms: u64, grants_max: usize) -> Self {
        Self {
            lease_ms,
            grants_max,
            sessions: FxHashMap::default(),
            hold_everything: BTreeSet::new(),
            periods: FxHashMap::default(),
            next_period: 0,
            grants: BTreeSet::new(),
            next_notice: 1,
            unacked: BTreeMap::new(),
            unacked_by_cached: FxHashMap::default(),
            unacked_by_changed: FxHashMap::default(),
            unacked_everything: BTreeSet::new(),
            waits: FxHashMap::default(),
            unheard: Unheard::default(),
        }
    }

    /// Adds a session that has nothing cached.
    pub(crate) fn opened(&mut self, now_ms: u64, session: SessionId) {
        self.insert(now_ms, session);
        self.follow_anew(session);
    }

    /// Adds a session that may have anything cached: it was open before the namenode restarted.
    pub(crate) fn restored(&mut self, now_ms: u64, session: SessionId) {
        self.insert(now_ms, session);
        self.follow_as_everything(session);
    }

    fn insert(&mut self, now_ms: u64, session: SessionId) {
        let lease = Lease {
            ends_ms: now_ms + self.lease_ms,
            followed: Followed::HoldsNothing,
            unacked: BTreeSet::new(),
            revoked: false,
        };
        self.sessions.insert(session, lease);
    }

    /// Notes that a message from a session arrived: its lease is renewed. Returns the replies that need not wait any
    /// longer.
    pub(crate) fn heard(&mut self, now_ms: u64, session: SessionId) -> Vec<WaitId> {
        let Some(lease) = self.sessions.get_mut(&session) else {
            return Vec::new();
        };
        if lease.revoked {
            return Vec::new();
        }
        let lapsed = lease.ends_ms <= now_ms;
        lease.ends_ms = now_ms + self.lease_ms;
        if !lapsed {
            return Vec::new();
        }
        // Its own clock ended the lease before ours did: it has forgotten everything.
        let released = self.lapse(session);
        self.follow_anew(session);
        released
    }

    /// Removes a session that has ended and has nothing cached. Returns the replies that need not wait any longer.
    pub(crate) fn closed(&mut self, session: SessionId) -> Vec<WaitId> {
        let released = self.lapse(session);
        self.sessions.remove(&session);
        if self.sessions.len() <= 1 {
            self.follow_no_session_exactly();
        }
        released
    }

    /// Notes that the namenode ended the session, which may use what it has cached until its lease runs out. Nothing
    /// renews the lease any more.
    pub(crate) fn revoke(&mut self, session: SessionId) {
        if let Some(lease) = self.sessions.get_mut(&session) {
            lease.revoked = true;
        }
    }

    /// Notes that a reply lets `session` cache this.
    pub(crate) fn granted(&mut self, session: SessionId, cached: Cached) {
        let Some(lease) = self.sessions.get(&session) else {
            return;
        };
        let Followed::Exactly(period) = lease.followed else {
            return;
        };
        if self.grants.len() >= self.grants_max {
            // Tracking no session exactly is always correct, and the table fills up again with what is requested from
            // now on.
            self.follow_no_session_exactly();
            return;
        }
        self.grants.insert((cached, period));
    }

    /// Notes that `author` has changed inodes and entries. Returns the notices to send, and whether the reply
    /// numbered `wait` has to wait for acknowledgements.
    pub(crate) fn changed(
        &mut self,
        now_ms: u64,
        author: SessionId,
        inodes: &[InodeId],
        entries: &[(InodeId, Name)],
        wait: WaitId,
    ) -> (Vec<Announcement>, bool) {
        let is_alone = self.sessions.len() <= 1 && self.sessions.contains_key(&author);
        if is_alone || planted::is(Bug::SendsNoInvalidation) {
            return (Vec::new(), false);
        }
        // Notices in flight that make other sessions forget an earlier state of the same.
        let mut awaited: FxHashSet<NoticeId> = self.unacked_everything.iter().copied().collect();
        let named = inodes.iter().map(|&ino| Cached::Inode(ino));
        let named = named.chain(entries.iter().map(|&(dir, _)| Cached::Entries(dir)));
        for cached in named {
            awaited.extend(self.unacked_by_cached.get(&cached).into_iter().flatten());
        }
        // And notices about changes by others: a session that has not acknowledged one may not know of the change.
        for ino in inodes {
            let noticed = self.unacked_by_changed.get(ino).into_iter().flatten();
            awaited.extend(noticed.filter(|id| self.unacked[id].author != author));
        }
        awaited.retain(|id| {
            self.unacked
                .get(id)
                .is_some_and(|unacked| unacked.session != author)
        });
        let mut announcements = Vec::new();
        for (session, forget) in self.holders(now_ms, author, inodes, entries) {
            let (id, notice) = self.announce(now_ms, session, forget, (author, inodes));
            awaited.insert(id);
            announcements.push((session, notice));
        }
        let waits = self.wait_for(wait, awaited.into_iter().collect());
        (announcements, waits)
    }

    /// Makes the reply numbered `wait` wait until these notices are acknowledged. Returns whether there are any.
    fn wait_for(&mut self, wait: WaitId, notices: Vec<NoticeId>) -> bool {
        for id in &notices {
            if let Some(unacked) = self.unacked.get_mut(id) {
                unacked.waits.push(wait);
            }
        }
        if !notices.is_empty() {
            self.waits.insert(wait, notices.len());
        }
        !notices.is_empty()
    }

    /// Notes that `author` has changed inodes and entries with its mutation `sequence`, and has the replies to all
    /// below `answered_below`.
    pub(crate) fn changed_by(
        &mut self,
        author: SessionId,
        (sequence, answered_below): (u64, u64),
        inodes: &[InodeId],
        entries: &[(InodeId, Name)],
    ) {
        self.unheard.heard_below(author, answered_below);
        self.unheard.add((author, sequence), inodes, entries);
    }

    /// Notes that the session has forgotten what the notice named. Returns the replies that need not wait any longer.
    pub(crate) fn acked(&mut self, session: SessionId, id: NoticeId) -> Vec<WaitId> {
        let mut released = Vec::new();
        if self.unacked.get(&id).is_some_and(|u| u.session == session) {
            self.settle(id, &mut released);
        }
        released
    }

    /// What `session` has not acknowledged yet, as one notice. For a new connection: notices may have been lost with
    /// the old one.
    pub(crate) fn repeat(&mut self, now_ms: u64, session: SessionId) -> Option<Notice> {
        let old = self.sessions.get(&session)?.unacked.clone();
        if old.is_empty() {
            return None;
        }
        let (id, notice) = self.announce_everything(now_ms, session);
        // Its acknowledgement settles all notices before it.
        let mut waits = BTreeSet::new();
        for old_id in old {
            let unacked = self.remove_unacked(old_id);
            for wait in unacked.into_iter().flat_map(|unacked| unacked.waits) {
                if !waits.insert(wait)
                    && let Some(left) = self.waits.get_mut(&wait)
                {
                    *left -= 1;
                }
            }
        }
        if let Some(new) = self.unacked.get_mut(&id) {
            new.waits.extend(waits);
        }
        Some(notice)
    }

    /// Checks the clock. Call it several times within the time that a lease lasts.
    pub(crate) fn expire(&mut self, now_ms: u64) -> Expired {
        let mut expired = Expired::default();
        let mut over = Vec::new();
        for (&session, lease) in &self.sessions {
            if lease.ends_ms <= now_ms {
                if lease.revoked || !matches!(lease.followed, Followed::HoldsNothing) {
                    over.push((session, lease.revoked));
                }
            } else if !lease.revoked
                && let Some(oldest) = lease.unacked.first()
                && let Some(unacked) = self.unacked.get(oldest)
                && unacked.sent_ms + ACKNOWLEDGED_WITHIN_LEASES * self.lease_ms <= now_ms
            {
                expired.unresponsive.push(session);
            }
        }
        for (session, revoked) in over {
            let released = if revoked {
                self.closed(session)
            } else {
                self.lapse(session)
            };
            expired.released.extend(released);
        }
        expired.unresponsive.sort_unstable();
        expired
    }

    /// What each session other than the author has to forget.
    fn holders(
        &mut self,
        now_ms: u64,
        author: SessionId,
        inodes: &[InodeId],
        entries: &[(InodeId, Name)],
    ) -> BTreeMap<SessionId, Forget> {
        let mut holders: BTreeMap<SessionId, Forget> = BTreeMap::new();
        if inodes.is_empty() && entries.is_empty() {
            return holders;
        }
        for &session in &self.hold_everything {
            if session != author && self.is_alive(now_ms, session) {
                let forget = holders.entry(session).or_default();
                forget.inodes.extend_from_slice(inodes);
                forget.entries.extend_from_slice(entries);
            }
        }
        for &ino in inodes {
            for (session, entries) in self.unheard.take(ino, author) {
                if self.is_alive(now_ms, session) {
                    holders.entry(session).or_default().entries.extend(entries);
                }
            }
            let cached = Cached::Inode(ino);
            for period in self.periods_that_hold(cached) {
                let holder = self.periods.get(&period).copied();
                if holder == Some(author) {
                    continue;
                }
                // It will be forgotten, so it is no longer held; later replies grant it again.
                self.grants.remove(&(cached, period));
                if let Some(session) = holder.filter(|&s| self.is_alive(now_ms, s)) {
                    holders.entry(session).or_default().inodes.push(ino);
                }
            }
        }
        for (dir, name) in entries {
            for period in self.periods_that_hold(Cached::Entries(*dir)) {
                let holder = self.periods.get(&period).copied();
                let holder = holder.filter(|&s| s != author && self.is_alive(now_ms, s));
                if let Some(session) = holder {
                    let forget = holders.entry(session).or_default();
                    forget.entries.push((*dir, name.clone()));
                }
            }
        }
        holders
    }

    fn periods_that_hold(&self, cached: Cached) -> Vec<Period> {
        self.grants
            .range((cached, Period::MIN)..=(cached, Period::MAX))
            .map(|&(_, period)| period)
            .collect()
    }

    /// Makes later changes of `changed` by others than `author` wait for this notice, too.
    fn announce(
        &mut self,
        now_ms: u64,
        session: SessionId,
        forget: Forget,
        (author, changed): (SessionId, &[InodeId]),
    ) -> (NoticeId, Notice) {
        if let Some(lease) = self.sessions.get_mut(&session)
            && let Followed::AsEverything { announced } = &mut lease.followed
        {
            *announced += 1;
            if *announced > ANNOUNCED_MAX {
                return self.announce_everything(now_ms, session);
            }
        }
        let id = self.next_notice;
        let inodes = forget.inodes.iter().map(|&ino| Cached::Inode(ino));
        let dirs = forget.entries.iter().map(|&(dir, _)| Cached::Entries(dir));
        let named: BTreeSet<Cached> = inodes.chain(dirs).collect();
        for &cached in &named {
            self.unacked_by_cached.entry(cached).or_default().push(id);
        }
        for &ino in changed {
            self.unacked_by_changed.entry(ino).or_default().push(id);
        }
        let unacked = Unacked {
            session,
            sent_ms: now_ms,
            author,
            changed: changed.to_vec(),
            named: named.into_iter().collect(),
            waits: Vec::new(),
        };
        self.sent(unacked);
        let notice = Notice::Invalidate {
            id,
            inodes: forget.inodes,
            entries: forget.entries,
        };
        (id, notice)
    }

    /// From here on the session is tracked exactly, starting with nothing.
    fn announce_everything(&mut self, now_ms: u64, session: SessionId) -> (NoticeId, Notice) {
        self.follow_exactly(session);
        let id = self.next_notice;
        self.unacked_everything.insert(id);
        self.sent(Unacked {
            session,
            sent_ms: now_ms,
            author: session,
            changed: Vec::new(),
            named: Vec::new(),
            waits: Vec::new(),
        });
        (id, Notice::InvalidateAll { id })
    }

    fn sent(&mut self, unacked: Unacked) {
        let id = self.next_notice;
        self.next_notice += 1;
        if let Some(lease) = self.sessions.get_mut(&unacked.session) {
            lease.unacked.insert(id);
        }
        self.unacked.insert(id, unacked);
    }

    /// Nothing that the session cached counts any longer.
    fn lapse(&mut self, session: SessionId) -> Vec<WaitId> {
        let mut released = Vec::new();
        self.unheard.heard_below(session, u64::MAX);
        self.follow(session, Followed::HoldsNothing);
        let unacked = match self.sessions.get_mut(&session) {
            Some(lease) => std::mem::take(&mut lease.unacked),
            None => BTreeSet::new(),
        };
        for id in unacked {
            self.settle(id, &mut released);
        }
        released
    }

    /// No reply waits for this notice any more.
    fn settle(&mut self, id: NoticeId, released: &mut Vec<WaitId>) {
        let Some(unacked) = self.remove_unacked(id) else {
            return;
        };
        for wait in unacked.waits {
            let Some(left) = self.waits.get_mut(&wait) else {
                continue;
            };
            *left -= 1;
            if *left == 0 {
                self.waits.remove(&wait);
                released.push(wait);
            }
        }
    }

    fn remove_unacked(&mut self, id: NoticeId) -> Option<Unacked> {
        let unacked = self.unacked.remove(&id)?;
        self.unacked_everything.remove(&id);
        for cached in &unacked.named {
            remove_from(&mut self.unacked_by_cached, *cached, id);
        }
        for ino in &unacked.changed {
            remove_from(&mut self.unacked_by_changed, *ino, id);
        }
        if let Some(lease) = self.sessions.get_mut(&unacked.session) {
            lease.unacked.remove(&id);
        }
        Some(unacked)
    }

    /// Tracks a session that has nothing cached, in the cheaper way.
    fn follow_anew(&mut self, session: SessionId) {
        if self.sessions.len() <= 1 {
            self.follow_as_everything(session);
        } else {
            self.follow_exactly(session);
        }
    }

    fn follow_as_everything(&mut self, session: SessionId) {
        self.follow(session, Followed::AsEverything { announced: 0 });
    }

    fn follow_exactly(&mut self, session: SessionId) {
        let period = self.next_period;
        // After 2^32 periods no grants of the oldest are left: the table was cleared in between.
        self.next_period = self.next_period.wrapping_add(1);
        self.follow(session, Followed::Exactly(period));
    }

    /// Drops all that was known of the session's cache. Its grants remain in the table, where they count against its
    /// size but for no session.
    fn follow(&mut self, session: SessionId, followed: Followed) {
        let Some(lease) = self.sessions.get_mut(&session) else {
            return;
        };
        match lease.followed {
            Followed::Exactly(period) => {
                self.periods.remove(&period);
            }
            Followed::AsEverything { .. } => {
                self.hold_everything.remove(&session);
            }
            Followed::HoldsNothing => {}
        }
        lease.followed = followed;
        match followed {
            Followed::Exactly(period) => {
                self.periods.insert(period, session);
            }
            Followed::AsEverything { .. } => {
                self.hold_everything.insert(session);
            }
            Followed::HoldsNothing => {}
        }
    }

    fn follow_no_session_exactly(&mut self) {
        self.grants.clear();
        let exactly: Vec<SessionId> = self.periods.values().copied().collect();
        for session in exactly {
            self.follow_as_everything(session);
        }
    }
}

fn remove_from<K: Eq + Hash>(index: &mut FxHashMap<K, Vec<NoticeId>>, key: K, id: NoticeId) {
    if let Some(ids) = index.get_mut(&key) {
        ids.retain(|&other| other != id);
        if ids.is_empty() {
            index.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests;
