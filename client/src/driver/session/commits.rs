//! Commits of written data. Of those that append, it is asked what came of them for as long as their session lasts.

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

/// Hears that no answer came, and says for each file of the commit whether its part is still wanted.
type Hears<'a> = dyn FnMut(&Unanswered) -> Vec<bool> + Send + 'a;

/// What is done about a commit of appends that is not answered.
pub(super) struct Silence<'a> {
    hears: Box<Hears<'a>>,
    /// When it heard last.
    heard: Option<Instant>,
}

impl Silence<'_> {
    /// Whether it has heard nothing yet.
    pub(super) fn is_new(&self) -> bool {
        self.heard.is_none()
    }

    /// No answer has come. Whether the question is repeated: it is, with what is still wanted, as long as there may be one.
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
        // It says so at once, each time, until an operator has decided.
        if is_recovering && self.heard.is_some_and(|heard| now - heard < patience) {
            return true;
        }
        let is_first = self.heard.replace(now).is_none();
        // All that it has had, before parts of it leave the request.
        session.cache.forget(&scope_of(mutation_of(request)));
        let wanted = (self.hears)(given_up);
        let had_more = leave_wanted(request, &wanted);
        if had_more && !is_first {
            // Or an attempt that still has it is executed later. At first, the connection was closed before.
            session.close_link();
        }
        wanted.contains(&true)
    }
}

impl Session {
    /// As [`Session::mutate`]. If it fails, that says whether it may have been executed: appends must not be committed
    /// twice. So if there are some, it does not fail as long as an answer under its number may say that: `silence` hears
    /// each time that none came in time, and says for each file whether its part is still wanted. What is not is taken out
    /// of what is repeated, and may be committed anew. The answer says nothing of it.
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
        Box::pin(done).await
    }

    /// The namenode executes nothing more that came on this connection.
    fn close_link(&self) {
        let link = self.link.borrow().clone();
        if let LinkState::Up(link) = link {
            link.rpc
                .connection()
                .close(CloseCode::DONE, "an append is given up");
        }
    }
}

/// Leaves of a commit what is wanted of it; whether it had more. Executed late, the rest would hide what another commit has
/// brought since, or bring what is reported as lost.
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
            // A file that is named is no longer delegated to the session, though its content is not committed.
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
