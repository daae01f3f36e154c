//! Operations that change the namespace. Each is a command in the journal, stored as its number and its fields.

use serde::{Deserialize, Serialize};

use crate::ids::{InodeId, NodeId};
use crate::name::Name;
use crate::types::{FileKind, PlacementRules};

use super::operations::operations;
use super::{
    AttrChanges, FallocateMode, FileCommit, Relocation, RenameMode, SealedBlock, SetXattrMode,
};

operations! {
    /// An operation that changes the namespace: durable on the journal when it is answered, except where
    /// [`MutationFacts::answered`] says otherwise.
    Mutation {
        11 => SetAttr "setattr",
        12 => Create "create",
        13 => MakeDir "mkdir",
        14 => Symlink "symlink",
        15 => Link "link",
        16 => Unlink "unlink",
        17 => RemoveDir "rmdir",
        18 => Rename "rename",
        19 => SetXattr "setxattr",
        20 => RemoveXattr "removexattr",
        21 => Fallocate "fallocate",
        22 => CloneRange "clone_range",
        23 => AllocateBlocks "allocate_blocks",
        24 => Commit "commit",
        25 => SealBlocks "seal_blocks",
        29 => CreateScratch "create_scratch",
        30 => Relocate "relocate",
        31 => RemoveToTrash "remove_to_trash",
        32 => CreateSnapshot "create_snapshot",
        33 => RemoveSnapshot "remove_snapshot",
    }
}

/// A name in a directory.
pub type Entry<'a> = (InodeId, &'a Name);

/// What the kind of a mutation implies, as far as the request alone determines it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MutationFacts<'a> {
    /// Names that are added, removed, or refer to another inode afterwards. The reply contains the attributes of
    /// their directories; the session may cache these and the names.
    pub entries: [Option<Entry<'a>>; 2],
    /// Inodes that change, besides these directories.
    pub inodes: Inodes<'a>,
    /// What must not be part of a snapshot. (A commit reports this for each file.)
    pub unfrozen: Unfrozen<'a>,
    /// The name that may be the last one of an inode: if the inode is open somewhere, it becomes an orphan. The trash
    /// keeps what is moved there.
    pub removes: Option<Entry<'a>>,
    /// What the session gets with an inode that it creates.
    pub creates: Creates,
    /// Files that the sessions with their delegations have to commit first.
    pub awaits: Awaits<'a>,
    /// What else the namenode does, outside the namespace, when it is executed.
    pub entails: Entails<'a>,
    /// When it is answered.
    pub answered: Answered,
    /// How a client repeats it.
    pub repeated: Repeated,
    /// Which of the session's places for mutations in flight it may take.
    pub window: Window,
}

/// The inodes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inodes<'a> {
    /// None.
    None,
    /// This one.
    One(InodeId),
    /// The inodes of these files.
    Files(&'a [FileCommit]),
    /// The inodes of these pieces.
    Pieces(&'a [Relocation]),
}

impl<'a> Inodes<'a> {
    /// Returns each of them; one may appear several times.
    pub fn iter(self) -> impl Iterator<Item = InodeId> + 'a {
        let (one, files, pieces): (_, &[FileCommit], &[Relocation]) = match self {
            Self::None => (None, &[], &[]),
            Self::One(ino) => (Some(ino), &[], &[]),
            Self::Files(files) => (None, files, &[]),
            Self::Pieces(pieces) => (None, &[], pieces),
        };
        let files = files.iter().map(|file| file.ino);
        let pieces = pieces.iter().map(|piece| piece.ino);
        one.into_iter().chain(files).chain(pieces)
    }
}

/// What a session gets with an inode that a mutation creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creates {
    /// Nothing, or no inode is created.
    Nothing,
    /// The session holds the regular file, as by [`Open`](super::query::Open).
    HeldFile,
    /// The session may cache that the directory is empty.
    EmptyDirectory,
}

