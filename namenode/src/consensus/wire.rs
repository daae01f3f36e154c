//! Conversion between openraft's messages and those sent between namenodes.

use harvestfs_protocol::peer::{Ballot, PeerReply, PeerRequest, Place};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, TransferLeaderRequest, VoteRequest, VoteResponse,
};

use super::entry::{EntryError, encode, entry_of, log_id};
use super::{Group, LogId, MemberId, Term, Vote};
use crate::journal::Lsn;

pub(super) fn ballot(vote: &Vote) -> Ballot {
    Ballot {
        term: vote.leader_id.term,
        candidate: vote.leader_id.voted_for.0,
        is_elected: vote.committed,
    }
}

pub(super) fn vote(ballot: Ballot) -> Vote {
    let candidate = MemberId(ballot.candidate);
    if ballot.is_elected {
        Vote::new_committed(ballot.term, candidate)
    } else {
        Vote::new(ballot.term, candidate)
    }
}

pub(super) fn place(entry: &LogId) -> Place {
    Place {
        term: entry.committed_leader_id().term,
        record: entry.index(),
    }
}

pub(super) fn entry(place: Place) -> LogId {
    log_id(place.term, place.record)
}

pub(super) fn vote_request(request: &VoteRequest<Group>, is_trial: bool) -> PeerRequest {
    PeerRequest::Vote {
        ballot: ballot(&request.vote),
        last: request.last_log_id.as_ref().map(place),
        is_trial,
        is_transfer: request.leadership_transfer,
    }
}

pub(super) fn vote_response(reply: &PeerReply) -> Option<VoteResponse<Group>> {
    let PeerReply::Voted {
        ballot,
        is_granted,
        last,
    } = reply
    else {
        return None;
    };
    Some(VoteResponse::new(
        vote(*ballot),
        last.map(entry),
        *is_granted,
    ))
}

pub(super) fn voted(response: &VoteResponse<Group>) -> PeerReply {
    PeerReply::Voted {
        ballot: ballot(&response.vote),
        is_granted: response.vote_granted,
        last: response.last_log_id.as_ref().map(place),
    }
}

pub(super) fn append_request(request: &AppendEntriesRequest<Group>) -> PeerRequest {
    PeerRequest::Append {
        ballot: ballot(&request.vote),
        before: request.prev_log_id.as_ref().map(place),
        records: request.entries.iter().map(encode).collect(),
        committed: request.leader_commit.as_ref().map(place),
    }
}

/// Builds the request to append a leader's entries, which follow the entry `before`.
pub(super) fn append(
    leader: Ballot,
    before: Option<Place>,
    records: Vec<Vec<u8>>,
    committed: Option<Place>,
) -> Result<AppendEntriesRequest<Group>, EntryError> {
    let mut lsn: Lsn = before.map_or(0, |before| before.record);
    let mut term = before.map_or(0, |before| before.term);
    let mut entries = Vec::with_capacity(records.len());
    for record in records {
        lsn = lsn.checked_add(1).ok_or(EntryError::OutOfOrder)?;
        let entry = entry_of(lsn, record)?;
        let of: Term = entry.log_id.committed_leader_id().term;
        if of < term {
            return Err(EntryError::OutOfOrder);
        }
        term = of;
        entries.push(entry);
    }
    check_not_later(leader, Some(Place { term, record: lsn }))?;
    check_not_later(leader, committed)?;
    Ok(AppendEntriesRequest {
        vote: vote(leader),
        prev_log_id: before.map(entry),
        entries,
        leader_commit: committed.map(entry),
    })
}

/// Checks that no entry is of a later term than the vote of its sender.
fn check_not_later(ballot: Ballot, place: Option<Place>) -> Result<(), EntryError> {
    match place {
        Some(place) if place.term > ballot.term => Err(EntryError::OutOfOrder),
        _ => Ok(()),
    }
}

pub(super) fn appended(response: &AppendEntriesResponse<Group>) -> PeerReply {
    match response {
        AppendEntriesResponse::Success => PeerReply::Appended,
        AppendEntriesResponse::PartialSuccess(up_to) => {
            PeerReply::AppendedUpTo(up_to.as_ref().map(place))
        }
        AppendEntriesResponse::Conflict => PeerReply::Conflict,
        AppendEntriesResponse::HigherVote(vote) => PeerReply::Outvoted(ballot(vote)),
    }
}

pub(super) fn append_response(reply: &PeerReply) -> Option<AppendEntriesResponse<Group>> {
    match reply {
        PeerReply::Appended => Some(AppendEntriesResponse::Success),
        PeerReply::AppendedUpTo(up_to) => {
            Some(AppendEntriesResponse::PartialSuccess(up_to.map(entry)))
        }
        PeerReply::Conflict => Some(AppendEntriesResponse::Conflict),
        PeerReply::Outvoted(ballot) => Some(AppendEntriesResponse::HigherVote(vote(*ballot))),
        PeerReply::Voted { .. }
        | PeerReply::Transferred
        | PeerReply::Mistaken
        | PeerReply::Forgetful
        | PeerReply::Outside
        | PeerReply::Identity { .. }
        | PeerReply::Taking(_)
        | PeerReply::Snapshot(_)
        | PeerReply::NoSnapshot
        | PeerReply::Left => None,
    }
}

pub(super) fn asks_for_vote(
    ballot: Ballot,
    last: Option<Place>,
    is_transfer: bool,
) -> Result<VoteRequest<Group>, EntryError> {
    check_not_later(ballot, last)?;
    Ok(VoteRequest {
        leadership_transfer: is_transfer,
        ..VoteRequest::new(vote(ballot), last.map(entry))
    })
}

pub(super) fn transfer_request(request: &TransferLeaderRequest<Group>) -> PeerRequest {
    PeerRequest::Transfer {
        ballot: ballot(request.from_leader()),
        to: request.to_node_id().0,
        last: request.last_log_id().map(place),
    }
}

pub(super) fn transfer(
    ballot: Ballot,
    to: u64,
    last: Option<Place>,
) -> TransferLeaderRequest<Group> {
    TransferLeaderRequest::new(vote(ballot), MemberId(to), last.map(entry))
}
