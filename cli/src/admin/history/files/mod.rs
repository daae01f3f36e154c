//! History files: detects the kind of each, and reads its records.
//!
//! | first line | content |
//! |---|---|
//! | `from_s,server,environment,machine_function` | the tenant that owns a server from some second (since 1970) on |
//! | `at_s,server` | reimages |
//! | `series[,period_s][,start_unix_s],values` | CPU use of a tenant's average server; `series` is `ENVIRONMENT/MACHINE_FUNCTION` |
//! | `tenant,env,env_kind,...` | tenants of a synthetic datacentre; gives the numbers in the next three their names |
//! | `server,rack,from_s,tenant` | its servers |
//! | `t_s,server,tenant,kind,burst` | its reimages |
//! | `...,values` beside a file of tenants | the series that its tenants follow |
//!
//! Number N of a synthetic datacentre is `server-N`, `environment-N` or `function-N`. Its seconds count
//! up to the end of 36 months of 30 days.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use harvestfs_protocol::history::{HistoryRecord, MISSING_SAMPLE, TenantName};
use harvestfs_telemetry::traces::{
    Ownership, Record, Records, ReimageEvent, Row, Rows, Series, SeriesReader, Tenant, TraceError,
    window,
};

/// Length of the record of a synthetic datacentre in seconds.
const SYNTHETIC_S: u64 = 36 * 30 * 86_400;

/// Maximum number of samples in one record, so that several records fit into a request.
const SAMPLES_PER_RECORD: usize = 32_768;

/// A record and its line number.
pub type Line = anyhow::Result<(HistoryRecord, u64)>;

/// The kind of a file, in the order in which they must be read: reimages need owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Tenants,
    Owners,
    SyntheticOwners,
    Reimages,
    SyntheticReimages,
    Series,
}

/// The tenant that owns a server from some time on, in HarvestFS's own format.
struct OwnerLine {
    from_s: u32,
    server: String,
    tenant: TenantName,
}

impl Record for OwnerLine {
    const COLUMNS: &'static [&'static str] =
        &["from_s", "server", "environment", "machine_function"];

    fn parse(row: &Row<'_>) -> Result<Self, TraceError> {
        let [from_s, server, environment, machine_function] = row.fields()?;
        Ok(Self {
            from_s: row.parse(from_s, "a time in seconds since 1970")?,
            server: server.to_owned(),
            tenant: TenantName {
                environment: environment.to_owned(),
                machine_function: machine_function.to_owned(),
            },
        })
    }
}

/// A reimage, in HarvestFS's own format.
struct ReimageLine {
    at_s: u32,
    server: String,
}

impl Record for ReimageLine {
    const COLUMNS: &'static [&'static str] = &["at_s", "server"];

    fn parse(row: &Row<'_>) -> Result<Self, TraceError> {
        let [at_s, server] = row.fields()?;
        Ok(Self {
            at_s: row.parse(at_s, "a time in seconds since 1970")?,
            server: server.to_owned(),
        })
    }
}

/// The files of one import.
pub struct Files {
    files: Vec<(Kind, PathBuf)>,
    /// Tenants of the synthetic datacentre by number, if there is one.
    tenants: Option<HashMap<u32, Tenant>>,
    /// End of the data that have no dates, in seconds since 1970.
    ends_s: Option<u32>,
}

impl Files {
    /// Reads the first line of each file to determine its kind.
    ///
    /// # Errors
    /// When a file cannot be read or is of an unknown kind; the error contains its name.
    pub fn open(paths: &[PathBuf], ends_s: Option<u32>) -> anyhow::Result<Self> {
        let mut files = Vec::new();
        let mut tenants = None;
        for path in paths {
            let kind = kind_of(&Rows::open(path)?)?;
            if kind == Kind::Tenants {
                if tenants.is_some() {
                    bail!(
                        "{}: a second file of tenants; import one datacentre at a time",
                        path.display()
                    );
                }
                tenants = Some(read_tenants(path)?);
            } else {
                files.push((kind, path.clone()));
            }
        }
        files.sort();
        Ok(Self {
            files,
            tenants,
            ends_s,
        })
    }

