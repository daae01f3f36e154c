//! The state that the requests of one mount work on.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fuser::{Errno, FileHandle, OpenFlags};
use harvestfs_client::{Client, ClientError, File};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::AttrChanges;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::{Attr, Credentials, without_set_id};
use rustix::fs::OFlags;

use crate::directory::OpenDirectory;
use crate::handles::Handles;
use crate::metrics::Metrics;
use crate::pages::{CachedWrite, Waiter};
use crate::reply::{self, Attributes, Created, Entry, Opened, Reply, Written};
use crate::shared::Shared;
use crate::{blocking, convert, now};

/// Most bytes of one `copy_file_range`; the answer has 32 bits.
const COPY_BYTES_MAX: u64 = 1 << 30;

/// The state that requests work on; shared with the tasks that serve them.
pub struct Inner {
    /// The client of the cluster.
    pub client: Client,
    /// The state of the kernel's caches.
    pub shared: Arc<Shared>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Open files.
    pub files: Handles<OpenFile>,
    /// Open directories.
    pub directories: Handles<OpenDirectory>,
}

/// An open file.
pub struct OpenFile {
    /// The client's file.
    pub file: File,
    /// Whether each write goes to the end of the file at that time.
    pub append: bool,
}

impl OpenFile {
    /// Finds where data or a hole begins, as `lseek(2)` does; `None` beyond the end, or before the beginning, which
    /// Linux does not distinguish.
    pub async fn seek(&self, offset: i64, whence: i32) -> Result<Option<u64>, ClientError> {
        let Ok(offset) = u64::try_from(offset) else {
            return Ok(None);
        };
        match whence {
            convert::SEEK_DATA => self.file.seek_data(offset).await,
            convert::SEEK_HOLE => self.file.seek_hole(offset).await,
            _ => Err(FsError::InvalidArgument("unknown kind of seek".into()).into()),
        }
    }

    /// Makes a range of another file share the data of a range of this one, limited by this file's size and by
    /// `COPY_BYTES_MAX`. Returns the number of bytes now shared, and whether that is the whole limited range.
    pub async fn copy_range(
        &self,
        offset: u64,
        destination: &Self,
        destination_offset: u64,
        length: u64,
    ) -> Result<(u32, bool), ClientError> {
        let size_bytes = self.file.attr().await?.size_bytes;
        let length = length
            .min(COPY_BYTES_MAX)
            .min(size_bytes.saturating_sub(offset));
        let shared = match length {
            0 => 0,
            _ => {
                self.file
                    .copy_range(offset, &destination.file, destination_offset, length)
                    .await?
            }
        };
        // At most `COPY_BYTES_MAX`.
        Ok((shared as u32, shared == length))
    }
}

/// The kind of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteKind {
    /// By a program, at an offset.
    At(u64),
    /// By the kernel, at an offset, of pages that programs have written to. If that fails, the kernel drops the data.
    Back(u64),
    /// By a program, at the end.
    Append,
}

/// How long the kernel may cache attributes, which are not the file's actual ones unless `settled`.
fn ttl_of(ttl: Duration, settled: bool) -> Duration {
    if settled { ttl } else { Duration::ZERO }
}

/// Whether a file may have set-id bits that a write clears; `false` only if that is known without waiting.
pub fn may_have_privileges(file: &File) -> bool {
    file.try_mode()
        .is_none_or(|mode| without_set_id(mode) != mode)
}

impl Inner {
    /// Counts a lookup, and returns how long the kernel may cache the attributes; see [`Shared::remember`].
    pub fn remember(&self, attr: &Attr, asked_at: u64) -> Duration {
        let lease = self.client.cacheable_for();
        self.shared.remember(attr, asked_at, lease)
    }

    /// Looks up a name. For an inode that the kernel knows by number only, the kernel looks up `.` and `..`.
    pub async fn lookup(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &OsStr,
    ) -> Result<Attr, ClientError> {
        let client = &self.client;
        match name.as_bytes() {
            // The kernel does so for the inode of a file handle that it does not have itself, so nothing here has it
            // open.
            b"." => match client.getattr(credentials, parent).await {
                Ok(attr) if attr.nlink == 0 => Err(FsError::Stale.into()),
                found => found,
            },
            b".." => {
                let page = client.readdir(credentials, parent, None, 1, false).await?;
                client.getattr(credentials, page.parent).await
            }
            _ => {
                client
                    .lookup(credentials, parent, &convert::name(name)?)
                    .await
            }
        }
    }

    /// Whether an error means that a directory that the kernel still has is gone: it is then empty.
    pub fn is_removed(&self, ino: InodeId, error: &ClientError) -> bool {
        error.is_gone() && self.shared.nodes.removed_directory(ino).is_some()
    }

