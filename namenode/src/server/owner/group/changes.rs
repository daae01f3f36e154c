//! Adding a namenode to the group and removing one from it, step by step.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::{Condition, GroupMember, GroupStatus};

use super::{Steps, answers, member_at};
use crate::consensus::{Change, FindError, Found, GroupView, Member, MemberId, Refusal};
use crate::journal::Lsn;

/// How long a namenode that is added may take to catch up with the others.
const CATCH_UP_WITHIN: Duration = Duration::from_secs(3600);
/// How long a namenode that has caught up may take for one more step.
const STEP_WITHIN: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// A member that lacks at most this many records has caught up: it gets the rest while it gets a vote.
const CAUGHT_UP_RECORDS: Lsn = 1_000;
/// How often a change of the voters is attempted if others changed them in between.
const VOTE_ATTEMPTS: usize = 8;
/// How long a change waits for the one before it.
const OTHER_CHANGE_WITHIN: Duration = Duration::from_secs(10);
/// How long a removed member may take to learn of its removal, by asking for votes.
const LEFT_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take until the leader hears from a member that was just started.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// How long a member that answers may take to store what it lacks: a sync takes seconds on a busy disk.
const STORED_WITHIN: Duration = Duration::from_secs(15);

/// Adds the namenode at an address to the group.
pub(super) async fn add(view: &GroupView, steps: &Steps, addr: SocketAddr) -> Result<(), FsError> {
    let status = once_unchanging(view).await?;
    let this = this_member(&status)?;
    if this.addr.ip().is_unspecified() {
        return Err(FsError::InvalidArgument(format!(
            "this namenode listens on {}, under which others do not reach it: set `listen` in its \
             configuration to its own address, and start it again",
            this.addr
        )));
    }
    let name = this.name.clone();
    let mut found = find(view, addr, &name, &status).await?;
    let id = found.id;
    if !view.has_snapshot() {
        steps.snapshot().await?;
    }
    let prepared = async {
        view.prepare(&mut found)
            .await
            .map_err(|error| not_reached(addr, &error))?;
        let member = Member {
            name: name.clone(),
            addr,
        };
        steps.change(Change::Learn(id, member)).await?;
        while !has_caught_up(&view.status(), id) {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    };
    let late = || {
        FsError::InvalidArgument(format!(
            "the namenode at {addr} does not catch up: look at its log, its disk and its network, and add it again"
        ))
    };
    let prepared = tokio::time::timeout(CATCH_UP_WITHIN, prepared).await;
    prepared.unwrap_or_else(|_| Err(late()))?;
    for lost in others_without_vote(&view.status(), id, addr) {
        steps.change(Change::Leave(lost)).await?;
    }
    for _ in 0..VOTE_ATTEMPTS {
        let status = once_unchanging(view).await?;
        // A voter that had the address before is replaced by this one.
        let mut left = voters_where(&status, |it| it.addr != addr);
        left.insert(id);
        match vote(view, steps, &status, left).await {
            Err(VoteError::Outdated) => {}
            Err(VoteError::Failed(error)) => return Err(error),
            Ok(()) => return Ok(()),
        }
    }
    Err(Refusal::Outdated.into())
}

/// The other members without a vote at the address that this member has now: their directories were lost before they
/// got one.
pub(super) fn others_without_vote(
    status: &GroupStatus,
    id: MemberId,
    addr: SocketAddr,
) -> Vec<MemberId> {
    let members = status.members.iter();
    let others = members.filter(|it| it.addr == addr && !it.is_voter && it.id != id.0);
    others.map(|it| MemberId(it.id)).collect()
}

/// Returns the member to remove when the one at this address is to leave: if there are several, one that was lost.
pub(super) fn leaving(status: &GroupStatus, addr: SocketAddr) -> Result<&GroupMember, FsError> {
    member_at(status, addr, |it| (answers(status, it), it.is_voter))
}

/// Whether an added member has what the others have, so that a majority that depends on it can continue.
pub(super) fn has_caught_up(status: &GroupStatus, id: MemberId) -> bool {
    let member = status.members.iter().find(|it| it.id == id.0);
    member.is_some_and(|member| {
        // Even in a group with few records: a member that has acknowledged none may no longer exist.
        let acknowledged = member.acknowledged.filter(|lsn| *lsn > 0);
        let is_near = acknowledged.is_some_and(|lsn| lsn + CAUGHT_UP_RECORDS >= status.last);
        is_near && answers(status, member)
    })
}

fn voters_where(
    status: &GroupStatus,
    is_meant: impl Fn(&GroupMember) -> bool,
) -> BTreeSet<MemberId> {
    let voters = status.members.iter().filter(|it| it.is_voter);
    let meant = voters.filter(|it| is_meant(it));
    meant.map(|it| MemberId(it.id)).collect()
}

/// Finds the namenode at an address, and checks that it can be added to the group.
async fn find(
    view: &GroupView,
    addr: SocketAddr,
    name: &str,
    status: &GroupStatus,
) -> Result<Found, FsError> {
    let refused = |what: &str| {
        Err(FsError::InvalidArgument(format!(
            "the namenode at {addr} {what}"
        )))
    };
    let deadline = tokio::time::Instant::now() + LEFT_WITHIN;
    loop {
        let found = view.find(addr, name).await;
        let found = found.map_err(|error| not_reached(addr, &error))?;
        let member = status.members.iter().find(|it| it.id == found.id.0);
        match (member, found.condition) {
            (Some(member), _) if member.is_voter => return refused("is a member already"),
            (None, Condition::Founding) => {
                return refused(
                    "waits for those with which its directory was made, as one does that was put back to how it began: \
                     make a new directory for it with `harvestfs init namenode`",
                );
            }
            (None, Condition::Member) if tokio::time::Instant::now() < deadline => {
                // Perhaps it was removed a moment ago, and the others have not notified it yet.
                tokio::time::sleep(POLL).await;
            }
            (None, Condition::Member) => {
                return refused(
                    "is a member of another group, or was one of this and cannot ask the others whether it still is: \
                     look at its log. If it is of another group of this cluster, stop it: only one may serve. For this \
                     one, make a new directory for it with `harvestfs init namenode`",
                );
            }
            _ => return Ok(found),
        }
    }
}

fn not_reached(addr: SocketAddr, error: &FindError) -> FsError {
    FsError::InvalidArgument(format!(
        "the namenode at {addr} cannot be added: {error}. It has to be made with `harvestfs init namenode` where \
         this cluster's authority is, to run, and to be reached from here under this address"
    ))
}

/// Removes the member at an address from the group. Members that were `stuck` at these records may answer, and store
/// nothing.
pub(super) async fn remove(
    view: &GroupView,
    steps: &Steps,
    addr: SocketAddr,
    stuck: &BTreeMap<MemberId, Lsn>,
) -> Result<(), FsError> {
    for _ in 0..VOTE_ATTEMPTS {
        let status = once_unchanging(view).await?;
        let member = leaving(&status, addr)?;
        let id = MemberId(member.id);
        if member.id == status.this {
            let is_only = status.members.len() == 1;
            let what = if is_only {
                "it is the only namenode: add another one first, with `harvestfs admin namenode add`"
            } else {
                "the namenode that leads cannot be removed: hand leadership over first, with \
                 `harvestfs admin namenode transfer`"
            };
            return Err(FsError::InvalidArgument(what.to_owned()));
        }
        if !member.is_voter {
            return Ok(steps.change(Change::Leave(id)).await?);
        }
        let status = once_left_answer(view, id, addr, stuck).await?;
        let left = voters_where(&status, |it| it.id != id.0);
        match vote(view, steps, &status, left).await {
            Err(VoteError::Outdated) => {}
            Err(VoteError::Failed(error)) => return Err(error),
            Ok(()) => return Ok(()),
        }
    }
    Err(Refusal::Outdated.into())
}

/// Returns how many voters there are other than `without`, and how many of them answer and are not `stuck` any more:
/// what is decided without it has to be stored by most of them.
pub(super) fn voters_left(
    status: &GroupStatus,
    without: MemberId,
    stuck: &BTreeMap<MemberId, Lsn>,
) -> (usize, usize) {
    let members = status.members.iter();
    let left = members.filter(|it| it.is_voter && it.id != without.0);
    let left: Vec<&GroupMember> = left.collect();
    let is_stuck = |it: &GroupMember| {
        let at = stuck.get(&MemberId(it.id));
        at.is_some_and(|at| it.acknowledged == Some(*at))
    };
    let counts = left
        .iter()
        .filter(|it| answers(status, it) && !is_stuck(it));
    (left.len(), counts.count())
}

/// Returns the group once most of its voters other than `without` answer and store what they are sent.
async fn once_left_answer(
    view: &GroupView,
    without: MemberId,
    addr: SocketAddr,
    stuck: &BTreeMap<MemberId, Lsn>,
) -> Result<GroupStatus, FsError> {
    let began = tokio::time::Instant::now();
    let mut answered = began;
    loop {
        let status = view.status();
        let (left, store) = voters_left(&status, without, stuck);
        if store * 2 > left {
            return Ok(status);
        }
        let (_, answer) = voters_left(&status, without, &BTreeMap::new());
        if answer * 2 > left {
            answered = tokio::time::Instant::now();
        }
        if answered.elapsed() >= HEARD_WITHIN || began.elapsed() >= STORED_WITHIN {
            return Err(FsError::InvalidArgument(format!(
                "without the namenode at {addr}, {answer} of {left} would answer, and {store} store what changes, which \
                 is no majority: start the others first, look at their disks, or wait until they have caught up"
            )));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Why the voters were not changed.
enum VoteError {
    /// Another change of them came first: what to do now has to be determined again.
    Outdated,
    Failed(FsError),
}

impl From<FsError> for VoteError {
    fn from(error: FsError) -> Self {
        Self::Failed(error)
    }
}

/// Makes these members the voters, if the voters are still those in `seen`.
async fn vote(
    view: &GroupView,
    steps: &Steps,
    seen: &GroupStatus,
    voters: BTreeSet<MemberId>,
) -> Result<(), VoteError> {
    let before = voters_where(seen, |_| true);
    let change = steps.change(Change::Vote {
        before,
        voters: voters.clone(),
    });
    match tokio::time::timeout(STEP_WITHIN, change).await {
        Ok(Err(Refusal::Outdated)) => Err(VoteError::Outdated),
        // The first of its entries may be committed, in which case the change is completed without this task.
        Ok(Err(refused @ Refusal::NotLeading)) => {
            let status = once_unchanging(view).await?;
            if voters_where(&status, |_| true) == voters {
                Ok(())
            } else {
                Err(FsError::from(refused).into())
            }
        }
        Ok(changed) => changed.map_err(|refused| FsError::from(refused).into()),
        Err(_) => {
            let what = "the change is under way, and not enough namenodes answer to complete it: start the others";
            Err(FsError::Internal(what.to_owned()).into())
        }
    }
}

fn this_member(status: &GroupStatus) -> Result<&GroupMember, FsError> {
    let this = status.members.iter().find(|it| it.id == status.this);
    this.ok_or_else(|| FsError::Internal("this namenode is not among the members".to_owned()))
}

/// Returns the group once no change of its members is under way. The current leader may be completing one.
async fn once_unchanging(view: &GroupView) -> Result<GroupStatus, FsError> {
    let deadline = tokio::time::Instant::now() + OTHER_CHANGE_WITHIN;
    loop {
        let status = view.status();
        if !status.is_changing {
            return Ok(status);
        }
        if tokio::time::Instant::now() >= deadline {
            let what = "another change of the members is under way";
            return Err(FsError::InvalidArgument(what.to_owned()));
        }
        tokio::time::sleep(POLL).await;
    }
}
