//! Delegations of this session: files that it created and whose first content it may commit after
//! `close`, because the namenode requests the commit before it shows the file to another session.

use std::collections::BTreeSet;

use harvestfs_protocol::ids::InodeId;
use parking_lot::Mutex;
use rustc_hash::FxHashSet;

/// The delegations of a session. The namenode bounds their number.
#[derive(Default)]
pub(crate) struct Delegations {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    inodes: FxHashSet<InodeId>,
    /// Files that were closed before their first content was committed, and that still have uncommitted content.
    owed: FxHashSet<InodeId>,
    takings: Takings,
}

/// How often delegations were recalled. A notice that recalls one may arrive before the reply that
/// grants it, because the reply waits until the creation is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Takings(u64);

impl Delegations {
    /// Must be called before the request is sent whose reply may grant a delegation.
    pub(crate) fn takings(&self) -> Takings {
        self.state.lock().takings
    }

    /// Notes that the namenode granted a delegation. Ignored if any was recalled since `before`: it
    /// may have been this one.
    pub(crate) fn given(&self, ino: InodeId, before: Takings) {
        let mut state = self.state.lock();
        assert!(
            before.0 <= state.takings.0,
            "{ino} was asked for after {before:?}, and these are all: {:?}",
            state.takings
        );
        if state.takings == before {
            state.inodes.insert(ino);
        }
    }

    pub(crate) fn has(&self, ino: InodeId) -> bool {
        self.state.lock().inodes.contains(&ino)
    }

    /// Notes that `close` of a file has returned, and its commit follows.
    pub(crate) fn owes(&self, ino: InodeId) {
        self.state.lock().owed.insert(ino);
    }

    /// Notes that a closed file has nothing left to commit.
    pub(crate) fn owes_no_more(&self, ino: InodeId) {
        self.state.lock().owed.remove(&ino);
    }

    /// Whether a commit of this session is to follow that others have to wait for.
    pub(crate) fn is_owed(&self, ino: InodeId) -> bool {
        let state = self.state.lock();
        state.inodes.contains(&ino) || state.owed.contains(&ino)
    }

    /// Gives a delegation up: from now on, every `close` of the file waits for the commit.
    pub(crate) fn returned(&self, ino: InodeId) {
        self.state.lock().inodes.remove(&ino);
    }

    /// Notes that the namenode recalls delegations.
    pub(crate) fn recalled(&self, inodes: &[InodeId]) {
        let mut state = self.state.lock();
        state.takings.0 += 1;
        for ino in inodes {
            state.inodes.remove(ino);
        }
    }

    /// Drops all delegations at the end of the session.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock();
        state.takings.0 += 1;
        state.inodes.clear();
    }

    /// Returns what the session declares to the namenode when it reconnects: its delegations, which the namenode takes
    /// back if they are not declared; and the files that others must not see before the session was asked for them:
    /// those whose commits follow, and `unconfirmed` ones, whose commits were acknowledged and may be lost.
    pub(crate) fn declare(&self, unconfirmed: impl IntoIterator<Item = InodeId>) -> Vec<InodeId> {
        let mut state = self.state.lock();
        state.takings.0 += 1;
        let declared: BTreeSet<InodeId> = state
            .inodes
            .iter()
            .chain(&state.owed)
            .copied()
            .chain(unconfirmed)
            .collect();
        declared.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: InodeId = InodeId(7);

    #[test]
    fn what_is_taken_back_before_the_reply_arrives_is_not_given() {
        let delegations = Delegations::default();
        let before = delegations.takings();
        delegations.recalled(&[FILE]);
        delegations.given(FILE, before);
        assert!(!delegations.has(FILE));

        delegations.given(FILE, delegations.takings());
        assert!(delegations.has(FILE));
        delegations.recalled(&[FILE]);
        assert!(!delegations.has(FILE));
    }

    #[test]
    fn a_reply_from_before_the_session_came_back_gives_nothing() {
        let delegations = Delegations::default();
        let before = delegations.takings();
        assert_eq!(delegations.declare([]), Vec::new());
        delegations.given(FILE, before);
        assert!(!delegations.has(FILE));

        delegations.given(FILE, delegations.takings());
        assert_eq!(delegations.declare([]), [FILE]);
        let before = delegations.takings();
        delegations.clear();
        delegations.given(InodeId(8), before);
        assert!(!delegations.has(FILE) && !delegations.has(InodeId(8)));
    }

    /// Otherwise the namenode would show them to others, who would find them empty.
    #[test]
    fn files_whose_commits_are_on_their_way_are_declared() {
        let (delegations, other) = (Delegations::default(), InodeId(8));
        delegations.given(FILE, delegations.takings());
        delegations.owes(FILE);
        delegations.returned(FILE);
        assert_eq!(delegations.declare([]), [FILE]);
        assert_eq!(delegations.declare([other, FILE]), [FILE, other]);
        delegations.owes_no_more(FILE);
        assert_eq!(delegations.declare([]), Vec::new());
    }
}
