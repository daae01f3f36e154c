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

use super::records::{END, RECORD_PREFIX_BYTES};
use super::{Records, StreamSocket};
use crate::transport::system_socket::watch;
use crate::transport::{StreamCode, TransportError};

/// Bytes received at once while it is not known what comes: small messages come whole, and little of
/// a large one has to be copied again.
const RECEIVE_BYTES: usize = 16 * 1024;
/// How much later than the end of a stream the reason may come.
const REASON_DEADLINE: Duration = Duration::from_millis(100);
/// Most pieces handed to the kernel at once.
const PIECES_MAX: usize = 64;

/// What the two directions share.
#[derive(Debug)]
struct Socket {
    fd: AsyncFd<OwnedFd>,
    /// The stream ends with it.
    connection: quinn::Connection,
    _permit: OwnedSemaphorePermit,
}

impl Socket {
    /// Why nothing comes or goes any more. A peer that closes the connection says why, but its streams
    /// end earlier than that gets here.
    async fn broken(&self, otherwise: TransportError) -> TransportError {
        let reason = tokio::time::timeout(REASON_DEADLINE, self.connection.closed()).await;
        reason.map_or(otherwise, TransportError::from)
    }

    async fn stopped(&self) -> TransportError {
        let code = StreamCode::CANCELLED;
        self.broken(TransportError::StreamStopped { code }).await
    }

    async fn reset(&self) -> TransportError {
        let code = StreamCode::FAILED;
        self.broken(TransportError::StreamReset { code }).await
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

    /// Waits until the receiver has taken something. The socket is watched for that only meanwhile, as
    /// the kernel would tell of room after each message.
    async fn room(&self) -> Result<(), TransportError> {
        let again = self.fd.get_ref().try_clone();
        let watched = again.and_then(|again| watch(again, Interest::WRITABLE));
        let watched = watched.map_err(unwatched)?;
        tokio::select! {
            room = watched.writable() => room.map(drop).map_err(unwatched),
            reason = self.connection.closed() => Err(reason.into()),
        }
    }

    /// Ends one direction for both sides.
    fn shut_down(&self, direction: Shutdown) {
        // Fails only if it is over already.
        let _ = shutdown(&self.fd, direction);
    }
}

/// The system has not what it takes to watch a socket.
fn unwatched(error: io::Error) -> TransportError {
    TransportError::Lost {
        reason: error.to_string(),
    }
}

impl StreamSocket {
    /// Both directions of a stream of `connection`. Must be called on its runtime.
    pub(in crate::transport) fn split(
        self,
        connection: quinn::Connection,
    ) -> io::Result<(LocalSender, LocalReceiver)> {
        let socket = Arc::new(Socket {
            fd: watch(self.fd, Interest::READABLE)?,
            connection,
            _permit: self.permit,
        });
        let sender = LocalSender {
            socket: socket.clone(),
        };
        let receiver = LocalReceiver {
            socket,
            records: Records::default(),
            arrived: Bytes::new(),
        };
        Ok((sender, receiver))
    }
}

/// The sending direction.
#[derive(Debug)]
pub(in crate::transport) struct LocalSender {
    socket: Arc<Socket>,
}

impl LocalSender {
    /// Sends `head` and `data`, of which the pieces are left empty.
    pub(in crate::transport) async fn write(
        &mut self,
        mut head: Bytes,
        data: &mut [Bytes],
    ) -> Result<(), TransportError> {
        let len = head.len() + data.iter().map(Bytes::len).sum::<usize>();
        if len == 0 {
            // A record of no bytes would be taken for the end.
            return Ok(());
        }
        // Limits of frames and queues are far below.
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
                Err(_) => return Err(self.socket.stopped().await),
            }
        }
    }

    /// Tells the receiver that this is all, once it has taken enough of what went before; for `deadline`
    /// at most.
    pub(in crate::transport) fn finish(&mut self, deadline: Duration) {
        let socket = self.socket.clone();
        let send_end = move || socket.send(iter::once(&END[..]));
        if send_end() == Err(Errno::AGAIN) {
            let socket = self.socket.clone();
            tokio::spawn(tokio::time::timeout(deadline, async move {
                while send_end() == Err(Errno::AGAIN) && socket.room().await.is_ok() {}
            }));
        }
        // Otherwise the receiver has the end, or is gone.
    }

    /// Ends what is sent; without an end before, the receiver knows that something is missing.
    pub(in crate::transport) fn reset(&mut self) {
        self.socket.shut_down(Shutdown::Write);
    }
}

/// The receiving direction. Dropping it tells the sender to stop.
#[derive(Debug)]
pub(in crate::transport) struct LocalReceiver {
    socket: Arc<Socket>,
    records: Records,
    /// Received and not taken yet.
    arrived: Bytes,
}

impl LocalReceiver {
    /// At most `max_bytes` as they come, or `None` at the end. Cancellation-safe.
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
            let mut received = Vec::with_capacity(capacity);
            self.receive(capacity, |fd| {
                let into = spare_capacity(&mut received);
                recv(fd, into, RecvFlags::DONTWAIT).map(|(received, _)| received)
            })
            .await?;
            self.arrived = received.into();
        }
    }

    /// Some bytes into `buffer`, which is not empty, or `None` at the end. Cancellation-safe.
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

    /// Receives at least a byte and at most `max_bytes`, with `receive` called again until something is
    /// there.
    async fn receive(
        &self,
        max_bytes: usize,
        mut receive: impl FnMut(&OwnedFd) -> Result<usize, Errno>,
    ) -> Result<usize, TransportError> {
        loop {
            let mut ready = tokio::select! {
                biased;
                ready = self.socket.fd.readable() => ready.map_err(unwatched)?,
                reason = self.socket.connection.closed() => return Err(reason.into()),
            };
            match ready.try_io(|fd| Ok(receive(fd.get_ref())?)) {
                // Without the end of the stream before it.
                Ok(Ok(0)) => break,
                Ok(Ok(received)) => {
                    if received < max_bytes {
                        // There was no more, so that asking again can be spared.
                        ready.clear_ready();
                    }
                    return Ok(received);
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(_)) => break,
                Err(_would_block) => {}
            }
        }
        Err(self.socket.reset().await)
    }

    /// Tells the sender to stop.
    pub(in crate::transport) fn stop(&mut self) {
        self.socket.shut_down(Shutdown::Read);
    }
}

impl Drop for LocalReceiver {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Door, LinkSlot};
    use super::*;
    use crate::codec::StreamKind;
    use crate::transport::tests::{LONG, SHORT, network_pair};

    #[tokio::test]
    async fn the_end_of_a_full_stream_arrives_once_there_is_room() {
        let pair = network_pair().await;
        let (door, slot) = (Door::open().unwrap(), LinkSlot::default());
        let link = door.offer(&slot).take().await.unwrap();
        let sending = link.open(StreamKind::Data).unwrap();
        let (_, receiving) = slot.wait().await.accept().await.unwrap().unwrap();
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
