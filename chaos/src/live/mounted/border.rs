//! The protocol between the harness and a process that works on mounts: lines of JSON, each of
//! bounded length. The task comes first, then orders, each of which is answered with [`Report::Obeyed`].

use std::io::{self, BufRead, Read, Write};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::live::metrics::Operation;
use crate::live::scenario::{MountSpec, ProgramKind};
use crate::live::workload::Access;

/// The longest line.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// The longest text in a line: even with each character escaped, it is shorter than a line.
const TEXT_CHARS_MAX: usize = 2_000;

/// The task of a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub kind: ProgramKind,
    pub spec: MountSpec,
    /// Decides what the programs do.
    pub seed: u64,
    /// Where the file system is mounted.
    pub mounts: Vec<PathBuf>,
    /// How the client of the final comparison reaches the cluster.
    pub access: Access,
}

impl Task {
    /// The number of programs of the task.
    pub fn programs(&self) -> usize {
        match self.kind {
            ProgramKind::Files => self.mounts.len(),
            // A writer and a follower.
            ProgramKind::Log => 2,
            ProgramKind::Sqlite | ProgramKind::Git => 1,
        }
    }
}

/// An order of the harness, or a notification of what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    /// This mount may be used.
    Ready { mount: usize },
    /// This mount is about to be killed.
    Killed { mount: usize },
    /// A fault of this mount begins or ends.
    Disturbed { mount: usize, begins: bool },
    /// A period in which acknowledgements do not count begins or ends.
    Doubt,
    /// Begin no further operations.
    Stop,
    /// Compare once all programs have ended, and end.
    Compare,
}

/// A report of what a process did or found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Report {
    /// The last order is carried out.
    Obeyed,
    /// An operation succeeded, of which `compared_bytes` bytes were compared.
    Done {
        operation: Operation,
        took_us: u64,
        compared_bytes: u64,
    },
    /// An operation failed.
    Failed { operation: Operation },
    /// An error occurred.
    Error { text: String },
    /// Something is not as it was promised.
    Wrong { text: String },
    /// Something acknowledged cannot be read, or is missing.
    Lost { text: String },
    /// Something exists that must not.
    Unexpected { text: String },
    /// One of its programs has ended.
    Ended,
    /// What was compared at the end. This is the last report.
    Compared {
        files: u64,
        bytes: u64,
        names: u64,
        not_promised: u64,
    },
}

/// Writes a line.
pub(crate) fn write(to: &mut impl Write, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    if line.len() as u64 >= LINE_BYTES_MAX {
        return Err(io::Error::other("a line is too long"));
    }
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads a line; `None` at the end.
pub(crate) fn read<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return if line.is_empty() {
            Ok(None)
        } else {
            Err(io::Error::other("a line is too long, or not whole"))
        };
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

/// Truncates a text to the length that a report may have.
pub(crate) fn cut(text: &str) -> String {
    text.chars().take(TEXT_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_as_they_were_sent_and_are_bounded() {
        let sent = [
            Order::Killed { mount: 3 },
            Order::Disturbed {
                mount: 0,
                begins: true,
            },
            Order::Compare,
        ];
        let mut bytes = Vec::new();
        for order in &sent {
            write(&mut bytes, order).unwrap();
        }
        let mut from = &bytes[..];
        for order in sent {
            assert_eq!(read::<Order>(&mut from).unwrap(), Some(order));
        }
        assert_eq!(read::<Order>(&mut from).unwrap(), None);
        let long = vec![b'x'; LINE_BYTES_MAX as usize + 1];
        for wrong in [&long[..], b"\"compare\"", b"\"dance\"\n", b"\xff\n"] {
            let mut from = wrong;
            assert!(read::<Order>(&mut from).is_err());
        }
    }

    #[test]
    fn a_report_of_any_text_is_a_line() {
        for worst in ["\u{1}", "\"", "\u{10ffff}"] {
            let text = cut(&worst.repeat(100_000));
            let report = Report::Wrong { text };
            let mut bytes = Vec::new();
            write(&mut bytes, &report).unwrap();
            let mut from = &bytes[..];
            assert_eq!(read(&mut from).unwrap(), Some(report));
        }
    }
}
