//! How many volunteers a job should use: servers that provide what their owners leave, in addition to dedicated ones
//! that hold the data ("Harvesting residual resources in interactive clouds", RHIC, sections IV and V).
//!
//! [`Controller`] decides once a minute from measurements; [`simulate()`] runs a job with it, or with a fixed number
//! of volunteers. Productivity is in cores.

mod controller;
mod simulate;

pub use controller::{Controller, Goal, Interval, Rates};
pub use simulate::{Nodes, NodesError, Outcome, Size, WORKLOADS, Workload, simulate};

/// Seconds between two decisions.
pub const INTERVAL_S: f64 = 60.0;
