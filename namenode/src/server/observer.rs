//! Observing a running namenode.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::metrics::Metrics;
use super::owner::Owner;
use crate::consensus::Commits;
use crate::journal::Lsn;

/// How often to check whether the data to show is on stable storage.
const DURABLE_POLL: Duration = Duration::from_millis(2);

/// A question to the owner of the engine, which answers it between two requests.
pub(crate) type Question = Box<dyn FnOnce(&Owner) + Send>;

/// The namenode has ended.
#[derive(Debug, thiserror::Error)]
#[error("the namenode is stopping")]
pub(crate) struct Gone;

/// Observes a running namenode, from any thread. Cheap to clone.
#[derive(Clone)]
pub struct Observer {
    owner: Arc<Mutex<OwnerHandle>>,
    metrics: Arc<Metrics>,
}

/// How to reach the owner of the engine; replaced each time the namenode was deposed.
#[derive(Clone)]
struct OwnerHandle {
    questions: mpsc::Sender<Question>,
    commits: Arc<Commits>,
}

impl Observer {
    pub(super) fn new(
        questions: mpsc::Sender<Question>,
        commits: Arc<Commits>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            owner: Arc::new(Mutex::new(OwnerHandle { questions, commits })),
            metrics,
        }
    }

    /// Directs questions to another owner from here on.
    pub(super) fn follow(&self, questions: mpsc::Sender<Question>, commits: Arc<Commits>) {
        *self.owner.lock() = OwnerHandle { questions, commits };
    }

    /// Asks the owner. An answer that may show an unacknowledged change is held until that change is on stable
    /// storage: after a crash it would have shown something that never existed.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Owner) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        self.ask_held(question, Owner::undurable).await
    }

    /// Asks about the condition of the cluster. While nobody leads, nothing becomes durable, and just that has to be
    /// visible, so the answer is not held.
    pub(crate) async fn ask_how_it_is<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Owner) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let held = |owner: &Owner| owner.undurable().filter(|_| !owner.nobody_leads());
        self.ask_held(question, held).await
    }

    /// Asks, and holds the answer until a record is on stable storage.
    async fn ask_held<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Owner) -> T + Send + 'static,
        record: impl FnOnce(&Owner) -> Option<Lsn> + Send + 'static,
    ) -> Result<T, Gone> {
        let (sender, answer) = oneshot::channel();
        let question: Question = Box::new(move |owner: &Owner| {
            // The caller may have given up.
            let _ = sender.send((question(owner), record(owner)));
        });
        let OwnerHandle { questions, commits } = self.owner.lock().clone();
        let sent = questions.send(question).await;
        sent.map_err(|_| Gone)?;
        let (answer, record): (T, Option<Lsn>) = answer.await.map_err(|_| Gone)?;
        while record.is_some_and(|record| commits.last() < record) {
            if questions.is_closed() {
                return Err(Gone);
            }
            tokio::time::sleep(DURABLE_POLL).await;
        }
        Ok(answer)
    }

    /// The current metrics for Prometheus.
    pub(crate) async fn metrics_text(&self) -> Result<String, Gone> {
        let (overview, classes) = self
            .ask_how_it_is(|owner| (owner.overview(), owner.classes()))
            .await?;
        Ok(self.metrics.text(&overview, &classes))
    }
}
