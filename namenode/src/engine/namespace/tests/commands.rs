//! The encoding of commands.

use super::*;
use crate::engine::namespace::extents::Piece;
use crate::engine::namespace::{COMMAND_VERSION, Choice, DecodeError, Operation};
use harvestfs_protocol::ids::{NodeId, StorageId};
use harvestfs_protocol::meta::{FallocateMode, SetTime, SetXattrMode};
use harvestfs_protocol::node::ServerDescription;
use harvestfs_protocol::timeline::Epoch;
use proptest::prelude::*;

/// One command of each kind.
fn samples() -> Vec<Command> {
    let fixture = Fixture::new();
    let ino = InodeId(9);
    let block = BlockId(4);
    let ops = vec![
        Mutation::SetAttr(mutation::SetAttr {
            ino,
            changes: AttrChanges {
                mode: Some(0o644),
                mtime: Some(SetTime::To(Timestamp(-1))),
                ..AttrChanges::default()
            },
        }),
        Mutation::Rename(mutation::Rename {
            parent: ino,
            name: name("a"),
            new_parent: ino,
            new_name: name("b"),
            mode: RenameMode::Exchange,
        }),
        Mutation::SetXattr(mutation::SetXattr {
            ino,
            name: b"user.a".to_vec(),
            value: vec![0xff; 300],
            mode: SetXattrMode::Create,
        }),
        Mutation::Fallocate(mutation::Fallocate {
            ino,
            offset: u64::MAX,
            length_bytes: 1,
            mode: FallocateMode::PunchHole,
        }),
        Mutation::Commit(mutation::Commit {
            files: vec![FileCommit {
                ino,
                extents: vec![extent(1, 2, block, 3); 5],
                append: true,
                mtime: None,
            }],
            durable: false,
        }),
    ];
    let mut commands: Vec<_> = ops.into_iter().map(|op| fixture.command(op)).collect();
    commands.push(format_command());
    commands.push(Command::RegisterServer {
        server: ServerDescription {
            name: "server".into(),
            rack: "rack".into(),
            environment: "environment".into(),
            machine_function: "function".into(),
            data_addr: ([10, 0, 0, 1], 80).into(),
        },
        storages: vec![StorageId(u128::MAX)],
        now: Timestamp(5),
    });
    commands.push(Command::Operate(Operation::Hold {
        node: NodeId(3),
        held: true,
    }));
    commands.push(Command::Operate(Operation::Maintenance {
        node: NodeId(3),
        until: Some(Timestamp(7)),
    }));
    commands.push(Command::Operate(Operation::BalanceSpread(Choice {
        configured: 100,
        chosen: 0,
    })));
    commands.push(Command::BeginEpoch {
        epoch: Epoch { number: 7, id: 8 },
        first_record: 9,
        gives_up: true,
        now: Timestamp(10),
    });
    commands
}

#[test]
fn what_was_encoded_is_decoded() {
    for command in samples() {
        let bytes = command.encode().unwrap();
        assert_eq!(bytes[0], COMMAND_VERSION);
        assert_eq!(Command::decode(&bytes), Ok(command));
    }
}

#[test]
fn the_encoding_stays_as_it_is() {
    let command = Command::Mutate {
        session: SessionId(3),
        sequence: 300,
        answered_below: 299,
        credentials: user(1, 2, &[3]),
        now: Timestamp(-1),
        held_elsewhere: true,
        op: Mutation::Unlink(mutation::Unlink {
            parent: InodeId::ROOT,
            name: name("x"),
        }),
    };
    let golden = [3, 4, 3, 172, 2, 171, 2, 1, 2, 1, 3, 1, 1, 16, 1, 1, b'x'];
    assert_eq!(command.encode().unwrap(), golden);
    for version in [1, 2] {
        let mut of_before = golden;
        of_before[0] = version;
        assert_eq!(Command::decode(&of_before).as_ref(), Ok(&command));
    }
}

#[test]
fn damage_is_refused() {
    let bytes = samples()[0].encode().unwrap();
    assert_eq!(Command::decode(&[]), Err(DecodeError::Empty));
    let mut other = bytes.clone();
    other[0] = 9;
    assert_eq!(Command::decode(&other), Err(DecodeError::Version(9)));
    let mut longer = bytes.clone();
    longer.extend([0, 0]);
    assert_eq!(Command::decode(&longer), Err(DecodeError::Trailing(2)));
    for end in 1..bytes.len() {
        assert!(matches!(
            Command::decode(&bytes[..end]),
            Err(DecodeError::Damaged(_))
        ));
    }
    // A name that no entry may have.
    let mut bad_name = samples()[1].encode().unwrap();
    let at = bad_name.iter().position(|&byte| byte == b'a').unwrap();
    bad_name[at] = b'/';
    assert!(matches!(
        Command::decode(&bad_name),
        Err(DecodeError::Damaged(_))
    ));
}

proptest! {
    #[test]
    fn no_bytes_make_the_decoder_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let _ = Command::decode(&bytes);
        let mut versioned = vec![COMMAND_VERSION];
        versioned.extend(&bytes);
        if let Ok(command) = Command::decode(&versioned) {
            // The namespace survives any command.
            let mut fixture = Fixture::new();
            let _ = fixture.apply(&command);
        }
    }

    #[test]
    fn no_flipped_bit_makes_the_decoder_panic(
        sample in 0..7usize,
        at in any::<prop::sample::Index>(),
        bit in 0..8u8,
    ) {
        let mut bytes = samples()[sample].encode().unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(command) = Command::decode(&bytes) {
            let mut fixture = Fixture::new();
            let _ = fixture.apply(&command);
        }
    }
}

/// A mutation that is refused after it has changed something would be undone by a restart.
#[test]
#[should_panic(
    expected = "a command that was refused left UseChanges([(BlockId(0000000000000007), 5)])"
)]
fn a_refused_command_that_changed_something_stops() {
    let mut fixture = Fixture::new();
    fixture.namespace.changes.add(&Piece {
        file_offset: 0,
        block: BlockId(7),
        block_offset: 0,
        length_bytes: 5,
    });
    drop(fixture.unlink("/none"));
}

#[test]
#[should_panic(expected = "after and before a command that was refused: no such file")]
fn so_does_one_that_has_added_a_name() {
    let mut fixture = Fixture::new();
    let before = fixture.namespace.extent_of_tables();
    fixture.file("/f");
    (fixture.namespace).assert_unchanged(before, &FsError::NotFound);
}
