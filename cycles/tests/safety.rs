//! Losses compared with an enumeration of everything that can fail, and the promises of admission.

use std::num::{NonZeroU32, NonZeroU64};

use harvestfs_cycles::safety::{
    Cluster, Denied, Domain, FailureRates, Losses, Packing, Probability, RackSpec, SetupError,
    TaskGroup,
};
use proptest::prelude::*;

fn probability(value: f64) -> Probability {
    Probability::new(value).expect("a probability")
}

/// What is lost when the domains fail whose bits are set, in the order of a walk, and how probable that is. Slow and
/// obvious.
fn outcome(domain: &Domain, fails: u64, next: &mut u32, lost_already: bool) -> (u32, f64) {
    let failed = fails >> *next & 1 == 1;
    *next += 1;
    let own = domain.fails.get();
    let mut chance = if failed { own } else { 1.0 - own };
    let lost = failed || lost_already;
    let mut losses = if lost { domain.losses } else { 0 };
    for part in &domain.parts {
        let (of_part, chance_of_part) = outcome(part, fails, next, lost);
        losses += of_part;
        chance *= chance_of_part;
    }
    (losses, chance)
}

fn count(domain: &Domain) -> u32 {
    1 + domain.parts.iter().map(count).sum::<u32>()
}

fn by_enumeration(domain: &Domain) -> Vec<f64> {
    let mut probabilities = vec![0.0; 200];
    for fails in 0..1_u64 << count(domain) {
        let (losses, chance) = outcome(domain, fails, &mut 0, false);
        probabilities[losses as usize] += chance;
    }
    probabilities
}

fn tree() -> impl Strategy<Value = Domain> {
    let fails = prop::sample::select(vec![0.0, 1e-6, 0.01, 0.3, 0.5, 1.0]);
    let leaf = (fails.clone(), 0..4_u32).prop_map(|(fails, losses)| Domain {
        fails: probability(fails),
        losses,
        parts: Vec::new(),
    });
    leaf.prop_recursive(3, 14, 4, move |inner| {
        // Some parts twice, because identical ones are summed together.
        let parts = prop::collection::vec((inner, any::<bool>()), 0..4);
        (fails.clone(), 0..3_u32, parts).prop_map(|(fails, losses, parts)| Domain {
            fails: probability(fails),
            losses,
            parts: parts
                .into_iter()
                .flat_map(|(part, twice)| vec![part; 1 + usize::from(twice)])
                .collect(),
        })
    })
    .prop_filter("small enough to enumerate", |tree| count(tree) <= 14)
}

const RATES: (f64, f64, f64) = (0.01, 0.003, 0.0005);

fn rates() -> FailureRates {
    FailureRates {
        server: probability(RATES.0),
        rack: probability(RATES.1),
        environment: probability(RATES.2),
    }
}

/// Those of the paper's explanation: servers and racks.
fn without_environments() -> FailureRates {
    FailureRates {
        environment: Probability::NEVER,
        ..rates()
    }
}

fn racks(count: u32, servers: u32) -> Vec<RackSpec> {
    let rack = |number| RackSpec {
        environment: number / 4,
        servers,
        cores: 12,
        memory_mib: 32 << 10,
    };
    (0..count).map(rack).collect()
}

fn group(tasks: u32, cores: u32, memory_mib: u64) -> TaskGroup {
    TaskGroup {
        tasks: NonZeroU32::new(tasks).expect("a task"),
        cores: NonZeroU32::new(cores).expect("a core"),
        memory_mib: NonZeroU64::new(memory_mib).expect("memory"),
    }
}

