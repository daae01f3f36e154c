//! Open files.

mod copy;
mod read;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::FILE_BYTES_MAX;
use harvestfs_protocol::meta::{AttrChanges, FallocateMode, MetaReply, mutation};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::{Attr, Credentials};

use crate::api::client::Client;
use crate::driver::read::readahead::ReadAhead;
use crate::driver::write::files::{FileState, Files, Target};
use crate::engine::cache::extents::ExtentMap;
use crate::engine::cache::permissions::{EXECUTE, READ, WRITE};
use crate::engine::read::ahead::UNIT_BYTES;
use crate::error::ClientError;

/// Pause before a kernel writeback is retried. Each attempt has already waited itself.
const WRITE_BACK_PAUSE: Duration = Duration::from_secs(1);
/// User and group of a caller who is not root but writes through a handle that root opened. Its groups do not matter.
const SOMEBODY: u32 = 65_534;

/// What a file is opened for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// To read.
    pub read: bool,
    /// To write.
    pub write: bool,
    /// Every [`File::append`] goes to the end, even if others append too.
    pub append: bool,
    /// Truncate to length 0 first.
    pub truncate: bool,
    /// To run it as a program, and therefore to read it: execute permission is sufficient.
    pub execute: bool,
}

impl OpenFlags {
    /// To read.
    pub const READ: Self = Self {
        read: true,
        write: false,
        append: false,
        truncate: false,
        execute: false,
    };
    /// To write.
    pub const WRITE: Self = Self {
        read: false,
        write: true,
        append: false,
        truncate: false,
        execute: false,
    };
    /// To read and to write.
    pub const READ_WRITE: Self = Self {
        read: true,
        write: true,
        append: false,
        truncate: false,
        execute: false,
    };

    /// These flags and what they imply: appending and truncating are writing.
    pub(crate) fn with_implied(self) -> Self {
        Self {
            write: self.write || self.append || self.truncate,
            ..self
        }
    }

    /// Whether data may be read.
    pub(crate) fn may_read(self) -> bool {
        self.read || self.execute
    }

    /// The permissions that the caller needs, as bits of a mode.
    pub(crate) fn permissions(self) -> u8 {
        [
            (self.read, READ),
            (self.write, WRITE),
            (self.execute, EXECUTE),
        ]
        .into_iter()
        .filter(|(wanted, _)| *wanted)
        .fold(0, |mask, (_, bit)| mask | bit)
    }
}

/// An open file. Cheap to clone; the file is open until the last clone is dropped. Dropping does not
/// wait for written data (it is flushed in the background); [`File::flush`] or [`File::close`] does.
#[derive(Clone)]
pub struct File {
    inner: Arc<Handle>,
}

struct Handle {
    client: Client,
    state: Arc<FileState>,
    credentials: Credentials,
    flags: OpenFlags,
    read_ahead: ReadAhead,
    /// Number of losses of the file's data that this handle need not report any more.
    losses_reported: AtomicU64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.client.core().files.handle_closed(&self.state);
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File")
            .field("ino", &self.inner.state.ino)
            .field("flags", &self.inner.flags)
            .finish_non_exhaustive()
    }
}

impl File {
    /// Creates a handle of a file that the namenode holds open for this session.
    pub(crate) fn new(
        client: &Client,
        ino: InodeId,
        credentials: &Credentials,
        flags: OpenFlags,
    ) -> Self {
        let state = client.core().files.open(ino);
        Self {
            inner: Arc::new(Handle {
                client: client.clone(),
                losses_reported: AtomicU64::new(state.losses().0),
                state,
                credentials: credentials.clone(),
                flags,
                read_ahead: ReadAhead::default(),
            }),
        }
    }

    fn files(&self) -> &Arc<Files> {
        &self.inner.client.core().files
    }

    pub(crate) fn state(&self) -> &Arc<FileState> {
        &self.inner.state
    }

    /// The inode.
    #[must_use]
    pub fn ino(&self) -> InodeId {
        self.inner.state.ino
    }

    /// What it was opened for.
    #[must_use]
    pub fn flags(&self) -> OpenFlags {
        self.inner.flags
    }

