//! Readers of trace files: series of CPU utilisation, and synthetic datacentres with their reimages.
//!
//! The files are CSV, plain or gzip-compressed. They are read line by line: a reader holds in memory only one line
//! (at most [`MAX_LINE_BYTES`]) and its parsed content. Every error names the file, the line and what was expected
//! there; no content of a file makes a reader panic.
//!
//! - [`SeriesReader`] reads utilisation: one [`Series`] in each row.
//! - [`Records`] reads files of fixed columns: [`Tenant`], [`Ownership`], [`ReimageEvent`] of the
//!   synthetic datacentres, [`IndexEntry`] of the index of the series.

mod error;
mod records;
mod rows;
mod series;
#[cfg(test)]
mod tests;

pub use error::TraceError;
pub use records::{
    EnvironmentKind, IndexEntry, Ownership, Record, Records, ReimageEvent, ReimageKind, Tenant,
};
pub use rows::{MAX_LINE_BYTES, Row, Rows};
pub use series::{DEFAULT_PERIOD_S, Series, SeriesReader, window};
