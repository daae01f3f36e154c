//! Configuration files (TOML). Flags win over environment variables, these over the file.

mod primary;
#[cfg(test)]
mod recorded;

use std::net::SocketAddr;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use harvestfs_namenode::engine::cluster::{ClusterOptions, MIN_WRITE_REPLICAS};
use harvestfs_placement::{Locality, PolicyKind};
use harvestfs_protocol::durable;
use harvestfs_protocol::settings::SettingsError;
use harvestfs_protocol::types::StorageClass;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::primary::{PrimaryConfig, PrimarySourceConfig, SourceName, TraceConfig};
use crate::http::HttpConfig;
use crate::units::{Size, Wait};

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
    /// Which servers replicas go to: `stock`, `greedy`, `history` or `harvest`.
    #[serde(default)]
    pub policy: PolicyKind,
    /// Whether `harvest` puts the first replica on the writer's server: `prefer` (when that is in
    /// the grid), `require` (whenever it can take one) or `off`.
    #[serde(default)]
    pub locality: Locality,
    /// Replicas that a block must have to be written while datanodes are away.
    #[serde(default = "default_min_write_replicas")]
    pub min_write_replicas: NonZero<u8>,
    /// Budgets of repair.
    #[serde(default)]
    pub repair: RepairConfig,
    /// Seconds for which replicas of blocks are kept that a namenode which knew more may have
    /// allocated.
    #[serde(default = "default_quarantine")]
    pub quarantine_s: u64,
    /// Where metrics and the page can be looked at; nowhere if absent.
    pub http: Option<HttpConfig>,
}

/// `[repair]` in `namenode.toml`; what is absent is as usual.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RepairConfig {
    /// Repairs per hour and server, as source and as target each.
    pub per_hour: Option<u32>,
    /// The same for blocks whose last replica is left.
    pub urgent_per_hour: Option<u32>,
    /// The same for replicas that are moved because they are misplaced.
    pub moves_per_hour: Option<u32>,
    /// Repairs per hour that one volume serves.
    pub per_volume_per_hour: Option<u32>,
    /// Repairs at a time per server, as source and as target each.
    pub at_once: Option<u32>,
    /// Seconds for which a datanode that stopped in good order is waited for before its blocks are
    /// repaired; 0 for no longer than any that is silent.
    pub restart_wait_s: Option<u32>,
    /// Replicas move to emptier servers when a volume is fuller than a server by more than this share of
    /// their quotas; 0 for never.
    pub balance_spread_percent: Option<u32>,
}

impl RepairConfig {
    /// Puts what is given in the place of the usual.
    pub fn apply(&self, options: &mut ClusterOptions) {
        for (limit, given) in [
            (&mut options.repairs_per_window, self.per_hour),
            (&mut options.urgent_repairs_per_window, self.urgent_per_hour),
            (&mut options.moves_per_window, self.moves_per_hour),
            (
                &mut options.repairs_per_volume_per_window,
                self.per_volume_per_hour,
            ),
            (&mut options.repairs_in_flight_per_node, self.at_once),
        ] {
            *limit = given.unwrap_or(*limit);
        }
        if let Some(seconds) = self.restart_wait_s {
            options.restart_wait_ms = u64::from(seconds) * 1_000;
        }
        if let Some(percent) = self.balance_spread_percent {
            options.balance_spread_permille = percent.saturating_mul(10);
        }
    }
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
    /// Least seconds from the start of one round of the scrubber to the start of the next.
    #[serde(default = "default_scrub_interval")]
    pub scrub_every_s: NonZero<u32>,
    /// Bytes per second of replicas that it deletes because the namenode says so, unless space is short;
    /// 0 for no limit.
    #[serde(default = "default_removal_rate")]
    pub removal_bytes_per_s: Size,
    /// How the datanode competes with others for CPU and disks.
    #[serde(default)]
    pub priority: Priority,
    /// The primary tenant of the server.
    #[serde(default)]
    pub primary: PrimaryConfig,
    /// Where metrics can be looked at; nowhere if absent.
    pub http: Option<HttpConfig>,
    /// What the owner lets us use.
    #[serde(rename = "volume")]
    pub volumes: Vec<VolumeConfig>,
}

/// How the datanode competes with others for CPU and disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// It runs when no other program wants to.
    #[default]
    Idle,
    /// It yields, as `nice -n 19` does.
    Low,
    /// As any other process.
    Normal,
}

impl FromStr for Priority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "idle" => Ok(Self::Idle),
            "low" => Ok(Self::Low),
            "normal" => Ok(Self::Normal),
            _ => Err(format!(
                "`{text}` is no priority; write `idle`, `low` or `normal`"
            )),
        }
    }
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
    /// Seconds that an operation waits for a namenode or datanodes that do not answer, or `forever`.
    #[serde(default = "default_unreachable_timeout")]
    pub unreachable_timeout_s: Wait,
    /// Bytes per second that a mount copies in the background to get the space of mostly unused
    /// blocks back; 0 for none.
    #[serde(default = "default_compaction")]
    pub compaction_bytes_per_s: Size,
    /// Checkpoints of jobs.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// Where metrics of a mount can be looked at; nowhere if absent.
    pub http: Option<HttpConfig>,
}

