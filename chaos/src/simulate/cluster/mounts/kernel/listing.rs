//! Listings: `readdir(3)`, with attributes or without (`fs/fuse/readdir.c`).

use std::ffi::OsStr;

use fuser::{Errno as FuseErrno, FileHandle, FileType};
use harvestfs_fuse_mount::reply::{EntriesReply, Entry, NamesReply, Reply};
use harvestfs_protocol::ids::InodeId;
use rand::RngExt;
use rustix::fs::OFlags;
use rustix::io::Errno;
use tokio::time::Instant;

use super::{Dentry, Fd, Thread};

/// The size in bytes of one page of a listing.
const LISTING_BYTES: usize = 4096;
/// The bytes that an entry takes in addition to its name, without and with attributes.
const NAME_BYTES: usize = 24;
const ENTRY_BYTES: usize = 152;

impl Thread {
    /// The names in a directory, sorted: opens the directory and calls `readdir(3)`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn list(&self, path: &str) -> Result<Vec<String>, Errno> {
        let fd = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY).await?;
        let listed = self.list_open(&fd).await;
        let handle = fd.handle;
        self.kernel.put(fd.ino);
        self.kernel
            .ask::<()>(|adapter, to| adapter.releasedir(handle, to))
            .await?;
        listed
    }

    async fn list_open(&self, fd: &Fd) -> Result<Vec<String>, Errno> {
        let lock = self.kernel.inode_lock(fd.ino)?;
        let (mut names, mut offset) = (Vec::new(), 0);
        loop {
            let _locked = lock.read().await;
            // `fuse_use_readdirplus`: always at first, later only if entries were looked up since, which is drawn here.
            let plus = offset == 0 || self.kernel.state.lock().rng.random_range(0..2) == 0;
            let page = match plus {
                true => self.read_entries(fd.ino, fd.handle, offset).await?,
                false => self.read_names(fd.ino, fd.handle, offset).await?,
            };
            let Some(last) = page.last() else {
                break;
            };
            offset = last.0;
            let found = page.into_iter().map(|(_, name)| name);
            names.extend(found.filter(|name| name != "." && name != ".."));
        }
        names.sort();
        Ok(names)
    }

    async fn read_names(
        &self,
        ino: InodeId,
        handle: FileHandle,
        offset: u64,
    ) -> Result<Vec<(u64, String)>, Errno> {
        let header = self.header();
        let listed = self
            .kernel
            .ask::<Vec<Listed>>(|adapter, to| {
                let listing = Listing::new(to);
                adapter.readdir(header, ino, handle, offset, listing);
            })
            .await?;
        Ok(listed.into_iter().map(|it| (it.next, it.name)).collect())
    }

    /// `parse_dirplusfile`.
    async fn read_entries(
        &self,
        ino: InodeId,
        handle: FileHandle,
        offset: u64,
    ) -> Result<Vec<(u64, String)>, Errno> {
        let header = self.header();
        let (asked_at, epoch) = {
            let state = self.kernel.state.lock();
            (state.asked(), state.epoch)
        };
        let listed = self
            .kernel
            .ask::<Vec<Listed>>(|adapter, to| {
                let listing = Listing::new(to);
                adapter.readdirplus(header, ino, handle, offset, listing);
            })
            .await?;
        let mut state = self.kernel.state.lock();
        for Listed { name, entry, .. } in &listed {
            let Some(entry) = entry.filter(|it| it.attr.ino.0 != 0 && name != "." && name != "..")
            else {
                continue;
            };
            // `fuse_direntplus_link`
            let found = InodeId(entry.attr.ino.0);
            let known = state.dentries.get(&(ino, name.clone())).copied();
            if known.is_some_and(|it| it.ino != Some(found)) {
                state.invalidate_dentry(ino, name);
            }
            state.iget(&entry.attr, entry.attr_ttl, Some(asked_at));
            let dentry = Dentry {
                ino: Some(found),
                valid_until: Instant::now() + entry.entry_ttl,
                epoch: known
                    .filter(|it| it.ino == Some(found))
                    .map_or(epoch, |it| it.epoch),
            };
            state.set_dentry(ino, name, dentry);
        }
        // `readdir(3)` skips names with the inode number 0.
        let shown = |it: Listed| {
            let is_hidden = it.entry.is_some_and(|entry| entry.attr.ino.0 == 0);
            (it.next, if is_hidden { ".".to_owned() } else { it.name })
        };
        Ok(listed.into_iter().map(shown).collect())
    }
}

/// One name of a listing.
struct Listed {
    next: u64,
    name: String,
    entry: Option<Entry>,
}

/// The answer to a request for names: as many as fit.
struct Listing {
    to: super::To<Vec<Listed>>,
    names: Vec<Listed>,
    left_bytes: usize,
}

impl Listing {
    fn new(to: super::To<Vec<Listed>>) -> Self {
        Self {
            to,
            names: Vec::new(),
            left_bytes: LISTING_BYTES,
        }
    }

    fn add_name(&mut self, bytes: usize, listed: Listed) -> bool {
        let bytes = bytes + listed.name.len();
        let Some(left) = self.left_bytes.checked_sub(bytes.next_multiple_of(8)) else {
            return true;
        };
        self.left_bytes = left;
        self.names.push(listed);
        false
    }
}

impl Reply<()> for Listing {
    fn answer(self, answer: Result<(), FuseErrno>) {
        self.to.answer(answer.map(|()| self.names));
    }
}

impl NamesReply for Listing {
    fn add(&mut self, _: u64, next: u64, _: FileType, name: &OsStr) -> bool {
        let name = name.to_string_lossy().into_owned();
        let entry = None;
        self.add_name(NAME_BYTES, Listed { next, name, entry })
    }
}

impl EntriesReply for Listing {
    fn add(&mut self, next: u64, name: &OsStr, entry: &Entry) -> bool {
        let name = name.to_string_lossy().into_owned();
        let entry = Some(*entry);
        self.add_name(ENTRY_BYTES, Listed { next, name, entry })
    }
}
