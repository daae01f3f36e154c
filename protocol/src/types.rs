//! What several messages share.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::{BlockId, InodeId, NodeId, StorageId};
use crate::token::BlockToken;

pub use crate::timestamp::Timestamp;

/// What an inode is.
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

/// A bit of [`Attr::mode`] beyond POSIX's: the inode is a part of a snapshot of a directory, and
/// cannot be changed.
pub const MODE_FROZEN: u16 = 0o100_000;

/// The attributes of an inode, as `stat(2)` shows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// The inode.
    pub ino: InodeId,
    /// What it is.
    pub kind: FileKind,
    /// Permission bits with set-user-id, set-group-id and sticky (`0o7777`), and [`MODE_FROZEN`].
    pub mode: u16,
    /// Number of names (for a directory: 2 plus its subdirectories).
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device.
    pub rdev: u32,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Bytes that extents cover (one copy; holes don't count).
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Grows with each change of the content, its length included. Shows a cache whether what it
    /// has is still the file.
    pub content_version: u64,
}

impl Attr {
    /// The bits of the mode that POSIX knows.
    #[must_use]
    pub fn permission_bits(&self) -> u16 {
        self.mode & !MODE_FROZEN
    }

    /// Whether it is a part of a snapshot of a directory, which cannot be changed.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.mode & MODE_FROZEN != 0
    }
}

/// What a write by others than root leaves of a mode: whoever runs the file does not become its owner or its group.
#[must_use]
pub fn without_set_id(mode: u16) -> u16 {
    // Without group execution the bit means mandatory locking, which a write leaves.
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
    /// Root, which may do everything that POSIX lets root do.
    #[must_use]
    pub fn root() -> Self {
        Self::default()
    }
}

/// A piece of a file: `length` bytes at `file_offset` are found at `block_offset` of `block`.
/// What no extent covers, below the file's size, is a hole and reads as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Where in the file, in bytes.
    pub file_offset: u64,
    /// How many bytes; never 0.
    pub length_bytes: u64,
    /// In which block.
    pub block: BlockId,
    /// Where in the block, in bytes.
    pub block_offset: u64,
}

impl Extent {
    /// The first file offset after it.
    #[must_use]
    pub fn file_end(&self) -> u64 {
        self.file_offset + self.length_bytes
    }

    /// Its block, and its first byte.
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

/// A block of a file, and a byte of the file that is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileBlock {
    /// The block.
    pub block: BlockId,
    /// Where in the file, in bytes.
    pub file_offset: u64,
}

/// How to reach a datanode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The number that lists of replicas use.
    pub node: NodeId,
    /// The name in its certificate.
    pub name: String,
    /// Where its data service listens.
    pub data_addr: SocketAddr,
    /// Its rack.
    pub rack: String,
}

/// A block, where its replicas are and the right to use them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// The block.
    pub block: BlockId,
    /// Bytes that commits have made part of files: no byte at or above it may be read.
    pub committed_bytes: u64,
    /// Datanodes that hold it, best first for the asking client. Empty: every replica is lost or
    /// not known yet.
    pub replicas: Vec<NodeId>,
    /// How many replicas it is to have in the end: as many as its file wants, or one on each server if
    /// the cluster has fewer.
    pub due_replicas: u8,
    /// The right to it.
    pub token: BlockToken,
}

/// Blocks together with the datanodes that their replica lists name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// The blocks.
    pub blocks: Vec<BlockInfo>,
    /// Each datanode named above, once.
    pub nodes: Vec<NodeInfo>,
}

/// What a volume's disk is, for files that ask for a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StorageClass {
    /// A rotating disk, or not said.
    #[default]
    Disk,
    /// Flash.
    Ssd,
    /// Memory: gone with the power.
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
    /// Whether constraints are hard.
    pub durability: Durability,
    /// The class of volume asked for, if any.
    pub class: Option<StorageClass>,
}

/// A volume as a heartbeat describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// Which.
    pub storage: StorageId,
    /// What its disk is.
    pub class: StorageClass,
    /// What the owner lets us use, in bytes.
    pub quota_bytes: u64,
    /// What we use of it, reservations included, in bytes.
    pub used_bytes: u64,
    /// False: the volume cannot be used; its replicas count as lost.
    pub healthy: bool,
    /// While more is used than the quota allows: milliseconds until the datanode gives up replicas
    /// of its own choice to get below it. 0 from then on until it is.
    pub shrinks_in_ms: Option<u64>,
}
