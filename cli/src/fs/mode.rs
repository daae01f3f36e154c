//! Modes as `chmod` takes them: `755`, `u+x,go-w`, `a=rX`.

use std::str::FromStr;

/// `S_ISUID`, `S_ISGID` and `S_ISVTX` with the permissions of all three classes.
const ALL_BITS: u16 = 0o7777;

/// A change of a mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ModeChange {
    /// To this mode.
    To(u16),
    /// By these clauses, one after the other.
    By(Vec<Clause>),
}

/// One part of a symbolic change, such as `go-w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clause {
    /// The bits of the classes that it is about.
    classes: u16,
    action: Action,
    /// The bits, in each class.
    bits: u16,
    /// `X`: execution, for directories and what somebody may execute already.
    search: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Add,
    Remove,
    Set,
}

impl ModeChange {
    /// What becomes of a mode.
    pub fn apply(&self, mode: u16, is_directory: bool) -> u16 {
        match self {
            Self::To(mode) => *mode,
            Self::By(clauses) => clauses
                .iter()
                .fold(mode, |mode, clause| clause.apply(mode, is_directory)),
        }
    }
}

impl Clause {
    fn apply(&self, mode: u16, is_directory: bool) -> u16 {
        let mut bits = self.bits;
        if self.search && (is_directory || mode & 0o111 != 0) {
            bits |= 0o111;
        }
        bits &= self.classes;
        match self.action {
            Action::Add => mode | bits,
            Action::Remove => mode & !bits,
            Action::Set => mode & !self.classes | bits,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let at = text.find(['+', '-', '='])?;
        let mut classes = 0;
        for class in text[..at].chars() {
            classes |= match class {
                'u' => 0o4700,
                'g' => 0o2070,
                'o' => 0o1007,
                'a' => ALL_BITS,
                _ => return None,
            };
        }
        if at == 0 {
            classes = ALL_BITS;
        }
        let action = match text.as_bytes()[at] {
            b'+' => Action::Add,
            b'-' => Action::Remove,
            _ => Action::Set,
        };
        let mut bits = 0;
        let mut search = false;
        for letter in text[at + 1..].chars() {
            match letter {
                'r' => bits |= 0o444,
                'w' => bits |= 0o222,
                'x' => bits |= 0o111,
                's' => bits |= 0o6000,
                't' => {
                    bits |= 0o1000;
                    classes |= 0o1000;
                }
                'X' => search = true,
                _ => return None,
            }
        }
        Some(Self {
            classes,
            action,
            bits,
            search,
        })
    }
}

impl FromStr for ModeChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(mode) = u16::from_str_radix(text, 8)
            && mode <= ALL_BITS
        {
            return Ok(Self::To(mode));
        }
        let clauses: Option<Vec<Clause>> = text.split(',').map(Clause::parse).collect();
        clauses.map(Self::By).ok_or_else(|| {
            format!("`{text}` is not a mode; write it as for chmod(1), for example 750 or u+x,go-w")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(change: &str, mode: u16, is_directory: bool) -> u16 {
        let change: ModeChange = change.parse().expect("a mode");
        change.apply(mode, is_directory)
    }

    #[test]
    fn modes_change_as_chmod_changes_them() {
        for (change, before, after) in [
            ("755", 0o600, 0o755),
            ("4711", 0o600, 0o4711),
            ("u+x", 0o644, 0o744),
            ("+x", 0o644, 0o755),
            ("go-w", 0o777, 0o755),
            ("u=rw,go=r", 0o777, 0o644),
            ("a=", 0o777, 0),
            ("g=", 0o2775, 0o705),
            ("u+s", 0o755, 0o4755),
            ("+t", 0o755, 0o1755),
            ("o-x,u+x", 0o655, 0o754),
            ("a+X", 0o644, 0o644),
            ("a+X", 0o744, 0o755),
        ] {
            assert_eq!(
                changed(change, before, false),
                after,
                "{change} of {before:o}"
            );
        }
        assert_eq!(changed("a+X", 0o644, true), 0o755);
    }

    #[test]
    fn what_is_not_a_mode_is_refused() {
        for text in ["", "8", "17777", "u", "u+q", "z+x", "u+x,", "-1", "rwx"] {
            assert!(text.parse::<ModeChange>().is_err(), "{text}");
        }
    }
}
