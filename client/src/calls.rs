//! Calls to the namenode: numbered so that a repeated mutation is executed once, repeated until
//! there is an answer.
//!
//! Commits that are not demanded durable, and changes of the attributes of files whose first content
//! is still to be committed, are answered before they are durable. Should the namenode crash
//! just then, it has forgotten them, and they are repeated with their old numbers when the session
//! resumes. So their requests are kept until a later durable mutation was answered: the journal is
//! written in order.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use harvestfs_protocol::{
    error::FsError,
    ids::InodeId,
    limits::MUTATIONS_IN_FLIGHT_MAX,
    meta::{MetaCall, MetaOp, MetaReply},
    name::Name,
    request_id::RequestId,
    rpc::{Reply, Request},
    transport::RpcError,
    types::{Credentials, FileKind},
};
use tokio::sync::Notify;

use crate::{
    cache::Ticket,
    error::ClientError,
    session::{Link, Session, unreachable},
};

/// One attempt. A mutation may wait at the namenode for caches elsewhere to forget, at most the
/// length of a lease.
const ATTEMPT_DEADLINE: Duration = Duration::from_secs(20);
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(5);
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(500);
/// Distance of the newest to the oldest mutation in flight, well below what the namenode remembers.
const WINDOW: u64 = MUTATIONS_IN_FLIGHT_MAX as u64 / 2;
/// The same for what makes others durable: they give their numbers back only after it, so it must
/// not wait for them.
const CONFIRMING_WINDOW: u64 = WINDOW + WINDOW / 2;

/// Requests kept for repetition, before a durable mutation is made just to let go of them.
const UNCONFIRMED_MAX: usize = 128;

/// Numbers the mutations of a session.
#[derive(Default)]
pub(crate) struct Sequences {
    inner: Mutex<Numbers>,
    answered: Notify,
}

#[derive(Default)]
struct Numbers {
    generation: u64,
    next: u64,
    in_flight: BTreeSet<u64>,
}

/// A number that was given to a mutation; free again when dropped.
struct Numbered {
    session: Arc<Session>,
    generation: u64,
    sequence: u64,
}

impl Sequences {
    /// A new session starts; returns its generation.
    pub(crate) fn restart(&self) -> u64 {
        let mut numbers = self.lock();
        numbers.generation += 1;
        numbers.next = 1;
        numbers.in_flight.clear();
        let generation = numbers.generation;
        drop(numbers);
        self.answered.notify_waiters();
        generation
    }

    pub(crate) fn generation(&self) -> u64 {
        self.lock().generation
    }

    async fn begin(session: &Arc<Session>, window: u64) -> Numbered {
        let this = &session.sequences;
        loop {
            let answered = this.answered.notified();
            {
                let mut numbers = this.lock();
                let oldest = numbers.in_flight.first().copied();
                if oldest.is_none_or(|oldest| numbers.next - oldest < window) {
                    let sequence = numbers.next;
                    numbers.next += 1;
                    numbers.in_flight.insert(sequence);
                    return Numbered {
                        session: session.clone(),
                        generation: numbers.generation,
                        sequence,
                    };
                }
            }
            answered.await;
        }
    }

    /// All mutations below it have been answered.
    fn answered_below(&self, sequence: u64) -> u64 {
        self.lock().in_flight.first().copied().unwrap_or(sequence)
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        let sequences = &self.session.sequences;
        let mut numbers = sequences.lock();
        if numbers.generation == self.generation {
            let was_oldest = numbers.in_flight.first() == Some(&self.sequence);
            numbers.in_flight.remove(&self.sequence);
            drop(numbers);
            if was_oldest {
                sequences.answered.notify_waiters();
            }
        }
    }
}

/// Mutations that were answered and may not be durable yet.
#[derive(Default)]
pub(crate) struct Unconfirmed {
    inner: Mutex<Relaxed>,
}

#[derive(Default)]
struct Relaxed {
    /// Counts them over all sessions.
    last: u64,
    durable_through: u64,
    waiting: VecDeque<(u64, Numbered, Arc<Request>)>,
}

impl Unconfirmed {
    /// Everything answered so far has at most this number.
    fn last(&self) -> u64 {
        self.lock().last
    }

