//! Calls to the other members.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::peer::{Ballot, Known, Memory, PeerCall, PeerReply, PeerRequest};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::{Reply, Request};
use harvestfs_protocol::transport::{RpcError, TransportError};
use harvestfs_protocol::version::{Release, Unfit, Version, Versions};
use openraft::OptionalSend;
use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::v2::RaftNetworkV2;
use openraft::network::{RPCOption, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use parking_lot::Mutex;

use super::applied::InJournal;
use super::entry::EntryError;
use super::links::Links;
use super::snapshots::blocking;
use super::store::LogStore;
use super::{Group, LogId, Member, MemberId, PROMISED, Snapshot, Vote, wire};
use crate::journal::{JournalError, Lsn};

/// How long another namenode's disk may take. openraft has no separate limit for it.
const DURABLE_DEADLINE: Duration = Duration::from_secs(2);
/// How often another namenode is asked whether it has taken a snapshot.
const TAKING_POLL: Duration = Duration::from_millis(100);

/// Creates the callers of other members for openraft.
#[derive(Clone)]
pub(super) struct Peers {
    pub(super) caller: Arc<Caller>,
}

/// The namenode that makes calls.
pub(super) struct Caller {
    pub(super) this: MemberId,
    /// A random number of each start.
    pub(super) run: u64,
    pub(super) writes_at_start: u64,
    /// `None` if it is in no group.
    pub(super) store: Option<LogStore>,
    /// Addresses where nothing answers just now, for the log.
    pub(super) silent: Mutex<BTreeSet<SocketAddr>>,
    pub(super) releases: Releases,
    pub(super) links: Links,
}

/// The version of the cluster, and the software of the other members.
#[derive(Default)]
pub(super) struct Releases {
    /// `None` if it is not known here.
    cluster: Mutex<Option<ClusterVersion>>,
    /// What they reported when they were last connected to.
    others: Mutex<BTreeMap<MemberId, Running>>,
}

/// The software of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Its release.
    pub release: Release,
    /// The versions that it supports.
    pub versions: Versions,
}

/// The version of the cluster according to this namenode's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterVersion {
    /// The version after the last record.
    pub newest: Version,
    /// The record that raised it, and the version before it. Until the record is committed, another leader may
    /// replace it.
    pub raised: Option<(Lsn, Version)>,
}

impl ClusterVersion {
    /// The version that is final once the records up to `committed` are committed.
    #[must_use]
    pub fn settled(self, committed: Lsn) -> Version {
        match self.raised {
            Some((record, before)) if committed < record => before,
            _ => self.newest,
        }
    }
}

impl Releases {
    /// Sets the version of the cluster.
    pub(super) fn set_cluster(&self, version: ClusterVersion) {
        *self.cluster.lock() = Some(version);
    }

    /// Refuses a program that cannot be a namenode of the cluster once everything in the log is committed. To count
    /// on such a member would mean to have it commit that.
    fn check_follower(&self, versions: Versions) -> Result<(), Unfit> {
        match *self.cluster.lock() {
            None => Ok(()),
            Some(cluster) => versions.check_cluster(cluster.newest),
        }
    }

    /// Refuses a program that cannot be a namenode of the cluster, neither with what is committed up to there nor
    /// with what is not: it may be the one that replaces what is not.
    pub(super) fn check_leader(&self, versions: Versions, committed: Lsn) -> Result<(), Unfit> {
        self.check_follower(versions)
            .or_else(|unfit| match *self.cluster.lock() {
                Some(cluster) => versions.check_cluster(cluster.settled(committed)),
                None => Err(unfit),
            })
    }

    pub(super) fn others(&self) -> BTreeMap<MemberId, Running> {
        self.others.lock().clone()
    }
}

impl Caller {
    pub(super) fn memory(&self) -> Memory {
        Memory {
            run: self.run,
            writes: self.store.as_ref().map_or(0, LogStore::writes),
            writes_at_start: self.writes_at_start,
        }
    }

    /// Notes what another namenode reports about itself. Returns false if it has forgotten something.
    pub(super) fn note(&self, from: MemberId, memory: Memory) -> bool {
        let store = self.store.as_ref();
        store.is_none_or(|store| store.note_memory(from, memory))
    }
}

