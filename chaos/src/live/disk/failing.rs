//! A disk with its page cache whose syncs can fail: a FUSE file system in memory.
//!
//! What is written can be read immediately, and is on the disk once it is synced. After a failed sync the pages are
//! clean, as in Linux: they can still be read, and no later sync stores them. Names and sizes are on the disk
//! immediately.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use harvestfs_fuse_mount::kernel_options::{self, Permissions};
use parking_lot::Mutex;

const ROOT: u64 = 1;
/// The kernel caches neither names nor attributes.
const TTL: Duration = Duration::ZERO;
const UNIT_BYTES: u32 = 4096;
/// A disk whose syncs can be made to fail. It is unmounted when dropped.
#[derive(Debug)]
pub struct FailingDisk {
    state: Arc<Mutex<State>>,
    _session: BackgroundSession,
}

impl FailingDisk {
    /// Mounts a disk of `size_bytes` over a directory; its initial contents are those of the directory.
    ///
    /// # Errors
    /// When the directory cannot be copied, or the disk cannot be mounted.
    pub fn over(directory: &Path, size_bytes: usize) -> io::Result<Self> {
        let mut state = State::new(size_bytes);
        state.take_in(INodeNo(ROOT), directory)?;
        let state = Arc::new(Mutex::new(state));
        let mut config = kernel_options::config("disk", "disk", Permissions::default());
        config.n_threads = Some(1);
        let session = fuser::spawn_mount(Server(state.clone()), directory, &config)?;
        Ok(Self {
            state,
            _session: session,
        })
    }

    /// Has the next sync fail of a file that was written to and, if a name is given, is below a directory with this
    /// name.
    pub fn fail_next_sync(&self, directory: Option<&'static str>) {
        self.state.lock().fails = Some(directory);
    }

    /// Whether a sync is still to fail.
    pub fn is_to_fail(&self) -> bool {
        self.state.lock().fails.is_some()
    }

    /// Whether a sync has failed since the last call.
    pub fn take_failed(&self) -> bool {
        std::mem::take(&mut self.state.lock().has_failed)
    }

    /// The number of bytes that failed syncs did not store.
    pub fn failed_bytes(&self) -> usize {
        self.state.lock().failed_bytes
    }

    /// Loses what no sync has stored, and clears the fault: no sync is to fail any more, and none has failed.
    /// No file may be open.
    pub fn lose_power(&self) {
        self.state.lock().lose_power();
    }
}

#[derive(Debug)]
struct State {
    nodes: HashMap<u64, Node>,
    next: u64,
    size_bytes: usize,
    used_bytes: usize,
    /// The next sync is to fail, or only one below a directory with this name.
    fails: Option<Option<&'static str>>,
    failed_bytes: usize,
    has_failed: bool,
}

/// A directory or a file.
#[derive(Debug)]
struct Node {
    /// It has no name any more, and is removed when the kernel forgets it.
    is_orphan: bool,
    is_directory: bool,
    names: BTreeMap<OsString, u64>,
    parent: u64,
    mode: u16,
    /// The contents that readers see.
    cached: Vec<u8>,
    /// The contents after a loss of power; as long as `cached`.
    stored: Vec<u8>,
    /// The ranges that the next sync stores.
    dirty: Vec<Range<usize>>,
}

impl Node {
    fn new(is_directory: bool, parent: u64, mode: u32) -> Self {
        Self {
            is_orphan: false,
            is_directory,
            names: BTreeMap::new(),
            parent,
            // 12 bits always fit.
            mode: (mode & 0o7777) as u16,
            cached: Vec::new(),
            stored: Vec::new(),
            dirty: Vec::new(),
        }
    }

    fn resize(&mut self, size_bytes: usize) {
        self.cached.resize(size_bytes, 0);
        self.stored.resize(size_bytes, 0);
        for range in &mut self.dirty {
            range.end = range.end.min(size_bytes);
            range.start = range.start.min(range.end);
        }
    }

    fn attr(&self, ino: u64) -> FileAttr {
        let time = SystemTime::UNIX_EPOCH;
        let size = self.cached.len() as u64;
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: self.kind(),
            perm: self.mode,
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: UNIT_BYTES,
            flags: 0,
        }
    }

    fn kind(&self) -> FileType {
        if self.is_directory {
            FileType::Directory
        } else {
            FileType::RegularFile
        }
    }
}

