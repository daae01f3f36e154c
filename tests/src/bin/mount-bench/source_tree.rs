//! A source tree to unpack: a tar archive of a given directory, or of a synthetic one whose
//! shape (files per directory, depth, sizes) is that of a large source repository.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::target::scratch_directory;
use crate::work::Random;

const SYNTHETIC_FILES: u64 = 5200;
const FILES_PER_DIRECTORY: u64 = 13;

/// A tar archive of a source tree, on the local disk, removed when dropped.
#[derive(Debug)]
pub struct Tarball {
    dir: TempDir,
    files: u64,
    content_bytes: u64,
}

impl Tarball {
    /// Packs `tree`, or a synthetic tree if there is none, below `scratch`.
    pub fn build(tree: Option<&Path>, scratch: &Path) -> Result<Self> {
        let dir = scratch_directory(scratch, "mount-bench-tree-")?;
        let synthetic = dir.path().join("tree");
        let root = match tree {
            Some(tree) => tree,
            None => {
                write_synthetic_tree(&synthetic)?;
                &synthetic
            }
        };
        let (files, content_bytes) = count(root)?;
        ensure!(files > 0, "{} holds no files", root.display());
        run(Command::new("tar")
            .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
            .arg("-cf")
            .arg(dir.path().join("tree.tar"))
            .arg("-C")
            .arg(root)
            .arg("."))?;
        if synthetic.exists() {
            fs::remove_dir_all(&synthetic)?;
        }
        Ok(Self {
            dir,
            files,
            content_bytes,
        })
    }

    /// The number of files in the archive.
    pub fn files(&self) -> u64 {
        self.files
    }

    /// The sum of the files' sizes.
    pub fn content_bytes(&self) -> u64 {
        self.content_bytes
    }

    /// Unpacks the archive below `target`, which exists, with `tar`.
    pub fn unpack(&self, target: &Path) -> Result<()> {
        run(Command::new("tar")
            .args(["--no-same-owner", "-xf"])
            .arg(self.path())
            .arg("-C")
            .arg(target))
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("tree.tar")
    }
}

/// Removes a tree with `rm -rf`.
pub fn remove(tree: &Path) -> Result<()> {
    run(Command::new("rm").arg("-rf").arg(tree))
}

fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?} failed: {status}");
    Ok(())
}

/// Numbers and sizes of the regular files below `dir`.
fn count(dir: &Path) -> Result<(u64, u64)> {
    let mut pending = vec![dir.to_owned()];
    let (mut files, mut bytes) = (0, 0);
    while let Some(dir) = pending.pop() {
        let entries =
            fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
        for entry in entries {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                pending.push(entry.path());
            } else if metadata.is_file() {
                files += 1;
                bytes += metadata.len();
            }
        }
    }
    Ok((files, bytes))
}

fn write_synthetic_tree(root: &Path) -> Result<()> {
    let mut random = Random::new(0x7265_6569);
    let text = source_text(&mut random);
    // Each new directory goes below a random earlier one: most are three to eight levels deep.
    let mut directories = vec![root.to_owned()];
    fs::create_dir_all(root)?;
    for number in 0..SYNTHETIC_FILES {
        if number % FILES_PER_DIRECTORY == 0 {
            let parent = &directories[random.below(directories.len() as u64) as usize];
            let dir = parent.join(format!("module_{number:04}"));
            fs::create_dir(&dir)?;
            directories.push(dir);
        }
        let dir = &directories[directories.len() - 1];
        let size = source_size(&mut random);
        let begin = random.below((text.len() - size) as u64) as usize;
        fs::write(
            dir.join(format!("source_{number:04}.rs")),
            &text[begin..begin + size],
        )?;
    }
    Ok(())
}

/// The size of one source file: half of them below 4 KiB, a few of 40 to 200 KiB, 10 KiB on average.
fn source_size(random: &mut Random) -> usize {
    let (from, to) = match random.below(100) {
        0..25 => (200, 1024),
        25..60 => (1024, 4096),
        60..85 => (4096, 12 * 1024),
        85..97 => (12 * 1024, 40 * 1024),
        _ => (40 * 1024, 200 * 1024),
    };
    (from + random.below(to - from)) as usize
}

/// Lines that look like code, a megabyte of them.
fn source_text(random: &mut Random) -> Vec<u8> {
    const WORDS: [&str; 16] = [
        "let", "match", "self", "block", "Some", "return", "offset", "=", "=>", "(", ")", "&mut",
        "length", "fn", "pub", "impl",
    ];
    let mut text = Vec::new();
    while text.len() < 1 << 20 {
        for _ in 0..random.below(12) {
            let word = WORDS[random.below(WORDS.len() as u64) as usize];
            text.extend_from_slice(word.as_bytes());
            text.push(b' ');
        }
        text.extend_from_slice(format!("x{};\n", random.below(100_000)).as_bytes());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_synthetic_tree_has_the_promised_shape_and_unpacks() {
        let scratch = tempfile::tempdir().unwrap();
        let tarball = Tarball::build(None, scratch.path()).unwrap();
        assert_eq!(tarball.files(), SYNTHETIC_FILES);
        let mean_bytes = tarball.content_bytes() / tarball.files();
        assert!((7_000..14_000).contains(&mean_bytes), "{mean_bytes}");

        let target = scratch.path().join("unpacked");
        fs::create_dir(&target).unwrap();
        tarball.unpack(&target).unwrap();
        let counted = count(&target).unwrap();
        assert_eq!(counted, (tarball.files(), tarball.content_bytes()));
        remove(&target).unwrap();
        assert!(!target.exists());
    }
}
