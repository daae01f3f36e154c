//! Data directories as each release wrote them, in `tests/fixtures/<release>/namenode`: every later release must read
//! them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use harvestfs_namenode::consensus::{self, Content};
use harvestfs_namenode::engine::namespace::{Command, Namespace, Operation};
use harvestfs_namenode::journal::{Journal, JournalOptions, Recovered};
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::MAINTENANCE_MAX;
use harvestfs_protocol::meta::{MetaReply, Mutation, Query, SetXattrMode, mutation, query};
use harvestfs_protocol::placement::{
    BalanceChange, PlacementReply, PlacementRequest, RepairChange,
};
use harvestfs_protocol::version::Version;

use crate::harness::*;
use crate::operations::every_operation;

const ROOT: InodeId = InodeId::ROOT;

/// The releases and their versions.
const RELEASES: &[(&str, Version)] = &[("0.2.0", Version::V0_2)];

/// The offset in the header of a segment at which the length of the file is stored.
const LENGTH_OFFSET: u64 = 48;

fn fixture(release: &str) -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .join("../tests/fixtures")
        .join(release)
        .join("namenode")
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn is_segment(path: &Path) -> bool {
    let name = path.file_name().unwrap().to_string_lossy();
    name.starts_with("segment-")
}

/// Copies a data directory out of the repository. Segments are kept there without the zeros at their end.
fn take_out(release: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let from = fixture(release);
    for path in files_below(&from) {
        if path.ends_with("state") {
            continue;
        }
        let to = directory
            .path()
            .join("nn")
            .join(path.strip_prefix(&from).unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::write(&to, fs::read(&path).unwrap()).unwrap();
        // A repository does not preserve permissions.
        fs::set_permissions(&to, fs::Permissions::from_mode(0o600)).unwrap();
        if is_segment(&to) {
            let file = fs::File::options()
                .write(true)
                .read(true)
                .open(&to)
                .unwrap();
            let mut length = [0; 8];
            file.read_exact_at(&mut length, LENGTH_OFFSET).unwrap();
            file.set_len(u64::from_le_bytes(length)).unwrap();
        }
    }
    directory
}

/// The name of a command, with the kind of its contents.
fn kind(command: &Command) -> String {
    match command {
        Command::Format { .. } => "format",
        Command::RegisterServer { .. } => "register_server",
        Command::OpenSession { .. } => "open_session",
        Command::CloseSession { .. } => "close_session",
        Command::NoteLease { .. } => "note_lease",
        Command::ReleaseOrphans { .. } => "release_orphans",
        Command::PurgeTrash { .. } => "purge_trash",
        Command::RaiseReplication { .. } => "raise_replication",
        Command::RemoveExpired { .. } => "remove_expired",
        Command::BeginEpoch { .. } => "begin_epoch",
        Command::BeginEdition { .. } => "begin_edition",
        Command::RaiseVersion { .. } => "raise_version",
        Command::Mutate { op, .. } => return format!("mutate {}", op.name()),
        Command::Operate(Operation::Policy(_)) => "operate policy",
        Command::Operate(Operation::Repair(_)) => "operate repair",
        Command::Operate(Operation::Hold { .. }) => "operate hold",
        Command::Operate(Operation::Maintenance { .. }) => "operate maintenance",
        Command::Operate(Operation::BalanceSpread(_)) => "operate balance_spread",
        #[cfg(feature = "next-version")]
        Command::Probe { .. } => "probe",
    }
    .to_owned()
}

/// The kinds that a journal of 0.2.0 can contain. A cluster that begins with it raises no version.
fn kinds_of_0_2_0() -> BTreeSet<String> {
    let kinds = [
        "format",
        "register_server",
        "note_lease",
        "open_session",
        "close_session",
        "release_orphans",
        "purge_trash",
        "raise_replication",
        "remove_expired",
        "begin_epoch",
        "begin_edition",
        "operate policy",
        "operate repair",
        "operate hold",
        "operate maintenance",
        "operate balance_spread",
    ];
    let mutations = [
        "setattr",
        "create",
        "mkdir",
        "symlink",
        "link",
        "unlink",
        "rmdir",
        "rename",
        "setxattr",
        "removexattr",
        "fallocate",
        "clone_range",
        "allocate_blocks",
        "commit",
        "seal_blocks",
        "create_scratch",
        "relocate",
        "remove_to_trash",
        "create_snapshot",
        "remove_snapshot",
    ];
    let mutations = mutations.map(|name| format!("mutate {name}"));
    kinds
        .map(str::to_owned)
        .into_iter()
        .chain(mutations)
        .collect()
}

fn state(namespace: &Namespace) -> Vec<u8> {
    let mut bytes = Vec::new();
    namespace.write_snapshot(&mut bytes).unwrap();
    bytes
}

/// The result of reading a journal.
struct Read {
    kinds: BTreeSet<String>,
    members: usize,
    terms: usize,
    namespace: Namespace,
    had_snapshot: bool,
}

fn read(directory: &Path) -> Read {
    let options = JournalOptions::new(directory.join("journal"), CLUSTER.0);
    let (_journal, recovered) = Journal::open(&options).unwrap();
    let Recovered {
        snapshot,
        records,
        skipped_snapshots,
        ..
    } = recovered;
    assert!(skipped_snapshots.is_empty(), "{skipped_snapshots:?}");
    let mut read = Read {
        kinds: BTreeSet::new(),
        members: 0,
        terms: 0,
        had_snapshot: snapshot.is_some(),
        namespace: match snapshot {
            Some((_, mut snapshot)) => Namespace::read_snapshot(&mut snapshot).unwrap(),
            None => Namespace::new(),
        },
    };
    for record in records {
        let (lsn, bytes) = record.unwrap();
        match consensus::decode(&bytes).unwrap() {
            (_, Content::Command(bytes)) => {
                let command =
                    Command::decode(bytes).unwrap_or_else(|error| panic!("{lsn}: {error}"));
                // Later releases encode it in the same bytes.
                assert_eq!(command.encode().unwrap(), bytes, "{command:?}");
                let applied = read.namespace.apply(&command);
                applied.unwrap_or_else(|error| panic!("record {lsn}, {command:?}: {error}"));
                read.kinds.insert(kind(&command));
            }
            (_, Content::Members(_)) => read.members += 1,
            (_, Content::Blank) => read.terms += 1,
        }
    }
    read
}

fn remove_snapshots(directory: &Path) -> usize {
    let files = files_below(&directory.join("journal")).into_iter();
    let snapshots = files.filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("snapshot-")
    });
    let snapshots: Vec<PathBuf> = snapshots.collect();
    for path in &snapshots {
        fs::remove_file(path).unwrap();
    }
    snapshots.len()
}

