//! The layout of a replica's file. Datanodes write and read it, and so do clients on the same host that received the
//! file ([`crate::short_circuit`]).
//!
//! ```text
//! replica file:   header page | group 0 | group 1 | ...           (pages of 4096 bytes)
//! group:          table page | up to 1024 chunks of 4096 bytes
//! header page:    0   8  magic "HVFSREPL"
//!                 8   4  format version, u32 LE: 1
//!                12   8  block id, u64 LE
//!                20  16  storage id, u128 LE
//!                36   4  CRC32 of bytes 0 to 35, u32 LE
//!                40      zeros to the end of the page
//! table page:     1024 x CRC32 (u32 LE), one for each chunk of the group, over the whole chunk
//! ```
//!
//! The length of a sealed replica follows from the size of its file. Every part starts at a multiple of the page
//! size, as direct I/O requires.

use crate::ids::{BlockId, StorageId};
use crate::limits::CHUNK_BYTES;

/// Unit of everything in the file, and the alignment that direct I/O requires.
pub const PAGE_BYTES: usize = CHUNK_BYTES;
/// Chunks that one table page describes.
pub const GROUP_CHUNKS: u32 = (PAGE_BYTES / ENTRY_BYTES) as u32;
/// Bytes of one entry of a table page.
pub const ENTRY_BYTES: usize = 4;

const HEADER_MAGIC: &[u8; 8] = b"HVFSREPL";
const FORMAT_VERSION: u32 = 1;
const HEADER_BYTES: usize = 40;
const PAGE: u64 = PAGE_BYTES as u64;
const GROUP_BYTES: u64 = PAGE + GROUP_CHUNKS as u64 * PAGE;

/// Number of whole chunks that hold `bytes` bytes; `None` beyond what a replica can hold.
pub fn chunks_for(bytes: u64) -> Option<u32> {
    u32::try_from(bytes.div_ceil(PAGE)).ok()
}

/// Bytes that `chunks` chunks hold.
pub fn chunk_bytes(chunks: u32) -> u64 {
    u64::from(chunks) * PAGE
}

/// Where a chunk's data starts in the file.
pub fn chunk_position(chunk: u32) -> u64 {
    table_page_position(group_of(chunk)) + PAGE + chunk_bytes(chunk % GROUP_CHUNKS)
}

/// Where a group's table page starts in the file.
pub fn table_page_position(group: u32) -> u64 {
    PAGE + u64::from(group) * GROUP_BYTES
}

/// Where a chunk's table entry starts in the file.
pub fn entry_position(chunk: u32) -> u64 {
    table_page_position(group_of(chunk)) + u64::from(chunk % GROUP_CHUNKS) * ENTRY_BYTES as u64
}

/// The group that a chunk belongs to.
pub fn group_of(chunk: u32) -> u32 {
    chunk / GROUP_CHUNKS
}

/// The end of a chunk's group, as a number of chunks: the first chunk of the next group. A replica has at
/// most [`u32::MAX`] chunks ([`chunks_for`]): one less than the last group would hold, which ends there.
pub fn group_end(chunk: u32) -> u32 {
    let last = chunk | (GROUP_CHUNKS - 1);
    last.saturating_add(1)
}

/// Fills the header page of a replica.
pub fn encode_header(page: &mut [u8; PAGE_BYTES], block: BlockId, storage: StorageId) {
    page.fill(0);
    page[..8].copy_from_slice(HEADER_MAGIC);
    page[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    page[12..20].copy_from_slice(&block.0.to_le_bytes());
    page[20..36].copy_from_slice(&storage.0.to_le_bytes());
    let crc = crc32fast::hash(&page[..36]);
    page[36..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
}

/// Returns the replica to which a header page belongs; `None` if it is not a header page.
pub fn decode_header(page: &[u8; PAGE_BYTES]) -> Option<(BlockId, StorageId)> {
    let block = BlockId(u64::from_le_bytes(page[12..20].try_into().ok()?));
    let storage = StorageId(u128::from_le_bytes(page[20..36].try_into().ok()?));
    let mut expected = [0; PAGE_BYTES];
    encode_header(&mut expected, block, storage);
    (expected == *page).then_some((block, storage))
}

/// Size of a file that holds exactly `chunks` chunks.
pub fn file_bytes(chunks: u32) -> u64 {
    match chunks.checked_sub(1) {
        Some(last) => chunk_position(last) + PAGE,
        None => PAGE,
    }
}

/// Returns the number of chunks in a file of this size; `None` if no sealed replica has this size.
pub fn chunks_in_file(file_bytes: u64) -> Option<u32> {
    let chunks = chunks_within(file_bytes)?;
    (self::file_bytes(chunks) == file_bytes).then_some(chunks)
}

/// Returns the most chunks that fit in a file of this size; `None` if not even the header fits, or the file is larger
/// than any replica.
pub fn chunks_within(file_bytes: u64) -> Option<u32> {
    let groups_bytes = file_bytes.checked_sub(PAGE)?;
    let whole_groups = groups_bytes / GROUP_BYTES;
    let rest_chunks = (groups_bytes % GROUP_BYTES / PAGE).saturating_sub(1);
    u32::try_from(whole_groups * u64::from(GROUP_CHUNKS) + rest_chunks).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_as_documented() {
        assert_eq!(table_page_position(0), 4096);
        assert_eq!(chunk_position(0), 8192);
        assert_eq!(chunk_position(1023), 8192 + 1023 * 4096);
        assert_eq!(table_page_position(1), 4096 + 1025 * 4096);
        assert_eq!(chunk_position(1024), 8192 + 1025 * 4096);
        assert_eq!(entry_position(0), 4096);
        assert_eq!(entry_position(1025), table_page_position(1) + 4);
        assert_eq!(group_end(0), 1024);
        assert_eq!(group_end(1023), 1024);
        assert_eq!(group_end(1024), 2048);
        // The largest number of a chunk.
        assert_eq!(group_end(u32::MAX - 1), u32::MAX);
        assert_eq!(group_end(u32::MAX - 1024), u32::MAX - 1023);
    }

    #[test]
    fn a_header_is_for_one_replica_only() {
        let mut page = [0; PAGE_BYTES];
        assert_eq!(decode_header(&page), None);
        encode_header(&mut page, BlockId(5), StorageId(9));
        assert_eq!(decode_header(&page), Some((BlockId(5), StorageId(9))));
        for at in [0, 8, 13, 21, 36, 40, PAGE_BYTES - 1] {
            let mut other = page;
            other[at] ^= 1;
            assert_eq!(decode_header(&other), None);
        }
    }

    #[test]
    fn a_length_follows_from_a_size() {
        for chunks in [0, 1, 2, 1023, 1024, 1025, 2048, 65_536] {
            assert_eq!(chunks_in_file(file_bytes(chunks)), Some(chunks));
            assert_eq!(chunks_within(file_bytes(chunks) + 1), Some(chunks));
            assert_eq!(chunks_in_file(file_bytes(chunks) + 1), None);
        }
        // No sealed file has a table page without a chunk.
        assert_eq!(chunks_in_file(2 * 4096), None);
        for impossible in [0, 1, 4095, u64::MAX] {
            assert_eq!(chunks_in_file(impossible), None);
        }
    }
}
