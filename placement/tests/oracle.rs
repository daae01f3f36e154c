//! A slow and obvious implementation of Algorithm 2 gives the probability of each outcome of the fast one.

mod common;

use std::collections::BTreeMap;

use harvestfs_placement::{
    Cell, Harvest, History, Lane, Locality, Policy, Request, Scope, ServerView, View,
};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::Durability;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use common::{Server, World, host, profile, request, world};

/// Probabilities of the outcomes; the rest up to 1 ended without a server for some replica.
type Outcomes = BTreeMap<Vec<NodeId>, f64>;

fn is_open(view: &View, server: &ServerView) -> bool {
    view.is_open(server, Lane::Write, None)
}

/// One run through Algorithm 2. `local`: the server creating the block, if it takes a replica.
fn algorithm_2(view: &View, local: Option<NodeId>, replicas: usize) -> Outcomes {
    let mut outcomes = Outcomes::new();
    match local {
        // Lines 6 and 7.
        Some(server) => place(view, &[server], replicas, 1.0, &mut outcomes),
        None => place(view, &[], replicas, 1.0, &mut outcomes),
    }
    outcomes
}

/// Lines 8 to 18, for the replica after those in `placed`.
fn place(view: &View, placed: &[NodeId], replicas: usize, share: f64, outcomes: &mut Outcomes) {
    if placed.len() == replicas {
        *outcomes.entry(placed.to_vec()).or_default() += share;
        return;
    }
    let servers: Vec<&ServerView> = placed.iter().filter_map(|&it| view.server(it)).collect();
    // Line 16: what is remembered are the replicas of the round under way.
    let round = &servers[placed.len() / 3 * 3..];
    let picked: Vec<Cell> = round.iter().filter_map(|it| view.cell_of(it)).collect();
    let mut classes = Vec::new();
    for class in Cell::all() {
        // Lines 10 and 11.
        if picked
            .iter()
            .any(|it| it.row() == class.row() || it.column() == class.column())
        {
            continue;
        }
        // Lines 12 and 13.
        let mut tenants = Vec::new();
        for (number, tenant) in view.tenants().iter().enumerate() {
            let received = servers
                .iter()
                .any(|it| it.environment == tenant.environment);
            // Line 14.
            let candidates: Vec<NodeId> = view
                .servers()
                .iter()
                .filter(|it| it.tenant.number() == number && is_open(view, it))
                .map(|it| it.node)
                .collect();
            if tenant.cell() == Some(class) && !received && !candidates.is_empty() {
                tenants.push(candidates);
            }
        }
        if !tenants.is_empty() {
            classes.push(tenants);
        }
    }
    for tenants in &classes {
        for candidates in tenants {
            for &server in candidates {
                let mut longer = placed.to_vec();
                longer.push(server);
                let share =
                    share / classes.len() as f64 / tenants.len() as f64 / candidates.len() as f64;
                place(view, &longer, replicas, share, outcomes);
            }
        }
    }
}

/// What three runs with the writer's server and three without end in. What is missing to 1 is left
/// to the search of all servers.
fn expected(view: &View, writer: Option<usize>, replicas: usize) -> Outcomes {
    let local = writer
        .and_then(|writer| view.server(NodeId(writer as u32)))
        .filter(|server| is_open(view, server))
        .map(|server| server.node);
    let mut all = Outcomes::new();
    let mut left = 1.0;
    for run in 0..6 {
        let outcomes = algorithm_2(view, local.filter(|_| run < 3), replicas);
        let found: f64 = outcomes.values().sum();
        for (nodes, share) in outcomes {
            *all.entry(nodes).or_default() += left * share;
        }
        left *= (1.0 - found).max(0.0);
    }
    all
}

