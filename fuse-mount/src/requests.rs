//! The kernel's requests as plain values, with one method each: call the client, translate the answer. Requests from
//! `/dev/fuse` arrive here through [`crate::device`].

use std::ffi::OsStr;

use bytes::Bytes;
use fuser::{Errno, FileHandle, FopenFlags, OpenFlags, RenameFlags};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{AttrChanges, StatFs};
use harvestfs_protocol::types::Credentials;

use crate::convert;
use crate::directory::OpenDirectory;
use crate::metrics::Operation;
use crate::pages::CachedWrite;
use crate::read::Read;
use crate::reply::{
    self, Attributes, Created, EntriesReply, Entry, NamesReply, Offset, Opened, Reply, Written,
    Xattr,
};
use crate::serve::{Adapter, Header};
use crate::write::Write;

#[expect(missing_docs, reason = "they are named as the kernel names them")]
impl Adapter {
    pub fn lookup(&self, header: Header, parent: InodeId, name: &OsStr, reply: impl Reply<Entry>) {
        let (inner, credentials, caller) = self.context(header);
        let name = name.to_owned();
        let asked_at = inner.shared.invalidations.count();
        self.serve(Operation::Lookup, async move {
            let credentials = credentials.await;
            let found = inner.lookup(&credentials, parent, &name);
            let found = caller.unless_killed(found).await;
            inner.answer_lookup(reply, found, asked_at).await;
        });
    }

    pub fn forget(&self, ino: InodeId, lookups: u64) {
        self.inner.shared.nodes.forget(ino, lookups);
    }

    pub fn getattr(&self, header: Header, ino: InodeId, reply: impl Reply<Attributes>) {
        let (inner, credentials, caller) = self.context(header);
        self.heard_from(header, ino);
        self.serve(Operation::GetAttr, async move {
            let credentials = credentials.await;
            let found = inner.client.getattr(&credentials, ino);
            let found = caller.unless_killed(found).await;
            inner.answer_attr(reply, ino, found).await;
        });
    }

    pub fn setattr(
        &self,
        header: Header,
        ino: InodeId,
        changes: AttrChanges,
        reply: impl Reply<Attributes>,
    ) {
        let (inner, credentials, caller) = self.context(header);
        let (thread, resized) = (header.pid, changes.size_bytes.is_some());
        self.heard_from(header, ino);
        self.serve(Operation::SetAttr, async move {
            let credentials = credentials.await;
            let changed = inner.client.setattr(&credentials, ino, changes);
            let changed = caller.unless_killed(changed).await;
            inner
                .answer_changed_attr(reply, resized, changed, thread)
                .await;
        });
    }

    pub fn readlink(&self, header: Header, ino: InodeId, reply: impl Reply<Vec<Bytes>>) {
        let (client, credentials) = self.asked(header);
        let caller = self.caller(header);
        self.serve(Operation::ReadLink, async move {
            let read = async { client.readlink(&credentials.await, ino).await };
            let target = caller.unless_killed(read).await;
            reply::send(reply, target.map(|target| vec![Bytes::from(target)]));
        });
    }

    /// `mode` includes the file type bits, and the umask has been applied.
    pub fn mknod(
        &self,
        header: Header,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
        rdev: u32,
        reply: impl Reply<Entry>,
    ) {
        let (client, credentials) = self.asked(header);
        let name = convert::name(name);
        self.entry(header, Operation::MakeNode, reply, async move {
            let kind = convert::file_kind(mode)?;
            let mode = convert::permissions(mode, 0);
            client
                .mknod(&credentials.await, parent, &name?, kind, mode, rdev)
                .await
        });
    }

    pub fn mkdir(
        &self,
        header: Header,
        parent: InodeId,
        name: &OsStr,
        mode: u16,
        reply: impl Reply<Entry>,
    ) {
        let (client, credentials) = self.asked(header);
        let name = convert::name(name);
        self.entry(header, Operation::MakeDir, reply, async move {
            client.mkdir(&credentials.await, parent, &name?, mode).await
        });
    }

