//! Errors between two parts of the cluster.

use std::net::SocketAddr;
use std::time::Duration;

use crate::codec::WireError;
use crate::identity::Peer;

/// Why a connection is closed; a number that both sides know, in addition to a text for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CloseCode(pub u32);

impl CloseCode {
    /// The part stops, or no longer needs the connection.
    pub const DONE: CloseCode = CloseCode(0);
    /// The two sides have no version of the protocol in common.
    pub const VERSION_MISMATCH: CloseCode = CloseCode(1);
    /// The other side violated the protocol.
    pub const PROTOCOL_VIOLATION: CloseCode = CloseCode(2);
    /// The certificate does not name a part of a HarvestFS cluster.
    pub const UNKNOWN_PEER: CloseCode = CloseCode(3);
    /// The other side does not read what is sent to it.
    pub const TOO_SLOW: CloseCode = CloseCode(4);
    /// The certificate does not allow what was asked for.
    pub const NOT_ALLOWED: CloseCode = CloseCode(5);
    /// The address has reached its limit of connections; try again later.
    pub const TOO_MANY_CONNECTIONS: CloseCode = CloseCode(6);
}

/// Why one direction of a stream is abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamCode(pub u32);

impl StreamCode {
    /// The receiver does not need the rest.
    pub const CANCELLED: StreamCode = StreamCode(0);
    /// The sender failed in the middle.
    pub const FAILED: StreamCode = StreamCode(2);
}

/// Why a connection could not be made, broke, or why a stream ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The local address cannot be used.
    #[error("cannot use the address {addr}: {reason}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// The error of the operating system.
        reason: String,
    },
    /// Key and certificates cannot be used for TLS.
    #[error("the identity cannot be used for TLS: {reason}")]
    Identity {
        /// Why.
        reason: String,
    },
    /// The endpoint was closed by this side.
    #[error("this endpoint is closed")]
    EndpointClosed,
    /// The endpoint cannot dial the address.
    #[error("cannot dial {addr}: {reason}")]
    Dial {
        /// The address.
        addr: SocketAddr,
        /// Why.
        reason: String,
    },
    /// This side does not trust the other's certificate, or it belongs to another peer.
    #[error("the peer's certificate is not accepted: {reason}")]
    PeerNotTrusted {
        /// Why.
        reason: String,
    },
    /// The other side does not trust this side's certificate, or received none.
    #[error("the peer does not accept this side's certificate: {reason}")]
    RefusedByPeer {
        /// Why, as far as TLS reports it.
        reason: String,
    },
    /// Another peer answered than the expected one.
    #[error("{expected} was expected, but it is {actual}")]
    WrongPeer {
        /// The expected peer.
        expected: Peer,
        /// The actual peer.
        actual: Peer,
    },
    /// The deadline expired.
    #[error("{what} took longer than {} ms", deadline.as_millis())]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// How long.
        deadline: Duration,
    },
    /// The other side closed the connection.
    #[error("closed by the peer (code {}): {reason}", code.0)]
    ClosedByPeer {
        /// Its code.
        code: CloseCode,
        /// Its text for people.
        reason: String,
    },
    /// This side closed the connection.
    #[error("the connection was closed by this side")]
    Closed,
    /// The other side is silent or unreachable.
    #[error("the connection was lost: {reason}")]
    Lost {
        /// What is known.
        reason: String,
    },
    /// The other side abandoned sending.
    #[error("the stream was reset by the peer (code {})", code.0)]
    StreamReset {
        /// Its code.
        code: StreamCode,
    },
    /// The other side abandoned receiving.
    #[error("the stream was stopped by the peer (code {})", code.0)]
    StreamStopped {
        /// Its code.
        code: StreamCode,
    },
    /// The stream was finished, reset or stopped by this side, or an earlier send was cancelled in the middle of a
    /// frame.
    #[error("the stream is no longer usable")]
    StreamUnusable,
    /// The received bytes violate the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// TLS alerts travel as these transport error codes plus the number of the alert (RFC 9001, 4.8).
const TLS_ALERT_BASE: u64 = 0x100;

