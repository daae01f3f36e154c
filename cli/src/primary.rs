//! The primary tenant of a datanode's server: from configuration and flags to the monitor of its use.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use harvestfs_datanode::{PrimaryOptions, PrimarySource};
use harvestfs_protocol::unix_now_ms;
use harvestfs_telemetry::primary::{Own, TraceReplay};
use harvestfs_telemetry::traces::{Series, SeriesReader};

use crate::config::{self, PrimaryConfig, PrimarySourceConfig, SourceName, TraceConfig};

/// Flags of `harvestfs datanode` that replace `[primary]` in its configuration.
#[derive(Debug, Args)]
pub struct PrimaryArgs {
    /// Where the use of the primary tenant is read: `none`, `machine`, `cgroup` or `trace`.
    #[arg(long, env = "HARVESTFS_PRIMARY_SOURCE", value_name = "SOURCE")]
    primary_source: Option<SourceName>,
    /// The primary tenant's cgroup, as in /proc/PID/cgroup.
    #[arg(long, env = "HARVESTFS_PRIMARY_CGROUP", value_name = "CGROUP")]
    primary_cgroup: Option<PathBuf>,
    /// A file of recorded series that is replayed as the primary tenant.
    #[arg(long, env = "HARVESTFS_PRIMARY_TRACE", value_name = "FILE")]
    primary_trace: Option<PathBuf>,
    /// Name of the series, or its number from 1 [default: 1].
    #[arg(long, env = "HARVESTFS_PRIMARY_SERIES", value_name = "SERIES")]
    primary_series: Option<String>,
    /// How many times as fast as it was recorded the trace is replayed [default: 1].
    #[arg(long, env = "HARVESTFS_TRACE_SPEED", value_name = "N")]
    trace_speed: Option<f64>,
    /// When the replay began, in milliseconds since 1970; it goes on as if it had run since.
    #[arg(long, hide = true, value_name = "UNIX_MS")]
    trace_began: Option<u64>,
}

impl PrimaryArgs {
    /// What the datanode is to watch: the flags before the configuration file `path`.
    ///
    /// # Errors
    /// When they contradict each other, or the trace cannot be read.
    pub fn options(&self, path: &Path, config: &PrimaryConfig) -> anyhow::Result<PrimaryOptions> {
        let configured = |file: &Path| config::beside(path, file);
        let source = match self.source(&config.source, configured)? {
            PrimarySourceConfig::None => PrimarySource::None,
            PrimarySourceConfig::Machine { own_cgroup } => PrimarySource::Machine {
                own: own(own_cgroup),
            },
            PrimarySourceConfig::Cgroup { name, own_cgroup } => PrimarySource::Cgroup {
                name,
                own: own(own_cgroup),
            },
            PrimarySourceConfig::Trace(trace) => {
                let series = find_series(&trace.file, trace.series.as_deref())?;
                let replay = TraceReplay::new(&series, trace.speed, Instant::now(), self.skipped());
                let replay = replay.with_context(|| trace.file.display().to_string())?;
                PrimarySource::Trace(replay)
            }
        };
        let mut options = PrimaryOptions {
            source,
            ..PrimaryOptions::default()
        };
        let gate = &mut options.gate;
        let own = &config.gate;
        gate.cpu_reserve_share = own.cpu_reserve_share().unwrap_or(gate.cpu_reserve_share);
        gate.memory_reserve_share = own
            .memory_reserve_share()
            .unwrap_or(gate.memory_reserve_share);
        gate.stalled_max_share = own.stalled_max_share();
        let is_cgroup = matches!(options.source, PrimarySource::Cgroup { .. });
        if gate.stalled_max_share.is_some() && !is_cgroup {
            // Earlier releases accepted it with any source, so it is not an error.
            tracing::warn!(
                "`stalled_max_percent` is ignored: it is for source = \"cgroup\", since HarvestFS's own processes wait, too"
            );
            gate.stalled_max_share = None;
        }
        gate.settle = own.settle().unwrap_or(gate.settle);
        Ok(options)
    }

