//! Requests of operators about the group of namenodes.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A request about the namenodes. They are identified by the addresses at which they listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupRequest {
    /// Reply: [`crate::admin::AdminReply::Group`].
    List,
    /// Add the namenode that runs at this address to the group, replacing the member that had the address
    /// before, if there was one. Reply once it has a vote: [`crate::admin::AdminReply::Done`].
    Add(SocketAddr),
    /// Remove the member at this address. Reply when it has left: [`crate::admin::AdminReply::Done`].
    Remove(SocketAddr),
    /// Transfer leadership to the member at this address; none: to the one that is least behind. Reply as soon
    /// as that has begun: [`crate::admin::AdminReply::Group`].
    Transfer(Option<SocketAddr>),
}

/// The relation of a namenode to its group, as far as it knows itself. Only a member takes part in anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// One of its members, or the only one.
    Member,
    /// It was created to be added to a group, and has not been added yet.
    New,
    /// It was created together with the other members of a new group, and waits until each of them has
    /// confirmed that it knows nothing of it.
    Founding,
    /// Its directory is a copy, which may lack what it has sent to the others since the copy was made.
    Copy,
    /// Other members know of more that it has sent than it remembers itself.
    Forgetful,
    /// It was a member, and no longer is.
    Left,
}

impl Condition {
    /// Whether its state is not to be trusted: it may join a group only after discarding it.
    #[must_use]
    pub fn is_stale(self) -> bool {
        matches!(self, Self::Copy | Self::Forgetful | Self::Left)
    }
}

/// The group as one of its members sees it, or as a namenode that takes part in nothing last knew it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupStatus {
    /// The number of the namenode that answers.
    pub this: u64,
    /// Its relation to the group.
    pub condition: Condition,
    /// The number of the leader, if known.
    pub leader: Option<u64>,
    /// The term.
    pub term: u64,
    /// The last record of that member.
    pub last: u64,
    /// The term of that record. Of two namenodes, the one whose last record has the later term is ahead; with
    /// equal terms, the one with more records.
    pub last_term: u64,
    /// The members, by their numbers.
    pub members: Vec<GroupMember>,
    /// A change of the members is under way.
    pub is_changing: bool,
}

/// A member of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMember {
    /// Its number, which is never given twice.
    pub id: u64,
    /// The name in its certificate.
    pub name: String,
    /// The address at which it listens.
    pub addr: SocketAddr,
    /// Whether it has a vote; otherwise it only follows, as a learner.
    pub is_voter: bool,
    /// The last record that it has acknowledged to the leader; only the leader knows.
    pub acknowledged: Option<u64>,
    /// How long ago the leader last received a message from it, in milliseconds; only the leader knows.
    pub heard_ms: Option<u64>,
}
