//! `harvestfs admin namenode recover`: lets one of several namenodes continue alone when most are lost.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use futures::future::join_all;
use harvestfs_protocol::group::GroupStatus;
use harvestfs_protocol::identity::{Identity, Peer, Role};
use harvestfs_protocol::transport::{Endpoint, TransportError, TransportOptions};

use super::link;
use crate::cluster::{Access, ClusterArgs};
use crate::init::NAMENODE_NAME;

/// How long a namenode that runs may take to answer, before another one goes on alone. Shorter than a connection may be
/// silent: that none came about in this time is the only sign that nothing runs there.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);
/// Namenodes that are asked: more than any group has, with those that it had.
const ASKED_MAX: usize = 64;

/// `harvestfs admin namenode recover`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs admin namenode recover --accept-loss /var/lib/harvestfs/namenode/data")]
pub struct RecoverAloneArgs {
    /// Go on with what this namenode has: what only the others had is lost.
    #[arg(long, required = true)]
    accept_loss: bool,
    /// Its data directory (`data` in `namenode.toml`). It must not run, and none of the others may run
    /// ever again.
    directory: PathBuf,
}

/// Runs `harvestfs admin namenode recover`, on the machine of the namenode.
///
/// # Errors
/// When it runs, or another one of its group does, or the directory is none of a namenode.
pub async fn run(cluster: &ClusterArgs, args: &RecoverAloneArgs) -> anyhow::Result<()> {
    check_stopped(cluster, &args.directory).await?;
    harvestfs_namenode::server::recover_alone(&args.directory)?;
    println!(
        "The namenode of {} is the only one of its group now. Start it; if it lacks what datanodes know, \
         it says so, and `harvestfs admin recover --accept-loss` ends that. Then add others with \
         `harvestfs admin namenode add`. None of the old ones may be \
         started again, but copies, which take part in nothing until they are added.",
        args.directory.display()
    );
    Ok(())
}

/// Refuses while another member of the group of a namenode answers: two groups would serve one cluster, and each
/// acknowledge what the other one does not have. What the directory names may be long gone, and others be in the group
/// instead: those of the configuration are asked, too, and those that any of them names.
async fn check_stopped(cluster: &ClusterArgs, directory: &Path) -> anyhow::Result<()> {
    let others = harvestfs_namenode::server::other_members(directory)?;
    if others.is_empty() {
        return Ok(());
    }
    let configured = match cluster.access("admin") {
        Err(error) if cluster.config_file().is_some() => return Err(error),
        access => access.ok(),
    };
    // `init` creates the identity next to the data.
    let own_directory = directory.join("../identity");
    let own = Identity::load(&own_directory).ok();
    let configured = configured.filter(|it| is_of_cluster(it, own.as_ref()));
    let (identity, namenodes) = match (configured, own) {
        // An operator's identity, to which a namenode reveals the members of its group.
        (Some(access), _) => (access.identity, access.config.namenodes),
        (None, Some(own)) => (own, Vec::new()),
        (None, None) => {
            eprintln!(
                "Whether other namenodes of the group run was not found out: there is no certificate in {}, and none \
                 that --data or --config names. See to it that none of them runs.",
                own_directory.display()
            );
            return Ok(());
        }
    };
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let endpoint = Endpoint::bind(any, &identity, TransportOptions::default())?;
    let configured = namenodes.into_iter();
    let mut names: BTreeMap<SocketAddr, String> = configured
        .map(|addr| (addr, NAMENODE_NAME.to_owned()))
        .collect();
    names.extend(others.into_iter().map(|(name, addr)| (addr, name)));
    let (asked, said) = ask_all(&endpoint, names).await;
    if let Some(refusal) = refusal(&said) {
        bail!(refusal);
    }
    let asked: Vec<String> = asked.iter().map(SocketAddr::to_string).collect();
    eprintln!("No namenode answers at {}.", asked.join(", "));
    Ok(())
}

/// Whether a configuration is of the cluster of a namenode with this certificate: by default, it is that of the cluster
/// of this user, if there is one.
fn is_of_cluster(access: &Access, own: Option<&Identity>) -> bool {
    own.is_none_or(|own| own.authority() == access.identity.authority())
}

/// What came of asking whether a namenode runs.
#[derive(Debug)]
enum Said {
    /// Nothing came back.
    Nothing,
    /// Who is in its group, as it knows.
    Group(GroupStatus),
    /// It answers, and does not say that.
    Something,
    /// It cannot be talked to.
    Error(TransportError),
}

impl Said {
    /// Whatever comes back is of something that runs there, and may be of the group: one of another release, or one that
    /// has no room for another connection, is.
    fn of_failed(error: TransportError) -> Self {
        match error {
            TransportError::Deadline { .. } => Self::Nothing,
            error => Self::Error(error),
        }
    }
}

/// Asks namenodes, by address and name, and those that they name. Returns who was asked, and what those said that run.
async fn ask_all(
    endpoint: &Endpoint,
    mut next: BTreeMap<SocketAddr, String>,
) -> (BTreeSet<SocketAddr>, Vec<(SocketAddr, Said)>) {
    let mut asked = BTreeSet::new();
    let mut running = Vec::new();
    while !next.is_empty() {
        asked.extend(next.keys().copied());
        let answers = next.into_iter().map(|(addr, name)| async move {
            let said = ask(endpoint, addr, name).await;
            (addr, said)
        });
        let answers = join_all(answers).await.into_iter();
        let answers = answers.filter(|(_, said)| !matches!(said, Said::Nothing));
        let answers: Vec<_> = answers.collect();
        let members = answers.iter().flat_map(|(_, said)| match said {
            Said::Group(group) => group.members.as_slice(),
            _ => &[],
        });
        // A namenode that listens on all addresses does not reveal the one at which it is reachable.
        let new = members.filter(|it| !it.addr.ip().is_unspecified() && !asked.contains(&it.addr));
        let room = ASKED_MAX.saturating_sub(asked.len());
        next = new
            .map(|it| (it.addr, it.name.clone()))
            .take(room)
            .collect();
        running.extend(answers);
    }
    (asked, running)
}

