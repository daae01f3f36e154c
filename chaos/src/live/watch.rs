//! Observes a run in progress.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::LiveError;
use super::admin::Admin;
use super::cluster::{Cluster, Condition};
use super::ledger::Ledger;
use super::plan::{Event, Part};
use super::report::Sample;
use super::rot::Flipped;
use super::scenario::Kind;
use super::workload::Counters;
use crate::simulate::cluster::FaultKind;
use crate::simulate::cluster::replay::Given;

/// The observations of a run.
pub(crate) struct Watch {
    started: Instant,
    /// Which replica was where.
    pub ledger: Ledger,
    /// All samples.
    pub samples: Vec<Sample>,
    /// The log of events.
    pub notes: Vec<String>,
    /// The faults that have begun, for a replay in a simulation.
    pub faults: Vec<Given>,
    /// Those faults that are in progress, as indices of `faults`.
    ongoing: Vec<(Kind, Part, usize)>,
    /// Violations by parts of the cluster.
    pub broken: Vec<String>,
    /// All bits that were flipped.
    pub flipped: Vec<Flipped>,
    /// How many of them were still there at the last sample.
    rotten: usize,
    repairs: Repairs,
}

/// How long a part is taken to be down when power is lost after a failed sync.
const POWER_LOST: Duration = Duration::from_secs(1);

/// Repairs that the namenode counts, across its restarts.
#[derive(Default)]
struct Repairs {
    before: u64,
    last: u64,
}

impl Repairs {
    fn observe(&mut self, done: u64) {
        if done < self.last {
            self.before += self.last;
        }
        self.last = done;
    }

    fn sum(&self) -> u64 {
        self.before + self.last
    }
}

impl Watch {
    /// Begins to observe a run.
    pub fn begin() -> Self {
        Self {
            started: Instant::now(),
            ledger: Ledger::default(),
            samples: Vec::new(),
            notes: Vec::new(),
            faults: Vec::new(),
            ongoing: Vec::new(),
            broken: Vec::new(),
            flipped: Vec::new(),
            rotten: 0,
            repairs: Repairs::default(),
        }
    }

    /// Milliseconds since the run began.
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Logs what happens now.
    pub fn note(&mut self, text: &str) {
        let seconds = self.now_ms() as f64 / 1e3;
        self.notes.push(format!("{seconds:>8.1} s  {text}"));
    }

    /// Records, for a replay in a simulation, what begins or ends now.
    pub fn record(&mut self, event: &Event) {
        let Event {
            kind, part, begins, ..
        } = *event;
        if begins {
            self.ongoing.push((kind, part, self.faults.len()));
            self.begins(kind.simulated(), part, Duration::ZERO);
            return;
        }
        let is_same = |&(other, of, _): &(Kind, Part, usize)| (other, of) == (kind, part);
        if let Some(at) = self.ongoing.iter().position(is_same) {
            let (_, _, number) = self.ongoing.remove(at);
            self.ends(number);
        }
        if kind == Kind::FailedSync {
            self.begins(FaultKind::PowerLoss.name(), part, POWER_LOST);
        }
    }

    fn begins(&mut self, fault: &str, part: Part, lasts: Duration) {
        self.faults.push(Given {
            at_ms: self.now_ms(),
            part: part.simulated(),
            fault: fault.to_owned(),
            for_ms: lasts.as_millis() as u64,
        });
    }

    /// Records that all faults end now.
    pub fn all_end(&mut self) {
        for (_, _, number) in std::mem::take(&mut self.ongoing) {
            self.ends(number);
        }
    }

    fn ends(&mut self, number: usize) {
        let now_ms = self.now_ms();
        let fault = &mut self.faults[number];
        fault.for_ms = now_ms - fault.at_ms;
    }

    /// Repairs that the namenode has counted so far.
    pub fn repairs(&self) -> u64 {
        self.repairs.sum()
    }

    /// Replicas with a flipped bit that no datanode had found by the last sample.
    pub fn rotten_replicas(&self) -> usize {
        self.rotten
    }

    /// Whether all rot was found, and as of the last sample every block that had it has `replication`
    /// replicas again, or none.
    pub fn is_rot_repaired(&self, replication: usize) -> bool {
        let is_whole = |block| {
            let replicas = self.ledger.replicas(block);
            replicas == 0 || replicas >= replication
        };
        self.rotten == 0 && self.flipped.iter().all(|it| is_whole(it.block))
    }

    /// Datanodes that the namenode considered alive at the last sample.
    pub fn alive(&self) -> u64 {
        self.samples.last().map_or(0, |it| it.alive)
    }

    /// Unavailability in block-seconds.
    pub fn unavailable_block_s(&self) -> f64 {
        let pairs = self.samples.windows(2);
        pairs
            .map(|pair| (pair[1].at_ms - pair[0].at_ms) as f64 / 1e3 * pair[0].unavailable as f64)
            .sum()
    }

    /// Takes a sample of everything.
    pub async fn look(
        &mut self,
        cluster: &Cluster<'_>,
        admin: &mut Admin,
        counters: &Counters,
    ) -> Result<(), LiveError> {
        // Before replicas are counted: rot that is found in between must not make its replica count as sound.
        self.rotten = self.flipped.iter().filter(|it| it.is_there()).count();
        for server in 0..cluster.conditions.len() {
            let at_ms = self.now_ms();
            let contents = cluster.contents(server)?;
            self.ledger.observe(at_ms, server, contents);
        }
        let usable = |server: usize| {
            let condition = cluster.conditions[server];
            condition
                == Condition {
                    full: condition.full,
                    ..Condition::default()
                }
        };
        let unavailable = self.ledger.unavailable(&usable);
        let metrics = &counters.metrics;
        metrics.saw_servers(&cluster.conditions);
        metrics.saw_blocks(self.ledger.blocks(), unavailable);
        metrics.saw_rot(self.rotten_replicas());
        let status = admin.status().await;
        if let Some(status) = &status {
            self.repairs.observe(status.repairs_done);
        }
        let last = self.samples.last();
        let last = last.map_or((0, 0), |it| (it.under_replicated, it.lost));
        // After a restart, the namenode does not know yet where blocks are.
        let ready = status.as_ref().filter(|it| it.ready);
        let (under_replicated, lost) =
            ready.map_or(last, |it| (it.under_replicated_blocks, it.lost_blocks));
        self.samples.push(Sample {
            at_ms: self.now_ms(),
            unavailable,
            under_replicated,
            lost,
            namenode_answers: status.is_some(),
            alive: status.as_ref().map_or(0, |it| it.nodes_alive),
            reads: counters.reads.load(Ordering::Relaxed),
            failed_reads: counters.failed_reads.load(Ordering::Relaxed),
            failed_changes: counters.failed_changes.load(Ordering::Relaxed),
            repairs: self.repairs(),
            repaired_bytes: self.ledger.repaired_bytes,
        });
        Ok(())
    }
}
