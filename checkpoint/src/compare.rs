//! Finds the pages of a new image that its parent already has. Does no I/O: hashes in, segments out.
//!
//! The new image starts as a clone of its parent, which costs only metadata. A page that is equal at the
//! same offset costs nothing. Runs of pages that the parent has at another offset (memory was mapped
//! below them) are shared from there; only the rest is written.

use std::ops::Range;

use crate::page::{PAGE_BYTES, PageHash, PageIndex, PageTable};

/// Minimum length, in pages, of a run of moved pages that is shared; a shorter one is written, since sharing it
/// would cost a request to the namenode.
pub const MOVED_PAGES_MIN: u64 = 16;
/// Maximum number of equal pages between two written ones that are written, too, which saves an extent.
const GAP_PAGES_MAX: u64 = 1;

/// How to produce a range of pages of the new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Numbers of the pages.
    pub pages: Range<u64>,
    /// Their content.
    pub content: Content,
}

/// The content of pages, relative to the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Equal to the parent's pages at the same offset.
    Same,
    /// Equal to the parent's pages at another offset.
    Moved {
        /// Number of the first of these pages in the parent.
        from: u64,
    },
    /// Zeros, stored as a hole.
    Zero,
    /// New pages, which have to be written.
    New,
}

/// The parent of an image.
#[derive(Clone, Debug)]
pub struct Parent {
    table: PageTable,
    index: PageIndex,
    zero: PageHash,
}

impl Parent {
    /// Indexes the parent's hashes. An image without a parent is compared with an empty table.
    #[must_use]
    pub fn new(table: PageTable) -> Self {
        Self {
            index: table.index(),
            table,
            zero: PageHash::of(&[0; PAGE_BYTES]),
        }
    }

    /// Its hashes.
    #[must_use]
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// Number of its pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.table.len()
    }

    /// Compares consecutive pages, from number `first` on. The returned segments cover all of them, in
    /// order.
    #[must_use]
    pub fn compare(&self, first: u64, hashes: &[PageHash]) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        for (number, &hash) in (first..).zip(hashes) {
            let content = self.content(number, hash, segments.last());
            match segments.last_mut() {
                Some(last) if continues(last, content, number) => last.pages.end = number + 1,
                _ => segments.push(Segment {
                    pages: number..number + 1,
                    content,
                }),
            }
        }
        simplify(segments)
    }

    fn content(&self, number: u64, hash: PageHash, last: Option<&Segment>) -> Content {
        if self.table.page(number) == Some(hash) {
            return Content::Same;
        }
        if hash == self.zero {
            return Content::Zero;
        }
        // Continues a run where possible, as equal pages may be in many places.
        if let Some(Segment {
            pages,
            content: Content::Moved { from },
        }) = last
        {
            let next = from + (pages.end - pages.start);
            if self.table.page(next) == Some(hash) {
                return Content::Moved { from: next };
            }
        }
        match self.index.find(hash) {
            Some(from) => Content::Moved { from },
            None => Content::New,
        }
    }
}

/// Whether the page `number` continues the segment before it.
fn continues(last: &Segment, content: Content, number: u64) -> bool {
    match (last.content, content) {
        (Content::Moved { from: start }, Content::Moved { from }) => {
            start + (number - last.pages.start) == from
        }
        (before, now) => before == now,
    }
}

