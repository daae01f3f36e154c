//! The part of the namespace that this client may cache while its lease lasts.
//!
//! A reply can be overtaken: while it is in flight, the namenode may invalidate its contents, or
//! another request of this client may change them. So every request takes a [`Ticket`] before it is
//! sent, and every invalidation and every change by this client is remembered by number. The part
//! of a reply that was invalidated or changed after its ticket is not cached.
//!
//! A reply can also overtake: it may show a change of another session, as an append does that is
//! placed behind such a change. The cache must then not hold anything older, so notices are obeyed
//! in the order in which they and the replies were sent ([`MetaCache::obey`]).

pub(crate) mod extents;
pub(crate) mod listings;
pub(crate) mod permissions;
#[cfg(test)]
mod tests;
mod ticket;
mod unsettled;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{DirEntry, Notice};
use harvestfs_protocol::name::{Name, SNAPSHOTS_NAME};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::{Attr, PlacementRules};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

pub(crate) use self::unsettled::{Scope, Unsettled};
use crate::engine::cache::extents::ExtentMap;

/// The capabilities that a program gets when it is run. Writing to the file removes them, and so does a
/// change of its owner.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";
/// Maximum number of events remembered for tickets in flight. Beyond it, no reply in flight is cached.
const EVENTS_MAX: usize = 65_536;
/// So many extents count as one entry of the cache.
const EXTENTS_PER_ENTRY: usize = 4;

/// The cache of one session. Every method is a short critical section. Cheap to clone.
#[derive(Clone)]
pub(crate) struct MetaCache {
    inner: Arc<Mutex<Inner>>,
    /// Whether anything may change at any moment. Readable without the lock, because every answer
    /// to a kernel checks it.
    is_unsettled: Arc<AtomicBool>,
}

/// A moment before a request was sent. While it exists, the events after it are kept.
pub(crate) struct Ticket {
    at: u64,
    inner: Arc<Mutex<Inner>>,
}

/// What the cache knows about a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    Absent,
    Found(Attr),
    /// The name leads to this inode, whose attributes are not cached.
    FoundInode(InodeId),
}

/// A part of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirPage {
    /// The directory's parent (the root is its own parent).
    pub parent: InodeId,
    /// Entries in name order.
    pub entries: Vec<DirEntry>,
    /// Whether no entry follows.
    pub end: bool,
}

#[derive(Default)]
struct Inner {
    inodes: FxHashMap<InodeId, Inode>,
    dirs: FxHashMap<InodeId, Directory>,
    /// Second-chance order of eviction.
    clock: VecDeque<InodeId>,
    entries: usize,
    entries_max: usize,
    /// Number of the last event.
    now: u64,
    /// Replies to requests from before this event are not cached.
    floor: u64,
    /// When something was last invalidated or changed.
    events: HashMap<Subject, u64>,
    tickets: usize,
    /// How many [`Unsettled`] mutations may change each subject at any moment.
    unsettled: FxHashMap<Subject, usize>,
    /// How many of these mutations change the inodes that names lead to.
    unsettled_targets: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Inode(InodeId),
    /// The part of a file's state that commits change.
    Content(InodeId),
    /// Any entry of a directory.
    Listing(InodeId),
    Entry(InodeId, Name),
}

#[derive(Default)]
struct Inode {
    attr: Option<Attr>,
    /// The extents, with the content version that they belong to: attributes can be learned alone.
    extents: Option<(u64, Arc<ExtentMap>)>,
    link_target: Option<Vec<u8>>,
    rules: Option<PlacementRules>,
    xattrs: HashMap<Vec<u8>, Option<Vec<u8>>>,
    /// The inode is new and has no extended attributes except those of HarvestFS itself.
    no_other_xattrs: bool,
    used: bool,
    /// Whether `clock` contains it.
    in_clock: bool,
    /// Its share of `entries`.
    weight: usize,
}

impl Inode {
    /// Notes that a change may have removed the file's capabilities. That it has none stays known: the
    /// kernel asks for them whenever a program writes.
    fn may_lose_capabilities(&mut self) {
        if self.xattrs.get(CAPABILITY).is_some_and(Option::is_some) {
            self.xattrs.remove(CAPABILITY);
        }
    }
}

