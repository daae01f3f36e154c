//! Looking at a running namenode.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::connection::Event;
use super::metrics::Metrics;
use super::owner::Owner;
use crate::consensus::Commits;
use crate::journal::Lsn;

/// How often to check whether what is to be shown is on stable storage.
const DURABLE_POLL: Duration = Duration::from_millis(2);

/// A question to the owner of the engine, which answers it between two requests.
pub(crate) type Question = Box<dyn FnOnce(&Owner) + Send>;

/// The namenode has ended.
#[derive(Debug, thiserror::Error)]
#[error("the namenode is stopping")]
pub(crate) struct Gone;

/// Looks at a running namenode, from any thread. Cheap to clone.
#[derive(Clone)]
pub struct Observer {
    owner: Arc<Mutex<OwnerHandle>>,
    metrics: Arc<Metrics>,
}

/// How to reach the owner of the engine; another one after each time that the namenode was deposed.
#[derive(Clone)]
struct OwnerHandle {
    events: mpsc::Sender<Event>,
    commits: Arc<Commits>,
}

impl Observer {
    pub(super) fn new(
        events: mpsc::Sender<Event>,
        commits: Arc<Commits>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            owner: Arc::new(Mutex::new(OwnerHandle { events, commits })),
            metrics,
        }
    }

    /// Asks another owner from here on.
    pub(super) fn follow(&self, events: mpsc::Sender<Event>, commits: Arc<Commits>) {
        *self.owner.lock() = OwnerHandle { events, commits };
    }

    /// Asks the owner. An answer that may show an unacknowledged change is held until that change
    /// is on stable storage: after a crash it would have shown something that never was.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Owner) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let (sender, answer) = oneshot::channel();
        let question: Question = Box::new(move |owner: &Owner| {
            // The caller may have gone.
            let _ = sender.send((question(owner), owner.undurable()));
        });
        let OwnerHandle { events, commits } = self.owner.lock().clone();
        let sent = events.send(Event::Look(question)).await;
        sent.map_err(|_| Gone)?;
        let (answer, record): (T, Option<Lsn>) = answer.await.map_err(|_| Gone)?;
        while record.is_some_and(|record| commits.last() < record) {
            if events.is_closed() {
                return Err(Gone);
            }
            tokio::time::sleep(DURABLE_POLL).await;
        }
        Ok(answer)
    }

    /// The metrics for Prometheus now.
    pub(crate) async fn metrics_text(&self) -> Result<String, Gone> {
        let (overview, classes) = self
            .ask(|owner| (owner.overview(), owner.classes()))
            .await?;
        Ok(self.metrics.text(&overview, &classes))
    }
}
