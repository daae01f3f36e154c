//! The client side of requests.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

use super::outgoing::{Counted, Outgoing};
use super::{CALLS_IN_FLIGHT_MAX, QUEUED_BYTES_MAX, RequestFrame, ServerFrame};
use crate::codec::{self, FrameDecoder, StreamKind, WireError};
use crate::request_id::RequestId;
use crate::transport::{CloseCode, Connection, FrameReceiver, RpcError, TransportError};
use crate::version::Versioned;

/// Calls the server at the other end of a connection; many calls may be in flight. Cheap to clone. When the last
/// clone is dropped, the stream is finished and calls end.
pub struct RpcClient<Req, Resp, Notice> {
    inner: Arc<Inner<Resp>>,
    types: PhantomData<fn(Req) -> Notice>,
}

struct Inner<Resp> {
    connection: Connection,
    shared: Arc<Shared<Resp>>,
    reader: JoinHandle<()>,
}

struct Shared<Resp> {
    outgoing: Arc<Outgoing>,
    calls: Mutex<Calls<Resp>>,
    /// One permit for each further call.
    in_flight: Semaphore,
    /// One permit for each further byte that may wait to be written.
    queueable_bytes: Semaphore,
}

struct Calls<Resp> {
    waiting: FxHashMap<u64, oneshot::Sender<Result<Resp, RpcError>>>,
    next_id: u64,
    /// Why no more answers can arrive.
    lost: Option<String>,
}

impl<Req, Resp, Notice> RpcClient<Req, Resp, Notice>
where
    Req: Serialize + Versioned,
    Resp: DeserializeOwned + Send + 'static,
    Notice: DeserializeOwned + Send + 'static,
{
    /// Opens the request stream of `connection`. Notices go to `notices`; if it is full, the connection is closed
    /// ([`CloseCode::TOO_SLOW`]), because waiting would hold up answers, perhaps the very ones that the consumer of
    /// notices waits for. If its receiver is dropped, notices are ignored.
    ///
    /// # Errors
    /// As [`Connection::open_stream`].
    pub async fn start(
        connection: Connection,
        notices: mpsc::Sender<Notice>,
    ) -> Result<Self, TransportError> {
        Self::start_observed(connection, notices, |_| {}).await
    }

    /// Does the same as [`RpcClient::start`], and calls `observe` with each notice before it delivers any answer that
    /// the server sent after the notice; `observe` must not block.
    ///
    /// # Errors
    /// As [`RpcClient::start`].
    pub async fn start_observed(
        connection: Connection,
        notices: mpsc::Sender<Notice>,
        observe: impl FnMut(&Notice) + Send + 'static,
    ) -> Result<Self, TransportError> {
        let (mut sender, receiver) = connection.open_stream(StreamKind::Rpc).await?;
        sender.announce().await?;
        let shared = Arc::new(Shared {
            outgoing: Outgoing::new(),
            calls: Mutex::new(Calls {
                waiting: FxHashMap::default(),
                next_id: 0,
                lost: None,
            }),
            in_flight: Semaphore::new(CALLS_IN_FLIGHT_MAX),
            queueable_bytes: Semaphore::new(QUEUED_BYTES_MAX),
        });
        tokio::spawn({
            let (shared, connection) = (shared.clone(), connection.clone());
            async move {
                let written = &shared.queueable_bytes;
                if let Err(error) = shared.outgoing.write_to(sender, &connection, written).await {
                    shared.fail_all(&error.to_string());
                }
            }
        });
        let reader = tokio::spawn({
            let (shared, connection) = (shared.clone(), connection.clone());
            async move {
                let error = read(&shared, &connection, receiver, notices, observe).await;
                shared.fail_all(&error.to_string());
            }
        });
        Ok(Self {
            inner: Arc::new(Inner {
                connection,
                shared,
                reader,
            }),
            types: PhantomData,
        })
    }

    /// Sends a request and waits for its answer, for at most `deadline` in total. If the call is cancelled, an answer
    /// that still arrives is ignored.
    ///
    /// # Errors
    /// [`RpcError`]; immediately if the connection is lost, or if its version lacks the request.
    pub async fn call(&self, request: &Req, deadline: Duration) -> Result<Resp, RpcError> {
        let spoken = self.inner.connection.version();
        codec::check_spoken(request, spoken).map_err(RpcError::Encode)?;
        match tokio::time::timeout(deadline, self.inner.shared.call(request)).await {
            Ok(result) => result,
            Err(_) => Err(RpcError::Deadline { deadline }),
        }
    }
}

impl<Req, Resp, Notice> RpcClient<Req, Resp, Notice> {
    /// The connection under the calls.
    pub fn connection(&self) -> &Connection {
        &self.inner.connection
    }

    /// Whether calls can no longer succeed.
    pub fn is_closed(&self) -> bool {
        self.inner.shared.calls.lock().lost.is_some()
    }
}

