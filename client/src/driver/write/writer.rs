//! The tasks that write pieces of files into blocks: one for the small writes of all files with the
//! same placement rules (a *pack*), and one for each file that is written in bulk. Each fills one
//! block after another and replaces a block whose pipeline breaks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::PlacementRules;
use harvestfs_protocol::watch;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::allocator::{Allocator, Wanted};
use super::pipeline::{self, BlockStream, Source, StreamSender};
use super::seal::{discard, recover, report_sealed};
use crate::driver::clock;
use crate::driver::cluster::Cluster;
use crate::engine::session::call::Patience;
use crate::engine::write::packet::Piece;
use crate::engine::write::queue::{Active, Queue, Step, Topology};
use crate::engine::write::trouble::Trouble;
use crate::error::ClientError;

/// A block is sealed when nothing was written to it for this long: only sealed blocks are repaired
/// and follow a change of their replication.
const SEAL_IDLE: Duration = Duration::from_secs(20);
/// Pause between two attempts to make room below a quota by releasing removed files.
const RELEASE_PAUSE: Duration = Duration::from_secs(1);

/// The state that all writers share.
pub(crate) struct Writers {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) allocator: Allocator,
    /// Number of writers, including those of files, that have not sealed and reported their last block.
    running: watch::Sender<usize>,
}

impl Writers {
    pub(crate) fn new(cluster: Arc<Cluster>) -> Self {
        Self {
            cluster,
            allocator: Allocator::default(),
            running: watch::Sender::new(0),
        }
    }

    /// Waits until all writers have sealed and reported their last block.
    pub(crate) async fn ended(&self) {
        let mut running = self.running.subscribe();
        // Fails only without a sender, and this has one.
        let _ = running.wait_for(|&running| running == 0).await;
    }

    fn is_broken<J>(&self, stream: &BlockStream<J>) -> bool {
        stream.failure().is_some() || stream.new.generation != self.cluster.session.generation()
    }
}

/// A queue of pieces with a task that writes them.
pub(crate) struct DataWriter<J> {
    topology: Topology,
    rules: PlacementRules,
    queue: Mutex<Queue<J>>,
    wake: Arc<Notify>,
    /// Whether a pipeline is set up and nothing has failed since.
    flowing: AtomicBool,
}

impl<J: Piece + Send + 'static> DataWriter<J> {
    pub(crate) fn start<S: Source<Job = J>>(
        writers: &Arc<Writers>,
        source: &Arc<S>,
        topology: Topology,
        rules: PlacementRules,
    ) -> Arc<Self> {
        let writer = Arc::new(Self {
            topology,
            rules,
            queue: Mutex::default(),
            wake: Arc::new(Notify::new()),
            flowing: AtomicBool::new(false),
        });
        writers.running.send_modify(|running| *running += 1);
        let task = Task {
            writer: writer.clone(),
            writers: writers.clone(),
            source: source.clone(),
            trouble: None,
            ends: JoinSet::new(),
        };
        writers.cluster.session.runtime.spawn(task.run());
        writer
    }

    pub(crate) fn submit<S: Source<Job = J>>(&self, source: &Arc<S>, jobs: Vec<J>) {
        if let Err(jobs) = self.try_submit(jobs) {
            give_back(source, jobs, &ClientError::Closed);
        }
    }

    /// As [`DataWriter::submit`], for a caller that has an alternative if the writer is closed.
    ///
    /// # Errors
    /// The pieces, when the writer is closed.
    pub(crate) fn try_submit(&self, jobs: Vec<J>) -> Result<(), Vec<J>> {
        self.queue.lock().submit(jobs)?;
        self.wake.notify_one();
        Ok(())
    }

    /// Closes the writer: the block is sealed once everything is written.
    pub(crate) fn close(&self) {
        self.queue.lock().close();
        self.wake.notify_one();
    }

    /// Whether data that is submitted now will most likely be written.
    pub(crate) fn is_flowing(&self) -> bool {
        self.flowing.load(Ordering::Relaxed)
    }

    /// Makes the task check the state of the session again.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }
}

/// The task of a writer.
struct Task<S: Source> {
    writer: Arc<DataWriter<S::Job>>,
    writers: Arc<Writers>,
    source: Arc<S>,
    trouble: Option<Trouble>,
    /// Blocks that are being sealed, recovered or given back.
    ends: JoinSet<()>,
}

impl<S: Source> Task<S> {
    async fn run(mut self) {
        self.write().await;
        // These tasks end with the session at the latest.
        while self.ends.join_next().await.is_some() {}
        self.writers.running.send_modify(|running| *running -= 1);
    }

