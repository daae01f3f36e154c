mod candidates;
mod changes;
mod fetching;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use bytes::Bytes;
use harvestfs_protocol::group::Condition;
use harvestfs_protocol::identity::{CertificateAuthority, Role};
use harvestfs_protocol::peer::{Ballot, Memory, PeerCall, PeerReply, PeerRequest, Place};
use harvestfs_protocol::transport::TransportOptions;
use openraft::EntryPayload;
use openraft::Membership;
use openraft::entry::RaftEntry;
use openraft::storage::RaftLogStorage;
use proptest::prelude::*;

use super::entry::{Record, decode, encode, entry_of, log_id};
use super::member_file::{self, Kept, Told};
use super::outside::{Standing, found_alone, found_outside, standing};
use super::progress::Executed;
use super::store::LogStore;
use super::*;
use crate::engine::namespace::COMMAND_VERSION;
use crate::journal::{Journal, JournalOptions, JournalWriterOptions};

fn journal_options(dir: &Path) -> JournalOptions {
    JournalOptions {
        segment_bytes: 1 << 20,
        create_if_empty: true,
        ..JournalOptions::new(dir, 7)
    }
}

fn journal_in(dir: &Path) -> Journal {
    Journal::open(&journal_options(dir)).unwrap().0
}

fn member(port: u16) -> Member {
    Member {
        name: "nn".to_owned(),
        addr: SocketAddr::from(([10, 0, 0, 1], port)),
    }
}

fn members(ids: &[u64]) -> BTreeMap<MemberId, Member> {
    let member = |id: &u64| (MemberId(*id), member(*id as u16));
    ids.iter().map(member).collect()
}

fn stored(lsn: Lsn, ids: &[u64]) -> StoredMembers {
    let voters = ids.iter().copied().map(MemberId).collect();
    let members = Membership::new(vec![voters], members(ids)).unwrap();
    StoredMembers::new(Some(log_id(1, lsn)), members)
}

#[test]
fn what_a_member_keeps_is_read_back_and_damage_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    let mut kept = Kept::founding(MemberId(2), members(&[1, 2, 3])).unwrap();
    kept.vote = Some(Vote::new_committed(9, MemberId(3)));
    kept.terms = vec![(1, 0), (5, 3), (9, 8)];
    kept.add_members(stored(6, &[1, 2, 4]));
    kept.writes = 17;
    kept.known.insert(MemberId(1), (5, 6));
    member_file::write(&journal.disk(), &kept).unwrap();
    let read = member_file::read(&*journal.disk()).unwrap().unwrap();
    assert_eq!((&read.kept, read.is_copy), (&kept, false));

    let path = dir.path().join("member");
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fs::write(&path, &damaged).unwrap();
        assert!(member_file::read(&*journal.disk()).is_err(), "byte {at}");
        fs::write(&path, &bytes[..at]).unwrap();
        assert!(member_file::read(&*journal.disk()).is_err(), "{at} bytes");
    }
}

#[test]
fn the_members_of_an_entry_are_those_that_were_named_last_before_it() {
    let mut kept = Kept::founding(MemberId(1), members(&[1])).unwrap();
    kept.add_members(stored(5, &[1, 2]));
    kept.add_members(stored(9, &[1, 2, 3]));
    let count = |kept: &Kept, lsn| kept.members_at(lsn).membership().nodes().count();
    let counts = |kept: &Kept| [0, 4, 5, 8, 9, 100].map(|lsn| count(kept, lsn));
    assert_eq!(counts(&kept), [1, 1, 2, 2, 3, 3]);
    // The same entries again, as after a start.
    for (lsn, ids) in [(5, &[1, 2][..]), (9, &[1, 2, 3])] {
        kept.add_members(stored(lsn, ids));
        assert_eq!(counts(&kept), [1, 1, 2, 2, 3, 3]);
    }
    kept.forget_before(7);
    assert_eq!([7, 8, 9].map(|lsn| count(&kept, lsn)), [2, 2, 3]);
    kept.forget_before(9);
    assert_eq!(kept.members.len(), 1);
}

