//! Files that only one mount changes, so that every answer is known beforehand.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::types::Credentials;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Program;
use super::kernel::{Fd, PAGE_BYTES};
use crate::simulate::cluster::journal::Journal;
use crate::simulate::cluster::part::Part;
use crate::simulate::cluster::workload::{difference, sizes_if_made};

/// Number of names that operations are drawn from.
const NAMES: usize = 10;
/// Largest file, in bytes: more than a block.
const FILE_BYTES_MAX: usize = 3 << 19;
/// Most bytes of one write.
const WRITE_BYTES_MAX: usize = 64 << 10;

/// The contents of a file.
#[derive(Clone, Debug)]
struct Content {
    bytes: Vec<u8>,
    /// They survive a crash.
    is_durable: bool,
}

/// What is known about the directory of one mount; this survives crashes of its machine.
#[derive(Debug, Default)]
pub struct Files {
    /// The file of each name; several names may have the same file.
    names: BTreeMap<String, usize>,
    files: BTreeMap<usize, Content>,
    /// Names about which nothing is known any more.
    doubtful: BTreeSet<String>,
    /// The names, and the file, that the operation in flight changes.
    in_flight: (Vec<String>, Option<usize>),
    /// A machine has lost power since the operation in flight began.
    is_power_lost: bool,
    next: usize,
}

impl Files {
    /// Notes that the mount's machine crashed.
    pub fn crashed(&mut self) {
        self.doubt();
        self.lose_what_was_not_synced();
    }

    /// Notes that some machine lost power.
    pub fn power_was_lost(&mut self) {
        self.is_power_lost = true;
        self.lose_what_was_not_synced();
    }

    fn lose_what_was_not_synced(&mut self) {
        let lost: Vec<_> = self
            .files
            .iter()
            .filter(|it| !it.1.is_durable)
            .map(|it| *it.0)
            .collect();
        for file in lost {
            self.doubt_file(file);
        }
    }

    /// Notes that the operation in flight has no known outcome.
    fn doubt(&mut self) {
        let (names, file) = std::mem::take(&mut self.in_flight);
        for name in names {
            self.names.remove(&name);
            self.doubtful.insert(name);
        }
        if let Some(file) = file {
            self.doubt_file(file);
        }
    }

    fn doubt_file(&mut self, file: usize) {
        self.files.remove(&file);
        let doubtful = &mut self.doubtful;
        self.names.retain(|name, it| {
            let is_named = *it == file;
            doubtful.extend(is_named.then(|| name.clone()));
            !is_named
        });
    }

    fn new_name(&mut self) -> String {
        self.next += 1;
        format!("f{}", self.next)
    }

    fn set(&mut self, name: &str, bytes: Vec<u8>, is_durable: bool) {
        let file = match self.names.get(name) {
            Some(&file) => file,
            None => {
                self.next += 1;
                self.names.insert(name.to_owned(), self.next);
                self.next
            }
        };
        self.files.insert(file, Content { bytes, is_durable });
        if self.is_power_lost && !is_durable {
            self.doubt_file(file);
        }
    }

    /// Drops files that have lost their last name.
    fn drop_unnamed(&mut self) {
        let named: BTreeSet<usize> = self.names.values().copied().collect();
        self.files.retain(|file, _| named.contains(file));
    }

    /// The differences of a listing, and of sizes if they are given.
    fn differences<'a>(&self, found: impl Iterator<Item = (&'a str, Option<u64>)>) -> Vec<String> {
        let mut problems = Vec::new();
        let mut missing: BTreeSet<&str> = self.names.keys().map(String::as_str).collect();
        for (name, size) in found {
            missing.remove(name);
            match self.names.get(name).and_then(|file| self.files.get(file)) {
                Some(content) => {
                    let bytes = content.bytes.len() as u64;
                    if size.is_some_and(|size| size != bytes) {
                        problems.push(format!("{name} has {size:?} bytes, not {bytes}"));
                    }
                }
                None if self.doubtful.contains(name) => {}
                None => problems.push(format!("{name} is there though it was removed")),
            }
        }
        problems.extend(
            missing
                .into_iter()
                .map(|name| format!("{name} is not there")),
        );
        problems
    }
}

