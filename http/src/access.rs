//! Access control for clients.

use std::net::IpAddr;
use std::sync::Arc;

use harvestfs_protocol::identity::{Identity, Peer, Role};
use hyper::StatusCode;
use hyper::header::{self, HeaderMap};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::CertificateDer;
use rustls::server::WebPkiClientVerifier;
use tokio_rustls::TlsAcceptor;

use crate::{Answer, Get, Token};

/// The clients that may make requests.
#[derive(Clone, Debug)]
pub enum Access {
    /// Any client that can reach it, without TLS; only for an address of the loopback interface.
    Anyone,
    /// Clients that know the token, without TLS; only for an address of the loopback interface, which other users of
    /// the machine can reach.
    Token(Token),
    /// With TLS, clients that have an administrator's certificate or the token.
    Proven {
        /// Certificate and key of the listening part.
        identity: Identity,
        /// The token.
        token: Token,
    },
}

/// [`Access`], ready to be checked.
pub(crate) enum Guard {
    Anyone,
    Token { token: Token, port: u16 },
    Proven { tls: TlsAcceptor, token: Token },
}

/// The decision on a request.
pub(crate) enum Admission {
    /// It is answered.
    Given,
    /// It is answered, and the browser gets a cookie that grants it access from now on.
    GivenWithCookie(String),
    /// It is refused with this answer.
    Refused(Answer),
}

impl Guard {
    /// `port` is the listening port.
    pub(crate) fn new(access: Access, port: u16) -> Result<Self, rustls::Error> {
        Ok(match access {
            Access::Anyone => Self::Anyone,
            Access::Token(token) => Self::Token { token, port },
            Access::Proven { identity, token } => Self::Proven {
                tls: acceptor(&identity)?,
                token,
            },
        })
    }

    /// Decides whether a request is answered. `certificate` is the one that the client proved in the handshake.
    pub(crate) fn admit(
        &self,
        request: &Get,
        headers: &HeaderMap,
        certificate: Option<&CertificateDer<'_>>,
    ) -> Admission {
        match self {
            Self::Anyone => not_here(headers).map_or(Admission::Given, Admission::Refused),
            Self::Token { token, port } => {
                if let Some(refusal) = not_here(headers) {
                    return Admission::Refused(refusal);
                }
                let mut cookies = headers.get_all(header::COOKIE).iter();
                if shows(headers, token)
                    || cookies.any(|cookies| token.is_in_cookies(cookies.as_bytes(), *port))
                {
                    return Admission::Given;
                }
                if token.is_in_query(request) {
                    return Admission::GivenWithCookie(token.cookie(*port));
                }
                let how = "open the address that `harvestfs up` prints, or show the token as bearer or \
                           password";
                Admission::Refused(Answer::plain(StatusCode::UNAUTHORIZED, how))
            }
            Self::Proven { token, .. } => {
                let is_admin = certificate
                    .and_then(|certificate| Peer::from_certificate(certificate).ok())
                    .is_some_and(|peer| peer.role == Role::Admin);
                if is_admin || shows(headers, token) {
                    return Admission::Given;
                }
                let how = "show an administrator's certificate, or the token as bearer or password";
                Admission::Refused(Answer::plain(StatusCode::UNAUTHORIZED, how))
            }
        }
    }
}

/// Whether a request presents the token as bearer or password.
fn shows(headers: &HeaderMap, token: &Token) -> bool {
    let authorization = headers.get(header::AUTHORIZATION);
    authorization.is_some_and(|value| token.is_in(value.as_bytes()))
}

/// The refusal of a request by a foreign page whose host name was made to resolve to this machine: such a request
/// carries that name.
fn not_here(headers: &HeaderMap) -> Option<Answer> {
    let host = headers.get(header::HOST);
    let is_here = host.is_none_or(|host| is_this_machine(host.as_bytes()));
    let why = "this is answered only under the name localhost or an address of it";
    (!is_here).then(|| Answer::plain(StatusCode::FORBIDDEN, why))
}

/// Whether the value of a `Host` header names this machine by an address or as `localhost`.
fn is_this_machine(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else {
        return false;
    };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// TLS under the cluster's certificate; a client certificate is verified if there is one.
fn acceptor(identity: &Identity) -> Result<TlsAcceptor, rustls::Error> {
    let provider = Arc::new(default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(identity.authority().clone())?;
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![identity.certificate().clone()], identity.clone_key())?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_this_machine() {
        for yes in [
            "localhost",
            "localhost:80",
            "127.0.0.1",
            "127.0.0.2:9311",
            "[::1]:9311",
            "[::1]",
        ] {
            assert!(is_this_machine(yes.as_bytes()), "{yes}");
        }
        for no in [
            "",
            "evil.example",
            "evil.example:9311",
            "10.0.0.1:9311",
            "localhost.evil.example",
        ] {
            assert!(!is_this_machine(no.as_bytes()), "{no}");
        }
        assert!(!is_this_machine(b"\xff"));
    }
}
