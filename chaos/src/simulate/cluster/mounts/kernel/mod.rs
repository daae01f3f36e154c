//! A model of the kernel's side of FUSE as in Linux 6.18 (`fs/fuse`), for the options that a mount negotiates:
//! no writeback caching, `FUSE_ATOMIC_O_TRUNC`, `FUSE_EXPLICIT_INVAL_DATA`, `readdirplus`, epochs. It drives the
//! adapter of `fuse-mount` as the kernel does, in virtual time, decided by a seed: requests take a moment to reach
//! the mount, and answers take a moment to reach the waiting thread.
//!
//! Names follow the kernel, so that the two can be compared: each function names the one of the
//! kernel that it follows.

mod attributes;
mod files;
mod listing;
mod names;
mod notified;
mod pages;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fuser::{FileAttr, FileHandle, FileType};
use harvestfs_client::Client;
use harvestfs_fuse_mount::reply::Reply;
use harvestfs_fuse_mount::{Adapter, Header, without_device};
use harvestfs_protocol::ids::InodeId;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::io::Errno;
use tokio::sync::{Notify, RwLock, oneshot};
use tokio::time::Instant;

pub use self::files::{Fd, Stat};
use self::notified::Notified;
use self::pages::Page;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;
/// How often dirty pages are written back without a request.
const FLUSH_INTERVAL: Duration = Duration::from_secs(5);
/// One request out of this many is slow to reach the mount, and one answer out of this many to reach the thread.
const SLOW: u32 = 24;
/// How long that takes, in milliseconds. The mount relies on less than 250 ms (adr/0016).
const SLOW_MS: std::ops::Range<u64> = 1..120;

/// A kernel with one mount.
pub struct Kernel {
    state: Mutex<State>,
    adapter: OnceLock<Adapter>,
    /// Notified whenever a page is unlocked.
    unlocked: Notify,
}

struct State {
    rng: SmallRng,
    /// The connection's version of attributes.
    attr_version: u64,
    /// How many inodes with a name were evicted (`evict_ctr`).
    evictions: u64,
    /// Directory entries of earlier epochs are not valid.
    epoch: u64,
    inodes: BTreeMap<InodeId, Inode>,
    dentries: BTreeMap<(InodeId, String), Dentry>,
    /// Threads that are being killed.
    dying: BTreeSet<u32>,
    next_pid: u32,
}

struct Inode {
    kind: FileType,
    uid: u32,
    /// Permission bits.
    mode: u16,
    nlink: u32,
    size: u64,
    attr_version: u64,
    /// Until when the attributes are valid.
    valid_until: Instant,
    size_is_unstable: bool,
    lookups: u64,
    /// Number of open files and operations in flight.
    uses: u32,
    pages: BTreeMap<u64, Page>,
    /// Handles that dirty pages can be written back through.
    write_handles: Vec<FileHandle>,
    /// The error of a failed writeback.
    failed: Option<Errno>,
    lock: Arc<RwLock<()>>,
}

#[derive(Clone, Copy, Debug)]
struct Dentry {
    /// `None` if the name does not exist.
    ino: Option<InodeId>,
    valid_until: Instant,
    epoch: u64,
}

/// The state when a request was sent: the answer may be older than changes in the meantime.
#[derive(Clone, Copy, Debug)]
struct Asked {
    attr_version: u64,
    evictions: u64,
}

/// A thread of a program, which makes system calls.
pub struct Thread {
    kernel: Arc<Kernel>,
    pid: Cell<u32>,
}

/// Passes on an answer.
struct To<T>(oneshot::Sender<Result<T, fuser::Errno>>);

impl<T: Send + 'static> Reply<T> for To<T> {
    fn answer(self, answer: Result<T, fuser::Errno>) {
        // After a crash of the machine, nothing waits for the answer.
        let _ = self.0.send(answer);
    }
}

