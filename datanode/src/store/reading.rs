//! Reading replicas: every chunk is verified before it leaves the disk's threads.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::PACKET_BYTES_MAX;
use rustix::io::Errno;

use super::block_store::BlockStore;
use super::buffer::Buffer;
use super::disk::DiskFile;
use super::error::StoreError;
use super::inventory::{Inventory, Readable};
use super::layout::{self, PAGE_BYTES};
use super::replica::{OpenFile, Table, read_cached_table, read_chunks, read_table};

/// Whole chunks that match their checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the block, in bytes.
    pub block_offset: u64,
    /// The data.
    pub data: Bytes,
    /// One checksum for each chunk.
    pub checksums: Vec<u32>,
}

/// A range of chunks of one block, read in pieces that do not cross the end of a group.
#[derive(Clone, Copy, Debug)]
pub struct ChunkRange {
    next: u32,
    end: u32,
}

impl ChunkRange {
    /// The chunks that contain a range of bytes; `None` if the range is empty or beyond any replica.
    pub fn covering(block_offset: u64, length_bytes: u64) -> Option<Self> {
        let end = block_offset.checked_add(length_bytes)?;
        let next = u32::try_from(block_offset / PAGE_BYTES as u64).ok()?;
        let end = layout::chunks_for(end)?;
        (length_bytes > 0).then_some(Self { next, end })
    }

    /// Takes the next piece of at most `bytes_max` bytes, as a range of chunk numbers.
    pub fn take_piece(&mut self, bytes_max: usize) -> Option<Range<u32>> {
        let first = self.next;
        let chunks_max = (bytes_max.min(PACKET_BYTES_MAX) / PAGE_BYTES).max(1) as u32;
        let end = self
            .end
            .min(layout::group_end(first))
            // The range may end at the largest possible chunk number.
            .min(first.saturating_add(chunks_max));
        self.next = end;
        (end > first).then_some(first..end)
    }
}

impl BlockStore {
    /// Checks that a replica holds a range.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn check_readable(&self, block: BlockId, range: ChunkRange) -> Result<(), StoreError> {
        let readable = self.inventory.readable(block)?;
        readable.volume.check_usable()?;
        readable.check_end(range.end)
    }

    /// Reads chunks of one group and verifies them. A replica that does not match, or cannot be read, is reported and
    /// moved aside; its matching chunks can still be read. `holds_none`: see [`super::buffer::BufferPool::take`].
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], or why it cannot be read.
    pub async fn read(
        &self,
        block: BlockId,
        chunks: Range<u32>,
        holds_none: bool,
    ) -> Result<Piece, StoreError> {
        let readable = self.inventory.readable(block)?;
        readable.check_end(chunks.end)?;
        readable.volume.check_usable()?;
        let bytes = chunks.len() * PAGE_BYTES;
        let buffer = self.inventory.buffers.take(bytes, holds_none).await;
        let inventory = self.inventory.clone();
        let volume = readable.volume.clone();
        volume
            .run(move || inventory.read_now(block, &readable, chunks, buffer))
            .await
    }

    /// Drops a replica's cached checksums, so that the next read fetches them from the disk and verifies them too.
    pub fn forget_checksums(&self, block: BlockId) {
        if let Ok(readable) = self.inventory.readable(block) {
            self.inventory.tables.forget(readable.generation);
        }
    }
}

impl Readable {
    fn check_end(&self, end: u32) -> Result<(), StoreError> {
        if end <= self.chunks {
            Ok(())
        } else {
            Err(StoreError::ShortReplica {
                have_bytes: layout::chunk_bytes(self.chunks),
            })
        }
    }
}

