//! The messages between the namenodes of a group: one of each.

use harvestfs_protocol::group::Condition;
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::peer::{
    Ballot, Known, Memory, PeerAnswer, PeerCall, PeerReply, PeerRequest, Place, SnapshotPart,
};

const MEMORY: Memory = Memory {
    run: 7,
    writes: 3,
    writes_at_start: 2,
};
const BALLOT: Ballot = Ballot {
    term: 4,
    candidate: 1,
    is_elected: true,
};
const PLACE: Place = Place {
    term: 4,
    record: 12,
};

pub(super) fn calls() -> Vec<PeerCall> {
    let requests = [
        PeerRequest::Vote {
            ballot: BALLOT,
            last: Some(PLACE),
            is_trial: false,
            is_transfer: true,
        },
        PeerRequest::Append {
            ballot: BALLOT,
            before: Some(PLACE),
            records: vec![vec![1, 2], vec![3]],
            committed: None,
        },
        PeerRequest::Transfer {
            ballot: BALLOT,
            to: 2,
            last: Some(PLACE),
        },
        PeerRequest::Identify,
        PeerRequest::TakeSnapshot {
            last: PLACE,
            name: "namenode-2".into(),
            addr: ([127, 0, 0, 1], 9_310).into(),
        },
        PeerRequest::ReadSnapshot {
            record: Some(9),
            offset: 4_096,
        },
    ];
    let calls = requests.into_iter().map(|request| PeerCall {
        from: 1,
        to: Some(2),
        memory: MEMORY,
        known: Some(Known {
            run: 8,
            writes: 5,
            acknowledged: Some(9),
        }),
        request,
    });
    calls.collect()
}

pub(super) fn answers() -> Vec<PeerAnswer> {
    let replies = [
        PeerReply::Voted {
            ballot: BALLOT,
            is_granted: true,
            last: Some(PLACE),
        },
        PeerReply::Appended,
        PeerReply::AppendedUpTo(Some(PLACE)),
        PeerReply::Conflict,
        PeerReply::Outvoted(BALLOT),
        PeerReply::Transferred,
        PeerReply::Mistaken,
        PeerReply::Forgetful,
        PeerReply::Outside,
        PeerReply::Identity {
            cluster: ClusterId(7),
            condition: Condition::Member,
        },
        PeerReply::Taking(None),
        PeerReply::Snapshot(SnapshotPart {
            last: PLACE,
            members_entry: None,
            members: vec![1],
            length_bytes: 8_192,
            offset: 4_096,
            bytes: vec![1, 2, 3],
        }),
        PeerReply::NoSnapshot,
        PeerReply::Left,
    ];
    let answers = replies.into_iter().map(|reply| PeerAnswer {
        from: 2,
        memory: MEMORY,
        reply,
    });
    answers.collect()
}
