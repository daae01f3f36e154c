//! What the cache must not believe while the outcome of a mutation is not known.
//!
//! A caller that gives up leaves a mutation behind that may be executed at any moment. Others see it from then on, and
//! this client is not notified of what it changes itself. So until there is an answer, nothing is cached of what the
//! mutation may change.

use std::sync::Arc;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use parking_lot::Mutex;

use super::{Inner, MetaCache, Subject};

/// What a mutation may change.
#[derive(Debug, Default)]
pub(crate) struct Scope {
    pub inodes: Vec<InodeId>,
    pub entries: Vec<(InodeId, Name)>,
    /// Inodes that these names lead to change with them.
    pub changes_targets: bool,
}

/// Until it is dropped, nothing is cached of what a mutation may change.
pub(crate) struct Doubt {
    inner: Arc<Mutex<Inner>>,
    subjects: Vec<Subject>,
    everything: bool,
}

impl MetaCache {
    /// Until this is dropped, what the mutation may change is not cached.
    pub(crate) fn doubt(&self, scope: &Scope) -> Doubt {
        let mut inner = self.inner.lock();
        let (subjects, everything) = inner.subjects(scope);
        for subject in &subjects {
            *inner.doubted.entry(subject.clone()).or_default() += 1;
        }
        inner.all_doubted += usize::from(everything);
        inner.forget(&subjects);
        if everything {
            inner.forget_all();
        }
        Doubt {
            inner: self.inner.clone(),
            subjects,
            everything,
        }
    }

    /// Forgets what a mutation that failed may have changed.
    pub(crate) fn forget(&self, scope: &Scope) {
        let mut inner = self.inner.lock();
        // Where it may have been executed, the connection is lost, and with it everything else.
        let (subjects, _) = inner.subjects(scope);
        inner.forget(&subjects);
    }

    /// Whether anything may change at any moment.
    pub(crate) fn is_in_doubt(&self) -> bool {
        let inner = self.inner.lock();
        inner.all_doubted > 0 || !inner.doubted.is_empty()
    }
}

impl Doubt {
    /// Whether it is about more than its inodes and entries: about everything.
    pub(crate) fn is_of_everything(&self) -> bool {
        self.everything
    }

    pub(crate) fn inodes(&self) -> impl Iterator<Item = InodeId> {
        self.subjects.iter().filter_map(|subject| match subject {
            Subject::Inode(ino) => Some(*ino),
            Subject::Listing(_) | Subject::Entry(..) => None,
        })
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (InodeId, Name)> {
        self.subjects.iter().filter_map(|subject| match subject {
            Subject::Entry(parent, name) => Some((*parent, name.clone())),
            Subject::Inode(_) | Subject::Listing(_) => None,
        })
    }
}

impl Drop for Doubt {
    fn drop(&mut self) {
        let mut inner = self.inner.lock();
        for subject in &self.subjects {
            let left = inner.doubted.get_mut(subject).map(|doubts| {
                *doubts -= 1;
                *doubts
            });
            match left {
                Some(0) => inner.doubted.remove(subject),
                Some(_) => None,
                None => panic!("a doubt ends about {subject:?}, and there was none"),
            };
        }
        inner.all_doubted -= usize::from(self.everything);
        // What was asked for meanwhile may be from before the mutation.
        inner.forget(&self.subjects);
        if self.everything {
            inner.forget_all();
        }
    }
}

impl Inner {
    pub(super) fn is_doubted(&self, subject: &Subject) -> bool {
        self.all_doubted > 0 || self.doubted.contains_key(subject)
    }

    /// What a name leads to, if that is known.
    fn target(&self, parent: InodeId, name: &Name) -> Option<Option<InodeId>> {
        let directory = self.dirs.get(&parent)?;
        match directory.names.get(name) {
            Some(target) => Some(*target),
            None => directory.complete.then_some(None),
        }
    }

    /// What a mutation may change, and whether it may be anything else too.
    fn subjects(&self, scope: &Scope) -> (Vec<Subject>, bool) {
        let mut subjects: Vec<Subject> = scope.inodes.iter().copied().map(Subject::Inode).collect();
        let mut everything = false;
        for (parent, name) in &scope.entries {
            subjects.push(Subject::Inode(*parent));
            subjects.push(Subject::Listing(*parent));
            subjects.push(Subject::Entry(*parent, name.clone()));
            if scope.changes_targets {
                match self.target(*parent, name) {
                    Some(target) => subjects.extend(target.map(Subject::Inode)),
                    // It may have other names, which are known.
                    None => everything = true,
                }
            }
        }
        (subjects, everything)
    }

    fn forget(&mut self, subjects: &[Subject]) {
        for subject in subjects {
            self.happened(subject.clone());
            match subject {
                Subject::Inode(ino) => self.forget_inode(*ino),
                Subject::Entry(parent, name) => self.forget_entry(*parent, name),
                Subject::Listing(_) => {}
            }
        }
    }
}
