//! The owner: the one task that owns the engine.
//!
//! It takes what has arrived, applies or answers it, hands the records of the round to the journal together, and
//! starts the next round while the journal works. Replies leave when the journal has their records on stable storage
//! and other sessions have forgotten what was changed (see [`super::gate`] and [`super::leases`]). There is no lock:
//! no other task has access to the engine.

mod admin;
mod announce;
mod backup;
mod deferred;
mod ending;
mod epochs;
mod group;
mod history;
mod locate;
mod meta;
mod mutate;
mod node;
mod placement;
mod replay;
mod session;
mod standby;
mod upgrade;
mod upkeep;
mod watch;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::ids::{NodeId, SessionId};
use harvestfs_protocol::limits::DELEGATIONS_PER_SESSION_MAX;
use harvestfs_protocol::machine;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::timeline::{Epoch, Position};
use harvestfs_protocol::transport::NoticeSender;
use harvestfs_protocol::version::Version;
use harvestfs_telemetry::analysis::Analysis;
use rand::rngs::StdRng;
use rustc_hash::FxHashMap;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use self::admin::Checkpoints;
use self::backup::Backups;
use self::deferred::Deferred;
pub(crate) use self::ending::{Ended, Stop};
use self::group::Group;
use self::standby::Part;
use self::upkeep::Upkeep;
use super::activity::Activity;
use super::clock::{self, Clock};
use super::connection::Event;
use super::delegations::Delegations;
use super::gate::{AnsweredEarly, Gate, Undurable};
use super::history::Historian;
use super::leases::Leases;
use super::log::Log;
use super::metrics::Responder;
use super::observer::Question;
use super::overtaken::Overtaken;
use super::sessions::{ConnectionId, Sessions};
use super::timeline::Timeline;
use super::token_keys::TokenKeys;
use super::{NamenodeError, NamenodeOptions};
use crate::consensus::{COMMAND_BYTES_MAX, Commits, Committed, LeadershipReceiver, Running, Term};
use crate::engine::cluster::{Cluster, Happening};
use crate::engine::namespace::{Applied, BlockChange, Command, Effects, Formatted, Namespace};
use crate::journal::Lsn;

/// Maximum number of events taken in one round. More would delay the first of them; fewer would cost a wake-up of the
/// journal for each.
const ROUND_EVENTS_MAX: usize = 256;

/// How often to check whether keys of block tokens have to change.
const KEY_CHECK_INTERVAL_MS: u64 = 10_000;

/// How often a leader without a lease checks whether it has regained one.
const LEASE_POLL: Duration = Duration::from_millis(5);

/// What arrives for the owner.
pub(crate) struct Asked {
    /// From peers.
    pub events: mpsc::Receiver<Event>,
    /// From observers.
    pub questions: mpsc::Receiver<Question>,
}

/// The engine, and all state around it that need not survive a restart.
pub(crate) struct Owner {
    options: NamenodeOptions,
    clock: Clock,
    rng: StdRng,
    formatted: Formatted,
    namespace: Namespace,
    cluster: Cluster,
    log: Log,
    tokens: TokenKeys,
    next_key_check_ms: u64,
    last_tick_ms: u64,
    /// The last tick at which this namenode had a lease; its start at first. An `Instant`, since its own clock does
    /// not count the time without a lease.
    last_lease: Instant,
    connections: FxHashMap<ConnectionId, Connected>,
    /// The connection on which each datanode registered last.
    node_connections: FxHashMap<NodeId, ConnectionId>,
    sessions: Sessions,
    leases: Leases,
    delegations: Delegations,
    /// Calls that wait for commits.
    deferred: Vec<Deferred>,
    /// Some deferred calls may be answerable now.
    deferred_due: bool,
    overtaken: Overtaken,
    gate: Gate<Answer>,
    undurable: Undurable,
    answered_early: AnsweredEarly,
    /// Changes that make datanodes remove or truncate replicas. The cluster gets them only when their record is
    /// durable, or a crash would bring a block back without its data.
    destructive: VecDeque<(Lsn, BlockChange)>,
    /// Orphans from before the restart have not been swept yet.
    sweep_due: bool,
    /// Only what helps to answer earlier requests is still accepted.
    stopping: bool,
    checkpoints: Checkpoints,
    backups: Backups,
    historian: Historian,
    /// The latest result of the historian.
    analysis: Option<Arc<Analysis>>,
    timeline: Timeline,
    part: Part,
    leadership: LeadershipReceiver,
    group: Group,
    /// Addresses of the group's members, as they were last announced.
    namenodes: Vec<SocketAddr>,
    /// What other namenodes committed.
    committed: mpsc::Receiver<Committed>,
    /// The last term that began, as far as the engine has followed the log.
    begun_term: Option<Term>,
    /// The record that raised the version of the cluster, and the version before it.
    raised: Option<(Lsn, Version)>,
    /// The record that began the current epoch: no peer learns of the epoch before this is durable.
    epoch_record: Lsn,
    /// The session that compacts, and until when no other may.
    compactor: Option<(SessionId, u64)>,
    upkeep: Upkeep,
    activity: Activity,
}

