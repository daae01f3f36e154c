//! One UDP socket: dialling and accepting.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use quinn::{AsyncUdpSocket, EndpointConfig, TokioRuntime};
use tokio::sync::Semaphore;

use super::config::{QuicConfigs, stays_on_host};
use super::connection::{Agreed, Connection};
use super::datagrams::Datagrams;
use super::local::{Door, LocalStreams, OFFER_BYTES, Offer, Opener};
use super::socket::{self, BatchLimiter};
use super::system_socket::SystemSocket;
use super::{CloseCode, TransportError, TransportOptions, reset, within};
use crate::codec::{AFTER_HELLO_BYTES_MAX, HELLO_BYTES, Hello, WireError};
use crate::identity::{Identity, Peer};
use crate::machine;
use crate::version::{Release, Version, Versions};

/// Most handshakes in progress; further ones wait. Each costs signatures, and after a restart all peers reconnect at
/// the same time.
const HANDSHAKES_MAX: usize = 256;

/// One UDP socket with an identity. Cheap to clone; all clones are the same endpoint.
///
/// It works on current-thread and on multi-thread runtimes of tokio, and must be used on the runtime on which it was
/// bound.
#[derive(Clone, Debug)]
pub struct Endpoint {
    quinn: quinn::Endpoint,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    configs: QuicConfigs,
    options: TransportOptions,
    /// Whether the socket is one of the operating system, which can be asked for routes.
    system_socket: bool,
    /// One permit for each further handshake of an accepted connection.
    handshakes: Semaphore,
    /// Where peers on this host open their streams, if this part listens.
    door: Option<Door>,
}

impl Shared {
    /// Whether streams between two addresses, of which the first is this side's, can bypass the network.
    fn goes_past_network(&self, local: IpAddr, remote: IpAddr) -> bool {
        self.system_socket && self.options.local_streams && stays_on_host(local, remote)
    }
}

