//! Pages of memory and their hashes: what a new image is compared with its parent by.

use std::fmt;

use ring::digest::{Context, SHA256};
use rustc_hash::FxHashMap;

/// Bytes of a page in CRIU's images, on every architecture that CRIU compares them on.
pub const PAGE_BYTES: usize = 4096;
/// The same as an offset.
pub const PAGE_BYTES_U64: u64 = PAGE_BYTES as u64;
/// Most pages of one image: 16 TiB, so that a page's number fits 32 bits.
pub const PAGES_MAX: u64 = 1 << 32;

/// What a file of hashes starts with.
const MAGIC: &[u8; 8] = b"HFSPAGE1";
const HASH_BYTES: usize = 16;

/// The first 128 bits of a page's SHA-256. Two pages with one hash are taken for the same page, so
/// it must be a hash for which nobody can find two.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHash(pub [u8; HASH_BYTES]);

impl PageHash {
    /// The hash of one page.
    #[must_use]
    pub fn of(page: &[u8]) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(page);
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&context.finish().as_ref()[..HASH_BYTES]);
        Self(hash)
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageHash({:032x})", u128::from_be_bytes(self.0))
    }
}

/// Why a file of hashes cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageTableError {
    /// It is not a file of hashes, or one of another version.
    #[error("it does not start as a table of page hashes does")]
    Magic,
    /// It was cut off.
    #[error("its length is not that of a whole number of hashes")]
    Length,
}

/// The hashes of all pages of an image, in their order; kept beside the image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable(pub Vec<PageHash>);

impl PageTable {
    /// Bytes of an image with these pages.
    #[must_use]
    pub fn image_bytes(&self) -> u64 {
        self.0.len() as u64 * PAGE_BYTES_U64
    }

    /// As a file.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MAGIC.len() + self.0.len() * HASH_BYTES);
        bytes.extend_from_slice(MAGIC);
        for hash in &self.0 {
            bytes.extend_from_slice(&hash.0);
        }
        bytes
    }

    /// From a file.
    ///
    /// # Errors
    /// When it is not one, or was cut off.
    pub fn decode(bytes: &[u8]) -> Result<Self, PageTableError> {
        let hashes = bytes.strip_prefix(MAGIC).ok_or(PageTableError::Magic)?;
        let (hashes, rest) = hashes.as_chunks::<HASH_BYTES>();
        if !rest.is_empty() {
            return Err(PageTableError::Length);
        }
        Ok(Self(hashes.iter().map(|&hash| PageHash(hash)).collect()))
    }

    /// Where each different page first occurs.
    #[must_use]
    pub fn index(&self) -> PageIndex {
        let mut first = FxHashMap::default();
        // No image is longer than `PAGES_MAX`; a longer table only finds less.
        for (number, &hash) in (0..=u32::MAX).zip(&self.0) {
            first.entry(hash).or_insert(number);
        }
        PageIndex(first)
    }
}

/// Finds a page by its hash.
#[derive(Clone, Debug, Default)]
pub struct PageIndex(FxHashMap<PageHash, u32>);

impl PageIndex {
    /// The number of the first page with that hash.
    #[must_use]
    pub fn find(&self, hash: PageHash) -> Option<u64> {
        self.0.get(&hash).map(|&number| u64::from(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let table = PageTable(
            (0..5)
                .map(|byte| PageHash::of(&[byte; PAGE_BYTES]))
                .collect(),
        );
        assert_eq!(PageTable::decode(&table.encode()), Ok(table));
    }

    #[test]
    fn a_damaged_table_is_refused() {
        let bytes = PageTable(vec![PageHash::of(&[1; PAGE_BYTES])]).encode();
        let cut = &bytes[..bytes.len() - 1];
        assert_eq!(PageTable::decode(cut), Err(PageTableError::Length));
        assert_eq!(PageTable::decode(b"HFSPAGE2"), Err(PageTableError::Magic));
        assert_eq!(PageTable::decode(b""), Err(PageTableError::Magic));
    }

    #[test]
    fn a_hash_is_the_start_of_sha_256() {
        // SHA-256 of 4096 zero bytes, as `sha256sum` prints it, begins like this.
        assert_eq!(
            format!("{:?}", PageHash::of(&[0; PAGE_BYTES])),
            "PageHash(ad7facb2586fc6e966c004d7d1d16b02)"
        );
    }
}
