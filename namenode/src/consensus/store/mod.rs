//! The journal as openraft's log.

mod memory;
mod reading;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::planted::{self, Bug};
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{EntryPayload, OptionalSend};
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::sync::{Notify, oneshot};

use crate::consensus::entry::{Record, log_id};
use crate::consensus::member_file::{self, Kept, term_of};
use crate::consensus::members::is_sole_voter;
use crate::consensus::snapshots::{Fetched, blocking};
use crate::consensus::tail::{Batches, Tail, bytes_of};
use crate::consensus::{
    Commits, Entry, Executed, Group, LogId, MemberId, SnapshotMeta, StoredMembers, Term, Vote,
};
use crate::journal::disk::Disk;
use crate::journal::{
    Batch, Journal, JournalCounters, JournalError, JournalReader, JournalWriter,
    JournalWriterOptions, Lsn,
};

/// This member has voted in a later term.
#[derive(Debug)]
pub(in crate::consensus) struct Deposed;

/// The log of one member. Cheap to clone; each clone continues to read where it stopped.
#[derive(Clone)]
pub(in crate::consensus) struct LogStore {
    shared: Arc<Shared>,
    reader: JournalReader,
}

/// Receives the result of a sync of the journal.
type Synced = oneshot::Receiver<Result<Lsn, Arc<JournalError>>>;

fn closed() -> io::Error {
    io::Error::other("the journal is closed")
}

struct Shared {
    disk: Arc<dyn Disk>,
    counters: Arc<JournalCounters>,
    /// `None` once it is closed.
    writer: Mutex<Option<Arc<JournalWriter>>>,
    tail: Arc<Mutex<Tail>>,
    /// Held while records are added or removed, until the journal has received all of them: otherwise, those of many
    /// records that still wait for room would come after what removes them. The journal makes room for all of them,
    /// or refuses them once it has failed.
    turn: AsyncMutex<()>,
    commits: Arc<Commits>,
    executed: Arc<Executed>,
    kept: Mutex<Kept>,
    /// What the file contains about the other members.
    written_known: Mutex<BTreeMap<MemberId, (u64, u64)>>,
    /// Held while the member file is written: by the consensus, by what answers others, and by a snapshot.
    writing: Mutex<MemberFile>,
    /// The snapshot that will replace the journal's content.
    fetched: Mutex<Option<Fetched>>,
    /// The last entry with members that was added, until a waiter has taken it.
    members_added: Mutex<Option<Lsn>>,
    added: Notify,
    /// Notified with each vote, before it is durable.
    voted: Notify,
    /// Whether it was reported that this member has left the group and cannot write that down.
    is_left_reported: AtomicBool,
}

/// Whether this member may write its member file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemberFile {
    Open,
    /// The journal is closed: the file belongs to the next start, which may be in the same process.
    Left,
}

impl LogStore {
    /// Continues a journal whose last entry is `last`.
    pub(in crate::consensus) fn start(
        journal: Journal,
        options: JournalWriterOptions,
        last: Option<LogId>,
        kept: Kept,
        commits: Arc<Commits>,
        executed: Arc<Executed>,
    ) -> Result<Self, JournalError> {
        let disk = journal.disk();
        let purged = journal.reader().first_lsn() - 1;
        let tail = Arc::new(Mutex::new(Tail {
            purged: Some(kept.entry(purged)),
            last,
            durable: journal.durable_lsn(),
            heard: last.map_or(0, |last| last.index()),
            term: kept.vote.map_or(0, |vote| vote.leader_id.term),
            ..Tail::default()
        }));
        let (progressing, following) = (Arc::clone(&tail), Arc::clone(&commits));
        let progress = move |durable: Result<Lsn, &Arc<JournalError>>| {
            // Before openraft, so that replies leave first.
            following.progress(durable.ok());
            progressing.lock().progress(durable);
        };
        let writer = JournalWriter::start(journal, options)?;
        writer.on_progress(Box::new(progress));
        Ok(Self {
            reader: writer.reader(),
            shared: Arc::new(Shared {
                disk,
                counters: writer.counters(),
                writer: Mutex::new(Some(Arc::new(writer))),
                tail,
                turn: AsyncMutex::default(),
                commits,
                executed,
                written_known: Mutex::new(kept.known.clone()),
                kept: Mutex::new(kept),
                writing: Mutex::new(MemberFile::Open),
                fetched: Mutex::new(None),
                members_added: Mutex::new(None),
                added: Notify::new(),
                voted: Notify::new(),
                is_left_reported: AtomicBool::new(false),
            }),
        })
    }

