//! The UDP socket of an endpoint.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};

/// Most bytes in one batch of datagrams: the payload of one IPv4 packet of 64 KiB, less its headers of 28 bytes. The
/// kernel refuses to segment more, and a refused batch would be sent again and again.
const BATCH_BYTES_MAX: usize = 65_507;

/// Largest UDP payload that is received: half of the most that the kernel coalesces.
pub(crate) const UDP_PAYLOAD_BYTES_MAX: u16 = 32 * 1024;

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

/// Sizes the buffers beyond the system's limit if this process may, otherwise up to it.
fn grow_buffers(socket: &socket2::Socket, buffer_bytes: usize) -> io::Result<()> {
    if rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, buffer_bytes).is_err() {
        socket.set_recv_buffer_size(buffer_bytes)?;
    }
    socket.set_send_buffer_size(buffer_bytes)
}

/// Keeps batches of datagrams (generic segmentation offload) below the size that the kernel can send.
///
/// Quinn asks for a number of segments regardless of their size; with packets of 16 KiB and more, a full batch would
/// be too large. So the number is derived from the largest segment seen, and the few batches that were filled before
/// it was seen are split here.
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
                // Retrying the whole batch would send its start twice; the rest counts as lost on the way, and QUIC
                // recovers it.
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
        // Quinn reserves space for this many of the largest packets for each batch that it receives. The kernel never
        // coalesces more than 64 KiB, however many packets that is, so the space need not be larger: 2 MiB for an
        // endpoint instead of 64.
        let fitting = (64 * 1024) / usize::from(UDP_PAYLOAD_BYTES_MAX);
        self.inner.max_receive_segments().min(fitting)
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

/// Returns the source address of packets to `remote` by the system's current routes. Sends nothing.
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

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// Notes what is sent; blocks after `room` batches.
    #[derive(Debug)]
    struct Recorder {
        batches: Mutex<Vec<(usize, Option<usize>)>>,
        room: usize,
    }

    #[derive(Debug)]
    struct AlwaysWritable;

    impl UdpPoller for AlwaysWritable {
        fn poll_writable(self: Pin<&mut Self>, _: &mut Context) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncUdpSocket for Recorder {
        fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
            Box::pin(AlwaysWritable)
        }

        fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
            let mut batches = self.batches.lock();
            if batches.len() == self.room {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            batches.push((transmit.contents.len(), transmit.segment_size));
            Ok(())
        }

        fn poll_recv(
            &self,
            _: &mut Context,
            _: &mut [IoSliceMut<'_>],
            _: &mut [RecvMeta],
        ) -> Poll<io::Result<usize>> {
            Poll::Pending
        }

        fn local_addr(&self) -> io::Result<SocketAddr> {
            Ok(([127, 0, 0, 1], 1).into())
        }

        fn max_transmit_segments(&self) -> usize {
            64
        }

        fn max_receive_segments(&self) -> usize {
            64
        }
    }

    fn limiter(room: usize) -> (Arc<Recorder>, BatchLimiter) {
        let recorder = Arc::new(Recorder {
            batches: Mutex::default(),
            room,
        });
        (recorder.clone(), BatchLimiter::new(recorder))
    }

    fn send(limiter: &BatchLimiter, total: usize, segment: usize) -> io::Result<()> {
        limiter.try_send(&Transmit {
            destination: ([127, 0, 0, 1], 2).into(),
            ecn: None,
            contents: &vec![0; total],
            segment_size: (total > segment).then_some(segment),
            src_ip: None,
        })
    }

    #[test]
    fn batches_that_the_kernel_refuses_are_cut_at_segments() {
        let (recorder, limiter) = limiter(10);
        assert_eq!(limiter.max_transmit_segments(), 64);
        send(&limiter, 5 * 20_000 + 70, 20_000).unwrap();
        assert_eq!(
            *recorder.batches.lock(),
            [(60_000, Some(20_000)), (40_070, Some(20_000))]
        );
        assert_eq!(limiter.max_transmit_segments(), 3);
        send(&limiter, 32_700, 32_700).unwrap();
        assert_eq!(limiter.max_transmit_segments(), 2);
        assert_eq!(limiter.max_receive_segments(), 2);
    }

    #[test]
    fn nothing_is_sent_twice_when_the_socket_is_full() {
        let (recorder, limiter) = limiter(1);
        send(&limiter, 3 * 32_000, 32_000).unwrap();
        assert_eq!(recorder.batches.lock().len(), 1);
        let error = send(&limiter, 1200, 1200).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