/// What a mutation refuses to change when it is part of a snapshot of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfrozen<'a> {
    /// It does not concern snapshots.
    Anything,
    /// These inodes.
    Inodes([Option<InodeId>; 2]),
    /// The directories of these names, and the inodes to which the names refer.
    Entries([Option<Entry<'a>>; 2]),
}

/// Files that have to be committed before a mutation is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaits<'a> {
    /// None.
    Nothing,
    /// The inode to which a name refers.
    Entry(Entry<'a>),
    /// Everything below a directory.
    Below(InodeId),
    /// These files, which it changes: earlier changes that a crash may have lost have to be replayed first.
    Files(Inodes<'a>),
}

/// What the namenode does outside the namespace when a mutation is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entails<'a> {
    /// Nothing.
    Nothing,
    /// The session may get the delegation of the file that it created.
    Delegation,
    /// Delegations of these files are returned.
    DelegationsReturned(&'a [FileCommit]),
    /// These replicas are sealed, as their writer asserts.
    Sealed(&'a [SealedBlock]),
}

/// Which of a session's places for mutations in flight a mutation may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// One of those for regular work.
    Work,
    /// Also an additional one: it makes other mutations durable, which free their places only after it.
    Confirming,
}

/// When a mutation is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// When it is durable.
    Durable,
    /// When it is durable; or immediately, if the request asks for that and nothing that was durable before can be
    /// lost by it (see [`MutationCall::relaxed`](super::MutationCall::relaxed)).
    DurableUnlessRelaxed,
    /// Immediately: durable with the next durable one, or in a fraction of a second; the client keeps it until then.
    AtOnce,
}

/// How a client repeats a mutation that was refused because the session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeated {
    /// In the next session.
    InNextSession,
    /// In the next session, even if it is unknown whether the previous one executed it: it changes nothing.
    AlsoIfExecuted,
    /// Not at all: it refers to blocks of the ended session.
    Never,
}

impl Mutation {
    /// Returns what the operation implies.
    #[must_use]
    pub fn facts(&self) -> MutationFacts<'_> {
        match self {
            Self::SetAttr(op) => MutationFacts {
                answered: Answered::DurableUnlessRelaxed,
                ..of_file(op.ino)
            },
            Self::SetXattr(op) => of_inode(op.ino),
            Self::RemoveXattr(op) => of_inode(op.ino),
            Self::Fallocate(op) => of_file(op.ino),
            Self::CloneRange(op) => of_file(op.destination),
            Self::RemoveSnapshot(op) => of_inode(op.ino),
            Self::CreateSnapshot(op) => MutationFacts {
                awaits: Awaits::Below(op.ino),
                ..of_inode(op.ino)
            },
            Self::Create(op) => {
                let (creates, entails) = match op.kind {
                    FileKind::Regular => (Creates::HeldFile, Entails::Delegation),
                    FileKind::Directory
                    | FileKind::Symlink
                    | FileKind::Fifo
                    | FileKind::Socket
                    | FileKind::CharDevice
                    | FileKind::BlockDevice => (Creates::Nothing, Entails::Nothing),
                };
                MutationFacts {
                    creates,
                    entails,
                    ..of_new((op.parent, &op.name))
                }
            }
            Self::MakeDir(op) => MutationFacts {
                creates: Creates::EmptyDirectory,
                ..of_new((op.parent, &op.name))
            },
            Self::Symlink(op) => of_new((op.parent, &op.name)),
            Self::Link(op) => MutationFacts {
                inodes: Inodes::One(op.ino),
                unfrozen: Unfrozen::Inodes([Some(op.ino), Some(op.parent)]),
                ..of_new((op.parent, &op.name))
            },
            Self::Unlink(op) => of_removed((op.parent, &op.name)),
            Self::RemoveDir(op) => of_removed((op.parent, &op.name)),
            Self::RemoveToTrash(op) => MutationFacts {
                removes: None,
                ..of_removed((op.parent, &op.name))
            },
            Self::Rename(op) => {
                let (old, new) = ((op.parent, &op.name), (op.new_parent, &op.new_name));
                MutationFacts {
                    entries: [Some(old), Some(new)],
                    unfrozen: Unfrozen::Entries([Some(old), Some(new)]),
                    removes: (op.mode == RenameMode::Replace).then_some(new),
                    awaits: Awaits::Entry(old),
                    ..of_new(new)
                }
            }
            Self::AllocateBlocks(_) => of_blocks(),
            Self::SealBlocks(op) => MutationFacts {
                entails: Entails::Sealed(&op.blocks),
                answered: Answered::AtOnce,
                repeated: Repeated::Never,
                ..of_blocks()
            },
            Self::Commit(op) => {
                // A commit without files makes durable what came before it.
                let (window, repeated) = match op.files.is_empty() {
                    true => (Window::Confirming, Repeated::AlsoIfExecuted),
                    false => (Window::Work, Repeated::Never),
                };
                MutationFacts {
                    inodes: Inodes::Files(&op.files),
                    awaits: Awaits::Files(Inodes::Files(&op.files)),
                    entails: Entails::DelegationsReturned(&op.files),
                    window,
                    answered: match op.durable {
                        true => Answered::Durable,
                        false => Answered::AtOnce,
                    },
                    repeated,
                    ..of_blocks()
                }
            }
            Self::CreateScratch(_) => MutationFacts {
                creates: Creates::HeldFile,
                ..of_blocks()
            },
            Self::Relocate(op) => MutationFacts {
                inodes: Inodes::Pieces(&op.pieces),
                ..of_blocks()
            },
        }
    }
}

