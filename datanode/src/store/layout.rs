//! The name of a replica file. Its contents are described in [`harvestfs_protocol::replica_layout`].
//!
//! The length of a sealed replica follows from the size of its file. An open replica's file is longer than its data
//! (it is allocated in steps); its data ends before the first chunk that does not match its table entry. An entry that
//! was never written is 0 and belongs to a chunk of zeros, whose CRC32 is not 0, so the two never match.
//!
//! Every part starts at a multiple of the page size, as direct I/O demands, and a sync of the one
//! file covers data and checksums alike.

use harvestfs_protocol::ids::BlockId;
pub use harvestfs_protocol::replica_layout::*;

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