/// A peer that is connected.
struct Connected {
    peer: Peer,
    ip: IpAddr,
    running: Running,
    notices: NoticeSender<Notice>,
    session: Option<SessionId>,
    node: Option<NodeId>,
    /// The position that the datanode had obeyed when it registered.
    obeyed: Option<Position>,
    /// How far the datanode's clock was ahead of ours at its last heartbeat.
    clock_ahead_ms: Option<i64>,
    /// Version of the datanode's software.
    version: Option<String>,
}

/// A reply and how to send it.
struct Answer {
    responder: Responder,
    response: Response,
    /// The mutation that it answers.
    mutation: Option<(SessionId, u64)>,
}

/// The parts that [`Owner::new`] assembles.
pub(super) struct Parts {
    pub options: NamenodeOptions,
    pub namespace: Namespace,
    pub formatted: Formatted,
    pub cluster: Cluster,
    pub log: Log,
    pub records_since_snapshot: u64,
    /// The last record that raised the version of the cluster, which may not be committed, and the version before it.
    pub raised: Option<(Lsn, Version)>,
    pub from_backup: Option<Lsn>,
    pub tokens: TokenKeys,
    pub historian: Historian,
    pub rng: StdRng,
    pub clock: Clock,
    pub leadership: LeadershipReceiver,
    pub committed: mpsc::Receiver<Committed>,
}

impl Owner {
    /// Begins as a standby, until it is elected.
    pub(super) fn new(parts: Parts) -> Self {
        let Parts {
            options,
            namespace,
            formatted,
            cluster,
            log,
            records_since_snapshot,
            raised,
            from_backup,
            tokens,
            historian,
            rng,
            clock,
            leadership,
            committed,
        } = parts;
        let lease_ms = u64::try_from(options.lease.as_millis()).unwrap_or(u64::MAX);
        let leases = Leases::new(lease_ms, options.grants_max);
        let restored = log.last_lsn();
        let mut owner = Self {
            checkpoints: Checkpoints::new(&log, records_since_snapshot),
            backups: Backups::default(),
            options,
            clock,
            rng,
            formatted,
            namespace,
            cluster,
            log,
            tokens,
            next_key_check_ms: 0,
            last_tick_ms: 0,
            last_lease: Instant::now(),
            connections: FxHashMap::default(),
            node_connections: FxHashMap::default(),
            sessions: Sessions::default(),
            leases,
            delegations: Delegations::new(DELEGATIONS_PER_SESSION_MAX, lease_ms),
            deferred: Vec::new(),
            deferred_due: false,
            overtaken: Overtaken::default(),
            gate: Gate::new(),
            undurable: Undurable::default(),
            answered_early: AnsweredEarly::default(),
            destructive: VecDeque::new(),
            sweep_due: true,
            stopping: false,
            historian,
            analysis: None,
            // Until it leads, it is in no epoch.
            timeline: Timeline::new(
                Epoch::default(),
                from_backup.map_or(restored, |record| record.min(restored)),
                from_backup.is_some(),
            ),
            part: Part::Standby,
            leadership,
            group: Group::default(),
            namenodes: Vec::new(),
            committed,
            begun_term: None,
            raised,
            epoch_record: restored,
            compactor: None,
            upkeep: Upkeep::default(),
            activity: Activity::default(),
        };
        owner.restore_soft_state();
        owner.note_namenodes();
        owner
    }

    /// Works until it is stopped or deposed, or the journal fails. `ready` is called in each round in which it
    /// serves. Connections of peers end when `holding` is dropped.
    pub(crate) async fn run(
        mut self,
        mut asked: Asked,
        holding: harvestfs_protocol::watch::Sender<()>,
        stop: &mut oneshot::Receiver<Stop>,
        ready: impl FnMut(),
    ) -> Result<Ended, NamenodeError> {
        let worked = self.work(&mut asked, stop, ready).await;
        if let Ok(Stop::Gracefully) = worked {
            self.checkpoints.cancel().await;
            self.answer_what_is_in_flight(asked.events).await;
        } else {
            // Peers look for another namenode, and must not wait for a slow disk to write all that is pending.
            drop((asked, holding));
            self.let_go();
            self.checkpoints.cancel().await;
        }
        self.end(worked.map(|_| ())).await
    }

