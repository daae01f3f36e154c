//! Counters that are kept up to date one change at a time.

use std::ops::{AddAssign, SubAssign};

/// A count of things. Only what was added may be subtracted: a count that would become negative
/// contradicts the things that it counts, so the process panics, as it does on overflow. The panic
/// message names the line that changes the count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count(u64);

impl Count {
    pub fn get(self) -> u64 {
        self.0
    }

    /// Adds a positive change or subtracts a negative one.
    #[track_caller]
    pub fn change(&mut self, by: i64) {
        match self.0.checked_add_signed(by) {
            Some(changed) => self.0 = changed,
            None => panic!("a count of {} cannot change by {by}", self.0),
        }
    }
}

impl AddAssign<u64> for Count {
    #[track_caller]
    fn add_assign(&mut self, more: u64) {
        match self.0.checked_add(more) {
            Some(sum) => self.0 = sum,
            None => panic!("a count of {} cannot grow by {more}", self.0),
        }
    }
}

impl SubAssign<u64> for Count {
    #[track_caller]
    fn sub_assign(&mut self, fewer: u64) {
        match self.0.checked_sub(fewer) {
            Some(rest) => self.0 = rest,
            None => panic!("a count of {} cannot lose {fewer}", self.0),
        }
    }
}

impl PartialEq<u64> for Count {
    fn eq(&self, other: &u64) -> bool {
        self.0 == *other
    }
}

impl PartialOrd<u64> for Count {
    fn partial_cmp(&self, other: &u64) -> Option<std::cmp::Ordering> {
        self.0.partial_cmp(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_can_be_subtracted() {
        let mut count = Count::default();
        count += 5;
        count.change(-2);
        count -= 3;
        assert_eq!(count, 0);
    }

    #[test]
    #[should_panic(expected = "a count of 2 cannot lose 3")]
    fn more_than_was_added_cannot_be_subtracted() {
        let mut count = Count::default();
        count += 2;
        count -= 3;
    }

    #[test]
    #[should_panic(expected = "a count of 2 cannot change by -3")]
    fn nor_by_a_change() {
        let mut count = Count::default();
        count += 2;
        count.change(-3);
    }
}
