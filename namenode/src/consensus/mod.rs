//! Consensus: namenodes that agree on the order of records.
//!
//! openraft decides on the order; the entries of its log are the records of the journal.

mod applied;
mod entry;
mod links;
mod member_file;
mod members;
mod outside;
mod peers;
mod progress;
mod runtime;
mod service;
mod snapshots;
mod store;
mod tail;
#[cfg(test)]
mod tests;
mod watched;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harvestfs_protocol::codec::MAX_HEADER_BYTES;
use harvestfs_protocol::machine;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::transport::Endpoint;
use openraft::Instant as _;
use openraft::async_runtime::WatchReceiver;
use openraft::impls::leader_id_std;
use openraft::{Config, Membership, Raft, SnapshotPolicy, StepDownPolicy};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use self::applied::Applied;
use self::links::Links;
use self::member_file::Kept;
use self::peers::{Caller, Peers, Releases};
use self::progress::Executed;
use self::snapshots::Fetching;
use self::store::{Deposed, LogStore};
use crate::journal::{
    Journal, JournalCounters, JournalError, JournalWriter, JournalWriterOptions, Lsn,
};

pub use applied::Committed;
pub use entry::{Content, EntryError, Record, decode};
pub use members::{Change, Changing, FindError, Found, GroupView, Progress, Refusal};
pub use outside::{
    Asked, Joining, Outside, Standing, found_alone, found_here, found_outside, found_with_snapshot,
    other_members, standing,
};
pub use peers::{ClusterVersion, Running};
pub use progress::Commits;
pub use runtime::MachineRuntime;
pub use service::Service;
pub(crate) use snapshots::blocking;

/// The number of a term of leadership; one more than that of the term before.
pub type Term = u64;

/// The number of a namenode in its group, never reused.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct MemberId(pub u64);

impl MemberId {
    /// Returns a random number, different from that of any other namenode.
    #[must_use]
    pub fn random() -> Self {
        Self(machine::random())
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {}", self.0)
    }
}

/// The number of a namenode that was the only one before groups were introduced.
const FIRST: MemberId = MemberId(1);

/// A namenode of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The name in its certificate.
    pub name: String,
    /// The address that it listens on.
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
/// The position of an entry in the log.
pub type LogId = openraft::alias::LogIdOf<Group>;
type Vote = openraft::alias::VoteOf<Group>;
type StoredMembers = openraft::alias::StoredMembershipOf<Group>;
type SnapshotMeta = openraft::alias::SnapshotMetaOf<Group>;
type Snapshot = openraft::alias::SnapshotOf<Group, applied::InJournal>;

/// The largest command in bytes: it has to fit into a message to another namenode. Requests of clients and operators
/// are limited to far less.
pub const COMMAND_BYTES_MAX: usize = MAX_HEADER_BYTES / 2;

/// Milliseconds between two heartbeats of a leader.
const HEARTBEAT_MS: u64 = 50;
/// Milliseconds without a leader after which a member calls an election: at least, and at most.
pub(crate) const ELECTION_MS: (u64, u64) = (100, 200);
/// How long after its heartbeat reached a majority a leader may answer on its own: a tenth less than the others wait
/// before an election, since clocks run at different rates.
const LEASE: Duration = Duration::from_millis(ELECTION_MS.1 * 9 / 10);
/// How long a member that has just started neither votes nor asks for votes: it no longer knows to which leader it
/// promised not to, and that leader may answer on its own until then. openraft leaves this to its users.
const PROMISED: Duration = Duration::from_millis(ELECTION_MS.1);
/// How long openraft may take to learn of everything that a snapshot covers.
const APPLIED_WITHIN: Duration = Duration::from_secs(60);
/// Committed entries queued for the owner of the engine.
const COMMITTED_QUEUED_MAX: usize = 1_024;
/// Messages queued for openraft; beyond it the owner waits. Each may be as large as a record.
const QUEUED_MAX: u64 = 64;

