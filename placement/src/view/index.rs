//! An index of the servers that are open to one lane and have room on volumes of one class, from which servers are
//! drawn in the ways that policies need.

use crate::grid::CELLS;
use crate::groups::Groups;
use crate::tree::Tree;

/// The place of a server in the grid: the number of its cell, or [`OUTSIDE`].
pub(crate) type Place = u8;
/// The place of servers whose tenant is not in the grid.
pub(crate) const OUTSIDE: Place = CELLS as Place;
/// The nine cells, and outside.
pub(crate) const PLACES: usize = CELLS + 1;

/// What the index has to know about a server. It must be the same at each call until the index is rebuilt, or until
/// the server is taken out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) slot: u32,
    pub(crate) rack: u32,
    pub(crate) tenant: u32,
    pub(crate) place: Place,
    /// Its position in its place.
    pub(crate) position: u32,
    /// The weight of one of its free blocks.
    pub(crate) factor: u32,
    /// Whether its tenant was never or rarely busy.
    pub(crate) calm: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Index {
    /// Open servers by rack.
    pub(crate) racks: Groups,
    /// Open servers by tenant.
    pub(crate) tenants: Groups,
    /// Tenants with open servers, by place.
    pub(crate) open_tenants: Groups,
    /// Weights of the open servers of each place, by position.
    pub(crate) trees: [Tree; PLACES],
    /// Approximate free blocks on the open servers of each place.
    pub(crate) space: [u64; PLACES],
    /// The part of `space` on servers whose tenants were never or rarely busy.
    pub(crate) calm_space: [u64; PLACES],
    /// Approximate free blocks of each server; 0 when it is not open. Ends with the last server that was ever open:
    /// most indexes of single classes stay empty.
    blocks: Vec<u32>,
}

impl Index {
    /// Notes that a server has joined a place.
    pub(crate) fn push(&mut self, place: Place) {
        self.trees[usize::from(place)].push();
    }

    /// Returns the approximate free blocks of a server; 0 when it is not open.
    pub(crate) fn blocks(&self, slot: u32) -> u32 {
        match self.blocks.get(slot as usize) {
            Some(&blocks) => blocks,
            // It was never open here.
            None => 0,
        }
    }

    /// Notes how many blocks a server can take; 0 when it is closed.
    pub(crate) fn set(&mut self, entry: &Entry, blocks: u32) {
        let Entry {
            slot, rack, tenant, ..
        } = *entry;
        let place = usize::from(entry.place);
        let blocks = coarse(blocks);
        let before = self.blocks(slot);
        if before == blocks {
            return;
        }
        if self.blocks.len() <= slot as usize {
            self.blocks.resize(slot as usize + 1, 0);
        }
        self.blocks[slot as usize] = blocks;
        if before == 0 {
            self.racks.insert(slot, rack);
            self.tenants.insert(slot, tenant);
            if self.tenants.in_group(tenant).len() == 1 {
                self.open_tenants.insert(tenant, u32::from(entry.place));
            }
        } else if blocks == 0 {
            self.racks.remove(slot, rack);
            self.tenants.remove(slot, tenant);
            if self.tenants.in_group(tenant).is_empty() {
                self.open_tenants.remove(tenant, u32::from(entry.place));
            }
        }
        let (by_rack, by_tenant) = (self.racks.len(), self.tenants.len());
        assert_eq!(by_rack, by_tenant, "open servers by rack and by tenant");
        let factor = u64::from(entry.factor);
        let (old, new) = (u64::from(before), u64::from(blocks));
        self.trees[place].change(entry.position, old * factor, new * factor);
        change(&mut self.space[place], old, new, entry);
        if entry.calm {
            change(&mut self.calm_space[place], old, new, entry);
        }
    }
}

/// Replaces a server's contribution to a sum.
#[inline]
fn change(sum: &mut u64, old: u64, new: u64, entry: &Entry) {
    if *sum < old {
        stop(*sum, old, entry);
    }
    *sum = *sum - old + new;
}

#[cold]
fn stop(sum: u64, old: u64, entry: &Entry) -> ! {
    panic!("{old} free blocks of {sum} in all: {entry:?}")
}

/// Rounds a number of blocks down in steps of at most a sixteenth, so that most changes of a server's room change no
/// weight. 0 only for 0.
pub(crate) fn coarse(blocks: u32) -> u32 {
    let surplus_bits = (u32::BITS - blocks.leading_zeros()).saturating_sub(5);
    blocks >> surplus_bits << surplus_bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coarse_numbers_are_close_below() {
        for blocks in (0..100_000).chain([u32::MAX - 1, u32::MAX]) {
            let about = coarse(blocks);
            assert!(about <= blocks && blocks - about <= blocks / 16);
            assert_eq!(about == 0, blocks == 0);
        }
    }
}
