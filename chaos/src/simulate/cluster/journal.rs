//! What happened in a simulation, in the order in which it happened.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

/// See the module. Copies are of one journal.
#[derive(Clone, Debug, Default)]
pub struct Journal(Rc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    now: Cell<Duration>,
    lines: RefCell<Vec<String>>,
    failures: RefCell<Vec<String>>,
    failed_at: Cell<Option<Duration>>,
    operations: Cell<u64>,
    errors: Cell<u64>,
}

/// More are the consequence of the first ones.
const FAILURES_MAX: usize = 20;

impl Journal {
    /// Time goes on.
    pub fn advance(&self, now: Duration) {
        self.0.now.set(now);
    }

    /// How long the simulation has run.
    pub fn now(&self) -> Duration {
        self.0.now.get()
    }

    /// One more line.
    pub fn note(&self, part: &str, what: fmt::Arguments<'_>) {
        let at_s = self.0.now.get().as_secs_f64();
        self.0
            .lines
            .borrow_mut()
            .push(format!("{at_s:10.3} {part}: {what}"));
    }

    /// An operation begins.
    pub fn operation(&self) {
        self.0.operations.set(self.0.operations.get() + 1);
    }

    /// An operation failed, as it may under faults.
    pub fn error(&self, part: &str, error: &dyn fmt::Display) {
        self.0.errors.set(self.0.errors.get() + 1);
        self.note(part, format_args!("error: {error}"));
    }

    /// A promise was broken.
    pub fn failure(&self, what: String) {
        self.note("FAILURE", format_args!("{what}"));
        let first = self.0.failed_at.get().unwrap_or(self.0.now.get());
        self.0.failed_at.set(Some(first));
        let mut failures = self.0.failures.borrow_mut();
        if failures.len() < FAILURES_MAX {
            failures.push(what);
        }
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.0.operations.get()
    }

    /// Operations that failed so far.
    pub fn errors(&self) -> u64 {
        self.0.errors.get()
    }

    /// Promises that were broken so far.
    pub fn failures(&self) -> Vec<String> {
        self.0.failures.borrow().clone()
    }

    /// When the first promise was found broken.
    pub fn failed_at(&self) -> Option<Duration> {
        self.0.failed_at.get()
    }

    /// All lines so far, which are removed.
    pub fn take_lines(&self) -> Vec<String> {
        self.0.lines.take()
    }
}
