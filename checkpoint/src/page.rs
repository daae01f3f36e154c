//! Pages of memory and their hashes, by which a new image is compared with its parent.

use std::fmt;
use std::ops::Range;

use rustc_hash::FxHashMap;

/// Bytes of a page in CRIU's images, on every architecture that CRIU compares them on.
pub const PAGE_BYTES: usize = 4096;
/// `PAGE_BYTES` as a `u64`, for offsets.
pub const PAGE_BYTES_U64: u64 = PAGE_BYTES as u64;
/// Maximum number of pages in one image (16 TiB), so that a page number fits in 32 bits.
pub const PAGES_MAX: u64 = 1 << 32;

/// Number of pages in a group. Each group has a hash of its own: most groups of an image are equal to
/// those of its parent, and one long hash takes a third of the time of many short ones.
pub const GROUP_PAGES: usize = 16;
/// Bytes of a group.
pub const GROUP_BYTES: usize = GROUP_PAGES * PAGE_BYTES;

/// Magic number at the start of a file of hashes.
const MAGIC: &[u8; 8] = b"HFSPAGE2";
const HASH_BYTES: usize = 16;

/// The first 128 bits of the BLAKE3 hash of a page, or of a group of pages. Pages with equal hashes are
/// assumed to be equal, so the hash function must have no known collisions.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHash(pub [u8; HASH_BYTES]);

impl PageHash {
    /// Placeholder for the hash of a group that was not computed. No pages are known to hash to it.
    const UNKNOWN: Self = Self([0; HASH_BYTES]);

    /// Hashes one page, or the pages of a group.
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
    /// The file is not a file of hashes, or is one of another version.
    #[error("it does not start as a table of page hashes does")]
    Magic,
    /// The file is truncated.
    #[error("its length is not that of a whole number of hashes")]
    Length,
}

/// The hashes of all pages of an image, in page order; stored next to the image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable {
    pages: Vec<PageHash>,
    /// The hash of each group of pages; the last group may be shorter.
    groups: Vec<PageHash>,
}

impl PageTable {
    /// Appends groups. Only the last group of the table may have fewer than `GROUP_PAGES` pages.
    pub fn extend(&mut self, groups: &[GroupHashes]) {
        for group in groups {
            self.pages.extend(&group.pages);
            self.groups.push(group.whole);
        }
    }

    /// Appends pages without the hashes of their groups, which are missing until
    /// [`PageTable::complete_groups`] is called.
    pub fn extend_pages(&mut self, pages: &[PageHash]) {
        self.pages.extend_from_slice(pages);
    }

    /// Fills in the missing group hashes: copies them from equal groups of `known` at the same position, and
    /// uses a placeholder that no group hashes to for the others. (These are then compared page by page.)
    pub fn complete_groups(&mut self, known: &Self) {
        for pages in self.pages.chunks(GROUP_PAGES).skip(self.groups.len()) {
            let known = known.group(self.groups.len());
            let whole = known.filter(|known| known.pages == pages);
            self.groups
                .push(whole.map_or(PageHash::UNKNOWN, |known| known.whole));
        }
    }

    /// The table of an image in memory.
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

    /// The hashes of the pages from `number` on.
    #[must_use]
    pub fn pages_from(&self, number: usize) -> &[PageHash] {
        self.pages.get(number..).unwrap_or_default()
    }

    /// The hashes of a range of pages; `None` when it reaches beyond the end.
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

    /// Whether the table has no pages.
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

    /// Length in bytes of an image with these pages.
    #[must_use]
    pub fn image_bytes(&self) -> u64 {
        self.len() * PAGE_BYTES_U64
    }

    /// Encodes the table as a file: for each group, its hash and those of its pages.
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

    /// Decodes a file.
    ///
    /// # Errors
    /// When it is not a file of hashes, or is truncated.
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

    /// An index of where each distinct page first occurs.
    #[must_use]
    pub fn index(&self) -> PageIndex {
        let mut first = FxHashMap::default();
        // No image is longer than `PAGES_MAX`; in a longer table, the pages beyond are merely not found.
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
    /// Hashes a group of whole pages. The page hashes are copied from `known` when that group is equal.
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

/// The prefix of `bytes` that consists of whole pages.
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

    /// The table of an image whose pages are each filled with one byte.
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

        /// Arbitrary bytes never make decoding panic.
        #[test]
        fn what_is_no_table_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..700)) {
            let file = [&MAGIC[..], &bytes].concat();
            if let Ok(table) = PageTable::decode(&file) {
                prop_assert_eq!(table.encode(), file);
            }
        }

        /// The hashes do not depend on what is known.
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
