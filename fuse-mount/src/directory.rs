//! An open directory: turns the kernel's numeric offsets into names to go on after.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use fuser::{FileAttr, FileType, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use harvestfs_client::ClientError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::ENTRIES_PER_REPLY_MAX;
use harvestfs_protocol::meta::DirEntry;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials, FileKind, Timestamp};
use tokio::sync::{Mutex, MutexGuard};

use crate::convert;
use crate::inner::Inner;
use crate::reply::GENERATION;

/// Entries are counted from here; `.` and `..` come first.
const FIRST_ENTRY_OFFSET: u64 = 2;

/// An open directory, with the window of entries that the kernel reads now.
#[derive(Debug)]
pub struct OpenDirectory {
    ino: InodeId,
    window: Mutex<Window>,
}

/// Consecutive entries. Entries that others add or remove before it shift no offsets: it goes on
/// by name.
#[derive(Debug, Default)]
struct Window {
    /// The directory's parent.
    parent: Option<InodeId>,
    /// Offset of the first entry.
    start: u64,
    entries: Vec<DirEntry>,
    /// No entry follows.
    end: bool,
    /// The count of invalidations before it was asked for; none: nothing was read yet.
    asked_at: Option<u64>,
}

impl OpenDirectory {
    /// Nothing is read yet.
    pub fn new(ino: InodeId) -> Self {
        Self {
            ino,
            window: Mutex::new(Window::default()),
        }
    }

    /// Fills an answer with names from `offset` on.
    pub async fn fill(
        &self,
        inner: &Inner,
        credentials: &Credentials,
        offset: u64,
        reply: &mut ReplyDirectory,
    ) -> Result<(), ClientError> {
        let (window, _) = self.window_at(inner, credentials, offset).await?;
        for (next, name, ino) in self.dots(&window, offset) {
            if reply.add(INodeNo(ino.0), next, FileType::Directory, name) {
                return Ok(());
            }
        }
        for (next, entry) in window.entries_from(offset) {
            let name = OsStr::from_bytes(entry.name.as_bytes());
            let kind = convert::file_type(entry.kind);
            if reply.add(INodeNo(entry.ino.0), next, kind, name) {
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
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<(), ClientError> {
        let (window, asked_at) = self.window_at(inner, credentials, offset).await?;
        for (next, name, ino) in self.dots(&window, offset) {
            // The kernel does not take these two for lookups.
            let attr = convert::attributes(&bare_directory(ino));
            let ttl = Duration::ZERO;
            if reply.add(INodeNo(ino.0), next, name, &ttl, &attr, GENERATION) {
                return Ok(());
            }
        }
        for (next, entry) in window.entries_from(offset) {
            let name = OsStr::from_bytes(entry.name.as_bytes());
            // What the window has may be older than what this mount changed since.
            let attr = inner.client.try_getattr(entry.ino);
            let pages = inner.shared.nodes.pages(entry.ino);
            let may_tell = |attr: &Attr| {
                pages.is_none_or(|pages| pages.may_tell(attr.size_bytes, Instant::now()))
            };
            let Some(attr) = attr.filter(may_tell) else {
                // Node id 0: the name only.
                let attr = FileAttr {
                    ino: INodeNo(0),
                    kind: convert::file_type(entry.kind),
                    ..convert::attributes(&bare_directory(entry.ino))
                };
                let ttl = Duration::ZERO;
                if reply.add(INodeNo(entry.ino.0), next, name, &ttl, &attr, GENERATION) {
                    break;
                }
                continue;
            };
            // One time to live serves both, and entries have the shorter one.
            let ttl = inner.shared.entry_ttl(inner.remember(&attr, asked_at));
            let told = convert::attributes(&attr);
            if reply.add(INodeNo(attr.ino.0), next, name, &ttl, &told, GENERATION) {
                // It did not fit, so the kernel never hears of this lookup.
                inner.shared.nodes.forget(attr.ino, 1);
                break;
            }
        }
        Ok(())
    }

    /// `.` and `..`, each with the offset to go on at after it.
    fn dots(
        &self,
        window: &Window,
        offset: u64,
    ) -> impl Iterator<Item = (u64, &'static str, InodeId)> {
        let parent = window.parent.unwrap_or(self.ino);
        [(1, ".", self.ino), (2, "..", parent)]
            .into_iter()
            .filter(move |(next, ..)| *next > offset)
    }

    /// The window, moved so that it holds the entry at `offset`, unless the directory ends before;
    /// and when it was asked for, which may have been on behalf of an earlier request.
    async fn window_at(
        &self,
        inner: &Inner,
        credentials: &Credentials,
        offset: u64,
    ) -> Result<(MutexGuard<'_, Window>, u64), ClientError> {
        let mut window = self.window.lock().await;
        let offset = offset.max(FIRST_ENTRY_OFFSET);
        let mut asked_at = match window.asked_at {
            Some(asked_at) if offset >= window.start && offset != FIRST_ENTRY_OFFSET => asked_at,
            // A new reading, or `rewinddir` or `seekdir`: what changed meanwhile is to be seen.
            _ => {
                self.load(&mut window, inner, credentials, FIRST_ENTRY_OFFSET, None)
                    .await?
            }
        };
        while !window.end && offset >= window.start + window.entries.len() as u64 {
            let start = window.start + window.entries.len() as u64;
            let after = window.entries.last().map(|entry| entry.name.clone());
            asked_at = self
                .load(&mut window, inner, credentials, start, after)
                .await?;
        }
        Ok((window, asked_at))
    }

    async fn load(
        &self,
        window: &mut Window,
        inner: &Inner,
        credentials: &Credentials,
        start: u64,
        after: Option<Name>,
    ) -> Result<u64, ClientError> {
        let asked_at = inner.shared.invalidations.count();
        let after = after.as_ref();
        let page = inner
            .client
            .readdir(credentials, self.ino, after, ENTRIES_PER_REPLY_MAX, true)
            .await?;
        *window = Window {
            parent: Some(page.parent),
            start,
            // A page without entries that is not the end would be asked for for ever.
            end: page.end || page.entries.is_empty(),
            entries: page.entries,
            asked_at: Some(asked_at),
        };
        Ok(asked_at)
    }
}

impl Window {
    /// The entries from `offset` on, each with the offset to go on at after it.
    fn entries_from(&self, offset: u64) -> impl Iterator<Item = (u64, &DirEntry)> {
        let offset = offset.max(FIRST_ENTRY_OFFSET);
        let skip = offset.saturating_sub(self.start) as usize;
        self.entries
            .iter()
            .enumerate()
            .skip(skip)
            .map(|(index, entry)| (self.start + index as u64 + 1, entry))
    }
}

/// The kernel looks at type and number of `.` and `..` only.
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
