//! What was promised to the program on one mount: names and bytes, including those of files that are changed in
//! place.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The bytes of a file at one time.
pub(crate) type Version = Arc<Vec<u8>>;

/// How far the contents of a file are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The last change returned: it has the last version.
    Settled,
    /// A change is in flight.
    Changing,
    /// A change failed, or was interrupted: it has one of the versions (or a mixture, if not whole), and no program
    /// uses it any more.
    Doubtful,
}

/// What is known about a name.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// The first version is durable; later ones are those of changes whose `fsync` has not returned.
    /// In a version that is `None`, the name does not exist.
    versions: Vec<Option<Version>>,
    /// It has one of the versions as a whole, not a mixture of them.
    whole: bool,
    state: State,
    /// The number of changes so far.
    changes: u64,
    /// How often its mount had been disturbed when the last unsynced change returned; `None` if it was disturbed then.
    undisturbed_since: Option<u64>,
}

/// A change of one name.
#[derive(Debug)]
pub(crate) struct Change {
    /// The name.
    pub name: String,
    /// The contents after the change; `None` if the name is removed.
    pub to: Option<Version>,
    /// The change is atomic.
    pub whole: bool,
}

/// The outcome of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Returned {
    /// It is durable.
    Durable,
    /// It is visible to every later `open`, and may be lost if the mount is killed. Contains the count of the
    /// mount's disturbances; `None` if the mount was disturbed at that time.
    Visible(Option<u64>),
    /// It failed, or something happened in the meantime that voids its promise.
    Not,
}

/// All names in the directory of one mount.
#[derive(Debug, Default)]
pub(crate) struct Files {
    entries: BTreeMap<String, Entry>,
}

impl Entry {
    fn new() -> Self {
        Self {
            versions: vec![None],
            whole: true,
            state: State::Settled,
            changes: 0,
            undisturbed_since: None,
        }
    }

    fn last(&self) -> Option<&Version> {
        self.versions.last().and_then(Option::as_ref)
    }

    /// How what was read differs from everything that the file may contain. `read` is `None` if the name did
    /// not exist.
    pub fn difference(&self, read: Option<&[u8]>) -> Option<String> {
        let settled = [self.last().cloned()];
        let allowed = match self.state {
            State::Settled => &settled[..],
            State::Changing | State::Doubtful => &self.versions[..],
        };
        let Some(read) = read else {
            let may_be_absent = allowed.iter().any(Option::is_none);
            return (!may_be_absent).then(|| "it is not there".to_owned());
        };
        let versions: Vec<&[u8]> = allowed
            .iter()
            .flatten()
            .map(|version| version.as_slice())
            .collect();
        if versions.contains(&read) {
            return None;
        }
        let Some(last) = versions.last() else {
            return Some(format!("{} bytes, but the name is gone", read.len()));
        };
        let same = |bytes: &[u8]| read.iter().zip(bytes).take_while(|(a, b)| a == b).count();
        if self.whole || versions.len() == 1 && allowed.len() == 1 {
            let zeros = read.iter().filter(|&&byte| byte == 0).count();
            return Some(format!(
                "{} bytes instead of {} ({} versions), other ones from {} on, {zeros} of all zero",
                read.len(),
                last.len(),
                versions.len(),
                same(last)
            ));
        }
        // In a mixture, each byte belongs to some version. A new file is empty at first.
        let lengths = versions.iter().map(|version| version.len());
        let is_new = allowed.iter().any(Option::is_none);
        let shortest = if is_new { 0 } else { lengths.clone().min()? };
        if !(shortest..=lengths.max()?).contains(&read.len()) {
            return Some(format!("{} bytes, which no version has", read.len()));
        }
        let is_of_some = |(at, byte): (usize, &u8)| {
            versions
                .iter()
                .any(|version| version.get(at).copied().unwrap_or(0) == *byte)
        };
        let wrong = read.iter().enumerate().position(|it| !is_of_some(it))?;
        Some(format!(
            "byte {wrong} of {} is of none of its {} versions",
            read.len(),
            versions.len()
        ))
    }

    /// The bytes at its beginning that all of its versions have in common.
    pub fn certain(&self) -> &[u8] {
        let mut versions = self.versions.iter();
        let Some(Some(first)) = versions.next() else {
            return &[];
        };
        let len = versions.fold(first.len(), |len, version| {
            let version = version
                .as_ref()
                .map_or(&[][..], |version| version.as_slice());
            let same = first[..len].iter().zip(version);
            same.take_while(|(a, b)| a == b).count()
        });
        &first[..len]
    }

    /// Whether its last change returned.
    pub fn is_settled(&self) -> bool {
        self.state == State::Settled
    }

    /// Whether nothing of it can be lost if its mount is killed.
    pub fn is_synced(&self) -> bool {
        self.versions.len() == 1
    }

    /// Whether another mount that opens the file now has to find the last version. `disturbances` is the
    /// count of the mount that wrote it.
    pub fn is_visible(&self, disturbances: Option<u64>) -> bool {
        self.is_settled()
            && (self.is_synced()
                || self.undisturbed_since.is_some() && self.undisturbed_since == disturbances)
    }

    /// Whether no change of it has begun since `earlier`.
    pub fn is_as(&self, earlier: &Self) -> bool {
        self.changes == earlier.changes && self.state == earlier.state
    }
}

