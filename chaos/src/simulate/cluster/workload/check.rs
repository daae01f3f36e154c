//! Everything that was promised, compared with what is there in the end.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;

use super::memory::{Known, Memory, difference};
use super::own_directory;
use super::shared::{Board, check_shared};
use crate::simulate::cluster::journal::Journal;

/// Compares everything that clients were promised with what a new client finds.
///
/// # Errors
/// When something cannot be read.
pub async fn check_all(
    client: &Client,
    memories: &[Rc<RefCell<Memory>>],
    board: &RefCell<Board>,
    journal: &Journal,
) -> Result<(), ClientError> {
    for (number, memory) in (0..).zip(memories) {
        let directory = own_directory(number);
        let found = match sizes(client, &directory).await {
            // It never came to make it.
            Err(ClientError::Fs(FsError::NotFound)) => BTreeMap::new(),
            found => found?,
        };
        let memory = memory.borrow().clone();
        for problem in memory.differences(&found) {
            journal.failure(format!("/{directory}, in the end: {problem}"));
        }
        for (name, known) in &memory.names {
            let Known::Content { bytes, .. } = known else {
                continue;
            };
            let path = format!("/{directory}/{name}");
            let me = Credentials::root();
            let problem = match client.read_file(&me, path.as_bytes()).await {
                Ok(read) => difference(bytes, &read),
                Err(error) => Some(error.to_string()),
            };
            if let Some(problem) = problem {
                journal.failure(format!("{path}, in the end: {problem}"));
            }
        }
    }
    check_shared(client, board, journal).await;
    Ok(())
}

/// Most entries that are asked for at a time.
const PAGE_ENTRIES: usize = 1_000;

pub async fn sizes(client: &Client, directory: &str) -> Result<BTreeMap<String, u64>, ClientError> {
    let me = Credentials::root();
    let directory = client.resolve(&me, directory.as_bytes()).await?;
    let page = client
        .readdir(&me, directory.ino, None, PAGE_ENTRIES, false)
        .await?;
    let mut sizes = BTreeMap::new();
    for entry in page.entries {
        let name = String::from_utf8_lossy(entry.name.as_bytes()).into_owned();
        match client.lookup(&me, directory.ino, &entry.name).await {
            Ok(attr) => sizes.insert(name, attr.size_bytes),
            // Removed by the operation that was under way when its client crashed.
            Err(ClientError::Fs(FsError::NotFound)) => None,
            Err(error) => return Err(error),
        };
    }
    Ok(sizes)
}
