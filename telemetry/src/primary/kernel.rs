//! Files that the kernel generates when they are read: kept open, and read again from their start.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::SampleError;

/// More than any file that is read here contains; the rest is of no interest.
const BYTES_MAX: usize = 64 * 1024;

/// A file that the kernel generates.
#[derive(Debug)]
pub(super) struct KernelFile {
    path: PathBuf,
    file: File,
    buffer: Vec<u8>,
}

impl KernelFile {
    /// Opens it.
    pub(super) fn open(path: &Path) -> Result<Self, SampleError> {
        let file = File::open(path).map_err(|source| io(path, source))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            buffer: vec![0; 512],
        })
    }

    /// Opens it if it exists.
    pub(super) fn open_if_there(path: &Path) -> Option<Self> {
        Self::open(path).ok()
    }

    /// Returns its current text.
    pub(super) fn read(&mut self) -> Result<&str, SampleError> {
        let mut length = 0;
        loop {
            if length == self.buffer.len() {
                if length >= BYTES_MAX {
                    break;
                }
                self.buffer.resize(length * 2, 0);
            }
            let got = self.file.read_at(&mut self.buffer[length..], length as u64);
            match got.map_err(|source| io(&self.path, source))? {
                0 => break,
                more => length += more,
            }
        }
        // These files are ASCII, but a program's name in one of them may be anything.
        match std::str::from_utf8(&self.buffer[..length]) {
            Ok(text) => Ok(text),
            Err(error) => {
                Ok(std::str::from_utf8(&self.buffer[..error.valid_up_to()]).unwrap_or_default())
            }
        }
    }

    /// Returns the number that is its whole content.
    pub(super) fn number(&mut self) -> Result<u64, SampleError> {
        let number = self.read()?.trim().parse().ok();
        number.ok_or_else(|| self.format("a number"))
    }

    /// Returns the number after a word at the start of a line.
    pub(super) fn field(&mut self, name: &'static str) -> Result<u64, SampleError> {
        let found = field(self.read()?, name);
        found.ok_or_else(|| self.format(name))
    }

    /// Returns the error for missing content.
    pub(super) fn format(&self, what: &'static str) -> SampleError {
        SampleError::Format {
            path: self.path.display().to_string(),
            what,
        }
    }
}

fn io(path: &Path, source: std::io::Error) -> SampleError {
    SampleError::Io {
        path: path.display().to_string(),
        source,
    }
}

/// Returns the number after a word at the start of a line.
pub(super) fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        let rest = rest.strip_prefix(':').unwrap_or(rest);
        rest.starts_with([' ', '\t'])
            .then(|| rest.split_whitespace().next()?.parse().ok())?
    })
}

/// Parses a file of pressure stall information: microseconds in which some task waited.
pub(super) fn some_total_us(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("some "))?;
    line.split(' ')
        .find_map(|field| field.strip_prefix("total=")?.parse().ok())
}

/// Counts the cores in a list such as `0-3,8`.
pub(super) fn count_cores(list: &str) -> Option<u32> {
    let mut count = 0u32;
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

/// Returns the number of the machine's cores, including those that this process may not use; at least 1.
pub fn cores() -> u32 {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online");
    let cores = list.ok().and_then(|list| count_cores(&list));
    let usable = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
    cores.unwrap_or_else(usable).max(1)
}

/// Returns the machine's memory in MiB, if the kernel reports it.
pub fn memory_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some(field(&text, "MemTotal")? / 1_024)
}

/// The time in which tasks waited for CPU, memory and disks; the worst of the three counts.
#[derive(Debug)]
pub(super) struct Stalls {
    files: Vec<(KernelFile, super::Counter)>,
}

impl Stalls {
    /// Opens those of the files that exist.
    pub(super) fn open(paths: [PathBuf; 3]) -> Self {
        let files = paths
            .iter()
            .filter_map(|path| KernelFile::open_if_there(path));
        Self {
            files: files
                .map(|file| (file, super::Counter::default()))
                .collect(),
        }
    }

    /// Returns the share of the last `elapsed_us` microseconds.
    pub(super) fn share(&mut self, elapsed_us: u64) -> Option<f64> {
        let mut worst = None;
        for (file, counter) in &mut self.files {
            // A file that cannot be read is left out; the others still count.
            let total_us = file.read().ok().and_then(some_total_us);
            if let Some(growth) = total_us.and_then(|total| counter.growth(total)) {
                worst = worst.max(Some(growth));
            }
        }
        Some(worst? as f64 / elapsed_us as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_writes_is_understood() {
        assert_eq!(field("usage_usec 12\nuser_usec 7\n", "user_usec"), Some(7));
        assert_eq!(
            field("MemTotal:       24684092 kB\n", "MemTotal"),
            Some(24_684_092)
        );
        assert_eq!(field("MemTotalX: 1\n", "MemTotal"), None);
        assert_eq!(field("usage_usec\n", "usage_usec"), None);
        let text = "some avg10=0.25 avg60=5.98 avg300=19.45 total=7922781878\nfull total=1\n";
        assert_eq!(some_total_us(text), Some(7_922_781_878));
        assert_eq!(some_total_us("full avg10=0 total=1"), None);
        assert_eq!(count_cores("0-3,8\n"), Some(5));
        assert_eq!(count_cores("0\n"), Some(1));
        for bad in ["", "3-1", "a", "0-4294967295"] {
            assert_eq!(count_cores(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_file_is_read_anew_and_in_full() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "1\n").unwrap();
        let mut file = KernelFile::open(&path).unwrap();
        assert_eq!(file.number().unwrap(), 1);
        let long = format!("{}\nlast 7\n", "word 1\n".repeat(1000));
        std::fs::write(&path, &long).unwrap();
        assert_eq!(file.field("last").unwrap(), 7);
        std::fs::write(&path, "x").unwrap();
        assert!(
            file.number()
                .unwrap_err()
                .to_string()
                .contains("a number is not there")
        );
    }
}
