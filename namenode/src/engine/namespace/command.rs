//! The commands that change a namespace, their outcomes and their effects.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, ClusterId, InodeId, NodeId, SessionId, StorageId};
use harvestfs_protocol::meta::{MetaReply, Mutation};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::node::ServerDescription;
use harvestfs_protocol::timeline::Epoch;
use harvestfs_protocol::types::{Credentials, PlacementRules, Timestamp};
use harvestfs_protocol::version::{Version, Versioned};
use serde::{Deserialize, Serialize};

use super::operation::Operation;

/// The version of the encoding of [`Command`]. Released variants never change: a command with other
/// fields is a new variant after the existing ones, and [`Command::since`] returns the version that added it.
pub const COMMAND_VERSION: u8 = 3;
/// Earlier versions that can still be read: 1 had no epochs, 2 no editions.
const VERSIONS_BEFORE: [u8; 2] = [1, 2];
const _: () = assert!(
    VERSIONS_BEFORE[0] < VERSIONS_BEFORE[1] && VERSIONS_BEFORE[1] < COMMAND_VERSION,
    "a version was given twice"
);

/// A change of the namespace: one record of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Makes the root directory; the first command of a cluster, and only the first.
    Format {
        /// The cluster.
        cluster: ClusterId,
        /// When.
        now: Timestamp,
        /// Owner of the root directory.
        root_uid: u32,
        /// Group of the root directory.
        root_gid: u32,
        /// Size at which clients start a new block, in bytes.
        block_bytes: u64,
        /// Rules for files below directories that set none.
        default_rules: PlacementRules,
    },
    /// A datanode registers. Outcome: [`Outcome::Node`], always the same one for a server's name.
    RegisterServer {
        /// Its server; replaces the previous description.
        server: ServerDescription,
        /// All its volumes.
        storages: Vec<StorageId>,
        /// When.
        now: Timestamp,
    },
    /// A client opens a session. Outcome: [`Outcome::Session`].
    OpenSession {
        /// The name in its certificate.
        client: String,
        /// When.
        now: Timestamp,
    },
    /// A client's session ends: its blocks are sealed at the committed length, or freed when no file
    /// uses them.
    CloseSession {
        /// Its session.
        session: SessionId,
        /// When.
        now: Timestamp,
    },
    /// A metadata operation of a client. Outcome: [`Outcome::Meta`], or [`Outcome::Blocks`] for
    /// [`Mutation::AllocateBlocks`].
    Mutate {
        /// The client's session.
        session: SessionId,
        /// Number of the mutation in the session, from 1.
        sequence: u64,
        /// Replies below this number are forgotten.
        answered_below: u64,
        /// The user on whose behalf it is done.
        credentials: Credentials,
        /// When.
        now: Timestamp,
        /// Whether the inode that loses its last name by this removal (see
        /// [`super::Namespace::removal_target`]) is open somewhere: then it is kept as an orphan.
        held_elsewhere: bool,
        /// What to do.
        op: Mutation,
    },
    /// No session holds these orphans any more: remove them. Other inodes are skipped.
    ReleaseOrphans {
        /// Inodes.
        inodes: Vec<InodeId>,
        /// When.
        now: Timestamp,
    },
    /// An operator changed something while the cluster ran. Outcome: [`Outcome::Done`].
    Operate(Operation),
    /// The retention of these inodes is over: remove them permanently, a bounded number of inodes per
    /// command. Inodes that are not in the trash are skipped. Files become orphans: the caller
    /// releases the ones that no session holds.
    PurgeTrash {
        /// Inodes in the trash.
        inodes: Vec<InodeId>,
        /// When.
        now: Timestamp,
    },
    /// These files get their final number of replicas. Files that are not due yet are skipped.
    RaiseReplication {
        /// Files.
        inodes: Vec<InodeId>,
        /// When.
        now: Timestamp,
    },
    /// The lifetime of these entries is over: they are moved to the trash, to be purged immediately.
    /// Entries that are not due yet are skipped.
    RemoveExpired {
        /// Names in directories.
        entries: Vec<(InodeId, Name)>,
        /// When.
        now: Timestamp,
    },
    /// The namenode starts, or an operator has it continue without the records that it lacks.
    BeginEpoch {
        /// The epoch.
        epoch: Epoch,
        /// Its first record: this one, or the first entry of the term in which it begins.
        first_record: u64,
        /// Everything that other timelines wrote before it is given up.
        gives_up: bool,
        /// When.
        now: Timestamp,
    },
    /// From here on commands are carried out by the rules of this edition.
    BeginEdition {
        /// The edition: at most [`super::EDITION`], and later than the current one.
        edition: u8,
        /// When.
        now: Timestamp,
    },
    /// From here on, records and snapshots may contain what this version of the cluster adds, and programs
    /// that are older can no longer be part of the cluster.
    RaiseVersion {
        /// The version, later than the current one.
        version: Version,
        /// When.
        now: Timestamp,
    },
    /// The lease of a session has expired, or the session has come back. Outcome: [`Outcome::Done`].
    NoteLease {
        /// The session.
        session: SessionId,
        /// Whether it has expired.
        has_lapsed: bool,
    },
    /// A record that exists since the next version and is only counted. Always the last variant: otherwise
    /// the two builds would number other variants differently.
    #[cfg(feature = "next-version")]
    Probe {
        /// When.
        now: Timestamp,
    },
}

