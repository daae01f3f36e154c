//! Commits that were answered before, and that clients replay since they may be forgotten.

use harvestfs_protocol::ids::{BlockId, InodeId, SessionId};
use harvestfs_protocol::meta::mutation::{Awaits, SetAttr};
use harvestfs_protocol::meta::{Mutation, MutationCall};
use harvestfs_protocol::types::Extent;

use super::Owner;

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

fn changes_content(mutation: &Mutation) -> bool {
    let keeps_it = matches!(mutation, Mutation::SetAttr(SetAttr { changes, .. }) if changes.size_bytes.is_none());
    matches!(mutation.facts().awaits, Awaits::Files(_)) && !keeps_it
}

impl Owner {
    /// A session comes back. Which of the files that it declares others have changed since they were told of it last.
    pub(super) fn note_overtaken(&mut self, id: SessionId, declared: &[InodeId]) {
        if !self.sessions.is_missing(id) {
            return;
        }
        let declared = declared.iter().copied();
        let overtaken = declared.filter(|ino| self.overtaken.is_changed_by_others(id, *ino));
        let overtaken = overtaken.collect();
        if let Some(session) = self.sessions.get_mut(id) {
            session.overtaken = overtaken;
        }
    }

    /// Content changes, and nobody waits any more for what sessions that are missing have to replay. That is written down
    /// before the change: without it, the next leader would take what hides the change.
    pub(super) fn note_lapsed_before(&mut self, call: &MutationCall) {
        if !self.sessions.any_missing() || is_replay(call) || !changes_content(&call.mutation) {
            return;
        }
        let now_ms = self.clock.now_ms();
        let is_noted = |session| self.namespace.has_lapsed(session);
        let missing = self.sessions.missing();
        let mut lapsed: Vec<_> = missing
            .filter(|session| !self.leases.is_alive(now_ms, *session) && !is_noted(*session))
            .collect();
        lapsed.sort_unstable();
        self.note_leases_lapsed(&lapsed);
    }

    /// A mutation was executed. What is replayed was there before, and overtakes nothing.
    pub(super) fn note_content_changed(
        &mut self,
        author: SessionId,
        mutation: &Mutation,
        is_replay: bool,
    ) {
        let any_missing = self.sessions.any_missing();
        if !any_missing {
            self.overtaken.clear();
        }
        if let Awaits::Files(inodes) = mutation.facts().awaits
            && !is_replay
            && changes_content(mutation)
        {
            // One that is back, and had not replayed all before nobody waited for it any more.
            for ino in inodes.iter() {
                let holder = self.delegations.holder(ino).filter(|it| *it != author);
                if let Some(holder) = holder.and_then(|it| self.sessions.get_mut(it)) {
                    holder.overtaken.insert(ino);
                }
            }
            if any_missing {
                self.overtaken.changed(author, inodes.iter());
            }
        }
    }

    /// What a session replays of files that others have changed meanwhile would hide that. Appends hide nothing.
    pub(super) fn refuse_overtaken(&self, id: SessionId, call: &mut MutationCall) {
        let Some(session) = self.sessions.get(id).filter(|_| is_replay(call)) else {
            return;
        };
        let Mutation::Commit(commit) = &mut call.mutation else {
            return;
        };
        for file in &mut commit.files {
            if !file.append && session.overtaken.contains(&file.ino) {
                tracing::warn!(
                    session = %id, ino = %file.ino,
                    "what a session closed and a crash took is not stored: others have changed the file meanwhile"
                );
                file.extents = vec![REFUSED];
            }
        }
    }
}
