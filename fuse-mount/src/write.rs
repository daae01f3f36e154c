//! Writes by the kernel.

use std::sync::Arc;

use fuser::WriteFlags;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::FallocateMode;

use crate::convert;
use crate::inner::{self, OpenFile, WriteKind};
use crate::metrics::Operation;
use crate::pages::CachedWrite;
use crate::reply::{self, Reply, Written};
use crate::serve::{Adapter, Header};

/// A write request of the kernel.
pub struct Write {
    /// The file.
    pub ino: InodeId,
    /// Where it begins.
    pub offset: u64,
    /// The kernel's flags for the write.
    pub flags: WriteFlags,
    /// Whether the data goes to the end, according to the descriptor's current flags: it may have been opened
    /// otherwise.
    pub append: bool,
    /// Whether the write bypasses the kernel's pages: a program opened the file with `O_DIRECT`.
    pub direct: bool,
    /// Whether it has to be durable when it returns, by `O_SYNC` or `O_DSYNC` of its file or by its own flags.
    pub synced: bool,
}

impl Write {
    /// Whether the kernel writes back its pages. Such data has a fixed offset, however the file was opened.
    fn writes_back(&self) -> bool {
        self.flags.contains(WriteFlags::FUSE_WRITE_CACHE)
    }

    /// Whether the write bypasses the kernel's pages, as it does if the file was opened for appending.
    fn is_past_pages(&self, opened_to_append: bool) -> bool {
        (opened_to_append || self.direct) && !self.writes_back()
    }
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
        let (writes_back, past_pages) = (write.writes_back(), write.is_past_pages(open.append));
        let Write {
            ino, offset, flags, ..
        } = write;
        // At most the size of a request, which was negotiated with the kernel.
        let written = data.len() as u32;
        let observed = self.begin(Operation::Write);
        self.inner.metrics.written.inc_by(written.into());
        let mut data = self.write_buffers.copy(data);
        let kind = match (writes_back, open.append && write.append) {
            (true, _) => WriteKind::Back(offset),
            (false, true) => WriteKind::Append,
            // If the file was not opened for appending, the data is in the kernel's pages, at the end as the kernel
            // knows it.
            (false, false) => WriteKind::At(offset),
        };
        // After all other writes the kernel requests a sync itself. It does not if the file bypasses its pages, as for
        // appending, nor after an asynchronous write with `O_DIRECT`; a synchronous one cannot be distinguished from
        // that, and after a sync here, a second one has nothing left to do.
        let synced = write.synced && past_pages;
        let cached = if past_pages {
            CachedWrite::dropped_from(offset)
        } else {
            CachedWrite::Kept
        };
        let thread = header.pid;
        // The kernel sets this flag whenever the writer is not root.
        let kill_privileges = flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID)
            && inner::may_have_privileges(&open.file);
        if kind != WriteKind::Append && !kill_privileges && !synced {
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
            let file = &open.file;
            let written_all = async {
                inner.write(file, kind, data, kill_privileges).await?;
                if synced {
                    file.sync().await?;
                }
                Ok(())
            };
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

    /// Allocates a range of an open file, or punches a hole; `range` is the offset and the length.
    pub(crate) fn serve_fallocate(
        &self,
        header: Header,
        open: Arc<OpenFile>,
        ino: InodeId,
        range: (u64, u64),
        mode: i32,
        reply: impl Reply<()>,
    ) {
        let (inner, caller) = (self.inner.clone(), self.caller(header));
        let thread = header.pid;
        let (offset, length) = range;
        self.serve(Operation::Fallocate, async move {
            let allocated = async {
                let mode = convert::fallocate_mode(mode)?;
                open.file.fallocate(offset, length, mode).await?;
                Ok(mode)
            };
            let allocated = caller.unless_killed(allocated).await;
            // Even if the caller is killed while this waits: the file has been changed.
            if let Ok(FallocateMode::Allocate | FallocateMode::ZeroRange) = allocated {
                let end = offset.saturating_add(length);
                let cached = CachedWrite::Kept;
                inner.shared.wrote(ino, end, cached, thread).await;
            }
            reply::send(reply, allocated.map(|_| ()));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_kernel_has_no_pages_of_is_past_them() {
        let write = |flags, direct| Write {
            ino: InodeId(7),
            offset: 0,
            flags,
            append: false,
            direct,
            synced: false,
        };
        let (none, cache) = (WriteFlags::empty(), WriteFlags::FUSE_WRITE_CACHE);
        assert!(write(none, false).is_past_pages(true));
        assert!(write(none, true).is_past_pages(false));
        assert!(!write(none, false).is_past_pages(false));
        // Write-back of a memory mapping.
        assert!(!write(cache, false).is_past_pages(true));
        assert!(!write(cache, true).is_past_pages(false));
    }
}
