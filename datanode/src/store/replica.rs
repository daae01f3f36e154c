//! One replica's file: appending, sealing, reading. Everything here blocks on the disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use harvestfs_protocol::data::chunk_checksum;
use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::limits::PACKET_BYTES_MAX;
use harvestfs_protocol::planted::{self, Bug};
use parking_lot::Mutex;

use super::buffer::Buffer;
use super::disk::{Disk, DiskFile};
use super::error::StoreError;
use super::layout::{self, ENTRY_BYTES, GROUP_CHUNKS, PAGE_BYTES};
use super::reading::is_damage;
use crate::engine::quota::{Charge, REPLICA_OVERHEAD_BYTES};

/// Minimum and maximum step by which files grow.
const ALLOCATION_STEP_BYTES_MIN: u64 = 1 << 20;
const ALLOCATION_STEP_BYTES_MAX: u64 = 32 << 20;

/// Packets up to this size go through the page cache, so that many of them are written together, and a sync writes
/// data and checksums together. Measured for durable 4 KiB appends: 91 us against 118 us with direct I/O.
const SMALL_APPEND_BYTES_MAX: usize = 64 * 1024;

/// Before a small append that requires a sync, this much is written with zeros in advance, because the first write to
/// allocated space changes metadata, which costs each sync a journal commit (150 us against 91 us).
const ZEROED_AHEAD_BYTES: usize = 256 * 1024;

/// After this many bytes, small appends are synced, and dropped from the page cache.
const CACHED_BYTES_MAX: u64 = 1 << 20;

/// Chunks read at a time when a whole replica is read.
pub(super) const CHUNKS_TOGETHER_MAX: u32 = (PACKET_BYTES_MAX / PAGE_BYTES) as u32;

/// The failed action in the error when a replica that is to be sealed cannot be read.
const READING: &str = "reading again";

#[repr(align(4096))]
struct Zeros([u8; ZEROED_AHEAD_BYTES]);

static ZEROS: Zeros = Zeros([0; ZEROED_AHEAD_BYTES]);

/// An open file, together with the space that it still takes once it is removed.
pub struct OpenFile {
    // Dropped in this order: the space is released once the file is closed.
    file: Box<dyn DiskFile>,
    charge_when_removed: Mutex<Option<Charge>>,
}

impl OpenFile {
    /// Wraps an open file.
    pub fn new(file: Box<dyn DiskFile>) -> Arc<Self> {
        Arc::new(Self {
            file,
            charge_when_removed: Mutex::new(None),
        })
    }

    /// Keeps the charge of a removed file until its last user has closed it.
    pub fn release_when_closed(&self, charge: Charge) {
        *self.charge_when_removed.lock() = Some(charge);
    }
}

impl std::ops::Deref for OpenFile {
    type Target = dyn DiskFile;

    fn deref(&self) -> &Self::Target {
        &*self.file
    }
}

/// The checksums of one group's chunks.
pub type Table = [u32; GROUP_CHUNKS as usize];

/// Reads a group's table, bypassing the page cache.
pub fn read_table(file: &dyn DiskFile, group: u32) -> std::io::Result<Table> {
    let mut page = Buffer::unpooled(PAGE_BYTES);
    file.read_at(&mut page, layout::table_page_position(group))?;
    Ok(decode_table(&page))
}

/// Reads a group's table from the page cache, where the writer of an open replica keeps it.
pub fn read_cached_table(file: &dyn DiskFile, group: u32) -> std::io::Result<Table> {
    let mut page = [0; PAGE_BYTES];
    file.read_cached_at(&mut page, layout::table_page_position(group))?;
    Ok(decode_table(&page))
}

fn decode_table(page: &[u8]) -> Table {
    let mut table = [0; GROUP_CHUNKS as usize];
    let (entries, _) = page.as_chunks::<ENTRY_BYTES>();
    for (checksum, entry) in table.iter_mut().zip(entries) {
        *checksum = u32::from_le_bytes(*entry);
    }
    table
}

