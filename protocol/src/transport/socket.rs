//! The UDP socket under an endpoint.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};

/// Most bytes in one batch of datagrams: the kernel refuses to segment more than 64 KiB less the
/// headers, and a refused batch would be sent again and again.
const BATCH_BYTES_MAX: usize = 65_000;

/// Opens a UDP socket with large buffers.
pub(crate) fn open(addr: SocketAddr, buffer_bytes: usize) -> io::Result<UdpSocket> {
    let socket = socket2::Socket::new(
        socket2::Domain::for_address(addr),
        socket2::Type::DGRAM,
        Some(socket2::Protocol::UDP),
    )?;
    grow_buffers(&socket, buffer_bytes)?;
    socket.bind(&addr.into())?;
    Ok(socket.into())
}

/// Sizes the buffers beyond the system's limit where this process may, else up to it.
fn grow_buffers(socket: &socket2::Socket, buffer_bytes: usize) -> io::Result<()> {
    if rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, buffer_bytes).is_err() {
        socket.set_recv_buffer_size(buffer_bytes)?;
    }
    socket.set_send_buffer_size(buffer_bytes)
}

/// Keeps batches of datagrams (generic segmentation offload) below what the kernel can send.
///
/// Quinn asks for a number of segments whatever their size; with packets of 16 KiB and more, a full
/// batch would be too large. So the number follows from the largest segment seen, and the few
/// batches that were filled before it was seen are cut here.
#[derive(Debug)]
pub(crate) struct BatchLimiter {
    inner: Arc<dyn AsyncUdpSocket>,
    segment_bytes_max: AtomicUsize,
}

impl BatchLimiter {
    pub(crate) fn new(inner: Arc<dyn AsyncUdpSocket>) -> Self {
        Self {
            inner,
            segment_bytes_max: AtomicUsize::new(1),
        }
    }
}

impl AsyncUdpSocket for BatchLimiter {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.inner.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
        let segment_bytes = transmit.segment_size.unwrap_or(transmit.contents.len());
        if segment_bytes > self.segment_bytes_max.load(Ordering::Relaxed) {
            self.segment_bytes_max
                .fetch_max(segment_bytes, Ordering::Relaxed);
        }
        if transmit.contents.len() <= BATCH_BYTES_MAX || segment_bytes == 0 {
            return self.inner.try_send(transmit);
        }
        let batch_bytes = (BATCH_BYTES_MAX / segment_bytes).max(1) * segment_bytes;
        let mut sent_any = false;
        for contents in transmit.contents.chunks(batch_bytes) {
            let part = Transmit {
                destination: transmit.destination,
                ecn: transmit.ecn,
                contents,
                segment_size: (contents.len() > segment_bytes).then_some(segment_bytes),
                src_ip: transmit.src_ip,
            };
            match self.inner.try_send(&part) {
                Ok(()) => sent_any = true,
                // Asking for the whole batch again would send its start twice; the rest counts as
                // lost on the way, which QUIC mends.
                Err(error) if sent_any && error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        let fitting = BATCH_BYTES_MAX / self.segment_bytes_max.load(Ordering::Relaxed).max(1);
        self.inner.max_transmit_segments().min(fitting).max(1)
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

/// The address from which packets to `remote` leave, as the system routes now. Sends nothing.
pub(crate) fn route_source(remote: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = if remote.is_ipv4() {
        (std::net::Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (std::net::Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(remote)?;
    Ok(socket.local_addr()?.ip())
}
