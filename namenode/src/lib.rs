//! HarvestFS namenode: keeps the namespace, and knows where blocks are.
//!
//! - [`backup`]: the file of a backup;
//! - [`consensus`]: agrees with other namenodes on the order of records;
//! - [`engine`]: the state machine without I/O;
//! - [`http`]: the page and the metrics;
//! - [`journal`]: makes what must survive durable;
//! - [`server`]: network, sessions, leases and snapshots around both.

pub mod backup;
pub mod consensus;
pub mod engine;
pub mod http;
pub mod journal;
pub mod server;