#[derive(Default)]
struct Directory {
    names: BTreeMap<Name, Option<InodeId>>,
    /// Whether names that are not in `names` do not exist.
    complete: bool,
    parent: Option<InodeId>,
    used: bool,
}

impl MetaCache {
    pub(crate) fn new(entries_max: usize) -> Self {
        let inner = Inner {
            entries_max,
            ..Inner::default()
        };
        Self {
            inner: Arc::new(Mutex::new(inner)),
            is_unsettled: Arc::default(),
        }
    }

    /// Takes a ticket. Must be called before a request is sent.
    pub(crate) fn ticket(&self) -> Ticket {
        let mut inner = self.inner.lock();
        assert!(
            inner.tickets > 0 || inner.events.is_empty(),
            "{} events are remembered for no request",
            inner.events.len()
        );
        inner.tickets += 1;
        Ticket {
            at: inner.now,
            inner: self.inner.clone(),
        }
    }

    pub(crate) fn attr(&self, ino: InodeId) -> Option<Attr> {
        let mut inner = self.inner.lock();
        let inode = inner.inodes.get_mut(&ino)?;
        inode.used = true;
        inode.attr.clone()
    }

    pub(crate) fn entry(&self, parent: InodeId, name: &Name) -> Option<Entry> {
        let mut inner = self.inner.lock();
        inner.dirs.get_mut(&parent)?.used = true;
        let Some(ino) = inner.target(parent, name)? else {
            return Some(Entry::Absent);
        };
        Some(match inner.inodes.get_mut(&ino) {
            Some(Inode {
                attr: Some(attr),
                used,
                ..
            }) => {
                *used = true;
                Entry::Found(attr.clone())
            }
            _ => Entry::FoundInode(ino),
        })
    }

    /// Whether a name is known not to lead, or no longer to lead, to an inode.
    pub(crate) fn leads_elsewhere(&self, parent: InodeId, name: &Name, ino: InodeId) -> bool {
        let target = self.inner.lock().target(parent, name);
        target.is_some_and(|target| target != Some(ino))
    }

    /// Returns attributes and extents of the same content version.
    pub(crate) fn content(&self, ino: InodeId) -> Option<(Attr, Arc<ExtentMap>)> {
        let mut inner = self.inner.lock();
        let inode = inner.inodes.get_mut(&ino)?;
        inode.used = true;
        let attr = inode.attr.as_ref()?;
        let (version, extents) = inode.extents.as_ref()?;
        (*version == attr.content_version).then(|| (attr.clone(), extents.clone()))
    }

    /// Returns a part of a directory that is completely cached, with attributes.
    pub(crate) fn listing(
        &self,
        ino: InodeId,
        after: Option<&Name>,
        max_entries: usize,
    ) -> Option<DirPage> {
        use std::ops::Bound;
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let directory = inner.dirs.get_mut(&ino)?;
        if !directory.complete {
            return None;
        }
        directory.used = true;
        let parent = directory.parent?;
        let is_frozen = inner.inodes.get(&ino)?.attr.as_ref()?.is_frozen();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = directory.names.range::<Name, _>((from, Bound::Unbounded));
        let mut existing = range.filter_map(|(name, ino)| Some((name, (*ino)?)));
        let mut entries = Vec::new();
        while entries.len() < max_entries {
            let Some((name, ino)) = existing.next() else {
                return Some(DirPage {
                    parent,
                    entries,
                    end: true,
                });
            };
            // Only the attributes contain the kind.
            let attr = inner.inodes.get(&ino)?.attr.as_ref()?;
            // It may be cached because it was looked up; listings of the namenode omit it too.
            if name.as_bytes() == SNAPSHOTS_NAME && attr.is_frozen() && !is_frozen {
                continue;
            }
            entries.push(DirEntry {
                name: name.clone(),
                ino,
                kind: attr.kind,
                attr: Some(attr.clone()),
            });
        }
        let end = existing.next().is_none();
        Some(DirPage {
            parent,
            entries,
            end,
        })
    }

