//! Series of CPU utilisation: one series in a row, its samples after the named columns.

use std::ops::Range;
use std::path::Path;

use super::error::TraceError;
use super::rows::{Row, Rows};

/// Period of the samples of a file without a `period_s` column, in seconds.
pub const DEFAULT_PERIOD_S: u32 = 300;

/// Most samples in a series, since a line cannot hold more.
const MAX_SAMPLES: usize = super::rows::MAX_LINE_BYTES;

/// The value that marks a missing sample.
const MISSING: u16 = u16::MAX;

/// The CPU utilisation of a server or a tenant over time, evenly spaced, with gaps. Takes two bytes for each sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Series {
    /// Its name: the `series` column, or date, node and slice joined by slashes.
    pub name: String,
    /// Time between samples in seconds; at least 1.
    pub period_s: u32,
    /// When the first sample begins, in seconds since 1970; none if unknown.
    pub start_unix_s: Option<i64>,
    /// Samples in 0.01 %.
    samples: Vec<u16>,
}

impl Series {
    /// Creates a series from percentages; values are rounded to 0.01 % and limited to 0..=655.34 %, and NaN counts as
    /// missing. A period of 0 becomes 1 second.
    pub fn new(name: &str, period_s: u32, percents: impl IntoIterator<Item = Option<f32>>) -> Self {
        let encode = |percent: Option<f32>| match percent {
            // Lossless, because it is limited to the range.
            Some(percent) if !percent.is_nan() => {
                (percent * 100.0).round().clamp(0.0, f32::from(MISSING - 1)) as u16
            }
            _ => MISSING,
        };
        Series {
            name: name.to_owned(),
            period_s: period_s.max(1),
            start_unix_s: None,
            samples: percents.into_iter().map(encode).collect(),
        }
    }

    /// Returns the number of samples, including missing ones.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether it has no samples at all.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Returns a sample in percent, as measured: it may exceed 100. None when it is missing, or beyond the end.
    pub fn percent(&self, index: usize) -> Option<f32> {
        let sample = *self.samples.get(index)?;
        (sample != MISSING).then(|| f32::from(sample) / 100.0)
    }

    /// Returns a sample as a share of the whole, 0 to 1; values over 100 % count as 100 %.
    pub fn share(&self, index: usize) -> Option<f32> {
        self.percent(index)
            .map(|percent| (percent / 100.0).min(1.0))
    }

    /// Returns all samples in percent, as measured.
    pub fn percents(&self) -> impl ExactSizeIterator<Item = Option<f32>> + '_ {
        (0..self.samples.len()).map(|index| self.percent(index))
    }

    /// Returns a part of the series; what lies beyond its end is left out.
    pub fn slice(&self, range: Range<usize>) -> Series {
        let end = range.end.min(self.samples.len());
        let start = range.start.min(end);
        let offset_s = i64::try_from(start).unwrap_or(i64::MAX);
        let offset_s = offset_s.saturating_mul(i64::from(self.period_s));
        Series {
            name: self.name.clone(),
            period_s: self.period_s,
            start_unix_s: self.start_unix_s.map(|from| from.saturating_add(offset_s)),
            samples: self.samples[start..end].to_vec(),
        }
    }

    /// Returns the share of the samples that are present, 0 to 1.
    pub fn coverage(&self) -> f64 {
        let present = self.samples.iter().filter(|&&sample| sample != MISSING);
        present.count() as f64 / self.samples.len().max(1) as f64
    }
}

/// Returns the sample range of a window of the traces by its name: a month of the Bitbrains traces (`2013-08`) or
/// days (`d01-30`, both included). In samples of [`DEFAULT_PERIOD_S`].
pub fn window(name: &str) -> Option<Range<usize>> {
    const DAY: usize = 288;
    match name {
        // The last day of each month is missing in the traces; September then has 29.
        "2013-07" => return Some(0..30 * DAY),
        "2013-08" => return Some(31 * DAY..61 * DAY),
        "2013-09" => return Some(62 * DAY..91 * DAY),
        _ => {}
    }
    let (first, last) = name.strip_prefix('d')?.split_once('-')?;
    let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
    (1 <= first && first <= last).then(|| (usize::from(first) - 1) * DAY..usize::from(last) * DAY)
}

