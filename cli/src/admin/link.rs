//! An operator's connection to the namenode.

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
/// Deadline for dialling the presumed leader, whose machine may just have failed.
const LEADER_DIAL_DEADLINE: Duration = Duration::from_secs(1);
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// How long an operator's command waits until one of several namenodes leads: as long as programs on a mount. A
/// namenode with many files takes a while to start.
const ELECTION_DEADLINE: Duration = Duration::from_secs(60);
/// The same for commands that diagnose problems, which should not wait that long.
const DIAGNOSIS_DEADLINE: Duration = Duration::from_secs(10);
const ELECTION_PAUSE: Duration = Duration::from_millis(100);
/// Time after which a command prints what it is waiting for.
const TOLD_AFTER: Duration = Duration::from_secs(5);
/// Interval of the liveness checks that run alongside a slow request.
const LOOK_PAUSE: Duration = Duration::from_secs(3);
/// Deadline of a liveness check. A leader reports its members within this time; a former one that does not reach the
/// others any more answers nothing.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);
/// The same for a namenode that may not be running.
const STANDING_DEADLINE: Duration = Duration::from_secs(2);
/// Deadline for learning the members from the connected namenode; a failure does no harm.
const LEARN_DEADLINE: Duration = Duration::from_secs(1);
const GROUP_POLL: Duration = Duration::from_millis(20);

type Rpc = RpcClient<Request, Response, Notice>;

/// A connection to the namenode that leads.
pub struct AdminLink {
    /// The connection to the namenode that answered last.
    rpc: Mutex<Rpc>,
    namenodes: Mutex<Namenodes>,
    namenode: Peer,
    endpoint: Endpoint,
}

/// The known namenodes. Those of the configuration stay known whatever others report, since a group may be created
/// again at one of their addresses.
struct Namenodes {
    configured: Vec<SocketAddr>,
    /// The members, as reported in the newest term, and those that were named as the leader.
    told: Vec<SocketAddr>,
    /// The term of that report, since a namenode that has left the group reports outdated members.
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

    /// All known namenodes, without duplicates.
    fn all(&self) -> Vec<SocketAddr> {
        let mut all = self.configured.clone();
        let told = self.told.iter();
        all.extend(told.filter(|it| !self.configured.contains(it)));
        all
    }

