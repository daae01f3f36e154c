//! What policies know of the cluster.

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

/// No server has that number.
const NO_SLOT: u32 = u32::MAX;
/// Draws that are refused before all candidates are looked at one by one. As long as half of them
/// are acceptable, that is once in 65,536 times.
const DRAWS_MAX: u32 = 16;

/// What a placement is for. Each lane has servers of its own that are open to it.
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

/// Whole blocks of the largest size that fit below the quota of a server's healthy volumes, by
/// class of volume.
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
    /// Room for more blocks on volumes of a class.
    pub fn add(&mut self, class: StorageClass, blocks: u32) {
        let sum = &mut self.blocks[class_number(class)];
        // A datanode may claim any quota.
        *sum = sum.saturating_add(blocks);
    }

    /// What is left when `blocks` more are on their way to volumes that are not known yet: none of
    /// the classes may count on the room that they could take.
    #[must_use]
    pub fn less(mut self, blocks: u32) -> Self {
        for of_class in &mut self.blocks {
            *of_class = of_class.saturating_sub(blocks);
        }
        self
    }

    /// Whether it is the same to the indexes: blocks on volumes of each class, and of any.
    fn is_about(&self, other: &Self) -> bool {
        let mut classes = self.blocks.iter().zip(&other.blocks);
        let about = |a: u32, b: u32| a == b || coarse(a) == coarse(b);
        classes.all(|(&a, &b)| about(a, b)) && about(self.blocks(None), other.blocks(None))
    }

    /// Blocks that fit on volumes of a class, or of any.
    #[must_use]
    pub fn blocks(&self, class: Option<StorageClass>) -> u32 {
        match class {
            Some(class) => self.blocks[class_number(class)],
            // As in `add`: claims have no bound.
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

/// The place and the owner of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location<'a> {
    /// Its rack.
    pub rack: &'a str,
    /// The environment of its primary tenant.
    pub environment: &'a str,
    /// The machine function of its primary tenant.
    pub machine_function: &'a str,
    /// Its address, to find the server of a writer.
    pub host: IpAddr,
}

/// A rack, as the view numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RackId(u32);

/// A primary tenant, as the view numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(u32);

/// An environment, as the view numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EnvironmentId(u32);

/// A machine function, as the view numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FunctionId(u32);

impl RackId {
    /// Its number: each rack has another one.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

impl EnvironmentId {
    /// Its number: each environment has another one.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

impl FunctionId {
    /// Its number: each machine function has another one.
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

/// One server, in one cache line: they are looked at all over the memory.
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
    /// What its healthy volumes can hold in all, used or free, in blocks.
    pub capacity_blocks: u32,
    /// What fits on it.
    pub room: Room,
    /// What it is open to.
    pub lanes: Lanes,
}

/// Where to look for a server.
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
    /// The index of each server by its number, or [`NO_SLOT`]. Numbers are handed out one after the
    /// other, and a list is looked up faster than a map.
    slots: Vec<u32>,
    servers: Vec<ServerView>,
    /// The number of each server: of most that are drawn, nothing else matters.
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
    /// Reimages per server and month, as the grid was built with.
    mean_reimages: f64,
    /// Tenants from the best to the worst, as `greedy` sees them.
    best_first: Vec<TenantId>,
    /// The servers of each place. One that moved stays in its former place, too, with weight 0,
    /// until the grid is rebuilt.
    places: [Vec<u32>; PLACES],
    hosts: FxHashMap<IpAddr, SmallVec<[u32; 2]>>,
    classes: Classes,
    /// One per lane and class (the last one: any class): servers open to the lane with room. As
    /// long as there is one class, the indexes of single classes are empty.
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
    /// A view of an empty cluster.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a server without room and open to nothing, or takes note that a known one moved. A
    /// tenant that is new is outside the grid until [`View::rebuild_grid`]. Takes 4 bytes for each
    /// number below the highest one.
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
        // They grow together: one is enough.
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

    /// Notes what fits on a server. Unknown servers are ignored.
    pub fn set_room(&mut self, node: NodeId, room: Room) {
        if let Some(slot) = self.slot(node) {
            self.update(slot, room, self.servers[slot as usize].lanes);
        }
    }

    /// Notes what a server is open to. Unknown servers are ignored.
    pub fn set_lanes(&mut self, node: NodeId, lanes: Lanes) {
        if let Some(slot) = self.slot(node) {
            self.update(slot, self.servers[slot as usize].room, lanes);
        }
    }

    /// Notes what a server's healthy volumes can hold in all, used or free, in blocks. Matters
    /// when the grid is rebuilt. Unknown servers are ignored.
    pub fn set_capacity(&mut self, node: NodeId, blocks: u32) {
        if let Some(slot) = self.slot(node) {
            self.servers[slot as usize].capacity_blocks = blocks;
        }
    }

    /// [`View::set_room`] and [`View::set_lanes`] at once, of a server by its index in
    /// [`View::servers`].
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

    /// Brings the indexes in line with a server.
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

    /// The index of a server in [`View::servers`].
    #[must_use]
    pub fn index_of(&self, node: NodeId) -> Option<usize> {
        Some(self.slot(node)? as usize)
    }

    /// One server.
    #[must_use]
    pub fn server(&self, node: NodeId) -> Option<&ServerView> {
        self.server_at(self.index_of(node)?)
    }

    /// A server that was drawn from this view.
    pub(crate) fn drawn(&self, node: NodeId) -> &ServerView {
        let Some(server) = self.server(node) else {
            panic!("{node} was drawn from a view that does not have it");
        };
        server
    }

    /// One server by its index in [`View::servers`].
    #[must_use]
    pub fn server_at(&self, index: usize) -> Option<&ServerView> {
        self.servers.get(index)
    }

    /// All servers, in the order in which they were inserted.
    #[must_use]
    pub fn servers(&self) -> &[ServerView] {
        &self.servers
    }

    /// The rack of a host that servers are on.
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

    /// How many servers are open to a lane and have room for a block on a volume of the class.
    #[must_use]
    pub fn open_servers(&self, lane: Lane, class: Option<StorageClass>) -> u32 {
        self.index(lane, class).racks.len()
    }

    /// Draws a server that is open to the lane, has room for a block on a volume of the class, and
    /// that `accept` accepts; each with the same probability.
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

    /// As [`View::draw`], among the servers with the given address.
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
