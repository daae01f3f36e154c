//! Permission checks on cached attributes, identical to those of the namenode. Pure.

use harvestfs_protocol::types::{Attr, Credentials, FileKind};

/// Permission to read.
pub(crate) const READ: u8 = 4;
/// Permission to write.
pub(crate) const WRITE: u8 = 2;
/// Permission to execute a file or search a directory.
pub(crate) const EXECUTE: u8 = 1;

/// Whether the mode bits permit everything in `mask`.
pub(crate) fn permits(attr: &Attr, credentials: &Credentials, mask: u8) -> bool {
    if mask & WRITE != 0 && attr.is_frozen() {
        return false;
    }
    if credentials.uid == 0 {
        // Root may execute a file that at least one user may execute.
        let executable = attr.kind == FileKind::Directory || attr.mode & 0o111 != 0;
        return mask & EXECUTE == 0 || executable;
    }
    let shift = if credentials.uid == attr.uid {
        6
    } else if credentials.gid == attr.gid || credentials.groups.contains(&attr.gid) {
        3
    } else {
        0
    };
    let granted = (attr.mode >> shift) & 7;
    u16::from(mask) & !granted == 0
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::InodeId;
    use harvestfs_protocol::types::{MODE_FROZEN, Timestamp};

    use super::*;

    fn attr(mode: u16) -> Attr {
        Attr {
            ino: InodeId(2),
            kind: FileKind::Regular,
            mode,
            nlink: 1,
            uid: 10,
            gid: 20,
            rdev: 0,
            size_bytes: 0,
            allocated_bytes: 0,
            atime: Timestamp(0),
            mtime: Timestamp(0),
            ctime: Timestamp(0),
            content_version: 0,
        }
    }

    #[test]
    fn the_first_class_that_fits_decides() {
        let user = |uid, gid, groups: &[u32]| Credentials {
            uid,
            gid,
            groups: groups.to_vec(),
        };
        assert!(permits(&attr(0o600), &user(10, 1, &[]), READ | WRITE));
        assert!(!permits(&attr(0o077), &user(10, 20, &[]), READ));
        assert!(permits(&attr(0o040), &user(11, 20, &[]), READ));
        assert!(permits(&attr(0o040), &user(11, 1, &[5, 20]), READ));
        assert!(!permits(&attr(0o604), &user(11, 20, &[]), READ));
        assert!(permits(&attr(0o604), &user(11, 1, &[]), READ));
        assert!(permits(&attr(0), &user(0, 0, &[]), READ | WRITE));
        assert!(!permits(&attr(0o666), &user(0, 0, &[]), EXECUTE));
        assert!(permits(&attr(MODE_FROZEN), &user(0, 0, &[]), READ));
        assert!(!permits(&attr(MODE_FROZEN), &user(0, 0, &[]), WRITE));
    }
}
