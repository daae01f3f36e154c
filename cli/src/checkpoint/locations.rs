//! Finds out from the namenode where the bytes of images are.

use std::fs::{self, File};
use std::path::Path;

use anyhow::Context;
use harvestfs_checkpoint::pages_file::copy_range;
use harvestfs_checkpoint::store::{Checkpoint, PROBE_PREFIX};
use rustix::io::Errno;

use crate::locations::{self, CUT_OFF, Location};

/// Maximum length in bytes of the list of a file's locations.
const LOCATIONS_BYTES_MAX: usize = 1 << 20;

/// The namenode's answer about a file.
struct Told {
    extents: Vec<Location>,
    /// Whether the extents cover the whole file.
    is_complete: bool,
}

impl Told {
    fn parse(text: &str) -> Self {
        let (extents, is_complete) = locations::parse(text);
        Self {
            extents,
            is_complete,
        }
    }

    /// Length of the prefix of a file of `size_bytes` that the answer covers: all of it, unless the answer was cut off.
    fn told_bytes(&self, size_bytes: u64) -> u64 {
        if self.is_complete {
            return size_bytes;
        }
        let last = self.extents.last();
        last.map_or(0, |it| it.end().min(size_bytes))
    }

    /// Bytes of a file of `size_bytes` of which a datanode has no replica. Bytes not covered by the answer count as
    /// missing.
    fn missing_in(&self, datanode: &str, size_bytes: u64) -> u64 {
        let lacking = |it: &&Location| it.datanodes.iter().all(|name| name != datanode);
        let missing = self.extents.iter().filter(lacking);
        let missing_bytes: u64 = missing.map(|it| it.length_bytes).sum();
        missing_bytes + (size_bytes - self.told_bytes(size_bytes))
    }

    /// Whether there is an extent without a replica on any datanode.
    fn names_nobody(&self) -> bool {
        self.extents.iter().any(|it| it.datanodes.is_empty())
    }
}

/// Asks the namenode. Returns `None` when the file is on another file system.
fn ask(path: &Path) -> anyhow::Result<Option<Told>> {
    let mut told = vec![0; LOCATIONS_BYTES_MAX];
    match rustix::fs::getxattr(path, locations::ATTRIBUTE, &mut told[..]) {
        Ok(length) => {
            let text = String::from_utf8_lossy(&told[..length]);
            Ok(Some(Told::parse(&text)))
        }
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(None),
        // The file has too many pieces to list.
        Err(Errno::RANGE | Errno::TOOBIG) => Ok(Some(Told::parse(CUT_OFF))),
        Err(error) => Err(error).with_context(|| format!("cannot ask where {} is", path.display())),
    }
}

/// Bytes of a checkpoint of which a datanode has no replica. On another file system, the locations are
/// unknown, and nothing counts as missing.
pub fn missing_bytes(checkpoint: &Checkpoint, datanode: &str) -> anyhow::Result<u64> {
    let mut missing_bytes = 0;
    for image in &checkpoint.manifest.images {
        missing_bytes += match ask(&checkpoint.directory.join(&image.name))? {
            Some(told) => told.missing_in(datanode, image.size_bytes),
            None => 0,
        };
    }
    Ok(missing_bytes)
}

/// Whether parts of a checkpoint's memory are on no running datanode. `work` is a directory on the same mount for
/// temporary files, which are removed when this returns.
pub fn has_lost_memory(checkpoint: &Checkpoint, work: &Path) -> anyhow::Result<bool> {
    let images = checkpoint.manifest.images.iter();
    let memory = images.filter(|image| image.has_pages());
    is_any_partly_lost(checkpoint, memory.map(|it| it.name.clone()), Some(work))
}

/// Whether anything that a restore of a checkpoint needs is on no running datanode. `work` is as above; without it,
/// no file is created, and anything beyond a cut-off answer is assumed to be available.
pub fn has_lost_parts(checkpoint: &Checkpoint, work: Option<&Path>) -> anyhow::Result<bool> {
    let images = checkpoint.manifest.images.iter();
    let names = images.flat_map(|image| {
        let table = image.has_pages().then(|| image.table_name());
        std::iter::once(image.name.clone()).chain(table)
    });
    is_any_partly_lost(checkpoint, names, work)
}