    fn learn(&mut self, group: &GroupStatus) {
        // A namenode that listens on all addresses does not reveal the one at which it is reachable.
        let members = group.members.iter().map(|it| it.addr);
        let members = members.filter(|it| !it.ip().is_unspecified());
        if group.condition != Condition::Member {
            // A non-member knows only the former members.
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

/// Runs an operator's request, with a request id for logs.
///
/// # Errors
/// The error of the request; also when the runtime cannot be started.
pub fn block_on<T>(asking: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(RequestId::random().scope(asking))
}

impl AdminLink {
    /// Connects to the cluster, runs `ask`, and closes the connection.
    ///
    /// # Errors
    /// When the namenode cannot be reached; otherwise the error of `ask`.
    pub async fn with<T>(
        cluster: &ClusterArgs,
        ask: impl AsyncFnOnce(&Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let link = Self::connect(&cluster.access("admin")?).await?;
        let result = ask(&link).await;
        link.close().await;
        result
    }

    /// Connects to the first namenode that answers, and asks it for the others: the configuration may not contain the
    /// leader, or the one that becomes the leader during the command.
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

    /// The group as seen by the leader. If there is none for `patience`, the group as seen by another namenode, without
    /// its leader: a namenode that left the group, or is cut off, still believes in its former leader.
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

    /// Sends a request to the leader.
    ///
    /// # Errors
    /// [`NoLeader`], the reason of a refusal, or why there is no answer.
    pub async fn ask(
        &self,
        request: AdminRequest,
        deadline: Duration,
    ) -> anyhow::Result<AdminReply> {
        self.ask_within(request, deadline, ELECTION_DEADLINE).await
    }

    /// Same as [`AdminLink::ask`], for commands that diagnose problems.
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

    /// Sends a request to the leader, waiting up to `patience` until there is one.
    async fn ask_within(
        &self,
        request: AdminRequest,
        deadline: Duration,
        patience: Duration,
    ) -> anyhow::Result<AdminReply> {
        // Queries, and requests that set a state: repeating them makes no difference.
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
                // Perhaps another namenode leads now. The request may have taken effect.
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

    /// Checks all known namenodes, and returns [`NoLeader`] if none of them leads; `None` if one does now. `awaited` is
    /// the one that another takes for the leader.
    pub async fn no_leader(&self, awaited: Option<SocketAddr>) -> Option<NoLeader> {
        let asked = self.namenodes().into_iter();
        let asked = asked.map(async |addr| self.look_at(addr).await.0);
        let namenodes = join_all(asked).await;
        if namenodes.iter().any(|it| it.standing == Standing::Leads) {
            return None;
        }
        Some(NoLeader { namenodes, awaited })
    }

    /// Examines a namenode. Returns its state and the connection to it.
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

    /// Looks for the leader among all known namenodes.
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

    /// Reconnects for further requests: to the presumed leader, or to the namenode that reports that it leads, or to
    /// whichever answers.
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
            // If the presumed leader does not answer, another one is going to lead.
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

    /// Sends a request to the connected namenode, whichever that is.
    ///
    /// # Errors
    /// The reason of a refusal, or why there is no answer.
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

    /// Address of the connected namenode, which was asked last.
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

    /// Closes the connection, so that the namenode need not wait for its timeout.
    pub async fn close(self) {
        self.endpoint.close("the command is done");
        if self.endpoint.wait_idle(CLOSE_DEADLINE).await.is_err() {
            tracing::debug!("the namenode did not confirm that the connection is closed");
        }
    }
}

/// Sends a request, and gives up as soon as the namenode does not answer a liveness check either: a former leader
/// that does not reach the others any more answers nothing.
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

/// The group as seen by a namenode, if it answers in time.
async fn list(rpc: &Rpc, deadline: Duration) -> Option<GroupStatus> {
    match rpc.call(&list_request(), deadline).await {
        Ok(Ok(Reply::Admin(AdminReply::Group(group)))) => Some(group),
        _ => None,
    }
}

/// The group as seen by a namenode that may no longer belong to the cluster; `None` if it does not answer in time.
pub async fn group_of(connection: Connection) -> Option<GroupStatus> {
    let (notices, _) = mpsc::channel(1);
    let rpc: Rpc = RpcClient::start(connection, notices).await.ok()?;
    list(&rpc, STANDING_DEADLINE).await
}

/// Whether the namenode that reported this leads.
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
    // All simultaneously, since an unreachable one times out only after a while.
    let dial = |address: &SocketAddr| Box::pin(endpoint.connect(*address, namenode, DIAL_DEADLINE));
    let (connection, _) = select_ok(addresses.iter().map(dial))
        .await
        .context("cannot reach the namenode (is the cluster running? `harvestfs up`)")?;
    // Only clients that cache get notices; an operator does not.
    let (notices, _) = mpsc::channel(1);
    Ok(RpcClient::start(connection, notices).await?)
}

/// Error for an answer of the wrong type.
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
        // Reported by a namenode that has been removed since.
        namenodes.learn(&group(6, &[at(1), at(4), at(5)]));
        assert_eq!(namenodes.all(), [at(1), at(2), at(3)]);
        let everywhere = (Ipv4Addr::UNSPECIFIED, 9).into();
        namenodes.learn(&group(8, &[at(3), everywhere]));
        assert_eq!(namenodes.all(), [at(1), at(3)]);
        namenodes.hinted(at(3));
        // A former member knows only the former members, and a new namenode knows none.
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