#[test]
fn the_example_of_the_paper() {
    // Figure 3: 2 machines run one task, 5 run two, and one runs three.
    let server = |losses| Domain {
        fails: probability(0.01),
        losses,
        parts: Vec::new(),
    };
    let parts: Vec<Domain> = [1, 1, 2, 2, 2, 2, 2, 3].map(server).to_vec();
    let rack = Domain {
        fails: probability(0.001),
        losses: 0,
        parts,
    };
    let losses = Losses::of(&rack);
    assert_eq!(losses.most(), 15);
    for (number, expected) in by_enumeration(&rack).into_iter().enumerate() {
        assert!(
            (losses.exactly(number) - expected).abs() < 1e-15,
            "{number}"
        );
    }
    assert!(losses.exactly(15) > 0.001 && losses.more_than(14) == losses.exactly(15));
    // Even numbers are more probable than odd ones: figure 4 looks like a saw.
    assert!(losses.exactly(2) > losses.exactly(1) && losses.exactly(4) > losses.exactly(5));
}

proptest! {
    #[test]
    fn convolution_gives_what_enumeration_gives(tree in tree()) {
        let losses = Losses::of(&tree);
        let expected = by_enumeration(&tree);
        for (number, expected) in expected.iter().enumerate() {
            prop_assert!((losses.exactly(number) - expected).abs() < 1e-12, "{number} {losses:?}");
        }
        let tail: f64 = expected.iter().skip(3).sum();
        prop_assert!((losses.more_than(2) - tail).abs() < 1e-12);
    }

    /// However jobs come: no server gives more than it has, each bag is safe, and a denied job leaves nothing behind.
    #[test]
    fn what_is_admitted_is_safe_and_fits(
        jobs in prop::collection::vec(
            prop::collection::vec((1..40_u32, 1..5_u32, 1..9_000_u64), 1..3), 1..6),
        spread in any::<bool>(),
        threshold in prop::sample::select(vec![1e-2, 1e-4, 1e-6, 1e-12]),
    ) {
        let packing = if spread { Packing::Spread } else { Packing::FirstFit };
        let mut cluster = Cluster::new(&racks(8, 3), rates(), threshold, packing).unwrap();
        let all = |cluster: &Cluster| cluster.free().iter().fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
        let whole = all(&cluster);
        let mut given = (0, 0);
        for job in jobs {
            let before = (cluster.free().to_vec(), cluster.reserved());
            let groups: Vec<TaskGroup> = job.iter().map(|it| group(it.0, it.1, it.2)).collect();
            match cluster.admit(&groups) {
                Ok(admitted) => {
                    for (one, group) in admitted.iter().zip(&groups) {
                        prop_assert!(one.probability < threshold, "{one:?}");
                        prop_assert!(one.tasks >= group.tasks.get() as usize && one.backups <= one.tasks);
                        given.0 += u64::from(group.tasks.get() * group.cores.get());
                        given.1 += u64::from(group.tasks.get()) * group.memory_mib.get();
                    }
                }
                Err(Denied::NotSafe { probability, .. }) => {
                    prop_assert!(probability >= threshold);
                    prop_assert_eq!((cluster.free().to_vec(), cluster.reserved()), before);
                }
                Err(_) => prop_assert_eq!((cluster.free().to_vec(), cluster.reserved()), before),
            }
            let (free, reserved) = (all(&cluster), cluster.reserved());
            prop_assert_eq!(free.0 + reserved.0 + given.0, whole.0);
            prop_assert_eq!(free.1 + reserved.1 + given.1, whole.1);
        }
    }
}

#[test]
fn none_of_many_being_lost_may_be_too_improbable_for_a_number() {
    let rack = |servers: usize, fails| Domain {
        fails: probability(0.001),
        losses: 0,
        parts: vec![
            Domain {
                fails: probability(fails),
                losses: 1,
                parts: Vec::new(),
            };
            servers
        ],
    };
    let losses = Losses::of(&rack(100_000, 0.5));
    let close = |one: f64, other: f64| (one - other).abs() < 1e-9 * other;
    // By Stirling's formula: 1 in sqrt(pi n / 2) is the share of the middle of n fair coins, but for 1 in 4 n.
    let middle = 0.999 * (std::f64::consts::PI * 50_000.0).sqrt().recip() * (1.0 - 1.0 / 400_000.0);
    assert!(close(losses.exactly(50_000), middle), "{losses:?}");
    assert!(close(
        losses.more_than(49_999),
        0.001 + (0.999 + middle) / 2.0
    ));
    assert!(losses.more_than(49_000) > 0.999_999);
    assert!(close(losses.more_than(60_000), 0.001));
    assert_eq!(losses.exactly(0), 0.0);
    for fails in [1e-300, 1e-9, 0.02, 0.999, 1.0 - 1e-12] {
        let losses = Losses::of(&rack(10_000, fails));
        let counts = 0..=losses.most();
        let mean: f64 = counts.map(|it| it as f64 * losses.exactly(it)).sum();
        assert!(
            close(mean, 10_000.0 * (0.001 + 0.999 * fails)),
            "{fails}: {mean}"
        );
    }
}

