//! The process that works on mounts.

use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::border::{self, Order, Report, Task};
use super::files::{Program, Promises};
use super::git::Git;
use super::job::{self, Check, Job};
use super::log::{Follower, Writer};
use super::sqlite::Sqlite;
use super::state::Shared;
use crate::live::LiveError;
use crate::live::metrics::Operation;
use crate::live::scenario::ProgramKind;
use crate::live::verify::Comparison;

/// Reports to the harness what was done and found.
#[derive(Clone, Debug)]
pub(crate) struct Reports(Arc<Mutex<io::Stdout>>);

impl Reports {
    fn send(&self, report: &Report) {
        // If the harness has ended, nothing receives the report, and standard input ends, too.
        let _ = border::write(&mut *self.0.lock(), report);
    }

    /// Reports an operation that succeeded.
    pub fn done(&self, operation: Operation, took: Duration, compared_bytes: usize) {
        self.send(&Report::Done {
            operation,
            took_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            compared_bytes: compared_bytes as u64,
        });
    }

    /// Reports an operation that failed.
    pub fn failed(&self, operation: Operation) {
        self.send(&Report::Failed { operation });
    }

    /// Reports an error.
    pub fn error(&self, text: &str) {
        let text = border::cut(text);
        self.send(&Report::Error { text });
    }

    /// Reports something that is not as it was promised.
    pub fn wrong(&self, text: &str) {
        let text = border::cut(text);
        self.send(&Report::Wrong { text });
    }

    fn compared(&self, comparison: &Comparison) {
        for text in &comparison.lost {
            let text = border::cut(text);
            self.send(&Report::Lost { text });
        }
        for text in &comparison.wrong {
            self.wrong(text);
        }
        for text in &comparison.unexpected {
            let text = border::cut(text);
            self.send(&Report::Unexpected { text });
        }
        self.send(&Report::Compared {
            files: comparison.files,
            bytes: comparison.bytes,
            names: comparison.names,
            not_promised: comparison.not_promised,
        });
    }
}

/// Works on mounts as the harness orders on standard input, and reports on standard output. Ends when it has
/// compared, or when standard input ends.
///
/// # Errors
/// When standard input has no task, or the comparison cannot begin.
pub fn work_on_mounts() -> Result<(), LiveError> {
    let mut input = BufReader::new(io::stdin());
    let task: Option<Task> =
        border::read(&mut input).map_err(LiveError::io("read what is to be done"))?;
    let task = task.ok_or_else(|| LiveError::Cluster("nothing is to be done".into()))?;
    let reports = Reports(Arc::new(Mutex::new(io::stdout())));
    let shared = Arc::new(Shared::new(task.mounts.len()));
    let stop = Arc::new(AtomicBool::new(false));
    let pause = Duration::from_millis(task.spec.pause_ms);
    let mut programs = Vec::new();
    for (mount, mut job) in jobs(&task, &shared, &reports) {
        let (stop, reports, shared) = (Arc::clone(&stop), reports.clone(), Arc::clone(&shared));
        let started = thread::Builder::new().spawn(move || {
            job::run(job.as_mut(), (&shared, mount), pause, &reports, &stop);
            reports.send(&Report::Ended);
            job
        });
        programs.push(started.map_err(LiveError::io("start a thread"))?);
    }
    let (compare, asked) = mpsc::channel();
    {
        let (shared, reports) = (Arc::clone(&shared), reports.clone());
        thread::Builder::new()
            .name("orders".into())
            .spawn(move || {
                // This thread touches no mount, so that orders are carried out immediately.
                while let Ok(Some(order)) = border::read::<Order>(&mut input) {
                    if order == Order::Stop {
                        stop.store(true, Ordering::Relaxed);
                    }
                    shared.obey(order);
                    reports.send(&Report::Obeyed);
                    // The main thread, which waits for this, ends together with the process.
                    if order == Order::Compare && compare.send(()).is_err() {
                        break;
                    }
                }
                // The harness has ended or does not need this process any more. Threads may be waiting for mounts.
                std::process::exit(0);
            })
            .map_err(LiveError::io("start a thread"))?;
    }
    let mut jobs = Vec::new();
    for program in programs {
        let panicked = |_| LiveError::Cluster("a program panicked".into());
        jobs.push(program.join().map_err(panicked)?);
    }
    let gone = |_| LiveError::Cluster("there are no orders any more".into());
    asked.recv().map_err(gone)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(LiveError::io("start the runtime"))?;
    let connected = runtime.block_on(task.access.connect());
    let client = connected.map_err(LiveError::Cluster)?;
    let check = Check {
        runtime: &runtime,
        client: &client,
    };
    let mut comparison = Comparison::default();
    for mut job in jobs {
        job.compare(&check, &mut comparison);
    }
    // This client has written nothing, so an error does not matter.
    let _ = runtime.block_on(client.close());
    reports.compared(&comparison);
    Ok(())
}

/// The programs of a task, each with its mount.
fn jobs(task: &Task, shared: &Arc<Shared>, reports: &Reports) -> Vec<(usize, Box<dyn Job>)> {
    let Task {
        spec, seed, mounts, ..
    } = task;
    let all = (shared, reports);
    let mounts: Vec<(usize, &Path)> = mounts.iter().map(PathBuf::as_path).enumerate().collect();
    let (Some(&first), Some(&last)) = (mounts.first(), mounts.last()) else {
        return Vec::new();
    };
    let mut jobs: Vec<(usize, Box<dyn Job>)> = Vec::new();
    match task.kind {
        ProgramKind::Files => {
            let promises: Promises = Arc::new(mounts.iter().map(|_| Mutex::default()).collect());
            for mount in mounts {
                let program = Program::new(spec, mount, *seed, &promises, all);
                jobs.push((mount.0, Box::new(program)));
            }
        }
        ProgramKind::Log => {
            let log = Arc::default();
            let segment_bytes_max = spec.file_kib_max as usize * 1_024;
            let writer = Writer::new(first, segment_bytes_max, *seed, &log, all);
            jobs.push((first.0, Box::new(writer)));
            let follower = Follower::new(last, first.0, *seed, &log, all);
            jobs.push((last.0, Box::new(follower)));
        }
        ProgramKind::Sqlite => {
            let program = Sqlite::new(first, last.1, *seed, all);
            jobs.push((first.0, Box::new(program)));
        }
        ProgramKind::Git => {
            let program = Git::new(last, first.1, *seed, all);
            jobs.push((last.0, Box::new(program)));
        }
    }
    jobs
}