impl<Req, Resp, Notice> Clone for RpcClient<Req, Resp, Notice> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            types: PhantomData,
        }
    }
}

impl<Req, Resp, Notice> std::fmt::Debug for RpcClient<Req, Resp, Notice> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RpcClient")
            .field("peer", self.inner.connection.peer())
            .finish_non_exhaustive()
    }
}

impl<Resp> Drop for Inner<Resp> {
    fn drop(&mut self) {
        self.shared.outgoing.close();
        self.reader.abort();
    }
}

impl<Resp> Shared<Resp> {
    async fn call<Req: Serialize>(&self, request: &Req) -> Result<Resp, RpcError> {
        let _permit = self.in_flight.acquire().await.map_err(|_| self.lost())?;
        let (id, answer) = self.register()?;
        // However the call ends, its entry is removed.
        let _entry = Entry { shared: self, id };
        let mut frame = Vec::with_capacity(256);
        let message = RequestFrame {
            id,
            body: request,
            request: RequestId::current(),
        };
        codec::encode_frame(&mut frame, &message, 0).map_err(RpcError::Encode)?;
        // A frame's length fits: the header limit bounds it.
        let bytes = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        self.queueable_bytes
            .acquire_many(bytes)
            .await
            .map_err(|_| self.lost())?
            .forget();
        self.outgoing
            .push_encoded(&frame, Counted::Permits(frame.len()));
        match answer.await {
            Ok(result) => result,
            Err(_) => Err(self.lost()),
        }
    }

    fn register(&self) -> Result<(u64, oneshot::Receiver<Result<Resp, RpcError>>), RpcError> {
        let mut calls = self.calls.lock();
        if let Some(reason) = &calls.lost {
            return Err(RpcError::ConnectionLost {
                reason: reason.clone(),
            });
        }
        let id = calls.next_id;
        calls.next_id += 1;
        let (sender, receiver) = oneshot::channel();
        calls.waiting.insert(id, sender);
        Ok((id, receiver))
    }

    fn answer(&self, id: u64, result: Result<Resp, RpcError>) {
        // Without an entry, the call was cancelled or its deadline has expired.
        if let Some(sender) = self.calls.lock().waiting.remove(&id) {
            let _ = sender.send(result);
        }
    }

    fn fail_all(&self, reason: &str) {
        let waiting = {
            let mut calls = self.calls.lock();
            calls.lost.get_or_insert_with(|| reason.to_owned());
            std::mem::take(&mut calls.waiting)
        };
        self.in_flight.close();
        self.queueable_bytes.close();
        for sender in waiting.into_values() {
            // Fails only if the call has just been cancelled.
            let _ = sender.send(Err(RpcError::ConnectionLost {
                reason: reason.to_owned(),
            }));
        }
    }

    fn lost(&self) -> RpcError {
        let reason = self.calls.lock().lost.clone();
        RpcError::ConnectionLost {
            reason: reason.unwrap_or_else(|| "the client was stopped".to_owned()),
        }
    }
}

struct Entry<'a, Resp> {
    shared: &'a Shared<Resp>,
    id: u64,
}

impl<Resp> Drop for Entry<'_, Resp> {
    fn drop(&mut self) {
        self.shared.calls.lock().waiting.remove(&self.id);
    }
}

/// Delivers answers and notices until the stream ends; returns the reason for its end.
async fn read<Resp: DeserializeOwned, Notice: DeserializeOwned>(
    shared: &Shared<Resp>,
    connection: &Connection,
    mut receiver: FrameReceiver,
    notices: mpsc::Sender<Notice>,
    mut observe: impl FnMut(&Notice),
) -> TransportError {
    let mut decoder = FrameDecoder::new();
    loop {
        match receiver.read_bytes().await {
            Ok(Some(bytes)) => decoder.push(bytes),
            Ok(None) if decoder.is_at_boundary() => {
                return TransportError::Lost {
                    reason: "the server ended the request stream".to_owned(),
                };
            }
            Ok(None) => return connection.violation(WireError::Truncated { missing_bytes: 1 }),
            Err(error) => return error,
        }
        loop {
            match decoder.next_frame::<ServerFrame<Resp, Notice>>() {
                Ok(Some(ServerFrame::Response { id, body })) => shared.answer(id, Ok(body)),
                Ok(Some(ServerFrame::Abandoned { id })) => {
                    shared.answer(id, Err(RpcError::Abandoned));
                }
                Ok(Some(ServerFrame::Notice(notice))) => {
                    observe(&notice);
                    if let Err(mpsc::error::TrySendError::Full(_)) = notices.try_send(notice) {
                        connection.close(CloseCode::TOO_SLOW, "notices are not taken");
                        return TransportError::Closed;
                    }
                }
                Ok(None) => break,
                Err(error) => return connection.violation(error),
            }
        }
    }
}
