//! Commits of written data. A commit with appends is retried until its outcome is known or its session has ended.

use std::sync::Arc;
use std::time::Instant;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::{MetaCall, MetaOp, MetaReply, Mutation, mutation};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::transport::CloseCode;
use harvestfs_protocol::types::Credentials;

use super::calls::{Beside, mutation_of, scope_of};
use super::{LinkState, Session};
use crate::driver::clock;
use crate::engine::cache::Ticket;
use crate::engine::session::call::Unanswered;
use crate::error::ClientError;

/// Is notified that no answer came, and returns for each file of the commit whether its part is still wanted.
type Hears<'a> = dyn FnMut(&Unanswered) -> Vec<bool> + Send + 'a;

/// The handling of an unanswered commit of appends.
pub(super) struct Silence<'a> {
    hears: Box<Hears<'a>>,
    /// When `hears` was last called.
    heard: Option<Instant>,
}

impl Silence<'_> {
    /// Whether `hears` was not called yet.
    pub(super) fn is_new(&self) -> bool {
        self.heard.is_none()
    }

    /// Decides whether an unanswered commit is repeated: yes, with the parts still wanted, while an answer is possible.
    pub(super) fn goes_on(
        &mut self,
        session: &Session,
        request: &mut Arc<Request>,
        given_up: &Unanswered,
    ) -> bool {
        if !given_up.may_be_learned() {
            return false;
        }
        let (now, patience) = (clock::now(), session.options.unreachable_timeout);
        let is_recovering = matches!(given_up.error, ClientError::Fs(FsError::Recovery(_)));
        // A namenode in recovery refuses immediately each time, until an operator has decided.
        if is_recovering && self.heard.is_some_and(|heard| now - heard < patience) {
            return true;
        }
        let is_first = self.heard.replace(now).is_none();
        // This covers the whole commit, before parts of it leave the request.
        session.cache.forget(&scope_of(mutation_of(request)));
        let wanted = (self.hears)(given_up);
        let had_more = leave_wanted(request, &wanted);
        if had_more && !is_first {
            // Otherwise an attempt that still has the rest could be executed later. The first time,
            // the connection was closed already.
            session.close_link();
        }
        wanted.contains(&true)
    }
}

impl Session {
    /// As [`Session::mutate`]. The error tells whether the commit may have been executed: appends must not be committed
    /// twice. If there are appends, the commit therefore does not fail while an answer under its number is possible:
    /// `silence` is called each time none came in time, and returns for each file whether its part is still wanted.
    /// Other parts are removed from the repeated request, and may be committed again. The answer does not cover them.
    pub(crate) async fn commit(
        self: &Arc<Self>,
        credentials: &Credentials,
        commit: mutation::Commit,
        silence: impl FnMut(&Unanswered) -> Vec<bool> + Send,
    ) -> Result<(Ticket, MetaReply), Unanswered> {
        let has_appends = commit.files.iter().any(|file| file.append);
        let silence = has_appends.then(|| Silence {
            hears: Box::new(silence),
            heard: None,
        });
        let beside = Beside::default();
        let done = self.execute_numbered(credentials, commit.into(), beside, None, silence);
        let (ticket, reply, _) = Box::pin(done).await?;
        Ok((ticket, reply))
    }

    /// Closes the connection: the namenode executes nothing more that arrived on it.
    fn close_link(&self) {
        let link = self.link.borrow().clone();
        if let LinkState::Up(link) = link {
            link.rpc
                .connection()
                .close(CloseCode::DONE, "an append is given up");
        }
    }
}

/// Reduces a commit to its wanted parts; returns whether it had others. Executed late, they would
/// hide what another commit has written since, or restore data that was reported as lost.
fn leave_wanted(request: &mut Arc<Request>, wanted: &[bool]) -> bool {
    let mut had_more = false;
    if let Request::Meta(MetaCall {
        op: MetaOp::Mutation(call),
        ..
    }) = Arc::make_mut(request)
        && let Mutation::Commit(commit) = &mut call.mutation
    {
        let left = commit.files.iter().zip(wanted).find(|(_, is)| **is);
        let left = left.map(|(file, _)| file.ino);
        let files = commit.files.iter_mut().zip(wanted);
        for (file, _) in files.filter(|(_, is_wanted)| !**is_wanted) {
            had_more |= !file.extents.is_empty();
            file.extents.clear();
            file.mtime = None;
            // An unwanted file must not be named: the session would lose its delegation though its
            // content is not committed.
            file.ino = left.unwrap_or(file.ino);
        }
    }
    had_more
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::{BlockId, InodeId};
    use harvestfs_protocol::meta::{FileCommit, MutationCall};
    use harvestfs_protocol::types::{Extent, Timestamp};

    use super::*;

    #[test]
    fn what_is_asked_for_again_brings_nothing_but_what_is_wanted() {
        let extent = Extent {
            file_offset: 0,
            length_bytes: 10,
            block: BlockId(1),
            block_offset: 0,
        };
        let file = |ino, append| FileCommit {
            ino: InodeId(ino),
            extents: vec![extent],
            append,
            mtime: Some(Timestamp(1)),
        };
        let commit = |files| mutation::Commit {
            files,
            durable: true,
        };
        let call = MutationCall {
            sequence: 1,
            answered_below: 1,
            relaxed: false,
            file: None,
            mutation: commit(vec![file(7, false), file(8, true), file(9, true)]).into(),
        };
        let mut request = Arc::new(Request::Meta(MetaCall {
            credentials: Credentials::root(),
            op: MetaOp::Mutation(call),
        }));
        let nothing = |ino, append| FileCommit {
            extents: Vec::new(),
            mtime: None,
            ..file(ino, append)
        };
        assert!(leave_wanted(&mut request, &[false, true, true]));
        let left = commit(vec![nothing(8, false), file(8, true), file(9, true)]);
        assert_eq!(mutation_of(&request), &Mutation::Commit(left));
        assert!(leave_wanted(&mut request, &[false, false, true]));
        let left = commit(vec![nothing(9, false), nothing(9, true), file(9, true)]);
        assert_eq!(mutation_of(&request), &Mutation::Commit(left));
        assert!(!leave_wanted(&mut request, &[false, false, true]));
        assert!(leave_wanted(&mut request, &[false; 3]), "nothing is left");
    }
}
