//! The HarvestFS client: a file system API for programs, and the foundation of the mount.
//!
//! A [`Client`] is a session with a cluster. Directories and attributes are read and changed
//! through it; [`Client::open`] and [`Client::create_file`] return [`File`]s. Every operation names
//! the [`Credentials`](harvestfs_protocol::types::Credentials) on whose behalf it is made.
//!
//! ```no_run
//! use bytes::Bytes;
//! use harvestfs_client::{Client, ClientOptions, OpenFlags};
//! use harvestfs_protocol::{identity::Identity, types::Credentials};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let identity = Identity::load("/etc/harvestfs/client".as_ref())?;
//! let options = ClientOptions::new(vec!["192.0.2.1:7400".parse()?], "namenode-1", identity);
//! let client = Client::connect(options).await?;
//! let me = Credentials::root();
//!
//! // Whole files at once,
//! client.write_file(&me, b"/greeting", b"hello").await?;
//! assert_eq!(client.read_file(&me, b"/greeting").await?, b"hello");
//!
//! // or piece by piece.
//! let log = client.open_path(&me, b"/log", OpenFlags::READ_WRITE, Some(0o644)).await?;
//! log.write(0, Bytes::from_static(b"first line\n")).await?;
//! log.flush().await?; // others see it from now on
//! log.sync().await?; // and it survives crashes and power losses
//! let start = log.read(0, 5).await?;
//! assert_eq!(&start[..], b"first");
//! log.close().await?;
//!
//! client.close().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! - Within one client, reads see writes immediately. Across clients, data for which
//!   [`File::flush`] returned is visible to every later open; metadata is always current.
//! - [`File::sync`] returns once the data is on stable storage of every datanode of its blocks and
//!   the journal has the commit. If datanodes fail, the data is written to others first.
//! - A namenode restart is ridden out: operations wait and are executed once.
//!
//! # Structure
//!
//! | module | role |
//! |---|---|
//! | `api` | the interface for programs: [`Client`] and [`File`] |
//! | `driver` | tasks, connections and clocks: carries out what the engine decides |
//! | `engine` | decisions, without I/O: what is cached, sent, committed, retried and when, and which replica is read |
//!
//! Each module uses only those below it. The parts of the engine are tested against simple models
//! and in virtual time.

#![forbid(unsafe_code)]

mod api;
mod driver;
mod engine;
mod error;
mod options;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use api::client::Client;
pub use api::compaction::Compacted;
pub use api::counters::ClientCounters;
pub use api::file::{File, OpenFlags};
pub use api::walk::{Entries, Walk, WalkEntry};
pub use driver::session::listener::{CacheListener, Invalidated, Invalidation};
pub use engine::cache::DirPage;
pub use error::ClientError;
pub use options::ClientOptions;
