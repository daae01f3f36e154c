//! Locations of blocks, the tokens to read them, and which datanodes answered lately.

use std::sync::Arc;
use std::time::{Duration, Instant};

use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::token::BlockToken;
use harvestfs_protocol::types::{Located, NodeInfo};
use rustc_hash::FxHashMap;

/// Blocks remembered, in two generations of half as many.
const BLOCKS_MAX: usize = 65_536;
/// How long a datanode that failed is read from last and not written to.
const AVOID: Duration = Duration::from_secs(15);
/// Bounds of how long a busy datanode is left alone, whatever time it asks for.
const BUSY_MIN: Duration = Duration::from_secs(1);
const BUSY_MAX: Duration = Duration::from_secs(10);
/// A token that expires within this time is renewed before use.
const TOKEN_MARGIN: Duration = Duration::from_secs(60);

/// Where a block can be read, and the token for it.
#[derive(Debug)]
pub(crate) struct Location {
    pub(crate) token: BlockToken,
    /// Best first.
    pub(crate) replicas: Vec<Arc<NodeInfo>>,
}

/// The known locations of blocks and the state of their datanodes.
#[derive(Default)]
pub(crate) struct Replicas {
    young: FxHashMap<BlockId, Arc<Location>>,
    old: FxHashMap<BlockId, Arc<Location>>,
    nodes: FxHashMap<NodeId, Arc<NodeInfo>>,
    failed: FxHashMap<NodeId, Instant>,
    /// Until when a datanode is probably busy.
    busy: FxHashMap<NodeId, Instant>,
    /// How often a datanode answered that it is busy.
    denials: u64,
}

impl Replicas {
    /// Remembers what the namenode answered.
    pub(crate) fn learn(&mut self, located: &Located) {
        for node in &located.nodes {
            let known = self.nodes.get(&node.node);
            if known.is_none_or(|known| **known != *node) {
                self.nodes.insert(node.node, Arc::new(node.clone()));
            }
        }
        for block in &located.blocks {
            let nodes = block.replicas.iter();
            let location = Location {
                token: block.token,
                replicas: nodes
                    .filter_map(|node| self.nodes.get(node).cloned())
                    .collect(),
            };
            self.insert(block.block, Arc::new(location));
        }
    }

    /// Removes the datanodes that a block's pipeline lost.
    pub(crate) fn narrow(&mut self, block: BlockId, nodes: &[NodeId]) {
        if let Some(location) = self.get(block) {
            let kept = location.replicas.iter();
            let replicas = kept.filter(|replica| nodes.contains(&replica.node));
            let location = Location {
                token: location.token,
                replicas: replicas.cloned().collect(),
            };
            self.insert(block, Arc::new(location));
        }
    }

    /// Removes a replica that turned out to be bad. It is not asked again while there are others.
    pub(crate) fn drop_replica(&mut self, block: BlockId, bad: NodeId) {
        let known = self.get(block);
        if let Some(location) = known.filter(|location| location.replicas.len() > 1) {
            let others = location.replicas.iter().map(|replica| replica.node);
            let others: Vec<NodeId> = others.filter(|node| *node != bad).collect();
            self.narrow(block, &others);
        }
    }

    pub(crate) fn forget(&mut self, block: BlockId) {
        self.young.remove(&block);
        self.old.remove(&block);
    }

    /// Returns the location of a block, if it is remembered and its token is valid for a while.
    pub(crate) fn known(&mut self, block: BlockId, unix_now_ms: u64) -> Option<Arc<Location>> {
        let location = self.get(block)?;
        let enough = unix_now_ms + TOKEN_MARGIN.as_millis() as u64;
        (location.token.expires_unix_ms() > enough && !location.replicas.is_empty())
            .then_some(location)
    }

    /// Returns the location of a block, if it is remembered.
    pub(crate) fn get(&mut self, block: BlockId) -> Option<Arc<Location>> {
        if let Some(location) = self.young.get(&block) {
            return Some(location.clone());
        }
        let location = self.old.remove(&block)?;
        self.insert(block, location.clone());
        Some(location)
    }

    fn insert(&mut self, block: BlockId, location: Arc<Location>) {
        if self.young.len() >= BLOCKS_MAX / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(block, location);
    }

    /// Returns a block's replicas, those on busy datanodes after the others, and those on failed ones last.
    pub(crate) fn in_order(&self, location: &Location, now: Instant) -> Vec<Arc<NodeInfo>> {
        let mut replicas = location.replicas.clone();
        replicas.sort_by_key(|node| {
            (
                self.has_failed(node.node, now),
                self.is_busy(node.node, now),
            )
        });
        replicas
    }

    /// Returns the datanodes that failed lately or are busy.
    pub(crate) fn avoided(&mut self, now: Instant) -> Vec<NodeId> {
        self.failed
            .retain(|_, failed| now.saturating_duration_since(*failed) < AVOID);
        self.busy.retain(|_, until| now < *until);
        let mut avoided: Vec<NodeId> = self.failed.keys().copied().collect();
        let busy = self.busy.keys();
        avoided.extend(busy.filter(|node| !self.failed.contains_key(node)));
        avoided
    }

    pub(crate) fn node(&self, node: NodeId) -> Option<Arc<NodeInfo>> {
        self.nodes.get(&node).cloned()
    }

    /// Notes that a datanode failed. Returns what is known about it.
    pub(crate) fn note_failure(&mut self, node: NodeId, now: Instant) -> Option<Arc<NodeInfo>> {
        self.failed.insert(node, now);
        self.node(node)
    }

