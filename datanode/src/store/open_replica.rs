//! Replicas that are not sealed: their writers, and taking them over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use harvestfs_protocol::watch;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::error::StoreError;
use super::replica::{OpenFile, ReplicaWriter};
use super::volume::{Volume, WriterCount};
use crate::engine::quota::Charge;

/// How long to wait for a writer to let go of a replica that is being taken over. A writer lets go as soon as its disk
/// has responded.
const TAKE_OVER_DEADLINE: Duration = Duration::from_secs(35);

/// The kind of writer of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A pipeline.
    Pipeline,
    /// A repair: the replica does not count until it is sealed.
    Repair,
}

/// A replica that is not sealed.
pub struct OpenReplica {
    /// The kind of writer.
    pub origin: Origin,
    /// Chunks that may be read.
    chunks: AtomicU32,
    /// Data and checksums differ.
    corrupt: AtomicBool,
    /// A sync of it failed, or it was found at the start: a sync proves nothing before the replica is rewritten.
    unproven: AtomicBool,
    /// For an unproven replica: the number of chunks that were rewritten and then synced.
    proven_chunks: AtomicU32,
    /// Once true, the writer must stop.
    fence: watch::Sender<bool>,
    slot: Mutex<Slot>,
    let_go: Notify,
}

enum Slot {
    /// A writer has the replica. Contains its file, once created.
    Writing(Option<Arc<OpenFile>>),
    /// Neither being written nor taken over.
    Idle(Charge),
    /// Being sealed or deleted, or already sealed or deleted.
    Taken,
}

impl OpenReplica {
    /// A replica that is about to be written.
    pub fn writing(origin: Origin) -> Arc<Self> {
        Self::new(origin, 0, Slot::Writing(None))
    }

    /// A replica that was found at the start.
    pub fn found(chunks: u32, charge: Charge) -> Arc<Self> {
        let replica = Self::new(Origin::Pipeline, chunks, Slot::Idle(charge));
        replica.set_unproven();
        replica
    }

    fn new(origin: Origin, chunks: u32, slot: Slot) -> Arc<Self> {
        Arc::new(Self {
            origin,
            chunks: AtomicU32::new(chunks),
            corrupt: AtomicBool::new(false),
            unproven: AtomicBool::new(false),
            proven_chunks: AtomicU32::new(0),
            fence: watch::Sender::new(false),
            slot: Mutex::new(slot),
            let_go: Notify::new(),
        })
    }

    /// Chunks that may be read.
    pub fn chunks(&self) -> u32 {
        // Pairs with the store in `Lease::publish`: a thread that sees the number sees the data.
        self.chunks.load(Ordering::Acquire)
    }

    /// Records that no more than so many chunks can be read.
    pub fn cut(&self, chunks: u32) {
        self.chunks.fetch_min(chunks, Ordering::AcqRel);
    }

    /// Whether it has to be rewritten before a sync proves that it is on stable storage.
    pub fn is_unproven(&self) -> bool {
        self.unproven.load(Ordering::Relaxed)
    }

    /// For an unproven replica: the number of chunks that need not be rewritten.
    pub fn proven_chunks(&self) -> u32 {
        self.proven_chunks.load(Ordering::Relaxed)
    }

    /// Records that so many chunks were rewritten and synced. The caller must own the replica.
    pub fn set_proven_chunks(&self, chunks: u32) {
        self.proven_chunks.store(chunks, Ordering::Relaxed);
    }

    /// Records that a sync of it failed.
    pub fn set_unproven(&self) {
        self.proven_chunks.store(0, Ordering::Relaxed);
        self.unproven.store(true, Ordering::Relaxed);
    }

    /// Whether it is neither being written nor taken over.
    pub fn is_idle(&self) -> bool {
        matches!(*self.slot.lock(), Slot::Idle(_))
    }

    /// The writer's file, if there is a writer.
    pub fn file(&self) -> Option<Arc<OpenFile>> {
        match &*self.slot.lock() {
            Slot::Writing(file) => file.clone(),
            Slot::Idle(_) | Slot::Taken => None,
        }
    }

    /// Whether data and checksums were found to differ.
    pub fn is_corrupt(&self) -> bool {
        self.corrupt.load(Ordering::Relaxed)
    }

    /// Records that data and checksums differ, and fences the writer; returns whether that was already known.
    pub fn set_corrupt(&self) -> bool {
        self.fence.send_replace(true);
        self.corrupt.swap(true, Ordering::Relaxed)
    }

    /// Whether the writer must stop.
    pub fn is_fenced(&self) -> bool {
        *self.fence.borrow()
    }

    /// Completes when the writer must stop.
    pub async fn fenced(&self) {
        // The sender lives as long as `self`.
        let _ = self.fence.subscribe().wait_for(|fenced| *fenced).await;
    }

