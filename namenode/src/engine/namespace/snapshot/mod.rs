//! Snapshots of the namespace: the whole state as bytes, written and read as a stream.
//!
//! Layout: the magic, the version (u32), then frames: length (u32), CRC32 (u32), payload; numbers
//! are little-endian. A payload is a sequence of [`Record`]s in postcard; no record spans frames.
//! The record [`Record::End`] comes last and counts the others. `behind` describes what may follow it in a file.
//!
//! Sums and the use of blocks by files are not written: they are recomputed when the snapshot is
//! read, and [`Namespace::check`] must report no finding before it is used.

mod behind;
mod read;

use std::io::Write;
use std::num::{NonZeroU8, NonZeroU32};

use harvestfs_protocol::ids::{InodeId, NodeId, SessionId};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Extent, Timestamp};
use harvestfs_protocol::version::{Unfit, Version};
use serde::{Deserialize, Serialize};

use super::chunk_set::ChunkSet;
use super::inode::{Body, Inode, Slot};
use super::operation::{Choice, Operations};
use super::servers::Server;
use super::settings::Settings;
use super::usage::Quota;
use super::{BlockView, EpochView, Formatted, Namespace, Outcome, directory};

const MAGIC: [u8; 8] = *b"HARVNAME";
/// The version of the format after the magic. No two versions differ in a single bit, since no checksum
/// covers this field.
const VERSION: u32 = 11;
/// Earlier versions that can still be read: 1 had no quotas, no trash and no changes by operators; 2 had
/// no raised replication and no lifetimes, 4 no epochs, 7 no editions, 8 no version of the cluster. Since
/// then, the version of the cluster determines which records there may be.
const VERSIONS_BEFORE: [u32; 5] = [1, 2, 4, 7, 8];
const _: () = {
    let [a, b, c, d, e] = VERSIONS_BEFORE;
    let all = [a, b, c, d, e, VERSION];
    let mut pair = 0;
    while pair < all.len() * all.len() {
        let bits = (all[pair / all.len()] ^ all[pair % all.len()]).count_ones();
        assert!(bits != 1, "a bit that flips makes a version another one");
        pair += 1;
    }
};
/// A frame is closed when it has this many bytes.
const FRAME_BYTES: usize = 256 << 10;
/// The most bytes in a frame: the largest record (a part of a directory with the longest names) still
/// fits after almost `FRAME_BYTES`.
const FRAME_BYTES_MAX: usize = 1 << 20;
/// Extents, entries or numbers in one record.
const ITEMS_PER_RECORD: usize = 1_024;

