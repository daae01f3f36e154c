//! Watches a group of namenodes from a machine that no fault affects: which namenode leads, in
//! which term, and whether one leads at all.

mod listing;
mod register;

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

use super::forgotten::leading;
use super::journal::Journal;
use super::part::Part;
use super::world::{Connecting, World};
use crate::live::admin::Admin;

/// How often each namenode is asked whether it leads: often enough to catch two that do within the length of a lease.
const ASK: Duration = Duration::from_millis(10);
/// The same once all faults are over, when most of the time is spent waiting.
const ASK_LATER: Duration = Duration::from_secs(1);
/// How often something is changed to see that a namenode leads.
const CHANGE: Duration = Duration::from_millis(500);
/// With a majority of sound namenodes, a change takes no longer than this, counted from the last change of leader.
const CHANGED_WITHIN: Duration = Duration::from_secs(20);
/// The same limit when the leader changes again and again, as it may when transfers are requested or the network
/// splits.
const CHANGED_WITHIN_AT_ALL: Duration = Duration::from_secs(60);
/// Until this long after a fault, a namenode that no longer leads may have lost what was not durable.
const DISTURBED: Duration = Duration::from_secs(15);
const XATTR: &[u8] = b"user.progress";
/// How often the epochs that datanodes remember are checked.
const LOOK_AT_EPOCHS: Duration = Duration::from_millis(100);
/// The pause between two attempts to make a namenode lead.
const LOOK: Duration = Duration::from_millis(500);
/// How often their namespaces are compared at most: the cluster may change something on its own between two
/// listings.
const ROUNDS: u32 = 5;

/// How long an answer of the leader counts.
const KNOWN: Duration = Duration::from_millis(500);

/// The namenode that was last seen to lead. Clones share one state.
#[derive(Clone, Default)]
pub struct Leader(Rc<Known>);

#[derive(Default)]
struct Known {
    newest: Cell<Option<Seen>>,
    /// When the term of the newest leader was first seen.
    since: Cell<Duration>,
    /// The ids of the members by address, as the leader last reported them.
    members: RefCell<BTreeMap<SocketAddr, u64>>,
}

#[derive(Clone, Copy)]
struct Seen {
    term: u64,
    part: Part,
    at: Duration,
}

impl Leader {
    fn seen(&self, seen: Seen) {
        let before = self.0.newest.get();
        if before.is_none_or(|before| before.term < seen.term) {
            self.0.since.set(seen.at);
        }
        if before.is_none_or(|before| before.term <= seen.term) {
            self.0.newest.set(Some(seen));
        }
    }

    /// The namenode that leads, and its term; `None` if that is not known.
    pub fn now(&self, now: Duration) -> Option<(Part, u64)> {
        let seen = self.0.newest.get();
        let seen = seen.filter(|seen| now <= seen.at + KNOWN);
        seen.map(|seen| (seen.part, seen.term))
    }

    /// The id of the member that listens there, as the leader last reported it.
    pub fn number_of(&self, addr: SocketAddr) -> Option<u64> {
        self.0.members.borrow().get(&addr).copied()
    }

    /// The term of the newest leader.
    fn term(&self) -> u64 {
        self.0.newest.get().map_or(0, |seen| seen.term)
    }

    /// When the newest leader was first seen.
    fn since(&self) -> Duration {
        self.0.since.get()
    }
}

/// Watches a group of namenodes.
pub struct Group {
    journal: Journal,
    leader: Leader,
    /// Since when a majority of namenodes is sound.
    sound_since: Option<Duration>,
    changed: Rc<Cell<Duration>>,
    /// When a fault last affected a namenode.
    disturbed: Option<Duration>,
    is_stuck: bool,
    /// All faults are over, so it is enough to look less often.
    is_calm: Rc<Cell<bool>>,
    /// The number of the epoch that each datanode remembered last.
    epochs: BTreeMap<Part, u64>,
    next_look: Duration,
}

impl Group {
    /// Creates a watch, which begins with [`Group::start`].
    pub fn new(journal: &Journal, leader: &Leader) -> Self {
        Self {
            journal: journal.clone(),
            leader: leader.clone(),
            sound_since: None,
            changed: Rc::default(),
            disturbed: None,
            is_stuck: false,
            is_calm: Rc::default(),
            epochs: BTreeMap::new(),
            next_look: Duration::ZERO,
        }
    }

