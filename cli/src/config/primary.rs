//! The section `[primary]` in `datanode.toml`: the source of the primary tenant's use, and how much is left to it.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The section `[primary]` in `datanode.toml`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "RawPrimary", into = "RawPrimary")]
pub struct PrimaryConfig {
    /// Source of its use.
    pub source: PrimarySourceConfig,
    /// Resources left to it.
    pub gate: GateConfig,
}

/// Source of the primary tenant's use.
#[derive(Clone, Debug, PartialEq)]
pub enum PrimarySourceConfig {
    /// None.
    None,
    /// The machine, minus HarvestFS's own processes or the cgroup that they are in.
    Machine { own_cgroup: Option<PathBuf> },
    /// A cgroup.
    Cgroup {
        name: PathBuf,
        own_cgroup: Option<PathBuf>,
    },
    /// A recorded series.
    Trace(TraceConfig),
}

impl Default for PrimarySourceConfig {
    fn default() -> Self {
        Self::Machine { own_cgroup: None }
    }
}

/// A recorded series to replay, and its speed.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceConfig {
    /// The trace; relative to the configuration file.
    pub file: PathBuf,
    /// Name of the series, or its number from 1.
    pub series: Option<String>,
    /// Factor by which the replay is faster than the recording.
    pub speed: f64,
}

/// Resources of the server that are left to the primary tenant in addition to what it uses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GateConfig {
    reserve_cpu_percent: Option<Percent>,
    reserve_memory_percent: Option<Percent>,
    stalled_max_percent: Option<Percent>,
    settle_s: Option<Seconds>,
}

impl GateConfig {
    /// Share of the cores that is left to it.
    pub fn cpu_reserve_share(&self) -> Option<f64> {
        self.reserve_cpu_percent.map(|percent| percent.0 / 100.0)
    }

    /// Share of the memory that is left to it.
    pub fn memory_reserve_share(&self) -> Option<f64> {
        self.reserve_memory_percent.map(|percent| percent.0 / 100.0)
    }

    /// Maximum share of time that its tasks may wait; only for a cgroup.
    pub fn stalled_max_share(&self) -> Option<f64> {
        self.stalled_max_percent.map(|percent| percent.0 / 100.0)
    }

    /// How long it must be quiet before its server is used again.
    pub fn settle(&self) -> Option<Duration> {
        self.settle_s
            .map(|seconds| Duration::from_secs_f64(seconds.0))
    }
}

/// A percentage from 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
struct Percent(f64);

impl TryFrom<f64> for Percent {
    type Error = String;

    fn try_from(percent: f64) -> Result<Self, String> {
        if (0.0..=100.0).contains(&percent) {
            Ok(Self(percent))
        } else {
            Err(format!("`{percent}` is not a percentage from 0 to 100"))
        }
    }
}

impl From<Percent> for f64 {
    fn from(percent: Percent) -> f64 {
        percent.0
    }
}

/// A number of seconds, at most an hour.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
struct Seconds(f64);

impl TryFrom<f64> for Seconds {
    type Error = String;

    fn try_from(seconds: f64) -> Result<Self, String> {
        if (0.0..=3600.0).contains(&seconds) {
            Ok(Self(seconds))
        } else {
            Err(format!("`{seconds}` is not a time from 0 to 3600 seconds"))
        }
    }
}

impl From<Seconds> for f64 {
    fn from(seconds: Seconds) -> f64 {
        seconds.0
    }
}

/// `[primary]` as written in the file.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawPrimary {
    source: SourceName,
    cgroup: Option<PathBuf>,
    own_cgroup: Option<PathBuf>,
    trace: Option<PathBuf>,
    series: Option<String>,
    trace_speed: Option<f64>,
    reserve_cpu_percent: Option<Percent>,
    reserve_memory_percent: Option<Percent>,
    stalled_max_percent: Option<Percent>,
    settle_s: Option<Seconds>,
}

/// Name of a source of the primary tenant's use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceName {
    /// None: the server is never busy.
    None,
    /// The whole machine, minus HarvestFS's own processes.
    #[default]
    Machine,
    /// A control group.
    Cgroup,
    /// A recorded series.
    Trace,
}

