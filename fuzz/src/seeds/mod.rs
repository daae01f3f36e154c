//! Inputs to start from, made by the code under test itself, so that they never get out of date.

mod files;
mod peers;

use std::time::Duration;

use harvestfs_namenode::engine::namespace::{Command, EDITION};
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::backup::{BackupReply, BackupRequest};
use harvestfs_protocol::codec::records::END;
use harvestfs_protocol::codec::{Hello, encode_frame};
use harvestfs_protocol::data::{
    DataRequest, Opening, Packet, ReadPacket, ReadRequest, SealReply, SealRequest,
    ShortCircuitReply, WriteAck, WriteRequest,
};
use harvestfs_protocol::error::{DataError, FsError};
use harvestfs_protocol::history::{HistoryRecord, HistoryReply, HistoryRequest, TenantName};
use harvestfs_protocol::identity::{CertificateAuthority, Role};
use harvestfs_protocol::ids::{BlockId, ClusterId, InodeId, NodeId, SessionId, StorageId};
use harvestfs_protocol::meta::{
    FileCommit, MetaCall, MetaOp, MetaReply, Mutation, MutationCall, Notice, OpenSession,
    RenameMode, SealedBlock, SetXattrMode, mutation,
};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::node::{
    BlockReport, Heartbeat, NodeCommand, NodeReply, NodeRequest, RegisterNode, ReplicaReport,
    ServerDescription,
};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::short_circuit::FileRequest;
use harvestfs_protocol::token::{BlockToken, Right, TokenKey, TokenSigner};
use harvestfs_protocol::transport::{RequestFrame, ServerFrame};
use harvestfs_protocol::types::{
    Credentials, Durability, Extent, FileKind, NodeInfo, PlacementRules, StorageClass, Timestamp,
    VolumeStatus,
};
use harvestfs_protocol::version::{Release, Version, Versions};
use serde::Serialize;

use crate::namespace;

/// The seeds of a target, in a fixed order. (Certificates and keys differ from call to call.)
pub fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "backup_files" => files::backup_files(),
        "checkpoint_files" => files::checkpoint_files(),
        "config_files" => files::config_files(),
        "data_messages" => data_messages(),
        "frames" => frames(),
        "history_files" => vec![files::history_files()],
        "identity_files" => files::identity_files(),
        "journal_files" => files::journal_files(),
        "namenode_directory" => files::namenode_directory(),
        "namespace_commands" => vec![in_parts(&commands())],
        "namespace_snapshot" => files::namespace_snapshot(),
        "peer_names" => peer_names(),
        "rpc_replies" => replies().iter().map(postcard_of).collect(),
        "rpc_requests" => requests().iter().map(postcard_of).collect(),
        "trace_files" => files::trace_files(),
        "version_file" => files::version_file(),
        // These take their input for a plan of what to build, so any bytes will do.
        _ => (1..=64).map(noise).collect(),
    }
}

/// As many bytes as they are different: 16 for each number, the same every time.
fn noise(number: u64) -> Vec<u8> {
    let mut state = number;
    let mut bytes = Vec::new();
    for _ in 0..number * 4 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.extend(&state.to_be_bytes()[..4]);
    }
    bytes
}

fn postcard_of(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).expect("memory takes everything")
}

/// Parts with their lengths before them, as `namespace_commands` takes them.
fn in_parts(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        let length = u16::try_from(part.len()).expect("a seed is small");
        bytes.extend(length.to_le_bytes());
        bytes.extend(part);
    }
    bytes
}

/// A leading byte, parts with their lengths, and the last part without.
fn flagged(flags: Option<u8>, parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes: Vec<u8> = flags.into_iter().collect();
    if let Some((last, others)) = parts.split_last() {
        let others: Vec<Vec<u8>> = others.iter().map(|part| part.to_vec()).collect();
        bytes.extend(in_parts(&others));
        bytes.extend(*last);
    }
    bytes
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).expect("a name")
}

fn rules() -> PlacementRules {
    PlacementRules {
        replication: 3,
        durability: Durability::Space,
        class: Some(StorageClass::Ssd),
    }
}

fn token(right: Right) -> BlockToken {
    let key = TokenKey {
        key_id: 1,
        secret: [5; 32],
    };
    TokenSigner::new(&key).sign(BlockId(1), right, 1_000)
}

fn node() -> NodeInfo {
    NodeInfo {
        node: NodeId(1),
        name: "dn1".into(),
        data_addr: ([127, 0, 0, 1], 9_311).into(),
        rack: "rack-1".into(),
    }
}

fn server() -> ServerDescription {
    ServerDescription {
        name: "dn1".into(),
        rack: "rack-1".into(),
        environment: "environment-1".into(),
        machine_function: "function-1".into(),
        data_addr: ([127, 0, 0, 1], 9_311).into(),
    }
}

fn volume() -> VolumeStatus {
    VolumeStatus {
        storage: StorageId(9),
        class: StorageClass::Disk,
        quota_bytes: 1 << 30,
        used_bytes: 1 << 20,
        healthy: true,
        shrinks_in_ms: None,
    }
}