    /// Answers a lookup with an entry, or with a negative entry that the kernel may cache.
    pub async fn answer_lookup(
        &self,
        reply: impl Reply<Entry>,
        result: Result<Attr, ClientError>,
        asked_at: u64,
    ) {
        if let Err(ClientError::Fs(FsError::NotFound)) = result {
            let lease = self.client.cacheable_for();
            let ttl = self.shared.no_entry_ttl(lease);
            return match ttl.is_zero() {
                true => reply.answer(Err(Errno::ENOENT)),
                false => reply.answer(Ok(Entry::none(ttl))),
            };
        }
        self.answer_entry(reply, result, asked_at, None).await;
    }

    /// Answers with an entry; with a `waiter`, one that a request has made, of an inode that the kernel may already
    /// have: the kernel accepts its attributes in any case.
    pub async fn answer_entry(
        &self,
        reply: impl Reply<Entry>,
        result: Result<Attr, ClientError>,
        asked_at: u64,
        waiter: Option<Waiter>,
    ) {
        match result {
            Ok(mut attr) => {
                let settled = self.shared.settle(&mut attr).await;
                let ttl = ttl_of(self.remember(&attr, asked_at), settled);
                if let Some(waiter) = waiter {
                    self.shared.impose(&attr, waiter);
                }
                reply.answer(Ok(Entry {
                    attr: convert::attributes(&attr),
                    attr_ttl: ttl,
                    entry_ttl: self.shared.entry_ttl(ttl),
                }));
            }
            Err(error) => reply::send(reply, Err(error)),
        }
    }

    /// Answers with attributes.
    pub async fn answer_attr(
        &self,
        reply: impl Reply<Attributes>,
        ino: InodeId,
        result: Result<Attr, ClientError>,
    ) {
        let mut ttl = Shared::attr_ttl(self.client.cacheable_for());
        let result = match result {
            Err(error) if error.is_gone() => {
                ttl = Duration::ZERO;
                self.shared.nodes.removed_directory(ino).ok_or(error)
            }
            Ok(mut attr) => {
                ttl = ttl_of(ttl, self.shared.settle(&mut attr).await);
                self.shared.nodes.learn(&attr);
                Ok(attr)
            }
            Err(error) => Err(error),
        };
        let attributes = |attr: Attr| Attributes {
            attr: convert::attributes(&attr),
            ttl,
        };
        reply::send(reply, result.map(attributes));
    }

    /// Answers with attributes that the request changed. The kernel accepts them even if it was told to forget older
    /// ones while they were in flight, unlike attributes that it merely requested; so it is not allowed to cache them.
    pub async fn answer_changed_attr(
        &self,
        reply: impl Reply<Attributes>,
        resized: bool,
        result: Result<Attr, ClientError>,
        thread: u32,
    ) {
        let waiter = Waiter::locking(thread);
        let result = match result {
            Ok(attr) if resized => {
                // The kernel drops pages itself in this case.
                if let Some(pages) = self.shared.nodes.pages(attr.ino) {
                    pages.resize(attr.size_bytes, waiter, now());
                }
                Ok(attr)
            }
            Ok(mut attr) => {
                self.shared.settle(&mut attr).await;
                self.shared.nodes.learn(&attr);
                self.shared.impose(&attr, waiter);
                Ok(attr)
            }
            Err(error) => Err(error),
        };
        let attributes = |attr: Attr| Attributes {
            attr: convert::attributes(&attr),
            ttl: Duration::ZERO,
        };
        reply::send(reply, result.map(attributes));
    }

    /// Answers with a file that was created and is open.
    pub async fn answer_created(
        &self,
        reply: impl Reply<Created>,
        result: Result<(Attr, Opened), ClientError>,
        asked_at: u64,
        thread: u32,
    ) {
        match result {
            Ok((mut attr, opened)) => {
                let settled = self.shared.settle(&mut attr).await;
                let ttl = ttl_of(self.remember(&attr, asked_at), settled);
                // When it was opened, the kernel was not known to have it.
                if let Some(pages) = self.shared.nodes.pages(attr.ino)
                    && !planted::is(Bug::KeepsPagesOfCreated)
                {
                    pages.opened();
                }
                // The file may have existed already.
                let waiter = Waiter::not_locking(thread);
                self.shared.impose(&attr, waiter);
                // One time to live serves for both, and entries have the shorter one.
                let ttl = self.shared.entry_ttl(ttl);
                let entry = Entry {
                    attr: convert::attributes(&attr),
                    attr_ttl: ttl,
                    entry_ttl: ttl,
                };
                reply.answer(Ok(Created { entry, opened }));
            }
            Err(error) => reply::send(reply, Err(error)),
        }
    }

    /// Makes the kernel forget what it has cached of an inode that a request has changed, or may have, if the answer
    /// does not reflect that.
    pub async fn forget_changed(&self, ino: InodeId) {
        let shared = self.shared.clone();
        blocking::run(async move { shared.changed_elsewhere(ino).await }).await;
    }