    fn add(&self, number: Numbered, request: Arc<Request>) -> usize {
        let mut relaxed = self.lock();
        relaxed.last += 1;
        let last = relaxed.last;
        relaxed.waiting.push_back((last, number, request));
        relaxed.waiting.len()
    }

    fn confirm(&self, through: u64) {
        let mut confirmed = Vec::new();
        {
            let mut relaxed = self.lock();
            relaxed.durable_through = relaxed.durable_through.max(through);
            while relaxed
                .waiting
                .front()
                .is_some_and(|(number, ..)| *number <= through)
            {
                confirmed.extend(relaxed.waiting.pop_front());
            }
        }
        // Their numbers are given back outside of the lock.
        drop(confirmed);
    }

    fn requests(&self) -> Vec<Arc<Request>> {
        let relaxed = self.lock();
        let waiting = relaxed.waiting.iter();
        waiting.map(|(_, _, request)| request.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Relaxed> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a mutation may change, to be forgotten when its outcome is not known.
#[derive(Default)]
pub(crate) struct Touched<'a> {
    pub(crate) inodes: &'a [InodeId],
    pub(crate) entries: &'a [(InodeId, &'a Name)],
}

/// A mutation whose caller waits for it. If the caller goes away, a task sees it through, so that
/// the cache does not go on believing what it changed.
struct Pending<'a> {
    number: Option<Numbered>,
    ticket: Option<Ticket>,
    request: Arc<Request>,
    touched: Touched<'a>,
}

/// A request that failed.
struct Unanswered {
    error: ClientError,
    /// An attempt got no answer.
    maybe_executed: bool,
}

impl Pending<'_> {
    /// Goes on in another session.
    fn renumber(&mut self, number: Numbered) {
        if let Request::Meta(call) = Arc::make_mut(&mut self.request) {
            call.sequence = number.sequence;
            call.answered_below = number.session.sequences.answered_below(number.sequence);
        }
        self.number = Some(number);
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let (Some(number), Some(ticket)) = (self.number.take(), self.ticket.take()) else {
            return;
        };
        let request = self.request.clone();
        let inodes = self.touched.inodes.to_vec();
        let entries: Vec<(InodeId, Name)> = self
            .touched
            .entries
            .iter()
            .map(|(parent, name)| (*parent, (*name).clone()))
            .collect();
        let session = number.session.clone();
        let runtime = session.runtime.clone();
        runtime.spawn(RequestId::current().scope(async move {
            // Whatever the answer is, nobody waits for it.
            let answer = session.ask(&request, Some(number.generation)).await;
            drop(number);
            if let Ok(reply) = answer
                && let Some(ino) = opened_by_creation(&request, &reply)
            {
                session.holds.opened(ino, true);
                session.holds.closed(ino, Instant::now(), true);
            }
            let names: Vec<_> = entries
                .iter()
                .map(|(parent, name)| (*parent, name))
                .collect();
            forget(
                &ticket,
                &Touched {
                    inodes: &inodes,
                    entries: &names,
                },
            );
            // Whoever else caches it was told that it failed.
            session
                .tell_listener(move |listener| {
                    for (parent, name) in &entries {
                        listener.invalidate_entry(*parent, name);
                    }
                    for ino in inodes {
                        listener.invalidate_inode(ino);
                    }
                })
                .await;
        }));
    }
}

/// The file that the namenode created, and counts as open since.
fn opened_by_creation(request: &Request, reply: &Reply) -> Option<InodeId> {
    let Request::Meta(call) = request else {
        return None;
    };
    match (&call.op, reply) {
        (
            MetaOp::Create {
                kind: FileKind::Regular,
                ..
            },
            Reply::Meta(MetaReply::Created { attr, .. } | MetaReply::Attr(attr)),
        ) => Some(attr.ino),
        _ => None,
    }
}

fn forget(ticket: &Ticket, touched: &Touched<'_>) {
    for ino in touched.inodes {
        ticket.changed_inode(*ino);
    }
    for (parent, name) in touched.entries {
        ticket.unknown_entry(*parent, name);
    }
}

impl Session {
    /// Executes a read-only operation.
    pub(crate) async fn query(
        &self,
        credentials: &Credentials,
        op: MetaOp,
    ) -> Result<MetaReply, ClientError> {
        let call = MetaCall {
            credentials: credentials.clone(),
            sequence: 0,
            answered_below: 0,
            relaxed: false,
            op,
        };
        let answer = self.ask(&Request::Meta(call), None).await;
        meta(answer.map_err(|unanswered| unanswered.error)?)
    }

