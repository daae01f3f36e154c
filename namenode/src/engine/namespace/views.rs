//! Views of the namespace's tables for the rest of the namenode.

use harvestfs_protocol::ids::{BlockId, ClusterId, NodeId, SessionId, StorageId};
use harvestfs_protocol::node::ServerDescription;
use harvestfs_protocol::types::{PlacementRules, Timestamp};
use serde::{Deserialize, Serialize};

/// The namespace's state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockView {
    /// The block.
    pub block: BlockId,
    /// Bytes that a replica must have, counted from the block's start.
    pub committed_bytes: u64,
    /// Bytes that files use; bytes that several files share count once for each.
    pub live_bytes: u64,
    /// The rules for its placement.
    pub rules: PlacementRules,
    /// The session that may commit data in it; none once that has ended.
    pub writer: Option<SessionId>,
    /// Its final length in bytes, once its writer is done with it.
    pub sealed_bytes: Option<u64>,
}

impl BlockView {
    /// Whether its writer is done with it.
    #[must_use]
    pub fn sealed(&self) -> bool {
        self.sealed_bytes.is_some()
    }
}

/// The namespace's state of a datanode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerView<'a> {
    /// Its number.
    pub node: NodeId,
    /// Its server.
    pub server: &'a ServerDescription,
    /// Its volumes as last registered, in ascending order.
    pub storages: &'a [StorageId],
    /// When it was first registered.
    pub registered: Timestamp,
    /// When its volumes were found reimaged, one entry for each volume, oldest first.
    pub reimages: Vec<Timestamp>,
    /// Whether an operator is having it emptied before it is reimaged.
    pub held: bool,
    /// The end of the maintenance that an operator announced, which may be in the past.
    pub maintenance_until: Option<Timestamp>,
}

/// A client's session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionView<'a> {
    /// The session.
    pub session: SessionId,
    /// The name in the client's certificate.
    pub client: &'a str,
    /// When it was opened.
    pub opened: Timestamp,
}

/// Totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Inodes, all kinds, orphans included.
    pub inodes: u64,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Files without a name that are held open.
    pub orphans: u64,
    /// Blocks.
    pub blocks: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Datanodes ever registered.
    pub servers: u64,
    /// Bytes of blocks that files use, without replication; shared bytes count once for each use.
    pub live_bytes: u64,
    /// Memory of the tables in bytes, estimated.
    pub memory_bytes: u64,
}

/// The parameters that [`super::Command::Format`] set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Formatted {
    /// The cluster.
    pub cluster: ClusterId,
    /// Size at which clients start a new block, in bytes.
    pub block_bytes: u64,
    /// Rules for files below directories that set none.
    pub default_rules: PlacementRules,
}