    /// Answers a thread with the number of bytes written, at the offset where the kernel assumes them to be.
    pub async fn answer_written(
        &self,
        reply: impl Reply<Written>,
        (ino, offset): (InodeId, u64),
        result: Result<u32, ClientError>,
        cached: CachedWrite,
        thread: u32,
    ) {
        if let Ok(written) = &result {
            let end = offset.saturating_add((*written).into());
            self.shared.wrote(ino, end, cached, thread).await;
        }
        reply::send(reply, result.map(Written));
    }

    /// Answers with data.
    pub fn answer_read(
        &self,
        reply: impl Reply<Vec<Bytes>>,
        result: Result<Vec<Bytes>, ClientError>,
    ) {
        if let Ok(pieces) = &result {
            let bytes: usize = pieces.iter().map(Bytes::len).sum();
            self.metrics.read.inc_by(bytes as u64);
        }
        reply::send(reply, result);
    }

    /// Writes; with `kill_privileges`, on behalf of a user whose write clears set-id bits. Such a write can fail only
    /// before any of the data is accepted: a program repeats a failed write, and would have the data in the file
    /// twice.
    pub async fn write(
        &self,
        file: &File,
        kind: WriteKind,
        data: Bytes,
        kill_privileges: bool,
    ) -> Result<(), ClientError> {
        if kill_privileges {
            self.clear_privileges(file).await?;
        }
        match (kind, kill_privileges) {
            (WriteKind::Back(offset), _) => file.write_back(offset, data).await,
            (WriteKind::At(offset), true) => file.write_unprivileged(Some(offset), data).await,
            (WriteKind::Append, true) => file.write_unprivileged(None, data).await,
            (WriteKind::At(offset), false) => file.write(offset, data).await,
            (WriteKind::Append, false) => file.append(data).await,
        }
    }

    /// Clears set-user-id and set-group-id, which do not survive a write by users other than root. The commit of the
    /// written data clears them; if they are known, they are cleared immediately, and in the kernel's attributes too.
    async fn clear_privileges(&self, file: &File) -> Result<(), ClientError> {
        // Without a lease the namenode may be unreachable for long, and the kernel has no attributes that could be
        // stale.
        let lease = self.client.lease_remaining();
        if lease.is_zero() {
            return Ok(());
        }
        let ino = file.ino();
        // If the mode cannot be read, the file may have such bits.
        if let Ok(Ok(mode)) = tokio::time::timeout(lease, file.mode()).await {
            let left = without_set_id(mode);
            if left == mode {
                return Ok(());
            }
            let changes = AttrChanges {
                mode: Some(left),
                ..AttrChanges::default()
            };
            let root = Credentials::root();
            self.client.setattr(&root, ino, changes).await?;
        }
        let shared = self.shared.clone();
        blocking::run(async move { shared.forget_attributes(ino).await }).await;
        Ok(())
    }

    /// Opens a file.
    pub async fn open(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        flags: OpenFlags,
        thread: u32,
    ) -> Result<Opened, ClientError> {
        let flags = convert::open_flags(flags);
        let file = self.client.open(credentials, ino, flags).await?;
        if flags.truncate
            && let Some(pages) = self.shared.nodes.pages(ino)
        {
            let waiter = Waiter::not_locking(thread);
            pages.resize(0, waiter, now());
        }
        Ok(self.opened(file, flags))
    }

    fn opened(&self, file: File, flags: harvestfs_client::OpenFlags) -> Opened {
        let pages = self.shared.nodes.pages(file.ino());
        let are_old = pages.is_none_or(|pages| {
            pages.opened();
            pages.are_old()
        });
        let may_keep_pages = !are_old && !self.client.cacheable_for().is_zero();
        let append = flags.append;
        let handle = FileHandle(self.files.insert(OpenFile { file, append }));
        let flags = convert::fopen_flags(flags, may_keep_pages);
        Opened { handle, flags }
    }

    /// Creates a file and opens it, or opens an existing file of that name.
    pub async fn create(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        mode: u16,
        flags: OpenFlags,
    ) -> Result<(Attr, Opened), ClientError> {
        let exclusive = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::EXCL);
        let open_flags = convert::open_flags(flags);
        loop {
            match self
                .client
                .create_file(credentials, parent, name, mode, open_flags)
                .await
            {
                // The kernel did not find it, but in the meantime another session has created it.
                Err(ClientError::Fs(FsError::Exists)) if !exclusive => {}
                created => {
                    let (attr, file) = created?;
                    return Ok((attr, self.opened(file, open_flags)));
                }
            }
            match self.client.lookup(credentials, parent, name).await {
                // And another session has removed it again; each round requires another session to do both.
                Err(ClientError::Fs(FsError::NotFound)) => {}
                found => {
                    let mut attr = found?;
                    let file = self.client.open(credentials, attr.ino, open_flags).await?;
                    if open_flags.truncate {
                        // The file may have other names, and the caller may not wait for the answer.
                        self.forget_changed(attr.ino).await;
                        attr = file.attr().await?;
                    }
                    return Ok((attr, self.opened(file, open_flags)));
                }
            }
        }
    }
}
