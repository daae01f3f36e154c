//! The namenode as a server: a thin shell of network, journal and clock around the engine.
//!
//! A [`Namenode`] runs on a thread of its own with a runtime of its own: the socket, the
//! connections and the owner of the engine take turns there, so that a request is
//! answered without waking another thread. Only the journal has its own thread, because a sync
//! blocks.
//!
//! ```text
//! socket -> connection tasks -> bounded queue -> owner -> reply
//!                                                  |        ^
//!                                                  v        | record durable, others have forgotten
//!                                          journal thread --+
//! ```

mod activity;
mod checkpoint;
mod classes;
mod clock;
mod connection;
mod data_dir;
mod delegations;
mod error;
mod gate;
mod harvest;
mod history;
mod leases;
mod log;
mod metrics;
mod observer;
mod options;
mod outside;
mod overtaken;
mod overview;
mod owner;
mod recovery;
mod restore;
mod sessions;
mod slow_disk;
mod timeline;
mod token_keys;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use futures::future::BoxFuture;
use harvestfs_protocol::limits::SESSIONS_MAX;
use harvestfs_protocol::machine;
use harvestfs_protocol::transport::{ConnectionCounts, Endpoint};
use harvestfs_protocol::watch;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

pub use data_dir::{
    FormatOptions, GroupOptions, cluster_id, format, format_outside, journal_dir, other_members,
    recover_alone,
};
pub use error::NamenodeError;
pub(crate) use observer::Gone;
pub use observer::Observer;
pub use options::{NamenodeOptions, SnapshotTrigger};
pub use restore::{RestoreError, restore};
pub use token_keys::TokenKeyError;

use self::clock::Clock;
use self::connection::Served;
use self::history::Historian;
use self::log::Log;
use self::metrics::{Metrics, RequestMetrics};
use self::outside::Waited;
use self::owner::{Asked, Ended, Owner, Parts, Stop};
use self::recovery::{Found, Kept, Restored};
use self::token_keys::TokenKeys;
use crate::consensus::{Commits, Consensus, Member, Outside, Service};
use crate::engine::cluster::{Cluster, ClusterOptions};
use crate::journal::disk::Disk;
use crate::journal::{Journal, JournalError};

/// Requests queued for the owner, which takes a few hundred at a time. Connections wait while the queue is
/// full. A request can be as large as a frame, so this bounds memory, too.
const EVENTS_QUEUED_MAX: usize = 1_024;
/// Questions from observers queued for the owner, which takes one at a time.
const QUESTIONS_QUEUED_MAX: usize = 16;

/// Maximum number of simultaneous connections: one per session, plus the datanodes.
const CONNECTIONS_MAX: usize = SESSIONS_MAX + 16_384;

/// How long the last replies have to leave before connections are closed.
const LAST_REPLIES_GRACE: Duration = Duration::from_millis(50);

/// How long to wait for a journal that is still open when this process starts: another process may just be
/// ending.
const UNLOCKED_WITHIN: Duration = Duration::from_secs(2);
/// The same when a namenode starts over within the process. Its predecessor keeps the journal open until its
/// calls to other namenodes have ended, one of which may wait for another namenode's disk.
const UNLOCKED_ANEW_WITHIN: Duration = Duration::from_secs(20);
const UNLOCKED_POLL: Duration = Duration::from_millis(20);

/// How long peers have to notice that the namenode stops.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// A running namenode.
///
/// Dropping it stops it as [`Namenode::kill`] does, without waiting.
pub struct Namenode {
    ready: Ready,
    stop: Option<oneshot::Sender<Stop>>,
    ended: oneshot::Receiver<Result<(), NamenodeError>>,
}

impl Namenode {
    /// Restores the namespace from the data directory and starts to serve it.
    ///
    /// # Errors
    /// Why it cannot start, in words for an operator.
    pub async fn start(options: NamenodeOptions) -> Result<Self, NamenodeError> {
        Self::start_on(options, None).await
    }

