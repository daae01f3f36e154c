//! Names, attributes and content of a file system, in memory.
//!
//! Conditions that the kernel checks before it sends a request are not checked again: permissions, the
//! length of names, and that no directory is moved below itself.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{Errno, FileAttr, FileType, INodeNo};

/// Content is kept in chunks of this size, which is that of the largest request.
const CHUNK_BYTES: usize = 1 << 20;
/// Positions of `.`, `..` and the first entry of a directory; an entry's position never changes.
const DOT_PLACE: u64 = 1;
const DOT_DOT_PLACE: u64 = 2;
const FIRST_PLACE: u64 = 3;

/// All files and directories.
#[derive(Debug)]
pub struct Tree {
    inodes: HashMap<u64, Inode>,
    next_ino: u64,
}

/// A file, directory or symlink.
#[derive(Debug)]
pub struct Inode {
    attr: FileAttr,
    /// Number of lookups that the kernel has not yet forgotten: until then, it may refer to the inode.
    lookups: u64,
    content: Content,
}

/// The content of an inode.
#[derive(Debug)]
pub enum Content {
    /// Chunks by number. Missing chunks, and bytes after the end of a chunk, are zeros.
    File(BTreeMap<u64, Arc<Vec<u8>>>),
    /// Names.
    Directory(Directory),
    /// The target.
    Symlink(OsString),
}

/// The names in a directory.
#[derive(Debug)]
pub struct Directory {
    parent: u64,
    places: HashMap<OsString, u64>,
    /// Names and inode numbers by position, so that a reader of the directory can continue where it was
    /// even if entries before that were removed.
    entries: BTreeMap<u64, (OsString, u64)>,
    next_place: u64,
}

/// A part of a chunk, shared with the file.
#[derive(Debug)]
pub struct Piece {
    chunk: Arc<Vec<u8>>,
    range: Range<usize>,
}

/// Attributes to set.
#[derive(Debug, Default)]
pub struct Changes {
    pub permissions: Option<u16>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size_bytes: Option<u64>,
    pub atime: Option<SystemTime>,
    pub mtime: Option<SystemTime>,
    /// The current time if `None`.
    pub ctime: Option<SystemTime>,
}

impl Content {
    /// A file without content.
    pub fn empty_file() -> Self {
        Self::File(BTreeMap::new())
    }

    /// A directory without entries.
    pub fn empty_directory(parent: u64) -> Self {
        Self::Directory(Directory {
            parent,
            places: HashMap::new(),
            entries: BTreeMap::new(),
            next_place: FIRST_PLACE,
        })
    }

    fn file_type(&self) -> FileType {
        match self {
            Self::File(_) => FileType::RegularFile,
            Self::Directory(_) => FileType::Directory,
            Self::Symlink(_) => FileType::Symlink,
        }
    }
}

impl Directory {
    fn get(&self, name: &OsStr) -> Option<u64> {
        let place = self.places.get(name)?;
        Some(self.entries.get(place)?.1)
    }

    fn insert(&mut self, name: &OsStr, ino: u64) {
        self.places.insert(name.to_owned(), self.next_place);
        self.entries.insert(self.next_place, (name.to_owned(), ino));
        self.next_place += 1;
    }

    fn remove(&mut self, name: &OsStr) {
        if let Some(place) = self.places.remove(name) {
            self.entries.remove(&place);
        }
    }
}

impl Piece {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.chunk[self.range.clone()]
    }
}

/// Attributes of a new inode.
pub fn attributes(ino: u64, kind: FileType, permissions: u16, uid: u32, gid: u32) -> FileAttr {
    let now = SystemTime::now();
    FileAttr {
        ino: INodeNo(ino),
        size: 0,
        blocks: 0,
        atime: now,
        mtime: now,
        ctime: now,
        crtime: now,
        kind,
        perm: permissions,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid,
        gid,
        rdev: 0,
        blksize: CHUNK_BYTES as u32,
        flags: 0,
    }
}