    pub fn unlink(&self, header: Header, parent: InodeId, name: &OsStr, reply: impl Reply<()>) {
        let (client, credentials) = self.asked(header);
        let name = convert::name(name);
        self.empty(header, Operation::Unlink, reply, async move {
            client.unlink(&credentials.await, parent, &name?).await?;
            Ok(())
        });
    }

    pub fn rmdir(&self, header: Header, parent: InodeId, name: &OsStr, reply: impl Reply<()>) {
        let (client, credentials) = self.asked(header);
        let name = convert::name(name);
        self.empty(header, Operation::RemoveDir, reply, async move {
            client.rmdir(&credentials.await, parent, &name?).await
        });
    }

    pub fn symlink(
        &self,
        header: Header,
        parent: InodeId,
        name: &OsStr,
        target: &[u8],
        reply: impl Reply<Entry>,
    ) {
        let (client, credentials) = self.asked(header);
        let name = convert::name(name);
        let target = target.to_vec();
        self.entry(header, Operation::Symlink, reply, async move {
            client
                .symlink(&credentials.await, parent, &name?, &target)
                .await
        });
    }

    /// `from` and `to` are each a directory and a name in it.
    pub fn rename(
        &self,
        header: Header,
        from: (InodeId, &OsStr),
        to: (InodeId, &OsStr),
        flags: RenameFlags,
        reply: impl Reply<()>,
    ) {
        let (client, credentials) = self.asked(header);
        let (name, new_name) = (convert::name(from.1), convert::name(to.1));
        let (parent, new_parent) = (from.0, to.0);
        self.empty(header, Operation::Rename, reply, async move {
            let mode = convert::rename_mode(flags)?;
            let (name, new_name) = (name?, new_name?);
            let credentials = credentials.await;
            let renamed = client.rename(&credentials, parent, &name, new_parent, &new_name, mode);
            renamed.await?;
            Ok(())
        });
    }

    pub fn link(
        &self,
        header: Header,
        ino: InodeId,
        new_parent: InodeId,
        new_name: &OsStr,
        reply: impl Reply<Entry>,
    ) {
        let (client, credentials) = self.asked(header);
        let name = convert::name(new_name);
        self.entry(header, Operation::Link, reply, async move {
            client
                .link(&credentials.await, ino, new_parent, &name?)
                .await
        });
    }

    pub fn open(&self, header: Header, ino: InodeId, flags: OpenFlags, reply: impl Reply<Opened>) {
        let (inner, credentials, caller) = self.context(header);
        let thread = header.pid;
        self.heard_from(header, ino);
        self.serve(Operation::Open, async move {
            let credentials = credentials.await;
            let opened = inner.open(&credentials, ino, flags, thread);
            reply::send(reply, caller.unless_killed(opened).await);
        });
    }

    pub fn create(
        &self,
        header: Header,
        parent: InodeId,
        name: &OsStr,
        mode: u16,
        flags: OpenFlags,
        reply: impl Reply<Created>,
    ) {
        let (inner, credentials, caller) = self.context(header);
        let name = convert::name(name);
        let asked_at = inner.shared.invalidations.count();
        let thread = header.pid;
        self.serve(Operation::Create, async move {
            let created = async {
                let credentials = credentials.await;
                inner
                    .create(&credentials, parent, &name?, mode, flags)
                    .await
            };
            let created = caller.unless_killed(created).await;
            inner.answer_created(reply, created, asked_at, thread).await;
        });
    }

    /// A read with `paged` set goes into the kernel's pages, not directly to a program.
    pub fn read(
        &self,
        header: Header,
        handle: FileHandle,
        read: Read,
        reply: impl Reply<Vec<Bytes>>,
    ) {
        match self.file(handle) {
            Some(open) => self.serve_read(header, open, read, reply),
            None => reply.answer(Err(Errno::EBADF)),
        }
    }

    pub fn write(
        &self,
        header: Header,
        handle: FileHandle,
        write: Write,
        data: &[u8],
        reply: impl Reply<Written>,
    ) {
        match self.file(handle) {
            Some(open) => self.serve_write(header, open, write, data, reply),
            None => reply.answer(Err(Errno::EBADF)),
        }
    }

