//! Which servers a block's replicas go to.
//!
//! A [`Policy`] is a pure function of a [`View`] of the cluster and a random generator. The
//! namenode keeps the view up to date, one event at a time; the view keeps indexes, so that
//! choosing the servers of a block costs the same in a cluster of nine servers and of ten
//! thousand.
//!
//! - [`view`]: servers with rack, tenant, host and room, and which of them may be chosen now;
//! - [`policy`]: the interface;
//! - [`stock`]: the placement of HDFS.

mod index;
pub mod policy;
pub mod stock;
pub mod view;

pub use policy::{Nodes, Policy, Request, TooFew};
pub use stock::Stock;
pub use view::{Area, Lane, Lanes, Location, RackId, Room, ServerView, TenantId, View};
