//! Operators are shown nothing that another leader may never have.

use std::pin::pin;

use futures::FutureExt;
use futures::future::Either;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{MetaCall, OpenSession};
use harvestfs_protocol::placement::PlacementRequest;
use harvestfs_protocol::rpc::{Reply, Request};

use crate::harness::*;

/// Number of attempts: the disk may be fast.
const ROUNDS: u32 = 50;

/// Makes a change, and asks on the same connection before the change is answered. When the answer shows the change, that
/// has been answered too: replies keep their order.
async fn check(
    link: &Link,
    change: Request,
    question: AdminRequest,
    shows: impl Fn(&AdminReply) -> bool,
) {
    let changing = pin!(link.ask(change).fuse());
    let asking = pin!(link.ask(Request::Admin(question)));
    match futures::future::select(changing, asking).await {
        Either::Left((changed, asking)) => {
            changed.unwrap();
            asking.await.unwrap();
        }
        Either::Right((answer, changing)) => {
            let Ok(Reply::Admin(reply)) = answer else {
                panic!("unexpected {answer:?}");
            };
            let is_changed = changing.now_or_never();
            assert!(
                is_changed.is_some() || !shows(&reply),
                "what is not committed is shown: {reply:?}"
            );
        }
    }
}

fn request(call: MetaCall) -> Request {
    Request::Meta(call)
}

#[tokio::test]
async fn operators_are_shown_only_what_is_committed() {
    for in_place_max in [u64::MAX, 0] {
        let adjust: fn(&mut harvestfs_namenode::server::NamenodeOptions) = match in_place_max {
            0 => |it| it.fsck_in_place_max = 0,
            _ => |it| it.fsck_in_place_max = u64::MAX,
        };
        let cluster = Cluster::with(adjust).await;
        let _node = Datanode::register(&cluster, "dn-1").await;
        let (link, notices) = cluster.rpc(Role::Admin, "operator").await;
        let open = Request::OpenSession(OpenSession {
            resume: None,
            holds: vec![],
            delegations: None,
            seen: None,
        });
        let Ok(Reply::SessionOpened(opened)) = link.ask(open).await else {
            panic!("no session");
        };
        let mut operator = Client::new(link.clone(), notices, opened.session);
        for round in 0..ROUNDS {
            let name = format!("file-{round}");
            let change = request(operator.number(create(InodeId::ROOT, &name)));
            check(&link, change, AdminRequest::Fsck, |reply| {
                matches!(reply, AdminReply::Fsck(report) if report.files > u64::from(round))
            })
            .await;
        }
        for round in 0..ROUNDS {
            let servers = vec!["dn-1".to_owned()];
            let (change, is_away) = if round % 2 == 0 {
                let start = PlacementRequest::StartMaintenance {
                    servers,
                    for_ms: 3_600_000,
                    force: true,
                };
                (start, true)
            } else {
                (PlacementRequest::EndMaintenance { servers }, false)
            };
            let change = Request::Admin(AdminRequest::Placement(change));
            check(&link, change, AdminRequest::Nodes, |reply| {
                let AdminReply::Nodes(nodes) = reply else {
                    panic!("unexpected {reply:?}");
                };
                nodes[0].maintenance_left_ms.is_some() == is_away
            })
            .await;
        }
    }
}
