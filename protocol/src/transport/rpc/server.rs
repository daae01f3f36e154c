//! The server side of requests.

use std::marker::PhantomData;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::outgoing::{Counted, Fill, Outgoing, Producer};
use super::{
    CALLS_IN_FLIGHT_MAX, NOTICES_QUEUED_MAX, QUEUED_BYTES_MAX, RequestFrame, ServerFrame,
    UNREAD_BYTES_MAX,
};
use crate::codec::{self, FrameDecoder, WireError};
use crate::request_id::RequestId;
use crate::transport::{CloseCode, Connection, FrameReceiver, FrameSender, TransportError};
use crate::version::Versioned;

/// Receives the requests of one connection's request stream.
pub struct RpcServer<Req, Resp, Notice> {
    link: Arc<Link>,
    receiver: FrameReceiver,
    decoder: FrameDecoder,
    types: PhantomData<fn(Resp, Notice) -> Req>,
}

/// The state that a server, its responders and its notice senders share.
#[derive(Debug)]
struct Link {
    producer: Producer,
    connection: Connection,
    /// One permit for each further request that may be accepted before answers are written.
    unanswered: Arc<Semaphore>,
}

impl<Req, Resp, Notice> RpcServer<Req, Resp, Notice>
where
    Req: DeserializeOwned,
    Resp: Serialize + Versioned,
    Notice: Serialize + Versioned,
{
    /// Serves a stream of the kind [`crate::codec::StreamKind::Rpc`] that
    /// [`Connection::accept_stream`] returned.
    pub fn start(connection: Connection, sender: FrameSender, receiver: FrameReceiver) -> Self {
        let outgoing = Outgoing::new();
        let unanswered = Arc::new(Semaphore::new(CALLS_IN_FLIGHT_MAX));
        tokio::spawn({
            let (outgoing, unanswered) = (outgoing.clone(), unanswered.clone());
            let connection = connection.clone();
            async move {
                // The connection reports its own end, and requests end with it.
                let _ = outgoing.write_to(sender, &connection, &unanswered).await;
            }
        });
        Self {
            link: Arc::new(Link {
                producer: Producer(outgoing),
                connection,
                unanswered,
            }),
            receiver,
            decoder: FrameDecoder::new(),
            types: PhantomData,
        }
    }

    /// Returns the next request; `None` once the client has finished its stream. While [`CALLS_IN_FLIGHT_MAX`]
    /// requests are unanswered or [`QUEUED_BYTES_MAX`] bytes of answers are unwritten, nothing is read, so that the
    /// client has to wait. Cancellation-safe.
    ///
    /// # Errors
    /// Whatever ended the connection. A malformed request ends it.
    pub async fn next(&mut self) -> Result<Option<(Req, Responder<Resp>)>, TransportError> {
        let outgoing = &self.link.producer.0;
        outgoing.wait_below(QUEUED_BYTES_MAX).await;
        // Fails once nothing can be written any more.
        let Ok(permit) = self.link.unanswered.clone().acquire_owned().await else {
            return Err(self.link.connection.close_reason());
        };
        loop {
            match self.decoder.next_frame::<RequestFrame<Req>>() {
                Ok(Some(RequestFrame { id, body, request })) => {
                    let responder = Responder {
                        request,
                        pending: Some(Pending {
                            link: self.link.clone(),
                            id,
                            permit,
                        }),
                        types: PhantomData,
                    };
                    return Ok(Some((body, responder)));
                }
                Ok(None) => {}
                Err(error) => return Err(self.link.connection.violation(error)),
            }
            match self.receiver.read_bytes().await? {
                Some(bytes) => self.decoder.push(bytes),
                None if self.decoder.is_at_boundary() => return Ok(None),
                None => {
                    let error = WireError::Truncated { missing_bytes: 1 };
                    return Err(self.link.connection.violation(error));
                }
            }
        }
    }

    /// Returns a sender that pushes notices to this client.
    pub fn notice_sender(&self) -> NoticeSender<Notice> {
        NoticeSender {
            link: self.link.clone(),
            types: PhantomData,
        }
    }

    /// The connection under the stream.
    pub fn connection(&self) -> &Connection {
        &self.link.connection
    }
}

