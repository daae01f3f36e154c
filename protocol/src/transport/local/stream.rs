//! The two directions of a local stream.

use std::io::{self, IoSlice};
use std::iter;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, sendmsg, shutdown};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::StreamSocket;
use crate::codec::records::{END, RECORD_PREFIX_BYTES, Records};
use crate::transport::system_socket::watch;
use crate::transport::{StreamCode, TransportError};

/// Bytes received in one call while it is unknown what arrives: small messages arrive whole, and little of a large
/// one has to be copied again.
const RECEIVE_BYTES: usize = 16 * 1024;
/// How much later than the end of a stream its reason may arrive.
const REASON_DEADLINE: Duration = Duration::from_millis(100);
/// How long to wait for room when the system lacks the resources to watch for it.
const ROOM_PAUSE: Duration = Duration::from_millis(5);
/// Most pieces passed to the kernel in one call.
const PIECES_MAX: usize = 64;

/// The state shared by the two directions.
#[derive(Debug)]
struct Socket {
    fd: AsyncFd<OwnedFd>,
    /// The stream ends with this connection.
    connection: quinn::Connection,
    _permit: OwnedSemaphorePermit,
}

impl Socket {
    /// Yields from time to time, which a stream that never waits would not do otherwise; and fails once this side has
    /// closed the connection: bytes that still arrive do not count.
    async fn check(&self) -> Result<(), TransportError> {
        tokio::task::coop::consume_budget().await;
        match self.connection.close_reason() {
            Some(reason @ quinn::ConnectionError::LocallyClosed) => Err(reason.into()),
            _ => Ok(()),
        }
    }

    /// Returns why the stream has broken. A peer that closes the connection gives a reason, but its streams end
    /// before the reason arrives: it is awaited until `deadline`.
    async fn broken(&self, otherwise: TransportError, deadline: Instant) -> TransportError {
        let reason = tokio::time::timeout_at(deadline, self.connection.closed()).await;
        reason.map_or(otherwise, TransportError::from)
    }

    fn send<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> Result<usize, Errno> {
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        let mut count = 0;
        for (slot, part) in pieces.iter_mut().zip(parts.filter(|part| !part.is_empty())) {
            *slot = IoSlice::new(part);
            count += 1;
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut nothing = SendAncillaryBuffer::default();
        sendmsg(&self.fd, &pieces[..count], &mut nothing, flags)
    }

    /// Waits until the receiver has taken something. The socket is watched for room only during this wait, since the
    /// kernel would otherwise report room after each message.
    async fn room(&self) -> Result<(), TransportError> {
        let again = self.fd.get_ref().try_clone();
        let Ok(watched) = again.and_then(|again| watch(again, Interest::WRITABLE)) else {
            tokio::time::sleep(ROOM_PAUSE).await;
            return Ok(());
        };
        tokio::select! {
            biased;
            // Fails only when the runtime stops.
            _ = watched.writable() => Ok(()),
            reason = self.connection.closed() => Err(reason.into()),
        }
    }

    /// Ends one direction for both sides.
    fn shut_down(&self, direction: Shutdown) {
        // Fails only if it has ended already.
        let _ = shutdown(&self.fd, direction);
    }
}

impl StreamSocket {
    /// Both directions of a stream of `connection`. Must be called on its runtime.
    pub(in crate::transport) fn split(
        self,
        connection: quinn::Connection,
    ) -> Result<(LocalSender, LocalReceiver), TransportError> {
        let socket = Arc::new(Socket {
            fd: watch(self.fd, Interest::READABLE).map_err(super::lost)?,
            connection,
            _permit: self.permit,
        });
        let sender = LocalSender {
            socket: socket.clone(),
            finished: false,
        };
        let receiver = LocalReceiver {
            socket,
            records: Records::default(),
            arrived: Bytes::new(),
            broken_at: None,
        };
        Ok((sender, receiver))
    }
}

/// The sending direction. Unless it was finished, the receiver can tell from its end that something is missing.
#[derive(Debug)]
pub(in crate::transport) struct LocalSender {
    socket: Arc<Socket>,
    finished: bool,
}

impl LocalSender {
    /// Sends `head` and `data`, whose pieces are left empty.
    pub(in crate::transport) async fn write(
        &mut self,
        mut head: Bytes,
        data: &mut [Bytes],
    ) -> Result<(), TransportError> {
        self.socket.check().await?;
        let len = head.len() + data.iter().map(Bytes::len).sum::<usize>();
        if len == 0 {
            // A record without bytes would be taken for the end.
            return Ok(());
        }
        // The limits of frames and queues are far lower.
        let len = u32::try_from(len).map_err(|_| TransportError::StreamUnusable)?;
        let mut prefix = Bytes::copy_from_slice(&len.to_le_bytes());
        loop {
            let parts = [&prefix, &head].into_iter().chain(&*data);
            match self.socket.send(parts.map(|part| &part[..])) {
                Ok(mut sent) => {
                    for part in [&mut prefix, &mut head].into_iter().chain(&mut *data) {
                        let of_this = sent.min(part.len());
                        part.advance(of_this);
                        sent -= of_this;
                    }
                    if head.is_empty() && data.iter().all(Bytes::is_empty) {
                        return Ok(());
                    }
                }
                Err(Errno::AGAIN) => self.socket.room().await?,
                Err(Errno::INTR) => {}
                Err(_) => {
                    let code = StreamCode::CANCELLED;
                    let stopped = TransportError::StreamStopped { code };
                    let deadline = Instant::now() + REASON_DEADLINE;
                    return Err(self.socket.broken(stopped, deadline).await);
                }
            }
        }
    }

