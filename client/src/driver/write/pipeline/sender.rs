//! The sending of a block's packets.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::data::{Packet, chunk_checksums};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::transport::FrameSender;

use super::BlockStream;
use crate::driver::clock;
use crate::driver::write::requests::carrier;
use crate::engine::write::block::{Content, NodeFailure};
use crate::engine::write::packet::{Layout, Piece};

/// How long a datanode that stopped taking packets has to report the reason. Its answer arrives on
/// the other direction of the stream, which is not synchronized with this one.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The sending side of a block's pipelines.
pub(crate) struct StreamSender<J> {
    pub(crate) stream: Arc<BlockStream<J>>,
    pub(super) senders: Vec<(NodeId, FrameSender)>,
}

impl<J: Piece> StreamSender<J> {
    /// Sends a packet of data. A failure of a datanode is noted in the stream.
    pub(crate) async fn send(&mut self, layout: Layout<J>) {
        let checksums = chunk_checksums(&layout.data);
        let (data, sync) = (layout.data, layout.sync);
        let request = carrier(layout.pieces.iter().map(|(_, job)| job.request()));
        let content = Content::Data {
            bytes: data.len() as u64,
            jobs: layout.pieces,
            sync,
        };
        if let Some(block_offset) = self.begin_packet(content) {
            let packet = Packet::Data {
                block_offset,
                checksums,
                sync,
                request,
            };
            self.send_packet(&packet, Some(data)).await;
        }
    }

    /// Requests that everything so far is made stable.
    pub(crate) async fn send_sync(&mut self) {
        if self.begin_packet(Content::Sync).is_some() {
            self.send_packet(&Packet::Sync, None).await;
        }
    }

    /// Ends the block.
    pub(crate) async fn send_seal(&mut self) {
        if self.begin_packet(Content::Seal).is_some() {
            let length_bytes = self.stream.state().sent_bytes();
            self.send_packet(&Packet::Seal { length_bytes }, None).await;
            for (_, sender) in &mut self.senders {
                // Fails only if the stream is broken, which the acknowledgements show.
                let _ = sender.finish();
            }
        }
    }

    /// Notes a packet; returns its offset in the block if it is to be sent.
    fn begin_packet(&self, content: Content<J>) -> Option<u64> {
        let now = clock::now();
        self.stream.state().begin_packet(content, now)
    }

    async fn send_packet(&mut self, packet: &Packet, data: Option<Bytes>) {
        for (node, sender) in &mut self.senders {
            let send = async {
                match &data {
                    Some(data) => sender.send_with_data(packet, data.clone()).await,
                    None => sender.send(packet).await,
                }
            };
            let result = tokio::select! {
                biased;
                result = send => result,
                // Another datanode of the pipeline may be keeping this one from reading.
                () = self.stream.broken() => return,
            };
            if let Err(error) = result {
                // The timeout expires if the datanode reports nothing; then the send error counts.
                let _ = tokio::time::timeout(LAST_WORDS, self.stream.broken()).await;
                self.stream.fail(NodeFailure {
                    node: *node,
                    error: DataError::Protocol(error.to_string()),
                });
                return;
            }
        }
    }
}
