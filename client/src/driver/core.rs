//! The state that all handles of a client share, and its background tasks.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::mpsc;

use super::cluster::Cluster;
use super::read::reader::Reads;
use super::session::calls::confirm;
use super::session::{LinkState, Recall, Session};
use super::write::files::Files;
use crate::engine::read::recent::Recent;
use crate::error::ClientError;
use crate::options::ClientOptions;

/// How often files are checked for old data.
const FLUSH_INTERVAL: Duration = Duration::from_millis(500);

/// The shared state of a client.
pub(crate) struct Core {
    pub(crate) session: Arc<Session>,
    pub(crate) files: Arc<Files>,
    pub(crate) reads: Arc<Reads>,
}

impl Core {
    pub(crate) fn connect(
        options: ClientOptions,
    ) -> BoxFuture<'static, Result<Arc<Self>, ClientError>> {
        Box::pin(Self::connect_here(options))
    }

    async fn connect_here(options: ClientOptions) -> Result<Arc<Self>, ClientError> {
        let (session, recalled) = Session::connect(options).await?;
        let cluster = Arc::new(Cluster::new(session.clone()));
        let recent = Arc::new(Recent::default());
        let core = Arc::new(Self {
            files: Arc::new(Files::new(cluster.clone(), recent.clone())),
            reads: Arc::new(Reads::new(cluster, recent)),
            session,
        });
        tokio::spawn(flush_old_data(core.clone()));
        tokio::spawn(follow_session(core.clone(), recalled));
        Ok(core)
    }
}

/// Periodically flushes old data, forgets states of files that are not needed, drops files whose loans
/// have expired, and confirms commits.
async fn flush_old_data(core: Arc<Core>) {
    while !core.session.is_closed() {
        tokio::time::sleep(FLUSH_INTERVAL).await;
        core.files.flush_old();
        core.reads.return_files();
        if core.session.has_unconfirmed() {
            confirm(core.session.clone()).await;
        }
    }
}

/// Keeps files in step with the session: commits what the namenode recalls, and notifies writers
/// when a new session has replaced an expired one, or when none will follow.
async fn follow_session(core: Arc<Core>, mut recalled: mpsc::Receiver<Recall>) {
    let mut changes = core.session.watch_link();
    let mut generation = core.session.generation();
    loop {
        let link = match &*changes.borrow_and_update() {
            LinkState::Closed => return core.files.close_writers(),
            LinkState::Up(link) => Some(link.clone()),
            LinkState::Down { .. } => None,
        };
        if let Some(link) = link
            && link.generation != generation
        {
            generation = link.generation;
            core.files.begin_session();
        }
        tokio::select! {
            biased;
            changed = changes.changed() => if changed.is_err() {
                return;
            },
            Some(inodes) = recalled.recv() => {
                tokio::spawn(core.files.clone().commit_recalled(inodes));
            }
        }
    }
}
