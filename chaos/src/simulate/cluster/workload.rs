//! What clients do, and whether they are kept what they were promised.
//!
//! Each client has a directory of its own, which nobody else changes: there every answer is known beforehand
//! ([`Known`]). In the directory that all share, each replaces files of its own by renaming, and reads those of the
//! others: it must find a version that was there while it looked.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use harvestfs_client::{Client, ClientError, File, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::RenameMode;
use harvestfs_protocol::types::Credentials;
use rand::RngExt;
use rand::rngs::SmallRng;

use super::journal::Journal;
use super::world::Part;
use crate::random;

/// Names in a client's own directory.
const NAMES: usize = 12;
/// Largest file, in bytes: more than a block.
const FILE_BYTES_MAX: usize = 3 << 20;
/// Most bytes that one write of a part has.
const WRITE_BYTES_MAX: usize = 64 << 10;
/// Files of each client in the shared directory.
const SHARED: usize = 3;
/// Mean time between two operations of a client.
const PAUSE: Duration = Duration::from_millis(80);
const SHARED_DIRECTORY: &str = "shared";

/// What is known of a name in a client's own directory. Names that are not listed are known not to be there.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Known {
    /// It is a file with this content.
    Content {
        bytes: Vec<u8>,
        /// It is there also after a crash of the client.
        durable: bool,
    },
    /// An operation on it has no known outcome.
    Nothing,
}

/// What one client knows; it survives crashes of its machine.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    names: BTreeMap<String, Known>,
    /// Names that the operation under way changes.
    in_flight: Vec<String>,
}

impl Memory {
    /// The client's machine crashed.
    pub fn crashed(&mut self) {
        for name in std::mem::take(&mut self.in_flight) {
            self.names.insert(name, Known::Nothing);
        }
        for known in self.names.values_mut() {
            if matches!(known, Known::Content { durable: false, .. }) {
                *known = Known::Nothing;
            }
        }
    }
}

/// Versions of a file in the shared directory.
#[derive(Clone, Copy, Debug, Default)]
struct Published {
    /// The newest whose rename returned.
    at_least: u64,
    /// The newest whose rename began.
    at_most: u64,
}

/// What all clients know together.
#[derive(Debug, Default)]
pub struct Board {
    shared: BTreeMap<String, Published>,
}

/// One client.
pub struct Worker {
    pub number: u8,
    pub client: Client,
    pub rng: Rc<RefCell<SmallRng>>,
    pub memory: Rc<RefCell<Memory>>,
    pub board: Rc<RefCell<Board>>,
    pub journal: Journal,
}

/// The directory that only this client changes.
fn own_directory(number: u8) -> String {
    Part::Client(number).to_string()
}

impl Worker {
    /// Works until `until` says that it is enough; then the session is closed.
    ///
    /// # Errors
    /// When the session cannot go on: a new one is needed.
    pub async fn work(&self, until: impl Fn() -> bool) -> Result<(), ClientError> {
        for directory in [own_directory(self.number), SHARED_DIRECTORY.to_owned()] {
            match self.make_directory(&directory).await {
                Ok(()) | Err(ClientError::Fs(FsError::Exists)) => {}
                Err(error) => return Err(error),
            }
        }
        while !until() {
            let pause = PAUSE.mul_f64(self.random(0..2_000) as f64 / 1_000.0);
            tokio::time::sleep(pause).await;
            self.step().await?;
        }
        self.client.close().await
    }

    fn name(&self) -> String {
        Part::Client(self.number).to_string()
    }

    fn random(&self, range: std::ops::Range<usize>) -> usize {
        self.rng.borrow_mut().random_range(range)
    }

    async fn make_directory(&self, path: &str) -> Result<(), ClientError> {
        let me = Credentials::root();
        let (parent, name) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        self.client.mkdir(&me, parent.ino, &name, 0o755).await?;
        Ok(())
    }

    async fn step(&self) -> Result<(), ClientError> {
        let name = format!("f{}", self.random(0..NAMES));
        let known = self.memory.borrow().names.get(&name).cloned();
        let dice = self.random(0..100);
        self.journal.operation();
        let result = match known {
            Some(Known::Content { .. }) if dice < 20 => self.read(&name).await,
            Some(Known::Content { .. }) if dice < 40 => self.change(&name).await,
            Some(Known::Content { .. }) if dice < 48 => self.rename(&name).await,
            Some(Known::Content { .. }) if dice < 55 => self.unlink(&name).await,
            Some(Known::Content { .. }) if dice < 60 => self.sync(&name).await,
            _ if dice < 70 => self.list().await,
            _ if dice < 80 => self.publish().await,
            _ if dice < 90 => self.read_shared().await,
            _ => self.write(&name).await,
        };
        let Err(error) = result else {
            self.memory.borrow_mut().in_flight.clear();
            return Ok(());
        };
        self.journal.error(&self.name(), &error);
        let mut memory = self.memory.borrow_mut();
        for name in std::mem::take(&mut memory.in_flight) {
            memory.names.insert(name, Known::Nothing);
        }
        match error {
            ClientError::Closed
            | ClientError::Connect(_)
            | ClientError::Fs(FsError::SessionExpired) => Err(error),
            _ => Ok(()),
        }
    }

