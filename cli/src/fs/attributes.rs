//! `harvestfs fs` commands that change attributes: `chmod`, `chown`, `touch`, `setrep`.

use std::cell::RefCell;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use harvestfs_client::{ClientError, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::REPLICATION_MAX;
use harvestfs_protocol::meta::{AttrChanges, SetTime, SetXattrMode};
use harvestfs_protocol::types::{Attr, FileKind};
use nix::unistd::{Group, User};

use super::failures::is_gone;
use super::mode::ModeChange;
use super::snapshot::quoted;
use super::{Files, below, names};
use crate::locations::{self, Replicas};

const REPLICATION: &[u8] = b"user.harvestfs.replication";
/// Between two looks whether the replicas are there.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Who waits for longer is told for what.
const WAITING_TOLD_AFTER: Duration = Duration::from_secs(10);

/// `harvestfs fs setrep`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs fs setrep 2 /scratch            what is made in it from now on\n  \
    harvestfs fs setrep -R -w 4 /important    all that is there too, and wait for the replicas")]
pub(super) struct SetrepArgs {
    /// Replicas of each block.
    #[arg(value_parser = clap::value_parser!(u8).range(1..=i64::from(REPLICATION_MAX)))]
    replication: u8,
    /// Paths in the cluster.
    #[arg(required = true)]
    paths: Vec<OsString>,
    /// Everything below as well.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Wait until there are at least as many.
    #[arg(short, long)]
    wait: bool,
    /// With -w: give up waiting after this time, such as `30m` (the copying goes on).
    #[arg(long, value_parser = humantime::parse_duration, requires = "wait")]
    timeout: Option<Duration>,
}

/// An owner, a group or both, as `chown` takes them: `USER`, `USER:GROUP`, `:GROUP`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    uid: Option<u32>,
    gid: Option<u32>,
}

impl FromStr for Owner {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (user, group) = text.split_once(':').unwrap_or((text, ""));
        if user.is_empty() && group.is_empty() {
            return Err("write USER, USER:GROUP or :GROUP, as names or numbers".into());
        }
        let uid = number_of(user, |name| {
            Ok(User::from_name(name)?.map(|it| it.uid.as_raw()))
        });
        let gid = number_of(group, |name| {
            Ok(Group::from_name(name)?.map(|it| it.gid.as_raw()))
        });
        Ok(Self {
            uid: uid.map_err(|reason| format!("user `{user}`: {reason}"))?,
            gid: gid.map_err(|reason| format!("group `{group}`: {reason}"))?,
        })
    }
}

/// The number of a user or group of this machine; none when nothing is written.
fn number_of(
    text: &str,
    look_up: impl Fn(&str) -> nix::Result<Option<u32>>,
) -> Result<Option<u32>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    if let Ok(number) = text.parse() {
        return Ok(Some(number));
    }
    match look_up(text) {
        Ok(Some(number)) => Ok(Some(number)),
        Ok(None) => Err("not known on this machine; numbers work as well".into()),
        Err(error) => Err(error.to_string()),
    }
}

impl Files {
    pub(super) async fn chmod(
        &self,
        change: &ModeChange,
        path: &OsString,
        recursive: bool,
    ) -> anyhow::Result<()> {
        self.for_each(path, recursive, async |_, attr| {
            // A symlink has no mode of its own.
            if attr.kind == FileKind::Symlink {
                return Ok(());
            }
            let is_directory = attr.kind == FileKind::Directory;
            let mode = change.apply(attr.permission_bits(), is_directory, self.umask);
            self.change(
                attr,
                AttrChanges {
                    mode: Some(mode),
                    ..AttrChanges::default()
                },
            )
            .await
        })
        .await
    }

    pub(super) async fn chown(
        &self,
        owner: Owner,
        path: &OsString,
        recursive: bool,
    ) -> anyhow::Result<()> {
        self.for_each(path, recursive, async |_, attr| {
            self.change(
                attr,
                AttrChanges {
                    uid: owner.uid,
                    gid: owner.gid,
                    ..AttrChanges::default()
                },
            )
            .await
        })
        .await
    }

    /// Sets the times to now, of a file that is made if it is not there.
    pub(super) async fn touch(&self, path: &OsString) -> anyhow::Result<()> {
        let context = || path.to_string_lossy().into_owned();
        let found = self
            .client
            .resolve(&self.credentials, path.as_bytes())
            .await;
        match found {
            Err(ClientError::Fs(FsError::NotFound)) => {
                let (parent, name) = self.parent_of(path).await?;
                let created = self
                    .client
                    .create_file(
                        &self.credentials,
                        parent,
                        &name,
                        0o644 & !self.umask,
                        OpenFlags::READ_WRITE,
                    )
                    .await;
                let (_, file) = created.with_context(context)?;
                file.close().await.with_context(context)
            }
            found => {
                let now = AttrChanges {
                    atime: Some(SetTime::Now),
                    mtime: Some(SetTime::Now),
                    ..AttrChanges::default()
                };
                let attr = found.with_context(context)?;
                self.change(&attr, now).await.with_context(context)
            }
        }
    }

