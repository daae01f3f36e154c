//! The policies' view of the cluster.

use std::net::IpAddr;

use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::StorageClass;
use harvestfs_telemetry::profile::{TenantKey, TenantProfile};
use rand::{Rng, RngExt};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::groups::Groups;
use index::{Entry, Index, OUTSIDE, PLACES, Place, coarse};

pub(crate) mod index;
mod tenants;

pub use tenants::{CellSpace, TenantView};

/// Marks numbers without a server.
const NO_SLOT: u32 = u32::MAX;
/// Refused draws before all candidates are examined one by one. As long as half of them are acceptable, this happens
/// once in 65,536 times.
const DRAWS_MAX: u32 = 16;

/// The purpose of a placement. Each lane has its own set of open servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// A new block.
    Write,
    /// A repair within the normal budget.
    Repair,
    /// A repair of a block's last replica.
    Urgent,
}

impl Lane {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Write, Self::Repair, Self::Urgent];
}

/// The lanes that a server is open to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lanes {
    /// To new blocks.
    pub write: bool,
    /// To repair.
    pub repair: bool,
    /// To urgent repair.
    pub urgent: bool,
}

impl Lanes {
    /// Open to nothing: dead, stale or busy.
    pub const NONE: Self = Self {
        write: false,
        repair: false,
        urgent: false,
    };
    /// Open to everything.
    pub const ALL: Self = Self {
        write: true,
        repair: true,
        urgent: true,
    };

    fn contains(self, lane: Lane) -> bool {
        match lane {
            Lane::Write => self.write,
            Lane::Repair => self.repair,
            Lane::Urgent => self.urgent,
        }
    }
}

/// Whole blocks of the largest size that fit below the quota of a server's healthy volumes, by class of volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    blocks: [u32; CLASSES.len()],
}

const CLASSES: [StorageClass; 3] = [StorageClass::Disk, StorageClass::Ssd, StorageClass::Memory];

fn class_number(class: StorageClass) -> usize {
    match class {
        StorageClass::Disk => 0,
        StorageClass::Ssd => 1,
        StorageClass::Memory => 2,
    }
}

impl Room {
    /// Adds room for blocks on volumes of a class.
    pub fn add(&mut self, class: StorageClass, blocks: u32) {
        let sum = &mut self.blocks[class_number(class)];
        // A datanode may claim any quota.
        *sum = sum.saturating_add(blocks);
    }

    /// Returns what is left when `blocks` more are on their way to volumes that are not known yet: no class may count
    /// on the room that they could take.
    #[must_use]
    pub fn less(mut self, blocks: u32) -> Self {
        for of_class in &mut self.blocks {
            *of_class = of_class.saturating_sub(blocks);
        }
        self
    }

    /// Whether it is the same to the indexes: blocks on volumes of each class, and of any class.
    fn is_about(&self, other: &Self) -> bool {
        let mut classes = self.blocks.iter().zip(&other.blocks);
        let about = |a: u32, b: u32| a == b || coarse(a) == coarse(b);
        classes.all(|(&a, &b)| about(a, b)) && about(self.blocks(None), other.blocks(None))
    }

    /// Returns the blocks that fit on volumes of a class, or of any class.
    #[must_use]
    pub fn blocks(&self, class: Option<StorageClass>) -> u32 {
        match class {
            Some(class) => self.blocks[class_number(class)],
            // As in `add`, the reported quotas are not bounded.
            None => self
                .blocks
                .iter()
                .fold(0, |sum, &blocks| sum.saturating_add(blocks)),
        }
    }
}

/// The classes of volume on which servers have had room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Classes {
    #[default]
    None,
    One(StorageClass),
    Several,
}

impl Classes {
    fn with(self, room: &Room) -> Self {
        let has_room = |class: &StorageClass| room.blocks(Some(*class)) > 0;
        CLASSES.into_iter().filter(has_room).fold(self, |seen, it| {
            if seen == Self::None || seen == Self::One(it) {
                Self::One(it)
            } else {
                Self::Several
            }
        })
    }
}

/// The location and the owner of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location<'a> {
    /// Its rack.
    pub rack: &'a str,
    /// The environment of its primary tenant.
    pub environment: &'a str,
    /// The machine function of its primary tenant.
    pub machine_function: &'a str,
    /// Its address, by which the server of a writer is found.
    pub host: IpAddr,
}

/// A rack, as numbered by the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RackId(u32);

/// A primary tenant, as numbered by the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(u32);

/// An environment, as numbered by the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EnvironmentId(u32);

/// A machine function, as numbered by the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FunctionId(u32);