    fn begin(&self, names: &[&str], what: std::fmt::Arguments<'_>) {
        let names = names.iter().map(|&name| name.to_owned());
        self.memory.borrow_mut().in_flight.extend(names);
        self.journal.note(&self.name(), what);
    }

    fn path(&self, name: &str) -> String {
        format!("/{}/{name}", own_directory(self.number))
    }

    fn set(&self, name: &str, bytes: Vec<u8>, durable: bool) {
        let known = Known::Content { bytes, durable };
        self.memory
            .borrow_mut()
            .names
            .insert(name.to_owned(), known);
    }

    fn content(&self, name: &str) -> Option<(Vec<u8>, bool)> {
        match self.memory.borrow().names.get(name) {
            Some(Known::Content { bytes, durable }) => Some((bytes.clone(), *durable)),
            _ => None,
        }
    }

    /// Bytes of any length up to `max`, small ones as likely as large ones.
    fn bytes(&self, max: usize) -> Vec<u8> {
        let mut rng = self.rng.borrow_mut();
        let mut bytes = vec![0; random::length(&mut *rng, max)];
        rng.fill(&mut bytes[..]);
        bytes
    }

    async fn write(&self, name: &str) -> Result<(), ClientError> {
        let bytes = self.bytes(FILE_BYTES_MAX);
        self.begin(&[name], format_args!("write {name}: {} bytes", bytes.len()));
        let path = self.path(name);
        let me = Credentials::root();
        self.client.write_file(&me, path.as_bytes(), &bytes).await?;
        self.set(name, bytes, true);
        Ok(())
    }

    /// Writes in the middle or at the end, cuts, or both.
    async fn change(&self, name: &str) -> Result<(), ClientError> {
        let Some((mut bytes, _)) = self.content(name) else {
            return Ok(());
        };
        let durable = self.random(0..2) == 0;
        let new = self.bytes(WRITE_BYTES_MAX);
        let at = self.random(0..bytes.len() + 1);
        let size = match self.random(0..4) {
            0 => Some(self.random(0..bytes.len() + 1)),
            1 => Some(bytes.len() + self.random(0..WRITE_BYTES_MAX)),
            _ => None,
        };
        let (length, synced) = (new.len(), if durable { "sync" } else { "close" });
        self.begin(
            &[name],
            format_args!("change {name}: {length} bytes at {at}, size {size:?}, {synced}"),
        );
        let file = self.open(name).await?;
        if let Some(size) = size {
            file.truncate(size as u64).await?;
            bytes.resize(size, 0);
        }
        let at = at.min(bytes.len());
        file.write(at as u64, Bytes::copy_from_slice(&new)).await?;
        bytes.resize(bytes.len().max(at + new.len()), 0);
        bytes[at..at + new.len()].copy_from_slice(&new);
        if durable {
            file.sync().await?;
        }
        file.close().await?;
        self.set(name, bytes, durable);
        Ok(())
    }

    async fn open(&self, name: &str) -> Result<File, ClientError> {
        let (me, path) = (Credentials::root(), self.path(name));
        let flags = OpenFlags::READ_WRITE;
        self.client
            .open_path(&me, path.as_bytes(), flags, None)
            .await
    }

    async fn sync(&self, name: &str) -> Result<(), ClientError> {
        let Some((bytes, _)) = self.content(name) else {
            return Ok(());
        };
        self.begin(&[name], format_args!("sync {name}"));
        let file = self.open(name).await?;
        file.sync().await?;
        file.close().await?;
        self.set(name, bytes, true);
        Ok(())
    }

    async fn read(&self, name: &str) -> Result<(), ClientError> {
        let Some((bytes, _)) = self.content(name) else {
            return Ok(());
        };
        self.begin(&[], format_args!("read {name}"));
        let path = self.path(name);
        let me = Credentials::root();
        let read = self.client.read_file(&me, path.as_bytes()).await?;
        if let Some(difference) = difference(&bytes, &read) {
            self.journal.failure(format!("{path}: {difference}"));
        }
        Ok(())
    }

    async fn rename(&self, from: &str) -> Result<(), ClientError> {
        let to = format!("f{}", self.random(0..NAMES));
        if to == from {
            return Ok(());
        }
        self.begin(&[from, &to], format_args!("rename {from} to {to}"));
        self.rename_path(&self.path(from), &self.path(&to)).await?;
        let mut memory = self.memory.borrow_mut();
        if let Some(known) = memory.names.remove(from) {
            memory.names.insert(to, known);
        }
        Ok(())
    }

    async fn rename_path(&self, from: &str, to: &str) -> Result<(), ClientError> {
        let me = Credentials::root();
        let (from_parent, from) = self.client.resolve_parent(&me, from.as_bytes()).await?;
        let (to_parent, to) = self.client.resolve_parent(&me, to.as_bytes()).await?;
        let (from_parent, to_parent) = (from_parent.ino, to_parent.ino);
        let mode = RenameMode::Replace;
        let renamed = self
            .client
            .rename(&me, from_parent, &from, to_parent, &to, mode);
        renamed.await?;
        Ok(())
    }

