//! Random histories of system calls on two mounts of one cluster, with determined answers. They are used to compare the
//! model of the kernel with the real one.
//!
//! No file is open on both mounts at a time: what a descriptor shows that was open while another mount changed the
//! file depends on timing. Nothing else does: opens are close-to-open consistent, and names are current everywhere.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::rc::Rc;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::SmallRng;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::kernel::{Fd, Kernel, PAGE_BYTES, Thread};
use crate::random;
use crate::simulate::cluster::part::Part;
use crate::simulate::cluster::world::{TICK, World};

/// The number of mounts that a history uses.
pub const MOUNTS: usize = 2;
/// The most descriptors that are open at a time.
pub const SLOTS: usize = 5;
/// Directories that exist when a history begins.
pub const DIRECTORIES: [&str; 2] = ["a", "b"];
/// Names in each directory.
const NAMES: usize = 4;
/// The largest offset of a write.
const OFFSET_MAX: u64 = 60_000;
/// The most bytes of one call.
const BYTES_MAX: usize = 20_000;
/// Pages of the largest file that is handed from one mount to the other.
const PAGES_MAX: usize = 5;
/// How long one call may take, in virtual time.
const CALL_MAX: Duration = Duration::from_secs(60);
const START: Duration = Duration::from_secs(5);
const DATANODES: u8 = 3;

/// A system call. Paths are relative to the mount point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// `open(2)` into a slot that is free.
    Open {
        /// The mount.
        mount: usize,
        /// The slot.
        slot: usize,
        /// The path of the file.
        path: String,
        /// The flags.
        mode: OFlags,
    },
    /// `close(2)`
    Close(usize),
    /// `pread(2)` from an offset, repeated until the given number of bytes or the end of the file.
    Read(usize, u64, usize),
    /// `pwrite(2)` at an offset.
    Write(usize, u64, Vec<u8>),
    /// A write to a shared mapping, within one page of the file.
    WriteMapped(usize, u64, Vec<u8>),
    /// `ftruncate(2)`
    Truncate(usize, u64),
    /// `fsync(2)`
    Sync(usize),
    /// `fstat(2)`
    StatOpen(usize),
    /// `stat(2)` on a mount.
    Stat(usize, String),
    /// `rename(2)` on a mount.
    Rename(usize, String, String),
    /// `link(2)` on a mount.
    Link(usize, String, String),
    /// `unlink(2)` on a mount.
    Unlink(usize, String),
    /// The names in a directory, on a mount.
    List(usize, String),
}

/// What a call returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was done.
    Done,
    /// It was refused.
    Refused(Errno),
    /// The number of bytes that were written.
    Written(usize),
    /// These bytes were read.
    Read(Vec<u8>),
    /// Size in bytes and number of names.
    Stat(u64, u32),
    /// Names, sorted.
    Names(Vec<String>),
}

impl From<Result<Answer, Errno>> for Answer {
    fn from(result: Result<Answer, Errno>) -> Self {
        result.unwrap_or_else(Answer::Refused)
    }
}

#[derive(Clone, Debug)]
struct Open {
    mount: usize,
    file: usize,
    mode: OFlags,
}

/// Generates calls. It keeps track of names and files, so as to make only calls with determined answers.
struct Generator {
    rng: SmallRng,
    names: BTreeMap<String, usize>,
    sizes: Vec<u64>,
    open: [Option<Open>; SLOTS],
    /// Calls that are planned next.
    planned: VecDeque<Call>,
}

/// Returns `count` calls that the seed decides.
#[must_use]
pub fn random_calls(seed: u64, count: usize) -> Vec<Call> {
    let mut generator = Generator {
        rng: random::stream(seed, "history"),
        names: BTreeMap::new(),
        sizes: Vec::new(),
        open: [const { None }; SLOTS],
        planned: VecDeque::new(),
    };
    let mut calls = Vec::with_capacity(count);
    while calls.len() < count {
        calls.extend(generator.call());
    }
    calls
}

impl Generator {
    fn below(&mut self, end: usize) -> usize {
        self.rng.random_range(0..end)
    }

    fn path(&mut self) -> String {
        let directory = DIRECTORIES[self.below(DIRECTORIES.len())];
        format!("{directory}/f{}", self.below(NAMES))
    }

    fn bytes(&mut self, max: usize) -> Vec<u8> {
        let mut bytes = vec![0; random::length(&mut self.rng, max).max(1)];
        self.rng.fill(&mut bytes[..]);
        bytes
    }

