//! Mutations that no caller waits for any more, and whose outcome is not known.
//!
//! The namenode may execute one at any moment. Others see it from then on, and this client is not notified of what it
//! changes itself.

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
    /// Whether it is what commits change of them too, or what they do to a mode.
    pub changes_content: bool,
    pub entries: Vec<(InodeId, Name)>,
    /// Whether the inodes that these names lead to change with them.
    pub changes_targets: bool,
}

/// Until it is dropped, nothing is cached that the mutation may change.
pub(crate) struct Unsettled {
    inner: Arc<Mutex<Inner>>,
    is_unsettled: Arc<AtomicBool>,
    subjects: Vec<Subject>,
    changes_targets: bool,
    /// What one of its names led to was not known.
    may_be_any: bool,
}

impl MetaCache {
    /// Forgets what a mutation may change, and learns nothing of it for a while.
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

    /// Forgets what a mutation was to change that was refused.
    pub(crate) fn forget(&self, scope: &Scope) {
        let mut inner = self.inner.lock();
        let (subjects, _) = inner.subjects(scope);
        inner.forget(&subjects);
    }

    /// Whether anything may change at any moment.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.is_unsettled.load(Ordering::Acquire)
    }

    /// Whether a mutation that no caller waits for may yet change one of these.
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

    /// Whether a mutation that no caller waits for may yet change the content of a file.
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
    /// Whether any inode may have been changed, and not only the ones that are named.
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
        // What was asked for meanwhile may be from before the mutation.
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
        // Others may have a name lead elsewhere before it is removed, and have what it leads to asked for by then.
        self.unsettled_targets > 0 || self.unsettled.contains_key(subject)
    }

    /// Says so to those who ask without the lock, under which it is said.
    fn publish_to(&self, is_unsettled: &AtomicBool) {
        let is_so = self.unsettled_targets > 0 || !self.unsettled.is_empty();
        is_unsettled.store(is_so, Ordering::Release);
    }

    /// What a mutation may change, and whether it may be any other inode too.
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
                    // It may be cached by another of its names.
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
