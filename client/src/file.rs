//! Open files.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::{Bytes, BytesMut};
use harvestfs_protocol::{
    error::FsError,
    ids::InodeId,
    limits::FILE_BYTES_MAX,
    meta::{AttrChanges, FallocateMode, MetaOp, MetaReply},
    request_id::RequestId,
    types::{Attr, Credentials},
};
use tokio::task::JoinSet;

use crate::{
    calls::Touched,
    client::Client,
    error::ClientError,
    extents::ExtentMap,
    file_state::FileState,
    permissions::{EXECUTE, READ, WRITE},
    readahead::{ReadAhead, Reader, UNIT_BYTES, blocks_after},
    reader::read_block,
    sections::{Section, sections},
};

/// Ranges of one read that are fetched at once.
const PARALLEL_READS: usize = 8;

/// What a file is opened for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// To read.
    pub read: bool,
    /// To write.
    pub write: bool,
    /// Every [`File::append`] goes to the end, whoever else appends.
    pub append: bool,
    /// Cut to length 0 first.
    pub truncate: bool,
    /// To run it as a program, and so to read it: the execute permission is enough.
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

    /// Whether data may be read.
    pub(crate) fn may_read(self) -> bool {
        self.read || self.execute
    }

    /// What the caller must be permitted, in the bits of a mode.
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
    /// Losses of the file's data that this handle need not tell any more.
    losses_told: AtomicU64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.state.handle_closed();
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
    /// A handle of a file that the namenode holds for this session.
    pub(crate) fn new(
        client: &Client,
        ino: InodeId,
        credentials: &Credentials,
        flags: OpenFlags,
    ) -> Self {
        let state = client.core().open_file(ino);
        Self {
            inner: Arc::new(Handle {
                client: client.clone(),
                losses_told: AtomicU64::new(state.losses().0),
                state,
                credentials: credentials.clone(),
                flags,
                read_ahead: ReadAhead::default(),
            }),
        }
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

    /// Attributes, with what this client has written and not yet committed.
    ///
    /// # Errors
    /// Whatever keeps the namenode from answering.
    pub async fn attr(&self) -> Result<Attr, ClientError> {
        let handle = &*self.inner;
        handle.client.getattr(&handle.credentials, self.ino()).await
    }

    /// Up to `len` bytes at `offset`, in pieces as they are in memory; fewer only at the end.
    ///
    /// # Errors
    /// [`ClientError::AllReplicasBusy`], [`ClientError::NoReplica`], and whatever keeps the namenode
    /// from answering.
    pub async fn read_pieces(&self, offset: u64, len: usize) -> Result<Vec<Bytes>, ClientError> {
        let handle = &*self.inner;
        if !handle.flags.may_read() {
            return Err(ClientError::NotOpenFor("reading"));
        }
        if handle.state.has_appends() {
            // Only the namenode knows where they are.
            handle.state.flush(false).await?;
        }
        let core = handle.client.core();
        // The memory first: what leaves it meanwhile is found in the extents.
        let wanted = offset..offset.saturating_add(len as u64);
        let (overlay, memory_end) = handle.state.overlay(wanted.clone());
        let (attr, extents) = core.content(&handle.credentials, self.ino()).await?;
        let size_bytes = attr.size_bytes.max(memory_end);
        let range = wanted.start..wanted.end.min(size_bytes);
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let reader = Reader {
            core,
            credentials: &handle.credentials,
            extents: &extents,
            size_bytes,
        };
        let sections = sections(&range, overlay, &extents);
        if needs_blocks(&sections) {
            handle.read_ahead.note(&reader, &range);
        }
        self.fetch(&reader, sections).await
    }

    /// As [`File::read_pieces`], in one piece.
    ///
    /// # Errors
    /// As [`File::read_pieces`].
    pub async fn read(&self, offset: u64, len: usize) -> Result<Bytes, ClientError> {
        let pieces = self.read_pieces(offset, len).await?;
        if let [only] = &pieces[..] {
            return Ok(only.clone());
        }
        let mut whole = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
        for piece in &pieces {
            whole.extend_from_slice(piece);
        }
        Ok(whole.freeze())
    }

    /// As [`File::read_pieces`] if all of it is in memory, without waiting.
    #[must_use]
    pub fn try_read_pieces(&self, offset: u64, len: usize) -> Option<Vec<Bytes>> {
        let handle = &*self.inner;
        if !handle.flags.may_read() || handle.state.has_appends() {
            return None;
        }
        let core = handle.client.core();
        let wanted = offset..offset.saturating_add(len as u64);
        let (overlay, memory_end) = handle.state.overlay(wanted.clone());
        let (attr, extents) = core.session.valid_cache()?.content(self.ino())?;
        let size_bytes = attr.size_bytes.max(memory_end);
        let range = wanted.start..wanted.end.min(size_bytes);
        if range.is_empty() {
            return Some(Vec::new());
        }
        let sections = sections(&range, overlay, &extents);
        let mut pieces = Vec::with_capacity(sections.len());
        let from_blocks = needs_blocks(&sections);
        for section in sections {
            match section {
                Section::Memory(data) => pieces.push(data),
                Section::Block { block, range } => {
                    let mut at = range.start;
                    while at < range.end {
                        let piece = handle.read_ahead.ready(block, &(at..range.end))?;
                        at += piece.len() as u64;
                        pieces.push(piece);
                    }
                }
            }
        }
        if from_blocks {
            let reader = Reader {
                core,
                credentials: &handle.credentials,
                extents: &extents,
                size_bytes,
            };
            handle.read_ahead.note(&reader, &range);
        }
        Some(pieces)
    }

    /// Brings the sections of a read together.
    async fn fetch(
        &self,
        reader: &Reader<'_>,
        sections: Vec<Section>,
    ) -> Result<Vec<Bytes>, ClientError> {
        let mut pieces: Vec<Bytes> = Vec::with_capacity(sections.len());
        // Where in `pieces` something is missing.
        let mut missing = Vec::new();
        for section in sections {
            let (block, range) = match section {
                Section::Memory(data) => {
                    pieces.push(data);
                    continue;
                }
                Section::Block { block, range } => (block, range),
            };
            let mut at = range.start;
            while at < range.end {
                let rest = at..range.end;
                if let Some(piece) = self.inner.read_ahead.arrived(block, &rest).await {
                    at += piece.len() as u64;
                    pieces.push(piece);
                    continue;
                }
                let end = (at / UNIT_BYTES + 1) * UNIT_BYTES;
                let part = at..end.min(range.end);
                at = part.end;
                missing.push((pieces.len(), block, part));
                pieces.push(Bytes::new());
            }
        }
        let others = |extents: &ExtentMap| blocks_after(extents, 0);
        if let [(index, block, range)] = &missing[..] {
            let others = || others(reader.extents);
            let data = read_block(
                reader.core,
                reader.credentials,
                *block,
                range.clone(),
                others,
            );
            pieces[*index] = data.await?;
            return Ok(pieces);
        }
        let mut missing = missing.into_iter();
        let mut reads = JoinSet::new();
        loop {
            while reads.len() < PARALLEL_READS
                && let Some((index, block, range)) = missing.next()
            {
                let (core, credentials) = (reader.core.clone(), reader.credentials.clone());
                let extents = reader.extents.clone();
                reads.spawn(RequestId::current().scope(async move {
                    let others = || others(&extents);
                    let data = read_block(&core, &credentials, block, range, others).await;
                    (index, data)
                }));
            }
            match reads.join_next().await {
                None => return Ok(pieces),
                Some(Ok((index, data))) => pieces[index] = data?,
                // Tasks of a runtime that shuts down.
                Some(Err(_)) => return Err(ClientError::Closed),
            }
        }
    }

    /// Writes. Waits only while too much written data is in memory.
    ///
    /// # Errors
    /// [`ClientError::TooMuchDirtyData`]; [`FsError::FileTooLarge`]. That the data cannot be stored
    /// shows when it is flushed.
    pub async fn write(&self, offset: u64, data: Bytes) -> Result<(), ClientError> {
        match self.try_write(offset, data) {
            Ok(result) => result,
            Err(data) => {
                let handle = &*self.inner;
                let core = handle.client.core();
                if handle.state.has_appends() {
                    handle.state.flush(false).await?;
                }
                core.wait_for_room(data.len()).await?;
                core.find_rules(&handle.state).await?;
                handle.state.write(&handle.credentials, offset, data);
                Ok(())
            }
        }
    }

    /// As [`File::write`] if it need not wait; else gives the data back.
    ///
    /// # Errors
    /// The data.
    pub fn try_write(&self, offset: u64, data: Bytes) -> Result<Result<(), ClientError>, Bytes> {
        let handle = &*self.inner;
        if !handle.flags.write {
            return Ok(Err(ClientError::NotOpenFor("writing")));
        }
        let end = offset.checked_add(data.len() as u64);
        if end.is_none_or(|end| end > FILE_BYTES_MAX) {
            return Ok(Err(FsError::FileTooLarge.into()));
        }
        let dirty = &handle.client.core().dirty;
        if !dirty.has_room(data.len()) || handle.state.has_appends() {
            return Err(data);
        }
        // Much data is sent before it is flushed, for which the file's rules have to be known.
        let much = data.len() as u64 + handle.state.held_bytes() >= UNIT_BYTES;
        if (much || dirty.is_tight()) && handle.state.rules().is_none() {
            return Err(data);
        }
        handle.state.write(&handle.credentials, offset, data);
        Ok(Ok(()))
    }

    /// Appends, for a file opened with `append`. One call's data stays together, whoever else
    /// appends, if it is no longer than a block.
    ///
    /// # Errors
    /// As [`File::write`].
    pub async fn append(&self, data: Bytes) -> Result<(), ClientError> {
        let handle = &*self.inner;
        if !handle.flags.append {
            return Err(ClientError::NotOpenFor("appending"));
        }
        let core = handle.client.core();
        if handle.state.has_data() && !handle.state.has_appends() {
            // What was written at offsets may move the end.
            handle.state.flush(false).await?;
        }
        if !core.dirty.has_room(data.len()) {
            core.wait_for_room(data.len()).await?;
        }
        core.find_rules(&handle.state).await?;
        handle.state.append(&handle.credentials, data);
        Ok(())
    }

    /// Makes what was written visible to every later `open` (what `close` promises). For a small new
    /// file that may be before it is committed: the namenode asks for it when somebody looks.
    ///
    /// # Errors
    /// What kept the data from being stored; it stays in memory and is tried again by the next flush.
    /// [`ClientError::DataLost`] once, if data had to be given up since.
    pub async fn flush(&self) -> Result<(), ClientError> {
        let state = &self.inner.state;
        if state.has_data() {
            self.inner.client.core().find_rules(state).await?;
            if state.close_early() {
                return self.tell_losses(Ok(()));
            }
        }
        let flushed = state.flush(false).await;
        self.tell_losses(flushed)
    }

    /// Makes what was written durable (what `fsync` promises): on stable storage of every datanode
    /// of its blocks and in the journal.
    ///
    /// # Errors
    /// As [`File::flush`].
    pub async fn sync(&self) -> Result<(), ClientError> {
        let synced = self.inner.state.flush(true).await;
        self.tell_losses(synced)
    }

    /// Flushes and closes. Other clones of the handle keep the file open.
    ///
    /// # Errors
    /// As [`File::flush`].
    pub async fn close(self) -> Result<(), ClientError> {
        self.flush().await
    }

    fn tell_losses(&self, result: Result<(), ClientError>) -> Result<(), ClientError> {
        let (losses, reason) = self.inner.state.losses();
        let told = self.inner.losses_told.swap(losses, Ordering::AcqRel);
        match reason {
            Some(reason) if losses > told => Err(reason),
            _ => result,
        }
    }

    /// Sets the length. Returns the attributes.
    ///
    /// # Errors
    /// What keeps written data from being stored, or the namenode from answering.
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
        handle.state.flush(false).await?;
        let (ino, session) = (self.ino(), &handle.client.core().session);
        let op = MetaOp::Fallocate {
            ino,
            offset,
            length_bytes,
            mode,
        };
        let touched = Touched {
            inodes: &[ino],
            entries: &[],
        };
        let (ticket, reply) = session.mutate(&handle.credentials, op, touched).await?;
        let MetaReply::Attr(attr) = reply else {
            return Err(ClientError::UnexpectedReply("Fallocate"));
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

    /// The first byte of data at or after `offset`; none: no data follows.
    ///
    /// # Errors
    /// As [`File::truncate`].
    pub async fn seek_data(&self, offset: u64) -> Result<Option<u64>, ClientError> {
        let (attr, extents) = self.committed_content().await?;
        let mut after = extents.from(offset);
        let found = after.next().map(|extent| extent.file_offset.max(offset));
        Ok(found.filter(|at| *at < attr.size_bytes))
    }

    /// The first byte of a hole at or after `offset`, the end of the file being one; none: `offset`
    /// is at or beyond the end.
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

    /// Shares `length_bytes` bytes (`u64::MAX`: to the end) of this file at `source_offset` with
    /// `destination` at `destination_offset`; copies no data. Returns the destination's attributes.
    ///
    /// # Errors
    /// As [`File::truncate`]; [`FsError::InvalidArgument`] when ranges of one file overlap.
    pub async fn clone_range(
        &self,
        source_offset: u64,
        destination: &File,
        destination_offset: u64,
        length_bytes: u64,
    ) -> Result<Attr, ClientError> {
        let handle = &*self.inner;
        if !handle.flags.may_read() {
            return Err(ClientError::NotOpenFor("reading"));
        }
        if !destination.inner.flags.write {
            return Err(ClientError::NotOpenFor("writing"));
        }
        handle.state.flush(false).await?;
        let _serial = destination.state().serial.lock().await;
        destination.state().flush(false).await?;
        let ino = destination.ino();
        let op = MetaOp::CloneRange {
            source: self.ino(),
            source_offset,
            destination: ino,
            destination_offset,
            length_bytes,
        };
        let session = &handle.client.core().session;
        let touched = Touched {
            inodes: &[ino],
            entries: &[],
        };
        let credentials = &destination.inner.credentials;
        let (ticket, reply) = session.mutate(credentials, op, touched).await?;
        let MetaReply::Attr(attr) = reply else {
            return Err(ClientError::UnexpectedReply("CloneRange"));
        };
        ticket.changed_inode(ino);
        Ok(attr)
    }

    /// Attributes and extents after everything in memory was committed.
    async fn committed_content(&self) -> Result<(Attr, Arc<ExtentMap>), ClientError> {
        let handle = &*self.inner;
        handle.state.flush(false).await?;
        let core = handle.client.core();
        core.content(&handle.credentials, self.ino()).await
    }
}

fn needs_blocks(sections: &[Section]) -> bool {
    let from_block = |section: &Section| matches!(section, Section::Block { .. });
    sections.iter().any(from_block)
}
