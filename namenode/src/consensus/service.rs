//! The service that answers other namenodes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::Condition;
use harvestfs_protocol::peer::{Known, Memory, PeerAnswer, PeerCall, PeerReply, PeerRequest};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::version::Versions;
use tokio::time::Instant;

use super::applied::Applied;
use super::outside::Outside;
use super::peers::{Peer, Peers};
use super::snapshots::{Fetching, fetch, read};
use super::store::LogStore;
use super::{Group, MemberId, Raft, wire};

/// Answers other namenodes. Cheap to clone.
#[derive(Clone)]
pub struct Service {
    part: Part,
}

#[derive(Clone)]
enum Part {
    Member(Box<Member>),
    Outside(Outside),
}

#[derive(Clone)]
struct Member {
    raft: Raft<Group, Applied>,
    store: LogStore,
    peers: Peers,
    fetching: Fetching,
    /// The time from which it votes, unless the leader has asked for it.
    votes_from: tokio::time::Instant,
    /// It does not ask for votes.
    stays_out: Arc<AtomicBool>,
}

impl Service {
    pub(super) fn of_member(
        raft: Raft<Group, Applied>,
        store: LogStore,
        peers: Peers,
        fetching: Fetching,
        votes_from: tokio::time::Instant,
        stays_out: Arc<AtomicBool>,
    ) -> Self {
        let member = Member {
            raft,
            store,
            peers,
            fetching,
            votes_from,
            stays_out,
        };
        Self {
            part: Part::Member(Box::new(member)),
        }
    }

    /// Returns the service of a namenode that is in no group.
    #[must_use]
    pub fn outside(outside: Outside) -> Self {
        Self {
            part: Part::Outside(outside),
        }
    }

    /// Refuses a program that cannot be a namenode of the cluster.
    ///
    /// # Errors
    /// [`FsError::Unfit`]
    pub fn check_versions(&self, versions: Versions) -> Result<(), FsError> {
        match &self.part {
            Part::Member(member) => {
                let releases = &member.peers.caller.releases;
                let committed = member.store.commits().last();
                let checked = releases.check_leader(versions, committed);
                checked.map_err(FsError::Unfit)
            }
            Part::Outside(_) => Ok(()),
        }
    }

    /// Answers a request.
    ///
    /// # Errors
    /// [`FsError::Protocol`] for records that are not entries; [`FsError::Internal`] if the consensus stopped.
    pub async fn answer(&self, call: PeerCall) -> Result<PeerAnswer, FsError> {
        let this = self.this();
        let reply = if call.to.is_some_and(|to| to != this.0) {
            PeerReply::Mistaken
        } else {
            match &self.part {
                Part::Member(member) => member.answer(call).await?,
                Part::Outside(outside) => outside.answer(call.request),
            }
        };
        Ok(PeerAnswer {
            from: this.0,
            memory: self.memory(),
            reply,
        })
    }

    fn this(&self) -> MemberId {
        match &self.part {
            Part::Member(member) => member.peers.caller.this,
            Part::Outside(outside) => outside.id(),
        }
    }

    fn memory(&self) -> Memory {
        match &self.part {
            Part::Member(member) => member.peers.caller.memory(),
            Part::Outside(outside) => outside.memory(),
        }
    }
}

