//! Buffers for direct I/O: aligned to pages, reused, and bounded in total.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;
use harvestfs_protocol::limits::PACKET_BYTES_MAX;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::layout::PAGE_BYTES;

/// The sizes of buffers in bytes: one chunk, small packets, the largest packet.
const CLASSES_BYTES: [usize; 4] = [PAGE_BYTES, 64 * 1024, 256 * 1024, PACKET_BYTES_MAX];

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Hands out aligned buffers, up to a total limit, and keeps them for reuse.
///
/// A stream that holds no buffer yet may exceed the limit by one. Otherwise two datanodes whose buffers are all filled
/// with each other's packets would wait for each other.
#[derive(Clone)]
pub struct BufferPool {
    inner: Arc<Inner>,
}

struct Inner {
    /// One permit for each page that may still be handed out.
    free_pages: Arc<Semaphore>,
    /// Buffers kept for reuse, by class.
    idle: Mutex<[Vec<Box<[Page]>>; CLASSES_BYTES.len()]>,
    /// Maximum number of buffers kept in each class.
    idle_max: [usize; CLASSES_BYTES.len()],
}

impl BufferPool {
    /// A pool that hands out up to `limit_bytes` bytes at a time.
    pub fn new(limit_bytes: usize) -> Self {
        let pages = (limit_bytes / PAGE_BYTES).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            inner: Arc::new(Inner {
                free_pages: Arc::new(Semaphore::new(pages)),
                idle: Mutex::default(),
                idle_max: CLASSES_BYTES
                    .map(|class_bytes| limit_bytes / CLASSES_BYTES.len() / class_bytes),
            }),
        }
    }

    /// Returns a buffer of at least `bytes` bytes, at most [`PACKET_BYTES_MAX`]; its content is arbitrary. Waits while
    /// the limit is reached, unless the caller `holds_none`.
    ///
    /// # Panics
    /// When `bytes` is too large: packets are checked before.
    pub async fn take(&self, bytes: usize, holds_none: bool) -> Buffer {
        let class = class_of(bytes);
        let pages = (CLASSES_BYTES[class] / PAGE_BYTES) as u32;
        let free_pages = self.inner.free_pages.clone();
        let permit = match free_pages.clone().try_acquire_many_owned(pages) {
            Ok(permit) => Some(permit),
            Err(_) if holds_none => None,
            Err(_) => {
                let permit = free_pages.acquire_many_owned(pages).await;
                Some(permit.expect("the semaphore is never closed"))
            }
        };
        let idle = self.inner.idle.lock()[class].pop();
        Buffer {
            pages: idle.unwrap_or_else(|| new_pages(pages as usize)),
            len: bytes,
            class,
            home: Some(self.inner.clone()),
            _permit: permit,
        }
    }
}

fn class_of(bytes: usize) -> usize {
    let class = CLASSES_BYTES.iter().position(|&it| bytes <= it);
    class.unwrap_or_else(|| panic!("a buffer of {bytes} bytes, more than a packet may have"))
}

fn new_pages(pages: usize) -> Box<[Page]> {
    vec![Page([0; PAGE_BYTES]); pages].into_boxed_slice()
}

/// A page-aligned buffer. It dereferences to the requested number of bytes; its memory is a whole number of pages.
pub struct Buffer {
    pages: Box<[Page]>,
    len: usize,
    class: usize,
    home: Option<Arc<Inner>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Buffer {
    /// A buffer of zeros that belongs to no pool, for single pages outside of streams.
    pub fn unpooled(bytes: usize) -> Self {
        Self {
            pages: new_pages(bytes.div_ceil(PAGE_BYTES)),
            len: bytes,
            class: 0,
            home: None,
            _permit: None,
        }
    }

    /// Sets its length to `bytes` bytes.
    ///
    /// # Panics
    /// When its memory is smaller.
    pub fn set_len(&mut self, bytes: usize) {
        let most = self.pages.len() * PAGE_BYTES;
        assert!(bytes <= most, "{bytes} bytes in a buffer of {most}");
        self.len = bytes;
    }

    /// Its first page.
    ///
    /// # Panics
    /// When it is shorter.
    pub fn first_page(&mut self) -> &mut [u8; PAGE_BYTES] {
        let len = self.len;
        let page = self.first_chunk_mut();
        page.unwrap_or_else(|| panic!("the first page of a buffer of {len} bytes"))
    }

    /// Pads the last page with zeros and makes them part of the buffer.
    pub fn pad_to_page(&mut self) {
        let padded = self.len.next_multiple_of(PAGE_BYTES);
        let len = std::mem::replace(&mut self.len, padded);
        self[len..].fill(0);
    }

    /// Converts it into shared bytes; the memory returns to the pool when the last of them is dropped.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pages are initialised, contiguous arrays of bytes without padding between
        // them (`repr(C)`, size equal to alignment), and borrowed as long as the slice.
        let all = unsafe {
            std::slice::from_raw_parts(
                self.pages.as_ptr().cast::<u8>(),
                self.pages.len() * PAGE_BYTES,
            )
        };
        &all[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the pages are borrowed mutably, and any byte is valid in them.
        let all = unsafe {
            std::slice::from_raw_parts_mut(
                self.pages.as_mut_ptr().cast::<u8>(),
                self.pages.len() * PAGE_BYTES,
            )
        };
        &mut all[..self.len]
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            let mut idle = home.idle.lock();
            if idle[self.class].len() < home.idle_max[self.class] {
                idle[self.class].push(std::mem::take(&mut self.pages));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn buffers_are_aligned_and_bounded() {
        let pool = BufferPool::new(2 * PACKET_BYTES_MAX);
        let first = pool.take(PACKET_BYTES_MAX - 5, true).await;
        assert_eq!(first.as_ptr() as usize % PAGE_BYTES, 0);
        assert_eq!(first.len(), PACKET_BYTES_MAX - 5);
        let second = pool.take(PACKET_BYTES_MAX, false).await;
        let blocked = pool.take(1, false);
        tokio::pin!(blocked);
        let wait = tokio::time::timeout(Duration::from_millis(10), &mut blocked);
        assert!(wait.await.is_err(), "over the limit");
        // A stream that holds no buffer gets one all the same.
        let urgent = pool.take(10, true).await;
        drop(second);
        assert_eq!(blocked.await.len(), 1);
        drop((first, urgent));
    }

    #[tokio::test]
    async fn shared_bytes_return_to_the_pool() {
        let pool = BufferPool::new(PACKET_BYTES_MAX);
        let mut buffer = pool.take(5000, true).await;
        buffer.fill(1);
        buffer.pad_to_page();
        assert_eq!(buffer.len(), 8192);
        assert_eq!(buffer[4999..5001], [1, 0]);
        let bytes = buffer.freeze();
        let part = bytes.slice(10..20);
        drop(bytes);
        assert_eq!(pool.inner.free_pages.available_permits(), 256 - 16);
        drop(part);
        assert_eq!(pool.inner.free_pages.available_permits(), 256);
    }
}
