//! The group of namenodes: listing and changing its members, and handing leadership over.
//!
//! What takes long (a namenode receives a snapshot, catches up) is done by a background task, which requests one step
//! after another from the owner. The owner blocks while openraft adds an entry, since it assigns numbers to records
//! itself.

mod changes;
mod stuck;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::time::Duration;

use harvestfs_protocol::admin::AdminReply;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::{GroupMember, GroupRequest, GroupStatus};
use harvestfs_protocol::rpc::Reply;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use self::changes::{add, remove};
use self::stuck::Stuck;
use super::{Owner, epochs};
use crate::consensus::{Change, Changing, ELECTION_MS, MemberId, Progress, Refusal};
use crate::server::NamenodeError;
use crate::server::metrics::Responder;
use crate::server::slow_disk::SlowDisk;

/// A member that the leader has not heard for this long counts as not answering.
const SILENT_MS: u64 = 1_000;
/// How long another member may take to lead when leadership is handed over to it: several times as long as an
/// election takes if anybody can be elected. Nothing is answered meanwhile.
const HAND_OVER_WITHIN: Duration = Duration::from_secs(2);
/// How long a leader that the group has removed waits after it has handed leadership over. It is not notified of its
/// successor, and is not needed: the wait only lets the others fetch what they lack. They ask for votes within half
/// of it.
const REMOVED_WITHIN: Duration = Duration::from_millis(2 * ELECTION_MS.1);
/// Pause before a change that could not be completed is attempted again.
const COMPLETE_PAUSE: Duration = Duration::from_millis(200);

/// The next step that the owner has to take.
pub(super) enum Step {
    /// Change the members. The answer is sent when the change is committed.
    Change(Change, oneshot::Sender<Result<(), Refusal>>),
    /// Write a snapshot.
    Snapshot(oneshot::Sender<Result<(), FsError>>),
    /// An entry of the change under way was committed.
    Committed,
}

/// Operations of the group that are under way.
pub(super) struct Group {
    steps: mpsc::Receiver<Step>,
    sender: mpsc::Sender<Step>,
    /// Dropped with the owner, which ends the tasks.
    tasks: JoinSet<()>,
    changing: Option<UnderWay>,
    /// The task that completes a change.
    completing: Option<AbortHandle>,
    /// The member to which leadership is to be transferred.
    transfer_to: Option<MemberId>,
    handing_over: HandingOver,
    leaving: Leaving,
    disk: SlowDisk,
    stuck: Stuck,
    /// This namenode does not stand for election, since its clock is wrong.
    stays_out: bool,
}

struct UnderWay {
    changing: Changing,
    done: oneshot::Sender<Result<(), Refusal>>,
    /// Its entry is committed, and it continues.
    is_due: bool,
}

/// The time since which leadership is being handed over. By the clock of the runtime: the namenode's own clock does
/// not count the time in which it may not answer.
#[derive(Default)]
struct HandingOver {
    since: Option<Instant>,
    /// The member that was asked last.
    to: Option<MemberId>,
}

impl HandingOver {
    /// Notes that it is being handed over, perhaps to another member than before.
    fn begin(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// Whether no member took it over in time, as far as this member, which leads, knows.
    fn has_failed(&self, now: Instant, within: Duration) -> bool {
        self.since
            .is_some_and(|since| now.duration_since(since) >= within)
    }
}

/// Whom this namenode leaves leadership to while it should not lead itself; an error if nobody else could lead. That is
/// found several times a second, and logged when it changes.
#[derive(Default)]
struct Leaving {
    logged: Option<Result<MemberId, FsError>>,
}

impl Leaving {
    /// Returns whether this is to be logged.
    fn is_new(&mut self, to: &Result<MemberId, FsError>) -> bool {
        let is_new = self.logged.as_ref() != Some(to);
        if is_new {
            self.logged = Some(to.clone());
        }
        is_new
    }
}

impl Default for Group {
    fn default() -> Self {
        let (sender, steps) = mpsc::channel(1);
        Self {
            steps,
            sender,
            tasks: JoinSet::new(),
            changing: None,
            completing: None,
            transfer_to: None,
            handing_over: HandingOver::default(),
            leaving: Leaving::default(),
            disk: SlowDisk::default(),
            stuck: Stuck::default(),
            stays_out: false,
        }
    }
}

impl Group {
    /// Waits for the next step. Cancellation-safe.
    pub(super) async fn next(&mut self) -> Step {
        match &self.changing {
            Some(UnderWay { is_due: true, .. }) => Step::Committed,
            // One change at a time.
            Some(_) => std::future::pending().await,
            None => match self.steps.recv().await {
                Some(step) => step,
                None => unreachable!("the group has a sender"),
            },
        }
    }

