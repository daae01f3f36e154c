//! From a simulation that breaks a promise to a smaller one that does.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use super::{Options, Report, START, run};

/// Simulations that are tried.
const TRIED_MAX: u32 = 48;

/// Leaves out what is not needed to break a promise: time, clients, mounts, faults. Returns the smallest simulation that was
/// found, and what comes of it.
///
/// # Errors
/// As [`run`].
pub fn shrink(options: &Options, report: &Report) -> io::Result<(Options, Report)> {
    let mut smallest = Smallest {
        options: options.clone(),
        report: report.clone(),
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
    tried: u32,
}

impl Smallest {
    /// Whether a promise is broken with these options too. Then they are the smallest.
    fn try_out(&mut self, options: Options) -> io::Result<bool> {
        if self.tried == TRIED_MAX {
            return Ok(false);
        }
        self.tried += 1;
        let report = run(&options)?;
        let is_broken = !report.failures.is_empty();
        if is_broken {
            (self.options, self.report) = (options, report);
        }
        Ok(is_broken)
    }

    /// What happens after the first broken promise is not needed; often much before it is not either.
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

    /// All of them, then half of them, and so on.
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

    /// Numbers of the faults that are left.
    fn with(&self) -> BTreeSet<u32> {
        let all = (1..=self.report.faults).collect::<BTreeSet<_>>();
        &all - &self.options.without
    }
}
