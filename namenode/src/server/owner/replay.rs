//! Commits that were answered before, and that clients replay since they may be forgotten.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId, SessionId};
use harvestfs_protocol::meta::mutation::Awaits;
use harvestfs_protocol::meta::{MetaOp, Mutation, MutationCall};
use harvestfs_protocol::types::Extent;
use rustc_hash::FxHashSet;

use super::Owner;
use crate::server::overtaken::Part;
use crate::server::sessions::Returning;

/// What no commit may have. A file with it is refused also by whoever reads the journal.
const REFUSED: Extent = Extent {
    file_offset: 0,
    length_bytes: 0,
    block: BlockId(0),
    block_offset: 0,
};

/// Whether a call replays a commit.
pub(super) fn is_replay(call: &MutationCall) -> bool {
    call.relaxed && matches!(call.mutation, Mutation::Commit(_))
}

/// Whether a call may be one that is replayed. Only commits say so.
fn may_be_replay(call: &MetaOp) -> bool {
    match call {
        MetaOp::Mutation(call) => call.relaxed || matches!(call.mutation, Mutation::SealBlocks(_)),
        MetaOp::Query(_) | MetaOp::Housekeeping(_) => false,
    }
}

impl Owner {
    /// A session comes back. Which of the files that it declares others have changed since they were told of it last; it has
    /// nothing to replay of those that it does not declare.
    pub(super) fn note_overtaken(&mut self, id: SessionId, declared: &[InodeId]) {
        if !self.sessions.is_missing(id) {
            if let Some(session) = self.sessions.get_mut(id) {
                let declared: FxHashSet<&InodeId> = declared.iter().collect();
                session.overtaken.retain(|(ino, _)| declared.contains(ino));
            }
            return;
        }
        let parts = declared
            .iter()
            .flat_map(|ino| Part::ALL.map(|part| (*ino, part)));
        let overtaken = parts.filter(|of| self.overtaken.is_changed_by_others(id, *of));
        let overtaken = overtaken.collect();
        if let Some(session) = self.sessions.get_mut(id) {
            session.overtaken = overtaken;
        }
    }

    /// A session changes files, and nobody waits any more for what others have to replay of them: they are missing or silent,
    /// or were asked for it in vain. That is written down before the change: without it, the next leader would take what hides
    /// the change. False while it is not durable: in a crash it could be lost with the change, and then both would be replayed
    /// in any order.
    pub(super) fn note_lapsed_before(&mut self, author: SessionId, call: &MutationCall) -> bool {
        let Awaits::Files(inodes) = call.mutation.facts().awaits else {
            return true;
        };
        if self.may_replay(author, call) || self.is_nothing_delegated() {
            return true;
        }
        let now_ms = self.clock.now_ms();
        let holders = inodes.iter().flat_map(|ino| self.delegations.holders(ino));
        // One that is back, and silent again or slow. The slow one has been asked for a whole lease since it came back: it
        // believes nothing of before, and has heard nothing since that it may cache. Once it has done more than replay, it
        // has nothing to replay, and what it may have cached then is waited for.
        let asked = holders.filter(|it| *it != author);
        let mut lapsed: Vec<_> = self.sessions.missing().chain(asked).collect();
        lapsed.retain(|it| !self.leases.is_alive(now_ms, *it) || self.only_replays(*it));
        lapsed.sort_unstable();
        lapsed.dedup();
        let mut unnoted = lapsed.clone();
        unnoted.retain(|it| !self.namespace.has_lapsed(*it));
        for &session in &unnoted {
            let session = self.sessions.get_mut(session);
            if let Some(session) = session.filter(|it| it.connection.is_some()) {
                session.returning = Returning::Replays;
            }
        }
        self.note_leases_lapsed(&unnoted);
        let committed = self.log.committed_lsn();
        let is_noted = |id| {
            let session = self.sessions.get(id);
            self.namespace.has_lapsed(id) && session.is_none_or(|it| it.lapse_noted <= committed)
        };
        lapsed.into_iter().all(is_noted)
    }

