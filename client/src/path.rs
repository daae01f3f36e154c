//! Paths, for programs.

use harvestfs_protocol::{
    ids::InodeId,
    types::{Attr, Credentials},
};

use crate::{
    client::Client,
    error::ClientError,
    file::{File, OpenFlags},
};

/// What [`Client::walk`] finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalkEntry {
    /// Path below the start, `/`-separated; empty for the start itself.
    pub path: Vec<u8>,
    /// Its attributes.
    pub attr: Attr,
}

#[allow(unused_variables)]
impl Client {
    /// Follows a path from the root, symlinks included.
    pub async fn resolve(
        &self,
        credentials: &Credentials,
        path: &[u8],
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// As [`Client::resolve`], but the last component is not followed if it is a symlink.
    pub async fn resolve_no_follow(
        &self,
        credentials: &Credentials,
        path: &[u8],
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// The directory that a path's last component is in, and that component.
    pub async fn resolve_parent(
        &self,
        credentials: &Credentials,
        path: &[u8],
    ) -> Result<(Attr, harvestfs_protocol::name::Name), ClientError> {
        Err(ClientError::Closed)
    }

    /// Opens the file at a path; with `create`, it is created with that mode when it is not there.
    pub async fn open_path(
        &self,
        credentials: &Credentials,
        path: &[u8],
        flags: OpenFlags,
        create: Option<u16>,
    ) -> Result<File, ClientError> {
        Err(ClientError::Closed)
    }

    /// The content of the file at a path.
    pub async fn read_file(
        &self,
        credentials: &Credentials,
        path: &[u8],
    ) -> Result<Vec<u8>, ClientError> {
        Err(ClientError::Closed)
    }

    /// Creates or replaces the file at a path, durable when it returns.
    pub async fn write_file(
        &self,
        credentials: &Credentials,
        path: &[u8],
        content: &[u8],
    ) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Everything at and below an inode, directories before what is in them, names in order.
    pub fn walk(&self, credentials: &Credentials, start: InodeId) -> Walk {
        Walk {
            client: self.clone(),
            credentials: credentials.clone(),
            start,
        }
    }
}

/// A walk over a tree; see [`Client::walk`]. Bounded memory: one page of each open directory.
#[allow(dead_code)]
pub struct Walk {
    client: Client,
    credentials: Credentials,
    start: InodeId,
}

impl Walk {
    /// The next entry; none at the end. After an error the walk goes on behind what failed.
    pub async fn next(&mut self) -> Result<Option<WalkEntry>, ClientError> {
        Err(ClientError::Closed)
    }
}
