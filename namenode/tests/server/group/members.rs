//! Members of the group that lag, are added, removed, replaced, put back, or handed leadership.

use std::fs;
use std::path::Path;
use std::process::Command;

use harvestfs_namenode::server::{journal_dir, restore};
use harvestfs_protocol::backup::BackupRequest;

use super::*;
use crate::backup;

/// Creates files, as a client of the leader, and returns their names.
pub(super) async fn create_files(group: &Group, prefix: &str, count: usize) -> Vec<String> {
    let (mut client, _) = group.client(prefix, None).await;
    let mut names = Vec::new();
    for number in 0..count {
        let name = format!("{prefix}-{number}");
        client.create(ROOT, &name).await;
        names.push(name);
    }
    names
}

pub(super) async fn check_files(group: &Group, names: &[String]) {
    let (mut client, leader) = group.client("reader", None).await;
    for name in names {
        let found = client.lookup(ROOT, name).await;
        assert!(found.is_ok(), "{name} on {leader}: {found:?}");
    }
}

/// A standby counts: without one of the others, changes are committed with it.
async fn check_counts(group: &mut Group, at: usize, mut names: Vec<String>) {
    let leader = group.leader().await;
    let other = (0..3).find(|it| *it != leader && *it != at).unwrap();
    group.kill(other).await;
    names.extend(create_files(group, "with-it", 5).await);
    check_files(group, &names).await;
}

/// Makes the leader write three snapshots, each with something new: then the first records are purged.
async fn purge(group: &Group, prefix: &str) -> Vec<String> {
    let mut names = Vec::new();
    for round in 0..3 {
        names.extend(create_files(group, &format!("{prefix}-{round}"), 5).await);
        let done = group.admin(AdminRequest::Snapshot).await;
        assert_eq!(done, Ok(AdminReply::Done));
    }
    names
}

/// More than one message between namenodes can carry: files, each with an attribute of maximum size.
async fn create_large_files(group: &Group, prefix: &str) -> Vec<String> {
    const FILES: usize = 40;
    let names = create_files(group, prefix, FILES).await;
    let (mut client, _) = group.client(prefix, None).await;
    for name in &names {
        let ino = client.lookup(ROOT, name).await.unwrap().ino;
        backup::set_large_attribute(&mut client, ino).await;
    }
    names
}

fn has_first_segment(data_dir: &Path) -> bool {
    journal_dir(data_dir)
        .join(format!("segment-{:020}", 1))
        .exists()
}

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + ELECTED_WITHIN;
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "not yet: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn voters(status: &GroupStatus) -> Vec<SocketAddr> {
    let voters = status.members.iter().filter(|it| it.is_voter);
    let mut addrs: Vec<SocketAddr> = voters.map(|it| it.addr).collect();
    addrs.sort();
    addrs
}

#[tokio::test]
async fn a_member_that_lacks_what_the_others_purged_takes_a_snapshot() {
    let mut group = Group::new(3).await;
    let leader = group.leader().await;
    let lagging = (leader + 1) % 3;
    let third = (leader + 2) % 3;
    let mut names = create_files(&group, "before", 5).await;
    group.kill(lagging).await;
    names.extend(purge(&group, "without").await);
    let dir = group.data_dir(leader);
    eventually("the leader has purged", async || !has_first_segment(&dir)).await;
    group.start(lagging).await;
    // Now nothing is committed without it.
    group.kill(third).await;
    names.extend(create_files(&group, "with", 5).await);
    assert!(
        !has_first_segment(&group.data_dir(lagging)),
        "what it had is replaced"
    );
    // And it can lead with what it has.
    group.start(third).await;
    names.extend(create_files(&group, "again", 5).await);
    for _ in 0..20 {
        let leads = group.leader().await;
        if leads == lagging {
            check_files(&group, &names).await;
            return;
        }
        let to = GroupRequest::Transfer(Some(group.addrs[lagging]));
        // It may still be behind.
        let _ = group.group(to).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    panic!("it never led");
}

/// A member that was away for a moment is not sent the whole namespace: records since the last snapshot but one are
/// kept.
#[tokio::test]
async fn a_snapshot_takes_no_records_from_a_member_that_lags() {
    let mut group = Group::new(3).await;
    let leader = group.leader().await;
    let (lagging, third) = ((leader + 1) % 3, (leader + 2) % 3);
    let mut names = create_files(&group, "before", 5).await;
    group.kill(lagging).await;
    names.extend(create_files(&group, "without", 1_500).await);
    let done = group.admin(AdminRequest::Snapshot).await;
    assert_eq!(done, Ok(AdminReply::Done));
    // What a snapshot makes superfluous is removed some moments later, when something more is acknowledged.
    for round in 0..5 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        names.extend(create_files(&group, &format!("after-{round}"), 20).await);
    }
    group.start(lagging).await;
    // Now nothing is committed without it.
    group.kill(third).await;
    names.extend(create_files(&group, "with", 5).await);
    assert!(
        has_first_segment(&group.data_dir(lagging)),
        "it was sent a snapshot instead of records"
    );
    check_files(&group, &names).await;
}

