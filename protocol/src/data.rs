//! Block streams: what clients and other datanodes send to a datanode. Each stream starts with an [`Opening`].
//!
//! **Write.** The writer sends [`DataRequest::Write`], then [`Packet`]s, each with its data
//! attached. A datanode verifies the checksums, writes, forwards to the next datanode of the pipeline, and
//! answers with cumulative [`WriteAck`]s. Every packet starts at a multiple of [`crate::limits::CHUNK_BYTES`]:
//! the end of the packet before it, rounded up. So no chunk is ever written twice, and acknowledged data is
//! never at risk from what follows.
//!
//! **Read.** The reader sends [`DataRequest::Read`]; the datanode answers with [`ReadPacket`]s that
//! cover whole chunks, each with its data attached, or ends with [`ReadPacket::Failed`].
//!
//! **Short circuit.** See [`crate::short_circuit`].
//!
//! Checksums: CRC32 (IEEE 802.3) of each chunk. For its checksum, the last chunk of a packet is padded with
//! zeros, on disk as well as at the receiver. The attached data is not padded.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::ids::{BlockId, NodeId};
use crate::limits::CHUNK_BYTES;
use crate::planted::{self, Bug};
use crate::request_id::RequestId;
use crate::token::BlockToken;
use crate::types::{NodeInfo, StorageClass};

/// The first frame of a block stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// The request.
    pub body: DataRequest,
    /// The id of the request for which the stream is opened.
    pub request: RequestId,
}

impl From<DataRequest> for Opening {
    /// Opens a stream for the current request.
    fn from(body: DataRequest) -> Self {
        Self {
            body,
            request: RequestId::current(),
        }
    }
}

/// The purpose of a block stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataRequest {
    /// Create a replica and append to it.
    Write(WriteRequest),
    /// Read a range.
    Read(ReadRequest),
    /// Cut to a length that all surviving datanodes of a pipeline acknowledged, and seal. Reply: [`SealReply`].
    Seal(SealRequest),
    /// Asks for the Unix socket of [`crate::short_circuit`]. Reply: [`ShortCircuitReply`].
    ShortCircuit {
        /// The client's own [`crate::short_circuit::this_host`].
        host: String,
    },
}

/// Starts a pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteRequest {
    /// Block.
    pub block: BlockId,
    /// The right to write it.
    pub token: BlockToken,
    /// The class of volume asked for, if any.
    pub class: Option<StorageClass>,
    /// The rest of the pipeline; this datanode forwards to the first of them.
    pub downstream: Vec<NodeInfo>,
}

/// A piece of a block; the data is attached to the frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Packet {
    /// Data to append to the block.
    Data {
        /// Offset in the block in bytes; a multiple of the chunk size.
        block_offset: u64,
        /// One checksum for each chunk that the data touches.
        checksums: Vec<u32>,
        /// Acknowledge once this packet and all before it are on stable storage of every datanode.
        sync: bool,
        /// The first request that waits for some of it.
        request: RequestId,
    },
    /// Acknowledge once all packets before it are on stable storage of every datanode.
    Sync,
    /// No data follows: make it stable and seal the replicas at this length in bytes.
    Seal {
        /// Final length in bytes: the end of the last packet's data.
        length_bytes: u64,
    },
}

/// The answer to a write stream. The first one reports whether the pipeline is set up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriteAck {
    /// The pipeline is set up.
    Ready,
    /// Every datanode has written the first `packets` packets of the stream; those that demanded it are on
    /// stable storage.
    Acked {
        /// Packets since the start of the stream, `Sync` and `Seal` included.
        packets: u64,
    },
    /// The stream is over. What was acknowledged before remains valid.
    Failed {
        /// Which datanode failed.
        node: NodeId,
        /// Why.
        error: DataError,
    },
}

/// Asks for a range of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadRequest {
    /// Block.
    pub block: BlockId,
    /// The right to read it.
    pub token: BlockToken,
    /// First byte.
    pub block_offset: u64,
    /// Bytes; not 0.
    pub length_bytes: u64,
}

/// A part of the answer to a read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReadPacket {
    /// Whole chunks, in order and without gaps. The first starts at the requested offset rounded down, the last
    /// ends at the requested end rounded up; beyond the end of the replica they are padded with zeros. The data
    /// is attached.
    Data {
        /// Offset in the block in bytes; a multiple of the chunk size.
        block_offset: u64,
        /// One checksum for each chunk.
        checksums: Vec<u32>,
    },
    /// The stream is over; what arrived before is valid.
    Failed(DataError),
}

/// Asks to seal a replica whose pipeline broke.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealRequest {
    /// Block.
    pub block: BlockId,
    /// The right to write it.
    pub token: BlockToken,
    /// Final length in bytes; at most what the replica holds.
    pub length_bytes: u64,
}

/// The answer to [`SealRequest`]; when it is `Ok`, the replica is sealed on stable storage.
pub type SealReply = Result<(), DataError>;

/// The answer to [`DataRequest::ShortCircuit`]: the socket's path, or `None` if the client is on another
/// host or this datanode has no socket.
pub type ShortCircuitReply = Option<PathBuf>;

/// Returns the checksum of every chunk of `data`, the last one padded with zeros.
#[must_use]
pub fn chunk_checksums(data: &[u8]) -> Vec<u32> {
    data.chunks(CHUNK_BYTES).map(chunk_checksum).collect()
}

/// Returns the checksum of one chunk, padded with zeros to [`CHUNK_BYTES`].
#[must_use]
pub fn chunk_checksum(chunk: &[u8]) -> u32 {
    const ZEROS: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(chunk);
    hasher.update(&ZEROS[..CHUNK_BYTES.saturating_sub(chunk.len())]);
    hasher.finalize()
}

/// Returns the offset in `data` of the first chunk that does not match its checksum, or of the first one that
/// has none; `None` when all match.
#[must_use]
pub fn first_mismatch(data: &[u8], checksums: &[u32]) -> Option<usize> {
    if planted::is(Bug::IgnoresChecksums) {
        return None;
    }
    let chunks = data.len().div_ceil(CHUNK_BYTES);
    let bad = data
        .chunks(CHUNK_BYTES)
        .zip(checksums)
        .position(|(chunk, &expected)| chunk_checksum(chunk) != expected);
    match bad {
        Some(index) => Some(index * CHUNK_BYTES),
        None if checksums.len() != chunks => Some(checksums.len().min(chunks) * CHUNK_BYTES),
        None => None,
    }
}

/// Rounds an offset or a length up to whole chunks.
#[must_use]
pub fn round_up_to_chunk(bytes: u64) -> u64 {
    bytes.next_multiple_of(CHUNK_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_chunk_counts_as_filled_up() {
        let mut filled = b"harvest".to_vec();
        let short = chunk_checksums(&filled);
        filled.resize(CHUNK_BYTES, 0);
        assert_eq!(short, chunk_checksums(&filled));
    }

    #[test]
    fn mismatches_are_found_where_they_are() {
        let mut data = vec![7; 3 * CHUNK_BYTES + 5];
        let checksums = chunk_checksums(&data);
        assert_eq!(checksums.len(), 4);
        assert_eq!(first_mismatch(&data, &checksums), None);
        assert_eq!(
            first_mismatch(&data, &checksums[..3]),
            Some(3 * CHUNK_BYTES)
        );
        assert_eq!(
            first_mismatch(&data[..CHUNK_BYTES], &checksums),
            Some(CHUNK_BYTES)
        );
        data[2 * CHUNK_BYTES] ^= 1;
        assert_eq!(first_mismatch(&data, &checksums), Some(2 * CHUNK_BYTES));
    }
}
