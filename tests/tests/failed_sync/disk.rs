//! A disk, with the page cache before it, whose sync can fail: a FUSE file system in memory.
//!
//! What is written can be read at once, and is on the disk once it is synced. When a sync fails, the pages
//! are clean afterwards, as Linux has it: they can still be read, and no later sync stores them. Names and
//! sizes are on the disk at once.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::ops::Range;
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
use tempfile::TempDir;

const ROOT: u64 = 1;
/// The kernel remembers nothing.
const TTL: Duration = Duration::ZERO;
const UNIT_BYTES: u32 = 4096;
/// What `statfs` says that there is.
const SIZE_UNITS: u64 = (64 << 30) / UNIT_BYTES as u64;

/// What a disk does, and is made to do. Unmounted when dropped.
pub struct Disk {
    state: Arc<Mutex<State>>,
    _session: BackgroundSession,
    // Removed when nothing is mounted on it any more.
    directory: TempDir,
}

impl Disk {
    /// An empty one, mounted somewhere.
    pub fn mount() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let node = Node::new(true, ROOT, 0o755);
        let state = State {
            nodes: HashMap::from([(ROOT, node)]),
            next: ROOT + 1,
            fails_in: None,
            failed_bytes: 0,
        };
        let state = Arc::new(Mutex::new(state));
        let mut config = kernel_options::config("disk", "disk", Permissions::default());
        config.n_threads = Some(1);
        let session = fuser::spawn_mount(Server(state.clone()), directory.path(), &config);
        Self {
            state,
            _session: session.expect("it is mounted"),
            directory,
        }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// What was written is stored, as after some time.
    pub fn store_all(&self) {
        for node in self.state.lock().nodes.values_mut() {
            node.stored.clone_from(&node.cached);
            node.dirty.clear();
        }
    }

    /// The next sync fails of a file below a directory with this name, if it was written to.
    pub fn fail_next_sync(&self, directory: &'static str) {
        self.state.lock().fails_in = Some(directory);
    }

    /// How many bytes syncs did not store that failed.
    pub fn failed_bytes(&self) -> usize {
        self.state.lock().failed_bytes
    }

    /// What no sync stored is gone. Nothing may have a file open.
    pub fn lose_power(&self) {
        for node in self.state.lock().nodes.values_mut() {
            node.cached.clone_from(&node.stored);
            node.dirty.clear();
        }
    }
}

struct State {
    nodes: HashMap<u64, Node>,
    next: u64,
    fails_in: Option<&'static str>,
    failed_bytes: usize,
}

/// A directory or a file. None is ever forgotten: a disk lives for a test.
struct Node {
    is_directory: bool,
    names: BTreeMap<OsString, u64>,
    parent: u64,
    mode: u16,
    /// As reads find it.
    cached: Vec<u8>,
    /// As it is after the power failed; as long as `cached`.
    stored: Vec<u8>,
    /// What the next sync stores.
    dirty: Vec<Range<usize>>,
}

impl Node {
    fn new(is_directory: bool, parent: u64, mode: u32) -> Self {
        Self {
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

    fn rename(&mut self, from: (INodeNo, &OsStr), to: (INodeNo, &OsStr)) -> Result<(), Errno> {
        let ino = self.find(from.0, from.1)?;
        self.node(from.0)?.names.remove(from.1);
        self.node(to.0)?.names.insert(to.1.to_owned(), ino);
        self.node(INodeNo(ino))?.parent = to.0.0;
        Ok(())
    }

    /// Whether it is below a directory with a name.
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
        let fails = self
            .fails_in
            .is_some_and(|it| is_dirty && self.is_in(ino.0, it));
        let node = self.node(ino)?;
        let dirty = std::mem::take(&mut node.dirty);
        if fails {
            self.fails_in = None;
            self.failed_bytes += dirty.iter().map(Range::len).sum::<usize>();
            return Err(Errno::EIO);
        }
        for range in dirty {
            node.stored[range.clone()].copy_from_slice(&node.cached[range]);
        }
        Ok(())
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
        match self.0.lock().node(ino) {
            Ok(node) => {
                if let Some(size_bytes) = size {
                    node.resize(size_bytes as usize);
                }
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
        let removed = self
            .0
            .lock()
            .node(parent)
            .map(|node| node.names.remove(name));
        answer_empty(reply, removed.map(drop));
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
        match self.0.lock().node(ino) {
            Ok(node) => {
                let range = offset as usize..offset as usize + data.len();
                if range.end > node.cached.len() {
                    node.resize(range.end);
                }
                node.cached[range.clone()].copy_from_slice(data);
                node.dirty.push(range);
                // At most the size of a request, which was negotiated with the kernel.
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
        match self.0.lock().node(ino) {
            Ok(node) if mode == 0 => {
                node.resize(node.cached.len().max(end));
                reply.ok();
            }
            Ok(_) => reply.error(Errno::EOPNOTSUPP),
            Err(error) => reply.error(error),
        }
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
        reply.statfs(
            SIZE_UNITS,
            SIZE_UNITS,
            SIZE_UNITS,
            files,
            free_files,
            UNIT_BYTES,
            name_bytes_max,
            UNIT_BYTES,
        );
    }
}
