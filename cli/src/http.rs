//! `[http]` in the configuration of a part: the address at which it serves its metrics (and a namenode its
//! page), and how they are protected.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::bail;
use harvestfs_http::{Access, Endpoint, Token};
use harvestfs_protocol::identity::Identity;
use serde::{Deserialize, Serialize};

use crate::config;

/// Name of the token's file, in the directory of the configuration.
const TOKEN_FILE: &str = "http-token";

/// The section `[http]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// How access is protected.
    #[serde(default)]
    pub access: AccessConfig,
    /// File of the token, relative to the configuration file.
    #[serde(default = "token_file")]
    pub token: PathBuf,
}

/// How the metrics and the page are protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessConfig {
    /// By an administrator's certificate or the token; with TLS.
    #[default]
    Proven,
    /// By the token; only on this machine, without TLS.
    Token,
    /// Not at all; only on this machine, without TLS.
    Anyone,
}

fn token_file() -> PathBuf {
    TOKEN_FILE.into()
}

impl HttpConfig {
    /// A configuration that gives access to all users of this machine.
    pub fn anyone(listen: SocketAddr) -> Self {
        Self {
            listen,
            access: AccessConfig::Anyone,
            token: token_file(),
        }
    }

    /// A configuration that requires the token, on this machine. Creates the token in `directory`, that of the
    /// configuration, unless there is one.
    ///
    /// # Errors
    /// When the token cannot be written.
    pub fn with_token(listen: SocketAddr, directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join(TOKEN_FILE);
        if !path.exists() {
            Token::create(&path)?;
        }
        Ok(Self {
            listen,
            access: AccessConfig::Token,
            token: token_file(),
        })
    }

    /// The address to open in a browser, including the token if one is needed. `directory` is that of the
    /// configuration.
    ///
    /// # Errors
    /// When the token cannot be read.
    pub fn address(&self, directory: &Path) -> anyhow::Result<String> {
        Ok(match self.access {
            AccessConfig::Anyone | AccessConfig::Proven => self.address_for_all(directory),
            AccessConfig::Token => {
                Token::load(&directory.join(&self.token))?.in_address(self.listen)
            }
        })
    }

    /// The address in a form that others may see, for example in a log: it names the token's file instead.
    pub fn address_for_all(&self, directory: &Path) -> String {
        let listen = self.listen;
        match self.access {
            AccessConfig::Anyone => format!("http://{listen}/"),
            AccessConfig::Proven => format!("https://{listen}/"),
            AccessConfig::Token => {
                let token = directory.join(&self.token);
                format!("http://{listen}/ with the token in {}", token.display())
            }
        }
    }

    /// A configuration that requires a certificate or the token. Creates the token in `directory`, that of the
    /// configuration.
    ///
    /// # Errors
    /// When the token cannot be written.
    pub fn proven(listen: SocketAddr, directory: &Path) -> anyhow::Result<Self> {
        Token::create(&directory.join(TOKEN_FILE))?;
        Ok(Self {
            listen,
            access: AccessConfig::Proven,
            token: token_file(),
        })
    }

    /// Starts to listen, with paths relative to the configuration file `path`, for the part with this `identity`.
    ///
    /// # Errors
    /// When the token cannot be read, or the address cannot be listened on.
    pub async fn bind(&self, path: &Path, identity: &Identity) -> anyhow::Result<Endpoint> {
        let access = match self.access {
            AccessConfig::Anyone => Access::Anyone,
            AccessConfig::Token => Access::Token(Token::load(&config::beside(path, &self.token))?),
            AccessConfig::Proven if !identity.peer().role.listens() => bail!(
                "{}: the certificate of a {} cannot prove a server: write access = \"anyone\" and an \
                 address of this machine, such as 127.0.0.1",
                path.display(),
                identity.peer().role
            ),
            AccessConfig::Proven => Access::Proven {
                identity: identity.clone(),
                token: Token::load(&config::beside(path, &self.token))?,
            },
        };
        Ok(Endpoint::bind(self.listen, access).await?)
    }
}
