//! The log of all clients and mounts: programs on mounts append to it, and follow it through a descriptor that stays
//! open.

use std::cell::RefCell;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Program;
use super::kernel::Fd;
use crate::random;
use crate::simulate::cluster::workload::log::{LOG_DIRECTORY, RECORDS_MAX, Reader, path};

/// The mean time between two reads of a program that follows the log.
const LOOK_PAUSE: Duration = Duration::from_millis(45);

impl Program {
    /// Appends records, and syncs them or not.
    pub(super) async fn append(&self) {
        self.make_directory(&format!("/{LOG_DIRECTORY}")).await;
        self.repeat(async || {
            let mode = OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY;
            let fd = self.thread.open(&path(), mode).await?;
            let mut result = Ok(());
            for _ in 0..self.random(1..4) {
                result = self.append_some(&fd).await;
                if result.is_err() {
                    break;
                }
            }
            let closed = self.thread.close(fd).await;
            // A failed operation has no known outcome: it may have been written and synced.
            if result.is_err() || closed.is_err() || !self.journal.is_certain() {
                self.log.borrow_mut().doubt(self.number);
            }
            result.and(closed)
        })
        .await;
    }

    async fn append_some(&self, fd: &Fd) -> Result<(), Errno> {
        let count = 1 + random::length(&mut *self.rng.borrow_mut(), RECORDS_MAX) as u64;
        let (records, text) = self.log.borrow_mut().begin(self.number, count);
        self.note(format_args!("append {records:?}"));
        if self.thread.write(fd, 0, text.as_bytes()).await? != text.len() {
            return Err(Errno::IO);
        }
        self.log.borrow_mut().written(self.number, records);
        if self.random(0..2) == 0 {
            self.thread.fsync(fd).await?;
            if self.journal.is_certain() {
                self.log.borrow_mut().synced(self.number);
            }
        }
        Ok(())
    }

    /// Follows the log, as `tail -f` does.
    pub(super) async fn follow(&self) {
        let open: RefCell<Option<(Fd, Reader)>> = RefCell::new(None);
        self.repeat_with(LOOK_PAUSE, async || {
            let (fd, mut reader) = match open.take() {
                Some(open) => open,
                None => match self.thread.open(&path(), OFlags::RDONLY).await {
                    Err(Errno::NOENT) => return Ok(()),
                    opened => (opened?, Reader::default()),
                },
            };
            let size = self.thread.fstat(&fd).await;
            let read = self.thread.read(&fd, reader.offset as u64, 1 << 16).await;
            let taken = read.as_deref().unwrap_or_default();
            let problem = reader.take(taken, &self.log.borrow());
            if let Some(problem) = problem {
                self.failure(&problem);
                return self.thread.close(fd).await;
            }
            if size.is_err() || self.random(0..40) == 0 || !self.journal.is_certain() {
                return self.thread.close(fd).await;
            }
            open.replace(Some((fd, reader)));
            match read {
                // The log never gets shorter, but records are committed while it is read.
                Err(Errno::INTR) => Ok(()),
                read => read.map(|_| ()),
            }
        })
        .await;
        if let Some((fd, _)) = open.take()
            && let Err(error) = self.thread.close(fd).await
        {
            self.journal.error(&self.name(), &error);
        }
    }
}