/// Data for the end of a replica: whole chunks, already verified.
pub struct Append<'a> {
    /// Number of the first chunk.
    pub first_chunk: u32,
    /// The data, page-aligned, padded with zeros to whole chunks.
    pub data: &'a [u8],
    /// One checksum for each chunk.
    pub checksums: &'a [u32],
    /// A sync follows immediately.
    pub sync: bool,
}

/// Whether an error while sealing a replica without a writer means that the replica is gone or damaged.
pub fn is_loss(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Disk { what: READING, source, .. }
            if source.kind() == std::io::ErrorKind::NotFound || is_damage(source)
    )
}

/// Appends to one open replica.
pub struct ReplicaWriter {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    file: Arc<OpenFile>,
    charge: Charge,
    /// Chunks that are written.
    chunks: u32,
    /// Maximum number of chunks.
    chunks_max: u32,
    /// The file is allocated up to here.
    allocated_bytes: u64,
    /// The file is written with zeros up to here.
    zeroed_bytes: u64,
    /// The position from which the page cache contains data of small appends.
    cached_from: Option<u64>,
    /// The file's entry in its directory is on stable storage.
    entry_is_stable: bool,
    /// There were writes since the last sync.
    is_dirty: bool,
    /// A sync failed: a later one proves nothing about data written before.
    sync_failed: bool,
}

impl ReplicaWriter {
    /// Creates the file of a replica. `charge` covers [`REPLICA_OVERHEAD_BYTES`] and grows with the
    /// file.
    pub fn create(
        disk: Arc<dyn Disk>,
        path: PathBuf,
        (block, storage): (BlockId, StorageId),
        chunks_max: u32,
        charge: Charge,
    ) -> Result<Self, StoreError> {
        let file = disk
            .create(&path)
            .map_err(StoreError::disk("creating", &path))?;
        let mut writer = Self {
            disk,
            path,
            file: OpenFile::new(file),
            charge,
            chunks: 0,
            chunks_max,
            allocated_bytes: 0,
            zeroed_bytes: 0,
            cached_from: None,
            entry_is_stable: false,
            is_dirty: true,
            sync_failed: false,
        };
        match writer.write_header(block, storage) {
            Ok(()) => Ok(writer),
            Err(error) => {
                // The first error counts; an empty file that remains is found at the next start.
                let _ = writer.disk.remove(&writer.path);
                Err(error)
            }
        }
    }

    fn write_header(&mut self, block: BlockId, storage: StorageId) -> Result<(), StoreError> {
        let head_bytes = 2 * PAGE_BYTES as u64;
        self.allocate(head_bytes)?;
        let mut header = Buffer::unpooled(PAGE_BYTES);
        layout::encode_header(header.first_page(), block, storage);
        // The whole first table page is put into the page cache. Otherwise its first entry would have to wait until
        // the page is read.
        self.file
            .write_at(&header, 0)
            .and_then(|()| {
                let table = layout::table_page_position(0);
                self.file.write_cached_at(&[0; PAGE_BYTES], table)
            })
            .map_err(StoreError::disk("writing", &self.path))?;
        self.zeroed_bytes = head_bytes;
        Ok(())
    }

    /// Opens a replica whose writer is gone, to seal it.
    pub fn reopen(
        disk: Arc<dyn Disk>,
        path: PathBuf,
        chunks: u32,
        charge: Charge,
    ) -> Result<Self, (StoreError, Charge)> {
        let opened = disk
            .open(&path)
            .and_then(|file| file.len_bytes().map(|len| (file, len)));
        match opened {
            Ok((file, allocated_bytes)) => Ok(Self {
                disk,
                path,
                file: OpenFile::new(file),
                charge,
                chunks,
                chunks_max: chunks,
                allocated_bytes,
                zeroed_bytes: 0,
                cached_from: None,
                entry_is_stable: false,
                is_dirty: true,
                sync_failed: false,
            }),
            Err(error) => Err((StoreError::disk(READING, &path)(error), charge)),
        }
    }

