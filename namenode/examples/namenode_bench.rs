//! Measures a namenode with its client on the same machine: requests per second and latency of reads, of durable
//! mutations and of relaxed commits, compared with what the disk alone can do.
//!
//! ```text
//! cargo run --release -p harvestfs-namenode --example namenode_bench -- [DIR] [SECONDS]
//! ```
//!
//! `DIR` (default: the current directory) is where the journal is written; it must be on the disk
//! that is to be measured. Each row runs for `SECONDS` (default 2).

use std::error::Error;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harvestfs_namenode::server::{FormatOptions, Namenode, NamenodeOptions, format};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{CertificateAuthority, Peer, Role};
use harvestfs_protocol::ids::{ClusterId, InodeId};
use harvestfs_protocol::meta::{
    FileCommit, MetaCall, MetaOp, Mutation, MutationCall, Notice, OpenSession, Query, mutation,
    query,
};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::rpc::{Request, Response};
use harvestfs_protocol::transport::{Endpoint, RpcClient, TransportOptions};
use harvestfs_protocol::types::{Credentials, Durability, FileKind, PlacementRules};
use tokio::sync::mpsc;

type Rpc = RpcClient<Request, Response, Notice>;
type Failure = Box<dyn Error + Send + Sync>;

const DEADLINE: Duration = Duration::from_secs(30);

/// One kind of request; the number makes names unique.
#[derive(Clone, Copy, Debug)]
enum Load {
    KeepAlive,
    GetAttr,
    Lookup,
    Create,
    RelaxedCommit,
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().unwrap_or_else(|| ".".to_owned());
    let seconds: u64 = arguments.next().map_or(Ok(2), |text| text.parse())?;
    let dir = tempfile::Builder::new()
        .prefix("namenode-bench-")
        .tempdir_in(dir)?;
    let row_time = Duration::from_secs(seconds);
    let sync_us = append_and_sync(dir.path(), row_time)?;
    println!("append of 200 bytes and fdatasync alone: {sync_us} us");
    // As two processes would: the namenode has its own thread, the client has this one.
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(measure(dir.path(), row_time))
}

/// Median cost of a bare durable append, in microseconds.
fn append_and_sync(dir: &Path, row_time: Duration) -> Result<u64, Failure> {
    let mut file = std::fs::File::create(dir.join("append"))?;
    file.write_all(&vec![0; 64 << 20])?;
    file.sync_all()?;
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(dir.join("append"))?;
    let mut writer = &file;
    let started = Instant::now();
    let mut taken = Vec::new();
    while started.elapsed() < row_time {
        let before = Instant::now();
        writer.write_all(&[1; 200])?;
        file.sync_data()?;
        taken.push(before.elapsed());
    }
    taken.sort_unstable();
    Ok(taken[taken.len() / 2].as_micros() as u64)
}

async fn measure(dir: &Path, row_time: Duration) -> Result<(), Failure> {
    let rules = PlacementRules {
        replication: 3,
        durability: Durability::Space,
        class: None,
    };
    let data_dir = dir.join("nn");
    let format_options = FormatOptions {
        cluster: ClusterId(1),
        root_uid: 0,
        root_gid: 0,
        block_bytes: 64 << 20,
        default_rules: rules,
        segment_bytes: 64 << 20,
        group: None,
    };
    format(&data_dir, &format_options)?;
    let authority = CertificateAuthority::in_memory()?;
    let validity = Duration::from_secs(3600);
    let identity = authority.issue(Role::Namenode, "nn", validity)?;
    let local = SocketAddr::from(([127, 0, 0, 1], 0));
    let namenode = Namenode::start(NamenodeOptions::new(data_dir, local, identity)).await?;

    let identity = authority.issue(Role::Client, "bench", validity)?;
    let endpoint = Endpoint::bind(local, &identity, TransportOptions::default())?;
    let peer = Peer::new(Role::Namenode, "nn")?;
    let connection = endpoint
        .connect(namenode.local_addr(), &peer, DEADLINE)
        .await?;
    let (notices, _ignored) = mpsc::channel(1024);
    let rpc: Rpc = RpcClient::start(connection, notices).await?;
    let open = OpenSession {
        resume: None,
        holds: vec![],
        delegations: None,
        seen: None,
    };
    rpc.call(&Request::OpenSession(open), DEADLINE).await??;

    println!("| request | in flight | per second | median us | 99 % us |");
    println!("|---|---|---|---|---|");
    let sequence = Arc::new(AtomicU64::new(1));
    for load in [
        Load::KeepAlive,
        Load::GetAttr,
        Load::Lookup,
        Load::Create,
        Load::RelaxedCommit,
    ] {
        for in_flight in [1, 8, 64, 256] {
            run_row(&rpc, load, in_flight, row_time, &sequence).await?;
        }
    }
    drop(rpc);
    namenode.shutdown().await?;
    Ok(())
}

async fn run_row(
    rpc: &Rpc,
    load: Load,
    in_flight: u64,
    row_time: Duration,
    sequence: &Arc<AtomicU64>,
) -> Result<(), Failure> {
    let started = Instant::now();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..in_flight {
        let (rpc, sequence) = (rpc.clone(), Arc::clone(sequence));
        workers.spawn(async move {
            let mut taken = Vec::new();
            while started.elapsed() < row_time {
                let number = sequence.fetch_add(1, Ordering::Relaxed);
                let request = request(load, number);
                let before = Instant::now();
                match rpc.call(&request, DEADLINE).await? {
                    // Names that do not exist are looked up.
                    Ok(_) | Err(FsError::NotFound) => {}
                    Err(error) => return Err(error.into()),
                }
                taken.push(before.elapsed().as_micros() as u64);
            }
            Ok::<_, Failure>(taken)
        });
    }
    let mut taken = Vec::new();
    while let Some(worker) = workers.join_next().await {
        taken.extend(worker??);
    }
    let elapsed = started.elapsed();
    taken.sort_unstable();
    println!(
        "| {load:?} | {in_flight} | {:.0} | {} | {} |",
        taken.len() as f64 / elapsed.as_secs_f64(),
        taken[taken.len() / 2],
        taken[taken.len() * 99 / 100]
    );
    Ok(())
}

fn request(load: Load, number: u64) -> Request {
    // A name of decimal digits is always valid.
    let name = |number: u64| Name::new(number.to_string().as_bytes());
    let numbered = |mutation| {
        MetaOp::Mutation(MutationCall {
            sequence: number,
            // What is in flight is at most 256 requests behind.
            answered_below: number.saturating_sub(512),
            relaxed: false,
            file: None,
            mutation,
        })
    };
    let op = match load {
        Load::KeepAlive => return Request::KeepAlive,
        Load::GetAttr => MetaOp::Query(Query::GetAttr(query::GetAttr { ino: InodeId::ROOT })),
        Load::Lookup => match name(number) {
            Ok(name) => MetaOp::Query(Query::Lookup(query::Lookup {
                parent: InodeId::ROOT,
                name,
            })),
            Err(_) => return Request::KeepAlive,
        },
        Load::Create => match name(number) {
            Ok(name) => numbered(Mutation::Create(mutation::Create {
                parent: InodeId::ROOT,
                name,
                kind: FileKind::Fifo,
                mode: 0o644,
                rdev: 0,
            })),
            Err(_) => return Request::KeepAlive,
        },
        Load::RelaxedCommit => numbered(Mutation::Commit(mutation::Commit {
            files: Vec::<FileCommit>::new(),
            durable: false,
        })),
    };
    Request::Meta(MetaCall {
        credentials: Credentials::root(),
        op,
    })
}