impl State {
    fn new(size_bytes: usize) -> Self {
        Self {
            nodes: HashMap::from([(ROOT, Node::new(true, ROOT, 0o755))]),
            next: ROOT + 1,
            size_bytes,
            used_bytes: 0,
            fails: None,
            failed_bytes: 0,
            has_failed: false,
        }
    }

    fn node(&mut self, ino: INodeNo) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&ino.0).ok_or(Errno::ENOENT)
    }

    fn find(&mut self, parent: INodeNo, name: &OsStr) -> Result<u64, Errno> {
        let found = self.node(parent)?.names.get(name);
        found.copied().ok_or(Errno::ENOENT)
    }

    fn create(
        &mut self,
        parent: INodeNo,
        name: &OsStr,
        is_directory: bool,
        mode: u32,
    ) -> Result<FileAttr, Errno> {
        let ino = self.next;
        self.next += 1;
        let node = Node::new(is_directory, parent.0, mode);
        let attr = node.attr(ino);
        self.node(parent)?.names.insert(name.to_owned(), ino);
        self.nodes.insert(ino, node);
        Ok(attr)
    }

    /// Copies the contents of a directory to the disk, as stored.
    fn take_in(&mut self, to: INodeNo, directory: &Path) -> io::Result<()> {
        let wrong = |_| io::Error::other("there is no such inode");
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            let (name, mode) = (entry.file_name(), metadata.mode());
            let attr = self.create(to, &name, metadata.is_dir(), mode);
            let attr = attr.map_err(wrong)?;
            if metadata.is_dir() {
                self.take_in(attr.ino, &entry.path())?;
                continue;
            }
            let content = fs::read(entry.path())?;
            self.used_bytes += content.len();
            let node = self.node(attr.ino).map_err(wrong)?;
            node.stored.clone_from(&content);
            node.cached = content;
        }
        Ok(())
    }

    fn resize(&mut self, ino: INodeNo, to_bytes: usize) -> Result<(), Errno> {
        let before_bytes = self.node(ino)?.cached.len();
        let used_bytes = self.used_bytes - before_bytes + to_bytes;
        if to_bytes > before_bytes && used_bytes > self.size_bytes {
            return Err(Errno::ENOSPC);
        }
        self.used_bytes = used_bytes;
        self.node(ino)?.resize(to_bytes);
        Ok(())
    }

    fn grow(&mut self, ino: INodeNo, to_bytes: usize) -> Result<(), Errno> {
        let to_bytes = to_bytes.max(self.node(ino)?.cached.len());
        self.resize(ino, to_bytes)
    }

    fn orphan(&mut self, ino: Option<u64>) {
        if let Some(node) = ino.and_then(|ino| self.nodes.get_mut(&ino)) {
            node.is_orphan = true;
        }
    }

    fn forget(&mut self, ino: INodeNo) {
        if self.nodes.get(&ino.0).is_some_and(|node| node.is_orphan)
            && let Some(node) = self.nodes.remove(&ino.0)
        {
            self.used_bytes -= node.cached.len();
        }
    }

    fn rename(&mut self, from: (INodeNo, &OsStr), to: (INodeNo, &OsStr)) -> Result<(), Errno> {
        let ino = self.find(from.0, from.1)?;
        self.node(from.0)?.names.remove(from.1);
        let replaced = self.node(to.0)?.names.insert(to.1.to_owned(), ino);
        self.orphan(replaced);
        self.node(INodeNo(ino))?.parent = to.0.0;
        Ok(())
    }

    /// Whether a node is below a directory with a name.
    fn is_in(&self, mut ino: u64, directory: &str) -> bool {
        while ino != ROOT {
            let parent = self.nodes[&ino].parent;
            let mut names = self.nodes[&parent].names.iter();
            if names.any(|(name, &named)| named == ino && name == directory) {
                return true;
            }
            ino = parent;
        }
        false
    }

    fn sync(&mut self, ino: INodeNo) -> Result<(), Errno> {
        let is_dirty = !self.node(ino)?.dirty.is_empty();
        let is_there = |directory: &str| self.is_in(ino.0, directory);
        let fails = is_dirty && self.fails.is_some_and(|it| it.is_none_or(is_there));
        let node = self.node(ino)?;
        let dirty = std::mem::take(&mut node.dirty);
        if fails {
            self.fails = None;
            self.has_failed = true;
            self.failed_bytes += dirty.iter().map(Range::len).sum::<usize>();
            return Err(Errno::EIO);
        }
        for range in dirty {
            node.stored[range.clone()].copy_from_slice(&node.cached[range]);
        }
        Ok(())
    }

    fn lose_power(&mut self) {
        for node in self.nodes.values_mut() {
            node.cached.clone_from(&node.stored);
            node.dirty.clear();
        }
        self.fails = None;
        // A part that ends from now on has another reason.
        self.has_failed = false;
    }
}

