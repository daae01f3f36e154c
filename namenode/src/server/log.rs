//! The owner's side of the replicated log: collects the records of one round and hands them over together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use harvestfs_telemetry::metrics::{Histogram, Timer};

use super::NamenodeError;
use crate::consensus::{
    BeforeSnapshot, Change, Changing, ClusterVersion, Commits, Consensus, ConsensusError,
    GroupView, MemberId, Progress, Record, Term,
};
use crate::journal::{JournalCounters, JournalWriter, Lsn};

/// Number of records after which they are proposed to openraft, in a group of one.
const UNPROPOSED_MAX: usize = 4_096;
/// The same in bytes, far below what the log keeps in memory.
const UNPROPOSED_BYTES_MAX: usize = 8 << 20;

/// How long the owner waits for what it wrote to be committed before it turns to something else.
const COMMIT_PATIENCE: Duration = Duration::from_millis(100);
/// How often it then checks whether openraft has read back what is committed.
const APPLY_POLL: Duration = Duration::from_millis(1);

/// The owner's handle on the replicated log, to which it writes its records.
pub(crate) struct Log {
    /// The term in which this namenode leads, if it leads.
    term: Option<Term>,
    consensus: Consensus,
    commits: Arc<Commits>,
    counters: Arc<JournalCounters>,
    /// Records of this round.
    records: Vec<Record>,
    last_lsn: Lsn,
    /// Written to the journal, but not proposed to openraft yet.
    unproposed: Vec<Record>,
    unproposed_bytes: usize,
    /// How long awaited records take to be committed.
    seconds: Histogram,
    awaited: VecDeque<(Lsn, Timer)>,
    /// Why nothing more is committed.
    failure: Option<ConsensusError>,
}

impl Log {
    /// Follows the group after the record `last_lsn`.
    pub(crate) fn new(consensus: Consensus, last_lsn: Lsn, seconds: Histogram) -> Self {
        Self {
            term: None,
            commits: consensus.commits(),
            counters: consensus.counters(),
            consensus,
            records: Vec::new(),
            last_lsn,
            unproposed: Vec::new(),
            unproposed_bytes: 0,
            seconds,
            awaited: VecDeque::new(),
            failure: None,
        }
    }

    /// Notes that the engine has applied what another namenode committed, up to this record.
    pub(crate) fn followed(&mut self, lsn: Lsn) {
        assert!(
            self.term.is_none(),
            "record {lsn} of another, and this namenode leads"
        );
        self.last_lsn = self.last_lsn.max(lsn);
        self.consensus.executed(lsn);
    }

    /// Notes that this namenode leads from here on, in this term.
    pub(crate) fn lead(&mut self, term: Term) {
        self.term = Some(term);
        self.commits.lead(term, self.last_lsn);
    }

    /// The first entry of the term after the one in which the epoch began whose entries start at `first`.
    pub(crate) fn term_after_epoch(&self, first: Lsn) -> Option<Lsn> {
        self.consensus.term_after_epoch(first)
    }

    /// Whether the engine has applied something that another leader replaced.
    pub(crate) fn is_replaced(&self) -> bool {
        self.consensus.is_replaced()
    }

    /// The group, as far as this member knows it.
    pub(crate) fn group(&self) -> GroupView {
        self.consensus.group()
    }

    /// Sets the version of the cluster.
    pub(crate) fn set_cluster_version(&self, version: ClusterVersion) {
        self.consensus.set_cluster_version(version);
    }

    /// How many records the leader committed that the engine does not have.
    pub(crate) fn behind_records(&self) -> u64 {
        // A leader has records that are not committed yet.
        self.commits.of_leader().saturating_sub(self.last_lsn)
    }

    /// Whether it is the only voter.
    pub(crate) fn is_alone(&self) -> bool {
        self.commits.is_alone()
    }

    /// Sets whether this namenode stands for election.
    pub(crate) fn set_candidate(&self, is_candidate: bool) {
        self.consensus.set_candidate(is_candidate);
    }

