//! Mount points that are gone after the test.

use std::path::Path;

/// Unmounts the file system that is mounted there, also while programs use it.
pub fn remove(mount: &Path) {
    if rustix::process::geteuid().is_root() {
        let detach = rustix::mount::UnmountFlags::DETACH;
        while rustix::mount::unmount(mount, detach).is_ok() {}
    } else {
        // Fails when nothing is mounted, which is the aim.
        let _ = std::process::Command::new("fusermount3")
            .args(["-uzq".as_ref(), mount.as_os_str()])
            .status();
    }
}
