//! Errors in trace files.

use std::io;
use std::path::PathBuf;

/// Why a trace file could not be read. The text names the file, the line and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("{}: cannot be opened: {error}", file.display())]
    Open {
        /// The file.
        file: PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
    /// Reading or decompressing failed.
    #[error("{}:{line}: cannot be read: {error}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The line that was being read; the first is 1.
        line: u64,
        /// The error of the operating system or of the decompressor.
        error: io::Error,
    },
    /// A line does not have the expected content.
    #[error("{}:{line}: expected {expected}, found {found}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The line; the first is 1.
        line: u64,
        /// The expected content.
        expected: String,
        /// The actual content, shortened.
        found: String,
    },
}

impl TraceError {
    /// Returns the file with the error.
    pub fn file(&self) -> &std::path::Path {
        match self {
            TraceError::Open { file, .. }
            | TraceError::Read { file, .. }
            | TraceError::Malformed { file, .. } => file,
        }
    }

    /// Returns the line with the error; the first is 1. None when the file cannot even be opened.
    pub fn line(&self) -> Option<u64> {
        match self {
            TraceError::Open { .. } => None,
            TraceError::Read { line, .. } | TraceError::Malformed { line, .. } => Some(*line),
        }
    }
}

/// Most characters of the actual content in a message.
const FOUND_CHARACTERS: usize = 60;

/// Quotes the actual content, shortened.
pub(super) fn quoted(found: &str) -> String {
    if found.is_empty() {
        return "nothing".to_owned();
    }
    let mut text: String = found.chars().take(FOUND_CHARACTERS).collect();
    if text.len() < found.len() {
        text.push_str("...");
    }
    format!("{text:?}")
}
