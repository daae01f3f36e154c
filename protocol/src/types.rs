//! Types that several messages share.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::{BlockId, InodeId, NodeId, StorageId};
use crate::token::BlockToken;

pub use crate::timestamp::Timestamp;

/// The kind of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A Unix domain socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// A bit of [`Attr::mode`] beyond those of POSIX: the inode is part of a snapshot of a directory, and cannot be
/// changed.
pub const MODE_FROZEN: u16 = 0o100_000;

/// The attributes of an inode, as `stat(2)` shows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// The inode.
    pub ino: InodeId,
    /// Its kind.
    pub kind: FileKind,
    /// Permission bits with set-user-id, set-group-id and sticky (`0o7777`), and [`MODE_FROZEN`].
    pub mode: u16,
    /// Number of names (for a directory: 2 plus its subdirectories).
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number, if it is a device.
    pub rdev: u32,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Bytes that extents cover (one copy; holes do not count).
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Grows with each change of the content, including its length. Tells a cache whether its data is still current.
    pub content_version: u64,
}

impl Attr {
    /// Returns the mode bits that POSIX defines.
    #[must_use]
    pub fn permission_bits(&self) -> u16 {
        self.mode & !MODE_FROZEN
    }

    /// Whether it is part of a snapshot of a directory, which cannot be changed.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.mode & MODE_FROZEN != 0
    }
}

/// Returns the mode after a write by a user other than root: executing the file must no longer confer its owner's or
/// group's identity.
#[must_use]
pub fn without_set_id(mode: u16) -> u16 {
    // Without group execute permission, the set-group-id bit means mandatory locking, which a write preserves.
    match mode & 0o010 {
        0 => mode & !0o4000,
        _ => mode & !0o6000,
    }
}

/// The user on whose behalf a request is made. Asserted by the mount, which is authenticated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl Credentials {
    /// Returns the credentials of root, which may do everything that POSIX lets root do.
    #[must_use]
    pub fn root() -> Self {
        Self::default()
    }
}

/// A piece of a file: `length_bytes` bytes at `file_offset` are at `block_offset` of `block`. Ranges below the file's
/// size that no extent covers are holes and read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Offset in the file in bytes.
    pub file_offset: u64,
    /// Length in bytes; never 0.
    pub length_bytes: u64,
    /// The block.
    pub block: BlockId,
    /// Offset in the block in bytes.
    pub block_offset: u64,
}

impl Extent {
    /// The first file offset after it.
    #[must_use]
    pub fn file_end(&self) -> u64 {
        self.file_offset + self.length_bytes
    }

    /// Returns its block and its first byte.
    #[must_use]
    pub fn start(&self) -> FileBlock {
        FileBlock {
            block: self.block,
            file_offset: self.file_offset,
        }
    }

    /// The first block offset after it.
    #[must_use]
    pub fn block_end(&self) -> u64 {
        self.block_offset + self.length_bytes
    }
}

/// A block of a file, and the offset of a byte of the file that is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileBlock {
    /// The block.
    pub block: BlockId,
    /// Offset in the file in bytes.
    pub file_offset: u64,
}

/// How to contact a datanode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The number by which lists of replicas refer to it.
    pub node: NodeId,
    /// The name in its certificate.
    pub name: String,
    /// The address at which its data service listens.
    pub data_addr: SocketAddr,
    /// Its rack.
    pub rack: String,
}

/// A block, the locations of its replicas, and a token to access it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// The block.
    pub block: BlockId,
    /// Bytes that commits have made part of files: no byte at or above it may be read.
    pub committed_bytes: u64,
    /// Datanodes that hold it, best first for the requesting client. Empty: every replica is lost, or none is known
    /// yet.
    pub replicas: Vec<NodeId>,
    /// How many replicas it is to have in the end: as many as its file wants, or one on each server if the cluster
    /// has fewer servers.
    pub due_replicas: u8,
    /// A token to access it.
    pub token: BlockToken,
}

/// Blocks together with the datanodes that their replica lists name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// The blocks.
    pub blocks: Vec<BlockInfo>,
    /// Each datanode named above, exactly once.
    pub nodes: Vec<NodeInfo>,
}

/// The medium of a volume, for files that request a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StorageClass {
    /// A rotating disk, or unspecified.
    #[default]
    Disk,
    /// Flash.
    Ssd,
    /// Memory: lost on a power failure.
    Memory,
}

/// How strictly the placement constraints of a file hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Durability {
    /// A block that cannot be placed within the constraints is refused.
    #[default]
    Strict,
    /// Constraints are relaxed one at a time.
    Space,
}

/// How a new block is to be placed; inherited from the directory unless the file says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PlacementRules {
    /// Replicas wanted, 1 to [`crate::limits::REPLICATION_MAX`].
    pub replication: u8,
    /// Whether the constraints are hard.
    pub durability: Durability,
    /// The requested class of volume, if any.
    pub class: Option<StorageClass>,
}

/// A volume, as described in a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// Its id.
    pub storage: StorageId,
    /// Its medium.
    pub class: StorageClass,
    /// The quota that the owner grants, in bytes.
    pub quota_bytes: u64,
    /// Bytes of the quota in use, including reservations.
    pub used_bytes: u64,
    /// False: the volume cannot be used; its replicas count as lost.
    pub healthy: bool,
    /// While usage exceeds the quota: milliseconds until the datanode chooses replicas itself and deletes them to get
    /// below it. Stays 0 from then until it is below the quota.
    pub shrinks_in_ms: Option<u64>,
}