impl Inventory {
    pub(super) fn read_now(
        &self,
        block: BlockId,
        readable: &Readable,
        Range {
            start: first_chunk,
            end,
        }: Range<u32>,
        mut buffer: Buffer,
    ) -> Result<Piece, StoreError> {
        let source = self.file_of(block, readable)?;
        let mut bad_chunk = first_chunk;
        // A mismatch may originate in memory, for example in the cached table: it counts only if it recurs with what
        // the disk returns.
        for trust_cache in [true, false] {
            let table = self.table_of(readable, &source, first_chunk, trust_cache);
            let read = table
                .and_then(|table| read_chunks(source.file(), &table, first_chunk, &mut buffer));
            match read {
                Ok(Ok(checksums)) => {
                    return Ok(Piece {
                        block_offset: layout::chunk_bytes(first_chunk),
                        data: buffer.freeze(),
                        checksums,
                    });
                }
                Ok(Err(chunk)) => bad_chunk = chunk,
                Err(error) => {
                    // It may have been sealed, and thereby cut, or deleted since it was looked up.
                    let now = self.look_again(block, readable)?;
                    now.check_end(end)?;
                    if is_damage(&error) {
                        if now.is_corrupt {
                            // The damage is known, and must not count as another error of the disk: readers that retry
                            // would cause the volume to be given up.
                            let offset = layout::chunk_bytes(first_chunk);
                            return Err(StoreError::Corrupt { offset });
                        }
                        self.condemn(block, readable);
                    }
                    let path = readable.volume.path();
                    return Err(StoreError::disk("reading a replica in", path)(error));
                }
            }
        }
        self.look_again(block, readable)?.check_end(end)?;
        self.condemn(block, readable);
        Err(StoreError::Corrupt {
            offset: layout::chunk_bytes(bad_chunk),
        })
    }

    pub(super) fn file_of(
        &self,
        block: BlockId,
        readable: &Readable,
    ) -> Result<Source, StoreError> {
        let writers_file = readable.open.as_ref().and_then(|replica| replica.file());
        if let Some(file) = writers_file {
            return Ok(Source::Growing(file));
        }
        if let Some(file) = self.files.get(readable.generation) {
            return Ok(Source::Complete(file));
        }
        let volume = &readable.volume;
        let sealed_path = volume.sealed_path(block);
        let mut opened = match readable.open {
            None => volume.disk().open(&sealed_path),
            Some(_) => match volume.disk().open(&volume.open_path(block)) {
                // It was sealed in the meantime.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    volume.disk().open(&sealed_path)
                }
                result => result,
            },
        };
        if matches!(&opened, Err(error) if error.kind() == io::ErrorKind::NotFound) {
            let now = self.look_again(block, readable)?;
            if now.is_corrupt && now.open.is_none() {
                // It was moved aside.
                opened = volume.disk().open(&volume.corrupt_path(block));
            }
        }
        match opened {
            Ok(file) => {
                let file = self.files.put(readable.generation, OpenFile::new(file));
                // A file that was removed in the meantime is not kept open.
                self.look_again(block, readable)
                    .inspect_err(|_| self.files.let_go(readable.generation))?;
                Ok(Source::Complete(file))
            }
            Err(error) => {
                // It may have been deleted in the meantime.
                let now = self.look_again(block, readable)?;
                if error.kind() == io::ErrorKind::NotFound || is_damage(&error) {
                    if now.is_corrupt {
                        return Err(StoreError::Corrupt { offset: 0 });
                    }
                    self.condemn(block, readable);
                }
                Err(StoreError::disk("opening", &sealed_path)(error))
            }
        }
    }

    fn table_of(
        &self,
        readable: &Readable,
        source: &Source,
        chunk: u32,
        trust_cache: bool,
    ) -> io::Result<Arc<Table>> {
        let group = layout::group_of(chunk);
        let file = match source {
            // The table changes with every append, and the writer keeps it in the page cache.
            Source::Growing(file) => return Ok(Arc::new(read_cached_table(&***file, group)?)),
            Source::Complete(file) => file,
        };
        if trust_cache && let Some(table) = self.tables.get(readable.generation, group) {
            return Ok(table);
        }
        let table = Arc::new(read_table(&***file, group)?);
        self.tables.put(readable.generation, group, table.clone());
        Ok(table)
    }
}

