//! Permissions, as in POSIX and Linux.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;

use super::inode::{GROUP_EXECUTE, Inode, SET_GROUP_ID, SET_USER_ID, STICKY};

pub(super) const READ: u8 = 4;
pub(super) const WRITE: u8 = 2;
pub(super) const EXECUTE: u8 = 1;

pub(super) fn is_root(credentials: &Credentials) -> bool {
    credentials.uid == 0
}

pub(super) fn in_group(credentials: &Credentials, gid: u32) -> bool {
    credentials.gid == gid || credentials.groups.contains(&gid)
}

/// Whether the caller has the owner's rights.
pub(super) fn owns(credentials: &Credentials, inode: &Inode) -> bool {
    is_root(credentials) || credentials.uid == inode.uid
}

/// Checks the mode bits for everything in `mask`; no caller may write an inode in a snapshot.
pub(super) fn check(credentials: &Credentials, inode: &Inode, mask: u8) -> Result<(), FsError> {
    if mask & WRITE != 0 && inode.is_frozen() {
        return Err(FsError::ReadOnly);
    }
    let granted = if is_root(credentials) {
        // Root may do everything, but may execute only files that some user may execute.
        if inode.is_directory() || inode.mode & 0o111 != 0 {
            READ | WRITE | EXECUTE
        } else {
            READ | WRITE
        }
    } else {
        let shift = if credentials.uid == inode.uid {
            6
        } else if in_group(credentials, inode.gid) {
            3
        } else {
            0
        };
        // Three bits.
        (inode.mode >> shift & 7) as u8
    };
    if mask & !granted == 0 {
        Ok(())
    } else {
        Err(FsError::PermissionDenied)
    }
}

/// Checks that the caller may remove `victim`'s name from a directory: in a sticky one, only the
/// owner of either may.
pub(super) fn check_removal(
    credentials: &Credentials,
    directory: &Inode,
    victim: &Inode,
) -> Result<(), FsError> {
    check(credentials, directory, WRITE | EXECUTE)?;
    if directory.mode & STICKY != 0 && !owns(credentials, directory) && !owns(credentials, victim) {
        return Err(FsError::NotPermitted);
    }
    Ok(())
}

/// Drops the privileges that running the file would grant (set-id bits and capabilities), as its owner or
/// content changes.
pub(super) fn drop_privileges(credentials: &Credentials, inode: &mut Inode) {
    assert!(
        !inode.is_frozen(),
        "a file of a snapshot changes: {inode:?}"
    );
    inode.mode &= !SET_USER_ID;
    // Without the right to execute, the bit means something else (mandatory locking).
    let executable = inode.mode & GROUP_EXECUTE != 0;
    if executable || !(is_root(credentials) || in_group(credentials, inode.gid)) {
        inode.mode &= !SET_GROUP_ID;
    }
    inode.drop_capabilities();
}

/// Drops the privileges of a file whose content changes; if root changes it, only its capabilities.
pub(super) fn content_written(credentials: &Credentials, inode: &mut Inode) {
    assert!(
        !inode.is_frozen(),
        "the content of a snapshot changes: {inode:?}"
    );
    if is_root(credentials) {
        inode.drop_capabilities();
    } else {
        drop_privileges(credentials, inode);
    }
}
