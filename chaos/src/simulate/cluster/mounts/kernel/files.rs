//! Open files and attributes (`fs/fuse/{file,dir}.c`).

use std::sync::Arc;

use fuser::{FileHandle, FileType, FopenFlags, OpenFlags};
use harvestfs_fuse_mount::reply::{Attributes, Opened};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::AttrChanges;
use rustix::fs::OFlags;
use rustix::io::Errno;
use tokio::time::Instant;

use super::{Kernel, Thread};

/// An open file.
#[derive(Debug)]
pub struct Fd {
    pub ino: InodeId,
    pub(super) handle: FileHandle,
    flags: FopenFlags,
    mode: OFlags,
}

impl Fd {
    /// Whether it bypasses the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.flags.contains(FopenFlags::FOPEN_DIRECT_IO)
    }

    /// Whether writes append.
    pub(super) fn appends(&self) -> bool {
        self.mode.contains(OFlags::APPEND)
    }

    /// Whether a program may read from it.
    pub(super) fn may_read(&self) -> bool {
        !self.mode.contains(OFlags::WRONLY)
    }

    /// Whether a program may write to it.
    pub(super) fn may_write(&self) -> bool {
        self.mode.intersects(OFlags::WRONLY | OFlags::RDWR)
    }
}

/// The attributes that `stat` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub ino: InodeId,
    pub uid: u32,
    /// Permission bits.
    pub mode: u16,
    pub size: u64,
    pub nlink: u32,
    pub is_directory: bool,
}

impl Kernel {
    /// The size of a file, as far as the kernel knows.
    pub(super) fn size(&self, ino: InodeId) -> u64 {
        let state = self.state.lock();
        state.inodes.get(&ino).map_or(0, |inode| inode.size)
    }

    fn stat(&self, ino: InodeId) -> Result<Stat, Errno> {
        let state = self.state.lock();
        let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
        Ok(Stat {
            ino,
            uid: inode.uid,
            mode: inode.mode,
            size: inode.size,
            nlink: inode.nlink,
            is_directory: inode.kind == FileType::Directory,
        })
    }

    /// Keeps an inode in use until [`Kernel::put`].
    pub(super) fn hold(&self, ino: InodeId) {
        if let Some(inode) = self.state.lock().inodes.get_mut(&ino) {
            inode.uses += 1;
        }
    }

    pub(super) fn put(&self, ino: InodeId) {
        if let Some(inode) = self.state.lock().inodes.get_mut(&ino) {
            inode.uses -= 1;
        }
        self.evict_unused();
    }
}

impl Thread {
    /// `fuse_update_get_attr`: asks the mount if the cached attributes are not valid. The answer is returned even if
    /// it is not cached.
    pub(super) async fn update_attributes(&self, ino: InodeId) -> Result<Stat, Errno> {
        let (is_valid, asked_at) = {
            let state = self.kernel.state.lock();
            let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
            (inode.valid_until > Instant::now(), state.attr_version)
        };
        if is_valid {
            return self.kernel.stat(ino);
        }
        let header = self.header();
        let Attributes { attr, ttl } = self
            .kernel
            .ask(|adapter, to| adapter.getattr(header, ino, to))
            .await?;
        let mut state = self.kernel.state.lock();
        state.change_attributes(ino, &attr, ttl, asked_at);
        Ok(Stat {
            ino,
            uid: attr.uid,
            mode: attr.perm,
            size: attr.size,
            nlink: attr.nlink,
            is_directory: attr.kind == FileType::Directory,
        })
    }

