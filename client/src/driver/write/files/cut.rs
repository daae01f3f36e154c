//! A file is cut whose data cannot be stored before.

use std::sync::Arc;

use harvestfs_protocol::types::Timestamp;

use super::{FileState, Files, Inner};

/// No commit of a file begins until this is dropped.
pub(crate) struct Cut {
    files: Arc<Files>,
    file: Arc<FileState>,
}

impl Files {
    /// Before the namenode cuts a file: waits until no commit is in flight. The caller holds
    /// [`FileState::serial`]. None: only a flush can say what the cut leaves of the data in memory.
    pub(crate) async fn begin_cut(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        size_bytes: u64,
    ) -> Option<Cut> {
        let cut = Cut {
            files: self.clone(),
            file: file.clone(),
        };
        self.update(file, |inner| inner.data.hold_commits(true));
        loop {
            let progress = file.progress.notified();
            tokio::pin!(progress);
            progress.as_mut().enable();
            let (is_committing, may_be_cut) = {
                let inner = file.inner.lock();
                let may_be_cut = inner.data.may_be_cut(size_bytes);
                (inner.data.is_committing(), may_be_cut)
            };
            if !is_committing {
                return may_be_cut.then_some(cut);
            }
            progress.await;
        }
    }
}

impl Cut {
    /// The namenode has cut the file, which gave it this modification time.
    pub(crate) fn done(self, size_bytes: u64, mtime: Timestamp) {
        let cut = |inner: &mut Inner| inner.data.cut(size_bytes, mtime);
        self.files.update(&self.file, cut);
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        let go_on = |inner: &mut Inner| inner.data.hold_commits(false);
        self.files.update(&self.file, go_on);
        // What was cut off need not be waited for.
        self.file.progress.notify_waiters();
    }
}
