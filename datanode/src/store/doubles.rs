//! Blocks with two files: a volume could not be used for a while, and its replicas were created again on another one.
//! Only one of the files counts. The space of the other one is in use all the same until it is removed.

use std::collections::hash_map;
use std::sync::Arc;

use harvestfs_protocol::ids::BlockId;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::error::StoreError;
use super::inventory::{Entry, Inventory, State};
use super::removal::{PIECE_BYTES, cut, remove_files};
use super::volume::{Found, Volume};
use crate::engine::quota::Charge;

/// The files of a volume that do not count.
#[derive(Default)]
pub(super) struct Doubles {
    /// The charges of files that are left alone.
    kept: Mutex<Vec<Charge>>,
    /// Blocks of which a job is removing a file.
    in_removal: Mutex<Vec<BlockId>>,
}

/// A file that does not count. If this is dropped before the file is removed, the file is left alone.
#[must_use = "the file is removed only piece by piece"]
pub struct Double {
    inventory: Arc<Inventory>,
    volume: Arc<Volume>,
    block: BlockId,
    chunks: u32,
    /// `None` only when the file has been removed, and this is about to be dropped.
    charge: Option<Charge>,
}

/// The result of removing a piece of a file.
pub enum PieceRemoved {
    /// The last piece, of so many bytes, was removed; or the file is left alone, and nothing was removed.
    Last(u64),
    /// So many bytes were removed, and this is left.
    Some(u64, Double),
    /// Nothing was removed yet: the disk of the file that counts does not respond.
    Silent(Double),
}

/// Whether a piece may be removed.
enum Begun {
    Removal(InRemoval),
    Silent,
    LeftAlone,
}

/// While this exists, no replica of the block is created on the volume: its file would be mistaken for the one that is
/// being removed.
struct InRemoval {
    volume: Arc<Volume>,
    block: BlockId,
}

impl Doubles {
    /// Charges an existing file that does not count and is left alone.
    pub(super) fn keep(&self, charge: Charge) {
        self.kept.lock().push(charge);
    }

    /// Whether a file of this block is being removed.
    pub(super) fn has_in_removal(&self, block: BlockId) -> bool {
        self.in_removal.lock().contains(&block)
    }
}

const HAS_CHARGE: &str = "a file that does not count has its charge until it is removed";

impl Double {
    pub(super) fn new(inventory: Arc<Inventory>, volume: Arc<Volume>, found: Found) -> Self {
        Self {
            inventory,
            volume,
            block: found.block,
            chunks: found.chunks,
            charge: Some(found.charge),
        }
    }

    /// Removes a piece of the file, as long as the file that counts is whole.
    ///
    /// # Errors
    /// The disk's error: the rest is left alone.
    pub async fn remove_piece(self) -> Result<PieceRemoved, StoreError> {
        let volume = self.volume.clone();
        volume.run(move || self.remove_piece_now()).await
    }

    fn remove_piece_now(mut self) -> Result<PieceRemoved, StoreError> {
        let _in_removal = match self.begin() {
            Begun::Removal(in_removal) => in_removal,
            Begun::Silent => return Ok(PieceRemoved::Silent(self)),
            Begun::LeftAlone => {
                warn_of(&self.volume, self.block);
                return Ok(PieceRemoved::Last(0));
            }
        };
        let charge = self.charge.as_mut().expect(HAS_CHARGE);
        let bytes = charge.bytes();
        if bytes > PIECE_BYTES {
            let cut_bytes = cut(&self.volume, self.block)?;
            charge.shrink_to(bytes - cut_bytes);
            if cut_bytes > 0 {
                return Ok(PieceRemoved::Some(cut_bytes, self));
            }
        }
        remove_files(&self.volume, self.block)?;
        drop(self.charge.take());
        Ok(PieceRemoved::Last(bytes))
    }

