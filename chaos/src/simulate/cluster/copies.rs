//! Copies of the namenode's directory: one that is put in its place, and one that is started beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use harvestfs_namenode::journal::{Journal, JournalOptions, Lsn};
use harvestfs_namenode::server::journal_dir;

use super::disk::SimulatedDisk;
use super::journal::Journal as Trace;
use super::operator::Look;
use super::part::{NAMENODE_PORT, Part};
use super::world::{CLUSTER, SEGMENT_BYTES, World};
use super::{FaultKind, START};

/// Directories: the copy, a scratch copy of it that is opened to read its last record, the newest directory while the
/// copy is in its place, and the one that is started beside the namenode.
const COPY: &str = "namenode-copy";
const SCRATCH: &str = "namenode-scratch";
const NEWEST: &str = "namenode-newest";
const DOUBLE: &str = "namenode-double";
/// The file in which a datanode remembers the last record and the epoch of the namenode that it obeyed.
const OBEYED: &str = "OBEYED";
const OBEYED_RECORD: &str = "record ";
const OBEYED_EPOCH: &str = "epoch ";

/// How long before clients start the first copy is made, and how often further ones are made.
const FIRST: Duration = Duration::from_secs(2);
const INTERVAL: Duration = Duration::from_secs(10);
/// The minimum age of a copy that is used: datanodes write every 5 s which record of the namenode they obeyed last.
const AGE_MIN: Duration = Duration::from_secs(6);
/// Time that is left for datanodes to execute what the newest namenode commanded before it ended.
const COMMANDS: Duration = Duration::from_secs(2);
/// Once the newest directory is back, clients may trust for the length of a lease what they read from the copy, and
/// check their leases every half second.
const BELIEVED: Duration = Duration::from_secs(12);

/// The complete replicas of datanodes.
type Replicas = BTreeMap<Part, BTreeSet<PathBuf>>;

/// The copies of a simulation, and their uses.
pub struct Copies {
    is_wanted: bool,
    next: Duration,
    copied: Option<Copied>,
    rolled_back: Option<RolledBack>,
    /// What was promised is in doubt until then, and until an operator has found the newest namenode well.
    doubt_until: Option<Duration>,
    given_up: u64,
    astray: Option<Astray>,
}

#[derive(Clone, Copy)]
struct Copied {
    at: Duration,
    last_record: Lsn,
}

struct RolledBack {
    began: Duration,
    /// The replicas of datanodes that no other fault affects in the meantime.
    before: Option<Replicas>,
}

/// A datanode that follows the copy beside the namenode.
struct Astray {
    part: Part,
    before: BTreeSet<PathBuf>,
    look: Look,
}

impl Copies {
    /// Creates the copies of a simulation with these kinds of faults.
    pub fn new(kinds: &[FaultKind]) -> Self {
        let needs_copy = |kind: &FaultKind| matches!(kind, FaultKind::Rollback | FaultKind::Double);
        Self {
            is_wanted: kinds.iter().any(needs_copy),
            next: START.saturating_sub(FIRST),
            copied: None,
            rolled_back: None,
            doubt_until: None,
            given_up: 0,
            astray: None,
        }
    }

    /// Whether the faults need copies.
    pub fn are_wanted(&self) -> bool {
        self.is_wanted
    }

    /// Whether what is promised now does not count: an older copy serves, or did until a moment ago.
    pub fn are_in_doubt(&self) -> bool {
        self.doubt_until.is_some()
    }

    /// Makes a copy when it is time for one, and follows up on a copy that serves. `is_sound` says whether no fault
    /// affects a datanode that could remove replicas.
    ///
    /// # Errors
    /// When files cannot be written.
    pub fn go_on(
        &mut self,
        world: &mut World,
        trace: &Trace,
        is_sound: impl Fn(Part) -> bool,
    ) -> io::Result<()> {
        let now = world.now();
        if self.is_wanted && now >= self.next {
            self.next = now + INTERVAL;
            if self.rolled_back.is_none() {
                self.copy(world, trace)?;
            }
        }
        if let Some(rolled_back) = &mut self.rolled_back {
            match &mut rolled_back.before {
                Some(before) => before.retain(|part, _| is_sound(*part)),
                None if now >= rolled_back.began + COMMANDS => {
                    rolled_back.before = Some(sealed(world, &is_sound)?);
                }
                None => {}
            }
        }
        let look = world.look();
        if look.given_up() != self.given_up {
            self.given_up = look.given_up();
            self.doubt_until = Some(now + BELIEVED);
        }
        if self.rolled_back.is_none()
            && self.doubt_until.is_some_and(|until| now >= until)
            && look.is_settled()
        {
            self.doubt_until = None;
        }
        Ok(())
    }

