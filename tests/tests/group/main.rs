//! Groups of namenodes from an operator's point of view: all members are replaced while programs run, invalid
//! members are refused, and interrupted changes are continued.

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
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, harvestfs, wait_until};

/// Maximum time until a namenode leads that is asked to.
const LEADS_WITHIN: Duration = Duration::from_secs(120);

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a command that must fail, and returns its output.
fn fails(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.command(arguments);
    assert!(!output.status.success(), "{arguments:?}: {output:?}");
    stderr(&output)
}

fn address(cluster: &Cluster, number: usize) -> String {
    cluster.namenodes()[number - 1].to_string()
}

/// Starts a command that is observed while it runs.
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

/// Addresses of the members that have a vote.
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

/// Makes a namenode the leader. It may first have to be reached, if it has just been started, and another one may be
/// faster on a busy machine: then the operator has to try again. Returns the output of the command that succeeded; none
/// if the namenode leads though the command failed.
fn hand_over(cluster: &Cluster, number: usize) -> Option<String> {
    let to = address(cluster, number);
    let deadline = Instant::now() + LEADS_WITHIN;
    loop {
        let output = cluster.command(&["admin", "namenode", "transfer", &to]);
        if output.status.success() {
            return Some(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        // It may have been elected anyway, or have taken over after the command gave up: one that leads already is
        // refused, however often the operator tries.
        if cluster.leader() == number {
            return None;
        }
        assert!(Instant::now() < deadline, "{to} does not lead: {output:?}");
    }
}

/// Removes a namenode from the group. If it leads, as after an election of which this test knows nothing, `successor`
/// takes over first.
fn remove(cluster: &Cluster, number: usize, successor: usize) {
    let addr = address(cluster, number);
    wait_until("it is removed", LEADS_WITHIN, || {
        if cluster.leader() == number {
            hand_over(cluster, successor);
        }
        let output = cluster.command(&["admin", "namenode", "remove", &addr]);
        let is_leader = stderr(&output).contains("the namenode that leads cannot be removed");
        assert!(output.status.success() || is_leader, "{output:?}");
        output.status.success()
    });
}

/// Replaces the namenodes in a configuration.
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
