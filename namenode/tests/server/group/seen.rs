//! What pages and metrics show about the group.

use std::time::Duration;

use harvestfs_http::{Get, Site};
use harvestfs_namenode::http::Page;
use harvestfs_protocol::group::GroupRequest;

use super::{ELECTED_WITHIN, Group, ROOT};
use crate::harness::{create, meta};

/// The answer of one of them, as text.
async fn text(group: &Group, at: usize, path: &str) -> String {
    let namenode = group.namenodes[at].as_ref().expect("it runs");
    let page = Page::new(namenode.observer());
    let (path, since) = (Get::new(path, ""), Duration::from_secs(5));
    let answer = tokio::time::timeout(since, page.answer(&path)).await;
    format!("{:?}", answer.expect("it answers in time"))
}

/// Waits until all of this is shown.
async fn says(group: &Group, at: usize, path: &str, all: &[&str]) {
    let deadline = tokio::time::Instant::now() + ELECTED_WITHIN;
    loop {
        let said = text(group, at, path).await;
        if all.iter().all(|it| said.contains(it)) {
            return;
        }
        let is_late = tokio::time::Instant::now() >= deadline;
        assert!(!is_late, "{all:?} is not said: {said}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// As formatted in the result of `text`.
const LEADS: &str = "harvestfs_namenode_leads 1\\n";
const LEADS_NOT: &str = "harvestfs_namenode_leads 0\\n";
const KNOWS_LEADER: &str = "harvestfs_namenode_knows_leader 1\\n";
const KNOWS_NO_LEADER: &str = "harvestfs_namenode_knows_leader 0\\n";
const NOBODY_LEADS: &str = "\\\"part\\\":\\\"nobody-leads\\\"";

#[tokio::test]
async fn a_standby_that_is_left_says_that_nobody_leads() {
    let mut group = Group::new(3).await;
    let leader = group.leader().await;
    let [left, other] = [1, 2].map(|it| (leader + it) % 3);
    says(&group, leader, "/metrics", &[LEADS, KNOWS_LEADER]).await;
    says(&group, left, "/metrics", &[LEADS_NOT, KNOWS_LEADER]).await;
    group.kill(other).await;
    group.kill(leader).await;
    says(&group, left, "/metrics", &[LEADS_NOT, KNOWS_NO_LEADER]).await;
    says(&group, left, "/api/cluster", &[NOBODY_LEADS]).await;
}

#[tokio::test]
async fn a_leader_that_is_left_says_that_it_leads_no_more() {
    let mut group = Group::new(3).await;
    let (mut alice, leader) = group.client("alice", None).await;
    for other in [1, 2].map(|it| (leader + it) % 3) {
        group.kill(other).await;
    }
    // Changes that cannot be agreed on do not delay what it reports about itself.
    let call = alice.number(create(ROOT, "alone"));
    let answer = tokio::time::timeout(Duration::from_secs(1), meta(&alice.link, call)).await;
    assert!(!matches!(answer, Ok(Ok(_))), "nobody agreed: {answer:?}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    says(&group, leader, "/metrics", &[LEADS_NOT, KNOWS_NO_LEADER]).await;
    says(&group, leader, "/api/cluster", &[NOBODY_LEADS]).await;
    group.start((leader + 1) % 3).await;
    let leads = group.leader().await;
    says(&group, leads, "/metrics", &[LEADS, KNOWS_LEADER]).await;
}

#[tokio::test]
async fn one_that_has_left_is_told_no_more() {
    let group = Group::new(3).await;
    let leader = group.leader().await;
    let gone = group.addrs[(leader + 1) % 3];
    let told = format!("harvestfs_namenode_member{{address=\\\"{gone}\\\"}} 0");
    says(&group, leader, "/metrics", &[&told]).await;
    group
        .group(GroupRequest::Remove(gone))
        .await
        .expect("it leaves");
    let leads = group.leader().await;
    let said = text(&group, leads, "/metrics").await;
    assert!(!said.contains(&gone.to_string()), "{said}");
}
