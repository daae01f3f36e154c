//! Path operations, for programs. Every path starts at the root, with or without a leading `/`.

use std::collections::VecDeque;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials, FileKind};

use crate::api::client::Client;
use crate::api::file::{File, OpenFlags};
use crate::error::ClientError;

/// Maximum number of symlinks that one path may lead through (as in Linux).
const SYMLINKS_MAX: usize = 40;
/// Bytes that are read or written at a time.
const PIECE_BYTES: usize = 4 << 20;

impl Client {
    /// Follows a path, symlinks included.
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::NotADirectory`] and others.
    pub async fn resolve(
        &self,
        credentials: &Credentials,
        path: &[u8],
    ) -> Result<Attr, ClientError> {
        Ok(self.follow(credentials, path, true).await?.0)
    }

    /// As [`Client::resolve`], but the last component is not followed if it is a symlink.
    ///
    /// # Errors
    /// As [`Client::resolve`].
    pub async fn resolve_no_follow(
        &self,
        credentials: &Credentials,
        path: &[u8],
    ) -> Result<Attr, ClientError> {
        Ok(self.follow(credentials, path, false).await?.0)
    }

    /// The directory that a path's last component is in, and that component, which need not exist.
    ///
    /// # Errors
    /// As [`Client::resolve`]; [`FsError::InvalidArgument`] when the path has no last component, or
    /// that is `.` or `..`.
    pub async fn resolve_parent(
        &self,
        credentials: &Credentials,
        path: &[u8],
    ) -> Result<(Attr, Name), ClientError> {
        let (directory, last) = split_last(path);
        let name = Name::new(last)?;
        let parent = self.resolve(credentials, directory).await?;
        if parent.kind != FileKind::Directory {
            return Err(FsError::NotADirectory.into());
        }
        Ok((parent, name))
    }

    /// Opens the file at a path; with `create`, it is created with that mode when it is not there, through
    /// symlinks too, as `open(2)` does.
    ///
    /// # Errors
    /// As [`Client::resolve`] and [`Client::open`].
    pub async fn open_path(
        &self,
        credentials: &Credentials,
        path: &[u8],
        flags: OpenFlags,
        create: Option<u16>,
    ) -> Result<File, ClientError> {
        let mut path = path.to_vec();
        let mut found = self.resolve(credentials, &path).await;
        for _ in 0..=SYMLINKS_MAX {
            let mode = match (found, create) {
                (Ok(attr), _) => return self.open(credentials, attr.ino, flags).await,
                (Err(ClientError::Fs(FsError::NotFound)), Some(mode)) => mode,
                (Err(error), _) => return Err(error),
            };
            let (parent, name) = self.resolve_parent(credentials, &path).await?;
            let created = self
                .create_file(credentials, parent.ino, &name, mode, flags)
                .await;
            match created {
                Ok((_, file)) => return Ok(file),
                // Another caller was faster, or it is a symlink to what does not exist.
                Err(ClientError::Fs(FsError::Exists)) => {}
                Err(error) => return Err(error),
            }
            found = self.resolve(credentials, &path).await;
            if found == Err(FsError::NotFound.into()) {
                match self.lookup(credentials, parent.ino, &name).await {
                    Ok(there) if there.kind == FileKind::Symlink => {
                        let target = self.readlink(credentials, there.ino).await?;
                        if target.ends_with(b"/") {
                            return Err(FsError::IsADirectory.into());
                        }
                        if matches!(split_last(&target).1, b"." | b"..") {
                            return Err(FsError::NotFound.into());
                        }
                        path = path_beyond(&path, target);
                    }
                    // It was replaced or removed meanwhile, and is tried again.
                    Ok(_) | Err(ClientError::Fs(FsError::NotFound)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Err(too_many_symlinks())
    }

    /// The content of the file at a path.
    ///
    /// # Errors
    /// As [`Client::open_path`] and [`File::read`].
    pub async fn read_file(
        &self,
        credentials: &Credentials,
        path: &[u8],
    ) -> Result<Vec<u8>, ClientError> {
        let file = self
            .open_path(credentials, path, OpenFlags::READ, None)
            .await?;
        let mut content = Vec::new();
        loop {
            let pieces = file.read_pieces(content.len() as u64, PIECE_BYTES).await?;
            if pieces.is_empty() {
                return Ok(content);
            }
            for piece in pieces {
                content.extend_from_slice(&piece);
            }
        }
    }

    /// Creates or overwrites the file at a path; it is durable when this returns.
    ///
    /// # Errors
    /// As [`Client::open_path`] and [`File::sync`].
    pub async fn write_file(
        &self,
        credentials: &Credentials,
        path: &[u8],
        content: &[u8],
    ) -> Result<(), ClientError> {
        let flags = OpenFlags {
            truncate: true,
            ..OpenFlags::WRITE
        };
        let file = self
            .open_path(credentials, path, flags, Some(0o644))
            .await?;
        let mut offset = 0;
        for piece in content.chunks(PIECE_BYTES) {
            file.write(offset, Bytes::copy_from_slice(piece)).await?;
            offset += piece.len() as u64;
        }
        file.sync().await?;
        file.close().await
    }

    /// Follows a path; returns what it leads to.
    async fn follow(
        &self,
        credentials: &Credentials,
        path: &[u8],
        follow_last: bool,
    ) -> Result<(Attr, Vec<InodeId>), ClientError> {
        let mut todo: VecDeque<Vec<u8>> = components(path);
        // The directories from the root to where we are, for `..`.
        let mut above = Vec::new();
        let mut at = self.getattr(credentials, InodeId::ROOT).await?;
        let mut symlinks = 0;
        while let Some(component) = todo.pop_front() {
            if at.kind != FileKind::Directory {
                return Err(FsError::NotADirectory.into());
            }
            if component == b".." {
                let parent = above.pop().unwrap_or(InodeId::ROOT);
                at = self.getattr(credentials, parent).await?;
                continue;
            }
            let found = self
                .lookup(credentials, at.ino, &Name::new(&component)?)
                .await?;
            if found.kind == FileKind::Symlink && (follow_last || !todo.is_empty()) {
                symlinks += 1;
                if symlinks > SYMLINKS_MAX {
                    return Err(too_many_symlinks());
                }
                let target = self.readlink(credentials, found.ino).await?;
                if target.first() == Some(&b'/') {
                    above.clear();
                    at = self.getattr(credentials, InodeId::ROOT).await?;
                }
                for component in components(&target).into_iter().rev() {
                    todo.push_front(component);
                }
                continue;
            }
            above.push(at.ino);
            at = found;
        }
        Ok((at, above))
    }
}

fn components(path: &[u8]) -> VecDeque<Vec<u8>> {
    path.split(|&byte| byte == b'/')
        .filter(|component| !component.is_empty() && *component != b".")
        .map(<[u8]>::to_vec)
        .collect()
}

fn too_many_symlinks() -> ClientError {
    FsError::InvalidArgument("too many levels of symbolic links".into()).into()
}

/// Splits a path before its last component.
fn split_last(path: &[u8]) -> (&[u8], &[u8]) {
    let trimmed = trim_slashes(path);
    match trimmed.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&trimmed[..at], &trimmed[at + 1..]),
        None => (&b""[..], trimmed),
    }
}

/// The path of the target of a symlink at a path.
fn path_beyond(symlink: &[u8], target: Vec<u8>) -> Vec<u8> {
    if target.first() == Some(&b'/') {
        return target;
    }
    let mut path = split_last(symlink).0.to_vec();
    path.push(b'/');
    path.extend_from_slice(&target);
    path
}

fn trim_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&byte| byte != b'/');
    &path[..end.map_or(0, |last| last + 1)]
}
