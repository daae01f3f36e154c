//! A real cluster of processes, real clients, and faults decided by a seed.
//!
//! - [`scenario`]: what is to happen, read from a file and checked;
//! - [`plan`]: the schedule of all events: a pure function of scenario and seed;
//! - `cluster`, `process`: the processes, each datanode with a directory of its own;
//! - `workload`, `model`: clients, and what they were promised;
//! - `mounted`: programs on real mounts, in processes of their own, and what they were promised;
//! - `network`, `disk`: links that are cut, lossy or slow, disks that are full, slow or failing;
//! - `rollback`, `double`: older copies of the namenode, in its place or beside it;
//! - `watch`, `ledger`: the cluster as seen from outside: which replica was where, and when it was removed;
//! - `whole`: waits until a healed cluster is whole again;
//! - [`Metrics`]: metrics of a run in progress;
//! - [`failover`]: how long programs wait when the leading namenode fails;
//! - `probe`, [`measure_slowdown`]: how much the cluster slows down a primary that computes;
//! - [`run()`]: runs a scenario, from the start to the comparison with the model;
//! - [`report`]: the results, as a table, JSON and one HTML page.

pub(crate) mod admin;
mod cluster;
mod disk;
mod double;
mod error;
pub mod failover;
mod faults;
mod ledger;
mod metrics;
mod model;
mod mounted;
mod network;
pub mod plan;
mod primary;
mod probe;
mod process;
pub mod report;
mod rollback;
mod rot;
mod run;
pub mod scenario;
mod slowdown;
mod verify;
mod watch;
mod whole;
mod workload;

pub use disk::FailingDisk;
pub use error::LiveError;
pub use ledger::{Change, Fate};
pub use metrics::Metrics;
pub use mounted::work_on_mounts;
pub use plan::Plan;
pub use run::{Options, Progress, Ran, run};
pub use scenario::Scenario;
pub use slowdown::{Loss, Slowdown, SlowdownOptions, measure as measure_slowdown};
