//! Starting and stopping a datanode.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join};
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::limits::{LABEL_BYTES_MAX, VOLUMES_PER_NODE_MAX};
use harvestfs_protocol::machine;
use harvestfs_protocol::node::ServerDescription;
use harvestfs_protocol::transport::{ConnectionCounts, ConnectionPool, Endpoint, TransportOptions};
use harvestfs_telemetry::primary::{Monitor, Sampler};
use tokio::sync::mpsc;

use crate::driver::busy::BusySignal;
use crate::driver::late::{self, Late};
use crate::driver::link::{Commands, Links, Parts, Removals};
use crate::driver::node::Node;
use crate::driver::opening::{Opened, open_volumes};
use crate::driver::repair::Repairer;
use crate::driver::scrubber::Scrubber;
use crate::driver::service::{self, Alive};
use crate::driver::{guard, leftovers, short_circuit, shrinker};
use crate::engine::link::members::Members;
use crate::options::{DatanodeOptions, PrimaryOptions, StartError};
use crate::store::{Disk, RealDisk, VolumeError, VolumeOptions, now};

/// How long connecting to another datanode may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(5);
/// Maximum number of connections to other datanodes that are kept open.
const CONNECTIONS_KEPT_MAX: usize = 256;
/// How long peers may take to confirm that the connection is closed.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// A running datanode. Dropping it stops it immediately; [`Datanode::shutdown`] stops it gracefully.
pub struct Datanode {
    node: Arc<Node>,
    endpoint: Endpoint,
    local_addr: SocketAddr,
    shutdown_grace: Duration,
    alive: Option<Alive>,
    /// Ends once all tasks that hold `alive` have ended.
    all_ended: mpsc::Receiver<()>,
    volume_errors: Vec<VolumeError>,
}

impl Datanode {
    /// Opens the volumes, starts to listen, and keeps the datanode registered with all namenodes from then on. Until
    /// it is registered, it has no keys to verify tokens with and serves no blocks: reads and seals are answered with
    /// `Busy`, and writes wait a few seconds for the registration.
    ///
    /// # Errors
    /// [`StartError`]. A volume that cannot be used, or is not open soon after another one, is an error only if no
    /// other volume can be used.
    pub async fn start(options: DatanodeOptions) -> Result<Self, StartError> {
        let sampler = options.primary.source.sampler()?;
        Self::start_on(options, Arc::new(RealDisk), sampler).await
    }

