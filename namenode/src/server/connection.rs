//! One connection: reads requests and hands them to the owner, which answers them.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{
    CloseCode, Connection, ConnectionCounts, Incoming, NoticeSender, RpcServer, TransportError,
};
use harvestfs_protocol::watch;
use tokio::sync::mpsc;

use super::metrics::{RequestMetrics, Responder};
use super::sessions::ConnectionId;
use crate::consensus::{Running, Service};

/// How long a connection may take to open its request stream.
const FIRST_STREAM_DEADLINE: Duration = Duration::from_secs(10);

/// What a connection sends the owner.
pub(crate) enum Event {
    /// A peer has connected.
    Connected {
        /// Its number.
        connection: ConnectionId,
        /// Its identity.
        peer: Peer,
        /// The address that it connected from.
        ip: IpAddr,
        /// Release and versions of its software.
        running: Running,
        /// How to notify it without a request.
        notices: NoticeSender<Notice>,
    },
    /// A request.
    Request {
        /// The connection that sent it.
        connection: ConnectionId,
        /// The request.
        request: Request,
        /// How to answer.
        responder: Responder,
    },
    /// The connection has ended.
    Disconnected {
        /// The connection that ended.
        connection: ConnectionId,
    },
}

/// The handles with which connections are served.
#[derive(Clone)]
pub(crate) struct Served {
    /// To the owner of the engine.
    pub events: mpsc::Sender<Event>,
    /// Answers other namenodes.
    pub service: Service,
    /// When its sender is dropped, peers other than namenodes get no more answers.
    pub let_go: watch::Receiver<()>,
    /// When its sender is dropped, other namenodes get none, either.
    pub ended: watch::Receiver<()>,
}

/// Serves a connection until it ends.
pub(crate) async fn serve(
    id: ConnectionId,
    incoming: Incoming,
    counts: &ConnectionCounts,
    served: Served,
    metrics: &Arc<RequestMetrics>,
) {
    let remote = incoming.remote_addr();
    let connection = match incoming.establish().await {
        Ok(connection) => connection,
        Err(error) => {
            tracing::info!(%remote, %error, "a connection was not established");
            return;
        }
    };
    let Some(_counted) = counts.count(&connection) else {
        return;
    };
    let peer = connection.peer().clone();
    let mut server = match request_stream(connection).await {
        Ok(server) => server,
        Err(error) => {
            tracing::info!(%remote, %peer, %error, "no request stream was opened");
            return;
        }
    };
    tracing::debug!(%remote, %peer, connection = id, "connected");
    let connected = Event::Connected {
        connection: id,
        peer: peer.clone(),
        ip: remote.ip().to_canonical(),
        running: Running {
            release: server.connection().peer_release(),
            versions: server.connection().peer_versions(),
        },
        notices: server.notice_sender(),
    };
    // Sending fails only once the owner has ended, when the namenode stops: then there is nothing to report.
    if peer.role == Role::Namenode {
        if let Err(error) = serve_member(&mut server, served, metrics).await {
            tracing::debug!(%remote, %peer, %error, "another namenode disconnected");
        }
        return;
    }
    let events = served.events;
    if events.send(connected).await.is_err() {
        return;
    }
    let mut let_go = served.let_go;
    let ended = tokio::select! {
        biased;
        _ = let_go.changed() => Err(TransportError::Closed),
        ended = forward(id, peer.role, &mut server, &events, metrics) => ended,
    };
    match ended {
        Ok(()) | Err(TransportError::ClosedByPeer { .. } | TransportError::Closed) => {
            tracing::debug!(%remote, %peer, connection = id, "disconnected");
        }
        Err(error) => tracing::info!(%remote, %peer, connection = id, %error, "connection lost"),
    }
    let _ = events.send(Event::Disconnected { connection: id }).await;
}

async fn request_stream(
    connection: Connection,
) -> Result<RpcServer<Request, Response, Notice>, TransportError> {
    let accepted = tokio::time::timeout(FIRST_STREAM_DEADLINE, connection.accept_stream()).await;
    match accepted {
        Ok(Ok((StreamKind::Rpc, sender, receiver))) => {
            Ok(RpcServer::start(connection, sender, receiver))
        }
        Ok(Ok((StreamKind::Data, ..))) => {
            let reason = "a namenode has no block data";
            connection.close(CloseCode::PROTOCOL_VIOLATION, reason);
            Err(TransportError::Closed)
        }
        Ok(Err(error)) => Err(error),
        Err(_) => {
            connection.close(CloseCode::TOO_SLOW, "no request stream was opened");
            Err(TransportError::Deadline {
                what: "opening the request stream",
                deadline: FIRST_STREAM_DEADLINE,
            })
        }
    }
}

async fn forward(
    id: ConnectionId,
    role: Role,
    server: &mut RpcServer<Request, Response, Notice>,
    events: &mpsc::Sender<Event>,
    metrics: &Arc<RequestMetrics>,
) -> Result<(), TransportError> {
    while let Some((request, responder)) = server.next().await? {
        let responder = Responder::new(&request, responder, metrics);
        if matches!(request, Request::KeepAlive) && planted::is(Bug::AnswersKeepAlivesUnasked) {
            responder.send(&Ok(Reply::Done));
            continue;
        }
        if matches!(request, Request::Peer(_)) {
            // Whatever the role of this namenode in its group: votes or entries from other peers are not even looked
            // at.
            let what = format!("a {role} may not make requests of namenodes");
            responder.send(&Err(FsError::RoleDenied(what)));
            continue;
        }
        let event = Event::Request {
            connection: id,
            request,
            responder,
        };
        if events.send(event).await.is_err() {
            return Err(TransportError::Closed);
        }
    }
    Ok(())
}

/// Answers another namenode of the group.
async fn serve_member(
    server: &mut RpcServer<Request, Response, Notice>,
    mut served: Served,
    metrics: &Arc<RequestMetrics>,
) -> Result<(), TransportError> {
    loop {
        let next = tokio::select! {
            biased;
            _ = served.ended.changed() => return Err(TransportError::Closed),
            next = server.next() => next?,
        };
        let Some((request, responder)) = next else {
            return Ok(());
        };
        let responder = Responder::new(&request, responder, metrics);
        let Request::Peer(request) = request else {
            let what = "a namenode asks others only for consensus".to_owned();
            responder.send(&Err(FsError::RoleDenied(what)));
            continue;
        };
        // In tasks of their own, so that votes do not wait for entries on their way to the disk.
        let service = served.service.clone();
        let versions = server.connection().peer_versions();
        tokio::spawn(async move {
            let answer = match service.check_versions(versions) {
                Ok(()) => service.answer(request).await,
                Err(error) => Err(error),
            };
            responder.send(&answer.map(Reply::Peer));
        });
    }
}