    /// As [`Namenode::start`], with the journal on `disk` instead of the journal directory in the data
    /// directory.
    ///
    /// # Errors
    /// As [`Namenode::start`].
    pub fn start_on(
        options: NamenodeOptions,
        disk: Option<Arc<dyn Disk>>,
    ) -> BoxFuture<'static, Result<Self, NamenodeError>> {
        // Boxed, so that it and what it starts are compiled here, not again in each program that contains a
        // namenode.
        Box::pin(Self::start_here(options, disk))
    }

    async fn start_here(
        options: NamenodeOptions,
        disk: Option<Arc<dyn Disk>>,
    ) -> Result<Self, NamenodeError> {
        options.check()?;
        let (stop_sender, stop) = oneshot::channel();
        let (ready_sender, ready) = oneshot::channel();
        let (ended_sender, ended) = oneshot::channel();
        // The caller that started it may be gone; then the result is not needed.
        if machine::is_simulated() {
            tokio::task::spawn_local(async move {
                let _ = ended_sender.send(serve(&options, disk, ready_sender, stop).await);
            });
        } else {
            thread::Builder::new()
                .name("namenode".to_owned())
                .spawn(move || {
                    let _ = ended_sender.send(run(&options, disk, ready_sender, stop));
                })
                .map_err(NamenodeError::Thread)?;
        }
        match ready.await {
            Ok(ready) => Ok(Self {
                ready,
                stop: Some(stop_sender),
                ended,
            }),
            // It ended before it was ready.
            Err(_) => match ended.await {
                Ok(Err(error)) => Err(error),
                Ok(Ok(())) | Err(_) => Err(NamenodeError::Panicked),
            },
        }
    }

    /// Returns the address that the namenode listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.ready.local_addr
    }

    /// Returns a handle that observes the namenode while it runs.
    #[must_use]
    pub fn observer(&self) -> Observer {
        self.ready.observer.clone()
    }

    /// Stops accepting requests, answers those in flight, makes everything durable, and ends.
    ///
    /// # Errors
    /// The failure that stopped it earlier, or a failure of the journal.
    pub async fn shutdown(self) -> Result<(), NamenodeError> {
        self.end(Stop::Gracefully).await
    }

    /// Ends immediately: requests in flight get no answer, as if the process had been killed. For tests of what
    /// happens after a crash.
    ///
    /// # Errors
    /// As [`Namenode::shutdown`].
    pub async fn kill(self) -> Result<(), NamenodeError> {
        self.end(Stop::AtOnce).await
    }

    /// Waits until the namenode ends without being stopped: its journal failed.
    ///
    /// # Errors
    /// Why it ended.
    pub async fn ended(&mut self) -> Result<(), NamenodeError> {
        (&mut self.ended)
            .await
            .unwrap_or(Err(NamenodeError::Panicked))
    }

    async fn end(mut self, how: Stop) -> Result<(), NamenodeError> {
        if let Some(stop) = self.stop.take() {
            // Refused only if it has ended already.
            let _ = stop.send(how);
        }
        self.ended().await
    }
}

/// What is known about a namenode once it serves.
struct Ready {
    local_addr: SocketAddr,
    observer: Observer,
}

/// Runs a namenode on this thread until it ends.
fn run(
    options: &NamenodeOptions,
    disk: Option<Arc<dyn Disk>>,
    ready: oneshot::Sender<Ready>,
    stop: oneshot::Receiver<Stop>,
) -> Result<(), NamenodeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(NamenodeError::Thread)?;
    runtime.block_on(serve(options, disk, ready, stop))
}

/// A namenode that can be served.
enum Prepared {
    /// A member of a group, or the only one.
    Member(Box<Owner>, Service),
    /// One that is in no group.
    Outside(Journal, Outside),
}

/// What a namenode starts from, besides its disk.
struct Start {
    /// How long to wait for a journal that is still open.
    unlocked_within: Duration,
    kept: Option<Box<Kept>>,
}

