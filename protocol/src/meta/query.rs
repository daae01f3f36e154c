//! Operations that change nothing.

use serde::{Deserialize, Serialize};

use crate::ids::InodeId;
use crate::name::Name;
use crate::types::FileBlock;

use super::Cached;
use super::operations::operations;

operations! {
    /// An operation that changes nothing.
    Query {
        0 => Lookup "lookup",
        1 => GetAttr "getattr",
        2 => Access "access",
        3 => ReadDir "readdir",
        4 => ReadLink "readlink",
        5 => Open "open",
        6 => GetExtents "get_extents",
        7 => Locate "locate",
        8 => GetXattr "getxattr",
        9 => ListXattr "listxattr",
        10 => StatFs "statfs",
        28 => FindSparse "find_sparse",
        35 => GetUsage "get_usage",
    }
}

/// What follows from the kind of a query for leases and delegations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryFacts {
    /// What the session may cache of the answer, also of one that says that there is nothing. The
    /// attributes in the answer come on top.
    pub cacheable: [Option<Cached>; 2],
    /// The file whose content it shows other than by attributes in the answer. The query waits until the
    /// session that has its delegation has committed it, as it does for files whose attributes are in
    /// the answer.
    pub content: Option<InodeId>,
    /// It shows sums over more than is cacheable: it waits until all changes are durable.
    pub shows_sums: bool,
}

impl Query {
    /// What follows from the operation.
    #[must_use]
    pub fn facts(&self) -> QueryFacts {
        let of = |cacheable| QueryFacts {
            cacheable,
            content: None,
            shows_sums: false,
        };
        match self {
            Self::Lookup(Lookup { parent, .. }) => of([Some(Cached::Entries(*parent)), None]),
            // Its parent is an attribute of the directory.
            Self::ReadDir(ReadDir { ino, .. }) => {
                of([Some(Cached::Entries(*ino)), Some(Cached::Inode(*ino))])
            }
            Self::GetExtents(GetExtents { ino, .. }) => QueryFacts {
                content: Some(*ino),
                ..of([Some(Cached::Inode(*ino)), None])
            },
            Self::GetAttr(GetAttr { ino })
            | Self::Access(Access { ino, .. })
            | Self::ReadLink(ReadLink { ino })
            | Self::Open(Open { ino, .. })
            | Self::GetXattr(GetXattr { ino, .. })
            | Self::ListXattr(ListXattr { ino }) => of([Some(Cached::Inode(*ino)), None]),
            // Replicas move at any time, and totals are out of date as soon as they are sent.
            Self::Locate(_) | Self::StatFs(_) | Self::FindSparse(_) => of([None, None]),
            Self::GetUsage(_) => QueryFacts {
                shows_sums: true,
                ..of([None, None])
            },
        }
    }
}

/// Finds a name. Reply: [`MetaReply::Attr`](super::MetaReply::Attr).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lookup {
    /// Directory.
    pub parent: InodeId,
    /// Name in it.
    pub name: Name,
}

/// Reply: [`MetaReply::Attr`](super::MetaReply::Attr).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetAttr {
    /// Inode.
    pub ino: InodeId,
}

/// Checks permission as `access(2)` does. Reply: [`MetaReply::Done`](super::MetaReply::Done).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// Inode.
    pub ino: InodeId,
    /// `R_OK` 4, `W_OK` 2, `X_OK` 1; 0 asks whether it exists.
    pub mask: u8,
}

/// Lists a directory in name order. Reply: [`MetaReply::Entries`](super::MetaReply::Entries).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDir {
    /// Directory.
    pub ino: InodeId,
    /// The last name that the caller has; none to start.
    pub after: Option<Name>,
    /// Most entries wanted, at most [`crate::limits::ENTRIES_PER_REPLY_MAX`].
    pub max_entries: u32,
    /// Whether each entry comes with its attributes.
    pub with_attributes: bool,
}

/// Reply: [`MetaReply::Bytes`](super::MetaReply::Bytes).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadLink {
    /// Symlink.
    pub ino: InodeId,
}

/// Opens a regular file and *holds* it: until [`Release`](super::housekeeping::Release) or the end of
/// the session its data stays readable, even when its last name is removed or its mode changes.
/// Checks permission for each use; one is needed. Reply: [`MetaReply::Opened`](super::MetaReply::Opened).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// Inode.
    pub ino: InodeId,
    /// To read.
    pub read: bool,
    /// To write.
    pub write: bool,
    /// To run it, and so to read it.
    pub execute: bool,
}

/// A file's extents at and after an offset. For a caller that may read the file, and for a session
/// that has it open. Reply: [`MetaReply::Extents`](super::MetaReply::Extents).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetExtents {
    /// Inode.
    pub ino: InodeId,
    /// First byte of interest.
    pub from_offset: u64,
}

/// Where blocks of a file are. For a caller that may read the file, and for a session that has it
/// open to read. Blocks that are not in the file where the caller says are left out: it has to ask
/// for the extents again. Reply: [`MetaReply::Located`](super::MetaReply::Located).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locate {
    /// File.
    pub ino: InodeId,
    /// At most [`crate::limits::BLOCKS_PER_REQUEST_MAX`].
    pub blocks: Vec<FileBlock>,
}

/// Reply: [`MetaReply::Bytes`](super::MetaReply::Bytes).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetXattr {
    /// Inode.
    pub ino: InodeId,
    /// Attribute, with its namespace (`user.`, `trusted.`, `security.`, `system.`).
    pub name: Vec<u8>,
}

/// Reply: [`MetaReply::Names`](super::MetaReply::Names).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListXattr {
    /// Inode.
    pub ino: InodeId,
}

/// Reply: [`MetaReply::StatFs`](super::MetaReply::StatFs).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatFs {
    /// Any inode: the quotas of the directory that it is, or is in, and of its ancestors count.
    pub ino: InodeId,
}

/// Pieces of files in *sparse* blocks: sealed ones of which files use less than half. Looks at
/// a bounded number of inodes. One session at a time may ask; others learn when to try
/// again. Reply: [`MetaReply::SparsePieces`](super::MetaReply::SparsePieces).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindSparse {
    /// Where the previous answer said that the rest begins; none to start.
    pub from: Option<InodeId>,
}

/// What counts in a directory with everything below it, and what its own quotas are. For a caller
/// that may read the directory. Reply: [`MetaReply::Usage`](super::MetaReply::Usage).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetUsage {
    /// Directory.
    pub ino: InodeId,
}

/// See [`GetUsage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of blocks that files use, each use counted, one copy.
    pub used_bytes: u64,
    /// Inodes of all kinds, without the directory itself.
    pub used_inodes: u64,
    /// What there may be of bytes, if a quota is set on the directory itself.
    pub quota_bytes: Option<u64>,
    /// The same of inodes.
    pub quota_inodes: Option<u64>,
}
