//! Every block shall have a replica that can be read while all busy primaries are busy.

mod common;

use common::{Server, World, request, servers_of};
use harvestfs_placement::{PolicyKind, PolicyOptions, Request, View};
use harvestfs_protocol::{ids::NodeId, types::Durability};
use rand::{SeedableRng, rngs::SmallRng};

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
