//! Real jobs of a real ResourceManager on harvested cycles, with their data on a mount: they finish while owners' load
//! changes, and owners keep their reserve. Needs Java and Hadoop (`tests/yarn/pom.xml`).

mod hadoop;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use harvestfs_tests::{
    Cluster, ClusterOptions, Process, can_mount, harvestfs, have_program, wait_until,
};
use rustix::process::{Pid, Signal, kill_process_group};

use serde_json::Value;

use self::hadoop::{CORES, Hadoop, START_DEADLINE};

/// Replays a sample of five minutes in one second.
const SPEED: u64 = 300;
/// Seconds for which owners use few cores, and then many.
const CALM_S: u64 = 22;
const LIVELY_S: u64 = 14;
/// The owners' use, in percent of all cores. Datanodes serve even with the higher one.
const CALM: u64 = 10;
const LIVELY: u64 = 50;
/// The promised reaction time.
const PROMISED: Duration = Duration::from_secs(3);
/// The time that is never exceeded here, where everything shares two cores.
const AT_MOST: Duration = Duration::from_secs(9);
const JOB_DEADLINE: Duration = Duration::from_secs(150);
const NODES: usize = 2;

/// The owners' day, which repeats: each owner in turn uses many cores.
#[derive(Clone, Copy)]
struct Day {
    began_unix_ms: u64,
}

impl Day {
    const LENGTH_S: u64 = CALM_S + LIVELY_S;

    fn percent(node: usize, second: u64) -> u64 {
        let shifted = second + node as u64 * Self::LENGTH_S / 2;
        if shifted % Self::LENGTH_S < CALM_S {
            CALM
        } else {
            LIVELY
        }
    }

    fn trace() -> String {
        let mut trace = "series,values\n".to_owned();
        for node in 0..NODES {
            let samples =
                (0..Self::LENGTH_S).map(|second| (Self::percent(node, second) * 100).to_string());
            let samples: Vec<String> = samples.collect();
            trace += &format!("server-{},{}\n", node + 1, samples.join(","));
        }
        trace
    }

    /// The current use of a node's owner, and for how long it has been constant.
    fn now(self, node: usize) -> (u64, Duration) {
        let since_ms = unix_ms() - self.began_unix_ms;
        let second = since_ms / 1_000;
        let percent = Self::percent(node, second);
        let same = (0..=second).take_while(|back| Self::percent(node, second - back) == percent);
        let seconds = same.count() as u64 - 1;
        (
            percent,
            Duration::from_millis(seconds * 1_000 + since_ms % 1_000),
        )
    }
}

fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("the clock is past 1970").as_millis() as u64
}

/// Cores that jobs may use while the owner has this use; they may not use the reserve.
fn left_cores(percent: u64) -> u64 {
    CORES - CORES.div_ceil(3) - (CORES * percent).div_ceil(100)
}

/// Measured capacities and use.
#[derive(Debug, Default)]
struct Measured {
    samples: u32,
    /// Times from an owner's rise until no more was offered than it leaves.
    lags: Vec<Duration>,
    /// The longest time after a rise for which more was in use than the owner leaves.
    in_use: Duration,
    /// Maximum number of cores that jobs used on all nodes together.
    used_cores: u64,
}

/// Collects, until the end, the servers on which the namenode's page shows containers of jobs.
fn watch_page(
    page: SocketAddr,
    token: &str,
    places: &Mutex<BTreeSet<String>>,
    is_over: &AtomicBool,
) {
    while !is_over.load(Ordering::SeqCst) {
        let mut answer = String::new();
        let mut stream = TcpStream::connect(page).expect("the page is served");
        write!(
            stream,
            "GET /api/cluster{token} HTTP/1.1\r\nHost: {page}\r\nConnection: close\r\n\r\n"
        )
        .expect("asked");
        stream.read_to_string(&mut answer).expect("answered");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
        let shown: Value = serde_json::from_str(body).expect("JSON");
        let schedulers = shown["schedulers"].as_array().expect("a list");
        let jobs = schedulers.iter().filter_map(|it| it["jobs"].as_array());
        let of_jobs = jobs.flatten().filter_map(|it| it["places"].as_array());
        let servers = of_jobs
            .flatten()
            .filter(|it| it["containers"].as_u64() > Some(0))
            .filter_map(|it| it["server"].as_str());
        let servers = servers.map(str::to_owned);
        places.lock().expect("nothing panicked").extend(servers);
        thread::sleep(Duration::from_secs(1));
    }
}