/// Why bytes are not a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// There are no bytes.
    #[error("the command is empty")]
    Empty,
    /// Another version wrote it.
    #[error("the command has version {0}; this software reads up to {COMMAND_VERSION}")]
    Version(u8),
    /// The bytes are damaged.
    #[error("the command is damaged: {0}")]
    Damaged(#[from] postcard::Error),
    /// There are bytes after the end.
    #[error("{0} bytes follow the command")]
    Trailing(usize),
}

impl Command {
    /// The first version of the cluster whose journal may contain it.
    #[must_use]
    pub fn since(&self) -> Version {
        match self {
            Self::Format { .. }
            | Self::RegisterServer { .. }
            | Self::OpenSession { .. }
            | Self::CloseSession { .. }
            | Self::ReleaseOrphans { .. }
            | Self::PurgeTrash { .. }
            | Self::RaiseReplication { .. }
            | Self::RemoveExpired { .. }
            | Self::BeginEpoch { .. }
            | Self::BeginEdition { .. }
            | Self::RaiseVersion { .. }
            | Self::NoteLease { .. } => Version::V0_2,
            Self::Mutate { op, .. } => op.since(),
            Self::Operate(operation) => operation.since(),
            #[cfg(feature = "next-version")]
            Self::Probe { .. } => Version::NEXT,
        }
    }

    /// The bytes for the journal.
    ///
    /// # Errors
    /// [`FsError::Internal`] when postcard fails, which it does only when out of space.
    pub fn encode(&self) -> Result<Vec<u8>, FsError> {
        postcard::to_extend(self, vec![COMMAND_VERSION])
            .map_err(|error| FsError::Internal(format!("cannot encode a command: {error}")))
    }

    /// Reads what [`Command::encode`] wrote. Never panics, and never allocates more than a small
    /// multiple of the input.
    ///
    /// # Errors
    /// See [`DecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (&version, body) = bytes.split_first().ok_or(DecodeError::Empty)?;
        if version != COMMAND_VERSION && !VERSIONS_BEFORE.contains(&version) {
            return Err(DecodeError::Version(version));
        }
        let (command, rest) = postcard::take_from_bytes(body)?;
        if !rest.is_empty() {
            return Err(DecodeError::Trailing(rest.len()));
        }
        Ok(command)
    }
}

/// The answer to a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Success, without a value.
    Done,
    /// The reply to a metadata operation.
    Meta(MetaReply),
    /// The new blocks of [`Mutation::AllocateBlocks`]. The server builds the
    /// [`MetaReply::Located`] from it, since the namespace knows neither replicas nor tokens.
    Blocks(Vec<BlockId>),
    /// The number of a datanode.
    Node(NodeId),
    /// A new session.
    Session(SessionId),
}

/// The result of a command that was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The answer.
    pub reply: Outcome,
    /// Its effects on caches and blocks.
    pub effects: Effects,
}

/// What caches must invalidate, and the changes of blocks that the rest of the namenode must learn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Inodes whose attributes or content changed, removed ones included. May contain duplicates.
    pub inodes: Vec<InodeId>,
    /// Directory entries that were added, removed, or now lead elsewhere.
    pub entries: Vec<(InodeId, Name)>,
    /// Changes of blocks, in order.
    pub blocks: Vec<BlockChange>,
}

/// A change of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockChange {
    /// A session may write it.
    Allocated {
        /// Block.
        block: BlockId,
        /// Rules for its placement.
        rules: PlacementRules,
        /// Its writer.
        writer: SessionId,
    },
    /// More of it was committed.
    Grew {
        /// Block.
        block: BlockId,
        /// Bytes that a replica must have, counted from the block's start.
        committed_bytes: u64,
    },
    /// Its writer is done with it.
    Sealed {
        /// Block.
        block: BlockId,
        /// Its final length in bytes.
        length_bytes: u64,
    },
    /// No file uses it and no session writes it: its replicas are to be removed.
    Freed {
        /// Block.
        block: BlockId,
    },
    /// The files that use it now require another placement.
    RulesChanged {
        /// Block.
        block: BlockId,
        /// The new rules.
        rules: PlacementRules,
    },
}
