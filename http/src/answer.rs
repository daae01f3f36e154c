//! Requests and answers, as sites see them.

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};
use percent_encoding::percent_decode_str;

/// Scripts and styles are loaded from this server only; no other page may frame ours.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'";

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Get {
    /// The path as it was sent; starts with `/`.
    pub path: String,
    query: String,
}

impl Get {
    /// A request for a path, with the part after the question mark.
    #[must_use]
    pub fn new(path: &str, query: &str) -> Self {
        Self {
            path: path.to_owned(),
            query: query.to_owned(),
        }
    }

    /// The value of a parameter, decoded, as bytes, because file names are bytes.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<Vec<u8>> {
        let pairs = self.query.split('&');
        let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
        let (_, value) = pairs.find(|(key, _)| *key == name)?;
        let spaces = value.replace('+', " ");
        Some(percent_decode_str(&spaces).collect())
    }
}

/// The answer of a site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) content_type: &'static str,
    pub(crate) body: Bytes,
}

impl Answer {
    /// 200 with content.
    #[must_use]
    pub fn content(content_type: &'static str, body: impl Into<Bytes>) -> Self {
        Self {
            status: StatusCode::OK,
            content_type,
            body: body.into(),
        }
    }

    /// 400: the request makes no sense, and why.
    #[must_use]
    pub fn bad_request(why: &str) -> Self {
        Self::plain(StatusCode::BAD_REQUEST, why)
    }

    /// 404: there is no such resource.
    #[must_use]
    pub fn not_found(what: &str) -> Self {
        Self::plain(StatusCode::NOT_FOUND, what)
    }

    /// 503: not available now, and why.
    #[must_use]
    pub fn unavailable(why: &str) -> Self {
        Self::plain(StatusCode::SERVICE_UNAVAILABLE, why)
    }

    pub(crate) fn plain(status: StatusCode, text: &str) -> Self {
        Self {
            status,
            content_type: "text/plain; charset=utf-8",
            body: Bytes::from(format!("{text}\n")),
        }
    }

    pub(crate) fn into_response(self) -> Response<Full<Bytes>> {
        let wants_password = self.status == StatusCode::UNAUTHORIZED;
        let mut response = Response::new(Full::new(self.body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        for (name, value) in [
            (header::CONTENT_TYPE, self.content_type),
            (header::CACHE_CONTROL, "no-store"),
            (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        if wants_password {
            headers.insert(
                header::WWW_AUTHENTICATE,
                HeaderValue::from_static(
                    "Basic realm=\"HarvestFS: any name, the token as password\"",
                ),
            );
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_as_bytes() {
        let get = Get::new("/x", "a=1&path=%2Fb+c%FF&empty=&flag");
        assert_eq!(get.parameter("path"), Some(b"/b c\xff".to_vec()));
        assert_eq!(get.parameter("empty"), Some(Vec::new()));
        assert_eq!(get.parameter("flag"), None);
        assert_eq!(get.parameter("pat"), None);
    }
}
