//! The version of the cluster: which versions its parts support, and raising it.

use std::collections::BTreeMap;

use harvestfs_protocol::admin::AdminReply;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::types::Timestamp;
use harvestfs_protocol::upgrade::{
    Missing, UpgradePart, UpgradeReply, UpgradeRequest, UpgradeStatus,
};
use harvestfs_protocol::version::{Release, Version, Versions};

use super::group::answers;
use super::{Connected, Owner};
use crate::consensus::{ClusterVersion, MemberId, Running};
use crate::engine::namespace::Command;
use crate::journal::Lsn;
use crate::server::metrics::Responder;

/// This program.
const THIS: Running = Running {
    release: Release::OURS,
    versions: Versions::OURS,
};

impl Owner {
    pub(super) fn upgrade_request(&mut self, request: UpgradeRequest, responder: Responder) {
        let result = match request {
            UpgradeRequest::Status => Ok(self.undurable.last()),
            UpgradeRequest::Finish => self.finish_upgrade(),
            #[cfg(feature = "next-version")]
            UpgradeRequest::Probe => {
                return match self.probe() {
                    Ok((probes, record)) => {
                        let reply = AdminReply::Upgrade(UpgradeReply::Probes(probes));
                        self.answer(responder, Ok(Reply::Admin(reply)), Some(record));
                    }
                    Err(error) => responder.send(&Err(error)),
                };
            }
        };
        match result {
            Ok(record) => {
                let status = UpgradeReply::Status(Box::new(self.upgrade_status()));
                let status = AdminReply::Upgrade(status);
                self.answer(responder, Ok(Reply::Admin(status)), record);
            }
            Err(error) => responder.send(&Err(error)),
        }
    }

    /// The status to show: as much of it as fits in a reply.
    fn upgrade_status(&self) -> UpgradeStatus {
        let clients = self.connections.values().filter(|it| it.session.is_some());
        let clients = clients.map(|client| {
            let name = format!("{} at {}", client.peer.name, client.ip);
            (name, client.running)
        });
        shown(self.servers_status(), clients)
    }

    /// All namenodes and datanodes, and what an upgrade waits for; without clients, since nothing waits for them.
    fn servers_status(&self) -> UpgradeStatus {
        UpgradeStatus::of(
            self.namespace.version(),
            self.namenode_parts(),
            self.datanode_parts(),
            Vec::new(),
        )
    }

    /// The newest version that a namenode or datanode supports.
    pub(super) fn newest_version(&self) -> Version {
        self.servers_status().newest
    }

    fn namenode_parts(&self) -> Vec<UpgradePart> {
        let group = self.log.group();
        let (status, others) = (group.status(), group.running());
        let members = status.members.iter().map(|member| {
            let running = if member.id == status.this {
                Some(THIS)
            } else {
                others.get(&MemberId(member.id)).copied()
            };
            part(member.addr.to_string(), running, answers(&status, member))
        });
        members.collect()
    }

    fn datanode_parts(&self) -> Vec<UpgradePart> {
        let nodes = self.cluster.nodes(self.clock.now_ms()).into_iter();
        let parts = nodes.map(|node| {
            let connection = self.node_connections.get(&node.node);
            let connected = connection.and_then(|id| self.connections.get(id));
            let running = connected.map(|it: &Connected| it.running);
            part(node.server.name, running, node.alive || connected.is_some())
        });
        parts.collect()
    }

    /// Raises the version of the cluster, if all parts support a newer one.
    fn finish_upgrade(&mut self) -> Result<Option<Lsn>, FsError> {
        let status = self.servers_status();
        if !status.is_under_way() {
            return Ok(self.undurable.last());
        }
        if !status.missing.is_empty() {
            let named = status.missing.iter().take(MISSING_NAMED_MAX);
            let named = named.map(|it| format!("{}: {}", it.part, it.reason));
            let named: Vec<String> = named.collect();
            let left = status.missing.len() - named.len();
            let more = if left == 0 {
                String::new()
            } else {
                format!("; and {left} more")
            };
            return Err(FsError::InvalidArgument(format!(
                "version {} stays: not all parts have version {}: {}{more}",
                status.cluster,
                status.newest,
                named.join("; ")
            )));
        }
        let before = self.namespace.version();
        let command = Command::RaiseVersion {
            version: status.newest,
            now: Timestamp::now(),
        };
        let (_, record) = self.execute(&command, true)?;
        self.raised = Some((record, before));
        self.note_version();
        tracing::info!(%before, version = %status.newest, record, "the version of the cluster is raised");
        Ok(Some(record))
    }

