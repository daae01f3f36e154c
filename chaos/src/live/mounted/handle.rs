//! The harness's handles of processes that work on mounts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process_group};

use super::border::{self, Order, Report, Task};
use crate::live::LiveError;
use crate::live::metrics::Operation;
use crate::live::scenario::ProgramKind;
use crate::live::verify::{Comparison, note};
use crate::live::workload::Counters;

/// The result of a process's work.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// How often each error occurred.
    pub errors: BTreeMap<String, u64>,
    /// The comparison and its findings.
    pub comparison: Comparison,
}

/// What a process has reported so far.
#[derive(Debug, Default)]
struct Seen {
    outcome: Outcome,
    /// The number of its programs that have not ended.
    working: usize,
    /// Something was changed, or compared.
    worked: bool,
    /// It has compared everything.
    compared: bool,
    /// Its standard output has ended.
    closed: bool,
}

/// A process that works on mounts. It is killed when dropped.
#[derive(Debug)]
pub(crate) struct Programs {
    child: Child,
    /// `None` once it has to end.
    orders: Option<ChildStdin>,
    obeyed: mpsc::Receiver<()>,
    seen: Arc<Mutex<Seen>>,
    kind: ProgramKind,
    /// The order that it did not obey.
    failed: Option<String>,
}

/// How long an order may take: it never waits for a mount, but the machine may be busy.
const ORDER_DEADLINE: Duration = Duration::from_secs(120);
/// How long it may take to end on its own once its standard input is closed, and once it is killed.
const END_DEADLINE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);
/// The most different errors that are counted.
const ERRORS_MAX: usize = 1_000;

impl Programs {
    /// Starts the process, which ends with this one, even if this one is killed.
    pub fn start(
        binary: &Path,
        task: &Task,
        log: &Path,
        counters: &Arc<Counters>,
    ) -> Result<Self, LiveError> {
        let log = File::options().create(true).append(true).open(log);
        let log = log.map_err(LiveError::io("make the log of programs"))?;
        let mut command = Command::new(binary);
        command
            .arg("--supervised-by")
            .arg(std::process::id().to_string())
            .args(["chaos", "work-on-mounts"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log);
        // Ctrl-C is for the harness alone.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command
            .spawn()
            .map_err(LiveError::io("start programs on mounts"))?;
        let (done, obeyed) = mpsc::channel();
        let seen = Arc::new(Mutex::new(Seen {
            working: task.programs(),
            ..Seen::default()
        }));
        if let Some(output) = child.stdout.take() {
            let (seen, counters) = (Arc::clone(&seen), Arc::clone(counters));
            // The thread ends with the process, whose pipe it reads.
            thread::spawn(move || listen(output, &seen, &counters, &done));
        }
        let mut programs = Self {
            orders: child.stdin.take(),
            child,
            obeyed,
            seen,
            kind: task.kind,
            failed: None,
        };
        if let Some(orders) = &mut programs.orders {
            border::write(orders, task).map_err(LiveError::io("say what is to be done"))?;
        }
        Ok(programs)
    }

    /// Sends an order, and waits until it is carried out.
    pub fn order(&mut self, order: Order) {
        let Some(orders) = &mut self.orders else {
            return;
        };
        // A line is shorter than the pipe, and is read before the next one is written.
        let obeyed = border::write(orders, &order).is_ok()
            && self.obeyed.recv_timeout(ORDER_DEADLINE).is_ok();
        if !obeyed {
            self.orders = None;
            let text = format!("the {} do not obey: {order:?}", self.name());
            self.failed.get_or_insert(text);
        }
    }

    /// Fails if the process did not obey, or has ended on its own.
    pub fn check(&self) -> Result<(), LiveError> {
        let seen = self.seen.lock();
        let ended = (seen.closed && !seen.compared)
            .then(|| format!("the {} ended by themselves: see programs.log", self.name()));
        match self.failed.clone().or(ended) {
            Some(text) => Err(LiveError::Cluster(text)),
            None => Ok(()),
        }
    }

    /// Its name in messages.
    pub fn name(&self) -> String {
        format!("programs on mounts of kind `{}`", self.kind.name())
    }

    /// The number of its programs that have not ended.
    pub fn working(&self) -> usize {
        self.seen.lock().working
    }

    /// Whether it has compared everything.
    pub fn has_compared(&self) -> bool {
        self.seen.lock().compared
    }

    /// Takes the outcome. Finding nothing because nothing was done is not a success.
    pub fn take_outcome(&self) -> Outcome {
        let mut seen = self.seen.lock();
        let mut outcome = std::mem::take(&mut seen.outcome);
        if !seen.worked {
            let text = format!("the {} changed and compared nothing", self.name());
            outcome.comparison.wrong.push(text);
        }
        outcome
    }

    fn ends_within(&mut self, deadline: Duration) -> bool {
        let end = Instant::now() + deadline;
        loop {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return true;
            }
            if Instant::now() > end {
                return false;
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        self.orders = None;
        if !self.ends_within(END_DEADLINE) {
            // It may have ended by now. A thread that waits for a mount ends when the mount answers or ends.
            let _ = self.child.kill();
            // Processes that its programs started are in its group.
            if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            self.ends_within(END_DEADLINE);
        }
    }
}

/// Receives reports until there are no more.
fn listen(output: ChildStdout, seen: &Mutex<Seen>, counters: &Counters, done: &mpsc::Sender<()>) {
    let mut output = BufReader::new(output);
    while let Ok(Some(report)) = border::read::<Report>(&mut output) {
        let mut seen = seen.lock();
        let Outcome { errors, comparison } = &mut seen.outcome;
        match report {
            Report::Obeyed => {
                if done.send(()).is_err() {
                    break;
                }
            }
            Report::Done {
                operation,
                took_us,
                compared_bytes,
            } => {
                comparison.bytes_during += compared_bytes;
                // A read that is not compared does not count as work: there may be nothing to read.
                seen.worked |= operation != Operation::Read || compared_bytes > 0;
                counters.done(operation, Duration::from_micros(took_us));
            }
            Report::Failed { operation } => counters.failed(operation),
            Report::Error { text } => {
                if errors.len() < ERRORS_MAX || errors.contains_key(&text) {
                    *errors.entry(text).or_default() += 1;
                }
            }
            Report::Wrong { text } => note(&mut comparison.wrong, text),
            Report::Lost { text } => note(&mut comparison.lost, text),
            Report::Unexpected { text } => note(&mut comparison.unexpected, text),
            Report::Ended => seen.working = seen.working.saturating_sub(1),
            Report::Compared {
                files,
                bytes,
                names,
                not_promised,
            } => {
                comparison.files += files;
                comparison.bytes += bytes;
                comparison.names += names;
                comparison.not_promised += not_promised;
                seen.compared = true;
            }
        }
    }
    seen.lock().closed = true;
}
