//! A datanode of the model: what its disks really hold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use harvestfs_protocol::ids::{BlockId, NodeId, StorageId};
use harvestfs_protocol::node::{BlockReport, NodeCommand, ReplicaChange};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskReplica {
    pub(super) length_bytes: u64,
    pub(super) sealed: bool,
    pub(super) corrupt: bool,
}

/// A datanode.
#[derive(Debug)]
pub(super) struct Datanode {
    pub(super) id: NodeId,
    pub(super) disks: BTreeMap<StorageId, BTreeMap<BlockId, DiskReplica>>,
    /// Disks that cannot be used now.
    pub(super) sick: BTreeSet<StorageId>,
    pub(super) up: bool,
    /// Registered, and its messages arrive.
    pub(super) connected: bool,
    pub(super) busy: bool,
    /// Since when nothing has been heard from it.
    pub(super) silent_since_ms: u64,
    /// Changes that are not reported yet.
    pub(super) changes: VecDeque<(StorageId, ReplicaChange)>,
    /// Parts of full reports that are not sent yet.
    pub(super) parts: VecDeque<BlockReport>,
    /// Commands that are not executed yet.
    pub(super) commands: VecDeque<NodeCommand>,
    /// Quotas that were set: bytes, and when they must hold.
    pub(super) quotas: BTreeMap<StorageId, (u64, u64)>,
}

impl Datanode {
    pub(super) fn replica(&self, block: BlockId) -> Option<&DiskReplica> {
        let healthy = |(storage, _): &(&StorageId, _)| !self.sick.contains(storage);
        let mut disks = self.disks.iter().filter(healthy);
        disks.find_map(|(_, disk)| disk.get(&block))
    }

    pub(super) fn will_delete(&self, block: BlockId) -> bool {
        self.commands.iter().any(
            |command| matches!(command, NodeCommand::Delete { blocks } if blocks.contains(&block)),
        )
    }

    pub(super) fn remove(&mut self, block: BlockId) {
        for (storage, disk) in &mut self.disks {
            if !self.sick.contains(storage) && disk.remove(&block).is_some() {
                self.changes
                    .push_back((*storage, ReplicaChange::Deleted(block)));
                // It names no block in a later part that it reported as deleted.
                for part in &mut self.parts {
                    part.replicas.retain(|replica| replica.block != block);
                }
            }
        }
    }
}
