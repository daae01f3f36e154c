//! Measures datanodes alone: three processes, a fake namenode and one client on loopback.
//!
//! ```text
//! cargo run --release -p harvestfs-datanode --example datanode_bench -- [DIR] [ROUNDS] [ONLY]
//! ```
//!
//! Prints, for each kind of work (whose name contains ONLY), the median over the rounds and the total processor time
//! of all processes.

// This module was written for tests: not all of it is needed here, and it unwraps.
#[allow(dead_code, clippy::unwrap_used)]
#[path = "../src/testing/data_client.rs"]
mod data_client;
#[allow(dead_code, clippy::unwrap_used)]
#[path = "../src/testing/fake_namenode.rs"]
mod fake_namenode;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use harvestfs_datanode::{Datanode, DatanodeOptions, StorageClass, VolumeOptions};
use harvestfs_protocol::data::WriteAck;
use harvestfs_protocol::identity::{CertificateAuthority, Identity, Role};
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::token::Right;
use harvestfs_protocol::types::NodeInfo;

use data_client::DataClient;
use fake_namenode::{FakeNamenode, NAMENODE, VALIDITY};

const DATANODES: usize = 3;
const BLOCK_BYTES: usize = 256 << 20;
const PACKET_BYTES: usize = 1 << 20;
const BLOCKS: u64 = 4;
const RANDOM_READS: u64 = 20_000;
const APPENDS: u64 = 2_000;
/// Maximum unacknowledged bytes of the client.
const WINDOW_BYTES: u64 = 8 << 20;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut args = std::env::args().skip(1);
    match args.next() {
        Some(arg) if arg == "--serve" => {
            let dir = PathBuf::from(args.next().ok_or("--serve needs a directory")?);
            let namenode = args.next().ok_or("--serve needs an address")?;
            runtime.block_on(serve(&dir, &namenode))
        }
        dir => {
            let dir = dir.map_or_else(std::env::temp_dir, PathBuf::from);
            let rounds = args.next().map_or(Ok(3), |rounds| rounds.parse())?;
            runtime.block_on(measure(&dir, rounds, &args.next().unwrap_or_default()))
        }
    }
}

/// Runs one datanode until standard input is closed.
async fn serve(dir: &Path, namenode: &str) -> Result<(), Failure> {
    let identity = Identity::load(&dir.join("identity"))?;
    let mut options = DatanodeOptions::new(identity, NAMENODE.to_owned(), vec![namenode.parse()?]);
    options.volumes.push(VolumeOptions {
        path: dir.join("volume"),
        quota_bytes: 1 << 40,
        class: StorageClass::Disk,
    });
    options.scrub_bytes_per_second = 0;
    let datanode = Datanode::start(options).await?;
    let end = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]));
    end.await??;
    datanode.shutdown().await;
    Ok(())
}

struct Bench {
    namenode: FakeNamenode,
    client: DataClient,
    nodes: Vec<NodeInfo>,
    children: Vec<Child>,
    data: Bytes,
}