    /// The journal, until it is closed.
    pub(in crate::consensus) fn writer(&self) -> Option<Arc<JournalWriter>> {
        self.shared.writer.lock().clone()
    }

    pub(in crate::consensus) fn counters(&self) -> Arc<JournalCounters> {
        Arc::clone(&self.shared.counters)
    }

    /// Makes everything durable and ends the journal's thread. Blocks. Nothing can be appended any more.
    pub(in crate::consensus) fn close(&self) -> Result<(), Arc<JournalError>> {
        let Some(writer) = self.shared.writer.lock().take() else {
            return Ok(());
        };
        let Some(writer) = Arc::into_inner(writer) else {
            panic!("the journal is closed while it is written");
        };
        // From here on, only the member that starts next with this journal writes the file.
        *self.shared.writing.lock() = MemberFile::Left;
        let mut journal = writer.shutdown()?;
        if let Some(fetched) = self.shared.fetched.lock().take() {
            let mut kept = self.shared.kept.lock();
            fetched.install(&mut journal, &mut kept)?;
        }
        Ok(())
    }

    /// The members as of an entry.
    pub(in crate::consensus) fn members_at(&self, lsn: Lsn) -> StoredMembers {
        self.shared.kept.lock().members_at(lsn).clone()
    }

    /// Keeps the members of the group from a committed entry on. It need not be the newest such entry that is known:
    /// after a start, entries are applied again.
    pub(in crate::consensus) fn keep_members(
        &self,
        members: StoredMembers,
    ) -> Result<(), JournalError> {
        self.keep(|kept| kept.add_members(members))?;
        let (is_sole_voter, entry) = {
            let kept = self.shared.kept.lock();
            (kept.is_sole_voter(Lsn::MAX), kept.members_entry(Lsn::MAX))
        };
        self.shared.commits.set_alone(is_sole_voter, entry);
        Ok(())
    }

    /// Whether the newest known members include this one.
    pub(in crate::consensus) fn is_among_members(&self) -> bool {
        let kept = self.shared.kept.lock();
        let members = kept.members_at(Lsn::MAX).membership();
        members.get_node(&kept.this).is_some()
    }

    /// Whether a namenode whose log ends at `last` has left the group: it lacks a committed entry with members, and
    /// is not among these. A namenode that was added later has that entry.
    pub(in crate::consensus) fn has_left(&self, id: MemberId, last: Option<LogId>) -> bool {
        let kept = self.shared.kept.lock();
        let members = kept.members_at(Lsn::MAX);
        let entry = members.log_id().as_ref();
        let lacks_it = entry.is_some_and(|entry| last.is_none_or(|last| last < *entry));
        lacks_it && members.membership().get_node(&id).is_none()
    }

    /// The number of this member.
    pub(in crate::consensus) fn this(&self) -> MemberId {
        self.shared.kept.lock().this
    }

    /// The cluster that it belongs to.
    pub(in crate::consensus) fn cluster(&self) -> ClusterId {
        ClusterId(self.reader.cluster_id())
    }

    /// Its vote; one from before the first term if it never voted.
    pub(in crate::consensus) fn vote(&self) -> Vote {
        let kept = self.shared.kept.lock();
        kept.vote.unwrap_or_else(|| Vote::new(0, MemberId(0)))
    }

    /// The newest term that it voted in, even while that vote is not durable yet.
    pub(in crate::consensus) fn voted_term(&self) -> Term {
        self.shared.tail.lock().term
    }

