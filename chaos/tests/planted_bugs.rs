//! Checks that the simulator finds each planted bug, with some exceptions, within a bounded number of seeds.
//!
//! To search longer, or for other bugs: `HARVESTFS_TESTS_BUGS=KeepsOldPages HARVESTFS_TESTS_BUG_SEEDS=2000 cargo test
//! --workspace --features harvestfs-chaos/planted-bugs --test planted_bugs -- --nocapture`.

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harvestfs_chaos::simulate::cluster::history::{answers_of_model, random_calls};
use harvestfs_chaos::simulate::cluster::promised::promised;
use harvestfs_chaos::simulate::cluster::{FaultKind, Options, run};
use harvestfs_protocol::planted::{Bug, met, plant};
use parking_lot::Mutex;

/// The number of seeds within which each bug is found, except those in [`NOT_FOUND`].
const SEEDS: u64 = 400;
/// Bugs that the simulator does not find yet with this many seeds, and bugs of groups that have not been searched for
/// with as many.
const NOT_FOUND: [Bug; 5] = [
    Bug::AnswersKeepAlivesUnasked,
    Bug::ForgetsRefusedRecords,
    Bug::ForgetsTermsEarly,
    Bug::TrustsReportsOfBefore,
    Bug::ObeysOlderEpochs,
];
/// How long clients work and faults begin, in virtual time.
const LENGTH: Duration = Duration::from_secs(12);
/// The same for bugs that need several faults one after another, or one that outlasts a lease.
const LENGTH_LONG: Duration = Duration::from_secs(40);
/// The same for groups of namenodes, where the interesting events are changes of leader.
const LENGTH_OF_GROUP: Duration = Duration::from_secs(20);
/// The number of histories of calls on two mounts, and the number of calls in each.
const HISTORIES: u64 = 6;
const CALLS: usize = 400;
const ONLY: &str = "HARVESTFS_TESTS_BUGS";
const SEEDS_MAX: &str = "HARVESTFS_TESTS_BUG_SEEDS";
/// Overrides of the faults, by name, and of the length that [`simulations`] chooses.
const FAULTS: &str = "HARVESTFS_TESTS_BUG_FAULTS";
const LENGTH_S: &str = "HARVESTFS_TESTS_BUG_LENGTH_S";
/// The first seed, instead of 1, and a directory for the traces of simulations.
const FIRST: &str = "HARVESTFS_TESTS_BUG_FIRST_SEED";
const TRACES: &str = "HARVESTFS_TESTS_BUG_TRACES";

/// The simulations in which a bug is searched for.
struct Simulations {
    namenodes: u8,
    datanodes: u8,
    mounts: u8,
    length: Duration,
    faults: Vec<FaultKind>,
    /// The bug shows as soon as it happens, without the final checks.
    until_calm: bool,
}

fn simulations(bug: Bug) -> Simulations {
    let (namenodes, (length, faults)) = match of_group(bug) {
        Some(of_group) => (3, of_group),
        None => (1, of_one(bug)),
    };
    // Few machines, so that the faults that are needed soon affect the right ones.
    let is_small = namenodes > 1
        || matches!(
            bug,
            Bug::RemovesBeforeDurable | Bug::ExtendsLeaseByAnswer | Bug::IgnoresClockDrift
        );
    let (datanodes, mounts) = if is_small { (3, 0) } else { (6, 2) };
    Simulations {
        namenodes,
        datanodes,
        mounts,
        length,
        faults,
        until_calm: matches!(
            bug,
            Bug::ExtendsLeaseByAnswer
                | Bug::IgnoresClockDrift
                | Bug::AnswersKeepAlivesUnasked
                | Bug::AnswersWhileHandingOver
                | Bug::AnswersFoundChangesAtOnce
                | Bug::ObeysOlderEpochs
        ),
    }
}

