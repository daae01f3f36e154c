//! The connection of an operator to the namenode.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use futures::future::{join_all, select_ok};
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::{Condition, GroupRequest, GroupStatus};
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::limits::NAMENODES_TOLD_MAX;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{Connection, Endpoint, RpcClient, RpcError, TransportOptions};
use harvestfs_protocol::upgrade::UpgradeRequest;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::DEADLINE;
use super::no_leader::{Asked, NoLeader, Standing};
use crate::cluster::{Access, ClusterArgs};
use crate::init::NAMENODE_NAME;

const DIAL_DEADLINE: Duration = Duration::from_secs(10);
/// One that led a moment ago may be gone with its machine.
const LEADER_DIAL_DEADLINE: Duration = Duration::from_secs(1);
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// How long an operator's command waits until one of several namenodes leads: as long as programs on a mount. One that
/// has many files takes a while from its start on.
const ELECTION_DEADLINE: Duration = Duration::from_secs(60);
/// Whoever wants to know what is wrong does not wait so long.
const DIAGNOSIS_DEADLINE: Duration = Duration::from_secs(10);
const ELECTION_PAUSE: Duration = Duration::from_millis(100);
/// When an operator is told what a command waits for.
const TOLD_AFTER: Duration = Duration::from_secs(5);
/// A request that takes longer: whether the namenode answers anything is asked beside it, this often.
const LOOK_PAUSE: Duration = Duration::from_secs(3);
/// One that leads answers within that time who the members are. One that led, and does not reach the others any more,
/// answers nothing.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);
/// The same of one that need not run.
const STANDING_DEADLINE: Duration = Duration::from_secs(2);
/// One that is connected says so soon who the members are; nothing is lost when it does not.
const LEARN_DEADLINE: Duration = Duration::from_secs(1);
const GROUP_POLL: Duration = Duration::from_millis(20);

type Rpc = RpcClient<Request, Response, Notice>;

/// A connection to the namenode that leads.
pub struct AdminLink {
    /// To the one that answered last.
    rpc: Mutex<Rpc>,
    namenodes: Mutex<Namenodes>,
    namenode: Peer,
    endpoint: Endpoint,
}

/// The namenodes that are known. Those of the configuration stay known whatever is said: a group may be made anew on one
/// of their addresses.
struct Namenodes {
    configured: Vec<SocketAddr>,
    /// The members, as one of the newest term said, and those that others say lead.
    told: Vec<SocketAddr>,
    /// The term of the one that said it: one that left the group tells of what was.
    term: u64,
}

impl Namenodes {
    fn new(configured: Vec<SocketAddr>) -> Self {
        Self {
            configured,
            told: Vec::new(),
            term: 0,
        }
    }

    /// All, each once.
    fn all(&self) -> Vec<SocketAddr> {
        let mut all = self.configured.clone();
        let told = self.told.iter();
        all.extend(told.filter(|it| !self.configured.contains(it)));
        all
    }

    fn learn(&mut self, group: &GroupStatus) {
        // One that listens on all addresses says nothing about where it is reached.
        let members = group.members.iter().map(|it| it.addr);
        let members = members.filter(|it| !it.ip().is_unspecified());
        if group.condition != Condition::Member {
            // It knows only who they were.
            return members.for_each(|it| self.hinted(it));
        }
        if group.term < self.term {
            return;
        }
        self.term = group.term;
        self.told = members.take(NAMENODES_TOLD_MAX).collect();
    }

    fn hinted(&mut self, namenode: SocketAddr) {
        let is_known = self.configured.contains(&namenode) || self.told.contains(&namenode);
        if !is_known && self.told.len() < NAMENODES_TOLD_MAX {
            self.told.push(namenode);
        }
    }
}

/// Runs what an operator asks for, with a request id for logs.
///
/// # Errors
/// What it fails with; when there can be no runtime.
pub fn block_on<T>(asking: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(RequestId::random().scope(asking))
}

