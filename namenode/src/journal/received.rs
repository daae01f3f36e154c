//! Receiving a snapshot from a peer, until it is installed.

use std::io::{self, Write};
use std::sync::Arc;

use harvestfs_protocol::planted::{self, Bug};

use super::disk::DiskFile;
use super::format::{FILE_HEADER_BYTES, FileHeader, SNAPSHOT_MAGIC, received_name};
use super::snapshot::{SYNC_EVERY_BYTES, SnapshotReader};
use super::store::Store;
use super::{JournalError, Lsn};

/// The file of a snapshot that is being received, or was; removed when dropped.
struct ReceivedFile {
    store: Arc<Store>,
    lsn: Lsn,
    /// `None` once installed.
    name: Option<String>,
}

impl Drop for ReceivedFile {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            // If this fails, the next start of the journal removes it.
            let _ = self.store.disk.remove(&name);
        }
        self.store.receiving_ends();
    }
}

/// Receives the bytes of a peer's [`super::SnapshotFile`], in order, through [`Write`], into a
/// temporary file. It has no effect before [`super::Journal::install_snapshot`]; dropping it removes
/// the file.
pub struct SnapshotReceiver {
    received: ReceivedFile,
    file: Box<dyn DiskFile>,
    offset: u64,
    synced_to: u64,
    /// A write or sync failed: no later sync proves that the file is complete.
    failed: bool,
}

impl SnapshotReceiver {
    pub(super) fn new(store: Arc<Store>, lsn: Lsn) -> Result<Self, JournalError> {
        store.receiving_begins()?;
        let mut received = ReceivedFile {
            store,
            lsn,
            name: None,
        };
        let name = received_name(lsn);
        let file = received
            .store
            .disk
            .create(&name, 0)
            .map_err(|e| JournalError::create(&name, 0, e))?;
        received.name = Some(name);
        Ok(Self {
            received,
            file,
            offset: 0,
            synced_to: 0,
            failed: false,
        })
    }

    /// Bytes received so far.
    pub fn received_bytes(&self) -> u64 {
        self.offset
    }

    /// Makes the received file durable and verifies all of it, as a start verifies a snapshot.
    /// [`JournalError::ReceivedSnapshotDamaged`], or an error of its header, if it is not the complete
    /// snapshot of that number.
    ///
    /// Reads the whole file; call it on a thread that may block.
    pub fn finish(mut self) -> Result<ReceivedSnapshot, JournalError> {
        let name = received_name(self.received.lsn);
        if self.failed {
            let earlier = io::Error::other("an earlier write or sync of it failed");
            return Err(JournalError::io("write", &name, earlier));
        }
        let (lsn, store) = (self.received.lsn, &*self.received.store);
        let mut bytes = [0; FILE_HEADER_BYTES];
        let read = self
            .file
            .read_at(&mut bytes, 0)
            .map_err(|e| JournalError::io("read", &name, e))?;
        let sent = FileHeader::decode(&bytes[..read], SNAPSHOT_MAGIC, &name, lsn, store.cluster_id)
            .map_err(|e| damaged(lsn, e))?;
        let header = FileHeader {
            from_peer: true,
            ..sent
        };
        self.file
            .write_at(&header.encode(SNAPSHOT_MAGIC), 0)
            .map_err(|e| JournalError::io("write", &name, e))?;
        if !planted::is(Bug::InstallsSnapshotUnsynced) {
            self.file
                .sync()
                .map_err(|e| JournalError::io("sync", &name, e))?;
        }
        let received = ReceivedSnapshot(self.received);
        let verified = received.content().and_then(SnapshotReader::verify);
        verified.map_err(|e| damaged(lsn, e))?;
        Ok(received)
    }
}

/// Turns an error about the content of the file into one that tells that it came from a peer.
fn damaged(lsn: Lsn, error: JournalError) -> JournalError {
    match error {
        JournalError::Corrupt { offset, reason, .. } => JournalError::ReceivedSnapshotDamaged {
            lsn,
            offset,
            reason,
        },
        other => other,
    }
}

impl Write for SnapshotReceiver {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut written = || {
            self.file.write_at(bytes, self.offset)?;
            self.offset += bytes.len() as u64;
            if self.offset - self.synced_to >= SYNC_EVERY_BYTES {
                self.file.sync()?;
                self.synced_to = self.offset;
            }
            Ok(bytes.len())
        };
        written().inspect_err(|_| self.failed = true)
    }

    /// Does nothing: a snapshot takes effect only when it is installed.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A snapshot from a peer that is complete and durable, but not installed. Dropping it removes the file.
pub struct ReceivedSnapshot(ReceivedFile);

impl ReceivedSnapshot {
    /// The last record that the snapshot covers.
    pub fn lsn(&self) -> Lsn {
        self.0.lsn
    }

    /// A reader of its content, from the start.
    pub fn content(&self) -> Result<SnapshotReader, JournalError> {
        let store = &*self.0.store;
        let name = received_name(self.0.lsn);
        SnapshotReader::open_named(&*store.disk, name, self.0.lsn, store.cluster_id)
    }

    /// Whether it was received for this journal.
    pub(super) fn is_of(&self, store: &Arc<Store>) -> bool {
        Arc::ptr_eq(&self.0.store, store)
    }

    /// Gives it its name, durably.
    pub(super) fn install(mut self, name: &str) -> Result<(), JournalError> {
        match self.0.name.take() {
            Some(temporary) => self
                .0
                .store
                .disk
                .install(&temporary, name)
                .map_err(|e| JournalError::io("install", name, e)),
            None => unreachable!("it is installed once"),
        }
    }
}
