//! Accepting connections and block streams.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{
    DataRequest, Opening, ReadPacket, ReadRequest, SealReply, SealRequest, ShortCircuitReply,
    WriteRequest,
};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::limits::STREAMS_PER_PEER_MAX;
use harvestfs_protocol::token::Right;
use harvestfs_protocol::transport::{
    CloseCode, Connection, ConnectionCounts, Endpoint, FrameReceiver, FrameSender, Incoming,
    TransportError,
};
use harvestfs_protocol::version::Versioned;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{Semaphore, mpsc};

use crate::driver::node::{Node, StreamCount};
use crate::driver::{read_stream, write_stream};
use crate::engine::busy::admission::{Admission, Server, admit};

/// Maximum number of connections at a time; bounds the memory that peers can claim.
const CONNECTIONS_MAX: usize = 4096;
/// Maximum number of block streams at a time, for the same reason. Writers may keep a stream open for long without
/// sending.
const STREAMS_MAX: usize = 4096;
/// How long to wait for a stream's first message, which should follow its opening immediately.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);

/// Number of streams of each peer.
#[derive(Default)]
struct PeerStreams(Mutex<HashMap<Peer, u32>>);

/// A stream of a peer, counted as long as this lives.
struct PeerStream {
    of: Arc<PeerStreams>,
    peer: Peer,
}

impl PeerStreams {
    /// Counts one more stream of a peer; `None` if the peer has reached its maximum.
    fn begin(self: &Arc<Self>, peer: &Peer) -> Option<PeerStream> {
        let mut counts = self.0.lock();
        let count = counts.entry(peer.clone()).or_default();
        if *count >= STREAMS_PER_PEER_MAX {
            return None;
        }
        *count += 1;
        Some(PeerStream {
            of: self.clone(),
            peer: peer.clone(),
        })
    }
}

impl Drop for PeerStream {
    fn drop(&mut self) {
        let mut counts = self.of.0.lock();
        let Some(count) = counts.get_mut(&self.peer).filter(|count| **count > 0) else {
            panic!("a stream of {} ends that is not counted", self.peer);
        };
        *count -= 1;
        if *count == 0 {
            counts.remove(&self.peer);
        }
    }
}

/// State shared by all streams of all connections.
#[derive(Clone)]
struct Streams {
    left: Arc<Semaphore>,
    of_peers: Arc<PeerStreams>,
}

/// Held by every task that must end before the datanode does; when all are dropped, everything has ended.
pub type Alive = mpsc::Sender<()>;
/// Can be upgraded to an [`Alive`] as long as the datanode is not stopping.
pub type WeakAlive = mpsc::WeakSender<()>;

/// Accepts connections until the endpoint is closed.
pub async fn serve(
    endpoint: Endpoint,
    counts: ConnectionCounts,
    node: Arc<Node>,
    alive: WeakAlive,
) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let streams = Streams {
        left: Arc::new(Semaphore::new(STREAMS_MAX)),
        of_peers: Arc::default(),
    };
    while let Some(incoming) = endpoint.accept().await {
        let Ok(permit) = connections.clone().try_acquire_owned() else {
            tracing::warn!(from = %incoming.remote_addr(), "too many connections: refused");
            incoming.refuse();
            continue;
        };
        let (node, streams, alive) = (node.clone(), streams.clone(), alive.clone());
        let counts = counts.clone();
        tokio::spawn(async move {
            serve_connection(incoming, &counts, node, streams, alive).await;
            drop(permit);
        });
    }
}

async fn serve_connection(
    incoming: Incoming,
    counts: &ConnectionCounts,
    node: Arc<Node>,
    streams: Streams,
    alive: WeakAlive,
) {
    let from = incoming.remote_addr();
    let connection = match incoming.establish().await {
        Ok(connection) => connection,
        Err(error) => {
            tracing::info!(%from, %error, "a connection was not established");
            return;
        }
    };
    let Some(_counted) = counts.count(&connection) else {
        return;
    };
    let peer = connection.peer().role;
    match peer {
        Role::Client | Role::Datanode | Role::Admin => {}
        Role::Namenode => {
            let reason = "datanodes talk to clients, datanodes and operators only";
            connection.close(CloseCode::NOT_ALLOWED, reason);
            return;
        }
    }
    loop {
        match connection.accept_stream().await {
            Ok((StreamKind::Data, sender, receiver)) => {
                let Some(counted) = streams.of_peers.begin(connection.peer()) else {
                    tracing::warn!(peer = %connection.peer(), "a peer has too many streams");
                    // Inline, so that nothing else of this connection is processed in the meantime.
                    let exceeded = Some(STREAMS_PER_PEER_MAX);
                    serve_stream(
                        node.clone(),
                        peer,
                        &streams.left,
                        exceeded,
                        sender,
                        receiver,
                    )
                    .await;
                    continue;
                };
                let (node, left, alive) = (node.clone(), streams.left.clone(), alive.upgrade());
                tokio::spawn(async move {
                    serve_stream(node, peer, &left, None, sender, receiver).await;
                    drop((alive, counted));
                });
            }
            Ok((StreamKind::Rpc, _, _)) => {
                let reason = "datanodes serve block streams only";
                connection.close(CloseCode::NOT_ALLOWED, reason);
                return;
            }
            Err(error) => {
                log_end(&connection, &error);
                return;
            }
        }
    }
}

