//! Sessions, exactly-once mutations, and registered servers.

use super::*;
use crate::engine::namespace::{Choice, Operation};
use harvestfs_protocol::ids::{NodeId, StorageId};
use harvestfs_protocol::limits::{LABEL_BYTES_MAX, MUTATIONS_IN_FLIGHT_MAX, VOLUMES_PER_NODE_MAX};
use harvestfs_protocol::node::ServerDescription;

/// A mutation with chosen numbers; it makes a directory named after its sequence number.
fn mutation(fixture: &Fixture, sequence: u64, answered_below: u64) -> Command {
    Command::Mutate {
        session: fixture.session,
        sequence,
        answered_below,
        credentials: Credentials::root(),
        now: Timestamp(fixture.now),
        held_elsewhere: false,
        op: Mutation::MakeDir(mutation::MakeDir {
            parent: InodeId::ROOT,
            name: name(&format!("{}-{sequence}", fixture.session)),
            mode: 0o755,
        }),
    }
}

#[test]
fn a_repeated_mutation_is_answered_from_memory() {
    let mut fixture = Fixture::new();
    let command = mutation(&fixture, 5, 1);
    let first = fixture.apply(&command).unwrap();
    assert_eq!(
        fixture.namespace.remembered_reply(fixture.session, 5),
        Some(&first)
    );
    let before = fixture.snapshot();
    assert_eq!(fixture.apply(&command), Ok(first));
    assert_eq!(fixture.effects, Effects::default());
    assert_eq!(fixture.snapshot(), before);

    // Blocks too: the same ones again.
    fixture.sequence = 5;
    let blocks = fixture.allocate(3);
    let again = fixture.command(Mutation::AllocateBlocks(mutation::AllocateBlocks {
        count: 3,
        rules: RULES,
        exclude: Vec::new(),
    }));
    assert_eq!(fixture.apply(&again), Ok(Outcome::Blocks(blocks)));
}

#[test]
fn a_failed_mutation_may_be_tried_again() {
    let mut fixture = Fixture::new();
    fixture.file("/f");
    fixture.unlink("/none").unwrap_err();
    let sequence = fixture.sequence;
    assert_eq!(
        fixture
            .namespace
            .remembered_reply(fixture.session, sequence),
        None
    );
    let unlink = fixture.command(Mutation::Unlink(mutation::Unlink {
        parent: InodeId::ROOT,
        name: name("f"),
    }));
    fixture.apply(&unlink).unwrap();
}

#[test]
fn mutations_come_in_any_order_and_are_forgotten_when_answered() {
    let mut fixture = Fixture::new();
    for sequence in [3, 1, 4, 2] {
        fixture.apply(&mutation(&fixture, sequence, 1)).unwrap();
    }
    let session = fixture.session;
    let known = |fixture: &Fixture| -> Vec<u64> {
        let known = |&n: &u64| fixture.namespace.remembered_reply(session, n).is_some();
        (0..10).filter(known).collect()
    };
    assert_eq!(known(&fixture), [1, 2, 3, 4]);
    fixture.apply(&mutation(&fixture, 7, 3)).unwrap();
    assert_eq!(known(&fixture), [3, 4, 7]);
    // One that is late does not turn it back.
    fixture.apply(&mutation(&fixture, 6, 1)).unwrap();
    assert_eq!(known(&fixture), [3, 4, 6, 7]);
    // What was answered is not executed again, and no mutation is number 0.
    for (sequence, answered_below) in [(1, 1), (2, 3), (0, 0), (8, 9)] {
        let result = fixture.apply(&mutation(&fixture, sequence, answered_below));
        assert!(matches!(result, Err(FsError::Protocol(_))), "{result:?}");
    }
}

#[test]
fn the_memory_of_replies_is_bounded() {
    let mut fixture = Fixture::new();
    let most = MUTATIONS_IN_FLIGHT_MAX as u64;
    for sequence in 1..=most {
        let command = mutation(&fixture, sequence, 1);
        fixture.namespace.apply(&command).unwrap();
    }
    let result = fixture.apply(&mutation(&fixture, most + 1, 1));
    assert!(matches!(result, Err(FsError::Protocol(_))));
    fixture.apply(&mutation(&fixture, most + 1, 2)).unwrap();
}