/// Reads what is on the disk. The previous user of the journal may keep it open a little longer.
async fn recover(
    options: &NamenodeOptions,
    disk: Option<&Arc<dyn Disk>>,
    start: Start,
) -> Result<Found, NamenodeError> {
    let mut kept = start.kept.map(|kept| *kept);
    let deadline = tokio::time::Instant::now() + start.unlocked_within;
    loop {
        let (data_dir, segment_bytes) = (&options.data_dir, options.segment_bytes);
        match recovery::recover(data_dir, segment_bytes, disk.cloned(), &mut kept) {
            Err(NamenodeError::Journal(error))
                if matches!(*error, JournalError::Locked { .. })
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(UNLOCKED_POLL).await;
            }
            recovered => return recovered,
        }
    }
}

/// Restores everything that does not need the network.
async fn prepare(
    options: &NamenodeOptions,
    disk: Option<&Arc<dyn Disk>>,
    metrics: &Metrics,
    endpoint: &Endpoint,
    start: Start,
) -> Result<Prepared, NamenodeError> {
    let Restored {
        namespace,
        formatted,
        journal,
        read,
        raised,
        from_backup,
    } = match recover(options, disk, start).await? {
        Found::Restored(restored) => *restored,
        Found::Outside(journal, standing) => {
            outside::announce(standing.condition, options);
            let outside = Outside::new(standing, &journal, endpoint.clone())?;
            return Ok(Prepared::Outside(journal, outside));
        }
    };
    let lifetime_ms = u64::try_from(options.token_lifetime.as_millis()).unwrap_or(u64::MAX);
    let tokens = TokenKeys::open(
        data_dir::token_keys_file(&options.data_dir),
        lifetime_ms,
        clock::unix_now_ms(),
        &mut machine::rng(),
    )?;
    let cluster_options = ClusterOptions {
        block_bytes: formatted.block_bytes,
        ..options.cluster.clone()
    };
    let clock = Clock::start();
    let cluster = Cluster::new(
        cluster_options,
        options.policy.build(&options.placement),
        clock.now_ms(),
    );
    let snapshot_lsn = read.snapshot_lsn;
    let this = Member {
        name: options.identity.peer().name.clone(),
        addr: options.listen,
    };
    let last_lsn = read.last_lsn;
    let writing = options.journal.clone();
    let started = Consensus::start(journal, writing, read, this, endpoint.clone());
    let (consensus, committed) = started.await?;
    consensus.elect_if_alone().await?;
    let service = consensus.service();
    let historian = Historian::start(
        data_dir::history_dir(&options.data_dir),
        options.analysis_interval,
    )
    .map_err(NamenodeError::Thread)?;
    let owner = Owner::new(Parts {
        leadership: consensus.leadership(),
        committed,
        options: options.clone(),
        namespace,
        formatted,
        cluster,
        log: Log::new(consensus, last_lsn, metrics.journal.clone()),
        records_since_snapshot: last_lsn - snapshot_lsn,
        raised,
        from_backup,
        tokens,
        historian,
        rng: match options.rng_seed {
            Some(seed) => StdRng::seed_from_u64(seed),
            None => machine::rng(),
        },
        clock,
    });
    Ok(Prepared::Member(Box::new(owner), service))
}