    async fn work(
        &mut self,
        asked: &mut Asked,
        stop: &mut oneshot::Receiver<Stop>,
        mut ready: impl FnMut(),
    ) -> Result<Stop, NamenodeError> {
        let Asked { events, questions } = asked;
        let commits = self.log.commits();
        let mut leadership = self.leadership.clone();
        let mut tick = tokio::time::interval(self.options.tick);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut round = Vec::with_capacity(ROUND_EVENTS_MAX);
        loop {
            let may_answer = self.may_answer();
            tokio::select! {
                biased;
                how = &mut *stop => return Ok(how.unwrap_or(Stop::AtOnce)),
                Ok(()) = leadership.changed() => {}
                Some(committed) = self.committed.recv() => self.on_committed(committed)?,
                () = tokio::time::sleep(LEASE_POLL), if !may_answer || !round.is_empty() => {}
                () = commits.changed() => self.on_progress(),
                _ = tick.tick() => {
                    self.on_tick();
                    self.log.propose().await;
                    self.log.propose_refused().await;
                }
                Some(result) = self.checkpoints.finished() => self.on_checkpoint(result),
                Some(finished) = self.historian.finished() => self.on_history(finished),
                step = self.group.next() => self.on_step(step).await?,
                taken = events.recv_many(&mut round, ROUND_EVENTS_MAX),
                    if may_answer && round.is_empty() =>
                {
                    if taken == 0 {
                        return Ok(Stop::Gracefully);
                    }
                }
                Some(question) = questions.recv() => question(self),
            }
            self.take_over_if_elected()?;
            // Checked again: it may have waited for longer than its lease lasted.
            if self.may_answer() {
                for event in round.drain(..) {
                    self.on_event(event);
                }
            }
            // So that questions are answered even under a constant load of requests, and while none is taken for lack
            // of a lease.
            if let Ok(question) = questions.try_recv() {
                question(self);
            }
            self.log.flush().await;
            self.transfer_if_asked().await?;
            if self.serves() {
                ready();
            }
            self.begin_checkpoint_if_due().await;
            if let Some(failure) = self.log.failure() {
                tracing::error!(error = %failure, "nothing more is committed");
                return Err(failure);
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Connected {
                connection,
                peer,
                ip,
                running,
                notices,
            } => {
                let connected = Connected {
                    peer,
                    ip,
                    running,
                    notices,
                    session: None,
                    node: None,
                    obeyed: None,
                    clock_ahead_ms: None,
                    version: None,
                };
                self.connections.insert(connection, connected);
            }
            Event::Request {
                connection,
                request,
                responder,
            } => {
                let id = responder.request_id();
                id.during(|| self.on_request(connection, request, responder));
            }
            Event::Disconnected { connection } => self.on_disconnected(connection),
        }
        if std::mem::take(&mut self.deferred_due) {
            self.ask_deferred();
        }
    }

    /// Decides which roles may make which requests. What is not listed here is denied.
    fn on_request(&mut self, connection: ConnectionId, request: Request, responder: Responder) {
        let Some(role) = self.connections.get(&connection).map(|c| c.peer.role) else {
            // Every connection is announced before its first request and lives until its last.
            tracing::error!(connection, "a request of an unknown connection");
            return;
        };
        if self.stopping && !matches!(request, Request::AckInvalidation { .. }) {
            // Dropping the responder notifies the client that no answer will come.
            return;
        }
        let Some((request, responder)) = self.unless_standby(request, responder) else {
            return;
        };
        match (role, request) {
            (Role::Client | Role::Admin, Request::OpenSession(open)) => {
                self.open_session(connection, open, responder);
            }
            (Role::Client | Role::Admin, Request::KeepAlive) => {
                let response = self.session_of(connection).map(|_| Reply::Done);
                responder.send(&response);
            }
            (Role::Client | Role::Admin, Request::AckInvalidation { id }) => {
                self.acknowledged(connection, id, responder);
            }
            (Role::Client | Role::Admin, Request::CloseSession) => {
                self.close_session(connection, responder);
            }
            (Role::Client | Role::Admin, Request::Meta(call)) => {
                self.meta(connection, call, responder);
            }
            (Role::Datanode, Request::Node(request)) => {
                self.node_request(connection, request, responder);
            }
            (Role::Admin, Request::Admin(request)) => {
                self.admin(connection, request, responder);
            }
            (role, request) => {
                let what = match request {
                    Request::Node(_) => "requests of datanodes",
                    Request::Admin(_) => "requests of operators",
                    _ => "requests of clients",
                };
                let denied = FsError::RoleDenied(format!("a {role} may not make {what}"));
                responder.send(&Err(denied));
            }
        }
    }

    fn on_disconnected(&mut self, connection: ConnectionId) {
        let Some(gone) = self.connections.remove(&connection) else {
            return;
        };
        self.backups.disconnected(connection);
        if let Some(session) = gone.session.and_then(|id| self.sessions.get_mut(id))
            && session.connection == Some(connection)
        {
            // It may come back on another connection.
            session.connection = None;
        }
        if let Some(node) = gone.node
            && self.node_connections.get(&node) == Some(&connection)
        {
            self.node_connections.remove(&node);
            self.cluster.disconnected(self.clock.now_ms(), node);
        }
    }

    fn on_tick(&mut self) {
        self.take_out_pause();
        let now_ms = self.clock.now_ms();
        self.last_tick_ms = now_ms;
        if self.log.has_lease() {
            self.last_lease = Instant::now();
        }
        self.on_progress();
        self.note_namenodes();
        self.mind_fitness();
        self.cluster.tick(now_ms, &mut self.rng);
        self.note_happenings();
        self.ask_deferred();
        self.historian.tick(clock::unix_now_s());
        // Without a lease openraft accepts no records: they would only pile up.
        if self.leads() && self.may_answer() && !self.timeline.is_recovering() {
            self.end_silent_sessions(now_ms);
            self.keep_up();
            self.renew_epoch();
        }
        if now_ms >= self.next_key_check_ms {
            self.next_key_check_ms = now_ms + KEY_CHECK_INTERVAL_MS;
            if let Err(error) = self
                .tokens
                .rotate(clock::unix_now_ms(), &mut machine::rng())
            {
                tracing::error!(%error, "the keys of block tokens were not changed; trying again");
            }
        }
    }

    /// Keeps the cluster's happenings for operators.
    fn note_happenings(&mut self) {
        let now_s = clock::unix_now_s();
        let happenings: Vec<Happening> = self.cluster.take_happenings().collect();
        for happening in happenings {
            let cluster = &self.cluster;
            let name = |node| match cluster.node_info(node) {
                Some(info) => info.name,
                None => node.to_string(),
            };
            self.activity.note(now_s, happening, name);
        }
    }

    /// How far the log is committed.
    pub(crate) fn commits(&self) -> Arc<Commits> {
        self.log.commits()
    }

    /// The record that a reply which may show anything has to wait for.
    pub(crate) fn undurable(&self) -> Option<Lsn> {
        self.undurable.last()
    }

    /// Acts on what has become committed since the last call.
    fn on_progress(&mut self) {
        let lsn = self.log.committed_lsn();
        self.undurable.durable(lsn);
        self.answered_early.durable(lsn);
        for answer in self.gate.durable(lsn) {
            self.send(answer);
        }
        self.forget_backup(lsn);
        let durable = self
            .destructive
            .partition_point(|(record, _)| *record <= lsn);
        let now_ms = self.clock.now_ms();
        for (_, change) in self.destructive.drain(..durable) {
            self.cluster.apply_change(now_ms, &change);
        }
    }

    /// Applies a command and adds it to the round's records. With `awaited`, something waits for the record to become
    /// durable. Returns the result and the number of the record.
    fn execute(&mut self, command: &Command, awaited: bool) -> Result<(Applied, Lsn), FsError> {
        if !epochs::is_allowed_in_recovery(command) {
            self.timeline.check_serving()?;
        }
        // Encoded first: what cannot be journaled must not be applied.
        let record = command.encode()?;
        if record.len() > COMMAND_BYTES_MAX {
            return Err(FsError::InvalidArgument(format!(
                "a change of {} bytes at once; at most {COMMAND_BYTES_MAX}",
                record.len()
            )));
        }
        let applied = self.namespace.apply(command)?;
        let lsn = self.log.push(record, awaited);
        let Effects {
            inodes,
            entries,
            blocks,
        } = &applied.effects;
        if awaited {
            let dirs = entries.iter().map(|(dir, _)| *dir);
            self.undurable.note(lsn, inodes.iter().copied().chain(dirs));
        }
        let now_ms = self.clock.now_ms();
        for change in blocks {
            match change {
                BlockChange::Freed { .. } | BlockChange::Sealed { .. }
                    if !planted::is(Bug::RemovesBeforeDurable) =>
                {
                    self.destructive.push_back((lsn, change.clone()));
                }
                _ => self.cluster.apply_change(now_ms, change),
            }
        }
        Ok((applied, lsn))
    }

    /// Sends a response; if `record` is given, once it is durable.
    fn answer(&mut self, responder: Responder, response: Response, record: Option<Lsn>) {
        let id = self.gate.next_id();
        let answer = Answer {
            responder,
            response,
            mutation: None,
        };
        if let Some(answer) = self.gate.hold(id, answer, record, false) {
            self.send(answer);
        }
    }

    fn send(&mut self, answer: Answer) {
        if let Some((id, sequence)) = answer.mutation
            && let Some(session) = self.sessions.get_mut(id)
        {
            session.unanswered.remove(&sequence);
        }
        answer.responder.send(&answer.response);
    }
}
