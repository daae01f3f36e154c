//! All namenodes are replaced one after the other, and running parts learn about it.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, wait_until};

use super::{address, name_namenodes, remove, voters};

const NAMENODES: usize = 3;
const DATANODES: usize = 3;
const DEADLINE: Duration = Duration::from_secs(120);
/// Maximum duration of an operation; after a longer time, a program would get an error.
const OPERATION_WITHIN: Duration = Duration::from_secs(30);
const FILE_BYTES: usize = 20_000;

/// A program that creates, syncs, reads back and removes files until it is stopped.
struct Program {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<(u64, Duration)>,
}

impl Program {
    fn start(directory: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let (mut files, mut longest) = (0, Duration::ZERO);
            while !stopped.load(Ordering::Relaxed) {
                let began = Instant::now();
                let content = Pattern { seed: files }.bytes(FILE_BYTES);
                let path = directory.join(format!("file-{files}"));
                let mut file = File::create_new(&path).expect("create");
                file.write_all(&content).expect("write");
                file.sync_all().expect("fsync");
                drop(file);
                let before = files.saturating_sub(20);
                let expected = Pattern { seed: before }.bytes(FILE_BYTES);
                let read = fs::read(directory.join(format!("file-{before}"))).expect("read");
                assert!(read == expected, "file-{before} has other bytes");
                longest = longest.max(began.elapsed());
                files += 1;
                thread::sleep(Duration::from_millis(20));
            }
            (files, longest)
        });
        Self { stop, thread }
    }

    /// Stops it. Returns the number of files that it wrote, none of which took too long.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let (files, longest) = self.thread.join().expect("nothing failed");
        println!("{files} files, nothing failed, and the longest wait was {longest:?}");
        assert!(longest < OPERATION_WITHIN, "{longest:?}");
        files
    }
}

/// Adds a new namenode to the group, and removes an old one.
fn replace(cluster: &mut Cluster, old: usize) -> usize {
    let new = cluster.make_namenode();
    cluster.output_of(&["admin", "namenode", "add", &address(cluster, new)]);
    remove(cluster, old, new);
    new
}

#[test]
fn mounts_and_datanodes_go_on_when_all_namenodes_that_they_knew_are_gone() {
    let options = ClusterOptions {
        namenodes: NAMENODES,
        datanodes: DATANODES,
        ..ClusterOptions::default()
    };
    let Some((mut cluster, mount)) = Cluster::mounted(&options) else {
        return;
    };
    let directory = mount.join("d");
    fs::create_dir(&directory).expect("mkdir");
    let program = Program::start(directory.clone());
    // First those that follow.
    let leader = cluster.leader();
    let mut old: Vec<usize> = (1..=NAMENODES).filter(|it| *it != leader).collect();
    old.push(leader);
    for number in old {
        replace(&mut cluster, number);
    }
    let mut new = cluster.namenodes()[NAMENODES..].to_vec();
    // Only an operator's new commands have to be configured.
    for config in ["admin/client.toml", "client/client.toml"] {
        name_namenodes(&cluster.path(config), &new);
    }
    for number in 1..=NAMENODES {
        cluster.stop(&Cluster::namenode_name(number));
    }
    new.sort();
    assert_eq!(voters(&cluster), new);
    cluster.wait_alive(DATANODES as u64, DEADLINE);

    // What the mount and the datanodes have learned is sufficient for a failover.
    let leader = cluster.leader();
    cluster.kill(&Cluster::namenode_name(leader));
    let written = directory.join("after");
    let content = Pattern { seed: 99 }.bytes(3 << 20);
    fs::write(&written, &content).expect("write");
    File::open(&written)
        .expect("open")
        .sync_all()
        .expect("fsync");
    let next = cluster.leader();
    assert!(next > NAMENODES && next != leader, "{next} leads");
    let files = program.end();
    cluster.start_namenode_number(leader);

    // Everything is there, as another mount sees it.
    let other = cluster.mount("other").join("d");
    assert!(fs::read(other.join("after")).expect("read") == content);
    for number in 0..files {
        let expected = Pattern { seed: number }.bytes(FILE_BYTES);
        let read = fs::read(other.join(format!("file-{number}"))).expect("read");
        assert!(read == expected, "file-{number} has other bytes");
    }
    cluster.wait_healthy();
    // Datanodes learn of it with a heartbeat, and do not keep logging that a removed namenode is unreachable.
    let said = |number| {
        let log = cluster.log(&Cluster::datanode(number));
        log.matches("in the group no more").count()
    };
    for number in 1..=DATANODES {
        wait_until("all that left are named", DEADLINE, || {
            said(number) >= NAMENODES
        });
    }
    for number in 1..=DATANODES {
        let log = cluster.log(&Cluster::datanode(number));
        assert_eq!(said(number), NAMENODES, "{log}");
    }
    let running = cluster.running();
    assert_eq!(running.len(), NAMENODES + DATANODES + 2, "{running:?}");
}

#[test]
fn one_namenode_becomes_three_for_a_mount_that_knows_one() {
    let options = ClusterOptions {
        datanodes: DATANODES,
        ..ClusterOptions::default()
    };
    let Some((mut cluster, mount)) = Cluster::mounted(&options) else {
        return;
    };
    let directory = mount.join("d");
    fs::create_dir(&directory).expect("mkdir");
    let program = Program::start(directory);
    for _ in 1..NAMENODES {
        let new = cluster.make_namenode();
        cluster.output_of(&["admin", "namenode", "add", &address(&cluster, new)]);
    }
    let all = cluster.namenodes().to_vec();
    name_namenodes(&cluster.path("admin/client.toml"), &all);
    // All datanodes report to those that are new.
    wait_until("the new ones know the datanodes", DEADLINE, || {
        (1..=DATANODES).all(|number| {
            let log = cluster.log(&Cluster::datanode(number));
            all.iter()
                .all(|addr| log.contains(&format!("registered addr={addr}")))
        })
    });
    cluster.kill("namenode");
    let (next, began) = (cluster.leader(), Instant::now());
    assert_ne!(next, 1);
    fs::write(mount.join("after"), "another one leads").expect("write");
    println!("a write {:?} after another one leads", began.elapsed());
    cluster.wait_alive(DATANODES as u64, DEADLINE);
    program.end();
    cluster.start_namenode();
    cluster.wait_healthy();
}