impl Endpoint {
    /// Opens a UDP socket on `addr` (port 0: any) and starts the endpoint. It accepts connections if the identity's
    /// role listens (namenode, datanode).
    ///
    /// # Errors
    /// [`TransportError::Bind`], also outside a tokio runtime, and [`TransportError::Identity`].
    pub fn bind(
        addr: SocketAddr,
        identity: &Identity,
        options: TransportOptions,
    ) -> Result<Self, TransportError> {
        let bind_error = |reason: String| TransportError::Bind { addr, reason };
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(bind_error("there is no tokio runtime here".to_owned()));
        }
        let start = || -> io::Result<Result<Self, TransportError>> {
            Ok(match machine::entered() {
                Some(machine) => {
                    let socket = Arc::new(Datagrams(machine.bind(addr)?));
                    Self::start(socket, identity, options, false)
                }
                None => {
                    let socket = socket::open(addr, options.socket_buffer_bytes)?;
                    Self::start(SystemSocket::new(socket)?, identity, options, true)
                }
            })
        };
        let started = start().map_err(|error| bind_error(error.to_string()))?;
        started.map_err(|error| bind_error(error.to_string()))
    }

    fn start(
        socket: Arc<dyn AsyncUdpSocket>,
        identity: &Identity,
        options: TransportOptions,
        system_socket: bool,
    ) -> Result<Self, TransportError> {
        let configs = QuicConfigs::new(identity)?;
        let bind_error = |reason: String| TransportError::Bind {
            addr: SocketAddr::from(([0, 0, 0, 0], 0)),
            reason,
        };
        let addr = socket
            .local_addr()
            .map_err(|error| bind_error(error.to_string()))?;
        let mut endpoint_config = EndpointConfig::new(Arc::new(reset::reset_key(identity)));
        let rng_seed = options.rng_seed.unwrap_or_else(machine::random);
        endpoint_config
            .max_udp_payload_size(socket::UDP_PAYLOAD_BYTES_MAX)
            .map_err(|error| bind_error(error.to_string()))?
            .cid_generator(move || Box::new(reset::RandomConnectionIds::new(rng_seed)))
            .rng_seed(Some(rng_seed));
        let quinn = quinn::Endpoint::new_with_abstract_socket(
            endpoint_config,
            configs.server(addr.ip(), addr.ip()),
            Arc::new(BatchLimiter::new(socket)),
            Arc::new(TokioRuntime),
        )
        .map_err(|error| bind_error(error.to_string()))?;
        let door = if system_socket && options.local_streams && configs.listens() {
            let opened = Door::open();
            let note = |error| tracing::warn!(%error, "peers on this host use the network");
            opened.map_err(note).ok()
        } else {
            None
        };
        let shared = Arc::new(Shared {
            configs,
            options,
            system_socket,
            handshakes: Semaphore::new(HANDSHAKES_MAX),
            door,
        });
        Ok(Self { quinn, shared })
    }

    /// The address of the socket.
    ///
    /// # Errors
    /// [`TransportError::EndpointClosed`] if the socket is closed.
    pub fn local_addr(&self) -> Result<SocketAddr, TransportError> {
        self.quinn
            .local_addr()
            .map_err(|_| TransportError::EndpointClosed)
    }

    /// Dials `addr`, proves this side's identity, and verifies that `expected` answers and that both sides have a
    /// version in common.
    ///
    /// # Errors
    /// [`TransportError::PeerNotTrusted`] (another authority, another name), [`TransportError::RefusedByPeer`],
    /// [`WireError::VersionMismatch`], [`TransportError::Deadline`], or whatever breaks a connection.
    pub async fn connect(
        &self,
        addr: SocketAddr,
        expected: &Peer,
        deadline: Duration,
    ) -> Result<Connection, TransportError> {
        within(deadline, "connecting", self.dial(addr, expected)).await
    }

    async fn dial(&self, addr: SocketAddr, expected: &Peer) -> Result<Connection, TransportError> {
        let shared = &self.shared;
        let source = self.source_for(addr)?;
        let config = shared.configs.client(source, addr.ip());
        let connecting = self
            .quinn
            .connect_with(config, addr, &expected.dns_name())
            .map_err(|error| match error {
                quinn::ConnectError::EndpointStopping => TransportError::EndpointClosed,
                other => TransportError::Dial {
                    addr,
                    reason: other.to_string(),
                },
            })?;
        let quinn = connecting.await?;
        let (agreed, offer) = exchange_hello(&quinn, shared.options.versions, None).await?;
        let offer = offer.filter(|_| shared.goes_past_network(source, addr.ip()));
        let local = match offer {
            Some(offer) => LocalStreams::Opened(Box::new(Opener::new(offer))),
            None => LocalStreams::None,
        };
        let peer = expected.clone();
        Ok(Connection::new(quinn, peer, agreed, &shared.options, local))
    }

    /// Returns the source address of packets to `addr`.
    fn source_for(&self, addr: SocketAddr) -> Result<IpAddr, TransportError> {
        let local = self.local_addr()?.ip();
        if local.is_unspecified() && self.shared.system_socket {
            Ok(socket::route_source(addr).unwrap_or(local))
        } else {
            Ok(local)
        }
    }

    /// Returns the next connection that a peer opens, not yet established; `None` once the endpoint is closed, and
    /// immediately if this identity's role does not listen. Cancellation-safe.
    pub async fn accept(&self) -> Option<Incoming> {
        if !self.shared.configs.listens() {
            return None;
        }
        let quinn = self.quinn.accept().await?;
        Some(Incoming {
            quinn,
            shared: self.shared.clone(),
        })
    }

    /// Closes all connections immediately and refuses new ones; peers get `reason`.
    pub fn close(&self, reason: &str) {
        self.quinn
            .close(CloseCode::DONE.0.into(), reason.as_bytes());
    }

    /// Waits until all connections are gone, so that peers have been notified of [`Endpoint::close`].
    ///
    /// # Errors
    /// [`TransportError::Deadline`].
    pub async fn wait_idle(&self, deadline: Duration) -> Result<(), TransportError> {
        within(deadline, "closing the connections", async {
            self.quinn.wait_idle().await;
            Ok::<_, TransportError>(())
        })
        .await
    }
}

/// A connection that a peer opens. Establish it in its own task: this takes several round trips, and a slow peer must
/// not delay others.
#[derive(Debug)]
pub struct Incoming {
    quinn: quinn::Incoming,
    shared: Arc<Shared>,
}

impl Incoming {
    /// Where the connection comes from.
    pub fn remote_addr(&self) -> SocketAddr {
        self.quinn.remote_address()
    }

    /// Refuses the connection without further work.
    pub fn refuse(self) {
        self.quinn.refuse();
    }

    /// Identifies the peer and verifies that both sides have a version in common, within
    /// [`TransportOptions::handshake_deadline`].
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub async fn establish(self) -> Result<Connection, TransportError> {
        let deadline = self.shared.options.handshake_deadline;
        within(deadline, "the handshake", async {
            let shared = self.shared.clone();
            let permit = shared.handshakes.acquire().await;
            let _permit = permit.map_err(|_| TransportError::EndpointClosed)?;
            self.handshake().await
        })
        .await
    }

