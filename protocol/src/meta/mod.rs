//! Metadata requests of a client to the namenode.
//!
//! Consistency rests on *leases*: what a reply says about an inode or about a directory's entries
//! (a name that does not exist included), the client may believe until the namenode takes it back
//! with [`Notice::Invalidate`] or until the session was silent for [`crate::limits::LEASE`]. The
//! namenode acknowledges a mutation to its author only after every other session that may have
//! cached what it changed has acknowledged the invalidation or lost its lease.
//!
//! Two rules make that safe without any order between replies and notices:
//!
//! - a client does not cache what a reply says if a notice that names the same came after the
//!   request was sent: the reply may be the older of the two;
//! - a client counts its lease from when it sent a request that was answered since, never from
//!   when the answer came; and forgets everything when that is [`crate::limits::LEASE`] ago.
//!
//! A session that creates a file may get its *delegation* with it ([`MetaReply::Created`]): then it
//! need not commit the first content before `close` returns. When another session asks about the
//! file, the namenode recalls the delegation ([`Notice::Recall`]) and answers after the commit.

pub mod housekeeping;
pub mod mutation;
mod operations;
mod parts;
pub mod query;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

pub use self::housekeeping::Housekeeping;
pub use self::mutation::Mutation;
pub use self::parts::{
    AttrChanges, DirEntry, FallocateMode, FileCommit, FileCommitted, Relocation, RenameMode,
    SealedBlock, SetTime, SetXattrMode, SparsePiece, StatFs,
};
pub use self::query::Query;
use crate::error::FsError;
use crate::ids::{ClusterId, InodeId, SessionId};
use crate::name::Name;
use crate::timeline::Position;
use crate::types::{Attr, Credentials, Extent, Located, PlacementRules};
use crate::version::Version;

/// Starts or resumes a session; the first request on a client's connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSession {
    /// The session to go on with after a lost connection or a restarted namenode. Refused with
    /// [`FsError::SessionExpired`] when it has ended or belongs to another certificate.
    pub resume: Option<SessionId>,
    /// Inodes that the client holds open (see [`query::Open`]); declared again on resumption, as
    /// the namenode does not journal them. As with credentials, the namenode believes that they
    /// were opened with permission.
    pub holds: Vec<InodeId>,
    /// Files of which the client has the delegation (see [`MetaReply::Created`]); declared again on
    /// resumption for the same reason. `None`: it takes none.
    pub delegations: Option<Vec<InodeId>>,
    /// Where the namenode was when it last opened or resumed the session. Refused with
    /// [`FsError::SessionExpired`] by one that has not been there: what the client knows of files is
    /// not what that one knows.
    pub seen: Option<Position>,
}

/// The session and what the client has to know of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionOpened {
    /// The session.
    pub session: SessionId,
    /// The cluster.
    pub cluster: ClusterId,
    /// Largest block in bytes.
    pub block_bytes: u64,
    /// Rules for files below directories that set none.
    pub default_rules: PlacementRules,
    /// Where the namenode is.
    pub position: Position,
    /// The version of the cluster: operations that exist since a later one are refused with
    /// [`FsError::ClusterVersion`].
    pub cluster_version: Version,
}

/// One metadata operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaCall {
    /// The user on whose behalf the request is made.
    pub credentials: Credentials,
    /// What to do.
    pub op: MetaOp,
}

/// An operation as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaOp {
    /// Changes nothing.
    Query(Query),
    /// Changes the namespace.
    Mutation(MutationCall),
    /// Says something of the session, or of a replica.
    Housekeeping(Housekeeping),
}

impl MetaOp {
    /// Its name in metrics and logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Query(query) => query.name(),
            Self::Mutation(call) => call.mutation.name(),
            Self::Housekeeping(operation) => operation.name(),
        }
    }
}

/// A mutation with its place in the session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MutationCall {
    /// Its number in the session, from 1. A request that is repeated with the same number (after a lost
    /// connection) is answered as before and not executed again.
    pub sequence: u64,
    /// All mutations of this session below this number have been answered; the namenode forgets
    /// their replies.
    pub answered_below: u64,
    /// Answer a [`SetAttr`](mutation::SetAttr) at once: it becomes durable with the next mutation that is,
    /// or a few milliseconds later. Only for owner, mode and times of a file that the session has a
    /// delegation of and that never had content.
    ///
    /// Of a [`Commit`](mutation::Commit): it was answered before, and is replayed since the namenode may have forgotten it
    /// in a crash (0.2.0 does not say so, and ignores it). For a file that others have changed meanwhile it is refused.
    /// Ignored otherwise.
    pub relaxed: bool,
    /// For [`AllocateBlocks`](mutation::AllocateBlocks) only: the file of the first data, or its
    /// future directory. Refused with [`FsError::QuotaExceeded`] where a quota leaves it no room
    /// and it has no data to overwrite. What the blocks get in the end is checked at the commit.
    pub file: Option<InodeId>,
    /// What to do.
    pub mutation: Mutation,
}

/// What a client may cache, and the namenode takes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cached {
    /// Attributes, extents, extended attributes and symlink target of an inode.
    Inode(InodeId),
    /// Names in a directory, also names that do not exist.
    Entries(InodeId),
}