    /// The files that hold records, in the order in which they are to be read.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(_, path)| path.as_path())
    }

    /// The records of a file.
    ///
    /// # Errors
    /// When the file cannot be read, or needs something that was not given.
    pub fn records<'a>(
        &'a self,
        path: &Path,
    ) -> anyhow::Result<Box<dyn Iterator<Item = Line> + 'a>> {
        let kind = self.files.iter().find(|(_, other)| other == path);
        let kind = kind
            .map(|(kind, _)| *kind)
            .context("a file of this import")?;
        let name = path.display().to_string();
        Ok(match kind {
            Kind::Tenants => Box::new(std::iter::empty()),
            Kind::Owners => Box::new(lines(Records::open(path)?).map(|line| {
                let (owner, line): (OwnerLine, u64) = line?;
                let record = HistoryRecord::Owner {
                    server: owner.server,
                    tenant: owner.tenant,
                    from_s: owner.from_s,
                };
                Ok((record, line))
            })),
            Kind::Reimages => Box::new(lines(Records::open(path)?).map(|line| {
                let (reimage, line): (ReimageLine, u64) = line?;
                let record = HistoryRecord::Reimage {
                    server: reimage.server,
                    at_s: reimage.at_s,
                };
                Ok((record, line))
            })),
            Kind::SyntheticOwners => {
                let begin_s = self.synthetic_begin_s(path)?;
                Box::new(lines(Records::open(path)?).map(move |line| {
                    let (owner, line): (Ownership, u64) = line?;
                    let tenant = self.synthetic_tenant(owner.tenant);
                    let record = HistoryRecord::Owner {
                        server: synthetic_server(owner.server),
                        tenant: tenant.with_context(|| format!("{name}:{line}"))?,
                        from_s: at(begin_s, owner.from_s)
                            .with_context(|| format!("{name}:{line}"))?,
                    };
                    Ok((record, line))
                }))
            }
            Kind::SyntheticReimages => {
                let begin_s = self.synthetic_begin_s(path)?;
                Box::new(lines(Records::open(path)?).map(move |line| {
                    let (reimage, line): (ReimageEvent, u64) = line?;
                    let record = HistoryRecord::Reimage {
                        server: synthetic_server(reimage.server),
                        at_s: at(begin_s, reimage.at_s)
                            .with_context(|| format!("{name}:{line}"))?,
                    };
                    Ok((record, line))
                }))
            }
            Kind::Series if self.tenants.is_some() => self.followed_series(path)?,
            Kind::Series => self.own_series(path)?,
        })
    }

    /// Reads series that are named after their tenants.
    fn own_series<'a>(
        &'a self,
        path: &Path,
    ) -> anyhow::Result<Box<dyn Iterator<Item = Line> + 'a>> {
        let name = path.display().to_string();
        Ok(Box::new(series_lines(path)?.flat_map(move |line| {
            let converted = line.and_then(|(series, line)| {
                let tenant = series.name.split_once('/').map(|(environment, function)| TenantName {
                    environment: environment.to_owned(),
                    machine_function: function.to_owned(),
                });
                let tenant = tenant.with_context(|| {
                    format!("{name}:{line}: expected a series called ENVIRONMENT/MACHINE_FUNCTION, found {:?}", series.name)
                })?;
                let start_s = match series.start_unix_s {
                    Some(start) => u32::try_from(start).ok(),
                    None => self.start_before_end(&series).with_context(|| {
                        format!("{name}:{line}: the series has no start; say with --ends when it ends")
                    })?,
                };
                let start_s = start_s.with_context(|| {
                    format!("{name}:{line}: expected a start between 1970 and 2106")
                })?;
                pieces(&series, &tenant, start_s, line).with_context(|| format!("{name}:{line}"))
            });
            all_or_error(converted)
        })))
    }

    /// Reads series that tenants of a synthetic datacentre follow, each with its own window and shift.
    fn followed_series<'a>(
        &'a self,
        path: &Path,
    ) -> anyhow::Result<Box<dyn Iterator<Item = Line> + 'a>> {
        let file = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let source = file.strip_prefix("cpu_").unwrap_or(&file);
        let source = source
            .split_once('.')
            .map_or(source, |(stem, _)| stem)
            .to_owned();
        let mut followers: HashMap<&str, Vec<&Tenant>> = HashMap::new();
        for tenant in self.tenants.iter().flat_map(HashMap::values) {
            if tenant.cpu_source == source {
                followers
                    .entry(&tenant.cpu_series)
                    .or_default()
                    .push(tenant);
            }
        }
        if followers.is_empty() {
            bail!("{}: no tenant follows a series of {source}", path.display());
        }
        let name = path.display().to_string();
        Ok(Box::new(series_lines(path)?.flat_map(move |line| {
            let converted = line.and_then(|(series, line)| {
                let mut all = Vec::new();
                for tenant in followers.get(series.name.as_str()).into_iter().flatten() {
                    let part = window(&tenant.cpu_window).expect("it was checked when it was read");
                    let part = turned(&series.slice(part), tenant.cpu_shift_samples);
                    let start_s = self.start_before_end(&part).with_context(|| {
                        format!("{name}: the series have no date here; say with --ends when they end")
                    })?;
                    let start_s = start_s.with_context(|| {
                        format!("{name}:{line}: the series would begin before 1970; choose a later --ends")
                    })?;
                    let tenant = self.synthetic_tenant(tenant.tenant)?;
                    let pieces = pieces(&part, &tenant, start_s, line);
                    all.extend(pieces.with_context(|| format!("{name}:{line}"))?);
                }
                Ok(all)
            });
            all_or_error(converted)
        })))
    }

    fn start_before_end(&self, series: &Series) -> Option<Option<u32>> {
        let length_s = series.len() as u64 * u64::from(series.period_s);
        let start_s = u64::from(self.ends_s?).checked_sub(length_s);
        Some(start_s.and_then(|start| u32::try_from(start).ok()))
    }

    fn synthetic_begin_s(&self, path: &Path) -> anyhow::Result<u64> {
        let ends_s = self.ends_s.with_context(|| {
            format!(
                "{}: its times have no date; say with --ends when they end",
                path.display()
            )
        })?;
        u64::from(ends_s)
            .checked_sub(SYNTHETIC_S)
            .context("--ends must leave room for three years after 1970")
    }

    fn synthetic_tenant(&self, number: u32) -> anyhow::Result<TenantName> {
        let tenants = self.tenants.as_ref();
        let tenants =
            tenants.context("the file of tenants of the datacentre must be imported with it")?;
        let tenant = tenants.get(&number);
        let tenant = tenant
            .with_context(|| format!("expected a tenant of the file of tenants, found {number}"))?;
        Ok(TenantName {
            environment: format!("environment-{}", tenant.environment),
            machine_function: format!("function-{number}"),
        })
    }
}