/// Why this namenode is not, or no longer, taking part in a group.
#[derive(Debug, thiserror::Error)]
pub enum ConsensusError {
    /// The journal failed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Another member leads, or is about to: this one has voted for it.
    #[error("another namenode leads")]
    Deposed,
    /// openraft stopped.
    #[error("the namenodes' consensus stopped: {0}")]
    Stopped(String),
}

/// What was read from a journal.
pub struct ReadLog {
    /// The newest snapshot; 0 if there is none.
    pub snapshot_lsn: Lsn,
    /// The last record; 0 if there is none.
    pub last_lsn: Lsn,
    /// The first record of each term after the snapshot.
    pub terms: Vec<(Lsn, Term)>,
    /// The last members that an entry after the snapshot names, committed or not.
    pub members: Option<ReadMembers>,
}

/// The members that an entry names.
pub struct ReadMembers {
    /// The entry.
    pub lsn: Lsn,
    /// The members from there on.
    pub members: Membership<MemberId, Member>,
}

/// What has to be done before a snapshot is in place.
pub type BeforeSnapshot = Box<dyn FnOnce() -> Result<(), JournalError> + Send>;

/// This namenode in its group.
pub struct Consensus {
    raft: Raft<Group, Applied>,
    store: LogStore,
    journal: Arc<JournalWriter>,
    commits: Arc<Commits>,
    leadership: LeadershipReceiver,
    executed: Arc<Executed>,
    peers: Peers,
    fetching: Fetching,
    /// The time from which it votes.
    votes_from: tokio::time::Instant,
    /// It does not ask for votes.
    stays_out: Arc<AtomicBool>,
    /// Another member was asked to lead, and may lead already.
    is_handing_over: AtomicBool,
}

/// Turns a new journal into that of a member of a group that begins with these members.
///
/// # Errors
/// The disk refuses, or these members cannot form a group.
pub fn found(
    journal: &Journal,
    this: MemberId,
    members: BTreeMap<MemberId, Member>,
) -> Result<(), ConsensusError> {
    let kept = Kept::founding(this, members)?;
    Ok(member_file::write(&journal.disk(), &kept)?)
}

/// The leader, as far as this member knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leadership {
    /// Nobody leads, for now.
    #[default]
    Nobody,
    /// The member that listens on this address leads.
    Other(SocketAddr),
    /// This member leads, in this term.
    This(Term),
}

