//! CRIU's page maps, which record the addresses of the pages in an image (`images/pagemap.proto` of
//! CRIU). Does no I/O.

use crate::page::{PAGE_BYTES_U64, PAGES_MAX};

/// The magic number of all images, followed by that of page maps.
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56];
/// Maximum length of one entry in bytes: it consists of a few numbers.
const ENTRY_BYTES_MAX: usize = 64;

/// The pages are in the image of the parent.
pub const IN_PARENT: u32 = 1;
/// The pages are in the image.
pub const PRESENT: u32 = 1 << 2;

/// Why a page map cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageMapError {
    /// The file is another kind of image.
    #[error("it does not start as a map of pages does")]
    Magic,
    /// The file is truncated, or is not a sequence of entries.
    #[error("it is cut off or damaged")]
    Damaged,
    /// Runs of pages are empty, overlap, are out of order, are not page-aligned, exceed the maximum number of pages, or
    /// extend beyond the address space.
    #[error("its runs of pages are not in the order of their addresses")]
    Order,
}

/// A run of pages that are contiguous in memory and in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Address of the first page.
    pub address: u64,
    /// Number of pages.
    pub pages: u64,
    /// Flags that say where the pages are stored, and others that CRIU needs for the restore.
    pub flags: u32,
}

impl Run {
    fn end(&self) -> Option<u64> {
        let bytes = self.pages.checked_mul(PAGE_BYTES_U64)?;
        self.address.checked_add(bytes)
    }
}

/// A page map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageMap {
    pages_id: u32,
    runs: Vec<Run>,
    /// For each run, the number of its first page in the image.
    first_pages: Vec<u64>,
    /// Number of pages in the image.
    image_pages: u64,
}

impl PageMap {
    /// An empty map for the image `pages-ID.img`.
    #[must_use]
    pub fn new(pages_id: u32) -> Self {
        Self {
            pages_id,
            runs: Vec::new(),
            first_pages: Vec::new(),
            image_pages: 0,
        }
    }

    /// The number in the name of the image that holds the pages.
    #[must_use]
    pub fn pages_id(&self) -> u32 {
        self.pages_id
    }

    /// Number of pages in the image.
    #[must_use]
    pub fn image_pages(&self) -> u64 {
        self.image_pages
    }

    /// The runs, in ascending order of address.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Appends a run, merging it with the last one where it continues that one.
    ///
    /// # Errors
    /// [`PageMapError::Order`]
    pub fn push(&mut self, run: Run) -> Result<(), PageMapError> {
        let before = self.runs.last().map_or(Some(0), Run::end);
        let is_behind = before.is_some_and(|end| end <= run.address);
        let in_image = if run.flags & PRESENT == 0 {
            0
        } else {
            run.pages
        };
        // An entry's number of pages has 32 bits.
        let fits =
            run.pages > 0 && run.pages < PAGES_MAX && run.pages <= PAGES_MAX - self.image_pages;
        let is_aligned = run.address.is_multiple_of(PAGE_BYTES_U64);
        if !is_aligned || !is_behind || !fits || run.end().is_none() {
            return Err(PageMapError::Order);
        }
        match self.runs.last_mut() {
            Some(last)
                if before == Some(run.address)
                    && last.flags == run.flags
                    && last.pages + run.pages < PAGES_MAX =>
            {
                last.pages += run.pages;
            }
            _ => {
                self.runs.push(run);
                self.first_pages.push(self.image_pages);
            }
        }
        self.image_pages += in_image;
        Ok(())
    }

    /// Finds the pages of an address range in the image: returns the runs that cover the range, each with
    /// the number of its first page, or `None` when some of the pages are not in the image.
    #[must_use]
    pub fn find(&self, address: u64, pages: u64) -> Option<Vec<(u64, Run)>> {
        let end = Run {
            address,
            pages,
            flags: 0,
        }
        .end()?;
        if pages == 0 || !address.is_multiple_of(PAGE_BYTES_U64) {
            return None;
        }
        let mut found = Vec::new();
        let mut next = address;
        let mut number = self
            .runs
            .partition_point(|run| run.address <= address)
            .checked_sub(1)?;
        while next < end {
            let run = self.runs.get(number)?;
            let run_end = run.end()?;
            if run.address > next || run_end <= next || run.flags & PRESENT == 0 {
                return None;
            }
            let skipped = (next - run.address) / PAGE_BYTES_U64;
            let pages = (run_end.min(end) - next) / PAGE_BYTES_U64;
            found.push((
                self.first_pages[number] + skipped,
                Run {
                    address: next,
                    pages,
                    flags: run.flags,
                },
            ));
            next = run_end;
            number += 1;
        }
        Some(found)
    }