fn measure(hadoop: &Hadoop, day: Day, is_over: &AtomicBool) -> Measured {
    let mut measured = Measured::default();
    let mut was_too_much = [false; NODES];
    while !is_over.load(Ordering::SeqCst) {
        // Before the ResourceManager is asked: how long its answer takes is not the controller's time.
        let asked: [_; NODES] = std::array::from_fn(|number| day.now(number));
        let shown = hadoop.shown();
        let mut used_cores = 0;
        for (number, node) in shown.into_iter().enumerate() {
            let Some(node) = node else { continue };
            let (percent, since) = asked[number];
            used_cores += node.used_cores;
            measured.samples += 1;
            if day.now(number).0 != percent {
                // The answer may be from before or after the change.
                continue;
            }
            if percent != LIVELY {
                was_too_much[number] = false;
                continue;
            }
            let left = left_cores(percent);
            if node.cores > left {
                was_too_much[number] = true;
                assert!(since < AT_MOST, "{node:?} after {since:?}");
            } else if was_too_much[number] {
                was_too_much[number] = false;
                measured.lags.push(since);
            }
            if node.used_cores > left {
                measured.in_use = measured.in_use.max(since);
                assert!(since < AT_MOST, "{node:?} after {since:?}");
            }
        }
        measured.used_cores = measured.used_cores.max(used_cores);
        thread::sleep(Duration::from_millis(100));
    }
    measured
}

/// Two classes of owners, by a history of three weeks.
fn import_history(cluster: &Cluster) {
    let now_s = unix_ms() / 1_000;
    let mut history = "series,period_s,start_unix_s,values\n".to_owned();
    for (tenant, night) in [(1, 9_000), (2, 1_000)] {
        let sample = |index: u64| {
            if index % 24 < 12 {
                "1000".to_owned()
            } else {
                night.to_string()
            }
        };
        let samples: Vec<String> = (0..21 * 24).map(sample).collect();
        history += &format!(
            "environment-{tenant}/function-{tenant},3600,{},{}\n",
            now_s - 21 * 86_400,
            samples.join(",")
        );
    }
    let file = cluster.path("history.csv");
    fs::write(&file, history).expect("it can be written");
    let file = file.to_str().expect("text");
    cluster.output_of(&["admin", "history", "import", file]);
    cluster.output_of(&["admin", "history", "analyse"]);
}

/// A job's command with everything that it started. Killed when dropped.
struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        // It may have ended by itself.
        let _ = kill_process_group(pid.expect("a child has an id"), Signal::KILL);
        let _ = self.0.wait();
    }
}

/// Begins `harvestfs cycles run` with a class of Hadoop.
fn begin(
    cluster: &Cluster,
    hadoop: &Hadoop,
    job: &str,
    tasks: u32,
    class: &str,
    arguments: &[&str],
) -> Job {
    let file = cluster.path(&format!("{job}.toml"));
    let text = format!("name = \"{job}\"\n[[stages]]\nname = \"all\"\ntasks = {tasks}\n");
    fs::write(&file, text).expect("it can be written");
    let log = fs::File::create(cluster.path(&format!("{job}.log"))).expect("a log");
    let child = Command::new(harvestfs())
        .args(["cycles", "run", "--server-cores", &CORES.to_string()])
        .arg(&file)
        .arg("--")
        .args(hadoop.java("conf", class))
        .args(arguments)
        .envs(hadoop.environment("conf"))
        .env("HARVESTFS_DATA", cluster.path(""))
        .env_remove("HARVESTFS_CLIENT_CONFIG")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("the same log"))
        .stderr(log)
        .spawn()
        .expect("the binary runs");
    Job(child)
}

