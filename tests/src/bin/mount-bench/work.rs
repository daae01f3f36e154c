//! The work itself, on any directory. All data that is read is verified: a fast wrong answer is worthless.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::fs::{Advice, fadvise};

use crate::interrupt;

/// Size of one random read and of one small file.
pub const PAGE_BYTES: u64 = 4096;
const REQUEST_BYTES: u64 = 1 << 20;
/// Minimum duration for which the stat rows repeat their round.
const STAT_DURATION_MIN: Duration = Duration::from_secs(1);

/// A small generator of pseudo-random numbers (SplitMix64): the same work in every run.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator that `seed` decides.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// `len` bytes that do not compress.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

/// Writes a new file of `size_bytes` (whole pages) in requests of 1 MiB, then fsync and close.
///
/// Every page begins with its own number, the rest does not compress.
pub fn write_file(path: &Path, size_bytes: u64) -> Result<()> {
    let mut request = Random::new(1).bytes(REQUEST_BYTES as usize);
    let mut file = File::create_new(path)?;
    let mut offset = 0;
    while offset < size_bytes {
        interrupt::check()?;
        let len = REQUEST_BYTES.min(size_bytes - offset) as usize;
        for (index, page) in request.chunks_mut(PAGE_BYTES as usize).enumerate() {
            let number = offset / PAGE_BYTES + index as u64;
            page[..8].copy_from_slice(&number.to_le_bytes());
        }
        file.write_all(&request[..len])?;
        offset += len as u64;
    }
    file.sync_all()?;
    Ok(())
}

/// Reads a file of [`write_file`] from beginning to end in requests of 1 MiB.
pub fn read_file(path: &Path, size_bytes: u64) -> Result<()> {
    let mut file = File::open(path)?;
    let mut request = vec![0; REQUEST_BYTES as usize];
    let mut offset = 0;
    while offset < size_bytes {
        interrupt::check()?;
        let len = REQUEST_BYTES.min(size_bytes - offset) as usize;
        file.read_exact(&mut request[..len])?;
        for (index, page) in request[..len].chunks(PAGE_BYTES as usize).enumerate() {
            check_page(page, offset / PAGE_BYTES + index as u64)?;
        }
        offset += len as u64;
    }
    Ok(())
}

/// Reads pages of a file of [`write_file`] in random order, `reads` in each of `threads` threads.
pub fn random_reads(path: &Path, size_bytes: u64, threads: u64, reads: u64) -> Result<()> {
    let pages = size_bytes / PAGE_BYTES;
    in_threads(threads, |thread| {
        let file = File::open(path)?;
        // Without this, the kernel reads ahead, and a page may be cached before it is requested.
        fadvise(&file, 0, NonZeroU64::new(size_bytes), Advice::Random)?;
        let mut random = Random::new(1000 + threads * 100 + thread);
        let mut page = vec![0; PAGE_BYTES as usize];
        for _ in 0..reads {
            interrupt::check()?;
            let number = random.below(pages);
            file.read_exact_at(&mut page, number * PAGE_BYTES)?;
            check_page(&page, number)?;
        }
        Ok(())
    })
}

fn check_page(page: &[u8], number: u64) -> Result<()> {
    ensure!(
        page.get(..8) == Some(&number.to_le_bytes()[..]),
        "page {number} holds other data than was written"
    );
    Ok(())
}

/// Small files, split evenly over threads, in one directory for each thread.
#[derive(Debug)]
pub struct SmallFiles {
    dir: PathBuf,
    threads: u64,
    files_per_thread: u64,
    /// First letter of every file's name.
    prefix: char,
}

impl SmallFiles {
    /// Makes the directories below `dir`, which is created; `files` is the number over all threads.
    pub fn new(dir: &Path, threads: u64, files: u64) -> Result<Self> {
        for thread in 0..threads {
            fs::create_dir_all(dir.join(thread.to_string()))?;
        }
        Ok(Self {
            dir: dir.to_owned(),
            threads,
            files_per_thread: files / threads,
            prefix: 'a',
        })
    }

    /// The number of files over all threads.
    pub fn count(&self) -> u64 {
        self.threads * self.files_per_thread
    }

    /// Creates, writes and closes every file; with `sync`, fsync before each close.
    pub fn create(&self, sync: bool) -> Result<()> {
        let content = Random::new(2).bytes(PAGE_BYTES as usize);
        self.for_each(|path| {
            let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
            file.write_all(&content)?;
            if sync {
                file.sync_all()?;
            }
            Ok(())
        })
    }

