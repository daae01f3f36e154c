//! HarvestFS namenode: keeps the namespace and tracks where blocks are.
//!
//! - [`backup`]: the backup file;
//! - [`consensus`]: agrees with other namenodes on the order of records;
//! - [`engine`]: the state machine without I/O;
//! - [`http`]: the web page and the metrics;
//! - [`journal`]: makes the state that must survive durable;
//! - [`server`]: network, sessions, leases and snapshots around engine and journal.

pub mod backup;
pub mod consensus;
pub mod engine;
pub mod http;
pub mod journal;
pub mod server;