    fn source(
        &self,
        configured: &PrimarySourceConfig,
        beside: impl Fn(&Path) -> PathBuf,
    ) -> anyhow::Result<PrimarySourceConfig> {
        let own_cgroup = match configured {
            PrimarySourceConfig::Machine { own_cgroup }
            | PrimarySourceConfig::Cgroup { own_cgroup, .. } => own_cgroup.clone(),
            PrimarySourceConfig::None | PrimarySourceConfig::Trace(_) => None,
        };
        // Naming a trace or a cgroup also selects it as the source.
        let source = match (
            self.primary_source,
            &self.primary_trace,
            &self.primary_cgroup,
        ) {
            (Some(source), _, _) => Some(source),
            (None, Some(_), None) => Some(SourceName::Trace),
            (None, None, Some(_)) => Some(SourceName::Cgroup),
            (None, None, None) => None,
            (None, Some(_), Some(_)) => {
                bail!("the primary tenant is a trace or a cgroup: say which with --primary-source")
            }
        };
        Ok(match (source, configured) {
            (None, PrimarySourceConfig::Trace(trace)) => {
                PrimarySourceConfig::Trace(self.trace(Some(trace), beside)?)
            }
            (None, configured) => configured.clone(),
            (Some(SourceName::None), _) => PrimarySourceConfig::None,
            (Some(SourceName::Machine), _) => PrimarySourceConfig::Machine { own_cgroup },
            (Some(SourceName::Cgroup), configured) => {
                let name = match (&self.primary_cgroup, configured) {
                    (Some(name), _) => name,
                    (None, PrimarySourceConfig::Cgroup { name, .. }) => name,
                    _ => {
                        bail!("which cgroup is the primary tenant's? Say so with --primary-cgroup")
                    }
                };
                PrimarySourceConfig::Cgroup {
                    name: name.clone(),
                    own_cgroup,
                }
            }
            (Some(SourceName::Trace), PrimarySourceConfig::Trace(trace)) => {
                PrimarySourceConfig::Trace(self.trace(Some(trace), beside)?)
            }
            (Some(SourceName::Trace), _) => PrimarySourceConfig::Trace(self.trace(None, beside)?),
        })
    }

    fn trace(
        &self,
        configured: Option<&TraceConfig>,
        beside: impl Fn(&Path) -> PathBuf,
    ) -> anyhow::Result<TraceConfig> {
        let file = match (&self.primary_trace, configured) {
            (Some(file), _) => file.clone(),
            (None, Some(configured)) => beside(&configured.file),
            (None, None) => bail!("which trace is the primary tenant? Say so with --primary-trace"),
        };
        let series = self.primary_series.clone();
        Ok(TraceConfig {
            file,
            series: series.or_else(|| configured?.series.clone()),
            speed: self
                .trace_speed
                .or(configured.map(|configured| configured.speed))
                .unwrap_or(1.0),
        })
    }

    /// How long the replay has run before; nothing if the clock went back since.
    fn skipped(&self) -> Duration {
        let began_ms = self.trace_began.zip(unix_now_ms());
        began_ms.map_or(Duration::ZERO, |(began_ms, now_ms)| {
            Duration::from_millis(now_ms.saturating_sub(began_ms))
        })
    }
}

fn own(cgroup: Option<PathBuf>) -> Own {
    cgroup.map_or(Own::SameExecutable, Own::Cgroup)
}

/// The series of a name, or of a number from 1; by default the first.
fn find_series(file: &Path, wanted: Option<&str>) -> anyhow::Result<Series> {
    let wanted = wanted.unwrap_or("1");
    let mut reader = SeriesReader::open(file)?;
    let found = match wanted.parse::<usize>() {
        Ok(0) => None,
        Ok(number) => reader.nth(number - 1).transpose()?,
        Err(_) => reader.find(wanted)?,
    };
    found.with_context(|| format!("{} has no series `{wanted}`", file.display()))
}