#[test]
fn spreading_takes_fewer_backups_than_first_fit() {
    let backups = |packing| {
        let mut cluster =
            Cluster::new(&racks(20, 20), without_environments(), 1e-4, packing).unwrap();
        let admitted = cluster.admit(&[group(200, 2, 4_096)]).unwrap();
        admitted[0].backups
    };
    let (first_fit, spread) = (backups(Packing::FirstFit), backups(Packing::Spread));
    assert!(spread * 2 < first_fit, "{spread} {first_fit}");
}

#[test]
fn jobs_share_backups_that_are_large_enough() {
    let rates = without_environments();
    let empty = Cluster::new(&racks(20, 20), rates, 1e-6, Packing::Spread).unwrap();
    let mut cluster = empty.clone();
    let first = cluster.admit(&[group(100, 2, 1_024)]).unwrap();
    // Tasks of that size go into the same bag, for fewer backups than alone; small ones cost less in a bag of their own.
    let second = cluster.admit(&[group(20, 2, 1_024)]).unwrap();
    let alone = empty.clone().admit(&[group(20, 2, 1_024)]).unwrap();
    let small = cluster.admit(&[group(20, 1, 16)]).unwrap();
    assert_eq!((first[0].bag, second[0].bag, second[0].tasks), (0, 0, 120));
    assert!(second[0].backups < first[0].backups + alone[0].backups);
    assert_eq!(small[0].bag, 1);
}

#[test]
fn a_bag_that_grows_may_need_fewer_backups() {
    let mut cluster = Cluster::new(&racks(8, 3), rates(), 0.01, Packing::FirstFit).unwrap();
    cluster.admit(&[group(26, 1, 628)]).unwrap();
    cluster.admit(&[group(38, 1, 4_502)]).unwrap();
    let groups = [group(30, 1, 2_989), group(1, 3, 1)];
    // All backups are placed from scratch for the last task, in better places.
    let admitted = cluster.admit(&groups).unwrap();
    let (large, larger) = (admitted[0], admitted[1]);
    assert_eq!(large.bag, larger.bag);
    assert!(larger.backups < large.backups, "{large:?} {larger:?}");
}

#[test]
fn what_cannot_be_safe_is_denied_with_the_reason() {
    let mut cluster = Cluster::new(&racks(1, 4), rates(), 1e-6, Packing::FirstFit).unwrap();
    assert_eq!(cluster.admit(&[]), Err(Denied::NoTasks));
    let large = cluster.admit(&[group(1, 13, 1)]).unwrap_err();
    assert_eq!(
        large.to_string(),
        "1 tasks of 13 cores and 1 MiB do not fit"
    );
    // One rack: all tasks and backups are lost with it.
    let one_rack = cluster.admit(&[group(4, 1, 1)]).unwrap_err();
    assert!(matches!(one_rack, Denied::NotSafe { backups: 4, probability } if probability > 0.003));
    let error = |racks: &[RackSpec], threshold| {
        Cluster::new(racks, rates(), threshold, Packing::Spread).unwrap_err()
    };
    assert_eq!(error(&[], 0.1), SetupError::NoServer);
    assert!(matches!(
        error(&racks(1, 1), f64::NAN),
        SetupError::BadThreshold(_)
    ));
    assert_eq!(Probability::new(1.1), None);
}
