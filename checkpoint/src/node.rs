//! What a node records about its checkpoints: how fast they were, and which ones wait. A node runs one
//! checkpoint or restore at a time, as two would only slow each other down.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use harvestfs_protocol::durable;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::image::sha256;
use crate::process::started_ticks;
use crate::store::{StoreError, io_error};
use crate::tracking::Tracking;

/// Maximum time that a checkpoint waits for those ahead of it.
pub const QUEUE_DEADLINE: Duration = Duration::from_secs(3600);
const QUEUE_TICK: Duration = Duration::from_millis(50);
/// Weight of a new measurement relative to the earlier ones.
const NEW_SHARE: f64 = 0.3;
/// Smallest transfer in bytes that is measured: a smaller one is dominated by latency, not bandwidth.
const MEASURED_BYTES_MIN: u64 = 4 << 20;

/// The name of this machine.
#[must_use]
pub fn node_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// The part of the names of unfinished checkpoints that identifies this machine. Two machines may have the same name,
/// so it includes a hash of the machine id, where there is one; hashed, as the id itself is confidential.
#[must_use]
pub fn draft_maker() -> String {
    let name = node_name();
    match fs::read_to_string("/etc/machine-id") {
        Ok(id) => format!("{name}-{:.16}", sha256(id.trim().as_bytes())),
        Err(_) => name,
    }
}

/// Measured bandwidths of a node's checkpoints in bytes per second; `None` when not measured yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Bandwidth of storing images.
    pub write_bytes_per_s: Option<f64>,
    /// Bandwidth of reading images.
    pub read_bytes_per_s: Option<f64>,
}

impl Measured {
    /// Takes a dump into account.
    pub fn wrote(&mut self, bytes: u64, time: Duration) {
        blend(&mut self.write_bytes_per_s, bytes, time);
    }

    /// Takes a restore into account.
    pub fn read(&mut self, bytes: u64, time: Duration) {
        blend(&mut self.read_bytes_per_s, bytes, time);
    }
}

fn blend(average: &mut Option<f64>, bytes: u64, time: Duration) {
    if bytes < MEASURED_BYTES_MIN || time.is_zero() {
        return;
    }
    let measured = bytes as f64 / time.as_secs_f64();
    *average = Some(average.map_or(measured, |old| old + (measured - old) * NEW_SHARE));
}

/// This node's own directory, outside the store, as its contents concern only this machine.
#[derive(Clone, Debug)]
pub struct Node {
    directory: PathBuf,
}

impl Node {
    /// Opens the directory, and creates it if it is missing.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let queue = directory.join("queue");
        fs::create_dir_all(&queue).map_err(io_error("make", &queue))?;
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// The records of processes whose changes the kernel tracks.
    ///
    /// # Errors
    /// When the directory for them cannot be created.
    pub fn tracking(&self) -> Result<Tracking, StoreError> {
        Tracking::open(self.directory.join("tracked"))
    }

    /// The records of the last checkpoint after which each process continued.
    ///
    /// # Errors
    /// When the directory for them cannot be created.
    pub fn went_on(&self) -> Result<Tracking, StoreError> {
        Tracking::open(self.directory.join("went-on"))
    }

    /// The measurements; empty when the file is missing or damaged, as they are soon made again.
    #[must_use]
    pub fn measured(&self) -> Measured {
        let bytes = fs::read(self.directory.join("measured.json")).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    /// Stores the measurements.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn remember(&self, measured: &Measured) -> Result<(), StoreError> {
        let path = self.directory.join("measured.json");
        let bytes = serde_json::to_vec(measured).map_err(io::Error::from);
        bytes
            .and_then(|bytes| durable::replace_file(&path, &bytes, 0o644))
            .map_err(io_error("write", &path))
    }

    /// Bytes announced by the checkpoints and restores that run or wait on this node.
    #[must_use]
    pub fn queued_bytes(&self) -> u64 {
        let Ok(entries) = fs::read_dir(self.directory.join("queue")) else {
            return 0;
        };
        entries
            .flatten()
            .filter_map(|entry| waiting_bytes(&entry.path()))
            .sum()
    }

