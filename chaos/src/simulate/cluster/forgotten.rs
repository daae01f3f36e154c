//! A namenode of a group that an operator takes in again, one at a time.
//!
//! Its directory was put back to an older copy, for good: it has forgotten what it told the others. What it has forgotten
//! the leader knows, and nothing happens to the two until it has said so: it is recognised only when one of those that know
//! is reached ([adr/0026](../../../../docs/adr/0026-consensus-library.md)). Or it has an empty directory, since the one
//! before was lost, or since it had to leave the group. And copies of the directory that are started beside one.

use std::cell::Cell;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use harvestfs_namenode::server::format_outside;
use harvestfs_protocol::group::{Condition, GroupMember, GroupStatus};
use harvestfs_protocol::placement::RepairChange;

use super::disk::SimulatedDisk;
use super::group::Leader;
use super::journal::Journal;
use super::part::{NAMENODE_PORT, Part};
use super::world::{CLUSTER, SEGMENT_BYTES, World};
use crate::live::admin::Admin;

/// How long the leader may take to call it.
const CALLED_WITHIN: Duration = Duration::from_secs(2);
/// How often an operator looks whether the namenode is a member.
const LOOK: Duration = Duration::from_millis(500);
/// What the leader says of a member before it has heard of its new start says nothing.
const HEARD_OF_WITHIN: Duration = Duration::from_secs(4);
/// A member that the leader has heard of so lately answers.
const ANSWERS_MS: u64 = 1_000;
/// How long a namenode may take to say that it hands over, before the next one is asked.
const ASKED_WITHIN: Duration = Duration::from_millis(100);
/// How often it is looked whether a copy serves.
const LOOK_AT_COPY: Duration = Duration::from_millis(20);
/// Where the copy beside a namenode is.
const DOUBLE: &str = "namenode-double";
/// It lacks no more records than this.
const BEHIND_MAX: u64 = 50;
/// The file with its vote and the number of times that this was written, below its directory.
const MEMBER_FILE: &str = "journal/member";
/// How often it is looked whether that is still the one in the copy, and after how long the leader has heard of
/// another one for certain: it calls every 50 ms.
const LOOK_AT_MEMBER: Duration = Duration::from_millis(50);
const HEARD_OF: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Default)]
pub struct Forgotten {
    rejoining: Option<Rejoining>,
    /// One is to leave as long as this is so.
    leaving: Option<Rc<Cell<bool>>>,
    copied: Option<Copied>,
}

/// A copy that is to take the place of a directory.
struct Copied {
    part: Part,
    next_look: Duration,
    /// Since when this leader, to which nothing happens, hears what the copy does not know.
    known_since: Option<(Duration, (Part, u64))>,
}

struct Rejoining {
    part: Part,
    /// Until then nothing may happen to the namenodes.
    noticed_at: Duration,
    is_member: Rc<Cell<bool>>,
}

impl Forgotten {
    /// Whether one has forgotten something, and is no sound member of the group again yet.
    pub fn is_any(&self) -> bool {
        self.rejoining.is_some()
    }

    /// Whether the leader may not have called it yet.
    pub fn is_unnoticed(&self, now: Duration) -> bool {
        let rejoining = self.rejoining.as_ref();
        rejoining.is_some_and(|it| now < it.noticed_at)
    }

    /// Whether it is this one.
    pub fn is(&self, part: Part) -> bool {
        self.rejoining.as_ref().is_some_and(|it| it.part == part)
    }

    /// A copy is made, which takes the place of the directory later.
    ///
    /// # Errors
    /// When the files of the simulation cannot be read, or the copy written.
    pub fn copy(&mut self, part: Part, world: &World) -> io::Result<()> {
        self.copied = Some(Copied {
            part,
            next_look: world.now(),
            known_since: None,
        });
        world.copy_directory_of(part)
    }

    /// Looks whether the copy lacks something that the leader knows. `leader` is one to which nothing happens, and its
    /// term.
    pub fn look_at_copy(&mut self, leader: Option<(Part, u64)>, world: &World) {
        let now = world.now();
        let due = self.copied.as_mut().filter(|it| it.next_look <= now);
        let Some(copied) = due else {
            return;
        };
        copied.next_look = now + LOOK_AT_MEMBER;
        let leader = leader.filter(|(part, _)| *part != copied.part);
        let knew = copied.known_since.filter(|(_, of)| leader == Some(*of));
        copied.known_since = knew.or_else(|| {
            let leader = leader.filter(|_| world.lacks_copy_of(copied.part))?;
            Some((now, leader))
        });
    }

