//! The machines of a cluster, and what runs on them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_client::{Client, ClientError, ClientOptions};
use harvestfs_datanode::{Datanode, DatanodeOptions, VolumeOptions};
use harvestfs_namenode::server::{FormatOptions, Namenode, NamenodeOptions, format, journal_dir};
use harvestfs_protocol::identity::{CertificateAuthority, Identity, Role};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::types::{Durability, PlacementRules, StorageClass};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use tempfile::TempDir;

use super::disk::{Directory, SimulatedDisk};
use super::{Host, Link, Network};

/// How long each machine goes on before the next one does: the clock of no machine is ahead of another by more,
/// unless a fault says so.
pub const TICK: Duration = Duration::from_millis(1);
/// The same while nothing is done but waiting until the cluster is whole again.
pub const HEALING_TICK: Duration = Duration::from_millis(10);
const LATENCY: Duration = Duration::from_micros(200);
const NAMENODE_PORT: u16 = 9_310;
const DATANODE_PORT: u16 = 9_311;
const NAMENODE_NAME: &str = "namenode";
/// Longer than any simulation.
const VALIDITY: Duration = Duration::from_secs(30 * 86_400);
/// Where a datanode has the replicas that are complete.
const SEALED: &str = "sealed";
const BLOCK_BYTES: u64 = 1 << 20;
const SEGMENT_BYTES: u64 = 4 << 20;
/// Replicas of each block, if there are so many datanodes.
pub const REPLICATION: u8 = 3;
const QUOTA_BYTES: u64 = 1 << 30;

/// A machine of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The one of the namenode.
    Namenode,
    /// One of a datanode, numbered from 0.
    Datanode(u8),
    /// One of a client, numbered from 0.
    Client(u8),
    /// One of a mount, numbered from 0.
    Mount(u8),
}

impl Part {
    fn ip(self) -> IpAddr {
        let (subnet, host) = match self {
            Part::Namenode => (0, 1),
            Part::Datanode(number) => (1, number),
            Part::Client(number) => (2, number),
            Part::Mount(number) => (3, number),
        };
        IpAddr::from([10, 0, subnet, host])
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Part::Namenode => f.write_str("namenode"),
            Part::Datanode(number) => write!(f, "datanode-{number}"),
            Part::Client(number) => write!(f, "client-{number}"),
            Part::Mount(number) => write!(f, "mount-{number}"),
        }
    }
}

/// A session that is being opened.
pub type Connecting = Pin<Box<dyn Future<Output = Result<Client, ClientError>>>>;

/// See the module.
pub struct World {
    directory: TempDir,
    authority: CertificateAuthority,
    network: Arc<Network>,
    hosts: Vec<(Part, Host)>,
    disks: BTreeMap<Part, SimulatedDisk>,
    /// Servers that have ended by themselves, and why.
    ended: Rc<RefCell<Vec<(Part, String)>>>,
    now: Duration,
    tick: Duration,
}

impl World {
    /// A new cluster whose namenode and datanodes have been started. What they write is below `directory`.
    ///
    /// # Errors
    /// When its files cannot be written, or the system gives no runtimes.
    pub fn new(seed: u64, datanodes: u8, clients: u8, directory: TempDir) -> io::Result<Self> {
        let network = Network::new(seed, LATENCY);
        let parts = std::iter::once(Part::Namenode)
            .chain((0..datanodes).map(Part::Datanode))
            .chain((0..clients).map(Part::Client));
        let seed_of = |number: usize| seed.wrapping_mul(1 << 16).wrapping_add(number as u64);
        let host = |(number, part): (usize, Part)| {
            Ok((part, Host::new(part.ip(), seed_of(number), &network)?))
        };
        let hosts: Vec<_> = parts.enumerate().map(host).collect::<io::Result<_>>()?;
        let disk = |(number, (part, _)): (usize, &(Part, Host))| {
            (*part, SimulatedDisk::new(seed_of(number)))
        };
        let disks = hosts.iter().enumerate().map(disk).collect();
        let mut world = Self {
            directory,
            authority: CertificateAuthority::for_simulation().map_err(io::Error::other)?,
            network,
            hosts,
            disks,
            ended: Rc::default(),
            now: Duration::ZERO,
            tick: TICK,
        };
        let rules = PlacementRules {
            replication: datanodes.min(REPLICATION),
            durability: Durability::Space,
            class: None,
        };
        let options = FormatOptions {
            cluster: ClusterId(1),
            root_uid: 0,
            root_gid: 0,
            block_bytes: BLOCK_BYTES,
            default_rules: rules,
            segment_bytes: SEGMENT_BYTES,
        };
        format(&world.path(Part::Namenode), &options).map_err(io::Error::other)?;
        for part in world.parts() {
            world.start(part)?;
        }
        Ok(world)
    }

