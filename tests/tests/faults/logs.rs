//! Logs: one that several processes share under a lock, and one that is followed on another mount.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, fcntl_lock, flock};

use crate::Workload;
use crate::worker::{Said, Worker, last_of};

/// One step of a worker; returns the number with which it answers.
pub type Step = Box<dyn FnMut() -> io::Result<u64>>;

const PAGE_BYTES: usize = 8192;
const RECORD_BYTES: usize = 100;
const RECORDS_PER_PAGE: usize = PAGE_BYTES / RECORD_BYTES;
/// Number of pages of a shared log that exist before, and are overwritten; after that, the log grows.
const PAGES_BEFORE: usize = 16;
/// Number of records after which a writer reopens a shared log.
const REOPENED_AFTER: u64 = 37;
/// Time within which an open descriptor shows changes by another mount (SEMANTICS, "Consistency").
const FOLLOWS_WITHIN: Duration = Duration::from_secs(2);
/// Interval at which a log is polled.
const FOLLOWS_EVERY: Duration = Duration::from_millis(10);

fn record(number: u64) -> [u8; RECORD_BYTES] {
    let mut record = [b'a' + (number % 26) as u8; RECORD_BYTES];
    record[..8].copy_from_slice(&number.to_le_bytes());
    record[RECORD_BYTES - 1] = b'\n';
    record
}

fn open_both_ways(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Works like group commit in a database: under a lock, each writer adds its record to the last page, which
/// all share, and writes that page; `fdatasync` follows after the lock is released.
pub struct SharedLog {
    pub mount: PathBuf,
    /// Directory of the writers' last page, outside the mount.
    pub local: PathBuf,
    /// `flock` or `fcntl`.
    pub lock: &'static str,
    pub writers: usize,
}

impl SharedLog {
    fn path(mount: &Path, lock: &str) -> PathBuf {
        mount.join("work").join(format!("{lock}.log"))
    }
}

impl Workload for SharedLog {
    fn name(&self) -> String {
        format!("log under {}", self.lock)
    }

    fn mount(&self) -> &'static str {
        "one"
    }

    fn prepare(&mut self) {
        let before = vec![0xaa; PAGES_BEFORE * PAGE_BYTES];
        fs::write(Self::path(&self.mount, self.lock), before).expect("write");
        fs::write(self.local.join(self.lock), [0; PAGE_BYTES + 8]).expect("write");
    }

    fn start(&mut self, _said: &BTreeMap<String, Vec<Said>>) -> Vec<Worker> {
        let log = Self::path(&self.mount, self.lock);
        let place = format!(
            "{}\n{}",
            log.display(),
            self.local.join(self.lock).display()
        );
        (0..self.writers)
            .map(|number| {
                let name = format!("{} {number}", self.name());
                // Only one of them keeps the log open.
                Worker::of_this_test(&name, self.lock, Path::new(&place), u64::from(number == 0))
            })
            .collect()
    }

    fn check(&self, mounts: [&Path; 2], said: &BTreeMap<String, Vec<Said>>) {
        for mount in mounts {
            let content = fs::read(Self::path(mount, self.lock)).expect("read");
            for (writer, said) in said {
                let lost = said.iter().filter(|(number, _)| {
                    let index = usize::try_from(*number).expect("it fits");
                    let at = index / RECORDS_PER_PAGE * PAGE_BYTES
                        + index % RECORDS_PER_PAGE * RECORD_BYTES;
                    content.get(at..at + RECORD_BYTES) != Some(&record(*number)[..])
                });
                assert_eq!(
                    lost.count(),
                    0,
                    "of {} of {writer} in {mount:?}",
                    said.len()
                );
            }
        }
    }
}

/// The steps of a writer of a [`SharedLog`].
pub fn append_to_shared_log(lock: &str, place: &str, keeps_open: bool) -> io::Result<Step> {
    let (path, state) = place.split_once('\n').expect("a log and a state");
    let state = open_both_ways(Path::new(state))?;
    let (path, uses_flock) = (PathBuf::from(path), lock == "flock");
    let locked = open_both_ways(&path.with_extension("lock"))?;
    let lock = move |operation| {
        if uses_flock {
            flock(&locked, operation)
        } else {
            fcntl_lock(&locked, operation)
        }
    };
    let mut log = open_both_ways(&path)?;
    let mut done: u64 = 0;
    Ok(Box::new(move || {
        done += 1;
        if !keeps_open && done.is_multiple_of(REOPENED_AFTER) {
            log = open_both_ways(&path)?;
        }
        lock(FlockOperation::LockExclusive)?;
        let mut last = [0; PAGE_BYTES + 8];
        state.read_exact_at(&mut last, 0)?;
        let (page, next) = last.split_at_mut(PAGE_BYTES);
        let number = u64::from_le_bytes((&*next).try_into().expect("8 bytes"));
        let index = usize::try_from(number).expect("it fits");
        let slot = index % RECORDS_PER_PAGE;
        if slot == 0 {
            page.fill(0);
        }
        page[slot * RECORD_BYTES..][..RECORD_BYTES].copy_from_slice(&record(number));
        next.copy_from_slice(&(number + 1).to_le_bytes());
        log.write_all_at(page, (index / RECORDS_PER_PAGE * PAGE_BYTES) as u64)?;
        state.write_all_at(&last, 0)?;
        lock(FlockOperation::Unlock)?;
        log.sync_data()?;
        Ok(number)
    }))
}

