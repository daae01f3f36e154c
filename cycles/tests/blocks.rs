//! The bound for losing a block, compared with the distribution of its losses and with random reimages.

use std::collections::BTreeSet;

use harvestfs_cycles::safety::{
    BlockReplica, BlockRisk, Domain, Losses, Probability, REPAIRED_WITHIN_S,
};
use harvestfs_telemetry::coincidence::{PARTS, Week};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

fn replica(environment: u32, reimages_per_month: f64, together: f64) -> BlockReplica {
    BlockReplica {
        environment,
        reimages_per_month,
        together,
    }
}

/// How many of the replicas are lost in such a time: environments fail, each with all that is in it, and servers alone.
fn losses(replicas: &[BlockReplica], share: f64) -> Losses {
    let chance = |value: f64| Probability::new(value.min(1.0)).expect("it is from 0 to 1");
    let numbers: BTreeSet<u32> = replicas.iter().map(|it| it.environment).collect();
    let parts = numbers.into_iter().map(|number| {
        let own = || replicas.iter().filter(|it| it.environment == number);
        let rate = |it: &BlockReplica, part: f64| it.reimages_per_month * share * part;
        let together = own().map(|it| rate(it, it.together)).fold(0.0, f64::max);
        let servers = own().map(|it| Domain {
            fails: chance(rate(it, 1.0 - it.together)),
            losses: 1,
            parts: Vec::new(),
        });
        Domain {
            fails: chance(together),
            losses: 0,
            parts: servers.collect(),
        }
    });
    Losses::of(&Domain {
        fails: Probability::NEVER,
        losses: 0,
        parts: parts.collect(),
    })
}

proptest! {
    #[test]
    fn what_is_computed_is_the_end_of_the_distribution(
        replicas in prop::collection::vec((0..3_u32, 0.0..5.0_f64, 0.0..=1.0_f64), 1..6),
        share in 0.0..0.5_f64,
    ) {
        let replicas: Vec<BlockReplica> = replicas
            .into_iter()
            .map(|(environment, rate, together)| replica(environment, rate, together))
            .collect();
        let risk = BlockRisk::new(&replicas);
        let all = losses(&replicas, share).exactly(replicas.len());
        prop_assert!((risk.at_once(share) - all).abs() <= 1e-12 + 1e-9 * all, "{} {all}", risk.at_once(share));
        // An additional replica is never worse. If it is reimaged together with others more often than those with each
        // other, the bound grows nevertheless: it does not know which replicas are reimaged together.
        let (first, others) = (&replicas[0], &replicas[1..]);
        let together = |it: &BlockReplica| it.reimages_per_month * it.together;
        let mut same = others.iter().filter(|it| it.environment == first.environment).peekable();
        if same.peek().is_none() || same.any(|it| together(it) >= together(first)) {
            let fewer = BlockRisk::new(others).at_once(share);
            prop_assert!(risk.at_once(share) <= fewer + 1e-12, "{} {fewer}", risk.at_once(share));
        }
    }
}

#[test]
fn what_shares_an_environment_is_lost_with_it() {
    let week = Week::default();
    let year = |replicas: &[BlockReplica]| BlockRisk::new(replicas).in_a_year(&week);
    let apart = year(&[
        replica(0, 0.3, 0.5),
        replica(1, 0.3, 0.5),
        replica(2, 0.3, 0.5),
    ]);
    let shared = year(&[
        replica(0, 0.3, 0.5),
        replica(0, 0.3, 0.5),
        replica(2, 0.3, 0.5),
    ]);
    assert!(shared > 100.0 * apart, "{shared} {apart}");
    // 2 x 2 h of 0.3 a month, half of them with others: at least one of either, to the power of three, 12 times in a day.
    let half = 0.3_f64 / 180.0 / 2.0;
    let expected = 365.25 * 12.0 * (1.0 - (1.0 - half).powi(2)).powi(3);
    assert!((apart / expected - 1.0).abs() < 1e-6, "{apart} {expected}");
    assert!((year(&[]) - 1.0).abs() < f64::EPSILON);
    assert!(BlockRisk::new(&[replica(0, 0.3, 0.5)]).within(3_600, &week) < 0.3 / 180.0);
}

/// Reimages of a year in seconds, most of them in working hours: of two environments, at times all of one.
fn year(rng: &mut SmallRng, rate: f64, together: f64) -> [Vec<f64>; 3] {
    const YEAR_S: f64 = 365.25 * 86_400.0;
    let mut at_s: [Vec<f64>; 3] = Default::default();
    let mut draw = |rng: &mut SmallRng, per_month: f64, servers: &[usize]| {
        let step_s = 30.0 * 86_400.0 / per_month;
        let mut now_s = 0.0;
        loop {
            now_s -= step_s * (1.0 - rng.random::<f64>()).ln();
            if now_s > YEAR_S {
                return;
            }
            // Eight hours of each day have four of five.
            let day_s = (now_s / 86_400.0_f64).floor() * 86_400.0;
            let hour = if rng.random_bool(0.8) {
                rng.random_range(8.0..16.0)
            } else {
                (16.0 + rng.random_range(0.0..16.0_f64)) % 24.0
            };
            for &server in servers {
                at_s[server].push(day_s + hour * 3_600.0);
            }
        }
    };
    // Two servers of one environment, and one of another.
    draw(rng, rate * together, &[0, 1]);
    draw(rng, rate * (1.0 - together), &[0]);
    draw(rng, rate * (1.0 - together), &[1]);
    draw(rng, rate, &[2]);
    at_s
}

#[test]
fn blocks_are_lost_no_more_often_than_the_bound_says() {
    let (rate, together, years) = (20.0, 0.3, 3_000);
    let mut rng = SmallRng::seed_from_u64(7);
    let mut counts = [0; PARTS];
    for (part, count) in counts.iter_mut().enumerate() {
        *count = if (4..8).contains(&(part % 12)) {
            2_000
        } else {
            250
        };
    }
    let week = Week::of(&counts);
    let replicas = [
        replica(0, rate, together),
        replica(0, rate, together),
        replica(1, rate, together),
    ];
    let bound = BlockRisk::new(&replicas);
    let expected: f64 = week.pairs().map(|it| bound.at_once(it)).sum::<f64>() * 365.25 / 7.0;
    let mut losses = 0;
    for _ in 0..years {
        let at_s = year(&mut rng, rate, together);
        let near = |times: &[f64], at_s: f64| {
            let within = f64::from(REPAIRED_WITHIN_S);
            times.iter().any(|it| (it - at_s).abs() <= within / 2.0)
        };
        losses += at_s[0]
            .iter()
            .filter(|&&it| near(&at_s[1], it) && near(&at_s[2], it))
            .count();
    }
    let seen = losses as f64 / f64::from(years);
    // Not far from it either: pairs of parts overlap, and are longer than the time to repair.
    assert!(
        seen > 0.01 && seen < expected && expected < 40.0 * seen,
        "{seen} a year, at most {expected}"
    );
}