/// Why a snapshot could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Reading or writing failed; a snapshot that ends early is `UnexpectedEof`.
    #[error("cannot read or write the snapshot: {0}")]
    Io(#[from] std::io::Error),
    /// It was written in another version of the format, or is no snapshot.
    #[error("not a snapshot that this software reads: {0}")]
    Version(String),
    /// A checksum does not match, or the content contradicts itself.
    #[error("the snapshot is damaged: {0}")]
    Damaged(String),
    /// Its cluster has a newer version than this program supports.
    #[error(transparent)]
    Unfit(#[from] Unfit),
}

fn damaged(why: impl Into<String>) -> SnapshotError {
    SnapshotError::Damaged(why.into())
}

/// A part of the state. Records come in the order of the variants, except for the variants after `End`,
/// which were added later; their comments name the order where it matters. `Vacant` or `Inode`, with the
/// records of that inode, repeats for each slot of the table of inodes.
#[derive(Debug, Serialize, Deserialize)]
enum Record {
    Header {
        formatted: Option<Formatted>,
        last_session: u64,
        last_block: u64,
    },
    Server(Server),
    Session {
        session: SessionId,
        client: String,
        opened: Timestamp,
        answered_below: u64,
    },
    /// A remembered reply of the preceding session.
    Reply {
        sequence: u64,
        outcome: Outcome,
    },
    Block {
        view: BlockView,
        committed: ChunkSet,
    },
    /// The next slot, which holds no inode.
    Vacant {
        generation: u32,
    },
    /// The inode in the next slot.
    Inode(InodeRecord),
    /// Extents of the preceding inode.
    Extents(Vec<Extent>),
    /// Entries of the preceding inode.
    Entries(Vec<(Name, InodeId)>),
    /// An extended attribute of the preceding inode.
    Xattr {
        name: Vec<u8>,
        value: Vec<u8>,
    },
    Free(Vec<u32>),
    Orphans(Vec<InodeId>),
    End {
        records: u64,
    },
    /// Settings of the preceding inode.
    DirectorySettings {
        quota_bytes: Option<u64>,
        quota_inodes: Option<u64>,
        trash_s: Option<u32>,
    },
    /// Comes after the inodes, and before the entries of the trash.
    TrashDirectory(InodeId),
    Trashed {
        ino: InodeId,
        origin: Vec<u8>,
        expires: Timestamp,
    },
    Operations(Operations),
    /// Settings of the preceding inode.
    Raise {
        replication: Option<NonZeroU8>,
        after_s: Option<NonZeroU32>,
    },
    /// A setting of the preceding inode.
    Lifetime {
        seconds: NonZeroU32,
    },
    /// The end of the maintenance of a preceding server.
    Maintenance {
        node: NodeId,
        until: Timestamp,
    },
    /// Comes after `Operations`.
    BalanceSpread(Choice<u32>),
    /// Epochs come in order.
    Epoch(EpochView),
    Edition(u8),
    /// Comes after `TrashDirectory`.
    TrashOfUser {
        uid: u32,
        directory: InodeId,
    },
    /// Comes after the `Trashed` record of the same inode.
    TrashedFrom {
        ino: InodeId,
        directory: InodeId,
        counted_in: Option<InodeId>,
    },
    /// Inodes without a name that are not directories, each with the directory in which it counts.
    Nameless(Vec<(InodeId, InodeId)>),
    /// Orphans that no session holds.
    Unheld(Vec<InodeId>),
    /// The version of the cluster. Comes right after the header, before the records that it adds.
    Version(Version),
    /// A record of the next version. Always the last variant.
    #[cfg(feature = "next-version")]
    Probes(u64),
}

#[derive(Debug, Serialize, Deserialize)]
struct InodeRecord {
    generation: u32,
    mode: u16,
    settings: Settings,
    nlink: u32,
    uid: u32,
    gid: u32,
    atime: Timestamp,
    mtime: Timestamp,
    ctime: Timestamp,
    content_version: u64,
    body: BodyRecord,
}

#[derive(Debug, Serialize, Deserialize)]
enum BodyRecord {
    Regular { size_bytes: u64 },
    Directory { parent: InodeId },
    Symlink(Vec<u8>),
    Fifo,
    Socket,
    CharDevice(u32),
    BlockDevice(u32),
}

impl InodeRecord {
    fn new(generation: u32, inode: &Inode) -> Self {
        Self {
            generation,
            mode: inode.mode,
            settings: inode.settings,
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            content_version: inode.content_version,
            body: match &inode.body {
                Body::Regular(file) => BodyRecord::Regular {
                    size_bytes: file.size_bytes,
                },
                Body::Directory(_) => BodyRecord::Directory {
                    parent: inode.parent,
                },
                Body::Symlink(target) => BodyRecord::Symlink(target.to_vec()),
                Body::Fifo => BodyRecord::Fifo,
                Body::Socket => BodyRecord::Socket,
                Body::CharDevice(rdev) => BodyRecord::CharDevice(*rdev),
                Body::BlockDevice(rdev) => BodyRecord::BlockDevice(*rdev),
            },
        }
    }
}

/// Packs records into frames.
struct Frames<'a, W> {
    to: &'a mut W,
    payload: Vec<u8>,
    records: u64,
}

impl<W: Write> Frames<'_, W> {
    fn put(&mut self, record: &impl Serialize) -> Result<(), SnapshotError> {
        let payload = std::mem::take(&mut self.payload);
        self.payload = postcard::to_extend(record, payload)
            .map_err(|error| damaged(format!("a record cannot be encoded: {error}")))?;
        self.records += 1;
        if self.payload.len() >= FRAME_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), SnapshotError> {
        if self.payload.len() > FRAME_BYTES_MAX {
            return Err(damaged("a frame is too long to be read again"));
        }
        // At most FRAME_BYTES_MAX.
        let length = self.payload.len() as u32;
        self.to.write_all(&length.to_le_bytes())?;
        self.to
            .write_all(&crc32fast::hash(&self.payload).to_le_bytes())?;
        self.to.write_all(&self.payload)?;
        self.payload.clear();
        Ok(())
    }

    fn put_parts<T>(
        &mut self,
        items: impl Iterator<Item = T>,
        record: fn(Vec<T>) -> Record,
    ) -> Result<(), SnapshotError> {
        let mut items = items.peekable();
        while items.peek().is_some() {
            self.put(&record(items.by_ref().take(ITEMS_PER_RECORD).collect()))?;
        }
        Ok(())
    }
}

