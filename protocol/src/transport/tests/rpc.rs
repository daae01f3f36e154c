use tokio::sync::mpsc;

use super::*;
use crate::codec::{MAX_HEADER_BYTES, StreamKind};
use crate::transport::{
    CALLS_IN_FLIGHT_MAX, CloseCode, NOTICES_QUEUED_MAX, RpcClient, RpcError, RpcServer,
    TransportError,
};

type Client = RpcClient<u64, String, u32>;
type Server = RpcServer<u64, String, u32>;

async fn start(pair: &Pair, notices: mpsc::Sender<u32>) -> (Client, Server) {
    let (client, accepted) = tokio::join!(
        Client::start(pair.client.clone(), notices),
        pair.server.accept_stream()
    );
    let (kind, sender, receiver) = accepted.unwrap();
    assert_eq!(kind, StreamKind::Rpc);
    let server = Server::start(pair.server.clone(), sender, receiver);
    (client.unwrap(), server)
}

/// A client and a server, without a use for notices.
async fn start_without_notices(pair: &Pair) -> (Client, Server) {
    start(pair, mpsc::channel(1).0).await
}

async fn many_calls_at_once_get_their_own_answers_in_any_order(pair: Pair) {
    let (client, mut server) = start_without_notices(&pair).await;
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Some((request, responder)) = server.next().await.unwrap() {
            held.push((request, responder));
            // Answers in bulk and in reverse, from another thread.
            if held.len() == 50 {
                let batch = std::mem::take(&mut held);
                std::thread::spawn(move || {
                    for (request, responder) in batch.into_iter().rev() {
                        responder.send(&format!("answer {request}"));
                    }
                });
            }
        }
    });
    let calls: Vec<_> = (0..2000)
        .map(|request| {
            let client = client.clone();
            tokio::spawn(async move { client.call(&request, LONG).await })
        })
        .collect();
    for (request, call) in calls.into_iter().enumerate() {
        assert_eq!(call.await.unwrap().unwrap(), format!("answer {request}"));
    }
}

async fn large_answers_arrive_whole(pair: Pair) {
    let (client, mut server) = start_without_notices(&pair).await;
    tokio::spawn(async move {
        while let Some((request, responder)) = server.next().await.unwrap() {
            responder.send(&"y".repeat(request as usize));
        }
    });
    let calls = [0, 1, 100_000, MAX_HEADER_BYTES as u64 - 10].map(|request| {
        let client = client.clone();
        async move {
            (
                request,
                client.call(&request, LONG).await.unwrap().len() as u64,
            )
        }
    });
    for call in calls {
        let (request, length) = call.await;
        assert_eq!(request, length);
    }
}

async fn an_answer_over_the_limit_is_an_error(pair: Pair) {
    let (client, mut server) = start_without_notices(&pair).await;
    tokio::spawn(async move {
        let (_, responder) = server.next().await.unwrap().unwrap();
        responder.send(&"y".repeat(MAX_HEADER_BYTES + 1));
        let (_, responder) = server.next().await.unwrap().unwrap();
        responder.send(&"good".to_owned());
        let (_, responder) = server.next().await.unwrap().unwrap();
        drop(responder);
        server.next().await
    });
    assert_eq!(client.call(&1, LONG).await, Err(RpcError::Abandoned));
    assert_eq!(client.call(&2, LONG).await, Ok("good".to_owned()));
    assert_eq!(client.call(&3, LONG).await, Err(RpcError::Abandoned));
}

async fn calls_end_at_their_deadline_and_later_answers_are_ignored(pair: Pair) {
    let (client, mut server) = start_without_notices(&pair).await;
    let (answered, mut late) = mpsc::channel(1);
    tokio::spawn(async move {
        let (_, first) = server.next().await.unwrap().unwrap();
        let (_, second) = server.next().await.unwrap().unwrap();
        first.send(&"late".to_owned());
        second.send(&"in time".to_owned());
        answered.send(()).await.unwrap();
        server.next().await
    });
    assert_eq!(
        client.call(&1, SHORT).await,
        Err(RpcError::Deadline { deadline: SHORT })
    );
    assert_eq!(client.call(&2, LONG).await, Ok("in time".to_owned()));
    late.recv().await.unwrap();
}

async fn losing_the_connection_fails_pending_calls_at_once(pair: Pair) {
    let (client, mut server) = start_without_notices(&pair).await;
    let calls: Vec<_> = (0..20)
        .map(|request| {
            let client = client.clone();
            tokio::spawn(async move { client.call(&request, LONG * 100).await })
        })
        .collect();
    let mut held = Vec::new();
    while held.len() < 20 {
        held.push(server.next().await.unwrap().unwrap());
    }
    pair.server.close(CloseCode::DONE, "going away");
    for call in calls {
        let error = call.await.unwrap().unwrap_err();
        assert!(
            matches!(&error, RpcError::ConnectionLost { reason } if reason.contains("going away")),
            "{error}"
        );
    }
    assert!(client.is_closed());
    let again = client.call(&1, LONG).await;
    assert!(matches!(again, Err(RpcError::ConnectionLost { .. })));
    // Answering after the client has gone is allowed.
    for (_, responder) in held {
        responder.send(&"too late".to_owned());
    }
    assert!(server.next().await.is_err());
}

