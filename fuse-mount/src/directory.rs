//! An open directory: translates the kernel's numeric offsets into names to continue after.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use fuser::{FileAttr, FileType, INodeNo};
use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::ENTRIES_PER_REPLY_MAX;
use harvestfs_protocol::meta::DirEntry;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials, FileKind, Timestamp};
use tokio::sync::{MappedMutexGuard, Mutex, MutexGuard};

use crate::inner::Inner;
use crate::reply::{EntriesReply, Entry, NamesReply};
use crate::{convert, now};

/// The offset of the first entry; `.` and `..` come before it.
const FIRST_ENTRY_OFFSET: u64 = 2;

/// An open directory, with the window of entries that the kernel is reading.
#[derive(Debug)]
pub struct OpenDirectory {
    ino: InodeId,
    /// `None` if nothing was read yet.
    window: Mutex<Option<Window>>,
}

/// Consecutive entries. Entries that others add or remove before the window do not shift offsets: reading continues by
/// name.
#[derive(Debug)]
struct Window {
    /// The directory's parent.
    parent: InodeId,
    /// Offset of the first entry.
    start: u64,
    entries: Vec<DirEntry>,
    /// Whether no entry follows.
    end: bool,
    /// The count of invalidations before the window was requested, possibly on behalf of an earlier request.
    asked_at: u64,
}

impl OpenDirectory {
    /// Opens a directory; nothing is read yet.
    pub fn new(ino: InodeId) -> Self {
        Self {
            ino,
            window: Mutex::new(None),
        }
    }

    /// Fills an answer with names from `offset` on.
    pub async fn fill(
        &self,
        inner: &Inner,
        credentials: &Credentials,
        offset: u64,
        reply: &mut impl NamesReply,
    ) -> Result<(), ClientError> {
        let window = self.window_at(inner, credentials, offset).await?;
        for (next, name, ino) in self.dots(&window, offset) {
            if reply.add(ino.0, next, FileType::Directory, OsStr::new(name)) {
                return Ok(());
            }
        }
        for (next, entry) in window.entries_from(offset) {
            let name = OsStr::from_bytes(entry.name.as_bytes());
            let kind = convert::file_type(entry.kind);
            if reply.add(entry.ino.0, next, kind, name) {
                break;
            }
        }
        Ok(())
    }

    /// Fills an answer with names and attributes from `offset` on; each counts as a lookup.
    pub async fn fill_plus(
        &self,
        inner: &Inner,
        credentials: &Credentials,
        offset: u64,
        reply: &mut impl EntriesReply,
    ) -> Result<(), ClientError> {
        let window = self.window_at(inner, credentials, offset).await?;
        for (next, name, ino) in self.dots(&window, offset) {
            // The kernel does not count these two as lookups.
            let attr = convert::attributes(&bare_directory(ino));
            if reply.add(next, OsStr::new(name), &uncached(attr)) {
                return Ok(());
            }
        }
        let mut is_first = true;
        for (next, entry) in window.entries_from(offset) {
            let name = OsStr::from_bytes(entry.name.as_bytes());
            // Attributes and names in the window may be older than changes that this mount has made since.
            let is_elsewhere = inner
                .client
                .leads_elsewhere(self.ino, &entry.name, entry.ino);
            let attr = match is_elsewhere {
                true => None,
                false => inner.client.try_getattr(entry.ino),
            };
            let pages = inner.shared.nodes.pages(entry.ino);
            let may_tell =
                |attr: &Attr| pages.is_none_or(|pages| pages.may_tell(attr.size_bytes, now()));
            let attr = match attr.filter(may_tell) {
                Some(attr) => Some((attr, true)),
                // An answer that waits and is given up would lose the lookups before it. The kernel asks again from
                // this entry on.
                None if !is_first => break,
                None => {
                    self.settled(inner, credentials, entry, is_elsewhere)
                        .await?
                }
            };
            is_first = false;
            let Some((attr, is_settled)) = attr else {
                // It was removed in the meantime. Programs do not see a name with inode number 0.
                let attr = FileAttr {
                    ino: INodeNo(0),
                    kind: convert::file_type(entry.kind),
                    ..convert::attributes(&bare_directory(entry.ino))
                };
                if reply.add(next, name, &uncached(attr)) {
                    break;
                }
                continue;
            };
            // One time to live serves both, and entries have the shorter one.
            let attr_ttl = inner.remember(&attr, window.asked_at);
            let ttl = match is_settled {
                true => inner.shared.entry_ttl(attr_ttl),
                false => Duration::ZERO,
            };
            let told = Entry {
                attr: convert::attributes(&attr),
                attr_ttl: ttl,
                entry_ttl: ttl,
            };
            if reply.add(next, name, &told) {
                // It did not fit, so the kernel never learns of this lookup.
                inner.shared.nodes.forget(attr.ino, 1);
                break;
            }
        }
        Ok(())
    }

