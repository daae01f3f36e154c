//! The wait for a cluster that is healed to be whole again.

use std::time::{Duration, Instant};

use harvestfs_protocol::admin::FsckReport;

use super::LiveError;
use super::faults::Scene;
use super::scenario::Scenario;

/// A cluster that lost blocks never becomes whole; when all parts are back, all rot is found, nothing else is
/// missing and nothing has changed for so long, it is as whole as it gets.
const LOSS_SETTLED: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(500);

/// How a cluster is when it was waited for.
#[derive(Debug, Default)]
pub(crate) struct Healed {
    /// What was wrong with it; none when the namenode did not say.
    pub report: Option<FsckReport>,
    /// All parts are there, nothing is missing, and no replica is rotten that looks as if it were not.
    pub is_whole: bool,
    /// Nothing but lost blocks keeps it from that.
    pub has_settled: bool,
}

impl Scene<'_> {
    /// Waits until the cluster is as whole as it gets. What is not there by then is written down as wrong.
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

    /// What is not there, as of the last look, of a cluster that is healed: all parts run then.
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

/// Whether nothing but lost blocks keeps a cluster from being healthy. What is too much of the others, or used by no file, is removed
/// whatever is lost.
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
