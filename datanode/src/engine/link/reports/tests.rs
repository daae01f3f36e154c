use std::collections::BTreeMap;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::node::ReplicaChange;
use proptest::prelude::*;

use super::*;

const STORAGES: [StorageId; 2] = [StorageId(1), StorageId(2)];
const BLOCKS: u64 = 8;
const PART_MAX: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replica {
    /// Grows with each change.
    Readable(ReplicaReport),
    Corrupt,
}

/// The volumes of a datanode.
#[derive(Default)]
struct Volumes {
    replicas: BTreeMap<(StorageId, BlockId), Replica>,
}

impl Volumes {
    /// The resulting change, for all namenodes, if there is one.
    fn change(&mut self, storage: StorageId, block: BlockId, what: u8) -> Option<ReplicaChange> {
        let known = self.replicas.get(&(storage, block)).copied();
        let change = match (known, what % 4) {
            (None | Some(Replica::Readable(_)), 0..=1) => {
                let length_bytes = match known {
                    Some(Replica::Readable(report)) => report.length_bytes + 4096,
                    _ => 0,
                };
                let report = ReplicaReport {
                    block,
                    length_bytes,
                    sealed: what > 128,
                };
                let readable = Replica::Readable(report);
                self.replicas.insert((storage, block), readable);
                ReplicaChange::Have(report)
            }
            (Some(Replica::Readable(_)), 2) => {
                self.replicas.insert((storage, block), Replica::Corrupt);
                ReplicaChange::Corrupt(block)
            }
            (Some(_), _) => {
                self.replicas.remove(&(storage, block));
                ReplicaChange::Deleted(block)
            }
            (None, _) => return None,
        };
        Some(change)
    }

    fn listed(&self, storage: StorageId) -> Vec<ReplicaReport> {
        let of_volume = self.replicas.iter().filter(|((at, _), _)| *at == storage);
        of_volume
            .filter_map(|(_, replica)| match replica {
                Replica::Readable(report) => Some(*report),
                Replica::Corrupt => None,
            })
            .collect()
    }

    fn corrupt(&self, storage: StorageId) -> Vec<BlockId> {
        let of_volume = self.replicas.iter().filter(|((at, _), _)| *at == storage);
        let corrupt = of_volume.filter(|(_, it)| **it == Replica::Corrupt);
        corrupt.map(|((_, block), _)| *block).collect()
    }
}

/// The namenode's view of the replicas.
#[derive(Default)]
struct Namenode {
    replicas: BTreeMap<(StorageId, BlockId), Replica>,
    /// Parts of a full report.
    parts: Vec<ReplicaReport>,
}

impl Namenode {
    fn take_part(&mut self, report: BlockReport) {
        if report.part == 0 {
            self.parts.clear();
        }
        assert!(report.replicas.len() <= PART_MAX);
        self.parts.extend(report.replicas);
        if report.last {
            // As the namenode does it: a full report contains no corrupt replicas.
            self.replicas
                .retain(|(at, _), it| *at != report.storage || *it == Replica::Corrupt);
            for replica in self.parts.drain(..) {
                let readable = Replica::Readable(replica);
                self.replicas
                    .insert((report.storage, replica.block), readable);
            }
        }
    }

