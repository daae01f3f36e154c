//! Calls to the namenode: numbered so that a repeated mutation is executed once, and repeated until
//! they are answered.
//!
//! Commits that are not demanded durable, and changes of the attributes of files whose first
//! content is not committed yet, are answered before they are durable. A namenode that crashes just
//! then forgets them, and the client replays them with their old numbers when the session resumes.
//! So their requests are kept until a later durable mutation is answered: the journal is written in
//! order.

use std::sync::Arc;
use std::time::Instant;

use futures::future::{BoxFuture, join};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::mutation::{self, Answered, Creates, Unfrozen, Window};
use harvestfs_protocol::meta::{
    Housekeeping, MetaCall, MetaOp, MetaReply, Mutated, Mutation, MutationCall, Query,
};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::rpc::{Reply, Request};
use harvestfs_protocol::transport::{CloseCode, RpcError};
use harvestfs_protocol::types::{Attr, Credentials};

use super::Session;
use super::commits::Silence;
use super::listener::Invalidation;
use super::replay::make_replay;
use super::sequences::Numbered;
use crate::driver::clock;
use crate::engine::cache::{Scope, Ticket, Unsettled};
use crate::engine::session::call::{
    ATTEMPT_DEADLINE, Again, Call, Failure, Patience, RETRY_PAUSE_MAX, RETRY_PAUSE_MIN, Repeats,
    Unanswered,
};
use crate::engine::session::sequences::{CONFIRMING_WINDOW, WINDOW};
use crate::error::ClientError;

/// Requests kept for replay, before a durable mutation is made just to drop them.
const UNCONFIRMED_MAX: usize = 128;

/// What a mutation comes with.
#[derive(Clone, Copy, Default)]
pub(super) struct Beside {
    /// It may be answered before it is durable.
    relaxed: bool,
    /// The file that blocks are allocated for.
    file: Option<InodeId>,
    /// What was removed here was released before: a quota that refuses it is full.
    released: bool,
}

/// Learns what came of a mutation.
pub(super) type Afterwards = Box<dyn FnOnce(Result<&MetaReply, &Unanswered>) + Send>;

/// A mutation whose caller waits for it. If the caller goes away, a task completes it, so that the
/// cache does not keep what it changed.
struct Pending<'a> {
    session: &'a Arc<Session>,
    /// None while it goes on in another session.
    number: Option<Numbered>,
    /// Taken when it has ended.
    ticket: Option<Ticket>,
    request: Arc<Request>,
    /// Who is told what came of it, also when the caller is gone. Dropped when it is not executed for sure.
    afterwards: Option<Afterwards>,
}

impl Pending<'_> {
    /// Goes on in another session, or again.
    fn renumber(&mut self, number: Numbered) {
        let request = Arc::make_mut(&mut self.request);
        let Request::Meta(MetaCall {
            op: MetaOp::Mutation(call),
            ..
        }) = request
        else {
            unreachable!("only mutations are pending, not {request:?}");
        };
        call.sequence = number.sequence();
        call.answered_below = number.answered_below();
        self.number = Some(number);
    }

    /// It has ended: what the cache is to learn by. Its number is free again, unless it is kept for replay.
    fn finish(mut self) -> Ticket {
        let Some(ticket) = self.ticket.take() else {
            unreachable!("a mutation ends once");
        };
        drop(self.number.take());
        ticket
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let (Some(number), Some(ticket)) = (self.number.take(), self.ticket.take()) else {
            return;
        };
        let afterwards = self.afterwards.take();
        let request = self.request.clone();
        let session = self.session.clone();
        // Before the caller is told that it was interrupted.
        let unsettled = session.cache.unsettled(&scope_of(mutation_of(&request)));
        let runtime = session.runtime.clone();
        runtime.spawn(RequestId::current().scope(async move {
            let asked = session.ask(&request, Some(number.generation()), clock::now(), true);
            // The kernel got an error for it, and may have what was there before.
            let told = session.notify_listener(invalidations(&unsettled));
            let asked = async {
                let answer = asked.await;
                if let Some(afterwards) = afterwards {
                    report(answer.as_ref(), afterwards);
                }
                answer
            };
            let (answer, ()) = join(asked, told).await;
            let changed: Vec<InodeId> = answer.iter().flat_map(inodes_of).collect();
            if mutation_of(&request).facts().creates == Creates::HeldFile {
                for ino in &changed {
                    session.holds.lock().opened(*ino, true);
                    session.holds.closed(*ino, true);
                }
            }
            for ino in &changed {
                ticket.changed_inode(*ino);
            }
            let mut what = invalidations(&unsettled);
            what.extend(changed.into_iter().map(Invalidation::Inode));
            session.notify_listener(what).await;
            // The kernel has forgotten what it was told meanwhile: from here on, this client knows of the mutation.
            drop(unsettled);
            drop(number);
            session.settled.notify_waiters();
        }));
    }
}

