//! A datanode in memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{
    DataRequest, Opening, Packet, ReadPacket, ReadRequest, SealReply, SealRequest,
    ShortCircuitReply, WriteAck, WriteRequest, chunk_checksums, first_mismatch, round_up_to_chunk,
};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{Identity, Peer, Role};
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::limits::CHUNK_BYTES;
use harvestfs_protocol::token::{Right, TokenVerifier};
use harvestfs_protocol::transport::{
    CloseCode, Connection, Endpoint, FrameReceiver, FrameSender, TransportError,
};
use harvestfs_protocol::types::NodeInfo;
use parking_lot::Mutex;

use super::{any_port, bind, token_key, unix_ms_now};

const DEADLINE: Duration = Duration::from_secs(30);

/// How a datanode behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mood {
    #[default]
    Well,
    /// The primary tenant needs the server.
    Busy,
    /// Answers reads with data that does not match its checksums.
    Corrupt,
    /// Claims to have no replicas.
    Empty,
    /// Takes this long for each read.
    Slow(Duration),
    /// Fails each write at the packet with this number, from 1, and cannot seal.
    FailsAtPacket(u64),
    /// Its disk is full: a pipeline can be set up, but its first packet fails.
    Full,
    /// Accepts streams but never answers.
    Silent,
}

#[derive(Default)]
struct Replica {
    data: Vec<u8>,
    stable_bytes: usize,
    sealed: bool,
}

impl Replica {
    fn seal(&mut self, length_bytes: u64) {
        self.data.truncate(length_bytes as usize);
        self.stable_bytes = self.data.len();
        self.sealed = true;
    }
}

/// A datanode in memory, which fails on demand.
pub(crate) struct Datanode {
    info: NodeInfo,
    endpoint: Endpoint,
    verifier: TokenVerifier,
    replicas: Mutex<HashMap<BlockId, Replica>>,
    mood: Mutex<Mood>,
    pub(crate) reads: AtomicU64,
    pub(crate) packets: AtomicU64,
    pub(crate) syncs: AtomicU64,
}

impl Datanode {
    pub(super) fn start(number: u32, identity: &Identity) -> Arc<Self> {
        let endpoint = bind(any_port(), identity);
        let datanode = Arc::new(Self {
            info: NodeInfo {
                node: NodeId(number),
                name: identity.peer().name.clone(),
                data_addr: endpoint.local_addr().unwrap(),
                rack: format!("rack-{number}"),
            },
            endpoint,
            verifier: TokenVerifier::new(&[token_key()]),
            replicas: Mutex::default(),
            mood: Mutex::default(),
            reads: AtomicU64::new(0),
            packets: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
        });
        tokio::spawn(datanode.clone().accept());
        datanode
    }

    pub(crate) fn info(&self) -> NodeInfo {
        self.info.clone()
    }

    pub(crate) fn set_mood(&self, mood: Mood) {
        *self.mood.lock() = mood;
    }

    /// Stops the datanode permanently.
    pub(crate) fn stop(&self) {
        self.endpoint.close("stopped");
    }

    /// Loses data that was not made stable, as in a power failure.
    pub(crate) fn lose_unstable(&self) {
        for replica in self.replicas.lock().values_mut() {
            replica.data.truncate(replica.stable_bytes);
        }
    }

    /// Copies a sealed replica of another one, as repair does.
    pub(crate) fn copy(&self, block: BlockId, from: &Self) {
        let copy = {
            let replicas = from.replicas.lock();
            let replica = &replicas[&block];
            assert!(replica.sealed, "only sealed replicas are repaired");
            Replica {
                data: replica.data.clone(),
                ..*replica
            }
        };
        self.replicas.lock().insert(block, copy);
    }

    /// Seals a replica at a length, as the namenode would command.
    pub(crate) fn seal_at(&self, block: BlockId, length_bytes: u64) {
        let mut replicas = self.replicas.lock();
        replicas.get_mut(&block).unwrap().seal(length_bytes);
    }

    /// Blocks with their lengths and whether they are sealed.
    pub(crate) fn replicas(&self) -> HashMap<BlockId, (usize, bool)> {
        let replicas = self.replicas.lock();
        let view = |(id, r): (&BlockId, &Replica)| (*id, (r.data.len(), r.sealed));
        replicas.iter().map(view).collect()
    }

    fn mood(&self) -> Mood {
        *self.mood.lock()
    }

    async fn accept(self: Arc<Self>) {
        while let Some(incoming) = self.endpoint.accept().await {
            let this = self.clone();
            tokio::spawn(async move {
                if let Ok(connection) = incoming.establish().await {
                    this.serve(connection).await;
                }
            });
        }
    }

