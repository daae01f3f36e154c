//! Written data that is not part of the file yet, by file offset. Pure.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

/// Sequential writes up to this size are gathered in one buffer, so that many small writes become
/// few segments.
const GATHERED_WRITE_BYTES_MAX: usize = 32 << 10;
/// Maximum size of such a buffer.
const GATHERED_BYTES_MAX: usize = 1 << 20;

/// Disjoint pieces of data, each with a tag. A later piece hides the parts of earlier ones that it overlaps.
#[derive(Debug, Default)]
pub(crate) struct SegmentMap<T> {
    segments: BTreeMap<u64, (Bytes, T)>,
    /// The segment that small sequential writes still extend. No segment overlaps it.
    tail: Option<Tail<T>>,
    bytes: u64,
}

#[derive(Debug)]
struct Tail<T> {
    offset: u64,
    data: BytesMut,
    tag: T,
}

/// A piece of data in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment<T> {
    pub(crate) offset: u64,
    pub(crate) data: Bytes,
    pub(crate) tag: T,
}

impl<T> Segment<T> {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }
}

impl<T: Copy + PartialEq> SegmentMap<T> {
    pub(crate) fn new() -> Self {
        Self {
            segments: BTreeMap::new(),
            tail: None,
            bytes: 0,
        }
    }

    /// Whether all data is in one segment.
    pub(crate) fn is_one_segment(&self) -> bool {
        self.segments.len() + usize::from(self.tail.is_some()) == 1
    }

    /// Returns the number of bytes in all segments.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a segment begins at an offset.
    pub(crate) fn begins_at(&self, offset: u64) -> bool {
        let in_tail = self.tail.as_ref().is_some_and(|tail| tail.offset == offset);
        in_tail || self.segments.contains_key(&offset)
    }

    /// Returns the first offset after all segments; 0 when there is none.
    pub(crate) fn end(&self) -> u64 {
        let last = self.segments.last_key_value();
        let segments_end = last.map_or(0, |(&offset, (data, _))| offset + data.len() as u64);
        let tail_end = self.tail.as_ref().map_or(0, Tail::end);
        segments_end.max(tail_end)
    }

    /// Puts `data` at `offset` on top of existing data; returns what it hid.
    pub(crate) fn insert(&mut self, offset: u64, data: Bytes, tag: T) -> Vec<Segment<T>> {
        if data.is_empty() {
            return Vec::new();
        }
        let length = data.len() as u64;
        if data.len() > GATHERED_WRITE_BYTES_MAX {
            return self.insert_whole(offset, data, tag);
        }
        let extends = self.tail.as_ref().is_some_and(|tail| {
            tail.end() == offset
                && tail.tag == tag
                && tail.data.len() + data.len() <= GATHERED_BYTES_MAX
        });
        if extends {
            let hidden = self.remove_from_segments(offset..offset + length);
            if let Some(tail) = &mut self.tail {
                tail.data.extend_from_slice(&data);
                self.bytes += length;
            }
            return hidden;
        }
        let hidden = self.remove(offset..offset + length);
        self.freeze_tail();
        self.tail = Some(Tail {
            offset,
            data: BytesMut::from(&data[..]),
            tag,
        });
        self.bytes += length;
        hidden
    }

    /// As [`SegmentMap::insert`], as a segment of its own and without a copy.
    pub(crate) fn insert_whole(&mut self, offset: u64, data: Bytes, tag: T) -> Vec<Segment<T>> {
        let length = data.len() as u64;
        let hidden = self.remove(offset..offset + length);
        if length > 0 {
            self.put(offset, data, tag);
            self.bytes += length;
        }
        hidden
    }

    /// Puts `data` at `offset`, but only where there is no data yet.
    pub(crate) fn insert_below(&mut self, offset: u64, data: &Bytes, tag: T) {
        let end = offset + data.len() as u64;
        let mut at = offset;
        let taken: Vec<(u64, u64)> = self
            .overlapping(offset..end)
            .iter()
            .map(|segment| (segment.offset, segment.end()))
            .collect();
        for (start, taken_end) in taken.into_iter().chain([(end, end)]) {
            if start > at {
                let piece = data.slice(index(at - offset)..index(start - offset));
                self.bytes += piece.len() as u64;
                self.put(at, piece, tag);
            }
            at = taken_end;
        }
    }

