//! Measures the transport over loopback: bulk data and small requests.
//!
//! ```text
//! cargo run --release -p harvestfs-protocol --example transport_bench [-- SECONDS]
//! ```
//!
//! Each row is measured for SECONDS (default 2), three times. "current" runs client and server on
//! a current-thread runtime each, "multi" both on one runtime with two workers. "local" means streams
//! that bypass the network, as between processes on one host.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::identity::{CertificateAuthority, Identity, Peer, Role};
use harvestfs_protocol::transport::{Connection, Endpoint, RpcClient, RpcServer, TransportOptions};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;

type AnyError = Box<dyn std::error::Error + Send + Sync>;
type Client = RpcClient<Bytes200, Bytes200, ()>;
type Server = RpcServer<Bytes200, Bytes200, ()>;
type Bytes200 = String;

const DEADLINE: Duration = Duration::from_secs(30);
const ROUNDS: usize = 3;

fn main() -> Result<(), AnyError> {
    let seconds: f64 = match std::env::args().nth(1) {
        Some(argument) => argument.parse()?,
        None => 2.0,
    };
    let time = Duration::from_secs_f64(seconds);
    let identities = Identities::new()?;
    println!("way     runtime  what                               result");
    let ways = ["network", "local"];
    for (way, name) in ways
        .iter()
        .flat_map(|way| [(*way, "current"), (*way, "multi")])
    {
        for (streams, frame_bytes) in [(1, 1 << 20), (1, 64 << 10), (4, 1 << 20)] {
            let label = format!(
                "bulk, {streams} stream(s), {} KiB frames",
                frame_bytes >> 10
            );
            for round in 0..ROUNDS {
                let pair = Pair::start(way, name, &identities)?;
                let result = pair.bulk(streams, frame_bytes, time)?;
                print_row([way, name], &label, round, &result);
            }
        }
        for in_flight in [1, 16, 64, 256] {
            let label = format!("200-byte calls, {in_flight} in flight");
            for round in 0..ROUNDS {
                let pair = Pair::start(way, name, &identities)?;
                let result = pair.calls(in_flight, time)?;
                print_row([way, name], &label, round, &result);
            }
        }
    }
    Ok(())
}

fn print_row(setting: [&str; 2], label: &str, round: usize, result: &str) {
    let ([way, name], label) = if round == 0 {
        (setting, label)
    } else {
        ([""; 2], "")
    };
    println!("{way:7} {name:8} {label:34} {result}");
}

struct Identities {
    server: Identity,
    client: Identity,
}

impl Identities {
    fn new() -> Result<Self, AnyError> {
        let authority = CertificateAuthority::in_memory()?;
        let day = Duration::from_secs(24 * 3600);
        Ok(Self {
            server: authority.issue(Role::Datanode, "dn", day)?,
            client: authority.issue(Role::Client, "c", day)?,
        })
    }
}

/// A client with a connection to a server that takes in data and echoes calls.
struct Pair {
    /// The client's runtime, and also the server's if there is no thread.
    runtime: Arc<Runtime>,
    connection: Connection,
    _endpoint: Endpoint,
    server: Endpoint,
    server_thread: Option<std::thread::JoinHandle<()>>,
}

impl Pair {
    fn start(way: &str, runtime_name: &str, identities: &Identities) -> Result<Self, AnyError> {
        let options = TransportOptions {
            local_streams: way == "local",
            ..TransportOptions::default()
        };
        let multi = runtime_name == "multi";
        let runtime = Arc::new(if multi {
            Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()?
        } else {
            Builder::new_current_thread().enable_all().build()?
        });
        let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        let (server, server_thread) = if multi {
            let _guard = runtime.enter();
            let server = Endpoint::bind(any, &identities.server, options.clone())?;
            runtime.spawn(serve(server.clone()));
            (server, None)
        } else {
            let server_runtime = Builder::new_current_thread().enable_all().build()?;
            let _guard = server_runtime.enter();
            let server = Endpoint::bind(any, &identities.server, options.clone())?;
            let task = serve(server.clone());
            drop(_guard);
            let thread = std::thread::spawn(move || server_runtime.block_on(task));
            (server, Some(thread))
        };
        let addr = server.local_addr()?;
        let (endpoint, connection) = runtime.block_on(async {
            let endpoint = Endpoint::bind(any, &identities.client, options)?;
            let expected = Peer::new(Role::Datanode, "dn")?;
            let connection = endpoint.connect(addr, &expected, DEADLINE).await?;
            Ok::<_, AnyError>((endpoint, connection))
        })?;
        Ok(Self {
            runtime,
            connection,
            _endpoint: endpoint,
            server,
            server_thread,
        })
    }