/// Waits for a job, which must succeed.
fn finish(cluster: &Cluster, job: &str, mut job_command: Job) {
    let end = Instant::now() + JOB_DEADLINE;
    let status = loop {
        if let Some(status) = job_command.0.try_wait().expect("it is our child") {
            break Some(status);
        }
        if Instant::now() > end {
            break None;
        }
        thread::sleep(Duration::from_millis(50));
    };
    let log = fs::read_to_string(cluster.path(&format!("{job}.log"))).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    let last = lines[lines.len().saturating_sub(20)..].join("\n");
    assert!(
        status.is_some_and(|it| it.success()),
        "{job}: {status:?}\n{last}"
    );
    assert!(
        lines[0].contains("harvestfs-"),
        "a class was chosen: {}",
        lines[0]
    );
}

const SHELL: &str = "org.apache.hadoop.yarn.applications.distributedshell.Client";

fn shell_jar(jars: &Path) -> String {
    let jar = jars.join("hadoop-yarn-applications-distributedshell-3.4.2.jar");
    jar.display().to_string()
}

#[test]
fn jobs_finish_on_what_owners_leave() {
    let Some(java) = have_program("java", "apt install openjdk-17-jre-headless") else {
        return;
    };
    let Some(jars) = harvestfs_tests::hadoop() else {
        return;
    };
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: NODES,
        replication: 1,
        ..ClusterOptions::default()
    });
    let page = cluster.serve_page();
    let (page, token) = page["http://".len()..].split_once('/').expect("a path");
    let (page, token): (SocketAddr, _) = (page.parse().expect("an address"), token.to_owned());
    let directory = cluster.path("hadoop");
    fs::create_dir(&directory).expect("a directory");
    let hadoop = Hadoop::start(&java, &jars, &directory, NODES);

    fs::write(cluster.path("day.csv"), Day::trace()).expect("it can be written");
    let day = Day {
        began_unix_ms: unix_ms(),
    };
    for number in 1..=NODES {
        let lines = format!(
            "[primary]\nsource = \"trace\"\ntrace = \"../day.csv\"\nseries = \"server-{number}\"\n\
             trace_speed = {SPEED}.0\nsettle_s = 0.5\n"
        );
        cluster.set_primary(
            number,
            &lines,
            &["--trace-began", &day.began_unix_ms.to_string()],
        );
    }
    cluster.wait_alive(NODES as u64, Duration::from_secs(60));
    import_history(&cluster);
    let mount = cluster.mount("mnt");

    let url = format!("--resource-manager={}", hadoop.url());
    let pairs: Vec<String> = (0..NODES)
        .map(|number| {
            format!(
                "--server={}={}",
                Cluster::datanode(number + 1),
                hadoop.id(number)
            )
        })
        .collect();
    let data = cluster.path("");
    let mut arguments: Vec<&Path> = [
        "cycles",
        "yarn",
        "--user=root",
        "--grow-after=3s",
        "--restore-on-exit",
        "--data",
    ]
    .map(Path::new)
    .to_vec();
    arguments.push(&data);
    arguments.push(Path::new(&url));
    arguments.extend(pairs.iter().map(Path::new));
    let log = cluster.path("controller.log");
    let controller = Process::start("controller", &arguments, &[], &log);
    // The ResourceManager's first requests of each kind take long.
    wait_until(
        "nodes have labels and less than all",
        START_DEADLINE,
        || {
            let shown = hadoop.shown();
            let is_followed = |node: &hadoop::ShownNode| {
                node.cores < CORES && node.memory_mib < 12 << 10 && node.labels.len() == 1
            };
            shown
                .iter()
                .all(|node| node.as_ref().is_some_and(is_followed))
        },
    );

    let is_over = AtomicBool::new(false);
    let places = Mutex::default();
    let measured = thread::scope(|scope| {
        let measuring = scope.spawn(|| measure(&hadoop, day, &is_over));
        let watching = scope.spawn(|| watch_page(page, &token, &places, &is_over));
        // The threads end even if a job fails.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run_jobs(&cluster, &hadoop, &jars, &mount, &places);
        }));
        is_over.store(true, Ordering::SeqCst);
        let measured = measuring.join();
        let watched = watching.join();
        if let Err(panic) = ended {
            std::panic::resume_unwind(panic);
        }
        watched.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        measured.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    println!("{measured:#?}");
    assert!(!measured.lags.is_empty(), "no owner rose");
    let mut lags = measured.lags.clone();
    lags.sort();
    assert!(lags[lags.len() / 2] <= PROMISED, "{lags:?}");
    assert!(
        measured.used_cores >= 4,
        "jobs harvested little: {measured:?}"
    );

    let lengths = fs::read_to_string(cluster.path("admin/job-lengths.json")).expect("remembered");
    assert!(
        lengths.contains("word-count") && lengths.contains("shell"),
        "{lengths}"
    );
    controller.stop();
    // The ResourceManager applies what it was told after it has answered.
    wait_until("all is given back", Duration::from_secs(30), || {
        let is_whole = |node: &hadoop::ShownNode| node.cores == CORES && node.labels.is_empty();
        let shown = hadoop.shown();
        shown.iter().all(|it| it.as_ref().is_some_and(is_whole))
    });
}

