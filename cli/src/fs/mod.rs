//! `harvestfs fs`: files without a mount.

mod list;
mod quota;
mod snapshot;
mod transfer;
mod trash;

use std::{ffi::OsString, io::Write, os::unix::ffi::OsStrExt, path::PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use harvestfs_client::{Client, ClientError, OpenFlags};
use harvestfs_protocol::{
    error::FsError,
    ids::InodeId,
    meta::RenameMode,
    name::Name,
    request_id::RequestId,
    types::{Attr, Credentials, FileKind},
};

use crate::{
    cluster::{self, ClusterArgs},
    units::{self, Size},
};

/// `harvestfs fs`
#[derive(Debug, Args)]
pub struct FsArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(subcommand)]
    command: FsCommand,
}

#[derive(Debug, Subcommand)]
enum FsCommand {
    /// List a directory.
    Ls(list::LsArgs),
    /// Show the attributes of a file or directory.
    Stat {
        /// Path in the cluster.
        path: OsString,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print files.
    Cat {
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
    },
    /// Copy files from this machine into the cluster.
    Put {
        /// Files and, with -r, directories; `-` is standard input.
        #[arg(required = true)]
        sources: Vec<PathBuf>,
        /// Path in the cluster: an existing directory, or the new name.
        destination: OsString,
        /// Copy directories with everything below.
        #[arg(short, long)]
        recursive: bool,
    },
    /// Copy files from the cluster to this machine.
    Get {
        /// Paths in the cluster.
        #[arg(required = true)]
        sources: Vec<OsString>,
        /// An existing directory, or the new name.
        destination: PathBuf,
        /// Copy directories with everything below.
        #[arg(short, long)]
        recursive: bool,
    },
    /// Copy within the cluster; the copy shares the data.
    Cp {
        /// Path in the cluster.
        source: OsString,
        /// Path in the cluster: an existing directory, or the new name.
        destination: OsString,
        /// Copy directories with everything below.
        #[arg(short, long)]
        recursive: bool,
    },
    /// Rename or move.
    Mv {
        /// Path in the cluster.
        source: OsString,
        /// Path in the cluster: an existing directory, or the new name.
        destination: OsString,
    },
    /// Remove, to the trash unless told otherwise.
    Rm {
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
        /// Remove directories with everything below.
        #[arg(short, long)]
        recursive: bool,
        /// Say nothing of what does not exist.
        #[arg(short, long)]
        force: bool,
        /// Remove for good, except where a directory keeps what is removed from it.
        #[arg(long)]
        skip_trash: bool,
    },
    /// Show, restore or purge what was removed to the trash.
    #[command(subcommand)]
    Trash(trash::TrashCommand),
    /// Keep a directory as it is now; show, compare or remove what was kept.
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Make directories.
    Mkdir {
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
        /// Make the directories above too, and accept existing ones.
        #[arg(short, long)]
        parents: bool,
    },
    /// Show what is below a directory and its quotas, or set these.
    Quota(quota::QuotaArgs),
    /// Show how much space there is, as far as quotas leave it.
    Df {
        /// Path in the cluster.
        #[arg(default_value = "/")]
        path: OsString,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show where the replicas of a file's blocks are.
    Locations {
        /// Path in the cluster.
        path: OsString,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Get the space back that mostly unused blocks take: what files still use of them is copied into
    /// new blocks. Mounts do this in the background.
    Compact {
        /// Most bytes to copy per second.
        #[arg(long, default_value = "64MiB", value_name = "SIZE")]
        rate: Size,
    },
}

/// Runs `harvestfs fs`.
///
/// # Errors
/// When the operation fails.
pub fn run(args: &FsArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(RequestId::random().scope(async {
        let files = Files {
            client: args.cluster.client().await?,
            credentials: cluster::own_credentials()?,
        };
        let result = files.execute(&args.command).await;
        // What was written must be there even when something else failed.
        let closed = files.client.close().await.context("cannot end the session");
        result.and(closed)
    }))
}

/// A session, and on whose behalf.
struct Files {
    client: Client,
    credentials: Credentials,
}

impl Files {
    async fn execute(&self, command: &FsCommand) -> anyhow::Result<()> {
        match command {
            FsCommand::Ls(args) => self.ls(args).await,
            FsCommand::Stat { path, json } => self.stat(path, *json).await,
            FsCommand::Cat { paths } => {
                for path in paths {
                    self.cat(path).await?;
                }
                Ok(())
            }
            FsCommand::Put {
                sources,
                destination,
                recursive,
            } => self.put(sources, destination, *recursive).await,
            FsCommand::Get {
                sources,
                destination,
                recursive,
            } => self.get(sources, destination, *recursive).await,
            FsCommand::Cp {
                source,
                destination,
                recursive,
            } => self.cp(source, destination, *recursive).await,
            FsCommand::Mv {
                source,
                destination,
            } => self.mv(source, destination).await,
            FsCommand::Rm {
                paths,
                recursive,
                force,
                skip_trash,
            } => {
                for path in paths {
                    self.rm(path, *recursive, *force, *skip_trash).await?;
                }
                Ok(())
            }
            FsCommand::Trash(command) => self.trash(command).await,
            FsCommand::Snapshot(command) => self.snapshot(command).await,
            FsCommand::Mkdir { paths, parents } => {
                for path in paths {
                    self.mkdir(path, *parents).await?;
                }
                Ok(())
            }
            FsCommand::Quota(args) => self.quota(args).await,
            FsCommand::Df { path, json } => self.df(path, *json).await,
            FsCommand::Locations { path, json } => self.locations(path, *json).await,
            FsCommand::Compact { rate } => self.compact(*rate).await,
        }
    }

    async fn compact(&self, rate: Size) -> anyhow::Result<()> {
        let done = match self.client.compact(rate.0).await {
            Err(ClientError::Fs(FsError::Busy { .. })) => {
                bail!("a mount or another command is compacting; try again in some minutes")
            }
            result => result?,
        };
        println!(
            "{} pieces of files in mostly unused blocks, {} of them moved ({} copied)",
            done.found_pieces,
            done.moved_pieces,
            units::human(done.copied_bytes)
        );
        Ok(())
    }

    /// The inode at a path, symlinks followed.
    async fn find(&self, path: &OsString) -> anyhow::Result<Attr> {
        self.client
            .resolve(&self.credentials, path.as_bytes())
            .await
            .with_context(|| path.to_string_lossy().into_owned())
    }

    async fn cat(&self, path: &OsString) -> anyhow::Result<()> {
        let context = || path.to_string_lossy().into_owned();
        let attr = self.find(path).await?;
        let file = self
            .client
            .open(&self.credentials, attr.ino, OpenFlags::READ)
            .await
            .with_context(context)?;
        let mut out = crate::output::stdout();
        let mut offset = 0;
        loop {
            let pieces = file
                .read_pieces(offset, transfer::READ_BYTES)
                .await
                .with_context(context)?;
            if pieces.is_empty() {
                return Ok(());
            }
            for piece in pieces {
                offset += piece.len() as u64;
                out.write_all(&piece)?;
            }
        }
    }

    async fn cp(
        &self,
        source: &OsString,
        destination: &OsString,
        recursive: bool,
    ) -> anyhow::Result<()> {
        let from = self.find(source).await?;
        let (parent, name) = self.place_for(source, destination).await?;
        if from.kind == FileKind::Directory {
            if !recursive {
                bail!(
                    "{} is a directory; copy it with -r",
                    source.to_string_lossy()
                );
            }
            return self.clone_tree(from.ino, parent, &name).await;
        }
        self.clone_file(&from, parent, &name).await
    }

    async fn clone_tree(&self, from: InodeId, parent: InodeId, name: &Name) -> anyhow::Result<()> {
        let mut made = std::collections::HashMap::new();
        let mut walk = self.client.walk(&self.credentials, from);
        while let Some(entry) = walk.next().await? {
            let (above, own) = match entry.path.iter().rposition(|&byte| byte == b'/') {
                Some(slash) => (&entry.path[..slash], &entry.path[slash + 1..]),
                None => (&[][..], &entry.path[..]),
            };
            let (parent, name) = if own.is_empty() {
                (parent, name.clone())
            } else {
                let parent = made.get(above).copied();
                let parent = parent.context("a walk names directories before what is in them")?;
                (parent, Name::new(own)?)
            };
            match entry.attr.kind {
                FileKind::Directory => {
                    let directory = self
                        .client
                        .mkdir(
                            &self.credentials,
                            parent,
                            &name,
                            entry.attr.permission_bits(),
                        )
                        .await?;
                    if directory.ino == from {
                        bail!("a directory cannot be copied into itself");
                    }
                    made.insert(entry.path, directory.ino);
                }
                FileKind::Symlink => {
                    let target = self
                        .client
                        .readlink(&self.credentials, entry.attr.ino)
                        .await?;
                    self.client
                        .symlink(&self.credentials, parent, &name, &target)
                        .await?;
                }
                FileKind::Regular => self.clone_file(&entry.attr, parent, &name).await?,
                kind => {
                    self.client
                        .mknod(
                            &self.credentials,
                            parent,
                            &name,
                            kind,
                            entry.attr.permission_bits(),
                            entry.attr.rdev,
                        )
                        .await?;
                }
            }
        }
        Ok(())
    }

    async fn clone_file(&self, from: &Attr, parent: InodeId, name: &Name) -> anyhow::Result<()> {
        let source = self
            .client
            .open(&self.credentials, from.ino, OpenFlags::READ)
            .await?;
        let copy = self.create(parent, name, from.permission_bits()).await?;
        if copy.ino() == from.ino {
            bail!("{name} is the same file");
        }
        source.clone_range(0, &copy, 0, u64::MAX).await?;
        Ok(copy.close().await?)
    }

    /// Creates a file, or empties the one that is there.
    async fn create(
        &self,
        parent: InodeId,
        name: &Name,
        mode: u16,
    ) -> Result<harvestfs_client::File, ClientError> {
        let flags = OpenFlags {
            truncate: true,
            ..OpenFlags::READ_WRITE
        };
        match self
            .client
            .create_file(&self.credentials, parent, name, mode, flags)
            .await
        {
            Ok((_, file)) => Ok(file),
            Err(ClientError::Fs(FsError::Exists)) => {
                let there = self.client.lookup(&self.credentials, parent, name).await?;
                self.client.open(&self.credentials, there.ino, flags).await
            }
            Err(error) => Err(error),
        }
    }

    async fn mv(&self, source: &OsString, destination: &OsString) -> anyhow::Result<()> {
        let (parent, name) = self.parent_of(source).await?;
        let (new_parent, new_name) = self.place_for(source, destination).await?;
        self.client
            .rename(
                &self.credentials,
                parent,
                &name,
                new_parent,
                &new_name,
                RenameMode::Replace,
            )
            .await
            .with_context(|| {
                format!(
                    "cannot move {} to {}",
                    source.to_string_lossy(),
                    destination.to_string_lossy()
                )
            })?;
        Ok(())
    }

    async fn rm(
        &self,
        path: &OsString,
        recursive: bool,
        force: bool,
        skip_trash: bool,
    ) -> anyhow::Result<()> {
        let context = || format!("cannot remove {}", path.to_string_lossy());
        let found = self
            .client
            .resolve_no_follow(&self.credentials, path.as_bytes())
            .await;
        let attr = match found {
            Err(ClientError::Fs(FsError::NotFound)) if force => return Ok(()),
            found => found.with_context(context)?,
        };
        let (parent, name) = self.parent_of(path).await?;
        if !skip_trash
            && !trash::is_in_trash(path.as_bytes())
            && (recursive || attr.kind != FileKind::Directory)
        {
            let retention_s = trash::RETENTION_S;
            return self
                .client
                .remove_to_trash(&self.credentials, parent, &name, retention_s)
                .await
                .with_context(context);
        }
        if attr.kind != FileKind::Directory {
            self.client
                .unlink(&self.credentials, parent, &name)
                .await
                .with_context(context)?;
            return Ok(());
        }
        if recursive {
            self.empty(attr.ino).await.with_context(context)?;
        }
        self.client
            .rmdir(&self.credentials, parent, &name)
            .await
            .with_context(context)
    }

    /// Removes everything below a directory, deepest first.
    async fn empty(&self, directory: InodeId) -> Result<(), ClientError> {
        // The directories above the one that is being emptied, with their names in it.
        let mut above: Vec<(InodeId, Name)> = Vec::new();
        let mut current = directory;
        loop {
            let page = self
                .client
                .readdir(
                    &self.credentials,
                    current,
                    None,
                    harvestfs_protocol::limits::ENTRIES_PER_REPLY_MAX,
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

    async fn mkdir(&self, path: &OsString, parents: bool) -> anyhow::Result<()> {
        if !parents {
            let (parent, name) = self.parent_of(path).await?;
            self.client
                .mkdir(&self.credentials, parent, &name, 0o755)
                .await
                .with_context(|| format!("cannot make {}", path.to_string_lossy()))?;
            return Ok(());
        }
        let mut directory = InodeId::ROOT;
        let components = path.as_bytes().split(|&byte| byte == b'/');
        for component in components.filter(|c| !c.is_empty() && *c != b".") {
            let name = Name::new(component)?;
            let made = match self
                .client
                .mkdir(&self.credentials, directory, &name, 0o755)
                .await
            {
                Err(ClientError::Fs(FsError::Exists)) => {
                    self.client
                        .lookup(&self.credentials, directory, &name)
                        .await
                }
                made => made,
            };
            directory = made
                .with_context(|| format!("cannot make {}", path.to_string_lossy()))?
                .ino;
        }
        Ok(())
    }

    async fn parent_of(&self, path: &OsString) -> anyhow::Result<(InodeId, Name)> {
        let (parent, name) = self
            .client
            .resolve_parent(&self.credentials, path.as_bytes())
            .await
            .with_context(|| path.to_string_lossy().into_owned())?;
        Ok((parent.ino, name))
    }

    /// Where `source` goes: into `destination` if that is a directory, else under its name.
    async fn place_for(
        &self,
        source: &OsString,
        destination: &OsString,
    ) -> anyhow::Result<(InodeId, Name)> {
        let found = self
            .client
            .resolve(&self.credentials, destination.as_bytes())
            .await;
        match found {
            Ok(attr) if attr.kind == FileKind::Directory => {
                Ok((attr.ino, last_component(source.as_bytes())?))
            }
            Ok(_) | Err(ClientError::Fs(FsError::NotFound)) => self.parent_of(destination).await,
            Err(error) => Err(error).with_context(|| destination.to_string_lossy().into_owned()),
        }
    }
}

/// Whether it failed since what it was about is not there, or not any more.
fn is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(ClientError::is_gone)
}

/// The name that a path ends with.
fn last_component(path: &[u8]) -> anyhow::Result<Name> {
    let last = path
        .split(|&byte| byte == b'/')
        .rfind(|component| !component.is_empty())
        .unwrap_or_default();
    Name::new(last).with_context(|| format!("`{}`", String::from_utf8_lossy(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_ends_with_its_last_component() {
        assert_eq!(last_component(b"/a/b/").unwrap().as_bytes(), b"b");
        assert_eq!(last_component(b"b").unwrap().as_bytes(), b"b");
        assert!(last_component(b"/").is_err());
        assert!(last_component(b"a/..").is_err());
    }
}
