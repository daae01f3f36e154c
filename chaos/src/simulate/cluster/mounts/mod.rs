//! Mounts of a simulated cluster: the adapter of `fuse-mount`, driven by a [model of the kernel](kernel), and
//! programs that use them. Each mount has a machine of its own, which has faults like the others.

mod handed;
pub mod history;
mod kernel;
mod log;
mod names;
mod private;
pub mod promised;
mod shared;
mod watched;

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use harvestfs_client::{Client, ClientError};
use rand::RngExt;
use rand::rngs::SmallRng;
use rustix::io::Errno;

use self::kernel::{Kernel, Thread};
use self::private::Files;
use self::shared::Board;
use super::journal::Journal;
use super::part::Part;
use super::workload::{History, Log};
use super::world::World;
use crate::random;

/// Mean time between two operations of a program.
const PAUSE: Duration = Duration::from_millis(60);
/// In one operation out of `KILLED`, the program is killed within `LIVES_MS` milliseconds.
const KILLED: usize = 20;
const LIVES_MS: usize = 100;
/// How long a program waits after an error.
const ERROR_PAUSE: Duration = Duration::from_millis(300);
/// How long a mount waits before it connects again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// How often the kernel of a mount has to free memory.
const SHRINK_INTERVAL: Duration = Duration::from_secs(2);

/// The mounts of a simulation.
pub struct Mounts {
    seed: u64,
    journal: Journal,
    stop: Rc<Cell<bool>>,
    board: Rc<RefCell<Board>>,
    names: Rc<RefCell<History>>,
    log: Rc<RefCell<Log>>,
    mounts: Vec<Mount>,
}

struct Mount {
    rng: Rc<RefCell<SmallRng>>,
    files: Rc<RefCell<Files>>,
    is_done: Rc<Cell<bool>>,
    /// How often the mount was started.
    starts: u64,
}

/// A program on one mount.
struct Program {
    number: u8,
    client: Client,
    thread: Thread,
    rng: Rc<RefCell<SmallRng>>,
    files: Rc<RefCell<Files>>,
    board: Rc<RefCell<Board>>,
    names: Rc<RefCell<History>>,
    log: Rc<RefCell<Log>>,
    journal: Journal,
    stop: Rc<Cell<bool>>,
}

impl Mounts {
    /// Creates `number` mounts without starting them. `names` and `log` are those that clients use, too.
    pub fn new(
        seed: u64,
        number: u8,
        journal: &Journal,
        stop: &Rc<Cell<bool>>,
        (names, log): (&Rc<RefCell<History>>, &Rc<RefCell<Log>>),
    ) -> Self {
        let mount = |number| Mount {
            rng: Rc::new(RefCell::new(random::stream(
                seed,
                &format!("mount {number}"),
            ))),
            files: Rc::default(),
            is_done: Rc::default(),
            starts: 0,
        };
        Self {
            seed,
            journal: journal.clone(),
            stop: Rc::clone(stop),
            board: Rc::default(),
            names: Rc::clone(names),
            log: Rc::clone(log),
            mounts: (0..number).map(mount).collect(),
        }
    }

