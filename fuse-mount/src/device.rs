//! The interface to `fuser`: requests that it read from `/dev/fuse` become plain values, for [`Adapter`].

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, INodeNo, KernelConfig, LockOwner,
    OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};
use harvestfs_protocol::meta::AttrChanges;

use crate::read::Read;
use crate::serve::{Adapter, Header};
use crate::session_end::SessionEnd;
use crate::write::Write;
use crate::{convert, kernel_options};

/// Serves the kernel's requests from its device, to the end of the session.
pub struct Device(pub Adapter, pub Arc<SessionEnd>);

impl From<&Request> for Header {
    fn from(request: &Request) -> Self {
        Self {
            uid: request.uid(),
            gid: request.gid(),
            pid: request.pid(),
        }
    }
}

impl Filesystem for Device {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        kernel_options::negotiate(config);
        Ok(())
    }

    fn destroy(&mut self) {
        self.1.reached();
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.0
            .lookup(request.into(), convert::inode(parent), name, reply);
    }

    fn forget(&self, _request: &Request, node_id: INodeNo, lookups: u64) {
        self.0.forget(convert::inode(node_id), lookups);
    }

    fn getattr(
        &self,
        request: &Request,
        node_id: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        self.0
            .getattr(request.into(), convert::inode(node_id), reply);
    }

    fn setattr(
        &self,
        request: &Request,
        node_id: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changes = AttrChanges {
            mode: mode.map(|mode| convert::permissions(mode, 0)),
            uid,
            gid,
            size_bytes: size,
            atime: atime.map(convert::set_time),
            mtime: mtime.map(convert::set_time),
            opened_for_writing: handle.is_some(),
        };
        self.0
            .setattr(request.into(), convert::inode(node_id), changes, reply);
    }

    fn readlink(&self, request: &Request, node_id: INodeNo, reply: ReplyData) {
        self.0
            .readlink(request.into(), convert::inode(node_id), reply);
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        self.0.mknod(
            request.into(),
            convert::inode(parent),
            name,
            mode & !umask,
            rdev,
            reply,
        );
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
        let mode = convert::permissions(mode, umask);
        self.0
            .mkdir(request.into(), convert::inode(parent), name, mode, reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.0
            .unlink(request.into(), convert::inode(parent), name, reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.0
            .rmdir(request.into(), convert::inode(parent), name, reply);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let target = target.as_os_str().as_bytes();
        self.0
            .symlink(request.into(), convert::inode(parent), name, target, reply);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let from = (convert::inode(parent), name);
        let to = (convert::inode(new_parent), new_name);
        self.0.rename(request.into(), from, to, flags, reply);
    }

    fn link(
        &self,
        request: &Request,
        node_id: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let (ino, parent) = (convert::inode(node_id), convert::inode(new_parent));
        self.0.link(request.into(), ino, parent, new_name, reply);
    }

    fn open(&self, request: &Request, node_id: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.0
            .open(request.into(), convert::inode(node_id), flags, reply);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (mode, flags) = (convert::permissions(mode, umask), OpenFlags(flags));
        self.0.create(
            request.into(),
            convert::inode(parent),
            name,
            mode,
            flags,
            reply,
        );
    }

    fn read(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = Read {
            ino: convert::inode(node_id),
            offset,
            size,
            paged: convert::is_paged(lock_owner),
        };
        self.0.read(request.into(), handle, read, reply);
    }

    fn write(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let write = Write {
            ino: convert::inode(node_id),
            offset,
            flags: write_flags,
            append: convert::is_append(flags),
            direct: convert::is_direct(flags),
            synced: convert::is_synced(flags),
        };
        self.0.write(request.into(), handle, write, data, reply);
    }

    fn flush(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.0
            .flush(request.into(), convert::inode(node_id), handle, reply);
    }

    fn fsync(
        &self,
        request: &Request,
        _node_id: INodeNo,
        handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.0.fsync(request.into(), handle, reply);
    }

    fn release(
        &self,
        _request: &Request,
        _node_id: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.0.release(handle, reply);
    }

    fn fallocate(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (ino, range) = (convert::inode(node_id), (offset, length));
        self.0
            .fallocate(request.into(), ino, handle, range, mode, reply);
    }

    fn lseek(
        &self,
        request: &Request,
        _node_id: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.0.lseek(request.into(), handle, offset, whence, reply);
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _source_id: INodeNo,
        source: FileHandle,
        source_offset: u64,
        destination_id: INodeNo,
        destination: FileHandle,
        destination_offset: u64,
        length: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let to = (
            convert::inode(destination_id),
            destination,
            destination_offset,
        );
        self.0
            .copy_file_range(request.into(), (source, source_offset), to, length, reply);
    }

    fn opendir(&self, _request: &Request, node_id: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.0.opendir(convert::inode(node_id), reply);
    }

    fn readdir(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        self.0.readdir(
            request.into(),
            convert::inode(node_id),
            handle,
            offset,
            reply,
        );
    }

    fn readdirplus(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.0.readdirplus(
            request.into(),
            convert::inode(node_id),
            handle,
            offset,
            reply,
        );
    }

    fn releasedir(
        &self,
        _request: &Request,
        _node_id: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.0.releasedir(handle, reply);
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _node_id: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.0.fsyncdir(reply);
    }

    fn statfs(&self, request: &Request, node_id: INodeNo, reply: ReplyStatfs) {
        self.0
            .statfs(request.into(), convert::inode(node_id), reply);
    }

    fn setxattr(
        &self,
        request: &Request,
        node_id: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        self.0.setxattr(
            request.into(),
            convert::inode(node_id),
            name,
            value,
            flags,
            reply,
        );
    }

    fn getxattr(
        &self,
        request: &Request,
        node_id: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        self.0
            .getxattr(request.into(), convert::inode(node_id), name, size, reply);
    }

    fn listxattr(&self, request: &Request, node_id: INodeNo, size: u32, reply: ReplyXattr) {
        self.0
            .listxattr(request.into(), convert::inode(node_id), size, reply);
    }

    fn removexattr(&self, request: &Request, node_id: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.0
            .removexattr(request.into(), convert::inode(node_id), name, reply);
    }
}
