//! Backups that are taken while a namenode serves, and namenodes that are made from them.

use std::fs;
use std::io::Read;
use std::path::Path;

use harvestfs_namenode::backup::{BackupReader, BackupWriter, verify};
use harvestfs_namenode::server::{NamenodeError, RestoreError, format_outside, restore};
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::backup::{BackupContent, BackupReply, BackupRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::GroupRequest;
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::ids::{ClusterId, InodeId};
use harvestfs_protocol::limits::SNAPSHOT_PART_BYTES_MAX;
use harvestfs_protocol::meta::{Mutation, SetXattrMode, mutation};
use harvestfs_protocol::rpc::{Reply, Request};

use crate::harness::*;

const ROOT: InodeId = InodeId::ROOT;
const SEGMENT_BYTES: u64 = 4 << 20;

async fn ask(link: &Link, request: BackupRequest) -> Result<BackupReply, FsError> {
    match link
        .ask(Request::Admin(AdminRequest::Backup(request)))
        .await?
    {
        Reply::Admin(AdminReply::Backup(reply)) => Ok(reply),
        other => panic!("unexpected {other:?}"),
    }
}

async fn begin(link: &Link, of_any: bool) -> Result<BackupContent, FsError> {
    match ask(link, BackupRequest::Begin { of_any }).await? {
        BackupReply::Begun(content) => Ok(*content),
        BackupReply::Part(_) => panic!("a part of nothing"),
    }
}

/// The file of the backup that was begun on this connection.
async fn read_all(link: &Link, content: &BackupContent) -> Vec<u8> {
    let mut writer = BackupWriter::begin(Vec::new(), content).unwrap();
    while writer.written_bytes() < content.length_bytes {
        let offset = writer.written_bytes();
        let BackupReply::Part(part) = ask(link, BackupRequest::Read { offset }).await.unwrap()
        else {
            panic!("a part was expected");
        };
        assert!(part.len() <= SNAPSHOT_PART_BYTES_MAX);
        writer.part(&part).unwrap();
    }
    writer.end().unwrap()
}

/// Takes a backup as an operator would.
pub async fn take(link: &Link, of_any: bool) -> (BackupContent, Vec<u8>) {
    let content = begin(link, of_any).await.unwrap();
    let file = read_all(link, &content).await;
    assert_eq!(verify(&file[..]).unwrap(), content);
    (content, file)
}

/// Long enough that some of them need more than one message.
pub async fn set_large_attribute(client: &mut Client, ino: InodeId) {
    let set = mutation::SetXattr {
        ino,
        name: b"user.large".to_vec(),
        value: vec![b'x'; 60_000],
        mode: SetXattrMode::Create,
    };
    client.call(Mutation::SetXattr(set)).await.unwrap();
}

/// Replaces this namenode with one that is made from a backup.
async fn put_back(cluster: &mut Cluster, file: &[u8]) {
    cluster.kill().await;
    fs::remove_dir_all(cluster.data_dir()).unwrap();
    restore(file, &cluster.data_dir(), None, SEGMENT_BYTES).unwrap();
    cluster.start().await;
}

#[tokio::test]
async fn a_backup_is_one_moment_and_is_whole_whatever_happens_while_it_is_read() {
    let mut cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    // More than one part.
    for number in 0..20 {
        let ino = alice.create(ROOT, &format!("old-{number}")).await.ino;
        set_large_attribute(&mut alice, ino).await;
    }
    let (link, _notices) = cluster.rpc(Role::Admin, "operator").await;
    let content = begin(&link, false).await.unwrap();
    assert!(content.length_bytes > 2 * SNAPSHOT_PART_BYTES_MAX as u64);
    assert_eq!((content.files, content.directories), (20, 1));
    assert!(content.led && content.behind_records == 0);
    let status = cluster.status().await;
    assert_eq!((content.cluster, content.epoch), (CLUSTER, status.epoch));
    assert_eq!(content.record, status.journal_lsn);
    // The journal removes the file meanwhile, since there are newer ones.
    for number in 0..3 {
        alice.create(ROOT, &format!("newer-{number}")).await;
        let written = cluster.admin(AdminRequest::Snapshot).await;
        assert_eq!(written, Ok(AdminReply::Done));
    }
    let file = read_all(&link, &content).await;
    assert_eq!(verify(&file[..]).unwrap(), content);
    // The next backup has more, and is taken from scratch.
    let (next, _) = take(&link, false).await;
    assert_eq!(next.files, 23);
    assert!(next.record > content.record);
    // And again, with nothing new.
    let (same, _) = take(&link, false).await;
    assert_eq!((same.record, same.files), (next.record, next.files));

    put_back(&mut cluster, &file).await;
    let mut bob = cluster.client("bob").await;
    for number in 0..20 {
        bob.lookup(ROOT, &format!("old-{number}")).await.unwrap();
    }
    let newer = bob.lookup(ROOT, "newer-0").await;
    assert!(matches!(newer, Err(FsError::NotFound)), "{newer:?}");
}

#[tokio::test]
async fn what_was_restored_changes_nothing_until_that_is_accepted_also_after_restarts() {
    let mut cluster = Cluster::with(|options| options.cluster.safe_mode_max_ms = 0).await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    let old = alice.create(ROOT, "old").await.ino;
    let (link, _notices) = cluster.rpc(Role::Admin, "operator").await;
    let (content, file) = take(&link, false).await;
    let position = node.heartbeat().await.authority.position;
    let newer = alice.create(ROOT, "newer").await.ino;
    // The first record after the backup is that of a term, and belongs to both timelines as far as datanodes report.
    alice.create(ROOT, "newer-too").await;
    alice.create(ROOT, "newest").await;
    let newer_position = node.heartbeat().await.authority.position;

    // No datanode knows more: the namenode waits all the same.
    put_back(&mut cluster, &file).await;
    for restarts in 0..2 {
        let node = Datanode::register_after(&cluster, "dn-1", Some(position)).await;
        assert!(node.unwrap().registered.authority.recovering);
        let mut bob = cluster.client("bob").await;
        assert_eq!(bob.lookup(ROOT, "old").await.unwrap().ino, old);
        let refused = bob.call(create(ROOT, "refused")).await;
        assert!(matches!(refused, Err(FsError::Recovery(_))), "{refused:?}");
        let recovery = cluster.status().await.recovery.unwrap();
        assert!(recovery.is_from_backup && recovery.ahead.is_empty());
        assert!(recovery.describe().contains("from a backup"));
        // What it wrote itself since does not count.
        assert_eq!(recovery.restored_record, content.record, "{restarts}");
        // An added namenode would not know that it has to wait.
        let other = AdminRequest::Group(GroupRequest::Add("127.0.0.1:9".parse().unwrap()));
        let refused = cluster.admin(other).await.unwrap_err().to_string();
        assert!(refused.contains("accept"), "{refused}");
        cluster.kill_and_start().await;
    }
    // A datanode that knows more is listed separately.
    let node = Datanode::register_after(&cluster, "dn-1", Some(newer_position)).await;
    let node = node.unwrap();
    let recovery = cluster.status().await.recovery.unwrap();
    assert_eq!(recovery.ahead.len(), 1);
    assert_eq!(
        recovery.missing_records(),
        newer_position.record - content.record
    );
    let accepted = cluster.admin(AdminRequest::AcceptLoss).await;
    assert_eq!(accepted, Ok(AdminReply::Done));
    let authority = node.heartbeat().await.authority;
    assert!(!authority.recovering);
    assert!(authority.position.epoch.number > newer_position.epoch.number);
    let mut bob = cluster.client("bob").await;
    assert_ne!(
        bob.create(ROOT, "newer").await.ino,
        newer,
        "no id is given twice"
    );
    // That is remembered.
    cluster.kill_and_start().await;
    assert_eq!(cluster.status().await.recovery, None);
    assert!(cluster.admin(AdminRequest::AcceptLoss).await.is_err());
    let mut bob = cluster.client("bob").await;
    bob.create(ROOT, "after").await;
}

#[tokio::test]
async fn only_administrators_get_a_backup_and_only_what_they_began() {
    let cluster = Cluster::new().await;
    for role in [Role::Client, Role::Datanode] {
        let (link, _notices) = cluster.rpc(role, "stranger").await;
        for request in [
            BackupRequest::Begin { of_any: true },
            BackupRequest::Read { offset: 0 },
        ] {
            let refused = ask(&link, request).await;
            assert!(
                matches!(refused, Err(FsError::RoleDenied(_))),
                "{refused:?}"
            );
        }
    }
    let (link, _notices) = cluster.rpc(Role::Admin, "operator").await;
    let (content, _) = take(&link, false).await;
    let past = BackupRequest::Read {
        offset: content.length_bytes,
    };
    assert_eq!(ask(&link, past).await, Ok(BackupReply::Part(vec![])));
    let far = BackupRequest::Read { offset: u64::MAX };
    assert_eq!(ask(&link, far).await, Ok(BackupReply::Part(vec![])));
    // It is for this connection.
    let (other, _notices) = cluster.rpc(Role::Admin, "operator").await;
    let refused = ask(&other, BackupRequest::Read { offset: 0 }).await;
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string();
    let mut names: Vec<String> = entries.map(|entry| name(entry).unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_directory_with_something_a_damaged_file_and_another_cluster_are_refused() {
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    alice.create(ROOT, "file").await;
    let (link, _notices) = cluster.rpc(Role::Admin, "operator").await;
    let (content, file) = take(&link, false).await;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);

    // Both on a running namenode and on one that is stopped.
    let used = restore(&file[..], &cluster.data_dir(), None, SEGMENT_BYTES);
    assert!(
        matches!(
            used,
            Err(RestoreError::NotEmpty { .. } | RestoreError::Namenode(_))
        ),
        "{used:?}"
    );
    restore(&file[..], &at("once"), Some(CLUSTER), SEGMENT_BYTES).unwrap();
    let twice = restore(&file[..], &at("once"), None, SEGMENT_BYTES);
    assert!(
        matches!(twice, Err(RestoreError::NotEmpty { .. })),
        "{twice:?}"
    );
    fs::create_dir(at("other")).unwrap();
    fs::write(at("other/file"), "x").unwrap();
    let other = restore(&file[..], &at("other"), None, SEGMENT_BYTES).unwrap_err();
    assert!(other.to_string().contains("other/file"), "{other}");
    assert_eq!(names(&at("other")), ["file"]);

    // Of another cluster, according to the operator or the directory.
    let elsewhere = ClusterId(CLUSTER.0 + 1);
    let wrong = restore(&file[..], &at("wrong"), Some(elsewhere), SEGMENT_BYTES);
    let Err(RestoreError::WrongCluster { expected, found }) = wrong else {
        panic!("{wrong:?}");
    };
    assert_eq!((expected, found), (elsewhere, CLUSTER));
    format_outside(&at("made"), elsewhere, SEGMENT_BYTES).unwrap();
    let before = names(&at("made"));
    let wrong = restore(&file[..], &at("made"), None, SEGMENT_BYTES);
    assert!(
        matches!(wrong, Err(RestoreError::WrongCluster { .. })),
        "{wrong:?}"
    );
    assert_eq!(names(&at("made")), before);
    assert!(names(&at("wrong")).is_empty());

    // A damaged backup leaves nothing to start with, and what it leaves prevents nothing.
    for cut in (0..file.len()).step_by(97) {
        let refused = restore(&file[..cut], &at("again"), None, SEGMENT_BYTES);
        assert!(
            matches!(refused, Err(RestoreError::Backup(_))),
            "{cut}: {refused:?}"
        );
        assert!(!at("again/journal").exists());
    }
    for at_byte in (0..file.len()).step_by(101) {
        let mut damaged = file.clone();
        damaged[at_byte] ^= 4;
        let refused = restore(&damaged[..], &at("again"), None, SEGMENT_BYTES);
        assert!(
            matches!(refused, Err(RestoreError::Backup(_))),
            "{at_byte}: {refused:?}"
        );
        assert!(!at("again/journal").exists());
    }
    // A description that does not match, in a file that is intact.
    let lies = BackupContent {
        files: content.files + 1,
        ..content.clone()
    };
    let mut snapshot = Vec::new();
    let mut reader = BackupReader::open(&file[..]).unwrap();
    reader.read_to_end(&mut snapshot).unwrap();
    let mut writer = BackupWriter::begin(Vec::new(), &lies).unwrap();
    writer.part(&snapshot).unwrap();
    let refused = restore(
        &writer.end().unwrap()[..],
        &at("again"),
        None,
        SEGMENT_BYTES,
    );
    assert!(
        matches!(refused, Err(RestoreError::Contradiction { .. })),
        "{refused:?}"
    );
    restore(&file[..], &at("again"), None, SEGMENT_BYTES).unwrap();
    assert_eq!(
        names(&at("again")),
        ["cluster-id", "journal", "restored-from-backup"]
    );

    // A directory made by `init namenode` contains nothing that could be lost.
    format_outside(&at("new"), CLUSTER, SEGMENT_BYTES).unwrap();
    restore(&file[..], &at("new"), None, SEGMENT_BYTES).unwrap();
    assert_eq!(names(&at("new")), names(&at("again")));
    let bad = restore(&file[..], &at("bad"), None, 1);
    assert!(
        matches!(bad, Err(RestoreError::Namenode(NamenodeError::Journal(_)))),
        "{bad:?}"
    );
}