    /// Returns the data in a range, in order, cut to the range.
    pub(crate) fn overlapping(&mut self, range: Range<u64>) -> Vec<Segment<T>> {
        let in_tail = |tail: &Tail<T>| tail.offset < range.end && range.start < tail.end();
        if self.tail.as_ref().is_some_and(in_tail) {
            self.freeze_tail();
        }
        self.starts(&range)
            .into_iter()
            .map(|start| {
                let (data, tag) = &self.segments[&start];
                cut(start, data, *tag, &range)
            })
            .collect()
    }

    /// Removes and returns the data in a range.
    pub(crate) fn remove(&mut self, range: Range<u64>) -> Vec<Segment<T>> {
        let in_tail = |tail: &Tail<T>| tail.offset < range.end && range.start < tail.end();
        if self.tail.as_ref().is_some_and(in_tail) {
            self.freeze_tail();
        }
        self.remove_from_segments(range)
    }

    /// Removes and returns the data in a range that has a tag.
    pub(crate) fn remove_tagged(&mut self, range: Range<u64>, tag: T) -> Vec<Segment<T>> {
        let tagged: Vec<Range<u64>> = self
            .overlapping(range)
            .iter()
            .filter(|segment| segment.tag == tag)
            .map(|segment| segment.offset..segment.end())
            .collect();
        tagged
            .into_iter()
            .flat_map(|range| self.remove_from_segments(range))
            .collect()
    }

    /// Removes and returns the first piece with a wanted tag among those that begin at or behind
    /// `from`: the contiguous data of one segment, at most `max_bytes`.
    pub(crate) fn pop_first(
        &mut self,
        from: u64,
        max_bytes: usize,
        is_wanted: impl Fn(T) -> bool,
    ) -> Option<Segment<T>> {
        self.freeze_tail();
        let mut segments = self.segments.range(from..);
        let (&offset, _) = segments.find(|(_, (_, tag))| is_wanted(*tag))?;
        let (mut data, tag) = self.segments.remove(&offset)?;
        if data.len() > max_bytes {
            let rest = data.split_off(max_bytes);
            self.put(offset + max_bytes as u64, rest, tag);
        }
        self.left(data.len());
        Some(Segment { offset, data, tag })
    }

    /// Inserts a segment where none begins. Data that it covers must be removed before.
    fn put(&mut self, offset: u64, data: Bytes, tag: T) {
        let length = data.len();
        let hidden = self.segments.insert(offset, (data, tag));
        assert!(
            length > 0 && hidden.is_none(),
            "{length} bytes at {offset} hide {:?} bytes that still count",
            hidden.map(|(data, _)| data.len())
        );
    }

    /// Stops counting bytes that are in no segment any more.
    fn left(&mut self, length: usize) {
        let bytes = length as u64;
        assert!(
            bytes <= self.bytes,
            "{bytes} bytes leave, of {} in {} segments",
            self.bytes,
            self.segments.len()
        );
        self.bytes -= bytes;
    }

    fn remove_from_segments(&mut self, range: Range<u64>) -> Vec<Segment<T>> {
        let mut removed = Vec::new();
        for start in self.starts(&range) {
            let segment = self.segments.remove(&start);
            let (data, tag) = segment.expect("a segment starts there");
            let piece = cut(start, &data, tag, &range);
            if start < piece.offset {
                let head = data.slice(..index(piece.offset - start));
                self.put(start, head, tag);
            }
            let end = start + data.len() as u64;
            if piece.end() < end {
                let rest = data.slice(index(piece.end() - start)..);
                self.put(piece.end(), rest, tag);
            }
            self.left(piece.data.len());
            removed.push(piece);
        }
        removed
    }

    /// Keys of the segments that touch a range, in order.
    fn starts(&self, range: &Range<u64>) -> Vec<u64> {
        if range.is_empty() || self.segments.is_empty() {
            return Vec::new();
        }
        let before = self.segments.range(..range.start).next_back();
        let before = before.filter(|(start, (data, _))| *start + data.len() as u64 > range.start);
        let within = self.segments.range(range.clone());
        before
            .into_iter()
            .chain(within)
            .map(|(&start, _)| start)
            .collect()
    }

    fn freeze_tail(&mut self) {
        if let Some(tail) = self.tail.take() {
            self.put(tail.offset, tail.data.freeze(), tail.tag);
        }
    }
}

impl<T> Tail<T> {
    fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }
}

