//! The part of sessions that need not survive a restart: their connections, when they were last heard, what
//! they hold open, and which of their mutations are still unanswered.

use std::collections::{BTreeSet, HashMap};

use harvestfs_protocol::ids::{InodeId, SessionId};
use rustc_hash::{FxHashMap, FxHashSet};

use super::leases::WaitId;
use super::overtaken::Part;
use crate::journal::Lsn;

/// What a session may do with the content of an inode that it holds. Permission is checked when it is opened:
/// it stays open when the mode changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum OpenTo {
    /// Write it, but not read it.
    Write,
    /// Read it, and perhaps write it.
    Read,
}

/// Number of a connection, never reused.
pub(crate) type ConnectionId = u64;

/// Open sessions and what they hold.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    by_id: FxHashMap<SessionId, Session>,
    /// Number of sessions per client.
    of_client: HashMap<String, usize>,
    /// Number of sessions that hold an inode.
    holders: FxHashMap<InodeId, u32>,
    /// Sessions from before the restart that have not come back yet: what they hold is unknown.
    missing: FxHashSet<SessionId>,
}

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    /// The client that may resume it.
    pub client: String,
    /// The connection that the session uses now.
    pub connection: Option<ConnectionId>,
    last_heard_ms: u64,
    holds: FxHashMap<InodeId, OpenTo>,
    /// Mutations whose replies are held back, by sequence number.
    pub unanswered: HashMap<u64, WaitId>,
    /// What other sessions changed while this one was missing, in the files that it may have changed before.
    pub overtaken: FxHashSet<(InodeId, Part)>,
    pub returning: Returning,
    /// The record of this namenode that notes that the session's lease has run out; 0 if there is none, or only
    /// one from before this namenode led, which is durable.
    pub lapse_noted: Lsn,
    /// The session is over, and may not be resumed. Its end is recorded when its lease has run out.
    pub is_expelled: bool,
}

/// Whether a session has come back, either from before this namenode led or after its lease had run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Returning {
    No,
    /// It has, and has only replayed so far: it has cached nothing. If its lease had run out, the new one is recorded
    /// only with its first call that is not a replay. Until then, the next leader refuses whatever the session has
    /// still to replay and others may have changed.
    Replays,
    /// It has, and that is recorded, durable with this record.
    Noted(Lsn),
}

impl Session {
    /// How many inodes it holds.
    pub(crate) fn holds_len(&self) -> usize {
        self.holds.len()
    }
}

impl Sessions {
    /// Adds a session that was just opened.
    pub(crate) fn opened(
        &mut self,
        now_ms: u64,
        id: SessionId,
        client: String,
        connection: ConnectionId,
    ) {
        self.insert(now_ms, id, client, Some(connection));
    }

    /// Adds a session from before the restart, whose client has not come back yet.
    pub(crate) fn restored(&mut self, now_ms: u64, id: SessionId, client: String) {
        self.insert(now_ms, id, client, None);
        self.missing.insert(id);
    }

    fn insert(
        &mut self,
        now_ms: u64,
        id: SessionId,
        client: String,
        connection: Option<ConnectionId>,
    ) {
        *self.of_client.entry(client.clone()).or_default() += 1;
        let session = Session {
            client,
            connection,
            last_heard_ms: now_ms,
            holds: FxHashMap::default(),
            unanswered: HashMap::new(),
            overtaken: FxHashSet::default(),
            returning: Returning::No,
            lapse_noted: 0,
            is_expelled: false,
        };
        self.by_id.insert(id, session);
    }

    /// One session.
    pub(crate) fn get(&self, id: SessionId) -> Option<&Session> {
        self.by_id.get(&id)
    }

