//! The transfer of a snapshot to another namenode is interrupted.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions, harvestfs, wait_until};
use rustix::fs::{XattrFlags, setxattr};

use super::{address, stderr, voters};

const NAMENODES: usize = 3;
const DEADLINE: Duration = Duration::from_secs(120);
/// Number of files with an attribute of maximum size, so that the snapshot takes a while.
const FILES: usize = 400;
const ATTRIBUTE_BYTES: usize = 60_000;
/// Number of attempts, as a snapshot may arrive completely before its sender is killed.
const ATTEMPTS: usize = 5;

/// Bytes of an incomplete snapshot that have arrived from another namenode.
fn received_bytes(data: &Path) -> Option<u64> {
    let entries = fs::read_dir(data.join("journal")).ok()?;
    let received = entries.flatten().find(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("received-")
    });
    Some(received?.metadata().ok()?.len())
}

#[test]
fn a_learner_whose_snapshot_is_cut_off_catches_up_from_the_next_leader() {
    let options = ClusterOptions {
        namenodes: NAMENODES,
        datanodes: 3,
        ..ClusterOptions::default()
    };
    let Some((mut cluster, mount)) = Cluster::mounted(&options) else {
        return;
    };
    for number in 0..FILES {
        let path = mount.join(format!("file-{number}"));
        fs::write(&path, number.to_string()).expect("write");
        let value = vec![number as u8; ATTRIBUTE_BYTES];
        setxattr(&path, "user.large", &value, XattrFlags::empty()).expect("an attribute");
    }
    cluster.output_of(&["admin", "snapshot"]);
    let mut cut_bytes = None;
    for attempt in 1..=ATTEMPTS {
        let new = cluster.make_namenode();
        let data = cluster.path(&Cluster::namenode_name(new)).join("data");
        let leader = cluster.leader();
        let mut adding = Command::new(harvestfs())
            .args(["admin", "namenode", "add", &address(&cluster, new)])
            .env("HARVESTFS_DATA", cluster.path(""))
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let began = Instant::now();
        while received_bytes(&data).is_none_or(|bytes| bytes == 0) && began.elapsed() < DEADLINE {
            thread::sleep(Duration::from_micros(200));
        }
        cluster.kill(&Cluster::namenode_name(leader));
        // An incomplete snapshot is never used, and remains until the next one arrives.
        cut_bytes = received_bytes(&data);
        // The command may continue with the next leader, or print what to do.
        let said = adding.wait_with_output_within(DEADLINE);
        println!("attempt {attempt}: cut off at {cut_bytes:?}; {said}");
        if cut_bytes.is_some() && !said.contains("exit status: 0") {
            assert!(said.contains("admin namenode list"), "{said}");
        }
        assert_ne!(cluster.leader(), leader);
        fs::write(mount.join(format!("attempt-{attempt}")), "the others go on").expect("write");
        wait_until("it is added", DEADLINE, || {
            let addr = cluster.namenodes()[new - 1];
            voters(&cluster).contains(&addr) || {
                let output = cluster.command(&["admin", "namenode", "add", &addr.to_string()]);
                output.status.success() || {
                    println!("    {}", stderr(&output).trim());
                    false
                }
            }
        });
        cluster.start_namenode_number(leader);
        wait_until("all have everything", DEADLINE, || cluster.all_follow());
        if cut_bytes.is_some() {
            // It leads with the state that it received.
            wait_until("the new one leads", DEADLINE, || {
                let to = address(&cluster, new);
                cluster.command(&["admin", "namenode", "transfer", &to]);
                cluster.leader() == new
            });
            break;
        }
        cluster.output_of(&["admin", "namenode", "remove", &address(&cluster, leader)]);
        cluster.stop(&Cluster::namenode_name(leader));
    }
    assert!(cut_bytes.is_some(), "no snapshot was cut off");
    for number in 0..FILES {
        let path = mount.join(format!("file-{number}"));
        assert_eq!(fs::read_to_string(&path).expect("read"), number.to_string());
        let mut value = vec![0; ATTRIBUTE_BYTES];
        let length = rustix::fs::getxattr(&path, "user.large", &mut value).expect("an attribute");
        assert_eq!(length, ATTRIBUTE_BYTES);
        assert!(value.iter().all(|it| *it == number as u8), "file-{number}");
    }
    cluster.wait_healthy();
}

trait WaitWithin {
    fn wait_with_output_within(&mut self, deadline: Duration) -> String;
}

impl WaitWithin for std::process::Child {
    /// Its exit status and output.
    fn wait_with_output_within(&mut self, deadline: Duration) -> String {
        let mut status = None;
        wait_until("the command ends", deadline, || {
            status = self.try_wait().expect("it is our child");
            status.is_some()
        });
        let mut said = String::new();
        if let Some(stderr) = &mut self.stderr {
            std::io::Read::read_to_string(stderr, &mut said).expect("text");
        }
        format!("{}: {}", status.expect("waited for"), said.trim())
    }
}