    /// Whether this namenode may answer on its own just now: no other can have been elected.
    pub(crate) fn has_lease(&self) -> bool {
        self.consensus.has_lease()
    }

    /// How long ago anything was last received from another namenode that leads.
    pub(crate) fn leader_silent_for(&self) -> Duration {
        self.commits.leader_silent_for()
    }

    /// Adds a record to the round and returns its number. A record that is not `awaited` is committed with the
    /// next one that is, or a few milliseconds later.
    pub(crate) fn push(&mut self, command: Vec<u8>, awaited: bool) -> Lsn {
        assert!(self.term.is_some(), "a standby executes nothing");
        let command = Bytes::from(command);
        self.records.push(Record { command, awaited });
        self.last_lsn += 1;
        self.consensus.executed(self.last_lsn);
        self.last_lsn
    }

    /// Hands over the records of the round. Waits only while more is queued than fits.
    pub(crate) async fn flush(&mut self) {
        if self.records.iter().any(|record| record.awaited) {
            (self.awaited).push_back((self.last_lsn, self.seconds.start_timer()));
        }
        if self.records.is_empty() {
            return;
        }
        let records = std::mem::take(&mut self.records);
        let Some(term) = self.term else {
            unreachable!("records are pushed by a leader");
        };
        self.unproposed_bytes += records.iter().map(|it| it.command.len()).sum::<usize>();
        self.unproposed.extend(records.iter().cloned());
        let submitted = self.consensus.submit(term, records).await;
        self.remember(submitted);
        // Nobody else waits for the records of a group of one, and a message for each would delay replies.
        let is_due = !self.is_alone()
            || self.unproposed.len() >= UNPROPOSED_MAX
            || self.unproposed_bytes >= UNPROPOSED_BYTES_MAX;
        if is_due {
            self.propose().await;
        }
    }

    /// Has what was written replicated. Called at the latest at the next tick after a flush.
    pub(crate) async fn propose(&mut self) {
        if !self.may_propose() {
            return;
        }
        self.unproposed_bytes = 0;
        let records = std::mem::take(&mut self.unproposed);
        let proposing = self.consensus.propose(records.into_iter());
        let proposed = self.unless_outvoted(proposing).await;
        self.remember(proposed);
    }

    /// Proposes to openraft everything that was pushed, unless it refuses it again.
    async fn propose_all(&mut self) {
        self.flush().await;
        self.propose().await;
        self.propose_refused().await;
    }

    /// Proposes again what openraft refused because it had no lease.
    pub(crate) async fn propose_refused(&mut self) {
        if self.is_alone() || self.commits.last() >= self.last_lsn || !self.may_propose() {
            return;
        }
        let proposing = self.consensus.propose_refused(self.last_lsn);
        let proposed = self.unless_outvoted(proposing).await;
        self.remember(proposed);
    }

    /// Whether the unproposed records belong to the current term. openraft does not check that. If this member
    /// was deposed and elected again before the owner knows, it would append them after what was committed in
    /// between, to which they do not apply; and while it saves its vote for another member, it answers nothing.
    fn may_propose(&self) -> bool {
        self.failure.is_none() && !self.is_outvoted()
    }

    /// Whether this namenode no longer leads, since it voted in a later term. Known before that vote is
    /// durable.
    pub(crate) fn is_outvoted(&self) -> bool {
        (self.term).is_none_or(|led| self.consensus.voted_term() > led)
    }

    /// The result of a call to openraft, unless this namenode is outvoted meanwhile: openraft answers nothing
    /// while it saves that vote, behind all that a slow disk still has to write. Nothing more is proposed then,
    /// so it does not matter whether openraft received the call.
    async fn unless_outvoted<T>(
        &self,
        asked: impl Future<Output = Result<T, ConsensusError>>,
    ) -> Result<T, ConsensusError> {
        let Some(led) = self.term else {
            return Err(ConsensusError::Deposed);
        };
        tokio::select! {
            biased;
            () = self.consensus.voted_after(led) => Err(ConsensusError::Deposed),
            answered = asked => answered,
        }
    }

