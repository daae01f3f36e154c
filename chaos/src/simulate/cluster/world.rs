//! The machines of a cluster, and what runs on them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harvestfs_client::{Client, ClientError, ClientOptions};
use harvestfs_datanode::{Datanode, DatanodeOptions, VolumeOptions};
use harvestfs_namenode::server::{
    FormatOptions, GroupOptions, Namenode, NamenodeOptions, SnapshotTrigger, format, journal_dir,
};
use harvestfs_protocol::identity::{CertificateAuthority, Identity, Role};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::types::{Durability, PlacementRules, StorageClass, Timestamp};
use harvestfs_telemetry::gate::Load;
use harvestfs_telemetry::primary::{SampleError, Sampler};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::disk::{Directory, SimulatedDisk};
use super::machine::BEGAN_UNIX_MS;
use super::operator::Look;
use super::part::{NAMENODE_NAME, Part, member_id, members};
use super::{Host, Link, Network};
use crate::live::admin::Admin;

/// The time slice that each machine runs before the next one does: unless a fault changes clocks, no machine's clock
/// is ahead of another's by more.
pub const TICK: Duration = Duration::from_millis(1);
/// The time slice while the simulation only waits until the cluster is whole again.
pub const HEALING_TICK: Duration = Duration::from_millis(10);
const LATENCY: Duration = Duration::from_micros(200);
const DATANODE_PORT: u16 = 9_311;
/// Longer than any simulation.
const VALIDITY: Duration = Duration::from_secs(30 * 86_400);
/// The directory of a datanode's complete replicas.
const SEALED: &str = "sealed";
const BLOCK_BYTES: u64 = 1 << 20;
pub const SEGMENT_BYTES: u64 = 4 << 20;
pub const CLUSTER: ClusterId = ClusterId(1);
/// Replicas of each block, if there are that many datanodes.
pub const REPLICATION: u8 = 3;
const QUOTA_BYTES: u64 = 1 << 30;

/// Frequent enough that members of a group that were unreachable need the snapshots of others.
const SNAPSHOTS: SnapshotTrigger = SnapshotTrigger {
    records: 100,
    bytes: u64::MAX,
};

const OPERATOR_NAME: &str = "operator";
/// Machines that no fault affects: that of an operator, and that of a copy beside the namenode.
const OPERATOR_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 4, 1));
const DOUBLE_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 4, 2));

/// The owner of a server, who needs it or not. Clones share one owner.
#[derive(Clone, Debug, Default)]
struct Owner(Arc<AtomicBool>);

impl Sampler for Owner {
    fn sample(&mut self, _: Instant) -> Result<Load, SampleError> {
        let is_busy = self.0.load(Ordering::Relaxed);
        Ok(Load {
            cpu_share: Some(if is_busy { 1.0 } else { 0.0 }),
            ..Load::default()
        })
    }
}

/// A session that is being opened.
pub type Connecting = Pin<Box<dyn Future<Output = Result<Client, ClientError>>>>;

/// All machines of a simulated cluster, their disks, and the network between them.
pub struct World {
    directory: TempDir,
    authority: CertificateAuthority,
    network: Arc<Network>,
    hosts: Vec<(Part, Host)>,
    disks: BTreeMap<Part, SimulatedDisk>,
    /// Servers that have ended on their own, and why.
    ended: Rc<RefCell<Vec<(Part, String)>>>,
    /// By role and name. Identities are on the disks of machines, and so stay the same after a restart.
    identities: RefCell<BTreeMap<(Role, String), Identity>>,
    /// The owners of datanodes' servers.
    owners: BTreeMap<Part, Owner>,
    operator: Host,
    look: Look,
    /// A copy beside the namenode, the datanode that follows it, and its address.
    double: Option<(Host, Part, SocketAddr)>,
    now: Duration,
    tick: Duration,
}

