//! The outlook for writes: how many replicas a write gets now, and why not all that it asks for.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Datanodes that cannot take new blocks now, each counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    /// Their owners need them.
    pub busy: u32,
    /// They do not answer.
    pub silent: u32,
    /// They get no new blocks because their replicas are being copied elsewhere.
    pub drained: u32,
    /// They may be unreachable for a while.
    pub in_maintenance: u32,
    /// They are known, but have not registered since the namenode started.
    pub unregistered: u32,
    /// They have no space left.
    pub full: u32,
}

impl Unavailable {
    /// All but the full ones: they return by themselves, or when an operator brings them back.
    #[must_use]
    pub fn away(&self) -> u32 {
        self.busy + self.silent + self.drained + self.in_maintenance + self.unregistered
    }

    /// Describes how they, or others in their place, can take new blocks again.
    fn remedy(&self) -> String {
        let mut parts = Vec::new();
        if self.away() > self.drained {
            parts.push("bring back the datanodes that are away, or wait for them");
        }
        // Drained servers stay so until an operator changes it.
        if self.drained > 0 {
            parts.push(
                "have drained servers take new blocks again with \
                 `harvestfs admin decommission stop SERVER`, or add datanodes",
            );
        }
        if self.full > 0 {
            parts.push("raise the quotas of full servers with `harvestfs admin quota`");
        }
        if parts.is_empty() {
            parts.push("wait for the datanodes that have not registered yet");
        }
        parts.join("; ")
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.busy, "is busy", "are busy"),
            (self.silent, "is silent", "are silent"),
            (self.drained, "is drained", "are drained"),
            (
                self.in_maintenance,
                "is in maintenance",
                "are in maintenance",
            ),
            (
                self.unregistered,
                "has not registered yet",
                "have not registered yet",
            ),
            (self.full, "is full", "are full"),
        ];
        if *self == Self::default() {
            return f.write_str("others have not registered yet");
        }
        let reasons = parts.iter().filter(|(count, ..)| *count > 0);
        for (index, (count, one, many)) in reasons.enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            let is = if *count == 1 { one } else { many };
            write!(f, "{comma}{count} {is}")?;
        }
        Ok(())
    }
}

/// Why a block gets too few replicas to be written: some datanodes are temporarily unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// Datanodes that a write needs at least.
    pub needed: u8,
    /// Datanodes that can take it now.
    pub placeable: u8,
    /// The other datanodes.
    pub unavailable: Unavailable,
}

impl Shortage {
    /// Whether datanodes are away, and all of those are needed by their owners.
    #[must_use]
    pub fn is_of_busy_ones(&self) -> bool {
        self.unavailable.busy > 0 && self.unavailable.away() == self.unavailable.busy
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a write needs {}, and {} can take it now: {}",
            count(self.needed.into(), "datanode"),
            self.placeable,
            self.unavailable
        )
    }
}

/// The state of writes, from good to bad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteVerdict {
    /// Writes get what they ask for.
    #[default]
    Whole,
    /// Writes get what the datanodes of the cluster can provide, which is less than they ask for.
    Curtailed,
    /// Writes temporarily get fewer replicas: datanodes are unavailable.
    Fewer,
    /// Writes wait for unavailable datanodes, and fail in the end.
    Waits,
    /// Writes that demand diversity are refused: datanodes that it needs are full.
    NotDiverse,
    /// Writes are refused: no datanode has space left.
    Full,
}

/// The outlook for a write with the default rules of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteOutlook {
    /// The state of writes.
    pub verdict: WriteVerdict,
    /// Replicas that it asks for.
    pub wanted: u8,
    /// Replicas that the datanodes of the cluster can hold, whether or not they are up.
    pub possible: u8,
    /// What replicas share although files demand that they do not: the datanodes of the cluster cannot keep it apart.
    pub not_kept: Vec<String>,
    /// Replicas that it needs immediately.
    pub needed: u8,
    /// Replicas that it can have immediately.
    pub at_once: u8,
    /// Datanodes that cannot take new blocks now.
    pub unavailable: Unavailable,
    /// How many bytes can be written: 0 if the write would wait or be refused.
    pub writable_bytes: u64,
}

impl WriteOutlook {
    /// Returns what is wrong, and what to do; `None` when writes get what they ask for.
    #[must_use]
    pub fn trouble(&self) -> Option<WriteTrouble> {
        let (what, advice) = match self.verdict {
            WriteVerdict::Whole => return None,
            WriteVerdict::Curtailed => (
                self.curtailment(),
                "add datanodes, each in an environment, a machine function and a rack of its own: \
                 repair makes up for what is missing"
                    .to_owned(),
            ),
            WriteVerdict::Fewer => (
                format!(
                    "new blocks get {} of {} for now: {}",
                    self.at_once,
                    count(self.possible.into(), "replica"),
                    self.unavailable
                ),
                format!(
                    "{}: repair makes the other replicas then",
                    self.unavailable.remedy()
                ),
            ),
            WriteVerdict::Waits => {
                let shortage = Shortage {
                    needed: self.needed,
                    placeable: self.at_once,
                    unavailable: self.unavailable,
                };
                (
                    format!("writes wait, and fail in the end: {shortage}"),
                    format!(
                        "{}; or take the risk with a lower `min_write_replicas` in namenode.toml",
                        self.unavailable.remedy()
                    ),
                )
            }
            WriteVerdict::NotDiverse => (
                format!(
                    "writes are refused: the servers that have room cannot keep replicas apart: {}",
                    self.unavailable
                ),
                "add datanodes, raise quotas with `harvestfs admin quota`, remove files, or set \
                 `user.harvestfs.durability` to `space`"
                    .to_owned(),
            ),
            WriteVerdict::Full => (
                "writes are refused: no datanode has room".to_owned(),
                "add datanodes, raise quotas with `harvestfs admin quota`, or remove files"
                    .to_owned(),
            ),
        };
        Some(WriteTrouble {
            what,
            advice,
            stops_writes: self.verdict >= WriteVerdict::Waits,
        })
    }

