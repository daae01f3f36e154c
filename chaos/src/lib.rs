//! What happens to a cluster when the owners of its servers do as they like: inflicted on a live cluster
//! of processes, and simulated over months and years.
//!
//! - [`datacentre`]: servers, primary tenants, their load and their reimages: generated, or read
//!   from traces;
//! - [`simulate`]: the production engine (`harvestfs_namenode::engine::cluster` with the policies
//!   of `harvestfs_placement`) in virtual time over such a datacentre.
//!
//! - [`live`]: real processes, clients and faults;
//! - [`report`]: tables and plots.
//!
//! Everything is decided by seeds: the same arguments give the same result.

pub mod datacentre;
pub mod live;
mod random;
pub mod report;
pub mod simulate;