/// Reads the series of a file in order, holding only one series in memory.
///
/// The last column must be `values`: all fields from there on are samples, whole numbers in 0.01 %, empty where the
/// sample is missing. The preceding columns are:
///
/// | columns | |
/// |---|---|
/// | `series` | the name (required, unless the next row applies) |
/// | `date,node,slice` | name of three parts, and samples in whole percent |
/// | `period_s` | time between samples in seconds; without it 300 |
/// | `start_unix_s` | when the first sample begins; may be empty |
/// | `unit` | `pct_x100` is 0.01 %; with any other unit, the highest sample becomes 100 % |
/// | others | ignored |
pub struct SeriesReader {
    rows: Rows,
    columns: Columns,
    failed: bool,
}

/// The positions of the recognised columns.
#[derive(Clone, Default)]
struct Columns {
    count: usize,
    series: Option<usize>,
    node: Option<[usize; 3]>,
    period: Option<usize>,
    start: Option<usize>,
    unit: Option<usize>,
    /// When the first sample of every series begins, if known.
    known_start: Option<i64>,
}

/// Start of the Bitbrains traces, 2013-06-30T22:00:00Z.
const BITBRAINS_START: i64 = 1_372_629_600;

impl SeriesReader {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        SeriesReader::new(Rows::open(path)?)
    }

    /// Creates a reader of the series in these lines.
    pub fn new(rows: Rows) -> Result<Self, TraceError> {
        let header = rows.header();
        let at = |name: &str| header.iter().position(|column| column == name);
        let node = match (at("date"), at("node"), at("slice")) {
            (Some(date), Some(node), Some(slice)) => Some([date, node, slice]),
            _ => None,
        };
        let columns = Columns {
            count: header.len().saturating_sub(1),
            series: at("series"),
            node,
            period: at("period_s"),
            start: at("start_unix_s"),
            unit: at("unit"),
            known_start: at("capacity_mhz").map(|_| BITBRAINS_START),
        };
        let values_last = header.last().is_some_and(|last| last == "values");
        if !values_last || (columns.series.is_none() && columns.node.is_none()) {
            let expected = "the columns series,...,values or date,node,slice,values";
            return Err(rows.malformed(expected, &header.join(",")));
        }
        Ok(SeriesReader {
            rows,
            columns,
            failed: false,
        })
    }

    /// Returns the number of the line of the last series.
    pub fn line(&self) -> u64 {
        self.rows.line()
    }

    /// Returns the first series of this name; none if the file does not contain it.
    pub fn find(&mut self, name: &str) -> Result<Option<Series>, TraceError> {
        while let Some(row) = self.rows.next_row()? {
            let (named, values) = split_row(&row, self.columns.count)?;
            if name_of(&self.columns, &named) == name {
                return parse_series(&row, &self.columns, &named, values).map(Some);
            }
        }
        Ok(None)
    }

    fn next_series(&mut self) -> Result<Option<Series>, TraceError> {
        let Some(row) = self.rows.next_row()? else {
            return Ok(None);
        };
        let (named, values) = split_row(&row, self.columns.count)?;
        parse_series(&row, &self.columns, &named, values).map(Some)
    }
}

impl Iterator for SeriesReader {
    type Item = Result<Series, TraceError>;

    /// After an error, the iterator ends.
    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.next_series().transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

/// Splits a row into the named fields and the text of the samples.
fn split_row<'a>(row: &Row<'a>, named: usize) -> Result<(Vec<&'a str>, &'a str), TraceError> {
    let mut fields: Vec<&str> = row.text().splitn(named + 1, ',').collect();
    match fields.pop() {
        Some(values) if fields.len() == named => Ok((fields, values)),
        _ => {
            let expected = format!("{named} named fields and samples");
            Err(row.malformed(&expected, row.text()))
        }
    }
}

fn name_of(columns: &Columns, named: &[&str]) -> String {
    let field = |at: usize| named.get(at).copied().unwrap_or_default();
    match (columns.series, columns.node) {
        (Some(series), _) => field(series).to_owned(),
        (None, Some(parts)) => parts.map(field).join("/"),
        (None, None) => String::new(),
    }
}

