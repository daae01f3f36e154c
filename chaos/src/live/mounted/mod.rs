//! Programs on real mounts. They run in processes of their own: the harness has nothing open on mounts, and a
//! mount that does not answer keeps only them waiting.
//!
//! - `border`: what crosses between the harness and such a process;
//! - `handle`: the harness's side;
//! - `work`: the process's side;
//! - `files`: random operations on files, checked against `model`;
//! - `verify`: the comparison at the end.

mod border;
mod files;
mod handle;
mod model;
mod state;
mod verify;
mod work;

use std::path::Path;

pub(crate) use border::{Order, Task};
pub(crate) use handle::{Outcome, Programs};
pub(crate) use state::Doubt;
pub use work::work_on_mounts;

/// Name of a mount, of its mount point, and of the directory that its program works in.
pub(crate) fn name(mount: usize) -> String {
    format!("mount-{}", mount + 1)
}

/// Ends what is mounted there, also while programs use it.
pub(crate) fn unmount(at: &Path) {
    if rustix::process::geteuid().is_root() {
        let detach = rustix::mount::UnmountFlags::DETACH;
        while rustix::mount::unmount(at, detach).is_ok() {}
    } else {
        // Fails when nothing is mounted, which is the aim.
        let _ = std::process::Command::new("fusermount3")
            .args(["-uzq".as_ref(), at.as_os_str()])
            .status();
    }
}
