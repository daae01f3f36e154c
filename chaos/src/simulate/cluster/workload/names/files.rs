//! The files that a pair of names leads to, and how operations change them.

use harvestfs_protocol::ids::InodeId;

use super::{Action, Answer, Operation, ROOT, Refusal, Shown, group};

const READ: u16 = 4;
const WRITE: u16 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum File {
    Known(InodeId),
    /// Created by the operation with this number, whose answer never arrived, and never seen since.
    Unseen(usize),
}

/// The file that a name leads to, with its attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    file: File,
    uid: u32,
    mode: u16,
    size_bytes: u64,
    xattr: Option<u8>,
}

impl Entry {
    fn permits(&self, uid: u32, mask: u16) -> bool {
        let shift = if uid == self.uid {
            6
        } else if group(uid) == group(self.uid) {
            3
        } else {
            0
        };
        uid == ROOT || self.mode >> shift & mask == mask
    }

    /// Whether a user may do what is reserved to the owner and root, such as removing it, since the directory is
    /// sticky.
    fn is_owned_by(&self, uid: u32) -> bool {
        uid == ROOT || uid == self.uid
    }
}

/// The files that the names of a pair lead to. Both may lead to the same file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Names([Option<Entry>; 2]);

impl Names {
    fn find(&self, ino: InodeId) -> Option<&Entry> {
        let mut entries = self.0.iter().flatten();
        entries.find(|entry| entry.file == File::Known(ino))
    }

    fn nlink(&self, file: File) -> u32 {
        let entries = self.0.iter().flatten();
        entries.map(|entry| u32::from(entry.file == file)).sum()
    }

    /// Returns the names with a change to a file, if it has a name.
    fn with(mut self, ino: InodeId, change: impl Fn(&mut Entry)) -> Self {
        for entry in self.0.iter_mut().flatten() {
            if entry.file == File::Known(ino) {
                change(entry);
            }
        }
        self
    }

    /// Whether this is a possible answer to an operation that changed nothing.
    pub fn explain(&self, operation: &Operation, answer: Answer) -> bool {
        let Operation { uid, action, .. } = *operation;
        match action {
            Action::Create(name, _) => {
                self.0[name].is_some() && answer == Answer::Refused(Refusal::Exists)
            }
            Action::Unlink(name) => match &self.0[name] {
                Some(entry) => {
                    answer == Answer::Refused(Refusal::Denied) && !entry.is_owned_by(uid)
                }
                None => answer == Answer::Refused(Refusal::NotFound),
            },
            Action::Rename(name) => match (&self.0[name], &self.0[1 - name]) {
                (Some(from), to) => {
                    let is_same = to.is_some_and(|to| to.file == from.file);
                    let is_owner = [Some(from), to.as_ref()]
                        .into_iter()
                        .flatten()
                        .all(|entry| entry.is_owned_by(uid));
                    answer == Answer::Refused(Refusal::Denied) && !is_same && !is_owner
                }
                (None, _) => answer == Answer::Refused(Refusal::NotFound),
            },
            Action::Look(name) => match (&self.0[name], answer) {
                (Some(entry), Answer::File(seen)) => entry.file == File::Known(seen),
                (entry, answer) => entry.is_none() && answer == Answer::Refused(Refusal::NotFound),
            },
            Action::List => match answer {
                Answer::ListedName(name, is_there) => self.0[name].is_some() == is_there,
                answer => answer == Answer::Listed(self.0.map(|entry| entry.is_some())),
            },
            Action::Link(_, name)
                if self.0[name].is_some() && answer == Answer::Refused(Refusal::Exists) =>
            {
                true
            }
            Action::Link(ino, _)
            | Action::SetMode(ino, _)
            | Action::SetSize(ino, _)
            | Action::SetXattr(ino, _)
            | Action::Show(ino)
            | Action::ShowXattr(ino) => match self.find(ino) {
                Some(entry) => self.explain_of(entry, operation, answer),
                // It may be open somewhere and still exist, or be gone.
                None => match answer {
                    Answer::Shown(shown) => shown.nlink == 0,
                    Answer::Done
                    | Answer::File(_)
                    | Answer::Found(..)
                    | Answer::Xattr(_)
                    | Answer::Listed(_)
                    | Answer::ListedName(..)
                    | Answer::Refused(_) => true,
                },
            },
        }
    }

