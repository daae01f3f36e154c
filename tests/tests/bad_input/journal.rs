//! Damage by disks and crashes to the namenode's journal.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use harvestfs_tests::{Cluster, ClusterOptions, Pattern};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{assert_serves, refused, wait_for_log};

/// Offset of a segment's first record, and the size of a record's header, whose first 4 bytes are
/// the length of the data that follows it.
const FIRST_RECORD: u64 = 4096;
const RECORD_HEADER_BYTES: u64 = 28;

/// The newest segment.
fn last_segment(cluster: &Cluster) -> PathBuf {
    fs::read_dir(cluster.path("namenode/data/journal"))
        .expect("the journal")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.to_string_lossy().contains("/segment-"))
        .max()
        .expect("there is one")
}

/// Offsets at which the records of a segment start, and at which the last one ends.
fn records(segment: &File) -> Vec<u64> {
    let mut offsets = vec![FIRST_RECORD];
    let mut offset = FIRST_RECORD;
    loop {
        let mut length = [0; 4];
        segment.read_exact_at(&mut length, offset).expect("read");
        let length = u64::from(u32::from_le_bytes(length));
        if length == 0 {
            return offsets;
        }
        offset += RECORD_HEADER_BYTES + length;
        offsets.push(offset);
    }
}

fn files(mount: &std::path::Path, numbers: std::ops::Range<u64>, check: bool) {
    for number in numbers {
        let path = mount.join(format!("f{number}"));
        let pattern = Pattern { seed: number };
        if check {
            pattern.check_file(&path, 20_000);
        } else {
            fs::write(&path, pattern.bytes(20_000)).expect("write");
            File::open(&path).and_then(|f| f.sync_all()).expect("fsync");
        }
    }
}

#[test]
fn a_torn_tail_is_dropped_and_damage_is_refused_and_nothing_acknowledged_is_lost() {
    let Some((mut cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 2,
        replication: 2,
        ..ClusterOptions::default()
    }) else {
        return;
    };
    files(&mount, 0..30, false);
    cluster.kill("namenode");

    // The remains of a crash: the beginning of records that were never acknowledged.
    let path = last_segment(&cluster);
    let segment = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .expect("the segment");
    let offsets = records(&segment);
    assert!(offsets.len() > 30, "{} records", offsets.len());
    let end = offsets[offsets.len() - 1];
    let mut garbage = vec![0; 5_000];
    StdRng::seed_from_u64(1).fill_bytes(&mut garbage);
    segment.write_all_at(&garbage, end).expect("write");
    cluster.start_namenode();
    wait_for_log(
        &cluster,
        "namenode",
        "the journal ended in records that a crash had interrupted",
    );
    files(&mount, 0..30, true);
    files(&mount, 30..60, false);
    cluster.kill("namenode");

    // Not a crash: a flipped bit in the middle of acknowledged records.
    let path = last_segment(&cluster);
    let segment = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .expect("the segment");
    let offsets = records(&segment);
    let damaged = offsets[offsets.len() / 2];
    let mut byte = [0];
    let place = damaged + RECORD_HEADER_BYTES + 1;
    segment.read_exact_at(&mut byte, place).expect("read");
    segment.write_all_at(&[byte[0] ^ 4], place).expect("write");
    let config = cluster.path("namenode/namenode.toml");
    for _ in 0..2 {
        let (status, said) = refused(&cluster, "namenode", &config);
        eprintln!("{said}");
        assert_eq!(status, 1, "{said}");
        let name = path.file_name().expect("it has one").to_string_lossy();
        assert!(said.contains(&*name), "{said}");
        assert!(
            said.contains(&format!("is damaged at byte {damaged}")),
            "{said}"
        );
        assert!(said.contains("does not start"), "{said}");
    }
    // The refusal has changed nothing: with the bit restored, everything is there.
    segment.write_all_at(&byte, place).expect("write");
    drop(segment);
    cluster.start_namenode();
    files(&mount, 0..60, true);
    cluster.stop("mnt");
    let mount = cluster.mount("mnt");
    files(&mount, 0..60, true);
    assert_serves(&mut cluster, &mount, 4);
}
