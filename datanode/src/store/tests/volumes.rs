//! The requirements for a directory to become a volume, and the handling of those that do not meet them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::Ordering;

use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::timeline::{Epoch, Position};
use proptest::prelude::*;
use rustix::io::Errno;

use super::*;
use crate::store::obeyed_file;
use crate::testing::disks::{Fault, FaultyDisk};

fn open(path: &Path, server: &str) -> Result<Arc<Volume>, VolumeError> {
    Volume::open(
        &options(path, 1 << 30),
        server,
        Arc::new(RealDisk),
        1,
        &Progress::default(),
    )
    .map(|(volume, _)| volume)
}

/// The change that the job was making may be half done: the volume must not be used as if nothing had happened.
#[tokio::test]
async fn a_volume_with_a_job_that_broke_off_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let volume = open(&dir.path().join("volume"), "dn1").unwrap();
    let job = || -> Result<(), StoreError> { panic!("on purpose") };
    let error = volume.run(job).await.unwrap_err();
    assert!(matches!(error, StoreError::VolumeDown { .. }), "{error}");
    assert!(!volume.status().healthy);
    assert!(volume.run(|| Ok(())).await.is_err());
}

/// Primary tenants clear disks without notice, and open files can be written as if nothing had happened.
#[tokio::test]
async fn a_volume_whose_directory_is_removed_is_given_up() {
    for is_used in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("volume");
        let store = real_store(&path);
        let mut writer = create(&store, 7).await.unwrap();
        let first = packet(0, &data(7, 4_096), true);
        writer.write(vec![first], true).await.unwrap();
        store.volumes()[0].check_place().await;
        assert!(store.status()[0].healthy);
        fs::remove_dir_all(&path).unwrap();
        let second = packet(4_096, &data(7, 4_096), true);
        writer.write(vec![second], true).await.unwrap();
        if is_used {
            let error = create(&store, 8).await.err().unwrap();
            assert!(matches!(error, StoreError::Disk { .. }), "{error}");
        } else {
            store.volumes()[0].check_place().await;
        }
        assert!(!store.status()[0].healthy);
        let error = create(&store, 9).await.err().unwrap();
        assert!(!matches!(error, StoreError::Disk { .. }), "{error}");
    }
}

#[test]
fn a_volume_keeps_its_identity() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let storage = open(&path, "dn1").unwrap().storage();
    let volume = open(&path, "dn1").unwrap();
    assert_eq!(volume.storage(), storage);
    assert_eq!(volume.cluster(), None);
    volume.claim(ClusterId(5)).unwrap();
    volume.claim(ClusterId(5)).unwrap();
    let error = volume.claim(ClusterId(6)).unwrap_err();
    assert!(matches!(
        error,
        VolumeError::OtherCluster {
            found: ClusterId(5),
            ..
        }
    ));
    drop(volume);
    assert_eq!(open(&path, "dn1").unwrap().cluster(), Some(ClusterId(5)));
    // Reimaged: a new one.
    fs::remove_dir_all(&path).unwrap();
    assert_ne!(open(&path, "dn1").unwrap().storage(), storage);
}

/// One of another cluster, whose epochs have nothing to do with those of this one.
#[tokio::test]
async fn only_volumes_of_the_own_cluster_tell_what_was_obeyed() {
    let [own, foreign] = [5, 6].map(ClusterId);
    let at = |number| Position {
        epoch: Epoch { number, id: 1 },
        record: 1,
    };
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = ["a", "b"].map(|name| dir.path().join(name));
    for (path, cluster, number) in [(&first, own, 7), (&second, foreign, 9)] {
        open(path, "dn1").unwrap().claim(cluster).unwrap();
        obeyed_file::write(at(number), path).unwrap();
    }
    for paths in [[&first, &second], [&second, &first]] {
        let volumes =
            paths.map(|path| open_volume(&options(path, 1 << 30), Arc::new(RealDisk), 1).unwrap());
        let store = store_of(volumes.into());
        assert_eq!(store.cluster(), None);
        assert_eq!(store.obeyed_at_start(None), None);
        assert_eq!(store.obeyed_at_start(Some(own)), Some(at(7)));
        store.claim(own).await;
        assert_eq!(store.cluster(), Some(own));
    }
}

