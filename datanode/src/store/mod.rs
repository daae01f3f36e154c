//! The block store: replicas on volumes. No networking in here.

mod block_store;
mod block_writer;
mod buffer;
mod caches;
mod changes;
mod checked_text;
mod clock;
pub mod disk;
mod doubles;
mod error;
mod health;
mod inventory;
mod jobs;
mod joining;
mod layout;
mod lending;
mod obeyed_file;
mod open_replica;
mod place;
mod progress;
mod pulse;
mod quota_file;
mod reading;
mod removal;
mod replica;
mod seal;
mod trusted;
mod version_file;
mod volume;
mod workers;

pub use block_store::BlockStore;
pub use block_writer::{BlockWriter, WritePacket};
pub use buffer::BufferPool;
pub use changes::ChangeQueue;
pub use clock::now;
#[cfg(test)]
pub use disk::DiskFile;
pub use disk::{Disk, RealDisk};
pub use doubles::{Double, PieceRemoved};
pub use error::{StoreError, VolumeError};
pub use lending::Lent;
pub use open_replica::Origin;
pub use progress::Progress;
pub use reading::{ChunkRange, Piece};
pub use replica::OpenFile;
pub use volume::{Found, Volume, VolumeOptions};

#[cfg(test)]
mod tests;