    /// The open file, for reading what was written.
    pub fn file(&self) -> &Arc<OpenFile> {
        &self.file
    }

    /// Chunks written so far.
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// Whether a sync failed. The kernel then treats the pages as if they had been written, and no later sync writes
    /// them.
    pub fn has_failed_sync(&self) -> bool {
        self.sync_failed
    }

    /// Closes the file; its space remains charged.
    pub fn close(self) -> Charge {
        self.charge
    }

    /// Writes data at the end.
    ///
    /// # Errors
    /// [`StoreError::OutOfOrder`] if the data does not belong at the end or is too long, [`StoreError::NoSpace`], or
    /// the disk's error. The length is then unchanged, unless it was the sync after many small appends that failed.
    pub fn append(&mut self, append: &Append<'_>) -> Result<(), StoreError> {
        let chunks = append.checksums.len() as u32;
        if append.first_chunk != self.chunks {
            return Err(StoreError::OutOfOrder(format!(
                "data for offset {} where {} is the end",
                layout::chunk_bytes(append.first_chunk),
                layout::chunk_bytes(self.chunks)
            )));
        }
        let end = match self.chunks.checked_add(chunks) {
            Some(end) if end <= self.chunks_max => end,
            _ => {
                return Err(StoreError::OutOfOrder(format!(
                    "data beyond the largest block of {} bytes",
                    layout::chunk_bytes(self.chunks_max)
                )));
            }
        };
        self.allocate(layout::file_bytes(end))?;
        self.write_pieces(append, end)
            .map_err(StoreError::disk("writing", &self.path))?;
        self.is_dirty = true;
        self.chunks = end;
        if self.cached_bytes() >= CACHED_BYTES_MAX {
            self.sync()?;
        }
        Ok(())
    }

    /// An upper bound of the data of small appends in the page cache, in bytes.
    fn cached_bytes(&self) -> u64 {
        let end = layout::file_bytes(self.chunks);
        // A failed append may have begun behind a table page, beyond the end.
        self.cached_from.map_or(0, |from| end.saturating_sub(from))
    }

    /// Writes data and checksums, split where a group ends.
    fn write_pieces(&mut self, append: &Append<'_>, end: u32) -> std::io::Result<()> {
        let is_small = append.data.len() <= SMALL_APPEND_BYTES_MAX;
        if is_small && append.sync {
            self.zero_ahead(layout::file_bytes(end))?;
        }
        let mut chunk = append.first_chunk;
        let mut data = append.data;
        let mut checksums = append.checksums;
        while chunk < end {
            let piece_chunks = (layout::group_end(chunk).min(end) - chunk) as usize;
            let piece;
            (piece, data) = data.split_at(piece_chunks * PAGE_BYTES);
            let position = layout::chunk_position(chunk);
            if is_small {
                self.cached_from.get_or_insert(position);
                self.file.write_cached_at(piece, position)?;
            } else {
                self.file.write_at(piece, position)?;
            }
            let piece_checksums;
            (piece_checksums, checksums) = checksums.split_at(piece_chunks);
            let entries: Vec<u8> = piece_checksums
                .iter()
                .flat_map(|checksum| checksum.to_le_bytes())
                .collect();
            self.file
                .write_cached_at(&entries, layout::entry_position(chunk))?;
            chunk += piece_chunks as u32;
        }
        Ok(())
    }

    /// Ensures that the file is written up to `end`; if it is not, writes zeros somewhat further.
    fn zero_ahead(&mut self, end: u64) -> std::io::Result<()> {
        if end <= self.zeroed_bytes {
            return Ok(());
        }
        // Everything beyond the last chunk is unused, the next group's table page included.
        let start = layout::file_bytes(self.chunks).max(self.zeroed_bytes);
        let stop = (start + ZEROED_AHEAD_BYTES as u64).min(self.allocated_bytes);
        assert!(
            end <= self.allocated_bytes && start <= stop,
            "zeros from {start} to {stop} for an end at {end}, allocated {}: {}",
            self.allocated_bytes,
            self.path.display()
        );
        self.file
            .write_at(&ZEROS.0[..(stop - start) as usize], start)?;
        self.zeroed_bytes = stop;
        Ok(())
    }