#[tokio::test]
async fn replicas_are_private_also_those_of_an_earlier_release() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let store = real_store(&path);
    write_sealed(&store, 7, &data(7, 10_000)).await.unwrap();
    let sealed = path.join("sealed/07").join(BlockId(7).to_string());
    assert_eq!(mode(&sealed), 0o600);
    assert_eq!(mode(&path.join("sealed/07")), 0o700);
    drop(store);
    let tops = ["open", "repair", "corrupt", "sealed"].map(|top| path.join(top));
    for top in &tops {
        fs::set_permissions(top, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let store = real_store(&path);
    for top in &tops {
        assert_eq!(mode(top), 0o700, "{}", top.display());
    }
    assert_eq!(read(&store, 7, 0, 10_000).await.unwrap(), data(7, 10_000));
}

#[test]
fn what_is_no_volume_of_this_server_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let missing = open(&path.join("below"), "dn1").err().unwrap();
    assert!(matches!(missing, VolumeError::Missing { .. }), "{missing}");

    let first = open(&path, "dn1").unwrap();
    let locked = open(&path, "dn1").err().unwrap();
    assert!(matches!(locked, VolumeError::Locked { .. }), "{locked}");
    drop(first);
    let other = open(&path, "dn2").err().unwrap();
    assert!(matches!(other, VolumeError::OtherServer { .. }), "{other}");

    fs::write(path.join("VERSION"), "harvestfs-volume 1\n").unwrap();
    let corrupt = open(&path, "dn1").err().unwrap();
    assert!(
        matches!(corrupt, VolumeError::CorruptVersionFile { .. }),
        "{corrupt}"
    );
    fs::remove_file(path.join("VERSION")).unwrap();
    let foreign = open(&path, "dn1").err().unwrap();
    assert!(
        matches!(foreign, VolumeError::NotAVolume { .. }),
        "{foreign}"
    );
}

#[tokio::test]
async fn new_replicas_go_where_they_are_asked_for_or_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let volume = |name: &str, quota_bytes, class| {
        let options = VolumeOptions {
            path: dir.path().join(name),
            quota_bytes,
            class,
        };
        open_volume(&options, Arc::new(RealDisk), 1).unwrap()
    };
    let volumes = vec![
        volume("a", 8 << 20, StorageClass::Disk),
        volume("b", 4 << 20, StorageClass::Ssd),
        volume("c", 64 << 20, StorageClass::Disk),
    ];
    let storages: Vec<_> = volumes.iter().map(|(volume, _)| volume.storage()).collect();
    let store = store_of(volumes);
    let mut next = 0;
    let mut place = async |class| {
        next += 1;
        let create = store.create(BlockId(next), class, Origin::Pipeline, BLOCK_BYTES);
        let mut writer = create.await?;
        writer
            .write(vec![packet(0, &vec![1; 1 << 20], false)], false)
            .await?;
        writer.seal(1 << 20).await?;
        let (storage, _) = store.report(BlockId(next)).unwrap();
        Ok::<_, StoreError>(storages.iter().position(|s| *s == storage).unwrap())
    };
    assert_eq!(place(None).await.unwrap(), 2);
    let mut on_ssd = 0;
    while place(Some(StorageClass::Ssd)).await.unwrap_or(9) == 1 {
        on_ssd += 1;
    }
    assert!(on_ssd >= 1, "the class is honoured while there is room");
}

#[tokio::test]
async fn a_replica_whose_size_is_impossible_is_corrupt() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    write_sealed(&store, 1, &data(1, 50_000)).await.unwrap();
    write_sealed(&store, 2, &data(2, 50_000)).await.unwrap();
    drop(store);
    let path = dir.path().join("sealed/01/0000000000000001");
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(30_001).unwrap();
    fs::write(dir.path().join("sealed/01/notes.txt"), "not ours").unwrap();
    for _ in 0..2 {
        let store = real_store(dir.path());
        let storage = store.healthy_storages()[0];
        assert_eq!(store.sealed_of(storage), [BlockId(2)]);
        assert_eq!(store.corrupt_replicas_of(storage), [BlockId(1)]);
        // The rest of it is as good as before.
        let left = read(&store, 1, 0, 5 * 4096).await.unwrap();
        assert_eq!(left, data(1, 50_000)[..5 * 4096]);
        let gone = read(&store, 1, 5 * 4096, 1).await.unwrap_err();
        assert!(
            matches!(gone, StoreError::ShortReplica { have_bytes: 20_480 }),
            "{gone}"
        );
    }
    let store = real_store(dir.path());
    store.delete(BlockId(1)).await.unwrap();
    let storage = store.healthy_storages()[0];
    assert!(store.corrupt_replicas_of(storage).is_empty());
    write_sealed(&store, 1, b"again").await.unwrap();
}

