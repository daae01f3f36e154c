//! What the requests of one mount work on.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use fuser::{
    FileHandle, FopenFlags, INodeNo, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyEntry,
    ReplyWrite,
};
use harvestfs_client::{Client, ClientError, File};
use harvestfs_protocol::{
    error::FsError,
    ids::InodeId,
    meta::{AttrChanges, SetTime},
    name::Name,
    types::{Attr, Credentials, FileKind},
};
use rustix::fs::OFlags;

use crate::{
    convert,
    directory::OpenDirectory,
    errno,
    handles::Handles,
    metrics::Metrics,
    reply::{self, GENERATION},
    shared::Shared,
};

/// Most bytes of one `copy_file_range`; the answer has 32 bits.
const COPY_BYTES_MAX: u64 = 1 << 30;

/// What requests work on; shared with the tasks that serve them.
pub struct Inner {
    /// The cluster.
    pub client: Client,
    /// What the kernel has cached.
    pub shared: Arc<Shared>,
    /// What is measured.
    pub metrics: Arc<Metrics>,
    /// Open files.
    pub files: Handles<OpenFile>,
    /// Open directories.
    pub directories: Handles<OpenDirectory>,
}

/// An open file.
pub struct OpenFile {
    /// What the client knows it as.
    pub file: File,
    /// Whether each write goes to the end, wherever that is by then.
    pub append: bool,
}

impl OpenFile {
    /// Makes a range of another file share the data of a range of this one. Returns how many bytes
    /// there were to share.
    pub async fn copy_range(
        &self,
        offset: u64,
        destination: &Self,
        destination_offset: u64,
        length: u64,
    ) -> Result<u32, ClientError> {
        let size_bytes = self.file.attr().await?.size_bytes;
        let length = length
            .min(COPY_BYTES_MAX)
            .min(size_bytes.saturating_sub(offset));
        if length != 0 {
            self.file
                .clone_range(offset, &destination.file, destination_offset, length)
                .await?;
        }
        Ok(length as u32)
    }
}

impl Inner {
    /// The inode behind a node id.
    pub fn inode(&self, node_id: INodeNo) -> Result<InodeId, FsError> {
        self.shared.nodes.inode(node_id.0).ok_or(FsError::Stale)
    }

    /// The node id to answer a lookup with, and how long the kernel may cache the attributes; see
    /// [`Shared::remember`].
    pub fn remember(&self, attr: &Attr, asked_at: u64) -> (u64, Duration) {
        let lease = self.client.lease_remaining();
        self.shared.remember(attr, asked_at, lease)
    }

    /// Answers with an entry, or that there is none.
    pub fn answer_entry(
        &self,
        reply: ReplyEntry,
        result: Result<Attr, ClientError>,
        asked_at: u64,
    ) {
        match result {
            Ok(attr) => {
                let (node_id, ttl) = self.remember(&attr, asked_at);
                reply.entry_with_ttls(
                    &ttl,
                    &self.shared.entry_ttl(ttl),
                    &convert::attributes(&attr, node_id),
                    GENERATION,
                );
            }
            Err(ClientError::Fs(FsError::NotFound)) => {
                let lease = self.client.lease_remaining();
                reply::no_entry(reply, self.shared.no_entry_ttl(lease));
            }
            Err(error) => reply.error(errno::of(&error)),
        }
    }

    /// Answers with attributes.
    pub fn answer_attr(
        &self,
        reply: ReplyAttr,
        node_id: INodeNo,
        result: Result<Attr, ClientError>,
    ) {
        let ttl = self
            .shared
            .attr_ttl(node_id.0, self.client.lease_remaining());
        reply::attr(reply, node_id, ttl, result);
    }

    /// Answers with attributes that the request changed. The kernel takes them even if it was told to
    /// forget older ones while they were on their way, which it does not with those that it only asked
    /// for. A file has another node id then; of anything else it caches nothing.
    pub fn answer_changed_attr(
        &self,
        reply: ReplyAttr,
        node_id: INodeNo,
        result: Result<Attr, ClientError>,
    ) {
        let regular = |attr: &Attr| attr.kind == FileKind::Regular;
        if result.as_ref().is_ok_and(regular) {
            self.answer_attr(reply, node_id, result);
        } else {
            reply::attr(reply, node_id, Duration::ZERO, result);
        }
    }

    /// Answers with a new file, which is open.
    pub fn answer_created(
        &self,
        reply: ReplyCreate,
        result: Result<(Attr, FileHandle, FopenFlags), ClientError>,
        asked_at: u64,
    ) {
        match result {
            Ok((attr, handle, flags)) => {
                let (node_id, ttl) = self.remember(&attr, asked_at);
                let attr = convert::attributes(&attr, node_id);
                // One time to live serves both, and entries have the shorter one.
                let ttl = self.shared.entry_ttl(ttl);
                reply.created(&ttl, &attr, GENERATION, handle, flags);
            }
            Err(error) => reply.error(errno::of(&error)),
        }
    }

