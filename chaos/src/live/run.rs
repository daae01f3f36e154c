//! One run: start, faults, healing, comparison.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use harvestfs_protocol::admin::FsckReport;
use tokio::task::JoinHandle;

use super::admin::Admin;
use super::cluster::{Cluster, START_DEADLINE};
use super::ledger::Ledger;
use super::metrics::Metrics;
use super::network::Network;
use super::plan::{Event, Part, Plan};
use super::primary::Loads;
use super::probe::{Probe, Reading, slowdown_percent};
use super::report::{Block, Lost, Report, RunReport};
use super::scenario::{Kind, Scenario, Variant};
use super::verify::{Comparison, compare};
use super::watch::Watch;
use super::workload::{Access, Accesses, Counters, Outcome, Worker, accesses};
use super::{LiveError, disk, rot};
use crate::random;

/// How a run is made.
pub struct Options<'a> {
    /// The binary whose parts make the cluster.
    pub binary: &'a Path,
    /// Where the clusters' directories are made; nothing of it is removed.
    pub directory: &'a Path,
    /// Set by Ctrl-C: everything is healed and stopped.
    pub interrupted: &'a AtomicBool,
    /// Kept up to date while it runs.
    pub metrics: &'a Arc<Metrics>,
}

/// How far a run is.
pub struct Progress<'a> {
    /// The variant that runs.
    pub variant: &'a str,
    /// What it does now.
    pub doing: &'a str,
    /// Milliseconds of the scenario that are over, of all variants.
    pub done_ms: u64,
}

/// The primary that is measured computes a tenth of the time, so that it is no load itself.
const PRIMARY_REST: Duration = Duration::from_millis(180);
const PRIMARY_ALONE: Duration = Duration::from_secs(3);
/// How often the loop looks whether something is to be done.
const TICK: Duration = Duration::from_millis(50);
/// How long clients may take to end their last operation.
const CLIENTS_STOP_DEADLINE: Duration = Duration::from_secs(180);
/// A cluster that lost blocks never becomes whole; when all datanodes are back and nothing has changed
/// for so long, it is as whole as it gets.
const LOSS_SETTLED: Duration = Duration::from_secs(20);

/// Runs all variants of a scenario. `progress` gets how far it is.
///
/// Must be called on a thread that lives until it returns, and before the process has other threads
/// that are to reach the cluster: it may move to a network of its own.
///
/// # Errors
/// When the cluster cannot be run, or it is interrupted.
pub fn run(
    scenario: &Scenario,
    plan: &Plan,
    options: &Options<'_>,
    progress: &mut dyn FnMut(&Progress<'_>),
) -> Result<Report, LiveError> {
    // Before any thread: they share the namespaces of the thread that starts them.
    if plan.has(Kind::needs_mounts) {
        disk::own_mounts()?;
    }
    let network = if plan.has(Kind::needs_network) {
        Some(Network::new(scenario.cluster.servers.len(), plan.seed)?)
    } else {
        None
    };
    // Children are started by this thread, which is the one that the kernel watches for them.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(LiveError::io("start the runtime"))?;
    let mut runs = Vec::new();
    for (number, variant) in scenario.variants.iter().enumerate() {
        let directory = options.directory.join(format!("run-{}", number + 1));
        std::fs::create_dir_all(&directory)
            .map_err(LiveError::io(format!("make {}", directory.display())))?;
        let before_ms = scenario.duration_ms * number as u64;
        let mut tell = |doing: &str, done_ms: u64| {
            progress(&Progress {
                variant: &variant.name,
                doing,
                done_ms: before_ms + done_ms.min(scenario.duration_ms),
            });
        };
        let one = Run {
            scenario,
            variant,
            plan,
            interrupted: options.interrupted,
            metrics: options.metrics,
            directory,
        };
        runs.push(runtime.block_on(one.execute(options.binary, network.as_ref(), &mut tell))?);
    }
    // Sessions of clients end in the background.
    runtime.shutdown_timeout(Duration::from_secs(5));
    Ok(Report {
        scenario: scenario.name.clone(),
        seed: plan.seed,
        servers: scenario.cluster.servers.len(),
        replication: scenario.cluster.replication,
        duration_ms: scenario.duration_ms,
        plan: plan.describe(scenario).lines().map(str::to_owned).collect(),
        runs,
    })
}

/// A primary on this machine, and how fast it gets on alone.
struct Primary {
    probe: Probe,
    alone: Option<f64>,
    /// When it was no longer alone.
    since: Reading,
}

impl Primary {
    async fn alone() -> Result<Self, LiveError> {
        let probe = Probe::start(1, PRIMARY_REST)?;
        let began = probe.read();
        tokio::time::sleep(PRIMARY_ALONE).await;
        let since = probe.read();
        let alone = began.rate_until(since);
        Ok(Self {
            probe,
            alone,
            since,
        })
    }

    /// From now on it is slowed down.
    fn has_company(&mut self) {
        self.since = self.probe.read();
    }

    fn slowdown_percent(&self) -> Option<f64> {
        let loaded = self.since.rate_until(self.probe.read())?;
        Some(slowdown_percent(self.alone?, loaded))
    }
}

/// What takes part in a run from the start of its clients on.
struct Scene<'a> {
    cluster: Cluster<'a>,
    admin: Admin,
    counters: Arc<Counters>,
    watch: Watch,
    primary: Primary,
}