    fn remember(&mut self, outcome: Result<(), ConsensusError>) {
        if let Err(error) = outcome {
            self.failure.get_or_insert(error);
        }
    }

    /// What is committed, to wait for further commits.
    pub(crate) fn commits(&self) -> Arc<Commits> {
        Arc::clone(&self.commits)
    }

    /// The last entry and its term, if this namenode led.
    pub(crate) fn last_led(&self) -> Option<(Lsn, Term)> {
        Some((self.last_lsn, self.term?))
    }

    /// The last record that was numbered, committed or not.
    pub(crate) fn last_lsn(&self) -> Lsn {
        self.last_lsn
    }

    /// The last record that is committed: it survives whatever happens to a minority of namenodes.
    pub(crate) fn committed_lsn(&mut self) -> Lsn {
        let committed = self.commits.last();
        let done = (self.awaited).partition_point(|(lsn, _)| *lsn <= committed);
        // Their timers stop.
        self.awaited.drain(..done);
        committed
    }

    /// What has to be done before a snapshot can replace everything that was handed over.
    pub(crate) fn before_snapshot(&self) -> BeforeSnapshot {
        self.consensus.before_snapshot(self.last_lsn)
    }

    /// A snapshot was written.
    pub(crate) fn snapshot_installed(&self) {
        self.consensus.snapshot_installed();
    }

    /// Begins to change the members. The entry that this adds is then the last one.
    pub(crate) async fn begin_change(
        &mut self,
        change: Change,
    ) -> Result<(Changing, Progress), NamenodeError> {
        self.propose_all().await;
        let beginning = self.consensus.begin_change(change, self.last_lsn);
        let begun = self.unless_outvoted(beginning).await;
        let (changing, progress) = begun.map_err(NamenodeError::from)?;
        self.added(&progress);
        Ok((changing, progress))
    }

    /// Continues a change whose entry is committed.
    pub(crate) async fn go_on(
        &mut self,
        changing: &mut Changing,
    ) -> Result<Progress, NamenodeError> {
        self.propose_all().await;
        let going_on = self.consensus.go_on(changing, self.last_lsn);
        let progress = self.unless_outvoted(going_on).await;
        let progress = progress.map_err(NamenodeError::from)?;
        self.added(&progress);
        Ok(progress)
    }

    fn added(&mut self, progress: &Progress) {
        if let Progress::Added(lsn) = progress {
            assert_eq!(
                *lsn,
                self.last_lsn + 1,
                "an entry with members follows the last record"
            );
            self.last_lsn = *lsn;
        }
    }

    /// Transfers leadership. Nothing is answered any more.
    pub(crate) async fn transfer(&mut self, to: MemberId) -> Result<(), NamenodeError> {
        self.flush().await;
        self.propose().await;
        let asked = self.unless_outvoted(self.consensus.transfer(to)).await;
        asked.map_err(NamenodeError::from)
    }

    /// Whether the group has permanently removed this namenode, which leads, or led until now.
    pub(crate) fn is_removed(&self) -> bool {
        self.consensus.is_removed()
    }

    /// Records durably that this namenode is no longer in the group.
    pub(crate) async fn leave(&self) {
        self.consensus.leave().await;
    }

    /// Whether everything that was handed over is committed; waits up to `COMMIT_PATIENCE` for it.
    pub(crate) async fn all_committed(&self) -> bool {
        let committed = async {
            while self.commits.last() < self.last_lsn && !self.commits.is_ended() {
                self.commits.changed().await;
            }
            while !(self.consensus.is_committed(self.last_lsn) || self.is_replaced()) {
                tokio::time::sleep(APPLY_POLL).await;
            }
        };
        // Without a majority this could take long, and nothing is answered meanwhile.
        let _ = tokio::time::timeout(COMMIT_PATIENCE, committed).await;
        self.consensus.is_committed(self.last_lsn)
    }

    /// The last record that is durable here.
    pub(crate) fn durable_lsn(&self) -> Lsn {
        self.counters.durable_lsn()
    }