impl World {
    /// Creates a cluster and starts its namenodes and datanodes. They write below `directory`.
    ///
    /// # Errors
    /// When its files cannot be written, or the system gives no runtimes.
    pub fn new(
        seed: u64,
        namenodes: u8,
        datanodes: u8,
        clients: u8,
        directory: TempDir,
    ) -> io::Result<Self> {
        let network = Network::new(seed, LATENCY);
        let parts = (0..namenodes)
            .map(Part::Namenode)
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
        let operator = Host::new(OPERATOR_IP, seed_of(usize::from(u16::MAX)), &network)?;
        let mut world = Self {
            directory,
            authority: CertificateAuthority::for_simulation().map_err(io::Error::other)?,
            network,
            hosts,
            disks,
            ended: Rc::default(),
            identities: RefCell::default(),
            owners: (0..datanodes)
                .map(|it| (Part::Datanode(it), Owner::default()))
                .collect(),
            operator,
            look: Look::default(),
            double: None,
            now: Duration::ZERO,
            tick: TICK,
        };
        let rules = PlacementRules {
            replication: datanodes.min(REPLICATION),
            durability: Durability::Space,
            class: None,
        };
        let options = FormatOptions {
            cluster: CLUSTER,
            root_uid: 0,
            root_gid: 0,
            block_bytes: BLOCK_BYTES,
            default_rules: rules,
            segment_bytes: SEGMENT_BYTES,
            group: None,
        };
        let members = members(namenodes);
        for number in 0..namenodes {
            let group = (namenodes > 1).then(|| GroupOptions {
                this: member_id(number),
                members: members.clone(),
                now: Timestamp(BEGAN_UNIX_MS as i64 * 1_000_000),
            });
            let options = FormatOptions {
                group,
                ..options.clone()
            };
            format(&world.path(Part::Namenode(number)), &options).map_err(io::Error::other)?;
        }
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

    /// The machines of namenodes.
    pub fn namenodes(&self) -> Vec<Part> {
        self.parts()
            .into_iter()
            .filter(|part| part.is_namenode())
            .collect()
    }

    /// Where the namenodes listen.
    fn namenode_addrs(&self) -> Vec<SocketAddr> {
        let parts = self.namenodes().into_iter();
        parts.map(Part::namenode_addr).collect()
    }

    /// The machines of datanodes.
    pub fn datanodes(&self) -> Vec<Part> {
        let is_datanode = |part: &Part| matches!(part, Part::Datanode(_));
        self.parts().into_iter().filter(is_datanode).collect()
    }

    /// The directory with all files of the simulation.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The directory with the contents of a machine's disk.
    pub(super) fn path(&self, part: Part) -> PathBuf {
        self.directory().join(part.to_string())
    }

    /// What an operator sees of the namenode.
    pub fn look(&self) -> &Look {
        &self.look
    }

    /// Has an operator watch the namenode from now on.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn start_operator(&self) -> io::Result<()> {
        self.look_at(Part::FIRST_NAMENODE.namenode_addr(), &self.look)
    }

