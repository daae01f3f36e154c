//! Snapshots: files that each replace all records up to a number.

use std::io::{self, Read, Write};
use std::sync::Arc;

use super::disk::{Disk, DiskFile};
use super::format::{
    FILE_HEADER_BYTES, FileHeader, SNAPSHOT_MAGIC, payload_checksum, snapshot_name, temporary_name,
    u32_at, u64_at,
};
use super::reader::RecordReader;
use super::store::Store;
use super::{JournalError, Lsn};

/// The most payload bytes in one chunk of a snapshot file.
const CHUNK_BYTES: usize = 256 * 1024;
const CHUNK_HEADER_BYTES: usize = 8;
/// A snapshot is synced as it grows: a single sync at the end would delay the syncs of the journal,
/// which share the disk.
pub(super) const SYNC_EVERY_BYTES: u64 = 4 * 1024 * 1024;

/// Marks the snapshot as running until dropped.
struct Running(Arc<Store>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.plan_ends();
    }
}

/// Everything needed to write the next snapshot without touching the live journal.
///
/// Meant for a background thread: restore the state from [`SnapshotPlan::base`], apply
/// [`SnapshotPlan::records`], write the resulting state through [`SnapshotPlan::writer`], call
/// [`SnapshotWriter::install`]. Dropping the plan or the writer abandons the snapshot.
pub struct SnapshotPlan {
    base_lsn: Lsn,
    lsn: Lsn,
    salt: u64,
    running: Running,
}

impl SnapshotPlan {
    pub(super) fn new(store: Arc<Store>, lsn: Lsn, salt: u64) -> Self {
        Self {
            base_lsn: store.plan_begins(lsn),
            lsn,
            salt,
            running: Running(store),
        }
    }

    fn store(&self) -> &Store {
        &self.running.0
    }

    /// The last record that the snapshot will cover.
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// The snapshot before this one, with the last record that it covers; `None` for the first.
    pub fn base(&self) -> Result<Option<(Lsn, SnapshotReader)>, JournalError> {
        if self.base_lsn == 0 {
            return Ok(None);
        }
        let (lsn, store) = (self.base_lsn, self.store());
        let reader = SnapshotReader::open(&*store.disk, lsn, store.cluster_id)?;
        Ok(Some((lsn, reader)))
    }

    /// The records between [`SnapshotPlan::base`] and [`SnapshotPlan::lsn`].
    pub fn records(&self) -> Result<RecordReader, JournalError> {
        let store = self.store();
        RecordReader::new(
            Arc::clone(&store.disk),
            store.cluster_id,
            &store.live().segments,
            self.base_lsn + 1,
            self.lsn,
        )
    }

    /// Starts the snapshot file.
    pub fn writer(self) -> Result<SnapshotWriter, JournalError> {
        let name = snapshot_name(self.lsn);
        let temporary = temporary_name(&name);
        let header = FileHeader {
            cluster_id: self.store().cluster_id,
            lsn: self.lsn,
            salt: self.salt,
            len_bytes: 0,
            generation: 0,
            from_peer: false,
        };
        let mut file = self
            .store()
            .disk
            .create(&temporary, 0)
            .map_err(|e| JournalError::create(&temporary, 0, e))?;
        file.write_at(&header.encode(SNAPSHOT_MAGIC), 0)
            .map_err(|e| JournalError::create(&temporary, FILE_HEADER_BYTES as u64, e))?;
        Ok(SnapshotWriter {
            plan: self,
            file,
            name,
            temporary: Some(temporary),
            offset: FILE_HEADER_BYTES as u64,
            synced_to: 0,
            chunk: vec![0; CHUNK_HEADER_BYTES],
            chunk_index: 0,
            content_bytes: 0,
            failed: false,
        })
    }
}

/// Writes the content of a snapshot; see [`SnapshotPlan`].
pub struct SnapshotWriter {
    plan: SnapshotPlan,
    file: Box<dyn DiskFile>,
    name: String,
    /// `None` once installed.
    temporary: Option<String>,
    offset: u64,
    synced_to: u64,
    /// The chunk being filled, with room for its header in front.
    chunk: Vec<u8>,
    chunk_index: u64,
    content_bytes: u64,
    /// A write or sync failed: no later sync proves that the file is complete.
    failed: bool,
}

/// The result of [`SnapshotWriter::install`].
#[derive(Debug)]
pub struct SnapshotInstalled {
    /// The last record that the snapshot covers.
    pub lsn: Lsn,
    /// Size of the content in bytes, without the journal's own headers.
    pub content_bytes: u64,
}

impl SnapshotWriter {
    /// Makes the snapshot durable and valid in one atomic step. Removes nothing: lagging peers can still
    /// read the records that it covers, until [`super::Journal::purge`].
    ///
    /// A snapshot that a truncation or a snapshot from a peer has superseded meanwhile is not installed
    /// ([`JournalError::SnapshotSuperseded`]).
    pub fn install(mut self) -> Result<SnapshotInstalled, JournalError> {
        self.make_valid()?;
        Ok(SnapshotInstalled {
            lsn: self.plan.lsn,
            content_bytes: self.content_bytes,
        })
    }

