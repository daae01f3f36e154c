//! Inflicts faults on a running cluster.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::admin::Admin;
use super::cluster::Cluster;
use super::double::Astray;
use super::mounted::Doubt;
use super::plan::{Event, Part};
use super::probe::Primary;
use super::rollback::COPY;
use super::scenario::Kind;
use super::watch::Watch;
use super::workload::Counters;
use super::{LiveError, rot};
use crate::random;

/// How long the end of the fault waits for a sync to fail: a part in use writes something within this time.
const SYNC_DEADLINE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);

/// Everything that takes part in a run once its clients have started.
pub(crate) struct Scene<'a> {
    /// The processes.
    pub cluster: Cluster<'a>,
    /// An operator.
    pub admin: Admin,
    /// Counts of the clients' operations.
    pub counters: Arc<Counters>,
    /// Observations from outside.
    pub watch: Watch,
    /// The primary that is measured.
    pub primary: Primary,
    /// Whether the namenode's answers are in doubt.
    pub doubt: Arc<Doubt>,
    /// The server whose datanode follows a copy of the namenode.
    pub astray: Option<Astray>,
}

impl Scene<'_> {
    /// Samples disks, namenode and clients.
    pub async fn look(&mut self) -> Result<(), LiveError> {
        let cluster = &self.cluster;
        let counters = &self.counters;
        self.watch.look(cluster, &mut self.admin, counters).await
    }

    /// Begins or ends a fault of the plan.
    pub async fn apply(
        &mut self,
        event: &Event,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), LiveError> {
        let server = match event.part {
            Part::Server(server) => Some(server),
            Part::Namenode(_) | Part::Mount(_) => None,
        };
        if let Some(server) = server
            && matches!(
                event.kind,
                Kind::Reimage | Kind::Clear | Kind::BitRot | Kind::FailedSync
            )
        {
            self.excuse_double(server);
        }
        if event.kind == Kind::FailedSync && !event.begins {
            self.wait_for_failed_sync(event.part, go_on).await?;
        }
        self.watch.record(event);
        let Self { cluster, watch, .. } = self;
        let amount = |begins: bool| if begins { event.amount } else { 0 };
        match (event.kind, event.begins, server) {
            (Kind::Reimage, true, Some(server)) => {
                cluster.kill(event.part);
                self.empty(server)?;
            }
            (Kind::Clear, true, Some(server)) => {
                cluster.conditions[server].cleared = true;
                self.empty(server)?;
            }
            (Kind::Clear, false, Some(server)) => self.use_again(server)?,
            (Kind::Kill, true, _) => cluster.kill(event.part),
            (Kind::Reimage | Kind::Kill, false, _) => {
                if !cluster.runs(event.part) {
                    cluster.start(event.part)?;
                }
            }
            (Kind::Hang, hung, _) => cluster.set_hung(event.part, hung),
            (Kind::Suspend, asleep, _) => cluster.set_asleep(event.part, asleep),
            (Kind::FailedSync, true, _) => cluster.fail_next_sync(event.part),
            (Kind::FailedSync, false, _) => {
                cluster.lose_power(event.part);
                cluster.start(event.part)?;
            }
            // The datanode learns of it from its trace.
            (Kind::Busy, busy, Some(server)) => cluster.conditions[server].busy = busy,
            (Kind::FullDisk, full, Some(server)) => cluster.set_full(server, full)?,
            (Kind::Partition, cut, _) => cluster.set_cut(event.part, cut),
            (Kind::Loss, begins, _) => cluster.set_loss(event.part, amount(begins)),
            (Kind::Delay, begins, _) => cluster.set_delay(event.part, amount(begins)),
            (Kind::SlowDisk, begins, Some(server)) => cluster.set_slow(server, amount(begins)),
            (Kind::BitRot, _, Some(server)) => {
                let mut rng = random::stream(event.seed, "rot");
                let contents = cluster.contents(server)?;
                let all: Vec<u64> = contents.into_keys().collect();
                for block in random::sample(&mut rng, &all, event.amount as usize) {
                    let flipped = rot::flip_bit(&cluster.volume(server), block, &mut rng)
                        .map_err(LiveError::io(format!("flip a bit of block {block:016x}")))?;
                    if let Some(flipped) = flipped {
                        let now_ms = watch.now_ms();
                        watch.ledger.rotten(now_ms, server, block);
                        watch.note(&format!("a bit of block {block:016x} flipped"));
                        watch.flipped.push(flipped);
                    }
                }
            }
            (Kind::Rollback, true, _) => self.copy_namenode(COPY, go_on).await?,
            (Kind::Rollback, false, _) => self.put_copy_back(go_on).await?,
            (Kind::Double, true, _) => self.start_double(event.seed, go_on).await?,
            (Kind::Double, false, _) => self.end_double(go_on).await?,
            // Not accepted in a scenario.
            (_, _, None) => {}
        }
        Ok(())
    }

    /// Waits until a sync has failed, without which a loss of power would test nothing. None may have failed yet if the
    /// fault began late, or if the part had nothing to write.
    async fn wait_for_failed_sync(
        &mut self,
        part: Part,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), LiveError> {
        let end = Instant::now() + SYNC_DEADLINE;
        while self.cluster.awaits_failed_sync(part) {
            if !go_on() {
                return Err(LiveError::Interrupted);
            }
            if Instant::now() > end {
                let name = self.cluster.name(part);
                self.watch.note(&format!("no sync of {name} had failed"));
                break;
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Empties a disk.
    fn empty(&mut self, server: usize) -> Result<(), LiveError> {
        let Self { cluster, watch, .. } = self;
        // A last look, so that everything that is removed is in the ledger.
        let now_ms = watch.now_ms();
        watch
            .ledger
            .observe(now_ms, server, cluster.contents(server)?);
        cluster.wipe(server)?;
        watch.ledger.wiped(now_ms, server);
        Ok(())
    }

    /// Makes a cleared disk a volume again.
    fn use_again(&mut self, server: usize) -> Result<(), LiveError> {
        self.cluster.conditions[server].cleared = false;
        if self.cluster.has_volume(server) {
            // Another fault has restarted the datanode.
            return Ok(());
        }
        self.cluster.kill(Part::Server(server));
        // Removes what was written before the datanode noticed.
        self.empty(server)?;
        self.cluster.start(Part::Server(server))
    }

    /// Ends all faults, and starts the parts that are not running if `start`.
    pub fn heal(&mut self, start: bool) -> Result<(), LiveError> {
        self.astray = None;
        self.cluster.end_double();
        let Self { cluster, watch, .. } = self;
        watch.note("everything is healed");
        watch.all_end();
        let servers = (0..cluster.conditions.len()).map(Part::Server);
        let mounts = (0..cluster.mounts.len()).map(Part::Mount);
        let namenodes = (0..cluster.namenodes.len()).map(Part::Namenode);
        for part in namenodes.chain(servers).chain(mounts) {
            cluster.set_asleep(part, false);
            cluster.set_cut(part, false);
            cluster.set_loss(part, 0);
            cluster.set_delay(part, 0);
            if let Part::Server(server) = part {
                cluster.set_slow(server, 0);
                if cluster.conditions[server].full {
                    cluster.set_full(server, false)?;
                }
                cluster.conditions[server].busy = false;
            }
            if start && !cluster.runs(part) {
                cluster.start(part)?;
            }
        }
        for server in 0..self.cluster.conditions.len() {
            if start && self.cluster.conditions[server].cleared {
                self.use_again(server)?;
            }
        }
        Ok(())
    }
}
