//! A write by the kernel.

use std::sync::Arc;

use fuser::{ReplyWrite, Request, WriteFlags};
use harvestfs_protocol::ids::InodeId;

use crate::inner::OpenFile;
use crate::metrics::Operation;
use crate::serve::Adapter;

/// What the kernel wants written.
pub struct Write {
    /// The file.
    pub ino: InodeId,
    /// Where it begins.
    pub offset: u64,
    /// Why the kernel writes.
    pub flags: WriteFlags,
}

impl Adapter {
    /// Writes to an open file.
    pub fn serve_write(
        &self,
        request: &Request,
        open: Arc<OpenFile>,
        write: Write,
        data: &[u8],
        reply: ReplyWrite,
    ) {
        let Write { ino, offset, flags } = write;
        // At most the size of a request, which was negotiated with the kernel.
        let written = data.len() as u32;
        let observed = self.begin(Operation::Write);
        self.inner.metrics.written.inc_by(written.into());
        let mut data = self.write_buffers.copy(data);
        // Pages that are written back have their place, however the file was opened.
        let append = open.append && !flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let kill_privileges = flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        if !append && !kill_privileges {
            match open.file.try_write(offset, data) {
                Ok(result) => {
                    let result = result.map(|()| written);
                    return self.inner.answer_written(reply, ino, offset, result);
                }
                Err(given_back) => data = given_back,
            }
        }
        let (inner, caller) = (self.inner.clone(), self.caller(request));
        self.go_on(observed, async move {
            let written_all = inner.write(&open.file, offset, data, append, kill_privileges);
            let result = caller.unless_killed(written_all).await;
            inner.answer_written(reply, ino, offset, result.map(|()| written));
        });
    }
}
