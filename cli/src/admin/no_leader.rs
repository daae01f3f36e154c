//! The error that no namenode leads: which namenodes run, the state that each reports, and what an operator can do.

use std::fmt;
use std::net::SocketAddr;

use harvestfs_protocol::group::{Condition, GroupStatus};

/// Advice for when most of them do not run.
pub const ADVICE: &str = "start the others, and look at the logs of those that run. Only when most are lost for \
    good, or were put back to copies, stop what is left and have one go on alone, on its machine, with \
    `harvestfs admin namenode recover --accept-loss DIR`";

/// The state of a namenode that was queried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It leads, and serves.
    Leads,
    /// It runs, but does not lead or does not reach the others.
    Runs,
    /// It runs, but does not take part in the group.
    Outside(Condition),
    /// It is unreachable.
    Away,
}

/// The result of querying a namenode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Its address.
    pub addr: SocketAddr,
    /// Its state.
    pub standing: Standing,
    /// Term and number of its last record: the namenode with the greatest has the most complete journal.
    pub last: Option<(u64, u64)>,
}

impl Asked {
    /// Interprets a namenode's answer; `None` if there was none.
    pub fn new(addr: SocketAddr, answer: Option<&GroupStatus>) -> Self {
        let standing = match answer {
            Some(group) if group.leader == Some(group.this) => Standing::Leads,
            Some(group) if group.condition != Condition::Member => {
                Standing::Outside(group.condition)
            }
            _ => Standing::Runs,
        };
        let last = answer.map(|it| (it.last_term, it.last));
        Self {
            addr,
            standing,
            last,
        }
    }

    /// A namenode that is unreachable.
    pub fn away(addr: SocketAddr) -> Self {
        Self {
            addr,
            standing: Standing::Away,
            last: None,
        }
    }
}

/// No namenode leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoLeader {
    /// The known namenodes.
    pub namenodes: Vec<Asked>,
    /// The namenode that others still consider the leader.
    pub awaited: Option<SocketAddr>,
}

/// Descriptions of one and of several namenodes in a state, in the order in which they are listed.
const STANDINGS: [(Standing, &str, &str); 7] = [
    (Standing::Runs, "which runs", "which run"),
    (
        Standing::Outside(Condition::Copy),
        "whose directory is a copy",
        "whose directories are copies",
    ),
    (
        Standing::Outside(Condition::Forgetful),
        "which has forgotten what it told the others",
        "which have forgotten what they told the others",
    ),
    (
        Standing::Outside(Condition::Founding),
        "which waits for all of the others, to begin with them",
        "which wait for all of the others, to begin with them",
    ),
    (
        Standing::Outside(Condition::New),
        "which is in no group yet",
        "which are in no group yet",
    ),
    (
        Standing::Outside(Condition::Left),
        "which is in the group no more",
        "which are in the group no more",
    ),
    (
        Standing::Away,
        "which is not reached",
        "which are not reached",
    ),
];

/// States of members that must not vote any more.
const COPIES: [Standing; 2] = [
    Standing::Outside(Condition::Copy),
    Standing::Outside(Condition::Forgetful),
];
/// States of namenodes that are not members.
const NO_MEMBERS: [Standing; 2] = [
    Standing::Outside(Condition::New),
    Standing::Outside(Condition::Left),
];

impl NoLeader {
    /// Describes the problem, without advice.
    pub fn what(&self) -> String {
        let mut text = "no namenode leads, and most of them have to work for that".to_owned();
        let named = STANDINGS.iter().filter_map(|(standing, one, several)| {
            let those = self.with(*standing);
            match those.as_slice() {
                [] => None,
                [only] => Some(format!("{only}, {one}")),
                _ => Some(format!("{}, {several}", those.join(", "))),
            }
        });
        let named: Vec<String> = named.collect();
        if !named.is_empty() {
            text.push_str(": known are ");
            text.push_str(&named.join(", and "));
        }
        if let Some(awaited) = self.awaited {
            text.push_str("; the one at ");
            text.push_str(&awaited.to_string());
            text.push_str(" led, as far as others know, and does not any more");
        }
        text
    }

    /// Advises what to do.
    pub fn advice(&self) -> String {
        let members = self.members();
        let away = self.count(&[Standing::Away]);
        let mut lost = self.count(&COPIES);
        let founding = self.count(&[Standing::Outside(Condition::Founding)]);
        if away == 0 && founding < members {
            // They wait for a founding that the others have already completed: they were reset to their initial state.
            lost += founding;
        }
        if members == 0 && !self.namenodes.is_empty() {
            return "name one that is in the group, in `namenodes` of the configuration".to_owned();
        }
        if lost == 0 || (members - lost) * 2 > members {
            return ADVICE.to_owned();
        }
        let known = self
            .namenodes
            .iter()
            .filter(|it| !NO_MEMBERS.contains(&it.standing));
        let newest = known.filter_map(|it| Some((it.last?, it.addr))).max();
        let newest = newest.map_or_else(String::new, |((term, record), addr)| {
            format!("; the one at {addr} has the newest, up to record {record} of term {term}")
        });
        let unknown = match away {
            0 => "",
            _ => ", of those that are reached",
        };
        format!(
            "most of their directories were put back to copies, so that there is none that could take the others in. \
             Where a newer one is found, put that back. Otherwise stop all of them, and have one go on alone, on its \
             machine, with `harvestfs admin namenode recover --accept-loss DIR`{newest}{unknown}. Then start all again, and take \
             the others in with `harvestfs admin namenode add ADDRESS`"
        )
    }