/// Facts of a mutation that changes one inode, which must not be part of a snapshot.
fn of_inode<'a>(ino: InodeId) -> MutationFacts<'a> {
    MutationFacts {
        entries: [None, None],
        inodes: Inodes::One(ino),
        unfrozen: Unfrozen::Inodes([Some(ino), None]),
        removes: None,
        creates: Creates::Nothing,
        awaits: Awaits::Nothing,
        entails: Entails::Nothing,
        answered: Answered::Durable,
        repeated: Repeated::InNextSession,
        window: Window::Work,
    }
}

/// Facts of a mutation that changes what a commit may also have changed.
fn of_file<'a>(ino: InodeId) -> MutationFacts<'a> {
    MutationFacts {
        awaits: Awaits::Files(Inodes::One(ino)),
        ..of_inode(ino)
    }
}

/// Facts of a mutation that adds a name.
fn of_new(entry: Entry<'_>) -> MutationFacts<'_> {
    MutationFacts {
        entries: [Some(entry), None],
        inodes: Inodes::None,
        unfrozen: Unfrozen::Inodes([Some(entry.0), None]),
        removes: None,
        creates: Creates::Nothing,
        awaits: Awaits::Nothing,
        entails: Entails::Nothing,
        answered: Answered::Durable,
        repeated: Repeated::InNextSession,
        window: Window::Work,
    }
}

/// Facts of a mutation that removes a name.
fn of_removed(entry: Entry<'_>) -> MutationFacts<'_> {
    MutationFacts {
        entries: [Some(entry), None],
        inodes: Inodes::None,
        unfrozen: Unfrozen::Entries([Some(entry), None]),
        removes: Some(entry),
        creates: Creates::Nothing,
        awaits: Awaits::Nothing,
        entails: Entails::Nothing,
        answered: Answered::Durable,
        repeated: Repeated::InNextSession,
        window: Window::Work,
    }
}

/// Facts of a mutation that concerns blocks and neither names nor attributes.
fn of_blocks<'a>() -> MutationFacts<'a> {
    MutationFacts {
        entries: [None, None],
        inodes: Inodes::None,
        unfrozen: Unfrozen::Anything,
        removes: None,
        creates: Creates::Nothing,
        awaits: Awaits::Nothing,
        entails: Entails::Nothing,
        answered: Answered::Durable,
        repeated: Repeated::InNextSession,
        window: Window::Work,
    }
}

/// Changes attributes; `None` keeps the old value. Reply: [`MetaReply::Attr`](super::MetaReply::Attr).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAttr {
    /// Inode.
    pub ino: InodeId,
    /// What to change.
    pub changes: AttrChanges,
}

/// Creates a file of any kind but directory and symlink; a regular file is also held as by
/// [`Open`](super::query::Open). [`FsError::Exists`](crate::error::FsError::Exists) when the name is taken. Reply:
/// [`MetaReply::Created`](super::MetaReply::Created) for a regular file, [`MetaReply::Attr`](super::MetaReply::Attr)
/// for others and for a repeated request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Create {
    /// Directory.
    pub parent: InodeId,
    /// New name.
    pub name: Name,
    /// `Regular`, `Fifo`, `Socket`, `CharDevice` or `BlockDevice`.
    pub kind: FileKind,
    /// Permission bits, the umask already applied.
    pub mode: u16,
    /// Device number of a device, else 0.
    pub rdev: u32,
}

