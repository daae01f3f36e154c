//! The promises of each policy, checked on random clusters.

mod common;

use std::collections::BTreeSet;

use harvestfs_placement::diversity::{conflicts, held};
use harvestfs_placement::{
    Constraints, Lane, Nodes, Policy, PolicyKind, PolicyOptions, Request, View,
};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::Durability;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use common::{World, host, request, servers_of, world};

/// The constraints of a policy among these servers, found by asking of each pair and by trying
/// every split into rounds.
fn keeps(view: &View, nodes: &[NodeId], constraints: Constraints) -> bool {
    let servers: Vec<_> = servers_of(view, nodes).collect();
    let pairs_differ = |constraint, key: &dyn Fn(usize) -> String| {
        !constraints.contains(constraint)
            || (0..servers.len()).all(|a| (0..a).all(|b| key(a) != key(b)))
    };
    let tenant = |i: usize| &view.tenants()[servers[i].tenant.number()].key;
    pairs_differ(Constraints::ENVIRONMENT, &|i| tenant(i).environment.clone())
        && pairs_differ(Constraints::MACHINE_FUNCTION, &|i| {
            tenant(i).machine_function.clone()
        })
        && pairs_differ(Constraints::RACK, &|i| format!("{:?}", servers[i].rack))
        && {
            let cells: Vec<(usize, usize)> = servers
                .iter()
                .filter_map(|it| view.cell_of(it))
                .map(|cell| (cell.row(), cell.column()))
                .collect();
            let rounds = cells.len().div_ceil(3);
            can_split(
                &cells,
                &mut vec![Vec::new(); rounds],
                constraints.contains(Constraints::ROW),
                constraints.contains(Constraints::COLUMN),
            )
        }
}

/// Whether the cells can be dealt to the rounds without two in one row or column.
fn can_split(
    cells: &[(usize, usize)],
    rounds: &mut Vec<Vec<(usize, usize)>>,
    rows: bool,
    columns: bool,
) -> bool {
    let Some((&cell, rest)) = cells.split_first() else {
        return true;
    };
    for round in 0..rounds.len() {
        let fits = rounds[round].len() < 3
            && rounds[round]
                .iter()
                .all(|other| (!rows || other.0 != cell.0) && (!columns || other.1 != cell.1));
        if fits {
            rounds[round].push(cell);
            let found = can_split(rest, rounds, rows, columns);
            rounds[round].pop();
            if found {
                return true;
            }
        }
    }
    false
}

/// Whether any set of open servers would do, found by trying all.
fn possible(
    view: &View,
    chosen: &mut Nodes,
    from: usize,
    request: &Request<'_>,
    policy: &dyn Policy,
) -> bool {
    let all: Nodes = request
        .existing
        .iter()
        .chain(chosen.iter())
        .copied()
        .collect();
    // Owners only get more crowded; rows and columns may not.
    let owners = policy
        .constraints()
        .without(Constraints::ROW)
        .without(Constraints::COLUMN);
    if !keeps(view, &all, owners) {
        return false;
    }
    if chosen.len() == usize::from(request.wanted) {
        return keeps(view, &all, policy.constraints());
    }
    for index in from..view.servers().len() {
        let server = view.servers()[index];
        let in_grid =
            !policy.constraints().contains(Constraints::COLUMN) || view.cell_of(&server).is_some();
        if view.is_open(&server, request.lane, request.class)
            && in_grid
            && !request.existing.contains(&server.node)
        {
            chosen.push(server.node);
            let found = possible(view, chosen, index + 1, request, policy);
            chosen.pop();
            if found {
                return true;
            }
        }
    }
    false
}

fn policy() -> impl Strategy<Value = PolicyKind> {
    prop::sample::select(&PolicyKind::ALL[..])
}

