//! One run: start, faults, healing, comparison.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::task::JoinHandle;

use super::admin::Admin;
use super::cluster::{Cluster, START_DEADLINE};
use super::faults::Scene;
use super::metrics::Metrics;
use super::mounted::{self, Doubt, Order, Programs, Task};
use super::network::Network;
use super::plan::{Late, Part, Plan};
use super::primary::Loads;
use super::probe::Primary;
use super::report::{End, Report, RunReport};
use super::scenario::{Kind, Scenario, Variant};
use super::verify::{Comparison, compare};
use super::watch::Watch;
use super::whole::Healed;
use super::workload::{Access, Accesses, Counters, Outcome, Worker, accesses};
use super::{LiveError, disk};
use crate::simulate::cluster::replay::Given;

/// The options of a run.
pub struct Options<'a> {
    /// The binary whose parts make the cluster.
    pub binary: &'a Path,
    /// Where the clusters' directories are made; they are not removed.
    pub directory: &'a Path,
    /// Set by Ctrl-C: everything is healed and stopped.
    pub interrupted: &'a AtomicBool,
    /// Metrics that are kept up to date during the run.
    pub metrics: &'a Arc<Metrics>,
}

/// The result of a scenario.
pub struct Ran {
    /// The report on the variants that were completed.
    pub report: Report,
    /// The faults that began in the first variant, even if that was not completed.
    pub faults: Vec<Given>,
    /// Why the next variant was not completed.
    pub error: Option<LiveError>,
}

/// The progress of a run.
pub struct Progress<'a> {
    /// The variant that runs.
    pub variant: &'a str,
    /// What it is doing now.
    pub doing: &'a str,
    /// Milliseconds of the scenario that have passed, over all variants.
    pub done_ms: u64,
}

/// How often the loop checks whether something is due.
const TICK: Duration = Duration::from_millis(50);
/// How long clients may take to finish their last operation.
const CLIENTS_STOP_DEADLINE: Duration = Duration::from_secs(180);
/// How long the comparison of what programs on mounts were promised may take.
const COMPARE_DEADLINE: Duration = Duration::from_secs(600);

