//! The journal for its one user, with group commit: on a thread of its own, or, while the disk is
//! quick and nothing else is queued, on the user's thread. Two hand-overs between threads take longer
//! than a sync of a quick disk (measured: 2,600 against 6,500 commits a second, one after the other).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use harvestfs_protocol::machine;
use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::format::RECORD_HEADER_BYTES;
use super::{Journal, JournalError, Lsn, SnapshotPlan};

/// Bytes of queued records that one semaphore permit stands for.
const PERMIT_BYTES: usize = 256;

/// A disk is quick whose syncs take less than this on average. The user's thread does nothing else
/// meanwhile.
const QUICK_SYNC_US: u64 = 1_000;

/// How a [`JournalWriter`] groups and bounds its work.
#[derive(Debug, Clone)]
pub struct JournalWriterOptions {
    /// Records that may wait for the journal thread, in bytes; beyond it
    /// [`JournalWriter::submit`] waits.
    pub queue_bytes: usize,
    /// Records written at once, in bytes; a group ends with the batch that reaches it.
    pub group_bytes: usize,
    /// Batches that do not want durability are synced after this time at the latest.
    pub lazy_sync_ms: u64,
}

impl Default for JournalWriterOptions {
    fn default() -> Self {
        Self {
            queue_bytes: 32 * 1024 * 1024,
            group_bytes: 4 * 1024 * 1024,
            lazy_sync_ms: 5,
        }
    }
}

/// Called with the number of the batch's last record, or with the failure that stopped the journal, on
/// the journal thread or by [`JournalWriter::commit`]. Must be quick and must not block: the next
/// group waits for it.
pub type Completion = Box<dyn FnOnce(Result<Lsn, Arc<JournalError>>) + Send>;

/// Called when more records are durable, with the last of them, or with the failure that stopped the journal, on
/// the journal thread or by [`JournalWriter::commit`]. Must be quick and must not block.
pub type Progress = Box<dyn Fn(Result<Lsn, &Arc<JournalError>>) + Send + Sync>;

/// Called on the journal thread with what [`Journal::begin_snapshot`] returned.
pub type SnapshotCompletion =
    Box<dyn FnOnce(Result<Option<SnapshotPlan>, Arc<JournalError>>) + Send>;

/// Records that are written together and answered together.
pub struct Batch {
    /// The records, in order.
    pub records: Vec<Vec<u8>>,
    /// Whether `done` waits until the records are durable. Otherwise it is called when they are
    /// written, and a crash may lose them.
    pub wants_durable: bool,
    /// Receives the outcome.
    pub done: Completion,
}

impl Batch {
    fn bytes(&self) -> usize {
        let payloads: usize = self.records.iter().map(Vec::len).sum();
        payloads + self.records.len() * RECORD_HEADER_BYTES
    }
}

/// Counters of a running journal, for metrics.
#[derive(Debug, Default)]
pub struct JournalCounters {
    durable_lsn: AtomicU64,
    appended_records: AtomicU64,
    appended_bytes: AtomicU64,
    syncs: AtomicU64,
    sync_us_total: AtomicU64,
    sync_us_max: AtomicU64,
}

impl JournalCounters {
    /// The last record known to be durable.
    pub fn durable_lsn(&self) -> Lsn {
        self.durable_lsn.load(Ordering::Acquire)
    }
    /// Records appended since the start.
    pub fn appended_records(&self) -> u64 {
        self.appended_records.load(Ordering::Relaxed)
    }
    /// Bytes appended since the start.
    pub fn appended_bytes(&self) -> u64 {
        self.appended_bytes.load(Ordering::Relaxed)
    }
    /// Syncs since the start.
    pub fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::Relaxed)
    }
    /// Time spent in syncs since the start, in microseconds.
    pub fn sync_us_total(&self) -> u64 {
        self.sync_us_total.load(Ordering::Relaxed)
    }
    /// The longest sync since the start, in microseconds.
    pub fn sync_us_max(&self) -> u64 {
        self.sync_us_max.load(Ordering::Relaxed)
    }
}

enum Command {
    Append(Batch),
    Snapshot(SnapshotCompletion),
}

/// A command with its share of the queue, which it gives back when it leaves the queue.
struct Queued {
    command: Command,
    _share: OwnedSemaphorePermit,
}

