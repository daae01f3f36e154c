//! The file system as a program sees it.

use std::{sync::Arc, time::Duration};

use harvestfs_protocol::{
    error::FsError,
    ids::InodeId,
    meta::{AttrChanges, DirEntry, RenameMode, SetXattrMode, StatFs},
    name::Name,
    types::{Attr, Credentials, FileKind},
};

use crate::{
    error::ClientError,
    file::{File, OpenFlags},
    options::ClientOptions,
};

/// What wants to know when the namenode takes back what it granted: the mount, which has to tell
/// the kernel. Called from a blocking thread, one call at a time; the namenode waits for it (at
/// most the length of a lease).
pub trait CacheListener: Send + Sync + 'static {
    /// Attributes and content of an inode may have changed.
    fn invalidate_inode(&self, ino: InodeId);
    /// A name may lead elsewhere, or exist no more, or exist now.
    fn invalidate_entry(&self, parent: InodeId, name: &Name);
    /// Everything may have changed.
    fn invalidate_all(&self);
}

/// A part of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirPage {
    /// The directory's parent (its own for the root).
    pub parent: InodeId,
    /// Entries in name order.
    pub entries: Vec<DirEntry>,
    /// No entry follows.
    pub end: bool,
}

/// A session with a cluster. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    inner: Arc<()>,
}

#[allow(unused_variables)]
impl Client {
    /// Connects and opens a session. Must be called on a tokio runtime, which the client then uses
    /// for its own tasks.
    pub async fn connect(options: ClientOptions) -> Result<Self, ClientError> {
        let _ = options.bind_addr();
        Err(ClientError::Closed)
    }

    /// Flushes all files, gives up all leases and ends the session.
    pub async fn close(&self) -> Result<(), ClientError> {
        let _ = &self.inner;
        Err(ClientError::Closed)
    }

    /// Who is told of invalidations from now on.
    pub fn set_cache_listener(&self, listener: Arc<dyn CacheListener>) {}

    /// How long what the client has cached stays valid if the namenode says nothing more.
    pub fn lease_remaining(&self) -> Duration {
        Duration::ZERO
    }

    /// The largest block in bytes.
    pub fn block_bytes(&self) -> u64 {
        0
    }

    /// As [`Client::lookup`] if the cache knows the answer, without waiting.
    pub fn try_lookup(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Option<Result<Attr, FsError>> {
        None
    }

    /// As [`Client::getattr`] if the cache knows the answer, without waiting.
    pub fn try_getattr(&self, ino: InodeId) -> Option<Attr> {
        None
    }

    /// Finds a name.
    pub async fn lookup(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// Attributes, with what this client has written and not yet committed.
    pub async fn getattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// Changes attributes.
    pub async fn setattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        changes: AttrChanges,
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// Checks permission as `access(2)` does; `R_OK` 4, `W_OK` 2, `X_OK` 1.
    pub async fn access(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        mask: u8,
    ) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Lists a part of a directory in name order, after the name `after`.
    pub async fn readdir(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        after: Option<&Name>,
        max_entries: usize,
        with_attributes: bool,
    ) -> Result<DirPage, ClientError> {
        Err(ClientError::Closed)
    }

    /// The target of a symlink.
    pub async fn readlink(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Vec<u8>, ClientError> {
        Err(ClientError::Closed)
    }

    /// Creates a regular file and opens it; fails when the name is taken.
    pub async fn create_file(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        mode: u16,
        flags: OpenFlags,
    ) -> Result<(Attr, File), ClientError> {
        Err(ClientError::Closed)
    }

    /// Creates a regular file, FIFO, socket or device.
    pub async fn mknod(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        kind: FileKind,
        mode: u16,
        rdev: u32,
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// Creates a directory.
    pub async fn mkdir(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        mode: u16,
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// Creates a symlink.
    pub async fn symlink(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        target: &[u8],
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// Gives a file a further name.
    pub async fn link(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        parent: InodeId,
        name: &Name,
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// Removes a name that is not a directory's. Returns the attributes of what it named.
    pub async fn unlink(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<Option<Attr>, ClientError> {
        Err(ClientError::Closed)
    }

    /// Removes an empty directory.
    pub async fn rmdir(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
    ) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Renames; returns the attributes of what was replaced.
    pub async fn rename(
        &self,
        credentials: &Credentials,
        parent: InodeId,
        name: &Name,
        new_parent: InodeId,
        new_name: &Name,
        mode: RenameMode,
    ) -> Result<Option<Attr>, ClientError> {
        Err(ClientError::Closed)
    }

    /// An extended attribute.
    pub async fn getxattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        name: &[u8],
    ) -> Result<Vec<u8>, ClientError> {
        Err(ClientError::Closed)
    }

    /// The names of all extended attributes.
    pub async fn listxattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Vec<Vec<u8>>, ClientError> {
        Err(ClientError::Closed)
    }

    /// Sets an extended attribute.
    pub async fn setxattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: SetXattrMode,
    ) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Removes an extended attribute.
    pub async fn removexattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        name: &[u8],
    ) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Totals of the file system.
    pub async fn statfs(&self, credentials: &Credentials) -> Result<StatFs, ClientError> {
        Err(ClientError::Closed)
    }

    /// Opens a regular file.
    pub async fn open(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        flags: OpenFlags,
    ) -> Result<File, ClientError> {
        Err(ClientError::Closed)
    }
}