    /// Executes a mutation once. What it touches is forgotten if it fails; if it succeeds, the
    /// caller tells the ticket what it has changed, before it awaits anything else.
    pub(crate) async fn mutate(
        self: &Arc<Self>,
        credentials: &Credentials,
        op: MetaOp,
        touched: Touched<'_>,
    ) -> Result<(Ticket, MetaReply), ClientError> {
        let relaxed = match op {
            MetaOp::Commit { durable, .. } => !durable,
            MetaOp::SealBlocks { .. } => true,
            _ => false,
        };
        self.execute(credentials, op, touched, relaxed).await
    }

    /// As [`Session::mutate`], of an operation that sets attributes and may be answered before it is
    /// durable.
    pub(crate) async fn mutate_relaxed(
        self: &Arc<Self>,
        credentials: &Credentials,
        op: MetaOp,
        touched: Touched<'_>,
    ) -> Result<(Ticket, MetaReply), ClientError> {
        self.execute(credentials, op, touched, true).await
    }

    async fn execute(
        self: &Arc<Self>,
        credentials: &Credentials,
        op: MetaOp,
        touched: Touched<'_>,
        relaxed: bool,
    ) -> Result<(Ticket, MetaReply), ClientError> {
        // What names blocks of an ended session can never succeed.
        let belongs_to_session = matches!(op, MetaOp::Commit { .. } | MetaOp::SealBlocks { .. });
        let window = match &op {
            MetaOp::Commit { files, .. } if files.is_empty() => CONFIRMING_WINDOW,
            _ => WINDOW,
        };
        let number = Sequences::begin(self, window).await;
        let answered_before = self.unconfirmed.last();
        let ticket = self.cache.ticket();
        let call = MetaCall {
            credentials: credentials.clone(),
            sequence: number.sequence,
            answered_below: self.sequences.answered_below(number.sequence),
            relaxed,
            op,
        };
        let mut pending = Pending {
            request: Arc::new(Request::Meta(call)),
            number: Some(number),
            ticket: Some(ticket),
            touched,
        };
        let mut released = false;
        let result = loop {
            let generation = pending.number.as_ref().map(|number| number.generation);
            let answer = self.ask(&pending.request, generation).await;
            match answer {
                Err(Unanswered {
                    error: ClientError::Fs(FsError::SessionExpired),
                    maybe_executed: false,
                }) if !belongs_to_session && !self.is_closed() => {
                    // Refused for sure: the next session may do it.
                    drop(pending.number.take());
                    self.link_of_next_session(generation).await?;
                    let number = Sequences::begin(self, window).await;
                    pending.renumber(number);
                }
                // What was removed here a moment ago counts until the namenode knows that it is not open.
                Err(Unanswered {
                    error: ClientError::Fs(FsError::QuotaExceeded),
                    ..
                }) if !std::mem::replace(&mut released, true) && self.release_now().await => {
                    drop(pending.number.take());
                    let number = Sequences::begin(self, window).await;
                    pending.renumber(number);
                }
                Ok(reply) => break meta(reply),
                Err(unanswered) => break Err(unanswered.error),
            }
        };
        let (number, ticket) = (pending.number.take(), pending.ticket.take());
        let unconfirmed = match (&result, number) {
            (Ok(_), Some(number)) if relaxed => {
                self.unconfirmed.add(number, pending.request.clone())
            }
            (Ok(_), _) => {
                self.unconfirmed.confirm(answered_before);
                0
            }
            (Err(_), _) => 0,
        };
        if unconfirmed >= UNCONFIRMED_MAX {
            self.start_confirming();
        }
        match (ticket, result) {
            (Some(ticket), Ok(reply)) => Ok((ticket, reply)),
            (ticket, Err(error)) => {
                if let Some(ticket) = ticket {
                    forget(&ticket, &pending.touched);
                }
                Err(error)
            }
            // The ticket was put there above and only this takes it.
            (None, Ok(_)) => Err(ClientError::Closed),
        }
    }

