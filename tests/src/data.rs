//! Verifiable data, and directory trees of it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Content by which any part of a file can be identified: each 8 bytes depend on the seed and the
/// offset.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    /// Distinguishes files.
    pub seed: u64,
}

impl Pattern {
    /// The bytes at `offset`, a multiple of 8.
    pub fn fill(self, offset: u64, buffer: &mut [u8]) {
        for (index, word) in buffer.chunks_mut(8).enumerate() {
            let mixed =
                mix(self.seed ^ (offset / 8 + index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            word.copy_from_slice(&mixed.to_le_bytes()[..word.len()]);
        }
    }

    /// The bytes of a whole file.
    #[must_use]
    pub fn bytes(self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.fill(0, &mut bytes);
        bytes
    }

    /// Checks `length` bytes of a file from `offset`, a multiple of 8.
    ///
    /// # Panics
    /// When a byte is wrong, or cannot be read.
    pub fn check(self, file: &File, offset: u64, length: usize) {
        let mut expected = vec![0; length];
        self.fill(offset, &mut expected);
        let mut found = vec![0; length];
        file.read_exact_at(&mut found, offset)
            .unwrap_or_else(|error| panic!("reading {length} bytes at {offset}: {error}"));
        if let Some(wrong) = expected.iter().zip(&found).position(|(e, f)| e != f) {
            panic!(
                "seed {}: wrong byte at {}",
                self.seed,
                offset + wrong as u64
            );
        }
    }
}

/// splitmix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Creates a tree like that of a source project: `files` files, most with a few kilobytes, in nested
/// directories, with symlinks, executables, empty files and some with megabytes.
///
/// # Panics
/// When it cannot be written.
pub fn make_source_tree(root: &Path, files: u64) {
    fs::create_dir_all(root).expect("the root");
    for number in 0..files {
        let random = mix(number);
        let directory = root
            .join(format!("part-{}", random % 17))
            .join(format!("module-{}", (random >> 8) % 13));
        fs::create_dir_all(&directory).expect("a directory");
        let length = match (random >> 16) % 100 {
            0..=4 => 0,
            5..=94 => 200 + (random >> 24) % 12_000,
            95..=98 => 20_000 + (random >> 24) % 200_000,
            _ => 1_000_000 + (random >> 24) % 2_000_000,
        };
        let path = directory.join(format!("file-{number}.rs"));
        let mut file = File::create(&path).expect("a file");
        file.write_all(&Pattern { seed: number }.bytes(length as usize))
            .expect("its content");
        if number % 50 == 0 {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a mode");
            symlink(
                format!("file-{number}.rs"),
                directory.join(format!("link-{number}")),
            )
            .expect("a symlink");
        }
    }
}

/// Compares two trees with `diff -r`, and also their modes.
///
/// # Panics
/// When they differ.
pub fn assert_same_tree(one: &Path, other: &Path) {
    let diff = Command::new("diff")
        .args(["-r", "--no-dereference"])
        .arg(one)
        .arg(other)
        .output()
        .expect("diff runs");
    assert!(
        diff.status.success(),
        "the trees differ:\n{}{}",
        String::from_utf8_lossy(&diff.stdout),
        String::from_utf8_lossy(&diff.stderr)
    );
    let mut pending = vec![(one.to_owned(), other.to_owned())];
    while let Some((one, other)) = pending.pop() {
        let (a, b) = (
            fs::symlink_metadata(&one).expect("an entry"),
            fs::symlink_metadata(&other).expect("an entry"),
        );
        assert_eq!(
            a.mode(),
            b.mode(),
            "{} and {}",
            one.display(),
            other.display()
        );
        if a.is_dir() {
            for entry in fs::read_dir(&one).expect("a directory") {
                let name = entry.expect("an entry").file_name();
                pending.push((one.join(&name), other.join(&name)));
            }
        }
    }
}

/// Reads a whole file in large pieces and checks it.
impl Pattern {
    /// Checks a whole file.
    ///
    /// # Panics
    /// When it is not exactly the pattern of `length` bytes.
    pub fn check_file(self, path: &Path, length: u64) {
        let mut file = File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut found = vec![0; 1 << 20];
        let mut expected = vec![0; 1 << 20];
        let mut offset = 0;
        while offset < length {
            let part = usize::try_from((length - offset).min(1 << 20)).expect("at most a MiB");
            file.read_exact(&mut found[..part])
                .unwrap_or_else(|e| panic!("{} at {offset}: {e}", path.display()));
            self.fill(offset, &mut expected[..part]);
            assert!(
                found[..part] == expected[..part],
                "{}: wrong bytes between {offset} and {}",
                path.display(),
                offset + part as u64
            );
            offset += part as u64;
        }
        assert_eq!(
            file.read(&mut found[..1]).expect("the end of the file"),
            0,
            "{} is longer than {length} bytes",
            path.display()
        );
    }
}

/// The sources of the libraries that these tests were built from, as unpacked by cargo: real
/// projects, one directory each, sorted by name.
///
/// # Panics
/// When there are none.
#[must_use]
pub fn library_sources() -> Vec<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cargo"),
        PathBuf::from,
    );
    let registries = fs::read_dir(home.join("registry/src")).expect("cargo's registry");
    let mut sources: Vec<_> = registries
        .flat_map(|registry| fs::read_dir(registry.expect("an entry").path()).expect("sources"))
        .map(|library| library.expect("an entry").path())
        .collect();
    sources.sort();
    assert!(!sources.is_empty(), "cargo has unpacked nothing");
    sources
}

/// Files below a directory.
///
/// # Panics
/// When it cannot be read.
#[must_use]
pub fn count_files(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).expect("a directory");
    entries
        .map(|entry| {
            let entry = entry.expect("an entry");
            if entry.file_type().expect("its kind").is_dir() {
                count_files(&entry.path())
            } else {
                1
            }
        })
        .sum()
}

/// Copies a directory as operators do, replacing an existing one, so that its files have new inodes.
///
/// # Panics
/// When it cannot be copied.
pub fn copy_directory(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.expect("cp runs").success());
}
