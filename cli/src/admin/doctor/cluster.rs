//! Checks what the namenode knows about itself, datanodes and their clocks, space and blocks.

use std::time::{Duration, Instant};

use harvestfs_protocol::admin::{AdminReply, AdminRequest, ClusterStatus, NodeStatus};
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::types::VolumeStatus;
use harvestfs_protocol::unix_now_ms;
use harvestfs_protocol::version::Release;

use super::{Area, Diagnosis, group};
use crate::admin::DEADLINE;
use crate::admin::link::{self, AdminLink};
use crate::admin::namenodes::ELECTED_WITHIN;
use crate::admin::no_leader::{ADVICE, NoLeader};
use crate::units;

/// Maximum tolerated difference between clocks. With a larger one, block tokens and certificates expire at
/// the wrong time. Far above the error of any time service, and above the delay of one request on a loaded machine.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(30);
/// Use in percent of the quota above which space for blocks soon runs out.
const FULL_PERCENT: u64 = 90;

const ONE_RELEASE: &str = "an upgrade is under way: copy the new binary to where the old one is, and \
    restart the parts one after another; `harvestfs admin upgrade status` shows which";
const SET_CLOCKS: &str = "have a time service (chrony, systemd-timesyncd) set the clocks";

/// Queries the namenode, and checks its answers.
pub async fn examine(link: &AdminLink, diagnosis: &mut Diagnosis) {
    let asked = Instant::now();
    match link.ask_for_diagnosis(AdminRequest::Status, DEADLINE).await {
        Ok(AdminReply::Status(status)) => {
            let delay = asked.elapsed();
            judge_status(&status, diagnosis);
            judge_clock(&status, unix_now_ms(), delay, diagnosis);
        }
        other => {
            let is_leaderless = other.as_ref().is_err_and(|it| it.is::<NoLeader>());
            refused(other, diagnosis);
            if is_leaderless {
                return;
            }
        }
    }
    let nodes = match link.ask_for_diagnosis(AdminRequest::Nodes, DEADLINE).await {
        Ok(AdminReply::Nodes(nodes)) => nodes,
        other => return refused(other, diagnosis),
    };
    judge_nodes(&nodes, diagnosis);
    match link.group(ELECTED_WITHIN).await {
        Ok(group) if group.leader.is_some() => group::judge(&group, &nodes, diagnosis),
        Ok(_) => diagnosis.error(Area::Namenode, "no namenode leads any more", ADVICE),
        Err(error) => refused(Err(error), diagnosis),
    }
}

fn refused(answer: anyhow::Result<AdminReply>, diagnosis: &mut Diagnosis) {
    let error = answer.err().unwrap_or_else(link::unexpected);
    if let Some(none) = error.downcast_ref::<NoLeader>() {
        return diagnosis.error(Area::Namenode, none.what(), none.advice());
    }
    diagnosis.error(
        Area::Namenode,
        format!("it does not answer as it should: {error:#}"),
        "look at the log of the namenode",
    );
}

fn judge_status(status: &ClusterStatus, diagnosis: &mut Diagnosis) {
    for area in [Area::Namenode, Area::Versions, Area::Blocks, Area::Quotas] {
        diagnosis.checked(area);
    }
    let own = Release::OURS.to_string();
    if status.version != own {
        diagnosis.warning(
            Area::Versions,
            format!(
                "the namenode is of release {}, this is {own}",
                status.version
            ),
            ONE_RELEASE,
        );
    }
    if status.newest_version > status.cluster_version {
        diagnosis.warning(
            Area::Versions,
            format!(
                "the cluster has version {}, and some of its parts have {}",
                status.cluster_version, status.newest_version
            ),
            "when all parts have it, run `harvestfs admin upgrade finish`; `harvestfs admin upgrade \
             status` shows what is missing",
        );
    }
    judge_timeline(status, diagnosis);
    if !status.ready {
        diagnosis.warning(
            Area::Namenode,
            "it has just started and is still learning where blocks are",
            "wait until the datanodes have reported, then ask again",
        );
    } else if status.lost_blocks > 0 {
        diagnosis.error(
            Area::Blocks,
            format!(
                "{} no replica left",
                has_or_have(status.lost_blocks, "block")
            ),
            "bring back the datanodes that are dead; `harvestfs admin fsck` names the files",
        );
    } else if status.under_replicated_blocks > 0 {
        diagnosis.warning(
            Area::Blocks,
            format!(
                "{} fewer replicas than there should be; repairs under way: {}",
                has_or_have(status.under_replicated_blocks, "block"),
                status.repairs_under_way
            ),
            "wait for repair; `harvestfs admin repair` shows and changes its budget",
        );
    }
    judge_writes(status, diagnosis);
    if status.used_bytes.saturating_mul(100) > status.quota_bytes.saturating_mul(FULL_PERCENT) {
        diagnosis.warning(
            Area::Quotas,
            format!(
                "{} of the {} that live datanodes may use are in use",
                units::human(status.used_bytes),
                units::human(status.quota_bytes)
            ),
            "add datanodes or volumes, raise quotas with `harvestfs admin quota`, or remove files",
        );
    }
}