    /// The copy takes the place of the directory, and the namenode is started.
    ///
    /// # Errors
    /// When the files of the simulation cannot be changed.
    pub fn forget(
        &mut self,
        part: Part,
        leader: &Leader,
        world: &mut World,
        journal: &Journal,
    ) -> io::Result<()> {
        let now = world.now();
        let known_since = self.copied.take().and_then(|it| it.known_since);
        let is_known = known_since.is_some_and(|(since, _)| since + HEARD_OF <= now);
        let before = leader.number_of(part.namenode_addr());
        world.put_back_copy_of(part)?;
        let noticed = if is_known {
            ", and the leader knows"
        } else {
            ""
        };
        journal.note(
            &part.to_string(),
            format_args!("its directory is an older copy{noticed}"),
        );
        let forgot_as = before.filter(|_| is_known);
        self.take_in_again((part, forgot_as), CALLED_WITHIN, world, journal)
    }

    /// The namenode gets an empty directory, and is started.
    ///
    /// # Errors
    /// When the files of the simulation cannot be changed.
    pub fn begin_anew(
        &mut self,
        part: Part,
        world: &mut World,
        journal: &Journal,
    ) -> io::Result<()> {
        self.leaving.take().inspect(|leaving| leaving.set(false));
        world.empty_directory_of(part)?;
        journal.note(&part.to_string(), format_args!("its directory is empty"));
        // Its number is another one: nobody takes it for the one that it was.
        self.take_in_again((part, None), Duration::ZERO, world, journal)
    }

    /// An operator has it leave the group, until it begins anew.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn leave(&mut self, part: Part, world: &World) -> io::Result<()> {
        let connect = Admins::of(world)?;
        let is_wanted = Rc::new(Cell::new(true));
        self.leaving = Some(Rc::clone(&is_wanted));
        world.spawn_outside(async move {
            let mut admins = connect();
            while is_wanted.get() {
                admins.remove(part.namenode_addr()).await;
                tokio::time::sleep(LOOK).await;
            }
        });
        Ok(())
    }

    /// `forgot_as`: it must not be a member with this number, since it has forgotten what it told the others.
    fn take_in_again(
        &mut self,
        (part, forgot_as): (Part, Option<u64>),
        noticed_within: Duration,
        world: &World,
        journal: &Journal,
    ) -> io::Result<()> {
        let connect = Admins::of(world)?;
        let is_member = Rc::new(Cell::new(false));
        let (rejoined, journal) = (Rc::clone(&is_member), journal.clone());
        world.spawn_outside(async move {
            let number = connect().add_again(part.namenode_addr(), &journal).await;
            journal.note(&part.to_string(), format_args!("is a member of the group"));
            if forgot_as == Some(number) {
                journal.broken(format!(
                    "{part} has forgotten what it told the others, and is still member {number}"
                ));
            }
            rejoined.set(true);
        });
        self.rejoining = Some(Rejoining {
            part,
            noticed_at: world.now() + noticed_within,
            is_member,
        });
        Ok(())
    }

    /// Time goes on.
    pub fn go_on(&mut self) {
        if self.rejoining.as_ref().is_some_and(|it| it.is_member.get()) {
            self.rejoining = None;
        }
    }
}

/// An operator's connections to all namenodes.
struct Admins(Vec<Admin>);

impl Admins {
    /// Makes them, on the operator's machine.
    fn of(world: &World) -> io::Result<impl FnOnce() -> Self + use<>> {
        let (namenodes, bind, identity) = world.outside_operator()?;
        Ok(move || {
            let admin = |namenode| Admin::with_identity(&identity, bind, namenode);
            let admins = namenodes.into_iter().map(admin);
            Self(admins.collect::<Result<_, _>>().expect("free ports"))
        })
    }

    /// Returns when it is a member that lacks nothing, with its number. It may be one all the time: it had nothing to
    /// forget.
    async fn add_again(&mut self, addr: SocketAddr, journal: &Journal) -> u64 {
        let began = journal.now();
        loop {
            tokio::time::sleep(LOOK).await;
            for admin in &mut self.0 {
                let Some(status) = leading(admin).await else {
                    continue;
                };
                let here = status.members.iter().find(|it| it.addr == addr);
                let has_all = |lsn: u64| lsn + BEHIND_MAX >= status.last;
                let is_sound = here.is_some_and(|it| {
                    let answers = it.heard_ms.is_some_and(|ms| ms < ANSWERS_MS);
                    it.is_voter
                        && (it.id == status.this || answers && it.acknowledged.is_some_and(has_all))
                });
                if let Some(here) = here
                    && is_sound
                    && journal.now() >= began + HEARD_OF_WITHIN
                {
                    return here.id;
                }
                // Refused as long as it is a member, as far as the leader knows.
                if !is_sound {
                    admin.add(addr).await;
                }
            }
        }
    }

