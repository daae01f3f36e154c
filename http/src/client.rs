//! A client for HTTP services: one request per connection, all within a deadline.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
pub use hyper::Method;
use hyper::client::conn::http1;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// How long a request may take, including connecting and receiving the answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Maximum size of an answer: enough for the status of ten thousand nodes.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Maximum number of bytes of an answer that are shown in an error.
const SHOWN_BYTES_MAX: usize = 300;

/// Why a request to a service failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is invalid.
    #[error("`{0}` is no address of a service: http://HOST:PORT or https://HOST:PORT is one")]
    Address(String),
    /// The certificates of authorities are unusable.
    #[error("the certificates of authorities are of no use: {0}")]
    Authorities(String),
    /// A header value contains invalid characters.
    #[error("{0} holds something that a header cannot")]
    Header(&'static str),
    /// The service cannot be reached.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Host and port.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection to {address} broke: {source}")]
    Broken {
        /// Host and port.
        address: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There was no answer in time.
    #[error("{0} did not answer within {DEADLINE:?}")]
    Late(String),
    /// The answer's status is not a success.
    #[error("{address} answered {status} to {request}: {said}")]
    Status {
        /// Host and port.
        address: String,
        /// Method and path.
        request: String,
        /// The status.
        status: StatusCode,
        /// The beginning of the answer's body.
        said: String,
    },
}

/// The client of one service.
pub struct Client {
    host: String,
    port: u16,
    /// Prefix for the paths of requests, without a slash at the end.
    path: String,
    tls: Option<TlsConnector>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl fmt::Debug for Client {
    /// Omits headers, which may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the service at an address such as `http://host:8088`. For `https`, `authorities` are certificates
    /// in PEM.
    ///
    /// # Errors
    /// If the address or the certificates are unusable.
    pub fn new(address: &str, authorities: Option<&[u8]>) -> Result<Self, ClientError> {
        let bad = || ClientError::Address(address.to_owned());
        let uri: Uri = address.parse().map_err(|_| bad())?;
        let host = uri.host().ok_or_else(bad)?;
        let (tls, port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => (Some(connector(authorities.unwrap_or_default())?), 443),
            _ => return Err(bad()),
        };
        if uri.query().is_some() {
            return Err(bad());
        }
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(port),
            path: uri.path().trim_end_matches('/').to_owned(),
            tls,
            headers: Vec::new(),
        })
    }

    /// Adds a header to each request.
    ///
    /// # Errors
    /// If the value is invalid in a header.
    pub fn with_header(mut self, name: &'static str, value: &str) -> Result<Self, ClientError> {
        let mut value = HeaderValue::from_str(value).map_err(|_| ClientError::Header(name))?;
        value.set_sensitive(true);
        self.headers.push((HeaderName::from_static(name), value));
        Ok(self)
    }

    /// Host and port.
    #[must_use]
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Sends a `GET` request, and returns the body of the answer.
    ///
    /// # Errors
    /// Unless the answer is a success and arrives in time.
    pub async fn get(&self, path: &str) -> Result<Bytes, ClientError> {
        self.ask(Method::GET, path, "application/json", Bytes::new())
            .await
    }

    /// Sends a request with a body of this type, and returns the body of the answer.
    ///
    /// # Errors
    /// Unless the answer is a success and arrives in time.
    pub async fn ask(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        body: Bytes,
    ) -> Result<Bytes, ClientError> {
        let exchange = self.exchange(method, path, content_type, body);
        // Boxed, so that the HTTP client is compiled only here, once.
        let exchange: futures::future::BoxFuture<'_, _> = Box::pin(exchange);
        match timeout(DEADLINE, exchange).await {
            Ok(answer) => answer,
            Err(_) => Err(ClientError::Late(self.address())),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        body: Bytes,
    ) -> Result<Bytes, ClientError> {
        let connect = |source| ClientError::Connect {
            address: self.address(),
            source,
        };
        let stream = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(connect)?;
        let said = format!("{method} {path}");
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        let uri = format!("{}{path}", self.path);
        *request.uri_mut() = uri.parse().map_err(|_| ClientError::Address(uri))?;
        let headers = request.headers_mut();
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        let host = HeaderValue::from_str(&self.address());
        headers.insert(header::HOST, host.map_err(|_| ClientError::Header("host"))?);
        for (name, value) in &self.headers {
            headers.insert(name, value.clone());
        }
        let (status, body) = match &self.tls {
            None => self.send(stream, request).await?,
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone());
                let name = name.map_err(|_| ClientError::Address(self.host.clone()))?;
                let stream = tls.connect(name, stream).await.map_err(connect)?;
                self.send(stream, request).await?
            }
        };
        if status.is_success() {
            return Ok(body);
        }
        let shown = &body[..body.len().min(SHOWN_BYTES_MAX)];
        Err(ClientError::Status {
            address: self.address(),
            request: said,
            status,
            said: String::from_utf8_lossy(shown).trim().to_owned(),
        })
    }

    async fn send(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(error))?;
        let answer = async {
            let answer = sender.send_request(request).await;
            let (head, body) = answer.map_err(|error| self.broken(error))?.into_parts();
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| self.broken(error))?;
            Ok((head.status, body.to_bytes()))
        };
        // Polling the connection drives the request; the connection may end before the answer has been received from
        // it.
        let connection = async {
            let _ = connection.await;
            std::future::pending().await
        };
        tokio::select! {
            biased;
            answer = answer => answer,
            () = connection => unreachable!("it is pending"),
        }
    }

    fn broken(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
        ClientError::Broken {
            address: self.address(),
            source: source.into(),
        }
    }
}

