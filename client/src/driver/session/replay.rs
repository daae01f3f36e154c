//! Replay of mutations when the session resumes, because a crash may have lost them.
//!
//! They were answered, and a program may rely on them. A mutation that the namenode refuses now
//! (because others have changed the file meanwhile, or a quota has no room any more) is lost, which
//! the file's next `fsync` or `close` reports. In another session nothing can be replayed, since
//! others may have built on the state without it: what the namenode does not have is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::BLOCKS_PER_REQUEST_MAX;
use harvestfs_protocol::meta::mutation::Commit;
use harvestfs_protocol::meta::{
    FileCommit, MetaCall, MetaOp, MetaReply, Mutated, Mutation, Query, housekeeping, query,
};
use harvestfs_protocol::rpc::{Reply, Request};
use harvestfs_protocol::types::{Credentials, Extent};

use super::calls::mutation_of;
use super::{Link, Session, unreachable};
use crate::driver::clock;
use crate::engine::session::answered::{Answered, AnsweredFile, FoundFile};
use crate::engine::session::call::ATTEMPT_DEADLINE;
use crate::error::ClientError;

/// Maximum number of files whose losses are kept until they are reported. Others are only logged.
const LOST_MAX: usize = 65_536;

/// Acknowledged data that is lost, by file, until it is reported.
pub(super) type Lost = BTreeMap<InodeId, ClientError>;

/// Turns a request into a replay: a commit is marked as one, and changes nothing in files for which it was refused.
pub(super) fn make_replay(request: &mut Arc<Request>, reply: &MetaReply) {
    if let Request::Meta(MetaCall {
        op: MetaOp::Mutation(call),
        ..
    }) = Arc::make_mut(request)
        && let Mutation::Commit(commit) = &mut call.mutation
    {
        call.relaxed = true;
        if let MetaReply::Committed(results) = reply {
            for (file, result) in commit.files.iter_mut().zip(results) {
                if result.is_err() {
                    file.extents.clear();
                    file.mtime = None;
                }
            }
        }
    }
}

/// Returns the inodes that a request changes, in order; `None` for files in which it changes nothing.
fn changed_by(mutation: &Mutation) -> Vec<Option<InodeId>> {
    let Mutation::Commit(Commit { files, .. }) = mutation else {
        return mutation.facts().inodes.iter().map(Some).collect();
    };
    let changes = |file: &FileCommit| !file.extents.is_empty() || file.mtime.is_some();
    let changed = files.iter().map(|it| changes(it).then_some(it.ino));
    changed.collect()
}

impl Session {
    /// Returns the inodes whose changes the namenode may have lost in a crash.
    pub(super) fn unconfirmed_inodes(&self) -> BTreeSet<InodeId> {
        let unconfirmed = self.unconfirmed.lock();
        let requests = unconfirmed.waiting().map(|(_, (_, request))| request);
        let inodes = requests.flat_map(|request| mutation_of(request).facts().inodes.iter());
        inodes.collect()
    }

    /// Replays on a new connection what the namenode may have lost in a crash since the connection `before`.
    /// Mutations answered in a session that has ended since are compared with the state of their files.
    ///
    /// # Errors
    /// The connection failed again, the session has ended, or the namenode no longer leads.
    pub(super) async fn replay_unconfirmed(
        &self,
        before: &Link,
        link: &Link,
    ) -> Result<(), ClientError> {
        let mut requests = Vec::new();
        let (mut of_ended, mut ended_through) = (Vec::new(), None);
        for (last, (number, request)) in self.unconfirmed.lock().replay() {
            if number.generation() == link.generation {
                requests.push(request.clone());
            } else {
                of_ended.push(request.clone());
                ended_through = Some(last);
            }
        }
        if let Some(through) = ended_through {
            // In the same epoch, the new session began after them, so they were already durable.
            if before.opened.position.epoch != link.opened.position.epoch {
                let answered = Answered::of(of_ended.iter().map(|it| mutation_of(it)));
                self.look_for(link, answered).await?;
            }
            self.confirmed(through);
        }
        for request in requests {
            let inodes = changed_by(mutation_of(&request));
            match self.repeat(link, &request).await? {
                Ok(Reply::Mutated(Mutated {
                    reply: MetaReply::Committed(results),
                    ..
                })) => {
                    for (ino, result) in inodes.into_iter().zip(results) {
                        if let (Some(ino), Err(error)) = (ino, result) {
                            self.replay_refused(ino, error);
                        }
                    }
                }
                Ok(_) => {}
                // After the recovery they are replayed, unless the session has ended.
                Err(error @ FsError::Recovery(_)) => {
                    tracing::warn!(%error, "what was answered before cannot be replayed yet");
                    return Ok(());
                }
                Err(error) => {
                    let operation = mutation_of(&request).name();
                    tracing::warn!(operation, %error, "what was answered before is refused now");
                    for ino in inodes.into_iter().flatten() {
                        self.replay_refused(ino, error.clone());
                    }
                }
            }
        }
        Ok(())
    }

