//! `harvestfs admin history`: the recorded history of the primary tenants.

mod files;

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Subcommand;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::history::{
    HistoryOverview, HistoryRecord, HistoryReply, HistoryRequest, ImportCounts, TenantHistory,
    TenantPattern,
};
use harvestfs_protocol::limits::{
    HISTORY_RECORDS_PER_REQUEST_MAX, HISTORY_SAMPLES_PER_REQUEST_MAX,
};
use harvestfs_protocol::outlook::count;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use self::files::Files;
use super::link::{self, AdminLink};
use crate::units;

/// Most time for one request: an analysis of thousands of tenants may be under way.
const DEADLINE: Duration = Duration::from_secs(120);

#[derive(Debug, Subcommand)]
pub enum HistoryCommand {
    /// Add history from CSV files, plain or gzip-compressed; what is there already is not added again.
    ///
    /// The first line of a file says what it holds:
    /// `from_s,server,environment,machine_function` (the tenant owns the server from that second since 1970
    /// on), `at_s,server` (reimages), `series,period_s,start_unix_s,values` (CPU use of the tenant
    /// ENVIRONMENT/MACHINE_FUNCTION in 0.01 %, one series in a line), or a synthetic datacentre:
    /// tenants, servers, reimages, and the series that its tenants follow.
    #[command(after_help = "Examples:\n  \
        harvestfs admin history import owners.csv reimages.csv\n  \
        harvestfs admin history import use.csv.gz --ends 2026-11-01")]
    Import {
        /// Files, in any order.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// When what has no date ends: a date such as 2026-11-01, or seconds since 1970.
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        ends: Option<u32>,
    },
    /// Show the tenants with their reimages, CPU use, pattern and utilisation class.
    #[command(after_help = "Example:\n  \
        harvestfs admin history show")]
    Show {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Analyse now, not only once a day, and place by the result.
    #[command(after_help = "Example:\n  \
        harvestfs admin history analyse")]
    Analyse,
}

/// What `show --json` prints.
#[derive(Serialize)]
struct Shown {
    overview: HistoryOverview,
    tenants: Vec<TenantHistory>,
}

/// Runs `harvestfs admin history`.
///
/// # Errors
/// When the namenode cannot be asked, or refuses a record: with file and line.
pub async fn execute(link: &AdminLink, command: &HistoryCommand) -> anyhow::Result<()> {
    match command {
        HistoryCommand::Import { files, ends } => import(link, files, *ends).await,
        HistoryCommand::Show { json } => show(link, *json).await,
        HistoryCommand::Analyse => {
            print_overview(&overview(link, HistoryRequest::Analyse).await?);
            Ok(())
        }
    }
}

async fn ask(link: &AdminLink, request: HistoryRequest) -> anyhow::Result<HistoryReply> {
    let request = AdminRequest::History(request);
    let deadline = tokio::time::Instant::now() + DEADLINE;
    loop {
        match link.ask(request.clone(), DEADLINE).await {
            Ok(AdminReply::History(reply)) => return Ok(reply),
            Ok(_) => return Err(link::unexpected()),
            Err(error) => match error.downcast_ref() {
                Some(FsError::Busy { retry_after_ms })
                    if tokio::time::Instant::now() < deadline =>
                {
                    tokio::time::sleep(Duration::from_millis((*retry_after_ms).into())).await;
                }
                _ => return Err(error),
            },
        }
    }
}

async fn overview(link: &AdminLink, request: HistoryRequest) -> anyhow::Result<HistoryOverview> {
    match ask(link, request).await? {
        HistoryReply::Overview(overview) => Ok(overview),
        _ => Err(link::unexpected()),
    }
}

async fn import(link: &AdminLink, paths: &[PathBuf], ends: Option<u32>) -> anyhow::Result<()> {
    let files = Files::open(paths, ends)?;
    for path in files.paths() {
        let progress = ProgressBar::new_spinner().with_style(
            ProgressStyle::with_template("{spinner} {msg}: {pos} records")
                .context("the template of the progress bar")?,
        );
        progress.set_message(path.display().to_string());
        let mut request = Request::new(link, path);
        for line in files.records(path)? {
            let (record, line) = line?;
            request.add(record, line).await?;
            progress.inc(1);
        }
        request.send().await?;
        progress.finish_and_clear();
        let ImportCounts {
            new,
            known,
            too_old,
        } = request.counts;
        println!(
            "{}: {new} new, {known} known before, {too_old} too old to keep",
            path.display()
        );
    }
    print_overview(&overview(link, HistoryRequest::Analyse).await?);
    Ok(())
}

/// Records on their way to the namenode.
struct Request<'a> {
    link: &'a AdminLink,
    path: &'a Path,
    records: Vec<HistoryRecord>,
    lines: Vec<u64>,
    samples: usize,
    counts: ImportCounts,
}

impl<'a> Request<'a> {
    fn new(link: &'a AdminLink, path: &'a Path) -> Self {
        Self {
            link,
            path,
            records: Vec::new(),
            lines: Vec::new(),
            samples: 0,
            counts: ImportCounts::default(),
        }
    }

    async fn add(&mut self, record: HistoryRecord, line: u64) -> anyhow::Result<()> {
        let samples = match &record {
            HistoryRecord::Utilisation { samples, .. } => samples.len(),
            _ => 0,
        };
        if self.records.len() >= HISTORY_RECORDS_PER_REQUEST_MAX
            || self.samples + samples > HISTORY_SAMPLES_PER_REQUEST_MAX
        {
            self.send().await?;
        }
        self.records.push(record);
        self.lines.push(line);
        self.samples += samples;
        Ok(())
    }