/// The next start would find the same.
#[tokio::test]
async fn one_file_that_cannot_be_opened_keeps_no_others_away() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_at(dir.path(), 1 << 30, disk.clone());
    let mut writer = create(&store, 1).await.unwrap();
    let written = vec![packet(0, &[1; 4_096], false)];
    writer.write(written, true).await.unwrap();
    write_sealed(&store, 2, &data(2, 4_096)).await.unwrap();
    let storage = store.healthy_storages()[0];
    drop((writer, store));
    let open = |block: u64| dir.path().join("open").join(BlockId(block).to_string());
    fs::create_dir(open(3)).unwrap();
    symlink(open(4), open(4)).unwrap();
    fs::create_dir(dir.path().join("repair/0000000000000005")).unwrap();
    for errno in [Errno::ACCESS, Errno::BADMSG, Errno::REMOTEIO] {
        disk.fail(Fault::Read, &open(1), errno);
        let store = store_at(dir.path(), 1 << 30, disk.clone());
        assert!(store.status()[0].healthy, "{errno}");
        let mut corrupt = store.corrupt_replicas_of(storage);
        corrupt.sort();
        assert_eq!(corrupt, [1, 3, 4].map(BlockId), "{errno}");
        assert_eq!(read(&store, 2, 0, 4_096).await.unwrap(), data(2, 4_096));
        drop(store);
        disk.heal();
    }
    for errno in [Errno::NFILE, Errno::ROFS, Errno::UCLEAN] {
        disk.fail(Fault::Read, &open(1), errno);
        let options = options(dir.path(), 1 << 30);
        let opened = open_volume(&options, disk.clone(), 1);
        let refused = opened.err().unwrap();
        assert!(matches!(refused, VolumeError::Io { .. }), "{refused}");
        disk.heal();
    }
}

/// The next start may find that nothing is wrong with it, and it may be the last of its block.
#[tokio::test]
async fn what_cannot_be_looked_at_at_the_start_stays_in_its_place_and_is_given_up_last() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_at(dir.path(), 1 << 30, disk.clone());
    for block in [1, 2] {
        write_sealed(&store, block, &data(block, 4_096))
            .await
            .unwrap();
    }
    let mut writer = create(&store, 3).await.unwrap();
    let written = vec![packet(0, &data(3, 4_096), false)];
    writer.write(written, true).await.unwrap();
    let storage = store.healthy_storages()[0];
    drop((writer, store));
    let sealed = dir.path().join("sealed/01").join(BlockId(1).to_string());
    let open = dir.path().join("open").join(BlockId(3).to_string());
    disk.fail(Fault::Size, &sealed, Errno::IO);
    disk.fail(Fault::Read, &open, Errno::ACCESS);
    let store = store_at(dir.path(), 1 << 30, disk.clone());
    assert!(store.status()[0].healthy);
    let mut corrupt = store.corrupt_replicas_of(storage);
    corrupt.sort();
    assert_eq!(corrupt, [1, 3].map(BlockId));
    assert!(sealed.exists() && open.exists());
    assert_eq!(store.victims(storage, u64::MAX)[0], BlockId(2));
    assert_eq!(store.victims(storage, u64::MAX).len(), 3);
    // All readable data of it is read.
    assert_eq!(read(&store, 1, 0, 4_096).await.unwrap(), data(1, 4_096));
    drop(store);
    disk.heal();
    let store = store_at(dir.path(), 1 << 30, disk);
    assert!(store.corrupt_replicas_of(storage).is_empty());
    for block in 1..=3 {
        let found = read(&store, block, 0, 4_096).await.unwrap();
        assert_eq!(found, data(block, 4_096));
    }
}

