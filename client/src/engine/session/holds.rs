//! Files that this session holds open at the namenode, so that their data outlives their names.
//!
//! A closed file is held a little longer: it is often reopened immediately, which then needs no
//! round trip. Releases are sent in batches.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::BLOCKS_PER_REQUEST_MAX;
use rustc_hash::{FxHashMap, FxHashSet};

/// How long a closed file stays held. Tools that write a file and read it back do so within this time.
const IDLE_MAX: Duration = Duration::from_secs(5);

/// Whether the hold of a closed file remains for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    Yes,
    No,
    /// Unless others changed the file while it was open: they may have removed its last name, and
    /// it counts against a quota as long as it is held.
    UnlessChanged,
}

/// The holds of a session.
pub(crate) struct Holds {
    idle_max: usize,
    open: FxHashMap<InodeId, usize>,
    /// Files that are open and, as far as this session knows, have no name.
    nameless: FxHashSet<InodeId>,
    /// Files that are open, and may have been changed by others meanwhile.
    changed: FxHashSet<InodeId>,
    /// Files that are held, but were not opened by a user that may read them.
    unreadable: FxHashSet<InodeId>,
    idle_since: FxHashMap<InodeId, Instant>,
    idle: BTreeSet<(Instant, InodeId)>,
    to_release: FxHashSet<InodeId>,
    releasing: FxHashSet<InodeId>,
    releases_answered: u64,
}

impl Holds {
    pub(crate) fn new(idle_max: usize) -> Self {
        Self {
            idle_max,
            open: FxHashMap::default(),
            nameless: FxHashSet::default(),
            changed: FxHashSet::default(),
            unreadable: FxHashSet::default(),
            idle_since: FxHashMap::default(),
            idle: BTreeSet::new(),
            to_release: FxHashSet::default(),
            releasing: FxHashSet::default(),
            releases_answered: 0,
        }
    }

    /// Opens a held file once more. Returns false if it is not held, or may not be read although `to_read`.
    pub(crate) fn open_held(&mut self, ino: InodeId, to_read: bool) -> bool {
        if to_read && self.unreadable.contains(&ino) {
            return false;
        }
        if !self.open.contains_key(&ino) && !self.take_idle(ino) {
            return false;
        }
        *self.open.entry(ino).or_default() += 1;
        true
    }

    /// Notes that the namenode holds a file now; `readable`: for a user that may read it.
    pub(crate) fn opened(&mut self, ino: InodeId, readable: bool) {
        let was_held = self.take_idle(ino) || self.open.contains_key(&ino);
        if readable {
            self.unreadable.remove(&ino);
        } else if !was_held {
            self.unreadable.insert(ino);
        }
        self.to_release.remove(&ino);
        *self.open.entry(ino).or_default() += 1;
    }

    /// Notes that a user that may read a file has opened it.
    pub(crate) fn read_permitted(&mut self, ino: InodeId) {
        self.unreadable.remove(&ino);
    }

    /// Notes that the namenode is about to be asked to hold a file. Returns false, and notes nothing, while a release is
    /// in flight, which would remove the new hold.
    pub(crate) fn begin_open(&mut self, ino: InodeId) -> bool {
        if self.releasing.contains(&ino) {
            return false;
        }
        self.opened(ino, false);
        true
    }

    /// Whether a release is in flight.
    pub(crate) fn is_releasing(&self) -> bool {
        !self.releasing.is_empty()
    }

    /// Closes a file once.
    pub(crate) fn closed(&mut self, ino: InodeId, now: Instant, keep: Keep) {
        let Some(opens) = self.open.get_mut(&ino) else {
            panic!("{ino} is closed, and not among {} open", self.open.len());
        };
        *opens -= 1;
        if *opens > 0 {
            return;
        }
        self.open.remove(&ino);
        let is_nameless = self.nameless.remove(&ino);
        let was_changed = self.changed.remove(&ino);
        let keeps = match keep {
            Keep::Yes => true,
            Keep::No => false,
            Keep::UnlessChanged => !was_changed,
        };
        if is_nameless || !keeps || self.idle_max == 0 {
            self.to_release.insert(ino);
            return;
        }
        let before = self.idle_since.insert(ino, now);
        assert!(
            before.is_none() && self.idle.insert((now, ino)),
            "{ino} was open, and idle since {before:?}"
        );
        while self.idle.len() > self.idle_max {
            self.release_oldest();
        }
    }

    /// Notes that this session removed the last name of a file.
    pub(crate) fn lost_last_name(&mut self, ino: InodeId) {
        self.drop_idle(ino);
        if self.open.contains_key(&ino) {
            self.nameless.insert(ino);
        }
    }

