//! What the server does with which operation.

use harvestfs_protocol::meta::MetaOp;
use harvestfs_protocol::types::FileKind;

/// Whether an operation creates a file that its session holds.
pub(super) fn creates_file(op: &MetaOp) -> bool {
    matches!(
        op,
        MetaOp::Create {
            kind: FileKind::Regular,
            ..
        } | MetaOp::CreateScratch { .. }
    )
}

/// What an operation is to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Changes nothing.
    ReadOnly,
    /// Journaled, and answered when it is durable.
    Awaited,
    /// Journaled, and answered at once.
    Relaxed,
    /// Neither journaled nor remembered.
    Housekeeping,
}

/// What is not to be answered before it is durable, and what need not be journaled. With `relaxed`, the
/// asker may be answered early where that is its choice.
pub(super) fn class_of(op: &MetaOp, relaxed: bool) -> Class {
    match op {
        MetaOp::Lookup { .. }
        | MetaOp::GetAttr { .. }
        | MetaOp::Access { .. }
        | MetaOp::ReadDir { .. }
        | MetaOp::ReadLink { .. }
        | MetaOp::Open { .. }
        | MetaOp::GetExtents { .. }
        | MetaOp::Locate { .. }
        | MetaOp::GetXattr { .. }
        | MetaOp::ListXattr { .. }
        | MetaOp::StatFs { .. }
        | MetaOp::FindSparse { .. } => Class::ReadOnly,
        MetaOp::SetAttr { .. } if relaxed => Class::Relaxed,
        MetaOp::SetAttr { .. }
        | MetaOp::Create { .. }
        | MetaOp::MakeDir { .. }
        | MetaOp::Symlink { .. }
        | MetaOp::Link { .. }
        | MetaOp::Unlink { .. }
        | MetaOp::RemoveDir { .. }
        | MetaOp::RemoveToTrash { .. }
        | MetaOp::CreateSnapshot { .. }
        | MetaOp::RemoveSnapshot { .. }
        | MetaOp::Rename { .. }
        | MetaOp::SetXattr { .. }
        | MetaOp::RemoveXattr { .. }
        | MetaOp::Fallocate { .. }
        | MetaOp::CloneRange { .. }
        | MetaOp::AllocateBlocks { .. }
        | MetaOp::CreateScratch { .. }
        | MetaOp::Relocate { .. }
        | MetaOp::Commit { durable: true, .. } => Class::Awaited,
        MetaOp::Commit { durable: false, .. } | MetaOp::SealBlocks { .. } => Class::Relaxed,
        MetaOp::Release { .. }
        | MetaOp::ReturnDelegations { .. }
        | MetaOp::ReportBadReplica { .. } => Class::Housekeeping,
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::InodeId;
    use harvestfs_protocol::meta::AttrChanges;

    use super::*;

    #[test]
    fn what_is_relaxed_is_answered_before_it_is_durable_and_nothing_else() {
        let class = |op| class_of(&op, false);
        let commit = |durable| MetaOp::Commit {
            files: vec![],
            durable,
        };
        assert_eq!(class(commit(true)), Class::Awaited);
        assert_eq!(class(commit(false)), Class::Relaxed);
        assert_eq!(class(MetaOp::SealBlocks { blocks: vec![] }), Class::Relaxed);
        let ino = InodeId::ROOT;
        let changes = AttrChanges::default();
        let set = MetaOp::SetAttr { ino, changes };
        assert_eq!(class_of(&set, false), Class::Awaited);
        assert_eq!(class_of(&set, true), Class::Relaxed);
        let list = MetaOp::ListXattr { ino };
        assert_eq!(class_of(&list, true), Class::ReadOnly);
        let name = b"user.a".to_vec();
        let remove = MetaOp::RemoveXattr { ino, name };
        assert_eq!(class_of(&remove, true), Class::Awaited);
        assert_eq!(class(MetaOp::StatFs { ino }), Class::ReadOnly);
        let release = MetaOp::Release { inodes: vec![] };
        assert_eq!(class(release), Class::Housekeeping);
    }
}
