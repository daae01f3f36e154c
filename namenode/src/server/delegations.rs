//! Delegations: files whose creator may answer `close` before their first content is committed.
//!
//! A session gets the delegation of a file that it creates. When another session asks about the
//! file, the namenode recalls the delegation and keeps the question until the content was committed,
//! so no session sees a file that was closed without what was written to it. The write delegations
//! of NFS version 4 (RFC 8881, section 10.4) work the same way, for any file; these are for new
//! files only, because there `close` costs a round trip although no other session looks.
//!
//! Soft state: in no journal. After a restart, sessions that come back declare what they have; a
//! file without content may be delegated to any session that has not come back.
//!
//! Pure: time comes from the caller. Memory is bounded by what a session may have.

use std::collections::BTreeSet;

use harvestfs_protocol::ids::{InodeId, SessionId};
use rustc_hash::FxHashMap;

/// See the module.
#[derive(Debug)]
pub(crate) struct Delegations {
    per_session_max: usize,
    /// How long a holder has to commit what is recalled.
    patience_ms: u64,
    by_inode: FxHashMap<InodeId, Delegation>,
    by_session: FxHashMap<SessionId, BTreeSet<InodeId>>,
}

#[derive(Debug)]
struct Delegation {
    holder: SessionId,
    recalled_ms: Option<u64>,
}

/// What a question about a file has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Nothing.
    Free,
    /// This session must be asked to commit the file's content first.
    Recall(SessionId),
    /// It was asked.
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

    /// Gives a session the delegation of a file, unless it takes none or has too many, or another
    /// has it.
    pub(crate) fn give(&mut self, session: SessionId, ino: InodeId) -> bool {
        let Some(files) = self.by_session.get_mut(&session) else {
            return false;
        };
        if files.len() >= self.per_session_max || self.by_inode.contains_key(&ino) {
            return false;
        }
        files.insert(ino);
        let delegation = Delegation {
            holder: session,
            recalled_ms: None,
        };
        self.by_inode.insert(ino, delegation);
        true
    }

    /// Ends a delegation, after the commit or without it. False if the session did not have it.
    pub(crate) fn returned(&mut self, session: SessionId, ino: InodeId) -> bool {
        if self.holder(ino) != Some(session) {
            return false;
        }
        self.by_inode.remove(&ino);
        if let Some(files) = self.by_session.get_mut(&session) {
            files.remove(&ino);
        }
        true
    }

    /// The session has ended, or takes none.
    pub(crate) fn ended(&mut self, session: SessionId) {
        for ino in self.by_session.remove(&session).into_iter().flatten() {
            self.by_inode.remove(&ino);
        }
    }

    /// The session takes delegations; the ones that it declares are all that it has. A session that
    /// came back gets pending recalls again: the notice may have been lost with its connection.
    pub(crate) fn declared(&mut self, session: SessionId, inodes: &[InodeId]) {
        self.ended(session);
        self.by_session.insert(session, BTreeSet::new());
        for &ino in inodes {
            self.give(session, ino);
        }
    }

    /// Whether the session has the delegation of a file.
    pub(crate) fn is_held(&self, session: SessionId, ino: InodeId) -> bool {
        let delegation = self.by_inode.get(&ino);
        delegation.is_some_and(|delegation| delegation.holder == session)
    }

    /// What a question of `asker` about a file has to wait for.
    pub(crate) fn standing(&self, now_ms: u64, asker: SessionId, ino: InodeId) -> Standing {
        match self.by_inode.get(&ino) {
            Some(delegation) if delegation.holder != asker => match delegation.recalled_ms {
                None => Standing::Recall(delegation.holder),
                Some(since_ms) if now_ms < since_ms + self.patience_ms => {
                    Standing::Recalled(delegation.holder)
                }
                Some(_) => Standing::Free,
            },
            _ => Standing::Free,
        }
    }

    /// All files that are delegated.
    pub(crate) fn inodes(&self) -> impl Iterator<Item = InodeId> {
        self.by_inode.keys().copied()
    }

    /// The recall is being sent to the holder.
    pub(crate) fn recalled(&mut self, now_ms: u64, ino: InodeId) {
        if let Some(delegation) = self.by_inode.get_mut(&ino) {
            delegation.recalled_ms = Some(now_ms);
        }
    }

    /// Whose it is.
    pub(crate) fn holder(&self, ino: InodeId) -> Option<SessionId> {
        self.by_inode.get(&ino).map(|delegation| delegation.holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);
    const FILE: InodeId = InodeId(7);

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
        assert_eq!(delegations.standing(0, A, FILE), Standing::Free);
        assert_eq!(delegations.standing(0, B, FILE), Standing::Recall(A));
        delegations.recalled(0, FILE);
        assert_eq!(delegations.standing(1, B, FILE), Standing::Recalled(A));
        assert!(!delegations.returned(B, FILE));
        assert_eq!(delegations.standing(1, B, FILE), Standing::Recalled(A));
        assert!(delegations.returned(A, FILE));
        assert_eq!(delegations.standing(1, B, FILE), Standing::Free);
        assert!(delegations.is_empty());
    }

    #[test]
    fn no_session_waits_for_a_holder_that_does_not_answer() {
        let mut delegations = with_one_file();
        delegations.recalled(5, FILE);
        assert_eq!(delegations.standing(1_004, B, FILE), Standing::Recalled(A));
        assert_eq!(delegations.standing(1_005, B, FILE), Standing::Free);
    }

    #[test]
    fn a_session_that_came_back_is_asked_again() {
        let mut delegations = with_one_file();
        delegations.recalled(0, FILE);
        delegations.declared(A, &[FILE]);
        assert_eq!(delegations.standing(1, B, FILE), Standing::Recall(A));
        delegations.declared(A, &[]);
        assert_eq!(delegations.standing(1, B, FILE), Standing::Free);
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
