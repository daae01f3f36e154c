//! Inodes and the table of them.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::{Attr, FileKind, MODE_FROZEN, Timestamp};

use super::directory::Directory;
use super::extents::Extents;
use super::settings::Settings;
use super::xattr::Xattrs;
use crate::engine::count::Count;

pub(super) const SET_USER_ID: u16 = 0o4000;
pub(super) const SET_GROUP_ID: u16 = 0o2000;
pub(super) const STICKY: u16 = 0o1000;
pub(super) const GROUP_EXECUTE: u16 = 0o0010;
/// The bits that `chmod` can set.
pub(super) const ALL_MODE_BITS: u16 = 0o7777;

/// An inode. Its size matters: there is one for every file (see `examples/engine_memory.rs`).
#[derive(Debug)]
pub(super) struct Inode {
    pub mode: u16,
    pub settings: Settings,
    pub nlink: u32,
    /// Directory: where `..` leads; the root's is the root. Anything else: the directory that it is
    /// charged to (see [`super::usage`]).
    pub parent: InodeId,
    pub uid: u32,
    pub gid: u32,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub content_version: u64,
    pub xattrs: Option<Box<Xattrs>>,
    pub body: Body,
}

/// The kind of an inode, and the data of that kind.
#[derive(Debug)]
pub(super) enum Body {
    Regular(FileData),
    Directory(Box<Directory>),
    Symlink(Box<[u8]>),
    Fifo,
    Socket,
    CharDevice(u32),
    BlockDevice(u32),
}

/// The content of a regular file.
#[derive(Clone, Debug, Default)]
pub(super) struct FileData {
    pub size_bytes: u64,
    pub extents: Extents,
}

impl Inode {
    /// An empty directory with `(mode, uid, gid)` that inherits nothing from its parent.
    pub fn directory_of_its_own(
        (mode, uid, gid): (u16, u32, u32),
        parent: InodeId,
        now: Timestamp,
    ) -> Self {
        Self {
            mode,
            settings: Settings::default(),
            nlink: 2,
            parent,
            uid,
            gid,
            atime: now,
            mtime: now,
            ctime: now,
            content_version: 0,
            xattrs: None,
            body: Body::Directory(Box::default()),
        }
    }

    pub fn kind(&self) -> FileKind {
        match self.body {
            Body::Regular(_) => FileKind::Regular,
            Body::Directory(_) => FileKind::Directory,
            Body::Symlink(_) => FileKind::Symlink,
            Body::Fifo => FileKind::Fifo,
            Body::Socket => FileKind::Socket,
            Body::CharDevice(_) => FileKind::CharDevice,
            Body::BlockDevice(_) => FileKind::BlockDevice,
        }
    }

    /// Whether it is a part of a snapshot of a directory.
    pub fn is_frozen(&self) -> bool {
        self.mode & MODE_FROZEN != 0
    }

    pub fn is_directory(&self) -> bool {
        matches!(self.body, Body::Directory(_))
    }

    pub fn directory(&self) -> Result<&Directory, FsError> {
        match &self.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(FsError::NotADirectory),
        }
    }

    /// The content of a regular file; for other kinds, the error that Linux returns.
    pub fn file(&self) -> Result<&FileData, FsError> {
        match &self.body {
            Body::Regular(file) => Ok(file),
            Body::Directory(_) => Err(FsError::IsADirectory),
            _ => Err(FsError::InvalidArgument("not a regular file".into())),
        }
    }

    pub fn attr(&self, ino: InodeId) -> Attr {
        let (size_bytes, allocated_bytes) = match &self.body {
            Body::Regular(file) => (file.size_bytes, file.extents.allocated_bytes()),
            Body::Directory(directory) => (directory.len() as u64, 0),
            Body::Symlink(target) => (target.len() as u64, 0),
            _ => (0, 0),
        };
        let rdev = match self.body {
            Body::CharDevice(rdev) | Body::BlockDevice(rdev) => rdev,
            _ => 0,
        };
        Attr {
            ino,
            kind: self.kind(),
            mode: self.mode,
            nlink: self.nlink,
            uid: self.uid,
            gid: self.gid,
            rdev,
            size_bytes,
            allocated_bytes,
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            content_version: self.content_version,
        }
    }

    /// Notes a change of the content.
    pub fn content_changed(&mut self, now: Timestamp) {
        self.mtime = now;
        self.ctime = now;
        self.content_version += 1;
    }
}

/// The most inodes that the table can hold.
pub(super) const INODES_MAX: u64 = u32::MAX as u64;
/// Inodes in one allocation of the table.
const SLOTS_PER_CHUNK: usize = 1024;

