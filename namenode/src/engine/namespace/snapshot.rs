//! The whole state as bytes, written and read as a stream.
//!
//! Layout: the magic, the version (u32), then frames: length (u32), CRC32 (u32), payload; numbers
//! are little-endian. A payload is a sequence of [`Record`]s in postcard; no record spans frames.
//! The record [`Record::End`] comes last and counts the others.
//!
//! Sums and what files use of blocks are not written: they are added up anew when the snapshot is
//! read, and [`Namespace::check`] has to find nothing wrong before it is used.

use std::io::{Read, Write};

use harvestfs_protocol::{
    ids::{InodeId, SessionId},
    name::Name,
    types::{Extent, Timestamp},
};
use serde::{Deserialize, Serialize};

use super::{
    BlockView, Formatted, Namespace, Outcome,
    chunk_set::ChunkSet,
    extents::{Extents, Piece, UseChanges},
    inode::{Body, FileData, Inode, Slot},
    operation::Operations,
    servers::Server,
    sessions::Session,
    settings::{self, Settings},
    trash::Trashed,
    usage::Quota,
};

const MAGIC: [u8; 8] = *b"HARVNAME";
/// The version of what follows the magic. Version 1 had neither quotas nor trash, nor what operators
/// changed; it reads as one without.
const VERSION: u32 = 2;
/// A frame is closed when it has this many bytes.
const FRAME_BYTES: usize = 256 << 10;
/// No frame is longer: the largest record (a part of a directory with the longest names) fits
/// behind an almost full frame.
const FRAME_BYTES_MAX: usize = 1 << 20;
/// No counter gets that far in the life of a cluster, and each can go on from there.
const COUNTER_MAX: u64 = u64::MAX / 2;
/// Extents, entries or numbers in one record.
const ITEMS_PER_RECORD: usize = 1_024;

/// Why a snapshot could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Reading or writing failed; a snapshot that ends early is `UnexpectedEof`.
    #[error("cannot read or write the snapshot: {0}")]
    Io(#[from] std::io::Error),
    /// Another version wrote it, or it is no snapshot.
    #[error("not a snapshot that this software reads: {0}")]
    Version(String),
    /// A checksum does not match, or the content contradicts itself.
    #[error("the snapshot is damaged: {0}")]
    Damaged(String),
}

fn damaged(why: impl Into<String>) -> SnapshotError {
    SnapshotError::Damaged(why.into())
}

/// A part of the state. Records come in the order of the variants, but for the later ones at the end;
/// those between `Inode` and `Free`, and these, repeat for each slot of the table of inodes.
#[derive(Debug, Serialize, Deserialize)]
enum Record {
    Header {
        formatted: Option<Formatted>,
        last_session: u64,
        last_block: u64,
        operations: Operations,
    },
    Server(Server),
    Session {
        session: SessionId,
        client: String,
        opened: Timestamp,
        answered_below: u64,
    },
    /// Of the session before.
    Reply {
        sequence: u64,
        outcome: Outcome,
    },
    Block {
        view: BlockView,
        committed: ChunkSet,
    },
    /// The next slot has no inode.
    Vacant {
        generation: u32,
    },
    /// The inode in the next slot.
    Inode(InodeRecord),
    /// Of the inode before.
    Extents(Vec<Extent>),
    /// Of the inode before.
    Entries(Vec<(Name, InodeId)>),
    /// Of the inode before.
    Xattr {
        name: Vec<u8>,
        value: Vec<u8>,
    },
    Free(Vec<u32>),
    Orphans(Vec<InodeId>),
    End {
        records: u64,
    },
    /// Of the inode before.
    DirectorySettings {
        quota_bytes: Option<u64>,
        quota_inodes: Option<u64>,
        trash_s: Option<u32>,
    },
    /// Comes behind the inodes, and before what is in it.
    TrashDirectory(InodeId),
    Trashed {
        ino: InodeId,
        origin: Vec<u8>,
        expires: Timestamp,
    },
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

    fn slot(self) -> Slot {
        // Of what is no directory, it follows from the names.
        let parent = match self.body {
            BodyRecord::Directory { parent } => parent,
            _ => InodeId::ROOT,
        };
        let body = match self.body {
            BodyRecord::Regular { size_bytes } => Body::Regular(FileData {
                size_bytes,
                extents: Extents::default(),
            }),
            BodyRecord::Directory { .. } => Body::Directory(Box::default()),
            BodyRecord::Symlink(target) => Body::Symlink(target.into()),
            BodyRecord::Fifo => Body::Fifo,
            BodyRecord::Socket => Body::Socket,
            BodyRecord::CharDevice(rdev) => Body::CharDevice(rdev),
            BodyRecord::BlockDevice(rdev) => Body::BlockDevice(rdev),
        };
        Slot {
            generation: self.generation,
            inode: Some(Inode {
                mode: self.mode,
                settings: self.settings,
                nlink: self.nlink,
                parent,
                uid: self.uid,
                gid: self.gid,
                atime: self.atime,
                mtime: self.mtime,
                ctime: self.ctime,
                content_version: self.content_version,
                xattrs: None,
                body,
            }),
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
    fn put(&mut self, record: &Record) -> Result<(), SnapshotError> {
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
            operations: self.operations.clone(),
        })?;
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
        for (ino, trashed) in self.trash.iter() {
            frames.put(&Record::Trashed {
                ino,
                origin: trashed.origin.to_vec(),
                expires: trashed.expires,
            })?;
        }
        let records = frames.records;
        frames.put(&Record::End { records })?;
        frames.flush()
    }

