//! Blocks of which two files are found at the start: a volume could not be used for a time, and what it had was created
//! again on another one.

use std::collections::hash_map;
use std::sync::Arc;

use harvestfs_protocol::ids::BlockId;
use rustc_hash::FxHashMap;

use super::inventory::{Entry, State};
use super::volume::Volume;

/// Adds what was found of a block on one of the volumes. Of two files the better one is kept, and the other one removed if
/// it has nothing more. Blocks on the disk.
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
            let (is_sealed, chunks) = worth(occupied.get());
            if is_sealed && worth(&other).1 <= chunks {
                remove(&volumes[other.volume], block, &other.state);
            } else {
                tracing::error!(%block, "there are two files for one replica, and one is left alone");
            }
        }
    }
}

/// Whether it is sealed, and how many chunks it has.
fn worth(entry: &Entry) -> (bool, u32) {
    match &entry.state {
        State::Sealed { chunks, .. } => (true, *chunks),
        State::Open(replica) => (false, replica.chunks()),
        State::Condemned | State::Corrupt(_) | State::Deleting => (false, 0),
    }
}

fn remove(volume: &Volume, block: BlockId, state: &State) {
    let path = match state {
        State::Sealed { .. } => volume.sealed_path(block),
        State::Open(_) => volume.open_path(block),
        State::Condemned | State::Corrupt(_) | State::Deleting => volume.corrupt_path(block),
    };
    match volume.disk().remove(&path) {
        Ok(()) => {
            tracing::info!(file = %path.display(), "a replica that is here twice is removed once");
        }
        // The next start finds it again.
        Err(error) => {
            tracing::error!(file = %path.display(), %error, "cannot remove a replica that is here twice");
        }
    }
}