/// Tells of the answer to a mutation whose caller is gone, and may have sent it already.
fn report(answer: Result<&Reply, &Unanswered>, afterwards: Afterwards) {
    match answer {
        Ok(Reply::Mutated(Mutated { reply, .. })) => afterwards(Ok(reply)),
        Ok(_) => afterwards(Err(&Unanswered::unknown(ClientError::Interrupted))),
        Err(given_up) => afterwards(Err(&Unanswered::unknown(given_up.error.clone()))),
    }
}

/// The inodes that the reply to a mutation says it created or changed.
fn inodes_of(reply: &Reply) -> impl Iterator<Item = InodeId> {
    let reply = match reply {
        Reply::Mutated(Mutated { reply, .. }) => Some(reply),
        _ => None,
    };
    let attrs = reply.into_iter().flat_map(MetaReply::attrs);
    attrs.map(|attr| attr.ino)
}

/// The mutation of a request that is one.
pub(super) fn mutation_of(request: &Request) -> &Mutation {
    match request {
        Request::Meta(MetaCall {
            op: MetaOp::Mutation(call),
            ..
        }) => &call.mutation,
        other => unreachable!("a mutation was expected, not {other:?}"),
    }
}

/// What a mutation may change.
pub(super) fn scope_of(mutation: &Mutation) -> Scope {
    let facts = mutation.facts();
    let entries = facts.entries.into_iter().flatten();
    Scope {
        entries: entries.map(|(dir, name)| (dir, name.clone())).collect(),
        inodes: facts.inodes.iter().collect(),
        changes_content: matches!(
            mutation,
            Mutation::SetAttr(_) | Mutation::Fallocate(_) | Mutation::CloneRange(_)
        ),
        // What has to be no part of a snapshot is what changes.
        changes_targets: matches!(facts.unfrozen, Unfrozen::Entries(_)),
    }
}

/// What the kernel may not believe either.
fn invalidations(unsettled: &Unsettled) -> Vec<Invalidation> {
    let all = unsettled.may_be_any().then_some(Invalidation::All);
    let entries = unsettled.entries();
    let entries = entries.map(|(parent, name)| Invalidation::Entry(parent, name));
    let inodes = unsettled.inodes().map(Invalidation::Inode);
    all.into_iter().chain(entries).chain(inodes).collect()
}

impl Session {
    /// Executes a query.
    pub(crate) async fn query(
        &self,
        credentials: &Credentials,
        query: impl Into<Query>,
    ) -> Result<MetaReply, ClientError> {
        let op = MetaOp::Query(query.into());
        self.ask_unnumbered(credentials.clone(), op).await
    }

    /// Sends the namenode something about the session or about a replica.
    pub(crate) async fn keep_house(
        &self,
        operation: impl Into<Housekeeping>,
    ) -> Result<(), ClientError> {
        let op = MetaOp::Housekeeping(operation.into());
        self.ask_unnumbered(Credentials::root(), op)
            .await
            .map(|_| ())
    }

    async fn ask_unnumbered(
        &self,
        credentials: Credentials,
        op: MetaOp,
    ) -> Result<MetaReply, ClientError> {
        let name = op.name();
        let request = Request::Meta(MetaCall { credentials, op });
        match self.ask(&request, None, clock::now(), false).await {
            Ok(Reply::Meta(reply)) => Ok(reply),
            Ok(_) => Err(ClientError::UnexpectedReply(name)),
            Err(unanswered) => Err(unanswered.into()),
        }
    }

