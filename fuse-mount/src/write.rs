//! A write by the kernel.

use std::sync::Arc;

use fuser::WriteFlags;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::FallocateMode;

use crate::convert;
use crate::inner::OpenFile;
use crate::metrics::Operation;
use crate::pages::CachedWrite;
use crate::reply::{self, Reply, Written};
use crate::serve::{Adapter, Header};

/// What the kernel wants written.
pub struct Write {
    /// The file.
    pub ino: InodeId,
    /// Where it begins.
    pub offset: u64,
    /// Why the kernel writes.
    pub flags: WriteFlags,
    /// Past its pages: a program opened the file with `O_DIRECT`.
    pub direct: bool,
}

impl Adapter {
    /// Writes to an open file.
    pub(crate) fn serve_write(
        &self,
        header: Header,
        open: Arc<OpenFile>,
        write: Write,
        data: &[u8],
        reply: impl Reply<Written>,
    ) {
        let Write {
            ino,
            offset,
            flags,
            direct,
        } = write;
        // At most the size of a request, which was negotiated with the kernel.
        let written = data.len() as u32;
        let observed = self.begin(Operation::Write);
        self.inner.metrics.written.inc_by(written.into());
        let mut data = self.write_buffers.copy(data);
        // Pages that are written back have their place, however the file was opened.
        let writes_back = flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let append = open.append && !writes_back;
        // So is what is opened for appending.
        let cached = if append || direct {
            CachedWrite::dropped_from(offset)
        } else {
            CachedWrite::Kept
        };
        let thread = header.pid;
        let kill_privileges = flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        if !append && !kill_privileges {
            match open.file.try_write(offset, data) {
                Ok(result) => {
                    let end = offset.saturating_add(written.into());
                    if writes_back
                        || result.is_err()
                        || self.inner.shared.try_wrote(ino, end, cached, thread)
                    {
                        return reply::send(reply, result.map(|()| Written(written)));
                    }
                    let inner = self.inner.clone();
                    return self.go_on(observed, async move {
                        let result = result.map(|()| written);
                        inner
                            .answer_written(reply, (ino, offset), result, cached, thread)
                            .await;
                    });
                }
                Err(given_back) => data = given_back,
            }
        }
        let (inner, caller) = (self.inner.clone(), self.caller(header));
        self.go_on(observed, async move {
            let written_all = inner.write(&open.file, offset, data, append, kill_privileges);
            let result = caller.unless_killed(written_all).await.map(|()| written);
            if writes_back {
                reply::send(reply, result.map(Written));
            } else {
                inner
                    .answer_written(reply, (ino, offset), result, cached, thread)
                    .await;
            }
        });
    }

    /// Allocates, or cuts out, a range of an open file; `range` is where it begins and how long it is.
    pub(crate) fn serve_fallocate(
        &self,
        header: Header,
        open: Arc<OpenFile>,
        ino: InodeId,
        range: (u64, u64),
        mode: i32,
        reply: impl Reply<()>,
    ) {
        let (inner, thread) = (self.inner.clone(), header.pid);
        let (offset, length) = range;
        self.empty(header, Operation::Fallocate, reply, async move {
            let mode = convert::fallocate_mode(mode)?;
            open.file.fallocate(offset, length, mode).await?;
            if matches!(mode, FallocateMode::Allocate | FallocateMode::ZeroRange) {
                let end = offset.saturating_add(length);
                let cached = CachedWrite::Kept;
                inner.shared.wrote(ino, end, cached, thread).await;
            }
            Ok(())
        });
    }
}