    /// Bytes of records since the start.
    pub(crate) fn appended_bytes(&self) -> u64 {
        self.counters.appended_bytes()
    }

    /// Why nothing more is committed, if that is the case.
    pub(crate) fn failure(&self) -> Option<NamenodeError> {
        if let Some(failure) = self.journal().failure() {
            return Some(NamenodeError::Journal(failure));
        }
        if matches!(self.failure, Some(ConsensusError::Deposed)) {
            return Some(NamenodeError::Deposed);
        }
        let is_ended = self.failure.is_some() || self.commits.is_ended();
        is_ended.then(|| {
            let why = self.failure.as_ref().map(ToString::to_string);
            NamenodeError::Consensus(why.unwrap_or_else(|| "the log says why".to_owned()))
        })
    }

    /// The journal, to begin a snapshot.
    pub(crate) fn journal(&self) -> &JournalWriter {
        self.consensus.journal()
    }

    /// Makes everything durable and ends the journal's thread.
    pub(crate) async fn close(self) -> Result<(), NamenodeError> {
        self.consensus.close().await.map_err(NamenodeError::Journal)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use harvestfs_protocol::identity::{CertificateAuthority, Role};
    use harvestfs_protocol::transport::{Endpoint, TransportOptions};
    use harvestfs_protocol::types::Timestamp;

    use super::*;
    use crate::consensus::{Leadership, Member, ReadLog};
    use crate::engine::namespace::Command;
    use crate::journal::{Journal, JournalOptions, JournalWriterOptions};
    use crate::server::metrics::Metrics;

    fn member(port: u16) -> Member {
        Member {
            name: "nn".to_owned(),
            addr: SocketAddr::from(([127, 0, 0, 1], port)),
        }
    }

    fn command() -> Vec<u8> {
        let command = Command::OpenSession {
            client: "client".to_owned(),
            now: Timestamp::default(),
        };
        command.encode().unwrap()
    }

    /// The namenode was deposed, and leads again in another term, before the owner of the engine knows.
    #[tokio::test]
    async fn what_was_refused_since_another_term_began_is_not_proposed_in_that() {
        let dir = tempfile::tempdir().unwrap();
        let options = JournalOptions {
            segment_bytes: 1 << 20,
            create_if_empty: true,
            ..JournalOptions::new(dir.path(), 7)
        };
        let (mut journal, _) = Journal::open(&options).unwrap();
        journal.append(&[command()]).unwrap();
        journal.sync().unwrap();
        let read = ReadLog {
            snapshot_lsn: 0,
            last_lsn: 1,
            terms: vec![(1, 0)],
            members: None,
        };
        let authority = CertificateAuthority::for_simulation().unwrap();
        let identity = authority.issue(Role::Namenode, "nn", Duration::from_secs(60));
        let any = member(0).addr;
        let endpoint = Endpoint::bind(any, &identity.unwrap(), TransportOptions::default());
        let (writing, endpoint) = (JournalWriterOptions::default(), endpoint.unwrap());
        let started = Consensus::start(journal, writing, read, member(1), endpoint).await;
        let (consensus, _committed) = started.unwrap();
        consensus.elect_if_alone().await.unwrap();
        let leadership = consensus.leadership();
        let elected = async {
            loop {
                if let Leadership::This(term) = *leadership.borrow() {
                    return term;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let elected = tokio::time::timeout(Duration::from_secs(5), elected).await;
        let term = elected.expect("nobody else has a vote");

        // The term began with an entry.
        let last = 2;
        let mut log = Log::new(consensus, last, Metrics::new().journal.clone());
        log.lead(term - 1);
        log.push(command(), true);
        log.flush().await;
        assert!(matches!(log.failure(), Some(NamenodeError::Deposed)));
        log.propose().await;
        // What openraft adds next would come after it.
        let learn = Change::Learn(MemberId(2), member(2));
        let begun = log.consensus.begin_change(learn, last).await;
        let (changing, progress) = begun.unwrap();
        assert!(matches!(progress, Progress::Added(lsn) if lsn == last + 1));
        drop(changing);
        log.close().await.unwrap();
    }
}
