//! Blocks that wait for repair, ranked by their surviving replicas.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use slab::Slab;

use super::table::{NodeIx, Slot};
use crate::engine::count::Count;

/// Numbers of survivors that have ranks of their own; blocks with more survivors share the ranks of the
/// last number.
const SURVIVORS: usize = 10;
/// Classes of risk within a number of survivors; 0 is the highest.
pub(super) const RISKS: usize = 4;
/// Ranks of blocks that have a single replica left.
pub(super) const URGENT_RANKS: usize = RISKS;
/// The rank of blocks that have enough replicas, but one has to leave its server.
pub(super) const LEAVING: usize = SURVIVORS * RISKS;
/// The rank of blocks that have enough replicas, but in the wrong places.
pub(super) const MISPLACED: usize = LEAVING + 1;
/// The number of ranks.
pub(super) const RANKS: usize = MISPLACED + 1;

/// One block that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) slot: Slot,
    /// When it began to wait.
    pub(super) since_ms: u64,
    /// Attempts that failed so far.
    pub(super) attempts: u8,
    /// The target of the last attempt that failed.
    pub(super) avoid: Option<NodeIx>,
    /// Since when no server has been found that keeps all constraints.
    pub(super) unplaced_since_ms: Option<u64>,
    /// When it may be tried next, at the earliest.
    due_ms: u64,
}

impl Entry {
    /// When it is tried next, at the earliest.
    pub(super) fn due_ms(&self) -> u64 {
        self.due_ms
    }
}

/// A set of entries, each in one rank. Adding, moving and removing one costs O(1); a rank is served in
/// turns, from where the last turn stopped. Entries that are not due are kept apart, so that a turn
/// costs nothing for them, however many wait for a budget.
#[derive(Debug)]
pub(super) struct RepairQueue {
    /// Entries that are due.
    ranks: [Rank; RANKS],
    /// Entries that are not due. They stay in place: hundreds of thousands fall asleep and wake again
    /// every few seconds when servers are short.
    asleep: Slab<Entry>,
    /// Sleeping blocks by when to wake them; thousands wait for the same slot of a budget. An alarm is
    /// ignored for a block that no longer sleeps until then.
    alarms: BTreeMap<u64, Vec<Slot>>,
    places: FxHashMap<Slot, Place>,
    /// Entries with a rank of repair, due or not.
    repairs: Count,
}

#[derive(Debug, Default)]
struct Rank {
    entries: Vec<Entry>,
    cursor: usize,
}

impl Rank {
    /// Adds an entry; returns where.
    fn push(&mut self, entry: Entry) -> u32 {
        self.entries.push(entry);
        self.entries.len() as u32 - 1
    }
}

/// Where an entry is.
#[derive(Clone, Copy, Debug)]
struct Place {
    rank: u8,
    asleep: bool,
    position: u32,
}

/// The rank of a block with this many survivors and this class of risk; 0 comes first.
pub(super) fn rank_of(survivors: usize, risk: usize) -> usize {
    (survivors.clamp(1, SURVIVORS) - 1) * RISKS + risk.min(RISKS - 1)
}

impl Default for RepairQueue {
    fn default() -> Self {
        Self {
            ranks: std::array::from_fn(|_| Rank::default()),
            asleep: Slab::new(),
            alarms: BTreeMap::new(),
            places: FxHashMap::default(),
            repairs: Count::default(),
        }
    }
}

impl RepairQueue {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The number of entries of blocks that have too few replicas.
    pub(super) fn repairs(&self) -> u64 {
        self.repairs.get()
    }

    /// The number of entries of blocks that have enough replicas.
    pub(super) fn moves(&self) -> u64 {
        let mut rest = Count::default();
        rest += self.len() as u64;
        rest -= self.repairs();
        rest.get()
    }

    /// The number of entries of a rank that are due.
    pub(super) fn due_len(&self, rank: usize) -> usize {
        self.ranks[rank].entries.len()
    }