fn kind_of(rows: &Rows) -> anyhow::Result<Kind> {
    let kinds = [
        (Tenant::COLUMNS, Kind::Tenants),
        (OwnerLine::COLUMNS, Kind::Owners),
        (Ownership::COLUMNS, Kind::SyntheticOwners),
        (ReimageLine::COLUMNS, Kind::Reimages),
        (ReimageEvent::COLUMNS, Kind::SyntheticReimages),
    ];
    for (columns, kind) in kinds {
        if rows.header() == columns {
            return Ok(kind);
        }
    }
    if rows.header().last().is_some_and(|last| last == "values") {
        return Ok(Kind::Series);
    }
    let expected = "the first line of a file of history: from_s,server,environment,machine_function or \
                    at_s,server or series,...,values or one of a synthetic datacentre";
    Err(rows.malformed(expected, &rows.header().join(",")).into())
}

fn read_tenants(path: &Path) -> anyhow::Result<HashMap<u32, Tenant>> {
    let mut records = Records::<Tenant>::open(path)?;
    let mut tenants = HashMap::new();
    while let Some(tenant) = records.next() {
        let tenant = tenant?;
        let number = tenant.tenant;
        if tenants.insert(number, tenant).is_some() {
            let found = number.to_string();
            return Err(records.malformed("each tenant once", &found).into());
        }
    }
    Ok(tenants)
}

/// Iterates over records with their line numbers.
fn lines<R: Record>(mut records: Records<R>) -> impl Iterator<Item = anyhow::Result<(R, u64)>> {
    std::iter::from_fn(move || {
        let next = records.next()?;
        Some(
            next.map(|record| (record, records.line()))
                .map_err(Into::into),
        )
    })
}

fn series_lines(
    path: &Path,
) -> anyhow::Result<impl Iterator<Item = anyhow::Result<(Series, u64)>> + use<>> {
    let mut reader = SeriesReader::open(path)?;
    Ok(std::iter::from_fn(move || {
        let next = reader.next()?;
        Some(
            next.map(|series| (series, reader.line()))
                .map_err(Into::into),
        )
    }))
}

fn all_or_error(converted: anyhow::Result<Vec<(HistoryRecord, u64)>>) -> Vec<Line> {
    match converted {
        Ok(records) => records.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error)],
    }
}

/// Rotates a series: sample `i` of the result is sample `i - shift` of the original, modulo the length.
fn turned(series: &Series, shift: i32) -> Series {
    let mut samples: Vec<_> = series.percents().collect();
    if !samples.is_empty() {
        let by = i64::from(shift).rem_euclid(samples.len() as i64);
        samples.rotate_right(by as usize);
    }
    Series::new(&series.name, series.period_s, samples)
}

/// Splits a series into records that each fit into a request.
///
/// # Errors
/// When it ends later than a record can represent.
fn pieces(
    series: &Series,
    tenant: &TenantName,
    start_s: u32,
    line: u64,
) -> anyhow::Result<Vec<(HistoryRecord, u64)>> {
    let percents: Vec<Option<f32>> = series.percents().collect();
    let mut pieces = Vec::new();
    for (number, samples) in percents.chunks(SAMPLES_PER_RECORD).enumerate() {
        let before_s = (number * SAMPLES_PER_RECORD) as u64 * u64::from(series.period_s);
        let start_s = u32::try_from(u64::from(start_s) + before_s)
            .map_err(|_| anyhow::anyhow!("expected samples between 1970 and 2106"))?;
        let encode = |percent: &Option<f32>| match percent {
            // More than 100 % counts as 100 %.
            Some(percent) => (percent * 100.0).round().clamp(0.0, 10_000.0) as u16,
            None => MISSING_SAMPLE,
        };
        let record = HistoryRecord::Utilisation {
            tenant: tenant.clone(),
            start_s,
            period_s: series.period_s,
            samples: samples.iter().map(encode).collect(),
        };
        pieces.push((record, line));
    }
    Ok(pieces)
}

fn synthetic_server(number: u32) -> String {
    format!("server-{number}")
}

fn at(begin_s: u64, seconds: u64) -> anyhow::Result<u32> {
    let at_s = begin_s
        .checked_add(seconds)
        .and_then(|at_s| u32::try_from(at_s).ok());
    at_s.with_context(|| format!("expected a time before 2106, found second {seconds}"))
}
