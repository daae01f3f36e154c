//! Looking at a running namenode.

use std::sync::Arc;
use std::time::Duration;

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
    events: mpsc::Sender<Event>,
    commits: Arc<Commits>,
    metrics: Arc<Metrics>,
}

impl Observer {
    pub(super) fn new(
        events: mpsc::Sender<Event>,
        commits: Arc<Commits>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            events,
            commits,
            metrics,
        }
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
        let sent = self.events.send(Event::Look(question)).await;
        sent.map_err(|_| Gone)?;
        let (answer, record): (T, Option<Lsn>) = answer.await.map_err(|_| Gone)?;
        while record.is_some_and(|record| self.commits.last() < record) {
            if self.events.is_closed() {
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