/// All inodes. An [`InodeId`] has a slot of the table in its low 32 bits and the slot's generation above
/// them: so a lookup costs two additions, and no id is used twice on one timeline (see the module
/// `epochs`). The generation grows by one each time a slot is reused, and is raised to at least the number of the
/// current epoch. The table grows by chunks: nothing moves, and no growth takes long.
#[derive(Debug, Default)]
pub(super) struct InodeTable {
    chunks: Vec<Vec<Slot>>,
    /// Free slots; the last one is used next.
    free: Vec<u32>,
    used: Count,
    /// The smallest generation of inodes that are added from now on.
    generation_min: u32,
}

#[derive(Debug)]
pub(super) struct Slot {
    pub generation: u32,
    pub inode: Option<Inode>,
}

fn id(slot: u32, generation: u32) -> InodeId {
    InodeId(u64::from(generation) << 32 | u64::from(slot))
}

/// Splits an id into slot and generation.
pub(super) fn parts(ino: InodeId) -> (u32, u32) {
    (ino.0 as u32, (ino.0 >> 32) as u32)
}

impl InodeTable {
    fn slot(&self, index: u32) -> Option<&Slot> {
        let index = index as usize;
        self.chunks
            .get(index / SLOTS_PER_CHUNK)?
            .get(index % SLOTS_PER_CHUNK)
    }

    fn slot_mut(&mut self, index: u32) -> Option<&mut Slot> {
        let index = index as usize;
        self.chunks
            .get_mut(index / SLOTS_PER_CHUNK)?
            .get_mut(index % SLOTS_PER_CHUNK)
    }

    /// An inode; [`FsError::Stale`] when it was removed or never existed.
    pub fn get(&self, ino: InodeId) -> Result<&Inode, FsError> {
        let (index, generation) = parts(ino);
        self.slot(index)
            .filter(|slot| slot.generation == generation)
            .and_then(|slot| slot.inode.as_ref())
            .ok_or(FsError::Stale)
    }

    /// As [`Self::get`], to change it.
    pub fn get_mut(&mut self, ino: InodeId) -> Result<&mut Inode, FsError> {
        let (index, generation) = parts(ino);
        self.slot_mut(index)
            .filter(|slot| slot.generation == generation)
            .and_then(|slot| slot.inode.as_mut())
            .ok_or(FsError::Stale)
    }

    /// An inode that the state of the namespace refers to, and that therefore exists.
    #[track_caller]
    pub fn known(&self, ino: InodeId) -> &Inode {
        match self.get(ino) {
            Ok(inode) => inode,
            Err(_) => panic!("inode {ino} is referred to, but is not in the table"),
        }
    }

    /// A directory that the state of the namespace refers to as such.
    #[track_caller]
    pub fn known_directory(&self, ino: InodeId) -> &Directory {
        match &self.known(ino).body {
            Body::Directory(directory) => directory,
            _ => panic!("inode {ino} is referred to as a directory, but is none"),
        }
    }

    /// As [`Self::known`], to change it.
    #[track_caller]
    pub fn known_mut(&mut self, ino: InodeId) -> &mut Inode {
        match self.get_mut(ino) {
            Ok(inode) => inode,
            Err(_) => panic!("inode {ino} is referred to, but is not in the table"),
        }
    }

    /// As [`Self::known_directory`], to change it.
    #[track_caller]
    pub fn known_directory_mut(&mut self, ino: InodeId) -> &mut Directory {
        match &mut self.known_mut(ino).body {
            Body::Directory(directory) => directory,
            _ => panic!("inode {ino} is referred to as a directory, but is none"),
        }
    }

    /// Adds an inode; [`FsError::NoSpace`] when no slot numbers are left.
    pub fn insert(&mut self, inode: Inode) -> Result<InodeId, FsError> {
        if self.slots() == 0 {
            // Slot 0 stays empty, so that the root is inode 1 and no inode is 0.
            self.push_slot(Slot {
                generation: 0,
                inode: None,
            });
        }
        let generation_min = self.generation_min;
        if let Some(index) = self.free.pop() {
            let Some(slot) = self.slot_mut(index) else {
                panic!("slot {index} of the table of inodes is free, but not there");
            };
            slot.generation = slot.generation.max(generation_min);
            let before = slot.inode.replace(inode);
            let ino = id(index, slot.generation);
            assert!(before.is_none(), "the slot of inode {ino} is not free");
            self.used += 1;
            return Ok(ino);
        }
        self.push_slot(Slot {
            generation: generation_min,
            inode: Some(inode),
        })
        .ok_or(FsError::NoSpace)
    }

