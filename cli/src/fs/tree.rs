//! `harvestfs fs` commands that change the directory tree: `cp`, `mv`, `rm`, `mkdir`.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, bail};
use harvestfs_client::{ClientError, File, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::ENTRIES_PER_REPLY_MAX;
use harvestfs_protocol::meta::RenameMode;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials, FileKind};

use super::failures::OfItsPath;
use super::local::{DIRECTORY_BITS, FILE_BITS};
use super::unfinished::{Half, beside};
use super::{Files, Target, below, trash};

/// How `fs rm` removes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Removal {
    /// Also removes directories, with everything below them.
    pub recursive: bool,
    /// Does not fail if the path does not exist.
    pub force: bool,
    /// Removes permanently.
    pub skip_trash: bool,
}

/// The permissions that the owner of a directory needs to create something in it.
const OWNER_BITS: u16 = 0o700;
/// The sticky bit: in such a directory, only the owner of a file or of the directory can replace the file.
const STICKY: u16 = 0o1000;

fn exists(target: &Target) -> String {
    format!("{target} exists; replace it with -f")
}

impl Files {
    pub(super) async fn cp(
        &self,
        source: &OsString,
        destination: &OsString,
        recursive: bool,
        replace: bool,
    ) -> anyhow::Result<()> {
        let from = self.find(source).await?;
        let target = self.place_for(source, destination).await?;
        if from.kind == FileKind::Directory {
            if !recursive {
                bail!(
                    "{} is a directory; copy it with -r",
                    source.to_string_lossy()
                );
            }
            if self.is_within(target.parent, from.ino).await? {
                bail!(
                    "cannot copy {} into itself, to {target}",
                    source.to_string_lossy()
                );
            }
            return self.clone_entries(source, from.ino, target, replace).await;
        }
        self.clone_file(&from, &target, replace).await
    }

    /// Whether `directory` is `other` or is below it.
    pub(super) async fn is_within(
        &self,
        directory: InodeId,
        other: InodeId,
    ) -> Result<bool, ClientError> {
        // As root, since walking up must not require permission to list the directories.
        let root = Credentials::root();
        let mut at = directory;
        while at != other {
            let parent = self.client.readdir(&root, at, None, 1, false).await?.parent;
            if parent == at {
                return Ok(false);
            }
            at = parent;
        }
        Ok(true)
    }

    async fn clone_entries(
        &self,
        source: &OsString,
        from: InodeId,
        top: Target,
        replace: bool,
    ) -> anyhow::Result<()> {
        let mut directories = HashMap::new();
        let mut walk = self.listing(source, from);
        while let Some(entry) = walk.next().await? {
            let (above, own) = match entry.path.iter().rposition(|&byte| byte == b'/') {
                Some(slash) => (&entry.path[..slash], &entry.path[slash + 1..]),
                None => (&[][..], &entry.path[..]),
            };
            let target = if own.is_empty() {
                top.clone()
            } else {
                let parent = directories.get(above).copied();
                let parent = parent.context("a walk names directories before what is in them")?;
                Target {
                    parent,
                    name: Name::new(own)?,
                    path: below(&top.path, &entry.path),
                }
            };
            match entry.attr.kind {
                FileKind::Directory => {
                    let mode = entry.attr.permission_bits() & !self.umask;
                    let directory = self.directory(&target, mode).await?;
                    if directory == from {
                        bail!("{target} is the same directory");
                    }
                    directories.insert(entry.path, directory);
                }
                FileKind::Symlink => {
                    let points_to = self
                        .client
                        .readlink(&self.credentials, entry.attr.ino)
                        .await?;
                    self.make_symlink(&target, &points_to, replace).await?;
                }
                FileKind::Regular => {
                    self.clone_file(&entry.attr, &target, replace).await?;
                }
                kind => {
                    let mode = entry.attr.permission_bits() & FILE_BITS & !self.umask;
                    let rdev = entry.attr.rdev;
                    self.make(&target, replace, async |name| {
                        self.client
                            .mknod(&self.credentials, target.parent, name, kind, mode, rdev)
                            .await
                    })
                    .await?;
                }
            }
        }
        Ok(())
    }

    pub(super) async fn make_symlink(
        &self,
        target: &Target,
        points_to: &[u8],
        replace: bool,
    ) -> anyhow::Result<()> {
        self.make(target, replace, async |name| {
            self.client
                .symlink(&self.credentials, target.parent, name, points_to)
                .await
        })
        .await
    }

    /// Creates an entry that is not a directory and has no content, replacing an existing one if `replace` is set.
    async fn make(
        &self,
        target: &Target,
        replace: bool,
        make: impl AsyncFn(&Name) -> Result<Attr, ClientError>,
    ) -> anyhow::Result<()> {
        let context = || format!("cannot make {target}");
        match make(&target.name).await {
            Err(ClientError::Fs(FsError::Exists)) if replace => {}
            Err(ClientError::Fs(FsError::Exists)) => bail!(exists(target)),
            made => return made.map(drop).with_context(context),
        }
        self.make_whole(target, replace, async |name| {
            make(name).await.map(drop).with_context(context)
        })
        .await
    }

