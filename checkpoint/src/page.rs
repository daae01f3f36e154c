//! Pages of memory and their hashes: what a new image is compared with its parent by.

use std::fmt;
use std::ops::Range;

use rustc_hash::FxHashMap;

/// Bytes of a page in CRIU's images, on every architecture that CRIU compares them on.
pub const PAGE_BYTES: usize = 4096;
/// The same as an offset.
pub const PAGE_BYTES_U64: u64 = PAGE_BYTES as u64;
/// Most pages of one image: 16 TiB, so that a page's number fits 32 bits.
pub const PAGES_MAX: u64 = 1 << 32;

/// Pages of a group, which has a hash of its own: most groups of an image are equal to those of its
/// parent, and one long hash takes a third of the time of many short ones.
pub const GROUP_PAGES: usize = 16;
/// Bytes of a group.
pub const GROUP_BYTES: usize = GROUP_PAGES * PAGE_BYTES;

/// What a file of hashes starts with.
const MAGIC: &[u8; 8] = b"HFSPAGE2";
const HASH_BYTES: usize = 16;

/// The first 128 bits of the BLAKE3 hash of a page, or of a group of pages. What has one hash is taken
/// for the same, so it must be a hash without known collisions.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHash(pub [u8; HASH_BYTES]);

impl PageHash {
    /// In place of the hash of a group that was not made. No pages are known that have it.
    const UNKNOWN: Self = Self([0; HASH_BYTES]);

    /// The hash of one page, or of the pages of a group.
    #[must_use]
    pub fn of(pages: &[u8]) -> Self {
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&blake3::hash(pages).as_bytes()[..HASH_BYTES]);
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
pub struct PageTable {
    pages: Vec<PageHash>,
    /// Of each group of pages; the last one may have fewer.
    groups: Vec<PageHash>,
}

impl PageTable {
    /// Adds the next groups. Only the very last one may have fewer than all pages.
    pub fn extend(&mut self, groups: &[GroupHashes]) {
        for group in groups {
            self.pages.extend(&group.pages);
            self.groups.push(group.whole);
        }
    }

    /// Adds the next pages alone. The hashes of their groups are missing until
    /// [`PageTable::complete_groups`].
    pub fn extend_pages(&mut self, pages: &[PageHash]) {
        self.pages.extend_from_slice(pages);
    }

    /// Adds the hashes of groups that are missing: those of equal groups of `known` at the same place, and
    /// for the others one that no group has. (A comparison then goes by their pages.)
    pub fn complete_groups(&mut self, known: &Self) {
        for pages in self.pages.chunks(GROUP_PAGES).skip(self.groups.len()) {
            let known = known.group(self.groups.len());
            let whole = known.filter(|known| known.pages == pages);
            self.groups
                .push(whole.map_or(PageHash::UNKNOWN, |known| known.whole));
        }
    }

    /// Of an image in memory.
    #[cfg(test)]
    pub(crate) fn of(image: &[u8], known: &Self) -> Self {
        let groups = image.chunks(GROUP_BYTES).enumerate();
        let groups = groups.map(|(number, group)| GroupHashes::of(group, known.group(number)));
        let mut table = Self::default();
        table.extend(&groups.collect::<Vec<_>>());
        table
    }

    /// The hash of a page.
    #[must_use]
    pub fn page(&self, number: u64) -> Option<PageHash> {
        self.pages.get(usize::try_from(number).ok()?).copied()
    }

    /// The hashes of the pages from this one on.
    #[must_use]
    pub fn pages_from(&self, number: usize) -> &[PageHash] {
        self.pages.get(number..).unwrap_or_default()
    }

    /// The hashes of pages; none: some are beyond the end.
    #[must_use]
    pub fn pages_in(&self, numbers: Range<u64>) -> Option<&[PageHash]> {
        let [start, end] = [numbers.start, numbers.end].map(usize::try_from);
        self.pages.get(start.ok()?..end.ok()?)
    }

    /// Number of pages.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Whether it has no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The hashes of a group.
    #[must_use]
    pub fn group(&self, number: usize) -> Option<KnownGroup<'_>> {
        let whole = *self.groups.get(number)?;
        let pages = self.pages.chunks(GROUP_PAGES).nth(number)?;
        Some(KnownGroup { whole, pages })
    }

    /// Bytes of an image with these pages.
    #[must_use]
    pub fn image_bytes(&self) -> u64 {
        self.len() * PAGE_BYTES_U64
    }

