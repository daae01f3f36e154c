//! The tasks that bring pieces of files into blocks: one for small writes of all files (the *pack*),
//! one for each file that is written in bulk. Each fills one block after the other and replaces a
//! block whose pipeline breaks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use bytes::Bytes;
use harvestfs_protocol::error::{DataError, FsError};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::PACKET_BYTES_MAX;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::PlacementRules;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::driver::core::Core;
use crate::driver::write::allocator::Wanted;
use crate::driver::write::file_state::FileState;
use crate::driver::write::pipeline::{self, BlockStream, StreamSender, Topology};
use crate::driver::write::seal::{discard, recover, report_sealed};
use crate::engine::write::packet::{self, Layout};
use crate::engine::write::writeback::{Order, Place, TakenPiece};
use crate::error::ClientError;

/// Packets of a pack in flight. More only makes smaller packets: what queues meanwhile shares one.
const PACK_PACKETS_MAX: usize = 4;
/// As long as less than this waits, only one packet is in flight.
const PACK_QUEUED_BYTES: usize = 128 << 10;
/// Bytes of a chain in flight: covers 10 Gbit/s at several milliseconds for all hops.
const CHAIN_WINDOW_BYTES: u64 = 8 << 20;
/// Attempts to get anything onto datanodes before pausing between them.
const QUICK_ATTEMPTS: u32 = 3;
/// Bounds of these pauses, which double.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(250);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long a writer waits for room: long enough for the namenode to learn that a disk is full and to
/// name another, or for deleted replicas to go.
const NO_SPACE_PATIENCE: Duration = Duration::from_secs(10);
/// A block that nothing was written to for this long is sealed: only sealed blocks are repaired and
/// follow a change of their replication.
const SEAL_IDLE: Duration = Duration::from_secs(20);

/// A block with fewer replicas than it is to have is sealed when it was written for this long: then
/// repair can make the others, and the next block may have them at once.
const LACKING_AGE_MAX: Duration = Duration::from_secs(60);

/// A piece of a file on its way into a block.
pub(crate) struct Job {
    pub(crate) file: Arc<FileState>,
    pub(crate) order: Order,
    pub(crate) piece: TakenPiece,
    /// To be on stable storage when it is acknowledged.
    pub(crate) sync: bool,
    /// The request that waits for it.
    pub(crate) request: RequestId,
}

impl Job {
    /// All datanodes have it.
    pub(crate) fn written(self, stream: &Arc<BlockStream>, block_offset: u64, stable: bool) {
        let place = Place {
            block: stream.new.block,
            block_offset,
        };
        self.file
            .piece_written(self.order, self.piece.id, place, stream, stable);
    }
}

impl packet::Piece for Job {
    fn data(&self) -> &Bytes {
        &self.piece.data
    }

    fn is_continued_by(&self, next: &Self) -> bool {
        Arc::ptr_eq(&self.file, &next.file)
            && self.order == next.order
            && self.piece.offset + self.piece.data.len() as u64 == next.piece.offset
    }

    fn sync(&self) -> bool {
        self.sync
    }
}

