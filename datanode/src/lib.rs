//! HarvestFS datanode: keeps replicas of blocks on spare disks of servers with another owner.
//!
//! - `store`: volumes, quotas, replica files, checksums; knows no network;
//! - `service`, `write_stream`, `read_stream`: block streams of clients and other datanodes;
//! - `namenode_link`: registration, heartbeats, reports, commands; `obedience`: whose;
//! - `repair`, `scrubber`: background work, each within a budget;
//! - `busy`: whether all of it is to stop, because the owner needs the server.
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

mod budget;
mod busy;
mod datanode;
mod metrics;
mod namenode_link;
mod node;
mod obedience;
mod options;
mod read_stream;
mod repair;
mod scrubber;
mod service;
mod short_circuit;
mod shrinker;
mod store;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod write_stream;

pub use harvestfs_protocol::types::StorageClass;

pub use datanode::Datanode;
pub use options::{DatanodeOptions, PrimaryOptions, PrimarySource, StartError};
pub use store::disk;
pub use store::{VolumeError, VolumeOptions};
