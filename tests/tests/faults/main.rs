//! Databases and logs on a mount whose cluster has faults: everything acknowledged is preserved, and no program
//! gets an error.

mod churn;
mod databases;
mod logs;
mod meddler;
mod worker;

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{BufRead, stdin};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, have_program, postgresql, wait_until};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use self::databases::{PostgreSql, Sqlite};
use self::logs::{Appends, Follows, SharedLog};
use self::meddler::Meddler;
use self::worker::{DONE, PLACE, ROLE, Said, Worker};

/// Maximum time for a program to make progress after a fault: leases and clients' timeouts end before.
const PROGRESS_DEADLINE: Duration = Duration::from_secs(60);
const DATANODES: usize = 3;

/// Programs that work on a mount, and report their progress with increasing numbers.
trait Workload {
    fn name(&self) -> String;

    /// The mount on which they work: `one` or `other`.
    fn mount(&self) -> &'static str;

    /// Called before the first start.
    fn prepare(&mut self) {}

    /// Starts them; `said` contains their reports from before the mount was killed.
    fn start(&mut self, said: &BTreeMap<String, Vec<Said>>) -> Vec<Worker>;

    /// Checks that nothing has failed so far.
    fn before_the_mount_is_killed(&self) {}

    /// Called after the mount was killed.
    fn end_without_mount(&mut self) {}

    /// Checks, at the end, that what they reported (`said`) is preserved.
    fn check(&self, _mounts: [&Path; 2], _said: &BTreeMap<String, Vec<Said>>) {}
}

struct Running {
    workload: Box<dyn Workload>,
    workers: Vec<Worker>,
    said: BTreeMap<String, Vec<Said>>,
}

impl Running {
    fn start(&mut self) {
        self.workers = self.workload.start(&self.said);
    }

    /// The sum of the last numbers of the workers, all of which run.
    fn progress(&mut self) -> u64 {
        let last = |worker: &mut Worker| {
            worker.check_running();
            worker.said().last().map_or(0, |&(number, _)| number + 1)
        };
        self.workers.iter_mut().map(last).sum()
    }