    /// Adds machines for mounts, on which nothing runs yet.
    ///
    /// # Errors
    /// When the system gives no runtimes.
    pub fn add_mounts(&mut self, seed: u64, mounts: u8) -> io::Result<()> {
        for part in (0..mounts).map(Part::Mount) {
            let number = self.hosts.len() as u64;
            let seed = seed.wrapping_mul(1 << 16).wrapping_add(number);
            let host = Host::new(part.ip(), seed, &self.network)?;
            self.hosts.push((part, host));
            self.disks.insert(part, SimulatedDisk::new(seed));
        }
        Ok(())
    }

    /// All machines.
    pub fn parts(&self) -> Vec<Part> {
        self.hosts.iter().map(|(part, _)| *part).collect()
    }

    /// How long the simulation has run, in virtual time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    fn path(&self, part: Part) -> PathBuf {
        self.directory.path().join(part.to_string())
    }

    /// The machine of a part.
    ///
    /// # Panics
    /// When the cluster has no such part.
    pub fn host(&mut self, part: Part) -> &mut Host {
        let found = self.hosts.iter_mut().find(|(other, _)| *other == part);
        &mut found.unwrap_or_else(|| panic!("there is no {part}")).1
    }

    /// The disk of a part.
    ///
    /// # Panics
    /// When the cluster has no such part.
    pub fn disk(&self, part: Part) -> &SimulatedDisk {
        let found = self.disks.get(&part);
        found.unwrap_or_else(|| panic!("there is no {part}"))
    }

    /// A machine loses its power, and what its disk had not stored.
    ///
    /// # Errors
    /// When the files of the simulation cannot be changed.
    pub fn lose_power(&mut self, part: Part) -> io::Result<()> {
        self.host(part).crash();
        self.disk(part).lose_power()
    }

    /// A machine ends, and everything on its disk is gone.
    ///
    /// # Errors
    /// When the files of the simulation cannot be removed.
    pub fn reimage(&mut self, part: Part) -> io::Result<()> {
        self.host(part).crash();
        self.disk(part).wipe();
        fs::remove_dir_all(self.path(part))
    }

    /// One bit in one sealed replica of a datanode changes. Returns which file it is in, if there is one.
    ///
    /// # Errors
    /// When the files of the simulation cannot be changed.
    pub fn rot(&self, part: Part, rng: &mut SmallRng) -> io::Result<Option<PathBuf>> {
        let mut replicas = Vec::new();
        for directory in fs::read_dir(self.path(part).join(SEALED))? {
            for replica in fs::read_dir(directory?.path())? {
                replicas.push(replica?.path());
            }
        }
        replicas.sort();
        let Some(replica) = replicas.choose(rng) else {
            return Ok(None);
        };
        self.disk(part).rot(replica)?;
        Ok(Some(replica.clone()))
    }

    /// Servers that have ended by themselves since the last call, and why: without the directory of the simulation, which is
    /// another one each time.
    pub fn take_ended(&self) -> Vec<(Part, String)> {
        let directory = format!("{}/", self.directory.path().display());
        let mut ended = self.ended.take();
        for (_, why) in &mut ended {
            *why = why.replace(&directory, "");
        }
        ended
    }

    fn identity(&self, role: Role, name: &str) -> io::Result<Identity> {
        let issued = self.authority.issue(role, name, VALIDITY);
        issued.map_err(io::Error::other)
    }

    /// Starts what belongs on the machine of a server, which runs. Clients are started by themselves.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn start(&mut self, part: Part) -> io::Result<()> {
        let path = self.path(part);
        match part {
            Part::Namenode => {
                let options = NamenodeOptions::new(
                    path,
                    SocketAddr::new(part.ip(), NAMENODE_PORT),
                    self.identity(Role::Namenode, NAMENODE_NAME)?,
                );
                let journal = journal_dir(&options.data_dir);
                let disk = Arc::new(Directory::new(self.disk(part).clone(), journal));
                let ended = Rc::clone(&self.ended);
                self.host(part).spawn(async move {
                    let served = match Namenode::start_on(options, Some(disk)).await {
                        Ok(mut namenode) => namenode.ended().await,
                        Err(error) => Err(error),
                    };
                    let why = served.expect_err("nothing stops it").to_string();
                    ended.borrow_mut().push((part, why));
                });
            }
            Part::Datanode(number) => {
                let options = self.datanode_options(number, path)?;
                let disk = Arc::new(self.disk(part).clone());
                let ended = Rc::clone(&self.ended);
                self.host(part).spawn(async move {
                    match Datanode::start_on(options, disk, None).await {
                        Ok(_datanode) => std::future::pending().await,
                        Err(error) => ended.borrow_mut().push((part, error.to_string())),
                    }
                });
            }
            Part::Client(_) | Part::Mount(_) => {}
        }
        Ok(())
    }

    fn datanode_options(&self, number: u8, path: PathBuf) -> io::Result<DatanodeOptions> {
        let part = Part::Datanode(number);
        let identity = self.identity(Role::Datanode, &part.to_string())?;
        let namenode = SocketAddr::new(Part::Namenode.ip(), NAMENODE_PORT);
        let mut options = DatanodeOptions::new(identity, NAMENODE_NAME.into(), vec![namenode]);
        options.listen = SocketAddr::new(part.ip(), DATANODE_PORT);
        options.rack = format!("rack-{number}");
        options.environment = format!("environment-{number}");
        options.machine_function = format!("function-{number}");
        options.volumes = vec![VolumeOptions {
            path,
            quota_bytes: QUOTA_BYTES,
            class: StorageClass::default(),
        }];
        Ok(options)
    }

    /// Opens sessions on a machine.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn connections(&self, part: Part) -> io::Result<impl Fn() -> Connecting + use<>> {
        let namenode = SocketAddr::new(Part::Namenode.ip(), NAMENODE_PORT);
        let identity = self.identity(Role::Client, &part.to_string())?;
        let mut options = ClientOptions::new(vec![namenode], NAMENODE_NAME, identity);
        options.bind = Some(SocketAddr::new(part.ip(), 0));
        Ok(move || -> Connecting { Box::pin(Client::connect(options.clone())) })
    }

    /// An operator's connection, from a client's machine: namenode, address to bind and identity.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn operator(&self, number: u8) -> io::Result<(SocketAddr, SocketAddr, Identity)> {
        let namenode = SocketAddr::new(Part::Namenode.ip(), NAMENODE_PORT);
        let bind = SocketAddr::new(Part::Client(number).ip(), 0);
        Ok((namenode, bind, self.identity(Role::Admin, "operator")?))
    }

    /// How datagrams get from one machine to another from now on.
    pub fn set_link(&self, from: Part, to: Part, link: Link) {
        self.network.set_link(from.ip(), to.ip(), link);
    }

    /// Time goes on everywhere.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let tick = self.tick.min(end - self.now);
            self.now += tick;
            self.network.advance(self.now);
            for (_, host) in &mut self.hosts {
                host.run_for(tick);
            }
        }
    }

    /// How long each machine goes on before the next one does, from now on.
    pub fn set_tick(&mut self, tick: Duration) {
        self.tick = tick;
    }

    /// See [`World::set_tick`].
    pub fn tick(&self) -> Duration {
        self.tick
    }
}