impl RackId {
    /// Returns its number, which is unique among racks.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

impl EnvironmentId {
    /// Returns its number, which is unique among environments.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

impl FunctionId {
    /// Returns its number, which is unique among machine functions.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

impl TenantId {
    /// Its index in [`View::tenants`].
    #[must_use]
    pub fn number(self) -> usize {
        self.0 as usize
    }
}

/// One server, aligned to one cache line, since servers are accessed all over memory.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct ServerView {
    /// Its number.
    pub node: NodeId,
    /// Its rack.
    pub rack: RackId,
    /// Its primary tenant.
    pub tenant: TenantId,
    /// The environment of its tenant.
    pub environment: EnvironmentId,
    /// The machine function of its tenant.
    pub function: FunctionId,
    /// Its address.
    pub host: IpAddr,
    /// Total capacity of its healthy volumes, used or free, in blocks.
    pub capacity_blocks: u32,
    /// How many blocks fit on it.
    pub room: Room,
    /// The lanes that it is open to.
    pub lanes: Lanes,
}

/// Where to search for a server.
#[derive(Clone, Copy, Debug)]
pub enum Area<'a> {
    /// In the whole cluster.
    Anywhere,
    /// In one rack.
    Inside(RackId),
    /// In every rack but these.
    Outside(&'a [RackId]),
}

/// All servers and tenants, with indexes of the servers that can take a replica now.
#[derive(Debug, Default)]
pub struct View {
    /// The index of each server by its number, or [`NO_SLOT`]. Numbers are assigned consecutively, and a lookup in a
    /// list is faster than in a map.
    slots: Vec<u32>,
    servers: Vec<ServerView>,
    /// The number of each server: for most that are drawn, nothing else matters.
    nodes: Vec<NodeId>,
    /// The position of each server in its place.
    positions: Vec<u32>,
    racks: FxHashMap<Box<str>, RackId>,
    environments: FxHashMap<Box<str>, EnvironmentId>,
    functions: FxHashMap<Box<str>, FunctionId>,
    tenants: Vec<TenantView>,
    tenant_ids: FxHashMap<TenantKey, TenantId>,
    populated_tenants: u32,
    /// Tenants that are reimaged together, the lower number first.
    together: FxHashSet<(TenantId, TenantId)>,
    /// Reimages per server and month with which the grid was built.
    mean_reimages: f64,
    /// Tenants from the best to the worst, as ranked by `greedy`.
    best_first: Vec<TenantId>,
    /// The servers of each place. One that moved also stays in its former place, with weight 0, until the grid is
    /// rebuilt.
    places: [Vec<u32>; PLACES],
    hosts: FxHashMap<IpAddr, SmallVec<[u32; 2]>>,
    classes: Classes,
    /// One per lane and class (the last one is for any class): servers open to the lane with room. As long as there
    /// is only one class, the indexes of single classes are empty.
    indexes: [Index; Lane::ALL.len() * (CLASSES.len() + 1)],
}

fn index_number(lane: Lane, class: Option<StorageClass>) -> usize {
    lane as usize * (CLASSES.len() + 1) + class.map_or(CLASSES.len(), class_number)
}

fn number_of<Id: Copy>(map: &mut FxHashMap<Box<str>, Id>, name: &str, id: fn(u32) -> Id) -> Id {
    if let Some(&known) = map.get(name) {
        return known;
    }
    let next = id(map.len() as u32);
    map.insert(name.into(), next);
    next
}

impl View {
    /// Creates a view of an empty cluster.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a server without room and open to nothing, or notes that a known one has moved. A new tenant is outside
    /// the grid until [`View::rebuild_grid`]. Takes 4 bytes for each number below the highest one.
    pub fn insert(&mut self, node: NodeId, location: &Location<'_>) {
        let tenant = self.tenant_for(location.environment, location.machine_function);
        let server = ServerView {
            node,
            rack: number_of(&mut self.racks, location.rack, RackId),
            tenant,
            environment: self.tenants[tenant.number()].environment,
            function: self.tenants[tenant.number()].function,
            host: location.host,
            capacity_blocks: 0,
            room: Room::default(),
            lanes: Lanes::NONE,
        };
        if let Some(slot) = self.slot(node) {
            let before = self.servers[slot as usize];
            self.update(slot, Room::default(), Lanes::NONE);
            if let Some(slots) = self.hosts.get_mut(&before.host) {
                slots.retain(|other| *other != slot);
            }
            self.servers[slot as usize] = ServerView {
                capacity_blocks: before.capacity_blocks,
                ..server
            };
            self.hosts.entry(location.host).or_default().push(slot);
            if before.tenant != tenant {
                let left = &mut self.tenants[before.tenant.number()];
                assert!(left.servers > 0, "{node} leaves {:?}: no server", left.key);
                left.servers -= 1;
                self.populate(tenant);
                self.positions[slot as usize] = self.join(slot);
            }
            self.update(slot, before.room, before.lanes);
        } else {
            let slot = self.servers.len() as u32;
            let number = node.0 as usize;
            if self.slots.len() <= number {
                self.slots.resize(number + 1, NO_SLOT);
            }
            self.slots[number] = slot;
            self.servers.push(server);
            self.nodes.push(node);
            self.populate(tenant);
            let position = self.join(slot);
            self.positions.push(position);
            self.hosts.entry(location.host).or_default().push(slot);
        }
    }

