//! Signals that end `harvestfs fs`.

use std::time::Duration;
use std::{fmt, io};

use tokio::sync::mpsc;

use crate::signals::{self, Ending};

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
pub(super) struct Interruption(mpsc::Receiver<Interrupted>);

impl Interruption {
    /// From now on no signal ends the process before it has had time to leave nothing half done.
    pub(super) fn watch() -> io::Result<Self> {
        let mut signals = Ending::listen()?;
        let (tell, told) = mpsc::channel(1);
        tokio::spawn(async move {
            let signal = signals.received().await;
            // Nobody listens any more while the session ends.
            let _ = tell.try_send(Interrupted { signal });
            tokio::time::sleep(GRACE).await;
            signals::end_by(signal);
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
            Some(interrupted) = self.0.recv() => Err(interrupted.into()),
            done = work => done,
        }
    }
}
