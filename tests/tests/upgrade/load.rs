//! Programs that create, append, sync, rename, read and compare files, and record each error.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

const THREADS_PER_MOUNT: u64 = 2;
/// Maximum number of files of a program.
const FILES_MAX: usize = 60;
const PIECE_BYTES_MAX: usize = 200_000;
/// Pause between two operations of a program, which limits the journal that each starting namenode replays.
const PAUSE: Duration = Duration::from_millis(30);
/// Maximum duration of an operation; after a longer time, a program would get an error.
const OPERATION_WITHIN: Duration = Duration::from_secs(60);

/// Programs at work.
pub struct Load {
    shared: Arc<Shared>,
    programs: Vec<JoinHandle<BTreeMap<PathBuf, Vec<u8>>>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    operations: AtomicU64,
    bytes: AtomicU64,
    wrong: Mutex<Vec<String>>,
    longest: Mutex<(Duration, &'static str)>,
}

/// What programs did, and the expected files.
pub struct Done {
    operations: u64,
    bytes: u64,
    longest: (Duration, &'static str),
    files: BTreeMap<PathBuf, Vec<u8>>,
}

impl Load {
    pub fn start(mounts: &[PathBuf]) -> Self {
        let shared = Arc::<Shared>::default();
        let numbered = (0..).zip(mounts.iter().cycle());
        let programs = numbered.take(mounts.len() * THREADS_PER_MOUNT as usize);
        let programs = programs.map(|(number, mount)| {
            let (shared, mount) = (Arc::clone(&shared), mount.clone());
            thread::spawn(move || Program::new(shared, &mount, number).work())
        });
        Self {
            programs: programs.collect(),
            shared,
        }
    }

    /// Checks that nothing has failed so far.
    pub fn check(&self) {
        let wrong = self.shared.wrong.lock();
        assert!(wrong.is_empty(), "{wrong:#?}");
        let (took, what) = *self.shared.longest.lock();
        println!(
            "    {} operations without an error, the longest {} ms ({what})",
            self.shared.operations.load(Ordering::Relaxed),
            took.as_millis()
        );
    }

    pub fn stop(self) -> Done {
        self.shared.stop.store(true, Ordering::Relaxed);
        let files = self
            .programs
            .into_iter()
            .flat_map(|program| program.join().expect("it ends"));
        let files = files.collect();
        let wrong = self.shared.wrong.lock();
        assert!(wrong.is_empty(), "{wrong:#?}");
        Done {
            operations: self.shared.operations.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            longest: *self.shared.longest.lock(),
            files,
        }
    }
}

impl Done {
    /// Verifies all files, byte for byte.
    pub fn verify(&self) {
        assert!(!self.files.is_empty());
        for (path, expected) in &self.files {
            let read = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(read == *expected, "{} has other bytes", path.display());
        }
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} operations, {} MB written, no error, no wrong byte; the longest operation took {} ms ({}); \
             {} files at the end",
            self.operations,
            self.bytes / 1_000_000,
            self.longest.0.as_millis(),
            self.longest.1,
            self.files.len()
        )
    }
}

struct Program {
    shared: Arc<Shared>,
    directory: PathBuf,
    rng: StdRng,
    created: u64,
    files: BTreeMap<PathBuf, Vec<u8>>,
}

impl Program {
    fn new(shared: Arc<Shared>, mount: &Path, number: u64) -> Self {
        let directory = mount.join(format!("program-{number}"));
        fs::create_dir(&directory).expect("a directory");
        Self {
            shared,
            directory,
            rng: StdRng::seed_from_u64(number),
            created: 0,
            files: BTreeMap::new(),
        }
    }

    fn work(mut self) -> BTreeMap<PathBuf, Vec<u8>> {
        while !self.shared.stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            let (what, result) = self.one();
            let took = began.elapsed();
            self.shared.operations.fetch_add(1, Ordering::Relaxed);
            let mut longest = self.shared.longest.lock();
            *longest = (*longest).max((took, what));
            drop(longest);
            if let Err(error) = result {
                self.wrong(format!("{what}: {error} after {} ms", took.as_millis()));
                break;
            }
            if took > OPERATION_WITHIN {
                self.wrong(format!("{what} took {} ms", took.as_millis()));
            }
            thread::sleep(PAUSE);
        }
        self.files
    }

    fn wrong(&self, what: String) {
        self.shared.wrong.lock().push(what);
    }

    fn one(&mut self) -> (&'static str, io::Result<()>) {
        if self.files.len() >= FILES_MAX {
            return ("remove", self.remove());
        }
        match self.rng.random_range(0..10) {
            0..4 => ("create", self.create()),
            4..6 => ("append", self.append()),
            6..9 => ("read", self.read()),
            _ => ("rename", self.rename()),
        }
    }

    fn piece(&mut self) -> Vec<u8> {
        // Most files are small.
        let bytes_max = if self.rng.random_bool(0.2) {
            PIECE_BYTES_MAX
        } else {
            5_000
        };
        let mut piece = vec![0; self.rng.random_range(1..bytes_max)];
        self.rng.fill_bytes(&mut piece);
        self.shared
            .bytes
            .fetch_add(piece.len() as u64, Ordering::Relaxed);
        piece
    }

    fn any(&mut self) -> Option<PathBuf> {
        let at = self.rng.random_range(0..self.files.len().max(1));
        self.files.keys().nth(at).cloned()
    }

    fn fresh(&mut self) -> PathBuf {
        self.created += 1;
        self.directory.join(format!("file-{}", self.created))
    }

    fn create(&mut self) -> io::Result<()> {
        let (path, content) = (self.fresh(), self.piece());
        let mut file = File::create_new(&path)?;
        file.write_all(&content)?;
        if self.rng.random_bool(0.7) {
            file.sync_all()?;
        }
        self.files.insert(path, content);
        Ok(())
    }

    fn append(&mut self) -> io::Result<()> {
        let Some(path) = self.any() else {
            return Ok(());
        };
        let piece = self.piece();
        let mut file = File::options().append(true).open(&path)?;
        file.write_all(&piece)?;
        if self.rng.random_bool(0.5) {
            file.sync_all()?;
        }
        self.files.entry(path).or_default().extend(piece);
        Ok(())
    }

    fn read(&mut self) -> io::Result<()> {
        let Some(path) = self.any() else {
            return Ok(());
        };
        let read = fs::read(&path)?;
        if read != self.files[&path] {
            let (has, wanted) = (read.len(), self.files[&path].len());
            self.wrong(format!(
                "{} has {has} bytes which are not the {wanted} that were written",
                path.display()
            ));
        }
        Ok(())
    }

    fn rename(&mut self) -> io::Result<()> {
        let Some(path) = self.any() else {
            return Ok(());
        };
        let new = self.fresh();
        fs::rename(&path, &new)?;
        let content = self.files.remove(&path).expect("it was there");
        self.files.insert(new, content);
        Ok(())
    }

    fn remove(&mut self) -> io::Result<()> {
        for _ in 0..FILES_MAX / 2 {
            let Some(path) = self.any() else {
                break;
            };
            fs::remove_file(&path)?;
            self.files.remove(&path);
        }
        Ok(())
    }
}