struct Server(Arc<Mutex<State>>);

fn answer_entry(reply: ReplyEntry, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
        Err(error) => reply.error(error),
    }
}

fn answer_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut state = self.0.lock();
        let found = state.find(parent, name);
        answer_entry(reply, found.map(|ino| state.nodes[&ino].attr(ino)));
    }

    fn forget(&self, _: &Request, ino: INodeNo, _lookups: u64) {
        self.0.lock().forget(ino);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.lock().node(ino) {
            Ok(node) => reply.attr(&TTL, &node.attr(ino.0)),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut state = self.0.lock();
        let resized = size.map_or(Ok(()), |size_bytes| state.resize(ino, size_bytes as usize));
        match resized.and_then(|()| state.node(ino)) {
            Ok(node) => {
                // 12 bits always fit.
                node.mode = mode.map_or(node.mode, |mode| (mode & 0o7777) as u16);
                reply.attr(&TTL, &node.attr(ino.0));
            }
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let created = self.0.lock().create(parent, name, true, mode & !umask);
        answer_entry(reply, created);
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        match self.0.lock().create(parent, name, false, mode & !umask) {
            Ok(attr) => reply.created(
                &TTL,
                &attr,
                Generation(0),
                FileHandle(0),
                FopenFlags::empty(),
            ),
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut state = self.0.lock();
        let removed = state.node(parent).map(|node| node.names.remove(name));
        answer_empty(reply, removed.map(|ino| state.orphan(ino)));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.unlink(request, parent, name, reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let renamed = self.0.lock().rename((parent, name), (new_parent, new_name));
        answer_empty(reply, renamed);
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.0.lock().node(ino) {
            Ok(_) => reply.opened(FileHandle(0), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.0.lock().node(ino) {
            Ok(node) => {
                let length = node.cached.len();
                let begin = length.min(offset as usize);
                let end = length.min(begin + size as usize);
                reply.data(&node.cached[begin..end]);
            }
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.0.lock();
        let range = offset as usize..offset as usize + data.len();
        match state.grow(ino, range.end).and_then(|()| state.node(ino)) {
            Ok(node) => {
                node.cached[range.clone()].copy_from_slice(data);
                node.dirty.push(range);
                // This is at most the size of a request, which was negotiated with the kernel.
                reply.written(data.len() as u32);
            }
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let synced = self.0.lock().sync(ino);
        answer_empty(reply, synced);
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let end = (offset + length) as usize;
        let grown = match mode {
            0 => self.0.lock().grow(ino, end),
            _ => Err(Errno::EOPNOTSUPP),
        };
        answer_empty(reply, grown);
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let state = self.0.lock();
        let Some(node) = state.nodes.get(&ino.0) else {
            return reply.error(Errno::ENOENT);
        };
        let names = node.names.iter().enumerate().skip(offset as usize);
        for (index, (name, &named)) in names {
            let kind = state.nodes[&named].kind();
            if reply.add(INodeNo(named), index as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let name_bytes_max = 255;
        let (files, free_files) = (0, 0);
        let state = self.0.lock();
        let units = |bytes: usize| bytes as u64 / u64::from(UNIT_BYTES);
        let free_units = units(state.size_bytes.saturating_sub(state.used_bytes));
        reply.statfs(
            units(state.size_bytes),
            free_units,
            free_units,
            files,
            free_files,
            UNIT_BYTES,
            name_bytes_max,
            UNIT_BYTES,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_of_power_ends_what_a_failed_sync_excuses() {
        let mut state = State::new(1 << 20);
        let name = OsStr::new("file");
        let created = state.create(INodeNo(ROOT), name, false, 0o644);
        let ino = created.unwrap().ino;
        let write = |state: &mut State| {
            state.grow(ino, 10).unwrap();
            let node = state.node(ino).unwrap();
            node.cached.fill(b'x');
            node.dirty.push(0..10);
        };
        write(&mut state);
        state.fails = Some(None);
        assert!(state.sync(ino).is_err());
        assert!(state.has_failed);
        state.fails = Some(None);
        state.lose_power();
        assert!(!state.has_failed && state.fails.is_none());
        assert_eq!(state.node(ino).unwrap().cached, [0; 10]);
        write(&mut state);
        assert!(state.sync(ino).is_ok());
        assert!(!state.has_failed);
    }
}
