//! Several namenodes as an operator has them: all are replaced while programs go on, what cannot be a
//! member is refused, and what is interrupted is gone on with.

mod at_once;
mod attacks;
mod full_disks;
mod grown;
mod interrupted;
mod leaderless;
mod majority;
mod proxy;
mod refused;
mod replaced;
mod snapshot;
mod told;

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use harvestfs_tests::{Cluster, harvestfs, wait_until};

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a command that is to fail, and gives what it says.
fn fails(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.command(arguments);
    assert!(!output.status.success(), "{arguments:?}: {output:?}");
    stderr(&output)
}

fn address(cluster: &Cluster, number: usize) -> String {
    cluster.namenodes()[number - 1].to_string()
}

/// Begins a command, which is looked at while it runs.
fn begin(cluster: &Cluster, arguments: &[&str]) -> Child {
    Command::new(harvestfs())
        .args(arguments)
        .env("HARVESTFS_DATA", cluster.path(""))
        .env_remove("HARVESTFS_CLIENT_CONFIG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs")
}

/// Where those listen that have a vote.
fn voters(cluster: &Cluster) -> Vec<SocketAddr> {
    let group = cluster.group();
    let members = group["members"].as_array().expect("members").iter();
    let voters = members.filter(|it| it["is_voter"] == true);
    let mut addrs: Vec<SocketAddr> = voters
        .map(|it| {
            it["addr"]
                .as_str()
                .expect("text")
                .parse()
                .expect("an address")
        })
        .collect();
    addrs.sort();
    addrs
}

/// Has a namenode lead. It may have to be reached first, if it has just been started, and another one may be quicker on a
/// machine that is busy: then the operator is told to try again. Returns what the command said in the end.
fn hand_over(cluster: &Cluster, number: usize) -> String {
    let to = address(cluster, number);
    let mut said = String::new();
    wait_until("it leads", Duration::from_secs(30), || {
        let output = cluster.command(&["admin", "namenode", "transfer", &to]);
        said = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success()
    });
    said
}

/// Changes which namenodes a configuration names.
fn name_namenodes(config: &Path, namenodes: &[SocketAddr]) {
    let text = fs::read_to_string(config).expect("a configuration");
    let named: Vec<String> = namenodes.iter().map(|it| format!("\"{it}\"")).collect();
    let line = format!("namenodes = [{}]", named.join(", "));
    let (mut changed, mut inside) = (Vec::new(), false);
    for old in text.lines() {
        if old.starts_with("namenodes") {
            changed.push(line.clone());
            inside = !old.contains(']');
        } else if inside {
            inside = !old.contains(']');
        } else {
            changed.push(old.to_owned());
        }
    }
    assert!(changed.contains(&line), "{text}");
    fs::write(config, changed.join("\n") + "\n").expect("it can be written");
}
