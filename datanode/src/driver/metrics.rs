//! The Prometheus metrics of a datanode.

use std::path::PathBuf;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::node::PrimaryLoad;
use harvestfs_protocol::types::VolumeStatus;
use harvestfs_telemetry::metrics::{
    Counter, DATANODE_BUSY, DATANODE_BUSY_SECONDS_TOTAL, DATANODE_BYTES_TOTAL,
    DATANODE_DENIALS_TOTAL, DATANODE_FAILURES_TOTAL, DATANODE_OPERATION_SECONDS,
    DATANODE_PRIMARY_CPU_RATIO, DATANODE_PRIMARY_MEMORY_RATIO, DATANODE_PRIMARY_STALLED_RATIO,
    DATANODE_REGISTERED, DATANODE_STREAMS, DATANODE_VOLUME_HEALTHY, DATANODE_VOLUME_QUOTA_BYTES,
    DATANODE_VOLUME_USED_BYTES, Gauge, Histogram, Part, Registry, Timer, WholeCounter,
};

/// All metrics of a datanode, with handles that were resolved at its start.
pub struct Metrics {
    registry: Registry,
    pub read: Operation,
    pub open: Operation,
    pub write: Operation,
    pub seal: Operation,
    pub repair: Operation,
    pub scrub: Operation,
    pub read_for_clients: WholeCounter,
    pub read_for_repair: WholeCounter,
    pub read_by_scrubber: WholeCounter,
    pub written_by_clients: WholeCounter,
    pub written_by_repair: WholeCounter,
    pub denied_reads: WholeCounter,
    pub denied_writes: WholeCounter,
    pub denied_repairs: WholeCounter,
    pub busy_seconds: Counter,
    busy: Gauge,
    registered: Gauge,
    streams: Gauge,
    cpu: Gauge,
    memory: Gauge,
    stalled: Gauge,
}

/// One kind of operation.
pub struct Operation {
    seconds: Histogram,
    failures: WholeCounter,
}

impl Operation {
    /// Measures until it is dropped.
    pub fn timer(&self) -> Timer {
        self.seconds.start_timer()
    }

    /// Counts a failure, unless it is a denial or the datanode is stopping.
    pub fn note_failure(&self, error: &DataError) {
        if !matches!(error, DataError::Busy { .. } | DataError::Stopping) {
            self.count_failure();
        }
    }

    /// Counts a failure.
    pub fn count_failure(&self) {
        self.failures.inc();
    }
}

/// Values that are sampled for each scrape.
pub struct Sample {
    pub busy: bool,
    pub registered: bool,
    pub streams: u32,
    pub primary: Option<PrimaryLoad>,
    pub volumes: Vec<VolumeStatus>,
    /// The directories of further volumes, which cannot be used.
    pub without_status: Vec<PathBuf>,
}

impl Metrics {
    pub fn new() -> Self {
        let registry = Registry::new(Part::Datanode, env!("CARGO_PKG_VERSION"));
        let operation = |name| Operation {
            seconds: registry.latency(&DATANODE_OPERATION_SECONDS, &[name]),
            failures: registry.counter(&DATANODE_FAILURES_TOTAL, &[name]),
        };
        let bytes =
            |direction, purpose| registry.counter(&DATANODE_BYTES_TOTAL, &[direction, purpose]);
        let denials = |operation| registry.counter(&DATANODE_DENIALS_TOTAL, &[operation]);
        let gauge = |metric| registry.gauge(metric, &[]);
        Self {
            read: operation("read"),
            open: operation("open"),
            write: operation("write"),
            seal: operation("seal"),
            repair: operation("repair"),
            scrub: operation("scrub"),
            read_for_clients: bytes("read", "client"),
            read_for_repair: bytes("read", "repair"),
            read_by_scrubber: bytes("read", "scrub"),
            written_by_clients: bytes("written", "client"),
            written_by_repair: bytes("written", "repair"),
            denied_reads: denials("read"),
            denied_writes: denials("write"),
            denied_repairs: denials("repair"),
            busy_seconds: registry.fraction_counter(&DATANODE_BUSY_SECONDS_TOTAL, &[]),
            busy: gauge(&DATANODE_BUSY),
            registered: gauge(&DATANODE_REGISTERED),
            streams: gauge(&DATANODE_STREAMS),
            cpu: gauge(&DATANODE_PRIMARY_CPU_RATIO),
            memory: gauge(&DATANODE_PRIMARY_MEMORY_RATIO),
            stalled: gauge(&DATANODE_PRIMARY_STALLED_RATIO),
            registry,
        }
    }

