//! A whole cluster on one thread, in virtual time: the production code of namenodes, datanodes,
//! clients and mounts, each part on a machine of its own, over a network of datagrams, decided by one seed.

mod copies;
mod cut_off;
mod disk;
mod faults;
mod forgotten;
mod group;
mod journal;
mod kind;
mod links;
mod machine;
mod mounts;
mod network;
mod operator;
mod part;
pub mod replay;
mod shrink;
#[cfg(test)]
mod tests;
mod workload;
mod world;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harvestfs_protocol::admin::FsckReport;
use rand::RngExt;

use self::cut_off::CutOffs;
use self::faults::Faults;
use self::group::{Group, Leader};
use self::journal::Journal;
pub use self::kind::FaultKind;
use self::machine::Host;
use self::mounts::Mounts;
pub use self::mounts::{history, promised};
use self::network::{Link, Network};
use self::part::Part;
use self::replay::Given;
pub use self::shrink::shrink;
use self::workload::log::number_of_client;
use self::workload::{Board, History, Log, Memory, Worker, check_all};
use self::world::{HEALING_TICK, REPLICATION, TICK, World};
use crate::live::admin::Admin;
use crate::random;

/// Time that is left for all datanodes to register.
const START: Duration = Duration::from_secs(5);
/// How long the cluster may take to become whole once the faults are over. After many servers fell silent together,
/// repair waits for ten minutes, and the remains of a lost block become a block five minutes later.
const HEAL_MAX: Duration = Duration::from_secs(1_000);
/// How long a client waits before it opens a session again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// In one simulation out of this many, clients use files that have blocks of their own, which takes long.
const WITH_LONE_FILES: u32 = 4;
/// How often the simulation checks whether the cluster is whole.
const LOOK: Duration = Duration::from_secs(2);

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Options {
    /// Decides everything.
    pub seed: u64,
    /// The virtual time during which clients work and faults begin.
    pub length: Duration,
    /// Number of namenodes: 1, or a group of several.
    pub namenodes: u8,
    /// Number of datanodes, at least one.
    pub datanodes: u8,
    /// Number of clients, at least one.
    pub clients: u8,
    /// Number of mounts.
    pub mounts: u8,
    /// Kinds of faults; if empty, nothing fails.
    pub faults: Vec<FaultKind>,
    /// Faults that are given instead of drawn; `faults` is ignored then.
    pub replay: Option<Vec<Given>>,
    /// Faults that are left out, by their numbers.
    pub without: BTreeSet<u32>,
    /// The simulation ends as soon as a promise is broken.
    pub until_failure: bool,
    /// The simulation ends with the faults, without the final checks, which take most of the time.
    pub until_calm: bool,
    /// Where the simulation creates a temporary directory for its files.
    pub directory: PathBuf,
    /// Ends the simulation when it is set.
    pub interrupted: Arc<AtomicBool>,
}

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The first 20 promises that were found broken.
    pub failures: Vec<String>,
    /// Number of operations of clients.
    pub operations: u64,
    /// Number of these operations that failed.
    pub errors: u64,
    /// Number of datagrams that were not lost on sending; one that is duplicated counts twice.
    pub datagrams: u64,
    /// A digest of the sender, receiver, length and time of every datagram.
    pub digest: u64,
    /// Number of faults that began or were left out.
    pub faults: u32,
    /// When the first promise was found broken.
    pub failed_at: Option<Duration>,
    /// The virtual time that passed.
    pub took: Duration,
    /// The trace of what happened, line by line.
    pub trace: Vec<String>,
}

