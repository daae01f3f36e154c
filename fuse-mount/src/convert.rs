//! Conversion between our types and those of the kernel's protocol.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    FileAttr, FileType, FopenFlags, INodeNo, LockOwner, OpenAccMode, RenameFlags, TimeOrNow,
};
use harvestfs_client::OpenFlags;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{FallocateMode, RenameMode, SetTime, SetXattrMode};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, FileKind, Timestamp};
use rustix::fs::{FallocateFlags, OFlags, XattrFlags};

/// The block size that `stat` recommends for reads and writes: one packet.
const IO_BYTES: u32 = 1 << 20;
/// `SEEK_DATA` of `lseek(2)`.
pub const SEEK_DATA: i32 = 3;
/// `SEEK_HOLE` of `lseek(2)`.
pub const SEEK_HOLE: i32 = 4;

/// The open flag for `execve(2)`, of `linux/fs.h`.
const FMODE_EXEC: i32 = 1 << 5;

/// The inode of a node id: the kernel uses our numbers.
pub fn inode(node_id: INodeNo) -> InodeId {
    InodeId(node_id.0)
}

/// Attributes in the kernel's format.
pub fn attributes(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino.0),
        size: attr.size_bytes,
        blocks: attr.allocated_bytes.div_ceil(512),
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: UNIX_EPOCH,
        kind: file_type(attr.kind),
        perm: attr.permission_bits(),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: IO_BYTES,
        flags: 0,
    }
}

/// The kernel's file type.
pub fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// The kind of file that `mknod(2)` requests in the type bits of its mode.
pub fn file_kind(mode: u32) -> Result<FileKind, FsError> {
    match rustix::fs::FileType::from_raw_mode(mode) {
        rustix::fs::FileType::RegularFile => Ok(FileKind::Regular),
        rustix::fs::FileType::Fifo => Ok(FileKind::Fifo),
        rustix::fs::FileType::Socket => Ok(FileKind::Socket),
        rustix::fs::FileType::CharacterDevice => Ok(FileKind::CharDevice),
        rustix::fs::FileType::BlockDevice => Ok(FileKind::BlockDevice),
        _ => Err(FsError::InvalidArgument("mknod cannot make this".into())),
    }
}

/// The permission bits of a new file.
pub fn permissions(mode: u32, umask: u32) -> u16 {
    // 12 bits always fit.
    (mode & !umask & 0o7777) as u16
}

/// A file name from the kernel.
pub fn name(bytes: &OsStr) -> Result<Name, FsError> {
    Name::new(bytes.as_bytes())
}

/// The name of an extended attribute from the kernel. POSIX ACLs are not supported; refusing them here saves a round
/// trip each time the kernel or a program asks.
pub fn xattr_name(name: &OsStr) -> Result<Vec<u8>, FsError> {
    let name = name.as_bytes();
    if name.starts_with(b"system.posix_acl_") {
        return Err(FsError::NotSupported("POSIX ACLs".into()));
    }
    Ok(name.to_vec())
}

/// The flags of `setxattr(2)`.
pub fn set_xattr_mode(flags: i32) -> SetXattrMode {
    match XattrFlags::from_bits_retain(flags as u32) {
        XattrFlags::CREATE => SetXattrMode::Create,
        XattrFlags::REPLACE => SetXattrMode::Replace,
        _ => SetXattrMode::Any,
    }
}

/// Names of attributes as `listxattr(2)` returns them: each with its terminator.
pub fn xattr_list(names: &[Vec<u8>]) -> Vec<u8> {
    let with_ends = names.iter().flat_map(|name| name.iter().chain(&[0]));
    with_ends.copied().collect()
}

/// The flags of `renameat2(2)`.
pub fn rename_mode(flags: RenameFlags) -> Result<RenameMode, FsError> {
    if flags.is_empty() {
        Ok(RenameMode::Replace)
    } else if flags == RenameFlags::RENAME_NOREPLACE {
        Ok(RenameMode::NoReplace)
    } else if flags == RenameFlags::RENAME_EXCHANGE {
        Ok(RenameMode::Exchange)
    } else {
        Err(FsError::InvalidArgument("unknown flags of rename".into()))
    }
}

/// A time from the kernel, clamped to the range that we can represent.
pub fn timestamp(time: SystemTime) -> Timestamp {
    let nanoseconds = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos())
            .map(|nanoseconds| -nanoseconds)
            .unwrap_or(i64::MIN),
    };
    Timestamp(nanoseconds)
}

/// A time to be set, from the kernel.
pub fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::SpecificTime(time) => SetTime::To(timestamp(time)),
        TimeOrNow::Now => SetTime::Now,
    }
}

fn system_time(timestamp: Timestamp) -> SystemTime {
    let distance = Duration::from_nanos(timestamp.0.unsigned_abs());
    if timestamp.0 < 0 {
        UNIX_EPOCH - distance
    } else {
        UNIX_EPOCH + distance
    }
}

/// Whether a read fills the kernel's pages. Only reads by a program that bypass them have a lock owner
/// (`fuse_send_read` of Linux).
pub fn is_paged(lock_owner: Option<LockOwner>) -> bool {
    lock_owner.is_none()
}

/// The access for which a file is opened.
pub fn open_flags(flags: fuser::OpenFlags) -> OpenFlags {
    let bits = OFlags::from_bits_retain(flags.0 as u32);
    let write = flags.acc_mode() != OpenAccMode::O_RDONLY;
    let execute = flags.0 & FMODE_EXEC != 0;
    OpenFlags {
        read: !execute && flags.acc_mode() != OpenAccMode::O_WRONLY,
        write,
        execute,
        append: write && bits.contains(OFlags::APPEND),
        truncate: bits.contains(OFlags::TRUNC),
    }
}

