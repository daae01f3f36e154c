use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::transport::{CloseCode, ConnectionPool, TransportError};

/// A namenode that keeps every connection, and counts them.
fn serve(endpoint: &Endpoint) -> Arc<AtomicUsize> {
    let accepted = Arc::new(AtomicUsize::new(0));
    tokio::spawn({
        let (endpoint, accepted) = (endpoint.clone(), accepted.clone());
        async move {
            while let Some(incoming) = endpoint.accept().await {
                let accepted = accepted.clone();
                tokio::spawn(async move {
                    let connection = incoming.establish().await.unwrap();
                    accepted.fetch_add(1, Ordering::SeqCst);
                    connection.closed().await
                });
            }
        }
    });
    accepted
}

#[tokio::test]
async fn one_attempt_serves_all_callers_and_broken_connections_are_replaced() {
    let server = endpoint(Role::Namenode, "nn");
    let addr = server.local_addr().unwrap();
    let accepted = serve(&server);
    let pool = ConnectionPool::new(endpoint(Role::Client, "c-1"), LONG, 10);
    let asked: Vec<_> = (0..20)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move { pool.get(addr, &namenode()).await })
        })
        .collect();
    for connection in asked {
        assert_eq!(connection.await.unwrap().unwrap().peer(), &namenode());
    }
    assert_eq!(accepted.load(Ordering::SeqCst), 1);

    let connection = pool.get(addr, &namenode()).await.unwrap();
    connection.close(CloseCode::DONE, "test");
    let replaced = pool.get(addr, &namenode()).await.unwrap();
    assert!(!replaced.is_closed());
    assert_eq!(accepted.load(Ordering::SeqCst), 2);

    pool.forget(addr, &namenode());
    pool.get(addr, &namenode()).await.unwrap();
    assert_eq!(accepted.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn a_failed_attempt_is_bounded_shared_by_all_and_tried_again_later() {
    let silent = std::net::UdpSocket::bind(loopback()).unwrap();
    let addr = silent.local_addr().unwrap();
    let pool = ConnectionPool::new(endpoint(Role::Client, "c-1"), SHORT, 10);
    let expected = namenode();
    let (first, second) = tokio::join!(pool.get(addr, &expected), pool.get(addr, &expected));
    for result in [first, second] {
        assert!(matches!(
            result.unwrap_err(),
            TransportError::Deadline { .. }
        ));
    }
    drop(silent);
    let server = Endpoint::bind(
        addr,
        &identity(Role::Namenode, "nn"),
        TransportOptions::default(),
    )
    .unwrap();
    serve(&server);
    let pool = ConnectionPool::new(pool.endpoint().clone(), LONG, 10);
    pool.get(addr, &expected).await.unwrap();
}

#[tokio::test]
async fn the_connection_not_used_for_longest_makes_room() {
    let pool = ConnectionPool::new(endpoint(Role::Client, "c-1"), LONG, 2);
    let names = ["a", "b", "c"];
    let peers = names.map(|name| Peer::new(Role::Datanode, name).unwrap());
    let servers = names.map(|name| endpoint(Role::Datanode, name));
    let addrs = servers
        .each_ref()
        .map(|server| server.local_addr().unwrap());
    let accepted = servers.each_ref().map(serve);
    for index in [0, 1, 0, 2, 0, 1] {
        pool.get(addrs[index], &peers[index]).await.unwrap();
    }
    let counts = accepted.map(|count| count.load(Ordering::SeqCst));
    assert_eq!(counts, [1, 2, 1]);
}
