//! The namespace: inodes, directories, the extents of files, the journaled part of blocks,
//! sessions with the replies to their mutations, and the datanodes ever registered.
//!
//! [`Namespace::apply`] changes it, [`Namespace::query`] reads it. It has no clock and no random
//! generator; every command carries its time. It does not know where replicas are (that is soft
//! state), nor which sessions hold a file open: the caller passes that with each removal.
//!
//! | module | contents |
//! |---|---|
//! | `command` | the commands, their encoding, outcomes and effects |
//! | `inode`, `directory`, `extents`, `blocks`, `chunk_set`, `sessions`, `servers` | the tables |
//! | `permissions`, `settings` | modes and owners; the attributes `user.harvestfs.*` |
//! | `operation` | changes that operators made while the cluster ran |
//! | `usage`, `trash` | usage of each directory tree, and quotas; removed files that are kept |
//! | `frozen` | snapshots of directories |
//! | `edition` | the rules by which commands are carried out, and the record from which they apply |
//! | `version` | the version of the cluster, which limits what records and snapshots may contain |
//! | `epochs` | the timeline, and which ids were allocated in each of its epochs |
//! | `upkeep` | timed work: raising replication, ending lifetimes |
//! | `tree`, `rename`, `attributes`, `content`, `xattr`, `query` | the operations |
//! | `compaction` | sparse blocks, and moving the data that is still used in them |
//! | `snapshot`, `check` | the state as bytes, and its invariants |

mod attributes;
mod blocks;
mod check;
mod chunk_set;
mod command;
mod compaction;
mod content;
mod directory;
mod edition;
mod epochs;
mod extents;
mod frozen;
mod inode;
mod operation;
mod permissions;
mod query;
mod rename;
mod servers;
mod sessions;
mod settings;
mod snapshot;
#[cfg(test)]
mod tests;
mod trash;
mod tree;
mod upkeep;
mod usage;
mod version;
mod views;
mod xattr;

use std::collections::{BTreeMap, BTreeSet};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId, SessionId};
use harvestfs_protocol::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, GROUPS_MAX};
use harvestfs_protocol::meta::Mutation;
use harvestfs_protocol::types::{Credentials, Durability, PlacementRules, Timestamp};
use harvestfs_protocol::version::Version;

pub use command::{Applied, BlockChange, COMMAND_VERSION, Command, DecodeError, Effects, Outcome};
pub use edition::EDITION;
pub use epochs::EpochView;
pub use operation::{Choice, Operation};
pub use snapshot::SnapshotError;
pub use upkeep::EntryCursor;
pub use views::{BlockView, Counts, Formatted, ServerView, SessionView};

use crate::engine::count::Count;
use blocks::BlockTable;
use directory::Directory;
use extents::UseChanges;
use inode::{Inode, InodeTable};
use operation::Operations;
use rename::Place;
use servers::{Server, ServerTable};
use sessions::SessionTable;
use trash::Trash;

/// The namespace of one cluster.
#[derive(Debug, Default)]
pub struct Namespace {
    formatted: Option<Formatted>,
    inodes: InodeTable,
    blocks: BlockTable,
    sessions: SessionTable,
    servers: ServerTable,
    operations: Operations,
    edition: u8,
    version: Version,
    /// Records of the next version.
    #[cfg(feature = "next-version")]
    probes: u64,
    /// In order; empty before the first.
    epochs: Vec<EpochView>,
    /// Inodes without a name that a session holds open.
    orphans: BTreeSet<InodeId>,
    /// Orphans that no session holds: directories that something is still charged to.
    unheld: BTreeSet<InodeId>,
    /// Unheld directories that nothing is charged to any more; empty between commands.
    emptied: Vec<InodeId>,
    /// The directories that name each file with several names: ascending, one for each name.
    further_names: BTreeMap<InodeId, Vec<InodeId>>,
    trash: Trash,
    /// Files that will get more replicas later.
    to_raise: BTreeSet<InodeId>,
    /// Directories that set a lifetime for their entries.
    with_lifetime: BTreeSet<InodeId>,

    // Sums, to answer without a walk.
    files: Count,
    directories: Count,
    directories_with_settings: Count,
    directories_with_quota: Count,
    directories_with_trash: Count,
    names: Count,
    spilled_pieces: Count,

    /// Changes in the use of blocks by the edit in progress; empty between edits, and kept to reuse
    /// its allocation.
    changes: UseChanges,
}

