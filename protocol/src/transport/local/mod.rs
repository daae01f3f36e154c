//! Streams between two processes on one host, past the network.
//!
//! A part that listens keeps a Unix socket of a random abstract name, which exists in its network
//! namespace only and needs no file. With its hello it makes a peer on the same host an [`Offer`]: the
//! name and two secrets, over the connection on which both sides have proven who they are. Who comes to
//! the socket and knows the first secret is that peer, and is answered with the second. From then on
//! this [`Link`] belongs to the connection: to open a stream is to hand over one end of a pair of
//! connected sockets. The kernel lets nobody else read them, so nothing is encrypted, and no byte is
//! copied twice.
//!
//! Where there is no link (another host, another namespace), and whenever one does not work, streams
//! are those of the QUIC connection. The connection stays what tells whether the peer is there: its
//! streams end with it.

mod records;
mod stream;

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net as std_unix;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with, socketpair,
};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SetOnce};
use tokio::task::AbortHandle;

pub(super) use self::records::Records;
pub(super) use self::stream::{LocalReceiver, LocalSender};
use super::config::STREAMS_MAX;
use super::system_socket::watch;
use super::{TransportError, within};
use crate::codec::{StreamKind, WireError};

/// Bytes of an [`Offer`].
pub(super) const OFFER_BYTES: usize = NAME_BYTES + 2 * SECRET_BYTES;
const NAME_BYTES: usize = 16;
const SECRET_BYTES: usize = 32;

/// How long it may take until a link stands: both sides are on this host.
const LINK_DEADLINE: Duration = Duration::from_millis(500);
/// Most who are at the door and have not shown their secret yet; others have to do without a link.
const CALLERS_MAX: usize = 64;
/// When to try again to accept somebody, when the system lacks something for it.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// What the sender of a stream may be ahead of its receiver, as far as the system allows; as on
/// loopback.
const STREAM_BUFFER_BYTES: usize = 1024 * 1024;

type Name = [u8; NAME_BYTES];
type Secret = [u8; SECRET_BYTES];

/// Where the link of a connection is, once it stands.
pub(super) type LinkSlot = Arc<SetOnce<Link>>;

/// How a peer on this host comes to its link. Never logged.
pub(super) struct Offer {
    name: Name,
    /// What the peer shows.
    ticket: Secret,
    /// What it is shown in return.
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

    /// Where to come.
    pub(super) fn socket_name(&self) -> String {
        socket_name(self.name)
    }

    /// Takes the offer up.
    ///
    /// # Errors
    /// There is no way to the other side but the network.
    pub(super) async fn take(&self) -> Result<Link, TransportError> {
        let link = async {
            let address = SocketAddrUnix::new_abstract_name(self.socket_name().as_bytes())?;
            // Not blocking, and so not waiting for a place in the queue either.
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            connect(&socket, &address)?;
            let mut socket = UnixStream::from_std(socket.into())?;
            socket.write_all(&self.ticket).await?;
            let mut shown = [0; SECRET_BYTES];
            socket.read_exact(&mut shown).await?;
            if shown != self.proof {
                return Err(io::Error::other("somebody else has the socket"));
            }
            Link::new(socket.into_std()?)
        };
        within(LINK_DEADLINE, "a link to a peer on this host", async {
            link.await.map_err(no_link)
        })
        .await
    }
}

fn no_link(error: io::Error) -> TransportError {
    TransportError::Lost {
        reason: error.to_string(),
    }
}

fn socket_name(name: Name) -> String {
    format!("harvestfs-{:032x}", u128::from_be_bytes(name))
}

/// Where peers on this host come for their links, until it is dropped.
#[derive(Debug)]
pub(super) struct Door {
    name: Name,
    expected: Arc<Mutex<Expected>>,
    task: AbortHandle,
}

/// Who may come, by ticket: what is shown in return, and the connection whose link it will be. An entry
/// is of no use any more once its connection is gone.
type Expected = HashMap<Secret, (Secret, Weak<SetOnce<Link>>)>;

impl Door {
    /// Opens a door. Must be called on a tokio runtime.
    pub(super) fn open() -> io::Result<Self> {
        let name = rand::random();
        let address = std_unix::SocketAddr::from_abstract_name(socket_name(name))?;
        let listener = std_unix::UnixListener::bind_addr(&address)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let expected = Arc::default();
        let task = tokio::spawn(answer(listener, Arc::clone(&expected)));
        Ok(Self {
            name,
            expected,
            task: task.abort_handle(),
        })
    }

