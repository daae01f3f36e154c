//! The version since which each message exists.
//!
//! There is no wildcard: a new kind does not compile until it is listed here. Numbers, names and other plain values
//! have no kinds; neither have structs, which never change once released. The kind of a value within a message (a
//! mode, for example) counts for the message that carries it.

use std::path::PathBuf;

use super::{Version, Versioned};
use crate::admin::{AdminReply, AdminRequest};
use crate::backup::{BackupReply, BackupRequest};
use crate::data::{DataRequest, Opening, Packet, ReadPacket, WriteAck};
use crate::error::{DataError, FsError};
use crate::group::GroupRequest;
use crate::history::{HistoryReply, HistoryRequest};
use crate::meta::{Housekeeping, MetaOp, MetaReply, Mutation, Notice, Query};
use crate::node::{NodeCommand, NodeReply, NodeRequest};
use crate::peer::{PeerReply, PeerRequest};
use crate::placement::{PlacementReply, PlacementRequest};
use crate::rpc::{Reply, Request};
use crate::short_circuit::FileRequest;
use crate::upgrade::{UpgradeReply, UpgradeRequest};

const V0_2: Version = Version::V0_2;

impl Versioned for Request {
    fn since(&self) -> Version {
        match self {
            Self::OpenSession(_)
            | Self::KeepAlive
            | Self::AckInvalidation { .. }
            | Self::CloseSession => V0_2,
            Self::Meta(call) => call.op.since(),
            Self::Node(request) => request.since(),
            Self::Admin(request) => request.since(),
            Self::Peer(call) => call.request.since(),
        }
    }
}

impl Versioned for Reply {
    fn since(&self) -> Version {
        match self {
            Self::SessionOpened(_) | Self::Done => V0_2,
            Self::Meta(reply) => reply.since(),
            Self::Mutated(mutated) => mutated.reply.since(),
            Self::Node(reply) => reply.since(),
            Self::Admin(reply) => reply.since(),
            Self::Peer(answer) => answer.reply.since(),
        }
    }
}

impl<T: Versioned, E: Versioned> Versioned for Result<T, E> {
    fn since(&self) -> Version {
        match self {
            Ok(value) => value.since(),
            Err(error) => error.since(),
        }
    }

    fn older(&self) -> Option<Self> {
        match self {
            Ok(value) => value.older().map(Ok),
            Err(error) => error.older().map(Err),
        }
    }
}

impl Versioned for MetaOp {
    fn since(&self) -> Version {
        match self {
            Self::Query(query) => query.since(),
            Self::Mutation(call) => call.mutation.since(),
            Self::Housekeeping(operation) => operation.since(),
        }
    }
}

impl Versioned for Query {
    fn since(&self) -> Version {
        match self {
            Self::Lookup(_)
            | Self::GetAttr(_)
            | Self::Access(_)
            | Self::ReadDir(_)
            | Self::ReadLink(_)
            | Self::Open(_)
            | Self::GetExtents(_)
            | Self::Locate(_)
            | Self::GetXattr(_)
            | Self::ListXattr(_)
            | Self::StatFs(_)
            | Self::FindSparse(_)
            | Self::GetUsage(_) => V0_2,
        }
    }
}

impl Versioned for Mutation {
    fn since(&self) -> Version {
        match self {
            Self::SetAttr(_)
            | Self::Create(_)
            | Self::MakeDir(_)
            | Self::Symlink(_)
            | Self::Link(_)
            | Self::Unlink(_)
            | Self::RemoveDir(_)
            | Self::Rename(_)
            | Self::SetXattr(_)
            | Self::RemoveXattr(_)
            | Self::Fallocate(_)
            | Self::CloneRange(_)
            | Self::AllocateBlocks(_)
            | Self::Commit(_)
            | Self::SealBlocks(_)
            | Self::CreateScratch(_)
            | Self::Relocate(_)
            | Self::RemoveToTrash(_)
            | Self::CreateSnapshot(_)
            | Self::RemoveSnapshot(_) => V0_2,
        }
    }
}

impl Versioned for Housekeeping {
    fn since(&self) -> Version {
        match self {
            Self::Release(_) | Self::ReportBadReplica(_) | Self::ReturnDelegations(_) => V0_2,
        }
    }
}

impl Versioned for MetaReply {
    fn since(&self) -> Version {
        match self {
            Self::Done
            | Self::Attr(_)
            | Self::Bytes(_)
            | Self::Names(_)
            | Self::Entries { .. }
            | Self::Opened { .. }
            | Self::Extents { .. }
            | Self::Located(_)
            | Self::Removed(_)
            | Self::Renamed { .. }
            | Self::StatFs(_)
            | Self::SparsePieces { .. }
            | Self::Relocated(_)
            | Self::Created { .. }
            | Self::Usage(_) => V0_2,
            Self::Committed(files) => files
                .iter()
                .filter_map(|file| file.as_ref().err())
                .map(Versioned::since)
                .max()
                .unwrap_or(V0_2),
        }
    }
}

