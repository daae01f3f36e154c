//! The settings of QUIC and TLS, each with the measurement or the reason behind it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{IdleTimeout, MtuDiscoveryConfig, VarInt};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring as ring_provider;

use super::TransportError;
use crate::identity::Identity;
use crate::machine;
use crate::version::Versions;

/// The protocol's name in TLS. The version is exchanged in the hello, so that a version mismatch can be distinguished
/// from a foreign peer.
const ALPN: &[u8] = b"harvestfs";

/// Most streams that a peer may have open simultaneously on one connection: each transfer uses one, and a client has
/// no use for more.
pub(crate) const STREAMS_MAX: u32 = 1024;

/// A silent peer is given up after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which an idle connection sends keepalives, so that three may be lost.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(3);

/// What a peer may send on one stream before it is read. On a network, enough for 10 Gbit/s at 1 ms; less on
/// loopback, because waiting data falls out of the processor's cache.
const NETWORK_STREAM_WINDOW_BYTES: u32 = 2 * 1024 * 1024;
const LOOPBACK_STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
/// What a peer may send on one connection before it is read, and what is kept until it is acknowledged: enough for
/// several streams at full speed.
const CONNECTION_WINDOW_BYTES: u32 = 16 * 1024 * 1024;
/// Initial congestion window; larger ones only cause queueing on fast networks.
const INITIAL_CONGESTION_WINDOW_BYTES: u64 = 1024 * 1024;

/// Loopback carries packets of nearly 64 KiB; packets below 32 KiB fit in pairs into one system call.
const LOOPBACK_INITIAL_MTU_BYTES: u16 = 16_000;
const LOOPBACK_MTU_MAX_BYTES: u16 = 32_700;
/// The packet size that QUIC requires of every path.
const NETWORK_INITIAL_MTU_BYTES: u16 = 1_200;
/// The size of jumbo frames, less the headers of IP and UDP.
const NETWORK_MTU_MAX_BYTES: u16 = 8_900;

/// Packets that a peer on this machine may leave unacknowledged for up to 25 ms, unless it has something else to
/// send; the default is one. Each acknowledgement is a system call at both ends (three replicas took 13 % more
/// processor time). Networks, which lose packets, keep the default.
const LOOPBACK_UNACKNOWLEDGED_MAX: u32 = 10;

/// Round-trip time assumed before the first measurement: a lost handshake packet is sent again after three of these.
/// The default of 333 ms is meant for the Internet, not for a cluster.
const INITIAL_RTT: Duration = Duration::from_millis(50);

/// The options of an endpoint.
#[derive(Clone, Debug)]
pub struct TransportOptions {
    /// Versions of the protocol that this side speaks. Only tests change them.
    pub versions: Versions,
    /// How long one send may wait for the peer to read before the stream is abandoned.
    pub send_deadline: Duration,
    /// Deadline for an accepted connection to establish its peer and version.
    pub handshake_deadline: Duration,
    /// Size of the socket's receive and send buffers in bytes, as far as the system allows.
    pub socket_buffer_bytes: usize,
    /// Seed of connection ids and the like, so that a simulation is repeatable; random if absent.
    pub rng_seed: Option<[u8; 32]>,
    /// Whether streams to and from peers on this host bypass the network. Only tests and comparisons turn this off.
    pub local_streams: bool,
}

impl Default for TransportOptions {
    fn default() -> Self {
        Self {
            versions: Versions::OURS,
            send_deadline: Duration::from_secs(30),
            handshake_deadline: Duration::from_secs(5),
            // Has room for a burst of several connections' windows; the kernel drops the excess.
            socket_buffer_bytes: 8 * 1024 * 1024,
            rng_seed: None,
            local_streams: true,
        }
    }
}

/// Settings for both directions, and for the two kinds of path.
pub(crate) struct QuicConfigs {
    client_crypto: Arc<QuicClientConfig>,
    server_crypto: Option<Arc<QuicServerConfig>>,
    loopback: Arc<quinn::TransportConfig>,
    network: Arc<quinn::TransportConfig>,
}

impl std::fmt::Debug for QuicConfigs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QuicConfigs").finish_non_exhaustive()
    }
}

