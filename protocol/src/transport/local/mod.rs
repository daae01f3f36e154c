//! Streams between two processes on one host that bypass the network.
//!
//! A part that listens has a *door*: a Unix socket with a random abstract name, which exists only in its network
//! namespace and needs no file. With its hello, it sends a peer on the same host an [`Offer`]: the name and two
//! secrets, over the connection on which both sides have proven their identities. To open a stream, the peer connects
//! to the door and shows the first secret; the answer is the second. Only the kernel is between the two ends, so
//! nothing is encrypted, and bytes are only copied into the kernel and out of it.
//!
//! Where there is no door (another host, another namespace), and whenever it does not answer, streams go over the
//! QUIC connection. The connection always shows whether the peer is reachable: its streams end with it.

mod door;
mod stream;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

pub(super) use self::door::Door;
pub(super) use self::stream::{LocalReceiver, LocalSender};
use super::config::STREAMS_MAX;
use super::{TransportError, within};
use crate::codec::{StreamKind, WireError};

/// Bytes of an [`Offer`].
pub(super) const OFFER_BYTES: usize = NAME_BYTES + 2 * SECRET_BYTES;
const NAME_BYTES: usize = 16;
const SECRET_BYTES: usize = 32;

/// How long a caller at a door may take to state its request.
const KNOCK_DEADLINE: Duration = Duration::from_millis(100);
/// How long the door may take to answer: both sides are on this host. Longer in tests: tests of these streams must
/// not turn into tests of the network when the machine is busy.
const ANSWER_DEADLINE: Duration = Duration::from_millis(if cfg!(test) { 20_000 } else { 100 });
/// How long streams go over the network after the door did not answer.
const REST: Duration = Duration::from_secs(1);
/// How many bytes the side that opens a stream may be ahead of the other, as far as the system allows; the same as on
/// loopback. The other side keeps the system's default.
const SEND_BUFFER_BYTES: usize = 1024 * 1024;

type Name = [u8; NAME_BYTES];
type Secret = [u8; SECRET_BYTES];

/// How a peer on this host opens streams. Never logged.
pub(super) struct Offer {
    name: Name,
    /// The secret that the peer shows.
    ticket: Secret,
    /// The secret that the peer is shown in return.
    proof: Secret,
}

impl Offer {
    pub(super) fn encode(&self) -> Vec<u8> {
        [&self.name[..], &self.ticket, &self.proof].concat()
    }

    /// # Errors
    /// [`WireError::Malformed`] for any other length than [`OFFER_BYTES`].
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let wrong_length = || WireError::malformed("an offer of another length");
        let (name, secrets) = bytes.split_first_chunk().ok_or_else(wrong_length)?;
        let (ticket, proof) = secrets.split_first_chunk().ok_or_else(wrong_length)?;
        Ok(Self {
            name: *name,
            ticket: *ticket,
            proof: proof.try_into().map_err(|_| wrong_length())?,
        })
    }

    /// The name of the door's socket.
    pub(super) fn socket_name(&self) -> String {
        socket_name(self.name)
    }
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offer").finish_non_exhaustive()
    }
}

fn socket_name(name: Name) -> String {
    format!("harvestfs-{:032x}", u128::from_be_bytes(name))
}

/// One end of a stream on which nothing was sent or received yet.
#[derive(Debug)]
pub(super) struct StreamSocket {
    fd: OwnedFd,
    permit: OwnedSemaphorePermit,
}

/// The streams of one connection that bypass the network.
#[derive(Debug)]
pub(super) enum LocalStreams {
    /// There are none.
    None,
    /// This side opens them.
    Opened(Box<Opener>),
    /// This side accepts them.
    Accepted(tokio::sync::Mutex<mpsc::Receiver<(StreamKind, StreamSocket)>>),
}

impl LocalStreams {
    /// Returns the next stream that the other side opens; waits forever if there is none, since the connection
    /// reports its own end. Cancellation-safe.
    pub(super) async fn accept(&self) -> (StreamKind, StreamSocket) {
        if let Self::Accepted(streams) = self
            && let Some(stream) = streams.lock().await.recv().await
        {
            return stream;
        }
        std::future::pending().await
    }
}

/// Opens streams at a peer's door.
#[derive(Debug)]
pub(super) struct Opener {
    offer: Offer,
    /// One permit for each further stream.
    streams: Arc<Semaphore>,
    resting_until: Mutex<Option<Instant>>,
}

impl Opener {
    pub(super) fn new(offer: Offer) -> Self {
        Self {
            offer,
            streams: Arc::new(Semaphore::new(STREAMS_MAX as usize)),
            resting_until: Mutex::new(None),
        }
    }

    /// Opens a stream, unless the door does not answer, or recently did not.
    ///
    /// # Errors
    /// The stream has to go over the network.
    pub(super) async fn open(&self, kind: StreamKind) -> Result<StreamSocket, TransportError> {
        if self
            .resting_until
            .lock()
            .is_some_and(|until| Instant::now() < until)
        {
            return Err(lost(io::Error::other("the door did not answer")));
        }
        let permit = self.streams.clone().try_acquire_owned();
        let permit = permit.map_err(|_| lost(io::Error::other("too many streams are open")))?;
        let opened = within(ANSWER_DEADLINE, "the door of a peer on this host", async {
            self.knock(kind).await.map_err(lost)
        })
        .await;
        if opened.is_err() {
            *self.resting_until.lock() = Some(Instant::now() + REST);
        }
        opened.map(|fd| StreamSocket { fd, permit })
    }

    async fn knock(&self, kind: StreamKind) -> io::Result<OwnedFd> {
        let Offer { ticket, proof, .. } = &self.offer;
        let address = SocketAddrUnix::new_abstract_name(self.offer.socket_name().as_bytes())?;
        // Non-blocking, so that it does not wait for a place in the queue either.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        grow_send_buffer(&socket)?;
        refuse_descriptors(&socket);
        connect(&socket, &address)?;
        let mut socket = UnixStream::from_std(socket.into())?;
        socket.write_all(&door::knock(ticket, kind)).await?;
        let mut shown = [0; SECRET_BYTES];
        socket.read_exact(&mut shown).await?;
        if shown != *proof {
            return Err(io::Error::other("somebody else has the socket"));
        }
        Ok(socket.into_std()?.into())
    }
}

fn lost(error: io::Error) -> TransportError {
    TransportError::Lost {
        reason: error.to_string(),
    }
}

fn grow_send_buffer(socket: &OwnedFd) -> io::Result<()> {
    use rustix::net::sockopt;
    // Exceeds the system's limit if this process may.
    if sockopt::set_socket_send_buffer_size_force(socket, SEND_BUFFER_BYTES).is_err() {
        sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER_BYTES)?;
    }
    Ok(())
}

/// Makes the kernel refuse descriptors that are sent to this socket, where it can (Linux 6.16). Otherwise, the kernel
/// closes them, for lack of a place for them, while the accompanying bytes are read; and closing may block: for a
/// socket that lingers, or a file on FUSE.
fn refuse_descriptors(socket: &impl AsRawFd) {
    /// From asm-generic/socket.h.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let off: libc::c_int = 0;
    // SAFETY: the descriptor is open as long as `socket` is, and the kernel reads an integer of the
    // length that is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            size_of_val(&off) as libc::socklen_t,
        )
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, "the kernel lets others on this host send descriptors");
    }
}
