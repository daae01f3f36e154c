//! A log to which all mounts append, and which all follow through a descriptor that stays open.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Program;
use super::kernel::Fd;
use super::shared::DIRECTORY;
use crate::simulate::cluster::journal::Journal;

/// Bytes of a record.
const RECORD_BYTES: usize = 16;
/// Most records of one write.
const RECORDS_MAX: usize = 40;

/// What is known of the log.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// The number of the next record of each mount.
    next: BTreeMap<u8, u64>,
    /// Records whose `fsync` returned.
    durable: BTreeSet<(u8, u64)>,
    /// Records that were written and not synced.
    written: BTreeMap<u8, Vec<u64>>,
    /// Records that are being written.
    appending: BTreeMap<u8, Range<u64>>,
    /// Records whose write has no known outcome: they may be there later than others.
    doubtful: BTreeSet<(u8, u64)>,
    /// Records that were not synced when the namenode ended: mounts append them again, behind what others have appended
    /// meanwhile, and a reader that has seen them sees them twice.
    moved: BTreeSet<(u8, u64)>,
    /// Some machine lost its power.
    is_power_lost: bool,
}

impl Log {
    /// What a mount had not synced may be lost, and what it appends now may be there later.
    pub(super) fn doubt(&mut self, number: u8) {
        self.written.remove(&number);
        let appended = self.appending.remove(&number).into_iter().flatten();
        self.doubtful
            .extend(appended.map(|record| (number, record)));
    }

    /// The namenode ended, with what it had not made durable.
    pub(super) fn namenode_was_lost(&mut self) {
        for (&number, records) in &self.written {
            self.moved
                .extend(records.iter().map(|count| (number, *count)));
        }
        for (&number, records) in &self.appending {
            self.moved
                .extend(records.clone().map(|count| (number, count)));
        }
    }

    /// The session of a mount ended: what it does not know to be committed, it may commit again in the next one.
    pub(super) fn session_ended(&mut self, number: u8) {
        self.namenode_was_lost();
        self.doubt(number);
        let doubtful = self.doubtful.iter().filter(|record| record.0 == number);
        self.moved.extend(doubtful);
    }

    /// A machine lost its power, with what was not synced there.
    pub(super) fn power_was_lost(&mut self, number: u8) {
        self.written.remove(&number);
        self.is_power_lost = true;
    }

