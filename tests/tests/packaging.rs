//! The files shipped for service managers match the binary.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use harvestfs_tests::{
    Cluster, ClusterOptions, Process, can_mount, harvestfs, have_program, unmount, wait_until,
};

const INSTALLED: &str = "/usr/local/bin/harvestfs";

fn units() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let entries = fs::read_dir(directory).expect("the units");
    let mut units: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    units.sort();
    units
}

fn services() -> Vec<PathBuf> {
    let is_service = |unit: &PathBuf| unit.extension().is_some_and(|it| it == "service");
    let services: Vec<_> = units().into_iter().filter(is_service).collect();
    assert_eq!(services.len(), 4, "one for each part: {services:?}");
    services
}

#[test]
fn systemd_accepts_the_units() {
    let Some(analyze) = have_program("systemd-analyze", "apt install systemd") else {
        return;
    };
    let directory = tempfile::tempdir().expect("a directory");
    for unit in units() {
        // It reports missing programs, and nothing is installed here.
        let text = fs::read_to_string(&unit).expect("a unit");
        let text = text.replace(INSTALLED, &harvestfs().to_string_lossy());
        let copy = directory.path().join(unit.file_name().expect("a name"));
        fs::write(&copy, text).expect("a copy");
        let output = Command::new(&analyze)
            .arg("verify")
            .arg("--man=no")
            .arg(&copy)
            .output()
            .expect("systemd-analyze runs");
        let said = String::from_utf8_lossy(&output.stderr);
        let name = copy.file_name().expect("a name").to_string_lossy();
        // Units of this machine on which it depends may have errors of their own.
        let about_it = said.lines().filter(|line| line.contains(&*name));
        assert_eq!(about_it.collect::<Vec<_>>(), [""; 0], "{name}");
    }
}

#[test]
fn the_units_start_what_the_binary_has() {
    for unit in services() {
        let text = fs::read_to_string(&unit).expect("a unit");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("ExecStart="))
            .expect("a command");
        let mut words = line.split(' ');
        assert_eq!(words.next(), Some(INSTALLED), "{}", unit.display());
        assert_understood(words, &unit);
    }
}

fn unit(name: &str) -> String {
    let units = units();
    let mut units = units.iter();
    let unit = units.find(|unit| unit.ends_with(name));
    fs::read_to_string(unit.expect("the unit")).expect("it is read")
}

/// Weights apply among siblings: that of a service has no effect against the owner's slice, and a slice without a unit
/// has the default weight.
#[test]
fn the_slice_of_a_unit_weighs_little_against_the_owners() {
    let mut slices = 0;
    for service in services() {
        let text = fs::read_to_string(&service).expect("a unit");
        let Some(slice) = text.lines().find_map(|line| line.strip_prefix("Slice=")) else {
            continue;
        };
        slices += 1;
        let slice = unit(slice);
        for setting in ["CPUWeight=1", "CPUWeight=idle", "IOWeight=1"] {
            assert!(slice.lines().any(|line| line == setting), "no {setting}");
        }
    }
    assert_eq!(slices, 1, "datanodes have one");
}

/// Units are stopped in reverse order.
#[test]
fn the_unit_of_a_mount_is_stopped_before_what_it_stores_on() {
    let text = unit("harvestfs-mount.service");
    let after = text.lines().find_map(|line| line.strip_prefix("After="));
    let after: Vec<&str> = after.expect("an order").split(' ').collect();
    for part in ["harvestfs-namenode.service", "harvestfs-datanode.service"] {
        assert!(after.contains(&part), "{part}");
    }
}

/// Otherwise, units ordered after the mount would write to the local disk.
#[test]
fn the_unit_of_a_mount_is_started_when_the_mount_is_there() {
    let text = unit("harvestfs-mount.service");
    for setting in ["Type=notify", "TimeoutStartSec=infinity"] {
        assert!(text.lines().any(|line| line == setting), "no {setting}");
    }
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    });
    cluster.stop("namenode");
    let (mount, address) = (cluster.path("mnt"), cluster.path("notify"));
    fs::create_dir(&mount).expect("a mount point");
    let socket = UnixDatagram::bind(&address).expect("a socket");
    let receive = |patience_s: u64| {
        let patience = Some(Duration::from_secs(patience_s));
        socket.set_read_timeout(patience).expect("it is not zero");
        let mut message = [0; 256];
        let length = socket.recv(&mut message).ok()?;
        Some(String::from_utf8_lossy(&message[..length]).into_owned())
    };
    let config = cluster.path("client/client.toml");
    let arguments: Vec<&Path> = vec!["mount".as_ref(), &mount, "--config".as_ref(), &config];
    let address = address.to_str().expect("text");
    let (process, _ready) = Process::begin(
        "mnt",
        &arguments,
        &[("NOTIFY_SOCKET", address)],
        &cluster.path("mnt.log"),
    );
    assert_eq!(receive(2), None, "no namenode answers");
    cluster.start_namenode();
    assert_eq!(receive(60).as_deref(), Some("READY=1\n"));
    fs::write(mount.join("f"), "in the cluster").expect("write");
    let content = cluster.output_of(&["fs", "cat", "/f"]);
    assert_eq!(content, "in the cluster");
    process.stop();
}

