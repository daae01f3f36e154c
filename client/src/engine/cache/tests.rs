use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::types::{Extent, FileKind, MODE_FROZEN, Timestamp};
use proptest::prelude::*;

use super::*;

const DIR: InodeId = InodeId(1);

fn attr(ino: u64, version: u64) -> Attr {
    Attr {
        ino: InodeId(ino),
        kind: FileKind::Regular,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        size_bytes: 0,
        allocated_bytes: 0,
        atime: Timestamp(0),
        mtime: Timestamp(0),
        ctime: Timestamp(0),
        content_version: version,
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn complete_directory(cache: &MetaCache) {
    let directory = Attr {
        kind: FileKind::Directory,
        ..attr(DIR.0, 0)
    };
    cache.ticket().created(&directory, None, DIR);
}

#[test]
fn a_reply_that_was_overtaken_is_not_cached() {
    let cache = MetaCache::new(100);
    let early = cache.ticket();
    cache.invalidate(&[InodeId(5)], &[(DIR, name("a"))]);
    early.learn_attr(&attr(5, 1));
    early.learn_entry(DIR, &name("a"), Some(&attr(5, 1)));
    early.learn_attr(&attr(6, 1));
    assert_eq!(cache.attr(InodeId(5)), None);
    assert_eq!(cache.entry(DIR, &name("a")), None);
    assert!(cache.attr(InodeId(6)).is_some());
    let late = cache.ticket();
    late.learn_attr(&attr(5, 2));
    assert_eq!(cache.attr(InodeId(5)), Some(attr(5, 2)));
    cache.invalidate_all();
    late.learn_attr(&attr(5, 2));
    assert_eq!(cache.attr(InodeId(5)), None);
}

#[test]
fn of_two_changes_at_once_neither_is_believed() {
    let cache = MetaCache::new(100);
    let (first, second) = (cache.ticket(), cache.ticket());
    second.changed_attr(&attr(5, 2));
    assert!(cache.attr(InodeId(5)).is_some());
    first.changed_attr(&attr(5, 1));
    assert_eq!(cache.attr(InodeId(5)), None);
}

#[test]
fn a_complete_directory_knows_what_it_does_not_have() {
    let cache = MetaCache::new(100);
    assert_eq!(cache.entry(DIR, &name("a")), None);
    complete_directory(&cache);
    assert_eq!(cache.entry(DIR, &name("a")), Some(Entry::Absent));
    let ticket = cache.ticket();
    ticket.created(&attr(5, 0), None, DIR);
    ticket.changed_entry(DIR, &name("a"), Some(InodeId(5)));
    assert_eq!(cache.entry(DIR, &name("a")), Some(Entry::Found(attr(5, 0))));
    let page = cache.listing(DIR, None, 10).unwrap();
    assert_eq!((page.entries.len(), page.end), (1, true));
    // Another session changes one name: the others may have changed too.
    cache.invalidate(&[], &[(DIR, name("b"))]);
    assert_eq!(cache.entry(DIR, &name("b")), None);
    assert_eq!(cache.entry(DIR, &name("a")), Some(Entry::Found(attr(5, 0))));
    assert_eq!(cache.listing(DIR, None, 10), None);
}

#[test]
fn a_listing_leaves_the_snapshots_out_also_when_they_were_looked_up() {
    let cache = MetaCache::new(100);
    complete_directory(&cache);
    let snapshots = Attr {
        mode: 0o755 | MODE_FROZEN,
        ..attr(5, 0)
    };
    let found = Name::new(SNAPSHOTS_NAME).unwrap();
    cache.ticket().learn_entry(DIR, &found, Some(&snapshots));
    cache
        .ticket()
        .learn_entry(DIR, &name("a"), Some(&attr(6, 0)));
    let page = cache.listing(DIR, None, 10).unwrap();
    let names: Vec<_> = page
        .entries
        .iter()
        .map(|entry| entry.name.clone())
        .collect();
    assert_eq!((names, page.end), (vec![name("a")], true));
    assert_eq!(cache.entry(DIR, &found), Some(Entry::Found(snapshots)));
}

#[test]
fn a_listing_that_was_overtaken_is_not_complete() {
    let cache = MetaCache::new(100);
    let ticket = cache.ticket();
    let other = cache.ticket();
    other.changed_entry(DIR, &name("new"), Some(InodeId(9)));
    ticket.learn_listing(DIR, DIR, &[], true);
    assert_eq!(cache.entry(DIR, &name("old")), None);
    assert_eq!(
        cache.entry(DIR, &name("new")),
        Some(Entry::FoundInode(InodeId(9)))
    );
}

#[test]
fn a_commit_adds_to_the_extents_that_are_cached() {
    let cache = MetaCache::new(100);
    cache.ticket().created(&attr(5, 0), None, DIR);
    let extent = Extent {
        file_offset: 0,
        length_bytes: 10,
        block: BlockId(1),
        block_offset: 0,
    };
    cache.ticket().committed(&attr(5, 1), &[extent]);
    let (found, extents) = cache.content(InodeId(5)).unwrap();
    assert_eq!((found.content_version, extents.len()), (1, 1));
}

proptest! {
    #[test]
    fn stays_within_its_bounds(ops in prop::collection::vec((0u8..6, 0u64..200, 0u64..50), 1..400)) {
        let cache = MetaCache::new(40);
        complete_directory(&cache);
        for (op, ino, text) in ops {
            let ticket = cache.ticket();
            let text = name(&format!("name-{text}"));
            let parent = InodeId(ino % 5);
            match op {
                0 => {
                    ticket.learn_attr(&attr(ino, 0));
                }
                1 => ticket.learn_entry(parent, &text, Some(&attr(ino, 0))),
                2 => ticket.learn_entry(parent, &text, None),
                3 => ticket.changed_entry(parent, &text, None),
                4 => cache.invalidate(&[InodeId(ino)], &[(parent, text)]),
                _ => ticket.learn_content(&attr(ino, 0), &Arc::default()),
            }
            drop(ticket);
            let inner = cache.inner.lock();
            let inodes: usize = inner.inodes.values().map(|inode| inode.weight).sum();
            let names: usize = inner.dirs.values().map(|directory| directory.names.len()).sum();
            prop_assert_eq!(inner.entries, inodes + names);
            prop_assert!(inner.entries <= 44);
            prop_assert!(inner.events.is_empty());
            prop_assert!(inner.clock.len() <= inner.inodes.len() + 1);
        }
    }
}

/// Otherwise the evicted names would seem not to exist.
#[test]
fn a_directory_that_is_evicted_while_its_listing_is_learned_is_not_complete() {
    let entry = |number: u64| DirEntry {
        name: name(&format!("{number}")),
        ino: InodeId(100 + number),
        kind: FileKind::Regular,
        attr: None,
    };
    let entries: Vec<DirEntry> = (0..30).map(entry).collect();
    for known in 0..40 {
        let cache = MetaCache::new(40);
        cache.ticket().learn_attr(&attr(DIR.0, 0));
        for other in 0..known {
            cache.ticket().learn_attr(&attr(1_000 + other, 0));
        }
        cache.ticket().learn_listing(DIR, DIR, &entries, true);
        for entry in &entries {
            let found = cache.entry(DIR, &entry.name);
            assert_ne!(found, Some(Entry::Absent), "{known} {entry:?}");
        }
    }
}

fn unlinks(text: &str) -> Scope {
    Scope {
        inodes: Vec::new(),
        changes_content: false,
        entries: vec![(DIR, name(text))],
        changes_targets: true,
    }
}

#[test]
fn nothing_is_learned_that_an_unsettled_mutation_may_change() {
    let cache = MetaCache::new(100);
    complete_directory(&cache);
    for (text, ino) in [("a", 5), ("b", 6)] {
        cache
            .ticket()
            .changed_entry(DIR, &name(text), Some(InodeId(ino)));
        cache.ticket().changed_attr(&attr(ino, 1));
    }
    let first = cache.unsettled(&unlinks("a"));
    let second = cache.unsettled(&unlinks("a"));
    assert!(!first.may_be_any());
    assert!(second.may_be_any(), "the name is not known any more");
    assert_eq!(cache.attr(InodeId(5)), None);
    assert_eq!(cache.entry(DIR, &name("a")), None);
    let asked = cache.ticket();
    let learn = |ticket: &Ticket| {
        ticket.learn_entry(DIR, &name("a"), Some(&attr(5, 1)));
        assert!(ticket.learn_attr(&attr(6, 2)) || !cache.is_unsettled());
    };
    learn(&asked);
    drop(first);
    learn(&cache.ticket());
    assert!(cache.is_unsettled());
    assert_eq!(cache.attr(InodeId(6)), None);
    drop(second);
    // It was requested before the mutation was settled.
    learn(&asked);
    assert!(!cache.is_unsettled());
    assert_eq!(cache.attr(InodeId(5)), None);
    assert_eq!(cache.entry(DIR, &name("a")), None);
    learn(&cache.ticket());
    assert!(cache.attr(InodeId(6)).is_some() && cache.entry(DIR, &name("a")).is_some());
}

#[test]
fn what_else_is_known_stays_while_a_mutation_is_unsettled() {
    let cache = MetaCache::new(100);
    complete_directory(&cache);
    cache
        .ticket()
        .changed_entry(DIR, &name("a"), Some(InodeId(5)));
    cache.ticket().changed_attr(&attr(6, 1));
    drop(cache.unsettled(&unlinks("a")));
    assert!(cache.attr(InodeId(6)).is_some());
    assert!(cache.attr(InodeId(5)).is_none());
}

#[test]
fn the_inodes_that_an_unsettled_mutation_may_change_are_told_from_others() {
    let cache = MetaCache::new(100);
    let truncates = |ino| Scope {
        inodes: vec![InodeId(ino)],
        changes_content: true,
        entries: Vec::new(),
        changes_targets: false,
    };
    let are_unsettled = || [5, 6].map(|ino| cache.is_inode_unsettled(InodeId(ino)));
    let first = cache.unsettled(&truncates(5));
    assert!(cache.is_unsettled());
    assert_eq!(are_unsettled(), [true, false]);
    // This covers whatever the name leads to by then.
    let second = cache.unsettled(&unlinks("a"));
    assert_eq!(are_unsettled(), [true, true]);
    drop(second);
    assert_eq!(are_unsettled(), [true, false]);
    drop(first);
    assert_eq!(are_unsettled(), [false, false]);
    assert!(!cache.is_unsettled());
    // It changes nothing that is cached.
    let nothing = cache.unsettled(&Scope {
        inodes: Vec::new(),
        ..truncates(5)
    });
    assert!(!cache.is_unsettled());
    drop(nothing);
}

#[test]
fn what_is_asked_for_waits_for_unsettled_mutations_of_the_same() {
    let cache = MetaCache::new(100);
    complete_directory(&cache);
    cache
        .ticket()
        .changed_entry(DIR, &name("a"), Some(InodeId(5)));
    let changes = |ino, changes_content| Scope {
        inodes: vec![InodeId(ino)],
        changes_content,
        entries: Vec::new(),
        changes_targets: false,
    };
    let truncated = cache.unsettled(&changes(5, true));
    let renamed = cache.unsettled(&changes(6, false));
    let removed = cache.unsettled(&unlinks("a"));
    let waits = |scope: &Scope| cache.is_any_unsettled(scope);
    assert!(waits(&changes(5, false)) && waits(&changes(6, false)));
    assert!(waits(&unlinks("a")));
    assert!(!waits(&changes(7, true)) && !waits(&unlinks("b")));
    // Commits change no names, and their attributes do not count either.
    let commits = || [5, 6].map(|ino| cache.is_content_unsettled(InodeId(ino)));
    assert_eq!(commits(), [true, false]);
    drop((truncated, renamed, removed));
    assert_eq!(commits(), [false, false]);
    assert!(!waits(&changes(5, true)) && !waits(&unlinks("a")));
}

/// The new parent is not known when the mutation is settled.
#[test]
fn the_directory_above_one_that_may_have_been_moved_is_forgotten() {
    let cache = MetaCache::new(100);
    complete_directory(&cache);
    let moved = Attr {
        kind: FileKind::Directory,
        ..attr(5, 0)
    };
    cache.ticket().created(&moved, None, DIR);
    cache
        .ticket()
        .changed_entry(DIR, &name("a"), Some(moved.ino));
    assert!(cache.listing(moved.ino, None, 10).is_some());
    drop(cache.unsettled(&unlinks("a")));
    cache.ticket().learn_attr(&moved);
    assert_eq!(cache.listing(moved.ino, None, 10), None);
}
