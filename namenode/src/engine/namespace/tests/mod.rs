//! Tests of the namespace through its public interface.

mod answers;
mod commands;
mod compaction;
mod content;
mod editions;
mod epochs;
mod facts;
mod frozen;
mod limits;
mod model;
mod model_content;
mod model_frozen;
mod model_node;
mod model_quota;
mod model_rename;
mod model_trash;
mod model_upkeep;
mod names;
mod permissions;
mod quotas;
mod random;
mod rename;
mod sessions;
mod snapshots;
mod steps;
mod trash;
mod upkeep;
mod versions;
mod xattrs;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, ClusterId, InodeId, SessionId};
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::meta::{
    AttrChanges, FileCommit, MetaReply, Mutation, Query, RenameMode, SealedBlock, mutation, query,
};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{
    Attr, Credentials, Durability, Extent, FileKind, MODE_FROZEN, PlacementRules, Timestamp,
};

use super::{Applied, BlockChange, Command, EDITION, Effects, Namespace, Outcome};

pub(super) const RULES: PlacementRules = PlacementRules {
    replication: 3,
    durability: Durability::Strict,
    class: None,
};

/// The mode of a regular file where it does not matter.
pub(super) const FILE: u16 = 0o644;

pub(super) fn format_command() -> Command {
    Command::Format {
        cluster: ClusterId(7),
        now: Timestamp(1),
        root_uid: 0,
        root_gid: 0,
        block_bytes: BLOCK_BYTES_MAX,
        default_rules: RULES,
    }
}

pub(super) fn edition_command() -> Command {
    Command::BeginEdition {
        edition: EDITION,
        now: Timestamp(1),
    }
}

pub(super) fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

pub(super) fn user(uid: u32, gid: u32, groups: &[u32]) -> Credentials {
    Credentials {
        uid,
        gid,
        groups: groups.to_vec(),
    }
}

/// A namespace with one session and a caller. Time moves on by 1 with each command, and after each
/// the invariants are checked.
pub(super) struct Fixture {
    pub namespace: Namespace,
    pub session: SessionId,
    pub sequence: u64,
    pub now: i64,
    pub caller: Credentials,
    pub held_elsewhere: bool,
    pub effects: Effects,
}

impl Fixture {
    pub fn new() -> Self {
        let mut fixture = Self {
            namespace: Namespace::new(),
            session: SessionId(0),
            sequence: 0,
            now: 1,
            caller: Credentials::root(),
            held_elsewhere: false,
            effects: Effects::default(),
        };
        fixture.apply(&format_command()).unwrap();
        fixture.apply(&edition_command()).unwrap();
        fixture.session = fixture.open_session();
        fixture
    }

    /// A fixture as in earlier releases: without an edition.
    pub fn before_editions() -> Self {
        let mut fixture = Self::new();
        fixture.namespace = Namespace::new();
        fixture.apply(&format_command()).unwrap();
        fixture.session = fixture.open_session();
        fixture
    }

    pub fn apply(&mut self, command: &Command) -> Result<Outcome, FsError> {
        let Applied { reply, effects } = self.namespace.apply(command)?;
        assert_eq!(self.namespace.check(), []);
        self.effects = effects;
        Ok(reply)
    }

    pub fn open_session(&mut self) -> SessionId {
        self.now += 1;
        let command = Command::OpenSession {
            client: "client".into(),
            now: Timestamp(self.now),
        };
        match self.apply(&command).unwrap() {
            Outcome::Session(session) => session,
            other => panic!("{other:?}"),
        }
    }

    pub fn close_session(&mut self, session: SessionId) {
        self.now += 1;
        let command = Command::CloseSession {
            session,
            now: Timestamp(self.now),
        };
        assert_eq!(self.apply(&command), Ok(Outcome::Done));
    }

    pub fn command(&self, op: Mutation) -> Command {
        Command::Mutate {
            session: self.session,
            sequence: self.sequence,
            answered_below: self.sequence,
            credentials: self.caller.clone(),
            now: Timestamp(self.now),
            held_elsewhere: self.held_elsewhere,
            op,
        }
    }

    pub fn run(&mut self, op: Mutation) -> Result<Outcome, FsError> {
        self.now += 1;
        self.sequence += 1;
        let command = self.command(op);
        self.apply(&command)
    }

