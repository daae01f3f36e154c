//! What a namenode acknowledged in a session that has since ended, and whether the namenode still has it. Pure.

use std::collections::BTreeMap;
use std::ops::Range;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::mutation::{Commit, SetAttr};
use harvestfs_protocol::meta::{FileCommit, Mutation};
use harvestfs_protocol::types::{Attr, Extent};

use crate::engine::cache::extents::{ExtentMap, is_sound};

/// The mode bits that are compared. The others are cleared by changes of the owner and of the content.
const MODE_KEPT: u16 = 0o777;

/// Acknowledged changes, by file.
#[derive(Default)]
pub(crate) struct Answered {
    pub(crate) files: BTreeMap<InodeId, AnsweredFile>,
}

/// Acknowledged changes of a file. (Not its times: the first commit of a new file sets them again.)
#[derive(Default)]
pub(crate) struct AnsweredFile {
    content: ExtentMap,
    /// Extents whose place in the file the namenode chose.
    appended: Vec<Extent>,
    mode: Option<u16>,
    uid: Option<u32>,
    gid: Option<u32>,
}

/// The state of a file at a namenode.
pub(crate) struct FoundFile {
    pub(crate) attr: Attr,
    pub(crate) extents: Vec<Extent>,
}

impl Answered {
    /// Collects the effects of mutations that were executed in this order.
    pub(crate) fn of<'a>(mutations: impl Iterator<Item = &'a Mutation>) -> Self {
        let mut answered = Self::default();
        for mutation in mutations {
            match mutation {
                Mutation::Commit(Commit { files, .. }) => {
                    for commit in files {
                        answered.files.entry(commit.ino).or_default().commit(commit);
                    }
                }
                Mutation::SetAttr(SetAttr { ino, changes }) => {
                    let file = answered.files.entry(*ino).or_default();
                    file.mode = changes.mode.or(file.mode);
                    file.uid = changes.uid.or(file.uid);
                    file.gid = changes.gid.or(file.gid);
                }
                // Blocks that are not sealed are sealed when the session of their writer ends.
                _ => {}
            }
        }
        answered
    }
}

impl AnsweredFile {
    fn commit(&mut self, commit: &FileCommit) {
        if commit.append {
            self.appended.extend(&commit.extents);
        } else {
            self.content.apply(&commit.extents);
        }
    }

    /// Returns the range of the file in which its content is to be searched for.
    pub(crate) fn range(&self) -> Range<u64> {
        if !self.appended.is_empty() {
            return 0..u64::MAX;
        }
        let mut extents = self.content.from(0);
        let start = extents.next().map_or(0, |it| it.file_offset);
        let end = self.content.from(0).last().map_or(0, Extent::file_end);
        start..end
    }

    /// Whether all these changes are in the state that was found.
    pub(crate) fn is_in(&self, found: &FoundFile) -> bool {
        if !found.extents.iter().all(is_sound) {
            return false;
        }
        let mut content = ExtentMap::default();
        content.apply(&found.extents);
        let is = |expected: Option<u32>, found: u32| expected.is_none_or(|it| it == found);
        let mode = self.mode.map(|mode| u32::from(mode & MODE_KEPT));
        self.content.from(0).all(|extent| has(&content, extent))
            && self
                .appended
                .iter()
                .all(|extent| has_somewhere(&content, extent))
            && is(mode, u32::from(found.attr.mode & MODE_KEPT))
            && is(self.uid, found.attr.uid)
            && is(self.gid, found.attr.gid)
    }
}

/// Whether a file contains exactly this extent at its offset.
fn has(content: &ExtentMap, extent: &Extent) -> bool {
    let mut next = extent.file_offset;
    for part in content.overlapping(&(extent.file_offset..extent.file_end())) {
        let place = extent.block_offset + (part.file_offset - extent.file_offset);
        if (part.file_offset, part.block, part.block_offset) != (next, extent.block, place) {
            return false;
        }
        next = part.file_end();
    }
    next == extent.file_end()
}

