//! The owner's reserve against slow descriptions of it.

use std::num::NonZeroU32;

use harvestfs_cycles::reserve::{
    Capacity, Container, Kills, Order, OwnerUse, Preemption, PreemptionRule, Resources,
    SuspensionCosts, Victim,
};
use proptest::prelude::*;

/// As the rule of Li et al. (Middleware'15): a checkpoint when more would be lost without.
struct Adaptive {
    bytes_per_s: f64,
}

impl PreemptionRule for Adaptive {
    fn preempt(&self, victim: &Victim, queue_s: f64) -> Preemption {
        let one_way_s = victim.memory_bytes / self.bytes_per_s;
        if victim.progress_s > 2.0 * one_way_s + queue_s {
            Preemption::Suspend(SuspensionCosts {
                dump_s: one_way_s,
                restore_s: one_way_s,
            })
        } else {
            Preemption::Kill
        }
    }
}

const RULE: Adaptive = Adaptive { bytes_per_s: 100.0 };

/// That of the paper's testbed: 12 cores, 32 GB.
fn capacity() -> Capacity {
    Capacity::new(Resources {
        cores: 12,
        memory_mib: 32 << 10,
    })
}

fn owner(cores: f64) -> OwnerUse {
    OwnerUse {
        cores,
        memory_bytes: 0,
    }
}

fn container(id: u64, started_ms: u64, progress_s: f64) -> Container {
    Container {
        id,
        cores: NonZeroU32::MIN,
        memory_mib: 1,
        started_ms,
        victim: Victim {
            progress_s,
            memory_bytes: 1_000.0,
            has_checkpoint: false,
        },
    }
}

#[test]
fn a_third_is_kept_and_the_owners_use_is_rounded_up() {
    let capacity = capacity();
    assert_eq!(capacity.reserve().cores, 4);
    let cores = |used| capacity.harvestable(owner(used)).cores;
    assert_eq!(
        [0.0, 0.1, 1.0, 7.9, 8.0, 12.0].map(cores),
        [8, 7, 7, 0, 0, 0]
    );
    assert_eq!((cores(f64::NAN), cores(f64::INFINITY)), (8, 0));
    let odd = OwnerUse {
        cores: 0.0,
        memory_bytes: 1,
    };
    assert_eq!(
        capacity.harvestable(odd).memory_mib,
        (32 << 10) - 10_923 - 1
    );
}

#[test]
fn the_youngest_goes_first_or_the_cheapest() {
    // The owner leaves room for two of four.
    let four = [
        container(1, 0, 400.0),
        container(2, 300, 30.0),
        container(3, 100, 25.0),
        container(4, 200, 5.0),
    ];
    let evict = |order| capacity().evict(owner(5.5), &four, order);
    let youngest: Vec<u64> = evict(Order::YoungestFirst).iter().map(|it| it.id).collect();
    assert_eq!(youngest, [2, 4]);
    // Suspending costs 20 s: killing 4 is cheaper, and 2, which is younger than 3, costs the same as 3.
    let cheapest = evict(Order::CheapestFirst(&RULE));
    assert_eq!((cheapest[0].id, cheapest[0].how), (4, Preemption::Kill));
    assert_eq!(cheapest[1].id, 2);
    assert!(matches!(cheapest[1].how, Preemption::Suspend(_)));
    assert_eq!(evict(Order::CheapestFirst(&Kills))[1].id, 3);
    assert_eq!(
        capacity().evict(owner(4.0), &four, Order::YoungestFirst),
        []
    );
    assert_eq!(
        capacity()
            .evict(owner(8.0), &four, Order::YoungestFirst)
            .len(),
        4
    );
}

#[test]
fn checkpoints_wait_for_each_other() {
    // 31 s of progress are worth one checkpoint of 20 s, but not one that waits 20 s for two others.
    let three = [1, 2, 3].map(|id| container(id, id, 31.0));
    let evicted = capacity().evict(owner(8.0), &three, Order::CheapestFirst(&RULE));
    let suspended = |it: &harvestfs_cycles::reserve::Eviction| it.how != Preemption::Kill;
    assert_eq!(evicted.iter().filter(|it| suspended(it)).count(), 2);
    assert_eq!(evicted[2].how, Preemption::Kill);
}

