//! Requests of a namenode to another one of its group: what consensus needs (Raft, Ongaro 2014, section 3).

use serde::{Deserialize, Serialize};

/// A vote: for whom in which term, and whether it won.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ballot {
    /// The term.
    pub term: u64,
    /// The number of the candidate in the group.
    pub candidate: u64,
    /// A majority voted for it: it leads.
    pub is_elected: bool,
}

/// The place of an entry in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The term of the leader that added it.
    pub term: u64,
    /// Its number, which is that of its record.
    pub record: u64,
}

/// A request between namenodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerRequest {
    /// A candidate asks for a vote.
    Vote {
        /// For itself.
        ballot: Ballot,
        /// The end of its log.
        last: Option<Place>,
        /// Nothing is to be changed by it: would the vote be given?
        is_trial: bool,
        /// The leader wants this one to lead.
        is_transfer: bool,
    },
    /// A leader's entries, or none: a heartbeat.
    Append {
        /// The leader.
        ballot: Ballot,
        /// The entry before.
        before: Option<Place>,
        /// Records, in order.
        records: Vec<Vec<u8>>,
        /// What is committed.
        committed: Option<Place>,
    },
    /// The leader wants the other one to lead.
    Transfer {
        /// The leader.
        ballot: Ballot,
        /// The number of the one that is to lead.
        to: u64,
        /// What that one has to have.
        last: Option<Place>,
    },
}

/// The reply to a [`PeerRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerReply {
    /// To `Vote`.
    Voted {
        /// The newest vote of this member.
        ballot: Ballot,
        /// The vote is given.
        is_granted: bool,
        /// The end of its log.
        last: Option<Place>,
    },
    /// To `Append`: all entries are durable here.
    Appended,
    /// To `Append`: those up to this one are durable here.
    AppendedUpTo(Option<Place>),
    /// To `Append`: the entry before is not here.
    Conflict,
    /// To `Append`: there was a vote for another one since.
    Outvoted(Ballot),
    /// To `Transfer`.
    Transferred,
}