#[test]
fn journals_and_snapshots_of_releases_give_what_they_gave() {
    for &(release, version) in RELEASES {
        let expected = fs::read(fixture(release).join("state")).unwrap();
        let directory = take_out(release);
        let directory = directory.path().join("nn");
        let after_snapshot = read(&directory);
        assert!(after_snapshot.had_snapshot, "{release}");
        assert!(!after_snapshot.kinds.is_empty(), "{release}");
        assert_eq!(remove_snapshots(&directory), 1);
        let whole = read(&directory);
        assert!(!whole.had_snapshot);
        assert_eq!(whole.terms, 2, "{release}: it was started twice");
        for namespace in [&after_snapshot.namespace, &whole.namespace] {
            assert_eq!(namespace.version(), version);
            assert_eq!(namespace.check(), []);
            // A newer program writes the state of a cluster of an older version just as it was written.
            assert_eq!(state(namespace), expected, "{release}");
        }
        let again = Namespace::read_snapshot(&mut expected.as_slice()).unwrap();
        assert_eq!(state(&again), expected);
        if release == "0.2.0" {
            assert_eq!(whole.kinds, kinds_of_0_2_0());
        }
    }
}

#[tokio::test]
async fn a_namenode_starts_with_the_directory_of_an_earlier_release() {
    for &(release, version) in RELEASES {
        if release == env!("CARGO_PKG_VERSION") && !fixture(release).exists() {
            record(&fixture(release)).await;
            panic!("a data directory of {release} was recorded: commit it");
        }
        let mut cluster = Cluster::on(take_out(release)).await;
        for _ in 0..2 {
            let status = cluster.status().await;
            assert_eq!(status.cluster_version, version);
            let mut client = cluster.client("alice").await;
            let file = client.lookup(ROOT, "file").await.unwrap();
            assert_eq!((file.size_bytes, file.nlink), (20_000, 2));
            assert_eq!((file.mode, file.uid), (0o600, 7));
            let renamed = client.lookup(ROOT, "renamed").await.unwrap();
            assert_eq!(renamed.ino, file.ino);
            let copy = client.lookup(ROOT, "copy").await.unwrap();
            assert_eq!(copy.size_bytes, 20_000);
            let colour = client
                .call(Query::GetXattr(query::GetXattr {
                    ino: copy.ino,
                    name: b"user.colour".to_vec(),
                }))
                .await;
            let blue = MetaReply::Bytes(b"blue".to_vec());
            assert_eq!(colour, Ok(blue));
            // It continues with it.
            let name = format!("new-{}", status.journal_lsn);
            client.create(ROOT, &name).await;
            client.close().await;
            cluster.restart().await;
        }
        cluster.shutdown().await;
    }
}

