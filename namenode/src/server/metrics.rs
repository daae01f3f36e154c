//! What a namenode reports to Prometheus.

use std::sync::Arc;
use std::time::Instant;

use harvestfs_protocol::classes::Classes;
use harvestfs_protocol::history::TenantPattern;
use harvestfs_protocol::meta::{Housekeeping, MetaOp, Mutation, Query};
use harvestfs_protocol::node::NodeRequest;
use harvestfs_protocol::placement::BalanceOutcome;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::rpc::{Request, Response};
use harvestfs_protocol::transport;
use harvestfs_telemetry::metrics::{
    Gauge, Histogram, NAMENODE_BALANCE_MOVES_TOTAL, NAMENODE_BEHIND_RECORDS, NAMENODE_BLOCKS,
    NAMENODE_CELL_CAPACITY_BYTES, NAMENODE_CELL_FREE_BYTES, NAMENODE_CELL_SERVERS,
    NAMENODE_CLASS_CPU_RATIO, NAMENODE_CLASS_HEADROOM_RATIO, NAMENODE_CLASS_SERVERS,
    NAMENODE_CLASSES, NAMENODE_CLUSTER_VERSION, NAMENODE_CURTAILED_BLOCKS, NAMENODE_DATANODES,
    NAMENODE_DIVERSITY_BLOCKS, NAMENODE_ENGINE_BYTES, NAMENODE_HARVEST_OFFERED_BYTES,
    NAMENODE_HARVEST_OFFERED_CORES, NAMENODE_HARVEST_SCHEDULERS, NAMENODE_HARVESTED_BYTES,
    NAMENODE_HARVESTED_CONTAINERS, NAMENODE_HARVESTED_CORES, NAMENODE_HARVESTED_JOBS,
    NAMENODE_INODES, NAMENODE_JOURNAL_BYTES_TOTAL, NAMENODE_JOURNAL_RECORD,
    NAMENODE_JOURNAL_SECONDS, NAMENODE_KNOWS_LEADER, NAMENODE_LEADS, NAMENODE_LOST_BLOCKS,
    NAMENODE_MEMBER, NAMENODE_MISPLACED_BLOCKS, NAMENODE_MISSING_REPLICAS_BLOCKS,
    NAMENODE_NEWEST_VERSION, NAMENODE_OPERATION_SECONDS, NAMENODE_QUARANTINED_BLOCKS,
    NAMENODE_QUARANTINED_BYTES, NAMENODE_QUOTA_BYTES, NAMENODE_READY, NAMENODE_RECOVERING,
    NAMENODE_REFUSALS_TOTAL, NAMENODE_REFUSED_DATANODES, NAMENODE_REIMAGES_TOTAL,
    NAMENODE_REPAIR_HELD_SECONDS, NAMENODE_REPAIR_OLDEST_SECONDS, NAMENODE_REPAIRS_TOTAL,
    NAMENODE_REPAIRS_UNDER_WAY, NAMENODE_REPAIRS_WAITING, NAMENODE_SERVER_USE_RATIO,
    NAMENODE_SESSIONS, NAMENODE_TERM, NAMENODE_TOO_FULL_VOLUMES, NAMENODE_USED_BYTES,
    NAMENODE_WRITABLE_BYTES, NAMENODE_WRITE_REPLICAS, Part, Registry, WholeCounter, raise_to,
};
use parking_lot::Mutex;

use super::classes::of_pattern;
use super::harvest::HarvestTotals;
use super::overview::{GroupPart, Overview};

/// The names of requests that are not metadata operations.
const OTHERS: [&str; 9] = [
    "open_session",
    "close_session",
    "keep_alive",
    "ack_invalidation",
    "register",
    "heartbeat",
    "block_report",
    "admin",
    "peer",
];

/// The names of all kinds of requests, in the order of [`index_of`].
fn names() -> impl Iterator<Item = &'static str> {
    let meta = [Query::NAMES, Mutation::NAMES, Housekeeping::NAMES];
    OTHERS
        .into_iter()
        .chain(meta.into_iter().flatten().copied())
}