    /// As [`Datanode::start`], with volumes on `disk`, and a primary tenant as observed by `sampler`; with `None`,
    /// there is no primary tenant.
    ///
    /// # Errors
    /// As [`Datanode::start`].
    pub fn start_on(
        options: DatanodeOptions,
        disk: Arc<dyn Disk>,
        sampler: Option<Box<dyn Sampler>>,
    ) -> BoxFuture<'static, Result<Self, StartError>> {
        // Boxed, so that it is compiled here, and not again in every program that contains a datanode.
        Box::pin(Self::start_here(options, disk, sampler))
    }

    async fn start_here(
        options: DatanodeOptions,
        disk: Arc<dyn Disk>,
        sampler: Option<Box<dyn Sampler>>,
    ) -> Result<Self, StartError> {
        check(&options)?;
        let primary = &options.primary;
        let monitor = sampler
            .map(|sampler| watch_primary(sampler, primary))
            .transpose()
            .map_err(StartError::PrimaryThread)?;
        let namenode = Peer::new(Role::Namenode, options.namenode_name.clone())
            .map_err(StartError::NamenodeName)?;
        let members = Members::new(&options.namenodes);
        let links_max = members.links_max();
        let Opened {
            store,
            errors: volume_errors,
            late: late_volumes,
            failed,
        } = open_volumes(&options, disk, links_max).await?;
        let transport = TransportOptions::default();
        let endpoint = Endpoint::bind(options.listen, &options.identity, transport)?;
        let local_addr = endpoint.local_addr()?;
        let connections =
            ConnectionPool::new(endpoint.clone(), DIAL_DEADLINE, CONNECTIONS_KEPT_MAX);
        let (short_circuit, listener) = options
            .short_circuit_socket
            .as_deref()
            .and_then(short_circuit::open)
            .unzip();
        let node = Node::new(
            store,
            connections,
            BusySignal::new(monitor),
            short_circuit,
            Late::new(&late_volumes, failed),
            links_max,
        );
        if let Some(listener) = listener {
            tokio::spawn(short_circuit::serve(listener, node.clone()));
        }
        for volume in late_volumes {
            let rate = options.removal_bytes_per_second;
            tokio::spawn(late::run(node.clone(), volume, rate));
        }
        tokio::spawn(watch_busy(node.clone()));
        tokio::spawn(write_obeyed(node.clone()));

        let (alive, all_ended) = mpsc::channel(1);
        tokio::spawn(service::serve(
            endpoint.clone(),
            ConnectionCounts::new(options.connections_per_address_max),
            node.clone(),
            alive.downgrade(),
        ));
        let repairer = Repairer::new(
            node.clone(),
            options.repairs_max,
            options.repair_bytes_per_second,
        );
        let scrubber = Scrubber::new(node.clone(), options.scrub_bytes_per_second);
        let removals = Removals::new(node.clone(), options.removal_bytes_per_second, links_max);
        let commands = Commands::start(&node, repairer, removals.clone(), scrubber.clone(), &alive);
        let parts = Parts {
            node: node.clone(),
            endpoint: endpoint.clone(),
            namenode,
            server: ServerDescription {
                name: options.identity.peer().name.clone(),
                rack: options.rack.clone(),
                environment: options.environment.clone(),
                machine_function: options.machine_function.clone(),
                data_addr: options.advertise.unwrap_or(local_addr),
            },
            commands,
            removals,
        };
        Links::begin(parts, members, &options.namenodes, &alive);
        tokio::spawn(shrinker::run(node.clone()));
        tokio::spawn(guard::run(node.clone()));
        tokio::spawn(leftovers::run(node.clone()));
        tokio::spawn(scrubber.run(options.scrub_interval));
        Ok(Self {
            node,
            endpoint,
            local_addr,
            shutdown_grace: options.shutdown_grace,
            alive: Some(alive),
            all_ended,
            volume_errors,
        })
    }

    /// The address on which the data service listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Completes once the leader has accepted this datanode and the first full report of its replicas. A sole namenode
    /// need not lead for that: it may be in recovery.
    pub async fn registered(&self) {
        self.node.known().await;
    }

    /// Returns a function that renders the current metrics in Prometheus text format, without waiting.
    pub fn metrics_text(&self) -> impl Fn() -> String + Send + Sync + 'static {
        let node = self.node.clone();
        move || node.metrics_text()
    }

    /// The volumes that could not be used at the start, and why. One that was still being opened then may be in use by
    /// now.
    #[must_use]
    pub fn volume_errors(&self) -> &[VolumeError] {
        &self.volume_errors
    }

    /// Applies the quotas of volumes that are in use, or will be once they are open, where they differ from the
    /// previous configuration: for new data immediately, for existing data within an hour. Volumes are identified by
    /// their paths; every other change needs a restart.
    pub async fn reconfigure(&self, volumes: &[VolumeOptions]) {
        // First, so that a volume that joins in the meantime uses the new configuration.
        self.node.late.reconfigure(volumes);
        self.node.store.configure_quotas(volumes).await;
    }

    /// Stops the datanode: ends block streams (`Stopping`), waits for the disk jobs in flight, puts open replicas on
    /// stable storage, notifies the namenodes, and closes all connections. Bounded by the configured grace.
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        Box::pin(self.shut_down())
    }

    async fn shut_down(mut self) {
        self.node.stop();
        self.alive = None;
        let end = async {
            while self.all_ended.recv().await.is_some() {}
            let Node {
                store, obedience, ..
            } = &*self.node;
            // Simultaneously: a disk that does not respond would use up all the time that is left.
            let ((), written) = join(store.sync_open_replicas(), obedience.write(store)).await;
            if let Err(error) = written {
                tracing::warn!(%error, "the namenode that was obeyed is not written down");
            }
        };
        if tokio::time::timeout(self.shutdown_grace, end)
            .await
            .is_err()
        {
            tracing::warn!("not everything ended within the grace; stopping all the same");
        }
        self.endpoint.close("the datanode is stopping");
        if self.endpoint.wait_idle(CLOSE_DEADLINE).await.is_err() {
            tracing::debug!("not all peers confirmed that the connection is closed");
        }
    }
}

impl Drop for Datanode {
    fn drop(&mut self) {
        self.node.stop();
        self.endpoint.close("the datanode is gone");
    }
}

fn check(options: &DatanodeOptions) -> Result<(), StartError> {
    if options.volumes.len() > VOLUMES_PER_NODE_MAX {
        return Err(StartError::TooManyVolumes(options.volumes.len()));
    }
    let reached_at = options.advertise.unwrap_or(options.listen);
    if reached_at.ip().is_unspecified() {
        return Err(StartError::Unreachable(reached_at));
    }
    if options.namenodes.is_empty() {
        return Err(StartError::NoNamenode);
    }
    for (what, value) in [
        ("rack", &options.rack),
        ("environment", &options.environment),
        ("machine function", &options.machine_function),
    ] {
        if value.len() > LABEL_BYTES_MAX {
            return Err(StartError::LabelTooLong {
                what,
                value: value.clone(),
            });
        }
    }
    Ok(())
}

/// Starts monitoring the primary tenant. A simulation has no thread for it: threads are not reproducible from a seed.
fn watch_primary(sampler: Box<dyn Sampler>, options: &PrimaryOptions) -> io::Result<Monitor> {
    let PrimaryOptions { gate, interval, .. } = *options;
    if machine::is_simulated() {
        return Ok(Monitor::start_here(sampler, gate, interval, now()));
    }
    Monitor::start(sampler, gate, interval)
}

/// Keeps the node's view of its primary tenant up to date until the node stops.
async fn watch_busy(node: Arc<Node>) {
    tokio::select! {
        biased;
        () = node.stopping() => {}
        () = node.busy.keep_looking(&node.store, &node.metrics.busy_seconds) => {}
    }
}

/// Keeps the record of the obeyed namenode on the disks up to date until the node stops.
async fn write_obeyed(node: Arc<Node>) {
    tokio::select! {
        biased;
        () = node.stopping() => {}
        () = node.obedience.keep_written(&node.store) => {}
    }
}
