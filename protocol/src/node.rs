//! Requests of a datanode to the namenode.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::{BlockId, ClusterId, NodeId, StorageId};
use crate::timeline::{Authority, Position};
use crate::token::{BlockToken, TokenKey};
use crate::types::{NodeInfo, VolumeStatus};
use crate::version::Version;

/// The server that a datanode runs on, as its configuration describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerDescription {
    /// Name of the server, unique in the cluster; must be the name in the certificate.
    pub name: String,
    /// Its rack.
    pub rack: String,
    /// The environment of its primary tenant.
    pub environment: String,
    /// The machine function of its primary tenant.
    pub machine_function: String,
    /// Where its data service listens.
    pub data_addr: SocketAddr,
}

/// The first request of a datanode on a connection. Known servers keep their [`NodeId`]; a known
/// server with a new storage id was reimaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterNode {
    /// The server.
    pub server: ServerDescription,
    /// Its volumes, at most [`crate::limits::VOLUMES_PER_NODE_MAX`].
    pub volumes: Vec<VolumeStatus>,
    /// The cluster that the volumes were formatted for, if any of them was.
    pub cluster: Option<ClusterId>,
    /// Version of the datanode's software, at most [`crate::limits::LABEL_BYTES_MAX`] bytes.
    pub version: String,
    /// The furthest namenode position that it has obeyed, if any.
    pub obeyed: Option<Position>,
}

/// The namenode's answer; a full [`BlockReport`] of each volume is expected next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRegistered {
    /// The datanode's number.
    pub node: NodeId,
    /// The cluster.
    pub cluster: ClusterId,
    /// Keys that sign block tokens.
    pub keys: Vec<TokenKey>,
    /// Largest block in bytes.
    pub block_bytes: u64,
    /// The authority of the namenode's commands.
    pub authority: Authority,
    /// The version of the cluster: nothing newer may be written to volumes.
    pub cluster_version: Version,
}

/// What a datanode reports every [`crate::limits::HEARTBEAT_INTERVAL`], from its latest readings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Its volumes.
    pub volumes: Vec<VolumeStatus>,
    /// Whether the server is to be left alone now: its primary tenant needs it, or its disks do not respond. Its
    /// replicas do not count as lost.
    pub busy: bool,
    /// The primary tenant's load; `None` when unknown (no source is configured, or it has reported nothing lately).
    pub primary: Option<PrimaryLoad>,
    /// Block streams under way.
    pub active_streams: u32,
    /// The server's clock when the heartbeat was sent, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Reads, writes and repairs that were denied or aborted because the owner needs the server, since the datanode
    /// started.
    pub denials: u64,
    /// Bytes of replicas that the reply may order it to delete: as much as it deletes before its next heartbeat at
    /// the rate that spares the owner, or more where space is short. No limit: [`u64::MAX`].
    pub removable_bytes: u64,
}

/// How much of a server its primary tenant uses, on average over the previous second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrimaryLoad {
    /// CPU, in thousandths of all cores: 0 to 1000.
    pub cpu_permille: u16,
    /// Memory, in thousandths of the server's total: 0 to 1000; `None` where the source does not report it.
    pub memory_permille: Option<u16>,
    /// Time in which some of its tasks waited for CPU, memory or a disk (pressure stall
    /// information, the worst of the three), in thousandths: 0 to 1000; `None` where the kernel
    /// does not report it.
    pub stalled_permille: Option<u16>,
    /// The size of the server, of which these values are shares.
    pub size: Option<ServerSize>,
}

/// The size of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerSize {
    /// Cores, including those that the datanode itself may not use.
    pub cores: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
}

/// The namenode's answer to a heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// At most [`crate::limits::COMMANDS_PER_HEARTBEAT_MAX`].
    pub commands: Vec<NodeCommand>,
    /// All keys that sign block tokens; `None`: the same keys as last sent.
    pub keys: Option<Vec<TokenKey>>,
    /// The authority of the commands.
    pub authority: Authority,
    /// The version of the cluster, which may have been raised.
    pub cluster_version: Version,
}