/// Replies to [`MetaOp`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaReply {
    /// Nothing to say.
    Done,
    /// The inode's attributes (after the change, for a mutation).
    Attr(Attr),
    /// Raw bytes: a symlink's target, an attribute's value.
    Bytes(Vec<u8>),
    /// Names of extended attributes.
    Names(Vec<Vec<u8>>),
    /// A part of a directory.
    Entries {
        /// The directory's parent (its own for the root).
        parent: InodeId,
        /// Entries in name order.
        entries: Vec<DirEntry>,
        /// No entry follows.
        end: bool,
    },
    /// An open file.
    Opened {
        /// Attributes.
        attr: Attr,
        /// Its first extents in file order, at most [`crate::limits::EXTENTS_PER_REPLY_MAX`].
        extents: Vec<Extent>,
        /// No extent follows.
        end: bool,
        /// The blocks of the first few of them; of none for a caller that may not read them.
        located: Located,
    },
    /// A part of a file's extents.
    Extents {
        /// In file order.
        extents: Vec<Extent>,
        /// No extent follows.
        end: bool,
    },
    /// Blocks.
    Located(Located),
    /// Per file, in the order of the request.
    Committed(Vec<Result<FileCommitted, FsError>>),
    /// What a removal took a name from, if anything: its attributes afterwards.
    Removed(Option<Attr>),
    /// The attributes after a rename.
    Renamed {
        /// What was moved.
        moved: Attr,
        /// What was replaced, or exchanged with it.
        other: Option<Attr>,
    },
    /// Totals.
    StatFs(StatFs),
    /// Pieces of files in sparse blocks.
    SparsePieces {
        /// At most [`crate::limits::EXTENTS_PER_REPLY_MAX`].
        pieces: Vec<SparsePiece>,
        /// Where to go on; none when all inodes were looked at.
        next: Option<InodeId>,
    },
    /// How many pieces were relocated.
    Relocated(u32),
    /// A regular file was created.
    Created {
        /// Its attributes.
        attr: Attr,
        /// How its blocks are to be placed, as it inherited that.
        rules: PlacementRules,
        /// The session has its delegation: it may answer `close` before the first content is
        /// committed. That ends with this commit, with [`housekeeping::ReturnDelegations`],
        /// [`housekeeping::Release`], the session, and its lease.
        delegated: bool,
    },
    /// What counts in a directory.
    Usage(query::Usage),
}

impl MetaReply {
    /// All attributes in it.
    pub fn attrs(&self) -> impl Iterator<Item = &Attr> {
        type Parts<'a> = (
            [Option<&'a Attr>; 2],
            &'a [DirEntry],
            &'a [Result<FileCommitted, FsError>],
        );
        let (few, entries, committed): Parts<'_> = match self {
            Self::Attr(attr) | Self::Opened { attr, .. } | Self::Created { attr, .. } => {
                ([Some(attr), None], &[], &[])
            }
            Self::Removed(attr) => ([attr.as_ref(), None], &[], &[]),
            Self::Renamed { moved, other } => ([Some(moved), other.as_ref()], &[], &[]),
            Self::Entries { entries, .. } => ([None, None], entries, &[]),
            Self::Committed(files) => ([None, None], &[], files),
            Self::Done
            | Self::Bytes(_)
            | Self::Names(_)
            | Self::Extents { .. }
            | Self::Located(_)
            | Self::StatFs(_)
            | Self::SparsePieces { .. }
            | Self::Relocated(_)
            | Self::Usage(_) => ([None, None], &[], &[]),
        };
        let entries = entries.iter().filter_map(|entry| entry.attr.as_ref());
        let committed = committed.iter().flatten().map(|file| &file.attr);
        few.into_iter().flatten().chain(entries).chain(committed)
    }
}

/// The reply to a mutation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mutated {
    /// What the operation says.
    pub reply: MetaReply,
    /// The attributes, afterwards, of the directories in which names came, went, or lead elsewhere
    /// (see [`mutation::MutationFacts::entries`]), as far as they still exist.
    pub directories: Vec<Attr>,
}

/// What the namenode sends a client without being asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notice {
    /// Forget what you know of these; answer with [`crate::rpc::Request::AckInvalidation`].
    Invalidate {
        /// Number to acknowledge.
        id: u64,
        /// Attributes and extents.
        inodes: Vec<InodeId>,
        /// Entries of directories.
        entries: Vec<(InodeId, Name)>,
    },
    /// The namenode lost track of what this session has cached: forget everything.
    InvalidateAll {
        /// Number to acknowledge.
        id: u64,
    },
    /// Another session asks about these files: commit their content, then answer with
    /// [`housekeeping::ReturnDelegations`] within [`crate::limits::LEASE`].
    Recall {
        /// Files that the session has the delegation of.
        inodes: Vec<InodeId>,
    },
    /// Where the namenodes of the group listen: when a session begins with the one that leads, and when
    /// they change. Nothing is answered.
    Namenodes {
        /// At most [`crate::limits::NAMENODES_TOLD_MAX`].
        all: Vec<SocketAddr>,
    },
}
