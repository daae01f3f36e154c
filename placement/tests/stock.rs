//! The promises of the `stock` policy, checked on random clusters.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use harvestfs_placement::{
    Constraints, Lane, Lanes, Location, Nodes, Policy, Request, Room, Stock, View,
};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::{Durability, StorageClass};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// A server of a random cluster, and what the view knows of it.
#[derive(Clone, Debug)]
struct Server {
    rack: u8,
    host: u8,
    disk_blocks: u32,
    ssd_blocks: u32,
    lanes: Lanes,
}

impl Server {
    fn takes(&self, class: Option<StorageClass>, lane: Lane) -> bool {
        let blocks = match class {
            None => self.disk_blocks + self.ssd_blocks,
            Some(StorageClass::Disk) => self.disk_blocks,
            Some(StorageClass::Ssd) => self.ssd_blocks,
            Some(StorageClass::Memory) => 0,
        };
        let open = match lane {
            Lane::Write => self.lanes.write,
            Lane::Repair => self.lanes.repair,
            Lane::Urgent => self.lanes.urgent,
        };
        open && blocks > 0
    }
}

fn address(host: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, host).into()
}

fn view(servers: &[Server]) -> View {
    let mut view = View::new();
    for (number, server) in servers.iter().enumerate() {
        let node = NodeId(number as u32);
        let mut room = Room::default();
        room.add(StorageClass::Disk, server.disk_blocks);
        room.add(StorageClass::Ssd, server.ssd_blocks);
        // Inserted in changing order, twice, and moved once: only the last call may count.
        view.insert(node, &location("elsewhere", 255));
        view.set_lanes(node, Lanes::ALL);
        view.set_room(node, room);
        view.set_lanes(node, server.lanes);
        view.insert(node, &location(&server.rack.to_string(), server.host));
    }
    view
}

fn location(rack: &str, host: u8) -> Location<'_> {
    Location {
        rack,
        environment: "e",
        machine_function: "f",
        host: address(host),
    }
}

fn server() -> impl Strategy<Value = Server> {
    let lanes = (any::<bool>(), any::<bool>(), any::<bool>());
    (0u8..5, 0u8..6, 0u32..3, 0u32..2, lanes).prop_map(
        |(rack, host, disk_blocks, ssd_blocks, (write, repair, urgent))| Server {
            rack,
            host,
            disk_blocks,
            ssd_blocks,
            lanes: Lanes {
                write,
                repair,
                urgent,
            },
        },
    )
}

fn class() -> impl Strategy<Value = Option<StorageClass>> {
    prop_oneof![
        3 => Just(None),
        1 => Just(Some(StorageClass::Disk)),
        1 => Just(Some(StorageClass::Ssd)),
        1 => Just(Some(StorageClass::Memory)),
    ]
}

fn lane() -> impl Strategy<Value = Lane> {
    prop_oneof![Just(Lane::Write), Just(Lane::Repair), Just(Lane::Urgent)]
}

fn ids(numbers: &BTreeSet<u32>) -> Vec<NodeId> {
    numbers.iter().copied().map(NodeId).collect()
}

proptest! {
    #[test]
    fn stock_keeps_its_promises(
        servers in prop::collection::vec(server(), 0..30),
        wanted in 1u8..=10,
        existing in prop::collection::btree_set(0u32..30, 0..4),
        exclude in prop::collection::btree_set(0u32..40, 0..6),
        writer in prop::option::of(0u8..7),
        class in class(),
        lane in lane(),
        seed: u64,
    ) {
        let view = view(&servers);
        let existing: BTreeSet<u32> =
            existing.into_iter().filter(|&n| (n as usize) < servers.len()).collect();
        let (existing_ids, exclude_ids) = (ids(&existing), ids(&exclude));
        let request = Request {
            wanted,
            existing: &existing_ids,
            exclude: &exclude_ids,
            writer: writer.map(address),
            class,
            lane,
            durability: Durability::Strict,
            given_up: Constraints::NONE,
        };
        let choose = || Stock.choose(&view, &request, &mut SmallRng::seed_from_u64(seed));
        let result = choose();
        prop_assert_eq!(&result, &choose(), "the same seed gives the same servers");

        let candidates: BTreeSet<u32> = (0..servers.len() as u32)
            .filter(|n| servers[*n as usize].takes(class, lane))
            .filter(|n| !existing.contains(n) && !exclude.contains(n))
            .collect();
        let chosen: Nodes = match result {
            Ok(nodes) => {
                prop_assert_eq!(nodes.len(), usize::from(wanted));
                nodes
            }
            Err(few) => {
                prop_assert_eq!(few.wanted, wanted);
                prop_assert!(candidates.len() < usize::from(wanted));
                prop_assert_eq!(few.placeable.len(), candidates.len());
                few.placeable
            }
        };
        let distinct: BTreeSet<u32> = chosen.iter().map(|node| node.0).collect();
        prop_assert_eq!(distinct.len(), chosen.len(), "no server twice");
        prop_assert!(distinct.is_subset(&candidates));

        let rack = |n: u32| servers[n as usize].rack;
        let all: Vec<u32> = existing.iter().copied().chain(chosen.iter().map(|n| n.0)).collect();
        let racks: BTreeSet<u8> = all.iter().map(|&n| rack(n)).collect();
        if all.len() > 1 && !chosen.is_empty() && racks.len() == 1 {
            prop_assert!(
                candidates.iter().all(|&n| racks.contains(&rack(n))),
                "two racks are used when they can be"
            );
        }
        if let (true, Some(host), Some(first)) = (existing.is_empty(), writer, chosen.first())
            && candidates.iter().any(|&n| servers[n as usize].host == host)
        {
            prop_assert_eq!(servers[first.0 as usize].host, host, "the first replica is local");
        }
        if existing.is_empty() && wanted == 3 && chosen.len() == 3 {
            let [first, second, third] = [chosen[0].0, chosen[1].0, chosen[2].0];
            let is_local = |n: &&u32| rack(**n) == rack(first) && **n != first;
            if candidates.iter().any(|n| is_local(&n)) {
                prop_assert_eq!(rack(first), rack(second), "the second is in the first's rack");
                let remote = candidates.iter().any(|&n| rack(n) != rack(first));
                prop_assert_eq!(rack(third) != rack(first), remote, "the third is in another");
            }
        }
    }

    #[test]
    fn what_is_surplus_leaves_as_many_racks_as_possible(
        racks in prop::collection::vec(0u8..4, 1..8),
        rooms in prop::collection::vec(1u32..5, 8),
    ) {
        let servers: Vec<Server> = racks
            .iter()
            .zip(rooms)
            .map(|(&rack, disk_blocks)| Server {
                rack,
                host: 0,
                disk_blocks,
                ssd_blocks: 0,
                lanes: Lanes::NONE,
            })
            .collect();
        let view = view(&servers);
        let all: BTreeSet<u32> = (0..servers.len() as u32).collect();
        let surplus = Stock.surplus(&view, &ids(&all)).expect("there is a replica");
        let count = |left_out: Option<usize>| {
            let left = (0..racks.len()).filter(|i| Some(*i) != left_out);
            left.map(|i| racks[i]).collect::<BTreeSet<u8>>().len()
        };
        let best = (0..racks.len()).map(|i| count(Some(i))).max();
        prop_assert_eq!(Some(count(Some(surplus))), best);
    }
}