    /// `stat(2)`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn stat(&self, path: &str) -> Result<Stat, Errno> {
        let ino = self.walk(path).await?;
        let found = self.update_attributes(ino).await;
        self.kernel.put(ino);
        found
    }

    /// `fstat(2)`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn fstat(&self, fd: &Fd) -> Result<Stat, Errno> {
        self.update_attributes(fd.ino).await
    }

    /// `open(2)`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn open(&self, path: &str, mode: OFlags) -> Result<Fd, Errno> {
        match self.open_once(path, mode, false).await {
            // `filename_lookup` tries a second time, bypassing the cache.
            Err(Errno::STALE) => self.open_once(path, mode, true).await,
            opened => opened,
        }
    }

    async fn open_once(&self, path: &str, mode: OFlags, again: bool) -> Result<Fd, Errno> {
        let found = match mode.contains(OFlags::CREATE) {
            false if again => self.walk_again(path).await?,
            false => self.walk(path).await?,
            true => match self.find_or_create(path, mode, again).await? {
                (ino, Some(opened)) => return Ok(self.finish_open(ino, opened, mode).await),
                (ino, None) => ino,
            },
        };
        let is_directory = self.kernel.stat(found).is_ok_and(|it| it.is_directory);
        let flags = mode.difference(OFlags::CREATE | OFlags::EXCL);
        let writes = mode.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC);
        let opened = if is_directory && writes {
            Err(Errno::ISDIR)
        } else {
            let (header, flags) = (self.header(), OpenFlags(flags.bits() as i32));
            let open = self.kernel.ask::<Opened>(|adapter, to| match is_directory {
                true => adapter.opendir(found, to),
                false => adapter.open(header, found, flags, to),
            });
            open.await
        };
        match opened {
            Ok(opened) => Ok(self.finish_open(found, opened, mode).await),
            Err(error) => {
                self.kernel.put(found);
                Err(error)
            }
        }
    }

    /// The end of `fuse_open` and `fuse_create_open`. The inode is held already.
    async fn finish_open(&self, ino: InodeId, opened: Opened, mode: OFlags) -> Fd {
        let fd = Fd {
            ino,
            handle: opened.handle,
            flags: opened.flags,
            mode,
        };
        let is_truncated = mode.contains(OFlags::TRUNC) && fd.may_write();
        {
            let mut state = self.kernel.state.lock();
            if let Some(inode) = state.inodes.get_mut(&ino)
                && fd.may_write()
            {
                inode.write_handles.push(fd.handle);
            }
            if is_truncated {
                // `fuse_truncate_update_attr`
                state.bump(ino);
                if let Some(inode) = state.inodes.get_mut(&ino) {
                    inode.size = 0;
                    inode.truncate_pages();
                }
                state.invalidate_attr(ino);
            }
        }
        if !is_truncated && !fd.flags.contains(FopenFlags::FOPEN_KEEP_CACHE) {
            self.kernel.invalidate_pages(ino).await;
        }
        fd
    }

    /// `close(2)`. The file is closed even if an error is returned.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn close(&self, fd: Fd) -> Result<(), Errno> {
        let flushed = match fd.flags.contains(FopenFlags::FOPEN_NOFLUSH) {
            true => Ok(()),
            false => self.flush(&fd).await,
        };
        if let Some(inode) = self.kernel.state.lock().inodes.get_mut(&fd.ino) {
            inode.write_handles.retain(|it| *it != fd.handle);
        }
        // Pages that are still dirty keep the inode until they are written back.
        self.kernel.put(fd.ino);
        let (kernel, handle) = (Arc::clone(&self.kernel), fd.handle);
        // Nothing waits for `FUSE_RELEASE`.
        tokio::spawn(async move {
            let _ = kernel
                .ask::<()>(|adapter, to| adapter.release(handle, to))
                .await;
        });
        flushed
    }

    /// `fuse_flush`.
    async fn flush(&self, fd: &Fd) -> Result<(), Errno> {
        self.kernel.write_back(fd.ino).await?;
        let (header, ino, handle) = (self.header(), fd.ino, fd.handle);
        self.kernel
            .ask(|adapter, to| adapter.flush(header, ino, handle, to))
            .await
    }

    /// `fsync(2)`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn fsync(&self, fd: &Fd) -> Result<(), Errno> {
        let lock = self.kernel.inode_lock(fd.ino)?;
        let _locked = lock.write().await;
        self.kernel.write_back(fd.ino).await?;
        let (header, handle) = (self.header(), fd.handle);
        self.kernel
            .ask(|adapter, to| adapter.fsync(header, handle, to))
            .await
    }

    /// `ftruncate(2)`: `fuse_do_setattr`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn truncate(&self, fd: &Fd, size: u64) -> Result<(), Errno> {
        if !fd.may_write() {
            return Err(Errno::INVAL);
        }
        let ino = fd.ino;
        let lock = self.kernel.inode_lock(ino)?;
        let _locked = lock.write().await;
        // `fuse_set_nowrite`: writeback finishes first.
        self.kernel.write_back(ino).await?;
        if let Some(inode) = self.kernel.state.lock().inodes.get_mut(&ino) {
            inode.size_is_unstable = true;
        }
        let changes = AttrChanges {
            size_bytes: Some(size),
            opened_for_writing: true,
            ..AttrChanges::default()
        };
        let header = self.header();
        let changed = self
            .kernel
            .ask::<Attributes>(|adapter, to| adapter.setattr(header, ino, changes, to))
            .await;
        let mut resized = false;
        {
            let mut state = self.kernel.state.lock();
            state.attr_version += 1;
            let version = state.attr_version;
            let inode = state.inodes.get_mut(&ino).ok_or(Errno::STALE)?;
            if let Ok(Attributes { attr, ttl }) = &changed {
                resized = inode.size != attr.size;
                inode.take(attr, *ttl, version);
                inode.size = attr.size;
                if resized {
                    inode.truncate_pages();
                }
            }
            if changed.is_err() {
                inode.size_is_unstable = false;
            }
        }
        if changed.as_ref().is_err_and(|error| *error == Errno::INTR) {
            self.kernel.state.lock().invalidate_attr(ino);
        }
        if resized {
            self.kernel.invalidate_pages(ino).await;
        }
        if let Some(inode) = self.kernel.state.lock().inodes.get_mut(&ino) {
            inode.size_is_unstable = false;
        }
        changed.map(|_| ())
    }
}
