//! Configuration files (TOML). Flags win over environment variables, these over the file.

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::Context;
use harvestfs_protocol::types::StorageClass;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::units::Size;

/// What is wrong with a configuration file, and where.
#[derive(Debug)]
pub struct ConfigError {
    path: PathBuf,
    line: Option<usize>,
    message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for ConfigError {}

/// `namenode.toml`
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamenodeConfig {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Directory of the certificate; relative to this file.
    pub identity: PathBuf,
    /// Directory of the journal and of the keys that sign block tokens; relative to this file.
    pub data: PathBuf,
}

/// `datanode.toml`
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatanodeConfig {
    /// Name of the server; the certificate must carry it.
    pub name: String,
    /// Rack of the server.
    pub rack: String,
    /// Environment of the primary tenant.
    pub environment: String,
    /// Machine function of the primary tenant.
    pub machine_function: String,
    /// Address to listen on; other parts must reach it under this address.
    pub listen: SocketAddr,
    /// Addresses of the namenodes.
    pub namenodes: Vec<SocketAddr>,
    /// Directory of the certificate; relative to this file.
    pub identity: PathBuf,
    /// Bytes per second that the scrubber reads.
    #[serde(default = "default_scrub_rate")]
    pub scrub_bytes_per_s: Size,
    /// What the owner lets us use.
    #[serde(rename = "volume")]
    pub volumes: Vec<VolumeConfig>,
}

/// `[[volume]]` in `datanode.toml`
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeConfig {
    /// Directory; relative to the file.
    pub path: PathBuf,
    /// Most bytes that we use there.
    pub quota: Size,
    /// What its disk is: `disk`, `ssd` or `memory`.
    #[serde(default)]
    pub class: Class,
}

/// [`StorageClass`] as a file spells it.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    #[default]
    Disk,
    Ssd,
    Memory,
}

impl From<Class> for StorageClass {
    fn from(class: Class) -> Self {
        match class {
            Class::Disk => Self::Disk,
            Class::Ssd => Self::Ssd,
            Class::Memory => Self::Memory,
        }
    }
}

/// `client.toml`: for mounts, `fs` and `admin`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientConfig {
    /// Addresses of the namenodes.
    pub namenodes: Vec<SocketAddr>,
    /// Directory of the certificate; relative to this file.
    pub identity: PathBuf,
    /// Most bytes written but not yet on datanodes.
    #[serde(default = "default_dirty")]
    pub dirty: Size,
}

/// 8 MiB/s: a terabyte in a day and a half, and a hundredth of one disk.
fn default_scrub_rate() -> Size {
    Size(8 << 20)
}

fn default_dirty() -> Size {
    Size(256 << 20)
}

/// Reads a configuration file.
///
/// # Errors
/// [`ConfigError`] with file and line for a key or value that is not accepted.
pub fn load<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError {
        path: path.into(),
        line: None,
        message: format!("cannot read the configuration: {error}"),
    })?;
    toml::from_str(&text).map_err(|error| {
        let line = error
            .span()
            .map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        ConfigError {
            path: path.into(),
            line,
            message: error.message().to_owned(),
        }
        .into()
    })
}

/// Writes a configuration file.
///
/// # Errors
/// When the file cannot be written.
pub fn store<T: Serialize>(path: &Path, config: &T) -> anyhow::Result<()> {
    let text = toml::to_string(config).context("a configuration that TOML cannot hold")?;
    let temporary = path.with_extension("toml.tmp");
    std::fs::write(&temporary, text)
        .and_then(|()| std::fs::rename(&temporary, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A path of a configuration file is relative to that file.
#[must_use]
pub fn beside(config: &Path, path: &Path) -> PathBuf {
    match config.parent() {
        Some(parent) => parent.join(path),
        None => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("datanode.toml");
        std::fs::write(&path, text).unwrap();
        let error = load::<DatanodeConfig>(&path).unwrap_err();
        assert!(error.downcast_ref::<ConfigError>().is_some());
        format!("{error:#}").replace(&format!("{}/", directory.path().display()), "")
    }

    const GOOD: &str = r#"name = "dn-1"
rack = "r1"
environment = "e1"
machine_function = "search"
listen = "127.0.0.1:0"
namenodes = ["127.0.0.1:9310"]
identity = "identity"

[[volume]]
path = "volume"
quota = "1GiB"
"#;

    #[test]
    fn an_error_names_file_line_and_what_is_accepted() {
        let unknown = error_of(&format!("{GOOD}quotas = 7\n"));
        assert!(
            unknown.starts_with("datanode.toml:12: unknown field `quotas`"),
            "{unknown}"
        );
        assert!(unknown.contains("`quota`"), "{unknown}");

        let class = error_of(&format!("{GOOD}class = \"tape\"\n"));
        assert!(
            class.starts_with("datanode.toml:12: unknown variant `tape`"),
            "{class}"
        );
        assert!(class.contains("`ssd`"), "{class}");

        let address = error_of(&GOOD.replace("127.0.0.1:0", "here"));
        assert!(address.starts_with("datanode.toml:5: "), "{address}");

        let quota = error_of(&GOOD.replace("1GiB", "lots"));
        assert!(quota.contains("`lots` is not a size"), "{quota}");
    }

    #[test]
    fn what_is_stored_is_loaded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("namenode.toml");
        let config = NamenodeConfig {
            listen: "127.0.0.1:1".parse().unwrap(),
            identity: "identity".into(),
            data: "data".into(),
        };
        store(&path, &config).unwrap();
        let loaded: NamenodeConfig = load(&path).unwrap();
        assert_eq!(loaded.listen, config.listen);
    }
}
