//! Measures how soon a datanode leaves its primary tenant alone: the time from when the tenant starts to use all cores
//! until a client is refused.
//!
//! ```text
//! cargo run --release -p harvestfs-datanode --example busy_reaction -- [REPETITIONS] [POLICY]
//! ```
//!
//! The primary tenant is a dedicated control group with one process per core that only computes, at normal priority.
//! The datanode is a process with the default gate; POLICY is its scheduling policy as named by `chrt`: `idle` (the
//! default of a datanode in production) or `other`. Needs root, `chrt`, and an otherwise idle machine: otherwise the
//! tenant does not get all cores.

// This module was written for tests: not all of it is needed here, and it unwraps.
#[allow(dead_code, clippy::unwrap_used)]
#[path = "../src/testing/data_client.rs"]
mod data_client;
#[allow(dead_code, clippy::unwrap_used)]
#[path = "../src/testing/fake_namenode.rs"]
mod fake_namenode;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use harvestfs_datanode::{Datanode, DatanodeOptions, PrimarySource, StorageClass, VolumeOptions};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{CertificateAuthority, Identity, Role};
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::token::Right;
use harvestfs_protocol::types::NodeInfo;
use harvestfs_telemetry::primary::{CGROUP_ROOT, DEFAULT_INTERVAL, Own};

use data_client::DataClient;
use fake_namenode::{FakeNamenode, NAMENODE, VALIDITY};

const BLOCK: BlockId = BlockId(1);
const BLOCK_BYTES: usize = 1 << 20;
/// Time between two reads of the client.
const PAUSE: Duration = Duration::from_millis(2);
/// A datanode that neither serves nor refuses within this time is broken.
const DEADLINE: Duration = Duration::from_secs(60);

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let mut args = std::env::args().skip(1);
    match args.next() {
        Some(arg) if arg == "--serve" => {
            let mut next = || args.next().ok_or("--serve needs DIR NAMENODE CGROUP");
            let (dir, namenode, group) = (next()?, next()?, next()?);
            runtime.block_on(serve(Path::new(&dir), &namenode, group.into()))
        }
        repetitions => {
            let repetitions = repetitions.map_or(Ok(21), |it| it.parse())?;
            let policy = args.next().unwrap_or_else(|| "idle".to_owned());
            runtime.block_on(measure(repetitions, &policy))
        }
    }
}

/// Runs one datanode that monitors a control group, until standard input is closed.
async fn serve(dir: &Path, namenode: &str, group: PathBuf) -> Result<(), Failure> {
    let identity = Identity::load(&dir.join("identity"))?;
    let mut options = DatanodeOptions::new(identity, NAMENODE.to_owned(), vec![namenode.parse()?]);
    options.volumes.push(VolumeOptions {
        path: dir.join("volume"),
        quota_bytes: 1 << 30,
        class: StorageClass::Disk,
    });
    options.primary.source = PrimarySource::Cgroup {
        name: group,
        own: Own::ThisProcess,
    };
    let datanode = Datanode::start(options).await?;
    let end = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]));
    end.await??;
    datanode.shutdown().await;
    Ok(())
}

