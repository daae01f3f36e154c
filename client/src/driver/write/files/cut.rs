//! Truncation of a file whose data cannot be stored first.

use std::sync::Arc;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::{MetaReply, mutation};
use tokio::sync::OwnedMutexGuard;

use super::{FileState, Files, Inner};
use crate::engine::session::call::Unanswered;
use crate::error::ClientError;

/// While it is held, no other caller performs an operation on the file that [`FileState::serial`] serializes.
pub(crate) type Serial = Arc<OwnedMutexGuard<()>>;

/// Keeps commits of a file from beginning until it is dropped, which must be only when the namenode has truncated the
/// file, or never will.
pub(crate) struct Cut {
    files: Arc<Files>,
    file: Arc<FileState>,
    size_bytes: u64,
    _serial: Serial,
}

impl FileState {
    /// Waits until no other caller performs an operation that has to be serialized.
    pub(crate) async fn serial(&self) -> Serial {
        Arc::new(self.serial.clone().lock_owned().await)
    }
}

impl Files {
    /// Prepares a truncation at the namenode: waits until no commit is in flight, except one that
    /// is late. Returns `None` if only a flush can tell which data in memory remains.
    pub(crate) async fn begin_cut(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        size_bytes: u64,
        serial: &Serial,
    ) -> Option<Cut> {
        let cut = Cut {
            files: self.clone(),
            file: file.clone(),
            size_bytes,
            _serial: serial.clone(),
        };
        self.update(file, |inner| inner.data.hold_commits(true));
        let may_be_cut = file.once(|data| data.may_be_cut(size_bytes)).await;
        may_be_cut.then_some(cut)
    }
}

impl Cut {
    /// Handles the outcome of the truncation at the namenode.
    pub(crate) fn ended(self, answer: Result<&MetaReply, &Unanswered>) {
        let size_bytes = self.size_bytes;
        match answer {
            Ok(MetaReply::Attr(attr)) => {
                let mtime = attr.mtime;
                let cut = |inner: &mut Inner| inner.data.cut(size_bytes, mtime);
                self.files.update(&self.file, cut);
            }
            Ok(_) => self.is_unknown(&ClientError::UnexpectedReply(mutation::SetAttr::NAME)),
            Err(unanswered) if may_be_done(unanswered) => self.is_unknown(&unanswered.error),
            Err(_) => {}
        }
    }

    /// Gives up data that may have been cut off: it must not come back, nor be lost silently.
    fn is_unknown(&self, error: &ClientError) {
        let reason = format!("whether the file was cut is unknown: {error}");
        let lost = ClientError::DataLost { reason };
        let cut = |inner: &mut Inner| inner.data.may_have_been_cut(self.size_bytes, lost);
        self.files.update(&self.file, cut);
    }
}

/// Whether the namenode may have truncated a file, or may yet. A refusal is definite: the request
/// had the same number each time.
fn may_be_done(unanswered: &Unanswered) -> bool {
    let is_refused = match &unanswered.error {
        ClientError::Fs(error) => !matches!(
            error,
            FsError::SessionExpired | FsError::Busy { .. } | FsError::NotLeader { .. }
        ),
        _ => false,
    };
    unanswered.maybe_executed && !is_refused
}

impl Drop for Cut {
    fn drop(&mut self) {
        let go_on = |inner: &mut Inner| inner.data.hold_commits(false);
        self.files.update(&self.file, go_on);
        // Waiters need not wait for data that was cut off.
        self.file.progress.notify_waiters();
    }
}