    /// Whether a slot of another mount has the file open.
    fn is_open_elsewhere(&self, file: usize, mount: usize) -> bool {
        let mut open = self.open.iter().flatten();
        open.any(|it| it.file == file && it.mount != mount)
    }

    /// Draws a call; `None` if its answer would not be determined.
    fn call(&mut self) -> Option<Call> {
        if let Some(planned) = self.planned.pop_front() {
            return Some(planned);
        }
        let mount = self.below(MOUNTS);
        match self.below(100) {
            0..2 => {
                self.hand_over(mount);
                self.planned.pop_front()
            }
            2..18 => self.open(mount),
            18..24 => {
                let path = match self.below(8) {
                    0 => format!("{}/below", self.path()),
                    _ => self.path(),
                };
                let file = self.names.get(&path);
                let is_decided = file.is_none_or(|file| !self.is_open_elsewhere(*file, mount));
                is_decided.then_some(Call::Stat(mount, path))
            }
            24..32 => self.rename(mount),
            32..37 => self.link(mount),
            37..42 => {
                let path = match self.below(10) {
                    0 => DIRECTORIES[0].to_owned(),
                    _ => self.path(),
                };
                self.names.remove(&path);
                Some(Call::Unlink(mount, path))
            }
            42..46 => Some(Call::List(mount, DIRECTORIES[self.below(2)].to_owned())),
            _ => self.call_open(),
        }
    }

    fn open(&mut self, mount: usize) -> Option<Call> {
        let slot = self.open.iter().position(Option::is_none)?;
        let path = self.path();
        let mut mode = match self.below(5) {
            0 => OFlags::RDONLY,
            1 => OFlags::WRONLY,
            2 => OFlags::RDWR | OFlags::APPEND,
            _ => OFlags::RDWR,
        };
        mode |= match self.below(8) {
            0 => OFlags::empty(),
            1 => OFlags::CREATE | OFlags::EXCL,
            2 if mode != OFlags::RDONLY => OFlags::CREATE | OFlags::TRUNC,
            _ => OFlags::CREATE,
        };
        let file = match self.names.get(&path) {
            Some(&file) if self.is_open_elsewhere(file, mount) => return None,
            Some(_) if mode.contains(OFlags::EXCL) => None,
            Some(&file) => Some(file),
            None if mode.contains(OFlags::CREATE) => {
                self.sizes.push(0);
                self.names.insert(path.clone(), self.sizes.len() - 1);
                Some(self.sizes.len() - 1)
            }
            None => None,
        };
        if let Some(file) = file {
            if mode.contains(OFlags::TRUNC) {
                self.sizes[file] = 0;
            }
            self.open[slot] = Some(Open { mount, file, mode });
        }
        Some(Call::Open {
            mount,
            slot,
            path,
            mode,
        })
    }

    /// Plans to close a slot if it is open.
    fn free(&mut self, slot: usize) {
        if self.open[slot].take().is_some() {
            self.planned.push_back(Call::Close(slot));
        }
    }

    /// Plans that one mount creates a file, the other one changes it, and only then the first opens it again: what its
    /// kernel has cached of it dates from its creation. A directory entry that another mount made stale is dropped, and
    /// the pages with it, unless an open descriptor or a second name holds the inode.
    fn hand_over(&mut self, mount: usize) {
        let (held, slot) = (self.below(SLOTS), self.below(SLOTS - 1));
        let slot = (held + 1 + slot) % SLOTS;
        self.free(held);
        self.free(slot);
        let path = self.path();
        self.planned.push_back(Call::Unlink(mount, path.clone()));
        let other = (mount + 1) % MOUNTS;
        // The kernel keeps no pages that are written only in part, and none at all when the size changes.
        let mut created = vec![0; PAGE_BYTES as usize * (1 + self.below(PAGES_MAX))];
        self.rng.fill(&mut created[..]);
        let at = self.below(created.len());
        let mut changed = self.bytes(BYTES_MAX);
        if self.below(4) > 0 {
            changed.truncate(created.len() - at);
        }
        let size = created.len().max(at + changed.len());
        self.names.insert(path.clone(), self.sizes.len());
        self.sizes.push(size as u64);
        let open = |mount, slot, mode| Call::Open {
            mount,
            slot,
            path: path.clone(),
            mode,
        };
        self.planned.extend([
            open(mount, held, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR),
            Call::Write(held, 0, created),
        ]);
        let holds = self.below(3);
        let stays_open = holds == 0;
        self.planned.push_back(match stays_open {
            true => Call::Sync(held),
            false => Call::Close(held),
        });
        if holds == 1 {
            let second = format!("{path}-too");
            self.planned.extend([
                Call::Unlink(mount, second.clone()),
                Call::Link(mount, path.clone(), second),
            ]);
        }
        self.planned.extend([
            open(other, slot, OFlags::RDWR),
            Call::Write(slot, at as u64, changed),
            Call::Close(slot),
            open(mount, slot, OFlags::RDONLY),
            Call::Read(slot, 0, size + 1),
            Call::Close(slot),
        ]);
        if stays_open {
            self.planned.push_back(Call::Close(held));
        }
    }

