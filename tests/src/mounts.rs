//! Removal of mounts after a test.

use std::path::Path;

/// Unmounts the file system at a path, even while programs use it.
pub fn remove(mount: &Path) {
    if rustix::process::geteuid().is_root() {
        let detach = rustix::mount::UnmountFlags::DETACH;
        while rustix::mount::unmount(mount, detach).is_ok() {}
    } else {
        // This fails if nothing is mounted, which is fine.
        let _ = std::process::Command::new("fusermount3")
            .args(["-uzq".as_ref(), mount.as_os_str()])
            .status();
    }
}
