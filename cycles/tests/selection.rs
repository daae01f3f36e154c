//! Algorithm 1 and the thresholds against slow descriptions of them.

use std::num::{NonZeroU32, NonZeroU64};

use harvestfs_cycles::job::{Capacities, HistoryError, JobType, PastRun, Thresholds};
use harvestfs_cycles::select::{
    ClassHistory, ClassId, ClusterError, Headrooms, LargerThanCluster, Selection, Server, Weights,
};
use harvestfs_telemetry::profile::Pattern;
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const PATTERNS: [Pattern; 3] = [Pattern::Periodic, Pattern::Constant, Pattern::Unpredictable];

fn class(pattern: Pattern, average: f64, peak: f64) -> ClassHistory {
    ClassHistory {
        pattern,
        average_cpu_share: average,
        peak_cpu_share: peak,
    }
}

fn server(class: u32, cores: u32) -> Server {
    Server {
        class: ClassId(class),
        cores: NonZeroU32::new(cores).expect("a core"),
    }
}

fn need(cores: u64) -> NonZeroU64 {
    NonZeroU64::new(cores).expect("a core")
}

fn rng(seed: u64) -> SmallRng {
    SmallRng::seed_from_u64(seed)
}

/// Lines 3 to 18 as they are printed, over every server, with nothing kept between two calls.
fn by_the_letter(
    classes: &[ClassHistory],
    servers: &[(Server, u32)],
    reserve_share: f64,
    job_type: JobType,
    need: f64,
    rng: &mut SmallRng,
) -> Vec<ClassId> {
    let weight = |pattern: Pattern| match (job_type, pattern) {
        (JobType::Long, Pattern::Constant)
        | (JobType::Medium, Pattern::Periodic)
        | (JobType::Short, Pattern::Unpredictable) => 9.0,
        (JobType::Medium, Pattern::Constant)
        | (JobType::Long | JobType::Short, Pattern::Periodic) => 3.0,
        _ => 1.0,
    };
    let mut left = Vec::new();
    for (number, class) in classes.iter().enumerate() {
        let (mut cores, mut used) = (0.0, 0.0);
        for (server, millicores) in servers {
            if server.class.0 as usize == number {
                cores += f64::from(server.cores.get());
                used += f64::from(*millicores) / 1_000.0;
            }
        }
        if cores == 0.0 {
            continue;
        }
        let current = used / cores;
        let headroom = match job_type {
            JobType::Short => 1.0 - current,
            JobType::Medium => 1.0 - f64::max(class.average_cpu_share, current),
            JobType::Long => 1.0 - f64::max(class.peak_cpu_share, current),
        };
        let room = (headroom - reserve_share) * cores;
        if room > 0.0 {
            left.push((ClassId(number as u32), room, room * weight(class.pattern)));
        }
    }
    let mut draw = |from: &mut Vec<(ClassId, f64, f64)>| {
        let mut at = rng.random::<f64>() * from.iter().map(|it| it.2).sum::<f64>();
        for place in 0..from.len() {
            if at < from[place].2 || place + 1 == from.len() {
                return from.remove(place);
            }
            at -= from[place].2;
        }
        unreachable!("one was drawn")
    };
    let mut fitting = left.clone();
    fitting.retain(|it| it.1 >= need);
    if !fitting.is_empty() {
        return vec![draw(&mut fitting).0];
    }
    if left.iter().map(|it| it.1).sum::<f64>() < need {
        return Vec::new();
    }
    let (mut picked, mut room) = (Vec::new(), 0.0);
    while room < need && !left.is_empty() {
        let (class, of_class, _) = draw(&mut left);
        picked.push(class);
        room += of_class;
    }
    picked
}

