//! Selects the cluster that a command talks to, and the identity that it uses.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use harvestfs_client::{Client, ClientOptions};
use harvestfs_protocol::identity::Identity;
use harvestfs_protocol::types::Credentials;

use crate::config::{self, ClientConfig};
use crate::init::NAMENODE_NAME;
use crate::up;

/// Heading in the help for the options that every command has.
pub const GLOBAL_OPTIONS: &str = "Global options";

// The environment variables are not read by clap, which does not distinguish them from typed flags.
/// Which cluster.
#[derive(Clone, Debug, Args)]
pub struct ClusterArgs {
    /// Directory of a cluster on this machine [default: ~/.local/share/harvestfs]
    /// [env: HARVESTFS_DATA].
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        conflicts_with = "config",
        help_heading = GLOBAL_OPTIONS,
        hide_short_help = true
    )]
    data: Option<PathBuf>,
    /// Configuration file of a client, instead of --data [env: HARVESTFS_CLIENT_CONFIG].
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        help_heading = GLOBAL_OPTIONS,
        hide_short_help = true
    )]
    config: Option<PathBuf>,
}

/// A client's configuration and certificate.
#[derive(Debug)]
pub struct Access {
    /// The configuration.
    pub config: ClientConfig,
    /// The certificate.
    pub identity: Identity,
}

impl ClusterArgs {
    /// The configuration file that is named instead of a cluster's directory. If either flag is typed, the environment
    /// variables do not count: a forgotten one for the other flag would send the command to another cluster.
    pub fn config_file(&self) -> Option<PathBuf> {
        match (&self.config, &self.data) {
            (None, None) => variable("HARVESTFS_CLIENT_CONFIG"),
            (config, _) => config.clone(),
        }
    }

    /// As [`ClusterArgs::config_file`]; refuses flags that name two clusters.
    fn only_config_file(&self) -> anyhow::Result<Option<PathBuf>> {
        // clap does not detect this conflict in `fs --data A ls --config B`.
        if self.data.is_some() && self.config.is_some() {
            anyhow::bail!("--data cannot be used with --config");
        }
        Ok(self.config_file())
    }

    /// The cluster's directory on this machine, for when no configuration file is named.
    fn data_directory(&self) -> anyhow::Result<PathBuf> {
        let data = self.data.clone().or_else(|| variable("HARVESTFS_DATA"));
        up::data_directory(data.as_deref())
    }

    /// Reads the configuration; `directory` is the part of a cluster's directory to use.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn access(&self, directory: &str) -> anyhow::Result<Access> {
        access(&self.client_file(directory)?)
    }

    /// The configuration file; `directory` is the part of a cluster's directory to use.
    ///
    /// # Errors
    /// When no cluster was made there, or that cannot be determined.
    pub fn client_file(&self, directory: &str) -> anyhow::Result<PathBuf> {
        if let Some(path) = self.only_config_file()? {
            return Ok(path);
        }
        let data = self.data_directory()?;
        let path = data.join(directory).join("client.toml");
        // Does not require `ca` to exist: that may be kept elsewhere.
        if !is_there(&path)? {
            anyhow::bail!(
                "no cluster was made on this machine in {} ({} is missing): name the \
                 configuration that `harvestfs init client` made for this machine with \
                 --config FILE, or the directory of a cluster with --data DIR; `harvestfs up` \
                 makes a cluster here",
                data.display(),
                path.display()
            );
        }
        Ok(path)
    }

    /// The configuration of a client, if there is one.
    ///
    /// # Errors
    /// When the one that was named cannot be read, or the usual one is damaged.
    pub fn client_config(&self) -> anyhow::Result<Option<ClientConfig>> {
        let path = match self.only_config_file()? {
            Some(path) => path,
            None => {
                let path = self.data_directory()?.join("client/client.toml");
                if !is_there(&path)? {
                    return Ok(None);
                }
                path
            }
        };
        config::load(&path).map(Some)
    }

    /// The directory of the cluster on this machine, unless a configuration file is named instead.
    ///
    /// # Errors
    /// When there is no home directory to look for it.
    pub fn directory(&self) -> anyhow::Result<Option<PathBuf>> {
        match self.only_config_file()? {
            Some(_) => Ok(None),
            None => self.data_directory().map(Some),
        }
    }

    /// Opens a session with the configuration that was read.
    ///
    /// # Errors
    /// When the cluster cannot be reached.
    pub async fn connect(&self, access: Access) -> anyhow::Result<Client> {
        let addresses: Vec<String> = access
            .config
            .namenodes
            .iter()
            .map(ToString::to_string)
            .collect();
        let addresses = addresses.join(", ");
        let mut options = ClientOptions::new(
            access.config.namenodes,
            NAMENODE_NAME.to_owned(),
            access.identity,
        );
        options.dirty_bytes_max = access.config.dirty.0;
        options.unreachable_timeout = access.config.unreachable_timeout_s.duration();
        Client::connect(options).await.with_context(|| {
            let advice = if self.config_file().is_some() {
                "is its namenode running, and does a firewall let UDP through to it?"
            } else {
                "is it running? `harvestfs up` starts it"
            };
            format!("cannot reach the cluster at {addresses} ({advice})")
        })
    }
}

/// The value of an environment variable; `None` if it is unset or empty.
pub fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Whether a file exists. One that may not be examined does not count as missing.
fn is_there(path: &Path) -> anyhow::Result<bool> {
    path.try_exists().with_context(|| {
        format!(
            "cannot read {}: if the cluster is another user's, have that user make you a configuration \
             with `harvestfs init client NAME`, and name it with --config FILE",
            path.display()
        )
    })
}

/// Reads the configuration in a file, and the certificate beside it.
///
/// # Errors
/// When they cannot be read.
pub fn access(path: &Path) -> anyhow::Result<Access> {
    let config: ClientConfig = config::load(path)?;
    let identity = Identity::load(&config::beside(path, &config.identity))?;
    Ok(Access { config, identity })
}

/// The user who runs the command.
///
/// # Errors
/// When the user's groups cannot be determined.
pub fn own_credentials() -> anyhow::Result<Credentials> {
    Ok(Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: rustix::process::getgroups()?
            .into_iter()
            .map(|group| group.as_raw())
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_what_is_missing_is_called_missing() {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path();
        let args = ClusterArgs {
            data: Some(data.to_owned()),
            config: None,
        };
        let error = args.client_file("admin").unwrap_err().to_string();
        assert!(error.contains("no cluster was made"), "{error}");
        assert!(args.client_config().unwrap().is_none());

        // Neither the certificate authority nor the other parts need to exist.
        fs::create_dir(data.join("admin")).unwrap();
        fs::write(data.join("admin/client.toml"), "").unwrap();
        let file = args.client_file("admin").unwrap();
        assert_eq!(file, data.join("admin/client.toml"));

        // An error other than that it is missing, for root, too.
        fs::write(data.join("client"), "").unwrap();
        let error = args.client_file("client").unwrap_err().to_string();
        assert!(error.contains("cannot read"), "{error}");
        assert!(args.client_config().is_err());
    }
}