async fn measure(dir: &Path, rounds: u64, only: &str) -> Result<(), Failure> {
    let dir = tempfile::tempdir_in(dir)?;
    let authority = CertificateAuthority::in_memory()?;
    let namenode = FakeNamenode::start(&authority, "127.0.0.1:0".parse()?);
    let mut children = Vec::new();
    let mut nodes = Vec::new();
    for index in 1..=DATANODES {
        let name = format!("dn{index}");
        let node_dir = dir.path().join(&name);
        std::fs::create_dir(&node_dir)?;
        let identity = authority.issue(Role::Datanode, &name, VALIDITY)?;
        identity.save(&node_dir.join("identity"))?;
        children.push(
            Command::new(std::env::current_exe()?)
                .arg("--serve")
                .arg(&node_dir)
                .arg(namenode.addr.to_string())
                .stdin(Stdio::piped())
                .spawn()?,
        );
        nodes.push(namenode.node(&name).await);
    }
    let data: Vec<u8> = (0..PACKET_BYTES as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut bench = Bench {
        client: DataClient::new(&authority, "bench"),
        namenode,
        nodes,
        children,
        data: data.into(),
    };
    let mut results: Vec<(Work, Vec<(f64, f64)>)> = ALL_WORK
        .into_iter()
        // Reads need the data that the first one writes.
        .filter(|work| *work == Work::WriteThree || work.name().contains(only))
        .map(|work| (work, Vec::new()))
        .collect();
    for round in 0..rounds {
        let base = round * 1000;
        for (work, values) in &mut results {
            let cpu = bench.cpu();
            let start = Instant::now();
            let done = bench.run(*work, base).await;
            let rate = done / start.elapsed().as_secs_f64();
            values.push((rate, (bench.cpu() - cpu) / done));
        }
    }
    for (work, mut values) in results {
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (rate, cpu) = values[values.len() / 2];
        let cpu = if work.name().ends_with("MB/s") {
            format!("{:.2} CPU s per GiB", cpu * 1_073.741_824)
        } else {
            format!("{:.0} us CPU each", cpu * 1e6)
        };
        println!("{:<45} {rate:>8.0}   {cpu}", work.name());
    }
    for child in &mut bench.children {
        drop(child.stdin.take());
        child.wait()?;
    }
    Ok(())
}

/// The kinds of work that are measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    WriteThree,
    WriteOne,
    ReadInOrder,
    ReadAtRandom {
        at_once: usize,
    },
    Append {
        pipelines: &'static [&'static [usize]],
        durable: bool,
    },
}

const ALL_WORK: [Work; 9] = [
    Work::WriteThree,
    Work::WriteOne,
    Work::ReadInOrder,
    Work::ReadAtRandom { at_once: 1 },
    Work::ReadAtRandom { at_once: 16 },
    Work::Append {
        pipelines: &[&[0], &[1], &[2]],
        durable: false,
    },
    Work::Append {
        pipelines: &[&[0]],
        durable: true,
    },
    Work::Append {
        pipelines: &[&[0], &[1], &[2]],
        durable: true,
    },
    Work::Append {
        pipelines: &[&[0, 1, 2]],
        durable: true,
    },
];

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::WriteThree => "write, pipeline of 3, MB/s",
            Self::WriteOne => "write, 1 replica, MB/s",
            Self::ReadInOrder => "read in order, MB/s",
            Self::ReadAtRandom { at_once: 1 } => "read 4 KiB at random, 1 at a time, per s",
            Self::ReadAtRandom { .. } => "read 4 KiB at random, 16 at a time, per s",
            Self::Append { durable: false, .. } => "append 4 KiB, 3 pipelines of 1, per s",
            Self::Append { pipelines, .. } => match pipelines {
                [[_]] => "append 4 KiB durably, 1 replica, per s",
                [_] => "append 4 KiB durably, pipeline of 3, per s",
                _ => "append 4 KiB durably, 3 pipelines of 1, per s",
            },
        }
    }
}

impl Bench {
    /// Does some work and returns its amount, in the unit of its name.
    async fn run(&self, work: Work, base: u64) -> f64 {
        match work {
            Work::WriteThree => {
                for block in 0..BLOCKS {
                    self.write_block(&[0, 1, 2], base + block + 1).await;
                }
                (BLOCKS * BLOCK_BYTES as u64) as f64 / 1e6
            }
            Work::WriteOne => {
                self.write_block(&[0], base + 20).await;
                BLOCK_BYTES as f64 / 1e6
            }
            Work::ReadInOrder => {
                for block in 0..BLOCKS {
                    let node = block as usize % DATANODES;
                    self.read_block(node, base + block + 1).await;
                }
                (BLOCKS * BLOCK_BYTES as u64) as f64 / 1e6
            }
            Work::ReadAtRandom { at_once } => {
                let reads = RANDOM_READS * at_once as u64 / 16 + RANDOM_READS / 8;
                self.read_at_random(base, reads, at_once).await;
                reads as f64
            }
            Work::Append { pipelines, durable } => {
                let block = base + 30 + (pipelines.len() * 10 + pipelines[0].len()) as u64;
                let block = block + 100 * u64::from(durable);
                self.append(pipelines, block, durable).await;
                APPENDS as f64
            }
        }
    }

