//! The namespace.

mod command;

use std::io::{Read, Write};

use harvestfs_protocol::{
    admin::FsckFinding,
    error::FsError,
    ids::{BlockId, ClusterId, InodeId, NodeId, SessionId, StorageId},
    meta::{MetaOp, MetaReply},
    node::ServerDescription,
    types::{Credentials, PlacementRules, Timestamp},
};

pub use command::{Applied, BlockChange, COMMAND_VERSION, Command, DecodeError, Effects, Outcome};

/// The namespace.
#[derive(Debug, Default)]
pub struct Namespace {}

/// What the namespace knows of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    /// The block.
    pub block: BlockId,
    /// Bytes that a replica must have, counted from the block's start.
    pub committed_bytes: u64,
    /// Bytes that files use, each use counted.
    pub live_bytes: u64,
    /// How to place it.
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

/// What the namespace knows of a datanode.
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
    pub reimages: &'a [Timestamp],
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
    /// Bytes that files use of blocks, each use counted, one copy.
    pub live_bytes: u64,
    /// Memory of the tables in bytes, estimated.
    pub memory_bytes: u64,
}

/// What [`Command::Format`] laid down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formatted {
    /// The cluster.
    pub cluster: ClusterId,
    /// Size at which clients start a new block, in bytes.
    pub block_bytes: u64,
    /// Rules for files below directories that set none.
    pub default_rules: PlacementRules,
}

/// Why a snapshot could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Reading or writing failed; a snapshot that ends early is `UnexpectedEof`.
    #[error("cannot read or write the snapshot: {0}")]
    Io(#[from] std::io::Error),
    /// Another version wrote it, or it is no snapshot.
    #[error("not a snapshot that this software reads: {0}")]
    Version(String),
    /// A checksum does not match, or the content contradicts itself.
    #[error("the snapshot is damaged: {0}")]
    Damaged(String),
}

impl Namespace {
    /// An empty namespace; [`Command::Format`] comes first.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies a command. Deterministic: the state afterwards and the outcome depend on the state
    /// before and on the command only.
    ///
    /// # Errors
    /// Why the command was refused; the namespace is unchanged then.
    pub fn apply(&mut self, _command: &Command) -> Result<Applied, FsError> {
        Err(FsError::Internal("not built yet".into()))
    }

    /// Answers a read-only operation. `Opened.located` and `Located` are left empty, and the sizes
    /// in `StatFs` 0: they are not the namespace's.
    ///
    /// # Errors
    /// Why the operation was refused.
    pub fn query(&self, _credentials: &Credentials, _op: &MetaOp) -> Result<MetaReply, FsError> {
        Err(FsError::Internal("not built yet".into()))
    }

    /// What [`Command::Format`] laid down; none before it.
    #[must_use]
    pub fn formatted(&self) -> Option<Formatted> {
        None
    }

    /// The outcome of a mutation that was applied before and that the client has not confirmed.
    #[must_use]
    pub fn remembered_reply(&self, _session: SessionId, _sequence: u64) -> Option<&Outcome> {
        None
    }

    /// The inode that an Unlink, RemoveDir or Rename would take the last name from.
    #[must_use]
    pub fn removal_target(&self, _op: &MetaOp) -> Option<InodeId> {
        None
    }

    /// Whether the inode exists, orphans included.
    #[must_use]
    pub fn exists(&self, _ino: InodeId) -> bool {
        false
    }

    /// All blocks, in ascending order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockView> {
        std::iter::empty()
    }

    /// One block.
    #[must_use]
    pub fn block(&self, _block: BlockId) -> Option<BlockView> {
        None
    }

    /// All datanodes ever registered, in the order of their numbers.
    pub fn servers(&self) -> impl Iterator<Item = ServerView<'_>> {
        std::iter::empty()
    }

    /// The datanode of a server.
    #[must_use]
    pub fn server(&self, _name: &str) -> Option<ServerView<'_>> {
        None
    }

    /// All sessions, oldest first.
    pub fn sessions(&self) -> impl Iterator<Item = SessionView<'_>> {
        std::iter::empty()
    }

    /// One session.
    #[must_use]
    pub fn session(&self, _session: SessionId) -> Option<SessionView<'_>> {
        None
    }

    /// Inodes without a name that are kept because somebody holds them open.
    pub fn orphans(&self) -> impl Iterator<Item = InodeId> {
        std::iter::empty()
    }

    /// Totals.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts::default()
    }

    /// Writes the whole state. Equal states write equal bytes.
    ///
    /// # Errors
    /// [`SnapshotError::Io`].
    pub fn write_snapshot(&self, _to: &mut impl Write) -> Result<(), SnapshotError> {
        Err(SnapshotError::Damaged("not built yet".into()))
    }

    /// Reads what [`Namespace::write_snapshot`] wrote, up to its end and no further. Never panics,
    /// and never allocates what a damaged snapshot merely claims.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn read_snapshot(_from: &mut impl Read) -> Result<Self, SnapshotError> {
        Err(SnapshotError::Damaged("not built yet".into()))
    }

    /// Compares everything that is kept twice: link counts, live bytes, extents, names. Empty: all
    /// is well. At most 1,000 findings.
    #[must_use]
    pub fn check(&self) -> Vec<FsckFinding> {
        Vec::new()
    }
}