    fn curtailment(&self) -> String {
        let mut parts = Vec::new();
        if self.possible < self.wanted {
            parts.push(format!(
                "blocks get {} of {}",
                self.possible,
                count(self.wanted.into(), "replica")
            ));
        }
        if !self.not_kept.is_empty() {
            parts.push(format!("replicas share a {}", self.not_kept.join(" or a ")));
        }
        format!(
            "{}: the cluster has no more datanodes",
            parts.join(", and ")
        )
    }
}

/// What is wrong with writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WriteTrouble {
    /// The problem.
    pub what: String,
    /// The remedy.
    pub advice: String,
    /// Whether writes wait or are refused.
    pub stops_writes: bool,
}

/// Formats a number of things, such as `1 block`, `2 blocks`, `3 entries` or `4 classes`.
#[must_use]
pub fn count(number: u64, thing: &str) -> String {
    match (number, thing.strip_suffix('y')) {
        (1, _) => format!("1 {thing}"),
        (_, Some(stem)) => format!("{number} {stem}ies"),
        (_, None) if thing.ends_with('s') => format!("{number} {thing}es"),
        (_, None) => format!("{number} {thing}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outlook(verdict: WriteVerdict) -> WriteOutlook {
        WriteOutlook {
            verdict,
            wanted: 3,
            possible: 3,
            needed: 2,
            at_once: 1,
            unavailable: Unavailable {
                busy: 1,
                silent: 2,
                ..Unavailable::default()
            },
            ..WriteOutlook::default()
        }
    }

    #[test]
    fn each_trouble_is_worded_right() {
        let what = |outlook: &WriteOutlook| outlook.trouble().map(|it| it.what);
        assert_eq!(what(&outlook(WriteVerdict::Whole)), None);
        assert_eq!(
            what(&outlook(WriteVerdict::Waits)).unwrap(),
            "writes wait, and fail in the end: a write needs 2 datanodes, and 1 can take it now: \
             1 is busy, 2 are silent"
        );
        assert_eq!(
            what(&outlook(WriteVerdict::Fewer)).unwrap(),
            "new blocks get 1 of 3 replicas for now: 1 is busy, 2 are silent"
        );
        let curtailed = WriteOutlook {
            possible: 1,
            not_kept: vec!["row".into(), "rack".into()],
            ..outlook(WriteVerdict::Curtailed)
        };
        assert_eq!(
            what(&curtailed).unwrap(),
            "blocks get 1 of 3 replicas, and replicas share a row or a rack: the cluster has no \
             more datanodes"
        );
        let shortage = Shortage {
            needed: 1,
            ..Shortage::default()
        };
        assert_eq!(
            shortage.to_string(),
            "a write needs 1 datanode, and 0 can take it now: others have not registered yet"
        );
    }

    #[test]
    fn advice_is_for_what_is_in_the_way() {
        let advice = |unavailable| {
            let outlook = WriteOutlook {
                unavailable,
                ..outlook(WriteVerdict::Fewer)
            };
            outlook.trouble().unwrap().advice
        };
        let drained = Unavailable {
            drained: 2,
            ..Unavailable::default()
        };
        let of_drained = advice(drained);
        assert!(
            of_drained.contains("`harvestfs admin decommission stop SERVER`, or add datanodes")
        );
        assert!(!of_drained.contains("bring back"), "{of_drained}");
        let both = advice(Unavailable {
            silent: 1,
            ..drained
        });
        assert!(
            both.contains("bring back") && both.contains("decommission stop"),
            "{both}"
        );
        let silent = advice(Unavailable {
            silent: 1,
            ..Unavailable::default()
        });
        assert!(!silent.contains("decommission"), "{silent}");
        let full = advice(Unavailable {
            full: 1,
            ..Unavailable::default()
        });
        assert!(full.starts_with("raise the quotas"), "{full}");
    }

    #[test]
    fn things_are_counted() {
        for (number, thing, counted) in [
            (1, "class", "1 class"),
            (2, "class", "2 classes"),
            (0, "entry", "0 entries"),
            (1_000, "block", "1000 blocks"),
        ] {
            assert_eq!(count(number, thing), counted);
        }
    }

    #[test]
    fn only_owners_are_waited_for_when_only_they_are_in_the_way() {
        let of = |busy, silent| Shortage {
            unavailable: Unavailable {
                busy,
                silent,
                ..Unavailable::default()
            },
            ..Shortage::default()
        };
        assert!(of(1, 0).is_of_busy_ones());
        assert!(!of(1, 1).is_of_busy_ones() && !of(0, 0).is_of_busy_ones());
    }
}
