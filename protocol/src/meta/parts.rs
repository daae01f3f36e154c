//! The components of operations and their replies.

use serde::{Deserialize, Serialize};

use crate::ids::{BlockId, InodeId, NodeId};
use crate::name::Name;
use crate::types::{Attr, Extent, FileKind, PlacementRules, Timestamp};

/// A piece of a file whose data was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocation {
    /// File.
    pub ino: InodeId,
    /// Where its data was when it was copied.
    pub extent: Extent,
    /// Where the copy begins in the scratch file.
    pub scratch_offset: u64,
}

/// A piece of a file in a sparse block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SparsePiece {
    /// File.
    pub ino: InodeId,
    /// The piece.
    pub extent: Extent,
    /// How the file's blocks are to be placed.
    pub rules: PlacementRules,
}

/// What [`super::mutation::SetAttr`] changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttrChanges {
    /// Permission bits.
    pub mode: Option<u16>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size_bytes: Option<u64>,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last change of the content.
    pub mtime: Option<SetTime>,
    /// The caller has the file open for writing, so that neither a new size (`ftruncate(2)`) nor the time of written
    /// data needs a permission check.
    pub opened_for_writing: bool,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// The namenode's clock; needs only write permission.
    Now,
    /// A given time; only the owner may set it.
    To(Timestamp),
}

/// Flags of `renameat2(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RenameMode {
    /// Replace an existing name.
    Replace,
    /// `RENAME_NOREPLACE`
    NoReplace,
    /// `RENAME_EXCHANGE`
    Exchange,
}

/// Flags of `setxattr(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetXattrMode {
    /// Create or replace.
    Any,
    /// `XATTR_CREATE`
    Create,
    /// `XATTR_REPLACE`
    Replace,
}

/// Flags of `fallocate(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FallocateMode {
    /// Extend the file when the range ends beyond it.
    Allocate,
    /// `FALLOC_FL_KEEP_SIZE`
    AllocateKeepSize,
    /// `FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`
    PunchHole,
    /// `FALLOC_FL_ZERO_RANGE`
    ZeroRange,
    /// `FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE`
    ZeroRangeKeepSize,
}

/// New data of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileCommit {
    /// File.
    pub ino: InodeId,
    /// Pieces in the order of writing; where pieces overlap, the later one wins. With `append`, their file offsets
    /// count from the end of the file as the namenode finds it.
    pub extents: Vec<Extent>,
    /// `O_APPEND`: the namenode orders the appends of all sessions.
    pub append: bool,
    /// The new modification time; if absent, the namenode's clock.
    pub mtime: Option<Timestamp>,
}

/// The result of a [`FileCommit`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileCommitted {
    /// The attributes after it.
    pub attr: Attr,
    /// Where an append landed; 0 otherwise.
    pub append_offset: u64,
}

/// A block that its writer has finished.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealedBlock {
    /// Block.
    pub block: BlockId,
    /// Final length in bytes. 0: the session will commit nothing more of it, and it is removed as soon as no file
    /// uses it. (A sealed block with uncommitted parts is kept until then, or until the session ends.) For a block
    /// that is not sealed: nothing of it was committed.
    pub length_bytes: u64,
    /// Datanodes that acknowledged all of it.
    pub replicas: Vec<NodeId>,
}

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    /// Name.
    pub name: Name,
    /// Inode.
    pub ino: InodeId,
    /// Kind of the inode.
    pub kind: FileKind,
    /// Its attributes, if requested.
    pub attr: Option<Attr>,
}

/// Totals of the file system, as in `statvfs(3)`. Where quotas leave less, the totals of the quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatFs {
    /// Bytes that files could hold at the default replication.
    pub total_bytes: u64,
    /// How many of these bytes are free.
    pub free_bytes: u64,
    /// Number of inodes that could exist.
    pub total_inodes: u64,
    /// How many of them are free.
    pub free_inodes: u64,
    /// Free bytes that can be written at present: 0 while writes wait or are refused.
    pub available_bytes: u64,
}
