//! Mutations whose caller no longer waits, and whose outcome is unknown.
//!
//! The namenode may execute such a mutation at any moment. Others see its effect from then on, but
//! this client receives no notice of its own changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use parking_lot::Mutex;

use super::{Inner, MetaCache, Subject};

/// What a mutation may change.
#[derive(Debug)]
pub(crate) struct Scope {
    pub inodes: Vec<InodeId>,
    /// Whether it may change what commits change of these inodes, or the mode bits that commits clear.
    pub changes_content: bool,
    pub entries: Vec<(InodeId, Name)>,
    /// Whether the inodes that these names lead to change too.
    pub changes_targets: bool,
}

/// Until it is dropped, nothing is cached that the mutation may change.
pub(crate) struct Unsettled {
    inner: Arc<Mutex<Inner>>,
    is_unsettled: Arc<AtomicBool>,
    subjects: Vec<Subject>,
    changes_targets: bool,
    /// Whether the inode was unknown that one of the names led to.
    may_be_any: bool,
}

impl MetaCache {
    /// Forgets what a mutation may change, and learns nothing about it until the result is dropped.
    pub(crate) fn unsettled(&self, scope: &Scope) -> Unsettled {
        let mut inner = self.inner.lock();
        let (subjects, may_be_any) = inner.subjects(scope);
        for subject in &subjects {
            *inner.unsettled.entry(subject.clone()).or_default() += 1;
        }
        inner.unsettled_targets += usize::from(scope.changes_targets);
        inner.publish_to(&self.is_unsettled);
        inner.forget(&subjects);
        if may_be_any {
            inner.forget_all();
        }
        Unsettled {
            inner: self.inner.clone(),
            is_unsettled: self.is_unsettled.clone(),
            subjects,
            changes_targets: scope.changes_targets,
            may_be_any,
        }
    }

    /// Forgets what a refused mutation was meant to change.
    pub(crate) fn forget(&self, scope: &Scope) {
        let mut inner = self.inner.lock();
        let (subjects, _) = inner.subjects(scope);
        inner.forget(&subjects);
    }

    /// Whether anything may change at any moment.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.is_unsettled.load(Ordering::Acquire)
    }

    /// Whether a mutation whose caller no longer waits may still change one of these.
    pub(crate) fn is_any_unsettled(&self, scope: &Scope) -> bool {
        if !self.is_unsettled() {
            return false;
        }
        let inner = self.inner.lock();
        let is_unsettled = |subject| inner.unsettled.contains_key(&subject);
        let mut inodes = scope.inodes.iter();
        let mut entries = scope.entries.iter();
        inodes.any(|ino| is_unsettled(Subject::Inode(*ino)))
            || entries.any(|(parent, name)| is_unsettled(Subject::Entry(*parent, name.clone())))
    }

    /// Whether a mutation whose caller no longer waits may still change the content of a file.
    pub(crate) fn is_content_unsettled(&self, ino: InodeId) -> bool {
        let subject = Subject::Content(ino);
        self.is_unsettled() && self.inner.lock().unsettled.contains_key(&subject)
    }

    /// Whether this inode may change at any moment.
    pub(crate) fn is_inode_unsettled(&self, ino: InodeId) -> bool {
        self.is_unsettled() && self.inner.lock().is_unsettled(&Subject::Inode(ino))
    }
}

impl Unsettled {
    /// Whether any inode may have been changed, not only the ones that are named.
    pub(crate) fn may_be_any(&self) -> bool {
        self.may_be_any
    }

    pub(crate) fn inodes(&self) -> impl Iterator<Item = InodeId> {
        self.subjects.iter().filter_map(|subject| match subject {
            Subject::Inode(ino) => Some(*ino),
            Subject::Content(_) | Subject::Listing(_) | Subject::Entry(..) => None,
        })
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (InodeId, Name)> {
        self.subjects.iter().filter_map(|subject| match subject {
            Subject::Entry(parent, name) => Some((*parent, name.clone())),
            Subject::Inode(_) | Subject::Content(_) | Subject::Listing(_) => None,
        })
    }
}

impl Drop for Unsettled {
    fn drop(&mut self) {
        let mut inner = self.inner.lock();
        for subject in &self.subjects {
            let left = inner.unsettled.get_mut(subject).map(|mutations| {
                *mutations -= 1;
                *mutations
            });
            match left {
                Some(0) => inner.unsettled.remove(subject),
                Some(_) => None,
                None => panic!("{subject:?} is settled twice"),
            };
        }
        // What was requested meanwhile may be older than the mutation.
        inner.forget(&self.subjects);
        if self.changes_targets {
            inner.unsettled_targets -= 1;
            inner.overtake_all();
        }
        inner.publish_to(&self.is_unsettled);
    }
}

impl Inner {
    pub(super) fn is_unsettled(&self, subject: &Subject) -> bool {
        // Before the mutation executes, another session may make the name lead to an inode that is requested here.
        self.unsettled_targets > 0 || self.unsettled.contains_key(subject)
    }

    /// Publishes the state to readers that do not take the lock. Called under the lock.
    fn publish_to(&self, is_unsettled: &AtomicBool) {
        let is_so = self.unsettled_targets > 0 || !self.unsettled.is_empty();
        is_unsettled.store(is_so, Ordering::Release);
    }

    /// Returns what a mutation may change, and whether it may change any other inode too.
    fn subjects(&self, scope: &Scope) -> (Vec<Subject>, bool) {
        let mut subjects: Vec<Subject> = scope.inodes.iter().copied().map(Subject::Inode).collect();
        if scope.changes_content {
            subjects.extend(scope.inodes.iter().copied().map(Subject::Content));
        }
        let mut may_be_any = false;
        for (parent, name) in &scope.entries {
            subjects.push(Subject::Inode(*parent));
            subjects.push(Subject::Listing(*parent));
            subjects.push(Subject::Entry(*parent, name.clone()));
            if scope.changes_targets {
                match self.target(*parent, name) {
                    Some(target) => subjects.extend(target.map(Subject::Inode)),
                    // The inode may be cached under another of its names.
                    None => may_be_any = true,
                }
            }
        }
        (subjects, may_be_any)
    }

    fn forget(&mut self, subjects: &[Subject]) {
        for subject in subjects {
            self.happened(subject.clone());
            match subject {
                Subject::Inode(ino) => self.forget_inode(*ino),
                Subject::Entry(parent, name) => self.forget_entry(*parent, name),
                Subject::Content(_) | Subject::Listing(_) => {}
            }
        }
    }
}
