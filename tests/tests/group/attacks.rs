//! Attacks on the namenodes of a group: with certificates of other parts, with messages that no leader can have sent,
//! with messages of a removed member, and by replaying recorded datagrams.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{Identity, Peer, Role};
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::peer::{
    Ballot, Memory, PeerAnswer, PeerCall, PeerReply, PeerRequest, Place,
};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{Endpoint, RpcClient, TransportError, TransportOptions};
use harvestfs_tests::{Cluster, ClusterOptions, wait_until};

use super::proxy::Proxy;
use super::{address, hand_over, remove, voters};

const NAMENODES: usize = 3;
const DEADLINE: Duration = Duration::from_secs(60);
/// Longer than an answer or a handshake takes on a loaded machine.
const ANSWERED_WITHIN: Duration = Duration::from_secs(15);
/// Time for which an attacker waits for a connection.
const LISTENED: Duration = Duration::from_secs(4);
/// Attacks, if the group elects a leader meanwhile.
const ATTEMPTS: usize = 3;
/// A term or record number far in the future.
const FUTURE: u64 = 1 << 40;

fn start() -> Cluster {
    Cluster::start(&ClusterOptions {
        namenodes: NAMENODES,
        datanodes: 1,
        ..ClusterOptions::default()
    })
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(future)
}

fn endpoint(identity: &Path, listen: SocketAddr) -> Endpoint {
    let identity = Identity::load(identity).expect("an identity");
    Endpoint::bind(listen, &identity, TransportOptions::default()).expect("an endpoint")
}

/// A client of a namenode, with a certificate.
struct Attacker {
    client: RpcClient<Request, Response, Notice>,
    from: u64,
    _endpoint: Endpoint,
}

impl Attacker {
    async fn connect(
        identity: &Path,
        namenode: SocketAddr,
        from: u64,
    ) -> Result<Self, TransportError> {
        let endpoint = endpoint(identity, ([127, 0, 0, 1], 0).into());
        let peer = Peer::new(Role::Namenode, "namenode").expect("a name");
        let connection = endpoint.connect(namenode, &peer, ANSWERED_WITHIN).await?;
        let (notices, _) = tokio::sync::mpsc::channel(1);
        Ok(Self {
            client: RpcClient::start(connection, notices).await?,
            from,
            _endpoint: endpoint,
        })
    }

