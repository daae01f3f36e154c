//! Runs the shipped smoke scenario on a real cluster, and tests the errors of invalid scenarios.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use harvestfs_telemetry::metrics::{Part, TABLE};
use harvestfs_tests::{
    Prometheus, Target, TargetAccess, can_mount, free_address, have_program, wait_until,
};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_harvestfs");
const SCENARIOS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chaos/scenarios");
/// Other suites may keep this machine busy.
const DEADLINE: Duration = Duration::from_secs(180);
const ALERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/dashboards/alerts.yml");

fn chaos(arguments: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command.arg("chaos").args(arguments);
    command.output().expect("the binary runs")
}

/// Metrics of a run that a server must have collected at some time.
const HEARD: [&str; 4] = [
    "harvestfs_chaos_operation_seconds_count{operation=\"read\"}",
    "harvestfs_chaos_operation_seconds_count{operation=\"write\"}",
    "harvestfs_chaos_faults_total{kind=\"bit-rot\"}",
    "harvestfs_chaos_blocks",
];

fn check_metrics(prometheus: &Prometheus) {
    for series in HEARD {
        let most = format!("max_over_time({series}[1h]) > 0");
        assert!(!prometheus.query(&most).is_empty(), "{series} is missing");
    }
    let exported = prometheus.metric_names();
    for metric in TABLE.iter().filter(|metric| metric.part == Part::Chaos) {
        let is_exported = exported.iter().any(|name| name.starts_with(metric.name));
        assert!(is_exported, "{} is missing: {exported:?}", metric.name);
    }
}

#[test]
fn after_the_smoke_scenario_everything_is_as_promised() {
    // The scenario needs mounts.
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let (json, html) = (file("report.json"), file("report.html"));
    let smoke = format!("{SCENARIOS}/smoke.toml");
    let address = free_address();
    // It starts before the harness, and so collects everything.
    let prometheus = have_program("prometheus", "apt install prometheus").map(|program| {
        let target = Target {
            job: "chaos".to_owned(),
            address,
            access: TargetAccess::Plain,
        };
        let data = directory.path().join("prometheus");
        Prometheus::start(&program, &data, &[target], Path::new(ALERTS))
    });
    let output = chaos(&[
        "run",
        &smoke,
        "--seed",
        "7",
        "--json",
        &json,
        "--html",
        &html,
        "--metrics",
        &address.to_string(),
    ]);
    assert!(output.status.success(), "{output:?}");
    if let Some(prometheus) = prometheus {
        check_metrics(&prometheus);
    }
    let json = std::fs::read_to_string(json).expect("the report");
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(report["seed"], 7);
    let run = &report["runs"][0];
    assert_eq!(run["passed"], true);
    assert!(run["time_to_whole_ms"].is_u64(), "{json}");
    // Bits were flipped, and no datanode considers the damaged replicas intact.
    assert!(json.contains("flipped"), "{json}");
    assert_eq!(run["rotten_replicas"], 0, "{json}");
    let compared = run["comparison"]["files"].as_u64();
    assert!(compared.is_some_and(|files| files > 0), "{json}");
    let during = run["comparison"]["bytes_during"].as_u64();
    assert!(during.is_some_and(|bytes| bytes > 0), "{json}");
    let plan = report["plan"].to_string();
    assert!(plan.contains("mount-1"), "{plan}");
    assert_eq!(run["comparison"]["lost"].as_array().map(Vec::len), Some(0));
    let page = std::fs::read_to_string(html).expect("the page");
    assert!(page.contains("<svg") && page.contains("Seed 7"));
    // Nothing is fetched from elsewhere.
    assert!(!page.contains("src=") && !page.contains("href="), "{page}");
}

