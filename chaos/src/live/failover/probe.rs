//! A program on a mount that notices every pause, and what it was promised.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt;
use rustix::fs::{Advice, fadvise};
use serde::Serialize;

use crate::live::LiveError;
use crate::random;

/// What the program does all the time, each on a thread of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Looks for a name that nobody has looked for, in a directory that was never listed: nothing caches that.
    Stat,
    /// Creates a file, writes it, syncs and closes it.
    Create,
    /// Writes behind the end of an open file, and syncs it.
    Write,
    /// Reads a piece of a file that neither the kernel nor the client has in memory.
    Read,
}

impl Operation {
    /// All, in the order in which they are shown.
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

/// Made by another client, and never listed on the mount.
pub(super) const STRANGE: &str = "strange";
const CREATED: &str = "created";
const WRITTEN: &str = "written";
const READ: &str = "read";
/// Files in one directory.
const DIRECTORY_FILES: u64 = 1_000;
const RECORD_BYTES: usize = 64;
/// What is read is far more than the client keeps of what it has written.
const READ_BYTES: u64 = 64 << 20;
const PIECE_BYTES: usize = 4_096;
/// Between two operations of a thread.
const PAUSE: Duration = Duration::from_millis(3);
/// How long an operation may take when nothing is wrong any more.
const END_DEADLINE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(5);
/// Errors and missing things of which the text is kept.
const TEXTS_MAX: usize = 10;

/// How often something was wrong, and the first of it in words.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Wrong {
    /// How often.
    pub count: u64,
    /// The first ones.
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
    /// Since the round began.
    longest: [Duration; Operation::ALL.len()],
    done: [u64; Operation::ALL.len()],
    errors: Wrong,
    /// The numbers of files and of records whose sync returned.
    created: Vec<u64>,
    written: Vec<u64>,
}

/// The program. Its threads end when it is dropped, or when their mount does.
pub(super) struct Probe {
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// What it was promised and saw.
pub(super) struct Promised {
    created: Vec<u64>,
    written: Vec<u64>,
    /// How many operations of each kind there were.
    pub operations: [u64; Operation::ALL.len()],
    /// Errors of system calls, and wrong bytes that were read.
    pub errors: Wrong,
}

impl Probe {
    /// Begins on a mount that has the directory [`STRANGE`].
    pub fn start(mount: &Path, seed: u64) -> Result<Self, LiveError> {
        let prepared = prepare(mount).map_err(LiveError::io("write what is to be read"));
        let (written, read) = prepared?;
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
            // Of the whole file: the kernel reads ahead.
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

    /// From now on, pauses are those of the next round.
    pub fn begin_round(&self) {
        self.seen.lock().longest = Default::default();
    }

    /// Waits until each thread has done something that it began after this call, and returns the longest pause of
    /// each since the round began.
    pub fn end_round(
        &self,
        go_on: &dyn Fn() -> bool,
    ) -> Result<[Duration; Operation::ALL.len()], LiveError> {
        let before = self.seen.lock().done;
        let deadline = Instant::now() + END_DEADLINE;
        loop {
            {
                let seen = self.seen.lock();
                // The first to end may have begun before.
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
                let seconds = END_DEADLINE.as_secs();
                let text =
                    format!("an operation did not end within {seconds} s after all was healed");
                return Err(LiveError::Cluster(text));
            }
            thread::sleep(POLL);
        }
    }

    /// Ends it, and waits for that.
    pub fn finish(mut self) -> Promised {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
        let seen = std::mem::take(&mut *self.seen.lock());
        Promised {
            created: seen.created,
            written: seen.written,
            operations: seen.done,
            errors: seen.errors,
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // Threads that wait for a mount end with it, which may be later.
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Promised {
    /// Looks for every name and byte whose sync returned, on a mount that has nothing in memory. Returns how many were
    /// looked for, and what is missing.
    pub fn compare(
        &self,
        mount: &Path,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(u64, Wrong), LiveError> {
        let mut missing = Wrong::default();
        let created = mount.join(CREATED);
        for &number in &self.created {
            if !go_on() {
                return Err(LiveError::Interrupted);
            }
            match fs::read(file_path(&created, number)) {
                Ok(found) if found == record(number) => {}
                Ok(_) => missing.note(format!("file {number} has other content")),
                Err(error) => missing.note(format!("file {number}: {error}")),
            }
        }
        let written =
            File::open(mount.join(WRITTEN)).map_err(LiveError::io("open what was written"))?;
        for &number in &self.written {
            let mut found = [0; RECORD_BYTES];
            match written.read_exact_at(&mut found, number * RECORD_BYTES as u64) {
                Ok(()) if found == record(number) => {}
                Ok(()) => missing.note(format!("record {number} has other content")),
                Err(error) => missing.note(format!("record {number}: {error}")),
            }
        }
        let looked_for = self.created.len() + self.written.len();
        Ok((looked_for as u64, missing))
    }
}

/// Makes what the program needs; returns the files to write and to read.
fn prepare(mount: &Path) -> io::Result<(File, File)> {
    fs::create_dir(mount.join(CREATED))?;
    let mut read = File::create_new(mount.join(READ))?;
    for at in (0..READ_BYTES).step_by(PIECE_BYTES) {
        read.write_all(&piece_at(at))?;
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

/// What tells a record from all others.
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
