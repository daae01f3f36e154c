//! Files that one mount creates and another one changes before the first opens them again: what its kernel has cached
//! of them dates from their creation.
//!
//! When another mount changes a file, all directory entries of a mount become stale, and the kernel drops the inode
//! with its last entry, and its pages with it. So for most of these files, something else keeps holding the inode.

use std::collections::{BTreeMap, VecDeque};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Program;
use super::kernel::{Fd, PAGE_BYTES};
use super::shared::DIRECTORY;

/// The most files that wait for another mount, or for their own.
const WAITING_MAX: usize = 4;
/// Pages of the largest file.
const PAGES_MAX: usize = 5;
/// One file out of `STAYS_OPEN` stays open where it was created; of the others, one out of `HAS_TWO_NAMES` gets a
/// second name there.
const STAYS_OPEN: usize = 3;
const HAS_TWO_NAMES: usize = 2;
/// The byte that fills files when they are created, and once they are changed.
const CREATED: u8 = b'c';
const CHANGED: u8 = b'C';

fn second_name(path: &str) -> String {
    format!("{path}-too")
}

/// Files that are handed from one mount to another.
#[derive(Debug, Default)]
pub(super) struct Handed {
    /// The number of files so far.
    count: u64,
    waiting: VecDeque<File>,
    /// Descriptors that are still open where files were created, by the number of the mount and by name.
    open: BTreeMap<(u8, String), Fd>,
}

#[derive(Debug)]
struct File {
    name: String,
    length: usize,
    /// The mount that created it.
    creator: u8,
    /// Another mount has changed it.
    is_changed: bool,
    /// It has a second name.
    has_two: bool,
}

impl Handed {
    /// Notes that the machine of a mount crashed, so that nothing is open there any more.
    pub(super) fn crashed(&mut self, number: u8) {
        self.open.retain(|(creator, _), _| *creator != number);
    }
}

impl Program {
    /// Reads a file that this mount created and another one changed, or changes one that another mount created, or else
    /// creates one. A failed operation has no known outcome, and its file is not handed on.
    pub(super) async fn hand_around(&self) -> Result<(), Errno> {
        let taken = {
            let waiting = &mut self.board.borrow_mut().handed.waiting;
            let is_ours = |it: &File| it.is_changed == (it.creator == self.number);
            let first = waiting.iter().position(is_ours);
            first.and_then(|at| waiting.remove(at))
        };
        match taken {
            Some(file) if file.is_changed => self.look_at_changed(&file).await,
            Some(file) => {
                self.note(format_args!("change {}", file.name));
                let mode = match self.random(0..2) {
                    0 => OFlags::RDWR,
                    _ => OFlags::WRONLY,
                };
                let path = format!("{DIRECTORY}/{}", file.name);
                let content = vec![CHANGED; file.length];
                self.write_synced(&path, mode, &content).await?;
                self.hand_on(File {
                    is_changed: true,
                    ..file
                });
                Ok(())
            }
            None => self.create_handed().await,
        }
    }

    async fn create_handed(&self) -> Result<(), Errno> {
        let number = {
            let handed = &mut self.board.borrow_mut().handed;
            if handed.waiting.len() >= WAITING_MAX {
                return Ok(());
            }
            handed.count += 1;
            handed.count
        };
        let name = format!("handed-{number}");
        let length = 1 + self.random(0..PAGES_MAX * PAGE_BYTES as usize);
        self.note(format_args!("create {name}"));
        let path = format!("{DIRECTORY}/{name}");
        let mode = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let fd = self.thread.open(&path, mode).await?;
        let content = vec![CREATED; length];
        let written = self.fill_synced(&fd, &content).await;
        let mut has_two = false;
        if written.is_ok() && self.random(0..STAYS_OPEN) == 0 {
            let held = (self.number, name.clone());
            self.board.borrow_mut().handed.open.insert(held, fd);
        } else {
            self.thread.close(fd).await?;
            written?;
            has_two = self.random(0..HAS_TWO_NAMES) == 0;
        }
        if has_two {
            self.thread.link(&path, &second_name(&path)).await?;
        }
        self.hand_on(File {
            name,
            length,
            creator: self.number,
            is_changed: false,
            has_two,
        });
        Ok(())
    }

    fn hand_on(&self, file: File) {
        if self.journal.is_certain() {
            self.board.borrow_mut().handed.waiting.push_back(file);
        }
    }

    async fn look_at_changed(&self, file: &File) -> Result<(), Errno> {
        let File { name, length, .. } = file;
        self.note(format_args!("read {name}, which was changed"));
        let path = format!("{DIRECTORY}/{name}");
        let fd = self.thread.open(&path, OFlags::RDONLY).await?;
        let read = self.read_all(&fd).await;
        self.thread.close(fd).await?;
        let held = (self.number, name.clone());
        let held = self.board.borrow_mut().handed.open.remove(&held);
        if let Some(held) = held {
            self.thread.close(held).await?;
        }
        let read = read?;
        if read.len() != *length || read.iter().any(|byte| *byte != CHANGED) {
            let old = read.iter().filter(|byte| **byte == CREATED).count();
            self.failure(&format!(
                "{name} has {} bytes, {old} of them old ones, where another mount wrote {length}",
                read.len()
            ));
        }
        if file.has_two {
            self.thread.unlink(&second_name(&path)).await?;
        }
        self.thread.unlink(&path).await
    }
}
