//! The kernel's requests, one method each: translate, call the client, translate back.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo,
    KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::AttrChanges;
use harvestfs_protocol::types::Credentials;

use crate::directory::OpenDirectory;
use crate::metrics::Operation;
use crate::read::Read;
use crate::serve::Adapter;
use crate::write::Write;
use crate::{convert, errno, kernel_options, reply};

impl Filesystem for Adapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        kernel_options::negotiate(config);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (inner, credentials, caller) = self.context(request);
        let name = name.to_owned();
        let asked_at = inner.shared.invalidations.count();
        self.serve(Operation::Lookup, async move {
            let parent = convert::inode(parent);
            let credentials = credentials.await;
            let found = inner.lookup(&credentials, parent, &name);
            let found = caller.unless_killed(found).await;
            inner.answer_lookup(reply, found, asked_at).await;
        });
    }

    fn forget(&self, _request: &Request, node_id: INodeNo, lookups: u64) {
        let nodes = &self.inner.shared.nodes;
        nodes.forget(convert::inode(node_id), lookups);
    }

    fn getattr(
        &self,
        request: &Request,
        node_id: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let (inner, credentials, caller) = self.context(request);
        let ino = self.asked_of(request, node_id);
        self.serve(Operation::GetAttr, async move {
            let credentials = credentials.await;
            let found = inner.client.getattr(&credentials, ino);
            let found = caller.unless_killed(found).await;
            inner.answer_attr(reply, ino, found).await;
        });
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
        let (inner, credentials, caller) = self.context(request);
        let (ino, thread) = (self.asked_of(request, node_id), request.pid());
        self.serve(Operation::SetAttr, async move {
            let credentials = credentials.await;
            let changed = inner.client.setattr(&credentials, ino, changes);
            let changed = caller.unless_killed(changed).await;
            inner
                .answer_changed_attr(reply, size.is_some(), changed, thread)
                .await;
        });
    }

    fn readlink(&self, request: &Request, node_id: INodeNo, reply: ReplyData) {
        let (client, credentials) = self.asked(request);
        let caller = self.caller(request);
        self.serve(Operation::ReadLink, async move {
            let read = async {
                let ino = convert::inode(node_id);
                client.readlink(&credentials.await, ino).await
            };
            match caller.unless_killed(read).await {
                Ok(target) => reply.data(&target),
                Err(error) => reply.error(errno::of(&error)),
            }
        });
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
        let (client, credentials) = self.asked(request);
        let name = convert::name(name);
        self.entry(request, Operation::MakeNode, reply, async move {
            let parent = convert::inode(parent);
            let kind = convert::file_kind(mode)?;
            let mode = convert::permissions(mode, umask);
            client
                .mknod(&credentials.await, parent, &name?, kind, mode, rdev)
                .await
        });
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
        let (client, credentials) = self.asked(request);
        let name = convert::name(name);
        self.entry(request, Operation::MakeDir, reply, async move {
            let parent = convert::inode(parent);
            let mode = convert::permissions(mode, umask);
            client.mkdir(&credentials.await, parent, &name?, mode).await
        });
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (client, credentials) = self.asked(request);
        let name = convert::name(name);
        self.empty(request, Operation::Unlink, reply, async move {
            let parent = convert::inode(parent);
            client.unlink(&credentials.await, parent, &name?).await?;
            Ok(())
        });
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (client, credentials) = self.asked(request);
        let name = convert::name(name);
        self.empty(request, Operation::RemoveDir, reply, async move {
            let parent = convert::inode(parent);
            client.rmdir(&credentials.await, parent, &name?).await
        });
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let (client, credentials) = self.asked(request);
        let name = convert::name(name);
        let target = target.as_os_str().as_bytes().to_vec();
        self.entry(request, Operation::Symlink, reply, async move {
            let parent = convert::inode(parent);
            client
                .symlink(&credentials.await, parent, &name?, &target)
                .await
        });
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
        let (client, credentials) = self.asked(request);
        let (name, new_name) = (convert::name(name), convert::name(new_name));
        self.empty(request, Operation::Rename, reply, async move {
            let parent = convert::inode(parent);
            let new_parent = convert::inode(new_parent);
            let mode = convert::rename_mode(flags)?;
            let (name, new_name) = (name?, new_name?);
            let credentials = credentials.await;
            let renamed = client.rename(&credentials, parent, &name, new_parent, &new_name, mode);
            renamed.await?;
            Ok(())
        });
    }

    fn link(
        &self,
        request: &Request,
        node_id: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let (client, credentials) = self.asked(request);
        let name = convert::name(new_name);
        self.entry(request, Operation::Link, reply, async move {
            let ino = convert::inode(node_id);
            let parent = convert::inode(new_parent);
            client.link(&credentials.await, ino, parent, &name?).await
        });
    }

    fn open(&self, request: &Request, node_id: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (inner, credentials, caller) = self.context(request);
        let (ino, thread) = (self.asked_of(request, node_id), request.pid());
        self.serve(Operation::Open, async move {
            let credentials = credentials.await;
            let opened = inner.open(&credentials, ino, flags, thread);
            reply::opened(reply, caller.unless_killed(opened).await);
        });
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
        let (inner, credentials, caller) = self.context(request);
        let name = convert::name(name);
        let asked_at = inner.shared.invalidations.count();
        let (parent, thread) = (convert::inode(parent), request.pid());
        self.serve(Operation::Create, async move {
            let created = async {
                let (mode, credentials) = (convert::permissions(mode, umask), credentials.await);
                inner
                    .create(&credentials, parent, &name?, mode, OpenFlags(flags))
                    .await
            };
            let created = caller.unless_killed(created).await;
            inner.answer_created(reply, created, asked_at, thread).await;
        });
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
        let Some(open) = self.file(handle) else {
            return reply.error(Errno::EBADF);
        };
        let (ino, paged) = (convert::inode(node_id), convert::is_paged(lock_owner));
        let read = Read {
            ino,
            offset,
            size,
            paged,
        };
        self.serve_read(request, open, read, reply);
    }

    fn write(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(open) = self.file(handle) else {
            return reply.error(Errno::EBADF);
        };
        let write = Write {
            ino: convert::inode(node_id),
            offset,
            flags: write_flags,
        };
        self.serve_write(request, open, write, data, reply);
    }

    fn flush(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let Some(open) = self.file(handle) else {
            return reply.error(Errno::EBADF);
        };
        self.asked_of(request, node_id);
        self.empty(request, Operation::Flush, reply, async move {
            open.file.flush().await
        });
    }

    fn fsync(
        &self,
        request: &Request,
        _node_id: INodeNo,
        handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let Some(open) = self.file(handle) else {
            return reply.error(Errno::EBADF);
        };
        self.empty(request, Operation::Fsync, reply, async move {
            open.file.sync().await
        });
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
        let _observed = self.begin(Operation::Release);
        // `flush` came before, with every `close`.
        self.inner.files.remove(handle.0);
        reply.ok();
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
        let Some(open) = self.file(handle) else {
            return reply.error(Errno::EBADF);
        };
        let ino = convert::inode(node_id);
        self.serve_fallocate(request, open, ino, (offset, length), mode, reply);
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
        let Some(open) = self.file(handle) else {
            return reply.error(Errno::EINVAL);
        };
        let caller = self.caller(request);
        self.serve(Operation::Lseek, async move {
            let found = open.seek(offset, whence);
            reply::offset(reply, caller.unless_killed(found).await);
        });
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
        let (Some(source), Some(destination)) = (self.file(source), self.file(destination)) else {
            return reply.error(Errno::EBADF);
        };
        let (inner, caller) = (self.inner.clone(), self.caller(request));
        let thread = request.pid();
        self.serve(Operation::CopyFileRange, async move {
            let copied = source.copy_range(source_offset, &destination, destination_offset, length);
            let copied = caller.unless_killed(copied).await;
            let ino = convert::inode(destination_id);
            inner
                .answer_written(reply, ino, destination_offset, copied, thread)
                .await;
        });
    }

    fn opendir(&self, _request: &Request, node_id: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _observed = self.begin(Operation::OpenDir);
        let directory = OpenDirectory::new(convert::inode(node_id));
        let handle = self.inner.directories.insert(directory);
        reply.opened(FileHandle(handle), FopenFlags::empty());
    }

    fn readdir(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let Some(directory) = self.inner.directories.get(handle.0) else {
            return reply.error(Errno::EBADF);
        };
        let (inner, credentials, caller) = self.context(request);
        self.serve(Operation::ReadDir, async move {
            let credentials = credentials.await;
            let filled = directory.fill(&inner, &credentials, offset, &mut reply);
            match caller.unless_killed(filled).await {
                Ok(()) => reply.ok(),
                Err(error) if inner.is_removed(convert::inode(node_id), &error) => reply.ok(),
                Err(error) => reply.error(errno::of(&error)),
            }
        });
    }

    fn readdirplus(
        &self,
        request: &Request,
        node_id: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let Some(directory) = self.inner.directories.get(handle.0) else {
            return reply.error(Errno::EBADF);
        };
        let (inner, credentials, caller) = self.context(request);
        self.serve(Operation::ReadDirPlus, async move {
            let credentials = credentials.await;
            let filled = directory.fill_plus(&inner, &credentials, offset, &mut reply);
            match caller.unless_killed(filled).await {
                Ok(()) => reply.ok(),
                Err(error) if inner.is_removed(convert::inode(node_id), &error) => reply.ok(),
                Err(error) => reply.error(errno::of(&error)),
            }
        });
    }

    fn releasedir(
        &self,
        _request: &Request,
        _node_id: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let _observed = self.begin(Operation::ReleaseDir);
        self.inner.directories.remove(handle.0);
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
        let _observed = self.begin(Operation::FsyncDir);
        // Operations on names are durable when they are answered. The kernel takes this for success, and
        // asks no more, for which it would lock the directory.
        reply.error(Errno::ENOSYS);
    }

    fn statfs(&self, request: &Request, node_id: INodeNo, reply: ReplyStatfs) {
        let (inner, credentials, caller) = self.context(request);
        // The kernel asks about the mount as a whole by its root, or by no inode.
        let ino = match convert::inode(node_id) {
            ino if inner.shared.nodes.knows(ino) => ino,
            _ => InodeId::ROOT,
        };
        self.serve(Operation::StatFs, async move {
            let credentials = credentials.await;
            let totals = inner.client.statfs(&credentials, ino);
            reply::statfs(reply, caller.unless_killed(totals).await);
        });
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
        let (client, credentials) = self.asked(request);
        let name = convert::xattr_name(name);
        let (value, mode) = (value.to_vec(), convert::set_xattr_mode(flags));
        self.empty(request, Operation::SetXattr, reply, async move {
            let ino = convert::inode(node_id);
            client
                .setxattr(&credentials.await, ino, &name?, &value, mode)
                .await
        });
    }

    fn getxattr(
        &self,
        request: &Request,
        node_id: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        let (client, credentials) = self.asked(request);
        let name = convert::xattr_name(name);
        let caller = self.caller(request);
        self.serve(Operation::GetXattr, async move {
            let value = async {
                let ino = convert::inode(node_id);
                client.getxattr(&credentials.await, ino, &name?).await
            };
            reply::xattr(reply, size, caller.unless_killed(value).await);
        });
    }

    fn listxattr(&self, request: &Request, node_id: INodeNo, size: u32, reply: ReplyXattr) {
        let (client, credentials) = self.asked(request);
        let caller = self.caller(request);
        self.serve(Operation::ListXattr, async move {
            let list = async {
                let ino = convert::inode(node_id);
                let names = client.listxattr(&credentials.await, ino).await?;
                Ok(convert::xattr_list(&names))
            };
            reply::xattr(reply, size, caller.unless_killed(list).await);
        });
    }

    fn removexattr(&self, request: &Request, node_id: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (client, credentials) = self.asked(request);
        let name = convert::xattr_name(name);
        self.empty(request, Operation::RemoveXattr, reply, async move {
            let (ino, name) = (convert::inode(node_id), name?);
            // The kernel itself drops a file's capabilities when somebody writes to it, in the name of
            // the writer; programs need `CAP_SETFCAP` for it, which the kernel has checked.
            let credentials = match name.as_slice() {
                b"security.capability" => Credentials::root(),
                _ => credentials.await,
            };
            client.removexattr(&credentials, ino, &name).await
        });
    }
}
