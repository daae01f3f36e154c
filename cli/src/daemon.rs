//! `harvestfs namenode`, `datanode` and `mount`: one part each, until a signal ends it.
//!
//! Each prints a line that starts with [`READY`] on standard output once it can be used.

use std::ffi::OsString;
use std::future::Future;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use harvestfs_client::{Client, ClientError, ClientOptions};
use harvestfs_datanode::{Datanode, DatanodeOptions, VolumeOptions};
use harvestfs_fuse_mount::kernel_options::Permissions;
use harvestfs_fuse_mount::{Mount, MountOptions};
use harvestfs_http::{Endpoint, MetricsSite};
use harvestfs_namenode::http::Page;
use harvestfs_namenode::server::{Namenode, NamenodeOptions};
use harvestfs_placement::PolicyKind;
use harvestfs_protocol::READY;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::Identity;
use rustix::process::{parent_process_death_signal, set_parent_process_death_signal};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cluster::ClusterArgs;
use crate::config::{self, ClientConfig, DatanodeConfig, NamenodeConfig, Priority, VolumeConfig};
use crate::http::HttpConfig;
use crate::init::NAMENODE_NAME;
use crate::primary::PrimaryArgs;
use crate::units::Wait;
use crate::{priority, signals};

/// Time between two searches for mostly unused blocks.
const COMPACTION_INTERVAL: Duration = Duration::from_secs(600);
/// More threads than this improved no measurement.
const MOUNT_WORKERS_MAX: usize = 8;
/// Socket in the directory of a datanode, through which it lends files to readers on its host.
const SHORT_CIRCUIT_SOCKET: &str = "short-circuit.sock";

/// Name of a process of this program in `ps` and `pgrep`.
pub const PROGRAM: &str = "harvestfs";

/// Longest time for an orderly stop; what is unfinished by then is abandoned.
const STOP_DEADLINE: Duration = Duration::from_secs(60);

/// `harvestfs namenode`
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  harvestfs namenode --config /srv/harvestfs/namenode/namenode.toml"
)]
pub struct NamenodeArgs {
    /// Configuration file, as `harvestfs init cluster` writes it.
    #[arg(long, env = "HARVESTFS_NAMENODE_CONFIG")]
    config: PathBuf,
    /// Address to listen on, instead of the file's.
    #[arg(long, env = "HARVESTFS_LISTEN")]
    listen: Option<SocketAddr>,
    /// Policy that chooses servers for replicas: `stock`, `greedy`, `history` or `harvest`, instead of
    /// the file's.
    #[arg(long, env = "HARVESTFS_POLICY")]
    policy: Option<PolicyKind>,
}

/// `harvestfs datanode`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  harvestfs datanode --config /etc/harvestfs/datanode.toml")]
pub struct DatanodeArgs {
    /// Configuration file, as `harvestfs init datanode` writes it.
    #[arg(long, env = "HARVESTFS_DATANODE_CONFIG")]
    config: PathBuf,
    /// Address to listen on, instead of the file's.
    #[arg(long, env = "HARVESTFS_LISTEN")]
    listen: Option<SocketAddr>,
    /// Addresses of the namenodes, instead of the file's.
    #[arg(long, env = "HARVESTFS_NAMENODES", value_delimiter = ',')]
    namenodes: Option<Vec<SocketAddr>>,
    /// How it competes with others for CPU and disks: `idle`, `low` or `normal`, instead of the
    /// file's.
    #[arg(long, env = "HARVESTFS_PRIORITY")]
    priority: Option<Priority>,
    #[command(flatten)]
    primary: PrimaryArgs,
}

/// `harvestfs mount`
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  harvestfs mount /mnt/harvest --config /etc/harvestfs/client.toml\n  harvestfs mount /mnt/harvest --data /srv/try"
)]
pub struct MountArgs {
    /// Directory to mount on.
    directory: PathBuf,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Addresses of the namenodes, instead of the file's.
    #[arg(long, env = "HARVESTFS_NAMENODES", value_delimiter = ',')]
    namenodes: Option<Vec<SocketAddr>>,
    /// Let users other than the mounting one use it (`user_allow_other` in /etc/fuse.conf is
    /// needed unless root mounts).
    #[arg(long)]
    allow_other: bool,
    /// Honour set-user-id bits, set-group-id bits and file capabilities. Then a user who is root on
    /// another machine that mounts the cluster can become root on this one.
    #[arg(long)]
    suid: bool,
    /// Honour device files, at the same risk.
    #[arg(long)]
    dev: bool,
    /// Seconds to wait for a busy replica before an access fails.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    busy_timeout: u64,
    /// Seconds to wait for a namenode or datanodes that do not answer before an access fails, or `forever`;
    /// instead of the file's.
    #[arg(long, value_name = "SECONDS")]
    unreachable_timeout: Option<Wait>,
}

