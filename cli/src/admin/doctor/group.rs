//! Checks the group of namenodes: whether all of them work, how many may fail, and where they run.

use std::collections::BTreeMap;
use std::net::IpAddr;

use harvestfs_protocol::admin::NodeStatus;
use harvestfs_protocol::group::GroupStatus;

use super::{Area, Diagnosis};
use crate::admin::namenodes::even_number;

/// Milliseconds of silence after which the leader's peer counts as not working.
const SILENT_MS: u64 = 2_000;
/// Number of missing records above which a namenode counts as not keeping up.
const BEHIND_RECORDS: u64 = 100_000;

/// Checks the group, and whether its namenodes share machines with datanodes or with each other.
pub(super) fn judge(group: &GroupStatus, nodes: &[NodeStatus], diagnosis: &mut Diagnosis) {
    diagnosis.checked(Area::Namenode);
    let voters = group.members.iter().filter(|it| it.is_voter).count();
    if group.members.len() > 1 {
        judge_members(group, diagnosis);
    }
    if let Some(what) = even_number(voters) {
        diagnosis.warning(
            Area::Namenode,
            what,
            "add one with `harvestfs admin namenode add`, or remove one",
        );
    }
    judge_places(group, nodes, diagnosis);
}

fn judge_members(group: &GroupStatus, diagnosis: &mut Diagnosis) {
    for member in &group.members {
        if Some(member.id) == group.leader {
            continue;
        }
        if member.heard_ms.is_none_or(|ms| ms >= SILENT_MS) {
            diagnosis.error(
                Area::Namenode,
                format!("the one at {} does not answer the leader", member.addr),
                "start it again; its log says more. If its disk is lost, make another one with \
                 `harvestfs init namenode` and `harvestfs admin namenode add`",
            );
        } else if !member.is_voter {
            diagnosis.warning(
                Area::Namenode,
                format!("the one at {} has no vote yet", member.addr),
                "wait until it has caught up; if it was to be added, run `harvestfs admin namenode \
                 add` again",
            );
        } else if group.last.saturating_sub(member.acknowledged.unwrap_or(0)) > BEHIND_RECORDS {
            diagnosis.warning(
                Area::Namenode,
                format!("the one at {} does not keep up", member.addr),
                "look at its disk and its network",
            );
        }
    }
}

/// Checks whether servers that are reimaged together could take several namenodes with them.
fn judge_places(group: &GroupStatus, nodes: &[NodeStatus], diagnosis: &mut Diagnosis) {
    if group.members.len() == 1 {
        return;
    }
    let mut environments: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut hosts: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for member in &group.members {
        let ip = member.addr.ip();
        *hosts.entry(ip).or_default() += 1;
        let server = nodes
            .iter()
            .map(|it| &it.server)
            .find(|it| it.data_addr.ip() == ip);
        // On a single machine, as in a trial, all are together anyway.
        let Some(server) = server.filter(|_| !ip.is_loopback()) else {
            continue;
        };
        diagnosis.warning(
            Area::Namenode,
            format!(
                "the one at {} is on the server {}, which has a primary tenant",
                member.addr, server.name
            ),
            "move it to a server that is not reimaged without notice",
        );
        let there = environments.entry(&server.environment).or_default();
        there.push(member.addr.to_string());
    }
    for (environment, there) in environments.iter().filter(|(_, there)| there.len() > 1) {
        diagnosis.error(
            Area::Namenode,
            format!(
                "{} are in the environment {environment}, whose servers are reimaged together",
                there.join(", ")
            ),
            "move all but one to other environments",
        );
    }
    for (ip, count) in hosts
        .iter()
        .filter(|(ip, count)| **count > 1 && !ip.is_loopback())
    {
        diagnosis.error(
            Area::Namenode,
            format!("{count} of them are on the same machine, {ip}"),
            "put each on a machine of its own, in different racks",
        );
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::group::{Condition, GroupMember};
    use harvestfs_protocol::ids::NodeId;
    use harvestfs_protocol::node::ServerDescription;

    use super::super::Severity;
    use super::*;

    fn member(id: u64, ip: [u8; 4]) -> GroupMember {
        GroupMember {
            id,
            name: "namenode".to_owned(),
            addr: (IpAddr::from(ip), 9310).into(),
            is_voter: true,
            acknowledged: Some(1_000_000),
            heard_ms: Some(10),
        }
    }

    fn group(members: Vec<GroupMember>) -> GroupStatus {
        GroupStatus {
            this: 1,
            condition: Condition::Member,
            leader: Some(1),
            term: 1,
            last: 1_000_000,
            last_term: 1,
            members,
            is_changing: false,
        }
    }

    fn node(name: &str, environment: &str, ip: [u8; 4]) -> NodeStatus {
        NodeStatus {
            server: ServerDescription {
                name: name.into(),
                rack: "r".into(),
                environment: environment.into(),
                machine_function: "f".into(),
                data_addr: (IpAddr::from(ip), 9311).into(),
            },
            ..super::super::cluster::tests::node(NodeId(1))
        }
    }

    fn found(group: &GroupStatus, nodes: &[NodeStatus]) -> Vec<(Severity, String)> {
        let mut diagnosis = Diagnosis::default();
        judge(group, nodes, &mut diagnosis);
        let findings = diagnosis.findings.into_iter();
        findings.map(|it| (it.severity, it.what)).collect()
    }

    #[test]
    fn one_alone_and_three_that_work_are_fine() {
        assert_eq!(found(&group(vec![member(1, [10, 0, 0, 1])]), &[]), []);
        let three = (1..=3).map(|n| member(n, [10, 0, 0, n as u8])).collect();
        let elsewhere = node("a", "e", [10, 0, 0, 9]);
        assert_eq!(found(&group(three), &[elsewhere]), []);
    }

    #[test]
    fn what_does_not_work_or_is_badly_placed_is_found() {
        let mut three: Vec<GroupMember> = (1..=3).map(|n| member(n, [10, 0, 0, n as u8])).collect();
        three[1].heard_ms = None;
        three[2].acknowledged = Some(5);
        let findings = found(&group(three.clone()), &[]);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings[0].0 == Severity::Error && findings[0].1.contains("10.0.0.2"));
        assert!(findings[1].0 == Severity::Warning && findings[1].1.contains("10.0.0.3"));

        three[2].is_voter = false;
        three[1].heard_ms = Some(5);
        let findings = found(&group(three), &[]);
        assert_eq!(
            findings.len(),
            2,
            "no vote, and an even number: {findings:?}"
        );

        let three = vec![
            member(1, [10, 0, 0, 1]),
            member(2, [10, 0, 0, 2]),
            member(3, [10, 0, 0, 2]),
        ];
        let nodes = [
            node("a", "search", [10, 0, 0, 1]),
            node("b", "search", [10, 0, 0, 2]),
        ];
        let findings = found(&group(three), &nodes);
        let errors = findings.iter().filter(|it| it.0 == Severity::Error).count();
        assert_eq!((findings.len(), errors), (5, 2), "{findings:?}");
    }
}
