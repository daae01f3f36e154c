//! Requests of a namenode to another one of its group: what consensus needs (Raft, Ongaro 2014, section 3), and
//! snapshots for members that lag.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::group::Condition;
use crate::ids::ClusterId;

/// A vote: its term, its candidate, and whether the candidate won.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ballot {
    /// The term.
    pub term: u64,
    /// The number of the candidate in the group.
    pub candidate: u64,
    /// Whether a majority voted for it, so that it leads.
    pub is_elected: bool,
}

/// The position of an entry in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The term of the leader that added it.
    pub term: u64,
    /// Its index, which is the number of its record.
    pub record: u64,
}

/// What a namenode reports about its own memory, with every message that it sends. A namenode that remembers less
/// than it did before was restored from an older copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// A random number that identifies one start of a namenode.
    pub run: u64,
    /// How often it has persisted its vote, or other state that it must not forget.
    pub writes: u64,
    /// The value of `writes` at its start.
    pub writes_at_start: u64,
}

/// What a namenode knows about the namenode that it calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The run in which it reported the following.
    pub run: u64,
    /// The highest number of writes that it has reported.
    pub writes: u64,
    /// The last record of the caller's term that it has acknowledged.
    pub acknowledged: Option<u64>,
}

/// A request of one namenode to another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCall {
    /// The number of the caller in the group.
    pub from: u64,
    /// The number of the addressee; none: any namenode.
    pub to: Option<u64>,
    /// The caller's memory.
    pub memory: Memory,
    /// What the caller knows about the addressee.
    pub known: Option<Known>,
    /// The request.
    pub request: PeerRequest,
}

/// The answer of one namenode to another.
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
        /// The vote that the candidate asks for, for itself.
        ballot: Ballot,
        /// The end of the candidate's log.
        last: Option<Place>,
        /// A trial that changes nothing: would the vote be granted?
        is_trial: bool,
        /// The leader wants this candidate to lead.
        is_transfer: bool,
    },
    /// Entries of a leader, or none: a heartbeat.
    Append {
        /// The leader.
        ballot: Ballot,
        /// The entry before the first one.
        before: Option<Place>,
        /// Records, in order.
        records: Vec<Vec<u8>>,
        /// The last committed entry.
        committed: Option<Place>,
    },
    /// The leader wants another member to lead.
    Transfer {
        /// The leader.
        ballot: Ballot,
        /// The number of the member that is to lead.
        to: u64,
        /// The end of the log that this member must have first.
        last: Option<Place>,
    },
    /// Asks which namenode this is.
    Identify,
    /// Fetch the caller's newest snapshot with `ReadSnapshot`. Repeated until the callee has everything that the
    /// snapshot covers.
    TakeSnapshot {
        /// The last entry that the snapshot covers.
        last: Place,
        /// The name in the caller's certificate.
        name: String,
        /// The address at which the caller listens.
        addr: SocketAddr,
    },
    /// Reads bytes of the newest snapshot.
    ReadSnapshot {
        /// The last record covered by the snapshot of which the caller already has bytes.
        record: Option<u64>,
        /// Offset of the first byte.
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
        /// Whether the vote is granted.
        is_granted: bool,
        /// The end of the voter's log.
        last: Option<Place>,
    },
    /// To `Append`: all entries are durable on this member.
    Appended,
    /// To `Append`: the entries up to this one are durable on this member.
    AppendedUpTo(Option<Place>),
    /// To `Append`: this member does not have the entry before.
    Conflict,
    /// To `Append`: this member has meanwhile voted for another one.
    Outvoted(Ballot),
    /// To `Transfer`.
    Transferred,
    /// To anything: this is not the addressee. Its disk was replaced, or another namenode has its address.
    Mistaken,
    /// To anything: this member has forgotten what it promised before, and takes part in nothing.
    Forgetful,
    /// To anything but `Identify` and `TakeSnapshot`: this namenode is in no group yet.
    Outside,
    /// To `Identify`.
    Identity {
        /// The cluster whose directory it has.
        cluster: ClusterId,
        /// Its relation to the group that it knows.
        condition: Condition,
    },
    /// To `TakeSnapshot`: the end of the callee's log.
    Taking(Option<Place>),
    /// To `ReadSnapshot`. If it is another snapshot than requested: start over.
    Snapshot(SnapshotPart),
    /// To `ReadSnapshot`: there is none.
    NoSnapshot,
    /// To `Vote`: the candidate has left the group, by a committed entry that it does not have. It takes part in
    /// nothing from then on.
    Left,
}

/// Bytes of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotPart {
    /// The last entry that it covers.
    pub last: Place,
    /// The entry that defines the members, if there is one.
    pub members_entry: Option<Place>,
    /// The members as of the last entry, encoded as in the log.
    pub members: Vec<u8>,
    /// Size of the whole snapshot in bytes.
    pub length_bytes: u64,
    /// Offset of the first byte.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}
