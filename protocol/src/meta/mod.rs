//! Metadata requests of a client to the namenode.
//!
//! Consistency rests on *leases*: the client may believe what a reply says about an inode or about a directory's
//! entries (including names that do not exist) until the namenode revokes it with [`Notice::Invalidate`], or until
//! the session has been silent for [`crate::limits::LEASE`]. The namenode acknowledges a mutation to its author only
//! after every other session that may have cached what it changed has acknowledged the invalidation or lost its
//! lease.
//!
//! Two rules make this safe without any order between replies and notices:
//!
//! - a client does not cache what a reply says about something if a notice that names it arrived after the request
//!   was sent: the reply may be the older of the two;
//! - a client counts its lease from when it sent a request that has since been answered, never from when the answer
//!   arrived; and it forgets everything once that is [`crate::limits::LEASE`] ago.
//!
//! A session that creates a file may receive its *delegation* as well ([`MetaReply::Created`]): then it need not
//! commit the first content before `close` returns. When another session asks about the file, the namenode recalls
//! the delegation ([`Notice::Recall`]) and answers after the commit.

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
    /// The session to resume after a lost connection or a restarted namenode. Refused with
    /// [`FsError::SessionExpired`] when it has ended or belongs to another certificate.
    pub resume: Option<SessionId>,
    /// Inodes that the client holds open (see [`query::Open`]); declared again on resumption, because the namenode
    /// does not journal them. As with credentials, the namenode trusts that they were opened with permission.
    pub holds: Vec<InodeId>,
    /// Files whose delegation the client has (see [`MetaReply::Created`]); declared again on resumption for the same
    /// reason. `None`: the client accepts no delegations.
    pub delegations: Option<Vec<InodeId>>,
    /// The position of the namenode when it last opened or resumed the session. A namenode that has not been at this
    /// position refuses with [`FsError::SessionExpired`]: its files are not those that the client knows.
    pub seen: Option<Position>,
}

/// The session, and what the client has to know about the cluster.
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
    /// The position of the namenode.
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

/// A metadata operation in the form in which it is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaOp {
    /// Changes nothing.
    Query(Query),
    /// Changes the namespace.
    Mutation(MutationCall),
    /// Reports something about the session or about a replica.
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
    /// Its number in the session, from 1. A request that is repeated with the same number (after a lost connection)
    /// gets the same answer again and is not executed again.
    pub sequence: u64,
    /// All mutations of this session below this number have been answered; the namenode forgets
    /// their replies.
    pub answered_below: u64,
    /// For a [`SetAttr`](mutation::SetAttr): answer immediately; it becomes durable with the next durable mutation,
    /// or a few milliseconds later. Only for the owner, mode and times of a file whose delegation the session has,
    /// and that never had content.
    ///
    /// For a [`Commit`](mutation::Commit): it was answered before, and is replayed because the namenode may have
    /// forgotten it in a crash (0.2.0 does not set this, and ignores it). It is refused for a file that others have
    /// changed meanwhile. Ignored for all others.
    pub relaxed: bool,
    /// For [`AllocateBlocks`](mutation::AllocateBlocks) only: the file that gets the first data, or its future
    /// directory. Refused with [`FsError::QuotaExceeded`] if a quota leaves it no space and it has no data to
    /// overwrite. Where the blocks actually end up is checked at the commit.
    pub file: Option<InodeId>,
    /// What to do.
    pub mutation: Mutation,
}

/// Data that a client may cache and the namenode may invalidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cached {
    /// Attributes, extents, extended attributes and symlink target of an inode.
    Inode(InodeId),
    /// Names in a directory, including names that do not exist.
    Entries(InodeId),
}

/// Replies to [`MetaOp`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaReply {
    /// Success without further data.
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
    /// One result per file, in the order of the request.
    Committed(Vec<Result<FileCommitted, FsError>>),
    /// The attributes, afterwards, of the inode that lost a name, if there is one.
    Removed(Option<Attr>),
    /// The attributes after a rename.
    Renamed {
        /// The inode that was moved.
        moved: Attr,
        /// The inode that was replaced, or exchanged with it.
        other: Option<Attr>,
    },
    /// Totals.
    StatFs(StatFs),
    /// Pieces of files in sparse blocks.
    SparsePieces {
        /// At most [`crate::limits::EXTENTS_PER_REPLY_MAX`].
        pieces: Vec<SparsePiece>,
        /// The inode at which to continue; none when all inodes were examined.
        next: Option<InodeId>,
    },
    /// How many pieces were relocated.
    Relocated(u32),
    /// A regular file was created.
    Created {
        /// Its attributes.
        attr: Attr,
        /// How its blocks are to be placed, as inherited.
        rules: PlacementRules,
        /// Whether the session has its delegation: then it may answer `close` before the first content is committed.
        /// The delegation ends with this commit, with [`housekeeping::ReturnDelegations`], [`housekeeping::Release`],
        /// the session, or its lease.
        delegated: bool,
    },
    /// The usage and the quotas of a directory.
    Usage(query::Usage),
}

impl MetaReply {
    /// Returns all attributes in it.
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
    /// The reply of the operation.
    pub reply: MetaReply,
    /// The attributes, afterwards, of the directories in which names were added, removed or redirected (see
    /// [`mutation::MutationFacts::entries`]), as far as they still exist.
    pub directories: Vec<Attr>,
}

/// A message that the namenode sends a client unasked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notice {
    /// Forget what is cached of these; answer with [`crate::rpc::Request::AckInvalidation`].
    Invalidate {
        /// Number to acknowledge.
        id: u64,
        /// Attributes and extents.
        inodes: Vec<InodeId>,
        /// Entries of directories.
        entries: Vec<(InodeId, Name)>,
    },
    /// The namenode no longer knows what this session has cached: forget everything.
    InvalidateAll {
        /// Number to acknowledge.
        id: u64,
    },
    /// Another session asks about these files: commit their content, then answer with
    /// [`housekeeping::ReturnDelegations`] within [`crate::limits::LEASE`].
    Recall {
        /// Files whose delegation the session has.
        inodes: Vec<InodeId>,
    },
    /// The addresses at which the namenodes of the group listen: sent when a session begins with the leader, and when
    /// they change. Not answered.
    Namenodes {
        /// At most [`crate::limits::NAMENODES_TOLD_MAX`].
        all: Vec<SocketAddr>,
    },
}