/// An operator may unmount without stopping the unit, and may have mounted something else there.
#[test]
fn the_unit_of_a_mount_respects_what_an_operator_unmounts_and_mounts() {
    let text = unit("harvestfs-mount.service");
    let lines = || text.lines();
    assert!(lines().any(|line| line == "Restart=on-failure"));
    let before = lines().filter_map(|line| line.strip_prefix("ExecStartPre="));
    assert_eq!(
        before.collect::<Vec<_>>(),
        ["-/bin/mkdir -p /mnt/harvestfs"]
    );
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    });
    let mount = cluster.path("mnt");
    fs::create_dir(&mount).expect("a mount point");
    let config = cluster.path("client/client.toml");
    let start = || {
        let arguments: Vec<&Path> = vec!["mount".as_ref(), &mount, "--config".as_ref(), &config];
        Process::start("mnt", &arguments, &[], &cluster.path("mnt.log"))
    };
    let mut process = start();
    fs::write(mount.join("f"), "x").expect("write");
    unmount(&mount);
    wait_until("it ends", Duration::from_secs(60), || !process.is_running());
    // `stop` checks that it ended well, or systemd would start it again.
    process.stop();
    let process = start();
    assert_eq!(fs::read(mount.join("f")).expect("read"), b"x");
    process.stop();
}

/// The only thing that a datanode writes outside its volumes; without it, it lends no files, and reports that only in
/// its log.
#[test]
fn the_unit_of_a_datanode_lets_it_make_the_socket_beside_its_configuration() {
    let text = unit("harvestfs-datanode.service");
    let setting = |name: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(name));
        found.unwrap_or_else(|| panic!("no {name}"))
    };
    let command = setting("ExecStart=");
    let (_, config) = command.split_once("--config ").expect("a configuration");
    let beside = Path::new(config).parent().expect("a directory");
    let mut writable = setting("ReadWritePaths=").split(' ');
    assert!(writable.any(|path| beside.starts_with(path)), "{config}");
}

#[test]
fn the_manifest_of_kubernetes_starts_what_the_binary_has() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/kubernetes/harvestfs-cycles.json");
    let text = fs::read_to_string(&path).expect("the manifest");
    let list: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let items = list["items"].as_array().expect("a list");
    let of_kind = |kind: &str| {
        let item = items.iter().find(|item| item["kind"] == kind);
        item.unwrap_or_else(|| panic!("no {kind}"))
    };
    let pod = &of_kind("Deployment")["spec"]["template"]["spec"];
    let account = of_kind("ServiceAccount")["metadata"]["name"].clone();
    assert_eq!(pod["serviceAccountName"], account);
    assert_eq!(
        of_kind("ClusterRoleBinding")["subjects"][0]["name"],
        account
    );
    // The rules allow what the controller requests, and nothing else.
    let rules = of_kind("ClusterRole")["rules"].as_array().expect("rules");
    let allowed: Vec<(&str, Vec<&str>)> = rules
        .iter()
        .map(|rule| {
            let verbs = rule["verbs"].as_array().expect("verbs");
            let verbs = verbs.iter().filter_map(serde_json::Value::as_str);
            (
                rule["resources"][0].as_str().expect("a resource"),
                verbs.collect(),
            )
        })
        .collect();
    assert_eq!(
        allowed,
        [
            ("nodes", vec!["list", "patch"]),
            ("nodes/status", vec!["patch"]),
            ("pods", vec!["list"])
        ]
    );
    let container = &pod["containers"][0];
    assert_eq!(container["command"][0], INSTALLED);
    let words = container["args"].as_array().expect("arguments");
    let words = words.iter().filter_map(serde_json::Value::as_str);
    assert_understood(words, &path);
}

/// Checks that the binary has the command that a file contains.
fn assert_understood<'a>(words: impl Iterator<Item = &'a str>, file: &Path) {
    // Unknown words before `--help` are refused before help is printed.
    let output = Command::new(harvestfs())
        .args(words)
        .arg("--help")
        .output()
        .expect("the binary runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", file.display());
}
