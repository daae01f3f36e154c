//! `harvestfs fs trash`: removed files and directories that can be restored.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, bail};
use clap::Subcommand;
use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::RenameMode;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::types::{Attr, FileKind, Timestamp};
use serde_json::json;

use super::failures::is_gone;
use super::{Files, list, names};
use crate::units;

/// Seconds for which `fs rm` keeps what it removes, unless a directory above says otherwise: a day.
pub(super) const RETENTION_S: u32 = 86_400;

const DIRECTORY: &str = "/.trash";
const ORIGIN: &[u8] = b"user.harvestfs.trash_origin";
const EXPIRES: &[u8] = b"user.harvestfs.trash_expires_s";

/// `harvestfs fs trash`
#[derive(Debug, Subcommand)]
pub(super) enum TrashCommand {
    /// Show what you removed, and as root what all users did: its name in the trash, until when it is
    /// kept, where it was.
    #[command(after_help = "Example:\n  \
        harvestfs fs trash ls")]
    Ls {
        /// Print JSON. `used_bytes` is null where modes keep some of it from you.
        #[arg(long)]
        json: bool,
    },
    /// Put something back where it was.
    #[command(after_help = "Examples:\n  \
        harvestfs fs trash restore 1000/0cfdaef70000000a-photos\n  \
        harvestfs fs trash restore 1000/0cfdaef70000000a-photos --to /photos.before")]
    Restore {
        /// Its name in the trash.
        entry: OsString,
        /// Another path to put it; nothing is replaced.
        #[arg(long, value_name = "PATH")]
        to: Option<OsString>,
    },
    /// Remove from the trash for good.
    #[command(after_help = "Examples:\n  \
        harvestfs fs trash purge 1000/0cfdaef70000000a-photos\n  \
        harvestfs fs trash purge --all")]
    Purge {
        /// Names in the trash.
        #[arg(required_unless_present = "all")]
        entries: Vec<OsString>,
        /// Everything.
        #[arg(long, conflicts_with = "entries")]
        all: bool,
    },
}

/// Where something is in the trash: `UID/NAME`, with the id of the user who removed it.
struct Place {
    uid: Name,
    directory: InodeId,
    name: Name,
}

impl Place {
    fn path(&self) -> Vec<u8> {
        [self.uid.as_bytes(), b"/", self.name.as_bytes()].concat()
    }
}