    async fn serve(self: Arc<Self>, connection: Connection) {
        while let Ok((kind, mut sender, mut receiver)) = connection.accept_stream().await {
            assert_eq!(kind, StreamKind::Data);
            let this = self.clone();
            tokio::spawn(async move {
                if let Ok(Some((opening, _))) = receiver.recv::<Opening>(DEADLINE).await {
                    if this.mood() == Mood::Silent {
                        std::future::pending::<()>().await;
                    }
                    let served = match opening.body {
                        DataRequest::Write(request) => {
                            this.write(request, &mut sender, &mut receiver).await
                        }
                        DataRequest::Read(request) => this.read(request, &mut sender).await,
                        DataRequest::Seal(request) => {
                            let reply: SealReply = this.seal(&request);
                            sender.send(&reply).await
                        }
                        DataRequest::ShortCircuit { .. } => {
                            sender.send(&ShortCircuitReply::None).await
                        }
                    };
                    if served.is_ok() {
                        let _ = sender.finish();
                    }
                }
            });
        }
        connection.close(CloseCode::DONE, "over");
    }

    async fn write(
        &self,
        request: WriteRequest,
        sender: &mut FrameSender,
        receiver: &mut FrameReceiver,
    ) -> Result<(), TransportError> {
        let failed = |error| WriteAck::Failed {
            node: self.info.node,
            error,
        };
        let token =
            self.verifier
                .verify(&request.token, request.block, Right::Write, unix_ms_now());
        if let Err(error) = token {
            return sender.send(&failed(error)).await;
        }
        if self.mood() == Mood::Busy {
            return sender
                .send(&failed(DataError::Busy { retry_after_ms: 20 }))
                .await;
        }
        if self.replicas.lock().contains_key(&request.block) {
            return sender.send(&failed(DataError::ReplicaExists)).await;
        }
        let mut downstream = match request.downstream.split_first() {
            None => None,
            Some((next, rest)) => match self.open_downstream(next, rest, &request).await {
                Ok(stream) => Some((next.node, stream)),
                Err((node, error)) => return sender.send(&WriteAck::Failed { node, error }).await,
            },
        };
        self.replicas
            .lock()
            .insert(request.block, Replica::default());
        sender.send(&WriteAck::Ready).await?;
        let mut packets = 0;
        while let Some((packet, length)) = receiver.recv::<Packet>(DEADLINE).await? {
            let data = receiver.read_data(DEADLINE).await?;
            assert_eq!(data.len(), length);
            packets += 1;
            self.packets.fetch_add(1, Ordering::Relaxed);
            match self.mood() {
                Mood::FailsAtPacket(at) if at <= packets => {
                    return sender.send(&failed(DataError::Disk("broken".into()))).await;
                }
                Mood::Busy => {
                    return sender
                        .send(&failed(DataError::Busy { retry_after_ms: 20 }))
                        .await;
                }
                Mood::Full => return sender.send(&failed(DataError::NoSpace)).await,
                _ => {}
            }
            if let Some((node, (next, acks))) = &mut downstream {
                next.send_with_data(&packet, data.clone()).await?;
                let answer = acks.recv::<WriteAck>(DEADLINE).await;
                match answer {
                    Ok(Some((WriteAck::Acked { packets: acked }, _))) => assert_eq!(acked, packets),
                    Ok(Some((failure @ WriteAck::Failed { .. }, _))) => {
                        return sender.send(&failure).await;
                    }
                    other => {
                        let error = DataError::Downstream(format!("{other:?}"));
                        let node = *node;
                        return sender.send(&WriteAck::Failed { node, error }).await;
                    }
                }
            }
            if let Err(error) = self.store(request.block, &packet, &data) {
                return sender.send(&failed(error)).await;
            }
            sender.send(&WriteAck::Acked { packets }).await?;
        }
        Ok(())
    }

    async fn open_downstream(
        &self,
        next: &NodeInfo,
        rest: &[NodeInfo],
        request: &WriteRequest,
    ) -> Result<(FrameSender, FrameReceiver), (NodeId, DataError)> {
        let broken = |error: TransportError| (next.node, DataError::Downstream(error.to_string()));
        let peer = Peer::new(Role::Datanode, next.name.clone()).unwrap();
        let dial = self
            .endpoint
            .connect(next.data_addr, &peer, Duration::from_secs(1));
        let connection = dial.await.map_err(broken)?;
        let stream = connection.open_stream(StreamKind::Data).await;
        let (mut sender, mut receiver) = stream.map_err(broken)?;
        let forwarded = Opening::from(DataRequest::Write(WriteRequest {
            downstream: rest.to_vec(),
            ..request.clone()
        }));
        sender.send(&forwarded).await.map_err(broken)?;
        match receiver.recv::<WriteAck>(DEADLINE).await.map_err(broken)? {
            Some((WriteAck::Ready, _)) => Ok((sender, receiver)),
            Some((WriteAck::Failed { node, error }, _)) => Err((node, error)),
            other => Err((next.node, DataError::Downstream(format!("{other:?}")))),
        }
    }

