//! The commands that the namenode gives this datanode. Each kind has a bounded queue and its own workers. A command
//! that finds its queue full is dropped, because the namenode repeats what was not done. Commands not yet started are
//! dropped too when another namenode is obeyed.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::limits::COMMANDS_PER_HEARTBEAT_MAX;
use harvestfs_protocol::node::NodeCommand;
use harvestfs_protocol::timeline::{Epoch, Position};
use tokio::sync::{Mutex, mpsc};

use super::removals::{Doomed, Removals};
use crate::driver::node::Node;
use crate::driver::repair::{Repair, Repairer};
use crate::driver::scrubber::Scrubber;
use crate::driver::service::Alive;
use crate::engine::link::LinkId;
use crate::store::StoreError;

/// The commands of several heartbeats.
const QUEUED_MAX: usize = 4 * COMMANDS_PER_HEARTBEAT_MAX;
/// Concurrent deletions: enough for the disk, while reads still get their turn.
const DELETIONS_AT_ONCE: usize = 2;
/// Concurrent seals. One may have to wait for its writer to let go.
const SEALS_AT_ONCE: usize = 4;

/// Most queued verifications. Further ones are dropped: the scrubber reaches every replica by itself.
const VERIFICATIONS_QUEUED_MAX: usize = 64;

/// The authority by which a namenode gives commands.
#[derive(Clone, Copy, Debug)]
pub struct Mandate {
    /// The link on which the commands arrive.
    pub link: LinkId,
    /// The position that was obeyed when they arrived.
    pub obeyed: Position,
}

/// Queues of work, each with the epoch in which it was commanded.
#[derive(Clone)]
pub struct Commands {
    repairs: mpsc::Sender<(Epoch, Repair)>,
    removals: Arc<Removals>,
    deletions: mpsc::Sender<(Epoch, Doomed)>,
    seals: mpsc::Sender<(Epoch, (BlockId, u64))>,
    /// Seals of replicas that have to be rewritten first. They take long, and must not delay the other seals.
    unproven_seals: mpsc::Sender<(Epoch, (BlockId, u64))>,
    node: Arc<Node>,
    quotas: mpsc::Sender<(Epoch, (StorageId, u64, Duration))>,
    verifications: mpsc::Sender<(Epoch, (StorageId, BlockId))>,
}

impl Commands {
    /// Starts the workers. They end when the datanode stops.
    pub fn start(
        node: &Arc<Node>,
        repairer: Arc<Repairer>,
        removals: Arc<Removals>,
        scrubber: Arc<Scrubber>,
        alive: &Alive,
    ) -> Self {
        let workers = Workers { node, alive };
        let repairs_max = repairer.repairs_max();
        let repairs = workers.work_off(QUEUED_MAX, repairs_max, move |repair| {
            let repairer = repairer.clone();
            async move { repairer.repair(repair).await }
        });
        let deleting = removals.clone();
        let deletions = workers.work_off(QUEUED_MAX, DELETIONS_AT_ONCE, move |doomed| {
            let deleting = deleting.clone();
            async move { deleting.delete(doomed).await }
        });
        let sealing = node.clone();
        let seals = workers.work_off(QUEUED_MAX, SEALS_AT_ONCE, move |(block, length_bytes)| {
            seal(sealing.clone(), block, length_bytes)
        });
        let sealing = node.clone();
        let unproven_seals =
            workers.work_off(QUEUED_MAX, SEALS_AT_ONCE, move |(block, length_bytes)| {
                seal_unproven(sealing.clone(), block, length_bytes)
            });
        let changing = node.clone();
        let quotas = workers.work_off(QUEUED_MAX, 1, move |(storage, bytes, time)| {
            set_quota(changing.clone(), storage, bytes, time)
        });
        // One at a time: they share the scrubber's budget.
        let verifications =
            workers.work_off(VERIFICATIONS_QUEUED_MAX, 1, move |(storage, block)| {
                let scrubber = scrubber.clone();
                async move { scrubber.verify_doubted(storage, block).await }
            });
        Self {
            repairs,
            removals,
            deletions,
            seals,
            unproven_seals,
            node: node.clone(),
            quotas,
            verifications,
        }
    }

