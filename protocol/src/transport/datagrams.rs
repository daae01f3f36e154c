//! Datagrams that do not go through a socket of the operating system.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};

/// A socket for datagrams of a simulated network. As with UDP, datagrams may be lost, delayed, duplicated or
/// reordered. Sending never blocks.
pub trait DatagramSocket: fmt::Debug + Send + Sync {
    /// Sends a datagram.
    fn send(&self, to: SocketAddr, datagram: &[u8]);

    /// Receives the next datagram: its length and its source. What does not fit into the buffer is cut off.
    fn poll_receive(
        &self,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<(usize, SocketAddr)>;

    /// Its address.
    fn local_addr(&self) -> SocketAddr;
}

/// The adapter to quinn's interface.
#[derive(Debug)]
pub(super) struct Datagrams(pub Arc<dyn DatagramSocket>);

impl AsyncUdpSocket for Datagrams {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysRoom)
    }

    fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
        let segment_bytes = transmit.segment_size.unwrap_or(transmit.contents.len());
        for datagram in transmit.contents.chunks(segment_bytes.max(1)) {
            self.0.send(transmit.destination, datagram);
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let (Some(buffer), Some(meta)) = (buffers.first_mut(), meta.first_mut()) else {
            return Poll::Ready(Ok(0));
        };
        let (len, addr) = ready!(self.0.poll_receive(context, buffer));
        *meta = RecvMeta {
            addr,
            len,
            stride: len,
            ecn: None,
            // As the kernel does. Without it, the server side would believe the peer to be on its own machine.
            dst_ip: Some(self.0.local_addr().ip()),
        };
        Poll::Ready(Ok(1))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.local_addr())
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

#[derive(Debug)]
struct AlwaysRoom;

impl UdpPoller for AlwaysRoom {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