    /// Whether a call has to wait, since its session came back after its lease had run out: the first that is no replay, and
    /// what comes behind it, wait until it is durable that the session has a lease again. Another leader would not wait for
    /// it else.
    pub(super) fn waits_for_lease(&mut self, session: SessionId, call: &MetaOp) -> bool {
        let returning = self.sessions.get(session).map(|it| it.returning);
        let next = match returning {
            None | Some(Returning::No) => return false,
            Some(Returning::Replays) => {
                if may_be_replay(call) {
                    return false;
                }
                match self.returned(session) {
                    Ok(Some(lsn)) => Returning::Noted(lsn),
                    Ok(None) => Returning::No,
                    Err(error) => {
                        tracing::error!(%session, %error, "that a session is back cannot be written down");
                        Returning::Replays
                    }
                }
            }
            Some(Returning::Noted(lsn)) if lsn <= self.log.committed_lsn() => Returning::No,
            Some(noted @ Returning::Noted(_)) => noted,
        };
        if let Some(session) = self.sessions.get_mut(session) {
            session.returning = next;
        }
        next != Returning::No
    }

    /// Whether a session is back and has only replayed so far, so that another leader may not wait for it. It may set
    /// attributes, which does not say whether it is replayed, but must not cache what it is answered.
    pub(super) fn only_replays(&self, session: SessionId) -> bool {
        let session = self.sessions.get(session);
        session.is_some_and(|session| session.returning == Returning::Replays)
    }

    /// Whether a session may have been answered a call before. It waits for nothing that others replay, or each might wait for
    /// the other: what one was answered before it was durable followed nothing of others that was not.
    pub(super) fn may_replay(&self, session: SessionId, call: &MutationCall) -> bool {
        is_replay(call) || call.relaxed && self.only_replays(session)
    }

    /// A mutation was executed. What is replayed was there before, and overtakes nothing.
    pub(super) fn note_changed(&mut self, author: SessionId, mutation: &Mutation, is_replay: bool) {
        let any_missing = self.sessions.any_missing();
        if !any_missing {
            self.overtaken.clear();
        }
        if is_replay {
            return;
        }
        let facts = mutation.facts();
        for &part in Part::changed_by(mutation) {
            // One that is back, and had not replayed all before nobody waited for it any more.
            for ino in facts.inodes.iter() {
                let holders = self.delegations.holders(ino);
                for holder in holders.filter(|it| *it != author) {
                    if let Some(holder) = self.sessions.get_mut(holder) {
                        holder.overtaken.insert((ino, part));
                    }
                }
            }
            if any_missing {
                self.overtaken.changed(author, part, facts.inodes.iter());
            }
        }
    }

    /// What a session replays of files that others have changed meanwhile would hide that. Appends hide nothing.
    ///
    /// # Errors
    /// It replays attributes, or sets them before it has said that all is replayed: then it does so once more, to be durable.
    pub(super) fn refuse_overtaken(
        &self,
        id: SessionId,
        call: &mut MutationCall,
    ) -> Result<(), FsError> {
        let Some(session) = self.sessions.get(id).filter(|_| call.relaxed) else {
            return Ok(());
        };
        let refused = |ino: InodeId| {
            tracing::warn!(
                session = %id, %ino,
                "what a session changed and a crash took is not stored: others have changed the file meanwhile"
            );
        };
        match &mut call.mutation {
            Mutation::Commit(commit) => {
                for file in &mut commit.files {
                    let of = (file.ino, Part::Content);
                    if !file.append && session.overtaken.contains(&of) {
                        refused(file.ino);
                        file.extents = vec![REFUSED];
                    }
                }
                Ok(())
            }
            Mutation::SetAttr(op) if session.overtaken.contains(&(op.ino, Part::Attributes)) => {
                refused(op.ino);
                Err(FsError::InvalidArgument(
                    "others have changed the file's attributes meanwhile".into(),
                ))
            }
            _ => Ok(()),
        }
    }
}