    /// Inodes that are added from now on have a generation of at least this.
    pub fn raise_generations(&mut self, generation_min: u32) {
        assert!(
            generation_min >= self.generation_min,
            "generations fall from {} to {generation_min}: inodes would get the ids of others",
            self.generation_min
        );
        self.generation_min = generation_min;
    }

    /// Removes an inode.
    pub fn remove(&mut self, ino: InodeId) -> Option<Inode> {
        let (index, generation) = parts(ino);
        let slot = self
            .slot_mut(index)
            .filter(|slot| slot.generation == generation)?;
        let inode = slot.inode.take()?;
        // A slot that has no generation left is never used again.
        if let Some(next) = generation.checked_add(1) {
            slot.generation = next;
            self.free.push(index);
        }
        self.used -= 1;
        Some(inode)
    }

    /// The number of inodes that can still be added.
    pub fn room(&self) -> u64 {
        // Slot 0 never holds an inode, so there may be one slot more than inodes.
        self.free.len() as u64 + INODES_MAX.saturating_sub(self.slots())
    }

    /// Inodes in the table.
    pub fn len(&self) -> u64 {
        self.used.get()
    }

    /// Slots, used or not.
    pub fn slots(&self) -> u64 {
        self.chunks.last().map_or(0, |last| {
            ((self.chunks.len() - 1) * SLOTS_PER_CHUNK + last.len()) as u64
        })
    }

    /// Adds a slot after the last one. Returns the id of its inode; none when it holds no inode, or when
    /// no slot numbers are left.
    pub fn push_slot(&mut self, slot: Slot) -> Option<InodeId> {
        let index = u32::try_from(self.slots()).ok()?;
        let ino = slot.inode.is_some().then(|| id(index, slot.generation));
        self.used += u64::from(ino.is_some());
        match self.chunks.last_mut() {
            Some(chunk) if chunk.len() < SLOTS_PER_CHUNK => chunk.push(slot),
            _ => {
                let mut chunk = Vec::with_capacity(SLOTS_PER_CHUNK);
                chunk.push(slot);
                self.chunks.push(chunk);
            }
        }
        ino
    }

    /// All slots in order.
    pub fn iter_slots(&self) -> impl Iterator<Item = &Slot> {
        self.chunks.iter().flatten()
    }

    /// The free slots in the order of [`Self::set_free`].
    pub fn free(&self) -> &[u32] {
        &self.free
    }

    /// Sets the free slots from a snapshot. Returns false, and changes nothing, unless all of them are
    /// free and each is listed once.
    pub fn set_free(&mut self, free: Vec<u32>) -> bool {
        let mut sorted = free.clone();
        sorted.sort_unstable();
        let distinct = sorted.windows(2).all(|pair| pair[0] != pair[1]);
        let all_free = free
            .iter()
            .all(|&index| index != 0 && self.slot(index).is_some_and(|slot| slot.inode.is_none()));
        if distinct && all_free {
            self.free = free;
        }
        distinct && all_free
    }

    /// All inodes in the order of their slots.
    pub fn iter(&self) -> impl Iterator<Item = (InodeId, &Inode)> {
        self.iter_from(0)
    }

    /// The inodes from this slot on, in the order of their slots.
    pub fn iter_from(&self, first: u32) -> impl Iterator<Item = (InodeId, &Inode)> {
        let chunk = first as usize / SLOTS_PER_CHUNK;
        let slots = self.chunks.iter().skip(chunk).flatten();
        // The index of a slot fits: see `push_slot`.
        ((chunk * SLOTS_PER_CHUNK) as u32..)
            .zip(slots)
            .skip(first as usize % SLOTS_PER_CHUNK)
            .filter_map(|(index, slot)| {
                slot.inode
                    .as_ref()
                    .map(|inode| (id(index, slot.generation), inode))
            })
    }

    /// Calls `change` with every inode and the number of its slot.
    pub fn for_each_mut(&mut self, mut change: impl FnMut(usize, &mut Inode)) {
        for (index, slot) in self.chunks.iter_mut().flatten().enumerate() {
            if let Some(inode) = &mut slot.inode {
                change(index, inode);
            }
        }
    }

    /// Memory of the table itself in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let slots = self.chunks.len() * SLOTS_PER_CHUNK;
        (slots * size_of::<Slot>() + self.free.capacity() * size_of::<u32>()) as u64
    }
}
