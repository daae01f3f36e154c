//! How one replica is deleted.

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A piece is to be cut off, and paid for.
    Cut,
    /// What is left is to be removed at once.
    Finish,
}

/// The deletion of one replica.
#[derive(Debug, Default)]
pub struct Steps {
    is_cut: bool,
}

impl Steps {
    /// What is next, where space is short (`is_pressed`) or not.
    pub fn next(&self, is_pressed: bool) -> Step {
        if self.is_cut || is_pressed {
            Step::Finish
        } else {
            Step::Cut
        }
    }

    /// So many bytes were cut off: none when the rest is small, or the disk refuses.
    pub fn cut(&mut self, bytes: u64) {
        assert!(
            !self.is_cut,
            "{bytes} bytes are cut off, and the rest was to be removed at once"
        );
        self.is_cut = bytes == 0;
    }
}