    fn end(&mut self, end: impl Fn(Worker) -> Vec<Said>) {
        for worker in self.workers.drain(..) {
            let name = worker.name.clone();
            self.said.entry(name).or_default().extend(end(worker));
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Killed(&'static str),
    Hangs(&'static str),
}

/// Any datanode.
const DATANODE: &str = "datanode";

const FAULTS: [Fault; 8] = [
    Fault::Killed("namenode"),
    Fault::Hangs("namenode"),
    Fault::Killed(DATANODE),
    Fault::Hangs(DATANODE),
    Fault::Killed("one"),
    Fault::Hangs("one"),
    Fault::Killed("other"),
    Fault::Hangs("other"),
];

/// A cluster with programs on it.
struct Disturbed {
    // If the test fails, programs may not end before the cluster that they wait for.
    cluster: Cluster,
    running: Vec<Running>,
    random: StdRng,
    /// Begin and end of each fault.
    disturbed: Vec<(Instant, Instant)>,
}

impl Disturbed {
    /// Waits until each workload, or each on the given mount, has made progress.
    fn wait_for_progress(&mut self, what: &str, mount: Option<&str>) {
        let concerned = |it: &&mut Running| mount.is_none_or(|mount| it.workload.mount() == mount);
        let mut before = Vec::new();
        for running in self.running.iter_mut().filter(concerned) {
            before.push(running.progress());
        }
        let end = Instant::now() + PROGRESS_DEADLINE;
        for (running, before) in self.running.iter_mut().filter(concerned).zip(before) {
            while running.progress() <= before {
                let name = running.workload.name();
                assert!(Instant::now() < end, "{name} does not get on: {what}");
                sleep(Duration::from_millis(20));
            }
        }
    }

    fn disturb(&mut self, fault: Fault) {
        let began = Instant::now();
        let datanode = self.random.random_range(1..=DATANODES);
        let part = |part: &str| match part {
            DATANODE => Cluster::datanode(datanode),
            part => part.to_owned(),
        };
        let pause = Duration::from_millis(self.random.random_range(200..1000));
        match fault {
            Fault::Killed(mount @ ("one" | "other")) => {
                let concerned = |it: &&mut Running| it.workload.mount() == mount;
                for running in self.running.iter_mut().filter(concerned) {
                    running.workload.before_the_mount_is_killed();
                }
                self.cluster.kill(mount);
                for running in self.running.iter_mut().filter(concerned) {
                    running.workload.end_without_mount();
                    running.end(Worker::end_without_mount);
                }
                self.cluster.mount(mount);
                for running in self.running.iter_mut().filter(concerned) {
                    running.start();
                }
            }
            Fault::Killed(name) => {
                self.cluster.kill(&part(name));
                sleep(pause);
                match name {
                    DATANODE => self.cluster.start_datanode(datanode),
                    _ => self.cluster.start_namenode(),
                }
            }
            Fault::Hangs(name) => {
                self.cluster.pause(&part(name));
                match name {
                    // A hang of these delays the others only briefly.
                    DATANODE | "other" => self.wait_for_progress("a part hangs", Some("one")),
                    _ => sleep(pause * 3),
                }
                self.cluster.resume(&part(name));
            }
        }
        self.wait_for_progress(&format!("after {fault:?}"), None);
        let ended = Instant::now();
        self.disturbed.push((began, ended));
        eprintln!("{fault:?}: got on after {:?}", ended - began);
    }

    fn check(mut self) {
        // A follower has to see the last records of the others.
        let appended = self.end("appends");
        wait_until("the last record is seen", PROGRESS_DEADLINE, || {
            let follows = self.running_mut("follows");
            appended
                .last()
                .is_some_and(|&(last, _)| follows.progress() > last)
        });
        let seen = self.end("follows");
        logs::check_followed(&appended, &seen, &self.disturbed);
        let mounts = ["one", "other"].map(|mount| self.cluster.path(mount));
        for mut running in std::mem::take(&mut self.running) {
            running.end(Worker::finish);
            let name = running.workload.name();
            let count: usize = running.said.values().map(Vec::len).sum();
            eprintln!("{name}: {count} steps were acknowledged");
            running
                .workload
                .check([&mounts[0], &mounts[1]], &running.said);
        }
    }

    fn running_mut(&mut self, name: &str) -> &mut Running {
        let mut all = self.running.iter_mut();
        all.find(|it| it.workload.name() == name)
            .expect("it is there")
    }

    /// Ends a workload with one worker; returns what that reported.
    fn end(&mut self, name: &str) -> Vec<Said> {
        let running = self.running_mut(name);
        running.end(Worker::finish);
        running.said.values().next().expect("one").clone()
    }
}

fn setting(name: &str, default: u64) -> u64 {
    let value = std::env::var(name);
    value.map_or(default, |value| value.parse().expect("a number"))
}

/// Each round has all faults, in a different order. For longer and different runs:
///
///     HARVESTFS_FAULTS_ROUNDS=20 HARVESTFS_FAULTS_SEED=2 cargo test --workspace --test faults -- --nocapture
#[test]
fn databases_and_logs_keep_what_they_acknowledged_whatever_is_killed_or_hangs() {
    let Some((cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    // The temporary directory may be accessible only to root.
    fs::set_permissions(cluster.path(""), Permissions::from_mode(0o755)).expect("chmod");
    let local = cluster.path("local");
    fs::create_dir(&local).expect("mkdir");
    fs::create_dir(one.join("work")).expect("mkdir");
    let mut workloads: Vec<Box<dyn Workload>> = Vec::new();
    if let Some(programs) = postgresql() {
        let server = PostgreSql::new(one.clone(), programs, local.clone());
        workloads.push(Box::new(server));
    }
    if have_program("sqlite3", "apt install sqlite3").is_some() {
        for journal_mode in ["wal", "delete", "truncate", "persist"] {
            let mount = one.clone();
            workloads.push(Box::new(Sqlite {
                mount,
                journal_mode,
            }));
        }
    }
    for lock in ["flock", "fcntl"] {
        workloads.push(Box::new(SharedLog {
            mount: one.clone(),
            local: local.clone(),
            lock,
            writers: 2,
        }));
    }
    workloads.push(Box::new(Appends { mount: one }));
    workloads.push(Box::new(Follows {
        mount: other.clone(),
    }));
    workloads.push(Box::new(Meddler { mount: other }));
    let mut disturbed = Disturbed {
        cluster,
        running: Vec::new(),
        random: StdRng::seed_from_u64(setting("HARVESTFS_FAULTS_SEED", 1)),
        disturbed: Vec::new(),
    };
    for mut workload in workloads {
        workload.prepare();
        disturbed.running.push(Running {
            workload,
            workers: Vec::new(),
            said: BTreeMap::new(),
        });
    }
    disturbed.running.iter_mut().for_each(Running::start);
    disturbed.wait_for_progress("nothing happened", None);
    for _ in 0..setting("HARVESTFS_FAULTS_ROUNDS", 1) {
        let mut faults = FAULTS;
        faults.shuffle(&mut disturbed.random);
        for fault in faults {
            disturbed.disturb(fault);
        }
    }
    disturbed.check();
}

/// Not a test by itself, but the code of a [`Worker::of_this_test`], which does a step for each line that it reads.
#[test]
fn works_as_told() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let place = std::env::var(PLACE).expect("a place");
    let done = setting(DONE, 0);
    let step = match role.as_str() {
        "append" => logs::append(&place, done),
        "follow" => logs::follow(&place, done),
        "churn" => Ok(churn::churn(&place, done)),
        "churn-watched" => Ok(churn::churn_watched(&place, done)),
        "sync" => churn::sync(&place),
        "listen" => churn::listen(&place),
        "meddle" => Ok(meddler::meddle(&place, done)),
        lock => logs::append_to_shared_log(lock, &place, done > 0),
    };
    let mut step = step.unwrap_or_else(|error| panic!("{role}: {error}"));
    println!("\nready");
    for _ in stdin().lock().lines() {
        match step() {
            Ok(number) => println!("{number}"),
            Err(error) => {
                println!("{role} failed: {error}");
                return;
            }
        }
    }
}