    /// Creates a file with the content that `fill` writes, durable when this returns. With `replace`, the complete file
    /// replaces an existing one, unless that is the one being copied.
    pub(super) async fn make_file(
        &self,
        target: &Target,
        mode: u16,
        replace: bool,
        copied: Option<InodeId>,
        fill: impl AsyncFnOnce(&File) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.refuse_early(target, replace, copied).await?;
        self.make_whole(target, replace, async |name| {
            let flags = OpenFlags::READ_WRITE;
            let created = self
                .client
                .create_file(&self.credentials, target.parent, name, mode, flags)
                .await;
            let (_, file) = created.with_context(|| format!("cannot make {target}"))?;
            fill(&file).await?;
            file.close().await?;
            Ok(())
        })
        .await
    }

    /// Refuses, before any content is copied, a copy that could not get its name in the end.
    async fn refuse_early(
        &self,
        target: &Target,
        replace: bool,
        copied: Option<InodeId>,
    ) -> anyhow::Result<()> {
        let found = self
            .client
            .lookup(&self.credentials, target.parent, &target.name)
            .await;
        let there = match found {
            Err(ClientError::Fs(FsError::NotFound)) => return Ok(()),
            found => found.with_context(|| format!("cannot make {target}"))?,
        };
        if !replace {
            bail!(exists(target));
        }
        // The target may be a hard link to the source.
        if Some(there.ino) == copied {
            bail!("{target} is the same file");
        }
        if there.kind == FileKind::Directory {
            bail!("cannot replace {target}: it is a directory");
        }
        let directory = self.client.getattr(&self.credentials, target.parent).await;
        let directory = directory.with_context(|| format!("cannot replace {target}"))?;
        let uid = self.credentials.uid;
        if directory.mode & STICKY != 0 && uid != 0 && uid != directory.uid && uid != there.uid {
            let refused: Result<(), ClientError> = Err(FsError::NotPermitted.into());
            return refused.with_context(|| {
                format!("cannot replace {target}, which is another user's, in a sticky directory")
            });
        }
        Ok(())
    }

    /// Creates something under a temporary name, and renames it once it is complete. An existing file of the final name
    /// is kept until then, and remains if the copy fails.
    async fn make_whole(
        &self,
        target: &Target,
        replace: bool,
        make: impl AsyncFnOnce(&Name) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let parent = target.parent;
        let random = rand::random::<u64>();
        let temporary = Name::new(format!(".harvestfs-copy.{random:016x}.tmp").as_bytes())?;
        // Recorded before the request: a signal may arrive before the answer.
        *self.half.borrow_mut() = Some(Half {
            parent,
            name: temporary.clone(),
            path: beside(&target.path, &temporary),
        });
        make(&temporary).await?;
        let mode = if replace {
            RenameMode::Replace
        } else {
            RenameMode::NoReplace
        };
        let renamed = self
            .client
            .rename(
                &self.credentials,
                parent,
                &temporary,
                parent,
                &target.name,
                mode,
            )
            .await;
        match renamed {
            // Something has taken the name in the meantime.
            Err(ClientError::Fs(FsError::Exists)) => bail!(exists(target)),
            renamed => renamed.with_context(|| format!("cannot make {target}"))?,
        };
        *self.half.borrow_mut() = None;
        Ok(())
    }

    /// Creates a directory for a copy, or finds an existing one. A new one is accessible to its owner until
    /// the command ends: see [`Files::finish`].
    pub(super) async fn directory(&self, target: &Target, mode: u16) -> anyhow::Result<InodeId> {
        let Target { parent, name, .. } = target;
        let mode = mode & DIRECTORY_BITS;
        let created = self
            .client
            .mkdir(&self.credentials, *parent, name, mode | OWNER_BITS)
            .await;
        match created {
            Err(ClientError::Fs(FsError::Exists)) => {
                let found = self.client.lookup(&self.credentials, *parent, name).await?;
                if found.kind != FileKind::Directory {
                    bail!("{target} exists and is not a directory");
                }
                Ok(found.ino)
            }
            created => {
                let attr = created.with_context(|| format!("cannot make {target}"))?;
                let added = OWNER_BITS & !mode;
                if added != 0 {
                    // It may have inherited the set-group-id bit of its parent.
                    let finished = (attr.ino, attr.permission_bits() & !added);
                    self.made.borrow_mut().push(finished);
                }
                Ok(attr.ino)
            }
        }
    }

    async fn clone_file(&self, from: &Attr, target: &Target, replace: bool) -> anyhow::Result<()> {
        let source = self
            .client
            .open(&self.credentials, from.ino, OpenFlags::READ)
            .await?;
        let mode = from.permission_bits() & FILE_BITS & !self.umask;
        self.make_file(target, mode, replace, Some(from.ino), async |copy| {
            source.clone_range(0, copy, 0, u64::MAX).await?;
            Ok(())
        })
        .await
    }