/// Creates a directory. Reply: [`MetaReply::Attr`](super::MetaReply::Attr).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MakeDir {
    /// Directory.
    pub parent: InodeId,
    /// New name.
    pub name: Name,
    /// Permission bits, the umask already applied.
    pub mode: u16,
}

/// Creates a symlink. Reply: [`MetaReply::Attr`](super::MetaReply::Attr).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Symlink {
    /// Directory.
    pub parent: InodeId,
    /// New name.
    pub name: Name,
    /// 1 to [`crate::limits::SYMLINK_BYTES_MAX`] bytes.
    pub target: Vec<u8>,
}

/// Adds a further name to a file. Reply: [`MetaReply::Attr`](super::MetaReply::Attr).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The file; not a directory.
    pub ino: InodeId,
    /// Directory.
    pub parent: InodeId,
    /// New name.
    pub name: Name,
}

/// Removes a name of anything but a directory. Reply: [`MetaReply::Removed`](super::MetaReply::Removed).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unlink {
    /// Directory.
    pub parent: InodeId,
    /// Name.
    pub name: Name,
}

/// Removes an empty directory. Reply: [`MetaReply::Removed`](super::MetaReply::Removed).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveDir {
    /// Directory.
    pub parent: InodeId,
    /// Name.
    pub name: Name,
}

/// Renames, replacing an existing `new_name`. Reply: [`MetaReply::Renamed`](super::MetaReply::Renamed).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rename {
    /// Directory.
    pub parent: InodeId,
    /// Name.
    pub name: Name,
    /// Directory to move to.
    pub new_parent: InodeId,
    /// Name there.
    pub new_name: Name,
    /// What to do when `new_name` exists.
    pub mode: RenameMode,
}

/// Sets an extended attribute. Reply: [`MetaReply::Done`](super::MetaReply::Done).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetXattr {
    /// Inode.
    pub ino: InodeId,
    /// Attribute. `user.harvestfs.*` are settings (see `docs/SEMANTICS.md`) and checked.
    pub name: Vec<u8>,
    /// At most [`crate::limits::XATTR_VALUE_BYTES_MAX`] bytes.
    pub value: Vec<u8>,
    /// Whether it must or must not exist.
    pub mode: SetXattrMode,
}

/// Removes an extended attribute. Reply: [`MetaReply::Done`](super::MetaReply::Done).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveXattr {
    /// Inode.
    pub ino: InodeId,
    /// Attribute.
    pub name: Vec<u8>,
}

/// `fallocate(2)`. Reply: [`MetaReply::Attr`](super::MetaReply::Attr).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallocate {
    /// File.
    pub ino: InodeId,
    /// Start of the range.
    pub offset: u64,
    /// Length of the range; not 0.
    pub length_bytes: u64,
    /// What to do with it.
    pub mode: FallocateMode,
}

/// Makes a range of one file share the data of a range of another, or of itself without overlap; a metadata-only
/// operation. The range is cut off at the source's end. Reply: [`MetaReply::Attr`](super::MetaReply::Attr) of the
/// destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloneRange {
    /// Source file.
    pub source: InodeId,
    /// Start in the source.
    pub source_offset: u64,
    /// Destination file.
    pub destination: InodeId,
    /// Start in the destination.
    pub destination_offset: u64,
    /// Length; `u64::MAX` to the end of the source.
    pub length_bytes: u64,
}