    /// Returns the counter of bytes read for a peer: datanodes read for repairs.
    pub fn read_for(&self, peer: Role) -> &WholeCounter {
        match peer {
            Role::Datanode => &self.read_for_repair,
            Role::Client | Role::Namenode | Role::Admin => &self.read_for_clients,
        }
    }

    /// Number of denials since the start.
    pub fn denials(&self) -> u64 {
        self.denied_reads.get() + self.denied_writes.get() + self.denied_repairs.get()
    }

    /// Renders all metrics as text, with the sampled values.
    pub fn text(&self, sample: &Sample) -> String {
        let flag = |is_set| if is_set { 1.0 } else { 0.0 };
        let share = |permille: Option<u16>| permille.map_or(f64::NAN, |it| f64::from(it) / 1_000.0);
        self.busy.set(flag(sample.busy));
        self.registered.set(flag(sample.registered));
        self.streams.set(f64::from(sample.streams));
        let primary = sample.primary.as_ref();
        self.cpu.set(share(primary.map(|it| it.cpu_permille)));
        self.memory
            .set(share(primary.and_then(|it| it.memory_permille)));
        self.stalled
            .set(share(primary.and_then(|it| it.stalled_permille)));
        // What was known only by its directory may be known by its id now.
        self.registry.forget_gauges(&DATANODE_VOLUME_HEALTHY);
        for path in &sample.without_status {
            let path = path.display().to_string();
            let healthy = self.registry.gauge(&DATANODE_VOLUME_HEALTHY, &[&path]);
            healthy.set(flag(false));
        }
        for volume in &sample.volumes {
            let storage = volume.storage.to_string();
            let gauge = |metric| self.registry.gauge(metric, &[&storage]);
            gauge(&DATANODE_VOLUME_QUOTA_BYTES).set(volume.quota_bytes as f64);
            gauge(&DATANODE_VOLUME_USED_BYTES).set(volume.used_bytes as f64);
            gauge(&DATANODE_VOLUME_HEALTHY).set(flag(volume.healthy));
        }
        self.registry.render()
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::StorageId;
    use harvestfs_protocol::types::StorageClass;
    use harvestfs_telemetry::metrics::TABLE;

    use super::*;

    #[test]
    fn everything_in_the_table_is_exported() {
        let metrics = Metrics::new();
        metrics
            .seal
            .note_failure(&DataError::Busy { retry_after_ms: 1 });
        metrics.seal.note_failure(&DataError::NoSpace);
        metrics.denied_writes.inc_by(2);
        metrics.denied_repairs.inc();
        let text = metrics.text(&Sample {
            busy: true,
            registered: true,
            streams: 3,
            primary: Some(PrimaryLoad {
                cpu_permille: 250,
                ..PrimaryLoad::default()
            }),
            volumes: vec![VolumeStatus {
                storage: StorageId(7),
                class: StorageClass::Disk,
                quota_bytes: 1 << 30,
                used_bytes: 1 << 20,
                healthy: true,
                shrinks_in_ms: None,
            }],
            without_status: vec![PathBuf::from("/disk/2")],
        });
        for metric in TABLE.iter().filter(|it| it.part == Part::Datanode) {
            assert!(
                text.contains(&format!("\n{}", metric.name)),
                "{}",
                metric.name
            );
        }
        for line in [
            "harvestfs_datanode_busy 1",
            "harvestfs_datanode_primary_cpu_ratio 0.25",
            "harvestfs_datanode_primary_memory_ratio NaN",
            "harvestfs_datanode_failures_total{operation=\"seal\"} 1",
            "harvestfs_datanode_volume_healthy{storage=\"/disk/2\"} 0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert_eq!(metrics.denials(), 3);
    }
}