    fn populate(&mut self, tenant: TenantId) {
        let servers = &mut self.tenants[tenant.number()].servers;
        self.populated_tenants += u32::from(*servers == 0);
        *servers += 1;
    }

    /// Gives a server a position in the place of its tenant.
    fn join(&mut self, slot: u32) -> u32 {
        let place = self.tenants[self.servers[slot as usize].tenant.number()].place;
        let members = &mut self.places[usize::from(place)];
        // They grow together, so checking one is enough.
        assert_eq!(
            self.indexes[0].trees[usize::from(place)].len(),
            members.len(),
            "weights and servers of place {place}"
        );
        members.push(slot);
        for index in &mut self.indexes {
            index.push(place);
        }
        members.len() as u32 - 1
    }

    /// Notes how much fits on a server. Unknown servers are ignored.
    pub fn set_room(&mut self, node: NodeId, room: Room) {
        if let Some(slot) = self.slot(node) {
            self.update(slot, room, self.servers[slot as usize].lanes);
        }
    }

    /// Notes which lanes a server is open to. Unknown servers are ignored.
    pub fn set_lanes(&mut self, node: NodeId, lanes: Lanes) {
        if let Some(slot) = self.slot(node) {
            self.update(slot, self.servers[slot as usize].room, lanes);
        }
    }

    /// Notes the total capacity of a server's healthy volumes, used or free, in blocks. It matters when the grid is
    /// rebuilt. Unknown servers are ignored.
    pub fn set_capacity(&mut self, node: NodeId, blocks: u32) {
        if let Some(slot) = self.slot(node) {
            self.servers[slot as usize].capacity_blocks = blocks;
        }
    }

    /// Combines [`View::set_room`] and [`View::set_lanes`] for a server given by its index in [`View::servers`].
    pub fn set_room_and_lanes_at(&mut self, index: usize, room: Room, lanes: Lanes) {
        self.update(index as u32, room, lanes);
    }

    fn update(&mut self, slot: u32, room: Room, lanes: Lanes) {
        let server = &mut self.servers[slot as usize];
        // Most changes of a server's room change nothing in the indexes.
        let same = server.lanes == lanes && server.room.is_about(&room);
        server.room = room;
        server.lanes = lanes;
        if same {
            return;
        }
        let classes = self.classes.with(&room);
        if classes != std::mem::replace(&mut self.classes, classes) {
            for slot in 0..self.servers.len() {
                self.refresh(slot as u32);
            }
        } else {
            self.refresh(slot);
        }
    }

    /// Updates the indexes for a server.
    fn refresh(&mut self, slot: u32) {
        let server = &self.servers[slot as usize];
        let tenant = &self.tenants[server.tenant.number()];
        let entry = Entry {
            slot,
            rack: server.rack.0,
            tenant: server.tenant.0,
            place: tenant.place,
            position: self.positions[slot as usize],
            factor: tenant.factor,
            calm: tenant.calm > 0,
        };
        for lane in Lane::ALL {
            let open = server.lanes.contains(lane);
            let mut set = |class| {
                let blocks = if open { server.room.blocks(class) } else { 0 };
                self.indexes[index_number(lane, class)].set(&entry, blocks);
            };
            set(None);
            if self.classes == Classes::Several {
                CLASSES.into_iter().map(Some).for_each(set);
            }
        }
    }

    fn index(&self, lane: Lane, class: Option<StorageClass>) -> &Index {
        let class = class.filter(|&it| self.classes != Classes::One(it));
        &self.indexes[index_number(lane, class)]
    }

    fn slot(&self, node: NodeId) -> Option<u32> {
        let slot = self.slots.get(node.0 as usize).copied();
        slot.filter(|&slot| slot != NO_SLOT)
    }

