//! Primary tenants whose load comes and goes: reads fail over, writes go elsewhere, and not a byte is lost.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, can_mount, wait_until};
use serde_json::Value;

const DATANODES: usize = 9;
/// Seconds for which each primary needs its server, one after the other.
const TURN_S: usize = 4;
/// Replays a sample of five minutes in one second.
const SPEED: usize = 300;

/// A trace of one series for each datanode: 95 % in its turn, 10 % otherwise.
fn turns() -> String {
    let mut trace = "series,values\n".to_owned();
    for datanode in 0..DATANODES {
        let samples = (0..DATANODES * TURN_S).map(|second| {
            if second / TURN_S == datanode {
                "9500"
            } else {
                "1000"
            }
        });
        let samples: Vec<&str> = samples.collect();
        trace += &format!("server-{},{}\n", datanode + 1, samples.join(","));
    }
    trace
}

fn busy_nodes(cluster: &Cluster) -> Vec<usize> {
    let nodes = cluster.output_of(&["admin", "nodes", "--json"]);
    let nodes: Vec<Value> = serde_json::from_str(&nodes).expect("JSON");
    let is_busy = |number: &usize| {
        let name = Cluster::datanode(*number);
        let busy = |node: &Value| node["server"]["name"] == name.as_str() && node["busy"] == true;
        nodes.iter().any(busy)
    };
    (1..=DATANODES).filter(is_busy).collect()
}

#[test]
fn every_primary_goes_through_a_day_and_no_byte_is_lost() {
    if !can_mount() {
        return;
    }
    // Each server has an owner of its own: one for each cell of the grid.
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: DATANODES,
        block_size: "4MiB",
        policy: "harvest",
        ..ClusterOptions::default()
    });
    let trace = cluster.path("turns.csv");
    fs::write(&trace, turns()).expect("it can be written");
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_ms = now.expect("the clock is past 1970").as_millis().to_string();
    for number in 1..=DATANODES {
        let lines = format!(
            "[primary]\nsource = \"trace\"\ntrace = \"../turns.csv\"\nseries = \"server-{number}\"\n\
             trace_speed = {SPEED}.0\nsettle_s = 0.5\n"
        );
        // All of them replay the same day.
        cluster.set_primary(number, &lines, &["--trace-began", &now_ms]);
    }
    cluster.wait_alive(DATANODES as u64, Duration::from_secs(60));
    let mount = cluster.mount("mnt");

    // Files are written and read until every server has been seen busy.
    let length = |number: u64| {
        if number.is_multiple_of(3) {
            6 << 20
        } else {
            30_000
        }
    };
    let mut unseen: BTreeSet<usize> = (1..=DATANODES).collect();
    let mut files = 0;
    let end = Instant::now() + Duration::from_secs(300);
    while !unseen.is_empty() {
        assert!(Instant::now() < end, "never seen busy: {unseen:?}");
        let path = mount.join(format!("file-{files}"));
        let mut file = File::create(&path).expect("a file");
        file.write_all(&Pattern { seed: files }.bytes(length(files)))
            .expect("written");
        file.sync_all().expect("acknowledged");
        let back = files / 2;
        let path = mount.join(format!("file-{back}"));
        Pattern { seed: back }.check_file(&path, length(back) as u64);
        for busy in busy_nodes(&cluster) {
            unseen.remove(&busy);
        }
        assert_diverse(&cluster);
        files += 1;
    }
    for number in 0..files {
        let path = mount.join(format!("file-{number}"));
        Pattern { seed: number }.check_file(&path, length(number) as u64);
    }
    cluster.stop("mnt");
    wait_until("all blocks are sealed", Duration::from_secs(60), || {
        assert_diverse(&cluster) >= files / 3
    });
    let fsck = cluster.fsck();
    assert_eq!(fsck["lost_blocks"], 0, "{fsck:#}");
}

/// No sealed block has two replicas in one environment, machine function or rack, or in one row or
/// column of its round. Returns how many there are.
fn assert_diverse(cluster: &Cluster) -> u64 {
    let report = cluster.output_of(&["admin", "placement", "--json"]);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["misplaced_blocks"], 0, "{report:#}");
    let scores = report["blocks_by_score"].as_array().expect("scores");
    let sealed: u64 = scores.iter().filter_map(Value::as_u64).sum();
    assert_eq!(scores[5].as_u64(), Some(sealed), "{scores:?}");
    sealed
}

#[test]
fn when_all_are_busy_an_operation_fails_in_time_and_then_works_again() {
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    });
    let source = cluster.path("source");
    fs::write(&source, Pattern { seed: 1 }.bytes(300_000)).expect("a file");
    let put = ["fs", "put", &source.to_string_lossy(), "/file"].map(str::to_owned);
    cluster.output_of(&put);
    fs::write(cluster.path("full.csv"), "series,values\nfull,9900\n").expect("a trace");
    for number in 1..=3 {
        let lines = "[primary]\nsource = \"trace\"\ntrace = \"../full.csv\"\n";
        cluster.set_primary(number, lines, &[]);
    }
    wait_until("all are busy", Duration::from_secs(60), || {
        (1..=3).all(|number| cluster.node_status(number)["busy"] == true)
    });
    // They are alive nevertheless, and nothing on them counts as missing.
    let fsck = cluster.fsck();
    assert_eq!(fsck["lost_blocks"], 0, "{fsck:#}");
    assert_eq!(fsck["missing_replicas"], 0, "{fsck:#}");
    let began = Instant::now();
    let read = cluster.command(&["fs", "cat", "/file"]);
    assert!(!read.status.success());
    let said = String::from_utf8_lossy(&read.stderr).into_owned();
    assert!(said.contains("busy"), "{said}");
    assert!(began.elapsed() < Duration::from_secs(60));
    fs::write(cluster.path("full.csv"), "series,values\nfull,100\n").expect("a trace");
    for number in 1..=3 {
        cluster.stop(&Cluster::datanode(number));
        cluster.start_datanode(number);
    }
    let read = cluster.command(&["fs", "cat", "/file"]);
    assert!(read.status.success());
    assert!(read.stdout == Pattern { seed: 1 }.bytes(300_000));
}
