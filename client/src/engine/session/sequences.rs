//! The numbers of a session's mutations, and the mutations that are kept because they were answered
//! before they were durable.

use std::collections::{BTreeSet, VecDeque};

use harvestfs_protocol::limits::MUTATIONS_IN_FLIGHT_MAX;

/// Maximum distance from the oldest mutation in flight to the newest, well below what the namenode remembers.
pub(crate) const WINDOW: u64 = MUTATIONS_IN_FLIGHT_MAX as u64 / 2;
/// The same for the mutations that make others durable: those give their numbers back only
/// afterwards, so this must not wait for them.
pub(crate) const CONFIRMING_WINDOW: u64 = WINDOW + WINDOW / 2;

/// The number of a mutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number {
    /// Counts the sessions.
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
}

/// Numbers the mutations of a session.
#[derive(Default)]
pub(crate) struct Sequences {
    generation: u64,
    next: u64,
    in_flight: BTreeSet<u64>,
}

impl Sequences {
    /// Starts a new session; returns its generation.
    pub(crate) fn restart(&mut self) -> u64 {
        self.generation += 1;
        self.next = 1;
        self.in_flight.clear();
        self.generation
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns a number for another mutation; none while the oldest in flight is a window behind.
    pub(crate) fn begin(&mut self, window: u64) -> Option<Number> {
        let oldest = self.in_flight.first().copied();
        if oldest.is_some_and(|oldest| self.next - oldest >= window) {
            return None;
        }
        let sequence = self.next;
        self.next += 1;
        assert!(
            self.in_flight.insert(sequence),
            "number {sequence} of generation {} is given twice",
            self.generation
        );
        Some(Number {
            generation: self.generation,
            sequence,
        })
    }

    /// Returns a number below which all mutations have been answered.
    pub(crate) fn answered_below(&self, sequence: u64) -> u64 {
        self.in_flight.first().copied().unwrap_or(sequence)
    }

    /// Ends a mutation. Returns whether numbers may be available again for callers that found none.
    pub(crate) fn ended(&mut self, number: Number) -> bool {
        if number.generation != self.generation {
            return false;
        }
        let was_oldest = self.in_flight.first() == Some(&number.sequence);
        assert!(
            self.in_flight.remove(&number.sequence),
            "{number:?} ends, and is not in flight: {} are",
            self.in_flight.len()
        );
        was_oldest
    }
}

/// Mutations that were answered and may not be durable yet.
pub(crate) struct Unconfirmed<T> {
    /// Counts mutations over all sessions.
    last: u64,
    durable_through: u64,
    waiting: VecDeque<(u64, T)>,
    /// How often they were replayed.
    replays: u64,
}

impl<T> Default for Unconfirmed<T> {
    fn default() -> Self {
        Self {
            last: 0,
            durable_through: 0,
            waiting: VecDeque::new(),
            replays: 0,
        }
    }
}

impl<T> Unconfirmed<T> {
    /// Returns the highest number; everything answered so far has at most this number.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Adds a mutation; returns how many there are.
    pub(crate) fn add(&mut self, mutation: T) -> usize {
        self.last += 1;
        self.waiting.push_back((self.last, mutation));
        self.waiting.len()
    }

    /// Notes that everything with at most this number is durable; returns what need not be kept any more.
    pub(crate) fn confirm(&mut self, through: u64) -> Vec<T> {
        assert!(
            through <= self.last,
            "{through} is durable, and {} was the last one",
            self.last
        );
        self.durable_through = self.durable_through.max(through);
        let count = self.waiting.partition_point(|(last, _)| *last <= through);
        let confirmed = self.waiting.drain(..count);
        confirmed.map(|(_, mutation)| mutation).collect()
    }

    /// Iterates over everything that waits to become durable, in order, each with its number.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (u64, &T)> {
        self.waiting
            .iter()
            .map(|(number, mutation)| (*number, mutation))
    }

    /// Begins a replay of what waits. A mutation that was answered before but is added later is not included.
    pub(crate) fn replay(&mut self) -> impl Iterator<Item = (u64, &T)> {
        self.replays += 1;
        self.waiting()
    }