async fn place(cluster: &Cluster, request: PlacementRequest) -> PlacementReply {
    match cluster.admin(AdminRequest::Placement(request)).await {
        Ok(AdminReply::Placement(reply)) => reply,
        other => panic!("unexpected {other:?}"),
    }
}

fn xattr(ino: InodeId, name: &str, value: &str) -> Mutation {
    Mutation::SetXattr(mutation::SetXattr {
        ino,
        name: name.into(),
        value: value.into(),
        mode: SetXattrMode::Any,
    })
}

/// Writes the directory of this release's namenode.
async fn record(to: &Path) {
    let mut cluster = Cluster::new().await;
    let (mut session, node) = every_operation(&cluster).await;
    let copy = session.client.lookup(ROOT, "copy").await.unwrap().ino;
    session.ok(xattr(copy, "user.colour", "blue")).await;
    let done = cluster.admin(AdminRequest::Snapshot).await;
    assert_eq!(done, Ok(AdminReply::Done));

    for (name, value) in [("raise_replication", "2"), ("raise_after_s", "1")] {
        let name = format!("user.harvestfs.{name}");
        session.ok(xattr(copy, &name, value)).await;
    }
    let brief = session
        .ino(Mutation::MakeDir(mutation::MakeDir {
            parent: ROOT,
            name: name("brief"),
            mode: 0o755,
        }))
        .await;
    session
        .ok(xattr(brief, "user.harvestfs.lifetime_s", "1"))
        .await;
    session.ok(create(brief, "passes")).await;
    session.ok(create(ROOT, "trash")).await;
    session
        .ok(Mutation::RemoveToTrash(mutation::RemoveToTrash {
            parent: ROOT,
            name: name("trash"),
            retention_s: 1,
        }))
        .await;
    let servers = || vec!["dn-1".to_owned()];
    place(&cluster, PlacementRequest::SetPolicy("stock".to_owned())).await;
    let change = RepairChange {
        per_node: Some(7),
        ..RepairChange::default()
    };
    place(&cluster, PlacementRequest::Repair(change)).await;
    let balance = Some(BalanceChange::Spread(20));
    place(&cluster, PlacementRequest::Balance(balance)).await;
    let hold = PlacementRequest::Impact {
        servers: servers(),
        hold: true,
    };
    place(&cluster, hold).await;
    place(&cluster, PlacementRequest::Release { servers: servers() }).await;
    let away = PlacementRequest::StartMaintenance {
        servers: servers(),
        for_ms: u64::try_from(MAINTENANCE_MAX.as_millis()).unwrap(),
        force: true,
    };
    place(&cluster, away).await;
    // What was due is done.
    let gone = async || session.client.lookup(brief, "passes").await.is_err();
    until("the lifetime is over", gone).await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    drop(node);
    session.client.close().await;
    cluster.restart().await;
    cluster.shutdown().await;

    let from = cluster.data_dir();
    for path in files_below(&from) {
        let target = to.join(path.strip_prefix(&from).unwrap());
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        let mut content = fs::read(&path).unwrap();
        if is_segment(&path) {
            let end = content.iter().rposition(|byte| *byte != 0).unwrap() + 1;
            content.truncate(end);
        }
        fs::write(&target, content).unwrap();
    }
    fs::write(to.join("state"), state(&read(&from).namespace)).unwrap();
}
