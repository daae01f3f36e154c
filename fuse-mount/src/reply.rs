//! Answers to the kernel: as plain values, and their translation to the kernel's protocol.

use std::ffi::OsStr;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr,
};
use harvestfs_client::ClientError;
use harvestfs_protocol::limits::NAME_BYTES_MAX;
use harvestfs_protocol::meta::StatFs;

use crate::errno;

/// Inode numbers are never reused, so every inode is of the first generation.
const GENERATION: Generation = Generation(0);

/// The unit in which `statvfs` counts.
const STATFS_UNIT_BYTES: u64 = 4_096;

/// The receiver of the answer to a request.
pub trait Reply<T>: Send + 'static {
    /// Sends the answer.
    fn answer(self, answer: Result<T, Errno>);
}

/// The receiver of the answer to a request for the names in a directory.
pub trait NamesReply: Reply<()> {
    /// Adds a name; `next` is the offset at which to continue after it. Returns `true` if the answer is full and the
    /// name was not added.
    fn add(&mut self, ino: u64, next: u64, kind: FileType, name: &OsStr) -> bool;
}

/// The receiver of the answer to a request for the names in a directory, with attributes.
pub trait EntriesReply: Reply<()> {
    /// Adds an entry; `next` is the offset at which to continue after it. Returns `true` if the answer is full and the
    /// entry was not added.
    fn add(&mut self, next: u64, name: &OsStr, entry: &Entry) -> bool;
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The attributes of its inode. Inode number 0 means that there is no such entry, or that its attributes are not
    /// known.
    pub attr: FileAttr,
    /// How long the kernel may cache the attributes.
    pub attr_ttl: Duration,
    /// How long it may cache that the name refers to this inode.
    pub entry_ttl: Duration,
}

impl Entry {
    /// A negative entry, which the kernel may cache for `ttl`.
    pub(crate) fn none(ttl: Duration) -> Self {
        let attr = FileAttr {
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
        Self {
            attr,
            attr_ttl: ttl,
            entry_ttl: ttl,
        }
    }
}

/// Attributes.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    /// The attributes.
    pub attr: FileAttr,
    /// How long the kernel may cache them.
    pub ttl: Duration,
}

/// A file or a directory that is open.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    /// Its handle.
    pub handle: FileHandle,
    /// How the kernel is to treat it.
    pub flags: FopenFlags,
}

/// A file that was created, and is open.
#[derive(Clone, Copy, Debug)]
pub struct Created {
    /// Its entry. One time to live, that of the entry, serves for the attributes too.
    pub entry: Entry,
    /// The open file.
    pub opened: Opened,
}

/// How many bytes were written.
#[derive(Clone, Copy, Debug)]
pub struct Written(pub u32);

/// An offset in a file, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Offset(pub u64);

/// An extended attribute, or the list of attribute names.
#[derive(Clone, Debug)]
pub enum Xattr {
    /// Its size in bytes.
    Size(u32),
    /// Its value.
    Value(Vec<u8>),
}

/// Answers with the result of an operation; an error becomes an errno.
pub(crate) fn send<T>(reply: impl Reply<T>, result: Result<T, ClientError>) {
    reply.answer(result.map_err(|error| errno::of(&error)));
}

/// Answers a request for an extended attribute: a `size_bytes` of 0 asks for its size.
pub(crate) fn xattr(
    reply: impl Reply<Xattr>,
    size_bytes: u32,
    result: Result<Vec<u8>, ClientError>,
) {
    match result {
        // The limits of attributes are far below 4 GiB.
        Ok(value) if size_bytes == 0 => reply.answer(Ok(Xattr::Size(value.len() as u32))),
        Ok(value) if value.len() > size_bytes as usize => reply.answer(Err(Errno::ERANGE)),
        result => send(reply, result.map(Xattr::Value)),
    }
}

/// Answers with the offset at which data or a hole was found, or that there is none up to the end.
pub(crate) fn offset(reply: impl Reply<Offset>, result: Result<Option<u64>, ClientError>) {
    match result {
        Ok(None) => reply.answer(Err(Errno::ENXIO)),
        Ok(Some(offset)) => reply.answer(Ok(Offset(offset))),
        Err(error) => send(reply, Err(error)),
    }
}