/// The environment variables that replace flags of a part. They are meant for a part that is started by hand: in a
/// whole cluster, they would apply to all parts alike and override the configuration that was made for each.
pub fn variables() -> Vec<OsString> {
    let part = || clap::Command::new("part");
    let parts = [
        NamenodeArgs::augment_args(part()),
        DatanodeArgs::augment_args(part()),
        MountArgs::augment_args(part()),
    ];
    let flags = parts.iter().flat_map(|part| part.get_arguments());
    flags
        .filter_map(|flag| flag.get_env().map(OsString::from))
        .collect()
}

/// Runs a namenode.
///
/// # Errors
/// When it cannot start, or stops by itself.
pub fn namenode(args: &NamenodeArgs) -> anyhow::Result<()> {
    let config: NamenodeConfig = config::load(&args.config)?;
    let mut options = NamenodeOptions::new(
        config::beside(&args.config, &config.data),
        args.listen.unwrap_or(config.listen),
        Identity::load(&config::beside(&args.config, &config.identity))?,
    );
    options.policy = args.policy.unwrap_or(config.policy);
    options.placement.locality = config.locality;
    options.cluster.min_write_replicas = config.min_write_replicas.get();
    config.repair.apply(&mut options.cluster);
    options.cluster.quarantine_ms = config.quarantine_s.saturating_mul(1_000);
    let identity = options.identity.clone();
    raise_open_files();
    // One thread for the connections; the engine and the journal have their own.
    current_thread(async {
        let mut stop = StopSignal::listen()?;
        let endpoint = endpoint(config.http.as_ref(), &args.config, &identity).await?;
        let mut namenode = tokio::select! {
            biased;
            // The journal may be long, or its disk may hang.
            () = stop.received() => return Ok(()),
            namenode = Namenode::start(options) => namenode?,
        };
        if let Some(endpoint) = endpoint {
            tokio::spawn(endpoint.serve(Page::new(namenode.observer())));
        }
        println!("{READY} {}", namenode.local_addr());
        tokio::select! {
            () = stop.received() => {
                within_deadline("the namenode", namenode.shutdown()).await
            }
            // The journal failed; nothing more can be acknowledged.
            ended = namenode.ended() => Ok(ended?),
        }
    })
}

/// Runs a datanode.
///
/// # Errors
/// When it cannot start.
pub fn datanode(args: &DatanodeArgs) -> anyhow::Result<()> {
    let config: DatanodeConfig = config::load(&args.config)?;
    let identity = Identity::load(&config::beside(&args.config, &config.identity))?;
    if identity.peer().name != config.name {
        bail!(
            "{}: the server is called `{}`, but its certificate is for `{}`",
            args.config.display(),
            config.name,
            identity.peer().name
        );
    }
    let mut options = DatanodeOptions::new(
        identity.clone(),
        NAMENODE_NAME.to_owned(),
        args.namenodes.clone().unwrap_or(config.namenodes),
    );
    options.listen = args.listen.unwrap_or(config.listen);
    options.rack = config.rack;
    options.environment = config.environment;
    options.machine_function = config.machine_function;
    options.primary = args.primary.options(&args.config, &config.primary)?;
    options.scrub_bytes_per_second = config.scrub_bytes_per_s.0;
    options.removal_bytes_per_second = config.removal_bytes_per_s.0;
    options.scrub_interval = Duration::from_secs(config.scrub_every_s.get().into());
    options.volumes = volumes(&args.config, &config.volumes);
    options.short_circuit_socket =
        Some(config::beside(&args.config, SHORT_CIRCUIT_SOCKET.as_ref()));
    raise_open_files();
    // Before any other thread is started, since each inherits the priority of the thread that starts it.
    priority::apply(args.priority.unwrap_or(config.priority));
    // Measured: one current-thread runtime for each endpoint moves the most bytes per second.
    current_thread(async {
        let mut stop = StopSignal::listen_but_for_hangup()?;
        // From the beginning, as the owner may change a quota before the datanode is registered.
        let mut reload = signal(SignalKind::hangup())?;
        let endpoint = endpoint(config.http.as_ref(), &args.config, &identity).await?;
        let datanode = tokio::select! {
            biased;
            // A disk may hang.
            () = stop.received() => return Ok(()),
            datanode = Datanode::start(options) => datanode?,
        };
        if let Some(endpoint) = endpoint {
            tokio::spawn(endpoint.serve(MetricsSite(datanode.metrics_text())));
        }
        let mut is_registered = false;
        loop {
            tokio::select! {
                () = datanode.registered(), if !is_registered => {
                    println!("{READY} {}", datanode.local_addr());
                    is_registered = true;
                }
                () = stop.received() => break,
                _ = reload.recv() => tokio::select! {
                    biased;
                    // A disk may hang.
                    () = stop.received() => break,
                    () = reload_quotas(&args.config, &datanode) => {}
                },
            }
        }
        // Limited by its own grace period.
        datanode.shutdown().await;
        Ok(())
    })
}