impl Tree {
    /// A tree with an empty root directory of this owner.
    pub fn new(uid: u32, gid: u32) -> Self {
        let ino = INodeNo::ROOT.0;
        let root = Inode {
            attr: attributes(ino, FileType::Directory, 0o755, uid, gid),
            lookups: 1,
            content: Content::empty_directory(ino),
        };
        Self {
            inodes: HashMap::from([(ino, root)]),
            next_ino: ino + 1,
        }
    }

    /// The attributes of an inode.
    pub fn attr(&self, ino: u64) -> Result<FileAttr, Errno> {
        Ok(self.inode(ino)?.attr)
    }

    /// Finds a name. This counts as a lookup, as does everything that returns an entry.
    pub fn lookup(&mut self, parent: u64, name: &OsStr) -> Result<FileAttr, Errno> {
        let ino = self.child(parent, name)?;
        let inode = self.inode_mut(ino)?;
        inode.lookups += 1;
        Ok(inode.attr)
    }

    /// Drops lookups that the kernel has forgotten. Returns the inode if it has become unreachable, since
    /// freeing its content takes time.
    pub fn forget(&mut self, ino: u64, lookups: u64) -> Option<Inode> {
        let inode = self.inodes.get_mut(&ino)?;
        inode.lookups = inode.lookups.saturating_sub(lookups);
        if inode.lookups == 0 && inode.attr.nlink == 0 {
            return self.inodes.remove(&ino);
        }
        None
    }

    /// Sets attributes.
    pub fn change(&mut self, ino: u64, changes: &Changes) -> Result<FileAttr, Errno> {
        let Inode { attr, content, .. } = self.inode_mut(ino)?;
        let now = SystemTime::now();
        if let Some(size_bytes) = changes.size_bytes {
            let Content::File(chunks) = content else {
                return Err(Errno::EINVAL);
            };
            truncate(chunks, size_bytes);
            set_size(attr, size_bytes);
            attr.mtime = now;
        }
        attr.perm = changes.permissions.unwrap_or(attr.perm);
        attr.uid = changes.uid.unwrap_or(attr.uid);
        attr.gid = changes.gid.unwrap_or(attr.gid);
        attr.atime = changes.atime.unwrap_or(attr.atime);
        attr.mtime = changes.mtime.unwrap_or(attr.mtime);
        attr.ctime = changes.ctime.unwrap_or(now);
        Ok(*attr)
    }

    /// Creates an inode with a name.
    pub fn create(
        &mut self,
        parent: u64,
        name: &OsStr,
        content: Content,
        permissions: u16,
        uid: u32,
        gid: u32,
    ) -> Result<FileAttr, Errno> {
        let ino = self.next_ino;
        let kind = content.file_type();
        let mut attr = attributes(ino, kind, permissions, uid, gid);
        if let Content::Symlink(target) = &content {
            attr.size = target.len() as u64;
        }
        self.insert(parent, name, ino, kind)?;
        self.next_ino += 1;
        let inode = Inode {
            attr,
            lookups: 1,
            content,
        };
        self.inodes.insert(ino, inode);
        Ok(attr)
    }