/// The simulations of bugs that only a group of namenodes can have.
fn of_group(bug: Bug) -> Option<(Duration, Vec<FaultKind>)> {
    use FaultKind::{
        Blackout, Crash, Delay, Double, Forget, Hang, Loss, Outage, Partition, PowerLoss, SlowDisk,
        Split, Transfer,
    };
    let (length, faults) = match bug {
        Bug::VotesAtOnce => (LENGTH_OF_GROUP, vec![Split]),
        Bug::ForgetsVote => (LENGTH_OF_GROUP, vec![Blackout, Transfer]),
        Bug::LeadsAgainInItsTerm => (LENGTH_OF_GROUP, vec![Crash]),
        Bug::SkipsMemberFileSync => (LENGTH_OF_GROUP, vec![PowerLoss, Outage, Blackout, Transfer]),
        Bug::AcknowledgesBeforeDurable => (LENGTH_OF_GROUP, vec![SlowDisk, Outage, Blackout]),
        Bug::AnswersWithoutLease => (LENGTH_OF_GROUP, vec![Split, Partition]),
        Bug::AnswersKeepAlivesUnasked => (LENGTH_LONG, vec![Split]),
        Bug::AnswersWhatIsDurableHere | Bug::CountsSilentMembers => {
            (LENGTH_OF_GROUP, vec![Split, Partition, Crash, PowerLoss])
        }
        Bug::KeepsWhatWasReplaced => (LENGTH_OF_GROUP, vec![Split]),
        Bug::ForgetsRefusedRecords => (LENGTH_OF_GROUP, vec![Partition, Loss, Split, Hang]),
        Bug::AnswersWhileHandingOver => (LENGTH_LONG, vec![Transfer, Delay]),
        Bug::AnswersFoundChangesAtOnce => (LENGTH_LONG, vec![Transfer, Partition]),
        Bug::LeadsBeforeItHasAll => (LENGTH_OF_GROUP, vec![Transfer, Delay, Loss, Split]),
        Bug::TrustsForgetfulMembers => (LENGTH_OF_GROUP, vec![Forget, Crash, Split]),
        Bug::TrustsCopies => (LENGTH_OF_GROUP, vec![Double, Crash, Transfer]),
        Bug::InstallsSnapshotUnsynced => (LENGTH_LONG, vec![Split, Outage, Blackout]),
        Bug::ForgetsTermsEarly => (LENGTH_OF_GROUP, vec![Transfer, Crash, Split]),
        Bug::TrustsReportsOfBefore => (LENGTH_OF_GROUP, vec![Transfer, Delay, Split, SlowDisk]),
        Bug::ObeysOlderEpochs => (LENGTH_LONG, vec![Transfer, Delay]),
        _ => return None,
    };
    Some((length, faults))
}

fn of_one(bug: Bug) -> (Duration, Vec<FaultKind>) {
    use FaultKind::{
        Blackout, Crash, Delay, Double, Drift, FailedSync, Hang, Loss, Partition, PowerLoss,
        Rollback, SlowDisk, Suspend,
    };
    match bug {
        Bug::BelievesExpiredLease => (LENGTH_LONG, vec![Partition, Delay, Hang, Suspend]),
        Bug::ExtendsLeaseByAnswer => (LENGTH_LONG, vec![Partition, Delay]),
        Bug::IgnoresClockDrift => (LENGTH_LONG, vec![Partition, Drift]),
        Bug::OverlooksNewerDatanodes => (LENGTH_LONG, vec![Rollback, Double]),
        Bug::IgnoresFailedJournalSync => (LENGTH_LONG, vec![FailedSync, PowerLoss, Blackout]),
        Bug::ForgetsUnconfirmed => (LENGTH_LONG, vec![SlowDisk, PowerLoss, Crash]),
        Bug::SkipsSealedDirectorySync => (LENGTH_LONG, vec![PowerLoss, Blackout]),
        // Drift faults leave time between losses of power.
        Bug::RemovesBeforeDurable => (LENGTH_LONG, vec![SlowDisk, Blackout, Drift]),
        // Mounts do more when little fails.
        Bug::AnswersShortReads | Bug::TellsSizeOverZeros => (LENGTH, vec![Delay, Loss, Crash]),
        _ => (LENGTH, FaultKind::ALL.to_vec()),
    }
}

/// The first broken promise in a simulation for a bug, which is planted or not; a panic counts as one.
fn broken(bug: Bug, is_planted: bool, seed: u64, directory: &Path) -> Option<String> {
    let Simulations {
        namenodes,
        datanodes,
        mounts,
        mut length,
        mut faults,
        until_calm,
    } = simulations(bug);
    if let Ok(text) = std::env::var(LENGTH_S) {
        length = Duration::from_secs(text.parse().expect(LENGTH_S));
    }
    if let Ok(text) = std::env::var(FAULTS) {
        let find = |name: &str| FaultKind::ALL.into_iter().find(|kind| kind.name() == name);
        faults = text
            .split(',')
            .map(|name| find(name).expect(FAULTS))
            .collect();
    }
    let options = Options {
        seed,
        length,
        namenodes,
        datanodes,
        clients: 3,
        mounts,
        faults,
        replay: None,
        without: BTreeSet::new(),
        until_failure: true,
        until_calm,
        directory: directory.to_owned(),
        interrupted: Arc::default(),
    };
    STOP.set(Some(Arc::clone(&options.interrupted)));
    plant(is_planted.then_some(bug));
    PANICKED.take();
    let ran = std::panic::catch_unwind(AssertUnwindSafe(|| run(&options)));
    if is_planted {
        MET.set(MET.get() + met());
    }
    plant(None);
    let panicked = PANICKED.take();
    if panicked.is_some() {
        return panicked;
    }
    let report = ran.expect("nothing panicked");
    let report = report.expect("its files are written");
    if let Ok(directory) = std::env::var(TRACES) {
        let with = if is_planted { "with" } else { "without" };
        let file = Path::new(&directory).join(format!("{bug:?}-{with}-{seed}.txt"));
        std::fs::write(file, report.trace.join("\n")).expect(TRACES);
    }
    report.failures.into_iter().next()
}

