//! The history of the primary tenants: recorded, imported, analysed, kept across restarts.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::history::{
    HistoryOverview, HistoryRecord, HistoryReply, HistoryRequest, ImportCounts, TenantHistory,
    TenantName, TenantPattern,
};
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::limits::HISTORY_RECORDS_PER_REQUEST_MAX;
use harvestfs_protocol::node::{NodeRequest, RegisterNode};

use crate::harness::*;

async fn history(cluster: &Cluster, request: HistoryRequest) -> Result<HistoryReply, FsError> {
    match cluster.admin(AdminRequest::History(request)).await? {
        AdminReply::History(reply) => Ok(reply),
        other => panic!("unexpected {other:?}"),
    }
}

async fn overview(cluster: &Cluster, request: HistoryRequest) -> HistoryOverview {
    match history(cluster, request).await.unwrap() {
        HistoryReply::Overview(overview) => overview,
        other => panic!("unexpected {other:?}"),
    }
}

async fn tenants(cluster: &Cluster) -> Vec<TenantHistory> {
    match history(cluster, HistoryRequest::Tenants { after: None })
        .await
        .unwrap()
    {
        HistoryReply::Tenants {
            tenants,
            more: false,
        } => tenants,
        other => panic!("unexpected {other:?}"),
    }
}

fn now_s() -> u32 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs() as u32
}

fn tenant(function: &str) -> TenantName {
    TenantName {
        environment: "imported".into(),
        machine_function: function.into(),
    }
}

fn owner(server: &str, function: &str, from_s: u32) -> HistoryRecord {
    HistoryRecord::Owner {
        server: server.into(),
        tenant: tenant(function),
        from_s,
    }
}

async fn register(cluster: &Cluster, storage: u128) {
    let (link, _notices) = cluster.rpc(Role::Datanode, "dn-1").await;
    let register = RegisterNode {
        server: server("dn-1"),
        volumes: vec![volume(storage)],
        cluster: None,
        version: "1.2.3".into(),
        obeyed: None,
    };
    link.node(NodeRequest::Register(Box::new(register)))
        .await
        .unwrap();
}

/// Three weeks at 40 %, one sample every five minutes.
fn flat(function: &str) -> HistoryRecord {
    HistoryRecord::Utilisation {
        tenant: tenant(function),
        start_s: now_s() - 21 * 86_400,
        period_s: 300,
        samples: vec![4_000; 21 * 288],
    }
}

#[tokio::test]
async fn what_is_imported_is_analysed_and_survives_kills() {
    let mut cluster = Cluster::new().await;
    let from_s = now_s() - 100 * 86_400;
    let records = vec![
        owner("s1", "a", from_s),
        owner("s2", "a", from_s),
        owner("s3", "b", from_s),
        HistoryRecord::Reimage {
            server: "s1".into(),
            at_s: now_s() - 1_000,
        },
        flat("a"),
    ];
    let import = |records: &[HistoryRecord]| HistoryRequest::Import(records.to_vec());
    let imported = history(&cluster, import(&records)).await.unwrap();
    let HistoryReply::Imported(counts) = imported else {
        panic!("unexpected {imported:?}");
    };
    assert!(counts.new > 4 + 15_000 && counts.known == 0, "{counts:?}");
    // A second time, nothing is new.
    let again = history(&cluster, import(&records[..4])).await.unwrap();
    let known = ImportCounts {
        known: 4,
        ..ImportCounts::default()
    };
    assert_eq!(again, HistoryReply::Imported(known));

    let analysed = overview(&cluster, HistoryRequest::Analyse).await;
    assert!(
        analysed
            .analysed_at_s
            .is_some_and(|at_s| at_s.abs_diff(now_s()) < 60)
    );
    assert_eq!(analysed.classes[0].pattern, TenantPattern::Constant);
    assert_eq!(
        (
            analysed.classes[0].tenants,
            analysed.classes[0].average_cpu_permille
        ),
        (1, 400)
    );
    let before = tenants(&cluster).await;
    let [a, b] = &before[..] else {
        panic!("unexpected {before:?}");
    };
    assert_eq!((a.servers, a.reimages, a.class), (2, 1, Some(0)));
    assert_eq!(
        (a.average_cpu_permille, a.peak_cpu_permille),
        (Some(400), Some(400))
    );
    assert_eq!(a.pattern, Some(TenantPattern::Constant));
    assert!(a.reimages_per_1000_server_months > b.reimages_per_1000_server_months);
    assert_eq!((b.average_cpu_permille, b.pattern), (None, None));

    cluster.kill_and_start().await;
    // It is analysed immediately after a start.
    assert_eq!(tenants(&cluster).await, before);
    let after = overview(&cluster, HistoryRequest::Overview).await;
    assert_eq!(after.problems, Vec::<String>::new());
    assert_eq!((after.tenants, after.servers, after.reimages), (2, 3, 1));

    // A damaged file is reported, and the rest is intact: without the record of a server, its reimage means nothing
    // either.
    cluster.kill().await;
    let servers = cluster.data_dir().join("history/servers");
    let mut content = fs::read(&servers).unwrap();
    content[30] ^= 1;
    fs::write(&servers, content).unwrap();
    cluster.start().await;
    let damaged = overview(&cluster, HistoryRequest::Overview).await;
    assert_eq!(damaged.problems.len(), 1);
    assert!(
        damaged.problems[0].contains("history/servers: 2 damaged records"),
        "{damaged:?}"
    );
    assert_eq!(damaged.servers, 2);
    cluster.shutdown().await;
}

