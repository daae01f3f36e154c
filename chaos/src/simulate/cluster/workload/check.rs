//! Compares everything that was promised with what exists at the end.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::{Attr, Credentials};

use super::kept::check_snapshots;
use super::log::{Log, check_log};
use super::lone::check_lone;
use super::memory::{Known, Memory, difference, differences};
use super::own_directory;
use super::quota::check_usage;
use super::shared::{Board, check_shared};
use super::trash::check_trash;
use crate::simulate::cluster::journal::Journal;

/// Compares everything that clients were promised with what a new client finds.
///
/// # Errors
/// When something cannot be read.
pub async fn check_all(
    client: &Client,
    memories: &[Rc<RefCell<Memory>>],
    (board, log): (&RefCell<Board>, &RefCell<Log>),
    journal: &Journal,
) -> Result<(), ClientError> {
    for (number, memory) in (0..).zip(memories) {
        let directory = own_directory(number);
        let found = sizes_if_made(client, &directory).await?;
        let memory = memory.borrow().clone();
        check_contents(client, &directory, &memory.names, &found, journal).await;
        check_snapshots(client, number, &memory, journal).await?;
        check_trash(client, &memory.trash, journal).await;
        check_usage(client, number, journal).await?;
        check_lone(client, number, &memory, journal).await?;
    }
    check_shared(client, board, journal).await;
    check_log(client, log, journal).await
}

/// Compares names, sizes and every byte in a directory with what is known about them.
pub(super) async fn check_contents(
    client: &Client,
    directory: &str,
    names: &BTreeMap<String, Known>,
    found: &BTreeMap<String, u64>,
    journal: &Journal,
) {
    for problem in differences(names, found) {
        journal.failure(format!("/{directory}, in the end: {problem}"));
    }
    for (name, known) in names {
        let bytes = match known {
            Known::Content { bytes, .. } => bytes,
            Known::Perhaps { bytes } if found.contains_key(name) => bytes,
            Known::Perhaps { .. } | Known::Nothing => continue,
        };
        check_content(client, &format!("/{directory}/{name}"), bytes, journal).await;
    }
}

/// Compares every byte of a file.
pub(super) async fn check_content(client: &Client, path: &str, bytes: &[u8], journal: &Journal) {
    let me = Credentials::root();
    let problem = match client.read_file(&me, path.as_bytes()).await {
        Ok(read) => difference(bytes, &read),
        Err(error) => Some(error.to_string()),
    };
    if let Some(problem) = problem {
        journal.failure(format!("{path}, in the end: {problem}"));
    }
}

/// The most entries that are requested at a time.
const PAGE_ENTRIES: usize = 1_000;

/// The sizes of all files in a directory; empty if it was never made.
///
/// # Errors
/// When it cannot be read.
pub async fn sizes_if_made(
    client: &Client,
    directory: &str,
) -> Result<BTreeMap<String, u64>, ClientError> {
    match sizes(client, directory).await {
        Err(ClientError::Fs(FsError::NotFound)) => Ok(BTreeMap::new()),
        found => found,
    }
}

pub async fn sizes(client: &Client, directory: &str) -> Result<BTreeMap<String, u64>, ClientError> {
    let found = attributes(client, directory).await?;
    let sizes = found
        .into_iter()
        .map(|(name, attr)| (name, attr.size_bytes));
    Ok(sizes.collect())
}

/// The attributes of all entries of a directory.
///
/// # Errors
/// When it cannot be read.
pub(super) async fn attributes(
    client: &Client,
    directory: &str,
) -> Result<BTreeMap<String, Attr>, ClientError> {
    let me = Credentials::root();
    let directory = client.resolve(&me, directory.as_bytes()).await?;
    let page = client
        .readdir(&me, directory.ino, None, PAGE_ENTRIES, false)
        .await?;
    let mut found = BTreeMap::new();
    for entry in page.entries {
        let name = String::from_utf8_lossy(entry.name.as_bytes()).into_owned();
        match client.lookup(&me, directory.ino, &entry.name).await {
            Ok(attr) => found.insert(name, attr),
            // Removed by the operation that was in flight when its client crashed.
            Err(ClientError::Fs(FsError::NotFound)) => None,
            Err(error) => return Err(error),
        };
    }
    Ok(found)
}
