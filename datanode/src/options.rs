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

/// Everything that a datanode needs to know. [`DatanodeOptions::new`] fills in what rarely changes.
#[derive(Clone, Debug)]
pub struct DatanodeOptions {
    /// Key and certificate; the name in it is the name of the server.
    pub identity: Identity,
    /// The rack of the server.
    pub rack: String,
    /// The environment of the server's primary tenant.
    pub environment: String,
    /// The machine function of the server's primary tenant.
    pub machine_function: String,
    /// Where the data service listens; port 0 for any.
    pub listen: SocketAddr,
    /// Where others reach the data service, when that is not `listen`.
    pub advertise: Option<SocketAddr>,
    /// Addresses of all namenodes of the cluster. No two of them may reach the same one at the same
    /// time: it keeps the connection that was made last.
    pub namenodes: Vec<SocketAddr>,
    /// The name in the namenode's certificate.
    pub namenode_name: String,
    /// The volumes; one that cannot be used does not keep the others from serving.
    pub volumes: Vec<VolumeOptions>,
    /// Where to put the Unix socket on which readers on this host are lent files; `None`: they read
    /// over the network as all others.
    pub short_circuit_socket: Option<PathBuf>,
    /// How the primary tenant is watched, and how much is its.
    pub primary: PrimaryOptions,
    /// Connections that may come from one address.
    pub connections_per_address_max: u32,
    /// Threads for each volume that wait for its disk. Four keep a flash disk busy.
    pub disk_threads: usize,
    /// Memory for packets on their way between network and disk, in bytes.
    pub buffer_bytes: usize,
    /// Memory for checksums of replicas that were read lately, in bytes. They cover a thousand times
    /// as much data.
    pub table_cache_bytes: usize,
    /// How much the scrubber reads in a second, in bytes; 0 turns it off.
    pub scrub_bytes_per_second: u64,
    /// Least time from the start of one round of the scrubber to the start of the next.
    pub scrub_interval: Duration,
    /// Repairs that fetch replicas at a time.
    pub repairs_max: usize,
    /// How much repairs fetch in a second, all together, in bytes.
    pub repair_bytes_per_second: u64,
    /// How much of what the namenode has it delete is deleted in a second, in bytes; 0 for no limit.
    /// Where space is short there is none.
    pub removal_bytes_per_second: u64,
    /// How long [`crate::Datanode::shutdown`] waits for streams to end.
    pub shutdown_grace: Duration,
}

/// How the primary tenant is watched, and how much of the server is left to it.
#[derive(Clone, Debug)]
pub struct PrimaryOptions {
    /// Where its use is read.
    pub source: PrimarySource,
    /// When the server is busy.
    pub gate: GateOptions,
    /// Time between samples.
    pub interval: Duration,
}

impl Default for PrimaryOptions {
    /// No primary is watched.
    fn default() -> Self {
        Self {
            source: PrimarySource::None,
            gate: GateOptions::default(),
            interval: DEFAULT_INTERVAL,
        }
    }
}

/// Where the use of the primary tenant is read.
#[derive(Clone, Debug)]
pub enum PrimarySource {
    /// Nowhere: the server is never busy.
    None,
    /// From the whole machine, less what is HarvestFS's own.
    Machine {
        /// What that is.
        own: Own,
    },
    /// From a control group; from the machine as long as it does not exist.
    Cgroup {
        /// Its name, as in `/proc/PID/cgroup`.
        name: PathBuf,
        /// What is HarvestFS's own of the machine.
        own: Own,
    },
    /// From a recorded series.
    Trace(TraceReplay),
}

impl PrimarySource {
    /// What takes the samples, if anything is to.
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
    /// Options for a server with one primary tenant, everything else as is usual.
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
    /// None of its volumes can be used.
    #[error("no volume can be used: {}", list(.0))]
    NoVolume(Vec<VolumeError>),
    /// There are more than the namenode accepts.
    #[error("there are {0} volumes; a datanode may have {max}", max = harvestfs_protocol::limits::VOLUMES_PER_NODE_MAX)]
    TooManyVolumes(usize),
    /// A label is longer than the namenode accepts.
    #[error("the {what} {value:?} is longer than {max} bytes", max = harvestfs_protocol::limits::LABEL_BYTES_MAX)]
    LabelTooLong {
        /// Which.
        what: &'static str,
        /// The label.
        value: String,
    },
    /// It would be registered at an address under which nobody reaches it.
    #[error("others do not reach a datanode under {0}: listen on the server's own address")]
    Unreachable(SocketAddr),
    /// There is no namenode to talk to.
    #[error("no address of a namenode is given")]
    NoNamenode,
    /// The namenode's name cannot be in a certificate.
    #[error(transparent)]
    NamenodeName(IdentityError),
    /// The network does not work.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// What the primary tenant uses cannot be read.
    #[error("the primary tenant cannot be watched: {0}")]
    Primary(#[from] SampleError),
    /// There is no thread to watch the primary tenant.
    #[error("the primary tenant cannot be watched: {0}")]
    PrimaryThread(std::io::Error),
    /// Opening the volumes was cut short.
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