/// The context of a mutation.
struct Call<'a> {
    session: SessionId,
    credentials: &'a Credentials,
    now: Timestamp,
    held_elsewhere: bool,
}

impl<'a> Call<'a> {
    /// A call by the namenode itself. Inodes count as held, since only the server knows which are. `root`
    /// are the credentials of root.
    fn of_namenode(root: &'a Credentials, now: Timestamp) -> Self {
        Self {
            session: SessionId(0),
            credentials: root,
            now,
            held_elsewhere: true,
        }
    }
}

impl Namespace {
    /// An empty namespace; its first command must be [`Command::Format`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies a command. Deterministic: the state afterwards and the outcome depend on the state
    /// before and on the command only. A mutation that was applied before is answered from memory.
    ///
    /// # Errors
    /// The reason why the command was refused; the namespace is then unchanged.
    pub fn apply(&mut self, command: &Command) -> Result<Applied, FsError> {
        let mut effects = Effects::default();
        assert!(
            self.emptied.is_empty(),
            "the last command left {:?}",
            self.emptied
        );
        let before = self.extent_of_tables();
        let reply = match self.dispatch(command, &mut effects) {
            Ok(reply) => reply,
            Err(error) => {
                self.assert_unchanged(before, &error);
                return Err(error);
            }
        };
        while let Some(ino) = self.emptied.pop() {
            self.release_orphans(&[ino], &mut effects);
        }
        self.blocks.settle(&mut effects);
        Ok(Applied { reply, effects })
    }

    fn extent_of_tables(&self) -> [u64; 9] {
        [
            self.inodes.len(),
            self.names.get(),
            self.blocks.last(),
            self.blocks.live_bytes(),
            self.sessions.last,
            self.servers.len() as u64,
            self.epochs.len() as u64,
            self.edition.into(),
            self.version.0.into(),
        ]
    }

    /// Asserts that a refused command has changed nothing: it is in no journal, so a partial change would
    /// be missing after a restart.
    fn assert_unchanged(&self, before: [u64; 9], error: &FsError) {
        let after = self.extent_of_tables();
        assert_eq!(
            after, before,
            "inodes, names, blocks and so on after and before a command that was refused: {error}"
        );
        let (changes, emptied) = (&self.changes, &self.emptied);
        assert!(
            changes.is_empty() && emptied.is_empty() && self.blocks.is_settled(),
            "a command that was refused left {changes:?} to be counted, and {emptied:?} to be released, \
             or blocks to be settled: {error}"
        );
    }

    fn dispatch(&mut self, command: &Command, effects: &mut Effects) -> Result<Outcome, FsError> {
        if self.formatted.is_none() && !matches!(command, Command::Format { .. }) {
            return Err(FsError::Internal("the cluster is not formatted".into()));
        }
        self.check_exists(command)?;
        match command {
            Command::Format {
                cluster,
                now,
                root_uid,
                root_gid,
                block_bytes,
                default_rules,
            } => {
                let formatted = Formatted {
                    cluster: *cluster,
                    block_bytes: *block_bytes,
                    default_rules: *default_rules,
                };
                self.format(formatted, *now, (*root_uid, *root_gid))
            }
            Command::RegisterServer {
                server,
                storages,
                now,
            } => self.servers.register(server, storages, *now),
            Command::Operate(operation) => {
                self.operate(operation)?;
                Ok(Outcome::Done)
            }
            Command::BeginEpoch {
                epoch,
                first_record,
                gives_up,
                ..
            } => self.begin_epoch(*epoch, *first_record, *gives_up),
            Command::BeginEdition { edition, now } => self.begin_edition(*edition, *now, effects),
            Command::RaiseVersion { version, .. } => self.raise_version(*version),
            #[cfg(feature = "next-version")]
            Command::Probe { .. } => {
                self.probes += 1;
                Ok(Outcome::Done)
            }
            Command::OpenSession { client, now } => self.open_session(client, *now),
            Command::CloseSession { session, .. } => self.close_session(*session, effects),
            Command::NoteLease {
                session,
                has_lapsed,
            } => self.note_lease(*session, *has_lapsed),
            Command::ReleaseOrphans { inodes, .. } => {
                self.release_orphans(inodes, effects);
                Ok(Outcome::Done)
            }
            Command::PurgeTrash { inodes, now } => {
                self.purge_trash(inodes, *now, effects);
                Ok(Outcome::Done)
            }
            Command::RaiseReplication { inodes, now } => {
                self.raise_replication(inodes, *now, effects);
                Ok(Outcome::Done)
            }
            Command::RemoveExpired { entries, now } => {
                self.remove_expired(entries, *now, effects)?;
                Ok(Outcome::Done)
            }
            Command::Mutate {
                session,
                sequence,
                answered_below,
                credentials,
                now,
                held_elsewhere,
                op,
            } => {
                if let Some(known) = self.sessions.get(*session)?.remembered(*sequence) {
                    return Ok(known.clone());
                }
                self.sessions
                    .check_sequence(*session, *sequence, *answered_below)?;
                let call = Call {
                    session: *session,
                    credentials,
                    now: *now,
                    held_elsewhere: *held_elsewhere,
                };
                let outcome = self.mutate(&call, op, effects)?;
                self.sessions
                    .answered(*session, *sequence, *answered_below, &outcome);
                Ok(outcome)
            }
        }
    }

