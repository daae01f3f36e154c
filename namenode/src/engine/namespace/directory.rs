//! A directory's entries.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Bound;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::NAME_BYTES_MAX;
use harvestfs_protocol::name::Name;

use super::usage::{NOWHERE, Quota, Usage};

/// Names up to this length are stored in the tree's nodes: a lookup in a huge directory then compares
/// names without following a pointer for each.
const SHORT_BYTES_MAX: usize = 22;

const _: () = assert!(NAME_BYTES_MAX >= SHORT_BYTES_MAX);

/// A [`Name`] in 24 bytes, most of the time without an allocation.
#[derive(Clone)]
enum EntryName {
    Short {
        length_bytes: u8,
        bytes: [u8; SHORT_BYTES_MAX],
    },
    Long(Box<[u8]>),
}

impl EntryName {
    fn new(name: &[u8]) -> Self {
        if name.len() <= SHORT_BYTES_MAX {
            let mut bytes = [0; SHORT_BYTES_MAX];
            bytes[..name.len()].copy_from_slice(name);
            Self::Short {
                // At most SHORT_BYTES_MAX.
                length_bytes: name.len() as u8,
                bytes,
            }
        } else {
            Self::Long(name.into())
        }
    }

    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short {
                length_bytes,
                bytes,
            } => &bytes[..usize::from(*length_bytes)],
            Self::Long(bytes) => bytes,
        }
    }
}

impl Borrow<[u8]> for EntryName {
    fn borrow(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl PartialEq for EntryName {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for EntryName {}

impl PartialOrd for EntryName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for EntryName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl std::fmt::Debug for EntryName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&String::from_utf8_lossy(self.as_bytes()), f)
    }
}

/// The part of an inode that only directories have.
#[derive(Debug, Default)]
pub(super) struct Directory {
    /// The usage below it.
    pub used: Usage,
    pub quota: Quota,
    /// Seconds for which the trash keeps files removed from it, and from directories below that do not set
    /// this; 0: nothing is kept.
    pub trash_s: Option<u32>,
    /// Seconds for which each of its entries stays after the entry's last change.
    pub lifetime_s: Option<NonZeroU32>,
    /// Its name in the directory above; the root has none.
    pub name: Box<[u8]>,
    entries: BTreeMap<EntryName, InodeId>,
}

/// The name of an entry. It is valid, since it was checked when the entry was added.
#[track_caller]
pub(super) fn name_of_entry(name: &[u8]) -> Name {
    match Name::new(name) {
        Ok(name) => name,
        Err(error) => panic!("an entry is called {}: {error}", name.escape_ascii()),
    }
}

impl Directory {
    pub fn get(&self, name: &Name) -> Option<InodeId> {
        self.entries.get(name.as_bytes()).copied()
    }

    /// Makes a name lead to an inode; returns the inode that it led to before.
    pub fn insert(&mut self, name: &Name, ino: InodeId) -> Option<InodeId> {
        assert_ne!(ino, NOWHERE, "the name {name:?} would lead nowhere");
        self.entries.insert(EntryName::new(name.as_bytes()), ino)
    }

    pub fn remove(&mut self, name: &Name) -> Option<InodeId> {
        self.entries.remove(name.as_bytes())
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entries after a name, or all, in the order of the names' bytes.
    pub fn after(&self, name: Option<&Name>) -> impl Iterator<Item = (&[u8], InodeId)> {
        let start = name.map_or(Bound::Unbounded, |name| Bound::Excluded(name.as_bytes()));
        self.entries
            .range::<[u8], _>((start, Bound::Unbounded))
            .map(|(name, &ino)| (name.as_bytes(), ino))
    }
}