/// New blocks that only this session writes. Reply: [`MetaReply::Located`](super::MetaReply::Located) with write tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocateBlocks {
    /// How many, at most [`crate::limits::BLOCKS_PER_REQUEST_MAX`].
    pub count: u32,
    /// How to place them.
    pub rules: PlacementRules,
    /// Datanodes that just failed this client.
    pub exclude: Vec<NodeId>,
}

/// Makes written data part of files, each file atomically. Reply: [`MetaReply::Committed`](super::MetaReply::Committed).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// At most [`crate::limits::FILES_PER_COMMIT_MAX`] files, together at most
    /// [`crate::limits::EXTENTS_PER_COMMIT_MAX`] extents.
    pub files: Vec<FileCommit>,
    /// Answer when the journal has it on stable storage (`fsync`); otherwise as soon as it is visible (`close`): it
    /// then becomes durable with the next durable operation, or within a fraction of a second.
    pub durable: bool,
}

/// The session will write no more to these blocks; each is now `length_bytes` long. Reply:
/// [`MetaReply::Done`](super::MetaReply::Done), which does not wait for the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealBlocks {
    /// Blocks with their final lengths and the datanodes that hold all of it.
    pub blocks: Vec<SealedBlock>,
}

/// Creates and holds a file without a name, which is removed with its last hold. Journaled. Reply:
/// [`MetaReply::Attr`](super::MetaReply::Attr).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateScratch {
    /// How to place its blocks.
    pub rules: PlacementRules,
}

/// Makes pieces of files use the copies of their data that were written to a scratch file. Neither content nor times
/// of the files change. Pieces that no longer match the request are left as they are. Journaled. Reply:
/// [`MetaReply::Relocated`](super::MetaReply::Relocated).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocate {
    /// The scratch file; its data must be durable.
    pub scratch: InodeId,
    /// At most [`crate::limits::RELOCATIONS_PER_REQUEST_MAX`].
    pub pieces: Vec<Relocation>,
}

/// Moves a name to the trash, from which it can be restored by renaming it; a directory with everything below. (Where
/// a directory is set to do so, `Unlink` does the same for the last name of a file.) Journaled. Reply:
/// [`MetaReply::Removed`](super::MetaReply::Removed).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveToTrash {
    /// Directory.
    pub parent: InodeId,
    /// Name.
    pub name: Name,
    /// Seconds for which it is kept, unless a directory above it sets the retention.
    pub retention_s: u32,
}

/// Preserves the current state of a directory with everything below as `.snapshot/NAME` in it. Copies only metadata:
/// at most [`crate::limits::SNAPSHOT_ITEMS_MAX`] names, inodes and extents. Journaled. Reply:
/// [`MetaReply::Attr`](super::MetaReply::Attr) of the copy of the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateSnapshot {
    /// Directory.
    pub ino: InodeId,
    /// Name of the snapshot; it does not start with a dot.
    pub name: Name,
}

/// Removes a snapshot; what only it contained is removed in the background. Journaled. Reply:
/// [`MetaReply::Done`](super::MetaReply::Done).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveSnapshot {
    /// Directory.
    pub ino: InodeId,
    /// Name of the snapshot.
    pub name: Name,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_answered_before_it_is_durable_is_that_and_nothing_else() {
        let answered = |mutation: Mutation| mutation.facts().answered;
        let ino = InodeId::ROOT;
        for (durable, expected) in [(true, Answered::Durable), (false, Answered::AtOnce)] {
            let files = vec![];
            assert_eq!(answered(Commit { files, durable }.into()), expected);
        }
        let seal = SealBlocks { blocks: vec![] };
        assert_eq!(answered(seal.into()), Answered::AtOnce);
        let changes = AttrChanges::default();
        let set = SetAttr { ino, changes };
        assert_eq!(answered(set.into()), Answered::DurableUnlessRelaxed);
        let name = b"user.a".to_vec();
        let remove = RemoveXattr { ino, name };
        assert_eq!(answered(remove.into()), Answered::Durable);
    }
}