    /// Executes a mutation once. If it fails, what it changes is dropped from the cache. If it
    /// succeeds, the cache knows the directories of its names, and the caller notes in the ticket
    /// what else it has changed, before it awaits anything else.
    pub(crate) async fn mutate(
        self: &Arc<Self>,
        credentials: &Credentials,
        mutation: impl Into<Mutation>,
    ) -> Result<(Ticket, MetaReply), ClientError> {
        let done = self.execute(credentials, mutation.into(), Beside::default(), None);
        Ok(done.await?)
    }

    /// As [`Session::mutate`], of what is repeated only if it was not executed. What comes of it is told before this
    /// returns, and also when the caller stops waiting; then not, if it was not sent.
    pub(crate) async fn mutate_and_tell(
        self: &Arc<Self>,
        credentials: &Credentials,
        mutation: impl Into<Mutation>,
        afterwards: impl FnOnce(Result<&MetaReply, &Unanswered>) + Send + 'static,
    ) -> Result<(Ticket, MetaReply), ClientError> {
        let afterwards: Afterwards = Box::new(afterwards);
        let beside = Beside::default();
        let done = self.execute(credentials, mutation.into(), beside, Some(afterwards));
        Ok(done.await?)
    }

    /// Allocates blocks, the first of them for data of a file.
    pub(crate) async fn allocate_blocks(
        self: &Arc<Self>,
        allocate: mutation::AllocateBlocks,
        file: InodeId,
        may_release: bool,
    ) -> Result<MetaReply, ClientError> {
        let beside = Beside {
            file: Some(file),
            released: !may_release,
            ..Beside::default()
        };
        let root = Credentials::root();
        let done = self.execute(&root, allocate.into(), beside, None);
        let (_, reply) = done.await?;
        Ok(reply)
    }

    /// As [`Session::mutate`], of an operation that sets attributes and may be answered before it is
    /// durable.
    pub(crate) async fn mutate_relaxed(
        self: &Arc<Self>,
        credentials: &Credentials,
        mutation: mutation::SetAttr,
    ) -> Result<(Ticket, MetaReply), ClientError> {
        let beside = Beside {
            relaxed: true,
            ..Beside::default()
        };
        let done = self.execute(credentials, mutation.into(), beside, None);
        Ok(done.await?)
    }