fn cut<T>(start: u64, data: &Bytes, tag: T, range: &Range<u64>) -> Segment<T> {
    let end = start + data.len() as u64;
    let (from, to) = (start.max(range.start), end.min(range.end));
    Segment {
        offset: from,
        data: data.slice(index(from - start)..index(to - start)),
        tag,
    }
}

/// An offset within a buffer. It fits: it is at most the buffer's length.
#[allow(clippy::cast_possible_truncation)]
fn index(offset: u64) -> usize {
    offset as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Insert(u64, usize),
        InsertBelow(u64, usize),
        Remove(u64, u64),
        RemoveTagged(u64, u64, u8),
        Pop(usize, u8),
    }

    fn op() -> impl Strategy<Value = Op> {
        let offset = 0u64..200;
        prop_oneof![
            4 => (offset.clone(), 1usize..40).prop_map(|(o, l)| Op::Insert(o, l)),
            2 => (offset.clone(), 1usize..40).prop_map(|(o, l)| Op::InsertBelow(o, l)),
            1 => (offset.clone(), 0u64..60).prop_map(|(o, l)| Op::Remove(o, l)),
            1 => (offset, 0u64..60, 0u8..4).prop_map(|(o, l, t)| Op::RemoveTagged(o, l, t)),
            1 => (1usize..30, 0u8..4).prop_map(|(l, t)| Op::Pop(l, t)),
        ]
    }

    proptest! {
        #[test]
        fn is_an_array_of_bytes_with_tags(ops in prop::collection::vec(op(), 1..60)) {
            let mut map = SegmentMap::new();
            let mut model = vec![None::<(u8, u8)>; 300];
            for (step, op) in ops.into_iter().enumerate() {
                let (fill, tag) = (step as u8, step as u8 % 4);
                match op {
                    Op::Insert(offset, len) => {
                        let hidden = map.insert(offset, vec![fill; len].into(), tag);
                        let expected = model[offset as usize..][..len].iter().flatten().count();
                        prop_assert_eq!(hidden.iter().map(|s| s.data.len()).sum::<usize>(), expected);
                        model[offset as usize..][..len].fill(Some((fill, tag)));
                    }
                    Op::InsertBelow(offset, len) => {
                        map.insert_below(offset, &vec![fill; len].into(), tag);
                        for byte in &mut model[offset as usize..][..len] {
                            byte.get_or_insert((fill, tag));
                        }
                    }
                    Op::Remove(offset, len) => {
                        map.remove(offset..offset + len);
                        model[offset as usize..][..len as usize].fill(None);
                    }
                    Op::RemoveTagged(offset, len, tag) => {
                        map.remove_tagged(offset..offset + len, tag);
                        for byte in &mut model[offset as usize..][..len as usize] {
                            if byte.is_some_and(|(_, t)| t == tag) {
                                *byte = None;
                            }
                        }
                    }
                    Op::Pop(max, tag_max) => {
                        let is_wanted = |tag: u8| tag <= tag_max;
                        let first = model
                            .iter()
                            .position(|byte| byte.is_some_and(|(_, tag)| is_wanted(tag)));
                        match map.pop_first(0, max, is_wanted) {
                            None => prop_assert_eq!(first, None),
                            Some(piece) => {
                                prop_assert_eq!(Some(piece.offset as usize), first);
                                prop_assert!(piece.data.len() <= max);
                                for (i, byte) in piece.data.iter().enumerate() {
                                    let at = piece.offset as usize + i;
                                    prop_assert_eq!(model[at].take(), Some((*byte, piece.tag)));
                                }
                            }
                        }
                    }
                }
                prop_assert_eq!(map.bytes() as usize, model.iter().flatten().count());
                let end = model.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
                prop_assert_eq!(map.end() as usize, end);
            }
            let mut found = vec![None; 300];
            for segment in map.overlapping(0..300) {
                for (i, byte) in segment.data.iter().enumerate() {
                    found[segment.offset as usize + i] = Some((*byte, segment.tag));
                }
            }
            prop_assert_eq!(found, model);
        }
    }

    #[test]
    fn small_sequential_writes_become_one_segment() {
        let mut map = SegmentMap::new();
        for i in 0..100 {
            map.insert(i * 10, vec![i as u8; 10].into(), ());
        }
        assert_eq!(map.overlapping(0..1000).len(), 1);
    }
}