impl AdminLink {
    /// Connects to the cluster, asks, and takes leave.
    ///
    /// # Errors
    /// When the namenode cannot be reached; what asking fails with.
    pub async fn with<T>(
        cluster: &ClusterArgs,
        ask: impl AsyncFnOnce(&Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let link = Self::connect(&cluster.access("admin")?).await?;
        let result = ask(&link).await;
        link.close().await;
        result
    }

    /// Connects to the first namenode that answers, and asks it for the others: the configuration need not name the one
    /// that leads, or that leads when the command is half done.
    pub async fn connect(access: &Access) -> anyhow::Result<Self> {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let endpoint = Endpoint::bind(any, &access.identity, TransportOptions::default())?;
        let namenode = Peer::new(Role::Namenode, NAMENODE_NAME)?;
        let namenodes = access.config.namenodes.clone();
        let rpc = dial_one(&endpoint, &namenode, &namenodes).await?;
        let mut namenodes = Namenodes::new(namenodes);
        if let Some(group) = list(&rpc, LEARN_DEADLINE).await {
            namenodes.learn(&group);
        }
        Ok(Self {
            rpc: Mutex::new(rpc),
            namenodes: Mutex::new(namenodes),
            namenode,
            endpoint,
        })
    }

    fn namenodes(&self) -> Vec<SocketAddr> {
        self.namenodes.lock().all()
    }

    /// The group as the one that leads sees it. When for so long none does, as another one sees it, which takes none for
    /// the leader then: one that left the group, or that hears nobody, believes in the leader that it had.
    ///
    /// # Errors
    /// As [`AdminLink::ask`].
    pub async fn group(&self, patience: Duration) -> anyhow::Result<GroupStatus> {
        let began = tokio::time::Instant::now();
        loop {
            let request = AdminRequest::Group(GroupRequest::List);
            let AdminReply::Group(mut group) = self.ask_for_diagnosis(request, DEADLINE).await?
            else {
                return Err(unexpected());
            };
            if leads(&group) {
                return Ok(group);
            }
            if began.elapsed() >= patience {
                group.leader = None;
                return Ok(group);
            }
            tokio::time::sleep(GROUP_POLL).await;
            let leader = group.members.iter().find(|it| Some(it.id) == group.leader);
            self.turn_to(leader.map(|it| it.addr)).await;
        }
    }

    /// Asks the namenode that leads.
    ///
    /// # Errors
    /// [`NoLeader`], what it refuses with, or why it does not answer.
    pub async fn ask(
        &self,
        request: AdminRequest,
        deadline: Duration,
    ) -> anyhow::Result<AdminReply> {
        self.ask_within(request, deadline, ELECTION_DEADLINE).await
    }

    /// The same, for what says what is wrong.
    ///
    /// # Errors
    /// As [`AdminLink::ask`].
    pub async fn ask_for_diagnosis(
        &self,
        request: AdminRequest,
        deadline: Duration,
    ) -> anyhow::Result<AdminReply> {
        self.ask_within(request, deadline, DIAGNOSIS_DEADLINE).await
    }

    /// Waits for `patience` until one leads.
    async fn ask_within(
        &self,
        request: AdminRequest,
        deadline: Duration,
        patience: Duration,
    ) -> anyhow::Result<AdminReply> {
        // Questions, and what says how something is to be: it comes to the same when it is asked twice.
        let may_be_repeated = matches!(
            request,
            AdminRequest::Status
                | AdminRequest::Nodes
                | AdminRequest::Fsck
                | AdminRequest::Quarantine { .. }
                | AdminRequest::Classes
                | AdminRequest::Placement(_)
                | AdminRequest::Group(GroupRequest::List)
                | AdminRequest::Upgrade(UpgradeRequest::Status)
        );
        let request = Request::Admin(request);
        let began = tokio::time::Instant::now();
        let mut is_told = false;
        loop {
            let rpc = self.rpc.lock().clone();
            let answer = call_while_it_answers(&rpc, &request, deadline).await;
            let is_late = began.elapsed() >= patience;
            let leader = match answer {
                Ok(Ok(Reply::Admin(reply))) => {
                    if let AdminReply::Group(group) = &reply {
                        self.namenodes.lock().learn(group);
                    }
                    return Ok(reply);
                }
                Ok(Ok(_)) => return Err(unexpected()),
                Ok(Err(FsError::NotLeader { leader })) if is_late => {
                    let none = self.no_leader(leader).await;
                    let error = || FsError::NotLeader { leader }.into();
                    return Err(none.map_or_else(error, anyhow::Error::from));
                }
                Ok(Err(FsError::NotLeader { leader })) => leader,
                Ok(Err(error)) => return Err(error.into()),
                // Another namenode leads, perhaps; a change may have been made.
                Err(_) if may_be_repeated && self.namenodes().len() > 1 && !is_late => None,
                Err(error) if may_be_repeated && self.namenodes().len() > 1 => {
                    let none = self.no_leader(None).await;
                    return Err(none.map_or_else(|| error.into(), anyhow::Error::from));
                }
                Err(error) => return Err(error.into()),
            };
            if !is_told && began.elapsed() >= TOLD_AFTER {
                is_told = true;
                let seconds = patience.as_secs();
                eprintln!("No namenode leads just now; for {seconds} s one is waited for.");
            }
            self.turn_to(leader).await;
        }
    }

    /// That none of the namenodes leads, after all; none: one does now. `awaited` is the one that another takes for the
    /// leader.
    pub async fn no_leader(&self, awaited: Option<SocketAddr>) -> Option<NoLeader> {
        let asked = self.namenodes().into_iter();
        let asked = asked.map(async |addr| self.look_at(addr).await.0);
        let namenodes = join_all(asked).await;
        if namenodes.iter().any(|it| it.standing == Standing::Leads) {
            return None;
        }
        Some(NoLeader { namenodes, awaited })
    }

    /// What a namenode does, and the connection to it.
    async fn look_at(&self, addr: SocketAddr) -> (Asked, Option<Rpc>) {
        let only = [addr];
        let dialled = dial_one(&self.endpoint, &self.namenode, &only);
        let Ok(Ok(rpc)) = tokio::time::timeout(STANDING_DEADLINE, dialled).await else {
            return (Asked::away(addr), None);
        };
        let group = list(&rpc, STANDING_DEADLINE).await;
        if let Some(group) = &group {
            self.namenodes.lock().learn(group);
        }
        (Asked::new(addr, group.as_ref()), Some(rpc))
    }

    /// Looks for the one that leads among all that are known.
    async fn search(&self) -> Option<Rpc> {
        let looking = self.namenodes().into_iter().map(|addr| {
            Box::pin(async move {
                let (asked, rpc) = self.look_at(addr).await;
                rpc.filter(|_| asked.standing == Standing::Leads).ok_or(())
            })
        });
        let found = select_ok(looking).await;
        found.ok().map(|(rpc, _)| rpc)
    }

    /// Asks the namenode that leads from now on: the one that another one takes for it, or the one of all that says so;
    /// or whichever answers.
    pub async fn turn_to(&self, leader: Option<SocketAddr>) {
        let hinted = match leader {
            Some(leader) => {
                self.namenodes.lock().hinted(leader);
                let leader = [leader];
                let dialled = dial_one(&self.endpoint, &self.namenode, &leader);
                let dialled = tokio::time::timeout(LEADER_DIAL_DEADLINE, dialled).await;
                dialled.ok().and_then(Result::ok)
            }
            None => None,
        };
        let found = match hinted {
            Some(rpc) => Some(rpc),
            // One that does not answer any more was the leader: another one will be.
            None => self.search().await,
        };
        let next = match found {
            Some(rpc) => Ok(rpc),
            None => {
                tokio::time::sleep(ELECTION_PAUSE).await;
                dial_one(&self.endpoint, &self.namenode, &self.namenodes()).await
            }
        };
        match next {
            Ok(rpc) => *self.rpc.lock() = rpc,
            Err(_) => tokio::time::sleep(ELECTION_PAUSE).await,
        }
    }

    /// Asks the namenode that is connected, whichever that is.
    ///
    /// # Errors
    /// What it refuses with, or why it does not answer.
    pub async fn ask_connected(
        &self,
        request: AdminRequest,
        deadline: Duration,
    ) -> anyhow::Result<AdminReply> {
        let rpc = self.rpc.lock().clone();
        match rpc.call(&Request::Admin(request), deadline).await?? {
            Reply::Admin(reply) => Ok(reply),
            _ => Err(unexpected()),
        }
    }

    /// Where the namenode is that is connected: the one that was asked last.
    pub fn connected_to(&self) -> SocketAddr {
        self.rpc.lock().connection().remote_addr()
    }

    /// Connects to another part.
    ///
    /// # Errors
    /// Why it cannot be reached.
    pub async fn connect_to(&self, addr: SocketAddr, peer: &Peer) -> anyhow::Result<Connection> {
        Ok(self.endpoint.connect(addr, peer, DIAL_DEADLINE).await?)
    }

    /// Takes leave, so that the namenode need not wait for a silent connection to time out.
    pub async fn close(self) {
        self.endpoint.close("the command is done");
        if self.endpoint.wait_idle(CLOSE_DEADLINE).await.is_err() {
            tracing::debug!("the namenode did not confirm that the connection is closed");
        }
    }
}

/// Calls, and gives up as soon as the namenode answers nothing else either: it led, and does not reach the others any more.
async fn call_while_it_answers(
    rpc: &Rpc,
    request: &Request,
    deadline: Duration,
) -> Result<Response, RpcError> {
    let look = async {
        loop {
            tokio::time::sleep(LOOK_PAUSE).await;
            if let Err(error) = rpc.call(&list_request(), LOOK_DEADLINE).await {
                return error;
            }
        }
    };
    tokio::select! {
        biased;
        answer = rpc.call(request, deadline) => answer,
        error = look => Err(error),
    }
}

fn list_request() -> Request {
    Request::Admin(AdminRequest::Group(GroupRequest::List))
}

/// The group as a namenode sees it, if it says so in time.
async fn list(rpc: &Rpc, deadline: Duration) -> Option<GroupStatus> {
    match rpc.call(&list_request(), deadline).await {
        Ok(Ok(Reply::Admin(AdminReply::Group(group)))) => Some(group),
        _ => None,
    }
}

/// The group as a namenode sees it that may not be one of the cluster's any more; none: it does not say so in time.
pub async fn group_of(connection: Connection) -> Option<GroupStatus> {
    let (notices, _) = mpsc::channel(1);
    let rpc: Rpc = RpcClient::start(connection, notices).await.ok()?;
    list(&rpc, STANDING_DEADLINE).await
}

/// Whether the one that says this leads.
pub fn leads(group: &GroupStatus) -> bool {
    group.leader == Some(group.this)
}

/// Connects to the first namenode that answers.
async fn dial_one(
    endpoint: &Endpoint,
    namenode: &Peer,
    addresses: &[SocketAddr],
) -> anyhow::Result<Rpc> {
    if addresses.is_empty() {
        anyhow::bail!("the configuration names no namenode");
    }
    // All at once: one that is gone is given up only after a while.
    let dial = |address: &SocketAddr| Box::pin(endpoint.connect(*address, namenode, DIAL_DEADLINE));
    let (connection, _) = select_ok(addresses.iter().map(dial))
        .await
        .context("cannot reach the namenode (is the cluster running? `harvestfs up`)")?;
    // Notices are for clients that cache; an operator gets none.
    let (notices, _) = mpsc::channel(1);
    Ok(RpcClient::start(connection, notices).await?)
}

/// The namenode answered something else.
pub fn unexpected() -> anyhow::Error {
    anyhow::anyhow!("the namenode answered something else than what was asked for")
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::group::GroupMember;

    use super::*;

    fn at(port: u16) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, port).into()
    }

    fn group(term: u64, members: &[SocketAddr]) -> GroupStatus {
        let member = |(id, addr): (usize, &SocketAddr)| GroupMember {
            id: id as u64,
            name: "nn".to_owned(),
            addr: *addr,
            is_voter: true,
            acknowledged: None,
            heard_ms: None,
        };
        GroupStatus {
            this: 0,
            condition: Condition::Member,
            leader: None,
            term,
            last: 1,
            last_term: term,
            members: members.iter().enumerate().map(member).collect(),
            is_changing: false,
        }
    }

    #[test]
    fn members_are_as_one_of_the_newest_term_says_and_those_of_the_configuration_stay() {
        let mut namenodes = Namenodes::new(vec![at(1)]);
        namenodes.learn(&group(7, &[at(1), at(2), at(3)]));
        assert_eq!(namenodes.all(), [at(1), at(2), at(3)]);
        // One that was removed since.
        namenodes.learn(&group(6, &[at(1), at(4), at(5)]));
        assert_eq!(namenodes.all(), [at(1), at(2), at(3)]);
        let everywhere = (Ipv4Addr::UNSPECIFIED, 9).into();
        namenodes.learn(&group(8, &[at(3), everywhere]));
        assert_eq!(namenodes.all(), [at(1), at(3)]);
        namenodes.hinted(at(3));
        // One that takes part in nothing knows who they were, and one that is new knows nobody.
        for (condition, members) in [
            (Condition::Left, &[at(1), at(6), at(6)][..]),
            (Condition::New, &[]),
        ] {
            namenodes.learn(&GroupStatus {
                condition,
                ..group(9, members)
            });
        }
        assert_eq!(namenodes.all(), [at(1), at(3), at(6)]);
        let many: Vec<SocketAddr> = (10..100).map(at).collect();
        namenodes.learn(&group(8, &many));
        many.iter().for_each(|it| namenodes.hinted(*it));
        assert_eq!(namenodes.all().len(), 1 + NAMENODES_TOLD_MAX);
    }
}
