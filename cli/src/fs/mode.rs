//! Modes as accepted by `chmod`: `755`, `u+x,go-w`, `a=rX`.

use std::str::FromStr;

/// `S_ISUID`, `S_ISGID` and `S_ISVTX` with the permissions of all three classes.
const ALL_BITS: u16 = 0o7777;

/// A change of a mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ModeChange {
    /// Sets this mode.
    To(u16),
    /// Applies these clauses in order.
    By(Vec<Clause>),
}

/// One part of a symbolic change, such as `go-w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clause {
    /// The bits of the classes that it changes.
    classes: u16,
    action: Action,
    /// The permission bits, for all classes.
    bits: u16,
    /// `X`: execution, for directories and for files that already have an execute bit.
    search: bool,
    /// No class was named: `+` and `-` do not change the bits of the umask, and `=` does not set them.
    spares_umask: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Add,
    Remove,
    Set,
}

impl ModeChange {
    /// The mode after the change, made by a user with this umask.
    pub fn apply(&self, mode: u16, is_directory: bool, umask: u16) -> u16 {
        match self {
            Self::To(mode) => *mode,
            Self::By(clauses) => clauses
                .iter()
                .fold(mode, |mode, clause| clause.apply(mode, is_directory, umask)),
        }
    }
}

impl Clause {
    fn apply(&self, mode: u16, is_directory: bool, umask: u16) -> u16 {
        let mut bits = self.bits;
        if self.search && (is_directory || mode & 0o111 != 0) {
            bits |= 0o111;
        }
        bits &= self.classes;
        if self.spares_umask {
            bits &= !umask;
        }
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
        let names_no_class = at == 0;
        if names_no_class {
            classes = ALL_BITS;
        }
        let action = match text.as_bytes()[at] {
            b'+' => Action::Add,
            b'-' => Action::Remove,
            _ => Action::Set,
        };
        let rest = &text[at + 1..];
        if names_no_class && let Some(bits) = octal(rest) {
            return Some(Self {
                classes,
                action,
                bits,
                search: false,
                spares_umask: false,
            });
        }
        let mut bits = 0;
        let mut search = false;
        for letter in rest.chars() {
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
            spares_umask: names_no_class,
        })
    }
}

/// Parses a mode in octal digits. Rejects a sign, which the standard library accepts.
fn octal(text: &str) -> Option<u16> {
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let mode = u16::from_str_radix(text, 8).ok()?;
    (mode <= ALL_BITS).then_some(mode)
}

impl FromStr for ModeChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(mode) = octal(text) {
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
        change.apply(mode, is_directory, 0o022)
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
            ("+w", 0o444, 0o644),
            ("-w", 0o666, 0o466),
            ("=rw", 0o777, 0o644),
            ("a+w,+w", 0o444, 0o666),
            ("+111", 0o644, 0o755),
            ("+022", 0o644, 0o666),
            ("-1", 0o755, 0o754),
            ("=640", 0o777, 0o640),
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
        for text in [
            "", "8", "17777", "u", "u+q", "z+x", "u+x,", "-8", "u+1", "++1", "rwx",
        ] {
            assert!(text.parse::<ModeChange>().is_err(), "{text}");
        }
    }
}