impl FromStr for SourceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "machine" => Ok(Self::Machine),
            "cgroup" => Ok(Self::Cgroup),
            "trace" => Ok(Self::Trace),
            _ => Err(format!(
                "`{text}` is no source; write `none`, `machine`, `cgroup` or `trace`"
            )),
        }
    }
}

impl TryFrom<RawPrimary> for PrimaryConfig {
    type Error = String;

    fn try_from(raw: RawPrimary) -> Result<Self, String> {
        let source = raw.source;
        let unused = |key: &str, is_set: bool, wanted: &[SourceName]| {
            if is_set && !wanted.contains(&source) {
                let name = format!("{source:?}").to_lowercase();
                return Err(format!("`{key}` means nothing with source = \"{name}\""));
            }
            Ok(())
        };
        let machine = [SourceName::Machine, SourceName::Cgroup];
        unused("cgroup", raw.cgroup.is_some(), &[SourceName::Cgroup])?;
        unused("own_cgroup", raw.own_cgroup.is_some(), &machine)?;
        for (key, is_set) in [
            ("trace", raw.trace.is_some()),
            ("series", raw.series.is_some()),
            ("trace_speed", raw.trace_speed.is_some()),
        ] {
            unused(key, is_set, &[SourceName::Trace])?;
        }
        let missing = |key: &str, what: &str| format!("`{key}` is missing: {what}");
        Ok(Self {
            source: match source {
                SourceName::None => PrimarySourceConfig::None,
                SourceName::Machine => PrimarySourceConfig::Machine {
                    own_cgroup: raw.own_cgroup,
                },
                SourceName::Cgroup => PrimarySourceConfig::Cgroup {
                    name: raw
                        .cgroup
                        .ok_or_else(|| missing("cgroup", "the cgroup of the primary tenant"))?,
                    own_cgroup: raw.own_cgroup,
                },
                SourceName::Trace => PrimarySourceConfig::Trace(TraceConfig {
                    file: raw
                        .trace
                        .ok_or_else(|| missing("trace", "a file of series"))?,
                    series: raw.series,
                    speed: raw.trace_speed.unwrap_or(1.0),
                }),
            },
            gate: GateConfig {
                reserve_cpu_percent: raw.reserve_cpu_percent,
                reserve_memory_percent: raw.reserve_memory_percent,
                stalled_max_percent: raw.stalled_max_percent,
                settle_s: raw.settle_s,
            },
        })
    }
}

impl From<PrimaryConfig> for RawPrimary {
    fn from(config: PrimaryConfig) -> Self {
        let mut raw = Self {
            reserve_cpu_percent: config.gate.reserve_cpu_percent,
            reserve_memory_percent: config.gate.reserve_memory_percent,
            stalled_max_percent: config.gate.stalled_max_percent,
            settle_s: config.gate.settle_s,
            ..Self::default()
        };
        match config.source {
            PrimarySourceConfig::None => raw.source = SourceName::None,
            PrimarySourceConfig::Machine { own_cgroup } => raw.own_cgroup = own_cgroup,
            PrimarySourceConfig::Cgroup { name, own_cgroup } => {
                raw.source = SourceName::Cgroup;
                raw.cgroup = Some(name);
                raw.own_cgroup = own_cgroup;
            }
            PrimarySourceConfig::Trace(trace) => {
                raw.source = SourceName::Trace;
                raw.trace = Some(trace.file);
                raw.series = trace.series;
                raw.trace_speed = Some(trace.speed);
            }
        }
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_primary_is_read_as_it_is_written() {
        let mut config: PrimaryConfig = toml::from_str("").unwrap();
        let machine = PrimarySourceConfig::Machine { own_cgroup: None };
        assert_eq!(config.source, machine);
        assert_eq!(config.gate, GateConfig::default());
        for source in [
            PrimarySourceConfig::None,
            PrimarySourceConfig::Cgroup {
                name: "search.slice".into(),
                own_cgroup: Some("guests.slice".into()),
            },
            PrimarySourceConfig::Trace(TraceConfig {
                file: "cpu.csv.gz".into(),
                series: Some("bb001".into()),
                speed: 300.0,
            }),
        ] {
            config.source = source.clone();
            config.gate.reserve_cpu_percent = Some(Percent(25.0));
            let loaded: PrimaryConfig = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
            assert_eq!(loaded.source, source);
            assert_eq!(loaded.gate.cpu_reserve_share(), Some(0.25));
        }
    }
}