    /// One session, mutably.
    pub(crate) fn get_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.by_id.get_mut(&id)
    }

    /// All sessions.
    pub(crate) fn ids(&self) -> impl Iterator<Item = SessionId> {
        self.by_id.keys().copied()
    }

    /// The sessions that have no connection just now.
    pub(crate) fn unconnected(&self) -> impl Iterator<Item = SessionId> {
        let unconnected = self.by_id.iter().filter(|(_, it)| it.connection.is_none());
        unconnected.map(|(id, _)| *id)
    }

    /// The sessions that are over and not closed yet.
    pub(crate) fn expelled(&self) -> impl Iterator<Item = SessionId> {
        let expelled = self.by_id.iter().filter(|(_, it)| it.is_expelled);
        expelled.map(|(id, _)| *id)
    }

    /// The number of sessions.
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// The number of sessions of a client.
    pub(crate) fn of_client(&self, client: &str) -> usize {
        self.of_client.get(client).copied().unwrap_or(0)
    }

    /// Notes that a message of the session arrived.
    pub(crate) fn heard(&mut self, now_ms: u64, id: SessionId) {
        if let Some(session) = self.by_id.get_mut(&id) {
            session.last_heard_ms = now_ms;
        }
    }

    /// Notes that the session has come back and has declared all that it holds.
    pub(crate) fn returned(&mut self, id: SessionId) {
        self.missing.remove(&id);
    }

    /// Notes that the session holds an inode; returns false if it already holds `holds_max` others.
    pub(crate) fn hold(
        &mut self,
        id: SessionId,
        ino: InodeId,
        to: OpenTo,
        holds_max: usize,
    ) -> bool {
        let Some(session) = self.by_id.get_mut(&id) else {
            return false;
        };
        if let Some(held) = session.holds.get_mut(&ino) {
            *held = to.max(*held);
            return true;
        }
        if session.holds.len() >= holds_max {
            return false;
        }
        session.holds.insert(ino, to);
        *self.holders.entry(ino).or_default() += 1;
        true
    }

    /// Whether the session has an inode open for at least this use.
    pub(crate) fn has_open(&self, id: SessionId, ino: InodeId, to: OpenTo) -> bool {
        let session = self.by_id.get(&id);
        session.and_then(|session| session.holds.get(&ino)) >= Some(&to)
    }

    /// Notes that the session no longer holds an inode. Returns true if now no session does.
    pub(crate) fn release(&mut self, id: SessionId, ino: InodeId) -> bool {
        let held = self
            .by_id
            .get_mut(&id)
            .is_some_and(|session| session.holds.remove(&ino).is_some());
        held && self.unhold(ino)
    }

    /// The inodes that the session holds beside `declared`.
    pub(crate) fn held_beside(&self, id: SessionId, declared: &BTreeSet<InodeId>) -> Vec<InodeId> {
        let holds = self.by_id.get(&id).map(|session| &session.holds);
        let mut beside: Vec<InodeId> = holds
            .into_iter()
            .flat_map(FxHashMap::keys)
            .filter(|ino| !declared.contains(ino))
            .copied()
            .collect();
        beside.sort_unstable();
        beside
    }

    /// Removes a session that is over. Returns the inodes that no session holds any more.
    pub(crate) fn removed(&mut self, id: SessionId) -> Vec<InodeId> {
        self.missing.remove(&id);
        let Some(session) = self.by_id.remove(&id) else {
            return Vec::new();
        };
        if let Some(count) = self.of_client.get_mut(&session.client) {
            *count -= 1;
            if *count == 0 {
                self.of_client.remove(&session.client);
            }
        }
        let mut unheld: Vec<InodeId> = session.holds.into_keys().collect();
        unheld.retain(|&ino| self.unhold(ino));
        // What follows from this enters the journal, so the order must not depend on a hash.
        unheld.sort_unstable();
        unheld
    }

    /// Whether a session holds the inode, or may hold it without the namenode knowing yet.
    pub(crate) fn may_be_held(&self, ino: InodeId) -> bool {
        !self.missing.is_empty() || self.holders.contains_key(&ino)
    }

    /// Sessions from before the restart whose clients have not come back.
    pub(crate) fn missing(&self) -> impl Iterator<Item = SessionId> {
        self.missing.iter().copied()
    }

    /// Whether a session is from before the restart, and its client has not come back.
    pub(crate) fn is_missing(&self, id: SessionId) -> bool {
        self.missing.contains(&id)
    }

    /// Whether sessions from before the restart are still missing.
    pub(crate) fn any_missing(&self) -> bool {
        !self.missing.is_empty()
    }

    /// Whether a session was silent for at least `for_ms`.
    pub(crate) fn is_silent(&self, now_ms: u64, id: SessionId, for_ms: u64) -> bool {
        let session = self.by_id.get(&id);
        session.is_some_and(|session| session.last_heard_ms + for_ms <= now_ms)
    }

    /// Sessions that were silent for at least `timeout_ms`, lowest number first.
    pub(crate) fn timed_out(&self, now_ms: u64, timeout_ms: u64) -> Vec<SessionId> {
        let mut silent: Vec<SessionId> = self
            .by_id
            .iter()
            .filter(|(_, session)| session.last_heard_ms + timeout_ms <= now_ms)
            .map(|(&id, _)| id)
            .collect();
        silent.sort_unstable();
        silent
    }

    fn unhold(&mut self, ino: InodeId) -> bool {
        let Some(count) = self.holders.get_mut(&ino) else {
            return false;
        };
        *count -= 1;
        if *count > 0 {
            return false;
        }
        self.holders.remove(&ino);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);
    const FILE: InodeId = InodeId(9);

    fn two() -> Sessions {
        let mut sessions = Sessions::default();
        sessions.opened(0, A, "a".into(), 1);
        sessions.opened(0, B, "b".into(), 2);
        sessions
    }

    #[test]
    fn an_inode_is_held_until_the_last_session_lets_go() {
        let mut sessions = two();
        assert!(
            sessions.hold(A, FILE, OpenTo::Read, 10) && sessions.hold(A, FILE, OpenTo::Read, 10)
        );
        assert!(sessions.hold(B, FILE, OpenTo::Read, 10));
        assert!(!sessions.release(A, FILE));
        assert!(!sessions.release(A, FILE), "not twice");
        assert!(sessions.may_be_held(FILE));
        assert_eq!(sessions.removed(B), vec![FILE]);
        assert!(!sessions.may_be_held(FILE));
    }

    #[test]
    fn a_session_is_silent_since_it_was_heard_or_the_namenode_started() {
        let mut sessions = two();
        sessions.heard(5, A);
        sessions.restored(7, SessionId(3), "a".into());
        let silent = |sessions: &Sessions, now_ms| {
            [A, B, SessionId(3), SessionId(4)].map(|id| sessions.is_silent(now_ms, id, 10))
        };
        assert_eq!(silent(&sessions, 9), [false; 4]);
        assert_eq!(silent(&sessions, 10), [false, true, false, false]);
        assert_eq!(silent(&sessions, 15), [true, true, false, false]);
        assert_eq!(silent(&sessions, 17), [true, true, true, false]);
    }

    #[test]
    fn holds_are_bounded() {
        let mut sessions = two();
        assert!(
            sessions.hold(A, InodeId(1), OpenTo::Read, 2)
                && sessions.hold(A, InodeId(2), OpenTo::Read, 2)
        );
        assert!(!sessions.hold(A, InodeId(3), OpenTo::Read, 2));
        assert!(sessions.hold(A, InodeId(2), OpenTo::Read, 2));
    }

    #[test]
    fn what_was_opened_to_write_is_read_once_it_was_opened_to_read() {
        let mut sessions = two();
        assert!(!sessions.has_open(A, FILE, OpenTo::Write));
        assert!(sessions.hold(A, FILE, OpenTo::Write, 1));
        assert!(sessions.has_open(A, FILE, OpenTo::Write));
        assert!(!sessions.has_open(A, FILE, OpenTo::Read));
        for to in [OpenTo::Read, OpenTo::Write] {
            assert!(sessions.hold(A, FILE, to, 1));
            assert!(sessions.has_open(A, FILE, OpenTo::Read));
        }
        assert!(!sessions.has_open(B, FILE, OpenTo::Write));
        assert!(sessions.release(A, FILE));
        assert!(!sessions.has_open(A, FILE, OpenTo::Write));
    }

    #[test]
    fn sessions_are_counted_for_each_client() {
        let mut sessions = two();
        sessions.restored(0, SessionId(3), "a".into());
        assert_eq!((sessions.of_client("a"), sessions.of_client("b")), (2, 1));
        sessions.removed(A);
        sessions.removed(A);
        sessions.removed(B);
        assert_eq!((sessions.of_client("a"), sessions.of_client("b")), (1, 0));
    }

    #[test]
    fn a_missing_session_may_hold_anything() {
        let mut sessions = Sessions::default();
        sessions.restored(0, A, "a".into());
        assert!(sessions.may_be_held(FILE));
        sessions.returned(A);
        assert!(!sessions.may_be_held(FILE));
    }

    #[test]
    fn silence_is_noticed() {
        let mut sessions = two();
        sessions.heard(30, B);
        assert_eq!(sessions.timed_out(59, 60), vec![]);
        assert_eq!(sessions.timed_out(60, 60), vec![A]);
        assert_eq!(sessions.timed_out(90, 60), vec![A, B]);
    }
}