    fn make_valid(&mut self) -> Result<(), JournalError> {
        let name = self.name.clone();
        let write_error = |e| JournalError::io("write", &name, e);
        if self.failed {
            let earlier = io::Error::other("an earlier write or sync of it failed");
            return Err(write_error(earlier));
        }
        self.flush_chunk().map_err(write_error)?;
        let total = self.content_bytes.to_le_bytes();
        let checksum = payload_checksum(&total, self.chunk_index, self.plan.salt);
        let mut end = [0; CHUNK_HEADER_BYTES + 8];
        end[4..8].copy_from_slice(&checksum.to_le_bytes());
        end[8..].copy_from_slice(&total);
        self.file.write_at(&end, self.offset).map_err(write_error)?;
        self.file
            .sync()
            .map_err(|e| JournalError::io("sync", &name, e))?;
        let store = Arc::clone(&self.plan.running.0);
        store.plan_installs()?;
        if let Some(temporary) = self.temporary.take() {
            store
                .disk
                .install(&temporary, &name)
                .map_err(|e| JournalError::io("install", &name, e))?;
        }
        store.snapshot_installed(self.plan.lsn, true);
        Ok(())
    }

    fn flush_chunk(&mut self) -> io::Result<()> {
        let content = self.chunk.len() - CHUNK_HEADER_BYTES;
        if content == 0 {
            return Ok(());
        }
        let checksum = payload_checksum(
            &self.chunk[CHUNK_HEADER_BYTES..],
            self.chunk_index,
            self.plan.salt,
        );
        self.chunk[0..4].copy_from_slice(&(content as u32).to_le_bytes());
        self.chunk[4..8].copy_from_slice(&checksum.to_le_bytes());
        self.file.write_at(&self.chunk, self.offset)?;
        self.offset += self.chunk.len() as u64;
        self.content_bytes += content as u64;
        self.chunk_index += 1;
        self.chunk.truncate(CHUNK_HEADER_BYTES);
        if self.offset - self.synced_to >= SYNC_EVERY_BYTES {
            self.file.sync()?;
            self.synced_to = self.offset;
        }
        Ok(())
    }
}

impl Write for SnapshotWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = CHUNK_HEADER_BYTES + CHUNK_BYTES - self.chunk.len();
        let taken = bytes.len().min(room);
        self.chunk.extend_from_slice(&bytes[..taken]);
        if taken == room {
            self.flush_chunk().inspect_err(|_| self.failed = true)?;
        }
        Ok(taken)
    }

    /// Does nothing: a snapshot takes effect only with [`SnapshotWriter::install`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for SnapshotWriter {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            // If this fails, the next start of the journal removes it.
            let _ = self.plan.store().disk.remove(&temporary);
        }
    }
}

/// Reads the content of a snapshot, from its file or from another source of its bytes. Every chunk is
/// verified before any of its bytes is returned; damage is an error of kind
/// [`io::ErrorKind::InvalidData`].
pub struct SnapshotReader<R = SnapshotBytes> {
    bytes: R,
    name: String,
    pub(super) header: FileHeader,
    offset: u64,
    chunk: Vec<u8>,
    chunk_read: usize,
    chunk_index: u64,
    content_bytes: u64,
    ended: bool,
    failure: Failure,
}

/// The bytes of a snapshot's file, from the start.
pub struct SnapshotBytes {
    file: Box<dyn DiskFile>,
    len_bytes: u64,
    offset: u64,
}

impl Read for SnapshotBytes {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

impl SnapshotReader {
    pub(super) fn open(disk: &dyn Disk, lsn: Lsn, cluster_id: u128) -> Result<Self, JournalError> {
        Self::open_named(disk, snapshot_name(lsn), lsn, cluster_id)
    }

    /// Opens a snapshot that may not have its final name yet.
    pub(super) fn open_named(
        disk: &dyn Disk,
        name: String,
        lsn: Lsn,
        cluster_id: u128,
    ) -> Result<Self, JournalError> {
        let file = disk
            .open(&name)
            .map_err(|e| JournalError::io("open", &name, e))?;
        let len_bytes = file
            .len_bytes()
            .map_err(|e| JournalError::io("read", &name, e))?;
        let bytes = SnapshotBytes {
            file,
            len_bytes,
            offset: 0,
        };
        Self::begin(bytes, name, lsn, cluster_id)
    }

    /// Size of the file in bytes.
    pub(super) fn len_bytes(&self) -> u64 {
        self.bytes.len_bytes
    }