impl Link {
    /// Queues a frame, and disconnects the client if it does not read.
    fn push<M: Serialize>(&self, message: &M, counted: Counted) -> Result<(), WireError> {
        let Fill { bytes, notices } = self.producer.0.push(message, counted)?;
        if bytes > UNREAD_BYTES_MAX || notices > NOTICES_QUEUED_MAX {
            let reason = "answers or notices are not read";
            self.connection.close(CloseCode::TOO_SLOW, reason);
        }
        Ok(())
    }
}

/// Answers one request, from any thread or task. If it is dropped, the client is notified that no answer will come.
pub struct Responder<Resp> {
    request: RequestId,
    pending: Option<Pending>,
    types: PhantomData<fn(Resp)>,
}

struct Pending {
    link: Arc<Link>,
    id: u64,
    permit: OwnedSemaphorePermit,
}

impl<Resp> Responder<Resp> {
    /// Returns the id of the request for which the client made it.
    #[must_use]
    pub fn request_id(&self) -> RequestId {
        self.request
    }
}

impl<Resp: Serialize + Versioned> Responder<Resp> {
    /// Queues the answer; never waits. If the connection is lost, so is the answer. An answer over the limit of a
    /// frame, or one that the client's version does not have, is a mistake of the caller: it is logged, and the
    /// client is notified that there is no answer.
    pub fn send(mut self, response: &Resp) {
        if let Some(pending) = self.pending.take() {
            let spoken = pending.link.connection.version();
            if let Err(error) = codec::check_spoken(response, spoken) {
                return match response.older() {
                    Some(older) => {
                        self.pending = Some(pending);
                        self.send(&older);
                    }
                    None => {
                        tracing::error!(%error, "an answer cannot be sent");
                        pending.abandon();
                    }
                };
            }
            let frame: ServerFrame<&Resp, ()> = ServerFrame::Response {
                id: pending.id,
                body: response,
            };
            if let Err((pending, error)) = pending.send(&frame) {
                tracing::error!(%error, "an answer cannot be sent");
                pending.abandon();
            }
        }
    }
}

impl<Resp> Drop for Responder<Resp> {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            pending.abandon();
        }
    }
}

impl Pending {
    fn send<Resp: Serialize>(self, frame: &ServerFrame<Resp, ()>) -> Result<(), (Self, WireError)> {
        match self.link.push(frame, Counted::Permits(1)) {
            Ok(()) => {
                // It is returned when the answer is written.
                self.permit.forget();
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    fn abandon(self) {
        let frame: ServerFrame<(), ()> = ServerFrame::Abandoned { id: self.id };
        // A frame of a few bytes can always be encoded.
        let _ = self.send(&frame);
    }
}

/// Pushes notices to one client. Cheap to clone, usable from any thread or task.
pub struct NoticeSender<Notice> {
    link: Arc<Link>,
    types: PhantomData<fn(Notice)>,
}

impl<Notice: Serialize + Versioned> NoticeSender<Notice> {
    /// Queues a notice; never waits. A client with more than [`NOTICES_QUEUED_MAX`] queued notices is disconnected.
    ///
    /// # Errors
    /// [`TransportError::Closed`] if the connection is lost, [`TransportError::Wire`] if the notice is over the limit
    /// of a frame, or newer than the version of the connection.
    pub fn send(&self, notice: &Notice) -> Result<(), TransportError> {
        if self.link.connection.is_closed() {
            return Err(TransportError::Closed);
        }
        codec::check_spoken(notice, self.link.connection.version())?;
        let frame: ServerFrame<(), &Notice> = ServerFrame::Notice(notice);
        self.link.push(&frame, Counted::Notice)?;
        Ok(())
    }
}

impl<Notice> Clone for NoticeSender<Notice> {
    fn clone(&self) -> Self {
        Self {
            link: self.link.clone(),
            types: PhantomData,
        }
    }
}
