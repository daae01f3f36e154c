//! What a member fetches of another one.

use std::net::UdpSocket;

use super::candidates::is_called;
use super::*;

/// One that begins anew opens its journal again, and ends if it cannot.
#[tokio::test]
async fn a_closed_member_has_its_journal_open_no_more_although_another_one_does_not_answer() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    silent.set_nonblocking(true).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    found(&journal, MemberId(1), members(&[1, 2, 3])).unwrap();
    let (consensus, _committed) = start_empty(journal).await;
    // Calls for votes have it open until they end.
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
    // Tasks of openraft end a moment later than that says; long before the other one is given up.
    for _ in 0..20 {
        if Journal::open(&journal_options(dir.path())).is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("its journal is still open");
}
