//! Operations on the names that clients and mounts share ([`crate::simulate::cluster::workload::History`]), made by
//! programs of root on mounts.

use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Program;
use super::kernel::{Fd, Stat};
use crate::simulate::cluster::workload::names::{
    self, Action, Actor, Answer, Begun, MOUNT_MODE, NAMES_DIRECTORY, ROOT, Refusal, Shown, XATTR,
};

/// Mean time between two operations.
const PAUSE: Duration = Duration::from_millis(150);
/// How often a program checks whether a client has made the directory.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// Translates an error; `None` if it is not known whether the operation was done.
fn refusal(error: Errno) -> Option<Refusal> {
    match error {
        Errno::EXIST => Some(Refusal::Exists),
        Errno::NOENT => Some(Refusal::NotFound),
        Errno::NODATA => Some(Refusal::NoAttribute),
        _ => None,
    }
}

fn shown(stat: &Stat) -> Shown {
    Shown {
        uid: stat.uid,
        mode: stat.mode,
        size_bytes: stat.size,
        nlink: stat.nlink,
    }
}

impl Program {
    /// Repeats operations on the names.
    pub(super) async fn use_names(&self) {
        let directory = format!("/{NAMES_DIRECTORY}");
        while self.thread.stat(&directory).await.is_err() && !self.stop.get() {
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        self.repeat_with(PAUSE, async || {
            // No answers count then, and operations with unknown outcomes would have to be tried in every order.
            if self.journal.is_in_doubt() {
                return Ok(());
            }
            let (pair, _, action) = self.names.borrow().draw(|range| self.random(range));
            let name = self.random(0..2);
            let path = |name| names::path(pair, name);
            let thread = &self.thread;
            match action {
                Action::Create(name, _) => {
                    let begun = self.begin_names(pair, Action::Create(name, MOUNT_MODE));
                    self.create_name(begun, &path(name)).await
                }
                Action::Unlink(name) => {
                    let begun = self.begin_names(pair, action);
                    let removed = thread.unlink(&path(name)).await;
                    self.answered_names(begun, removed.map(|()| Answer::Done))
                }
                Action::Rename(name) => {
                    let begun = self.begin_names(pair, action);
                    let renamed = thread.rename(&path(name), &path(1 - name)).await;
                    if renamed == Ok(false) {
                        // The kernel found that both names lead to one file, when it looked them up one after the
                        // other.
                        self.names.borrow_mut().dropped(begun);
                        return Ok(());
                    }
                    self.answered_names(begun, renamed.map(|_| Answer::Done))
                }
                Action::Look(name) => {
                    let begun = self.begin_names(pair, action);
                    let stat = thread.stat(&path(name)).await;
                    self.answered_names(
                        begun,
                        stat.map(|stat| Answer::Found(stat.ino, shown(&stat))),
                    )
                }
                Action::List => {
                    let begun = self.begin_names(pair, action);
                    let found = thread.list(&directory).await;
                    let listed = found.map(|found| {
                        let found = found.iter().map(String::as_bytes);
                        Answer::Listed(names::listed(pair, found))
                    });
                    self.answered_names(begun, listed)
                }
                Action::Link(..)
                | Action::SetMode(..)
                | Action::SetSize(..)
                | Action::SetXattr(..)
                | Action::Show(_)
                | Action::ShowXattr(_) => self.open_name(pair, name, action).await,
            }
        })
        .await;
    }

    fn begin_names(&self, pair: usize, action: Action) -> Begun {
        self.note(format_args!("names, pair {pair}: {action:?}"));
        let actor = Actor::Mount(self.number);
        let mut names = self.names.borrow_mut();
        names.begin((actor, ROOT), pair, action, self.journal.now())
    }

    fn answered_names(&self, begun: Begun, answer: Result<Answer, Errno>) -> Result<(), Errno> {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => Answer::Refused(refusal(error).ok_or(error)?),
        };
        if self.journal.is_certain() {
            let now = self.journal.now();
            self.names.borrow_mut().answered(begun, now, answer);
        }
        Ok(())
    }

    async fn create_name(&self, begun: Begun, path: &str) -> Result<(), Errno> {
        let mode = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
        let opened = self.thread.open(path, mode).await;
        let created = opened.as_ref().map(|fd| Answer::File(fd.ino));
        self.answered_names(begun, created.map_err(|error| *error))?;
        match opened {
            Ok(fd) => self.thread.close(fd).await,
            Err(_) => Ok(()),
        }
    }

    /// Opens a file and does something like `action` through the descriptor, so that the file that it affects is known.
    async fn open_name(&self, pair: usize, name: usize, action: Action) -> Result<(), Errno> {
        let begun = self.begin_names(pair, Action::Look(name));
        let path = names::path(pair, name);
        let opened = self.thread.open(&path, OFlags::RDONLY).await;
        let seen = opened.as_ref().map(|fd| Answer::File(fd.ino));
        self.answered_names(begun, seen.map_err(|error| *error))?;
        let Ok(fd) = opened else {
            return Ok(());
        };
        let used = self.use_open_name(pair, &fd, action).await;
        self.thread.close(fd).await?;
        used
    }

    async fn use_open_name(&self, pair: usize, fd: &Fd, action: Action) -> Result<(), Errno> {
        let (file, thread) = (fd.ino, &self.thread);
        let begin = |action| self.begin_names(pair, action);
        let done = |()| Answer::Done;
        let (begun, answer) = match action {
            Action::Link(_, name) => {
                let begun = begin(Action::Link(file, name));
                let linked = thread.link_open(fd, &names::path(pair, name)).await;
                (begun, linked.map(done))
            }
            Action::SetMode(_, mode) => {
                let begun = begin(Action::SetMode(file, mode));
                (begun, thread.chmod(fd, mode).await.map(done))
            }
            Action::SetXattr(_, value) => {
                let begun = begin(Action::SetXattr(file, value));
                let set = match value {
                    Some(value) => thread.set_xattr(fd, XATTR, &[value]).await,
                    None => thread.remove_xattr(fd, XATTR).await,
                };
                (begun, set.map(done))
            }
            Action::ShowXattr(_) => {
                let begun = begin(Action::ShowXattr(file));
                let value = thread.get_xattr(fd, XATTR).await;
                let first = |value: Vec<u8>| value.first().copied().unwrap_or_default();
                (begun, value.map(first).map(Answer::Xattr))
            }
            Action::Show(_)
            | Action::SetSize(..)
            | Action::Create(..)
            | Action::Unlink(_)
            | Action::Rename(_)
            | Action::Look(_)
            | Action::List => {
                let begun = begin(Action::Show(file));
                let stat = thread.fstat(fd).await;
                (begun, stat.map(|it| Answer::Shown(shown(&it))))
            }
        };
        self.answered_names(begun, answer)
    }
}