fn log_end(connection: &Connection, error: &TransportError) {
    let peer = connection.peer();
    match error {
        TransportError::Wire(_) => tracing::warn!(%peer, %error, "the peer broke the protocol"),
        _ => tracing::debug!(%peer, %error, "the connection ended"),
    }
}

/// Receives and serves the request of a stream. `exceeded` is the peer's maximum number of streams, if it is exceeded.
async fn serve_stream(
    node: Arc<Node>,
    peer: Role,
    streams: &Semaphore,
    exceeded: Option<u32>,
    sender: FrameSender,
    mut receiver: FrameReceiver,
) {
    let opening = match receiver.recv::<Opening>(REQUEST_DEADLINE).await {
        Ok(Some((opening, 0))) => opening,
        Ok(Some(_)) => {
            tracing::debug!("a request came with data attached");
            return;
        }
        Ok(None) => return,
        Err(error) => {
            tracing::debug!(%error, "a stream has no request");
            return;
        }
    };
    let work = serve_request(
        node,
        peer,
        streams,
        exceeded,
        opening.body,
        sender,
        receiver,
    );
    opening.request.scope(work).await;
}

async fn serve_request(
    node: Arc<Node>,
    peer: Role,
    streams: &Semaphore,
    exceeded: Option<u32>,
    request: DataRequest,
    sender: FrameSender,
    receiver: FrameReceiver,
) {
    log_request(peer, &request);
    let permit = streams.try_acquire();
    let server = Server {
        streams_of_peer_exceed: exceeded,
        is_stopping: node.is_stopping(),
        busy: node.busy.denial(),
        has_room: permit.is_ok(),
    };
    let denial = match admit(peer, &request, server) {
        Admission::Serve => None,
        Admission::Busy(denial) => {
            match request {
                DataRequest::Read(_) => node.metrics.denied_reads.inc(),
                DataRequest::Write(_) => node.metrics.denied_writes.inc(),
                DataRequest::Seal(_) | DataRequest::ShortCircuit { .. } => {}
            }
            Some(denial)
        }
        Admission::Deny(denial) => Some(denial),
        Admission::Ignore => {
            tracing::warn!("an operator may only read");
            return;
        }
    };
    let _count = StreamCount::new(node.clone());
    let sent = match (request, denial) {
        (DataRequest::Write(request), denial) => {
            write_stream::serve(node, request, denial, sender, receiver).await
        }
        (DataRequest::Read(_), Some(error)) => answer(sender, &ReadPacket::Failed(error)).await,
        (DataRequest::Seal(_), Some(error)) => answer(sender, &SealReply::Err(error)).await,
        (DataRequest::Read(request), None) => {
            read_stream::serve(&node, &request, peer, sender).await
        }
        (DataRequest::Seal(request), None) => answer(sender, &seal(&node, &request).await).await,
        (DataRequest::ShortCircuit { .. }, Some(_)) => {
            answer(sender, &ShortCircuitReply::None).await
        }
        (DataRequest::ShortCircuit { host }, None) => {
            let socket = node.short_circuit.as_ref();
            let reply: ShortCircuitReply = socket.and_then(|it| it.path_for(&host));
            answer(sender, &reply).await
        }
    };
    if let Err(error) = sent {
        tracing::debug!(%error, "a block stream broke");
    }
}

fn log_request(peer: Role, request: &DataRequest) {
    match request {
        DataRequest::Read(ReadRequest {
            block,
            block_offset,
            length_bytes,
            ..
        }) => tracing::debug!(%peer, %block, block_offset, length_bytes, "a read"),
        DataRequest::Write(WriteRequest { block, .. }) => {
            tracing::debug!(%peer, %block, "a write");
        }
        DataRequest::Seal(SealRequest {
            block,
            length_bytes,
            ..
        }) => tracing::debug!(%peer, %block, length_bytes, "a seal"),
        DataRequest::ShortCircuit { .. } => {
            tracing::debug!(%peer, "a question for the socket on this host");
        }
    }
}

/// Sends the only message of a stream.
async fn answer<M: Serialize + Versioned>(
    mut sender: FrameSender,
    message: &M,
) -> Result<(), TransportError> {
    sender.send(message).await?;
    sender.finish()
}

async fn seal(node: &Node, request: &SealRequest) -> SealReply {
    let _timer = node.metrics.seal.timer();
    node.check_token(&request.token, request.block, Right::Write)?;
    let sealed = node.store.seal(request.block, request.length_bytes).await;
    sealed.map_err(|error| {
        let error = DataError::from(error);
        node.metrics.seal.note_failure(&error);
        error
    })
}
