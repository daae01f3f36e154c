//! Groups whose directories are made in one place and copied to their servers, as operators do.

use super::members::{check_files, copy, create_files};
use super::*;

/// Gives each directory new files, as a copy of it would have.
fn copy_to_servers(group: &Group) {
    for at in 0..group.addrs.len() {
        let (dir, copied) = (group.data_dir(at), group.dir.path().join("copied"));
        copy(&dir, &copied);
        copy(&copied, &dir);
    }
}

/// Whether none of these leads during a time in which one would have been elected.
async fn nobody_leads(group: &Group, of: &[usize]) {
    for _ in 0..20 {
        for &at in of {
            let client = group.try_client(at, "bob", None).await;
            assert!(client.is_none(), "namenode {at} of {of:?} leads");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn directories_that_were_copied_to_their_servers_make_a_group() {
    let mut group = Group::made(3);
    copy_to_servers(&group);
    group.start(0).await;
    group.start(1).await;
    // The third one may know of promises.
    nobody_leads(&group, &[0, 1]).await;
    group.start(2).await;
    let mut names = create_files(&group, "before", 5).await;
    // From now on it is a group like any other.
    let leader = group.leader().await;
    group.kill(leader).await;
    names.extend(create_files(&group, "after", 5).await);
    group.start(leader).await;
    check_files(&group, &names).await;
}

/// The directories of a group before anything happened.
fn keep_beginnings(group: &Group) -> Vec<PathBuf> {
    let begun = |at| {
        let begun = group.dir.path().join(format!("begun-{at}"));
        copy(&group.data_dir(at), &begun);
        begun
    };
    (0..group.addrs.len()).map(begun).collect()
}

/// The directory of one member is put back, and the others are started and killed in an order in which that could do
/// harm.
async fn check_put_back(group: &mut Group, begun: &[PathBuf], put_back: usize) {
    let mut names = create_files(group, "before", 5).await;
    group.kill(put_back).await;
    // Another one may lead meanwhile.
    let leader = group.leader().await;
    let third = 3 - put_back - leader;
    copy(&begun[put_back], &group.data_dir(put_back));
    // The member that knows its promise is away; the other one may never have received it.
    group.kill(leader).await;
    group.start(put_back).await;
    nobody_leads(group, &[put_back, third]).await;
    group.start(leader).await;
    names.extend(create_files(group, "without", 5).await);
    check_files(group, &names).await;
    // Even with the others running, it still does not.
    for _ in 0..60 {
        let acknowledged = group.acknowledged(put_back).await;
        assert!(acknowledged.is_none_or(|lsn| lsn == 0), "it takes part");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    group.kill(third).await;
    nobody_leads(group, &[put_back]).await;
}

#[tokio::test]
async fn a_member_that_is_put_back_to_how_it_began_takes_part_in_nothing() {
    let mut group = Group::made(3);
    let begun = keep_beginnings(&group);
    for at in 0..3 {
        group.start(at).await;
    }
    create_files(&group, "first", 5).await;
    let put_back = (group.leader().await + 1) % 3;
    check_put_back(&mut group, &begun, put_back).await;
}

#[tokio::test]
async fn nor_does_one_that_has_only_acknowledged_and_the_leader_was_killed_since() {
    let mut group = Group::made(3);
    let begun = keep_beginnings(&group);
    group.start(0).await;
    group.start(1).await;
    create_files(&group, "first", 5).await;
    group.start(2).await;
    let leader = group.leader().await;
    let deadline = tokio::time::Instant::now() + ELECTED_WITHIN;
    while group.acknowledged(2).await.is_none_or(|lsn| lsn < 5) {
        assert!(tokio::time::Instant::now() < deadline, "it lags behind");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(leader, group.leader().await, "it voted for nobody");
    check_put_back(&mut group, &begun, 2).await;
}