    /// Ends the stream for the receiver once there is room for the end marker; waits for room in the background for
    /// at most `deadline`.
    pub(in crate::transport) fn finish(&mut self, deadline: Duration) {
        let socket = self.socket.clone();
        let send_end = move || socket.send(iter::once(&END[..]));
        match send_end() {
            Ok(_) => self.finished = true,
            Err(Errno::AGAIN) => {
                self.finished = true;
                let mut later = Self {
                    socket: self.socket.clone(),
                    finished: false,
                };
                tokio::spawn(tokio::time::timeout(deadline, async move {
                    while !later.finished && later.socket.room().await.is_ok() {
                        match send_end() {
                            Ok(_) => later.finished = true,
                            Err(Errno::AGAIN) => {}
                            Err(_) => return,
                        }
                    }
                }));
            }
            // The receiver is gone, or will notice that something is missing.
            Err(_) => {}
        }
    }

    /// Ends the sending direction; without an end marker before it, the receiver knows that something is missing.
    pub(in crate::transport) fn reset(&mut self) {
        self.socket.shut_down(Shutdown::Write);
    }
}

impl Drop for LocalSender {
    fn drop(&mut self) {
        if !self.finished {
            self.reset();
        }
    }
}

/// The receiving direction. Dropping it asks the sender to stop.
#[derive(Debug)]
pub(in crate::transport) struct LocalReceiver {
    socket: Arc<Socket>,
    records: Records,
    /// Received and not taken yet.
    arrived: Bytes,
    /// When the end of the stream was first noticed.
    broken_at: Option<Instant>,
}

impl LocalReceiver {
    /// Receives at most `max_bytes` as they arrive, or returns `None` at the end. Cancellation-safe.
    pub(in crate::transport) async fn read_chunk(
        &mut self,
        max_bytes: usize,
    ) -> Result<Option<Bytes>, TransportError> {
        loop {
            if let Some(content) = self.records.next(&mut self.arrived, max_bytes) {
                return Ok(Some(content));
            }
            if self.records.ended() {
                return Ok(None);
            }
            let expected = self.records.remaining() + RECORD_PREFIX_BYTES;
            let capacity = expected.min(max_bytes).max(RECEIVE_BYTES);
            let mut arrived = Vec::new();
            self.receive(capacity, |fd| {
                // Allocated only now, because a stream may wait for a long time.
                let mut buffer = Vec::with_capacity(capacity);
                let into = spare_capacity(&mut buffer);
                let (received, _) = recv(fd, into, RecvFlags::DONTWAIT)?;
                arrived = buffer;
                Ok(received)
            })
            .await?;
            self.arrived = arrived.into();
        }
    }