#[test]
fn there_is_no_surplus_of_nothing() {
    assert_eq!(Stock.surplus(&View::new(), &[]), None);
}

/// 60 servers in racks of very different size. With one replica per block every server gets the
/// same share; with three, the writer far away, no server of a rack gets more than the others.
#[test]
fn replicas_spread_uniformly() {
    let servers: Vec<Server> = (0..60)
        .map(|n: u8| Server {
            rack: match n {
                0..40 => 0,
                40..58 => 1,
                _ => 2,
            },
            host: n,
            disk_blocks: 1,
            ssd_blocks: 0,
            lanes: Lanes::ALL,
        })
        .collect();
    let view = view(&servers);
    let mut rng = SmallRng::seed_from_u64(7);
    let mut count_of = |wanted: u8, blocks: u32| {
        let mut counts = vec![0u32; servers.len()];
        let request = Request {
            wanted,
            existing: &[],
            exclude: &[],
            writer: Some(address(200)),
            class: None,
            lane: Lane::Write,
            durability: Durability::Strict,
            given_up: Constraints::NONE,
        };
        for _ in 0..blocks {
            for node in Stock
                .choose(&view, &request, &mut rng)
                .expect("room is left")
            {
                counts[node.0 as usize] += 1;
            }
        }
        counts
    };
    // 59 degrees of freedom: beyond 105 once in 5,000 times; the seed is fixed.
    assert!(chi_square(&count_of(1, 60_000)) < 105.0);
    let counts = count_of(3, 60_000);
    for range in [0..40, 40..58, 58..60] {
        let limit = 2.0 * range.len() as f64;
        assert!(chi_square(&counts[range]) < limit);
    }
}

fn chi_square(counts: &[u32]) -> f64 {
    let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
    let deviation = |&count: &u32| (f64::from(count) - expected).powi(2) / expected;
    counts.iter().map(deviation).sum()
}

/// When nearly every server is refused, the last one is still found, and evenly so.
#[test]
fn the_last_acceptable_servers_are_found() {
    let servers: Vec<Server> = (0..200)
        .map(|n: u8| Server {
            rack: n % 7,
            host: n,
            disk_blocks: 1,
            ssd_blocks: 0,
            lanes: Lanes::ALL,
        })
        .collect();
    let view = view(&servers);
    let exclude: Vec<NodeId> = (0..200).filter(|n| n % 100 != 3).map(NodeId).collect();
    let request = Request {
        wanted: 1,
        existing: &[],
        exclude: &exclude,
        writer: None,
        class: None,
        lane: Lane::Write,
        durability: Durability::Strict,
        given_up: Constraints::NONE,
    };
    let mut rng = SmallRng::seed_from_u64(1);
    let mut counts = BTreeMap::new();
    for _ in 0..1_000 {
        let nodes = Stock
            .choose(&view, &request, &mut rng)
            .expect("two are left");
        *counts.entry(nodes[0].0).or_insert(0) += 1;
    }
    assert_eq!(counts.keys().copied().collect::<Vec<_>>(), [3, 103]);
    assert!(counts.values().all(|&count| count > 400));
}
