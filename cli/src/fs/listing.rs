//! Walks trees that a user may be unable to list completely.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, anyhow};
use harvestfs_client::{ClientError, Walk, WalkEntry};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::FileKind;

use super::{Files, below, names};

/// A walk over a tree that reports directories that cannot be listed, and continues after them.
pub(super) struct Listing<'a> {
    files: &'a Files,
    walk: Walk,
    /// The path at which it starts.
    start: OsString,
    /// The directory being listed, relative to the start.
    directory: Vec<u8>,
}

impl Files {
    /// Walks everything at and below an inode, which was found at `path`.
    pub(super) fn listing(&self, path: &OsString, start: InodeId) -> Listing<'_> {
        Listing {
            files: self,
            walk: self.client.walk(&self.credentials, start),
            start: path.clone(),
            directory: Vec::new(),
        }
    }

    /// Reports a directory that cannot be listed. The command continues, and fails at its end.
    pub(super) fn cannot_list(&self, path: &[u8], error: &ClientError) {
        let path = names::harmless(path);
        self.could_not(&anyhow!("cannot list {path}: {error}"));
    }
}

impl Listing<'_> {
    /// The next entry; `None` at the end.
    pub async fn next(&mut self) -> anyhow::Result<Option<WalkEntry>> {
        loop {
            let found = self.walk.next().await;
            let path = || below(self.start.as_bytes(), &self.directory);
            match found {
                Err(error @ ClientError::Fs(FsError::PermissionDenied)) => {
                    self.files.cannot_list(&path(), &error);
                }
                found => {
                    let shown = || String::from_utf8_lossy(&path()).into_owned();
                    let entry = found.with_context(shown)?;
                    if let Some(entry) = &entry {
                        self.directory = directory_of(entry);
                    }
                    return Ok(entry);
                }
            }
        }
    }
}

/// The directory that a walk lists after an entry. After the last entry of a directory, it is actually one further up.
fn directory_of(entry: &WalkEntry) -> Vec<u8> {
    if entry.attr.kind == FileKind::Directory {
        return entry.path.clone();
    }
    let slash = entry.path.iter().rposition(|&byte| byte == b'/');
    entry.path[..slash.unwrap_or(0)].to_vec()
}
