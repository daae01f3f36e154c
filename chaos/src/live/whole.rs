//! Waits until a healed cluster is whole again.

use std::time::{Duration, Instant};

use harvestfs_protocol::admin::FsckReport;

use super::LiveError;
use super::faults::Scene;
use super::scenario::Scenario;

/// A cluster that lost blocks never becomes whole. Once all parts are back, all rot is found, nothing else is
/// missing and nothing has changed for this long, it is as whole as it gets.
const LOSS_SETTLED: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(500);

/// The state of a cluster after the wait.
#[derive(Debug, Default)]
pub(crate) struct Healed {
    /// The last report of `fsck`; `None` if the namenode never answered.
    pub report: Option<FsckReport>,
    /// All parts are up, nothing is missing, and all rot was found and repaired.
    pub is_whole: bool,
    /// Only lost blocks keep it from being whole.
    pub has_settled: bool,
}

impl Scene<'_> {
    /// Waits until the cluster is as whole as it gets. Parts that are still missing at the deadline are noted as
    /// violations.
    pub async fn wait_whole(
        &mut self,
        scenario: &Scenario,
        go_on: &dyn Fn() -> bool,
        tell: &mut dyn FnMut(&str, u64),
    ) -> Result<Healed, LiveError> {
        let replication = scenario.cluster.replication;
        let end = Instant::now() + Duration::from_millis(scenario.heal_ms);
        let mut healed = Healed::default();
        let mut changed_at = Instant::now();
        loop {
            if !go_on() {
                return Err(LiveError::Interrupted);
            }
            if let Some(ended) = self.cluster.ended_by_itself() {
                return Err(LiveError::Cluster(ended));
            }
            self.look().await?;
            let absent = self.absent();
            if let Some(report) = self.admin.fsck().await {
                let doing = format!(
                    "healing: {} replicas missing, {} rotten, {} blocks lost",
                    report.missing_replicas,
                    self.watch.rotten_replicas(),
                    report.lost_blocks
                );
                tell(&doing, scenario.duration_ms);
                let same = healed.report.as_ref().is_some_and(|last| {
                    last.missing_replicas == report.missing_replicas
                        && last.lost_blocks == report.lost_blocks
                });
                if !same || !absent.is_empty() {
                    changed_at = Instant::now();
                }
                healed.has_settled = lacks_lost_blocks_alone(&report, replication)
                    && changed_at.elapsed() > LOSS_SETTLED
                    && self.watch.rotten_replicas() == 0;
                healed.is_whole = report.healthy
                    && absent.is_empty()
                    && self.watch.is_rot_repaired(replication.into());
                healed.report = Some(report);
                if healed.is_whole || healed.has_settled {
                    return Ok(healed);
                }
            }
            if Instant::now() > end {
                self.watch.broken.extend(absent);
                return Ok(healed);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The parts that are missing as of the last sample. In a healed cluster, all parts run.
    fn absent(&self) -> Vec<String> {
        let not_ready = self.cluster.not_ready().into_iter();
        let mut absent: Vec<String> = not_ready
            .map(|name| format!("{name} is not ready again"))
            .collect();
        let (alive, servers) = (self.watch.alive(), self.cluster.conditions.len());
        if alive < servers as u64 {
            absent.push(format!(
                "the namenode holds {alive} of {servers} datanodes for alive"
            ));
        }
        absent
    }
}

/// Whether only lost blocks keep a cluster from being healthy. Excess replicas of other blocks, and blocks of no file,
/// have to be removed whatever is lost.
fn lacks_lost_blocks_alone(report: &FsckReport, replication: u8) -> bool {
    report.lost_blocks > 0
        && report.missing_replicas <= report.lost_blocks * u64::from(replication)
        && report.excess_replicas == 0
        && report.orphan_blocks == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_excuses_only_what_it_takes_along() {
        let healthy = FsckReport {
            healthy: true,
            ..FsckReport::default()
        };
        let lossy = FsckReport {
            lost_blocks: 2,
            missing_replicas: 6,
            ..FsckReport::default()
        };
        assert!(lacks_lost_blocks_alone(&lossy, 3));
        let others = [
            FsckReport {
                missing_replicas: 7,
                ..lossy.clone()
            },
            FsckReport {
                excess_replicas: 1,
                ..lossy.clone()
            },
            FsckReport {
                orphan_blocks: 1,
                ..lossy
            },
            healthy,
        ];
        for report in others {
            assert!(!lacks_lost_blocks_alone(&report, 3), "{report:?}");
        }
    }
}