const SAMPLES: u32 = 3_000;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn outcomes_are_as_likely_as_algorithm_2_says(
        mut world in world(),
        writer in prop::option::of(0usize..12),
        replicas in 1u8..=4,
        seed in any::<u64>(),
    ) {
        world.servers.truncate(12);
        let view = world.view(&History);
        let expected = expected(&view, writer, replicas.into());
        let mass: f64 = expected.values().sum();
        let searched = 1.0 - mass;
        let mut seen: BTreeMap<Vec<NodeId>, u32> = BTreeMap::new();
        let mut rng = SmallRng::seed_from_u64(seed);
        let request = Request {
            writer: writer.map(host),
            ..request(replicas, Durability::Strict)
        };
        for _ in 0..SAMPLES {
            if let Ok(nodes) = History.choose(&view, &request, &mut rng) {
                *seen.entry(nodes.to_vec()).or_default() += 1;
            }
        }
        let samples = f64::from(SAMPLES);
        for (nodes, &count) in &seen {
            let share = expected.get(nodes).copied().unwrap_or(0.0);
            // Six standard deviations, and what the search may add.
            let most = samples * (share + searched.max(0.0))
                + 6.0 * (samples * (share + searched.max(0.0))).sqrt()
                + 6.0 * f64::from(u8::from(share > 0.0))
                + 1e-6;
            prop_assert!(f64::from(count) <= most, "{nodes:?}: {count} times, {share} expected");
        }
        for (nodes, &share) in &expected {
            let count = seen.get(nodes).copied().unwrap_or(0);
            let least = samples * share - 6.0 * (samples * share).sqrt() - 6.0;
            prop_assert!(f64::from(count) >= least, "{nodes:?}: {count} times, {share} expected");
        }
    }
}

/// `harvest` draws a cell by its free space, and in it a server by free space over reimage rate.
#[test]
fn harvest_draws_by_space_over_rate() {
    let rates = [1.0, 0.5, 0.25];
    let mut world = World {
        servers: Vec::new(),
        history: Vec::new(),
    };
    for number in 0..30 {
        world.servers.push(Server {
            environment: number,
            function: number,
            rack: number,
            blocks: 1 + u32::from(number) % 5 * 3,
            open: number % 7 != 3,
        });
    }
    let policy = Harvest {
        locality: Locality::Off,
        scope: Scope::Everything,
    };
    let mut view = world.view(&policy);
    let rate = |tenant: usize| rates[tenant * 7 % 3];
    for number in 0..30 {
        let key = view.tenants()[number].key.clone();
        view.set_tenant_profile(&key, profile(rate(number), 0.5));
    }
    view.rebuild_grid(policy.scope());
    let open: Vec<&ServerView> = view
        .servers()
        .iter()
        .filter(|it| is_open(&view, it))
        .collect();
    let free = |it: &ServerView| f64::from(it.room.blocks(None));
    let weight = |it: &ServerView| free(it) / rate(it.tenant.number());
    let total: f64 = open.iter().map(|it| free(it)).sum();
    let mut counts = BTreeMap::new();
    let mut rng = SmallRng::seed_from_u64(5);
    const DRAWS: u32 = 200_000;
    for _ in 0..DRAWS {
        let nodes = policy
            .choose(&view, &request(1, Durability::Strict), &mut rng)
            .expect("there is room");
        *counts.entry(nodes[0]).or_insert(0u32) += 1;
    }
    for it in &open {
        let same_cell = || {
            open.iter()
                .filter(|other| view.cell_of(other) == view.cell_of(it))
        };
        let cell_free: f64 = same_cell().map(|other| free(other)).sum();
        let cell_weight: f64 = same_cell().map(|other| weight(other)).sum();
        let expected = f64::from(DRAWS) * cell_free / total * weight(it) / cell_weight;
        let count = f64::from(counts.get(&it.node).copied().unwrap_or(0));
        assert!(
            (count - expected).abs() < 6.0 * expected.sqrt(),
            "{:?}: {count} times, {expected} expected",
            it.node
        );
    }
}
