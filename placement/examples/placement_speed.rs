//! How long choosing the servers of a block takes in a large cluster.
//!
//! `cargo run --release -p harvestfs-placement --example placement_speed`

use std::{hint::black_box, net::Ipv4Addr, time::Instant};

use harvestfs_placement::{Lane, Lanes, Location, Policy, Request, Room, Stock, View};
use harvestfs_protocol::{ids::NodeId, types::StorageClass};
use rand::{SeedableRng, rngs::SmallRng};

const BLOCKS: u32 = 1_000_000;

fn main() {
    println!("{:>8} {:>8} {:>12}", "servers", "racks", "ns per block");
    for (servers, racks) in [
        (9, 3),
        (1_000, 25),
        (10_000, 250),
        (10_000, 2),
        (100_000, 2_500),
    ] {
        let mut view = View::new();
        let mut room = Room::default();
        room.add(StorageClass::Disk, 1_000);
        for number in 0..servers {
            let rack = format!("r{}", number % racks);
            let location = Location {
                rack: &rack,
                environment: "e",
                machine_function: "f",
                host: Ipv4Addr::from_bits(number).into(),
            };
            view.insert(NodeId(number), &location);
            view.set_room(NodeId(number), room);
            view.set_lanes(NodeId(number), Lanes::ALL);
        }
        let mut rng = SmallRng::seed_from_u64(1);
        let start = Instant::now();
        for block in 0..BLOCKS {
            let request = Request {
                wanted: 3,
                existing: &[],
                exclude: &[],
                writer: Some(Ipv4Addr::from_bits(block % servers).into()),
                class: None,
                lane: Lane::Write,
            };
            let _ = black_box(Stock.choose(&view, &request, &mut rng));
        }
        let nanoseconds = start.elapsed().as_nanos() / u128::from(BLOCKS);
        println!("{servers:>8} {racks:>8} {nanoseconds:>12}");
    }
}
