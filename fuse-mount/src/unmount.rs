//! Unmounting, which is done by a separate process.
//!
//! The kernel makes requests while it unmounts a file system or writes back what programs have changed in its cache. A
//! thread of the mount's process that waits for that inside the kernel cannot be killed, and while it exists the
//! connection stays open: nothing would ever end its wait once the threads that answer the requests are gone. A child
//! process does not hold the connection open. When the process of the mount ends, however it ends, the kernel breaks
//! the connection and the child continues.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::guard;
use crate::mount_table::{MOUNT_TYPE, MountEntry, canonical, mounted_besides, mounted_on, mounts};

/// The environment variable that passes the device of the mount to the child.
const DEVICE_VARIABLE: &str = "HARVESTFS_UNMOUNT_DEVICE";
/// The child's output if programs still use the file system.
const IN_USE: &str = "in use";
/// A mount that does not respond within this time hangs, and is not dead.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// How often further mounts are looked for: programs may mount more in the meantime.
const ATTEMPTS: usize = 3;

/// How a mount was unmounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmounted {
    /// No program used it.
    Entirely,
    /// It was detached while programs use it; it works for them until its process ends.
    InUse,
}

/// Checks whether this process is a child of a mount's process. A program that mounts has to call this before anything
/// else: if the result is not `None`, the process has done its job, successfully or not.
#[must_use]
pub fn asked_by_mount() -> Option<bool> {
    if let Some(done) = guard::asked() {
        return Some(done);
    }
    let device = std::env::var(DEVICE_VARIABLE).ok()?;
    // The mount may have ended in the meantime: this continues without a reader.
    Some(match unmount_device(&device) {
        Ok(Unmounted::Entirely) => true,
        Ok(Unmounted::InUse) => {
            let _ = writeln!(io::stdout(), "{IN_USE}");
            true
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            false
        }
    })
}

/// Unmounts by means of a child, after writing back what programs changed.
pub(crate) async fn by_child(device: &str) -> io::Result<Unmounted> {
    // The running program, even if its file has been replaced in the meantime.
    let output = tokio::process::Command::new("/proc/self/exe")
        .env(DEVICE_VARIABLE, device)
        .current_dir("/")
        // A second Ctrl-C must reach the mount only: it is then this child that unmounts.
        .process_group(0)
        .stdin(Stdio::null())
        .output()
        .await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let said = text(&output.stderr);
    if !output.status.success() {
        return Err(io::Error::other(said));
    }
    for line in said.lines() {
        tracing::warn!("{line}");
    }
    Ok(if text(&output.stdout) == IN_USE {
        Unmounted::InUse
    } else {
        Unmounted::Entirely
    })
}

fn unmount_device(device: &str) -> io::Result<Unmounted> {
    let all = mounts()?;
    let Some(first) = first_of(&all, device) else {
        // Another process has unmounted it.
        return Ok(Unmounted::Entirely);
    };
    let others = unmount_others(first)?;
    let all = mounts()?;
    // It was removed together with another mount, or by another process: its device number may belong to another file
    // system by now.
    if first_of(&all, device) != Some(first) {
        return Ok(others);
    }
    write_back(&all, first);
    let all = mounts()?;
    if first_of(&all, device) != Some(first) {
        return Ok(others);
    }
    let directory = &first.mount_point;
    // Make sure that it is still this mount that would be unmounted.
    if !shows(&all, first) {
        return Err(io::Error::other(format!(
            "{} shows another mount",
            directory.display()
        )));
    }
    let unmounted = unmount_or_detach(directory)?;
    Ok(match others {
        Unmounted::Entirely => unmounted,
        // The file system remains, and so does its connection to the kernel.
        Unmounted::InUse => Unmounted::InUse,
    })
}

/// The first mount of a device, from which its other mounts were made.
fn first_of<'a>(mounts: &'a [MountEntry], device: &str) -> Option<&'a MountEntry> {
    mounts.iter().find(|it| it.device == device)
}

/// Whether the topmost mount at a mount's directory has the same device.
fn shows(mounts: &[MountEntry], mount: &MountEntry) -> bool {
    mounted_on(mounts, &mount.mount_point).is_some_and(|top| top.device == mount.device)
}

/// Writes back the changes that the kernel keeps for a file system in use until programs close its files. An error at
/// this point still reaches a program that syncs or closes; after the unmount, it reaches none.
fn write_back(mounts: &[MountEntry], mount: &MountEntry) {
    // A mount on top of it may hang.
    if !shows(mounts, mount) {
        return;
    }
    let written_back =
        File::open(&mount.mount_point).and_then(|root| Ok(rustix::fs::syncfs(root.as_fd())?));
    if let Err(error) = written_back {
        let _ = writeln!(io::stderr(), "cannot write back everything: {error}");
    }
}

