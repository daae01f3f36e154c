//! Clones of a client's files, and snapshots of its own directory, which must stay unchanged whatever happens later.

use std::collections::BTreeMap;

use bytes::Bytes;
use harvestfs_client::{Client, ClientError, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Credentials, FileKind};

use super::check::{check_contents, sizes};
use super::memory::{Known, Memory, difference, differences};
use super::{NAMES, Worker, own_directory};
use crate::simulate::cluster::journal::Journal;

/// The most snapshots that a client has at a time.
const SNAPSHOTS: usize = 2;
/// The most files that are made in quick succession before a snapshot, and the most bytes of one.
const UNPACKED_MAX: usize = 6;
const UNPACKED_BYTES_MAX: usize = 4 << 10;

fn snapshot_path(number: u8, snapshot: &str) -> String {
    format!("{}/.snapshot/{snapshot}", own_directory(number))
}

impl Worker {
    /// Clones a file to another name; both share the contents from then on.
    pub(super) async fn clone_file(&self, name: &str) -> Result<(), ClientError> {
        let to = format!("f{}", self.random(0..NAMES));
        let Some((bytes, _)) = self.content(name).filter(|_| to != name) else {
            return Ok(());
        };
        let is_synced = self.random(0..2) == 0;
        self.begin(
            &[&to],
            format_args!("clone {name} to {to}, synced: {is_synced}"),
        );
        let (me, path) = (Credentials::root(), self.path(&to));
        let flags = OpenFlags {
            truncate: true,
            ..OpenFlags::WRITE
        };
        let source = self.open(name).await?;
        let clone = self
            .client
            .open_path(&me, path.as_bytes(), flags, Some(0o644))
            .await?;
        source.clone_range(0, &clone, 0, u64::MAX).await?;
        if is_synced {
            clone.sync().await?;
        }
        clone.close().await?;
        source.close().await?;
        self.set(&to, bytes, is_synced);
        Ok(())
    }

    /// Makes a snapshot, checks one, or removes the oldest.
    pub(super) async fn use_snapshots(&self) -> Result<(), ClientError> {
        let (count, oldest) = {
            let snapshots = &self.memory.borrow().snapshots;
            let oldest = snapshots.first_key_value();
            (snapshots.len(), oldest.map(|(number, _)| *number))
        };
        match (self.random(0..4), oldest) {
            (0, Some(oldest)) if count == SNAPSHOTS => self.remove_snapshot(oldest).await,
            (0, _) if count < SNAPSHOTS => self.make_snapshot().await,
            (_, Some(oldest)) => {
                let newest = oldest + self.random(0..count) as u64;
                self.look_into_snapshot(newest).await
            }
            (_, None) => self.make_snapshot().await,
        }
    }

    /// The client's own directory, and the name of a snapshot of it.
    async fn snapshot(&self, number: u64) -> Result<(InodeId, Name), ClientError> {
        let (me, directory) = (Credentials::root(), own_directory(self.number));
        let directory = self.client.resolve(&me, directory.as_bytes()).await?;
        Ok((directory.ino, Name::new(number.to_string().as_bytes())?))
    }

    /// Makes some small files in quick succession, whose `close` need not wait for their commit.
    async fn unpack(&self) -> Result<(), ClientError> {
        let names: Vec<String> = {
            let known = &self.memory.borrow().names;
            let names = (0..NAMES).map(|number| format!("f{number}"));
            names.filter(|name| !known.contains_key(name)).collect()
        };
        let me = Credentials::root();
        for name in names.iter().take(UNPACKED_MAX) {
            let bytes = self.bytes(UNPACKED_BYTES_MAX);
            self.begin(
                &[name],
                format_args!("unpack {name}: {} bytes", bytes.len()),
            );
            let path = self.path(name);
            let file = self
                .client
                .open_path(&me, path.as_bytes(), OpenFlags::WRITE, Some(0o644))
                .await?;
            file.write(0, Bytes::copy_from_slice(&bytes)).await?;
            file.close().await?;
            self.set(name, bytes, false);
        }
        Ok(())
    }