    /// Returns how often waiting mutations were replayed.
    pub(crate) fn replays(&self) -> u64 {
        self.replays
    }

    /// Whether everything with at most this number is durable.
    pub(crate) fn is_durable(&self, through: u64) -> bool {
        self.durable_through >= through
    }

    /// Whether nothing waits to become durable.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_confirms_others_does_not_wait_for_them() {
        let mut sequences = Sequences::default();
        sequences.restart();
        for _ in 0..WINDOW {
            assert!(sequences.begin(WINDOW).is_some());
        }
        assert_eq!(sequences.begin(WINDOW), None);
        assert!(sequences.begin(CONFIRMING_WINDOW).is_some());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Begin,
        End(usize),
        Restart,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            20 => Just(Op::Begin),
            15 => any::<usize>().prop_map(Op::End),
            1 => Just(Op::Restart),
        ]
    }

    proptest! {
        /// The namenode may forget replies below the number that it receives, which must never
        /// include an unfinished one.
        #[test]
        fn numbers_are_given_once_and_what_is_in_flight_is_remembered(
            ops in prop::collection::vec(op(), 1..200),
        ) {
            const SMALL_WINDOW: u64 = 5;
            let mut sequences = Sequences::default();
            let mut generation = sequences.restart();
            let mut in_flight: Vec<Number> = Vec::new();
            let mut highest = 0;
            for op in ops {
                match op {
                    Op::Begin => {
                        let current = in_flight.iter().filter(|it| it.generation == generation);
                        let oldest = current.map(|it| it.sequence).min();
                        let number = sequences.begin(SMALL_WINDOW);
                        let is_room = oldest.is_none_or(|oldest| highest + 1 - oldest < SMALL_WINDOW);
                        prop_assert_eq!(number.is_some(), is_room);
                        let Some(number) = number else { continue };
                        prop_assert_eq!(number, Number { generation, sequence: highest + 1 });
                        highest += 1;
                        let below = sequences.answered_below(number.sequence);
                        prop_assert_eq!(below, oldest.unwrap_or(number.sequence));
                        in_flight.push(number);
                    }
                    Op::End(at) if !in_flight.is_empty() => {
                        let number = in_flight.swap_remove(at % in_flight.len());
                        let current = in_flight.iter().filter(|it| it.generation == generation);
                        let is_oldest = current.map(|it| it.sequence).min() > Some(number.sequence)
                            || in_flight.iter().all(|it| it.generation != generation);
                        let was_oldest = number.generation == generation && is_oldest;
                        prop_assert_eq!(sequences.ended(number), was_oldest);
                    }
                    Op::End(_) => {}
                    Op::Restart => {
                        generation = sequences.restart();
                        highest = 0;
                    }
                }
            }
        }

        /// A mutation that was answered before it was durable is kept until a durable one follows.
        #[test]
        fn what_is_not_confirmed_is_kept_in_order(ops in prop::collection::vec(0u64..10, 1..100)) {
            let mut unconfirmed = Unconfirmed::default();
            let mut durable_through = 0;
            for op in ops {
                if op < 7 {
                    unconfirmed.add(unconfirmed.last() + 1);
                } else {
                    let through = unconfirmed.last().saturating_sub(op - 7);
                    let confirmed = unconfirmed.confirm(through);
                    let expected: Vec<u64> = (durable_through + 1..=through).collect();
                    prop_assert_eq!(confirmed, expected);
                    durable_through = durable_through.max(through);
                }
                let kept: Vec<u64> = unconfirmed.waiting().map(|(number, _)| number).collect();
                let expected: Vec<u64> = (durable_through + 1..=unconfirmed.last()).collect();
                prop_assert_eq!(unconfirmed.is_empty(), expected.is_empty());
                prop_assert_eq!(kept, expected);
                prop_assert!(unconfirmed.is_durable(durable_through));
                prop_assert!(!unconfirmed.is_durable(durable_through + 1));
            }
        }
    }
}
