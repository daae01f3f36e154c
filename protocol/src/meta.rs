//! Metadata requests of a client to the namenode.
//!
//! Consistency rests on *leases*: what a reply tells about an inode or about a directory's entries
//! (a name that does not exist included), the client may believe until the namenode takes it back
//! with [`Notice::Invalidate`] or until the session was silent for [`crate::limits::LEASE`]. The
//! namenode acknowledges a mutation to its author only after every other session that may have
//! cached what it changed has acknowledged the invalidation or lost its lease.
//!
//! Two rules make that safe without any order between replies and notices:
//!
//! - a client does not cache what a reply tells if a notice that names the same came after the
//!   request was sent: the reply may be the older of the two;
//! - a client counts its lease from when it sent a request that was answered since, never from
//!   when the answer came; and forgets everything when that is [`crate::limits::LEASE`] ago.
//!
//! A session that creates a file may get its *delegation* with it ([`MetaReply::Created`]): then it
//! need not commit the first content before `close` returns. When another session asks about the
//! file, the namenode recalls the delegation ([`Notice::Recall`]) and answers after the commit.

mod parts;

use serde::{Deserialize, Serialize};

pub use self::parts::{
    AttrChanges, DirEntry, FallocateMode, FileCommit, FileCommitted, Relocation, RenameMode,
    SealedBlock, SetTime, SetXattrMode, SparsePiece, StatFs,
};
use crate::{
    error::FsError,
    ids::{BlockId, ClusterId, InodeId, NodeId, SessionId},
    name::Name,
    timeline::Position,
    types::{Attr, Credentials, Extent, FileBlock, FileKind, Located, PlacementRules},
};

/// Starts or resumes a session; the first request on a client's connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSession {
    /// The session to go on with after a lost connection or a restarted namenode. Refused with
    /// [`FsError::SessionExpired`] when it has ended or belongs to another certificate.
    pub resume: Option<SessionId>,
    /// Inodes that the client holds open (see [`MetaOp::Open`]); told again on resumption because
    /// the namenode does not journal them. As with credentials, it is believed that they were opened
    /// with permission.
    pub holds: Vec<InodeId>,
    /// Files of which the client has the delegation (see [`MetaReply::Created`]); told again on
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
}

/// One metadata operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaCall {
    /// On whose behalf.
    pub credentials: Credentials,
    /// For a mutation: its number in the session, from 1. A request that is repeated with the same
    /// number (after a lost connection) is answered as before and not executed again. For a
    /// read-only operation: 0.
    pub sequence: u64,
    /// All mutations of this session below this number have been answered; the namenode forgets
    /// their replies.
    pub answered_below: u64,
    /// Answer a [`MetaOp::SetAttr`] at once: it becomes durable with the next mutation that is, or a
    /// few milliseconds later. Only for owner, mode and times of a file that the session has a
    /// delegation of and that never had content; ignored otherwise. Not part of the operation, whose
    /// form in the journal it does not change.
    pub relaxed: bool,
    /// What to do.
    pub op: MetaOp,
}

