//! The secret that gives access to an endpoint to clients without a certificate: Prometheus, a browser.

use std::fmt;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use harvestfs_protocol::durable;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::rand::{GetRandomFlags, getrandom};
use subtle::ConstantTimeEq;

use crate::Get;

/// 256 bits: too many to guess.
const RANDOM_BYTES: usize = 32;
/// Minimum and maximum length of a token in a file.
const TEXT_BYTES_MIN: usize = 16;
const TEXT_BYTES_MAX: usize = 256;

/// The query parameter that contains a token.
const PARAMETER: &str = "token";
/// The characters escaped in the query. The unreserved characters (RFC 3986, section 2.3) are not, so that tokens made
/// here appear unchanged.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Errors of a token's file.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Other users of the machine can read the file.
    #[error("{} can be read by others (mode {mode:03o}): run `chmod 600` on it", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file contains something else.
    #[error(
        "{} holds no token: one line of {TEXT_BYTES_MIN} to {TEXT_BYTES_MAX} visible ASCII characters",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
    },
}

/// A secret. Its `Debug` does not show it.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Creates a new token and writes it to a file that only its owner can read.
    ///
    /// # Errors
    /// [`TokenError::Io`]; an existing file is not replaced.
    pub fn create(path: &Path) -> Result<(), TokenError> {
        let error = |source| TokenError::Io {
            action: "write",
            path: path.to_owned(),
            source,
        };
        let mut random = [0; RANDOM_BYTES];
        getrandom(&mut random, GetRandomFlags::empty()).map_err(|errno| error(errno.into()))?;
        if path.try_exists().map_err(error)? {
            return Err(error(io::ErrorKind::AlreadyExists.into()));
        }
        let line = format!("{}\n", BASE64_URL_SAFE_NO_PAD.encode(random));
        durable::replace_file(path, line.as_bytes(), 0o600).map_err(error)
    }

    /// Reads the token from a file.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn load(path: &Path) -> Result<Self, TokenError> {
        let error = |source| TokenError::Io {
            action: "read",
            path: path.to_owned(),
            source,
        };
        let mode = fs::metadata(path).map_err(error)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(TokenError::Exposed {
                path: path.to_owned(),
                mode,
            });
        }
        let text = fs::read_to_string(path).map_err(error)?;
        let text = text.trim_end();
        let fits = (TEXT_BYTES_MIN..=TEXT_BYTES_MAX).contains(&text.len());
        if fits && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            Ok(Self(text.to_owned()))
        } else {
            Err(TokenError::Malformed {
                path: path.to_owned(),
            })
        }
    }

    /// Whether the value of an `Authorization` header proves knowledge of the token: as `Bearer`, or as the password
    /// of `Basic`, which browsers ask for. Compares in constant time.
    pub(crate) fn is_in(&self, authorization: &[u8]) -> bool {
        let scheme = |name: &str| {
            let (scheme, value) = authorization.split_at_checked(name.len())?;
            scheme
                .eq_ignore_ascii_case(name.as_bytes())
                .then_some(value)
        };
        if let Some(bearer) = scheme("Bearer ") {
            return self.equals(bearer);
        }
        let Some(basic) = scheme("Basic ") else {
            return false;
        };
        let Ok(pair) = base64::prelude::BASE64_STANDARD.decode(basic) else {
            return false;
        };
        let password = pair.iter().position(|&byte| byte == b':');
        password.is_some_and(|colon| self.equals(&pair[colon + 1..]))
    }

    /// The URL of a page that is opened with the token.
    #[must_use]
    pub fn in_address(&self, listen: SocketAddr) -> String {
        let token = utf8_percent_encode(&self.0, RESERVED);
        format!("http://{listen}/?{PARAMETER}={token}")
    }

    /// Whether the URL of a request contains the token.
    pub(crate) fn is_in_query(&self, request: &Get) -> bool {
        let given = request.parameter(PARAMETER);
        given.is_some_and(|given| self.equals(&given))
    }

    /// The cookie that a browser is to send with each further request. Browsers send it to other servers on this
    /// machine, too, so its name contains the port of the endpoint.
    pub(crate) fn cookie(&self, port: u16) -> String {
        let value = BASE64_URL_SAFE_NO_PAD.encode(&self.0);
        format!(
            "{}{value}; Path=/; HttpOnly; SameSite=Strict",
            cookie_start(port)
        )
    }

    /// Whether one of the cookies of a request is that of [`Token::cookie`].
    pub(crate) fn is_in_cookies(&self, cookies: &[u8], port: u16) -> bool {
        let start = cookie_start(port);
        let value = BASE64_URL_SAFE_NO_PAD.encode(&self.0);
        cookies
            .split(|&byte| byte == b';')
            .filter_map(|cookie| cookie.trim_ascii().strip_prefix(start.as_bytes()))
            .any(|given| value.as_bytes().ct_eq(given).into())
    }

    fn equals(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }
}

