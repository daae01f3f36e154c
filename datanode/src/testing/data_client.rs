//! The client end of block streams. Also used by the benchmark, so it uses the protocol only.

use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{
    DataRequest, Opening, Packet, ReadPacket, ReadRequest, SealReply, SealRequest, WriteAck,
    WriteRequest, chunk_checksums, first_mismatch,
};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{CertificateAuthority, Peer, Role};
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::token::BlockToken;
use harvestfs_protocol::transport::{
    ConnectionPool, Endpoint, FrameReceiver, FrameSender, TransportError, TransportOptions,
};
use harvestfs_protocol::types::NodeInfo;

const DEADLINE: Duration = Duration::from_secs(20);

/// A client of datanodes.
#[derive(Clone)]
pub struct DataClient {
    pool: ConnectionPool,
}

impl DataClient {
    pub fn new(authority: &CertificateAuthority, name: &str) -> Self {
        let identity = authority
            .issue(Role::Client, name, Duration::from_secs(3600))
            .unwrap();
        let addr = "127.0.0.1:0".parse().unwrap();
        let endpoint = Endpoint::bind(addr, &identity, TransportOptions::default()).unwrap();
        Self {
            pool: ConnectionPool::new(endpoint, Duration::from_secs(5), 64),
        }
    }

    pub async fn open_stream(&self, node: &NodeInfo) -> (FrameSender, FrameReceiver) {
        let peer = Peer::new(Role::Datanode, node.name.clone()).unwrap();
        let connection = self.pool.get(node.data_addr, &peer).await.unwrap();
        connection.open_stream(StreamKind::Data).await.unwrap()
    }

    /// Opens a pipeline; its first answer is the first acknowledgement.
    pub async fn write(
        &self,
        pipeline: &[NodeInfo],
        block: BlockId,
        token: BlockToken,
    ) -> WriteStream {
        let (mut sender, receiver) = self.open_stream(&pipeline[0]).await;
        let request = WriteRequest {
            block,
            token,
            class: None,
            downstream: pipeline[1..].to_vec(),
        };
        sender
            .send(&Opening::from(DataRequest::Write(request)))
            .await
            .unwrap();
        WriteStream {
            sender,
            receiver,
            offset: 0,
            packets: 0,
        }
    }

    /// Writes a whole block in packets of 64 KiB and seals it.
    pub async fn write_block(
        &self,
        pipeline: &[NodeInfo],
        block: BlockId,
        token: BlockToken,
        data: &[u8],
    ) {
        let mut stream = self.write(pipeline, block, token).await;
        assert_eq!(stream.ack().await, Some(WriteAck::Ready));
        for piece in data.chunks(64 * 1024) {
            stream
                .send(Bytes::copy_from_slice(piece), false)
                .await
                .unwrap();
        }
        stream.seal(data.len() as u64).await;
        let last = stream.wait_for_all().await;
        assert_eq!(last, Ok(()));
    }

    /// Reads a range; data received before an error is dropped.
    pub async fn read(
        &self,
        node: &NodeInfo,
        block: BlockId,
        token: BlockToken,
        (block_offset, length_bytes): (u64, u64),
    ) -> Result<Vec<u8>, DataError> {
        let (mut sender, mut receiver) = self.open_stream(node).await;
        let request = ReadRequest {
            block,
            token,
            block_offset,
            length_bytes,
        };
        sender
            .send(&Opening::from(DataRequest::Read(request)))
            .await
            .unwrap();
        let mut all = Vec::new();
        while let Some((packet, data_len)) = receiver.recv(DEADLINE).await.unwrap() {
            match packet {
                ReadPacket::Data { checksums, .. } => {
                    let start = all.len();
                    all.resize(start + data_len, 0);
                    let data = &mut all[start..];
                    receiver.read_data_into(data, DEADLINE).await.unwrap();
                    assert_eq!(first_mismatch(data, &checksums), None);
                }
                ReadPacket::Failed(error) => return Err(error),
            }
        }
        let start = (block_offset % 4096) as usize;
        Ok(all[start..start + length_bytes as usize].to_vec())
    }

    pub async fn seal(
        &self,
        node: &NodeInfo,
        block: BlockId,
        token: BlockToken,
        length_bytes: u64,
    ) -> SealReply {
        let (mut sender, mut receiver) = self.open_stream(node).await;
        let request = SealRequest {
            block,
            token,
            length_bytes,
        };
        sender
            .send(&Opening::from(DataRequest::Seal(request)))
            .await
            .unwrap();
        let (reply, _) = receiver.recv(DEADLINE).await.unwrap().unwrap();
        reply
    }
}

/// The writer's end of a pipeline.
pub struct WriteStream {
    pub sender: FrameSender,
    pub receiver: FrameReceiver,
    pub offset: u64,
    pub packets: u64,
}

impl WriteStream {
    /// Sends data for the end of the block.
    pub async fn send(&mut self, data: Bytes, sync: bool) -> Result<(), TransportError> {
        let packet = Packet::Data {
            block_offset: self.offset,
            checksums: chunk_checksums(&data),
            sync,
            request: RequestId::NONE,
        };
        self.offset = (self.offset + data.len() as u64).next_multiple_of(4096);
        self.packets += 1;
        self.sender.send_with_data(&packet, data).await
    }

    pub async fn sync(&mut self) {
        self.packets += 1;
        self.sender.send(&Packet::Sync).await.unwrap();
    }

    pub async fn seal(&mut self, length_bytes: u64) {
        self.packets += 1;
        self.sender
            .send(&Packet::Seal { length_bytes })
            .await
            .unwrap();
        // Nothing follows; it is already stopped if the pipeline was faster than this line.
        let _ = self.sender.finish();
    }

    /// The next answer; `None` at the end of the stream.
    pub async fn ack(&mut self) -> Option<WriteAck> {
        let answer = self.receiver.recv(DEADLINE).await.unwrap();
        answer.map(|(ack, _)| ack)
    }

    /// Waits until everything sent so far is acknowledged.
    pub async fn wait_for_all(&mut self) -> Result<(), WriteAck> {
        loop {
            match self.ack().await {
                Some(WriteAck::Acked { packets }) if packets == self.packets => return Ok(()),
                Some(WriteAck::Acked { packets }) => assert!(packets < self.packets),
                Some(other) => return Err(other),
                None => panic!("the stream ended without a word"),
            }
        }
    }
}
