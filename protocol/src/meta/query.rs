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

/// What the kind of a query implies for leases and delegations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryFacts {
    /// What the session may cache of the answer, including an answer that something does not exist. The attributes in
    /// the answer are cacheable in addition.
    pub cacheable: [Option<Cached>; 2],
    /// The file whose content it shows other than by attributes in the answer. The query waits until the session with
    /// the file's delegation has committed it, as it does for files whose attributes are in the answer.
    pub content: Option<InodeId>,
    /// Whether it shows sums over more than is cacheable: it then waits until all changes are durable.
    pub shows_sums: bool,
}

impl Query {
    /// Returns what the operation implies.
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
            // Replicas move at any time, and totals are outdated as soon as they are sent.
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

/// Returns attributes. Reply: [`MetaReply::Attr`](super::MetaReply::Attr).
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
    /// The last name that the caller has received; none to start.
    pub after: Option<Name>,
    /// Most entries wanted, at most [`crate::limits::ENTRIES_PER_REPLY_MAX`].
    pub max_entries: u32,
    /// Whether each entry comes with its attributes.
    pub with_attributes: bool,
}

/// Reads a symlink. Reply: [`MetaReply::Bytes`](super::MetaReply::Bytes).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadLink {
    /// Symlink.
    pub ino: InodeId,
}

/// Opens a regular file and *holds* it: until [`Release`](super::housekeeping::Release) or the end of the session,
/// its data stays readable, even when its last name is removed or its mode changes. Checks permission for each use
/// that is set; at least one must be. Reply: [`MetaReply::Opened`](super::MetaReply::Opened).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// Inode.
    pub ino: InodeId,
    /// For reading.
    pub read: bool,
    /// For writing.
    pub write: bool,
    /// For executing it, which implies reading it.
    pub execute: bool,
}

/// Returns a file's extents at and after an offset, to a caller that may read the file, or to a session that has it
/// open. Reply: [`MetaReply::Extents`](super::MetaReply::Extents).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetExtents {
    /// Inode.
    pub ino: InodeId,
    /// First byte of interest.
    pub from_offset: u64,
}

/// Returns the locations of blocks of a file, to a caller that may read the file, or to a session that has it open
/// for reading. Blocks that are not at the given place in the file are left out: the caller has to ask for the
/// extents again. Reply: [`MetaReply::Located`](super::MetaReply::Located).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locate {
    /// File.
    pub ino: InodeId,
    /// At most [`crate::limits::BLOCKS_PER_REQUEST_MAX`].
    pub blocks: Vec<FileBlock>,
}

/// Reads an extended attribute. Reply: [`MetaReply::Bytes`](super::MetaReply::Bytes).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetXattr {
    /// Inode.
    pub ino: InodeId,
    /// Attribute, with its namespace (`user.`, `trusted.`, `security.`, `system.`).
    pub name: Vec<u8>,
}

/// Lists the names of extended attributes. Reply: [`MetaReply::Names`](super::MetaReply::Names).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListXattr {
    /// Inode.
    pub ino: InodeId,
}

/// Returns totals of the file system. Reply: [`MetaReply::StatFs`](super::MetaReply::StatFs).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatFs {
    /// Any inode: the quotas of this directory, or of the one that it is in, and of all its ancestors apply.
    pub ino: InodeId,
}

/// Finds pieces of files in *sparse* blocks: sealed ones of which files use less than half. Examines a bounded number
/// of inodes. Only one session at a time may ask; others learn when to try again. Reply:
/// [`MetaReply::SparsePieces`](super::MetaReply::SparsePieces).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindSparse {
    /// The inode at which to continue, from the previous answer; none to start.
    pub from: Option<InodeId>,
}

/// Returns the usage of a directory with everything below it, and its own quotas, to a caller that may read the
/// directory. Reply: [`MetaReply::Usage`](super::MetaReply::Usage).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetUsage {
    /// Directory.
    pub ino: InodeId,
}

/// The usage of a directory and its quotas; the answer to [`GetUsage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of blocks that files use: each use is counted, but only one copy of the data.
    pub used_bytes: u64,
    /// Inodes of all kinds, without the directory itself.
    pub used_inodes: u64,
    /// The byte quota, if one is set on the directory itself.
    pub quota_bytes: Option<u64>,
    /// The inode quota, if one is set on the directory itself.
    pub quota_inodes: Option<u64>,
}
