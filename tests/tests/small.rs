//! Clusters of three and four datanodes continue while one is unavailable, and report it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, can_mount, harvestfs, wait_until};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(30);
const FILE_BYTES: u64 = 50_000;

fn write_synced(path: &Path, seed: u64) {
    let began = Instant::now();
    let mut file = File::create(path).expect("a file");
    file.write_all(&Pattern { seed }.bytes(FILE_BYTES as usize))
        .expect("written");
    file.sync_data().expect("acknowledged");
    assert!(began.elapsed() < DEADLINE, "it took {:?}", began.elapsed());
}

/// Available and free bytes, as shown by `df`.
fn available_and_free(mount: &Path) -> (u64, u64) {
    let totals = rustix::fs::statvfs(mount).expect("totals");
    (totals.f_bavail, totals.f_bfree)
}

fn doctor(cluster: &Cluster) -> String {
    let output = cluster.command(&["admin", "doctor"]);
    String::from_utf8(output.stdout).expect("text")
}

fn writes(cluster: &Cluster) -> Value {
    let status = cluster.output_of(&["admin", "status", "--json"]);
    let status: Value = serde_json::from_str(&status).expect("JSON");
    status["writes"].clone()
}

/// Gets a path, as the page and Prometheus do.
fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    answer
}

fn datanodes_of(cluster: &Cluster, path: &str) -> Vec<String> {
    let report = cluster.output_of(&["admin", "placement", "--json", "--file", path]);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let replicas = report["blocks"][0]["replicas"].as_array();
    let names = replicas.into_iter().flatten().map(|it| &it["server"]);
    names
        .filter_map(|it| it.as_str().map(String::from))
        .collect()
}

#[test]
fn writes_go_on_without_one_datanode_and_all_is_told() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        block_size: "4MiB",
        policy: "harvest",
        ..ClusterOptions::default()
    });
    let page = cluster.serve_page();
    let (page, token) = page["http://".len()..].split_once('/').expect("a path");
    let page: SocketAddr = page.parse().expect("an address");
    let get = |path: &str| get(page, &format!("{path}{token}"));
    let mount = cluster.mount("mnt");
    write_synced(&mount.join("before"), 1);
    // The namenode was restarted for its page.
    wait_until("all datanodes are back", DEADLINE, || {
        writes(&cluster)["verdict"] == "whole"
    });
    let (available, free) = available_and_free(&mount);
    assert!(available > 0 && available <= free);

    // The first writes find out that it is gone.
    cluster.kill(&Cluster::datanode(1));
    for seed in 10..13 {
        write_synced(&mount.join(format!("without-{seed}")), seed);
    }
    wait_until("the namenode knows", DEADLINE, || {
        writes(&cluster)["verdict"] == "fewer"
    });
    let told = "new blocks get 2 of 3 replicas for now: 1 is silent";
    assert!(doctor(&cluster).contains(told), "{}", doctor(&cluster));
    let metrics = get("/metrics");
    assert!(
        metrics.contains("harvestfs_namenode_write_replicas{number=\"at_once\"} 2"),
        "{metrics}"
    );
    assert!(available_and_free(&mount).0 > 0);

    // With one of three, nothing can be written, and every command reports that.
    cluster.kill(&Cluster::datanode(2));
    wait_until("the namenode knows", DEADLINE, || {
        writes(&cluster)["verdict"] == "waits"
    });
    let told = "a write needs 2 datanodes, and 1 can take it now: 2 are silent";
    assert!(doctor(&cluster).contains(told), "{}", doctor(&cluster));
    let classes = get("/classes");
    assert!(classes.contains("\"version\":1"), "{classes}");
    let watched = get("/api/cluster");
    assert!(watched.contains(told), "{watched}");
    let (available, free) = available_and_free(&mount);
    assert!(available == 0 && free > 0);

    // A write waits for them. (Not in this process, whose children would close the file, and wait, too.)
    let source = cluster.path("source");
    fs::write(&source, Pattern { seed: 2 }.bytes(FILE_BYTES as usize)).expect("a file");
    let mut writer = Command::new(harvestfs())
        .args(["fs", "put", &source.to_string_lossy(), "/waiting"])
        .env("HARVESTFS_DATA", cluster.path(""))
        .env_remove("HARVESTFS_CLIENT_CONFIG")
        .spawn()
        .expect("the binary runs");
    std::thread::sleep(Duration::from_secs(1));
    assert!(writer.try_wait().expect("its status").is_none());
    cluster.start_datanode(1);
    cluster.start_datanode(2);
    assert!(writer.wait().expect("its status").success());
    Pattern { seed: 2 }.check_file(&mount.join("waiting"), FILE_BYTES);
    wait_until("writes get all replicas", DEADLINE, || {
        writes(&cluster)["verdict"] == "whole"
    });

    for seed in 10..13 {
        let path = mount.join(format!("without-{seed}"));
        Pattern { seed }.check_file(&path, FILE_BYTES);
    }
}

#[test]
fn writes_go_on_while_the_owner_needs_one_of_four() {
    let Some((mut cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 4,
        block_size: "4MiB",
        policy: "harvest",
        ..ClusterOptions::default()
    }) else {
        return;
    };
    fs::write(cluster.path("full.csv"), "series,values\nfull,9900\n").expect("a trace");
    let lines = "[primary]\nsource = \"trace\"\ntrace = \"../full.csv\"\n";
    cluster.set_primary(2, lines, &[]);
    wait_until("it is busy", DEADLINE, || {
        cluster.node_status(2)["busy"] == true
    });
    for seed in 0..3 {
        write_synced(&mount.join(format!("f{seed}")), seed);
    }
    let writes = writes(&cluster);
    assert_eq!(writes["unavailable"]["busy"], 1);
    assert!(writes["at_once"].as_u64() >= Some(2), "{writes:#}");
    let datanodes = datanodes_of(&cluster, "/f2");
    assert!(datanodes.len() >= 2, "{datanodes:?}");
    assert!(!datanodes.contains(&Cluster::datanode(2)));
}

#[test]
fn a_datanode_that_is_restarted_is_waited_for() {
    let mut cluster = Cluster::start(&ClusterOptions {
        restart_wait_s: 60,
        ..ClusterOptions::default()
    });
    cluster.wait_alive(4, DEADLINE);
    let source = cluster.path("source");
    fs::write(&source, Pattern { seed: 1 }.bytes(FILE_BYTES as usize)).expect("a file");
    cluster.output_of(&["fs", "put", &source.to_string_lossy(), "/file"]);
    let name = datanodes_of(&cluster, "/file").remove(0);
    let number = name.rsplit('-').next().and_then(|it| it.parse().ok());
    let number: usize = number.expect("a datanode of the cluster");
    cluster.stop(&name);
    let left_ms = cluster.node_status(number)["maintenance_left_ms"].as_u64();
    assert!(left_ms > Some(50_000), "{left_ms:?}");
    cluster.start_datanode(number);
    wait_until("it is as any other", DEADLINE, || {
        let status = cluster.node_status(number);
        status["maintenance_left_ms"].is_null() && status["alive"] == true
    });
    cluster.wait_healthy();
}
