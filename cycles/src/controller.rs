//! What the resource manager of a cluster is told about its nodes, so that the jobs on them keep to what the nodes' owners leave:
//! a label for the utilisation class of each, and a capacity that follows its owner's use.
//!
//! It compares what is with what should be, each time anew: what was lost on the way, or forgotten by a resource manager that was
//! started again, is told again. Time is that of any one clock that never goes back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::offer::{Offer, OwnerShare};
use crate::reserve::Resources;

/// What the labels of classes begin with; others are never touched.
pub const LABEL_PREFIX: &str = "harvestfs-";

/// Capacities that were told and that the resource manager may still show.
const TOLD_MAX: usize = 8;
/// What is known of a node that is not there any more is forgotten after a day.
const FORGET_AFTER_MS: u64 = 24 * 3_600 * 1_000;

/// The label of a class.
#[must_use]
pub fn label_of(class: u32) -> String {
    format!("{LABEL_PREFIX}{class}")
}

/// Waits and habits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What is offered of a node grows when its owner has used less for so long.
    pub grow_after_ms: u64,
    /// When the owner's use has not been known for so long, no more jobs begin there.
    pub unknown_after_ms: u64,
    /// Whether the capacity of a node is taken for all that it has although it may have been reduced by a controller before.
    pub adopt: bool,
}

/// A node, as the resource manager shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its id there.
    pub id: String,
    /// The server of HarvestFS that it is, if it is one.
    pub server: Option<String>,
    /// What jobs may use of it by now.
    pub capacity: Resources,
    /// All that it has, where the resource manager tells that apart from its capacity.
    pub total: Option<Resources>,
    /// Its labels.
    pub labels: Vec<String>,
}

/// A server, as HarvestFS shows it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Server {
    /// Its class, if it is in one.
    pub class: Option<u32>,
    /// What its owner uses; none when that is not known.
    pub owner: Option<OwnerShare>,
}

/// What the resource manager is to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Jobs may use so much of a node.
    Resize {
        /// Its id.
        node: String,
        /// Its capacity from now on.
        capacity: Resources,
        /// Whether what runs beyond that has to go.
        evict: bool,
    },
    /// A node has this label from now on instead of another one of ours; or none.
    Label {
        /// Its id.
        node: String,
        /// The label.
        label: Option<String>,
    },
}

/// What has to be known of a node when a controller takes over from another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    total: Resources,
    /// Capacities that it was given, the newest last.
    told: VecDeque<Resources>,
}

#[derive(Clone, Debug)]
struct Known {
    remembered: Remembered,
    /// None before the owner's use is known for the first time.
    offer: Option<Offer>,
    heard_ms: u64,
    seen_ms: u64,
}

/// The state of a controller.
#[derive(Clone, Debug)]
pub struct Controller {
    settings: Settings,
    nodes: BTreeMap<String, Known>,
    /// Nodes of which it cannot be told what they have in all.
    unsure: BTreeSet<String>,
}

impl Controller {
    /// With what a controller before knew.
    #[must_use]
    pub fn new(settings: Settings, remembered: BTreeMap<String, Remembered>) -> Self {
        let known = |(id, remembered)| {
            let known = Known {
                remembered,
                offer: None,
                heard_ms: 0,
                seen_ms: 0,
            };
            (id, known)
        };
        Self {
            settings,
            nodes: remembered.into_iter().map(known).collect(),
            unsure: BTreeSet::new(),
        }
    }

    /// What the next controller has to know; it must be stored before what was decided is told.
    #[must_use]
    pub fn remembered(&self) -> BTreeMap<String, Remembered> {
        let nodes = self.nodes.iter();
        nodes
            .map(|(id, known)| (id.clone(), known.remembered.clone()))
            .collect()
    }

