//! The operations of clients, and checks that what they were promised is kept.
//!
//! Each client has a directory of its own, which no other client changes: there every answer is known beforehand
//! ([`memory`]). Then there are directories that all clients share: one of files ([`shared`]), and one of names
//! ([`names`]).

mod check;
mod kept;
pub mod log;
mod lone;
mod memory;
pub mod names;
mod quota;
mod shared;
mod silence;
mod trash;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use harvestfs_client::{Client, ClientError, File, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::RenameMode;
use harvestfs_protocol::types::Credentials;
use rand::RngExt;
use rand::rngs::SmallRng;

pub use self::check::check_all;
use self::check::sizes;
pub use self::check::sizes_if_made;
use self::log::LOG_DIRECTORY;
pub use self::log::Log;
use self::memory::Known;
pub use self::memory::Memory;
pub use self::memory::difference;
use self::memory::differences;
pub use self::names::History;
use self::names::{NAMES_DIRECTORY, NAMES_MODE};
pub use self::shared::Board;
use self::shared::SHARED_DIRECTORY;
use super::cut_off::CutOffs;
use super::journal::Journal;
use super::part::Part;
use crate::random;

/// Names in a client's own directory.
const NAMES: usize = 12;
/// The largest file, in bytes: more than a block.
const FILE_BYTES_MAX: usize = 3 << 20;
/// The most bytes of one write to a part of a file.
const WRITE_BYTES_MAX: usize = 64 << 10;
/// The mode of directories that only root changes.
const DIRECTORY_MODE: u16 = 0o755;
/// Mean time between two operations of a client.
const PAUSE: Duration = Duration::from_millis(20);
/// One operation out of `REST` follows a rest of up to `REST_MAX_MS`: during it the client only looks at what it has
/// cached, and only keepalives renew its lease.
const REST: usize = 2_000;
const REST_MAX_MS: usize = 20_000;

/// One client.
pub struct Worker {
    pub number: u8,
    pub client: Client,
    pub rng: Rc<RefCell<SmallRng>>,
    pub memory: Rc<RefCell<Memory>>,
    pub board: Rc<RefCell<Board>>,
    pub names: Rc<RefCell<History>>,
    pub log: Rc<RefCell<Log>>,
    pub cut_offs: CutOffs,
    /// Whether it uses files that have blocks of their own.
    pub has_lone: bool,
    pub journal: Journal,
}

/// The directory that only this client changes.
fn own_directory(number: u8) -> String {
    Part::Client(number).to_string()
}

impl Worker {
    /// Works until `until` returns true; then the session is closed.
    ///
    /// # Errors
    /// When the session cannot continue, and a new one is needed.
    pub async fn work(&self, until: impl Fn() -> bool) -> Result<(), ClientError> {
        let own = own_directory(self.number);
        for (directory, mode) in [
            (own.as_str(), DIRECTORY_MODE),
            (SHARED_DIRECTORY, DIRECTORY_MODE),
            (NAMES_DIRECTORY, NAMES_MODE),
            (LOG_DIRECTORY, DIRECTORY_MODE),
        ] {
            self.make_directory(directory, mode).await?;
        }
        self.limit().await?;
        tokio::select! {
            biased;
            worked = self.take_steps(until) => worked?,
            never = self.watch_shared() => match never {},
            never = self.use_names() => match never {},
            never = self.use_lone() => match never {},
            never = self.be_cut_off() => match never {},
        }
        self.client.close().await
    }

    async fn take_steps(&self, until: impl Fn() -> bool) -> Result<(), ClientError> {
        while !until() {
            self.pause(PAUSE).await;
            self.wait_silently().await;
            if self.random(0..REST) == 0 {
                let rest_ms = self.random(0..REST_MAX_MS) as u64;
                tokio::time::sleep(Duration::from_millis(rest_ms)).await;
            }
            self.step().await?;
        }
        Ok(())
    }

    /// Waits for `mean` on average.
    async fn pause(&self, mean: Duration) {
        let pause = mean.mul_f64(self.random(0..2_000) as f64 / 1_000.0);
        tokio::time::sleep(pause).await;
    }

    fn name(&self) -> String {
        Part::Client(self.number).to_string()
    }

    fn random(&self, range: std::ops::Range<usize>) -> usize {
        self.rng.borrow_mut().random_range(range)
    }