    /// Notes that an entry with members is committed.
    pub(super) fn committed(&mut self) {
        if let Some(under_way) = &mut self.changing {
            under_way.is_due = true;
        }
    }

    fn steps(&self) -> Steps {
        Steps {
            sender: self.sender.clone(),
        }
    }
}

impl Owner {
    pub(super) fn group_request(&mut self, request: GroupRequest, responder: Responder) {
        let view = self.log.group();
        let status = view.status();
        let steps = self.group.steps();
        while self.group.tasks.try_join_next().is_some() {}
        match request {
            GroupRequest::List => {
                responder.send(&Ok(Reply::Admin(AdminReply::Group(status))));
            }
            GroupRequest::Add(_) if self.timeline.is_from_backup() => {
                // The added namenode would not know that it has to wait for an operator.
                let what = "this namenode was restored from a backup: accept first what that lacks, with \
                            `harvestfs admin recover --accept-loss`";
                responder.send(&Err(FsError::InvalidArgument(what.to_owned())));
            }
            GroupRequest::Add(addr) => {
                self.group.tasks.spawn(async move {
                    let added = add(&view, &steps, addr).await;
                    responder.send(&added.map(|()| Reply::Admin(AdminReply::Done)));
                });
            }
            GroupRequest::Remove(addr) => {
                let stuck = self.group.stuck.members(self.clock.now_ms());
                self.group.tasks.spawn(async move {
                    let removed = remove(&view, &steps, addr, &stuck).await;
                    responder.send(&removed.map(|()| Reply::Admin(AdminReply::Done)));
                });
            }
            GroupRequest::Transfer(to) => match successor(&status, to) {
                Ok(to) => {
                    self.group.transfer_to = Some(to);
                    responder.send(&Ok(Reply::Admin(AdminReply::Group(status))));
                }
                Err(error) => responder.send(&Err(error)),
            },
        }
    }

    /// Completes a change of the members that another leader began, or that this one did not continue for lack of a
    /// lease.
    pub(super) fn complete_change(&mut self) {
        let completing = self.group.completing.as_ref();
        let view = self.log.group();
        if completing.is_some_and(|it| !it.is_finished()) || !view.status().is_changing {
            return;
        }
        let steps = self.group.steps();
        let completing = self.group.tasks.spawn(async move {
            while let Err(refusal) = steps.change(Change::Complete).await {
                tracing::warn!(?refusal, "a change of the members is not completed yet");
                tokio::time::sleep(COMPLETE_PAUSE).await;
                if !view.status().is_changing {
                    return;
                }
            }
        });
        self.group.completing = Some(completing);
    }

    pub(super) async fn on_step(&mut self, step: Step) -> Result<(), NamenodeError> {
        let (mut under_way, progress) = match step {
            Step::Snapshot(done) => {
                self.want_snapshot(done);
                return Ok(());
            }
            Step::Change(_, done) if !self.leads() => {
                // The task may have given up.
                let _ = done.send(Err(Refusal::NotLeading));
                return Ok(());
            }
            Step::Change(change, done) => {
                tracing::info!(?change, "the members change");
                let (changing, progress) =
                    self.log.begin_change(change).await.map_err(begin_anew)?;
                let under_way = UnderWay {
                    changing,
                    done,
                    is_due: false,
                };
                (under_way, progress)
            }
            Step::Committed => {
                let Some(mut under_way) = self.group.changing.take() else {
                    unreachable!("an entry of a change under way was committed");
                };
                under_way.is_due = false;
                let going_on = self.log.go_on(&mut under_way.changing).await;
                let progress = going_on.map_err(begin_anew)?;
                (under_way, progress)
            }
        };
        match progress {
            Progress::Added(_) => {
                under_way.is_due = false;
                self.group.changing = Some(under_way);
            }
            Progress::Over(result) => {
                let is_refused = result.is_err();
                // The task may have given up.
                let _ = under_way.done.send(result);
                if is_refused {
                    self.complete_change();
                }
            }
        }
        Ok(())
    }

