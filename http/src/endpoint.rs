//! The listening socket, and one task for each connection.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::access::{Admission, Guard};
use crate::places::Places;
use crate::prompt::Prompt;
use crate::{Access, Answer, Get, Site};

/// How long the TLS handshake may take.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
/// How long receiving the head of a request may take; also how long a connection may be idle.
const HEAD_DEADLINE: Duration = Duration::from_secs(60);
/// How long producing an answer may take.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// How long the client may take to receive an answer.
const RECEIVE_DEADLINE: Duration = Duration::from_secs(30);
/// How long a connection may last: browsers make a new one.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(3600);
/// Maximum size of a request's head.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// The pause after a failure to accept: too many open files, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why an endpoint cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The endpoint cannot listen on the address.
    #[error("cannot listen on {addr} for HTTP: {source}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The configuration is without TLS, and the address can be reached from other machines.
    #[error(
        "{0} can be reached from other machines: access = \"token\" and access = \"anyone\" are for addresses \
         such as 127.0.0.1; write access = \"proven\""
    )]
    NotLoopback(SocketAddr),
    /// The certificate is unusable for TLS.
    #[error("the certificate is of no use for HTTP: {0}")]
    Certificate(#[from] rustls::Error),
}

/// A listening socket, and the access that it grants.
pub struct Endpoint {
    listener: TcpListener,
    local_addr: SocketAddr,
    guard: Guard,
}

impl Endpoint {
    /// Starts to listen; connections wait until [`Endpoint::serve`] runs.
    ///
    /// # Errors
    /// [`HttpError`].
    pub async fn bind(addr: SocketAddr, access: Access) -> Result<Self, HttpError> {
        let has_tls = matches!(access, Access::Proven { .. });
        if !has_tls && !addr.ip().is_loopback() {
            return Err(HttpError::NotLoopback(addr));
        }
        let error = |source| HttpError::Listen { addr, source };
        let listener = TcpListener::bind(addr).await.map_err(error)?;
        let local_addr = listener.local_addr().map_err(error)?;
        Ok(Self {
            guard: Guard::new(access, local_addr.port())?,
            local_addr,
            listener,
        })
    }

    /// The URL of the endpoint, without the token.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = match self.guard {
            Guard::Anyone | Guard::Token { .. } => "http",
            Guard::Proven { .. } => "https",
        };
        format!("{scheme}://{}/", self.local_addr)
    }

    /// Serves a site until the future is dropped; open connections end a little later by themselves.
    pub fn serve(self, site: impl Site) -> BoxFuture<'static, ()> {
        self.serve_site(Arc::new(site))
    }

    /// Boxed, and for any site, so that the HTTP server is compiled only here, once.
    fn serve_site(self, site: Arc<dyn Site>) -> BoxFuture<'static, ()> {
        Box::pin(self.accept(site))
    }

    async fn accept(self, site: Arc<dyn Site>) {
        let guard = Arc::new(self.guard);
        let mut places = Places::new();
        while let Some(place) = places.wait().await {
            let (stream, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "an HTTP connection was not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Some(place) = places.give(place, peer.ip()) else {
                continue;
            };
            let (site, guard) = (Arc::clone(&site), Arc::clone(&guard));
            tokio::spawn(async move {
                let served = serve_connection(stream, &guard, &*site);
                let _ = timeout(CONNECTION_DEADLINE, served).await;
                drop(place);
            });
        }
    }
}

async fn serve_connection(stream: TcpStream, guard: &Arc<Guard>, site: &dyn Site) {
    match &**guard {
        Guard::Anyone | Guard::Token { .. } => serve_requests(stream, None, guard, site).await,
        Guard::Proven { tls, .. } => match timeout(HANDSHAKE_DEADLINE, tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                let certificates = stream.get_ref().1.peer_certificates();
                let certificate = certificates.and_then(|all| all.first()).cloned();
                serve_requests(
                    stream,
                    certificate.map(CertificateDer::into_owned),
                    guard,
                    site,
                )
                .await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "an HTTP connection was not established"),
            Err(_) => tracing::debug!("an HTTP connection was not established in time"),
        },
    }
}

