use std::time::Duration;

use harvestfs_protocol::timeline::{Authority, Epoch};
use proptest::prelude::*;

use super::*;
use crate::engine::link::obedience::Obedience;
use crate::testing::some_time;

const RATE: u64 = 1_000_000;

fn authority(number: u32, id: u64, record: u64) -> Authority {
    Authority {
        position: Position {
            epoch: Epoch { number, id },
            record,
        },
        recovering: false,
    }
}

#[derive(Clone, Debug)]
enum Event {
    /// The datanode registers with a namenode that says so of itself, if it obeys it.
    Register {
        number: u32,
        id: u64,
        record: u64,
    },
    /// The namenode, further by so many records, commands a deletion.
    Order {
        records: u64,
    },
    /// A disk has, or does not have, what was obeyed.
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
    prop_oneof![
        2 => (1u32..6, 0u64..3, 0u64..50)
            .prop_map(|(number, id, record)| Event::Register { number, id, record }),
        4 => (0u64..3).prop_map(|records| Event::Order { records }),
        3 => any::<bool>().prop_map(|fails| Event::Write { fails }),
        4 => any::<prop::sample::Index>().prop_map(|order| Event::Delete { order }),
        1 => Just(Event::Crash),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Once a replica is deleted, no namenode is obeyed any more that started before the one that had it
    /// deleted, however often the datanode crashes; and what was commanded before a registration is not
    /// deleted after it.
    #[test]
    fn nothing_is_deleted_for_a_namenode_that_could_be_forgotten(
        events in prop::collection::vec(event(), 1..80),
    ) {
        let mut obedience = Obedience::new(None);
        let mut removals = Removals::new(RATE);
        let mut orders = Vec::new();
        let mut namenode: Option<Authority> = None;
        let (mut registrations, mut deleted_for) = (0, None::<Position>);
        for event in events {
            match event {
                Event::Register { number, id, record } => {
                    removals.registering();
                    registrations += 1;
                    let heard = authority(number, id, record);
                    let judgement = obedience.judge(&heard);
                    namenode = judgement.result.is_ok().then_some(heard);
                    if let (Some(heard), Some(deleted_for)) = (namenode, deleted_for) {
                        let epoch = heard.position.epoch;
                        prop_assert!(
                            epoch == deleted_for.epoch || epoch.number > deleted_for.epoch.number,
                            "{heard:?} is obeyed after a deletion for {deleted_for}"
                        );
                    }
                }
                Event::Order { records } => {
                    if let Some(heard) = &mut namenode {
                        heard.position.record += records;
                        prop_assert!(obedience.judge(heard).result.is_ok());
                        let order = removals.ordered(10, obedience.obeyed());
                        orders.push((order, registrations, heard.position));
                    }
                }
                Event::Write { fails } => {
                    if let Some(position) = obedience.to_write().filter(|_| !fails) {
                        obedience.wrote(position);
                        prop_assert_eq!(obedience.to_write(), None);
                    }
                }
                Event::Delete { order } if !orders.is_empty() => {
                    let (order, registered, by) = orders.swap_remove(order.index(orders.len()));
                    let verdict = removals.may_delete(&order, obedience.written());
                    if verdict.is_ok() {
                        prop_assert_eq!(registered, registrations);
                        deleted_for = Some(later(deleted_for, by));
                    } else if registered == registrations {
                        prop_assert!(obedience.to_write().is_some(), "without a reason: {verdict:?}");
                    }
                    removals.end(order);
                }
                Event::Delete { .. } => {}
                Event::Crash => {
                    obedience = Obedience::new(obedience.written());
                    removals = Removals::new(RATE);
                    namenode = None;
                    orders.clear();
                    // The connection is another one.
                    registrations += 1;
                }
            }
        }
        for (order, ..) in orders {
            removals.end(order);
        }
        prop_assert_eq!(removals.removable_bytes(u64::MAX, some_time()), u64::MAX);
    }

    /// What is left is what was ordered, less what was deleted or ended, whatever replicas turn out to
    /// take.
    #[test]
    fn what_is_left_is_counted(
        steps in prop::collection::vec((0u8..4, 0u64..5_000, any::<prop::sample::Index>()), 1..100),
    ) {
        let mut removals = Removals::new(0);
        let mut model: Vec<(Order, u64)> = Vec::new();
        let now = some_time();
        for (what, bytes, index) in steps {
            match what {
                0 | 1 => model.push((removals.ordered(bytes, None), bytes)),
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

/// The one whose epoch begins later, or that is further in it.
fn later(one: Option<Position>, other: Position) -> Position {
    let place = |it: &Position| (it.epoch.number, it.record);
    one.map_or(other, |one| std::cmp::max_by_key(one, other, place))
}

/// A namenode that has far too much deleted, and commands what each heartbeat says that it may.
fn deleted_in(time: Duration, pressure_bytes: u64) -> u64 {
    const REPLICA_BYTES: u64 = 50_000;
    let mut removals = Removals::new(RATE);
    let start = some_time();
    let (mut now, mut heartbeat) = (start, start);
    let mut orders = std::collections::VecDeque::new();
    let mut deleted_bytes = 0;
    while now < start + time {
        if now >= heartbeat {
            let mut removable_bytes = removals.removable_bytes(pressure_bytes, now);
            while removable_bytes > 0 {
                orders.push_back(removals.ordered(REPLICA_BYTES, None));
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
