//! Requests of an operator to the namenode. They require a certificate with the role of an administrator.

use serde::{Deserialize, Serialize};

use crate::backup::{BackupReply, BackupRequest};
use crate::classes::Classes;
use crate::group::{GroupRequest, GroupStatus};
use crate::harvest::HarvestReport;
use crate::history::{HistoryReply, HistoryRequest};
use crate::ids::{BlockId, ClusterId, InodeId, NodeId};
use crate::node::ServerDescription;
use crate::outlook::{WriteOutlook, count};
use crate::placement::{PlacementReply, PlacementRequest};
use crate::timeline::{Epoch, Position};
use crate::token::BlockToken;
use crate::types::{NodeInfo, VolumeStatus};
use crate::upgrade::{UpgradeReply, UpgradeRequest};
use crate::version::Version;

/// Requests of an operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// Reply: [`AdminReply::Status`].
    Status,
    /// Reply: [`AdminReply::Nodes`].
    Nodes,
    /// Checks the namespace and every block. Reply: [`AdminReply::Fsck`].
    Fsck,
    /// Write a snapshot of the journal now. Reply: [`AdminReply::Done`].
    Snapshot,
    /// About the history of the primary tenants. Reply: [`AdminReply::History`].
    History(HistoryRequest),
    /// About placement and repair. Reply: [`AdminReply::Placement`].
    Placement(PlacementRequest),
    /// End recovery without the missing records: begin a new epoch. Reply: [`AdminReply::Done`].
    AcceptLoss,
    /// The quarantined blocks after this one, at most [`crate::limits::QUARANTINED_PER_REPLY_MAX`].
    /// Reply: [`AdminReply::Quarantine`].
    Quarantine {
        /// The last block of the previous reply; block 0 at first.
        after: BlockId,
    },
    /// The utilisation classes now. Reply: [`AdminReply::Classes`].
    Classes,
    /// About the group of namenodes.
    Group(GroupRequest),
    /// About the version of the cluster.
    Upgrade(UpgradeRequest),
    /// About a backup. Reply: [`AdminReply::Backup`].
    Backup(BackupRequest),
    /// Reports what a scheduler runs on harvested resources. Reply: [`AdminReply::Done`].
    Harvest(HarvestReport),
}

/// Replies to [`AdminRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminReply {
    /// Success without further data.
    Done,
    /// The cluster at a glance.
    Status(Box<ClusterStatus>),
    /// Every datanode ever registered.
    Nodes(Vec<NodeStatus>),
    /// The result of a check.
    Fsck(FsckReport),
    /// About the history of the primary tenants.
    History(HistoryReply),
    /// About placement and repair.
    Placement(PlacementReply),
    /// Quarantined blocks in ascending order; none when there are no more.
    Quarantine(Vec<QuarantinedBlock>),
    /// The utilisation classes.
    Classes(Box<Classes>),
    /// The namenodes.
    Group(GroupStatus),
    /// About the version of the cluster.
    Upgrade(UpgradeReply),
    /// About a backup.
    Backup(BackupReply),
}

/// A block that the namenode does not know, and whose replicas it keeps for a while: a namenode with a longer
/// journal may have allocated its id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantinedBlock {
    /// The block.
    pub block: BlockId,
    /// Length of the longest replica, in whole chunks.
    pub length_bytes: u64,
    /// Datanodes that have a replica.
    pub nodes: Vec<NodeInfo>,
    /// How much longer they are kept, in milliseconds.
    pub kept_ms: u64,
    /// A token to read it.
    pub token: BlockToken,
}

/// What a namenode in recovery lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryStatus {
    /// The last record that it had when it started.
    pub restored_record: u64,
    /// Its directory was made from a backup: it waits for an operator even if it lacks nothing that is known.
    pub is_from_backup: bool,
    /// The positions that datanodes have obeyed and that are missing from its own timeline.
    pub ahead: Vec<AheadNode>,
}

impl RecoveryStatus {
    /// How many records it lacks, at least; 0 when that is not known.
    #[must_use]
    pub fn missing_records(&self) -> u64 {
        let furthest = self.ahead.iter().map(|node| node.obeyed.record).max();
        furthest.unwrap_or(0).saturating_sub(self.restored_record)
    }

    /// Describes what it has and what it lacks, as a predicate that follows "the namenode".
    #[must_use]
    pub fn describe(&self) -> String {
        let names: Vec<&str> = self.ahead.iter().map(|node| node.name.as_str()).collect();
        let names = names.join(", ");
        let has = if self.is_from_backup {
            format!(
                "was restored from a backup up to record {}",
                self.restored_record
            )
        } else {
            format!(
                "has a directory that ends at record {}",
                self.restored_record
            )
        };
        let lacks = match (names.as_str(), self.missing_records()) {
            ("", _) => "no datanode is known to have obeyed more".to_owned(),
            (_, 0) => {
                format!("lacks what was written since in another epoch, which {names} obeyed")
            }
            (_, records) => format!(
                "lacks {} or more that {names} obeyed",
                count(records, "record")
            ),
        };
        format!("{has}, and {lacks}")
    }
}

