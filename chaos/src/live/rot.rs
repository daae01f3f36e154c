//! Bit rot: one bit of a block file flips.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use rand::{Rng, RngExt};

/// Where a sealed block's file is.
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

/// Flips one bit of a sealed block. Returns false when it is gone meanwhile.
///
/// # Errors
/// When the file cannot be changed.
pub(crate) fn flip_bit(volume: &Path, block: u64, rng: &mut impl Rng) -> io::Result<bool> {
    let Some(path) = path_of(volume, block)? else {
        return Ok(false);
    };
    let file = File::options().read(true).write(true).open(path)?;
    let length = file.metadata()?.len();
    if length == 0 {
        return Ok(false);
    }
    let offset = rng.random_range(0..length);
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset)?;
    byte[0] ^= 1 << rng.random_range(0..8);
    file.write_all_at(&byte, offset)?;
    // Block files are read past the page cache.
    file.sync_all()?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    #[test]
    fn one_bit_flips() {
        let directory = tempfile::tempdir().unwrap();
        let sealed = directory.path().join("sealed/05");
        std::fs::create_dir_all(&sealed).unwrap();
        let file = sealed.join("0000000000000005");
        std::fs::write(&file, [0; 100]).unwrap();
        let mut rng = random::stream(1, "test");
        assert!(flip_bit(directory.path(), 5, &mut rng).unwrap());
        let ones: u32 = std::fs::read(&file)
            .unwrap()
            .iter()
            .map(|byte| byte.count_ones())
            .sum();
        assert_eq!(ones, 1);
        assert!(!flip_bit(directory.path(), 6, &mut rng).unwrap());
    }
}
