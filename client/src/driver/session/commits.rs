//! Commits of written data. Of those that append, it is asked what came of them for as long as their session lasts.

use std::sync::Arc;

use harvestfs_protocol::meta::{MetaCall, MetaOp, MetaReply, Mutation, mutation};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::types::Credentials;

use super::Session;
use super::calls::Beside;
use crate::engine::cache::Ticket;
use crate::engine::session::call::Unanswered;

/// Hears that no answer has come for as long as operations wait for one, and that the question is repeated.
pub(super) type Silence<'a> = Box<dyn FnMut(&Unanswered) + Send + 'a>;

impl Session {
    /// As [`Session::mutate`]. If it fails, that says whether it may have been executed: appends must not be committed
    /// twice. So if there are some, it does not fail as long as an answer under its number may say that: `silence` hears
    /// each time that none came in time. From the first time on, what is no append may be committed anew.
    pub(crate) async fn commit(
        self: &Arc<Self>,
        credentials: &Credentials,
        commit: mutation::Commit,
        silence: impl FnMut(&Unanswered) + Send,
    ) -> Result<(Ticket, MetaReply), Unanswered> {
        let has_appends = commit.files.iter().any(|file| file.append);
        let silence: Silence<'_> = Box::new(silence);
        let silence = Some(silence).filter(|_| has_appends);
        let beside = Beside::default();
        let done = self.execute_numbered(credentials, commit.into(), beside, None, silence);
        Box::pin(done).await
    }
}

/// Leaves of a commit what it appends. Executed late, the rest would hide what another commit has brought since.
pub(super) fn leave_appends(request: &mut Arc<Request>) {
    if let Request::Meta(MetaCall {
        op: MetaOp::Mutation(call),
        ..
    }) = Arc::make_mut(request)
        && let Mutation::Commit(commit) = &mut call.mutation
    {
        for file in commit.files.iter_mut().filter(|file| !file.append) {
            file.extents.clear();
            file.mtime = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::{BlockId, InodeId};
    use harvestfs_protocol::meta::{FileCommit, MutationCall};
    use harvestfs_protocol::types::{Extent, Timestamp};

    use super::*;
    use crate::driver::session::calls::mutation_of;

    #[test]
    fn what_is_asked_for_again_brings_nothing_but_appends() {
        let file = |ino, append| FileCommit {
            ino: InodeId(ino),
            extents: vec![Extent {
                file_offset: 0,
                length_bytes: 10,
                block: BlockId(1),
                block_offset: 0,
            }],
            append,
            mtime: Some(Timestamp(1)),
        };
        let commit = mutation::Commit {
            files: vec![file(7, false), file(8, true)],
            durable: true,
        };
        let call = MutationCall {
            sequence: 1,
            answered_below: 1,
            relaxed: false,
            file: None,
            mutation: commit.into(),
        };
        let mut request = Arc::new(Request::Meta(MetaCall {
            credentials: Credentials::root(),
            op: MetaOp::Mutation(call),
        }));
        leave_appends(&mut request);
        let nothing = FileCommit {
            extents: Vec::new(),
            mtime: None,
            ..file(7, false)
        };
        let expected = mutation::Commit {
            files: vec![nothing, file(8, true)],
            durable: true,
        };
        assert_eq!(mutation_of(&request), &Mutation::Commit(expected));
    }
}
