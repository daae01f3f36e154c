//! Files with one record of fixed columns in each line: synthetic datacentres, and the index of the
//! series.

use std::marker::PhantomData;
use std::path::Path;

use super::error::TraceError;
use super::rows::{Row, Rows};
use crate::profile::Pattern;

/// The content of a line of a file with fixed columns.
pub trait Record: Sized {
    /// The names of the columns.
    const COLUMNS: &'static [&'static str];

    /// Parses a line.
    fn parse(row: &Row<'_>) -> Result<Self, TraceError>;
}

/// Reads the records of a file in order.
pub struct Records<R> {
    rows: Rows,
    failed: bool,
    record: PhantomData<fn() -> R>,
}

impl<R: Record> Records<R> {
    /// Opens a file and checks its header.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        Records::new(Rows::open(path)?)
    }

    /// Creates a reader of the records in these lines.
    pub fn new(rows: Rows) -> Result<Self, TraceError> {
        rows.expect_columns(R::COLUMNS)?;
        Ok(Records {
            rows,
            failed: false,
            record: PhantomData,
        })
    }

    /// Returns the number of the line of the last record.
    pub fn line(&self) -> u64 {
        self.rows.line()
    }

    /// Returns an error that the last record is wrong, for inconsistencies that only the caller can see.
    pub fn malformed(&self, expected: &str, found: &str) -> TraceError {
        self.rows.malformed(expected, found)
    }
}

impl<R: Record> Iterator for Records<R> {
    type Item = Result<R, TraceError>;

    /// After an error, the iterator ends.
    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = match self.rows.next_row() {
            Ok(Some(row)) => Some(R::parse(&row)),
            Ok(None) => None,
            Err(error) => Some(Err(error)),
        };
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

/// The purpose of an environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EnvironmentKind {
    /// Production.
    Production,
    /// Development.
    Development,
    /// Testing.
    Test,
}

/// A tenant of a synthetic datacentre (`dcN_tenants`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its number, which names its machine function.
    pub tenant: u32,
    /// The number of its environment.
    pub environment: u32,
    /// The purpose of its environment.
    pub environment_kind: EnvironmentKind,
    /// The pattern of its CPU utilisation.
    pub pattern: Pattern,
    /// The first month (of 30 days, from 0) in which it has servers.
    pub first_month: u32,
    /// The month before which its last server is removed.
    pub end_month: u32,
    /// How many servers it has initially.
    pub servers_at_start: u32,
    /// The traces that contain its series: `bitbrains_rnd` or `jumpstarter` (file `cpu_<source>.csv.gz`).
    pub cpu_source: String,
    /// The name of the series that its CPU utilisation follows.
    pub cpu_series: String,
    /// The part of the series, see [`super::window`].
    pub cpu_window: String,
    /// By how many samples (of 300 s) the part is rotated: sample `i` of the tenant is sample `i - shift` of the
    /// part, modulo its length.
    pub cpu_shift_samples: i32,
}

/// The owner of a server from some time on (`dcN_servers`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The number of the server.
    pub server: u32,
    /// The number of its rack.
    pub rack: u32,
    /// When ownership begins, in seconds.
    pub from_s: u64,
    /// The number of the tenant that owns it.
    pub tenant: u32,
}

/// Why a server was reimaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReimageKind {
    /// Disk maintenance.
    Disk,
    /// A test of resilience.
    Test,
    /// A redeployment of many servers simultaneously.
    Burst,
    /// A redeployment of one server after the other.
    Rolling,
    /// A redeployment of a whole environment.
    Environment,
    /// The server is transferred to another tenant.
    Repurpose,
}

/// A reimage (`dcN_reimages`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReimageEvent {
    /// When it happened, in seconds.
    pub at_s: u64,
    /// The number of the server.
    pub server: u32,
    /// The tenant that owned it, or that gave it away.
    pub tenant: u32,
    /// The reason.
    pub kind: ReimageKind,
    /// The group of reimages that it was part of; 0 if it was alone.
    pub burst: u32,
}

/// An entry of the index about a part of a series (`cpu_index`).
#[derive(Clone, Debug, PartialEq)]
pub struct IndexEntry {
    /// The traces: `bitbrains_rnd`, `jumpstarter` or `cluster_aggregate`.
    pub source: String,
    /// The series.
    pub series: String,
    /// The part, see [`super::window`].
    pub window: String,
    /// Its length in days.
    pub days: u32,
    /// The share of its samples that are present, 0 to 1.
    pub coverage: f64,
    /// Mean, in percent.
    pub average_percent: f64,
    /// 99th percentile, in percent.
    pub p99_percent: f64,
    /// Maximum, in percent, limited to 100.
    pub max_percent: f64,
    /// Standard deviation of half-hour means, in percentage points.
    pub deviation_30min_percent: f64,
    /// The pattern; none when there are too few samples.
    pub pattern: Option<Pattern>,
}

