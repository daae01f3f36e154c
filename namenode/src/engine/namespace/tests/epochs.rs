//! Epochs: ids that never repeat, and what a timeline knows.

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::timeline::{Epoch, Position};

use super::*;

fn begin(
    namespace: &mut Namespace,
    number: u32,
    id: u64,
    first_record: u64,
    gives_up: bool,
) -> Result<(), FsError> {
    let command = Command::BeginEpoch {
        epoch: Epoch { number, id },
        first_record,
        gives_up,
        now: Timestamp(1),
    };
    namespace.apply(&command).map(drop)
}

fn snapshot(namespace: &Namespace) -> Vec<u8> {
    let mut bytes = Vec::new();
    namespace.write_snapshot(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_timeline_knows_where_it_has_been() {
    let mut fixture = Fixture::new();
    let namespace = &mut fixture.namespace;
    let before = namespace.allocated_ranges().collect::<Vec<_>>();
    assert_eq!(before.len(), 1);
    begin(namespace, 7, 70, 10, false).unwrap();
    begin(namespace, 9, 90, 20, false).unwrap();
    for (number, first_record) in [(9, 30), (8, 30), (10, 20), (u32::MAX, 30)] {
        assert!(begin(namespace, number, 1, first_record, false).is_err());
    }
    let at = |number, id, record| Position {
        epoch: Epoch { number, id },
        record,
    };
    for (position, is_known) in [
        (at(7, 70, 10), true),
        (at(7, 70, 19), true),
        // Another timeline continued in this epoch.
        (at(7, 70, 20), false),
        (at(9, 90, 25), true),
        (at(9, 90, 26), false),
        // Another timeline had an epoch of this number.
        (at(9, 91, 20), false),
        (at(8, 80, 20), false),
    ] {
        assert_eq!(namespace.has_settled(position, 25), is_known, "{position}");
    }
    assert_eq!(namespace.unsettled_blocks().count(), 0);
    let written = fixture.allocate(2);
    let namespace = &mut fixture.namespace;
    begin(namespace, 12, 120, 30, true).unwrap();
    assert_eq!(namespace.unsettled_blocks().collect::<Vec<_>>(), written);
    begin(namespace, 13, 130, 40, false).unwrap();
    for (position, is_settled) in [
        (at(7, 70, 20), true),
        (at(11, 1, 99), true),
        (at(12, 1, 1), false),
        (at(12, 120, 39), true),
        (at(12, 120, 40), false),
    ] {
        assert_eq!(
            namespace.has_settled(position, 40),
            is_settled,
            "{position}"
        );
    }
    let again = Namespace::read_snapshot(&mut snapshot(namespace).as_slice()).unwrap();
    assert_eq!(again.epochs(), namespace.epochs());
    assert_eq!(snapshot(&again), snapshot(namespace));
}

/// An earlier release did not count the sessions of an epoch: what it wrote is replayed, and the epoch
/// that follows repeats no id of it.
#[test]
fn an_epoch_has_so_many_sessions_and_one_that_had_more_is_followed() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.namespace.sessions_left(), u64::MAX);
    assert_eq!(fixture.namespace.last_number(), None);
    begin(&mut fixture.namespace, 7, 70, 10, false).unwrap();
    assert_eq!(fixture.namespace.sessions_left(), Epoch::BLOCKS_MAX);
    let epoch = fixture.namespace.epoch().unwrap();
    fixture.namespace.sessions.last = epoch.last_block().0 - 1;
    assert_eq!(fixture.namespace.sessions_left(), 1);
    fixture.open_session();
    assert_eq!(fixture.namespace.sessions_left(), 0);
    assert_eq!(fixture.namespace.last_number(), Some(7));
    let beyond = fixture.open_session();
    assert_eq!(fixture.namespace.sessions_left(), 0);
    assert_eq!(fixture.namespace.last_number(), Some(8));
    assert!(begin(&mut fixture.namespace, 8, 80, 20, false).is_ok());
    assert!(fixture.open_session() > beyond);
    fixture.namespace.sessions.last += 1 << 30;
    let next = fixture.namespace.last_number().unwrap() + 1;
    assert!(begin(&mut fixture.namespace, 9, 90, 30, false).is_err());
    begin(&mut fixture.namespace, next, 90, 30, false).unwrap();
}

#[test]
fn epochs_repeat_no_ids() {
    let mut fixture = Fixture::new();
    fixture.file("/before");
    let bytes = snapshot(&fixture.namespace);
    let mut given = std::collections::BTreeSet::new();
    // Copies of one namespace continue, each in epochs of its own.
    for number in [10, 20, 30] {
        let namespace = Namespace::read_snapshot(&mut bytes.as_slice()).unwrap();
        fixture.namespace = namespace;
        begin(&mut fixture.namespace, number, 1, 1_000, false).unwrap();
        let session = fixture.open_session();
        let ino = fixture.file("/after");
        let block = fixture.allocate(1)[0];
        assert!(given.insert(("session", session.0)));
        assert!(given.insert(("inode", ino.0)));
        assert!(given.insert(("block", block.0)));
        let last = fixture.namespace.allocated_ranges().last().unwrap();
        assert_eq!(last, block..=block);
        assert!(!last.contains(&BlockId(block.0 + 1)));
        assert_eq!(fixture.namespace.check(), []);
        let again = Namespace::read_snapshot(&mut snapshot(&fixture.namespace).as_slice());
        assert_eq!(again.unwrap().blocks_left(), Epoch::BLOCKS_MAX - 1);
    }
}
