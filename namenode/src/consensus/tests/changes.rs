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
