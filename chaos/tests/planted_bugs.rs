//! The simulator finds bugs: each that can be planted, but for a few, within a bounded number of seeds.
//!
//! To look longer, and for others: `HARVESTFS_TESTS_BUGS=KeepsOldPages HARVESTFS_TESTS_BUG_SEEDS=2000 cargo test --workspace
//! --features harvestfs-chaos/planted-bugs --test planted_bugs -- --nocapture`.

use std::collections::{BTreeSet, VecDeque};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use harvestfs_chaos::simulate::cluster::{FaultKind, Options, run};
use harvestfs_protocol::planted::{Bug, plant};

/// Within so many seeds each bug is found, but for those in [`NOT_FOUND`].
const SEEDS: u64 = 200;
/// What the simulator does not find yet with so many seeds.
const NOT_FOUND: [Bug; 8] = [
    Bug::KeepsWhatIsCut,
    Bug::RemovesBeforeDurable,
    Bug::IgnoresFailedJournalSync,
    Bug::BelievesExpiredLease,
    Bug::ExtendsLeaseByAnswer,
    Bug::ForgetsUnconfirmed,
    Bug::KeepsOldPages,
    Bug::SkipsSealedDirectorySync,
];
/// How long clients work and faults begin, in virtual time.
const LENGTH: Duration = Duration::from_secs(12);
const ONLY: &str = "HARVESTFS_TESTS_BUGS";
const SEEDS_MAX: &str = "HARVESTFS_TESTS_BUG_SEEDS";

/// What breaks a promise with a bug planted, or none; a part that panics breaks one.
fn broken(bug: Option<Bug>, seed: u64, directory: &Path) -> Option<String> {
    let options = Options {
        seed,
        length: LENGTH,
        datanodes: 6,
        clients: 3,
        mounts: 2,
        faults: FaultKind::ALL.to_vec(),
        replay: None,
        without: BTreeSet::new(),
        directory: directory.to_owned(),
    };
    plant(bug);
    let ran = std::panic::catch_unwind(AssertUnwindSafe(|| run(&options)));
    plant(None);
    match ran {
        Ok(report) => {
            let report = report.expect("its files are written");
            report.failures.into_iter().next()
        }
        Err(panic) => Some(match panic.downcast::<String>() {
            Ok(message) => *message,
            Err(_) => "it panicked".to_owned(),
        }),
    }
}

/// The first seed with which a bug breaks a promise, and which.
fn found(bug: Bug, seeds: u64, directory: &Path) -> Option<(u64, String)> {
    let find = |seed| Some((seed, broken(Some(bug), seed, directory)?));
    let (seed, what) = (1..=seeds).find_map(find)?;
    // It is this bug that was found.
    assert_eq!(
        broken(None, seed, directory),
        None,
        "seed {seed} without {bug:?}"
    );
    Some((seed, what))
}

#[test]
fn each_planted_bug_is_found() {
    let only = std::env::var(ONLY).ok();
    let is_wanted = |bug: &Bug| {
        let name = format!("{bug:?}");
        match &only {
            Some(only) => only.split(',').any(|it| it == name),
            None => !NOT_FOUND.contains(bug),
        }
    };
    let bugs: VecDeque<Bug> = Bug::ALL.into_iter().filter(is_wanted).collect();
    assert!(!bugs.is_empty(), "{ONLY} names no bug: {only:?}");
    let in_memory = Path::new("/dev/shm");
    let temporary = std::env::temp_dir();
    let directory = if in_memory.is_dir() {
        in_memory
    } else {
        &temporary
    };
    let seeds = std::env::var(SEEDS_MAX).map_or(SEEDS, |text| text.parse().expect(SEEDS_MAX));
    let bugs = Mutex::new(bugs);
    let missed = Mutex::new(Vec::new());
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let Some(bug) = bugs.lock().unwrap().pop_front() else {
                        return;
                    };
                    let began = Instant::now();
                    let found = found(bug, seeds, directory);
                    let took_s = began.elapsed().as_secs_f64();
                    match found {
                        Some((seed, what)) => {
                            let what: String = what.chars().take(120).collect();
                            println!("{bug:?}: seed {seed}, {took_s:.1} s: {what}");
                        }
                        None => {
                            println!("{bug:?}: not found with {seeds} seeds, {took_s:.1} s");
                            missed.lock().unwrap().push(bug);
                        }
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
