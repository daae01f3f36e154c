//! The process that works on mounts.

use std::io::{self, BufReader};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::border::{self, Order, Report, Task};
use super::files::{Program, Shared};
use super::verify;
use crate::live::LiveError;
use crate::live::metrics::Operation;
use crate::live::verify::Comparison;

/// Tells the harness what was done and found.
#[derive(Clone, Debug)]
pub(crate) struct Reports(Arc<Mutex<io::Stdout>>);

impl Reports {
    fn send(&self, report: &Report) {
        // Without the harness there is nothing to tell, and standard input ends, too.
        let _ = border::write(&mut *self.0.lock(), report);
    }

    /// An operation succeeded.
    pub fn done(&self, operation: Operation, took: Duration, compared_bytes: usize) {
        self.send(&Report::Done {
            operation,
            took_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            compared_bytes: compared_bytes as u64,
        });
    }

    /// An operation failed.
    pub fn failed(&self, operation: Operation) {
        self.send(&Report::Failed { operation });
    }

    /// An error came.
    pub fn error(&self, text: &str) {
        let text = border::cut(text);
        self.send(&Report::Error { text });
    }

    /// Something is not as it was promised.
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

/// Works on mounts as the harness says on standard input, and reports on standard output, until it is to
/// compare, or standard input ends.
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
    let mut programs = Vec::new();
    for (mount, at) in task.mounts.iter().enumerate() {
        let program = Program::new(&task.spec, mount, at.clone(), task.seed, &shared, &reports);
        let (stop, reports) = (Arc::clone(&stop), reports.clone());
        let thread = thread::Builder::new().name(super::name(mount));
        let started = thread.spawn(move || {
            program.run(&stop);
            reports.send(&Report::Ended { mount });
        });
        programs.push(started.map_err(LiveError::io("start a thread"))?);
    }
    let (compare, asked) = mpsc::channel();
    {
        let (shared, reports) = (Arc::clone(&shared), reports.clone());
        thread::Builder::new()
            .name("orders".into())
            .spawn(move || {
                // It touches no mount, so that orders are carried out at once.
                while let Ok(Some(order)) = border::read::<Order>(&mut input) {
                    match order {
                        Order::Stop => stop.store(true, Ordering::Relaxed),
                        // The other thread has ended only together with the process.
                        Order::Compare => drop(compare.send(())),
                        _ => shared.obey(order),
                    }
                    reports.send(&Report::Obeyed);
                }
                // The harness is gone, or has no use for this any more; threads may wait for mounts.
                std::process::exit(0);
            })
            .map_err(LiveError::io("start a thread"))?;
    }
    for program in programs {
        let panicked = |_| LiveError::Cluster("a program panicked".into());
        program.join().map_err(panicked)?;
    }
    let gone = |_| LiveError::Cluster("there are no orders any more".into());
    asked.recv().map_err(gone)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(LiveError::io("start the runtime"))?;
    let comparison = runtime.block_on(async {
        let client = task.access.connect().await.map_err(LiveError::Cluster)?;
        let mut comparison = Comparison::default();
        for (mount, files) in shared.files.iter().enumerate() {
            // The programs have ended.
            let files = std::mem::take(&mut *files.lock());
            verify::compare(&client, mount, &files, &mut comparison).await;
        }
        // Nothing was written.
        let _ = client.close().await;
        Ok::<_, LiveError>(comparison)
    })?;
    reports.compared(&comparison);
    Ok(())
}
