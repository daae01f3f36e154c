//! A datacentre read from trace files instead of generated.
//!
//! `dcN_tenants`, `dcN_servers` and `dcN_reimages` (CSV, plain or gzip-compressed) are looked for in
//! the given directory and in `synthetic` below it; the series that the tenants' load follows,
//! `cpu_*`, in the directory and in its parent.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harvestfs_telemetry::profile::TenantKey;
use harvestfs_telemetry::traces::{
    self, Ownership, Records, ReimageEvent, Series, SeriesReader, TraceError, window,
};

use super::{Datacentre, LoadModel, MONTH_S, MONTHS, Reimage, Server, Tenant};

/// End of the history, in seconds.
const END_S: u64 = MONTHS as u64 * MONTH_S;

/// Why no datacentre could be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A file is missing.
    #[error("{}: no {file}.csv or {file}.csv.gz here{}", directory.display(), found(available))]
    Missing {
        /// The directory in which it was looked for.
        directory: PathBuf,
        /// Its name, without the extension.
        file: String,
        /// Datacentres that are there.
        available: Vec<String>,
    },
    /// A file cannot be read, or a line in it is wrong.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A file ends before the time that is to be simulated.
    #[error(
        "{}:{line}: ends early: the last reimage is on day {last_day}, needed are {needed_days} days",
        file.display()
    )]
    EndsEarly {
        /// The file.
        file: PathBuf,
        /// Its last line.
        line: u64,
        /// Day of the last reimage, from the start of the history.
        last_day: u64,
        /// Days that are needed.
        needed_days: u64,
    },
    /// A tenant's load follows a series that the files do not have.
    #[error("{}: has no series {series}, which the load of tenant {tenant} follows", file.display())]
    NoSeries {
        /// The file.
        file: PathBuf,
        /// The series.
        series: String,
        /// The tenant.
        tenant: u32,
    },
}

fn found(available: &[String]) -> String {
    if available.is_empty() {
        String::new()
    } else {
        format!("; there are {}", available.join(", "))
    }
}

/// Reads the datacentre of a name, `dc0` for example.
///
/// `until_s` is the end of the time that is needed, in seconds; the reimages must reach within a
/// month of it. The series of the tenants are read only with `with_load`; without, all tenants are
/// idle.
///
/// # Errors
/// When a file is missing, ends early, or a line of it is wrong: the error names file and line.
pub fn read(
    directory: &Path,
    name: &str,
    until_s: u64,
    with_load: bool,
) -> Result<Datacentre, ReadError> {
    let file = |part: &str| find(directory, name, part);
    let (tenants, rows) = read_tenants(&file("tenants")?)?;
    let servers = read_servers(&file("servers")?, tenants.len())?;
    let reimages = read_reimages(&file("reimages")?, servers.len(), tenants.len(), until_s)?;
    let mut datacentre = Datacentre {
        name: name.to_owned(),
        tenants,
        servers,
        reimages,
    };
    if with_load {
        read_load(directory, &rows, &mut datacentre.tenants)?;
    }
    Ok(datacentre)
}

fn either(directory: &Path, file: &str) -> Option<PathBuf> {
    ["csv.gz", "csv"]
        .iter()
        .map(|ending| directory.join(format!("{file}.{ending}")))
        .find(|path| path.is_file())
}

fn find(directory: &Path, name: &str, part: &str) -> Result<PathBuf, ReadError> {
    let file = format!("{name}_{part}");
    let below = directory.join("synthetic");
    either(directory, &file)
        .or_else(|| either(&below, &file))
        .ok_or_else(|| ReadError::Missing {
            directory: directory.to_owned(),
            file,
            available: super::profile::PROFILES
                .iter()
                .filter(|profile| {
                    let tenants = format!("{}_tenants", profile.name);
                    either(directory, &tenants)
                        .or_else(|| either(&below, &tenants))
                        .is_some()
                })
                .map(|profile| profile.name.to_owned())
                .collect(),
        })
}

fn read_tenants(file: &Path) -> Result<(Vec<Tenant>, Vec<traces::Tenant>), ReadError> {
    let mut records = Records::<traces::Tenant>::open(file)?;
    let (mut tenants, mut rows) = (Vec::new(), Vec::new());
    while let Some(record) = records.next() {
        let row = record?;
        if row.tenant as usize != tenants.len() {
            let expected = format!("tenant {}", tenants.len());
            return Err(records.malformed(&expected, &row.tenant.to_string()).into());
        }
        tenants.push(Tenant {
            key: TenantKey {
                environment: format!("e{}", row.environment),
                machine_function: format!("f{}", row.tenant),
            },
            environment: row.environment,
            environment_kind: row.environment_kind,
            pattern: row.pattern,
            first_month: row.first_month,
            end_month: row.end_month,
            size_at_start: row.servers_at_start,
            load: LoadModel::Recorded {
                samples: Arc::from([]),
                shift_slots: 0,
            },
        });
        rows.push(row);
    }
    Ok((tenants, rows))
}

