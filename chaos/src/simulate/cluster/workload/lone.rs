//! Files so large that blocks have nothing else in them, which no snapshot has either: when one is removed, its blocks are
//! freed at once.
//!
//! What clients do else seldom frees a block: small files of a client share its blocks, and its directory has snapshots.

use std::convert::Infallible;
use std::time::Duration;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::types::Credentials;
use rand::RngExt;

use super::check::{check_contents, sizes_if_made};
use super::memory::{Known, Memory};
use super::{DIRECTORY_MODE, Worker};
use crate::simulate::cluster::journal::Journal;

/// More than two blocks, whatever comes between.
const BYTES_MIN: usize = 5 << 19;
const BYTES_MORE: usize = 1 << 16;
/// Mean time between removing one and writing the next, and longest time that one is there.
const PAUSE: Duration = Duration::from_secs(1);
const THERE_MAX_MS: usize = 5_000;

fn directory(number: u8) -> String {
    format!("lone-{number}")
}

impl Worker {
    /// Writes and removes such files all the time.
    pub(super) async fn use_lone(&self) -> Infallible {
        // Beside the operations, each of which may begin and end meanwhile.
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

    async fn use_one(&self, journal: &Journal) -> Result<(), ClientError> {
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
        if !journal.is_certain() {
            return Ok(());
        }
        let durable = true;
        self.know(
            &name,
            Known::Content {
                bytes: bytes.clone(),
                durable,
            },
        );
        let there_ms = self.random(0..THERE_MAX_MS) as u64;
        tokio::time::sleep(Duration::from_millis(there_ms)).await;
        self.wait_silently().await;
        journal.note(&self.name(), format_args!("unlink lone {name}"));
        self.know(&name, Known::Perhaps { bytes });
        let (parent, file) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        self.client.unlink(&me, parent.ino, &file).await?;
        // Nothing is looked for under its name any more; nor could it be told which of them are back from an older copy.
        self.know(&name, Known::Nothing);
        Ok(())
    }

    fn know(&self, name: &str, known: Known) {
        self.memory.borrow_mut().lone.insert(name.to_owned(), known);
    }
}

/// Compares those that have to be there with what is there in the end.
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
