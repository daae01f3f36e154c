//! The members of the group: their identity, their progress, and changes of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use harvestfs_protocol::group::{Condition, GroupMember, GroupStatus};
use harvestfs_protocol::peer::{PeerReply, PeerRequest};
use openraft::async_runtime::WatchReceiver;
use openraft::{ChangeMembers, Instant as _, Membership};

use super::applied::Applied;
use super::peers::{Peer, PeerError, Peers, Running};
use super::snapshots::blocking;
use super::store::LogStore;
use super::{Consensus, ConsensusError, Group, Member, MemberId, Raft, Term};
use crate::journal::{JournalReader, Lsn};

/// How long openraft may take to add an entry with members to its log. Nothing is answered meanwhile.
const ADDED_WITHIN: Duration = Duration::from_secs(1);
/// How long a namenode may take to identify itself.
const IDENTIFY_DEADLINE: Duration = Duration::from_secs(5);

/// A change of the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds a learner, which gets the log and has no vote.
    Learn(MemberId, Member),
    /// Replaces the voters: those that had a vote before and have none now leave the group.
    Vote {
        /// The current voters, as far as the caller knows; nothing changes if the voters are different by now.
        before: BTreeSet<MemberId>,
        /// The new voters.
        voters: BTreeSet<MemberId>,
    },
    /// Removes a member that has no vote from the group.
    Leave(MemberId),
    /// Completes a change that another leader began.
    Complete,
}

impl From<Change> for ChangeMembers<MemberId, Member> {
    fn from(change: Change) -> Self {
        match change {
            Change::Learn(id, member) => Self::AddNodes(BTreeMap::from([(id, member)])),
            Change::Vote { voters, .. } => Self::ReplaceAllVoters(voters),
            Change::Leave(id) => Self::RemoveNodes(BTreeSet::from([id])),
            Change::Complete => Self::AddVoterIds(BTreeSet::new()),
        }
    }
}

/// A change under way. It continues only when its user tells it to, since otherwise it is the user that assigns the
/// numbers of entries.
pub struct Changing {
    future: BoxFuture<'static, Result<(), Refusal>>,
}

/// Why a change was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// This member does not lead, or has no lease just now: nothing was changed, and the change can be requested
    /// again.
    NotLeading,
    /// The voters are no longer those that the change was made for.
    Outdated,
    /// The change is impossible, for this reason.
    Impossible(String),
}

/// How a change proceeds.
pub enum Progress {
    /// This entry was added, and has to be committed next.
    Added(Lsn),
    /// Nothing more has to be added. The error is the reason for which it was refused.
    Over(Result<(), Refusal>),
}

/// The members, without anything that was heard from them.
pub(super) fn members_of(members: &Membership<MemberId, Member>) -> Vec<GroupMember> {
    let voters: BTreeSet<MemberId> = members.voter_ids().collect();
    let member = |(id, member): (&MemberId, &Member)| GroupMember {
        id: id.0,
        name: member.name.clone(),
        addr: member.addr,
        is_voter: voters.contains(id),
        acknowledged: None,
        heard_ms: None,
    };
    members.nodes().map(member).collect()
}

/// Whether this is the only member with a vote.
pub(super) fn is_sole_voter(members: &Membership<MemberId, Member>, this: MemberId) -> bool {
    members.voter_ids().eq([this]) && members.get_joint_config().len() == 1
}

