//! Handles of files, and what their `close` has to wait for.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::request_id::RequestId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{FileState, Files, Inner};
use crate::engine::session::holds::Keep;
use crate::engine::write::file::{DirtyFile, Early};

/// Maximum number of files whose `close` returned before their commit. Beyond it, `close` waits.
const CLOSED_EARLY_MAX: usize = 4_096;
/// Maximum number of closed files that are remembered to have lost data; the oldest are forgotten.
const UNSEEN_LOSSES_MAX: usize = 1_024;
/// How long a file that was closed before its commit waits for others to share a packet.
const CLOSE_LINGER: Duration = Duration::from_millis(5);

impl Files {
    /// Returns the state of an inode that is open or has data in memory.
    pub(crate) fn get(&self, ino: InodeId) -> Option<Arc<FileState>> {
        self.files.lock().get(&ino).cloned()
    }

    /// Returns the state of an inode, with one more handle.
    pub(crate) fn open(&self, ino: InodeId) -> Arc<FileState> {
        let mut files = self.files.lock();
        let file = files
            .entry(ino)
            .or_insert_with(|| self.new_state(ino))
            .clone();
        file.inner.lock().data.handle_opened();
        file
    }

    fn new_state(&self, ino: InodeId) -> Arc<FileState> {
        let mut data = DirtyFile::new(ino);
        {
            let mut losses = self.unseen_losses.lock();
            let known = losses.iter().position(|(other, _)| *other == ino);
            if let Some((_, reason)) = known.and_then(|index| losses.remove(index)) {
                data.had_unseen_loss(reason);
            }
        }
        Arc::new(FileState {
            ino,
            serial: Arc::default(),
            turns: tokio::sync::Mutex::default(),
            inner: Mutex::new(Inner {
                data,
                is_kept: false,
                writer: None,
                unstable: Vec::new(),
                taken_over: 1,
                taken_over_stable: 0,
                // One of these mutations may concern this file.
                relaxed: self.cluster.session.last_relaxed(),
            }),
            progress: Notify::new(),
        })
    }

    /// Handles the end of a file handle.
    pub(crate) fn handle_closed(self: &Arc<Self>, file: &Arc<FileState>) {
        let last = file.inner.lock().data.handle_closed();
        if last {
            if !file.inner.lock().data.is_closed_early() {
                self.start_flush(file);
            }
            file.close_writer();
            self.reap(file);
        }
        let may_release = file.inner.lock().data.may_release_hold();
        if may_release {
            self.hold_closed(file);
        }
    }

    pub(super) fn hold_closed(&self, file: &FileState) {
        let session = &self.cluster.session;
        let keep = match session.cache.attr(file.ino) {
            Some(attr) if attr.nlink > 0 => Keep::Yes,
            Some(_) => Keep::No,
            None => Keep::UnlessChanged,
        };
        session.holds.closed(file.ino, keep);
    }

    /// Forgets the state of an inode if nothing needs it.
    pub(super) fn reap(&self, file: &Arc<FileState>) {
        let mut files = self.files.lock();
        let is_current = |own: &Arc<FileState>| Arc::ptr_eq(own, file);
        if file.inner.lock().data.is_unused() && files.get(&file.ino).is_some_and(is_current) {
            files.remove(&file.ino);
            file.close_writer();
            if let Some(reason) = file.take_unseen_loss() {
                let mut losses = self.unseen_losses.lock();
                if losses.len() == UNSEEN_LOSSES_MAX {
                    losses.pop_front();
                }
                losses.push_back((file.ino, reason));
            }
        }
    }

    /// Whether a `close` need not wait for the commit, which then follows. The session must have
    /// the file's delegation, one commit must be enough to make everything visible, and there must
    /// be no reason to expect it to fail. Data with the same rules must be flowing into a block at
    /// this moment, so that a cluster which accepts no data is noticed by a `close` that waits.
    pub(crate) fn close_early(self: &Arc<Self>, file: &Arc<FileState>) -> bool {
        let session = &self.cluster.session;
        let Some(rules) = file.rules() else {
            return false;
        };
        if !session.delegations.has(file.ino)
            || session.lease_remaining().is_zero()
            || self.dirty.is_tight()
            || self.closed_early.load(Ordering::Relaxed) >= CLOSED_EARLY_MAX
            || !self.pack(rules).is_flowing()
        {
            return false;
        }
        let early = {
            let mut inner = file.inner.lock();
            let early = inner.data.close_early();
            if early == Early::First {
                session.delegations.owes(file.ino);
            }
            early
        };
        if early == Early::First {
            self.closed_early.fetch_add(1, Ordering::Relaxed);
            self.flush_soon(file.clone());
        }
        early != Early::No
    }

    /// Flushes a file soon, together with others that are closed meanwhile, so that they share
    /// packets and commits.
    fn flush_soon(self: &Arc<Self>, file: Arc<FileState>) {
        let is_first = {
            let mut closing = self.closing.lock();
            closing.push((RequestId::current(), file));
            closing.len() == 1
        };
        if is_first {
            let files = self.clone();
            self.cluster.session.runtime.spawn(async move {
                tokio::time::sleep(CLOSE_LINGER).await;
                let closing = std::mem::take(&mut *files.closing.lock());
                for (request, file) in closing {
                    request.during(|| files.start_flush(&file));
                }
            });
        }
    }
}

impl FileState {
    /// Ends the file's own blocks once everything is written.
    pub(super) fn close_writer(&self) {
        let writer = {
            let mut inner = self.inner.lock();
            inner.data.end_bulk();
            inner.writer.take()
        };
        if let Some(writer) = writer {
            writer.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use harvestfs_protocol::name::Name;
    use harvestfs_protocol::types::Credentials;

    use super::*;
    use crate::OpenFlags;
    use crate::testing::Cluster;

    /// As when the last handle is closed while another one is written to.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_closed_writer_of_a_file_does_not_take_is_stored_all_the_same() {
        // Enough for blocks of the file's own.
        const BULK: usize = 9 << 20;
        let cluster = Cluster::start(3, 3).await;
        let client = cluster.client("a").await;
        let (root, name) = (Credentials::root(), Name::new(b"file").unwrap());
        let flags = OpenFlags::READ_WRITE;
        let created = client.create_file(&root, InodeId::ROOT, &name, 0o644, flags);
        let (_, file) = created.await.unwrap();
        file.write(0, Bytes::from(vec![1; BULK])).await.unwrap();
        let writer = file.state().inner.lock().writer.clone();
        writer.unwrap().close();
        let more = Bytes::from(vec![2; BULK]);
        file.write(BULK as u64, more.clone()).await.unwrap();
        file.sync().await.unwrap();
        assert!(file.read(BULK as u64, BULK).await.unwrap() == more);
    }
}