/// A file's life, from its creation to its removal.
fn operations() -> Vec<Mutation> {
    let root = InodeId::ROOT;
    // The first inode after the root, and the first block.
    let file = InodeId(2);
    let block = BlockId(1);
    vec![
        Mutation::Create(mutation::Create {
            parent: root,
            name: name("file"),
            kind: FileKind::Regular,
            mode: 0o644,
            rdev: 0,
        }),
        Mutation::AllocateBlocks(mutation::AllocateBlocks {
            count: 1,
            rules: rules(),
            exclude: vec![NodeId(3)],
        }),
        Mutation::Commit(mutation::Commit {
            files: vec![FileCommit {
                ino: file,
                extents: vec![Extent {
                    file_offset: 0,
                    length_bytes: 10_000,
                    block,
                    block_offset: 0,
                }],
                append: false,
                mtime: Some(Timestamp(5)),
            }],
            durable: true,
        }),
        Mutation::SealBlocks(mutation::SealBlocks {
            blocks: vec![SealedBlock {
                block,
                length_bytes: 10_000,
                replicas: vec![NodeId(1)],
            }],
        }),
        Mutation::SetXattr(mutation::SetXattr {
            ino: file,
            name: b"user.harvestfs.replication".to_vec(),
            value: b"2".to_vec(),
            mode: SetXattrMode::Any,
        }),
        Mutation::CloneRange(mutation::CloneRange {
            source: file,
            source_offset: 0,
            destination: file,
            destination_offset: 20_000,
            length_bytes: 5_000,
        }),
        Mutation::MakeDir(mutation::MakeDir {
            parent: root,
            name: name("directory"),
            mode: 0o755,
        }),
        Mutation::Link(mutation::Link {
            ino: file,
            parent: root,
            name: name("other"),
        }),
        Mutation::Rename(mutation::Rename {
            parent: root,
            name: name("other"),
            new_parent: InodeId(3),
            new_name: name("moved"),
            mode: RenameMode::NoReplace,
        }),
        Mutation::Symlink(mutation::Symlink {
            parent: root,
            name: name("link"),
            target: b"file".to_vec(),
        }),
        Mutation::Unlink(mutation::Unlink {
            parent: root,
            name: name("file"),
        }),
    ]
}

fn commands() -> Vec<Vec<u8>> {
    let mut commands = vec![Command::RegisterServer {
        server: server(),
        storages: vec![StorageId(9)],
        now: Timestamp(3),
    }];
    let mutations = (1..).zip(operations());
    commands.extend(mutations.map(|(sequence, op)| namespace::mutate(sequence, op)));
    commands.push(Command::BeginEdition {
        edition: EDITION,
        now: Timestamp(2),
    });
    commands.push(Command::NoteLease {
        session: SessionId(1),
        has_lapsed: false,
    });
    commands.push(Command::CloseSession {
        session: SessionId(1),
        now: Timestamp(9),
    });
    let encoded = commands.iter().map(Command::encode);
    encoded.map(|bytes| bytes.expect("memory")).collect()
}

fn tenant() -> TenantName {
    TenantName {
        environment: "prod".into(),
        machine_function: "index".into(),
    }
}

fn requests() -> Vec<RequestFrame<Request>> {
    let mut requests = vec![
        Request::OpenSession(OpenSession {
            resume: Some(SessionId(1)),
            holds: vec![InodeId(2)],
            delegations: Some(vec![InodeId(3)]),
            seen: None,
        }),
        Request::KeepAlive,
        Request::AckInvalidation { id: 1 },
        Request::Admin(AdminRequest::Backup(BackupRequest::Read { offset: 7 })),
        Request::Admin(AdminRequest::History(HistoryRequest::Import(vec![
            HistoryRecord::Owner {
                server: "s".into(),
                tenant: tenant(),
                from_s: 5,
            },
            HistoryRecord::Utilisation {
                tenant: tenant(),
                start_s: 5,
                period_s: 300,
                samples: vec![1, 2, 3],
            },
        ]))),
        Request::Node(NodeRequest::Register(Box::new(RegisterNode {
            server: server(),
            volumes: vec![volume()],
            cluster: Some(ClusterId(7)),
            version: "0.1.0".to_owned(),
            obeyed: Some(harvestfs_protocol::timeline::Position::default()),
        }))),
        Request::Node(NodeRequest::Heartbeat(Heartbeat {
            volumes: vec![volume()],
            busy: false,
            primary: None,
            active_streams: 1,
            unix_ms: 1 << 40,
            denials: 2,
            removable_bytes: 1 << 30,
        })),
        Request::Node(NodeRequest::Stopping),
        Request::Node(NodeRequest::BlockReport(BlockReport {
            storage: StorageId(9),
            part: 0,
            last: true,
            replicas: vec![ReplicaReport {
                block: BlockId(1),
                length_bytes: 12_288,
                sealed: true,
            }],
        })),
        Request::CloseSession,
    ];
    requests.extend((1..).zip(operations()).map(|(sequence, mutation)| {
        Request::Meta(MetaCall {
            credentials: Credentials::root(),
            op: MetaOp::Mutation(MutationCall {
                sequence,
                answered_below: 1,
                relaxed: false,
                file: None,
                mutation,
            }),
        })
    }));
    requests.extend(peers::calls().into_iter().map(Request::Peer));
    let numbered = (1..).zip(requests);
    numbered
        .map(|(id, body)| RequestFrame {
            id,
            body,
            request: RequestId::NONE,
        })
        .collect()
}