/// Runs one simulation.
///
/// # Errors
/// When its files cannot be written, or it is interrupted.
pub fn run(options: &Options) -> io::Result<Report> {
    let directory = tempfile::Builder::new()
        .prefix("harvestfs-simulation-")
        .tempdir_in(&options.directory)?;
    let (seed, namenodes) = (options.seed, options.namenodes);
    let mut world = World::new(
        seed,
        namenodes,
        options.datanodes,
        options.clients,
        directory,
    )?;
    world.add_mounts(options.seed, options.mounts)?;
    let rng = random::stream(options.seed, "faults");
    let (journal, leader, stop) = (Journal::default(), Leader::default(), Rc::default());
    let (names, log) = (Rc::default(), Rc::default());
    let cut_offs = CutOffs::default();
    let faults = Faults::new(options, rng, START, (&leader, &cut_offs));
    let have_lone = random::stream(options.seed, "lone files").random_ratio(1, WITH_LONE_FILES);
    let mut simulation = Simulation {
        have_lone: have_lone || faults.lose_what_waits(),
        faults,
        group: Group::new(&journal, &leader),
        world,
        mounts: Mounts::new(
            options.seed,
            options.mounts,
            &journal,
            &stop,
            (&names, &log),
        ),
        journal,
        stop,
        board: Rc::default(),
        names,
        log,
        cut_offs,
        clients: (0..options.clients)
            .map(|number| SimulatedClient::new(options.seed, number))
            .collect(),
        until_failure: options.until_failure,
        until_calm: options.until_calm,
        interrupted: Arc::clone(&options.interrupted),
    };
    match simulation.run_through(options.clients, options.length) {
        Err(_) if simulation.is_over() => {}
        ran => ran?,
    }
    Ok(simulation.report())
}

struct SimulatedClient {
    rng: Rc<RefCell<rand::rngs::SmallRng>>,
    memory: Rc<RefCell<Memory>>,
    is_done: Rc<Cell<bool>>,
}

impl SimulatedClient {
    fn new(seed: u64, number: u8) -> Self {
        let rng = random::stream(seed, &format!("client {number}"));
        Self {
            rng: Rc::new(RefCell::new(rng)),
            memory: Rc::default(),
            is_done: Rc::default(),
        }
    }
}

struct Simulation {
    world: World,
    faults: Faults,
    group: Group,
    journal: Journal,
    /// Asks clients and mounts to finish.
    stop: Rc<Cell<bool>>,
    board: Rc<RefCell<Board>>,
    names: Rc<RefCell<History>>,
    log: Rc<RefCell<Log>>,
    cut_offs: CutOffs,
    have_lone: bool,
    clients: Vec<SimulatedClient>,
    mounts: Mounts,
    until_failure: bool,
    until_calm: bool,
    interrupted: Arc<AtomicBool>,
}

impl Simulation {
    fn run_through(&mut self, clients: u8, length: Duration) -> io::Result<()> {
        self.run_for(START)?;
        if self.faults.need_operator() {
            self.world.start_operator()?;
        }
        for number in 0..clients {
            self.start_client(number)?;
        }
        self.group.start(&self.world)?;
        self.mounts.start_all(&mut self.world)?;
        self.run_for(length)?;
        if self.until_calm {
            return Ok(());
        }
        self.end_faults()?;
        self.stop.set(true);
        self.finish()
    }

    /// Whether a promise was broken, and the simulation was only to find that.
    fn is_over(&self) -> bool {
        self.until_failure && self.journal.failed_at().is_some()
    }

    fn run_for(&mut self, time: Duration) -> io::Result<()> {
        let end = self.world.now() + time;
        while self.world.now() < end {
            self.tick()?;
        }
        Ok(())
    }

    fn tick(&mut self) -> io::Result<()> {
        if self.interrupted.load(Ordering::Relaxed) || self.is_over() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.journal.advance(self.world.now());
        self.world.run_for(self.world.tick());
        let power_losses = self.faults.power_losses();
        let namenode_losses = self.faults.namenode_losses();
        let restarted = self.faults.go_on(&mut self.world, &self.journal)?;
        if self.faults.power_losses() != power_losses {
            for (number, client) in (0..).zip(&self.clients) {
                client.memory.borrow_mut().power_was_lost();
                self.log
                    .borrow_mut()
                    .power_was_lost(number_of_client(number));
            }
            self.mounts.power_was_lost();
        }
        let namenodes = self.world.namenodes();
        let sound = self.faults.sound(&namenodes, &mut self.world);
        self.group.go_on(sound, namenodes.len());
        if namenodes.len() > 1 {
            self.group.look_at_epochs(&self.world);
        }
        let is_disturbed = namenodes.len() > 1 && self.group.is_disturbed();
        if self.faults.namenode_losses() != namenode_losses || is_disturbed {
            self.log.borrow_mut().namenode_was_lost();
        }
        if self.faults.are_in_doubt() != self.journal.is_in_doubt() {
            self.journal.turn_doubt();
            // Sessions that only the other namenode knows cannot be resumed.
            for (number, client) in (0..).zip(&self.clients) {
                client.memory.borrow_mut().session_ended();
                self.log
                    .borrow_mut()
                    .session_ended(number_of_client(number));
            }
            self.mounts.sessions_ended();
        }
        self.restarted(&restarted)
    }

