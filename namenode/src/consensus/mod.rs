//! Namenodes that agree on the order of records.
//!
//! openraft decides; the entries of its log are the records of the journal.

mod applied;
mod entry;
mod member_file;
mod peers;
mod runtime;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use openraft::impls::leader_id_std;
use openraft::{Config, Raft, SnapshotPolicy};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use self::applied::Applied;
use self::entry::log_id;
use self::member_file::Kept;
use self::peers::Peers;
use self::store::{Deposed, LogStore};
use crate::journal::{
    Journal, JournalCounters, JournalError, JournalWriter, JournalWriterOptions, Lsn,
};

pub use entry::{Content, EntryError, Record, decode};
pub use runtime::MachineRuntime;

/// The number of a leadership; one more than that of the one before.
pub type Term = u64;

/// The number of a namenode in its group, never given twice.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct MemberId(pub u64);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {}", self.0)
    }
}

/// A namenode of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The name in its certificate.
    pub name: String,
    /// Where it listens.
    pub addr: SocketAddr,
}

openraft::declare_raft_types!(
    /// The types of the group of namenodes.
    pub Group:
        D = Record,
        R = (),
        NodeId = MemberId,
        Node = Member,
        Term = Term,
        LeaderId = leader_id_std::LeaderId<Term, MemberId>,
        AsyncRuntime = MachineRuntime,
);

/// An entry of the replicated log.
pub type Entry = openraft::alias::EntryOf<Group>;
/// The place of an entry.
pub type LogId = openraft::alias::LogIdOf<Group>;
type Vote = openraft::alias::VoteOf<Group>;
type StoredMembers = openraft::alias::StoredMembershipOf<Group>;
type SnapshotMeta = openraft::alias::SnapshotMetaOf<Group>;
type Snapshot = openraft::alias::SnapshotOf<Group, applied::InJournal>;

/// How far the log is committed.
#[derive(Debug, Default)]
pub struct Commits {
    committed: AtomicU64,
    durable: AtomicU64,
    /// This member is the only voter: what is durable is committed.
    is_sole_voter: AtomicBool,
    changed: Notify,
    ended: AtomicBool,
}

impl Commits {
    /// The last record that is committed.
    pub fn last(&self) -> Lsn {
        let last = if self.is_sole_voter.load(Ordering::Acquire) {
            &self.durable
        } else {
            &self.committed
        };
        last.load(Ordering::Acquire)
    }

    /// Waits until more is, or the consensus ended. One waits at a time.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Nothing more will be committed.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The journal is durable up to there, or failed.
    fn progress(&self, durable: Option<Lsn>) {
        match durable {
            Some(durable) => self.durable.store(durable, Ordering::Release),
            None => self.ended.store(true, Ordering::Release),
        }
        self.changed.notify_one();
    }

    fn committed(&self, lsn: Lsn) {
        self.committed.fetch_max(lsn, Ordering::AcqRel);
        if !self.is_sole_voter.load(Ordering::Acquire) {
            self.changed.notify_one();
        }
    }
}

/// Milliseconds between two heartbeats of a leader.
const HEARTBEAT_MS: u64 = 50;
/// A member that heard nothing of a leader for so long asks for an election: at least, and at most.
const ELECTION_MS: (u64, u64) = (200, 400);
/// Messages that wait for openraft; beyond it the owner waits. Each may be as large as a record.
const QUEUED_MAX: u64 = 64;

/// Why this namenode is no part of a group.
#[derive(Debug, thiserror::Error)]
pub enum ConsensusError {
    /// The journal failed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// openraft stopped.
    #[error("the namenodes' consensus stopped: {0}")]
    Stopped(String),
}

/// What was read of a journal.
pub struct ReadLog {
    /// The newest snapshot; 0: none.
    pub snapshot_lsn: Lsn,
    /// The last record; 0: none.
    pub last_lsn: Lsn,
    /// The first record of each term after the snapshot.
    pub terms: Vec<(Lsn, Term)>,
}

/// This namenode in its group.
pub struct Consensus {
    raft: Raft<Group, Applied>,
    store: LogStore,
    journal: Arc<JournalWriter>,
    commits: Arc<Commits>,
}