    /// Reserves and allocates space for the file up to `end`, or further while there is room.
    fn allocate(&mut self, end: u64) -> Result<(), StoreError> {
        if end <= self.allocated_bytes {
            return Ok(());
        }
        let step = self
            .allocated_bytes
            .clamp(ALLOCATION_STEP_BYTES_MIN, ALLOCATION_STEP_BYTES_MAX);
        let generous = (self.allocated_bytes + step)
            .min(layout::file_bytes(self.chunks_max))
            .max(end);
        for target in [generous, end] {
            let more = target - self.allocated_bytes;
            if self.charge.grow(more) {
                let allocated = self.file.allocate(self.allocated_bytes, more);
                if let Err(error) = allocated {
                    self.charge
                        .shrink_to(self.allocated_bytes + REPLICA_OVERHEAD_BYTES);
                    let error = StoreError::disk("allocating", &self.path)(error);
                    if matches!(error, StoreError::NoSpace) && target != end {
                        continue;
                    }
                    return Err(error);
                }
                self.allocated_bytes = target;
                assert!(
                    self.charge.bytes() >= target + REPLICA_OVERHEAD_BYTES,
                    "{target} bytes are allocated and {} charged: {}",
                    self.charge.bytes(),
                    self.path.display()
                );
                return Ok(());
            }
        }
        Err(StoreError::NoSpace)
    }

    /// Puts everything written so far on stable storage.
    pub fn sync(&mut self) -> Result<(), StoreError> {
        if !self.is_dirty || planted::is(Bug::SkipsReplicaSync) {
            return Ok(());
        }
        self.file
            .sync_data()
            .inspect_err(|_| self.sync_failed = true)
            .map_err(StoreError::disk("syncing", &self.path))?;
        if !self.entry_is_stable {
            let dir = parent(&self.path);
            self.disk
                .sync_dir(dir)
                .map_err(StoreError::disk("syncing", dir))?;
            self.entry_is_stable = true;
        }
        self.is_dirty = false;
        let cached_bytes = self.cached_bytes();
        if let Some(from) = self.cached_from
            && cached_bytes >= CACHED_BYTES_MAX
        {
            // If a group ended in between, its table page is dropped too and is not needed any more.
            self.file.forget_cached(from, cached_bytes);
            self.cached_from = None;
        }
        Ok(())
    }