impl Consensus {
    /// Takes part in the group with the journal, from which `read` was read.
    ///
    /// # Errors
    /// The file with the vote cannot be read, or no thread can be started for the journal.
    pub async fn start(
        journal: Journal,
        options: JournalWriterOptions,
        read: ReadLog,
        this: Member,
        endpoint: Endpoint,
    ) -> Result<(Self, mpsc::Receiver<Committed>), ConsensusError> {
        let mut kept = match member_file::read(&*journal.disk())? {
            Some(read) => read.kept,
            // A group of one, as every namenode was before groups were introduced.
            None => Kept::founding(FIRST, BTreeMap::from([(FIRST, this.clone())]))?,
        };
        let id = kept.this;
        kept.go_on_with(journal.reader().first_lsn(), read.snapshot_lsn, read.terms);
        let last = kept.entry(read.last_lsn);
        let commits = Arc::new(Commits::default());
        commits.progress(Some(read.last_lsn));
        let mut is_sole_voter = kept.is_sole_voter(read.last_lsn);
        if let Some(read) = &read.members
            && !members::is_sole_voter(&read.members, id)
        {
            commits.others_named(read.lsn);
        }
        // The namenode ended before the entry took effect for it.
        if let Some(ReadMembers { lsn, members }) = read.members
            && is_sole_voter
            && kept.members_entry(read.last_lsn) < lsn
        {
            is_sole_voter = members::is_sole_voter(&members, id);
            if is_sole_voter {
                kept.add_members(StoredMembers::new(Some(kept.entry(lsn)), members));
            }
        }
        let members = kept.members_at(read.last_lsn).membership();
        if is_sole_voter && members.get_node(&id) != Some(&this) {
            // Its address may have changed, and nobody else has to know.
            kept.move_alone(this)?;
        }
        // In a group of several, others may have removed the end of this log.
        let applied = if is_sole_voter {
            last
        } else {
            kept.entry(read.snapshot_lsn)
        };
        commits.set_alone(is_sole_voter, kept.members_entry(read.last_lsn));
        let executed = Arc::new(Executed::new(read.last_lsn, applied.index()));
        let writes_at_start = kept.writes;
        let store = LogStore::start(
            journal,
            options,
            Some(last),
            kept,
            Arc::clone(&commits),
            Arc::clone(&executed),
        )?;
        let config = Config {
            cluster_name: "harvestfs".to_owned(),
            heartbeat_interval: HEARTBEAT_MS,
            election_timeout_min: ELECTION_MS.0,
            election_timeout_max: ELECTION_MS.1,
            snapshot_policy: SnapshotPolicy::Never,
            // `snapshot_installed` decides what is removed, and when: records since the last snapshot but one are
            // kept for members that lag.
            max_in_snapshot_log_to_keep: u64::MAX,
            api_channel_size: Some(QUEUED_MAX),
            enable_pre_vote: Some(true),
            enable_elect: is_sole_voter,
            // What it wrote and did not sync before a crash may have reached others: no leader resumes its term.
            enable_leader_restore: Some(planted::is(Bug::LeadsAgainInItsTerm)),
            // The owner hands leadership over in that case, and answers nothing more.
            removed_leader_step_down: StepDownPolicy::Never,
            ..Config::default()
        };
        let stopped = |error: &dyn fmt::Display| ConsensusError::Stopped(error.to_string());
        let config = config.validate().map_err(|error| stopped(&error))?;
        let (committed, receiver) = mpsc::channel(COMMITTED_QUEUED_MAX);
        let applied = Applied::new(
            store.clone(),
            Some(applied),
            Arc::clone(&executed),
            committed,
        );
        let peers = Peers {
            caller: Arc::new(Caller {
                this: id,
                run: machine::random(),
                writes_at_start,
                store: Some(store.clone()),
                silent: parking_lot::Mutex::default(),
                releases: Releases::default(),
                links: Links::new(endpoint),
            }),
        };
        let raft = Raft::new(id, Arc::new(config), peers.clone(), store.clone(), applied)
            .await
            .map_err(|error| stopped(&error))?;
        let votes_from = if is_sole_voter || planted::is(Bug::VotesAtOnce) {
            tokio::time::Instant::now()
        } else {
            tokio::time::Instant::now() + PROMISED
        };
        let stays_out = Arc::new(AtomicBool::new(false));
        let (campaigning, is_out) = (raft.clone(), Arc::clone(&stays_out));
        tokio::spawn(async move {
            tokio::time::sleep_until(votes_from).await;
            let is_out = is_out.load(Ordering::Acquire);
            campaigning.runtime_config().elect(!is_out);
        });
        let journal = store.writer().expect("it was just started");
        let mut progress = raft.watch_commit_progress();
        let following = Arc::clone(&commits);
        tokio::spawn(async move {
            while let Ok(committed) = progress.next().await {
                if let Some(entry) = committed {
                    following.committed(entry);
                }
            }
            following.progress(None);
        });
        let (sender, leadership) = harvestfs_protocol::watch::channel(Leadership::Nobody);
        let mut metrics = raft.server_metrics();
        tokio::spawn(async move {
            loop {
                let now = leadership_of(&metrics.borrow_watched());
                sender.send_if_modified(|before| std::mem::replace(before, now) != now);
                if metrics.changed().await.is_err() {
                    return;
                }
            }
        });
        let consensus = Self {
            raft,
            store,
            journal,
            commits,
            leadership,
            executed,
            peers,
            fetching: Fetching::default(),
            votes_from,
            stays_out,
            is_handing_over: AtomicBool::new(false),
        };
        Ok((consensus, receiver))
    }

    /// Calls an election immediately, if there is no other member to wait for.
    ///
    /// # Errors
    /// [`ConsensusError::Stopped`]
    pub async fn elect_if_alone(&self) -> Result<(), ConsensusError> {
        if !self.commits.is_alone() {
            return Ok(());
        }
        let asked = self.raft.trigger().elect(false).await;
        asked.map_err(|error| ConsensusError::Stopped(error.to_string()))
    }

