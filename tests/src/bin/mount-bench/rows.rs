//! The rows of the table: measurement, unit, and target ratio of each.

use std::str::FromStr;

use serde::{Serialize, Serializer};

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Row {
    SeqWrite,
    SeqReadCold,
    SeqReread,
    RandRead1,
    RandRead16,
    Create1,
    Create8,
    CreateFsync1,
    CreateFsync8,
    StatCold1,
    Stat1,
    Stat8,
    Rename1,
    Rename8,
    Unlink1,
    Unlink8,
    Unpack,
    RemoveTree,
}

/// The unit of a row's values; more is better for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Unit {
    /// Millions of bytes per second.
    #[serde(rename = "MB/s")]
    Bytes,
    /// Operations per second.
    #[serde(rename = "ops/s")]
    Operations,
    /// Files of the source tree per second.
    #[serde(rename = "files/s")]
    Files,
}

impl Unit {
    /// The unit as it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bytes => "MB/s",
            Self::Operations => "ops/s",
            Self::Files => "files/s",
        }
    }
}

impl Row {
    /// Every row, in the order of the table.
    pub const ALL: [Row; 18] = [
        Row::SeqWrite,
        Row::SeqReadCold,
        Row::SeqReread,
        Row::RandRead1,
        Row::RandRead16,
        Row::Create1,
        Row::Create8,
        Row::CreateFsync1,
        Row::CreateFsync8,
        Row::StatCold1,
        Row::Stat1,
        Row::Stat8,
        Row::Rename1,
        Row::Rename8,
        Row::Unlink1,
        Row::Unlink8,
        Row::Unpack,
        Row::RemoveTree,
    ];

    /// The name for `--only` and for the JSON output.
    pub fn id(self) -> &'static str {
        self.properties().0
    }

    /// The name in the table.
    pub fn title(self) -> &'static str {
        self.properties().1
    }

    /// The unit of the row's values.
    pub fn unit(self) -> Unit {
        self.properties().2
    }

    /// The target ratio of HarvestFS to MooseFS, if one was set.
    pub fn goal(self) -> Option<f64> {
        self.properties().3
    }

    /// Whether the row unpacks or removes the source tree.
    pub fn needs_tarball(&self) -> bool {
        matches!(self, Self::Unpack | Self::RemoveTree)
    }

    fn properties(self) -> (&'static str, &'static str, Unit, Option<f64>) {
        use Unit::{Bytes, Files, Operations};
        match self {
            Row::SeqWrite => ("seq-write", "sequential write, fsync", Bytes, Some(4.0)),
            Row::SeqReadCold => ("seq-read-cold", "sequential read, cold", Bytes, Some(2.5)),
            Row::SeqReread => ("seq-reread", "sequential read, again", Bytes, Some(3.0)),
            Row::RandRead1 => (
                "rand-read-1",
                "4 KiB random read, cold, 1 thread",
                Operations,
                Some(2.0),
            ),
            Row::RandRead16 => (
                "rand-read-16",
                "4 KiB random read, cold, 16 threads",
                Operations,
                Some(2.0),
            ),
            Row::Create1 => (
                "create-1",
                "4 KiB file: create, write, close; 1 thread",
                Operations,
                Some(4.0),
            ),
            Row::Create8 => (
                "create-8",
                "4 KiB file: create, write, close; 8 threads",
                Operations,
                Some(6.0),
            ),
            Row::CreateFsync1 => (
                "create-fsync-1",
                "the same with fsync; 1 thread",
                Operations,
                Some(1.5),
            ),
            Row::CreateFsync8 => (
                "create-fsync-8",
                "the same with fsync; 8 threads",
                Operations,
                Some(3.0),
            ),
            Row::StatCold1 => ("stat-cold-1", "stat, cold, 1 thread", Operations, None),
            Row::Stat1 => ("stat-1", "stat, 1 thread", Operations, Some(5.0)),
            Row::Stat8 => ("stat-8", "stat, 8 threads", Operations, Some(5.0)),
            Row::Rename1 => ("rename-1", "rename, 1 thread", Operations, Some(1.0)),
            Row::Rename8 => ("rename-8", "rename, 8 threads", Operations, Some(3.0)),
            Row::Unlink1 => ("unlink-1", "unlink, 1 thread", Operations, Some(1.0)),
            Row::Unlink8 => ("unlink-8", "unlink, 8 threads", Operations, Some(3.0)),
            Row::Unpack => ("unpack", "unpack a source tree", Files, Some(5.0)),
            Row::RemoveTree => ("remove-tree", "rm -rf of it", Files, Some(2.0)),
        }
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|row| row.id() == text)
            .ok_or_else(|| {
                let ids: Vec<&str> = Self::ALL.iter().map(|row| row.id()).collect();
                format!("no such row; the rows are {}", ids.join(", "))
            })
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_found_by_its_id() {
        for row in Row::ALL {
            assert_eq!(row.id().parse(), Ok(row));
        }
        assert!("no-such-row".parse::<Row>().is_err());
    }
}
