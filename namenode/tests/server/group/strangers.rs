//! Non-members, and messages and files of members that are not as they should be.

use std::fs;

use harvestfs_namenode::server::{NamenodeError, journal_dir};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::peer::{
    Ballot, Memory, PeerAnswer, PeerCall, PeerReply, PeerRequest, Place,
};

use super::*;

async fn ask(link: &Link, request: PeerRequest) -> Result<PeerReply, FsError> {
    let call = PeerCall {
        // Not a member of the group.
        from: 0x5ca1_ab1e,
        to: None,
        memory: Memory {
            run: 1,
            writes: 1,
            writes_at_start: 1,
        },
        known: None,
        request,
    };
    match link.ask(Request::Peer(call)).await? {
        Reply::Peer(PeerAnswer { reply, .. }) => Ok(reply),
        other => panic!("unexpected {other:?}"),
    }
}

#[tokio::test]
async fn a_namenode_of_another_cluster_or_authority_is_not_added() {
    let mut group = Group::of_addresses(3);
    format(&group.data_dir(0), &format_options()).unwrap();
    group.start(0).await;
    let elsewhere = ClusterId(format_options().cluster.0 + 1);
    format_outside(&group.data_dir(1), elsewhere, 4 << 20).unwrap();
    group.start(1).await;
    let add = GroupRequest::Add(group.addrs[1]);
    let refused = group.group(add).await.unwrap_err().to_string();
    assert!(refused.contains(&elsewhere.to_string()), "{refused}");

    let ours = std::mem::replace(
        &mut group.authority,
        CertificateAuthority::in_memory().unwrap(),
    );
    group.start_outside(2).await;
    group.authority = ours;
    let add = GroupRequest::Add(group.addrs[2]);
    let refused = group.group(add).await.unwrap_err().to_string();
    assert!(refused.contains("certificate"), "{refused}");
    assert_eq!(group.list().await.members.len(), 1);
    let (mut client, _) = group.client("alice", None).await;
    client.create(ROOT, "goes-on").await;
}

#[tokio::test]
async fn entries_that_no_leader_can_have_sent_are_refused_and_change_nothing() {
    let group = Group::new(3).await;
    let (mut client, leader) = group.client("alice", None).await;
    client.create(ROOT, "before").await;
    let term = group.list().await.term;
    for at in [leader, (leader + 1) % 3] {
        let (link, _notices) = group.link(at, Role::Namenode, "nn").await.unwrap();
        let append = |before: Place, records: Vec<Vec<u8>>, committed: Place| {
            let ballot = Ballot {
                term,
                candidate: 0x5ca1_ab1e,
                is_elected: true,
            };
            PeerRequest::Append {
                ballot,
                before: Some(before),
                records,
                committed: Some(committed),
            }
        };
        let here = Place { term, record: 1 };
        let future = Place {
            term: term + 1,
            record: u64::MAX,
        };
        for request in [
            append(future, vec![], here),
            append(here, vec![], future),
            append(here, vec![vec![255; 10]], here),
            append(here, vec![vec![]], here),
        ] {
            let what = format!("{request:?}");
            let refused = ask(&link, request).await;
            assert!(
                matches!(refused, Err(FsError::Protocol(_))),
                "{what}: {refused:?}"
            );
        }
        // From a leader that nobody elected, of a term that is over.
        let old = PeerRequest::Append {
            ballot: Ballot {
                term: 0,
                candidate: 0x5ca1_ab1e,
                is_elected: true,
            },
            before: None,
            records: vec![],
            committed: None,
        };
        let refused = ask(&link, old).await;
        assert!(matches!(refused, Ok(PeerReply::Outvoted(_))), "{refused:?}");
    }
    client.create(ROOT, "after").await;
    let status = group.list().await;
    assert_eq!(status.term, term, "the leader goes on");
}

#[tokio::test]
async fn a_member_whose_vote_cannot_be_read_does_not_start_and_says_so() {
    let mut group = Group::new(3).await;
    let leader = group.leader().await;
    let damaged = (leader + 1) % 3;
    group.kill(damaged).await;
    let path = journal_dir(&group.data_dir(damaged)).join("member");
    let good = fs::read(&path).unwrap();
    for (what, bytes) in [
        ("a byte", {
            let mut bytes = good.clone();
            bytes[good.len() / 2] ^= 1;
            bytes
        }),
        ("cut", good[..good.len() - 1].to_vec()),
        ("empty", vec![]),
    ] {
        fs::write(&path, bytes).unwrap();
        let refused = Namenode::start(group.options(damaged)).await;
        let Err(NamenodeError::Journal(error)) = refused.map(drop) else {
            panic!("{what}: it started, or said something else");
        };
        assert!(error.to_string().contains("member"), "{what}: {error}");
    }
    // The others continue, and it does when the file is back.
    let (mut client, _) = group.client("alice", None).await;
    client.create(ROOT, "without").await;
    fs::write(&path, good).unwrap();
    group.start(damaged).await;
    client.create(ROOT, "with").await;
}