fn parse_series(
    row: &Row<'_>,
    columns: &Columns,
    named: &[&str],
    values: &str,
) -> Result<Series, TraceError> {
    let field = |at: Option<usize>| at.and_then(|at| named.get(at).copied());
    let period_s = match field(columns.period) {
        None => DEFAULT_PERIOD_S,
        Some(text) => match row.parse(text, "a period in whole seconds, at least 1")? {
            0 => return Err(row.malformed("a period in whole seconds, at least 1", text)),
            period_s => period_s,
        },
    };
    let start_unix_s = match (field(columns.start), columns.node) {
        (None | Some(""), Some([date, ..])) => Some(midnight(row, named[date])?),
        (None | Some(""), None) => columns.known_start,
        (Some(text), _) => Some(row.parse(text, "a start in seconds since 1970, or nothing")?),
    };
    let samples = match field(columns.unit) {
        None | Some("pct_x100") if columns.node.is_some() => samples_scaled(row, values, 100.0)?,
        None | Some("pct_x100") => samples_of(row, values)?,
        Some(_) => samples_of_shape(row, values)?,
    };
    Ok(Series {
        name: name_of(columns, named),
        period_s,
        start_unix_s,
        samples,
    })
}

/// Describes a valid sample.
const SAMPLE: &str = "a sample in 0.01 %, a whole number up to 65534, or nothing";

fn samples_of(row: &Row<'_>, values: &str) -> Result<Vec<u16>, TraceError> {
    let mut samples = Vec::with_capacity((values.len() / 4).min(MAX_SAMPLES));
    for text in values.split(',') {
        samples.push(match text {
            "" => MISSING,
            text => match row.parse(text, SAMPLE)? {
                MISSING => return Err(row.malformed(SAMPLE, text)),
                sample => sample,
            },
        });
    }
    Ok(samples)
}

/// Parses samples of another unit, which `scale` converts to 0.01 %.
fn samples_scaled(row: &Row<'_>, values: &str, scale: f64) -> Result<Vec<u16>, TraceError> {
    let mut samples = Vec::with_capacity((values.len() / 4).min(MAX_SAMPLES));
    for text in values.split(',') {
        if text.is_empty() {
            samples.push(MISSING);
            continue;
        }
        let value = row.finite(text, "a sample, or nothing")? * scale;
        // Rounding 65534.5 would give the marker of a missing sample.
        if !(0.0..=f64::from(MISSING - 1)).contains(&value) {
            return Err(row.malformed("a sample from 0 to 655 %, or nothing", text));
        }
        samples.push(value.round() as u16);
    }
    Ok(samples)
}

/// Parses samples of an unknown unit: the highest becomes 100 %.
fn samples_of_shape(row: &Row<'_>, values: &str) -> Result<Vec<u16>, TraceError> {
    let mut highest = 0.0f64;
    for text in values.split(',').filter(|text| !text.is_empty()) {
        highest = highest.max(row.finite(text, "a sample, or nothing")?);
    }
    let scale = if highest > 0.0 {
        10_000.0 / highest
    } else {
        1.0
    };
    samples_scaled(row, values, scale)
}

/// Parses a date such as `20110303` into the beginning of that day in seconds since 1970 (UTC).
fn midnight(row: &Row<'_>, date: &str) -> Result<i64, TraceError> {
    let expected = "a date such as 20110303";
    let number: u32 = row.parse(date, expected)?;
    let (year, month, day) = (i64::from(number / 10_000), number / 100 % 100, number % 100);
    if date.len() != 8 || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return Err(row.malformed(expected, date));
    }
    // Counts days with years that begin in March, so that the leap day is the last day of a year.
    let (year, month) = if month < 3 {
        (year - 1, month + 12)
    } else {
        (year, month)
    };
    let of_year = i64::from((153 * (month - 3) + 2) / 5 + day - 1);
    let days = 365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // 719,468 days lie between the first of March of the year 0 and the first of January 1970.
    Ok((days + of_year - 719_468) * 86_400)
}
