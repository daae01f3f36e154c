//! Requests of a namenode to another one of its group: what consensus needs (Raft, Ongaro 2014,
//! section 3), and snapshots for those that lag.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::group::Condition;
use crate::ids::ClusterId;

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

/// What a namenode says of its own memory, with everything that it says: one that remembers less than
/// it did before was put back to an older copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// A number by chance that each start of a namenode has.
    pub run: u64,
    /// How often it has written down its vote, or what else it must not forget.
    pub writes: u64,
    /// The same at its start.
    pub writes_at_start: u64,
}

/// What a namenode knows of the one that it calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The start in which it said so.
    pub run: u64,
    /// The most writes that it has spoken of.
    pub writes: u64,
    /// The last record of the caller's term that it has acknowledged.
    pub acknowledged: Option<u64>,
}

/// A request of one namenode to another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCall {
    /// The number of the caller in the group.
    pub from: u64,
    /// The number of the one that is meant; none: whichever it is.
    pub to: Option<u64>,
    /// The caller's memory.
    pub memory: Memory,
    /// What the caller knows of the one that it calls.
    pub known: Option<Known>,
    /// What it wants.
    pub request: PeerRequest,
}

/// What one namenode answers another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAnswer {
    /// Its number.
    pub from: u64,
    /// Its memory.
    pub memory: Memory,
    /// The answer.
    pub reply: PeerReply,
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
    /// Which one is this?
    Identify,
    /// Take the caller's newest snapshot, by `ReadSnapshot`. Asked again until it has what the snapshot
    /// covers.
    TakeSnapshot {
        /// The last entry that it covers.
        last: Place,
        /// The name in the caller's certificate.
        name: String,
        /// Where the caller listens.
        addr: SocketAddr,
    },
    /// Bytes of the newest snapshot.
    ReadSnapshot {
        /// The last record that the snapshot covers, of which there are bytes already.
        record: Option<u64>,
        /// From where on.
        offset: u64,
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
    /// To anything: this is not the member that is meant. Its disk was replaced, or another namenode has
    /// its address.
    Mistaken,
    /// To anything: this member has forgotten what it said before, and takes part in nothing.
    Forgetful,
    /// To anything but `Identify` and `TakeSnapshot`: this namenode is in no group yet.
    Outside,
    /// To `Identify`.
    Identity {
        /// The cluster whose directory it has.
        cluster: ClusterId,
        /// What it is to the group that it knows.
        condition: Condition,
    },
    /// To `TakeSnapshot`: the end of its log.
    Taking(Option<Place>),
    /// To `ReadSnapshot`; another one than that of the request: begin again.
    Snapshot(SnapshotPart),
    /// To `ReadSnapshot`: there is none.
    NoSnapshot,
    /// To `Vote`: the one that asks has left the group, with an entry that is committed and that it does not have. It takes
    /// part in nothing from then on.
    Left,
}

/// Bytes of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotPart {
    /// The last entry that it covers.
    pub last: Place,
    /// The entry that names the members, if one does.
    pub members_entry: Option<Place>,
    /// The members as of the last entry, encoded as in the log.
    pub members: Vec<u8>,
    /// Size of the whole snapshot in bytes.
    pub length_bytes: u64,
    /// Where the bytes begin.
    pub offset: u64,
    /// Some of it.
    pub bytes: Vec<u8>,
}