    /// Accepts a command; never waits.
    pub fn obey(
        &self,
        command: NodeCommand,
        by: Mandate,
        ask_for_report: &mpsc::Sender<StorageId>,
    ) {
        let epoch = by.obeyed.epoch;
        let queued = match command {
            NodeCommand::Replicate {
                block,
                length_bytes,
                sources,
                token,
            } => {
                let repair = Repair {
                    block,
                    length_bytes,
                    sources,
                    token,
                };
                self.repairs.try_send((epoch, repair)).is_ok()
            }
            NodeCommand::Delete { blocks } => {
                let doomed = self.removals.announce(blocks, by);
                self.deletions.try_send((epoch, doomed)).is_ok()
            }
            NodeCommand::Seal {
                block,
                length_bytes,
            } if self.node.store.is_unproven(block) => {
                // Otherwise a seal that waits for the primary tenant would be queued again with each repetition.
                let is_dropped = !may_write_again(&self.node, block);
                let seal = (epoch, (block, length_bytes));
                is_dropped || self.unproven_seals.try_send(seal).is_ok()
            }
            NodeCommand::Seal {
                block,
                length_bytes,
            } => self.seals.try_send((epoch, (block, length_bytes))).is_ok(),
            NodeCommand::SetQuota {
                storage,
                quota_bytes,
                deadline_ms,
            } => {
                let time = Duration::from_millis(deadline_ms);
                let quota = (storage, quota_bytes, time);
                self.quotas.try_send((epoch, quota)).is_ok()
            }
            NodeCommand::ReportBlocks { storage } => ask_for_report.try_send(storage).is_ok(),
            NodeCommand::Verify { storage, block } => {
                let replica = (storage, block);
                self.verifications.try_send((epoch, replica)).is_ok()
            }
            // The link has handled it.
            NodeCommand::Namenodes { .. } => true,
        };
        if !queued {
            tracing::warn!("too many commands wait; one is dropped until it is repeated");
        }
    }
}

/// What workers need in order to end when the datanode stops, and to be waited for.
struct Workers<'a> {
    node: &'a Arc<Node>,
    alive: &'a Alive,
}

impl Workers<'_> {
    /// Starts workers that each process items of a bounded queue one by one. Returns the sending end of the queue.
    fn work_off<T, F>(
        &self,
        queued_max: usize,
        workers: usize,
        work: impl Fn(T) -> F + Clone + Send + Sync + 'static,
    ) -> mpsc::Sender<(Epoch, T)>
    where
        T: Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, queue) = mpsc::channel::<(Epoch, T)>(queued_max);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..workers.max(1) {
            let (queue, work) = (queue.clone(), work.clone());
            let (node, alive) = (self.node.clone(), self.alive.clone());
            tokio::spawn(async move {
                let work_on = async {
                    loop {
                        let item = queue.lock().await.recv().await;
                        match item {
                            Some((epoch, item)) if node.obedience.holds(epoch) => work(item).await,
                            Some((epoch, _)) => {
                                tracing::debug!(%epoch, "a command of a namenode that is not obeyed any more is dropped");
                            }
                            None => break,
                        }
                    }
                };
                tokio::select! {
                    biased;
                    () = node.stopping() => {}
                    () = work_on => {}
                }
                drop(alive);
            });
        }
        sender
    }
}

async fn set_quota(node: Arc<Node>, storage: StorageId, bytes: u64, time: Duration) {
    if let Err(error) = node.store.set_quota(storage, bytes, time).await {
        tracing::warn!(%storage, %error, "the quota is not written down");
    }
}

async fn seal(node: Arc<Node>, block: BlockId, length_bytes: u64) {
    let sealed = node.store.seal_what_is_there(block, length_bytes, || true);
    sealed_or_not(&node, block, sealed.await);
}

/// As [`seal`], as long as the replica may be rewritten. Otherwise the namenode repeats the command, and the rewriting
/// resumes where it stopped.
async fn seal_unproven(node: Arc<Node>, block: BlockId, length_bytes: u64) {
    let may_go_on = || may_write_again(&node, block);
    if !may_go_on() {
        return;
    }
    let sealed = node
        .store
        .seal_what_is_there(block, length_bytes, may_go_on);
    match sealed.await {
        Err(StoreError::Busy) => {}
        sealed => sealed_or_not(&node, block, sealed),
    }
}

/// Whether a replica may be rewritten now. That reads and writes all of it, so it must not happen while the primary
/// tenant needs the disks, unless space matters more: an unsealed replica is neither moved nor given up, and the quota
/// would remain exceeded for as long.
fn may_write_again(node: &Node, block: BlockId) -> bool {
    node.busy.denial().is_none() || node.store.is_above_quota(block)
}

fn sealed_or_not(node: &Node, block: BlockId, sealed: Result<(), StoreError>) {
    if let Err(error) = sealed {
        tracing::warn!(%block, %error, "cannot seal a replica");
    }
    // In any case the namenode learns what is here, in case its view differs.
    node.store.report_again(block);
}