fn index_of(request: &Request) -> usize {
    const QUERIES: usize = OTHERS.len();
    const MUTATIONS: usize = QUERIES + Query::NAMES.len();
    const HOUSEKEEPING: usize = MUTATIONS + Mutation::NAMES.len();
    match request {
        Request::OpenSession(_) => 0,
        Request::CloseSession => 1,
        Request::KeepAlive => 2,
        Request::AckInvalidation { .. } => 3,
        Request::Node(NodeRequest::Register(_)) => 4,
        Request::Node(NodeRequest::Heartbeat(_)) => 5,
        Request::Node(
            NodeRequest::BlockReport(_) | NodeRequest::IncrementalReport(_) | NodeRequest::Stopping,
        ) => 6,
        Request::Admin(_) => 7,
        Request::Peer(_) => 8,
        Request::Meta(call) => match &call.op {
            MetaOp::Query(query) => QUERIES + query.index(),
            MetaOp::Mutation(call) => MUTATIONS + call.mutation.index(),
            MetaOp::Housekeeping(operation) => HOUSEKEEPING + operation.index(),
        },
    }
}

/// The metrics of requests by kind, resolved once.
pub(crate) struct RequestMetrics(Vec<Arc<Measured>>);

/// The metrics of one kind of request.
struct Measured {
    operation: &'static str,
    seconds: Histogram,
    refusals: WholeCounter,
}

impl RequestMetrics {
    fn new(registry: &Registry) -> Self {
        let handles = names().map(|name| {
            Arc::new(Measured {
                operation: name,
                seconds: registry.latency(&NAMENODE_OPERATION_SECONDS, &[name]),
                refusals: registry.counter(&NAMENODE_REFUSALS_TOTAL, &[name]),
            })
        });
        Self(handles.collect())
    }
}

/// Answers one request and measures how long that took. Dropping it notifies the client that no answer will come, and
/// measures nothing.
pub(crate) struct Responder {
    inner: transport::Responder<Response>,
    measured: Arc<Measured>,
    came: Instant,
}

impl Responder {
    /// Wraps the responder of a request that has just arrived.
    pub(crate) fn new(
        request: &Request,
        inner: transport::Responder<Response>,
        metrics: &RequestMetrics,
    ) -> Self {
        Self {
            inner,
            measured: Arc::clone(&metrics.0[index_of(request)]),
            came: Instant::now(),
        }
    }

    /// Queues the answer; never waits.
    pub(crate) fn send(self, response: &Response) {
        let request = self.inner.request_id();
        let measured = self.measured;
        let operation = measured.operation;
        self.inner.send(response);
        let took = self.came.elapsed();
        measured.seconds.observe(took.as_secs_f64());
        if let Err(error) = response {
            measured.refusals.inc();
            request.during(|| tracing::debug!(operation, %error, ?took, "refused"));
        } else if request.is_some() {
            // Calls without a request id, heartbeats above all, would fill the log.
            request.during(|| tracing::debug!(operation, ?took, "answered"));
        }
    }

    /// The ID of the operation that the request is part of.
    pub(crate) fn request_id(&self) -> RequestId {
        self.inner.request_id()
    }
}

/// Everything that a namenode measures.
pub(crate) struct Metrics {
    registry: Registry,
    /// Used by connections.
    pub requests: Arc<RequestMetrics>,
    /// Used by the journal.
    pub journal: Histogram,
    gauges: Gauges,
    /// Held while all metrics are written as text, so that a text never mixes the values of two moments.
    writing: Mutex<()>,
}

