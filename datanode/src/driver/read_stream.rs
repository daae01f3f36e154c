//! Serving a read: pieces of the replica are read ahead while earlier ones are being sent.

use std::collections::VecDeque;

use harvestfs_protocol::data::{ReadPacket, ReadRequest};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::token::Right;
use harvestfs_protocol::transport::{FrameSender, TransportError};
use harvestfs_telemetry::metrics::WholeCounter;
use tokio::task::JoinHandle;

use crate::driver::node::Node;
use crate::store::{BlockStore, ChunkRange, Piece, StoreError};

/// Most data in one packet. Small enough that disk and network overlap even for a single request of the kernel.
const PIECE_BYTES: usize = 256 * 1024;
/// Number of pieces read ahead of the one that is being sent.
const PIECES_AHEAD: usize = 4;

/// Serves a read until its end or failure.
///
/// # Errors
/// The error that broke the stream.
pub async fn serve(
    node: &Node,
    request: &ReadRequest,
    peer: Role,
    mut sender: FrameSender,
) -> Result<(), TransportError> {
    let _timer = node.metrics.read.timer();
    let sent_bytes = node.metrics.read_for(peer);
    if let Err(error) = send_range(node, request, sent_bytes, &mut sender).await? {
        node.metrics.read.note_failure(&error);
        sender.send(&ReadPacket::Failed(error)).await?;
    }
    sender.finish()
}

async fn send_range(
    node: &Node,
    request: &ReadRequest,
    sent_bytes: &WholeCounter,
    sender: &mut FrameSender,
) -> Result<Result<(), DataError>, TransportError> {
    let block = request.block;
    let mut range = match check(node, request) {
        Ok(range) => range,
        Err(error) => return Ok(Err(error)),
    };
    let Some(first) = range.take_piece(PIECE_BYTES) else {
        return Ok(Ok(()));
    };
    // The usual random read is one piece: no task, no queue.
    let first = node.store.read(block, first, true).await;
    let mut current = first.map_err(DataError::from);
    let mut ahead = ReadAhead::default();
    loop {
        ahead.fill(&node.store, block, &mut range);
        let piece = match current {
            Ok(piece) => piece,
            Err(error) => return Ok(Err(error)),
        };
        let packet = ReadPacket::Data {
            block_offset: piece.block_offset,
            checksums: piece.checksums,
        };
        sent_bytes.inc_by(piece.data.len() as u64);
        sender.send_with_data(&packet, piece.data).await?;
        if node.is_stopping() {
            return Ok(Err(DataError::Stopping));
        }
        // Packets end at chunk boundaries: the reader continues from there on another datanode.
        if let Some(denial) = node.busy.denial() {
            node.metrics.denied_reads.inc();
            return Ok(Err(denial));
        }
        current = match ahead.next().await {
            Some(next) => next,
            None => return Ok(Ok(())),
        };
    }
}

fn check(node: &Node, request: &ReadRequest) -> Result<ChunkRange, DataError> {
    node.check_token(&request.token, request.block, Right::Read)?;
    let range = ChunkRange::covering(request.block_offset, request.length_bytes)
        .ok_or_else(|| DataError::Protocol("the range is empty or beyond any block".to_owned()))?;
    node.store.check_readable(request.block, range)?;
    Ok(range)
}

/// Pieces that are being read, in order.
#[derive(Default)]
struct ReadAhead {
    pieces: VecDeque<JoinHandle<Result<Piece, StoreError>>>,
}

impl ReadAhead {
    fn fill(&mut self, store: &BlockStore, block: BlockId, range: &mut ChunkRange) {
        while self.pieces.len() < PIECES_AHEAD
            && let Some(piece) = range.take_piece(PIECE_BYTES)
        {
            let store = store.clone();
            let read = async move { store.read(block, piece, false).await };
            self.pieces.push_back(tokio::spawn(read));
        }
    }

    async fn next(&mut self) -> Option<Result<Piece, DataError>> {
        let piece = self.pieces.front_mut()?;
        let result = piece.await;
        self.pieces.pop_front();
        Some(match result {
            Ok(read) => read.map_err(Into::into),
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime is being shut down, with all its tasks.
            Err(_) => Err(DataError::Stopping),
        })
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        for piece in &self.pieces {
            piece.abort();
        }
    }
}