/// A queue of pieces with a task that writes them.
pub(crate) struct DataWriter {
    topology: Topology,
    rules: PlacementRules,
    queue: Mutex<Queue>,
    wake: Arc<Notify>,
    /// A pipeline is set up, and nothing failed since.
    flowing: AtomicBool,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Queue {
    /// Whether at least so much data waits.
    fn holds(&self, bytes: usize) -> bool {
        let mut left = bytes;
        self.jobs.iter().any(|job| {
            left = left.saturating_sub(job.piece.data.len());
            left == 0
        })
    }
}

/// Between two attempts to get room below a quota by releasing what was removed.
const RELEASE_PAUSE: Duration = Duration::from_secs(1);

enum Step {
    Wait,
    /// Open a block, for the request that comes first and the file whose data it brings.
    Open(RequestId, InodeId),
    Send(Layout<Job>),
    Sync,
    /// Seal the block: it is full, or no more data will come.
    Finish,
    Stop,
}

/// Failures, one after the other, without a byte that was acknowledged in between. A pipeline that
/// is merely set up is no progress: the next packet may break it again.
struct Trouble {
    since: Instant,
    attempts: u32,
}

impl Trouble {
    fn pause(&self) -> Duration {
        let doublings = self.attempts.saturating_sub(QUICK_ATTEMPTS + 1).min(8);
        (RETRY_PAUSE_MIN * 2u32.pow(doublings)).min(RETRY_PAUSE_MAX)
    }
}

impl DataWriter {
    pub(crate) fn start(core: &Arc<Core>, topology: Topology, rules: PlacementRules) -> Arc<Self> {
        let writer = Arc::new(Self {
            topology,
            rules,
            queue: Mutex::default(),
            wake: Arc::new(Notify::new()),
            flowing: AtomicBool::new(false),
        });
        core.writers.send_modify(|running| *running += 1);
        let (this, core) = (writer.clone(), core.clone());
        core.session.runtime.clone().spawn(async move {
            this.run(&core).await;
            core.writers.send_modify(|running| *running -= 1);
        });
        writer
    }

    pub(crate) fn submit(&self, jobs: Vec<Job>) {
        {
            let mut queue = self.queue.lock();
            if !queue.closed {
                queue.jobs.extend(jobs);
                self.wake.notify_one();
                return;
            }
        }
        give_back(jobs, &ClientError::Closed);
    }

    /// No more pieces will come: the block is sealed once everything is written.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.wake.notify_one();
    }

    /// Whether what is submitted now will most likely be written.
    pub(crate) fn is_flowing(&self) -> bool {
        self.flowing.load(Ordering::Relaxed)
    }

