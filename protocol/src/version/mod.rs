//! Versions of the wire protocol and of the formats on disk.
//!
//! When two parts of different releases connect, they agree on the newest version that both speak
//! ([`Versions::in_common`]): messages that exist only since a later one are not sent. The formats on disk follow the
//! *version of the cluster*, a record of the namenodes' journal: before an operator has raised it, nothing is written
//! in a way that an earlier version cannot read, and after that there is no way back.
//!
//! One table, `since.rs`, records what exists since which version. A released message is never changed: one with
//! other fields is a new kind, added at the end.

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod samples;
mod since;

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes of the name of a release.
pub const RELEASE_BYTES: usize = 24;

/// A version of the wire protocol and of the formats on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version(pub u32);

impl Version {
    /// The version of 0.2.0, the first release. Clusters without a recorded version have this one.
    pub const V0_2: Self = Self(12);
    /// A version that no release has: that of the build for upgrade tests.
    #[cfg(feature = "next-version")]
    pub const NEXT: Self = Self(Self::V0_2.0 + 1);
    /// The newest version that this program has.
    #[cfg(not(feature = "next-version"))]
    pub const NEWEST: Self = Self::V0_2;
    /// The newest version that this program has.
    #[cfg(feature = "next-version")]
    pub const NEWEST: Self = Self::NEXT;
    /// The oldest version that this program has.
    pub const OLDEST: Self = Self::V0_2;
}

impl Default for Version {
    fn default() -> Self {
        Self::V0_2
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The versions that a program has: these two and all between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The newest.
    pub newest: Version,
    /// The oldest.
    pub oldest: Version,
}

impl Versions {
    /// The versions of this program.
    pub const OURS: Self = Self {
        newest: Version::NEWEST,
        oldest: Version::OLDEST,
    };

    /// Returns the range of this version alone.
    #[must_use]
    pub fn only(version: Version) -> Self {
        Self {
            newest: version,
            oldest: version,
        }
    }

    /// Returns the newest version that two programs have in common, if there is one.
    #[must_use]
    pub fn in_common(self, other: Self) -> Option<Version> {
        let version = self.newest.min(other.newest);
        (version >= self.oldest && version >= other.oldest).then_some(version)
    }

    /// Checks whether a program with these versions may be part of a cluster of that version.
    ///
    /// # Errors
    /// [`Unfit`]
    pub fn check_cluster(self, cluster: Version) -> Result<(), Unfit> {
        if (self.oldest..=self.newest).contains(&cluster) {
            Ok(())
        } else {
            Err(Unfit {
                program: self,
                cluster,
            })
        }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.newest {
            self.newest.fmt(f)
        } else {
            write!(f, "{} to {}", self.oldest, self.newest)
        }
    }
}

/// A program that cannot be a part of a cluster of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error(
    "the cluster has version {cluster}, the program has {program}: {}",
    if *cluster > program.newest {
        "run a release that has the cluster's version; there is no way back after `harvestfs admin \
         upgrade finish`"
    } else {
        "run the release before this one, end its upgrade with `harvestfs admin upgrade finish`, and \
         come back to this one then"
    }
)]
pub struct Unfit {
    /// The versions of the program.
    pub program: Versions,
    /// The version of the cluster.
    pub cluster: Version,
}

/// The name of a release, such as `0.2.0`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Release([u8; RELEASE_BYTES]);

impl Release {
    /// The release of this program.
    #[cfg(not(feature = "next-version"))]
    pub const OURS: Self = Self::cut(env!("CARGO_PKG_VERSION"));
    /// The release of this program.
    #[cfg(feature = "next-version")]
    pub const OURS: Self = Self::cut(concat!(env!("CARGO_PKG_VERSION"), "-next"));

    /// Creates a name, truncated to the available length.
    #[must_use]
    pub const fn cut(name: &str) -> Self {
        let mut bytes = [0; RELEASE_BYTES];
        let mut at = 0;
        while at < RELEASE_BYTES && at < name.len() {
            bytes[at] = name.as_bytes()[at];
            at += 1;
        }
        Self(bytes)
    }

    /// Returns the name as it is sent: padded with zeros.
    #[must_use]
    pub fn encode(self) -> [u8; RELEASE_BYTES] {
        self.0
    }

    /// The inverse of [`Self::encode`]. Bytes that cannot be printed are replaced.
    #[must_use]
    pub fn decode(bytes: [u8; RELEASE_BYTES]) -> Self {
        let printed = |byte: u8| {
            if byte == 0 || byte.is_ascii_graphic() {
                byte
            } else {
                b'?'
            }
        };
        Self(bytes.map(printed))
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.split(|byte| *byte == 0).next().unwrap_or_default();
        f.pad(&String::from_utf8_lossy(name))
    }
}

impl fmt::Debug for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Release({self})")
    }
}

/// A message with a known first version.
pub trait Versioned: Sized {
    /// The first version in which the message exists, with all that is in it.
    fn since(&self) -> Version;

    /// The message to send instead to a part whose version lacks this one, if there is any.
    fn older(&self) -> Option<Self> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions(oldest: u32, newest: u32) -> Versions {
        Versions {
            newest: Version(newest),
            oldest: Version(oldest),
        }
    }

    #[test]
    fn the_lower_of_the_two_newest_is_spoken_if_both_still_have_it() {
        let cases = [
            ((12, 12), (12, 12), Some(12)),
            ((12, 13), (12, 12), Some(12)),
            ((12, 13), (13, 14), Some(13)),
            ((12, 15), (13, 14), Some(14)),
            ((12, 13), (14, 15), None),
            ((15, 16), (12, 13), None),
        ];
        for ((a, b), (c, d), expected) in cases {
            let (one, other) = (versions(a, b), versions(c, d));
            assert_eq!(
                one.in_common(other),
                expected.map(Version),
                "{one}; {other}"
            );
            assert_eq!(
                other.in_common(one),
                expected.map(Version),
                "{other}; {one}"
            );
        }
    }

    #[test]
    fn who_does_not_fit_a_cluster_is_told_which_way_to_go() {
        let program = versions(13, 14);
        assert_eq!(program.check_cluster(Version(13)), Ok(()));
        assert_eq!(program.check_cluster(Version(14)), Ok(()));
        let behind = program.check_cluster(Version(15)).unwrap_err().to_string();
        assert!(behind.contains("version 15"), "{behind}");
        assert!(
            behind.contains("13 to 14") && behind.contains("no way back"),
            "{behind}"
        );
        let ahead = program.check_cluster(Version(12)).unwrap_err().to_string();
        assert!(ahead.contains("the release before"), "{ahead}");
    }

    #[test]
    fn releases_have_names_of_a_bounded_length() {
        assert_eq!(Release::cut("0.2.0").to_string(), "0.2.0");
        assert_eq!(Release::decode(Release::OURS.encode()), Release::OURS);
        let long = "9".repeat(RELEASE_BYTES + 5);
        assert_eq!(Release::cut(&long).to_string(), long[..RELEASE_BYTES]);
        let strange = Release::decode([b'\n'; RELEASE_BYTES]);
        assert_eq!(strange.to_string(), "?".repeat(RELEASE_BYTES));
    }
}