    /// Notes that a datanode is busy because its owner needs the server.
    pub(crate) fn note_busy(&mut self, node: NodeId, retry_after_ms: u32, now: Instant) {
        let wait = Duration::from_millis(retry_after_ms.into()).clamp(BUSY_MIN, BUSY_MAX);
        self.busy.insert(node, now + wait);
        self.denials += 1;
    }

    /// Returns how often a datanode answered that its owner needs the server.
    pub(crate) fn denials(&self) -> u64 {
        self.denials
    }

    pub(crate) fn note_success(&mut self, node: NodeId) {
        if !self.failed.is_empty() {
            self.failed.remove(&node);
        }
        if !self.busy.is_empty() {
            self.busy.remove(&node);
        }
    }

    fn is_busy(&self, node: NodeId, now: Instant) -> bool {
        self.busy.get(&node).is_some_and(|until| now < *until)
    }

    fn has_failed(&self, node: NodeId, now: Instant) -> bool {
        self.failed
            .get(&node)
            .is_some_and(|failed| now.saturating_duration_since(*failed) < AVOID)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use harvestfs_protocol::token::{Right, TokenKey, TokenSigner};
    use harvestfs_protocol::types::BlockInfo;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    const BLOCK: BlockId = BlockId(9);
    const EXPIRES_MS: u64 = 1_000_000;

    fn located(nodes: u32) -> Located {
        let key = TokenKey {
            key_id: 1,
            secret: [7; 32],
        };
        let node = |node| NodeInfo {
            node: NodeId(node),
            name: format!("datanode-{node}"),
            data_addr: "127.0.0.1:1".parse().unwrap(),
            rack: String::new(),
        };
        Located {
            blocks: vec![BlockInfo {
                block: BLOCK,
                committed_bytes: 0,
                replicas: (1..=nodes).map(NodeId).collect(),
                token: TokenSigner::new(&key).sign(BLOCK, Right::Read, EXPIRES_MS),
                due_replicas: 3,
            }],
            nodes: (1..=nodes).map(node).collect(),
        }
    }

    fn ids(nodes: &[Arc<NodeInfo>]) -> Vec<u32> {
        nodes.iter().map(|node| node.node.0).collect()
    }

    #[test]
    fn a_token_that_ends_soon_is_not_used() {
        let mut replicas = Replicas::default();
        replicas.learn(&located(3));
        let margin_ms = TOKEN_MARGIN.as_millis() as u64;
        assert!(replicas.known(BLOCK, EXPIRES_MS - margin_ms - 1).is_some());
        assert!(replicas.known(BLOCK, EXPIRES_MS - margin_ms).is_none());
        assert!(replicas.get(BLOCK).is_some());
    }

    #[test]
    fn a_bad_replica_is_dropped_while_there_are_others() {
        let mut replicas = Replicas::default();
        replicas.learn(&located(2));
        replicas.drop_replica(BLOCK, NodeId(1));
        assert_eq!(ids(&replicas.get(BLOCK).unwrap().replicas), [2]);
        replicas.drop_replica(BLOCK, NodeId(2));
        assert_eq!(ids(&replicas.get(BLOCK).unwrap().replicas), [2]);
        replicas.narrow(BLOCK, &[]);
        assert!(replicas.known(BLOCK, 0).is_none(), "nothing is left to ask");
    }

    #[derive(Clone, Debug)]
    enum Op {
        Failed(u32),
        Busy(u32, u32),
        Answered(u32),
        Later(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let node = || 1u32..5;
        prop_oneof![
            3 => node().prop_map(Op::Failed),
            3 => (node(), 0u32..20_000).prop_map(|(node, ms)| Op::Busy(node, ms)),
            1 => node().prop_map(Op::Answered),
            3 => (0u64..8_000).prop_map(Op::Later),
        ]
    }

    proptest! {
        /// In virtual time: all replicas are asked, but those that failed last and only for a
        /// while, and new blocks avoid exactly the datanodes that are asked later.
        #[test]
        fn datanodes_are_asked_in_order_of_what_they_did_lately(
            ops in prop::collection::vec(op(), 1..60),
        ) {
            let mut replicas = Replicas::default();
            replicas.learn(&located(4));
            let location = replicas.get(BLOCK).unwrap();
            let mut now = some_time();
            // Until when a datanode counts as failed, and as busy.
            let mut model: BTreeMap<u32, (Option<Instant>, Option<Instant>)> = BTreeMap::new();
            for op in ops {
                match op {
                    Op::Failed(node) => {
                        replicas.note_failure(NodeId(node), now);
                        model.entry(node).or_default().0 = Some(now + AVOID);
                    }
                    Op::Busy(node, ms) => {
                        replicas.note_busy(NodeId(node), ms, now);
                        let ms = u64::from(ms).clamp(1_000, 10_000);
                        model.entry(node).or_default().1 = Some(now + Duration::from_millis(ms));
                    }
                    Op::Answered(node) => {
                        replicas.note_success(NodeId(node));
                        model.remove(&node);
                    }
                    Op::Later(ms) => now += Duration::from_millis(ms),
                }
                let rank = |node: &u32| {
                    let (failed, busy) = model.get(node).copied().unwrap_or_default();
                    let lasts = |until: Option<Instant>| until.is_some_and(|until| now < until);
                    (lasts(failed), lasts(busy))
                };
                let mut expected: Vec<u32> = (1..5).collect();
                expected.sort_by_key(rank);
                prop_assert_eq!(ids(&replicas.in_order(&location, now)), expected.clone());
                let mut avoided: Vec<u32> =
                    replicas.avoided(now).into_iter().map(|node| node.0).collect();
                avoided.sort_unstable();
                let mut late: Vec<u32> =
                    expected.into_iter().filter(|node| rank(node) != (false, false)).collect();
                late.sort_unstable();
                prop_assert_eq!(avoided, late);
            }
        }
    }
}