    /// Runs a mutation that answers with attributes.
    pub fn change(&mut self, op: Mutation) -> Result<Attr, FsError> {
        match self.run(op)? {
            Outcome::Meta(MetaReply::Attr(attr)) => Ok(attr),
            other => panic!("{other:?}"),
        }
    }

    /// Runs a removal or a rename.
    pub fn remove(&mut self, op: Mutation) -> Result<Option<Attr>, FsError> {
        match self.run(op)? {
            Outcome::Meta(MetaReply::Removed(attr) | MetaReply::Renamed { other: attr, .. }) => {
                Ok(attr)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Runs a mutation that returns no value.
    pub fn done(&mut self, op: Mutation) -> Result<(), FsError> {
        assert_eq!(self.run(op)?, Outcome::Meta(MetaReply::Done));
        Ok(())
    }

    pub fn query(&self, op: &Query) -> Result<MetaReply, FsError> {
        self.namespace.query(&self.caller, op)
    }

    /// Continues as a user of one group.
    pub fn become_user(&mut self, uid: u32) {
        self.caller = user(uid, uid, &[]);
    }

    pub fn become_root(&mut self) {
        self.caller = Credentials::root();
    }

    /// The inode at a path, without regard to permissions.
    pub fn ino(&self, path: &str) -> InodeId {
        self.try_ino(path).unwrap()
    }

    pub fn try_ino(&self, path: &str) -> Result<InodeId, FsError> {
        let mut ino = InodeId::ROOT;
        for component in path.split('/').filter(|component| !component.is_empty()) {
            let op = Query::Lookup(query::Lookup {
                parent: ino,
                name: name(component),
            });
            match self.namespace.query(&Credentials::root(), &op)? {
                MetaReply::Attr(attr) => ino = attr.ino,
                other => panic!("{other:?}"),
            }
        }
        Ok(ino)
    }

    pub fn attr(&self, path: &str) -> Attr {
        self.attr_of(self.ino(path))
    }

    pub fn attr_of(&self, ino: InodeId) -> Attr {
        match self.query(&Query::GetAttr(query::GetAttr { ino })).unwrap() {
            MetaReply::Attr(attr) => attr,
            other => panic!("{other:?}"),
        }
    }

    /// The directory of a path and the name in it.
    pub fn place(&self, path: &str) -> (InodeId, Name) {
        let (parent, last) = path.rsplit_once('/').unwrap();
        (self.ino(parent), name(last))
    }

    pub fn create(&mut self, path: &str, kind: FileKind, mode: u16) -> Result<Attr, FsError> {
        let (parent, name) = self.place(path);
        self.change(Mutation::Create(mutation::Create {
            parent,
            name,
            kind,
            mode,
            rdev: 0x0102,
        }))
    }

    pub fn file(&mut self, path: &str) -> InodeId {
        self.create(path, FileKind::Regular, FILE).unwrap().ino
    }

    pub fn make_dir(&mut self, path: &str, mode: u16) -> Result<Attr, FsError> {
        let (parent, name) = self.place(path);
        self.change(Mutation::MakeDir(mutation::MakeDir { parent, name, mode }))
    }

    pub fn dir(&mut self, path: &str) -> InodeId {
        self.make_dir(path, 0o755).unwrap().ino
    }

    pub fn symlink(&mut self, path: &str, target: &[u8]) -> Result<Attr, FsError> {
        let (parent, name) = self.place(path);
        self.change(Mutation::Symlink(mutation::Symlink {
            parent,
            name,
            target: target.to_vec(),
        }))
    }

    pub fn link(&mut self, old: &str, new: &str) -> Result<Attr, FsError> {
        let ino = self.ino(old);
        let (parent, name) = self.place(new);
        self.change(Mutation::Link(mutation::Link { ino, parent, name }))
    }

    pub fn unlink(&mut self, path: &str) -> Result<Option<Attr>, FsError> {
        let (parent, name) = self.place(path);
        self.remove(Mutation::Unlink(mutation::Unlink { parent, name }))
    }

    pub fn remove_dir(&mut self, path: &str) -> Result<Option<Attr>, FsError> {
        let (parent, name) = self.place(path);
        self.remove(Mutation::RemoveDir(mutation::RemoveDir { parent, name }))
    }

    pub fn rename(
        &mut self,
        old: &str,
        new: &str,
        mode: RenameMode,
    ) -> Result<Option<Attr>, FsError> {
        let (parent, name) = self.place(old);
        let (new_parent, new_name) = self.place(new);
        self.remove(Mutation::Rename(mutation::Rename {
            parent,
            name,
            new_parent,
            new_name,
            mode,
        }))
    }

    pub fn set(&mut self, path: &str, changes: AttrChanges) -> Result<Attr, FsError> {
        let ino = self.ino(path);
        self.change(Mutation::SetAttr(mutation::SetAttr { ino, changes }))
    }

    pub fn chmod(&mut self, path: &str, mode: u16) -> Result<Attr, FsError> {
        self.set(
            path,
            AttrChanges {
                mode: Some(mode),
                ..AttrChanges::default()
            },
        )
    }

    pub fn chown(
        &mut self,
        path: &str,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<Attr, FsError> {
        self.set(
            path,
            AttrChanges {
                uid,
                gid,
                ..AttrChanges::default()
            },
        )
    }

    pub fn truncate(&mut self, path: &str, size_bytes: u64) -> Result<Attr, FsError> {
        self.set(
            path,
            AttrChanges {
                size_bytes: Some(size_bytes),
                ..AttrChanges::default()
            },
        )
    }

    pub fn allocate(&mut self, count: u32) -> Vec<BlockId> {
        let op = Mutation::AllocateBlocks(mutation::AllocateBlocks {
            count,
            rules: RULES,
            exclude: Vec::new(),
        });
        match self.run(op).unwrap() {
            Outcome::Blocks(blocks) => blocks,
            other => panic!("{other:?}"),
        }
    }

    /// Commits extents to one file.
    pub fn commit(&mut self, ino: InodeId, extents: &[Extent]) -> Result<Attr, FsError> {
        let files = vec![FileCommit {
            ino,
            extents: extents.to_vec(),
            append: false,
            mtime: None,
        }];
        let op = Mutation::Commit(mutation::Commit {
            files,
            durable: true,
        });
        match self.run(op)? {
            Outcome::Meta(MetaReply::Committed(mut files)) => {
                files.remove(0).map(|committed| committed.attr)
            }
            other => panic!("{other:?}"),
        }
    }

    pub fn seal(&mut self, block: BlockId, length_bytes: u64) -> Result<(), FsError> {
        self.done(Mutation::SealBlocks(mutation::SealBlocks {
            blocks: vec![SealedBlock {
                block,
                length_bytes,
                replicas: Vec::new(),
            }],
        }))
    }

    pub fn extents(&self, ino: InodeId) -> Vec<Extent> {
        let op = Query::GetExtents(query::GetExtents {
            ino,
            from_offset: 0,
        });
        match self.namespace.query(&Credentials::root(), &op).unwrap() {
            MetaReply::Extents { extents, end: true } => extents,
            other => panic!("{other:?}"),
        }
    }

    /// Names in a directory.
    pub fn list(&self, path: &str) -> Vec<String> {
        let op = Query::ReadDir(query::ReadDir {
            ino: self.ino(path),
            after: None,
            max_entries: u32::MAX,
            with_attributes: false,
        });
        match self.namespace.query(&Credentials::root(), &op).unwrap() {
            MetaReply::Entries { entries, .. } => {
                entries.iter().map(|entry| entry.name.to_string()).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    /// The state as bytes.
    pub fn snapshot(&self) -> Vec<u8> {
        snapshot(&self.namespace)
    }
}

pub(super) fn snapshot(namespace: &Namespace) -> Vec<u8> {
    let mut bytes = Vec::new();
    namespace.write_snapshot(&mut bytes).unwrap();
    bytes
}

pub(super) fn extent(
    file_offset: u64,
    length_bytes: u64,
    block: BlockId,
    block_offset: u64,
) -> Extent {
    Extent {
        file_offset,
        length_bytes,
        block,
        block_offset,
    }
}

/// The changes of one block among effects.
pub(super) fn changes_of(effects: &Effects, wanted: BlockId) -> Vec<BlockChange> {
    let of = |change: &BlockChange| match *change {
        BlockChange::Allocated { block, .. }
        | BlockChange::Grew { block, .. }
        | BlockChange::Sealed { block, .. }
        | BlockChange::Freed { block }
        | BlockChange::RulesChanged { block, .. } => block,
    };
    let changes = effects.blocks.iter();
    changes
        .filter(|change| of(change) == wanted)
        .cloned()
        .collect()
}