async fn serve_requests(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    certificate: Option<CertificateDer<'static>>,
    guard: &Arc<Guard>,
    site: &dyn Site,
) {
    let service = service_fn(|request: Request<Incoming>| {
        let get = Get::new(request.uri().path(), request.uri().query().unwrap_or(""));
        let admission = guard.admit(&get, request.headers(), certificate.as_ref());
        async move { Ok::<_, Infallible>(respond(request.method(), &get, admission, site).await) }
    });
    let stream = Prompt::new(stream, RECEIVE_DEADLINE);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "an HTTP connection broke");
    }
}

async fn respond(
    method: &Method,
    get: &Get,
    admission: Admission,
    site: &dyn Site,
) -> Response<Full<Bytes>> {
    let cookie = match admission {
        Admission::Refused(refusal) => {
            let mut response = refusal.into_response();
            let close = HeaderValue::from_static("close");
            // A client without access must not hold a slot for as long as it likes.
            response.headers_mut().insert(header::CONNECTION, close);
            return response;
        }
        Admission::Given => None,
        Admission::GivenWithCookie(cookie) => Some(cookie),
    };
    let answer = if method != Method::GET && method != Method::HEAD {
        Answer::plain(
            StatusCode::METHOD_NOT_ALLOWED,
            "only GET: nothing can be changed here",
        )
    } else {
        match timeout(ANSWER_DEADLINE, site.answer(get)).await {
            Ok(answer) => answer,
            Err(_) => Answer::unavailable("there was no answer in time; try again"),
        }
    };
    let mut response = answer.into_response();
    if let Some(cookie) = cookie.and_then(|cookie| HeaderValue::from_str(&cookie).ok()) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpSocket;

    use super::*;
    use crate::Token;

    const DEADLINE: Duration = Duration::from_secs(20);
    /// The limit for one address: a quarter of all connections.
    const CONNECTIONS_OF_ADDRESS: usize = 16;

    struct Fine;

    impl Site for Fine {
        fn answer<'a>(&'a self, _get: &'a Get) -> BoxFuture<'a, Answer> {
            Box::pin(async { Answer::content("text/plain", "fine") })
        }
    }

    async fn serve(access: Access) -> SocketAddr {
        let here = ([127, 0, 0, 1], 0).into();
        let endpoint = Endpoint::bind(here, access).await.unwrap();
        let address = endpoint.local_addr;
        tokio::spawn(endpoint.serve(Fine));
        address
    }

    async fn ask(stream: &mut TcpStream) {
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        // A connection without a slot may be closed by now: its answer shows that.
        let _ = stream.write_all(request).await;
    }

    /// Reads until the connection ends.
    async fn rest(stream: &mut TcpStream) -> String {
        let mut said = String::new();
        let read = timeout(DEADLINE, stream.read_to_string(&mut said)).await;
        // Either kind of end, orderly or not.
        let _ = read.expect("the connection is closed");
        said
    }

    /// Whether there is a successful answer, after which the connection remains open.
    async fn is_served(stream: &mut TcpStream) -> bool {
        ask(stream).await;
        let mut said = [0; 4096];
        let length = timeout(DEADLINE, stream.read(&mut said)).await;
        let length = length.expect("an answer or an end").unwrap_or(0);
        said[..length].starts_with(b"HTTP/1.1 200 ")
    }

    #[tokio::test]
    async fn a_refusal_ends_the_connection() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        Token::create(&path).unwrap();
        let address = serve(Access::Token(Token::load(&path).unwrap())).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        ask(&mut stream).await;
        let said = rest(&mut stream).await;
        assert!(said.starts_with("HTTP/1.1 401 "), "{said}");
    }

    #[tokio::test]
    async fn one_address_does_not_take_all_connections() {
        let address = serve(Access::Anyone).await;
        let mut open = Vec::new();
        for _ in 0..CONNECTIONS_OF_ADDRESS {
            let mut stream = TcpStream::connect(address).await.unwrap();
            assert!(is_served(&mut stream).await);
            open.push(stream);
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        ask(&mut stream).await;
        assert_eq!(rest(&mut stream).await, "");
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 2], 0).into()).unwrap();
        let mut other = socket.connect(address).await.unwrap();
        assert!(is_served(&mut other).await);
        // A slot is released when a connection ends.
        open.pop();
        timeout(DEADLINE, async {
            loop {
                let mut stream = TcpStream::connect(address).await.unwrap();
                if is_served(&mut stream).await {
                    break;
                }
            }
        })
        .await
        .expect("there is a place again");
    }
}