    /// Waits until it votes in a later term than `term`, whether or not that is durable. Supports one waiter at a
    /// time.
    pub(in crate::consensus) async fn voted_after(&self, term: Term) {
        while self.voted_term() <= term {
            self.shared.voted.notified().await;
        }
    }

    /// How often this member has written its member file.
    pub(in crate::consensus) fn writes(&self) -> u64 {
        self.shared.kept.lock().writes
    }

    /// The newest snapshot in the journal, as known to the group. If there is none, the state before the first
    /// record: what the group began with.
    pub(in crate::consensus) fn newest_snapshot(&self) -> SnapshotMeta {
        let (newest, _) = self.reader.snapshot_lsns();
        let kept = self.shared.kept.lock();
        SnapshotMeta {
            last_log_id: Some(kept.entry(newest)),
            last_membership: kept.members_at(newest).clone(),
        }
    }

    /// The last entry that the newest snapshot in the journal covers; `None` without a snapshot.
    pub(in crate::consensus) fn newest_snapshot_end(&self) -> Option<LogId> {
        let end = self.newest_snapshot().last_log_id;
        end.filter(|end| end.index() > 0)
    }

    pub(in crate::consensus) fn commits(&self) -> &Commits {
        &self.shared.commits
    }

    /// Returns an independent reader of the journal.
    pub(in crate::consensus) fn reader(&self) -> JournalReader {
        self.reader.clone()
    }

    /// The ID of the entry with this number, if there is one.
    pub(in crate::consensus) fn entry_at(&self, lsn: Lsn) -> Option<LogId> {
        let last = self.shared.tail.lock().last?;
        let kept = self.shared.kept.lock();
        (lsn <= last.index()).then(|| kept.entry(lsn))
    }

    /// Whether a committed entry is in the log, or covered by its snapshot.
    pub(in crate::consensus) fn has_committed(&self, entry: LogId) -> bool {
        let last = self.last().map_or(0, |last| last.index());
        let kept = self.shared.kept.lock();
        kept.has_committed(entry, self.reader.first_lsn(), last)
    }

    /// The end of the log.
    pub(in crate::consensus) fn last(&self) -> Option<LogId> {
        self.shared.tail.lock().last
    }

    /// Notes that another member's snapshot has to replace the log as soon as this member is closed, unless the log
    /// already contains the snapshot's last entry.
    pub(in crate::consensus) fn take_snapshot(&self, fetched: Fetched) {
        // While it was fetched, a leader that still had the records may have sent them, and this member may even lead
        // by now: it would start over for nothing.
        if self.has_committed(fetched.last()) {
            return;
        }
        *self.shared.fetched.lock() = Some(fetched);
        self.shared.executed.replaced();
    }

    /// Discards what openraft added before.
    pub(in crate::consensus) fn forget_members_added(&self) {
        *self.shared.members_added.lock() = None;
    }

    /// Waits until openraft adds an entry that names members.
    pub(in crate::consensus) async fn members_added(&self) -> Lsn {
        loop {
            if let Some(lsn) = self.shared.members_added.lock().take() {
                return lsn;
            }
            self.shared.added.notified().await;
        }
    }

    /// Writes entries of the leader of a term, which are passed to openraft next: this way, writing them to the disk
    /// begins immediately.
    ///
    /// # Errors
    /// This member has since voted in a later term.
    pub(in crate::consensus) async fn submit(
        &self,
        term: Term,
        records: Vec<Record>,
    ) -> Result<(), Deposed> {
        if self.voted_term() != term {
            // Perhaps openraft has the turn, and waits for a slow disk.
            return Err(Deposed);
        }
        let _turn = self.shared.turn.lock().await;
        let Some(writer) = self.writer() else {
            return Err(Deposed);
        };
        let mut batches = Batches::default();
        {
            let mut tail = self.shared.tail.lock();
            if tail.term != term {
                return Err(Deposed);
            }
            let first = tail.last.map_or(1, |last| last.index() + 1);
            for (lsn, record) in (first..).zip(records) {
                let entry = Entry::new(log_id(term, lsn), EntryPayload::Normal(record));
                batches.add(&entry);
                tail.push(entry);
            }
        }
        batches.commit(&writer).await;
        Ok(())
    }

