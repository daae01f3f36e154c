//! What can be wrong with a trace file.

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
        /// What the system said.
        error: io::Error,
    },
    /// Reading, or unpacking, failed.
    #[error("{}:{line}: cannot be read: {error}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The line that was being read; the first is 1.
        line: u64,
        /// What the system, or the unpacker, said.
        error: io::Error,
    },
    /// A line is not what it should be.
    #[error("{}:{line}: expected {expected}, found {found}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The line; the first is 1.
        line: u64,
        /// What should be there.
        expected: String,
        /// What is there, shortened.
        found: String,
    },
}

impl TraceError {
    /// The file that is wrong.
    pub fn file(&self) -> &std::path::Path {
        match self {
            TraceError::Open { file, .. }
            | TraceError::Read { file, .. }
            | TraceError::Malformed { file, .. } => file,
        }
    }

    /// The line that is wrong; the first is 1. None when the file cannot even be opened.
    pub fn line(&self) -> Option<u64> {
        match self {
            TraceError::Open { .. } => None,
            TraceError::Read { line, .. } | TraceError::Malformed { line, .. } => Some(*line),
        }
    }
}

/// At most this many characters of what was found go into a message.
const FOUND_CHARACTERS: usize = 60;

/// Quotes what was found, shortened.
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
