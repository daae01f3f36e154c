//! Snapshots, and checks of a large namespace, beside the running engine.
//!
//! A low-priority thread reads the previous snapshot and the records since then into a second namespace, compares its
//! counts with those of the running one at the same record, and writes it out (or checks it). The running engine does
//! not stop. The price is memory: while the thread works, the namespace is in memory twice.

use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc as std_mpsc;
use std::thread::{self, JoinHandle};

use harvestfs_protocol::admin::FsckFinding;
use harvestfs_protocol::machine;
use harvestfs_protocol::panics::contained;
use tokio::sync::mpsc;

use super::NamenodeError;
use super::recovery::{Replayed, read_base, replay};
use crate::consensus::BeforeSnapshot;
use crate::engine::namespace::{Counts, SnapshotError};
use crate::journal::{JournalError, Lsn, SnapshotCompletion, SnapshotPlan};

/// Niceness of the thread: a tenth of the usual share of the processor, low enough to go unnoticed, but still making
/// progress on a busy machine.
const NICENESS: i32 = 10;

/// Bytes that are buffered before they are written to the snapshot.
const WRITE_BUFFER_BYTES: usize = 256 * 1024;

/// What the second namespace is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Writing a snapshot of it.
    Snapshot,
    /// Checking it for contradictions.
    Check,
}

/// The result of a checkpoint.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A snapshot that covers the records up to `lsn` is in place.
    Installed {
        /// The last record covered.
        lsn: Lsn,
        /// Its size.
        content_bytes: u64,
    },
    /// There was nothing new since the last snapshot.
    NothingNew,
    /// What the check found.
    Checked(Vec<FsckFinding>),
    /// The namenode stops.
    Cancelled,
}

/// Why no snapshot was written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error(transparent)]
    Journal(#[from] Arc<JournalError>),
    #[error(transparent)]
    Replay(#[from] NamenodeError),
    #[error("the snapshot cannot be written: {0}")]
    Write(#[from] SnapshotError),
    #[error(
        "the journal replayed up to record {lsn} gives other counts ({replayed:?}) than the \
         running namenode had ({running:?}): a defect of this software; no snapshot is written"
    )]
    Differs {
        lsn: Lsn,
        running: Box<Counts>,
        replayed: Box<Counts>,
    },
    #[error("the journal did not begin the snapshot")]
    NotBegun,
    #[error(
        "replaying the journal stopped at a broken invariant, which the log says: a defect of this \
         software; no snapshot is written"
    )]
    Panicked,
}

/// A running checkpoint.
pub(crate) struct Checkpoint {
    pub purpose: Purpose,
    cancelled: Arc<AtomicBool>,
    /// `None` in a simulation, where the journal does the work.
    thread: Option<JoinHandle<()>>,
}

impl Checkpoint {
    /// Starts the thread. The returned function must be given to the journal's `begin_snapshot` with the record at
    /// which the running namespace has the counts `running`. The thread calls `before_install` before a snapshot is
    /// put in place.
    pub(crate) fn start(
        purpose: Purpose,
        running: Counts,
        before_install: BeforeSnapshot,
        done: mpsc::Sender<Result<Outcome, CheckpointError>>,
    ) -> std::io::Result<(Self, SnapshotCompletion)> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let work = Work {
            purpose,
            running,
            before_install,
            cancelled: Arc::clone(&cancelled),
        };
        if machine::is_simulated() {
            let begin: SnapshotCompletion = Box::new(move |plan| {
                let outcome = contained(|| work.run(plan));
                // There is room: no other checkpoint is running.
                let _ = done.try_send(outcome.unwrap_or(Err(CheckpointError::Panicked)));
            });
            let checkpoint = Self {
                purpose,
                cancelled,
                thread: None,
            };
            return Ok((checkpoint, begin));
        }
        let (begun, plan) = std_mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || {
                let plan = plan.recv().unwrap_or_else(|_| Ok(None));
                let outcome = contained(|| work.run(plan));
                // The receiver is dropped only when the namenode stops.
                let _ = done.blocking_send(outcome.unwrap_or(Err(CheckpointError::Panicked)));
            })?;
        let begin: SnapshotCompletion = Box::new(move |plan| {
            // The thread takes only the first message, so there is room.
            let _ = begun.try_send(plan);
        });
        let checkpoint = Self {
            purpose,
            cancelled,
            thread: Some(thread),
        };
        Ok((checkpoint, begin))
    }

    /// Cancels the work and waits for the thread. Blocks for a short time.
    pub(crate) fn cancel(self) {
        self.cancelled.store(true, Ordering::Relaxed);
        if self.thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the checkpoint thread panicked");
        }
    }
}

struct Work {
    purpose: Purpose,
    running: Counts,
    before_install: BeforeSnapshot,
    cancelled: Arc<AtomicBool>,
}

impl Work {
    fn run(
        self,
        plan: Result<Option<SnapshotPlan>, Arc<JournalError>>,
    ) -> Result<Outcome, CheckpointError> {
        let Some(plan) = plan? else {
            return Ok(match self.purpose {
                Purpose::Snapshot => Outcome::NothingNew,
                Purpose::Check => return Err(CheckpointError::NotBegun),
            });
        };
        if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
            tracing::warn!(%error, "the checkpoint works at the usual priority");
        }
        let lsn = plan.lsn();
        let journal = |error| CheckpointError::Journal(Arc::new(error));
        let (base, base_lsn) = read_base(plan.base().map_err(journal)?)?;
        let records = plan.records().map_err(journal)?;
        let cancelled = || self.cancelled.load(Ordering::Relaxed);
        let Some(Replayed { namespace, .. }) = replay(base, base_lsn, records, cancelled)? else {
            return Ok(Outcome::Cancelled);
        };
        let replayed = comparable(namespace.counts());
        let running = comparable(self.running);
        if replayed != running {
            return Err(CheckpointError::Differs {
                lsn,
                running: Box::new(running),
                replayed: Box::new(replayed),
            });
        }
        if self.purpose == Purpose::Check {
            return Ok(Outcome::Checked(namespace.check()));
        }
        let mut writer =
            BufWriter::with_capacity(WRITE_BUFFER_BYTES, plan.writer().map_err(journal)?);
        namespace.write_snapshot(&mut writer)?;
        namespace.write_behind_snapshot(&mut writer)?;
        writer.flush().map_err(SnapshotError::Io)?;
        let writer = writer
            .into_inner()
            .map_err(|error| SnapshotError::Io(error.into_error()))?;
        if cancelled() {
            return Ok(Outcome::Cancelled);
        }
        (self.before_install)().map_err(journal)?;
        let installed = writer.install().map_err(journal)?;
        Ok(Outcome::Installed {
            lsn: installed.lsn,
            content_bytes: installed.content_bytes,
        })
    }
}

/// The counts that two namespaces with the same content share: all but the memory used.
fn comparable(counts: Counts) -> Counts {
    Counts {
        memory_bytes: 0,
        ..counts
    }
}