    /// Whether a node was told something.
    #[must_use]
    pub fn knows(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// Nodes whose capacity is left alone, because it cannot be told how far it was reduced before.
    #[must_use]
    pub fn unsure(&self) -> &BTreeSet<String> {
        &self.unsure
    }

    /// What is to be told now. Servers that are missing have owners of whose use nothing is known.
    pub fn step(
        &mut self,
        now_ms: u64,
        nodes: &[Node],
        servers: &BTreeMap<String, Server>,
    ) -> Vec<Action> {
        let mut actions = Vec::new();
        for node in nodes {
            let Some(name) = &node.server else { continue };
            let server = servers.get(name);
            if let Some(server) = server {
                actions.extend(relabel(node, server.class.map(label_of)));
            }
            let owner = server.and_then(|server| server.owner);
            actions.extend(self.resize(now_ms, node, owner));
        }
        self.nodes
            .retain(|_, known| now_ms.saturating_sub(known.seen_ms) < FORGET_AFTER_MS);
        actions
    }

    /// What gives all nodes back as they were, whatever is known of their servers now.
    #[must_use]
    pub fn restore(&self, nodes: &[Node]) -> Vec<Action> {
        let mut actions = Vec::new();
        for node in nodes {
            actions.extend(relabel(node, None));
            // What the resource manager tells apart was never taken away.
            let total = match node.total {
                Some(_) => Some(Resources::default()),
                None => self.nodes.get(&node.id).map(|it| it.remembered.total),
            };
            if let Some(capacity) = total.filter(|total| *total != node.capacity) {
                actions.push(Action::Resize {
                    node: node.id.clone(),
                    capacity,
                    evict: false,
                });
            }
        }
        actions
    }

    fn resize(&mut self, now_ms: u64, node: &Node, owner: Option<OwnerShare>) -> Option<Action> {
        if !self.nodes.contains_key(&node.id) {
            // Its capacity is left alone until its owner's use is known.
            owner?;
            let was_ours = node
                .labels
                .iter()
                .any(|label| label.starts_with(LABEL_PREFIX));
            if was_ours && node.total.is_none() && !self.settings.adopt {
                self.unsure.insert(node.id.clone());
                return None;
            }
            self.unsure.remove(&node.id);
        }
        let total = node.total.unwrap_or(node.capacity);
        let known = self.nodes.entry(node.id.clone()).or_insert_with(|| Known {
            remembered: Remembered {
                total,
                told: VecDeque::new(),
            },
            offer: None,
            heard_ms: now_ms,
            seen_ms: now_ms,
        });
        known.seen_ms = now_ms;
        known.learn(node, now_ms);
        let offered = known.offered(now_ms, owner, &self.settings)?;
        if offered == node.capacity {
            return None;
        }
        known.tell(offered);
        Some(Action::Resize {
            node: node.id.clone(),
            capacity: offered,
            // Of an owner of whom nothing is known nobody can say that it needs the room.
            evict: owner.is_some(),
        })
    }
}

impl Known {
    /// A capacity that was not told here is what somebody else says that the node has: it was started again with another
    /// configuration, say.
    fn learn(&mut self, node: &Node, now_ms: u64) {
        let Remembered { total, told } = &mut self.remembered;
        let has = match (node.total, told.iter().position(|it| *it == node.capacity)) {
            (Some(has), _) => has,
            (None, Some(place)) => {
                // It is not forgotten, however many others do not arrive.
                let shown = told.remove(place);
                told.extend(shown);
                return;
            }
            (None, None) => node.capacity,
        };
        if has != *total {
            *total = has;
            told.clear();
            self.offer = None;
            self.heard_ms = now_ms;
        }
    }

    /// What is to be offered; none when that is to stay as it is.
    fn offered(
        &mut self,
        now_ms: u64,
        owner: Option<OwnerShare>,
        settings: &Settings,
    ) -> Option<Resources> {
        if let Some(owner) = owner {
            self.heard_ms = now_ms;
            let total = self.remembered.total;
            // Nothing was told when nothing was known.
            let mut told = self.remembered.told.iter().rev();
            let told = told.find(|told| **told != Resources::default());
            let began = || Offer::new(total, told.copied().unwrap_or(total), now_ms);
            let offer = self.offer.get_or_insert_with(began);
            offer.follow(owner, now_ms, settings.grow_after_ms);
            return Some(offer.offered());
        }
        let is_unknown = now_ms.saturating_sub(self.heard_ms) >= settings.unknown_after_ms;
        match &self.offer {
            // What runs goes on, and nothing is added.
            _ if is_unknown => Some(Resources::default()),
            Some(offer) => Some(offer.offered()),
            None => None,
        }
    }

    fn tell(&mut self, capacity: Resources) {
        let told = &mut self.remembered.told;
        if told.back() == Some(&capacity) {
            return;
        }
        told.retain(|it| *it != capacity);
        told.push_back(capacity);
        if told.len() > TOLD_MAX {
            told.pop_front();
        }
    }
}

/// What gives a node this label, unless it has one of somebody else.
fn relabel(node: &Node, wanted: Option<String>) -> Option<Action> {
    let is_ours = |label: &String| label.starts_with(LABEL_PREFIX);
    let is_as_wanted = match (&node.labels[..], &wanted) {
        ([], None) => true,
        ([label], Some(wanted)) => label == wanted,
        _ => false,
    };
    let is_foreign = node.labels.iter().any(|label| !is_ours(label));
    (!is_as_wanted && !is_foreign).then(|| Action::Label {
        node: node.id.clone(),
        label: wanted,
    })
}
