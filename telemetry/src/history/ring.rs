//! A month of one tenant's CPU utilisation, one byte for every two minutes.

/// Length of a slot in seconds; one mean of the utilisation is kept per slot.
pub const SLOT_S: u32 = 120;
/// Number of slots in a day.
pub const SLOTS_PER_DAY: usize = 720;
/// Number of days that are kept. One more than a month, because the first and the last day are incomplete.
pub const DAYS_KEPT: u32 = 31;
/// Number of days of a month in history: close to a calendar month, and to a whole number of weeks.
pub const MONTH_DAYS: u32 = 30;

/// Number of a slot, counted from 1970.
pub type Slot = u32;

/// A share in steps of 0.4 %, or [`Level::MISSING`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(pub u8);

impl Level {
    /// No sample exists.
    pub const MISSING: Level = Level(u8::MAX);
    /// All cores.
    const FULL: f32 = 250.0;

    /// Rounds a share; values above 1 count as 1, and NaN as missing.
    pub fn of(share: f32) -> Self {
        if share.is_nan() {
            return Level::MISSING;
        }
        // 0 to 250 because of the clamp.
        Level((share.clamp(0.0, 1.0) * Self::FULL).round() as u8)
    }

    /// Returns the share, 0 to 1; none when it is missing. Codes above the one for 1 are read as missing.
    pub fn share(self) -> Option<f32> {
        let level = f32::from(self.0);
        (level <= Self::FULL).then(|| level / Self::FULL)
    }
}

/// The levels of one day.
pub(super) struct Day {
    /// Number of the day, counted from 1970.
    number: u32,
    levels: Box<[u8; SLOTS_PER_DAY]>,
}

/// A ring of days: the place of each is its number modulo [`DAYS_KEPT`], even when the clock jumps.
#[derive(Default)]
pub(super) struct Ring {
    days: Vec<Option<Day>>,
}

/// Returns the day that contains a slot, and the slot's position in it.
pub(super) fn place(slot: Slot) -> (u32, usize) {
    let per_day = SLOTS_PER_DAY as u32;
    (slot / per_day, (slot % per_day) as usize)
}

impl Ring {
    /// Sets a level; a new day replaces the one that had its place before.
    pub(super) fn set(&mut self, slot: Slot, level: Level) {
        let (number, at) = place(slot);
        let index = (number % DAYS_KEPT) as usize;
        if self.days.len() <= index {
            self.days.resize_with(index + 1, || None);
        }
        let day = &mut self.days[index];
        match day {
            Some(day) if day.number == number => day.levels[at] = level.0,
            _ if level == Level::MISSING => {}
            _ => {
                let mut levels = Box::new([Level::MISSING.0; SLOTS_PER_DAY]);
                levels[at] = level.0;
                *day = Some(Day { number, levels });
            }
        }
    }

    /// Returns the level of a slot.
    pub(super) fn get(&self, slot: Slot) -> Level {
        let (number, at) = place(slot);
        match self.days.get((number % DAYS_KEPT) as usize) {
            Some(Some(day)) if day.number == number => Level(day.levels[at]),
            _ => Level::MISSING,
        }
    }

    /// Returns the memory use in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        let days = self.days.iter().flatten().count() * SLOTS_PER_DAY;
        days + self.days.capacity() * size_of::<Option<Day>>()
    }

    /// Returns the days that are present.
    pub(super) fn days(&self) -> impl Iterator<Item = (u32, &[u8; SLOTS_PER_DAY])> {
        self.days
            .iter()
            .flatten()
            .map(|day| (day.number, &*day.levels))
    }
}