    /// Whether any entry is due.
    pub(super) fn has_due(&self) -> bool {
        self.ranks.iter().any(|rank| !rank.entries.is_empty())
    }

    #[cfg(test)]
    pub(super) fn contains(&self, slot: Slot) -> bool {
        self.places.contains_key(&slot)
    }

    /// Adds a block, due at `due_ms`, or moves it to another rank. A block that moves is due
    /// immediately when it has a single replica left, or when it needs repair now and did not before.
    pub(super) fn set_rank(&mut self, now_ms: u64, slot: Slot, rank: usize, due_ms: u64) {
        match self.places.get(&slot) {
            None => {
                let entry = Entry {
                    slot,
                    since_ms: now_ms,
                    attempts: 0,
                    avoid: None,
                    unplaced_since_ms: None,
                    due_ms,
                };
                self.add(rank, entry, due_ms > now_ms);
            }
            Some(&place) if usize::from(place.rank) != rank => {
                let was_repair = usize::from(place.rank) < LEAVING;
                // The wait may have been for the normal budget.
                let at_once = rank < URGENT_RANKS || (rank < LEAVING && !was_repair);
                if place.asleep && !at_once {
                    self.repairs -= u64::from(was_repair);
                    self.repairs += u64::from(rank < LEAVING);
                    let rank = rank as u8;
                    self.places.insert(slot, Place { rank, ..place });
                } else if let Some(entry) = self.remove(slot) {
                    self.add(rank, entry, false);
                }
            }
            Some(_) => {}
        }
    }

    fn add(&mut self, rank: usize, entry: Entry, asleep: bool) {
        let slot = entry.slot;
        let place = Place {
            rank: rank as u8,
            asleep,
            position: if asleep {
                self.put_to_sleep(entry)
            } else {
                self.ranks[rank].push(entry)
            },
        };
        let other = self.places.insert(slot, place);
        assert!(
            other.is_none(),
            "slot {slot} waits twice: {other:?}, {place:?}"
        );
        self.repairs += u64::from(rank < LEAVING);
    }

