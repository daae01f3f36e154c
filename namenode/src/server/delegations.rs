//! Delegations: files whose creator may answer `close` before their first content is committed.
//!
//! A session gets the delegation of a file that it creates. When another session asks about the file, the namenode
//! recalls the delegation and defers the question until the content is committed, so no session sees a closed file
//! without what was written to it. The write delegations of NFS version 4 (RFC 8881, section 10.4) work the same way,
//! for any file; these are for new files only, since there `close` costs a round trip although no other session
//! looks.
//!
//! Delegations are soft state, in no journal. After a restart, sessions that come back declare what they have; a file
//! without content may be delegated to any session that has not come back. Several sessions may declare the same
//! file: each has changed it, and does not know whether the change is durable.
//!
//! The code is pure: time comes from the caller. Memory is bounded by the limit per session.

use std::collections::BTreeSet;

use harvestfs_protocol::ids::{InodeId, SessionId};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// The delegations of all sessions.
#[derive(Debug)]
pub(crate) struct Delegations {
    per_session_max: usize,
    /// How long a holder may take to commit what is recalled.
    patience_ms: u64,
    by_inode: FxHashMap<InodeId, SmallVec<[Delegation; 1]>>,
    by_session: FxHashMap<SessionId, BTreeSet<InodeId>>,
}

#[derive(Debug)]
struct Delegation {
    holder: SessionId,
    recall: Recall,
    /// Whether the holder was asked since it last declared the file.
    is_asked: bool,
}

/// How long others have waited for the holder.
#[derive(Clone, Copy, Debug, Default)]
struct Recall {
    since_ms: Option<u64>,
    /// The holder came back since it was first recalled, and its time was restarted for that.
    is_renewed: bool,
}

impl Recall {
    /// Handles the return of the holder. The first time, it may not have been reached before.
    fn declared(self) -> Self {
        match self.since_ms {
            Some(_) if !self.is_renewed => Self {
                since_ms: None,
                is_renewed: true,
            },
            _ => self,
        }
    }
}

/// A session that a question about a file has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// This session must be asked to commit the file's content first.
    Recall(SessionId),
    /// This session was asked already.
    Recalled(SessionId),
}

