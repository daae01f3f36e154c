//! The namespace: its commands, as kept in the journal, and its snapshots.

use harvestfs_namenode::engine::namespace::{Command, Namespace};
use harvestfs_protocol::ids::{ClusterId, InodeId, SessionId};
use harvestfs_protocol::meta::{Mutation, mutation};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Credentials, Durability, FileKind, PlacementRules, Timestamp};

/// The input consists of commands, each preceded by its length (u16, little-endian). They are applied to a new
/// cluster. A refused command must change nothing, and no command may leave the namespace inconsistent.
pub fn namespace_commands(input: &[u8]) {
    let mut namespace = formatted();
    let mut rest = input;
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
        let (bytes, after) = after.split_at(length);
        rest = after;
        if let Ok(command) = Command::decode(bytes) {
            let encoded = command.encode().expect("it was decoded");
            assert_eq!(Command::decode(&encoded).as_ref(), Ok(&command));
            apply(&mut namespace, &command);
        }
    }
    check(&namespace);
}

fn apply(namespace: &mut Namespace, command: &Command) {
    if let Command::Mutate {
        credentials, op, ..
    } = command
    {
        let _ = namespace.removal_target(op);
        let facts = op.facts();
        for (parent, name) in facts.entries.into_iter().flatten() {
            let _ = namespace.lookup(credentials, parent, name);
        }
        for ino in facts.inodes.iter() {
            let _ = namespace.extents(credentials, ino, 0);
            let _ = namespace.check_room_for_data(ino);
        }
    }
    let before = snapshot(namespace);
    if namespace.apply(command).is_err() {
        assert_eq!(
            before,
            snapshot(namespace),
            "refused, but not without effect"
        );
    }
}

/// The first byte decides whether the rest is a snapshot, or the payloads of its frames, which are then framed with
/// the right lengths and checksums (each payload preceded by its length as the commands above). A namespace that can
/// be read must be consistent, must be written as it was read, and must be usable.
pub fn namespace_snapshot(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else {
        return;
    };
    let framed;
    let mut bytes = if kind % 2 == 0 {
        rest
    } else {
        framed = frame(rest);
        &framed
    };
    let Ok(mut namespace) = Namespace::read_snapshot(&mut bytes) else {
        return;
    };
    check(&namespace);
    if namespace.formatted().is_some() {
        for command in further_commands() {
            apply(&mut namespace, &command);
        }
        check(&namespace);
    }
}

fn frame(payloads: &[u8]) -> Vec<u8> {
    let mut framed = b"HARVNAME\x01\0\0\0".to_vec();
    let mut rest = payloads;
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
        let (payload, after) = after.split_at(length);
        rest = after;
        framed.extend((length as u32).to_le_bytes());
        framed.extend(crc32fast::hash(payload).to_le_bytes());
        framed.extend(payload);
    }
    framed
}

fn check(namespace: &Namespace) {
    assert_eq!(namespace.check(), []);
    let bytes = snapshot(namespace);
    let again = Namespace::read_snapshot(&mut &bytes[..]).expect("it was written just now");
    assert_eq!(bytes, snapshot(&again));
}

pub(crate) fn snapshot(namespace: &Namespace) -> Vec<u8> {
    let mut bytes = Vec::new();
    namespace
        .write_snapshot(&mut bytes)
        .expect("memory takes everything");
    bytes
}

pub(crate) fn format_command() -> Command {
    Command::Format {
        cluster: ClusterId(7),
        now: Timestamp(1),
        root_uid: 0,
        root_gid: 0,
        block_bytes: 1 << 20,
        default_rules: PlacementRules {
            replication: 3,
            durability: Durability::Strict,
            class: None,
        },
    }
}

/// Returns a new cluster with one session, number 1.
pub(crate) fn formatted() -> Namespace {
    let mut namespace = Namespace::new();
    for command in [format_command(), open_session()] {
        namespace.apply(&command).expect("a new cluster");
    }
    namespace
}

pub(crate) fn open_session() -> Command {
    Command::OpenSession {
        client: "client".into(),
        now: Timestamp(2),
    }
}

pub(crate) fn mutate(sequence: u64, op: Mutation) -> Command {
    Command::Mutate {
        session: SessionId(1),
        sequence,
        answered_below: 1,
        credentials: Credentials::root(),
        now: Timestamp(3),
        held_elsewhere: false,
        op,
    }
}

/// Returns commands that a namenode executes after a start.
fn further_commands() -> [Command; 5] {
    [
        open_session(),
        mutate(
            u64::MAX / 2,
            Mutation::Create(mutation::Create {
                parent: InodeId::ROOT,
                name: Name::new(b"after").expect("a name"),
                kind: FileKind::Regular,
                mode: 0o644,
                rdev: 0,
            }),
        ),
        mutate(
            u64::MAX / 2 + 1,
            Mutation::AllocateBlocks(mutation::AllocateBlocks {
                count: 2,
                rules: PlacementRules {
                    replication: 1,
                    durability: Durability::Space,
                    class: None,
                },
                exclude: Vec::new(),
            }),
        ),
        Command::NoteLease {
            session: SessionId(1),
            has_lapsed: true,
        },
        Command::CloseSession {
            session: SessionId(1),
            now: Timestamp(4),
        },
    ]
}
