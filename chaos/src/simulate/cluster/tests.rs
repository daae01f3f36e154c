use std::cell::RefCell;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_client::{Client, ClientOptions};
use harvestfs_datanode::{Datanode, DatanodeOptions, VolumeOptions};
use harvestfs_namenode::server::{FormatOptions, Namenode, NamenodeOptions, format};
use harvestfs_protocol::identity::{CertificateAuthority, Role};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::types::{Credentials, Durability, PlacementRules, StorageClass};
use tempfile::TempDir;

use super::*;

/// How long each machine goes on before the next one does.
const TICK: Duration = Duration::from_millis(1);
const LATENCY: Duration = Duration::from_micros(200);
const NAMENODE_PORT: u16 = 9_310;
const DATANODE_PORT: u16 = 9_311;
const DATANODES: u8 = 3;
/// The machine of the namenode; datanodes and a client come after it.
const NAMENODE: u8 = 1;
const CLIENT: u8 = NAMENODE + DATANODES + 1;

struct World {
    directory: TempDir,
    authority: CertificateAuthority,
    network: Arc<Network>,
    hosts: Vec<Host>,
    now: Duration,
}

fn ip(machine: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, machine])
}

impl World {
    fn new(seed: u64) -> Self {
        let network = Network::new(seed, LATENCY);
        let host = |machine| {
            let seed = seed.wrapping_mul(256) + u64::from(machine);
            Host::new(ip(machine), seed, &network).expect("a machine")
        };
        let mut world = Self {
            directory: tempfile::tempdir().expect("a directory"),
            authority: CertificateAuthority::in_memory().expect("an authority"),
            hosts: (NAMENODE..=CLIENT).map(host).collect(),
            network,
            now: Duration::ZERO,
        };
        let rules = PlacementRules {
            replication: DATANODES,
            durability: Durability::Space,
            class: None,
        };
        let options = FormatOptions {
            cluster: ClusterId(1),
            root_uid: 0,
            root_gid: 0,
            block_bytes: 1 << 20,
            default_rules: rules,
            segment_bytes: 4 << 20,
        };
        format(&world.directory.path().join("namenode"), &options).expect("it is empty");
        world.start_namenode();
        for number in 1..=DATANODES {
            world.start_datanode(number);
        }
        world
    }

    fn host(&mut self, machine: u8) -> &mut Host {
        &mut self.hosts[usize::from(machine - NAMENODE)]
    }

    fn identity(&self, role: Role, name: &str) -> harvestfs_protocol::identity::Identity {
        let validity = Duration::from_secs(3_600);
        self.authority.issue(role, name, validity).expect("valid")
    }

    fn start_namenode(&mut self) {
        let options = NamenodeOptions::new(
            self.directory.path().join("namenode"),
            SocketAddr::new(ip(NAMENODE), NAMENODE_PORT),
            self.identity(Role::Namenode, "namenode"),
        );
        self.host(NAMENODE).spawn(async move {
            let mut namenode = Namenode::start(options).await.expect("it starts");
            namenode.ended().await.expect("its journal works");
        });
    }

    fn start_datanode(&mut self, number: u8) {
        let name = format!("datanode-{number}");
        let identity = self.identity(Role::Datanode, &name);
        let namenode = SocketAddr::new(ip(NAMENODE), NAMENODE_PORT);
        let mut options = DatanodeOptions::new(identity, "namenode".into(), vec![namenode]);
        let machine = NAMENODE + number;
        options.listen = SocketAddr::new(ip(machine), DATANODE_PORT);
        options.rack = format!("rack-{number}");
        options.environment = format!("environment-{number}");
        options.machine_function = format!("function-{number}");
        options.volumes = vec![VolumeOptions {
            path: self.directory.path().join(name),
            quota_bytes: 1 << 30,
            class: StorageClass::default(),
        }];
        self.host(machine).spawn(async move {
            let _datanode = Datanode::start(options).await.expect("it starts");
            std::future::pending::<()>().await;
        });
    }

    fn crash(&mut self, machine: u8) {
        self.host(machine).crash();
    }

    fn boot(&mut self, machine: u8) {
        self.host(machine).boot().expect("a runtime");
    }

