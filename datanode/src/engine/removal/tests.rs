use std::time::Duration;

use harvestfs_protocol::timeline::{Authority, Epoch};
use proptest::prelude::*;

use super::*;
use crate::engine::link::obedience::Obedience;
use crate::testing::some_time;

const RATE: u64 = 1_000_000;

const LINKS: [LinkId; 2] = [LinkId(0), LinkId(1)];

fn authority(number: u32, id: u64, record: u64, recovering: bool) -> Authority {
    Authority {
        position: Position {
            epoch: Epoch { number, id },
            record,
        },
        recovering,
    }
}

#[derive(Clone, Debug)]
enum Event {
    /// The datanode registers on a link with a namenode that claims this authority, if it obeys it.
    Register {
        link: usize,
        heard: Authority,
    },
    /// The namenode on a link, which has advanced by so many records, commands a deletion, if it is obeyed.
    Order {
        link: usize,
        records: u64,
    },
    /// The namenode on a link becomes leader, without a registration.
    Lead {
        link: usize,
        id: u64,
    },
    /// The obeyed position is written to a disk, or that fails.
    Write {
        fails: bool,
    },
    /// One of the orders is carried out as far as it may be.
    Delete {
        order: prop::sample::Index,
    },
    Crash,
}

fn event() -> impl Strategy<Value = Event> {
    let link = 0..LINKS.len();
    let heard = (1u32..6, 0u64..3, 0u64..50, prop::bool::weighted(0.3));
    let heard = heard
        .prop_map(|(number, id, record, recovering)| authority(number, id, record, recovering));
    prop_oneof![
        2 => (link.clone(), heard).prop_map(|(link, heard)| Event::Register { link, heard }),
        4 => (link.clone(), 0u64..3).prop_map(|(link, records)| Event::Order { link, records }),
        1 => (link, 0u64..3).prop_map(|(link, id)| Event::Lead { link, id }),
        3 => any::<bool>().prop_map(|fails| Event::Write { fails }),
        4 => any::<prop::sample::Index>().prop_map(|order| Event::Delete { order }),
        1 => Just(Event::Crash),
    ]
}

/// A command to delete.
struct Given {
    order: Order,
    link: usize,
    /// The number of registrations on its link.
    registered: u32,
    by: Position,
}

/// A datanode with links to two namenodes.
struct World {
    obedience: Obedience,
    removals: Removals,
    orders: Vec<Given>,
    /// By link: what is obeyed.
    namenodes: [Option<Authority>; 2],
    registrations: [u32; 2],
    deleted_for: Option<Position>,
}

impl World {
    fn new() -> Self {
        Self {
            obedience: Obedience::new(None, LINKS.len()),
            removals: Removals::new(RATE, LINKS.len()),
            orders: Vec::new(),
            namenodes: [None; 2],
            registrations: [0; 2],
            deleted_for: None,
        }
    }

    fn hear(&mut self, link: usize, heard: Authority) -> Result<(), TestCaseError> {
        let judgement = self.obedience.judge(LINKS[link], &heard);
        self.namenodes[link] = judgement.result.is_ok().then_some(heard);
        if let (Some(heard), Some(deleted_for)) = (self.namenodes[link], self.deleted_for) {
            let epoch = heard.position.epoch;
            prop_assert!(
                epoch == deleted_for.epoch || epoch.number > deleted_for.epoch.number,
                "{heard:?} is obeyed after a deletion for {deleted_for}"
            );
        }
        Ok(())
    }

    fn order(&mut self, link: usize, records: u64) -> Result<(), TestCaseError> {
        let Some(mut heard) = self.namenodes[link] else {
            return Ok(());
        };
        heard.position.record += records;
        self.hear(link, heard)?;
        if let Some(heard) = self.namenodes[link] {
            self.orders.push(Given {
                order: self.removals.ordered(LINKS[link], 10, heard.position),
                link,
                registered: self.registrations[link],
                by: heard.position,
            });
        }
        Ok(())
    }

    fn delete(&mut self, given: Given) -> Result<(), TestCaseError> {
        let Given {
            order,
            link,
            registered,
            by,
        } = given;
        let verdict = self.removals.may_delete(&order, &self.obedience);
        let is_obeyed = self.obedience.obeyed().map(|it| it.epoch) == Some(by.epoch);
        let still_holds = registered == self.registrations[link] && is_obeyed;
        if verdict.is_ok() {
            prop_assert!(still_holds, "a command of {by} is carried out");
            self.deleted_for = Some(later(self.deleted_for, by));
        } else if still_holds {
            prop_assert!(
                self.obedience.to_write().is_some(),
                "without a reason: {verdict:?}"
            );
        }
        self.removals.end(order);
        Ok(())
    }

    fn crash(&mut self) {
        self.obedience = Obedience::new(self.obedience.written(), LINKS.len());
        self.removals = Removals::new(RATE, LINKS.len());
        self.namenodes = [None; 2];
        self.orders.clear();
    }