    /// The target of a symlink.
    pub fn symlink_target(&self, ino: u64) -> Result<OsString, Errno> {
        match &self.inode(ino)?.content {
            Content::Symlink(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Adds another name to a file.
    pub fn link(&mut self, ino: u64, parent: u64, name: &OsStr) -> Result<FileAttr, Errno> {
        let kind = self.attr(ino)?.kind;
        self.insert(parent, name, ino, kind)?;
        let inode = self.inode_mut(ino)?;
        inode.attr.nlink += 1;
        inode.attr.ctime = SystemTime::now();
        inode.lookups += 1;
        Ok(inode.attr)
    }

    /// Removes the name of a directory, which must be empty, or of anything else.
    pub fn remove(&mut self, parent: u64, name: &OsStr, directory: bool) -> Result<(), Errno> {
        let ino = self.child(parent, name)?;
        let inode = self.inode_mut(ino)?;
        match &inode.content {
            Content::Directory(_) if !directory => return Err(Errno::EISDIR),
            Content::Directory(content) if !content.entries.is_empty() => {
                return Err(Errno::ENOTEMPTY);
            }
            // The second link is its own `.`.
            Content::Directory(_) => inode.attr.nlink = 0,
            _ if directory => return Err(Errno::ENOTDIR),
            _ => inode.attr.nlink = inode.attr.nlink.saturating_sub(1),
        }
        inode.attr.ctime = SystemTime::now();
        self.remove_entry(parent, name, directory)?;
        self.forget(ino, 0);
        Ok(())
    }

    /// Moves a name, over another one unless `no_replace`.
    pub fn rename(
        &mut self,
        parent: u64,
        name: &OsStr,
        new_parent: u64,
        new_name: &OsStr,
        no_replace: bool,
    ) -> Result<(), Errno> {
        let ino = self.child(parent, name)?;
        let kind = self.attr(ino)?.kind;
        let is_directory = kind == FileType::Directory;
        match self.directory(new_parent)?.get(new_name) {
            Some(_) if no_replace => return Err(Errno::EEXIST),
            // Both names belong to one file: POSIX requires that nothing is done.
            Some(replaced) if replaced == ino => return Ok(()),
            Some(_) => self.remove(new_parent, new_name, is_directory)?,
            None => {}
        }
        self.remove_entry(parent, name, is_directory)?;
        self.insert(new_parent, new_name, ino, kind)?;
        let inode = self.inode_mut(ino)?;
        inode.attr.ctime = SystemTime::now();
        if let Content::Directory(content) = &mut inode.content {
            content.parent = new_parent;
        }
        Ok(())
    }

    /// Up to `size` bytes of a file; fewer at its end.
    pub fn read(&self, ino: u64, offset: u64, size: usize) -> Result<Vec<Piece>, Errno> {
        let inode = self.inode(ino)?;
        let Content::File(chunks) = &inode.content else {
            return Err(Errno::EINVAL);
        };
        let end = inode.attr.size.min(offset.saturating_add(size as u64));
        let mut pieces = Vec::new();
        let mut position = offset;
        while position < end {
            let (number, start) = chunk_at(position);
            let rest = usize::try_from(end - position).unwrap_or(usize::MAX);
            let range = start..start + rest.min(CHUNK_BYTES - start);
            position += range.len() as u64;
            let chunk = match chunks.get(&number) {
                Some(chunk) if chunk.len() >= range.end => Arc::clone(chunk),
                shorter => {
                    let mut filled = shorter.map(|chunk| chunk.to_vec()).unwrap_or_default();
                    filled.resize(range.end, 0);
                    Arc::new(filled)
                }
            };
            pieces.push(Piece { chunk, range });
        }
        Ok(pieces)
    }

    /// Writes to a file.
    pub fn write(&mut self, ino: u64, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let end = offset.checked_add(data.len() as u64).ok_or(Errno::EFBIG)?;
        let inode = self.inode_mut(ino)?;
        let Content::File(chunks) = &mut inode.content else {
            return Err(Errno::EINVAL);
        };
        let mut rest = data;
        while !rest.is_empty() {
            let (number, start) = chunk_at(end - rest.len() as u64);
            let (piece, after) = rest.split_at(rest.len().min(CHUNK_BYTES - start));
            // The chunk is copied only while a reader holds it.
            let chunk = Arc::make_mut(chunks.entry(number).or_default());
            if chunk.len() < start {
                chunk.resize(start, 0);
            }
            let (over, appended) = piece.split_at(piece.len().min(chunk.len() - start));
            chunk[start..start + over.len()].copy_from_slice(over);
            chunk.extend_from_slice(appended);
            rest = after;
        }
        let size_bytes = inode.attr.size.max(end);
        set_size(&mut inode.attr, size_bytes);
        inode.attr.mtime = SystemTime::now();
        inode.attr.ctime = inode.attr.mtime;
        Ok(())
    }

    /// Calls `add` for the entries after a position, each with its position, until `add` reports that
    /// there is no room. With `lookups`, entries that had room count as looked up.
    pub fn list(
        &mut self,
        ino: u64,
        place: u64,
        lookups: bool,
        mut add: impl FnMut(u64, &OsStr, &FileAttr) -> bool,
    ) -> Result<(), Errno> {
        let directory = self.directory(ino)?;
        let dots = [
            (DOT_PLACE, ".", ino),
            (DOT_DOT_PLACE, "..", directory.parent),
        ]
        .map(|(place, name, ino)| (place, OsStr::new(name), ino));
        let entries = directory
            .entries
            .range(place.saturating_add(1)..)
            .map(|(place, (name, ino))| (*place, name.as_os_str(), *ino));
        let mut added = Vec::new();
        for (entry_place, name, ino) in dots.into_iter().filter(|dot| dot.0 > place).chain(entries)
        {
            let attr = &self.inode(ino)?.attr;
            if add(entry_place, name, attr) {
                break;
            }
            // The kernel does not count the first two as lookups.
            if lookups && entry_place >= FIRST_PLACE {
                added.push(ino);
            }
        }
        for ino in added {
            self.inode_mut(ino)?.lookups += 1;
        }
        Ok(())
    }

    fn inode(&self, ino: u64) -> Result<&Inode, Errno> {
        self.inodes.get(&ino).ok_or(Errno::ESTALE)
    }

    fn inode_mut(&mut self, ino: u64) -> Result<&mut Inode, Errno> {
        self.inodes.get_mut(&ino).ok_or(Errno::ESTALE)
    }

    fn directory(&self, ino: u64) -> Result<&Directory, Errno> {
        match &self.inode(ino)?.content {
            Content::Directory(directory) => Ok(directory),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn child(&self, parent: u64, name: &OsStr) -> Result<u64, Errno> {
        self.directory(parent)?.get(name).ok_or(Errno::ENOENT)
    }

    /// Adds a name to a directory.
    fn insert(&mut self, parent: u64, name: &OsStr, ino: u64, kind: FileType) -> Result<(), Errno> {
        let (attr, directory) = self.changed_directory(parent)?;
        if directory.get(name).is_some() {
            return Err(Errno::EEXIST);
        }
        directory.insert(name, ino);
        if kind == FileType::Directory {
            attr.nlink += 1;
        }
        Ok(())
    }

    /// Removes a name from a directory.
    fn remove_entry(&mut self, parent: u64, name: &OsStr, of_directory: bool) -> Result<(), Errno> {
        let (attr, directory) = self.changed_directory(parent)?;
        directory.remove(name);
        if of_directory {
            attr.nlink = attr.nlink.saturating_sub(1);
        }
        Ok(())
    }

    /// Returns a directory for changing its entries.
    fn changed_directory(&mut self, ino: u64) -> Result<(&mut FileAttr, &mut Directory), Errno> {
        let Inode { attr, content, .. } = self.inode_mut(ino)?;
        let Content::Directory(directory) = content else {
            return Err(Errno::ENOTDIR);
        };
        attr.mtime = SystemTime::now();
        attr.ctime = attr.mtime;
        Ok((attr, directory))
    }
}

/// The number of the chunk with the byte at `position`, and the offset in the chunk.
fn chunk_at(position: u64) -> (u64, usize) {
    let chunk_bytes = CHUNK_BYTES as u64;
    // The offset is less than the size of a chunk.
    (position / chunk_bytes, (position % chunk_bytes) as usize)
}

fn truncate(chunks: &mut BTreeMap<u64, Arc<Vec<u8>>>, size_bytes: u64) {
    chunks.split_off(&size_bytes.div_ceil(CHUNK_BYTES as u64));
    let (number, end) = chunk_at(size_bytes);
    if let Some(last) = chunks.get_mut(&number) {
        Arc::make_mut(last).truncate(end);
    }
}

fn set_size(attr: &mut FileAttr, size_bytes: u64) {
    attr.size = size_bytes;
    attr.blocks = size_bytes.div_ceil(512);
}

#[cfg(test)]
mod tests;
