//! Changes of the members, and leaders that are deposed meanwhile.

use openraft::storage::IOFlushed;

use super::*;

/// It was cut off, and its successor changes the members as well.
#[tokio::test]
async fn members_that_a_successor_names_are_not_what_a_change_adds() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = journal_in(dir.path());
    found(&journal, MemberId(1), members(&[1])).unwrap();
    let named = Membership::new(vec![[MemberId(1)].into()], members(&[1, 2])).unwrap();
    append_members(&mut journal, &named);
    let (consensus, _committed) = start_with_members(journal, named.clone()).await;
    consensus.elect_if_alone().await.unwrap();
    once_it_leads(&consensus).await;
    let last = consensus.heard().await.unwrap();
    let change = Change::Vote {
        before: [MemberId(1)].into(),
        voters: [MemberId(1), MemberId(2)].into(),
    };
    let (mut changing, progress) = consensus.begin_change(change, last).await.unwrap();
    assert!(matches!(progress, Progress::Added(lsn) if lsn == last + 1));

    let last = last + 1;
    let entries = [
        Entry::new(log_id(99, last + 1), EntryPayload::Blank),
        Entry::new(log_id(99, last + 2), EntryPayload::Membership(named)),
    ];
    let mut store = consensus.store.clone();
    store.append(entries, IOFlushed::noop()).await.unwrap();
    drop(store);
    let progress = consensus.go_on(&mut changing, last).await;
    assert!(matches!(
        progress,
        Err(ConsensusError::Stopped(why)) if why.contains("another member leads")
    ));
    consensus.close().await.unwrap();
}

/// As of a member that led then and has the entry: nobody else notifies it.
#[tokio::test]
async fn a_member_that_has_the_entry_by_which_it_was_removed_leaves_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    let disk = journal.disk();
    let told = || member_file::read(&*disk).unwrap().unwrap().kept.told;
    found(&journal, MemberId(1), members(&[1, 2, 3])).unwrap();
    let (consensus, _committed) = start_empty(journal).await;
    consensus.set_candidate(false);
    assert!(!consensus.is_removed());
    let named = |ids: &[u64]| {
        let others = [MemberId(2), MemberId(3)].into();
        let named = Membership::new(vec![others], members(ids)).unwrap();
        EntryPayload::Membership(named)
    };
    let service = consensus.service();
    let append = async |term, entries: &[Entry], before, committed| {
        let request = PeerRequest::Append {
            ballot: Ballot {
                term,
                candidate: 2,
                is_elected: true,
            },
            before: Some(before),
            records: entries.iter().map(encode).collect(),
            committed,
        };
        let answer = service.answer(call_of_second(request)).await.unwrap();
        assert_eq!(answer.reply, PeerReply::Appended);
    };
    let once = async |is_removed: bool| {
        let changed = async {
            while consensus.is_removed() != is_removed {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let changed = tokio::time::timeout(Duration::from_secs(5), changed).await;
        assert!(changed.is_ok(), "not yet: {is_removed}");
    };
    let (begin, last) = (Place { term: 0, record: 0 }, Place { term: 5, record: 1 });
    let removing = Entry::new(log_id(5, 1), named(&[2, 3]));
    // Until it is committed, another leader may replace it.
    append(5, &[removing], begin, None).await;
    assert!(!consensus.is_removed());
    append(5, &[], last, Some(last)).await;
    once(true).await;
    // By then it may have acknowledged the entry that adds it again.
    let adding = Entry::new(log_id(5, 2), named(&[1, 2, 3]));
    append(5, &[adding], last, Some(last)).await;
    once(false).await;
    let other = Entry::new(log_id(6, 2), EntryPayload::Blank);
    append(6, &[other], last, Some(last)).await;
    once(true).await;
    assert_eq!(told(), Told::Nothing);
    consensus.leave().await;
    assert!(consensus.is_replaced());
    assert_eq!(told(), Told::Left);
    consensus.close().await.unwrap();
}