/// Whether a file contains these bytes of a block anywhere.
fn has_somewhere(content: &ExtentMap, extent: &Extent) -> bool {
    let of_block = content.from(0).filter(|part| part.block == extent.block);
    let mut parts: Vec<_> = of_block
        .map(|part| (part.block_offset, part.block_offset + part.length_bytes))
        .collect();
    parts.sort_unstable();
    let mut next = extent.block_offset;
    for (start, end) in parts {
        if start <= next {
            next = next.max(end);
        }
    }
    next >= extent.block_offset + extent.length_bytes
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::BlockId;
    use harvestfs_protocol::meta::AttrChanges;
    use harvestfs_protocol::types::{FileKind, Timestamp};

    use super::*;

    const FILE: InodeId = InodeId(7);

    fn extent(file_offset: u64, length_bytes: u64, block: u64, block_offset: u64) -> Extent {
        Extent {
            file_offset,
            length_bytes,
            block: BlockId(block),
            block_offset,
        }
    }

    fn commit(extents: &[Extent], append: bool) -> Mutation {
        let file = FileCommit {
            ino: FILE,
            extents: extents.to_vec(),
            append,
            mtime: None,
        };
        Mutation::Commit(Commit {
            files: vec![file],
            durable: false,
        })
    }

    fn found(mode: u16, extents: &[Extent]) -> FoundFile {
        FoundFile {
            attr: Attr {
                ino: FILE,
                kind: FileKind::Regular,
                mode,
                nlink: 1,
                uid: 1,
                gid: 2,
                rdev: 0,
                size_bytes: 0,
                allocated_bytes: 0,
                atime: Timestamp::default(),
                mtime: Timestamp::default(),
                ctime: Timestamp::default(),
                content_version: 1,
            },
            extents: extents.to_vec(),
        }
    }

    fn answered(mutations: &[Mutation]) -> AnsweredFile {
        let mut answered = Answered::of(mutations.iter());
        answered.files.remove(&FILE).expect("it was changed")
    }

    #[test]
    fn what_is_there_is_found_and_what_is_not_is_missed() {
        let file = answered(&[
            commit(&[extent(0, 100, 1, 0)], false),
            commit(&[extent(50, 10, 2, 5)], false),
        ]);
        let whole = [
            extent(0, 50, 1, 0),
            extent(50, 10, 2, 5),
            extent(60, 40, 1, 60),
        ];
        assert_eq!(file.range(), 0..100);
        assert!(file.is_in(&found(0o644, &whole)));
        // Additional extents do no harm, and neither does one that is split.
        let mut more = whole.to_vec();
        more.push(extent(100, 10, 3, 0));
        more[0] = extent(0, 20, 1, 0);
        more.insert(1, extent(20, 30, 1, 20));
        assert!(file.is_in(&found(0o644, &more)));
        let without_the_last = [extent(0, 100, 1, 0)];
        let with_other_bytes = [whole[0], extent(50, 10, 2, 6), whole[2]];
        let with_a_hole = [whole[0], whole[1]];
        for other in [&[][..], &without_the_last, &with_other_bytes, &with_a_hole] {
            assert!(!file.is_in(&found(0o644, other)), "{other:?}");
        }
    }

    #[test]
    fn what_was_appended_may_be_anywhere() {
        let file = answered(&[commit(&[extent(0, 10, 1, 100)], true)]);
        assert_eq!(file.range(), 0..u64::MAX);
        assert!(file.is_in(&found(0o644, &[extent(500, 20, 1, 95)])));
        let in_two = [extent(500, 5, 1, 105), extent(505, 5, 1, 100)];
        assert!(file.is_in(&found(0o644, &in_two)));
        assert!(!file.is_in(&found(0o644, &in_two[..1])));
        assert!(!file.is_in(&found(0o644, &[extent(0, 10, 2, 100)])));
    }

    #[test]
    fn what_was_set_is_compared_as_far_as_nothing_else_changes_it() {
        let set = |changes| Mutation::SetAttr(SetAttr { ino: FILE, changes });
        let mode = |mode| AttrChanges {
            mode: Some(mode),
            ..AttrChanges::default()
        };
        let file = answered(&[set(mode(0o600)), set(mode(0o4640))]);
        assert!(file.range().is_empty());
        assert!(file.is_in(&found(0o640, &[])));
        assert!(!file.is_in(&found(0o600, &[])));
        let owner = AttrChanges {
            gid: Some(3),
            ..AttrChanges::default()
        };
        assert!(!answered(&[set(owner)]).is_in(&found(0o640, &[])));
    }

    #[test]
    fn extents_that_cannot_be_are_none() {
        let file = answered(&[commit(&[extent(0, 10, 1, 0)], false)]);
        let unsound = [extent(0, 10, 1, 0), extent(10, 0, 1, 0)];
        assert!(!file.is_in(&found(0o640, &unsound)));
    }
}