impl From<quinn::ConnectionError> for TransportError {
    fn from(error: quinn::ConnectionError) -> Self {
        use quinn::ConnectionError as E;
        match error {
            E::VersionMismatch => Self::Lost {
                reason: "the peer speaks another version of QUIC".to_owned(),
            },
            E::TransportError(error) => match tls_alert(error.code) {
                Some(_) => Self::PeerNotTrusted {
                    reason: error.reason,
                },
                None => Self::Lost {
                    reason: error.to_string(),
                },
            },
            E::ConnectionClosed(close) => match tls_alert(close.error_code) {
                Some(alert) => Self::RefusedByPeer {
                    reason: describe_alert(alert),
                },
                None => Self::Lost {
                    reason: close.to_string(),
                },
            },
            E::ApplicationClosed(close) => Self::ClosedByPeer {
                // This protocol never sends codes of more than 32 bits.
                code: CloseCode(u32::try_from(close.error_code.into_inner()).unwrap_or(u32::MAX)),
                reason: String::from_utf8_lossy(&close.reason).into_owned(),
            },
            E::Reset => Self::Lost {
                reason: "the peer was restarted".to_owned(),
            },
            E::TimedOut => Self::Lost {
                reason: "the peer is silent".to_owned(),
            },
            E::LocallyClosed => Self::Closed,
            E::CidsExhausted => Self::Lost {
                reason: "no connection ids are left".to_owned(),
            },
        }
    }
}

impl From<quinn::ReadError> for TransportError {
    fn from(error: quinn::ReadError) -> Self {
        match error {
            quinn::ReadError::Reset(code) => Self::StreamReset {
                code: stream_code(code),
            },
            quinn::ReadError::ConnectionLost(error) => error.into(),
            quinn::ReadError::ClosedStream
            | quinn::ReadError::IllegalOrderedRead
            | quinn::ReadError::ZeroRttRejected => Self::StreamUnusable,
        }
    }
}

impl From<quinn::WriteError> for TransportError {
    fn from(error: quinn::WriteError) -> Self {
        match error {
            quinn::WriteError::Stopped(code) => Self::StreamStopped {
                code: stream_code(code),
            },
            quinn::WriteError::ConnectionLost(error) => error.into(),
            quinn::WriteError::ClosedStream | quinn::WriteError::ZeroRttRejected => {
                Self::StreamUnusable
            }
        }
    }
}

fn stream_code(code: quinn::VarInt) -> StreamCode {
    StreamCode(u32::try_from(code.into_inner()).unwrap_or(u32::MAX))
}

fn tls_alert(code: quinn::TransportErrorCode) -> Option<u8> {
    let alert = u64::from(code).checked_sub(TLS_ALERT_BASE)?;
    u8::try_from(alert).ok()
}

fn describe_alert(alert: u8) -> String {
    let known = match rustls::AlertDescription::from(alert) {
        rustls::AlertDescription::CertificateRequired => "it got no certificate",
        rustls::AlertDescription::UnknownCA => "the certificate is from another authority",
        rustls::AlertDescription::DecryptError => {
            "the certificate or its signature is from another authority"
        }
        rustls::AlertDescription::CertificateExpired => "the certificate has expired",
        rustls::AlertDescription::NoApplicationProtocol => "it does not speak HarvestFS",
        other => return format!("TLS alert {other:?}"),
    };
    known.to_owned()
}

/// Why a call got no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// The connection was lost. Whether the request was executed is unknown.
    #[error("the connection was lost before the answer came: {reason}")]
    ConnectionLost {
        /// Why it was lost.
        reason: String,
    },
    /// No answer in time. Whether the request was executed is unknown.
    #[error("no answer within {} ms", deadline.as_millis())]
    Deadline {
        /// The time that was given.
        deadline: Duration,
    },
    /// The server abandoned the request without an answer, for example because it is stopping.
    #[error("the server gave the request up")]
    Abandoned,
    /// The request cannot be encoded; it was not sent.
    #[error("the request cannot be sent: {0}")]
    Encode(WireError),
}
