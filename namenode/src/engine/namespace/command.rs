//! What changes a namespace, and what a change brings about.

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

/// The version of the encoding of [`Command`]. What was released is not changed any more: a command with
/// other fields is a new variant behind the others, of which [`Command::since`] says since when it exists.
pub const COMMAND_VERSION: u8 = 3;
/// Versions before, which are read too: 1 had no epochs, 2 no editions.
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
    /// A datanode has come. Outcome: [`Outcome::Node`], always the same one for a server's name.
    RegisterServer {
        /// Its server; replaces what was known of it.
        server: ServerDescription,
        /// All its volumes.
        storages: Vec<StorageId>,
        /// When.
        now: Timestamp,
    },
    /// A client has come. Outcome: [`Outcome::Session`].
    OpenSession {
        /// The name in its certificate.
        client: String,
        /// When.
        now: Timestamp,
    },
    /// A client has gone: its blocks are sealed at the committed length, or freed when no file
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
        /// What a removal takes the last name from is open somewhere (see
        /// [`super::Namespace::removal_target`]): keep it as an orphan.
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
    /// These were in the trash for long enough: remove them for good, a bounded number of inodes at
    /// once. Inodes that are not in the trash are skipped. Files become orphans: the caller
    /// releases the ones that no session holds.
    PurgeTrash {
        /// Inodes in the trash.
        inodes: Vec<InodeId>,
        /// When.
        now: Timestamp,
    },
    /// These files get the replicas that they are to have in the end. Files whose time has not come
    /// are skipped.
    RaiseReplication {
        /// Files.
        inodes: Vec<InodeId>,
        /// When.
        now: Timestamp,
    },
    /// The lifetime of these is over: they go to the trash, to be purged at once. Entries whose
    /// time has not come are skipped.
    RemoveExpired {
        /// Names in directories.
        entries: Vec<(InodeId, Name)>,
        /// When.
        now: Timestamp,
    },
    /// The namenode starts, or goes on without what it lacks.
    BeginEpoch {
        /// The epoch.
        epoch: Epoch,
        /// Its first record: this one, or the first entry of the term in which it begins.
        first_record: u64,
        /// All that other timelines wrote before it is given up.
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
    /// From here on there may be what this version of the cluster brings, and no program that is older
    /// can be a part of it.
    RaiseVersion {
        /// The version, later than the current one.
        version: Version,
        /// When.
        now: Timestamp,
    },
    /// The lease of a session has run out, or the session has come back. Outcome: [`Outcome::Done`].
    NoteLease {
        /// The session.
        session: SessionId,
        /// It has run out.
        has_lapsed: bool,
    },
    /// Counted, and nothing else: a record that exists since the next version. Always the last one, or the
    /// two builds would give others different numbers.
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
    /// The first version of a cluster that may have it in its journal.
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
    /// [`FsError::Internal`] when postcard refuses, which it does only when out of space.
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

/// What a command answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Nothing to say.
    Done,
    /// The reply to a metadata operation.
    Meta(MetaReply),
    /// The new blocks of [`Mutation::AllocateBlocks`]. The server makes the
    /// [`MetaReply::Located`] of it, since replicas and tokens are not the namespace's.
    Blocks(Vec<BlockId>),
    /// The number of a datanode.
    Node(NodeId),
    /// A new session.
    Session(SessionId),
}

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The answer.
    pub reply: Outcome,
    /// What else follows.
    pub effects: Effects,
}

/// What caches must forget, and what the cluster must know of blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Inodes whose attributes or content changed, removed ones included. May name one twice.
    pub inodes: Vec<InodeId>,
    /// Directory entries that came, went or lead elsewhere now.
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
        /// How to place it.
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
    /// The files that use it want it placed otherwise now.
    RulesChanged {
        /// Block.
        block: BlockId,
        /// How.
        rules: PlacementRules,
    },
}