impl QuicConfigs {
    pub(crate) fn new(identity: &Identity) -> Result<Self, TransportError> {
        let provider = Arc::new(crypto_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(identity.authority().clone())
            .map_err(identity_error)?;
        let roots = Arc::new(roots);
        let server_crypto = if identity.peer().role.listens() {
            Some(server_crypto(identity, &provider, &roots)?)
        } else {
            None
        };
        Ok(Self {
            client_crypto: client_crypto(identity, &provider, roots)?,
            server_crypto,
            loopback: Arc::new(transport_config(
                LOOPBACK_INITIAL_MTU_BYTES,
                LOOPBACK_MTU_MAX_BYTES,
                LOOPBACK_STREAM_WINDOW_BYTES,
                Some(loopback_acknowledgements()),
            )),
            network: Arc::new(transport_config(
                // Probes for the size that a path carries are mostly padding, which is read byte by byte: a fifth of
                // the time of simulations, whose network carries all sizes.
                if machine::is_simulated() {
                    NETWORK_MTU_MAX_BYTES
                } else {
                    NETWORK_INITIAL_MTU_BYTES
                },
                NETWORK_MTU_MAX_BYTES,
                NETWORK_STREAM_WINDOW_BYTES,
                None,
            )),
        })
    }

    /// Whether this part accepts connections.
    pub(crate) fn listens(&self) -> bool {
        self.server_crypto.is_some()
    }

    /// Returns the settings to dial `remote`.
    pub(crate) fn client(&self, local: IpAddr, remote: IpAddr) -> quinn::ClientConfig {
        let mut config = quinn::ClientConfig::new(self.client_crypto.clone());
        config.transport_config(self.transport(local, remote));
        config
    }

    /// Returns the settings to accept a connection from `remote`; none if this part does not listen.
    pub(crate) fn server(&self, local: IpAddr, remote: IpAddr) -> Option<quinn::ServerConfig> {
        let mut config = quinn::ServerConfig::with_crypto(self.server_crypto.clone()?);
        config
            .transport_config(self.transport(local, remote))
            .max_incoming(INCOMING_MAX)
            .migration(false);
        Some(config)
    }

    fn transport(&self, local: IpAddr, remote: IpAddr) -> Arc<quinn::TransportConfig> {
        if stays_on_host(local, remote) {
            self.loopback.clone()
        } else {
            self.network.clone()
        }
    }
}

/// Whether packets between two addresses stay on this host: a packet to any of the host's own addresses goes over
/// loopback.
pub(super) fn stays_on_host(local: IpAddr, remote: IpAddr) -> bool {
    remote.to_canonical().is_loopback() || local.to_canonical() == remote.to_canonical()
}

/// Most handshakes that wait to be accepted; further ones are refused, so that a storm of dials after a restart
/// cannot exhaust memory.
const INCOMING_MAX: usize = 4096;

fn loopback_acknowledgements() -> quinn::AckFrequencyConfig {
    let mut acknowledgements = quinn::AckFrequencyConfig::default();
    acknowledgements.ack_eliciting_threshold(VarInt::from_u32(LOOPBACK_UNACKNOWLEDGED_MAX));
    acknowledgements
}

fn transport_config(
    initial_mtu: u16,
    max_mtu: u16,
    stream_window_bytes: u32,
    acknowledgements: Option<quinn::AckFrequencyConfig>,
) -> quinn::TransportConfig {
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(max_mtu);
    let mut congestion = quinn::congestion::CubicConfig::default();
    congestion.initial_window(INITIAL_CONGESTION_WINDOW_BYTES);
    let idle_timeout = IdleTimeout::try_from(IDLE_TIMEOUT).ok();

    let mut config = quinn::TransportConfig::default();
    config
        .max_idle_timeout(idle_timeout)
        .keep_alive_interval(Some(KEEP_ALIVE_INTERVAL))
        .max_concurrent_bidi_streams(VarInt::from_u32(STREAMS_MAX))
        // The hello is the only unidirectional stream.
        .max_concurrent_uni_streams(VarInt::from_u32(1))
        .stream_receive_window(VarInt::from_u32(stream_window_bytes))
        .receive_window(VarInt::from_u32(CONNECTION_WINDOW_BYTES))
        .send_window(u64::from(CONNECTION_WINDOW_BYTES))
        .initial_rtt(INITIAL_RTT)
        .initial_mtu(initial_mtu)
        .mtu_discovery_config(Some(discovery))
        .congestion_controller_factory(Arc::new(congestion))
        .ack_frequency_config(acknowledgements)
        // Datagrams are not part of the protocol.
        .datagram_receive_buffer_size(None);
    config
}

fn client_crypto(
    identity: &Identity,
    provider: &Arc<CryptoProvider>,
    roots: Arc<rustls::RootCertStore>,
) -> Result<Arc<QuicClientConfig>, TransportError> {
    let mut config = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(identity_error)?
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![identity.certificate().clone()], identity.clone_key())
        .map_err(identity_error)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // Every connection authenticates both peers again.
    config.resumption = rustls::client::Resumption::disabled();
    QuicClientConfig::try_from(config)
        .map(Arc::new)
        .map_err(identity_error)
}

fn server_crypto(
    identity: &Identity,
    provider: &Arc<CryptoProvider>,
    roots: &Arc<rustls::RootCertStore>,
) -> Result<Arc<QuicServerConfig>, TransportError> {
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
        roots.clone(),
        provider.clone(),
    )
    .build()
    .map_err(identity_error)?;
    let mut config = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(identity_error)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![identity.certificate().clone()], identity.clone_key())
        .map_err(identity_error)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.send_tls13_tickets = 0;
    QuicServerConfig::try_from(config)
        .map(Arc::new)
        .map_err(identity_error)
}

/// Returns the provider with the fastest cipher on this machine first: AES-128-GCM if the processor supports AES.
fn crypto_provider() -> CryptoProvider {
    use ring_provider::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let mut provider = ring_provider::default_provider();
    provider.cipher_suites = if processor_has_aes() {
        vec![
            TLS13_AES_128_GCM_SHA256,
            TLS13_AES_256_GCM_SHA384,
            TLS13_CHACHA20_POLY1305_SHA256,
        ]
    } else {
        // QUIC itself needs AES-128 for its first packets, so it remains in the list.
        vec![TLS13_CHACHA20_POLY1305_SHA256, TLS13_AES_128_GCM_SHA256]
    };
    provider
}

fn processor_has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

fn identity_error(error: impl std::fmt::Display) -> TransportError {
    TransportError::Identity {
        reason: error.to_string(),
    }
}