fn followed(mount: &Path) -> PathBuf {
    mount.join("work/followed.log")
}

/// Appends each record with a write of its own, and syncs it. Reports the number of records.
pub struct Appends {
    pub mount: PathBuf,
}

impl Workload for Appends {
    fn name(&self) -> String {
        "appends".to_owned()
    }

    fn mount(&self) -> &'static str {
        "one"
    }

    fn prepare(&mut self) {
        fs::write(followed(&self.mount), "").expect("write");
    }

    fn start(&mut self, said: &BTreeMap<String, Vec<Said>>) -> Vec<Worker> {
        let done = last_of(said, "appends");
        let log = followed(&self.mount);
        vec![Worker::of_this_test("appends", "append", &log, done)]
    }

    fn check(&self, mounts: [&Path; 2], said: &BTreeMap<String, Vec<Said>>) {
        for mount in mounts {
            let content = fs::read(followed(mount)).expect("read");
            let records = content.chunks(RECORD_BYTES).enumerate();
            let wrong = records.filter(|(number, found)| found != &record(*number as u64));
            assert_eq!(wrong.count(), 0, "in {mount:?}");
            let (acknowledged, _) = *said["appends"].last().expect("some");
            assert!(content.len() as u64 / RECORD_BYTES as u64 >= acknowledged);
        }
    }
}

/// The steps of [`Appends`].
pub fn append(place: &str, acknowledged: u64) -> io::Result<Step> {
    let mut log = OpenOptions::new().append(true).open(place)?;
    let size_bytes = log.metadata()?.len();
    let mut number = size_bytes / RECORD_BYTES as u64;
    if !size_bytes.is_multiple_of(RECORD_BYTES as u64) || number < acknowledged {
        let what = format!("{size_bytes} bytes, and {acknowledged} records were acknowledged");
        return Err(wrong(what));
    }
    Ok(Box::new(move || {
        log.write_all(&record(number))?;
        log.sync_data()?;
        number += 1;
        Ok(number)
    }))
}

/// Reads the records appended on the other mount, through one descriptor. Reports how many it has seen.
pub struct Follows {
    pub mount: PathBuf,
}

impl Workload for Follows {
    fn name(&self) -> String {
        "follows".to_owned()
    }

    fn mount(&self) -> &'static str {
        "other"
    }

    fn start(&mut self, said: &BTreeMap<String, Vec<Said>>) -> Vec<Worker> {
        let seen = last_of(said, "follows");
        let log = followed(&self.mount);
        vec![Worker::of_this_test("follows", "follow", &log, seen)]
    }
}

/// The steps of [`Follows`], which fail unless each record is seen completely, once, and in order.
pub fn follow(place: &str, mut seen: u64) -> io::Result<Step> {
    let log = File::open(place)?;
    Ok(Box::new(move || {
        sleep(FOLLOWS_EVERY);
        let mut content = [0; 100 * RECORD_BYTES];
        let length = match log.read_at(&mut content, seen * RECORD_BYTES as u64) {
            Ok(length) => length,
            // The file changes too fast to be opened consistently; see the exceptions in SEMANTICS.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        for found in content[..length].chunks(RECORD_BYTES) {
            if found != record(seen) {
                return Err(wrong(format!("record {seen} is {found:?}")));
            }
            seen += 1;
        }
        Ok(seen)
    }))
}

/// Checks the longest time from the acknowledgement of a record to its appearance on the other mount. Records
/// acknowledged during a fault (`disturbed`) count from its end.
pub fn check_followed(appended: &[Said], seen: &[Said], disturbed: &[(Instant, Instant)]) {
    let mut seen = seen.iter();
    let mut latest = Duration::ZERO;
    let Some(&(mut records, mut seen_at)) = seen.next() else {
        panic!("nothing was seen");
    };
    for &(number, acknowledged_at) in appended {
        while records < number {
            let next = seen.next();
            (records, seen_at) = *next.unwrap_or_else(|| panic!("{number} was never seen"));
        }
        let overlapping = disturbed
            .iter()
            .filter(|(begin, end)| *begin <= seen_at && acknowledged_at <= *end);
        let from = overlapping
            .map(|&(_, end)| end)
            .fold(acknowledged_at, Instant::max);
        latest = latest.max(seen_at.saturating_duration_since(from));
    }
    eprintln!("a record was seen on the other mount after {latest:?} at the latest");
    assert!(latest <= FOLLOWS_WITHIN, "{latest:?}");
}