    fn execute<'a>(
        self: &'a Arc<Self>,
        credentials: &'a Credentials,
        mutation: Mutation,
        beside: Beside,
        afterwards: Option<Afterwards>,
    ) -> BoxFuture<'a, Result<(Ticket, MetaReply), Unanswered>> {
        Box::pin(self.execute_numbered(credentials, mutation, beside, afterwards, None))
    }

    pub(super) async fn execute_numbered(
        self: &Arc<Self>,
        credentials: &Credentials,
        mutation: Mutation,
        beside: Beside,
        afterwards: Option<Afterwards>,
        mut silence: Option<Silence<'_>>,
    ) -> Result<(Ticket, MetaReply), Unanswered> {
        let Beside {
            relaxed,
            file,
            released,
        } = beside;
        let facts = mutation.facts();
        let name = mutation.name();
        let mut repeats = Repeats::new(facts.repeated, released);
        let early = (relaxed || facts.answered == Answered::AtOnce)
            && !planted::is(Bug::ForgetsUnconfirmed);
        let window = match facts.window {
            Window::Work => WINDOW,
            Window::Confirming => CONFIRMING_WINDOW,
        };
        let mut started = clock::now();
        // Those of many files have waited before they were put together.
        if !matches!(mutation, Mutation::Commit(_)) && self.cache.is_unsettled() {
            let scope = scope_of(&mutation);
            self.settled(|cache| cache.is_any_unsettled(&scope)).await?;
        }
        let number = self.number(window).await?;
        // However long it waited for others, what is left is enough for an attempt.
        let patience = self.options.unreachable_timeout;
        let latest = clock::now().checked_sub(patience.saturating_sub(ATTEMPT_DEADLINE));
        started = latest.map_or(started, |latest| started.max(latest));
        let answered_before = self.last_relaxed();
        let ticket = self.cache.ticket();
        let call = MutationCall {
            sequence: number.sequence(),
            answered_below: number.answered_below(),
            relaxed,
            file,
            mutation,
        };
        let mut pending = Pending {
            session: self,
            request: Arc::new(Request::Meta(MetaCall {
                credentials: credentials.clone(),
                op: MetaOp::Mutation(call),
            })),
            number: Some(number),
            ticket: Some(ticket),
            afterwards,
        };
        let mut maybe_executed = false;
        let result = loop {
            let generation = pending.number.as_ref().map(Numbered::generation);
            let replays = self.unconfirmed.lock().replays();
            let closes = silence.as_ref().is_none_or(Silence::is_new);
            let asked = self.ask(&pending.request, generation, started, closes);
            let given_up = match asked.await {
                Ok(Reply::Mutated(mutated)) => {
                    if !early || self.keep(&mut pending, &mutated.reply, replays) {
                        break Ok(mutated);
                    }
                    // It may have been answered on an earlier connection, after which a crash took it.
                    make_replay(&mut pending.request, &MetaReply::Done);
                    maybe_executed = true;
                    continue;
                }
                Ok(_) => {
                    let error = ClientError::UnexpectedReply(name);
                    break Err(Unanswered::unknown(error));
                }
                Err(given_up) => Unanswered {
                    maybe_executed: given_up.maybe_executed || maybe_executed,
                    ..given_up
                },
            };
            let again = repeats.after(&given_up, self.is_closed());
            match again {
                Again::InNextSession => {
                    drop(pending.number.take());
                    if let Err(error) = self.link_of_next_session(generation).await {
                        break Err(Unanswered { error, ..given_up });
                    }
                }
                Again::AfterRelease if self.release_now().await => drop(pending.number.take()),
                Again::AfterRelease | Again::No => {
                    let request = &mut pending.request;
                    let goes_on = |it: &mut Silence<'_>| it.goes_on(self, request, &given_up);
                    if !silence.as_mut().is_some_and(goes_on) {
                        break Err(given_up);
                    }
                    maybe_executed = true;
                    tokio::time::sleep(RETRY_PAUSE_MAX).await;
                    started = clock::now();
                    continue;
                }
            }
            match self.number(window).await {
                Ok(number) => pending.renumber(number),
                // The namenode has said why it did not do it.
                Err(_) if again == Again::AfterRelease => break Err(given_up),
                Err(Unanswered { error, .. }) => break Err(Unanswered { error, ..given_up }),
            }
            started = clock::now();
        };
        let request = pending.request.clone();
        if let Some(afterwards) = pending.afterwards.take() {
            afterwards(result.as_ref().map(|mutated| &mutated.reply));
        }
        let ticket = pending.finish();
        let mutated = match result {
            Ok(mutated) => mutated,
            Err(given_up) => {
                self.cache.forget(&scope_of(mutation_of(&request)));
                return Err(given_up);
            }
        };
        learn_directories(&ticket, &request, &mutated.directories);
        if !early {
            self.confirmed(answered_before);
        }
        Ok((ticket, mutated.reply))
    }

    /// Keeps a mutation that was answered for replay, unless others were replayed since it was asked for: it was not
    /// among them.
    fn keep(self: &Arc<Self>, pending: &mut Pending<'_>, reply: &MetaReply, replays: u64) -> bool {
        let mut unconfirmed = self.unconfirmed.lock();
        if unconfirmed.replays() != replays {
            return false;
        }
        let Some(number) = pending.number.take() else {
            unreachable!("a mutation that was answered has a number");
        };
        make_replay(&mut pending.request, reply);
        if unconfirmed.add((number, pending.request.clone())) >= UNCONFIRMED_MAX {
            drop(unconfirmed);
            self.start_confirming();
        }
        true
    }

    /// Waits until the session with a generation was replaced.
    pub(crate) async fn link_of_next_session(
        &self,
        generation: Option<u64>,
    ) -> Result<(), ClientError> {
        let started = clock::now();
        loop {
            let waited = clock::now() - started;
            let left = self.options.unreachable_timeout.saturating_sub(waited);
            let link = self.link(left).await?;
            if Some(link.generation) != generation {
                return Ok(());
            }
            if left.is_zero() {
                return Err(FsError::SessionExpired.into());
            }
            tokio::time::sleep(RETRY_PAUSE_MIN).await;
        }
    }

    /// The number of the last mutation that was answered before it was durable.
    pub(crate) fn last_relaxed(&self) -> u64 {
        self.unconfirmed.lock().last()
    }

    /// Everything that was answered up to a number is durable.
    pub(super) fn confirmed(&self, through: u64) {
        let confirmed = self.unconfirmed.lock().confirm(through);
        // Their numbers are given back outside of the lock.
        drop(confirmed);
    }

    /// Makes everything that was answered up to a number durable.
    pub(crate) async fn make_durable(self: &Arc<Self>, through: u64) -> Result<(), ClientError> {
        if self.unconfirmed.lock().is_durable(through) {
            return Ok(());
        }
        // Empty, but it is durable only after everything before it.
        let nothing = mutation::Commit {
            files: Vec::new(),
            durable: true,
        };
        let done = self.mutate(&Credentials::root(), nothing).await;
        done.map(|_| ())
    }

    /// Drops requests that are kept for replay, without waiting for it.
    fn start_confirming(self: &Arc<Self>) {
        self.runtime.spawn(confirm(self.clone()));
    }

    /// Whether something that was answered may not be durable.
    pub(crate) fn has_unconfirmed(&self) -> bool {
        !self.unconfirmed.lock().is_empty()
    }

    /// No session comes: there is nothing to repeat any more.
    pub(super) fn forget_unconfirmed(&self) {
        self.confirmed(self.last_relaxed());
    }

    /// Sends a request until there is an answer or patience is over. A mutation belongs to the
    /// session with a generation and is not sent in another one. `closes`: the connection of one is closed when it is
    /// given up.
    fn ask<'a>(
        &'a self,
        request: &'a Request,
        generation: Option<u64>,
        started: Instant,
        closes: bool,
    ) -> BoxFuture<'a, Result<Reply, Unanswered>> {
        Box::pin(self.ask_patiently(request, generation, started, closes))
    }

    async fn ask_patiently(
        &self,
        request: &Request,
        generation: Option<u64>,
        started: Instant,
        closes: bool,
    ) -> Result<Reply, Unanswered> {
        let patience = Patience {
            unreachable: self.options.unreachable_timeout,
            busy: self.options.busy_timeout,
        };
        let mut call = Call::new(patience, generation, started);
        // The last connection on which an attempt was not answered.
        let mut silent = None;
        loop {
            let link = self.link(call.left(clock::now())).await;
            let link = link.map_err(|error| call.unanswered(error))?;
            let deadline = call.attempt(link.generation, clock::now())?;
            let failure = match link.ask(request, deadline).await {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(error)) => {
                    match &error {
                        FsError::SessionExpired => self.session_expired(&link),
                        FsError::NotLeader { leader } => self.deposed(&link, *leader),
                        _ => {}
                    }
                    Failure::Refused(error)
                }
                Err(RpcError::Encode(error)) => Failure::NotEncodable(error.to_string()),
                Err(error) => {
                    silent = Some(link.clone());
                    Failure::NoAnswer(error.to_string())
                }
            };
            let again = call.failed(failure, clock::now());
            if let Err(given_up) = &again
                && closes
                && given_up.may_be_learned()
                && silent
                    .as_ref()
                    .is_some_and(|silent| Arc::ptr_eq(silent, &link))
            {
                // It may be executed yet, and this client is not notified of what it changes itself. On a new connection
                // nothing is cached, and the namenode executes nothing more that came on this one.
                link.rpc
                    .connection()
                    .close(CloseCode::DONE, "a mutation is given up");
            }
            tokio::time::sleep(again?).await;
        }
    }
}

/// Drops requests that are kept for replay.
pub(crate) async fn confirm(session: Arc<Session>) {
    let last = session.last_relaxed();
    if let Err(error) = session.make_durable(last).await {
        tracing::debug!(%error, "cannot confirm commits yet");
    }
}

/// Keeps the reply's attributes of the directories in which names were changed. A directory of
/// these that the reply leaves out is not known any more.
fn learn_directories(ticket: &Ticket, request: &Request, directories: &[Attr]) {
    for attr in directories {
        ticket.changed_attr(attr);
    }
    for (dir, _) in mutation_of(request).facts().entries.into_iter().flatten() {
        if !directories.iter().any(|attr| attr.ino == dir) {
            ticket.changed_times(dir);
        }
    }
}