    /// As `explain`, for an operation on a file that has a name.
    fn explain_of(&self, entry: &Entry, operation: &Operation, answer: Answer) -> bool {
        let Operation { uid, action, .. } = *operation;
        let denied = Answer::Refused(Refusal::Denied);
        let absent = Answer::Refused(Refusal::NoAttribute);
        let may_write = entry.permits(uid, WRITE);
        match action {
            Action::SetMode(..) => answer == denied && !entry.is_owned_by(uid),
            Action::SetSize(..) | Action::SetXattr(_, Some(_)) => answer == denied && !may_write,
            Action::SetXattr(_, None) => {
                answer == denied && !may_write
                    || answer == absent && may_write && entry.xattr.is_none()
            }
            Action::Show(_) => {
                answer
                    == Answer::Shown(Shown {
                        uid: entry.uid,
                        mode: entry.mode,
                        size_bytes: entry.size_bytes,
                        nlink: self.nlink(entry.file),
                    })
            }
            Action::ShowXattr(_) if entry.permits(uid, READ) => {
                answer == entry.xattr.map_or(absent, Answer::Xattr)
            }
            Action::ShowXattr(_) => answer == denied,
            Action::Link(..)
            | Action::Create(..)
            | Action::Unlink(_)
            | Action::Rename(_)
            | Action::Look(_)
            | Action::List => false,
        }
    }

    /// The possible states after a change that was done, or may have been; empty if the change is impossible now.
    /// `orphans` are files that were seen and whose creation has no answer.
    pub fn after(&self, number: usize, operation: &Operation, orphans: &[InodeId]) -> Vec<Self> {
        let changed = self.changed(number, operation, orphans);
        let is_known = operation.answered.is_some();
        // An operation that has no known outcome, and changes nothing, can be ignored.
        changed
            .into_iter()
            .filter(|names| is_known || names != self)
            .collect()
    }

    fn changed(&self, number: usize, operation: &Operation, orphans: &[InodeId]) -> Vec<Self> {
        let Operation { uid, action, .. } = *operation;
        let mut names = *self;
        match action {
            Action::Create(name, mode) if names.0[name].is_none() => {
                let files = match operation.answered {
                    Some((_, Answer::File(ino))) => vec![File::Known(ino)],
                    Some(_) => Vec::new(),
                    None => {
                        let seen = orphans.iter().map(|ino| File::Known(*ino));
                        seen.chain([File::Unseen(number)]).collect()
                    }
                };
                let with = |file| {
                    names.0[name] = Some(Entry {
                        file,
                        uid,
                        mode,
                        size_bytes: 0,
                        xattr: None,
                    });
                    names
                };
                return files.into_iter().map(with).collect();
            }
            Action::Unlink(name) if self.0[name].is_some_and(|it| it.is_owned_by(uid)) => {
                names.0[name] = None;
            }
            Action::Rename(name) => {
                let (Some(from), to) = (self.0[name], self.0[1 - name]) else {
                    return Vec::new();
                };
                if to.is_none_or(|to| to.file != from.file) {
                    if !from.is_owned_by(uid) || to.is_some_and(|to| !to.is_owned_by(uid)) {
                        return Vec::new();
                    }
                    names.0[1 - name] = names.0[name].take();
                }
            }
            Action::Link(ino, name) => {
                let (Some(entry), None) = (self.find(ino), self.0[name]) else {
                    return Vec::new();
                };
                names.0[name] = Some(*entry);
            }
            Action::SetMode(ino, mode) => match self.find(ino) {
                Some(entry) if !entry.is_owned_by(uid) => return Vec::new(),
                _ => names = names.with(ino, |entry| entry.mode = mode),
            },
            Action::SetSize(ino, size_bytes) => match self.find(ino) {
                Some(entry) if !entry.permits(uid, WRITE) => return Vec::new(),
                _ => names = names.with(ino, |entry| entry.size_bytes = size_bytes),
            },
            Action::SetXattr(ino, value) => match self.find(ino) {
                Some(entry)
                    if !entry.permits(uid, WRITE) || value.is_none() && entry.xattr.is_none() =>
                {
                    return Vec::new();
                }
                _ => names = names.with(ino, |entry| entry.xattr = value),
            },
            Action::Create(..)
            | Action::Unlink(_)
            | Action::Look(_)
            | Action::List
            | Action::Show(_)
            | Action::ShowXattr(_) => return Vec::new(),
        }
        vec![names]
    }
}