impl Delegations {
    pub(crate) fn new(per_session_max: usize, patience_ms: u64) -> Self {
        Self {
            per_session_max,
            patience_ms,
            by_inode: FxHashMap::default(),
            by_session: FxHashMap::default(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_inode.is_empty()
    }

    /// Gives a session the delegation of a file, unless the session takes none or has too many, or another session
    /// has it.
    pub(crate) fn give(&mut self, session: SessionId, ino: InodeId) -> bool {
        !self.by_inode.contains_key(&ino) && self.add(session, ino, Recall::default())
    }

    /// Adds a delegation even if others have the file.
    fn add(&mut self, session: SessionId, ino: InodeId, recall: Recall) -> bool {
        let Some(files) = self.by_session.get_mut(&session) else {
            return false;
        };
        if files.len() >= self.per_session_max || !files.insert(ino) {
            return false;
        }
        let delegation = Delegation {
            holder: session,
            recall,
            is_asked: false,
        };
        self.by_inode.entry(ino).or_default().push(delegation);
        true
    }

    /// Ends a delegation, after the commit or without it. False if the session did not have it.
    pub(crate) fn returned(&mut self, session: SessionId, ino: InodeId) -> bool {
        let files = self.by_session.get_mut(&session);
        let had = files.is_some_and(|files| files.remove(&ino));
        if had {
            self.remove(session, ino);
        }
        had
    }

    fn remove(&mut self, session: SessionId, ino: InodeId) {
        if let Some(delegations) = self.by_inode.get_mut(&ino) {
            delegations.retain(|it| it.holder != session);
            if delegations.is_empty() {
                self.by_inode.remove(&ino);
            }
        }
    }

    /// Ends all delegations of a session that has ended, or takes none.
    pub(crate) fn ended(&mut self, session: SessionId) {
        for ino in self.by_session.remove(&session).into_iter().flatten() {
            self.remove(session, ino);
        }
    }

    /// Notes that the session takes delegations, and that those it declares are all that it has. A session that came
    /// back gets pending recalls again: the notice may have been lost with its connection. It gets more time for that
    /// only once, or others would wait forever for a session that comes back again and again.
    pub(crate) fn declared(&mut self, session: SessionId, inodes: &[InodeId]) {
        let before = inodes.iter().map(|&ino| self.recall_of(session, ino));
        let before: Vec<Recall> = before.collect();
        self.ended(session);
        self.by_session.insert(session, BTreeSet::new());
        for (&ino, recall) in inodes.iter().zip(before) {
            self.add(session, ino, recall.declared());
        }
    }

    /// How long others have waited for the session, which may not have the file.
    fn recall_of(&self, session: SessionId, ino: InodeId) -> Recall {
        let mut delegations = self.by_inode.get(&ino).into_iter().flatten();
        let its = delegations.find(|it| it.holder == session);
        its.map(|it| it.recall).unwrap_or_default()
    }

    /// Whether the session has the delegation of a file.
    pub(crate) fn is_held(&self, session: SessionId, ino: InodeId) -> bool {
        let files = self.by_session.get(&session);
        files.is_some_and(|files| files.contains(&ino))
    }

    /// What a question of `asker` about a file has to wait for. A holder that did not answer in time is left out.
    pub(crate) fn standings(
        &self,
        now_ms: u64,
        asker: SessionId,
        ino: InodeId,
    ) -> SmallVec<[Standing; 1]> {
        let delegations = self.by_inode.get(&ino).into_iter().flatten();
        let of_others = delegations.filter(|it| it.holder != asker);
        let in_time = of_others.filter(|it| {
            it.recall
                .since_ms
                .is_none_or(|since_ms| now_ms < since_ms + self.patience_ms)
        });
        let standings = in_time.map(|it| match it.is_asked {
            true => Standing::Recalled(it.holder),
            false => Standing::Recall(it.holder),
        });
        standings.collect()
    }

    /// All delegated files.
    pub(crate) fn inodes(&self) -> impl Iterator<Item = InodeId> {
        self.by_inode.keys().copied()
    }

    /// Notes that the recall is being sent to a holder.
    pub(crate) fn recalled(&mut self, now_ms: u64, holder: SessionId, ino: InodeId) {
        let delegations = self.by_inode.get_mut(&ino).into_iter().flatten();
        for delegation in delegations.filter(|it| it.holder == holder) {
            delegation.recall.since_ms.get_or_insert(now_ms);
            delegation.is_asked = true;
        }
    }

    /// The sessions that have the delegation of a file.
    pub(crate) fn holders(&self, ino: InodeId) -> impl Iterator<Item = SessionId> {
        let delegations = self.by_inode.get(&ino).into_iter().flatten();
        delegations.map(|it| it.holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);
    const FILE: InodeId = InodeId(7);

    fn standing(delegations: &Delegations, now_ms: u64, asker: SessionId) -> Vec<Standing> {
        delegations.standings(now_ms, asker, FILE).to_vec()
    }

    fn with_one_file() -> Delegations {
        let mut delegations = Delegations::new(2, 1_000);
        assert!(
            !delegations.give(A, FILE),
            "it did not say that it takes any"
        );
        delegations.declared(A, &[]);
        delegations.declared(B, &[]);
        assert!(delegations.give(A, FILE));
        delegations
    }

    #[test]
    fn others_wait_until_the_holder_has_committed() {
        let mut delegations = with_one_file();
        assert_eq!(standing(&delegations, 0, A), []);
        assert_eq!(standing(&delegations, 0, B), [Standing::Recall(A)]);
        delegations.recalled(0, A, FILE);
        assert_eq!(standing(&delegations, 1, B), [Standing::Recalled(A)]);
        assert!(!delegations.returned(B, FILE));
        assert_eq!(standing(&delegations, 1, B), [Standing::Recalled(A)]);
        assert!(delegations.returned(A, FILE));
        assert_eq!(standing(&delegations, 1, B), []);
        assert!(delegations.is_empty());
    }

    #[test]
    fn no_session_waits_for_a_holder_that_does_not_answer() {
        let mut delegations = with_one_file();
        delegations.recalled(5, A, FILE);
        assert_eq!(standing(&delegations, 1_004, B), [Standing::Recalled(A)]);
        assert_eq!(standing(&delegations, 1_005, B), []);
    }

    #[test]
    fn a_session_that_came_back_is_asked_again() {
        let mut delegations = with_one_file();
        delegations.recalled(0, A, FILE);
        delegations.declared(A, &[FILE]);
        assert_eq!(standing(&delegations, 1, B), [Standing::Recall(A)]);
        delegations.declared(A, &[]);
        assert_eq!(standing(&delegations, 1, B), []);
    }

    #[test]
    fn a_session_that_comes_back_again_and_again_has_its_time_anew_once() {
        let mut delegations = with_one_file();
        delegations.recalled(5, A, FILE);
        for now_ms in [900, 1_300, 1_899] {
            delegations.declared(A, &[FILE]);
            assert_eq!(standing(&delegations, now_ms, B), [Standing::Recall(A)]);
            delegations.recalled(now_ms, A, FILE);
            assert_eq!(standing(&delegations, now_ms, B), [Standing::Recalled(A)]);
        }
        assert_eq!(standing(&delegations, 1_900, B), []);
        delegations.declared(A, &[FILE]);
        assert_eq!(standing(&delegations, 1_900, B), []);
        // Another one is asked for.
        assert!(delegations.returned(A, FILE) && delegations.give(A, FILE));
        assert_eq!(standing(&delegations, 1_900, B), [Standing::Recall(A)]);
    }

    #[test]
    fn each_session_that_declares_a_file_is_asked_for_it() {
        let mut delegations = with_one_file();
        let other = InodeId(8);
        delegations.declared(B, &[FILE, FILE]);
        assert!(!delegations.give(B, FILE));
        assert_eq!(
            standing(&delegations, 0, A),
            [Standing::Recall(B)],
            "each waits for the other"
        );
        let third = SessionId(3);
        assert_eq!(
            standing(&delegations, 0, third),
            [Standing::Recall(A), Standing::Recall(B)]
        );
        delegations.recalled(0, B, FILE);
        assert_eq!(
            standing(&delegations, 1, third),
            [Standing::Recall(A), Standing::Recalled(B)]
        );
        assert!(delegations.returned(A, FILE) && !delegations.returned(A, FILE));
        assert_eq!(standing(&delegations, 1, third), [Standing::Recalled(B)]);
        assert!(delegations.give(B, other) && delegations.holders(other).eq([B]));
        delegations.ended(B);
        assert!(delegations.is_empty());
    }

    #[test]
    fn they_are_bounded_and_end_with_the_session() {
        let mut delegations = with_one_file();
        assert!(delegations.give(A, InodeId(8)));
        assert!(!delegations.give(A, InodeId(9)));
        assert!(!delegations.give(B, InodeId(8)));
        delegations.ended(A);
        assert!(delegations.is_empty());
        assert!(delegations.give(B, InodeId(8)));
    }
}