fn errno(error: fuser::Errno) -> Errno {
    Errno::from_raw_os_error(error.into())
}

impl Kernel {
    /// Mounts the file system; the seed decides how long things take.
    pub fn mount(client: &Client, seed: u64) -> Arc<Self> {
        let now = Instant::now();
        let root = Inode::new(FileType::Directory, now);
        let kernel = Arc::new(Self {
            state: Mutex::new(State {
                rng: SmallRng::seed_from_u64(seed),
                attr_version: 1,
                evictions: 1,
                epoch: 1,
                inodes: BTreeMap::from([(InodeId::ROOT, root)]),
                dentries: BTreeMap::new(),
                dying: BTreeSet::new(),
                next_pid: 1,
            }),
            adapter: OnceLock::new(),
            unlocked: Notify::new(),
        });
        let notified = Arc::new(Notified(Arc::downgrade(&kernel)));
        let adapter = without_device(client, notified.clone(), notified);
        let first = kernel.adapter.set(adapter);
        assert!(first.is_ok(), "a kernel that was just made has no adapter");
        let flushed = Arc::downgrade(&kernel);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(FLUSH_INTERVAL).await;
                let Some(kernel) = flushed.upgrade() else {
                    break;
                };
                kernel.flush_all().await;
            }
        });
        kernel
    }

    /// Creates a thread of a program.
    pub fn thread(self: &Arc<Self>) -> Thread {
        Thread {
            pid: Cell::new(self.state.lock().new_pid()),
            kernel: Arc::clone(self),
        }
    }

    fn adapter(&self) -> &Adapter {
        self.adapter
            .get()
            .expect("it is set when the kernel is made")
    }

    /// Sends a request and waits for its answer.
    async fn ask<T: Send + 'static>(
        &self,
        request: impl FnOnce(&Adapter, To<T>),
    ) -> Result<T, Errno> {
        self.pause().await;
        let (to, answer) = oneshot::channel();
        request(self.adapter(), To(to));
        let answer = answer.await.unwrap_or(Err(fuser::Errno::EIO));
        self.pause().await;
        answer.map_err(errno)
    }

    /// Sleeps: usually not at all, sometimes for a while.
    async fn pause(&self) {
        let slow = {
            let rng = &mut self.state.lock().rng;
            (rng.random_range(0..SLOW) == 0).then(|| rng.random_range(SLOW_MS))
        };
        if let Some(slow_ms) = slow {
            tokio::time::sleep(Duration::from_millis(slow_ms)).await;
        }
    }

    /// The lock of an inode.
    fn inode_lock(&self, ino: InodeId) -> Result<Arc<RwLock<()>>, Errno> {
        let state = self.state.lock();
        let inode = state.inodes.get(&ino).ok_or(Errno::STALE)?;
        Ok(Arc::clone(&inode.lock))
    }

    /// Evicts inodes that nothing refers to any more, which the mount then forgets (`fuse_evict_inode`;
    /// `inode_just_drop`).
    fn evict_unused(&self) {
        let gone: Vec<(InodeId, u64)> = {
            let mut state = self.state.lock();
            let State {
                inodes,
                dentries,
                evictions,
                ..
            } = &mut *state;
            let mut used: BTreeSet<InodeId> = dentries.values().filter_map(|it| it.ino).collect();
            used.extend(dentries.keys().map(|(parent, _)| *parent));
            used.insert(InodeId::ROOT);
            let unused = |(ino, inode): (&InodeId, &Inode)| {
                let is_free = inode.uses == 0 && !inode.is_busy() && !used.contains(ino);
                is_free.then_some((*ino, inode.lookups))
            };
            let gone: Vec<_> = inodes.iter().filter_map(unused).collect();
            for (ino, _) in &gone {
                let evicted = inodes.remove(ino);
                *evictions += u64::from(evicted.is_some_and(|it| it.nlink > 0));
            }
            gone
        };
        for (ino, lookups) in gone {
            self.adapter().forget(ino, lookups);
        }
    }
}