    /// Leaves leadership to others if this namenode is not fit for it.
    pub(super) fn mind_fitness(&mut self) {
        if self.leads() {
            let (now_ms, status) = (self.clock.now_ms(), self.log.group().status());
            self.group.stuck.sample(now_ms, &status);
            let is_slow = self.step_down_if_slow();
            let is_removed = self.step_down_if_removed();
            if !is_slow && !is_removed {
                self.group.leaving = Leaving::default();
            }
        } else {
            self.stay_out_if_clock_is_wrong();
        }
    }

    /// Does not stand for election while the local clock lets no epoch begin: once elected, it would end, and the
    /// group would lose a voter, again and again. A sole voter is elected anyway, and then reports why it does not
    /// start.
    pub(super) fn stay_out_if_clock_is_wrong(&mut self) {
        let wrong = epochs::check_clock(&self.namespace).err();
        let wrong = wrong.filter(|_| !self.log.is_alone());
        let stays_out = wrong.is_some();
        if std::mem::replace(&mut self.group.stays_out, stays_out) != stays_out {
            match wrong {
                Some(why) => tracing::error!(%why, "this namenode only votes, and does not lead"),
                None => tracing::info!("this namenode may lead again"),
            }
        }
        self.log.set_candidate(!stays_out);
    }

    /// Hands leadership over when it is this namenode's disk that is slow. Returns whether it is.
    fn step_down_if_slow(&mut self) -> bool {
        if self.log.is_alone() {
            return false;
        }
        let (committed, durable) = (self.log.committed_lsn(), self.log.durable_lsn());
        if !(self.group.disk).is_slow(self.clock.now_ms(), committed, durable) {
            return false;
        }
        let reason =
            format!("its disk is slow: it has {durable} of {committed} records that are committed");
        self.leave_to_another(&self.log.group().status(), &reason);
        true
    }

    /// Hands leadership over to the member that can lead best, if any can.
    fn leave_to_another(&mut self, status: &GroupStatus, reason: &str) {
        let to = successor(status, None);
        let is_new = self.group.leaving.is_new(&to);
        match to {
            Ok(to) => {
                if is_new {
                    tracing::warn!(reason, "this namenode hands leadership over");
                }
                self.group.transfer_to = Some(to);
            }
            Err(error) if is_new => {
                tracing::warn!(reason, %error, "this namenode should not lead, and no other one can");
            }
            Err(_) => {}
        }
    }

    /// Hands leadership over if the group that this namenode leads has removed it, as when it was elected in the
    /// middle of its removal. openraft would do so, too, but this namenode would continue to answer beside its
    /// successor. Returns whether that was found.
    fn step_down_if_removed(&mut self) -> bool {
        let group = &self.group;
        let is_handed_over = group.transfer_to.is_some() || group.handing_over.since.is_some();
        if is_handed_over || group.changing.is_some() || self.log.is_alone() {
            return false;
        }
        let status = self.log.group().status();
        let is_member = status.members.iter().any(|it| it.id == status.this);
        if status.is_changing || is_member {
            return false;
        }
        self.leave_to_another(&status, "the group has removed it");
        true
    }

    /// Hands leadership over if that is wanted. If the other member failed before it was elected, this namenode ends
    /// its own leadership: openraft would neither lead nor ask for votes any more, and perhaps no other member can be
    /// elected.
    pub(super) async fn transfer_if_asked(&mut self) -> Result<(), NamenodeError> {
        if self.leads() && self.group.handing_over.since.is_some() {
            self.check_handing_over()?;
        }
        let Some(to) = self.group.transfer_to.take() else {
            return Ok(());
        };
        if self.group.handing_over.to.replace(to) != Some(to) {
            tracing::info!(%to, "leadership is handed over");
        }
        self.log.transfer(to).await?;
        // Not earlier: what is proposed is written first, which a slow disk takes its time for.
        self.group.handing_over.begin(Instant::now());
        Ok(())
    }