/// The sampled values, in the order of the table.
struct Gauges {
    journal_bytes: WholeCounter,
    journal_record: Gauge,
    leads: Gauge,
    knows_leader: Gauge,
    term: Gauge,
    cluster_version: Gauge,
    newest_version: Gauge,
    behind: Gauge,
    ready: Gauge,
    recovering: Gauge,
    refused_nodes: Gauge,
    quarantined_blocks: Gauge,
    quarantined_bytes: Gauge,
    held: Gauge,
    files: Gauge,
    directories: Gauge,
    others: Gauge,
    sessions: Gauge,
    blocks: Gauge,
    missing: [Gauge; 4],
    lost: Gauge,
    curtailed: Gauge,
    write_replicas: [Gauge; 4],
    writable: Gauge,
    misplaced: Gauge,
    diversity: [Gauge; 6],
    repairs_waiting: Gauge,
    moves_waiting: Gauge,
    under_way: Gauge,
    oldest: Gauge,
    repaired: WholeCounter,
    moved: WholeCounter,
    failed: WholeCounter,
    reimages: WholeCounter,
    free_nodes: Gauge,
    busy_nodes: Gauge,
    dead_nodes: Gauge,
    nodes_in_maintenance: Gauge,
    quota: Gauge,
    used: Gauge,
    fullest: Gauge,
    emptiest: Gauge,
    balance_moves: WholeCounter,
    too_full: [Gauge; BalanceOutcome::ALL.len()],
    engine: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let registry = Registry::new(Part::Namenode, env!("CARGO_PKG_VERSION"));
        let gauge = |metric| registry.gauge(metric, &[]);
        let inodes = |kind| registry.gauge(&NAMENODE_INODES, &[kind]);
        let datanodes = |state| registry.gauge(&NAMENODE_DATANODES, &[state]);
        let repairs = |result| registry.counter(&NAMENODE_REPAIRS_TOTAL, &[result]);
        let waiting = |reason| registry.gauge(&NAMENODE_REPAIRS_WAITING, &[reason]);
        let gauges = Gauges {
            journal_bytes: registry.counter(&NAMENODE_JOURNAL_BYTES_TOTAL, &[]),
            journal_record: gauge(&NAMENODE_JOURNAL_RECORD),
            leads: gauge(&NAMENODE_LEADS),
            knows_leader: gauge(&NAMENODE_KNOWS_LEADER),
            term: gauge(&NAMENODE_TERM),
            cluster_version: gauge(&NAMENODE_CLUSTER_VERSION),
            newest_version: gauge(&NAMENODE_NEWEST_VERSION),
            behind: gauge(&NAMENODE_BEHIND_RECORDS),
            ready: gauge(&NAMENODE_READY),
            recovering: gauge(&NAMENODE_RECOVERING),
            refused_nodes: gauge(&NAMENODE_REFUSED_DATANODES),
            quarantined_blocks: gauge(&NAMENODE_QUARANTINED_BLOCKS),
            quarantined_bytes: gauge(&NAMENODE_QUARANTINED_BYTES),
            held: gauge(&NAMENODE_REPAIR_HELD_SECONDS),
            files: inodes("file"),
            directories: inodes("directory"),
            others: inodes("other"),
            sessions: gauge(&NAMENODE_SESSIONS),
            blocks: gauge(&NAMENODE_BLOCKS),
            missing: ["0", "1", "2", "more"]
                .map(|left| registry.gauge(&NAMENODE_MISSING_REPLICAS_BLOCKS, &[left])),
            lost: gauge(&NAMENODE_LOST_BLOCKS),
            curtailed: gauge(&NAMENODE_CURTAILED_BLOCKS),
            write_replicas: ["wanted", "possible", "at_once", "needed"]
                .map(|number| registry.gauge(&NAMENODE_WRITE_REPLICAS, &[number])),
            writable: gauge(&NAMENODE_WRITABLE_BYTES),
            misplaced: gauge(&NAMENODE_MISPLACED_BLOCKS),
            diversity: ["0", "1", "2", "3", "4", "5"]
                .map(|score| registry.gauge(&NAMENODE_DIVERSITY_BLOCKS, &[score])),
            repairs_waiting: waiting("missing"),
            moves_waiting: waiting("misplaced"),
            under_way: gauge(&NAMENODE_REPAIRS_UNDER_WAY),
            oldest: gauge(&NAMENODE_REPAIR_OLDEST_SECONDS),
            repaired: repairs("repaired"),
            moved: repairs("moved"),
            failed: repairs("failed"),
            reimages: registry.counter(&NAMENODE_REIMAGES_TOTAL, &[]),
            free_nodes: datanodes("free"),
            busy_nodes: datanodes("busy"),
            dead_nodes: datanodes("dead"),
            nodes_in_maintenance: datanodes("maintenance"),
            quota: gauge(&NAMENODE_QUOTA_BYTES),
            used: gauge(&NAMENODE_USED_BYTES),
            fullest: registry.gauge(&NAMENODE_SERVER_USE_RATIO, &["fullest"]),
            emptiest: registry.gauge(&NAMENODE_SERVER_USE_RATIO, &["emptiest"]),
            balance_moves: registry.counter(&NAMENODE_BALANCE_MOVES_TOTAL, &[]),
            too_full: BalanceOutcome::ALL
                .map(|outcome| registry.gauge(&NAMENODE_TOO_FULL_VOLUMES, &[outcome.name()])),
            engine: gauge(&NAMENODE_ENGINE_BYTES),
        };
        Self {
            requests: Arc::new(RequestMetrics::new(&registry)),
            journal: registry.latency(&NAMENODE_JOURNAL_SECONDS, &[]),
            gauges,
            registry,
            writing: Mutex::default(),
        }
    }

    /// Returns all metrics as text, with the current state of the engine.
    pub(crate) fn text(&self, now: &Overview, classes: &Classes) -> String {
        let _one_at_a_time = self.writing.lock();
        let Gauges {
            journal_bytes,
            journal_record,
            leads,
            knows_leader,
            term,
            cluster_version,
            newest_version,
            behind,
            ready,
            recovering,
            refused_nodes,
            quarantined_blocks,
            quarantined_bytes,
            held,
            files,
            directories,
            others,
            sessions,
            blocks,
            missing,
            lost,
            curtailed,
            write_replicas,
            writable,
            misplaced,
            diversity,
            repairs_waiting,
            moves_waiting,
            under_way,
            oldest,
            repaired,
            moved,
            failed,
            reimages,
            free_nodes,
            busy_nodes,
            dead_nodes,
            nodes_in_maintenance,
            quota,
            used,
            fullest,
            emptiest,
            balance_moves,
            too_full,
            engine,
        } = &self.gauges;
        let status = &now.status;
        raise_to(journal_bytes, now.journal_bytes);
        raise_to(repaired, status.repairs_done);
        raise_to(moved, now.repair.moves_done);
        raise_to(failed, now.repair.failed);
        raise_to(reimages, now.reimages);
        raise_to(balance_moves, now.balance_moves_done);
        let seconds = |ms: Option<u64>| ms.unwrap_or(0) as f64 / 1_000.0;
        held.set(seconds(now.repair.held_ms));
        oldest.set(seconds(now.repair.oldest_ms));
        let fill = now
            .fill_permille
            .map(|(most, least)| (most as f64, least as f64));
        let (most, least) = fill.unwrap_or((f64::NAN, f64::NAN));
        fullest.set(most / 1_000.0);
        emptiest.set(least / 1_000.0);
        let busy = now.nodes_busy;
        for (gauge, value) in [
            (journal_record, status.journal_lsn),
            (leads, u64::from(now.group.part == GroupPart::Leader)),
            (
                knows_leader,
                u64::from(now.group.part != GroupPart::NobodyLeads),
            ),
            (term, now.group.term),
            (cluster_version, now.status.cluster_version.0.into()),
            (newest_version, now.status.newest_version.0.into()),
            (behind, now.group.behind_records),
            (ready, u64::from(status.ready)),
            (recovering, u64::from(status.recovery.is_some())),
            (refused_nodes, status.refused_nodes.len() as u64),
            (quarantined_blocks, status.quarantined_blocks),
            (quarantined_bytes, status.quarantined_bytes),
            (files, status.files),
            (directories, status.directories),
            (others, status.inodes - status.files - status.directories),
            (sessions, status.sessions),
            (blocks, status.blocks),
            (lost, status.lost_blocks),
            (curtailed, status.curtailed_blocks),
            (writable, status.writes.writable_bytes),
            (misplaced, now.misplaced_blocks),
            (repairs_waiting, now.repair.waiting),
            (moves_waiting, now.repair.moves_waiting),
            (under_way, status.repairs_under_way),
            (free_nodes, status.nodes_alive - busy),
            (busy_nodes, busy),
            (
                dead_nodes,
                status.nodes_known - status.nodes_alive - status.nodes_in_maintenance,
            ),
            (nodes_in_maintenance, status.nodes_in_maintenance),
            (quota, status.quota_bytes),
            (used, status.used_bytes),
            (engine, status.engine_bytes),
        ] {
            gauge.set(value as f64);
        }
        let writes = &status.writes;
        let replicas = [
            writes.wanted,
            writes.possible,
            writes.at_once,
            writes.needed,
        ];
        for (gauge, value) in write_replicas.iter().zip(replicas) {
            gauge.set(value.into());
        }
        for (gauge, &value) in missing.iter().zip(&now.missing_by_left) {
            gauge.set(value as f64);
        }
        for (gauge, &value) in too_full.iter().zip(&now.too_full_volumes) {
            gauge.set(value as f64);
        }
        for (gauge, &value) in diversity.iter().zip(&now.blocks_by_score) {
            gauge.set(value as f64);
        }
        for report in &now.cells {
            let Some(cell) = report.cell else {
                continue;
            };
            let (row, column) = (cell.row.to_string(), cell.column.to_string());
            for (metric, value) in [
                (&NAMENODE_CELL_CAPACITY_BYTES, report.capacity_bytes),
                (&NAMENODE_CELL_FREE_BYTES, report.free_bytes),
                (&NAMENODE_CELL_SERVERS, u64::from(report.servers)),
            ] {
                let gauge = self.registry.gauge(metric, &[&row, &column]);
                gauge.set(value as f64);
            }
        }
        // Members that have left the group must not remain.
        self.registry.forget_gauges(&NAMENODE_MEMBER);
        for member in &now.group.members {
            let gauge = self
                .registry
                .gauge(&NAMENODE_MEMBER, &[&member.addr.to_string()]);
            gauge.set(f64::from(u8::from(member.leads)));
        }
        self.set_classes(classes);
        self.set_harvest(&now.harvest);
        self.registry.render()
    }

    fn set_harvest(&self, now: &HarvestTotals) {
        const MIB: f64 = (1 << 20) as f64;
        let set = |metric, value: f64| self.registry.gauge(metric, &[]).set(value);
        set(&NAMENODE_HARVEST_SCHEDULERS, now.schedulers as f64);
        set(&NAMENODE_HARVEST_OFFERED_CORES, now.offered_cores as f64);
        let offered_bytes = now.offered_memory_mib as f64 * MIB;
        set(&NAMENODE_HARVEST_OFFERED_BYTES, offered_bytes);
        set(&NAMENODE_HARVESTED_JOBS, now.jobs as f64);
        set(&NAMENODE_HARVESTED_CONTAINERS, now.containers as f64);
        set(&NAMENODE_HARVESTED_CORES, now.used_cores as f64);
        let used_bytes = now.used_memory_mib as f64 * MIB;
        set(&NAMENODE_HARVESTED_BYTES, used_bytes);
    }

    /// Aggregated by pattern: the numbers of classes change from one analysis to the next.
    fn set_classes(&self, classes: &Classes) {
        let set = |metric, labels: &[&str], value: f64| {
            self.registry.gauge(metric, labels).set(value);
        };
        for pattern in TenantPattern::ALL {
            let name = pattern.name();
            let of = of_pattern(classes, pattern);
            set(&NAMENODE_CLASSES, &[name], of.classes as f64);
            set(&NAMENODE_CLASS_SERVERS, &[name], of.servers as f64);
            set(&NAMENODE_CLASS_CPU_RATIO, &[name], of.cpu);
            for (job, headroom) in [
                ("short", of.headroom_short),
                ("medium", of.headroom_medium),
                ("long", of.headroom_long),
            ] {
                set(&NAMENODE_CLASS_HEADROOM_RATIO, &[name, job], headroom);
            }
        }
        let without = classes.without_class.len();
        set(&NAMENODE_CLASS_SERVERS, &["none"], without as f64);
    }
}
