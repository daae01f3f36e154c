//! `harvestfs fs snapshot`: snapshots of directories.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Subcommand;
use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::{Name, SNAPSHOTS_NAME};
use harvestfs_protocol::types::{Attr, FileKind, Timestamp};
use serde_json::json;

use super::{Files, below, list, names};
use crate::units;

/// Directories with snapshots that are named when they are in the way.
const DIRECTORIES_NAMED: usize = 8;
/// Snapshots of each that are named.
const SNAPSHOTS_NAMED: usize = 8;

/// `harvestfs fs snapshot`
#[derive(Debug, Subcommand)]
pub(super) enum SnapshotCommand {
    /// Keep a directory with everything below as it is now. Metadata only: the data is shared. It can
    /// be read in `.snapshot/NAME` of the directory.
    #[command(after_help = "Examples:\n  \
        harvestfs fs snapshot create /photos before-sorting\n  \
        harvestfs fs ls /photos/.snapshot/before-sorting")]
    Create {
        /// A directory of the cluster.
        path: OsString,
        /// Name of the snapshot [default: the time].
        name: Option<OsString>,
    },
    /// Show the snapshots of a directory.
    #[command(after_help = "Example:\n  \
        harvestfs fs snapshot ls /photos")]
    Ls {
        /// A directory of the cluster.
        path: OsString,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show what was added (+), removed (-) and changed (M) since a snapshot.
    #[command(after_help = "Examples:\n  \
        harvestfs fs snapshot diff /photos monday            what changed since\n  \
        harvestfs fs snapshot diff /photos monday tuesday    and what did between the two")]
    Diff {
        /// A directory of the cluster.
        path: OsString,
        /// The snapshot.
        name: OsString,
        /// A later snapshot to compare it with [default: the directory as it is now].
        later: Option<OsString>,
    },
    /// Remove snapshots.
    #[command(after_help = "Example:\n  \
        harvestfs fs snapshot rm /photos monday tuesday")]
    Rm {
        /// A directory of the cluster.
        path: OsString,
        /// The snapshots.
        #[arg(required = true)]
        names: Vec<OsString>,
    },
}

impl Files {
    pub(super) async fn snapshot(&self, command: &SnapshotCommand) -> anyhow::Result<()> {
        match command {
            SnapshotCommand::Create { path, name } => {
                let directory = self.find(path).await?;
                let name = match name {
                    Some(name) => Name::new(name.as_bytes())?,
                    None => Name::new(now().as_bytes())?,
                };
                self.client
                    .create_snapshot(&self.credentials, directory.ino, &name)
                    .await
                    .with_context(|| {
                        format!("cannot make snapshot {name} of {}", path.to_string_lossy())
                    })?;
                println!("{name}");
                Ok(())
            }
            SnapshotCommand::Ls { path, json } => self.list_snapshots(path, *json).await,
            SnapshotCommand::Diff { path, name, later } => {
                self.diff(path, name, later.as_ref()).await
            }
            SnapshotCommand::Rm { path, names } => {
                let directory = self.find(path).await?;
                for name in names {
                    self.client
                        .remove_snapshot(
                            &self.credentials,
                            directory.ino,
                            &Name::new(name.as_bytes())?,
                        )
                        .await
                        .with_context(|| shown(path, name))?;
                }
                Ok(())
            }
        }
    }

    /// The directory of the snapshots of a directory, if it has some.
    async fn snapshots_of(&self, path: &OsString) -> anyhow::Result<Option<InodeId>> {
        let directory = self.find(path).await?;
        if directory.kind != FileKind::Directory {
            bail!("{} is not a directory", path.to_string_lossy());
        }
        let found = self.snapshots_in(directory.ino).await;
        found.with_context(|| path.to_string_lossy().into_owned())
    }

