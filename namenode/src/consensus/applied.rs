//! Tracks which part of the log is applied. The engine has applied a leader's records before they are committed; this
//! module only notes how far they are, and which members they name.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use openraft::entry::RaftEntry;
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};
use tokio::sync::mpsc;

use super::snapshots::blocking;
use super::store::LogStore;
use super::{Executed, Group, LogId, Snapshot, SnapshotMeta, StoredMembers, Term};
use crate::journal::Lsn;

/// A committed entry, for the owner of the engine.
#[derive(Debug)]
pub enum Committed {
    /// A leader's term began.
    Term {
        /// The entry.
        lsn: Lsn,
        /// The term.
        term: Term,
    },
    /// A command of the engine, encoded, which this member did not execute itself.
    Command {
        /// The entry.
        lsn: Lsn,
        /// The command.
        command: Bytes,
    },
    /// The members change from here on.
    Members {
        /// The entry.
        lsn: Lsn,
    },
}

/// The state machine of openraft.
pub(super) struct Applied {
    store: LogStore,
    last: Option<LogId>,
    /// The engine has the commands up to this one.
    executed: Arc<Executed>,
    owner: mpsc::Sender<Committed>,
}

impl Applied {
    /// Begins with everything up to `last` applied. What is committed afterwards, and was not `executed` by the owner
    /// of the engine before, is sent to it.
    pub(super) fn new(
        store: LogStore,
        last: Option<LogId>,
        executed: Arc<Executed>,
        owner: mpsc::Sender<Committed>,
    ) -> Self {
        Self {
            store,
            last,
            executed,
            owner,
        }
    }
}

/// A snapshot of the namenode, which stays in its journal.
pub(super) struct InJournal;

/// The newest snapshot. The namenode itself decides when one is made.
pub(super) struct Newest {
    store: LogStore,
}

impl RaftSnapshotBuilder<Group> for Newest {
    type SnapshotData = InJournal;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        Ok(Snapshot {
            meta: self.store.newest_snapshot(),
            snapshot: InJournal,
        })
    }
}

impl RaftStateMachine<Group> for Applied {
    type SnapshotData = InJournal;
    type SnapshotBuilder = Newest;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembers), io::Error> {
        let last = self.last.as_ref().map_or(0, |last| last.index());
        Ok((self.last, self.store.members_at(last)))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<Group>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            self.last = Some(entry.log_id());
            let (lsn, term) = (entry.index(), entry.log_id.committed_leader_id().term);
            let is_executed = lsn <= self.executed.last();
            let committed = match entry.payload {
                EntryPayload::Normal(_) if is_executed => None,
                EntryPayload::Normal(record) => Some(Committed::Command {
                    lsn,
                    command: record.command,
                }),
                EntryPayload::Blank => Some(Committed::Term { lsn, term }),
                EntryPayload::Membership(members) => {
                    let members = StoredMembers::new(self.last, members);
                    let store = self.store.clone();
                    let kept = blocking(move || store.keep_members(members)).await;
                    kept.map_err(io::Error::other)?;
                    Some(Committed::Members { lsn })
                }
            };
            if let Some(committed) = committed {
                // The receiver is dropped when this member is about to end.
                let sent = self.owner.send(committed).await;
                sent.map_err(|_| io::Error::other("the namenode stops"))?;
            }
            self.executed.applied(lsn);
            if let Some(responder) = responder {
                responder.send(());
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Newest {
        Newest {
            store: self.store.clone(),
        }
    }

    async fn install_snapshot(&mut self, _: &SnapshotMeta, _: InJournal) -> Result<(), io::Error> {
        unreachable!("a member that takes a snapshot starts again with it")
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        Ok(Some(Snapshot {
            meta: self.store.newest_snapshot(),
            snapshot: InJournal,
        }))
    }
}