    /// The first entry here that differs from the one of the same number in `entries`: this member submitted it as a
    /// leader that had been deposed already, so openraft never received it.
    fn conflict_with(&self, entries: &[Entry]) -> Option<Lsn> {
        let tail = self.shared.tail.lock();
        let differs = |entry: &&Entry| {
            let here = tail.recent(entry.index());
            here.is_some_and(|here| here.log_id() != entry.log_id())
        };
        entries.iter().find(differs).map(RaftEntry::index)
    }

    /// Removes the entries after this one, which another leader replaces. The caller must hold the turn.
    async fn remove_after(&self, lsn: Lsn) -> Result<(), io::Error> {
        let Some(writer) = self.writer() else {
            return Err(closed());
        };
        {
            let mut tail = self.shared.tail.lock();
            while tail.last_recent_is_after(lsn)
                && let Some(newest) = tail.recent.pop_back()
            {
                tail.recent_bytes -= bytes_of(&newest);
            }
            let mut kept = self.shared.kept.lock();
            tail.last = Some(kept.entry(lsn));
            tail.durable = tail.durable.min(lsn);
            tail.heard = tail.heard.min(lsn);
            kept.terms.retain(|(first, _)| *first <= lsn);
        }
        self.shared.commits.removed_after(lsn);
        self.shared.executed.removed_after(lsn);
        let (sender, removed) = oneshot::channel();
        let done = Box::new(move |outcome| {
            // The caller waits, unless this member stops.
            let _ = sender.send(outcome);
        });
        writer.truncate_after(lsn, done).await;
        match removed.await {
            Ok(outcome) => outcome.map_err(io::Error::other),
            Err(_) => Err(closed()),
        }
    }

    /// The first entry of the term after the one in which the epoch began whose entries start at `first`, if it is
    /// known.
    pub(in crate::consensus) fn term_after_epoch(&self, first: Lsn) -> Option<Lsn> {
        member_file::term_after_epoch(&self.shared.kept.lock().terms, first)
    }

    /// Prepares for a snapshot that covers everything up to `lsn`: where terms begin has to be known without the
    /// entries.
    pub(in crate::consensus) fn keep_terms(&self, lsn: Lsn) -> Result<(), JournalError> {
        let mut oldest = self.reader.first_lsn().saturating_sub(1).min(lsn);
        if planted::is(Bug::ForgetsTermsEarly) {
            oldest = lsn;
        }
        self.keep(|kept| kept.forget_before(oldest))
    }

    /// Makes the journal sync what was appended before. Returns `None` if it is durable already.
    async fn begin_sync(&self) -> Result<Option<Synced>, io::Error> {
        // After what is being handed to the journal.
        let _turn = self.shared.turn.lock().await;
        let Some(writer) = self.writer() else {
            return Err(closed());
        };
        if self.is_durable() {
            return Ok(None);
        }
        let (sender, synced) = oneshot::channel();
        let nothing = Batch {
            first: None,
            records: Vec::new(),
            wants_durable: true,
            done: Box::new(move |outcome| {
                // The caller waits, unless this member stops.
                let _ = sender.send(outcome);
            }),
        };
        writer.commit(nothing).await;
        Ok(Some(synced))
    }

    fn is_durable(&self) -> bool {
        let tail = self.shared.tail.lock();
        tail.last.is_none_or(|last| last.index() <= tail.durable)
    }

    fn keep(&self, change: impl FnOnce(&mut Kept)) -> Result<(), JournalError> {
        // A file that is written later must contain all earlier changes; and there is only one temporary name.
        let writing = self.shared.writing.lock();
        if *writing == MemberFile::Left {
            return Err(JournalError::Closed);
        }
        let mut kept = {
            let mut kept = self.shared.kept.lock();
            change(&mut kept);
            kept.clone()
        };
        kept.writes += 1;
        member_file::write(&self.shared.disk, &kept)?;
        // Others receive this count: after a start it must not be lower.
        self.shared.kept.lock().writes = kept.writes;
        *self.shared.written_known.lock() = kept.known;
        Ok(())
    }
}