/// What the journal thread and the handle share.
struct Shared {
    /// The journal thread waits for it; the user's thread only tries. Held while the journal writes.
    journal: Mutex<Journal>,
    /// Commands that were queued and are not done.
    queued: AtomicU64,
    /// Moving average of the time of a sync.
    sync_us: AtomicU64,
    counters: Arc<JournalCounters>,
    progress: OnceLock<Progress>,
    failure: OnceLock<Arc<JournalError>>,
}

/// Handle to the journal thread. Dropping it lets the thread finish what is queued, sync, and
/// end; [`JournalWriter::shutdown`] also waits for that.
pub struct JournalWriter {
    place: Place,
    shares: Arc<Semaphore>,
    shares_total: u32,
    shared: Arc<Shared>,
}

/// Where what is queued is written.
enum Place {
    Thread {
        queue: mpsc::Sender<Queued>,
        thread: JoinHandle<()>,
    },
    /// In a simulation: at once, where it is handed in, unless the disk is slow or others wait for it. What nothing waits
    /// for is synced after so long.
    Here {
        lazy_sync: Duration,
        late: UnboundedSender<Queued>,
    },
}

impl JournalWriter {
    /// Starts the thread "journal".
    pub fn start(journal: Journal, options: JournalWriterOptions) -> Result<Self, JournalError> {
        let shares_total = (options.queue_bytes / PERMIT_BYTES).clamp(1, u32::MAX as usize >> 3);
        let shares = Arc::new(Semaphore::new(shares_total));
        let counters = Arc::new(JournalCounters::default());
        counters
            .durable_lsn
            .store(journal.durable_lsn(), Ordering::Release);
        let shared = Arc::new(Shared {
            journal: Mutex::new(journal),
            queued: AtomicU64::new(0),
            sync_us: AtomicU64::new(0),
            counters,
            progress: OnceLock::new(),
            failure: OnceLock::new(),
        });
        let place = if machine::is_simulated() {
            let lazy_sync = Duration::from_millis(options.lazy_sync_ms);
            let (late, mut receiver) = unbounded_channel::<Queued>();
            let shared = Arc::clone(&shared);
            tokio::task::spawn_local(async move {
                while let Some(queued) = receiver.recv().await {
                    tokio::time::sleep(machine::disk_latency()).await;
                    shared.execute_here(queued.command, lazy_sync);
                    shared.queued.fetch_sub(1, Ordering::AcqRel);
                }
            });
            Place::Here { lazy_sync, late }
        } else {
            // The channel has no bound of its own; the semaphore bounds it in bytes.
            let (queue, receiver) = mpsc::channel();
            let worker = Worker {
                shared: Arc::clone(&shared),
                options,
                receiver,
                carried: None,
            };
            let thread = thread::Builder::new()
                .name("journal".to_owned())
                .spawn(move || worker.run())
                .map_err(|source| JournalError::Thread { source })?;
            Place::Thread { queue, thread }
        };
        Ok(Self {
            place,
            shares,
            shares_total: shares_total as u32,
            shared,
        })
    }

    /// Commits a batch that wants durability: on this thread while the disk is quick and nothing is
    /// queued, as [`JournalWriter::submit`] does otherwise.
    pub async fn commit(&self, batch: Batch) {
        if let Err(batch) = self.commit_here(batch) {
            self.submit(batch).await;
        }
    }

    fn commit_here(&self, batch: Batch) -> Result<(), Batch> {
        let shared = &*self.shared;
        let quick = shared.sync_us.load(Ordering::Relaxed) < QUICK_SYNC_US
            && machine::disk_latency().is_zero();
        let idle = shared.queued.load(Ordering::Acquire) == 0;
        if !quick || !idle || !batch.wants_durable || shared.failure.get().is_some() {
            return Err(batch);
        }
        let Some(mut journal) = shared.journal.try_lock() else {
            return Err(batch);
        };
        let mut group = Group::default();
        group.add(batch);
        // The answer says if it failed; the thread refuses what comes later.
        let _ = shared.commit(&mut journal, group, false);
        Ok(())
    }

    /// Hands a batch to the journal thread; waits while the queue is full. The order of calls is
    /// the order in the journal.
    pub async fn submit(&self, batch: Batch) {
        let shares = self.shares_of(&batch);
        // The semaphore is never closed; should that change, the batch is still answered.
        match Arc::clone(&self.shares).acquire_many_owned(shares).await {
            Ok(share) => self.enqueue(Command::Append(batch), share),
            Err(_) => (batch.done)(Err(self.stopped())),
        }
    }