    fn copy(&mut self, world: &World, trace: &Trace) -> io::Result<()> {
        let last_record = match world.copy_namenode() {
            Ok(last_record) => last_record,
            Err(error) => {
                trace.failure(format!("a copy of the namenode cannot be read: {error}"));
                return Ok(());
            }
        };
        let at = world.now();
        trace.note(
            "namenode",
            format_args!("its directory is copied, up to record {last_record}"),
        );
        self.copied = Some(Copied { at, last_record });
        Ok(())
    }

    /// Returns the last record of the copy if the copy is old enough and all these datanodes know more than it does:
    /// then it has to find out that it is a copy.
    fn usable(&self, world: &World, datanodes: &[Part]) -> Option<Lsn> {
        let Copied { at, last_record } = self.copied?;
        let knows_more = |part: &Part| world.obeyed(*part) > Some(last_record);
        let is_usable = world.now() >= at + AGE_MIN && datanodes.iter().all(knows_more);
        is_usable.then_some(last_record)
    }

    /// Starts the namenode from a copy that is old enough, if there is one. Returns whether there is.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn roll_back(&mut self, world: &mut World) -> io::Result<bool> {
        let datanodes = world.datanodes();
        if self.rolled_back.is_some() || self.usable(world, &datanodes).is_none() {
            return Ok(false);
        }
        world.put_copy_back()?;
        self.copied = None;
        self.rolled_back = Some(RolledBack {
            began: world.now(),
            before: None,
        });
        self.doubt_until = Some(world.now());
        Ok(true)
    }

    /// Puts the newest directory back, and starts the namenode if it runs.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn put_newest_back(&mut self, world: &mut World, trace: &Trace) -> io::Result<()> {
        let Some(RolledBack { before, .. }) = self.rolled_back.take() else {
            return Ok(());
        };
        if world.look().is_overlooked() {
            trace.failure("an older copy of the namenode serves as if it were the newest".into());
        }
        let before = before.unwrap_or_default();
        let after = sealed(world, |part| before.contains_key(&part))?;
        for (part, before) in &before {
            report_removed(*part, before, &after[part], "an older copy", trace);
        }
        self.doubt_until = Some(world.now() + BELIEVED);
        world.put_newest_back()
    }

    /// Starts a copy that is old enough beside the namenode and has a datanode follow it, if there is such a copy.
    /// Returns whether there is.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_double(&mut self, part: Part, world: &mut World) -> io::Result<bool> {
        if self.astray.is_some() || self.usable(world, &[part]).is_none() {
            return Ok(false);
        }
        world.host(part).crash();
        let before = world.sealed(part)?;
        let look = world.start_double(part)?;
        self.astray = Some(Astray { part, before, look });
        Ok(true)
    }

    /// Ends the copy beside the namenode; its datanode follows the namenode again. `is_weak` says whether the datanode
    /// may have lost replicas on its own.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn end_double(
        &mut self,
        is_weak: bool,
        world: &mut World,
        trace: &Trace,
    ) -> io::Result<()> {
        let Some(Astray { part, before, look }) = self.astray.take() else {
            return Ok(());
        };
        if look.is_overlooked() {
            trace.failure("a copy beside the namenode serves as if it were the namenode".into());
        }
        let was_up = world.host(part).is_up();
        world.end_double(part);
        if !is_weak {
            let after = world.sealed(part)?;
            report_removed(part, &before, &after, "a copy beside the namenode", trace);
        }
        if was_up {
            world.host(part).boot()?;
            world.start(part)?;
        }
        Ok(())
    }
}

fn sealed(world: &World, is_wanted: impl Fn(Part) -> bool) -> io::Result<Replicas> {
    let datanodes = world.datanodes().into_iter();
    let wanted = datanodes.filter(|part| is_wanted(*part));
    wanted.map(|part| Ok((part, world.sealed(part)?))).collect()
}

fn report_removed(
    part: Part,
    before: &BTreeSet<PathBuf>,
    after: &BTreeSet<PathBuf>,
    by: &str,
    trace: &Trace,
) {
    for replica in before.difference(after) {
        let name = replica.file_name().unwrap_or_default().display();
        trace.failure(format!("{by} has replica {name} removed from {part}"));
    }
}