/// Formats, for example, `1 block has` or `2 blocks have`.
fn has_or_have(number: u64, thing: &str) -> String {
    let verb = if number == 1 { "has" } else { "have" };
    format!("{} {verb}", count(number, thing))
}

/// Checks whether writes work, and whether there are enough datanodes for the requested replication.
fn judge_writes(status: &ClusterStatus, diagnosis: &mut Diagnosis) {
    diagnosis.checked(Area::Writes);
    match status.writes.trouble() {
        Some(it) if it.stops_writes => diagnosis.error(Area::Writes, it.what, it.advice),
        Some(it) => diagnosis.warning(Area::Writes, it.what, it.advice),
        None => {}
    }
    if status.curtailed_blocks > 0 {
        diagnosis.warning(
            Area::Blocks,
            format!(
                "{} less than files ask for: the cluster has too few datanodes",
                has_or_have(status.curtailed_blocks, "block")
            ),
            "add datanodes: repair and moves make up for it; `harvestfs admin placement` shows \
             what a block lacks",
        );
    }
}

/// Checks whether another part knows more than the namenode.
fn judge_timeline(status: &ClusterStatus, diagnosis: &mut Diagnosis) {
    if let Some(recovery) = &status.recovery {
        diagnosis.error(
            Area::Namenode,
            format!(
                "it is in recovery and changes nothing: it {}",
                recovery.describe()
            ),
            "put the newest copy of its directory back, or give up what is missing with \
             `harvestfs admin recover --accept-loss`",
        );
    }
    for node in &status.refused_nodes {
        diagnosis.error(
            Area::Namenode,
            format!(
                "{} obeys another namenode of this cluster, which started later (epoch {}, this one \
                 is of epoch {})",
                node.name, node.obeyed.epoch, status.epoch
            ),
            "stop the namenode that is not to be; then `harvestfs admin recover --accept-loss` has this one \
             take the datanode back, without what the other one wrote",
        );
    }
    if status.quarantined_blocks > 0 {
        diagnosis.warning(
            Area::Blocks,
            format!(
                "{} in quarantine ({}): allocated by a namenode that knew more",
                count(status.quarantined_blocks, "block"),
                units::human(status.quarantined_bytes)
            ),
            "`harvestfs admin fsck --recover DIR` reads them back; they are removed in time",
        );
    }
}

/// Compares the namenode's clock with ours; the answer took `delay`.
fn judge_clock(
    status: &ClusterStatus,
    now_ms: Option<u64>,
    delay: Duration,
    diagnosis: &mut Diagnosis,
) {
    diagnosis.checked(Area::Clocks);
    let Some(now_ms) = now_ms else {
        return diagnosis.error(
            Area::Clocks,
            "the clock of this machine is before 1970",
            SET_CLOCKS,
        );
    };
    let difference = Duration::from_millis(now_ms.abs_diff(status.unix_ms));
    if difference > CLOCK_DIFFERENCE_MAX + delay {
        diagnosis.error(
            Area::Clocks,
            format!(
                "the namenode's clock and this one differ by {} s",
                difference.as_secs()
            ),
            SET_CLOCKS,
        );
    }
}

