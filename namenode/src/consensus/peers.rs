//! Calls to the other members.

use std::future::Future;

use openraft::OptionalSend;
use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::v2::RaftNetworkV2;
use openraft::network::{RPCOption, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};

use super::applied::InJournal;
use super::{Group, Member, MemberId, Snapshot, Vote};

/// Makes them.
pub(super) struct Peers;

/// One of them.
pub(super) struct Peer;

impl RaftNetworkFactory<Group> for Peers {
    type Network = Peer;

    async fn new_client(&mut self, _target: MemberId, _node: &Member) -> Peer {
        Peer
    }
}

fn nobody() -> Unreachable<Group> {
    Unreachable::from_string("not implemented")
}

impl RaftNetworkV2<Group> for Peer {
    type SnapshotData = InJournal;

    async fn append_entries(
        &mut self,
        _: AppendEntriesRequest<Group>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<Group>, RPCError<Group>> {
        Err(nobody().into())
    }

    async fn vote(
        &mut self,
        _: VoteRequest<Group>,
        _: RPCOption,
    ) -> Result<VoteResponse<Group>, RPCError<Group>> {
        Err(nobody().into())
    }

    async fn full_snapshot(
        &mut self,
        _: Vote,
        _: Snapshot,
        _: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<Group>, StreamingError<Group>> {
        Err(nobody().into())
    }
}
