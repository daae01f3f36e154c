//! Configuration files (TOML). Flags override environment variables, which override the file.

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
    /// Directory of the journal and the keys that sign block tokens; relative to this file.
    pub data: PathBuf,
    /// Placement policy that chooses the servers of replicas: `stock`, `greedy`, `history` or `harvest`.
    #[serde(default)]
    pub policy: PolicyKind,
    /// Whether `harvest` places the first replica on the writer's server: `prefer` (if that is in
    /// the grid), `require` (whenever it can take one) or `off`.
    #[serde(default)]
    pub locality: Locality,
    /// Minimum number of replicas with which a block can be written while datanodes are unavailable.
    #[serde(default = "default_min_write_replicas")]
    pub min_write_replicas: NonZero<u8>,
    /// Limits of repair.
    #[serde(default)]
    pub repair: RepairConfig,
    /// Quarantine in seconds: how long to keep replicas of unknown blocks that a namenode with a longer
    /// journal may have allocated.
    #[serde(default = "default_quarantine")]
    pub quarantine_s: u64,
    /// Address of the metrics and the page; they are not served if absent.
    pub http: Option<HttpConfig>,
}

/// The section `[repair]` in `namenode.toml`; absent keys have their default.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RepairConfig {
    /// Maximum repairs per hour and server, counted separately as source and as target.
    pub per_hour: Option<u32>,
    /// The same for blocks with only one replica left.
    pub urgent_per_hour: Option<u32>,
    /// The same for replicas that are moved because they are misplaced.
    pub moves_per_hour: Option<u32>,
    /// Maximum repairs per hour that one volume serves.
    pub per_volume_per_hour: Option<u32>,
    /// Maximum simultaneous repairs per server, counted separately as source and as target.
    pub at_once: Option<u32>,
    /// Seconds to wait for a datanode that stopped in good order before its blocks are repaired; with 0,
    /// no longer than for any silent datanode.
    pub restart_wait_s: Option<u32>,
    /// Difference in use, in percent of their quotas, between a volume and an emptier server above which
    /// replicas move to that server; 0 for never.
    pub balance_spread_percent: Option<u32>,
}

impl RepairConfig {
    /// Overrides the defaults in `options` with the configured values.
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
    /// Minimum seconds from the start of one round of the scrubber to the start of the next.
    #[serde(default = "default_scrub_interval")]
    pub scrub_every_s: NonZero<u32>,
    /// Bytes per second of replicas that it deletes on the namenode's orders, unless space is short;
    /// 0 for no limit.
    #[serde(default = "default_removal_rate")]
    pub removal_bytes_per_s: Size,
    /// How the datanode competes with others for CPU and disks.
    #[serde(default)]
    pub priority: Priority,
    /// The primary tenant of the server.
    #[serde(default)]
    pub primary: PrimaryConfig,
    /// Address of the metrics; they are not served if absent.
    pub http: Option<HttpConfig>,
    /// The disk space that the owner lets us use.
    #[serde(rename = "volume")]
    pub volumes: Vec<VolumeConfig>,
}

/// How the datanode competes with others for CPU and disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// It runs only when no other program wants to.
    #[default]
    Idle,
    /// It yields, as `nice -n 19` does.
    Low,
    /// It competes like any other process.
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
    /// Directory of the volume; relative to this file.
    pub path: PathBuf,
    /// Maximum number of bytes that we use there.
    pub quota: Size,
    /// Kind of storage: `disk`, `ssd` or `memory`.
    #[serde(default)]
    pub class: Class,
}

/// [`StorageClass`] as written in a configuration file.
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
    /// Maximum number of bytes that are written but not yet on datanodes.
    #[serde(default = "default_dirty")]
    pub dirty: Size,
    /// Seconds that an operation waits for an unresponsive namenode or datanodes, or `forever`.
    #[serde(default = "default_unreachable_timeout")]
    pub unreachable_timeout_s: Wait,
    /// Bytes per second that a mount copies in the background to reclaim the space of mostly unused
    /// blocks; 0 to disable this.
    #[serde(default = "default_compaction")]
    pub compaction_bytes_per_s: Size,
    /// Checkpoints of jobs.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// Address of a mount's metrics; they are not served if absent.
    pub http: Option<HttpConfig>,
}

impl ClientConfig {
    /// A configuration with defaults for everything else.
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

/// The section `[checkpoint]` in `client.toml`; absent keys have their default.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Directory of the checkpoints.
    pub store: Option<PathBuf>,
    /// The CRIU to run.
    pub criu: Option<PathBuf>,
    /// Number of checkpoints kept for each job.
    pub keep: Option<usize>,
}

/// 8 MiB/s: reads a terabyte in a day and a half, and uses a hundredth of one disk.
pub fn default_scrub_rate() -> Size {
    Size(8 << 20)
}

/// 400 MiB/s: does not noticeably delay an owner's syncs on a disk that is notified of freed space at each commit.
pub fn default_removal_rate() -> Size {
    Size(400 << 20)
}

/// Seven days: enough for an operator to notice, and to recover what is missing.
pub fn default_quarantine() -> u64 {
    7 * 24 * 3600
}

/// Two: a disk may fail before repair has created the other replicas.
pub fn default_min_write_replicas() -> NonZero<u8> {
    const USUAL: NonZero<u8> = NonZero::new(MIN_WRITE_REPLICAS).unwrap();
    USUAL
}

/// Six hours, so that a small volume is not read continuously.
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

/// 8 MiB/s, as for the scrubber: too little to be noticed.
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

/// Resolves a path in a configuration file, which is relative to that file.
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
