//! The shipped smoke scenario on a real cluster, and what is said of scenarios that are wrong.

use std::process::{Command, Output};

const BINARY: &str = env!("CARGO_BIN_EXE_harvestfs");
const SCENARIOS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chaos/scenarios");

fn chaos(arguments: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command.arg("chaos").args(arguments);
    command.output().expect("the binary runs")
}

#[test]
fn after_the_smoke_scenario_everything_is_as_promised() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let (json, html) = (file("report.json"), file("report.html"));
    let smoke = format!("{SCENARIOS}/smoke.toml");
    let output = chaos(&[
        "run", &smoke, "--seed", "7", "--json", &json, "--html", &html,
    ]);
    assert!(output.status.success(), "{output:?}");
    let json = std::fs::read_to_string(json).expect("the report");
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(report["seed"], 7);
    let run = &report["runs"][0];
    assert_eq!(run["passed"], true);
    assert!(run["time_to_whole_ms"].is_u64(), "{json}");
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