    /// As a file: each group's hash, and those of its pages.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let hashes = self.pages.len() + self.groups.len();
        let mut bytes = Vec::with_capacity(MAGIC.len() + hashes * HASH_BYTES);
        bytes.extend_from_slice(MAGIC);
        for (whole, pages) in self.groups.iter().zip(self.pages.chunks(GROUP_PAGES)) {
            bytes.extend_from_slice(&whole.0);
            bytes.extend(pages.iter().flat_map(|hash| hash.0));
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
        let mut table = Self::default();
        for group in hashes.chunks(1 + GROUP_PAGES) {
            let [whole, pages @ ..] = group else {
                return Err(PageTableError::Length);
            };
            if pages.is_empty() {
                return Err(PageTableError::Length);
            }
            table.groups.push(PageHash(*whole));
            table.pages.extend(pages.iter().map(|&hash| PageHash(hash)));
        }
        Ok(table)
    }

    /// Where each different page first occurs.
    #[must_use]
    pub fn index(&self) -> PageIndex {
        let mut first = FxHashMap::default();
        // No image is longer than `PAGES_MAX`; a longer table only finds less.
        for (number, &hash) in (0..=u32::MAX).zip(&self.pages) {
            first.entry(hash).or_insert(number);
        }
        PageIndex(first)
    }
}

/// The hashes of one group of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupHashes {
    whole: PageHash,
    pages: Vec<PageHash>,
}

impl GroupHashes {
    /// Of whole pages. Those of an equal group are taken over when they are known.
    #[must_use]
    pub fn of(group: &[u8], known: Option<KnownGroup<'_>>) -> Self {
        let whole = PageHash::of(group);
        let pages = match known {
            Some(known) if known.whole == whole => known.pages.to_vec(),
            _ => group.chunks(PAGE_BYTES).map(PageHash::of).collect(),
        };
        Self { whole, pages }
    }
}

/// The hashes of a group in a table.
#[derive(Clone, Copy, Debug)]
pub struct KnownGroup<'a> {
    whole: PageHash,
    pages: &'a [PageHash],
}

/// Those of the bytes that belong to whole pages.
#[must_use]
pub fn whole_pages(bytes: &[u8]) -> &[u8] {
    bytes.as_chunks::<PAGE_BYTES>().0.as_flattened()
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
    use proptest::prelude::*;

    use super::*;

    /// Pages of one byte each.
    fn table(pages: &[u8], known: &PageTable) -> PageTable {
        let image: Vec<u8> = pages.iter().flat_map(|&byte| [byte; PAGE_BYTES]).collect();
        PageTable::of(&image, known)
    }

    proptest! {
        #[test]
        fn a_table_is_read_as_it_was_written(pages in proptest::collection::vec(0..3u8, 0..50)) {
            let table = table(&pages, &PageTable::default());
            prop_assert_eq!(PageTable::decode(&table.encode()), Ok(table));
        }

        /// Nothing is read from memory that was not allocated for it, and nothing panics.
        #[test]
        fn what_is_no_table_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..700)) {
            let file = [&MAGIC[..], &bytes].concat();
            if let Ok(table) = PageTable::decode(&file) {
                prop_assert_eq!(table.encode(), file);
            }
        }

        /// However much is known, the hashes are the same.
        #[test]
        fn known_groups_change_nothing(
            known in proptest::collection::vec(0..2u8, 0..60),
            start in 0..60usize,
            rest in proptest::collection::vec(0..2u8, 0..40),
        ) {
            let nothing = PageTable::default();
            let mut pages = known[..start.min(known.len())].to_vec();
            pages.extend(rest);
            let with = table(&pages, &table(&known, &nothing));
            prop_assert_eq!(with, table(&pages, &nothing));
        }
    }

    #[test]
    fn a_damaged_table_is_refused() {
        let bytes = table(&[1; GROUP_PAGES + 1], &PageTable::default()).encode();
        // Within a hash, after a group without pages, and within a group.
        for (cut_bytes, is_table) in [(1, false), (HASH_BYTES, false), (2 * HASH_BYTES, true)] {
            let cut = &bytes[..bytes.len() - cut_bytes];
            assert_eq!(PageTable::decode(cut).is_ok(), is_table, "{cut_bytes}");
        }
        assert_eq!(PageTable::decode(b"HFSPAGE1"), Err(PageTableError::Magic));
        assert_eq!(PageTable::decode(b""), Err(PageTableError::Magic));
    }

    #[test]
    fn a_hash_is_the_start_of_blake3() {
        // BLAKE3 of 4096 zero bytes, as `b3sum` prints it, begins like this.
        assert_eq!(
            format!("{:?}", PageHash::of(&[0; PAGE_BYTES])),
            "PageHash(b6fb73fc46938c981e2b0b4b1ef282ad)"
        );
    }
}