#[tokio::test]
async fn a_series_that_is_too_old_is_not_counted_as_known() {
    let mut cluster = Cluster::new().await;
    let day = |ago: u32| HistoryRecord::Utilisation {
        tenant: tenant("a"),
        start_s: now_s() - ago * 86_400,
        period_s: 300,
        samples: vec![4_000; 288],
    };
    let import = HistoryRequest::Import(vec![day(60)]);
    let too_old = ImportCounts {
        too_old: 288,
        ..ImportCounts::default()
    };
    let imported = history(&cluster, import).await;
    assert_eq!(imported, Ok(HistoryReply::Imported(too_old)));
    let recent = day(10);
    let import = || HistoryRequest::Import(vec![recent.clone()]);
    history(&cluster, import()).await.unwrap();
    let known = ImportCounts {
        known: 1,
        ..ImportCounts::default()
    };
    let again = history(&cluster, import()).await;
    assert_eq!(again, Ok(HistoryReply::Imported(known)));
    cluster.shutdown().await;
}

#[tokio::test]
async fn reimages_count_at_once_and_come_back_from_the_journal() {
    let mut cluster = Cluster::new().await;
    register(&cluster, 1).await;
    let [before] = &tenants(&cluster).await[..] else {
        panic!("one tenant was expected");
    };
    assert_eq!((before.servers, before.reimages), (1, 0));
    // The disk was reformatted: another storage id.
    register(&cluster, 99).await;
    assert_eq!(tenants(&cluster).await[0].reimages, 1);
    // The same again is not another one.
    register(&cluster, 99).await;
    assert_eq!(tenants(&cluster).await[0].reimages, 1);

    // Even if the files of history are gone.
    cluster.kill().await;
    fs::remove_dir_all(cluster.data_dir().join("history")).unwrap();
    cluster.start().await;
    let [after] = &tenants(&cluster).await[..] else {
        panic!("one tenant was expected");
    };
    assert_eq!((after.servers, after.reimages), (1, 1));
    cluster.shutdown().await;
}

#[tokio::test]
async fn what_is_wrong_with_a_record_is_said() {
    let mut cluster = Cluster::new().await;
    let from_s = now_s() - 1_000;
    let records = vec![
        owner("s1", "a", from_s),
        HistoryRecord::Reimage {
            server: "s2".into(),
            at_s: from_s,
        },
    ];
    let refused = history(&cluster, HistoryRequest::Import(records))
        .await
        .unwrap();
    let expected = HistoryReply::Refused {
        record: 1,
        reason: "server s2 is unknown: import its owner first".into(),
    };
    assert_eq!(refused, expected);
    let cases = [
        (
            owner("s1", "b", from_s),
            "server s1 already belongs to imported/a from second",
        ),
        (owner("s9", "b", now_s() + 10_000), "is in the future"),
        (
            owner("", "b", from_s),
            "expected a name of 1 to 128 bytes, found one of 0 bytes",
        ),
        (
            HistoryRecord::Utilisation {
                tenant: tenant("a"),
                start_s: now_s(),
                period_s: u32::MAX,
                samples: vec![0; 3],
            },
            "is in the future",
        ),
    ];
    for (record, expected) in cases {
        match history(&cluster, HistoryRequest::Import(vec![record]))
            .await
            .unwrap()
        {
            HistoryReply::Refused { record: 0, reason } => {
                assert!(reason.contains(expected), "{reason}");
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    // What came before the refused record is kept.
    assert_eq!(tenants(&cluster).await[0].servers, 1);
    let many = vec![owner("s1", "a", from_s); HISTORY_RECORDS_PER_REQUEST_MAX + 1];
    let refused = history(&cluster, HistoryRequest::Import(many)).await;
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );
    cluster.shutdown().await;
}