    /// Decodes an image.
    ///
    /// # Errors
    /// When it is not a page map, or is damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self, PageMapError> {
        let mut rest = bytes.strip_prefix(&MAGIC).ok_or(PageMapError::Magic)?;
        let head = entry(&mut rest)?.ok_or(PageMapError::Damaged)?;
        let pages_id = head[1].ok_or(PageMapError::Damaged)?;
        let pages_id = u32::try_from(pages_id).map_err(|_| PageMapError::Damaged)?;
        let mut map = Self::new(pages_id);
        while let Some([_, address, few_pages, in_parent, flags, pages]) = entry(&mut rest)? {
            let address = address.ok_or(PageMapError::Damaged)?;
            // Later releases also store the number of pages with 64 bits.
            let pages = pages.or(few_pages).ok_or(PageMapError::Damaged)?;
            let flags = match (in_parent, flags) {
                (Some(1), flags) => flags.unwrap_or(0) | u64::from(IN_PARENT),
                (_, Some(flags)) => flags,
                (_, None) => u64::from(PRESENT),
            };
            let flags = u32::try_from(flags).map_err(|_| PageMapError::Damaged)?;
            map.push(Run {
                address,
                pages,
                flags,
            })?;
        }
        Ok(map)
    }

    /// Encodes an image that every CRIU that can send its pages also reads.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        put_entry(&mut bytes, &[(1, u64::from(self.pages_id))]);
        for run in &self.runs {
            put_entry(
                &mut bytes,
                &[(1, run.address), (2, run.pages), (4, u64::from(run.flags))],
            );
        }
        bytes
    }
}

/// The fields of the next entry, indexed by tag; unknown tags are skipped. `None` at the end.
fn entry(rest: &mut &[u8]) -> Result<Option<[Option<u64>; 6]>, PageMapError> {
    if rest.is_empty() {
        return Ok(None);
    }
    let (length, after) = rest.split_first_chunk::<4>().ok_or(PageMapError::Damaged)?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > ENTRY_BYTES_MAX {
        return Err(PageMapError::Damaged);
    }
    let (mut message, after) = after
        .split_at_checked(length)
        .ok_or(PageMapError::Damaged)?;
    *rest = after;
    let mut numbers = [None; 6];
    while !message.is_empty() {
        let key = varint(&mut message)?;
        // All fields are varints (wire type 0).
        if key & 7 != 0 {
            return Err(PageMapError::Damaged);
        }
        let number = varint(&mut message)?;
        let tag = usize::try_from(key >> 3).map_err(|_| PageMapError::Damaged)?;
        if let Some(slot) = numbers.get_mut(tag) {
            *slot = Some(number);
        }
    }
    Ok(Some(numbers))
}

fn varint(bytes: &mut &[u8]) -> Result<u64, PageMapError> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(PageMapError::Damaged)?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(PageMapError::Damaged)
}

fn put_entry(bytes: &mut Vec<u8>, fields: &[(u8, u64)]) {
    let mut message = Vec::new();
    for &(tag, number) in fields {
        message.push(tag << 3);
        put_varint(&mut message, number);
    }
    // A few numbers: far less than 4 GiB.
    bytes.extend_from_slice(&(message.len() as u32).to_le_bytes());
    bytes.append(&mut message);
}