    /// Has a member leave the group, if another one leads or can.
    async fn remove(&mut self, addr: SocketAddr) {
        for admin in &mut self.0 {
            let Some(status) = leading(admin).await else {
                continue;
            };
            let of_this = |it: &&GroupMember| it.addr == addr;
            match status.members.iter().find(of_this) {
                Some(member) if member.id == status.this => {
                    let mut others = status.members.iter().filter(|it| it.addr != addr);
                    if let Some(other) = others.next() {
                        admin.transfer(other.addr).await;
                    }
                }
                Some(_) => _ = admin.remove(addr).await,
                None => {}
            }
        }
    }
}

/// What the leader says of the group; none of another one.
pub async fn leading(admin: &mut Admin) -> Option<GroupStatus> {
    admin.group().await.filter(|it| it.leader == Some(it.this))
}

impl World {
    /// Where the copy of the directory of a part is.
    fn copy_of(&self, part: Part) -> PathBuf {
        self.directory().join(format!("{part}-before"))
    }

    /// Copies the directory of a namenode as a loss of power would leave it.
    ///
    /// # Errors
    /// When the files of the simulation cannot be read, or the copy written.
    pub(super) fn copy_directory_of(&self, part: Part) -> io::Result<()> {
        let copy = self.copy_of(part);
        if copy.exists() {
            fs::remove_dir_all(&copy)?;
        }
        self.disk(part).copy_synced(&self.path(part), &copy)
    }

    /// Whether a member has written down what the copy of its directory does not have.
    fn lacks_copy_of(&self, part: Part) -> bool {
        let read = |directory: PathBuf| fs::read(directory.join(MEMBER_FILE));
        // It may be about to get an empty directory.
        let (Ok(here), Ok(copy)) = (read(self.path(part)), read(self.copy_of(part))) else {
            return false;
        };
        here != copy
    }

    /// The namenode ends, and starts from the copy.
    fn put_back_copy_of(&mut self, part: Part) -> io::Result<()> {
        let (directory, copy) = (self.path(part), self.copy_of(part));
        self.host(part).crash();
        self.disk(part).settle();
        fs::remove_dir_all(&directory)?;
        fs::rename(copy, directory)?;
        self.host(part).boot()?;
        self.start(part)
    }

    /// The namenode ends, and starts from an empty directory.
    fn empty_directory_of(&mut self, part: Part) -> io::Result<()> {
        self.reimage(part)?;
        self.host(part).boot()?;
        let directory = self.path(part);
        let format = || format_outside(&directory, CLUSTER, SEGMENT_BYTES);
        self.host(part).during(format).map_err(io::Error::other)?;
        self.start(part)
    }

    /// Starts a copy of the directory of a namenode on a machine of its own. It must serve nobody.
    ///
    /// # Errors
    /// When the files of the simulation cannot be read, or the copy written.
    pub(super) fn start_double_of_member(
        &mut self,
        part: Part,
        journal: &Journal,
    ) -> io::Result<()> {
        let double = self.directory().join(DOUBLE);
        self.disk(part).copy_synced(&self.path(part), &double)?;
        let (host, ip) = self.new_double_host()?;
        let addr = SocketAddr::new(ip, NAMENODE_PORT);
        let disk = SimulatedDisk::of_copy(self.now().as_nanos() as u64);
        self.start_namenode_on(&host, &disk, double, addr)?;
        let (_, bind, identity) = self.outside_operator()?;
        let journal = journal.clone();
        let watching = host.spawn(std::future::pending::<()>());
        self.spawn_outside(async move {
            let mut admin = Admin::with_identity(&identity, bind, addr).expect("a free port");
            while watching.as_ref().is_some_and(|it| !it.is_finished()) {
                if admin.repair(RepairChange::default()).await.is_some() {
                    journal.broken(format!("a copy beside {part} leads"));
                    return;
                }
                let group = admin.group().await;
                if group.is_some_and(|it| it.condition == Condition::Member) {
                    journal.broken(format!("a copy beside {part} takes part in the group"));
                    return;
                }
                tokio::time::sleep(LOOK_AT_COPY).await;
            }
        });
        self.set_double(Some((host, part, addr)));
        Ok(())
    }

    /// The copy ends.
    pub(super) fn end_double_of_member(&mut self) {
        self.set_double(None);
        // What is left of it is of no use to anybody.
        let _ = fs::remove_dir_all(self.directory().join(DOUBLE));
    }
}

/// An operator has these namenodes lead one after another, each so long after the one before was asked for, whoever
/// leads now.
pub fn hand_over(to: Vec<(Duration, Part)>, world: &World) -> io::Result<()> {
    let connect = Admins::of(world)?;
    world.spawn_outside(async move {
        let mut admins = connect();
        for (pause, to) in to {
            tokio::time::sleep(pause).await;
            for admin in &mut admins.0 {
                // One that does not lead refuses.
                let asked = admin.transfer(to.namenode_addr());
                let _ = tokio::time::timeout(ASKED_WITHIN, asked).await;
            }
        }
    });
    Ok(())
}
