//! Operations on all files.

use std::cmp::Reverse;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::BLOCKS_PER_REQUEST_MAX;
use harvestfs_protocol::meta::housekeeping;

use super::{FileState, Files};
use crate::driver::clock;
use crate::error::ClientError;

/// Deadline for committing a recalled file's content, within the namenode's patience.
const RECALL_DEADLINE: Duration = Duration::from_secs(8);
/// How long closing a client waits until its last blocks are sealed: longer than it takes to save a
/// block whose pipeline broke.
const CLOSE_DEADLINE: Duration = Duration::from_secs(8);

impl Files {
    pub(super) fn all(&self) -> Vec<Arc<FileState>> {
        self.files.lock().values().cloned().collect()
    }

    /// Starts flushing everything; with `again`, even data that was refused more than once.
    fn flush_all(self: &Arc<Self>, again: bool) {
        for file in self.all() {
            if again || !file.is_refused_again() {
                self.start_flush(&file);
            }
        }
    }

    /// Gives up data that was refused again, largest files first, until it fits in its share of the
    /// memory: others need the memory, and there is no sign that the data can ever be stored.
    fn give_up_refused(self: &Arc<Self>) {
        let mut refused: Vec<_> = self
            .all()
            .into_iter()
            .map(|file| (file.refused_bytes(), file))
            .collect();
        refused.sort_by_key(|(bytes, _)| Reverse(*bytes));
        let mut total: u64 = refused.iter().map(|(bytes, _)| bytes).sum();
        for (bytes, file) in refused {
            if total <= self.dirty.refused_max() {
                break;
            }
            tracing::error!(ino = %file.ino, bytes, "data that was refused is given up: others need the memory");
            self.update(&file, |inner| inner.data.give_up_refused());
            total -= bytes;
        }
    }

    /// Starts flushing old data, and forgets states that are not needed.
    pub(crate) fn flush_old(self: &Arc<Self>) {
        let age_max = self.cluster.session.options.dirty_age_max;
        for file in self.all() {
            if file.is_dirty_for(age_max) {
                self.start_flush(&file);
            }
            self.reap(&file);
        }
    }

    /// Waits until there is room for more written data of a file.
    ///
    /// # Errors
    /// The error that kept the memory from being freed; or why data of the file was refused, if that happens meanwhile.
    pub(crate) async fn wait_for_room(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        bytes: usize,
    ) -> Result<(), ClientError> {
        let started = clock::now();
        let session = &self.cluster.session;
        // Writers that fail give up after the longer of the two timeouts, and may then free nothing.
        let options = &session.options;
        let patience = options.busy_timeout.max(options.unreachable_timeout);
        let patience = patience.saturating_mul(2);
        let mut unreachable = pin!(session.unreachable());
        // Data that was refused long ago is retried once, and so is data that is refused for the first time meanwhile.
        let mut again = true;
        loop {
            let freed = self.dirty.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if self.dirty.has_room(bytes) {
                return Ok(());
            }
            if file.takes_no_more() {
                self.flush(file, false).await?;
            }
            if !again {
                self.give_up_refused();
            }
            self.flush_all(std::mem::take(&mut again));
            let left = patience.saturating_sub(clock::now() - started);
            tokio::select! {
                biased;
                () = freed => {}
                error = &mut unreachable => return Err(error),
                () = tokio::time::sleep(left) => {
                    return Err(ClientError::TooMuchDirtyData {
                        waiting_bytes: self.dirty.used(),
                        waited: clock::now() - started,
                    });
                }
            }
        }
    }

    /// Commits the files that were already closed.
    pub(crate) async fn commit_closed(self: &Arc<Self>) -> Result<(), ClientError> {
        for file in self.all() {
            let is_closed = file.inner.lock().data.is_closed_early();
            if is_closed {
                self.flush(&file, false).await?;
            }
        }
        Ok(())
    }

    /// Commits the data in memory of files that another session requests; notifies the namenode.
    pub(crate) async fn commit_recalled(self: Arc<Self>, inodes: Vec<InodeId>) {
        let files: Vec<_> = inodes.iter().filter_map(|ino| self.get(*ino)).collect();
        for file in &files {
            self.start_flush(file);
        }
        let committed = async {
            for file in files {
                if let Err(error) = self.flush(&file, false).await {
                    tracing::warn!(ino = %file.ino, %error, "what another session asks for is not committed yet");
                }
            }
        };
        if tokio::time::timeout(RECALL_DEADLINE, committed)
            .await
            .is_err()
        {
            tracing::warn!("what another session asks for is not committed in time");
        }
        for chunk in inodes.chunks(BLOCKS_PER_REQUEST_MAX) {
            let op = housekeeping::ReturnDelegations {
                inodes: chunk.to_vec(),
            };
            if let Err(error) = self.cluster.session.keep_house(op).await {
                // They end with the connection, or with the namenode's patience.
                tracing::debug!(%error, "cannot return delegations");
            }
        }
    }

    /// Moves all uncommitted data to blocks of the new session that has replaced an expired one.
    pub(crate) fn begin_session(self: &Arc<Self>) {
        for pack in self.packs.lock().values() {
            pack.wake();
        }
        for file in self.all() {
            self.blocks_lost(&file, |_| true);
        }
    }

    /// Flushes everything and waits for it; returns the first error. Nothing may be written any more.
    pub(crate) async fn flush_and_wait(self: &Arc<Self>) -> Result<(), ClientError> {
        let mut result = Ok(());
        for file in self.all() {
            let flushed = self.flush(&file, false).await;
            result = result.and(flushed);
        }
        self.close_writers();
        // A block that is not sealed when its pipeline ends has to be recovered by the namenode.
        let sealed = self.writers.ended();
        if tokio::time::timeout(CLOSE_DEADLINE, sealed).await.is_err() {
            tracing::debug!("some blocks are not sealed; the namenode does that");
        }
        result
    }

    /// Ends the tasks of all writers once they have written their data.
    pub(crate) fn close_writers(&self) {
        for (_, pack) in self.packs.lock().drain() {
            pack.close();
        }
        for file in self.all() {
            file.close_writer();
        }
    }
}
