use std::net::SocketAddr;

use harvestfs_protocol::group::{Condition, GroupMember, GroupStatus};

use super::changes::has_caught_up;
use crate::consensus::MemberId;
use crate::journal::Lsn;

/// One that leads, with this last record, and others.
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

/// One that answers and has everything.
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