    /// Whether the next leader may still appear.
    fn check_handing_over(&self) -> Result<(), NamenodeError> {
        let is_removed = self.log.is_removed();
        let within = if is_removed {
            REMOVED_WITHIN
        } else {
            HAND_OVER_WITHIN
        };
        if !self.group.handing_over.has_failed(Instant::now(), within) {
            return Ok(());
        }
        if !is_removed {
            tracing::warn!("nobody took leadership over in time");
        }
        Err(NamenodeError::Deposed)
    }

    /// Records that this namenode left, if the group has removed it while it led. No other member notifies it: it has
    /// the entry that removed it, and as a mere standby it would remain one forever.
    pub(super) async fn leave_if_removed(&self) {
        if self.leads() && self.log.is_removed() {
            tracing::info!("the group goes on without this namenode, which it has removed");
            self.log.leave().await;
        }
    }
}

/// It is no longer certain which entries exist: the journal knows.
fn begin_anew(error: NamenodeError) -> NamenodeError {
    tracing::error!(%error, "the members could not be changed");
    NamenodeError::Deposed
}

impl From<Refusal> for FsError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            // The operator's command asks again.
            Refusal::NotLeading => Self::NotLeader { leader: None },
            Refusal::Outdated => {
                Self::InvalidArgument("others change the members as well: do it again".to_owned())
            }
            Refusal::Impossible(why) => Self::InvalidArgument(why),
        }
    }
}

/// A handle that requests steps from the owner.
struct Steps {
    sender: mpsc::Sender<Step>,
}

impl Steps {
    async fn change(&self, change: Change) -> Result<(), Refusal> {
        let (done, answer) = oneshot::channel();
        self.ask(Step::Change(change, done), answer).await
    }

    async fn snapshot(&self) -> Result<(), FsError> {
        let (done, answer) = oneshot::channel();
        self.ask(Step::Snapshot(done), answer).await
    }

    async fn ask<E: From<Refusal>>(
        &self,
        step: Step,
        answer: oneshot::Receiver<Result<(), E>>,
    ) -> Result<(), E> {
        // This namenode no longer leads: the operator's command asks the one that does.
        let gone = || E::from(Refusal::NotLeading);
        self.sender.send(step).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

/// Returns the member that is to lead next.
fn successor(status: &GroupStatus, to: Option<SocketAddr>) -> Result<MemberId, FsError> {
    let member = match to {
        Some(addr) => member_at(status, addr, |it| (!it.is_voter, !answers(status, it)))?,
        None => {
            let others = status
                .members
                .iter()
                .filter(|it| it.is_voter && it.id != status.this && answers(status, it));
            let best = others.max_by_key(|it| it.acknowledged);
            best.ok_or_else(|| {
                let what = "no other namenode could lead: none that has a vote answers. Start one, or add one with \
                            `harvestfs admin namenode add`";
                FsError::InvalidArgument(what.to_owned())
            })?
        }
    };
    if member.id == status.this {
        let what = format!("the namenode at {} leads already", member.addr);
        return Err(FsError::InvalidArgument(what));
    }
    if !member.is_voter || !answers(status, member) {
        return Err(FsError::InvalidArgument(format!(
            "the namenode at {} cannot lead: it {}",
            member.addr,
            if member.is_voter {
                "does not answer. Start it first, or name another one"
            } else {
                "has no vote yet. Add it again with `harvestfs admin namenode add`"
            }
        )));
    }
    Ok(MemberId(member.id))
}

/// Whether the leader has heard a member recently.
pub(super) fn answers(status: &GroupStatus, member: &GroupMember) -> bool {
    member.id == status.this || member.heard_ms.is_some_and(|ms| ms < SILENT_MS)
}

/// Returns the member at an address. Of several, since one lost its directory before it got a vote, the one of lowest
/// `rank`.
fn member_at(
    status: &GroupStatus,
    addr: SocketAddr,
    rank: impl Fn(&GroupMember) -> (bool, bool),
) -> Result<&GroupMember, FsError> {
    let members = status.members.iter().filter(|it| it.addr == addr);
    members.min_by_key(|it| rank(it)).ok_or_else(|| {
        let known: Vec<String> = status
            .members
            .iter()
            .map(|it| it.addr.to_string())
            .collect();
        FsError::InvalidArgument(format!(
            "no namenode of the group listens on {addr}, but on {}",
            known.join(", ")
        ))
    })
}
