//! What operators ask about the group of namenodes.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A request about the namenodes. They are named by the addresses on which they listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupRequest {
    /// Reply: [`crate::admin::AdminReply::Group`].
    List,
    /// Take a namenode into the group, which runs at this address; in the place of the member that had
    /// the address before, if there was one. Reply when it has a vote:
    /// [`crate::admin::AdminReply::Done`].
    Add(SocketAddr),
    /// Remove the member at this address. Reply when it has left: [`crate::admin::AdminReply::Done`].
    Remove(SocketAddr),
    /// Hand leadership over to the member at this address; none: to the one that is least behind. Reply
    /// as soon as that has begun: [`crate::admin::AdminReply::Group`].
    Transfer(Option<SocketAddr>),
}

/// What a namenode is to its group, as far as it knows itself. All but a member take part in nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// One of its members, or the only one.
    Member,
    /// It was made to be taken into a group, and was not yet.
    New,
    /// It was made together with the others of a new group, and waits until each of them has said that it knows nothing of
    /// it.
    Founding,
    /// Its directory is a copy: of what it said since that was made, it knows nothing.
    Copy,
    /// Others know more of it than it does itself.
    Forgetful,
    /// It was a member, and is none any more.
    Left,
}

impl Condition {
    /// Whether what it has is not to be trusted: it is taken into a group only without that.
    #[must_use]
    pub fn is_stale(self) -> bool {
        matches!(self, Self::Copy | Self::Forgetful | Self::Left)
    }
}

/// The group, as one of its members sees it; or one that takes part in nothing, as far as it ever knew it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupStatus {
    /// The number of that member.
    pub this: u64,
    /// What it is to the group.
    pub condition: Condition,
    /// The number of the one that leads, if that is known.
    pub leader: Option<u64>,
    /// The term.
    pub term: u64,
    /// The last record of that member.
    pub last: u64,
    /// The term of that record: of two namenodes, the one whose last record is of the later term has more, and of the
    /// same term the one with more records.
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
    /// Where it listens.
    pub addr: SocketAddr,
    /// It has a vote; otherwise it only follows.
    pub is_voter: bool,
    /// The last record that it has acknowledged to the leader; only the leader knows.
    pub acknowledged: Option<u64>,
    /// How long ago the leader heard of it, in milliseconds; only the leader knows.
    pub heard_ms: Option<u64>,
}