    async fn ask(&self, request: PeerRequest) -> Result<PeerReply, FsError> {
        let call = PeerCall {
            from: self.from,
            to: None,
            memory: Memory {
                run: 1,
                writes: 1 << 20,
                writes_at_start: 1 << 20,
            },
            known: None,
            request,
        };
        let request = Request::Peer(call);
        let answer = self.client.call(&request, ANSWERED_WITHIN);
        match answer.await.expect("an answer, if only an error")? {
            Reply::Peer(PeerAnswer { reply, .. }) => Ok(reply),
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn ballot(term: u64, candidate: u64, is_elected: bool) -> Ballot {
    Ballot {
        term,
        candidate,
        is_elected,
    }
}

fn vote(term: u64, candidate: u64, last: Option<Place>) -> PeerRequest {
    PeerRequest::Vote {
        ballot: ballot(term, candidate, false),
        last,
        is_trial: false,
        // As if the leader had requested it, whichever that is.
        is_transfer: true,
    }
}

fn append(
    term: u64,
    candidate: u64,
    before: Place,
    records: Vec<Vec<u8>>,
    committed: Place,
) -> PeerRequest {
    PeerRequest::Append {
        ballot: ballot(term, candidate, true),
        before: Some(before),
        records,
        committed: Some(committed),
    }
}

/// The state of the group before an attack, to check that it has not changed.
#[derive(Debug, PartialEq)]
struct Before {
    term: u64,
    leader: u64,
}

impl Before {
    fn of(cluster: &Cluster) -> Self {
        let group = cluster.group();
        let number = |name: &str| group[name].as_u64().expect("a number");
        let (term, leader) = (number("term"), number("leader"));
        Self { term, leader }
    }
}

/// Checks that an attack changes nothing. `attack` returns how the group was when it began. On a machine that stalls,
/// the group may elect a leader without any attack, so one after which there is a later term is repeated: what it has
/// caused, it causes again.
fn changes_nothing(
    cluster: &mut Cluster,
    what: &str,
    mut attack: impl FnMut(&mut Cluster) -> Before,
) {
    let mut seen = Vec::new();
    for attempt in 1..=ATTEMPTS {
        let before = attack(cluster);
        cluster.output_of(&["fs", "mkdir", &format!("/after-{what}-{attempt}")]);
        let after = Before::of(cluster);
        let names = cluster.output_of(&["fs", "ls", "/"]);
        assert!(names.contains("before"), "{what}: {names}");
        if after == before {
            return;
        }
        assert!(after.term > before.term, "{what}: {before:?}, {after:?}");
        // This term would not come again: it was taken from the attack.
        assert!(after.term < FUTURE, "{what}: {before:?}, {after:?}");
        seen.push((before, after));
    }
    panic!("{what}: another term after each attack: {seen:?}");
}

#[test]
fn only_who_shows_the_certificate_of_a_namenode_is_heard_as_one() {
    let mut cluster = start();
    let stranger = Cluster::start(&ClusterOptions {
        datanodes: 0,
        ..ClusterOptions::default()
    });
    cluster.output_of(&["fs", "mkdir", "/before"]);
    changes_nothing(&mut cluster, "roles", |cluster| {
        let before = Before::of(cluster);
        let Before { term, leader } = before;
        let here = Place { term, record: 1 };
        let far = Place {
            term: FUTURE,
            record: FUTURE,
        };
        let requests = [
            vote(FUTURE, leader, Some(far)),
            append(FUTURE, leader, here, vec![vec![1; 20]], far),
            append(term, leader, here, vec![], here),
            PeerRequest::Transfer {
                ballot: ballot(term, leader, true),
                to: leader,
                last: None,
            },
            PeerRequest::Identify,
            PeerRequest::ReadSnapshot {
                record: None,
                offset: 0,
            },
            PeerRequest::TakeSnapshot {
                last: far,
                name: "namenode".to_owned(),
                addr: ([127, 0, 0, 1], 9).into(),
            },
        ];
        for part in ["client", "admin", "datanode-1"] {
            for namenode in cluster.namenodes() {
                let identity = cluster.path(part).join("identity");
                block_on(async {
                    let attacker = Attacker::connect(&identity, *namenode, leader).await;
                    let attacker = attacker.expect("it is of the cluster");
                    for request in &requests {
                        let answer = attacker.ask(request.clone()).await;
                        assert!(
                            matches!(&answer, Err(FsError::RoleDenied(why)) if why.contains("namenodes")),
                            "{part}: {request:?}: {answer:?}"
                        );
                    }
                });
            }
        }
        // A certificate of another authority is rejected before any request.
        let other = stranger.path("namenode/identity");
        for namenode in cluster.namenodes() {
            let attacker = block_on(Attacker::connect(&other, *namenode, leader));
            assert!(attacker.is_err(), "it was let in");
        }
        before
    });
}

#[test]
fn who_listens_at_a_namenodes_address_without_its_certificate_is_told_nothing() {
    let mut cluster = start();
    cluster.output_of(&["fs", "mkdir", "/before"]);
    let leader = cluster.leader();
    let away = leader % NAMENODES + 1;
    cluster.stop(&Cluster::namenode_name(away));
    let stranger = Cluster::start(&ClusterOptions {
        datanodes: 0,
        ..ClusterOptions::default()
    });
    let at = cluster.namenodes()[away - 1];
    let mut heard_ms = None;
    changes_nothing(&mut cluster, "masquerade", |cluster| {
        let before = Before::of(cluster);
        for identity in [
            cluster.path("datanode-1/identity"),
            stranger.path("namenode/identity"),
        ] {
            let came = block_on(async {
                let endpoint = endpoint(&identity, at);
                let mut came = 0;
                let listening = async {
                    while let Some(incoming) = endpoint.accept().await {
                        came += 1;
                        let established = incoming.establish().await;
                        assert!(established.is_err(), "somebody trusted it");
                    }
                };
                let _ = tokio::time::timeout(LISTENED, listening).await;
                came
            });
            assert!(came > 0, "nobody called");
        }
        let group = cluster.group();
        let members = group["members"].as_array().expect("members");
        let of_away = members
            .iter()
            .find(|it| it["addr"] == at.to_string().as_str());
        heard_ms = of_away.expect("a member")["heard_ms"].as_u64();
        before
    });
    assert!(
        heard_ms.is_none_or(|ms| ms >= LISTENED.as_millis() as u64),
        "{heard_ms:?}"
    );
    cluster.start_namenode_number(away);
}

/// Even with the certificate of a namenode.
#[test]
fn messages_that_no_leader_can_have_sent_and_those_of_one_that_was_removed_change_nothing() {
    let mut cluster = start();
    cluster.output_of(&["fs", "mkdir", "/before"]);
    let leader = cluster.leader();
    let removed = leader % NAMENODES + 1;
    let of_removed = address(&cluster, removed);
    let group = cluster.group();
    let members = group["members"].as_array().expect("members");
    let id_of = |addr: &str| {
        let member = members.iter().find(|it| it["addr"] == addr);
        member.and_then(|it| it["id"].as_u64()).expect("a member")
    };
    let (id, of_leader) = (id_of(&of_removed), id_of(&address(&cluster, leader)));
    let old_term = group["term"].as_u64().expect("a number");
    let last = group["last"].as_u64().expect("a number");
    remove(&cluster, removed, leader);
    cluster.stop(&Cluster::namenode_name(removed));
    let other = (1..=NAMENODES).find(|it| *it != leader && *it != removed);
    // The term in which it was a member is over.
    hand_over(&cluster, other.expect("one of three"));
    cluster.output_of(&["fs", "mkdir", "/without"]);
    let identity = cluster
        .path(&Cluster::namenode_name(removed))
        .join("identity");
    let old = Place {
        term: old_term,
        record: last,
    };
    let here = Place {
        term: old_term,
        record: 1,
    };
    changes_nothing(&mut cluster, "removed", |cluster| {
        let before = Before::of(cluster);
        assert!(before.term > old_term);
        let future = Place {
            term: before.term + 1,
            record: u64::MAX,
        };
        for number in (1..=NAMENODES).filter(|it| *it != removed) {
            let namenode = cluster.namenodes()[number - 1];
            block_on(async {
                let attacker = Attacker::connect(&identity, namenode, id).await;
                let attacker = attacker.expect("its certificate is good");
                // A message that it could have sent then, or one recorded from the leader then.
                for candidate in [id, of_leader] {
                    let request = append(old_term, candidate, old, vec![], old);
                    let answer = attacker.ask(request).await;
                    assert!(matches!(answer, Ok(PeerReply::Outvoted(_))), "{answer:?}");
                }
                let transfer = PeerRequest::Transfer {
                    ballot: ballot(old_term, of_leader, true),
                    to: id,
                    last: None,
                };
                // Whatever the answer, it has no effect.
                let _ = attacker.ask(transfer).await;
                // Its own log is older than the entry with which it left, whatever the term.
                for term in [old_term, before.term + 7, FUTURE] {
                    let answer = attacker.ask(vote(term, id, Some(old))).await;
                    assert_eq!(answer, Ok(PeerReply::Left), "term {term}");
                }
                for request in [
                    append(before.term, of_leader, future, vec![], here),
                    append(before.term, of_leader, here, vec![], future),
                    append(before.term, of_leader, here, vec![vec![255; 10]], here),
                    append(before.term, of_leader, here, vec![vec![]], here),
                ] {
                    let what = format!("{request:?}");
                    let answer = attacker.ask(request).await;
                    assert!(
                        matches!(answer, Err(FsError::Protocol(_))),
                        "{what}: {answer:?}"
                    );
                }
            });
        }
        before
    });
    assert_eq!(voters(&cluster).len(), NAMENODES - 1);
}

#[test]
fn datagrams_between_namenodes_that_are_played_again_later_do_nothing() {
    let mut cluster = start();
    // From here on, they communicate through recording proxies.
    let mut proxies = Vec::new();
    for number in 1..=NAMENODES {
        cluster.stop(&Cluster::namenode_name(number));
        let at = cluster.namenodes()[number - 1];
        let behind = cluster.start_namenode_behind(number);
        proxies.push(Proxy::start(at, behind));
    }
    let first = cluster.leader();
    cluster.output_of(&["fs", "mkdir", "/before"]);
    let next = first % NAMENODES + 1;
    hand_over(&cluster, next);
    cluster.output_of(&["fs", "mkdir", "/recorded"]);
    let recorded: usize = proxies.iter().map(Proxy::recorded).sum();
    assert!(recorded > 100, "{recorded} datagrams");

    // Replayed to their original receivers, on the original connections and on others.
    changes_nothing(&mut cluster, "live", |cluster| {
        let before = Before::of(cluster);
        for proxy in &proxies {
            assert!(proxy.replay() > 0);
        }
        before
    });
    // And to a namenode that has forgotten all connections.
    let (mut name, mut heard) = (String::new(), String::new());
    changes_nothing(&mut cluster, "restarted", |cluster| {
        let follower = cluster.leader() % NAMENODES + 1;
        name = Cluster::namenode_name(follower);
        cluster.kill(&name);
        proxies[follower - 1].lead_to(cluster.start_namenode_behind(follower));
        wait_until("it follows again", DEADLINE, || cluster.all_follow());
        let before = Before::of(cluster);
        heard = cluster.log(&name);
        assert!(proxies[follower - 1].replay() > 0);
        before
    });
    let said = cluster.log(&name);
    assert!(!said[heard.len()..].contains("begins anew"), "{said}");
}