    /// Rewrites the chunks of the group that begins with `first_chunk`, up to chunk `chunks` and as far as they match
    /// their checksums, so that the next sync proves that they are on stable storage; with the first group, also the
    /// header. Returns where the rewritten chunks end. One group is so little that the primary tenant does not wait
    /// long for it.
    ///
    /// The chunks are rewritten in place: the existing data is replaced by identical data, so it is not at risk.
    pub fn write_group_again(
        &mut self,
        (block, storage): (BlockId, StorageId),
        first_chunk: u32,
        chunks: u32,
    ) -> Result<u32, StoreError> {
        self.is_dirty = true;
        let reading = |error| StoreError::disk(READING, &self.path)(error);
        let writing = |error| StoreError::disk("writing again", &self.path)(error);
        let mut buffer = Buffer::unpooled(PACKET_BYTES_MAX);
        let buffer = &mut buffer;
        buffer.set_len(PAGE_BYTES);
        if first_chunk == 0 {
            layout::encode_header(buffer.first_page(), block, storage);
            self.file.write_at(buffer, 0).map_err(writing)?;
        }
        let end = layout::group_end(first_chunk).min(chunks).min(self.chunks);
        if end <= first_chunk {
            return Ok(end);
        }
        let table_position = layout::table_page_position(layout::group_of(first_chunk));
        match self.file.read_at(buffer, table_position) {
            Ok(()) => {}
            // The data before it is as good as data before wrong bytes.
            Err(error) if is_damage(&error) && first_chunk > 0 => return Ok(first_chunk),
            Err(error) => return Err(reading(error)),
        }
        let table = decode_table(buffer);
        self.file
            .write_at(buffer, table_position)
            .map_err(writing)?;
        let (mut chunk, mut together) = (first_chunk, CHUNKS_TOGETHER_MAX);
        while chunk < end {
            let piece = (end - chunk).min(together);
            buffer.set_len(piece as usize * PAGE_BYTES);
            let read = read_chunks(&**self.file, &table, chunk, buffer);
            match read {
                Ok(Ok(_)) => {}
                Ok(Err(differs)) => return Ok(differs),
                // One of these chunks is damaged: those before it are as good as chunks before wrong bytes.
                Err(error) if is_damage(&error) && piece > 1 => {
                    together = 1;
                    continue;
                }
                Err(error) if is_damage(&error) && chunk > 0 => return Ok(chunk),
                Err(error) => return Err(reading(error)),
            }
            let position = layout::chunk_position(chunk);
            self.file.write_at(buffer, position).map_err(writing)?;
            chunk += piece;
        }
        Ok(end)
    }

    /// Cuts the replica to `chunks` chunks, puts it on stable storage, and moves it to `sealed_path`. Returns the
    /// charge for its final size.
    ///
    /// # Errors
    /// [`StoreError::ShortReplica`] if there are fewer chunks, or the disk's error; the replica is then still open,
    /// may have been cut, and its file may have been moved; the charge is returned.
    pub fn seal(mut self, chunks: u32, sealed_path: &Path) -> Result<Charge, (StoreError, Charge)> {
        match self.cut_and_move(chunks, sealed_path) {
            Ok(()) => {
                self.file.forget_cached(0, 0);
                let bytes = layout::file_bytes(chunks) + REPLICA_OVERHEAD_BYTES;
                self.charge.shrink_to(bytes);
                Ok(self.charge)
            }
            Err(error) => Err((error, self.charge)),
        }
    }

    fn cut_and_move(&mut self, chunks: u32, sealed_path: &Path) -> Result<(), StoreError> {
        if chunks > self.chunks {
            return Err(StoreError::ShortReplica {
                have_bytes: layout::chunk_bytes(self.chunks),
            });
        }
        self.file
            .set_len(layout::file_bytes(chunks))
            .and_then(|()| self.file.sync_all())
            .map_err(StoreError::disk("sealing", &self.path))?;
        // Only now may the length be derived from the size of the file.
        self.disk
            .rename(&self.path, sealed_path)
            .map_err(StoreError::disk("moving", &self.path))?;
        if planted::is(Bug::SkipsSealedDirectorySync) {
            return Ok(());
        }
        let dir = parent(sealed_path);
        self.disk
            .sync_dir(dir)
            .map_err(StoreError::disk("syncing", dir))
    }
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .expect("replica files are in a directory of their volume")
}

/// Reads whole chunks of one group into `buffer` and verifies them; returns their checksums.
///
/// # Errors
/// The number of the first chunk that does not match, or the disk's error.
pub fn read_chunks(
    file: &dyn DiskFile,
    table: &Table,
    first_chunk: u32,
    buffer: &mut Buffer,
) -> std::io::Result<Result<Vec<u32>, u32>> {
    file.read_at(buffer, layout::chunk_position(first_chunk))?;
    let first = (first_chunk % GROUP_CHUNKS) as usize;
    for (index, chunk) in buffer.chunks(PAGE_BYTES).enumerate() {
        if chunk_checksum(chunk) != table[first + index] {
            return Ok(Err(first_chunk + index as u32));
        }
    }
    Ok(Ok(table[first..first + buffer.len() / PAGE_BYTES].to_vec()))
}
