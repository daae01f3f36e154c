//! `harvestfs fs` on attributes: `chmod`, `chown`, `touch`, `setrep`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use harvestfs_client::{ClientError, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::{AttrChanges, SetTime, SetXattrMode};
use harvestfs_protocol::types::{Attr, FileKind};
use nix::unistd::{Group, User};

use super::mode::ModeChange;
use super::{Files, list};

const REPLICATION: &[u8] = b"user.harvestfs.replication";
/// Between two looks whether the replicas are there.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

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
        self.for_each(path, recursive, async |attr| {
            // A symlink has no mode of its own.
            if attr.kind == FileKind::Symlink {
                return Ok(());
            }
            let is_directory = attr.kind == FileKind::Directory;
            let mode = change.apply(attr.permission_bits(), is_directory);
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
        self.for_each(path, recursive, async |attr| {
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
                        0o644,
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
    pub(super) async fn setrep(
        &self,
        replication: u8,
        path: &OsString,
        recursive: bool,
        wait: bool,
    ) -> anyhow::Result<()> {
        let value = replication.to_string();
        self.for_each(path, recursive, async |attr| match attr.kind {
            FileKind::Regular | FileKind::Directory => {
                self.client
                    .setxattr(
                        &self.credentials,
                        attr.ino,
                        REPLICATION,
                        value.as_bytes(),
                        SetXattrMode::Any,
                    )
                    .await
            }
            _ => Ok(()),
        })
        .await?;
        if !wait {
            return Ok(());
        }
        self.for_each(path, recursive, async |attr| {
            if attr.kind == FileKind::Regular {
                self.wait_for_replicas(attr, replication).await?;
            }
            Ok(())
        })
        .await
    }

    async fn wait_for_replicas(&self, attr: &Attr, replication: u8) -> Result<(), ClientError> {
        loop {
            let (locations, _) = self.locations_of(attr.ino).await?;
            let are_there =
                |location: &list::Location| location.datanodes.len() == usize::from(replication);
            if locations.iter().all(are_there) {
                return Ok(());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn change(&self, attr: &Attr, changes: AttrChanges) -> Result<(), ClientError> {
        self.client
            .setattr(&self.credentials, attr.ino, changes)
            .await
            .map(|_| ())
    }

    /// Does something with what a path names and, if asked, with everything below.
    async fn for_each(
        &self,
        path: &OsString,
        recursive: bool,
        act: impl AsyncFn(&Attr) -> Result<(), ClientError>,
    ) -> anyhow::Result<()> {
        let shown = path.to_string_lossy();
        let attr = self.find(path).await?;
        if !recursive {
            return act(&attr).await.with_context(|| shown.into_owned());
        }
        let mut walk = self.client.walk(&self.credentials, attr.ino);
        while let Some(entry) = walk.next().await.with_context(|| shown.to_string())? {
            act(&entry.attr).await.with_context(|| {
                String::from_utf8_lossy(&list::below(path, &entry.path)).into_owned()
            })?;
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
