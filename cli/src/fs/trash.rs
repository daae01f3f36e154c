//! `harvestfs fs trash`: what was removed and can be restored.

use std::{ffi::OsString, os::unix::ffi::OsStrExt};

use anyhow::{Context, bail};
use clap::Subcommand;
use harvestfs_client::ClientError;
use harvestfs_protocol::{
    error::FsError,
    ids::InodeId,
    meta::RenameMode,
    name::Name,
    types::{Attr, FileKind, Timestamp},
};
use serde_json::json;

use super::{Files, is_gone, list, quota};
use crate::units;

/// Seconds for which `fs rm` keeps what it removes, unless a directory above says otherwise: a day.
pub(super) const RETENTION_S: u32 = 86_400;

const DIRECTORY: &str = "/.trash";
const ORIGIN: &[u8] = b"user.harvestfs.trash_origin";
const EXPIRES: &[u8] = b"user.harvestfs.trash_expires_s";

/// `harvestfs fs trash`
#[derive(Debug, Subcommand)]
pub(super) enum TrashCommand {
    /// Show what is in the trash: its name there, until when it is kept, where it was.
    Ls {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Put something back where it was.
    Restore {
        /// Its name in the trash.
        entry: OsString,
        /// Another path to put it; nothing is replaced.
        #[arg(long, value_name = "PATH")]
        to: Option<OsString>,
    },
    /// Remove from the trash for good.
    Purge {
        /// Names in the trash.
        #[arg(required_unless_present = "all")]
        entries: Vec<OsString>,
        /// Everything.
        #[arg(long, conflicts_with = "entries")]
        all: bool,
    },
}

/// Something in the trash.
struct Trashed {
    name: Name,
    attr: Attr,
    origin: Vec<u8>,
    expires: Option<Timestamp>,
}

/// Whether a path leads into the trash.
pub(super) fn is_in_trash(path: &[u8]) -> bool {
    let mut components = path
        .split(|&byte| byte == b'/')
        .filter(|component| !component.is_empty() && *component != b".");
    components.next() == Some(b".trash")
}

impl Files {
    pub(super) async fn trash(&self, command: &TrashCommand) -> anyhow::Result<()> {
        match command {
            TrashCommand::Ls { json } => self.list_trash(*json).await,
            TrashCommand::Restore { entry, to } => self.restore(entry, to.as_ref()).await,
            TrashCommand::Purge { entries, all } => {
                let Some(directory) = self.trash_directory().await? else {
                    return Ok(());
                };
                let names = if *all {
                    self.names(directory).await?
                } else {
                    let names = entries.iter().map(|entry| Name::new(entry.as_bytes()));
                    names.collect::<Result<Vec<_>, _>>()?
                };
                for name in names {
                    match self.purge(directory, &name).await {
                        // Its time was over meanwhile.
                        Err(error) if *all && is_gone(&error) => {}
                        purged => purged.with_context(|| format!("cannot purge {name}"))?,
                    }
                }
                Ok(())
            }
        }
    }

    /// None when nothing was ever removed to it.
    async fn trash_directory(&self) -> anyhow::Result<Option<InodeId>> {
        let found = self
            .client
            .resolve(&self.credentials, DIRECTORY.as_bytes())
            .await;
        match found {
            Ok(attr) => Ok(Some(attr.ino)),
            Err(ClientError::Fs(FsError::NotFound)) => Ok(None),
            Err(error) => Err(error).context(DIRECTORY),
        }
    }

    async fn trashed(&self, directory: InodeId) -> anyhow::Result<Vec<Trashed>> {
        let mut all = Vec::new();
        let mut entries = self.client.entries(&self.credentials, directory);
        while let Some((name, attr)) = entries.next().await? {
            match self.describe(name, attr).await {
                // Its time was over meanwhile, or somebody purged it.
                Err(error) if error.is_gone() => {}
                trashed => all.push(trashed?),
            }
        }
        Ok(all)
    }

    async fn describe(&self, name: Name, attr: Attr) -> Result<Trashed, ClientError> {
        let read = async |attribute: &[u8]| {
            let value = self
                .client
                .getxattr(&self.credentials, attr.ino, attribute)
                .await;
            match value {
                // Those of others need not tell.
                Err(ClientError::Fs(FsError::NoAttribute | FsError::PermissionDenied)) => {
                    Ok(Vec::new())
                }
                value => value,
            }
        };
        let origin = read(ORIGIN).await?;
        let expires_s = String::from_utf8(read(EXPIRES).await?).ok();
        let expires_s: Option<i64> = expires_s.and_then(|text| text.parse().ok());
        let expires = expires_s.and_then(|seconds| seconds.checked_mul(1_000_000_000));
        Ok(Trashed {
            name,
            attr,
            origin,
            expires: expires.map(Timestamp),
        })
    }