fn read_servers(file: &Path, tenants: usize) -> Result<Vec<Server>, ReadError> {
    let mut records = Records::<Ownership>::open(file)?;
    let mut servers: Vec<Server> = Vec::new();
    while let Some(record) = records.next() {
        let row = record?;
        if row.tenant as usize >= tenants {
            return Err(unknown(&records, "tenant", tenants, row.tenant));
        }
        if row.from_s >= END_S {
            let expected = format!("a time before {END_S} s");
            return Err(records.malformed(&expected, &row.from_s.to_string()).into());
        }
        let owner = (row.from_s, row.tenant);
        let number = row.server as usize;
        if number == servers.len() {
            servers.push(Server {
                rack: row.rack,
                owners: vec![owner],
            });
            continue;
        }
        let follows = number + 1 == servers.len();
        match servers.last_mut() {
            Some(last) if follows && last.owners.last().is_some_and(|it| it.0 < row.from_s) => {
                last.owners.push(owner);
            }
            _ => {
                let expected = format!("server {}, or the next owner of the last", servers.len());
                return Err(records.malformed(&expected, &row.server.to_string()).into());
            }
        }
    }
    Ok(servers)
}

fn unknown<R: traces::Record>(
    records: &Records<R>,
    what: &str,
    count: usize,
    number: u32,
) -> ReadError {
    let expected = format!("a {what} below {count}");
    records.malformed(&expected, &number.to_string()).into()
}

fn read_reimages(
    file: &Path,
    servers: usize,
    tenants: usize,
    until_s: u64,
) -> Result<Vec<Reimage>, ReadError> {
    let mut records = Records::<ReimageEvent>::open(file)?;
    let mut reimages: Vec<Reimage> = Vec::new();
    while let Some(record) = records.next() {
        let row = record?;
        let last_s = reimages.last().map_or(0, |last| last.at_s);
        if row.server as usize >= servers {
            return Err(unknown(&records, "server", servers, row.server));
        }
        if row.tenant as usize >= tenants {
            return Err(unknown(&records, "tenant", tenants, row.tenant));
        }
        if row.at_s < last_s || row.at_s >= END_S {
            let expected = format!("a time from {last_s} to {END_S} s, in order");
            return Err(records.malformed(&expected, &row.at_s.to_string()).into());
        }
        reimages.push(Reimage {
            at_s: row.at_s,
            server: row.server,
            tenant: row.tenant,
            kind: row.kind,
            burst: row.burst,
        });
    }
    let last_s = reimages.last().map_or(0, |last| last.at_s);
    if last_s + MONTH_S < until_s {
        return Err(ReadError::EndsEarly {
            file: file.to_owned(),
            line: records.line(),
            last_day: last_s / super::DAY_S,
            needed_days: until_s.div_ceil(super::DAY_S),
        });
    }
    Ok(reimages)
}

/// Reads the series that tenants follow, each file once.
fn read_load(
    directory: &Path,
    rows: &[traces::Tenant],
    tenants: &mut [Tenant],
) -> Result<(), ReadError> {
    let sources: BTreeSet<&str> = rows.iter().map(|row| row.cpu_source.as_str()).collect();
    for source in sources {
        let name = format!("cpu_{source}");
        let above = directory.parent().unwrap_or(directory);
        let file = either(directory, &name)
            .or_else(|| either(above, &name))
            .ok_or_else(|| ReadError::Missing {
                directory: directory.to_owned(),
                file: name,
                available: Vec::new(),
            })?;
        let wanted: BTreeSet<&str> = rows
            .iter()
            .filter(|row| row.cpu_source == source)
            .map(|row| row.cpu_series.as_str())
            .collect();
        let mut series = BTreeMap::new();
        for record in SeriesReader::open(&file)? {
            let record = record?;
            if wanted.contains(record.name.as_str()) {
                series.insert(record.name.clone(), record);
            }
        }
        for (row, tenant) in rows.iter().zip(tenants.iter_mut()) {
            if row.cpu_source != source {
                continue;
            }
            let part = series.get(&row.cpu_series).and_then(|it| {
                let part = it.slice(window(&row.cpu_window)?);
                (!part.is_empty()).then(|| filled(&part))
            });
            let Some(samples) = part else {
                return Err(ReadError::NoSeries {
                    file,
                    series: format!("{} with {}", row.cpu_series, row.cpu_window),
                    tenant: row.tenant,
                });
            };
            tenant.load = LoadModel::Recorded {
                samples,
                shift_slots: -i64::from(row.cpu_shift_samples),
            };
        }
    }
    Ok(())
}

/// Samples as shares; missing ones repeat the one before.
fn filled(series: &Series) -> Arc<[f32]> {
    let mut last = (0..series.len())
        .find_map(|at| series.share(at))
        .unwrap_or(0.0);
    (0..series.len())
        .map(|at| {
            last = series.share(at).unwrap_or(last);
            last
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_owner_after_the_end_of_the_history_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("dc0_servers.csv");
        let read = |from_s: u64| {
            let text = format!("server,rack,from_s,tenant\n0,0,0,0\n0,0,{from_s},1\n");
            fs::write(&file, text).expect("it is written");
            read_servers(&file, 2)
        };
        let servers = read(END_S - 1).expect("it has an owner in the last second");
        assert_eq!(servers[0].owners, [(0, 0), (END_S - 1, 1)]);
        let error = read(END_S + MONTH_S).expect_err("nothing counts months after the last");
        assert!(error.to_string().contains("a time before"), "{error}");
    }
}