    /// Reads the file itself at `offset` until `buffer` is full or the file ends; returns the bytes
    /// read.
    pub(super) fn read_file_at(
        &self,
        buffer: &mut [u8],
        offset: u64,
    ) -> Result<usize, JournalError> {
        self.bytes
            .file
            .read_at(buffer, offset)
            .map_err(|e| JournalError::io("read", &self.name, e))
    }
}

impl<R: Read> SnapshotReader<R> {
    /// Reads the snapshot that covers the records up to `lsn` from the bytes of its file, as
    /// [`super::SnapshotFile`] returns them, from any source.
    ///
    /// # Errors
    /// The bytes are not those of such a snapshot of this cluster, or cannot be read.
    pub fn of_bytes(bytes: R, lsn: Lsn, cluster_id: u128) -> Result<Self, JournalError> {
        Self::begin(bytes, snapshot_name(lsn), lsn, cluster_id)
    }

    fn begin(mut bytes: R, name: String, lsn: Lsn, cluster_id: u128) -> Result<Self, JournalError> {
        let mut header = [0; FILE_HEADER_BYTES];
        let read = fill(&mut bytes, &mut header).map_err(|e| JournalError::io("read", &name, e))?;
        let header = FileHeader::decode(&header[..read], SNAPSHOT_MAGIC, &name, lsn, cluster_id)?;
        Ok(Self {
            bytes,
            name,
            header,
            offset: FILE_HEADER_BYTES as u64,
            chunk: Vec::new(),
            chunk_read: 0,
            chunk_index: 0,
            content_bytes: 0,
            ended: false,
            failure: Failure::default(),
        })
    }

    /// Reads the snapshot to its end and checks it.
    ///
    /// # Errors
    /// It is damaged, or cannot be read.
    pub fn verify(mut self) -> Result<(), JournalError> {
        while !self.ended {
            self.next_chunk()?;
        }
        Ok(())
    }

    /// Replaces `chunk` with the next one; the last one is empty and sets `ended`.
    fn next_chunk(&mut self) -> Result<(), JournalError> {
        let mut header = [0; CHUNK_HEADER_BYTES];
        self.take_exact(&mut header)?;
        let len = u32_at(&header, 0) as usize;
        if len > CHUNK_BYTES {
            return Err(self.corrupt("a chunk is longer than the limit"));
        }
        let is_end = len == 0;
        let mut chunk = std::mem::take(&mut self.chunk);
        chunk.resize(if is_end { 8 } else { len }, 0);
        self.take_exact(&mut chunk)?;
        if payload_checksum(&chunk, self.chunk_index, self.header.salt) != u32_at(&header, 4) {
            return Err(self.corrupt("the checksum of a chunk does not match"));
        }
        self.offset += (CHUNK_HEADER_BYTES + chunk.len()) as u64;
        self.chunk_index += 1;
        self.chunk_read = 0;
        if is_end {
            if u64_at(&chunk, 0) != self.content_bytes || self.read_some(&mut [0])? > 0 {
                return Err(self.corrupt("the snapshot does not end where it should"));
            }
            chunk.clear();
            self.ended = true;
        }
        self.content_bytes += chunk.len() as u64;
        self.chunk = chunk;
        Ok(())
    }

    fn read_some(&mut self, buffer: &mut [u8]) -> Result<usize, JournalError> {
        fill(&mut self.bytes, buffer).map_err(|e| JournalError::io("read", &self.name, e))
    }

    fn take_exact(&mut self, buffer: &mut [u8]) -> Result<(), JournalError> {
        if self.read_some(buffer)? < buffer.len() {
            return Err(self.corrupt("the snapshot ends too early"));
        }
        Ok(())
    }

    fn corrupt(&self, reason: &str) -> JournalError {
        JournalError::corrupt(&self.name, self.offset, self.header.lsn, reason)
    }
}

/// Reads until `buffer` is full or the source ends; returns the number of bytes read.
pub(crate) fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

/// The first failure of a reader. All later reads repeat it: nobody knows where in the source they would
/// go on.
#[derive(Debug, Default)]
pub(crate) struct Failure(Option<(io::ErrorKind, String)>);

impl Failure {
    /// Notes a failure, and returns it.
    pub(crate) fn note(&mut self, error: io::Error) -> io::Error {
        self.0 = Some((error.kind(), error.to_string()));
        error
    }

    /// Fails if there was a failure.
    pub(crate) fn check(&self) -> io::Result<()> {
        match &self.0 {
            Some((kind, reason)) => Err(io::Error::new(*kind, reason.clone())),
            None => Ok(()),
        }
    }
}

impl<R: Read> Read for SnapshotReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.failure.check()?;
        while self.chunk_read == self.chunk.len() && !self.ended {
            if let Err(error) = self.next_chunk() {
                let error = io::Error::new(io::ErrorKind::InvalidData, error);
                return Err(self.failure.note(error));
            }
        }
        let unread = &self.chunk[self.chunk_read..];
        let taken = unread.len().min(buffer.len());
        buffer[..taken].copy_from_slice(&unread[..taken]);
        self.chunk_read += taken;
        Ok(taken)
    }
}