fn volumes(config: &Path, volumes: &[VolumeConfig]) -> Vec<VolumeOptions> {
    let options = volumes.iter().map(|volume| VolumeOptions {
        path: config::beside(config, &volume.path),
        quota_bytes: volume.quota.0,
        class: volume.class.into(),
    });
    options.collect()
}

/// Rereads the quotas on SIGHUP. If the file cannot be read, nothing changes.
async fn reload_quotas(path: &Path, datanode: &Datanode) {
    match config::load::<DatanodeConfig>(path) {
        Ok(config) => datanode.reconfigure(&volumes(path, &config.volumes)).await,
        Err(error) => tracing::error!("{error:#}"),
    }
}

/// Mounts the file system.
///
/// # Errors
/// When it cannot be mounted.
pub fn mount(args: &MountArgs) -> anyhow::Result<()> {
    let file = args.cluster.client_file("client")?;
    let config: ClientConfig = config::load(&file)?;
    let identity = Identity::load(&config::beside(&file, &config.identity))?;
    let mut client = ClientOptions::new(
        args.namenodes.clone().unwrap_or(config.namenodes),
        NAMENODE_NAME.to_owned(),
        identity.clone(),
    );
    let compaction_bytes_per_s = config.compaction_bytes_per_s.0;
    client.dirty_bytes_max = config.dirty.0;
    client.busy_timeout = Duration::from_secs(args.busy_timeout);
    let unreachable_timeout = args.unreachable_timeout;
    client.unreachable_timeout = unreachable_timeout
        .unwrap_or(config.unreachable_timeout_s)
        .duration();
    let mut options = MountOptions::new(args.directory.clone(), identity.cluster());
    options.permissions = Permissions {
        allow_other: args.allow_other,
        suid: args.suid,
        dev: args.dev,
    };
    raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(mount_workers())
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let result = runtime.block_on(async {
        let mut stop = StopSignal::listen()?;
        let endpoint = endpoint(config.http.as_ref(), &file, &identity).await?;
        let client = tokio::select! {
            client = Client::connect(client) => client?,
            // It may wait for the namenode forever.
            () = stop.received() => return Ok(()),
        };
        // From here on, it is unmounted at the end, even if a signal has arrived in the meantime.
        let mut mount = Mount::start(client, options).await?;
        if let Some(endpoint) = endpoint {
            tokio::spawn(endpoint.serve(MetricsSite(mount.metrics_text())));
        }
        println!("{READY} {}", args.directory.display());
        // Units that are ordered after this one would otherwise write to the directory below the mount.
        if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
            tracing::warn!(%error, "cannot tell systemd that the mount is there");
        }
        if compaction_bytes_per_s > 0 {
            let client = mount.client().clone();
            tokio::spawn(compact_periodically(client, compaction_bytes_per_s));
        }
        tokio::select! {
            () = stop.received() => tokio::select! {
                unmounted = within_deadline("the mount", mount.unmount()) => unmounted,
                () = stop.received_again() => {
                    bail!("a second signal ends the mount; what was not written back is lost")
                }
            },
            ended = mount.ended() => {
                // Somebody unmounted it; that is an orderly end.
                ended.context("the mount ended")
            }
        }
    });
    // The process ends now. Threads that are blocked in the kernel may still use the runtime, so it is not shut down.
    std::mem::forget(runtime);
    result
}

