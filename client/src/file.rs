//! Open files.

use std::sync::Arc;

use bytes::Bytes;
use harvestfs_protocol::{ids::InodeId, meta::FallocateMode, types::Attr};

use crate::error::ClientError;

/// What a file is opened for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// To read.
    pub read: bool,
    /// To write.
    pub write: bool,
    /// Every [`File::append`] goes to the end, whoever else appends.
    pub append: bool,
    /// Cut to length 0 first.
    pub truncate: bool,
}

impl OpenFlags {
    /// To read.
    pub const READ: Self = Self {
        read: true,
        write: false,
        append: false,
        truncate: false,
    };
    /// To write.
    pub const WRITE: Self = Self {
        read: false,
        write: true,
        append: false,
        truncate: false,
    };
    /// To read and to write.
    pub const READ_WRITE: Self = Self {
        read: true,
        write: true,
        append: false,
        truncate: false,
    };
}

/// An open file. Cheap to clone; the file is open until the last clone is dropped. Dropping does not
/// wait for written data; [`File::flush`] or [`File::close`] does.
#[derive(Clone)]
pub struct File {
    inner: Arc<()>,
}

#[allow(unused_variables)]
impl File {
    /// The inode.
    pub fn ino(&self) -> InodeId {
        InodeId::ROOT
    }

    /// Attributes, with what this client has written and not yet committed.
    pub async fn attr(&self) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// Up to `len` bytes at `offset`, in pieces as they are in memory; fewer only at the end.
    pub async fn read_pieces(&self, offset: u64, len: usize) -> Result<Vec<Bytes>, ClientError> {
        Err(ClientError::Closed)
    }

    /// As [`File::read_pieces`], in one piece.
    pub async fn read(&self, offset: u64, len: usize) -> Result<Bytes, ClientError> {
        Err(ClientError::Closed)
    }

    /// As [`File::read_pieces`] if all of it is in memory, without waiting.
    pub fn try_read_pieces(&self, offset: u64, len: usize) -> Option<Vec<Bytes>> {
        None
    }

    /// Writes. Waits only while too much written data is in memory.
    pub async fn write(&self, offset: u64, data: Bytes) -> Result<(), ClientError> {
        let _ = &self.inner;
        Err(ClientError::Closed)
    }

    /// As [`File::write`] if there is room in memory, without waiting; gives the data back if not.
    pub fn try_write(&self, offset: u64, data: Bytes) -> Result<Result<(), ClientError>, Bytes> {
        Err(data)
    }

    /// Appends, for a file opened with `append`.
    pub async fn append(&self, data: Bytes) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Makes what was written visible to every later `open` (what `close` promises).
    pub async fn flush(&self) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Makes what was written durable (what `fsync` promises).
    pub async fn sync(&self) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Flushes and closes; says whether any data written through this client got lost.
    pub async fn close(self) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// Sets the length.
    pub async fn truncate(&self, size_bytes: u64) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }

    /// `fallocate(2)`
    pub async fn fallocate(
        &self,
        offset: u64,
        length_bytes: u64,
        mode: FallocateMode,
    ) -> Result<(), ClientError> {
        Err(ClientError::Closed)
    }

    /// The first byte of data at or after `offset`; none: no data follows.
    pub async fn seek_data(&self, offset: u64) -> Result<Option<u64>, ClientError> {
        Err(ClientError::Closed)
    }

    /// The first byte of a hole at or after `offset`, the end of the file being one; none: `offset`
    /// is beyond the end.
    pub async fn seek_hole(&self, offset: u64) -> Result<Option<u64>, ClientError> {
        Err(ClientError::Closed)
    }

    /// Shares `length_bytes` bytes (`u64::MAX`: to the end) of this file at `source_offset` with
    /// `destination` at `destination_offset`; copies no data.
    pub async fn clone_range(
        &self,
        source_offset: u64,
        destination: &File,
        destination_offset: u64,
        length_bytes: u64,
    ) -> Result<Attr, ClientError> {
        Err(ClientError::Closed)
    }
}
