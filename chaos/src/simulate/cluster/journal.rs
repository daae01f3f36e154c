//! What happened in a simulation, in the order in which it happened.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

/// See the module. Copies are of one journal, each for another program.
#[derive(Debug, Default)]
pub struct Journal {
    inner: Rc<Inner>,
    /// How often doubt had begun or ended when the program's operation began; none: what it finds always counts.
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
    /// How often it became doubtful what is promised, or certain again.
    turns: Cell<u64>,
}

/// More are the consequence of the first ones.
const FAILURES_MAX: usize = 20;

impl Journal {
    /// Time goes on.
    pub fn advance(&self, now: Duration) {
        self.inner.now.set(now);
    }

    /// How long the simulation has run.
    pub fn now(&self) -> Duration {
        self.inner.now.get()
    }

    /// One more line.
    pub fn note(&self, part: &str, what: fmt::Arguments<'_>) {
        let at_s = self.inner.now.get().as_secs_f64();
        self.inner
            .lines
            .borrow_mut()
            .push(format!("{at_s:10.3} {part}: {what}"));
    }

    /// What is promised becomes doubtful, or certain again.
    pub fn turn_doubt(&self) {
        self.inner.turns.set(self.inner.turns.get() + 1);
        let now = match self.is_in_doubt() {
            true => "in doubt",
            false => "certain",
        };
        self.note("promises", format_args!("are {now} from now on"));
    }

    /// Whether what is promised now is doubtful.
    pub fn is_in_doubt(&self) -> bool {
        !self.inner.turns.get().is_multiple_of(2)
    }

    /// Something begins that finds whether promises are kept.
    pub fn begin(&self) {
        self.began.set(Some(self.inner.turns.get()));
    }

    /// Whether what came of it counts: nothing was in doubt meanwhile.
    pub fn is_certain(&self) -> bool {
        let began = self.began.get();
        began.is_none_or(|began| began == self.inner.turns.get() && !self.is_in_doubt())
    }

    /// An operation begins.
    pub fn operation(&self) {
        self.begin();
        self.inner.operations.set(self.inner.operations.get() + 1);
    }

    /// An operation failed, as it may under faults.
    pub fn error(&self, part: &str, error: &dyn fmt::Display) {
        self.inner.errors.set(self.inner.errors.get() + 1);
        self.note(part, format_args!("error: {error}"));
    }

    /// A promise was broken, if what is found counts.
    pub fn failure(&self, what: String) {
        if self.is_certain() {
            self.broken(what);
        } else {
            self.note("in doubt", format_args!("{what}"));
        }
    }

    /// A promise was broken that holds also while an older copy of the namenode serves.
    pub fn broken(&self, what: String) {
        self.note("FAILURE", format_args!("{what}"));
        let first = self.inner.failed_at.get().unwrap_or(self.inner.now.get());
        self.inner.failed_at.set(Some(first));
        let mut failures = self.inner.failures.borrow_mut();
        if failures.len() < FAILURES_MAX {
            failures.push(what);
        }
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.inner.operations.get()
    }

    /// Operations that failed so far.
    pub fn errors(&self) -> u64 {
        self.inner.errors.get()
    }

    /// Promises that were broken so far.
    pub fn failures(&self) -> Vec<String> {
        self.inner.failures.borrow().clone()
    }

    /// When the first promise was found broken.
    pub fn failed_at(&self) -> Option<Duration> {
        self.inner.failed_at.get()
    }

    /// All lines so far, which are removed.
    pub fn take_lines(&self) -> Vec<String> {
        self.inner.lines.take()
    }
}
