//! Signals that end `harvestfs fs`.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;
use std::{fmt, io};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use super::process;
use crate::signals;

/// Time in which what is half copied is removed, and the session ends. What waits for a pipe or a terminal does not hear
/// of a signal: this is its end as well.
const GRACE: Duration = Duration::from_secs(2);

/// A signal has ended the command, which says nothing then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interrupted {
    pub(crate) signal: i32,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ended by signal {}", self.signal)
    }
}

impl std::error::Error for Interrupted {}

/// The signal that ends the command, when one comes.
pub(super) struct Interruption(oneshot::Receiver<Interrupted>);

impl Interruption {
    /// From now on no signal ends the process before it has had time to leave nothing half done.
    pub(super) fn watch() -> io::Result<Self> {
        let mut signals = Signals::listen()?;
        let (tell, told) = oneshot::channel();
        tokio::spawn(async move {
            let interrupted = signals.next().await;
            // Nobody listens any more while the session ends.
            let _ = tell.send(interrupted);
            tokio::time::sleep(GRACE).await;
            signals::end_by(interrupted.signal);
        });
        Ok(Self(told))
    }

    /// Does something, or drops it when a signal comes.
    pub(super) async fn unless<T>(
        &mut self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            biased;
            Ok(interrupted) = &mut self.0 => Err(interrupted.into()),
            done = work => done,
        }
    }
}

/// Those that are not ignored: SIGINT is in what a script starts in the background, SIGHUP by nohup(1).
struct Signals(Vec<(SignalKind, Signal)>);

impl Signals {
    fn listen() -> io::Result<Self> {
        let mut signals = Vec::new();
        for kind in [
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
        ] {
            if !process::ignores(kind.as_raw_value()) {
                signals.push((kind, signal(kind)?));
            }
        }
        Ok(Self(signals))
    }

    async fn next(&mut self) -> Interrupted {
        poll_fn(|context| {
            for (kind, signal) in &mut self.0 {
                if signal.poll_recv(context).is_ready() {
                    let signal = kind.as_raw_value();
                    return Poll::Ready(Interrupted { signal });
                }
            }
            Poll::Pending
        })
        .await
    }
}