    /// Sets whether this member asks for votes when nobody leads, or when the leader hands leadership over to it.
    /// Other members get its vote in any case. Must be repeated from time to time.
    pub fn set_candidate(&self, is_candidate: bool) {
        self.stays_out.store(!is_candidate, Ordering::Release);
        if tokio::time::Instant::now() >= self.votes_from {
            self.raft.runtime_config().elect(is_candidate);
        }
    }

    /// Whether a new leader would know all that this member answers now: no other member is elected before its lease
    /// is over.
    pub fn has_lease(&self) -> bool {
        let is_handing_over = self.is_handing_over.load(Ordering::Acquire);
        if is_handing_over && !planted::is(Bug::AnswersWhileHandingOver) {
            return false;
        }
        if self.commits.is_alone() || planted::is(Bug::AnswersWithoutLease) {
            return true;
        }
        let acknowledged = self.raft.data_metrics().borrow_watched().last_quorum_acked;
        acknowledged.is_some_and(|at| at.elapsed() < LEASE)
    }

    /// The leader as far as this member knows, which may be this member.
    #[must_use]
    pub fn leadership(&self) -> LeadershipReceiver {
        self.leadership.clone()
    }

    /// The newest term that this member voted in. It leads in no earlier one, even though openraft reports so until
    /// the vote is durable, which takes until its disk has written everything before it.
    #[must_use]
    pub fn voted_term(&self) -> Term {
        self.store.voted_term()
    }

    /// Waits until this member votes in a later term than `term`. Supports one waiter at a time.
    pub async fn voted_after(&self, term: Term) {
        self.store.voted_after(term).await;
    }

    /// Notes that the engine has the commands up to `lsn`: they are not sent to it when they are committed.
    pub fn executed(&self, lsn: Lsn) {
        self.executed.up_to(lsn);
    }

    /// The first entry of the term after the one in which the epoch began whose entries start at `first`.
    #[must_use]
    pub fn term_after_epoch(&self, first: Lsn) -> Option<Lsn> {
        self.store.term_after_epoch(first)
    }