fn directory(number: u8) -> String {
    format!("/{}", Part::Mount(number))
}

impl Program {
    /// Works on files of its own.
    pub(super) async fn work_alone(&self) {
        self.make_directory(&directory(self.number)).await;
        self.repeat(async || {
            let result = self.step().await;
            let mut files = self.files.borrow_mut();
            match result {
                Ok(()) if self.journal.is_certain() => files.in_flight = Default::default(),
                Ok(()) | Err(_) => files.doubt(),
            }
            result
        })
        .await;
    }

    async fn step(&self) -> Result<(), Errno> {
        let name = {
            let files = self.files.borrow();
            let dice = self.random(0..NAMES);
            files.names.keys().nth(dice).cloned()
        };
        let Some(name) = name else {
            return self.create().await;
        };
        match self.random(0..100) {
            0..25 => self.read_name(&name).await,
            25..55 => self.change(&name).await,
            55..65 => self.rename_name(&name).await,
            65..72 => self.unlink_name(&name).await,
            72..80 => self.link_name(&name).await,
            80..86 => self.list_names().await,
            86..92 => self.use_unlinked(&name).await,
            _ => self.overwrite(&name).await,
        }
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", directory(self.number))
    }

    /// Begins an operation on these names, which changes the file of the first.
    fn begin(&self, names: &[&str], what: std::fmt::Arguments<'_>) {
        let mut files = self.files.borrow_mut();
        let file = names
            .first()
            .and_then(|name| files.names.get(*name))
            .copied();
        let names = names.iter().map(|&name| name.to_owned());
        files.is_power_lost = false;
        files.in_flight = (names.collect(), file);
        self.note(what);
    }

    /// The contents of a file, unless they have become doubtful.
    fn content(&self, name: &str) -> Option<Vec<u8>> {
        let files = self.files.borrow();
        let content = files.files.get(files.names.get(name)?)?;
        Some(content.bytes.clone())
    }

    async fn create(&self) -> Result<(), Errno> {
        let name = self.files.borrow_mut().new_name();
        self.fill(&name, OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY)
            .await
    }

    async fn overwrite(&self, name: &str) -> Result<(), Errno> {
        self.fill(name, OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY)
            .await
    }

    async fn fill(&self, name: &str, mode: OFlags) -> Result<(), Errno> {
        let bytes = self.bytes(FILE_BYTES_MAX);
        let is_durable = self.random(0..2) == 0;
        let synced = if is_durable { "sync" } else { "close" };
        self.begin(
            &[name],
            format_args!("write {name}: {} bytes, {synced}", bytes.len()),
        );
        let fd = self.thread.open(&self.path(name), mode).await?;
        let mut written = 0;
        while written < bytes.len() {
            let length = self.random(1..bytes.len() - written + 1);
            let part = &bytes[written..written + length];
            written += self.thread.write(&fd, written as u64, part).await?;
        }
        self.end(name, fd, bytes, is_durable).await
    }

    /// Syncs the file if `is_durable`, and closes it.
    async fn end(&self, name: &str, fd: Fd, bytes: Vec<u8>, is_durable: bool) -> Result<(), Errno> {
        let synced = match is_durable {
            true => self.thread.fsync(&fd).await,
            false => Ok(()),
        };
        let size = self.thread.fstat(&fd).await;
        self.thread.close(fd).await?;
        synced?;
        if size?.size != bytes.len() as u64 {
            self.failure(&format!("{name} has {size:?}, not {} bytes", bytes.len()));
        }
        self.files.borrow_mut().set(name, bytes, is_durable);
        Ok(())
    }

    async fn compare(&self, name: &str, fd: &Fd, expected: &[u8]) -> Result<(), Errno> {
        let read = self.read_all(fd).await?;
        if let Some(difference) = difference(expected, &read) {
            self.failure(&format!("{name}: {difference}"));
        }
        Ok(())
    }

