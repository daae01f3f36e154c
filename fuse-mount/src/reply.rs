//! Answers to the kernel.

use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use fuser::{
    FileAttr, FileType, Generation, INodeNo, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyXattr,
};
use harvestfs_client::ClientError;

use crate::errno;

/// Inode numbers are never used again, so that every inode is of the first generation.
pub const GENERATION: Generation = Generation(0);

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
        Ok(value) if value.len() > size_bytes as usize => reply.error(fuser::Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno::of(&error)),
    }
}

/// Answers that a name does not exist, which the kernel may remember for `ttl`.
pub fn no_entry(reply: ReplyEntry, ttl: Duration) {
    if ttl.is_zero() {
        return reply.error(fuser::Errno::ENOENT);
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
pub fn attr(reply: ReplyAttr, ttl: Duration, result: Result<FileAttr, ClientError>) {
    match result {
        Ok(attr) => reply.attr(&ttl, &attr),
        Err(error) => reply.error(errno::of(&error)),
    }
}
