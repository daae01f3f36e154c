//! Signals that end a command.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::process;

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
