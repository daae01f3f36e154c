//! Tests `harvestfs chaos` with faults of all kinds, and its cleanup when it ends early.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use harvestfs_tests::{have_program, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_harvestfs");
/// Other suites may keep this machine busy.
const DEADLINE: Duration = Duration::from_secs(300);

/// Other tests may keep this machine busy: the datanodes do not yield to them. Every client fills
/// blocks of its own: there are enough of them that the reimaged server has replicas of some.
const CLUSTER: &str = r#"
name = "test"
seed = 7
heal_s = 600

[cluster]
servers = 6
replication = 3
policy = "stock"
quota_mib = 64
priority = "normal"

[clients]
count = 16
file_kib_max = 256
"#;

/// Faults that need no privileges. Earlier ones may still be in progress when the next one begins.
const FAULTS: &str = r#"
[[fault]]
kind = "reimage"
at_s = 1
for_s = 1
servers = ["datanode-2"]

[[fault]]
kind = "clear"
at_s = 4
for_s = 3
servers = ["datanode-6"]

[[fault]]
kind = "kill"
at_s = 3
for_s = 2
random = 1

[[fault]]
kind = "hang"
at_s = 4
for_s = 2
random = 1

[[fault]]
kind = "busy"
at_s = 5
for_s = 2
random = 1

[[fault]]
kind = "bit-rot"
at_s = 7
random = 1
"#;

/// Faults that need root.
const FAULTS_OF_ROOT: &str = r#"
[[fault]]
kind = "partition"
at_s = 2
for_s = 2
random = 1

[[fault]]
kind = "loss"
at_s = 4
for_s = 3
random = 2
loss_percent = 5

[[fault]]
kind = "delay"
at_s = 5
for_s = 3
random = 1
delay_ms = 20

[[fault]]
kind = "full-disk"
at_s = 6
for_s = 2
servers = ["datanode-4"]

[[fault]]
kind = "slow-disk"
at_s = 3
for_s = 4
servers = ["datanode-5"]
delay_ms = 30
"#;

fn scenario(directory: &Path, text: &str) -> PathBuf {
    let path = directory.join("scenario.toml");
    fs::write(&path, text).expect("it can be written");
    path
}

/// Whether this machine can cut links and fill disks; skips if not.
fn can_inflict_all() -> bool {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        skip("networks and mounts for servers need root and /dev/net/tun");
        return false;
    }
    have_program("ip", "apt install iproute2").is_some()
}

fn run(arguments: &[&Path]) -> Output {
    Command::new(BINARY)
        .args(["chaos", "run"])
        .args(arguments)
        .output()
        .expect("the binary runs")
}

#[test]
fn what_was_acknowledged_outlives_every_fault() {
    if !can_inflict_all() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    // A busy machine may delay each fault, and no fault begins after the end.
    let text = format!("duration_s = 30\n{CLUSTER}{FAULTS}{FAULTS_OF_ROOT}");
    let path = scenario(directory.path(), &text);
    let [json, html] = ["report.json", "report.html"].map(|name| directory.path().join(name));
    let arguments: [&Path; 5] = [&path, "--json".as_ref(), &json, "--html".as_ref(), &html];
    let output = run(&arguments);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{output:?}");
    assert!(said.contains("test, seed 7"), "{said}");

    let report = fs::read_to_string(&json).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let run = &report["runs"][0];
    assert_eq!(
        (&run["passed"], &run["lost_blocks"]),
        (&true.into(), &0.into())
    );
    assert!(run["comparison"]["files"].as_u64() > Some(0), "{run}");
    assert!(run["repairs"].as_u64() > Some(0), "{run}");
    assert!(run["time_to_whole_ms"].is_u64() && run["slowdown_percent"].is_f64());
    let events = run["events"].to_string();
    for kind in [
        "reimage",
        "clear",
        "kill",
        "hang",
        "busy",
        "partition",
        "loss",
        "delay",
        "full-disk",
        "slow-disk",
    ] {
        // At its end, other text precedes its name.
        let begins = events.contains(&format!(" s  {kind} "));
        assert!(begins, "{kind} is missing: {events}");
    }
    assert!(events.contains("flipped"), "{events}");
    let page = fs::read_to_string(&html).expect("a page");
    assert!(page.contains("<svg") && page.contains("Repair traffic"));
    assert!(
        !page.contains("src=") && !page.contains("href="),
        "it needs other files"
    );
    assert_eq!(
        processes_of(&directory.path().to_string_lossy()),
        Vec::<String>::new()
    );
}

/// Command lines of processes that name `what`.
fn processes_of(what: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        // It may end meanwhile.
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(what) {
            found.push(line);
        }
    }
    found
}

/// A running harness, in the middle of faults of all kinds.
struct Begun {
    harness: Child,
    /// Directory of the cluster, which is in the arguments of its processes.
    data: PathBuf,
    _directory: tempfile::TempDir,
}

fn begin() -> Begun {
    let directory = tempfile::tempdir().expect("a directory");
    let text = format!("duration_s = 600\n{CLUSTER}{FAULTS_OF_ROOT}");
    let text = text
        .replace("for_s = 2", "for_s = 500")
        .replace("for_s = 3", "for_s = 500");
    let path = scenario(directory.path(), &text.replace("for_s = 4", "for_s = 500"));
    let data = directory.path().join("kept");
    let harness = Command::new(BINARY)
        .args(["chaos", "run"])
        .arg(&path)
        .arg("--keep")
        .arg(&data)
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary runs");
    let begun = Begun {
        harness,
        data,
        _directory: directory,
    };
    let marker = begun.data.join("run-1/datanode-4/volume/of-the-owner");
    let root = PathBuf::from(format!("/proc/{}/root", begun.harness.id()));
    let marker = root.join(marker.strip_prefix("/").expect("an absolute path"));
    wait_until("a disk is full", DEADLINE, || marker.exists());
    assert!(processes_of(&begun.datanodes()).len() >= 6);
    begun
}

impl Begun {
    fn datanodes(&self) -> String {
        self.data
            .join("run-1/datanode-")
            .to_string_lossy()
            .into_owned()
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.harness.id())
            .ok()
            .and_then(Pid::from_raw);
        kill_process(pid.expect("a child has an id"), signal).expect("it runs");
    }

    fn wait_ended(&mut self) -> ExitStatus {
        let mut ended = None;
        wait_until("the harness ends", DEADLINE, || {
            ended = self.harness.try_wait().expect("it is our child");
            ended.is_some()
        });
        ended.expect("waited for")
    }

    /// Waits until nothing is left but files. Networks have no names: they end with their processes.
    fn wait_gone(&self) {
        let data = self.data.to_string_lossy().into_owned();
        wait_until("no process is left", DEADLINE, || {
            processes_of(&data).is_empty()
        });
        let mounts = fs::read_to_string("/proc/mounts").expect("/proc/mounts");
        assert!(!mounts.contains(&data), "{mounts}");
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // It still runs only if the test failed.
        let _ = self.harness.kill();
        let _ = self.harness.wait();
    }
}

#[test]
fn interrupted_it_heals_and_stops_everything() {
    if !can_inflict_all() {
        return;
    }
    let mut begun = begin();
    begun.signal(Signal::INT);
    let status = begun.wait_ended();
    assert_eq!(status.code(), Some(1), "{status}");
    begun.wait_gone();
}

#[test]
fn killed_it_leaves_no_process_and_no_mount() {
    if !can_inflict_all() {
        return;
    }
    let mut begun = begin();
    begun.signal(Signal::KILL);
    begun.wait_ended();
    begun.wait_gone();
}
