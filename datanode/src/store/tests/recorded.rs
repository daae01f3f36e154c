//! Volumes written by each release, in `tests/fixtures/<release>/volume`: every later release can read them.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::timeline::{Epoch, Position};

use super::*;

const RELEASES: &[&str] = &["0.2.0"];

const CLUSTER: ClusterId = ClusterId(0xc1);
/// Sealed replicas: their blocks, and their lengths in bytes.
const SEALED: [(u64, usize); 3] = [(7, 10_000), (8, 4_096), (0x1234, 1)];
const QUOTA_BYTES: u64 = 8 << 20;
const OBEYED: Position = Position {
    epoch: Epoch { number: 7, id: 8 },
    record: 9,
};

fn fixture(release: &str) -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .join("../tests/fixtures")
        .join(release)
        .join("volume")
}

/// Data that is the same in every release, unlike that of a random generator.
fn content(block: u64, bytes: usize) -> Vec<u8> {
    let numbers = (0..bytes as u64).map(|at| (at * 31 + block * 7 + at / 251) as u8);
    numbers.collect()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test]
async fn volumes_of_releases_have_what_they_had() {
    for release in RELEASES {
        if *release == env!("CARGO_PKG_VERSION") && !fixture(release).exists() {
            record(&fixture(release)).await;
            panic!("a volume of {release} was recorded: commit it");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("volume");
        copy(&fixture(release), &path);
        for _ in 0..2 {
            let store = real_store(&path);
            assert_eq!(store.cluster(), Some(CLUSTER), "{release}");
            assert_eq!(
                store.obeyed_at_start(Some(CLUSTER)),
                Some(OBEYED),
                "{release}"
            );
            let status = &store.status()[0];
            assert_eq!(status.quota_bytes, QUOTA_BYTES, "{release}");
            for (block, bytes) in SEALED {
                let (storage, report) = store.report(BlockId(block)).unwrap();
                assert_eq!(storage, status.storage);
                assert!(report.sealed, "{release}: {report:?}");
                assert_eq!(report.length_bytes, bytes.next_multiple_of(4096) as u64);
                let stored = read(&store, block, 0, bytes as u64).await.unwrap();
                assert_eq!(stored, content(block, bytes), "{release}: block {block}");
            }
            assert_eq!(store.replicas_of(status.storage).len(), SEALED.len());
        }
        // It keeps working with the volume.
        let store = real_store(&path);
        write_sealed(&store, 9, &data(9, 5_000)).await.unwrap();
        assert_eq!(read(&store, 9, 0, 5_000).await.unwrap(), data(9, 5_000));
    }
}

/// Writes a volume of this release.
async fn record(to: &Path) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("volume");
    let store = real_store(&path);
    store.claim(CLUSTER).await;
    store.write_obeyed(OBEYED).await.unwrap();
    for (block, bytes) in SEALED {
        write_sealed(&store, block, &content(block, bytes))
            .await
            .unwrap();
    }
    let storage = store.status()[0].storage;
    let set = store.set_quota(storage, QUOTA_BYTES, Duration::from_secs(1));
    set.await.unwrap();
    drop(store);
    copy(&path, to);
}
