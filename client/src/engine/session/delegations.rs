//! Delegations of this session: files that it created and whose first content it may commit after
//! `close`, because the namenode asks for it before it shows the file to another session.

use std::collections::BTreeSet;

use harvestfs_protocol::ids::InodeId;
use parking_lot::Mutex;
use rustc_hash::FxHashSet;

/// See the module. The namenode bounds how many there are.
#[derive(Default)]
pub(crate) struct Delegations {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    inodes: FxHashSet<InodeId>,
    /// Files that were closed before their first content was committed, and of which something is not.
    owed: FxHashSet<InodeId>,
    takings: Takings,
}

/// How often delegations were taken back. A notice that takes one back may arrive before the reply
/// that gives it, because the reply waits until the creation is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Takings(u64);

impl Delegations {
    /// To be called before the request whose reply may give a delegation is sent.
    pub(crate) fn takings(&self) -> Takings {
        self.state.lock().takings
    }

    /// The namenode gave the delegation. It does not count when any was taken back since `before`:
    /// it may have been this one.
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

    /// `close` of a file has returned, and its commit follows.
    pub(crate) fn owes(&self, ino: InodeId) {
        self.state.lock().owed.insert(ino);
    }

    /// Nothing of a file that was closed is left to be committed.
    pub(crate) fn owes_no_more(&self, ino: InodeId) {
        self.state.lock().owed.remove(&ino);
    }

    /// Whether a commit of this session is to follow that others have to wait for.
    pub(crate) fn is_owed(&self, ino: InodeId) -> bool {
        let state = self.state.lock();
        state.inodes.contains(&ino) || state.owed.contains(&ino)
    }

    /// This session gives one up: from now on, every `close` of the file waits for the commit.
    pub(crate) fn returned(&self, ino: InodeId) {
        self.state.lock().inodes.remove(&ino);
    }

    /// The namenode takes some back.
    pub(crate) fn recalled(&self, inodes: &[InodeId]) {
        let mut state = self.state.lock();
        state.takings.0 += 1;
        for ino in inodes {
            state.inodes.remove(ino);
        }
    }

    /// The session has ended.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock();
        state.takings.0 += 1;
        state.inodes.clear();
    }

    /// What the session declares to the namenode when it comes back: its delegations, which the namenode takes back if they
    /// are not among them; and what others must not be shown before the session was asked for it: files whose commits follow,
    /// and `unconfirmed` ones, whose commits were answered and may be lost.
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

    /// Else the namenode would show them to others, who would find them empty.
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