/// Which file and series each datanode of `up` replays.
#[derive(Clone, Debug)]
pub struct Cast {
    files: Vec<PathBuf>,
    /// Series of the only file.
    series: usize,
    speed: f64,
    began_unix_ms: u64,
}

impl Cast {
    /// Of a file, each datanode gets a series; of a directory, the first series of a file.
    ///
    /// # Errors
    /// When there is no trace, or one cannot be read.
    pub fn open(path: &Path, speed: f64) -> anyhow::Result<Self> {
        let path = std::path::absolute(path)?;
        let mut files = vec![path.clone()];
        let mut series = 1;
        if path.is_dir() {
            files = trace_files(&path)?;
            for file in &files {
                find_series(file, None)?;
            }
        } else {
            series = 0;
            for next in SeriesReader::open(&path)? {
                next?;
                series += 1;
            }
        }
        if files.is_empty() || series == 0 {
            bail!("{} holds no trace (*.csv or *.csv.gz)", path.display());
        }
        Ok(Self {
            files,
            series,
            speed,
            began_unix_ms: unix_now_ms().context("the clock of this machine is before 1970")?,
        })
    }

    /// The flags of the datanode with an index from 0. When there are more datanodes than series, they
    /// share them.
    pub fn flags(&self, index: usize) -> Vec<std::ffi::OsString> {
        vec![
            "--primary-trace".into(),
            self.files[index % self.files.len()].clone().into(),
            "--primary-series".into(),
            (index % self.series + 1).to_string().into(),
            "--trace-speed".into(),
            self.speed.to_string().into(),
            "--trace-began".into(),
            self.began_unix_ms.to_string().into(),
        ]
    }
}

fn trace_files(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.to_string_lossy();
        if name.ends_with(".csv") || name.ends_with(".csv.gz") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_long_tasks_wait_counts_only_of_a_cgroup() {
        let args = PrimaryArgs {
            primary_source: None,
            primary_cgroup: None,
            primary_trace: None,
            primary_series: None,
            trace_speed: None,
            trace_began: None,
        };
        let limit = |source: &str| {
            let config = format!("stalled_max_percent = 5.0\nsource = {source}");
            let config: PrimaryConfig = toml::from_str(&config).unwrap();
            let options = args.options("datanode.toml".as_ref(), &config).unwrap();
            options.gate.stalled_max_share
        };
        assert_eq!(limit("\"cgroup\"\ncgroup = \"search.slice\""), Some(0.05));
        for other in ["\"machine\"", "\"none\""] {
            assert_eq!(limit(other), None, "{other}");
        }
    }

    #[test]
    fn each_datanode_plays_a_series() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("cpu.csv");
        std::fs::write(&file, "series,values\na,100,200\nb,300,400\n").unwrap();
        let cast = Cast::open(&file, 60.0).unwrap();
        let series = |index| cast.flags(index)[3].clone();
        assert_eq!([series(0), series(1), series(2)], ["1", "2", "1"]);
        let of_directory = Cast::open(directory.path(), 60.0).unwrap();
        assert_eq!(of_directory.flags(1)[1], file.as_os_str());
        assert_eq!(find_series(&file, Some("b")).unwrap().name, "b");
        for wrong in ["0", "3", "c"] {
            let error = find_series(&file, Some(wrong)).unwrap_err().to_string();
            assert!(error.contains(&format!("no series `{wrong}`")), "{error}");
        }
        std::fs::write(&file, "series,values\n").unwrap();
        assert!(Cast::open(&file, 1.0).is_err());
        std::fs::write(&file, "series,values\na,lots\n").unwrap();
        let error = Cast::open(&file, 1.0).unwrap_err().to_string();
        assert!(error.contains("cpu.csv:2"), "{error}");
    }
}
