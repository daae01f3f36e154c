//! What a member fetches from another one.

use std::net::UdpSocket;

use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::peer::PeerAnswer;
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::RpcServer;
use openraft::network::RPCOption;
use openraft::network::v2::RaftNetworkV2;

use super::candidates::is_called;
use super::*;
use crate::consensus::applied::InJournal;
use crate::consensus::peers::Peer;

/// A member that starts over opens its journal again, and ends if it cannot.
#[tokio::test]
async fn a_closed_member_has_its_journal_open_no_more_although_another_one_does_not_answer() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    silent.set_nonblocking(true).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    found(&journal, MemberId(1), members(&[1, 2, 3])).unwrap();
    let (consensus, _committed) = start_empty(journal).await;
    // Calls for votes keep it open until they end.
    consensus.set_candidate(false);
    let service = consensus.service();
    let request = PeerRequest::TakeSnapshot {
        last: Place { term: 1, record: 9 },
        name: "nn".to_owned(),
        addr: silent.local_addr().unwrap(),
    };
    let answer = service.answer(call_of_second(request)).await.unwrap();
    assert_eq!(answer.reply, PeerReply::Taking(None));
    assert!(is_called(&silent, 50 * PROMISED).await);
    drop(service);
    consensus.close().await.unwrap();
    // openraft's tasks end a moment after it reports its end; long before the other call is given up.
    for _ in 0..20 {
        if Journal::open(&journal_options(dir.path())).is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("its journal is still open");
}

/// openraft takes it for the answer to a heartbeat that was sent when it began, and nobody checks a vote for it.
#[tokio::test]
async fn a_snapshot_that_another_member_has_already_makes_no_lease() {
    let authority = CertificateAuthority::for_simulation().unwrap();
    let [calling, called] = [(); 2].map(|()| endpoint_of(&authority));
    let there = called.local_addr().unwrap();
    let last = Place { term: 1, record: 9 };
    let answering = tokio::spawn(async move {
        let incoming = called.accept().await.unwrap();
        let connection = incoming.establish().await.unwrap();
        let (_, sender, receiver) = connection.accept_stream().await.unwrap();
        let mut server =
            RpcServer::<Request, Response, Notice>::start(connection, sender, receiver);
        while let Ok(Some((_, responder))) = server.next().await {
            let answer = PeerAnswer {
                from: 2,
                memory: Memory {
                    run: 1,
                    writes: 0,
                    writes_at_start: 0,
                },
                reply: PeerReply::Taking(Some(last)),
            };
            responder.send(&Ok(Reply::Peer(answer)));
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    found(&journal, MemberId(1), members(&[1, 2, 3])).unwrap();
    let read = ReadLog {
        snapshot_lsn: 0,
        last_lsn: 0,
        terms: Vec::new(),
        members: None,
    };
    let options = JournalWriterOptions::default();
    let started = Consensus::start(journal, options, read, member(1), calling).await;
    let (consensus, _committed) = started.unwrap();
    consensus.set_candidate(false);

    let caller = Arc::clone(&consensus.peers.caller);
    let mut peer = Peer::new(caller, Some(MemberId(2)), "nn".to_owned(), there);
    let snapshot = Snapshot {
        meta: SnapshotMeta {
            last_log_id: Some(wire::entry(last)),
            last_membership: stored(1, &[1, 2, 3]),
        },
        snapshot: InJournal,
    };
    let vote = Vote::new_committed(1, MemberId(1));
    let option = RPCOption::new(Duration::from_secs(5));
    let begun = tokio::time::Instant::now();
    let taken = peer.full_snapshot(vote, snapshot, std::future::pending(), option);
    assert!(taken.await.is_ok());
    assert!(begun.elapsed() >= PROMISED);
    drop(peer);
    consensus.close().await.unwrap();
    answering.abort();
}
