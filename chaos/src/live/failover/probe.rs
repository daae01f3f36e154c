//! A program on a mount that notices every pause, and what was promised to it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt;
use rustix::fs::{Advice, fadvise};
use serde::Serialize;

use crate::live::LiveError;
use crate::random;

/// An operation that the program repeats, on a thread of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Looks up a name for the first time, in a directory that was never listed, so that no cache has the answer.
    Stat,
    /// Creates a file, writes it, syncs and closes it.
    Create,
    /// Writes at the end of an open file, and syncs it.
    Write,
    /// Reads a piece of a file that neither the kernel nor the client has cached.
    Read,
}

impl Operation {
    /// All operations, in the order in which they are shown.
    pub const ALL: [Self; 4] = [Self::Stat, Self::Create, Self::Write, Self::Read];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stat => "stat",
            Self::Create => "create",
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// A directory that was made by another client, and is never listed on the mount.
pub(super) const STRANGE: &str = "strange";
const CREATED: &str = "created";
const WRITTEN: &str = "written";
const READ: &str = "read";
/// Files in one directory.
const DIRECTORY_FILES: u64 = 1_000;
const RECORD_BYTES: usize = 64;
/// The size of the file that is read: far more than the client caches of what it has written.
const READ_BYTES: u64 = 64 << 20;
const PIECE_BYTES: usize = 4_096;
/// The pause between two operations of a thread.
const PAUSE: Duration = Duration::from_millis(3);
/// How long an operation may take once everything is healed.
const END_DEADLINE: Duration = Duration::from_secs(120);
/// How long preparation or comparison on a mount may make no progress: everything that is prepared is synced in one go.
const STUCK_DEADLINE: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(5);
/// The number of errors and missing items whose text is kept.
const TEXTS_MAX: usize = 10;

/// How often something was wrong, and the first descriptions.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Wrong {
    /// The number of occurrences.
    pub count: u64,
    /// The first descriptions.
    pub first: Vec<String>,
}

impl Wrong {
    pub(super) fn note(&mut self, text: String) {
        self.count += 1;
        if self.first.len() < TEXTS_MAX {
            self.first.push(text);
        }
    }
}

#[derive(Debug, Default)]
struct Seen {
    /// The longest duration of each operation since the round began.
    longest: [Duration; Operation::ALL.len()],
    done: [u64; Operation::ALL.len()],
    errors: Wrong,
    /// The numbers of files and of records whose sync returned.
    created: Vec<u64>,
    written: Vec<u64>,
}

/// The program. Its threads end after it is dropped, or with their mount if they wait for that.
pub(super) struct Probe {
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// What was promised to the program, and what it observed.
pub(super) struct Promised {
    created: Vec<u64>,
    written: Vec<u64>,
    /// The number of operations of each kind.
    pub operations: [u64; Operation::ALL.len()],
    /// Errors of system calls, and wrong bytes that were read.
    pub errors: Wrong,
}

impl Probe {
    /// Starts the program on a mount that has the directory [`STRANGE`].
    pub fn start(mount: &Path, seed: u64, go_on: &dyn Fn() -> bool) -> Result<Self, LiveError> {
        let at = mount.to_owned();
        let work = move |done: &AtomicU64| prepare(&at, done);
        let prepared = apart("writing what is to be read", STUCK_DEADLINE, go_on, work)?;
        let (written, read) = prepared.map_err(LiveError::io("write what is to be read"))?;
        let mut probe = Self {
            seen: Arc::default(),
            stop: Arc::default(),
            threads: Vec::new(),
        };
        let strange = mount.join(STRANGE);
        probe.repeat(
            Operation::Stat,
            move |number, _| match fs::symlink_metadata(strange.join(number.to_string())) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                Err(error) => Err(error),
                Ok(_) => Err(io::Error::other("there is a file that nobody made")),
            },
        )?;
        let created = mount.join(CREATED);
        probe.repeat(Operation::Create, move |number, seen| {
            create(&created, number)?;
            seen.lock().created.push(number);
            Ok(())
        })?;
        probe.repeat(Operation::Write, move |number, seen| {
            written.write_all_at(&record(number), number * RECORD_BYTES as u64)?;
            written.sync_data()?;
            seen.lock().written.push(number);
            Ok(())
        })?;
        let mut rng = random::stream(seed, "what is read");
        probe.repeat(Operation::Read, move |_, _| {
            let at = rng.random_range(0..READ_BYTES / PIECE_BYTES as u64) * PIECE_BYTES as u64;
            // For the whole file, since the kernel reads ahead.
            fadvise(&read, 0, None, Advice::DontNeed)?;
            let mut piece = vec![0; PIECE_BYTES];
            read.read_exact_at(&mut piece, at)?;
            let same = piece == piece_at(at);
            same.then_some(())
                .ok_or_else(|| io::Error::other(format!("wrong bytes at {at}")))
        })?;
        Ok(probe)
    }