    async fn send(&mut self) -> anyhow::Result<()> {
        if self.records.is_empty() {
            return Ok(());
        }
        let records = std::mem::take(&mut self.records);
        match ask(self.link, HistoryRequest::Import(records)).await? {
            HistoryReply::Imported(counts) => {
                self.counts.new += counts.new;
                self.counts.known += counts.known;
                self.counts.too_old += counts.too_old;
            }
            HistoryReply::Refused { record, reason } => {
                let Some(line) = self.lines.get(record as usize) else {
                    return Err(link::unexpected()).with_context(|| {
                        format!(
                            "it refused record {record} of {}: {reason}",
                            self.lines.len()
                        )
                    });
                };
                bail!("{}:{line}: {reason}", self.path.display());
            }
            _ => return Err(link::unexpected()),
        }
        self.lines.clear();
        self.samples = 0;
        Ok(())
    }
}

async fn show(link: &AdminLink, json: bool) -> anyhow::Result<()> {
    let overview = overview(link, HistoryRequest::Overview).await?;
    let mut all: Vec<TenantHistory> = Vec::new();
    loop {
        let after = all.last().map(|tenant| tenant.tenant.clone());
        match ask(link, HistoryRequest::Tenants { after }).await? {
            HistoryReply::Tenants { tenants, more } => {
                let end = !more || tenants.is_empty();
                all.extend(tenants);
                if end {
                    break;
                }
            }
            _ => return Err(link::unexpected()),
        }
    }
    if json {
        let shown = Shown {
            overview,
            tenants: all,
        };
        println!("{}", serde_json::to_string_pretty(&shown)?);
        return Ok(());
    }
    print_tenants(&all);
    print_overview(&overview);
    Ok(())
}

pub fn percent(permille: u16) -> String {
    format!("{:.1} %", f64::from(permille) / 10.0)
}

fn print_tenants(tenants: &[TenantHistory]) {
    println!(
        "{:<20} {:<20} {:>7} {:>8} {:>10} {:>8} {:>8} {:<13} {:>5}",
        "ENVIRONMENT",
        "FUNCTION",
        "SERVERS",
        "REIMAGES",
        "RATE/MONTH",
        "AVERAGE",
        "PEAK",
        "PATTERN",
        "CLASS"
    );
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for tenant in tenants {
        println!(
            "{:<20} {:<20} {:>7} {:>8} {:>10.3} {:>8} {:>8} {:<13} {:>5}",
            tenant.tenant.environment,
            tenant.tenant.machine_function,
            tenant.servers,
            tenant.reimages,
            tenant.reimages_per_1000_server_months as f64 / 1_000.0,
            or_dash(tenant.average_cpu_permille.map(percent)),
            or_dash(tenant.peak_cpu_permille.map(percent)),
            tenant.pattern.map_or("-", TenantPattern::name),
            or_dash(tenant.class.map(|class| class.to_string())),
        );
    }
}

fn print_overview(overview: &HistoryOverview) {
    println!(
        "{}, {}, {}; {} of memory, {} on disk",
        count(overview.tenants, "tenant"),
        count(overview.servers, "server"),
        count(overview.reimages, "reimage"),
        units::human(overview.memory_bytes),
        units::human(overview.disk_bytes)
    );
    match overview.analysed_at_s {
        Some(at_s) => {
            let at = UNIX_EPOCH + Duration::from_secs(at_s.into());
            println!(
                "analysed at {} in {} ms: {}, {} of tenants reimaged together",
                humantime::format_rfc3339_seconds(at),
                overview.analysis_ms,
                count(overview.classes.len() as u64, "utilisation class"),
                count(overview.pairs, "pair")
            );
        }
        None => println!("not analysed yet"),
    }
    for (number, class) in overview.classes.iter().enumerate() {
        println!(
            "class {number:>2}: {:<13} average {:>7}, peak {:>7}, {}",
            class.pattern.name(),
            percent(class.average_cpu_permille),
            percent(class.peak_cpu_permille),
            count(class.tenants.into(), "tenant")
        );
    }
    if overview.slots_lost > 0 {
        println!(
            "{} of two minutes lost: recording fell behind",
            count(overview.slots_lost, "slot")
        );
    }
    for problem in &overview.problems {
        println!("problem: {problem}");
    }
}

/// A date, a date with a time, or seconds since 1970.
fn parse_time(text: &str) -> Result<u32, String> {
    let expected =
        "expected a date such as 2026-11-01 or 2026-11-01T12:00:00Z, or seconds since 1970";
    if let Ok(seconds) = text.parse() {
        return Ok(seconds);
    }
    let dated = if text.len() == 10 {
        humantime::parse_rfc3339_weak(&format!("{text} 00:00:00"))
    } else {
        humantime::parse_rfc3339_weak(text)
    };
    let since = dated
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let seconds = since.and_then(|since| u32::try_from(since.as_secs()).ok());
    seconds.ok_or_else(|| expected.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(parse_time("86400"), Ok(86_400));
        assert_eq!(parse_time("1970-01-02"), Ok(86_400));
        assert_eq!(parse_time("1970-01-02T01:00:00Z"), Ok(90_000));
        for wrong in [
            "",
            "yesterday",
            "1969-01-01",
            "2026-13-01",
            "-5",
            "99999999999",
        ] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