    /// Returns attributes that include what this client has written but not yet committed.
    ///
    /// # Errors
    /// The error that keeps the namenode from answering.
    pub async fn attr(&self) -> Result<Attr, ClientError> {
        let handle = &*self.inner;
        handle.client.getattr(&handle.credentials, self.ino()).await
    }

    /// Returns the permission bits of the file's mode if the cache knows them, without waiting.
    /// Ignores data that is written but not committed.
    #[must_use]
    pub fn try_mode(&self) -> Option<u16> {
        let cache = self.inner.client.core().session.valid_cache()?;
        cache.attr(self.ino()).map(|attr| attr.permission_bits())
    }

    /// As [`File::try_mode`], but asks the namenode if necessary.
    ///
    /// # Errors
    /// The error that keeps the namenode from answering.
    pub async fn mode(&self) -> Result<u16, ClientError> {
        let session = &self.inner.client.core().session;
        let attr = session.attr(&Credentials::root(), self.ino()).await?;
        Ok(attr.permission_bits())
    }

    /// Writes data. Waits only while too much written data is in memory.
    ///
    /// # Errors
    /// [`ClientError::TooMuchDirtyData`]; [`FsError::FileTooLarge`]. A failure to store the data is
    /// reported by a flush, or by a later write after much data was refused.
    pub async fn write(&self, offset: u64, data: Bytes) -> Result<(), ClientError> {
        self.write_by(&self.inner.credentials, offset, data).await
    }

    async fn write_by(
        &self,
        credentials: &Credentials,
        offset: u64,
        data: Bytes,
    ) -> Result<(), ClientError> {
        match self.try_write_by(credentials, offset, data) {
            Ok(result) => result,
            Err(data) => {
                let (state, target) = (&self.inner.state, Target::At(offset));
                self.files().take_in(state, credentials, target, data).await
            }
        }
    }

    /// As [`File::write`], or without an offset as [`File::append`], on behalf of a user other than
    /// root, even if root opened the file: the file loses its set-id bits with the commit.
    ///
    /// # Errors
    /// As [`File::write`].
    pub async fn write_unprivileged(
        &self,
        offset: Option<u64>,
        data: Bytes,
    ) -> Result<(), ClientError> {
        let somebody = Credentials {
            uid: SOMEBODY,
            gid: SOMEBODY,
            groups: Vec::new(),
        };
        let credentials = match self.inner.credentials.uid {
            0 => &somebody,
            _ => &self.inner.credentials,
        };
        match offset {
            Some(offset) => self.write_by(credentials, offset, data).await,
            None => self.append_by(credentials, data).await,
        }
    }

    /// As [`File::write`], for data that no program can write again after a failure, such as the kernel's dirty
    /// pages of a mapping. Retries transient failures, however long they last, until [`Client::will_close`].
    ///
    /// # Errors
    /// [`FsError::FileTooLarge`], [`FsError::QuotaExceeded`] and other permanent errors.
    pub async fn write_back(&self, offset: u64, data: Bytes) -> Result<(), ClientError> {
        let will_close = &self.files().will_close;
        loop {
            match self.write(offset, data.clone()).await {
                Err(error) if is_passing(&error) && !will_close.load(Ordering::Relaxed) => {
                    tracing::warn!(ino = %self.ino(), %error, "what the kernel writes back waits");
                }
                written => return written,
            }
            tokio::time::sleep(WRITE_BACK_PAUSE).await;
        }
    }

    /// As [`File::write`] if that need not wait; otherwise gives the data back.
    ///
    /// # Errors
    /// The data.
    pub fn try_write(&self, offset: u64, data: Bytes) -> Result<Result<(), ClientError>, Bytes> {
        self.try_write_by(&self.inner.credentials, offset, data)
    }

