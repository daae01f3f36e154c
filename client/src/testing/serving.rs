//! How the test namenode takes connections and answers requests.

use std::sync::Arc;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{CloseCode, Connection, Endpoint, RpcServer};

use super::namenode::Shared;

pub(super) async fn accept(shared: Arc<Shared>, endpoint: Endpoint) {
    while let Some(incoming) = endpoint.accept().await {
        let shared = shared.clone();
        tokio::spawn(async move {
            if let Ok(connection) = incoming.establish().await {
                serve(shared, connection).await;
            }
        });
    }
}

async fn serve(shared: Arc<Shared>, connection: Connection) {
    let Ok((kind, sender, receiver)) = connection.accept_stream().await else {
        return;
    };
    assert_eq!(kind, StreamKind::Rpc);
    let mut server: RpcServer<Request, Response, Notice> =
        RpcServer::start(connection.clone(), sender, receiver);
    let notices = server.notice_sender();
    let mut session = None;
    while let Ok(Some((request, responder))) = server.next().await {
        if let Request::OpenSession(open) = &request {
            let opened = shared.open_session(open.resume, notices.clone());
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