fn is_any_partly_lost(
    checkpoint: &Checkpoint,
    names: impl Iterator<Item = String>,
    work: Option<&Path>,
) -> anyhow::Result<bool> {
    for name in names {
        let path = checkpoint.directory.join(name);
        let metadata = fs::metadata(&path);
        let metadata = metadata.with_context(|| format!("cannot look at {}", path.display()))?;
        if is_partly_lost(&path, metadata.len(), work)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_partly_lost(path: &Path, size_bytes: u64, work: Option<&Path>) -> anyhow::Result<bool> {
    let Some(told) = ask(path)? else {
        return Ok(false);
    };
    if told.names_nobody() {
        return Ok(true);
    }
    let Some(work) = work else {
        return Ok(false);
    };
    let mut part_bytes = told.told_bytes(size_bytes);
    let mut done_bytes = part_bytes;
    // Asks for the rest with clones, which begin where the previous answer ended.
    while done_bytes < size_bytes {
        anyhow::ensure!(part_bytes > 0, "{} is in too many pieces", path.display());
        // As much as fits into one answer, or more if the pieces become larger.
        let length_bytes = part_bytes.saturating_mul(2).min(size_bytes - done_bytes);
        let clone = tempfile::Builder::new()
            .prefix(PROBE_PREFIX)
            .tempfile_in(work);
        let clone = clone.with_context(|| format!("cannot make a file in {}", work.display()))?;
        File::open(path)
            .and_then(|file| copy_range(&file, done_bytes, clone.as_file(), 0, length_bytes))
            .with_context(|| format!("cannot share pages of {}", path.display()))?;
        let told = ask(clone.path())?.context("a clone is on another file system")?;
        if told.names_nobody() {
            return Ok(true);
        }
        part_bytes = told.told_bytes(length_bytes);
        done_bytes += part_bytes;
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use harvestfs_tests::skip;

    use super::*;

    #[test]
    fn what_a_datanode_lacks_is_counted() {
        let locations = "0 100 02 a b\n100 50 03 b c\n150 7 04\n";
        let missing = |datanode| Told::parse(locations).missing_in(datanode, 200);
        assert_eq!((missing("a"), missing("b"), missing("d")), (57, 7, 157));
        assert_eq!(Told::parse("").missing_in("a", 200), 0);
        let cut_off = format!("{locations}...\n");
        let missing = |datanode| Told::parse(&cut_off).missing_in(datanode, 200);
        assert_eq!((missing("a"), missing("d")), (57 + 43, 157 + 43));
        assert_eq!(Told::parse(CUT_OFF).missing_in("a", 200), 200);
    }

    #[test]
    fn what_nobody_has_is_found() {
        assert!(Told::parse("0 100 02 a b\n100 50 03\n").names_nobody());
        assert!(Told::parse("0 100 02\n...\n").names_nobody());
        for whole in ["", "0 100 02 a\n", "0 100 02 a\n...\n", "..."] {
            assert!(!Told::parse(whole).names_nobody(), "{whole:?}");
        }
    }

    #[test]
    fn no_file_is_made_without_a_place_for_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("pages-1.img");
        fs::write(&path, [1_u8; 200]).expect("it is written");
        let tell = |told: &str| {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(path.as_path(), locations::ATTRIBUTE, told.as_bytes(), flags)
        };
        match tell("0 100 02 a\n...\n") {
            Err(Errno::NOTSUP) => {
                skip("attributes of users are needed where temporary files are (TMPDIR)");
                return;
            }
            told => told.expect("it is ours"),
        }
        // No file can be created here, so any attempt fails.
        let nowhere = directory.path().join("nowhere");
        is_partly_lost(&path, 200, Some(&nowhere)).expect_err("the rest is asked of a file");
        assert!(!is_partly_lost(&path, 200, None).expect("it is asked once"));
        tell("0 100 02\n...\n").expect("it is ours");
        assert!(is_partly_lost(&path, 200, None).expect("it is asked once"));
    }

    #[test]
    fn what_is_cut_off_is_not_told() {
        assert_eq!(
            Told::parse("0 100 02 a\n200 50 03 b\n").told_bytes(300),
            300
        );
        assert_eq!(Told::parse("").told_bytes(300), 300);
        assert_eq!(
            Told::parse("0 100 02 a\n200 50 03 b\n...\n").told_bytes(300),
            250
        );
        assert_eq!(Told::parse(CUT_OFF).told_bytes(300), 0);
    }
}
