//! Answers to the kernel.

use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};
use harvestfs_client::ClientError;
use harvestfs_protocol::limits::NAME_BYTES_MAX;
use harvestfs_protocol::meta::StatFs;
use harvestfs_protocol::types::Attr;

use crate::{convert, errno};

/// Inode numbers are never used again, so that every inode is of the first generation.
pub const GENERATION: Generation = Generation(0);

/// The unit in which `statvfs` counts.
const STATFS_UNIT_BYTES: u64 = 4_096;

/// Answers with an error or with nothing.
pub fn empty(reply: ReplyEmpty, result: Result<(), ClientError>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno::of(&error)),
    }
}

/// Answers with data.
pub fn pieces(reply: ReplyData, result: Result<Vec<Bytes>, ClientError>) {
    match result.as_deref() {
        Ok([]) => reply.data(&[]),
        Ok([piece]) => reply.data(piece),
        Ok(pieces) => reply.data(&pieces.concat()),
        Err(error) => reply.error(errno::of(error)),
    }
}

/// Answers a question for an extended attribute: `size_bytes` 0 asks how large it is.
pub fn xattr(reply: ReplyXattr, size_bytes: u32, result: Result<Vec<u8>, ClientError>) {
    match result {
        // The limits of attributes are far below 4 GiB.
        Ok(value) if size_bytes == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size_bytes as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno::of(&error)),
    }
}

/// Answers that a name does not exist, which the kernel may remember for `ttl`.
pub fn no_entry(reply: ReplyEntry, ttl: Duration) {
    if ttl.is_zero() {
        return reply.error(Errno::ENOENT);
    }
    // Node id 0: no such entry, and the time to live counts.
    let nothing = FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    };
    reply.entry(&ttl, &nothing, GENERATION);
}

/// Answers with attributes.
pub fn attr(reply: ReplyAttr, ttl: Duration, result: Result<Attr, ClientError>) {
    match result {
        Ok(attr) => reply.attr(&ttl, &convert::attributes(&attr)),
        Err(error) => reply.error(errno::of(&error)),
    }
}

/// Answers with an open file.
pub fn opened(reply: ReplyOpen, result: Result<(FileHandle, FopenFlags), ClientError>) {
    match result {
        Ok((handle, flags)) => reply.opened(handle, flags),
        Err(error) => reply.error(errno::of(&error)),
    }
}

/// Answers with how much was written.
pub fn written(reply: ReplyWrite, result: Result<u32, ClientError>) {
    match result {
        Ok(bytes) => reply.written(bytes),
        Err(error) => reply.error(errno::of(&error)),
    }
}

/// Answers where data or a hole was found, or that there is none up to the end.
pub fn offset(reply: ReplyLseek, result: Result<Option<u64>, ClientError>) {
    match result {
        // Files end far below the largest offset.
        Ok(Some(offset)) => reply.offset(offset as i64),
        Ok(None) => reply.error(Errno::ENXIO),
        Err(error) => reply.error(errno::of(&error)),
    }
}

/// Answers with totals of the file system.
pub fn statfs(reply: ReplyStatfs, result: Result<StatFs, ClientError>) {
    match result {
        Ok(totals) => {
            reply.statfs(
                totals.total_bytes / STATFS_UNIT_BYTES,
                totals.free_bytes / STATFS_UNIT_BYTES,
                totals.available_bytes / STATFS_UNIT_BYTES,
                totals.total_inodes,
                totals.free_inodes,
                STATFS_UNIT_BYTES as u32,
                NAME_BYTES_MAX as u32,
                STATFS_UNIT_BYTES as u32,
            );
        }
        Err(error) => reply.error(errno::of(&error)),
    }
}
