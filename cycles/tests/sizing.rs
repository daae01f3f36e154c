//! The number of volunteers that is decided online, compared with all possible numbers.

use harvestfs_cycles::sizing::{
    Controller, Goal, Interval, Nodes, NodesError, Outcome, Rates, Size, WORKLOADS, Workload,
    simulate,
};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// 6 dedicated nodes and 36 servers with interactive owners: mostly idle, with bursts of half a minute.
fn nodes(seed: u64) -> Nodes {
    let mut rng = SmallRng::seed_from_u64(seed);
    let owners = (0..36)
        .map(|_| {
            let level: f64 = rng.random_range(0.03..0.22);
            let sample = |_| {
                let burst = rng.random::<f64>() < level;
                if burst {
                    rng.random_range(0.3..1.0)
                } else {
                    rng.random_range(0.0..0.1)
                }
            };
            (0..500).map(sample).collect()
        })
        .collect();
    Nodes::new(6, 4, 30.0, owners).expect("six nodes and owners with samples")
}

fn all(nodes: &Nodes, workload: &Workload, rates: &Rates) -> Vec<Outcome> {
    let sizes = 0..=nodes.volunteers();
    sizes
        .map(|size| simulate(nodes, workload, rates, Size::Fixed(size)))
        .collect()
}

#[test]
fn what_is_decided_costs_nearly_as_little_as_the_best_size() {
    for (rates, goal, aim) in [
        (Rates::PRICES, Goal::Cost, 0.05),
        (Rates::POWER, Goal::Energy, 0.03),
    ] {
        let mut errors = Vec::new();
        for workload in &WORKLOADS {
            let nodes = nodes(1);
            let tried = all(&nodes, workload, &rates);
            let best = tried.iter().map(|it| it.cost).fold(f64::INFINITY, f64::min);
            let decided = simulate(&nodes, workload, &rates, Size::Decided(goal));
            errors.push(decided.cost / best - 1.0);
        }
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        assert!(mean < aim, "{goal:?} {errors:?}");
    }
}

#[test]
fn deadlines_are_met_with_few_volunteers() {
    for workload in &WORKLOADS {
        let nodes = nodes(2);
        let tried = all(&nodes, workload, &Rates::PRICES);
        let least_s = tried
            .iter()
            .map(|it| it.length_s)
            .fold(f64::INFINITY, f64::min);
        for share in [0.2, 0.5, 0.8] {
            let deadline_s = least_s + share * (tried[0].length_s - least_s);
            let goal = Goal::Deadline(deadline_s);
            let decided = simulate(&nodes, workload, &Rates::PRICES, Size::Decided(goal));
            let name = workload.name;
            assert!(
                decided.length_s <= deadline_s,
                "{name} {share}: {decided:?} {deadline_s}"
            );
            assert!(
                decided.length_s > 0.8 * deadline_s,
                "{name} {share}: {decided:?} {deadline_s}"
            );
        }
    }
}

#[test]
fn a_fixed_size_is_kept_and_disks_limit_what_more_volunteers_add() {
    let nodes = nodes(3);
    let [grep, pi] = [WORKLOADS[1], WORKLOADS[2]];
    let outcome = |workload, size| simulate(&nodes, workload, &Rates::PRICES, Size::Fixed(size));
    assert_eq!(outcome(&pi, 7).volunteers.round(), 7.0);
    assert!(outcome(&pi, 36).length_s < 0.4 * outcome(&pi, 6).length_s);
    assert!(outcome(&grep, 36).length_s > 0.9 * outcome(&grep, 18).length_s);
    assert!(outcome(&grep, 36).cost > 1.3 * outcome(&grep, 18).cost);
}

#[test]
fn the_curve_is_found_step_by_step() {
    let mut controller = Controller::new(Goal::Cost, Rates::PRICES, 2, 4.0);
    let volunteers = [4.0; 30];
    assert_eq!(controller.decide(&volunteers), 0);
    // The profile: disks are used to a fifth. One could feed 16 cores more, both 32.
    let profile = Interval {
        potential: 8.0,
        actual: 8.0,
        busiest_disk_share: 0.2,
        disk_share: 0.2,
        done_share: 0.01,
    };
    controller.observe(&profile);
    assert_eq!(controller.decide(&volunteers), 4);
    controller.observe(&Interval {
        potential: 24.0,
        actual: 24.0,
        busiest_disk_share: 0.7,
        disk_share: 0.6,
        done_share: 0.04,
    });
    assert_eq!(controller.decide(&volunteers), 6);
    // Saturated before that: nothing beyond is expected to add anything.
    controller.observe(&Interval {
        potential: 32.0,
        actual: 25.0,
        busiest_disk_share: 1.0,
        disk_share: 0.9,
        done_share: 0.07,
    });
    assert_eq!(controller.decide(&volunteers), 4);
}

#[test]
fn nodes_that_make_no_sense_are_refused() {
    let error = |dedicated, owners| Nodes::new(dedicated, 4, 30.0, owners).unwrap_err();
    assert_eq!(error(0, Vec::new()), NodesError::NoDedicated);
    assert_eq!(
        error(1, vec![vec![0.1], Vec::new()]),
        NodesError::NoSamples(1)
    );
    assert_eq!(
        Nodes::new(1, 4, 0.0, vec![vec![0.1]]).unwrap_err(),
        NodesError::NoSamples(0)
    );
}
