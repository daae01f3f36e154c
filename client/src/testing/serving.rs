//! The connections of the test namenode, and its answers to requests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{CloseCode, Connection, Endpoint, RpcServer};
use parking_lot::Mutex;

use super::namenode::{Namenode, Shared};
use super::{any_port, bind};

/// The role of a namenode among several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Leads,
    Stands {
        leader: Option<SocketAddr>,
    },
    /// Answers nothing, like a stopped process.
    Hangs,
}

/// One of several namenodes.
pub(crate) struct Member {
    addr: SocketAddr,
    endpoint: Endpoint,
    part: Arc<Mutex<Part>>,
}

impl Member {
    pub(super) fn start(shared: Arc<Shared>, endpoint: Endpoint, part: Part) -> Self {
        let member = Self {
            addr: endpoint.local_addr().unwrap(),
            endpoint: endpoint.clone(),
            part: Arc::new(Mutex::new(part)),
        };
        tokio::spawn(accept(shared, endpoint, member.part.clone()));
        member
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn plays(&self, part: Part) {
        *self.part.lock() = part;
    }

    /// Ends its connections and stops answering.
    pub(crate) fn stop(&self) {
        self.endpoint.close("stopped");
    }
}

impl Namenode {
    /// Starts another namenode with the same journal.
    pub(crate) fn member(&self, part: Part) -> Member {
        let endpoint = bind(any_port(), &self.identity);
        Member::start(self.shared.clone(), endpoint, part)
    }

    /// Makes another member lead. All others must be given another role first.
    pub(crate) fn elect(&self, member: &Member) {
        self.begin_epoch();
        member.plays(Part::Leads);
    }

    /// Notifies all sessions of the namenodes.
    pub(crate) fn tell_namenodes(&self, all: &[SocketAddr]) {
        let state = self.shared.state.lock();
        for notices in state.sessions.values().flatten() {
            let told = notices.send(&Notice::Namenodes { all: all.to_vec() });
            told.unwrap();
        }
    }
}

/// Waits until the role is not to hang, and returns it.
async fn played(part: &Mutex<Part>) -> Part {
    loop {
        let now = *part.lock();
        if now != Part::Hangs {
            return now;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(super) async fn accept(shared: Arc<Shared>, endpoint: Endpoint, part: Arc<Mutex<Part>>) {
    while let Some(incoming) = endpoint.accept().await {
        let (shared, part) = (shared.clone(), part.clone());
        tokio::spawn(async move {
            played(&part).await;
            if let Ok(connection) = incoming.establish().await {
                serve(shared, connection, &part).await;
            }
        });
    }
}

async fn serve(shared: Arc<Shared>, connection: Connection, part: &Mutex<Part>) {
    let Ok((kind, sender, receiver)) = connection.accept_stream().await else {
        return;
    };
    assert_eq!(kind, StreamKind::Rpc);
    let mut server: RpcServer<Request, Response, Notice> =
        RpcServer::start(connection.clone(), sender, receiver);
    let notices = server.notice_sender();
    let mut session = None;
    while let Ok(Some((request, responder))) = server.next().await {
        if let Part::Stands { leader } = played(part).await {
            responder.send(&Err(FsError::NotLeader { leader }));
            continue;
        }
        if let Request::OpenSession(open) = &request {
            let opened = shared.open_session(open, notices.clone());
            session = opened.as_ref().ok().map(|opened| opened.session);
            responder.send(&opened.map(Reply::SessionOpened));
            continue;
        }
        let (shared, connection) = (shared.clone(), connection.clone());
        tokio::spawn(async move {
            match shared.handle(session, request).await {
                Some(response) => responder.send(&response),
                None => {
                    connection.close(CloseCode::DONE, "the reply is lost");
                    drop(responder);
                }
            }
        });
    }
}