    /// Reads what [`Namespace::write_snapshot`] wrote, up to its end and no further. Never panics,
    /// and never allocates what a damaged snapshot merely claims.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn read_snapshot(from: &mut impl Read) -> Result<Self, SnapshotError> {
        let mut magic = [0; MAGIC.len()];
        from.read_exact(&mut magic)?;
        if magic != MAGIC {
            return Err(SnapshotError::Version("it does not start as one".into()));
        }
        let version = read_u32(from)?;
        if !(1..=VERSION).contains(&version) {
            return Err(SnapshotError::Version(format!(
                "it has version {version}, this software reads versions 1 to {VERSION}"
            )));
        }
        let mut reader = Reader::default();
        let mut payload = Vec::new();
        while !reader.ended {
            read_frame(from, &mut payload)?;
            let mut rest = payload.as_slice();
            while !rest.is_empty() {
                let (record, after) = postcard::take_from_bytes(rest)
                    .map_err(|error| damaged(format!("a record cannot be decoded: {error}")))?;
                rest = after;
                reader.take(record)?;
            }
        }
        reader.finish()
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
            let entries = directory
                .after(None)
                .filter_map(|(name, ino)| Some((Name::new(name).ok()?, ino)));
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
        }
        _ => {}
    }
    for (name, value) in inode.xattrs.iter().flat_map(|xattrs| xattrs.iter()) {
        frames.put(&Record::Xattr {
            name: name.to_vec(),
            value: value.to_vec(),
        })?;
    }
    Ok(())
}

fn read_u32(from: &mut impl Read) -> Result<u32, SnapshotError> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn read_frame(from: &mut impl Read, payload: &mut Vec<u8>) -> Result<(), SnapshotError> {
    let length = read_u32(from)? as usize;
    let checksum = read_u32(from)?;
    if length == 0 || length > FRAME_BYTES_MAX {
        return Err(damaged(format!("a frame of {length} bytes")));
    }
    payload.resize(length, 0);
    from.read_exact(payload)?;
    if crc32fast::hash(payload) != checksum {
        return Err(damaged("a checksum does not match"));
    }
    Ok(())
}

/// Builds a namespace from records.
#[derive(Default)]
struct Reader {
    namespace: Namespace,
    records: u64,
    session: Option<SessionId>,
    inode: Option<InodeId>,
    free: Vec<u32>,
    live_bytes: u64,
    ended: bool,
}

impl Reader {
    fn take(&mut self, record: Record) -> Result<(), SnapshotError> {
        if self.ended {
            return Err(damaged("something follows its end"));
        }
        if (self.records == 0) != matches!(record, Record::Header { .. }) {
            return Err(damaged("the header is not the first record, and only that"));
        }
        self.records += 1;
        let namespace = &mut self.namespace;
        let fits = match record {
            Record::Header {
                formatted,
                last_session,
                last_block,
                operations,
            } => {
                namespace.formatted = formatted;
                namespace.sessions.last = last_session;
                namespace.blocks.set_last(last_block);
                namespace.operations = operations;
                let rules = formatted.map(|it| it.default_rules);
                last_session.max(last_block) <= COUNTER_MAX
                    && rules.is_none_or(|rules| settings::check_rules(&rules).is_ok())
            }
            Record::Server(server) => namespace.servers.push(server).is_some(),
            Record::Session {
                session,
                client,
                opened,
                answered_below,
            } => {
                self.session = Some(session);
                let opened = Session::new(client, opened, answered_below);
                let known = namespace.sessions.sessions.insert(session, opened);
                known.is_none() && session.0 <= namespace.sessions.last
            }
            Record::Reply { sequence, outcome } => self
                .session
                .and_then(|session| namespace.sessions.sessions.get_mut(&session))
                .is_some_and(|session| session.restore_reply(sequence, outcome)),
            Record::Block { view, committed } => {
                self.live_bytes = self.live_bytes.saturating_add(view.live_bytes);
                namespace.blocks.restore(&view, committed)
            }
            Record::Vacant { generation } => {
                self.inode = None;
                namespace.inodes.push_slot(Slot {
                    generation,
                    inode: None,
                });
                true
            }
            Record::Inode(record) => {
                let rules = record.settings.rules(namespace.default_rules());
                let sound =
                    record.content_version <= COUNTER_MAX && settings::check_rules(&rules).is_ok();
                self.inode = namespace.inodes.push_slot(record.slot());
                sound && self.inode.is_some()
            }
            Record::Extents(extents) => self.take_extents(&extents),
            Record::Entries(entries) => self.take_entries(&entries),
            Record::Xattr { name, value } => self.take_xattr(&name, &value),
            Record::DirectorySettings {
                quota_bytes,
                quota_inodes,
                trash_s,
            } => {
                let quota = Quota {
                    bytes: quota_bytes,
                    inodes: quota_inodes,
                };
                self.take_directory_settings(quota, trash_s)
            }
            Record::TrashDirectory(ino) => namespace.trash.directory.replace(ino).is_none(),
            Record::Trashed {
                ino,
                origin,
                expires,
            } => {
                let origin = origin.into();
                let fresh = namespace.trash.get(ino).is_none();
                namespace.trash.insert(ino, Trashed { origin, expires });
                fresh
            }
            Record::Free(slots) => {
                self.free.extend(slots);
                self.free.len() as u64 <= namespace.inodes.slots()
            }
            Record::Orphans(inodes) => {
                namespace.orphans.extend(inodes);
                true
            }
            Record::End { records } => {
                self.ended = true;
                Some(self.records) == records.checked_add(1)
            }
        };
        if fits {
            Ok(())
        } else {
            Err(damaged(format!(
                "record {} does not fit those before it",
                self.records
            )))
        }
    }