    /// Stops the writer and takes the replica from it.
    ///
    /// # Errors
    /// [`StoreError::OutOfOrder`] if it was taken over already, or the writer does not let go.
    pub async fn take_over(self: &Arc<Self>) -> Result<Taken, StoreError> {
        self.fence.send_replace(true);
        let take = async {
            loop {
                let let_go = self.let_go.notified();
                tokio::pin!(let_go);
                let_go.as_mut().enable();
                if let Some(result) = self.try_take() {
                    return result;
                }
                let_go.await;
            }
        };
        match tokio::time::timeout(TAKE_OVER_DEADLINE, take).await {
            Ok(Ok(charge)) => Ok(Taken::new(self.clone(), charge)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(out_of_order("its writer does not stop")),
        }
    }

    fn try_take(&self) -> Option<Result<Charge, StoreError>> {
        let mut slot = self.slot.lock();
        match std::mem::replace(&mut *slot, Slot::Taken) {
            Slot::Idle(charge) => Some(Ok(charge)),
            Slot::Taken => Some(Err(out_of_order("it is being sealed or deleted"))),
            writing @ Slot::Writing(_) => {
                *slot = writing;
                None
            }
        }
    }

    /// Gives the replica back, or to the next caller that takes it over. The caller must own it.
    pub fn put_back(&self, charge: Charge) {
        self.replace(Slot::Idle(charge));
        self.let_go.notify_waiters();
    }

    /// Records that the replica is sealed or removed, or is about to be: it can no longer be taken over. The caller
    /// must own it.
    pub fn end(&self) {
        self.replace(Slot::Taken);
        self.let_go.notify_waiters();
    }

    /// As [`OpenReplica::end`], if nothing owns the replica; returns its charge in that case.
    pub fn end_if_idle(&self) -> Option<Charge> {
        let mut slot = self.slot.lock();
        match std::mem::replace(&mut *slot, Slot::Taken) {
            Slot::Idle(charge) => Some(charge),
            other @ (Slot::Writing(_) | Slot::Taken) => {
                *slot = other;
                None
            }
        }
    }

    fn replace(&self, slot: Slot) {
        let before = std::mem::replace(&mut *self.slot.lock(), slot);
        if let Slot::Idle(charge) = before {
            let bytes = charge.bytes();
            panic!("a replica that takes {bytes} bytes changes hands and is in none");
        }
    }
}

fn out_of_order(reason: &str) -> StoreError {
    StoreError::OutOfOrder(reason.to_owned())
}

/// A replica that was taken over, to be sealed or deleted. If this is dropped before that has begun, the replica is
/// free again.
pub struct Taken {
    replica: Arc<OpenReplica>,
    /// `None` only when it was taken out, and this is about to be dropped.
    charge: Option<Charge>,
}

impl Taken {
    fn new(replica: Arc<OpenReplica>, charge: Charge) -> Self {
        Self {
            replica,
            charge: Some(charge),
        }
    }

    /// Begins the sealing or deletion: the replica stays taken, and the caller receives its charge.
    pub fn begin(mut self) -> (Arc<OpenReplica>, Charge) {
        let charge = self.charge.take();
        let charge = charge.expect("a replica that was taken over has its charge");
        (self.replica.clone(), charge)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            self.replica.put_back(charge);
        }
    }
}

const HAS_WRITER: &str = "a lease has its writer until it is dropped";

/// The right to write to an open replica. When this is dropped, the replica is free again.
pub struct Lease {
    replica: Arc<OpenReplica>,
    /// `None` only when it was taken out, and this is about to be dropped.
    writer: Option<ReplicaWriter>,
    _count: WriterCount,
}

impl Lease {
    /// Gives the replica to its first writer.
    pub fn new(replica: Arc<OpenReplica>, writer: ReplicaWriter, volume: Arc<Volume>) -> Self {
        let slot = Slot::Writing(Some(writer.file().clone()));
        let before = std::mem::replace(&mut *replica.slot.lock(), slot);
        assert!(
            matches!(before, Slot::Writing(None)),
            "a replica gets a first writer that had one, or was taken over"
        );
        Self {
            replica,
            writer: Some(writer),
            _count: WriterCount::new(volume),
        }
    }

    /// The writer.
    ///
    /// # Errors
    /// [`StoreError::OutOfOrder`] once the replica is to be sealed or removed.
    pub fn writer(&mut self) -> Result<&mut ReplicaWriter, StoreError> {
        if self.replica.is_fenced() {
            return Err(out_of_order("the replica is being sealed or deleted"));
        }
        Ok(self.writer.as_mut().expect(HAS_WRITER))
    }

    /// Makes the written data visible to readers.
    pub fn publish(&self) {
        let chunks = self.writer.as_ref().expect(HAS_WRITER).chunks();
        let before = self.replica.chunks.swap(chunks, Ordering::AcqRel);
        assert!(
            before <= chunks,
            "{chunks} chunks of a replica are written and {before} could be read"
        );
    }

    /// Takes the writer out, to seal the replica; the replica counts as taken.
    pub fn into_writer(mut self) -> ReplicaWriter {
        self.replica.end();
        self.writer.take().expect(HAS_WRITER)
    }

    /// Ends the writing; nothing else can take the replica over in between.
    pub fn into_taken(self) -> Taken {
        let replica = self.replica.clone();
        let charge = self.into_writer().close();
        Taken::new(replica, charge)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            if writer.has_failed_sync() {
                self.replica.set_unproven();
            }
            self.replica.put_back(writer.close());
        }
    }
}
