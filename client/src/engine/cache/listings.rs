//! Directory listings in progress: from a complete one the cache learns which names do not exist.

use std::time::{Duration, Instant};

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::DirEntry;
use harvestfs_protocol::name::Name;
use rustc_hash::FxHashMap;

use super::Ticket;

/// Maximum number of listings that are followed; the cache learns nothing from others.
const LISTINGS_MAX: usize = 16;
/// Maximum number of entries of one listing that are remembered until it is complete.
const ENTRIES_MAX: usize = 65_536;
/// A listing that takes longer than this is no longer followed.
const AGE_MAX: Duration = Duration::from_secs(20);

/// Incomplete listings, at most one per directory.
#[derive(Default)]
pub(crate) struct Listings {
    in_progress: FxHashMap<InodeId, Listing>,
}

/// The pages of a directory so far, from the first one on.
pub(crate) struct Listing {
    /// Taken before the first page was requested.
    ticket: Ticket,
    began: Instant,
    /// All entries so far, without attributes.
    entries: Vec<DirEntry>,
}

impl Listing {
    /// Begins a listing whose first page is about to be requested.
    pub(crate) fn begin(ticket: Ticket, now: Instant) -> Self {
        Self {
            ticket,
            began: now,
            entries: Vec::new(),
        }
    }

    /// Adds the next page.
    pub(crate) fn add(&mut self, entries: &[DirEntry]) {
        let without_attributes = |entry: &DirEntry| DirEntry {
            attr: None,
            ..entry.clone()
        };
        self.entries.extend(entries.iter().map(without_attributes));
    }

    /// Ends the listing after its last page.
    pub(crate) fn complete(self, directory: InodeId, parent: InodeId) {
        self.ticket
            .learn_listing(directory, parent, &self.entries, true);
    }
}

impl Listings {
    /// Takes the listing that a page after `after` continues. It is not in progress until it is put back.
    pub(crate) fn take(&mut self, directory: InodeId, after: &Name) -> Option<Listing> {
        let last = self.in_progress.get(&directory)?.entries.last()?;
        if last.name != *after {
            return None;
        }
        self.in_progress.remove(&directory)
    }

    /// Puts a listing back of which more pages are to come.
    pub(crate) fn put(&mut self, directory: InodeId, listing: Listing, now: Instant) {
        self.in_progress
            .retain(|_, listing| now.saturating_duration_since(listing.began) < AGE_MAX);
        if self.in_progress.len() < LISTINGS_MAX && listing.entries.len() < ENTRIES_MAX {
            self.in_progress.insert(directory, listing);
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::types::FileKind;

    use super::*;
    use crate::engine::cache::{Entry, MetaCache};
    use crate::testing::some_time;

    const DIR: InodeId = InodeId(1);

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    fn entry(text: &str) -> DirEntry {
        DirEntry {
            name: name(text),
            ino: InodeId(9),
            kind: FileKind::Regular,
            attr: None,
        }
    }

    /// Creates a listing of which one page was seen, with this entry.
    fn one_page(cache: &MetaCache, text: &str, now: Instant) -> Listing {
        let mut listing = Listing::begin(cache.ticket(), now);
        listing.add(&[entry(text)]);
        listing
    }

    #[test]
    fn only_a_listing_without_a_gap_says_which_names_are_not_there() {
        let cache = MetaCache::new(100);
        let now = some_time();
        let mut listings = Listings::default();
        listings.put(DIR, one_page(&cache, "b", now), now);
        assert!(listings.take(DIR, &name("a")).is_none());
        assert!(listings.take(InodeId(2), &name("b")).is_none());
        let mut listing = listings.take(DIR, &name("b")).unwrap();
        assert!(listings.take(DIR, &name("b")).is_none(), "it is taken");
        listing.add(&[entry("c")]);
        assert_eq!(cache.entry(DIR, &name("d")), None);
        listing.complete(DIR, DIR);
        assert_eq!(cache.entry(DIR, &name("d")), Some(Entry::Absent));
    }

    #[test]
    fn what_changes_between_two_pages_is_not_taken_for_absent() {
        let cache = MetaCache::new(100);
        let listing = one_page(&cache, "b", some_time());
        cache.invalidate(&[], &[(DIR, name("a"))]);
        listing.complete(DIR, DIR);
        assert_eq!(cache.entry(DIR, &name("a")), None);
    }

    #[test]
    fn old_listings_make_room_and_further_ones_are_not_followed() {
        let cache = MetaCache::new(100);
        let began = some_time();
        let mut listings = Listings::default();
        for number in 0..LISTINGS_MAX as u64 {
            listings.put(InodeId(number), one_page(&cache, "a", began), began);
        }
        let further = InodeId(100);
        listings.put(further, one_page(&cache, "a", began), began);
        assert!(listings.take(further, &name("a")).is_none());
        let later = began + AGE_MAX;
        listings.put(further, one_page(&cache, "a", later), later);
        assert!(listings.take(further, &name("a")).is_some());
        assert!(listings.take(InodeId(0), &name("a")).is_none());
    }
}
