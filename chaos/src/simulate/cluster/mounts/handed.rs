//! Files that one mount creates, another one changes, and the first opens again only then: what its kernel has of them is
//! from when they were created.

use std::collections::VecDeque;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Program;
use super::kernel::PAGE_BYTES;
use super::shared::DIRECTORY;

/// Files that wait for another mount, or for their own.
const WAITING_MAX: usize = 4;
/// Pages of the largest one.
const PAGES_MAX: usize = 5;
/// What files hold when they are created, and when they were changed.
const CREATED: u8 = b'c';
const CHANGED: u8 = b'C';

/// Files that are handed from one mount to another.
#[derive(Debug, Default)]
pub(super) struct Handed {
    /// How many there were.
    count: u64,
    waiting: VecDeque<File>,
}

#[derive(Debug)]
struct File {
    name: String,
    length: usize,
    /// The mount that created it.
    creator: u8,
    /// By another one.
    is_changed: bool,
}

impl Program {
    /// Reads what this mount created and another one changed, changes what another one created, or creates something, in
    /// this order. What fails has no known outcome, and is not handed on.
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
                self.fill_handed(&file, mode, CHANGED).await?;
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
        let file = File {
            name: format!("handed-{number}"),
            length: 1 + self.random(0..PAGES_MAX * PAGE_BYTES as usize),
            creator: self.number,
            is_changed: false,
        };
        self.note(format_args!("create {}", file.name));
        let mode = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        self.fill_handed(&file, mode, CREATED).await?;
        self.hand_on(file);
        Ok(())
    }

    fn hand_on(&self, file: File) {
        if self.journal.is_certain() {
            self.board.borrow_mut().handed.waiting.push_back(file);
        }
    }

    async fn fill_handed(&self, file: &File, mode: OFlags, with: u8) -> Result<(), Errno> {
        let path = format!("{DIRECTORY}/{}", file.name);
        self.write_synced(&path, mode, &vec![with; file.length])
            .await
    }

    async fn look_at_changed(&self, file: &File) -> Result<(), Errno> {
        let File { name, length, .. } = file;
        self.note(format_args!("read {name}, which was changed"));
        let path = format!("{DIRECTORY}/{name}");
        let fd = self.thread.open(&path, OFlags::RDONLY).await?;
        let read = self.read_all(&fd).await;
        self.thread.close(fd).await?;
        let read = read?;
        if read.len() != *length || read.iter().any(|byte| *byte != CHANGED) {
            let old = read.iter().filter(|byte| **byte == CREATED).count();
            self.failure(&format!(
                "{name} has {} bytes, {old} of them old ones, where another mount wrote {length}",
                read.len()
            ));
        }
        self.thread.unlink(&path).await
    }
}