    async fn handshake(self) -> Result<Connection, TransportError> {
        let remote = self.quinn.remote_address().ip();
        let local = self.quinn.local_ip().unwrap_or(remote);
        let Some(config) = self.shared.configs.server(local, remote) else {
            self.quinn.refuse();
            return Err(TransportError::EndpointClosed);
        };
        let quinn = self.quinn.accept_with(Arc::new(config))?.await?;
        let peer = match peer_of(&quinn) {
            Ok(peer) => peer,
            Err(error) => {
                let reason = error.to_string();
                quinn.close(CloseCode::UNKNOWN_PEER.0.into(), reason.as_bytes());
                return Err(error);
            }
        };
        let door = self.shared.door.as_ref();
        let door = door.filter(|_| self.shared.goes_past_network(local, remote));
        let (offer, streams) = door.map(Door::offer).unzip();
        let options = &self.shared.options;
        let (agreed, _) = exchange_hello(&quinn, options.versions, offer.as_ref()).await?;
        let streams = streams.unwrap_or(LocalStreams::None);
        Ok(Connection::new(quinn, peer, agreed, options, streams))
    }
}

/// The peer at the other end of a connection that TLS has verified.
fn peer_of(connection: &quinn::Connection) -> Result<Peer, TransportError> {
    let not_trusted = |reason: String| TransportError::PeerNotTrusted { reason };
    let certificates = connection
        .peer_identity()
        .and_then(|any| {
            any.downcast::<Vec<rustls::pki_types::CertificateDer<'static>>>()
                .ok()
        })
        .ok_or_else(|| not_trusted("it has no certificate".to_owned()))?;
    let certificate = certificates
        .first()
        .ok_or_else(|| not_trusted("it has no certificate".to_owned()))?;
    Peer::from_certificate(certificate).map_err(|error| not_trusted(error.to_string()))
}

/// Sends this side's versions and its offer to the other side, and receives the other's. Receiving the answer also
/// means that the other side has accepted this side's certificate.
async fn exchange_hello(
    connection: &quinn::Connection,
    versions: Versions,
    offer: Option<&Offer>,
) -> Result<(Agreed, Option<Offer>), TransportError> {
    let ours = Hello {
        versions,
        release: Release::OURS,
    };
    let result = async {
        let mut sender = connection.open_uni().await?;
        let offer = offer.map_or_else(Vec::new, Offer::encode);
        let hello = [&ours.encode()[..], &offer].concat();
        sender.write_all(&hello).await?;
        sender
            .finish()
            .map_err(|_| TransportError::StreamUnusable)?;
        let mut receiver = connection.accept_uni().await?;
        let bytes_max = HELLO_BYTES + AFTER_HELLO_BYTES_MAX;
        let bytes = receiver.read_to_end(bytes_max).await;
        let bytes = bytes.map_err(|error| match error {
            quinn::ReadToEndError::TooLong => WireError::TooLarge {
                what: "the hello",
                actual_bytes: bytes_max + 1,
                max_bytes: bytes_max,
            }
            .into(),
            quinn::ReadToEndError::Read(error) => TransportError::from(error),
        })?;
        let (hello, after) = Hello::decode(&bytes)?;
        let spoken = ours.agree(hello)?;
        let offer = match after.get(..OFFER_BYTES) {
            Some(offer) => Some(Offer::decode(offer)?),
            None if after.is_empty() => None,
            None => return Err(WireError::malformed("an offer of another length").into()),
        };
        Ok((Agreed { spoken, hello }, offer))
    }
    .await;
    match result {
        Err(TransportError::Wire(error)) => {
            let code = match error {
                WireError::VersionMismatch { .. } => CloseCode::VERSION_MISMATCH,
                _ => CloseCode::PROTOCOL_VIOLATION,
            };
            connection.close(code.0.into(), closing_words(versions).as_bytes());
            Err(error.into())
        }
        // The other side noticed the mismatch first.
        Err(TransportError::ClosedByPeer {
            code: CloseCode::VERSION_MISMATCH,
            reason,
        }) => Err(match versions_in(&reason) {
            Some(theirs) => WireError::VersionMismatch {
                ours: versions,
                theirs,
            }
            .into(),
            None => TransportError::ClosedByPeer {
                code: CloseCode::VERSION_MISMATCH,
                reason,
            },
        }),
        other => other,
    }
}

const CLOSING_WORDS: &str = "this side speaks protocol version ";

fn closing_words(versions: Versions) -> String {
    format!("{CLOSING_WORDS}{versions}")
}

fn versions_in(closing_words: &str) -> Option<Versions> {
    let words = closing_words.strip_prefix(CLOSING_WORDS)?;
    let (oldest, newest) = words.split_once(" to ").unwrap_or((words, words));
    Some(Versions {
        newest: Version(newest.parse().ok()?),
        oldest: Version(oldest.parse().ok()?),
    })
}