    /// Receives some bytes into `buffer`, which is not empty, or returns `None` at the end. Cancellation-safe.
    pub(in crate::transport) async fn read(
        &mut self,
        buffer: &mut [u8],
    ) -> Result<Option<usize>, TransportError> {
        if self.arrived.is_empty() && self.records.remaining() > 0 {
            let len = buffer.len().min(self.records.remaining());
            let into = &mut buffer[..len];
            let received = self
                .receive(len, |fd| {
                    recv(fd, &mut *into, RecvFlags::DONTWAIT).map(|(received, _)| received)
                })
                .await?;
            self.records.taken(received);
            return Ok(Some(received));
        }
        let chunk = self.read_chunk(buffer.len()).await?;
        Ok(chunk.map(|chunk| {
            buffer[..chunk.len()].copy_from_slice(&chunk);
            chunk.len()
        }))
    }

    /// Receives at least one byte and at most `max_bytes`, calling `receive` again until something has arrived.
    async fn receive(
        &mut self,
        max_bytes: usize,
        mut receive: impl FnMut(&OwnedFd) -> Result<usize, Errno>,
    ) -> Result<usize, TransportError> {
        self.socket.check().await?;
        let broken_at = loop {
            if let Some(broken_at) = self.broken_at {
                break broken_at;
            }
            let mut ready = tokio::select! {
                biased;
                ready = self.socket.fd.readable() => ready.map_err(super::lost)?,
                reason = self.socket.connection.closed() => return Err(reason.into()),
            };
            match ready.try_io(|fd| Ok(receive(fd.get_ref())?)) {
                Ok(Ok(received @ 1..)) => {
                    if received < max_bytes {
                        // There was no more, so another attempt can be saved.
                        ready.clear_ready();
                    }
                    return Ok(received);
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) => self.broken_at = Some(Instant::now()),
                Err(_would_block) => {}
            }
        };
        let code = StreamCode::FAILED;
        let reset = TransportError::StreamReset { code };
        Err(self.socket.broken(reset, broken_at + REASON_DEADLINE).await)
    }
}

impl Drop for LocalReceiver {
    fn drop(&mut self) {
        if self.records.ended() {
            return;
        }
        self.socket.shut_down(Shutdown::Read);
        // A sender that waits for room is woken only by room; it then learns that the receiver is gone.
        let mut discarded = [0; RECEIVE_BYTES];
        while let Ok((1.., _)) = recv(&self.socket.fd, &mut discarded[..], RecvFlags::DONTWAIT) {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Door, Opener};
    use super::*;
    use crate::codec::StreamKind;
    use crate::transport::tests::{LONG, SHORT, network_pair};

    #[tokio::test]
    async fn the_end_of_a_full_stream_arrives_once_there_is_room() {
        let pair = network_pair().await;
        let door = Door::open().unwrap();
        let (offer, accepted) = door.offer();
        let sending = Opener::new(offer).open(StreamKind::Data).await.unwrap();
        let (_, receiving) = accepted.accept().await;
        let split = |end: StreamSocket| end.split(pair.client.quinn().clone()).unwrap();
        let ((mut sender, _back), (_there, mut receiver)) = (split(sending), split(receiving));

        let record = Bytes::from(vec![7; 100]);
        let mut sent_bytes = 0;
        // The kernel takes a message this small whole or not at all.
        let write = async |sender: &mut LocalSender| {
            tokio::time::timeout(SHORT, sender.write(record.clone(), &mut [])).await
        };
        while let Ok(written) = write(&mut sender).await {
            written.unwrap();
            sent_bytes += record.len();
        }
        sender.finish(LONG);
        drop(sender);
        let mut received_bytes = 0;
        let read = async |receiver: &mut LocalReceiver| {
            let piece = tokio::time::timeout(LONG, receiver.read_chunk(usize::MAX)).await;
            piece.unwrap().unwrap()
        };
        while let Some(piece) = read(&mut receiver).await {
            received_bytes += piece.len();
        }
        assert_eq!(received_bytes, sent_bytes);
    }
}