    /// Makes a directory, unless it exists.
    async fn make_directory(&self, path: &str, mode: u16) -> Result<(), ClientError> {
        let me = Credentials::root();
        let (parent, name) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        match self.client.mkdir(&me, parent.ino, &name, mode).await {
            Ok(_) | Err(ClientError::Fs(FsError::Exists)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn step(&self) -> Result<(), ClientError> {
        let name = format!("f{}", self.random(0..NAMES));
        let known = self.memory.borrow().names.get(&name).cloned();
        let dice = self.random(0..100);
        self.journal.operation();
        // An older copy may have another file under this name, which has another name by now. What is written to it
        // there reaches that file later, even when the newest namenode is back.
        let may_write = self.journal.is_certain();
        let result = match known {
            Some(Known::Content { .. }) if dice < 20 => self.read(&name).await,
            Some(Known::Content { .. }) if dice < 40 && may_write => self.change(&name).await,
            Some(Known::Content { .. }) if dice < 48 => self.rename(&name).await,
            Some(Known::Content { .. }) if dice < 52 => self.unlink(&name).await,
            Some(Known::Content { .. }) if dice < 56 => self.remove_to_trash(&name).await,
            Some(Known::Content { .. }) if dice < 60 => self.sync(&name).await,
            Some(Known::Content { .. }) if dice < 64 && may_write => self.clone_file(&name).await,
            _ if dice < 69 => self.list().await,
            _ if dice < 74 => self.publish().await,
            _ if dice < 78 => self.use_snapshots().await,
            _ if dice < 81 => self.use_trash().await,
            _ if dice < 85 => self.use_quota().await,
            _ if dice < 87 => self.append().await,
            _ if dice < 92 => self.read_shared().await,
            _ if may_write => self.write(&name).await,
            _ => self.list().await,
        };
        let mut memory = self.memory.borrow_mut();
        let is_certain = self.journal.is_certain();
        memory.is_removal &= is_certain;
        if result.is_err() || !is_certain {
            memory.doubt_in_flight();
        }
        memory.in_flight.clear();
        let Err(error) = result else {
            return Ok(());
        };
        self.journal.error(&self.name(), &error);
        match error {
            ClientError::Closed
            | ClientError::Connect(_)
            | ClientError::Fs(FsError::SessionExpired) => Err(error),
            _ => Ok(()),
        }
    }

    /// Begins an operation that removes a name and does nothing else to its file.
    fn begin_removal(&self, name: &str, what: std::fmt::Arguments<'_>) {
        self.begin(&[name], what);
        self.memory.borrow_mut().is_removal = true;
    }

    fn begin(&self, names: &[&str], what: std::fmt::Arguments<'_>) {
        let names = names.iter().map(|&name| name.to_owned());
        let mut memory = self.memory.borrow_mut();
        memory.in_flight.extend(names);
        memory.is_removal = false;
        memory.is_power_lost = false;
        drop(memory);
        self.journal.note(&self.name(), what);
    }

    fn path(&self, name: &str) -> String {
        format!("/{}/{name}", own_directory(self.number))
    }

    fn set(&self, name: &str, bytes: Vec<u8>, durable: bool) {
        let mut memory = self.memory.borrow_mut();
        let known = if durable || !memory.is_power_lost {
            Known::Content { bytes, durable }
        } else {
            Known::Nothing
        };
        memory.names.insert(name.to_owned(), known);
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

    /// Resizes a file, or not, and writes in the middle or at the end.
    async fn change(&self, name: &str) -> Result<(), ClientError> {
        let Some((mut bytes, _)) = self.content(name) else {
            return Ok(());
        };
        let durable = self.random(0..2) == 0;
        let new = self.bytes(WRITE_BYTES_MAX);
        let at = self.random(0..bytes.len() + 1);
        let shorter = self.random(0..bytes.len() + 1);
        let longer = bytes.len() + self.random(0..WRITE_BYTES_MAX);
        // A file that is truncated and then extended has zeros there.
        let sizes = match self.random(0..6) {
            0 => vec![shorter],
            1 => vec![longer],
            2 => vec![shorter, longer],
            _ => Vec::new(),
        };
        let (length, synced) = (new.len(), if durable { "sync" } else { "close" });
        self.begin(
            &[name],
            format_args!("change {name}: {length} bytes at {at}, sizes {sizes:?}, {synced}"),
        );
        let file = self.open(name).await?;
        for size in sizes {
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
        self.begin_removal(name, format_args!("unlink {name}"));
        let (me, path) = (Credentials::root(), self.path(name));
        let (parent, file) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        self.client.unlink(&me, parent.ino, &file).await?;
        self.memory.borrow_mut().names.remove(name);
        Ok(())
    }

    /// Checks the names and sizes in the client's own directory.
    async fn list(&self) -> Result<(), ClientError> {
        self.begin(&[], format_args!("list"));
        let directory = own_directory(self.number);
        let found = sizes(&self.client, &directory).await?;
        for problem in differences(&self.memory.borrow().names, &found) {
            self.journal.failure(format!("/{directory}: {problem}"));
        }
        Ok(())
    }
}