    /// Has an operator watch the given namenode from now on.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub(super) fn look_at(&self, namenode: SocketAddr, look: &Look) -> io::Result<()> {
        let identity = self.identity(Role::Admin, OPERATOR_NAME)?;
        let look = look.clone();
        self.operator.spawn(async move {
            let bind = SocketAddr::new(OPERATOR_IP, 0);
            let admin = Admin::with_identity(&identity, bind, namenode).expect("a free port");
            look.keep_looking(admin).await;
        });
        Ok(())
    }

    /// Sets whether the owner of a server needs it.
    pub fn set_busy(&self, part: Part, is_busy: bool) {
        if let Some(owner) = self.owners.get(&part) {
            owner.0.store(is_busy, Ordering::Relaxed);
        }
    }

    /// A machine for a copy beside the namenode.
    pub(super) fn new_double_host(&self) -> io::Result<(Host, IpAddr)> {
        let seed = self.now.as_nanos() as u64;
        Ok((Host::new(DOUBLE_IP, seed, &self.network)?, DOUBLE_IP))
    }

    /// Sets the copy beside the namenode, the datanode that follows it, and its address; `None` ends it.
    pub(super) fn set_double(&mut self, double: Option<(Host, Part, SocketAddr)>) {
        self.double = double;
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

    /// A machine loses power, and with it what its disk had not made durable.
    ///
    /// # Errors
    /// When the files of the simulation cannot be changed.
    pub fn lose_power(&mut self, part: Part) -> io::Result<()> {
        self.host(part).crash();
        self.disk(part).lose_power()
    }

    /// Ends a machine and deletes everything on its disk.
    ///
    /// # Errors
    /// When the files of the simulation cannot be removed.
    pub fn reimage(&mut self, part: Part) -> io::Result<()> {
        self.host(part).crash();
        fs::remove_dir_all(self.path(part))?;
        self.disk(part).settle();
        Ok(())
    }

    /// Flips one bit in one sealed replica of a datanode. Returns the file that it is in, if there is a replica.
    ///
    /// # Errors
    /// When the files of the simulation cannot be changed.
    pub fn rot(&self, part: Part, rng: &mut SmallRng) -> io::Result<Option<PathBuf>> {
        let replicas: Vec<PathBuf> = self.sealed(part)?.into_iter().collect();
        let Some(replica) = replicas.choose(rng) else {
            return Ok(None);
        };
        self.disk(part).rot(replica)?;
        // The directory differs from simulation to simulation.
        let within = replica.strip_prefix(self.directory());
        Ok(Some(within.map_err(io::Error::other)?.to_owned()))
    }

    /// The files of complete replicas of a datanode.
    ///
    /// # Errors
    /// When the files of the simulation cannot be read.
    pub(super) fn sealed(&self, part: Part) -> io::Result<BTreeSet<PathBuf>> {
        let mut replicas = BTreeSet::new();
        for directory in fs::read_dir(self.path(part).join(SEALED))? {
            for replica in fs::read_dir(directory?.path())? {
                replicas.insert(replica?.path());
            }
        }
        Ok(replicas)
    }

    /// Takes the servers that have ended on their own since the last call, and why. The reasons omit the directory,
    /// which differs from simulation to simulation.
    pub fn take_ended(&self) -> Vec<(Part, String)> {
        let directory = format!("{}/", self.directory.path().display());
        let mut ended = self.ended.take();
        for (_, why) in &mut ended {
            *why = why.replace(&directory, "");
        }
        ended
    }

    fn identity(&self, role: Role, name: &str) -> io::Result<Identity> {
        let key = (role, name.to_owned());
        if let Some(identity) = self.identities.borrow().get(&key) {
            return Ok(identity.clone());
        }
        let issued = self.authority.issue(role, name, VALIDITY);
        let issued = issued.map_err(io::Error::other)?;
        self.identities.borrow_mut().insert(key, issued.clone());
        Ok(issued)
    }

    /// Starts the namenode or datanode of a machine that is up. Clients and mounts are started separately.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn start(&mut self, part: Part) -> io::Result<()> {
        let path = self.path(part);
        match part {
            Part::Namenode(_) => {
                let addr = part.namenode_addr();
                let found = self.hosts.iter().find(|(other, _)| *other == part);
                let (_, host) = found.ok_or(io::ErrorKind::NotFound)?;
                let served = self.start_namenode_on(host, self.disk(part), path, addr)?;
                let ended = Rc::clone(&self.ended);
                host.spawn(async move {
                    if let Ok(why) = served.await {
                        ended.borrow_mut().push((part, why));
                    }
                });
            }
            Part::Datanode(number) => {
                let options = self.datanode_options(number, path)?;
                let disk = Arc::new(self.disk(part).clone());
                let owner = self.owners[&part].clone();
                let ended = Rc::clone(&self.ended);
                self.host(part).spawn(async move {
                    match Datanode::start_on(options, disk, Some(Box::new(owner))).await {
                        Ok(_datanode) => std::future::pending().await,
                        Err(error) => ended.borrow_mut().push((part, error.to_string())),
                    }
                });
            }
            Part::Client(_) | Part::Mount(_) => {}
        }
        Ok(())
    }

    /// Starts a namenode on a machine. Returns where the reason arrives when it ends.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub(super) fn start_namenode_on(
        &self,
        host: &Host,
        disk: &SimulatedDisk,
        directory: PathBuf,
        addr: SocketAddr,
    ) -> io::Result<oneshot::Receiver<String>> {
        let identity = self.identity(Role::Namenode, NAMENODE_NAME)?;
        let mut options = NamenodeOptions {
            segment_bytes: SEGMENT_BYTES,
            ..NamenodeOptions::new(directory, addr, identity)
        };
        if self.namenodes().len() > 1 {
            options.snapshots = SNAPSHOTS;
        }
        let journal = journal_dir(&options.data_dir);
        let disk = Arc::new(Directory::new(disk.clone(), journal));
        let (ended, why) = oneshot::channel();
        host.spawn(async move {
            let served = match Namenode::start_on(options, Some(disk)).await {
                Ok(mut namenode) => namenode.ended().await,
                Err(error) => Err(error),
            };
            let why = served.expect_err("nothing stops it").to_string();
            // For a copy, nothing receives the reason.
            let _ = ended.send(why);
        });
        Ok(why)
    }

    fn datanode_options(&self, number: u8, path: PathBuf) -> io::Result<DatanodeOptions> {
        let part = Part::Datanode(number);
        let identity = self.identity(Role::Datanode, &part.to_string())?;
        let namenodes = match &self.double {
            Some((_, astray, addr)) if *astray == part => vec![*addr],
            _ => self.namenode_addrs(),
        };
        let mut options = DatanodeOptions::new(identity, NAMENODE_NAME.into(), namenodes);
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

    /// Returns a function that opens sessions on a machine.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn connections(&self, part: Part) -> io::Result<impl Fn() -> Connecting + use<>> {
        self.connections_from(part.ip(), &part.to_string())
    }

    fn connections_from(
        &self,
        ip: IpAddr,
        name: &str,
    ) -> io::Result<impl Fn() -> Connecting + use<>> {
        let identity = self.identity(Role::Client, name)?;
        let mut options = ClientOptions::new(self.namenode_addrs(), NAMENODE_NAME, identity);
        options.bind = Some(SocketAddr::new(ip, 0));
        Ok(move || -> Connecting { Box::pin(Client::connect(options.clone())) })
    }

    /// An operator's connections, from a client's machine: namenodes, address to bind and identity.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub fn operator(&self, number: u8) -> io::Result<(Vec<SocketAddr>, SocketAddr, Identity)> {
        let bind = SocketAddr::new(Part::Client(number).ip(), 0);
        let identity = self.identity(Role::Admin, OPERATOR_NAME)?;
        Ok((self.namenode_addrs(), bind, identity))
    }

    /// As [`World::operator`], from the machine that no fault affects.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub(super) fn outside_operator(&self) -> io::Result<(Vec<SocketAddr>, SocketAddr, Identity)> {
        let identity = self.identity(Role::Admin, OPERATOR_NAME)?;
        Ok((
            self.namenode_addrs(),
            SocketAddr::new(OPERATOR_IP, 0),
            identity,
        ))
    }

    /// As [`World::connections`], from the machine that no fault affects.
    ///
    /// # Errors
    /// When no identity can be issued.
    pub(super) fn outside_connections(&self) -> io::Result<impl Fn() -> Connecting + use<>> {
        self.connections_from(OPERATOR_IP, OPERATOR_NAME)
    }

    /// Runs `work` on the machine that no fault affects.
    pub(super) fn spawn_outside(&self, work: impl Future<Output = ()> + 'static) {
        self.operator.spawn(work);
    }

    /// Sets how datagrams get from one machine to another from now on.
    pub fn set_link(&self, from: Part, to: Part, link: Link) {
        self.network.set_link(from.ip(), to.ip(), link);
    }

    /// Lets `time` pass on all machines.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let tick = self.tick.min(end - self.now);
            self.now += tick;
            self.network.advance(self.now);
            for (_, host) in &mut self.hosts {
                host.run_for(tick);
            }
            self.operator.run_for(tick);
            if let Some((host, ..)) = &mut self.double {
                host.run_for(tick);
            }
        }
    }

    /// Sets the time slice that each machine runs before the next one does.
    pub fn set_tick(&mut self, tick: Duration) {
        self.tick = tick;
    }

    /// See [`World::set_tick`].
    pub fn tick(&self) -> Duration {
        self.tick
    }
}
