//! Signals that end a command.

use std::time::Duration;
use std::{fmt, io, thread};

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::process;

/// Time in which a command that a signal ends removes what it has half done, and takes its leave. What waits for a disk, a
/// pipe or a terminal does not hear of a signal: this is its end as well.
const GRACE: Duration = Duration::from_secs(2);

/// A signal has ended the command, which says nothing then.
#[derive(Clone, Copy, Debug)]
pub struct Interrupted {
    pub signal: i32,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ended by signal {}", self.signal)
    }
}

impl std::error::Error for Interrupted {}

/// The signal that ends the command, when one comes.
pub struct Interruption(mpsc::Receiver<Interrupted>);

impl Interruption {
    /// From now on no signal ends the process before it has had time to leave nothing half done.
    ///
    /// # Errors
    /// When signals cannot be waited for.
    pub fn watch() -> io::Result<Self> {
        let (tell, told) = mpsc::channel(1);
        let (listening, listens) = std::sync::mpsc::channel();
        // Whatever the threads that do the work wait for.
        thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let begin = || -> io::Result<_> {
                    let runtime = Builder::new_current_thread().enable_all().build()?;
                    let signals = runtime.block_on(async { Ending::listen() })?;
                    Ok((runtime, signals))
                };
                let (runtime, mut signals) = match begin() {
                    Ok(begun) => begun,
                    Err(error) => {
                        let _ = listening.send(Err(error));
                        return;
                    }
                };
                let _ = listening.send(Ok(()));
                let signal = runtime.block_on(signals.received());
                // Nobody listens any more while the command takes its leave.
                let _ = tell.try_send(Interrupted { signal });
                thread::sleep(GRACE);
                end_by(signal);
            })?;
        listens.recv().map_err(io::Error::other)??;
        Ok(Self(told))
    }

    /// Does something, or drops it when a signal comes.
    ///
    /// # Errors
    /// What it fails with; [`Interrupted`].
    pub async fn unless<T>(
        &mut self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            biased;
            Some(interrupted) = self.0.recv() => Err(interrupted.into()),
            done = work => done,
        }
    }
}

/// SIGINT, SIGTERM and SIGHUP. What this process was started to ignore, it goes on ignoring: SIGINT in what a script starts
/// in the background, and SIGHUP under nohup(1).
pub struct Ending {
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
}

impl Ending {
    /// From now on none of them ends the process by itself.
    ///
    /// # Errors
    /// When signals cannot be waited for.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: unless_ignored(SignalKind::interrupt())?,
            terminate: unless_ignored(SignalKind::terminate())?,
            hangup: unless_ignored(SignalKind::hangup())?,
        })
    }

    /// Waits for one of them, and returns its number.
    pub async fn received(&mut self) -> i32 {
        let kind = tokio::select! {
            biased;
            () = next(self.interrupt.as_mut()) => SignalKind::interrupt(),
            () = next(self.terminate.as_mut()) => SignalKind::terminate(),
            () = next(self.hangup.as_mut()) => SignalKind::hangup(),
        };
        kind.as_raw_value()
    }
}

/// Listens to a signal; none where it is ignored.
///
/// # Errors
/// When signals cannot be waited for.
pub fn unless_ignored(kind: SignalKind) -> io::Result<Option<Signal>> {
    if process::ignores(kind) {
        return Ok(None);
    }
    signal(kind).map(Some)
}

/// Waits for a signal; for ever if there is none.
pub async fn next(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

/// Ends this process as the signal would have. Ctrl-C ends a loop of a shell only if it killed the command in it: one
/// that exits has made something else of it.
pub fn end_by(signal: i32) -> ! {
    // It fails only if it does not know the signal.
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal)
}