async fn measure(repetitions: u32, policy: &str) -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    let authority = CertificateAuthority::in_memory()?;
    let namenode = FakeNamenode::start(&authority, "127.0.0.1:0".parse()?);
    let identity = authority.issue(Role::Datanode, "dn1", VALIDITY)?;
    identity.save(&dir.path().join("identity"))?;
    let mut primary = Primary::new()?;
    let mut datanode = Command::new("chrt")
        .args([&format!("--{policy}"), "0"])
        .arg(std::env::current_exe()?)
        .arg("--serve")
        .args([
            dir.path(),
            namenode.addr.to_string().as_ref(),
            &primary.group,
        ])
        .stdin(Stdio::piped())
        .spawn()
        .map_err(|error| format!("chrt: {error}; it is part of util-linux"))?;
    let reader = Reader {
        client: DataClient::new(&authority, "reader"),
        node: namenode.node("dn1").await,
        namenode,
    };
    reader.write().await;
    let mut times_ms = Vec::new();
    for repetition in 0..repetitions {
        reader.read_until(|read| read.is_ok()).await?;
        primary.wake()?;
        // Start at a different time between two samples in each repetition.
        tokio::time::sleep(DEFAULT_INTERVAL * repetition / repetitions).await;
        let began = Instant::now();
        primary.compute()?;
        let is_refused = |read: &Result<_, _>| matches!(read, Err(DataError::Busy { .. }));
        reader.read_until(is_refused).await?;
        let took_ms = began.elapsed().as_secs_f64() * 1e3;
        primary.rest()?;
        println!("refused after {took_ms:>6.0} ms");
        times_ms.push(took_ms);
    }
    times_ms.sort_by(f64::total_cmp);
    let worst_ms = times_ms.last().ok_or("no repetition, no result")?;
    let median_ms = times_ms[times_ms.len() / 2];
    println!(
        "A datanode with policy {policy} refuses after {median_ms:.0} ms (median of {repetitions}), \
         {worst_ms:.0} ms at worst."
    );
    drop(datanode.stdin.take());
    datanode.wait()?;
    Ok(())
}

/// A client that reads all the time.
struct Reader {
    client: DataClient,
    node: NodeInfo,
    namenode: FakeNamenode,
}

impl Reader {
    async fn write(&self) {
        let token = self.namenode.token(BLOCK, Right::Write);
        let pipeline = std::slice::from_ref(&self.node);
        let data = vec![7; BLOCK_BYTES];
        self.client.write_block(pipeline, BLOCK, token, &data).await;
    }

    /// Reads repeatedly until the expected result occurs.
    async fn read_until(
        &self,
        is_it: impl Fn(&Result<Vec<u8>, DataError>) -> bool,
    ) -> Result<(), Failure> {
        let token = self.namenode.token(BLOCK, Right::Read);
        let end = Instant::now() + DEADLINE;
        loop {
            let read = self.client.read(&self.node, BLOCK, token, (0, 4096)).await;
            if is_it(&read) {
                return Ok(());
            }
            if Instant::now() > end {
                let read = read.map(|bytes| bytes.len());
                return Err(format!("after {DEADLINE:?} a read still gives {read:?}").into());
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// A control group and the processes in it; dropping this ends both.
struct Primary {
    group: PathBuf,
    processes: Vec<Child>,
}

impl Primary {
    fn new() -> Result<Self, Failure> {
        let root = Path::new(CGROUP_ROOT);
        let is_v2 = root.join("cgroup.controllers").exists();
        let parent = if is_v2 {
            root.to_owned()
        } else {
            root.join("cpuacct")
        };
        let group = parent.join(format!("busy-reaction-{}", std::process::id()));
        std::fs::create_dir(&group)
            .map_err(|error| format!("make the control group {}: {error}", group.display()))?;
        Ok(Self {
            group,
            processes: Vec::new(),
        })
    }

    /// Starts processes that wait.
    fn wake(&mut self) -> Result<(), Failure> {
        for _ in 0..available_parallelism()?.get() {
            let process = Command::new("sh")
                .args(["-c", "read go; while :; do :; done"])
                .stdin(Stdio::piped())
                .spawn()?;
            let id = process.id().to_string();
            self.processes.push(process);
            std::fs::write(self.group.join("cgroup.procs"), id)?;
        }
        Ok(())
    }

    /// Makes them compute.
    fn compute(&mut self) -> Result<(), Failure> {
        for process in &mut self.processes {
            let stdin = process.stdin.as_mut().ok_or("it has no standard input")?;
            stdin.write_all(b"go\n")?;
        }
        Ok(())
    }

    /// Ends them.
    fn rest(&mut self) -> std::io::Result<()> {
        for mut process in self.processes.drain(..) {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        let gone = self.rest().and_then(|()| std::fs::remove_dir(&self.group));
        if let Err(error) = gone {
            eprintln!("{} is left behind: {error}", self.group.display());
        }
    }
}