proptest! {
    #[test]
    fn the_choice_is_that_of_the_letter(
        shares in prop::collection::vec((0..3_usize, 0.0..1.0f64, 0.0..1.0f64), 1..8),
        servers in prop::collection::vec((any::<u32>(), 1..20_u32), 0..40),
        reports in prop::collection::vec((0..40_usize, 0..25_000_u32), 0..120),
        job_type in prop::sample::select(JobType::ALL.to_vec()),
        cores in 1..300_u64,
        reserve_share in prop::sample::select(vec![0.0, 1.0 / 3.0]),
        seed in any::<u64>(),
    ) {
        let classes: Vec<ClassHistory> = shares
            .iter()
            .map(|&(pattern, a, b)| class(PATTERNS[pattern], a.min(b), a.max(b)))
            .collect();
        let servers: Vec<Server> = servers
            .iter()
            .map(|&(number, cores)| server(number % classes.len() as u32, cores))
            .collect();
        let mut rooms = Headrooms::new(&classes, &servers, reserve_share).unwrap();
        let mut slow: Vec<(Server, u32)> = servers.iter().map(|&it| (it, 0)).collect();
        for (number, millicores) in reports {
            rooms.uses(number, millicores);
            if let Some((server, used)) = slow.get_mut(number) {
                *used = millicores.min(server.cores.get() * 1_000);
            }
        }
        match rooms.select(job_type, need(cores), &Weights::default(), &mut rng(seed)) {
            Ok(selection) => {
                let slow = by_the_letter(
                    &classes, &slow, reserve_share, job_type, cores as f64, &mut rng(seed),
                );
                prop_assert_eq!(selection.classes(), &slow[..]);
                let room = |it: &ClassId| rooms.room_cores(job_type, *it);
                let sum: f64 = slow.iter().map(room).sum();
                match selection {
                    Selection::None => {}
                    Selection::One(only) => prop_assert!(room(&only) >= cores as f64),
                    Selection::Several(several) => {
                        prop_assert!(several.len() > 1 && sum >= cores as f64 - 1e-6);
                        // None would do alone, and none of them was one too many.
                        prop_assert!(sum - several.last().map_or(0.0, room) < cores as f64);
                        let most = (0..classes.len() as u32).map(|it| room(&ClassId(it)));
                        prop_assert!(most.fold(0.0, f64::max) < cores as f64);
                    }
                }
            }
            Err(LargerThanCluster { cluster_cores, .. }) => prop_assert!(cores > cluster_cores),
        }
    }

    #[test]
    fn thresholds_divide_work_as_capacity_is(
        runs in prop::collection::vec((1..60_u32, 1..1_000_u32), 1..40),
        capacities in (0.0..1.0f64, 0.0..1.0f64, 0.01..1.0f64),
    ) {
        let runs: Vec<PastRun> = runs
            .iter()
            .map(|&(length, work)| PastRun {
                length_s: f64::from(length),
                work_core_s: f64::from(work),
            })
            .collect();
        let (unpredictable, periodic, constant) = capacities;
        let capacities = Capacities { unpredictable, periodic, constant };
        let found = Thresholds::from_history(&runs, capacities).unwrap();
        let all = unpredictable + periodic + constant;
        let work_of = |thresholds: Thresholds, job_type: JobType| {
            let of_type = runs.iter().filter(|it| thresholds.job_type(Some(it.length_s)) == job_type);
            of_type.map(|it| it.work_core_s).sum::<f64>()
        };
        let work: f64 = runs.iter().map(|it| it.work_core_s).sum();
        let distances = |thresholds: Thresholds| [
            (work_of(thresholds, JobType::Short) - unpredictable / all * work).abs(),
            (work_of(thresholds, JobType::Long) - constant / all * work).abs(),
        ];
        let of_found = distances(found);
        for short in 0..=60 {
            for long in short..=60 {
                let other = Thresholds::new(f64::from(short) + 0.5, f64::from(long) + 0.5).unwrap();
                for (found, other) in of_found.into_iter().zip(distances(other)) {
                    prop_assert!(found <= other + 1e-6 * work, "{found} {other}");
                }
            }
        }
    }
}

#[test]
fn classes_are_drawn_by_weighted_room() {
    // Room for a long job: 90 of constant (weight 9), 60 of periodic (3), none of unpredictable.
    let classes = [
        class(Pattern::Constant, 0.05, 0.1),
        class(Pattern::Periodic, 0.2, 0.4),
        class(Pattern::Unpredictable, 0.3, 1.0),
    ];
    let servers: Vec<Server> = (0..3).map(|it| server(it, 100)).collect();
    let rooms = Headrooms::new(&classes, &servers, 0.0).unwrap();
    let mut rng = rng(1);
    let mut constant = 0;
    for _ in 0..10_000 {
        let selected = rooms.select(JobType::Long, need(50), &Weights::default(), &mut rng);
        match selected.unwrap() {
            Selection::One(ClassId(0)) => constant += 1,
            Selection::One(ClassId(1)) => {}
            other => panic!("{other:?}"),
        }
    }
    let expected = 10_000.0 * 90.0 * 9.0 / (90.0 * 9.0 + 60.0 * 3.0);
    assert!(
        (f64::from(constant) - expected).abs() < 150.0,
        "{constant} of {expected}"
    );
    let both = rooms.select(JobType::Long, need(100), &Weights::default(), &mut rng);
    assert_eq!(both.unwrap().classes().len(), 2);
    let none = rooms.select(JobType::Long, need(151), &Weights::default(), &mut rng);
    assert_eq!(none, Ok(Selection::None));
}