#[tokio::test]
async fn a_volume_with_many_files_that_cannot_be_looked_at_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    let store = store_at(dir.path(), 1 << 30, disk.clone());
    for block in 0..11 {
        write_sealed(&store, block, b"good").await.unwrap();
    }
    drop(store);
    disk.fail(Fault::Size, &dir.path().join("sealed"), Errno::IO);
    let store = store_at(dir.path(), 1 << 30, disk);
    assert!(!store.status()[0].healthy);
}

#[tokio::test]
async fn what_a_repair_left_behind_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let create = store.create(BlockId(1), None, Origin::Repair, BLOCK_BYTES);
    let mut writer = create.await.unwrap();
    writer
        .write(vec![packet(0, b"half", true)], true)
        .await
        .unwrap();
    drop((writer, store));
    let store = real_store(dir.path());
    assert_eq!(fs::read_dir(dir.path().join("repair")).unwrap().count(), 0);
    let empty = tempfile::tempdir().unwrap();
    let unused = real_store(empty.path()).status()[0].used_bytes;
    assert_eq!(store.status()[0].used_bytes, unused);
}

/// Otherwise the block could not be repaired here before the next start.
#[tokio::test]
async fn a_file_that_an_earlier_repair_left_is_in_no_ones_way() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    fs::write(dir.path().join("repair/0000000000000001"), "left").unwrap();
    let create = store.create(BlockId(1), None, Origin::Repair, BLOCK_BYTES);
    let mut writer = create.await.unwrap();
    writer
        .write(vec![packet(0, b"repaired", false)], false)
        .await
        .unwrap();
    writer.seal(8).await.unwrap();
    assert_eq!(read(&store, 1, 0, 8).await.unwrap(), b"repaired"[..]);
    // A pipeline's file may be a replica: it is not replaced.
    fs::write(dir.path().join("open/0000000000000002"), "found").unwrap();
    let error = super::create(&store, 2).await.err().unwrap();
    assert!(matches!(error, StoreError::Disk { .. }), "{error}");
}

#[tokio::test]
async fn a_volume_whose_directories_are_gone_goes_down() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let store = real_store(&path);
    write_sealed(&store, 1, b"before").await.unwrap();
    fs::remove_dir_all(&path).unwrap();
    assert!(create(&store, 2).await.is_err());
    assert!(!store.status()[0].healthy);
    drop(store);
    // Reimaged: it comes back empty.
    let store = real_store(&path);
    assert!(store.replicas_of(store.healthy_storages()[0]).is_empty());
    write_sealed(&store, 2, b"after").await.unwrap();
}

/// A volume that could not be used for a while has replicas that were created again on another one in the meantime.
#[tokio::test]
async fn of_what_two_volumes_have_one_counts_and_nothing_is_removed_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| dir.path().join(name));
    let open_all = || {
        let volumes = paths
            .iter()
            .map(|path| open_volume(&options(path, 1 << 30), Arc::new(RealDisk), 1).unwrap());
        store_of(volumes.collect())
    };
    let files = || -> usize {
        let dirs = ["open", "sealed/01", "sealed/02", "corrupt"];
        let dirs = paths.iter().flat_map(|path| dirs.map(|dir| path.join(dir)));
        dirs.map(|dir| fs::read_dir(dir).unwrap().count()).sum()
    };
    for lost in 0..2 {
        let store = open_all();
        let elsewhere = store.volumes()[1 - lost].clone();
        elsewhere.writers.fetch_add(9, Ordering::Relaxed);
        write_sealed(&store, 1, b"before").await.unwrap();
        drop(create(&store, 2).await.unwrap());
        assert_eq!(files(), 2);
        {
            let volume = &store.volumes()[lost];
            volume.health.fail("on purpose", volume.path());
        }
        for block in [1, 2] {
            let created = store.create(BlockId(block), None, Origin::Repair, BLOCK_BYTES);
            let mut writer = created.await.unwrap();
            let all = vec![packet(0, b"repaired", false)];
            writer.write(all, false).await.unwrap();
            writer.seal(8).await.unwrap();
        }
        assert_eq!(files(), 4);
        drop((elsewhere, store));
        // The next start finds the other ones.
        for left in [4, 2] {
            let store = open_all();
            assert_eq!(files(), left);
            for block in [1, 2] {
                store.report(BlockId(block)).unwrap();
                store.delete(BlockId(block)).await.unwrap();
            }
            assert_eq!(files(), left - 2);
        }
    }
}