impl Member {
    async fn answer(&self, call: PeerCall) -> Result<PeerReply, FsError> {
        let PeerCall {
            from,
            memory,
            known,
            request,
            ..
        } = call;
        if self.has_forgotten(known.as_ref()) {
            self.store.forgot();
            return Ok(PeerReply::Forgetful);
        }
        if !self.peers.caller.note(MemberId(from), memory) {
            // It learns of that when it is called.
            return Err(FsError::RoleDenied(
                "this namenode remembers less than it did before".to_owned(),
            ));
        }
        let stopped = |error: &dyn fmt::Display| FsError::Internal(error.to_string());
        match request {
            // It learns this in no other way: the leader has not called it since its removal.
            PeerRequest::Vote { last, .. }
                if (self.store).has_left(MemberId(from), last.map(wire::entry)) =>
            {
                Ok(PeerReply::Left)
            }
            PeerRequest::Vote {
                is_transfer: false, ..
            } if tokio::time::Instant::now() < self.votes_from => Ok(PeerReply::Voted {
                ballot: wire::ballot(&self.store.vote()),
                is_granted: false,
                last: self.store.last().as_ref().map(wire::place),
            }),
            PeerRequest::Vote {
                ballot,
                last,
                is_trial,
                is_transfer,
            } => {
                let request = wire::asks_for_vote(ballot, last, is_transfer)
                    .map_err(|error| FsError::Protocol(error.to_string()))?;
                let voted = if is_trial {
                    self.raft.pre_vote(request).await
                } else {
                    self.raft.vote(request).await
                };
                Ok(wire::voted(&voted.map_err(|error| stopped(&error))?))
            }
            PeerRequest::Append {
                ballot,
                before,
                records,
                committed,
            } => {
                let request = wire::append(ballot, before, records, committed)
                    .map_err(|error| FsError::Protocol(error.to_string()))?;
                let of_leader = committed.map_or(0, |place| place.record);
                self.store.commits().leader_has(of_leader);
                let heard = Instant::now();
                if self.store.commits().is_led_in(ballot.term) {
                    // Even while the disk takes long to store what the leader sent.
                    self.store.commits().leader_heard(heard);
                }
                let appended = self.raft.append_entries(request).await;
                let reply = wire::appended(&appended.map_err(|error| stopped(&error))?);
                if !matches!(reply, PeerReply::Outvoted(_)) {
                    self.store.commits().leader_heard(heard);
                }
                let acknowledged = known.and_then(|it| it.acknowledged).unwrap_or(0);
                if reply == PeerReply::Conflict
                    && before.is_some_and(|before| before.record <= acknowledged)
                    && !planted::is(Bug::TrustsForgetfulMembers)
                {
                    self.store.forgot();
                    return Ok(PeerReply::Forgetful);
                }
                Ok(reply)
            }
            // openraft would ask for votes regardless. Others do so without being named, as soon as they hear from no
            // leader.
            PeerRequest::Transfer { ballot, to, last }
                if to == self.peers.caller.this.0 && self.stays_out.load(Ordering::Acquire) =>
            {
                // As if another member were named: the others may have its vote immediately.
                let request = wire::transfer(ballot, from, last);
                let heard = self.raft.handle_transfer_leader(request).await;
                let heard = heard.map_err(|error| stopped(&error))?;
                heard.map_err(|error| FsError::InvalidArgument(error.to_string()))?;
                let what = "this namenode asks for no votes just now: another one has to lead";
                Err(FsError::InvalidArgument(what.to_owned()))
            }
            PeerRequest::Transfer { ballot, to, last } => {
                let request = wire::transfer(ballot, to, last);
                let transferred = self.raft.handle_transfer_leader(request).await;
                let taken = transferred.map_err(|error| stopped(&error))?;
                taken.map_err(|error| FsError::InvalidArgument(error.to_string()))?;
                Ok(PeerReply::Transferred)
            }
            PeerRequest::Identify => Ok(PeerReply::Identity {
                cluster: self.store.cluster(),
                condition: match self.store.is_among_members() {
                    true => Condition::Member,
                    // It took a snapshot to become a member, and the leader failed before it was one.
                    false => Condition::New,
                },
            }),
            PeerRequest::TakeSnapshot { last, name, addr } => {
                let last = wire::entry(last);
                if !self.store.has_committed(last) {
                    self.take_snapshot(MemberId(from), name, addr);
                    return Ok(PeerReply::Taking(None));
                }
                let end = self.store.last();
                Ok(PeerReply::Taking(end.as_ref().map(wire::place)))
            }
            PeerRequest::ReadSnapshot { record, offset } => {
                read(&self.store, record, offset).map_err(|error| stopped(&error))
            }
        }
    }

    /// Whether another namenode knows more about this member than it does itself.
    fn has_forgotten(&self, known: Option<&Known>) -> bool {
        if planted::is(Bug::TrustsForgetfulMembers) {
            return false;
        }
        let here = self.peers.caller.memory();
        known.is_some_and(|known| known.run != here.run && known.writes > here.writes_at_start)
    }

    /// Takes the snapshot of a leader, and restarts with it.
    fn take_snapshot(&self, from: MemberId, name: String, addr: std::net::SocketAddr) {
        let caller = Arc::clone(&self.peers.caller);
        let peer = Peer::new(caller, Some(from), name, addr);
        let (store, fetching) = (self.store.clone(), self.fetching.clone());
        self.fetching.begin(async move {
            match fetch(peer, store.reader(), &fetching).await {
                Ok(fetched) => store.take_snapshot(fetched),
                Err(error) => tracing::warn!(%error, "a snapshot of the leader was not taken"),
            }
        });
    }
}