/// Unmounts mounts in or over a file system, and its further mounts: while one exists, unmounting the first mount
/// would not end the file system. The first mount stays, so that its device number is not reused in the meantime,
/// unless the kernel removes it together with another one, as it does where mounts propagate.
fn unmount_others(first: &MountEntry) -> io::Result<Unmounted> {
    let device = &first.device;
    let mut unmounted = Unmounted::Entirely;
    let mut failed = Vec::new();
    for _ in 0..ATTEMPTS {
        let all = mounts()?;
        let others = mounted_besides(&all, device);
        let is_gone = first_of(&all, device) != Some(first);
        if is_gone && !failed.is_empty() {
            break;
        }
        // If the first mount is gone, other mounts with its device are not ours.
        if is_gone || others.is_empty() {
            return Ok(unmounted);
        }
        failed.clear();
        for other in others {
            let directory = &other.mount_point;
            let now = mounts()?;
            // It may have been removed together with another one.
            if mounted_on(&now, directory) != Some(other) {
                continue;
            }
            let done = if other.device == *device {
                // The first mount may be removed with it, and with that the programs' changes.
                write_back(&now, other);
                unmount_or_detach(directory)
            } else {
                detach(directory).map(|()| Unmounted::Entirely)
            };
            let shown = directory.display();
            match done {
                Ok(how) => {
                    let _ = writeln!(io::stderr(), "{shown} was unmounted as well");
                    if how == Unmounted::InUse {
                        unmounted = how;
                    }
                }
                // This affects neither the other mounts nor the first one.
                Err(error) => failed.push(format!("cannot unmount {shown}: {error}")),
            }
        }
    }
    for line in failed {
        let _ = writeln!(io::stderr(), "{line}");
    }
    Ok(Unmounted::InUse)
}

/// Unmounts one of our own mounts.
fn unmount_or_detach(directory: &Path) -> io::Result<Unmounted> {
    match unmount(directory, UnmountFlags::empty()) {
        Ok(()) => Ok(Unmounted::Entirely),
        Err(Errno::BUSY) => detach(directory).map(|()| Unmounted::InUse),
        Err(Errno::PERM) => match fusermount("-u", directory) {
            Ok(()) => Ok(Unmounted::Entirely),
            Err(_) => detach(directory).map(|()| Unmounted::InUse),
        },
        Err(error) => Err(error.into()),
    }
}

fn detach(directory: &Path) -> io::Result<()> {
    match unmount(directory, UnmountFlags::DETACH) {
        Err(Errno::PERM) => fusermount("-uz", directory),
        done => Ok(done?),
    }
}

/// Runs `fusermount3`, which users other than root need.
fn fusermount(option: &str, directory: &Path) -> io::Result<()> {
    let output = Command::new("fusermount3")
        .args([OsStr::new(option), OsStr::new("-q"), OsStr::new("--")])
        .arg(directory)
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        Ok(())
    } else {
        let said = String::from_utf8_lossy(&output.stderr);
        Err(io::Error::other(format!("fusermount3: {}", said.trim())))
    }
}

/// Unmounts a HarvestFS whose process was killed: such a mount remains, and answers that it is not connected. Anything
/// else is left alone, even where the dead one is bound elsewhere: nothing will be mounted there again, and programs
/// would write to the local directory without an error.
///
/// # Errors
/// If there is one that cannot be unmounted, or that hangs.
pub fn remove_dead(directory: &Path) -> io::Result<()> {
    let directory = match canonical(directory) {
        // Nothing is mounted below a directory that does not exist.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        directory => directory?,
    };
    loop {
        let all = mounts()?;
        let dead = match mounted_on(&all, &directory) {
            Some(mount) if mount.kind == MOUNT_TYPE => &mount.device,
            _ => return Ok(()),
        };
        if asked(&directory)? != Err(Errno::NOTCONN) {
            return Ok(());
        }
        // It may have been unmounted in the meantime, and what was below it is not ours to detach.
        if mounted_on(&mounts()?, &directory).is_none_or(|it| it.device != *dead) {
            continue;
        }
        // Another process may have unmounted it first.
        if let Err(error) = detach(&directory)
            && mounted_on(&mounts()?, &directory).is_some_and(|it| it.device == *dead)
        {
            return Err(error);
        }
        tracing::info!("the dead mount {} was unmounted", directory.display());
    }
}

/// A mounted file system's answer to a request that the kernel always passes on.
fn asked(directory: &Path) -> io::Result<Result<(), Errno>> {
    let (sender, answers) = mpsc::channel();
    let asked = directory.to_owned();
    // The thread may hang for as long as the mount does.
    thread::spawn(move || sender.send(rustix::fs::statvfs(&asked).map(drop)));
    answers.recv_timeout(ANSWER_DEADLINE).map_err(|_| {
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!(
                "what is mounted on {} already does not answer: `umount --lazy` it first",
                directory.display()
            ),
        )
    })
}