fn run_jobs(
    cluster: &Cluster,
    hadoop: &Hadoop,
    jars: &Path,
    mount: &Path,
    places: &Mutex<BTreeSet<String>>,
) {
    let input = mount.join("in");
    fs::create_dir(&input).expect("a directory");
    for number in 0..4 {
        let text = "to be or not to be\n".repeat(1_000);
        fs::write(input.join(format!("file-{number}")), text).expect("written");
    }
    let output = mount.join("out");
    let made = mount.join("made");
    let shell = begin(
        cluster,
        hadoop,
        "shell",
        1,
        SHELL,
        &[
            "-jar",
            &shell_jar(jars),
            "-shell_command",
            &format!("cp {}/file-0 {}", input.display(), made.display()),
            "-num_containers",
            "1",
            "-container_memory",
            "64",
            "-master_memory",
            "256",
            "-node_label_expression",
            "{label}",
        ],
    );
    let count = begin(
        cluster,
        hadoop,
        "word-count",
        2,
        "org.apache.hadoop.examples.ExampleDriver",
        &[
            "wordcount",
            "-Dmapreduce.job.node-label-expression={label}",
            &format!("file://{}", input.display()),
            &format!("file://{}", output.display()),
        ],
    );
    finish(cluster, "shell", shell);
    let made = fs::read_to_string(&made).expect("the job wrote into HarvestFS");
    assert_eq!(made, "to be or not to be\n".repeat(1_000));
    finish(cluster, "word-count", count);
    let counted = fs::read_to_string(output.join("part-r-00000")).expect("the result");
    assert_eq!(counted, "be\t8000\nnot\t4000\nor\t4000\nto\t8000\n");

    // More than owners leave when their load rises: the excess is evicted.
    let greedy = begin(
        cluster,
        hadoop,
        "greedy",
        4,
        SHELL,
        &[
            "-jar",
            &shell_jar(jars),
            "-shell_command",
            "sleep 600",
            "-num_containers",
            "10",
            "-container_memory",
            "64",
            "-master_memory",
            "256",
        ],
    );
    let used = || {
        hadoop
            .shown()
            .iter()
            .flatten()
            .map(|node| node.used_cores)
            .collect::<Vec<_>>()
    };
    let greedy_until = |what: &str, holds: &dyn Fn(&[u64]) -> bool| {
        wait_until(what, Duration::from_secs(90), || holds(&used()));
    };
    greedy_until("much is in use", &|used| {
        used.iter().any(|it| *it > left_cores(LIVELY))
    });
    let full: Vec<u64> = used();
    let busy = (0..NODES)
        .max_by_key(|number| full.get(*number).copied())
        .expect("a node");
    greedy_until("the owner is back and what was too much is gone", &|used| {
        used.get(busy).is_some_and(|it| *it <= left_cores(LIVELY))
    });
    // Once the other owner's load drops, it uses what that one leaves.
    greedy_until("the page showed jobs on each server", &|_| {
        places.lock().expect("nothing panicked").len() == NODES
    });
    drop(greedy);
}
