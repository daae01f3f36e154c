//! Sharing data between files.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::{MetaReply, mutation};
use harvestfs_protocol::types::Attr;

use super::File;
use crate::error::ClientError;

impl File {
    /// Shares `length_bytes` bytes (`u64::MAX`: to the end) of this file at `source_offset` with
    /// `destination` at `destination_offset`; copies no data. Returns the destination's attributes.
    /// A range with more extents than the namenode shares in one request is shared in parts: others
    /// may see only the first parts, and an error leaves them in place.
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
        self.begin_sharing(destination).await?;
        let (from, to) = (source_offset, destination_offset);
        self.share_in_parts(from, destination, to, length_bytes, &mut 0)
            .await
    }

    /// As [`File::clone_range`], limited to the part of the range that this file has. Returns the number of bytes
    /// shared: fewer if the file ends earlier, or if an error follows the first part, as in `copy_file_range(2)`.
    ///
    /// # Errors
    /// As [`File::clone_range`], if nothing is shared.
    pub async fn copy_range(
        &self,
        source_offset: u64,
        destination: &File,
        destination_offset: u64,
        length_bytes: u64,
    ) -> Result<u64, ClientError> {
        self.begin_sharing(destination).await?;
        // Appends that are refused only now were part of the file when the caller looked for its end.
        let session = &self.inner.client.core().session;
        let attr = session.attr(&self.inner.credentials, self.ino()).await?;
        let length_bytes = length_bytes.min(attr.size_bytes.saturating_sub(source_offset));
        let (from, to) = (source_offset, destination_offset);
        let mut done = 0;
        let shared = self.share_in_parts(from, destination, to, length_bytes, &mut done);
        match shared.await {
            Ok(_) => {}
            Err(error) if done > 0 => {
                tracing::debug!(ino = %destination.ino(), done, %error, "a copy ends early");
            }
            Err(error) => return Err(error),
        }
        // If others have cut this file off, that was known here before the answer, whose count is too large then. If they
        // do it only now, the caller finds nothing more to copy.
        let end = session.attr(&self.inner.credentials, self.ino()).await;
        let end = end.map_or(u64::MAX, |attr| attr.size_bytes);
        Ok(done.min(end.saturating_sub(source_offset)))
    }

    /// Flushes this file, so that everything written to it is shared, except appends that are refused.
    async fn begin_sharing(&self, destination: &File) -> Result<(), ClientError> {
        if !self.inner.flags.may_read() {
            return Err(ClientError::NotOpenFor("reading"));
        }
        if !destination.inner.flags.write {
            return Err(ClientError::NotOpenFor("writing"));
        }
        self.flush_to_look().await
    }

    /// Shares a range; counts in `done` the bytes that are shared, also before an error.
    async fn share_in_parts(
        &self,
        source_offset: u64,
        destination: &File,
        destination_offset: u64,
        length_bytes: u64,
        done: &mut u64,
    ) -> Result<Attr, ClientError> {
        let _serial = destination.state().serial.lock().await;
        self.files().flush(destination.state(), false).await?;
        let mut left = length_bytes;
        // Length of the next request: halved when the namenode refuses it, doubled when it does not.
        let mut part = left;
        loop {
            let op = mutation::CloneRange {
                source: self.ino(),
                source_offset: source_offset + *done,
                destination: destination.ino(),
                destination_offset: destination_offset + *done,
                length_bytes: part,
            };
            match self.share(destination, op).await {
                Err(ClientError::Fs(FsError::NotSupported(_))) if part > 1 => {
                    let size_bytes = self.attr().await?.size_bytes;
                    left = left.min(size_bytes.saturating_sub(source_offset + *done));
                    part = (part.min(left) / 2).max(1);
                }
                Ok(attr) => {
                    // The namenode cuts the range off at the source's end, which others may have moved
                    // since this client saw it: no more is shared than the destination has.
                    let shared_max = attr.size_bytes.saturating_sub(destination_offset);
                    *done = (*done + part.min(left)).min(shared_max);
                    if part >= left {
                        return Ok(attr);
                    }
                    left -= part;
                    part = part.saturating_mul(2).min(left);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends one request of [`File::share_in_parts`].
    async fn share(
        &self,
        destination: &File,
        op: mutation::CloneRange,
    ) -> Result<Attr, ClientError> {
        let session = &self.inner.client.core().session;
        let credentials = &destination.inner.credentials;
        // The namenode may execute it without answering, or the caller may stop waiting for the answer.
        destination.state().took_over(session.last_relaxed());
        let answer = session.mutate(credentials, op).await;
        destination.state().took_over(session.last_relaxed());
        let (ticket, MetaReply::Attr(attr)) = answer? else {
            return Err(ClientError::UnexpectedReply(mutation::CloneRange::NAME));
        };
        ticket.changed_inode(destination.ino());
        Ok(attr)
    }
}
