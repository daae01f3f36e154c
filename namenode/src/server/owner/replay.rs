//! Commits that were answered before, and that clients replay because a crash may have lost them.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId, SessionId};
use harvestfs_protocol::meta::mutation::Awaits;
use harvestfs_protocol::meta::{MetaOp, Mutation, MutationCall};
use harvestfs_protocol::types::Extent;
use rustc_hash::FxHashSet;

use super::Owner;
use crate::server::overtaken::Part;
use crate::server::sessions::Returning;

/// An extent that no commit may have. A file with it is refused, also when the command is replayed from the journal.
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

/// Whether a call may be a replay. Only commits are marked as such.
fn may_be_replay(call: &MetaOp) -> bool {
    match call {
        MetaOp::Mutation(call) => call.relaxed || matches!(call.mutation, Mutation::SealBlocks(_)),
        MetaOp::Query(_) | MetaOp::Housekeeping(_) => false,
    }
}

impl Owner {
    /// Handles a session that comes back: determines which of the files that it declares others have changed since it
    /// last knew of them. It has nothing to replay for the files that it does not declare.
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

    /// Handles a change of files on which other sessions may still have changes to replay, although nobody waits for
    /// them any more: these sessions are missing or silent, or were asked in vain. That their leases have lapsed is
    /// recorded before the change: otherwise the next leader would accept a replay that hides the change. Returns
    /// false while that is not durable: a crash could lose it together with the change, and then both would be
    /// replayed in any order.
    pub(super) fn note_lapsed_before(&mut self, author: SessionId, call: &MutationCall) -> bool {
        let Awaits::Files(inodes) = call.mutation.facts().awaits else {
            return true;
        };
        if self.may_replay(author, call) || self.is_nothing_delegated() {
            return true;
        }
        let now_ms = self.clock.now_ms();
        let holders = inodes.iter().flat_map(|ino| self.delegations.holders(ino));
        // Sessions that are back, but silent again or slow. A slow one has been asked for a whole lease since it came
        // back: it trusts nothing from before, and has received nothing since that it may cache. Once it has done
        // more than replay, it has nothing left to replay, and what it may have cached since is waited for.
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

    /// Whether a call has to wait because its session came back after its lease had run out. The first call that is
    /// not a replay, and all after it, wait until it is durable that the session has a lease again. Otherwise another
    /// leader would not wait for the session.
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
    /// attributes, since such a call does not say whether it is a replay, but must not cache the reply.
    pub(super) fn only_replays(&self, session: SessionId) -> bool {
        let session = self.sessions.get(session);
        session.is_some_and(|session| session.returning == Returning::Replays)
    }

    /// Whether the call may already have been answered to this session. Such a call waits for nothing that others
    /// replay, or two sessions might wait for each other. Whatever was answered before it was durable depended on
    /// nothing of other sessions that was not durable.
    pub(super) fn may_replay(&self, session: SessionId, call: &MutationCall) -> bool {
        is_replay(call) || call.relaxed && self.only_replays(session)
    }

    /// Notes an executed mutation. A replayed change was there before, and overtakes nothing.
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
            // Sessions that are back, but had not replayed everything when others stopped waiting for them.
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

    /// Refuses a replay for files that others have changed meanwhile, since it would hide their changes. Appends hide
    /// nothing.
    ///
    /// # Errors
    /// The session replays attributes, or sets them before it has reported that all is replayed: in that case it sets
    /// them again, durably.
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
