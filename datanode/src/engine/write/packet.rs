//! The packets that a writer may send.

use harvestfs_protocol::data::{Packet, round_up_to_chunk};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::limits::{CHUNK_BYTES, PACKET_BYTES_MAX};

/// The packets of one stream.
#[derive(Debug, Default)]
pub struct Packets {
    /// The offset in the block where the next data belongs.
    next_offset: u64,
}

impl Packets {
    /// Checks a packet's shape, before memory is allocated for its data, and its position in the block.
    ///
    /// # Errors
    /// [`DataError::Protocol`] or [`DataError::OutOfOrder`], which end the stream.
    pub fn accept(&mut self, packet: &Packet, data_len: usize) -> Result<(), DataError> {
        let protocol = |reason: &str| Err(DataError::Protocol(reason.to_owned()));
        match packet {
            Packet::Data {
                block_offset,
                checksums,
                ..
            } => {
                if data_len == 0 || data_len > PACKET_BYTES_MAX {
                    return protocol("a packet carries 1 byte to 1 MiB of data");
                }
                if checksums.len() != data_len.div_ceil(CHUNK_BYTES) {
                    return protocol("a packet needs one checksum for each chunk");
                }
                if *block_offset != self.next_offset {
                    return Err(DataError::OutOfOrder(format!(
                        "data for offset {block_offset} where {} is the end",
                        self.next_offset
                    )));
                }
                let next_offset = round_up_to_chunk(block_offset + data_len as u64);
                assert!(
                    self.next_offset < next_offset
                        && next_offset.is_multiple_of(CHUNK_BYTES as u64),
                    "a packet of {data_len} bytes at {} is followed by one at {next_offset}",
                    self.next_offset
                );
                self.next_offset = next_offset;
                Ok(())
            }
            Packet::Sync | Packet::Seal { .. } if data_len > 0 => {
                protocol("this packet carries no data")
            }
            Packet::Sync | Packet::Seal { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::request_id::RequestId;
    use proptest::prelude::*;

    use super::*;

    fn data(block_offset: u64, checksums: usize) -> Packet {
        Packet::Data {
            block_offset,
            checksums: vec![0; checksums],
            sync: false,
            request: RequestId::default(),
        }
    }

    proptest! {
        /// Data is accepted exactly where the previously accepted data ends, rounded up to the end of its chunk.
        #[test]
        fn what_is_taken_has_no_gap(
            steps in prop::collection::vec((0usize..9_000, -1i64..2, -1i64..2, 0u8..4), 1..50),
        ) {
            let mut packets = Packets::default();
            let mut end: u64 = 0;
            for (data_len, chunks_off, checksums_off, kind) in steps {
                if kind == 0 {
                    let is_taken = packets.accept(&Packet::Sync, data_len).is_ok();
                    prop_assert_eq!(is_taken, data_len == 0);
                    continue;
                }
                let block_offset = end.saturating_add_signed(chunks_off * CHUNK_BYTES as i64);
                let needed = data_len.div_ceil(CHUNK_BYTES);
                let checksums = needed.saturating_add_signed(checksums_off as isize);
                let taken = packets.accept(&data(block_offset, checksums), data_len);
                let is_good = data_len > 0 && checksums == needed && block_offset == end;
                prop_assert_eq!(taken.is_ok(), is_good, "{:?}", taken);
                if is_good {
                    end += (needed * CHUNK_BYTES) as u64;
                }
            }
        }
    }

    #[test]
    fn no_packet_is_larger_than_one_may_be() {
        let chunks = PACKET_BYTES_MAX / CHUNK_BYTES;
        let mut packets = Packets::default();
        assert!(
            packets
                .accept(&data(0, chunks + 1), PACKET_BYTES_MAX + 1)
                .is_err()
        );
        assert!(packets.accept(&data(0, chunks), PACKET_BYTES_MAX).is_ok());
    }
}
