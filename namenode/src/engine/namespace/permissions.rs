//! Permissions, as POSIX and Linux have them.

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

/// Whether the caller may do what only the owner may.
pub(super) fn owns(credentials: &Credentials, inode: &Inode) -> bool {
    is_root(credentials) || credentials.uid == inode.uid
}

/// Checks the mode bits for everything in `mask`; no caller may write what is in a snapshot.
pub(super) fn check(credentials: &Credentials, inode: &Inode, mask: u8) -> Result<(), FsError> {
    if mask & WRITE != 0 && inode.is_frozen() {
        return Err(FsError::ReadOnly);
    }
    let granted = if is_root(credentials) {
        // Root may do all, but runs only what some user may run.
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

/// Checks that the caller may take `victim`'s name out of a directory: in a sticky one, only the
/// owner of either.
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

/// What running the file would give to the users that run it goes away when the file changes hands or
/// content.
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

/// The content of a file changes: unless root does it, the file loses its privileges.
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
