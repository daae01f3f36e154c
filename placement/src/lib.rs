//! Placement of replicas: which servers store a block.
//!
//! A [`Policy`] is a pure function of a [`View`] of the cluster and a random generator. The namenode keeps the view
//! up to date, one event at a time; the view maintains indexes, so that choosing the servers of a block costs the
//! same in a cluster of nine servers as in one of ten thousand.
//!
//! - [`view`]: servers and tenants, and which servers can currently be chosen;
//! - [`grid`]: tenants in nine cells, by how often they are reimaged and how busy they get;
//! - [`diversity`]: the constraints between replicas;
//! - [`policy`]: the interface;
//! - [`stock`]: the placement of HDFS;
//! - [`greedy`]: best tenants first;
//! - [`spread`]: Algorithm 2 of OSDI'16, and `harvest`, the default.

#![forbid(unsafe_code)]

pub mod diversity;
pub mod greedy;
pub mod grid;
mod groups;
pub mod policy;
mod search;
pub mod spread;
pub mod stock;
mod tree;
pub mod view;

pub use diversity::Constraints;
pub use greedy::Greedy;
pub use grid::{CELLS, Cell, Grid, LeastReimaged, SIDE, Scope};
pub use policy::{Locality, Nodes, Policy, PolicyKind, PolicyOptions, Request, TooFew};
pub use search::{MostApart, most_apart};
pub use spread::{Harvest, History};
pub use stock::Stock;
pub use view::{
    Area, CellSpace, Lane, Lanes, Location, RackId, Room, ServerView, TenantId, TenantView, View,
};
