//! Directory listings, for programs.

use std::collections::VecDeque;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::ENTRIES_PER_REPLY_MAX;
use harvestfs_protocol::meta::DirEntry;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials, FileKind};

use crate::api::client::Client;
use crate::error::ClientError;

impl Client {
    /// Lists a directory in name order. Entries that are added or removed meanwhile may or may not
    /// be included.
    #[must_use]
    pub fn entries(&self, credentials: &Credentials, directory: InodeId) -> Entries {
        Entries {
            client: self.clone(),
            credentials: credentials.clone(),
            directory,
            page: VecDeque::new(),
            after: None,
            end: false,
        }
    }

    /// Visits an inode and everything below it, directories before their contents, in name order.
    /// Entries that are added or removed meanwhile may or may not be included.
    #[must_use]
    pub fn walk(&self, credentials: &Credentials, start: InodeId) -> Walk {
        Walk {
            client: self.clone(),
            credentials: credentials.clone(),
            start: Some(start),
            levels: Vec::new(),
        }
    }
}

/// The entries of a directory; see [`Client::entries`]. Keeps one page of them.
#[derive(Debug)]
pub struct Entries {
    client: Client,
    credentials: Credentials,
    directory: InodeId,
    page: VecDeque<DirEntry>,
    /// The last name of the last page.
    after: Option<Name>,
    end: bool,
}

impl Entries {
    /// Returns the next entry with its attributes, or `None` at the end. After an error the listing
    /// continues behind the entry that failed.
    ///
    /// # Errors
    /// As [`Client::readdir`] and [`Client::getattr`].
    pub async fn next(&mut self) -> Result<Option<(Name, Attr)>, ClientError> {
        loop {
            while self.page.is_empty() && !self.end {
                self.turn().await?;
            }
            let Some(entry) = self.page.pop_front() else {
                return Ok(None);
            };
            let attr = match entry.attr {
                Some(attr) => Ok(attr),
                None => self.client.getattr(&self.credentials, entry.ino).await,
            };
            match attr {
                // It was removed meanwhile.
                Err(error) if error.is_gone() => {}
                attr => return Ok(Some((entry.name, attr?))),
            }
        }
    }

    /// Fetches the next page. A directory that cannot be listed has no more pages.
    async fn turn(&mut self) -> Result<(), ClientError> {
        let (after, most) = (self.after.as_ref(), ENTRIES_PER_REPLY_MAX);
        let listed = self
            .client
            .readdir(&self.credentials, self.directory, after, most, true)
            .await
            .inspect_err(|_| self.end = true)?;
        self.after = listed.entries.last().map(|last| last.name.clone());
        self.end = listed.end || listed.entries.is_empty();
        self.page = listed.entries.into();
        Ok(())
    }
}

/// An entry that [`Walk::next`] returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalkEntry {
    /// Path below the start, `/`-separated; empty for the start itself.
    pub path: Vec<u8>,
    /// Its attributes.
    pub attr: Attr,
}

/// A walk over a tree; see [`Client::walk`]. Keeps one page of each directory on the path to its
/// current position.
#[derive(Debug)]
pub struct Walk {
    client: Client,
    credentials: Credentials,
    start: Option<InodeId>,
    levels: Vec<Level>,
}

/// A directory that is being listed.
#[derive(Debug)]
struct Level {
    path: Vec<u8>,
    entries: Entries,
}

impl Walk {
    /// Returns the next entry, or `None` at the end. After an error the walk continues behind the entry that failed.
    ///
    /// # Errors
    /// As [`Client::readdir`] and [`Client::getattr`].
    pub async fn next(&mut self) -> Result<Option<WalkEntry>, ClientError> {
        if let Some(start) = self.start.take() {
            let attr = self.client.getattr(&self.credentials, start).await?;
            return Ok(Some(self.visit(Vec::new(), attr)));
        }
        while let Some(level) = self.levels.last_mut() {
            let found = match level.entries.next().await {
                // It was removed after the directory above listed it.
                Err(error) if !level.path.is_empty() && error.is_gone() => None,
                found => found?,
            };
            let Some((name, attr)) = found else {
                self.levels.pop();
                continue;
            };
            let mut path = level.path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.as_bytes());
            return Ok(Some(self.visit(path, attr)));
        }
        Ok(None)
    }

    fn visit(&mut self, path: Vec<u8>, attr: Attr) -> WalkEntry {
        if attr.kind == FileKind::Directory {
            self.levels.push(Level {
                path: path.clone(),
                entries: self.client.entries(&self.credentials, attr.ino),
            });
        }
        WalkEntry { path, attr }
    }
}
