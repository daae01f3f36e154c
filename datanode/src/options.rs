//! The options of a datanode.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use harvestfs_protocol::identity::{Identity, IdentityError};
use harvestfs_protocol::limits::CONNECTIONS_PER_ADDRESS_MAX;
use harvestfs_protocol::transport::TransportError;
use harvestfs_telemetry::gate::GateOptions;
use harvestfs_telemetry::primary::{
    CGROUP_ROOT, Cgroup, DEFAULT_INTERVAL, Machine, Own, SampleError, Sampler, TraceReplay,
};

use crate::store::{VolumeError, VolumeOptions};

/// The options of a datanode. [`DatanodeOptions::new`] fills in what rarely changes.
#[derive(Clone, Debug)]
pub struct DatanodeOptions {
    /// Key and certificate; the name in the certificate is the name of the server.
    pub identity: Identity,
    /// The rack of the server.
    pub rack: String,
    /// The environment of the server's primary tenant.
    pub environment: String,
    /// The machine function of the server's primary tenant.
    pub machine_function: String,
    /// The address on which the data service listens; port 0 for any port.
    pub listen: SocketAddr,
    /// The address at which others reach the data service, if it differs from `listen`.
    pub advertise: Option<SocketAddr>,
    /// Addresses of all namenodes of the cluster. No two of them may reach the same namenode at the same time: a
    /// namenode keeps only the connection that was made last.
    pub namenodes: Vec<SocketAddr>,
    /// The name in the namenode's certificate.
    pub namenode_name: String,
    /// The volumes. An unusable volume does not keep the others from serving.
    pub volumes: Vec<VolumeOptions>,
    /// Path of the Unix socket on which files are lent to readers on this host; with `None`, they read over the
    /// network like all other readers.
    pub short_circuit_socket: Option<PathBuf>,
    /// How the primary tenant is monitored, and how much of the server is left to it.
    pub primary: PrimaryOptions,
    /// Maximum number of connections from one address.
    pub connections_per_address_max: u32,
    /// Threads for each volume that wait for its disk. Four keep a flash disk busy.
    pub disk_threads: usize,
    /// Memory for packets in transit between network and disk, in bytes.
    pub buffer_bytes: usize,
    /// Memory for checksums of recently read replicas, in bytes. They cover a thousand times as much data.
    pub table_cache_bytes: usize,
    /// Read rate of the scrubber in bytes per second; 0 turns it off.
    pub scrub_bytes_per_second: u64,
    /// Minimum time from the start of one round of the scrubber to the start of the next.
    pub scrub_interval: Duration,
    /// Maximum number of repairs that fetch replicas at the same time.
    pub repairs_max: usize,
    /// Rate at which all repairs together fetch data, in bytes per second.
    pub repair_bytes_per_second: u64,
    /// Rate at which replicas are deleted on the namenode's command, in bytes per second; 0 for no limit. There is no
    /// limit while space is short.
    pub removal_bytes_per_second: u64,
    /// How long [`crate::Datanode::shutdown`] waits for streams to end.
    pub shutdown_grace: Duration,
}

/// How the primary tenant is monitored, and how much of the server is left to it.
#[derive(Clone, Debug)]
pub struct PrimaryOptions {
    /// Where its resource usage is read from.
    pub source: PrimarySource,
    /// When the server counts as busy.
    pub gate: GateOptions,
    /// Time between samples.
    pub interval: Duration,
}

impl Default for PrimaryOptions {
    /// No primary tenant is monitored.
    fn default() -> Self {
        Self {
            source: PrimarySource::None,
            gate: GateOptions::default(),
            interval: DEFAULT_INTERVAL,
        }
    }
}