/// A command of the namenode to a datanode. Every command may arrive twice, and is then a no-op.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeCommand {
    /// Repair: fetch a replica from one of the sources.
    Replicate {
        /// Block.
        block: BlockId,
        /// Committed length in bytes.
        length_bytes: u64,
        /// Datanodes that have a replica, best first.
        sources: Vec<NodeInfo>,
        /// A token to read it there.
        token: BlockToken,
    },
    /// Remove replicas.
    Delete {
        /// Blocks.
        blocks: Vec<BlockId>,
    },
    /// The writer of the block no longer exists: cut the replica to the committed length if it is longer, seal it,
    /// and report it.
    Seal {
        /// Block.
        block: BlockId,
        /// Committed length in bytes.
        length_bytes: u64,
    },
    /// The owner changes the quota of a volume. The datanode persists it, stores nothing beyond it from then on, and
    /// reports in its heartbeats when it will get below it by itself ([`crate::types::VolumeStatus::shrinks_in_ms`]).
    SetQuota {
        /// Volume.
        storage: StorageId,
        /// The new quota in bytes.
        quota_bytes: u64,
        /// Milliseconds from now until usage must be below it; if the namenode has ordered too few deletions by then,
        /// the datanode chooses the rest itself.
        deadline_ms: u64,
    },
    /// Send a full report of a volume.
    ReportBlocks {
        /// Volume.
        storage: StorageId,
    },
    /// A client could not use a replica: report its state, and if it is sealed, read it as the scrubber does. The
    /// answer is a change of the replica.
    Verify {
        /// The volume on which the namenode believes it to be.
        storage: StorageId,
        /// Block.
        block: BlockId,
    },
    /// The namenodes of the group, with which to register as with those in the configuration. A standby sends this,
    /// too, so that the leader is found.
    Namenodes {
        /// The address at which the sender listens, as the others know it.
        this: SocketAddr,
        /// The addresses at which all of them listen; at most [`crate::limits::NAMENODES_TOLD_MAX`].
        all: Vec<SocketAddr>,
    },
}

/// All replicas of one volume, in parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockReport {
    /// Volume.
    pub storage: StorageId,
    /// Number of this part, from 0.
    pub part: u32,
    /// No part follows: a replica that no part listed is not on the volume.
    pub last: bool,
    /// At most [`crate::limits::REPLICAS_PER_REPORT_MAX`].
    pub replicas: Vec<ReplicaReport>,
}

/// One replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaReport {
    /// Block.
    pub block: BlockId,
    /// Bytes that can be read, in whole chunks: up to [`crate::limits::CHUNK_BYTES`] - 1 more than were written.
    pub length_bytes: u64,
    /// Whether it is final: no byte will be added.
    pub sealed: bool,
}

/// Changes since the last report, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncrementalReport {
    /// Changes, at most [`crate::limits::REPLICAS_PER_REPORT_MAX`].
    pub changes: Vec<(StorageId, ReplicaChange)>,
}

/// What happened to a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplicaChange {
    /// It is new on this datanode, or was sealed.
    Have(ReplicaReport),
    /// It was removed.
    Deleted(BlockId),
    /// Its data does not match its checksums, or cannot be read.
    Corrupt(BlockId),
    /// A repair that was ordered has failed; the block is not on this datanode.
    RepairFailed(BlockId),
}

/// Requests of a datanode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeRequest {
    /// The first request. Rare, and larger than any other.
    Register(Box<RegisterNode>),
    /// Reply: [`NodeReply::Heartbeat`].
    Heartbeat(Heartbeat),
    /// Reply: [`NodeReply::Accepted`].
    BlockReport(BlockReport),
    /// Reply: [`NodeReply::Accepted`].
    IncrementalReport(IncrementalReport),
    /// The last request: the datanode is being stopped, and keeps its replicas. Reply: [`NodeReply::Accepted`].
    Stopping,
}

/// Replies to [`NodeRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeReply {
    /// To `Register`.
    Registered(NodeRegistered),
    /// To `Heartbeat`.
    Heartbeat(HeartbeatReply),
    /// To a report.
    Accepted,
}
