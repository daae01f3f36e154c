//! The interface of all placement policies.

use std::net::IpAddr;

use harvestfs_protocol::{ids::NodeId, types::StorageClass};
use rand::Rng;
use smallvec::SmallVec;

use crate::view::{Lane, View};

/// Servers, best first; three fit without a heap allocation.
pub type Nodes = SmallVec<[NodeId; 4]>;

/// What is asked of a policy: servers for further replicas of one block.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Further replicas wanted; at least 1.
    pub wanted: u8,
    /// Servers that have a replica which stays. None of them is chosen again, and the new ones are
    /// chosen so that all together are spread well.
    pub existing: &'a [NodeId],
    /// Servers not to choose for other reasons: they just failed the client, or hold a bad replica.
    pub exclude: &'a [NodeId],
    /// Host of the writer, if known, to place the first replica near it.
    pub writer: Option<IpAddr>,
    /// The class of volume asked for, if any.
    pub class: Option<StorageClass>,
    /// What the replicas are for.
    pub lane: Lane,
}

/// Fewer servers than wanted can take a replica.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} replicas wanted, {} can be placed", placeable.len())]
pub struct TooFew {
    /// Further replicas that were wanted.
    pub wanted: u8,
    /// The servers that can take one. The caller decides whether fewer will do.
    pub placeable: Nodes,
}

/// Decides where replicas go. A pure function of its arguments: the same view, request and state
/// of the random generator give the same servers.
pub trait Policy: Send {
    /// The name by which configuration chooses it.
    fn name(&self) -> &'static str;

    /// Chooses `request.wanted` different servers, in the order of the write pipeline.
    ///
    /// # Errors
    /// [`TooFew`] when not that many fit; it carries those that do.
    fn choose(
        &self,
        view: &View,
        request: &Request<'_>,
        rng: &mut dyn Rng,
    ) -> Result<Nodes, TooFew>;

    /// Which of the servers that hold a block should give up its replica, so that what remains is
    /// spread best: an index into `replicas`. `None` when `replicas` is empty.
    fn surplus(&self, view: &View, replicas: &[NodeId]) -> Option<usize>;
}