    fn step(&mut self, event: Event) -> Result<(), TestCaseError> {
        match event {
            Event::Register { link, heard } => {
                self.removals.registering(LINKS[link]);
                self.registrations[link] += 1;
                self.hear(link, heard)?;
            }
            Event::Order { link, records } => self.order(link, records)?,
            Event::Lead { link, id } => {
                let number = self.obedience.obeyed().map_or(1, |it| it.epoch.number + 1);
                self.hear(link, authority(number, id, 0, false))?;
                prop_assert!(self.namenodes[link].is_some());
            }
            Event::Write { fails } => {
                if let Some(position) = self.obedience.to_write().filter(|_| !fails) {
                    self.obedience.wrote(position);
                    prop_assert_eq!(self.obedience.to_write(), None);
                }
            }
            Event::Delete { order } if !self.orders.is_empty() => {
                let given = self.orders.swap_remove(order.index(self.orders.len()));
                self.delete(given)?;
            }
            Event::Delete { .. } => {}
            Event::Crash => self.crash(),
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Once a replica is deleted, no namenode is obeyed any more that started before the one that commanded the
    /// deletion, however often the datanode crashes. A deletion commanded before a registration is not carried out
    /// after it, nor one commanded before another namenode became leader; but a registration with another namenode,
    /// such as a standby, cancels nothing.
    #[test]
    fn nothing_is_deleted_for_a_namenode_that_could_be_forgotten(
        events in prop::collection::vec(event(), 1..80),
    ) {
        let mut world = World::new();
        for event in events {
            world.step(event)?;
        }
        let World { mut removals, orders, .. } = world;
        for given in orders {
            removals.end(given.order);
        }
        prop_assert_eq!(removals.removable_bytes(u64::MAX, some_time()), u64::MAX);
    }

    /// The bytes left are those ordered, minus those deleted or ended, whatever space the replicas turn out to take.
    #[test]
    fn what_is_left_is_counted(
        steps in prop::collection::vec((0u8..4, 0u64..5_000, any::<prop::sample::Index>()), 1..100),
    ) {
        let mut removals = Removals::new(0, 1);
        let mut model: Vec<(Order, u64)> = Vec::new();
        let now = some_time();
        for (what, bytes, index) in steps {
            match what {
                0 | 1 => model.push((removals.ordered(LINKS[0], bytes, Position::default()), bytes)),
                2 if !model.is_empty() => {
                    let at = index.index(model.len());
                    let (order, left_bytes) = &mut model[at];
                    removals.deleted(order, bytes, false, now);
                    *left_bytes = left_bytes.saturating_sub(bytes);
                }
                3 if !model.is_empty() => {
                    let (order, _) = model.swap_remove(index.index(model.len()));
                    removals.end(order);
                }
                _ => {}
            }
            let left_bytes: u64 = model.iter().map(|(_, left_bytes)| left_bytes).sum();
            prop_assert_eq!(removals.removable_bytes(0, now), u64::MAX - left_bytes);
        }
    }
}

/// The later position: that of the later epoch, or the one further in the same epoch.
fn later(one: Option<Position>, other: Position) -> Position {
    let place = |it: &Position| (it.epoch.number, it.record);
    one.map_or(other, |one| std::cmp::max_by_key(one, other, place))
}

/// A namenode that has far too much deleted, and always commands as much as a heartbeat allows.
fn deleted_in(time: Duration, pressure_bytes: u64) -> u64 {
    const REPLICA_BYTES: u64 = 50_000;
    let mut removals = Removals::new(RATE, 1);
    let start = some_time();
    let (mut now, mut heartbeat) = (start, start);
    let mut orders = std::collections::VecDeque::new();
    let mut deleted_bytes = 0;
    while now < start + time {
        if now >= heartbeat {
            let mut removable_bytes = removals.removable_bytes(pressure_bytes, now);
            while removable_bytes > 0 {
                orders.push_back(removals.ordered(LINKS[0], REPLICA_BYTES, Position::default()));
                removable_bytes = removable_bytes.saturating_sub(REPLICA_BYTES);
            }
            heartbeat = now + HEARTBEAT_INTERVAL;
        }
        now = match orders.pop_front() {
            Some(mut order) => {
                deleted_bytes += REPLICA_BYTES;
                let is_pressed = pressure_bytes > 0;
                let paid_at = removals.deleted(&mut order, REPLICA_BYTES, is_pressed, now);
                removals.end(order);
                paid_at.max(now)
            }
            None => heartbeat,
        };
    }
    deleted_bytes
}

#[test]
fn the_rate_is_used_and_kept() {
    let minute = Duration::from_secs(60);
    let deleted_bytes = deleted_in(minute, 0);
    assert!(deleted_bytes <= 61 * RATE, "{deleted_bytes}");
    assert!(deleted_bytes >= 55 * RATE, "{deleted_bytes}");
    let pressed_bytes = deleted_in(minute, 30 * RATE);
    assert!(pressed_bytes >= 19 * 30 * RATE, "{pressed_bytes}");
}

#[test]
fn a_replica_is_cut_until_the_rest_is_small_or_space_short() {
    let mut steps = Steps::default();
    for bytes in [32, 32] {
        assert_eq!(steps.next(false), Step::Cut);
        steps.cut(bytes);
    }
    assert_eq!(steps.next(true), Step::Finish);
    assert_eq!(steps.next(false), Step::Cut);
    steps.cut(0);
    assert_eq!(steps.next(false), Step::Finish);
}