    /// Whether a file without a name is open.
    pub(crate) fn has_nameless(&self) -> bool {
        !self.nameless.is_empty()
    }

    /// Gives up the hold of a file that another session changed or removed, unless it is open.
    pub(crate) fn drop_idle(&mut self, ino: InodeId) {
        if self.take_idle(ino) {
            self.to_release.insert(ino);
        } else if self.open.contains_key(&ino) {
            self.changed.insert(ino);
        }
    }

    /// Notes that others may have changed or removed every file.
    pub(crate) fn all_may_have_changed(&mut self) {
        self.changed.extend(self.open.keys());
        // Nothing is known about the others any more, so that they would be opened anew.
        while !self.idle.is_empty() {
            self.release_oldest();
        }
    }

    /// Returns the files that are to be released now; [`Holds::release_answered`] must follow.
    pub(crate) fn begin_release(&mut self, now: Instant) -> Vec<InodeId> {
        while self
            .idle
            .first()
            .is_some_and(|(since, _)| now.saturating_duration_since(*since) >= IDLE_MAX)
        {
            self.release_oldest();
        }
        let to_release = self.to_release.iter().copied();
        let batch: Vec<InodeId> = to_release.take(BLOCKS_PER_REQUEST_MAX).collect();
        for ino in &batch {
            self.to_release.remove(ino);
            self.unreadable.remove(ino);
            self.releasing.insert(*ino);
        }
        batch
    }

    /// Notes that the namenode knows about the release, or that it failed and will end with the session.
    pub(crate) fn release_answered(&mut self, batch: &[InodeId]) {
        for ino in batch {
            self.releasing.remove(ino);
        }
        self.releases_answered += 1;
    }

    /// Number of releases that were answered, or failed.
    pub(crate) fn releases_answered(&self) -> u64 {
        self.releases_answered
    }

    /// Returns all held files, for reopening the session.
    pub(crate) fn all(&self) -> Vec<InodeId> {
        let open = self.open.keys();
        open.chain(self.idle_since.keys()).copied().collect()
    }

    fn take_idle(&mut self, ino: InodeId) -> bool {
        match self.idle_since.remove(&ino) {
            Some(since) => {
                assert!(
                    self.idle.remove(&(since, ino)),
                    "{ino} is idle since {since:?}, and not in the order of {}",
                    self.idle.len()
                );
                true
            }
            None => false,
        }
    }