    pub fn flush(&self, header: Header, ino: InodeId, handle: FileHandle, reply: impl Reply<()>) {
        let Some(open) = self.file(handle) else {
            return reply.answer(Err(Errno::EBADF));
        };
        self.heard_from(header, ino);
        self.empty(header, Operation::Flush, reply, async move {
            open.file.flush().await
        });
    }

    pub fn fsync(&self, header: Header, handle: FileHandle, reply: impl Reply<()>) {
        let Some(open) = self.file(handle) else {
            return reply.answer(Err(Errno::EBADF));
        };
        self.empty(header, Operation::Fsync, reply, async move {
            open.file.sync().await
        });
    }

    pub fn release(&self, handle: FileHandle, reply: impl Reply<()>) {
        let _observed = self.begin(Operation::Release);
        // `flush` came before, with every `close`.
        self.inner.files.remove(handle.0);
        reply.answer(Ok(()));
    }

    /// `range` is the offset and the length.
    pub fn fallocate(
        &self,
        header: Header,
        ino: InodeId,
        handle: FileHandle,
        range: (u64, u64),
        mode: i32,
        reply: impl Reply<()>,
    ) {
        match self.file(handle) {
            Some(open) => self.serve_fallocate(header, open, ino, range, mode, reply),
            None => reply.answer(Err(Errno::EBADF)),
        }
    }

    pub fn lseek(
        &self,
        header: Header,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: impl Reply<Offset>,
    ) {
        let Some(open) = self.file(handle) else {
            return reply.answer(Err(Errno::EINVAL));
        };
        let caller = self.caller(header);
        self.serve(Operation::Lseek, async move {
            let found = open.seek(offset, whence);
            reply::offset(reply, caller.unless_killed(found).await);
        });
    }

    /// `from` is an open file and an offset; `to` is another one, with its inode.
    pub fn copy_file_range(
        &self,
        header: Header,
        from: (FileHandle, u64),
        to: (InodeId, FileHandle, u64),
        length: u64,
        reply: impl Reply<Written>,
    ) {
        let ((source, source_offset), (ino, destination, destination_offset)) = (from, to);
        let (Some(source), Some(destination)) = (self.file(source), self.file(destination)) else {
            return reply.answer(Err(Errno::EBADF));
        };
        let (inner, caller) = (self.inner.clone(), self.caller(header));
        let thread = header.pid;
        self.serve(Operation::CopyFileRange, async move {
            let copied = source.copy_range(source_offset, &destination, destination_offset, length);
            let copied = caller.unless_killed(copied).await;
            if !matches!(copied, Ok((_, true))) {
                // If more was copied than the answer says, the kernel does not drop the pages of the rest itself.
                inner.forget_changed(ino).await;
            }
            inner
                .answer_written(
                    reply,
                    (ino, destination_offset),
                    copied.map(|(bytes, _)| bytes),
                    CachedWrite::dropped_from(destination_offset),
                    thread,
                )
                .await;
        });
    }

    pub fn opendir(&self, ino: InodeId, reply: impl Reply<Opened>) {
        let _observed = self.begin(Operation::OpenDir);
        let directory = OpenDirectory::new(ino);
        let handle = self.inner.directories.insert(directory);
        reply.answer(Ok(Opened {
            handle: FileHandle(handle),
            flags: FopenFlags::empty(),
        }));
    }

    pub fn readdir(
        &self,
        header: Header,
        ino: InodeId,
        handle: FileHandle,
        offset: u64,
        mut reply: impl NamesReply,
    ) {
        let Some(directory) = self.inner.directories.get(handle.0) else {
            return reply.answer(Err(Errno::EBADF));
        };
        let (inner, credentials, caller) = self.context(header);
        self.serve(Operation::ReadDir, async move {
            let credentials = credentials.await;
            let filled = directory.fill(&inner, &credentials, offset, &mut reply);
            match caller.unless_killed(filled).await {
                Err(error) if inner.is_removed(ino, &error) => reply.answer(Ok(())),
                filled => reply::send(reply, filled),
            }
        });
    }