    async fn read_name(&self, name: &str) -> Result<(), Errno> {
        self.note(format_args!("read {name}"));
        let Some(expected) = self.content(name) else {
            return Ok(());
        };
        let stat = self.thread.stat(&self.path(name)).await?;
        if stat.size != expected.len() as u64 {
            self.failure(&format!(
                "{name} has {} bytes, not {}",
                stat.size,
                expected.len()
            ));
        }
        let fd = self.thread.open(&self.path(name), OFlags::RDONLY).await?;
        let compared = self.compare(name, &fd, &expected).await;
        self.thread.close(fd).await?;
        compared
    }

    /// Writes, truncates, maps and reads in any order through one descriptor, with another one open for reading.
    async fn change(&self, name: &str) -> Result<(), Errno> {
        let is_durable = self.random(0..2) == 0;
        self.begin(&[name], format_args!("change {name}"));
        let Some(mut bytes) = self.content(name) else {
            return Ok(());
        };
        let fd = self.thread.open(&self.path(name), OFlags::RDWR).await?;
        let reader = self.thread.open(&self.path(name), OFlags::RDONLY).await?;
        for _ in 0..self.random(1..5) {
            self.change_open(name, &fd, &mut bytes).await?;
            self.compare(name, &reader, &bytes).await?;
        }
        self.thread.close(reader).await?;
        self.end(name, fd, bytes, is_durable).await
    }

    async fn change_open(&self, name: &str, fd: &Fd, bytes: &mut Vec<u8>) -> Result<(), Errno> {
        let at = self.random(0..bytes.len() + 1);
        match self.random(0..10) {
            0 => {
                let size = self.random(0..bytes.len() + 1);
                self.note(format_args!("{name}: cut to {size}"));
                self.thread.truncate(fd, size as u64).await?;
                bytes.truncate(size);
            }
            1 => {
                let size = bytes.len() + self.random(0..WRITE_BYTES_MAX);
                self.note(format_args!("{name}: grown to {size}"));
                self.thread.truncate(fd, size as u64).await?;
                bytes.resize(size, 0);
            }
            2..5 => {
                let within = PAGE_BYTES as usize - at % PAGE_BYTES as usize;
                let new = self.bytes(within.min(bytes.len() - at).max(1));
                self.note(format_args!("{name}: {} bytes mapped at {at}", new.len()));
                let written = self.thread.write_mapped(fd, at as u64, &new).await?;
                let expected = new.len().min(bytes.len() - at);
                if written != expected {
                    self.failure(&format!(
                        "{name} ends {written} bytes behind {at}, not {expected}"
                    ));
                }
                bytes[at..at + written].copy_from_slice(&new[..written]);
            }
            _ => {
                let at = at + self.random(0..4) / 3 * self.random(0..10_000);
                let new = self.bytes(WRITE_BYTES_MAX);
                self.note(format_args!("{name}: {} bytes at {at}", new.len()));
                let written = self.thread.write(fd, at as u64, &new).await?;
                if written != new.len() {
                    return Err(Errno::IO);
                }
                if !new.is_empty() {
                    bytes.resize(bytes.len().max(at + new.len()), 0);
                    bytes[at..at + new.len()].copy_from_slice(&new);
                }
            }
        }
        Ok(())
    }

    async fn rename_name(&self, from: &str) -> Result<(), Errno> {
        let existing = self
            .files
            .borrow()
            .names
            .keys()
            .nth(self.random(0..NAMES))
            .cloned();
        let to = match existing {
            Some(to) if self.random(0..2) == 0 => to,
            _ => self.files.borrow_mut().new_name(),
        };
        self.begin(&[from, &to], format_args!("rename {from} to {to}"));
        self.thread
            .rename(&self.path(from), &self.path(&to))
            .await?;
        let mut files = self.files.borrow_mut();
        if files.names.get(&to) != files.names.get(from) || !files.names.contains_key(from) {
            match files.names.remove(from) {
                Some(file) => _ = files.names.insert(to, file),
                // Its contents have become doubtful in the meantime.
                None => {
                    files.names.remove(&to);
                    files.doubtful.insert(to);
                }
            }
        }
        files.drop_unnamed();
        Ok(())
    }

