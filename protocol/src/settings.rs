//! Errors in files that users write: configurations, scenarios.

use std::fmt;
use std::path::{Path, PathBuf};

/// An error in a file that a user wrote, and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError {
    path: PathBuf,
    /// Line number from 1; `None` when the error concerns the whole file.
    line: Option<usize>,
    message: String,
}

impl SettingsError {
    /// An error that concerns a whole file, such as one that cannot be read.
    #[must_use]
    pub fn of_file(path: &Path, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            message: message.into(),
        }
    }

    /// An error at a byte of the file's `text`, such as the start of the span that a TOML parser reports. An offset
    /// beyond the end counts as in the last line.
    #[must_use]
    pub fn at(path: &Path, text: &str, offset: usize, message: impl Into<String>) -> Self {
        let before = &text.as_bytes()[..offset.min(text.len())];
        let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
        Self {
            line: Some(line),
            ..Self::of_file(path, message)
        }
    }
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for SettingsError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_line_of_any_offset() {
        let path = Path::new("a.toml");
        let text = "one\nt\u{f6}o\nthree";
        let said = |offset| SettingsError::at(path, text, offset, "wrong").to_string();
        assert_eq!(said(0), "a.toml:1: wrong");
        assert_eq!(said(4), "a.toml:2: wrong");
        // In the middle of a character.
        assert_eq!(said(6), "a.toml:2: wrong");
        assert_eq!(said(usize::MAX), "a.toml:3: wrong");
        assert_eq!(
            SettingsError::of_file(path, "gone").to_string(),
            "a.toml: gone"
        );
    }
}