/// An epoch that spans several terms, of which only the last leader got as far as beginning it, ends with that term:
/// otherwise what that leader told datanodes would belong to no epoch.
#[test]
fn an_epoch_ends_with_the_term_in_which_it_began() {
    let after = |terms: &[(Lsn, Term)], first| member_file::term_after_epoch(terms, first);
    let terms = [(1, 1), (2, 2), (10, 3), (11, 4), (20, 5)];
    // Term 1 had no second entry; the epoch that begins with entry 1 began in term 2, if nothing is known of term 1.
    assert_eq!(after(&terms, 2), Some(10));
    // Terms 3 and 4 were elected in a row, and the leader of 4 began the epoch.
    assert_eq!(after(&terms, 10), Some(20));
    assert_eq!(after(&terms, 11), Some(20));
    assert_eq!(after(&terms, 20), None);
    // Three in a row, and one within a term.
    let terms = [(1, 1), (7, 2), (8, 3), (9, 4), (30, 6)];
    assert_eq!(after(&terms, 7), Some(30));
    assert_eq!(after(&terms, 12), Some(30));
    // As one without a group had it, and where a snapshot left only the end of a term.
    assert_eq!(after(&[(1, 0), (5, 1)], 1), Some(5));
    assert_eq!(after(&[(9, 3), (10, 4), (11, 5)], 4), Some(10));
    assert_eq!(after(&[], 4), None);
}

/// What the second member asks of the first one.
fn call_of_second(request: PeerRequest) -> PeerCall {
    PeerCall {
        from: 2,
        to: Some(1),
        memory: Memory {
            run: 1,
            writes: 0,
            writes_at_start: 0,
        },
        known: None,
        request,
    }
}

fn condition(journal: &Journal) -> Condition {
    standing(journal).unwrap().condition
}

#[test]
fn a_copy_of_a_member_is_recognised_and_the_only_one_is_not_asked() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let journal = journal_in(dir.path());
    assert_eq!(condition(&journal), Condition::Member, "no file");
    let vote = Vote::new(1, MemberId(1));
    for (ids, vote, of_copy) in [
        (&[1, 2, 3][..], Some(vote), Condition::Copy),
        // It has told nobody anything: it was made elsewhere, and moved. Or it was put back, which the others know.
        (&[1, 2, 3], None, Condition::Founding),
        (&[1], Some(vote), Condition::Member),
    ] {
        let mut kept = Kept::founding(MemberId(1), members(ids)).unwrap();
        kept.vote = vote;
        member_file::write(&journal.disk(), &kept).unwrap();
        assert_eq!(condition(&journal), Condition::Member);
        let copied = journal_in(other.path());
        fs::copy(dir.path().join("member"), other.path().join("member")).unwrap();
        assert_eq!(condition(&copied), of_copy);
    }
    // Also one that is put back in its place.
    let mut kept = Kept::founding(MemberId(1), members(&[1, 2, 3])).unwrap();
    kept.vote = Some(vote);
    member_file::write(&journal.disk(), &kept).unwrap();
    let (path, aside) = (dir.path().join("member"), other.path().join("aside"));
    fs::copy(&path, &aside).unwrap();
    member_file::write(&journal.disk(), &kept).unwrap();
    assert_eq!(condition(&journal), Condition::Member);
    fs::copy(&aside, &path).unwrap();
    assert_eq!(condition(&journal), Condition::Copy);
}

#[test]
fn one_that_goes_on_alone_has_another_number_and_the_term() {
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    assert!(found_alone(&journal, 0).is_err(), "it is in no group");
    found_outside(&journal, MemberId(4)).unwrap();
    assert_eq!(
        standing(&journal).unwrap(),
        Standing {
            condition: Condition::New,
            id: MemberId(4),
        },
        "it was never taken in"
    );
    assert!(found_alone(&journal, 0).is_err());
    let mut kept = Kept::founding(MemberId(1), members(&[1, 2, 3])).unwrap();
    kept.vote = Some(Vote::new(12, MemberId(3)));
    kept.told = Told::Forgot;
    member_file::write(&journal.disk(), &kept).unwrap();
    assert_eq!(condition(&journal), Condition::Forgetful);
    kept.told = Told::Left;
    member_file::write(&journal.disk(), &kept).unwrap();
    assert_eq!(condition(&journal), Condition::Left);
    found_alone(&journal, 0).unwrap();
    assert_eq!(condition(&journal), Condition::Member);
    let alone = member_file::read(&*journal.disk()).unwrap().unwrap().kept;
    assert_ne!(alone.this, MemberId(1));
    assert_eq!(alone.vote.map(|vote| vote.leader_id.term), Some(12));
    let left = alone.members_at(0).membership();
    assert!(members::is_sole_voter(left, alone.this));
    assert_eq!(left.get_node(&alone.this), Some(&member(1)), "its address");
}

fn store_of(journal: Journal) -> LogStore {
    let store = LogStore::start(
        journal,
        JournalWriterOptions::default(),
        None,
        Kept::founding(MemberId(1), members(&[1, 2, 3])).unwrap(),
        Arc::default(),
        Arc::new(Executed::new(0, 0)),
    );
    store.unwrap()
}

