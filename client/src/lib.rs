//! The client of HarvestFS: the file system for programs, and what the mount is built on.
//!
//! A [`Client`] is a session with a cluster. Directories and attributes are read and changed through
//! it; [`Client::open`] and [`Client::create_file`] give [`File`]s. Every operation names the
//! [`Credentials`](harvestfs_protocol::types::Credentials) on whose behalf it is made.
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
//! # What it promises
//!
//! - Within one client, reads see writes at once. Across clients, what [`File::flush`] returned for
//!   is seen by every later open; metadata is always current.
//! - [`File::sync`] returns when the data is on stable storage of every datanode of its blocks and
//!   the journal has the commit. When datanodes fail, data goes to others before that.
//! - A restart of the namenode is ridden out: operations wait and are executed once.
//!
//! # How it is built
//!
//! | module | does |
//! |---|---|
//! | `session`, `sequences`, `calls`, `holds`, `delegations` | the connection to the namenode, leases, calls that are executed once, open files, new files closed before they are committed |
//! | `cache`, `extents`, `listing`, `content`, `permissions` | what is known of the namespace without asking |
//! | `client`, `namespace`, `path`, `walk`, `file` | the API |
//! | `overlay`, `writeback`, `file_state` | written data of a file until it is committed |
//! | `packet`, `pipeline`, `writer`, `allocator`, `seal`, `committer` | how it gets into blocks and becomes part of files |
//! | `compaction` | moves what is left of mostly unused blocks |
//! | `requests` | what travels together for several requests |
//! | `sections`, `reader`, `readahead`, `recent`, `locations` | reading from any replica that answers |
//!
//! The pure ones (`cache`, `extents`, `overlay`, `writeback`, `packet`, `sections`, `permissions`)
//! do no I/O and are tested against obvious models.

#![forbid(unsafe_code)]

mod allocator;
mod cache;
mod calls;
mod client;
mod committer;
mod compaction;
mod content;
mod core;
mod counters;
mod delegations;
mod error;
mod extents;
mod file;
mod file_state;
mod holds;
mod lease;
mod listing;
mod locations;
mod namespace;
mod options;
mod overlay;
mod packet;
mod path;
mod permissions;
mod pipeline;
mod readahead;
mod reader;
mod recent;
mod requests;
mod seal;
mod sections;
mod sequences;
mod session;
mod short_circuit;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod walk;
mod writeback;
mod writer;

pub use client::{CacheListener, Client, DirPage, Invalidated, Invalidation};
pub use compaction::Compacted;
pub use counters::ClientCounters;
pub use error::ClientError;
pub use file::{File, OpenFlags};
pub use options::ClientOptions;
pub use walk::{Entries, Walk, WalkEntry};