impl State {
    /// The state for a request that is sent now.
    fn asked(&self) -> Asked {
        Asked {
            attr_version: self.attr_version,
            evictions: self.evictions,
        }
    }

    fn new_pid(&mut self) -> u32 {
        self.next_pid += 1;
        self.next_pid
    }

    /// `fuse_iget`: the inode of an answer, which counts as looked up. `asked_at` is the state when the request was
    /// sent; `None`: the inode was created, and the attributes are accepted in any case.
    fn iget(&mut self, attr: &FileAttr, ttl: Duration, asked_at: Option<Asked>) -> InodeId {
        // `fuse_change_attributes_common`: the attributes may have been invalidated on an inode that was evicted since.
        let ttl = match asked_at {
            Some(asked)
                if asked.evictions != self.evictions
                    && !self.inodes.contains_key(&InodeId(attr.ino.0)) =>
            {
                Duration::ZERO
            }
            _ => ttl,
        };
        let asked_at = asked_at.map_or(0, |asked| asked.attr_version);
        let ino = InodeId(attr.ino.0);
        let inode = self.inodes.entry(ino).or_insert_with(|| {
            let mut inode = Inode::new(attr.kind, Instant::now());
            inode.size = attr.size;
            inode
        });
        inode.lookups += 1;
        self.change_attributes(ino, attr, ttl, asked_at);
        ino
    }

    /// `fuse_change_attributes`. `asked_at` is the version of attributes when the request was sent; with 0, they are
    /// accepted in any case.
    fn change_attributes(&mut self, ino: InodeId, attr: &FileAttr, ttl: Duration, asked_at: u64) {
        let Some(inode) = self.inodes.get_mut(&ino) else {
            return;
        };
        if asked_at != 0 && inode.attr_version > asked_at || inode.size_is_unstable {
            return;
        }
        self.attr_version += 1;
        inode.take(attr, ttl, self.attr_version);
        if inode.size != attr.size {
            inode.size = attr.size;
            inode.truncate_pages();
        }
    }

    /// Makes answers that are in flight outdated.
    fn bump(&mut self, ino: InodeId) {
        self.attr_version += 1;
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.attr_version = self.attr_version;
        }
    }

    /// `fuse_invalidate_attr`.
    fn invalidate_attr(&mut self, ino: InodeId) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.valid_until = Instant::now();
        }
    }
}

impl Inode {
    fn new(kind: FileType, now: Instant) -> Self {
        Self {
            kind,
            uid: 0,
            mode: 0,
            nlink: 1,
            size: 0,
            attr_version: 0,
            valid_until: now,
            size_is_unstable: false,
            lookups: 0,
            uses: 0,
            pages: BTreeMap::new(),
            write_handles: Vec::new(),
            failed: None,
            lock: Arc::default(),
        }
    }

    /// `fuse_change_attributes_common`.
    fn take(&mut self, attr: &FileAttr, ttl: Duration, version: u64) {
        self.attr_version = version;
        self.valid_until = Instant::now() + ttl;
        self.uid = attr.uid;
        self.mode = attr.perm;
        self.nlink = attr.nlink;
    }

    /// Whether a request for its pages is in flight or needed.
    fn is_busy(&self) -> bool {
        self.pages.values().any(|page| page.locked || page.dirty)
    }
}

impl Thread {
    fn header(&self) -> Header {
        Header {
            uid: 0,
            gid: 0,
            pid: self.pid.get(),
        }
    }

    /// Kills the thread: what it waits for is interrupted.
    pub fn kill(&self) {
        self.kernel.state.lock().dying.insert(self.pid.get());
    }

    /// Replaces the killed thread by a new one.
    pub fn respawn(&self) {
        let mut state = self.kernel.state.lock();
        state.dying.remove(&self.pid.get());
        self.pid.set(state.new_pid());
    }
}
