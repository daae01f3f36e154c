//! Primary tenants that come and go: reads fail over, writes go elsewhere, and not a byte is lost.

use std::{
    fs::{self, File},
    io::Write,
    time::{Duration, Instant},
};

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, can_mount, wait_until};

const DATANODES: usize = 6;
/// Seconds for which each primary needs its server, one after the other.
const TURN_S: usize = 4;
/// A sample of five minutes passes in a second.
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

/// Starts a datanode again, with another primary tenant.
fn set_primary(cluster: &mut Cluster, number: usize, lines: &str) {
    cluster.stop(&Cluster::datanode(number));
    let path = cluster
        .path(&Cluster::datanode(number))
        .join("datanode.toml");
    let config = fs::read_to_string(&path).expect("its configuration");
    let config = config.replace("[primary]\nsource = \"none\"\n", lines);
    assert!(config.contains(lines), "{config}");
    fs::write(&path, config).expect("it can be written");
    cluster.start_datanode(number);
}

fn busy_nodes(cluster: &Cluster) -> Vec<u64> {
    (1..=DATANODES as u64)
        .filter(|&number| cluster.node_status(number as usize)["busy"] == true)
        .collect()
}

#[test]
fn primaries_take_turns_and_no_byte_is_lost() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: DATANODES,
        block_size: "4MiB",
        ..ClusterOptions::default()
    });
    let trace = cluster.path("turns.csv");
    fs::write(&trace, turns()).expect("it can be written");
    for number in 1..=DATANODES {
        let lines = format!(
            "[primary]\nsource = \"trace\"\ntrace = \"../turns.csv\"\nseries = \"server-{number}\"\n\
             trace_speed = {SPEED}.0\nsettle_s = 0.5\n"
        );
        set_primary(&mut cluster, number, &lines);
    }
    let mount = cluster.mount("mnt");

    // A whole round of turns and a bit, in which files are written and read.
    let end = Instant::now() + Duration::from_secs((DATANODES * TURN_S + 4) as u64);
    let mut seen_busy = std::collections::BTreeSet::new();
    let mut files = 0;
    while Instant::now() < end {
        let path = mount.join(format!("file-{files}"));
        let length = if files % 3 == 0 { 6 << 20 } else { 30_000 };
        let mut file = File::create(&path).expect("a file");
        file.write_all(&Pattern { seed: files }.bytes(length))
            .expect("written");
        file.sync_all().expect("acknowledged");
        let back = files / 2;
        let length = if back % 3 == 0 { 6 << 20 } else { 30_000 };
        Pattern { seed: back }.check_file(&mount.join(format!("file-{back}")), length);
        seen_busy.extend(busy_nodes(&cluster));
        files += 1;
    }
    assert!(seen_busy.len() >= 3, "busy were only {seen_busy:?}");
    for number in 0..files {
        let length = if number % 3 == 0 { 6 << 20 } else { 30_000 };
        Pattern { seed: number }.check_file(&mount.join(format!("file-{number}")), length);
    }
    let fsck = cluster.fsck();
    assert_eq!(fsck["lost_blocks"], 0, "{fsck:#}");
    cluster.stop("mnt");
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
        set_primary(&mut cluster, number, lines);
    }
    wait_until("all are busy", Duration::from_secs(20), || {
        (1..=3).all(|number| cluster.node_status(number)["busy"] == true)
    });
    // They are alive all the same, and nothing on them counts as missing.
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
