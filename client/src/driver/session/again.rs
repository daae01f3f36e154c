//! What is said again to the namenode when the session resumes, since a crash may have taken it.
//!
//! It was answered, and a program may rely on it. Where the namenode refuses it now (others have changed the file meanwhile,
//! or a quota has no room any more), it is lost, which the file's next `fsync` or `close` reports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::BLOCKS_PER_REQUEST_MAX;
use harvestfs_protocol::meta::{MetaCall, MetaOp, MetaReply, Mutated, Mutation, housekeeping};
use harvestfs_protocol::rpc::{Reply, Request};

use super::calls::mutation_of;
use super::{Link, Session, unreachable};
use crate::driver::clock;
use crate::engine::session::call::ATTEMPT_DEADLINE;
use crate::error::ClientError;

/// Files of which a loss is kept until it is reported. Of more it is only logged.
const LOST_MAX: usize = 65_536;

/// What was answered and is lost, by file, until it is reported.
pub(super) type Lost = BTreeMap<InodeId, ClientError>;

/// A request as it is said again: a commit says so.
pub(super) fn said_again(mut request: Arc<Request>) -> Arc<Request> {
    if let Request::Meta(MetaCall {
        op: MetaOp::Mutation(call),
        ..
    }) = Arc::make_mut(&mut request)
        && matches!(call.mutation, Mutation::Commit(_))
    {
        call.relaxed = true;
    }
    request
}

impl Session {
    /// The inodes of what the namenode may have forgotten in a crash.
    pub(super) fn unconfirmed_inodes(&self) -> BTreeSet<InodeId> {
        let unconfirmed = self.unconfirmed.lock();
        let requests = unconfirmed.waiting().map(|(_, request)| request);
        let inodes = requests.flat_map(|request| mutation_of(request).facts().inodes.iter());
        inodes.collect()
    }

    /// Replays on a new connection what the namenode may have forgotten in a crash.
    ///
    /// # Errors
    /// The connection failed again, the session is over, or the namenode does not lead any more.
    pub(super) async fn repeat_unconfirmed(&self, link: &Link) -> Result<(), ClientError> {
        let requests: Vec<Arc<Request>> = {
            let unconfirmed = self.unconfirmed.lock();
            let waiting = unconfirmed.waiting();
            waiting.map(|(_, request)| request.clone()).collect()
        };
        for request in requests {
            let inodes = mutation_of(&request).facts().inodes;
            match self.repeat(link, &request).await? {
                Ok(Reply::Mutated(Mutated {
                    reply: MetaReply::Committed(results),
                    ..
                })) => {
                    for (ino, result) in inodes.iter().zip(results) {
                        if let Err(error) = result {
                            self.lost_again(ino, error);
                        }
                    }
                }
                Ok(_) => {}
                Err(error) => {
                    let operation = mutation_of(&request).name();
                    tracing::warn!(operation, %error, "what was answered before is refused now");
                    for ino in inodes.iter() {
                        self.lost_again(ino, error.clone());
                    }
                }
            }
        }
        Ok(())
    }

    /// Asks until it is answered, also by a namenode that is busy.
    async fn repeat(
        &self,
        link: &Link,
        request: &Request,
    ) -> Result<Result<Reply, FsError>, ClientError> {
        let started = clock::now();
        loop {
            let answer = link.ask(request, ATTEMPT_DEADLINE).await;
            let answer = answer.map_err(|error| unreachable(Duration::ZERO, &error))?;
            match answer {
                Err(error @ FsError::NotLeader { leader }) => {
                    self.deposed(link, leader);
                    return Err(error.into());
                }
                Err(error @ FsError::SessionExpired) => {
                    self.session_expired(link);
                    return Err(error.into());
                }
                Err(FsError::Busy { retry_after_ms })
                    if clock::now() - started < self.options.busy_timeout =>
                {
                    tokio::time::sleep(Duration::from_millis(retry_after_ms.into())).await;
                }
                answer => return Ok(answer),
            }
        }
    }

    /// What was answered of a file is lost.
    fn lost_again(&self, ino: InodeId, error: FsError) {
        let error = ClientError::from(error);
        if error.is_gone() {
            // No reader can see the file any more.
            return;
        }
        tracing::error!(%ino, %error, "what was closed or set just before the namenode crashed is lost");
        let mut lost = self.lost.lock();
        if lost.len() < LOST_MAX || lost.contains_key(&ino) {
            let reason = format!("the namenode forgot it in a crash, and refuses it now: {error}");
            lost.insert(ino, ClientError::DataLost { reason });
        }
    }

    /// What was answered of a file and is lost, once.
    pub(crate) fn take_lost(&self, ino: InodeId) -> Option<ClientError> {
        self.lost.lock().remove(&ino)
    }

    /// All is said again: others may go on with the files that were declared for it.
    pub(super) fn return_declared(self: &Arc<Self>) {
        let mut inodes: Vec<InodeId> = self.unconfirmed_inodes().into_iter().collect();
        inodes.retain(|ino| !self.delegations.is_owed(*ino));
        if inodes.is_empty() {
            return;
        }
        let session = self.clone();
        self.runtime.spawn(async move {
            for chunk in inodes.chunks(BLOCKS_PER_REQUEST_MAX) {
                let op = housekeeping::ReturnDelegations {
                    inodes: chunk.to_vec(),
                };
                if let Err(error) = session.keep_house(op).await {
                    // They are recalled, or end with the session.
                    tracing::debug!(%error, "cannot return what was declared");
                }
            }
        });
    }
}