    fn end_faults(&mut self) -> io::Result<()> {
        let restarted = self.faults.end(&mut self.world, &self.journal)?;
        self.restarted(&restarted)
    }

    /// Starts a client, which works in one session after another.
    fn start_client(&mut self, number: u8) -> io::Result<()> {
        let of_client = &self.clients[usize::from(number)];
        let (rng, memory) = (Rc::clone(&of_client.rng), Rc::clone(&of_client.memory));
        let (board, journal) = (Rc::clone(&self.board), self.journal.clone());
        let (names, log) = (Rc::clone(&self.names), Rc::clone(&self.log));
        let (stop, is_done) = (Rc::clone(&self.stop), Rc::clone(&of_client.is_done));
        let (cut_offs, has_lone) = (self.cut_offs.clone(), self.have_lone);
        let connections = self.world.connections(Part::Client(number))?;
        self.world.host(Part::Client(number)).spawn(async move {
            loop {
                let worked = async {
                    let worker = Worker {
                        number,
                        client: connections().await?,
                        rng: Rc::clone(&rng),
                        memory: Rc::clone(&memory),
                        board: Rc::clone(&board),
                        names: Rc::clone(&names),
                        log: Rc::clone(&log),
                        cut_offs: cut_offs.clone(),
                        has_lone,
                        journal: journal.clone(),
                    };
                    worker.work(|| stop.get()).await
                };
                match worked.await {
                    Ok(()) => break,
                    Err(error) => journal.error(&Part::Client(number).to_string(), &error),
                }
                memory.borrow_mut().session_ended();
                log.borrow_mut().doubt(number_of_client(number));
                tokio::time::sleep(RECONNECT_PAUSE).await;
            }
            is_done.set(true);
        });
        Ok(())
    }

    fn restarted(&mut self, parts: &[Part]) -> io::Result<()> {
        for part in parts {
            if let Part::Client(number) = *part {
                self.clients[usize::from(number)]
                    .memory
                    .borrow_mut()
                    .crashed();
                self.log.borrow_mut().doubt(number_of_client(number));
                self.start_client(number)?;
            }
            if let Part::Mount(number) = *part {
                self.mounts.restarted(number, &mut self.world)?;
            }
        }
        Ok(())
    }

    /// Waits until `is_done` holds, for at most `HEAL_MAX`. Returns whether it does.
    fn wait_for(&mut self, is_done: impl Fn(&Self) -> bool) -> io::Result<bool> {
        let end = self.world.now() + HEAL_MAX;
        while !is_done(self) {
            if self.world.now() >= end {
                return Ok(false);
            }
            self.tick()?;
        }
        Ok(true)
    }