    async fn unlink_name(&self, name: &str) -> Result<(), Errno> {
        self.begin(&[name], format_args!("unlink {name}"));
        self.thread.unlink(&self.path(name)).await?;
        let mut files = self.files.borrow_mut();
        files.names.remove(name);
        files.drop_unnamed();
        Ok(())
    }

    /// Gives a file a second name, changes it through that one, and reads it through the first.
    async fn link_name(&self, name: &str) -> Result<(), Errno> {
        let other = self.files.borrow_mut().new_name();
        self.begin(&[name, &other], format_args!("link {name} as {other}"));
        self.thread
            .link(&self.path(name), &self.path(&other))
            .await?;
        {
            let mut files = self.files.borrow_mut();
            let Some(&file) = files.names.get(name) else {
                files.doubtful.insert(other);
                return Ok(());
            };
            files.names.insert(other.clone(), file);
        }
        let stat = self.thread.stat(&self.path(name)).await?;
        let count = {
            let files = self.files.borrow();
            let file = files.names.get(name);
            // Any doubtful name may be a name of this file.
            file.map(|file| {
                let count = files.names.values().filter(|it| *it == file).count();
                count..=count + files.doubtful.len()
            })
        };
        if let Some(count) = count
            && !count.contains(&(stat.nlink as usize))
        {
            self.failure(&format!("{name} has {} names, not {count:?}", stat.nlink));
        }
        self.change(&other).await?;
        self.read_name(name).await
    }

    async fn list_names(&self) -> Result<(), Errno> {
        self.note(format_args!("list"));
        let found = self.thread.list(&directory(self.number)).await?;
        let found = found.iter().map(|name| (name.as_str(), None));
        for problem in self.files.borrow().differences(found) {
            self.failure(&format!("list: {problem}"));
        }
        Ok(())
    }

    /// Removes a name, and continues to use the open file.
    async fn use_unlinked(&self, name: &str) -> Result<(), Errno> {
        let Some(mut bytes) = self.content(name) else {
            return Ok(());
        };
        self.begin(&[name], format_args!("unlink {name}, and use it"));
        let fd = self.thread.open(&self.path(name), OFlags::RDWR).await?;
        self.thread.unlink(&self.path(name)).await?;
        let file = self.files.borrow_mut().names.remove(name);
        for _ in 0..self.random(1..4) {
            self.change_open(name, &fd, &mut bytes).await?;
            self.compare(name, &fd, &bytes).await?;
        }
        self.thread.close(fd).await?;
        let mut files = self.files.borrow_mut();
        if let Some(content) = file.and_then(|file| files.files.get_mut(&file)) {
            *content = Content {
                bytes,
                is_durable: false,
            };
        }
        files.drop_unnamed();
        Ok(())
    }
}

/// Compares the contents of a mount's directory at the end.
///
/// # Errors
/// When it cannot be read.
pub(super) async fn check(
    client: &Client,
    number: u8,
    files: &Rc<RefCell<Files>>,
    journal: &Journal,
) -> Result<(), ClientError> {
    let directory = directory(number);
    let found = sizes_if_made(client, &directory).await?;
    let files = files.take();
    let listed = found
        .iter()
        .map(|(name, size)| (name.as_str(), Some(*size)));
    for problem in files.differences(listed) {
        journal.failure(format!("{directory}, in the end: {problem}"));
    }
    for (name, file) in &files.names {
        let path = format!("{directory}/{name}");
        let me = Credentials::root();
        let problem = match client.read_file(&me, path.as_bytes()).await {
            Ok(read) => difference(&files.files[file].bytes, &read),
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem {
            journal.failure(format!("{path}, in the end: {problem}"));
        }
    }
    Ok(())
}