    pub(crate) fn link_target(&self, ino: InodeId) -> Option<Vec<u8>> {
        self.inner.lock().inodes.get(&ino)?.link_target.clone()
    }

    pub(crate) fn rules(&self, ino: InodeId) -> Option<PlacementRules> {
        self.inner.lock().inodes.get(&ino)?.rules
    }

    /// Returns an extended attribute: a known value, `Some(None)` if it is known not to exist, or `None` if unknown.
    pub(crate) fn xattr(&self, ino: InodeId, name: &[u8]) -> Option<Option<Vec<u8>>> {
        let inner = self.inner.lock();
        let inode = inner.inodes.get(&ino)?;
        match inode.xattrs.get(name) {
            Some(value) => Some(value.clone()),
            None if inode.no_other_xattrs => Some(None),
            None => None,
        }
    }

    /// Forgets what a notice names. Must be called before any reply is used that was sent after the notice.
    pub(crate) fn obey(&self, notice: &Notice) {
        match notice {
            Notice::Invalidate {
                inodes, entries, ..
            } => self.invalidate(inodes, entries),
            Notice::InvalidateAll { .. } => self.invalidate_all(),
            Notice::Recall { .. } | Notice::Namenodes { .. } => {}
        }
    }

    /// Forgets what the namenode invalidated.
    pub(crate) fn invalidate(&self, inodes: &[InodeId], entries: &[(InodeId, Name)]) {
        let mut inner = self.inner.lock();
        for &ino in inodes {
            inner.happened(Subject::Inode(ino));
            inner.forget_inode(ino);
        }
        for (parent, name) in entries {
            inner.entry_happened(*parent, name);
            inner.forget_entry(*parent, name);
        }
    }

    /// Forgets everything.
    pub(crate) fn invalidate_all(&self) {
        self.inner.lock().forget_all();
    }
}

impl Inner {
    /// Returns the inode that a name leads to, if that is known.
    fn target(&self, parent: InodeId, name: &Name) -> Option<Option<InodeId>> {
        let directory = self.dirs.get(&parent)?;
        match directory.names.get(name) {
            Some(target) => Some(*target),
            // Listings omit the directory of snapshots.
            None if directory.complete && name.as_bytes() != SNAPSHOTS_NAME => Some(None),
            None => None,
        }
    }

    fn forget_all(&mut self) {
        self.overtake_all();
        self.inodes.clear();
        self.dirs.clear();
        self.clock.clear();
        self.entries = 0;
    }

    /// Keeps every reply in flight from being cached.
    fn overtake_all(&mut self) {
        self.now += 1;
        self.floor = self.now;
        self.events.clear();
    }

    /// Whether an answer that was requested at that moment may be cached.
    fn is_fresh(&self, at: u64, subject: &Subject) -> bool {
        !self.is_overtaken(at, subject) && !self.is_unsettled(subject)
    }

    /// Whether the subject was invalidated or changed since that moment. If not, an answer is as good as a new one.
    fn is_overtaken(&self, at: u64, subject: &Subject) -> bool {
        let is_after = |event: &u64| *event > at;
        (at < self.floor || self.events.get(subject).is_some_and(is_after))
            && !planted::is(Bug::CachesOvertakenAnswers)
    }

    fn happened(&mut self, subject: Subject) {
        self.now += 1;
        if self.tickets == 0 {
            return;
        }
        if self.events.len() >= EVENTS_MAX {
            self.events.clear();
            self.floor = self.now;
        } else {
            self.events.insert(subject, self.now);
        }
    }

    fn entry_happened(&mut self, parent: InodeId, name: &Name) {
        self.happened(Subject::Entry(parent, name.clone()));
        self.happened(Subject::Listing(parent));
    }

    fn inode_mut(&mut self, ino: InodeId) -> &mut Inode {
        if !self.inodes.contains_key(&ino) {
            self.make_room();
            self.inodes.insert(
                ino,
                Inode {
                    weight: 1,
                    ..Inode::default()
                },
            );
            self.entries += 1;
        }
        let inode = self.inodes.entry(ino).or_default();
        if !inode.in_clock {
            inode.in_clock = true;
            self.clock.push_back(ino);
        }
        inode
    }