    /// The version of the cluster for peers that write in it: a raised one only once its record is durable.
    pub(super) fn settled_version(&self) -> Version {
        self.cluster_version().settled(self.log.commits().last())
    }

    fn cluster_version(&self) -> ClusterVersion {
        ClusterVersion {
            newest: self.namespace.version(),
            raised: self.raised,
        }
    }

    /// From here on, namenodes that do not support the version of the cluster are refused.
    pub(super) fn note_version(&self) {
        self.log.set_cluster_version(self.cluster_version());
    }

    /// Writes a record of the next version.
    #[cfg(feature = "next-version")]
    fn probe(&mut self) -> Result<(u64, Lsn), FsError> {
        let command = Command::Probe {
            now: Timestamp::now(),
        };
        let (_, record) = self.execute(&command, true)?;
        Ok((self.namespace.probes(), record))
    }
}

/// Maximum number of parts that a refusal names.
const MISSING_NAMED_MAX: usize = 16;

// With the longest names, all of these together fill about half of a reply.
/// Maximum number of datanodes shown individually.
const DATANODES_SHOWN_MAX: usize = 2_000;
/// Maximum number of clients shown individually; those of one certificate on one machine are shown together.
const CLIENTS_SHOWN_MAX: usize = 1_000;
/// Maximum number of parts shown as missing.
const MISSING_SHOWN_MAX: usize = 1_000;
/// Maximum number of lines, one per release and version, for parts that are not shown individually.
const OTHERS_SHOWN_MAX: usize = 16;

/// Adds clients, of which there may be tens of thousands, to a status, and limits it to as many parts as fit in a
/// reply.
fn shown(all: UpgradeStatus, clients: impl Iterator<Item = (String, Running)>) -> UpgradeStatus {
    let newest = all.newest;
    let mut grouped: BTreeMap<_, (UpgradePart, usize)> = BTreeMap::new();
    for (name, running) in clients {
        let key = (
            name.clone(),
            running.release.encode(),
            order(running.versions),
        );
        let new = || (part(name, Some(running), true), 0);
        grouped.entry(key).or_insert_with(new).1 += 1;
    }
    let clients = grouped.into_values().map(|(mut part, number)| {
        if number > 1 {
            part.name = format!("{} ({number})", part.name);
        }
        (part, number)
    });
    let datanodes = all.datanodes.into_iter().map(|it| (it, 1));
    let mut missing = all.missing;
    if missing.len() > MISSING_SHOWN_MAX {
        let left = missing.len() - MISSING_SHOWN_MAX;
        missing.truncate(MISSING_SHOWN_MAX);
        missing.push(Missing {
            part: format!("{left} more parts"),
            reason: format!("they do not have version {newest} either, or do not answer"),
        });
    }
    UpgradeStatus {
        datanodes: fitting(datanodes.collect(), newest, DATANODES_SHOWN_MAX),
        clients: fitting(clients.collect(), newest, CLIENTS_SHOWN_MAX),
        missing,
        ..all
    }
}

/// Limits a list of parts, each of which represents the given number of parts, to `most`. Those that lack the newest
/// version come first; those beyond the limit are replaced with their number per release.
fn fitting(mut parts: Vec<(UpgradePart, usize)>, newest: Version, most: usize) -> Vec<UpgradePart> {
    let mut others: BTreeMap<_, (UpgradePart, usize)> = BTreeMap::new();
    if parts.len() > most {
        parts.sort_by_key(|(it, _)| {
            let has_newest = it.versions.is_some_and(|it| it.newest >= newest);
            has_newest || !it.is_live
        });
        for (part, number) in parts.split_off(most) {
            let mut key = Some((part.release.clone(), part.versions.map(order), part.is_live));
            if others.len() >= OTHERS_SHOWN_MAX && !others.contains_key(&key) {
                key = None;
            }
            let of_any_release = UpgradePart {
                name: String::new(),
                release: None,
                versions: None,
                is_live: true,
            };
            let first = if key.is_some() { part } else { of_any_release };
            others.entry(key).or_insert((first, 0)).1 += number;
        }
    }
    let others = others.into_values().map(|(part, number)| UpgradePart {
        name: format!("{number} more"),
        ..part
    });
    parts.into_iter().map(|(it, _)| it).chain(others).collect()
}

