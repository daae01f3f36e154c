//! Files that a client has removed to the trash: they must be there unchanged, and can be restored.

use std::collections::BTreeMap;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;

use super::check::check_content;
use super::memory::{Known, difference};
use super::{NAMES, Worker};
use crate::simulate::cluster::journal::Journal;

/// The trash of root, which removes all of these files.
const DIRECTORY: &str = "/.trash/0";
/// How long files are kept: longer than any simulation takes, even if clocks jump.
const KEPT_S: u32 = 86_400;

impl Worker {
    /// Removes a file to the trash.
    pub(super) async fn remove_to_trash(&self, name: &str) -> Result<(), ClientError> {
        self.begin_removal(name, format_args!("remove {name} to the trash"));
        let (me, path) = (Credentials::root(), self.path(name));
        let (parent, file) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        let ino = self.client.lookup(&me, parent.ino, &file).await?.ino;
        self.client
            .remove_to_trash(&me, parent.ino, &file, KEPT_S)
            .await?;
        let mut memory = self.memory.borrow_mut();
        let known = memory.names.remove(name);
        if let Some(known) = known.filter(|_| self.journal.is_certain()) {
            let entry = format!("{:016x}-{name}", ino.0);
            memory.trash.insert(entry, known);
        }
        Ok(())
    }

    /// Reads a file in the trash, or restores it.
    pub(super) async fn use_trash(&self) -> Result<(), ClientError> {
        let nth = self.random(0..NAMES);
        let trashed = {
            let trash = &self.memory.borrow().trash;
            let nth = trash.iter().nth(nth);
            nth.map(|(entry, known)| (entry.clone(), known.clone()))
        };
        let Some((entry, known)) = trashed else {
            return Ok(());
        };
        match self.random(0..3) {
            0 => self.restore(&entry, known).await,
            _ => self.read_trashed(&entry, &known).await,
        }
    }

    async fn restore(&self, entry: &str, mut known: Known) -> Result<(), ClientError> {
        let to = format!("f{}", self.random(0..NAMES));
        self.begin(&[&to], format_args!("restore {entry} as {to}"));
        self.memory.borrow_mut().trash.remove(entry);
        let path = format!("{DIRECTORY}/{entry}");
        let restored = self.rename_path(&path, &self.path(&to)).await;
        self.complain_if_gone(&path, &restored);
        restored?;
        let mut memory = self.memory.borrow_mut();
        if memory.is_power_lost {
            known.lose_unless_durable();
        }
        memory.names.insert(to, known);
        Ok(())
    }

    async fn read_trashed(&self, entry: &str, known: &Known) -> Result<(), ClientError> {
        self.begin(&[], format_args!("read {entry} in the trash"));
        let (me, path) = (Credentials::root(), format!("{DIRECTORY}/{entry}"));
        let read = self.client.read_file(&me, path.as_bytes()).await;
        self.complain_if_gone(&path, &read);
        let read = read?;
        if let Known::Content { bytes, .. } = known
            && let Some(difference) = difference(bytes, &read)
        {
            self.journal.failure(format!("{path}: {difference}"));
        }
        Ok(())
    }

    fn complain_if_gone<T>(&self, path: &str, found: &Result<T, ClientError>) {
        if let Err(ClientError::Fs(FsError::NotFound | FsError::Stale)) = found {
            self.journal.failure(format!("{path} is not there"));
        }
    }
}

/// Checks the files in the trash at the end.
pub(super) async fn check_trash(
    client: &Client,
    trash: &BTreeMap<String, Known>,
    journal: &Journal,
) {
    for (entry, known) in trash {
        let Known::Content { bytes, .. } = known else {
            continue;
        };
        check_content(client, &format!("{DIRECTORY}/{entry}"), bytes, journal).await;
    }
}
