//! A UDP socket of the operating system that is always watched for arriving packets, but for room to send only while
//! there is none.
//!
//! A socket that is always watched for both wakes its owner twice for each packet that it sends: when the receiver
//! has taken the packet, the kernel reports the freed room. With small requests that is one wake-up in three.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use quinn::udp::{RecvMeta, Transmit, UdpSocketState};
use quinn::{AsyncUdpSocket, UdpPoller};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A UDP socket that is watched for room to send only while there is none; see the module.
#[derive(Debug)]
pub(crate) struct SystemSocket {
    socket: AsyncFd<UdpSocket>,
    state: UdpSocketState,
    /// A send found no room, and none was found since.
    full: AtomicBool,
}

impl SystemSocket {
    /// Watches a bound socket. Must be called on a tokio runtime.
    pub(crate) fn new(socket: UdpSocket) -> io::Result<Arc<Self>> {
        // Makes it non-blocking.
        let state = UdpSocketState::new((&socket).into())?;
        Ok(Arc::new(Self {
            socket: watch(socket, Interest::READABLE)?,
            state,
            full: AtomicBool::new(false),
        }))
    }
}

/// Makes the runtime watch a descriptor that no other code can close.
pub(super) fn watch<T: Into<OwnedFd> + AsRawFd>(
    owned: T,
    interest: Interest,
) -> io::Result<AsyncFd<T>> {
    // SAFETY: the standard library's owners of a descriptor show the same open one all their life,
    // and this one belongs to the `AsyncFd` from here on.
    Ok(unsafe { AsyncFd::register_with_interest(owned, interest)? })
}

impl AsyncUdpSocket for SystemSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Room {
            socket: self,
            watched: None,
        })
    }

    fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
        let sent = self.state.send(self.socket.get_ref().into(), transmit);
        if let Err(error) = &sent
            && error.kind() == io::ErrorKind::WouldBlock
        {
            self.full.store(true, Ordering::Relaxed);
        }
        sent
    }

    fn poll_recv(
        &self,
        cx: &mut Context,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.socket.poll_read_ready(cx))?;
            let received = ready.try_io(|socket| {
                let socket = socket.get_ref();
                self.state.recv(socket.into(), bufs, meta)
            });
            if let Ok(received) = received {
                if matches!(received, Ok(batches) if batches < bufs.len()) {
                    // There was no more, so another attempt can be saved.
                    ready.clear_ready();
                }
                return Poll::Ready(received);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.get_ref().local_addr()
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    fn max_transmit_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.state.gro_segments()
    }
}

/// Waits for room to send, for one connection.
#[derive(Debug)]
struct Room {
    socket: Arc<SystemSocket>,
    /// While there is no room: a duplicate of the socket that is watched for it.
    watched: Option<AsyncFd<OwnedFd>>,
}

impl Room {
    fn watch(&self) -> io::Result<AsyncFd<OwnedFd>> {
        let again = self.socket.socket.get_ref().as_fd().try_clone_to_owned()?;
        watch(again, Interest::WRITABLE)
    }
}

impl UdpPoller for Room {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<io::Result<()>> {
        if self.socket.full.load(Ordering::Relaxed) {
            let watched = match self.watched.take() {
                Some(watched) => watched,
                None => self.watch()?,
            };
            if watched.poll_write_ready(cx)?.is_pending() {
                self.watched = Some(watched);
                return Poll::Pending;
            }
            self.socket.full.store(false, Ordering::Relaxed);
        }
        self.watched = None;
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;

    /// Longer than any wait of these tests takes unless something is broken.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn transmit(destination: SocketAddr, contents: &[u8]) -> Transmit<'_> {
        Transmit {
            destination,
            ecn: None,
            contents,
            segment_size: None,
            src_ip: None,
        }
    }

    async fn receive(socket: &SystemSocket) -> (SocketAddr, usize) {
        let mut buffer = [0; 2048];
        let mut meta = [RecvMeta::default()];
        let received = poll_fn(|cx| {
            let mut bufs = [IoSliceMut::new(&mut buffer)];
            socket.poll_recv(cx, &mut bufs, &mut meta)
        });
        let received = tokio::time::timeout(PATIENCE, received).await;
        assert_eq!(received.unwrap().unwrap(), 1);
        (meta[0].addr, meta[0].len)
    }

    fn socket() -> Arc<SystemSocket> {
        SystemSocket::new(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap()
    }

    #[tokio::test]
    async fn what_arrives_wakes_the_receiver_each_time() {
        let (here, there) = (socket(), socket());
        let receiver = there.clone();
        let received = tokio::spawn(async move {
            let mut lengths = Vec::new();
            for _ in 0..3 {
                lengths.push(receive(&receiver).await.1);
            }
            lengths
        });
        for length in [1, 20, 300] {
            let to = there.local_addr().unwrap();
            here.try_send(&transmit(to, &[7; 300][..length])).unwrap();
            // Each one finds the receiver waiting, or at least looking.
            tokio::task::yield_now().await;
        }
        assert_eq!(received.await.unwrap(), [1, 20, 300]);
    }

    #[tokio::test]
    async fn a_full_socket_tells_when_there_is_room_again() {
        // A connected pair of local datagram sockets queues a few datagrams and then refuses more.
        let (full, reader) = std::os::unix::net::UnixDatagram::pair().unwrap();
        full.set_nonblocking(true).unwrap();
        while full.send(&[0; 1024]).is_ok() {}
        let here = socket();
        let room = Room {
            watched: Some(watch(OwnedFd::from(full), Interest::WRITABLE).unwrap()),
            socket: here.clone(),
        };
        here.full.store(true, Ordering::Relaxed);
        let mut room = Box::pin(room);
        let waiting = tokio::time::timeout(
            Duration::from_millis(10),
            poll_fn(|cx| room.as_mut().poll_writable(cx)),
        );
        assert!(waiting.await.is_err(), "there is no room");

        reader.set_nonblocking(true).unwrap();
        while reader.recv(&mut [0; 1024]).is_ok() {}
        let waiting = poll_fn(|cx| room.as_mut().poll_writable(cx));
        let found = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(matches!(found, Ok(Ok(()))));
        assert!(!here.full.load(Ordering::Relaxed));
        assert!(room.watched.is_none());
    }
}
