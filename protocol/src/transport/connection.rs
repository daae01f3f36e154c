//! A connection between two parts that know each other's name.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use super::stream::{FrameReceiver, FrameSender};
use super::{CloseCode, TransportError, TransportOptions, within};
use crate::codec::{StreamKind, WireError};
use crate::identity::Peer;

/// A connection to a peer whose identity and version are verified. Cheap to clone; it closes when
/// the last clone and the last stream are gone.
#[derive(Clone, Debug)]
pub struct Connection {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    quinn: quinn::Connection,
    peer: Peer,
    send_deadline: Duration,
    handshake_deadline: Duration,
    /// A stream whose kind is still to be read, so that a cancelled accept loses none.
    half_accepted: Mutex<Option<(quinn::SendStream, quinn::RecvStream)>>,
}

impl Connection {
    pub(crate) fn new(quinn: quinn::Connection, peer: Peer, options: &TransportOptions) -> Self {
        Self {
            inner: Arc::new(Inner {
                quinn,
                peer,
                send_deadline: options.send_deadline,
                handshake_deadline: options.handshake_deadline,
                half_accepted: Mutex::new(None),
            }),
        }
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &Peer {
        &self.inner.peer
    }

    /// Where the other end is.
    pub fn remote_addr(&self) -> SocketAddr {
        self.inner.quinn.remote_address()
    }

    /// Opens a stream. The peer learns of it with the first frame that is sent on it, so this
    /// costs no round trip.
    ///
    /// # Errors
    /// [`TransportError::Deadline`] while the peer already has as many streams as it allows, and
    /// whatever broke the connection.
    pub async fn open_stream(
        &self,
        kind: StreamKind,
    ) -> Result<(FrameSender, FrameReceiver), TransportError> {
        let deadline = self.inner.send_deadline;
        let (sender, receiver) =
            within(deadline, "opening a stream", self.inner.quinn.open_bi()).await?;
        Ok((
            FrameSender::new(sender, Some(kind), deadline),
            FrameReceiver::new(receiver),
        ))
    }

    /// The next stream that the peer opens. Cancellation-safe.
    ///
    /// # Errors
    /// Whatever ended the connection; a stream of unknown kind ends it too.
    pub async fn accept_stream(
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
            // One byte is either read or not, so this may be cancelled and repeated.
            let mut kind = [0];
            let what = "the kind of a stream";
            let read = within(inner.handshake_deadline, what, receiver.read(&mut kind)).await;
            let stream = slot.take();
            // A stream that its opener gave up before it said a word is of no interest.
            if let (Ok(Some(_)), Some((sender, receiver))) = (read, stream) {
                let kind = StreamKind::decode(kind[0]).map_err(|error| self.violation(error))?;
                let sender = FrameSender::new(sender, None, inner.send_deadline);
                return Ok((kind, sender, FrameReceiver::new(receiver)));
            }
        }
    }

    /// Closes the connection because of what the peer sent.
    pub(crate) fn violation(&self, error: WireError) -> TransportError {
        self.close(CloseCode::PROTOCOL_VIOLATION, &error.to_string());
        error.into()
    }

    /// Closes the connection at once: streams break, and the peer is told `code` and `reason`.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.inner.quinn.close(code.0.into(), reason.as_bytes());
    }

    /// Waits until the connection is closed or lost and says why.
    pub async fn closed(&self) -> TransportError {
        self.inner.quinn.closed().await.into()
    }

    /// Whether the connection is closed or lost.
    pub fn is_closed(&self) -> bool {
        self.inner.quinn.close_reason().is_some()
    }

    /// Why the connection is over, or that this side ended it.
    pub(crate) fn close_reason(&self) -> TransportError {
        let reason = self.inner.quinn.close_reason();
        reason.map_or(TransportError::Closed, TransportError::from)
    }

    /// The round trip as measured last.
    pub fn round_trip(&self) -> Duration {
        self.inner.quinn.rtt()
    }

    /// Largest packet that the path carries in bytes, as found so far.
    pub fn path_mtu_bytes(&self) -> u16 {
        self.inner.quinn.stats().path.current_mtu
    }

    /// Packets that were lost on the way so far.
    pub fn packets_lost(&self) -> u64 {
        self.inner.quinn.stats().path.lost_packets
    }
}
