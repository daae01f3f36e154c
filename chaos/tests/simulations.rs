//! Small simulations: the same arguments give the same result, and policies compare as they should.

use std::ops::ControlFlow;

use harvestfs_chaos::datacentre::profile::{PROFILES, Profile};
use harvestfs_chaos::datacentre::{Datacentre, generate};
use harvestfs_chaos::simulate::availability::{self, Load};
use harvestfs_chaos::simulate::durability::{
    self, HISTORY_MONTHS, Options, Record, SimulationError,
};
use harvestfs_chaos::simulate::history::History;
use harvestfs_placement::{PolicyKind, PolicyOptions};
use harvestfs_telemetry::scaling::Scaling;

/// A small datacentre whose servers are reimaged often and many at a time, so that a few thousand blocks
/// show differences.
fn restless() -> Datacentre {
    let profile = Profile {
        servers: 1_500,
        tenants: 150,
        ..PROFILES[3].clone()
    };
    generate(&profile).expect("a draw agrees with the paper")
}

fn options(policy: PolicyKind, replication: u8) -> Options {
    Options {
        policy,
        policy_options: PolicyOptions::default(),
        replication,
        blocks: 20_000,
        years: 1,
        seed: 7,
        fill: 0.5,
        repairs_per_hour: 30,
        urgent_repairs_per_hour: 300,
        detection_ms: None,
    }
}

fn run(history: &History<'_>, options: &Options) -> Record {
    durability::run(history, options, &mut |_| ControlFlow::Continue(()))
        .expect("there is room for every block")
}

#[test]
fn the_same_seed_gives_the_same_result() {
    let datacentre = restless();
    let history = History::new(&datacentre, HISTORY_MONTHS);
    for policy in [PolicyKind::Stock, PolicyKind::Harvest] {
        let result = || Record {
            placement_us_per_block: 0.0,
            wall_s: 0.0,
            ..run(&history, &options(policy, 3))
        };
        assert_eq!(result(), result());
    }
}

#[test]
fn policies_compare_as_the_paper_says() {
    let datacentre = restless();
    let history = History::new(&datacentre, HISTORY_MONTHS);
    let of = |policy, replication| run(&history, &options(policy, replication));
    let stock = of(PolicyKind::Stock, 3);
    let by_history = of(PolicyKind::History, 3);
    let harvest = of(PolicyKind::Harvest, 3);
    let two = of(PolicyKind::Harvest, 2);
    println!("{stock:?}\n{by_history:?}\n{harvest:?}\n{two:?}");
    assert!(stock.lost_blocks > 0);
    assert!(by_history.lost_blocks < stock.lost_blocks);
    assert_eq!(harvest.lost_blocks, 0);
    assert!(two.lost_blocks <= stock.lost_blocks);
    for it in [&stock, &by_history, &harvest, &two] {
        assert!(it.lost_blocks as f64 <= it.lost_blocks_bound, "{it:?}");
    }
    // The bound distinguishes good placement from bad, too.
    assert!(
        harvest.lost_blocks_bound * 100.0 < stock.lost_blocks_bound,
        "{harvest:?} {stock:?}"
    );
    // Algorithm 2 pays for its safety with repairs; harvest does not.
    assert!(by_history.repairs > stock.repairs);
    assert!(harvest.repairs < stock.repairs);
    assert!(harvest.single_replica_block_hours <= stock.single_replica_block_hours);
}

#[test]
fn more_replicas_and_earlier_detection_lose_less() {
    let datacentre = restless();
    let history = History::new(&datacentre, HISTORY_MONTHS);
    let of = |replication, detection_ms| {
        let options = Options {
            detection_ms: Some(detection_ms),
            ..options(PolicyKind::Stock, replication)
        };
        run(&history, &options).lost_blocks
    };
    let hour_ms = 3_600_000;
    let (one, two, three) = (of(1, hour_ms), of(2, hour_ms), of(3, hour_ms));
    assert!(one > two && two > three, "{one} {two} {three}");
    assert!(of(2, 0) < two);
}

#[test]
fn nothing_fails_while_nobody_is_busy_and_everything_while_all_are() {
    let datacentre = restless();
    let failed = |target, policy, replication| {
        let load = Load::new(&datacentre, Scaling::Linear, target, 0.0, 1);
        let options = availability::Options {
            policy,
            policy_options: PolicyOptions::default(),
            replication,
            blocks: 2_000,
            seed: 1,
            fill: 0.5,
        };
        let record =
            availability::run(&load, &options, &mut |_| ControlFlow::Continue(())).expect("fits");
        assert!((record.utilisation - target).abs() < 0.02, "{record:?}");
        record.failed_share
    };
    assert!(failed(0.05, PolicyKind::Stock, 3) < 1e-3);
    let stock = failed(0.5, PolicyKind::Stock, 3);
    let harvest = failed(0.5, PolicyKind::Harvest, 3);
    assert!(stock > 0.0 && harvest < stock, "{stock} {harvest}");
    assert!(failed(0.95, PolicyKind::Stock, 3) > 0.5);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let datacentre = restless();
    let history = History::new(&datacentre, HISTORY_MONTHS);
    let good = options(PolicyKind::Stock, 3);
    let bad = [
        Options {
            years: 3,
            ..good.clone()
        },
        Options {
            fill: 1.5,
            ..good.clone()
        },
        Options {
            fill: f64::NAN,
            ..good.clone()
        },
        Options {
            replication: 0,
            ..good.clone()
        },
        Options {
            blocks: 0,
            ..good.clone()
        },
        Options {
            repairs_per_hour: 0,
            ..good.clone()
        },
    ];
    for options in bad {
        let result = durability::run(&history, &options, &mut |_| ControlFlow::Continue(()));
        assert!(
            matches!(result, Err(SimulationError::Option(_))),
            "{options:?}"
        );
    }
    let interrupted = durability::run(&history, &good, &mut |_| ControlFlow::Break(()));
    assert_eq!(interrupted, Err(SimulationError::Interrupted));
}