async fn serve(
    options: &NamenodeOptions,
    disk: Option<Arc<dyn Disk>>,
    ready: oneshot::Sender<Ready>,
    mut stop: oneshot::Receiver<Stop>,
) -> Result<(), NamenodeError> {
    let listen_error = |source| NamenodeError::Listen {
        addr: options.listen,
        source,
    };
    let endpoint = Endpoint::bind(options.listen, &options.identity, options.transport.clone())
        .map_err(listen_error)?;
    let local_addr = endpoint.local_addr().map_err(listen_error)?;
    let metrics = Arc::new(Metrics::new());
    let mut ready = Some(ready);
    let mut observer: Option<Observer> = None;
    let mut start = Start {
        unlocked_within: UNLOCKED_WITHIN,
        kept: None,
    };
    let result = loop {
        // Blocks this thread; peers that dial meanwhile try again.
        let prepared = prepare(options, disk.as_ref(), &metrics, &endpoint, start).await?;
        let (service, commits) = match &prepared {
            Prepared::Member(owner, service) => (service.clone(), owner.commits()),
            Prepared::Outside(_, outside) => (
                Service::outside(outside.clone()),
                Arc::new(Commits::default()),
            ),
        };
        let (events_sender, events) = mpsc::channel(EVENTS_QUEUED_MAX);
        let (questions_sender, questions) = mpsc::channel(QUESTIONS_QUEUED_MAX);
        // Dropped at the end of this iteration, and connections of other namenodes end with it: what they were
        // promised is answered until the member is closed. All other connections end when the owner lets them
        // go.
        let (_serving, ended) = watch::channel(());
        let (holding, let_go) = watch::channel(());
        let accepting = Abort(tokio::spawn(accept(
            endpoint.clone(),
            ConnectionCounts::new(options.connections_per_address_max),
            Served {
                events: events_sender,
                service,
                let_go,
                ended,
            },
            Arc::clone(&metrics.requests),
        )));
        let observer = match &observer {
            Some(observer) => {
                observer.follow(questions_sender, commits);
                observer.clone()
            }
            None => {
                let first = Observer::new(questions_sender, commits, Arc::clone(&metrics));
                observer.insert(first).clone()
            }
        };
        let mut is_ready = || {
            if let Some(ready) = ready.take() {
                tracing::info!(%local_addr, "the namenode is ready");
                let observer = observer.clone();
                // The caller that started it may be gone; then it is stopped next.
                let _ = ready.send(Ready {
                    local_addr,
                    observer,
                });
            }
        };
        let ended = match prepared {
            Prepared::Member(owner, _) => {
                let asked = Asked { events, questions };
                owner.run(asked, holding, &mut stop, is_ready).await
            }
            Prepared::Outside(journal, outside) => {
                // Dropped, so that observers see that it does not serve.
                drop(questions);
                is_ready();
                let (disk, stop) = (disk.as_ref(), &mut stop);
                match outside::wait(journal, &outside, options, disk, events, stop).await? {
                    Waited::Changed => Ok(Ended::Deposed(None)),
                    Waited::Stopped => Ok(Ended::Stopped),
                }
            }
        };
        drop(accepting);
        match ended {
            Ok(Ended::Deposed(kept)) => {
                tracing::warn!("this namenode begins anew with what its journal has, as a standby");
                start = Start {
                    unlocked_within: UNLOCKED_ANEW_WITHIN,
                    kept,
                };
            }
            Ok(Ended::Stopped) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    tokio::time::sleep(LAST_REPLIES_GRACE).await;
    endpoint.close("the namenode stops");
    if let Err(error) = endpoint.wait_idle(CLOSE_DEADLINE).await {
        tracing::debug!(%error, "some peers did not take notice");
    }
    result
}

/// Aborts a task when it is dropped.
struct Abort(JoinHandle<()>);

impl Drop for Abort {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn accept(
    endpoint: Endpoint,
    counts: ConnectionCounts,
    served: Served,
    metrics: Arc<RequestMetrics>,
) {
    let open = Arc::new(AtomicUsize::new(0));
    let mut next_id = 0;
    while let Some(incoming) = endpoint.accept().await {
        if open.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
            tracing::warn!(remote = %incoming.remote_addr(), "too many connections");
            incoming.refuse();
            continue;
        }
        next_id += 1;
        open.fetch_add(1, Ordering::Relaxed);
        let (served, open) = (served.clone(), Arc::clone(&open));
        let (metrics, counts) = (Arc::clone(&metrics), counts.clone());
        tokio::spawn(async move {
            connection::serve(next_id, incoming, &counts, served, &metrics).await;
            open.fetch_sub(1, Ordering::Relaxed);
        });
    }
}