impl RaftLogStorage<Group> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Group>, io::Error> {
        let tail = self.shared.tail.lock();
        Ok(LogState {
            last_purged_log_id: tail.purged,
            last_log_id: tail.last,
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        // First of all: a leader of an earlier term adds nothing once there is a vote in a later one.
        self.shared.tail.lock().term = vote.leader_id.term;
        self.shared.voted.notify_one();
        if planted::is(Bug::ForgetsVote) {
            self.shared.kept.lock().vote = Some(*vote);
            return Ok(());
        }
        // openraft takes a saved vote for the end of everything before it, and would acknowledge to the next leader
        // what a slow disk does not have yet (`openraft::docs::protocol::io_ordering`). The two are written
        // concurrently: nobody learns of either before both are durable.
        let synced = self.begin_sync().await?;
        let (store, vote) = (self.clone(), *vote);
        // The owner shares this thread, and drops its clients meanwhile.
        let kept = blocking(move || store.keep(|kept| kept.vote = Some(vote))).await;
        kept.map_err(io::Error::other)?;
        let Some(synced) = synced else {
            return Ok(());
        };
        match synced.await {
            Ok(outcome) => outcome.map(|_| ()).map_err(io::Error::other),
            Err(_) => Err(closed()),
        }
    }

    async fn append<I>(&mut self, entries: I, flushed: IOFlushed<Group>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        let _turn = self.shared.turn.lock().await;
        let Some(writer) = self.writer() else {
            return Err(closed());
        };
        if let Some(lsn) = self.conflict_with(&entries) {
            self.remove_after(lsn - 1).await?;
        }
        let mut batches = Batches::default();
        {
            let mut tail = self.shared.tail.lock();
            let mut last = tail.durable;
            let heard = entries.last().map(RaftEntry::index);
            for entry in entries {
                last = entry.index();
                if tail.last.is_some_and(|it| it.index() >= last) {
                    // The owner submitted it earlier. What was submitted and never reached openraft was removed.
                    let here = tail.recent(last).map(RaftEntry::log_id);
                    assert_eq!(here, Some(entry.log_id()), "an entry is what was submitted");
                    continue;
                }
                let term: Term = entry.log_id.committed_leader_id().term;
                let mut kept = self.shared.kept.lock();
                if term_of(&kept.terms, entry.index()) != term {
                    kept.terms.push((entry.index(), term));
                }
                batches.add(&entry);
                if let EntryPayload::Membership(members) = &entry.payload {
                    // Even before it is durable: from here on others have to agree.
                    if !is_sole_voter(members, kept.this) {
                        self.shared.commits.others_named(entry.index());
                    }
                    *self.shared.members_added.lock() = Some(entry.index());
                    self.shared.added.notify_one();
                }
                tail.push(entry);
            }
            if let Some(heard) = heard {
                tail.hear(heard);
            }
            if last <= tail.durable || planted::is(Bug::AcknowledgesBeforeDurable) {
                flushed.io_completed(Ok(()));
            } else {
                tail.pending.push_back((last, flushed));
            }
        }
        batches.commit(&writer).await;
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        let _turn = self.shared.turn.lock().await;
        self.remove_after(last.map_or(0, |last| last.index())).await
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        {
            let mut tail = self.shared.tail.lock();
            tail.purged = tail.purged.max(Some(upto));
        }
        let reader = self.reader.clone();
        // Files are removed where that blocks nobody: openraft does nothing else while it waits.
        tokio::spawn(blocking(move || {
            if let Some(error) = reader.purge(upto.index()).removal_error {
                tracing::warn!(%error, "old files of the journal could not be removed");
            }
        }));
        Ok(())
    }
}