impl Consensus {
    /// Begins to change the members. Everything that was submitted, up to the record `last`, must have been proposed.
    ///
    /// # Errors
    /// [`ConsensusError::Stopped`]: openraft does not answer, or another member leads.
    pub async fn begin_change(
        &self,
        change: Change,
        last: Lsn,
    ) -> Result<(Changing, Progress), ConsensusError> {
        self.store.forget_members_added();
        let before = match &change {
            Change::Vote { before, .. } => Some(before.clone()),
            Change::Learn(..) | Change::Leave(_) | Change::Complete => None,
        };
        let raft = self.raft.clone();
        let future = async move {
            let changed = raft
                .change_membership(ChangeMembers::from(change), false)
                .await;
            changed
                .map(drop)
                .map_err(|error| match error.forward_to_leader() {
                    Some(_) => Refusal::NotLeading,
                    None => Refusal::Impossible(error.to_string()),
                })
        };
        let mut changing = Changing {
            future: future.boxed(),
        };
        if self.heard().await? != last {
            return Ok((changing, Progress::Over(Err(Refusal::NotLeading))));
        }
        // Nobody else begins a change before this one is over.
        if let Some(before) = before
            && self.voters().await? != [before]
        {
            return Ok((changing, Progress::Over(Err(Refusal::Outdated))));
        }
        let progress = self.advance(&mut changing, last).await?;
        Ok((changing, progress))
    }

    /// Continues a change whose entry was committed. Everything that was submitted, up to the record `last`, must
    /// have been proposed.
    ///
    /// # Errors
    /// [`ConsensusError::Stopped`]: openraft does not answer, or has refused records, or another member leads.
    pub async fn go_on(
        &self,
        changing: &mut Changing,
        last: Lsn,
    ) -> Result<Progress, ConsensusError> {
        // Otherwise an entry with members would get the number of a record.
        let heard = self.heard().await?;
        if heard != last {
            return Err(ConsensusError::Stopped(format!(
                "records after {heard} up to {last} were refused"
            )));
        }
        self.advance(changing, last).await
    }

    /// The voters that the newest entry with members names; two sets while a change is under way.
    async fn voters(&self) -> Result<Vec<BTreeSet<MemberId>>, ConsensusError> {
        let voters = self.raft.with_raft_state(|state| {
            let members = state.membership_state.effective().membership();
            members.get_joint_config().clone()
        });
        let voters = voters.await;
        voters.map_err(|error| ConsensusError::Stopped(error.to_string()))
    }

    async fn advance(
        &self,
        changing: &mut Changing,
        last: Lsn,
    ) -> Result<Progress, ConsensusError> {
        tokio::select! {
            biased;
            lsn = self.store.members_added() => {
                // The entry may be of a leader that was elected meanwhile, which replaces records here or sent some
                // before it. An entry with exactly this number does no harm: nothing is written after it in the term
                // that is over, and this member starts over as soon as it learns of the new leader.
                if lsn != last + 1 {
                    return Err(ConsensusError::Stopped(format!(
                        "entry {lsn} with members does not follow record {last}: another member leads"
                    )));
                }
                self.executed.up_to(lsn);
                Ok(Progress::Added(lsn))
            }
            over = &mut changing.future => Ok(Progress::Over(over)),
            () = tokio::time::sleep(ADDED_WITHIN) => {
                let what = "an entry with other members was not added in time";
                Err(ConsensusError::Stopped(what.to_owned()))
            }
        }
    }

    /// Hands leadership over to another member. From here on this one answers nothing.
    ///
    /// # Errors
    /// [`ConsensusError::Stopped`]
    pub async fn transfer(&self, to: MemberId) -> Result<(), ConsensusError> {
        self.is_handing_over
            .store(true, std::sync::atomic::Ordering::Release);
        let asked = self.raft.trigger().transfer_leader(to).await;
        asked.map_err(|error| ConsensusError::Stopped(error.to_string()))
    }

    /// Whether the group has permanently removed this member. Only for a member that leads, or led until now: it has
    /// executed everything that was committed before its term, and so the last entry that names members, while
    /// another member may know only older ones. False if an entry of its log adds it again, committed or not: it may
    /// have acknowledged that already.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        if self.store.is_among_members() {
            return false;
        }
        let this = self.store.this();
        let metrics = self.raft.server_metrics();
        let newest = metrics.borrow_watched();
        newest.membership_config.get_node(&this).is_none()
    }

    /// Records that this member is no longer in the group, as when others report that to it: it has to start over.
    pub async fn leave(&self) {
        let store = self.store.clone();
        blocking(move || store.left()).await;
    }

    /// The group, for tasks in the background.
    #[must_use]
    pub fn group(&self) -> GroupView {
        GroupView {
            raft: self.raft.clone(),
            store: self.store.clone(),
            peers: self.peers.clone(),
        }
    }
}