    /// Looks at the state of the session again.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    async fn run(&self, core: &Arc<Core>) {
        // Blocks that are being sealed, recovered or given back.
        let mut ends = JoinSet::new();
        let mut active: Option<StreamSender> = None;
        let mut finishing: Vec<StreamSender> = Vec::new();
        let mut trouble: Option<Trouble> = None;
        let mut refused = None;
        loop {
            while ends.try_join_next().is_some() {}
            for sender in std::mem::take(&mut finishing) {
                if sender.stream.is_sealed() {
                    let stream = sender.stream;
                    ends.spawn(report_sealed(core.clone(), stream));
                } else if is_broken(core, &sender.stream) {
                    self.give_up(core, sender, &mut trouble, &mut ends).await;
                } else {
                    finishing.push(sender);
                }
            }
            if let Some(sender) = active.take_if(|sender| is_broken(core, &sender.stream)) {
                self.give_up(core, sender, &mut trouble, &mut ends).await;
            }
            if trouble.is_some()
                && active
                    .as_ref()
                    .is_some_and(|it| it.stream.acked_bytes() > 0)
            {
                trouble = None;
            }
            let flows = active.is_some() && trouble.is_none();
            self.flowing.store(flows, Ordering::Relaxed);
            match self.next_step(core, active.as_ref(), finishing.is_empty()) {
                Step::Wait => {
                    let idle = active
                        .as_ref()
                        .is_some_and(|sender| sender.stream.unacked().0 == 0);
                    if idle || active.is_none() {
                        // No job waits.
                        trouble = None;
                    }
                    if !idle {
                        self.wake.notified().await;
                    } else if timeout(SEAL_IDLE, self.wake.notified()).await.is_err()
                        && let Some(mut sender) = active.take()
                    {
                        sender.send_seal().await;
                        finishing.push(sender);
                    }
                }
                Step::Stop => break,
                Step::Open(request, file) => {
                    // Others wait while it is tried: once in a while is enough.
                    let may_release =
                        refused.is_none_or(|at: Instant| at.elapsed() > RELEASE_PAUSE);
                    let wanted = Wanted {
                        rules: self.rules,
                        file,
                        may_release,
                    };
                    let opened = self.open(core, wanted, &mut ends);
                    match request.scope(opened).await {
                        Ok(sender) => active = Some(sender),
                        Err(ClientError::Fs(FsError::QuotaExceeded)) => {
                            refused = refused.filter(|_| !may_release).or(Some(Instant::now()));
                            self.refuse(file);
                        }
                        Err(error) => self.after_failure(core, &mut trouble, error).await,
                    }
                }
                Step::Send(layout) => {
                    if let Some(sender) = &mut active {
                        sender.send(layout).await;
                    }
                }
                Step::Sync => {
                    if let Some(sender) = &mut active {
                        sender.send_sync().await;
                    }
                }
                Step::Finish => {
                    if let Some(mut sender) = active.take() {
                        sender.send_seal().await;
                        finishing.push(sender);
                    }
                }
            }
        }
        // They have deadlines of their own.
        while ends.join_next().await.is_some() {}
    }

    fn next_step(&self, core: &Core, active: Option<&StreamSender>, nothing_ends: bool) -> Step {
        let mut queue = self.queue.lock();
        let Some(sender) = active else {
            return match (queue.jobs.front(), queue.closed) {
                (Some(first), _) => Step::Open(first.request, first.file.ino),
                (None, true) if nothing_ends => Step::Stop,
                (None, _) => Step::Wait,
            };
        };
        let stream = &sender.stream;
        let holds_data = stream.acked_bytes() > 0 || stream.unacked().0 > 0;
        let lacks_replicas = stream.new.lacks_replicas() && stream.age() > LACKING_AGE_MAX;
        if holds_data && (lacks_replicas || core.session.is_of_earlier_epoch(stream.new.block)) {
            return Step::Finish;
        }
        if queue.jobs.is_empty() {
            return match (stream.wants_sync(), queue.closed) {
                (true, _) => Step::Sync,
                (false, true) => Step::Finish,
                (false, false) => Step::Wait,
            };
        }
        let (packets, bytes) = stream.unacked();
        let window_open = match self.topology {
            Topology::Star => {
                packets == 0 || packets < PACK_PACKETS_MAX && queue.holds(PACK_QUEUED_BYTES)
            }
            Topology::Chain => bytes + PACKET_BYTES_MAX as u64 <= CHAIN_WINDOW_BYTES,
        };
        if !window_open {
            return Step::Wait;
        }
        match packet::fill(&mut queue.jobs, stream.room(core.block_bytes())) {
            Some(layout) => Step::Send(layout),
            None => Step::Finish,
        }
    }

    async fn open(
        &self,
        core: &Arc<Core>,
        wanted: Wanted,
        ends: &mut JoinSet<()>,
    ) -> Result<StreamSender, ClientError> {
        let new = core.allocator.take(core, wanted).await?;
        match pipeline::open(
            &core.locations,
            new.clone(),
            self.topology,
            self.wake.clone(),
        )
        .await
        {
            Ok(sender) => {
                core.begun(&sender.stream);
                Ok(sender)
            }
            Err(failure) => {
                tracing::debug!(block = %new.block, node = %failure.node, error = %failure.error, "cannot set up a pipeline");
                core.locations
                    .note_refusal(failure.node, &failure.error, Instant::now());
                core.locations.forget(new.block);
                ends.spawn(discard(core.clone(), new));
                Err(ClientError::Write(failure.error))
            }
        }
    }

    /// A quota leaves a file no room: its data is refused, what else waits goes on.
    fn refuse(&self, file: InodeId) {
        let refused: VecDeque<Job> = {
            let mut queue = self.queue.lock();
            let jobs = std::mem::take(&mut queue.jobs).into_iter();
            let (refused, kept) = jobs.partition(|job| job.file.ino == file);
            queue.jobs = kept;
            refused
        };
        give_back(refused, &FsError::QuotaExceeded.into());
    }

    /// Waits before the next attempt, or gives all pieces back when patience is over.
    async fn after_failure(
        &self,
        core: &Arc<Core>,
        trouble: &mut Option<Trouble>,
        error: ClientError,
    ) {
        let trouble_now = trouble.get_or_insert_with(|| Trouble {
            since: Instant::now(),
            attempts: 0,
        });
        trouble_now.attempts += 1;
        let options = &core.session.options;
        let busy = match &error {
            ClientError::Write(DataError::Busy { retry_after_ms })
            | ClientError::Fs(FsError::Busy { retry_after_ms }) => {
                let retry_after = Duration::from_millis((*retry_after_ms).into());
                Some(retry_after.clamp(RETRY_PAUSE_MIN, RETRY_PAUSE_MAX))
            }
            _ => None,
        };
        let is_full = matches!(
            error,
            ClientError::Write(DataError::NoSpace)
                | ClientError::Fs(FsError::NoSpace | FsError::InsufficientDiversity { .. })
        );
        let owners_are_busy = matches!(
            &error,
            ClientError::Fs(FsError::TooFewDatanodes(shortage)) if shortage.is_of_busy_ones()
        );
        let patience = match busy {
            Some(_) => options.busy_timeout,
            None if owners_are_busy => options.busy_timeout,
            None if is_full => options.unreachable_timeout.min(NO_SPACE_PATIENCE),
            None => options.unreachable_timeout,
        };
        let waited = trouble_now.since.elapsed();
        // The call that found no namenode has waited for it already.
        let waited_enough = matches!(error, ClientError::Unreachable { .. });
        let hopeless = waited_enough || !error.is_transient() || core.session.is_closed();
        if hopeless || waited >= patience {
            let error = match error {
                // The failure, of any kind, is due to the close.
                _ if core.session.is_closed() => ClientError::Closed,
                _ if busy.is_some() => ClientError::AllServersBusy { waited },
                ClientError::Write(DataError::NoSpace) => FsError::NoSpace.into(),
                other => other,
            };
            *trouble = None;
            let jobs = std::mem::take(&mut self.queue.lock().jobs);
            give_back(jobs, &error);
            return;
        }
        if let ClientError::Fs(FsError::TooFewDatanodes(_)) = &error
            && trouble_now.attempts == 1
        {
            tracing::warn!(%error, "what was written waits");
        }
        if trouble_now.attempts > QUICK_ATTEMPTS || !matches!(error, ClientError::Write(_)) {
            let left = patience.saturating_sub(waited);
            let pause = busy.unwrap_or_else(|| trouble_now.pause());
            tokio::time::sleep(pause.min(left)).await;
        }
    }

    /// Puts back what was not acknowledged, to go into another block, and saves what was. Patience
    /// is counted as long as nothing is acknowledged.
    async fn give_up(
        &self,
        core: &Arc<Core>,
        sender: StreamSender,
        trouble: &mut Option<Trouble>,
        ends: &mut JoinSet<()>,
    ) {
        let stream = sender.stream.clone();
        // The datanodes learn from this that the stream is over.
        drop(sender);
        let failure = stream.failure();
        if let Some(failure) = &failure {
            tracing::info!(block = %stream.new.block, node = %failure.node, error = %failure.error, "a pipeline broke");
            core.locations
                .note_refusal(failure.node, &failure.error, Instant::now());
        }
        let jobs = stream.take_unacked();
        {
            let mut queue = self.queue.lock();
            for job in jobs.into_iter().rev() {
                queue.jobs.push_front(job);
            }
        }
        ends.spawn(recover(core.clone(), stream.clone()));
        if stream.acked_bytes() > 0 {
            *trouble = None;
        } else if let Some(failure) = failure {
            let error = ClientError::Write(failure.error);
            self.after_failure(core, trouble, error).await;
        }
    }
}

/// Gives pieces back to their files: those of one file together, as one failure. A flush that is wanted
/// after it must not see the rest of it as its own.
fn give_back(jobs: impl IntoIterator<Item = Job>, error: &ClientError) {
    let mut files: BTreeMap<InodeId, Vec<Job>> = BTreeMap::new();
    for job in jobs {
        files.entry(job.file.ino).or_default().push(job);
    }
    for jobs in files.into_values() {
        let pieces: Vec<_> = jobs.iter().map(|job| (job.order, job.piece.id)).collect();
        jobs[0].file.pieces_failed(&pieces, error);
    }
}

fn is_broken(core: &Core, stream: &BlockStream) -> bool {
    stream.failure().is_some() || stream.new.generation != core.session.generation()
}