    fn store(&self, block: BlockId, packet: &Packet, data: &[u8]) -> Result<(), DataError> {
        let mut replicas = self.replicas.lock();
        let replica = replicas.get_mut(&block).ok_or(DataError::NoSuchReplica)?;
        if replica.sealed {
            return Err(DataError::OutOfOrder("sealed".into()));
        }
        match packet {
            Packet::Data {
                block_offset,
                checksums,
                sync,
                ..
            } => {
                let start = round_up_to_chunk(replica.data.len() as u64);
                if *block_offset != start {
                    return Err(DataError::OutOfOrder(format!(
                        "{block_offset} after {start}"
                    )));
                }
                if let Some(bad) = first_mismatch(data, checksums) {
                    let offset = block_offset + bad as u64;
                    return Err(DataError::Corrupt { offset });
                }
                replica.data.resize(start as usize, 0);
                replica.data.extend_from_slice(data);
                if *sync {
                    replica.stable_bytes = replica.data.len();
                    self.syncs.fetch_add(1, Ordering::Relaxed);
                }
            }
            Packet::Sync => {
                replica.stable_bytes = replica.data.len();
                self.syncs.fetch_add(1, Ordering::Relaxed);
            }
            Packet::Seal { length_bytes } => {
                assert_eq!(*length_bytes, replica.data.len() as u64);
                replica.stable_bytes = replica.data.len();
                replica.sealed = true;
            }
        }
        Ok(())
    }

    async fn read(
        &self,
        request: ReadRequest,
        sender: &mut FrameSender,
    ) -> Result<(), TransportError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let token = self
            .verifier
            .verify(&request.token, request.block, Right::Read, unix_ms_now());
        let refused = match (token, self.mood()) {
            (Err(error), _) => Some(error),
            (_, Mood::Busy) => Some(DataError::Busy { retry_after_ms: 20 }),
            (_, Mood::Empty) => Some(DataError::NoSuchReplica),
            (_, Mood::Slow(delay)) => {
                tokio::time::sleep(delay).await;
                None
            }
            _ => None,
        };
        if let Some(error) = refused {
            return sender.send(&ReadPacket::Failed(error)).await;
        }
        let chunk = CHUNK_BYTES as u64;
        let from = request.block_offset / chunk * chunk;
        let to = (request.block_offset + request.length_bytes).next_multiple_of(chunk);
        let content = {
            let replicas = self.replicas.lock();
            let data = replicas
                .get(&request.block)
                .map(|replica| replica.data.clone());
            data.map(|mut data| {
                data.resize(data.len().next_multiple_of(CHUNK_BYTES), 0);
                data
            })
        };
        let Some(content) = content else {
            return sender
                .send(&ReadPacket::Failed(DataError::NoSuchReplica))
                .await;
        };
        if (content.len() as u64) < to {
            let have_bytes = content.len() as u64;
            let error = DataError::ShortReplica { have_bytes };
            return sender.send(&ReadPacket::Failed(error)).await;
        }
        // Small packets, so that a range consists of several.
        for (index, piece) in content[from as usize..to as usize]
            .chunks(64 << 10)
            .enumerate()
        {
            let mut piece = piece.to_vec();
            let checksums = chunk_checksums(&piece);
            let is_last = from + (index as u64 + 1) * (64 << 10) >= to;
            if self.mood() == Mood::Corrupt && is_last {
                let last = piece.len() - 1;
                piece[last] ^= 1;
            }
            let packet = ReadPacket::Data {
                block_offset: from + index as u64 * (64 << 10),
                checksums,
            };
            sender.send_with_data(&packet, piece.into()).await?;
        }
        Ok(())
    }

    fn seal(&self, request: &SealRequest) -> SealReply {
        if matches!(self.mood(), Mood::FailsAtPacket(_)) {
            return Err(DataError::Disk("broken".into()));
        }
        self.verifier
            .verify(&request.token, request.block, Right::Write, unix_ms_now())?;
        let mut replicas = self.replicas.lock();
        let replica = replicas
            .get_mut(&request.block)
            .ok_or(DataError::NoSuchReplica)?;
        if (replica.data.len() as u64) < request.length_bytes {
            let have_bytes = replica.data.len() as u64;
            return Err(DataError::ShortReplica { have_bytes });
        }
        if !replica.sealed {
            replica.seal(request.length_bytes);
        }
        Ok(())
    }
}
