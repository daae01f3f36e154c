//! Snapshots for members that lack more than the journals of others still have. Such a member reads the snapshot file
//! of another one, replaces its own log with it, and starts again.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::machine;
use harvestfs_protocol::peer::{PeerReply, PeerRequest, SnapshotPart};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::entry::{decode_members, encode_members};
use super::member_file::{self, Kept};
use super::peers::{Peer, PeerError};
use super::store::LogStore;
use super::{LogId, StoredMembers, wire};
use crate::journal::{
    Journal, JournalError, JournalReader, Lsn, ReceivedSnapshot, SnapshotReceiver,
};

/// How long one part may take.
const PART_DEADLINE: Duration = Duration::from_secs(10);

/// The snapshot of another namenode, complete and durable, but not installed yet.
pub(super) struct Fetched {
    received: ReceivedSnapshot,
    last: LogId,
    members: StoredMembers,
}

impl Fetched {
    /// The last entry that it covers.
    pub(super) fn last(&self) -> LogId {
        self.last
    }

    /// Replaces the contents of a journal with it, unless the journal has all of it.
    pub(super) fn install(
        self,
        journal: &mut Journal,
        kept: &mut Kept,
    ) -> Result<(), JournalError> {
        let lsn = self.last.index();
        let term = self.last.committed_leader_id().term;
        let first = journal.reader().first_lsn();
        if kept.has_committed(self.last, first, journal.last_lsn()) {
            return Ok(());
        }
        if journal.last_lsn() >= lsn {
            // The entries here were never committed.
            journal.truncate_after(lsn - 1)?;
        }
        // First what does no harm without the snapshot: the next start drops what lies beyond its log.
        kept.terms.retain(|(first, _)| *first < lsn);
        kept.terms.push((lsn, term));
        kept.add_members(self.members);
        kept.writes += 1;
        member_file::write(&journal.disk(), kept)?;
        journal.install_snapshot(self.received)?;
        tracing::info!(lsn, term, "a snapshot of another namenode is in place");
        Ok(())
    }
}

/// Reads the newest snapshot of another namenode into a file beside the journal, unless that is abandoned.
pub(super) async fn fetch(
    mut from: Peer,
    journal: JournalReader,
    fetching: &Fetching,
) -> Result<Fetched, PeerError> {
    let mut receiving: Option<(LogId, SnapshotReceiver)> = None;
    loop {
        let (record, offset) = match &receiving {
            Some((last, receiver)) => (Some(last.index()), receiver.received_bytes()),
            None => (None, 0),
        };
        let request = PeerRequest::ReadSnapshot { record, offset };
        // Abandoned only at this point: what is written on another thread keeps the journal open until it is done.
        let answered = tokio::select! {
            biased;
            () = fetching.given_up() => return Err(PeerError::GivenUp),
            answered = from.call(request, PART_DEADLINE) => answered?,
        };
        let part = match answered {
            (_, PeerReply::Snapshot(part)) => part,
            (_, PeerReply::NoSnapshot) => return Err(PeerError::NoSnapshot),
            _ => return Err(PeerError::UnexpectedReply),
        };
        let last = wire::entry(part.last);
        let receiver = match receiving.take() {
            Some((of, receiver)) if of == last => receiver,
            // There is a newer snapshot by now; the file of the old one is removed first.
            other => {
                drop(other);
                journal.receive_snapshot(last.index())?
            }
        };
        if part.offset != receiver.received_bytes() || part.bytes.is_empty() {
            return Err(PeerError::UnexpectedReply);
        }
        let is_whole = part.offset + part.bytes.len() as u64 >= part.length_bytes;
        let SnapshotPart {
            members_entry,
            members,
            bytes,
            ..
        } = part;
        let receiver = blocking(move || {
            let mut receiver = receiver;
            receiver.write_all(&bytes).map(|()| receiver)
        })
        .await?;
        if !is_whole {
            receiving = Some((last, receiver));
            continue;
        }
        let members = decode_members(&members)?;
        let received = blocking(move || receiver.finish()).await?;
        return Ok(Fetched {
            received,
            last,
            members: StoredMembers::new(members_entry.map(wire::entry), members),
        });
    }
}

/// Returns bytes of the newest snapshot, for another namenode.
pub(super) fn read(
    store: &LogStore,
    record: Option<Lsn>,
    offset: u64,
) -> Result<PeerReply, JournalError> {
    let meta = store.newest_snapshot();
    let (Some(last), Some(file)) = (meta.last_log_id, store.reader().newest_snapshot()?) else {
        return Ok(PeerReply::NoSnapshot);
    };
    let members = meta.last_membership;
    if last.index() != file.lsn() {
        // A snapshot was installed just now: the other namenode asks again.
        return Ok(PeerReply::NoSnapshot);
    }
    let offset = if record.is_none_or(|it| it == file.lsn()) {
        offset
    } else {
        0
    };
    Ok(PeerReply::Snapshot(SnapshotPart {
        last: wire::place(&last),
        members_entry: members.log_id().as_ref().map(wire::place),
        members: encode_members(members.membership()),
        length_bytes: file.len_bytes(),
        offset,
        bytes: file.part(offset)?,
    }))
}

