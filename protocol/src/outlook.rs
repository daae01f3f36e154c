//! What becomes of a write now: how many replicas it gets, and why not all that it asks for.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Datanodes that cannot take new blocks now, each counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    /// Their owners need them.
    pub busy: u32,
    /// They do not answer.
    pub silent: u32,
    /// They get nothing new because what they hold is copied elsewhere.
    pub drained: u32,
    /// They may be away for a while.
    pub in_maintenance: u32,
    /// They are known, and have not registered since the namenode started.
    pub unregistered: u32,
    /// They have no room.
    pub full: u32,
}

impl Unavailable {
    /// All but the full ones: they come back by themselves, or when an operator brings them back.
    #[must_use]
    pub fn away(&self) -> u32 {
        self.busy + self.silent + self.drained + self.in_maintenance + self.unregistered
    }

    /// How they can take new blocks again, or others in their place.
    fn remedy(&self) -> String {
        let mut parts = Vec::new();
        if self.away() > self.drained {
            parts.push("bring back the datanodes that are away, or wait for them");
        }
        // They stay as they are until an operator says otherwise.
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

/// Why a block gets too few replicas to be written: datanodes are away that will be back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// Datanodes that a write needs at least.
    pub needed: u8,
    /// Datanodes that can take it now.
    pub placeable: u8,
    /// The others.
    pub unavailable: Unavailable,
}

impl Shortage {
    /// Whether owners need all that are away.
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

/// How it is with writes, from well to bad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteVerdict {
    /// They get what they ask for.
    #[default]
    Whole,
    /// They get what the datanodes of the cluster can give, which is less than they ask for.
    Curtailed,
    /// They get fewer replicas for now: datanodes are away.
    Fewer,
    /// They wait for datanodes that are away, and fail in the end.
    Waits,
    /// Writes that demand diversity are refused: datanodes that it needs are full.
    NotDiverse,
    /// They are refused: no datanode has room.
    Full,
}

/// What becomes now of a write with the default rules of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteOutlook {
    /// How it is with it.
    pub verdict: WriteVerdict,
    /// Replicas that it asks for.
    pub wanted: u8,
    /// Replicas that the datanodes of the cluster can hold, whether or not they are up.
    pub possible: u8,
    /// What replicas share although files ask that they do not: the datanodes of the cluster cannot
    /// keep it apart.
    pub not_kept: Vec<String>,
    /// Replicas that it needs at once.
    pub needed: u8,
    /// Replicas that it can have at once.
    pub at_once: u8,
    /// Datanodes that cannot take new blocks now.
    pub unavailable: Unavailable,
    /// What can be written, in bytes: none if it would wait or be refused.
    pub writable_bytes: u64,
}

impl WriteOutlook {
    /// What is wrong, and what to do; `None` when writes get what they ask for.
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
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub advice: String,
    /// Writes wait or are refused.
    pub stops_writes: bool,
}

/// A number of things, such as `1 block`, `2 blocks`, `3 entries` or `4 classes`.
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
