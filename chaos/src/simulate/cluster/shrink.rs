//! Reduces a simulation that breaks a promise to a smaller one that breaks the same promise.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use super::{Options, Report, START, run};

/// The most simulations that are tried.
const TRIED_MAX: u32 = 48;

/// Leaves out what is not needed to break the promise that was broken first: time, clients, mounts, faults. Returns the
/// smallest simulation that was found, and its report.
///
/// # Errors
/// As [`run`].
pub fn shrink(options: &Options, report: &Report) -> io::Result<(Options, Report)> {
    let Some(first) = report.failures.first() else {
        return Ok((options.clone(), report.clone()));
    };
    let mut smallest = Smallest {
        options: options.clone(),
        report: report.clone(),
        kind: kind(first),
        tried: 0,
    };
    smallest.shorten()?;
    for mounts in 0..options.mounts {
        let fewer = Options {
            mounts,
            ..smallest.options.clone()
        };
        if smallest.try_out(fewer)? {
            break;
        }
    }
    for clients in 1..options.clients {
        let fewer = Options {
            clients,
            ..smallest.options.clone()
        };
        if smallest.try_out(fewer)? {
            break;
        }
    }
    smallest.leave_out_faults()?;
    smallest.shorten()?;
    Ok((smallest.options, smallest.report))
}

struct Smallest {
    options: Options,
    report: Report,
    /// The kind of the first failure: further ones are often consequences of it, or another defect.
    kind: String,
    tried: u32,
}

/// The text of a failure without what differs between runs: words with digits, such as names, sizes, versions and
/// times, and words with capitals, such as values.
fn kind(failure: &str) -> String {
    let words = failure.split(|c: char| c.is_whitespace() || ",:()[]{}".contains(c));
    let differs = |c: char| c.is_ascii_digit() || c.is_ascii_uppercase();
    let said: Vec<&str> = words
        .filter(|word| !word.is_empty() && !word.contains(differs))
        .filter(|word| !matches!(*word, "true" | "false"))
        .collect();
    said.join(" ")
}

impl Smallest {
    /// Tries these options, and keeps them if they break the same promise. Returns whether they do.
    fn try_out(&mut self, options: Options) -> io::Result<bool> {
        if self.tried == TRIED_MAX {
            return Ok(false);
        }
        self.tried += 1;
        let report = run(&options)?;
        let is_same = report
            .failures
            .first()
            .is_some_and(|it| kind(it) == self.kind);
        if is_same {
            (self.options, self.report) = (options, report);
        }
        Ok(is_same)
    }

    /// Shortens the simulation: the time after the first broken promise is not needed, and often half of the time
    /// before it is not either.
    fn shorten(&mut self) -> io::Result<()> {
        let failed_at = self.report.failed_at.unwrap_or(self.report.took);
        let until = failed_at.saturating_sub(START).min(self.options.length);
        for length in [until / 2, until] {
            // Whole milliseconds, which can be given on the command line.
            let length = Duration::from_millis(length.as_millis() as u64 + 1);
            if length < self.options.length {
                let shorter = Options {
                    length,
                    ..self.options.clone()
                };
                if self.try_out(shorter)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Tries to leave out all faults at once, then half of them at a time, and so on.
    fn leave_out_faults(&mut self) -> io::Result<()> {
        let mut at_once = self.with().len();
        while at_once > 0 && self.tried < TRIED_MAX {
            let with: Vec<u32> = self.with().into_iter().collect();
            for some in with.chunks(at_once) {
                let mut without = self.options.without.clone();
                without.extend(some);
                let fewer = Options {
                    without,
                    ..self.options.clone()
                };
                self.try_out(fewer)?;
            }
            at_once /= 2;
        }
        Ok(())
    }

    /// The numbers of the remaining faults.
    fn with(&self) -> BTreeSet<u32> {
        let all = (1..=self.report.faults).collect::<BTreeSet<_>>();
        &all - &self.options.without
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_of_one_kind_whatever_they_are_about() {
        let short = |file: &str, found: u64, from: u64| {
            kind(&format!(
                "/client-0/{file}: {found} bytes instead of 9000, other ones from {from} on"
            ))
        };
        assert_eq!(short("f3", 12, 7), short("f11", 90, 0));
        let gone = "/client-1, in the end: f3 is not there";
        assert_ne!(short("f3", 12, 7), kind(gone));
        assert_eq!(kind(gone), kind("/client-0, in the end: f12 is not there"));
        let of = |version: &str| {
            kind(&format!(
                "replaced-0-1-1: 16008 bytes, whole: true, version {version} or none, where there were 3..=4"
            ))
        };
        assert_eq!(of("Some(7)"), of("None"));
    }
}