/// Where the resource usage of the primary tenant is read from.
#[derive(Clone, Debug)]
pub enum PrimarySource {
    /// Nowhere: the server is never busy.
    None,
    /// From the whole machine, minus HarvestFS's own usage.
    Machine {
        /// What belongs to HarvestFS itself.
        own: Own,
    },
    /// From a control group, or from the whole machine while the group does not exist.
    Cgroup {
        /// Its name, as in `/proc/PID/cgroup`.
        name: PathBuf,
        /// What belongs to HarvestFS itself on the machine.
        own: Own,
    },
    /// From a recorded series.
    Trace(TraceReplay),
}

impl PrimarySource {
    /// Returns the sampler, if the primary tenant is monitored at all.
    pub(crate) fn sampler(&self) -> Result<Option<Box<dyn Sampler>>, SampleError> {
        Ok(match self {
            Self::None => None,
            Self::Machine { own } => Some(Box::new(Machine::open(own.clone())?)),
            Self::Cgroup { name, own } => {
                let machine = Machine::open(own.clone())?;
                Some(Box::new(Cgroup::new(CGROUP_ROOT.as_ref(), name, machine)))
            }
            Self::Trace(replay) => Some(Box::new(replay.clone())),
        })
    }
}

impl DatanodeOptions {
    /// Options with default labels (rack, environment, machine function) and the usual values for everything else.
    #[must_use]
    pub fn new(identity: Identity, namenode_name: String, namenodes: Vec<SocketAddr>) -> Self {
        Self {
            identity,
            rack: "default".to_owned(),
            environment: "default".to_owned(),
            machine_function: "default".to_owned(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            namenodes,
            namenode_name,
            volumes: Vec::new(),
            short_circuit_socket: None,
            primary: PrimaryOptions::default(),
            connections_per_address_max: CONNECTIONS_PER_ADDRESS_MAX,
            disk_threads: 4,
            buffer_bytes: 64 << 20,
            table_cache_bytes: 16 << 20,
            scrub_bytes_per_second: 4 << 20,
            scrub_interval: Duration::from_secs(6 * 3600),
            repairs_max: 4,
            repair_bytes_per_second: 100 << 20,
            removal_bytes_per_second: 400 << 20,
            shutdown_grace: Duration::from_secs(10),
        }
    }
}

/// Why a datanode cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// None of the volumes can be used.
    #[error("no volume can be used: {}", list(.0))]
    NoVolume(Vec<VolumeError>),
    /// There are more volumes than the namenode accepts.
    #[error("there are {0} volumes; a datanode may have {max}", max = harvestfs_protocol::limits::VOLUMES_PER_NODE_MAX)]
    TooManyVolumes(usize),
    /// A label is longer than the namenode accepts.
    #[error("the {what} {value:?} is longer than {max} bytes", max = harvestfs_protocol::limits::LABEL_BYTES_MAX)]
    LabelTooLong {
        /// Which label.
        what: &'static str,
        /// Its value.
        value: String,
    },
    /// The datanode would be registered at an address at which no peer can reach it.
    #[error("others do not reach a datanode under {0}: listen on the server's own address")]
    Unreachable(SocketAddr),
    /// There is no namenode to talk to.
    #[error("no address of a namenode is given")]
    NoNamenode,
    /// The namenode's name is not valid in a certificate.
    #[error(transparent)]
    NamenodeName(IdentityError),
    /// The network endpoint cannot be set up.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The primary tenant's resource usage cannot be read.
    #[error("the primary tenant cannot be watched: {0}")]
    Primary(#[from] SampleError),
    /// The thread that monitors the primary tenant cannot be started.
    #[error("the primary tenant cannot be watched: {0}")]
    PrimaryThread(std::io::Error),
    /// Opening the volumes ended without a result.
    #[error("opening the volumes failed: this is a bug")]
    OpeningFailed,
}

fn list(errors: &[VolumeError]) -> String {
    if errors.is_empty() {
        return "none is configured".to_owned();
    }
    let reasons: Vec<String> = errors.iter().map(ToString::to_string).collect();
    reasons.join("; ")
}
