//! The file system as a program sees it: connecting, looking things up, opening files. Operations
//! that change the namespace are in `namespace.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::query::{self, Usage};
use harvestfs_protocol::meta::{AttrChanges, MetaReply, StatFs};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::{Attr, Credentials, FileKind};

use crate::api::file::{File, OpenFlags};
use crate::driver::core::Core;
use crate::driver::session::content::ATTR_ATTEMPTS;
use crate::driver::session::holds::Holds;
use crate::driver::session::listener::{CacheListener, Invalidation, Untold};
use crate::engine::cache::permissions::{EXECUTE, READ, permits};
use crate::engine::cache::{DirPage, Entry, Ticket};
use crate::engine::session::holds::Keep;
use crate::engine::write::file::Uncommitted;
use crate::error::ClientError;
use crate::options::ClientOptions;

/// Limit for flushing after the last handle of a client was dropped without closing it.
const DROP_DEADLINE: Duration = Duration::from_secs(30);
/// Attributes with this prefix are computed by the cluster, not stored.
const CLUSTER_XATTR: &[u8] = b"user.harvestfs.";

/// A session with a cluster. Cheap to clone; see the crate's documentation.
///
/// Operations fail with the namenode's error ([`ClientError::Fs`]), with
/// [`ClientError::Unreachable`] when no namenode answers within the time in the options, and after
/// [`Client::close`] with [`ClientError::Closed`].
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    core: Arc<Core>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let core = self.core.clone();
        if core.session.is_closed() {
            return;
        }
        core.session.runtime.clone().spawn(async move {
            let flushed = tokio::time::timeout(DROP_DEADLINE, core.files.flush_and_wait()).await;
            if !matches!(flushed, Ok(Ok(()))) {
                tracing::error!(
                    "data was not written when the last handle of a client was dropped"
                );
            }
            core.session.close().await;
        });
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// Connects and opens a session. Must be called on a multi-threaded tokio runtime, which the
    /// client then uses for its own tasks.
    ///
    /// # Errors
    /// [`ClientError::Connect`] immediately when retrying cannot help, for example because the
    /// certificate is from another cluster; [`ClientError::Unreachable`];
    /// [`FsError::InvalidArgument`] if the options name no namenode.
    pub async fn connect(options: ClientOptions) -> Result<Self, ClientError> {
        let core = Core::connect(options).await?;
        Ok(Self {
            inner: Arc::new(Inner { core }),
        })
    }

    /// Announces [`Client::close`]: from now on, [`File::write_back`] fails when [`File::write`] does.
    pub fn will_close(&self) {
        self.core().files.will_close.store(true, Ordering::Relaxed);
    }

    /// Flushes all files and ends the session, which makes the namenode drop its leases and open
    /// files. From then on, every operation fails with [`ClientError::Closed`].
    ///
    /// # Errors
    /// The error that kept written data from being stored; that data is lost.
    pub async fn close(&self) -> Result<(), ClientError> {
        self.will_close();
        let flushed = self.core().files.flush_and_wait().await;
        self.core().session.close().await;
        flushed
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.inner.core
    }

    /// Sets the listener that is notified of invalidations from now on.
    pub fn set_cache_listener(&self, listener: Arc<dyn CacheListener>) {
        self.core().session.set_listener(listener);
    }

    /// How long the client's cache stays valid without further word from the namenode.
    #[must_use]
    pub fn lease_remaining(&self) -> Duration {
        self.core().session.lease_remaining()
    }

    /// How long the client's answers may be cached without further word from the namenode: not at
    /// all while the outcome of a change is unknown whose caller no longer waits.
    #[must_use]
    pub fn cacheable_for(&self) -> Duration {
        if self.core().session.cache.is_unsettled() {
            return Duration::ZERO;
        }
        self.lease_remaining()
    }

    /// Whether content read from a file may be cached: not while the outcome of a change to the
    /// file is unknown whose caller no longer waits.
    #[must_use]
    pub fn may_cache_content(&self, ino: InodeId) -> bool {
        !self.core().session.cache.is_inode_unsettled(ino)
    }

    /// The maximum size of a block, in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.core().session.block_bytes()
    }

    /// As [`Client::lookup`] if the cache knows the answer, without waiting.
    #[must_use]
    pub fn try_lookup(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Option<Result<Attr, FsError>> {
        let cache = self.core().session.valid_cache()?;
        // Without search permission on the directory, the namenode decides which error it is.
        if !permits(&cache.attr(parent)?, credentials, EXECUTE) {
            return None;
        }
        let ticket = cache.ticket();
        match cache.entry(parent, name)? {
            Entry::Absent => Some(Err(FsError::NotFound)),
            Entry::Found(attr) => self.with_memory(&ticket, attr).map(Ok),
            Entry::FoundInode(_) => None,
        }
    }

    /// Whether the cache knows that a name does not lead, or no longer leads, to an inode.
    #[must_use]
    pub fn leads_elsewhere(&self, parent: InodeId, name: &Name, ino: InodeId) -> bool {
        let cache = self.core().session.valid_cache();
        cache.is_some_and(|cache| cache.leads_elsewhere(parent, name, ino))
    }

    /// As [`Client::getattr`] if the cache knows the answer, without waiting.
    #[must_use]
    pub fn try_getattr(&self, ino: InodeId) -> Option<Attr> {
        let cache = self.core().session.valid_cache()?;
        let ticket = cache.ticket();
        self.with_memory(&ticket, cache.attr(ino)?)
    }

    /// Looks up a name.
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::NotADirectory`], [`FsError::PermissionDenied`] and others.
    pub async fn lookup(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<Attr, ClientError> {
        if let Some(known) = self.try_lookup(credentials, parent, name) {
            return known.map_err(Into::into);
        }
        let session = &self.core().session;
        for _ in 0..ATTR_ATTEMPTS {
            let ticket = session.cache.ticket();
            let op = query::Lookup {
                parent,
                name: name.clone(),
            };
            match session.query(credentials, op).await {
                Ok(MetaReply::Attr(attr)) => {
                    ticket.learn_entry(parent, name, Some(&attr));
                    let ino = attr.ino;
                    if let Some(known) = self.with_memory(&ticket, attr) {
                        return Ok(known);
                    }
                    drop(ticket);
                    match self.getattr(credentials, ino).await {
                        // The inode lost its name meanwhile: the name was removed, or leads to another file.
                        Err(error) if error.is_gone() => {}
                        found => return found,
                    }
                }
                Ok(_) => return Err(ClientError::UnexpectedReply(query::Lookup::NAME)),
                Err(error) => {
                    if error == ClientError::Fs(FsError::NotFound) {
                        ticket.learn_entry(parent, name, None);
                    }
                    return Err(error);
                }
            }
        }
        Err(FsError::Stale.into())
    }

    /// Returns attributes that include what this client has written but not yet committed.
    ///
    /// # Errors
    /// [`FsError::Stale`] when the inode no longer exists, and others.
    pub async fn getattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Attr, ClientError> {
        let core = self.core();
        for _ in 0..ATTR_ATTEMPTS {
            let ticket = core.session.cache.ticket();
            let attr = core.session.attr(credentials, ino).await?;
            if let Some(attr) = self.with_memory(&ticket, attr.clone()) {
                return Ok(attr);
            }
            let is_overtaken = ticket.is_overtaken(ino);
            drop(ticket);
            if let Some(file) = core.files.get(ino).filter(|file| file.has_appends()) {
                let needs_no_flush = !is_overtaken && file.uncommitted().lacks_only_a_try();
                match core.files.flush_if_there_is_room(&file).await {
                    // A caller that only looks must not fail for lack of servers that only the file's writer needs.
                    Err(_) if needs_no_flush => return Ok(self.with_latest(attr)),
                    flushed => flushed?,
                }
            }
        }
        Ok(self.with_latest(core.session.attr(credentials, ino).await?))
    }

    /// Checks permission as `access(2)` does; `R_OK` 4, `W_OK` 2, `X_OK` 1.
    ///
    /// # Errors
    /// [`FsError::PermissionDenied`] and others.
    pub async fn access(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        mask: u8,
    ) -> Result<(), ClientError> {
        let session = &self.core().session;
        if let Some(attr) = session.valid_cache().and_then(|cache| cache.attr(ino))
            && permits(&attr, credentials, mask)
        {
            return Ok(());
        }
        let op = query::Access { ino, mask };
        session.query(credentials, op).await.map(|_| ())
    }

    /// Lists a part of a directory in name order, starting after the name `after`.
    ///
    /// # Errors
    /// [`FsError::NotADirectory`], [`FsError::PermissionDenied`] and others.
    pub async fn readdir(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        after: Option<&Name>,
        max_entries: usize,
        with_attributes: bool,
    ) -> Result<DirPage, ClientError> {
        let core = self.core();
        let mut page = core
            .session
            .list(credentials, ino, after, max_entries)
            .await?;
        for entry in &mut page.entries {
            entry.attr = match entry.attr.take() {
                Some(attr) if with_attributes => Some(self.with_latest(attr)),
                _ => None,
            };
        }
        Ok(page)
    }

    /// Returns the target of a symlink.
    ///
    /// # Errors
    /// [`FsError::InvalidArgument`] for anything else.
    pub async fn readlink(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Vec<u8>, ClientError> {
        let session = &self.core().session;
        let cache = session.valid_cache();
        if let Some(target) = cache.and_then(|cache| cache.link_target(ino)) {
            return Ok(target);
        }
        let ticket = session.cache.ticket();
        match session.query(credentials, query::ReadLink { ino }).await? {
            MetaReply::Bytes(target) => {
                ticket.learn_link_target(ino, &target);
                Ok(target)
            }
            _ => Err(ClientError::UnexpectedReply(query::ReadLink::NAME)),
        }
    }

    /// Returns an extended attribute if the cache knows it or knows that it does not exist, without waiting.
    #[must_use]
    pub fn try_getxattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        name: &[u8],
    ) -> Option<Result<Vec<u8>, FsError>> {
        let cache = self.core().session.valid_cache()?;
        if name.starts_with(CLUSTER_XATTR) || name.starts_with(b"trusted.") {
            return None;
        }
        let is_checked = name.starts_with(b"user.") && !planted::is(Bug::IgnoresCachedModes);
        if is_checked && !permits(&cache.attr(ino)?, credentials, READ) {
            return None;
        }
        let value = cache.xattr(ino, name)?;
        Some(value.ok_or(FsError::NoAttribute))
    }

    /// Returns an extended attribute. `user.harvestfs.locations` names the locations of a file's replicas.
    ///
    /// # Errors
    /// [`FsError::NoAttribute`] and others.
    pub async fn getxattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        name: &[u8],
    ) -> Result<Vec<u8>, ClientError> {
        if let Some(known) = self.try_getxattr(credentials, ino, name) {
            return known.map_err(Into::into);
        }
        let session = &self.core().session;
        let ticket = session.cache.ticket();
        let op = query::GetXattr {
            ino,
            name: name.to_vec(),
        };
        match session.query(credentials, op).await {
            Ok(MetaReply::Bytes(value)) => {
                ticket.learn_xattr(ino, name, Some(&value));
                Ok(value)
            }
            Ok(_) => Err(ClientError::UnexpectedReply(query::GetXattr::NAME)),
            Err(error) => {
                if error == ClientError::Fs(FsError::NoAttribute) {
                    ticket.learn_xattr(ino, name, None);
                }
                Err(error)
            }
        }
    }

    /// Returns the names of all extended attributes.
    ///
    /// # Errors
    /// The errors of the namenode.
    pub async fn listxattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Vec<Vec<u8>>, ClientError> {
        let op = query::ListXattr { ino };
        match self.core().session.query(credentials, op).await? {
            MetaReply::Names(names) => Ok(names),
            _ => Err(ClientError::UnexpectedReply(query::ListXattr::NAME)),
        }
    }

    /// Returns what counts toward a directory's quotas, including everything below it, and its own quotas.
    ///
    /// # Errors
    /// The errors of the namenode.
    pub async fn usage(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Usage, ClientError> {
        let usage = query::GetUsage { ino };
        match self.core().session.query(credentials, usage).await? {
            MetaReply::Usage(usage) => Ok(usage),
            _ => Err(ClientError::UnexpectedReply(query::GetUsage::NAME)),
        }
    }

    /// Returns the totals of the file system, limited by the quotas at and above an inode.
    ///
    /// # Errors
    /// The errors of the namenode.
    pub async fn statfs(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<StatFs, ClientError> {
        match self
            .core()
            .session
            .query(credentials, query::StatFs { ino })
            .await?
        {
            MetaReply::StatFs(statfs) => Ok(statfs),
            _ => Err(ClientError::UnexpectedReply(query::StatFs::NAME)),
        }
    }

    /// As [`Client::open`] if the cache knows enough, without waiting; not with `truncate`.
    #[must_use]
    pub fn try_open(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        flags: OpenFlags,
    ) -> Option<File> {
        let session = &self.core().session;
        let cache = session.valid_cache()?;
        let (attr, _) = cache.content(ino)?;
        let flags = flags.with_implied();
        let allowed =
            attr.kind == FileKind::Regular && permits(&attr, credentials, flags.permissions());
        if flags.truncate || !allowed || !session.holds.lock().open_held(ino, flags.may_read()) {
            return None;
        }
        Some(File::new(self, ino, credentials, flags))
    }

    /// Opens a regular file.
    ///
    /// # Errors
    /// [`FsError::PermissionDenied`], [`FsError::IsADirectory`] and others.
    pub async fn open(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        flags: OpenFlags,
    ) -> Result<File, ClientError> {
        let flags = flags.with_implied();
        if let Some(file) = self.try_open(credentials, ino, flags) {
            return Ok(file);
        }
        let core = self.core();
        let session = &core.session;
        let hold = Hold::begin(&session.holds, ino).await;
        let ticket = session.cache.ticket();
        let op = query::Open {
            ino,
            read: flags.read,
            write: flags.write,
            execute: flags.execute,
        };
        let MetaReply::Opened {
            attr,
            extents,
            end,
            located,
        } = session.query(credentials, op).await?
        else {
            return Err(ClientError::UnexpectedReply(query::Open::NAME));
        };
        core.reads.learn(&located);
        let readable = flags.may_read() || permits(&attr, credentials, READ);
        if end {
            // Further extents would not be from the same moment.
            let extents = session.extents(credentials, ino, extents, end).await?;
            ticket.learn_content(&attr, &extents);
        }
        drop(ticket);
        hold.keep(readable);
        let file = File::new(self, ino, credentials, flags);
        if flags.truncate {
            let changes = AttrChanges {
                size_bytes: Some(0),
                opened_for_writing: true,
                ..AttrChanges::default()
            };
            self.setattr(credentials, ino, changes).await?;
        }
        Ok(file)
    }

    /// Combines attributes that were found since the ticket was taken with what is written but not
    /// committed. Returns `None` if they were overtaken, perhaps by a commit that left nothing in
    /// memory, or if there are appends, queued behind refused ones, that have yet to be tried.
    pub(crate) fn with_memory(&self, ticket: &Ticket, mut attr: Attr) -> Option<Attr> {
        if attr.kind != FileKind::Regular {
            return Some(attr);
        }
        let file = self.core().files.get(attr.ino);
        let uncommitted = file.map_or_else(Uncommitted::default, |file| file.uncommitted());
        // This check comes after the look at the memory: the ticket has seen whatever left it before.
        if ticket.is_overtaken(attr.ino) || !uncommitted.is_definite() {
            return None;
        }
        uncommitted.apply(&mut attr);
        Some(attr)
    }

    /// Returns the attributes of a file after a change that the namenode answered with `changed`: the
    /// result of [`Client::with_memory`], or if that was overtaken, a new answer of the namenode. Falls
    /// back to `changed` if the file was removed since or the namenode cannot be asked: a change that
    /// was made must not fail. `name` is a name that the change gave to the file.
    pub(crate) async fn known_or_queried(
        &self,
        credentials: &Credentials,
        changed: Attr,
        known: Option<Attr>,
        name: Option<(InodeId, &Name)>,
    ) -> Attr {
        if let Some(attr) = known {
            return attr;
        }
        let named = name.map(|(parent, name)| Invalidation::Entry(parent, name.clone()));
        let changes = named.into_iter().chain([Invalidation::Inode(changed.ino)]);
        let untold = Untold::new(&self.core().session, changes.collect());
        let attr = match self.getattr(credentials, changed.ino).await {
            Ok(attr) => attr,
            Err(error) if error.is_gone() => changed,
            // Others may have changed it since: the listener is notified, so that the kernel does not keep this answer.
            Err(_) => return self.with_latest(changed),
        };
        untold.told();
        attr
    }

    /// As [`Client::with_memory`], but never fails: uses what is known of the last commit. For a
    /// file that changes all the time, or a caller that looks at many files or must not wait.
    pub(crate) fn with_latest(&self, mut attr: Attr) -> Attr {
        let core = self.core();
        let file = core.files.get(attr.ino);
        if let Some(uncommitted) = file.map(|file| file.uncommitted()) {
            uncommitted.apply(&mut attr);
        }
        match core.session.cache.attr(attr.ino) {
            Some(known) if known.content_version > attr.content_version => known,
            _ => attr,
        }
    }
}

/// A hold that is released unless the open that needs it succeeds.
struct Hold<'a> {
    holds: &'a Holds,
    ino: InodeId,
    kept: bool,
}

impl<'a> Hold<'a> {
    async fn begin(holds: &'a Holds, ino: InodeId) -> Self {
        holds.begin_open(ino).await;
        Self {
            holds,
            ino,
            kept: false,
        }
    }

    /// Passes the hold to the file handle. `readable`: the namenode permits reading through it.
    fn keep(mut self, readable: bool) {
        if readable {
            self.holds.lock().read_permitted(self.ino);
        }
        self.kept = true;
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.holds.closed(self.ino, Keep::No);
        }
    }
}
