//! What data in memory makes of a file's attributes.

use harvestfs_protocol::types::{Attr, Timestamp, without_set_id};

use super::DirtyFile;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uncommitted {
    held_bytes: u64,
    written_end: u64,
    pub(super) appended_bytes: u64,
    /// Whether a commit of appends is in flight: what is known of the file may have them already.
    appends_in_flight: bool,
    /// Whether appends are left out that nobody has refused.
    has_untried_appends: bool,
    /// Whether the commit takes the set-id bits: who runs the file must not find them beside what others wrote.
    loses_rights: bool,
    mtime: Option<Timestamp>,
}

impl Uncommitted {
    /// Whether it can be said what the attributes will be.
    pub(crate) fn is_definite(&self) -> bool {
        !self.appends_in_flight && !self.has_untried_appends
    }

    /// The attributes as they will be once everything in memory is part of the file.
    pub(crate) fn apply(&self, attr: &mut Attr) {
        attr.size_bytes = attr.size_bytes.max(self.written_end) + self.appended_bytes;
        // At least what it has when everything in memory replaces other data, at most what it has when nothing does. A
        // file that had less than its data would pass for a hole, which archivers do not read.
        let filled = (attr.allocated_bytes + self.held_bytes).min(attr.size_bytes);
        attr.allocated_bytes = attr.allocated_bytes.max(filled);
        if self.loses_rights {
            attr.mode = without_set_id(attr.mode);
        }
        if let Some(mtime) = self.mtime {
            attr.mtime = mtime;
            attr.ctime = attr.ctime.max(mtime);
        }
    }
}

impl DirtyFile {
    /// What commits will change of the attributes.
    pub(crate) fn uncommitted(&self) -> Uncommitted {
        if self.held_bytes() == 0 {
            return Uncommitted::default();
        }
        Uncommitted {
            held_bytes: self.held_bytes(),
            written_end: self.written.data.end(),
            // What is refused is not in the file, and may never be.
            appended_bytes: if self.is_refused() {
                0
            } else {
                self.appended.data.held_bytes()
            },
            has_untried_appends: self.has_untried_appends(),
            loses_rights: self.loses_rights(),
            appends_in_flight: self.appended.data.is_committing(),
            mtime: self.mtime,
        }
    }

    /// Sets the modification time of the next commit, if one is given; false when nothing waits for
    /// a commit.
    pub(crate) fn change_with_commit(&mut self, mtime: Option<Timestamp>) -> bool {
        let uncommitted = [&self.written, &self.appended]
            .iter()
            .any(|lane| lane.data.held_bytes() > 0 && !lane.data.is_committing());
        if uncommitted && mtime.is_some() {
            self.mtime = mtime;
        }
        uncommitted
    }
}