    /// Whether the engine has something that another leader replaced, and must be rebuilt.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.executed.is_replaced()
    }

    /// Whether what the engine has up to an entry is certainly what is committed, and was not replaced.
    #[must_use]
    pub fn is_committed(&self, lsn: Lsn) -> bool {
        // A sole voter has nothing replaced, and openraft learns of its records late.
        let is_sure = self.commits.is_alone() || self.executed.is_committed(lsn);
        is_sure && self.commits.last() >= lsn
    }

    /// Writes records of the leader of a term, which follow the last one. They must be passed to openraft next, with
    /// [`Consensus::propose`].
    ///
    /// # Errors
    /// [`ConsensusError::Deposed`], also when the journal failed.
    pub async fn submit(&self, term: Term, records: Vec<Record>) -> Result<(), ConsensusError> {
        let submitted = self.store.submit(term, records).await;
        submitted.map_err(|Deposed| ConsensusError::Deposed)
    }

    /// Has openraft replicate and commit records that were submitted.
    ///
    /// # Errors
    /// [`ConsensusError::Stopped`]
    pub async fn propose(
        &self,
        records: impl Iterator<Item = Record> + Send,
    ) -> Result<(), ConsensusError> {
        for record in records {
            let proposed = self.raft.client_write_ff(record, None).await;
            proposed.map_err(|error| ConsensusError::Stopped(error.to_string()))?;
        }
        Ok(())
    }

    /// Makes openraft replicate and commit what it refused before, up to the record `last`: it accepts nothing while
    /// it has no lease. Nothing else may be proposed meanwhile.
    ///
    /// # Errors
    /// [`ConsensusError::Stopped`]
    pub async fn propose_refused(&self, last: Lsn) -> Result<(), ConsensusError> {
        let heard = self.heard().await?;
        if heard >= last || planted::is(Bug::ForgetsRefusedRecords) {
            return Ok(());
        }
        let refused = self.store.clone().records(heard + 1, last);
        let refused = refused.map_err(|error| ConsensusError::Stopped(error.to_string()))?;
        tracing::debug!(heard, last, "records that were refused are proposed again");
        self.propose(refused.into_iter()).await
    }

    /// The last entry that openraft has added, after everything that was proposed.
    async fn heard(&self) -> Result<Lsn, ConsensusError> {
        let heard = self
            .raft
            .with_raft_state(|state| state.log_ids.last().map_or(0, |last| last.index()));
        let heard = heard.await;
        heard.map_err(|error| ConsensusError::Stopped(error.to_string()))
    }

    /// Returns the service that answers the other members.
    #[must_use]
    pub fn service(&self) -> Service {
        Service::of_member(
            self.raft.clone(),
            self.store.clone(),
            self.peers.clone(),
            self.fetching.clone(),
            self.votes_from,
            Arc::clone(&self.stays_out),
        )
    }

    /// Notes that a snapshot is in the journal: what it makes superfluous is removed as soon as openraft has applied
    /// what it covers and is not sending it to another member.
    pub fn snapshot_installed(&self) {
        let (newest, previous) = self.store.reader().snapshot_lsns();
        let raft = self.raft.clone();
        tokio::spawn(async move {
            // openraft may be behind the engine.
            let applied = raft.wait(Some(APPLIED_WITHIN));
            let noted = async {
                applied
                    .applied_index_at_least(Some(newest), "the snapshot")
                    .await
                    .map_err(|error| error.to_string())?;
                let asked = raft.trigger().snapshot().await;
                asked.map_err(|error| error.to_string())?;
                let purged = raft.trigger().purge_log(previous).await;
                purged.map_err(|error| error.to_string())
            };
            if let Err(error) = noted.await {
                tracing::warn!(%error, "what a snapshot made superfluous is kept until the next one");
            }
        });
    }

    /// Sets the version of the cluster: namenodes that do not support it are refused.
    pub fn set_cluster_version(&self, version: ClusterVersion) {
        self.peers.caller.releases.set_cluster(version);
    }

    /// How far the log is committed.
    #[must_use]
    pub fn commits(&self) -> Arc<Commits> {
        Arc::clone(&self.commits)
    }

    /// Returns what has to be done before a snapshot is in place that covers everything up to `lsn`, which is
    /// committed. It blocks on the disk.
    #[must_use]
    pub fn before_snapshot(&self, lsn: Lsn) -> BeforeSnapshot {
        assert!(lsn <= self.commits.last(), "record {lsn} is not committed");
        let store = self.store.clone();
        Box::new(move || store.keep_terms(lsn))
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> &JournalWriter {
        &self.journal
    }

    /// The counters of the journal.
    #[must_use]
    pub fn counters(&self) -> Arc<JournalCounters> {
        self.store.counters()
    }

    /// Leaves the group, makes everything durable and ends the journal's thread.
    ///
    /// # Errors
    /// The failure that stopped the journal.
    pub async fn close(self) -> Result<(), Arc<JournalError>> {
        if let Err(error) = self.raft.shutdown().await {
            tracing::error!(%error, "the namenodes' consensus did not stop");
        }
        // A fetch keeps the journal open, and may take longer than the next member waits for that.
        self.fetching.end().await;
        drop(self.journal);
        let store = self.store;
        // Connections of peers must be able to end meanwhile.
        blocking(move || store.close()).await
    }
}

fn leadership_of(metrics: &openraft::metrics::RaftServerMetrics<Group>) -> Leadership {
    match metrics.current_leader {
        Some(leader) if leader == metrics.id => Leadership::This(metrics.vote.leader_id.term),
        Some(leader) => {
            let member = metrics.membership_config.get_node(&leader);
            member.map_or(Leadership::Nobody, |it| Leadership::Other(it.addr))
        }
        None => Leadership::Nobody,
    }
}

/// Shows who leads, and allows waiting for a change.
pub type LeadershipReceiver = harvestfs_protocol::watch::Receiver<Leadership>;