    async fn list_trash(&self, json: bool) -> anyhow::Result<()> {
        let (entries, used_bytes) = match self.trash_directory().await? {
            None => (Vec::new(), 0),
            Some(directory) => {
                let used_bytes = self
                    .number(directory, quota::USED_BYTES)
                    .await?
                    .unwrap_or(0);
                (self.trashed(directory).await?, used_bytes)
            }
        };
        if json {
            let shown = |trashed: &Trashed| {
                json!({
                    "entry": trashed.name.to_string(),
                    "origin": String::from_utf8_lossy(&trashed.origin),
                    "expires": trashed.expires.map(list::utc),
                    "size_bytes": trashed.attr.size_bytes,
                    "directory": trashed.attr.kind == FileKind::Directory,
                })
            };
            let entries: Vec<_> = entries.iter().map(shown).collect();
            println!(
                "{}",
                json!({ "used_bytes": used_bytes, "entries": entries })
            );
            return Ok(());
        }
        for trashed in &entries {
            let origin = String::from_utf8_lossy(&trashed.origin);
            let until = trashed.expires.map_or_else(|| "?".into(), list::utc);
            println!("{}  until {until}  {origin}", trashed.name);
        }
        println!("{} entries, {}", entries.len(), units::human(used_bytes));
        Ok(())
    }

    async fn restore(&self, entry: &OsString, to: Option<&OsString>) -> anyhow::Result<()> {
        let shown = entry.to_string_lossy();
        let directory = self
            .trash_directory()
            .await?
            .context("the trash is empty")?;
        let name = Name::new(entry.as_bytes())?;
        let attr = self
            .client
            .lookup(&self.credentials, directory, &name)
            .await
            .with_context(|| format!("{shown} in the trash"))?;
        let trashed = self.describe(name, attr).await?;
        let path = match to {
            Some(path) => path.as_bytes().to_vec(),
            None if trashed.origin.is_empty() => {
                bail!("where {shown} was is not known; say where to put it with --to")
            }
            None => trashed.origin,
        };
        let (new_parent, new_name) = self.parent_to_restore(&path).await?;
        self.client
            .rename(
                &self.credentials,
                directory,
                &trashed.name,
                new_parent,
                &new_name,
                RenameMode::NoReplace,
            )
            .await
            .with_context(|| format!("cannot restore to {}", String::from_utf8_lossy(&path)))?;
        println!("{}", String::from_utf8_lossy(&path));
        Ok(())
    }

    /// The directory of a path, made with those above it where they are gone, and the last name.
    async fn parent_to_restore(&self, path: &[u8]) -> anyhow::Result<(InodeId, Name)> {
        let name = super::last_component(path)?;
        let end = path.len() - path.iter().rev().take_while(|&&byte| byte == b'/').count();
        let above = &path[..end - name.as_bytes().len()];
        if above.iter().any(|&byte| byte != b'/') {
            let above = std::ffi::OsStr::from_bytes(above).to_owned();
            self.mkdir(&above, true).await?;
        }
        let found = self.client.resolve_parent(&self.credentials, path).await?;
        Ok((found.0.ino, name))
    }

    async fn purge(&self, directory: InodeId, name: &Name) -> anyhow::Result<()> {
        let attr = self
            .client
            .lookup(&self.credentials, directory, name)
            .await?;
        if attr.kind != FileKind::Directory {
            self.client
                .unlink(&self.credentials, directory, name)
                .await?;
            return Ok(());
        }
        self.remove_snapshots_below(attr.ino).await?;
        self.empty(attr.ino).await?;
        self.client
            .rmdir(&self.credentials, directory, name)
            .await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_into_the_trash_are_told() {
        for path in ["/.trash/x", ".trash", "//./.trash/"] {
            assert!(is_in_trash(path.as_bytes()), "{path}");
        }
        for path in ["/", "/a/.trash", "/.trashcan"] {
            assert!(!is_in_trash(path.as_bytes()), "{path}");
        }
    }
}
