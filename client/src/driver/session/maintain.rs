//! The task that keeps a session alive: keepalives, notices, and another connection when one is lost.

use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::since_boot;
use harvestfs_protocol::transport::{CloseCode, NOTICES_QUEUED_MAX};
use tokio::sync::mpsc;

use super::listener::Invalidation;
use super::{KEEPALIVE_DEADLINE, Link, LinkState, Session, unreachable};
use crate::engine::session::connection::{Due, KeepAlive, Reconnect};
use crate::error::ClientError;

/// Keeps the session alive and reconnects until the client is closed.
pub(super) async fn maintain(
    session: Arc<Session>,
    first: Arc<Link>,
    notices: mpsc::Receiver<Notice>,
) {
    let (mut link, mut notices) = (first, notices);
    loop {
        let reason = serve(&session, &link, notices).await;
        if session.is_closed() {
            return;
        }
        tracing::warn!(reason, "the connection to the namenode was lost");
        session.link.send_if_modified(|state| {
            let open = !matches!(state, LinkState::Closed);
            if open {
                *state = LinkState::Down { reason };
            }
            open
        });
        link.rpc.connection().close(CloseCode::DONE, "reconnecting");
        let Some(connected) = reconnect(&session, &link).await else {
            return;
        };
        session.notify_listener(vec![Invalidation::All]).await;
        link = session.publish(connected.0);
        notices = connected.1;
        tracing::info!("connected to the namenode again");
    }
}

/// Tries until it works; none when the client is closed.
async fn reconnect(session: &Arc<Session>, link: &Link) -> Option<(Link, mpsc::Receiver<Notice>)> {
    let mut attempts = Reconnect::default();
    loop {
        let stopped = session.stop.notified();
        if session.is_closed() {
            return None;
        }
        tokio::select! {
            biased;
            result = resume(session, link) => match result {
                Ok(connected) => return Some(connected),
                Err(error) => tracing::debug!(%error, "cannot reconnect yet"),
            },
            () = stopped => return None,
        }
        let retry = attempts.failed(session.lease_remaining());
        if retry.forget {
            session.forget_everything().await;
        }
        tokio::time::sleep(retry.pause).await;
    }
}

/// Connects, and replays what the namenode may have forgotten.
async fn resume(
    session: &Arc<Session>,
    link: &Link,
) -> Result<(Link, mpsc::Receiver<Notice>), ClientError> {
    let connected = session.try_connect(Some(link)).await;
    let (link, notices) = connected.map_err(|failure| failure.error)?;
    session
        .repeat_unconfirmed(&link)
        .await
        .map_err(|error| unreachable(Duration::ZERO, &error))?;
    Ok((link, notices))
}

/// Sends keepalives and handles notices until the connection fails; returns why it did.
async fn serve(
    session: &Arc<Session>,
    link: &Arc<Link>,
    notices: mpsc::Receiver<Notice>,
) -> String {
    tokio::select! {
        biased;
        reason = keep_alive(session, link) => reason,
        reason = take_notices(session, link, notices) => reason,
        error = link.rpc.connection().closed() => error.to_string(),
        () = session.stop.notified() => "closed".into(),
    }
}

async fn keep_alive(session: &Arc<Session>, link: &Arc<Link>) -> String {
    let mut keep_alive = KeepAlive::default();
    loop {
        tokio::time::sleep(KeepAlive::LOOK_INTERVAL).await;
        match keep_alive.look(session.lease_remaining()) {
            Due::Nothing => continue,
            Due::Forget => session.forget_everything().await,
            Due::KeepAlive => {}
        }
        let sent = since_boot();
        match link.rpc.call(&Request::KeepAlive, KEEPALIVE_DEADLINE).await {
            Ok(Ok(_)) => {
                if session.lease_remaining().is_zero() {
                    // The namenode may have stopped sending us notices meanwhile.
                    session.forget_everything().await;
                }
                let from = if planted::is(Bug::ExtendsLeaseByAnswer) {
                    since_boot()
                } else {
                    sent
                };
                session.lease.renew(from);
            }
            Ok(Err(FsError::SessionExpired)) => {
                session.session_expired(link);
                return "the session has expired".into();
            }
            Ok(Err(error)) => return error.to_string(),
            Err(error) => return error.to_string(),
        }
    }
}

async fn take_notices(
    session: &Arc<Session>,
    link: &Arc<Link>,
    mut notices: mpsc::Receiver<Notice>,
) -> String {
    let mut batch = Vec::new();
    while notices.recv_many(&mut batch, NOTICES_QUEUED_MAX).await > 0 {
        session
            .handle_notices(link, std::mem::take(&mut batch))
            .await;
    }
    "the namenode ended the connection".into()
}