    fn try_write_by(
        &self,
        credentials: &Credentials,
        offset: u64,
        data: Bytes,
    ) -> Result<Result<(), ClientError>, Bytes> {
        let handle = &*self.inner;
        if !handle.flags.write {
            return Ok(Err(ClientError::NotOpenFor("writing")));
        }
        let end = offset.checked_add(data.len() as u64);
        if end.is_none_or(|end| end > FILE_BYTES_MAX) {
            return Ok(Err(FsError::FileTooLarge.into()));
        }
        let dirty = &self.files().dirty;
        if !dirty.has_room(data.len()) {
            return Err(data);
        }
        // Bulk data is sent before it is flushed, which requires the file's placement rules.
        let much = data.len() as u64 + handle.state.held_bytes() >= UNIT_BYTES;
        if (much || dirty.is_tight()) && handle.state.rules().is_none() {
            return Err(data);
        }
        let target = Target::At(offset);
        self.files()
            .try_take_in(&handle.state, credentials, target, data)?;
        Ok(Ok(()))
    }

    /// Appends, for a file opened with `append`. The data of one call stays contiguous, even if
    /// others append, if it is no longer than a block.
    ///
    /// # Errors
    /// As [`File::write`].
    pub async fn append(&self, data: Bytes) -> Result<(), ClientError> {
        self.append_by(&self.inner.credentials, data).await
    }

    async fn append_by(&self, credentials: &Credentials, data: Bytes) -> Result<(), ClientError> {
        let handle = &*self.inner;
        if !handle.flags.append {
            return Err(ClientError::NotOpenFor("appending"));
        }
        self.files()
            .take_in(&handle.state, credentials, Target::End, data)
            .await
    }

    /// Makes written data visible to every later `open` (what `close` promises). For a small new file
    /// this may return before its commit: the namenode requests the commit when another session looks.
    ///
    /// # Errors
    /// The error that kept the data from being stored; the data stays in memory and the next flush retries
    /// it. [`ClientError::DataLost`] if data had to be given up since, until [`File::sync`] has reported it.
    pub async fn flush(&self) -> Result<(), ClientError> {
        let (files, state) = (self.files(), &self.inner.state);
        let mut is_early = false;
        if state.has_data() {
            files.find_rules(state).await?;
            is_early = files.close_early(state);
        }
        let flushed = if is_early {
            Ok(())
        } else {
            files.flush(state, false).await
        };
        // A caller that only read does not check the result, and would take the report from those that wrote.
        if self.inner.flags.write {
            self.note_lost();
        }
        // A child closes inherited descriptors without checking the result: `fsync` still reports the loss.
        let reported = self.inner.losses_reported.load(Ordering::Acquire);
        self.report_losses_after(reported, flushed)
    }

    /// Makes written data durable (what `fsync` promises): on stable storage of every datanode of
    /// its blocks and in the journal.
    ///
    /// # Errors
    /// As [`File::flush`]; [`ClientError::TooFewReplicas`]; once, the reason why data was given up while
    /// nobody had the file open; [`ClientError::DataLost`] as long as the file contains lost data.
    pub async fn sync(&self) -> Result<(), ClientError> {
        let (files, state) = (self.files(), &self.inner.state);
        let durable = !planted::is(Bug::SyncsInMemory);
        let synced = files.flush(state, durable).await;
        let synced = state.take_unseen_loss().map_or(synced, Err);
        // This comes last, to include what was lost while this waited for the namenode.
        self.note_lost();
        let (losses, _) = state.losses();
        let reported = self.inner.losses_reported.swap(losses, Ordering::AcqRel);
        self.report_losses_after(reported, synced)
    }

    /// Flushes and closes. Other clones of the handle keep the file open.
    ///
    /// # Errors
    /// As [`File::flush`].
    pub async fn close(self) -> Result<(), ClientError> {
        self.flush().await
    }

    /// Notes acknowledged data of the file that is lost; every handle of the file reports it.
    fn note_lost(&self) {
        if let Some(lost) = self.inner.client.core().session.take_lost(self.ino()) {
            self.inner.state.lost(lost);
        }
    }

    fn report_losses_after(
        &self,
        reported: u64,
        result: Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        match self.inner.state.losses() {
            (losses, Some(reason)) if losses > reported => Err(reason),
            _ => result,
        }
    }

    /// Sets the length. Returns the attributes.
    ///
    /// # Errors
    /// The error that keeps written data from being stored, or the namenode from answering.
    pub async fn truncate(&self, size_bytes: u64) -> Result<Attr, ClientError> {
        let handle = &*self.inner;
        if !handle.flags.write {
            return Err(ClientError::NotOpenFor("writing"));
        }
        let changes = AttrChanges {
            size_bytes: Some(size_bytes),
            opened_for_writing: true,
            ..AttrChanges::default()
        };
        handle
            .client
            .setattr(&handle.credentials, self.ino(), changes)
            .await
    }

