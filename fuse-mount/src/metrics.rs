//! The Prometheus metrics of a mount, and its log of each request of the kernel.

use std::sync::Arc;
use std::time::Instant;

use harvestfs_client::ClientCounters;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_telemetry::metrics::{
    Gauge, Histogram, MOUNT_BYTES_TOTAL, MOUNT_CONNECTED, MOUNT_DENIALS_TOTAL, MOUNT_DIRTY_BYTES,
    MOUNT_FETCHED_BYTES_TOTAL, MOUNT_HEDGED_READS_TOTAL, MOUNT_OPERATION_SECONDS, Part, Registry,
    WholeCounter, raise_to,
};

/// Defines the kinds of requests with their names.
macro_rules! operations {
    ($($operation:ident $name:literal),* $(,)?) => {
        /// A kind of request of the kernel.
        #[derive(Clone, Copy, Debug)]
        #[expect(missing_docs, reason = "they are named as the kernel names them")]
        pub enum Operation { $($operation),* }

        const OPERATIONS: &[(Operation, &str)] = &[$((Operation::$operation, $name)),*];
    };
}

operations! {
    Lookup "lookup", GetAttr "getattr", SetAttr "setattr", ReadLink "readlink", MakeNode "mknod",
    MakeDir "mkdir", Unlink "unlink", RemoveDir "rmdir", Symlink "symlink", Rename "rename",
    Link "link", Open "open", Create "create", Read "read", Write "write", Flush "flush",
    Fsync "fsync", Release "release", Fallocate "fallocate", Lseek "lseek",
    CopyFileRange "copy_file_range", OpenDir "opendir", ReadDir "readdir",
    ReadDirPlus "readdirplus", ReleaseDir "releasedir", FsyncDir "fsyncdir", StatFs "statfs",
    SetXattr "setxattr", GetXattr "getxattr", ListXattr "listxattr", RemoveXattr "removexattr",
}

/// All metrics of a mount, with handles that were resolved at its start.
pub struct Metrics {
    registry: Registry,
    seconds: Vec<Histogram>,
    /// Bytes read by the kernel.
    pub read: WholeCounter,
    /// Bytes written by the kernel.
    pub written: WholeCounter,
    fetched: WholeCounter,
    short_circuit: WholeCounter,
    dirty: Gauge,
    denials: WholeCounter,
    hedged_reads: WholeCounter,
    connected: Gauge,
}

/// A request of the kernel that is being served; measured and logged when it is dropped.
pub struct Observed {
    metrics: Arc<Metrics>,
    operation: Operation,
    request: RequestId,
    began: Instant,
}

impl Observed {
    /// The id under which its traces are found.
    #[must_use]
    pub fn request(&self) -> RequestId {
        self.request
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        let took = self.began.elapsed();
        let index = self.operation as usize;
        self.metrics.seconds[index].observe(took.as_secs_f64());
        self.request
            .during(|| tracing::debug!(operation = OPERATIONS[index].1, ?took, "served"));
    }
}

impl Metrics {
    /// New metrics.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new(Part::Mount, env!("CARGO_PKG_VERSION"));
        let seconds = OPERATIONS
            .iter()
            .map(|(_, name)| registry.latency(&MOUNT_OPERATION_SECONDS, &[name]))
            .collect();
        let bytes = |direction| registry.counter(&MOUNT_BYTES_TOTAL, &[direction]);
        let fetched = |way| registry.counter(&MOUNT_FETCHED_BYTES_TOTAL, &[way]);
        Self {
            seconds,
            read: bytes("read"),
            written: bytes("written"),
            fetched: fetched("network"),
            short_circuit: fetched("short_circuit"),
            dirty: registry.gauge(&MOUNT_DIRTY_BYTES, &[]),
            denials: registry.counter(&MOUNT_DENIALS_TOTAL, &[]),
            hedged_reads: registry.counter(&MOUNT_HEDGED_READS_TOTAL, &[]),
            connected: registry.gauge(&MOUNT_CONNECTED, &[]),
            registry,
        }
    }

    /// Starts to measure a request of the kernel.
    #[must_use]
    pub fn begin(self: &Arc<Self>, operation: Operation) -> Observed {
        Observed {
            metrics: self.clone(),
            operation,
            request: RequestId::random(),
            began: Instant::now(),
        }
    }

    /// Renders all metrics as text, with the client's counters.
    #[must_use]
    pub fn text(&self, client: &ClientCounters) -> String {
        self.dirty.set(client.dirty_bytes as f64);
        raise_to(&self.denials, client.denials);
        raise_to(&self.hedged_reads, client.hedged_reads);
        raise_to(&self.fetched, client.network_bytes);
        raise_to(&self.short_circuit, client.short_circuit_bytes);
        self.connected.set(if client.connected { 1.0 } else { 0.0 });
        self.registry.render()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_telemetry::metrics::TABLE;

    use super::*;

    #[test]
    fn everything_in_the_table_is_told() {
        let metrics = Arc::new(Metrics::new());
        drop(metrics.begin(Operation::RemoveXattr));
        metrics.written.inc_by(5);
        let text = metrics.text(&ClientCounters {
            dirty_bytes: 4_096,
            denials: 3,
            hedged_reads: 2,
            network_bytes: 7,
            short_circuit_bytes: 8,
            connected: true,
        });
        for metric in TABLE.iter().filter(|it| it.part == Part::Mount) {
            assert!(
                text.contains(&format!("\n{}", metric.name)),
                "{}",
                metric.name
            );
        }
        for line in [
            "harvestfs_mount_dirty_bytes 4096",
            "harvestfs_mount_denials_total 3",
            "harvestfs_mount_connected 1",
            "harvestfs_mount_bytes_total{direction=\"written\"} 5",
            "harvestfs_mount_fetched_bytes_total{way=\"network\"} 7",
            "harvestfs_mount_fetched_bytes_total{way=\"short_circuit\"} 8",
            "harvestfs_mount_operation_seconds_count{operation=\"removexattr\"} 1",
            "harvestfs_mount_operation_seconds_count{operation=\"lookup\"} 0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
