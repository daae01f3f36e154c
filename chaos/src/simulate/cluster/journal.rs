//! The trace of a simulation: what happened, in order.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

/// The trace of a simulation, with the promises that were found broken. Clones share one journal; each program has
/// its own clone.
#[derive(Debug, Default)]
pub struct Journal {
    inner: Rc<Inner>,
    /// The value of `turns` when the program's operation began; `None`: its findings always count.
    began: Cell<Option<u64>>,
}

impl Clone for Journal {
    fn clone(&self) -> Self {
        Self {
            inner: Rc::clone(&self.inner),
            began: Cell::default(),
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    now: Cell<Duration>,
    lines: RefCell<Vec<String>>,
    failures: RefCell<Vec<String>>,
    failed_at: Cell<Option<Duration>>,
    operations: Cell<u64>,
    errors: Cell<u64>,
    /// How often it became doubtful what is promised, or certain again: odd while it is doubtful.
    turns: Cell<u64>,
}

/// Further ones are usually consequences of the first.
const FAILURES_MAX: usize = 20;

impl Journal {
    /// Sets the time of the lines that follow.
    pub fn advance(&self, now: Duration) {
        self.inner.now.set(now);
    }

    /// How long the simulation has run.
    pub fn now(&self) -> Duration {
        self.inner.now.get()
    }

    /// Adds a line.
    pub fn note(&self, part: &str, what: fmt::Arguments<'_>) {
        let at_s = self.inner.now.get().as_secs_f64();
        self.inner
            .lines
            .borrow_mut()
            .push(format!("{at_s:10.3} {part}: {what}"));
    }

    /// Notes that it becomes doubtful what is promised, or certain again.
    pub fn turn_doubt(&self) {
        self.inner.turns.set(self.inner.turns.get() + 1);
        let now = match self.is_in_doubt() {
            true => "in doubt",
            false => "certain",
        };
        self.note("promises", format_args!("are {now} from now on"));
    }

    /// Whether it is doubtful at present what is promised.
    pub fn is_in_doubt(&self) -> bool {
        !self.inner.turns.get().is_multiple_of(2)
    }

    /// Begins a check of promises.
    pub fn begin(&self) {
        self.began.set(Some(self.inner.turns.get()));
    }

    /// Whether findings since `begin` count: nothing was in doubt in the meantime.
    pub fn is_certain(&self) -> bool {
        let began = self.began.get();
        began.is_none_or(|began| began == self.inner.turns.get() && !self.is_in_doubt())
    }

    /// Counts an operation, which begins.
    pub fn operation(&self) {
        self.begin();
        self.inner.operations.set(self.inner.operations.get() + 1);
    }

    /// Counts an operation that failed, as it may under faults.
    pub fn error(&self, part: &str, error: &dyn fmt::Display) {
        self.inner.errors.set(self.inner.errors.get() + 1);
        self.note(part, format_args!("error: {error}"));
    }

    /// Reports a broken promise, if findings count now.
    pub fn failure(&self, what: String) {
        if self.is_certain() {
            self.broken(what);
        } else {
            self.note("in doubt", format_args!("{what}"));
        }
    }

    /// Reports a broken promise that must hold even while an older copy of the namenode serves.
    pub fn broken(&self, what: String) {
        self.note("FAILURE", format_args!("{what}"));
        let first = self.inner.failed_at.get().unwrap_or(self.inner.now.get());
        self.inner.failed_at.set(Some(first));
        let mut failures = self.inner.failures.borrow_mut();
        if failures.len() < FAILURES_MAX {
            failures.push(what);
        }
    }

    /// The number of operations so far.
    pub fn operations(&self) -> u64 {
        self.inner.operations.get()
    }

    /// The number of operations that have failed so far.
    pub fn errors(&self) -> u64 {
        self.inner.errors.get()
    }

    /// The promises that have been found broken so far, the first 20.
    pub fn failures(&self) -> Vec<String> {
        self.inner.failures.borrow().clone()
    }

    /// When the first promise was found broken.
    pub fn failed_at(&self) -> Option<Duration> {
        self.inner.failed_at.get()
    }

    /// Takes all lines so far.
    pub fn take_lines(&self) -> Vec<String> {
        self.inner.lines.take()
    }
}