    /// Waits until the session with a generation was replaced.
    pub(crate) async fn link_of_next_session(
        &self,
        generation: Option<u64>,
    ) -> Result<(), ClientError> {
        let started = Instant::now();
        loop {
            let left = self
                .options
                .unreachable_timeout
                .saturating_sub(started.elapsed());
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
        self.unconfirmed.last()
    }

    /// Makes everything that was answered up to a number durable.
    pub(crate) async fn make_durable(self: &Arc<Self>, through: u64) -> Result<(), ClientError> {
        if self.unconfirmed.lock().durable_through >= through {
            return Ok(());
        }
        // Empty, but it is durable only after everything before it.
        let op = MetaOp::Commit {
            files: Vec::new(),
            durable: true,
        };
        let done = self
            .mutate(&Credentials::root(), op, Touched::default())
            .await;
        done.map(|_| ())
    }

    /// Lets go of requests that are kept for repetition, without waiting for it.
    fn start_confirming(self: &Arc<Self>) {
        self.runtime.spawn(confirm(self.clone()));
    }

    /// Whether something that was answered may not be durable.
    pub(crate) fn has_unconfirmed(&self) -> bool {
        !self.unconfirmed.lock().waiting.is_empty()
    }

    /// Repeats on a new connection what the namenode may have forgotten in a crash.
    ///
    /// # Errors
    /// The connection failed again.
    pub(crate) async fn repeat_unconfirmed(&self, link: &Link) -> Result<(), RpcError> {
        for request in self.unconfirmed.requests() {
            // Refusals were answers before.
            let _ = link.rpc.call(&request, ATTEMPT_DEADLINE).await?;
        }
        Ok(())
    }

    /// Another session starts or none: there is nothing to repeat any more. What was answered in the
    /// former one became durable long before the namenode gave that session up.
    pub(crate) fn forget_unconfirmed(&self) {
        self.unconfirmed.confirm(self.unconfirmed.last());
    }

    /// Sends a request until there is an answer or patience is over. A mutation belongs to the
    /// session with a generation and is not sent in another one.
    async fn ask(&self, request: &Request, generation: Option<u64>) -> Result<Reply, Unanswered> {
        let started = Instant::now();
        let patience = self.options.unreachable_timeout;
        let mut pause = RETRY_PAUSE_MIN;
        let mut maybe_executed = false;
        loop {
            let unanswered = |error: ClientError| Unanswered {
                error,
                maybe_executed,
            };
            let left = patience.saturating_sub(started.elapsed());
            let link = self.link(left).await.map_err(unanswered)?;
            if generation.is_some_and(|generation| generation != link.generation) {
                return Err(unanswered(FsError::SessionExpired.into()));
            }
            let deadline = left.clamp(RETRY_PAUSE_MAX, ATTEMPT_DEADLINE);
            match link.rpc.call(request, deadline).await {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(FsError::Busy { retry_after_ms })) => {
                    let pause = Duration::from_millis(retry_after_ms.into());
                    if started.elapsed() + pause > self.options.busy_timeout {
                        return Err(unanswered(FsError::Busy { retry_after_ms }.into()));
                    }
                    tokio::time::sleep(pause).await;
                }
                Ok(Err(FsError::SessionExpired)) => {
                    self.session_expired(&link);
                    if generation.is_some() || started.elapsed() >= patience {
                        return Err(unanswered(FsError::SessionExpired.into()));
                    }
                    tokio::time::sleep(pause).await;
                }
                Ok(Err(error)) => return Err(unanswered(error.into())),
                Err(RpcError::Encode(error)) => {
                    let text = error.to_string();
                    return Err(unanswered(FsError::InvalidArgument(text).into()));
                }
                Err(error) => {
                    maybe_executed = true;
                    if started.elapsed() >= patience {
                        return Err(Unanswered {
                            error: unreachable(started.elapsed(), &error),
                            maybe_executed,
                        });
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(RETRY_PAUSE_MAX);
                }
            }
        }
    }
}

/// Lets go of requests that are kept for repetition.
pub(crate) async fn confirm(session: Arc<Session>) {
    let last = session.last_relaxed();
    if let Err(error) = session.make_durable(last).await {
        tracing::debug!(%error, "cannot confirm commits yet");
    }
}

fn meta(reply: Reply) -> Result<MetaReply, ClientError> {
    match reply {
        Reply::Meta(reply) => Ok(reply),
        _ => Err(ClientError::UnexpectedReply("a metadata operation")),
    }
}