fn judge_nodes(nodes: &[NodeStatus], diagnosis: &mut Diagnosis) {
    for area in [Area::Datanodes, Area::Clocks, Area::Quotas] {
        diagnosis.checked(area);
    }
    if nodes.is_empty() {
        diagnosis.error(
            Area::Datanodes,
            "no datanode has ever registered",
            "make one with `harvestfs init datanode` and start it",
        );
    }
    let own = Release::OURS.to_string();
    for node in nodes {
        let name = &node.server.name;
        if !node.alive && node.maintenance_left_ms.is_some() {
            continue;
        }
        if !node.alive {
            diagnosis.error(
                Area::Datanodes,
                format!("{name} is dead"),
                "start it, or look at its log; its blocks are repaired meanwhile",
            );
            continue;
        }
        let ahead = node
            .clock_ahead_ms
            .map(|ahead_ms| Duration::from_millis(ahead_ms.unsigned_abs()));
        if let Some(ahead) = ahead
            && ahead > CLOCK_DIFFERENCE_MAX
        {
            diagnosis.error(
                Area::Clocks,
                format!(
                    "the clock of {name} and the namenode's differ by {} s",
                    ahead.as_secs()
                ),
                SET_CLOCKS,
            );
        }
        if let Some(version) = &node.version
            && *version != own
        {
            diagnosis.warning(
                Area::Versions,
                format!("{name} is of release {version}, this is {own}"),
                ONE_RELEASE,
            );
        }
        for volume in &node.volumes {
            judge_volume(name, volume, diagnosis);
        }
    }
}

fn judge_volume(server: &str, volume: &VolumeStatus, diagnosis: &mut Diagnosis) {
    let id = volume.storage;
    if !volume.healthy {
        diagnosis.error(
            Area::Datanodes,
            format!("volume {id} of {server} cannot be used"),
            "the log of the datanode says why; replace the disk, or empty its directory",
        );
    } else if volume.quota_bytes == 0 {
        diagnosis.warning(
            Area::Quotas,
            format!("volume {id} of {server} has a quota of nothing"),
            "raise it with `harvestfs admin quota`, or remove the volume from datanode.toml",
        );
    } else if volume.used_bytes > volume.quota_bytes {
        diagnosis.warning(
            Area::Quotas,
            format!(
                "volume {id} of {server} uses {} of {}: its owner wants space back",
                units::human(volume.used_bytes),
                units::human(volume.quota_bytes)
            ),
            "wait: replicas are moved away, and at the deadline given up",
        );
    }
}

#[cfg(test)]
pub(super) mod tests {
    use harvestfs_protocol::admin::{AheadNode, RecoveryStatus};
    use harvestfs_protocol::ids::{ClusterId, NodeId, StorageId};
    use harvestfs_protocol::node::ServerDescription;
    use harvestfs_protocol::outlook::{WriteOutlook, WriteVerdict};
    use harvestfs_protocol::timeline::{Epoch, Position};
    use harvestfs_protocol::types::StorageClass;
    use harvestfs_protocol::version::Version;

    use super::super::Severity;
    use super::*;

    fn status() -> ClusterStatus {
        ClusterStatus {
            cluster: ClusterId(1),
            version: Release::OURS.to_string(),
            unix_ms: 1_000_000,
            uptime_s: 60,
            ready: true,
            inodes: 1,
            files: 0,
            directories: 1,
            blocks: 0,
            under_replicated_blocks: 0,
            curtailed_blocks: 0,
            writes: WriteOutlook::default(),
            lost_blocks: 0,
            repairs_under_way: 0,
            repairs_done: 0,
            sessions: 0,
            nodes_alive: 1,
            nodes_in_maintenance: 0,
            nodes_known: 1,
            quota_bytes: 100,
            used_bytes: 90,
            journal_lsn: 1,
            engine_bytes: 1,
            epoch: Epoch::default(),
            recovery: None,
            refused_nodes: Vec::new(),
            quarantined_blocks: 0,
            quarantined_bytes: 0,
            cluster_version: Version::default(),
            newest_version: Version::default(),
        }
    }

    pub fn node(id: NodeId) -> NodeStatus {
        NodeStatus {
            node: id,
            server: ServerDescription {
                name: "a".into(),
                rack: "r".into(),
                environment: "e".into(),
                machine_function: "f".into(),
                data_addr: "127.0.0.1:1".parse().unwrap(),
            },
            volumes: vec![VolumeStatus {
                storage: StorageId(7),
                class: StorageClass::Disk,
                quota_bytes: 100,
                used_bytes: 50,
                healthy: true,
                shrinks_in_ms: None,
            }],
            alive: true,
            busy: false,
            replicas: 0,
            heartbeat_age_ms: Some(1),
            clock_ahead_ms: Some(-5),
            version: Some(Release::OURS.to_string()),
            draining: false,
            maintenance_left_ms: None,
        }
    }

