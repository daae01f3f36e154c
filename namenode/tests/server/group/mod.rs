//! Groups of namenodes.

mod founding;
mod members;
mod repeated;
mod rolled_back;
mod seen;
mod strangers;

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use harvestfs_namenode::consensus::{Member, MemberId};
use harvestfs_namenode::server::{
    FormatOptions, GroupOptions, Namenode, NamenodeOptions, format, format_outside,
};
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::{GroupRequest, GroupStatus};
use harvestfs_protocol::identity::{CertificateAuthority, Peer, Role};
use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::meta::{Notice, OpenSession};
use harvestfs_protocol::rpc::{Reply, Request};
use harvestfs_protocol::transport::{Endpoint, RpcClient, TransportOptions};
use harvestfs_protocol::types::Timestamp;
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::harness::{Client, Link, create, format_options, meta};

const ROOT: InodeId = InodeId::ROOT;
/// An election takes less than a second on an idle machine.
const ELECTED_WITHIN: Duration = Duration::from_secs(30);

struct Group {
    authority: CertificateAuthority,
    dir: TempDir,
    addrs: Vec<SocketAddr>,
    namenodes: Vec<Option<Namenode>>,
    session_timeout: Option<Duration>,
}

impl Group {
    /// With addresses for this many namenodes, none of which is made.
    fn of_addresses(count: usize) -> Self {
        // Held together, so that they differ, and free again when they are dropped.
        let sockets: Vec<UdpSocket> = (0..count)
            .map(|_| UdpSocket::bind("127.0.0.1:0").unwrap())
            .collect();
        let addrs = sockets.iter().map(|it| it.local_addr().unwrap()).collect();
        drop(sockets);
        Self {
            authority: CertificateAuthority::in_memory().unwrap(),
            dir: tempfile::tempdir().unwrap(),
            addrs,
            namenodes: (0..count).map(|_| None).collect(),
            session_timeout: None,
        }
    }

    async fn new(count: usize) -> Self {
        let mut group = Self::made(count);
        for at in 0..count {
            group.start(at).await;
        }
        group
    }

    /// Made together, as by `init cluster`, and not started.
    fn made(count: usize) -> Self {
        let group = Self::of_addresses(count);
        let now = Timestamp::now();
        for at in 0..count {
            let options = FormatOptions {
                group: Some(GroupOptions {
                    this: id(at),
                    members: group.members(),
                    now,
                }),
                ..format_options()
            };
            format(&group.data_dir(at), &options).unwrap();
        }
        group
    }

    fn members(&self) -> BTreeMap<MemberId, Member> {
        let member = |(at, addr): (usize, &SocketAddr)| {
            let member = Member {
                name: "nn".to_owned(),
                addr: *addr,
            };
            (id(at), member)
        };
        self.addrs.iter().enumerate().map(member).collect()
    }

    fn data_dir(&self, at: usize) -> PathBuf {
        self.dir.path().join(format!("nn-{at}"))
    }

    fn options(&self, at: usize) -> NamenodeOptions {
        let validity = Duration::from_secs(3600);
        let identity = (self.authority)
            .issue(Role::Namenode, "nn", validity)
            .unwrap();
        let mut options = NamenodeOptions::new(self.data_dir(at), self.addrs[at], identity);
        options.segment_bytes = 4 << 20;
        options.tick = Duration::from_millis(10);
        // Clients leave without notice here, and what they may have cached holds changes back until their leases run
        // out.
        options.lease = Duration::from_millis(300);
        if let Some(timeout) = self.session_timeout {
            options.session_timeout = timeout;
        }
        options
    }

    async fn start(&mut self, at: usize) {
        let options = self.options(at);
        self.namenodes[at] = Some(Namenode::start(options).await.unwrap());
    }

    async fn kill(&mut self, at: usize) {
        self.namenodes[at].take().unwrap().kill().await.unwrap();
    }

