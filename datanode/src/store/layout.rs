//! The header and the name of a replica file. Where chunks and checksums are in it, says
//! [`harvestfs_protocol::replica_layout`].
//!
//! ```text
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
pub use harvestfs_protocol::replica_layout::*;

const HEADER_MAGIC: &[u8; 8] = b"HVFSREPL";
const FORMAT_VERSION: u32 = 1;
const HEADER_BYTES: usize = 40;

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
        assert_ne!(crc32fast::hash(&[0; PAGE_BYTES]), 0);
    }
}
