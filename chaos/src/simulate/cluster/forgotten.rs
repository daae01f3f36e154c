//! A namenode of a group that an operator adds again, one at a time.
//!
//! Either its directory was permanently replaced by an older copy, so that it has forgotten what it sent to the others.
//! The leader knows what was forgotten, and no fault affects the two until the leader has said so: a member that forgot
//! is recognised only when it reaches one that knows ([adr/0026](../../../../docs/adr/0026-consensus-library.md)). Or
//! it has an empty directory, because the former one was lost or because it had to leave the group. The module also
//! starts copies of a directory beside its namenode.

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

/// How long the leader may take to contact the namenode.
const CALLED_WITHIN: Duration = Duration::from_secs(2);
/// How often an operator checks whether the namenode is a member.
const LOOK: Duration = Duration::from_millis(500);
/// What the leader reports about a member is meaningless until it has noticed that the member was started again.
const HEARD_OF_WITHIN: Duration = Duration::from_secs(4);
/// A member from which the leader has heard within this time answers.
const ANSWERS_MS: u64 = 1_000;
/// How long a namenode may take to answer a request to hand over, before the next one is asked.
const ASKED_WITHIN: Duration = Duration::from_millis(100);
/// How often an operator checks whether a copy serves.
const LOOK_AT_COPY: Duration = Duration::from_millis(20);
/// The directory of the copy beside a namenode.
const DOUBLE: &str = "namenode-double";
/// A member that has caught up lacks no more records than this.
const BEHIND_MAX: u64 = 50;
/// The file below a namenode's directory with its vote and the number of times that this was written.
const MEMBER_FILE: &str = "journal/member";
/// How often the file is compared with the one in the copy, and after how long the leader has certainly heard of a
/// newer one: it contacts members every 50 ms.
const LOOK_AT_MEMBER: Duration = Duration::from_millis(50);
const HEARD_OF: Duration = Duration::from_secs(1);

/// The namenode that is being added again, and the copy or removal that precedes it.
#[derive(Default)]
pub struct Forgotten {
    rejoining: Option<Rejoining>,
    /// While this is true, the operator keeps asking that a namenode leave.
    leaving: Option<Rc<Cell<bool>>>,
    copied: Option<Copied>,
}

/// A copy that is to take the place of a directory.
struct Copied {
    part: Part,
    next_look: Duration,
    /// Since when this leader, which no fault affects, learns what the copy does not know; the leader is its machine
    /// and term.
    known_since: Option<(Duration, (Part, u64))>,
}

struct Rejoining {
    part: Part,
    /// No fault may affect the namenodes until then.
    noticed_at: Duration,
    is_member: Rc<Cell<bool>>,
}

impl Forgotten {
    /// Whether there is a namenode that is not a sound member of the group again yet.
    pub fn is_any(&self) -> bool {
        self.rejoining.is_some()
    }

    /// Whether the leader may not have contacted it yet.
    pub fn is_unnoticed(&self, now: Duration) -> bool {
        let rejoining = self.rejoining.as_ref();
        rejoining.is_some_and(|it| now < it.noticed_at)
    }

    /// Whether it is this one.
    pub fn is(&self, part: Part) -> bool {
        self.rejoining.as_ref().is_some_and(|it| it.part == part)
    }

    /// Makes a copy, which replaces the directory later.
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

    /// Checks whether the copy lacks something that the leader knows. `leader` is one that no fault affects, and its
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

    /// Replaces the directory by the copy, and starts the namenode.
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

    /// Gives the namenode an empty directory, and starts it.
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
        // It gets a new member id, so no other member takes it for the one that it was.
        self.take_in_again((part, None), Duration::ZERO, world, journal)
    }

    /// Has an operator remove it from the group, until it begins with an empty directory.
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

    /// Has an operator add the namenode again. It must not become a member with the id `forgot_as`, since it has
    /// forgotten what it sent to the others under that id.
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

    /// Notices when the namenode is a sound member again.
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

    /// Waits until the namenode is a member that has caught up, and returns its id. It may have been one all the time,
    /// if it had nothing to forget.
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
                // The leader refuses while it still considers it a member.
                if !is_sound {
                    admin.add(addr).await;
                }
            }
        }
    }

    /// Removes a member from the group; if it leads, another one is asked to lead first.
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

/// The status of the group if the asked namenode leads, otherwise `None`.
pub async fn leading(admin: &mut Admin) -> Option<GroupStatus> {
    admin.group().await.filter(|it| it.leader == Some(it.this))
}

impl World {
    /// The path of the copy of a part's directory.
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

    /// Whether a member has written something that the copy of its directory lacks.
    fn lacks_copy_of(&self, part: Part) -> bool {
        let read = |directory: PathBuf| fs::read(directory.join(MEMBER_FILE));
        // Its directory may be about to be replaced by an empty one.
        let (Ok(here), Ok(copy)) = (read(self.path(part)), read(self.copy_of(part))) else {
            return false;
        };
        here != copy
    }

    /// Ends the namenode, and starts it from the copy.
    fn put_back_copy_of(&mut self, part: Part) -> io::Result<()> {
        let (directory, copy) = (self.path(part), self.copy_of(part));
        self.host(part).crash();
        self.disk(part).settle();
        fs::remove_dir_all(&directory)?;
        fs::rename(copy, directory)?;
        self.host(part).boot()?;
        self.start(part)
    }

    /// Ends the namenode, and starts it from an empty directory.
    fn empty_directory_of(&mut self, part: Part) -> io::Result<()> {
        self.reimage(part)?;
        self.host(part).boot()?;
        let directory = self.path(part);
        let format = || format_outside(&directory, CLUSTER, SEGMENT_BYTES);
        self.host(part).during(format).map_err(io::Error::other)?;
        self.start(part)
    }

    /// Starts a copy of a namenode's directory on a machine of its own. The copy must not serve any client.
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

    /// Ends the copy.
    pub(super) fn end_double_of_member(&mut self) {
        self.set_double(None);
        // Its remains are of no use; a failure to remove them is harmless.
        let _ = fs::remove_dir_all(self.directory().join(DOUBLE));
    }
}

/// Has an operator ask these namenodes to lead one after another, each so long after the request for the one before,
/// regardless of which namenode leads by then.
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
