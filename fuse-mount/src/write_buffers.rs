//! Reusable memory for the data of large writes. An allocator returns freed memory to the kernel, and the kernel
//! clears each page before it hands it out again: that took an eighth of the time of a large write.

use std::sync::Arc;

use bytes::Bytes;
use harvestfs_protocol::limits::PACKET_BYTES_MAX;
use parking_lot::Mutex;

/// Maximum number of unused buffers that are kept: 32 MiB for a mount.
const FREE_MAX: usize = 32;
/// Smaller writes are allocated individually: they would occupy much more memory than they need.
const WRITE_BYTES_MIN: usize = PACKET_BYTES_MAX / 2;

/// Buffers of [`PACKET_BYTES_MAX`], the most that the kernel writes in one request.
#[derive(Default)]
pub struct WriteBuffers {
    free: Mutex<Vec<Vec<u8>>>,
}

impl WriteBuffers {
    /// Copies the data that the kernel writes.
    pub fn copy(self: &Arc<Self>, data: &[u8]) -> Bytes {
        if data.len() < WRITE_BYTES_MIN {
            return Bytes::copy_from_slice(data);
        }
        let free = self.free.lock().pop();
        let mut buffer = free.unwrap_or_else(|| Vec::with_capacity(PACKET_BYTES_MAX));
        buffer.extend_from_slice(data);
        Bytes::from_owner(Lent {
            buffer,
            pool: self.clone(),
        })
    }
}

/// A buffer that returns to the pool when the last reference to its data is dropped.
struct Lent {
    buffer: Vec<u8>,
    pool: Arc<WriteBuffers>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let mut free = self.pool.free.lock();
        if free.len() < FREE_MAX {
            free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_once_nobody_reads_it() {
        let buffers = Arc::new(WriteBuffers::default());
        let first = buffers.copy(&[1; PACKET_BYTES_MAX]);
        let address = first.as_ptr();
        let part = first.slice(7..9);
        drop(first);
        let second = buffers.copy(&[2; WRITE_BYTES_MIN]);
        assert_ne!(second.as_ptr(), address);
        assert_eq!(part[..], [1; 2]);
        drop(part);
        let third = buffers.copy(&[3; WRITE_BYTES_MIN]);
        assert_eq!(third.as_ptr(), address);
        assert_eq!(third[..], [3; WRITE_BYTES_MIN]);
        assert_eq!(second[..], [2; WRITE_BYTES_MIN]);
    }

    #[test]
    fn few_are_kept_and_small_writes_take_none() {
        let buffers = Arc::new(WriteBuffers::default());
        let many: Vec<_> = (0..2 * FREE_MAX)
            .map(|_| buffers.copy(&[1; WRITE_BYTES_MIN]))
            .collect();
        drop(many);
        assert_eq!(buffers.free.lock().len(), FREE_MAX);
        let small = buffers.copy(&[4; WRITE_BYTES_MIN - 1]);
        assert_eq!(small[..], [4; WRITE_BYTES_MIN - 1]);
        assert_eq!(buffers.free.lock().len(), FREE_MAX);
    }
}