/// Something in the trash.
struct Trashed {
    place: Place,
    attr: Attr,
    /// Bytes of it and of all below. None: its modes keep them from whoever asks.
    used_bytes: Option<u64>,
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
                let places = if *all {
                    self.places().await?
                } else {
                    let mut places = Vec::new();
                    for entry in entries {
                        places.push(self.place(entry).await?);
                    }
                    places
                };
                for place in places {
                    match self.purge(&place).await {
                        // It has expired in the meantime.
                        Err(error) if *all && is_gone(&error) => {}
                        purged => {
                            let Place { uid, name, .. } = &place;
                            purged.with_context(|| format!("cannot purge {uid}/{name}"))?;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    /// The directories in the trash that the caller may look into: root all, others their own.
    async fn parts(&self) -> anyhow::Result<Vec<(Name, InodeId)>> {
        let found = self
            .client
            .resolve(&self.credentials, DIRECTORY.as_bytes())
            .await;
        let directory = match found {
            Ok(attr) => attr.ino,
            // Nothing was ever moved to the trash.
            Err(ClientError::Fs(FsError::NotFound)) => return Ok(Vec::new()),
            Err(error) => return Err(error).context(DIRECTORY),
        };
        let mut parts = Vec::new();
        let mut entries = self.client.entries(&self.credentials, directory);
        while let Some((name, attr)) = entries.next().await? {
            if self.credentials.uid == 0 || self.credentials.uid == attr.uid {
                parts.push((name, attr.ino));
            }
        }
        Ok(parts)
    }

    /// Everything in the trash that the caller may see.
    async fn places(&self) -> anyhow::Result<Vec<Place>> {
        let mut places = Vec::new();
        for (uid, directory) in self.parts().await? {
            for name in self.names(directory).await? {
                places.push(Place {
                    uid: uid.clone(),
                    directory,
                    name,
                });
            }
        }
        Ok(places)
    }

    /// What `UID/NAME` is, or `NAME` among what the caller removed.
    async fn place(&self, entry: &OsString) -> anyhow::Result<Place> {
        let own = self.credentials.uid.to_string();
        let bytes = entry.as_bytes();
        let (uid, name) = match bytes.iter().position(|&byte| byte == b'/') {
            Some(at) => (&bytes[..at], &bytes[at + 1..]),
            None => (own.as_bytes(), bytes),
        };
        let (uid, name) = (Name::new(uid)?, Name::new(name)?);
        let path = [DIRECTORY.as_bytes(), b"/", uid.as_bytes()].concat();
        let found = self.client.resolve(&self.credentials, &path).await;
        let shown = entry.to_string_lossy();
        let directory = found.with_context(|| format!("{shown} in the trash"))?.ino;
        Ok(Place {
            uid,
            directory,
            name,
        })
    }

    async fn trashed(&self) -> anyhow::Result<Vec<Trashed>> {
        let mut all = Vec::new();
        for place in self.places().await? {
            match self.describe(place).await {
                // It has expired or was purged in the meantime.
                Err(error) if is_gone(&error) => {}
                trashed => all.push(trashed?),
            }
        }
        Ok(all)
    }

    async fn describe(&self, place: Place) -> anyhow::Result<Trashed> {
        let attr = self
            .client
            .lookup(&self.credentials, place.directory, &place.name)
            .await?;
        let read = async |attribute: &[u8]| {
            let value = self
                .client
                .getxattr(&self.credentials, attr.ino, attribute)
                .await;
            match value {
                // The attributes of other users' entries may be inaccessible.
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
        let used_bytes = match self.used_bytes(&attr).await {
            Err(ClientError::Fs(FsError::PermissionDenied)) => None,
            used_bytes => Some(used_bytes?),
        };
        Ok(Trashed {
            place,
            attr,
            used_bytes,
            origin,
            expires: expires.map(Timestamp),
        })
    }

    async fn list_trash(&self, json: bool) -> anyhow::Result<()> {
        let entries = self.trashed().await?;
        if json {
            // Null rather than a partial sum, which a program would take for the total.
            let used_bytes: Option<u64> = entries.iter().map(|it| it.used_bytes).sum();
            let shown = |trashed: &Trashed| {
                let mut object = json!({
                    "expires": trashed.expires.map(list::utc),
                    "size_bytes": trashed.attr.size_bytes,
                    "directory": trashed.attr.kind == FileKind::Directory,
                });
                names::insert(&mut object, "entry", &trashed.place.path());
                names::insert(&mut object, "origin", &trashed.origin);
                object
            };
            let entries: Vec<_> = entries.iter().map(shown).collect();
            let shown = json!({ "used_bytes": used_bytes, "entries": entries });
            println!("{}", names::json_line(&shown));
            return Ok(());
        }
        for trashed in &entries {
            let entry = names::text(&trashed.place.path());
            let origin = names::text(&trashed.origin);
            let until = trashed.expires.map_or_else(|| "?".into(), list::utc);
            println!("{entry}  until {until}  {origin}");
        }
        let used_bytes: u64 = entries.iter().filter_map(|it| it.used_bytes).sum();
        let is_all = entries.iter().all(|it| it.used_bytes.is_some());
        println!(
            "{}, {}{}",
            count(entries.len() as u64, "entry"),
            if is_all { "" } else { "at least " },
            units::human(used_bytes)
        );
        Ok(())
    }

    async fn restore(&self, entry: &OsString, to: Option<&OsString>) -> anyhow::Result<()> {
        let shown = entry.to_string_lossy();
        let place = self.place(entry).await?;
        let trashed = self
            .describe(place)
            .await
            .with_context(|| format!("{shown} in the trash"))?;
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
                trashed.place.directory,
                &trashed.place.name,
                new_parent,
                &new_name,
                RenameMode::NoReplace,
            )
            .await
            .with_context(|| format!("cannot restore to {}", String::from_utf8_lossy(&path)))?;
        println!("{}", names::text(&path));
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

    async fn purge(&self, place: &Place) -> anyhow::Result<()> {
        let (directory, name) = (place.directory, &place.name);
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
    fn paths_into_the_trash_are_recognised() {
        for path in ["/.trash/x", ".trash", "//./.trash/"] {
            assert!(is_in_trash(path.as_bytes()), "{path}");
        }
        for path in ["/", "/a/.trash", "/.trashcan"] {
            assert!(!is_in_trash(path.as_bytes()), "{path}");
        }
    }
}
