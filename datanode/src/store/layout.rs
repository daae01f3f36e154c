//! Where everything is in a replica file, down to the byte.
//!
//! ```text
//! replica file:   header page | group 0 | group 1 | ...           (pages of 4096 bytes)
//! group:          table page | up to 1024 chunks of 4096 bytes
//! table page:     1024 x CRC32 (u32 LE), one for each chunk of the group, over the whole chunk
//!
//! header page:    0   8  magic "HVFSREPL"
//!                 8   4  format version, u32 LE: 1
//!                12   8  block id, u64 LE
//!                20  16  storage id, u128 LE
//!                36   4  CRC32 of bytes 0 to 35, u32 LE
//!                40      zeros to the end of the page
//! ```
//!
//! The length of a sealed replica follows from the size of its file. An open replica's file is
//! longer than its data (it is allocated in steps); its data ends before the first chunk that does
//! not match its table entry. An entry that was never written is 0 and belongs to a chunk of zeros,
//! whose CRC32 is not 0, so the two never match.
//!
//! Every part starts at a multiple of the page size, as direct I/O demands, and a sync of the one
//! file covers data and checksums alike.

use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::limits::CHUNK_BYTES;

/// Unit of everything in the file; what direct I/O must be aligned to.
pub const PAGE_BYTES: usize = CHUNK_BYTES;
/// Chunks that one table page describes.
pub const GROUP_CHUNKS: u32 = (PAGE_BYTES / ENTRY_BYTES) as u32;
/// Bytes of one entry of a table page.
pub const ENTRY_BYTES: usize = 4;

const PAGE: u64 = PAGE_BYTES as u64;
const GROUP_BYTES: u64 = PAGE + GROUP_CHUNKS as u64 * PAGE;
const HEADER_MAGIC: &[u8; 8] = b"HVFSREPL";
const FORMAT_VERSION: u32 = 1;
const HEADER_BYTES: usize = 40;

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

/// The first chunk of the next group.
pub fn group_end(chunk: u32) -> u32 {
    (group_of(chunk) + 1).saturating_mul(GROUP_CHUNKS)
}

/// Size of a file that holds exactly `chunks` chunks.
pub fn file_bytes(chunks: u32) -> u64 {
    match chunks.checked_sub(1) {
        Some(last) => chunk_position(last) + PAGE,
        None => PAGE,
    }
}

/// The number of chunks in a file of this size; `None` if no sealed replica has it.
pub fn chunks_in_file(file_bytes: u64) -> Option<u32> {
    let chunks = chunks_within(file_bytes)?;
    (self::file_bytes(chunks) == file_bytes).then_some(chunks)
}

/// The most chunks that fit in a file of this size; `None` if not even the header fits, or the file
/// is larger than any replica.
pub fn chunks_within(file_bytes: u64) -> Option<u32> {
    let groups_bytes = file_bytes.checked_sub(PAGE)?;
    let whole_groups = groups_bytes / GROUP_BYTES;
    let rest_chunks = (groups_bytes % GROUP_BYTES / PAGE).saturating_sub(1);
    u32::try_from(whole_groups * u64::from(GROUP_CHUNKS) + rest_chunks).ok()
}

/// The header page of a replica.
pub fn encode_header(page: &mut [u8; PAGE_BYTES], block: BlockId, storage: StorageId) {
    page.fill(0);
    page[..8].copy_from_slice(HEADER_MAGIC);
    page[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    page[12..20].copy_from_slice(&block.0.to_le_bytes());
    page[20..36].copy_from_slice(&storage.0.to_le_bytes());
    let crc = crc32fast::hash(&page[..36]);
    page[36..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
}

/// Whether a header page is exactly that of this replica.
pub fn header_matches(page: &[u8; PAGE_BYTES], block: BlockId, storage: StorageId) -> bool {
    let mut expected = [0; PAGE_BYTES];
    encode_header(&mut expected, block, storage);
    expected == *page
}

/// Name of the file of a replica within its directory.
pub fn file_name(block: BlockId) -> String {
    block.to_string()
}

/// The block whose replica has this file name.
pub fn parse_file_name(name: &str) -> Option<BlockId> {
    let block = BlockId(u64::from_str_radix(name, 16).ok()?);
    // One spelling only: a second one would be a second replica of the block.
    (file_name(block) == name).then_some(block)
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
        assert_eq!(group_end(1024), 2048);
    }

    #[test]
    fn a_length_follows_from_a_size() {
        for chunks in [0, 1, 2, 1023, 1024, 1025, 2048, 65_536] {
            assert_eq!(chunks_in_file(file_bytes(chunks)), Some(chunks));
            assert_eq!(chunks_within(file_bytes(chunks) + 1), Some(chunks));
            assert_eq!(chunks_in_file(file_bytes(chunks) + 1), None);
        }
        // A table page without a chunk is in no sealed file.
        assert_eq!(chunks_in_file(2 * 4096), None);
        for impossible in [0, 1, 4095, u64::MAX] {
            assert_eq!(chunks_in_file(impossible), None);
        }
    }

    #[test]
    fn a_header_is_for_one_replica_only() {
        let mut page = [0; PAGE_BYTES];
        encode_header(&mut page, BlockId(5), StorageId(9));
        assert!(header_matches(&page, BlockId(5), StorageId(9)));
        assert!(!header_matches(&page, BlockId(6), StorageId(9)));
        assert!(!header_matches(&page, BlockId(5), StorageId(8)));
        page[13] ^= 1;
        assert!(!header_matches(&page, BlockId(5), StorageId(9)));
    }

    #[test]
    fn file_names_have_one_spelling() {
        assert_eq!(
            parse_file_name(&file_name(BlockId(0xab))),
            Some(BlockId(0xab))
        );
        for other in ["", "ab", "00000000000000AB", "+0000000000000ab", "x"] {
            assert_eq!(parse_file_name(other), None);
        }
    }

    #[test]
    fn an_entry_never_written_does_not_match_a_chunk_never_written() {
        assert_ne!(crc32fast::hash(&[0; CHUNK_BYTES]), 0);
    }
}