impl Files {
    /// Begins changes. All of the names have to be usable.
    pub fn begin(&mut self, changes: &[Change]) {
        for change in changes {
            let entry = self.entries.entry(change.name.clone());
            let entry = entry.or_insert_with(Entry::new);
            entry.whole = change.whole && entry.versions.len() == 1;
            entry.versions.push(change.to.clone());
            entry.state = State::Changing;
            entry.changes += 1;
        }
    }

    /// Ends changes with their outcome.
    pub fn end(&mut self, changes: &[Change], returned: Returned) {
        for change in changes {
            let Some(entry) = self.entries.get_mut(&change.name) else {
                continue;
            };
            entry.state = match returned {
                Returned::Not => State::Doubtful,
                Returned::Durable | Returned::Visible(_) => State::Settled,
            };
            match returned {
                Returned::Durable => {
                    entry.versions = vec![change.to.clone()];
                    entry.whole = true;
                    if change.to.is_none() {
                        self.entries.remove(&change.name);
                    }
                }
                Returned::Visible(since) => entry.undisturbed_since = since,
                Returned::Not => {}
            }
        }
    }

    /// Notes that the mount was killed, or its session may have ended: what was not synced may be lost.
    pub fn forget_unsynced(&mut self) {
        for entry in self.entries.values_mut() {
            if entry.versions.len() > 1 {
                entry.state = State::Doubtful;
            }
        }
    }

    /// The names whose last change returned, with their contents.
    pub fn usable(&self) -> impl Iterator<Item = (&String, &Entry, &Version)> {
        self.entries.iter().filter_map(|(name, entry)| {
            let version = entry.last().filter(|_| entry.is_settled())?;
            Some((name, entry, version))
        })
    }

    /// Whether a name exists for certain: its last change returned, and did not remove it.
    pub fn holds(&self, name: &str) -> bool {
        self.get(name)
            .is_some_and(|entry| entry.is_settled() && entry.last().is_some())
    }

    /// What is known about a name.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// All names.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(to: Option<&[u8]>, whole: bool) -> [Change; 1] {
        let to = to.map(|bytes| Arc::new(bytes.to_vec()));
        let name = "a".to_owned();
        [Change { name, to, whole }]
    }

    fn may_hold(files: &Files, read: Option<&[u8]>) -> bool {
        files.entries["a"].difference(read).is_none()
    }

    #[test]
    fn what_was_synced_is_exact_and_what_was_interrupted_is_a_mixture() {
        let mut files = Files::default();
        let create = change(Some(b"aaaa"), false);
        files.begin(&create);
        assert!(may_hold(&files, None) && may_hold(&files, Some(b"")));
        assert_eq!(files.entries["a"].certain(), b"");
        files.end(&create, Returned::Durable);
        assert!(may_hold(&files, Some(b"aaaa")));
        for wrong in [None, Some(&b"aaab"[..]), Some(b"aaa"), Some(b"\0\0\0\0")] {
            assert!(!may_hold(&files, wrong), "{wrong:?}");
        }
        let overwrite = change(Some(b"abbaaa"), false);
        files.begin(&overwrite);
        files.end(&overwrite, Returned::Not);
        for allowed in [&b"aaaa"[..], b"abaa", b"abbaa\0", b"aaaaaa"] {
            assert!(may_hold(&files, Some(allowed)), "{allowed:?}");
        }
        for wrong in [None, Some(&b"aaa"[..]), Some(b"abba\0b"), Some(b"abbaaaa")] {
            assert!(!may_hold(&files, wrong), "{wrong:?}");
        }
        assert_eq!(files.usable().count(), 0);
        assert_eq!(files.entries["a"].certain(), b"a");
    }

    #[test]
    fn a_change_of_names_is_one_state_or_the_other() {
        let mut files = Files::default();
        let create = change(Some(b"aaaa"), false);
        files.begin(&create);
        files.end(&create, Returned::Durable);
        let cut = change(Some(b"aa"), true);
        files.begin(&cut);
        files.end(&cut, Returned::Not);
        assert!(may_hold(&files, Some(b"aaaa")) && may_hold(&files, Some(b"aa")));
        assert!(!may_hold(&files, Some(b"aaa")) && !may_hold(&files, None));
        assert_eq!(files.entries["a"].certain(), b"aa");
    }

    #[test]
    fn a_name_is_there_from_when_it_was_made_until_it_changes() {
        let mut files = Files::default();
        let create = change(Some(b"aaaa"), false);
        assert!(!files.holds("a"));
        files.begin(&create);
        assert!(!files.holds("a"), "it is not there yet");
        files.end(&create, Returned::Durable);
        assert!(files.holds("a") && !files.holds("b"));
        let remove = change(None, true);
        files.begin(&remove);
        assert!(!files.holds("a"), "it may be gone");
        files.end(&remove, Returned::Visible(None));
        assert!(!files.holds("a"), "it is gone");
    }

    #[test]
    fn what_was_only_closed_is_promised_until_its_mount_is_killed() {
        let mut files = Files::default();
        let create = change(Some(b"aaaa"), false);
        files.begin(&create);
        files.end(&create, Returned::Visible(Some(3)));
        assert!(!may_hold(&files, None) && may_hold(&files, Some(b"aaaa")));
        let visible = |disturbances| files.entries["a"].is_visible(disturbances);
        assert!(visible(Some(3)) && !visible(Some(4)) && !visible(None));
        files.forget_unsynced();
        assert!(may_hold(&files, None) && may_hold(&files, Some(b"aaaa")));
        assert!(!may_hold(&files, Some(b"baaa")));
    }
}
