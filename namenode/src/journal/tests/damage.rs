//! Damaged files: refused or reported, never read as data.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::sim_disk::{Image, SimDisk};
use super::*;

/// Records of the history; they fill several segments.
const LAST_LSN: Lsn = 320;
/// The last sync of the history covers the records after this one.
const SYNCED_BEFORE_LSN: Lsn = 310;

fn open(image: &Image) -> Result<(Journal, Recovered), JournalError> {
    Journal::open_on(Arc::new(SimDisk::holding(image)), &options())
}

/// A journal of [`LAST_LSN`] records, acknowledged ten at a time, with a snapshot at 100. In
/// between, other records after 200 were there, in several segments, and were removed.
fn history() -> Image {
    let disk = SimDisk::default();
    let (mut journal, _) = Journal::open_on(Arc::new(disk.clone()), &options()).unwrap();
    for from in (1..=LAST_LSN).step_by(10) {
        journal.append(&records(from, from + 9)).unwrap();
        journal.sync().unwrap();
        if from == 191 {
            let others: Vec<_> = (201..=300).map(|lsn| record_in_epoch(lsn, 1)).collect();
            for other in others {
                journal.append(&[other]).unwrap();
            }
            journal.truncate_after(200).unwrap();
        }
        if from == 91 {
            let plan = journal.begin_snapshot(journal.last_lsn()).unwrap().unwrap();
            plan.writer().unwrap().install().unwrap();
        }
    }
    let image = disk.image();
    let in_newest_segment = LAST_LSN - first_lsn(&newest_segment(&image));
    assert!(in_newest_segment > 20, "some of them synced before others");
    image
}

fn first_lsn(segment: &str) -> Lsn {
    segment.strip_prefix("segment-").unwrap().parse().unwrap()
}

/// Opens and reads everything. `Ok` holds the last record, after every one was compared.
fn read_all(image: &Image) -> Result<(Lsn, TailReport), JournalError> {
    let (_journal, recovered) = open(image)?;
    let mut expected = recovered.snapshot.map_or(0, |(lsn, _)| lsn) + 1;
    for item in recovered.records {
        let (lsn, payload) = item?;
        assert_eq!(lsn, expected);
        assert!(payload == record(lsn), "damage was read as record {lsn}");
        expected += 1;
    }
    assert_eq!(recovered.last_lsn + 1, expected);
    Ok((recovered.last_lsn, recovered.tail))
}

fn newest_segment(image: &Image) -> String {
    let mut segments = image.keys().filter(|name| name.starts_with("segment-"));
    segments.next_back().unwrap().clone()
}

/// Runs a property with a fixed seed, so that every run tries the same cases.
fn check<S: Strategy>(cases: u32, strategy: S, property: impl Fn(S::Value)) {
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let run = TestRunner::new_with_rng(config, rng).run(&strategy, |value| {
        property(value);
        Ok(())
    });
    if let Err(e) = run {
        panic!("{e}");
    }
}

#[test]
fn a_changed_byte_is_never_read_as_data() {
    let image = history();
    let names: Vec<String> = image.keys().cloned().collect();
    let place = (0..names.len(), any::<prop::sample::Index>(), 1..=255u8);
    check(3000, place, |(file, index, flip)| {
        let mut damaged = image.clone();
        let content = damaged.get_mut(&names[file]).unwrap();
        let at = index.index(content.len());
        content[at] ^= flip;
        if let Ok((last_lsn, tail)) = read_all(&damaged) {
            assert!(
                last_lsn >= SYNCED_BEFORE_LSN,
                "{} byte {at}: silently lost what a later record vouches for",
                names[file]
            );
            assert!(last_lsn == LAST_LSN || tail != TailReport::Clean);
        }
    });
}

#[test]
fn a_zeroed_sector_is_never_overlooked() {
    let image = history();
    let names: Vec<String> = image.keys().cloned().collect();
    let place = (0..names.len(), any::<prop::sample::Index>());
    check(1000, place, |(file, index)| {
        let mut damaged = image.clone();
        let content = damaged.get_mut(&names[file]).unwrap();
        let start = index.index(content.len()) / 512 * 512;
        let end = (start + 512).min(content.len());
        content[start..end].fill(0);
        if let Ok((last_lsn, _)) = read_all(&damaged) {
            assert!(last_lsn >= SYNCED_BEFORE_LSN, "{} {start}", names[file]);
        }
    });
}