async fn a_server_that_is_dropped_fails_pending_calls(pair: Pair) {
    let (client, mut server) = start_without_notices(&pair).await;
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.call(&1, LONG).await }
    });
    let (_, responder) = server.next().await.unwrap().unwrap();
    drop(server);
    // What was asked before is still answered.
    responder.send(&"last".to_owned());
    assert_eq!(call.await.unwrap(), Ok("last".to_owned()));
    let error = client.call(&2, LONG).await.unwrap_err();
    assert!(matches!(error, RpcError::ConnectionLost { .. }), "{error}");
}

async fn the_server_sees_that_the_client_is_done(pair: Pair) {
    let (client, mut server) = start_without_notices(&pair).await;
    drop(client);
    assert!(server.next().await.unwrap().is_none());
}

async fn notices_arrive_in_order_among_answers(pair: Pair) {
    let (sender, mut notices) = mpsc::channel(1000);
    let (client, mut server) = start(&pair, sender).await;
    let notice_sender = server.notice_sender();
    tokio::spawn(async move {
        let mut sent = 0..500;
        while let Some((_, responder)) = server.next().await.unwrap() {
            for notice in sent.by_ref().take(100) {
                notice_sender.send(&notice).unwrap();
            }
            responder.send(&String::new());
        }
    });
    for request in 0..5 {
        client.call(&request, LONG).await.unwrap();
    }
    for expected in 0..500 {
        assert_eq!(notices.recv().await, Some(expected));
    }
}

async fn a_client_that_does_not_take_notices_is_cut_off(pair: Pair) {
    let (sender, _untaken) = mpsc::channel(1);
    let (client, server) = start(&pair, sender).await;
    let notices = server.notice_sender();
    for notice in 0..3 {
        notices.send(&notice).unwrap();
    }
    assert!(matches!(
        pair.server.closed().await,
        TransportError::ClosedByPeer {
            code: CloseCode::TOO_SLOW,
            ..
        }
    ));
    assert_eq!(notices.send(&1), Err(TransportError::Closed));
    let error = client.call(&1, LONG).await;
    assert!(matches!(error, Err(RpcError::ConnectionLost { .. })));
}

async fn notices_that_pile_up_end_the_connection(pair: Pair) {
    let (_client, server) = start_without_notices(&pair).await;
    let notices = server.notice_sender();
    // On a current-thread runtime nothing is written meanwhile.
    for notice in 0..=NOTICES_QUEUED_MAX as u32 {
        assert!(!pair.server.is_closed());
        notices.send(&notice).unwrap();
    }
    assert!(pair.server.is_closed());
    assert_eq!(notices.send(&0), Err(TransportError::Closed));
}

async fn a_server_takes_no_more_requests_than_it_may_owe_answers(pair: Pair) {
    let (client, mut server) = start_without_notices(&pair).await;
    let more = CALLS_IN_FLIGHT_MAX + 50;
    // Half of the calls have given up by the time they are taken, so the client's own limit on
    // calls in flight lets more through than the server may take.
    let mut calls: Vec<_> = (0..CALLS_IN_FLIGHT_MAX as u64)
        .map(|request| {
            let client = client.clone();
            tokio::spawn(async move { client.call(&request, SHORT).await })
        })
        .collect();
    for call in calls.drain(..) {
        assert!(call.await.unwrap().is_err());
    }
    let calls: Vec<_> = (CALLS_IN_FLIGHT_MAX as u64..more as u64)
        .map(|request| {
            let client = client.clone();
            tokio::spawn(async move { client.call(&request, LONG).await })
        })
        .collect();
    let mut held = Vec::new();
    while let Ok(next) = tokio::time::timeout(SHORT, server.next()).await {
        held.push(next.unwrap().unwrap());
    }
    assert_eq!(held.len(), CALLS_IN_FLIGHT_MAX);
    for (request, responder) in held.drain(..) {
        responder.send(&request.to_string());
    }
    for _ in 0..50 {
        let (request, responder) = server.next().await.unwrap().unwrap();
        responder.send(&request.to_string());
    }
    for (request, call) in (CALLS_IN_FLIGHT_MAX..more).zip(calls) {
        assert_eq!(call.await.unwrap().unwrap(), request.to_string());
    }
}

async fn malformed_requests_end_the_connection(pair: Pair) {
    let (mut sender, _receiver) = pair.client.open_stream(StreamKind::Rpc).await.unwrap();
    sender.send(&"not a request").await.unwrap();
    let (_, server_sender, server_receiver) = pair.server.accept_stream().await.unwrap();
    let mut server = Server::start(pair.server.clone(), server_sender, server_receiver);
    let error = server.next().await.err().unwrap();
    assert!(matches!(error, TransportError::Wire(_)), "{error}");
    assert!(matches!(
        pair.client.closed().await,
        TransportError::ClosedByPeer {
            code: CloseCode::PROTOCOL_VIOLATION,
            ..
        }
    ));
}

both_ways! {
    many_calls_at_once_get_their_own_answers_in_any_order,
    large_answers_arrive_whole,
    an_answer_over_the_limit_is_an_error,
    calls_end_at_their_deadline_and_later_answers_are_ignored,
    losing_the_connection_fails_pending_calls_at_once,
    a_server_that_is_dropped_fails_pending_calls,
    the_server_sees_that_the_client_is_done,
    notices_arrive_in_order_among_answers,
    a_client_that_does_not_take_notices_is_cut_off,
    notices_that_pile_up_end_the_connection,
    a_server_takes_no_more_requests_than_it_may_owe_answers,
    malformed_requests_end_the_connection,
}