/// The group as this member sees it. Cheap to clone.
#[derive(Clone)]
pub struct GroupView {
    raft: Raft<Group, Applied>,
    store: LogStore,
    peers: Peers,
}

/// A namenode that was asked to identify itself.
pub struct Found {
    peer: Peer,
    /// Its number.
    pub id: MemberId,
    /// Its condition in the group that it knows.
    pub condition: Condition,
}

impl GroupView {
    /// The members and their progress.
    #[must_use]
    pub fn status(&self) -> GroupStatus {
        let metrics = self.raft.metrics().borrow_watched().clone();
        let members = metrics.membership_config.membership();
        let last = metrics.last_log_index.unwrap_or(0);
        let mut told = members_of(members);
        for member in &mut told {
            let id = MemberId(member.id);
            let acknowledged = metrics.replication.as_ref().and_then(|it| it.get(&id));
            let heard = metrics.heartbeat.as_ref().and_then(|it| it.get(&id));
            let heard = heard.copied().flatten().map(|at| at.elapsed());
            member.acknowledged = acknowledged.map(|it| it.as_ref().map_or(0, |it| it.index()));
            member.heard_ms = heard.map(|it| u64::try_from(it.as_millis()).unwrap_or(u64::MAX));
        }
        GroupStatus {
            this: metrics.id.0,
            condition: Condition::Member,
            leader: metrics.current_leader.map(|it| it.0),
            term: metrics.vote.leader_id.term,
            last,
            last_term: self.term_of(last).unwrap_or(0),
            members: told,
            is_changing: members.get_joint_config().len() > 1,
        }
    }

    /// Release and versions of the other members, as they last reported.
    #[must_use]
    pub fn running(&self) -> BTreeMap<MemberId, Running> {
        self.peers.caller.releases.others()
    }

    /// Asks the namenode at an address to identify itself.
    ///
    /// # Errors
    /// It does not answer, or does not belong to this cluster.
    pub async fn find(&self, addr: SocketAddr, name: &str) -> Result<Found, FindError> {
        let caller = Arc::clone(&self.peers.caller);
        let mut peer = Peer::new(caller, None, name.to_owned(), addr);
        match peer.call(PeerRequest::Identify, IDENTIFY_DEADLINE).await? {
            (_, PeerReply::Identity { cluster, .. }) if cluster != self.store.cluster() => {
                Err(PeerError::WrongCluster(cluster).into())
            }
            (id, PeerReply::Identity { condition, .. }) => Ok(Found {
                peer,
                id,
                condition,
            }),
            _ => Err(PeerError::UnexpectedReply.into()),
        }
    }

    /// Makes a namenode outside of the group take the newest snapshot, by which it becomes able to follow.
    ///
    /// # Errors
    /// It does not answer, or there is no snapshot.
    pub async fn prepare(&self, found: &mut Found) -> Result<(), FindError> {
        let last = self.store.newest_snapshot_end();
        let last = last.ok_or(PeerError::NoSnapshot)?;
        Ok(found.peer.have_taken(last, IDENTIFY_DEADLINE).await?)
    }

    /// The term of an entry in the log; `None` if there is no such entry.
    #[must_use]
    pub fn term_of(&self, lsn: Lsn) -> Option<Term> {
        let entry = self.store.entry_at(lsn)?;
        Some(entry.committed_leader_id().term)
    }

    /// Returns a reader of the journal.
    #[must_use]
    pub fn journal(&self) -> JournalReader {
        self.store.reader()
    }

    /// Whether there is a snapshot that another namenode could take.
    #[must_use]
    pub fn has_snapshot(&self) -> bool {
        self.store.newest_snapshot_end().is_some()
    }
}

/// Why a namenode could not be reached or identified.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct FindError(#[from] PeerError);