impl Reply<()> for ReplyEmpty {
    fn answer(self, answer: Result<(), Errno>) {
        match answer {
            Ok(()) => self.ok(),
            Err(error) => self.error(error),
        }
    }
}

impl Reply<Entry> for ReplyEntry {
    fn answer(self, answer: Result<Entry, Errno>) {
        match answer {
            Ok(Entry {
                attr,
                attr_ttl,
                entry_ttl,
            }) => self.entry_with_ttls(&attr_ttl, &entry_ttl, &attr, GENERATION),
            Err(error) => self.error(error),
        }
    }
}

impl Reply<Attributes> for ReplyAttr {
    fn answer(self, answer: Result<Attributes, Errno>) {
        match answer {
            Ok(Attributes { attr, ttl }) => self.attr(&ttl, &attr),
            Err(error) => self.error(error),
        }
    }
}

impl Reply<Opened> for ReplyOpen {
    fn answer(self, answer: Result<Opened, Errno>) {
        match answer {
            Ok(Opened { handle, flags }) => self.opened(handle, flags),
            Err(error) => self.error(error),
        }
    }
}

impl Reply<Created> for ReplyCreate {
    fn answer(self, answer: Result<Created, Errno>) {
        match answer {
            Ok(Created { entry, opened }) => {
                let ttl = entry.entry_ttl;
                self.created(&ttl, &entry.attr, GENERATION, opened.handle, opened.flags);
            }
            Err(error) => self.error(error),
        }
    }
}

impl Reply<Vec<Bytes>> for ReplyData {
    fn answer(self, answer: Result<Vec<Bytes>, Errno>) {
        match answer.as_deref() {
            Ok([]) => self.data(&[]),
            Ok([piece]) => self.data(piece),
            Ok(pieces) => self.data(&pieces.concat()),
            Err(error) => self.error(*error),
        }
    }
}

impl Reply<Written> for ReplyWrite {
    fn answer(self, answer: Result<Written, Errno>) {
        match answer {
            Ok(Written(bytes)) => self.written(bytes),
            Err(error) => self.error(error),
        }
    }
}

impl Reply<Offset> for ReplyLseek {
    fn answer(self, answer: Result<Offset, Errno>) {
        match answer {
            // No file reaches the largest offset.
            Ok(Offset(offset)) => self.offset(offset as i64),
            Err(error) => self.error(error),
        }
    }
}

impl Reply<Xattr> for ReplyXattr {
    fn answer(self, answer: Result<Xattr, Errno>) {
        match answer {
            Ok(Xattr::Size(bytes)) => self.size(bytes),
            Ok(Xattr::Value(value)) => self.data(&value),
            Err(error) => self.error(error),
        }
    }
}

impl Reply<StatFs> for ReplyStatfs {
    fn answer(self, answer: Result<StatFs, Errno>) {
        match answer {
            Ok(totals) => self.statfs(
                totals.total_bytes / STATFS_UNIT_BYTES,
                totals.free_bytes / STATFS_UNIT_BYTES,
                totals.available_bytes / STATFS_UNIT_BYTES,
                totals.total_inodes,
                totals.free_inodes,
                STATFS_UNIT_BYTES as u32,
                NAME_BYTES_MAX as u32,
                STATFS_UNIT_BYTES as u32,
            ),
            Err(error) => self.error(error),
        }
    }
}

impl Reply<()> for ReplyDirectory {
    fn answer(self, answer: Result<(), Errno>) {
        match answer {
            Ok(()) => self.ok(),
            Err(error) => self.error(error),
        }
    }
}

impl NamesReply for ReplyDirectory {
    fn add(&mut self, ino: u64, next: u64, kind: FileType, name: &OsStr) -> bool {
        ReplyDirectory::add(self, INodeNo(ino), next, kind, name)
    }
}

impl Reply<()> for ReplyDirectoryPlus {
    fn answer(self, answer: Result<(), Errno>) {
        match answer {
            Ok(()) => self.ok(),
            Err(error) => self.error(error),
        }
    }
}

impl EntriesReply for ReplyDirectoryPlus {
    fn add(&mut self, next: u64, name: &OsStr, entry: &Entry) -> bool {
        // One time to live serves for both.
        let Entry {
            attr, entry_ttl, ..
        } = entry;
        ReplyDirectoryPlus::add(self, attr.ino, next, name, entry_ttl, attr, GENERATION)
    }
}