    pub(super) async fn mv(&self, source: &OsString, destination: &OsString) -> anyhow::Result<()> {
        let (parent, name) = self.parent_of(source).await?;
        let target = self.place_for(source, destination).await?;
        self.client
            .rename(
                &self.credentials,
                parent,
                &name,
                target.parent,
                &target.name,
                RenameMode::Replace,
            )
            .await
            .with_context(|| format!("cannot move {} to {target}", source.to_string_lossy()))?;
        Ok(())
    }

    pub(super) async fn rm(&self, path: &OsString, how: Removal) -> anyhow::Result<()> {
        let shown = path.to_string_lossy();
        let context = || format!("cannot remove {shown}");
        let found = self
            .client
            .resolve_no_follow(&self.credentials, path.as_bytes())
            .await;
        let attr = match found {
            Err(ClientError::Fs(FsError::NotFound)) if how.force => return Ok(()),
            found => found.with_context(context)?,
        };
        let is_directory = attr.kind == FileKind::Directory;
        if is_directory && !how.recursive {
            let refused: Result<(), ClientError> = Err(FsError::IsADirectory.into());
            return refused.with_context(|| format!("cannot remove {shown} without -r"));
        }
        let (parent, name) = self.parent_of(path).await?;
        if !how.skip_trash && !trash::is_in_trash(path.as_bytes()) {
            let retention_s = trash::RETENTION_S;
            self.client
                .remove_to_trash(&self.credentials, parent, &name, retention_s)
                .await
                .with_context(context)?;
            let with_what = if is_directory {
                " with everything below it, snapshots included"
            } else {
                ""
            };
            println!(
                "{shown} is in the trash{with_what}; `harvestfs fs trash ls` shows until when"
            );
            return Ok(());
        }
        if !is_directory {
            self.client
                .unlink(&self.credentials, parent, &name)
                .await
                .with_context(context)?;
            return Ok(());
        }
        // Checked before anything is removed: snapshots would keep the directory, emptied.
        let snapshots = self.removals_of_snapshots_below(attr.ino, path).await;
        if let Some(commands) = snapshots.with_context(context)? {
            bail!(OfItsPath(format!(
                "nothing in {shown} was removed, because snapshots keep it: first {commands}"
            )));
        }
        let mut removed = self.empty(attr.ino).await;
        if removed.is_ok() {
            removed = self.client.rmdir(&self.credentials, parent, &name).await;
        }
        if !matches!(removed, Err(ClientError::Fs(FsError::NotEmpty))) {
            return removed.with_context(context);
        }
        let snapshots = self.removals_of_snapshots_below(attr.ino, path).await;
        bail!(OfItsPath(match snapshots.with_context(context)? {
            Some(commands) => {
                format!("{shown} got snapshots while it was removed, and they keep it: {commands}")
            }
            None => format!("something was made in {shown} while it was removed; try again"),
        }))
    }

    /// Removes everything below a directory, deepest first.
    pub(super) async fn empty(&self, directory: InodeId) -> Result<(), ClientError> {
        // The path to the directory that is being emptied: each parent, with the name of its child.
        let mut above: Vec<(InodeId, Name)> = Vec::new();
        let mut current = directory;
        loop {
            let page = self
                .client
                .readdir(
                    &self.credentials,
                    current,
                    None,
                    ENTRIES_PER_REPLY_MAX,
                    false,
                )
                .await?;
            let mut descended = false;
            for entry in &page.entries {
                if entry.kind == FileKind::Directory {
                    above.push((current, entry.name.clone()));
                    current = entry.ino;
                    descended = true;
                    break;
                }
                self.client
                    .unlink(&self.credentials, current, &entry.name)
                    .await?;
            }
            if descended || !page.end {
                continue;
            }
            let Some((parent, name)) = above.pop() else {
                return Ok(());
            };
            self.client.rmdir(&self.credentials, parent, &name).await?;
            current = parent;
        }
    }

    pub(super) async fn mkdir(&self, path: &OsString, parents: bool) -> anyhow::Result<()> {
        let mode = 0o755 & !self.umask;
        if !parents {
            let (parent, name) = self.parent_of(path).await?;
            self.client
                .mkdir(&self.credentials, parent, &name, mode)
                .await
                .with_context(|| format!("cannot make {}", path.to_string_lossy()))?;
            return Ok(());
        }
        let mut directory = InodeId::ROOT;
        let mut so_far = Vec::new();
        let components = path.as_bytes().split(|&byte| byte == b'/');
        for component in components.filter(|c| !c.is_empty() && *c != b".") {
            let name = Name::new(component)?;
            so_far.push(b'/');
            so_far.extend_from_slice(component);
            let made = match self
                .client
                .mkdir(&self.credentials, directory, &name, mode)
                .await
            {
                // A symlink to a directory is accepted, too.
                Err(ClientError::Fs(FsError::Exists)) => {
                    self.client.resolve(&self.credentials, &so_far).await
                }
                made => made,
            };
            let made = made.with_context(|| format!("cannot make {}", path.to_string_lossy()))?;
            if made.kind != FileKind::Directory {
                bail!(OfItsPath(format!(
                    "{} exists and is not a directory",
                    String::from_utf8_lossy(&so_far)
                )));
            }
            directory = made.ino;
        }
        Ok(())
    }
}
