//! Code shared by the examples that measure the engine.

use harvestfs_namenode::engine::namespace::{Applied, Command, Namespace, Outcome};
use harvestfs_protocol::ids::{BlockId, ClusterId, InodeId, SessionId};
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::meta::{FileCommit, MetaReply, Mutation, mutation};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{
    Credentials, Durability, Extent, FileKind, PlacementRules, Timestamp,
};

const RULES: PlacementRules = PlacementRules {
    replication: 3,
    durability: Durability::Strict,
    class: None,
};

/// Bytes of each file.
const FILE_BYTES: u64 = 4096;

/// A namespace and a client that packs small files into blocks.
pub struct Driver {
    /// The engine.
    pub namespace: Namespace,
    session: SessionId,
    sequence: u64,
    block: BlockId,
    block_used_bytes: u64,
    /// The applied commands, encoded, if they are to be collected.
    pub records: Option<Vec<Vec<u8>>>,
}

impl Driver {
    /// Starts with a fresh cluster, or continues with an existing namespace.
    pub fn new(continued: Option<Namespace>) -> Self {
        let is_fresh = continued.is_none();
        let mut driver = Self {
            namespace: continued.unwrap_or_default(),
            session: SessionId(0),
            sequence: 0,
            block: BlockId(0),
            block_used_bytes: BLOCK_BYTES_MAX,
            records: None,
        };
        if is_fresh {
            driver.apply(&Command::Format {
                cluster: ClusterId(1),
                now: Timestamp(0),
                root_uid: 0,
                root_gid: 0,
                block_bytes: BLOCK_BYTES_MAX,
                default_rules: RULES,
            });
        }
        driver
    }

    /// Begins a session, which runs the following mutations.
    pub fn open_session(&mut self) {
        let open = Command::OpenSession {
            client: "example".into(),
            now: Timestamp(0),
        };
        match self.apply(&open).reply {
            Outcome::Session(session) => self.session = session,
            other => panic!("{other:?}"),
        }
    }

    /// Applies a command that must succeed.
    pub fn apply(&mut self, command: &Command) -> Applied {
        if let Some(records) = &mut self.records {
            records.push(command.encode().expect("commands of examples are small"));
        }
        match self.namespace.apply(command) {
            Ok(applied) => applied,
            Err(error) => panic!("{error}: {command:?}"),
        }
    }

    /// Returns the command for the next mutation.
    pub fn command(&mut self, op: Mutation) -> Command {
        self.sequence += 1;
        Command::Mutate {
            session: self.session,
            sequence: self.sequence,
            answered_below: self.sequence,
            credentials: Credentials::root(),
            now: Timestamp(self.sequence as i64),
            held_elsewhere: false,
            op,
        }
    }

    /// Runs a mutation.
    pub fn run(&mut self, op: Mutation) -> Outcome {
        let command = self.command(op);
        self.apply(&command).reply
    }

    /// Runs a mutation that makes an inode.
    pub fn make(&mut self, op: Mutation) -> InodeId {
        match self.run(op) {
            Outcome::Meta(MetaReply::Attr(attr)) => attr.ino,
            other => panic!("{other:?}"),
        }
    }

    /// The place of the next small file's data: in the open block, or in a new one if that is full.
    pub fn next_extent(&mut self) -> Extent {
        if self.block_used_bytes + FILE_BYTES > BLOCK_BYTES_MAX {
            let op = Mutation::AllocateBlocks(mutation::AllocateBlocks {
                count: 1,
                rules: RULES,
                exclude: Vec::new(),
            });
            match self.run(op) {
                Outcome::Blocks(blocks) => self.block = blocks[0],
                other => panic!("{other:?}"),
            }
            self.block_used_bytes = 0;
        }
        let block_offset = self.block_used_bytes;
        self.block_used_bytes += FILE_BYTES;
        Extent {
            file_offset: 0,
            length_bytes: FILE_BYTES,
            block: self.block,
            block_offset,
        }
    }
}

/// A name of about 18 bytes.
pub fn name(kind: &str, number: u64) -> Name {
    let text = format!("{kind}-{number:09}.dat");
    match Name::new(text.as_bytes()) {
        Ok(name) => name,
        Err(error) => panic!("{error}: {text}"),
    }
}

/// Makes a regular file.
pub fn create(parent: InodeId, number: u64) -> Mutation {
    Mutation::Create(mutation::Create {
        parent,
        name: name("file", number),
        kind: FileKind::Regular,
        mode: 0o644,
        rdev: 0,
    })
}

/// Commits one extent to each of several files.
pub fn commit(files: Vec<(InodeId, Extent)>) -> Mutation {
    let file = |(ino, extent)| FileCommit {
        ino,
        extents: vec![extent],
        append: false,
        mtime: None,
    };
    Mutation::Commit(mutation::Commit {
        files: files.into_iter().map(file).collect(),
        durable: true,
    })
}