/// Turns segments that are too short to be worth sharing into new pages, and merges adjacent segments of those.
fn simplify(segments: Vec<Segment>) -> Vec<Segment> {
    let mut simple: Vec<Segment> = Vec::with_capacity(segments.len());
    let mut segments = segments.into_iter().peekable();
    while let Some(mut segment) = segments.next() {
        let pages = segment.pages.end - segment.pages.start;
        let is_short = match segment.content {
            Content::Moved { .. } => pages < MOVED_PAGES_MIN,
            Content::Same | Content::Zero => {
                pages <= GAP_PAGES_MAX
                    && simple
                        .last()
                        .is_some_and(|last| last.content == Content::New)
                    && segments
                        .peek()
                        .is_some_and(|next| next.content == Content::New)
            }
            Content::New => false,
        };
        if is_short {
            segment.content = Content::New;
        }
        match simple.last_mut() {
            Some(last) if segment.content == Content::New && last.content == Content::New => {
                last.pages.end = segment.pages.end;
            }
            _ => simple.push(segment),
        }
    }
    simple
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The table of pages that are each filled with a number; 0 is the zero page.
    fn table(names: impl IntoIterator<Item = u16>) -> PageTable {
        let mut image = Vec::new();
        for name in names {
            image.extend(name.to_le_bytes().repeat(PAGE_BYTES / 2));
        }
        PageTable::of(&image, &PageTable::default())
    }

    fn compare(parent: &[u8], first: u64, image: &[u8]) -> Vec<(Range<u64>, Content)> {
        let [parent, image] = [parent, image].map(|names| table(names.iter().map(|&it| it.into())));
        Parent::new(parent)
            .compare(first, image.pages_from(0))
            .into_iter()
            .map(|segment| (segment.pages, segment.content))
            .collect()
    }

    #[test]
    fn only_what_changed_is_new() {
        assert_eq!(
            compare(&[1, 2, 3, 4], 0, &[1, 2, 9, 4]),
            [
                (0..2, Content::Same),
                (2..3, Content::New),
                (3..4, Content::Same)
            ]
        );
    }

    #[test]
    fn without_a_parent_zeros_are_holes_and_the_rest_is_new() {
        assert_eq!(
            compare(&[], 7, &[0, 0, 5, 5]),
            [(7..9, Content::Zero), (9..11, Content::New)]
        );
    }

    #[test]
    fn a_gap_of_one_page_is_written_with_its_neighbours() {
        assert_eq!(
            compare(&[1, 2, 3, 4, 5], 0, &[8, 2, 9, 4, 5]),
            [(0..3, Content::New), (3..5, Content::Same)]
        );
    }

    #[test]
    fn moved_memory_is_found_where_it_was() {
        let parent: Vec<u8> = (1..=40).collect();
        let mut image = vec![99];
        image.extend(&parent);
        assert_eq!(
            compare(&parent, 0, &image),
            [(0..1, Content::New), (1..41, Content::Moved { from: 0 })]
        );
    }

    #[test]
    fn few_moved_pages_are_written() {
        assert_eq!(compare(&[1, 2, 3], 0, &[9, 1, 2]), [(0..3, Content::New)]);
    }

    proptest! {
        /// Applying the segments to the parent produces the image.
        #[test]
        fn segments_make_the_image(
            parent in proptest::collection::vec(0..6u8, 0..80),
            image in proptest::collection::vec(0..6u8, 0..80),
            first in 0..40u64,
        ) {
            let mut made = Vec::new();
            let mut expected = first;
            for (pages, content) in compare(&parent, first, &image) {
                prop_assert_eq!(pages.start, expected, "segments leave no gap");
                prop_assert!(pages.end > pages.start);
                expected = pages.end;
                for number in pages.clone() {
                    made.push(match content {
                        Content::Same => parent[number as usize],
                        Content::Moved { from } => parent[(from + number - pages.start) as usize],
                        Content::Zero => 0,
                        Content::New => image[(number - first) as usize],
                    });
                }
            }
            prop_assert_eq!(made, image);
        }

        /// An image that is shifted by new memory below it is shared nearly completely.
        #[test]
        fn a_shifted_image_is_shared(shift in 1..50u64, pages in 100..400u16) {
            let table = table(0..pages);
            let parent = Parent::new(table.clone());
            let written: u64 = parent
                .compare(shift, table.pages_from(0))
                .iter()
                .filter(|segment| segment.content == Content::New)
                .map(|segment| segment.pages.end - segment.pages.start)
                .sum();
            prop_assert_eq!(written, 0);
        }
    }
}