    fn found(judge: impl FnOnce(&mut Diagnosis)) -> Vec<(Area, Severity)> {
        let mut diagnosis = Diagnosis::default();
        judge(&mut diagnosis);
        let findings = diagnosis.findings.iter();
        findings
            .map(|finding| (finding.area, finding.severity))
            .collect()
    }

    #[test]
    fn a_cluster_that_is_well_has_no_findings() {
        assert_eq!(found(|it| judge_status(&status(), it)), []);
        assert_eq!(found(|it| judge_nodes(&[node(NodeId(1))], it)), []);
        let away = NodeStatus {
            alive: false,
            maintenance_left_ms: Some(1),
            ..node(NodeId(1))
        };
        assert_eq!(found(|it| judge_nodes(&[away], it)), []);
        let second = Duration::from_secs(1);
        assert_eq!(
            found(|it| judge_clock(&status(), Some(1_031_000), second, it)),
            []
        );
    }

    #[test]
    fn each_fault_of_the_namenode_is_found() {
        type Spoil = fn(&mut ClusterStatus);
        fn ahead() -> AheadNode {
            AheadNode {
                name: "a".into(),
                obeyed: Position::default(),
            }
        }
        let faults: [(Spoil, Area, Severity); 13] = [
            (
                |it| {
                    it.recovery = Some(RecoveryStatus {
                        restored_record: 1,
                        is_from_backup: false,
                        ahead: vec![ahead()],
                    });
                },
                Area::Namenode,
                Severity::Error,
            ),
            (
                |it| it.refused_nodes = vec![ahead()],
                Area::Namenode,
                Severity::Error,
            ),
            (
                |it| it.quarantined_blocks = 1,
                Area::Blocks,
                Severity::Warning,
            ),
            (
                |it| it.version = "0.0.1".into(),
                Area::Versions,
                Severity::Warning,
            ),
            (
                |it| it.newest_version = Version(it.cluster_version.0 + 1),
                Area::Versions,
                Severity::Warning,
            ),
            (
                |it| it.curtailed_blocks = 1,
                Area::Blocks,
                Severity::Warning,
            ),
            (
                |it| it.writes.verdict = WriteVerdict::Fewer,
                Area::Writes,
                Severity::Warning,
            ),
            (
                |it| it.writes.verdict = WriteVerdict::Waits,
                Area::Writes,
                Severity::Error,
            ),
            (
                |it| it.writes.verdict = WriteVerdict::NotDiverse,
                Area::Writes,
                Severity::Error,
            ),
            (|it| it.ready = false, Area::Namenode, Severity::Warning),
            (|it| it.lost_blocks = 1, Area::Blocks, Severity::Error),
            (
                |it| it.under_replicated_blocks = 1,
                Area::Blocks,
                Severity::Warning,
            ),
            (|it| it.used_bytes = 91, Area::Quotas, Severity::Warning),
        ];
        for (spoil, area, severity) in faults {
            let mut status = status();
            spoil(&mut status);
            assert_eq!(found(|it| judge_status(&status, it)), [(area, severity)]);
        }
        let zero = Duration::ZERO;
        for now_ms in [1_031_000, 969_000] {
            let found = found(|it| judge_clock(&status(), Some(now_ms), zero, it));
            assert_eq!(found, [(Area::Clocks, Severity::Error)]);
        }
    }

    #[test]
    fn each_fault_of_a_datanode_is_found() {
        type Spoil = fn(&mut NodeStatus);
        let faults: [(Spoil, Area, Severity); 6] = [
            (|it| it.alive = false, Area::Datanodes, Severity::Error),
            (
                |it| it.version = Some("0.0.1".into()),
                Area::Versions,
                Severity::Warning,
            ),
            (
                |it| it.clock_ahead_ms = Some(-31_000),
                Area::Clocks,
                Severity::Error,
            ),
            (
                |it| it.volumes[0].healthy = false,
                Area::Datanodes,
                Severity::Error,
            ),
            (
                |it| it.volumes[0].quota_bytes = 0,
                Area::Quotas,
                Severity::Warning,
            ),
            (
                |it| it.volumes[0].used_bytes = 101,
                Area::Quotas,
                Severity::Warning,
            ),
        ];
        for (spoil, area, severity) in faults {
            let mut node = node(NodeId(1));
            spoil(&mut node);
            assert_eq!(found(|it| judge_nodes(&[node], it)), [(area, severity)]);
        }
        assert_eq!(
            found(|it| judge_nodes(&[], it)),
            [(Area::Datanodes, Severity::Error)]
        );
    }
}
