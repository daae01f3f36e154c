//! Which replicas are on which disk, as seen from outside: the harness inspects the block files
//! themselves, so that its reports do not depend on what the namenode believes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use harvestfs_protocol::admin::FsckReport;
use serde::Serialize;

use super::report::{Block, Lost};

/// Blocks on a disk and the lengths of their files, in bytes.
pub type Contents = BTreeMap<u64, u64>;

/// The sealed blocks of a volume; empty if there is no volume yet.
///
/// # Errors
/// When a directory cannot be read.
pub fn scan(volume: &Path) -> io::Result<Contents> {
    let mut found = Contents::new();
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let sealed = match fs::read_dir(volume.join("sealed")) {
        Err(error) if gone(&error) => return Ok(found),
        sealed => sealed?,
    };
    for directory in sealed {
        let entries = match fs::read_dir(directory?.path()) {
            Err(error) if gone(&error) => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let block = u64::from_str_radix(&name.to_string_lossy(), 16);
            // Files appear and disappear during the scan.
            if let (Ok(block), Ok(metadata)) = (block, entry.metadata()) {
                found.insert(block, metadata.len());
            }
        }
    }
    Ok(found)
}

/// What happened to a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It was written, or repaired.
    Came,
    /// The server was reimaged.
    Reimaged,
    /// Bits of it were flipped.
    Rotten,
    /// The datanode removed it.
    Removed,
}

/// One line in the history of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// When it was seen, in milliseconds from the start.
    pub at_ms: u64,
    /// Number of the server, from 0.
    pub server: usize,
    /// What happened to the replica there.
    pub fate: Fate,
}

/// All present and former replicas.
#[derive(Debug, Default)]
pub struct Ledger {
    now: BTreeMap<u64, BTreeSet<usize>>,
    on: BTreeMap<usize, Contents>,
    history: BTreeMap<u64, Vec<Change>>,
    /// When each block was first seen: a replica that appears later is a repair.
    settled: BTreeMap<u64, u64>,
    /// Bytes of replicas that appeared later than the first ones of their block.
    pub repaired_bytes: u64,
    /// The number of such replicas.
    pub repaired_replicas: u64,
}

/// A replica that appears within this time after the first one of its block may still come from its write
/// pipeline, in milliseconds.
const PIPELINE_MS: u64 = 3_000;

impl Ledger {
    /// Notes the present contents of a disk.
    pub fn observe(&mut self, at_ms: u64, server: usize, contents: Contents) {
        let before = self.on.remove(&server).unwrap_or_default();
        for &block in before.keys().filter(|block| !contents.contains_key(block)) {
            self.gone(at_ms, server, block, Fate::Removed);
        }
        for (&block, &bytes) in contents
            .iter()
            .filter(|(block, _)| !before.contains_key(block))
        {
            let first_ms = *self.settled.entry(block).or_insert(at_ms);
            if at_ms > first_ms + PIPELINE_MS {
                self.repaired_bytes += bytes;
                self.repaired_replicas += 1;
            }
            self.now.entry(block).or_default().insert(server);
            self.note(at_ms, server, block, Fate::Came);
        }
        self.on.insert(server, contents);
    }

    /// Notes that a disk was emptied.
    pub fn wiped(&mut self, at_ms: u64, server: usize) {
        for block in self.on.remove(&server).unwrap_or_default().into_keys() {
            self.gone(at_ms, server, block, Fate::Reimaged);
        }
    }

    /// Notes that bits of a replica were flipped.
    pub fn rotten(&mut self, at_ms: u64, server: usize, block: u64) {
        self.note(at_ms, server, block, Fate::Rotten);
    }

    fn gone(&mut self, at_ms: u64, server: usize, block: u64, fate: Fate) {
        let servers = self.now.get_mut(&block);
        let Some(servers) = servers.filter(|servers| servers.contains(&server)) else {
            panic!("block {block:#x} is gone from server {server}, where it was not");
        };
        servers.remove(&server);
        if servers.is_empty() {
            self.now.remove(&block);
        }
        self.note(at_ms, server, block, fate);
    }

    fn note(&mut self, at_ms: u64, server: usize, block: u64, fate: Fate) {
        self.history.entry(block).or_default().push(Change {
            at_ms,
            server,
            fate,
        });
    }

    /// The number of blocks with at least one replica on a disk.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.now.len()
    }

    /// The number of replicas of a block on disks.
    #[must_use]
    pub fn replicas(&self, block: u64) -> usize {
        self.now.get(&block).map_or(0, BTreeSet::len)
    }

    /// The number of blocks whose replicas are all on servers that cannot be used now.
    #[must_use]
    pub fn unavailable(&self, usable: &dyn Fn(usize) -> bool) -> usize {
        let all_away = |servers: &&BTreeSet<usize>| !servers.iter().any(|&server| usable(server));
        self.now.values().filter(all_away).count()
    }

    /// The history of the replicas of a block.
    #[must_use]
    pub fn history(&self, block: u64) -> &[Change] {
        self.history.get(&block).map_or(&[], Vec::as_slice)
    }

    /// The lost blocks that `fsck` names, with the history of their replicas.
    #[must_use]
    pub fn lost(&self, fsck: Option<&FsckReport>) -> Vec<Lost> {
        let findings = fsck.map_or(&[][..], |report| &report.findings);
        let mut lost: Vec<Lost> = Vec::new();
        for finding in findings {
            let Some(block) = finding.block else {
                continue;
            };
            let is_known = lost.iter().any(|it| it.block == Block(block.0));
            if is_known || self.replicas(block.0) > 0 {
                continue;
            }
            lost.push(Lost {
                block: Block(block.0),
                path: finding.path.clone(),
                finding: finding.message.clone(),
                replicas: self.history(block.0).to_vec(),
            });
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_come_are_repaired_and_go() {
        let mut ledger = Ledger::default();
        ledger.observe(1_000, 0, Contents::from([(7, 100), (8, 50)]));
        ledger.observe(1_100, 1, Contents::from([(7, 100)]));
        assert_eq!(ledger.repaired_bytes, 0);
        assert_eq!(ledger.unavailable(&|server| server == 1), 1);
        assert_eq!((ledger.replicas(7), ledger.replicas(9)), (2, 0));
        ledger.wiped(5_000, 0);
        assert_eq!((ledger.blocks(), ledger.replicas(8)), (1, 0));
        ledger.observe(9_000, 2, Contents::from([(7, 100)]));
        assert_eq!((ledger.repaired_bytes, ledger.repaired_replicas), (100, 1));
        ledger.observe(9_500, 1, Contents::new());
        let fates: Vec<Fate> = ledger.history(7).iter().map(|it| it.fate).collect();
        let wanted = [
            Fate::Came,
            Fate::Came,
            Fate::Reimaged,
            Fate::Came,
            Fate::Removed,
        ];
        assert_eq!(fates, wanted);
        assert_eq!(ledger.history(8).last().unwrap().fate, Fate::Reimaged);
        assert!(ledger.history(9).is_empty());
    }

    #[test]
    fn only_block_files_are_seen() {
        let directory = tempfile::tempdir().unwrap();
        assert!(scan(directory.path()).unwrap().is_empty());
        let sealed = directory.path().join("sealed/0a");
        fs::create_dir_all(&sealed).unwrap();
        fs::write(sealed.join("000000000000010a"), "abc").unwrap();
        fs::write(sealed.join("notes"), "abc").unwrap();
        assert_eq!(
            scan(directory.path()).unwrap(),
            Contents::from([(0x10a, 3)])
        );
    }
}