    fn rename(&mut self, mount: usize) -> Option<Call> {
        let (from, to) = (self.path(), self.path());
        if let Some(&file) = self.names.get(&from)
            && self.names.get(&to) != Some(&file)
        {
            self.names.remove(&from);
            self.names.insert(to.clone(), file);
        }
        Some(Call::Rename(mount, from, to))
    }

    fn link(&mut self, mount: usize) -> Option<Call> {
        let (from, to) = (self.path(), self.path());
        if let Some(&file) = self.names.get(&from)
            && !self.names.contains_key(&to)
        {
            self.names.insert(to.clone(), file);
        }
        Some(Call::Link(mount, from, to))
    }

    fn call_open(&mut self) -> Option<Call> {
        let slot = self.below(SLOTS);
        let Open { file, mode, .. } = self.open[slot].clone()?;
        let size = self.sizes[file];
        let may_write = mode.intersects(OFlags::WRONLY | OFlags::RDWR);
        match self.below(100) {
            0..12 => {
                self.open[slot] = None;
                Some(Call::Close(slot))
            }
            12..40 => {
                let offset = self.rng.random_range(0..=size + 100);
                Some(Call::Read(slot, offset, 1 + self.below(BYTES_MAX)))
            }
            40..62 => {
                let bytes = self.bytes(BYTES_MAX);
                let offset = match self.below(4) {
                    0 => self.rng.random_range(0..OFFSET_MAX),
                    _ => self.rng.random_range(0..=size.min(OFFSET_MAX)),
                };
                if may_write {
                    let at = if mode.contains(OFlags::APPEND) {
                        size
                    } else {
                        offset
                    };
                    self.sizes[file] = size.max(at + bytes.len() as u64);
                }
                Some(Call::Write(slot, offset, bytes))
            }
            62..74
                if size > 0
                    && mode == mode.difference(OFlags::APPEND)
                    && mode.contains(OFlags::RDWR) =>
            {
                let offset = self.rng.random_range(0..size);
                let in_page = (PAGE_BYTES - offset % PAGE_BYTES).min(size - offset);
                Some(Call::WriteMapped(
                    slot,
                    offset,
                    self.bytes(in_page as usize),
                ))
            }
            74..84 => {
                let to = self.rng.random_range(0..=size + 9_000);
                if may_write {
                    self.sizes[file] = to;
                }
                Some(Call::Truncate(slot, to))
            }
            84..90 => Some(Call::Sync(slot)),
            _ => Some(Call::StatOpen(slot)),
        }
    }
}

/// Returns what a model of the kernel answers to calls that are made in order on two mounts of a simulated cluster.
///
/// # Errors
/// When its files cannot be written.
///
/// # Panics
/// When a call takes longer than a minute of virtual time.
pub fn answers_of_model(seed: u64, calls: &[Call]) -> io::Result<Vec<Answer>> {
    let mut world = World::new(seed, 1, DATANODES, 0, tempfile::tempdir()?)?;
    world.add_mounts(seed, MOUNTS as u8)?;
    world.run_for(START);
    let mut machines = Vec::new();
    for number in 0..MOUNTS as u8 {
        let connections = world.connections(Part::Mount(number))?;
        let thread = done(&mut world, number, async move {
            let client = connections().await.expect("nothing fails");
            Kernel::mount(&client, seed.wrapping_add(number.into())).thread()
        });
        machines.push(Rc::new(Machine {
            thread,
            slots: RefCell::default(),
        }));
    }
    for directory in DIRECTORIES {
        let machine = Rc::clone(&machines[0]);
        let made = done(&mut world, 0, async move {
            machine.thread.mkdir(&format!("/{directory}")).await
        });
        made?;
    }
    let mut answers = Vec::with_capacity(calls.len());
    let mut mounts = [0; SLOTS];
    for call in calls {
        let mount = call.mount(&mut mounts);
        let (machine, call) = (Rc::clone(&machines[mount]), call.clone());
        let answer = done(&mut world, mount as u8, async move {
            machine.answer(call).await
        });
        answers.push(answer);
    }
    Ok(answers)
}

