//! Requests of operators about upgrades: the version of the cluster, and the versions of its parts.

use serde::{Deserialize, Serialize};

use crate::version::{Version, Versions};

/// A request about the version of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UpgradeRequest {
    /// Reply: [`UpgradeReply::Status`].
    Status,
    /// Raise the version of the cluster to the newest one that its namenodes and datanodes have. Refused
    /// while one of them has an older one. Reply: [`UpgradeReply::Status`].
    Finish,
    /// Write a record that exists since the next version. Reply: [`UpgradeReply::Probes`]. Always the last variant;
    /// otherwise the two builds would number the others differently.
    #[cfg(feature = "next-version")]
    Probe,
}

/// Replies to [`UpgradeRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UpgradeReply {
    /// The version of the cluster, and those of its parts.
    Status(Box<UpgradeStatus>),
    /// Number of records of the next version. Always the last variant.
    #[cfg(feature = "next-version")]
    Probes(u64),
}

/// The version of the cluster, and those of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeStatus {
    /// The version of the cluster.
    pub cluster: Version,
    /// The newest version that any namenode or datanode has: the one to which `finish` raises the cluster.
    pub newest: Version,
    /// The namenodes of the group.
    pub namenodes: Vec<UpgradePart>,
    /// The datanodes that ever registered and were not removed.
    pub datanodes: Vec<UpgradePart>,
    /// The clients that are connected to the namenode.
    pub clients: Vec<UpgradePart>,
    /// Why `finish` is refused, if it is.
    pub missing: Vec<Missing>,
}

/// A part of the cluster and the release that it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradePart {
    /// Its server, or the address at which it listens; for a client, its certificate and its address.
    pub name: String,
    /// Its release, if known.
    pub release: Option<String>,
    /// The versions that it has, if known.
    pub versions: Option<Versions>,
    /// Whether it answers or is connected.
    pub is_live: bool,
}

/// A part that keeps the version of the cluster from being raised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// The part, such as `the datanode dn3`.
    pub part: String,
    /// The reason, such as `it has 12`.
    pub reason: String,
}

impl UpgradeStatus {
    /// Builds the status, and finds what is missing: every namenode, and every live datanode, must have the newest
    /// version. A datanode that is down is not waited for: it is refused if it returns with a release that is too
    /// old.
    #[must_use]
    pub fn of(
        cluster: Version,
        namenodes: Vec<UpgradePart>,
        datanodes: Vec<UpgradePart>,
        clients: Vec<UpgradePart>,
    ) -> Self {
        let known = namenodes.iter().chain(&datanodes);
        let known = known.filter_map(|it| it.versions.map(|versions| versions.newest));
        let newest = known.max().unwrap_or(cluster).max(cluster);
        let of_namenodes = namenodes.iter().map(|it| ("namenode", it));
        let live = datanodes.iter().filter(|it| it.is_live);
        let parts = of_namenodes.chain(live.map(|it| ("datanode", it)));
        let missing = parts.filter_map(|(kind, part)| {
            let reason = match part.versions.filter(|_| part.is_live) {
                None => "it does not answer".to_owned(),
                Some(versions) if versions.newest < newest => match &part.release {
                    Some(release) => format!("it runs {release}, with version {versions}"),
                    None => format!("it has version {versions}"),
                },
                Some(_) => return None,
            };
            let part = format!("the {kind} {}", part.name);
            Some(Missing { part, reason })
        });
        let missing = missing.collect();
        Self {
            cluster,
            newest,
            namenodes,
            datanodes,
            clients,
            missing,
        }
    }

    /// Whether an upgrade is in progress: parts are of different releases, or `finish` has yet to be called.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.newest > self.cluster
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, newest: Option<u32>, is_live: bool) -> UpgradePart {
        UpgradePart {
            name: name.to_owned(),
            release: newest.map(|it| format!("r{it}")),
            versions: newest.map(|newest| Versions {
                newest: Version(newest),
                oldest: Version(12),
            }),
            is_live,
        }
    }

    fn of(namenodes: Vec<UpgradePart>, datanodes: Vec<UpgradePart>) -> UpgradeStatus {
        let clients = vec![part("client", Some(20), true)];
        UpgradeStatus::of(Version(12), namenodes, datanodes, clients)
    }

    #[test]
    fn nothing_is_missing_when_all_have_the_newest() {
        let all_old = of(vec![part("a", Some(12), true)], vec![]);
        assert!(!all_old.is_under_way());
        assert_eq!((all_old.newest, all_old.missing), (Version(12), vec![]));
        let all_new = of(
            vec![part("a", Some(13), true), part("b", Some(13), true)],
            vec![
                part("dn1", Some(13), true),
                part("dn2", Some(12), false),
                part("dn3", None, false),
            ],
        );
        assert!(all_new.is_under_way());
        assert_eq!((all_new.newest, all_new.missing), (Version(13), vec![]));
    }

    #[test]
    fn what_is_behind_or_does_not_answer_is_named() {
        let mixed = of(
            vec![
                part("a", Some(13), true),
                part("b", Some(12), true),
                part("c", Some(13), false),
                part("d", None, false),
            ],
            vec![part("dn1", Some(12), true), part("dn2", Some(13), true)],
        );
        let named: Vec<&str> = mixed.missing.iter().map(|it| it.part.as_str()).collect();
        assert_eq!(
            named,
            [
                "the namenode b",
                "the namenode c",
                "the namenode d",
                "the datanode dn1"
            ]
        );
        assert_eq!(mixed.missing[0].reason, "it runs r12, with version 12");
        assert_eq!(mixed.missing[1].reason, "it does not answer");
    }

    #[test]
    fn a_newer_datanode_alone_makes_the_namenodes_the_ones_that_are_missing() {
        let status = of(
            vec![part("a", Some(12), true)],
            vec![part("dn1", Some(13), true)],
        );
        assert_eq!(status.newest, Version(13));
        assert_eq!(status.missing.len(), 1);
        assert_eq!(status.missing[0].part, "the namenode a");
    }
}