/// Tests the process that works on mounts, here on an ordinary directory.
#[test]
fn programs_work_as_the_harness_says_and_end_with_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let mount = directory.path().to_string_lossy();
    let task = json!({
        "kind": "files",
        "spec": {"count": 1, "pause_ms": 1, "file_kib_max": 16},
        "seed": 1,
        "mounts": [mount],
        "access": {"identity": "/nowhere", "namenodes": ["127.0.0.1:1"], "spec": {}},
    });
    let mut command = Command::new(BINARY);
    command.args(["chaos", "work-on-mounts"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    let mut orders = child.stdin.take().expect("its standard input");
    let output = child.stdout.take().expect("its standard output");
    let mut reports = BufReader::new(output).lines().map(|line| {
        let line = line.expect("a line");
        serde_json::from_str::<Value>(&line).expect("JSON")
    });
    writeln!(orders, "{task}").expect("it reads");
    // It does nothing before it may use the mount.
    writeln!(
        orders,
        "{}",
        json!({"disturbed": {"mount": 0, "begins": false}})
    )
    .expect("it reads");
    assert_eq!(reports.next(), Some(json!("obeyed")));
    assert!(!directory.path().join("mount-1").exists());
    writeln!(orders, "{}", json!({"ready": {"mount": 0}})).expect("it reads");
    let done = |report: &Value| report["done"]["compared_bytes"].as_u64() > Some(0);
    assert!(reports.any(|report| done(&report)));
    assert!(directory.path().join("mount-1").exists());
    writeln!(orders, "{}", json!({"killed": {"mount": 0}})).expect("it reads");
    assert!(reports.any(|report| report == "obeyed"));
    // An operation that was in progress when the order arrived may still be reported.
    drop(orders);
    assert!(reports.count() < 3);
    assert!(child.wait().expect("it ends").success());
    let help = String::from_utf8(chaos(&["--help"]).stdout).expect("text");
    assert!(!help.contains("work-on-mounts"), "{help}");
}

/// A killed program, and another one that it started, do not continue alongside the next one.
#[test]
fn what_a_killed_program_started_ends_with_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let programs = directory.path().join("programs");
    std::fs::create_dir(&programs).expect("made");
    let started = directory.path().join("started");
    let script = format!(
        "#!/bin/sh\necho $$ > {0}.new\nmv {0}.new {0}\nexec /bin/sleep 1000\n",
        started.display()
    );
    let sqlite = programs.join("sqlite3");
    std::fs::write(&sqlite, script).expect("written");
    std::fs::set_permissions(&sqlite, Permissions::from_mode(0o755)).expect("executable");
    let task = json!({
        "kind": "sqlite",
        "spec": {"count": 1},
        "seed": 1,
        "mounts": [directory.path()],
        "access": {"identity": "/nowhere", "namenodes": ["127.0.0.1:1"], "spec": {}},
    });
    let path = std::env::var("PATH").expect("a path");
    let mut command = Command::new(BINARY);
    command.args(["chaos", "work-on-mounts"]);
    command.env("PATH", format!("{}:{path}", programs.display()));
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().expect("the binary runs");
    let mut orders = child.stdin.take().expect("its standard input");
    writeln!(orders, "{task}").expect("it reads");
    writeln!(orders, "{}", json!({"ready": {"mount": 0}})).expect("it reads");
    wait_until("a transaction begins", DEADLINE, || started.exists());
    let pid = std::fs::read_to_string(&started).expect("a number");
    let process = Path::new("/proc").join(pid.trim());
    assert!(process.exists());
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    wait_until("the transaction ends", DEADLINE, || !process.exists());
}

#[test]
fn a_program_that_is_missing_is_named_before_anything_starts() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("scenario.toml");
    let temporary = tempfile::tempdir().expect("a directory");
    for (kind, program) in [("sqlite", "sqlite3"), ("git", "git")] {
        let text = format!(
            "name = \"m\"\nduration_s = 5\n[cluster]\nservers = 3\n[mounts]\ncount = 1\n\
             programs = [\"{kind}\"]\n"
        );
        std::fs::write(&path, text).expect("written");
        let mut command = Command::new(BINARY);
        command
            .args(["chaos", "run"])
            .arg(&path)
            .env("TMPDIR", temporary.path())
            .env("PATH", "/nowhere");
        let output = command.output().expect("the binary runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains(&format!("`{kind}` need `{program}`")),
            "{said}"
        );
    }
    let left = std::fs::read_dir(temporary.path()).expect("it is there");
    assert_eq!(left.count(), 0, "there is nothing to keep");
}

#[test]
fn results_that_cannot_be_written_are_refused_before_anything_is_made() {
    let temporary = tempfile::tempdir().expect("a directory");
    let kept = temporary.path().join("kept");
    let smoke = format!("{SCENARIOS}/smoke.toml");
    let keep: [&OsStr; 2] = ["--keep".as_ref(), kept.as_os_str()];
    for option in ["--json", "--html", "--replay"] {
        for more in [&keep[..0], &keep[..]] {
            let mut command = Command::new(BINARY);
            command.args(["chaos", "run", &smoke, option, "/nonexistent/x"]);
            command.args(more).env("TMPDIR", temporary.path());
            let output = command.output().expect("the binary runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains("cannot write /nonexistent/x"), "{said}");
            let left = std::fs::read_dir(temporary.path()).expect("it is there");
            assert_eq!(left.count(), 0, "{option}");
        }
    }
}

#[test]
fn no_results_are_left_of_what_was_refused() {
    let temporary = tempfile::tempdir().expect("a directory");
    let [there, kept] = ["there", "kept"].map(|name| temporary.path().join(name));
    std::fs::write(&there, "of before").expect("written");
    let mut command = Command::new(BINARY);
    command.args(["chaos", "run", &format!("{SCENARIOS}/smoke.toml")]);
    command.arg("--json").arg(kept.join("report.json"));
    command.arg("--html").arg(&there);
    command.args(["--replay", "/nonexistent/x", "--keep"]);
    let output = command.arg(&kept).output().expect("the binary runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot write /nonexistent/x"), "{said}");
    assert!(!kept.exists(), "it is in the way of the next attempt");
    let left = std::fs::read_to_string(&there).expect("it is there");
    assert_eq!(left, "of before");
}

#[test]
fn every_shipped_scenario_is_understood_and_wrong_ones_are_not() {
    let mut count = 0;
    for entry in std::fs::read_dir(SCENARIOS).expect("the scenarios") {
        let path = entry.expect("an entry").path();
        let output = chaos(&["plan", &path.to_string_lossy()]);
        assert!(output.status.success(), "{output:?}");
        count += 1;
    }
    assert!(count >= 4, "{count}");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("wrong.toml");
    let text = "name = \"w\"\nduration_s = 5\ncolour = 1\n[cluster]\nservers = 2\n";
    std::fs::write(&path, text).expect("written");
    let output = chaos(&["run", &path.to_string_lossy()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("wrong.toml:3: unknown field `colour`"),
        "{said}"
    );
    let output = chaos(&["run", &path.to_string_lossy(), "--seed", "ten"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
