//! The server of [`super::FuseAlone`], which answers the kernel's requests from a [`Tree`].

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;
use std::{fs, io};

use anyhow::{Context, Result};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, Session, TimeOrNow, WriteFlags,
};
use harvestfs_fuse_mount::kernel_options::{self, Permissions, TTL_MAX};
use harvestfs_protocol::limits::NAME_BYTES_MAX;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::OFlags;
use rustix::process::Signal;

use super::tree::{Changes, Content, Piece, Tree, attributes};

/// Constant, as inode numbers are never reused.
const GENERATION: Generation = Generation(0);
/// Constant, as files and directories are identified by their inode.
const NO_HANDLE: FileHandle = FileHandle(0);
/// The unit in which `statvfs` counts.
const STATFS_UNIT_BYTES: u32 = 4_096;

/// Serves an empty file system on a directory until it is unmounted.
pub fn serve(directory: &Path) -> Result<()> {
    // If the benchmark is killed, neither the mount nor its memory stays behind.
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let file_system = FileSystem {
        tree: Mutex::new(Tree::new(uid.as_raw(), gid.as_raw())),
    };
    // The same permissions as with `harvestfs up`.
    let permissions = Permissions {
        allow_other: uid.is_root(),
        ..Permissions::default()
    };
    let config = kernel_options::config("mount-bench", "mount-bench", permissions);
    let session = Session::new(file_system, directory, &config)
        .with_context(|| format!("cannot mount on {}", directory.display()))?;
    session.run().context("the connection to the kernel broke")
}

struct FileSystem {
    tree: Mutex<Tree>,
}

impl FileSystem {
    /// Locks the tree. Answers are sent without the lock, so that the other thread need not wait for them.
    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock()
    }

    fn create_entry(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        content: Content,
        mode: u32,
    ) -> Result<FileAttr, Errno> {
        let (uid, gid) = (request.uid(), request.gid());
        self.tree()
            .create(parent.0, name, content, permissions(mode), uid, gid)
    }
}

/// The permission bits of a mode.
fn permissions(mode: u32) -> u16 {
    // 12 bits always fit.
    (mode & 0o7777) as u16
}

fn time(time: TimeOrNow) -> SystemTime {
    match time {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
    }
}

fn answer_entry(reply: ReplyEntry, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attr) => reply.entry(&TTL_MAX, &attr, GENERATION),
        Err(error) => reply.error(error),
    }
}

fn answer_attr(reply: ReplyAttr, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attr) => reply.attr(&TTL_MAX, &attr),
        Err(error) => reply.error(error),
    }
}

fn answer_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

/// Available memory in bytes, including the kernel's caches.
fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

impl Filesystem for FileSystem {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Set-user-id bits survive a write here, which does not matter in a benchmark.
        kernel_options::negotiate(config);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.tree().lookup(parent.0, name);
        answer_entry(
            reply,
            found.or_else(|error| match error {
                // Node id 0: no such entry, and the kernel may remember that.
                Errno::ENOENT => Ok(attributes(0, FileType::RegularFile, 0, 0, 0)),
                error => Err(error),
            }),
        );
    }

    fn forget(&self, _request: &Request, node_id: INodeNo, lookups: u64) {
        let unreachable = self.tree().forget(node_id.0, lookups);
        // Freed without the lock.
        drop(unreachable);
    }

    fn getattr(
        &self,
        _request: &Request,
        node_id: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let attr = self.tree().attr(node_id.0);
        answer_attr(reply, attr);
    }

    fn setattr(
        &self,
        _request: &Request,
        node_id: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changes = Changes {
            permissions: mode.map(permissions),
            uid,
            gid,
            size_bytes: size,
            atime: atime.map(time),
            mtime: mtime.map(time),
            ctime,
        };
        let attr = self.tree().change(node_id.0, &changes);
        answer_attr(reply, attr);
    }

    fn readlink(&self, _request: &Request, node_id: INodeNo, reply: ReplyData) {
        let target = self.tree().symlink_target(node_id.0);
        match target {
            Ok(target) => reply.data(target.as_bytes()),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let content = Content::empty_directory(parent.0);
        let created = self.create_entry(request, parent, name, content, mode & !umask);
        answer_entry(reply, created);
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.tree().remove(parent.0, name, false);
        answer_empty(reply, removed);
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.tree().remove(parent.0, name, true);
        answer_empty(reply, removed);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let content = Content::Symlink(target.into());
        let created = self.create_entry(request, parent, name, content, 0o777);
        answer_entry(reply, created);
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let no_replace = flags == RenameFlags::RENAME_NOREPLACE;
        if !no_replace && !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let renamed = self
            .tree()
            .rename(parent.0, name, new_parent.0, new_name, no_replace);
        answer_empty(reply, renamed);
    }

    fn link(
        &self,
        _request: &Request,
        node_id: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let linked = self.tree().link(node_id.0, new_parent.0, new_name);
        answer_entry(reply, linked);
    }

    fn open(&self, _request: &Request, node_id: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let truncate = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::TRUNC);
        let changes = Changes {
            size_bytes: Some(0),
            ..Changes::default()
        };
        let opened = if truncate {
            self.tree().change(node_id.0, &changes)
        } else {
            self.tree().attr(node_id.0)
        };
        match opened {
            Ok(_) => reply.opened(NO_HANDLE, FopenFlags::FOPEN_KEEP_CACHE),
            Err(error) => reply.error(error),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let content = Content::empty_file();
        match self.create_entry(request, parent, name, content, mode & !umask) {
            Ok(attr) => {
                let flags = FopenFlags::FOPEN_KEEP_CACHE;
                reply.created(&TTL_MAX, &attr, GENERATION, NO_HANDLE, flags);
            }
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _request: &Request,
        node_id: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let pieces = self.tree().read(node_id.0, offset, size as usize);
        match pieces.as_deref() {
            Ok([piece]) => reply.data(piece.bytes()),
            Ok(pieces) => {
                let bytes: Vec<&[u8]> = pieces.iter().map(Piece::bytes).collect();
                reply.data(&bytes.concat());
            }
            Err(error) => reply.error(*error),
        }
    }

    fn write(
        &self,
        _request: &Request,
        node_id: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.tree().write(node_id.0, offset, data);
        match written {
            // At most the maximum request size negotiated with the kernel.
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _node_id: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        _node_id: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _node_id: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        node_id: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self
            .tree()
            .list(node_id.0, offset, false, |place, name, attr| {
                reply.add(attr.ino, place, attr.kind, name)
            });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        node_id: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let listed = self
            .tree()
            .list(node_id.0, offset, true, |place, name, attr| {
                reply.add(attr.ino, place, name, &TTL_MAX, attr, GENERATION)
            });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn statfs(&self, _request: &Request, _node_id: INodeNo, reply: ReplyStatfs) {
        let Some(free_bytes) = available_bytes() else {
            return reply.error(Errno::EIO);
        };
        let free = free_bytes / u64::from(STATFS_UNIT_BYTES);
        reply.statfs(
            free,
            free,
            free,
            0,
            0,
            STATFS_UNIT_BYTES,
            NAME_BYTES_MAX as u32,
            STATFS_UNIT_BYTES,
        );
    }

    fn getxattr(
        &self,
        _request: &Request,
        _node_id: INodeNo,
        _name: &OsStr,
        _size: u32,
        reply: ReplyXattr,
    ) {
        // After ENOSYS, the kernel would stop asking, unlike for a file system with attributes.
        reply.error(Errno::ENODATA);
    }
}
