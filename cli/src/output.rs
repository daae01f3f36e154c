//! Standard output, whose reader may have gone (`harvestfs ... | head`), and standard error, which may not be writable.

use std::fmt::{self, Arguments};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// The status that a shell reports for a command that ended because its output has no reader: 128 + SIGPIPE.
const BROKEN_PIPE_STATUS: u8 = 141;

/// Whether this command must continue when its output has no reader.
static GOES_ON: AtomicBool = AtomicBool::new(false);

/// Replaces that of the standard library, which panics when there is no reader any more.
macro_rules! println {
    ($($argument:tt)*) => {
        $crate::output::line(format_args!($($argument)*))
    };
}

/// Replaces that of the standard library, which panics, and so ends the process, when the disk of a log is full.
macro_rules! eprintln {
    ($($argument:tt)*) => {
        $crate::output::remark(format_args!($($argument)*))
    };
}

/// From now on, output that cannot be printed is dropped, and does not end the command.
pub fn go_on_without_reader() {
    GOES_ON.store(true, Ordering::Relaxed);
}

/// Prints a line. Without a reader, a command that only prints ends immediately, as other programs do.
pub fn line(text: Arguments<'_>) {
    let Err(error) = writeln!(io::stdout().lock(), "{text}") else {
        return;
    };
    if GOES_ON.load(Ordering::Relaxed) {
        return;
    }
    if error.kind() != io::ErrorKind::BrokenPipe {
        eprintln!("harvestfs: cannot write to standard output: {error}");
        std::process::exit(1);
    }
    std::process::exit(BROKEN_PIPE_STATUS.into());
}

/// Prints a line on standard error, if possible.
pub fn remark(text: Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints why something failed. If that cannot be printed, nothing can be done about it.
pub fn complain(error: &anyhow::Error) {
    eprintln!("harvestfs: {}", text_of(error));
}

/// The text of an error, with `?` for control characters, since others may have chosen the names in it.
fn text_of(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        // Some errors already include their cause in their text.
        if !text.ends_with(&cause) {
            let separator = if text.is_empty() { "" } else { ": " };
            text = format!("{text}{separator}{cause}");
        }
    }
    text.replace(|letter: char| letter.is_control() && letter != '\n', "?")
}

/// Returns a writer to standard output that reports a missing reader as a distinct error.
pub fn stdout() -> Stdout {
    Stdout(io::stdout().lock())
}

/// The writer that [`stdout`] returns.
pub struct Stdout(io::StdoutLock<'static>);

/// Standard output has no reader any more.
#[derive(Debug)]
struct NoReader;

impl fmt::Display for NoReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output has no reader any more")
    }
}

impl std::error::Error for NoReader {}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(distinguished)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(distinguished)
    }
}

fn distinguished(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::BrokenPipe {
        io::Error::new(error.kind(), NoReader)
    } else {
        error
    }
}

/// The exit status of a command that failed because standard output has no reader any more.
pub fn status_without_reader(error: &anyhow::Error) -> Option<u8> {
    let is_it = |cause: &(dyn std::error::Error + 'static)| {
        cause
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref)
            .is_some_and(|inner| inner.is::<NoReader>())
    };
    error.chain().any(is_it).then_some(BROKEN_PIPE_STATUS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_obeys_no_error() {
        let error = anyhow::anyhow!("cannot list a\x1b]0;title\x07");
        let error = error.context("Größe\u{9b}2J\nfirst remove it");
        assert_eq!(
            text_of(&error),
            "Größe?2J\nfirst remove it: cannot list a?]0;title?"
        );
    }
}