    fn format(
        &mut self,
        formatted: Formatted,
        now: Timestamp,
        (uid, gid): (u32, u32),
    ) -> Result<Outcome, FsError> {
        if self.formatted.is_some() {
            return Err(FsError::InvalidArgument(
                "the cluster is formatted already".into(),
            ));
        }
        settings::check_rules(&formatted.default_rules)?;
        if !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&formatted.block_bytes) {
            return Err(FsError::InvalidArgument(format!(
                "blocks have {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX} bytes"
            )));
        }
        let root = Inode::directory_of_its_own((0o755, uid, gid), InodeId::ROOT, now);
        self.insert_inode(root)?;
        self.formatted = Some(formatted);
        Ok(Outcome::Done)
    }

    fn mutate(
        &mut self,
        call: &Call,
        op: &Mutation,
        effects: &mut Effects,
    ) -> Result<Outcome, FsError> {
        if call.credentials.groups.len() > GROUPS_MAX {
            return Err(FsError::InvalidArgument(format!(
                "more than {GROUPS_MAX} supplementary groups"
            )));
        }
        self.check_not_frozen(op.facts().unfrozen)?;
        let reply = match op {
            Mutation::SetAttr(op) => self.set_attr(call, op.ino, &op.changes, effects),
            Mutation::Create(op) => {
                let kind = (op.kind, op.mode, op.rdev);
                self.create(call, op.parent, &op.name, kind, effects)
            }
            Mutation::MakeDir(op) => self.make_dir(call, op.parent, &op.name, op.mode, effects),
            Mutation::Symlink(op) => self.symlink(call, op.parent, &op.name, &op.target, effects),
            Mutation::Link(op) => self.link(call, op.ino, op.parent, &op.name, effects),
            Mutation::Unlink(op) => self.unlink(call, op.parent, &op.name, effects),
            Mutation::RemoveDir(op) => self.remove_dir(call, op.parent, &op.name, effects),
            Mutation::RemoveToTrash(op) => {
                self.remove_to_trash(call, op.parent, &op.name, op.retention_s, effects)
            }
            Mutation::CreateSnapshot(op) => self.create_snapshot(call, op.ino, &op.name, effects),
            Mutation::RemoveSnapshot(op) => self.remove_snapshot(call, op.ino, &op.name, effects),
            Mutation::Rename(op) => {
                let old = Place {
                    parent: op.parent,
                    name: &op.name,
                };
                let new = Place {
                    parent: op.new_parent,
                    name: &op.new_name,
                };
                self.rename(call, old, new, op.mode, effects)
            }
            Mutation::SetXattr(op) => {
                self.set_xattr(call, op.ino, &op.name, &op.value, op.mode, effects)
            }
            Mutation::RemoveXattr(op) => self.remove_xattr(call, op.ino, &op.name, effects),
            Mutation::Fallocate(op) => {
                let range = (op.offset, op.length_bytes);
                self.fallocate(call, op.ino, range, op.mode, effects)
            }
            Mutation::CloneRange(op) => {
                let source = (op.source, op.source_offset);
                let destination = (op.destination, op.destination_offset);
                self.clone_range(call, source, destination, op.length_bytes, effects)
            }
            Mutation::AllocateBlocks(op) => {
                return self.allocate_blocks(call, op.count, op.rules, effects);
            }
            Mutation::Commit(op) => self.commit(call, &op.files, effects),
            Mutation::SealBlocks(op) => self.seal_blocks(call, &op.blocks, effects),
            Mutation::CreateScratch(op) => self.create_scratch(call, &op.rules, effects),
            Mutation::Relocate(op) => self.relocate(call, op.scratch, &op.pieces, effects),
        };
        reply.map(Outcome::Meta)
    }

    /// The parameters that [`Command::Format`] set; none before it.
    #[must_use]
    pub fn formatted(&self) -> Option<Formatted> {
        self.formatted
    }

    fn default_rules(&self) -> PlacementRules {
        self.formatted.map_or(
            PlacementRules {
                replication: 1,
                durability: Durability::Strict,
                class: None,
            },
            |formatted| formatted.default_rules,
        )
    }

    /// The outcome of a mutation that was already applied and that the client has not confirmed.
    #[must_use]
    pub fn remembered_reply(&self, session: SessionId, sequence: u64) -> Option<&Outcome> {
        self.sessions.get(session).ok()?.remembered(sequence)
    }

    /// The inode that a mutation would take the last name from, if it were allowed.
    #[must_use]
    pub fn removal_target(&self, op: &Mutation) -> Option<InodeId> {
        let (parent, name) = op.facts().removes?;
        let ino = self.inodes.get(parent).ok()?.directory().ok()?.get(name)?;
        let inode = self.inodes.get(ino).ok()?;
        (inode.is_directory() || inode.nlink == 1).then_some(ino)
    }

    /// Whether the inode exists, orphans included.
    #[must_use]
    pub fn exists(&self, ino: InodeId) -> bool {
        self.inodes.get(ino).is_ok()
    }

    /// The rules for the blocks of a file: its settings, completed by the cluster's defaults.
    ///
    /// # Errors
    /// [`FsError::Stale`] when there is no such inode.
    pub fn rules_of(&self, ino: InodeId) -> Result<PlacementRules, FsError> {
        Ok(self.inodes.get(ino)?.settings.rules(self.default_rules()))
    }

    /// All blocks, in ascending order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockView> {
        self.blocks.iter()
    }

    /// The number of blocks that a session writes; counting stops at `max`.
    #[must_use]
    pub fn blocks_written_by(&self, session: SessionId, max: usize) -> usize {
        self.blocks.count_written_by(session, max)
    }

    /// One block.
    #[must_use]
    pub fn block(&self, block: BlockId) -> Option<BlockView> {
        self.blocks.get(block)
    }

    /// All datanodes ever registered, in the order of their numbers.
    pub fn servers(&self) -> impl Iterator<Item = ServerView<'_>> {
        self.servers.iter().map(|(node, server)| server.view(node))
    }

    /// The datanode of a server.
    #[must_use]
    pub fn server(&self, name: &str) -> Option<ServerView<'_>> {
        let (node, server) = self.servers.by_name(name)?;
        Some(server.view(node))
    }

    /// All sessions, oldest first.
    pub fn sessions(&self) -> impl Iterator<Item = SessionView<'_>> {
        self.sessions
            .sessions
            .iter()
            .map(|(&id, session)| session.view(id))
    }

    /// One session.
    #[must_use]
    pub fn session(&self, session: SessionId) -> Option<SessionView<'_>> {
        let found = self.sessions.get(session).ok()?;
        Some(found.view(session))
    }

    /// Inodes without a name that are kept because a session holds them open.
    pub fn orphans(&self) -> impl Iterator<Item = InodeId> {
        self.orphans.difference(&self.unheld).copied()
    }

    /// Totals.
    #[must_use]
    pub fn counts(&self) -> Counts {
        // A tree's nodes are about two thirds full.
        let names = self.names.get() * (size_of::<[u64; 4]>() as u64) * 3 / 2;
        let pieces = self.spilled_pieces.get() * (size_of::<[u64; 3]>() as u64) * 3 / 2;
        let directories = self.directories.get() * size_of::<Directory>() as u64;
        let several = self.further_names.values().map(Vec::len).sum::<usize>();
        let several = several * size_of::<[InodeId; 4]>();
        let servers = self.servers.len() * size_of::<Server>();
        Counts {
            inodes: self.inodes.len(),
            files: self.files.get(),
            directories: self.directories.get(),
            orphans: (self.orphans.len() - self.unheld.len()) as u64,
            blocks: self.blocks.len() as u64,
            sessions: self.sessions.sessions.len() as u64,
            servers: self.servers.len() as u64,
            live_bytes: self.blocks.live_bytes(),
            memory_bytes: self.inodes.memory_bytes()
                + self.blocks.memory_bytes()
                + names
                + pieces
                + directories
                + (several + servers) as u64,
        }
    }
}
