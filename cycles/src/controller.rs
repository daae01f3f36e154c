//! The instructions to the resource manager of a cluster about its nodes, which keep the jobs on them to what the
//! nodes' owners leave: a label for the utilisation class of each node, and a capacity that follows its owner's
//! usage.
//!
//! In each step, the controller compares the actual state with the desired one from scratch: instructions that were
//! lost on the way, or forgotten by a restarted resource manager, are repeated. Time is that of any one monotonic
//! clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::offer::{Offer, OwnerShare};
use crate::reserve::Resources;

/// The prefix of class labels; other labels are never touched.
pub const LABEL_PREFIX: &str = "harvestfs-";

/// Most capacities per node that were sent and that the resource manager may still show.
const TOLD_MAX: usize = 8;
/// The state of a node that has disappeared is forgotten after a day.
const FORGET_AFTER_MS: u64 = 24 * 3_600 * 1_000;

/// Returns the label of a class.
#[must_use]
pub fn label_of(class: u32) -> String {
    format!("{LABEL_PREFIX}{class}")
}

/// The settings of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The offer of a node grows once its owner has used less for this long.
    pub grow_after_ms: u64,
    /// Once the owner's usage has been unknown for this long, no more jobs are started there.
    pub unknown_after_ms: u64,
    /// Whether the capacity of a node is taken to be its total although another controller may have reduced it
    /// before.
    pub adopt: bool,
}

/// A node, as shown by the resource manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its id in the resource manager.
    pub id: String,
    /// The HarvestFS server that it is, if it is one.
    pub server: Option<String>,
    /// What jobs may currently use of it.
    pub capacity: Resources,
    /// Its total resources, where the resource manager distinguishes them from its capacity.
    pub total: Option<Resources>,
    /// Its labels.
    pub labels: Vec<String>,
}

/// A server, as shown by HarvestFS.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Server {
    /// Its class, if it belongs to one.
    pub class: Option<u32>,
    /// The usage of its owner; none when unknown.
    pub owner: Option<OwnerShare>,
}

/// An instruction to the resource manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Limits how much of a node jobs may use.
    Resize {
        /// Its id.
        node: String,
        /// Its capacity from now on.
        capacity: Resources,
        /// Whether what runs beyond that has to be evicted.
        evict: bool,
    },
    /// Replaces our label of a node by this one, or removes it.
    Label {
        /// Its id.
        node: String,
        /// The label.
        label: Option<String>,
    },
}

/// The state of a node that a controller needs when it takes over from another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    total: Resources,
    /// Capacities that were sent, the newest last.
    told: VecDeque<Resources>,
}

#[derive(Clone, Debug)]
struct Known {
    remembered: Remembered,
    /// None before the owner's usage is known for the first time.
    offer: Option<Offer>,
    heard_ms: u64,
    seen_ms: u64,
}

/// A controller of the nodes of one resource manager.
#[derive(Clone, Debug)]
pub struct Controller {
    settings: Settings,
    nodes: BTreeMap<String, Known>,
    /// Nodes whose total resources cannot be determined.
    unsure: BTreeSet<String>,
}

impl Controller {
    /// Creates a controller with the state of a previous one.
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

    /// Returns the state for the next controller; it must be stored before the decided actions are sent.
    #[must_use]
    pub fn remembered(&self) -> BTreeMap<String, Remembered> {
        let nodes = self.nodes.iter();
        nodes
            .map(|(id, known)| (id.clone(), known.remembered.clone()))
            .collect()
    }

    /// Whether the controller keeps the state of a node.
    #[must_use]
    pub fn knows(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// Returns the nodes whose capacity is left alone, because it is unknown how far it was reduced before.
    #[must_use]
    pub fn unsure(&self) -> &BTreeSet<String> {
        &self.unsure
    }

    /// Returns the actions that are due. If a server is missing, the usage of its owner counts as unknown.
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

    /// Returns the actions that restore all nodes, whatever is known about their servers now.
    #[must_use]
    pub fn restore(&self, nodes: &[Node]) -> Vec<Action> {
        let mut actions = Vec::new();
        for node in nodes {
            actions.extend(relabel(node, None));
            // Where the resource manager distinguishes the two, nothing was taken away from the total.
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
            // Its capacity is left alone until its owner's usage is known.
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
            // If the owner's usage is unknown, nothing shows that it needs the room.
            evict: owner.is_some(),
        })
    }
}

impl Known {
    /// A capacity that was not sent here was set by someone else, for example because the node was restarted with
    /// another configuration.
    fn learn(&mut self, node: &Node, now_ms: u64) {
        let Remembered { total, told } = &mut self.remembered;
        let has = match (node.total, told.iter().position(|it| *it == node.capacity)) {
            (Some(has), _) => has,
            (None, Some(place)) => {
                // Keep it, however many others get lost.
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

    /// Returns the resources to offer; none when the offer is to stay as it is.
    fn offered(
        &mut self,
        now_ms: u64,
        owner: Option<OwnerShare>,
        settings: &Settings,
    ) -> Option<Resources> {
        if let Some(owner) = owner {
            self.heard_ms = now_ms;
            let total = self.remembered.total;
            // Zero was sent when nothing was known.
            let mut told = self.remembered.told.iter().rev();
            let told = told.find(|told| **told != Resources::default());
            let began = || Offer::new(total, told.copied().unwrap_or(total), now_ms);
            let offer = self.offer.get_or_insert_with(began);
            offer.follow(owner, now_ms, settings.grow_after_ms);
            return Some(offer.offered());
        }
        let is_unknown = now_ms.saturating_sub(self.heard_ms) >= settings.unknown_after_ms;
        match &self.offer {
            // Running containers continue, and none are added.
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

/// Returns the action that gives a node this label, unless it has a foreign label.
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