    async fn unlink(&self, name: &str) -> Result<(), ClientError> {
        self.begin(&[name], format_args!("unlink {name}"));
        let (me, path) = (Credentials::root(), self.path(name));
        let (parent, file) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        self.client.unlink(&me, parent.ino, &file).await?;
        self.memory.borrow_mut().names.remove(name);
        Ok(())
    }

    /// Names and sizes of the client's own directory.
    async fn list(&self) -> Result<(), ClientError> {
        self.begin(&[], format_args!("list"));
        let directory = own_directory(self.number);
        let found = sizes(&self.client, &directory).await?;
        for problem in self.memory.borrow().differences(&found) {
            self.journal.failure(format!("/{directory}: {problem}"));
        }
        Ok(())
    }

    /// Replaces a file in the shared directory by its next version.
    async fn publish(&self) -> Result<(), ClientError> {
        let name = format!("{}-{}", self.number, self.random(0..SHARED));
        let path = format!("/{SHARED_DIRECTORY}/{name}");
        let version = {
            let mut board = self.board.borrow_mut();
            let published = board.shared.entry(name.clone()).or_default();
            published.at_most += 1;
            published.at_most
        };
        self.begin(&[], format_args!("publish {name}, version {version}"));
        let words = 1 + self.random(0..8_000);
        let content: Vec<u8> = std::iter::repeat_n(version.to_le_bytes(), words)
            .flatten()
            .collect();
        let draft = format!("{path}.new");
        let me = Credentials::root();
        self.client
            .write_file(&me, draft.as_bytes(), &content)
            .await?;
        self.rename_path(&draft, &path).await?;
        if let Some(published) = self.board.borrow_mut().shared.get_mut(&name) {
            published.at_least = published.at_least.max(version);
        }
        Ok(())
    }

    async fn read_shared(&self) -> Result<(), ClientError> {
        let before = {
            let board = self.board.borrow();
            let all: Vec<_> = board
                .shared
                .iter()
                .map(|(name, at)| (name.clone(), *at))
                .collect();
            if all.is_empty() {
                return Ok(());
            }
            all[self.random(0..all.len())].clone()
        };
        let (name, before) = before;
        let path = format!("/{SHARED_DIRECTORY}/{name}");
        self.begin(&[], format_args!("read shared {name}"));
        let me = Credentials::root();
        let read = match self.client.read_file(&me, path.as_bytes()).await {
            Err(ClientError::Fs(FsError::NotFound)) if before.at_least == 0 => return Ok(()),
            // Replaced between the look at the name and the look at the file.
            Err(ClientError::Fs(FsError::Stale)) => return Ok(()),
            read => read?,
        };
        let at_most = self.board.borrow().shared[&name].at_most;
        let (words, rest) = read.as_chunks::<8>();
        let version = words.first().map(|word| u64::from_le_bytes(*word));
        let is_whole = rest.is_empty() && words.iter().all(|word| Some(word) == words.first());
        let is_current = version.is_some_and(|it| (before.at_least..=at_most).contains(&it));
        if !is_whole || !is_current {
            let (at_least, whole) = (before.at_least, if is_whole { "" } else { "not whole, " });
            self.journal.failure(format!(
                "{path}: {whole}version {version:?}, where there were {at_least} to {at_most}",
            ));
        }
        Ok(())
    }
}

/// Compares everything that clients were promised with what a new client finds.
///
/// # Errors
/// When something cannot be read.
pub async fn check_all(
    client: &Client,
    memories: &[Rc<RefCell<Memory>>],
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
    Ok(())
}

/// Most entries that are asked for at a time.
const PAGE_ENTRIES: usize = 1_000;

/// Names in a directory, with the sizes of what they lead to.
///
/// # Errors
/// When it cannot be read.
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

impl Memory {
    fn differences(&self, found: &BTreeMap<String, u64>) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, known) in &self.names {
            let Known::Content { bytes, .. } = known else {
                continue;
            };
            match found.get(name) {
                Some(&size) if size == bytes.len() as u64 => {}
                Some(size) => {
                    problems.push(format!("{name} has {size} bytes, not {}", bytes.len()));
                }
                None => problems.push(format!("{name} is not there")),
            }
        }
        let unknown = found.keys().filter(|name| !self.names.contains_key(*name));
        problems.extend(unknown.map(|name| format!("{name} is there though it was removed")));
        problems
    }
}

/// How what was read differs from what is expected.
pub fn difference(expected: &[u8], found: &[u8]) -> Option<String> {
    if expected == found {
        return None;
    }
    let same = expected
        .iter()
        .zip(found)
        .take_while(|(a, b)| a == b)
        .count();
    let (length, expected) = (found.len(), expected.len());
    Some(format!(
        "{length} bytes instead of {expected}, other ones from {same} on"
    ))
}
