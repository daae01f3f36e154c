//! Images of the disk after a power loss, built from a recording of writes and syncs.
//!
//! The model favors the stores as far as file systems are concerned: names and sizes of files count as durable
//! immediately. Contents are durable when an fsync or fdatasync of the file has returned that began after the write
//! had ended; of all other contents, an image keeps nothing, or each 512-byte sector at random. `sync_file_range`
//! makes nothing durable: it writes no metadata and does not flush the cache of the disk, as its manual page says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::child;
use crate::store::{Kind, Result};
use crate::strace::{Event, Recording, Timed};

const SECTOR_BYTES: usize = 512;

#[derive(Default)]
pub struct PowerLoss {
    pub images: u64,
    /// Number of images from which the store did not recover every acknowledged record.
    pub failed: u64,
    pub first_failure: Option<String>,
}

/// Cuts the recording at `cuts` acknowledgements, each once with all unsynced data lost and once with a random part of
/// it, and checks whether the store recovers from the image.
pub fn check(kind: Kind, recording: &Recording, dir: &Path, cuts: u64) -> Result<PowerLoss> {
    let acknowledgements: Vec<usize> = (recording.events.iter().enumerate())
        .filter(|(_, timed)| matches!(timed.event, Event::Acknowledged(_)))
        .map(|(index, _)| index)
        .collect();
    let mut outcome = PowerLoss::default();
    let mut rng = SmallRng::seed_from_u64(1);
    for _ in 0..cuts {
        let index = acknowledgements[rng.random_range(0..acknowledgements.len())];
        let Event::Acknowledged(acknowledged) = recording.events[index].event else {
            continue;
        };
        let mut disk = Disk::default();
        for timed in &recording.events[..index] {
            disk.apply(timed, recording.events[index].started);
        }
        for keep in [0.0, 0.5] {
            disk.write_image(dir, keep, &mut rng)?;
            let checked = child::command("check", kind, dir, acknowledged)?.output()?;
            outcome.images += 1;
            if !checked.status.success() {
                outcome.failed += 1;
                let message = String::from_utf8_lossy(&checked.stderr).into_owned();
                outcome.first_failure.get_or_insert(message);
            }
            fs::remove_dir_all(dir)?;
        }
    }
    Ok(outcome)
}

#[derive(Default)]
struct FileState {
    durable: Vec<u8>,
    /// Later writes, with the time at which each ended.
    unsynced: Vec<(f64, u64, Vec<u8>)>,
}

#[derive(Default)]
struct Disk {
    dirs: BTreeSet<PathBuf>,
    names: BTreeMap<PathBuf, usize>,
    files: BTreeMap<usize, FileState>,
}

impl Disk {
    /// Applies an event. `now` is the time of the power loss: a sync that had not returned does not count.
    fn apply(&mut self, timed: &Timed, now: f64) {
        match &timed.event {
            Event::Create(path, file) => {
                self.names.insert(path.clone(), *file);
                self.files.insert(*file, FileState::default());
            }
            Event::Write(file, offset, bytes) => {
                let state = self.files.entry(*file).or_default();
                state.unsynced.push((timed.ended, *offset, bytes.clone()));
            }
            Event::SetLen(file, len) => {
                let state = self.files.entry(*file).or_default();
                state.durable.resize(*len as usize, 0);
                state.unsynced.retain(|(_, offset, _)| offset < len);
            }
            Event::Sync(file) => {
                // A directory has no state here.
                if let Some(state) = self.files.get_mut(file)
                    && timed.ended <= now
                {
                    state.sync(timed.started);
                }
            }
            Event::Rename(from, to) => {
                if let Some(file) = self.names.remove(from) {
                    self.names.insert(to.clone(), file);
                }
            }
            Event::Remove(path) => {
                self.names.remove(path);
                self.dirs.remove(path);
            }
            Event::MakeDir(path) => {
                self.dirs.insert(path.clone());
            }
            Event::Acknowledged(_) => {}
        }
    }

    fn write_image(&self, dir: &Path, keep: f64, rng: &mut SmallRng) -> Result<()> {
        fs::create_dir_all(dir)?;
        for path in &self.dirs {
            fs::create_dir_all(dir.join(path))?;
        }
        for (path, file) in &self.names {
            let content = self.files.get(file).map(|state| state.crash(keep, rng));
            fs::write(dir.join(path), content.unwrap_or_default())?;
        }
        Ok(())
    }
}

impl FileState {
    fn sync(&mut self, started: f64) {
        let writes = std::mem::take(&mut self.unsynced);
        for (ended, offset, bytes) in writes {
            if ended <= started {
                overwrite(&mut self.durable, offset as usize, &bytes);
            } else {
                self.unsynced.push((ended, offset, bytes));
            }
        }
    }

    fn crash(&self, keep: f64, rng: &mut SmallRng) -> Vec<u8> {
        let mut content = self.durable.clone();
        for (_, offset, bytes) in &self.unsynced {
            let mut start = *offset as usize;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let in_sector = SECTOR_BYTES - start % SECTOR_BYTES;
                let (piece, after) = rest.split_at(in_sector.min(rest.len()));
                if rng.random_bool(keep) {
                    overwrite(&mut content, start, piece);
                }
                start += piece.len();
                rest = after;
            }
        }
        content
    }
}

fn overwrite(content: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    let end = offset + bytes.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[offset..end].copy_from_slice(bytes);
}