    /// An offer for the peer of one connection, to be taken up once.
    pub(super) fn offer(&self, slot: &LinkSlot) -> Offer {
        let (ticket, proof) = (rand::random(), rand::random());
        let mut expected = lock(&self.expected);
        expected.retain(|_, (_, slot)| slot.strong_count() > 0);
        expected.insert(ticket, (proof, Arc::downgrade(slot)));
        Offer {
            name: self.name,
            ticket,
            proof,
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(expected: &Mutex<Expected>) -> MutexGuard<'_, Expected> {
    // Under the lock there are only single changes of the map, which a panic cannot split.
    expected.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn answer(listener: UnixListener, expected: Arc<Mutex<Expected>>) {
    let callers = Arc::new(Semaphore::new(CALLERS_MAX));
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "peers on this host are not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = callers.clone().try_acquire_owned() else {
            continue;
        };
        let expected = expected.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let admitted = tokio::time::timeout(LINK_DEADLINE, admit(socket, &expected)).await;
            if let Ok(Err(error)) = admitted {
                tracing::debug!(%error, "somebody on this host gets no link");
            }
        });
    }
}

async fn admit(mut socket: UnixStream, expected: &Mutex<Expected>) -> io::Result<()> {
    let mut ticket = [0; SECRET_BYTES];
    socket.read_exact(&mut ticket).await?;
    let known = lock(expected).remove(&ticket);
    let unknown = || io::Error::other("it has no valid ticket");
    let (proof, slot) = known.ok_or_else(unknown)?;
    let slot = slot.upgrade().ok_or_else(unknown)?;
    socket.write_all(&proof).await?;
    // The slot is empty, as a ticket is good for one link.
    let _ = slot.set(Link::new(socket.into_std()?)?);
    Ok(())
}

/// Hands streams from one side of a connection to the other.
#[derive(Debug)]
pub(super) struct Link {
    socket: AsyncFd<OwnedFd>,
    /// One permit for each further stream of each side.
    opened: Arc<Semaphore>,
    accepted: Arc<Semaphore>,
}

/// One end of a stream, of which nothing was sent or received yet.
pub(super) struct StreamSocket {
    fd: OwnedFd,
    permit: OwnedSemaphorePermit,
}

impl Link {
    fn new(socket: std_unix::UnixStream) -> io::Result<Self> {
        Ok(Self {
            socket: watch(OwnedFd::from(socket), Interest::READABLE)?,
            opened: Arc::new(Semaphore::new(STREAMS_MAX as usize)),
            // The peer may have closed a stream that is still being served here.
            accepted: Arc::new(Semaphore::new(2 * STREAMS_MAX as usize)),
        })
    }

    /// Opens a stream; never waits.
    ///
    /// # Errors
    /// The other side is gone, or has too many streams, or the system has no more descriptors.
    pub(super) fn open(&self, kind: StreamKind) -> io::Result<StreamSocket> {
        let permit = self.opened.clone().try_acquire_owned();
        let permit = permit.map_err(|_| io::Error::other("too many streams are open"))?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        for end in [&here, &there] {
            grow_send_buffer(end)?;
        }
        self.send(kind.encode(), &there)?;
        Ok(StreamSocket { fd: here, permit })
    }

    pub(super) fn send(&self, kind: u8, stream: &OwnedFd) -> io::Result<()> {
        let streams = [stream.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut attached = SendAncillaryBuffer::new(&mut space);
        if !attached.push(SendAncillaryMessage::ScmRights(&streams)) {
            return Err(io::Error::other("there is no room for the descriptor"));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &[IoSlice::new(&[kind])], &mut attached, flags)?;
        Ok(())
    }

    /// The next stream that the other side opens, or `None` once it is gone. Cancellation-safe.
    pub(super) async fn accept(&self) -> Option<Result<(StreamKind, StreamSocket), WireError>> {
        loop {
            let mut ready = self.socket.readable().await.ok()?;
            let received = match ready.try_io(|socket| receive(socket.get_ref())) {
                Ok(received) => received.ok()?,
                Err(_would_block) => continue,
            };
            let (kind, fd) = received?;
            let kind = match StreamKind::decode(kind) {
                Ok(kind) => kind,
                Err(error) => return Some(Err(error)),
            };
            // Without a descriptor this process has too many. The sender sees the stream end.
            let fd = fd.filter(is_unix_socket);
            if let (Some(fd), Ok(permit)) = (fd, self.accepted.clone().try_acquire_owned()) {
                return Some(Ok((kind, StreamSocket { fd, permit })));
            }
        }
    }
}

/// Anything else could have this process wait, for example for the file system that a file is on.
fn is_unix_socket(fd: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
}

fn grow_send_buffer(socket: &OwnedFd) -> io::Result<()> {
    use rustix::net::sockopt;
    // Beyond the system's limit where this process may.
    if sockopt::set_socket_send_buffer_size_force(socket, STREAM_BUFFER_BYTES).is_err() {
        sockopt::set_socket_send_buffer_size(socket, STREAM_BUFFER_BYTES)?;
    }
    Ok(())
}

/// The kind of a new stream and its descriptor; `None` at the end.
fn receive(link: &OwnedFd) -> io::Result<Option<(u8, Option<OwnedFd>)>> {
    let mut kind = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(&mut kind)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = recvmsg(link, into, &mut attached, flags)?;
    let fd = attached.drain().find_map(|part| match part {
        RecvAncillaryMessage::ScmRights(files) => files.last(),
        _ => None,
    });
    Ok((message.bytes > 0).then_some((kind[0], fd)))
}