/// After a start at which two volumes have the same block, the space of both files counts as used.
#[tokio::test]
async fn what_does_not_count_at_the_start_takes_its_space_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let both = ["a", "b"].map(|name| options(&dir.path().join(name), 1 << 30));
    let open = |options| open_volume(options, Arc::new(RealDisk), 1).unwrap();
    let mut used_bytes = Vec::new();
    for options in &both {
        let store = store_of(vec![open(options)]);
        write_sealed(&store, 1, &data(1, 5_000)).await.unwrap();
        drop(create(&store, 2).await.unwrap());
        drop(store);
        used_bytes.push(open(options).0.quota.used_bytes());
    }
    let store = store_of(both.iter().map(open).collect());
    let status = store.status();
    let now_used_bytes: Vec<u64> = status.iter().map(|it| it.used_bytes).collect();
    assert_eq!(now_used_bytes, used_bytes);
}

/// Possible contents of a replica's file: garbage, with or without a valid beginning.
fn content() -> impl Strategy<Value = Vec<u8>> {
    let garbage = prop::collection::vec(any::<u8>(), 0..30_000);
    (garbage, 0_usize..4, any::<bool>()).prop_map(|(mut garbage, pages, has_header)| {
        let len = garbage.len() / 4096 * 4096 + pages * 4096;
        if len % 3 == 0 {
            garbage.resize(len, 0);
        }
        if has_header && let Some(magic) = garbage.get_mut(..8) {
            magic.copy_from_slice(b"HVFSREPL");
        }
        garbage
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Any content of a volume's files is distinguished from good data, and nothing panics.
    #[test]
    fn any_content_is_survived(open in content(), sealed in content()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            drop(real_store(dir.path()));
            fs::write(dir.path().join("open/0000000000000001"), &open).unwrap();
            fs::write(dir.path().join("sealed/02/0000000000000002"), &sealed).unwrap();
            let store = real_store(dir.path());
            for block in [1, 2] {
                let Some((_, report)) = store.report(BlockId(block)) else {
                    continue;
                };
                if report.length_bytes > 0 {
                    // Garbage does not match a checksum by chance: not in this universe.
                    assert!(report.sealed);
                    let error = read(&store, block, 0, report.length_bytes).await.unwrap_err();
                    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
                }
            }
            for block in [1, 2] {
                let _ = store.seal(BlockId(block), 4096).await;
                store.delete(BlockId(block)).await.unwrap();
            }
        });
    }
}

#[tokio::test]
async fn volumes_share_the_repairs_of_their_server() {
    let dir = tempfile::tempdir().unwrap();
    // The second volume has the most room.
    let opened: Vec<_> = (1..=3)
        .map(|number| {
            let path = dir.path().join(number.to_string());
            let quota_bytes = if number == 2 { 1 << 30 } else { 1 << 28 };
            open_volume(&options(&path, quota_bytes), Arc::new(RealDisk), 1).unwrap()
        })
        .collect();
    let volumes: Vec<Arc<Volume>> = opened.iter().map(|(volume, _)| volume.clone()).collect();
    let store = store_of(opened);
    for block in 0..9 {
        let created = store.create(BlockId(block), None, Origin::Repair, BLOCK_BYTES);
        drop(created.await.unwrap());
    }
    let received = volumes.iter().map(|it| it.repairs.load(Ordering::Relaxed));
    assert_eq!(received.collect::<Vec<_>>(), [3, 3, 3]);
    // A volume that joins later does not make up for earlier repairs.
    let path = dir.path().join("late");
    let (late, found) = open_volume(&options(&path, 1 << 30), Arc::new(RealDisk), 1).unwrap();
    store.join(&late, found);
    for block in 9..17 {
        let created = store.create(BlockId(block), None, Origin::Repair, BLOCK_BYTES);
        drop(created.await.unwrap());
    }
    let volumes = store.volumes();
    let received = volumes.iter().map(|it| it.repairs.load(Ordering::Relaxed));
    assert_eq!(received.collect::<Vec<_>>(), [5, 5, 5, 5]);
}
