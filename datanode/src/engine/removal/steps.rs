//! Steps of the deletion of one replica.

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Cut off a piece, and pay for it.
    Cut,
    /// Remove the rest in one step.
    Finish,
}

/// The deletion of one replica.
#[derive(Debug, Default)]
pub struct Steps {
    is_cut: bool,
}

impl Steps {
    /// Returns the next action, depending on whether space is short (`is_pressed`).
    pub fn next(&self, is_pressed: bool) -> Step {
        if self.is_cut || is_pressed {
            Step::Finish
        } else {
            Step::Cut
        }
    }

    /// Records that so many bytes were cut off: none when the rest is small, or the disk refuses.
    pub fn cut(&mut self, bytes: u64) {
        assert!(
            !self.is_cut,
            "{bytes} bytes are cut off, and the rest was to be removed at once"
        );
        self.is_cut = bytes == 0;
    }
}