impl Versioned for Notice {
    fn since(&self) -> Version {
        match self {
            Self::Invalidate { .. }
            | Self::InvalidateAll { .. }
            | Self::Recall { .. }
            | Self::Namenodes { .. } => V0_2,
        }
    }
}

impl Versioned for NodeRequest {
    fn since(&self) -> Version {
        match self {
            Self::Register(_)
            | Self::Heartbeat(_)
            | Self::BlockReport(_)
            | Self::IncrementalReport(_)
            | Self::Stopping => V0_2,
        }
    }
}

impl Versioned for NodeReply {
    fn since(&self) -> Version {
        match self {
            Self::Registered(_) | Self::Accepted => V0_2,
            Self::Heartbeat(reply) => {
                let commands = reply.commands.iter().map(Versioned::since);
                commands.max().unwrap_or(V0_2)
            }
        }
    }
}

impl Versioned for NodeCommand {
    fn since(&self) -> Version {
        match self {
            Self::Replicate { .. }
            | Self::Delete { .. }
            | Self::Seal { .. }
            | Self::SetQuota { .. }
            | Self::ReportBlocks { .. }
            | Self::Verify { .. }
            | Self::Namenodes { .. } => V0_2,
        }
    }
}

impl Versioned for AdminRequest {
    fn since(&self) -> Version {
        match self {
            Self::Status
            | Self::Nodes
            | Self::Fsck
            | Self::Snapshot
            | Self::AcceptLoss
            | Self::Quarantine { .. }
            | Self::Classes
            | Self::Harvest(_) => V0_2,
            Self::History(request) => request.since(),
            Self::Placement(request) => request.since(),
            Self::Group(request) => request.since(),
            Self::Upgrade(request) => request.since(),
            Self::Backup(request) => request.since(),
        }
    }
}

impl Versioned for AdminReply {
    fn since(&self) -> Version {
        match self {
            Self::Done
            | Self::Status(_)
            | Self::Nodes(_)
            | Self::Fsck(_)
            | Self::Quarantine(_)
            | Self::Classes(_)
            | Self::Group(_) => V0_2,
            Self::History(reply) => reply.since(),
            Self::Placement(reply) => reply.since(),
            Self::Upgrade(reply) => reply.since(),
            Self::Backup(reply) => reply.since(),
        }
    }
}

impl Versioned for BackupRequest {
    fn since(&self) -> Version {
        match self {
            Self::Begin { .. } | Self::Read { .. } => V0_2,
        }
    }
}

impl Versioned for BackupReply {
    fn since(&self) -> Version {
        match self {
            Self::Begun(_) | Self::Part(_) => V0_2,
        }
    }
}

impl Versioned for HistoryRequest {
    fn since(&self) -> Version {
        match self {
            Self::Import(_) | Self::Tenants { .. } | Self::Overview | Self::Analyse => V0_2,
        }
    }
}

impl Versioned for HistoryReply {
    fn since(&self) -> Version {
        match self {
            Self::Imported(_) | Self::Refused { .. } | Self::Tenants { .. } | Self::Overview(_) => {
                V0_2
            }
        }
    }
}

impl Versioned for PlacementRequest {
    fn since(&self) -> Version {
        match self {
            Self::Report { .. }
            | Self::SetPolicy(_)
            | Self::Repair(_)
            | Self::Impact { .. }
            | Self::Release { .. }
            | Self::Wave { .. }
            | Self::StartMaintenance { .. }
            | Self::EndMaintenance { .. }
            | Self::SetQuota { .. }
            | Self::Balance(_) => V0_2,
        }
    }
}

impl Versioned for PlacementReply {
    fn since(&self) -> Version {
        match self {
            Self::Done
            | Self::Report(_)
            | Self::Repair(_)
            | Self::Impact(_)
            | Self::Maintenance { .. }
            | Self::Balance(_)
            | Self::Wave(_) => V0_2,
        }
    }
}

impl Versioned for GroupRequest {
    fn since(&self) -> Version {
        match self {
            Self::List | Self::Add(_) | Self::Remove(_) | Self::Transfer(_) => V0_2,
        }
    }
}

impl Versioned for UpgradeRequest {
    fn since(&self) -> Version {
        match self {
            Self::Status | Self::Finish => V0_2,
            #[cfg(feature = "next-version")]
            Self::Probe => Version::NEXT,
        }
    }
}

impl Versioned for UpgradeReply {
    fn since(&self) -> Version {
        match self {
            Self::Status(_) => V0_2,
            #[cfg(feature = "next-version")]
            Self::Probes(_) => Version::NEXT,
        }
    }
}

impl Versioned for PeerRequest {
    fn since(&self) -> Version {
        match self {
            Self::Vote { .. }
            | Self::Append { .. }
            | Self::Transfer { .. }
            | Self::Identify
            | Self::TakeSnapshot { .. }
            | Self::ReadSnapshot { .. } => V0_2,
        }
    }
}

impl Versioned for PeerReply {
    fn since(&self) -> Version {
        match self {
            Self::Voted { .. }
            | Self::Appended
            | Self::AppendedUpTo(_)
            | Self::Conflict
            | Self::Outvoted(_)
            | Self::Transferred
            | Self::Mistaken
            | Self::Forgetful
            | Self::Outside
            | Self::Identity { .. }
            | Self::Taking(_)
            | Self::Snapshot(_)
            | Self::NoSnapshot
            | Self::Left => V0_2,
        }
    }
}

