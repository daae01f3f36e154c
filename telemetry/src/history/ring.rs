//! A month of one tenant's CPU use, one byte for every two minutes.

/// Length of a slot in seconds: utilisation is kept as one mean for each.
pub const SLOT_S: u32 = 120;
/// Slots in a day.
pub const SLOTS_PER_DAY: usize = 720;
/// Days that are kept. One more than a month: the first and the last are there in part.
pub const DAYS_KEPT: u32 = 31;
/// Days of a month, as history counts: whole weeks and months come out nearly alike.
pub const MONTH_DAYS: u32 = 30;

/// Number of a slot, counted from 1970.
pub type Slot = u32;

/// A share in steps of 0.4 %, or [`Level::MISSING`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(pub u8);

impl Level {
    /// There is no sample.
    pub const MISSING: Level = Level(u8::MAX);
    /// All cores.
    const FULL: f32 = 250.0;

    /// Rounds a share; what is above 1 counts as 1, what is no number is missing.
    pub fn of(share: f32) -> Self {
        if share.is_nan() {
            return Level::MISSING;
        }
        // 0 to 250 by the limits.
        Level((share.clamp(0.0, 1.0) * Self::FULL).round() as u8)
    }

    /// The share, 0 to 1; none when it is missing. Codes above that of a whole are read as missing.
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

/// A ring of days: each has the place of its number modulo [`DAYS_KEPT`], also when the clock jumps.
#[derive(Default)]
pub(super) struct Ring {
    days: Vec<Option<Day>>,
}

/// The day that a slot is in, and the slot's place there.
pub(super) fn place(slot: Slot) -> (u32, usize) {
    let per_day = SLOTS_PER_DAY as u32;
    (slot / per_day, (slot % per_day) as usize)
}

impl Ring {
    /// Writes a level; the day takes the place of the one that had it before.
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

    /// The level of a slot.
    pub(super) fn get(&self, slot: Slot) -> Level {
        let (number, at) = place(slot);
        match self.days.get((number % DAYS_KEPT) as usize) {
            Some(Some(day)) if day.number == number => Level(day.levels[at]),
            _ => Level::MISSING,
        }
    }

    /// Memory that it takes, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        let days = self.days.iter().flatten().count() * SLOTS_PER_DAY;
        days + self.days.capacity() * size_of::<Option<Day>>()
    }

    /// The days that are there.
    pub(super) fn days(&self) -> impl Iterator<Item = (u32, &[u8; SLOTS_PER_DAY])> {
        self.days
            .iter()
            .flatten()
            .map(|day| (day.number, &*day.levels))
    }
}
