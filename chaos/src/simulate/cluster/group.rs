//! What is seen of a group of namenodes from a machine to which nothing happens: who leads, in
//! which term, and whether somebody does.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use harvestfs_protocol::group::GroupStatus;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::SetXattrMode;
use harvestfs_protocol::types::Credentials;

use super::journal::Journal;
use super::part::member_id;
use super::world::{Connecting, World};
use crate::live::admin::Admin;

/// How often each namenode is asked whether it leads.
const ASK: Duration = Duration::from_millis(100);
/// How often something is changed to see that somebody leads.
const CHANGE: Duration = Duration::from_millis(500);
/// With a majority of sound namenodes, a change takes no longer.
const CHANGED_WITHIN: Duration = Duration::from_secs(20);
/// A namenode that leads no more may have lost what was not durable until so long after its fault.
const DISTURBED: Duration = Duration::from_secs(15);
const XATTR: &[u8] = b"user.progress";
/// How long namenodes may take to agree in the end, one after the other.
const LOOK: Duration = Duration::from_millis(500);
/// How often their namespaces are compared: what the cluster does by itself may come between two
/// looks.
const ROUNDS: u32 = 5;

/// See the module.
pub struct Group {
    journal: Journal,
    /// Since when a majority of namenodes is sound.
    sound_since: Option<Duration>,
    changed: Rc<Cell<Duration>>,
    /// When something was last wrong with a namenode.
    disturbed: Option<Duration>,
    is_stuck: bool,
}

impl Group {
    /// Nothing is seen until [`Group::start`].
    pub fn new(journal: &Journal) -> Self {
        Self {
            journal: journal.clone(),
            sound_since: None,
            changed: Rc::default(),
            disturbed: None,
            is_stuck: false,
        }
    }

    /// Looks at the namenodes from now on, if they are several.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn start(&self, world: &World) -> io::Result<()> {
        if world.namenodes().len() == 1 {
            return Ok(());
        }
        let leaders: Rc<RefCell<BTreeMap<u64, u64>>> = Rc::default();
        let (addrs, bind, identity) = world.outside_operator()?;
        for addr in addrs {
            let (identity, journal) = (identity.clone(), self.journal.clone());
            let leaders = Rc::clone(&leaders);
            world.spawn_outside(async move {
                let admin = Admin::with_identity(&identity, bind, addr).expect("a free port");
                ask(admin, journal, leaders).await;
            });
        }
        let connections = world.outside_connections()?;
        self.changed.set(world.now());
        world.spawn_outside(change(
            connections,
            self.journal.clone(),
            Rc::clone(&self.changed),
        ));
        Ok(())
    }

    /// Looks whether somebody leads. `sound` of `all` namenodes have no fault.
    pub fn go_on(&mut self, sound: usize, all: usize) {
        let now = self.journal.now();
        if sound < all {
            self.disturbed = Some(now);
        }
        if sound * 2 <= all {
            self.sound_since = None;
            return;
        }
        let since = *self.sound_since.get_or_insert(now);
        let waits = now.saturating_sub(since.max(self.changed.get()));
        if all > 1 && waits > CHANGED_WITHIN && !self.is_stuck {
            self.is_stuck = true;
            self.journal.failure(format!(
                "a majority of the namenodes is sound, and nothing changes within {CHANGED_WITHIN:?}"
            ));
        }
    }

    /// Whether another namenode may lead since a moment ago, which has not what was not durable.
    pub fn is_disturbed(&self) -> bool {
        let now = self.journal.now();
        self.disturbed.is_some_and(|at| now <= at + DISTURBED)
    }
}

async fn ask(mut admin: Admin, journal: Journal, leaders: Rc<RefCell<BTreeMap<u64, u64>>>) {
    loop {
        tokio::time::sleep(ASK).await;
        let Some(GroupStatus {
            this, leader, term, ..
        }) = admin.group().await
        else {
            continue;
        };
        if leader != Some(this) {
            continue;
        }
        let before = leaders.borrow_mut().insert(term, this);
        match before {
            None => journal.note("group", format_args!("member {this} leads in term {term}")),
            Some(before) if before != this => journal.broken(format!(
                "members {before} and {this} both lead in term {term}"
            )),
            Some(_) => {}
        }
    }
}

async fn change(
    connections: impl Fn() -> Connecting,
    journal: Journal,
    changed: Rc<Cell<Duration>>,
) {
    let me = Credentials::root();
    for count in 0_u64.. {
        if let Ok(client) = connections().await {
            loop {
                let value = count.to_string();
                let set = client.setxattr(
                    &me,
                    InodeId::ROOT,
                    XATTR,
                    value.as_bytes(),
                    SetXattrMode::Any,
                );
                if set.await.is_err() {
                    break;
                }
                changed.set(journal.now());
                tokio::time::sleep(CHANGE).await;
            }
        }
        tokio::time::sleep(CHANGE).await;
    }
}

/// What namenodes have in common when they have the same namespace.
type Counts = (u64, u64, u64);

/// Has each namenode lead in turn, and compares what they have.
pub async fn compare(admins: &mut [Admin], addrs: &[SocketAddr], journal: &Journal) {
    for _ in 0..ROUNDS {
        let mut counts: Vec<Counts> = Vec::new();
        for (number, addr) in (0..).zip(addrs) {
            let report = loop {
                hand_over(admins, *addr, member_id(number).0).await;
                if let Some(report) = admins[usize::from(number)].fsck().await {
                    break report;
                }
            };
            counts.push((report.files, report.directories, report.blocks));
        }
        if counts.iter().all(|it| *it == counts[0]) {
            return;
        }
        journal.note(
            "group",
            format_args!("files, directories and blocks of members: {counts:?}"),
        );
    }
    journal.failure("the namenodes do not have the same namespace".into());
}

/// Returns when the member leads.
async fn hand_over(admins: &mut [Admin], to: SocketAddr, id: u64) {
    loop {
        for admin in admins.iter_mut() {
            let status = admin.group().await;
            let Some(status) = status.filter(|it| it.leader == Some(it.this)) else {
                continue;
            };
            if status.this == id {
                return;
            }
            // Refused while it does not answer: asked again.
            let _ = admin.transfer(to).await;
        }
        tokio::time::sleep(LOOK).await;
    }
}