    /// Whether waiting is pointless: at least half of the members are copies, which do not take part.
    pub fn needs_operator(&self) -> bool {
        let copies = self.count(&COPIES);
        copies > 0 && copies * 2 >= self.members()
    }

    /// Number of known namenodes that are or were in the group.
    fn members(&self) -> usize {
        self.namenodes.len() - self.count(&NO_MEMBERS)
    }

    fn count(&self, wanted: &[Standing]) -> usize {
        let those = self.namenodes.iter();
        those.filter(|it| wanted.contains(&it.standing)).count()
    }

    fn with(&self, standing: Standing) -> Vec<String> {
        let those = self.namenodes.iter().filter(|it| it.standing == standing);
        those.map(|it| it.addr.to_string()).collect()
    }
}

impl fmt::Display for NoLeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what(), self.advice())
    }
}

impl std::error::Error for NoLeader {}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const COPY: Standing = Standing::Outside(Condition::Copy);
    const FOUNDING: Standing = Standing::Outside(Condition::Founding);

    fn at(port: u16) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, port).into()
    }

    /// Namenodes whose last records are 10, 20 and so on in one term, except that the first has fewer, in a later term.
    fn none(standings: &[Standing]) -> NoLeader {
        let asked = (1..).zip(standings).map(|(port, standing)| Asked {
            addr: at(port),
            standing: *standing,
            last: (*standing != Standing::Away).then_some(match port {
                1 => (7, 5),
                _ => (6, u64::from(port) * 10),
            }),
        });
        NoLeader {
            namenodes: asked.collect(),
            awaited: None,
        }
    }

    #[test]
    fn it_says_who_runs_who_does_not_and_what_to_do_and_contradicts_itself_nowhere() {
        let none = NoLeader {
            awaited: Some(at(3)),
            ..none(&[Standing::Runs, Standing::Away, Standing::Away])
        };
        let text = none.to_string();
        for part in [
            "no namenode leads",
            "127.0.0.1:1, which runs",
            "127.0.0.1:2, 127.0.0.1:3, which are not reached",
            "127.0.0.1:3 led, as far as others know, and does not any more",
            "harvestfs admin namenode recover --accept-loss",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("does;") && !text.contains("; the one at 127.0.0.1:3 does"));
        assert!(!text.contains("; ask the one at"));
    }

    #[test]
    fn most_are_copies_and_the_newest_is_to_go_on() {
        for standings in [
            &[COPY, COPY, COPY][..],
            &[COPY, COPY, Standing::Away],
            &[
                Standing::Runs,
                COPY,
                Standing::Outside(Condition::Forgetful),
            ],
            // They wait in vain for a founding that the other one has completed.
            &[Standing::Runs, FOUNDING, FOUNDING],
            &[
                COPY,
                COPY,
                Standing::Runs,
                Standing::Outside(Condition::Left),
            ],
        ] {
            let text = none(standings).to_string();
            assert!(!text.contains("start the others"), "{standings:?}: {text}");
            let newest = "127.0.0.1:1 has the newest, up to record 5 of term 7";
            assert!(text.contains(newest), "{standings:?}: {text}");
        }
    }

    #[test]
    fn it_is_not_waited_for_when_most_are_copies() {
        for (standings, needs_operator) in [
            (&[COPY, COPY, Standing::Runs][..], true),
            (&[COPY, Standing::Runs], true),
            (
                &[COPY, COPY, Standing::Runs, Standing::Runs, Standing::Away],
                false,
            ),
            // One has already completed the founding, and the others are about to.
            (&[Standing::Runs, FOUNDING, FOUNDING], false),
            (&[Standing::Away], false),
        ] {
            assert_eq!(
                none(standings).needs_operator(),
                needs_operator,
                "{standings:?}"
            );
        }
    }

    #[test]
    fn those_that_are_missing_are_to_be_started_while_most_are_no_copies() {
        for standings in [
            &[COPY, Standing::Runs, Standing::Away][..],
            &[FOUNDING, FOUNDING, Standing::Away],
            &[FOUNDING, FOUNDING, FOUNDING],
            &[Standing::Away],
        ] {
            let advice = none(standings).advice();
            assert!(advice.contains("start the others"), "{standings:?}");
        }
        let elsewhere = none(&[Standing::Outside(Condition::New)]);
        assert!(elsewhere.advice().contains("name one that is in the group"));
    }
}
