//! Who asks for votes.

use std::net::UdpSocket;

use super::*;

/// Whether anybody calls.
pub(super) async fn is_called(other: &UdpSocket, within: Duration) -> bool {
    let deadline = tokio::time::Instant::now() + within;
    while tokio::time::Instant::now() < deadline {
        if other.recv_from(&mut [0; 2_000]).is_ok() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    false
}

/// One that would end when it is elected.
#[tokio::test]
async fn a_member_that_is_no_candidate_asks_nobody_for_a_vote() {
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    other.set_nonblocking(true).unwrap();
    let there = Member {
        addr: other.local_addr().unwrap(),
        ..member(2)
    };
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    let members = BTreeMap::from([(MemberId(1), member(1)), (MemberId(2), there)]);
    found(&journal, MemberId(1), members).unwrap();
    let (consensus, _committed) = start_empty(journal).await;
    // Before it may vote, and so ask.
    consensus.set_candidate(false);
    assert!(!is_called(&other, 5 * PROMISED).await);
    consensus.set_candidate(true);
    assert!(is_called(&other, 50 * PROMISED).await);
    consensus.set_candidate(false);
    consensus.close().await.unwrap();
}
