//! `harvestfs simulate cluster`: tests which seeds it runs, and that a seed determines everything in any process.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use harvestfs_tests::{harvestfs, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// Number of seeds that are compared, from 1 on, unless the variable sets it; and seeds that once had another result in
/// another process.
const SEEDS: u64 = 4;
const SEEDS_VARIABLE: &str = "HARVESTFS_TESTS_SAME_SEEDS";
const ODD_SEEDS: [u64; 1] = [13];

/// The same for clusters with three namenodes.
const SEEDS_OF_GROUPS: u64 = 3;

/// Maximum time in which a long simulation ends when interrupted, even on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(20);

fn simulate(arguments: &[&str]) -> Output {
    let mut command = Command::new(harvestfs());
    command.args(["simulate", "cluster"]);
    command.args(arguments).output().expect("it runs")
}

/// The lines with the results of the seeds, without the time that this machine took.
fn outcomes(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let seconds = |line: &str| line.rsplit_once(" in ").map(|(rest, _)| rest.to_owned());
    text.lines().filter_map(seconds).collect()
}

/// The complete result of a seed that is run in a process of its own.
fn run_alone(arguments: &[&str], seed: u64, trace: &Path) -> (Vec<String>, String) {
    let (seed, trace_name) = (seed.to_string(), trace.to_string_lossy());
    let alone = ["--seed", &seed, "--trace", &trace_name];
    let output = simulate(&[arguments, &alone].concat());
    assert!(output.status.success(), "seed {seed}: {output:?}");
    let trace = fs::read_to_string(trace).expect("it was written");
    (outcomes(&output), trace)
}

#[test]
fn a_seed_gives_the_same_trace_in_two_processes_to_the_byte() {
    let seeds = (1..=SEEDS).chain(ODD_SEEDS);
    compare_processes(&["--minutes", "0.05"], seeds.collect());
}

#[test]
fn a_seed_gives_the_same_trace_of_three_namenodes_in_two_processes_to_the_byte() {
    let of_group = ["--minutes", "0.02", "--namenodes", "3"];
    compare_processes(&of_group, (1..=SEEDS_OF_GROUPS).collect());
}

#[test]
fn a_signal_ends_it_at_once_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().expect("a directory");
    let log = tempfile::NamedTempFile::new().expect("a file");
    for signal in [Signal::TERM, Signal::INT] {
        let mut child = Command::new(harvestfs())
            .args(["simulate", "cluster", "--minutes", "600", "--jobs", "1"])
            .arg("--directory")
            .arg(directory.path())
            .stderr(log.reopen().expect("it is there"))
            .spawn()
            .expect("it runs");
        let has_begun = || fs::read_dir(directory.path()).expect("it is there").count() > 0;
        wait_until("it has begun", AT_ONCE, has_begun);
        kill_process(Pid::from_child(&child), signal).expect("it runs");
        let mut status = None;
        wait_until("it ends", AT_ONCE, || {
            status = child.try_wait().expect("it is our child");
            status.is_some()
        });
        assert_eq!(status.and_then(|it| it.code()), Some(1));
        let said = fs::read_to_string(log.path()).expect("it is there");
        assert!(said.contains("interrupted before"), "{said}");
        assert!(!has_begun(), "its files are left");
    }
}

/// Checks that seeds have the same result in any process: these, or as many as the variable sets.
fn compare_processes(arguments: &[&str], seeds: Vec<u64>) {
    let seeds = match std::env::var(SEEDS_VARIABLE) {
        Ok(count) => (1..=count.parse().expect(SEEDS_VARIABLE)).collect(),
        Err(_) => seeds,
    };
    let directory = tempfile::tempdir().expect("a directory");
    let traces = ["one", "other"].map(|name| directory.path().join(name));
    let mut different = Vec::new();
    for &seed in &seeds {
        let [one, other] = traces
            .each_ref()
            .map(|trace| run_alone(arguments, seed, trace));
        assert_eq!(one.0.len(), 1, "seed {seed}: {:?}", one.0);
        let lines = one.1.lines().count();
        assert!(lines > 20, "seed {seed}: {lines} lines in the trace");
        if let Some((line, (one, other))) = first_difference(&one.1, &other.1) {
            different.push(format!(
                "seed {seed}, line {line} of the trace: {one:?}, and {other:?}"
            ));
        } else if one.0 != other.0 {
            different.push(format!("seed {seed}: {:?}, and {:?}", one.0, other.0));
        }
    }
    let count = seeds.len();
    println!("{} of {count} seeds gave the same", count - different.len());
    assert!(different.is_empty(), "{different:#?}");
}

fn first_difference<'a>(one: &'a str, other: &'a str) -> Option<(usize, (&'a str, &'a str))> {
    if one == other {
        return None;
    }
    let lines = one.lines().zip(other.lines());
    let different = (1..).zip(lines).find(|(_, (one, other))| one != other);
    Some(different.unwrap_or((0, ("the end", "the end"))))
}

#[test]
fn seeds_begin_where_they_are_asked_to() {
    let run = |arguments: &[&str]| {
        let common = ["--minutes", "0.05", "--faults", "none"];
        let output = simulate(&[&common, arguments].concat());
        assert!(output.status.success(), "{output:?}");
        outcomes(&output)
    };
    let mut several = run(&["--seed", "41", "--seeds", "3"]);
    several.sort();
    let each = ["41", "42", "43"].map(|seed| run(&["--seed", seed]));
    assert_eq!(several, each.concat());
    let first = run(&[]);
    assert!(first[0].starts_with("seed 1: "), "{first:?}");

    for (arguments, message) in [
        (
            ["--seed", "18446744073709551615", "--seeds", "1"],
            "there are no seeds above",
        ),
        (["--seed", "1", "--seeds", "0"], "invalid value '0'"),
    ] {
        let output = simulate(&arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(message), "{said}");
    }
}