    async fn snapshots_in(&self, directory: InodeId) -> anyhow::Result<Option<InodeId>> {
        let name = Name::new(SNAPSHOTS_NAME)?;
        let found = self.client.lookup(&self.credentials, directory, &name);
        match found.await {
            Ok(attr) if attr.is_frozen() => Ok(Some(attr.ino)),
            Ok(_) | Err(ClientError::Fs(FsError::NotFound)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The commands that remove the snapshots of a directory and of those below, which keep it from
    /// being removed: only some if there are many. `path` is the one of the directory.
    pub(super) async fn removals_of_snapshots_below(
        &self,
        directory: InodeId,
        path: &OsString,
    ) -> anyhow::Result<Option<String>> {
        let mut found = Vec::new();
        let mut walk = self.client.walk(&self.credentials, directory);
        while let Some(entry) = walk.next().await? {
            if entry.attr.kind != FileKind::Directory {
                continue;
            }
            let Some(snapshots) = self.snapshots_in(entry.attr.ino).await? else {
                continue;
            };
            let mut names = Vec::new();
            let mut entries = self.client.entries(&self.credentials, snapshots);
            while names.len() < SNAPSHOTS_NAMED
                && let Some((name, _)) = entries.next().await?
            {
                names.push(quoted(name.as_bytes()));
            }
            // None is left if the last one has been removed in the meantime.
            if !names.is_empty() {
                let path = below(path.as_bytes(), &entry.path);
                found.push(format!(
                    "`harvestfs fs snapshot rm {} {}`",
                    quoted(&path),
                    names.join(" ")
                ));
            }
            if found.len() == DIRECTORIES_NAMED {
                break;
            }
        }
        Ok((!found.is_empty()).then(|| found.join(", ")))
    }

    /// Removes the snapshots of a directory and of all below: they keep it from being removed.
    pub(super) async fn remove_snapshots_below(&self, directory: InodeId) -> anyhow::Result<()> {
        let mut walk = self.client.walk(&self.credentials, directory);
        while let Some(entry) = walk.next().await? {
            if entry.attr.kind != FileKind::Directory {
                continue;
            }
            let directory = entry.attr.ino;
            let Some(snapshots) = self.snapshots_in(directory).await? else {
                continue;
            };
            for name in self.names(snapshots).await? {
                self.client
                    .remove_snapshot(&self.credentials, directory, &name)
                    .await?;
            }
        }
        Ok(())
    }

    async fn list_snapshots(&self, path: &OsString, json: bool) -> anyhow::Result<()> {
        let Some(directory) = self.snapshots_of(path).await? else {
            if json {
                println!("[]");
            }
            return Ok(());
        };
        let mut all = Vec::new();
        let mut entries = self.client.entries(&self.credentials, directory);
        while let Some((name, attr)) = entries.next().await? {
            match self.used_bytes(&attr).await {
                // It has been removed in the meantime.
                Err(error) if error.is_gone() => {}
                used_bytes => all.push((name, attr, used_bytes?)),
            }
        }
        if json {
            let shown = |(name, attr, used_bytes): &(Name, Attr, u64)| {
                let mut object = json!({
                    "created": list::utc(attr.ctime),
                    "used_bytes": used_bytes,
                });
                names::insert(&mut object, "name", name.as_bytes());
                object
            };
            let all: Vec<_> = all.iter().map(shown).collect();
            println!("{}", names::json_line(&json!(all)));
            return Ok(());
        }
        for (name, attr, used_bytes) in all {
            let created = list::utc(attr.ctime);
            let (name, used) = (names::text(name.as_bytes()), units::human(used_bytes));
            println!("{name}  {created}  {used}");
        }
        Ok(())
    }

    async fn diff(
        &self,
        path: &OsString,
        name: &OsString,
        later: Option<&OsString>,
    ) -> anyhow::Result<()> {
        let before = self.kept(path, name).await?;
        let before = self.tree(path, before).await?;
        let after = match later {
            Some(later) => self.kept(path, later).await?,
            None => self.find(path).await?.ino,
        };
        let after = self.tree(path, after).await?;
        // The contents of a directory that could be listed in only one of them would be shown as added or removed.
        self.all_is_done()?;
        let mut out = crate::output::stdout();
        for (sign, path) in differences(&before, &after) {
            write!(out, "{sign} ")?;
            out.write_all(&names::printed(path))?;
            writeln!(out)?;
        }
        Ok(())
    }

    /// The copy of a directory in one of its snapshots.
    async fn kept(&self, path: &OsString, name: &OsString) -> anyhow::Result<InodeId> {
        let directory = self.snapshots_of(path).await?;
        let directory =
            directory.with_context(|| format!("{} has no snapshots", path.to_string_lossy()))?;
        let found = self
            .client
            .lookup(&self.credentials, directory, &Name::new(name.as_bytes())?)
            .await;
        Ok(found.with_context(|| shown(path, name))?.ino)
    }

    /// Everything below a directory or its copy in a snapshot.
    async fn tree(
        &self,
        path: &OsString,
        directory: InodeId,
    ) -> anyhow::Result<BTreeMap<Vec<u8>, Attr>> {
        let mut tree = BTreeMap::new();
        let mut walk = self.listing(path, directory);
        while let Some(entry) = walk.next().await? {
            if !entry.path.is_empty() {
                tree.insert(entry.path, entry.attr);
            }
        }
        Ok(tree)
    }
}

/// As a shell reads it.
pub(super) fn quoted(name: &[u8]) -> String {
    let name = String::from_utf8_lossy(name);
    let plain = |letter: char| letter.is_alphanumeric() || "/._-:+@,=".contains(letter);
    if name.chars().all(plain) {
        name.into_owned()
    } else {
        format!("'{}'", name.replace('\'', "'\\''"))
    }
}

fn shown(path: &OsString, name: &OsString) -> String {
    let (path, name) = (path.to_string_lossy(), name.to_string_lossy());
    format!("snapshot {name} of {path}")
}

fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanoseconds = since.map_or(0, |since| since.as_nanos());
    list::utc(Timestamp(i64::try_from(nanoseconds).unwrap_or(i64::MAX)))
}

/// The paths that differ, in order, with what happened to them.
fn differences<'a>(
    before: &'a BTreeMap<Vec<u8>, Attr>,
    after: &'a BTreeMap<Vec<u8>, Attr>,
) -> Vec<(char, &'a [u8])> {
    let mut found = Vec::new();
    for (path, attr) in before {
        match after.get(path) {
            None => found.push(('-', path.as_slice())),
            Some(now) if now.kind != attr.kind => {
                found.extend([('-', path.as_slice()), ('+', path.as_slice())]);
            }
            Some(now) if is_changed(attr, now) => found.push(('M', path.as_slice())),
            Some(_) => {}
        }
    }
    let added = after.keys().filter(|path| !before.contains_key(*path));
    found.extend(added.map(|path| ('+', path.as_slice())));
    found.sort_by_key(|(_, path)| *path);
    found
}

/// Whether something of the same kind is another one, or has other content or attributes. What is in
/// a directory shows by itself.
fn is_changed(before: &Attr, after: &Attr) -> bool {
    let attributes = |attr: &Attr| (attr.permission_bits(), attr.uid, attr.gid, attr.rdev);
    let content = |attr: &Attr| (attr.size_bytes, attr.mtime, attr.content_version);
    let is_directory = before.kind == FileKind::Directory;
    attributes(before) != attributes(after) || !is_directory && content(before) != content(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(kind: FileKind, version: u64) -> Attr {
        Attr {
            ino: InodeId(version),
            kind,
            mode: 0o644,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size_bytes: version,
            allocated_bytes: 0,
            atime: Timestamp(0),
            mtime: Timestamp(0),
            ctime: Timestamp(0),
            content_version: version,
        }
    }

    #[test]
    fn a_command_names_directories_and_snapshots_as_a_shell_reads_them() {
        assert_eq!(
            quoted(b"/tree/2026-01-01T00:00:00Z"),
            "/tree/2026-01-01T00:00:00Z"
        );
        assert_eq!(quoted(b"my tree's"), "'my tree'\\''s'");
    }

    #[test]
    fn what_was_added_removed_and_changed_is_listed() {
        use FileKind::{Directory, Regular, Symlink};
        let tree = |entries: &[(&str, FileKind, u64)]| -> BTreeMap<_, _> {
            let entries = entries.iter();
            entries
                .map(|(path, kind, version)| (path.as_bytes().to_vec(), attr(*kind, *version)))
                .collect()
        };
        let before = tree(&[
            ("d", Directory, 1),
            ("d/gone", Regular, 1),
            ("d/same", Regular, 1),
            ("d/written", Regular, 1),
            ("other", Regular, 1),
        ]);
        let after = tree(&[
            ("d", Directory, 2),
            ("d/new", Regular, 1),
            ("d/same", Regular, 1),
            ("d/written", Regular, 2),
            ("other", Symlink, 1),
        ]);
        let found: Vec<_> = differences(&before, &after)
            .into_iter()
            .map(|(sign, path)| format!("{sign} {}", String::from_utf8_lossy(path)))
            .collect();
        assert_eq!(
            found,
            ["- d/gone", "+ d/new", "M d/written", "- other", "+ other"]
        );
    }
}