    fn set_extents(&mut self, ino: InodeId, extents: Option<(u64, Arc<ExtentMap>)>) {
        let inode = self.inode_mut(ino);
        let units = extents
            .as_ref()
            .map_or(0, |(_, extents)| extents.len() / EXTENTS_PER_ENTRY);
        let before = std::mem::replace(&mut inode.weight, 1 + units);
        inode.extents = extents;
        self.left(before);
        self.entries += 1 + units;
    }

    fn directory_mut(&mut self, ino: InodeId) -> &mut Directory {
        // The clock contains inodes; a directory's entries are evicted with its inode.
        self.inode_mut(ino);
        self.dirs.entry(ino).or_default()
    }

    fn set_entry(&mut self, parent: InodeId, name: &Name, to: Option<InodeId>) {
        self.make_room();
        let directory = self.directory_mut(parent);
        if directory.complete && to.is_none() {
            if directory.names.remove(name).is_some() {
                self.left(1);
            }
        } else if directory.names.insert(name.clone(), to).is_none() {
            self.entries += 1;
        }
    }

    /// Sets all names of a directory together: if some of them were evicted meanwhile, they would
    /// seem not to exist.
    fn set_listing(
        &mut self,
        ino: InodeId,
        names: BTreeMap<Name, Option<InodeId>>,
        parent: Option<InodeId>,
    ) {
        self.remove_directory(ino);
        if names.len() >= self.entries_max {
            return;
        }
        self.entries += names.len();
        self.make_room();
        let directory = self.directory_mut(ino);
        assert!(
            directory.names.is_empty(),
            "{} names of {ino} are left of before",
            directory.names.len()
        );
        directory.names = names;
        directory.complete = true;
        directory.parent = parent;
    }

    fn forget_inode(&mut self, ino: InodeId) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            // The entry itself stays for the clock and for the directory's names.
            let (in_clock, used) = (inode.in_clock, inode.used);
            let before = inode.weight;
            *inode = Inode {
                in_clock,
                used,
                weight: 1,
                ..Inode::default()
            };
            self.left(before);
            self.entries += 1;
        }
        // It may have been moved.
        if let Some(directory) = self.dirs.get_mut(&ino) {
            directory.parent = None;
        }
    }

    fn forget_entry(&mut self, parent: InodeId, name: &Name) {
        if let Some(directory) = self.dirs.get_mut(&parent) {
            directory.complete = false;
            if directory.names.remove(name).is_some() {
                self.left(1);
            }
        }
    }

    fn remove_directory(&mut self, ino: InodeId) {
        if let Some(directory) = self.dirs.remove(&ino) {
            self.left(directory.names.len());
        }
    }

    /// Stops counting so many entries.
    fn left(&mut self, count: usize) {
        assert!(
            count <= self.entries,
            "{count} entries leave the cache, which has {}: {} inodes, {} directories",
            self.entries,
            self.inodes.len(),
            self.dirs.len()
        );
        self.entries -= count;
    }

    /// Evicts inodes that were not used recently until there is room. Bounded: each step either
    /// evicts one or takes its second chance away.
    fn make_room(&mut self) {
        while self.entries >= self.entries_max {
            let Some(ino) = self.clock.pop_front() else {
                // The clock contains everything that is cached.
                assert!(
                    self.entries == 0,
                    "{} entries cannot be evicted: {} inodes, {} directories",
                    self.entries,
                    self.inodes.len(),
                    self.dirs.len()
                );
                return;
            };
            let used_inode = self.inodes.get_mut(&ino).map(|inode| &mut inode.used);
            let used_dir = self.dirs.get_mut(&ino).map(|dir| &mut dir.used);
            let used = used_inode.into_iter().chain(used_dir);
            let chances = used.filter_map(|used| std::mem::take(used).then_some(()));
            if chances.count() > 0 {
                self.clock.push_back(ino);
                continue;
            }
            if let Some(inode) = self.inodes.remove(&ino) {
                self.left(inode.weight);
            }
            self.remove_directory(ino);
        }
    }
}
