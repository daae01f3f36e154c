//! Which members ask for votes.

use std::net::UdpSocket;

use harvestfs_protocol::error::FsError;

use super::*;

/// Whether any member calls.
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

/// A member that would end if it were elected.
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

/// The leader does not know that it would end, and names the member that has most.
#[tokio::test]
async fn a_member_that_is_no_candidate_refuses_to_take_leadership_over() {
    let dir = tempfile::tempdir().unwrap();
    let journal = journal_in(dir.path());
    found(&journal, MemberId(1), members(&[1, 2, 3])).unwrap();
    let (consensus, _committed) = start_empty(journal).await;
    consensus.set_candidate(false);
    let service = consensus.service();
    tokio::time::sleep(PROMISED).await;
    let ballot = Ballot {
        term: 5,
        candidate: 2,
        is_elected: true,
    };
    let heartbeat = PeerRequest::Append {
        ballot,
        before: None,
        records: Vec::new(),
        committed: None,
    };
    let answer = service.answer(call_of_second(heartbeat)).await.unwrap();
    assert_eq!(answer.reply, PeerReply::Appended);
    let handed_over = async || {
        let request = PeerRequest::Transfer {
            ballot,
            to: 1,
            last: None,
        };
        let answer = service.answer(call_of_second(request)).await;
        answer.map(|it| it.reply)
    };
    let refused = handed_over().await;
    assert!(
        matches!(&refused, Err(FsError::InvalidArgument(why)) if why.contains("no votes")),
        "{refused:?}"
    );
    // Others get its vote all the same, as soon as the leader leaves.
    let request = PeerRequest::Vote {
        ballot: Ballot {
            term: 6,
            candidate: 2,
            is_elected: false,
        },
        last: Some(Place { term: 5, record: 9 }),
        is_trial: true,
        is_transfer: false,
    };
    let answer = service.answer(call_of_second(request)).await.unwrap();
    match answer.reply {
        PeerReply::Voted { is_granted, .. } => assert!(is_granted),
        other => panic!("{other:?}"),
    }
    consensus.set_candidate(true);
    assert_eq!(handed_over().await, Ok(PeerReply::Transferred));
    consensus.close().await.unwrap();
}