#[test]
fn a_truncated_tail_is_reported() {
    let image = history();
    let newest = newest_segment(&image);
    let full_len = image[&newest].len();
    check(500, 0..full_len, |len| {
        let mut damaged = image.clone();
        damaged.get_mut(&newest).unwrap().truncate(len);
        match read_all(&damaged) {
            Ok((_, TailReport::Torn { missing_bytes, .. })) => {
                assert_eq!(missing_bytes, (full_len - len) as u64);
            }
            Ok((_, TailReport::Clean)) => panic!("cut at {len}: nothing reported"),
            // Without a whole header it is not known what the file was.
            Err(e) => assert!(len < 64, "cut at {len}: {e}"),
        }
    });
}

#[test]
fn appending_continues_after_a_truncation() {
    let mut image = history();
    let newest = newest_segment(&image);
    image.get_mut(&newest).unwrap().truncate(5000);
    let disk = SimDisk::holding(&image);
    let (mut journal, recovered) = Journal::open_on(Arc::new(disk.clone()), &options()).unwrap();
    let last_lsn = recovered.last_lsn;
    journal
        .append(&records(last_lsn + 1, last_lsn + 20))
        .unwrap();
    journal.sync().unwrap();
    assert_eq!(read_all(&disk.image()).unwrap().0, last_lsn + 20);
}

#[test]
fn random_bytes_are_never_a_journal() {
    let names = [
        "segment-00000000000000000001",
        "snapshot-00000000000000000001",
    ];
    let content = prop::collection::vec(any::<u8>(), 0..300);
    check(300, (0..2usize, content), |(name, content)| {
        let image = Image::from([(names[name].to_owned(), content)]);
        assert!(open(&image).is_err());
    });
}

#[test]
fn a_record_inside_a_record_is_only_a_payload() {
    // The payload is a copy of a real segment, as a user could store it in an attribute.
    let inner = history();
    let payload = inner[&newest_segment(&inner)][4096..].to_vec();
    let options = JournalOptions {
        segment_bytes: 64 * 1024,
        ..options()
    };
    let disk = SimDisk::default();
    let (mut journal, _) = Journal::open_on(Arc::new(disk.clone()), &options).unwrap();
    journal.append(&[&payload]).unwrap();
    journal.sync().unwrap();
    drop(journal);
    let mut image = disk.image();
    // Tears the header off, so that recovery looks for records behind it.
    image.get_mut(&newest_segment(&image)).unwrap()[4100] ^= 1;
    let disk = SimDisk::holding(&image);
    let (_journal, recovered) = Journal::open_on(Arc::new(disk), &options).unwrap();
    assert_eq!(recovered.last_lsn, 0);
    assert!(matches!(recovered.tail, TailReport::Torn { .. }));
}

#[test]
fn a_missing_segment_is_refused() {
    let image = history();
    let segments: Vec<&String> = image.keys().filter(|n| n.starts_with("segment-")).collect();
    assert!(segments.len() > 3);
    let needed = segments.len() - 2;
    for missing in &segments[needed..] {
        let mut damaged = image.clone();
        damaged.remove(*missing);
        match read_all(&damaged) {
            Err(JournalError::Corrupt { .. } | JournalError::MissingRecords { .. }) => {}
            Err(e) => panic!("{e}"),
            // Nothing can tell that a newest segment existed once.
            Ok((last_lsn, _)) => assert_eq!(Some(missing), segments.last(), "{last_lsn}"),
        }
    }
}

#[test]
fn a_damaged_snapshot_is_passed_over_for_the_one_before_it() {
    let mut image = history();
    let snapshot = image.keys().find(|n| n.starts_with("snapshot-")).unwrap();
    let snapshot = snapshot.clone();
    image.get_mut(&snapshot).unwrap()[70] ^= 1;
    let (_journal, recovered) = open(&image).unwrap();
    assert!(recovered.snapshot.is_none());
    assert_eq!(recovered.skipped_snapshots.len(), 1);
    assert_records(recovered.records, 1, LAST_LSN);

    // Without the segments before it, nothing can replace it.
    image.remove("segment-00000000000000000001");
    assert!(matches!(open(&image), Err(JournalError::Corrupt { file, .. }) if file == snapshot));
}