impl Call {
    /// The mount on which it is made. `mounts` keeps track of the mount of each slot.
    pub fn mount(&self, mounts: &mut [usize; SLOTS]) -> usize {
        match *self {
            Call::Open { mount, slot, .. } => {
                mounts[slot] = mount;
                mount
            }
            Call::Close(slot)
            | Call::Read(slot, ..)
            | Call::Write(slot, ..)
            | Call::WriteMapped(slot, ..)
            | Call::Truncate(slot, _)
            | Call::Sync(slot)
            | Call::StatOpen(slot) => mounts[slot],
            Call::Stat(mount, _)
            | Call::Rename(mount, ..)
            | Call::Link(mount, ..)
            | Call::Unlink(mount, _)
            | Call::List(mount, _) => mount,
        }
    }
}

/// Runs `work` on a mount's machine and returns its result.
fn done<T: 'static>(world: &mut World, mount: u8, work: impl Future<Output = T> + 'static) -> T {
    let result = Rc::new(RefCell::new(None));
    let to = Rc::clone(&result);
    world.host(Part::Mount(mount)).spawn(async move {
        let done = work.await;
        *to.borrow_mut() = Some(done);
    });
    let end = world.now() + CALL_MAX;
    loop {
        world.run_for(TICK);
        if let Some(done) = result.borrow_mut().take() {
            return done;
        }
        assert!(world.now() < end, "a call takes longer than {CALL_MAX:?}");
    }
}

struct Machine {
    thread: Thread,
    slots: RefCell<BTreeMap<usize, Rc<Fd>>>,
}

impl Machine {
    fn fd(&self, slot: usize) -> Rc<Fd> {
        Rc::clone(&self.slots.borrow()[&slot])
    }

    async fn answer(&self, call: Call) -> Answer {
        let thread = &self.thread;
        let absolute = |path: &str| format!("/{path}");
        let answered = async {
            Ok(match call {
                Call::Open {
                    slot, path, mode, ..
                } => {
                    let fd = thread.open(&absolute(&path), mode).await?;
                    self.slots.borrow_mut().insert(slot, Rc::new(fd));
                    Answer::Done
                }
                Call::Close(slot) => {
                    let fd = self.slots.borrow_mut().remove(&slot);
                    let fd = fd.and_then(Rc::into_inner).ok_or(Errno::BADF)?;
                    thread.close(fd).await?;
                    Answer::Done
                }
                Call::Read(slot, offset, length) => {
                    let fd = self.fd(slot);
                    let mut read = Vec::new();
                    while read.len() < length {
                        let at = offset + read.len() as u64;
                        match thread.read(&fd, at, length - read.len()).await {
                            Ok(more) if more.is_empty() => break,
                            Ok(more) => read.extend(more),
                            Err(Errno::INTR) => {}
                            Err(error) => return Err(error),
                        }
                    }
                    Answer::Read(read)
                }
                Call::Write(slot, offset, bytes) => {
                    Answer::Written(thread.write(&self.fd(slot), offset, &bytes).await?)
                }
                Call::WriteMapped(slot, offset, bytes) => {
                    Answer::Written(thread.write_mapped(&self.fd(slot), offset, &bytes).await?)
                }
                Call::Truncate(slot, size) => {
                    thread.truncate(&self.fd(slot), size).await?;
                    Answer::Done
                }
                Call::Sync(slot) => {
                    thread.fsync(&self.fd(slot)).await?;
                    Answer::Done
                }
                Call::StatOpen(slot) => {
                    let stat = thread.fstat(&self.fd(slot)).await?;
                    Answer::Stat(stat.size, stat.nlink)
                }
                Call::Stat(_, path) => {
                    let stat = thread.stat(&absolute(&path)).await?;
                    Answer::Stat(stat.size, stat.nlink)
                }
                Call::Rename(_, from, to) => {
                    thread.rename(&absolute(&from), &absolute(&to)).await?;
                    Answer::Done
                }
                Call::Link(_, from, to) => {
                    thread.link(&absolute(&from), &absolute(&to)).await?;
                    Answer::Done
                }
                Call::Unlink(_, path) => {
                    thread.unlink(&absolute(&path)).await?;
                    Answer::Done
                }
                Call::List(_, path) => Answer::Names(thread.list(&absolute(&path)).await?),
            })
        };
        answered.await.into()
    }
}