    /// One stat of every file.
    pub fn stat_once(&self) -> Result<()> {
        self.for_each(|path| {
            let metadata = fs::symlink_metadata(path)?;
            ensure!(metadata.len() == PAGE_BYTES, "{path:?} has another size");
            Ok(())
        })
    }

    /// Rounds of [`stat_once`](Self::stat_once) for about a second; returns the number of calls.
    pub fn stat_repeatedly(&self) -> Result<u64> {
        let started = Instant::now();
        let mut calls = 0;
        while started.elapsed() < STAT_DURATION_MIN {
            self.stat_once()?;
            calls += self.count();
        }
        Ok(calls)
    }

    /// Gives every file another name in the same directory.
    pub fn rename(&mut self) -> Result<()> {
        let prefix = 'b';
        self.for_each(|path| Ok(fs::rename(path, renamed(path, prefix)?)?))?;
        self.prefix = prefix;
        Ok(())
    }

    /// Removes every file.
    pub fn unlink(&self) -> Result<()> {
        self.for_each(|path| Ok(fs::remove_file(path)?))
    }

    /// Calls `work` with every file's path, each thread in an order of its own.
    fn for_each(&self, work: impl Fn(&Path) -> Result<()> + Sync) -> Result<()> {
        in_threads(self.threads, |thread| {
            let dir = self.dir.join(thread.to_string());
            for number in shuffled(self.files_per_thread, thread) {
                interrupt::check()?;
                let path = dir.join(format!("{}{number:06}", self.prefix));
                work(&path).with_context(|| path.display().to_string())?;
            }
            Ok(())
        })
    }
}

/// `path` with another first letter in its last component, which is ASCII.
fn renamed(path: &Path, prefix: char) -> Result<PathBuf> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .with_context(|| format!("{path:?} has no name"))?;
    Ok(path.with_file_name(format!("{prefix}{}", &name[1..])))
}

/// The numbers below `count` in an order that `seed` decides.
fn shuffled(count: u64, seed: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    let mut random = Random::new(seed);
    for last in (1..numbers.len()).rev() {
        let other = random.below(last as u64 + 1) as usize;
        numbers.swap(last, other);
    }
    numbers
}

/// Runs `work` with the numbers below `threads`, each in a thread; the first error counts.
fn in_threads(threads: u64, work: impl Fn(u64) -> Result<()> + Sync) -> Result<()> {
    let work = &work;
    thread::scope(|scope| {
        // Collected first: all threads run before one is waited for.
        let handles: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        handles.into_iter().try_for_each(|handle| {
            handle
                .join()
                .unwrap_or_else(|_| Err(anyhow!("a worker thread panicked")))
        })
    })
}

/// Fails when the file system of `dir` has less than `needed_bytes` free.
pub fn require_space(dir: &Path, needed_bytes: u64) -> Result<()> {
    let free_bytes = harvestfs_tests::free_bytes(dir)?;
    if free_bytes < needed_bytes {
        bail!(
            "{}: {} MiB are free and {} MiB are needed; see --size-mib and --scratch",
            dir.display(),
            free_bytes >> 20,
            needed_bytes >> 20
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_back_and_a_change_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let size_bytes = 3 * REQUEST_BYTES / 2;
        write_file(&path, size_bytes).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), size_bytes);
        read_file(&path, size_bytes).unwrap();
        random_reads(&path, size_bytes, 4, 100).unwrap();

        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[0xff], 5 * PAGE_BYTES).unwrap();
        let error = read_file(&path, size_bytes).unwrap_err();
        assert!(error.to_string().contains("page 5 "), "{error}");
    }

    #[test]
    fn small_files_go_through_all_their_operations() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = SmallFiles::new(&dir.path().join("small"), 3, 31).unwrap();
        assert_eq!(files.count(), 30);
        files.create(true).unwrap();
        files.stat_once().unwrap();
        files.rename().unwrap();
        assert!(dir.path().join("small/0/b000000").exists());
        files.stat_once().unwrap();
        files.unlink().unwrap();
        assert_eq!(fs::read_dir(dir.path().join("small/0")).unwrap().count(), 0);
    }

    #[test]
    fn the_order_is_a_permutation_and_repeats() {
        let mut numbers = shuffled(100, 7);
        assert_eq!(numbers, shuffled(100, 7));
        assert_ne!(numbers, shuffled(100, 8));
        numbers.sort_unstable();
        assert_eq!(numbers, (0..100).collect::<Vec<_>>());
    }
}