    /// Answers how much was written through a node id.
    pub fn answer_written(
        &self,
        reply: ReplyWrite,
        node_id: INodeNo,
        result: Result<u32, ClientError>,
    ) {
        self.shared.written(node_id.0);
        reply::written(reply, result);
    }

    /// Answers with data.
    pub fn answer_read(&self, reply: ReplyData, result: Result<Vec<Bytes>, ClientError>) {
        if let Ok(pieces) = &result {
            let bytes: usize = pieces.iter().map(Bytes::len).sum();
            self.metrics.read.inc_by(bytes as u64);
        }
        reply::pieces(reply, result);
    }

    /// Changes attributes. With a change time, which is the namenode's to set, the kernel tells its
    /// own idea of the times: after each operation on a file whose writes it caches, and it waits for
    /// the answer.
    pub async fn set_attributes(
        &self,
        credentials: &Credentials,
        node_id: INodeNo,
        changes: AttrChanges,
        with_ctime: bool,
    ) -> Result<Attr, ClientError> {
        let ino = self.inode(node_id)?;
        match changes {
            AttrChanges {
                mode: None,
                uid: None,
                gid: None,
                size_bytes: None,
                atime: None,
                mtime: Some(SetTime::To(mtime)),
                opened_for_writing,
            } if with_ctime => {
                self.client
                    .write_back_mtime(credentials, ino, mtime, opened_for_writing)
                    .await
            }
            changes => {
                let resized = changes.size_bytes.is_some();
                let attr = self.client.setattr(credentials, ino, changes).await?;
                if resized {
                    self.shared.written(node_id.0);
                }
                Ok(attr)
            }
        }
    }

    /// Writes at an offset, or with `append` at the end.
    pub async fn write(
        &self,
        file: &File,
        offset: u64,
        data: Bytes,
        append: bool,
        kill_privileges: bool,
    ) -> Result<(), ClientError> {
        if append {
            file.append(data).await?;
        } else {
            file.write(offset, data).await?;
        }
        if kill_privileges {
            self.clear_privileges(file).await?;
        }
        Ok(())
    }

    /// Set-user-id and set-group-id do not survive a write by others than root.
    async fn clear_privileges(&self, file: &File) -> Result<(), ClientError> {
        let root = Credentials::root();
        let attr = self.client.getattr(&root, file.ino()).await?;
        let mut mode = attr.mode & !0o4000;
        if mode & 0o010 != 0 {
            // Without group execution the bit means mandatory locking, which a write leaves.
            mode &= !0o2000;
        }
        if mode != attr.mode {
            let changes = AttrChanges {
                mode: Some(mode),
                ..AttrChanges::default()
            };
            self.client.setattr(&root, file.ino(), changes).await?;
        }
        Ok(())
    }

    /// Opens a file.
    pub async fn open(
        &self,
        credentials: &Credentials,
        node_id: INodeNo,
        flags: OpenFlags,
    ) -> Result<(FileHandle, FopenFlags), ClientError> {
        let ino = self.inode(node_id)?;
        let flags = convert::open_flags(flags);
        let file = self.client.open(credentials, ino, flags).await?;
        if flags.truncate {
            self.shared.written(node_id.0);
        }
        Ok(self.opened(file, flags.append))
    }

    fn opened(&self, file: File, append: bool) -> (FileHandle, FopenFlags) {
        let handle = FileHandle(self.files.insert(OpenFile { file, append }));
        // A file that another session changed has another node id, so that cached pages are
        // always this file's. Appends are not cached: where they land, the namenode decides.
        let flags = if append {
            FopenFlags::FOPEN_DIRECT_IO
        } else {
            FopenFlags::FOPEN_KEEP_CACHE
        };
        (handle, flags)
    }

    /// Creates a file and opens it, or opens what has the name already.
    pub async fn create(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        mode: u16,
        flags: OpenFlags,
    ) -> Result<(Attr, FileHandle, FopenFlags), ClientError> {
        let exclusive = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::EXCL);
        let open_flags = convert::open_flags(flags);
        loop {
            match self
                .client
                .create_file(credentials, parent, name, mode, open_flags)
                .await
            {
                // The kernel did not find it, but meanwhile another session made it.
                Err(ClientError::Fs(FsError::Exists)) if !exclusive => {}
                created => {
                    let (attr, file) = created?;
                    let (handle, flags) = self.opened(file, open_flags.append);
                    return Ok((attr, handle, flags));
                }
            }
            match self.client.lookup(credentials, parent, name).await {
                // And removed it again; each round needs another session to do both.
                Err(ClientError::Fs(FsError::NotFound)) => {}
                found => {
                    let mut attr = found?;
                    let file = self.client.open(credentials, attr.ino, open_flags).await?;
                    if open_flags.truncate {
                        // The kernel believes a size only of a node id that it does not know.
                        attr = file.attr().await?;
                        self.shared.nodes.changed_elsewhere(attr.ino);
                    }
                    let (handle, flags) = self.opened(file, open_flags.append);
                    return Ok((attr, handle, flags));
                }
            }
        }
    }
}