    /// Decides whether a piece may be removed. The file is left alone if the one that counts is no longer on another
    /// volume, or may be worth less than this one. That includes one that was found sealed, like this one: it has
    /// never been read, and this file may be the last good one of the block.
    fn begin(&self) -> Begun {
        let replicas = self.inventory.lock();
        let Some(entry) = replicas.get(&self.block) else {
            return Begun::LeftAlone;
        };
        let other = self.inventory.volume(entry.volume);
        let is_whole = match &entry.state {
            State::Sealed {
                chunks,
                is_found: false,
                ..
            } => *chunks >= self.chunks,
            State::Sealed { is_found: true, .. }
            | State::Open(_)
            | State::Condemned { .. }
            | State::Corrupt { .. }
            | State::Deleting => false,
        };
        // A replica on a volume above its quota may be given up next.
        let stays = is_whole && other.quota.excess_bytes() == 0;
        if !stays || Arc::ptr_eq(other, &self.volume) {
            return Begun::LeftAlone;
        }
        match other.check_usable() {
            Ok(()) => {}
            // The replica is available once its disk responds again, and most disks do.
            Err(StoreError::Silent { .. }) => return Begun::Silent,
            Err(_) => return Begun::LeftAlone,
        }
        // Before the map is unlocked: creating a replica begins with an entry in the map.
        self.volume.doubles.in_removal.lock().push(self.block);
        Begun::Removal(InRemoval {
            volume: self.volume.clone(),
            block: self.block,
        })
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            self.volume.doubles.keep(charge);
        }
    }
}

impl Drop for InRemoval {
    fn drop(&mut self) {
        let mut in_removal = self.volume.doubles.in_removal.lock();
        in_removal.retain(|block| *block != self.block);
    }
}

/// Leaves alone all files of a block if a volume has several of them, such as a corrupt and a sealed one: removing one
/// removes all files of the block there, and the decision considers only its own chunks.
pub(super) fn leave_several_alone(doubles: &mut Vec<Double>) {
    let mut files = FxHashMap::<BlockId, u32>::default();
    for double in &*doubles {
        *files.entry(double.block).or_default() += 1;
    }
    doubles.retain(|double| {
        let is_only = files[&double.block] == 1;
        if !is_only {
            warn_of(&double.volume, double.block);
        }
        is_only
    });
}

/// Adds a file found on one of the volumes. Of two files of a block, the better one counts. The other one stays: the
/// better one has not been read in full, and it may be on the disk that fails again.
pub(super) fn add_found(
    replicas: &mut FxHashMap<BlockId, Entry>,
    volumes: &[Arc<Volume>],
    block: BlockId,
    found: Entry,
) {
    match replicas.entry(block) {
        hash_map::Entry::Vacant(vacant) => {
            vacant.insert(found);
        }
        hash_map::Entry::Occupied(mut occupied) => {
            let is_better = worth(&found) > worth(occupied.get());
            let other = if is_better {
                occupied.insert(found)
            } else {
                found
            };
            leave_alone(&volumes[other.volume], block, other.state);
        }
    }
}

/// Leaves alone a file that was found and does not count, and on which no job is working.
pub(super) fn leave_alone(volume: &Volume, block: BlockId, state: State) {
    warn_of(volume, block);
    let charge = match state {
        State::Sealed { charge, .. } | State::Corrupt { charge, .. } => Some(charge),
        State::Open(replica) => replica.end_if_idle(),
        State::Condemned { .. } | State::Deleting => None,
    };
    if let Some(charge) = charge {
        volume.doubles.keep(charge);
    }
}

fn warn_of(volume: &Volume, block: BlockId) {
    tracing::warn!(
        %block,
        volume = %volume.path().display(),
        "there are two files of one replica: the one of this volume is left alone"
    );
}

/// The rank of a file: whether it is sealed, then how many chunks it has.
fn worth(entry: &Entry) -> (bool, u32) {
    match &entry.state {
        State::Sealed { chunks, .. } => (true, *chunks),
        State::Open(replica) => (false, replica.chunks()),
        State::Condemned { .. } | State::Corrupt { .. } | State::Deleting => (false, 0),
    }
}