fn replies() -> Vec<ServerFrame<Response, Notice>> {
    let reply = |body| ServerFrame::Response { id: 1, body };
    let mut replies = vec![
        reply(Ok(Reply::Done)),
        reply(Ok(Reply::Admin(AdminReply::Backup(BackupReply::Part(
            vec![1, 2],
        ))))),
        reply(Ok(Reply::Admin(AdminReply::History(
            HistoryReply::Refused {
                record: 3,
                reason: "why".into(),
            },
        )))),
        reply(Err(FsError::InvalidArgument("why".into()))),
        reply(Ok(Reply::Meta(MetaReply::Removed(None)))),
        reply(Ok(Reply::Node(NodeReply::Heartbeat(
            harvestfs_protocol::node::HeartbeatReply {
                commands: vec![NodeCommand::Replicate {
                    block: BlockId(1),
                    length_bytes: 10_000,
                    sources: vec![node()],
                    token: token(Right::Read),
                }],
                keys: None,
                authority: harvestfs_protocol::timeline::Authority::default(),
                cluster_version: Version::default(),
            },
        )))),
        ServerFrame::Abandoned { id: 1 },
        ServerFrame::Notice(Notice::Recall {
            inodes: vec![InodeId(3)],
        }),
        ServerFrame::Notice(Notice::Invalidate {
            id: 1,
            inodes: vec![InodeId(2)],
            entries: vec![(InodeId::ROOT, name("file"))],
        }),
    ];
    let answers = peers::answers().into_iter();
    replies.extend(answers.map(|answer| reply(Ok(Reply::Peer(answer)))));
    replies
}

fn frames() -> Vec<Vec<u8>> {
    let mut stream = vec![0, 0];
    for request in requests() {
        encode_frame(&mut stream, &request, 0).expect("a seed is small");
    }
    let mut hello = vec![0, 0];
    let said = Hello {
        versions: Versions::OURS,
        release: Release::OURS,
    };
    hello.extend(said.encode());
    let records = [&[0, 0, 2, 0, 0, 0][..], b"ab", &[1, 0, 0, 0], b"c", &END].concat();
    vec![stream, hello, records]
}

fn data_messages() -> Vec<Vec<u8>> {
    let write = DataRequest::Write(WriteRequest {
        block: BlockId(1),
        token: token(Right::Write),
        class: None,
        downstream: vec![node()],
    });
    let read = DataRequest::Read(ReadRequest {
        block: BlockId(1),
        token: token(Right::Read),
        block_offset: 0,
        length_bytes: 4096,
    });
    let seal = DataRequest::Seal(SealRequest {
        block: BlockId(1),
        token: token(Right::Write),
        length_bytes: 4096,
    });
    let short_circuit = DataRequest::ShortCircuit {
        host: "00000000-0000-4000-8000-000000000000".to_owned(),
    };
    let file = FileRequest {
        block: BlockId(1),
        token: token(Right::Read),
        request: RequestId::NONE,
    };
    let socket: ShortCircuitReply = Some("/var/lib/harvestfs/short-circuit.sock".into());
    let packet = Packet::Data {
        block_offset: 4096,
        checksums: vec![1, 2],
        sync: true,
        request: RequestId::NONE,
    };
    let ack = WriteAck::Failed {
        node: NodeId(1),
        error: DataError::Busy { retry_after_ms: 10 },
    };
    let read_packet = ReadPacket::Data {
        block_offset: 0,
        checksums: vec![1],
    };
    let sealed: SealReply = Err(DataError::NoSuchReplica);
    let messages = [
        (0, postcard_of(&Opening::from(write))),
        (0, postcard_of(&Opening::from(read))),
        (0, postcard_of(&Opening::from(seal))),
        (0, postcard_of(&Opening::from(short_circuit))),
        (1, postcard_of(&packet)),
        (2, postcard_of(&ack)),
        (3, postcard_of(&read_packet)),
        (4, postcard_of(&sealed)),
        (5, postcard_of(&file)),
        (6, postcard_of(&socket)),
    ];
    let flagged = messages.map(|(kind, message)| flagged(Some(kind), &[&message]));
    flagged.to_vec()
}

fn peer_names() -> Vec<Vec<u8>> {
    let authority = CertificateAuthority::in_memory().expect("random numbers");
    let identity = authority
        .issue(Role::Datanode, "dn1", Duration::from_secs(86_400))
        .expect("a name");
    vec![
        flagged(Some(0), &[identity.certificate()]),
        flagged(Some(0), &[authority.certificate()]),
        flagged(Some(1), &[b"dn1.datanode.harvestfs"]),
    ]
}
