//! The client of HarvestFS.

mod client;
mod error;
mod file;
mod options;
mod path;

pub use client::{CacheListener, Client, DirPage};
pub use error::ClientError;
pub use file::{File, OpenFlags};
pub use options::ClientOptions;
pub use path::{Walk, WalkEntry};