#[test]
fn sessions_are_distinct() {
    let mut fixture = Fixture::new();
    let first = fixture.session;
    let second = fixture.open_session();
    assert!(second > first);
    fixture.apply(&mutation(&fixture, 1, 1)).unwrap();
    fixture.session = second;
    fixture.apply(&mutation(&fixture, 1, 1)).unwrap();
    let sessions: Vec<_> = fixture
        .namespace
        .sessions()
        .map(|session| session.session)
        .collect();
    assert_eq!(sessions, [first, second]);
    assert_eq!(fixture.namespace.session(first).unwrap().client, "client");

    fixture.close_session(second);
    assert_eq!(fixture.namespace.session(second), None);
    let result = fixture.apply(&mutation(&fixture, 2, 1));
    assert_eq!(result, Err(FsError::SessionExpired));
    let close = Command::CloseSession {
        session: second,
        now: Timestamp(9),
    };
    assert_eq!(fixture.apply(&close), Err(FsError::SessionExpired));
    assert!(fixture.open_session() > second);
    let long = Command::OpenSession {
        client: "x".repeat(LABEL_BYTES_MAX + 1),
        now: Timestamp(9),
    };
    assert!(matches!(
        fixture.apply(&long),
        Err(FsError::InvalidArgument(_))
    ));
}

#[test]
fn nothing_happens_before_the_format_and_that_only_once() {
    let mut namespace = Namespace::new();
    let open = Command::OpenSession {
        client: "client".into(),
        now: Timestamp(1),
    };
    assert!(matches!(namespace.apply(&open), Err(FsError::Internal(_))));
    assert_eq!(namespace.formatted(), None);
    assert_eq!(namespace.check(), []);
    namespace.apply(&format_command()).unwrap();
    assert_eq!(namespace.formatted().unwrap().cluster, ClusterId(7));
    assert!(matches!(
        namespace.apply(&format_command()),
        Err(FsError::InvalidArgument(_))
    ));
    for (block_bytes, replication) in [(1, 3), (BLOCK_BYTES_MAX * 2, 3), (BLOCK_BYTES_MAX, 0)] {
        let format = Command::Format {
            cluster: ClusterId(1),
            now: Timestamp(1),
            root_uid: 0,
            root_gid: 0,
            block_bytes,
            default_rules: PlacementRules {
                replication,
                ..RULES
            },
        };
        assert!(matches!(
            Namespace::new().apply(&format),
            Err(FsError::InvalidArgument(_))
        ));
    }
}

fn register(fixture: &mut Fixture, server: &str, storages: &[u128]) -> Result<NodeId, FsError> {
    fixture.now += 1;
    let command = Command::RegisterServer {
        server: ServerDescription {
            name: server.into(),
            rack: "rack-1".into(),
            environment: "search".into(),
            machine_function: "index".into(),
            data_addr: ([127, 0, 0, 1], 7000).into(),
        },
        storages: storages.iter().copied().map(StorageId).collect(),
        now: Timestamp(fixture.now),
    };
    match fixture.apply(&command)? {
        Outcome::Node(node) => Ok(node),
        other => panic!("{other:?}"),
    }
}

