//! The door at which peers on this host open their streams.

use std::collections::HashMap;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net as std_unix;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::{
    KNOCK_DEADLINE, LocalStreams, Name, Offer, SECRET_BYTES, Secret, StreamSocket,
    refuse_descriptors, socket_name,
};
use crate::codec::StreamKind;

/// Most callers that have not shown their ticket yet; further ones have to use the network.
const CALLERS_MAX: usize = 256;
/// Streams of one connection that wait to be accepted.
const WAITING_MAX: usize = 64;
/// Most streams of all connections. Each is a file descriptor, of which enough must be left for files.
const ALL_STREAMS_MAX: usize = 4096;
/// When to try again to accept callers after the system lacked a resource for it.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

const KNOCK_BYTES: usize = SECRET_BYTES + 1;

/// Returns what a caller sends to open a stream.
pub(super) fn knock(ticket: &Secret, kind: StreamKind) -> [u8; KNOCK_BYTES] {
    let mut bytes = [kind.encode(); KNOCK_BYTES];
    bytes[..SECRET_BYTES].copy_from_slice(ticket);
    bytes
}

/// The door, which stays open until this is dropped.
pub(in crate::transport) struct Door {
    name: Name,
    expected: Arc<Mutex<Expected>>,
    /// Ends the thread when it is dropped.
    _open: oneshot::Sender<()>,
}

/// The expected callers by ticket, as long as their connections last.
type Expected = HashMap<Secret, Caller>;

#[derive(Clone)]
struct Caller {
    proof: Secret,
    streams: mpsc::Sender<(StreamKind, StreamSocket)>,
}

impl Door {
    /// Opens a door on a thread of its own. Every process on this host can connect to it, and can delay it where the
    /// kernel does not refuse descriptors.
    pub(in crate::transport) fn open() -> io::Result<Self> {
        let name = rand::random();
        let address = std_unix::SocketAddr::from_abstract_name(socket_name(name))?;
        let listener = std_unix::UnixListener::bind_addr(&address)?;
        listener.set_nonblocking(true)?;
        // Accepted sockets inherit this.
        refuse_descriptors(&listener);
        let expected: Arc<Mutex<Expected>> = Arc::default();
        let (open, closed) = oneshot::channel();
        let thread = std::thread::Builder::new().name("local-door".to_owned());
        let callers = expected.clone();
        thread.spawn(move || {
            if let Err(error) = keep_open(listener, callers, closed) {
                tracing::warn!(%error, "peers on this host use the network");
            }
        })?;
        Ok(Self {
            name,
            expected,
            _open: open,
        })
    }

    /// Returns an offer for the peer of one connection, and the streams that the peer opens with it.
    pub(in crate::transport) fn offer(&self) -> (Offer, LocalStreams) {
        let (ticket, proof) = (rand::random(), rand::random());
        let (sender, streams) = mpsc::channel(WAITING_MAX);
        let mut expected = self.expected.lock();
        expected.retain(|_, caller| !caller.streams.is_closed());
        let caller = Caller {
            proof,
            streams: sender,
        };
        expected.insert(ticket, caller);
        let offer = Offer {
            name: self.name,
            ticket,
            proof,
        };
        (offer, LocalStreams::Accepted(streams.into()))
    }
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The tickets are secret.
        f.debug_struct("Door").finish_non_exhaustive()
    }
}

/// Answers callers until `closed`.
fn keep_open(
    listener: std_unix::UnixListener,
    expected: Arc<Mutex<Expected>>,
    closed: oneshot::Receiver<()>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = UnixListener::from_std(listener)?;
        tokio::select! {
            biased;
            _ = closed => {}
            () = answer(listener, expected) => {}
        }
        Ok(())
    })
}

async fn answer(listener: UnixListener, expected: Arc<Mutex<Expected>>) {
    let callers = Arc::new(Semaphore::new(CALLERS_MAX));
    let streams = Arc::new(Semaphore::new(ALL_STREAMS_MAX));
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "peers on this host are not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(calling) = callers.clone().try_acquire_owned() else {
            continue;
        };
        let (expected, streams) = (expected.clone(), streams.clone());
        tokio::spawn(async move {
            let admitted = admit(socket, &expected, streams);
            if let Ok(Err(error)) = tokio::time::timeout(KNOCK_DEADLINE, admitted).await {
                tracing::debug!(%error, "a caller on this host is refused");
            }
            drop(calling);
        });
    }
}

async fn admit(
    mut socket: UnixStream,
    expected: &Mutex<Expected>,
    streams: Arc<Semaphore>,
) -> io::Result<()> {
    let mut knock = [0; KNOCK_BYTES];
    socket.read_exact(&mut knock).await?;
    let [ticket @ .., kind] = knock;
    let caller = expected.lock().get(&ticket).cloned();
    let caller = caller.ok_or_else(|| io::Error::other("it has no valid ticket"))?;
    let kind = StreamKind::decode(kind).map_err(io::Error::other)?;
    let place = caller.streams.try_reserve().map_err(io::Error::other)?;
    let permit = streams.try_acquire_owned().map_err(io::Error::other)?;
    socket.write_all(&caller.proof).await?;
    let fd = socket.into_std()?.into();
    place.send((kind, StreamSocket { fd, permit }));
    Ok(())
}