impl World {
    /// Copies the directory of the namenode as a loss of power would leave it. Returns the last record in it.
    ///
    /// # Errors
    /// When it cannot be read, or the copy written.
    fn copy_namenode(&self) -> io::Result<Lsn> {
        let disk = self.disk(Part::FIRST_NAMENODE);
        let [copy, scratch] = [COPY, SCRATCH].map(|name| self.directory().join(name));
        for directory in [&copy, &scratch] {
            if directory.exists() {
                fs::remove_dir_all(directory)?;
            }
        }
        disk.copy_synced(&self.path(Part::FIRST_NAMENODE), &copy)?;
        // Opening a journal changes it.
        disk.copy_synced(&copy, &scratch)?;
        let options = JournalOptions {
            segment_bytes: SEGMENT_BYTES,
            ..JournalOptions::new(journal_dir(&scratch), CLUSTER.0)
        };
        let (_, recovered) = Journal::open(&options).map_err(io::Error::other)?;
        Ok(recovered.last_lsn)
    }

    /// The last record that a datanode remembers of the namenode that it obeyed.
    fn obeyed(&self, part: Part) -> Option<Lsn> {
        self.remembered(part, OBEYED_RECORD)
    }

    /// The number of the epoch that a datanode remembers having obeyed.
    pub(super) fn obeyed_epoch(&self, part: Part) -> Option<u64> {
        self.remembered(part, OBEYED_EPOCH)
    }

    fn remembered(&self, part: Part, field: &str) -> Option<u64> {
        let remembered = fs::read_to_string(self.path(part).join(OBEYED)).ok()?;
        let mut lines = remembered.lines();
        let value = lines.find_map(|line| line.strip_prefix(field))?;
        value.parse().ok()
    }

    /// Ends the namenode, and starts it from the copy.
    fn put_copy_back(&mut self) -> io::Result<()> {
        let namenode = self.path(Part::FIRST_NAMENODE);
        let [copy, newest] = [COPY, NEWEST].map(|name| self.directory().join(name));
        self.host(Part::FIRST_NAMENODE).crash();
        self.disk(Part::FIRST_NAMENODE).settle();
        fs::rename(&namenode, newest)?;
        fs::rename(copy, namenode)?;
        self.look().begin_copy();
        self.host(Part::FIRST_NAMENODE).boot()?;
        self.start(Part::FIRST_NAMENODE)
    }

    /// Ends the namenode, and starts it from its newest directory unless its machine is down.
    fn put_newest_back(&mut self) -> io::Result<()> {
        let namenode = self.path(Part::FIRST_NAMENODE);
        let newest = self.directory().join(NEWEST);
        let was_up = self.host(Part::FIRST_NAMENODE).is_up();
        self.host(Part::FIRST_NAMENODE).crash();
        self.disk(Part::FIRST_NAMENODE).settle();
        fs::remove_dir_all(&namenode)?;
        fs::rename(newest, namenode)?;
        self.look().end_copy();
        if was_up {
            self.host(Part::FIRST_NAMENODE).boot()?;
            self.start(Part::FIRST_NAMENODE)?;
        }
        Ok(())
    }

    /// Starts the copy on a machine of its own, and a datanode that is not running as one that follows it. Returns what
    /// an operator sees of the copy.
    fn start_double(&mut self, part: Part) -> io::Result<Look> {
        let [copy, double] = [COPY, DOUBLE].map(|name| self.directory().join(name));
        let disk = SimulatedDisk::new(self.now().as_nanos() as u64);
        disk.copy_synced(&copy, &double)?;
        let (host, ip) = self.new_double_host()?;
        let addr = SocketAddr::new(ip, NAMENODE_PORT);
        self.start_namenode_on(&host, &disk, double, addr)?;
        let look = Look::default();
        look.begin_copy();
        self.look_at(addr, &look)?;
        self.set_double(Some((host, part, addr)));
        self.host(part).boot()?;
        self.start(part)?;
        Ok(look)
    }

    /// Ends the copy, and the datanode that follows it.
    fn end_double(&mut self, part: Part) {
        self.set_double(None);
        self.host(part).crash();
        // Its remains are of no use; a failure to remove them is harmless.
        let _ = fs::remove_dir_all(self.directory().join(DOUBLE));
    }
}