    /// Puts an entry among those that are not due; returns where.
    fn put_to_sleep(&mut self, entry: Entry) -> u32 {
        self.alarms
            .entry(entry.due_ms)
            .or_default()
            .push(entry.slot);
        self.asleep.insert(entry) as u32
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Entry> {
        let place = self.places.remove(&slot)?;
        self.repairs -= u64::from(usize::from(place.rank) < LEAVING);
        Some(self.take(slot, place))
    }

    /// Takes an entry from where it is. In a rank, another one may take its place.
    fn take(&mut self, slot: Slot, place: Place) -> Entry {
        let entry = if place.asleep {
            self.asleep.remove(place.position as usize)
        } else {
            self.take_due(place)
        };
        assert_eq!(
            entry.slot, slot,
            "what waits at {place:?}, and what was looked for there"
        );
        entry
    }

    fn take_due(&mut self, place: Place) -> Entry {
        let position = place.position as usize;
        let Rank { entries, cursor } = &mut self.ranks[usize::from(place.rank)];
        // The one that takes its place has not had its turn.
        *cursor -= usize::from(position + 1 == *cursor);
        let entry = entries.swap_remove(position);
        if let Some(moved) = entries.get(position) {
            match self.places.get_mut(&moved.slot) {
                Some(place) => place.position = position as u32,
                None => panic!("{moved:?} waits, but nowhere is known where"),
            }
        }
        entry
    }

    /// The next due entry of a rank, in turn; the entry stays where it is.
    pub(super) fn next(&mut self, rank: usize) -> Option<Entry> {
        let rank = &mut self.ranks[rank];
        if rank.cursor >= rank.entries.len() {
            rank.cursor = 0;
        }
        let entry = rank.entries.get(rank.cursor).copied();
        rank.cursor += usize::from(entry.is_some());
        entry
    }

    /// The due blocks of a rank whose turns come soon, approximately: the last ones take the places of
    /// those that leave.
    pub(super) fn next_slots(&self, rank: usize, max: usize) -> impl Iterator<Item = Slot> + Clone {
        let last = self.ranks[rank].entries.iter().rev();
        last.take(max).map(|entry| entry.slot)
    }

    /// The entry of a block.
    pub(super) fn get(&self, slot: Slot) -> Option<&Entry> {
        let place = self.places.get(&slot)?;
        let position = place.position as usize;
        if place.asleep {
            self.asleep.get(position)
        } else {
            self.ranks[usize::from(place.rank)].entries.get(position)
        }
    }

    /// Lets a block sleep until a time, and changes its entry.
    pub(super) fn delay(&mut self, slot: Slot, until_ms: u64, change: impl FnOnce(&mut Entry)) {
        let Some(&place) = self.places.get(&slot) else {
            return;
        };
        let mut entry = self.take(slot, place);
        entry.due_ms = until_ms;
        change(&mut entry);
        let position = self.put_to_sleep(entry);
        let asleep = Place {
            asleep: true,
            position,
            ..place
        };
        self.places.insert(slot, asleep);
    }

    /// Wakes entries that have become due, at most `max`; those with the same due time in the order of
    /// their slots.
    pub(super) fn wake(&mut self, now_ms: u64, max: usize) {
        let mut left = max;
        while left > 0
            && let Some(first) = self.alarms.first_entry()
            && *first.key() <= now_ms
        {
            let (due_ms, mut slots) = first.remove_entry();
            slots.sort_unstable();
            let later = slots.split_off(left.min(slots.len()));
            left -= slots.len();
            for slot in slots {
                self.wake_one(slot, due_ms);
            }
            if !later.is_empty() {
                self.alarms.insert(due_ms, later);
            }
        }
    }

    /// Wakes all entries.
    pub(super) fn wake_all(&mut self) {
        for (due_ms, slots) in std::mem::take(&mut self.alarms) {
            for slot in slots {
                self.wake_one(slot, due_ms);
            }
        }
    }

    fn wake_one(&mut self, slot: Slot, due_ms: u64) {
        if let Some(place) = self.places.get_mut(&slot)
            && place.asleep
            && self.asleep[place.position as usize].due_ms == due_ms
        {
            let entry = self.asleep.remove(place.position as usize);
            place.asleep = false;
            place.position = self.ranks[usize::from(place.rank)].push(entry);
        }
    }

    /// Entries of blocks that have too few replicas, with their ranks, in no order.
    fn all_repairs(&self) -> impl Iterator<Item = (u8, &Entry)> {
        let due = self.ranks[..LEAVING].iter().zip(0..);
        let due = due.flat_map(|(rank, number)| rank.entries.iter().map(move |it| (number, it)));
        let asleep = self.asleep.iter().filter_map(|(_, entry)| {
            let rank = self.places.get(&entry.slot)?.rank;
            (usize::from(rank) < LEAVING).then_some((rank, entry))
        });
        due.chain(asleep)
    }

    /// When the longest-waiting block with too few replicas began to wait. Goes over all such entries:
    /// some milliseconds for a million.
    pub(super) fn oldest_ms(&self) -> Option<u64> {
        self.all_repairs().map(|(_, entry)| entry.since_ms).min()
    }

    /// The entries of blocks that have too few replicas, the fewest survivors first and of these the
    /// longest-waiting, at most `max`. Goes over all of them.
    pub(super) fn most_urgent(&self, max: usize) -> Vec<&Entry> {
        let all = self.all_repairs().map(|(rank, entry)| {
            let survivors = usize::from(rank) / RISKS;
            ((survivors, entry.since_ms, entry.slot), entry)
        });
        let mut all: Vec<((usize, u64, Slot), &Entry)> = all.collect();
        if all.len() > max {
            all.select_nth_unstable_by_key(max, |(order, _)| *order);
            all.truncate(max);
        }
        all.sort_unstable_by_key(|(order, _)| *order);
        all.into_iter().map(|(_, entry)| entry).collect()
    }

    /// Memory of the tables in bytes.
    pub(super) fn bytes(&self) -> usize {
        let due: usize = self.ranks.iter().map(|rank| rank.entries.capacity()).sum();
        let alarms: usize = self.alarms.values().map(Vec::capacity).sum();
        (due + self.asleep.capacity()) * size_of::<Entry>()
            + alarms * size_of::<Slot>()
            // 12 bytes of key and value, 1 of control, 7/8 full at most.
            + self.places.capacity() * 8 / 7 * 13
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a map from slot to rank and due time; and a turn sees every due entry of a rank
        /// once, those that are removed or delayed when it is theirs included.
        #[test]
        fn behaves_as_a_map(
            steps in prop::collection::vec((0u8..5, 0u32..40, 0usize..RANKS, 0u64..9), 0..300),
        ) {
            let mut queue = RepairQueue::default();
            let mut model: BTreeMap<Slot, (usize, u64)> = BTreeMap::new();
            let mut now_ms = 0;
            for (step, slot, rank, wait_ms) in steps {
                match step {
                    0 | 1 => {
                        queue.set_rank(now_ms, slot, rank, now_ms + wait_ms);
                        let entry = model.entry(slot).or_insert((rank, now_ms + wait_ms));
                        let before = std::mem::replace(&mut entry.0, rank);
                        let urgent = rank < URGENT_RANKS && before != rank;
                        if urgent || (rank < LEAVING && before >= LEAVING) {
                            entry.1 = entry.1.min(now_ms);
                        }
                    }
                    2 => prop_assert_eq!(queue.remove(slot).is_some(), model.remove(&slot).is_some()),
                    3 => {
                        queue.delay(slot, now_ms + wait_ms, |entry| entry.attempts += 1);
                        model.entry(slot).and_modify(|it| it.1 = now_ms + wait_ms);
                    }
                    _ => {
                        now_ms += wait_ms;
                        // Not all of them, perhaps: the others are next.
                        queue.wake(now_ms, slot as usize);
                    }
                }
                prop_assert_eq!(queue.len(), model.len());
                let due: usize = (0..RANKS).map(|rank| queue.due_len(rank)).sum();
                prop_assert_eq!(due + queue.asleep.len(), model.len());
                for (&slot, &(rank, _)) in &model {
                    prop_assert_eq!(queue.get(slot).map(|it| it.slot), Some(slot));
                    prop_assert_eq!(usize::from(queue.places[&slot].rank), rank);
                }
                let repairs = model.values().filter(|it| it.0 < LEAVING).count() as u64;
                prop_assert_eq!(queue.repairs(), repairs);
                prop_assert_eq!(queue.moves(), model.len() as u64 - repairs);
            }
            queue.wake(now_ms, usize::MAX);
            for rank in 0..RANKS {
                let mut seen = Vec::new();
                for turn in 0..queue.due_len(rank) {
                    let slot = queue.next(rank).expect("as many as are due").slot;
                    seen.push(slot);
                    match turn % 3 {
                        0 => {}
                        1 => drop(queue.remove(slot)),
                        _ => queue.delay(slot, now_ms + 1, |_| {}),
                    }
                }
                seen.sort_unstable();
                let due = |it: &(usize, u64)| it.0 == rank && it.1 <= now_ms;
                let expected: Vec<Slot> =
                    model.iter().filter(|(_, it)| due(it)).map(|(slot, _)| *slot).collect();
                prop_assert_eq!(seen, expected);
            }
            let left = queue.len();
            queue.wake_all();
            let due: usize = (0..RANKS).map(|rank| queue.due_len(rank)).sum();
            prop_assert_eq!((due, queue.asleep.len()), (left, 0));
        }
    }
}