/// A datanode that obeyed a position that the namenode does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AheadNode {
    /// Its server.
    pub name: String,
    /// The position that it obeyed.
    pub obeyed: Position,
}

/// The cluster at a glance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The cluster.
    pub cluster: ClusterId,
    /// Version of the namenode's software.
    pub version: String,
    /// The namenode's clock, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Seconds since the namenode started.
    pub uptime_s: u64,
    /// False while block locations are still being learned after a start.
    pub ready: bool,
    /// Inodes, all kinds.
    pub inodes: u64,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Blocks that files use or sessions write.
    pub blocks: u64,
    /// Blocks below their replication.
    pub under_replicated_blocks: u64,
    /// Blocks with fewer replicas than their files ask for because the cluster does not have enough datanodes.
    pub curtailed_blocks: u64,
    /// The outlook for writes at present.
    pub writes: WriteOutlook,
    /// Committed blocks without any replica.
    pub lost_blocks: u64,
    /// Repairs under way.
    pub repairs_under_way: u64,
    /// Repairs finished since the namenode started.
    pub repairs_done: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Datanodes that are alive, without the ones in maintenance.
    pub nodes_alive: u64,
    /// Datanodes in maintenance: they may be unreachable for a while.
    pub nodes_in_maintenance: u64,
    /// Datanodes ever registered.
    pub nodes_known: u64,
    /// The quotas of all live datanodes together, in bytes.
    pub quota_bytes: u64,
    /// How many of these bytes are in use.
    pub used_bytes: u64,
    /// Last record of the journal.
    pub journal_lsn: u64,
    /// Memory that the engine's tables hold, in bytes (estimated from their capacity).
    pub engine_bytes: u64,
    /// The epoch of the namenode.
    pub epoch: Epoch,
    /// What the namenode lacks, while it is in recovery.
    pub recovery: Option<RecoveryStatus>,
    /// Datanodes that were refused because they obeyed another namenode that started later.
    pub refused_nodes: Vec<AheadNode>,
    /// Blocks in quarantine.
    pub quarantined_blocks: u64,
    /// The size of their replicas in bytes.
    pub quarantined_bytes: u64,
    /// The version of the cluster.
    pub cluster_version: Version,
    /// The newest version that a namenode or datanode runs. If it is above the version of the cluster, an
    /// upgrade is under way.
    pub newest_version: Version,
}

/// One datanode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its number.
    pub node: NodeId,
    /// Its server.
    pub server: ServerDescription,
    /// Its volumes as of the last heartbeat.
    pub volumes: Vec<VolumeStatus>,
    /// Whether its heartbeats arrive.
    pub alive: bool,
    /// Whether its primary tenant needs the server.
    pub busy: bool,
    /// Replicas on it.
    pub replicas: u64,
    /// Milliseconds since its last heartbeat, if it sent one since the namenode started.
    pub heartbeat_age_ms: Option<u64>,
    /// How far its clock was ahead of the namenode's at the last heartbeat, in milliseconds; negative
    /// when it was behind.
    pub clock_ahead_ms: Option<i64>,
    /// Version of its software, while it is connected.
    pub version: Option<String>,
    /// Its replicas are to be copied elsewhere, and it gets no new ones.
    pub draining: bool,
    /// How much longer it may be away without its blocks being repaired, in milliseconds; `None` when
    /// it is not in maintenance.
    pub maintenance_left_ms: Option<u64>,
}

/// The result of `harvestfs admin fsck`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckReport {
    /// Nothing is missing, lost or left over, and the tables are consistent with each other.
    pub healthy: bool,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Blocks that files use.
    pub blocks: u64,
    /// Replicas that are wanted but missing, summed over blocks.
    pub missing_replicas: u64,
    /// Blocks in use that have no replica.
    pub lost_blocks: u64,
    /// Blocks or replicas that nothing uses and that are not removed yet.
    pub orphan_blocks: u64,
    /// Replicas beyond the wanted number.
    pub excess_replicas: u64,
    /// What is wrong, in words, the first 1,000 findings.
    pub findings: Vec<FsckFinding>,
}

/// One thing that `fsck` found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckFinding {
    /// The inode concerned, if one is.
    pub ino: Option<InodeId>,
    /// Its path, if it has one.
    pub path: Option<String>,
    /// The block concerned, if one is.
    pub block: Option<BlockId>,
    /// What is wrong and why.
    pub message: String,
}
