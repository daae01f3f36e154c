//! Listing directories.

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::ENTRIES_PER_REPLY_MAX;
use harvestfs_protocol::meta::{MetaReply, query};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::Credentials;

use super::Session;
use crate::driver::clock;
use crate::engine::cache::DirPage;
use crate::engine::cache::listings::Listing;
use crate::engine::cache::permissions::{READ, permits};
use crate::error::ClientError;

impl Session {
    /// Lists a part of a directory, with attributes.
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
        let listing = match after {
            None => Some(Listing::begin(self.cache.ticket(), clock::now())),
            Some(after) => self.listings.lock().take(ino, after),
        };
        let ticket = self.cache.ticket();
        let op = query::ReadDir {
            ino,
            after: after.cloned(),
            // It fits: at most ENTRIES_PER_REPLY_MAX.
            max_entries: u32::try_from(max_entries).unwrap_or(1),
            // A caller that lists a directory usually needs the attributes of its entries next.
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
            listing.add(&entries);
            if end {
                listing.complete(ino, parent);
            } else {
                self.listings.lock().put(ino, listing, clock::now());
            }
        }
        Ok(DirPage {
            parent,
            entries,
            end,
        })
    }
}
