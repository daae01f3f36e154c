//! Blocks of which two files are found at the start: a volume could not be used for a time, and what it had was created
//! again on another one.

use std::collections::hash_map;
use std::sync::Arc;

use harvestfs_protocol::ids::BlockId;
use rustc_hash::FxHashMap;

use super::inventory::{Entry, State};
use super::volume::Volume;

/// Adds what was found of a block on one of the volumes. Of two files the better one counts. The other one stays: nobody
/// has read all of the better one, and it may be the one on a disk that fails again.
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
            let volume = &volumes[other.volume];
            tracing::warn!(
                %block,
                volume = %volume.path().display(),
                "there are two files of one replica: the one of this volume is left alone"
            );
        }
    }
}

/// Whether it is sealed, and how many chunks it has.
fn worth(entry: &Entry) -> (bool, u32) {
    match &entry.state {
        State::Sealed { chunks, .. } => (true, *chunks),
        State::Open(replica) => (false, replica.chunks()),
        State::Condemned { .. } | State::Corrupt { .. } | State::Deleting => (false, 0),
    }
}
