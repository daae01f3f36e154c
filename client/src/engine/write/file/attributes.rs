//! The effect of data in memory on a file's attributes.
//!
//! Data written by a user other than root clears the set-id bits, with the commit that makes it part of the
//! file. Root may set them again after that, while more is written: data written by root leaves them.

use harvestfs_protocol::types::{Attr, Credentials, Timestamp, without_set_id};

use super::{DirtyFile, Lane, Moment};
use crate::engine::write::writeback::Order;

/// The effect of the data in memory on the attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uncommitted {
    held_bytes: u64,
    written_end: u64,
    pub(super) appended_bytes: u64,
    /// Whether a commit of appends is in flight: the known attributes may already include them.
    appends_in_flight: bool,
    /// Whether some of the appends that are left out have not been refused.
    has_untried_appends: bool,
    /// Whether the commit clears the set-id bits: a program must not run with them on data that others wrote.
    loses_rights: bool,
    mtime: Option<Timestamp>,
}

impl Uncommitted {
    /// Whether the resulting attributes can be determined.
    pub(crate) fn is_definite(&self) -> bool {
        !self.appends_in_flight && !self.has_untried_appends
    }

    /// Whether they cannot be determined only because appends have yet to be tried.
    pub(crate) fn lacks_only_a_try(&self) -> bool {
        !self.appends_in_flight && self.has_untried_appends
    }

    /// Changes the attributes to what they will be once everything in memory is part of the file.
    pub(crate) fn apply(&self, attr: &mut Attr) {
        attr.size_bytes = attr.size_bytes.max(self.written_end) + self.appended_bytes;
        // The result lies between the value if everything in memory replaces other data, and the value if
        // nothing does. A file with less than its data would look sparse, and archivers do not read holes.
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

impl Lane {
    /// Returns the last user other than root whose data is in memory.
    fn others(&self) -> Option<&Credentials> {
        let (through, others) = self.others.as_ref()?;
        (!self.data.is_flushed(*through)).then_some(others)
    }
}

impl DirtyFile {
    /// Notes who wrote the most recent data, and when.
    pub(super) fn note_write(&mut self, order: Order, by: &Credentials, when: Moment) {
        let lane = self.lane(order);
        if by.uid != 0
            && let Some(newest) = lane.data.newest()
        {
            match &mut lane.others {
                Some((through, others)) if *others == *by => *through = newest,
                others => *others = Some((newest, by.clone())),
            }
        }
        self.dirty_since.get_or_insert(when.now);
        self.mtime = Some(when.wall_clock);
    }

    fn others(&self) -> Option<&Credentials> {
        let mut lanes = [&self.written, &self.appended].into_iter();
        lanes.find_map(Lane::others)
    }

    /// Returns the credentials for commits: a commit by root would leave the set-id bits that data
    /// of others must clear.
    pub(super) fn commits_as(&self) -> Credentials {
        self.others().cloned().unwrap_or_else(Credentials::root)
    }

    /// Returns how commits will change the attributes.
    pub(crate) fn uncommitted(&self) -> Uncommitted {
        if self.held_bytes() == 0 {
            return Uncommitted::default();
        }
        Uncommitted {
            held_bytes: self.held_bytes(),
            written_end: self.written.data.end(),
            // Refused appends are not in the file, and may never be.
            appended_bytes: if self.is_refused() {
                0
            } else {
                self.appended.data.held_bytes()
            },
            has_untried_appends: self.has_untried_appends(),
            loses_rights: self.others().is_some(),
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use harvestfs_protocol::request_id::RequestId;

    use super::*;
    use crate::engine::write::file::tests::{moment, opened, write_sent};

    fn somebody() -> Credentials {
        Credentials {
            uid: 1,
            ..Credentials::root()
        }
    }

    fn write(file: &mut DirtyFile, offset: u64, by: &Credentials) {
        file.write(offset, Bytes::from_static(b"data"), by, moment());
    }

    /// Begins the commit that a flush requests, and returns its credentials.
    fn commit(file: &mut DirtyFile) -> Credentials {
        let sends = file.advance(false, RequestId::NONE).sends;
        write_sent(file, sends);
        let mut commits = file.advance(false, RequestId::NONE).commits;
        commits.pop().expect("to be committed").credentials
    }

    /// A commit by root leaves a file its set-id bits.
    #[test]
    fn what_others_wrote_is_not_committed_by_root() {
        let (root, other) = (Credentials::root(), somebody());
        let mut file = opened();
        for (writers, expected) in [([&other, &root], &other), ([&root, &root], &root)] {
            for (offset, by) in [0, 4].into_iter().zip(writers) {
                write(&mut file, offset, by);
            }
            file.begin_flush(false, RequestId::NONE);
            assert_eq!(commit(&mut file), *expected);
            file.commit_done(Order::File);
        }
    }

    #[test]
    fn what_root_writes_takes_no_rights_once_nothing_of_others_is_in_memory() {
        let (root, somebody) = (Credentials::root(), somebody());
        let mut file = opened();
        write(&mut file, 0, &somebody);
        file.begin_flush(false, RequestId::NONE);
        write(&mut file, 4, &root);
        assert_eq!(commit(&mut file), somebody);
        assert!(file.uncommitted().loses_rights);
        file.commit_done(Order::File);
        assert_eq!(file.held_bytes(), 4);
        assert!(!file.uncommitted().loses_rights);
        file.begin_flush(false, RequestId::NONE);
        assert_eq!(commit(&mut file), root);
    }

    #[test]
    fn what_others_wrote_takes_no_rights_when_it_is_cut_off() {
        let mut file = opened();
        write(&mut file, 0, &somebody());
        file.cut(0, Timestamp(2));
        write(&mut file, 0, &Credentials::root());
        assert!(!file.uncommitted().loses_rights);
    }
}
