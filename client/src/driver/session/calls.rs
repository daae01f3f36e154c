//! Calls to the namenode: numbered, so that a repeated mutation is executed once, and repeated
//! until they are answered.
//!
//! Commits that need not be durable, and attribute changes of files whose first content is not
//! committed yet, are answered before they are durable. A namenode that crashes at that moment
//! loses them, and the client replays them under their old numbers when the session resumes.
//! Therefore their requests are kept until a later durable mutation is answered: the journal is
//! written in order.

use std::sync::Arc;
use std::time::Instant;

use futures::future::{BoxFuture, TryFutureExt, join};
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
use crate::engine::session::holds::Keep;
use crate::engine::session::sequences::{CONFIRMING_WINDOW, WINDOW};
use crate::error::ClientError;

/// Number of requests kept for replay at which a durable mutation is made just to drop them.
const UNCONFIRMED_MAX: usize = 128;

/// Options of a mutation.
#[derive(Clone, Copy, Default)]
pub(super) struct Beside {
    /// Whether it may be answered before it is durable.
    relaxed: bool,
    /// The file that blocks are allocated for.
    file: Option<InodeId>,
    /// Whether removed files were released already: a quota that still refuses the mutation is full.
    released: bool,
}

/// Receives the outcome of a mutation.
pub(super) type Afterwards = Box<dyn FnOnce(Result<&MetaReply, &Unanswered>) + Send>;

/// A mutation whose caller waits for it. If the caller stops waiting, a task completes it, so that
/// the cache does not keep what it changed.
struct Pending<'a> {
    session: &'a Arc<Session>,
    /// `None` between two sessions or attempts.
    number: Option<Numbered>,
    /// Taken when the mutation has ended.
    ticket: Option<Ticket>,
    request: Arc<Request>,
    /// Receives the outcome even if the caller has stopped waiting. Dropped if the mutation was
    /// definitely not executed.
    afterwards: Option<Afterwards>,
}

impl Pending<'_> {
    /// Gives the mutation a new number, to be sent in another session or again.
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

    /// Ends the mutation; returns the ticket for updating the cache. Its number becomes free,
    /// unless it is kept for replay.
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
        // This happens before the caller learns that it was interrupted.
        let unsettled = session.cache.unsettled(&scope_of(mutation_of(&request)));
        let runtime = session.runtime.clone();
        runtime.spawn(RequestId::current().scope(async move {
            let asked = session.ask(&request, Some(number.generation()), clock::now(), true);
            // The kernel got an error for the mutation, and may still have the old state.
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
                    session.holds.closed(*ino, Keep::UnlessChanged);
                }
            }
            for ino in &changed {
                ticket.changed_inode(*ino);
            }
            let mut what = invalidations(&unsettled);
            what.extend(changed.into_iter().map(Invalidation::Inode));
            session.notify_listener(what).await;
            // The kernel has forgotten the answers it got meanwhile: from here on, this client
            // knows about the mutation.
            drop(unsettled);
            drop(number);
            session.settled.notify_waiters();
        }));
    }
}

/// Reports the answer to a mutation whose caller stopped waiting, possibly after it had been sent.
fn report(answer: Result<&Reply, &Unanswered>, afterwards: Afterwards) {
    match answer {
        Ok(Reply::Mutated(Mutated { reply, .. })) => afterwards(Ok(reply)),
        Ok(_) => afterwards(Err(&Unanswered::unknown(ClientError::Interrupted))),
        Err(given_up) => afterwards(Err(&Unanswered::unknown(given_up.error.clone()))),
    }
}

/// Returns the inodes that, according to the reply, a mutation created or changed.
fn inodes_of(reply: &Reply) -> impl Iterator<Item = InodeId> {
    let reply = match reply {
        Reply::Mutated(Mutated { reply, .. }) => Some(reply),
        _ => None,
    };
    let attrs = reply.into_iter().flat_map(MetaReply::attrs);
    attrs.map(|attr| attr.ino)
}