#[tokio::test]
async fn what_is_larger_than_a_message_reaches_a_member_that_lags() {
    let mut group = Group::new(3).await;
    let leader = group.leader().await;
    let (lagging, third) = ((leader + 1) % 3, (leader + 2) % 3);
    group.kill(lagging).await;
    let mut names = create_large_files(&group, "records").await;
    group.start(lagging).await;
    // Now nothing is committed without it.
    group.kill(third).await;
    names.extend(create_files(&group, "with-records", 5).await);
    group.start(third).await;

    let leader = group.leader().await;
    let (lagging, third) = ((leader + 1) % 3, (leader + 2) % 3);
    group.kill(lagging).await;
    names.extend(create_large_files(&group, "snapshot").await);
    names.extend(purge(&group, "without").await);
    let dir = group.data_dir(leader);
    eventually("the leader has purged", async || !has_first_segment(&dir)).await;
    group.start(lagging).await;
    group.kill(third).await;
    names.extend(create_files(&group, "with-snapshot", 5).await);
    check_files(&group, &names).await;
}

#[tokio::test]
async fn a_backup_of_any_member_becomes_a_group_of_one_that_grows_again() {
    let mut group = Group::new(3).await;
    let names = create_files(&group, "before", 5).await;
    let leader = group.leader().await;
    let follower = (leader + 1) % 3;
    let (link, _notices) = group.link(follower, Role::Admin, "operator").await.unwrap();
    let asks_leader = AdminRequest::Backup(BackupRequest::Begin { of_any: false });
    let refused = link.ask(Request::Admin(asks_leader)).await;
    assert!(
        matches!(refused, Err(FsError::NotLeader { .. })),
        "{refused:?}"
    );
    eventually("the follower has them", async || {
        let (content, _) = backup::take(&link, true).await;
        content.files == 5
    })
    .await;
    let (content, file) = backup::take(&link, true).await;
    assert!(!content.led);
    assert_eq!(content.addr, group.addrs[follower]);
    assert_eq!(content.namenodes.len(), 3);
    let (link, _notices) = group.link(leader, Role::Admin, "operator").await.unwrap();
    let (of_leader, _) = backup::take(&link, false).await;
    assert!(of_leader.led && of_leader.record >= content.record);

    // All are lost.
    create_files(&group, "after", 5).await;
    for at in 0..3 {
        group.kill(at).await;
        fs::remove_dir_all(group.data_dir(at)).unwrap();
    }
    restore(&file[..], &group.data_dir(0), None, 4 << 20).unwrap();
    group.start(0).await;
    check_files(&group, &names).await;
    let accepted = group.admin(AdminRequest::AcceptLoss).await;
    assert_eq!(accepted, Ok(AdminReply::Done));
    assert_eq!(voters(&group.list().await), [group.addrs[0]]);
    for at in 1..3 {
        group.start_outside(at).await;
        let added = group.group(GroupRequest::Add(group.addrs[at])).await;
        assert_eq!(added, Ok(AdminReply::Done));
    }
    let restored = group.leader().await;
    group.kill(restored).await;
    create_files(&group, "again", 5).await;
    check_files(&group, &names).await;
}

