//! Finding out at startup how much of a replica without a writer can be trusted. Everything here blocks on the disk.

use harvestfs_protocol::data::first_mismatch;
use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::limits::PACKET_BYTES_MAX;

use super::buffer::Buffer;
use super::disk::DiskFile;
use super::layout::{self, GROUP_CHUNKS, PAGE_BYTES};
use super::progress::Progress;
use super::reading::is_of_no_replica;
use super::replica::{CHUNKS_TOGETHER_MAX, read_table};

/// The trusted part of an open replica that was found.
pub struct Trusted {
    /// The longest prefix in which every chunk can be read and matches its checksum.
    pub chunks: u32,
    /// The disk's error for the data after that prefix, if it cannot be read.
    pub damage: Option<std::io::Error>,
}

impl Trusted {
    fn chunks(chunks: u32) -> Self {
        Self {
            chunks,
            damage: None,
        }
    }

    /// The result when the disk reports an error after so many chunks. Data before a bad sector is as good as data
    /// before wrong bytes, and may be all that is left of the block.
    fn before(error: std::io::Error, chunks: u32) -> std::io::Result<Self> {
        if is_of_no_replica(&error) {
            return Err(error);
        }
        Ok(Self {
            chunks,
            damage: Some(error),
        })
    }
}

/// Returns the chunks of an open replica that can be trusted.
///
/// # Errors
/// The disk's error for the header, without which nothing is known; or an error that says nothing about the replica.
pub fn trusted_chunks(
    file: &dyn DiskFile,
    (block, storage): (BlockId, StorageId),
    progress: &Progress,
) -> std::io::Result<Trusted> {
    let mut buffer = Buffer::unpooled(PACKET_BYTES_MAX);
    let file_bytes = file.len_bytes()?;
    let Some(chunks_max) = layout::chunks_within(file_bytes) else {
        return Ok(Trusted::chunks(0));
    };
    buffer.set_len(PAGE_BYTES);
    file.read_at(&mut buffer, 0)?;
    progress.answered();
    if layout::decode_header(buffer.first_page()) != Some((block, storage)) {
        return Ok(Trusted::chunks(0));
    }
    // Up to `alone_until`, something could not be read: reading chunk by chunk shows which one.
    let (mut trusted, mut alone_until) = (0, 0);
    while trusted < chunks_max {
        let table = read_table(file, layout::group_of(trusted));
        progress.answered();
        let table = match table {
            Ok(table) => table,
            Err(error) => return Trusted::before(error, trusted),
        };
        let group_end = layout::group_end(trusted).min(chunks_max);
        while trusted < group_end {
            let together = if trusted < alone_until {
                1
            } else {
                CHUNKS_TOGETHER_MAX
            };
            let chunks = (group_end - trusted).min(together);
            buffer.set_len(chunks as usize * PAGE_BYTES);
            let read = file.read_at(&mut buffer, layout::chunk_position(trusted));
            progress.answered();
            match read {
                Ok(()) => {}
                Err(error) if !is_of_no_replica(&error) && chunks > 1 => {
                    alone_until = trusted + chunks;
                    continue;
                }
                Err(error) => return Trusted::before(error, trusted),
            }
            let first = (trusted % GROUP_CHUNKS) as usize;
            let checksums = &table[first..first + chunks as usize];
            if let Some(offset) = first_mismatch(&buffer, checksums) {
                return Ok(Trusted::chunks(trusted + (offset / PAGE_BYTES) as u32));
            }
            trusted += chunks;
        }
    }
    Ok(Trusted::chunks(trusted))
}
