//! Calls to the other members.

use std::future::Future;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{Peer as Identity, Role};
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::peer::{PeerReply, PeerRequest};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{Endpoint, RpcClient, RpcError, TransportError};
use openraft::OptionalSend;
use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::v2::RaftNetworkV2;
use openraft::network::{RPCOption, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use tokio::sync::mpsc;

use super::applied::InJournal;
use super::{Group, Member, MemberId, Snapshot, Vote, wire};

/// Makes them.
pub(super) struct Peers {
    pub(super) endpoint: Endpoint,
}

/// One of them, with the connection to it.
pub(super) struct Peer {
    endpoint: Endpoint,
    member: Member,
    client: Option<RpcClient<Request, Response, Notice>>,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
enum PeerError {
    #[error("the name {name} of a namenode is impossible: {reason}")]
    Name { name: String, reason: String },
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Rpc(#[from] RpcError),
    #[error("it refuses: {0}")]
    Refused(FsError),
    #[error("its answer does not fit the request")]
    UnexpectedReply,
    #[error("it lacks entries that are not in this namenode's journal any more")]
    NeedsSnapshot,
}

impl From<PeerError> for RPCError<Group> {
    fn from(error: PeerError) -> Self {
        Unreachable::new(&error).into()
    }
}

impl RaftNetworkFactory<Group> for Peers {
    type Network = Peer;

    async fn new_client(&mut self, _: MemberId, member: &Member) -> Peer {
        Peer {
            endpoint: self.endpoint.clone(),
            member: member.clone(),
            client: None,
        }
    }
}

impl Peer {
    async fn call(
        &mut self,
        request: PeerRequest,
        option: &RPCOption,
    ) -> Result<PeerReply, PeerError> {
        let deadline = option.hard_ttl();
        let called = self.call_within(request, deadline).await;
        if called.is_err() {
            // The next call dials again.
            self.client = None;
        }
        called
    }

    async fn call_within(
        &mut self,
        request: PeerRequest,
        deadline: Duration,
    ) -> Result<PeerReply, PeerError> {
        let client = match &self.client {
            Some(client) => client,
            None => {
                let name = self.member.name.clone();
                let expected = Identity::new(Role::Namenode, name.clone()).map_err(|error| {
                    PeerError::Name {
                        name,
                        reason: error.to_string(),
                    }
                })?;
                let dialled = self.endpoint.connect(self.member.addr, &expected, deadline);
                // Notices are for clients; without a receiver they are ignored.
                let (notices, _) = mpsc::channel(1);
                let client = RpcClient::start(dialled.await?, notices).await?;
                self.client.insert(client)
            }
        };
        match client.call(&Request::Peer(request), deadline).await? {
            Ok(Reply::Peer(reply)) => Ok(reply),
            Ok(_) => Err(PeerError::UnexpectedReply),
            Err(error) => Err(PeerError::Refused(error)),
        }
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
        let reply = self.call(request, &option).await?;
        Ok(wire::vote_response(&reply).ok_or(PeerError::UnexpectedReply)?)
    }
}

impl RaftNetworkV2<Group> for Peer {
    type SnapshotData = InJournal;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<Group>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Group>, RPCError<Group>> {
        let reply = self.call(wire::append_request(&request), &option).await?;
        Ok(wire::append_response(&reply).ok_or(PeerError::UnexpectedReply)?)
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

    async fn full_snapshot(
        &mut self,
        _: Vote,
        _: Snapshot,
        _: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<Group>, StreamingError<Group>> {
        Err(Unreachable::new(&PeerError::NeedsSnapshot).into())
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<Group>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Group>, RPCError<Group>> {
        match self.call(wire::transfer_request(&request), &option).await? {
            PeerReply::Transferred => Ok(Ok(())),
            _ => Err(PeerError::UnexpectedReply.into()),
        }
    }
}