impl Scene<'_> {
    /// Looks at disks, namenode and clients once more.
    async fn look(&mut self) -> Result<(), LiveError> {
        let cluster = &self.cluster;
        let counters = &self.counters;
        self.watch.look(cluster, &mut self.admin, counters).await
    }
}

struct Run<'a> {
    scenario: &'a Scenario,
    variant: &'a Variant,
    plan: &'a Plan,
    interrupted: &'a AtomicBool,
    metrics: &'a Arc<Metrics>,
    directory: PathBuf,
}

impl Run<'_> {
    fn go_on(&self) -> bool {
        !self.interrupted.load(Ordering::Relaxed)
    }

    fn check_interrupt(&self) -> Result<(), LiveError> {
        if self.go_on() {
            Ok(())
        } else {
            Err(LiveError::Interrupted)
        }
    }

    async fn execute(
        &self,
        binary: &Path,
        network: Option<&Network>,
        tell: &mut dyn FnMut(&str, u64),
    ) -> Result<RunReport, LiveError> {
        self.metrics.run_begins();
        tell("measuring a primary alone", 0);
        let mut primary = Primary::alone().await?;
        tell("making the cluster", 0);
        let loads = Loads::new(self.scenario, self.plan.seed);
        let mut cluster = Cluster::make(
            self.scenario,
            self.variant,
            binary,
            &self.directory,
            network,
            self.plan,
        )?;
        let go_on = || self.go_on();
        tell("starting the cluster", 0);
        if loads.any() {
            // What the namenode knows of the primaries when the run begins. It builds its grid when
            // it starts.
            cluster.start_all(&go_on).await?;
            self.import_history(&cluster, &loads)?;
            for server in 0..self.scenario.cluster.servers.len() {
                cluster.kill(Part::Server(server));
            }
            cluster.kill(Part::Namenode);
        }
        cluster.begin_primaries(&loads, self.plan)?;
        cluster.start_all(&go_on).await?;
        let mut admin = Admin::new(&self.directory, cluster.namenode)?;
        self.wait_all_alive(&mut admin).await?;

        let access = Access {
            identity: self.directory.join("client/identity"),
            namenode: cluster.namenode,
            spec: self.scenario.clients.clone(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let counters = Arc::new(Counters::new(Arc::clone(self.metrics)));
        let workers: Vec<JoinHandle<Outcome>> = (1..=self.scenario.clients.count)
            .map(|number| {
                let counters = Arc::clone(&counters);
                let worker = Worker::new(access.clone(), number, self.plan.seed, counters);
                tokio::spawn(worker.run(Arc::clone(&stop)))
            })
            .collect();
        primary.has_company();
        let mut scene = Scene {
            cluster,
            admin,
            counters,
            watch: Watch::begin(),
            primary,
        };
        let faults = self.inflict(&mut scene, tell).await;
        let slowdown_percent = scene.primary.slowdown_percent();
        stop.store(true, Ordering::Relaxed);
        // Also after Ctrl-C, and after an error.
        tell("healing", self.scenario.duration_ms);
        let healed = self.heal(&mut scene);
        faults?;
        healed?;
        let healed_at = Instant::now();
        let report = self.wait_whole(&mut scene, tell).await?;
        let whole = self.is_whole(report.as_ref(), &scene.watch);
        let time_to_whole_ms = whole.then(|| {
            let took = healed_at.elapsed().as_millis();
            u64::try_from(took).unwrap_or(u64::MAX)
        });
        tell("waiting for the clients", self.scenario.duration_ms);
        let mut outcomes = Vec::new();
        let end = tokio::time::Instant::now() + CLIENTS_STOP_DEADLINE;
        for worker in workers {
            let outcome = tokio::time::timeout_at(end, worker).await;
            let hangs = |_| LiveError::Cluster("a client's operation does not end".into());
            let failed = |error| LiveError::Cluster(format!("a client failed: {error}"));
            outcomes.push(outcome.map_err(hangs)?.map_err(failed)?);
            self.check_interrupt()?;
        }
        tell("comparing every byte", self.scenario.duration_ms);
        let comparison = self.compare(&access, &outcomes).await?;
        self.metrics.compared(&comparison);
        let lost = self.lost(report.as_ref(), &scene.watch.ledger);
        let accesses = accesses(&scene.counters, &outcomes);
        Ok(RunReport {
            slowdown_percent,
            ..self.report(
                scene.watch,
                accesses,
                comparison,
                lost,
                report,
                time_to_whole_ms,
            )
        })
    }

    fn import_history(&self, cluster: &Cluster<'_>, loads: &Loads) -> Result<(), LiveError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let path = cluster.path("history.csv");
        std::fs::write(
            &path,
            loads.history(self.scenario, now.unwrap_or_default().as_secs()),
        )
        .map_err(LiveError::io(format!("write {}", path.display())))?;
        cluster.run(&["admin", "history", "import", &path.to_string_lossy()])?;
        Ok(())
    }

    async fn wait_all_alive(&self, admin: &mut Admin) -> Result<(), LiveError> {
        let end = Instant::now() + START_DEADLINE;
        let wanted = self.scenario.cluster.servers.len() as u64;
        while Instant::now() < end {
            self.check_interrupt()?;
            if let Some(status) = admin.status().await
                && status.ready
                && status.nodes_alive == wanted
            {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let seconds = START_DEADLINE.as_secs();
        let message = format!("not all of {wanted} datanodes registered within {seconds} s");
        Err(LiveError::Cluster(message))
    }

    /// How often disks are looked at: with hundreds of servers that is work.
    fn sample_interval_ms(&self) -> u64 {
        if self.scenario.cluster.servers.len() <= 20 {
            1_000
        } else {
            5_000
        }
    }

    async fn inflict(
        &self,
        scene: &mut Scene<'_>,
        tell: &mut dyn FnMut(&str, u64),
    ) -> Result<(), LiveError> {
        let mut events = self.plan.events.iter().peekable();
        let mut next_sample_ms = 0;
        loop {
            self.check_interrupt()?;
            let now_ms = scene.watch.now_ms();
            if now_ms >= self.scenario.duration_ms {
                return Ok(());
            }
            while let Some(event) = events.next_if(|event| event.at_ms <= now_ms) {
                let what = event.describe(self.scenario);
                tell(&what, now_ms);
                scene.watch.note(&what);
                self.apply(event, scene)?;
                if event.begins {
                    self.metrics.inflicted(event.kind);
                }
            }
            if now_ms >= next_sample_ms {
                next_sample_ms = now_ms + self.sample_interval_ms();
                scene.look().await?;
                let slowdown_percent = scene.primary.slowdown_percent();
                self.metrics.saw_slowdown(slowdown_percent);
                tell("", now_ms);
            }
            if let Some(ended) = scene.cluster.ended_by_itself() {
                return Err(LiveError::Cluster(ended));
            }
            tokio::time::sleep(TICK).await;
        }
    }

    fn apply(&self, event: &Event, scene: &mut Scene<'_>) -> Result<(), LiveError> {
        let Scene { cluster, watch, .. } = scene;
        let server = match event.part {
            Part::Server(server) => Some(server),
            Part::Namenode => None,
        };
        let amount = |begins: bool| if begins { event.amount } else { 0 };
        match (event.kind, event.begins, server) {
            (Kind::Reimage, true, Some(server)) => {
                cluster.kill(event.part);
                // The last look, so that everything that goes is in the ledger.
                let now_ms = watch.now_ms();
                watch
                    .ledger
                    .observe(now_ms, server, cluster.contents(server)?);
                cluster.wipe(server)?;
                watch.ledger.wiped(now_ms, server);
            }
            (Kind::Kill, true, _) => cluster.kill(event.part),
            (Kind::Reimage | Kind::Kill, false, _) => {
                if !cluster.runs(event.part) {
                    cluster.start(event.part)?;
                }
            }
            (Kind::Hang, hung, _) => cluster.set_hung(event.part, hung),
            // The datanode sees it in its trace.
            (Kind::Busy, busy, Some(server)) => cluster.conditions[server].busy = busy,
            (Kind::FullDisk, full, Some(server)) => cluster.set_full(server, full)?,
            (Kind::Partition, cut, Some(server)) => cluster.set_cut(server, cut),
            (Kind::Loss, begins, Some(server)) => cluster.set_loss(server, amount(begins)),
            (Kind::Delay, begins, Some(server)) => cluster.set_delay(server, amount(begins)),
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
            // Not accepted in a scenario.
            (_, _, None) => {}
        }
        Ok(())
    }

    fn heal(&self, scene: &mut Scene<'_>) -> Result<(), LiveError> {
        let Scene { cluster, watch, .. } = scene;
        watch.note("everything is healed");
        let servers = (0..self.scenario.cluster.servers.len()).map(Part::Server);
        for part in std::iter::once(Part::Namenode).chain(servers) {
            cluster.set_hung(part, false);
            if let Part::Server(server) = part {
                cluster.set_cut(server, false);
                cluster.set_loss(server, 0);
                cluster.set_delay(server, 0);
                cluster.set_slow(server, 0);
                if cluster.conditions[server].full {
                    cluster.set_full(server, false)?;
                }
                cluster.conditions[server].busy = false;
            }
            if self.go_on() && !cluster.runs(part) {
                cluster.start(part)?;
            }
        }
        Ok(())
    }

    async fn wait_whole(
        &self,
        scene: &mut Scene<'_>,
        tell: &mut dyn FnMut(&str, u64),
    ) -> Result<Option<FsckReport>, LiveError> {
        let servers = self.scenario.cluster.servers.len() as u64;
        let end = Instant::now() + Duration::from_millis(self.scenario.heal_ms);
        let mut last: Option<FsckReport> = None;
        let mut changed_at = Instant::now();
        loop {
            self.check_interrupt()?;
            if let Some(ended) = scene.cluster.ended_by_itself() {
                return Err(LiveError::Cluster(ended));
            }
            scene.look().await?;
            if let Some(report) = scene.admin.fsck().await {
                tell(
                    &format!(
                        "healing: {} replicas missing, {} rotten, {} blocks lost",
                        report.missing_replicas,
                        scene.watch.rotten_replicas(),
                        report.lost_blocks
                    ),
                    self.scenario.duration_ms,
                );
                let same = last.as_ref().is_some_and(|last| {
                    last.missing_replicas == report.missing_replicas
                        && last.lost_blocks == report.lost_blocks
                });
                if !same || scene.watch.alive() < servers {
                    changed_at = Instant::now();
                }
                let settled = report.lost_blocks > 0 && changed_at.elapsed() > LOSS_SETTLED;
                let done = settled || self.is_whole(Some(&report), &scene.watch);
                last = Some(report);
                if done {
                    break;
                }
            }
            if Instant::now() > end {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        Ok(last)
    }

    /// Whether nothing is missing, and no replica is rotten that looks as if it were not.
    fn is_whole(&self, report: Option<&FsckReport>, watch: &Watch) -> bool {
        let replication = usize::from(self.scenario.cluster.replication);
        report.is_some_and(|report| report.healthy) && watch.is_rot_repaired(replication)
    }

    async fn compare(
        &self,
        access: &Access,
        outcomes: &[Outcome],
    ) -> Result<Comparison, LiveError> {
        let client = access.connect().await.map_err(LiveError::Cluster)?;
        let mut comparison = Comparison::default();
        for (number, outcome) in (1..).zip(outcomes) {
            self.check_interrupt()?;
            compare(&client, number, &outcome.model, &mut comparison).await;
            comparison.wrong.extend(outcome.wrong.iter().cloned());
        }
        // Nothing was written.
        let _ = client.close().await;
        Ok(comparison)
    }

    /// Why each lost block was lost.
    fn lost(&self, report: Option<&FsckReport>, ledger: &Ledger) -> Vec<Lost> {
        let findings = report.map_or(&[][..], |report| &report.findings);
        let mut lost: Vec<Lost> = Vec::new();
        for finding in findings {
            let Some(block) = finding.block else {
                continue;
            };
            let known = lost.iter().any(|it| it.block == Block(block.0));
            let here = (0..self.scenario.cluster.servers.len())
                .any(|server| ledger.on(server).contains(&block.0));
            if known || here {
                continue;
            }
            lost.push(Lost {
                block: Block(block.0),
                path: finding.path.clone(),
                finding: finding.message.clone(),
                replicas: ledger.history(block.0).to_vec(),
            });
        }
        lost
    }

    fn report(
        &self,
        watch: Watch,
        accesses: Accesses,
        comparison: Comparison,
        lost: Vec<Lost>,
        fsck: Option<FsckReport>,
        time_to_whole_ms: Option<u64>,
    ) -> RunReport {
        let as_promised = comparison.intact() && time_to_whole_ms.is_some();
        RunReport {
            variant: self.variant.name.clone(),
            policy: self.variant.policy.to_string(),
            denial: self.variant.denial,
            passed: as_promised || (self.variant.may_lose && comparison.wrong.is_empty()),
            blocks: watch.ledger.blocks(),
            lost_blocks: fsck.map(|report| report.lost_blocks),
            lost,
            unavailable_block_s: watch.unavailable_block_s(),
            repairs: watch.repairs(),
            slowdown_percent: None,
            repaired_replicas_seen: watch.ledger.repaired_replicas,
            repaired_bytes: watch.ledger.repaired_bytes,
            rotten_replicas: watch.rotten_replicas(),
            time_to_whole_ms,
            accesses,
            comparison,
            events: watch.notes,
            samples: watch.samples,
        }
    }
}
