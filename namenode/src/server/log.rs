//! The owner's side of the journal: collects the records of one round and hands them over together.

use std::sync::Arc;

use harvestfs_telemetry::metrics::Histogram;
use tokio::sync::Notify;

use crate::journal::{Batch, JournalCounters, JournalError, JournalWriter, Lsn};

/// Bytes of records that are handed over as one batch; the record that reaches it is the last. Far
/// below the size of a segment, into which a batch has to fit.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// What the owner writes its records to.
pub(crate) struct Log {
    writer: JournalWriter,
    counters: Arc<JournalCounters>,
    /// Records of this round.
    records: Vec<Vec<u8>>,
    /// Something waits for one of them.
    awaited: bool,
    last_lsn: Lsn,
    /// Something that was awaited is on stable storage, or the journal failed.
    progress: Arc<Notify>,
    /// How long what is awaited takes to get there.
    seconds: Histogram,
}

impl Log {
    /// Continues after the record `last_lsn`.
    pub(crate) fn new(writer: JournalWriter, last_lsn: Lsn, seconds: Histogram) -> Self {
        Self {
            counters: writer.counters(),
            writer,
            records: Vec::new(),
            awaited: false,
            last_lsn,
            progress: Arc::new(Notify::new()),
            seconds,
        }
    }

    /// Adds a record to the round and returns its number. Unless it is `awaited`, it becomes
    /// durable with the next that is, or a few milliseconds later.
    pub(crate) fn push(&mut self, record: Vec<u8>, awaited: bool) -> Lsn {
        self.records.push(record);
        self.awaited |= awaited;
        self.last_lsn += 1;
        self.last_lsn
    }

    /// Commits the round, or hands it to the journal's thread. Waits only while more is queued there
    /// than fits.
    pub(crate) async fn flush(&mut self) {
        if self.records.is_empty() {
            return;
        }
        let wants_durable = std::mem::take(&mut self.awaited);
        let mut batch = Vec::with_capacity(self.records.len());
        let mut bytes = 0;
        for record in std::mem::take(&mut self.records) {
            bytes += record.len();
            batch.push(record);
            if bytes >= BATCH_BYTES_MAX {
                bytes = 0;
                self.submit(std::mem::take(&mut batch), wants_durable).await;
            }
        }
        if !batch.is_empty() {
            self.submit(batch, wants_durable).await;
        }
    }

    async fn submit(&self, records: Vec<Vec<u8>>, wants_durable: bool) {
        let progress = Arc::clone(&self.progress);
        let timer = wants_durable.then(|| self.seconds.start_timer());
        let batch = Batch {
            records,
            wants_durable,
            done: Box::new(move |outcome| {
                drop(timer);
                if wants_durable || outcome.is_err() {
                    progress.notify_one();
                }
            }),
        };
        self.writer.commit(batch).await;
    }

    /// Waits for progress to look at.
    pub(crate) fn progress(&self) -> Arc<Notify> {
        Arc::clone(&self.progress)
    }

    /// The last record handed out, durable or not.
    pub(crate) fn last_lsn(&self) -> Lsn {
        self.last_lsn
    }

    /// The last record that is on stable storage.
    pub(crate) fn durable_lsn(&self) -> Lsn {
        self.counters.durable_lsn()
    }

    /// Bytes of records since the start.
    pub(crate) fn appended_bytes(&self) -> u64 {
        self.counters.appended_bytes()
    }

    /// What the journal counts.
    pub(crate) fn counters(&self) -> Arc<JournalCounters> {
        Arc::clone(&self.counters)
    }

    /// What stopped the journal, if something did.
    pub(crate) fn failure(&self) -> Option<Arc<JournalError>> {
        self.writer.failure()
    }

    /// The writer, to begin a snapshot. Everything pushed must have been flushed.
    pub(crate) fn writer(&self) -> &JournalWriter {
        &self.writer
    }

    /// Makes everything durable and ends the journal's thread. Blocks.
    pub(crate) fn close(self) -> Result<(), Arc<JournalError>> {
        self.writer.shutdown().map(drop)
    }
}