    async fn make_snapshot(&self) -> Result<(), ClientError> {
        if self.random(0..2) == 0 {
            self.unpack().await?;
        }
        let (number, names) = {
            let mut memory = self.memory.borrow_mut();
            memory.last_snapshot += 1;
            (memory.last_snapshot, memory.names.clone())
        };
        self.begin(&[], format_args!("make snapshot {number}"));
        let (me, (directory, name)) = (Credentials::root(), self.snapshot(number).await?);
        self.client.create_snapshot(&me, directory, &name).await?;
        if self.journal.is_certain() {
            self.memory.borrow_mut().keep_snapshot(number, names);
        }
        Ok(())
    }

    async fn remove_snapshot(&self, number: u64) -> Result<(), ClientError> {
        self.begin(&[], format_args!("remove snapshot {number}"));
        self.memory.borrow_mut().snapshots.remove(&number);
        let (me, (directory, name)) = (Credentials::root(), self.snapshot(number).await?);
        self.client.remove_snapshot(&me, directory, &name).await?;
        let path = snapshot_path(self.number, &number.to_string());
        match self.client.resolve(&me, path.as_bytes()).await {
            Err(ClientError::Fs(FsError::NotFound)) => Ok(()),
            Ok(_) => {
                self.journal
                    .failure(format!("{path} is there though it was removed"));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Checks the names and sizes in a snapshot, the contents of one file, and that nothing can be changed.
    async fn look_into_snapshot(&self, number: u64) -> Result<(), ClientError> {
        let Some(names) = self.memory.borrow().snapshots.get(&number).cloned() else {
            return Ok(());
        };
        self.begin(&[], format_args!("look into snapshot {number}"));
        let path = snapshot_path(self.number, &number.to_string());
        let found = sizes(&self.client, &path).await?;
        for problem in differences(&names, &found) {
            self.journal.failure(format!("/{path}: {problem}"));
        }
        let nth = self.random(0..NAMES);
        if let Some((name, Known::Content { bytes, .. })) = names.iter().nth(nth) {
            let path = format!("{path}/{name}");
            let me = Credentials::root();
            let read = self.client.read_file(&me, path.as_bytes()).await?;
            if let Some(difference) = difference(bytes, &read) {
                self.journal.failure(format!("/{path}: {difference}"));
            }
        }
        self.try_to_change(&path).await
    }

    async fn try_to_change(&self, path: &str) -> Result<(), ClientError> {
        let (me, name) = (Credentials::root(), Name::new(b"new")?);
        let directory = self.client.resolve(&me, path.as_bytes()).await?;
        let kind = FileKind::Regular;
        let made = self
            .client
            .mknod(&me, directory.ino, &name, kind, 0o644, 0)
            .await;
        match made {
            Err(ClientError::Fs(FsError::ReadOnly)) => Ok(()),
            Ok(_) => {
                self.journal.failure(format!("/{path} was changed"));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

impl Memory {
    /// Remembers what the names had when a snapshot was made.
    fn keep_snapshot(&mut self, number: u64, mut names: BTreeMap<String, Known>) {
        if self.is_power_lost {
            names.values_mut().for_each(Known::lose_unless_durable);
        }
        self.snapshots.insert(number, names);
    }
}

/// Compares every byte of every snapshot at the end.
pub(super) async fn check_snapshots(
    client: &Client,
    number: u8,
    memory: &Memory,
    journal: &Journal,
) -> Result<(), ClientError> {
    for (snapshot, names) in &memory.snapshots {
        let path = snapshot_path(number, &snapshot.to_string());
        let found = match sizes(client, &path).await {
            Err(ClientError::Fs(FsError::NotFound)) => {
                journal.failure(format!("/{path}, in the end: it is not there"));
                continue;
            }
            found => found?,
        };
        check_contents(client, &path, names, &found, journal).await;
    }
    Ok(())
}
