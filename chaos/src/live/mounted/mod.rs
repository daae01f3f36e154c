//! Programs on real mounts. They run in processes of their own, so that the harness has nothing open on mounts and a
//! mount that does not answer blocks only them.
//!
//! - `border`: the protocol between the harness and such a process;
//! - `handle`: the side of the harness;
//! - `work`: the side of the process;
//! - `job`: what all programs have in common;
//! - `files`: random operations on files, checked against `model`;
//! - `log`, `sqlite`, `git`: an append-only log, databases, a repository;
//! - `verify`: the comparison at the end.

mod border;
mod files;
mod git;
mod handle;
mod job;
mod log;
mod model;
mod sqlite;
mod state;
mod verify;
mod work;

use std::path::Path;
use std::process::Command;

pub(crate) use border::{Order, Task};
pub(crate) use handle::{Outcome, Programs};
pub(crate) use state::Doubt;
pub use work::work_on_mounts;

use super::LiveError;
use super::scenario::MountSpec;

/// The name of a mount, of its mount point, and of the directory in which its program works.
pub(crate) fn name(mount: usize) -> String {
    format!("mount-{}", mount + 1)
}

/// Fails if a program that the scenario needs is not installed.
pub(crate) fn check_needs(spec: &MountSpec) -> Result<(), LiveError> {
    let kinds = spec.programs.iter().filter(|_| spec.count > 0);
    for (kind, needed) in kinds.filter_map(|kind| Some((kind.name(), kind.needs()?))) {
        if let Err(error) = job::output(Command::new(needed).arg("--version")) {
            return Err(LiveError::Machine(format!(
                "programs of kind `{kind}` need `{needed}`: {error}"
            )));
        }
    }
    Ok(())
}

/// Unmounts whatever is mounted there, even while programs use it.
pub(crate) fn unmount(at: &Path) {
    if rustix::process::geteuid().is_root() {
        let detach = rustix::mount::UnmountFlags::DETACH;
        while rustix::mount::unmount(at, detach).is_ok() {}
    } else {
        // This fails if nothing is mounted, which is the aim.
        let _ = Command::new("fusermount3")
            .args(["-uzq".as_ref(), at.as_os_str()])
            .status();
    }
}
