//! The task that keeps a session alive: keepalives, notices, and reconnecting after a connection was lost.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::since_boot;
use harvestfs_protocol::transport::{CloseCode, NOTICES_QUEUED_MAX};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::listener::Invalidation;
use super::search::Searching;
use super::{KEEPALIVE_DEADLINE, Link, LinkState, Session};
use crate::driver::clock;
use crate::engine::session::connection::{Due, KeepAlive, Reconnect, SIGN_OF_LIFE_WITHIN};
use crate::error::ClientError;

/// Keeps the session alive and reconnects until the client is closed.
pub(super) async fn maintain(
    session: Arc<Session>,
    first: Arc<Link>,
    notices: mpsc::Receiver<Notice>,
) {
    let mut link = first;
    let mut taking = take(&session, &link, notices, None);
    loop {
        let reason = serve(&session, &link, &mut taking).await;
        if session.is_closed() {
            return;
        }
        tracing::warn!(reason, "the connection to the namenode was lost");
        let lost = clock::now();
        session.lost(&link);
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
        (link, taking) = connected;
        session.publish(&link);
        session.return_declared();
        let after_ms = since_ms(lost);
        tracing::info!(after_ms, "connected to the namenode again");
    }
}

fn since_ms(then: Instant) -> u128 {
    (clock::now() - then).as_millis()
}

/// A task that takes the notices of a link, until its connection ends or this is dropped.
type Taking = JoinSet<()>;

/// Starts taking notices. `resumed`, if the session was resumed, is notified once all earlier state is forgotten.
fn take(
    session: &Arc<Session>,
    link: &Arc<Link>,
    notices: mpsc::Receiver<Notice>,
    resumed: Option<oneshot::Sender<()>>,
) -> Taking {
    let mut taking = JoinSet::new();
    let (session, link) = (session.clone(), link.clone());
    taking.spawn(async move {
        if let Some(forgotten) = resumed {
            session.notify_listener(vec![Invalidation::All]).await;
            let _ = forgotten.send(());
        }
        take_notices(session, link, notices).await;
    });
    taking
}

/// Retries until a connection is made; `None` when the client is closed.
async fn reconnect(session: &Arc<Session>, link: &Link) -> Option<(Arc<Link>, Taking)> {
    let mut reconnect = Reconnect::default();
    loop {
        let mut stopped = pin!(session.stop.notified());
        if session.is_closed() {
            return None;
        }
        let mut resumed = pin!(resume(session, link));
        let resumed = loop {
            tokio::select! {
                biased;
                resumed = &mut resumed => break resumed,
                () = &mut stopped => return None,
                () = tokio::time::sleep(KeepAlive::LOOK_INTERVAL) => {}
            }
            if reconnect.look(session.lease_remaining()) {
                session.forget_everything().await;
            }
        };
        match resumed {
            Ok(connected) => return Some(connected),
            Err(reason) => tracing::debug!(reason, "the connection was lost again at once"),
        }
        tokio::time::sleep(reconnect.failed()).await;
    }
}

/// Connects, and replays what the namenode may have lost. Notices are taken meanwhile: other clients replay too,
/// and each waits until all have acknowledged. The kernel forgets everything before the first notice: a notice
/// names one change, but what it builds on may have changed while no namenode could notify this client.
///
/// # Errors
/// The reason why the new connection was lost meanwhile.
async fn resume(session: &Arc<Session>, before: &Link) -> Result<(Arc<Link>, Taking), String> {
    let mut searching = Searching::everywhere(session);
    let connected = searching.open(Some(before), false).await;
    let (link, notices) = connected.map_err(|error| error.to_string())?;
    tracing::debug!(namenode = %link.namenode, "the session is open there");
    let link = Arc::new(link);
    let (forgets, forgotten) = oneshot::channel();
    let taking = take(session, &link, notices, Some(forgets));
    let repeated = async {
        session.replay_unconfirmed(before, &link).await?;
        // An error means that the connection has ended.
        let _ = forgotten.await;
        Ok::<(), ClientError>(())
    };
    let repeated = tokio::select! {
        biased;
        repeated = repeated => repeated.map_err(|error| error.to_string()),
        reason = doubt(session, &link) => Err(reason),
    };
    repeated.map(|()| (link, taking))
}

/// Sends keepalives and handles notices until the connection fails; returns the reason.
async fn serve(session: &Session, link: &Link, taking: &mut Taking) -> String {
    tokio::select! {
        biased;
        reason = keep_alive(session, link) => reason,
        reason = doubt(session, link) => reason,
        taken = taking.join_next() => match taken {
            Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            _ => "the namenode ended the connection".into(),
        },
        error = link.rpc.connection().closed() => error.to_string(),
        () = session.stop.notified() => "closed".into(),
    }
}

async fn keep_alive(session: &Session, link: &Link) -> String {
    let mut keep_alive = KeepAlive::default();
    loop {
        tokio::time::sleep(KeepAlive::LOOK_INTERVAL).await;
        match keep_alive.look(session.lease_remaining()) {
            Due::Nothing => continue,
            Due::Forget => session.forget_everything().await,
            Due::KeepAlive => {}
        }
        let sent = since_boot();
        match link.ask(&Request::KeepAlive, KEEPALIVE_DEADLINE).await {
            Ok(Ok(_)) => {
                if session.lease_remaining().is_zero() {
                    // The namenode may have stopped sending notices to this client meanwhile.
                    session.forget_everything().await;
                }
                let from = if planted::is(Bug::ExtendsLeaseByAnswer) {
                    since_boot()
                } else {
                    sent
                };
                session.lease.renew(from);
            }
            Ok(Err(error)) => return refused(session, link, &error),
            Err(error) => return error.to_string(),
        }
    }
}

/// When a request gets no answer, asks the namenode for a sign of life, and then the others whether
/// one of them leads. Until one does, the connection is kept, as no other is of use. Returns the
/// reason why it is to be closed.
async fn doubt(session: &Session, link: &Link) -> String {
    loop {
        link.doubts.arisen.notified().await;
        // A namenode that leads answers this immediately, even while its journal is busy.
        let sign = link.rpc.call(&Request::KeepAlive, KEEPALIVE_DEADLINE);
        let mut sign = pin!(sign);
        let early = tokio::time::timeout(SIGN_OF_LIFE_WITHIN, &mut sign).await;
        let sign = match early {
            Ok(sign) => sign,
            Err(_) => {
                let mut elsewhere = Searching::elsewhere(session, link.namenode);
                tokio::select! {
                    biased;
                    sign = sign => sign,
                    leader = elsewhere.find() => {
                        *session.leader.lock() = Some(leader);
                        return "it does not answer, and another one leads".into();
                    }
                }
            }
        };
        match sign {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return refused(session, link, &error),
            Err(error) => return error.to_string(),
        }
    }
}

/// Handles the refusal of a keepalive.
fn refused(session: &Session, link: &Link, error: &FsError) -> String {
    match error {
        FsError::SessionExpired => session.session_expired(link),
        FsError::NotLeader { leader } => session.deposed(link, *leader),
        _ => {}
    }
    error.to_string()
}

async fn take_notices(session: Arc<Session>, link: Arc<Link>, mut notices: mpsc::Receiver<Notice>) {
    let mut batch = Vec::new();
    while notices.recv_many(&mut batch, NOTICES_QUEUED_MAX).await > 0 {
        session
            .handle_notices(&link, std::mem::take(&mut batch))
            .await;
    }
}