    /// Watches the namenodes from now on, if there are several.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn start(&self, world: &World) -> io::Result<()> {
        if world.namenodes().len() == 1 {
            return Ok(());
        }
        register::start(world, &self.journal, &self.is_calm)?;
        let leaders: Rc<RefCell<BTreeMap<u64, u64>>> = Rc::default();
        let (_, bind, identity) = world.outside_operator()?;
        for part in world.namenodes() {
            let (identity, journal) = (identity.clone(), self.journal.clone());
            let (leaders, leader) = (Rc::clone(&leaders), self.leader.clone());
            let is_calm = Rc::clone(&self.is_calm);
            world.spawn_outside(async move {
                let addr = part.namenode_addr();
                let admin = Admin::with_identity(&identity, bind, addr).expect("a free port");
                ask((admin, part), journal, leaders, leader, is_calm).await;
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

    /// Checks whether a namenode leads. `sound` of `all` namenodes have no fault.
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
        let since = since.max(self.changed.get());
        let waits = now.saturating_sub(since);
        // Each new leader may have to wait until the leases of sessions are over.
        let waits_for_leader = now.saturating_sub(since.max(self.leader.since()));
        let is_stuck = waits_for_leader > CHANGED_WITHIN || waits > CHANGED_WITHIN_AT_ALL;
        if all > 1 && is_stuck && !self.is_stuck {
            self.is_stuck = true;
            self.journal.failure(format!(
                "a majority of the namenodes is sound, and nothing changes within {CHANGED_WITHIN:?}"
            ));
        }
    }

    /// Checks now and then whether a datanode obeys a namenode of an earlier epoch than it did before.
    pub fn look_at_epochs(&mut self, world: &World) {
        if world.now() < self.next_look {
            return;
        }
        self.next_look = world.now() + LOOK_AT_EPOCHS;
        for part in world.datanodes() {
            let epoch = world.obeyed_epoch(part);
            let before = match epoch {
                Some(epoch) => self.epochs.insert(part, epoch),
                // Its disk was replaced.
                None => self.epochs.remove(&part),
            };
            if let (Some(before), Some(epoch)) = (before, epoch)
                && epoch < before
            {
                self.journal
                    .broken(format!("{part} obeys epoch {epoch} after {before}"));
            }
        }
    }

    /// All faults are over: namenodes are asked less often.
    pub fn calm_down(&self) {
        self.is_calm.set(true);
    }

    /// Whether the leader may have changed recently, so that what was not durable may be lost.
    pub fn is_disturbed(&self) -> bool {
        let now = self.journal.now();
        self.disturbed.is_some_and(|at| now <= at + DISTURBED)
    }
}

async fn ask(
    (mut admin, part): (Admin, Part),
    journal: Journal,
    leaders: Rc<RefCell<BTreeMap<u64, u64>>>,
    newest: Leader,
    is_calm: Rc<Cell<bool>>,
) {
    loop {
        tokio::time::sleep(if is_calm.get() { ASK_LATER } else { ASK }).await;
        let newest_term = newest.term();
        let Some(GroupStatus {
            this,
            leader,
            term,
            members,
            ..
        }) = admin.group().await
        else {
            continue;
        };
        if leader != Some(this) {
            continue;
        }
        // A namenode reports that it leads only while it holds a lease, during which no other one may be elected.
        if term < newest_term {
            journal.broken(format!(
                "{part} answers as the leader of term {term}, and another one did in term {newest_term} before"
            ));
        }
        newest.seen(Seen {
            term,
            part,
            at: journal.now(),
        });
        if term >= newest.term() {
            let numbers = members.iter().map(|it| (it.addr, it.id));
            *newest.0.members.borrow_mut() = numbers.collect();
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

/// What is equal when namenodes have the same namespace: the numbers of files, directories and blocks, and a listing.
type Content = ((u64, u64, u64), listing::Listing);

/// Has each namenode lead in turn, and compares their contents.
pub async fn compare(
    admins: &mut [Admin],
    addrs: &[SocketAddr],
    connections: impl Fn() -> Connecting,
    journal: &Journal,
) {
    let mut differences = Vec::new();
    for _ in 0..ROUNDS {
        let mut contents: Vec<Content> = Vec::new();
        for (number, addr) in addrs.iter().enumerate() {
            let content = loop {
                hand_over(admins, *addr).await;
                let Some(report) = admins[number].fsck().await else {
                    continue;
                };
                let listed = async { listing::of(&connections().await?).await };
                let Ok(listed) = listed.await else {
                    continue;
                };
                // If it still leads, all of the answers came from this namenode.
                if leading(&mut admins[number]).await.is_some() {
                    break ((report.files, report.directories, report.blocks), listed);
                }
            };
            contents.push(content);
        }
        if contents.iter().all(|it| *it == contents[0]) {
            return;
        }
        let counts: Vec<_> = contents.iter().map(|it| it.0).collect();
        let others = contents.iter().skip(1);
        differences = others
            .flat_map(|it| listing::differences(&contents[0].1, &it.1))
            .collect();
        journal.note(
            "group",
            format_args!("files, directories and blocks of members: {counts:?}; {differences:?}"),
        );
    }
    journal.failure(format!(
        "the namenodes do not have the same namespace: {differences:?}"
    ));
}

/// Asks until the member leads.
async fn hand_over(admins: &mut [Admin], to: SocketAddr) {
    loop {
        for admin in admins.iter_mut() {
            let Some(status) = leading(admin).await else {
                continue;
            };
            let leader = status.members.iter().find(|it| it.id == status.this);
            if leader.is_some_and(|it| it.addr == to) {
                return;
            }
            // This is refused while the member does not answer, and repeated.
            let _ = admin.transfer(to).await;
        }
        tokio::time::sleep(LOOK).await;
    }
}