/// A caller of one other namenode.
pub(super) struct Peer {
    caller: Arc<Caller>,
    /// `None` for any namenode at the address.
    to: Option<MemberId>,
    name: String,
    addr: SocketAddr,
    /// The last record that it acknowledged for the current ballot.
    acknowledged: Option<(Ballot, Lsn)>,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PeerError {
    #[error("the name {name} of a namenode is impossible: {reason}")]
    Name { name: String, reason: String },
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Rpc(#[from] RpcError),
    #[error("it refuses: {0}")]
    Refused(FsError),
    #[error(transparent)]
    Unfit(#[from] Unfit),
    #[error("its answer does not fit the request")]
    UnexpectedReply,
    #[error("the namenode at {0} is not the member that it is taken for: its disk was replaced")]
    Mistaken(SocketAddr),
    #[error("the namenode at {0} has forgotten what it said before, and counts for nothing")]
    Forgetful(SocketAddr),
    #[error("the namenode at {0} is in no group")]
    Outside(SocketAddr),
    #[error("this namenode has left the group")]
    Left,
    #[error("its directory is of cluster {0}, which is another one")]
    WrongCluster(ClusterId),
    #[error("there is no snapshot")]
    NoSnapshot,
    #[error("this namenode ends, or begins anew")]
    GivenUp,
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the snapshot cannot be written: {0}")]
    Write(#[from] io::Error),
    #[error("it sent impossible members: {0}")]
    Members(#[from] EntryError),
}

impl From<PeerError> for RPCError<Group> {
    fn from(error: PeerError) -> Self {
        Unreachable::new(&error).into()
    }
}

impl RaftNetworkFactory<Group> for Peers {
    type Network = Peer;

    async fn new_client(&mut self, to: MemberId, member: &Member) -> Peer {
        let caller = Arc::clone(&self.caller);
        Peer::new(caller, Some(to), member.name.clone(), member.addr)
    }
}

impl Peer {
    pub(super) fn new(
        caller: Arc<Caller>,
        to: Option<MemberId>,
        name: String,
        addr: SocketAddr,
    ) -> Self {
        Self {
            caller,
            to,
            name,
            addr,
            acknowledged: None,
        }
    }

    /// Sends a request. Returns the number of the member that answered, and its reply.
    pub(super) async fn call(
        &mut self,
        request: PeerRequest,
        deadline: Duration,
    ) -> Result<(MemberId, PeerReply), PeerError> {
        let called = self.call_within(request, deadline).await;
        let addr = self.addr;
        match &called {
            Ok(_) if self.caller.silent.lock().remove(&addr) => {
                tracing::info!(%addr, "the namenode answers again");
            }
            // It does answer if it refuses the request.
            Ok(_) | Err(PeerError::Left | PeerError::Refused(FsError::InvalidArgument(_))) => {}
            Err(error) => {
                if self.caller.silent.lock().insert(addr) {
                    tracing::warn!(%addr, %error, "another namenode does not answer");
                }
            }
        }
        called
    }

    async fn call_within(
        &mut self,
        request: PeerRequest,
        deadline: Duration,
    ) -> Result<(MemberId, PeerReply), PeerError> {
        let known = self.known(&request);
        let is_append = matches!(request, PeerRequest::Append { .. });
        let is_of_leader = matches!(request, PeerRequest::ReadSnapshot { .. });
        let linked = self.caller.links.get(&self.name, self.addr);
        let late = |_| {
            PeerError::Transport(TransportError::Deadline {
                what: "connecting",
                deadline,
            })
        };
        let link = tokio::time::timeout(deadline, linked)
            .await
            .map_err(late)??;
        let running = link.running();
        match &self.caller.store {
            Some(store) if is_of_leader => {
                let committed = store.commits().last();
                self.caller
                    .releases
                    .check_leader(running.versions, committed)?;
            }
            _ => self.caller.releases.check_follower(running.versions)?,
        }
        let call = PeerCall {
            from: self.caller.this.0,
            to: self.to.map(|it| it.0),
            memory: self.caller.memory(),
            known,
            request,
        };
        let answer = match link.call(&Request::Peer(call), deadline).await? {
            Ok(Reply::Peer(answer)) => answer,
            Ok(_) => return Err(PeerError::UnexpectedReply),
            Err(error) => return Err(PeerError::Refused(error)),
        };
        let from = MemberId(answer.from);
        match answer.reply {
            PeerReply::Mistaken => return Err(PeerError::Mistaken(self.addr)),
            PeerReply::Forgetful => return Err(PeerError::Forgetful(self.addr)),
            PeerReply::Outside => return Err(PeerError::Outside(self.addr)),
            PeerReply::Left => {
                if let Some(store) = self.caller.store.clone() {
                    blocking(move || store.left()).await;
                }
                return Err(PeerError::Left);
            }
            _ => {}
        }
        if self.to.is_some_and(|to| to != from) {
            return Err(PeerError::Mistaken(self.addr));
        }
        if !self.caller.note(from, answer.memory) {
            return Err(PeerError::Forgetful(self.addr));
        }
        if is_append
            && let Some(store) = &self.caller.store
            && !store.has_written_memory(from)
        {
            // Before it counts: if this namenode forgot it, an older copy of the other one could take part.
            let store = store.clone();
            blocking(move || store.write_memory(from)).await?;
        }
        self.caller.releases.others.lock().insert(from, running);
        Ok((from, answer.reply))
    }

    /// What is known here about the callee.
    fn known(&self, request: &PeerRequest) -> Option<Known> {
        let known = (self.caller.store.as_ref()).and_then(|it| it.known_memory(self.to?))?;
        let acknowledged = match (request, self.acknowledged) {
            (PeerRequest::Append { ballot, .. }, Some((of, lsn))) if *ballot == of => Some(lsn),
            _ => None,
        };
        Some(Known {
            acknowledged,
            ..known
        })
    }
}

impl Peer {
    async fn ask_for_vote(
        &mut self,
        request: VoteRequest<Group>,
        is_trial: bool,
        option: RPCOption,
    ) -> Result<VoteResponse<Group>, RPCError<Group>> {
        let request = wire::vote_request(&request, is_trial);
        let (_, reply) = self.call(request, option.hard_ttl()).await?;
        Ok(wire::vote_response(&reply).ok_or(PeerError::UnexpectedReply)?)
    }
}

impl Peer {
    /// Whether the other member has acknowledged this record to the leader with this ballot.
    fn has_acknowledged(&self, ballot: Ballot, lsn: Lsn) -> bool {
        self.acknowledged
            .is_some_and(|(of, acknowledged)| of == ballot && lsn <= acknowledged)
    }

    /// Makes the other member take this namenode's newest snapshot, and waits until it has what the snapshot covers.
    pub(super) async fn have_taken(
        &mut self,
        last: LogId,
        deadline: Duration,
    ) -> Result<(), PeerError> {
        let store = (self.caller.store.as_ref()).ok_or(PeerError::NoSnapshot)?;
        let this = store.this();
        let members = store.members_at(Lsn::MAX);
        let here = members.membership().get_node(&this);
        let here = here.ok_or(PeerError::NoSnapshot)?.clone();
        let request = PeerRequest::TakeSnapshot {
            last: wire::place(&last),
            name: here.name,
            addr: here.addr,
        };
        loop {
            match self.call(request.clone(), deadline).await {
                Ok((_, PeerReply::Taking(end))) => {
                    if end.is_some_and(|end| end.record >= last.index()) {
                        return Ok(());
                    }
                }
                Ok(_) => return Err(PeerError::UnexpectedReply),
                // It restarts when it has the snapshot.
                Err(PeerError::Transport(_) | PeerError::Rpc(_)) => {}
                Err(error) => return Err(error),
            }
            tokio::time::sleep(TAKING_POLL).await;
        }
    }
}

impl RaftNetworkV2<Group> for Peer {
    type SnapshotData = InJournal;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<Group>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Group>, RPCError<Group>> {
        let call = wire::append_request(&request);
        let ballot = wire::ballot(&request.vote);
        let deadline = if request.entries.is_empty() {
            option.hard_ttl()
        } else {
            // Until the entries are durable there.
            option.hard_ttl().max(DURABLE_DEADLINE)
        };
        let reply = match self.call(call, deadline).await {
            Ok((_, reply)) => reply,
            Err(_) if planted::is(Bug::CountsSilentMembers) => PeerReply::Appended,
            Err(error) => return Err(error.into()),
        };
        let response = wire::append_response(&reply).ok_or(PeerError::UnexpectedReply)?;
        let before = request.prev_log_id.map_or(0, |it| it.index());
        let acknowledged = match &response {
            AppendEntriesResponse::Success => before + request.entries.len() as u64,
            AppendEntriesResponse::PartialSuccess(up_to) => up_to.map_or(0, |it| it.index()),
            AppendEntriesResponse::Conflict
                if self.has_acknowledged(ballot, before)
                    && !planted::is(Bug::TrustsForgetfulMembers) =>
            {
                // openraft would continue to count what that member had.
                return Err(PeerError::Forgetful(self.addr).into());
            }
            AppendEntriesResponse::Conflict | AppendEntriesResponse::HigherVote(_) => 0,
        };
        if !self.has_acknowledged(ballot, acknowledged) {
            self.acknowledged = Some((ballot, acknowledged));
        }
        Ok(response)
    }

    async fn vote(
        &mut self,
        request: VoteRequest<Group>,
        option: RPCOption,
    ) -> Result<VoteResponse<Group>, RPCError<Group>> {
        self.ask_for_vote(request, false, option).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<Group>,
        option: RPCOption,
    ) -> Result<VoteResponse<Group>, RPCError<Group>> {
        self.ask_for_vote(request, true, option).await
    }

    /// Makes the other member read the snapshot, and restart with it.
    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancelled: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<Group>, StreamingError<Group>> {
        let Some(last) = snapshot.meta.last_log_id else {
            return Err(Unreachable::new(&PeerError::NoSnapshot).into());
        };
        // openraft treats the answer as one to a heartbeat sent now, but nobody checks a vote for it: the other
        // member may have promised its vote to another leader. The answer is held back until a heartbeat of now
        // grants no lease any more, so that it grants none either.
        let no_lease_from = tokio::time::Instant::now() + PROMISED;
        let taken = async {
            self.have_taken(last, option.hard_ttl()).await?;
            tokio::time::sleep_until(no_lease_from).await;
            Ok::<(), PeerError>(())
        };
        tokio::select! {
            biased;
            closed = cancelled => Err(closed.into()),
            taken = taken => match taken {
                Ok(()) => Ok(SnapshotResponse::new(vote)),
                Err(error) => Err(Unreachable::new(&error).into()),
            }
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<Group>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Group>, RPCError<Group>> {
        let request = wire::transfer_request(&request);
        match self.call(request, option.hard_ttl()).await? {
            (_, PeerReply::Transferred) => Ok(Ok(())),
            _ => Err(PeerError::UnexpectedReply.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As when the leader that finished an upgrade was lost before another member knew of it, and the others went
    /// back to the older release.
    #[test]
    fn an_older_program_may_lead_until_the_version_that_it_lacks_is_committed() {
        let (older, newer) = (Versions::only(Version(3)), Versions::only(Version(4)));
        let releases = Releases::default();
        assert_eq!(releases.check_leader(older, 0), Ok(()));
        assert_eq!(releases.check_follower(older), Ok(()));
        releases.set_cluster(ClusterVersion {
            newest: Version(4),
            raised: Some((7, Version(3))),
        });
        for (versions, committed, leads, follows) in [
            (older, 6, true, false),
            (older, 7, false, false),
            (newer, 6, true, true),
            (newer, 7, true, true),
            (Versions::only(Version(2)), 6, false, false),
        ] {
            let led = releases.check_leader(versions, committed).is_ok();
            let followed = releases.check_follower(versions).is_ok();
            assert_eq!((led, followed), (leads, follows), "{versions} {committed}");
        }
    }
}