impl ClientConfig {
    /// With the usual values for the rest.
    pub fn new(namenodes: Vec<SocketAddr>, identity: PathBuf) -> Self {
        Self {
            namenodes,
            identity,
            dirty: default_dirty(),
            unreachable_timeout_s: default_unreachable_timeout(),
            compaction_bytes_per_s: default_compaction(),
            checkpoint: CheckpointConfig::default(),
            http: None,
        }
    }
}

/// `[checkpoint]` in `client.toml`; what is absent is as usual.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Directory of the checkpoints.
    pub store: Option<PathBuf>,
    /// The CRIU to run.
    pub criu: Option<PathBuf>,
    /// How many checkpoints of each job are kept.
    pub keep: Option<usize>,
}

/// 8 MiB/s: a terabyte in a day and a half, and a hundredth of one disk.
pub fn default_scrub_rate() -> Size {
    Size(8 << 20)
}

/// Does not delay an owner's syncs noticeably on a disk that learns at each commit what became free.
pub fn default_removal_rate() -> Size {
    Size(400 << 20)
}

/// Seven days: somebody notices, and has the time to read back what is missing.
pub fn default_quarantine() -> u64 {
    7 * 24 * 3600
}

/// Two: a disk may fail before repair makes the others.
pub fn default_min_write_replicas() -> NonZero<u8> {
    const USUAL: NonZero<u8> = NonZero::new(MIN_WRITE_REPLICAS).unwrap();
    USUAL
}

/// Six hours: a small volume is not read again all the time.
pub fn default_scrub_interval() -> NonZero<u32> {
    const SIX_HOURS_S: NonZero<u32> = NonZero::new(6 * 3600).unwrap();
    SIX_HOURS_S
}

/// A minute: a namenode that is restarted is back sooner.
fn default_unreachable_timeout() -> Wait {
    const MINUTE_S: NonZero<u32> = NonZero::new(60).unwrap();
    Wait::Seconds(MINUTE_S)
}

fn default_dirty() -> Size {
    Size(256 << 20)
}

/// As the scrubber: so little that it is not noticed.
fn default_compaction() -> Size {
    Size(8 << 20)
}

/// Reads a configuration file.
///
/// # Errors
/// [`SettingsError`] with file and line for a key or value that is not accepted.
pub fn load<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        SettingsError::of_file(path, format!("cannot read the configuration: {error}"))
    })?;
    let parsed = toml::from_str(&text).map_err(|error| match error.span() {
        Some(span) => SettingsError::at(path, &text, span.start, error.message()),
        None => SettingsError::of_file(path, error.message()),
    });
    Ok(parsed?)
}

/// Writes a configuration file.
///
/// # Errors
/// When the file cannot be written.
pub fn store<T: Serialize>(path: &Path, config: &T) -> anyhow::Result<()> {
    let text = toml::to_string(config).context("a configuration that TOML cannot hold")?;
    durable::replace_file(path, text.as_bytes(), 0o644)
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
        assert!(error.downcast_ref::<SettingsError>().is_some());
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

        let with = |section: &str| GOOD.replace("[[volume]]", &format!("{section}\n[[volume]]"));
        for (section, line, said) in [
            ("[primary]\nsource = \"oracle\"\n", 10, "`cgroup`"),
            (
                "[primary]\nreserve_cpu_percent = 101\n",
                10,
                "from 0 to 100",
            ),
            ("[primary]\nsettle_s = -1\n", 10, "from 0 to 3600"),
            ("[primary]\nsource = \"cgroup\"\n", 9, "`cgroup` is missing"),
            (
                "[primary]\nseries = \"a\"\n",
                9,
                "means nothing with source = \"machine\"",
            ),
            ("[primary]\nreserve = 3\n", 10, "`reserve_cpu_percent`"),
        ] {
            let error = error_of(&with(section));
            assert!(
                error.starts_with(&format!("datanode.toml:{line}: ")),
                "{error}"
            );
            assert!(error.contains(said), "{error}");
        }
        let priority = error_of(&format!("priority = \"high\"\n{GOOD}"));
        assert!(priority.starts_with("datanode.toml:1: "), "{priority}");
        assert!(priority.contains("`idle`"), "{priority}");

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
            policy: PolicyKind::Greedy,
            locality: Locality::Off,
            min_write_replicas: default_min_write_replicas(),
            repair: RepairConfig {
                per_hour: Some(3),
                ..RepairConfig::default()
            },
            quarantine_s: 60,
            http: Some(HttpConfig::anyone("127.0.0.1:2".parse().unwrap())),
        };
        store(&path, &config).unwrap();
        let loaded: NamenodeConfig = load(&path).unwrap();
        assert_eq!(loaded.listen, config.listen);
        assert_eq!(
            (loaded.policy, loaded.locality),
            (PolicyKind::Greedy, Locality::Off)
        );
        assert_eq!(loaded.repair.per_hour, Some(3));
        assert_eq!(loaded.http, config.http);
        std::fs::write(
            &path,
            "listen = \"127.0.0.1:1\"\nidentity = \"i\"\ndata = \"d\"\n",
        )
        .unwrap();
        let usual: NamenodeConfig = load(&path).unwrap();
        assert_eq!(usual.policy, PolicyKind::Harvest);
        std::fs::write(&path, "policy = \"hdfs\"\n").unwrap();
        let error = load::<NamenodeConfig>(&path).unwrap_err().to_string();
        assert!(error.contains("`harvest`"), "{error}");
    }
}