    fn repeat(
        &mut self,
        operation: Operation,
        mut once: impl FnMut(u64, &Mutex<Seen>) -> io::Result<()> + Send + 'static,
    ) -> Result<(), LiveError> {
        let (seen, stop) = (Arc::clone(&self.seen), Arc::clone(&self.stop));
        let thread = thread::Builder::new()
            .name(format!("probe-{}", operation.name()))
            .spawn(move || {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let began = Instant::now();
                    let outcome = once(number, &seen);
                    let took = began.elapsed();
                    let mut seen = seen.lock();
                    let at = operation as usize;
                    seen.longest[at] = seen.longest[at].max(took);
                    seen.done[at] += 1;
                    if let Err(error) = outcome {
                        seen.errors
                            .note(format!("{} {number}: {error}", operation.name()));
                    }
                    drop(seen);
                    thread::sleep(PAUSE);
                }
            })
            .map_err(LiveError::io("start a thread"))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Begins a round: earlier pauses do not count any more.
    pub fn begin_round(&self) {
        self.seen.lock().longest = Default::default();
    }

    /// Waits until each thread has completed an operation that it began after this call, and returns the longest pause
    /// of each operation since the round began.
    pub fn end_round(
        &self,
        go_on: &dyn Fn() -> bool,
    ) -> Result<[Duration; Operation::ALL.len()], LiveError> {
        let before = self.seen.lock().done;
        let deadline = Instant::now() + END_DEADLINE;
        loop {
            {
                let seen = self.seen.lock();
                // The first operation to end may have begun before the call.
                if before
                    .iter()
                    .zip(seen.done)
                    .all(|(before, now)| now >= before + 2)
                {
                    return Ok(seen.longest);
                }
            }
            if !go_on() {
                return Err(LiveError::Interrupted);
            }
            if Instant::now() > deadline {
                return Err(does_not_end());
            }
            thread::sleep(POLL);
        }
    }

    /// Stops the program and waits for its end. If this fails, threads that wait for the mount end with it.
    pub fn finish(mut self, go_on: &dyn Fn() -> bool) -> Result<Promised, LiveError> {
        self.stop.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + END_DEADLINE;
        while !self.threads.iter().all(JoinHandle::is_finished) {
            if !go_on() {
                return Err(LiveError::Interrupted);
            }
            if Instant::now() > deadline {
                return Err(does_not_end());
            }
            thread::sleep(POLL);
        }
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
        let seen = std::mem::take(&mut *self.seen.lock());
        Ok(Promised {
            created: seen.created,
            written: seen.written,
            operations: seen.done,
            errors: seen.errors,
        })
    }
}

fn does_not_end() -> LiveError {
    let seconds = END_DEADLINE.as_secs();
    let text = format!("an operation did not end within {seconds} s after all was healed");
    LiveError::Cluster(text)
}

impl Drop for Probe {
    fn drop(&mut self) {
        // Threads that wait for a mount end with that, which may be later.
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Promised {
    /// Looks for every name and byte whose sync returned, on a mount with empty caches. Returns how many were
    /// looked for, and what is missing.
    pub fn compare(
        &mut self,
        mount: &Path,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(u64, Wrong), LiveError> {
        let created = std::mem::take(&mut self.created);
        let written = std::mem::take(&mut self.written);
        let looked_for = created.len() + written.len();
        let at = mount.to_owned();
        let work = move |done: &AtomicU64| missing(&at, &created, &written, done);
        let missing = apart("reading what was promised", STUCK_DEADLINE, go_on, work)?;
        let missing = missing.map_err(LiveError::io("open what was written"))?;
        Ok((looked_for as u64, missing))
    }
}

/// Runs `work`, which may wait for a mount forever, on another thread. Waits for it as long as it makes progress, which
/// it counts, and `go_on` returns true. If this fails, the thread ends with the mount.
fn apart<T: Send + 'static>(
    what: &str,
    patience: Duration,
    go_on: &dyn Fn() -> bool,
    work: impl FnOnce(&AtomicU64) -> T + Send + 'static,
) -> Result<T, LiveError> {
    let (tell, told) = mpsc::channel();
    let done = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&done);
    thread::Builder::new()
        .name("apart".into())
        .spawn(move || {
            // Nothing receives the result if it took too long.
            let _ = tell.send(work(&counted));
        })
        .map_err(LiveError::io("start a thread"))?;
    let mut before = 0;
    let mut deadline = Instant::now() + patience;
    loop {
        match told.recv_timeout(POLL) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(LiveError::Cluster(format!("{what} panicked")));
            }
        }
        if !go_on() {
            return Err(LiveError::Interrupted);
        }
        let now = done.load(Ordering::Relaxed);
        if now != before {
            before = now;
            deadline = Instant::now() + patience;
        }
        if Instant::now() > deadline {
            let seconds = patience.as_secs();
            let text = format!("{what} got no further for {seconds} s");
            return Err(LiveError::Cluster(text));
        }
    }
}

