//! Bit rot: one bit of a block file flips.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use harvestfs_protocol::replica_layout::{
    ENTRY_BYTES, PAGE_BYTES, chunk_position, chunks_within, entry_position,
};
use rand::{Rng, RngExt};

/// A bit that was flipped.
pub(crate) struct Flipped {
    /// The block of the replica.
    pub block: u64,
    path: PathBuf,
    offset: u64,
    /// The byte after the flip.
    byte: u8,
}

impl Flipped {
    /// Whether the rotten replica is still there: its datanode has neither moved it aside nor
    /// removed it, nor created a new one in its place.
    pub fn is_there(&self) -> bool {
        let mut byte = [0];
        let file = File::open(&self.path);
        match file.and_then(|file| file.read_exact_at(&mut byte, self.offset)) {
            Ok(()) => byte == [self.byte],
            // Another failure proves nothing.
            Err(error) => !matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof
            ),
        }
    }
}

/// The path of a sealed block's file.
fn path_of(volume: &Path, block: u64) -> io::Result<Option<PathBuf>> {
    let name = format!("{block:016x}");
    for directory in std::fs::read_dir(volume.join("sealed"))? {
        let path = directory?.path().join(&name);
        if path.exists() {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Flips one bit of a chunk of a sealed block, or of the chunk's checksum, both of which the scrubber reads. Returns
/// `None` if the block has been removed in the meantime, or has no chunk.
///
/// # Errors
/// When the file cannot be changed.
pub(crate) fn flip_bit(
    volume: &Path,
    block: u64,
    rng: &mut impl Rng,
) -> io::Result<Option<Flipped>> {
    let Some(path) = path_of(volume, block)? else {
        return Ok(None);
    };
    let file = File::options().read(true).write(true).open(&path)?;
    let chunks = chunks_within(file.metadata()?.len()).unwrap_or(0);
    if chunks == 0 {
        return Ok(None);
    }
    let chunk = rng.random_range(0..chunks);
    let place = rng.random_range(0..PAGE_BYTES + ENTRY_BYTES) as u64;
    let offset = match place.checked_sub(PAGE_BYTES as u64) {
        None => chunk_position(chunk) + place,
        Some(place) => entry_position(chunk) + place,
    };
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset)?;
    byte[0] ^= 1 << rng.random_range(0..8);
    file.write_all_at(&byte, offset)?;
    // Datanodes read block files bypassing the page cache.
    file.sync_all()?;
    Ok(Some(Flipped {
        block,
        path,
        offset,
        byte: byte[0],
    }))
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::replica_layout::file_bytes;

    use super::*;
    use crate::random;

    #[test]
    fn one_bit_flips_where_the_scrubber_looks_and_is_seen_until_the_file_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let sealed = directory.path().join("sealed/05");
        std::fs::create_dir_all(&sealed).unwrap();
        let file = sealed.join("0000000000000005");
        let sound = vec![0; usize::try_from(file_bytes(2)).unwrap()];
        for seed in 0..50 {
            std::fs::write(&file, &sound).unwrap();
            let mut rng = random::stream(seed, "test");
            let flipped = flip_bit(directory.path(), 5, &mut rng).unwrap().unwrap();
            let rotten = std::fs::read(&file).unwrap();
            let ones: u32 = rotten.iter().map(|byte| byte.count_ones()).sum();
            let place = rotten.iter().position(|&byte| byte != 0).unwrap();
            assert_eq!(ones, 1);
            let entries = usize::try_from(entry_position(0)).unwrap();
            let chunks = usize::try_from(chunk_position(0)).unwrap();
            assert!((entries..entries + 2 * ENTRY_BYTES).contains(&place) || place >= chunks);
            assert!(flipped.is_there());
            std::fs::write(&file, &sound).unwrap();
            assert!(!flipped.is_there());
        }
        std::fs::remove_file(&file).unwrap();
        let mut rng = random::stream(1, "test");
        assert!(flip_bit(directory.path(), 5, &mut rng).unwrap().is_none());
    }
}
