//! Trees of which a user may not see everything.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, anyhow};
use harvestfs_client::{ClientError, Walk, WalkEntry};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::FileKind;

use super::{Files, below, names};

/// A walk over a tree that says which directories may not be listed, and goes on behind them.
pub(super) struct Listing<'a> {
    files: &'a Files,
    walk: Walk,
    /// The path where it starts.
    start: OsString,
    /// The directory that it lists, below the start.
    directory: Vec<u8>,
}

impl Files {
    /// Everything at and below an inode that is found at a path.
    pub(super) fn listing(&self, path: &OsString, start: InodeId) -> Listing<'_> {
        Listing {
            files: self,
            walk: self.client.walk(&self.credentials, start),
            start: path.clone(),
            directory: Vec::new(),
        }
    }

    /// Says of a directory that it may not be listed. The command goes on, and fails at its end.
    pub(super) fn cannot_list(&self, path: &[u8], error: &ClientError) {
        let path = names::harmless(path);
        self.could_not(&anyhow!("cannot list {path}: {error}"));
    }
}

impl Listing<'_> {
    /// The next entry; none at the end.
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

/// The directory that a walk lists behind an entry. If it was the last one of its directory, that is one above.
fn directory_of(entry: &WalkEntry) -> Vec<u8> {
    if entry.attr.kind == FileKind::Directory {
        return entry.path.clone();
    }
    let slash = entry.path.iter().rposition(|&byte| byte == b'/');
    entry.path[..slash.unwrap_or(0)].to_vec()
}
