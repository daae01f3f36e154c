//! The contents of a file, and what a loss of power would leave of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rand::RngExt;
use rand::rngs::SmallRng;

/// The unit that a disk writes atomically.
const SECTOR_BYTES: u64 = 512;
/// The probability that an unsynced write of a sector has reached the disk: 1 in 2.
const REACHED: (u32, u32) = (1, 2);

/// The contents of a file. The file itself has what its readers see.
#[derive(Debug)]
pub struct Content {
    file: File,
    was_made_here: bool,
    /// Writes since the last sync, in order.
    writes: Vec<Overwritten>,
    /// Sectors that readers see as written although a failed sync lost them, and what the disk has there.
    lost: BTreeMap<u64, Vec<u8>>,
    /// The length that was last synced, if it has changed since.
    synced_len: Option<u64>,
}

/// Whole sectors, as they were before a write.
#[derive(Debug)]
struct Overwritten {
    first_sector: u64,
    before: Vec<u8>,
}

impl Content {
    /// The contents of a file that has just been created.
    pub fn new(file: File) -> Self {
        Self {
            was_made_here: true,
            synced_len: Some(0),
            ..Self::of_durable(file)
        }
    }

    /// The contents of a file that is already durable.
    pub fn of_durable(file: File) -> Self {
        Self {
            file,
            was_made_here: false,
            writes: Vec::new(),
            lost: BTreeMap::new(),
            synced_len: None,
        }
    }

    /// Whether the file was created on this disk, and has been known since.
    pub fn was_made_here(&self) -> bool {
        self.was_made_here
    }

    pub fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Whether a loss of power would lose nothing.
    pub fn is_durable(&self) -> bool {
        self.writes.is_empty() && self.lost.is_empty() && self.synced_len.is_none()
    }

    /// Reads until the buffer is full or the file ends.
    pub fn read(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            let at = position + filled as u64;
            match self.file.read_at(&mut buffer[filled..], at)? {
                0 => break,
                read => filled += read,
            }
        }
        Ok(filled)
    }

    pub fn write(&mut self, bytes: &[u8], position: u64) -> io::Result<()> {
        let len = self.len_bytes()?;
        let end = position + bytes.len() as u64;
        if end > len {
            self.synced_len.get_or_insert(len);
        }
        let overwritten = self.sectors(position..end)?;
        self.writes.push(overwritten);
        self.file.write_all_at(bytes, position)
    }

    /// The sectors that the disk has, or may have, where something is about to be written.
    fn sectors(&mut self, range: Range<u64>) -> io::Result<Overwritten> {
        let first_sector = range.start / SECTOR_BYTES;
        let end = range.end.div_ceil(SECTOR_BYTES);
        let mut before = vec![0; ((end - first_sector) * SECTOR_BYTES) as usize];
        self.read(&mut before, first_sector * SECTOR_BYTES)?;
        let of_range = self.lost.range(first_sector..end);
        let lost: Vec<u64> = of_range.map(|(sector, _)| *sector).collect();
        for sector in lost {
            if let Some(bytes) = self.lost.remove(&sector) {
                let at = ((sector - first_sector) * SECTOR_BYTES) as usize;
                before[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        Ok(Overwritten {
            first_sector,
            before,
        })
    }

    /// Truncates or extends the file.
    pub fn set_len(&mut self, new: u64) -> io::Result<()> {
        let len = self.len_bytes()?;
        self.synced_len.get_or_insert(len);
        if new < len {
            let cut = self.sectors(new..len)?;
            self.writes.push(cut);
        }
        self.file.set_len(new)
    }

    /// Makes everything durable, except what a failed sync lost before.
    pub fn synced(&mut self) {
        self.writes.clear();
        self.synced_len = None;
    }

    /// A sync fails: all pending writes count as written from now on, but some of them are lost.
    pub fn lose(&mut self, rng: &mut SmallRng) {
        for (sector, before) in self.unwritten(rng) {
            self.lost.insert(sector, before);
        }
        self.writes.clear();
        self.synced_len = None;
    }

    /// Draws the sectors whose latest writes have not reached the disk, with what the disk has there.
    fn unwritten(&self, rng: &mut SmallRng) -> BTreeMap<u64, Vec<u8>> {
        let mut reached = BTreeSet::new();
        let mut unwritten = BTreeMap::new();
        for write in self.writes.iter().rev() {
            let sectors = write.before.chunks(SECTOR_BYTES as usize);
            for (sector, before) in (write.first_sector..).zip(sectors) {
                if !reached.contains(&sector) && rng.random_ratio(REACHED.0, REACHED.1) {
                    reached.insert(sector);
                }
                if !reached.contains(&sector) {
                    unwritten.insert(sector, before.to_vec());
                }
            }
        }
        unwritten
    }

    /// Power is lost: the file becomes what the disk has.
    pub fn lose_power(&mut self, rng: &mut SmallRng) -> io::Result<()> {
        let len = match self.synced_len.take() {
            Some(len) if rng.random_ratio(REACHED.0, REACHED.1) => len,
            _ => self.len_bytes()?,
        };
        let mut on_disk = self.unwritten(rng);
        on_disk.append(&mut self.lost);
        self.writes.clear();
        for (sector, bytes) in on_disk {
            self.file.write_all_at(&bytes, sector * SECTOR_BYTES)?;
        }
        self.file.set_len(len)
    }

    /// Flips one bit of the file.
    pub fn rot(&mut self, rng: &mut SmallRng) -> io::Result<()> {
        let len = self.len_bytes()?;
        if len == 0 {
            return Ok(());
        }
        let at = rng.random_range(0..len);
        let mut byte = [0];
        self.file.read_exact_at(&mut byte, at)?;
        byte[0] ^= 1 << rng.random_range(0..8);
        self.file.write_all_at(&byte, at)
    }

    /// What the disk has if only synced writes reached it.
    pub fn synced_bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = self.all()?;
        let len = self.synced_len.unwrap_or(bytes.len() as u64) as usize;
        let mut put = |sector: u64, before: &[u8]| {
            let at = (sector * SECTOR_BYTES) as usize;
            bytes.resize(bytes.len().max(at + before.len()), 0);
            bytes[at..at + before.len()].copy_from_slice(before);
        };
        for write in self.writes.iter().rev() {
            put(write.first_sector, &write.before);
        }
        for (sector, before) in &self.lost {
            put(*sector, before);
        }
        bytes.resize(len, 0);
        Ok(bytes)
    }

    /// All bytes that readers see.
    pub fn all(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.len_bytes()? as usize];
        let read = self.read(&mut bytes, 0)?;
        bytes.truncate(read);
        Ok(bytes)
    }
}