    fn synced(&mut self, number: u8) {
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

fn path() -> String {
    format!("{DIRECTORY}/log")
}

/// Checks records in the order in which they are in the log: all are whole, and those of each mount in order.
#[derive(Debug, Default)]
struct Reader {
    last: BTreeMap<u8, u64>,
    seen: BTreeSet<(u8, u64)>,
    offset: usize,
}

impl Reader {
    /// Takes whole records. What is wrong with them.
    fn take(&mut self, bytes: &[u8], log: &Log) -> Option<String> {
        let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
        for bytes in records {
            let at = self.offset;
            self.offset += RECORD_BYTES;
            let Some((number, count)) = parse(bytes) else {
                let text = bytes.escape_ascii();
                return Some(format!("the log has {text} at {at}, which is no record"));
            };
            if !self.seen.insert((number, count)) && !log.moved.contains(&(number, count)) {
                return Some(format!(
                    "the log has record {count} of mount {number} twice"
                ));
            }
            if log.doubtful.contains(&(number, count)) || log.moved.contains(&(number, count)) {
                continue;
            }
            let last = self.last.insert(number, count);
            if last.is_some_and(|last| last > count) {
                return Some(format!(
                    "the log has record {count} of mount {number} behind {last:?}"
                ));
            }
        }
        None
    }
}

impl Program {
    /// Appends records, and syncs them or not.
    pub(super) async fn append(&self) {
        self.make_directory(DIRECTORY).await;
        self.repeat(async || {
            let mode = OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY;
            let fd = self.thread.open(&path(), mode).await?;
            let mut result = Ok(());
            for _ in 0..self.random(1..4) {
                result = self.append_some(&fd).await;
                if result.is_err() {
                    break;
                }
            }
            let closed = self.thread.close(fd).await;
            // What failed is written and synced with no known outcome.
            let mut board = self.board.borrow_mut();
            if result.is_err() || closed.is_err() || !self.journal.is_certain() {
                board.log.doubt(self.number);
            }
            result.and(closed)
        })
        .await;
    }

    async fn append_some(&self, fd: &Fd) -> Result<(), Errno> {
        let count = 1 + self.random(0..RECORDS_MAX) as u64;
        let first = {
            let mut board = self.board.borrow_mut();
            let next = board.log.next.entry(self.number).or_default();
            *next += count;
            *next - count
        };
        let records = first..first + count;
        {
            let mut board = self.board.borrow_mut();
            board.log.appending.insert(self.number, records.clone());
        }
        self.note(format_args!("append {records:?}"));
        let text: String = records.clone().map(|it| record(self.number, it)).collect();
        if self.thread.write(fd, 0, text.as_bytes()).await? != text.len() {
            return Err(Errno::IO);
        }
        {
            let log = &mut self.board.borrow_mut().log;
            log.appending.remove(&self.number);
            log.written.entry(self.number).or_default().extend(records);
        }
        if self.random(0..2) == 0 {
            self.thread.fsync(fd).await?;
            if self.journal.is_certain() {
                self.board.borrow_mut().log.synced(self.number);
            }
        }
        Ok(())
    }

    /// Follows the log, as `tail -f` does.
    pub(super) async fn follow(&self) {
        let open: RefCell<Option<(Fd, Reader)>> = RefCell::new(None);
        self.repeat(async || {
            let (fd, mut reader) = match open.take() {
                Some(open) => open,
                None => match self.thread.open(&path(), OFlags::RDONLY).await {
                    Err(Errno::NOENT) => return Ok(()),
                    opened => (opened?, Reader::default()),
                },
            };
            let size = self.thread.fstat(&fd).await;
            let read = self.thread.read(&fd, reader.offset as u64, 1 << 16).await;
            let taken = read.as_deref().unwrap_or_default();
            let problem = reader.take(taken, &self.board.borrow().log);
            if let Some(problem) = problem {
                self.failure(&problem);
                return self.thread.close(fd).await;
            }
            if size.is_err() || self.random(0..40) == 0 || !self.journal.is_certain() {
                return self.thread.close(fd).await;
            }
            open.replace(Some((fd, reader)));
            match read {
                // The log never gets shorter, but records are committed while it is read.
                Err(Errno::INTR) => Ok(()),
                read => read.map(|_| ()),
            }
        })
        .await;
        if let Some((fd, _)) = open.take()
            && let Err(error) = self.thread.close(fd).await
        {
            self.journal.error(&self.name(), &error);
        }
    }
}

/// Whether the log has every record whose `fsync` returned. When power was lost, some of it may be unreadable, since it
/// was not synced: then nothing is compared.
///
/// # Errors
/// When it cannot be read.
pub(super) async fn check(
    client: &Client,
    board: &Rc<RefCell<super::Board>>,
    journal: &Journal,
) -> Result<(), ClientError> {
    let me = Credentials::root();
    let read = match client.read_file(&me, path().as_bytes()).await {
        Err(ClientError::Fs(FsError::NotFound)) => Vec::new(),
        Err(error) if board.borrow().log.is_power_lost => {
            journal.note("log", format_args!("not compared: {error}"));
            return Ok(());
        }
        read => read?,
    };
    let mut reader = Reader::default();
    if let Some(problem) = reader.take(&read, &board.borrow().log) {
        journal.failure(format!("in the end: {problem}"));
    }
    if read.len() % RECORD_BYTES != 0 {
        journal.failure(format!("in the end the log has {} bytes", read.len()));
    }
    let board = board.borrow();
    let missing: Vec<_> = board.log.durable.difference(&reader.seen).collect();
    if let Some(first) = missing.first() {
        let count = missing.len();
        journal.failure(format!(
            "in the end {count} records are not in the log, the first is {first:?}"
        ));
    }
    Ok(())
}