    /// Starts all mounts.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn start_all(&mut self, world: &mut World) -> io::Result<()> {
        for number in (0..).take(self.mounts.len()) {
            self.start(number, world)?;
        }
        Ok(())
    }

    /// Mounts the file system on a machine that is up, and starts programs there.
    ///
    /// # Errors
    /// When no identity can be issued.
    fn start(&mut self, number: u8, world: &mut World) -> io::Result<()> {
        let connections = world.connections(Part::Mount(number))?;
        let mount = &mut self.mounts[usize::from(number)];
        mount.starts += 1;
        let seed = random::stream(self.seed, &format!("kernel {number} {}", mount.starts)).random();
        let (rng, files) = (Rc::clone(&mount.rng), Rc::clone(&mount.files));
        let (board, journal) = (Rc::clone(&self.board), self.journal.clone());
        let (names, records) = (Rc::clone(&self.names), Rc::clone(&self.log));
        let (stop, is_done) = (Rc::clone(&self.stop), Rc::clone(&mount.is_done));
        world.host(Part::Mount(number)).spawn(async move {
            let client = loop {
                match connections().await {
                    Ok(client) => break client,
                    Err(error) => journal.error(&Part::Mount(number).to_string(), &error),
                }
                tokio::time::sleep(RECONNECT_PAUSE).await;
            };
            let kernel = Kernel::mount(&client, seed);
            let program = |_| Program {
                number,
                client: client.clone(),
                thread: kernel.thread(),
                rng: Rc::clone(&rng),
                files: Rc::clone(&files),
                board: Rc::clone(&board),
                names: Rc::clone(&names),
                log: Rc::clone(&records),
                journal: journal.clone(),
                stop: Rc::clone(&stop),
            };
            let [private, shared, log, follower, changer, watcher, namer] =
                [0, 1, 2, 3, 4, 5, 6].map(program);
            let work = async {
                tokio::join!(
                    private.work_alone(),
                    shared.work_with_others(),
                    log.append(),
                    follower.follow(),
                    changer.change_watched(),
                    watcher.watch(),
                    namer.use_names(),
                );
            };
            let shrinking = async {
                loop {
                    tokio::time::sleep(SHRINK_INTERVAL).await;
                    kernel.shrink();
                }
            };
            tokio::select! {
                biased;
                () = work => {}
                () = shrinking => {}
            }
            if let Err(error) = client.close().await {
                journal.error(&Part::Mount(number).to_string(), &error);
            }
            is_done.set(true);
        });
        Ok(())
    }

    /// Starts a mount again after its machine has crashed and booted.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn restarted(&mut self, number: u8, world: &mut World) -> io::Result<()> {
        let mount = &self.mounts[usize::from(number)];
        mount.files.borrow_mut().crashed();
        self.board.borrow_mut().crashed(number);
        self.log.borrow_mut().doubt(number);
        self.start(number, world)
    }

    /// Notes that all sessions ended, and with them what was not synced was lost.
    pub fn sessions_ended(&self) {
        for (number, mount) in (0..).zip(&self.mounts) {
            mount.files.borrow_mut().power_was_lost();
            self.log.borrow_mut().session_ended(number);
        }
    }

    /// Notes that a machine lost power, and with it what was not synced there.
    pub fn power_was_lost(&self) {
        for (number, mount) in (0..).zip(&self.mounts) {
            mount.files.borrow_mut().power_was_lost();
            self.log.borrow_mut().power_was_lost(number);
        }
    }

    /// Whether all programs have finished.
    pub fn are_done(&self) -> bool {
        self.mounts.iter().all(|mount| mount.is_done.get())
    }

    /// Returns a function that compares everything that programs were promised with what a client finds.
    ///
    /// # Errors
    /// When something cannot be read.
    pub fn check(&self) -> impl AsyncFn(&Client) -> Result<(), ClientError> + use<> {
        let files: Vec<_> = self.mounts.iter().map(|it| Rc::clone(&it.files)).collect();
        let journal = self.journal.clone();
        async move |client: &Client| {
            for (number, files) in (0..).zip(&files) {
                private::check(client, number, files, &journal).await?;
            }
            Ok(())
        }
    }
}

impl Program {
    fn name(&self) -> String {
        Part::Mount(self.number).to_string()
    }

    fn random(&self, range: std::ops::Range<usize>) -> usize {
        self.rng.borrow_mut().random_range(range)
    }

    /// Bytes of any length up to `max`, small ones as likely as large ones.
    fn bytes(&self, max: usize) -> Vec<u8> {
        let mut rng = self.rng.borrow_mut();
        let mut bytes = vec![0; random::length(&mut *rng, max)];
        rng.fill(&mut bytes[..]);
        bytes
    }

    fn note(&self, what: std::fmt::Arguments<'_>) {
        self.journal.note(&self.name(), what);
    }

    fn failure(&self, what: &str) {
        self.journal.failure(format!("{}: {what}", self.name()));
    }

    /// Repeats `step`, with pauses, until programs are to stop.
    async fn repeat(&self, step: impl AsyncFn() -> Result<(), Errno>) {
        self.repeat_with(PAUSE, step).await;
    }

    /// As [`Program::repeat`], with this pause on average.
    async fn repeat_with(&self, pause: Duration, step: impl AsyncFn() -> Result<(), Errno>) {
        while !self.stop.get() {
            let pause = pause.mul_f64(self.random(0..2_000) as f64 / 1_000.0);
            tokio::time::sleep(pause).await;
            self.journal.operation();
            let lives = match self.random(0..KILLED) {
                0 => Duration::from_millis(self.random(0..LIVES_MS) as u64),
                _ => Duration::MAX,
            };
            let mut step = pin!(step());
            let done = tokio::time::timeout(lives, &mut step).await;
            let is_killed = done.is_err();
            let done = match done {
                Ok(done) => done,
                Err(_) => {
                    self.note(format_args!("killed"));
                    self.thread.kill();
                    let done = step.await;
                    self.thread.respawn();
                    done
                }
            };
            match done {
                Err(Errno::INTR) if is_killed => {}
                Err(error) => {
                    self.journal.error(&self.name(), &error);
                    tokio::time::sleep(ERROR_PAUSE).await;
                }
                Ok(()) => {}
            }
        }
    }

    /// Makes a directory, unless it exists.
    async fn make_directory(&self, path: &str) {
        loop {
            match self.thread.mkdir(path).await {
                Ok(()) | Err(Errno::EXIST) => return,
                Err(error) => self.journal.error(&self.name(), &error),
            }
            if self.stop.get() {
                return;
            }
            tokio::time::sleep(ERROR_PAUSE).await;
        }
    }

    /// Reads a whole file, in reads of random sizes.
    async fn read_all(&self, fd: &kernel::Fd) -> Result<Vec<u8>, Errno> {
        let mut all = Vec::new();
        loop {
            let length = self.random(1..200_000);
            let read = self.thread.read(fd, all.len() as u64, length).await?;
            if read.is_empty() {
                return Ok(all);
            }
            all.extend(read);
        }
    }
}