    /// Calls [`Journal::begin_snapshot`] on the journal thread, behind what is queued.
    pub async fn begin_snapshot(&self, done: SnapshotCompletion) {
        match Arc::clone(&self.shares).acquire_owned().await {
            Ok(share) => self.enqueue(Command::Snapshot(done), share),
            Err(_) => done(Err(self.stopped())),
        }
    }

    /// Has `progress` called from here on; once.
    pub fn on_progress(&self, progress: Progress) {
        let is_first = self.shared.progress.set(progress).is_ok();
        assert!(is_first, "the journal's progress is watched already");
    }

    /// Counters of this journal.
    pub fn counters(&self) -> Arc<JournalCounters> {
        Arc::clone(&self.shared.counters)
    }

    /// The failure that stopped the journal, if one did. Nothing is acknowledged after it; the
    /// namenode has to be restarted.
    pub fn failure(&self) -> Option<Arc<JournalError>> {
        self.shared.failure.get().cloned()
    }

    /// Writes and syncs what is queued, ends the thread, and returns the journal.
    ///
    /// Blocks; call it from a thread that may.
    pub fn shutdown(self) -> Result<Journal, Arc<JournalError>> {
        let Self { place, shared, .. } = self;
        let ended = match place {
            Place::Thread { queue, thread } => {
                drop(queue);
                thread.join()
            }
            Place::Here { .. } => {
                // A failure is kept.
                if let Err(error) = shared.sync(&mut shared.journal.lock()) {
                    shared.fail(error);
                }
                Ok(())
            }
        };
        if let Some(failure) = shared.failure.get() {
            return Err(Arc::clone(failure));
        }
        match (ended, Arc::into_inner(shared)) {
            (Ok(()), Some(shared)) => Ok(shared.journal.into_inner()),
            _ => Err(stopped("the journal thread panicked")),
        }
    }

    fn shares_of(&self, batch: &Batch) -> u32 {
        let shares = u32::try_from(batch.bytes() / PERMIT_BYTES + 1).unwrap_or(u32::MAX);
        // A batch larger than the whole queue waits until it has the queue to itself.
        shares.min(self.shares_total)
    }

    fn enqueue(&self, command: Command, share: OwnedSemaphorePermit) {
        let before = self.shared.queued.fetch_add(1, Ordering::AcqRel);
        let queued = Queued {
            command,
            _share: share,
        };
        let sent = match &self.place {
            Place::Thread { queue, .. } => queue.send(queued).map_err(|refused| refused.0),
            Place::Here { lazy_sync, .. } if before == 0 && machine::disk_latency().is_zero() => {
                self.shared.execute_here(queued.command, *lazy_sync);
                self.shared.queued.fetch_sub(1, Ordering::AcqRel);
                Ok(())
            }
            Place::Here { late, .. } => late.send(queued).map_err(|refused| refused.0),
        };
        if let Err(queued) = sent {
            match queued.command {
                Command::Append(batch) => (batch.done)(Err(self.stopped())),
                Command::Snapshot(done) => done(Err(self.stopped())),
            }
        }
    }

    fn stopped(&self) -> Arc<JournalError> {
        self.failure()
            .unwrap_or_else(|| stopped("the journal thread ended"))
    }
}

fn stopped(first: &str) -> Arc<JournalError> {
    Arc::new(JournalError::Stopped {
        first: first.to_owned(),
    })
}

/// What runs on the journal thread.
struct Worker {
    shared: Arc<Shared>,
    options: JournalWriterOptions,
    receiver: Receiver<Queued>,
    /// Taken from the queue, but did not fit into the group before.
    carried: Option<Command>,
}

/// Batches that are written and synced together.
#[derive(Default)]
struct Group {
    /// The records of all batches.
    records: Vec<Vec<u8>>,
    bytes: usize,
    wants_durable: bool,
    /// Commands that were queued: the batches, unless they never were, and a snapshot.
    commands: u64,
    /// For each batch, the count of `records` up to its end, and its completion.
    answers: Vec<(usize, Completion)>,
}