#[test]
fn headroom_is_what_the_paper_says() {
    let mut rooms =
        Headrooms::new(&[class(Pattern::Periodic, 0.3, 0.7)], &[server(0, 10)], 0.0).unwrap();
    let headrooms = |rooms: &Headrooms| JobType::ALL.map(|it| rooms.headroom(it, ClassId(0)));
    assert_eq!(headrooms(&rooms), [1.0, 0.7, 1.0 - 0.7]);
    rooms.uses(0, 5_000);
    assert_eq!(headrooms(&rooms), [0.5, 0.5, 1.0 - 0.7]);
    rooms.uses(0, 8_000);
    assert_eq!(headrooms(&rooms), [1.0 - 0.8; 3]);
    rooms.uses(0, u32::MAX);
    assert_eq!(headrooms(&rooms), [0.0; 3]);
    assert_eq!(rooms.headroom(JobType::Short, ClassId(1)), 0.0);
}

#[test]
fn what_can_never_run_is_an_error() {
    let one = [class(Pattern::Constant, 0.1, 0.1)];
    let rooms = Headrooms::new(&one, &[server(0, 12)], 1.0 / 3.0).unwrap();
    let select = |cores| {
        rooms.select(
            JobType::Short,
            need(cores),
            &Weights::default(),
            &mut rng(1),
        )
    };
    assert_eq!(select(8), Ok(Selection::One(ClassId(0))));
    let error = select(9).unwrap_err();
    assert_eq!(error.cluster_cores, 8);
    assert_eq!(
        Headrooms::new(&[], &[], 0.0).unwrap_err(),
        ClusterError::NoClasses
    );
    let unknown = Headrooms::new(&one, &[server(0, 1), server(1, 1)], 0.0).unwrap_err();
    assert_eq!(unknown.to_string(), "server 1 is of class 1, of 1 classes");
    let share = Headrooms::new(&[class(Pattern::Constant, 0.1, f64::NAN)], &[], 0.0);
    assert!(matches!(share, Err(ClusterError::BadShare(_))));
    assert!(Weights::new([1.0, 2.0, 1.0]).is_err() && Weights::new([1.0, 1.0, 1.0]).is_ok());
}

#[test]
fn types_go_by_the_last_run() {
    let of = |last| Thresholds::PAPER.job_type(last);
    assert_eq!(of(None), JobType::Medium);
    assert_eq!(
        [172.9, 173.0, 433.0, 433.1].map(|last| of(Some(last))),
        [
            JobType::Short,
            JobType::Medium,
            JobType::Medium,
            JobType::Long
        ]
    );
    assert!(Thresholds::new(2.0, 1.0).is_err() && Thresholds::new(0.0, 1.0).is_err());
    let capacities = Capacities {
        unpredictable: 0.0,
        periodic: 0.0,
        constant: 0.0,
    };
    let run = PastRun {
        length_s: 1.0,
        work_core_s: 1.0,
    };
    let error =
        |runs: &[PastRun], capacities| Thresholds::from_history(runs, capacities).unwrap_err();
    assert_eq!(error(&[run], capacities), HistoryError::NoCapacity);
    let constant = Capacities {
        constant: 1.0,
        ..capacities
    };
    assert_eq!(error(&[], constant), HistoryError::NoRuns);
    let bad = PastRun {
        work_core_s: f64::INFINITY,
        ..run
    };
    assert_eq!(error(&[run, bad], constant), HistoryError::BadRun(1));
    // Only constant classes: every job is long.
    let only = Thresholds::from_history(&[run], constant).unwrap();
    assert_eq!(only.job_type(Some(1.0)), JobType::Long);
}

/// Beside a very large job, all small ones are equally far from a share of the work.
#[test]
fn thresholds_are_in_order_also_where_work_is_lost_in_rounding() {
    let run = |length_s: f64, work_core_s: f64| PastRun {
        length_s,
        work_core_s,
    };
    let runs = [run(1.0, 1.0), run(2.0, 1.0), run(3.0, 1e20)];
    let capacities = Capacities {
        unpredictable: 1e-20,
        periodic: 0.4,
        constant: 0.6,
    };
    let found = Thresholds::from_history(&runs, capacities).unwrap();
    assert_eq!((found.short_below_s(), found.long_above_s()), (1.5, 1.5));
}