fn connector(authorities: &[u8]) -> Result<TlsConnector, ClientError> {
    let bad = |why: String| ClientError::Authorities(why);
    let mut roots = rustls::RootCertStore::empty();
    for certificate in pem::parse_many(authorities).map_err(|error| bad(error.to_string()))? {
        let certificate = CertificateDer::from(certificate.into_contents());
        roots
            .add(certificate)
            .map_err(|error| bad(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(bad("none is given, and https needs one".to_owned()));
    }
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| bad(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Answer, Endpoint, Get, Site};

    #[test]
    fn what_is_no_address_is_named() {
        for wrong in ["", "host:8088", "ftp://host", "http://", "http://host/?a=b"] {
            let error = Client::new(wrong, None).unwrap_err().to_string();
            assert!(
                error.contains("is no address") || error.contains(wrong),
                "{error}"
            );
        }
        let error = Client::new("https://host", None).unwrap_err().to_string();
        assert!(error.contains("https needs one"), "{error}");
        let addresses = ["http://h", "http://h:1/", "http://[::1]:2/a/"]
            .map(|it| Client::new(it, None).unwrap().address());
        assert_eq!(addresses, ["h:80", "h:1", "[::1]:2"]);
        let client = Client::new("http://h", None).unwrap();
        assert!(client.with_header("authorization", "a\nb").is_err());
    }

    struct Echo;

    impl Site for Echo {
        fn answer<'a>(&'a self, get: &'a Get) -> futures::future::BoxFuture<'a, Answer> {
            let status = if get.path == "/there" {
                StatusCode::OK
            } else {
                StatusCode::NOT_FOUND
            };
            Box::pin(async move { Answer::plain(status, "said") })
        }
    }

    #[tokio::test]
    async fn answers_and_refusals_are_told_apart() {
        let here = ([127, 0, 0, 1], 0).into();
        let endpoint = Endpoint::bind(here, Access::Anyone).await.unwrap();
        let url = endpoint.url();
        let server = tokio::spawn(endpoint.serve(Echo));
        let client = Client::new(&url, None).unwrap();
        let body = client.get("/there").await.unwrap();
        assert!(body.starts_with(b"said"), "{body:?}");
        let error = client.get("/else").await.unwrap_err().to_string();
        assert!(
            error.contains("404 Not Found to GET /else: said"),
            "{error}"
        );
        server.abort();
        let _ = server.await;
        let error = client.get("/there").await.unwrap_err();
        assert!(matches!(error, ClientError::Connect { .. }), "{error}");
    }
}
