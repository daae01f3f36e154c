//! The file of a backup. The layout is that of the documentation of `harvestfs_namenode::backup`, written a second
//! time: the reader's result is compared with the intended content.

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};

use arbitrary::{Arbitrary, Unstructured};
use harvestfs_checkpoint::image::sha256;
use harvestfs_namenode::backup::{BackupReader, verify};
use harvestfs_namenode::server::restore;
use harvestfs_protocol::backup::BackupContent;
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::timeline::Epoch;

use crate::scratch;

const SEGMENT_BYTES: u64 = 4 << 20;

#[derive(Debug, Arbitrary)]
struct Part {
    payload: Vec<u8>,
    number_ahead: u8,
    longer_bytes: u32,
    checksum_matches: bool,
}

#[derive(Debug, Arbitrary)]
struct Backup {
    cluster: u128,
    record: u64,
    version: String,
    parts: Vec<Part>,
    more_bytes_said: u8,
    description_matches: bool,
    digest_matches: bool,
    trailing: Vec<u8>,
}

/// Reads the bytes themselves, and a file built from good and bad parts. The reader must return the intended content,
/// and only that of a complete file.
pub fn backup_files(input: &[u8]) {
    if let Ok(mut reader) = BackupReader::open(input) {
        let length_bytes = reader.content().length_bytes;
        let mut bytes = Vec::new();
        if reader.read_to_end(&mut bytes).is_ok() {
            assert_eq!(bytes.len() as u64, length_bytes);
        }
    }
    if verify(input).is_ok() {
        let directory = scratch().join("restored");
        let _ = std::fs::remove_dir_all(&directory);
        // What was verified may contain another namespace than its description claims.
        let _ = restore(input, &directory, None, SEGMENT_BYTES);
    }
    let Ok(plan) = Backup::arbitrary(&mut Unstructured::new(input)) else {
        return;
    };
    let meant: Vec<u8> = plan
        .parts
        .iter()
        .flat_map(|it| it.payload.clone())
        .collect();
    let file = build(&plan, meant.len() as u64);
    let is_good = plan.description_matches
        && plan.digest_matches
        && plan.more_bytes_said == 0
        && plan.trailing.is_empty()
        && plan.parts.iter().all(|it| {
            // A frame without content is the end.
            it.number_ahead == 0
                && it.longer_bytes == 0
                && it.checksum_matches
                && !it.payload.is_empty()
        });
    let mut read = Vec::new();
    let whole = BackupReader::open(&file[..]).is_ok_and(|mut reader| {
        assert_eq!(reader.content().record, plan.record);
        reader.read_to_end(&mut read).is_ok()
    });
    assert_eq!(whole, is_good, "{plan:?}");
    if is_good {
        assert_eq!(read, meant);
    }
    for at in (0..file.len()).step_by(file.len() / 8 + 1) {
        assert!(verify(&file[..at]).is_err(), "cut at {at}");
    }
}

fn build(plan: &Backup, length_bytes: u64) -> Vec<u8> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 9310));
    let content = BackupContent {
        cluster: ClusterId(plan.cluster),
        record: plan.record,
        term: 1,
        epoch: Epoch::default(),
        unix_ms: 0,
        version: plan.version.chars().take(1_000).collect(),
        edition: 1,
        name: "namenode".to_owned(),
        addr,
        led: true,
        behind_records: 0,
        namenodes: vec![addr],
        files: 0,
        directories: 1,
        blocks: 0,
        length_bytes: length_bytes + u64::from(plan.more_bytes_said),
    };
    let description = postcard::to_stdvec(&content).expect("it can be encoded");
    let mut file = b"HFSBKUP\0\x01\0\0\0".to_vec();
    file.extend((description.len() as u32).to_le_bytes());
    let checksum = crc32fast::hash(&[&file[..], &description].concat());
    file.extend((checksum ^ u32::from(!plan.description_matches)).to_le_bytes());
    file.extend(description);
    let mut number = 0_u64;
    for part in &plan.parts {
        let length = (part.payload.len() as u32).saturating_add(part.longer_bytes);
        let claimed = number + u64::from(part.number_ahead);
        let checksum = part_checksum(claimed, length, &part.payload);
        file.extend(length.to_le_bytes());
        file.extend((checksum ^ u32::from(!part.checksum_matches)).to_le_bytes());
        file.extend(&part.payload);
        number += 1;
    }
    file.extend(0_u32.to_le_bytes());
    file.extend(part_checksum(number, 0, &[]).to_le_bytes());
    let digest = sha256(&file);
    let digit = |at: usize| u8::from_str_radix(&digest[at..at + 2], 16).expect("two digits");
    let mut digest: Vec<u8> = (0..digest.len()).step_by(2).map(digit).collect();
    digest[0] ^= u8::from(!plan.digest_matches);
    file.extend(digest);
    file.extend(&plan.trailing);
    file
}

fn part_checksum(number: u64, length: u32, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&number.to_le_bytes());
    hasher.update(&length.to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}