    async fn write(&mut self) {
        let cluster = self.writers.cluster.clone();
        let writer = self.writer.clone();
        let mut active: Option<StreamSender<S::Job>> = None;
        let mut finishing: Vec<StreamSender<S::Job>> = Vec::new();
        let mut refused = None;
        loop {
            while self.ends.try_join_next().is_some() {}
            for sender in std::mem::take(&mut finishing) {
                if sender.stream.is_sealed() {
                    let stream = sender.stream;
                    self.ends.spawn(report_sealed(cluster.clone(), stream));
                } else if self.writers.is_broken(&sender.stream) {
                    self.give_up(sender).await;
                } else {
                    finishing.push(sender);
                }
            }
            if let Some(sender) = active.take_if(|it| self.writers.is_broken(&it.stream)) {
                self.give_up(sender).await;
            }
            let progresses = |it: &StreamSender<S::Job>| it.stream.acked_bytes() > 0;
            if self.trouble.is_some() && active.as_ref().is_some_and(progresses) {
                self.trouble = None;
            }
            let flows = active.is_some() && self.trouble.is_none();
            writer.flowing.store(flows, Ordering::Relaxed);
            let block = active.as_ref().map(|sender| self.look_at(&sender.stream));
            let step = writer
                .queue
                .lock()
                .next(block.as_ref(), finishing.is_empty());
            match step {
                Step::Wait => {
                    let idle = block.is_some_and(|block| block.unacked_packets == 0);
                    if idle || active.is_none() {
                        // No job waits.
                        self.trouble = None;
                    }
                    if !idle {
                        writer.wake.notified().await;
                    } else if timeout(SEAL_IDLE, writer.wake.notified()).await.is_err()
                        && let Some(mut sender) = active.take()
                    {
                        sender.send_seal().await;
                        finishing.push(sender);
                    }
                }
                Step::Stop => return,
                Step::Open(request, file) => {
                    // Other files wait during such an attempt: once in a while is enough.
                    let may_release = refused.is_none_or(|at: Instant| {
                        clock::now().saturating_duration_since(at) > RELEASE_PAUSE
                    });
                    let wanted = Wanted {
                        rules: writer.rules,
                        file,
                        may_release,
                    };
                    match request.scope(self.open(wanted)).await {
                        Ok(sender) => active = Some(sender),
                        Err(ClientError::Fs(FsError::QuotaExceeded)) => {
                            refused = refused.filter(|_| !may_release).or(Some(clock::now()));
                            // A quota leaves the file no room: data of other files continues.
                            let jobs = writer.queue.lock().take_of(file);
                            give_back(&self.source, jobs, &FsError::QuotaExceeded.into());
                        }
                        Err(error) => self.after_failure(error).await,
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
    }

    fn look_at(&self, stream: &BlockStream<S::Job>) -> Active {
        let session = &self.writers.cluster.session;
        let state = stream.state();
        let (unacked_packets, unacked_bytes) = state.unacked();
        Active {
            topology: self.writer.topology,
            acked_bytes: state.acked_bytes(),
            unacked_packets,
            unacked_bytes,
            wants_sync: state.wants_sync(),
            room: state.room(session.block_bytes()),
            age: stream.age(),
            lacks_replicas: stream.new.lacks_replicas(),
            is_of_earlier_epoch: stream.new.is_of_earlier_epoch(session.epoch()),
        }
    }

    async fn open(&mut self, wanted: Wanted) -> Result<StreamSender<S::Job>, ClientError> {
        let cluster = &self.writers.cluster;
        let new = self.writers.allocator.take(cluster, wanted).await?;
        let (topology, wake) = (self.writer.topology, self.writer.wake.clone());
        match pipeline::open(cluster, &self.source, new.clone(), topology, wake).await {
            Ok(sender) => {
                self.source.begun(&sender.stream);
                Ok(sender)
            }
            Err(failure) => {
                tracing::debug!(block = %new.block, node = %failure.node, error = %failure.error, "cannot set up a pipeline");
                let locations = &cluster.locations;
                locations.note_refusal(failure.node, &failure.error);
                locations.replicas().forget(new.block);
                self.ends.spawn(discard(cluster.clone(), new));
                Err(ClientError::Write(failure.error))
            }
        }
    }

    /// Waits before the next attempt, or gives all pieces back when patience is exhausted.
    async fn after_failure(&mut self, error: ClientError) {
        let session = &self.writers.cluster.session;
        let patience = Patience {
            unreachable: session.options.unreachable_timeout,
            busy: session.options.busy_timeout,
        };
        let now = clock::now();
        let trouble = self.trouble.get_or_insert_with(|| Trouble::new(now));
        let pause = match trouble.failed(error, patience, now) {
            // Whatever the failure was, the close has caused it.
            _ if session.is_closed() => Err(ClientError::Closed),
            pause => pause,
        };
        match pause {
            Ok(Duration::ZERO) => {}
            Ok(pause) => tokio::time::sleep(pause).await,
            Err(error) => {
                self.trouble = None;
                if session.is_closed() {
                    // Later pieces would wait forever.
                    self.writer.queue.lock().close();
                }
                let jobs = self.writer.queue.lock().take_all();
                give_back(&self.source, jobs, &error);
            }
        }
    }

    /// Puts unacknowledged data back, to be written to another block, and saves what was
    /// acknowledged. Patience runs as long as nothing is acknowledged.
    async fn give_up(&mut self, sender: StreamSender<S::Job>) {
        let cluster = self.writers.cluster.clone();
        let stream = sender.stream.clone();
        // This tells the datanodes that the stream has ended.
        drop(sender);
        let failure = stream.failure();
        if let Some(failure) = &failure {
            tracing::info!(block = %stream.new.block, node = %failure.node, error = %failure.error, "a pipeline broke");
            cluster.locations.note_refusal(failure.node, &failure.error);
        }
        let jobs = stream.state().take_unacked();
        self.writer.queue.lock().put_back(jobs);
        let acked_bytes = stream.acked_bytes();
        self.ends
            .spawn(recover(cluster, self.source.clone(), stream));
        if acked_bytes > 0 {
            self.trouble = None;
        } else if let Some(failure) = failure {
            self.after_failure(ClientError::Write(failure.error)).await;
        }
    }
}

/// Gives pieces back to their files, those of one file together, as one failure. A flush that is
/// requested afterwards must not take the remaining failures for its own.
fn give_back<S: Source>(source: &Arc<S>, jobs: Vec<S::Job>, error: &ClientError) {
    let mut files: BTreeMap<InodeId, Vec<S::Job>> = BTreeMap::new();
    for job in jobs {
        files.entry(job.file()).or_default().push(job);
    }
    for pieces in files.into_values() {
        source.failed(pieces, error);
    }
}