    fn current(&mut self) -> Option<&mut Inode> {
        self.namespace.inodes.get_mut(self.inode?).ok()
    }

    fn take_extents(&mut self, extents: &[Extent]) -> bool {
        let Some(Body::Regular(file)) = self.current().map(|inode| &mut inode.body) else {
            return false;
        };
        // The use of blocks is added up at the end.
        let mut changes = UseChanges::default();
        for extent in extents {
            let Some(piece) = Piece::new(extent) else {
                return false;
            };
            // Behind the ones before: nothing may be hidden.
            if file.extents.from(piece.file_offset).next().is_some() {
                return false;
            }
            file.extents.write(piece, &mut changes);
        }
        true
    }

    fn take_entries(&mut self, entries: &[(Name, InodeId)]) -> bool {
        let Some(Body::Directory(directory)) = self.current().map(|inode| &mut inode.body) else {
            return false;
        };
        entries
            .iter()
            .all(|(name, ino)| directory.insert(name, *ino).is_none())
    }

    fn take_directory_settings(&mut self, quota: Quota, trash_s: Option<u32>) -> bool {
        let Some(Body::Directory(directory)) = self.current().map(|inode| &mut inode.body) else {
            return false;
        };
        directory.quota = quota;
        directory.trash_s = trash_s;
        true
    }

    fn take_xattr(&mut self, name: &[u8], value: &[u8]) -> bool {
        let Some(inode) = self.current() else {
            return false;
        };
        inode.xattrs.get_or_insert_default().insert(name, value);
        true
    }

    fn finish(self) -> Result<Namespace, SnapshotError> {
        let mut namespace = self.namespace;
        if !namespace.inodes.set_free(self.free) {
            return Err(damaged("its free slots are not free"));
        }
        if !namespace.add_up() {
            return Err(damaged("a file uses a block that is not there"));
        }
        if namespace.blocks.live_bytes() != self.live_bytes {
            return Err(damaged("files do not use of blocks what these say"));
        }
        match namespace.check().into_iter().next() {
            None => Ok(namespace),
            Some(finding) => Err(damaged(format!(
                "{} (inode {:?}, block {:?})",
                finding.message, finding.ino, finding.block
            ))),
        }
    }
}

impl Namespace {
    /// Adds up what snapshots leave out. False when a file uses an unknown block.
    fn add_up(&mut self) -> bool {
        let default_rules = self.default_rules();
        let blocks = &mut self.blocks;
        for (_, inode) in self.inodes.iter() {
            match &inode.body {
                Body::Regular(file) => {
                    self.files += 1;
                    self.spilled_pieces += file.extents.spilled_pieces() as u64;
                    let rules = inode.settings.rules(default_rules);
                    if !file
                        .extents
                        .iter()
                        .all(|piece| blocks.restore_use(rules, &piece))
                    {
                        return false;
                    }
                }
                Body::Directory(directory) => {
                    self.directories += 1;
                    self.names += directory.len() as u64;
                    self.directories_with_settings += u64::from(!inode.settings.is_empty());
                    self.directories_with_quota += u64::from(!directory.quota.is_unlimited());
                    self.directories_with_trash += u64::from(directory.trash_s.is_some());
                }
                _ => {}
            }
        }
        self.restore_usage();
        true
    }
}
