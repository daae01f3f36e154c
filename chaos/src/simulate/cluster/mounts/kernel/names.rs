//! Names: what the kernel caches of directories, and how it looks up and changes names (`fs/namei.c`,
//! `fs/fuse/{dir,readdir}.c`).

use std::collections::BTreeSet;
use std::ffi::OsStr;

use fuser::{FileType, OpenFlags, RenameFlags};
use harvestfs_fuse_mount::reply::{Created, Entry, Opened};
use harvestfs_protocol::ids::InodeId;
use rand::RngExt;
use rustix::fs::OFlags;
use rustix::io::Errno;
use tokio::time::Instant;

use super::{Dentry, Fd, Kernel, State, Thread};

/// How a name is looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lookup {
    /// From the cache, if valid.
    Cached,
    /// `LOOKUP_REVAL`, `LOOKUP_EXCL` or `LOOKUP_RENAME_TARGET`: from the mount.
    Ask,
}

/// What the cache knows about a name.
enum Known {
    Found(InodeId),
    Absent,
    /// The mount has to be asked whether the name still leads there.
    Revalidate(InodeId),
    Nothing,
}

impl State {
    /// The first half of `fuse_dentry_revalidate`.
    fn known(&mut self, parent: InodeId, name: &str, how: Lookup) -> Known {
        let key = (parent, name.to_owned());
        let Some(&dentry) = self.dentries.get(&key) else {
            return Known::Nothing;
        };
        let is_valid = dentry.valid_until > Instant::now() && how == Lookup::Cached;
        match dentry.ino {
            _ if dentry.epoch < self.epoch => {
                self.invalidate_dentry(parent, name);
                Known::Nothing
            }
            Some(ino) if is_valid => Known::Found(ino),
            None if is_valid => Known::Absent,
            Some(ino) => Known::Revalidate(ino),
            None => {
                self.invalidate_dentry(parent, name);
                Known::Nothing
            }
        }
    }

    /// `d_invalidate`: removes an entry with everything below.
    pub(super) fn invalidate_dentry(&mut self, parent: InodeId, name: &str) {
        let mut below = vec![self.dentries.remove(&(parent, name.to_owned()))];
        while let Some(dentry) = below.pop() {
            let Some(ino) = dentry.and_then(|it| it.ino) else {
                continue;
            };
            self.dentries.retain(|key, child| {
                let is_below = key.0 == ino;
                below.extend(is_below.then_some(Some(*child)));
                !is_below
            });
        }
    }

    pub(super) fn set_dentry(&mut self, parent: InodeId, name: &str, dentry: Dentry) {
        self.dentries.insert((parent, name.to_owned()), dentry);
    }

    /// `fuse_dir_changed`.
    fn directory_changed(&mut self, parent: InodeId) {
        self.invalidate_attr(parent);
    }

    /// `fuse_entry_unlinked`, and `d_delete`. `ino` is what the name led to, even if the model has dropped the entry
    /// since.
    fn entry_unlinked(&mut self, parent: InodeId, name: &str, ino: InodeId) {
        self.dentries.remove(&(parent, name.to_owned()));
        self.bump(ino);
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.nlink = inode.nlink.saturating_sub(1);
        }
        self.invalidate_attr(ino);
    }

    /// `create_new_entry` and `fuse_create_open`: the attributes are accepted in any case.
    fn new_entry(&mut self, parent: InodeId, name: &str, entry: &Entry, epoch: u64) -> InodeId {
        let ino = self.iget(&entry.attr, entry.attr_ttl, None);
        let dentry = Dentry {
            ino: Some(ino),
            valid_until: Instant::now() + entry.entry_ttl,
            epoch,
        };
        self.set_dentry(parent, name, dentry);
        self.directory_changed(parent);
        ino
    }
}

fn split(path: &str) -> Result<(&str, &str), Errno> {
    let (parent, name) = path.rsplit_once('/').ok_or(Errno::INVAL)?;
    Ok((parent, name))
}

impl Thread {
    /// The inode that a path from the root leads to, held.
    pub(super) async fn walk(&self, path: &str) -> Result<InodeId, Errno> {
        match self.walk_as(path, Lookup::Cached).await {
            Err(Errno::STALE) => self.walk_again(path).await,
            found => found,
        }
    }

    pub(super) async fn walk_again(&self, path: &str) -> Result<InodeId, Errno> {
        self.walk_as(path, Lookup::Ask).await
    }