async fn ask(endpoint: &Endpoint, addr: SocketAddr, name: String) -> Said {
    let Ok(peer) = Peer::new(Role::Namenode, name) else {
        // No certificate has such a name.
        return Said::Nothing;
    };
    match endpoint.connect(addr, &peer, ANSWERS_WITHIN).await {
        Ok(connection) => {
            let group = link::group_of(connection).await;
            group.map_or(Said::Something, Said::Group)
        }
        Err(error) => Said::of_failed(error),
    }
}

/// Why none may go on alone, if one of those that were asked may be of its group and run.
fn refusal(said: &[(SocketAddr, Said)]) -> Option<String> {
    let running = said.iter().filter_map(|(addr, said)| {
        Some(match said {
            Said::Nothing => return None,
            Said::Group(group) if link::leads(group) => {
                format!("the namenode at {addr} is of the same group, and runs: it leads")
            }
            Said::Group(_) | Said::Something => {
                format!("the namenode at {addr} is of the same group, and runs")
            }
            Said::Error(error) => format!(
                "what is at {addr}, where a namenode of the same group was, cannot be asked, and may run: {error}"
            ),
        })
    });
    let running: Vec<String> = running.collect();
    if running.is_empty() {
        return None;
    }
    Some(format!(
        "{}. If most of its namenodes work, it needs no recovery: see `harvestfs admin namenode list`, and start this \
         one, or `harvestfs admin namenode add` it again. Otherwise stop those that still run first, for good: two \
         groups must not serve one cluster",
        running.join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::codec::WireError;
    use harvestfs_protocol::group::Condition;
    use harvestfs_protocol::identity::CertificateAuthority;
    use harvestfs_protocol::transport::CloseCode;
    use harvestfs_protocol::version::{Version, Versions};

    use super::*;

    fn at(port: u16) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, port).into()
    }

    fn closed(code: CloseCode) -> TransportError {
        TransportError::ClosedByPeer {
            code,
            reason: "1024 connections".to_owned(),
        }
    }

    #[test]
    fn only_silence_says_that_a_namenode_does_not_run() {
        let nothing = Said::of_failed(TransportError::Deadline {
            what: "connecting",
            deadline: ANSWERS_WITHIN,
        });
        assert_eq!(refusal(&[(at(1), nothing)]), None);
        for error in [
            closed(CloseCode::TOO_MANY_CONNECTIONS),
            closed(CloseCode::VERSION_MISMATCH),
            TransportError::Wire(WireError::Truncated { missing_bytes: 1 }),
            TransportError::PeerNotTrusted {
                reason: "of another authority".to_owned(),
            },
            TransportError::Lost {
                reason: "the peer was restarted".to_owned(),
            },
        ] {
            let refused = refusal(&[
                (at(1), Said::Nothing),
                (at(2), Said::of_failed(error.clone())),
            ]);
            let refused = refused.unwrap_or_else(|| panic!("{error} is an answer"));
            assert!(refused.contains("127.0.0.1:2"), "{refused}");
            assert!(!refused.contains("127.0.0.1:1,"), "{refused}");
        }
    }

    #[test]
    fn one_that_leads_is_named_as_such() {
        let group = |leader| GroupStatus {
            this: 7,
            condition: Condition::Member,
            leader,
            term: 3,
            last: 1,
            last_term: 3,
            members: Vec::new(),
            is_changing: false,
        };
        let said = [
            (at(1), Said::Group(group(None))),
            (at(2), Said::Group(group(Some(7)))),
            (at(3), Said::Something),
        ];
        let refused = refusal(&said).expect("three run");
        for named in [
            "127.0.0.1:1 is of the same group, and runs;",
            "127.0.0.1:2 is of the same group, and runs: it leads;",
            "127.0.0.1:3 is of the same group, and runs.",
        ] {
            assert!(refused.contains(named), "{refused}");
        }
    }

    #[tokio::test]
    async fn namenodes_of_another_release_or_authority_are_found_to_run() {
        let validity = Duration::from_secs(3600);
        let ours = CertificateAuthority::in_memory().expect("an authority");
        let other = CertificateAuthority::in_memory().expect("an authority");
        let bind = |authority: &CertificateAuthority, role, options| {
            let identity = authority.issue(role, NAMENODE_NAME, validity);
            Endpoint::bind(at(0), &identity.expect("a name"), options).expect("a port")
        };
        let next = Version(Version::NEWEST.0 + 1);
        let newer = TransportOptions {
            versions: Versions {
                newest: next,
                oldest: next,
            },
            ..TransportOptions::default()
        };
        let stranger = bind(&other, Role::Namenode, TransportOptions::default());
        let newer = bind(&ours, Role::Namenode, newer);
        let asking = bind(&ours, Role::Admin, TransportOptions::default());
        let addresses = [&stranger, &newer].map(|it| it.local_addr().expect("bound"));
        for endpoint in [stranger, newer] {
            tokio::spawn(async move {
                while let Some(incoming) = endpoint.accept().await {
                    drop(incoming.establish().await);
                }
            });
        }
        let names = addresses.map(|it| (it, NAMENODE_NAME.to_owned()));
        let (asked, running) = ask_all(&asking, BTreeMap::from(names)).await;
        assert_eq!(asked, BTreeSet::from(addresses));
        assert_eq!(running.len(), 2, "{running:?}");
    }
}