/// What the containers of a set take, in cores and MiB.
fn taken<'a>(containers: impl Iterator<Item = &'a Container>) -> (u64, u64) {
    containers.fold((0, 0), |(cores, memory_mib), it| {
        (
            cores + u64::from(it.cores.get()),
            memory_mib + it.memory_mib,
        )
    })
}

proptest! {
    #[test]
    fn the_reserve_is_whole_afterwards_and_no_container_goes_in_vain(
        sizes in prop::collection::vec((1..5_u32, 0..12_000_u64, 0..50_u64, 0..100_u32), 0..9),
        cores in 0.0..14.0f64,
        memory_bytes in 0..(40_u64 << 30),
        cheapest in any::<bool>(),
    ) {
        let containers: Vec<Container> = sizes
            .iter()
            .enumerate()
            .map(|(id, &(cores, memory_mib, started_ms, progress_s))| Container {
                cores: NonZeroU32::new(cores).unwrap(),
                memory_mib,
                ..container(id as u64, started_ms, f64::from(progress_s))
            })
            .collect();
        let use_of_owner = OwnerUse { cores, memory_bytes };
        let order = if cheapest { Order::CheapestFirst(&RULE) } else { Order::YoungestFirst };
        let evicted = capacity().evict(use_of_owner, &containers, order);
        let room = capacity().harvestable(use_of_owner);
        let fits = |(cores, memory_mib): (u64, u64)| cores <= u64::from(room.cores) && memory_mib <= room.memory_mib;
        let goes = |it: &&Container| evicted.iter().any(|eviction| eviction.id == it.id);
        let stays: Vec<&Container> = containers.iter().filter(|it| !goes(it)).collect();
        prop_assert_eq!(stays.len() + evicted.len(), containers.len());
        prop_assert!(fits(taken(stays.iter().copied())));
        if cheapest {
            for eviction in &evicted {
                let back = containers.iter().filter(|it| it.id == eviction.id);
                prop_assert!(!fits(taken(stays.iter().copied().chain(back))), "{eviction:?}");
            }
        } else {
            prop_assert!(evicted.iter().all(|it| it.how == Preemption::Kill));
            // From the youngest to the oldest, and one less would not do.
            let age = |id: u64| containers.iter().find(|it| it.id == id).map(|it| (it.started_ms, it.id));
            prop_assert!(evicted.windows(2).all(|pair| age(pair[0].id) > age(pair[1].id)));
            if let Some(last) = evicted.last() {
                prop_assert!(stays.iter().all(|it| Some((it.started_ms, it.id)) < age(last.id)));
                let back = containers.iter().filter(|it| it.id == last.id);
                prop_assert!(!fits(taken(stays.iter().copied().chain(back))));
            }
        }
    }

    #[test]
    fn no_other_containers_of_a_size_would_have_been_cheaper(
        progress in prop::collection::vec(0..100_u32, 1..9),
        cores in 0.0..14.0f64,
    ) {
        let containers: Vec<Container> = progress
            .iter()
            .enumerate()
            .map(|(id, &progress_s)| container(id as u64, 0, f64::from(progress_s)))
            .collect();
        let cost = |it: &Container| RULE.cost_s(&it.victim, 0.0);
        let evicted = capacity().evict(owner(cores), &containers, Order::CheapestFirst(&RULE));
        let of_evicted: f64 = evicted.iter().map(|it| cost(&containers[it.id as usize])).sum();
        let room = capacity().harvestable(owner(cores)).cores as usize;
        let subsets = 0..1_usize << containers.len();
        let enough = subsets.filter(|set| containers.len() - set.count_ones() as usize <= room);
        let least = enough
            .map(|set| containers.iter().filter(|it| set >> it.id & 1 == 1).map(cost).sum::<f64>())
            .fold(f64::INFINITY, f64::min);
        prop_assert!((of_evicted - least).abs() < 1e-9, "{of_evicted} {least}");
    }
}