/// The metadata operations. Mutations are durable on the journal when they are answered, except
/// where a comment says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaOp {
    // --- read-only ---
    /// Finds a name. Reply: [`MetaReply::Attr`].
    Lookup {
        /// Directory.
        parent: InodeId,
        /// Name in it.
        name: Name,
    },
    /// Reply: [`MetaReply::Attr`].
    GetAttr {
        /// Inode.
        ino: InodeId,
    },
    /// Checks permission as `access(2)` does. Reply: [`MetaReply::Done`].
    Access {
        /// Inode.
        ino: InodeId,
        /// `R_OK` 4, `W_OK` 2, `X_OK` 1; 0 asks whether it exists.
        mask: u8,
    },
    /// Lists a directory in name order. Reply: [`MetaReply::Entries`].
    ReadDir {
        /// Directory.
        ino: InodeId,
        /// The last name that the caller has; none to start.
        after: Option<Name>,
        /// Most entries wanted, at most [`crate::limits::ENTRIES_PER_REPLY_MAX`].
        max_entries: u32,
        /// Whether each entry comes with its attributes.
        with_attributes: bool,
    },
    /// Reply: [`MetaReply::Bytes`].
    ReadLink {
        /// Symlink.
        ino: InodeId,
    },
    /// Opens a regular file and *holds* it: until [`MetaOp::Release`] or the end of the session
    /// its data stays readable, even when its last name is removed or its mode changes. Permission for
    /// all that it is opened for is checked; one of them it must be. Reply: [`MetaReply::Opened`].
    Open {
        /// Inode.
        ino: InodeId,
        /// To read.
        read: bool,
        /// To write.
        write: bool,
        /// To run it, and so to read it.
        execute: bool,
    },
    /// A file's extents at and after an offset. For who may read the file, and for a session that has it
    /// open. Reply: [`MetaReply::Extents`].
    GetExtents {
        /// Inode.
        ino: InodeId,
        /// First byte of interest.
        from_offset: u64,
    },
    /// Where blocks of a file are. For who may read the file, and for a session that has it open to read.
    /// What is not in the file any more as the caller says is left out: it has to ask for the extents
    /// again. Reply: [`MetaReply::Located`].
    Locate {
        /// File.
        ino: InodeId,
        /// At most [`crate::limits::BLOCKS_PER_REQUEST_MAX`].
        blocks: Vec<FileBlock>,
    },
    /// Reply: [`MetaReply::Bytes`].
    GetXattr {
        /// Inode.
        ino: InodeId,
        /// Attribute, with its namespace (`user.`, `trusted.`, `security.`, `system.`).
        name: Vec<u8>,
    },
    /// Reply: [`MetaReply::Names`].
    ListXattr {
        /// Inode.
        ino: InodeId,
    },
    /// Reply: [`MetaReply::StatFs`].
    StatFs {
        /// Any inode: the quotas of the directory that it is, or is in, and of those above count.
        ino: InodeId,
    },

    // --- mutations ---
    /// Changes attributes; those that are `None` stay. Reply: [`MetaReply::Attr`].
    SetAttr {
        /// Inode.
        ino: InodeId,
        /// What to change.
        changes: AttrChanges,
    },
    /// Creates a file of any kind but directory and symlink; a regular file is also held as by
    /// [`MetaOp::Open`]. [`FsError::Exists`] when the name is taken. Reply: [`MetaReply::Created`]
    /// for a regular file, [`MetaReply::Attr`] for others and for what was asked before.
    Create {
        /// Directory.
        parent: InodeId,
        /// New name.
        name: Name,
        /// `Regular`, `Fifo`, `Socket`, `CharDevice` or `BlockDevice`.
        kind: FileKind,
        /// Permission bits, the umask already applied.
        mode: u16,
        /// Device number of a device, else 0.
        rdev: u32,
    },
    /// Reply: [`MetaReply::Attr`].
    MakeDir {
        /// Directory.
        parent: InodeId,
        /// New name.
        name: Name,
        /// Permission bits, the umask already applied.
        mode: u16,
    },
    /// Reply: [`MetaReply::Attr`].
    Symlink {
        /// Directory.
        parent: InodeId,
        /// New name.
        name: Name,
        /// 1 to [`crate::limits::SYMLINK_BYTES_MAX`] bytes.
        target: Vec<u8>,
    },
    /// A further name for a file. Reply: [`MetaReply::Attr`].
    Link {
        /// The file; not a directory.
        ino: InodeId,
        /// Directory.
        parent: InodeId,
        /// New name.
        name: Name,
    },
    /// Removes a name that is not a directory's. Reply: [`MetaReply::Removed`].
    Unlink {
        /// Directory.
        parent: InodeId,
        /// Name.
        name: Name,
    },
    /// Removes an empty directory. Reply: [`MetaReply::Removed`].
    RemoveDir {
        /// Directory.
        parent: InodeId,
        /// Name.
        name: Name,
    },
    /// Renames, replacing what `new_name` was. Reply: [`MetaReply::Renamed`].
    Rename {
        /// Directory.
        parent: InodeId,
        /// Name.
        name: Name,
        /// Directory to move to.
        new_parent: InodeId,
        /// Name there.
        new_name: Name,
        /// What to do when `new_name` exists.
        mode: RenameMode,
    },
    /// Reply: [`MetaReply::Done`].
    SetXattr {
        /// Inode.
        ino: InodeId,
        /// Attribute. `user.harvestfs.*` are settings (see `docs/SEMANTICS.md`) and checked.
        name: Vec<u8>,
        /// At most [`crate::limits::XATTR_VALUE_BYTES_MAX`] bytes.
        value: Vec<u8>,
        /// Whether it must or must not exist.
        mode: SetXattrMode,
    },
    /// Reply: [`MetaReply::Done`].
    RemoveXattr {
        /// Inode.
        ino: InodeId,
        /// Attribute.
        name: Vec<u8>,
    },
    /// `fallocate(2)`. Reply: [`MetaReply::Attr`].
    Fallocate {
        /// File.
        ino: InodeId,
        /// Start of the range.
        offset: u64,
        /// Length of the range; not 0.
        length_bytes: u64,
        /// What to do with it.
        mode: FallocateMode,
    },
    /// Makes a range of one file share the data of a range of another, or of itself without
    /// overlap; metadata only. What reaches beyond the source's end is cut off.
    /// Reply: [`MetaReply::Attr`] of the destination.
    CloneRange {
        /// File read.
        source: InodeId,
        /// Start there.
        source_offset: u64,
        /// File written.
        destination: InodeId,
        /// Start there.
        destination_offset: u64,
        /// Length; `u64::MAX` to the end of the source.
        length_bytes: u64,
    },
    /// New blocks that only this session writes. Reply: [`MetaReply::Located`] with write tokens.
    AllocateBlocks {
        /// How many, at most [`crate::limits::BLOCKS_PER_REQUEST_MAX`].
        count: u32,
        /// How to place them.
        rules: PlacementRules,
        /// Datanodes that just failed this client.
        exclude: Vec<NodeId>,
    },
    /// Makes written data part of files, each file atomically. Reply: [`MetaReply::Committed`].
    Commit {
        /// At most [`crate::limits::FILES_PER_COMMIT_MAX`] files, together at most
        /// [`crate::limits::EXTENTS_PER_COMMIT_MAX`] extents.
        files: Vec<FileCommit>,
        /// Answer when the journal has it on stable storage (`fsync`); otherwise as soon as it is
        /// visible (`close`): it then becomes durable with the next durable operation, or within
        /// a fraction of a second.
        durable: bool,
    },
    /// The session will write no more to these blocks; each is now `length_bytes` long.
    /// Reply: [`MetaReply::Done`]. Not waited for on the journal.
    SealBlocks {
        /// Blocks with their final lengths and the datanodes that hold all of it.
        blocks: Vec<SealedBlock>,
    },

    // --- session housekeeping; not journaled ---
    /// The session no longer holds these inodes open. Reply: [`MetaReply::Done`].
    Release {
        /// Inodes.
        inodes: Vec<InodeId>,
    },
    /// A replica could not be used. What becomes of it the datanode says, which is asked. Reply:
    /// [`MetaReply::Done`].
    ReportBadReplica {
        /// Block.
        block: BlockId,
        /// Where.
        node: NodeId,
        /// True: its data is wrong or missing. False: the datanode did not answer.
        corrupt: bool,
    },

    // --- compaction; only for root ---
    /// Pieces of files in *sparse* blocks: sealed ones of which files use less than half. Looks at
    /// a bounded number of inodes. One session at a time may ask; others are told when to try
    /// again. Reply: [`MetaReply::SparsePieces`].
    FindSparse {
        /// Where the previous answer said that the rest begins; none to start.
        from: Option<InodeId>,
    },
    /// Creates and holds a file without a name, which goes away with its last hold. Journaled.
    /// Reply: [`MetaReply::Attr`].
    CreateScratch {
        /// How to place its blocks.
        rules: PlacementRules,
    },
    /// Has pieces of files use the copies of their data that were written to a scratch file. Neither
    /// content nor times of the files change. What is not as the request says any more is left as it
    /// is. Journaled. Reply: [`MetaReply::Relocated`].
    Relocate {
        /// The scratch file; its data must be durable.
        scratch: InodeId,
        /// At most [`crate::limits::RELOCATIONS_PER_REQUEST_MAX`].
        pieces: Vec<Relocation>,
    },

    // --- trash ---
    /// Removes a name to the trash, from where it can be restored by renaming it; a directory with
    /// everything below. (Unlink does the same where a directory asks for it, for the last name of a
    /// file.) Journaled. Reply: [`MetaReply::Removed`].
    RemoveToTrash {
        /// Directory.
        parent: InodeId,
        /// Name.
        name: Name,
        /// Seconds for which it is kept, unless a directory above says how long.
        retention_s: u32,
    },

    // --- snapshots of directories; for their owners ---
    /// Keeps a directory with everything below as it is now, as `.snapshot/NAME` in it. Metadata only:
    /// what it copies is at most [`crate::limits::SNAPSHOT_ITEMS_MAX`] names, inodes and extents.
    /// Journaled.
    /// Reply: [`MetaReply::Attr`] of the copy of the directory.
    CreateSnapshot {
        /// Directory.
        ino: InodeId,
        /// Name of the snapshot; it does not start with a dot.
        name: Name,
    },
    /// Removes a snapshot; what only that had is removed in the background. Journaled.
    /// Reply: [`MetaReply::Done`].
    RemoveSnapshot {
        /// Directory.
        ino: InodeId,
        /// Name of the snapshot.
        name: Name,
    },

    // --- delegations ---
    /// What was closed of these files is committed. Reply: [`MetaReply::Done`].
    ReturnDelegations {
        /// At most [`crate::limits::BLOCKS_PER_REQUEST_MAX`].
        inodes: Vec<InodeId>,
    },
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
        /// The blocks of the first few of them; of none for who may not read them.
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
        /// committed. That ends with this commit, with [`MetaOp::ReturnDelegations`],
        /// [`MetaOp::Release`], the session, and its lease.
        delegated: bool,
    },
}

/// What the namenode tells a client without being asked.
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
    /// Somebody asks about these files: commit their content, then answer with
    /// [`MetaOp::ReturnDelegations`] within [`crate::limits::LEASE`].
    Recall {
        /// Files that the session has the delegation of.
        inodes: Vec<InodeId>,
    },
}
