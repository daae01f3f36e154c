//! Files that are so large that they have blocks of their own, and that are in no snapshot: when one is removed, its
//! blocks are freed immediately.
//!
//! Other operations of clients seldom free a block: small files of a client share blocks, and its directory has
//! snapshots.

use std::convert::Infallible;
use std::time::Duration;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::types::Credentials;
use rand::RngExt;

use super::check::{check_contents, sizes_if_made};
use super::memory::{Known, Memory};
use super::{DIRECTORY_MODE, Worker};
use crate::simulate::cluster::journal::Journal;

/// More than two blocks, so that at least one block holds nothing else.
const BYTES_MIN: usize = 5 << 19;
const BYTES_MORE: usize = 1 << 16;
/// The mean time between two operations on these files.
const PAUSE: Duration = Duration::from_millis(1_500);
/// The most files at a time. While the namenode's disk is stuck, no file can be written, but an existing one can be
/// removed.
const THERE_MAX: usize = 3;

fn directory(number: u8) -> String {
    format!("lone-{number}")
}

impl Worker {
    /// Writes and removes such files continuously.
    pub(super) async fn use_lone(&self) -> Infallible {
        // This runs beside other operations, which begin and end in the meantime, so it needs a journal of its own.
        let journal = self.journal.clone();
        if !self.has_lone {
            return std::future::pending().await;
        }
        loop {
            self.pause(PAUSE).await;
            self.wait_silently().await;
            journal.operation();
            if let Err(error) = self.use_one(&journal).await {
                journal.error(&self.name(), &error);
            }
        }
    }

    /// Removes a file, if there are some, or writes another one.
    async fn use_one(&self, journal: &Journal) -> Result<(), ClientError> {
        let there: Vec<String> = {
            let lone = &self.memory.borrow().lone;
            let there = lone.iter();
            there
                .filter(|(_, known)| matches!(known, Known::Content { .. }))
                .map(|(name, _)| name.clone())
                .collect()
        };
        if self.random(0..THERE_MAX) >= there.len() {
            return self.write_one(journal).await;
        }
        let name = &there[self.random(0..there.len())];
        self.remove_one(name, journal).await
    }

    async fn write_one(&self, journal: &Journal) -> Result<(), ClientError> {
        let directory = directory(self.number);
        self.make_directory(&directory, DIRECTORY_MODE).await?;
        let name = {
            let lone = &mut self.memory.borrow_mut().lone;
            let name = format!("f{}", lone.len());
            lone.insert(name.clone(), Known::Nothing);
            name
        };
        let bytes = {
            let mut rng = self.rng.borrow_mut();
            let length = BYTES_MIN + rng.random_range(0..BYTES_MORE);
            let mut bytes = vec![0; length];
            rng.fill(&mut bytes[..]);
            bytes
        };
        journal.note(
            &self.name(),
            format_args!("write lone {name}: {} bytes", bytes.len()),
        );
        let (me, path) = (Credentials::root(), format!("/{directory}/{name}"));
        self.client.write_file(&me, path.as_bytes(), &bytes).await?;
        if journal.is_certain() {
            let durable = true;
            self.know(&name, Known::Content { bytes, durable });
        }
        Ok(())
    }

    async fn remove_one(&self, name: &str, journal: &Journal) -> Result<(), ClientError> {
        journal.note(&self.name(), format_args!("unlink lone {name}"));
        if let Some(known) = self.memory.borrow_mut().lone.get_mut(name) {
            *known = std::mem::replace(known, Known::Nothing).perhaps();
        }
        let (me, path) = (
            Credentials::root(),
            format!("/{}/{name}", directory(self.number)),
        );
        let (parent, file) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        self.client.unlink(&me, parent.ino, &file).await?;
        // Its name is not checked any more: it would not be known which of the files are back from an older copy.
        self.know(name, Known::Nothing);
        Ok(())
    }

    fn know(&self, name: &str, known: Known) {
        self.memory.borrow_mut().lone.insert(name.to_owned(), known);
    }
}

/// Compares the files that must exist with those that do at the end.
///
/// # Errors
/// When the directory cannot be read.
pub(super) async fn check_lone(
    client: &Client,
    number: u8,
    memory: &Memory,
    journal: &Journal,
) -> Result<(), ClientError> {
    let directory = directory(number);
    let found = sizes_if_made(client, &directory).await?;
    check_contents(client, &directory, &memory.lone, &found, journal).await;
    Ok(())
}