impl Namespace {
    /// Writes the whole state. Equal states write equal bytes.
    ///
    /// # Errors
    /// [`SnapshotError::Io`].
    pub fn write_snapshot(&self, to: &mut impl Write) -> Result<(), SnapshotError> {
        assert!(
            self.emptied.is_empty() && self.changes.is_empty(),
            "a command is under way: {:?} are to be released, {:?} to be counted",
            self.emptied,
            self.changes
        );
        assert!(
            self.unheld.is_subset(&self.orphans),
            "{:?} are orphans that no session holds, but not among the orphans",
            self.unheld
        );
        to.write_all(&MAGIC)?;
        to.write_all(&VERSION.to_le_bytes())?;
        let mut frames = Frames {
            to,
            payload: Vec::with_capacity(FRAME_BYTES_MAX),
            records: 0,
        };
        frames.put(&Record::Header {
            formatted: self.formatted,
            last_session: self.sessions.last,
            last_block: self.blocks.last(),
        })?;
        frames.put(&Record::Version(self.version))?;
        #[cfg(feature = "next-version")]
        if self.version >= Version::NEXT {
            frames.put(&Record::Probes(self.probes))?;
        }
        for (_, server) in self.servers.iter() {
            frames.put(&Record::Server(server.clone()))?;
        }
        for (&id, session) in &self.sessions.sessions {
            frames.put(&Record::Session {
                session: id,
                client: session.client.clone(),
                opened: session.opened,
                answered_below: session.answered_below,
            })?;
            for (sequence, outcome) in &session.replies {
                frames.put(&Record::Reply {
                    sequence: *sequence,
                    outcome: outcome.clone(),
                })?;
            }
        }
        for block in self.blocks.iter() {
            frames.put(&Record::Block {
                view: block,
                committed: self.blocks.committed_chunks(block.block),
            })?;
        }
        for slot in self.inodes.iter_slots() {
            write_slot(slot, &mut frames)?;
        }
        frames.put_parts(self.inodes.free().iter().copied(), Record::Free)?;
        frames.put_parts(self.orphans.iter().copied(), Record::Orphans)?;
        if let Some(directory) = self.trash.directory {
            frames.put(&Record::TrashDirectory(directory))?;
        }
        for (uid, directory) in self.trash.of_users() {
            frames.put(&Record::TrashOfUser { uid, directory })?;
        }
        for (ino, trashed) in self.trash.iter() {
            frames.put(&Record::Trashed {
                ino,
                origin: trashed.origin.to_vec(),
                expires: trashed.expires,
            })?;
            frames.put(&Record::TrashedFrom {
                ino,
                directory: trashed.directory,
                counted_in: trashed.counted_in,
            })?;
        }
        let nameless = self.orphans.iter().filter_map(|&ino| {
            let inode = self.inodes.known(ino);
            (!inode.is_directory()).then_some((ino, inode.parent))
        });
        frames.put_parts(nameless, Record::Nameless)?;
        frames.put_parts(self.unheld.iter().copied(), Record::Unheld)?;
        frames.put(&Record::Operations(self.operations.clone()))?;
        if let Some(choice) = &self.operations.balance_spread {
            frames.put(&Record::BalanceSpread(choice.clone()))?;
        }
        for (node, server) in self.servers.iter() {
            if let Some(until) = server.maintenance_until {
                frames.put(&Record::Maintenance { node, until })?;
            }
        }
        for epoch in &self.epochs {
            frames.put(&Record::Epoch(epoch.clone()))?;
        }
        frames.put(&Record::Edition(self.edition))?;
        let records = frames.records;
        frames.put(&Record::End { records })?;
        frames.flush()
    }
}

fn write_slot<W: Write>(slot: &Slot, frames: &mut Frames<W>) -> Result<(), SnapshotError> {
    let Some(inode) = &slot.inode else {
        return frames.put(&Record::Vacant {
            generation: slot.generation,
        });
    };
    frames.put(&Record::Inode(InodeRecord::new(slot.generation, inode)))?;
    match &inode.body {
        Body::Regular(file) => {
            let extents = file.extents.iter().map(|piece| piece.extent());
            frames.put_parts(extents, Record::Extents)?;
        }
        Body::Directory(directory) => {
            let entries = directory.after(None);
            let entries = entries.map(|(name, ino)| (directory::name_of_entry(name), ino));
            frames.put_parts(entries, Record::Entries)?;
            let Quota { bytes, inodes } = directory.quota;
            let trash_s = directory.trash_s;
            if !directory.quota.is_unlimited() || trash_s.is_some() {
                frames.put(&Record::DirectorySettings {
                    quota_bytes: bytes,
                    quota_inodes: inodes,
                    trash_s,
                })?;
            }
            if let Some(seconds) = directory.lifetime_s {
                frames.put(&Record::Lifetime { seconds })?;
            }
        }
        _ => {}
    }
    let (replication, after_s) = inode.settings.raise_parts();
    if replication.is_some() || after_s.is_some() {
        frames.put(&Record::Raise {
            replication,
            after_s,
        })?;
    }
    for (name, value) in inode.xattrs.iter().flat_map(|xattrs| xattrs.iter()) {
        frames.put(&Record::Xattr {
            name: name.to_vec(),
            value: value.to_vec(),
        })?;
    }
    Ok(())
}