    fn cut(&self, machine: u8, cut: bool) {
        let link = Link {
            cut,
            ..Link::default()
        };
        for other in NAMENODE..=CLIENT {
            self.network.set_link(ip(machine), ip(other), link);
            self.network.set_link(ip(other), ip(machine), link);
        }
    }

    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += TICK;
            self.network.advance(self.now);
            for host in &mut self.hosts {
                host.run_for(TICK);
            }
        }
    }

    /// What a client comes to that connects, within `time`.
    fn with_client<T: 'static, F: Future<Output = T> + 'static>(
        &mut self,
        time: Duration,
        work: impl FnOnce(Client) -> F + 'static,
    ) -> T {
        let namenode = SocketAddr::new(ip(NAMENODE), NAMENODE_PORT);
        let identity = self.identity(Role::Client, "client");
        let mut options = ClientOptions::new(vec![namenode], "namenode", identity);
        options.bind = Some(SocketAddr::new(ip(CLIENT), 0));
        let result = Rc::new(RefCell::new(None));
        let to = Rc::clone(&result);
        self.host(CLIENT).spawn(async move {
            let client = Client::connect(options).await.expect("it connects");
            *to.borrow_mut() = Some(work(client).await);
        });
        let end = self.now + time;
        loop {
            if let Some(result) = result.borrow_mut().take() {
                return result;
            }
            assert!(self.now < end, "not within {time:?}");
            self.run_for(TICK);
        }
    }
}

fn content(number: usize) -> Vec<u8> {
    (0..300_000).map(|at| (at / 7 + number) as u8).collect()
}

async fn write(client: &Client, number: usize) {
    let (me, path, content) = (Credentials::root(), format!("/f{number}"), content(number));
    let written = client.write_file(&me, path.as_bytes(), &content);
    written.await.expect("it is written");
}

async fn check(client: &Client, numbers: std::ops::Range<usize>) {
    let me = Credentials::root();
    for number in numbers {
        let path = format!("/f{number}");
        let read = client.read_file(&me, path.as_bytes()).await;
        assert!(read.expect("it is there") == content(number), "{path}");
    }
}

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn files_are_written_and_read_in_virtual_time() {
    let mut world = World::new(1);
    world.run_for(Duration::from_secs(5));
    world.with_client(MINUTE, |client| async move {
        for number in 0..10 {
            write(&client, number).await;
        }
        check(&client, 0..10).await;
        client.close().await.expect("it ends");
    });
    world.with_client(MINUTE, |client| async move { check(&client, 0..10).await });
}

#[test]
fn what_was_synced_is_there_after_all_machines_crashed() {
    let mut world = World::new(2);
    world.run_for(Duration::from_secs(5));
    world.with_client(MINUTE, |client| async move {
        for number in 0..5 {
            write(&client, number).await;
        }
        // Not closed: its machine crashes.
        std::mem::forget(client);
    });
    for machine in NAMENODE..=CLIENT {
        world.crash(machine);
        world.boot(machine);
    }
    world.start_namenode();
    for number in 1..=DATANODES {
        world.start_datanode(number);
    }
    world.with_client(MINUTE, |client| async move { check(&client, 0..5).await });
}

#[test]
fn writing_and_reading_go_on_while_a_datanode_is_cut_off_and_another_crashes() {
    let mut world = World::new(3);
    world.run_for(Duration::from_secs(5));
    world.cut(NAMENODE + 1, true);
    world.with_client(MINUTE, |client| async move {
        for number in 0..5 {
            write(&client, number).await;
        }
    });
    world.cut(NAMENODE + 1, false);
    world.run_for(MINUTE);
    world.crash(NAMENODE + 2);
    world.with_client(MINUTE, |client| async move { check(&client, 0..5).await });
}

/// What is sent while files are written and read, and the namenode and a datanode crash.
fn trace(seed: u64) -> Vec<Sent> {
    let mut world = World::new(seed);
    world.network.start_trace();
    world.run_for(Duration::from_secs(5));
    world.with_client(MINUTE, |client| async move {
        for number in 0..3 {
            write(&client, number).await;
        }
        std::mem::forget(client);
    });
    world.crash(NAMENODE);
    world.crash(NAMENODE + 2);
    world.run_for(Duration::from_secs(1));
    world.boot(NAMENODE);
    world.start_namenode();
    world.with_client(MINUTE, |client| async move { check(&client, 0..3).await });
    world.network.take_trace()
}

#[test]
fn a_seed_decides_everything() {
    let (one, other) = (trace(7), trace(7));
    for (number, (one, other)) in one.iter().zip(&other).enumerate() {
        assert_eq!(one, other, "datagram {number}");
    }
    assert_eq!(one.len(), other.len());
    assert!(one.len() > 1_000, "{}", one.len());
}
