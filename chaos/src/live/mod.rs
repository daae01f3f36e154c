//! A real cluster of processes, real clients, and faults decided by a seed.
//!
//! - [`scenario`]: what is to happen, read and checked;
//! - [`plan`]: what happens when: a pure function of scenario and seed;
//! - `cluster`, `process`: the processes, each datanode with a directory of its own;
//! - `workload`, `model`: clients, and what they were promised;
//! - `ledger`: which replica lay where and when it went, seen from outside;
//! - [`run()`]: one run, from the start to the comparison with the model;
//! - [`report`]: what came of it, as a table, JSON and one HTML page.

mod admin;
mod cluster;
mod error;
mod ledger;
mod model;
mod network;
pub mod plan;
mod primary;
mod process;
pub mod report;
mod rot;
mod run;
pub mod scenario;
mod verify;
mod workload;

pub use error::LiveError;
pub use ledger::{Change, Fate};
pub use plan::Plan;
pub use run::{Options, Progress, run};
pub use scenario::{Scenario, ScenarioError};