fn cookie_start(port: u16) -> String {
    format!("harvestfs-{port}=")
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_kept_private_and_recognised() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        Token::create(&path).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(Token::create(&path).is_err(), "never replaced");
        let token = Token::load(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let text = text.trim_end();
        assert!(!format!("{token:?}").contains(text));

        assert!(token.is_in(format!("Bearer {text}").as_bytes()));
        assert!(token.is_in(format!("bearer {text}").as_bytes()));
        let basic = |pair: String| {
            format!("Basic {}", base64::prelude::BASE64_STANDARD.encode(pair)).into_bytes()
        };
        assert!(token.is_in(&basic(format!("me:{text}"))));
        for wrong in [
            b"Bearer ".to_vec(),
            format!("Bearer {}", &text[1..]).into_bytes(),
            text.as_bytes().to_vec(),
            basic(text.to_owned()),
            basic(format!("{text}:")),
            b"Basic %%%".to_vec(),
            b"Digest x".to_vec(),
        ] {
            assert!(!token.is_in(&wrong), "{}", String::from_utf8_lossy(&wrong));
        }
    }

    #[test]
    fn a_browser_shows_the_token_by_its_address_and_then_by_a_cookie() {
        for text in [
            "a-token_that-is-long-enough",
            "one;with=all&that+is%special, and",
        ] {
            let token = Token(text.to_owned());
            let address = token.in_address(([127, 0, 0, 1], 7).into());
            let query = address.strip_prefix("http://127.0.0.1:7/?").unwrap();
            assert!(token.is_in_query(&Get::new("/", query)));
            assert!(!token.is_in_query(&Get::new("/", "")));
            assert!(!token.is_in_query(&Get::new("/", &query[..query.len() - 1])));

            let cookie = token.cookie(7);
            assert!(
                cookie.ends_with("; Path=/; HttpOnly; SameSite=Strict"),
                "{cookie}"
            );
            let sent = cookie.split(';').next().unwrap();
            assert!(token.is_in_cookies(sent.as_bytes(), 7));
            assert!(token.is_in_cookies(format!("a=b; {sent}; c").as_bytes(), 7));
            assert!(
                !token.is_in_cookies(sent.as_bytes(), 8),
                "it is of another server"
            );
            assert!(!token.is_in_cookies(&sent.as_bytes()[..sent.len() - 1], 7));
            assert!(!token.is_in_cookies(b"harvestfs-7=", 7));
            assert!(!token.is_in_cookies(format!("x{sent}").as_bytes(), 7));
        }
    }

    #[test]
    fn a_file_that_others_read_or_that_holds_no_token_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        Token::create(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(
            Token::load(&path),
            Err(TokenError::Exposed { mode: 0o644, .. })
        ));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        for text in [
            "",
            "short",
            "two words that are long enough",
            "ä-long-enough-for-a-token",
        ] {
            fs::write(&path, text).unwrap();
            assert!(
                matches!(Token::load(&path), Err(TokenError::Malformed { .. })),
                "{text}"
            );
        }
    }
}
