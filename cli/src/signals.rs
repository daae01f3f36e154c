//! Signals that end a command.

use std::time::Duration;
use std::{fmt, io, thread};

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::process;

/// Time for a command that a signal ends to remove unfinished work and exit. Code that blocks on a disk, a pipe or a
/// terminal does not notice the signal: after this time, the process ends anyway.
const GRACE: Duration = Duration::from_secs(2);

/// A signal has ended the command, which then prints nothing.
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

/// Receives the signal that ends the command, if one arrives.
pub struct Interruption(mpsc::Receiver<Interrupted>);

impl Interruption {
    /// From now on, no signal ends the process before it has had time to remove unfinished work.
    ///
    /// # Errors
    /// When signals cannot be waited for.
    pub fn watch() -> io::Result<Self> {
        let (tell, told) = mpsc::channel(1);
        let (listening, listens) = std::sync::mpsc::channel();
        // In a thread of its own, as the threads that do the work may block.
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
                // The receiver is gone when the command is already exiting.
                let _ = tell.try_send(Interrupted { signal });
                thread::sleep(GRACE);
                end_by(signal);
            })?;
        listens.recv().map_err(io::Error::other)??;
        Ok(Self(told))
    }

    /// Runs `work`, or drops it when a signal arrives.
    ///
    /// # Errors
    /// The error of `work`, or [`Interrupted`].
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

/// SIGINT, SIGTERM and SIGHUP. A signal that this process was started to ignore stays ignored: SIGINT if a script
/// starts it in the background, SIGHUP under nohup(1).
pub struct Ending {
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
}

impl Ending {
    /// From now on, none of these signals ends the process by itself.
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

    /// Waits for one of the signals, and returns its number.
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

/// Listens for a signal; `None` when it is ignored.
///
/// # Errors
/// When signals cannot be waited for.
pub fn unless_ignored(kind: SignalKind) -> io::Result<Option<Signal>> {
    if process::ignores(kind) {
        return Ok(None);
    }
    signal(kind).map(Some)
}

/// Waits for a signal, or forever if it is `None`.
pub async fn next(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

/// Ends this process as the signal would have. Ctrl-C ends a shell's loop only if it killed the command in it: the
/// shell assumes that a command that exits normally has handled the signal itself.
pub fn end_by(signal: i32) -> ! {
    // It fails only if it does not know the signal.
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal)
}