/// A count that others have received and that is lower after a start looks like an older copy.
#[test]
fn a_write_that_failed_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(journal_in(dir.path()));
    store.keep_terms(0).unwrap();
    let (other, memory) = (
        MemberId(2),
        Memory {
            run: 5,
            writes: 6,
            writes_at_start: 6,
        },
    );
    assert!(store.note_memory(other, memory));
    // As if no room were left for the file.
    let temporary = dir.path().join("member.tmp");
    fs::create_dir(&temporary).unwrap();
    assert!(store.write_memory(other).is_err());
    assert_eq!(store.writes(), 1);
    fs::remove_dir(&temporary).unwrap();
    store.write_memory(other).unwrap();
    assert_eq!(store.writes(), 2);
    store.write_memory(other).unwrap();
    assert_eq!(store.writes(), 2, "it was written down");
    store.close().unwrap();
}

/// Votes are written by the consensus, and where terms begin by the thread of a snapshot.
#[tokio::test]
async fn a_vote_is_kept_whatever_else_is_written_and_nothing_is_once_the_journal_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    let disk = journal.disk();
    let vote = || member_file::read(&*disk).unwrap().unwrap().kept.vote;
    let mut store = store_of(journal);
    let (other, is_over) = (store.clone(), Arc::new(AtomicBool::new(false)));
    let writing = std::thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || {
            while !is_over.load(Ordering::Acquire) {
                other.keep_terms(0).unwrap();
            }
            other
        }
    });
    for term in 1..200 {
        let next = Vote::new(term, MemberId(1));
        store.save_vote(&next).await.unwrap();
        assert_eq!(vote(), Some(next));
    }
    is_over.store(true, Ordering::Release);
    let other = writing.join().unwrap();
    store.close().unwrap();
    let last = vote();
    assert!(
        other.keep_terms(0).is_err()
            && store.save_vote(&Vote::new(500, MemberId(1))).await.is_err()
    );
    assert_eq!(vote(), last, "the file is that of the next start");
}

#[tokio::test]
async fn a_member_that_remembers_less_than_it_said_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(journal_in(dir.path()));
    let remembers = |run, writes, writes_at_start| {
        let memory = Memory {
            run,
            writes,
            writes_at_start,
        };
        store.note_memory(MemberId(2), memory)
    };
    assert_eq!(store.known_memory(MemberId(2)), None);
    assert!(remembers(1, 5, 3));
    assert!(remembers(1, 5, 3) && remembers(1, 9, 3));
    // A late message.
    assert!(remembers(1, 8, 3));
    // Started again with all that it knew, and once more with less.
    assert!(remembers(2, 9, 9) && remembers(2, 12, 9));
    assert!(!remembers(3, 30, 11) && !remembers(1, 9, 3));
    let known = store.known_memory(MemberId(2)).unwrap();
    assert_eq!((known.run, known.writes), (2, 12));
    assert!(remembers(4, 12, 12));
    // Other members are not affected.
    assert!(store.note_memory(
        MemberId(3),
        Memory {
            run: 1,
            writes: 0,
            writes_at_start: 0
        }
    ));
    store.close().unwrap();
}

fn endpoint() -> Endpoint {
    endpoint_of(&CertificateAuthority::for_simulation().unwrap())
}

pub(super) fn endpoint_of(authority: &CertificateAuthority) -> Endpoint {
    let identity = authority.issue(Role::Namenode, "nn", Duration::from_secs(60));
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    Endpoint::bind(any, &identity.unwrap(), TransportOptions::default()).unwrap()
}

/// The first entry of a journal names these.
fn append_members(journal: &mut Journal, named: &Membership<MemberId, Member>) {
    let entry = Entry::new(log_id(1, 1), EntryPayload::Membership(named.clone()));
    journal.append(&[encode(&entry)]).unwrap();
    journal.sync().unwrap();
}

/// Starts with a journal that contains nothing else.
async fn start_with_members(
    journal: Journal,
    members: Membership<MemberId, Member>,
) -> (Consensus, mpsc::Receiver<Committed>) {
    let read = ReadLog {
        snapshot_lsn: 0,
        last_lsn: 1,
        terms: vec![(1, 1)],
        members: Some(ReadMembers { lsn: 1, members }),
    };
    start(journal, read).await
}

async fn start(journal: Journal, read: ReadLog) -> (Consensus, mpsc::Receiver<Committed>) {
    let options = JournalWriterOptions::default();
    let started = Consensus::start(journal, options, read, member(1), endpoint());
    started.await.unwrap()
}

