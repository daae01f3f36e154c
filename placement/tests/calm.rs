//! Every block has to have a replica that can be read while all primary tenants that are ever busy are busy.

mod common;

use harvestfs_placement::{PolicyKind, PolicyOptions, Request, View};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::Durability;
use harvestfs_telemetry::hours::WeekHours;
use harvestfs_telemetry::profile::TenantProfile;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use common::{Server, World, request, servers_of};

const TENANTS: u8 = 27;

/// Tenants of two servers each, every third of which was never busy.
fn view() -> View {
    let servers = (0..2 * TENANTS).map(|number| Server {
        environment: number / 2,
        function: number / 2,
        rack: number,
        blocks: 5,
        open: true,
    });
    let peak = |tenant: u8| if tenant.is_multiple_of(3) { 50 } else { 250 };
    let world = World {
        servers: servers.collect(),
        history: (0..TENANTS).map(|it| (it, peak(it))).collect(),
    };
    world.view(&*PolicyKind::Harvest.build(&PolicyOptions::default()))
}

fn calm(view: &View, nodes: &[NodeId]) -> usize {
    let profiles = servers_of(view, nodes).map(|it| view.tenants()[it.tenant.number()].profile);
    profiles
        .filter(|profile| profile.is_some_and(|it| it.busy_share <= 0.0))
        .count()
}

#[test]
fn every_block_has_a_replica_on_a_tenant_that_was_never_busy() {
    let view = view();
    let policy = PolicyKind::Harvest.build(&PolicyOptions::default());
    let mut rng = SmallRng::seed_from_u64(1);
    for wanted in [1, 2, 3, 4] {
        for _ in 0..200 {
            let nodes = policy.choose(&view, &request(wanted, Durability::Strict), &mut rng);
            let nodes = nodes.expect("there is room");
            assert!(calm(&view, &nodes) >= 1, "{wanted} replicas: {nodes:?}");
        }
    }
}

#[test]
fn repair_and_removal_see_to_it_as_well() {
    let view = view();
    let policy = PolicyKind::Harvest.build(&PolicyOptions::default());
    let mut rng = SmallRng::seed_from_u64(2);
    for node in (0..2 * u32::from(TENANTS)).map(NodeId) {
        if calm(&view, &[node]) == 1 {
            continue;
        }
        let existing = [node];
        let repair = Request {
            existing: &existing,
            ..request(1, Durability::Strict)
        };
        let chosen = policy
            .choose(&view, &repair, &mut rng)
            .expect("there is room");
        assert_eq!(calm(&view, &chosen), 1, "next to {node:?}");
        let both = [node, chosen[0]];
        assert_eq!(policy.surplus(&view, &both), Some(0), "{both:?}");
    }
}

/// Where no owner is always calm, replicas go to owners that are busy at different times.
#[test]
fn replicas_are_busy_at_different_times() {
    let mut view = view();
    let (mut days, mut nights) = (WeekHours::NONE, WeekHours::NONE);
    for hour in 0..168 {
        let half = if hour % 24 < 12 {
            &mut nights
        } else {
            &mut days
        };
        half.insert(hour * 3_600);
    }
    let keys: Vec<_> = view.tenants().iter().map(|it| it.key.clone()).collect();
    for (number, key) in keys.iter().enumerate() {
        let busy_hours = [days, nights][number % 2];
        let profile = TenantProfile {
            busy_share: 0.5,
            busy_hours,
            ..common::profile(f64::from(number as u32 % 7) / 50.0, 0.9)
        };
        view.set_tenant_profile(key, profile);
    }
    let policy = PolicyKind::Harvest.build(&PolicyOptions::default());
    view.rebuild_grid(policy.scope());
    let mut rng = SmallRng::seed_from_u64(3);
    let mut together = 0;
    for _ in 0..200 {
        let nodes = policy.choose(&view, &request(3, Durability::Strict), &mut rng);
        let nodes = nodes.expect("there is room");
        let hours = servers_of(&view, &nodes).map(|it| {
            let profile = view.tenants()[it.tenant.number()].profile;
            profile.expect("it was set").busy_hours
        });
        together += u32::from(!hours.fold(WeekHours::ALL, WeekHours::common).is_empty());
    }
    // By chance it would be one block in four; eight draws miss one in 256, twice.
    assert!(together <= 5, "{together} of 200");
}