    /// Makes and starts a namenode that is to be added to the group.
    async fn start_outside(&mut self, at: usize) {
        let options = format_options();
        let dir = self.data_dir(at);
        format_outside(&dir, options.cluster, options.segment_bytes).unwrap();
        self.start(at).await;
    }

    /// Makes a request to the leader, as an operator.
    async fn admin(&self, request: AdminRequest) -> Result<AdminReply, FsError> {
        let deadline = tokio::time::Instant::now() + ELECTED_WITHIN;
        loop {
            for at in 0..self.addrs.len() {
                if self.namenodes[at].is_none() {
                    continue;
                }
                let Some((link, _notices)) = self.link(at, Role::Admin, "operator").await else {
                    continue;
                };
                let asked = link.try_ask(Request::Admin(request.clone()));
                match tokio::time::timeout(Duration::from_secs(20), asked).await {
                    // Every one of them answers which members there are.
                    Ok(Ok(Ok(Reply::Admin(AdminReply::Group(group)))))
                        if group.leader != Some(group.this) => {}
                    Ok(Ok(Ok(Reply::Admin(reply)))) => return Ok(reply),
                    Ok(Ok(Err(FsError::NotLeader { .. })) | Err(_)) | Err(_) => {}
                    Ok(Ok(Err(error))) => return Err(error),
                    other => panic!("unexpected {other:?}"),
                }
            }
            assert!(tokio::time::Instant::now() < deadline, "none leads");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn group(&self, request: GroupRequest) -> Result<AdminReply, FsError> {
        self.admin(AdminRequest::Group(request)).await
    }

    async fn list(&self) -> GroupStatus {
        match self.group(GroupRequest::List).await {
            Ok(AdminReply::Group(status)) => status,
            other => panic!("unexpected {other:?}"),
        }
    }

    /// The last record that one of them has acknowledged to the leader.
    async fn acknowledged(&self, at: usize) -> Option<u64> {
        let members = self.list().await.members;
        let member = members.iter().find(|it| it.addr == self.addrs[at]);
        member.and_then(|it| it.acknowledged)
    }

    /// Returns the index of the leader.
    async fn leader(&self) -> usize {
        let deadline = tokio::time::Instant::now() + ELECTED_WITHIN;
        loop {
            let status = self.list().await;
            let leads = status
                .members
                .iter()
                .find(|it| Some(it.id) == status.leader);
            if let Some(leads) = leads {
                return self.addrs.iter().position(|it| *it == leads.addr).unwrap();
            }
            // A namenode that has not taken part in an election yet answered.
            assert!(tokio::time::Instant::now() < deadline, "none leads");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// A client of the leader, and the leader's index.
    async fn client(&self, name: &str, resume: Option<SessionId>) -> (Client, usize) {
        let deadline = tokio::time::Instant::now() + ELECTED_WITHIN;
        loop {
            for at in 0..self.addrs.len() {
                if self.namenodes[at].is_some()
                    && let Some(client) = self.try_client(at, name, resume).await
                {
                    return (client, at);
                }
            }
            assert!(tokio::time::Instant::now() < deadline, "none leads");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn link(
        &self,
        at: usize,
        role: Role,
        name: &str,
    ) -> Option<(Link, mpsc::Receiver<Notice>)> {
        let validity = Duration::from_secs(3600);
        let identity = self.authority.issue(role, name, validity).unwrap();
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let endpoint = Endpoint::bind(local, &identity, TransportOptions::default()).unwrap();
        let namenode = Peer::new(Role::Namenode, "nn").unwrap();
        let deadline = Duration::from_secs(2);
        let connection = endpoint.connect(self.addrs[at], &namenode, deadline).await;
        let (sender, notices) = mpsc::channel(1_024);
        let rpc = RpcClient::start(connection.ok()?, sender).await.ok()?;
        Some((Link::new(rpc, endpoint), notices))
    }

    async fn try_client(&self, at: usize, name: &str, resume: Option<SessionId>) -> Option<Client> {
        let (link, notices) = self.link(at, Role::Client, name).await?;
        let open = Request::OpenSession(OpenSession {
            resume,
            holds: vec![],
            delegations: None,
            seen: None,
        });
        // A leader that lost its majority answers nothing.
        let answer = tokio::time::timeout(Duration::from_secs(2), link.try_ask(open)).await;
        match answer.ok()? {
            Ok(Ok(Reply::SessionOpened(opened))) => {
                Some(Client::new(link, notices, opened.session))
            }
            Ok(Err(FsError::NotLeader { .. })) | Err(_) => None,
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn id(at: usize) -> MemberId {
    MemberId(at as u64 + 1)
}

#[tokio::test]
async fn what_was_acknowledged_is_there_when_the_leader_is_killed() {
    let mut group = Group::new(3).await;
    let (mut alice, mut leader) = group.client("alice", None).await;
    let mut names = Vec::new();
    for round in 0..3 {
        for number in 0..20 {
            let name = format!("file-{round}-{number}");
            alice.create(ROOT, &name).await;
            names.push(name);
        }
        group.kill(leader).await;
        let (session, sequence) = (alice.session, alice.last_sequence());
        let killed = leader;
        (alice, leader) = group.client("alice", Some(session)).await;
        alice.set_sequence(sequence);
        assert_ne!(leader, killed);
        assert_eq!(alice.session, session, "the session goes on");
        for name in &names {
            alice.lookup(ROOT, name).await.unwrap();
        }
        group.start(killed).await;
    }
}

/// A leader hears nobody while it reaches no majority: sessions do not count as silent then.
#[tokio::test]
async fn sessions_outlive_a_time_without_a_majority() {
    let mut group = Group::made(3);
    group.session_timeout = Some(Duration::from_millis(1_500));
    for at in 0..3 {
        group.start(at).await;
    }
    let (mut alice, leader) = group.client("alice", None).await;
    alice.create(ROOT, "before").await;
    for at in (0..3).filter(|at| *at != leader) {
        group.kill(at).await;
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    group.start((leader + 1) % 3).await;
    let (session, sequence) = (alice.session, alice.last_sequence());
    // It panics when the session is over.
    let (mut alice, _) = group.client("alice", Some(session)).await;
    assert_eq!(alice.session, session);
    alice.set_sequence(sequence);
    alice.create(ROOT, "after").await;
}

#[tokio::test]
async fn what_only_a_leader_without_the_others_wrote_is_gone_when_it_comes_back() {
    let mut group = Group::new(3).await;
    let (mut alice, first) = group.client("alice", None).await;
    alice.create(ROOT, "agreed").await;
    let others: Vec<usize> = (0..3).filter(|at| *at != first).collect();
    for &at in &others {
        group.kill(at).await;
    }
    // It writes the change to its journal, but can never report it as done.
    let call = alice.number(create(ROOT, "alone"));
    let answer = tokio::time::timeout(Duration::from_secs(1), meta(&alice.link, call)).await;
    assert!(!matches!(answer, Ok(Ok(_))), "nobody agreed: {answer:?}");
    group.kill(first).await;
    for &at in &others {
        group.start(at).await;
    }
    let (mut bob, _) = group.client("bob", None).await;
    bob.create(ROOT, "without-it").await;
    group.start(first).await;
    bob.create(ROOT, "with-it").await;
    // First the leader, whichever it is, then the first one.
    for _ in 0..20 {
        let (mut carol, leader) = group.client("carol", None).await;
        for (name, is_there) in [
            ("agreed", true),
            ("alone", false),
            ("without-it", true),
            ("with-it", true),
        ] {
            let found = carol.lookup(ROOT, name).await;
            assert_eq!(found.is_ok(), is_there, "{name} on {leader}: {found:?}");
        }
        if leader == first {
            return;
        }
        // It may be refused as long as the namenode has not received everything.
        let to = GroupRequest::Transfer(Some(group.addrs[first]));
        let asked = group.admin(AdminRequest::Group(to)).await;
        println!("{first} is to lead instead of {leader}: {asked:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    panic!("the first one was never elected again");
}