#[tokio::test]
async fn one_namenode_becomes_three_and_one_again() {
    let mut group = Group::of_addresses(3);
    format(&group.data_dir(0), &format_options()).unwrap();
    group.start(0).await;
    let mut names = purge(&group, "alone").await;
    for at in 1..3 {
        group.start_outside(at).await;
        let added = group.group(GroupRequest::Add(group.addrs[at])).await;
        assert_eq!(added, Ok(AdminReply::Done));
        names.extend(create_files(&group, &format!("with-{at}"), 5).await);
    }
    let mut all = group.addrs.clone();
    all.sort();
    assert_eq!(voters(&group.list().await), all);
    let again = group.group(GroupRequest::Add(group.addrs[1])).await;
    assert!(
        matches!(again, Err(FsError::InvalidArgument(_))),
        "{again:?}"
    );
    // Any of them may be removed.
    for round in 0..3 {
        let leader = group.leader().await;
        group.kill(leader).await;
        names.extend(create_files(&group, &format!("after-{round}"), 3).await);
        check_files(&group, &names).await;
        group.start(leader).await;
    }
    // Those that do not lead are removed.
    let leader = group.leader().await;
    let refused = group.group(GroupRequest::Remove(group.addrs[leader])).await;
    assert!(matches!(refused, Err(FsError::InvalidArgument(_))));
    for at in (0..3).filter(|at| *at != leader) {
        let removed = group.group(GroupRequest::Remove(group.addrs[at])).await;
        assert_eq!(removed, Ok(AdminReply::Done));
        group.kill(at).await;
    }
    assert_eq!(voters(&group.list().await), [group.addrs[leader]]);
    names.extend(create_files(&group, "alone-again", 5).await);
    group.kill(leader).await;
    group.start(leader).await;
    check_files(&group, &names).await;
}

/// As two operators, or a script, would do.
#[tokio::test]
async fn two_namenodes_that_are_added_at_once_both_become_members() {
    let mut group = Group::of_addresses(3);
    format(&group.data_dir(0), &format_options()).unwrap();
    group.start(0).await;
    for at in 1..3 {
        group.start_outside(at).await;
    }
    let add = async |at: usize| group.group(GroupRequest::Add(group.addrs[at])).await;
    let added = tokio::join!(add(1), add(2));
    assert_eq!(added, (Ok(AdminReply::Done), Ok(AdminReply::Done)));
    let mut all = group.addrs.clone();
    all.sort();
    assert_eq!(voters(&group.list().await), all);
}

#[tokio::test]
async fn leadership_is_handed_over() {
    let group = Group::new(3).await;
    let names = create_files(&group, "before", 5).await;
    for _ in 0..6 {
        let before = group.leader().await;
        let reply = group.group(GroupRequest::Transfer(None)).await;
        assert!(matches!(reply, Ok(AdminReply::Group(_))), "{reply:?}");
        eventually("another one leads", async || group.leader().await != before).await;
        check_files(&group, &names).await;
    }
    let leader = group.leader().await;
    let itself = GroupRequest::Transfer(Some(group.addrs[leader]));
    assert!(group.group(itself).await.is_err());
    let nobody = GroupRequest::Transfer(Some("127.0.0.1:1".parse().unwrap()));
    assert!(group.group(nobody).await.is_err());
}

/// Puts a directory back to the contents of a copy.
pub(super) fn copy(from: &Path, to: &Path) {
    if to.exists() {
        fs::remove_dir_all(to).unwrap();
    }
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.unwrap().success());
}