    /// Attributes of an entry that may be sent to the kernel, and whether they are the file's actual ones; see
    /// [`Shared::settle`]. `None` if the name no longer exists.
    ///
    /// [`Shared::settle`]: crate::shared::Shared::settle
    async fn settled(
        &self,
        inner: &Inner,
        credentials: &Credentials,
        entry: &DirEntry,
        is_elsewhere: bool,
    ) -> Result<Option<(Attr, bool)>, ClientError> {
        let client = &inner.client;
        let mut found = match is_elsewhere {
            true => Err(FsError::Stale.into()),
            false => client.getattr(credentials, entry.ino).await,
        };
        if found.as_ref().is_err_and(ClientError::is_gone) {
            // If another file replaced it, the name existed all the time, and no program may miss it.
            found = client.lookup(credentials, self.ino, &entry.name).await;
            // Without the permission to look up names, this cannot be determined.
            if let Err(ClientError::Fs(FsError::NotFound | FsError::PermissionDenied)) = found {
                return Ok(None);
            }
        }
        let mut attr = found?;
        let is_settled = inner.shared.settle(&mut attr).await;
        Ok(Some((attr, is_settled)))
    }

    /// `.` and `..`, each with the offset at which to continue after it.
    fn dots(
        &self,
        window: &Window,
        offset: u64,
    ) -> impl Iterator<Item = (u64, &'static str, InodeId)> {
        [(1, ".", self.ino), (2, "..", window.parent)]
            .into_iter()
            .filter(move |(next, ..)| *next > offset)
    }

    /// The window, moved so that it holds the entry at `offset`, unless the directory ends before.
    async fn window_at(
        &self,
        inner: &Inner,
        credentials: &Credentials,
        offset: u64,
    ) -> Result<MappedMutexGuard<'_, Window>, ClientError> {
        let mut guard = self.window.lock().await;
        let offset = offset.max(FIRST_ENTRY_OFFSET);
        let window = match &mut *guard {
            Some(window) if offset >= window.start && offset != FIRST_ENTRY_OFFSET => window,
            // The directory is read from the start, or after `rewinddir` or `seekdir`: changes made in the meantime
            // have to be visible.
            outdated => {
                let first = self.load(inner, credentials, FIRST_ENTRY_OFFSET, None);
                outdated.insert(first.await?)
            }
        };
        while !window.end && offset >= window.next_start() {
            let start = window.next_start();
            let after = window.entries.last().map(|entry| entry.name.clone());
            *window = self.load(inner, credentials, start, after).await?;
        }
        Ok(MutexGuard::map(guard, |window| {
            window.as_mut().expect("it was read above")
        }))
    }

    async fn load(
        &self,
        inner: &Inner,
        credentials: &Credentials,
        start: u64,
        after: Option<Name>,
    ) -> Result<Window, ClientError> {
        let asked_at = inner.shared.invalidations.count();
        let after = after.as_ref();
        let page = inner
            .client
            .readdir(credentials, self.ino, after, ENTRIES_PER_REPLY_MAX, true)
            .await?;
        Ok(Window {
            parent: page.parent,
            start,
            // A page without entries that is not the last would be requested forever.
            end: page.end || page.entries.is_empty(),
            entries: page.entries,
            asked_at,
        })
    }
}

impl Window {
    /// The offset of the first entry after the window.
    fn next_start(&self) -> u64 {
        self.start + self.entries.len() as u64
    }

    /// The entries from `offset` on, each with the offset at which to continue after it.
    fn entries_from(&self, offset: u64) -> impl Iterator<Item = (u64, &DirEntry)> {
        let offset = offset.max(FIRST_ENTRY_OFFSET);
        assert!(
            offset >= self.start,
            "entries from {offset} on are asked of a window that starts at {}",
            self.start
        );
        let skip = (offset - self.start) as usize;
        self.entries
            .iter()
            .enumerate()
            .skip(skip)
            .map(|(index, entry)| (self.start + index as u64 + 1, entry))
    }
}

/// An entry of which the kernel caches nothing.
fn uncached(attr: FileAttr) -> Entry {
    Entry {
        attr,
        attr_ttl: Duration::ZERO,
        entry_ttl: Duration::ZERO,
    }
}

/// Attributes for `.` and `..`, of which the kernel uses only type and number.
pub fn bare_directory(ino: InodeId) -> Attr {
    Attr {
        ino,
        kind: FileKind::Directory,
        mode: 0,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: 0,
        size_bytes: 0,
        allocated_bytes: 0,
        atime: Timestamp(0),
        mtime: Timestamp(0),
        ctime: Timestamp(0),
        content_version: 0,
    }
}