/// Threads of a mount's runtime: half of the processors, because the threads that read the kernel's
/// requests work as well. A thread more than the work needs is woken in vain again and again (measured
/// on two processors only, one against two: 28 % more random reads, 25 % more small files, 8 % more
/// MB/s written).
fn mount_workers() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    (processors / 2).clamp(1, MOUNT_WORKERS_MAX)
}

/// Reclaims the space of mostly unused blocks, until the client is closed.
async fn compact_periodically(client: Client, bytes_per_s: u64) {
    loop {
        tokio::time::sleep(COMPACTION_INTERVAL).await;
        match client.compact(bytes_per_s).await {
            Ok(done) if done.found_pieces > 0 => tracing::info!(
                found_pieces = done.found_pieces,
                moved_pieces = done.moved_pieces,
                copied_bytes = done.copied_bytes,
                "compacted mostly unused blocks"
            ),
            Ok(_) => {}
            Err(ClientError::Closed) => return,
            Err(ClientError::Fs(FsError::Busy { .. })) => {
                tracing::debug!("another session compacts");
            }
            Err(error) => tracing::warn!(%error, "compaction stopped; it is tried again"),
        }
    }
}

/// The socket for a part's page or metrics, if one is configured.
async fn endpoint(
    http: Option<&HttpConfig>,
    path: &Path,
    identity: &Identity,
) -> anyhow::Result<Option<Endpoint>> {
    let Some(http) = http else {
        return Ok(None);
    };
    let endpoint = http.bind(path, identity).await?;
    tracing::info!(url = endpoint.url(), "can be looked at");
    Ok(Some(endpoint))
}

/// Open replicas, those that are lent by datanodes, and connections: the usual soft limit of 1024 is
/// for programs that use `select`, which this one does not.
fn raise_open_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

fn current_thread(part: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(part)
}

async fn within_deadline<E>(
    what: &str,
    stopping: impl Future<Output = Result<(), E>>,
) -> anyhow::Result<()>
where
    E: std::error::Error + Send + Sync + 'static,
{
    match tokio::time::timeout(STOP_DEADLINE, stopping).await {
        Ok(result) => Ok(result?),
        Err(_) => bail!("{what} did not stop within {} s", STOP_DEADLINE.as_secs()),
    }
}

/// SIGINT, SIGTERM or, where it means nothing else, SIGHUP.
pub struct StopSignal {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
    /// Whether the kernel sends SIGTERM when the parent ends: see [`end_with_parent`].
    ends_with_parent: bool,
}

impl StopSignal {
    /// Catches the signals, so that none of them ends the process by itself any more. SIGHUP stays ignored if it is, as
    /// under nohup(1).
    ///
    /// # Errors
    /// When signals cannot be waited for.
    pub fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            hangup: signals::unless_ignored(SignalKind::hangup())?,
            ..Self::listen_but_for_hangup()?
        })
    }

    /// As [`StopSignal::listen`], where SIGHUP means something else.
    ///
    /// # Errors
    /// As [`StopSignal::listen`].
    fn listen_but_for_hangup() -> anyhow::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: None,
            // Refers to this thread, which has set it: the process waits for signals in its main thread.
            ends_with_parent: parent_process_death_signal()?.is_some(),
        })
    }

    /// Waits for one of them.
    pub async fn received(&mut self) {
        let hangup = signals::next(self.hangup.as_mut());
        tokio::select! {
            biased;
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            () = hangup => {}
        }
    }

    /// Waits for another signal with which a user insists that the process end at once. A second SIGHUP does not count,
    /// as closing a terminal may send several. Nor does a second SIGTERM to a part that ends with its parent: the
    /// parent, the kernel when the parent ends, and systemd, which signals a whole unit, may each send one. A user in a
    /// hurry can kill it.
    async fn received_again(&mut self) {
        tokio::select! {
            biased;
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv(), if !self.ends_with_parent => {}
        }
    }

    /// Waits for Ctrl-C.
    pub async fn interrupted(&mut self) {
        self.interrupt.recv().await;
    }
}

/// Makes the kernel send SIGTERM when the parent ends, so that nothing outlives a killed `up`, and sets the name of the
/// process, which would otherwise be `exe` if it is started as `/proc/self/exe`.
///
/// # Errors
/// When the parent has ended already.
pub fn end_with_parent(parent: u32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    // The parent may have ended before the line above took effect.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if now != i32::try_from(parent).ok() {
        bail!("the process {parent} that started this one has ended");
    }
    // Without it, process listings are merely less readable.
    let _ = std::fs::write("/proc/self/comm", PROGRAM);
    Ok(())
}
