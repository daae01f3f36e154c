//! What of the log is applied. The engine has applied a leader's records before they are committed; here it is
//! noted how far they are, and which members they name.

use std::io;

use futures::{Stream, StreamExt};
use openraft::entry::RaftEntry;
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{OptionalSend, RaftSnapshotBuilder};

use super::store::LogStore;
use super::{Group, LogId, Snapshot, SnapshotMeta, StoredMembers};

/// The state machine of openraft.
pub(super) struct Applied {
    store: LogStore,
    last: Option<LogId>,
}

impl Applied {
    /// Everything up to `last` is applied.
    pub(super) fn new(store: LogStore, last: Option<LogId>) -> Self {
        Self { store, last }
    }
}

/// A snapshot of the namenode, which is in its journal.
pub(super) struct InJournal;

/// Snapshots are made by the namenode, when it wants.
pub(super) struct Newest {
    meta: SnapshotMeta,
}

impl RaftSnapshotBuilder<Group> for Newest {
    type SnapshotData = InJournal;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        Ok(Snapshot {
            meta: self.meta.clone(),
            snapshot: InJournal,
        })
    }
}

impl RaftStateMachine<Group> for Applied {
    type SnapshotData = InJournal;
    type SnapshotBuilder = Newest;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembers), io::Error> {
        Ok((self.last, self.store.members()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<Group>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            self.last = Some(entry.log_id());
            if let Some(members) = entry.get_membership() {
                let members = StoredMembers::new(self.last, members);
                self.store.keep_members(members).map_err(io::Error::other)?;
            }
            if let Some(responder) = responder {
                responder.send(());
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Newest {
        Newest {
            meta: SnapshotMeta {
                last_log_id: self.last,
                last_membership: self.store.members(),
            },
        }
    }

    async fn install_snapshot(&mut self, _: &SnapshotMeta, _: InJournal) -> Result<(), io::Error> {
        Err(io::Error::other("not implemented"))
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        Ok(None)
    }
}