/// Runs all variants of a scenario, until one cannot be completed. `progress` receives how far it is.
///
/// Must be called on a thread that lives until the call returns, and before the process has other threads
/// that need to reach the cluster: the calling thread may move to network and mount namespaces of its own.
///
/// # Errors
/// When this machine cannot run the scenario.
pub fn run(
    scenario: &Scenario,
    plan: &Plan,
    options: &Options<'_>,
    progress: &mut dyn FnMut(&Progress<'_>),
) -> Result<Ran, LiveError> {
    mounted::check_needs(&scenario.mounts)?;
    // Before any thread is started: threads inherit the namespaces of the thread that starts them.
    let is_root = rustix::process::geteuid().is_root();
    if plan.has(Kind::needs_mounts) || (scenario.mounts.count > 0 && is_root) {
        disk::own_mounts()?;
    }
    let network = if plan.has(Kind::needs_network) {
        let ports = Cluster::ports(scenario);
        Some(Network::new(ports, plan.seed)?)
    } else {
        None
    };
    // Child processes are started by this thread, at whose end the kernel ends them.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(LiveError::io("start the runtime"))?;
    let mut runs = Vec::new();
    let mut faults = None;
    let mut error = None;
    for (number, variant) in scenario.variants.iter().enumerate() {
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
            directory: options.directory.join(format!("run-{}", number + 1)),
        };
        let mut begun = Vec::new();
        let executed = one.execute(options.binary, network.as_ref(), &mut tell, &mut begun);
        let executed = runtime.block_on(executed);
        faults.get_or_insert(begun);
        match executed {
            Ok(run) => runs.push(run),
            Err(failed) => {
                error = Some(failed);
                break;
            }
        }
    }
    // Sessions of clients are closed in the background.
    runtime.shutdown_timeout(Duration::from_secs(5));
    let report = Report {
        scenario: scenario.name.clone(),
        finds: scenario.finds.clone(),
        seed: plan.seed,
        servers: scenario.cluster.servers.len(),
        replication: scenario.cluster.replication,
        duration_ms: scenario.duration_ms,
        plan: plan.describe(scenario).lines().map(str::to_owned).collect(),
        runs,
        error: error.as_ref().map(ToString::to_string),
    };
    Ok(Ran {
        report,
        faults: faults.unwrap_or_default(),
        error,
    })
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

    /// Runs a variant to its end. `begun` receives the faults that began, even if the run fails.
    async fn execute(
        &self,
        binary: &Path,
        network: Option<&Network>,
        tell: &mut dyn FnMut(&str, u64),
        begun: &mut Vec<Given>,
    ) -> Result<RunReport, LiveError> {
        std::fs::create_dir_all(&self.directory)
            .map_err(LiveError::io(format!("make {}", self.directory.display())))?;
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
            // Gives the namenode a history of the primaries for the beginning of the run. It builds its grid when
            // it starts.
            cluster.start_all(&go_on).await?;
            self.import_history(&cluster, &loads)?;
            for server in 0..self.scenario.cluster.servers.len() {
                cluster.kill(Part::Server(server));
            }
            cluster.kill_namenodes();
        }
        cluster.begin_primaries(&loads, self.plan)?;
        cluster.start_all(&go_on).await?;
        let mut admin = Admin::new(&self.directory, &cluster.namenodes)?;
        self.wait_all_alive(&mut admin).await?;
        if !cluster.mounts.is_empty() {
            tell("mounting", 0);
            cluster.mount_all(&go_on).await?;
        }

        let access = Access {
            identity: self.directory.join("client/identity"),
            namenodes: cluster.namenodes.clone(),
            spec: self.scenario.clients.clone(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let counters = Arc::new(Counters::new(Arc::clone(self.metrics)));
        let doubt = Arc::new(Doubt::default());
        let workers: Vec<JoinHandle<Outcome>> = (1..=self.scenario.clients.count)
            .map(|number| {
                let seed = self.plan.seed;
                let worker = Worker::new(access.clone(), number, seed, &counters, &doubt);
                tokio::spawn(worker.run(Arc::clone(&stop)))
            })
            .collect();
        self.start_programs(&mut cluster, binary, &access, &counters)?;
        primary.has_company();
        let mut scene = Scene {
            cluster,
            admin,
            counters,
            watch: Watch::begin(),
            primary,
            doubt,
            astray: None,
        };
        let faults = self.inflict(&mut scene, tell).await;
        let slowdown_percent = scene.primary.slowdown_percent();
        stop.store(true, Ordering::Relaxed);
        scene.cluster.order(Order::Stop);
        // Healing happens after Ctrl-C and after an error as well.
        tell("healing", self.scenario.duration_ms);
        let healed = scene.heal(self.go_on());
        // Before anything below can fail.
        begun.clone_from(&scene.watch.faults);
        faults?;
        healed?;
        let healed_at = Instant::now();
        let healed = scene.wait_whole(self.scenario, &go_on, tell).await?;
        let time_to_whole_ms = healed.is_whole.then(|| {
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
        self.wait_for_programs(&scene.cluster).await?;
        tell("comparing every byte", self.scenario.duration_ms);
        let mut comparison = self.compare(&access, &outcomes).await?;
        comparison.wrong.append(&mut scene.watch.broken);
        let on_mounts = self.compare_programs(&mut scene.cluster).await?;
        // A part that ended during the comparison is reported together with its findings.
        comparison.wrong.extend(scene.cluster.ended_by_itself());
        let mut errors = Vec::new();
        for outcome in on_mounts {
            comparison.add(outcome.comparison);
            errors.extend(outcome.errors);
        }
        self.metrics.compared(&comparison);
        let mut accesses = accesses(&scene.counters, &outcomes);
        for (error, count) in errors {
            *accesses.errors.entry(error).or_default() += count;
        }
        Ok(RunReport {
            slowdown_percent,
            ..self.report(scene.watch, accesses, comparison, healed, time_to_whole_ms)
        })
    }

    /// Starts the programs on mounts.
    fn start_programs(
        &self,
        cluster: &mut Cluster<'_>,
        binary: &Path,
        access: &Access,
        counters: &Arc<Counters>,
    ) -> Result<(), LiveError> {
        if cluster.mounts.is_empty() {
            return Ok(());
        }
        let log = cluster.path("programs.log");
        for &kind in &self.scenario.mounts.programs {
            let mounts = (0..cluster.mounts.len()).map(|mount| cluster.mount_point(mount));
            let task = Task {
                kind,
                spec: self.scenario.mounts.clone(),
                seed: self.plan.seed,
                mounts: mounts.collect(),
                access: access.clone(),
            };
            let programs = Programs::start(binary, &task, &log, counters)?;
            cluster.programs.push(programs);
        }
        Ok(())
    }

    /// Waits until the programs on mounts have ended.
    async fn wait_for_programs(&self, cluster: &Cluster<'_>) -> Result<(), LiveError> {
        let end = Instant::now() + CLIENTS_STOP_DEADLINE;
        for programs in &cluster.programs {
            let ended = || programs.working() == 0;
            self.wait_until(programs, "a system call", end, ended)
                .await?;
        }
        Ok(())
    }

    /// Has the programs on mounts compare what they were promised.
    async fn compare_programs(
        &self,
        cluster: &mut Cluster<'_>,
    ) -> Result<Vec<mounted::Outcome>, LiveError> {
        let mut outcomes = Vec::new();
        for programs in &mut cluster.programs {
            programs.order(Order::Compare);
            let end = Instant::now() + COMPARE_DEADLINE;
            let compared = || programs.has_compared();
            self.wait_until(programs, "the comparison", end, compared)
                .await?;
            outcomes.push(programs.take_outcome());
        }
        Ok(outcomes)
    }

    /// Waits until programs have done something. Fails if they do, or if it takes too long.
    async fn wait_until(
        &self,
        programs: &Programs,
        what: &str,
        end: Instant,
        is_done: impl Fn() -> bool,
    ) -> Result<(), LiveError> {
        while !is_done() {
            self.check_interrupt()?;
            programs.check()?;
            if Instant::now() > end {
                let name = programs.name();
                let message = format!("{what} of the {name} does not end");
                return Err(LiveError::Cluster(message));
            }
            tokio::time::sleep(TICK).await;
        }
        Ok(())
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

    /// How often disks are inspected, which is expensive with hundreds of servers.
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
        let mut late = Late::default();
        let mut next_sample_ms = 0;
        loop {
            self.check_interrupt()?;
            let now_ms = scene.watch.now_ms();
            let is_over = now_ms >= self.scenario.duration_ms;
            while let Some(event) = events.next_if(|event| event.at_ms <= now_ms) {
                if is_over && !late.happens(event) {
                    continue;
                }
                let what = event.describe(self.scenario);
                tell(&what, now_ms);
                scene.watch.note(&what);
                scene.apply(event, &|| self.go_on()).await?;
                if event.begins {
                    self.metrics.inflicted(event.kind);
                }
            }
            if is_over {
                return Ok(());
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
            scene.cluster.note_mounted();
            for programs in &scene.cluster.programs {
                programs.check()?;
            }
            tokio::time::sleep(TICK).await;
        }
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
            comparison.bytes_during += outcome.compared_bytes;
        }
        // This client has written nothing, so an error does not matter.
        let _ = client.close().await;
        // The comparison of an empty model always succeeds, and so proves nothing.
        if outcomes.iter().all(|outcome| outcome.changes == 0) {
            comparison.wrong.push("no client changed anything".into());
        }
        Ok(comparison)
    }

    fn report(
        &self,
        watch: Watch,
        accesses: Accesses,
        comparison: Comparison,
        healed: Healed,
        time_to_whole_ms: Option<u64>,
    ) -> RunReport {
        let lost = watch.ledger.lost(healed.report.as_ref());
        let lost_blocks = healed.report.map(|report| report.lost_blocks);
        let end = End {
            is_whole: healed.is_whole,
            has_settled: healed.has_settled,
            rotten_replicas: watch.rotten_replicas(),
        };
        RunReport {
            variant: self.variant.name.clone(),
            policy: self.variant.policy.to_string(),
            denial: self.variant.denial,
            passed: end.passes(&comparison, self.variant.may_lose),
            blocks: watch.ledger.blocks(),
            lost_blocks,
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
            faults: watch.faults,
            samples: watch.samples,
        }
    }
}