thread_local! {
    /// The message of the last panic of a part on this thread, which the runtimes catch.
    static PANICKED: Cell<Option<String>> = const { Cell::new(None) };
    /// How often the code of the bug that is searched for on this thread ran.
    static MET: Cell<u64> = const { Cell::new(0) };
    /// Ends the simulation on this thread.
    static STOP: Cell<Option<Arc<AtomicBool>>> = const { Cell::new(None) };
}

fn remember_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICKED.set(Some(format!("a part panicked: {info}")));
        if let Some(stop) = STOP.take() {
            stop.store(true, Ordering::Relaxed);
        }
        report(info);
    }));
}

/// The first seed with which a bug breaks a promise, and that promise. `others` collects seeds that break one without
/// the bug, too.
fn found(
    bug: Bug,
    seeds: u64,
    directory: &Path,
    others: &Mutex<Vec<String>>,
) -> Option<(u64, String)> {
    let first = std::env::var(FIRST).map_or(1, |text| text.parse().expect(FIRST));
    for seed in (first..).take(seeds as usize) {
        let Some(what) = broken(bug, true, seed, directory) else {
            continue;
        };
        // Without the bug nothing breaks, so it is this bug that was found.
        let Some(other) = broken(bug, false, seed, directory) else {
            return Some((seed, what));
        };
        let other = format!("seed {seed} without {bug:?}: {other}");
        println!("{other}");
        others.lock().push(other);
    }
    None
}

/// The first call of a history that the model of the kernel does not answer as required.
fn first_broken(seed: u64) -> Option<String> {
    let calls = random_calls(seed, CALLS);
    let answers = answers_of_model(seed, &calls);
    let answers = answers.expect("its files are written").into_iter();
    let mut answered = calls.iter().zip(answers.zip(promised(&calls)));
    let (call, _) = answered.find(|(_, (answer, promised))| {
        let promised = promised.as_ref();
        promised.is_some_and(|promised| promised != answer)
    })?;
    Some(format!("{call:?}"))
}

#[test]
fn histories_of_calls_are_answered_as_promised() {
    for seed in 1..=HISTORIES {
        let broken = first_broken(seed);
        assert_eq!(broken, None, "history {seed}");
    }
}

#[test]
fn histories_of_calls_show_pages_that_a_mount_keeps_of_what_it_created() {
    plant(Some(Bug::KeepsPagesOfCreated));
    let broken = (1..=HISTORIES).find_map(first_broken);
    plant(None);
    assert!(broken.is_some_and(|call| call.starts_with("Read")));
}

#[test]
fn each_planted_bug_is_found() {
    remember_panics();
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
    let others = Mutex::new(Vec::new());
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let Some(bug) = bugs.lock().pop_front() else {
                        return;
                    };
                    let began = Instant::now();
                    MET.set(0);
                    let found = found(bug, seeds, directory, &others);
                    let took_s = began.elapsed().as_secs_f64();
                    let met = MET.get();
                    match found {
                        Some((seed, what)) => {
                            let what: String = what.chars().take(120).collect();
                            println!("{bug:?}: seed {seed}, {took_s:.1} s, met {met} times: {what}");
                        }
                        None => {
                            println!(
                                "{bug:?}: not found with {seeds} seeds, {took_s:.1} s, met {met} times"
                            );
                            missed.lock().push(bug);
                        }
                    }
                }
            });
        }
    });
    let (missed, others) = (missed.into_inner(), others.into_inner());
    assert!(others.is_empty(), "found without the bugs: {others:?}");
    assert!(missed.is_empty(), "not found: {missed:?}");
}
