//! Connections to the other members: one to each, shared by all calls to it.
//!
//! openraft makes a new caller for each vote. If each of them dialled, an election would be as slow as two
//! handshakes, and would start over whenever these took longer than a vote may: on a busy machine nobody would be
//! elected.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use harvestfs_protocol::identity::{Peer as Identity, Role};
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::rpc::{Request, Response};
use harvestfs_protocol::transport::{Endpoint, RpcClient, RpcError, TransportError};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::peers::{PeerError, Running};

/// How long a connection attempt may take. It continues after the caller has given up.
const DIAL_DEADLINE: Duration = Duration::from_millis(500);
/// After this many calls in a row without an answer, the next one dials again: the other end may have been restarted.
/// With a smaller number, calls would dial again whenever another namenode is late, and delay it even more.
const UNANSWERED_MAX: u32 = 3;

type Client = RpcClient<Request, Response, Notice>;
type Dialled = Shared<BoxFuture<'static, Result<Link, TransportError>>>;

/// A connection to another namenode. Cheap to clone.
#[derive(Clone)]
pub(super) struct Link {
    client: Client,
    unanswered: Arc<AtomicU32>,
}

impl Link {
    /// Sends a request, and waits for the answer.
    pub(super) async fn call(
        &self,
        request: &Request,
        deadline: Duration,
    ) -> Result<Response, RpcError> {
        // Counted even if openraft stops waiting.
        let asked = Asked(&self.unanswered);
        let answer = self.client.call(request, deadline).await?;
        drop(asked);
        self.unanswered.store(0, Ordering::Relaxed);
        Ok(answer)
    }

    /// Release and versions of the other end.
    pub(super) fn running(&self) -> Running {
        let connection = self.client.connection();
        Running {
            release: connection.peer_release(),
            versions: connection.peer_versions(),
        }
    }

    fn is_usable(&self) -> bool {
        !self.client.is_closed() && self.unanswered.load(Ordering::Relaxed) < UNANSWERED_MAX
    }
}

struct Asked<'a>(&'a AtomicU32);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The connections, by address, with the name that the other end must have.
pub(super) struct Links {
    endpoint: Endpoint,
    dialled: Mutex<BTreeMap<SocketAddr, (String, Dialled)>>,
}

impl Links {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            dialled: Mutex::default(),
        }
    }

    /// Returns a working connection, and dials if there is none.
    pub(super) async fn get(&self, name: &str, addr: SocketAddr) -> Result<Link, PeerError> {
        let dialled = self.dialled(name, addr)?;
        Ok(dialled.await?)
    }

    fn dialled(&self, name: &str, addr: SocketAddr) -> Result<Dialled, PeerError> {
        let mut all = self.dialled.lock();
        if let Some((of, dialled)) = all.get(&addr)
            && of == name
            && is_usable(dialled)
        {
            return Ok(dialled.clone());
        }
        let expected = Identity::new(Role::Namenode, name.to_owned());
        let expected = expected.map_err(|error| PeerError::Name {
            name: name.to_owned(),
            reason: error.to_string(),
        })?;
        all.retain(|_, (_, it)| is_usable(it));
        let dialled = dial(self.endpoint.clone(), addr, expected);
        let dialled = dialled.boxed().shared();
        tokio::spawn(dialled.clone().map(drop));
        all.insert(addr, (name.to_owned(), dialled.clone()));
        Ok(dialled)
    }
}

/// Whether it is a working connection, or may become one.
fn is_usable(dialled: &Dialled) -> bool {
    match dialled.peek() {
        None => true,
        Some(Ok(link)) => link.is_usable(),
        Some(Err(_)) => false,
    }
}

async fn dial(
    endpoint: Endpoint,
    addr: SocketAddr,
    expected: Identity,
) -> Result<Link, TransportError> {
    let connection = endpoint.connect(addr, &expected, DIAL_DEADLINE).await?;
    // Notices are for clients; without a receiver they are ignored.
    let (notices, _) = mpsc::channel(1);
    let client = RpcClient::start(connection, notices).await?;
    Ok(Link {
        client,
        unanswered: Arc::default(),
    })
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::identity::CertificateAuthority;
    use harvestfs_protocol::transport::Incoming;
    use tokio::time::timeout;

    use super::super::tests::endpoint_of;
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn callers_share_what_is_dialled_and_give_it_up_when_nothing_is_answered() {
        let authority = CertificateAuthority::for_simulation().unwrap();
        let [calling, called] = [(); 2].map(|()| endpoint_of(&authority));
        let addr = called.local_addr().unwrap();
        let links = Links::new(calling);
        let get = || links.get("nn", addr);

        assert!(timeout(SHORT, get()).await.is_err(), "nobody accepts yet");
        let accepted = called.accept().await.map(Incoming::establish);
        let _accepted = accepted.unwrap().await.unwrap();
        let (first, second) = (get().await.unwrap(), get().await.unwrap());
        assert!(Arc::ptr_eq(&first.unanswered, &second.unanswered));
        let again = timeout(SHORT, called.accept()).await;
        assert!(again.is_err(), "it was dialled only once");

        for _ in 0..UNANSWERED_MAX {
            assert!(get().await.unwrap().is_usable());
            let answer = first.call(&Request::KeepAlive, SHORT).await;
            assert!(matches!(answer, Err(RpcError::Deadline { .. })));
        }
        let (third, accepted) = tokio::join!(get(), async {
            called.accept().await.unwrap().establish().await
        });
        assert!(accepted.is_ok() && third.unwrap().is_usable());
    }
}