impl Group {
    fn add(&mut self, mut batch: Batch) {
        self.bytes += batch.bytes();
        self.wants_durable |= batch.wants_durable;
        self.records.append(&mut batch.records);
        self.answers.push((self.records.len(), batch.done));
    }
}

impl Shared {
    /// Does one command on this thread, which is that of a simulation.
    fn execute_here(self: &Arc<Self>, command: Command, lazy_sync: Duration) {
        self.execute(command, &mut self.journal.lock());
        let shared = Arc::clone(self);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(lazy_sync + machine::disk_latency()).await;
            let synced = shared.sync(&mut shared.journal.lock());
            if let Err(error) = synced {
                shared.fail(error);
            }
        });
    }

    /// Does one command.
    fn execute(&self, command: Command, journal: &mut Journal) {
        let failed = self.failure.get().cloned();
        match (command, failed) {
            (Command::Append(batch), Some(failure)) => (batch.done)(Err(failure)),
            (Command::Snapshot(done), Some(failure)) => done(Err(failure)),
            (Command::Append(batch), None) => {
                let mut group = Group::default();
                group.add(batch);
                // The answer says if it failed.
                let _ = self.commit(journal, group, false);
            }
            (Command::Snapshot(done), None) => {
                done(journal.begin_snapshot().map_err(Arc::new));
                self.publish_durable_lsn(journal);
            }
        }
    }

    /// Writes a group, syncs if anyone waits for that or if it is `overdue`, and answers
    /// everyone.
    fn commit(
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

    fn sync(&self, journal: &mut Journal) -> Result<(), JournalError> {
        if journal.durable_lsn() == journal.last_lsn() {
            return Ok(());
        }
        // By the clock of the machine: how long it takes decides where the next batch is committed.
        let started = tokio::time::Instant::now();
        journal.sync()?;
        let sync_us = started.elapsed().as_micros() as u64;
        // One slow sync among many quick ones does not make a slow disk.
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

    fn fail(&self, error: JournalError) -> Arc<JournalError> {
        tracing::error!(%error, "the journal stopped; nothing more is acknowledged");
        let failure = self.failure.get_or_init(|| Arc::new(error));
        if let Some(progress) = self.progress.get() {
            progress(Err(failure));
        }
        Arc::clone(failure)
    }
}

impl Worker {
    fn run(mut self) {
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

    /// Commits what is queued from `first` on. Whether something is left to be synced later.
    fn commit(&mut self, first: Option<Command>, overdue: bool) -> Result<bool, Arc<JournalError>> {
        let shared = Arc::clone(&self.shared);
        let mut journal = shared.journal.lock();
        let (group, snapshot) = self.collect(first, journal.append_bytes_max());
        let commands = group.commands;
        let outcome = shared.commit(&mut journal, group, overdue);
        match (snapshot, &outcome) {
            (Some(done), Ok(())) => {
                done(journal.begin_snapshot().map_err(Arc::new));
                shared.publish_durable_lsn(&journal);
            }
            (Some(done), Err(failure)) => done(Err(Arc::clone(failure))),
            (None, _) => {}
        }
        shared.queued.fetch_sub(commands, Ordering::AcqRel);
        outcome.map(|()| journal.durable_lsn() != journal.last_lsn())
    }

    /// Takes what arrived in the meantime: up to `group_bytes` of batches, or up to the next
    /// snapshot.
    fn collect(
        &mut self,
        first: Option<Command>,
        append_bytes_max: u64,
    ) -> (Group, Option<SnapshotCompletion>) {
        let bytes_max = usize::try_from(append_bytes_max).unwrap_or(usize::MAX);
        let mut group = Group::default();
        let mut next = first;
        while let Some(command) = next {
            match command {
                Command::Snapshot(done) => {
                    group.commands += 1;
                    return (group, Some(done));
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

    /// Answers every further command with `failure` until the last handle is gone.
    ///
    /// Also after a failure that left the journal itself usable (a full disk, a record that is
    /// too large): the submitter of the records has applied them already, so a journal that
    /// went on without them would not describe that state.
    fn refuse_everything(mut self, failure: &Arc<JournalError>) {
        while let Ok(command) = self.wait(None) {
            match command {
                Command::Append(batch) => (batch.done)(Err(Arc::clone(failure))),
                Command::Snapshot(done) => done(Err(Arc::clone(failure))),
            }
        }
    }
}