impl Versioned for Opening {
    fn since(&self) -> Version {
        self.body.since()
    }
}

impl Versioned for DataRequest {
    fn since(&self) -> Version {
        match self {
            Self::Write(_) | Self::Read(_) | Self::Seal(_) | Self::ShortCircuit { .. } => V0_2,
        }
    }
}

impl Versioned for Packet {
    fn since(&self) -> Version {
        match self {
            Self::Data { .. } | Self::Sync | Self::Seal { .. } => V0_2,
        }
    }
}

impl Versioned for WriteAck {
    fn since(&self) -> Version {
        match self {
            Self::Ready | Self::Acked { .. } => V0_2,
            Self::Failed { error, .. } => error.since(),
        }
    }

    fn older(&self) -> Option<Self> {
        match self {
            Self::Ready | Self::Acked { .. } => None,
            Self::Failed { node, error } => Some(Self::Failed {
                node: *node,
                error: error.older()?,
            }),
        }
    }
}

impl Versioned for ReadPacket {
    fn since(&self) -> Version {
        match self {
            Self::Data { .. } => V0_2,
            Self::Failed(error) => error.since(),
        }
    }

    fn older(&self) -> Option<Self> {
        match self {
            Self::Data { .. } => None,
            Self::Failed(error) => error.older().map(Self::Failed),
        }
    }
}

impl Versioned for FileRequest {
    fn since(&self) -> Version {
        V0_2
    }
}

impl Versioned for FsError {
    fn since(&self) -> Version {
        match self {
            Self::NotFound
            | Self::Exists
            | Self::NotADirectory
            | Self::IsADirectory
            | Self::NotEmpty
            | Self::PermissionDenied
            | Self::NotPermitted
            | Self::NameTooLong
            | Self::TooDeep
            | Self::InvalidArgument(_)
            | Self::TooManyLinks
            | Self::FileTooLarge
            | Self::NoAttribute
            | Self::AttributeTooLarge
            | Self::NotSupported(_)
            | Self::Stale
            | Self::NoSpace
            | Self::InsufficientDiversity { .. }
            | Self::Busy { .. }
            | Self::SessionExpired
            | Self::RoleDenied(_)
            | Self::Protocol(_)
            | Self::Internal(_)
            | Self::QuotaExceeded
            | Self::ReadOnly
            | Self::Recovery(_)
            | Self::PeerLimit { .. }
            | Self::TooFewDatanodes(_)
            | Self::NotLeader { .. }
            | Self::ClusterVersion { .. }
            | Self::Unfit(_) => V0_2,
        }
    }

    fn older(&self) -> Option<Self> {
        Some(Self::Internal(self.to_string()))
    }
}

impl Versioned for DataError {
    fn since(&self) -> Version {
        match self {
            Self::Busy { .. }
            | Self::NoSuchReplica
            | Self::ShortReplica { .. }
            | Self::ReplicaExists
            | Self::Corrupt { .. }
            | Self::BadToken(_)
            | Self::TokenExpired
            | Self::NoSpace
            | Self::OutOfOrder(_)
            | Self::Disk(_)
            | Self::Downstream(_)
            | Self::Stopping
            | Self::Protocol(_)
            | Self::TooManyStreams { .. } => V0_2,
        }
    }

    fn older(&self) -> Option<Self> {
        Some(Self::Protocol(self.to_string()))
    }
}

/// Values without kinds.
macro_rules! plain {
    ($($value:ty),*) => {
        $(impl Versioned for $value {
            fn since(&self) -> Version {
                V0_2
            }
        })*
    };
}

plain!(
    (),
    u8,
    u32,
    i32,
    u64,
    String,
    &str,
    Vec<u8>,
    Option<PathBuf>
);

impl<A: Versioned, B: Versioned> Versioned for (A, B) {
    fn since(&self) -> Version {
        self.0.since().max(self.1.since())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::NodeId;

    #[test]
    fn an_error_can_always_be_told() {
        let error = FsError::NotLeader { leader: None };
        let told: Result<Reply, FsError> = Err(error.clone());
        assert_eq!(
            told.older(),
            Some(Err(FsError::Internal(error.to_string())))
        );
        assert_eq!(Ok::<_, FsError>(Reply::Done).older(), None);
        let failed = WriteAck::Failed {
            node: NodeId(1),
            error: DataError::NoSpace,
        };
        assert!(matches!(
            failed.older(),
            Some(WriteAck::Failed { error: DataError::Protocol(text), .. }) if text.contains("quota")
        ));
    }

    #[test]
    fn messages_that_carry_others_are_as_new_as_these() {
        let call = Request::Admin(AdminRequest::Upgrade(UpgradeRequest::Status));
        assert_eq!(call.since(), Version::V0_2);
        #[cfg(feature = "next-version")]
        assert_eq!(
            Request::Admin(AdminRequest::Upgrade(UpgradeRequest::Probe)).since(),
            Version::NEXT
        );
    }
}