/// What is missing on a mount of what was created and written. Counts its progress.
fn missing(mount: &Path, created: &[u64], written: &[u64], done: &AtomicU64) -> io::Result<Wrong> {
    let mut missing = Wrong::default();
    let below = mount.join(CREATED);
    for &number in created {
        match fs::read(file_path(&below, number)) {
            Ok(found) if found == record(number) => {}
            Ok(_) => missing.note(format!("file {number} has other content")),
            Err(error) => missing.note(format!("file {number}: {error}")),
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    let file = File::open(mount.join(WRITTEN))?;
    for &number in written {
        let mut found = [0; RECORD_BYTES];
        match file.read_exact_at(&mut found, number * RECORD_BYTES as u64) {
            Ok(()) if found == record(number) => {}
            Ok(()) => missing.note(format!("record {number} has other content")),
            Err(error) => missing.note(format!("record {number}: {error}")),
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    Ok(missing)
}

/// Makes what the program needs, and returns the files to write and to read. Counts its progress.
fn prepare(mount: &Path, done: &AtomicU64) -> io::Result<(File, File)> {
    fs::create_dir(mount.join(CREATED))?;
    let mut read = File::create_new(mount.join(READ))?;
    for at in (0..READ_BYTES).step_by(PIECE_BYTES) {
        read.write_all(&piece_at(at))?;
        done.fetch_add(1, Ordering::Relaxed);
    }
    read.sync_all()?;
    let written = File::create_new(mount.join(WRITTEN))?;
    Ok((written, File::open(mount.join(READ))?))
}

fn create(below: &Path, number: u64) -> io::Result<()> {
    let path = file_path(below, number);
    if number.is_multiple_of(DIRECTORY_FILES) {
        fs::create_dir(path.parent().unwrap_or(below))?;
    }
    let mut file = File::create_new(path)?;
    file.write_all(&record(number))?;
    file.sync_all()
}

fn file_path(below: &Path, number: u64) -> PathBuf {
    below
        .join((number / DIRECTORY_FILES).to_string())
        .join(number.to_string())
}

/// The contents of a record, different for each number.
fn record(number: u64) -> [u8; RECORD_BYTES] {
    let mut record = [b'.'; RECORD_BYTES];
    let text = format!("{number:020}");
    record[..text.len()].copy_from_slice(text.as_bytes());
    record[RECORD_BYTES - 1] = b'\n';
    record
}

fn piece_at(at: u64) -> Vec<u8> {
    (at..at + PIECE_BYTES as u64)
        .step_by(8)
        .flat_map(|offset| (offset ^ 0x5bd1_e995_0000_0000).to_le_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Long enough for work that ends, on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_was_prepared_and_promised_is_found_and_what_was_not_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let made = at.to_owned();
        let prepared = apart("it", LONG, &|| true, move |done| prepare(&made, done));
        let (file, _) = prepared.unwrap().unwrap();
        create(&at.join(CREATED), 0).unwrap();
        file.write_all_at(&record(0), 0).unwrap();
        let mut promised = Promised {
            created: vec![0, 1],
            written: vec![0, 1],
            operations: [0; Operation::ALL.len()],
            errors: Wrong::default(),
        };
        let (looked_for, missing) = promised.compare(at, &|| true).unwrap();
        assert_eq!((looked_for, missing.count), (4, 2), "{missing:?}");
    }

    #[test]
    fn what_waits_for_ever_is_given_up() {
        // The thread's wait ends with the test.
        let (_free, held) = mpsc::channel::<()>();
        let error = apart("it", LONG, &|| false, move |_| held.recv().is_ok());
        assert!(matches!(error, Err(LiveError::Interrupted)), "{error:?}");

        let (_free, held) = mpsc::channel::<()>();
        let patience = Duration::from_millis(20);
        let error = apart("it", patience, &|| true, move |_| held.recv().is_ok());
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "it got no further for 0 s");
    }

    #[test]
    fn what_gets_further_is_waited_for() {
        // A busy machine may hold a step up, but not for ten times as long.
        let patience = Duration::from_secs(5);
        let ended = apart("it", patience, &|| true, |done| {
            for _ in 0..12 {
                thread::sleep(Duration::from_millis(500));
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(ended.is_ok(), "{ended:?}");
    }

    #[test]
    fn a_program_whose_threads_wait_for_its_mount_is_not_waited_for() {
        let (_free, held) = mpsc::channel::<()>();
        let mut probe = Probe {
            seen: Arc::default(),
            stop: Arc::default(),
            threads: Vec::new(),
        };
        let waits = move |_, _: &Mutex<Seen>| held.recv().map_err(io::Error::other);
        probe.repeat(Operation::Read, waits).unwrap();
        let finished = probe.finish(&|| false);
        assert!(matches!(finished, Err(LiveError::Interrupted)));
    }
}