    /// `fallocate(2)`
    ///
    /// # Errors
    /// As [`File::truncate`].
    pub async fn fallocate(
        &self,
        offset: u64,
        length_bytes: u64,
        mode: FallocateMode,
    ) -> Result<(), ClientError> {
        let handle = &*self.inner;
        if !handle.flags.write {
            return Err(ClientError::NotOpenFor("writing"));
        }
        let _serial = handle.state.serial.lock().await;
        self.files().flush(&handle.state, false).await?;
        let (ino, session) = (self.ino(), &handle.client.core().session);
        let op = mutation::Fallocate {
            ino,
            offset,
            length_bytes,
            mode,
        };
        let (ticket, reply) = session.mutate(&handle.credentials, op).await?;
        let MetaReply::Attr(attr) = reply else {
            return Err(ClientError::UnexpectedReply(mutation::Fallocate::NAME));
        };
        let range = offset..offset.saturating_add(length_bytes);
        ticket.changed_content(&attr, |extents| match mode {
            FallocateMode::Allocate | FallocateMode::AllocateKeepSize => {}
            FallocateMode::PunchHole
            | FallocateMode::ZeroRange
            | FallocateMode::ZeroRangeKeepSize => extents.clear(range),
        });
        Ok(())
    }

    /// Returns the offset of the first byte of data at or after `offset`; `None` if no data follows.
    ///
    /// # Errors
    /// As [`File::truncate`].
    pub async fn seek_data(&self, offset: u64) -> Result<Option<u64>, ClientError> {
        let (attr, extents) = self.committed_content().await?;
        let mut after = extents.from(offset);
        let found = after.next().map(|extent| extent.file_offset.max(offset));
        Ok(found.filter(|at| *at < attr.size_bytes))
    }

    /// Returns the offset of the first hole at or after `offset`, where the end of the file counts
    /// as a hole; `None` if `offset` is at or beyond the end.
    ///
    /// # Errors
    /// As [`File::truncate`].
    pub async fn seek_hole(&self, offset: u64) -> Result<Option<u64>, ClientError> {
        let (attr, extents) = self.committed_content().await?;
        if offset >= attr.size_bytes {
            return Ok(None);
        }
        let mut at = offset;
        for extent in extents.from(offset) {
            if extent.file_offset > at {
                break;
            }
            at = extent.file_end();
        }
        Ok(Some(at.min(attr.size_bytes)))
    }

    /// Commits everything in memory, except appends that are refused, and returns attributes and extents.
    async fn committed_content(&self) -> Result<(Attr, Arc<ExtentMap>), ClientError> {
        let handle = &*self.inner;
        self.flush_to_look().await?;
        let session = &handle.client.core().session;
        session.content(&handle.credentials, self.ino()).await
    }

    /// Flushes the file for a caller that needs the namenode's view of it. Appends that are refused
    /// are not part of the file for its readers either. Refused data at an offset is, and where it
    /// belongs the namenode still has older data.
    async fn flush_to_look(&self) -> Result<(), ClientError> {
        let (files, state) = (self.files(), &self.inner.state);
        if state.has_appends() {
            files.flush_if_there_is_room(state).await
        } else {
            files.flush(state, false).await
        }
    }
}

/// Whether an error that data meets when it is written is transient, or concerns other data.
fn is_passing(error: &ClientError) -> bool {
    let is_of_others = matches!(error, ClientError::DataLost { .. });
    // The namenode waits for its operator.
    let is_recovering = matches!(error, ClientError::Fs(FsError::Recovery(_)));
    is_of_others || is_recovering || error.is_transient() && !error.refuses_data()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_writes_back_waits_while_the_namenode_is_in_recovery() {
        let passes = |error: FsError| is_passing(&error.into());
        assert!(passes(FsError::Recovery("blocks are missing".into())));
        assert!(!passes(FsError::ReadOnly) && !passes(FsError::QuotaExceeded));
        assert!(!passes(FsError::NoSpace), "somebody has to make room");
    }
}
