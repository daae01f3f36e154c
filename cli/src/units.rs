//! Sizes and waiting times as written in configuration files and on the command line, and times as printed.

use std::fmt;
use std::num::NonZero;
use std::str::FromStr;
use std::time::{Duration, UNIX_EPOCH};

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

/// 9999-12-31T23:59:59Z, the last second that RFC 3339 can express, in seconds since 1970.
const LAST_S: u64 = 253_402_300_799;

/// A number of bytes, written as `64GiB`, `500 MB` or `4096`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "SizeText", into = "String")]
pub struct Size(pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum SizeText {
    Bytes(u64),
    Text(String),
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<ByteSize>()
            .map(|size| Self(size.as_u64()))
            .map_err(|_| {
                format!("`{text}` is not a size; write bytes or a unit, for example 64GiB or 500MB")
            })
    }
}

impl TryFrom<SizeText> for Size {
    type Error = String;

    fn try_from(text: SizeText) -> Result<Self, String> {
        match text {
            SizeText::Bytes(bytes) => Ok(Self(bytes)),
            SizeText::Text(text) => text.parse(),
        }
    }
}

impl From<Size> for String {
    fn from(size: Size) -> Self {
        size.to_string()
    }
}

impl fmt::Display for Size {
    /// Writes the size in the largest binary unit that is exact, so that it is read back unchanged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, unit) in UNITS {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

/// How long to wait for something: whole seconds, or `forever`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WaitText", into = "WaitText")]
pub enum Wait {
    /// This many seconds.
    Seconds(NonZero<u32>),
    /// Without a limit.
    Forever,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WaitText {
    Seconds(NonZero<u32>),
    Text(String),
}

const FOREVER: &str = "forever";

impl Wait {
    /// The duration in the form that clients use.
    pub fn duration(self) -> Duration {
        match self {
            Self::Seconds(seconds) => Duration::from_secs(seconds.get().into()),
            Self::Forever => Duration::MAX,
        }
    }
}

impl FromStr for Wait {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == FOREVER {
            return Ok(Self::Forever);
        }
        text.parse().map(Self::Seconds).map_err(|_| {
            format!("`{text}` is no wait; write a number of seconds from 1 on, or `{FOREVER}`")
        })
    }
}

impl TryFrom<WaitText> for Wait {
    type Error = String;

    fn try_from(text: WaitText) -> Result<Self, String> {
        match text {
            WaitText::Seconds(seconds) => Ok(Self::Seconds(seconds)),
            WaitText::Text(text) => text.parse(),
        }
    }
}

impl From<Wait> for WaitText {
    fn from(wait: Wait) -> Self {
        match wait {
            Wait::Seconds(seconds) => Self::Seconds(seconds),
            Wait::Forever => Self::Text(FOREVER.to_owned()),
        }
    }
}

/// Formats a number of bytes for display: `1.5 GiB`.
#[must_use]
pub fn human(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// Formats a time since 1970 in UTC: `2026-11-21T02:37:00Z`. A time from a damaged file may be so late that there is no
/// such form, and formatting it would panic.
#[must_use]
pub fn utc(since_1970: Duration) -> String {
    if since_1970.as_secs() > LAST_S {
        return "after the year 9999".to_owned();
    }
    humantime::format_rfc3339_seconds(UNIX_EPOCH + since_1970).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_survive_being_written_and_read() {
        for bytes in [0, 1, 1000, 4096, 1 << 20, 3 << 30, (1 << 30) + 1, 5 << 40] {
            assert_eq!(Size(bytes).to_string().parse(), Ok(Size(bytes)));
        }
    }

    #[test]
    fn waits_are_seconds_or_for_ever() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Config {
            wait_s: Wait,
        }
        for (text, wait) in [("7", Some(7)), ("\"forever\"", None)] {
            let wait_s = wait.map_or(Wait::Forever, |seconds| {
                Wait::Seconds(NonZero::new(seconds).unwrap())
            });
            let file = format!("wait_s = {text}\n");
            assert_eq!(toml::from_str(&file), Ok(Config { wait_s }));
            assert_eq!(toml::to_string(&Config { wait_s }), Ok(file));
            assert_eq!(text.trim_matches('"').parse(), Ok(wait_s));
        }
        assert_eq!(Wait::Forever.duration(), Duration::MAX);
        for nonsense in ["0", "-1", "soon", "1.5", ""] {
            let error = nonsense.parse::<Wait>().unwrap_err();
            assert!(error.contains("`forever`"), "{error}");
        }
    }

    #[test]
    fn any_time_is_formatted() {
        assert_eq!(
            utc(Duration::from_millis(1_700_000_000_999)),
            "2023-11-14T22:13:20Z"
        );
        assert_eq!(utc(Duration::from_secs(LAST_S)), "9999-12-31T23:59:59Z");
        for late in [
            Duration::from_secs(LAST_S + 1),
            Duration::from_millis(u64::MAX),
            Duration::MAX,
        ] {
            assert_eq!(utc(late), "after the year 9999");
        }
    }

    #[test]
    fn units_are_understood_and_nonsense_is_not() {
        assert_eq!("64GiB".parse(), Ok(Size(64 << 30)));
        assert_eq!("1 MB".parse(), Ok(Size(1_000_000)));
        assert!("many".parse::<Size>().unwrap_err().contains("64GiB"));
        assert!("-1".parse::<Size>().is_err());
    }
}