fn put_varint(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(runs: &[(u64, u64, u32)]) -> PageMap {
        let mut map = PageMap::new(7);
        for &(page, pages, flags) in runs {
            let address = page * PAGE_BYTES_U64;
            map.push(Run {
                address,
                pages,
                flags,
            })
            .expect("they are in order");
        }
        map
    }

    fn find(map: &PageMap, page: u64, pages: u64) -> Option<Vec<(u64, u64)>> {
        let found = map.find(page * PAGE_BYTES_U64, pages)?;
        Some(
            found
                .iter()
                .map(|(first, run)| (*first, run.pages))
                .collect(),
        )
    }

    #[test]
    fn pages_are_found_by_their_address() {
        let map = map(&[(10, 4, PRESENT), (14, 2, PRESENT | 2), (20, 3, PRESENT)]);
        assert_eq!(map.image_pages(), 9);
        assert_eq!(find(&map, 10, 4), Some(vec![(0, 4)]));
        assert_eq!(find(&map, 12, 4), Some(vec![(2, 2), (4, 2)]));
        assert_eq!(find(&map, 22, 1), Some(vec![(8, 1)]));
        for (page, pages) in [(9, 1), (15, 2), (16, 1), (22, 2), (23, 1), (0, 1)] {
            assert_eq!(find(&map, page, pages), None, "{page} {pages}");
        }
        assert_eq!(map.find(u64::MAX, 2), None);
        assert_eq!(map.find(10 * PAGE_BYTES_U64 + 1, 1), None);
        assert_eq!(map.find(10 * PAGE_BYTES_U64, 0), None);
    }

    #[test]
    fn what_is_in_the_parent_is_not_in_the_image() {
        let map = map(&[(1, 4, IN_PARENT), (5, 2, PRESENT)]);
        assert_eq!(map.image_pages(), 2);
        assert_eq!(find(&map, 1, 1), None);
        assert_eq!(find(&map, 5, 2), Some(vec![(0, 2)]));
    }

    #[test]
    fn runs_that_go_on_are_one() {
        let map = map(&[(1, 4, PRESENT), (5, 2, PRESENT), (7, 1, PRESENT | 2)]);
        let pages: Vec<u64> = map.runs().iter().map(|run| run.pages).collect();
        assert_eq!(pages, [6, 1]);
    }

    #[test]
    fn runs_that_overlap_or_leave_the_address_space_are_refused() {
        for (address, pages) in [
            (0, 1),
            (8 * PAGE_BYTES_U64, 0),
            (u64::MAX - 4095, 1),
            (1 << 40, u64::MAX),
            (8 * PAGE_BYTES_U64 + 1, 1),
        ] {
            let mut map = map(&[(4, 4, PRESENT)]);
            let run = Run {
                address,
                pages,
                flags: PRESENT,
            };
            assert_eq!(map.push(run), Err(PageMapError::Order), "{run:?}");
        }
    }

    /// The start of an image of CRIU 4.1.1: a head with `pages_id` 1, a run of 0x12 pages at 0x400000.
    #[test]
    fn an_image_of_criu_is_read() {
        let bytes = b"\x19\x43\x56\x54\x25\x40\x08\x56\x02\0\0\0\x08\x01\
            \x09\0\0\0\x08\x80\x80\x80\x02\x10\x12\x20\x04";
        let map = PageMap::decode(bytes).expect("it is one");
        let run = Run {
            address: 0x40_0000,
            pages: 0x12,
            flags: PRESENT,
        };
        assert_eq!((map.pages_id(), map.runs()), (1, &[run][..]));
        assert_eq!(map.encode(), bytes);
        for length in [0, 7, 8, 12, bytes.len() - 1] {
            assert!(PageMap::decode(&bytes[..length]).is_err(), "{length}");
        }
    }

    /// Releases without flags use another field to say where pages are; later ones have wider numbers.
    #[test]
    fn images_of_other_releases_are_read() {
        let image = |fields: &[(u8, u64)]| {
            let mut bytes = PageMap::new(1).encode();
            put_entry(&mut bytes, fields);
            PageMap::decode(&bytes).map(|map| map.runs()[0])
        };
        let run = |flags| {
            Ok(Run {
                address: 4096,
                pages: 3,
                flags,
            })
        };
        assert_eq!(image(&[(1, 4096), (2, 3)]), run(PRESENT));
        assert_eq!(image(&[(1, 4096), (2, 3), (3, 1)]), run(IN_PARENT));
        assert_eq!(image(&[(1, 4096), (2, 0), (4, 4), (5, 3)]), run(PRESENT));
        assert_eq!(image(&[(1, 4096)]), Err(PageMapError::Damaged));
    }

    proptest! {
        #[test]
        fn a_map_is_read_as_it_was_written(
            id in any::<u32>(),
            runs in proptest::collection::vec((0..9u64, 1..9u64, 0..8u32), 0..20),
        ) {
            let mut map = PageMap::new(id);
            let mut page = 0;
            for (gap, pages, flags) in runs {
                let address = (page + gap) * PAGE_BYTES_U64;
                map.push(Run { address, pages, flags }).expect("they are in order");
                page += gap + pages;
            }
            prop_assert_eq!(PageMap::decode(&map.encode()), Ok(map));
        }
    }
}
