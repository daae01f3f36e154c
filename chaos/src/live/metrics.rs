//! The metrics of the harness for Prometheus.

use std::time::Duration;

use harvestfs_telemetry::metrics::{
    CHAOS_BLOCKS, CHAOS_BROKEN_PROMISES_TOTAL, CHAOS_FAILURES_TOTAL, CHAOS_FAULTS_TOTAL,
    CHAOS_OPERATION_SECONDS, CHAOS_PRIMARY_SLOWDOWN_RATIO, CHAOS_ROTTEN_REPLICAS, CHAOS_SERVERS,
    CHAOS_UNAVAILABLE_BLOCKS, Gauge, Histogram, Part, Registry, WholeCounter,
};
use serde::{Deserialize, Serialize};

use super::cluster::Condition;
use super::scenario::Kind;
use super::verify::Comparison;

/// An operation of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operation {
    Read,
    Write,
    Rename,
    Unlink,
}

impl Operation {
    const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Rename, Self::Unlink];

    /// Its name in labels and in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Rename => "rename",
            Self::Unlink => "unlink",
        }
    }
}

/// The label of a condition, and whether it holds for a server.
type ConditionLabel = (&'static str, fn(&Condition) -> bool);

const CONDITIONS: [ConditionLabel; 5] = [
    ("down", |it| it.down),
    ("hung", |it| it.hung),
    ("busy", |it| it.busy),
    ("cut", |it| it.cut),
    ("full", |it| it.full),
];

/// The metrics of the harness, over all runs.
pub struct Metrics {
    registry: Registry,
    seconds: [Histogram; Operation::ALL.len()],
    failures: [WholeCounter; Operation::ALL.len()],
    servers: [Gauge; CONDITIONS.len()],
    blocks: Gauge,
    unavailable: Gauge,
    rotten: Gauge,
    slowdown: Gauge,
    lost: WholeCounter,
    wrong: WholeCounter,
    unexpected: WholeCounter,
}

impl Default for Metrics {
    /// Creates metrics before the first measurement.
    fn default() -> Self {
        let registry = Registry::new(Part::Chaos, env!("CARGO_PKG_VERSION"));
        for kind in Kind::ALL {
            registry.counter(&CHAOS_FAULTS_TOTAL, &[kind.name()]);
        }
        let broken = |kind| registry.counter(&CHAOS_BROKEN_PROMISES_TOTAL, &[kind]);
        let metrics = Self {
            seconds: Operation::ALL
                .map(|it| registry.latency(&CHAOS_OPERATION_SECONDS, &[it.name()])),
            failures: Operation::ALL
                .map(|it| registry.counter(&CHAOS_FAILURES_TOTAL, &[it.name()])),
            servers: CONDITIONS.map(|(name, _)| registry.gauge(&CHAOS_SERVERS, &[name])),
            blocks: registry.gauge(&CHAOS_BLOCKS, &[]),
            unavailable: registry.gauge(&CHAOS_UNAVAILABLE_BLOCKS, &[]),
            rotten: registry.gauge(&CHAOS_ROTTEN_REPLICAS, &[]),
            slowdown: registry.gauge(&CHAOS_PRIMARY_SLOWDOWN_RATIO, &[]),
            lost: broken("lost"),
            wrong: broken("wrong"),
            unexpected: broken("unexpected"),
            registry,
        };
        metrics.run_begins();
        metrics
    }
}

impl Metrics {
    /// Resets the gauges, whose values were those of the previous run.
    pub(crate) fn run_begins(&self) {
        self.saw_servers(&[]);
        self.saw_blocks(0, 0);
        self.saw_rot(0);
        self.saw_slowdown(None);
    }

    /// Renders all metrics in the text format of Prometheus.
    #[must_use]
    pub fn render(&self) -> String {
        self.registry.render()
    }

    pub(crate) fn done(&self, operation: Operation, took: Duration) {
        self.seconds[operation as usize].observe(took.as_secs_f64());
    }

    pub(crate) fn failed(&self, operation: Operation) {
        self.failures[operation as usize].inc();
    }

    pub(crate) fn inflicted(&self, kind: Kind) {
        self.registry
            .counter(&CHAOS_FAULTS_TOTAL, &[kind.name()])
            .inc();
    }

    pub(crate) fn saw_servers(&self, conditions: &[Condition]) {
        for (gauge, (_, holds)) in self.servers.iter().zip(CONDITIONS) {
            gauge.set(conditions.iter().filter(|it| holds(it)).count() as f64);
        }
    }

    pub(crate) fn saw_blocks(&self, blocks: usize, unavailable: usize) {
        self.blocks.set(blocks as f64);
        self.unavailable.set(unavailable as f64);
    }

    pub(crate) fn saw_rot(&self, replicas: usize) {
        self.rotten.set(replicas as f64);
    }

    pub(crate) fn saw_slowdown(&self, percent: Option<f64>) {
        self.slowdown
            .set(percent.map_or(f64::NAN, |percent| percent / 100.0));
    }

    pub(crate) fn compared(&self, comparison: &Comparison) {
        for (counter, found) in [
            (&self.lost, &comparison.lost),
            (&self.wrong, &comparison.wrong),
            (&self.unexpected, &comparison.unexpected),
        ] {
            counter.inc_by(found.len() as u64);
        }
    }
}
