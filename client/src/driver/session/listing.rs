//! Listing directories, and learning from a complete listing which names do not exist.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::ENTRIES_PER_REPLY_MAX;
use harvestfs_protocol::meta::{DirEntry, MetaReply, query};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::Credentials;
use parking_lot::Mutex;

use super::Session;
use crate::driver::clock;
use crate::engine::cache::permissions::{READ, permits};
use crate::engine::cache::{DirPage, Ticket};
use crate::error::ClientError;

/// Listings in progress that are followed; the cache learns nothing from further ones.
const LISTINGS_MAX: usize = 16;
/// Entries of one listing that are remembered until it is complete.
const ENTRIES_MAX: usize = 65_536;
/// A listing that takes longer than this is not followed any more.
const LISTING_AGE_MAX: Duration = Duration::from_secs(20);

/// Listings that have not come to their end.
#[derive(Default)]
pub(crate) struct Listings {
    inner: Mutex<FxHashMap<InodeId, Listing>>,
}

struct Listing {
    /// From before its first page was asked for.
    ticket: Ticket,
    began: Instant,
    /// All entries so far, without attributes.
    entries: Vec<DirEntry>,
}

impl Listings {
    /// The listing that a page after `after` continues, or a new one.
    fn take(&self, session: &Session, ino: InodeId, after: Option<&Name>) -> Option<Listing> {
        let Some(after) = after else {
            return Some(Listing {
                ticket: session.cache.ticket(),
                began: clock::now(),
                entries: Vec::new(),
            });
        };
        let mut inner = self.inner.lock();
        let continues = |listing: &Listing| {
            listing
                .entries
                .last()
                .is_some_and(|last| last.name == *after)
        };
        inner.get(&ino).filter(|listing| continues(listing))?;
        inner.remove(&ino)
    }

    fn put(&self, ino: InodeId, listing: Listing) {
        let now = clock::now();
        let mut inner = self.inner.lock();
        inner.retain(|_, listing| now.saturating_duration_since(listing.began) < LISTING_AGE_MAX);
        if inner.len() < LISTINGS_MAX && listing.entries.len() < ENTRIES_MAX {
            inner.insert(ino, listing);
        }
    }
}

impl Session {
    /// A part of a directory, with attributes.
    pub(crate) async fn list(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        after: Option<&Name>,
        max_entries: usize,
    ) -> Result<DirPage, ClientError> {
        let max_entries = max_entries.clamp(1, ENTRIES_PER_REPLY_MAX);
        if let Some(cache) = self.valid_cache()
            && let Some(attr) = cache.attr(ino)
            && permits(&attr, credentials, READ)
            && let Some(page) = cache.listing(ino, after, max_entries)
        {
            return Ok(page);
        }
        let listing = self.listings.take(self, ino, after);
        let ticket = self.cache.ticket();
        let op = query::ReadDir {
            ino,
            after: after.cloned(),
            // It fits: at most ENTRIES_PER_REPLY_MAX.
            max_entries: u32::try_from(max_entries).unwrap_or(1),
            // A caller that lists a directory mostly looks at the attributes of its entries next.
            with_attributes: true,
        };
        let MetaReply::Entries {
            parent,
            entries,
            end,
        } = self.query(credentials, op).await?
        else {
            return Err(ClientError::UnexpectedReply(query::ReadDir::NAME));
        };
        ticket.learn_listing(ino, parent, &entries, false);
        if let Some(mut listing) = listing {
            let without_attributes = |entry: &DirEntry| DirEntry {
                attr: None,
                ..entry.clone()
            };
            listing
                .entries
                .extend(entries.iter().map(without_attributes));
            if end {
                listing
                    .ticket
                    .learn_listing(ino, parent, &listing.entries, true);
            } else {
                self.listings.put(ino, listing);
            }
        }
        Ok(DirPage {
            parent,
            entries,
            end,
        })
    }
}