    /// Returns the index of a server in [`View::servers`].
    #[must_use]
    pub fn index_of(&self, node: NodeId) -> Option<usize> {
        Some(self.slot(node)? as usize)
    }

    /// Returns a server.
    #[must_use]
    pub fn server(&self, node: NodeId) -> Option<&ServerView> {
        self.server_at(self.index_of(node)?)
    }

    /// Returns a server that was drawn from this view.
    pub(crate) fn drawn(&self, node: NodeId) -> &ServerView {
        let Some(server) = self.server(node) else {
            panic!("{node} was drawn from a view that does not have it");
        };
        server
    }

    /// Returns a server by its index in [`View::servers`].
    #[must_use]
    pub fn server_at(&self, index: usize) -> Option<&ServerView> {
        self.servers.get(index)
    }

    /// Returns all servers, in the order in which they were inserted.
    #[must_use]
    pub fn servers(&self) -> &[ServerView] {
        &self.servers
    }

    /// Returns the rack of a host, if it has servers.
    #[must_use]
    pub fn rack_of_host(&self, host: IpAddr) -> Option<RackId> {
        let slot = *self.hosts.get(&host)?.first()?;
        Some(self.servers[slot as usize].rack)
    }

    /// Whether a server is open to a lane and has room for a block on a volume of the class.
    #[must_use]
    pub fn is_open(&self, server: &ServerView, lane: Lane, class: Option<StorageClass>) -> bool {
        server.lanes.contains(lane) && server.room.blocks(class) > 0
    }

    /// Returns how many servers are open to a lane and have room for a block on a volume of the class.
    #[must_use]
    pub fn open_servers(&self, lane: Lane, class: Option<StorageClass>) -> u32 {
        self.index(lane, class).racks.len()
    }

    /// Draws a server that is open to the lane, has room for a block on a volume of the class, and is accepted by
    /// `accept`; each with the same probability.
    ///
    /// Costs O(log racks) unless `accept` refuses most servers of the area.
    #[must_use]
    pub fn draw(
        &self,
        lane: Lane,
        class: Option<StorageClass>,
        area: Area<'_>,
        rng: &mut dyn Rng,
        accept: impl Fn(NodeId) -> bool,
    ) -> Option<NodeId> {
        let index = &self.index(lane, class).racks;
        let accept = |slot: &u32| accept(self.nodes[*slot as usize]);
        let slot = match area {
            Area::Inside(rack) => draw_from(index.in_group(rack.0), rng, accept),
            Area::Anywhere => draw_outside(index, &[], rng, accept),
            Area::Outside(racks) => {
                let mut numbers: SmallVec<[u32; 8]> = racks.iter().map(|rack| rack.0).collect();
                numbers.sort_unstable();
                numbers.dedup();
                draw_outside(index, &numbers, rng, accept)
            }
        }?;
        Some(self.nodes[slot as usize])
    }

    /// Does the same as [`View::draw`], among the servers with the given address.
    #[must_use]
    pub fn draw_on_host(
        &self,
        lane: Lane,
        class: Option<StorageClass>,
        host: IpAddr,
        rng: &mut dyn Rng,
        accept: impl Fn(NodeId) -> bool,
    ) -> Option<NodeId> {
        let index = &self.index(lane, class).racks;
        let slots = self.hosts.get(&host)?;
        let slot = draw_from(slots, rng, |slot| {
            index.contains(*slot) && accept(self.nodes[*slot as usize])
        })?;
        Some(self.nodes[slot as usize])
    }
}

fn draw_outside(
    index: &Groups,
    outside: &[u32],
    rng: &mut dyn Rng,
    accept: impl Fn(&u32) -> bool,
) -> Option<u32> {
    for _ in 0..DRAWS_MAX {
        let slot = index.draw(rng, outside)?;
        if accept(&slot) {
            return Some(slot);
        }
    }
    let accepted: SmallVec<[u32; 32]> = index.iter(outside).filter(|slot| accept(slot)).collect();
    pick(&accepted, rng)
}

pub(crate) fn draw_from(
    slots: &[u32],
    rng: &mut dyn Rng,
    accept: impl Fn(&u32) -> bool,
) -> Option<u32> {
    for _ in 0..DRAWS_MAX {
        let slot = pick(slots, rng)?;
        if accept(&slot) {
            return Some(slot);
        }
    }
    let accepted: SmallVec<[u32; 32]> = slots.iter().filter(|slot| accept(slot)).copied().collect();
    pick(&accepted, rng)
}

fn pick(slots: &[u32], rng: &mut dyn Rng) -> Option<u32> {
    if slots.is_empty() {
        return None;
    }
    Some(slots[rng.random_range(0..slots.len())])
}
