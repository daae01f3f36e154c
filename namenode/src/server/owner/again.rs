//! Commits that were answered before, and that clients say again since they may be forgotten.

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

/// Whether a call says a commit again.
pub(super) fn is_said_again(call: &MutationCall) -> bool {
    call.relaxed && matches!(call.mutation, Mutation::Commit(_))
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

    /// A mutation was executed. What is said again was there before, and overtakes nothing.
    pub(super) fn note_content_changed(
        &mut self,
        author: SessionId,
        mutation: &Mutation,
        is_said_again: bool,
    ) {
        let any_missing = self.sessions.any_missing();
        if !any_missing {
            self.overtaken.clear();
        }
        let keeps_content = matches!(mutation, Mutation::SetAttr(SetAttr { changes, .. }) if changes.size_bytes.is_none());
        if let Awaits::Files(inodes) = mutation.facts().awaits
            && !is_said_again
            && !keeps_content
        {
            // One that is back, and has not said all again before nobody waited for it any more.
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

    /// What a session says again of files that others have changed meanwhile would hide that. Appends hide nothing.
    pub(super) fn refuse_overtaken(&self, id: SessionId, call: &mut MutationCall) {
        let Some(session) = self.sessions.get(id).filter(|_| is_said_again(call)) else {
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
