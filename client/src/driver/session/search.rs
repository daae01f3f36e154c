//! Searches for the leading namenode and opens the session there.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::Poll;
use std::time::Duration;

use futures::future::BoxFuture;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::machine;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::transport::{NOTICES_QUEUED_MAX, TransportError};
use tokio::sync::mpsc;

use super::{Link, Rpc, Session, unreachable};
use crate::driver::clock;
use crate::engine::session::search::{Outcome, Search, Step};
use crate::error::ClientError;

/// A namenode tells immediately whether it leads. One that is busy is not dialled again for it.
const ASK_DEADLINE: Duration = Duration::from_secs(2);

/// A search among some of the namenodes. Dropping it cancels its steps.
pub(super) struct Searching<'a> {
    session: &'a Session,
    search: Search,
    candidates: Vec<Candidate<'a>>,
    /// The namenode that is excluded from the search.
    except: Option<SocketAddr>,
    /// The last failure.
    last: Option<ClientError>,
}

struct Candidate<'a> {
    namenode: SocketAddr,
    contact: Option<Contact>,
    work: Option<BoxFuture<'a, Result<Done, Failure>>>,
}

impl Candidate<'_> {
    fn new(namenode: SocketAddr) -> Self {
        Self {
            namenode,
            contact: None,
            work: None,
        }
    }
}

/// A connection without a session.
struct Contact {
    rpc: Rpc,
    notices: mpsc::Receiver<Notice>,
}

enum Done {
    Dialled(Contact),
    /// The connection now has a session.
    Opened(Link),
    Answered(Outcome),
}

/// Why a step failed, and whether retrying may help.
pub(super) struct Failure {
    pub(super) error: ClientError,
    pub(super) hopeless: bool,
}

impl Failure {
    /// A failure for which retrying may help.
    pub(super) fn passing(error: ClientError) -> Self {
        Self {
            error,
            hopeless: false,
        }
    }

    pub(super) fn refused(error: FsError) -> Self {
        Self {
            hopeless: matches!(error, FsError::RoleDenied(_) | FsError::Protocol(_)),
            error: error.into(),
        }
    }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        Self {
            hopeless: matches!(
                error,
                TransportError::PeerNotTrusted { .. }
                    | TransportError::RefusedByPeer { .. }
                    | TransportError::WrongPeer { .. }
                    | TransportError::Wire(_)
            ),
            error: error.into(),
        }
    }
}

impl<'a> Searching<'a> {
    /// Searches among all namenodes.
    pub(super) fn everywhere(session: &'a Session) -> Self {
        Self::among_all_but(session, None)
    }

    /// Searches among all namenodes except one.
    pub(super) fn elsewhere(session: &'a Session, than: SocketAddr) -> Self {
        Self::among_all_but(session, Some(than))
    }

    fn among_all_but(session: &'a Session, except: Option<SocketAddr>) -> Self {
        let mut namenodes = session.namenodes.lock().all();
        namenodes.retain(|it| Some(*it) != except);
        let leader = *session.leader.lock();
        let likely = namenodes.iter().position(|it| Some(*it) == leader);
        // The others may have left the group since one of them was to be asked: nobody is left elsewhere then.
        let search = if except.is_some() || session.has_several_namenodes() {
            Search::among(namenodes.len(), likely, clock::now())
        } else {
            Search::for_only(clock::now())
        };
        Self {
            search,
            candidates: namenodes.into_iter().map(Candidate::new).collect(),
            except,
            session,
            last: None,
        }
    }

    /// Returns the last failure as text.
    pub(super) fn last_error(&self) -> String {
        match &self.last {
            Some(error) => error.to_string(),
            None => "none has answered yet".into(),
        }
    }

    /// Opens a session, or resumes that of a link, at the leading namenode.
    ///
    /// # Errors
    /// With `is_first`, the last failure, once every namenode has one that will repeat. Otherwise
    /// none: it retries until it succeeds.
    pub(super) async fn open(
        &mut self,
        resume: Option<&'a Link>,
        is_first: bool,
    ) -> Result<(Link, mpsc::Receiver<Notice>), ClientError> {
        loop {
            while let Some((index, step)) = self.search.next(clock::now()) {
                self.begin(index, step, resume);
            }
            let Some((index, done)) = self.done().await else {
                continue;
            };
            let candidate = &mut self.candidates[index];
            match done {
                Ok(Done::Opened(link)) => {
                    let Some(contact) = candidate.contact.take() else {
                        unreachable!("a session is opened on a connection");
                    };
                    *self.session.leader.lock() = Some(candidate.namenode);
                    return Ok((link, contact.notices));
                }
                Ok(Done::Dialled(contact)) => {
                    candidate.contact = Some(contact);
                    self.came(index, Outcome::Connected);
                }
                Ok(Done::Answered(outcome)) => self.came(index, outcome),
                Err(failure) => self.failed(index, failure),
            }
            if is_first
                && self.search.is_hopeless()
                && let Some(error) = self.last.take()
            {
                return Err(error);
            }
        }
    }

