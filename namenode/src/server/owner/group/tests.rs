use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use harvestfs_protocol::group::{Condition, GroupMember, GroupStatus};
use tokio::time::Instant;

use super::changes::{has_caught_up, leaving, others_without_vote, voters_left};
use super::stuck::Stuck;
use super::{HAND_OVER_WITHIN, HandingOver, Leaving, REMOVED_WITHIN, successor};
use crate::consensus::MemberId;
use crate::journal::Lsn;

/// The status of a leader, with this last record, and others.
fn status(last: Lsn, others: &[GroupMember]) -> GroupStatus {
    let leader = GroupMember {
        acknowledged: None,
        heard_ms: None,
        ..member(1, 1, true)
    };
    GroupStatus {
        this: 1,
        condition: Condition::Member,
        leader: Some(1),
        term: 1,
        last,
        last_term: 1,
        members: [&[leader], others].concat(),
        is_changing: false,
    }
}

/// A member that answers and has everything.
fn member(id: u64, port: u16, is_voter: bool) -> GroupMember {
    GroupMember {
        id,
        name: "nn".to_owned(),
        addr: addr(port),
        is_voter,
        acknowledged: Some(50),
        heard_ms: Some(10),
    }
}

fn addr(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], port))
}

#[test]
fn a_member_gets_a_vote_when_it_has_caught_up_and_answers() {
    let caught_up = |last, acknowledged, heard_ms| {
        let learner = GroupMember {
            acknowledged,
            heard_ms,
            ..member(2, 2, false)
        };
        has_caught_up(&status(last, &[learner]), MemberId(2))
    };
    assert!(caught_up(50, Some(50), Some(10)));
    assert!(caught_up(50, Some(1), Some(10)), "it gets the rest soon");
    assert!(!caught_up(5_000, Some(50), Some(10)), "it lacks a lot");
    for nothing in [None, Some(0)] {
        assert!(!caught_up(50, nothing, Some(10)), "it acknowledged nothing");
    }
    for silent in [None, Some(5_000)] {
        assert!(!caught_up(50, Some(50), silent), "it went away");
    }
    assert!(!has_caught_up(&status(50, &[]), MemberId(2)), "it is gone");
}

/// A namenode whose directory was lost before it got a vote stays a member, with a number of its own.
#[test]
fn of_several_members_at_an_address_the_lost_one_leaves_and_the_other_one_leads() {
    let lost = |id, is_voter| GroupMember {
        heard_ms: None,
        ..member(id, 2, is_voter)
    };
    let (voter, learner) = (member(8, 2, true), member(5, 2, false));
    for (others, leaves) in [
        ([voter.clone(), lost(9, false)], 9),
        ([lost(7, false), voter.clone()], 7),
        ([learner.clone(), lost(9, true)], 9),
        ([voter.clone(), learner.clone()], 5),
    ] {
        let status = status(50, &others);
        assert_eq!(leaving(&status, addr(2)).unwrap().id, leaves);
    }
    for others in [
        [lost(7, false), voter.clone()],
        [voter.clone(), lost(9, false)],
        [learner, voter],
    ] {
        let to = successor(&status(50, &others), Some(addr(2)));
        assert_eq!(to, Ok(MemberId(8)));
    }
    assert!(leaving(&status(50, &[]), addr(2)).is_err());
}

#[test]
fn what_was_lost_at_an_address_leaves_when_another_one_is_added_there() {
    let others = [
        member(5, 2, false),
        member(6, 2, false),
        member(7, 3, false),
        member(8, 2, true),
    ];
    let lost = others_without_vote(&status(50, &others), MemberId(6), addr(2));
    assert_eq!(lost, [MemberId(5)]);
}

/// The member that was to lead was lost, and then another one was asked to.
#[test]
fn leadership_that_nobody_takes_over_is_given_up_after_a_while_however_often_it_is_handed_over() {
    let begun = Instant::now();
    let mut handing_over = HandingOver::default();
    let has_failed = |it: &HandingOver, after: Duration| {
        let now = begun + after;
        it.has_failed(now, HAND_OVER_WITHIN)
    };
    assert!(!has_failed(&handing_over, 2 * HAND_OVER_WITHIN));
    handing_over.begin(begun);
    assert!(!has_failed(&handing_over, HAND_OVER_WITHIN / 2));
    handing_over.begin(begun + HAND_OVER_WITHIN / 2);
    assert!(has_failed(&handing_over, HAND_OVER_WITHIN));
    assert!(handing_over.has_failed(begun + REMOVED_WITHIN, REMOVED_WITHIN));
}

/// It is found ten times a second, for as long as a disk is slow.
#[test]
fn that_another_member_should_lead_is_logged_when_it_changes() {
    let nobody = successor(&status(50, &[]), None);
    assert!(nobody.is_err());
    let one = successor(&status(50, &[member(2, 2, true)]), None);
    assert_eq!(one, Ok(MemberId(2)));
    let mut leaving = Leaving::default();
    for to in [&nobody, &one, &nobody] {
        let logged: Vec<bool> = (0..3).map(|_| leaving.is_new(to)).collect();
        assert_eq!(logged, [true, false, false], "{to:?}");
    }
}

/// Its disk hangs, and it answers nevertheless.
#[test]
fn a_member_that_stores_nothing_does_not_count_when_another_one_is_to_be_removed() {
    let group = |last, second| {
        let acknowledged = |acknowledged, id, port| GroupMember {
            acknowledged: Some(acknowledged),
            ..member(id, port, true)
        };
        status(
            last,
            &[acknowledged(second, 2, 2), acknowledged(last, 3, 3)],
        )
    };
    let mut stuck = Stuck::default();
    for (now_ms, second) in (0..10_000).step_by(100).zip(50..) {
        stuck.sample(now_ms, &group(second + 5, second));
        assert!(stuck.members(now_ms).is_empty(), "it lags, and goes on");
    }
    for now_ms in (10_000..13_000).step_by(100) {
        assert!(stuck.members(now_ms).is_empty(), "not for long enough");
        stuck.sample(now_ms, &group(1_000, 200));
    }
    let found = stuck.members(13_000);
    assert_eq!(found, BTreeMap::from([(MemberId(2), 200)]));
    let left = |second, without| voters_left(&group(1_000, second), MemberId(without), &found);
    assert_eq!(left(200, 3), (2, 1));
    assert_eq!(left(200, 2), (2, 2));
    assert_eq!(left(300, 3), (2, 2), "it goes on");
    stuck.sample(13_100, &group(1_000, 1_000));
    assert!(stuck.members(20_000).is_empty(), "it has everything");
}
