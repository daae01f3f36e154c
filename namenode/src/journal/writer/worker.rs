//! The work of the journal thread, or of the user's thread in its place.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use harvestfs_protocol::machine;

use super::{Batch, Command, Completion, JournalWriterOptions, Operation, Queued, Shared};
use crate::journal::{Journal, JournalError, Lsn};

/// The journal thread.
pub(super) struct Worker {
    shared: Arc<Shared>,
    options: JournalWriterOptions,
    receiver: Receiver<Queued>,
    /// A command taken from the queue that did not fit into the previous group.
    carried: Option<Command>,
}

/// Batches that are written and synced together.
#[derive(Default)]
pub(super) struct Group {
    /// The records of all batches.
    records: Vec<Vec<u8>>,
    /// For each batch that was numbered before: the count of `records` before it, and its first number.
    numbers: Vec<(usize, Lsn)>,
    bytes: usize,
    wants_durable: bool,
    /// The number of commands that came from the queue: its batches (but not one of `commit_here`), and the
    /// operation that follows them.
    commands: u64,
    /// For each batch, the count of `records` up to its end, and its completion.
    answers: Vec<(usize, Completion)>,
}

impl Group {
    pub(super) fn add(&mut self, mut batch: Batch) {
        self.bytes += batch.bytes();
        self.wants_durable |= batch.wants_durable;
        let numbered = batch.first.map(|first| (self.records.len(), first));
        self.numbers.extend(numbered);
        self.records.append(&mut batch.records);
        self.answers.push((self.records.len(), batch.done));
    }
}