/// Returns the mutation in a request that contains one.
pub(super) fn mutation_of(request: &Request) -> &Mutation {
    match request {
        Request::Meta(MetaCall {
            op: MetaOp::Mutation(call),
            ..
        }) => &call.mutation,
        other => unreachable!("a mutation was expected, not {other:?}"),
    }
}

/// Returns what a mutation may change.
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
        // A mutation changes the targets of exactly those names that must not be in a snapshot.
        changes_targets: matches!(facts.unfrozen, Unfrozen::Entries(_)),
    }
}

/// Returns what the kernel must not rely on either.
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

    /// Sends the namenode a message about the session or a replica.
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

    /// Executes a mutation once. On failure, everything that it may have changed is dropped from
    /// the cache. On success, the cache knows the directories of its names, and the caller notes in
    /// the ticket what else it has changed, before it awaits anything else.
    pub(crate) async fn mutate(
        self: &Arc<Self>,
        credentials: &Credentials,
        mutation: impl Into<Mutation>,
    ) -> Result<(Ticket, MetaReply), ClientError> {
        let done = self.execute(credentials, mutation.into(), Beside::default(), None);
        Ok(done.await?)
    }

    /// As [`Session::mutate`], for a mutation that is repeated only if it was not executed. `afterwards` is called
    /// before this returns. If the caller stops waiting, it is called too, unless the mutation was not sent.
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

    /// Allocates blocks, the first of them for data of a file. Also returns the session that they belong to.
    pub(crate) async fn allocate_blocks(
        self: &Arc<Self>,
        allocate: mutation::AllocateBlocks,
        file: InodeId,
        may_release: bool,
    ) -> Result<(MetaReply, u64), ClientError> {
        let beside = Beside {
            file: Some(file),
            released: !may_release,
            ..Beside::default()
        };
        let root = Credentials::root();
        let done = self.execute_numbered(&root, allocate.into(), beside, None, None);
        let (_, reply, generation) = Box::pin(done).await?;
        Ok((reply, generation))
    }

    /// As [`Session::mutate`], for a change of attributes that may be answered before it is
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
        let done = self.execute_numbered(credentials, mutation, beside, afterwards, None);
        Box::pin(done.map_ok(|(ticket, reply, _)| (ticket, reply)))
    }

    /// Also returns the session in which the mutation was executed: it may be a later one than at first.
    pub(super) async fn execute_numbered(
        self: &Arc<Self>,
        credentials: &Credentials,
        mutation: Mutation,
        beside: Beside,
        afterwards: Option<Afterwards>,
        mut silence: Option<Silence<'_>>,
    ) -> Result<(Ticket, MetaReply, u64), Unanswered> {
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
        // Commits of many files have waited already, before they were put together.
        if !matches!(mutation, Mutation::Commit(_)) && self.cache.is_unsettled() {
            let scope = scope_of(&mutation);
            self.settled(|cache| cache.is_any_unsettled(&scope)).await?;
        }
        let number = self.number(window).await?;
        // However long it waited for other mutations, enough time remains for one attempt.
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
            let Some(generation) = pending.number.as_ref().map(Numbered::generation) else {
                unreachable!("a mutation is sent with a number");
            };
            let replays = self.unconfirmed.lock().replays();
            let closes = silence.as_ref().is_none_or(Silence::is_new);
            let releases = self.holds.lock().releases_answered();
            let asked = self.ask(&pending.request, Some(generation), started, closes);
            let given_up = match asked.await {
                Ok(Reply::Mutated(mutated)) => {
                    if !early || self.keep(&mut pending, &mutated.reply, replays) {
                        break Ok((mutated, generation));
                    }
                    // It may have been answered on an earlier connection, and then lost in a crash.
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
                Again::AfterRelease if self.release_now(releases).await => {
                    drop(pending.number.take());
                }
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
                // The namenode has given the reason for its refusal.
                Err(_) if again == Again::AfterRelease => break Err(given_up),
                Err(Unanswered { error, .. }) => break Err(Unanswered { error, ..given_up }),
            }
            started = clock::now();
        };
        let request = pending.request.clone();
        if let Some(afterwards) = pending.afterwards.take() {
            afterwards(result.as_ref().map(|(mutated, _)| &mutated.reply));
        }
        let ticket = pending.finish();
        let (mutated, generation) = match result {
            Ok(executed) => executed,
            Err(given_up) => {
                self.cache.forget(&scope_of(mutation_of(&request)));
                return Err(given_up);
            }
        };
        learn_directories(&ticket, &request, &mutated.directories);
        if !early {
            self.confirmed(answered_before);
        }
        Ok((ticket, mutated.reply, generation))
    }

    /// Keeps an answered mutation for replay. Fails if a replay began after the mutation was sent:
    /// it was not part of that replay.
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

    /// Waits until the session with this generation is replaced.
    pub(crate) async fn link_of_next_session(&self, generation: u64) -> Result<(), ClientError> {
        let started = clock::now();
        loop {
            let waited = clock::now() - started;
            let left = self.options.unreachable_timeout.saturating_sub(waited);
            let link = self.link(left).await?;
            if link.generation != generation {
                return Ok(());
            }
            if left.is_zero() {
                return Err(FsError::SessionExpired.into());
            }
            tokio::time::sleep(RETRY_PAUSE_MIN).await;
        }
    }

    /// Returns the number of the last mutation that was answered before it was durable.
    pub(crate) fn last_relaxed(&self) -> u64 {
        self.unconfirmed.lock().last()
    }

    /// Notes that everything answered up to a number is durable.
    pub(super) fn confirmed(&self, through: u64) {
        let confirmed = self.unconfirmed.lock().confirm(through);
        // Their mutation numbers are returned outside the lock.
        drop(confirmed);
    }

    /// Makes everything answered up to a number durable.
    pub(crate) async fn make_durable(self: &Arc<Self>, through: u64) -> Result<(), ClientError> {
        if self.unconfirmed.lock().is_durable(through) {
            return Ok(());
        }
        // This commit is empty, but it is durable only after everything before it.
        let nothing = mutation::Commit {
            files: Vec::new(),
            durable: true,
        };
        let done = self.mutate(&Credentials::root(), nothing).await;
        done.map(|_| ())
    }

    /// Starts to drop the requests that are kept for replay, without waiting.
    fn start_confirming(self: &Arc<Self>) {
        self.runtime.spawn(confirm(self.clone()));
    }

    /// Whether any answered mutation may not be durable yet.
    pub(crate) fn has_unconfirmed(&self) -> bool {
        !self.unconfirmed.lock().is_empty()
    }

    /// Drops all requests kept for replay: no session will follow.
    pub(super) fn forget_unconfirmed(&self) {
        self.confirmed(self.last_relaxed());
    }

    /// Sends a request until it is answered or patience is exhausted. A mutation belongs to the session with
    /// `generation` and is not sent in any other. `closes`: the connection is closed when a mutation is given up.
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
                // It may still be executed, and this client receives no notice of its own changes. A new connection
                // starts with an empty cache, and the namenode executes nothing more that arrived on this one.
                link.rpc
                    .connection()
                    .close(CloseCode::DONE, "a mutation is given up");
            }
            tokio::time::sleep(again?).await;
        }
    }
}

/// Makes everything answered so far durable, so that the requests kept for replay can be dropped.
pub(crate) async fn confirm(session: Arc<Session>) {
    let last = session.last_relaxed();
    if let Err(error) = session.make_durable(last).await {
        tracing::debug!(%error, "cannot confirm commits yet");
    }
}

/// Caches the reply's attributes of the directories in which names were changed. Directories that
/// the reply omits are dropped from the cache.
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
