//! What a client knows about its own directory.

use std::collections::BTreeMap;

use super::quota::Limited;

/// What is known about a name in a client's own directory. Names that are not listed are known not to exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    /// It is a file with this content.
    Content {
        bytes: Vec<u8>,
        /// It survives a crash of the client.
        durable: bool,
    },
    /// It is a file with this content, or was removed: its removal has no known outcome.
    Perhaps { bytes: Vec<u8> },
    /// An operation on it has no known outcome.
    Nothing,
}

impl Known {
    /// What is known after a removal that has no known outcome.
    pub fn perhaps(self) -> Self {
        match self {
            Self::Content {
                bytes,
                durable: true,
            }
            | Self::Perhaps { bytes } => Self::Perhaps { bytes },
            Self::Content { durable: false, .. } | Self::Nothing => Self::Nothing,
        }
    }

    /// Notes that what was not synced may be lost.
    pub fn lose_unless_durable(&mut self) {
        if matches!(self, Self::Content { durable: false, .. }) {
            *self = Self::Nothing;
        }
    }
}

/// What one client knows; it survives crashes of its machine.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub names: BTreeMap<String, Known>,
    /// Names that the operation in flight changes.
    pub in_flight: Vec<String>,
    /// The operation in flight removes names, without changing the contents of their files.
    pub is_removal: bool,
    /// Some machine has lost power since the operation in flight began.
    pub is_power_lost: bool,
    /// The contents of the directory when each snapshot of it was made.
    pub snapshots: BTreeMap<u64, BTreeMap<String, Known>>,
    /// Files in the trash, by their names there.
    pub trash: BTreeMap<String, Known>,
    pub limited: Limited,
    /// All files with blocks of their own that ever existed.
    pub lone: BTreeMap<String, Known>,
    /// The number of the last snapshot that was requested.
    pub last_snapshot: u64,
}

impl Memory {
    /// Notes that the client's machine crashed.
    pub fn crashed(&mut self) {
        self.doubt_in_flight();
        self.lose_what_was_not_synced();
    }

    /// Notes that the operation in flight has no known outcome.
    pub fn doubt_in_flight(&mut self) {
        for name in std::mem::take(&mut self.in_flight) {
            let known = match self.names.remove(&name) {
                Some(known) if self.is_removal => known.perhaps(),
                _ => Known::Nothing,
            };
            self.names.insert(name, known);
        }
    }

    /// Notes that a machine lost power.
    pub fn power_was_lost(&mut self) {
        self.is_power_lost = true;
        self.lose_what_was_not_synced();
        for names in self.snapshots.values_mut() {
            names.values_mut().for_each(Known::lose_unless_durable);
        }
    }

    /// Notes that the session ended: the next one does not know what the one before did not sync.
    pub fn session_ended(&mut self) {
        self.lose_what_was_not_synced();
    }

    fn lose_what_was_not_synced(&mut self) {
        let known = self.names.values_mut().chain(self.trash.values_mut());
        known.for_each(Known::lose_unless_durable);
        self.limited.lose_what_was_not_synced();
    }
}

/// The differences between a directory with the sizes `found` and what is known about its names.
pub fn differences(names: &BTreeMap<String, Known>, found: &BTreeMap<String, u64>) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, known) in names {
        let (bytes, may_be_gone) = match known {
            Known::Content { bytes, .. } => (bytes, false),
            Known::Perhaps { bytes } => (bytes, true),
            Known::Nothing => continue,
        };
        match found.get(name) {
            Some(&size) if size == bytes.len() as u64 => {}
            Some(size) => {
                problems.push(format!("{name} has {size} bytes, not {}", bytes.len()));
            }
            None if may_be_gone => {}
            None => problems.push(format!("{name} is not there")),
        }
    }
    let unknown = found.keys().filter(|name| !names.contains_key(*name));
    problems.extend(unknown.map(|name| format!("{name} is there though it was removed")));
    problems
}

/// How the contents of a file differ from what they have to be; `None` if they do not.
pub fn difference(expected: &[u8], found: &[u8]) -> Option<String> {
    if expected == found {
        return None;
    }
    let same = expected
        .iter()
        .zip(found)
        .take_while(|(a, b)| a == b)
        .count();
    let (length, expected) = (found.len(), expected.len());
    Some(format!(
        "{length} bytes instead of {expected}, other ones from {same} on"
    ))
}
