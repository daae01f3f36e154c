//! After any power loss, acknowledged data is intact.

use std::collections::HashMap;

use rand::RngExt;

use super::*;
use crate::testing::disks::RecordingDisk;

/// The data acknowledged to a writer by a certain point in time.
struct Acknowledged {
    moment: usize,
    block: u64,
    synced_chunks: u32,
    sealed: bool,
}

/// How the writing of a replica ends.
#[derive(Clone, Copy)]
enum End {
    /// Its writer disappears.
    Open,
    Sealed,
    /// The sync of the seal fails, and it is sealed again.
    SealFails,
    /// A sync fails, and the replica is sealed without the data of that sync.
    SyncFails,
    /// The same after a restart.
    SyncFailsAndRestart,
}

const ENDS: [End; 5] = [
    End::Open,
    End::Sealed,
    End::SealFails,
    End::SyncFails,
    End::SyncFailsAndRestart,
];

#[test]
fn every_crash_image_has_what_was_acknowledged() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    for seed in 0..6 {
        runtime.block_on(one_history(seed));
    }
}

async fn one_history(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path().join("volume");
    let disk = RecordingDisk::new();
    let mut store = store_at(&volume, 1 << 30, disk.clone());
    let mut written: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut acknowledged = Vec::new();
    for block in 1..=5_u64 {
        let mut writer = create(&store, block).await.unwrap();
        let content = written.entry(block).or_default();
        for _ in 0..rng.random_range(1..10) {
            let bytes = rng.random_range(1..20_000);
            let sync = rng.random();
            let data = data(rng.random(), bytes);
            let packet = packet(content.len() as u64, &data, sync);
            content.extend(data);
            content.resize(content.len().next_multiple_of(4096), 0);
            writer.write(vec![packet], sync).await.unwrap();
            if sync {
                acknowledged.push(Acknowledged {
                    moment: disk.now(),
                    block,
                    synced_chunks: (content.len() / 4096) as u32,
                    sealed: false,
                });
            }
        }
        let sealed_bytes = content.len();
        let end = ENDS[rng.random_range(0..ENDS.len())];
        match end {
            End::Open => continue,
            End::Sealed => writer.seal(sealed_bytes as u64).await.unwrap(),
            End::SealFails => {
                disk.fail_next_sync();
                writer.seal(sealed_bytes as u64).await.unwrap_err();
            }
            End::SyncFails | End::SyncFailsAndRestart => {
                let data = data(rng.random(), 4096);
                let packet = packet(sealed_bytes as u64, &data, true);
                content.extend(data);
                disk.fail_next_sync();
                writer.write(vec![packet], true).await.unwrap_err();
                drop(writer);
            }
        }
        if matches!(end, End::SyncFailsAndRestart) {
            drop(store);
            store = store_at(&volume, 1 << 30, disk.clone());
        }
        let sealed = store.seal(BlockId(block), sealed_bytes as u64).await;
        sealed.unwrap();
        acknowledged.push(Acknowledged {
            moment: disk.now(),
            block,
            synced_chunks: (sealed_bytes / 4096) as u32,
            sealed: true,
        });
    }
    for image in 0..12 {
        let moment = rng.random_range(0..=disk.now());
        let image_dir = dir.path().join(format!("image{image}"));
        std::fs::create_dir(&image_dir).unwrap();
        disk.crash(moment, seed * 1000 + image, &volume, &image_dir);
        let known = acknowledged.iter().filter(|known| known.moment <= moment);
        check_image(&image_dir, &written, known)
            .await
            .unwrap_or_else(|what| panic!("seed {seed}, image {image}, moment {moment}: {what}"));
        std::fs::remove_dir_all(&image_dir).unwrap();
    }
}

async fn check_image(
    image: &Path,
    written: &HashMap<u64, Vec<u8>>,
    acknowledged: impl Iterator<Item = &Acknowledged>,
) -> Result<(), String> {
    let store = real_store(image);
    let reports = store.replicas_of(store.healthy_storages()[0]);
    for report in &reports {
        let expected = &written[&report.block.0];
        let length = report.length_bytes as usize;
        if length > 0 {
            let found = read(&store, report.block.0, 0, length as u64).await;
            let found = found.map_err(|error| format!("{}: {error}", report.block))?;
            if found != expected[..length] {
                return Err(format!("{} differs", report.block));
            }
        }
    }
    for known in acknowledged {
        let report = reports
            .iter()
            .find(|report| report.block.0 == known.block)
            .ok_or_else(|| format!("block {} is lost", known.block))?;
        if known.sealed && report.length_bytes != u64::from(known.synced_chunks) * 4096 {
            return Err(format!(
                "{report:?}, sealed at {} chunks",
                known.synced_chunks
            ));
        }
        if report.length_bytes < u64::from(known.synced_chunks) * 4096 {
            return Err(format!("{report:?}, {} chunks synced", known.synced_chunks));
        }
        if known.sealed && !report.sealed {
            return Err(format!("{report:?} was sealed"));
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_killed_writer_leaves_what_it_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let store = real_store(dir.path());
    let data = data(5, 300_000);
    let mut writer = create(&store, 1).await.unwrap();
    writer
        .write(vec![packet(0, &data, false)], false)
        .await
        .unwrap();
    drop((writer, store));
    let store = real_store(dir.path());
    assert_eq!(read(&store, 1, 0, 300_000).await.unwrap(), data);
    store.seal(BlockId(1), 300_000).await.unwrap();
    assert_eq!(read(&store, 1, 0, 300_000).await.unwrap(), data);
}

#[tokio::test]
async fn an_open_replica_ends_where_it_stops_to_match() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(5, 40 * 4096);
    let path = dir.path().join("open/0000000000000001");
    let position = |chunk: u64| 8192 + chunk * 4096;
    // (what is done to the file, chunks that can be trusted then)
    type Damage = Box<dyn Fn(&std::fs::File)>;
    let flip = |at: u64| -> Damage {
        Box::new(move |file| {
            use std::os::unix::fs::FileExt;
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        })
    };
    let cases: Vec<(Damage, u64)> = vec![
        (Box::new(|_| {}), 40),
        (flip(position(7) + 100), 7),
        (flip(4096 + 4 * 9), 9),
        (flip(position(3)), 3),
        (flip(0), 0),
        (
            Box::new(move |file| file.set_len(position(11) + 5).unwrap()),
            11,
        ),
        (Box::new(|file| file.set_len(5).unwrap()), 0),
        (Box::new(|file| file.set_len(0).unwrap()), 0),
    ];
    for (damage, expected_chunks) in cases {
        let store = real_store(dir.path());
        let mut writer = create(&store, 1).await.unwrap();
        writer
            .write(vec![packet(0, &data, true)], true)
            .await
            .unwrap();
        drop((writer, store));
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        damage(&file);
        drop(file);
        let store = real_store(dir.path());
        let (_, report) = store.report(BlockId(1)).unwrap();
        assert_eq!(report.length_bytes, expected_chunks * 4096);
        store
            .seal(BlockId(1), expected_chunks * 4096)
            .await
            .unwrap();
        store.delete(BlockId(1)).await.unwrap();
    }
}