    /// Processor time of all processes so far, in seconds.
    fn cpu(&self) -> f64 {
        let children = self.children.iter().map(|child| child.id().to_string());
        let all = children.chain(["self".to_owned()]);
        all.map(|pid| process_cpu(&pid).unwrap_or(0.0)).sum()
    }

    fn pipeline(&self, nodes: &[usize]) -> Vec<NodeInfo> {
        nodes.iter().map(|&node| self.nodes[node].clone()).collect()
    }

    async fn write_block(&self, pipeline: &[usize], block: u64) {
        let block = BlockId(block);
        let token = self.namenode.token(block, Right::Write);
        let pipeline = self.pipeline(pipeline);
        let mut stream = self.client.write(&pipeline, block, token).await;
        assert_eq!(stream.ack().await, Some(WriteAck::Ready));
        let packets = (BLOCK_BYTES / PACKET_BYTES) as u64;
        let window = WINDOW_BYTES / PACKET_BYTES as u64;
        let mut acked = 0;
        while acked < packets {
            while stream.packets < packets && stream.packets - acked < window {
                stream.send(self.data.clone(), false).await.expect("send");
            }
            match stream.ack().await {
                Some(WriteAck::Acked { packets }) => acked = packets,
                other => panic!("{other:?}"),
            }
        }
        stream.seal(BLOCK_BYTES as u64).await;
        stream.wait_for_all().await.expect("seal");
    }

    async fn read_block(&self, node: usize, block: u64) {
        let block = BlockId(block);
        let token = self.namenode.token(block, Right::Read);
        // Like a client that reads ahead: several requests at a time.
        let step = 8 << 20;
        let reads = (0..BLOCK_BYTES as u64 / step).map(|index| {
            let (client, node) = (self.client.clone(), self.nodes[node].clone());
            async move { client.read(&node, block, token, (index * step, step)).await }
        });
        run(reads, 2).await;
    }

    async fn read_at_random(&self, base: u64, reads: u64, at_once: usize) {
        let reads = (0..reads).map(|index| {
            let random = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
            let block = BlockId(base + 1 + random % BLOCKS);
            let node = self.nodes[(random >> 8) as usize % DATANODES].clone();
            let offset = (random >> 16) % (BLOCK_BYTES as u64 / 4096) * 4096;
            let token = self.namenode.token(block, Right::Read);
            let client = self.client.clone();
            async move { client.read(&node, block, token, (offset, 4096)).await }
        });
        run(reads, at_once).await;
    }

    async fn append(&self, pipelines: &[&[usize]], block: u64, durable: bool) {
        let block = BlockId(block);
        let token = self.namenode.token(block, Right::Write);
        let mut streams = Vec::new();
        for nodes in pipelines {
            let pipeline = self.pipeline(nodes);
            let mut stream = self.client.write(&pipeline, block, token).await;
            assert_eq!(stream.ack().await, Some(WriteAck::Ready));
            streams.push(stream);
        }
        for _ in 0..APPENDS {
            for stream in &mut streams {
                let data = self.data.slice(..4096);
                stream.send(data, durable).await.expect("send");
            }
            for stream in &mut streams {
                stream.wait_for_all().await.expect("append");
            }
        }
    }
}

/// Runs reads, so many at a time.
async fn run<F, T, E>(reads: impl Iterator<Item = F>, at_once: usize)
where
    F: Future<Output = Result<T, E>> + Send + 'static,
    T: Send + 'static,
    E: std::fmt::Debug + Send + 'static,
{
    let mut running = tokio::task::JoinSet::<Result<T, E>>::new();
    for read in reads {
        if running.len() >= at_once {
            running
                .join_next()
                .await
                .expect("some")
                .expect("no panic")
                .expect("read");
        }
        running.spawn(read);
    }
    while let Some(read) = running.join_next().await {
        read.expect("no panic").expect("read");
    }
}

/// Processor time of a process in seconds.
fn process_cpu(pid: &str) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(Duration::from_millis(10).as_secs_f64() * ticks)
}