    /// Returns the address of the leading namenode, once one leads.
    pub(super) async fn find(&mut self) -> SocketAddr {
        loop {
            while let Some((index, step)) = self.search.next(clock::now()) {
                if step == Step::Open {
                    return self.candidates[index].namenode;
                }
                self.begin(index, step, None);
            }
            let Some((index, done)) = self.done().await else {
                continue;
            };
            match done {
                Ok(Done::Dialled(contact)) => {
                    self.candidates[index].contact = Some(contact);
                    self.came(index, Outcome::Connected);
                }
                Ok(Done::Answered(outcome)) => self.came(index, outcome),
                Ok(Done::Opened(_)) => unreachable!("no session was asked for"),
                Err(failure) => self.failed(index, failure),
            }
        }
    }

    fn begin(&mut self, index: usize, step: Step, resume: Option<&'a Link>) {
        let session = self.session;
        let candidate = &mut self.candidates[index];
        let namenode = candidate.namenode;
        let rpc = candidate.contact.as_ref().map(|it| it.rpc.clone());
        candidate.work = match (step, rpc) {
            (Step::Dial { deadline }, _) => Some(Box::pin(dial(session, namenode, deadline))),
            (Step::Ask, Some(rpc)) => Some(Box::pin(ask(rpc))),
            (Step::Open, Some(rpc)) => {
                let opening = session.open_session(rpc, namenode, resume);
                Some(Box::pin(async { opening.await.map(Done::Opened) }))
            }
            (Step::Leave, _) => {
                candidate.contact = None;
                None
            }
            (Step::Ask | Step::Open, None) => {
                unreachable!("a candidate is dialled before it is asked")
            }
        };
    }

    /// Returns the next finished step, or `None` when another step becomes due first.
    async fn done(&mut self) -> Option<(usize, Result<Done, Failure>)> {
        let due = self.search.due();
        let candidates = &mut self.candidates;
        let over = poll_fn(|context| {
            for (index, candidate) in candidates.iter_mut().enumerate() {
                if let Some(work) = &mut candidate.work
                    && let Poll::Ready(done) = work.as_mut().poll(context)
                {
                    candidate.work = None;
                    return Poll::Ready((index, done));
                }
            }
            Poll::Pending
        });
        match due {
            Some(due) => tokio::time::timeout_at(due.into(), over).await.ok(),
            None => Some(over.await),
        }
    }

    fn failed(&mut self, index: usize, failure: Failure) {
        let outcome = match &failure.error {
            ClientError::Fs(FsError::NotLeader { leader }) => Outcome::Stands {
                leader: leader.and_then(|it| self.candidate_at(it)),
            },
            _ => {
                self.candidates[index].contact = None;
                Outcome::Failed {
                    hopeless: failure.hopeless,
                }
            }
        };
        self.last = Some(failure.error);
        self.came(index, outcome);
    }

    /// Returns the candidate at an address that another one named; adds it if it was unknown.
    fn candidate_at(&mut self, addr: SocketAddr) -> Option<usize> {
        let addr = self.session.namenodes.lock().hinted(addr)?;
        if Some(addr) == self.except {
            return None;
        }
        let known = self.candidates.iter().position(|it| it.namenode == addr);
        known.or_else(|| {
            tracing::info!(%addr, "a namenode that was not known is said to lead");
            self.candidates.push(Candidate::new(addr));
            Some(self.search.add(clock::now()))
        })
    }

    fn came(&mut self, index: usize, outcome: Outcome) {
        let chance = if self.session.has_several_namenodes() {
            machine::random()
        } else {
            0.0
        };
        self.search.came(index, outcome, chance, clock::now());
    }
}

async fn dial(session: &Session, addr: SocketAddr, deadline: Duration) -> Result<Done, Failure> {
    let dialled = session.endpoint.connect(addr, &session.namenode, deadline);
    let connection = dialled.await?;
    let (sender, notices) = mpsc::channel(NOTICES_QUEUED_MAX);
    let cache = session.cache.clone();
    let rpc = Rpc::start_observed(connection, sender, move |notice| {
        if !planted::is(Bug::ObeysNoticesLate) {
            cache.obey(notice);
        }
    });
    let rpc = rpc.await.map_err(|error| Failure::passing(error.into()))?;
    Ok(Done::Dialled(Contact { rpc, notices }))
}

/// Asks whether a namenode leads. A connection without a session has nothing to keep alive, but
/// only the leader can tell that.
async fn ask(rpc: Rpc) -> Result<Done, Failure> {
    match rpc.call(&Request::KeepAlive, ASK_DEADLINE).await {
        Ok(Ok(_) | Err(FsError::SessionExpired)) => Ok(Done::Answered(Outcome::Leads)),
        Ok(Err(error)) => Err(Failure::refused(error)),
        Err(error) => Err(Failure::passing(unreachable(Duration::ZERO, &error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Cluster;

    #[tokio::test(flavor = "multi_thread")]
    async fn nobody_leads_elsewhere_when_there_is_only_one_namenode() {
        let cluster = Cluster::start(1, 1).await;
        let client = cluster.client("a").await;
        let session = &client.core().session;
        let mut elsewhere = Searching::elsewhere(session, cluster.namenode.addr());
        let found = tokio::time::timeout(Duration::from_millis(50), elsewhere.find()).await;
        assert!(found.is_err(), "{found:?}");
    }
}
