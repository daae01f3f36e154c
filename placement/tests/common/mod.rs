//! Random clusters for the tests of policies.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::net::{IpAddr, Ipv4Addr};

use harvestfs_placement::{
    Constraints, Lane, Lanes, Location, Policy, Request, Room, ServerView, View,
};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::{Durability, StorageClass};
use harvestfs_telemetry::hours::WeekHours;
use harvestfs_telemetry::profile::{Pattern, TenantKey, TenantProfile};
use proptest::prelude::*;

/// A server, and what the view knows of it.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    pub environment: u8,
    pub function: u8,
    pub rack: u8,
    pub blocks: u32,
    pub open: bool,
}

/// A cluster, and the history of its tenants: reimage rate and peak by environment and function.
#[derive(Clone, Debug)]
pub struct World {
    pub servers: Vec<Server>,
    pub history: Vec<(u8, u8)>,
}

pub fn host(server: usize) -> IpAddr {
    Ipv4Addr::new(10, 1, (server / 256) as u8, (server % 256) as u8).into()
}

pub fn profile(reimages: f64, peak: f64) -> TenantProfile {
    TenantProfile {
        reimages_per_server_month: reimages,
        peak_cpu_share: peak,
        average_cpu_share: peak / 2.0,
        // Those with high peaks are busy for a part of the time.
        busy_share: (peak - 0.6).max(0.0),
        busy_hours: if peak > 0.6 {
            WeekHours::ALL
        } else {
            WeekHours::NONE
        },
        pattern: Pattern::Constant,
    }
}

impl World {
    pub fn view(&self, policy: &dyn Policy) -> View {
        let mut view = View::new();
        for (number, server) in self.servers.iter().enumerate() {
            let node = NodeId(number as u32);
            let (environment, function) = (server.environment, server.function);
            let location = Location {
                rack: &server.rack.to_string(),
                environment: &environment.to_string(),
                machine_function: &function.to_string(),
                host: host(number),
            };
            let mut room = Room::default();
            room.add(StorageClass::Disk, server.blocks);
            view.insert(node, &location);
            view.set_capacity(node, 10);
            view.set_room(node, room);
            view.set_lanes(node, if server.open { Lanes::ALL } else { Lanes::NONE });
            if !self.history.is_empty() {
                let tenant = usize::from(environment) * 7 + usize::from(function);
                let (rate, peak) = self.history[tenant % self.history.len()];
                let key = TenantKey {
                    environment: environment.to_string(),
                    machine_function: function.to_string(),
                };
                view.set_tenant_profile(
                    &key,
                    profile(f64::from(rate) / 50.0, f64::from(peak) / 255.0),
                );
            }
        }
        view.rebuild_grid(policy.scope());
        view
    }
}

pub fn request(wanted: u8, durability: Durability) -> Request<'static> {
    Request {
        wanted,
        existing: &[],
        exclude: &[],
        writer: None,
        class: None,
        lane: Lane::Write,
        durability,
        given_up: Constraints::NONE,
    }
}

pub fn servers_of<'a>(view: &'a View, nodes: &'a [NodeId]) -> impl Iterator<Item = &'a ServerView> {
    nodes.iter().filter_map(|&node| view.server(node))
}

/// Clusters of all shapes: one rack, one tenant, one giant tenant, full and busy servers, with and
/// without history.
pub fn world() -> impl Strategy<Value = World> {
    let shape = (
        1u8..=12,
        1u8..=8,
        1u8..=12,
        0u8..4,
        prop::bool::weighted(0.2),
    );
    (1usize..40, shape).prop_flat_map(|(count, (environments, functions, racks, full, giant))| {
        let server = (
            0..environments,
            0..functions,
            0..racks,
            0u32..6,
            prop::bool::weighted(0.85),
        )
            .prop_map(move |(environment, function, rack, blocks, open)| Server {
                environment: if giant && blocks != 3 { 0 } else { environment },
                function: if giant && blocks != 3 { 0 } else { function },
                rack,
                blocks: blocks.saturating_sub(u32::from(full)),
                open,
            });
        let history = prop::collection::vec((any::<u8>(), any::<u8>()), 0..40);
        (prop::collection::vec(server, count), history)
            .prop_map(|(servers, history)| World { servers, history })
    })
}