/// The file of a replica.
pub(super) enum Source {
    /// There is a writer: the file may grow.
    Growing(Arc<OpenFile>),
    /// Nothing more is written.
    Complete(Arc<OpenFile>),
}

impl Source {
    pub(super) fn into_file(self) -> Arc<OpenFile> {
        match self {
            Self::Growing(file) | Self::Complete(file) => file,
        }
    }

    fn file(&self) -> &dyn DiskFile {
        match self {
            Self::Growing(file) | Self::Complete(file) => &***file,
        }
    }
}

/// Whether an error means that this replica is damaged, rather than that the request or the process is in trouble.
pub(super) fn is_damage(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof || is_medium_error(error)
}

/// Whether the disk could not read or write something. For direct I/O, the kernel reports a bad sector as `ENODATA`, a
/// mismatch of the disk's own checksum as `EILSEQ`, a request that the disk refuses as `EREMOTEIO`, and a timeout as
/// `ETIMEDOUT`; through the page cache, all are `EIO`. The file system's metadata for the file may not match its
/// checksum either (`EBADMSG`).
pub(super) fn is_medium_error(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw_os_error),
        Some(
            Errno::IO
                | Errno::NODATA
                | Errno::ILSEQ
                | Errno::REMOTEIO
                | Errno::TIMEDOUT
                | Errno::BADMSG
        )
    )
}

/// Whether an error concerns the process, or the volume as a whole, and so says nothing about the replica at which it
/// occurred.
pub(super) fn is_of_no_replica(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw_os_error),
        Some(
            Errno::MFILE
                | Errno::NFILE
                | Errno::NOMEM
                | Errno::INTR
                | Errno::AGAIN
                | Errno::BUSY
                | Errno::NOSPC
                | Errno::DQUOT
                | Errno::ROFS
                | Errno::NODEV
                | Errno::NXIO
                | Errno::STALE
                | Errno::UCLEAN
                | Errno::NOLINK
                | Errno::NOTCONN
                | Errno::CONNABORTED
        )
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{create, packet, real_store};
    use super::*;

    #[tokio::test]
    async fn what_is_cut_off_while_it_is_read_is_not_corrupt() {
        let dir = tempfile::tempdir().unwrap();
        let store = real_store(dir.path());
        let mut writer = create(&store, 1).await.unwrap();
        let data = packet(0, &[7; 20_000], false);
        writer.write(vec![data], false).await.unwrap();
        drop(writer);
        let inventory = &store.inventory;
        let before = inventory.readable(BlockId(1)).unwrap();
        store.seal(BlockId(1), 4096).await.unwrap();
        let late = inventory.read_now(BlockId(1), &before, 1..2, Buffer::unpooled(PAGE_BYTES));
        assert!(matches!(
            late,
            Err(StoreError::ShortReplica { have_bytes: 4096 })
        ));
        let fine = inventory.read_now(BlockId(1), &before, 0..1, Buffer::unpooled(PAGE_BYTES));
        assert_eq!(fine.unwrap().data, [7; 4096][..]);
    }

    #[test]
    fn ranges_are_cut_at_groups_and_sizes() {
        let mut range = ChunkRange::covering(1022 * 4096 + 5, 4096 * 5).unwrap();
        assert_eq!(range.take_piece(1 << 20), Some(1022..1024));
        assert_eq!(range.take_piece(8192), Some(1024..1026));
        assert_eq!(range.take_piece(8192), Some(1026..1028));
        assert_eq!(range.take_piece(8192), None);
        assert!(ChunkRange::covering(7, 0).is_none());
        assert!(ChunkRange::covering(u64::MAX, 2).is_none());
        assert!(ChunkRange::covering(1 << 60, 1).is_none());
    }
}