    /// Sets the number of replicas, and may wait until they are there.
    pub(super) async fn setrep(&self, args: &SetrepArgs) -> anyhow::Result<()> {
        let value = args.replication.to_string();
        // The files to wait for. Another walk would report unreadable directories again.
        let files = RefCell::new(Vec::new());
        for path in &args.paths {
            let set = self.for_each(path, args.recursive, async |path, attr| {
                if matches!(attr.kind, FileKind::Regular | FileKind::Directory) {
                    let (name, value) = (REPLICATION, value.as_bytes());
                    let mode = SetXattrMode::Any;
                    self.client
                        .setxattr(&self.credentials, attr.ino, name, value, mode)
                        .await?;
                }
                if args.wait && attr.kind == FileKind::Regular {
                    files.borrow_mut().push((path.to_vec(), attr.ino));
                }
                Ok(())
            });
            self.or_next(set.await)?;
        }
        // A timeout beyond the range of the clock is no limit.
        let deadline = args.timeout.and_then(|it| Instant::now().checked_add(it));
        for (path, ino) in files.into_inner() {
            let waited = self.wait_for_replicas(&path, ino, args.replication, deadline);
            match waited.await {
                // It has been removed in the meantime.
                Err(error) if is_gone(&error) => {}
                waited => waited.with_context(|| String::from_utf8_lossy(&path).into_owned())?,
            }
        }
        Ok(())
    }

    async fn wait_for_replicas(
        &self,
        path: &[u8],
        ino: InodeId,
        replication: u8,
        deadline: Option<Instant>,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        let mut is_told = false;
        loop {
            let (locations, is_complete) = self.locations_of(ino).await?;
            match locations::replicas(&locations, is_complete, replication) {
                Replicas::Missing => {}
                Replicas::Enough => return Ok(()),
                Replicas::EnoughInFirst(bytes) => {
                    let path = names::harmless(path);
                    self.could_not(&anyhow!(
                        "{path}: its first {bytes} bytes have as many replicas; of the rest, which is in more pieces \
                         than the namenode tells, that is not known"
                    ));
                    return Ok(());
                }
            }
            let why = || {
                // The hint needs an absolute path, and this one may lack the leading slash.
                let slash: &[u8] = if path.starts_with(b"/") { b"" } else { b"/" };
                let path = names::harmless(&[slash, path].concat());
                let path = quoted(path.as_bytes());
                format!("`harvestfs admin placement --file {path}` says where its replicas are")
            };
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                bail!(
                    "the time is over, and replicas are still missing; {}",
                    why()
                );
            }
            if !is_told && start.elapsed() >= WAITING_TOLD_AFTER {
                let path = names::harmless(path);
                eprintln!("harvestfs: waiting for replicas of {path}; {}", why());
                is_told = true;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn change(&self, attr: &Attr, changes: AttrChanges) -> anyhow::Result<()> {
        self.client
            .setattr(&self.credentials, attr.ino, changes)
            .await?;
        Ok(())
    }

    /// Does something with what a path names and, if asked, with everything below.
    async fn for_each(
        &self,
        path: &OsString,
        recursive: bool,
        act: impl AsyncFn(&[u8], &Attr) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let attr = self.find(path).await?;
        if !recursive {
            return act(path.as_bytes(), &attr)
                .await
                .with_context(|| path.to_string_lossy().into_owned());
        }
        let mut walk = self.listing(path, attr.ino);
        while let Some(entry) = walk.next().await? {
            let full = below(path.as_bytes(), &entry.path);
            let done = act(&full, &entry.attr)
                .await
                .with_context(|| String::from_utf8_lossy(&full).into_owned());
            self.or_next(done)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_names_or_numbers() {
        let owner = |uid, gid| Ok(Owner { uid, gid });
        assert_eq!("7".parse(), owner(Some(7), None));
        assert_eq!("7:8".parse(), owner(Some(7), Some(8)));
        assert_eq!(":8".parse(), owner(None, Some(8)));
        assert_eq!("root:root".parse(), owner(Some(0), Some(0)));
        for text in ["", ":", "no-user-of-this-name", "0:no-user-of-this-name"] {
            assert!(text.parse::<Owner>().is_err(), "{text}");
        }
    }
}
