//! The shipped smoke scenario on a real cluster, and what is said of scenarios that are wrong.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Command, Output},
    thread,
    time::Duration,
};

use harvestfs_telemetry::metrics::{Part, TABLE};
use harvestfs_tests::{free_tcp_address, wait_until};

const BINARY: &str = env!("CARGO_BIN_EXE_harvestfs");
const SCENARIOS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chaos/scenarios");

fn chaos(arguments: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command.arg("chaos").args(arguments);
    command.output().expect("the binary runs")
}

/// What the harness tells at an address; none while it does not listen.
fn metrics(address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    for set in [TcpStream::set_read_timeout, TcpStream::set_write_timeout] {
        set(&stream, Some(Duration::from_secs(10))).ok()?;
    }
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut told = String::new();
    stream.read_to_string(&mut told).ok()?;
    Some(told)
}

/// Whether more than nothing is told of a series.
fn is_told(told: &str, series: &str) -> bool {
    let mut lines = told.lines();
    let value = lines.find_map(|line| line.strip_prefix(series)?.trim().parse::<f64>().ok());
    value.is_some_and(|value| value > 0.0)
}

#[test]
fn after_the_smoke_scenario_everything_is_as_promised() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let (json, html) = (file("report.json"), file("report.html"));
    let smoke = format!("{SCENARIOS}/smoke.toml");
    let address = free_tcp_address();
    let listen = address.to_string();
    let series = [
        "harvestfs_chaos_operation_seconds_count{operation=\"read\"}",
        "harvestfs_chaos_operation_seconds_count{operation=\"write\"}",
        "harvestfs_chaos_faults_total{kind=\"bit-rot\"}",
        "harvestfs_chaos_blocks",
    ];
    let (told, output) = thread::scope(|scope| {
        let run = scope.spawn(|| {
            chaos(&[
                "run",
                &smoke,
                "--seed",
                "7",
                "--json",
                &json,
                "--html",
                &html,
                "--metrics",
                &listen,
            ])
        });
        let mut told = String::new();
        // The run has deadlines of its own.
        wait_until("the harness tells", Duration::from_secs(600), || {
            told = metrics(address).unwrap_or(std::mem::take(&mut told));
            run.is_finished() || series.iter().all(|series| is_told(&told, series))
        });
        (told, run.join().expect("the run does not panic"))
    });
    assert!(output.status.success(), "{output:?}");
    for series in series {
        assert!(is_told(&told, series), "{series} is missing: {told}");
    }
    for metric in TABLE.iter().filter(|metric| metric.part == Part::Chaos) {
        assert!(told.contains(&format!("# TYPE {} ", metric.name)), "{told}");
    }
    let json = std::fs::read_to_string(json).expect("the report");
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(report["seed"], 7);
    let run = &report["runs"][0];
    assert_eq!(run["passed"], true);
    assert!(run["time_to_whole_ms"].is_u64(), "{json}");
    // Bits were flipped, and no datanode takes what has them for good.
    assert!(json.contains("flipped"), "{json}");
    assert_eq!(run["rotten_replicas"], 0, "{json}");
    let compared = run["comparison"]["files"].as_u64();
    assert!(compared.is_some_and(|files| files > 0), "{json}");
    assert_eq!(run["comparison"]["lost"].as_array().map(Vec::len), Some(0));
    let page = std::fs::read_to_string(html).expect("the page");
    assert!(page.contains("<svg") && page.contains("Seed 7"));
    // Nothing is fetched from elsewhere.
    assert!(!page.contains("src=") && !page.contains("href="), "{page}");
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
