//! A namenode of a group whose directory was put back to an older copy, for good: it has forgotten what it told the others,
//! and an operator takes it into the group again. One at a time. What it has forgotten the leader knows, and nothing happens
//! to the two until it has said so: it is recognised only when one of those that know is reached
//! ([adr/0026](../../../../docs/adr/0026-consensus-by-openraft.md)).

use std::cell::Cell;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use super::journal::Journal;
use super::part::Part;
use super::world::World;
use crate::live::admin::Admin;

/// How long the leader may take to call it.
const CALLED_WITHIN: Duration = Duration::from_secs(2);
/// How often an operator looks whether the namenode is a member.
const LOOK: Duration = Duration::from_millis(500);
/// What the leader says of a member before it has heard of its new start says nothing.
const HEARD_OF_WITHIN: Duration = Duration::from_secs(4);
/// A member that the leader has heard of so lately answers.
const ANSWERS_MS: u64 = 1_000;
/// It lacks no more records than this.
const BEHIND_MAX: u64 = 50;

/// See the module.
#[derive(Default)]
pub struct Forgotten(Option<Rejoining>);

struct Rejoining {
    part: Part,
    began: Duration,
    is_member: Rc<Cell<bool>>,
}

impl Forgotten {
    /// Whether one has forgotten something, and is no sound member of the group again yet.
    pub fn is_any(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the leader may not have called it yet.
    pub fn is_unnoticed(&self, now: Duration) -> bool {
        let rejoining = self.0.as_ref();
        rejoining.is_some_and(|it| now < it.began + CALLED_WITHIN)
    }

    /// Whether it is this one.
    pub fn is(&self, part: Part) -> bool {
        self.0.as_ref().is_some_and(|it| it.part == part)
    }

    /// The copy takes the place of the directory, and the namenode is started.
    ///
    /// # Errors
    /// When the files of the simulation cannot be changed.
    pub fn forget(&mut self, part: Part, world: &mut World, journal: &Journal) -> io::Result<()> {
        world.put_back_copy_of(part)?;
        journal.note(
            &part.to_string(),
            format_args!("its directory is an older copy"),
        );
        let is_member = Rc::new(Cell::new(false));
        let (namenodes, bind, identity) = world.outside_operator()?;
        let rejoined = Rc::clone(&is_member);
        let journal = journal.clone();
        world.spawn_outside(async move {
            let admin = |namenode| Admin::with_identity(&identity, bind, namenode);
            let admins = namenodes.into_iter().map(admin);
            let mut admins: Vec<Admin> = admins.collect::<Result<_, _>>().expect("free ports");
            add_again(&mut admins, part.namenode_addr(), &journal).await;
            journal.note(&part.to_string(), format_args!("is a member of the group"));
            rejoined.set(true);
        });
        self.0 = Some(Rejoining {
            part,
            began: world.now(),
            is_member,
        });
        Ok(())
    }

    /// Time goes on.
    pub fn go_on(&mut self) {
        if self.0.as_ref().is_some_and(|it| it.is_member.get()) {
            self.0 = None;
        }
    }
}

/// Returns when it is a member that lacks nothing. It may be one all the time: it had nothing to forget.
async fn add_again(admins: &mut [Admin], addr: SocketAddr, journal: &Journal) {
    let began = journal.now();
    loop {
        tokio::time::sleep(LOOK).await;
        for admin in admins.iter_mut() {
            let Some(status) = admin.group().await.filter(|it| it.leader == Some(it.this)) else {
                continue;
            };
            let here = status.members.iter().find(|it| it.addr == addr);
            let has_all = |lsn: u64| lsn + BEHIND_MAX >= status.last;
            let is_sound = here.is_some_and(|it| {
                let answers = it.heard_ms.is_some_and(|ms| ms < ANSWERS_MS);
                it.is_voter
                    && (it.id == status.this || answers && it.acknowledged.is_some_and(has_all))
            });
            if is_sound && journal.now() >= began + HEARD_OF_WITHIN {
                return;
            }
            // Refused as long as it is a member, as far as the leader knows.
            if !is_sound {
                admin.add(addr).await;
            }
        }
    }
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
}

/// An operator has this namenode lead, whoever leads now.
pub fn hand_over(to: Part, world: &World) -> io::Result<()> {
    let (namenodes, bind, identity) = world.outside_operator()?;
    world.spawn_outside(async move {
        for namenode in namenodes {
            let admin = Admin::with_identity(&identity, bind, namenode);
            // One that does not lead refuses.
            admin
                .expect("a free port")
                .transfer(to.namenode_addr())
                .await;
        }
    });
    Ok(())
}