impl Shared {
    /// Executes a command on this thread, in a simulation.
    pub(super) fn execute_here(self: &Arc<Self>, command: Command, lazy_sync: Duration) {
        self.execute(command, &mut self.journal.lock());
        let shared = Arc::downgrade(self);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(lazy_sync + machine::disk_latency()).await;
            let Some(shared) = shared.upgrade() else {
                return;
            };
            let synced = shared.sync(&mut shared.journal.lock());
            if let Err(error) = synced {
                shared.fail(error);
            }
        });
    }

    /// Executes a command.
    fn execute(&self, command: Command, journal: &mut Journal) {
        if let Some(failure) = self.failure.get().cloned() {
            return command.refuse(failure);
        }
        match command {
            Command::Append(batch) => {
                let mut group = Group::default();
                group.add(batch);
                // The completion receives the error, if any.
                let _ = self.commit(journal, group, false);
            }
            Command::Other(operation) => self.operate(journal, operation),
        }
    }

    /// Runs an operation and answers it. The journal stops if that left it unusable.
    fn operate(&self, journal: &mut Journal, operation: Operation) {
        let answer = operation.run(journal);
        if let Err(error) = journal.check_not_failed() {
            self.fail(error);
        }
        self.publish_durable_lsn(journal);
        answer();
    }

    /// Writes a group, syncs if a batch wants durability or a sync is `overdue`, and answers all
    /// batches.
    pub(super) fn commit(
        &self,
        journal: &mut Journal,
        group: Group,
        overdue: bool,
    ) -> Result<(), Arc<JournalError>> {
        let before_lsn = journal.last_lsn();
        match self.write(journal, &group, overdue) {
            Ok(()) => {
                for (records, done) in group.answers {
                    done(Ok(before_lsn + records as u64));
                }
                Ok(())
            }
            Err(e) => {
                let failure = self.fail(e);
                for (_, done) in group.answers {
                    done(Err(Arc::clone(&failure)));
                }
                Err(failure)
            }
        }
    }

    fn write(
        &self,
        journal: &mut Journal,
        group: &Group,
        overdue: bool,
    ) -> Result<(), JournalError> {
        for &(before, first) in &group.numbers {
            let next = journal.last_lsn() + 1 + before as u64;
            assert_eq!(
                first, next,
                "records from {first} on are handed to the journal, in which {next} is the next one"
            );
        }
        if !group.records.is_empty() {
            journal.append(&group.records)?;
            let records = group.records.len() as u64;
            let counters = &self.counters;
            counters
                .appended_records
                .fetch_add(records, Ordering::Relaxed);
            counters
                .appended_bytes
                .fetch_add(group.bytes as u64, Ordering::Relaxed);
        }
        if group.wants_durable || overdue {
            self.sync(journal)?;
        }
        Ok(())
    }

    pub(super) fn sync(&self, journal: &mut Journal) -> Result<(), JournalError> {
        if journal.durable_lsn() == journal.last_lsn() {
            return Ok(());
        }
        // With a clock that a simulation controls: the duration decides where the next batch is committed.
        let started = tokio::time::Instant::now();
        journal.sync()?;
        let sync_us = started.elapsed().as_micros() as u64;
        // An average, since one slow sync among many quick ones does not mean that the disk is slow.
        let average = self.sync_us.load(Ordering::Relaxed);
        self.sync_us
            .store((average * 7 + sync_us) / 8, Ordering::Relaxed);
        self.counters.syncs.fetch_add(1, Ordering::Relaxed);
        self.counters
            .sync_us_total
            .fetch_add(sync_us, Ordering::Relaxed);
        self.counters
            .sync_us_max
            .fetch_max(sync_us, Ordering::Relaxed);
        self.publish_durable_lsn(journal);
        Ok(())
    }

    fn publish_durable_lsn(&self, journal: &Journal) {
        self.counters
            .durable_lsn
            .store(journal.durable_lsn(), Ordering::Release);
        if let Some(progress) = self.progress.get() {
            progress(Ok(journal.durable_lsn()));
        }
    }

    pub(super) fn fail(&self, error: JournalError) -> Arc<JournalError> {
        tracing::error!(%error, "the journal stopped; nothing more is acknowledged");
        let failure = self.failure.get_or_init(|| Arc::new(error));
        if let Some(progress) = self.progress.get() {
            progress(Err(failure));
        }
        Arc::clone(failure)
    }
}

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        options: JournalWriterOptions,
        receiver: Receiver<Queued>,
    ) -> Self {
        Self {
            shared,
            options,
            receiver,
            carried: None,
        }
    }

    pub(super) fn run(mut self) {
        // When records without a waiting completion must be synced.
        let mut lazy_deadline: Option<Instant> = None;
        loop {
            let first = match self.wait(lazy_deadline) {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => {
                    // Records without a waiting completion; a failure is kept for `shutdown`.
                    if let Err(e) = self.shared.sync(&mut self.shared.journal.lock()) {
                        self.shared.fail(e);
                    }
                    return;
                }
            };
            if let Some(failure) = self.shared.failure.get().cloned() {
                self.carried = first;
                return self.refuse_everything(&failure);
            }
            let overdue = lazy_deadline.is_some_and(|deadline| Instant::now() >= deadline);
            match self.commit(first, overdue) {
                Ok(true) => {
                    let wait = Duration::from_millis(self.options.lazy_sync_ms);
                    lazy_deadline = lazy_deadline.or_else(|| Some(Instant::now() + wait));
                }
                Ok(false) => lazy_deadline = None,
                Err(failure) => return self.refuse_everything(&failure),
            }
        }
    }

    fn wait(&mut self, deadline: Option<Instant>) -> Result<Command, RecvTimeoutError> {
        if let Some(command) = self.carried.take() {
            return Ok(command);
        }
        let queued = match deadline {
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.receiver.recv_timeout(left)
            }
            None => self
                .receiver
                .recv()
                .map_err(|_| RecvTimeoutError::Disconnected),
        };
        queued.map(|queued| queued.command)
    }

    /// Commits the queued commands from `first` on. Returns whether records are left to be synced later.
    fn commit(&mut self, first: Option<Command>, overdue: bool) -> Result<bool, Arc<JournalError>> {
        let shared = Arc::clone(&self.shared);
        let mut journal = shared.journal.lock();
        let (group, operation) = self.collect(first, journal.append_bytes_max());
        let commands = group.commands;
        let outcome = shared.commit(&mut journal, group, overdue);
        match (operation, &outcome) {
            (Some(operation), Ok(())) => shared.operate(&mut journal, operation),
            (Some(operation), Err(failure)) => operation.refuse(Arc::clone(failure)),
            (None, _) => {}
        }
        shared.queued.fetch_sub(commands, Ordering::AcqRel);
        outcome.map(|()| journal.durable_lsn() != journal.last_lsn())
    }

    /// Takes the commands that arrived in the meantime: up to `group_bytes` of batches, or up to the next
    /// operation.
    fn collect(
        &mut self,
        first: Option<Command>,
        append_bytes_max: u64,
    ) -> (Group, Option<Operation>) {
        let bytes_max = usize::try_from(append_bytes_max).unwrap_or(usize::MAX);
        let mut group = Group::default();
        let mut next = first;
        while let Some(command) = next {
            match command {
                Command::Other(operation) => {
                    group.commands += 1;
                    return (group, Some(operation));
                }
                Command::Append(batch) => {
                    let fits = group.bytes + batch.bytes() <= bytes_max;
                    if !fits && !group.answers.is_empty() {
                        self.carried = Some(Command::Append(batch));
                        break;
                    }
                    group.commands += 1;
                    group.add(batch);
                }
            }
            if group.bytes >= self.options.group_bytes {
                break;
            }
            next = self.receiver.try_recv().ok().map(|queued| queued.command);
        }
        (group, None)
    }

    /// Answers every further command with `failure` until the handle is dropped.
    ///
    /// Also after a failure that left the journal itself usable (a full disk, a record that is
    /// too large): the submitter of the records has applied them already, so a journal that
    /// continued without them would not describe that state.
    fn refuse_everything(mut self, failure: &Arc<JournalError>) {
        while let Ok(command) = self.wait(None) {
            command.refuse(Arc::clone(failure));
        }
    }
}