/// Runs work that waits for the disk where it blocks nobody; in a simulation, right here.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    if machine::is_simulated() {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// A background fetch, at most one at a time.
#[derive(Clone, Default)]
pub(super) struct Fetching {
    background: Arc<Background>,
}

#[derive(Default)]
struct Background {
    task: parking_lot::Mutex<Task>,
    /// Notified when the fetch has to end.
    given_up: Notify,
}

#[derive(Default)]
enum Task {
    #[default]
    None,
    Begun(JoinHandle<()>),
    /// No further fetch may begin.
    Over,
}

impl Fetching {
    /// Runs `fetch` unless one is running already, or fetching has ended.
    pub(super) fn begin(&self, fetch: impl Future<Output = ()> + Send + 'static) {
        let mut task = self.background.task.lock();
        match &*task {
            Task::Over => return,
            Task::Begun(running) if !running.is_finished() => return,
            Task::Begun(_) | Task::None => {}
        }
        *task = Task::Begun(tokio::spawn(fetch));
    }

    /// Ends fetching, which is of no use any more. Waits until no fetch is left, since one keeps the journal open.
    pub(super) async fn end(&self) {
        let before = std::mem::replace(&mut *self.background.task.lock(), Task::Over);
        if let Task::Begun(running) = before {
            self.background.given_up.notify_one();
            // If it panicked, that was reported there.
            let _ = running.await;
        }
    }

    /// Waits until the fetch has to end.
    async fn given_up(&self) {
        self.background.given_up.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::SocketAddr;
    use std::path::Path;

    use openraft::EntryPayload;
    use openraft::entry::RaftEntry;
    use openraft::storage::{IOFlushed, RaftLogStorage};

    use super::*;
    use crate::consensus::entry::log_id;
    use crate::consensus::{Entry, Executed, Member, MemberId};
    use crate::journal::{JournalOptions, JournalWriterOptions};

    fn journal_in(dir: &Path) -> Journal {
        let options = JournalOptions {
            segment_bytes: 1 << 20,
            create_if_empty: true,
            ..JournalOptions::new(dir, 7)
        };
        Journal::open(&options).unwrap().0
    }

    /// A snapshot of another member that covers everything up to `last`.
    fn fetched(store: &LogStore, last: LogId) -> Fetched {
        let dir = tempfile::tempdir().unwrap();
        let mut other = journal_in(dir.path());
        for _ in 0..last.index() {
            other.append(&[[7_u8; 4]]).unwrap();
        }
        other.sync().unwrap();
        let plan = other.begin_snapshot(last.index()).unwrap().unwrap();
        let mut writer = plan.writer().unwrap();
        writer.write_all(b"the namespace").unwrap();
        writer.install().unwrap();
        let file = other.reader().newest_snapshot().unwrap().unwrap();
        let mut receiver = store.reader().receive_snapshot(last.index()).unwrap();
        receiver.write_all(&file.part(0).unwrap()).unwrap();
        Fetched {
            received: receiver.finish().unwrap(),
            last,
            members: store.members_at(0),
        }
    }

    /// The one that sent it was deposed, and the next leader still had the records.
    #[tokio::test]
    async fn a_snapshot_is_taken_only_by_a_member_that_still_lacks_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let this = MemberId(1);
        let member = Member {
            name: "nn".to_owned(),
            addr: SocketAddr::from(([10, 0, 0, 1], 1)),
        };
        let kept = Kept::founding(this, BTreeMap::from([(this, member)])).unwrap();
        let executed = Arc::new(Executed::new(0, 0));
        let started = LogStore::start(
            journal_in(dir.path()),
            JournalWriterOptions::default(),
            None,
            kept,
            Arc::default(),
            Arc::clone(&executed),
        );
        let mut store = started.unwrap();
        let entry = |lsn| Entry::new(log_id(1, lsn), EntryPayload::Blank);
        let entries: Vec<Entry> = (1..=3).map(entry).collect();
        store.append(entries, IOFlushed::noop()).await.unwrap();
        // Each of them is received when the one before is out of the way.
        for (last, is_taken) in [(2, false), (3, false), (5, true)] {
            store.take_snapshot(fetched(&store, log_id(1, last)));
            assert_eq!(executed.is_replaced(), is_taken, "{last}");
        }
        store.close().unwrap();
        assert_eq!(store.reader().snapshot_lsns().0, 5);
    }
}
