//! Recent happenings and loads, kept in memory for operators.

use std::collections::VecDeque;

use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::node::{Heartbeat, PrimaryLoad};
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::harvest::Harvests;
use crate::engine::cluster::{Happening, RepairEnd};

/// Maximum number of happenings that are kept.
const HAPPENINGS_MAX: usize = 200;
/// Length of one load point of a datanode in seconds: a few heartbeats.
const POINT_S: u32 = 10;
/// Maximum number of points kept for each datanode: half an hour, in a kilobyte.
const POINTS_MAX: usize = 180;

/// What a primary tenant used in ten seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LoadPoint {
    /// When it begins, in seconds since 1970.
    pub at_s: u32,
    /// The highest CPU use reported, in thousandths of all cores; `None` if it is not known.
    pub cpu_permille: Option<u16>,
    /// Whether the server was busy at any time.
    pub busy: bool,
}

/// A happening, as the page shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumberedHappening {
    /// Its number, counted since the start.
    pub number: u64,
    /// When, in seconds since 1970.
    pub at_s: u32,
    /// `reimage`, `death`, `held`, `released`, `repair`, `move`, `failure` or `loss`.
    pub kind: &'static str,
    /// Description in words.
    pub what: String,
}

/// What happened recently.
#[derive(Debug, Default)]
pub(super) struct Activity {
    happenings: VecDeque<NumberedHappening>,
    count: u64,
    /// Number of servers that were reimaged since the start.
    reimages: u64,
    nodes: FxHashMap<NodeId, NodeActivity>,
    /// What schedulers do with harvested resources.
    pub harvests: Harvests,
}

/// What one datanode reported.
#[derive(Debug, Default)]
pub(super) struct NodeActivity {
    pub primary: Option<PrimaryLoad>,
    pub denials: u64,
    points: VecDeque<LoadPoint>,
}

impl NodeActivity {
    /// Its load over time, oldest first.
    pub(super) fn loads(&self) -> Vec<LoadPoint> {
        self.points.iter().copied().collect()
    }
}

impl Activity {
    /// Notes a heartbeat.
    pub(super) fn observe(&mut self, now_s: u32, node: NodeId, heartbeat: &Heartbeat) {
        let it = self.nodes.entry(node).or_default();
        it.primary = heartbeat.primary;
        it.denials = heartbeat.denials;
        let at_s = now_s - now_s % POINT_S;
        if it.points.back().is_none_or(|last| last.at_s != at_s) {
            if it.points.len() == POINTS_MAX {
                it.points.pop_front();
            }
            it.points.push_back(LoadPoint {
                at_s,
                cpu_permille: None,
                busy: false,
            });
        }
        if let Some(point) = it.points.back_mut() {
            let cpu_permille = heartbeat.primary.map(|load| load.cpu_permille);
            point.cpu_permille = point.cpu_permille.max(cpu_permille);
            point.busy |= heartbeat.busy;
        }
    }

    /// Notes a happening; `name` returns the names of datanodes.
    pub(super) fn note(
        &mut self,
        now_s: u32,
        happening: Happening,
        name: impl Fn(NodeId) -> String,
    ) {
        let (kind, what) = match happening {
            Happening::Reimaged { node, replicas } => {
                self.reimages += 1;
                let name = name(node);
                (
                    "reimage",
                    format!("{name} came back without {replicas} replicas"),
                )
            }
            Happening::Died { node } => {
                let name = name(node);
                ("death", format!("{name} is silent and counts as dead"))
            }
            Happening::RepairHeld => {
                let why = "many datanodes fell silent together: repair waits";
                ("held", why.to_owned())
            }
            Happening::RepairReleased => ("released", "repair goes on".to_owned()),
            Happening::RepairEnded {
                block,
                source,
                target,
                is_move,
                end,
            } => {
                let (from, to) = (name(source), name(target));
                match (end, is_move) {
                    (RepairEnd::Done, false) => (
                        "repair",
                        format!("block {block} copied from {from} to {to}"),
                    ),
                    (RepairEnd::Done, true) => ("move", format!("block {block} moved to {to}")),
                    (RepairEnd::Failed, _) => {
                        ("failure", format!("block {block} was not copied to {to}"))
                    }
                }
            }
            Happening::Lost { block } => ("loss", format!("no replica of block {block} is known")),
            Happening::Shortened {
                block,
                left_bytes,
                committed_bytes,
            } => (
                "loss",
                format!("of block {block}, {left_bytes} of {committed_bytes} bytes are left"),
            ),
        };
        if self.happenings.len() == HAPPENINGS_MAX {
            self.happenings.pop_front();
        }
        self.count += 1;
        self.happenings.push_back(NumberedHappening {
            number: self.count,
            at_s: now_s,
            kind,
            what,
        });
    }

    /// The happenings after a number, oldest first.
    pub(super) fn since(&self, number: u64) -> Vec<NumberedHappening> {
        let later = self.happenings.iter().filter(|it| it.number > number);
        later.cloned().collect()
    }

    /// What a datanode reported.
    pub(super) fn node(&self, node: NodeId) -> Option<&NodeActivity> {
        self.nodes.get(&node)
    }

    /// Number of servers that were reimaged since the start.
    pub(super) fn reimages(&self) -> u64 {
        self.reimages
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::BlockId;

    use super::*;

    fn heartbeat(cpu_permille: u16, busy: bool) -> Heartbeat {
        Heartbeat {
            volumes: Vec::new(),
            busy,
            primary: Some(PrimaryLoad {
                cpu_permille,
                ..PrimaryLoad::default()
            }),
            active_streams: 0,
            unix_ms: 0,
            denials: 7,
            removable_bytes: 0,
        }
    }

    #[test]
    fn a_point_is_the_peak_of_its_ten_seconds() {
        let mut activity = Activity::default();
        for (now_s, cpu, busy) in [
            (100, 10, false),
            (103, 400, true),
            (109, 20, false),
            (110, 30, false),
        ] {
            activity.observe(now_s, NodeId(1), &heartbeat(cpu, busy));
        }
        let node = activity.node(NodeId(1)).unwrap();
        let point = |at_s, cpu, busy| LoadPoint {
            at_s,
            cpu_permille: Some(cpu),
            busy,
        };
        assert_eq!(node.loads(), [point(100, 400, true), point(110, 30, false)]);
        assert_eq!((node.denials, node.primary.unwrap().cpu_permille), (7, 30));
        for slot in 0..1_000 {
            activity.observe(200 + slot * POINT_S, NodeId(1), &heartbeat(1, false));
        }
        assert_eq!(activity.node(NodeId(1)).unwrap().loads().len(), POINTS_MAX);
    }

    #[test]
    fn the_last_happenings_are_kept_in_order() {
        let mut activity = Activity::default();
        let name = |node: NodeId| format!("server-{}", node.0);
        let reimaged = Happening::Reimaged {
            node: NodeId(3),
            replicas: 12,
        };
        activity.note(5, reimaged, name);
        let first = activity.since(0);
        assert_eq!(first[0].what, "server-3 came back without 12 replicas");
        assert_eq!(
            (first[0].kind, first[0].number, activity.reimages()),
            ("reimage", 1, 1)
        );
        for block in 0..1_000 {
            let lost = Happening::Lost {
                block: BlockId(block),
            };
            activity.note(6, lost, name);
        }
        let last = activity.since(999);
        assert_eq!(
            last.iter().map(|it| it.number).collect::<Vec<_>>(),
            [1_000, 1_001]
        );
        assert_eq!(activity.since(0).len(), HAPPENINGS_MAX);
    }
}