    fn release_oldest(&mut self) {
        if let Some((_, ino)) = self.idle.pop_first() {
            let since = self.idle_since.remove(&ino);
            assert!(since.is_some(), "{ino} is not idle, and in the order");
            self.to_release.insert(ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    #[test]
    fn a_closed_file_is_held_for_a_while() {
        let mut holds = Holds::new(2);
        let (now, ino) = (some_time(), InodeId(7));
        assert!(!holds.open_held(ino, true));
        holds.opened(ino, true);
        holds.closed(ino, now, Keep::UnlessChanged);
        assert!(holds.begin_release(now).is_empty());
        assert!(holds.open_held(ino, true));
        holds.closed(ino, now, Keep::Yes);
        assert_eq!(holds.begin_release(now + IDLE_MAX), vec![ino]);
        assert!(!holds.open_held(ino, true));
    }

    #[test]
    fn what_is_held_to_write_is_opened_anew_to_read() {
        let mut holds = Holds::new(2);
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
        let mut holds = Holds::new(2);
        let now = some_time();
        for ino in 1..=3 {
            holds.opened(InodeId(ino), true);
            holds.closed(InodeId(ino), now + Duration::from_millis(ino), Keep::Yes);
        }
        assert_eq!(holds.begin_release(now), vec![InodeId(1)]);
        assert_eq!(holds.all().len(), 2);
    }

    #[test]
    fn without_a_name_nothing_is_held_for_a_while() {
        let mut holds = Holds::new(2);
        holds.opened(InodeId(1), true);
        holds.lost_last_name(InodeId(1));
        assert!(holds.has_nameless());
        holds.closed(InodeId(1), some_time(), Keep::Yes);
        assert_eq!(holds.begin_release(some_time()), vec![InodeId(1)]);
        assert!(!holds.has_nameless());
    }

    #[test]
    fn what_is_open_stays_held_without_its_name() {
        let mut holds = Holds::new(2);
        holds.opened(InodeId(1), true);
        holds.drop_idle(InodeId(1));
        assert!(holds.begin_release(some_time()).is_empty());
        holds.closed(InodeId(1), some_time(), Keep::No);
        assert_eq!(holds.begin_release(some_time()), vec![InodeId(1)]);
    }

    #[test]
    fn what_others_changed_is_held_for_a_while_only_if_it_is_known_to_have_a_name() {
        let mut holds = Holds::new(2);
        let (now, ino) = (some_time(), InodeId(1));
        holds.opened(ino, true);
        holds.drop_idle(ino);
        assert!(!holds.has_nameless(), "nothing is known");
        holds.closed(ino, now, Keep::UnlessChanged);
        assert_eq!(holds.begin_release(now), vec![ino]);
        holds.release_answered(&[ino]);
        holds.opened(ino, true);
        holds.drop_idle(ino);
        holds.closed(ino, now, Keep::Yes);
        assert!(holds.begin_release(now).is_empty());
        assert!(holds.open_held(ino, true));
        holds.closed(ino, now, Keep::UnlessChanged);
        assert!(holds.begin_release(now).is_empty(), "that was before");
    }

    #[derive(Clone, Debug)]
    enum Op {
        Open(u64),
        Close(u64),
        Changed(u64),
        Unlinked(u64),
        Release,
        Answered,
        Later(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let ino = || 1u64..6;
        prop_oneof![
            5 => ino().prop_map(Op::Open),
            5 => ino().prop_map(Op::Close),
            1 => ino().prop_map(Op::Changed),
            1 => ino().prop_map(Op::Unlinked),
            3 => Just(Op::Release),
            3 => Just(Op::Answered),
            2 => (0u64..6_000).prop_map(Op::Later),
        ]
    }

    proptest! {
        /// In virtual time, against a namenode that keeps a set: files that are open here are held there,
        /// whatever is closed, released and opened meanwhile; closed files are released in the end, and with
        /// the next release if they may have lost their names while they were open.
        #[test]
        fn what_is_open_is_held(ops in prop::collection::vec(op(), 1..120)) {
            let mut holds = Holds::new(2);
            let mut now = some_time();
            let mut open: BTreeMap<InodeId, usize> = BTreeMap::new();
            let mut namenode: BTreeSet<InodeId> = BTreeSet::new();
            let mut in_flight: Vec<InodeId> = Vec::new();
            let mut changed: BTreeSet<InodeId> = BTreeSet::new();
            let mut due: BTreeSet<InodeId> = BTreeSet::new();
            for op in ops.into_iter().chain([Op::Answered]) {
                match op {
                    Op::Open(ino) => {
                        let ino = InodeId(ino);
                        if !holds.open_held(ino, false) {
                            if !holds.begin_open(ino) {
                                // It waits until the release is answered.
                                namenode.retain(|held| !in_flight.contains(held));
                                holds.release_answered(&std::mem::take(&mut in_flight));
                                prop_assert!(holds.begin_open(ino));
                            }
                            namenode.insert(ino);
                        }
                        due.remove(&ino);
                        *open.entry(ino).or_default() += 1;
                    }
                    Op::Close(ino) => {
                        let ino = InodeId(ino);
                        if let Some(opens) = open.get_mut(&ino) {
                            *opens -= 1;
                            if *opens == 0 {
                                open.remove(&ino);
                                due.extend(changed.take(&ino));
                            }
                            holds.closed(ino, now, Keep::UnlessChanged);
                        }
                    }
                    Op::Changed(ino) => {
                        let ino = InodeId(ino);
                        holds.drop_idle(ino);
                        changed.extend(open.contains_key(&ino).then_some(ino));
                    }
                    Op::Unlinked(ino) => {
                        let ino = InodeId(ino);
                        holds.lost_last_name(ino);
                        changed.extend(open.contains_key(&ino).then_some(ino));
                    }
                    Op::Release => {
                        if in_flight.is_empty() {
                            in_flight = holds.begin_release(now);
                            prop_assert!(due.iter().all(|ino| in_flight.contains(ino)), "{due:?}");
                            due.clear();
                        }
                    }
                    Op::Answered => {
                        namenode.retain(|held| !in_flight.contains(held));
                        holds.release_answered(&std::mem::take(&mut in_flight));
                    }
                    Op::Later(ms) => now += Duration::from_millis(ms),
                }
                let held = |ino: &InodeId| namenode.contains(ino) && !in_flight.contains(ino);
                prop_assert!(open.keys().all(held), "{open:?} {namenode:?} {in_flight:?}");
                let all: BTreeSet<InodeId> = holds.all().into_iter().collect();
                prop_assert!(open.keys().all(|ino| all.contains(ino)), "for the next session");
            }
            let rest = holds.begin_release(now + IDLE_MAX);
            namenode.retain(|held| !rest.contains(held));
            prop_assert!(namenode.iter().eq(open.keys()), "{namenode:?} {open:?}");
        }
    }
}