    /// Once all faults are over: waits until clients finish and the cluster is whole, and checks that everything that
    /// was promised is there.
    fn finish(&mut self) -> io::Result<()> {
        let all_done = |it: &Self| {
            it.clients.iter().all(|client| client.is_done.get()) && it.mounts.are_done()
        };
        if !self.wait_for(all_done)? {
            self.journal
                .failure(format!("clients and mounts do not end within {HEAL_MAX:?}"));
            return Ok(());
        }
        if !self.wait_for(|it| !it.faults.are_in_doubt())? {
            self.journal.failure(format!(
                "the newest namenode is not well within {HEAL_MAX:?}"
            ));
            return Ok(());
        }
        self.group.calm_down();
        let health: Rc<RefCell<Option<FsckReport>>> = Rc::default();
        let (namenodes, bind, identity) = self.world.operator(0)?;
        let found = Rc::clone(&health);
        self.world.host(Part::Client(0)).spawn(async move {
            let admin = |namenode| Admin::with_identity(&identity, bind, namenode);
            let admins = namenodes.into_iter().map(admin);
            let mut admins: Vec<Admin> = admins.collect::<Result<_, _>>().expect("free ports");
            loop {
                // A namenode that does not lead answers so immediately.
                let mut report = None;
                for admin in &mut admins {
                    report = report.or(admin.fsck().await);
                }
                let is_healthy = report.as_ref().is_some_and(is_whole);
                *found.borrow_mut() = report;
                if is_healthy {
                    break;
                }
                tokio::time::sleep(LOOK).await;
            }
        });
        self.world.set_tick(HEALING_TICK);
        let seen = Rc::clone(&health);
        let is_whole = self.wait_for(move |_| seen.borrow().as_ref().is_some_and(is_whole))?;
        let report = health.take();
        // A loss of power may lose blocks of which nothing had been synced. What they were promised to contain is
        // compared below.
        let may_be_lost = self.faults.power_losses() > 0;
        let is_rest_whole = may_be_lost && report.as_ref().is_some_and(is_rest_whole);
        if !is_whole && !is_rest_whole {
            self.journal
                .failure(format!("not whole within {HEAL_MAX:?}: {report:?}"));
        }
        self.world.set_tick(TICK);
        self.check()?;
        self.compare_namenodes()
    }

    /// Checks that all namenodes have the same contents.
    fn compare_namenodes(&mut self) -> io::Result<()> {
        let (namenodes, bind, identity) = self.world.outside_operator()?;
        if namenodes.len() == 1 {
            return Ok(());
        }
        let is_done = Rc::new(Cell::new(false));
        let (journal, done) = (self.journal.clone(), Rc::clone(&is_done));
        let connections = self.world.outside_connections()?;
        self.world.spawn_outside(async move {
            let admin = |namenode: &SocketAddr| Admin::with_identity(&identity, bind, *namenode);
            let admins = namenodes.iter().map(admin);
            let mut admins: Vec<Admin> = admins.collect::<Result<_, _>>().expect("free ports");
            group::compare(&mut admins, &namenodes, connections, &journal).await;
            done.set(true);
        });
        if !self.wait_for(move |_| is_done.get())? {
            self.journal.failure(format!(
                "the namenodes do not lead one after the other within {HEAL_MAX:?}"
            ));
        }
        Ok(())
    }

    fn check(&mut self) -> io::Result<()> {
        self.names.borrow().check(&self.journal);
        let connections = self.world.connections(Part::Client(0))?;
        let memories: Vec<_> = self
            .clients
            .iter()
            .map(|it| Rc::clone(&it.memory))
            .collect();
        let is_done = Rc::new(Cell::new(false));
        let check_mounts = self.mounts.check();
        let (journal, done) = (self.journal.clone(), Rc::clone(&is_done));
        let (board, log) = (Rc::clone(&self.board), Rc::clone(&self.log));
        self.world.host(Part::Client(0)).spawn(async move {
            let checked = async {
                let client = connections().await?;
                check_all(&client, &memories, (&board, &log), &journal).await?;
                check_mounts(&client).await
            };
            if let Err(error) = checked.await {
                journal.failure(format!("nothing can be compared in the end: {error}"));
            }
            done.set(true);
        });
        if !self.wait_for(move |_| is_done.get())? {
            self.journal
                .failure(format!("what is there is not read within {HEAL_MAX:?}"));
        }
        Ok(())
    }

    fn report(&self) -> Report {
        let (datagrams, digest) = self.world.network().sent();
        Report {
            failures: self.journal.failures(),
            operations: self.journal.operations(),
            errors: self.journal.errors(),
            datagrams,
            digest,
            faults: self.faults.count(),
            failed_at: self.journal.failed_at(),
            took: self.world.now(),
            trace: self.journal.take_lines(),
        }
    }
}

/// Whether every block has its replicas. Some may lack a tail that was not synced when power was lost; if that
/// was promised, the comparison of files finds it.
fn is_whole(report: &FsckReport) -> bool {
    report.missing_replicas + report.orphan_blocks + report.excess_replicas == 0
        && report.lost_blocks == 0
}

/// Whether every block has all of its replicas, or none.
fn is_rest_whole(report: &FsckReport) -> bool {
    let replication = u64::from(REPLICATION);
    report.missing_replicas == report.lost_blocks * replication && report.orphan_blocks == 0
}