#[tokio::test]
async fn a_member_that_was_put_back_to_a_copy_takes_part_in_nothing_until_it_is_added_anew() {
    let mut group = Group::new(3).await;
    let leader = group.leader().await;
    let (copied, third) = ((leader + 1) % 3, (leader + 2) % 3);
    let mut names = create_files(&group, "before", 5).await;
    let (dir, aside) = (group.data_dir(copied), group.dir.path().join("aside"));
    group.kill(copied).await;
    copy(&dir, &aside);
    group.start(copied).await;
    names.extend(create_files(&group, "after", 5).await);
    group.kill(copied).await;
    copy(&aside, &dir);
    group.start(copied).await;
    // The others continue.
    names.extend(create_files(&group, "without", 5).await);
    // With it alone there is no majority: nothing may be committed.
    group.kill(third).await;
    // The leader steps down as soon as it notices, and the other one must not lead.
    let mut alice = group.try_client(leader, "alice", None).await;
    for _ in 0..20 {
        let forgetful = group.try_client(copied, "alice", None).await;
        assert!(forgetful.is_none(), "a namenode without memory leads");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    if let Some(alice) = &mut alice {
        let call = alice.number(create(ROOT, "alone"));
        let answer = tokio::time::timeout(Duration::from_secs(1), meta(&alice.link, call)).await;
        assert!(!matches!(answer, Ok(Ok(_))), "nobody agreed: {answer:?}");
    }
    group.start(third).await;
    check_files(&group, &names).await;
    let id_before = {
        let status = group.list().await;
        let member = status
            .members
            .iter()
            .find(|it| it.addr == group.addrs[copied]);
        member.unwrap().id
    };
    let added = group.group(GroupRequest::Add(group.addrs[copied])).await;
    assert_eq!(added, Ok(AdminReply::Done));
    let status = group.list().await;
    assert_eq!(voters(&status).len(), 3, "{status:?}");
    let member = status
        .members
        .iter()
        .find(|it| it.addr == group.addrs[copied]);
    assert_ne!(member.unwrap().id, id_before, "it is a new member");
    // Its old journal is kept for the operator, and it counts again.
    let is_kept = fs::read_dir(&dir).unwrap().any(|entry| {
        let name = entry.unwrap().file_name();
        name.to_string_lossy().starts_with("journal-replaced-")
    });
    assert!(is_kept);
    check_counts(&mut group, copied, names).await;
}

#[tokio::test]
async fn a_member_whose_disk_was_wiped_is_replaced() {
    let mut group = Group::new(3).await;
    let leader = group.leader().await;
    let wiped = (leader + 1) % 3;
    let mut names = create_files(&group, "before", 5).await;
    group.kill(wiped).await;
    fs::remove_dir_all(group.data_dir(wiped)).unwrap();
    // As an operator would: with a new directory at the same address.
    group.start_outside(wiped).await;
    names.extend(create_files(&group, "without", 5).await);
    let added = group.group(GroupRequest::Add(group.addrs[wiped])).await;
    assert_eq!(added, Ok(AdminReply::Done));
    let mut all = group.addrs.clone();
    all.sort();
    assert_eq!(voters(&group.list().await), all);
    assert_eq!(group.list().await.members.len(), 3);
    check_counts(&mut group, wiped, names).await;
}

#[tokio::test]
async fn what_cannot_be_added_is_refused_with_the_reason() {
    let mut group = Group::new(3).await;
    let silent = GroupRequest::Add("127.0.0.1:9".parse().unwrap());
    let refused = group.group(silent).await.unwrap_err().to_string();
    assert!(refused.contains("127.0.0.1:9"), "{refused}");
    let unknown = GroupRequest::Remove("127.0.0.1:9".parse().unwrap());
    let refused = group.group(unknown).await.unwrap_err().to_string();
    assert!(refused.contains("no namenode of the group"), "{refused}");
    // Without a majority left, none is removed.
    let leader = group.leader().await;
    let (silent, third) = ((leader + 1) % 3, (leader + 2) % 3);
    group.kill(silent).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let refused = group.group(GroupRequest::Remove(group.addrs[third])).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("no majority"), "{refused}");
    // But the silent one is.
    let removed = group.group(GroupRequest::Remove(group.addrs[silent])).await;
    assert_eq!(removed, Ok(AdminReply::Done));
}

/// A failed leader is believed in until there is another one.
#[tokio::test]
async fn one_that_is_left_alone_says_who_the_members_are() {
    let mut group = Group::new(3).await;
    let leader = group.leader().await;
    let left = (leader + 1) % 3;
    // The leader last: there is no majority then that could elect it.
    for at in [(leader + 2) % 3, leader] {
        group.kill(at).await;
    }
    let (link, _notices) = group.link(left, Role::Admin, "operator").await.unwrap();
    let list = Request::Admin(AdminRequest::Group(GroupRequest::List));
    let answer = link.ask(list).await;
    let Ok(Reply::Admin(AdminReply::Group(status))) = answer else {
        panic!("unexpected {answer:?}");
    };
    assert_eq!(voters(&status).len(), 3);
    assert_ne!(status.leader, Some(status.this));
}