    /// Notes as lost what the namenode no longer has.
    async fn look_for(&self, link: &Link, answered: Answered) -> Result<(), ClientError> {
        for (ino, file) in answered.files {
            let found = self.found(link, ino, &file).await?;
            let missing = match found {
                Ok(found) if file.is_in(&found) => continue,
                Ok(_) => "it has it not, unless others have changed the file since".to_owned(),
                Err(error) if ClientError::from(error.clone()).is_gone() => continue,
                Err(error) => error.to_string(),
            };
            self.note_lost(
                ino,
                format!("the session ended, and the namenode may have crashed before: {missing}"),
            );
        }
        Ok(())
    }

    /// Returns the state of a file at the namenode.
    async fn found(
        &self,
        link: &Link,
        ino: InodeId,
        file: &AnsweredFile,
    ) -> Result<Result<FoundFile, FsError>, ClientError> {
        let attr = match self.question(link, query::GetAttr { ino }).await? {
            Ok(MetaReply::Attr(attr)) => attr,
            Ok(_) => return Err(ClientError::UnexpectedReply(query::GetAttr::NAME)),
            Err(error) => return Ok(Err(error)),
        };
        let mut found = FoundFile {
            attr,
            extents: Vec::new(),
        };
        let Range {
            start,
            end: through,
        } = file.range();
        let mut from_offset = start;
        while from_offset < through {
            let op = query::GetExtents { ino, from_offset };
            let (extents, end) = match self.question(link, op).await? {
                Ok(MetaReply::Extents { extents, end }) => (extents, end),
                Ok(_) => return Err(ClientError::UnexpectedReply(query::GetExtents::NAME)),
                Err(error) => return Ok(Err(error)),
            };
            let next = extents.last().map(Extent::file_end);
            found.extents.extend(extents);
            match next {
                Some(next) if !end && next > from_offset => from_offset = next,
                _ => break,
            }
        }
        Ok(Ok(found))
    }

    async fn question(
        &self,
        link: &Link,
        query: impl Into<Query>,
    ) -> Result<Result<MetaReply, FsError>, ClientError> {
        let request = Request::Meta(MetaCall {
            credentials: Credentials::root(),
            op: MetaOp::Query(query.into()),
        });
        match self.repeat(link, &request).await? {
            Ok(Reply::Meta(reply)) => Ok(Ok(reply)),
            Ok(_) => Err(ClientError::UnexpectedReply("a query")),
            Err(error) => Ok(Err(error)),
        }
    }

    /// Repeats a request until it is answered. A busy namenode is asked for as long as mounts wait
    /// for one, and then on another connection.
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
                Err(error @ FsError::Busy { .. }) => return Err(error.into()),
                answer => return Ok(answer),
            }
        }
    }

    /// Notes that acknowledged changes of a file are lost.
    fn replay_refused(&self, ino: InodeId, error: FsError) {
        let error = ClientError::from(error);
        if error.is_gone() {
            // No reader can see the file any more.
            return;
        }
        let reason = format!("the namenode forgot it in a crash, and refuses it now: {error}");
        self.note_lost(ino, reason);
    }

    fn note_lost(&self, ino: InodeId, reason: String) {
        tracing::error!(%ino, reason, "what was closed or set just before the namenode crashed is lost");
        let mut lost = self.lost.lock();
        if lost.len() < LOST_MAX || lost.contains_key(&ino) {
            lost.insert(ino, ClientError::DataLost { reason });
        }
    }

    /// Takes the loss of a file, so that it is reported once.
    pub(crate) fn take_lost(&self, ino: InodeId) -> Option<ClientError> {
        self.lost.lock().remove(&ino)
    }

    /// Returns the declared files after the replay, so that other sessions may continue with them.
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
                    // The namenode recalls them, or they end with the session.
                    tracing::debug!(%error, "cannot return what was declared");
                }
            }
        });
    }
}
