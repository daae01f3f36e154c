//! What a session reports about itself and about replicas: neither journaled nor remembered, and harmless when
//! repeated.

use serde::{Deserialize, Serialize};

use crate::ids::{BlockId, InodeId, NodeId};

use super::operations::operations;

operations! {
    /// An operation that is neither journaled nor remembered.
    Housekeeping {
        26 => Release "release",
        27 => ReportBadReplica "report_bad_replica",
        34 => ReturnDelegations "return_delegations",
    }
}

/// The session no longer holds these inodes open. Reply: [`MetaReply::Done`](super::MetaReply::Done).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Inodes.
    pub inodes: Vec<InodeId>,
}

/// A replica could not be used. The namenode asks the datanode, whose answer decides. Reply:
/// [`MetaReply::Done`](super::MetaReply::Done).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportBadReplica {
    /// Block.
    pub block: BlockId,
    /// The datanode that has the replica.
    pub node: NodeId,
    /// True: its data is wrong or missing. False: the datanode did not answer.
    pub corrupt: bool,
}

/// All closed content of these files is committed. Reply: [`MetaReply::Done`](super::MetaReply::Done).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReturnDelegations {
    /// At most [`crate::limits::BLOCKS_PER_REQUEST_MAX`].
    pub inodes: Vec<InodeId>,
}