    pub fn readdirplus(
        &self,
        header: Header,
        ino: InodeId,
        handle: FileHandle,
        offset: u64,
        mut reply: impl EntriesReply,
    ) {
        let Some(directory) = self.inner.directories.get(handle.0) else {
            return reply.answer(Err(Errno::EBADF));
        };
        let (inner, credentials, caller) = self.context(header);
        self.serve(Operation::ReadDirPlus, async move {
            let credentials = credentials.await;
            let filled = directory.fill_plus(&inner, &credentials, offset, &mut reply);
            match caller.unless_killed(filled).await {
                Err(error) if inner.is_removed(ino, &error) => reply.answer(Ok(())),
                filled => reply::send(reply, filled),
            }
        });
    }

    pub fn releasedir(&self, handle: FileHandle, reply: impl Reply<()>) {
        let _observed = self.begin(Operation::ReleaseDir);
        self.inner.directories.remove(handle.0);
        reply.answer(Ok(()));
    }

    pub fn fsyncdir(&self, reply: impl Reply<()>) {
        let _observed = self.begin(Operation::FsyncDir);
        // Operations on names are durable when they are answered. The kernel treats this error as success, and sends
        // no more such requests, for which it would lock the directory.
        reply.answer(Err(Errno::ENOSYS));
    }

    pub fn statfs(&self, header: Header, ino: InodeId, reply: impl Reply<StatFs>) {
        let (inner, credentials, caller) = self.context(header);
        // For the mount as a whole, the kernel asks with the root's inode, or with none.
        let ino = match ino {
            ino if inner.shared.nodes.knows(ino) => ino,
            _ => InodeId::ROOT,
        };
        self.serve(Operation::StatFs, async move {
            let credentials = credentials.await;
            let totals = inner.client.statfs(&credentials, ino);
            reply::send(reply, caller.unless_killed(totals).await);
        });
    }

    pub fn setxattr(
        &self,
        header: Header,
        ino: InodeId,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        reply: impl Reply<()>,
    ) {
        let (client, credentials) = self.asked(header);
        let name = convert::xattr_name(name);
        let (value, mode) = (value.to_vec(), convert::set_xattr_mode(flags));
        self.empty(header, Operation::SetXattr, reply, async move {
            client
                .setxattr(&credentials.await, ino, &name?, &value, mode)
                .await
        });
    }

    /// `size_bytes` is the caller's buffer size; 0 asks for the size of the value.
    pub fn getxattr(
        &self,
        header: Header,
        ino: InodeId,
        name: &OsStr,
        size_bytes: u32,
        reply: impl Reply<Xattr>,
    ) {
        let (client, credentials) = self.asked(header);
        let name = convert::xattr_name(name);
        let caller = self.caller(header);
        self.serve(Operation::GetXattr, async move {
            let value = async { client.getxattr(&credentials.await, ino, &name?).await };
            reply::xattr(reply, size_bytes, caller.unless_killed(value).await);
        });
    }

    /// `size_bytes` is the caller's buffer size; 0 asks for the size of the list.
    pub fn listxattr(
        &self,
        header: Header,
        ino: InodeId,
        size_bytes: u32,
        reply: impl Reply<Xattr>,
    ) {
        let (client, credentials) = self.asked(header);
        let caller = self.caller(header);
        self.serve(Operation::ListXattr, async move {
            let list = async {
                let names = client.listxattr(&credentials.await, ino).await?;
                Ok(convert::xattr_list(&names))
            };
            reply::xattr(reply, size_bytes, caller.unless_killed(list).await);
        });
    }

    pub fn removexattr(&self, header: Header, ino: InodeId, name: &OsStr, reply: impl Reply<()>) {
        let (client, credentials) = self.asked(header);
        let name = convert::xattr_name(name);
        self.empty(header, Operation::RemoveXattr, reply, async move {
            let name = name?;
            // The kernel itself removes a file's capabilities when the file is written to, with the credentials of the
            // writer; programs need `CAP_SETFCAP` for that, which the kernel has checked.
            let credentials = match name.as_slice() {
                b"security.capability" => Credentials::root(),
                _ => credentials.await,
            };
            client.removexattr(&credentials, ino, &name).await
        });
    }
}