    /// Waits until no other checkpoint or restore is running on this node. `bytes` is the amount of data
    /// that this one is going to move.
    ///
    /// # Errors
    /// When the others take longer than [`QUEUE_DEADLINE`], or a file cannot be written.
    pub fn enter(&self, bytes: u64) -> Result<Turn, StoreError> {
        self.forget_dead_places()?;
        let place = self
            .directory
            .join("queue")
            .join(std::process::id().to_string());
        let ticks = pid_of(&place).and_then(started_ticks).unwrap_or_default();
        // Replaced atomically: a partial file would look like a stale one, and be removed.
        let text = format!("{bytes} {ticks}");
        durable::replace_file(&place, text.as_bytes(), 0o644).map_err(io_error("write", &place))?;
        let turn = Turn {
            place,
            _lock: self.wait()?,
        };
        Ok(turn)
    }

    fn forget_dead_places(&self) -> Result<(), StoreError> {
        let queue = self.directory.join("queue");
        for entry in fs::read_dir(&queue).map_err(io_error("list", &queue))? {
            let place = entry.map_err(io_error("list", &queue))?.path();
            if pid_of(&place).is_some() && waiting_bytes(&place).is_none() {
                match fs::remove_file(&place) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(io_error("remove", &place)(error));
                    }
                    // Another command may have done it.
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn wait(&self) -> Result<File, StoreError> {
        let path = self.directory.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(io_error("open", &path))?;
        let end = Instant::now() + QUEUE_DEADLINE;
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(lock),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < end => sleep(QUEUE_TICK),
                Err(error) => return Err(io_error("get the turn at", &path)(error.into())),
            }
        }
    }
}

/// The process to which a place in the queue belongs.
fn pid_of(place: &Path) -> Option<i32> {
    place.file_name()?.to_str()?.parse().ok()
}

/// The bytes announced by a place in the queue; `None` once the process that wrote it has ended, even if another one
/// has reused its id.
fn waiting_bytes(place: &Path) -> Option<u64> {
    let text = fs::read_to_string(place).ok()?;
    let (bytes, ticks) = text.split_once(' ')?;
    if started_ticks(pid_of(place)?)? != ticks.parse::<u64>().ok()? {
        return None;
    }
    bytes.parse().ok()
}

/// The right to move images on this node, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    place: PathBuf,
    _lock: File,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A place that remains is ignored once its process has ended, and removed by the next command.
        let _ = fs::remove_file(&self.place);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn bandwidth_follows_what_is_measured() {
        let mut measured = Measured::default();
        measured.wrote(1000, Duration::from_secs(1));
        assert_eq!(
            measured.write_bytes_per_s, None,
            "too little to say anything"
        );
        measured.wrote(100 << 20, Duration::from_secs(1));
        assert_eq!(measured.write_bytes_per_s, Some((100 << 20) as f64));
        for _ in 0..50 {
            measured.wrote(200 << 20, Duration::from_secs(1));
        }
        let now = measured.write_bytes_per_s.expect("it was measured");
        assert!((now / (200 << 20) as f64 - 1.0).abs() < 1e-3, "{now}");
        assert_eq!(measured.read_bytes_per_s, None);
    }

    #[test]
    fn a_node_remembers_and_survives_damage() {
        let directory = tempfile::tempdir().expect("a directory");
        let node = Node::open(directory.path()).expect("it is made");
        assert_eq!(node.measured(), Measured::default());
        let measured = Measured {
            write_bytes_per_s: Some(1.5),
            read_bytes_per_s: None,
        };
        node.remember(&measured).expect("it is written");
        assert_eq!(node.measured(), measured);
        fs::write(directory.path().join("measured.json"), "{").expect("it is damaged");
        assert_eq!(node.measured(), Measured::default());
    }

    #[test]
    fn the_queue_counts_what_lives() {
        let directory = tempfile::tempdir().expect("a directory");
        let node = Node::open(directory.path()).expect("it is made");
        let place = |pid: i32| directory.path().join("queue").join(pid.to_string());
        let dead = place(i32::MAX);
        fs::write(&dead, "1000 1").expect("it is written");
        // Of a process that had the id before.
        let mut child = Command::new("sleep").arg("600").spawn().expect("sleep");
        let living = i32::try_from(child.id()).expect("a process id");
        let ticks = started_ticks(living).expect("it runs");
        let reused = place(living);
        fs::write(&reused, format!("1000 {}", ticks - 1)).expect("it is written");
        assert_eq!(node.queued_bytes(), 0);
        let turn = node.enter(5).expect("it is free");
        assert_eq!(node.queued_bytes(), 5);
        assert!(!dead.exists() && !reused.exists());
        fs::write(&reused, format!("1000 {ticks}")).expect("it is written");
        assert_eq!(node.queued_bytes(), 1005);
        drop(turn);
        assert_eq!(node.queued_bytes(), 1000);
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!(node.queued_bytes(), 0);
    }
}
