//! What a mount tells Prometheus.

use harvestfs_client::ClientCounters;
use harvestfs_telemetry::metrics::{
    Gauge, MOUNT_CONNECTED, MOUNT_DENIALS_TOTAL, MOUNT_DIRTY_BYTES, MOUNT_HEDGED_READS_TOTAL, Part,
    Registry, WholeCounter, raise_to,
};

/// Everything that a mount measures, with handles that were resolved at its start.
pub struct Metrics {
    registry: Registry,
    dirty: Gauge,
    denials: WholeCounter,
    hedged_reads: WholeCounter,
    connected: Gauge,
}

impl Metrics {
    /// Nothing was measured yet.
    pub fn new() -> Self {
        let registry = Registry::new(Part::Mount, env!("CARGO_PKG_VERSION"));
        Self {
            dirty: registry.gauge(&MOUNT_DIRTY_BYTES, &[]),
            denials: registry.counter(&MOUNT_DENIALS_TOTAL, &[]),
            hedged_reads: registry.counter(&MOUNT_HEDGED_READS_TOTAL, &[]),
            connected: registry.gauge(&MOUNT_CONNECTED, &[]),
            registry,
        }
    }

    /// All of it as text, with what the client counts.
    pub fn text(&self, client: &ClientCounters) -> String {
        self.dirty.set(client.dirty_bytes as f64);
        raise_to(&self.denials, client.denials);
        raise_to(&self.hedged_reads, client.hedged_reads);
        self.connected.set(if client.connected { 1.0 } else { 0.0 });
        self.registry.render()
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_telemetry::metrics::TABLE;

    use super::*;

    #[test]
    fn everything_in_the_table_is_told() {
        let metrics = Metrics::new();
        let text = metrics.text(&ClientCounters {
            dirty_bytes: 4_096,
            denials: 3,
            hedged_reads: 2,
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
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