/// Whether a program reads and writes bypassing the kernel's pages.
pub fn is_direct(flags: fuser::OpenFlags) -> bool {
    OFlags::from_bits_retain(flags.0.cast_unsigned()).contains(OFlags::DIRECT)
}

/// Whether a program's writes go to the end.
pub fn is_append(flags: fuser::OpenFlags) -> bool {
    OFlags::from_bits_retain(flags.0.cast_unsigned()).contains(OFlags::APPEND)
}

/// Whether a write has to be durable when it returns: its file has `O_SYNC` or `O_DSYNC`, or the write itself
/// `RWF_SYNC` or `RWF_DSYNC`.
pub fn is_synced(flags: fuser::OpenFlags) -> bool {
    // `O_SYNC` consists of the bit of `O_DSYNC` and another one; `rustix`'s `DSYNC` has both, too.
    OFlags::from_bits_retain(flags.0.cast_unsigned()).intersects(OFlags::SYNC)
}

/// How the kernel is to treat an opened file; it keeps the pages that it has if it may.
pub fn fopen_flags(opened_for: OpenFlags, may_keep_pages: bool) -> FopenFlags {
    let cache = if opened_for.append {
        // Not cached: the namenode decides where appends land.
        FopenFlags::FOPEN_DIRECT_IO
    } else if may_keep_pages {
        FopenFlags::FOPEN_KEEP_CACHE
    } else {
        // The kernel drops its pages on behalf of the program that opens the file.
        FopenFlags::empty()
    };
    if opened_for.write {
        cache
    } else {
        // Closing it does not need to wait for anything.
        cache | FopenFlags::FOPEN_NOFLUSH
    }
}

/// The flags of `fallocate(2)`.
pub fn fallocate_mode(mode: i32) -> Result<FallocateMode, FsError> {
    let flags = FallocateFlags::from_bits_retain(mode as u32);
    let keep = FallocateFlags::KEEP_SIZE;
    if flags.is_empty() {
        Ok(FallocateMode::Allocate)
    } else if flags == keep {
        Ok(FallocateMode::AllocateKeepSize)
    } else if flags == FallocateFlags::PUNCH_HOLE | keep {
        Ok(FallocateMode::PunchHole)
    } else if flags == FallocateFlags::ZERO_RANGE {
        Ok(FallocateMode::ZeroRange)
    } else if flags == FallocateFlags::ZERO_RANGE | keep {
        Ok(FallocateMode::ZeroRangeKeepSize)
    } else {
        Err(FsError::NotSupported("this mode of fallocate".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_and_after_1970_survive() {
        for nanoseconds in [
            0,
            1,
            -1,
            1_700_000_000_123_456_789,
            -5_000_000_000,
            i64::MAX,
        ] {
            let time = Timestamp(nanoseconds);
            assert_eq!(timestamp(system_time(time)), time);
        }
        assert_eq!(
            timestamp(UNIX_EPOCH + Duration::from_secs(1 << 40)),
            Timestamp(i64::MAX)
        );
    }

    #[test]
    fn the_umask_takes_away() {
        assert_eq!(permissions(0o100_666, 0o022), 0o644);
        assert_eq!(permissions(0o104_777, 0), 0o4777);
    }

    #[test]
    fn only_what_may_be_written_is_flushed_when_it_is_closed() {
        let opened = |flags: i32, may_keep_pages| {
            fopen_flags(open_flags(fuser::OpenFlags(flags)), may_keep_pages)
        };
        let flags = |flags: OFlags| flags.bits() as i32;
        let keep = FopenFlags::FOPEN_KEEP_CACHE;
        let noflush = FopenFlags::FOPEN_NOFLUSH;
        assert_eq!(opened(flags(OFlags::RDONLY), true), keep | noflush);
        assert_eq!(opened(flags(OFlags::RDONLY), false), noflush);
        assert_eq!(opened(FMODE_EXEC, true), keep | noflush);
        assert_eq!(opened(flags(OFlags::RDWR), true), keep);
        assert_eq!(opened(flags(OFlags::WRONLY), false), FopenFlags::empty());
        assert_eq!(
            opened(flags(OFlags::WRONLY | OFlags::APPEND), true),
            FopenFlags::FOPEN_DIRECT_IO
        );
    }

    #[test]
    fn writes_of_each_kind_of_sync_are_synced() {
        // From `asm-generic/fcntl.h`: `rustix` has no name for it alone.
        const O_DSYNC: u32 = 0o10_000;
        let synced = |flags: u32| is_synced(fuser::OpenFlags(flags.cast_signed()));
        let append = (OFlags::WRONLY | OFlags::APPEND).bits();
        assert!(synced(append | O_DSYNC));
        assert!(synced(append | OFlags::SYNC.bits()));
        assert!(!synced(append));
        assert!(!synced((OFlags::RDWR | OFlags::DIRECT).bits()));
    }

    #[test]
    fn unknown_ways_to_allocate_are_refused() {
        assert_eq!(fallocate_mode(0), Ok(FallocateMode::Allocate));
        assert_eq!(fallocate_mode(3), Ok(FallocateMode::PunchHole));
        assert!(fallocate_mode(0x08).is_err(), "collapse range");
        assert!(fallocate_mode(2).is_err(), "punching needs keep size");
    }
}
