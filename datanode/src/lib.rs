//! The HarvestFS datanode: stores replicas of blocks on spare disk space of servers that belong to primary tenants.
//!
//! - `engine`: the decisions, as pure code;
//! - `store`: volumes, replica files, checksums; no networking;
//! - `driver`: tasks, sockets and timers that carry out the decisions: block streams of clients and other datanodes
//!   (`service`, `write_stream`, `read_stream`), the link to the namenode (`link`), background work within budgets
//!   (`repair`, `scrubber`).
//!
//! ```no_run
//! use harvestfs_datanode::{Datanode, DatanodeOptions, StorageClass, VolumeOptions};
//! use harvestfs_protocol::identity::Identity;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let identity = Identity::load("/etc/harvestfs".as_ref())?;
//! let namenodes = vec!["10.0.0.1:7400".parse()?];
//! let mut options = DatanodeOptions::new(identity, "nn1".to_owned(), namenodes);
//! options.volumes.push(VolumeOptions {
//!     path: "/data/harvestfs".into(),
//!     quota_bytes: 100 << 30,
//!     class: StorageClass::Ssd,
//! });
//! let datanode = Datanode::start(options).await?;
//! println!("listening on {}", datanode.local_addr());
//! datanode.shutdown().await;
//! # Ok(())
//! # }
//! ```

mod driver;
mod engine;
mod options;
mod store;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use harvestfs_protocol::types::StorageClass;

pub use driver::Datanode;
pub use options::{DatanodeOptions, PrimaryOptions, PrimarySource, StartError};
pub use store::disk;
pub use store::{VolumeError, VolumeOptions};
