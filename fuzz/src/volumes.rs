//! The datanode's volumes: the file that describes a volume, and replica files.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arbitrary::{Arbitrary, Unstructured};
use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::types::StorageClass;

use crate::scratch;
use crate::store::{BlockStore, BufferPool, ChunkRange, Progress, RealDisk, Volume, VolumeOptions};

const SERVER: &str = "dn1";
const STORAGE: StorageId = StorageId(9);
const CHUNK_BYTES: usize = 4096;
const BLOCKS: u64 = 8;

/// The first byte decides whether the line with the checksum is added; the rest is the file. A volume with it must
/// open for the server `dn1`, or report why it does not.
pub fn version_file(input: &[u8]) {
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    let mut content = body.to_vec();
    if kind % 2 == 1 {
        content.extend(format!("crc32 {:08x}\n", crc32fast::hash(body)).bytes());
    }
    let volume = empty_volume();
    fs::write(volume.join("VERSION"), &content).expect("TMPDIR has room");
    let _ = Volume::open(
        &options(&volume),
        SERVER,
        Arc::new(RealDisk),
        1,
        &Progress::default(),
    );
}

/// The directory of the volume that contains a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Arbitrary)]
enum Place {
    Open,
    Sealed,
    Corrupt,
    Repair,
}

#[derive(Debug, Arbitrary)]
struct Chunk {
    fill: u8,
    checksum_matches: bool,
}

#[derive(Debug, Arbitrary)]
struct Replica {
    block: u8,
    place: Place,
    header_matches: bool,
    chunks: Vec<Chunk>,
    trailing_bytes: u16,
    /// Replaces all of the above, if not empty.
    raw: Vec<u8>,
}

/// What is read of a replica must be what was written to it; of an open one, no more than the chunks before the first
/// that does not match.
pub fn replica_files(input: &[u8]) {
    let Ok(mut replicas) = <Vec<Replica>>::arbitrary(&mut Unstructured::new(input)) else {
        return;
    };
    // One replica of each block, as ensured by the datanode.
    let mut seen = [false; BLOCKS as usize];
    replicas.retain(|replica| {
        !std::mem::replace(
            &mut seen[usize::from(replica.block) % BLOCKS as usize],
            true,
        )
    });
    let path = empty_volume();
    let body = format!("harvestfs-volume 1\nstorage {STORAGE}\ncluster -\nserver {SERVER}\n");
    let crc = crc32fast::hash(body.as_bytes());
    fs::write(path.join("VERSION"), format!("{body}crc32 {crc:08x}\n")).expect("TMPDIR has room");
    for replica in &mut replicas {
        replica.chunks.truncate(32);
        write(&path, replica);
    }
    let (volume, found) = Volume::open(
        &options(&path),
        SERVER,
        Arc::new(RealDisk),
        1,
        &Progress::default(),
    )
    .expect("the volume is good");
    let store = BlockStore::new(
        vec![(volume, found)],
        0,
        BufferPool::new(1 << 20),
        1 << 20,
        1,
    );
    for replica in &replicas {
        check(&store, replica);
    }
}

fn block_of(replica: &Replica) -> BlockId {
    BlockId(u64::from(replica.block) % BLOCKS)
}

fn check(store: &BlockStore, replica: &Replica) {
    let block = block_of(replica);
    let report = store.report(block).map(|(_, report)| report);
    let good = replica
        .chunks
        .iter()
        .take_while(|chunk| chunk.checksum_matches);
    let good_chunks = if replica.header_matches {
        good.count()
    } else {
        0
    };
    let is_raw = !replica.raw.is_empty();
    let length_bytes = report.map_or(0, |report| report.length_bytes);
    match replica.place {
        Place::Repair => assert!(report.is_none(), "a repair that was cut short"),
        Place::Open if !is_raw => {
            assert_eq!(length_bytes, (good_chunks * CHUNK_BYTES) as u64);
        }
        _ => {}
    }
    let Some(mut range) = ChunkRange::covering(0, length_bytes) else {
        return;
    };
    let mut chunks = 0;
    while let Some(piece) = range.take_piece(CHUNK_BYTES) {
        let read = RUNTIME.with_borrow(|runtime| runtime.block_on(store.read(block, piece, true)));
        let Ok(piece) = read else {
            // Only chunks that do not match may be refused, or chunks beyond those written that trailing bytes
            // pretend to be.
            let refusable = replica.chunks.iter().any(|chunk| !chunk.checksum_matches)
                || chunks >= replica.chunks.len();
            assert!(is_raw || refusable);
            return;
        };
        assert_eq!(piece.data.len(), CHUNK_BYTES);
        assert_eq!(crc32fast::hash(&piece.data), piece.checksums[0]);
        if !is_raw {
            let chunk = replica.chunks.get(chunks).expect("only what was written");
            assert!(chunk.checksum_matches);
            assert!(piece.data.iter().all(|byte| *byte == chunk.fill));
        }
        chunks += 1;
    }
}

/// Writes the layout of `datanode/src/store/layout.rs`, for one group.
fn write(volume: &Path, replica: &Replica) {
    let block = block_of(replica);
    let mut content = vec![0; CHUNK_BYTES];
    content[..8].copy_from_slice(b"HVFSREPL");
    content[8..12].copy_from_slice(&1_u32.to_le_bytes());
    content[12..20].copy_from_slice(&block.0.to_le_bytes());
    content[20..36].copy_from_slice(&STORAGE.0.to_le_bytes());
    let crc = crc32fast::hash(&content[..36]) ^ u32::from(!replica.header_matches);
    content[36..40].copy_from_slice(&crc.to_le_bytes());
    if !replica.chunks.is_empty() {
        let table_at = content.len();
        content.resize(table_at + CHUNK_BYTES, 0);
        for (index, chunk) in replica.chunks.iter().enumerate() {
            let start = content.len();
            content.resize(start + CHUNK_BYTES, chunk.fill);
            let crc = crc32fast::hash(&content[start..]) ^ u32::from(!chunk.checksum_matches);
            content[table_at + 4 * index..][..4].copy_from_slice(&crc.to_le_bytes());
        }
    }
    content.resize(content.len() + usize::from(replica.trailing_bytes), 0);
    if !replica.raw.is_empty() {
        content.clone_from(&replica.raw);
    }
    let directory = match replica.place {
        Place::Open => "open".to_owned(),
        Place::Sealed => format!("sealed/{:02x}", block.0 % 64),
        Place::Corrupt => "corrupt".to_owned(),
        Place::Repair => "repair".to_owned(),
    };
    let directory = volume.join(directory);
    fs::create_dir_all(&directory).expect("TMPDIR can be written");
    fs::write(directory.join(block.to_string()), content).expect("TMPDIR has room");
}

thread_local! {
    static RUNTIME: RefCell<tokio::runtime::Runtime> = RefCell::new(
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime"),
    );
}

fn options(path: &Path) -> VolumeOptions {
    VolumeOptions {
        path: path.to_owned(),
        quota_bytes: 1 << 30,
        class: StorageClass::Disk,
    }
}

fn empty_volume() -> PathBuf {
    let path = scratch().join("volume");
    let _ = fs::remove_dir_all(&path);
    fs::create_dir(&path).expect("TMPDIR can be written");
    path
}