#[test]
fn servers_keep_their_numbers_and_reimages_are_counted() {
    let mut fixture = Fixture::new();
    assert_eq!(register(&mut fixture, "a", &[1, 2]), Ok(NodeId(1)));
    let registered = Timestamp(fixture.now);
    assert_eq!(register(&mut fixture, "b", &[3]), Ok(NodeId(2)));
    let reimages = |fixture: &Fixture| {
        let reimages = fixture.namespace.server("a").unwrap().reimages;
        reimages.iter().map(|time| time.0).collect::<Vec<_>>()
    };
    // The same again, one more, one less: no reimage.
    for storages in [&[2, 1][..], &[1, 2, 4], &[1, 2]] {
        assert_eq!(register(&mut fixture, "a", storages), Ok(NodeId(1)));
        assert_eq!(reimages(&fixture), [0; 0]);
    }
    register(&mut fixture, "a", &[1, 5]).unwrap();
    let first = fixture.now;
    register(&mut fixture, "a", &[6, 7]).unwrap();
    let second = fixture.now;
    assert_eq!(reimages(&fixture), [first, second, second]);
    let server = fixture.namespace.server("a").unwrap();
    assert_eq!(server.storages, [StorageId(6), StorageId(7)]);
    assert_eq!(server.registered, registered);
    let nodes: Vec<_> = fixture.namespace.servers().map(|view| view.node).collect();
    assert_eq!(nodes, [NodeId(1), NodeId(2)]);
    assert_eq!(fixture.namespace.server("c"), None);

    let many: Vec<u128> = (0..=VOLUMES_PER_NODE_MAX as u128).collect();
    for (server, storages) in [("", &[][..]), ("d", &many)] {
        assert!(matches!(
            register(&mut fixture, server, storages),
            Err(FsError::InvalidArgument(_))
        ));
    }
}

#[test]
fn what_operators_changed_is_remembered_until_it_is_meant_no_more() {
    let mut fixture = Fixture::new();
    let node = register(&mut fixture, "a", &[1, 2]).unwrap();
    let hold = |node, held| Command::Operate(Operation::Hold { node, held });
    let held = |fixture: &Fixture| fixture.namespace.server("a").unwrap().held;
    assert!(matches!(
        fixture.apply(&hold(NodeId(2), true)),
        Err(FsError::InvalidArgument(_))
    ));
    fixture.apply(&hold(node, true)).unwrap();
    let choice = Choice {
        configured: "harvest".to_owned(),
        chosen: "stock".to_owned(),
    };
    let policy = Command::Operate(Operation::Policy(choice.clone()));
    fixture.apply(&policy).unwrap();
    let away = |until| Command::Operate(Operation::Maintenance { node, until });
    let until = |fixture: &Fixture| fixture.namespace.server("a").unwrap().maintenance_until;
    fixture.apply(&away(Some(Timestamp(7)))).unwrap();
    let spread = Choice {
        configured: 100,
        chosen: 0,
    };
    let balance = Command::Operate(Operation::BalanceSpread(spread.clone()));
    fixture.apply(&balance).unwrap();

    let bytes = fixture.snapshot();
    fixture.namespace = Namespace::read_snapshot(&mut &bytes[..]).unwrap();
    assert_eq!(fixture.namespace.chosen_policy(), Some(&choice));
    assert_eq!(fixture.namespace.chosen_balance_spread(), Some(&spread));
    assert_eq!(until(&fixture), Some(Timestamp(7)));
    assert_eq!(fixture.snapshot(), bytes);
    fixture.apply(&away(None)).unwrap();
    assert_eq!(until(&fixture), None);
    assert_eq!(
        choice.instead_of(&"harvest".to_owned()),
        Some(&"stock".to_owned())
    );
    assert_eq!(choice.instead_of(&"greedy".to_owned()), None);
    // It comes back as it was, with one more volume: still held. Then a volume is reimaged.
    for (storages, wanted) in [(&[1, 2][..], true), (&[1, 2, 3], true), (&[1, 3, 4], false)] {
        register(&mut fixture, "a", storages).unwrap();
        assert_eq!(held(&fixture), wanted, "{storages:?}");
    }
    fixture.apply(&hold(node, true)).unwrap();
    fixture.apply(&hold(node, false)).unwrap();
    assert!(!held(&fixture));
}

#[test]
fn a_new_cluster_has_one_inode() {
    let totals = Query::StatFs(query::StatFs { ino: InodeId::ROOT });
    assert!(matches!(
        Fixture::new().query(&totals),
        Ok(MetaReply::StatFs(totals)) if totals.total_inodes - totals.free_inodes == 1
    ));
}