impl Consensus {
    /// Takes part in the group with the journal, of which `read` was read.
    ///
    /// # Errors
    /// The file with the vote cannot be read, or there is no thread for the journal.
    pub async fn start(
        journal: Journal,
        options: JournalWriterOptions,
        read: ReadLog,
        this: (MemberId, Member),
    ) -> Result<Self, ConsensusError> {
        let (id, member) = this;
        let mut kept = match member_file::read(&*journal.disk())? {
            Some(kept) => kept,
            // A group of one, as every namenode was before there were groups.
            None => Kept {
                members: StoredMembers::new(
                    None,
                    openraft::Membership::new(
                        vec![BTreeSet::from([id])],
                        BTreeMap::from([(id, member)]),
                    )
                    .map_err(|error| ConsensusError::Stopped(error.to_string()))?,
                ),
                ..Kept::default()
            },
        };
        kept.terms.retain(|(first, _)| *first <= read.snapshot_lsn);
        kept.terms.extend(read.terms);
        let last = log_id(
            member_file::term_of(&kept.terms, read.last_lsn),
            read.last_lsn,
        );
        let commits = Arc::new(Commits::default());
        commits.progress(Some(read.last_lsn));
        let is_sole_voter = kept.members.voter_ids().eq([id]);
        commits.is_sole_voter.store(is_sole_voter, Ordering::Release);
        let store = LogStore::start(journal, options, Some(last), kept, Arc::clone(&commits))?;
        let config = Config {
            cluster_name: "harvestfs".to_owned(),
            heartbeat_interval: HEARTBEAT_MS,
            election_timeout_min: ELECTION_MS.0,
            election_timeout_max: ELECTION_MS.1,
            snapshot_policy: SnapshotPolicy::Never,
            api_channel_size: Some(QUEUED_MAX),
            enable_pre_vote: Some(true),
            ..Config::default()
        };
        let stopped = |error: &dyn fmt::Display| ConsensusError::Stopped(error.to_string());
        let config = config.validate().map_err(|error| stopped(&error))?;
        let applied = Applied::new(store.clone(), Some(last));
        let raft = Raft::new(id, Arc::new(config), Peers, store.clone(), applied)
            .await
            .map_err(|error| stopped(&error))?;
        let journal = store.writer().expect("it was just started");
        let mut progress = raft.watch_commit_progress();
        let following = Arc::clone(&commits);
        tokio::spawn(async move {
            while let Ok(committed) = progress.next().await {
                following.committed(committed.map_or(0, |entry| entry.index()));
            }
            following.progress(None);
        });
        Ok(Self {
            raft,
            store,
            journal,
            commits,
        })
    }

    /// Waits until this member leads. The last entry, which begins its term.
    ///
    /// # Errors
    /// [`ConsensusError::Stopped`]
    pub async fn lead(&self) -> Result<(Term, Lsn), ConsensusError> {
        let stopped = |error: &dyn fmt::Display| ConsensusError::Stopped(error.to_string());
        self.raft
            .trigger()
            .elect(false)
            .await
            .map_err(|error| stopped(&error))?;
        let leads = |metrics: &openraft::RaftMetrics<Group>| {
            metrics.current_leader == Some(metrics.id)
                && (metrics.last_applied.as_ref())
                    .is_some_and(|it| it.committed_leader_id().term == metrics.current_term)
        };
        let metrics = self.raft.wait(None).metrics(leads, "leads").await;
        let metrics = metrics.map_err(|error| stopped(&error))?;
        Ok((metrics.current_term, metrics.last_log_index.unwrap_or(0)))
    }

    /// Hands over records of the leader of a term, which follow the last one.
    ///
    /// # Errors
    /// [`ConsensusError::Stopped`]: this member does not lead any more, or the journal failed.
    pub async fn push(&self, term: Term, records: Vec<Record>) -> Result<(), ConsensusError> {
        let stopped = |error: &dyn fmt::Display| ConsensusError::Stopped(error.to_string());
        let submitted = self.store.submit(term, records.clone()).await;
        submitted.map_err(|Deposed| stopped(&"another namenode leads"))?;
        for record in records {
            let pushed = self.raft.client_write_ff(record, None).await;
            pushed.map_err(|error| stopped(&error))?;
        }
        Ok(())
    }

    /// How far the log is committed.
    #[must_use]
    pub fn commits(&self) -> Arc<Commits> {
        Arc::clone(&self.commits)
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> &JournalWriter {
        &self.journal
    }

    /// What the journal counts.
    #[must_use]
    pub fn counters(&self) -> Arc<JournalCounters> {
        self.store.counters()
    }

    /// Leaves the group, makes everything durable and ends the journal's thread. Blocks.
    ///
    /// # Errors
    /// What stopped the journal.
    pub async fn close(self) -> Result<(), Arc<JournalError>> {
        if let Err(error) = self.raft.shutdown().await {
            tracing::error!(%error, "the namenodes' consensus did not stop");
        }
        drop(self.journal);
        self.store.close()
    }
}
