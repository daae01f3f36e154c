//! `[http]` in the configuration of a part: the address of its metrics, and of the namenode's page, and
//! how they are protected.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::bail;
use harvestfs_http::{Access, Endpoint, Token};
use harvestfs_protocol::identity::Identity;
use serde::{Deserialize, Serialize};

use crate::config;

/// File name of the token beside the configuration.
const TOKEN_FILE: &str = "http-token";

/// `[http]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// How it is protected.
    #[serde(default)]
    pub access: AccessConfig,
    /// File of the token; relative to the configuration.
    #[serde(default = "token_file")]
    pub token: PathBuf,
}

/// How the metrics and the page are protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessConfig {
    /// By the certificate of an administrator, or the token; with TLS.
    #[default]
    Proven,
    /// By the token, on this machine; without TLS.
    Token,
    /// Not at all, on this machine; without TLS.
    Anyone,
}

fn token_file() -> PathBuf {
    TOKEN_FILE.into()
}

impl HttpConfig {
    /// For all users of this machine.
    pub fn anyone(listen: SocketAddr) -> Self {
        Self {
            listen,
            access: AccessConfig::Anyone,
            token: token_file(),
        }
    }

    /// With the token, on this machine. Makes the token beside the configuration in `directory` unless
    /// there is one.
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

    /// The address to open in a browser; holds the token if one is needed. The configuration is in
    /// `directory`.
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

    /// The same for where others may read it, such as in a log: it says where the token is.
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

    /// With a certificate or the token. Makes the token beside the configuration in `directory`.
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

    /// Starts to listen as the configuration file `path` says, for the part that `identity` is.
    ///
    /// # Errors
    /// When the token cannot be read, or the address not be listened on.
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