fn pattern(row: &Row<'_>, text: &str) -> Result<Pattern, TraceError> {
    match text {
        "periodic" => Ok(Pattern::Periodic),
        "constant" => Ok(Pattern::Constant),
        "unpredictable" => Ok(Pattern::Unpredictable),
        _ => Err(row.malformed("periodic, constant or unpredictable", text)),
    }
}

impl Record for Tenant {
    const COLUMNS: &'static [&'static str] = &[
        "tenant",
        "env",
        "env_kind",
        "class",
        "first_month",
        "end_month",
        "size_at_start",
        "cpu_source",
        "cpu_series",
        "cpu_window",
        "cpu_shift_slots",
    ];

    fn parse(row: &Row<'_>) -> Result<Self, TraceError> {
        let [
            tenant,
            environment,
            kind,
            class,
            first,
            end,
            size,
            source,
            series,
            window,
            shift,
        ] = row.fields()?;
        Ok(Tenant {
            tenant: row.parse(tenant, "a tenant number")?,
            environment: row.parse(environment, "an environment number")?,
            environment_kind: match kind {
                "prod" => EnvironmentKind::Production,
                "dev" => EnvironmentKind::Development,
                "test" => EnvironmentKind::Test,
                _ => return Err(row.malformed("prod, dev or test", kind)),
            },
            pattern: pattern(row, class)?,
            first_month: row.parse(first, "a month number")?,
            end_month: row.parse(end, "a month number")?,
            servers_at_start: row.parse(size, "a number of servers")?,
            cpu_source: source.to_owned(),
            cpu_series: series.to_owned(),
            cpu_window: match super::window(window) {
                Some(_) => window.to_owned(),
                None => return Err(row.malformed("a window such as 2013-07 or d01-30", window)),
            },
            cpu_shift_samples: row.parse(shift, "a number of samples")?,
        })
    }
}

impl Record for Ownership {
    const COLUMNS: &'static [&'static str] = &["server", "rack", "from_s", "tenant"];

    fn parse(row: &Row<'_>) -> Result<Self, TraceError> {
        let [server, rack, from_s, tenant] = row.fields()?;
        Ok(Ownership {
            server: row.parse(server, "a server number")?,
            rack: row.parse(rack, "a rack number")?,
            from_s: row.parse(from_s, "a time in seconds")?,
            tenant: row.parse(tenant, "a tenant number")?,
        })
    }
}

impl Record for ReimageEvent {
    const COLUMNS: &'static [&'static str] = &["t_s", "server", "tenant", "kind", "burst"];

    fn parse(row: &Row<'_>) -> Result<Self, TraceError> {
        let [at_s, server, tenant, kind, burst] = row.fields()?;
        Ok(ReimageEvent {
            at_s: row.parse(at_s, "a time in seconds")?,
            server: row.parse(server, "a server number")?,
            tenant: row.parse(tenant, "a tenant number")?,
            kind: match kind {
                "disk" => ReimageKind::Disk,
                "test" => ReimageKind::Test,
                "burst" => ReimageKind::Burst,
                "rolling" => ReimageKind::Rolling,
                "env" => ReimageKind::Environment,
                "repurpose" => ReimageKind::Repurpose,
                _ => {
                    let expected = "disk, test, burst, rolling, env or repurpose";
                    return Err(row.malformed(expected, kind));
                }
            },
            burst: row.parse(burst, "a group number, 0 for none")?,
        })
    }
}

impl Record for IndexEntry {
    const COLUMNS: &'static [&'static str] = &[
        "source",
        "series",
        "window",
        "days",
        "coverage",
        "avg",
        "p95",
        "p99",
        "max",
        "sd30",
        "daily_share",
        "top_bin",
        "cls",
    ];

    fn parse(row: &Row<'_>) -> Result<Self, TraceError> {
        let fields: [&str; 13] = row.fields()?;
        let [
            source,
            series,
            window,
            days,
            coverage,
            average,
            _p95,
            p99,
            max,
            deviation,
            ..,
        ] = fields;
        let class = fields[12];
        // Nothing is computed for a window without samples.
        let percent = |text: &str| match text {
            "" => Ok(0.0),
            text => row.finite(text, "a number of percent"),
        };
        Ok(IndexEntry {
            source: source.to_owned(),
            series: series.to_owned(),
            window: window.to_owned(),
            days: row.parse(days, "a number of days")?,
            coverage: row.finite(coverage, "a share from 0 to 1")?,
            average_percent: percent(average)?,
            p99_percent: percent(p99)?,
            max_percent: percent(max)?,
            deviation_30min_percent: percent(deviation)?,
            pattern: match class {
                "short" => None,
                class => Some(pattern(row, class)?),
            },
        })
    }
}