/// All different, open, and none of those that are ruled out.
fn check_servers(
    view: &View,
    request: &Request<'_>,
    nodes: &[NodeId],
) -> Result<(), TestCaseError> {
    let distinct: BTreeSet<NodeId> = nodes.iter().copied().collect();
    prop_assert_eq!(distinct.len(), nodes.len());
    prop_assert!(nodes.len() <= usize::from(request.wanted));
    for server in servers_of(view, nodes) {
        prop_assert!(view.is_open(server, request.lane, request.class));
        prop_assert!(!request.existing.contains(&server.node));
        prop_assert!(!request.exclude.contains(&server.node));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// A strict block is placed within the constraints, or not at all; and it is placed if there
    /// is a way.
    #[test]
    fn strict_is_strict(
        world in world(),
        kind in policy(),
        wanted in 1u8..=10,
        writer in prop::option::of(0usize..40),
        seed in any::<u64>(),
    ) {
        let policy = kind.build(&PolicyOptions::default());
        let view = world.view(&*policy);
        let mut rng = SmallRng::seed_from_u64(seed);
        let request = Request { writer: writer.map(host), ..request(wanted, Durability::Strict) };
        match policy.choose(&view, &request, &mut rng) {
            Ok(nodes) => {
                prop_assert_eq!(nodes.len(), usize::from(wanted));
                check_servers(&view, &request, &nodes)?;
                prop_assert!(keeps(&view, &nodes, policy.constraints()), "{nodes:?}");
            }
            Err(few) => {
                prop_assert!(few.placeable.len() < usize::from(wanted));
                check_servers(&view, &request, &few.placeable)?;
                // Trying all is affordable for few replicas only.
                if wanted <= 4 {
                    let found = possible(&view, &mut Nodes::new(), 0, &request, &*policy);
                    prop_assert!(!found, "a way exists");
                }
            }
        }
    }

    /// A block that saves space is placed on as many servers as wanted, if so many are open, and
    /// within the constraints, if there is a way.
    #[test]
    fn space_takes_what_there_is(
        world in world(),
        kind in policy(),
        wanted in 1u8..=10,
        seed in any::<u64>(),
    ) {
        let policy = kind.build(&PolicyOptions::default());
        let view = world.view(&*policy);
        let mut rng = SmallRng::seed_from_u64(seed);
        let request = request(wanted, Durability::Space);
        let open = view.open_servers(Lane::Write, None);
        let nodes = match policy.choose(&view, &request, &mut rng) {
            Ok(nodes) => nodes,
            Err(few) => few.placeable,
        };
        check_servers(&view, &request, &nodes)?;
        prop_assert_eq!(nodes.len() as u32, open.min(u32::from(wanted)));
    }

    /// A repair takes the replicas that are left for the beginning of the block: whichever were
    /// lost, the constraints hold again.
    #[test]
    fn repairs_keep_the_constraints(
        world in world(),
        kind in policy(),
        wanted in 1u8..=10,
        lost in prop::collection::btree_set(0usize..10, 1..10),
        seed in any::<u64>(),
    ) {
        let policy = kind.build(&PolicyOptions::default());
        let view = world.view(&*policy);
        let mut rng = SmallRng::seed_from_u64(seed);
        let Ok(nodes) = policy.choose(&view, &request(wanted, Durability::Strict), &mut rng) else {
            return Ok(());
        };
        let mut left = Nodes::new();
        let mut failed = Nodes::new();
        for (index, &node) in nodes.iter().enumerate() {
            if lost.contains(&index) { failed.push(node) } else { left.push(node) }
        }
        if left.is_empty() || failed.is_empty() {
            return Ok(());
        }
        let repair = Request {
            wanted: failed.len() as u8,
            existing: &left,
            exclude: &failed,
            ..request(wanted, Durability::Strict)
        };
        if let Ok(new) = policy.choose(&view, &repair, &mut rng) {
            check_servers(&view, &repair, &new)?;
            let all: Nodes = left.iter().chain(&new).copied().collect();
            prop_assert!(keeps(&view, &all, policy.constraints()), "{all:?}");
        }
        // And where the lost servers may be used again, there always is a way.
        let back = Request { exclude: &[], ..repair };
        prop_assert!(policy.choose(&view, &back, &mut rng).is_ok());
    }

    /// Fast counting of rows and columns agrees with trying all splits into rounds.
    #[test]
    fn held_is_what_pairs_and_splits_say(
        world in world(),
        picks in prop::collection::btree_set(0usize..40, 0..9),
    ) {
        let policy = PolicyKind::History.build(&PolicyOptions::default());
        let view = world.view(&*policy);
        let nodes: Nodes = picks
            .into_iter()
            .filter(|&pick| pick < world.servers.len())
            .map(|pick| NodeId(pick as u32))
            .collect();
        let held = held(&view, servers_of(&view, &nodes));
        let single = [
            Constraints::ENVIRONMENT,
            Constraints::MACHINE_FUNCTION,
            Constraints::RACK,
            Constraints::ROW,
            Constraints::COLUMN,
        ];
        for constraint in single {
            prop_assert_eq!(held.contains(constraint), keeps(&view, &nodes, constraint));
        }
        if held == Constraints::ALL {
            prop_assert!(keeps(&view, &nodes, Constraints::ALL));
        }
    }

    /// The replica that is given up leaves the others no worse than any other choice would.
    #[test]
    fn surplus_leaves_the_best(
        world in world(),
        kind in policy(),
        picks in prop::collection::btree_set(0usize..40, 1..7),
    ) {
        let policy = kind.build(&PolicyOptions::default());
        let view = world.view(&*policy);
        let nodes: Nodes = picks
            .into_iter()
            .filter(|&pick| pick < world.servers.len())
            .map(|pick| NodeId(pick as u32))
            .collect();
        let Some(surplus) = policy.surplus(&view, &nodes) else {
            prop_assert!(nodes.is_empty());
            return Ok(());
        };
        if kind == PolicyKind::Stock {
            return Ok(());
        }
        let left = |left_out: usize| {
            let mut rest = nodes.clone();
            rest.remove(left_out);
            conflicts(&view, servers_of(&view, &rest), policy.constraints())
        };
        for other in 0..nodes.len() {
            prop_assert!(left(surplus) <= left(other));
        }
    }

    /// The same request, view and seed give the same servers.
    #[test]
    fn choosing_is_deterministic(world in world(), kind in policy(), wanted in 1u8..=10, seed in any::<u64>()) {
        let policy = kind.build(&PolicyOptions::default());
        let choose = |world: &World| {
            let mut rng = SmallRng::seed_from_u64(seed);
            policy.choose(&world.view(&*policy), &request(wanted, Durability::Space), &mut rng)
        };
        prop_assert_eq!(choose(&world), choose(&world));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Tenants that are reimaged together share no block while there is another choice; and where
    /// there is none, the block is placed nevertheless.
    #[test]
    fn tenants_that_go_together_are_kept_apart(world in world(), seed in any::<u64>()) {
        let policy = PolicyKind::Harvest.build(&PolicyOptions::default());
        let mut view = world.view(&*policy);
        let keys: Vec<_> = view.tenants().iter().map(|it| it.key.clone()).collect();
        let request = request(2, Durability::Strict);
        let mut rng = SmallRng::seed_from_u64(seed);
        let Ok(first) = policy.choose(&view, &request, &mut rng) else {
            return Ok(());
        };
        view.set_together(keys.iter().flat_map(|a| keys.iter().map(move |b| (a, b))));
        prop_assert!(policy.choose(&view, &request, &mut rng).is_ok());
        // Only these two go together: they meet only if nothing else can.
        let tenant = |node| view.server(node).map(|it| it.tenant.number());
        let pair = [tenant(first[0]), tenant(first[1])];
        let [Some(a), Some(b)] = pair else { return Ok(()) };
        view.set_together([(&keys[a], &keys[b])]);
        let mut second = Request { wanted: 1, existing: &first[..1], ..request };
        second.lane = Lane::Repair;
        let mut met = false;
        let mut others = false;
        for _ in 0..20 {
            let nodes = policy.choose(&view, &second, &mut rng);
            let nodes = nodes.expect("the first choice still fits");
            let chosen = view.server(nodes[0]).map(|it| it.tenant.number());
            met |= chosen == Some(b);
            others |= chosen != Some(b);
        }
        prop_assert!(!(met && others));
    }
}

#[test]
fn policies_are_chosen_by_name() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
        assert_eq!(kind.build(&PolicyOptions::default()).kind(), kind);
    }
    let error = "hdfs".parse::<PolicyKind>().expect_err("no such policy");
    assert_eq!(
        error.to_string(),
        "unknown policy `hdfs`; accepted: stock, greedy, history, harvest"
    );
}