    fn bulk(self, streams: usize, frame_bytes: usize, time: Duration) -> Result<String, AnyError> {
        let cpu_before = cpu_seconds();
        let start = Instant::now();
        let sent_bytes: u64 = self.runtime.block_on(async {
            let mut tasks = Vec::new();
            for _ in 0..streams {
                let connection = self.connection.clone();
                let frame = Bytes::from(vec![7; frame_bytes]);
                tasks.push(tokio::spawn(send_bulk(connection, frame, time)));
            }
            let mut sent = 0;
            for task in tasks {
                sent += task.await??;
            }
            Ok::<_, AnyError>(sent)
        })?;
        let elapsed = start.elapsed().as_secs_f64();
        let cpu = cpu_seconds() - cpu_before;
        Ok(format!(
            "{:6.0} MB/s  {:.2} CPU s/GiB  MTU {}  lost {}",
            sent_bytes as f64 / 1e6 / elapsed,
            cpu / (sent_bytes as f64 / f64::from(1 << 30)),
            self.connection.path_mtu_bytes(),
            self.connection.packets_lost(),
        ))
    }

    fn calls(self, in_flight: usize, time: Duration) -> Result<String, AnyError> {
        let start = Instant::now();
        let mut latencies_us = self.runtime.block_on(async {
            let (notices, _taken) = mpsc::channel(1);
            let client = Client::start(self.connection.clone(), notices).await?;
            let mut tasks = Vec::new();
            for _ in 0..in_flight {
                tasks.push(tokio::spawn(call_again_and_again(client.clone(), time)));
            }
            let mut latencies_us = Vec::new();
            for task in tasks {
                latencies_us.extend(task.await??);
            }
            Ok::<_, AnyError>(latencies_us)
        })?;
        let elapsed = start.elapsed().as_secs_f64();
        latencies_us.sort_unstable();
        Ok(format!(
            "{:7.0} calls/s  median {:4} us  99 % {:5} us",
            latencies_us.len() as f64 / elapsed,
            latencies_us[latencies_us.len() / 2],
            latencies_us[latencies_us.len() * 99 / 100],
        ))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.server.close("measured");
        if let Some(thread) = self.server_thread.take() {
            let _ = thread.join();
        }
    }
}

async fn send_bulk(connection: Connection, frame: Bytes, time: Duration) -> Result<u64, AnyError> {
    let (mut sender, mut receiver) = connection.open_stream(StreamKind::Data).await?;
    let start = Instant::now();
    let mut sent = 0_u64;
    while start.elapsed() < time {
        sender.send_with_data(&sent, frame.clone()).await?;
        sent += frame.len() as u64;
    }
    sender.finish()?;
    receiver.recv::<()>(DEADLINE).await?;
    Ok(sent)
}

async fn call_again_and_again(client: Client, time: Duration) -> Result<Vec<u32>, AnyError> {
    let request = "x".repeat(200);
    let start = Instant::now();
    let mut latencies_us = Vec::new();
    while start.elapsed() < time {
        let called = Instant::now();
        client.call(&request, DEADLINE).await?;
        latencies_us.push(called.elapsed().as_micros() as u32);
    }
    Ok(latencies_us)
}

async fn serve(endpoint: Endpoint) {
    while let Some(incoming) = endpoint.accept().await {
        tokio::spawn(async move {
            // The client reports what goes wrong.
            if let Ok(connection) = incoming.establish().await {
                let _ = serve_connection(connection).await;
            }
        });
    }
}

async fn serve_connection(connection: Connection) -> Result<(), AnyError> {
    loop {
        let (kind, mut sender, mut receiver) = connection.accept_stream().await?;
        match kind {
            StreamKind::Data => tokio::spawn(async move {
                let mut buffer = vec![0; 4 << 20];
                while let Some((_, len)) = receiver.recv::<u64>(DEADLINE).await? {
                    receiver
                        .read_data_into(&mut buffer[..len], DEADLINE)
                        .await?;
                }
                sender.send(&()).await?;
                sender.finish()?;
                Ok::<_, AnyError>(())
            }),
            StreamKind::Rpc => {
                let mut server = Server::start(connection.clone(), sender, receiver);
                tokio::spawn(async move {
                    while let Some((request, responder)) = server.next().await? {
                        responder.send(&request);
                    }
                    Ok(())
                })
            }
        };
    }
}

/// CPU time of this process so far, in seconds.
fn cpu_seconds() -> f64 {
    let clock = rustix::time::ClockId::ProcessCPUTime;
    let time = rustix::time::clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