    async fn walk_as(&self, path: &str, how: Lookup) -> Result<InodeId, Errno> {
        let mut at = InodeId::ROOT;
        self.kernel.hold(at);
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let next = self.find(at, name, how).await;
            self.kernel.put(at);
            at = next?.ok_or(Errno::NOENT)?;
        }
        Ok(at)
    }

    /// The inode that a name leads to, held (`lookup_fast`, `lookup_slow`).
    async fn find(
        &self,
        parent: InodeId,
        name: &str,
        how: Lookup,
    ) -> Result<Option<InodeId>, Errno> {
        if self.kernel.kind(parent)? != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        if let Some(found) = self.find_cached(parent, name, how).await? {
            return Ok(found);
        }
        let lock = self.kernel.inode_lock(parent)?;
        let _locked = lock.read().await;
        self.find_locked(parent, name, how).await
    }

    /// As [`Thread::find`], for callers that have locked the directory.
    async fn find_locked(
        &self,
        parent: InodeId,
        name: &str,
        how: Lookup,
    ) -> Result<Option<InodeId>, Errno> {
        if let Some(found) = self.find_cached(parent, name, how).await? {
            return Ok(found);
        }
        self.lookup(parent, name).await
    }

    /// `fuse_dentry_revalidate`. The outer `None`: the name has to be looked up.
    async fn find_cached(
        &self,
        parent: InodeId,
        name: &str,
        how: Lookup,
    ) -> Result<Option<Option<InodeId>>, Errno> {
        let (known, asked_at) = {
            let mut state = self.kernel.state.lock();
            let known = state.known(parent, name, how);
            if let Known::Found(ino) | Known::Revalidate(ino) = known
                && let Some(inode) = state.inodes.get_mut(&ino)
            {
                inode.uses += 1;
            }
            (known, state.attr_version)
        };
        let ino = match known {
            Known::Found(ino) => return Ok(Some(Some(ino))),
            Known::Absent => return Ok(Some(None)),
            Known::Nothing => {
                self.kernel.evict_unused();
                return Ok(None);
            }
            Known::Revalidate(ino) => ino,
        };
        let asked = self.ask_lookup(parent, name).await;
        let mut forget = None;
        let is_same = {
            let mut state = self.kernel.state.lock();
            match asked {
                Ok(entry) if entry.attr.ino.0 == ino.0 => {
                    if let Some(inode) = state.inodes.get_mut(&ino) {
                        inode.lookups += 1;
                    }
                    state.change_attributes(ino, &entry.attr, entry.attr_ttl, asked_at);
                    let valid_until = Instant::now() + entry.entry_ttl;
                    if let Some(dentry) = state.dentries.get_mut(&(parent, name.to_owned())) {
                        dentry.valid_until = valid_until;
                    }
                    true
                }
                Err(Errno::INTR | Errno::NOMEM) => {
                    drop(state);
                    self.kernel.put(ino);
                    return Err(Errno::INTR);
                }
                other => {
                    forget = other.ok().filter(|entry| entry.attr.ino.0 != 0);
                    state.invalidate_dentry(parent, name);
                    false
                }
            }
        };
        if let Some(entry) = forget {
            self.kernel.adapter().forget(InodeId(entry.attr.ino.0), 1);
        }
        if is_same {
            return Ok(Some(Some(ino)));
        }
        self.kernel.put(ino);
        Ok(None)
    }

    async fn ask_lookup(&self, parent: InodeId, name: &str) -> Result<Entry, Errno> {
        let header = self.header();
        self.kernel
            .ask(|adapter, to| adapter.lookup(header, parent, OsStr::new(name), to))
            .await
    }

    /// `fuse_lookup`.
    async fn lookup(&self, parent: InodeId, name: &str) -> Result<Option<InodeId>, Errno> {
        let (asked_at, epoch) = {
            let state = self.kernel.state.lock();
            (state.asked(), state.epoch)
        };
        let entry = match self.ask_lookup(parent, name).await {
            // Without a time to live, the absence is not cached.
            Err(Errno::NOENT) => return Ok(None),
            entry => entry?,
        };
        let mut state = self.kernel.state.lock();
        let found = (entry.attr.ino.0 != 0)
            .then(|| state.iget(&entry.attr, entry.attr_ttl, Some(asked_at)));
        if let Some(inode) = found.and_then(|ino| state.inodes.get_mut(&ino)) {
            inode.uses += 1;
        }
        let dentry = Dentry {
            ino: found,
            valid_until: Instant::now() + entry.entry_ttl,
            epoch,
        };
        state.set_dentry(parent, name, dentry);
        Ok(found)
    }

    /// The directory of a path, held, and the name in it.
    async fn walk_parent<'a>(&self, path: &'a str) -> Result<(InodeId, &'a str), Errno> {
        let (parent, name) = split(path)?;
        Ok((self.walk(parent).await?, name))
    }

    /// `lookup_open`: the inode with the name, held; or a new file, open.
    pub(super) async fn find_or_create(
        &self,
        path: &str,
        mode: OFlags,
        again: bool,
    ) -> Result<(InodeId, Option<Opened>), Errno> {
        let (parent, name) = self.walk_parent(path).await?;
        let created = self.find_or_create_in(parent, name, mode, again).await;
        self.kernel.put(parent);
        created
    }

    async fn find_or_create_in(
        &self,
        parent: InodeId,
        name: &str,
        mode: OFlags,
        again: bool,
    ) -> Result<(InodeId, Option<Opened>), Errno> {
        let is_exclusive = mode.contains(OFlags::EXCL);
        let lock = self.kernel.inode_lock(parent)?;
        let _locked = lock.write().await;
        let how = match is_exclusive || again {
            true => Lookup::Ask,
            false => Lookup::Cached,
        };
        if let Some(found) = self.find_locked(parent, name, how).await? {
            if is_exclusive {
                self.kernel.put(found);
                return Err(Errno::EXIST);
            }
            return Ok((found, None));
        }
        let epoch = self.kernel.state.lock().epoch;
        let (header, flags) = (self.header(), OpenFlags(mode.bits() as i32));
        let created = self
            .kernel
            .ask::<Created>(|adapter, to| {
                adapter.create(header, parent, OsStr::new(name), 0o644, flags, to);
            })
            .await;
        let mut state = self.kernel.state.lock();
        match created {
            Ok(Created { entry, opened }) => {
                let ino = state.new_entry(parent, name, &entry, epoch);
                if let Some(inode) = state.inodes.get_mut(&ino) {
                    inode.uses += 1;
                }
                Ok((ino, Some(opened)))
            }
            Err(error) => {
                if error == Errno::EXIST {
                    state.invalidate_dentry(parent, name);
                }
                Err(error)
            }
        }
    }

    /// `mkdir(2)`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn mkdir(&self, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.walk_parent(path).await?;
        let made = self.mkdir_in(parent, name).await;
        self.kernel.put(parent);
        made
    }

    async fn mkdir_in(&self, parent: InodeId, name: &str) -> Result<(), Errno> {
        let lock = self.kernel.inode_lock(parent)?;
        let _locked = lock.write().await;
        if let Some(found) = self.find_locked(parent, name, Lookup::Ask).await? {
            self.kernel.put(found);
            return Err(Errno::EXIST);
        }
        let epoch = self.kernel.state.lock().epoch;
        let header = self.header();
        let entry = self
            .kernel
            .ask::<Entry>(|adapter, to| adapter.mkdir(header, parent, OsStr::new(name), 0o755, to))
            .await?;
        let mut state = self.kernel.state.lock();
        state.new_entry(parent, name, &entry, epoch);
        Ok(())
    }

    /// `unlink(2)`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn unlink(&self, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.walk_parent(path).await?;
        let removed = self.unlink_in(parent, name).await;
        self.kernel.put(parent);
        removed
    }

    async fn unlink_in(&self, parent: InodeId, name: &str) -> Result<(), Errno> {
        let lock = self.kernel.inode_lock(parent)?;
        let _locked = lock.write().await;
        let found = self.find_locked(parent, name, Lookup::Cached).await?;
        let found = found.ok_or(Errno::NOENT)?;
        let header = self.header();
        let removed = if self.kernel.kind(found)? == FileType::Directory {
            Err(Errno::ISDIR)
        } else {
            self.kernel
                .ask::<()>(|adapter, to| adapter.unlink(header, parent, OsStr::new(name), to))
                .await
        };
        {
            let mut state = self.kernel.state.lock();
            match removed {
                Ok(()) => {
                    state.directory_changed(parent);
                    state.entry_unlinked(parent, name, found);
                }
                Err(Errno::INTR | Errno::NOENT) => state.invalidate_dentry(parent, name),
                Err(_) => {}
            }
        }
        self.kernel.put(found);
        removed
    }

    /// `link(2)`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn link(&self, from: &str, to: &str) -> Result<(), Errno> {
        let ino = self.walk(from).await?;
        let linked = self.link_found(ino, to).await;
        self.kernel.put(ino);
        linked
    }

    /// `linkat(2)` with `AT_EMPTY_PATH`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn link_open(&self, fd: &Fd, to: &str) -> Result<(), Errno> {
        self.link_found(fd.ino, to).await
    }

    async fn link_found(&self, ino: InodeId, to: &str) -> Result<(), Errno> {
        let (parent, name) = self.walk_parent(to).await?;
        let linked = self.link_in(ino, parent, name).await;
        self.kernel.put(parent);
        linked
    }

    async fn link_in(&self, ino: InodeId, parent: InodeId, name: &str) -> Result<(), Errno> {
        let lock = self.kernel.inode_lock(parent)?;
        let _locked = lock.write().await;
        if let Some(found) = self.find_locked(parent, name, Lookup::Ask).await? {
            self.kernel.put(found);
            return Err(Errno::EXIST);
        }
        // `vfs_link`
        let lock = self.kernel.inode_lock(ino)?;
        let _linked = lock.write().await;
        let epoch = self.kernel.state.lock().epoch;
        let header = self.header();
        let entry = self
            .kernel
            .ask::<Entry>(|adapter, to| adapter.link(header, ino, parent, OsStr::new(name), to))
            .await;
        let mut state = self.kernel.state.lock();
        match &entry {
            Ok(entry) => {
                state.new_entry(parent, name, entry, epoch);
                state.invalidate_attr(ino);
            }
            Err(Errno::INTR) => state.invalidate_attr(ino),
            Err(_) => {}
        }
        entry.map(|_| ())
    }

    /// `rename(2)`. Returns false if both are names of one file, and so stay.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn rename(&self, from: &str, to: &str) -> Result<bool, Errno> {
        let from = self.walk_parent(from).await?;
        let renamed = match self.walk_parent(to).await {
            Ok(to) => {
                let renamed = self.rename_in(from, to).await;
                self.kernel.put(to.0);
                renamed
            }
            Err(error) => Err(error),
        };
        self.kernel.put(from.0);
        renamed
    }

    async fn rename_in(&self, from: (InodeId, &str), to: (InodeId, &str)) -> Result<bool, Errno> {
        // `lock_rename`, in a fixed order.
        let directories = BTreeSet::from([from.0, to.0]);
        let mut locked = Vec::new();
        for directory in directories {
            locked.push(self.kernel.inode_lock(directory)?.write_owned().await);
        }
        let old = self.find_locked(from.0, from.1, Lookup::Cached).await?;
        let old = old.ok_or(Errno::NOENT)?;
        let new = match self.find_locked(to.0, to.1, Lookup::Ask).await {
            Ok(new) => new,
            Err(error) => {
                self.kernel.put(old);
                return Err(error);
            }
        };
        let renamed = self.rename_found(from, to, (old, new)).await;
        self.kernel.put(old);
        if let Some(new) = new {
            self.kernel.put(new);
        }
        renamed
    }

    async fn rename_found(
        &self,
        from: (InodeId, &str),
        to: (InodeId, &str),
        (old, new): (InodeId, Option<InodeId>),
    ) -> Result<bool, Errno> {
        // `vfs_rename`: nothing happens to two names of one file.
        if new == Some(old) {
            return Ok(false);
        }
        let header = self.header();
        let (from_os, to_os) = ((from.0, OsStr::new(from.1)), (to.0, OsStr::new(to.1)));
        let renamed = self
            .kernel
            .ask::<()>(|adapter, reply| {
                adapter.rename(header, from_os, to_os, RenameFlags::empty(), reply);
            })
            .await;
        let mut state = self.kernel.state.lock();
        match renamed {
            Ok(()) => {
                state.invalidate_attr(old);
                state.directory_changed(from.0);
                state.directory_changed(to.0);
                if let Some(new) = new {
                    state.entry_unlinked(to.0, to.1, new);
                }
                // `d_move`: the entry keeps its time to live.
                match state.dentries.remove(&(from.0, from.1.to_owned())) {
                    Some(moved) => state.set_dentry(to.0, to.1, moved),
                    // The model dropped it with its directory, which the kernel does not do while it is in use. What
                    // was looked up under the new name since then is outdated.
                    None => state.invalidate_dentry(to.0, to.1),
                }
            }
            Err(Errno::INTR | Errno::NOENT) => {
                state.invalidate_dentry(from.0, from.1);
                state.invalidate_dentry(to.0, to.1);
            }
            Err(_) => {}
        }
        renamed.map(|()| true)
    }
}

impl Kernel {
    fn kind(&self, ino: InodeId) -> Result<FileType, Errno> {
        let state = self.state.lock();
        let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
        Ok(inode.kind)
    }

    /// Drops about half of the entries and pages that are not in use, as if memory were short.
    pub fn shrink(&self) {
        {
            let mut state = self.state.lock();
            let State {
                rng,
                dentries,
                inodes,
                ..
            } = &mut *state;
            let parents: BTreeSet<InodeId> = dentries.keys().map(|(parent, _)| *parent).collect();
            dentries.retain(|_, dentry| {
                let has_children = dentry.ino.is_some_and(|ino| parents.contains(&ino));
                has_children || rng.random_range(0..2) == 0
            });
            for inode in inodes.values_mut() {
                let keep = |page: &super::Page| page.locked || page.dirty;
                inode
                    .pages
                    .retain(|_, page| keep(page) || rng.random_range(0..2) == 0);
            }
        }
        self.evict_unused();
    }
}