/// With a journal that has no records yet.
async fn start_empty(journal: Journal) -> (Consensus, mpsc::Receiver<Committed>) {
    let read = ReadLog {
        snapshot_lsn: 0,
        last_lsn: 0,
        terms: Vec::new(),
        members: None,
    };
    start(journal, read).await
}

async fn once_it_leads(consensus: &Consensus) {
    let leads = async {
        while !matches!(*consensus.leadership().borrow(), Leadership::This(_)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let leads = tokio::time::timeout(Duration::from_secs(5), leads).await;
    assert!(leads.is_ok(), "nobody else has a vote");
}

/// What two operators do simultaneously: neither undoes the other's change.
#[tokio::test]
async fn votes_are_given_only_where_those_have_them_that_were_seen() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = journal_in(dir.path());
    found(&journal, MemberId(1), members(&[1])).unwrap();
    let ids = |ids: &[u64]| -> BTreeSet<MemberId> { ids.iter().copied().map(MemberId).collect() };
    let named = Membership::new(vec![ids(&[1])], members(&[1, 2, 3])).unwrap();
    append_members(&mut journal, &named);
    let (consensus, _committed) = start_with_members(journal, named).await;
    consensus.elect_if_alone().await.unwrap();
    once_it_leads(&consensus).await;
    let vote = async |before: &[u64], voters: &[u64]| {
        let change = Change::Vote {
            before: ids(before),
            voters: ids(voters),
        };
        let last = consensus.heard().await.unwrap();
        consensus.begin_change(change, last).await.unwrap()
    };
    for before in [&[][..], &[1, 3]] {
        let (_, progress) = vote(before, &[1, 2]).await;
        assert!(
            matches!(progress, Progress::Over(Err(Refusal::Outdated))),
            "{before:?}"
        );
    }
    let (_changing, progress) = vote(&[1], &[1, 2]).await;
    assert!(matches!(progress, Progress::Added(_)));
    // Begun, and not over.
    let (_, progress) = vote(&[1], &[1, 3]).await;
    assert!(matches!(progress, Progress::Over(Err(Refusal::Outdated))));
    consensus.close().await.unwrap();
}

#[tokio::test]
async fn one_that_ended_while_another_was_given_a_vote_does_not_go_on_alone() {
    let both = [[1].as_slice(), &[1, 2]].map(|ids| ids.iter().copied().map(MemberId).collect());
    let voters = |configs: &[BTreeSet<MemberId>]| {
        Membership::new(configs.to_vec(), members(&[1, 2])).unwrap()
    };
    for (named, is_alone) in [
        (voters(&both[..1]), true),
        (voters(&both), false),
        (voters(&both[1..]), false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = journal_in(dir.path());
        found(&journal, MemberId(1), members(&[1])).unwrap();
        append_members(&mut journal, &named);
        let (consensus, _committed) = start_with_members(journal, named).await;
        assert_eq!(consensus.commits().is_alone(), is_alone);
        let are_known = async {
            while consensus.group().status().members.len() != 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let are_known = tokio::time::timeout(Duration::from_secs(5), are_known).await;
        assert!(are_known.is_ok(), "both members are known");
        consensus.close().await.unwrap();
    }
}

/// The epoch of a new leader begins with its term. If the term seemed to begin before records that datanodes know of,
/// they would know more than the leader, forever.
#[tokio::test]
async fn a_start_with_a_snapshot_does_not_take_its_end_for_the_beginning_of_a_term() {
    // The terms that are kept, and the first entry of the first term after that of entry 2.
    for (kept_terms, begun) in [
        (vec![(1, 3)], None),
        (vec![(1, 2), (2, 3)], None),
        (vec![(1, 1), (2, 3), (4, 4), (5, 5)], Some(4)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = journal_in(dir.path());
        let last_term = kept_terms.last().unwrap().1;
        for lsn in 1..=4 {
            let record = Record {
                command: Bytes::from_static(b"a command"),
                awaited: true,
            };
            let term = member_file::term_of(&kept_terms, lsn);
            let entry = Entry::new(log_id(term, lsn), EntryPayload::Normal(record));
            journal.append(&[encode(&entry)]).unwrap();
        }
        journal.sync().unwrap();
        let kept = Kept {
            terms: kept_terms,
            ..Kept::founding(MemberId(1), members(&[1, 2, 3])).unwrap()
        };
        member_file::write(&journal.disk(), &kept).unwrap();
        let read = ReadLog {
            snapshot_lsn: 3,
            last_lsn: 4,
            terms: vec![(4, last_term)],
            members: None,
        };
        let (consensus, _committed) = start(journal, read).await;
        assert_eq!(consensus.term_after_epoch(2), begun, "{:?}", kept.terms);
        consensus.close().await.unwrap();
    }
}

/// An entry that names members and is not in a snapshot yet does not count for a member that continues alone: those
/// members would have to vote for it, and are lost.
#[tokio::test]
async fn one_that_goes_on_alone_leads_whatever_members_its_journal_names() {
    for named in [&[1, 2, 3][..], &[1, 2], &[1]] {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = journal_in(dir.path());
        found(&journal, MemberId(1), members(&[1, 2, 3])).unwrap();
        let voters = named.iter().copied().map(MemberId).collect();
        let named = Membership::new(vec![voters], members(named)).unwrap();
        append_members(&mut journal, &named);
        // Twice, as an operator would who is not sure whether it was done.
        found_alone(&journal, 1).unwrap();
        found_alone(&journal, 1).unwrap();
        let (consensus, _committed) = start_with_members(journal, named).await;
        assert!(consensus.commits().is_alone());
        consensus.elect_if_alone().await.unwrap();
        once_it_leads(&consensus).await;
        assert_eq!(consensus.group().status().members.len(), 1);
        consensus.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_member_that_has_just_started_votes_only_for_whom_the_leader_names() {
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    found(&journal, MemberId(1), members(&[1, 2, 3])).unwrap();
    let (consensus, _committed) = start_empty(journal).await;
    let service = consensus.service();
    let votes = async |term, is_trial, is_transfer| {
        let request = PeerRequest::Vote {
            ballot: Ballot {
                term,
                candidate: 2,
                is_elected: false,
            },
            last: Some(Place { term: 1, record: 9 }),
            is_trial,
            is_transfer,
        };
        match service.answer(call_of_second(request)).await.unwrap().reply {
            PeerReply::Voted { is_granted, .. } => is_granted,
            other => panic!("{other:?}"),
        }
    };
    // Another leader may answer on its own until then.
    assert!(!votes(50, true, false).await && !votes(50, false, false).await);
    assert!(votes(51, false, true).await);
    tokio::time::sleep(PROMISED).await;
    assert!(votes(52, true, false).await && votes(52, false, false).await);
    consensus.close().await.unwrap();
}

#[test]
fn impossible_messages_of_other_namenodes_are_refused() {
    let ballot = |term| Ballot {
        term,
        candidate: 1,
        is_elected: true,
    };
    let place = |term, record| Some(Place { term, record });
    let record = |term| {
        let entry = Entry::new(log_id(term, 1), EntryPayload::Blank);
        encode(&entry)
    };
    assert!(
        wire::append(
            ballot(3),
            place(2, 8),
            vec![record(2), record(3)],
            place(2, 8)
        )
        .is_ok()
    );
    for (before, records, committed) in [
        // There is no next number.
        (place(1, Lsn::MAX), vec![record(3)], None),
        (place(1, Lsn::MAX - 1), vec![record(3), record(3)], None),
        // From the future.
        (place(4, 8), vec![], None),
        (place(2, 8), vec![record(4)], None),
        (place(2, 8), vec![record(3)], place(4, 9)),
        // Terms go backwards.
        (place(2, 8), vec![record(1)], None),
        (None, vec![record(3), record(2)], None),
        // Not an entry.
        (None, vec![vec![]], None),
        (None, vec![vec![99, 1]], None),
    ] {
        let what = format!("{before:?} {records:?} {committed:?}");
        assert!(
            wire::append(ballot(3), before, records, committed).is_err(),
            "{what}"
        );
    }
    assert!(wire::asks_for_vote(ballot(3), place(3, 9), false).is_ok());
    assert!(wire::asks_for_vote(ballot(3), place(4, 9), false).is_err());
}

proptest! {
    #[test]
    fn entries_are_read_back(term in any::<u64>(), lsn in 1..Lsn::MAX, command in prop::collection::vec(any::<u8>(), 0..50), kind in 0..3) {
        let payload = match kind {
            0 => EntryPayload::Blank,
            1 => EntryPayload::Normal(Record { command: Bytes::from(command), awaited: true }),
            _ => EntryPayload::Membership(stored(1, &[1, 2, 5]).membership().clone()),
        };
        let entry = Entry::new(log_id(term, lsn), payload);
        let read = entry_of(lsn, encode(&entry)).unwrap();
        prop_assert_eq!(read.log_id(), entry.log_id());
        prop_assert_eq!(read.payload, entry.payload);
    }

    #[test]
    fn no_record_makes_decoding_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok((term, Content::Command(_))) = decode(&bytes) {
            prop_assert!(term == 0 || bytes[0] > COMMAND_VERSION);
        }
    }
}