    fn take_changes(&mut self, changes: &[Change]) {
        assert!(changes.len() <= PART_MAX);
        for &(storage, change) in changes {
            match change {
                ReplicaChange::Have(report) => {
                    let readable = Replica::Readable(report);
                    self.replicas.insert((storage, report.block), readable);
                }
                ReplicaChange::Deleted(block) => {
                    self.replicas.remove(&(storage, block));
                }
                ReplicaChange::Corrupt(block) => {
                    self.replicas.insert((storage, block), Replica::Corrupt);
                }
                ReplicaChange::RepairFailed(_) => {}
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Answered,
    Lost,
    /// The namenode has received it, and the datanode does not know.
    AnswerLost,
}

/// The link to a namenode, and the namenode.
struct Link {
    namenode: Namenode,
    changes: Changes,
    reports: Reports,
    asked: VecDeque<StorageId>,
    /// Parts that are still to be sent of a full report.
    unsent: VecDeque<BlockReport>,
    is_known: bool,
    /// Full reports since the last registration.
    full_reports: usize,
}

impl Link {
    fn new() -> Self {
        Self {
            namenode: Namenode::default(),
            changes: Changes::with_limits(4 * PART_MAX, PART_MAX),
            reports: Reports::default(),
            asked: VecDeque::new(),
            unsent: VecDeque::new(),
            is_known: false,
            full_reports: 0,
        }
    }

    fn reconnect(&mut self) {
        self.reports = Reports::default();
        self.asked.clear();
        self.unsent.clear();
        self.is_known = false;
        self.full_reports = 0;
        // A namenode that was restarted knows nothing; otherwise it knows what was reported to it.
        self.namenode.parts.clear();
    }

    /// Checks the namenode's view. It may still contain corrupt replicas that are gone, as full reports do not cover
    /// them.
    fn check_known(&self, volumes: &Volumes) -> Result<(), TestCaseError> {
        let here = &volumes.replicas;
        let mut known = self.namenode.replicas.clone();
        known.retain(|at, replica| here.contains_key(at) || *replica != Replica::Corrupt);
        prop_assert_eq!(&known, here);
        Ok(())
    }

    /// Takes one step of sending reports; returns `false` when there is nothing to do.
    fn step(&mut self, volumes: &Volumes, fate: Fate) -> bool {
        if let Some(part) = self.unsent.pop_front() {
            if fate != Fate::Lost {
                self.namenode.take_part(part);
            }
            if fate != Fate::Answered {
                self.reconnect();
            }
            return true;
        }
        let asked = &mut self.asked;
        match self.reports.next(&mut self.changes, || asked.pop_front()) {
            Step::ListVolumes => self.reports.volumes(STORAGES.to_vec()),
            Step::ReportVolume(storage) => {
                let replicas = volumes.listed(storage);
                self.full_reports += 1;
                self.unsent = parts_of(storage, &replicas, PART_MAX).collect();
            }
            Step::ListCorrupt(storage) => {
                for block in volumes.corrupt(storage) {
                    let change = ReplicaChange::Corrupt(block);
                    self.changes.push(storage, change);
                }
            }
            Step::Reported => self.is_known = true,
            Step::Gather => {}
            Step::ReportChanges(changes) => {
                if fate != Fate::Lost {
                    self.namenode.take_changes(&changes);
                }
                if fate != Fate::Answered {
                    self.changes.put_back(changes);
                    self.reconnect();
                }
            }
            Step::Wait => return false,
        }
        true
    }
}

/// A datanode with two namenodes.
struct World {
    volumes: Volumes,
    links: [Link; 2],
}

impl World {
    fn new() -> Self {
        Self {
            volumes: Volumes::default(),
            links: [Link::new(), Link::new()],
        }
    }

    /// As the store does it: changes the entry and queues the change in one step.
    fn change(&mut self, storage: StorageId, block: BlockId, what: u8) {
        if let Some(change) = self.volumes.change(storage, block, what) {
            for link in &mut self.links {
                link.changes.push(storage, change);
            }
        }
    }

    /// Takes one step of sending reports on a link; returns `false` when there is nothing to do.
    fn step(&mut self, link: usize, fate: Fate) -> bool {
        self.links[link].step(&self.volumes, fate)
    }
}

#[derive(Clone, Debug)]
enum Event {
    Change(usize, u64, u8),
    Asked(usize, usize),
    Step(usize, Fate),
    NamenodeRestarts(usize),
    /// The namenode never learned that a replica is gone, gives up waiting, and asks for a report.
    Forgotten(usize, u64),
}

fn event() -> impl Strategy<Value = Event> {
    let link = 0..2usize;
    let step = |fate| (0..2usize).prop_map(move |link| Event::Step(link, fate));
    prop_oneof![
        6 => (0..STORAGES.len(), 0..BLOCKS, any::<u8>())
            .prop_map(|(storage, block, what)| Event::Change(storage, block, what)),
        1 => (link.clone(), 0..STORAGES.len())
            .prop_map(|(link, storage)| Event::Asked(link, storage)),
        20 => step(Fate::Answered),
        1 => step(Fate::Lost),
        1 => step(Fate::AnswerLost),
        1 => link.clone().prop_map(Event::NamenodeRestarts),
        1 => (link, 0..BLOCKS).prop_map(|(link, block)| Event::Forgotten(link, block)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whatever changes while reports are in flight, and whichever reports or answers are lost on whichever link: when
    /// there is nothing more to report, each namenode knows what is here, and considers nothing readable that is not.
    #[test]
    fn each_namenode_learns_what_is_here(events in prop::collection::vec(event(), 1..200)) {
        let mut world = World::new();
        for event in events {
            match event {
                Event::Change(storage, block, what) => {
                    // A block has one replica on a datanode.
                    let storage = STORAGES[(storage + block as usize) % STORAGES.len()];
                    world.change(storage, BlockId(block), what);
                }
                Event::Asked(link, storage) => world.links[link].asked.push_back(STORAGES[storage]),
                Event::Step(link, fate) => {
                    if !world.step(link, fate) {
                        world.links[link].check_known(&world.volumes)?;
                    }
                }
                Event::NamenodeRestarts(link) => {
                    world.links[link].namenode = Namenode::default();
                    world.links[link].reconnect();
                }
                Event::Forgotten(link, block) => {
                    let Link { namenode, asked, .. } = &mut world.links[link];
                    for storage in STORAGES {
                        namenode.replicas.remove(&(storage, BlockId(block)));
                        asked.push_back(storage);
                    }
                }
            }
        }
        let mut steps = 0;
        while world.step(0, Fate::Answered) | world.step(1, Fate::Answered) {
            steps += 1;
            prop_assert!(steps < 500, "reports do not come to an end");
        }
        for link in &world.links {
            prop_assert!(link.is_known);
            link.check_known(&world.volumes)?;
        }
        // From here on, a loss on one link must not trigger full reports on the other.
        let full_reports = world.links[0].full_reports;
        world.links[1].reconnect();
        while world.step(0, Fate::Answered) | world.step(1, Fate::Answered) {}
        prop_assert_eq!(world.links[0].full_reports, full_reports);
        world.links[1].check_known(&world.volumes)?;
    }
}

#[test]
fn everything_comes_first_and_what_is_asked_for_before_changes() {
    let mut changes = Changes::default();
    let mut reports = Reports::default();
    let deleted = (STORAGES[0], ReplicaChange::Deleted(BlockId(1)));
    changes.push(deleted.0, deleted.1);
    assert_eq!(reports.next(&mut changes, || None), Step::ListVolumes);
    reports.volumes(vec![STORAGES[0]]);
    assert_eq!(
        reports.next(&mut changes, || panic!("it is not its turn")),
        Step::ReportVolume(STORAGES[0])
    );
    changes.push(deleted.0, deleted.1);
    assert_eq!(
        reports.next(&mut changes, || panic!("it is not its turn")),
        Step::ListCorrupt(STORAGES[0])
    );
    assert_eq!(reports.next(&mut changes, || None), Step::Reported);
    assert_eq!(
        reports.next(&mut changes, || Some(STORAGES[1])),
        Step::ReportVolume(STORAGES[1])
    );
    assert_eq!(
        reports.next(&mut changes, || panic!("it is not its turn")),
        Step::ListCorrupt(STORAGES[1])
    );
    assert_eq!(reports.next(&mut changes, || None), Step::Gather);
    // Changes before the full report are part of it.
    assert_eq!(
        reports.next(&mut changes, || None),
        Step::ReportChanges(vec![deleted])
    );
    assert_eq!(reports.next(&mut changes, || None), Step::Wait);
}

#[test]
fn a_volume_without_replicas_is_reported_too() {
    let parts: Vec<BlockReport> = parts(STORAGES[0], &[]).collect();
    assert_eq!(parts.len(), 1);
    assert!(parts[0].last && parts[0].replicas.is_empty());
}