fn order(versions: Versions) -> (Version, Version) {
    (versions.newest, versions.oldest)
}

fn part(name: String, running: Option<Running>, is_live: bool) -> UpgradePart {
    UpgradePart {
        name,
        release: running.map(|it| it.release.to_string()),
        versions: running.map(|it| it.versions),
        is_live,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr};

    use harvestfs_protocol::codec::MAX_HEADER_BYTES;
    use harvestfs_protocol::identity::MAX_NAME_BYTES;
    use harvestfs_protocol::limits::SESSIONS_MAX;
    use harvestfs_protocol::version::RELEASE_BYTES;

    use super::*;

    const OLD: Version = Version(u32::MAX - 1);
    const NEW: Version = Version(u32::MAX);

    /// Something that runs, as long as it may be.
    fn running(newest: Version, number: usize) -> Running {
        Running {
            release: Release::cut(&format!("{number:0>RELEASE_BYTES$}")),
            versions: Versions {
                newest,
                oldest: OLD,
            },
        }
    }

    fn longest_name(number: usize) -> String {
        format!("{number:x>MAX_NAME_BYTES$}")
    }

    fn number_of(parts: &[UpgradePart]) -> usize {
        let more = |it: &UpgradePart| it.name.strip_suffix(" more")?.parse().ok();
        parts.iter().map(|it| more(it).unwrap_or(1)).sum()
    }

    #[test]
    fn the_largest_cluster_fits_into_an_answer() {
        const DATANODES: usize = 20_000;
        let datanode = |number: usize| {
            // The very last one has the newest version, and most of the first are behind it.
            let newest = if number < DATANODES - 1 { OLD } else { NEW };
            part(longest_name(number), Some(running(newest, 0)), true)
        };
        let datanodes = (0..DATANODES).map(datanode).collect();
        let all = UpgradeStatus::of(OLD, Vec::new(), datanodes, Vec::new());
        assert_eq!(all.missing.len(), DATANODES - 1);
        // Each of another name, at the address that is longest in letters, with a release that is made up.
        let ip = IpAddr::from([0xffff; 8]);
        let client = |number| {
            let name = format!("{} at {ip}", longest_name(number));
            (name, running(NEW, number))
        };
        let shown = shown(all, (0..SESSIONS_MAX).map(client));
        assert_eq!(number_of(&shown.clients), SESSIONS_MAX);
        assert_eq!(number_of(&shown.datanodes), DATANODES);
        let last = shown.missing.last().expect("all but one are missing");
        assert_eq!(
            last.part,
            format!("{} more parts", DATANODES - 1 - MISSING_SHOWN_MAX)
        );
        let reply = AdminReply::Upgrade(UpgradeReply::Status(Box::new(shown)));
        let reply: Result<Reply, FsError> = Ok(Reply::Admin(reply));
        let bytes = postcard::to_stdvec(&reply).expect("plain values are encoded");
        assert!(bytes.len() < MAX_HEADER_BYTES, "{} bytes", bytes.len());
    }

    #[test]
    fn those_are_shown_first_that_an_upgrade_waits_for() {
        let datanode = |number: usize| {
            let newest = if number == 7 { OLD } else { NEW };
            (part(number.to_string(), Some(running(newest, 0)), true), 1)
        };
        let names = |most| {
            let parts = fitting((0..10).map(datanode).collect(), NEW, most);
            let names: Vec<String> = parts.into_iter().map(|it| it.name).collect();
            names.join(" ")
        };
        assert_eq!(names(10), "0 1 2 3 4 5 6 7 8 9");
        assert_eq!(names(3), "7 0 1 7 more");
    }

    #[test]
    fn clients_of_one_certificate_and_machine_are_counted() {
        let ip = IpAddr::V6(Ipv6Addr::LOCALHOST);
        let all = UpgradeStatus::of(OLD, Vec::new(), Vec::new(), Vec::new());
        let client = |number: usize| {
            let newest = if number < 3 { OLD } else { NEW };
            (format!("alice at {ip}"), running(newest, 0))
        };
        let shown = shown(all, (0..4).map(client));
        let names: Vec<&str> = shown.clients.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["alice at ::1 (3)", "alice at ::1"]);
    }
}
