//! A connection between two parts that have authenticated each other.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use super::local::{LocalStreams, StreamSocket};
use super::stream::{FrameReceiver, FrameSender, ReceivingWay, SendingWay};
use super::{CloseCode, TransportError, TransportOptions, within};
use crate::codec::{Hello, StreamKind, WireError};
use crate::identity::Peer;
use crate::version::{Release, Version, Versions};

/// A connection to a peer whose identity and version are verified. Cheap to clone; it closes when the last clone and
/// the last stream are dropped.
#[derive(Clone, Debug)]
pub struct Connection {
    inner: Arc<Inner>,
}

/// The result of the exchange of hellos.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed {
    pub(super) spoken: Version,
    /// The other side's.
    pub(super) hello: Hello,
}

#[derive(Debug)]
struct Inner {
    quinn: quinn::Connection,
    peer: Peer,
    spoken: Version,
    hello: Hello,
    send_deadline: Duration,
    handshake_deadline: Duration,
    /// A stream whose kind is still to be read, kept here so that a cancelled accept does not lose it.
    half_accepted: Mutex<Option<(quinn::SendStream, quinn::RecvStream)>>,
    /// Streams that bypass the network.
    local: LocalStreams,
}

impl Connection {
    pub(super) fn new(
        quinn: quinn::Connection,
        peer: Peer,
        Agreed { spoken, hello }: Agreed,
        options: &TransportOptions,
        local: LocalStreams,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                quinn,
                peer,
                spoken,
                hello,
                send_deadline: options.send_deadline,
                handshake_deadline: options.handshake_deadline,
                half_accepted: Mutex::new(None),
                local,
            }),
        }
    }

    /// The peer at the other end.
    pub fn peer(&self) -> &Peer {
        &self.inner.peer
    }

    /// The version that both sides speak on this connection.
    pub fn version(&self) -> Version {
        self.inner.spoken
    }

    /// The versions that the other side has.
    pub fn peer_versions(&self) -> Versions {
        self.inner.hello.versions
    }

    /// The release that the other side reports.
    pub fn peer_release(&self) -> Release {
        self.inner.hello.release
    }

    /// The address of the other end.
    pub fn remote_addr(&self) -> SocketAddr {
        self.inner.quinn.remote_address()
    }

    /// Opens a stream. Over the network, the peer learns of it with the first frame, so this costs no round trip; to
    /// a peer on the same host it costs one, at its door.
    ///
    /// # Errors
    /// [`TransportError::Deadline`] while the peer already has as many streams as it allows, or whatever broke the
    /// connection.
    pub async fn open_stream(
        &self,
        kind: StreamKind,
    ) -> Result<(FrameSender, FrameReceiver), TransportError> {
        let inner = &self.inner;
        if let LocalStreams::Opened(opener) = &inner.local {
            if self.is_closed() {
                return Err(self.close_reason());
            }
            match opener
                .open(kind)
                .await
                .and_then(|stream| self.local(stream))
            {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    let peer = self.peer();
                    tracing::debug!(%peer, %error, "a stream goes over the network");
                }
            }
        }
        let deadline = inner.send_deadline;
        let (sender, receiver) =
            within(deadline, "opening a stream", inner.quinn.open_bi()).await?;
        Ok((
            FrameSender::new(
                SendingWay::Remote(sender),
                inner.spoken,
                Some(kind),
                deadline,
            ),
            FrameReceiver::new(ReceivingWay::Remote(receiver)),
        ))
    }

    fn local(&self, stream: StreamSocket) -> Result<(FrameSender, FrameReceiver), TransportError> {
        let inner = &self.inner;
        let (sender, receiver) = stream.split(inner.quinn.clone())?;
        Ok((
            FrameSender::new(
                SendingWay::Local(sender),
                inner.spoken,
                None,
                inner.send_deadline,
            ),
            FrameReceiver::new(ReceivingWay::Local(receiver)),
        ))
    }

    /// The next stream that the peer opens. Cancellation-safe.
    ///
    /// # Errors
    /// Whatever ended the connection; a stream of unknown kind ends it too.
    pub async fn accept_stream(
        &self,
    ) -> Result<(StreamKind, FrameSender, FrameReceiver), TransportError> {
        tokio::select! {
            biased;
            accepted = self.accept_remote() => accepted,
            accepted = self.accept_local() => accepted,
        }
    }

    async fn accept_local(
        &self,
    ) -> Result<(StreamKind, FrameSender, FrameReceiver), TransportError> {
        loop {
            let (kind, stream) = self.inner.local.accept().await;
            // If a system resource is lacking, the stream is dropped, and the peer sees it end.
            if let Ok((sender, receiver)) = self.local(stream) {
                return Ok((kind, sender, receiver));
            }
        }
    }

    async fn accept_remote(
        &self,
    ) -> Result<(StreamKind, FrameSender, FrameReceiver), TransportError> {
        let inner = &self.inner;
        let mut slot = inner.half_accepted.lock().await;
        loop {
            if slot.is_none() {
                *slot = Some(inner.quinn.accept_bi().await?);
            }
            let Some((_, receiver)) = slot.as_mut() else {
                // The slot was filled above, under the same lock.
                return Err(TransportError::StreamUnusable);
            };
            // One byte is either read or not, so this can be cancelled and repeated.
            let mut kind = [0];
            let what = "the kind of a stream";
            let read = within(inner.handshake_deadline, what, receiver.read(&mut kind)).await;
            let stream = slot.take();
            // A stream that its opener abandoned before sending anything is ignored.
            if let (Ok(Some(_)), Some((sender, receiver))) = (read, stream) {
                let kind = StreamKind::decode(kind[0]).map_err(|error| self.violation(error))?;
                let sender = SendingWay::Remote(sender);
                let sender = FrameSender::new(sender, inner.spoken, None, inner.send_deadline);
                let receiver = FrameReceiver::new(ReceivingWay::Remote(receiver));
                return Ok((kind, sender, receiver));
            }
        }
    }

    /// Closes the connection because the peer violated the protocol.
    pub(crate) fn violation(&self, error: WireError) -> TransportError {
        self.close(CloseCode::PROTOCOL_VIOLATION, &error.to_string());
        error.into()
    }

    /// Closes the connection immediately: streams break, and the peer gets `code` and `reason`.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.inner.quinn.close(code.0.into(), reason.as_bytes());
    }

    /// Waits until the connection is closed or lost, and returns the reason.
    pub async fn closed(&self) -> TransportError {
        self.inner.quinn.closed().await.into()
    }

    /// Whether the connection is closed or lost.
    pub fn is_closed(&self) -> bool {
        self.inner.quinn.close_reason().is_some()
    }

    /// Returns why the connection is over, or that this side ended it.
    pub(crate) fn close_reason(&self) -> TransportError {
        let reason = self.inner.quinn.close_reason();
        reason.map_or(TransportError::Closed, TransportError::from)
    }

    #[cfg(test)]
    pub(super) fn quinn(&self) -> &quinn::Connection {
        &self.inner.quinn
    }

    /// Whether streams that this side opens bypass the network.
    #[cfg(test)]
    pub(super) fn opens_local_streams(&self) -> bool {
        matches!(self.inner.local, LocalStreams::Opened(_))
    }

    /// Largest packet in bytes that the path is known to carry so far.
    pub fn path_mtu_bytes(&self) -> u16 {
        self.inner.quinn.stats().path.current_mtu
    }

    /// Packets lost on the way so far.
    pub fn packets_lost(&self) -> u64 {
        self.inner.quinn.stats().path.lost_packets
    }
}
