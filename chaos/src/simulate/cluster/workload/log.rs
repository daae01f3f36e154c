//! A log to which all clients and mounts append: no record is lost once its sync has returned, none is torn, and none
//! appears twice.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use bytes::Bytes;
use harvestfs_client::{Client, ClientError, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;

use super::Worker;
use crate::random;
use crate::simulate::cluster::journal::Journal;

/// The directory of the log.
pub const LOG_DIRECTORY: &str = "of-all";
/// The numbers of clients in the log begin here, above those of mounts.
const CLIENTS_FROM: u8 = 100;

/// The number of a client in the log; that of a mount is its own.
pub fn number_of_client(number: u8) -> u8 {
    CLIENTS_FROM + number
}

/// Bytes of a record.
const RECORD_BYTES: usize = 16;
/// The most records of one write: more than a page, so that the end of the file may be beyond the page that a kernel
/// knows as the last one.
pub const RECORDS_MAX: usize = 400;

/// What is known about the log.
#[derive(Debug, Default)]
pub struct Log {
    /// The number of the next record of each mount and client.
    next: BTreeMap<u8, u64>,
    /// Records whose `fsync` returned.
    durable: BTreeSet<(u8, u64)>,
    /// Records that were written and not synced.
    written: BTreeMap<u8, Vec<u64>>,
    /// Records that are being written.
    appending: BTreeMap<u8, Range<u64>>,
    /// Records whose write has no known outcome: they may appear after later ones.
    doubtful: BTreeSet<(u8, u64)>,
    /// Records that were not synced when the namenode ended: mounts append them again, after what others have appended
    /// in the meantime, and a reader that has already seen them sees them twice.
    moved: BTreeSet<(u8, u64)>,
    /// Some machine lost power.
    is_power_lost: bool,
}

impl Log {
    /// Notes that what a mount has not synced may be lost, and that what it is appending may appear later.
    pub fn doubt(&mut self, number: u8) {
        self.written.remove(&number);
        let appended = self.appending.remove(&number).into_iter().flatten();
        self.doubtful
            .extend(appended.map(|record| (number, record)));
    }

    /// Notes that the namenode ended and lost what it had not made durable.
    pub fn namenode_was_lost(&mut self) {
        for (&number, records) in &self.written {
            self.moved
                .extend(records.iter().map(|count| (number, *count)));
        }
        for (&number, records) in &self.appending {
            self.moved
                .extend(records.clone().map(|count| (number, count)));
        }
    }

    /// Notes that the session of a mount ended: what it does not know to be committed, it may commit again in the next
    /// one.
    pub fn session_ended(&mut self, number: u8) {
        self.namenode_was_lost();
        self.doubt(number);
        let doubtful = self.doubtful.iter().filter(|record| record.0 == number);
        self.moved.extend(doubtful);
    }

    /// Notes that a machine lost power, and with it what was not synced there.
    pub fn power_was_lost(&mut self, number: u8) {
        self.written.remove(&number);
        self.is_power_lost = true;
    }

    /// Begins to append the next records of a mount. Returns their numbers and their text.
    pub fn begin(&mut self, number: u8, count: u64) -> (Range<u64>, String) {
        let next = self.next.entry(number).or_default();
        let records = *next..*next + count;
        *next += count;
        self.appending.insert(number, records.clone());
        let text = records.clone().map(|it| record(number, it)).collect();
        (records, text)
    }

    /// Notes that these records were written.
    pub fn written(&mut self, number: u8, records: Range<u64>) {
        self.appending.remove(&number);
        self.written.entry(number).or_default().extend(records);
    }

    /// Notes that a sync returned.
    pub fn synced(&mut self, number: u8) {
        let written = self.written.remove(&number).unwrap_or_default();
        self.durable
            .extend(written.into_iter().map(|record| (number, record)));
    }
}

fn record(number: u8, count: u64) -> String {
    format!("{number:03} {count:011}\n")
}

fn parse(record: &[u8]) -> Option<(u8, u64)> {
    let text = std::str::from_utf8(record).ok()?.strip_suffix('\n')?;
    let (number, count) = text.split_once(' ')?;
    Some((number.parse().ok()?, count.parse().ok()?))
}

/// The path of the log.
pub fn path() -> String {
    format!("/{LOG_DIRECTORY}/log")
}

/// Checks the records of the log in order: all have to be whole, and those of each mount in order.
#[derive(Debug, Default)]
pub struct Reader {
    last: BTreeMap<u8, u64>,
    seen: BTreeSet<(u8, u64)>,
    pub offset: usize,
}

impl Reader {
    /// Takes whole records. Returns what is wrong with them, if anything.
    pub fn take(&mut self, bytes: &[u8], log: &Log) -> Option<String> {
        let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
        for bytes in records {
            let at = self.offset;
            self.offset += RECORD_BYTES;
            let Some((number, count)) = parse(bytes) else {
                let text = bytes.escape_ascii();
                return Some(format!("the log has {text} at {at}, which is no record"));
            };
            if !self.seen.insert((number, count)) && !log.moved.contains(&(number, count)) {
                return Some(format!("the log has record {count} of {number} twice"));
            }
            if log.doubtful.contains(&(number, count)) || log.moved.contains(&(number, count)) {
                continue;
            }
            let last = self.last.insert(number, count);
            if last.is_some_and(|last| last > count) {
                return Some(format!(
                    "the log has record {count} of {number} behind {last:?}"
                ));
            }
        }
        None
    }
}

impl Worker {
    /// Appends records, and syncs them or not.
    pub(super) async fn append(&self) -> Result<(), ClientError> {
        let appended = self.append_records().await;
        if appended.is_err() || !self.journal.is_certain() {
            self.log.borrow_mut().doubt(number_of_client(self.number));
        }
        appended
    }

    async fn append_records(&self) -> Result<(), ClientError> {
        let number = number_of_client(self.number);
        let count = 1 + random::length(&mut *self.rng.borrow_mut(), RECORDS_MAX) as u64;
        let is_synced = self.random(0..2) == 0;
        let (me, flags) = (
            Credentials::root(),
            OpenFlags {
                append: true,
                ..OpenFlags::WRITE
            },
        );
        let file = self
            .client
            .open_path(&me, path().as_bytes(), flags, Some(0o644))
            .await?;
        let (records, text) = self.log.borrow_mut().begin(number, count);
        self.begin(&[], format_args!("append {records:?}, synced: {is_synced}"));
        file.append(Bytes::from(text)).await?;
        self.log.borrow_mut().written(number, records);
        if is_synced {
            file.sync().await?;
            if self.journal.is_certain() {
                self.log.borrow_mut().synced(number);
            }
        }
        file.close().await
    }
}

/// Checks that the log has every record whose `fsync` returned. When power was lost, unsynced parts of the log may be
/// unreadable: then nothing is compared.
///
/// # Errors
/// When it cannot be read.
pub(super) async fn check_log(
    client: &Client,
    log: &RefCell<Log>,
    journal: &Journal,
) -> Result<(), ClientError> {
    let me = Credentials::root();
    let read = match client.read_file(&me, path().as_bytes()).await {
        Err(ClientError::Fs(FsError::NotFound)) => Vec::new(),
        Err(error) if log.borrow().is_power_lost => {
            journal.note("log", format_args!("not compared: {error}"));
            return Ok(());
        }
        read => read?,
    };
    let mut reader = Reader::default();
    if let Some(problem) = reader.take(&read, &log.borrow()) {
        journal.failure(format!("in the end: {problem}"));
    }
    if read.len() % RECORD_BYTES != 0 {
        journal.failure(format!("in the end the log has {} bytes", read.len()));
    }
    let log = log.borrow();
    let missing: Vec<_> = log.durable.difference(&reader.seen).collect();
    if let Some(first) = missing.first() {
        let count = missing.len();
        journal.failure(format!(
            "in the end {count} records are not in the log, the first is {first:?}"
        ));
    }
    Ok(())
}
